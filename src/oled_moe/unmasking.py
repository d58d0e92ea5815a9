"""Which positions of a block become tokens after a forward: plain rules over plain arrays.

An UnmaskingPolicy is asked before each forward whether one is needed, and afterwards told each
position's best token and its probability. Prompt positions never change; the mask token is never
among the tokens offered (`sample`). Every policy ends after a bounded number of forwards.
Legend: B positions of the block, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oled_moe.config import DecodingParams
from oled_moe.errors import OledMoeError
from oled_moe.types import BoolArray, IntArray

ConfidenceArray = npt.NDArray[np.float32]


@dataclass(slots=True)
class BlockState:
    """One block at work. Shapes: all [B]; `is_masked` says what is a hole, whatever the id."""

    token_ids: IntArray
    is_masked: BoolArray
    is_prompt: BoolArray
    num_steps: int = 0
    num_post_steps: int = 0
    is_settled: bool = False

    @classmethod
    def start(cls, prompt_ids: list[int], *, block_length: int, mask_id: int) -> "BlockState":
        """A block whose first positions are prompt and whose others are masked."""
        token_ids = np.full(block_length, mask_id, dtype=np.int64)
        token_ids[: len(prompt_ids)] = prompt_ids
        is_prompt = np.arange(block_length) < len(prompt_ids)
        return cls(token_ids, ~is_prompt, is_prompt)


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """What a forward changed. Shapes: bool [B] each, disjoint."""

    accepted: BoolArray
    edited: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))


class UnmaskingPolicy(Protocol):
    """Drives one block from masks to tokens."""

    def wants_forward(self, state: BlockState) -> bool:
        """Whether the block needs another forward. Mutates: counters of the state."""
        ...

    def update(
        self, state: BlockState, best_ids: IntArray, confidence: ConfidenceArray
    ) -> BlockUpdate:
        """Write what this forward settles. Shapes: [B]. Mutates: the state."""
        ...


def transfer_schedule(block_length: int, steps: int) -> list[int]:
    """How many positions each step accepts at least: B over the steps, the first get the rest.

    Source: models.md 4; golden `decoders/schedules`.
    """
    base, extra = divmod(block_length, steps)
    return [base + (step < extra) for step in range(steps)]


class LowConfidenceUnmaskingPolicy:
    """LLaDA2.0: all masked positions above the threshold, at least the scheduled number.

    Source: released LLaDA2.0 `generate` (models.md 4).
    """

    def __init__(self, params: DecodingParams) -> None:
        self._threshold = params.threshold
        self._schedule = transfer_schedule(params.block_length, params.steps)

    def wants_forward(self, state: BlockState) -> bool:
        return bool(state.is_masked.any()) and state.num_steps < len(self._schedule)

    def update(
        self, state: BlockState, best_ids: IntArray, confidence: ConfidenceArray
    ) -> BlockUpdate:
        accepted = _confident_masks(
            state, confidence, self._threshold, self._schedule[state.num_steps]
        )
        state.token_ids[accepted] = best_ids[accepted]
        state.is_masked[accepted] = False
        state.num_steps += 1
        return BlockUpdate(accepted, np.zeros_like(accepted))


class JointThresholdUnmaskingPolicy:
    """LLaDA2.1: mask-to-token and token-to-token edits, then post-edit steps.

    Source: released LLaDA2.1 `generate` (models.md 5).
    """

    def __init__(self, params: DecodingParams) -> None:
        self._threshold = params.threshold
        self._edit_threshold = params.edit_threshold
        self._num_to_transfer = params.num_to_transfer
        self._max_post_steps = params.max_post_edit_steps

    def wants_forward(self, state: BlockState) -> bool:
        if state.is_settled:
            return False
        if not state.is_masked.any():
            state.num_post_steps += 1
        return state.num_post_steps <= self._max_post_steps

    def update(
        self, state: BlockState, best_ids: IntArray, confidence: ConfidenceArray
    ) -> BlockUpdate:
        had_masks = bool(state.is_masked.any())
        accepted = np.zeros_like(state.is_masked)
        if had_masks:
            accepted = _confident_masks(state, confidence, self._threshold, self._num_to_transfer)
        edited = (
            ~state.is_masked
            & ~state.is_prompt
            & (confidence > self._edit_threshold)
            & (best_ids != state.token_ids)
        )
        changed = accepted | edited
        state.token_ids[changed] = best_ids[changed]
        state.is_masked[accepted] = False
        state.num_steps += 1
        state.is_settled = not had_masks and not edited.any()
        return BlockUpdate(accepted, edited)


def _confident_masks(
    state: BlockState, confidence: ConfidenceArray, threshold: float, num_least: int
) -> BoolArray:
    """Masked positions above the threshold (strictly), else the `num_least` best of them."""
    high: BoolArray = state.is_masked & (confidence > np.float32(threshold))
    if high.sum() >= num_least:
        return high
    masked = state.is_masked.nonzero()[0]
    best = np.argsort(-confidence[masked], kind="stable")[:num_least]
    chosen = np.zeros_like(state.is_masked)
    chosen[masked[best]] = True
    return chosen


UNMASKING: dict[str, Callable[[DecodingParams], UnmaskingPolicy]] = {
    "low_confidence": LowConfidenceUnmaskingPolicy,
    "joint_threshold": JointThresholdUnmaskingPolicy,
}


def sample(
    logits_BV: Tensor, params: DecodingParams, generator: torch.Generator | None
) -> tuple[IntArray, ConfidenceArray]:
    """One token per position, never the mask, and its probability.

    Greedy at temperature 0: the argmax, its probability over the whole vocabulary. Otherwise drawn
    after temperature, top-k and top-p, with the probability under that distribution.

    Shapes: fp32 [B, V] -> int64 [B], float32 [B]. Mutates: logits.
    Raises: OledMoeError for logits that are not finite, which would decode to noise.
    Source: models.md 4, filters; 11.1 and 11.3 for what is not copied.
    """
    # The extremes show any NaN and any overflow in one pass.
    lowest, highest = logits_BV.aminmax()
    if not (lowest.isfinite() and highest.isfinite()):
        raise OledMoeError(
            "the model computed numbers that are not finite; its weights or config.json are "
            "damaged, or the dtype is too narrow: download it again, or try float32"
        )
    if params.temperature == 0:
        # The mask's logit counts in the sum, as in the reference, but cannot win.
        total_B = logits_BV.logsumexp(-1)
        logits_BV[:, params.mask_token_id] = float("-inf")
        best = logits_BV.max(-1)
        return best.indices.numpy(), (best.values - total_B).exp().numpy()
    logits_BV[:, params.mask_token_id] = float("-inf")
    probabilities_BV = filtered_probabilities(
        logits_BV, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
    )
    drawn_B1 = torch.multinomial(probabilities_BV, 1, generator=generator)
    return drawn_B1[:, 0].numpy(), probabilities_BV.gather(1, drawn_B1)[:, 0].numpy()


def filtered_probabilities(
    logits_BV: Tensor, *, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Softmax after temperature, then top-k (ties stay), then top-p (the first always stays).

    Shapes: fp32 [B, V] -> fp32 [B, V].
    """
    # The maximum goes first, so that a tiny temperature cannot overflow; one that is 0 or infinite
    # in the logits' precision would make NaN.
    limits = torch.finfo(logits_BV.dtype)
    temperature = min(max(temperature, limits.tiny), limits.max)
    logits_BV = (logits_BV - logits_BV.max(-1, keepdim=True).values) / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        smallest = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest, float("-inf"))
    if top_p is not None and top_p < 1:
        ranked = logits_BV.sort(dim=-1, descending=True)
        before = ranked.values.softmax(-1).cumsum(-1)
        is_dropped = (before > top_p).roll(1, dims=-1)
        is_dropped[:, 0] = False
        is_dropped = torch.zeros_like(is_dropped).scatter_(1, ranked.indices, is_dropped)
        logits_BV = logits_BV.masked_fill(is_dropped, float("-inf"))
    return logits_BV.softmax(-1)
