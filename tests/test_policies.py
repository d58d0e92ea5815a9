"""The policies alone: the worked examples of policies.md 9, and what must hold for any input."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from fakes import (
    COSTS,
    LIVE_POLICIES,
    FakeRouter,
    bounded,
    context_of,
    demand_of,
    outcome_of,
    policy_of,
    shape_of,
)
from hypothesis import given
from hypothesis import strategies as st

from oled_moe.cache import ExpertCache
from oled_moe.costs import CostModel
from oled_moe.errors import ConfigError
from oled_moe.policies.allocation import (
    AdaptiveAllocationPolicy,
    _round_to_sum,
    allocate,
    uniform_capacities,
)
from oled_moe.policies.dispatch import LoadReuseDispatchPolicy, MissSet, _MoveSearch
from oled_moe.policies.retention import PriorityRetentionPolicy, gate_mass
from oled_moe.types import IntArray, LayerDemand, MoeShape, Phase

seeds = st.integers(0, 2**32 - 1)


# ---- the contract of every policy ----


@pytest.mark.parametrize("name", LIVE_POLICIES)
@pytest.mark.parametrize("phase", Phase)
def test_scores_are_finite_and_repeat(name: str, phase: Phase) -> None:
    shape = shape_of(2, 12, 3)
    retentions = [policy_of(name, shape).retention for _ in range(2)]
    everyone = np.arange(shape.num_experts)
    router = FakeRouter(shape, seed=3)
    for _ in range(8):
        for demand in router.forward(phases=(phase,)):
            scores = []
            for retention in retentions:
                retention.observe(demand)
                scores.append(retention.keep_scores(everyone, demand))
            assert np.isfinite(scores[0]).all() and scores[0].shape == (shape.num_experts,)
            assert np.array_equal(*scores)
            assert np.array_equal(retentions[0].keep_scores(everyone[::3], demand), scores[0][::3])


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("belady-ish", "naive-lru"),
        ("oled:speed=9", "overlap"),
        ("naive-lru:prefill=tail", "prefetch"),
        ("paged-lru:prefill=tail", "none"),
        ("naive-lru:depth=2", "prefetch=reuse"),
        ("oled+:history=maybe", "true, false"),
        ("oled:overlap=1.5", "overlap"),
        ("oled:overlap=nan", "overlap"),
        ("priority:prefill=head", "tail"),
        ("oled:overlap", "key=value"),
    ],
)
def test_bad_spec_says_what_is_allowed(spec: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        policy_of(spec, shape_of(1, 4, 2))


# ---- priority ----


def test_worked_example_of_priority() -> None:
    shape = shape_of(1, 4, 2)
    demand = demand_of(
        0, context_of(1, [0.8, 0.4]), [[0, 2], [1, 2]], [[0.5, 0.5], [0.3, 0.7]], num_experts=4
    )
    mass = gate_mass(demand, num_experts=4)
    assert mass == pytest.approx([0.333, 0.1, 0.567, 0.0], abs=5e-4)

    cache = ExpertCache(shape, policy_of("priority", shape), num_slots=3, num_staging=1)
    cache.plan(demand_of(0, context_of(0, [1.0]), [[2, 3]], [[0.5, 0.5]], num_experts=4))
    cache.plan(demand)
    assert cache.resident_ids(0).tolist() == [0, 1, 2]


@bounded(50)
@given(seeds)
def test_priorities_sum_to_one_unless_nobody_is_confident(seed: int) -> None:
    shape = shape_of(1, 10, 2)
    (demand,) = FakeRouter(shape, seed).forward(5)
    mass = gate_mass(demand, num_experts=10)
    assert mass.sum() == pytest.approx(1.0 if demand.context.token_confidence.any() else 0.0)
    assert (np.delete(mass, demand.expert_ids) == 0).all()


def test_inactive_experts_rank_below_active_ones_by_recency() -> None:
    shape = shape_of(1, 5, 1)
    retention = PriorityRetentionPolicy(shape)
    for forward_id, expert in enumerate([3, 1, 4, 0]):
        # The last one is wanted with no confidence at all, and still beats all that are not.
        confidence = [float(forward_id < 3)]
        demand = demand_of(
            0, context_of(forward_id, confidence), [[expert]], [[1.0]], num_experts=5
        )
        retention.observe(demand)
    scores = retention.keep_scores(np.arange(5), demand)
    assert np.argsort(-scores).tolist() == [0, 4, 1, 3, 2]


@pytest.mark.parametrize(
    ("prefill", "phases", "expected"),
    [
        ("whole", (Phase.PREFILL,), [1 / 6] * 6),
        # Rows of three tokens, blocks of two: the first token of each row does not count.
        ("tail", (Phase.PREFILL, Phase.PREFILL), [0, 1 / 4, 1 / 4, 0, 1 / 4, 1 / 4]),
        ("tail", (Phase.PREFILL,), [0, 0, 0, 0, 1 / 2, 1 / 2]),
        ("tail", (Phase.PREFILL, Phase.DENOISE), [1 / 6] * 6),
        ("tail", (Phase.COMMIT,), [1 / 6] * 6),
    ],
)
def test_prefill_tail(prefill: str, phases: Sequence[Phase], expected: list[float]) -> None:
    retention = PriorityRetentionPolicy(shape_of(1, 6, 1), prefill=prefill)
    context = context_of(0, [1.0] * 6, phases=phases, block_length=2)
    demand = demand_of(0, context, [[i] for i in range(6)], [[1.0]] * 6, num_experts=6)
    retention.observe(demand)
    assert retention.keep_scores(np.arange(6), demand) == pytest.approx(expected)


# ---- dispatch ----


def misses_of(
    scores: Sequence[float],
    tokens: Sequence[int],
    *,
    hit_scores: Sequence[float] = (),
    capacity: int = 100,
    phase: Phase = Phase.DENOISE,
    order: Sequence[int] | None = None,
) -> MissSet:
    """Misses 0, 1, …, given to the policy in `order`; the hits have the ids above them."""
    num_demanded = len(scores) + len(hit_scores)
    demand = demand_of(
        0,
        context_of(0, [1.0], phases=(phase,)),
        [list(range(num_demanded))],
        [[1.0] * num_demanded],
        num_experts=max(num_demanded, 1),
    )
    ids = np.array(range(len(scores)) if order is None else order, dtype=np.int64)
    return MissSet(
        demand,
        ids,
        np.array(tokens, dtype=np.int64)[ids],
        np.array(scores, dtype=np.float64)[ids],
        np.array(hit_scores, dtype=np.float64),
        capacity,
    )


WORKED_P = (0.25, 0.20, 0.15, 0.10, 0.08, 0.07, 0.06, 0.04, 0.03, 0.02)
WORKED_TOKENS = (3, 2, 3, 2, 1, 3, 3, 2, 2, 1)


@pytest.mark.parametrize("overlap", [None, 0.85, 0.0])
@pytest.mark.parametrize("is_reuse_aware", [True, False])
def test_worked_example_of_dispatch(overlap: float | None, is_reuse_aware: bool) -> None:
    costs = CostModel(transfer_s=1, cpu_base_s=0, cpu_token_s=1, mean_tokens_per_miss=1)
    policy = LoadReuseDispatchPolicy(
        shape_of(1, 10, 10), costs, overlap=overlap, is_reuse_aware=is_reuse_aware
    )
    assert policy.copied_share == 0.5
    to_cpu = policy.split(misses_of(WORKED_P, WORKED_TOKENS))
    copied_p = [p for p, on_cpu in zip(WORKED_P, to_cpu, strict=True) if not on_cpu]
    cpu_latency = sum(n for n, on_cpu in zip(WORKED_TOKENS, to_cpu, strict=True) if on_cpu)
    assert copied_p == [0.25, 0.20, 0.15, 0.10, 0.07, 0.06]
    assert (len(copied_p), cpu_latency) == (6, 6)
    assert sum(copied_p) == pytest.approx(0.83)


def share_of(*, transfer_s: float, token_s: float) -> float:
    costs = CostModel(transfer_s, 0.0, token_s, mean_tokens_per_miss=2.0)
    return LoadReuseDispatchPolicy(shape_of(1, 4, 2), costs).copied_share


def test_base_split() -> None:
    assert share_of(transfer_s=1.0, token_s=0.5) == 0.5
    shares = [share_of(transfer_s=1.0, token_s=10.0**power) for power in range(-6, 7)]
    assert shares == sorted(shares) and shares[0] < 1e-5 and shares[-1] > 1 - 1e-5
    shares = [share_of(transfer_s=10.0**power, token_s=1.0) for power in range(-6, 7)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 1e-5
    # At ρ both lanes take equally long, and the split starts there.
    share = share_of(transfer_s=3.0, token_s=1.0)
    assert share * 3.0 == pytest.approx((1 - share) * 2.0)


@dataclass(frozen=True)
class SearchCase:
    scores: list[float]
    tokens: list[int]
    hit_scores: list[float]
    costs: CostModel
    reuse_weight: float
    capacity: int
    start: int
    bounds: tuple[int, int]

    def run(self, max_moves: int) -> list[bool]:
        search = _MoveSearch(
            costs=self.costs,
            reuse_weight=self.reuse_weight,
            scores=np.array(self.scores),
            tokens=np.array(self.tokens),
            hit_scores=np.array(self.hit_scores),
            capacity=self.capacity,
            bounds=self.bounds,
        )
        copied = set(search.run(self.start, max_moves))
        return [miss in copied for miss in range(len(self.scores))]

    def objective(self, is_copied: Sequence[bool]) -> float:
        """J by its definition. A copy as good as a hit goes before it."""
        ranked = [(-p, 0, p) for p, flag in zip(self.scores, is_copied, strict=True) if flag]
        ranked += [(-p, 1, 0.0) for p in self.hit_scores]
        kept = sum(p for _, _, p in sorted(ranked)[: self.capacity])
        on_cpu_s = sum(
            self.costs.cpu_s(n) for n, flag in zip(self.tokens, is_copied, strict=True) if not flag
        )
        latency_s = max(sum(is_copied) * self.costs.transfer_s, on_cpu_s)
        return latency_s - self.reuse_weight * kept

    def moves(self, is_copied: Sequence[bool]) -> list[list[bool]]:
        """All states within the bounds that are one exchange, addition or removal away."""
        inside = [i for i, flag in enumerate(is_copied) if flag]
        outside = [i for i, flag in enumerate(is_copied) if not flag]
        changes = [(i,) for i in range(len(is_copied))] + list(itertools.product(inside, outside))
        states = [[flag != (i in change) for i, flag in enumerate(is_copied)] for change in changes]
        lowest, highest = self.bounds
        return [state for state in states if lowest <= sum(state) <= highest]


@st.composite
def searches(draw: st.DrawFn) -> SearchCase:
    # Few distinct values, so that ties are common; sixteenths, so that they are exact.
    priorities = st.integers(0, 8).map(lambda n: n / 16)
    scores = sorted(draw(st.lists(priorities, min_size=1, max_size=9)), reverse=True)
    num_misses = len(scores)
    hit_scores = draw(st.lists(priorities, max_size=5))
    start, slack = draw(st.integers(0, num_misses)), draw(st.integers(1, 3))
    return SearchCase(
        scores=scores,
        tokens=draw(st.lists(st.integers(1, 4), min_size=num_misses, max_size=num_misses)),
        hit_scores=hit_scores,
        costs=CostModel(
            transfer_s=draw(st.sampled_from([0.5, 1.0, 3.0])),
            cpu_base_s=draw(st.sampled_from([0.0, 1.0])),
            cpu_token_s=1.0,
            mean_tokens_per_miss=2.0,
        ),
        reuse_weight=draw(st.sampled_from([0.0, 0.5, 4.0, 64.0])),
        capacity=draw(st.integers(0, num_misses + len(hit_scores) + 2)),
        start=start,
        bounds=(max(0, start - slack), min(num_misses, start + slack)),
    )


@bounded(250)
@given(searches())
def test_each_move_is_the_best_there_is(case: SearchCase) -> None:
    states = [case.run(max_moves) for max_moves in range(9)]
    assert states[0] == [i < case.start for i in range(len(case.scores))]
    for before, after in itertools.pairwise(states):
        reachable = case.moves(before)
        best = min(map(case.objective, reachable), default=float("inf"))
        if best < case.objective(before) - 1e-9:
            assert after in reachable
            assert case.objective(after) == pytest.approx(best, abs=1e-9, rel=1e-9)
        else:
            assert after == before


@bounded(150)
@given(seeds, st.integers(1, 12), st.integers(0, 4), st.booleans())
def test_split_keeps_near_the_base_split_whatever_the_order_of_input(
    seed: int, num_misses: int, num_hits: int, is_reuse_aware: bool
) -> None:
    random = np.random.default_rng(seed)
    scores = random.permutation(num_misses + num_hits) / 100
    tokens = random.integers(1, 6, num_misses).tolist()
    capacity = int(random.integers(0, 20))
    chosen = []
    for order in (range(num_misses), random.permutation(num_misses)):
        policy = LoadReuseDispatchPolicy(shape_of(1, 16, 2), COSTS, is_reuse_aware=is_reuse_aware)
        misses = misses_of(
            scores[:num_misses].tolist(),
            tokens,
            hit_scores=scores[num_misses:].tolist(),
            capacity=capacity,
            order=list(order),
        )
        to_cpu = policy.split(misses)
        chosen.append(sorted(misses.expert_ids[~to_cpu].tolist()))
        base = policy.copied_share * num_misses
        slack = max(1, -(-num_misses // 10))
        assert abs(len(chosen[-1]) - base) <= slack + 0.5
    assert chosen[0] == chosen[1]


def test_at_most_the_allowed_moves() -> None:
    # Priorities say copy the first half, tokens say the other: every pair wants to change sides.
    num_misses = 40
    scores = [(num_misses - i) / 1000 for i in range(num_misses)]
    tokens = [1] * (num_misses // 2) + [30] * (num_misses // 2)
    costs = CostModel(transfer_s=1, cpu_base_s=0, cpu_token_s=1, mean_tokens_per_miss=1)
    for max_moves in (0, 3, 8):
        policy = LoadReuseDispatchPolicy(shape_of(1, 40, 2), costs, max_moves=max_moves)
        to_cpu = policy.split(misses_of(scores, tokens))
        start = int(policy.copied_share * num_misses + 0.5)
        num_moved = int((~to_cpu)[start:].sum())
        assert num_moved == max_moves


@pytest.mark.parametrize("is_reuse_aware", [True, False])
def test_prefill_uses_the_cpu_only_where_it_is_faster(is_reuse_aware: bool) -> None:
    costs = CostModel(transfer_s=4.0, cpu_base_s=1.0, cpu_token_s=1.0, mean_tokens_per_miss=2.0)
    policy = LoadReuseDispatchPolicy(shape_of(1, 8, 2), costs, is_reuse_aware=is_reuse_aware)
    share = policy.copied_share
    tokens = [1, 2, 3, 4, 50]
    to_cpu = policy.split(misses_of([0.2] * 5, tokens, phase=Phase.PREFILL))
    assert to_cpu.tolist() == [True, True, False, False, False]
    # A prompt says nothing about what denoising will miss.
    assert policy.copied_share == share


def test_mean_tokens_follow_denoising_only() -> None:
    costs = CostModel(transfer_s=2.0, cpu_base_s=0, cpu_token_s=1, mean_tokens_per_miss=2.0)
    policy = LoadReuseDispatchPolicy(shape_of(1, 4, 2), costs)
    assert policy.copied_share == 0.5
    policy.split(misses_of([0.5, 0.5], [9, 9], phase=Phase.COMMIT))
    assert policy.copied_share == 0.5
    for _ in range(400):
        policy.split(misses_of([0.5, 0.5], [6, 6]))
    assert policy.copied_share == pytest.approx(0.75, abs=1e-3)


# ---- allocation ----

weights = st.one_of(
    st.just(0.0), st.floats(1e-12, 1e-6), st.floats(0.001, 1.0), st.sampled_from([0.25, 0.5])
)


@st.composite
def allocations(draw: st.DrawFn) -> tuple[MoeShape, list[float], IntArray]:
    num_layers, num_experts = draw(st.integers(1, 8)), draw(st.integers(1, 40))
    shape = shape_of(num_layers, num_experts, draw(st.integers(1, min(8, num_experts))))
    layer_weights = draw(st.lists(weights, min_size=num_layers, max_size=num_layers))
    if draw(st.booleans()):
        layer_weights = [0.0] * num_layers
        layer_weights[draw(st.integers(0, num_layers - 1))] = draw(st.floats(0.01, 1.0))
    total = draw(st.integers(0, shape.num_experts_total))
    return shape, layer_weights, uniform_capacities(total, shape)


@bounded(150)
@given(allocations(), st.integers(1, 8))
def test_capacities_keep_their_sum_and_bounds(
    case: tuple[MoeShape, list[float], IntArray], num_updates: int
) -> None:
    shape, layer_weights, capacities = case
    total = int(capacities.sum())
    floor = min(shape.top_k, total // shape.num_layers)
    for _ in range(num_updates):
        after = allocate(np.array(layer_weights), capacities, shape)
        assert after.sum() == total and after.dtype == np.int64
        assert (after >= floor).all() and (after <= shape.num_experts).all()
        assert (np.abs(after - capacities) <= np.maximum(1, capacities // 4)).all()
        capacities = after


@bounded(40)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=8), st.integers(20, 40))
def test_capacities_become_proportional_to_the_weights(
    layer_weights: list[int], mean_capacity: int
) -> None:
    """Where no bound interferes: within one slot of the exact share, after enough updates."""
    shape = shape_of(len(layer_weights), 10_000, 1)
    capacities = uniform_capacities(mean_capacity * shape.num_layers, shape)
    share = np.array(layer_weights) / sum(layer_weights) * capacities.sum()
    for _ in range(25):
        capacities = allocate(np.array(layer_weights, dtype=float), capacities, shape)
    assert (np.abs(capacities - share) < 1 + 1e-6).all()


@pytest.mark.parametrize(
    ("share", "highest", "expected"),
    [
        ([2.2, 2.7, 4.6, 0.5], [9, 9, 9, 9], [2, 3, 5, 0]),
        # Ties go to the lower layer.
        ([2.5, 2.5, 4.5, 0.5], [9, 9, 9, 9], [3, 3, 4, 0]),
        # Who is full hands on.
        ([2.2, 2.7, 4.6, 0.5], [9, 2, 4, 9], [3, 2, 4, 1]),
    ],
)
def test_largest_remainder(share: list[float], highest: list[int], expected: list[int]) -> None:
    lowest = np.zeros(4, dtype=np.int64)
    assert _round_to_sum(np.array(share), lowest, np.array(highest), 10).tolist() == expected


def run_constant(
    num_active: Sequence[int], mean_capacity: int, num_forwards: int
) -> list[IntArray]:
    """Capacities after each forward, where each layer wants the same experts for ever."""
    shape = shape_of(len(num_active), 64, 4)
    cache = ExpertCache(
        shape,
        policy_of("priority+adapt", shape),
        num_slots=mean_capacity * shape.num_layers,
        num_staging=2,
    )
    history = []
    for forward_id in range(num_forwards):
        context = context_of(forward_id, [1.0] * max(num_active))
        for layer, count in enumerate(num_active):
            ids = [[i % count] for i in range(max(num_active))]
            gates = [[1.0]] * len(ids)
            cache.plan(demand_of(layer, context, ids, gates, num_experts=64))
        cache.end_forward(outcome_of(context))
        history.append(cache.capacities.copy())
    return history


@pytest.mark.parametrize("mean_capacity", [5, pytest.param(10, marks=pytest.mark.full), 20, 30, 50])
def test_constant_activation_settles(mean_capacity: int) -> None:
    history = run_constant([6, 14, 25, 40, 9, 17], mean_capacity, 200)
    changes = np.abs(np.diff(history[49:], axis=0))
    num_updates = len(changes) // 5
    # Here or there rounding moves a slot; on average no layer changes by one per update.
    assert changes.max() <= 1
    assert changes.sum(axis=0).max() < num_updates


def test_allocation_waits_for_its_period_and_for_statistics() -> None:
    shape = shape_of(2, 8, 1)
    policy = AdaptiveAllocationPolicy(shape, period=5)
    capacities = np.array([4, 4])
    answers = []
    for _ in range(5):
        policy.observe(0, activation_ratio=1.0, utilization=1.0)
        policy.observe(1, activation_ratio=0.1, utilization=1.0)
        answers.append(policy.end_forward(capacities))
    assert answers[:4] == [None] * 4
    assert answers[4] is not None and answers[4].tolist() == [5, 3]
    # Nothing seen yet of any layer: all weights are equal.
    unseen = AdaptiveAllocationPolicy(shape, period=1).end_forward(capacities)
    assert unseen is not None and unseen.tolist() == [4, 4]


def test_only_denoising_counts_for_capacities() -> None:
    shape = shape_of(2, 8, 1)
    cache = ExpertCache(shape, policy_of("priority+adapt", shape), num_slots=8, num_staging=1)
    for forward_id in range(20):
        phase = (Phase.PREFILL, Phase.COMMIT)[forward_id % 2]
        context = context_of(forward_id, [1.0] * 8, phases=(phase,))
        demands: list[LayerDemand] = [
            demand_of(0, context, [[i] for i in range(8)], [[1.0]] * 8, num_experts=8),
            demand_of(1, context, [[0]] * 8, [[1.0]] * 8, num_experts=8),
        ]
        for demand in demands:
            cache.plan(demand)
        cache.end_forward(outcome_of(demands[0].context))
    assert cache.capacities.tolist() == [4, 4]
