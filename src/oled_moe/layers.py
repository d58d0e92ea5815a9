"""The pieces that model files are made of: norm, rotary, attention over blocks, router.

Plain functions over tensors. Legend: T tokens, D hidden, Q query heads, G key/value heads,
H head size, R rotated dimensions, S key positions, E experts, K experts per token, N tokens whose
logits are wanted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.kernels.linear import head_logits, linear
from oled_moe.kernels.native import Segment as KvSegment
from oled_moe.kernels.rows import admit as admit
from oled_moe.kernels.rows import attend, choose, route, router_logits, store
from oled_moe.kernels.rows import choose_within as choose_within
from oled_moe.kernels.rows import rms_norm as rms_norm
from oled_moe.kernels.rows import rotate as rotate
from oled_moe.kernels.rows import router_weight as router_weight
from oled_moe.kernels.rows import sigmoid_shares as sigmoid_shares
from oled_moe.kv_cache import SequenceKv
from oled_moe.types import ForwardContext

# Most queries of a prompt whose attention scores exist at once.
ATTENTION_SLICE = 128
# Rows whose logits exist at once where all of them would be too many.
LOGIT_ROWS = 64
# Most blocks whose queries are attended to block by block.
_MAX_SINGLE_BLOCKS = 8


# Runs a pure function of tensors on them: called with its key (layer, name), which always means the
# same function, the function, and its inputs.
RunPiece = Callable[..., tuple[Tensor, ...]]


def run_directly(
    key: tuple[int, str], piece: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """The `RunPiece` that adds nothing."""
    return piece(*inputs)


class Routing(NamedTuple):
    """What a router made of a layer's tokens.

    Shapes: ids int64 [T, K]; shares fp32 [T, K], which add up to 1 per token; weights fp32 [T, K],
    by which outputs are mixed; scores fp32 [T, E], all of the router's.
    """

    ids_TK: Tensor
    shares_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor


@dataclass(frozen=True, slots=True)
class QuerySlice:
    """Consecutive queries of one attention call and how many keys they may see together.

    `first` and `end` count from the segment's first token. Shapes: mask bool [T, S], None where
    every query sees every key.
    """

    first: int
    end: int
    num_keys: int
    mask_TS: Tensor | None


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's consecutive tokens in a forward: one row of its context.

    They lie `offset` behind the finished part of their K/V: 0, or behind another segment of the
    same sequence in the same forward, whose keys they see. `logit_tokens`, int64 [N], are those of
    its tokens whose logits are wanted, None for all: the last layer computes the whole segment or
    nothing of it, the head only these. `condition`, [T, D]: what the last step of their block hands
    to models that are told what they predicted; None before there was one.
    """

    kv: SequenceKv
    num_tokens: int
    wants_logits: bool
    offset: int = 0
    logit_tokens: Tensor | None = None
    condition: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The input of one forward. Shapes: token_ids and positions int64 [T], segments in order.

    `inputs_TD`: what the model starts from, None for the embeddings of the tokens. With
    `reads_rows` whoever asked can read logits a few rows at a time, so that they may come as
    `RowLogits`. `query_slices`: how each segment's attention is cut up, made once for all layers.
    """

    token_ids: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    context: ForwardContext
    inputs_TD: Tensor | None = None
    reads_rows: bool = False
    query_slices: tuple[tuple[QuerySlice, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        slices = tuple(
            query_slices(
                segment.kv.length + segment.offset,
                segment.num_tokens,
                self.context.block_length,
                segment.kv.device,
            )
            for segment in self.segments
        )
        object.__setattr__(self, "query_slices", slices)

    @property
    def wants_logits(self) -> bool:
        return any(segment.wants_logits for segment in self.segments)

    @property
    def all_want_logits(self) -> bool:
        return all(segment.wants_logits for segment in self.segments)

    def wanted(self, values: Tensor) -> Tensor:
        """Of values [T, ...] those of segments that want logits, at least one of them."""
        parts, end = [], 0
        for segment in self.segments:
            start, end = end, end + segment.num_tokens
            if segment.wants_logits:
                parts.append(values[start:end])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def wanted_part(self) -> "ForwardBatch":
        """Only the segments that want logits: what the last layer needs to compute."""
        return ForwardBatch(
            self.wanted(self.token_ids),
            self.wanted(self.positions),
            tuple(segment for segment in self.segments if segment.wants_logits),
            self.context.part([segment.wants_logits for segment in self.segments]),
            reads_rows=self.reads_rows,
        )

    def logit_tokens(self) -> Tensor | None:
        """int64 [N] among the tokens of segments that want logits; None for all of them."""
        wanted = [segment for segment in self.segments if segment.wants_logits]
        if all(segment.logit_tokens is None for segment in wanted):
            return None
        parts, first = [], 0
        for segment in wanted:
            tokens = segment.logit_tokens
            parts.append(first + (torch.arange(segment.num_tokens) if tokens is None else tokens))
            first += segment.num_tokens
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class RowLogits:
    """Logits fp32 [N, V] that are computed when they are read: those of a whole canvas at once
    would take more memory than anything else in a forward.

    `hidden_ND`: what the head is given; `embeddings_VD`: the model's, for what a mask may be.
    """

    def __init__(self, hidden_ND: Tensor, head_VD: Tensor, embeddings_VD: Tensor) -> None:
        self._hidden_ND = hidden_ND
        self._head_VD = head_VD
        self._embeddings_VD = embeddings_VD

    def __len__(self) -> int:
        return len(self._hidden_ND)

    def __getitem__(self, row: int) -> Tensor:
        return head_logits(self._hidden_ND[row : row + 1], self._head_VD)[0]

    def part(self, rows: slice | Tensor) -> "RowLogits":
        """Those of some rows, still not computed."""
        return RowLogits(self._hidden_ND[rows], self._head_VD, self._embeddings_VD)

    def whole(self) -> Tensor:
        """All of them."""
        return head_logits(self._hidden_ND, self._head_VD)

    def slices(self) -> Iterator[Tensor]:
        """All of them, LOGIT_ROWS at a time."""
        for first in range(0, max(1, len(self)), LOGIT_ROWS):
            yield self.part(slice(first, first + LOGIT_ROWS)).whole()

    def expected_embeddings(self) -> Tensor:
        """Embeddings of all tokens, each weighed by its probability, fp32 [N, D]."""
        embeddings_VD = self._embeddings_VD
        parts = [
            (logits.softmax(-1).to(embeddings_VD.dtype) @ embeddings_VD).float()
            for logits in self.slices()
        ]
        return torch.cat(parts)


Logits = Tensor | RowLogits


def rows_of(logits: Logits, rows: slice | Tensor) -> Logits:
    """Some rows of logits, computed or not."""
    return logits.part(rows) if isinstance(logits, RowLogits) else logits[rows]


def best_tokens(logits_NV: Tensor, banned_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best id of each row but `banned_id`, its probability over the whole row, and whether all
    logits are finite.

    Shapes: float32 [N, V] -> int64 [N], float32 [N], bool [].
    """
    return choose(logits_NV, banned_id)


