"""Requests that share forwards: the same tokens as alone, in turn, within limits, to an end."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import synthetic_llada2, write_checkpoint
from fakes import FakeRouter, bounded, outcome_of, policy_of, shape_of
from hypothesis import given
from hypothesis import strategies as st
from test_engine import CONFIG, write_tokenizer

from oled_moe.cache import ExpertCache
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.engine import Engine, GenerationResult, StepEvent
from oled_moe.errors import (
    ConfigError,
    InputError,
    OledMoeError,
    QueueFullError,
    ShuttingDownError,
)
from oled_moe.scheduler import RequestHandle, Scheduler, StepReport
from oled_moe.types import Phase

PARAMS = SamplingParams(max_tokens=20, block_length=8, threshold=0.3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    weights = synthetic_llada2(CONFIG, seed=3)
    weights["lm_head.weight"] *= 12
    write_checkpoint(directory, weights, CONFIG)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine(tiny, EngineConfig(experts_per_layer=4, max_num_seqs=4)) as opened:
        yield opened


@dataclass
class Receiver:
    """What a request's callbacks were told."""

    events: list[StepEvent] = field(default_factory=list)
    error: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)
    on_first: Callable[[], None] | None = None

    def on_event(self, event: StepEvent) -> None:
        assert not self.over.is_set(), "an event after the end"
        if self.on_first is not None and not self.events:
            self.on_first()
        self.events.append(event)
        if event.result is not None:
            self.over.set()

    def on_error(self, error: BaseException) -> None:
        assert not self.over.is_set(), "an error after the end"
        self.error = error
        self.over.set()

    def result(self) -> GenerationResult:
        assert self.over.wait(60), "the request never ended"
        assert self.error is None, self.error
        result = self.events[-1].result
        assert result is not None
        return result


def submit(
    scheduler: Scheduler,
    prompt: Sequence[int] | str,
    params: SamplingParams = PARAMS,
    receiver: Receiver | None = None,
) -> tuple[RequestHandle, Receiver]:
    receiver = receiver or Receiver()
    handle = scheduler.submit(
        prompt, params, on_event=receiver.on_event, on_error=receiver.on_error
    )
    return handle, receiver


class Gate:
    """Holds the scheduler's thread before its next forward until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> "Gate":
        self._engine._turn.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine._turn.release()


class Hold:
    """An observer that stops the scheduler's thread once something is so, while `with` lasts."""

    def __init__(self, is_so: Callable[[], bool]) -> None:
        self._is_so = is_so
        self._is_there, self._may_go_on = threading.Event(), threading.Event()

    def __call__(self, report: StepReport) -> None:
        if self._is_so():
            self._is_there.set()
            self._may_go_on.wait(60)

    def __enter__(self) -> "Hold":
        assert self._is_there.wait(60), "it never came to be"
        return self

    def __exit__(self, *_: object) -> None:
        self._may_go_on.set()


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s, "it never came to be"
        time.sleep(0.001)


def is_idle(scheduler: Scheduler) -> bool:
    return not (scheduler.num_running or scheduler.num_waiting or scheduler.kv_tokens)


requests = st.tuples(
    st.lists(st.integers(0, 250), min_size=0, max_size=30),
    st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 30),
        block_length=st.sampled_from([4, 8]),
        threshold=st.sampled_from([0.2, 0.6, 1.0]),
        edit_threshold=st.sampled_from([0.3, 0.9]),
        max_post_edit_steps=st.integers(0, 3),
        algorithm=st.sampled_from(["low_confidence", "joint_threshold"]),
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 5),
        eos_early_stop=st.booleans(),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([None, ["a"], ["xy", "b"]]),
        top_p=st.sampled_from([None, 0.9]),
    ).map(lambda params: params.looked_at_by(params.algorithm)),
)


