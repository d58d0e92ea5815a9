"""Experts on the CPU through torch, gate and up as one product."""

import torch.nn.functional as F
from torch import Tensor

from oled_moe.store import ExpertWeights


def expert_mlp(rows_ND: Tensor, weights: ExpertWeights) -> Tensor:
    """SwiGLU with gate and up in one matrix.

    Shapes: rows [N, D] -> [N, D], in the dtype of the weights.
    """
    gate_NF, up_NF = F.linear(rows_ND, weights.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate_NF).mul_(up_NF), weights.down)
