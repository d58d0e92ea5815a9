"""BlockDiffusionDecoder: prefill, then block by block, step by step.

One request at a time walks through `decode`, which yields after every forward that changed
something. The decoder knows tokens and masks; experts, caches and policies are below it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from oled_moe.config import DecodingParams
from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import ForwardBatch, Segment
from oled_moe.models import Model
from oled_moe.types import (
    BoolArray,
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    IntArray,
    Phase,
    TokenState,
)
from oled_moe.unmasking import UNMASKING, BlockState, BlockUpdate, sample

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

    `answer_ids` are all answer tokens of finished blocks, final and cut at the end of the answer;
    `is_last` says that there are no more. `token_ids` and `is_masked` are the block as it stands.
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
class _Part:
    """One row of a forward: what the model is given and what policies may see of it.

    `start`: the sequence position of its first token. Shapes: [T] each; known_ids are tokens, and
    at masked positions the latest guess or −1; logit_tokens int64 [N], which logits are wanted.
    """

    row: ForwardRow
    start: int
    token_ids: IntArray
    confidence: npt.NDArray[np.float32]
    states: npt.NDArray[np.uint8]
    known_ids: IntArray
    logit_tokens: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class BlockDiffusionDecoder:
    """The loops of LLaDA2.0 and 2.1 over a prefix cache of finished blocks.

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
    ) -> None:
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
        """Generate up to `max_tokens` behind the prompt; yields after every denoising forward.

        A mask id in the prompt is prompt. The last step carries the finish reason.
        """
        counters = counters or DecodingCounters()
        request = _Request(list(prompt_ids), params, request_id, counters)
        kv = self._model.new_kv(request.num_positions)
        self._prefill(request, kv)
        counters.prefill_end_s = time.perf_counter()
        generator = torch.Generator().manual_seed(params.seed)
        num_blocks = request.num_positions // params.block_length
        # A finished block whose keys and values are not those of its final tokens yet.
        unstored: _Part | None = None
        for block_id in range(len(prompt_ids) // params.block_length, num_blocks):
            is_last_block = block_id == num_blocks - 1
            for step in self._denoise_block(request, kv, block_id, generator, unstored):
                ended = step.is_block_done and request.end_of_answer(step, stop_rule, is_last_block)
                yield request.close(step) if ended else step
                if ended:
                    return
            unstored = self._store(request, kv, block_id)

    def _prefill(self, request: "_Request", kv: SequenceKv) -> None:
        """Keys and values of the whole prompt blocks, in one forward where they are not many."""
        length = request.params.block_length
        end = len(request.prompt_ids) // length * length
        chunk = max(length, MAX_PREFILL_TOKENS // length * length)
        for start in range(0, end, chunk):
            token_ids = np.array(request.prompt_ids[start : min(start + chunk, end)])
            size = len(token_ids)
            part = _Part(
                request.row(start // length, 0, Phase.PREFILL, size),
                start,
                token_ids,
                np.ones(size, dtype=np.float32),
                np.full(size, TokenState.PROMPT, dtype=np.uint8),
                token_ids,
            )
            self._forward_without_logits(part, kv, length)
            kv.advance(size)
            request.counters.num_prefill_forwards += 1

    def _denoise_block(
        self,
        request: "_Request",
        kv: SequenceKv,
        block_id: int,
        generator: torch.Generator,
        unstored: _Part | None,
    ) -> Iterator[DecodingStep]:
        params, counters = request.params, request.counters
        length = params.block_length
        start = block_id * length
        state = BlockState.start(
            request.prompt_ids[start : start + length],
            block_length=length,
            mask_id=params.mask_token_id,
        )
        request.state = state
        unmasking = UNMASKING[params.algorithm](params)
        confidence = np.full(length, FRESH_CONFIDENCE, dtype=np.float32)
        best_ids = np.full(length, -1, dtype=np.int64)
        is_wanted = unmasking.wants_forward(state)
        assert is_wanted, "a fresh block has masks"
        while is_wanted:
            is_looked_at = unmasking.looked_at(state)
            if self.wants_all_logits:
                is_looked_at[:] = True
            part = _Part(
                request.row(block_id, state.num_steps, Phase.DENOISE, length),
                start,
                state.token_ids,
                np.where(state.is_masked, confidence, np.float32(1.0)),
                _token_states(state),
                np.where(state.is_masked, best_ids, state.token_ids),
                is_looked_at.nonzero()[0],
            )
            parts = (part,) if unstored is None else (unstored, part)
            context, logits_NV = self._forward(parts, kv, length)
            assert logits_NV is not None
            if unstored is not None:
                kv.advance(length)
                unstored = None
            # The step's one synchronisation with the device.
            best_ids, confidence = _sample_block(logits_NV, is_looked_at, params, generator)
            counters.num_denoise_forwards += 1
            before = state.token_ids.copy()
            update = unmasking.update(state, best_ids, confidence)
            self._end_forward(_outcome(context, confidence, update.accepted))
            counters.last_token_s = time.perf_counter()
            counters.first_token_s = counters.first_token_s or counters.last_token_s
            is_stopped = params.eos_early_stop and request.ends_mid_block(update, start)
            is_wanted = not is_stopped and unmasking.wants_forward(state)
            yield request.step(
                block_id,
                start,
                _changes(before, state, update, confidence, start),
                is_block_done=not is_wanted,
            )

    def _store(self, request: "_Request", kv: SequenceKv, block_id: int) -> _Part | None:
        """Make the finished block part of the prefix; its K/V must come from its final tokens.

        Returns what is left to do for it in the next block's first forward, None if nothing is.
        """
        state, length = request.state, request.params.block_length
        # The last forward of a settled block saw exactly its final tokens.
        if state.is_settled:
            kv.advance(length)
            return None
        part = _Part(
            request.row(block_id, state.num_steps, Phase.COMMIT, length),
            block_id * length,
            state.token_ids,
            np.ones(length, dtype=np.float32),
            _token_states(state),
            state.token_ids,
        )
        if self._folds_commit:
            return part
        self._forward_without_logits(part, kv, length)
        kv.advance(length)
        request.counters.num_commit_forwards += 1
        return None

    def _forward_without_logits(self, part: _Part, kv: SequenceKv, block_length: int) -> None:
        context, _ = self._forward((part,), kv, block_length)
        self._end_forward(ForwardOutcome.without_logits(context))

    def _forward(
        self, parts: Sequence[_Part], kv: SequenceKv, block_length: int
    ) -> tuple[ForwardContext, torch.Tensor | None]:
        """One forward over consecutive parts of one sequence, the first behind its prefix."""
        context = self._context(parts, block_length)
        ids = torch.from_numpy(np.concatenate([part.token_ids for part in parts]))
        if self.wants_input_embedding:
            embedding = self._model.embed(ids).float().cpu().numpy()
            context = replace(context, input_embedding=embedding)
        self._start_forward(context)
        segments = tuple(
            Segment(
                kv,
                part.row.num_tokens,
                len(part.logit_tokens) > 0,
                part.start - kv.length,
                torch.from_numpy(part.logit_tokens),
            )
            for part in parts
        )
        positions = torch.arange(kv.length, kv.length + len(ids))
        return context, self._model.forward(ForwardBatch(ids, positions, segments, context))

    def _context(self, parts: Sequence[_Part], block_length: int) -> ForwardContext:
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


class _Request:
    """One request on its way through the decoder."""

    def __init__(
        self,
        prompt_ids: list[int],
        params: DecodingParams,
        request_id: int,
        counters: DecodingCounters,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.request_id = request_id
        self.counters = counters
        self.answer_ids: list[int] = []
        self.finish_reason: str | None = None
        self.state: BlockState = BlockState.start([], block_length=0, mask_id=0)
        length = params.block_length
        self.num_positions = -(-(len(prompt_ids) + params.max_tokens) // length) * length

    def row(self, block_id: int, step_id: int, phase: Phase, num_tokens: int) -> ForwardRow:
        return ForwardRow(self.request_id, block_id, step_id, phase, num_tokens)

    def step(
        self,
        block_id: int,
        start: int,
        changes: tuple[TokenChange, ...],
        *,
        is_block_done: bool,
    ) -> DecodingStep:
        if is_block_done:
            self.answer_ids += self.state.token_ids[~self.state.is_prompt].tolist()
        return DecodingStep(
            block_id,
            self.state.num_steps - 1,
            start,
            tuple(self.state.token_ids.tolist()),
            tuple(self.state.is_masked.tolist()),
            changes,
            is_block_done,
            False,
            None,
            self._visible_answer(),
        )

    def _visible_answer(self) -> tuple[int, ...]:
        """The finished blocks' tokens up to the end of the answer, should it have come."""
        answer = self.answer_ids[: self.params.max_tokens]
        first_end = self._first_end(answer)
        return tuple(answer if first_end is None else answer[:first_end])

    def ends_mid_block(self, update: BlockUpdate, start: int) -> bool:
        """Whether an eos was accepted now and every answer position before the first is filled.

        Source: models.md 4, step 7. The 2.1 loop has no such exit: edits may still remove the eos.
        """
        params, state = self.params, self.state
        if params.algorithm != "low_confidence" or params.ignore_eos:
            return False
        is_eos = self._is_end(state.token_ids) & ~state.is_masked & ~state.is_prompt
        if not (is_eos & update.accepted).any():
            return False
        return not state.is_masked[: int(is_eos.argmax())].any()

    def end_of_answer(self, step: DecodingStep, stop_rule: StopRule, is_last_block: bool) -> bool:
        """After a block: cut the answer at its end, if that has come. Mutates: the answer."""
        params = self.params
        answer = self.answer_ids[: params.max_tokens]
        first_end = self._first_end(answer)
        # Without eos_early_stop the 2.1 reference decodes every block and cuts afterwards; a stop
        # id of the user's own ends the answer whatever the loop.
        may_end = (
            params.algorithm != "joint_threshold"
            or params.eos_early_stop
            or (first_end is not None and answer[first_end - 1] in params.stop_token_ids)
        )
        cut = stop_rule(answer if first_end is None else answer[:first_end])
        if cut is not None:
            self._finish(answer[:cut], "stop")
        elif first_end is not None and (may_end or is_last_block):
            self._finish(answer[:first_end], "stop")
        elif is_last_block:
            self._finish(answer, "length")
        return self.finish_reason is not None

    def _finish(self, answer_ids: list[int], reason: str) -> None:
        self.answer_ids, self.finish_reason = answer_ids, reason

    def close(self, step: DecodingStep) -> DecodingStep:
        """The step as the last one."""
        return replace(
            step,
            is_last=True,
            finish_reason=self.finish_reason,
            answer_ids=tuple(self.answer_ids),
        )

    def _first_end(self, answer_ids: list[int]) -> int | None:
        """How many tokens the answer has up to and including the first that ends it."""
        ends = self._is_end(np.array(answer_ids, dtype=np.int64)).nonzero()[0]
        return None if self.params.ignore_eos or not len(ends) else int(ends[0]) + 1

    def _is_end(self, token_ids: IntArray) -> npt.NDArray[np.bool_]:
        ends = [*self.params.stop_token_ids]
        if self.params.eos_token_id is not None:
            ends.append(self.params.eos_token_id)
        return np.isin(token_ids, ends)


def _token_states(state: BlockState) -> npt.NDArray[np.uint8]:
    states = np.full(len(state.token_ids), TokenState.COMMITTED, dtype=np.uint8)
    states[state.is_prompt] = TokenState.PROMPT
    states[state.is_masked] = TokenState.MASKED
    return states


def _sample_block(
    logits_NV: torch.Tensor,
    is_looked_at: BoolArray,
    params: DecodingParams,
    generator: torch.Generator,
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """The block's tokens int64 [B] and their probabilities float32 [B]; −1 and NaN elsewhere.

    Every position of every step has a draw of its own, looked at or not, so that what is sampled
    does not depend on which are.
    """
    size = len(is_looked_at)
    draws = None
    if params.temperature > 0:
        draws = torch.rand(size, dtype=torch.float64, generator=generator).numpy()[is_looked_at]
    best_ids = np.full(size, -1, dtype=np.int64)
    confidence = np.full(size, np.nan, dtype=np.float32)
    best_ids[is_looked_at], confidence[is_looked_at] = sample(logits_NV, params, draws)
    return best_ids, confidence


def _outcome(
    context: ForwardContext, confidence: npt.NDArray[np.float32], accepted: BoolArray
) -> ForwardOutcome:
    """Of a denoising forward, whose last tokens are the block at work."""
    outcome = ForwardOutcome.without_logits(context)
    outcome.token_confidence[-len(confidence) :] = confidence
    outcome.token_accepted[-len(accepted) :] = accepted
    return outcome


def _changes(
    before: IntArray,
    state: BlockState,
    update: BlockUpdate,
    confidence: npt.NDArray[np.float32],
    start: int,
) -> tuple[TokenChange, ...]:
    return tuple(
        TokenChange(start + i, int(before[i]), int(state.token_ids[i]), float(confidence[i]))
        for i in (update.accepted | update.edited).nonzero()[0].tolist()
    )
