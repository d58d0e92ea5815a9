"""The plain form of an expert, which every other kernel is compared with."""

import torch.nn.functional as F
from torch import Tensor

from oled_moe.store import Activation, ExpertWeights


def activate(gate: Tensor, activation: Activation) -> Tensor:
    """What experts do to their gate.

    Source: models.md 2.1 for silu; Transformers, `gelu_pytorch_tanh` of its activations, for GELU.
    """
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def expert_mlp(rows_ND: Tensor, weights: ExpertWeights, activation: Activation = "silu") -> Tensor:
    """A gated MLP: down(activation(gate(x)) · up(x)).

    Shapes: rows [N, D] -> [N, D], in the dtype of the weights.
    """
    num_hidden = weights.down.shape[1]
    gate_NF = F.linear(rows_ND, weights.gate_up[:num_hidden])
    up_NF = F.linear(rows_ND, weights.gate_up[num_hidden:])
    return F.linear(activate(gate_NF, activation) * up_NF, weights.down)
