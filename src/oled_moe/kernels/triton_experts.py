"""Experts on the GPU, reading their weights where they lie: in slots of an arena, in any order.

Two launches for all experts of a call: gate and up with the activation between them, then down. A
program computes a tile: rows of one expert against some rows of its matrices. Weights are read
once for each tile, and up to 32 rows are one tile. Sums are fp32, rounded where the plain form in
torch rounds. The tile's shape follows from the expert's rows and the dtype alone, and every
output is one sum in a fixed order, so a row's result does not depend on who shares the launch.

Legend: N rows, D hidden size, F hidden size of one expert, G experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from oled_moe.kernels import triton_quantized
from oled_moe.quantization import PANEL
from oled_moe.store import ExpertLayout, SlotArena
from oled_moe.types import IntArray


class TileShape(NamedTuple):
    """How a program is cut: rows of activations, rows of the matrix, and steps along its rows."""

    num_rows: int
    num_outputs: int
    depth: int
    num_warps: int
    num_stages: int


# By bytes of a number, for rows up to `num_rows`; the last also for more rows than that. Chosen to
# fit 99 KiB of shared memory, the least of the GPUs that are compiled for; not tuned on any.
_SHAPES: dict[int, tuple[TileShape, ...]] = {
    2: (TileShape(16, 32, 128, 4, 4), TileShape(32, 32, 128, 4, 3), TileShape(64, 64, 64, 4, 3)),
    4: (TileShape(16, 32, 64, 4, 3), TileShape(32, 32, 64, 4, 3), TileShape(64, 32, 32, 4, 3)),
}


def tile_shapes(dtype: torch.dtype) -> tuple[TileShape, ...]:
    """The shapes in use for a dtype, by ascending number of rows."""
    return _SHAPES[dtype.itemsize]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _gate_up_kernel(
    arena: tl.tensor,
    rows_ND: tl.tensor,
    act_NF: tl.tensor,
    tiles: tl.tensor,
    slot_bytes: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    depth: tl.constexpr,
    widens: tl.constexpr,
    is_gelu: tl.constexpr,
) -> None:
    """act = silu(gate · x) · (up · x), or GELU's tanh form in its place; programs are (outputs,
    tiles).

    `widens`: products of 16-bit numbers are made of fp32.
    """
    dtype = rows_ND.dtype.element_ty
    tile = tiles + tl.program_id(1) * 4
    weights = (arena + tl.load(tile) * slot_bytes).to(tl.pointer_type(dtype))
    row_ids = tl.load(tile + 1) + tl.arange(0, tile_rows)
    is_row = row_ids < tl.load(tile + 2)
    outputs = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    is_output = outputs < F
    steps = tl.arange(0, depth)
    row_starts = rows_ND + row_ids[:, None] * D
    gate_starts = weights + outputs[None, :] * D
    up_starts = weights + (F + outputs[None, :]) * D
    gate = tl.zeros((tile_rows, tile_outputs), dtype=tl.float32)
    up = tl.zeros((tile_rows, tile_outputs), dtype=tl.float32)
    for first in range(0, D, depth):
        inner = first + steps
        is_inner = inner < D
        x = tl.load(row_starts + inner[None, :], is_row[:, None] & is_inner[None, :], other=0.0)
        is_weight = is_inner[:, None] & is_output[None, :]
        gate_weights = tl.load(gate_starts + inner[:, None], is_weight, other=0.0)
        up_weights = tl.load(up_starts + inner[:, None], is_weight, other=0.0)
        if widens:
            x, gate_weights = x.to(tl.float32), gate_weights.to(tl.float32)
            up_weights = up_weights.to(tl.float32)
        gate = tl.dot(x, gate_weights, gate, input_precision="ieee")
        up = tl.dot(x, up_weights, up, input_precision="ieee")
    # Rounded where torch rounds between operations.
    gate = gate.to(dtype).to(tl.float32)
    # 0.5 · (1 + tanh(u)) is the sigmoid of 2u, with u = √(2/π) · (x + 0.044715 · x³).
    turn = 1.5957691216 * (gate + 0.044715 * gate * gate * gate) if is_gelu else gate
    active = (gate / (1.0 + tl.exp(-turn))).to(dtype).to(tl.float32)
    act = (active * up.to(dtype).to(tl.float32)).to(dtype)
    targets = act_NF + row_ids[:, None] * F + outputs[None, :]
    tl.store(targets, act, is_row[:, None] & is_output[None, :])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _down_kernel(
    arena: tl.tensor,
    act_NF: tl.tensor,
    out_ND: tl.tensor,
    tiles: tl.tensor,
    slot_bytes: tl.constexpr,
    down_offset: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    depth: tl.constexpr,
    widens: tl.constexpr,
) -> None:
    """out = down · act; programs are (outputs, tiles)."""
    dtype = act_NF.dtype.element_ty
    tile = tiles + tl.program_id(1) * 4
    weights = (arena + tl.load(tile) * slot_bytes + down_offset).to(tl.pointer_type(dtype))
    row_ids = tl.load(tile + 1) + tl.arange(0, tile_rows)
    is_row = row_ids < tl.load(tile + 2)
    outputs = tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)
    is_output = outputs < D
    steps = tl.arange(0, depth)
    act_starts = act_NF + row_ids[:, None] * F
    weight_starts = weights + outputs[None, :] * F
    total = tl.zeros((tile_rows, tile_outputs), dtype=tl.float32)
    for first in range(0, F, depth):
        inner = first + steps
        is_inner = inner < F
        act = tl.load(act_starts + inner[None, :], is_row[:, None] & is_inner[None, :], other=0.0)
        is_weight = is_inner[:, None] & is_output[None, :]
        down_weights = tl.load(weight_starts + inner[:, None], is_weight, other=0.0)
        if widens:
            act, down_weights = act.to(tl.float32), down_weights.to(tl.float32)
        total = tl.dot(act, down_weights, total, input_precision="ieee")
    targets = out_ND + row_ids[:, None] * D + outputs[None, :]
    tl.store(targets, total.to(dtype), is_row[:, None] & is_output[None, :])


class TritonExperts:
    """Computes a group of experts from their slots (`ExpertKernel`).

    `upload` brings a small host tensor to the device; once for each call.
    """

    def __init__(self, upload: Callable[[Tensor], Tensor]) -> None:
        self._upload = upload
        # Triton's interpreter, for tests without a GPU, cannot multiply bf16.
        self._widens = bool(triton.knobs.runtime.interpret)

    def __call__(
        self,
        arena: SlotArena,
        rows_ND: Tensor,
        out_ND: Tensor,
        slots: IntArray,
        starts: IntArray,
        ends: IntArray,
    ) -> None:
        layout = arena.layout
        D, F = layout.hidden_size, layout.intermediate_size
        shapes = tile_shapes(layout.dtype)
        parts = [tile_table(slots, starts, ends, shapes, index) for index in range(len(shapes))]
        tiles = self._upload(torch.from_numpy(np.concatenate(parts)))
        act_NF = torch.empty((len(rows_ND), F), dtype=rows_ND.dtype, device=rows_ND.device)
        first = 0
        for shape, part in zip(shapes, parts, strict=True):
            if not len(part):
                continue
            own = tiles[first : first + len(part)]
            first += len(part)
            if layout.quant is not None:
                gate_up, down = quantized_sizes(layout, shape, self._widens)
                triton_quantized.gate_up_kernel[(triton.cdiv(F, PANEL), len(part))](
                    arena.memory, rows_ND, act_NF, own, **gate_up
                )
                triton_quantized.down_kernel[(triton.cdiv(D, PANEL), len(part))](
                    arena.memory, act_NF, out_ND, own, **down
                )
                continue
            sizes = {
                "slot_bytes": layout.slot_bytes,
                "D": D,
                "F": F,
                "tile_rows": shape.num_rows,
                "tile_outputs": shape.num_outputs,
                "depth": shape.depth,
                "num_warps": shape.num_warps,
                "num_stages": shape.num_stages,
                "widens": self._widens,
            }
            _gate_up_kernel[(triton.cdiv(F, shape.num_outputs), len(part))](
                arena.memory,
                rows_ND,
                act_NF,
                own,
                is_gelu=layout.activation == "gelu_tanh",
                **sizes,
            )
            _down_kernel[(triton.cdiv(D, shape.num_outputs), len(part))](
                arena.memory, act_NF, out_ND, own, down_offset=layout.down_offset, **sizes
            )


def quantized_sizes(
    layout: ExpertLayout, shape: TileShape, widens: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """The constants of both quantised kernels for a tile shape, of which rows, warps and stages
    count: outputs are a panel, and steps stay within a group."""
    quant = layout.quant
    assert quant is not None
    hidden, width = layout.hidden_size, layout.intermediate_size

    def sizes_for(num_inputs: int) -> dict[str, int]:
        group = quant.group_length(num_inputs)
        return {
            "slot_bytes": layout.slot_bytes,
            "panel_bytes": quant.panel_bytes(num_inputs),
            "D": hidden,
            "F": width,
            "bits": quant.bits,
            "has_zeros": not quant.is_symmetric,
            "group": group,
            "tile_rows": shape.num_rows,
            "depth": 32 if group <= 32 else 64,
            "widens": widens,
            "num_warps": shape.num_warps,
            "num_stages": shape.num_stages,
        }

    return (
        {
            "up_offset": layout.matrix_bytes,
            "is_gelu": layout.activation == "gelu_tanh",
            **sizes_for(hidden),
        },
        {"down_offset": layout.down_offset, **sizes_for(width)},
    )


def tile_table(
    slots: IntArray,
    starts: IntArray,
    ends: IntArray,
    shapes: tuple[TileShape, ...],
    index: int,
) -> IntArray:
    """The tiles of experts whose rows fall to the shape with this index: slot, first row, end, and
    a column of nothing, so that every part of the table is aligned alike: Triton compiles anew for
    another alignment.

    Shapes: slots, starts and ends int64 [G] -> int64 [tiles, 4].
    """
    num_rows = ends - starts
    size = shapes[index].num_rows
    is_own = num_rows > (shapes[index - 1].num_rows if index else 0)
    if index < len(shapes) - 1:
        is_own &= num_rows <= size
    slots, starts, ends = slots[is_own], starts[is_own], ends[is_own]
    num_tiles = -(-(ends - starts) // size)
    if not len(num_tiles) or num_tiles.max() == 1:
        return np.stack((slots, starts, ends, ends), axis=1)
    expert_of = np.repeat(np.arange(len(slots)), num_tiles)
    within = np.arange(len(expert_of)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    firsts = starts[expert_of] + within * size
    lasts = np.minimum(firsts + size, ends[expert_of])
    return np.stack((slots[expert_of], firsts, lasts, lasts), axis=1)