def rotary_table(
    num_positions: int,
    rotary_size: int,
    theta: float,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, rotary_size], computed in fp32 and cast to `dtype`.

    Source: models.md 2.1, half-split layout.
    """
    steps = torch.arange(0, rotary_size, 2, dtype=torch.float32)
    inverse_frequency = 1.0 / (theta ** (steps / rotary_size))
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequency)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def query_slices(
    start: int, num_queries: int, block_length: int, device: torch.device | None = None
) -> tuple[QuerySlice, ...]:
    """Block-causal attention of `num_queries` positions from `start` on, cut into calls.

    A query sees every key of its own block and of those before; blocks lie on multiples of
    `block_length` from position 0. Source: models.md 2.1 and 2.5.
    """
    end = start + num_queries
    if start // block_length == (end - 1) // block_length:
        return (QuerySlice(0, num_queries, end, None),)
    if end - start <= _MAX_SINGLE_BLOCKS * block_length:
        # Few blocks: one call each, which need no mask and can share native calls.
        ends = [*range((start // block_length + 1) * block_length, end, block_length), end]
        firsts = [start, *ends[:-1]]
        return tuple(
            QuerySlice(first - start, last - start, last, None)
            for first, last in zip(firsts, ends, strict=True)
        )
    # In slices of whole blocks: the scores of a long prompt at once would take the most memory of
    # all, and a slice leaves out the keys that none of its queries may see.
    step = max(1, ATTENTION_SLICE // block_length) * block_length
    slices = []
    for first in range(start, end, step):
        last = min(first + step, end)
        query_blocks = torch.arange(first, last, device=device) // block_length
        key_blocks = torch.arange(last, device=device) // block_length
        mask_TS = key_blocks[None, :] <= query_blocks[:, None]
        slices.append(QuerySlice(first - start, last - start, last, mask_TS))
    return tuple(slices)


def write_kv(layer: int, keys_TGH: Tensor, values_TGH: Tensor, segments: Sequence[Segment]) -> None:
    """Put keys and values of a forward's tokens behind each of its sequences.

    Shapes: [T, G, H]. Mutates: what is behind the finished part of each segment's K/V.
    """
    targets = [
        KvSegment(
            segment.num_tokens,
            *segment.kv.layer(layer),
            segment.kv.length + segment.offset + segment.num_tokens,
        )
        for segment in segments
    ]
    for target in targets:
        room = target.keys_GSH.shape[1]
        assert target.num_keys <= room, "the sequence outgrew its keys and values"
    store(keys_TGH, values_TGH, targets)


def block_attention(layer: int, queries_TQH: Tensor, batch: ForwardBatch) -> Tensor:
    """Attention of a forward's tokens, each segment over its sequence; returns [T, Q · H]."""
    slices = [
        (part, segment.kv.layer(layer))
        for segment, own in zip(batch.segments, batch.query_slices, strict=True)
        for part in own
    ]
    return sliced_attention(queries_TQH, slices)


