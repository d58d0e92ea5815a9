"""Replays against the rules in plain Python, bounds, and times of whole requests by hand."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from replays import NaiveReplay, random_trace

from oled_moe.costs import DEFAULT_PROFILE, CostModel
from oled_moe.errors import ConfigError, TraceError
from oled_moe.policies import POLICIES, build_policy
from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.simulator import SimulationReport, best_tide_interval, simulate, sweep
from oled_moe.traces import RoutingTrace
from oled_moe.types import LayerDemand, LayerPlan, MoeShape, Phase

HARDWARE = replace(DEFAULT_PROFILE, name="a fake machine", copy_latency_s=0.0, copy_bytes_per_s=1e6)
COSTS = CostModel.from_profile(HARDWARE, 1000)
RULED = ("naive-lru", "lfu", "priority", "belady", "oracle")
ALL = tuple(POLICIES)


def run(trace: RoutingTrace, policy: str, capacity: float, **options: object) -> SimulationReport:
    options = {"hardware": HARDWARE, "has_cpu_experts": False, **options}
    return simulate(trace, policy, experts_per_layer=capacity, **options)


# Rules


@pytest.mark.parametrize("policy", RULED)
@given(seed=st.integers(0, 2**32), data=st.data())
@bounded(60)
def test_replay_is_the_rules(policy: str, seed: int, data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(3, 8), label="experts")
    top_k = data.draw(st.integers(1, 3), label="top k")
    trace = random_trace(
        seed,
        num_layers=data.draw(st.integers(1, 3), label="layers"),
        num_experts=num_experts,
        top_k=top_k,
        num_forwards=data.draw(st.integers(1, 14), label="forwards"),
        num_requests=data.draw(st.integers(1, 3), label="requests"),
        max_batch=data.draw(st.integers(1, 3), label="batch"),
    )
    for capacity in {0, 1, top_k - 1, top_k, num_experts - 1, num_experts}:
        report = run(trace, policy, capacity)
        naive = NaiveReplay(trace, policy, capacity)
        assert report.expert_cache_utilization == pytest.approx(naive.ratio("slots"), abs=1e-9)
        assert report.hit_rate == pytest.approx(naive.ratio("demands"), abs=1e-9)
        assert report.pooled_utilization == pytest.approx(naive.pooled("slots"), abs=1e-9)
        assert report.pooled_hit_rate == pytest.approx(naive.pooled("demands"), abs=1e-9)
        assert report.num_forwards == len(set(trace.row_forward.tolist()))
        # Every miss is loaded, in every phase.
        misses = sum(naive.demands.values()) - sum(naive.hits.values())
        assert report.expert_loads == misses and report.cpu_expert_runs == 0


def most_hits(demands: Sequence[frozenset[int]], capacity: int) -> int:
    """The best that any choice of what to keep can do; keeping nothing new is allowed too."""
    best = {frozenset[int](): 0}
    for demand in demands:
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            hits += len(resident & demand)
            candidates = sorted(resident | demand)
            for size in range(min(capacity, len(candidates)) + 1):
                for kept in combinations(candidates, size):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, -1), hits)
        best = after
    return max(best.values())


def test_belady_is_optimal() -> None:
    random = np.random.default_rng(0)
    for seed in range(500):
        num_experts = int(random.integers(2, 6))
        top_k = int(random.integers(1, min(3, num_experts) + 1))
        capacity = int(random.integers(1, num_experts))
        trace = random_trace(
            seed,
            num_layers=1,
            num_experts=num_experts,
            top_k=top_k,
            num_forwards=int(random.integers(2, 7)),
            num_requests=1,
            block_length=int(random.integers(1, 3)),
            max_batch=1,
            only_denoise=True,
        )
        demands = [
            frozenset(layers[0].tolist())
            for layers in trace.future().active
            if layers[0] is not None
        ]
        num_hits = most_hits(demands, capacity)
        report = run(trace, "belady", capacity)
        total = sum(map(len, demands))
        assert report.pooled_hit_rate == pytest.approx(num_hits / total, abs=1e-12), seed


@given(seed=st.integers(0, 2**32), capacity=st.integers(0, 6))
@bounded(25)
def test_nobody_beats_the_bounds(seed: int, capacity: int) -> None:
    trace = random_trace(seed, num_forwards=12, num_requests=2)
    total = sum(len(ids) for layers in trace.future().active for ids in layers if ids is not None)
    hits = {}
    for name in ALL:
        counted = _total_hits(trace, name, capacity)
        hits[name] = counted
        assert 0 <= counted <= total
    shape = trace.shape
    for name, entry in POLICIES.items():
        assert hits[name] <= hits["oracle-total"], name
        if entry.is_clairvoyant:
            continue
        policy = build_policy(name, shape, COSTS)
        is_plain = (
            isinstance(policy.allocation, UniformAllocationPolicy)
            and policy.placement is None
            and not policy.is_global
        )
        if is_plain:
            assert hits[name] <= hits["oracle"], name
        if is_plain and policy.prefetch is None and policy.retention.is_stack:
            assert hits[name] <= hits["belady"], name
    assert hits["belady"] <= hits["oracle"] <= hits["oracle-total"]


def _total_hits(trace: RoutingTrace, policy: str, capacity: int) -> int:
    """Hits of all phases: every demanded expert that was neither copied nor run elsewhere."""
    report = run(trace, policy, capacity)
    demanded = sum(
        len(ids) for layers in trace.future().active for ids in layers if ids is not None
    )
    staged_bytes = report.useful_prefetched_bytes + report.late_prefetched_bytes
    return (
        demanded - report.expert_loads - report.cpu_expert_runs - staged_bytes // trace.expert_bytes
    )


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("has_cpu_experts", [False, True])
def test_numbers_of_any_policy_make_sense(policy: str, has_cpu_experts: bool) -> None:
    trace = random_trace(3, num_forwards=30, num_requests=3, num_experts=8, num_layers=3)
    hardware = replace(HARDWARE, activation_round_trip_s=1e-4)
    for capacity in (0.5, 2, 4.34, 8):
        report = run(trace, policy, capacity, has_cpu_experts=has_cpu_experts, hardware=hardware)
        values = report.to_dict()
        assert all(
            math.isfinite(v) and v >= 0 for v in values.values() if isinstance(v, int | float)
        )
        assert json.loads(json.dumps(values)) == values
        assert report.num_slots == round(capacity * 3)
        assert report.ready_rate >= report.hit_rate
        # Waiting, working and nothing else: the busiest lane cannot take longer than the forward.
        assert (
            report.busiest_lane_s <= report.forward_s * (1 + 1e-9) or report.late_prefetched_bytes
        )
        assert report.tpot_s > 0 and report.ttft_s > 0
        for lane in ("device", "copy", "cpu"):
            assert 0 <= values[f"{lane}_occupancy"] <= 1.5
        if capacity == 8 and policy not in ("n-cpu-moe",):
            again = run(trace, policy, capacity, has_cpu_experts=has_cpu_experts)
            assert again.expert_loads == report.expert_loads


@pytest.mark.parametrize("policy", ["naive-lru", "oled", "belady", "oracle", "oracle-total"])
def test_replays_repeat(policy: str) -> None:
    trace = random_trace(5, num_forwards=20)
    first, second = (run(trace, policy, 3, has_cpu_experts=True) for _ in range(2))
    assert first == second


def test_oracle_finds_what_fits() -> None:
    trace = random_trace(7, num_forwards=20, only_denoise=True)
    for capacity in (0, 1, 3, 6):
        sizes = [len(ids) for layers in trace.future().active for ids in layers if ids is not None]
        report = run(trace, "oracle", capacity)
        expected = sum(min(size, capacity) for size in sizes) / sum(sizes)
        assert report.pooled_hit_rate == pytest.approx(expected)


def test_warm_up_is_replayed_and_not_measured() -> None:
    trace = random_trace(11, num_forwards=40, num_requests=3, max_batch=1)
    whole, part = run(trace, "naive-lru", 6), run(trace, "naive-lru", 6, warmup_requests=1)
    of_request = trace.row_request[trace.forward_row_offset[:-1]]
    assert part.num_forwards == int((of_request >= 1).sum()) < whole.num_forwards
    assert part.num_requests == 2 and whole.num_requests == 3
    assert part.num_tokens < whole.num_tokens
    # With all slots, what the warm-up loaded is not loaded again.
    assert part.expert_loads <= whole.expert_loads


def test_refusals() -> None:
    trace = random_trace(1)
    with pytest.raises(ConfigError, match="0 to 6"):
        run(trace, "naive-lru", 6.5)
    with pytest.raises(ConfigError, match="known: "):
        run(trace, "no-such", 2)
    with pytest.raises(ConfigError, match="one of experts_per_layer and num_slots"):
        simulate(trace, "lfu", hardware=HARDWARE)
    with pytest.raises(ConfigError, match="num_slots.*0 to 12"):
        simulate(trace, "lfu", hardware=HARDWARE, num_slots=13)
    with pytest.raises(ConfigError, match="warmup_requests"):
        run(trace, "lfu", 2, warmup_requests=2)
    with pytest.raises(ConfigError, match="forward"):
        run(trace, "lfu", 2, record_forward=10)
    with pytest.raises(ConfigError, match="head_bytes"):
        run(random_trace(1, head_bytes="many"), "lfu", 2)


def test_a_policy_refuses_a_trace_without_what_it_needs() -> None:
    needy = [n for n in ALL if not POLICIES[n].is_clairvoyant and _needs(n)]
    trace = replace(random_trace(1), gate_scores=None, input_embedding=None, token_ids=None)
    for name in needy:
        with pytest.raises(TraceError, match="needs"):
            run(trace, name, 2)


def _needs(name: str) -> frozenset[str]:
    return build_policy(name, MoeShape(2, 6, 2, 1000), COSTS).needs & {
        "gate_scores",
        "input_embedding",
        "token_ids",
    }


def test_sweep_is_policies_by_capacities() -> None:
    trace = random_trace(2)
    reports = list(sweep(trace, ["lfu", "belady"], [1, 2], hardware=HARDWARE))
    pairs = [(report.policy, report.experts_per_layer) for report in reports]
    assert pairs == [("lfu", 1), ("lfu", 2), ("belady", 1), ("belady", 2)]


def test_best_tide_interval_is_the_fastest() -> None:
    trace = random_trace(13, num_forwards=40, num_requests=1, only_denoise=True, num_experts=8)
    found = best_tide_interval(
        trace,
        hardware=HARDWARE,
        intervals=(1, 2, 3, 5),
        experts_per_layer=3,
        has_cpu_experts=True,
    )
    assert set(found.reports) == {1, 2, 3, 5}
    times = {interval: report.tpot_s for interval, report in found.reports.items()}
    assert times[found.best] == min(times.values())
    assert found.reports[3].policy == "tide:interval=3"


# Everything a forward takes is one second of software, and one more where there are logits.
STEADY = replace(
    HARDWARE,
    forward_overhead_s=1.0,
    copy_bytes_per_s=1e30,
    device_weight_bytes_per_s=1e30,
    device_token_weight_bytes_per_s=1e30,
)


def rows(trace: RoutingTrace, *entries: tuple[int, int, int, Phase]) -> RoutingTrace:
    """The trace with these rows alone: (forward, request, block, phase) for its first rows."""
    forward, request, block, phase = np.array(entries).T
    offset = trace.row_token_offset[: len(entries) + 1]
    kept = {
        name: array[: offset[-1]]
        for name, array in trace.tensors().items()
        if not name.startswith("row_")
    }
    position = np.concatenate([block_id * 3 + np.arange(3) for block_id in block])
    return replace(
        trace,
        row_forward=forward.astype(np.int32),
        row_request=request.astype(np.int32),
        row_block=block.astype(np.int32),
        row_step=np.zeros(len(entries), dtype=np.int32),
        row_phase=phase.astype(np.uint8),
        row_token_offset=offset,
        **{**kept, "token_position": position.astype(np.int32)},
    )


PREFILL, DENOISE, COMMIT = Phase.PREFILL, Phase.DENOISE, Phase.COMMIT


def test_times_per_token_by_hand() -> None:
    plenty = random_trace(21, num_forwards=20, num_requests=2, only_denoise=True)
    trace = rows(
        plenty,
        (0, 0, 0, PREFILL),
        (1, 0, 1, DENOISE),
        (2, 0, 1, DENOISE),
        (3, 0, 1, COMMIT),
        (4, 0, 2, DENOISE),
        (5, 0, 2, COMMIT),
        (6, 1, 0, DENOISE),
        (7, 1, 0, DENOISE),
    )
    report = run(trace, "naive-lru", 6, hardware=STEADY)
    # Request 0: prefill to 1, first token at 2, last at 5, the last commit is not waited for.
    # Request 1: from 6 to 8, no prefill. 3 tokens each.
    assert report.num_tokens == 6
    assert report.tpot_s == pytest.approx(((5 - 1) + (8 - 6)) / 6)
    assert report.ttft_s == pytest.approx(((2 - 0) + (7 - 6)) / 2)
    assert report.forward_s == pytest.approx(1.0)
    assert (report.num_forwards, report.num_denoise_forwards) == (8, 5)


def test_requests_of_a_batch_wait_for_the_whole() -> None:
    plenty = random_trace(22, num_forwards=20, num_requests=2, only_denoise=True)
    trace = rows(
        plenty,
        (0, 0, 0, DENOISE),
        (1, 0, 0, DENOISE),
        (1, 1, 0, PREFILL),
        (2, 0, 0, DENOISE),
        (2, 1, 1, DENOISE),
        (3, 1, 1, DENOISE),
    )
    report = run(trace, "naive-lru", 6, hardware=STEADY)
    # Request 0 from 0 to 3; request 1 from the end of its prefill, 2, to 4.
    assert report.tpot_s == pytest.approx((3 + 2) / 6)
    assert report.ttft_s == pytest.approx((1 + 2) / 2)
    part = run(trace, "naive-lru", 6, hardware=STEADY, warmup_requests=1)
    # Forwards that a request of the warm-up takes part in are not measured; its times are not.
    assert (part.num_forwards, part.num_denoise_forwards) == (1, 1)
    assert part.tpot_s == pytest.approx(2 / 3) and part.ttft_s == pytest.approx(2)


def test_only_rows_that_denoise_need_the_head() -> None:
    plenty = random_trace(23, num_forwards=20, num_requests=1, only_denoise=True)
    trace = rows(
        plenty,
        (0, 0, 0, PREFILL),
        (1, 0, 1, DENOISE),
        (2, 0, 1, COMMIT),
        (2, 0, 2, DENOISE),
        (3, 0, 2, COMMIT),
    )
    # A byte of the head takes a second for each token and none besides.
    hardware = replace(STEADY, device_token_weight_bytes_per_s=1.0)
    trace = replace(trace, expert_bytes=1, extra={"head_bytes": 1000, "dense_bytes_per_layer": 0})
    without = replace(trace, extra={"head_bytes": 0, "dense_bytes_per_layer": 0})
    with_head, bare = (run(each, "lfu", 6, hardware=hardware) for each in (trace, without))
    # Three tokens in both forwards that denoise, the folded commit's three not among them.
    assert with_head.forward_s - bare.forward_s == pytest.approx(3000)
    assert with_head.ttft_s - bare.ttft_s == pytest.approx(3000)


def test_the_oracle_holds_what_most_tokens_want() -> None:
    def see(demand: LayerDemand, plan: LayerPlan) -> None:
        tokens = dict(zip(demand.expert_ids.tolist(), demand.num_tokens.tolist(), strict=True))
        hits = plan.hit_ids.tolist()
        others = set(tokens) - set(hits)
        assert not others or min(tokens[e] for e in hits) >= max(tokens[e] for e in others)

    run(random_trace(24, num_forwards=20, num_experts=8), "oracle", 2, observers=[see])


def test_the_busiest_lane_counts_what_was_demanded() -> None:
    """With a device that takes next to no time, copies of what was wanted are what there is."""
    transfers: dict[int, int] = {}

    def see(demand: LayerDemand, plan: LayerPlan) -> None:
        if demand.context.is_denoise:
            forward_id = demand.context.forward_id
            num = len(plan.load_ids) + len(plan.staged_ids)
            transfers[forward_id] = transfers.get(forward_id, 0) + num

    trace = random_trace(25, num_forwards=60, num_requests=4, num_experts=8, num_layers=4)
    hardware = replace(STEADY, forward_overhead_s=2.5, copy_bytes_per_s=1000.0)
    policy = "naive-lru:prefetch=reuse,least=0"
    report = run(trace, policy, 3, hardware=hardware, observers=[see])
    assert report.wasted_prefetched_bytes > 0 and report.useful_prefetched_bytes > 0
    # One expert takes one second; software takes the device 2.5.
    busiest = [max(2.5, num) for num in transfers.values()]
    assert report.busiest_lane_s == pytest.approx(np.mean(busiest))


def test_spans_of_a_lane_do_not_overlap() -> None:
    trace = random_trace(17, num_forwards=12, num_experts=8, top_k=3)
    report = simulate(
        trace,
        "oled",
        hardware=replace(HARDWARE, layer_overhead_s=1e-4, forward_overhead_s=1e-4),
        experts_per_layer=2,
        has_cpu_experts=True,
        record_forward=8,
    )
    assert report.spans and {span.lane for span in report.spans} <= {"device", "copy", "cpu"}
    for lane in ("device", "copy", "cpu"):
        spans = sorted((s for s in report.spans if s.lane == lane), key=lambda s: s.start_s)
        for before, after in zip(spans, spans[1:], strict=False):
            assert before.end_s <= after.start_s + 1e-12
    plain = simulate(
        trace,
        "oled",
        hardware=replace(HARDWARE, layer_overhead_s=1e-4, forward_overhead_s=1e-4),
        experts_per_layer=2,
        has_cpu_experts=True,
    )
    assert plain.to_dict() == report.to_dict()