@given(st.lists(requests, min_size=1, max_size=9), st.integers(0, 3))
@bounded(12)
def test_tokens_are_the_same_alone_and_in_company(
    engine: Engine, asked: list[tuple[list[int], SamplingParams]], num_later: int
) -> None:
    alone = [engine.generate(*each) for each in asked]
    with Scheduler(engine) as scheduler:
        first, later = asked[num_later:], asked[:num_later]
        with Gate(engine):
            receivers = [submit(scheduler, *each)[1] for each in first]
        # The rest comes while these are somewhere on their way.
        receivers = [submit(scheduler, *each)[1] for each in later] + receivers
        found = [receiver.result() for receiver in receivers]
        assert is_idle(scheduler)
    for one, other, receiver in zip(alone, found, receivers, strict=True):
        assert other.token_ids == one.token_ids and other.text == one.text
        assert other.finish_reason == one.finish_reason
        assert other.probabilities == pytest.approx(one.probabilities, abs=1e-5)
        assert other.stats.num_denoise_forwards == one.stats.num_denoise_forwards
        check_events(receiver.events)


def check_events(events: list[StepEvent]) -> None:
    """Text and tokens only grow, and the last event has all of them."""
    for before, after in zip(events, events[1:], strict=False):
        assert after.text is not None and before.text is not None
        assert after.text.startswith(before.text)
        assert after.answer_ids[: len(before.answer_ids)] == before.answer_ids
    for event in events:
        assert len(event.answer_ids) == len(event.answer_probabilities)
        assert all(0 <= p <= 1 for p in event.answer_probabilities)
    last = events[-1].result
    assert last is not None and list(events[-1].answer_ids) == last.token_ids


@pytest.mark.parametrize("capacity", [12, 4, 2])
@pytest.mark.parametrize("policy", ["oled", "naive-lru", "oled+prefetch"])
def test_company_shares_forwards_at_every_capacity(tiny: Path, capacity: int, policy: str) -> None:
    prompts = [list(range(first, first + 19)) for first in range(5)]
    config = EngineConfig(experts_per_layer=capacity, policy=policy, max_num_seqs=5)
    with Engine(tiny, config) as engine:
        alone = [engine.generate(prompt, PARAMS) for prompt in prompts]
        reports: list[StepReport] = []
        with Scheduler(engine) as scheduler:
            scheduler.observers.append(reports.append)
            with Gate(engine):
                receivers = [submit(scheduler, prompt)[1] for prompt in prompts]
            found = [receiver.result().token_ids for receiver in receivers]
    assert found == [result.token_ids for result in alone]
    # Prompts of 19 have two whole blocks of 8 each: they are read where their first block is
    # denoised.
    assert "prefill" not in [report.kind for report in reports]
    steps = [report for report in reports if report.kind == "denoise"]
    assert len(steps) < sum(result.stats.num_denoise_forwards for result in alone)
    assert max(report.num_requests for report in steps) >= 4
    assert sum(report.num_new_tokens for report in steps) == sum(map(len, found))


def test_short_prompts_ride_along_and_long_ones_take_turns(engine: Engine) -> None:
    """A prompt of 200 is more than 16 blocks of 8, and more than two at work."""
    at_work = replace(PARAMS, max_tokens=200, ignore_eos=True, threshold=1.0)
    for length, params, most_tokens in (
        (16, PARAMS, 3 * 8 + 16),
        (200, PARAMS, None),
        # Other blocks: a forward of its own, but no other one.
        (16, replace(PARAMS, block_length=4), 4 + 16),
    ):
        prompt = [7] * length
        alone = engine.generate(prompt, params)
        reports: list[StepReport] = []
        with Scheduler(engine) as scheduler:
            with Gate(engine):
                others = [submit(scheduler, [i], at_work)[0] for i in range(2)]
                hold = Hold(lambda others=others: all(h.first_token_s for h in others))  # type: ignore[misc]
                scheduler.observers.append(hold)
            with hold:
                scheduler.observers.append(reports.append)
                _, receiver = submit(scheduler, prompt, params)
            assert receiver.result().token_ids == alone.token_ids
            for handle in others:
                scheduler.cancel(handle)
        assert ("prefill" in [report.kind for report in reports]) == (most_tokens is None)
        if most_tokens is not None:
            assert max(report.num_tokens for report in reports) in (most_tokens, 3 * 8)


