"""ExpertMonitor against sums done by hand, and against what the engine itself counts."""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.monitor import (
    NUM_POINTS,
    STATE_NAMES,
    TPOT_WINDOW,
    ExpertMonitor,
    ForwardPoint,
    running_tpot_s,
)


@dataclass
class Report:
    """What a scheduler tells of one forward."""

    kind: str = "denoise"
    forward_s: float = 0.5
    num_tokens: int = 32
    num_requests: int = 1
    num_new_tokens: int = 2
    num_edited: int = 0


@dataclass
class QuietScheduler:
    """A scheduler's face; the test itself tells of forwards."""

    observers: list[Any] = field(default_factory=list)
    num_running: int = 3
    num_waiting: int = 4
    kv_tokens: int = 96
    kv_capacity_tokens: int = 4096

    def tell(self, **what: Any) -> None:
        for observer in self.observers:
            observer(Report(**what))


CONFIGS = {
    "disk": EngineConfig(experts_per_layer=20),
    "cpu experts": EngineConfig(device="emulated", experts_per_layer=20),
    "ahead": EngineConfig(experts_per_layer=20, policy="oled+prefetch:least=0"),
    "global": EngineConfig(experts_per_layer=20, policy="oled+global"),
    "all": EngineConfig(experts_per_layer=96),
}


@pytest.fixture(params=CONFIGS)
def engine(request: pytest.FixtureRequest) -> Any:
    with Engine("demo", CONFIGS[request.param]) as engine:
        yield engine


def run(engine: Engine, scheduler: QuietScheduler, max_tokens: int = 32) -> Any:
    """One answer, with a report after each step as a scheduler would make it."""
    result = None
    for event in engine.stream("What is 12 + 30?", SamplingParams(max_tokens=max_tokens)):
        scheduler.tell(num_new_tokens=len(event.changes))
        result = event.result
    assert result is not None
    return result


def test_counts_what_the_engine_counts(engine: Engine) -> None:
    scheduler = QuietScheduler()
    monitor = ExpertMonitor(engine, scheduler)
    stats = run(engine, scheduler).stats
    totals = monitor.totals()
    assert totals.loads.sum() == stats.expert_loads
    # Every load is a copy that took its time; so is what was copied ahead and not called off.
    assert totals.num_fetches == stats.expert_loads + totals.num_ahead
    assert (totals.fetch_s > 0) == (totals.num_fetches > 0) and totals.stall_s >= 0
    assert totals.cpu_runs.sum() == stats.cpu_expert_runs
    assert (totals.misses == totals.loads + totals.cpu_runs).all()
    moved = stats.bytes_loaded + stats.bytes_prefetched
    assert sum(totals.num_bytes.values()) == moved
    assert totals.resident.tolist() == [
        len(engine.cache.resident_ids(layer)) for layer in range(engine.cache.shape.num_layers)
    ]
    is_emulated = engine.config.device == "emulated"
    assert list(totals.num_bytes) == [("ram", "emulated") if is_emulated else ("disk", "ram")]
    assert totals.tier == ("emulated" if is_emulated else "ram")
    num_forwards = stats.num_prefill_forwards + stats.num_denoise_forwards
    assert totals.num_forwards == num_forwards + stats.num_commit_forwards


def test_residents_come_by_loads_and_leave_by_evictions() -> None:
    # Without copies ahead, what was loaded and kept and is not there any more was evicted.
    with Engine("demo", EngineConfig(experts_per_layer=20, policy="naive-lru")) as engine:
        scheduler = QuietScheduler()
        monitor = ExpertMonitor(engine, scheduler)
        assert monitor.totals().resident.sum() == 0
        kept = np.zeros(6, dtype=np.int64)
        engine.experts.observers.append(
            lambda demand, plan: kept.__setitem__(
                demand.layer,
                kept[demand.layer]
                + np.isin(plan.load_ids, engine.cache.resident_ids(demand.layer)).sum(),
            )
        )
        run(engine, scheduler)
        totals = monitor.totals()
    assert totals.evictions.sum() > 0
    assert (kept - totals.evictions == totals.resident).all()


