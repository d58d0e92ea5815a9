"""Lanes run work in order, behind its events, and hand errors to whoever waits."""

import threading
from collections.abc import Callable, Iterator

import pytest

from oled_moe import lanes
from oled_moe.errors import OledMoeError
from oled_moe.lanes import DONE, InlineLane, Lane, ThreadEvent, ThreadLane

PATIENCE_S = 60.0

MakeLane = Callable[..., ThreadLane]


@pytest.fixture
def thread_lane() -> Iterator[MakeLane]:
    made = []

    def make(**options: object) -> ThreadLane:
        made.append(ThreadLane("test", **options))
        return made[-1]

    yield make
    for lane in made:
        lane.close()


class Gate:
    """An event that the test opens by hand."""

    def __init__(self) -> None:
        self._is_open = threading.Event()

    def open(self) -> None:
        self._is_open.set()

    def wait(self) -> None:
        assert self._is_open.wait(PATIENCE_S), "the test never opened the gate"


def failing() -> None:
    raise OSError("no such luck")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_work_starts_in_the_order_of_submission(thread_lane: MakeLane, num_threads: int) -> None:
    started: list[int] = []
    lane = thread_lane(num_threads=num_threads, jitter_s=0.0005)
    # With several threads, order is what the events make it.
    event = DONE
    for number in range(40):
        event = lane.submit(lambda n=number: started.append(n), after=(event,))
    event.wait()
    assert started == list(range(40))


def test_one_thread_keeps_order_without_events(thread_lane: MakeLane) -> None:
    started: list[int] = []
    lane = thread_lane(jitter_s=0.0005)
    events = [lane.submit(lambda n=number: started.append(n)) for number in range(40)]
    events[-1].wait()
    assert started == list(range(40))


def test_work_waits_for_its_events(thread_lane: MakeLane) -> None:
    first, second = thread_lane(), thread_lane()
    gate, seen = Gate(), []
    opened = first.submit(lambda: seen.append("first"), after=(gate,))
    done = second.submit(lambda: seen.append("second"), after=(DONE, opened))
    assert seen == []
    gate.open()
    done.wait()
    assert seen == ["first", "second"]


def test_submit_returns_before_the_work_is_done(thread_lane: MakeLane) -> None:
    gate = Gate()
    event = thread_lane().submit(gate.wait)
    gate.open()
    event.wait()


def test_threads_of_one_lane_overlap(thread_lane: MakeLane) -> None:
    # Each piece of work ends only when the other has begun.
    lane, barrier = thread_lane(num_threads=2), threading.Barrier(2, timeout=PATIENCE_S)
    for event in [lane.submit(lambda: barrier.wait() and None) for _ in range(2)]:
        event.wait()


def test_an_error_goes_to_every_waiter_and_the_lane_lives_on(thread_lane: MakeLane) -> None:
    lane, ran = thread_lane(), []
    event = lane.submit(failing)
    for _ in range(2):
        with pytest.raises(OSError, match="no such luck"):
            event.wait()
    lane.submit(lambda: ran.append(1)).wait()
    assert ran == [1]


def test_work_behind_a_failure_does_not_run_and_carries_its_error(thread_lane: MakeLane) -> None:
    lane, other, ran = thread_lane(), thread_lane(), []
    failure = lane.submit(failing)
    behind = other.submit(lambda: ran.append(1), after=(failure,))
    with pytest.raises(OSError, match="no such luck"):
        other.submit(lambda: ran.append(2), after=(behind,)).wait()
    assert ran == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_nothing_that_is_raised_kills_the_thread(
    thread_lane: MakeLane, error: type[BaseException]
) -> None:
    def work() -> None:
        raise error

    lane, ran = thread_lane(), []
    event = lane.submit(work)
    with pytest.raises(error):
        event.wait()
    lane.submit(lambda: ran.append(1)).wait()
    assert ran == [1]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_close_finishes_what_is_queued(num_threads: int) -> None:
    lane, gate, ran = ThreadLane("test", num_threads=num_threads), Gate(), []
    events = [lane.submit(lambda n=n: ran.append(n), after=(gate,)) for n in range(10)]
    gate.open()
    lane.close()
    assert sorted(ran) == list(range(10))
    for event in events:
        event.wait()
    lane.close()


def test_close_ends_the_threads_and_nothing_more_is_taken() -> None:
    before = threading.active_count()
    lane = ThreadLane("test", num_threads=4)
    assert threading.active_count() == before + 4
    lane.close()
    assert threading.active_count() == before
    with pytest.raises(OledMoeError, match="closed"):
        lane.submit(failing)