def test_probabilities_are_those_of_the_commitment(engine: Engine) -> None:
    conf: dict[int, float] = {}
    result = None
    for event in engine.stream([5] * 10, PARAMS):
        conf |= {change.position: change.confidence for change in event.changes}
        result = event.result
    assert result is not None
    assert result.probabilities == [conf[10 + i] for i in range(len(result.token_ids))]


def test_first_done_first_out(engine: Engine) -> None:
    long = replace(PARAMS, max_tokens=64, ignore_eos=True, threshold=1.0)
    short = replace(PARAMS, max_tokens=1, ignore_eos=True)
    with Scheduler(engine) as scheduler:
        with Gate(engine):
            _, first = submit(scheduler, [1], long)
            handle, second = submit(scheduler, [2], short)
            hold = Hold(lambda: handle.is_over)
            scheduler.observers.append(hold)
        with hold:
            assert second.over.is_set() and not first.over.is_set()
        assert [len(each.result().token_ids) for each in (first, second)] == [64, 1]


def test_only_so_many_run_and_the_next_takes_the_place(engine: Engine) -> None:
    most = 0

    def watch(report: StepReport) -> None:
        nonlocal most
        most = max(most, report.num_requests, scheduler.num_running)

    with Scheduler(engine) as scheduler:
        scheduler.observers.append(watch)
        with Gate(engine):
            receivers = [submit(scheduler, [i])[1] for i in range(11)]
        for receiver in receivers:
            receiver.result()
        assert is_idle(scheduler)
    assert most == 4


def test_a_full_queue_refuses_and_says_when_to_come_back(engine: Engine) -> None:
    with Scheduler(engine, max_waiting=2) as scheduler:
        with Gate(engine):
            receivers = [submit(scheduler, [i])[1] for i in range(6)]
            with pytest.raises(QueueFullError, match=r"as many as may") as caught:
                submit(scheduler, [7])
            assert 1 <= caught.value.retry_after_s <= 60
        for receiver in receivers:
            receiver.result()
        submit(scheduler, [7])[1].result()


def test_bad_requests_are_refused_at_once(engine: Engine) -> None:
    with Scheduler(engine) as scheduler:
        with pytest.raises(InputError, match="prompt token 0"):
            submit(scheduler, [9999])
        with pytest.raises(InputError, match="max_model_len"):
            submit(scheduler, [1], replace(PARAMS, max_tokens=100_000))
        with pytest.raises(ConfigError, match="params"):
            submit(scheduler, [1], "fast")  # type: ignore[arg-type]
        assert is_idle(scheduler)


def test_a_forked_process_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with Scheduler(engine) as scheduler, monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: -1)
        with pytest.raises(OledMoeError, match="forked"):
            submit(scheduler, [1])


def test_cancelling_at_any_moment_leaves_nothing(engine: Engine) -> None:
    with Scheduler(engine) as scheduler:
        with Gate(engine):
            pairs = [submit(scheduler, [i] * 20) for i in range(8)]
            for handle, _ in pairs[2:]:
                scheduler.cancel(handle)
                scheduler.cancel(handle)
        for _, receiver in pairs[:2]:
            receiver.result()
        for handle, receiver in pairs[2:]:
            wait_until(lambda handle=handle: handle.is_over)  # type: ignore[misc]
            assert receiver.error is None
        wait_until(lambda: is_idle(scheduler))
        assert not engine._running
        # While it runs, from its own callback's thread.
        long = replace(PARAMS, max_tokens=200, ignore_eos=True)
        receiver = Receiver(on_first=lambda: scheduler.cancel(handles[0]))
        handles: list[RequestHandle] = []
        with Gate(engine):
            handles.append(submit(scheduler, [3], long, receiver)[0])
        wait_until(lambda: is_idle(scheduler))
        assert len(receiver.events) == 1
        scheduler.cancel(handles[0])


