"""Triton's kernel and grouped_mm against the plain form, without a GPU.

The kernel runs in Triton's interpreter in a process of its own, since that is chosen at import; and
it is compiled ahead of time for the GPUs that matter, which needs none of them.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from triton_cases import check_kernel, ranges

from oled_moe.kernels.grouped import MOST_GROUPS, GroupedExperts, _parts
from oled_moe.quantization import QuantSpec
from oled_moe.store import ExpertLayout

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed; it comes with the dev extra"
)
# The oldest and the newest; those between with --full.
ARCHITECTURES = (80, *(pytest.param(each, marks=pytest.mark.full) for each in (89, 90)), 120)
# Shared memory of one block that every one of them has.
SHARED_BYTES = 99 * 1024


# In Triton's interpreter


@needs_triton
def test_kernel_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    arguments = [str(Path(__file__).parent / "triton_cases.py"), "-p", "no:cacheprovider"]
    if pytestconfig.getoption("--full"):
        arguments.append("--full")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-1000:]


# Compiled ahead of time


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for(architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At LLaDA2-mini's sizes: machine code, fast paths to memory, and no more than there is."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from oled_moe.kernels import triton_experts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        layout = ExpertLayout(2048, 512, dtype)
        shapes = triton_experts.tile_shapes(dtype)
        for shape in shapes if dtype == torch.bfloat16 else shapes[:1]:
            fixed = {
                "slot_bytes": layout.slot_bytes,
                "down_offset": layout.down_offset,
                "D": layout.hidden_size,
                "F": layout.intermediate_size,
                "tile_rows": shape.num_rows,
                "tile_outputs": shape.num_outputs,
                "depth": shape.depth,
                "widens": False,
                # Either activation, of which nothing else depends.
                "is_gelu": shape is shapes[0],
            }
            for kernel in (triton_experts._gate_up_kernel, triton_experts._down_kernel):
                names = kernel.arg_names
                types = {"arena": "*u8", "tiles": "*i64", **dict.fromkeys(fixed, "constexpr")}
                source = ASTSource(
                    kernel,
                    {each: types.get(each, name) for each in names},
                    {each: fixed[each] for each in names if each in fixed},
                    # What torch's allocator promises, and what the launcher finds.
                    {
                        (index,): [["tt.divisibility", 16]]
                        for index, each in enumerate(names)
                        if each not in fixed
                    },
                )
                compiled = triton.compile(
                    source,
                    target=GPUTarget("cuda", architecture, 32),
                    options={"num_warps": shape.num_warps, "num_stages": shape.num_stages},
                )
                assert len(compiled.asm["cubin"]) > 1000
                assert compiled.metadata.shared <= SHARED_BYTES
                text = compiled.asm["ptx"]
                assert f"sm_{architecture}" in text
                widths = re.findall(r"cp\.async[.\w]*shared\.global[^;]*, (0x\w+)", text)
                assert widths and set(widths) == {"0x10"}, "weights are not read 16 bytes at a time"
                if dtype == torch.bfloat16:
                    assert "mma" in text, "the tensor cores are not used"


@needs_triton
@pytest.mark.parametrize("form", ["int8", "int4", "int4-g32-asym"])
def test_quantised_compiles(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At LLaDA2-mini's sizes, for the oldest architecture: no more memory than there is."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from oled_moe.kernels import triton_experts, triton_quantized

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    layout = ExpertLayout(2048, 512, torch.bfloat16, quant=QuantSpec.parse(form))
    shape = triton_experts.tile_shapes(torch.bfloat16)[0]
    kernels = (triton_quantized.gate_up_kernel, triton_quantized.down_kernel)
    sizes = triton_experts.quantized_sizes(layout, shape, widens=False)
    for kernel, fixed in zip(kernels, sizes, strict=True):
        names = kernel.arg_names
        types = {"arena": "*u8", "tiles": "*i64", **dict.fromkeys(fixed, "constexpr")}
        source = ASTSource(
            kernel,
            {each: types.get(each, "*bf16") for each in names},
            {each: fixed[each] for each in names if each in fixed},
            {
                (index,): [["tt.divisibility", 16]]
                for index, each in enumerate(names)
                if each not in fixed
            },
        )
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", 80, 32),
            options={"num_warps": shape.num_warps, "num_stages": shape.num_stages},
        )
        assert compiled.metadata.shared <= SHARED_BYTES
        assert "mma" in compiled.asm["ptx"], "the tensor cores are not used"


@needs_triton
@bounded(40)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20), itemsize=st.sampled_from([2, 4])
)
def test_tiles_cover_every_row_once(sizes: list[int], itemsize: int) -> None:
    from oled_moe.kernels.triton_experts import tile_shapes, tile_table

    shapes = tile_shapes(torch.bfloat16 if itemsize == 2 else torch.float32)
    starts, ends, num_rows = ranges(sizes)
    slots = np.arange(len(sizes))[::-1].copy()
    owner = np.full(num_rows, -1)
    for index, shape in enumerate(shapes):
        for slot, first, end, _ in tile_table(slots, starts, ends, shapes, index).tolist():
            assert 0 < end - first <= shape.num_rows
            assert (owner[first:end] == -1).all()
            owner[first:end] = slot
            # The shape follows from the expert's rows alone.
            size = sizes[len(sizes) - 1 - slot]
            fitting = [i for i, one in enumerate(shapes) if size <= one.num_rows]
            assert index == (fitting or [len(shapes) - 1])[0]
    assert np.array_equal(owner, np.repeat(slots, sizes))


# torch's grouped_mm


@pytest.mark.parametrize("num_slots", [3, 9])
def test_grouped_mm_agrees_with_the_reference(num_slots: int) -> None:
    layout = ExpertLayout(64, 32, torch.bfloat16)
    sizes = [1, 17, 4, 2, 30, 3, 8][:num_slots]
    check_kernel(GroupedExperts(lambda tensor: tensor), layout, sizes, gap=1, seed=num_slots)


def test_grouped_mm_is_called_for_no_more_groups_than_it_takes() -> None:
    slots = np.array([0, 5, MOST_GROUPS - 1, MOST_GROUPS, 5000])
    assert [slots[part].tolist() for part in _parts(slots)] == [
        [0, 5, MOST_GROUPS - 1],
        [MOST_GROUPS],
        [5000],
    ]
