"""What surrounds the products of a forward: sums of experts' rows, the choice among logits.

Native code serves on the CPU where it is there and measured faster, torch elsewhere; the choice
depends on dtype and device alone. Legend: T tokens, K experts per token, N rows, V vocabulary.
"""

import torch
from torch import Tensor

from oled_moe.kernels.native import native_kernels


def combine(rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Σ weights[t, k] · rows[places[t, k]] of each token in fp32, in the order of k.

    Shapes: rows [N, D]; places int64 [T, K]; weights float32 [T, K] -> float32 [T, D].
    """
    if rows_ND.device.type == "cpu" and rows_ND.dtype == torch.bfloat16:
        native = native_kernels()
        if native is not None:
            return native.combine(rows_ND, places_TK.contiguous(), weights_TK.contiguous())
    total_TD = torch.zeros(
        len(places_TK), rows_ND.shape[1], dtype=torch.float32, device=rows_ND.device
    )
    for k in range(places_TK.shape[1]):
        total_TD += rows_ND[places_TK[:, k]].float() * weights_TK[:, k, None]
    return total_TD


def choose(logits_NV: Tensor, banned_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best id of each row but `banned_id`, its probability over the whole row, and whether all
    logits are finite.

    Without native code rows are taken few at a time, so that nothing as large as the logits is
    made. Shapes: float32 [N, V] -> int64 [N], float32 [N], bool [].
    """
    native = native_kernels() if logits_NV.device.type == "cpu" else None
    if native is not None:
        ids_N, probability_N, is_finite = native.choose(logits_NV.contiguous(), banned_id)
        return ids_N, probability_N, torch.tensor(is_finite)
    is_finite_each, ids, probabilities = [], [], []
    for row_V in logits_NV:
        lowest, highest = row_V.aminmax()
        is_finite_each.append(lowest.isfinite() & highest.isfinite())
        # What is banned counts in the sum, but cannot win.
        total = row_V.logsumexp(-1)
        kept = row_V[banned_id].clone()
        row_V[banned_id] = float("-inf")
        best = row_V.max(-1)
        row_V[banned_id] = kept
        ids.append(best.indices)
        probabilities.append((best.values - total).exp())
    return torch.stack(ids), torch.stack(probabilities), torch.stack(is_finite_each).all()
