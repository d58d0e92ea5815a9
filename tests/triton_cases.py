"""Cases for kernels over slots, and the tests of Triton's in its interpreter.

pytest does not collect this file by itself: test_triton.py runs it in a process in which Triton
interprets, since that is chosen at import.
"""

from typing import get_args

import numpy as np
import pytest
import torch
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from products import product
from torch import Tensor

from oled_moe.kernels import EachExpert, ExpertKernel, reference
from oled_moe.quantization import QuantSpec, quantize
from oled_moe.store import Activation, ExpertLayout, SlotArena
from oled_moe.types import IntArray

# The interpreter cuts bf16 off where hardware rounds, by a last place of every number on the way.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
REFERENCE = EachExpert(reference.expert_mlp)


def random_arena(layout: ExpertLayout, num_slots: int, seed: int = 0) -> SlotArena:
    """Slots of random weights whose padding is NaN."""
    arena = SlotArena.empty(layout, num_slots)
    arena.memory.fill_(0xFF)
    generator = torch.Generator().manual_seed(seed)
    for slot in range(num_slots):
        if layout.quant is not None:
            for index, packed in enumerate(layout.packed_views(arena.slot(slot))):
                shape = layout.intermediate_size, layout.hidden_size
                drawn = torch.randn(shape[::-1] if index == 2 else shape, generator=generator)
                packed.copy_(quantize(drawn * drawn.shape[1] ** -0.5, layout.quant))
            continue
        for matrix in arena.weights(slot):
            drawn = torch.randn(matrix.shape, generator=generator)
            matrix.copy_(drawn * matrix.shape[1] ** -0.5)
    return arena


def ranges(sizes: list[int], *, gap: int = 0) -> tuple[IntArray, IntArray, int]:
    """Starts and ends of consecutive experts, `gap` rows of nobody between, and all rows."""
    steps = np.array(sizes, dtype=np.int64) + gap
    ends = np.cumsum(steps) - gap
    return ends - np.array(sizes), ends, int(steps.sum())


def compute(
    kernel: ExpertKernel, arena: SlotArena, rows_ND: Tensor, slots: IntArray, *pair: IntArray
) -> Tensor:
    out_ND = torch.full_like(rows_ND, float("nan"))
    kernel(arena, rows_ND, out_ND, slots, *pair)
    return out_ND


def check_kernel(
    kernel: ExpertKernel, layout: ExpertLayout, sizes: list[int], *, gap: int = 0, seed: int = 0
) -> None:
    arena = random_arena(layout, len(sizes) + 3, seed)
    random = np.random.default_rng(seed)
    slots = random.permutation(len(arena))[: len(sizes)]
    starts, ends, num_rows = ranges(sizes, gap=gap)
    generator = torch.Generator().manual_seed(seed)
    rows_ND = torch.randn(num_rows, layout.hidden_size, generator=generator).to(layout.dtype)
    found = compute(kernel, arena, rows_ND, slots, starts, ends)
    expected = compute(REFERENCE, arena, rows_ND, slots, starts, ends)
    tolerance = TOLERANCE[layout.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def triton_kernel() -> ExpertKernel:
    from oled_moe.kernels.triton_experts import TritonExperts

    return TritonExperts(lambda tensor: tensor)


@pytest.mark.parametrize(
    "sizes, dtype, activation",
    product([(64, 32), (33, 17), (200, 72)], list(TOLERANCE), get_args(Activation)),
)
def test_agrees_with_the_reference(
    sizes: tuple[int, int], dtype: torch.dtype, activation: Activation
) -> None:
    layout = ExpertLayout(*sizes, dtype, activation)
    check_kernel(triton_kernel(), layout, [1, 2, 40, 3, 16, 17], gap=2)


@bounded(12)
@given(
    sizes=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    hidden=st.integers(1, 80),
    width=st.integers(1, 80),
    seed=st.integers(0, 99),
)
def test_for_any_shape(sizes: list[int], hidden: int, width: int, seed: int) -> None:
    layout = ExpertLayout(hidden, width, torch.float32)
    check_kernel(triton_kernel(), layout, sizes, seed=seed)


@pytest.mark.parametrize(
    "form, dtype, activation",
    product(
        ("int8-row", "int8-g64-asym", "int4-g32", "int4-g128-asym"),
        list(TOLERANCE),
        get_args(Activation),
    ),
)
def test_quantised_agrees_with_the_reference(
    form: str, dtype: torch.dtype, activation: Activation
) -> None:
    layout = ExpertLayout(150, 40, dtype, activation, QuantSpec.parse(form))
    check_kernel(triton_kernel(), layout, [1, 17], gap=2)


@bounded(8)
@given(
    spec=st.builds(
        QuantSpec, st.sampled_from([4, 8]), st.sampled_from([None, 32, 64, 128]), st.booleans()
    ),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    hidden=st.integers(1, 150),
    width=st.integers(1, 80),
    seed=st.integers(0, 99),
)
def test_quantised_for_any_shape(
    spec: QuantSpec, sizes: list[int], hidden: int, width: int, seed: int
) -> None:
    layout = ExpertLayout(hidden, width, torch.float32, quant=spec)
    check_kernel(triton_kernel(), layout, sizes, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_company(dtype: torch.dtype) -> None:
    """An expert alone, among others, in another order: the same bits."""
    layout, kernel = ExpertLayout(48, 24, dtype), triton_kernel()
    arena = random_arena(layout, 6)
    sizes = [5, 70, 1, 33, 16]
    slots = np.array([4, 0, 5, 2, 3])
    starts, ends, num_rows = ranges(sizes)
    rows_ND = torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = compute(kernel, arena, rows_ND, slots, starts, ends)
    turned = compute(kernel, arena, rows_ND, slots[::-1], starts[::-1], ends[::-1])
    assert torch.equal(together, turned)
    for index in range(len(sizes)):
        one = slice(index, index + 1)
        alone = compute(kernel, arena, rows_ND, slots[one], starts[one], ends[one])
        rows = slice(int(starts[index]), int(ends[index]))
        assert torch.equal(alone[rows], together[rows])
        assert alone.isnan().all(dim=1).sum() == num_rows - sizes[index]


def test_shows_a_poisoned_slot() -> None:
    layout = ExpertLayout(32, 16, torch.float32)
    arena = random_arena(layout, 2)
    arena.slot(1).fill_(0xFF)
    starts, ends, num_rows = ranges([3, 4])
    out_ND = compute(
        triton_kernel(), arena, torch.ones(num_rows, 32), np.array([0, 1]), starts, ends
    )
    assert out_ND[:3].isfinite().all() and out_ND[3:].isnan().all()
