"""Block diffusion under a grammar: which tokens a forward may commit, and which need none.

The grammar reads an answer from its start, a diffusion model writes a block in any order. So the
answer has a *validated prefix*: the tokens that the grammar has consumed. It only grows from one
step to the next and nothing in it is edited, whatever the algorithm.

- At the first open position the grammar says which tokens are allowed. The best of them is taken
  while the model is confident. Where it is not from the first, it is taken still, unless the model
  is surer of a position further on: then that goes first, as without a grammar.
- Tokens that leave no choice are written without a forward, whole blocks of them if need be.
- Beyond the prefix, positions that the model is confident of are committed tentatively. When the
  prefix reaches one it is validated, or masked again with all that is behind it. So a block takes
  at most twice as many forwards as it has positions.
- Which positions are accepted is decided by threshold and steps, or by `num_to_transfer` under
  joint_threshold. Rules that look at logits in other ways (HONOURED_ALGORITHMS has the ones that
  do not) would have to be asked about positions whose tokens the grammar replaces.
- A closing, tokens that complete the value, is known at every step, and never longer than what is
  left of `max_tokens`: commits that would make it so are taken back and others tried, at last the
  closing's own token.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oled_moe.closing import Closing, GrammarMark, GrammarState
from oled_moe.config import DecodingParams
from oled_moe.errors import OledMoeError
from oled_moe.layers import Logits
from oled_moe.sampling import ConfidenceArray, filtered_probabilities, sample
from oled_moe.types import BoolArray, FloatArray, IntArray
from oled_moe.unmasking import BlockState, BlockUpdate, UnmaskingPolicy, transfer_schedule

# Whose rule is kept; the others' masks are accepted as those of low_confidence are.
HONOURED_ALGORITHMS = ("low_confidence", "low_confidence_dynamic", "threshold", "joint_threshold")
# Tokens tried at a position before the closing's own is taken.
_MAX_TRIED = 8
# A position further on is settled before an unsure one only where the model is surer than this.
_LIKELY = 0.5


@dataclass(slots=True)
class ConstraintCounters:
    """What the grammar did to one answer, in tokens; `num_taken_back` counts tentative ones."""

    num_forced: int = 0
    num_chosen: int = 0
    num_overruled: int = 0
    num_taken_back: int = 0
    num_closing: int = 0


@dataclass(slots=True)
class _Step:
    """What one forward gave: logits rows, their positions, draws, and what has been chosen."""

    logits_NV: Logits
    row_of: dict[int, int]
    draws_N: FloatArray | None
    best_ids: IntArray
    confidence: ConfidenceArray
    num_least: int
    num_chosen: int = 0


@dataclass(frozen=True, slots=True)
class _Mark:
    """A place to come back to."""

    token_ids: IntArray
    is_masked: BoolArray
    open: int
    num_left: int
    grammar: GrammarMark
    num_tokens: int | None
    closing: tuple[int, ...] | None
    counters: ConstraintCounters
    num_chosen: int
    confidence: ConfidenceArray | None


class GrammarConstraint:
    """The constraint of one answer.

    `grammar`: at its start. `renormalises`: a token's confidence is its share of the probability
    of all allowed tokens; otherwise of all tokens, which accepts fewer of them a forward.
    """

    def __init__(
        self, grammar: GrammarState, params: DecodingParams, *, renormalises: bool = False
    ) -> None:
        self.counters = ConstraintCounters()
        self._grammar = grammar
        self._params = params
        self._renormalises = renormalises
        self._schedule = transfer_schedule(params.block_length, params.steps)
        ends = [*params.stop_token_ids]
        if params.eos_token_id is not None:
            ends.insert(0, params.eos_token_id)
        self._end_ids = [] if params.ignore_eos else ends
        self._num_tokens: int | None = None
        # Here is time for a long search; in between forwards, others wait.
        closing = grammar.first_closing(params.max_tokens)
        self._closing = _tokens_of(closing)
        self._error: OledMoeError | None = None
        # Of the block at work: the first position that is not validated, where positions end that
        # the budget allows, and how much of it is left.
        self._open = 0
        self._end = 0
        self._num_left = 0
        self._num_waits = 0

    @property
    def num_tokens(self) -> int | None:
        return self._num_tokens

    @property
    def error(self) -> OledMoeError | None:
        return self._error

    @property
    def is_complete(self) -> bool:
        return self._num_tokens is not None or self._grammar.is_accepting

    def num_final(self, state: BlockState) -> int:
        return self._open

    def wants_forward(self, state: BlockState) -> bool:
        return self._num_tokens is None and self._open < self._end

    def start_block(self, state: BlockState, num_left: int) -> None:
        self._open = int(np.count_nonzero(state.is_prompt))
        self._end = min(len(state.token_ids), self._open + num_left)
        self._num_left = num_left
        self._num_waits = 0
        if self._closing is None:
            self._closing = _tokens_of(self._grammar.closing(num_left))
        self._advance(state, None)

    def update(
        self,
        state: BlockState,
        logits_NV: Logits,
        is_looked_at: BoolArray,
        unmasking: UnmaskingPolicy,
        draws_N: FloatArray | None,
    ) -> tuple[IntArray, ConfidenceArray, BlockUpdate]:
        step = self._step(state, logits_NV, is_looked_at, draws_N)
        was_masked, old_ids = state.is_masked.copy(), state.token_ids.copy()
        if unmasking.edits:
            self._edit_tentative(state, step)
        self._advance(state, step)
        if self.wants_forward(state):
            self._commit_tentatively(state, step)
        state.num_steps += 1
        accepted = was_masked & ~state.is_masked
        edited = ~was_masked & (old_ids != state.token_ids)
        step.confidence[~was_masked & state.is_masked] = 0
        step.confidence[(accepted | edited) & np.isnan(step.confidence)] = 1
        return step.best_ids, step.confidence, BlockUpdate(accepted, edited)

    def _step(
        self,
        state: BlockState,
        logits_NV: Logits,
        is_looked_at: BoolArray,
        draws_N: FloatArray | None,
    ) -> _Step:
        params = self._params
        best_ids = np.full(len(is_looked_at), -1, dtype=np.int64)
        confidence = np.full(len(is_looked_at), np.nan, dtype=np.float32)
        best_ids[is_looked_at], confidence[is_looked_at] = sample(logits_NV, params, draws_N)
        rows = {int(position): row for row, position in enumerate(is_looked_at.nonzero()[0])}
        if params.algorithm == "joint_threshold":
            num_least = params.num_to_transfer
        else:
            num_least = self._schedule[min(state.num_steps, len(self._schedule) - 1)]
        return _Step(logits_NV, rows, draws_N, best_ids, confidence, num_least)

    # The validated prefix

    def _advance(self, state: BlockState, step: _Step | None) -> None:
        """Lengthen the prefix as far as this step allows. Where the grammar fails, that is the end
        of this answer, and none of those that share its forwards need know."""
        try:
            self._lengthen(state, step)
        except OledMoeError as error:
            self._error = error
            self._num_tokens = self._grammar.num_tokens

    def _lengthen(self, state: BlockState, step: _Step | None) -> None:
        """As far as this step allows, so that a closing still fits."""
        mark = self._mark(state, step)
        while self._grow(state, step):
            pass
        if self._fits(mark):
            return
        # Once more, with a look at the closing behind every token.
        self._return_to(state, mark, step)
        while self._grow_carefully(state, step):
            pass

    def _grow(self, state: BlockState, step: _Step | None, *, skipped: int = 0) -> bool:
        """One more token of the prefix; False where only another forward can say which.

        `skipped`: pass over so many of the tokens that the model likes best here.
        """
        grammar = self._grammar
        if not self.wants_forward(state):
            return False
        if grammar.is_exhausted:
            self._finish(state, self._end_ids[0] if self._end_ids else None)
            return False
        position = self._open
        if not state.is_masked[position]:
            self._settle_tentative(state, position)
            return True
        forced = grammar.forced()
        is_allowed = None if forced else self._allowed()
        if is_allowed is not None and not is_allowed.any():
            # Complete, and what might follow has no token.
            self._finish(state, None)
            return False
        if is_allowed is not None and is_allowed.sum() == 1 and not grammar.is_accepting:
            forced = is_allowed.nonzero()[0].tolist()
        if forced:
            self._take(state, forced[0])
            self.counters.num_forced += 1
            return True
        if is_allowed is None or step is None or position not in step.row_of:
            return False
        return self._choose(state, step, is_allowed, skipped)

    def _settle_tentative(self, state: BlockState, position: int) -> None:
        """Validate the token that was committed at the open position, or mask it again."""
        token_id = int(state.token_ids[position])
        if token_id in self._end_ids and self._grammar.is_accepting:
            self._finish(state, token_id)
        elif self._grammar.allows(token_id):
            self._take(state, token_id)
        else:
            self._take_back(state, position)

    def _allowed(self) -> BoolArray:
        """Tokens that may come next, the ends of the answer among them where it may end."""
        is_allowed = self._grammar.allowed()
        if self._grammar.is_accepting:
            is_allowed[self._end_ids] = True
        return is_allowed

    def _choose(self, state: BlockState, step: _Step, is_allowed: BoolArray, skipped: int) -> bool:
        """Take the model's token at the open position if it must or is confident."""
        position = self._open
        found = self._pick(step, position, is_allowed, skipped)
        if found is None:
            return False
        token_id, confidence = found
        is_due = step.num_chosen < max(1, step.num_least)
        # Where grammar and model disagree, what the model sees further on is of no use.
        if is_due and token_id == step.best_ids[position]:
            is_due = not self._waits(state, step, confidence)
        if not is_due and not confidence > np.float32(self._params.threshold):
            return False
        step.num_chosen += 1
        step.confidence[position] = confidence
        self.counters.num_chosen += 1
        self.counters.num_overruled += int(token_id != step.best_ids[position])
        if token_id in self._end_ids and self._grammar.is_accepting:
            self._finish(state, token_id)
            return False
        self._take(state, token_id)
        return True

    def _pick(
        self, step: _Step, position: int, is_allowed: BoolArray, skipped: int
    ) -> tuple[int, float] | None:
        """The best allowed token or the draw among them, and its confidence; None where all that
        are allowed are skipped."""
        params, best_id = self._params, int(step.best_ids[position])
        is_greedy = params.is_greedy
        if is_greedy and not skipped and not self._renormalises and is_allowed[best_id]:
            return best_id, float(step.confidence[position])
        row_V = step.logits_NV[step.row_of[position]].float().cpu()
        if not is_greedy:
            row_V[params.mask_token_id] = float("-inf")
        allowed_V = torch.from_numpy(is_allowed)
        masked_V = row_V.masked_fill(~allowed_V, float("-inf"))
        if is_greedy or skipped:
            order = masked_V.topk(min(skipped + 1, int(is_allowed.sum()))).indices.tolist()
            if len(order) <= skipped:
                return None
            token_id = order[skipped]
        else:
            assert step.draws_N is not None
            draw = step.draws_N[step.row_of[position]]
            token_id = _drawn(self._probabilities(masked_V), float(draw))
        probabilities_V = self._probabilities(masked_V if self._renormalises else row_V)
        return token_id, float(probabilities_V[token_id])

    def _probabilities(self, logits_V: Tensor) -> Tensor:
        params = self._params
        if params.temperature == 0:
            return logits_V.softmax(-1)
        return filtered_probabilities(
            logits_V[None], temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
        )[0]

    def _take(self, state: BlockState, token_id: int) -> None:
        """Consume a token at the open position; tentative ones behind another token there fall."""
        position = self._open
        if not state.is_masked[position] and state.token_ids[position] != token_id:
            self._take_back(state, position)
        self._grammar.consume(token_id)
        self._write(state, token_id)

    def _write(self, state: BlockState, token_id: int) -> None:
        state.token_ids[self._open] = token_id
        state.is_masked[self._open] = False
        self._open += 1
        self._num_left -= 1

    def _take_back(self, state: BlockState, position: int) -> None:
        """Mask a tentative token again, and all that were committed in its company behind it."""
        is_behind = np.arange(len(state.token_ids)) >= position
        self.counters.num_taken_back += int((is_behind & ~state.is_masked).sum())
        state.token_ids[is_behind] = self._params.mask_token_id
        state.is_masked[is_behind] = True

    def _finish(self, state: BlockState, end_id: int | None) -> None:
        """The answer ends here, with an end token where it has one."""
        self._num_tokens = self._grammar.num_tokens
        if end_id is not None:
            self._write(state, end_id)
            self._num_tokens += 1

    # The budget

    def _fits(self, mark: _Mark) -> bool:
        """Whether what has been consumed since `mark` can be closed in what is left of the budget;
        so it is if no closing was known before. Mutates: the closing."""
        taken = self._grammar.since(mark.grammar.num_tokens)
        if self._closing is None or self._num_tokens is not None or not taken:
            return True
        # Most tokens are a part of the closing, or content that leaves it, or its rest, as it was.
        most, is_left = min(len(taken), len(self._closing), _MAX_TRIED), False
        for num_done in range(most, -1, -1):
            rest = self._closing[num_done:]
            is_left = is_left or self._grammar.ends_with(rest)
            if is_left and len(rest) <= self._num_left:
                self._closing = rest
                return True
            if is_left:
                break
        # A long search hardly finds what is shorter than a closing that was left as it was.
        closing = _tokens_of(self._grammar.closing(self._num_left, is_quick=is_left))
        if closing is None:
            return False
        self._closing = closing
        return True

    def _grow_carefully(self, state: BlockState, step: _Step | None) -> bool:
        """As `_grow`, but only by what can be closed: the tokens that the model likes best are
        tried in turn where one is due, and at last the closing's own is taken."""
        mark = self._mark(state, step)
        for skipped in range(_MAX_TRIED):
            goes_on = self._grow(state, step, skipped=skipped)
            is_untried = skipped and step is not None and step.num_chosen == mark.num_chosen
            if is_untried:
                # Nothing else is allowed here.
                break
            if self._fits(mark):
                return goes_on
            is_tentative = not mark.is_masked[mark.open]
            is_choice = step is not None and step.num_chosen > mark.num_chosen
            self._return_to(state, mark, step)
            if is_tentative:
                self._take_back(state, self._open)
                return True
            if is_choice and mark.num_chosen:
                return False
            if not is_choice:
                break
        self._take_of_closing(state, step)
        return self.wants_forward(state)

    def _take_of_closing(self, state: BlockState, step: _Step | None) -> None:
        """Go one token towards the end."""
        assert self._closing is not None
        self.counters.num_closing += 1
        if step is not None:
            step.num_chosen += 1
            step.confidence[self._open] = 1
        if not self._closing:
            self._finish(state, self._end_ids[0] if self._end_ids else None)
            return
        token_id, *rest = self._closing
        self._take(state, token_id)
        self._closing = tuple(rest)

    def _mark(self, state: BlockState, step: _Step | None) -> _Mark:
        return _Mark(
            state.token_ids.copy(),
            state.is_masked.copy(),
            self._open,
            self._num_left,
            self._grammar.mark(),
            self._num_tokens,
            self._closing,
            replace(self.counters),
            0 if step is None else step.num_chosen,
            None if step is None else step.confidence.copy(),
        )

    def _return_to(self, state: BlockState, mark: _Mark, step: _Step | None) -> None:
        state.token_ids[:], state.is_masked[:] = mark.token_ids, mark.is_masked
        self._open, self._num_left = mark.open, mark.num_left
        self._grammar.return_to(mark.grammar)
        self._num_tokens, self._closing = mark.num_tokens, mark.closing
        self.counters = replace(mark.counters)
        if step is not None and mark.confidence is not None:
            step.num_chosen, step.confidence = mark.num_chosen, mark.confidence.copy()

    # Beyond the prefix

    def _edit_tentative(self, state: BlockState, step: _Step) -> None:
        """Replace tentative tokens where the model is sure of another now."""
        is_sure = step.confidence > np.float32(self._params.edit_threshold)
        is_edited = ~state.is_masked & self._is_beyond(state) & is_sure
        state.token_ids[is_edited] = step.best_ids[is_edited]

    def _commit_tentatively(self, state: BlockState, step: _Step) -> None:
        """Commit what the model is confident of behind the first open position."""
        # NaN, where nobody looked, is above nothing.
        is_sure = step.confidence > np.float32(self._params.threshold)
        is_open = state.is_masked & self._is_beyond(state)
        is_committed = is_open & is_sure
        if step.num_chosen == 0:
            self._num_waits += 1
        if step.num_chosen == 0 and is_open.any() and not is_committed.any():
            is_committed[int(np.where(is_open, step.confidence, -1).argmax())] = True
        state.token_ids[is_committed] = step.best_ids[is_committed]
        state.is_masked[is_committed] = False

    def _waits(self, state: BlockState, step: _Step, confidence: float) -> bool:
        """Whether the model is surer of a position further on, which then is committed first."""
        # No longer than once a position: what the grammar refuses may be committed ever again.
        if step.num_chosen or self._num_waits >= len(state.token_ids):
            return False
        rest = step.confidence[state.is_masked & self._is_beyond(state)]
        return bool((rest > np.float32(max(confidence, _LIKELY))).any())

    def _is_beyond(self, state: BlockState) -> BoolArray:
        positions = np.arange(len(state.token_ids))
        is_beyond: BoolArray = (positions > self._open) & (positions < self._end)
        return is_beyond


def _tokens_of(closing: Closing | None) -> tuple[int, ...] | None:
    return None if closing is None else closing.token_ids


def _drawn(probabilities_V: Tensor, draw: float) -> int:
    """The token at which the running sum of probabilities passes the draw."""
    sums_V = probabilities_V.double().cumsum(-1)
    token_id = int(torch.searchsorted(sums_V, draw * sums_V[-1], right=True))
    # Rounding must not carry a draw past the last token that has any probability.
    return min(token_id, int(torch.searchsorted(sums_V, sums_V[-1])))
