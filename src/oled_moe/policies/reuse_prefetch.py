"""Prefetch into staging by calibrated reuse.

What coming layers will want is guessed from what they wanted one forward ago and what has become
of its tokens since: when a forward begins more is known than when retention had to choose. Which
masks became words, and which, and whether the block goes on. The copy lane is idle while
attention, shared experts and hits compute; guesses fill it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oled_moe.policies.calibrated import (
    NUM_KINDS,
    Rates,
    bounded,
    kind_of,
    logit,
    match_tokens,
    row_starts,
)
from oled_moe.types import (
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

# What has become of a token since the last forward: a word as before, a mask as before, or a mask
# that has just become a word.
_STILL_WORD, _STILL_MASK, _NEW_WORD = range(3)
_NUM_FATES = 3
_MEMORY, _PRIOR_WEIGHT = 0.98, 8.0
_TOKEN_SHARE = 0.6


@dataclass(slots=True)
class _Seen:
    """A layer's last demand. Shapes: states uint8 [T], topk_ids int64 [T, K], is_active [E]."""

    rows: tuple[ForwardRow, ...]
    starts: tuple[int, ...]
    kind: int
    states: npt.NDArray[np.uint8]
    topk_ids: IntArray
    is_active: IntArray


@dataclass(slots=True)
class _Guess:
    """What was made of a layer's last demand for the forward at work, to learn from it."""

    seen: _Seen
    num_tokens: int
    transition: int
    tokens: IntArray
    codes: IntArray
    token_of: IntArray
    history_ids: IntArray
    history_token_of: IntArray
    probabilities: FloatArray


