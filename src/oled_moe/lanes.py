"""Lanes: ordered asynchronous executors with events. The seam between devices.

A lane takes work together with the events it must wait for and returns the event that fires when
it is done. The code that decides and the code that moves weights know lanes and events, nothing
else; a device is a choice of lanes (`slots.py`, `experts.py`) and kernels (`kernels/`).
A GPU's lanes, whose work is enqueued on streams and whose events are theirs, are in `cuda.py`.
"""

import itertools
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from oled_moe.errors import OledMoeError

Work = Callable[[], None]


def check_process(process_id: int, made: str, remedy: str) -> None:
    """Raise OledMoeError where this is not the process whose threads are to do the work: those are
    lost in a fork, and whoever waited for them would wait for ever."""
    if os.getpid() != process_id:
        raise OledMoeError(
            f"this process was forked from the one that {made} and lacks its threads; {remedy}"
        )


class Event(Protocol):
    """Fires once the work it stands for is done."""

    @property
    def is_fired(self) -> bool:
        """Whether the work has ended, well or not."""
        ...

    def wait(self) -> None:
        """What the caller does next comes after the work: blocks until fired, or, for work of a
        device, orders the device's work behind it. Raises: whatever the work raised."""
        ...


class Lane(Protocol):
    """Executes work; one lane's work starts in the order it was submitted."""

    @property
    def runs_at_once(self) -> bool:
        """Whether `submit` does the work itself, on the caller's time."""
        ...

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        """Queue `work` behind the events in `after`; returns its event at once."""
        ...

    def close(self) -> None:
        """Finish what is queued and release the threads."""
        ...


class CopyLane(Lane, Protocol):
    """A lane that also takes work for which nobody waits yet."""

    def submit_ahead(self, work: Work, after: Sequence[Event] = ()) -> Event:
        """Queue `work` to run while nothing that was submitted otherwise waits to start.

        Nothing in `after` may depend on work still to be submitted to this lane.
        """
        ...

    def hurry(self, event: Event) -> None:
        """Make work submitted ahead as urgent as any other; nothing if it has begun."""
        ...

    def cancel(self, event: Event) -> bool:
        """Drop work submitted ahead if it has not begun; whether it was dropped.

        The event of dropped work has fired.
        """
        ...


class _DoneEvent:
    """The event of work that is already finished."""

    is_fired = True

    def wait(self) -> None:
        return None


DONE: Event = _DoneEvent()


class ThreadEvent:
    """An event fired by a lane's thread; carries the work's exception to whoever waits."""

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    @property
    def is_fired(self) -> bool:
        return self._is_done.is_set()

    def fire(self, error: BaseException | None = None) -> None:
        self._error = error
        self._is_done.set()

    def wait(self) -> None:
        self._is_done.wait()
        if self._error is not None:
            raise self._error


class InlineLane:
    """Runs work at once on the caller's thread, after waiting for what it depends on."""

    runs_at_once = True

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        for event in after:
            event.wait()
        work()
        return DONE

    def submit_ahead(self, work: Work, after: Sequence[Event] = ()) -> Event:
        return self.submit(work, after)

    def hurry(self, event: Event) -> None:
        return None

    def cancel(self, event: Event) -> bool:
        return False

    def close(self) -> None:
        return None


# Order in which a lane's threads take what is queued; stopping goes before guesses.
_URGENT, _STOP, _AHEAD = 0, 1, 2


class _Item:
    """Queued work; `is_taken` once a thread runs it or it was dropped."""

    __slots__ = ("after", "delay_s", "event", "is_taken", "work")

    def __init__(self, work: Work, after: Sequence[Event], delay_s: float) -> None:
        self.work = work
        self.after = after
        self.delay_s = delay_s
        self.event = ThreadEvent()
        self.is_taken = False


