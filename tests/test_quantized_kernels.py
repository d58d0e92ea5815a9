"""Quantised experts: every kernel agrees with the reference dequantisation, and native code gives
the same bits however work is divided."""

from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import HERE, bits, check_near, each_isa, needs_native, rows_of, run
from test_quantization import random_parts

from oled_moe.kernels import KERNELS, quantized
from oled_moe.kernels.cpu import CpuExpertKernel
from oled_moe.kernels.native import NativeKernels
from oled_moe.quantization import GROUP_SIZES, QuantSpec, encode
from oled_moe.store import Activation, ExpertLayout, ExpertWeights, SlotArena

SPECS = st.builds(
    QuantSpec, st.sampled_from([4, 8]), st.sampled_from([None, *GROUP_SIZES]), st.booleans()
)
FORMS = ("int8-row", "int8-g64-asym", "int4-row-asym", "int4-g32", "int4-g64", "int4-g128-asym")


def arena_of(
    spec: QuantSpec,
    hidden: int,
    width: int,
    num_slots: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    activation: Activation = "silu",
) -> SlotArena:
    """Experts of random codes, zeros and scales, of which every one is of another size."""
    layout = ExpertLayout(hidden, width, dtype, activation, spec)
    arena = SlotArena.empty(layout, num_slots)
    arena.memory.fill_(0xFF)  # what is no weight is no number
    for slot in range(num_slots):
        for index, packed in enumerate(layout.packed_views(arena.slot(slot))):
            num_outputs, num_inputs = (hidden, width) if index == 2 else (width, hidden)
            parts = random_parts(spec, num_outputs, num_inputs, 1000 * seed + 3 * slot + index)
            scale = num_inputs**-0.5 / 2**spec.bits
            parts = parts._replace(scales_OG=(parts.scales_OG * scale).to(torch.bfloat16))
            packed.copy_(encode(parts, spec))
    return arena


def weights(arena: SlotArena, slot: int) -> ExpertWeights:
    return quantized.dequantized(arena.layout, arena.slot(slot))


@each_isa
@bounded(60)
@given(
    spec=SPECS,
    hidden=st.integers(1, 300),
    width=st.integers(1, 150),
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 99),
    activation=st.sampled_from(get_args(Activation)),
)
def test_any_shape_is_near_float64(
    isa: str,
    spec: QuantSpec,
    hidden: int,
    width: int,
    counts: list[int],
    num_threads: int,
    seed: int,
    activation: Activation,
) -> None:
    arena = arena_of(spec, hidden, width, len(counts), seed=seed, activation=activation)
    ends = np.cumsum([count + 1 for count in counts])
    starts = ends - np.array(counts)
    rows = rows_of(int(ends[-1]), hidden, seed)
    slots = np.random.default_rng(seed).permutation(len(counts))
    out = run(NativeKernels(isa), arena, rows, slots, starts, ends, num_threads)
    is_written = torch.zeros(len(rows), dtype=torch.bool)
    for slot, start, end in zip(slots, starts, ends, strict=True):
        check_near(out[start:end], rows[start:end], weights(arena, slot), activation)
        is_written[start:end] = True
    assert (out[~is_written] == 7.0).all()


@each_isa
@pytest.mark.parametrize("form", FORMS)
def test_bits_depend_on_nothing_but_row_and_weights(isa: str, form: str) -> None:
    """Threads, the company in a call, the order of groups and the number of rows change nothing."""
    kernels = NativeKernels(isa)
    # Large enough for several tasks an expert.
    arena, rows = arena_of(QuantSpec.parse(form), 1000, 390, 4), rows_of(90, 1000)
    groups = ([2, 0, 3, 1], [0, 1, 8, 20], [1, 8, 20, 90])
    together = run(kernels, arena, rows, *groups)
    for num_threads in (2, 3, 5):
        assert torch.equal(bits(run(kernels, arena, rows, *groups, num_threads)), bits(together))
    backwards = run(kernels, arena, rows, *(each[::-1] for each in groups), 2)
    assert torch.equal(bits(backwards), bits(together))
    for size in (1, 2, 3, 4, 5, 7):
        for row in (20, 57, 83):
            some = run(kernels, arena, rows, [1], [row], [row + size], 2)
            assert torch.equal(bits(some[row : row + size]), bits(together[row : row + size]))
    for slot, start, end in zip(*groups, strict=True):
        check_near(together[start:end], rows[start:end], weights(arena, slot))


