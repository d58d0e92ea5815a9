"""Scheduler: admits, runs and retires requests, one forward at a time, on a thread of its own.

Requests at different blocks and steps share forwards; each leaves as soon as it is done, and the
next in line takes its place. What a request's tokens are does not depend on its company.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from oled_moe.config import ONE_BLOCK_ALGORITHMS, SamplingParams, check_int
from oled_moe.decoding import MAX_PREFILL_TOKENS
from oled_moe.engine import (
    PLANNED_BLOCK_LENGTH,
    Engine,
    PreparedRequest,
    RunningRequest,
    StepEvent,
)
from oled_moe.errors import OledMoeError, QueueFullError, ShuttingDownError

logger = logging.getLogger(__name__)

DEFAULT_MAX_WAITING = 64
# How much the latest request's time counts in the guess at how long the next will take.
_LATEST_SHARE = 0.2
_MOST_RETRY_AFTER_S = 60.0
# Blocks of prompts that may ride along however few are at work.
_LEAST_RIDING_BLOCKS = 16

OnEvent = Callable[[StepEvent], None]
OnError = Callable[[BaseException], None]


@dataclass(eq=False, slots=True)
class RequestHandle:
    """One request on its way. Units: seconds on the performance counter, 0 until it happened.

    `request_id` is the engine's, −1 while it waits.
    """

    num_prompt_tokens: int
    submitted_s: float
    request_id: int = -1
    admitted_s: float = 0.0
    prefill_end_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    _prepared: PreparedRequest | None = field(default=None, repr=False)
    _running: RunningRequest | None = field(default=None, repr=False)
    _on_event: OnEvent | None = field(default=None, repr=False)
    _on_error: OnError | None = field(default=None, repr=False)

    @property
    def is_over(self) -> bool:
        """Whether it has its result, failed, or was cancelled."""
        return self._on_event is None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a forward was: `kind` is prefill or denoise. Units: seconds.

    `num_new_tokens`: answer tokens that became final; `num_edited`: tokens that were replaced.
    """

    kind: str
    forward_s: float
    num_tokens: int
    num_requests: int
    num_new_tokens: int = 0
    num_edited: int = 0


