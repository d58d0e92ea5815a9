"""Lanes: ordered asynchronous executors with events. The seam between devices.

A lane takes work together with the events it must wait for and returns the event that fires when
it is done. The code that decides and the code that moves weights know lanes and events, nothing
else; a device is a choice of lanes (`slots.py`, `experts.py`) and kernels (`kernels/`).
CUDA will be a lane whose work is enqueued on a stream and whose events are stream events.
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from oled_moe.errors import OledMoeError

Work = Callable[[], None]


class Event(Protocol):
    """Fires once the work it stands for is done."""

    def wait(self) -> None:
        """Block until fired. Raises: whatever the work raised."""
        ...


class Lane(Protocol):
    """Executes work; one lane's work starts in the order it was submitted."""

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        """Queue `work` behind the events in `after`; returns its event at once."""
        ...

    def close(self) -> None:
        """Finish what is queued and release the threads."""
        ...


class _DoneEvent:
    """The event of work that is already finished."""

    def wait(self) -> None:
        return None


DONE: Event = _DoneEvent()


class ThreadEvent:
    """An event fired by a lane's thread; carries the work's exception to whoever waits."""

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def fire(self, error: BaseException | None = None) -> None:
        self._error = error
        self._is_done.set()

    def wait(self) -> None:
        self._is_done.wait()
        if self._error is not None:
            raise self._error


class InlineLane:
    """Runs work at once on the caller's thread, after waiting for what it depends on."""

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        for event in after:
            event.wait()
        work()
        return DONE

    def close(self) -> None:
        return None


class ThreadLane:
    """Runs work on `num_threads` threads, started in order.

    With one thread it behaves like a stream. With several, work may overlap and finish out of
    order: what must not overlap has to be ordered by events. `jitter_s` adds a random delay under
    `seed` before each piece of work, so that a missing wait shows up.
    """

    def __init__(
        self, name: str, *, num_threads: int = 1, jitter_s: float = 0.0, seed: int = 0
    ) -> None:
        self._jitter_s = jitter_s
        self._random = random.Random(seed)
        self._queue: queue.SimpleQueue[tuple[Work, Sequence[Event], ThreadEvent, float] | None]
        self._queue = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"oled-moe-{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        if self._is_closed:
            raise OledMoeError("the engine is closed; make a new one")
        event = ThreadEvent()
        delay_s = self._random.uniform(0, self._jitter_s) if self._jitter_s else 0.0
        self._queue.put((work, after, event, delay_s))
        return event

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, after, event, delay_s = item
            try:
                for dependency in after:
                    dependency.wait()
                if delay_s:
                    time.sleep(delay_s)
                work()
            # Whatever went wrong belongs to the waiter, not to this thread.
            except BaseException as error:  # noqa: B036 - carried to the waiter, see above
                event.fire(error)
            else:
                event.fire()
            # The closures hold slots and activations; do not keep them while waiting for more.
            del item, work, after, event

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
