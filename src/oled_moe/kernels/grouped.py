"""Experts through torch's grouped_mm, over the slots of an arena where they lie.

grouped_mm multiplies consecutive rows with consecutive matrices; it takes strides between matrices
but no choice of them. So every slot between the first and the last that is used is a group, most
of them empty, and rows are sorted by slot, which costs a copy of the rows and none of weights.
torch chooses the tiles by the rows of the whole call, so results may depend on who shares it: this
kernel is for comparison and for GPUs without Triton, not for what promises the same bits.

Legend: N rows, D hidden size, F hidden size of one expert, G experts, S slots.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.kernels.reference import activate
from oled_moe.store import SlotArena
from oled_moe.types import IntArray

# torch refuses more groups in one call.
MOST_GROUPS = 1024


class GroupedExperts:
    """Computes a group of experts (`ExpertKernel`); bf16, not quantised, sizes that are multiples
    of 8.

    `upload` brings a small host tensor to the device.
    """

    def __init__(self, upload: Callable[[Tensor], Tensor]) -> None:
        self._upload = upload

    def __call__(
        self,
        arena: SlotArena,
        rows_ND: Tensor,
        out_ND: Tensor,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
    ) -> None:
        order = np.argsort(slots)
        for part in _parts(slots[order]):
            own = order[part]
            self._run(arena, rows_ND, out_ND, slots[own], starts[own], ends[own])

    def _run(
        self,
        arena: SlotArena,
        rows_ND: Tensor,
        out_ND: Tensor,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
    ) -> None:
        """For slots in ascending order, not too far apart."""
        first, last = int(slots[0]), int(slots[-1])
        counts = np.zeros(last - first + 1, dtype=np.int64)
        counts[slots - first] = ends - starts
        group_ends = self._upload(torch.from_numpy(np.cumsum(counts).astype(np.int32)))
        rows = np.concatenate([np.arange(*pair) for pair in zip(starts, ends, strict=True)])
        rows_N = self._upload(torch.from_numpy(rows))
        gate_up_SDF, down_SFD = _matrices(arena, first, len(counts))
        both_NF = F.grouped_mm(rows_ND[rows_N], gate_up_SDF, offs=group_ends)
        gate_NF, up_NF = both_NF.chunk(2, dim=-1)
        act_NF = activate(gate_NF, arena.layout.activation).mul_(up_NF)
        out_ND[rows_N] = F.grouped_mm(act_NF, down_SFD, offs=group_ends)


def _parts(slots: IntArray) -> list[slice]:
    """Cut ascending slots into parts that span no more than `MOST_GROUPS`."""
    parts, start = [], 0
    while start < len(slots):
        end = int(np.searchsorted(slots, slots[start] + MOST_GROUPS))
        parts.append(slice(start, end))
        start = end
    return parts


def _matrices(arena: SlotArena, first: int, num_slots: int) -> tuple[Tensor, Tensor]:
    """Views of consecutive slots: gate and up [S, D, 2F], down [S, F, D]."""
    layout = arena.layout
    assert layout.quant is None
    width, hidden, itemsize = layout.intermediate_size, layout.hidden_size, layout.dtype.itemsize
    numbers = arena.memory.view(-1).view(layout.dtype)
    stride = layout.slot_bytes // itemsize
    start = numbers.storage_offset() + first * stride
    gate_up = numbers.as_strided((num_slots, 2 * width, hidden), (stride, hidden, 1), start)
    down_start = start + layout.down_offset // itemsize
    down = numbers.as_strided((num_slots, hidden, width), (stride, width, 1), down_start)
    return gate_up.transpose(1, 2), down.transpose(1, 2)
