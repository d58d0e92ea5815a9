"""Streams that do their work as late and as oddly as streams may, on CPU tensors.

What is queued runs only when somebody waits for it, or a little at random under a seed, one stream
before another as luck has it, but in order within a stream and behind the marks it waits for. A
copy is two steps with poison in between, so that whoever reads too early, or overwrites too early,
leaves wrong numbers behind.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_NAN_BYTE = 0xFF


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], bool]] = deque()


class FakeMark:
    def __init__(self, streams: "FakeStreams") -> None:
        self._streams = streams
        self.is_passed = False

    def query(self) -> bool:
        self._streams.go_on()
        return self.is_passed

    def synchronize(self) -> None:
        self._streams.run_until(lambda: self.is_passed)


class FakeStreams:
    """A `StreamApi`. Without `use`, a thread's own operations run at once."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._streams: list[FakeStream] = []
        self._current = threading.local()
        self.most_queued_copies: dict[str, int] = {}
        self._num_queued_copies: dict[str, int] = {}
        self.copies: list[tuple[str, int]] = []

    def new_stream(self, *, is_urgent: bool) -> FakeStream:
        stream = FakeStream("urgent" if is_urgent else "later")
        self._streams.append(stream)
        return stream

    @contextmanager
    def use(self, stream: FakeStream | None) -> Iterator[None]:
        before = self._stream()
        self._current.stream = stream if stream is not None else before
        try:
            yield
        finally:
            self._current.stream = before

    def mark(self) -> FakeMark:
        mark = FakeMark(self)

        def passed() -> None:
            mark.is_passed = True

        self.run(passed)
        return mark

    def wait(self, mark: FakeMark) -> None:
        stream = self._stream()
        if stream is None:
            mark.synchronize()
            return
        with self._lock:
            stream.queue.append(lambda: mark.is_passed)
        self.go_on()

    def copy(self, target: Tensor, source: Tensor) -> None:
        stream = self._stream()
        name = "host" if stream is None else stream.name
        with self._lock:
            count = self._num_queued_copies.get(name, 0) + 1
            self._num_queued_copies[name] = count
            self.most_queued_copies[name] = max(count, self.most_queued_copies.get(name, 0))
            self.copies.append((name, target.data_ptr()))

        def start() -> None:
            if target.dtype.itemsize == 1 and target.is_contiguous():
                target.fill_(_NAN_BYTE)

        def end() -> None:
            target.copy_(source)
            self._num_queued_copies[name] -= 1

        self.run(start)
        self.run(end)

    def run(self, work: Callable[[], None]) -> None:
        """Queue work on the current stream: what a kernel's launch is to a GPU."""
        stream = self._stream()
        if stream is None:
            work()
            return

        def step() -> bool:
            work()
            return True

        with self._lock:
            stream.queue.append(step)
        self.go_on()

    def synchronize(self) -> None:
        self.run_until(lambda: not any(stream.queue for stream in self._streams))

    def go_on(self) -> None:
        """A few steps, or none."""
        with self._lock:
            for _ in range(self._random.choice((0, 0, 0, 1, 2, 5))):
                self._step()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while True:
            with self._lock:
                while not is_done():
                    if not self._step():
                        break
                else:
                    return
            # What it waits for may be queued by another thread.
            assert time.monotonic() < deadline_s, "the streams wait for one another"
            time.sleep(0.0005)

    def _step(self) -> bool:
        """One step of any stream that can go on; whether there was one."""
        order = [stream for stream in self._streams if stream.queue]
        self._random.shuffle(order)
        for stream in order:
            if stream.queue[0]():
                stream.queue.popleft()
                return True
        return False

    def _stream(self) -> FakeStream | None:
        stream: FakeStream | None = getattr(self._current, "stream", None)
        return stream


class FakeGraph:
    def __init__(self, work: Callable[[], tuple[Tensor, ...]]) -> None:
        self._work = work
        self.outputs = tuple(tensor.clone() for tensor in work())
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for own, new in zip(self.outputs, self._work(), strict=True):
            own.copy_(new)


class FakeGraphs:
    """A `GraphApi` that runs a recording's work again. `forget` spoils what graphs have returned,
    as their next run would. `is_faster`: what measuring finds."""

    def __init__(self, *, is_faster: bool = True) -> None:
        self._is_faster = is_faster
        self._num_timed = 0
        self.graphs: list[FakeGraph] = []

    def capture(
        self, work: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[FakeGraph, tuple[Tensor, ...]]:
        self.graphs.append(FakeGraph(work))
        return self.graphs[-1], self.graphs[-1].outputs

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        self._num_timed += 1
        # Plain and recorded, by turns.
        is_plain = self._num_timed % 2
        return 2.0 if bool(is_plain) == self._is_faster else 1.0

    def forget(self) -> None:
        for graph in self.graphs:
            for tensor in graph.outputs:
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


class FakePinning:
    """A `PinApi` that refuses pieces, or sums, beyond a number of bytes."""

    def __init__(self, *, most_at_once: int = 2**62, most: int = 2**62) -> None:
        self._most_at_once = most_at_once
        self._most = most
        self.pinned: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self.pinned.values())

    def register(self, address: int, num_bytes: int) -> str | None:
        assert num_bytes > 0
        for start, size in self.pinned.items():
            assert address + num_bytes <= start or start + size <= address, "pinned twice"
        if num_bytes > self._most_at_once or self.num_bytes + num_bytes > self._most:
            return "out of memory"
        self.pinned[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.pinned[address]
