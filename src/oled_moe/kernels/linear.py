"""Dense products of the model: attention projections, shared experts, the head.

bfloat16 on the CPU with few rows goes to native code, which reads the weights at the speed of
memory; everything else is F.linear. The choice depends on rows, dtype and device alone.

Legend: T tokens, D inputs, O outputs, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.kernels.cpu import max_native_rows
from oled_moe.kernels.native import NativeKernels, native_kernels, worthwhile_threads

# Words of the vocabulary whose logits are computed in one product.
VOCABULARY_SLICE = 16384


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias in the dtype of x, like F.linear, on any device.

    Shapes: x [..., D]; weight [O, D]; bias [O] -> [..., O].
    """
    native = _native_for(x_TD, weight_OD, bias_O)
    if native is None:
        return F.linear(x_TD, weight_OD, bias_O)
    return _native_linear(native, x_TD, weight_OD, bias_O, torch.bfloat16)


def head_logits(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits in fp32, never two tensors of their size at once.

    Shapes: x [T, D]; weight [V, D] -> fp32 [T, V].
    """
    native = _native_for(x_TD, weight_VD, None)
    if native is not None:
        return _native_linear(native, x_TD, weight_VD, None, torch.float32)
    if x_TD.dtype == torch.float32:
        return F.linear(x_TD, weight_VD)
    logits_TV = torch.empty(len(x_TD), len(weight_VD), dtype=torch.float32, device=x_TD.device)
    for first in range(0, len(weight_VD), VOCABULARY_SLICE):
        part = slice(first, first + VOCABULARY_SLICE)
        logits_TV[:, part] = F.linear(x_TD, weight_VD[part])
    return logits_TV


def _native_for(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> NativeKernels | None:
    """The kernels that serve this product, if they do."""
    operands = (x_TD, weight_OD) if bias_O is None else (x_TD, weight_OD, bias_O)
    for operand in operands:
        if operand.dtype != torch.bfloat16 or operand.device.type != "cpu":
            return None
        if operand.requires_grad and torch.is_grad_enabled():
            return None
    if not weight_OD.is_contiguous() or not x_TD.shape[-1]:
        return None
    native = native_kernels()
    num_rows = x_TD.numel() // x_TD.shape[-1]
    return native if num_rows <= max_native_rows(native, torch.bfloat16) else None


def _native_linear(
    native: NativeKernels,
    x_TD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    num_outputs, num_inputs = weight_OD.shape
    out_TO = torch.empty(*x_TD.shape[:-1], num_outputs, dtype=dtype)
    rows_NI = x_TD.reshape(-1, num_inputs).contiguous()
    native.linear(
        rows_NI,
        weight_OD,
        None if bias_O is None else bias_O.contiguous(),
        out_TO.view(-1, num_outputs),
        worthwhile_threads(weight_OD.nbytes, native.num_threads, len(rows_NI)),
    )
    return out_TO
