"""Quantised experts through torch, on any device: weights are made again from their codes, some
outputs at a time, and multiplied in fp32.

Exact to the reference dequantisation, since no weight is rounded; much slower than native code and
Triton, which it stands in for.

Legend: N rows, D hidden size, F hidden size of one expert, O outputs, K inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.kernels.reference import activate
from oled_moe.quantization import PANEL, QuantSpec, dequantize
from oled_moe.store import ExpertLayout, ExpertWeights

# Weights in fp32 at a time, about.
_TILE_WEIGHTS = 2**20


def expert_mlp(rows_ND: Tensor, layout: ExpertLayout, slot: Tensor) -> Tensor:
    """The gated MLP with the quantised expert in a slot, rounded where native code rounds.

    Shapes: rows [N, D] -> [N, D], both in the layout's dtype; slot uint8 [slot_bytes].
    """
    assert layout.quant is not None
    packed, spec = layout.packed_views(slot), layout.quant
    hidden, width = layout.hidden_size, layout.intermediate_size
    rows = rows_ND.float()
    gate_NF = linear(rows, packed.gate, spec, width)
    gated_NF = activate(gate_NF, layout.activation) * linear(rows, packed.up, spec, width)
    act_NF = gated_NF.to(layout.dtype)
    return linear(act_NF.float(), packed.down, spec, hidden).to(layout.dtype)


def linear(rows_NK: Tensor, packed: Tensor, spec: QuantSpec, num_outputs: int) -> Tensor:
    """rows · weightᵀ in fp32. Shapes: rows fp32 [N, K]; packed uint8 [matrix_bytes] -> [N, O]."""
    num_inputs = rows_NK.shape[1]
    panel_bytes = spec.panel_bytes(num_inputs)
    step = max(1, _TILE_WEIGHTS // (PANEL * num_inputs))
    parts = []
    for panel in range(0, -(-num_outputs // PANEL), step):
        count = min(step * PANEL, num_outputs - panel * PANEL)
        num_panels = -(-count // PANEL)
        part = packed[panel * panel_bytes : (panel + num_panels) * panel_bytes]
        parts.append(F.linear(rows_NK, dequantize(part, spec, count, num_inputs)))
    return torch.cat(parts, dim=1)


def dequantized(layout: ExpertLayout, slot: Tensor) -> ExpertWeights:
    """The matrices of a quantised expert in fp32, exact; what every kernel is compared with."""
    assert layout.quant is not None
    gate, up, down = layout.packed_views(slot)
    shape = layout.intermediate_size, layout.hidden_size
    both = [dequantize(each, layout.quant, *shape) for each in (gate, up)]
    return ExpertWeights(torch.cat(both), dequantize(down, layout.quant, *shape[::-1]))