def sliced_attention(
    queries_TQH: Tensor,
    slices: Sequence[tuple[QuerySlice, tuple[Tensor, Tensor]]],
    scale: float | None = None,
) -> Tensor:
    """Attention slice by slice, each over its keys and values [G, S, H]; returns [T, Q · H].

    `scale`: see `attend`.
    """
    if all(part.mask_TS is None for part, _ in slices):
        return attend(queries_TQH, [_unmasked(part, kv) for part, kv in slices], scale)
    parts, end = [], 0
    for part, (keys_GSH, values_GSH) in slices:
        start, end = end, end + part.end - part.first
        queries = queries_TQH[start:end]
        if part.mask_TS is None:
            parts.append(attend(queries, [_unmasked(part, (keys_GSH, values_GSH))], scale))
            continue
        out_QTH = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys_GSH[None, :, : part.num_keys],
            values_GSH[None, :, : part.num_keys],
            attn_mask=part.mask_TS,
            scale=scale,
            enable_gqa=True,
        )[0]
        parts.append(out_QTH.transpose(0, 1).flatten(1))
    return torch.cat(parts)


def _unmasked(part: QuerySlice, kv: tuple[Tensor, Tensor]) -> KvSegment:
    return KvSegment(part.end - part.first, *kv, part.num_keys)


def swiglu(hidden_TD: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An ordinary MLP: down(silu(gate(x)) · up(x))."""
    return linear(F.silu(linear(hidden_TD, gate)) * linear(hidden_TD, up), down)


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
    return route(
        router_logits(hidden_TD, weight_ED),
        None if bias_E is None else bias_E.float(),
        hidden_TD.dtype,
        num_groups=num_groups,
        num_kept_groups=num_kept_groups,
        top_k=top_k,
    )


def softmax_router(
    hidden_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None = None,
    *,
    top_k: int,
    is_normalised: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The router of SDAR, RND1 and LLaDA-MoE: ids int64 [T, K], shares and mixing weights fp32
    [T, K], and all scores fp32 [T, E].

    The product is rounded to the dtype of the activations, the softmax is fp32. Shares add up to
    1; mixing weights are the same where `is_normalised`, else the probabilities as they are. A
    bias takes part in the selection and in the weights. Source: models.md 2.3 and 2.4.
    """
    scores_TE = torch.softmax(linear(hidden_TD, weight_ED).float(), dim=-1)
    if bias_E is not None:
        scores_TE = scores_TE + bias_E.float()
    ids_TK = scores_TE.topk(top_k, dim=-1).indices
    return ids_TK, *softmax_shares(scores_TE, ids_TK, is_normalised=is_normalised), scores_TE


def softmax_shares(
    scores_TE: Tensor, ids_TK: Tensor, *, is_normalised: bool
) -> tuple[Tensor, Tensor]:
    """Shares and mixing weights fp32 [T, K] of chosen experts, as `softmax_router` has them."""
    chosen_TK = scores_TE.gather(1, ids_TK)
    shares_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)
    return shares_TK, shares_TK if is_normalised else chosen_TK