class ReusePrefetchPolicy:
    """Guesses for the next `depth` layers: experts with at least `least_probability`, best first.

    `has_history` also guesses where a mask that has just become a word goes, by where that word
    was routed when it was new before; it needs token ids. `most_beside_cpu`: guesses at a time
    where the CPU computes misses too; what the copy lane can take before the layer is due.
    Source: architecture.md 4, prefetch into staging; the estimate is that of `calibrated.py` with
    the fates of tokens known.
    """

    fills_pool = False

    def __init__(
        self,
        shape: MoeShape,
        *,
        depth: int = 1,
        least_probability: float = 0.4,
        has_history: bool = False,
        most_beside_cpu: int = 0,
    ) -> None:
        self.most_beside_cpu = most_beside_cpu
        self._shape = shape
        self._depth = depth
        self._least_probability = least_probability
        self._has_history = has_history
        layers = range(shape.num_layers)
        num_codes = NUM_KINDS * NUM_KINDS * _NUM_FATES
        self._token_rates = [Rates(num_codes, shape.top_k, 0.5) for _ in layers]
        self._history_rates = [Rates(1, shape.top_k, 0.3) for _ in layers]
        rates = (shape.num_layers, NUM_KINDS * NUM_KINDS, 2 * shape.num_experts)
        self._expert_hits, self._expert_trials = np.zeros(rates), np.zeros(rates)
        self._layer_hits = np.full((shape.num_layers, NUM_KINDS * NUM_KINDS, 2), 0.4)
        self._layer_trials = np.ones((shape.num_layers, NUM_KINDS * NUM_KINDS, 2))
        self._experts = np.arange(shape.num_experts)
        self._seen: list[_Seen | None] = [None] * shape.num_layers
        self._guesses: dict[int, _Guess] = {}
        # Token id -> experts [L, K] that it was routed to in its last first forward as a word.
        self._records: dict[int, IntArray] = {}

    def predict(self, context: ForwardContext, demand: LayerDemand | None) -> IntArray:
        if demand is None:
            self._guesses = {}
            coming = range(min(self._depth, self._shape.num_layers))
        else:
            self._observe(demand)
            last = min(demand.layer + self._depth, self._shape.num_layers - 1)
            coming = range(demand.layer + 1, last + 1)
        parts = [self._guess(layer, context) for layer in coming]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def victim_scores(self) -> FloatArray:
        return np.zeros((self._shape.num_layers, self._shape.num_experts))

    def _guess(self, layer: int, context: ForwardContext) -> IntArray:
        guess = self._guesses.get(layer)
        if guess is None:
            seen = self._seen[layer]
            if seen is None:
                return np.empty(0, dtype=np.int64)
            guess = self._guesses[layer] = self._estimate(layer, seen, context)
        likely = (guess.probabilities >= self._least_probability).nonzero()[0]
        order = np.argsort(-guess.probabilities[likely], kind="stable")
        numbers: IntArray = layer * self._shape.num_experts + likely[order]
        return numbers

    def _estimate(self, layer: int, seen: _Seen, context: ForwardContext) -> _Guess:
        num_experts = self._shape.num_experts
        transition = seen.kind * NUM_KINDS + kind_of(context.rows)
        means = self._layer_hits[layer, transition] / self._layer_trials[layer, transition]
        hits = self._expert_hits[layer, transition].reshape(2, -1)
        trials = self._expert_trials[layer, transition].reshape(2, -1)
        rates = (hits + _PRIOR_WEIGHT * means[:, None]) / (trials + _PRIOR_WEIGHT)
        rates = bounded(rates)
        own = np.where(seen.is_active, rates[1], rates[0])
        token_of = match_tokens(seen.rows, seen.starts, context)
        tokens = (token_of >= 0).nonzero()[0]
        if seen.rows[0].phase == Phase.PREFILL:
            tokens = tokens[:0]
        token_of = token_of[tokens]
        is_masked = context.token_state[token_of] == TokenState.MASKED
        was_masked = seen.states[tokens] == TokenState.MASKED
        fates = np.where(is_masked, _STILL_MASK, np.where(was_masked, _NEW_WORD, _STILL_WORD))
        codes = transition * _NUM_FATES + fates
        history_token_of, history_ids = self._recall(layer, context, token_of[fates == _NEW_WORD])
        probabilities = own
        if len(tokens):
            misses = self._token_rates[layer].log_misses(codes, self._shape.top_k)
            log_miss = np.bincount(seen.topk_ids[tokens].ravel(), misses.ravel(), num_experts)
            if len(history_ids):
                nobody = np.zeros(len(history_ids), dtype=np.int64)
                misses = self._history_rates[layer].log_misses(nobody, self._shape.top_k)
                log_miss += np.bincount(history_ids.ravel(), misses.ravel(), num_experts)
            by_tokens = bounded(1 - (1 - rates[0]) * np.exp(log_miss))
            log_odds = _TOKEN_SHARE * logit(by_tokens) + (1 - _TOKEN_SHARE) * logit(own)
            probabilities = 1 / (1 + np.exp(-log_odds))
        return _Guess(
            seen,
            context.num_tokens,
            transition,
            tokens,
            codes,
            token_of,
            history_ids,
            history_token_of,
            probabilities,
        )

    def _recall(
        self, layer: int, context: ForwardContext, new_words: IntArray
    ) -> tuple[IntArray, IntArray]:
        """The new words with a record, and where they went."""
        token_ids = context.token_ids
        if self._has_history and token_ids is not None:
            found = [
                (token, record[layer])
                for token in new_words.tolist()
                if (record := self._records.get(int(token_ids[token]))) is not None
                and record[layer, 0] >= 0
            ]
            if found:
                return np.array([t for t, _ in found]), np.array([ids for _, ids in found])
        nothing = np.empty((0, self._shape.top_k), dtype=np.int64)
        return np.empty(0, dtype=np.int64), nothing

    def _observe(self, demand: LayerDemand) -> None:
        """Learn from what the layer wanted of what it was guessed to want. Mutates: the counts."""
        layer, context = demand.layer, demand.context
        is_active = np.zeros(self._shape.num_experts, dtype=np.int64)
        is_active[demand.expert_ids] = 1
        seen = self._seen[layer]
        if seen is not None:
            guess = self._guesses.get(layer)
            # The last layer may see some of the rows only.
            if guess is None or guess.num_tokens != context.num_tokens:
                guess = self._estimate(layer, seen, context)
            self._learn(layer, guess, demand, is_active)
        if self._has_history and context.token_ids is not None and not context.is_prefill:
            self._record(layer, demand)
        self._seen[layer] = _Seen(
            context.rows,
            row_starts(context),
            kind_of(context.rows),
            context.token_state,
            demand.topk_ids,
            is_active,
        )

    def _learn(self, layer: int, guess: _Guess, demand: LayerDemand, is_active: IntArray) -> None:
        num_experts, was_active = self._shape.num_experts, guess.seen.is_active
        cells = was_active * num_experts + self._experts
        hits = self._expert_hits[layer, guess.transition]
        trials = self._expert_trials[layer, guess.transition]
        hits[cells] = _MEMORY * hits[cells] + is_active
        trials[cells] = _MEMORY * trials[cells] + 1
        num_were, num_stayed = int(was_active.sum()), int((is_active * was_active).sum())
        layer_hits = self._layer_hits[layer, guess.transition]
        layer_trials = self._layer_trials[layer, guess.transition]
        layer_hits *= _MEMORY
        layer_trials *= _MEMORY
        layer_hits += (int(is_active.sum()) - num_stayed, num_stayed)
        layer_trials += (num_experts - num_were, num_were)
        if not len(guess.tokens):
            return
        is_wanted = np.zeros((len(demand.topk_ids), num_experts), dtype=np.bool_)
        is_wanted[np.arange(len(demand.topk_ids))[:, None], demand.topk_ids] = True
        kept = is_wanted[guess.token_of[:, None], guess.seen.topk_ids[guess.tokens]]
        self._token_rates[layer].learn(guess.codes, kept)
        if len(guess.history_ids):
            kept = is_wanted[guess.history_token_of[:, None], guess.history_ids]
            self._history_rates[layer].learn(np.zeros(len(kept), dtype=np.int64), kept)

    def _record(self, layer: int, demand: LayerDemand) -> None:
        """Take down where words are routed."""
        token_ids = demand.context.token_ids
        assert token_ids is not None
        is_word = demand.context.token_state != TokenState.MASKED
        for token in is_word.nonzero()[0].tolist():
            record = self._records.get(int(token_ids[token]))
            if record is None:
                record = np.full((self._shape.num_layers, self._shape.top_k), -1, dtype=np.int64)
                self._records[int(token_ids[token])] = record
            record[layer] = demand.topk_ids[token]

    def start_forward(self, context: ForwardContext) -> None:
        pass

    def end_forward(self, outcome: ForwardOutcome) -> None:
        pass

    def end_request(self, request_id: int) -> None:
        pass