class Scheduler:
    """Runs requests on an engine, at most its `max_num_seqs` at a time; `max_waiting` more wait.

    Callbacks run on the scheduler's thread and must be quick. A request ends with exactly one of:
    an event that has a result, `on_error`, its cancellation. A prompt that is short, or no longer
    than the blocks at work, is read in the forward that denoises its first block and theirs; longer
    ones have forwards of their own, which take turns with steps, so that neither keeps the other
    waiting. Requests whose blocks are not equally long take turns
    too. `observers` are told of every forward. What nobody foresaw in the scheduler itself is its
    end: it is logged, all requests and `on_failure` are told, and nothing is taken any more.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = DEFAULT_MAX_WAITING) -> None:
        check_int("max_waiting", max_waiting, minimum=0)
        self.engine = engine
        self.max_waiting = max_waiting
        self.observers: list[Callable[[StepReport], None]] = []
        self.on_failure: Callable[[OledMoeError], None] | None = None
        self._max_running = engine.config.max_num_seqs
        self._changed = threading.Condition()
        self._waiting: deque[RequestHandle] = deque()
        self._running: list[RequestHandle] = []
        self._cancelled: list[RequestHandle] = []
        self._failure: OledMoeError | None = None
        # When no request may run any more, None while new ones are taken.
        self._deadline_s: float | None = None
        self._prefilled_last = False
        self._turn_of: dict[int, int] = {}
        self._num_turns = 0
        self._request_s = 1.0
        self._thread = threading.Thread(target=self._run, name="oled-moe-scheduler", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Positions that running requests have keys and values for."""
        with self._changed:
            running = [handle._running for handle in self._running]
        return sum(request.num_positions for request in running if request is not None)

    @property
    def kv_capacity_tokens(self) -> int:
        """Positions that memory was planned for."""
        return self.engine.max_model_len * self._max_running

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        on_event: OnEvent,
        on_error: OnError,
    ) -> RequestHandle:
        """Queue a request.

        Raises: InputError and ConfigError as `Engine.generate`, QueueFullError, ShuttingDownError.
        """
        # Before a prompt is looked at, so that a full house costs little.
        self._check_room()
        prepared = self.engine.check(prompt, params)
        longest = max(PLANNED_BLOCK_LENGTH, self.engine.sampling_defaults.block_length or 0)
        # Beside other requests; who runs alone may take what memory there is.
        if prepared.params.algorithm not in ONE_BLOCK_ALGORITHMS:
            check_int("block_length", prepared.params.block_length, minimum=1, maximum=longest)
        handle = RequestHandle(len(prepared.prompt_ids), time.perf_counter())
        handle._prepared = prepared
        handle._on_event, handle._on_error = on_event, on_error
        with self._changed:
            self._check_room()
            self._waiting.append(handle)
            self._changed.notify()
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """Give a request up: its keys and values go before the next forward. From any thread."""
        with self._changed:
            if handle in self._waiting:
                self._waiting.remove(handle)
                _close(handle)
            elif handle in self._running:
                self._cancelled.append(handle)
                self._changed.notify()

    def close(self, *, drain_s: float = 0.0) -> None:
        """Take no more requests, let those there are go on for `drain_s`, then end the thread.

        What is not done by then fails with ShuttingDownError. Units: seconds.
        """
        with self._changed:
            deadline_s = time.perf_counter() + drain_s
            # A second call may cut the first one's time short.
            self._deadline_s = min(deadline_s, self._deadline_s or deadline_s)
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_room(self) -> None:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._deadline_s is not None:
                raise ShuttingDownError("the server is shutting down; send the request elsewhere")
            num_there = len(self._waiting) + len(self._running)
            if num_there >= self._max_running + self.max_waiting:
                raise QueueFullError(
                    f"{len(self._running)} requests run and {len(self._waiting)} wait, which is "
                    "as many as may; try again later",
                    self._retry_after_s(),
                )

    def _retry_after_s(self) -> float:
        """When a place in the queue should be free: requests leave `max_num_seqs` at a time."""
        return min(max(1.0, self._request_s / self._max_running), _MOST_RETRY_AFTER_S)

    # The thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._drop_cancelled()
                self._admit()
                if self._running:
                    self._forward()
        # Kept and told, not handled: a thread that ended without a word would leave all waiting.
        except BaseException as error:
            logger.critical("the scheduler failed; no request is answered any more", exc_info=error)
            self._give_up(OledMoeError("the scheduler failed, its log says why; start it again"))

    def _give_up(self, failure: OledMoeError) -> None:
        with self._changed:
            self._failure = failure
            left = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        for handle in left:
            on_error = handle._on_error
            # What the engine holds for it stays: nobody knows what state that is in.
            _close(handle)
            _tell_of(failure, on_error)
        if self.on_failure is not None:
            self.on_failure(failure)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; returns whether there ever will be."""
        with self._changed:
            while not (self._waiting or self._running or self._deadline_s is not None):
                self._changed.wait()
            is_over = self._deadline_s is not None and time.perf_counter() >= self._deadline_s
            if not is_over:
                return bool(self._waiting or self._running)
            left = [*self._running, *self._waiting]
            self._waiting.clear()
        for handle in left:
            self._fail(handle, ShuttingDownError("the server shut down before the answer ended"))
        return False

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
        for handle in cancelled:
            self._retire(handle)

    def _admit(self) -> None:
        while len(self._running) < self._max_running:
            with self._changed:
                if not self._waiting:
                    return
                handle = self._waiting.popleft()
                self._running.append(handle)
            handle.admitted_s = time.perf_counter()
            try:
                assert handle._prepared is not None
                handle._running = self.engine.begin(handle._prepared)
                handle.request_id = handle._running.request_id
            # Whatever it is, it is this request's: a thread that died would leave all waiting.
            except Exception as error:
                self._fail(handle, error)

    def _forward(self) -> None:
        """One forward, of prompts or of blocks, whose turn it is."""
        at_work = Counter(
            _running(h).block_length for h in self._running if not _running(h).num_left_to_prefill
        )
        room = {length: max(num, _LEAST_RIDING_BLOCKS) for length, num in at_work.items()}
        is_long = {
            h: bool(_running(h).num_left_to_prefill) and not _can_ride(_running(h), room)
            for h in self._running
        }
        long = [handle for handle in self._running if is_long[handle]]
        others = [handle for handle in self._running if not is_long[handle]]
        is_prefill = bool(long) and not (self._prefilled_last and others)
        self._prefilled_last = is_prefill
        handles = self._next_prompts(long) if is_prefill else self._next_group(others, room)
        try:
            if is_prefill:
                self._prefill(handles)
            else:
                self._denoise(handles)
        # As above. Requests that shared the forward cannot be told apart.
        except Exception as error:
            if not isinstance(error, OledMoeError):
                logger.exception("a forward failed")
            for handle in handles:
                self._fail(handle, error)

    def _next_prompts(self, handles: list[RequestHandle]) -> list[RequestHandle]:
        """As many prompts, first come first, as one forward may take at once.

        How a prompt is cut up does not depend on the others.
        """
        chosen: list[RequestHandle] = []
        num_tokens = 0
        for handle in handles:
            request = _running(handle)
            if chosen and (
                request.block_length != _running(chosen[0]).block_length
                or num_tokens + request.num_to_prefill > MAX_PREFILL_TOKENS
            ):
                continue
            chosen.append(handle)
            num_tokens += request.num_to_prefill
        return chosen

    def _next_group(
        self, handles: list[RequestHandle], room: dict[int, int]
    ) -> list[RequestHandle]:
        """Those with equally long blocks whose last forward was the longest ago: all that are at
        work, and, first come first, prompts that are no more than the room together."""
        lengths = dict.fromkeys(_running(handle).block_length for handle in handles)
        self._turn_of = {length: self._turn_of.get(length, -1) for length in lengths}
        length = min(lengths, key=self._turn_of.__getitem__)
        self._num_turns += 1
        self._turn_of[length] = self._num_turns
        left, joined = dict(room), []
        for handle in handles:
            request = _running(handle)
            if request.block_length == length and _can_ride(request, left):
                num_blocks = _num_blocks_left(request)
                left[length] = left.get(length, _LEAST_RIDING_BLOCKS) - num_blocks
                joined.append(handle)
        return joined

    def _prefill(self, handles: list[RequestHandle]) -> None:
        requests = [_running(handle) for handle in handles]
        num_tokens = sum(request.num_to_prefill for request in requests)
        start_s = time.perf_counter()
        self.engine.prefill(requests)
        now_s = time.perf_counter()
        for handle, request in zip(handles, requests, strict=True):
            if not request.num_to_prefill:
                handle.prefill_end_s = now_s
        self._report(StepReport("prefill", now_s - start_s, num_tokens, len(handles)))

    def _denoise(self, handles: list[RequestHandle]) -> None:
        requests = [_running(handle) for handle in handles]
        num_before = sum(request.num_answer_tokens for request in requests)
        num_tokens = sum(each.num_step_tokens + each.num_left_to_prefill for each in requests)
        start_s = time.perf_counter()
        events = self.engine.denoise(requests)
        now_s = time.perf_counter()
        num_new = sum(request.num_answer_tokens for request in requests) - num_before
        mask_ids = [request.sequence.params.mask_token_id for request in requests]
        num_edited = sum(
            mask_id not in (change.from_id, change.to_id)
            for event, mask_id in zip(events, mask_ids, strict=True)
            for change in event.changes
        )
        for handle, event in zip(handles, events, strict=True):
            handle.prefill_end_s = handle.prefill_end_s or handle.admitted_s
            handle.first_token_s = handle.first_token_s or now_s
            self._tell(handle, event)
        self._report(
            StepReport(
                "denoise", now_s - start_s, num_tokens, len(handles), max(0, num_new), num_edited
            )
        )

    def _tell(self, handle: RequestHandle, event: StepEvent) -> None:
        error = _running(handle).sequence.error
        if error is not None:
            self._fail(handle, error)
            return
        on_event = handle._on_event
        if event.result is not None:
            # First of all the request's memory goes: whoever is told may look.
            self._retire(handle)
        if on_event is None:
            return
        try:
            on_event(event)
        # Somebody else's code; the other requests have nothing to do with it.
        except Exception:
            logger.exception("the receiver of a request's events failed; the request is given up")
            self._retire(handle)

    def _fail(self, handle: RequestHandle, error: BaseException) -> None:
        on_error = handle._on_error
        self._retire(handle)
        _tell_of(error, on_error)

    def _retire(self, handle: RequestHandle) -> None:
        """Nothing of a request is left here or in the engine."""
        if handle._running is not None:
            self.engine.end(handle._running)
        with self._changed:
            if handle in self._running:
                self._running.remove(handle)
        if not handle.is_over:
            handle.finished_s = time.perf_counter()
            taken_s = handle.finished_s - (handle.admitted_s or handle.submitted_s)
            self._request_s += _LATEST_SHARE * (taken_s - self._request_s)
        _close(handle)

    def _report(self, report: StepReport) -> None:
        for observer in self.observers:
            observer(report)


def _can_ride(request: RunningRequest, room: Mapping[int, int]) -> bool:
    """Whether what is left of a prompt is no more than so many blocks, nor than what one forward
    may take."""
    num_blocks = room.get(request.block_length, _LEAST_RIDING_BLOCKS)
    is_one_part = request.num_left_to_prefill == request.num_to_prefill
    return is_one_part and _num_blocks_left(request) <= num_blocks


def _num_blocks_left(request: RunningRequest) -> int:
    """Blocks of a prompt that are still to be read; canvases have none."""
    return request.num_left_to_prefill // max(1, request.block_length)


def _running(handle: RequestHandle) -> RunningRequest:
    assert handle._running is not None
    return handle._running


def _tell_of(error: BaseException, on_error: OnError | None) -> None:
    if on_error is None:
        return
    try:
        on_error(error)
    except Exception:
        logger.exception("the receiver of a request's error failed")


def _close(handle: RequestHandle) -> None:
    """Let go of everything that is large. Mutates: the handle."""
    handle._prepared = handle._running = None
    handle._on_event = handle._on_error = None
