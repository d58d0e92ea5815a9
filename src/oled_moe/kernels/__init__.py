"""Kernels that compute many experts in one call, by name; all agree with `reference`.

The weights lie in the slots of one arena, the rows of each expert follow one another. Which code
computes an expert depends on its rows, shape, dtype and device alone, never on who is resident,
who shares the call, or a measurement of the run: that would make outputs depend on the cache.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from oled_moe.kernels import cpu, grouped, quantized, reference
from oled_moe.store import Activation, ExpertWeights, SlotArena
from oled_moe.types import IntArray

Upload = Callable[[Tensor], Tensor]


class ExpertKernel(Protocol):
    """Computes a group of experts of one layer."""

    def __call__(
        self,
        arena: SlotArena,
        rows_ND: Tensor,
        out_ND: Tensor,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
    ) -> None:
        """For each i: out[starts[i]:ends[i]] = expert in slots[i] of rows[starts[i]:ends[i]].

        Shapes: rows and out [N, D], contiguous, in the layout's dtype, on the arena's device;
        slots, starts and ends int64 [G], ranges disjoint. Mutates: out, those rows.
        """
        ...


class EachExpert:
    """A kernel from a function of one expert's rows; quantised experts go through torch."""

    def __init__(self, mlp: Callable[[Tensor, ExpertWeights, Activation], Tensor]) -> None:
        self._mlp = mlp

    def __call__(
        self,
        arena: SlotArena,
        rows_ND: Tensor,
        out_ND: Tensor,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
    ) -> None:
        activation = arena.layout.activation
        ranges = zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for slot, start, end in ranges:
            rows = rows_ND[start:end]
            if arena.layout.quant is not None:
                out_ND[start:end] = quantized.expert_mlp(rows, arena.layout, arena.slot(slot))
            else:
                out_ND[start:end] = self._mlp(rows, arena.weights(slot), activation)


# Each is built once, with the number of threads it may use (None: what native code is set to).
KERNELS: dict[str, Callable[[int | None], ExpertKernel]] = {
    "reference": lambda _: EachExpert(reference.expert_mlp),
    "cpu": cpu.CpuExpertKernel,
}


def _triton(upload: Upload) -> ExpertKernel:
    from oled_moe.kernels.triton_experts import TritonExperts

    return TritonExperts(upload)


# Kernels for a GPU, each built with what brings a small host tensor to it. Triton is imported only
# where it is asked for.
GPU_KERNELS: dict[str, Callable[[Upload], ExpertKernel]] = {
    "triton": _triton,
    "grouped": grouped.GroupedExperts,
    "each": lambda _: EachExpert(reference.expert_mlp),
}
