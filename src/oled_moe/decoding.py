"""BlockDiffusionDecoder: prefill, then block by block, step by step, for one sequence or many.

A DecodingSequence is where one request stands; the decoder runs forwards that several of them
share. Both know tokens and masks; experts, caches and policies are below them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from oled_moe.config import DecodingParams
from oled_moe.edits import moved
from oled_moe.errors import OledMoeError
from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import ForwardBatch, Logits, RowLogits, Segment, rows_of
from oled_moe.models import Model
from oled_moe.sampling import Guesses, guess, takes_plain_best
from oled_moe.types import (
    BoolArray,
    FloatArray,
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    IntArray,
    Phase,
    TokenState,
)
from oled_moe.unmasking import (
    UNMASKING,
    BlockState,
    BlockUpdate,
    Constraint,
    UnmaskingPolicy,
)

# Layer-time confidence of a masked position that no forward has seen yet (architecture.md 3.1).
FRESH_CONFIDENCE = 0.5
# Most prompt tokens in one forward, rounded to whole blocks: bounds activations of long prompts.
MAX_PREFILL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class TokenChange:
    """One position that a step changed. `position` counts from the start of the prompt."""

    position: int
    from_id: int
    to_id: int
    confidence: float


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """What one denoising forward did to the block at work.

    `answer_ids` are all answer tokens that no later step changes, cut at the end of the answer:
    those of finished blocks, and a gap-free beginning of the block at work where its rule never
    edits; `answer_probabilities` what the model gave each when it was committed, 1 where a
    constraint left no choice. `is_last` says that there are no more. `token_ids` and `is_masked`
    are the block as it stands.
    """

    block_id: int
    step_id: int
    block_start: int
    token_ids: tuple[int, ...]
    is_masked: tuple[bool, ...]
    changes: tuple[TokenChange, ...]
    is_block_done: bool
    is_last: bool
    finish_reason: str | None
    answer_ids: tuple[int, ...]
    answer_probabilities: tuple[float, ...]


@dataclass(slots=True)
class DecodingCounters:
    """Forwards by kind and moments of one request. Units: seconds on the performance counter."""

    num_prefill_forwards: int = 0
    num_denoise_forwards: int = 0
    num_commit_forwards: int = 0
    start_s: float = field(default_factory=time.perf_counter)
    prefill_end_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0


# Given the answer so far, how many of its tokens to keep, or None to go on.
StopRule = Callable[[Sequence[int]], int | None]


def never_stop(answer_ids: Sequence[int]) -> int | None:
    """The stop rule of a request without stop strings."""
    return None


@dataclass(frozen=True, slots=True)
class Part:
    """One row of a forward: what the model is given and what policies may see of it.

    `start`: the sequence position of its first token. Shapes: [T] each; known_ids are tokens, and
    at masked positions the latest guess or −1; logit_tokens int64 [N], which logits are wanted;
    added_TD [T, D], what is added to the embeddings, None for nothing;
    condition: see `Segment`.
    """

    row: ForwardRow
    start: int
    token_ids: IntArray
    confidence: npt.NDArray[np.float32]
    states: npt.NDArray[np.uint8]
    known_ids: IntArray
    logit_tokens: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    added_TD: torch.Tensor | None = None
    condition: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What a denoising forward came to for the tokens of a row, [T] each (see ForwardOutcome)."""

    confidence: npt.NDArray[np.float32]
    accepted: BoolArray


