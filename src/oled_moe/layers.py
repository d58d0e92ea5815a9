"""The pieces that model files are made of: norm, rotary, attention over blocks, router.

Plain functions over tensors. Legend: T tokens, D hidden, Q query heads, G key/value heads,
H head size, S key positions, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.kv_cache import SequenceKv
from oled_moe.types import ForwardContext

# Most queries of a prompt whose attention scores exist at once.
ATTENTION_SLICE = 128


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's consecutive tokens in a forward; they follow the finished part of its K/V."""

    kv: SequenceKv
    num_tokens: int
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one forward. Shapes: token_ids and positions int64 [T], segments in order."""

    token_ids: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    context: ForwardContext

    @property
    def wants_logits(self) -> bool:
        return any(segment.wants_logits for segment in self.segments)

    @property
    def all_want_logits(self) -> bool:
        return all(segment.wants_logits for segment in self.segments)

    def wanted_tokens(self) -> Tensor:
        """bool [T]: the tokens of segments that want logits."""
        flags = torch.tensor([segment.wants_logits for segment in self.segments])
        counts = torch.tensor([segment.num_tokens for segment in self.segments])
        return flags.repeat_interleave(counts)

    def wanted_part(self) -> "ForwardBatch":
        """Only the segments that want logits: what the last layer needs to compute."""
        is_wanted = self.wanted_tokens()
        context = self.context.part([segment.wants_logits for segment in self.segments])
        segments = tuple(segment for segment in self.segments if segment.wants_logits)
        return ForwardBatch(self.token_ids[is_wanted], self.positions[is_wanted], segments, context)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension in fp32, cast back, then scale in the input's dtype.

    Source: models.md 2.1 (LLaDA2's order of cast and scale).
    """
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(hidden.dtype) * weight


def rotary_table(
    num_positions: int, rotary_size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, rotary_size], computed in fp32 and cast to `dtype`.

    Source: models.md 2.1, half-split layout.
    """
    steps = torch.arange(0, rotary_size, 2, dtype=torch.float32)
    inverse_frequency = 1.0 / (theta ** (steps / rotary_size))
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequency)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(heads_TQH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first R dimensions of every head, leave the rest."""
    size = cos_TR.shape[-1]
    rotated, passed = heads_TQH[..., :size], heads_TQH[..., size:]
    first, second = rotated.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = rotated * cos_TR[:, None] + turned * sin_TR[:, None]
    return torch.cat((rotated, passed), dim=-1) if passed.shape[-1] else rotated


def block_attention(
    queries_TQH: Tensor, keys_GSH: Tensor, values_GSH: Tensor, *, block_length: int
) -> Tensor:
    """Block-causal attention of the last T of S positions; returns [T, Q · H].

    A query sees every key of its own block and of those before; blocks lie on multiples of
    `block_length` from position 0.
    Source: models.md 2.1 and 2.5.
    """
    num_queries, num_keys = queries_TQH.shape[0], keys_GSH.shape[1]
    start = num_keys - num_queries
    if start // block_length == (num_keys - 1) // block_length:
        return _attend(queries_TQH, keys_GSH, values_GSH, None)
    # In slices of whole blocks: the scores of a long prompt at once would take the most memory of
    # all, and a slice leaves out the keys that none of its queries may see.
    step = max(1, ATTENTION_SLICE // block_length) * block_length
    parts = []
    for first in range(start, num_keys, step):
        end = min(first + step, num_keys)
        query_blocks = torch.arange(first, end) // block_length
        key_blocks = torch.arange(end) // block_length
        parts.append(
            _attend(
                queries_TQH[first - start : end - start],
                keys_GSH[:, :end],
                values_GSH[:, :end],
                key_blocks[None, :] <= query_blocks[:, None],
            )
        )
    return torch.cat(parts)


def _attend(
    queries_TQH: Tensor, keys_GSH: Tensor, values_GSH: Tensor, mask_TS: Tensor | None
) -> Tensor:
    out_QTH = F.scaled_dot_product_attention(
        queries_TQH.transpose(0, 1)[None],
        keys_GSH[None],
        values_GSH[None],
        attn_mask=mask_TS,
        enable_gqa=True,
    )[0]
    return out_QTH.transpose(0, 1).flatten(1)


def swiglu(hidden_TD: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An ordinary MLP: down(silu(gate(x)) · up(x))."""
    return F.linear(F.silu(F.linear(hidden_TD, gate)) * F.linear(hidden_TD, up), down)


def grouped_sigmoid_router(
    hidden_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    *,
    num_groups: int,
    num_kept_groups: int,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """LLaDA2's router in fp32: ids int64 [T, K], mixing weights fp32 [T, K], unscaled, and all
    scores fp32 [T, E], without the bias.

    The bias takes part in the selection alone; weights are sigmoids, normalised when K > 1.
    Source: models.md 2.2.
    """
    scores_TE = torch.sigmoid(F.linear(hidden_TD.float(), weight_ED.float()))
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.float()
    if num_kept_groups < num_groups:
        grouped = choice_TE.view(len(choice_TE), num_groups, -1)
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
        kept = group_scores.topk(num_kept_groups, dim=-1).indices
        is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
        choice_TE = grouped.masked_fill(~is_kept[..., None], float("-inf")).flatten(1)
    ids_TK = choice_TE.topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if top_k > 1:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK, scores_TE
