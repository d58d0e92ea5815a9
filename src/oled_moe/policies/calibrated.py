"""Calibrated reuse: how likely an expert is wanted by its layer's next forward, learned online.

The paper ranks experts by confidence × gate weight. Here every quantity is a counted frequency:
how often a token of this state and gate rank asks for the same expert again, and how often this
expert came back after this kind of forward. Nothing is assumed about confidence; it is one more
thing to count by.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oled_moe.errors import ConfigError
from oled_moe.types import (
    BoolArray,
    FloatArray,
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    IntArray,
    LayerDemand,
    MoeShape,
    Phase,
    TokenState,
)

# What a row does: prefill, a block's first denoising step, a later one, commit; or, of a whole
# forward, rows that do different things.
_PREFILL, _FIRST, _LATER, _COMMIT, _MIXED = range(5)
NUM_KINDS = 5
# What a token is: long fixed, just accepted (in its first forward as a word), fresh mask (no
# forward has seen it yet), mask by confidence, and the most confident mask of its row, which is
# accepted next whatever the threshold, by whether it is sure.
_FIXED, _JUST_ACCEPTED, _FRESH, _MASKED = range(4)
_CONFIDENCE_EDGES = np.array([0.3, 0.5, 0.7, 0.9, 0.95, 0.99], dtype=np.float32)
_NEXT_ACCEPTED = _MASKED + len(_CONFIDENCE_EDGES) + 1
_NUM_STATES = _NEXT_ACCEPTED + 2
_SURE = 0.95
# Counts are halved when they reach this many, so that old evidence fades.
_MAX_COUNT = 1000.0
# Weight on the past of an expert's own rates, per forward.
_EXPERT_MEMORY = 0.98
# From how many forwards of experts like it an expert's own rate starts: these, and as many more as
# would hold this many hits, up to a most.
_PRIOR_WEIGHT = 4.0
_PRIOR_HITS, _MOST_PRIOR = 1.0, 200.0
# Forwards since an expert was last active, in classes: four for each doubling from 4 on.
_AGE_CLASS = np.concatenate(
    ([0], np.unique(np.round(4 * np.log2(np.arange(1, 513))), return_inverse=True)[1] + 1)
)
_NUM_AGES = int(_AGE_CLASS[-1]) + 1
_LOG_AGE = np.log1p(np.arange(len(_AGE_CLASS))) / np.log(len(_AGE_CLASS))
# Of retention: below which chance an expert is ranked by age alone, with little and with much room;
# how many times its demand a layer must hold to have much; what age costs the others.
_UNLIKELY, _UNLIKELY_WITH_ROOM, _ROOMY = 0.05, 0.3, 2.0
_AGE_PENALTY = 0.1
# What the evidence of tokens, of the expert's own record and of its age weigh at first, in log
# odds, behind a constant; and how fast that is adjusted.
_FIRST_WEIGHTS = (0.0, 0.6, 0.2, 0.2)
_LEARNING_RATE = 0.05
# Weight on the past of what ages say, per layer and forward, and of how popular an expert is, per
# forward; how much popularity, in log odds, leans on the former.
_AGE_MEMORY = 0.9995
_USES_MEMORY, _POPULARITY_SHARE = 0.99, 0.4
# Bounds of every rate.
_LEAST, _MOST = 0.005, 0.995


@dataclass(frozen=True, slots=True)
class Ingredients:
    """What the estimate may look at; each can be left out to see what it is worth.

    `state`: fixed, masked, just accepted. `transition`: what kind of forward this is, and that
    after a commit or prefill other tokens come. `rank`: the expert's place in the token's top-k.
    `confidence`: of masked tokens, and which of them is next to be accepted. `history`: where
    the word that a mask is guessed to become was routed before (needs token ids).
    """

    state: bool = True
    transition: bool = True
    rank: bool = True
    confidence: bool = True
    history: bool = False


@dataclass(slots=True)
class _Seen:
    """One layer's last demand, as far as the next one teaches something about it.

    Shapes: codes int64 [T], topk_ids int64 [T, K], is_active int64 [E], 0 or 1; history_tokens
    int64 [N] and history_ids int64 [N, K]: the tokens with a record of their guess, and that
    record; age_classes int64 [E]; evidence float64 [4, E] and probabilities float64 [E], what was
    predicted and from what.
    """

    rows: tuple[ForwardRow, ...]
    starts: tuple[int, ...]
    kind: int
    codes: IntArray
    topk_ids: IntArray
    is_active: IntArray
    history_tokens: IntArray
    history_ids: IntArray
    age_classes: IntArray
    evidence: FloatArray
    probabilities: FloatArray


class Rates:
    """Counted frequencies by code: [codes, K] hits of trials, fading by halving."""

    def __init__(self, num_codes: int, num_ranks: int, start: float) -> None:
        self._hits = np.full(num_codes * num_ranks, start)
        self._trials = np.ones(num_codes * num_ranks)
        self._num_ranks = num_ranks
        self._ranks = np.arange(num_ranks)

    def learn(self, codes: IntArray, is_kept: BoolArray) -> None:
        """Shapes: codes [T], is_kept [T, K]. Mutates: the counts."""
        cells = self._cells(codes, is_kept.shape[1]).ravel()
        size = len(self._hits)
        self._hits += np.bincount(cells, is_kept.ravel(), size)
        self._trials += np.bincount(cells, minlength=size)
        is_full = self._trials > _MAX_COUNT
        if is_full.any():
            self._hits[is_full] /= 2
            self._trials[is_full] /= 2

    def log_misses(self, codes: IntArray, top_k: int) -> FloatArray:
        """log(1 − rate) float64 [T, K]."""
        misses = np.log1p(-np.minimum(self._hits / self._trials, _MOST))
        found: FloatArray = misses[self._cells(codes, top_k)]
        return found

    def _cells(self, codes: IntArray, top_k: int) -> IntArray:
        if self._num_ranks == 1:
            return np.repeat(codes[:, None], top_k, axis=1)
        cells: IntArray = codes[:, None] * self._num_ranks + self._ranks
        return cells


class ReuseEstimator:
    """P(the layer's next forward wants an expert), for one layer after another.

    Three kinds of evidence are added in log odds: of the tokens, 1 − (1 − b)·Π(1 − q), with q the
    rate at which a token of this state, kind of forward and rank keeps an expert and b how often
    this expert comes back unasked; the expert's own record after such a forward, by whether it was
    active in it; and how often experts of its age come back, more or less by how popular it is.
    After a commit the tokens say nothing; after a prefill they say who is in a prompt's tail.
    Weights, one set for active experts and one for the others, follow the log loss online.

    Source: the estimator is this project's, from measurements on small trained models;
    experiments/04_calibrated_reuse says what each part is worth.
    """

    def __init__(self, shape: MoeShape, ingredients: Ingredients, *, prefill: str = "tail") -> None:
        if prefill not in ("whole", "tail"):
            raise ConfigError(f"policy parameter prefill is {prefill!r}; allowed: whole, tail")
        self._shape = shape
        self._ingredients = ingredients
        self._prefill = prefill
        num_codes = NUM_KINDS * _NUM_STATES
        num_ranks = shape.top_k if ingredients.rank else 1
        # One table for all layers: tokens of a state behave much alike in all, and so it is
        # learned in a few forwards.
        self._token_rates = Rates(num_codes, num_ranks, 0.5)
        self._history_rates = Rates(num_codes, num_ranks, 0.3)
        # How often an expert is active in the forward after one of some kind, by whether it was
        # active in that: [layer, kind, was active, expert].
        rates = (shape.num_layers, NUM_KINDS, 2 * shape.num_experts)
        self._expert_hits, self._expert_trials = np.zeros(rates), np.zeros(rates)
        # The same by how long an expert has not been active, over all layers: [kind, age class].
        self._age_hits = np.full((NUM_KINDS, _NUM_AGES), 0.3)
        self._age_trials = np.ones((NUM_KINDS, _NUM_AGES))
        self._age = np.full((shape.num_layers, shape.num_experts), len(_AGE_CLASS) - 1)
        # How the kinds of evidence are weighed, by kind of forward; and the sum of squared slopes.
        self._weights = np.tile(np.array(_FIRST_WEIGHTS), (NUM_KINDS, 2, 1))
        self._slopes = np.ones_like(self._weights)
        # How often an expert is active at all: [layer, expert].
        self._uses = np.zeros((shape.num_layers, shape.num_experts))
        self._num_uses = np.zeros(shape.num_layers)
        self._experts = np.arange(shape.num_experts)
        self._seen: list[_Seen | None] = [None] * shape.num_layers
        # Of the forward at work: codes by row, of which a request has two where a commit is folded;
        # and states at the last forward, to tell who has just been accepted.
        self._forward_id = -1
        self._codes: dict[ForwardRow, IntArray] = {}
        self._states: dict[int, tuple[int, npt.NDArray[np.uint8]]] = {}
        # Token id -> experts [L, K] that it was last routed to in its first forward as a word.
        self._records: dict[int, IntArray] = {}
        self.probabilities = np.full((shape.num_layers, shape.num_experts), 0.5)

    def observe(self, demand: LayerDemand) -> None:
        """Learn from what became of the layer's last prediction, and make the next one.

        Mutates: the counts; `probabilities` float64 [L, E] at the demand's layer.
        """
        context, layer = demand.context, demand.layer
        if context.forward_id != self._forward_id:
            self._follow(context)
        is_active = np.zeros(self._shape.num_experts, dtype=np.int64)
        is_active[demand.expert_ids] = 1
        earlier = self._seen[layer]
        if earlier is not None:
            self._learn(layer, earlier, demand, is_active)
        age_classes = self._age_classes(layer, is_active)
        codes = self._codes_of(context)
        kind = kind_of(context.rows) if self._ingredients.transition else 0
        history_tokens, history_ids = self._recall(layer, demand)
        seen = _Seen(
            context.rows,
            row_starts(context),
            kind,
            codes,
            demand.topk_ids,
            is_active,
            history_tokens,
            history_ids,
            age_classes,
            np.empty((0, 0)),
            np.empty(0),
        )
        self.probabilities[layer] = self._predict(layer, demand, seen)
        # Only now: an interrupt on the way must not leave half of it to learn from.
        self._seen[layer] = seen

    def mean_active(self, layer: int) -> float:
        """How many experts the layer wants in a forward, on average."""
        return float(self._uses[layer].sum()) / max(1.0, float(self._num_uses[layer]))

    def log_age(self, layer: int) -> FloatArray:
        """Logarithm of the forwards since each expert was last active, from 0 to 1; float64 [E]."""
        found: FloatArray = _LOG_AGE[self._age[layer]]
        return found

    def end_request(self, request_id: int) -> None:
        """Forget where a request was."""
        self._states.pop(request_id, None)

    def _follow(self, context: ForwardContext) -> None:
        """A new forward begins: code every token by what it is and what its row does."""
        self._forward_id = context.forward_id
        self._codes = {}
        start = 0
        starts = row_starts(context)
        for row, first in zip(context.rows, starts, strict=True):
            here = slice(start, start + row.num_tokens)
            start += row.num_tokens
            states = context.token_state[here]
            confidence = context.token_confidence[here]
            self._codes[row] = self._code(row, first, states, confidence)
            self._states[row.request_id] = (first, states)

    def _code(
        self,
        row: ForwardRow,
        first: int,
        states: npt.NDArray[np.uint8],
        confidence: npt.NDArray[np.float32],
    ) -> IntArray:
        is_masked = states == TokenState.MASKED
        codes = np.full(len(states), _FIXED, dtype=np.int64)
        wanted = self._ingredients
        if wanted.state:
            before = self._states.get(row.request_id)
            if before is not None and before[0] == first and len(before[1]) == len(states):
                codes[(before[1] == TokenState.MASKED) & ~is_masked] = _JUST_ACCEPTED
            codes[is_masked] = _FRESH if row.step_id == 0 else _MASKED
        if wanted.confidence:
            is_graded = (codes == _MASKED) if wanted.state else np.ones(len(codes), dtype=np.bool_)
            grades = _MASKED + np.searchsorted(_CONFIDENCE_EDGES, confidence)
            codes[is_graded] = grades[is_graded]
            if wanted.state and row.step_id > 0 and is_masked.any():
                top = int(np.where(is_masked, confidence, -1.0).argmax())
                codes[top] = _NEXT_ACCEPTED + int(confidence[top] >= _SURE)
        if wanted.transition:
            codes += kind_of((row,)) * _NUM_STATES
        return codes

    def _codes_of(self, context: ForwardContext) -> IntArray:
        parts = [self._codes[row] for row in context.rows]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _age_classes(self, layer: int, is_active: IntArray) -> IntArray:
        """int64 [E]. Mutates: the ages, by one forward."""
        age = self._age[layer]
        np.minimum(age + 1, len(_AGE_CLASS) - 1, out=age)
        age[is_active > 0] = 0
        classes: IntArray = _AGE_CLASS[age]
        return classes

    def _active_in_tails(self, demand: LayerDemand) -> IntArray:
        """Active in the last block of each row, which the first block to come resembles."""
        is_active = np.zeros(self._shape.num_experts, dtype=np.int64)
        end = 0
        for row in demand.context.rows:
            end += row.num_tokens
            size = min(row.num_tokens, demand.context.block_length)
            is_active[demand.topk_ids[end - size : end].ravel()] = 1
        return is_active

    def _learn(self, layer: int, seen: _Seen, demand: LayerDemand, is_active: IntArray) -> None:
        num_experts, kind = self._shape.num_experts, seen.kind
        cells = seen.is_active * num_experts + self._experts
        hits, trials = self._expert_hits[layer, kind], self._expert_trials[layer, kind]
        hits[cells] = _EXPERT_MEMORY * hits[cells] + is_active
        trials[cells] = _EXPERT_MEMORY * trials[cells] + 1
        self._uses[layer] = _USES_MEMORY * self._uses[layer] + is_active
        self._num_uses[layer] = _USES_MEMORY * self._num_uses[layer] + 1
        for counts, new in (
            (self._age_hits[kind], np.bincount(seen.age_classes, is_active, _NUM_AGES)),
            (self._age_trials[kind], np.bincount(seen.age_classes, minlength=_NUM_AGES)),
        ):
            counts *= _AGE_MEMORY
            counts += new
        # One step down the slope of the log loss, its length by how steep it used to be.
        error = seen.probabilities - is_active
        of_active = seen.evidence @ (error * seen.is_active)
        slope = np.stack((seen.evidence @ error - of_active, of_active))
        self._slopes[kind] += slope * slope
        self._weights[kind] -= _LEARNING_RATE * slope / np.sqrt(self._slopes[kind])
        if seen.rows[0].phase == Phase.PREFILL:
            # A prompt's tokens do not come again.
            return
        token_of = match_tokens(seen.rows, seen.starts, demand.context)
        is_wanted = np.zeros((len(demand.topk_ids) + 1, num_experts), dtype=np.bool_)
        # The row behind the last is that of tokens that are gone: it wants nothing.
        is_wanted[np.arange(len(demand.topk_ids))[:, None], demand.topk_ids] = True
        is_kept = is_wanted[token_of[:, None], seen.topk_ids]
        self._token_rates.learn(seen.codes, is_kept)
        if len(seen.history_tokens):
            token_of = token_of[seen.history_tokens]
            is_kept = is_wanted[token_of[:, None], seen.history_ids]
            self._history_rates.learn(seen.codes[seen.history_tokens], is_kept)

    def _recall(self, layer: int, demand: LayerDemand) -> tuple[IntArray, IntArray]:
        """Masks whose guess was routed before, and where; and take down what is a word now."""
        top_k = self._shape.top_k
        nothing = np.empty(0, dtype=np.int64), np.empty((0, top_k), dtype=np.int64)
        token_ids = demand.context.token_ids
        if not self._ingredients.history or token_ids is None or demand.context.is_prefill:
            return nothing
        is_masked = demand.context.token_state == TokenState.MASKED
        for token in (~is_masked).nonzero()[0].tolist():
            number = int(token_ids[token])
            record = self._records.get(number)
            if record is None:
                record = np.full((self._shape.num_layers, top_k), -1, dtype=np.int64)
                self._records[number] = record
            record[layer] = demand.topk_ids[token]
        found = [
            (token, record[layer])
            for token in is_masked.nonzero()[0].tolist()
            if (record := self._records.get(int(token_ids[token]))) is not None
            and record[layer, 0] >= 0
        ]
        if not found:
            return nothing
        return np.array([token for token, _ in found]), np.array([ids for _, ids in found])

    def _predict(self, layer: int, demand: LayerDemand, seen: _Seen) -> FloatArray:
        """float64 [E]. Mutates: `seen`, which keeps the evidence to learn from."""
        num_experts, kind = self._shape.num_experts, seen.kind
        # An expert that has not been seen enough in this situation is taken to come back as those
        # of its age do, more or less by how popular it is.
        num_uses = float(self._num_uses[layer])
        mean_uses = (float(self._uses[layer].sum()) / num_experts + 1) / (num_uses + 2)
        uses = (self._uses[layer] + 4 * mean_uses) / (num_uses + 4)
        lean = logit(bounded(uses)) - math.log(mean_uses / (1 - mean_uses))
        age_rates = bounded(self._age_hits[kind] / self._age_trials[kind])
        by_age = logit(age_rates)[seen.age_classes] + _POPULARITY_SHARE * lean
        prior = 1 / (1 + np.exp(-by_age))
        weight = np.minimum(_PRIOR_HITS / prior, _MOST_PRIOR) + _PRIOR_WEIGHT
        cells = seen.is_active * num_experts + self._experts
        hits, trials = self._expert_hits[layer, kind], self._expert_trials[layer, kind]
        own = (hits[cells] + weight * prior) / (trials[cells] + weight)
        evidence = np.zeros((len(_FIRST_WEIGHTS), num_experts))
        evidence[0], evidence[2], evidence[3] = 1.0, logit(bounded(own)), by_age
        is_boundary = kind == _COMMIT and self._ingredients.transition
        if demand.context.is_prefill:
            if self._prefill == "tail":
                evidence[1] = 2 * self._active_in_tails(demand) - 1
        elif not is_boundary:
            back = hits[:num_experts] + _PRIOR_WEIGHT * age_rates[1]
            unasked = back / (trials[:num_experts] + _PRIOR_WEIGHT)
            evidence[1] = logit(bounded(1 - (1 - unasked) * np.exp(self._log_miss(demand, seen))))
        seen.evidence = evidence
        odds_inactive, odds_active = self._weights[kind] @ evidence
        log_odds = np.where(seen.is_active, odds_active, odds_inactive)
        seen.probabilities = bounded(1 / (1 + np.exp(-log_odds)))
        return seen.probabilities

    def _log_miss(self, demand: LayerDemand, seen: _Seen) -> FloatArray:
        """log Π(1 − q) over the tokens that ask for an expert; float64 [E]."""
        num_experts = self._shape.num_experts
        misses = self._token_rates.log_misses(seen.codes, demand.topk_ids.shape[1])
        log_miss = np.bincount(demand.topk_ids.ravel(), misses.ravel(), num_experts).astype(
            float, copy=False
        )
        if len(seen.history_tokens):
            tokens, ids = seen.history_tokens, seen.history_ids
            misses = self._history_rates.log_misses(seen.codes[tokens], ids.shape[1])
            # An expert that the token asks for now is counted there.
            is_new = ~(ids[:, :, None] == demand.topk_ids[tokens][:, None, :]).any(axis=2)
            log_miss += np.bincount(ids.ravel(), (misses * is_new).ravel(), num_experts)
        return log_miss


def bounded(probability: FloatArray) -> FloatArray:
    """Nothing is certain: away from 0 and 1."""
    # Much faster than np.clip on arrays of this size.
    inside: FloatArray = np.minimum(np.maximum(probability, _LEAST), _MOST)
    return inside


def logit(probability: FloatArray) -> FloatArray:
    """Log odds."""
    log_odds: FloatArray = np.log(probability / (1 - probability))
    return log_odds


def kind_of(rows: Sequence[ForwardRow]) -> int:
    """What a forward of these rows is, for counting by."""
    kinds = {
        _FIRST
        if row.phase == Phase.DENOISE and row.step_id == 0
        else {Phase.PREFILL: _PREFILL, Phase.DENOISE: _LATER, Phase.COMMIT: _COMMIT}[row.phase]
        for row in rows
    }
    return kinds.pop() if len(kinds) == 1 else _MIXED


def row_starts(context: ForwardContext) -> tuple[int, ...]:
    """The first position of every row."""
    assert context.token_position is not None
    starts, start = [], 0
    for row in context.rows:
        starts.append(int(context.token_position[start]))
        start += row.num_tokens
    return tuple(starts)


def match_tokens(
    rows: Sequence[ForwardRow], earlier_starts: Sequence[int], context: ForwardContext
) -> IntArray:
    """For each token of earlier `rows`, the token at the same position now, or −1.

    Shapes: int64 [T] of the earlier forward.
    """
    starts = row_starts(context)
    places: dict[tuple[int, int, int], int] = {}
    first = 0
    for row, start in zip(context.rows, starts, strict=True):
        places[(row.request_id, start, row.num_tokens)] = first
        first += row.num_tokens
    parts = []
    for row, start in zip(rows, earlier_starts, strict=True):
        place = places.get((row.request_id, start, row.num_tokens))
        size = row.num_tokens
        parts.append(
            np.full(size, -1, dtype=np.int64) if place is None else np.arange(place, place + size)
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class CalibratedRetentionPolicy:
    """Keeps what the layer's next forward most likely wants (see `ReuseEstimator`).

    The score is that probability, less a little for age. Who is hardly expected next is ranked by
    age alone: what comes back later counts then, and that the estimate does not know. Where a
    layer has twice the slots of what it wants at a time, that goes for everybody who is not likely.
    """

    # Scores depend on how many slots there are.
    is_stack = False

    def __init__(self, estimator: ReuseEstimator, num_layers: int) -> None:
        self.estimator = estimator
        self._capacities = np.zeros(num_layers, dtype=np.int64)

    def resize(self, capacities: IntArray) -> None:
        self._capacities = capacities

    def observe(self, demand: LayerDemand) -> None:
        self.estimator.observe(demand)

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        layer, estimator = demand.layer, self.estimator
        is_roomy = self._capacities[layer] >= _ROOMY * estimator.mean_active(layer)
        probabilities = estimator.probabilities[layer][expert_ids]
        age = estimator.log_age(layer)[expert_ids]
        scores: FloatArray = np.where(
            probabilities >= (_UNLIKELY_WITH_ROOM if is_roomy else _UNLIKELY),
            probabilities - _AGE_PENALTY * age,
            -1 - age,
        )
        return scores

    def start_forward(self, context: ForwardContext) -> None:
        pass

    def end_forward(self, outcome: ForwardOutcome) -> None:
        pass

    def end_request(self, request_id: int) -> None:
        self.estimator.end_request(request_id)


class GlobalCalibratedRetentionPolicy(CalibratedRetentionPolicy):
    """One ranking for the experts of all layers: who is wanted soonest stays.

    An expert is expected to be wanted after the part of a forward that its layer is away, and
    1/P − 1 forwards more; the score is the inverse of both and one. Without the first part the
    layer that has just run would take slots from those about to run.
    """

    def __init__(self, estimator: ReuseEstimator, shape: MoeShape) -> None:
        super().__init__(estimator, shape.num_layers)
        self._num_layers = shape.num_layers

    def all_scores(self, demand: LayerDemand) -> FloatArray:
        layers = np.arange(self._num_layers)
        distance = ((layers - demand.layer - 1) % self._num_layers + 1) / self._num_layers
        scores: FloatArray = 1 / (distance[:, None] + 1 / self.estimator.probabilities)
        return scores
