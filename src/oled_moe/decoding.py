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


class BlockDiffusionDecoder:
    """The loops of LLaDA2.0 and 2.1 over a prefix cache of finished blocks.

    `start_forward` is called before each forward, `end_forward` after it, once it is known what was
    accepted. `wants_input_embedding` has contexts carry the embeddings of their tokens.
    Source: models.md 4 (KV-cached equivalent) and 5; architecture.md 3.6.
    """

    def __init__(
        self,
        model: Model,
        *,
        start_forward: Callable[[ForwardContext], None],
        end_forward: Callable[[ForwardOutcome], None],
    ) -> None:
        self.wants_input_embedding = False
        self._model = model
        self._start_forward = start_forward
        self._end_forward = end_forward
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
        for block_id in range(len(prompt_ids) // params.block_length, num_blocks):
            is_last_block = block_id == num_blocks - 1
            for step in self._denoise_block(request, kv, block_id, generator):
                ended = step.is_block_done and request.end_of_answer(step, stop_rule, is_last_block)
                yield request.close(step) if ended else step
                if ended:
                    return
            self._commit(request, kv, block_id)

    def _prefill(self, request: "_Request", kv: SequenceKv) -> None:
        """Keys and values of the whole prompt blocks, in one forward where they are not many."""
        length = request.params.block_length
        end = len(request.prompt_ids) // length * length
        chunk = max(length, MAX_PREFILL_TOKENS // length * length)
        for start in range(0, end, chunk):
            token_ids = np.array(request.prompt_ids[start : min(start + chunk, end)])
            context = self._context(
                request,
                Phase.PREFILL,
                start // length,
                0,
                np.ones(len(token_ids), dtype=np.float32),
                np.full(len(token_ids), TokenState.PROMPT, dtype=np.uint8),
                start,
                token_ids,
            )
            self._forward(token_ids, kv, context, wants_logits=False)
            self._end_forward(ForwardOutcome.without_logits(context))
            kv.advance(len(token_ids))
            request.counters.num_prefill_forwards += 1

    def _denoise_block(
        self, request: "_Request", kv: SequenceKv, block_id: int, generator: torch.Generator
    ) -> Iterator[DecodingStep]:
        params, counters = request.params, request.counters
        start = block_id * params.block_length
        state = BlockState.start(
            request.prompt_ids[start : start + params.block_length],
            block_length=params.block_length,
            mask_id=params.mask_token_id,
        )
        request.state = state
        unmasking = UNMASKING[params.algorithm](params)
        confidence = np.full(params.block_length, FRESH_CONFIDENCE, dtype=np.float32)
        guess_ids = np.full(params.block_length, -1, dtype=np.int64)
        is_wanted = unmasking.wants_forward(state)
        while is_wanted:
            context = self._context(
                request,
                Phase.DENOISE,
                block_id,
                state.num_steps,
                np.where(state.is_masked, confidence, np.float32(1.0)),
                _token_states(state),
                start,
                np.where(state.is_masked, guess_ids, state.token_ids),
            )
            logits = self._forward(state.token_ids, kv, context, wants_logits=True)
            assert logits is not None
            # The step's one synchronisation with the device.
            best_ids, confidence = sample(logits, params, generator)
            guess_ids = best_ids
            counters.num_denoise_forwards += 1
            before = state.token_ids.copy()
            update = unmasking.update(state, best_ids, confidence)
            self._end_forward(ForwardOutcome(context, confidence, update.accepted))
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

    def _commit(self, request: "_Request", kv: SequenceKv, block_id: int) -> None:
        """Make the finished block part of the prefix; its K/V must come from its final tokens."""
        state, length = request.state, request.params.block_length
        # The last forward of a settled block saw exactly its final tokens.
        if not state.is_settled:
            context = self._context(
                request,
                Phase.COMMIT,
                block_id,
                state.num_steps,
                np.ones(length, dtype=np.float32),
                _token_states(state),
                block_id * length,
                state.token_ids.copy(),
            )
            self._forward(state.token_ids, kv, context, wants_logits=False)
            self._end_forward(ForwardOutcome.without_logits(context))
            request.counters.num_commit_forwards += 1
        kv.advance(length)

    def _context(
        self,
        request: "_Request",
        phase: Phase,
        block_id: int,
        step_id: int,
        confidence: npt.NDArray[np.float32],
        states: npt.NDArray[np.uint8],
        start: int,
        known_ids: IntArray,
    ) -> ForwardContext:
        """`known_ids`: tokens, and at masked positions the latest guess or -1."""
        self._num_forwards += 1
        row = ForwardRow(request.request_id, block_id, step_id, phase, len(confidence))
        return ForwardContext(
            self._num_forwards - 1,
            request.params.block_length,
            (row,),
            confidence,
            states,
            np.arange(start, start + len(confidence)),
            known_ids,
        )

    def _forward(
        self,
        token_ids: IntArray,
        kv: SequenceKv,
        context: ForwardContext,
        *,
        wants_logits: bool,
    ) -> torch.Tensor | None:
        ids = torch.from_numpy(token_ids.copy())
        if self.wants_input_embedding:
            embedding = self._model.embed(ids).float().numpy()
            context = replace(context, input_embedding=embedding)
        self._start_forward(context)
        batch = ForwardBatch(
            ids,
            torch.arange(kv.length, kv.length + len(token_ids)),
            (Segment(kv, len(token_ids), wants_logits),),
            context,
        )
        return self._model.forward(batch)


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
