"""Quantised experts on the GPU, read where they lie; the launches are triton_experts.py's.

A program computes rows of one expert against a panel of 32 outputs. Codes less their zeros are
whole numbers that bf16 and fp16 hold exactly, so the products are exact; sums over a group are
fp32 and multiplied with the scale there, as native code does it.

Legend: N rows, D hidden size, F hidden size of one expert, K inputs of a matrix.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _product(
    row_starts: tl.tensor,
    is_row: tl.tensor,
    panel: tl.tensor,
    K: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    depth: tl.constexpr,
    widens: tl.constexpr,
) -> tl.tensor:
    """Rows [tile_rows, K] with the panel's outputs, fp32 [tile_rows, 32]."""
    dtype = row_starts.dtype.element_ty
    codes: tl.constexpr = 32 // bits
    header: tl.constexpr = 96 if has_zeros else 64
    group_bytes: tl.constexpr = header + (group + codes - 1) // codes * 128
    lanes = tl.arange(0, 32)
    steps = tl.arange(0, depth)
    total = tl.zeros((tile_rows, 32), dtype=tl.float32)
    for number in range((K + group - 1) // group):
        start = panel + number * group_bytes
        scales = tl.load(start.to(tl.pointer_type(tl.bfloat16)) + lanes).to(tl.float32)
        if has_zeros:
            zeros = tl.load(start + 64 + lanes).to(tl.float32)
        else:
            zeros = tl.full((32,), 1 << (bits - 1), dtype=tl.float32)
        words = (start + header).to(tl.pointer_type(tl.uint32))
        partial = tl.zeros((tile_rows, 32), dtype=tl.float32)
        for first in range(0, group, depth):
            inner = first + steps
            column = number * group + inner
            is_inner = (inner < group) & (column < K)
            x = tl.load(
                row_starts[:, None] + column[None, :],
                is_row[:, None] & is_inner[None, :],
                other=0.0,
            )
            places = (inner // codes)[:, None] * 32 + lanes[None, :]
            word = tl.load(words + places, is_inner[:, None], other=0)
            code = (word >> ((inner % codes) * bits)[:, None]) & ((1 << bits) - 1)
            weights = code.to(tl.float32) - zeros[None, :]
            if widens:
                x = x.to(tl.float32)
            else:
                weights = weights.to(dtype)
            partial = tl.dot(x, weights, partial, input_precision="ieee")
        total += partial * scales[None, :]
    return total


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def gate_up_kernel(
    arena: tl.tensor,
    rows_ND: tl.tensor,
    act_NF: tl.tensor,
    tiles: tl.tensor,
    slot_bytes: tl.constexpr,
    up_offset: tl.constexpr,
    panel_bytes: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    depth: tl.constexpr,
    widens: tl.constexpr,
    is_gelu: tl.constexpr,
) -> None:
    """act = silu(gate · x) · (up · x), or GELU's tanh form in its place; programs are (panels,
    tiles)."""
    dtype = rows_ND.dtype.element_ty
    tile = tiles + tl.program_id(1) * 4
    gate_panel = arena + tl.load(tile) * slot_bytes + tl.program_id(0) * panel_bytes
    row_ids = tl.load(tile + 1) + tl.arange(0, tile_rows)
    is_row = row_ids < tl.load(tile + 2)
    row_starts = rows_ND + row_ids * D
    gate = _product(
        row_starts, is_row, gate_panel, D, bits, has_zeros, group, tile_rows, depth, widens
    )
    up = _product(
        row_starts,
        is_row,
        gate_panel + up_offset,
        D,
        bits,
        has_zeros,
        group,
        tile_rows,
        depth,
        widens,
    )
    # Rounded where triton_experts.py rounds, with its activations.
    gate = gate.to(dtype).to(tl.float32)
    turn = 1.5957691216 * (gate + 0.044715 * gate * gate * gate) if is_gelu else gate
    active = (gate / (1.0 + tl.exp(-turn))).to(dtype).to(tl.float32)
    act = (active * up.to(dtype).to(tl.float32)).to(dtype)
    outputs = tl.program_id(0) * 32 + tl.arange(0, 32)
    targets = act_NF + row_ids[:, None] * F + outputs[None, :]
    tl.store(targets, act, is_row[:, None] & (outputs < F)[None, :])


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def down_kernel(
    arena: tl.tensor,
    act_NF: tl.tensor,
    out_ND: tl.tensor,
    tiles: tl.tensor,
    slot_bytes: tl.constexpr,
    down_offset: tl.constexpr,
    panel_bytes: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    bits: tl.constexpr,
    has_zeros: tl.constexpr,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    depth: tl.constexpr,
    widens: tl.constexpr,
) -> None:
    """out = down · act; programs are (panels, tiles)."""
    dtype = act_NF.dtype.element_ty
    tile = tiles + tl.program_id(1) * 4
    panel = arena + tl.load(tile) * slot_bytes + down_offset + tl.program_id(0) * panel_bytes
    row_ids = tl.load(tile + 1) + tl.arange(0, tile_rows)
    is_row = row_ids < tl.load(tile + 2)
    total = _product(
        act_NF + row_ids * F, is_row, panel, F, bits, has_zeros, group, tile_rows, depth, widens
    )
    outputs = tl.program_id(0) * 32 + tl.arange(0, 32)
    targets = out_ND + row_ids[:, None] * D + outputs[None, :]
    tl.store(targets, total.to(dtype), is_row[:, None] & (outputs < D)[None, :])
