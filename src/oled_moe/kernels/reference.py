"""The plain form of an expert, which every other kernel is compared with."""

import torch.nn.functional as F
from torch import Tensor

from oled_moe.store import ExpertWeights


def expert_mlp(rows_ND: Tensor, weights: ExpertWeights) -> Tensor:
    """SwiGLU: down(silu(gate(x)) · up(x)).

    Shapes: rows [N, D] -> [N, D], in the dtype of the weights.
    Source: models.md 2.1.
    """
    num_hidden = weights.down.shape[1]
    gate_NF = F.linear(rows_ND, weights.gate_up[:num_hidden])
    up_NF = F.linear(rows_ND, weights.gate_up[num_hidden:])
    return F.linear(F.silu(gate_NF) * up_NF, weights.down)
