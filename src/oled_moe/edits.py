"""Deleting and inserting positions of a block: where everything goes, as plain arrays.

A block keeps its length. Legend: B positions of the block.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from oled_moe.types import BoolArray, IntArray

# Source of a position that nothing moved to.
NEW = -1


def edit_sources(
    written_ids: IntArray, is_prompt: BoolArray, *, delete_id: int, split_id: int
) -> IntArray:
    """For each position after an edit the one before it whose content it takes, NEW for a mask.

    A position that holds `delete_id` goes, and what is behind it moves left; one that holds
    `split_id` keeps its content from before and gets a new mask in front of it, and what is behind
    it moves right. The end of the block is filled with masks, or falls off, masked or not. Ids in
    the prompt mean nothing. Shapes: [B] each.
    Source: the scan of LLaDA2.2's own `generate`, as described by FLX-OSS/FluxServe
    (development guide, section 4) and sgl-project/sglang pull request 31773.
    """
    sources: list[int] = []
    for place, (token_id, is_fixed) in enumerate(zip(written_ids, is_prompt, strict=True)):
        if is_fixed or token_id not in (delete_id, split_id):
            sources.append(place)
        elif token_id == split_id:
            sources += [NEW, place]
    num_missing = max(0, len(written_ids) - len(sources))
    return np.array((sources + [NEW] * num_missing)[: len(written_ids)], dtype=np.int64)


def moved(values: npt.NDArray[Any], sources: IntArray, fill: object) -> npt.NDArray[Any]:
    """Values [B] at their new places, `fill` where nothing moved to."""
    found = values[sources]
    found[sources == NEW] = fill
    return found
