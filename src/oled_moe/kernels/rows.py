"""What surrounds the products of a forward: sums of experts' rows, the choice among logits.

Native code serves on the CPU where it is there and measured faster, torch elsewhere; the choice
depends on dtype and device alone. Legend: T tokens, K experts per token, N rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.kernels.native import (
    MAX_HEAD_SIZE,
    MAX_ROUTED,
    Segment,
    native_kernels,
    worthwhile_threads,
)


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


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension in fp32, cast back, then scale in the input's dtype.

    Shapes: hidden [..., D]; weight the last one or more dimensions of hidden.
    Source: models.md 2.1 (LLaDA2's order of cast and scale).
    """
    if hidden.dtype == weight.dtype == torch.bfloat16 and hidden.device.type == "cpu":
        native = native_kernels()
        if native is not None:
            return native.norm(hidden.contiguous(), weight, eps)
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(hidden.dtype) * weight


def router_weight(weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
    """A router's weight as `router_logits` reads it fastest; `dtype` of the activations.

    Products of two bfloat16 numbers are exact in fp32, and native code sums in fp32: there the
    weight stays as it is stored. Elsewhere it is kept in fp32, since converting it for every
    forward would move more bytes than multiplying by it.
    """
    is_small = weight_ED.dtype == dtype == torch.bfloat16 and weight_ED.device.type == "cpu"
    if is_small and native_kernels() is not None:
        return weight_ED
    return weight_ED.float()


def router_logits(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """hidden · weightᵀ in fp32, [T, E]; nothing is rounded on the way."""
    if weight_ED.dtype == hidden_TD.dtype == torch.bfloat16:
        native = native_kernels() if hidden_TD.device.type == "cpu" else None
        if native is not None:
            out_TE = torch.empty(len(hidden_TD), len(weight_ED))
            threads = worthwhile_threads(weight_ED.nbytes, native.num_threads, len(hidden_TD))
            native.linear(hidden_TD.contiguous(), weight_ED.contiguous(), None, out_TE, threads)
            return out_TE
    return F.linear(hidden_TD.float(), weight_ED.float())


def rotate(heads_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Turn the first R dimensions of every head, half by half, and leave the rest.

    Shapes: heads [T, N, H]; cos and sin [T, R], both halves of a row the same, in one dtype.
    """
    if heads_TNH.dtype == torch.bfloat16 and heads_TNH.device.type == "cpu":
        native = native_kernels()
        if native is not None:
            return native.rotate(heads_TNH.contiguous(), cos_TR.contiguous(), sin_TR.contiguous())
    size = cos_TR.shape[-1]
    half = size // 2
    first, second = heads_TNH[..., :half], heads_TNH[..., half:size]
    cos, sin = cos_TR[:, None, :half], sin_TR[:, None, :half]
    out_TNH = torch.empty_like(heads_TNH)
    torch.sub(first * cos, second * sin, out=out_TNH[..., :half])
    torch.add(second * cos, first * sin, out=out_TNH[..., half:size])
    out_TNH[..., size:] = heads_TNH[..., size:]
    return out_TNH


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    dtype: torch.dtype,
    *,
    num_groups: int,
    num_kept_groups: int,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a sigmoid router by groups chooses: ids int64 [T, K], shares fp32 [T, K], all scores
    fp32 [T, E].

    The bias takes part in the choice alone; a group counts by its two best; shares are sigmoids,
    normalised when K > 1. `dtype`: that of the model, by which native code serves or not. Shapes:
    logits fp32 [T, E]; bias fp32 [E].
    """
    if dtype == torch.bfloat16 and logits_TE.device.type == "cpu":
        native = native_kernels()
        if native is not None and logits_TE.shape[1] <= MAX_ROUTED:
            return native.route(
                logits_TE,
                bias_E,
                num_groups=num_groups,
                num_kept_groups=num_kept_groups,
                top_k=top_k,
            )
    scores_TE = torch.sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if num_kept_groups < num_groups:
        is_kept = _kept_groups(choice_TE, num_groups, num_kept_groups)
        choice_TE = choice_TE.masked_fill(~is_kept, float("-inf"))
    ids_TK = choice_TE.topk(top_k, dim=-1).indices
    return ids_TK, sigmoid_shares(scores_TE, ids_TK), scores_TE


def admit(choice_TE: Tensor, block_sizes: Sequence[int], capacity: int) -> Tensor:
    """The experts that each block admits, by its best score of any token; bool [T, E].

    Blocks are consecutive tokens; ties go to the lower id. Shapes: fp32 [T, E].
    """
    parts = torch.split(choice_TE, list(block_sizes))
    best_BE = torch.stack([part.amax(0) for part in parts])
    admitted = _order_keys(best_BE).topk(capacity, dim=-1).indices
    is_admitted = torch.zeros_like(best_BE, dtype=torch.bool).scatter_(1, admitted, True)
    sizes = zip(is_admitted, block_sizes, strict=True)
    return torch.cat([row_E.expand(size, -1) for row_E, size in sizes])


def choose_within(
    choice_TE: Tensor,
    allowed_TE: Tensor,
    *,
    top_k: int,
    num_groups: int = 1,
    num_kept_groups: int = 1,
) -> Tensor:
    """The K best allowed experts of each token, int64 [T, K], best first; ties to the lower id.

    Groups are kept as if all were allowed, so that a token whose own choice is allowed keeps it.
    Where fewer than K are allowed there, the rest are the best allowed elsewhere, then the best of
    its groups, then of all. Shapes: choice fp32 [T, E], allowed bool [T, E].
    """
    tier_TE = 2 * allowed_TE.long()
    if num_kept_groups < num_groups:
        tier_TE += _kept_groups(choice_TE, num_groups, num_kept_groups)
    keys_TE = _order_keys(choice_TE) + (tier_TE << _TIER_BIT)
    return keys_TE.topk(top_k, dim=-1).indices


# Keys of 32 bits of a value and 15 of an id, below what tells better experts from worse.
_ID_BITS, _TIER_BIT = 15, 48


def _order_keys(values_TE: Tensor) -> Tensor:
    """Whole numbers int64 [T, E] that order as fp32 values do, and equal ones by falling id: no two
    of a row are the same, so that their best do not depend on how those are found."""
    num_experts = values_TE.shape[1]
    assert num_experts <= 2**_ID_BITS
    bits_TE = values_TE.contiguous().view(torch.int32)
    # As whole numbers, floats below zero order the wrong way round.
    ordered_TE = (bits_TE ^ ((bits_TE >> 31) & 0x7FFFFFFF)).long()
    ids_E = torch.arange(num_experts - 1, -1, -1, device=values_TE.device)
    return (ordered_TE << _ID_BITS) + ids_E


def _kept_groups(choice_TE: Tensor, num_groups: int, num_kept_groups: int) -> Tensor:
    """Whether each expert is in one of its token's best groups, bool [T, E]."""
    grouped = choice_TE.view(len(choice_TE), num_groups, -1)
    group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    kept = group_scores.topk(num_kept_groups, dim=-1).indices
    is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
    return is_kept.repeat_interleave(grouped.shape[-1], dim=1)


def sigmoid_shares(scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Mixing weights fp32 [T, K] of chosen experts, unscaled: sigmoids, normalised when K > 1."""
    weights_TK = scores_TE.gather(1, ids_TK)
    if ids_TK.shape[1] > 1:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK


def attend(queries_TQH: Tensor, segments: Sequence[Segment], scale: float | None = None) -> Tensor:
    """Attention in which every query sees every key of its segment; returns [T, Q · H].

    `scale`: of the products of queries and keys, 1 / √H where None. The segments' tokens add up to
    T, in order. Shapes: queries [T, Q, H]; G divides Q.
    """
    is_plain = queries_TQH.dtype == torch.bfloat16 and queries_TQH.device.type == "cpu"
    if is_plain and queries_TQH.shape[-1] <= MAX_HEAD_SIZE:
        native = native_kernels()
        # With AVX2 torch is several times faster (benchmarks/kernels.py).
        if native is not None and native.isa.startswith("avx512"):
            return native.attend(queries_TQH.contiguous(), segments, scale)
    parts, end = [], 0
    for count, keys_GSH, values_GSH, num_keys in segments:
        start, end = end, end + count
        out_QTH = F.scaled_dot_product_attention(
            queries_TQH[start:end].transpose(0, 1)[None],
            keys_GSH[None, :, :num_keys],
            values_GSH[None, :, :num_keys],
            scale=scale,
            enable_gqa=True,
        )[0]
        parts.append(out_QTH.transpose(0, 1).flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def store(keys_TGH: Tensor, values_TGH: Tensor, segments: Sequence[Segment]) -> None:
    """Copy keys and values [T, G, H] to the last positions that their segments' tokens see.

    Mutates: the segments' keys and values.
    """
    if keys_TGH.dtype == torch.bfloat16 and keys_TGH.device.type == "cpu":
        native = native_kernels()
        if native is not None and keys_TGH.stride(1) == values_TGH.stride(1) == keys_TGH.shape[2]:
            native.store(keys_TGH, values_TGH, segments)
            return
    end = 0
    for count, keys_GSH, values_GSH, num_keys in segments:
        start, end = end, end + count
        keys_GSH[:, num_keys - count : num_keys] = keys_TGH[start:end].transpose(0, 1)
        values_GSH[:, num_keys - count : num_keys] = values_TGH[start:end].transpose(0, 1)


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
