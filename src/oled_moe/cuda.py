"""Lanes over the streams of a GPU.

A stream is a queue of the GPU; a mark is a point in it. Everything here is written against
`StreamApi`, the few calls of torch.cuda that it takes, so that it runs without a GPU in tests.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from oled_moe.errors import ConfigError, DoesNotFitError, MissingDependencyError, OledMoeError
from oled_moe.lanes import Event, ThreadLane, Work
from oled_moe.slots import SlotPool

logger = logging.getLogger(__name__)

DEVICE_INDEX = 0
# Most guesses on the link at a time: an urgent copy shares it with no more than these.
MOST_AHEAD = 2


def check_cuda() -> None:
    """Whether `cuda` can run here.

    Raises: MissingDependencyError for a torch without CUDA, ConfigError where no GPU is.
    """
    if torch.version.cuda is None:
        raise MissingDependencyError(
            f"device is 'cuda' and the installed torch {torch.__version__} is built for CPUs only; "
            "install a CUDA build of torch, or take device cpu"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda' and torch sees no GPU here; check the driver with nvidia-smi, or "
            "take device cpu"
        )


def has_triton() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


@contextmanager
def cuda_errors(what: str) -> Iterator[None]:
    """Turn errors of CUDA met within into errors for users; `what` was being done."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFitError(
            f"the GPU ran out of memory {what}; lower memory, expert_memory, experts_per_layer or "
            "max_model_len, or close other programs on the GPU"
        ) from error
    except RuntimeError as error:
        if isinstance(error, OledMoeError) or "CUDA" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise OledMoeError(
            f"CUDA failed {what} ({reason}); the GPU cannot be used by this process any more: "
            "start it again, and check the GPU with nvidia-smi if that comes back"
        ) from error


# Streams


