"""Kernels agree with the reference; native code gives the same bits however work is divided."""

import logging
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st

from oled_moe.errors import MissingDependencyError
from oled_moe.kernels import KERNELS, native, reference
from oled_moe.kernels.cpu import MAX_NATIVE_ROWS, CpuExpertKernel, max_native_rows, padded_rows
from oled_moe.kernels.linear import head_logits, linear
from oled_moe.kernels.native import ISAS, NativeKernels
from oled_moe.store import Activation, ExpertLayout, ExpertWeights, SlotArena

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
BF16_STEP = 2.0**-8


def isas_here() -> list[str]:
    found = []
    for isa in ISAS:
        try:
            NativeKernels(isa)
        except MissingDependencyError:
            continue
        found.append(isa)
    return found


# Empty where the extension was not built: then torch is what is tested.
HERE = isas_here()
needs_native = pytest.mark.skipif(not HERE, reason="the native kernels were not built")
each_isa = pytest.mark.parametrize("isa", HERE or [pytest.param("none", marks=needs_native)])


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def arena_of(
    hidden: int,
    width: int,
    num_slots: int,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    activation: Activation = "silu",
) -> SlotArena:
    arena = SlotArena.empty(ExpertLayout(hidden, width, dtype, activation), num_slots)
    generator = torch.Generator().manual_seed(seed)
    for slot in range(num_slots):
        weights = arena.weights(slot)
        weights.gate_up.copy_(draw(generator, 2 * width, hidden))
        weights.down.copy_(draw(generator, hidden, width))
    return arena


def rows_of(num_rows: int, hidden: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(num_rows, hidden, generator=generator)).to(torch.bfloat16)


def run(kernels: NativeKernels, arena: SlotArena, rows, slots, starts, ends, num_threads=1):
    out = torch.full_like(rows, 7.0)
    places = (np.array(each, dtype=np.int64) for each in (slots, starts, ends))
    kernels.experts(arena, rows, out, *places, num_threads)
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def check_near(
    found: torch.Tensor,
    rows: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation = "silu",
) -> None:
    """Within what rounding the hidden rows and the result to bfloat16 can do, and no more."""
    gate, up = F.linear(rows.double(), weights.gate_up.double()).chunk(2, dim=-1)
    hidden, down = reference.activate(gate, activation) * up, weights.down.double()
    expected = F.linear(hidden, down)
    bound = BF16_STEP * (F.linear(hidden.abs(), down.abs()) + expected.abs()) + 1e-6
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("name", sorted(KERNELS))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 16, 17, 31, 130])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_kernels_agree_with_the_reference(
    name: str, dtype: torch.dtype, num_rows: int, activation: Activation
) -> None:
    wide = arena_of(96, 40, 2, torch.float32, seed=num_rows)
    rows = draw(torch.Generator().manual_seed(num_rows), num_rows + 5, 96)
    narrow = SlotArena.empty(ExpertLayout(96, 40, dtype, activation), 2)
    for slot in range(2):
        for target, source in zip(narrow.weights(slot), wide.weights(slot), strict=True):
            target.copy_(source)
    out = torch.zeros(num_rows + 5, 96, dtype=dtype)
    starts, ends = np.array([0, num_rows]), np.array([num_rows, num_rows + 5])
    KERNELS[name](None)(narrow, rows.to(dtype), out, np.array([1, 0]), starts, ends)
    expected = torch.cat(
        (
            reference.expert_mlp(rows[:num_rows], wide.weights(1), activation),
            reference.expert_mlp(rows[num_rows:], wide.weights(0), activation),
        )
    )
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=0)