class FakeClock:
    """Stands for the module `time`: notes how long each sleep was asked to last."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


def delays_of(seed: int, monkeypatch: pytest.MonkeyPatch, *, num_threads: int = 1) -> list[float]:
    clock = FakeClock()
    monkeypatch.setattr(lanes, "time", clock)
    lane = ThreadLane("test", num_threads=num_threads, jitter_s=0.5, seed=seed)
    for _ in range(20):
        lane.submit(lambda: None)
    lane.close()
    return clock.slept_s


def test_delays_follow_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = delays_of(7, monkeypatch)
    assert delays == delays_of(7, monkeypatch) != delays_of(8, monkeypatch)
    assert len(set(delays)) == 20 and all(0 <= delay <= 0.5 for delay in delays)
    assert sorted(delays_of(7, monkeypatch, num_threads=3)) == sorted(delays)


def test_no_delay_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(lanes, "time", clock)
    lane = ThreadLane("test")
    lane.submit(lambda: None)
    lane.close()
    assert clock.slept_s == []


def test_inline_lane_works_at_once() -> None:
    lane: Lane = InlineLane()
    ran: list[int] = []
    lane.submit(lambda: ran.append(1), after=(DONE,)).wait()
    assert ran == [1]
    with pytest.raises(OSError, match="no such luck"):
        lane.submit(failing)
    failed = ThreadEvent()
    failed.fire(OSError("before"))
    with pytest.raises(OSError, match="before"):
        lane.submit(lambda: ran.append(2), after=(failed,))
    lane.close()
    assert ran == [1]


# ---- work that nobody waits for yet ----


def test_work_ahead_runs_when_nothing_urgent_waits(thread_lane: MakeLane) -> None:
    lane, gate, ran = thread_lane(), Gate(), []
    first = lane.submit(lambda: ran.append("first"), after=(gate,))
    ahead = lane.submit_ahead(lambda: ran.append("ahead"))
    late = lane.submit(lambda: ran.append("urgent"))
    gate.open()
    for event in (first, late, ahead):
        event.wait()
    assert ran == ["first", "urgent", "ahead"]


def test_hurried_work_goes_with_the_urgent_and_runs_once(thread_lane: MakeLane) -> None:
    lane, gate, ran = thread_lane(), Gate(), []
    lane.submit(lambda: ran.append("first"), after=(gate,))
    ahead = [lane.submit_ahead(lambda n=n: ran.append(n)) for n in range(3)]
    lane.hurry(ahead[2])
    lane.hurry(ahead[2])
    lane.submit(lambda: ran.append("urgent"))
    gate.open()
    for event in ahead:
        event.wait()
    assert ran == ["first", 2, "urgent", 0, 1]
    # What has run can be hurried and cancelled without effect.
    lane.hurry(ahead[2])
    assert not lane.cancel(ahead[2])
    lane.submit(lambda: ran.append("last")).wait()
    assert ran[5:] == ["last"]


def test_cancelled_work_never_runs_and_its_event_fires(thread_lane: MakeLane) -> None:
    lane, gate, ran = thread_lane(), Gate(), []
    lane.submit(lambda: ran.append("first"), after=(gate,))
    ahead = lane.submit_ahead(lambda: ran.append("ahead"))
    lane.hurry(ahead)
    assert not ahead.is_fired
    assert lane.cancel(ahead) and ahead.is_fired and not lane.cancel(ahead)
    gate.open()
    lane.submit(lambda: ran.append("last")).wait()
    assert ran == ["first", "last"]


def test_work_under_way_cannot_be_cancelled(thread_lane: MakeLane) -> None:
    lane, gate, started = thread_lane(), Gate(), threading.Event()

    def work() -> None:
        started.set()
        gate.wait()

    event = lane.submit_ahead(work)
    assert started.wait(PATIENCE_S)
    assert not lane.cancel(event) and not event.is_fired
    gate.open()
    event.wait()


def test_close_drops_work_ahead_that_has_not_begun() -> None:
    lane, gate, ran = ThreadLane("test"), Gate(), []
    lane.submit(lambda: ran.append("first"), after=(gate,))
    ahead = lane.submit_ahead(lambda: ran.append("ahead"))
    closing = threading.Thread(target=lane.close)
    closing.start()
    gate.open()
    closing.join(PATIENCE_S)
    assert ran == ["first"] and ahead.is_fired


def test_failed_work_ahead_tells_whoever_waits(thread_lane: MakeLane) -> None:
    event = thread_lane().submit_ahead(failing)
    with pytest.raises(OSError, match="no such luck"):
        event.wait()
    assert event.is_fired


def test_inline_work_ahead_is_done_at_once() -> None:
    lane, ran = InlineLane(), []
    event = lane.submit_ahead(lambda: ran.append(1))
    lane.hurry(event)
    assert ran == [1] and event.is_fired and not lane.cancel(event)


def test_few_guesses_run_at_a_time_and_all_run_in_the_end() -> None:
    lane = ThreadLane("many", num_threads=4, most_ahead=2)
    release, lock = threading.Event(), threading.Lock()
    num_running, most = 0, 0

    def guess() -> None:
        nonlocal num_running, most
        with lock:
            num_running += 1
            most = max(most, num_running)
        release.wait(60)
        with lock:
            num_running -= 1

    guesses = [lane.submit_ahead(guess) for _ in range(9)]
    # Threads are left for what somebody waits for.
    lane.submit(lambda: None).wait()
    lane.hurry(guesses[7])
    assert lane.cancel(guesses[8]) and guesses[8].is_fired
    release.set()
    for event in guesses:
        event.wait()
    # Two guesses, and the one that became urgent.
    assert most <= 3
    lane.close()
