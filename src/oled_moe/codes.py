"""Whole numbers in which other tools store weights, taken over into the forms of quantization.py.

Codes and zeros go over as they are; scales too where they are bfloat16, others are rounded to it,
so no weight moves by more than the 2^-8 of itself that rounding weights to bfloat16 takes.

Legend: O outputs, K inputs, G groups of inputs.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from oled_moe.quantization import GROUP_SIZES, Quantized, QuantSpec


class CodesError(Exception):
    """Codes are not what their headers promised; the message ends before what to do."""


class CodeGrid(NamedTuple):
    """What headers say of the codes of a weight.

    `group_size`: neighbouring inputs with one scale, None where all of a row have one;
    `is_symmetric`: zero is the middle of the codes; `scale_dtype`: as scales are stored.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    scale_dtype: torch.dtype


class StoredCodes(NamedTuple):
    """A weight (code - zero) · scale; codes and zeros are counted from the middle of the codes.

    Shapes: codes whole numbers [O, K]; scales [O, G]; zeros [O, G], None where all are 0.
    `group_size` as in `CodeGrid`.
    """

    codes_OK: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None
    group_size: int | None


@dataclass(frozen=True, slots=True)
class StoredForm:
    """The smallest form that keeps codes as they are stored; `rounded`: the dtypes of scales that
    bfloat16 does not hold, by name."""

    spec: QuantSpec
    rounded: tuple[str, ...] = ()

    def within(self, wanted: QuantSpec) -> bool:
        """Whether another form keeps them too."""
        mine, size = self.spec, wanted.group_size
        has_groups = mine.group_size is not None and (size is None or mine.group_size % size != 0)
        return (
            wanted.bits >= mine.bits
            and not has_groups
            and (mine.is_symmetric or not wanted.is_symmetric)
        )

    def widened(self, bits: int) -> QuantSpec:
        """The form of that many bits, no fewer than its own, which keeps them."""
        return replace(self.spec, bits=bits)


def common_form(grids: Collection[CodeGrid]) -> StoredForm | str:
    """The form that keeps the codes of all grids, or in words why none does."""
    bits = max(grid.bits for grid in grids)
    sizes = [grid.group_size for grid in grids if grid.group_size is not None]
    fitting = [size for size in GROUP_SIZES if all(other % size == 0 for other in sizes)]
    if not fitting:
        shown = ", ".join(map(str, sorted(set(sizes))))
        return f"they have groups of {shown}, and forms of packs have {GROUP_SIZES}"
    dtypes = {grid.scale_dtype for grid in grids} - {torch.bfloat16}
    return StoredForm(
        QuantSpec(
            4 if bits <= 4 else 8,
            max(fitting) if sizes else None,
            is_symmetric=all(grid.is_symmetric for grid in grids),
        ),
        tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
    )


def hold(stored: StoredCodes, spec: QuantSpec) -> Quantized:
    """The same codes, scales and zeros in a form.

    Raises: CodesError where the form does not hold them.
    """
    num_inputs = stored.codes_OK.shape[1]
    group_G = torch.arange(spec.num_groups(num_inputs)) * spec.group_length(num_inputs)
    group_G //= stored.group_size or num_inputs
    scales_OG = stored.scales_OG[:, group_G]
    if not bool(scales_OG.isfinite().all()):
        raise CodesError("a scale is not finite")
    zeros_OG = None
    if stored.zeros_OG is not None:
        zeros_OG = _shifted(stored.zeros_OG[:, group_G], spec.middle, 255, "a zero")
        if spec.is_symmetric and not bool((zeros_OG == spec.middle).all()):
            raise CodesError("a zero is not the middle of the codes")
    elif not spec.is_symmetric:
        zeros_OG = torch.full(scales_OG.shape, spec.middle, dtype=torch.uint8)
    return Quantized(
        _shifted(stored.codes_OK, spec.middle, 2**spec.bits - 1, "a code"),
        scales_OG.to(torch.bfloat16),
        None if spec.is_symmetric else zeros_OG,
    )


def _shifted(each: Tensor, middle: int, most: int, what: str) -> Tensor:
    """Counted from the smallest code, uint8. Raises: CodesError for what is no whole number."""
    shifted = each.to(torch.float32) + middle
    if not bool(((shifted >= 0) & (shifted <= most) & (shifted == shifted.round())).all()):
        raise CodesError(f"{what} is no whole number from {-middle} to {most - middle}")
    return shifted.to(torch.uint8)


def rows_of(held: Quantized, rows: slice) -> Quantized:
    """Some outputs of a matrix."""
    zeros_OG = None if held.zeros_OG is None else held.zeros_OG[rows]
    return Quantized(held.codes_OK[rows], held.scales_OG[rows], zeros_OG)