def test_states_say_what_the_latest_forward_did(engine: Engine) -> None:
    scheduler = QuietScheduler()
    monitor = ExpertMonitor(engine, scheduler)
    latest: dict[int, Any] = {}
    engine.experts.observers.append(lambda demand, plan: latest.__setitem__(demand.layer, plan))
    run(engine, scheduler)
    layers = monitor.snapshot()["layers"]
    assert len(layers) == 6
    for layer, record in enumerate(layers):
        states, plan = record["states"], latest[layer]
        assert len(states) == 96 and set(states) <= set(STATE_NAMES)
        found = {state: states.count(state) for state in STATE_NAMES}
        assert found["h"] == len(plan.hit_ids)
        assert found["l"] + found["s"] == len(plan.load_ids)
        assert found["a"] == len(plan.staged_ids)
        assert [expert for expert in range(96) if states[expert] == "c"] == plan.cpu_ids.tolist()
        resident = set(engine.cache.resident_ids(layer).tolist())
        assert {expert for expert in range(96) if states[expert] in "rl"} <= resident
        assert not {expert for expert in range(96) if states[expert] in ".s"} & resident
        assert record["resident"] == len(resident)
        assert record["utilization"] == pytest.approx(found["h"] / plan.capacity, abs=1e-4)


def test_series_are_the_denoising_forwards_only() -> None:
    with Engine("demo", EngineConfig(experts_per_layer=20)) as engine:
        scheduler = QuietScheduler()
        monitor = ExpertMonitor(engine, scheduler)
        assert monitor.snapshot()["series"]["tpot_s"] == []
        scheduler.tell(kind="prefill", forward_s=9.0)
        stats = run(engine, scheduler).stats
        snapshot = monitor.snapshot()
    series = snapshot["series"]
    num_steps = stats.num_denoise_forwards
    assert {len(values) for values in series.values()} == {num_steps}
    assert series["forward_s"] == [0.5] * num_steps
    assert np.mean(series["hit_rate"]) == pytest.approx(stats.hit_rate, abs=1e-3)
    utilization = stats.expert_cache_utilization
    assert np.mean(series["utilization"]) == pytest.approx(utilization, abs=1e-3)
    assert (snapshot["num_running"], snapshot["num_waiting"]) == (3, 4)
    assert (snapshot["kv_tokens"], snapshot["kv_capacity_tokens"]) == (96, 4096)
    json.dumps(snapshot, allow_nan=False)


def test_series_forget_what_is_old_and_know_no_ratio_without_a_layer() -> None:
    with Engine("demo", EngineConfig(experts_per_layer=20)) as engine:
        scheduler = QuietScheduler()
        monitor = ExpertMonitor(engine, scheduler)
        for number in range(NUM_POINTS + 10):
            scheduler.tell(forward_s=float(number), num_new_tokens=0)
        series = monitor.snapshot()["series"]
    assert series["forward_s"] == [float(number) for number in range(10, NUM_POINTS + 10)]
    assert set(series["hit_rate"]) == set(series["tpot_s"]) == {None}


def test_time_per_token_counts_a_shared_forward_for_each_request() -> None:
    points = [ForwardPoint(0.5, 2, 4, 0.0, 0.0), ForwardPoint(1.0, 1, 0, 0.0, 0.0)]
    assert running_tpot_s(points) == [0.25, 0.5]
    # Sixteen forwards back and no further.
    later = [ForwardPoint(2.0, 1, 1, 0.0, 0.0)] * TPOT_WINDOW
    assert running_tpot_s([*points, *later])[-1] == 2.0


def test_readers_on_other_threads_see_whole_forwards() -> None:
    is_done, problems = threading.Event(), []
    with Engine("demo", EngineConfig(experts_per_layer=20)) as engine:
        scheduler = QuietScheduler()
        monitor = ExpertMonitor(engine, scheduler)

        def read() -> None:
            while not is_done.is_set():
                totals = monitor.totals()
                forwards = {len(monitor.snapshot()["layers"]), len(totals.hits)}
                if forwards != {6} or (totals.hits > 0).any() != (totals.hits > 0).all():
                    problems.append(totals)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        run(engine, scheduler)
        is_done.set()
        for reader in readers:
            reader.join()
    assert not problems


def test_a_closed_monitor_watches_no_longer() -> None:
    with Engine("demo", EngineConfig(experts_per_layer=20)) as engine:
        scheduler = QuietScheduler()
        monitor = ExpertMonitor(engine, scheduler)
        run(engine, scheduler)
        before = monitor.totals()
        monitor.close()
        assert not scheduler.observers and not engine.experts.copy_observers
        run(engine, scheduler)
        assert monitor.totals().num_forwards == before.num_forwards
