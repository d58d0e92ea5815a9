"""Experts on the CPU through torch, gate and up as one product.

oneDNN, which torch uses for 16-bit products, compiles and keeps a kernel of nearly 1 MiB for every
number of rows it meets. Rows are padded to few sizes, so that a long prompt does not fill memory
with hundreds of them; the size depends on the number of rows and the dtype alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.store import ExpertWeights


def expert_mlp(rows_ND: Tensor, weights: ExpertWeights) -> Tensor:
    """SwiGLU with gate and up in one matrix.

    Shapes: rows [N, D] -> [N, D], in the dtype of the weights.
    """
    num_rows = len(rows_ND)
    if rows_ND.dtype == torch.float32:
        return _mlp(rows_ND, weights)
    num_padding = padded_rows(num_rows) - num_rows
    if num_padding:
        rows_ND = F.pad(rows_ND, (0, 0, 0, num_padding))
    return _mlp(rows_ND, weights)[:num_rows]


def padded_rows(num_rows: int) -> int:
    """The size that `num_rows` are padded to: below 16 a power of two, then ever coarser steps.

    Up to 16 rows cost what one does, reading the weights; beyond, padding adds at most an eighth.
    """
    if num_rows <= 16:
        return 1 << (num_rows - 1).bit_length()
    step = 16 if num_rows <= 128 else 64 if num_rows <= 512 else 256
    return -(-num_rows // step) * step


def _mlp(rows_ND: Tensor, weights: ExpertWeights) -> Tensor:
    gate_NF, up_NF = F.linear(rows_ND, weights.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate_NF).mul_(up_NF), weights.down)
