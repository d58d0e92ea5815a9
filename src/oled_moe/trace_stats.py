"""What a trace says about routing: overlap, activation, stability, and how cacheable it is.

The numbers of `trace show` and of the paper's figures 4, 7 and 10, all over the rows of a trace:
a row is one block in one forward. Nothing here depends on a policy or a cache.

Shape legend: R rows, T tokens, L MoE layers, K experts per token, E experts per layer, N rows or
tokens of one kind, P pairs.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oled_moe.traces import RoutingTrace
from oled_moe.types import BoolArray, FloatArray, IntArray, Phase, TokenState

MAX_GAP = 10
NUM_BINS = 10
# What became of a token in the forward before: the kinds whose stability is told apart.
KINDS = ("still masked", "just accepted", "long fixed")
BOUNDARIES = ("last denoise to commit", "commit to first of next", "last denoise to first of next")
# Pairs looked at together: bounds the memory of set operations.
_CHUNK = 512

CountArray = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of a row's experts an earlier row had; means over pairs and layers.

    `overlap` = |A_i and A_j| / |A_j| for i before j, `jaccard` = |A_i and A_j| / |A_i or A_j|;
    None without pairs. Source: policies.md 3.
    """

    label: str
    num_pairs: int
    overlap: float | None
    jaccard: float | None


@dataclass(frozen=True, slots=True)
class Activation:
    """How many distinct experts a block's tokens demand in one denoising forward.

    `per_layer`, `by_step` and `by_masks` are mean counts; `by_masks` goes by the masks left at the
    start of the forward. `union` is over all sequences of a forward. `over_one_token` is the mean
    count over K; `flops_over_one_token` the tokens of a block (the paper's figures 4a and 4b).
    """

    mean: float
    ratio: float
    union: float
    per_layer: list[float | None]
    by_step: list[float | None]
    by_masks: dict[int, float]
    over_one_token: float
    flops_over_one_token: float
    prefill_ratio: float | None


@dataclass(frozen=True, slots=True)
class Stability:
    """|S_t,i and S_t,i+1| / K of tokens between denoising forwards of a block, by confidence.

    Confidence is that of forward i, in ten bins of equal width. `counts` and `means` have one
    entry per bin, `table[b]` the share of each number of kept experts, 0 to K, in bin b (None
    where it is empty). `correlation` is Pearson's between confidence and the mean over layers.
    Source: policies.md 3; the paper's figures 10a and 10b.
    """

    label: str
    num_tokens: int
    mean: float | None
    correlation: float | None
    counts: list[int]
    means: list[float | None]
    table: list[list[float] | None]


@dataclass(frozen=True, slots=True)
class Consistency:
    """Local routing consistency with the tokens of one block in one forward as the segment.

    `srp`: segment routing best performance. A router that chooses one set of experts for a whole
    segment of m tokens takes expert e if at least a of them route to it. Its F1 against what they
    route to, summed over segments, is 2 * matches / (m * taken + activations); srp is the best
    over a, and `srp_size` what is taken then, over K.
    `sch`: segment cache best hit rate. The best C experts of a segment, chosen for it alone, hold
    this share of its token-expert pairs; by C. moe-lrc slides windows of m tokens along a text;
    here segments do not overlap. `block_sch` is the same where one choice must last for all steps
    of a block.
    Source: Liang et al., arXiv 2505.16056; ljcleo/moe-lrc, src/30_srp_calc.py, src/40_sch_calc.py.
    """

    srp: float | None
    srp_size: float
    srp_per_layer: list[float | None]
    sch: dict[int, float]
    block_sch: dict[int, float]