@needs_native
def test_no_instruction_set_reads_other_weights() -> None:
    """The same bytes mean the same to all of them, up to the rounding of sums."""
    for form in FORMS:
        arena, rows = arena_of(QuantSpec.parse(form), 333, 77, 1), rows_of(5, 333)
        found = [run(NativeKernels(isa), arena, rows, [0], [0], [5]).float() for isa in HERE]
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=2.0**-6, atol=1e-2)


@each_isa
def test_rounds_when_hidden_rows_do_not_fit_at_once(isa: str) -> None:
    arena, rows = arena_of(QuantSpec.parse("int4"), 8, 30_000, 3), rows_of(300, 8)
    out = run(NativeKernels(isa), arena, rows, [0, 1, 2], [0, 130, 200], [130, 200, 300], 2)
    for slot, start, end in ((0, 0, 130), (1, 130, 200), (2, 200, 300)):
        check_near(out[start:end], rows[start:end], weights(arena, slot))


@each_isa
@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinity_show(isa: str, form: str) -> None:
    kernels, arena = NativeKernels(isa), arena_of(QuantSpec.parse(form), 70, 50, 3)
    rows = rows_of(7, 70)
    groups = ([0, 1, 2], [0, 2, 4], [2, 4, 7])
    clean = run(kernels, arena, rows, *groups)
    assert clean.isfinite().all()
    # A freed slot, poisoned, as the emulated device does it.
    arena.slot(0).fill_(0xFF)
    rows[5, 69] = float("nan")
    rows[6, 0] = float("inf")
    out = run(kernels, arena, rows, *groups)
    assert out[:2].isnan().all()
    assert torch.equal(out[2:5], clean[2:5])
    assert out[5].isnan().all() and not out[6].isfinite().any()


@pytest.mark.parametrize("name", sorted(KERNELS))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, 3, 17, 130])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_kernels_agree_with_the_reference(
    name: str, form: str, num_rows: int, activation: Activation
) -> None:
    spec = QuantSpec.parse(form)
    arena = arena_of(spec, 96, 40, 2, seed=num_rows, activation=activation)
    rows = rows_of(num_rows + 5, 96)
    out = torch.zeros_like(rows)
    starts, ends = np.array([0, num_rows]), np.array([num_rows, num_rows + 5])
    KERNELS[name](None)(arena, rows, out, np.array([1, 0]), starts, ends)
    check_near(out[:num_rows], rows[:num_rows], weights(arena, 1), activation)
    check_near(out[num_rows:], rows[num_rows:], weights(arena, 0), activation)


@bounded(20)
@given(SPECS, st.integers(1, 100), st.integers(1, 150), st.integers(1, 9))
def test_torch_serves_without_native_code(
    spec: QuantSpec, hidden: int, width: int, num_rows: int
) -> None:
    arena, rows = arena_of(spec, hidden, width, 1), rows_of(num_rows, hidden)
    out = torch.empty_like(rows)
    places = np.array([0]), np.array([0]), np.array([num_rows])
    CpuExpertKernel(native=None)(arena, rows, out, *places)
    check_near(out, rows, weights(arena, 0))


def test_torch_serves_float32_activations() -> None:
    arena = arena_of(QuantSpec.parse("int4"), 96, 64, 1, torch.float32)
    rows = rows_of(4, 96).float()
    out = torch.empty_like(rows)
    CpuExpertKernel()(arena, rows, out, np.array([0]), np.array([0]), np.array([4]))
    gate, up = F.linear(rows, weights(arena, 0).gate_up).chunk(2, dim=-1)
    expected = F.linear(F.silu(gate) * up, weights(arena, 0).down)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_torch_makes_few_weights_at_a_time() -> None:
    """A matrix of several tiles, of which the last is neither whole nor a whole panel."""
    spec = QuantSpec.parse("int4-g32-asym")
    parts = random_parts(spec, 2000, 1200, 1)
    packed = encode(parts, spec)
    assert quantized._TILE_WEIGHTS // (32 * 1200) * 32 < 1000
    rows = rows_of(2, 1200).float()
    found = quantized.linear(rows, packed, spec, 2000)
    expected = F.linear(rows, quantized.dequantize(packed, spec, 2000, 1200))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)