class ThreadLane:
    """Runs work on `num_threads` threads, started in order.

    With one thread it behaves like a stream. With several, work may overlap and finish out of
    order: what must not overlap has to be ordered by events. Of work submitted ahead at most
    `most_ahead` pieces run at a time (None: as many as there are threads): urgent work waits for
    those under way. `jitter_s` adds a random delay under `seed` before each piece of work, so that
    a missing wait shows up.
    """

    runs_at_once = False

    def __init__(
        self,
        name: str,
        *,
        num_threads: int = 1,
        most_ahead: int | None = None,
        jitter_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._most_ahead = most_ahead or num_threads
        self._jitter_s = jitter_s
        self._random = random.Random(seed)
        self._queue: queue.PriorityQueue[tuple[int, int, _Item | None]] = queue.PriorityQueue()
        self._num_submitted = itertools.count()
        # Guesses that no thread has taken, by their events; those of them that threads may not see
        # yet; and how many they may see or are at.
        self._ahead: dict[Event, _Item] = {}
        self._held_back: deque[_Item] = deque()
        self._num_ahead = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"oled-moe-{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work, after: Sequence[Event] = ()) -> Event:
        return self._put(_URGENT, self._item(work, after))

    def submit_ahead(self, work: Work, after: Sequence[Event] = ()) -> Event:
        item = self._item(work, after)
        self._ahead[item.event] = item
        self._held_back.append(item)
        self._let_ahead()
        return item.event

    def hurry(self, event: Event) -> None:
        item = self._ahead.get(event)
        if item is not None:
            # Queued twice; whoever comes second finds it taken.
            self._put(_URGENT, item)

    def cancel(self, event: Event) -> bool:
        item = self._ahead.get(event)
        if item is None:
            return False
        with self._lock:
            if item.is_taken:
                return False
            # Fired first: an interrupt in between must not leave an event that nobody fires.
            item.event.fire()
            item.is_taken = True
            del self._ahead[event]
        return True

    def _item(self, work: Work, after: Sequence[Event]) -> _Item:
        if self._is_closed:
            raise OledMoeError("the engine is closed; make a new one")
        delay_s = self._random.uniform(0, self._jitter_s) if self._jitter_s else 0.0
        return _Item(work, after, delay_s)

    def _let_ahead(self, num_done: int = 0) -> None:
        """Show threads as many guesses as may run, after `num_done` are out of the way."""
        with self._lock:
            self._num_ahead -= num_done
            while self._held_back and self._num_ahead < self._most_ahead:
                item = self._held_back.popleft()
                # Who was hurried or dropped meanwhile needs no turn.
                if not item.is_taken:
                    self._num_ahead += 1
                    self._put(_AHEAD, item)

    def _put(self, urgency: int, item: _Item) -> Event:
        self._queue.put((urgency, next(self._num_submitted), item))
        return item.event

    def _take(self, item: _Item) -> bool:
        """Claim an item; False where somebody has."""
        with self._lock:
            if item.is_taken:
                return False
            item.is_taken = True
            self._ahead.pop(item.event, None)
            return True

    def _run(self) -> None:
        while True:
            urgency, _, item = self._queue.get()
            if item is None:
                return
            if self._take(item):
                self._do(item)
            if urgency == _AHEAD:
                self._let_ahead(1)
            # The closures hold slots and activations; do not keep them while waiting for more.
            del item

    @staticmethod
    def _do(item: _Item) -> None:
        try:
            for dependency in item.after:
                dependency.wait()
            if item.delay_s:
                time.sleep(item.delay_s)
            item.work()
        # Whatever went wrong belongs to the waiter, not to this thread.
        except BaseException as error:  # noqa: B036 - carried to the waiter, see above
            item.event.fire(error)
        else:
            item.event.fire()

    def close(self) -> None:
        """Finish what is queued and release the threads; guesses not begun are dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        for _ in self._threads:
            self._queue.put((_STOP, next(self._num_submitted), None))
        for thread in self._threads:
            thread.join()
        for event in list(self._ahead):
            self.cancel(event)