class DecodingSequence:
    """One request on its way through the decoder: its tokens, keys and values, and how far it is.

    Blocks lie on multiples of their length from `origin` on, which is before the first; the first
    may begin with the end of the prompt. Each sees those before it, which are in the cache. A mask
    id in the prompt is prompt. A sequence that is dropped leaves nothing behind.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: DecodingParams,
        request_id: int,
        new_kv: Callable[[int], SequenceKv],
        *,
        stop_rule: StopRule,
        constraint: Constraint | None,
        counters: DecodingCounters,
        origin: int = 0,
        num_reserved: int = 0,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.request_id = request_id
        self.counters = counters
        self.finish_reason: str | None = None
        self._stop_rule = stop_rule
        self._constraint = constraint
        self._generator = torch.Generator().manual_seed(params.seed)
        self._unmasking: UnmaskingPolicy
        self._answer_ids: list[int] = []
        self._probabilities: list[float] = []
        # Finished blocks whose keys and values are not those of their final tokens yet.
        self._unstored: list[Part] = []
        length = params.block_length
        self._origin = origin
        self._num_blocks = -(-(len(prompt_ids) + params.max_tokens - origin) // length)
        self.kv = new_kv(origin + self._num_blocks * length + num_reserved)
        self._prefill_end = len(prompt_ids) // length * length
        self._block_id = len(prompt_ids) // length
        self._state = BlockState.start([], block_length=0, mask_id=0)
        self._block_probability = self._confidence = np.empty(0, dtype=np.float32)
        self._best_ids: IntArray = np.empty(0, dtype=np.int64)
        self._is_looked_at: BoolArray = np.empty(0, dtype=np.bool_)
        self._start_block()
        if self._prefill_end == 0:
            counters.prefill_end_s = time.perf_counter()

    @property
    def block_length(self) -> int:
        """Sequences of the same may share denoising forwards."""
        return self.params.block_length

    @property
    def num_step_tokens(self) -> int:
        """Tokens that a denoising forward is given, but for what rides along."""
        return self.params.block_length

    @property
    def attention_length(self) -> int:
        """Length of the blocks within which positions see each other."""
        return self.params.block_length

    @property
    def reads_rows(self) -> bool:
        """Whether its logits may come a few rows at a time, because there may be very many."""
        return False

    @property
    def _block_start(self) -> int:
        """Where the block at work begins, from the start of the prompt."""
        return self._origin + self._block_id * self.params.block_length

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended."""
        return self.finish_reason is not None

    @property
    def error(self) -> OledMoeError | None:
        """Why the answer ended before its time, where a constraint could not go on."""
        return None if self._constraint is None else self._constraint.error

    @property
    def num_left_to_prefill(self) -> int:
        """Prompt tokens, in whole blocks, that are not in the cache yet."""
        return 0 if self.is_finished else max(0, self._prefill_end - self.kv.length)

    @property
    def num_to_prefill(self) -> int:
        """Prompt tokens of the next prefill forward, 0 once there is nothing left to prefill."""
        length = self.params.block_length
        return min(self.num_left_to_prefill, max(length, MAX_PREFILL_TOKENS // length * length))

    # The parts of forwards

    def prefill_part(self) -> "Part":
        """The next whole blocks of the prompt."""
        start, size = self.kv.length, self.num_to_prefill
        token_ids = np.array(self.prompt_ids[start : start + size])
        return Part(
            self._row(start // self.params.block_length, 0, Phase.PREFILL, size),
            start,
            token_ids,
            np.ones(size, dtype=np.float32),
            np.full(size, TokenState.PROMPT, dtype=np.uint8),
            token_ids,
        )

    def end_prefill(self) -> None:
        """The part is in the cache. Mutates: keys and values."""
        self.kv.advance(self.num_to_prefill)
        self.counters.num_prefill_forwards += 1
        if not self.num_left_to_prefill:
            self.counters.prefill_end_s = time.perf_counter()

    def denoise_parts(self, *, wants_all_logits: bool) -> "tuple[Part, ...]":
        """The rest of the prompt, finished blocks that are not stored, and the block at work."""
        self._look(wants_all_logits)
        state, length = self._state, self.params.block_length
        part = Part(
            self._row(self._block_id, state.num_steps, Phase.DENOISE, length),
            self._block_start,
            state.token_ids,
            np.where(state.is_masked, self._confidence, np.float32(1.0)),
            token_states(state),
            np.where(state.is_masked, self._best_ids, state.token_ids),
            self._is_looked_at.nonzero()[0],
        )
        if not self.num_to_prefill:
            return (*self._unstored, part)
        assert self.num_to_prefill == self.num_left_to_prefill, "the prompt is too long to ride"
        self.counters.prefill_end_s = time.perf_counter()
        return (self.prefill_part(), *self._unstored, part)

    def _look(self, wants_all_logits: bool) -> None:
        """Decide whose logits the next forward is asked for. Mutates: the sequence."""
        self._is_looked_at = self._unmasking.looked_at(self._state)
        if wants_all_logits:
            self._is_looked_at[:] = True

    def _draws(self) -> FloatArray | None:
        """This step's random numbers [N] in [0, 1), None where nothing is drawn.

        Every position of every step has one of its own, looked at or not, so that what is sampled
        does not depend on which are.
        """
        if self.params.is_greedy:
            return None
        size = len(self._is_looked_at)
        draws = torch.rand(size, dtype=torch.float64, generator=self._generator).numpy()
        chosen: FloatArray = draws[self._is_looked_at]
        return chosen

    @property
    def takes_plain_best(self) -> bool:
        """Whether nothing but the likeliest tokens of its rows is wanted of the logits."""
        rule = self._unmasking
        is_plain = rule.entropy_of is None and not rule.fuses and self._constraint is None
        return is_plain and takes_plain_best(self.params)

    def take(
        self, logits_NV: Logits, *, best: Guesses | None = None
    ) -> tuple[DecodingStep, RowOutcome]:
        """What a forward's logits make of the block.

        `best`: what is guessed of the rows where somebody has looked at them already. Mutates: the
        sequence; a finished block is stored or left to be, and the next one begun.
        """
        state, counters = self._state, self.counters
        before, was_masked = state.token_ids.copy(), state.is_masked.copy()
        guesses, update = self._settle(logits_NV, best)
        confidence = guesses.confidence
        self._best_ids, self._confidence = guesses.token_ids, confidence
        is_changed = update.accepted | update.edited
        self._block_probability[is_changed] = confidence[is_changed]
        outcome = self._outcome(confidence, update.accepted)
        if update.sources is not None:
            self._follow(update.sources)
            is_changed = (before != state.token_ids) | (was_masked != state.is_masked)
        self._keep_stored()
        counters.num_denoise_forwards += 1
        counters.last_token_s = time.perf_counter()
        counters.first_token_s = counters.first_token_s or counters.last_token_s
        is_done = self._ends_mid_block(update) or not self._wants_forward()
        step = DecodingStep(
            self._block_id,
            state.num_steps - 1,
            self._block_start,
            tuple(state.token_ids.tolist()),
            tuple(state.is_masked.tolist()),
            _changes(before, state, is_changed, self._confidence, self._block_start),
            is_done,
            False,
            None,
            (),
            (),
        )
        if is_done:
            self._end_block()
        return self._with_answer(step), outcome

    def _follow(self, sources: IntArray) -> None:
        """What is known of tokens moves with them. Mutates: the sequence."""
        self._best_ids = moved(self._best_ids, sources, -1)
        self._confidence = moved(self._confidence, sources, FRESH_CONFIDENCE)
        self._block_probability = moved(self._block_probability, sources, 1)

    def _keep_stored(self) -> None:
        """Keep what the forward stored of final tokens. Mutates: keys and values."""
        self.kv.advance(self.num_to_prefill)
        for part in self._unstored:
            self.kv.advance(part.row.num_tokens)
        self._unstored = []

    def _settle(self, logits_NV: Logits, best: Guesses | None) -> tuple[Guesses, BlockUpdate]:
        """Guess from the logits and write what is settled by that. Mutates: the block."""
        state, is_looked_at, rule = self._state, self._is_looked_at, self._unmasking
        if self._constraint is not None:
            ids, confidence, update = self._constraint.update(
                state, logits_NV, is_looked_at, rule, self._draws()
            )
            return Guesses(ids, confidence), update
        if best is None:
            if rule.fuses:
                plain = logits_NV.whole() if isinstance(logits_NV, RowLogits) else logits_NV
                logits_NV = rule.fuse(state, plain, is_looked_at)
            best = guess(logits_NV, self.params, self._draws(), entropy_of=rule.entropy_of)
        guesses = best.spread(is_looked_at)
        return guesses, rule.update(state, guesses)

    def _outcome(self, confidence: npt.NDArray[np.float32], accepted: BoolArray) -> RowOutcome:
        """What came of the block, for each token of its row."""
        return RowOutcome(confidence, accepted)

    def ended_step(self) -> "DecodingStep":
        """The only step of an answer that needed no forward."""
        block, counters = self._state, self.counters
        counters.first_token_s = counters.last_token_s = time.perf_counter()
        return self._with_answer(
            DecodingStep(
                self._block_id,
                0,
                self._block_start,
                tuple(block.token_ids.tolist()),
                tuple(block.is_masked.tolist()),
                (),
                True,
                False,
                None,
                (),
                (),
            )
        )

    def parts_to_commit(self) -> "list[Part]":
        """Finished blocks that are not stored, for whoever stores them by forwards of their own."""
        return list(self._unstored)

    def committed(self) -> None:
        """The first of those is stored. Mutates: keys and values."""
        self.kv.advance(self._unstored.pop(0).row.num_tokens)
        self.counters.num_commit_forwards += 1

    # Blocks

    def _start_block(self) -> None:
        """The masks of the next block that needs a forward.

        A constraint may fill blocks by itself; those end here.
        """
        params = self.params
        while True:
            start = self._block_start
            self._state = state = BlockState.start(
                self.prompt_ids[start : start + params.block_length],
                block_length=params.block_length,
                mask_id=params.mask_token_id,
            )
            self._unmasking = UNMASKING[params.algorithm](params)
            self._confidence = np.full(params.block_length, FRESH_CONFIDENCE, dtype=np.float32)
            self._block_probability = np.ones(params.block_length, dtype=np.float32)
            self._best_ids = np.full(params.block_length, -1, dtype=np.int64)
            if self._constraint is not None:
                num_left = params.max_tokens - len(self._answer_ids)
                self._constraint.start_block(state, num_left)
            if self._wants_forward():
                return
            if self._finish_block():
                return

    def _wants_forward(self) -> bool:
        """Whether the block at work needs another forward. Mutates: counters of its state."""
        rule = self._unmasking if self._constraint is None else self._constraint
        return rule.wants_forward(self._state)

    def _end_block(self) -> None:
        """The block at work is done: the next one begins unless the answer has ended."""
        if not self._finish_block():
            self._start_block()

    def _finish_block(self) -> bool:
        """Take the block's tokens into the answer; returns whether it has ended.

        Else the block becomes part of the prefix, or is left to be: its keys and values must come
        from its final tokens. Mutates: the sequence.
        """
        state = self._state
        self._answer_ids += state.token_ids[~state.is_prompt].tolist()
        self._probabilities += self._block_probability[~state.is_prompt].tolist()
        if self._end_of_answer(self._block_id == self._num_blocks - 1):
            return True
        self._leave_block()
        self._block_id += 1
        return False

    def _leave_block(self) -> None:
        """The block at work is part of the prefix from now on. Mutates: the sequence."""
        state, length = self._state, self.params.block_length
        # The last forward of a settled block saw exactly its final tokens.
        if state.is_settled and not self._unstored:
            self.kv.advance(length)
            return
        self._unstored.append(
            Part(
                self._row(self._block_id, state.num_steps, Phase.COMMIT, length),
                self._block_start,
                state.token_ids,
                np.ones(length, dtype=np.float32),
                token_states(state),
                state.token_ids,
            )
        )

    def _row(self, block_id: int, step_id: int, phase: Phase, num_tokens: int) -> ForwardRow:
        return ForwardRow(self.request_id, block_id, step_id, phase, num_tokens)

    # The answer

    def _with_answer(self, step: "DecodingStep") -> "DecodingStep":
        """The step with all that is final of the answer, and its end if it has come."""
        if self.is_finished:
            answer = self._answer_ids
        else:
            answer = self._answer_ids + self._final_in_block()
            answer = answer[: self.params.max_tokens]
            first_end = self._first_end(answer)
            answer = answer if first_end is None else answer[:first_end]
        probabilities = self._probabilities
        if len(answer) > len(probabilities):
            probabilities = [
                *probabilities,
                *self._block_probability[~self._state.is_prompt].tolist(),
            ]
        return replace(
            step,
            is_last=self.is_finished,
            finish_reason=self.finish_reason,
            answer_ids=tuple(answer),
            answer_probabilities=tuple(probabilities[: len(answer)]),
        )

    def _final_in_block(self) -> list[int]:
        """The leading answer tokens of the block at work that no later step changes."""
        state = self._state
        if self._constraint is not None:
            num_final = self._constraint.num_final(state)
        elif self._unmasking.edits:
            return []
        else:
            masks = state.is_masked.nonzero()[0]
            num_final = int(masks[0]) if len(masks) else len(state.token_ids)
        num_prompt = int(np.count_nonzero(state.is_prompt))
        ids: list[int] = state.token_ids[num_prompt:num_final].tolist()
        return ids

    @property
    def _is_closed(self) -> bool:
        """Whether the constraint has nothing that may follow."""
        return self._constraint is not None and self._constraint.num_tokens is not None

    def _ends_mid_block(self, update: BlockUpdate) -> bool:
        """Whether an eos was accepted now and every answer position before the first is filled.

        Source: models.md 4, step 7. The 2.1 loop has no such exit: edits may still remove the eos.
        """
        params, state = self.params, self._state
        if self._is_closed:
            return True
        if not params.eos_early_stop or self._unmasking.edits or params.ignore_eos:
            return False
        is_eos = self._is_end(state.token_ids) & ~state.is_masked & ~state.is_prompt
        if not (is_eos & update.accepted).any():
            return False
        return not state.is_masked[: int(is_eos.argmax())].any()

    def _end_of_answer(self, is_last_block: bool) -> bool:
        """After a block: cut the answer at its end, if that has come. Mutates: the answer."""
        params = self.params
        answer = self._answer_ids[: params.max_tokens]
        if self._constraint is not None:
            # Behind a constraint's end, tokens may stand that were never part of the answer.
            answer = answer[: self._constraint.num_tokens]
        first_end = self._first_end(answer)
        # Some references decode every block without eos_early_stop and cut afterwards; a stop id of
        # the user's own ends the answer whatever the loop.
        may_end = (
            not self._decodes_on
            or params.eos_early_stop
            or (first_end is not None and answer[first_end - 1] in params.stop_token_ids)
        )
        cut = self._stop_rule(answer if first_end is None else answer[:first_end])
        if cut is not None:
            self._finish(cut, "stop")
        elif self._constraint is not None and self._constraint.num_tokens is not None:
            self._finish(self._constraint.num_tokens, "stop")
        elif first_end is not None and (may_end or is_last_block):
            self._finish(first_end, "stop")
        elif is_last_block:
            is_whole = self._constraint is not None and self._constraint.is_complete
            self._finish(len(answer), "stop" if is_whole else "length")
        return self.is_finished

    @property
    def _decodes_on(self) -> bool:
        """Whether blocks behind an eos are decoded too: that is so in the 2.1 reference."""
        return self._unmasking.edits

    def _finish(self, num_tokens: int, reason: str) -> None:
        del self._answer_ids[num_tokens:], self._probabilities[num_tokens:]
        self.finish_reason = reason

    def _first_end(self, answer_ids: list[int]) -> int | None:
        """How many tokens the answer has up to and including the first that ends it."""
        ends = self._is_end(np.array(answer_ids, dtype=np.int64)).nonzero()[0]
        return None if self.params.ignore_eos or not len(ends) else int(ends[0]) + 1

    def _is_end(self, token_ids: IntArray) -> npt.NDArray[np.bool_]:
        # A loop over few ids; np.isin sorts, which takes longer than the rest of a step.
        is_end = np.zeros(len(token_ids), dtype=np.bool_)
        for end_id in self.params.stop_token_ids:
            is_end |= token_ids == end_id
        if self.params.eos_token_id is not None:
            is_end |= token_ids == self.params.eos_token_id
        return is_end


# Makes a request's sequence; called as DecodingSequence is, without `origin` and what follows it.
NewSequence = Callable[..., DecodingSequence]


class BlockDiffusionDecoder:
    """The forwards of all sequences, of which several may share one.

    They may where their `block_length` is the same; each has keys and values, confidences, draws
    and stop rules of its own, so that its tokens do not depend on its company. `new_sequence` makes
    them: by default for models whose blocks see those before them, over a cache of finished ones.
    `start_forward` is called before each forward, `end_forward` after it, once it is known what was
    accepted. With `folds_commit` a finished block's keys and values are stored by the first forward
    of the next block, whose queries see them there; without, by a forward of their own.
    `wants_input_embedding` has contexts carry the embeddings of their tokens; `wants_all_logits`
    has every denoising forward look at all positions of its block, tokens and all, though the rule
    that unmasks asks for fewer; what comes out stays the same.
    Source: models.md 4 (KV-cached equivalent) and 5; architecture.md 3.6 and 4.
    """

    def __init__(
        self,
        model: Model,
        *,
        start_forward: Callable[[ForwardContext], None],
        end_forward: Callable[[ForwardOutcome], None],
        folds_commit: bool = True,
        new_sequence: NewSequence = DecodingSequence,
    ) -> None:
        self._new_sequence = new_sequence
        self.wants_input_embedding = False
        self.wants_all_logits = False
        self._model = model
        self._start_forward = start_forward
        self._end_forward = end_forward
        self._folds_commit = folds_commit
        self._num_forwards = 0

    def decode(
        self,
        prompt_ids: Sequence[int],
        params: DecodingParams,
        *,
        request_id: int = 0,
        stop_rule: StopRule = never_stop,
        counters: DecodingCounters | None = None,
    ) -> Iterator[DecodingStep]:
        """One sequence alone from its prompt to its end; yields after every denoising forward."""
        sequence = self.begin(
            prompt_ids, params, request_id=request_id, stop_rule=stop_rule, counters=counters
        )
        while sequence.num_to_prefill:
            self.prefill([sequence])
        is_last = False
        while not is_last:
            (step,) = self.denoise([sequence])
            is_last = step.is_last
            yield step

    def begin(
        self,
        prompt_ids: Sequence[int],
        params: DecodingParams,
        *,
        request_id: int = 0,
        stop_rule: StopRule = never_stop,
        constraint: Constraint | None = None,
        counters: DecodingCounters | None = None,
    ) -> DecodingSequence:
        """A sequence that will have up to `max_tokens` behind the prompt.

        `prefill` it while it has something to prefill, then `denoise` it until its last step, which
        carries the finish reason.
        """
        return self._new_sequence(
            list(prompt_ids),
            params,
            request_id,
            self._model.new_kv,
            stop_rule=stop_rule,
            constraint=constraint,
            counters=counters or DecodingCounters(),
        )

    def prefill(self, sequences: Sequence[DecodingSequence]) -> None:
        """One forward over the next part of each sequence's prompt. Mutates: the sequences."""
        parts = [(sequence, (sequence.prefill_part(),)) for sequence in sequences]
        self._forward_without_logits(parts)
        for sequence in sequences:
            sequence.end_prefill()

    def denoise(self, sequences: Sequence[DecodingSequence]) -> list[DecodingStep]:
        """One forward over the blocks of all sequences, one step of each. Mutates: them.

        What is left of a prompt, if it is no more than one prefill forward takes, rides along.
        Sequences whose answer needed no forward at all get their only step without one.
        """
        if running := [sequence for sequence in sequences if not sequence.is_finished]:
            found = dict(zip(map(id, running), self._denoise(running), strict=True))
        return [
            found[id(sequence)] if sequence in running else sequence.ended_step()
            for sequence in sequences
        ]

    def _denoise(self, sequences: Sequence[DecodingSequence]) -> list[DecodingStep]:
        parts = [
            (sequence, sequence.denoise_parts(wants_all_logits=self.wants_all_logits))
            for sequence in sequences
        ]
        context, logits_NV = self._forward(parts)
        assert logits_NV is not None
        outcome = ForwardOutcome.without_logits(context)
        ends = np.cumsum([len(own[-1].logit_tokens) for _, own in parts]).tolist()
        rows = [slice(*pair) for pair in zip([0, *ends[:-1]], ends, strict=True)]
        best = _best_of_greedy(sequences, logits_NV, rows)
        steps, end = [], 0
        for (sequence, own), those, greedy in zip(parts, rows, best, strict=True):
            end += sum(part.row.num_tokens for part in own)
            step, row = sequence.take(rows_of(logits_NV, those), best=greedy)
            steps.append(step)
            start = end - own[-1].row.num_tokens
            outcome.token_confidence[start:end] = row.confidence
            outcome.token_accepted[start:end] = row.accepted
        self._end_forward(outcome)
        if not self._folds_commit:
            self._commit(sequences)
        return steps

    def _commit(self, sequences: Sequence[DecodingSequence]) -> None:
        """Store finished blocks by forwards of their own."""
        for sequence in sequences:
            for part in sequence.parts_to_commit():
                self._forward_without_logits([(sequence, (part,))])
                sequence.committed()

    def _forward_without_logits(self, parts: "Sequence[_Parts]") -> None:
        context, _ = self._forward(parts)
        self._end_forward(ForwardOutcome.without_logits(context))

    def _forward(self, parts: "Sequence[_Parts]") -> tuple[ForwardContext, Logits | None]:
        """One forward over consecutive parts of each sequence, its first behind its prefix."""
        every = [part for _, own in parts for part in own]
        length = max(sequence.attention_length for sequence, _ in parts)
        context = self._context(every, length)
        ids = torch.from_numpy(np.concatenate([part.token_ids for part in every]))
        if self.wants_input_embedding:
            embedding = self._model.embed(ids).float().cpu().numpy()
            context = replace(context, input_embedding=embedding)
        self._start_forward(context)
        segments = tuple(
            Segment(
                sequence.kv,
                part.row.num_tokens,
                len(part.logit_tokens) > 0,
                sum(earlier.row.num_tokens for earlier in own[:index]),
                torch.from_numpy(part.logit_tokens),
                part.condition,
            )
            for sequence, own in parts
            for index, part in enumerate(own)
        )
        assert context.token_position is not None
        batch = ForwardBatch(
            ids,
            torch.from_numpy(context.token_position),
            segments,
            context,
            self._inputs(ids, every),
            all(sequence.reads_rows for sequence, _ in parts),
        )
        return context, self._model.forward(batch)

    def _inputs(self, ids: torch.Tensor, parts: "Sequence[Part]") -> torch.Tensor | None:
        """Embeddings with what parts have added to theirs; None where nothing is."""
        if all(part.added_TD is None for part in parts):
            return None
        inputs_TD, end = self._model.embed(ids), 0
        for part in parts:
            start, end = end, end + part.row.num_tokens
            if part.added_TD is not None:
                inputs_TD[start:end] += part.added_TD.to(inputs_TD.dtype)
        return inputs_TD

    def _context(self, parts: "Sequence[Part]", block_length: int) -> ForwardContext:
        self._num_forwards += 1
        return ForwardContext(
            self._num_forwards - 1,
            block_length,
            tuple(part.row for part in parts),
            np.concatenate([part.confidence for part in parts]),
            np.concatenate([part.states for part in parts]),
            np.concatenate([np.arange(part.row.num_tokens) + part.start for part in parts]),
            np.concatenate([part.known_ids for part in parts]),
        )


_Parts = tuple[DecodingSequence, tuple[Part, ...]]


def _best_of_greedy(
    sequences: Sequence[DecodingSequence], logits_NV: Logits, rows: Sequence[slice]
) -> list[Guesses | None]:
    """Guesses of each sequence, or None for all where some want more than the likeliest tokens.

    One pass over all of them, with one synchronisation, where they agree about what is never
    chosen: the mask, and control tokens.
    """
    first = sequences[0].params
    never = {(each.params.mask_token_id, each.params.control_ids) for each in sequences}
    is_plain = all(each.takes_plain_best for each in sequences)
    if len(sequences) == 1 or len(never) > 1 or not is_plain:
        return [None] * len(sequences)
    guesses = guess(logits_NV, first, None)
    return [guesses.part(those) for those in rows]


def token_states(state: BlockState) -> npt.NDArray[np.uint8]:
    """What each position of a block holds."""
    states = np.full(len(state.token_ids), TokenState.COMMITTED, dtype=np.uint8)
    states[state.is_prompt] = TokenState.PROMPT
    states[state.is_masked] = TokenState.MASKED
    return states


def _changes(
    before: IntArray,
    state: BlockState,
    is_changed: BoolArray,
    confidence: npt.NDArray[np.float32],
    start: int,
) -> tuple[TokenChange, ...]:
    return tuple(
        TokenChange(start + i, int(before[i]), int(state.token_ids[i]), float(confidence[i]))
        for i in is_changed.nonzero()[0].tolist()
    )