def test_rows_are_padded_to_few_sizes() -> None:
    sizes = [padded_rows(n) for n in range(1, 2049)]
    assert all(n <= size for n, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 32
    beyond = [(n, size) for n, size in enumerate(sizes, start=1) if n > 16]
    assert all(size - n < max(16, n / 2) for n, size in beyond)
    assert all(padded_rows(size) == size for size in sizes)


@each_isa
@bounded(40)
@given(
    hidden=st.integers(1, 150),
    width=st.integers(1, 150),
    counts=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    num_threads=st.integers(1, 4),
    gap=st.integers(0, 2),
    seed=st.integers(0, 99),
    activation=st.sampled_from(get_args(Activation)),
)
def test_any_shape_is_near_float64(
    isa: str,
    hidden: int,
    width: int,
    counts: list[int],
    num_threads: int,
    gap: int,
    seed: int,
    activation: Activation,
) -> None:
    arena = arena_of(hidden, width, len(counts), seed=seed, activation=activation)
    ends = np.cumsum([count + gap for count in counts])
    starts = ends - np.array(counts)
    rows = rows_of(int(ends[-1]), hidden, seed)
    slots = np.random.default_rng(seed).permutation(len(counts))
    out = run(NativeKernels(isa), arena, rows, slots, starts, ends, num_threads)
    is_written = torch.zeros(len(rows), dtype=torch.bool)
    for slot, start, end in zip(slots, starts, ends, strict=True):
        check_near(out[start:end], rows[start:end], arena.weights(slot), activation)
        is_written[start:end] = True
    assert (out[~is_written] == 7.0).all()


@each_isa
def test_bits_depend_on_nothing_but_row_and_weights(isa: str) -> None:
    """Threads, the company in a call, the order of groups and the number of rows change nothing."""
    kernels = NativeKernels(isa)
    # Large enough for several tasks an expert.
    arena, rows = arena_of(1024, 384, 4), rows_of(90, 1024)
    groups = ([2, 0, 3, 1], [0, 1, 8, 20], [1, 8, 20, 90])
    together = run(kernels, arena, rows, *groups)
    for num_threads in (2, 3, 5):
        assert torch.equal(bits(run(kernels, arena, rows, *groups, num_threads)), bits(together))
    backwards = run(kernels, arena, rows, *(each[::-1] for each in groups), 2)
    assert torch.equal(bits(backwards), bits(together))
    for slot, start, end in zip(*groups, strict=True):
        alone = run(kernels, arena, rows, [slot], [start], [end], 2)
        assert torch.equal(bits(alone[start:end]), bits(together[start:end]))
    for row in (20, 25, 57, 89):
        single = run(kernels, arena, rows, [1], [row], [row + 1])
        assert torch.equal(bits(single[row]), bits(together[row]))


@each_isa
def test_more_rows_than_are_laid_out_at_once(isa: str) -> None:
    kernels, arena, rows = NativeKernels(isa), arena_of(80, 72, 1), rows_of(333, 80)
    out = run(kernels, arena, rows, [0], [0], [333], 2)
    check_near(out, rows, arena.weights(0))
    last = run(kernels, arena, rows, [0], [332], [333])
    assert torch.equal(bits(out[332]), bits(last[332]))


@each_isa
def test_rounds_when_hidden_rows_do_not_fit_at_once(isa: str) -> None:
    """Wide and many: 8 MiB of hidden rows make several rounds of one call."""
    arena, rows = arena_of(8, 30_000, 3), rows_of(300, 8)
    out = run(NativeKernels(isa), arena, rows, [0, 1, 2], [0, 130, 200], [130, 200, 300], 2)
    for slot, start, end in ((0, 0, 130), (1, 130, 200), (2, 200, 300)):
        check_near(out[start:end], rows[start:end], arena.weights(slot))


@each_isa
def test_nothing_to_do(isa: str) -> None:
    arena, rows = arena_of(40, 24, 1), rows_of(2, 40)
    assert (run(NativeKernels(isa), arena, rows, [], [], []) == 7.0).all()
    assert (run(NativeKernels(isa), arena, rows, [0], [1], [1]) == 7.0).all()


@each_isa
def test_nan_and_infinity_show(isa: str) -> None:
    kernels, arena, rows = NativeKernels(isa), arena_of(70, 50, 4), rows_of(9, 70)
    clean = run(kernels, arena, rows, [0, 1, 2, 3], [0, 2, 4, 6], [2, 4, 6, 9])
    assert clean.isfinite().all()
    # A freed slot, poisoned, next to one where the last number of one matrix is.
    arena.weights(0).gate_up.fill_(float("nan"))
    arena.weights(1).down[69, 49] = float("nan")
    arena.weights(2).gate_up[10, 69] = float("inf")
    rows[7, 69] = float("nan")
    out = run(kernels, arena, rows, [0, 1, 2, 3], [0, 2, 4, 6], [2, 4, 6, 9])
    assert out[:2].isnan().all()
    assert out[2:4, 69].isnan().all() and torch.equal(out[2:4, :69], clean[2:4, :69])
    assert not out[4:6].isfinite().any()
    assert out[7].isnan().all()
    assert torch.equal(out[[6, 8]], clean[[6, 8]])


@each_isa
def test_tiny_numbers_are_computed_as_zero_and_only_there(isa: str) -> None:
    arena, kernels = arena_of(32, 32, 1), NativeKernels(isa)
    tiny = torch.full((2, 32), 2.0**-130, dtype=torch.bfloat16)
    arena.slot(0).view(torch.bfloat16).fill_(2.0**60)
    out = run(kernels, arena, tiny, [0], [0], [2])
    assert platform.machine() != "x86_64" or not out.any()
    # The thread that called still has them.
    assert (tiny.float() / 2).all()


@each_isa
def test_calls_from_several_threads(isa: str) -> None:
    """Who finds the workers busy computes alone, and gets the same."""
    kernels, arena, rows = NativeKernels(isa), arena_of(512, 256, 8), rows_of(40, 512)
    starts = np.arange(0, 40, 5)
    groups = (np.arange(8), starts, starts + 5)
    expected = run(kernels, arena, rows, *groups)
    with ThreadPoolExecutor(4) as executor:
        found = list(
            executor.map(lambda _: run(kernels, arena, rows, *groups, 2), range(24), timeout=60)
        )
    assert all(torch.equal(bits(out), bits(expected)) for out in found)


@each_isa
def test_matrices_at_odd_addresses(isa: str) -> None:
    """Checkpoint tensors begin anywhere; native code asks for the alignment of a number."""
    storage = torch.zeros(1 + 50 * 67, dtype=torch.bfloat16)
    weight = storage[1:].view(50, 67)
    weight.copy_(draw(torch.Generator().manual_seed(3), 50, 67))
    rows = rows_of(5, 67)
    out = torch.empty(5, 50)
    NativeKernels(isa).linear(rows, weight, None, out, 2)
    expected = F.linear(rows.double(), weight.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@each_isa
@bounded(40)
@given(
    num_rows=st.integers(0, 130),
    num_inputs=st.integers(1, 200),
    num_outputs=st.integers(1, 200),
    has_bias=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_linear_is_near_float64(
    isa: str, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool, num_threads: int
) -> None:
    kernels = NativeKernels(isa)
    generator = torch.Generator().manual_seed(num_inputs)
    weight = draw(generator, num_outputs, num_inputs).to(torch.bfloat16)
    bias = torch.randn(num_outputs, generator=generator).to(torch.bfloat16) if has_bias else None
    rows = rows_of(num_rows, num_inputs)
    wide = torch.empty(num_rows, num_outputs)
    narrow = torch.empty(num_rows, num_outputs, dtype=torch.bfloat16)
    kernels.linear(rows, weight, bias, wide, num_threads)
    kernels.linear(rows, weight, bias, narrow, 1)
    expected = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(wide.double(), expected, atol=1e-4, rtol=1e-5)
    # The two differ by one rounding, and all of them alike.
    assert torch.equal(bits(narrow), bits(wide.to(torch.bfloat16)))


def test_threads_are_for_work_not_for_bytes() -> None:
    """A small matrix is worth a second thread once many rows make it much work."""
    small, large = 64 * 1024, 1024 * 1024
    assert native.worthwhile_threads(small, 2) == native.worthwhile_threads(small, 2, 32) == 1
    assert native.worthwhile_threads(small, 2, 256) == 2
    assert native.worthwhile_threads(large, 2) == native.worthwhile_threads(large, 2, 0.5) == 2
    assert native.worthwhile_threads(large, 1, 256) == 1


@each_isa
def test_rounding_of_special_values(isa: str) -> None:
    values = [0.0, -0.0, 1.0, 3.0e38, 3.4e38, float("inf"), -float("inf"), float("nan")]
    rows = torch.tensor(values).to(torch.bfloat16)[:, None]
    out = torch.empty(len(values), 1, dtype=torch.bfloat16)
    NativeKernels(isa).linear(rows, torch.ones(1, 1, dtype=torch.bfloat16), None, out, 1)
    torch.testing.assert_close(out, rows, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_linear_like_torch(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = draw(generator, 90, 70).to(dtype), draw(generator, 90).to(dtype)
    x = rows_of(num_rows, 70).to(dtype)
    expected = F.linear(x.double(), weight.double(), bias.double())
    found = linear(x, weight, bias)
    assert found.dtype == dtype
    scale = expected.abs().max().item()
    torch.testing.assert_close(
        found.double(), expected, atol=TOLERANCE[dtype] * scale, rtol=TOLERANCE[dtype]
    )
    # Of several leading dimensions, and of a view that is not contiguous.
    assert linear(x[:, None], weight).shape == (num_rows, 1, 90)
    torch.testing.assert_close(linear(x.T.contiguous().T, weight, bias), found)
    logits = head_logits(x, weight)
    assert logits.dtype == torch.float32 and logits.shape == (num_rows, 90)
    torch.testing.assert_close(
        logits, F.linear(x, weight).float(), atol=TOLERANCE[dtype] * scale, rtol=TOLERANCE[dtype]
    )


def test_linear_leaves_gradients_to_torch() -> None:
    x = rows_of(2, 8).requires_grad_()
    assert linear(x, rows_of(3, 8)).requires_grad
    with torch.inference_mode():
        assert not linear(x, rows_of(3, 8)).requires_grad


@pytest.mark.parametrize("uses_native", [pytest.param(True, marks=needs_native), False])
def test_few_and_many_rows_share_a_call(uses_native: bool) -> None:
    native_kernels = NativeKernels(HERE[-1]) if uses_native else None
    kernel = CpuExpertKernel(2, native=native_kernels)
    arena, rows = arena_of(96, 64, 3), rows_of(260, 96)
    out = torch.full_like(rows, 7.0)
    starts, ends = np.array([0, 3, 250]), np.array([3, 203, 250])
    kernel(arena, rows, out, np.array([2, 0, 1]), starts, ends)
    for slot, start, end in ((2, 0, 3), (0, 3, 203)):
        expected = reference.expert_mlp(rows[start:end].double(), _double(arena.weights(slot)))
        scale = expected.abs().max().item()
        torch.testing.assert_close(out[start:end].double(), expected, atol=2e-2 * scale, rtol=2e-2)
    assert (out[203:] == 7.0).all()


def _double(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(matrix.double() for matrix in weights))


@needs_native
def test_the_table_looks_at_dtype_and_instruction_set_alone() -> None:
    for isa in HERE:
        kernels = NativeKernels(isa)
        assert max_native_rows(kernels, torch.float32) == 0
        assert max_native_rows(kernels, torch.bfloat16) >= 64
    assert max_native_rows(None, torch.bfloat16) == 0
    assert set(MAX_NATIVE_ROWS) <= set(ISAS)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_the_library_torch_serves_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "_DIRECTORY", tmp_path)
    assert native.native_kernels.__wrapped__() is None
    (line,) = _warnings(caplog)
    assert "were not built" in line and "torch computes" in line and "pip install" in line


@needs_native
def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    version = native.ABI_VERSION
    monkeypatch.setattr(native, "ABI_VERSION", 999)
    with pytest.raises(MissingDependencyError, match=f"version {version}, 999 is needed"):
        NativeKernels()


@needs_native
def test_a_library_of_another_source_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    library = native._find_library()
    shutil.copy(library, tmp_path)
    monkeypatch.setattr(native, "_DIRECTORY", tmp_path)
    NativeKernels()  # no source to compare with
    (tmp_path / "native.c").write_text("int changed;\n")
    assert native.native_kernels.__wrapped__() is None
    (line,) = _warnings(caplog)
    assert "built from another native.c" in line


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(b"not a library")
    with pytest.raises(MissingDependencyError, match="cannot be loaded"):
        NativeKernels(path=path)


@needs_native
def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(MissingDependencyError, match="allowed: generic"):
        NativeKernels("mmx")


@needs_native
def test_a_forked_child_has_workers_of_its_own() -> None:
    program = """
import os, torch
from oled_moe.kernels.native import NativeKernels
kernels = NativeKernels()
weight, x = torch.ones(4096, 512, dtype=torch.bfloat16), torch.ones(2, 512, dtype=torch.bfloat16)
out = torch.zeros(2, 4096)
kernels.linear(x, weight, None, out, 3)
child = os.fork()
out.zero_()
kernels.linear(x, weight, None, out, 3)
assert (out == 512).all()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)