def test_a_failing_forward_fails_its_requests_and_no_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, num_calls = engine.model.forward, 0

    def failing(batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise OSError("the disk is gone")
        return forward(batch)

    monkeypatch.setattr(engine.model, "forward", failing)
    with Scheduler(engine) as scheduler:
        with Gate(engine):
            receivers = [submit(scheduler, [i])[1] for i in range(3)]
        for receiver in receivers:
            assert receiver.over.wait(60)
        assert any(isinstance(receiver.error, OSError) for receiver in receivers)
        submit(scheduler, [9])[1].result()
        assert is_idle(scheduler) and not engine._running


@pytest.mark.parametrize("where", ["_next_group", "_retire", "_admit"])
def test_a_scheduler_that_fails_says_so_and_leaves_nobody_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def fail(*_: object) -> None:
        raise SystemError("nobody foresaw this")

    failures: list[OledMoeError] = []
    with Scheduler(engine) as scheduler:
        scheduler.on_failure = failures.append
        monkeypatch.setattr(scheduler, where, fail)
        with scheduler._changed:
            receivers = [submit(scheduler, [i])[1] for i in range(7)]
        for receiver in receivers:
            assert receiver.over.wait(60)
        scheduler._thread.join(60)
        assert not scheduler._thread.is_alive() and is_idle(scheduler)
        with pytest.raises(OledMoeError, match="the scheduler failed") as caught:
            submit(scheduler, [1])
        assert failures == [caught.value]
    assert "nobody foresaw this" in caplog.text
    # What the requests held is theirs still; this engine is others' too.
    for request_id in list(engine._running):
        engine._running.remove(request_id)
        engine.cache.end_request(request_id)


def test_a_receiver_that_fails_is_given_up(engine: Engine, caplog: Any) -> None:
    def fail() -> None:
        raise RuntimeError("the client is gone")

    with Scheduler(engine) as scheduler:
        broken = Receiver(on_first=fail)
        with Gate(engine):
            handle, _ = submit(scheduler, [1], receiver=broken)
            _, other = submit(scheduler, [2])
        other.result()
        wait_until(lambda: handle.is_over)
        assert is_idle(scheduler)
    assert "the receiver of a request's events failed" in caplog.text


def test_closing_drains_or_cuts_short(engine: Engine) -> None:
    scheduler = Scheduler(engine)
    receivers = [submit(scheduler, [i])[1] for i in range(7)]
    scheduler.close(drain_s=60)
    for receiver in receivers:
        receiver.result()
    with pytest.raises(ShuttingDownError):
        submit(scheduler, [1])
    scheduler.close()

    scheduler = Scheduler(engine)
    with Gate(engine):
        receivers = [submit(scheduler, [i])[1] for i in range(7)]
        closer = threading.Thread(target=scheduler.close)
        closer.start()
    closer.join(60)
    assert not closer.is_alive()
    for receiver in receivers:
        assert receiver.over.wait(60)
        assert isinstance(receiver.error, ShuttingDownError) or receiver.events[-1].result
    assert is_idle(scheduler) and not engine._running
    assert not any(t.name == "oled-moe-scheduler" for t in threading.enumerate())


def test_moments_are_in_order(engine: Engine) -> None:
    with Scheduler(engine) as scheduler:
        handle, receiver = submit(scheduler, [1] * 20)
        receiver.result()
    moments = [
        handle.submitted_s,
        handle.admitted_s,
        handle.prefill_end_s,
        handle.first_token_s,
        handle.finished_s,
    ]
    assert moments == sorted(moments) and moments[0] > 0
    assert handle.num_prompt_tokens == 20


def test_generate_and_scheduler_share_an_engine(engine: Engine) -> None:
    alone = engine.generate([4] * 9, PARAMS).token_ids
    with Scheduler(engine) as scheduler:
        receivers = [submit(scheduler, [i])[1] for i in range(6)]
        assert engine.generate([4] * 9, PARAMS).token_ids == alone
        for receiver in receivers:
            receiver.result()


def test_a_finished_beginning_of_a_block_goes_out_early(engine: Engine) -> None:
    one_by_one = replace(PARAMS, threshold=1.0, ignore_eos=True)
    events = list(engine.stream([1], one_by_one))
    early = [event for event in events if not event.is_block_done and event.answer_ids]
    assert early, "nothing of a block was final before all of it"
    for event in early:
        num_blocks_done = len([e for e in events[: events.index(event)] if e.is_block_done])
        assert len(event.answer_ids) <= 8 * (num_blocks_done + 1)
    editing = replace(one_by_one, algorithm="joint_threshold")
    for event in engine.stream([1], editing):
        if not event.is_block_done:
            # Prompt 1, so that the first block has 7 of the answer.
            assert len(event.answer_ids) in (0, 7, 15)


def test_stop_strings_never_leak(engine: Engine) -> None:
    free = engine.generate([1], replace(PARAMS, max_tokens=40, ignore_eos=True, threshold=1.0))
    assert free.text is not None and len(free.text) > 12
    # Strings that lie across a border of blocks, and ones within.
    for start in range(2, len(free.text) - 3):
        stop = free.text[start : start + 3]
        params = replace(PARAMS, max_tokens=40, ignore_eos=True, threshold=1.0, stop=stop)
        expected = free.text[: free.text.index(stop)]
        for event in engine.stream([1], params):
            assert event.text is not None and expected.startswith(event.text)
        assert event.result is not None and event.result.finish_reason == "stop"
        assert event.text == expected


# Prefill beside requests at work


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from(["oled", "oled+global"]))
@bounded(60)
def test_a_prefill_spares_what_requests_at_work_use(seed: int, capacity: int, policy: str) -> None:
    shape = shape_of(num_layers=2, num_experts=8, top_k=2)
    cache = ExpertCache(shape, policy_of(policy, shape), num_slots=2 * capacity, num_staging=3)
    router = FakeRouter(shape, seed)

    def run(phase: Phase, request_id: int) -> list[set[int]]:
        """One forward; returns what is resident in each layer behind it."""
        context = router.context(6, [phase])
        rows = tuple(replace(row, request_id=request_id) for row in context.rows)
        context = replace(context, rows=rows)
        cache.start_forward(context)
        for layer in range(2):
            cache.plan(router.demand(layer, context))
        cache.end_forward(outcome_of(context))
        cache.check()
        return [set(cache.resident_ids(layer).tolist()) for layer in range(2)]

    used = run(Phase.DENOISE, 1)
    for _ in range(3):
        for before, after in zip(used, run(Phase.PREFILL, 2), strict=True):
            assert before <= after
    # A prompt that rides along takes no slot from what the others want at that moment.
    context = router.context(8, [Phase.DENOISE, Phase.PREFILL])
    rows = [replace(row, request_id=i + 1) for i, row in enumerate(context.rows)]
    context = replace(context, rows=tuple(rows))
    cache.start_forward(context)
    for layer, before in enumerate(used):
        demand = router.demand(layer, context)
        cache.plan(demand)
        wanted = set(demand.topk_ids[: rows[0].num_tokens].ravel().tolist())
        kept = set(cache.resident_ids(layer).tolist())
        if policy == "oled":
            assert before & wanted <= kept
    cache.end_forward(outcome_of(context))
    # Once nobody is at work the slots are the prompt's.
    cache.end_request(1)
    assert any(run(Phase.PREFILL, 2) != used for _ in range(20))


def test_handles_are_small_once_they_are_over(engine: Engine) -> None:
    with Scheduler(engine) as scheduler:
        handle, receiver = submit(scheduler, [1])
        receiver.result()
        wait_until(lambda: handle.is_over)
    assert handle._prepared is None and handle._running is None