class Mark(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has come past it."""
        ...

    def synchronize(self) -> None:
        """Block this thread until the stream has come past it."""
        ...


class StreamApi(Protocol):
    """What is needed of streams. A thread has a current stream, on which its work is queued."""

    def new_stream(self, *, is_urgent: bool) -> Any:
        """A stream of its own, which goes before others where it is urgent."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Within, `stream` is the current one; None leaves it as it is."""
        ...

    def mark(self) -> Mark:
        """A mark behind all that was queued on the current stream."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is queued on the current stream from now on comes behind the mark."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream."""
        ...

    def synchronize(self) -> None:
        """Block this thread until all streams are empty."""
        ...


class TorchStreams:
    """The streams of one GPU through torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self, *, is_urgent: bool) -> Any:
        priority = -1 if is_urgent else 0
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]  # torch's

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)  # type: ignore[arg-type]  # one of its own marks

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class StreamEvent:
    """The event of work on a stream.

    Work that has to be prepared first, by reading a file for instance, is put on its stream later:
    until then `wait` blocks. After that it does not: it has the caller's current stream wait.
    """

    def __init__(self, api: StreamApi) -> None:
        self._api = api
        self._is_put = threading.Event()
        self._mark: Mark | None = None
        self._error: BaseException | None = None

    @property
    def is_put(self) -> bool:
        """Whether waiting would not block."""
        return self._is_put.is_set()

    @property
    def is_fired(self) -> bool:
        if not self._is_put.is_set():
            return False
        mark = self._mark
        if mark is not None and mark.query():
            # Asking the driver again would cost more than remembering.
            self._mark = mark = None
        return mark is None

    def put(self, mark: Mark | None) -> None:
        """The work ends at this mark of its stream; None: it is done, or never will be."""
        self._mark = mark
        self._is_put.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._is_put.set()

    def wait(self) -> None:
        self._is_put.wait()
        if self._error is not None:
            raise self._error
        mark = self._mark
        if mark is not None and not mark.query():
            self._api.wait(mark)

    def synchronize(self) -> None:
        """Block until the work is done, well or not."""
        self._is_put.wait()
        mark = self._mark
        if mark is not None:
            mark.synchronize()


Enqueue = Callable[[Work], Mark]


class WouldBlock(Exception):
    """Raised by a copy that cannot be queued without waiting for a disk.

    `run` does it, on a thread that may block, and queues what it must through the function given.
    """

    def __init__(self, run: Callable[[Enqueue], Mark]) -> None:
        super().__init__("this copy has to read from disk first")
        self.run = run


class StreamLane:
    """Runs work by queueing it on a stream; None is whichever is current for the caller.

    The work is called at once and launches what the GPU does later.
    """

    runs_at_once = False

    def __init__(self, api: StreamApi, stream: Any = None) -> None:
        self._api = api
        self._stream = stream
        self._is_closed = False

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        event = StreamEvent(self._api)
        event.put(self.enqueue(work, after))
        return event

    def enqueue(self, work: Work, after: Sequence[Event]) -> Mark:
        """Queue what `work` launches behind `after`; the mark behind it."""
        if self._is_closed:
            raise OledMoeError("the engine is closed; make a new one")
        with cuda_errors("while running a layer's experts"), self._api.use(self._stream):
            for event in after:
                event.wait()
            work()
            return self._api.mark()

    def close(self) -> None:
        """Finish what is queued."""
        if not self._is_closed:
            self._is_closed = True
            with self._api.use(self._stream):
                self._api.mark().synchronize()


class _Guess:
    """A copy ahead of its demand; `waiting` is its place among those that have not begun."""

    __slots__ = ("after", "event", "has_begun", "waiting", "work")

    def __init__(self, event: StreamEvent, work: Work, after: Sequence[Event]) -> None:
        self.event = event
        self.work = work
        self.after = after
        self.has_begun = False
        self.waiting: Event | None = None

    @property
    def is_dropped(self) -> bool:
        return self.waiting is not None and self.waiting.is_fired and not self.has_begun


class StreamCopyLane(StreamLane):
    """Copies over the link, urgent ones at once, guesses few at a time on a stream of their own.

    What is on a stream cannot be called back and, on the link, does not let others pass: so guesses
    wait on the host, and `MOST_AHEAD` threads put one after another on the link and see it through.
    Copies that have to read a file first (`WouldBlock`), or whose events cannot be waited for by
    the stream, go through `num_readers` threads; the others are queued by the caller.
    """

    def __init__(self, api: StreamApi, *, num_readers: int) -> None:
        super().__init__(api, api.new_stream(is_urgent=True))
        self._guess_lane = StreamLane(api, api.new_stream(is_urgent=False))
        self._readers = ThreadLane("read", num_threads=num_readers)
        self._feeders = ThreadLane("ahead", num_threads=MOST_AHEAD)
        self._guesses: dict[Event, _Guess] = {}

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        event = StreamEvent(self._api)
        self._start(event, work, after)
        return event

    def submit_ahead(self, work: Work, after: Sequence[Event] = ()) -> Event:
        guess = _Guess(StreamEvent(self._api), work, after)
        self._guesses[guess.event] = guess
        guess.waiting = self._feeders.submit_ahead(partial(self._see_through, guess))
        return guess.event

    def hurry(self, event: Event) -> None:
        guess = self._guesses.get(event)
        if guess is None:
            return
        try:
            self._drop(guess)
        # Should an interrupt come in between, somebody has to fire the event all the same.
        finally:
            if guess.is_dropped:
                self._start(guess.event, guess.work, guess.after)

    def cancel(self, event: Event) -> bool:
        guess = self._guesses.get(event)
        if guess is None:
            return False
        try:
            return self._drop(guess)
        finally:
            if guess.is_dropped:
                guess.event.put(None)

    def close(self) -> None:
        """Finish what is queued and release the threads; guesses not begun are dropped."""
        if self._is_closed:
            return
        for event in list(self._guesses):
            self.cancel(event)
        self._feeders.close()
        self._readers.close()
        self._guess_lane.close()
        super().close()

    def _drop(self, guess: _Guess) -> bool:
        assert guess.waiting is not None
        is_dropped = self._feeders.cancel(guess.waiting)
        if is_dropped:
            self._guesses.pop(guess.event, None)
        return is_dropped

    def _start(self, event: StreamEvent, work: Work, after: Sequence[Event]) -> None:
        try:
            if all(map(_is_on_a_stream, after)):
                try:
                    event.put(self.enqueue(work, after))
                    return
                except WouldBlock:
                    pass
            self._readers.submit(partial(self._carry, self, event, work, after))
        except BaseException as error:
            event.fail(error)
            raise

    def _see_through(self, guess: _Guess) -> None:
        """On a feeder: copy a guess and return when it has arrived."""
        guess.has_begun = True
        self._guesses.pop(guess.event, None)
        self._carry(self._guess_lane, guess.event, guess.work, guess.after)
        guess.event.synchronize()

    def _carry(
        self, lane: StreamLane, event: StreamEvent, work: Work, after: Sequence[Event]
    ) -> None:
        """On a thread that may block: prepare the work and put it on the lane's stream."""
        try:
            try:
                mark = lane.enqueue(work, after)
            except WouldBlock as later:
                mark = later.run(lambda ready: lane.enqueue(ready, after))
            event.put(mark)
        # Whatever went wrong belongs to the waiter, not to this thread.
        except BaseException as error:  # noqa: B036 - carried to the waiter, see above
            event.fail(error)


def _is_on_a_stream(event: Event) -> bool:
    """Whether waiting for an event from a stream does not block the caller."""
    return event.is_put if isinstance(event, StreamEvent) else event.is_fired


class StreamSlotPool(SlotPool):
    """A pool whose copies and readers run on streams."""

    def __init__(self, *args: Any, api: StreamApi, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._api = api

    def drain(self, readers: Sequence[Event]) -> None:
        super().drain(readers)
        # Waiting for events ordered one stream behind them; a failure needs all of them empty.
        with suppress(RuntimeError):  # A GPU that has failed is what is being recovered from.
            self._api.synchronize()