@dataclass(frozen=True, slots=True)
class HiddenCosine:
    """Cosine of a layer's input with the same position's in the forward before; means."""

    mean: float
    per_layer: list[float | None]
    by_kind: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class TraceStats:
    """All of it. `workloads` are mean numbers of active experts; `steps_per_block` counts
    denoising forwards."""

    num_requests: int
    num_forwards: int
    num_tokens: int
    rows_by_phase: dict[str, int]
    steps_per_block: float
    workloads: dict[str, float]
    activation: Activation
    gaps: list[Overlap]
    boundaries: list[Overlap]
    unrelated: Overlap
    stability: list[Stability]
    consistency: Consistency
    hidden_cosine: HiddenCosine | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON, what is unknown as null."""
        return asdict(self)


def describe_trace(trace: RoutingTrace) -> TraceStats | None:
    """Everything `trace show` prints; None for a trace without a denoising forward."""
    rows = TraceRows(trace)
    if not len(rows.denoise):
        return None
    phases = np.bincount(trace.row_phase, minlength=len(Phase)).tolist()
    return TraceStats(
        num_requests=len(trace.requests),
        num_forwards=trace.num_forwards,
        num_tokens=trace.num_tokens,
        rows_by_phase={phase.name.lower(): phases[phase] for phase in Phase},
        steps_per_block=len(rows.denoise) / len(np.unique(rows.block_key[rows.denoise])),
        workloads=_workloads(rows),
        activation=activation(rows),
        gaps=overlap_by_gap(rows),
        boundaries=overlap_at_boundaries(rows),
        unrelated=unrelated_overlap(rows),
        stability=routing_stability(trace),
        consistency=routing_consistency(rows),
        hidden_cosine=hidden_cosine(trace),
    )


class TraceRows:
    """A trace's rows with their expert counts, and the order of rows within each block.

    Shapes: counts_RLE uint16, tokens routed to each expert; block_key int64 [R], one number for
    each (request, block); denoise and commit: row indices in (request, block, time) order.
    """

    def __init__(self, trace: RoutingTrace) -> None:
        self.trace = trace
        self.counts_RLE = _expert_counts(trace)
        self.num_tokens_R = np.diff(trace.row_token_offset)
        num_blocks = int(trace.row_block.max()) + 2
        self.block_key = trace.row_request.astype(np.int64) * num_blocks + trace.row_block
        order = np.argsort(self.block_key, kind="stable")
        phase = trace.row_phase[order]
        self.denoise: IntArray = order[phase == Phase.DENOISE]
        self.commit: IntArray = order[phase == Phase.COMMIT]

    def pairs(self, gap: int) -> tuple[IntArray, IntArray]:
        """Denoising rows `gap` steps apart in one block: the earlier and the later ones."""
        key = self.block_key[self.denoise]
        is_pair = key[gap:] == key[:-gap]
        return self.denoise[:-gap][is_pair], self.denoise[gap:][is_pair]

    def ends(self) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        """By block key: the first and the last denoising row, and the commit row."""
        keys = self.block_key[self.denoise].tolist()
        last = dict(zip(keys, self.denoise.tolist(), strict=True))
        first = dict(zip(keys[::-1], self.denoise.tolist()[::-1], strict=True))
        commits = self.block_key[self.commit].tolist()
        return first, last, dict(zip(commits, self.commit.tolist(), strict=True))


def _expert_counts(trace: RoutingTrace) -> CountArray:
    num_layers, num_experts = trace.num_moe_layers, trace.num_experts
    counts = np.empty((trace.num_rows, num_layers, num_experts), dtype=np.uint16)
    offset = trace.row_token_offset.tolist()
    # Column 0 takes the -1 of rows that skipped a layer.
    shift_LK = (1 + np.arange(num_layers) * (num_experts + 1))[:, None]
    size = num_layers * (num_experts + 1)
    for row, (start, end) in enumerate(zip(offset, offset[1:], strict=False)):
        flat = trace.expert_ids[start:end] + shift_LK
        found = np.bincount(flat.ravel(), minlength=size)
        counts[row] = found.reshape(num_layers, num_experts + 1)[:, 1:]
    return counts


# Overlap


def overlap_by_gap(rows: TraceRows, max_gap: int = MAX_GAP) -> list[Overlap]:
    """Rows of one block 1 to `max_gap` denoising steps apart (the paper's figure 7)."""
    return [_overlap(rows, str(gap), *rows.pairs(gap)) for gap in range(1, max_gap + 1)]


def overlap_at_boundaries(rows: TraceRows) -> list[Overlap]:
    """From a block's end to the next block's start, by way of the commit or not."""
    first, last, commit = rows.ends()
    forward = rows.trace.row_forward
    to_commit = [(last[key], row) for key, row in commit.items() if key in last]
    # A commit folded into the next block's first forward does not come before it.
    from_commit = [
        (row, first[key + 1])
        for key, row in commit.items()
        if key + 1 in first and forward[row] < forward[first[key + 1]]
    ]
    to_first = [(row, first[key + 1]) for key, row in last.items() if key + 1 in first]
    return [
        _overlap(rows, label, *_columns(pairs))
        for label, pairs in zip(BOUNDARIES, (to_commit, from_commit, to_first), strict=True)
    ]


def unrelated_overlap(rows: TraceRows, *, seed: int = 0, num_pairs: int = 1000) -> Overlap:
    """What expert popularity alone gives: denoising rows of different requests, drawn at random."""
    generator = np.random.default_rng(seed)
    early, late = generator.choice(rows.denoise, (2, num_pairs))
    request = rows.trace.row_request
    is_unrelated = request[early] != request[late]
    return _overlap(rows, "unrelated requests", early[is_unrelated], late[is_unrelated])


def _columns(pairs: list[tuple[int, int]]) -> tuple[IntArray, IntArray]:
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _overlap(rows: TraceRows, label: str, early: IntArray, late: IntArray) -> Overlap:
    sums = np.zeros(2)
    num_layers_seen = 0
    for here in _chunks(len(early)):
        is_early = rows.counts_RLE[early[here]] > 0
        is_late = rows.counts_RLE[late[here]] > 0
        both = np.logical_and(is_early, is_late).sum(axis=2)
        size_early, size_late = is_early.sum(axis=2), is_late.sum(axis=2)
        # Layers that either of the two skipped say nothing.
        is_seen = (size_early > 0) & (size_late > 0)
        both, size_early, size_late = both[is_seen], size_early[is_seen], size_late[is_seen]
        sums += [(both / size_late).sum(), (both / (size_early + size_late - both)).sum()]
        num_layers_seen += len(both)
    if not num_layers_seen:
        return Overlap(label, len(early), None, None)
    overlap, jaccard = (sums / num_layers_seen).tolist()
    return Overlap(label, len(early), overlap, jaccard)


def _chunks(size: int) -> Iterator[slice]:
    for start in range(0, size, _CHUNK):
        yield slice(start, start + _CHUNK)


# Activation


def activation(rows: TraceRows) -> Activation:
    """Distinct experts of denoising rows."""
    trace = rows.trace
    num_active = _num_active(rows.counts_RLE)
    active_NL = num_active[rows.denoise]
    mean = _mean(active_NL) or 0.0
    masks = np.add.reduceat(trace.token_state == TokenState.MASKED, trace.row_token_offset[:-1])
    per_row = _nanmean(active_NL.T)
    prefill = _mean(num_active[trace.row_phase == Phase.PREFILL])
    return Activation(
        mean=mean,
        ratio=mean / trace.num_experts,
        union=_union(rows),
        per_layer=_plain(_nanmean(active_NL)),
        by_step=_group_means(trace.row_step[rows.denoise], per_row),
        by_masks=_means_by(masks[rows.denoise], per_row),
        over_one_token=mean / trace.top_k,
        flops_over_one_token=float(rows.num_tokens_R[rows.denoise].mean()),
        prefill_ratio=None if prefill is None else prefill / trace.num_experts,
    )


def _num_active(counts_RLE: CountArray) -> FloatArray:
    """Distinct experts per row and layer, NaN where the layer was skipped."""
    active: FloatArray = (counts_RLE > 0).sum(axis=2).astype(np.float64)
    active[active == 0] = np.nan
    return active


def _union(rows: TraceRows) -> float:
    """Mean distinct experts over all sequences of a forward that denoises."""
    trace = rows.trace
    starts = trace.forward_row_offset[:-1]
    if len(starts) == trace.num_rows:
        return _mean(_num_active(rows.counts_RLE[rows.denoise])) or 0.0
    is_denoise = np.logical_or.reduceat(trace.row_phase == Phase.DENOISE, starts)
    ends = trace.forward_row_offset[1:]
    active = [
        _num_active(rows.counts_RLE[start:end].max(axis=0, keepdims=True))
        for start, end, wanted in zip(starts, ends, is_denoise, strict=True)
        if wanted
    ]
    return _mean(np.concatenate(active)) or 0.0


def _workloads(rows: TraceRows) -> dict[str, float]:
    names = [request.workload for request in rows.trace.requests]
    unique = sorted(set(names))
    number = np.array([unique.index(name) for name in names])
    per_row = _nanmean(_num_active(rows.counts_RLE[rows.denoise]).T)
    means = _means_by(number[rows.trace.row_request[rows.denoise]], per_row)
    return {unique[index]: mean for index, mean in means.items()}


# Stability


def routing_stability(trace: RoutingTrace) -> list[Stability]:
    """Of all tokens, then by what became of them in the earlier forward, in the order of KINDS."""
    early, late = _steps_of_tokens(trace)
    kept_NL = _num_kept(trace, early, late)
    confidence = trace.token_confidence[early]
    kind = _kinds(trace, early)
    found = [_stability("all", trace.top_k, confidence, kept_NL)]
    for index, label in enumerate(KINDS):
        is_here = kind == index
        found.append(_stability(label, trace.top_k, confidence[is_here], kept_NL[is_here]))
    return found


def _steps_of_tokens(trace: RoutingTrace) -> tuple[IntArray, IntArray]:
    """Tokens of denoising rows and themselves one denoising step of the block later."""
    before = trace.previous_token()
    late = np.flatnonzero(before >= 0)
    early = before[late]
    row = trace.token_row()
    is_denoise = trace.row_phase == Phase.DENOISE
    is_step = is_denoise[row[early]] & is_denoise[row[late]]
    is_step &= trace.row_block[row[early]] == trace.row_block[row[late]]
    return early[is_step], late[is_step]


def _kinds(trace: RoutingTrace, early: IntArray) -> IntArray:
    is_masked = trace.token_state[early] == TokenState.MASKED
    is_accepted = trace.token_accepted[early] == 1
    return np.where(is_accepted, 1, np.where(is_masked, 0, 2))


def _num_kept(trace: RoutingTrace, early: IntArray, late: IntArray) -> npt.NDArray[np.int16]:
    """How many of a token's experts at each layer it still has a step later; -1 if skipped."""
    kept = np.empty((len(early), trace.num_moe_layers), dtype=np.int16)
    for here in _chunks(len(early)):
        before, after = trace.expert_ids[early[here]], trace.expert_ids[late[here]]
        is_kept = (before[..., :, None] == after[..., None, :]).any(axis=3)
        kept[here] = np.where(before[..., 0] < 0, -1, is_kept.sum(axis=2))
    return kept


def _stability(
    label: str, top_k: int, confidence: npt.NDArray[np.float32], kept_NL: npt.NDArray[np.int16]
) -> Stability:
    is_known = ~np.isnan(confidence)
    confidence, kept_NL = confidence[is_known].astype(np.float64), kept_NL[is_known]
    bins = np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    pair = bins[:, None] * (top_k + 1) + kept_NL
    counts = np.bincount(pair[kept_NL >= 0], minlength=NUM_BINS * (top_k + 1))
    table = counts.reshape(NUM_BINS, top_k + 1)
    sums = table.sum(axis=1)
    values = np.arange(top_k + 1) / top_k
    means = [
        float(row @ values / total) if total else None
        for row, total in zip(table, sums, strict=True)
    ]
    total = int(sums.sum())
    return Stability(
        label=label,
        num_tokens=len(confidence),
        mean=float(table.sum(axis=0) @ values) / total if total else None,
        correlation=_correlation(confidence, np.maximum(kept_NL, 0).mean(axis=1)),
        counts=np.bincount(bins, minlength=NUM_BINS).tolist(),
        means=means,
        table=[(row / n).tolist() if n else None for row, n in zip(table, sums, strict=True)],
    )


def _correlation(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> float | None:
    if len(x) < 2 or x.std() < 1e-12 or y.std() < 1e-12:
        return None
    return float(np.corrcoef(x, y)[0, 1])


# Consistency


def routing_consistency(rows: TraceRows) -> Consistency:
    """SRP and SCH (see `Consistency`) over denoising rows of the most frequent number of tokens."""
    sizes = rows.num_tokens_R[rows.denoise]
    length = int(np.bincount(sizes).argmax())
    counts_NLE = rows.counts_RLE[rows.denoise[sizes == length]]
    taken, matches = _thresholds(counts_NLE, length)
    srp, best = _best_f1(taken.sum(axis=0), matches.sum(axis=0), length)
    num_pairs = max(float(matches.sum(axis=0)[0]), 1.0)
    per_layer = [_best_f1(*layer, length)[0] for layer in zip(taken, matches, strict=True)]
    sizes_of_cache = _cache_sizes(rows.trace.top_k, rows.trace.num_experts)
    return Consistency(
        srp=_plain(np.array([srp]))[0],
        srp_size=float(taken.sum(axis=0)[best]) * length / num_pairs,
        srp_per_layer=_plain(np.array(per_layer)),
        sch=_best_hits(counts_NLE, sizes_of_cache),
        block_sch=_best_hits(_block_counts(rows), sizes_of_cache),
    )


def _thresholds(counts_NLE: CountArray, length: int) -> tuple[IntArray, IntArray]:
    """Per layer and threshold a = 1 to length: experts taken, and tokens that route to them."""
    num_layers = counts_NLE.shape[1]
    flat = counts_NLE.astype(np.int64) + (np.arange(num_layers) * (length + 1))[:, None]
    found = np.bincount(flat.ravel(), minlength=num_layers * (length + 1))
    histogram = found.reshape(num_layers, length + 1)[:, 1:]
    matches = histogram * np.arange(1, length + 1)
    return histogram[:, ::-1].cumsum(axis=1)[:, ::-1], matches[:, ::-1].cumsum(axis=1)[:, ::-1]


def _best_f1(taken: IntArray, matches: IntArray, length: int) -> tuple[float, int]:
    """The best F1 over thresholds, and which; matches[0] are all activations."""
    f1 = 2 * matches / np.maximum(taken * length + matches[0], 1)
    best = int(f1.argmax())
    return float(f1[best]) if matches[0] else math.nan, best


def _cache_sizes(top_k: int, num_experts: int) -> list[int]:
    sizes = [top_k * factor for factor in (1, 2, 4, 8, 16, 32)]
    return [size for size in sizes if size < num_experts] or [num_experts]


def _best_hits(counts_NLE: npt.NDArray[Any], sizes: list[int]) -> dict[int, float]:
    """The share of token-expert pairs that a segment's best experts hold, by their number."""
    held = np.zeros(counts_NLE.shape[2])
    for here in _chunks(len(counts_NLE)):
        ordered = np.sort(counts_NLE[here], axis=2)[:, :, ::-1]
        held += ordered.sum(axis=(0, 1), dtype=np.float64)
    share = held.cumsum() / max(float(held.sum()), 1.0)
    return {size: float(share[size - 1]) for size in sizes}


def _block_counts(rows: TraceRows) -> npt.NDArray[Any]:
    """Tokens routed to each expert over all denoising steps of a block."""
    key = rows.block_key[rows.denoise]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    counts = rows.counts_RLE[rows.denoise]
    return np.add.reduceat(counts, starts, axis=0, dtype=np.uint32)


# Hidden states


def hidden_cosine(trace: RoutingTrace) -> HiddenCosine | None:
    """Between denoising steps of a block; None where it was not recorded."""
    if trace.hidden_cosine is None:
        return None
    early, late = _steps_of_tokens(trace)
    cosine_NL = trace.hidden_cosine[late].astype(np.float64)
    kind = _kinds(trace, early)
    if not np.isfinite(cosine_NL).any():
        return None
    by_kind = {label: _mean(cosine_NL[kind == index]) for index, label in enumerate(KINDS)}
    mean = _mean(cosine_NL)
    assert mean is not None
    return HiddenCosine(mean, _plain(_nanmean(cosine_NL)), by_kind)


# Means


def _mean(values: FloatArray) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else None


def _nanmean(values_NL: FloatArray) -> FloatArray:
    """Column means over what is not NaN, NaN for columns without."""
    is_known: BoolArray = ~np.isnan(values_NL)
    num_known = is_known.sum(axis=0)
    sums = np.where(is_known, values_NL, 0).sum(axis=0)
    means: FloatArray = np.where(num_known > 0, sums / np.maximum(num_known, 1), np.nan)
    return means


def _means_by(group_N: npt.NDArray[Any], values_N: FloatArray) -> dict[int, float]:
    is_known = ~np.isnan(values_N)
    # By the groups there are, not up to the largest: a file may say any number.
    groups, place_N = np.unique(group_N[is_known], return_inverse=True)
    counts = np.bincount(place_N, minlength=len(groups))
    sums = np.bincount(place_N, values_N[is_known], len(groups))
    return dict(zip(groups.tolist(), (sums / np.maximum(counts, 1)).tolist(), strict=True))


# Steps of a block that are told one by one.
_MOST_STEPS = 1024


def _group_means(group_N: npt.NDArray[Any], values_N: FloatArray) -> list[float | None]:
    means = _means_by(group_N, values_N)
    return [means.get(index) for index in range(min(int(group_N.max()), _MOST_STEPS) + 1)]


def _plain(values: FloatArray) -> list[float | None]:
    """Numbers as JSON knows them."""
    return [None if math.isnan(value) else value for value in values.tolist()]
