"""Answers on their way from the scheduler's thread to the reader of one HTTP request.

An answer keeps its latest event, whose text is whole so far, and at most one frame for each block:
a reader that is slow gets more at a time, and memory does not grow with how slow it is.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from oled_moe.config import SamplingParams
from oled_moe.server_backend import Runtime

if TYPE_CHECKING:
    from oled_moe.engine import GenerationResult, StepEvent
    from oled_moe.scheduler import RequestHandle


@dataclass(frozen=True, slots=True)
class Question:
    """One answer to ask for. `prompt`: its text, for replies that repeat it. `mask_id` and
    `steps_max`: what stands for a hole, and the most steps a block may take."""

    prompt: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    mask_id: int
    steps_max: int


class AnswerObserver(Protocol):
    """Who is told what answers take, on the loop's thread."""

    def got_tokens(self, num_tokens: int, waited_s: float) -> None:
        """So many tokens became final at once, so long after those before them."""
        ...

    def ended(self, answer: "Answer", reason: str) -> None:
        """An answer is over: stop, length, abort or error. One that was over before its handle was
        known has none."""
        ...


@dataclass(slots=True)
class Frame:
    """One block as it stands, and what changed since the last frame: position -> (id before, id
    now, confidence). Positions count from the start of the prompt."""

    event: "StepEvent"
    changes: dict[int, tuple[int, int, float]]

    def add(self, event: "StepEvent") -> None:
        """Take a later step of the same block in."""
        self.event = event
        for change in event.changes:
            before = self.changes.get(change.position, (change.from_id,))[0]
            self.changes[change.position] = (before, change.to_id, change.confidence)


class Answer:
    """One answer: what is known of it so far. Only the loop's thread touches it once it runs."""

    def __init__(self, index: int, question: Question, *, keeps_frames: bool) -> None:
        self.index = index
        self.question = question
        self.handle: RequestHandle | None = None
        self.event: StepEvent | None = None
        self.error: BaseException | None = None
        self.num_blocks = 0
        self.num_edited = 0
        self.frames: list[Frame] = []
        self._keeps_frames = keeps_frames
        self._block_id = -1

    @property
    def result(self) -> "GenerationResult | None":
        return None if self.event is None else self.event.result

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.result is not None

    def accept(self, event: "StepEvent") -> None:
        """Take the next event in."""
        self.event = event
        mask_id = self.question.mask_id
        self.num_edited += sum(change.from_id != mask_id for change in event.changes)
        is_new_block = event.block_id != self._block_id
        self.num_blocks += is_new_block
        self._block_id = event.block_id
        if not self._keeps_frames:
            return
        if not self.frames or self.frames[-1].event.block_id != event.block_id:
            self.frames.append(Frame(event, {}))
        self.frames[-1].add(event)


class Answers:
    """All answers that one HTTP request asked for, in the order of their indices.

    Made on the event loop; `submit` may run on another thread, everything else runs on the loop.
    Whoever made it calls `cancel` in the end, whatever happens: it gives up what is unfinished.
    """

    def __init__(
        self,
        runtime: Runtime,
        questions: Sequence[Question],
        observer: AnswerObserver,
        *,
        keeps_frames: bool = False,
    ) -> None:
        self.answers = [
            Answer(index, question, keeps_frames=keeps_frames)
            for index, question in enumerate(questions)
        ]
        self._scheduler = runtime.scheduler
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_cancelled = False
        self._latest_s: dict[int, float] = {}

    def submit(self) -> None:
        """Queue all of them, in turn. Raises: as `Scheduler.submit`."""
        try:
            for answer in self.answers:
                self._submit(answer)
        finally:
            # Whoever asked may have gone meanwhile.
            if self._is_cancelled:
                self._give_up()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until something happened since the last time; False if nothing did in time."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        self._changed.clear()
        return True

    async def finished(self) -> None:
        """Wait for all results. Raises: the first error of any."""
        # One may have failed before anybody waited.
        self.check()
        while not all(answer.is_over for answer in self.answers):
            await self._changed.wait()
            self._changed.clear()
            self.check()

    @property
    def results(self) -> "list[GenerationResult]":
        """The results, once all are there."""
        results = [answer.result for answer in self.answers if answer.result is not None]
        assert len(results) == len(self.answers), "results are read once all answers are over"
        return results

    def check(self) -> None:
        """Raise the error of an answer that has failed."""
        for answer in self.answers:
            if answer.error is not None:
                raise answer.error

    def cancel(self) -> None:
        """Give up whatever is unfinished."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._give_up()
            for answer in self.answers:
                if answer.handle is not None and not answer.is_over:
                    self._observer.ended(answer, "abort")

    def _submit(self, answer: Answer) -> None:
        def on_event(event: "StepEvent") -> None:
            self._tell(answer, event, time.perf_counter())

        def on_error(error: BaseException) -> None:
            self._tell(answer, error, time.perf_counter())

        question = answer.question
        answer.handle = self._scheduler.submit(
            question.prompt_ids, question.params, on_event=on_event, on_error=on_error
        )

    def _give_up(self) -> None:
        for answer in self.answers:
            if answer.handle is not None and not answer.is_over:
                self._scheduler.cancel(answer.handle)

    def _tell(self, answer: Answer, news: "StepEvent | BaseException", now_s: float) -> None:
        """On the scheduler's thread: hand news over to the loop."""
        try:
            self._loop.call_soon_threadsafe(self._accept, answer, news, now_s)
        except RuntimeError:
            # The loop has ended, and with it everyone who waited.
            assert self._loop.is_closed()

    def _accept(self, answer: Answer, news: "StepEvent | BaseException", now_s: float) -> None:
        if self._is_cancelled:
            return
        if isinstance(news, BaseException):
            answer.error = news
            self._observer.ended(answer, "error")
        else:
            num_before = 0 if answer.event is None else len(answer.event.answer_ids)
            answer.accept(news)
            num_new = len(news.answer_ids) - num_before
            if num_new > 0:
                if answer.index in self._latest_s:
                    self._observer.got_tokens(num_new, now_s - self._latest_s[answer.index])
                self._latest_s[answer.index] = now_s
            if news.result is not None:
                self._observer.ended(answer, news.result.finish_reason)
        self._changed.set()
