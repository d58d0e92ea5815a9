"""Experts on the CPU: native code that streams weights at the speed of memory, torch for the rest.

Which of the two computes an expert is looked up by its rows, shape and dtype, in a table decided at
construction from the instruction set, never from a measurement of the run.

oneDNN, which torch uses for 16-bit products, compiles and keeps a kernel of nearly 1 MiB for every
number of rows it meets. Rows are padded to few sizes, so that a long prompt does not fill memory
with hundreds of them; the size depends on the number of rows and the dtype alone.

Quantised experts are native code's whatever their rows: it decodes weights once for four rows, and
torch has no product that is exact with them.
"""

import sys
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.kernels import quantized
from oled_moe.kernels.native import NativeKernels, native_kernels, worthwhile_threads
from oled_moe.kernels.reference import activate
from oled_moe.store import Activation, ExpertWeights, SlotArena
from oled_moe.types import IntArray

# The most rows for which native code is used, by instruction set. Measured with
# benchmarks/kernels.py: where torch has AVX-512-BF16 it is a few per cent faster from about 100
# rows on, but not on Intel's processors, where native code takes AVX-512 without it; where all
# there is is AVX2, torch has no fast product in bfloat16 at any size.
MAX_NATIVE_ROWS = {"avx512-bf16": 96}
# Of experts so small that torch's calls take longer than their work.
MAX_NATIVE_ROWS_OF_SMALL, SMALL_WEIGHT_BYTES = 256, 2**18


class CpuExpertKernel:
    """An ExpertKernel for host memory; `num_threads` of native code, None for as many as its
    `num_threads` says at each call.

    `native` None leaves everything to torch.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        native: NativeKernels | Literal["auto"] | None = "auto",
    ) -> None:
        self._native = native_kernels() if native == "auto" else native
        self._num_threads = num_threads

    def __call__(
        self,
        arena: SlotArena,
        rows_ND: Tensor,
        out_ND: Tensor,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
    ) -> None:
        """As ExpertKernel says."""
        limit = max_native_rows(self._native, arena.layout.dtype)
        if limit and arena.layout.quant is not None:
            limit = sys.maxsize
        if limit and arena.layout.weight_bytes < SMALL_WEIGHT_BYTES:
            limit = max(limit, MAX_NATIVE_ROWS_OF_SMALL)
        is_native = ends - starts <= limit
        if self._native is not None and is_native.all():
            self._run_native(self._native, arena, rows_ND, out_ND, slots, starts, ends)
            return
        if self._native is not None and is_native.any():
            part = slots[is_native], starts[is_native], ends[is_native]
            self._run_native(self._native, arena, rows_ND, out_ND, *part)
            slots, starts, ends = slots[~is_native], starts[~is_native], ends[~is_native]
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            if start == end:
                continue
            rows = rows_ND[start:end]
            if arena.layout.quant is not None:
                out_ND[start:end] = quantized.expert_mlp(rows, arena.layout, arena.slot(slot))
            else:
                out_ND[start:end] = expert_mlp(rows, arena.weights(slot), arena.layout.activation)

    def _run_native(
        self,
        native: NativeKernels,
        arena: SlotArena,
        rows_ND: Tensor,
        out_ND: Tensor,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
    ) -> None:
        most = native.num_threads if self._num_threads is None else self._num_threads
        num_bytes = len(slots) * arena.layout.weight_bytes
        num_threads = worthwhile_threads(
            num_bytes, most, (ends - starts).sum() / max(1, len(slots))
        )
        native.experts(arena, rows_ND, out_ND, slots, starts, ends, num_threads)


def max_native_rows(native: NativeKernels | None, dtype: torch.dtype) -> int:
    """The most rows for which native code serves; 0 where it never does."""
    if native is None or dtype != torch.bfloat16:
        return 0
    return MAX_NATIVE_ROWS.get(native.isa, sys.maxsize)


def expert_mlp(rows_ND: Tensor, weights: ExpertWeights, activation: Activation = "silu") -> Tensor:
    """A gated MLP through torch, with gate and up in one matrix.

    Shapes: rows [N, D] -> [N, D], in the dtype of the weights.
    """
    num_rows = len(rows_ND)
    if rows_ND.dtype == torch.float32:
        return _mlp(rows_ND, weights, activation)
    num_padding = padded_rows(num_rows) - num_rows
    if num_padding:
        rows_ND = F.pad(rows_ND, (0, 0, 0, num_padding))
    return _mlp(rows_ND, weights, activation)[:num_rows]


def padded_rows(num_rows: int) -> int:
    """The size that `num_rows` are padded to: below 16 a power of two, then ever coarser steps.

    Up to 16 rows cost what one does, reading the weights; beyond, padding adds at most an eighth.
    """
    if num_rows <= 16:
        return 1 << (num_rows - 1).bit_length()
    step = 16 if num_rows <= 128 else 64 if num_rows <= 512 else 256
    return -(-num_rows // step) * step


def _mlp(rows_ND: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    gate_NF, up_NF = F.linear(rows_ND, weights.gate_up).chunk(2, dim=-1)
    return F.linear(activate(gate_NF, activation).mul_(up_NF), weights.down)
