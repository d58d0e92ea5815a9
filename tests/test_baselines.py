"""The published systems we compare with: the rules of policies.md 6, worked by hand."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import COSTS, FakeRouter, bounded, demand_of, outcome_of, policy_of, shape_of
from hypothesis import given
from hypothesis import strategies as st
from products import product

from oled_moe.cache import ExpertCache
from oled_moe.costs import CostModel
from oled_moe.errors import ConfigError
from oled_moe.policies.dispatch import MissSet
from oled_moe.policies.fiddler import CostDispatchPolicy
from oled_moe.policies.finemoe import ExpertMapPolicy, ExpertMapStore
from oled_moe.policies.moe_infinity import ActivationMatrixPolicy, EamCollection
from oled_moe.policies.placement import PopularPlacementPolicy, most_used, tokens_per_expert
from oled_moe.types import (
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    LayerDemand,
    LayerPlan,
    MoeShape,
    Phase,
)

VARIANTS = (
    "moe-infinity",
    "moe-infinity:scope=global",
    "moe-infinity:mode=release",
    "moe-infinity:trace_capacity=2,budget=3",
    "finemoe",
    "finemoe:maps=topk",
    "finemoe:lookup=token,store=7,budget=5",
    "finemoe:maps=topk,lookup=token",
    "finemoe:quirk=true,distance=1",
    "ktransformers",
    "ktransformers:placement=frequency",
    "ktransformers:placement=frequency,scope=global",
    "ktransformers:placement=dynamic,prefill_threshold=4",
    "fiddler",
    "fiddler:rule=max",
    "tide",
    "tide:interval=1,overlap=true",
    "paged-lru",
    "n-cpu-moe",
    "n-cpu-moe:min_batch=5",
)

seeds = st.integers(0, 2**32 - 1)


def row_of(
    num_tokens: int,
    *,
    request: int = 0,
    block: int = 0,
    step: int = 0,
    phase: Phase = Phase.DENOISE,
) -> ForwardRow:
    return ForwardRow(request, block, step, phase, num_tokens)


def context_of_rows(forward_id: int, *rows: ForwardRow) -> ForwardContext:
    size = sum(row.num_tokens for row in rows)
    return ForwardContext(
        forward_id,
        4,
        rows,
        np.ones(size, dtype=np.float32),
        np.full(size, 2, dtype=np.uint8),
        input_embedding=np.ones((size, 3), dtype=np.float32),
    )


def demand_of_ids(
    layer: int, context: ForwardContext, ids: Sequence[Sequence[int]], num_experts: int
) -> LayerDemand:
    """Every token weighs its experts alike."""
    weights = [[1 / len(row)] * len(row) for row in ids]
    return demand_of(layer, context, ids, weights, num_experts=num_experts)


def cache_of(spec: str, shape: MoeShape, num_slots: int, *, has_cpu: bool = True) -> ExpertCache:
    cache = ExpertCache(
        shape, policy_of(spec, shape), num_slots=num_slots, num_staging=4, has_cpu_experts=has_cpu
    )
    cache.place()
    return cache


def run(
    cache: ExpertCache, context: ForwardContext, ids_of_layers: Sequence[Sequence[Sequence[int]]]
) -> list[LayerPlan]:
    """One whole forward; the routing of every layer, [L][T][K]."""
    cache.start_forward(context)
    plans = []
    for layer, ids in enumerate(ids_of_layers):
        plans.append(cache.plan(demand_of_ids(layer, context, ids, cache.shape.num_experts)))
        cache.check()
    cache.end_forward(ForwardOutcome.without_logits(context))
    return plans


def residents(cache: ExpertCache, layer: int = 0) -> list[int]:
    ids: list[int] = cache.resident_ids(layer).tolist()
    return ids


# ---- all of them ----


@pytest.mark.parametrize(
    "spec, has_cpu, capacity", product(VARIANTS, (True, False), (0, 1, 2, 5, 8))
)
def test_whole_forwards_with_any_capacity(spec: str, has_cpu: bool, capacity: int) -> None:
    """Batches, prefills, folded commits, requests that come and go; and twice the same."""
    shape = shape_of(5, 8, 2)
    phase_lists = [
        (Phase.PREFILL,),
        (Phase.DENOISE,),
        (Phase.DENOISE, Phase.DENOISE),
        (Phase.COMMIT, Phase.DENOISE),
        (Phase.PREFILL, Phase.DENOISE),
        (Phase.COMMIT,),
    ]
    seen = []
    for _ in range(2):
        cache = cache_of(spec, shape, 5 * capacity, has_cpu=has_cpu)
        router = FakeRouter(shape, seed=7)
        seen.append([])
        for index in range(24):
            context = router.context(6, phase_lists[index % len(phase_lists)])
            rows = tuple(
                replace(row, request_id=row.request_id + index // 12, block_id=index // 6)
                for row in context.rows
            )
            context = replace(context, rows=rows)
            cache.start_forward(context)
            for layer in range(5):
                demand = router.demand(layer, context, num_wanted=6)
                plan = cache.plan(demand)
                assert plan.num_demanded == len(demand.expert_ids)
                if not has_cpu:
                    assert not len(plan.cpu_ids)
                seen[-1].append((plan.load_ids.tolist(), plan.prefetch.expert_ids.tolist()))
                cache.check()
            cache.end_forward(outcome_of(context))
            if index % 12 == 11:
                for request_id in range(3):
                    cache.end_request(request_id)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("spec", VARIANTS)
def test_all_experts_resident_leave_nothing_to_load(spec: str) -> None:
    shape = shape_of(3, 6, 2)
    cache = cache_of(spec, shape, 18)
    router = FakeRouter(shape, seed=1)
    everyone = [[[i, (i + 1) % 6] for i in range(6)]] * 3
    for index in range(2):
        # Not a prefill: some hold what they have from the start and send misses to the CPU.
        run(cache, context_of_rows(index, row_of(6, block=index)), everyone)
    for _ in range(4):
        context = router.context(4, (Phase.DENOISE,))
        cache.start_forward(context)
        for layer in range(3):
            plan = cache.plan(router.demand(layer, context))
            assert not len(plan.load_ids) and not len(plan.cpu_ids)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("moe-infinity:mode=fast", "paper, release"),
        ("moe-infinity:mode=release,scope=layer", "global"),
        ("moe-infinity:trace_capacity=0", "1 to"),
        ("finemoe:maps=half", "full, topk"),
        ("finemoe:lookup=row", "block, token"),
        ("finemoe:distance=5", "1 to 4"),
        ("finemoe:store=x", "whole number"),
        ("ktransformers:placement=random", "uniform, frequency, dynamic"),
        ("ktransformers:warmup=0", "1 to"),
        ("fiddler:rule=min", "sum, max"),
        ("tide:interval=0", "1 to 1024"),
        ("tide:overlap=yes", "true, false"),
        ("paged-lru:n=1", "none"),
        ("n-cpu-moe:n=5", "0 to 4"),
    ],
)
def test_bad_parameters_say_what_is_allowed(spec: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        policy_of(spec, shape_of(4, 8, 2))


@bounded(50)
@given(counts=st.lists(st.integers(0, 4), max_size=9), num_chosen=st.integers(0, 10))
def test_most_used_breaks_ties_by_index(counts: list[int], num_chosen: int) -> None:
    is_chosen = most_used(np.array(counts, dtype=np.int64), num_chosen)
    expected = sorted(range(len(counts)), key=lambda index: (-counts[index], index))[:num_chosen]
    assert is_chosen.nonzero()[0].tolist() == sorted(expected)


def test_only_some_rows_count() -> None:
    context = context_of_rows(
        0, row_of(2, phase=Phase.PREFILL), row_of(1), row_of(1, phase=Phase.COMMIT)
    )
    demand = demand_of_ids(0, context, [[0, 1], [0, 2], [0, 3], [0, 1]], 5)
    assert tokens_per_expert(demand, 5).tolist() == [2, 1, 0, 1, 0]
    assert tokens_per_expert(demand, 5, (Phase.PREFILL,)).tolist() == [2, 1, 1, 0, 0]
    assert tokens_per_expert(demand, 5, tuple(Phase)).tolist() == [4, 2, 1, 1, 0]


# ---- TIDE ----


@bounded(30)
@given(seed=seeds, capacity=st.integers(1, 8))
def test_tide_with_interval_1_holds_the_busiest_of_each_step(seed: int, capacity: int) -> None:
    shape = shape_of(2, 8, 2)
    cache = cache_of("tide:interval=1", shape, 2 * capacity)
    router = FakeRouter(shape, seed)
    for step in range(10):
        context = replace(router.context(5, (Phase.DENOISE,)), rows=(row_of(5, step=step),))
        cache.start_forward(context)
        for layer in range(2):
            demand = router.demand(layer, context)
            before = residents(cache, layer)
            plan = cache.plan(demand)
            counts = tokens_per_expert(demand, 8)
            target = np.argsort(-counts, kind="stable")[:capacity]
            target = target[counts[target] > 0]
            after = residents(cache, layer)
            assert set(target) <= set(after) and len(after) == capacity
            # A paired exchange: as many leave as came.
            assert len(set(before) - set(after)) == len(set(target) - set(before))
            assert set(plan.load_ids) == set(target) - set(before)
            assert set(plan.cpu_ids) == set(demand.expert_ids) - set(target) - set(before)


def test_tide_between_refreshes_is_static() -> None:
    shape = shape_of(1, 6, 2)
    cache = cache_of("tide:interval=100", shape, 2)
    assert residents(cache) == [0, 1]
    # The first block of a request is refreshed in each step.
    run(cache, context_of_rows(0, row_of(2, step=0)), [[[2, 3], [2, 3]]])
    assert residents(cache) == [2, 3]
    run(cache, context_of_rows(1, row_of(2, step=1)), [[[4, 5], [4, 5]]])
    assert residents(cache) == [4, 5]
    # Commits and prefills leave it alone; what the commit misses runs on the CPU.
    (plan,) = run(cache, context_of_rows(2, row_of(2, phase=Phase.COMMIT)), [[[0, 1]] * 2])
    assert plan.cpu_ids.tolist() == [0, 1]
    (plan,) = run(cache, context_of_rows(3, row_of(2, phase=Phase.PREFILL)), [[[0, 1]] * 2])
    assert plan.load_ids.tolist() == [0, 1] and residents(cache) == [4, 5]
    # Later blocks only in step 0: with τ above their steps, a static placement per block.
    for step in range(5):
        ids = [[step, (step + 1) % 6]] * 2
        (plan,) = run(cache, context_of_rows(4 + step, row_of(2, block=1, step=step)), [ids])
        assert residents(cache) == [0, 1]
        assert (len(plan.load_ids) > 0) == (step == 0)
    # A new request has a first block of its own.
    cache.end_request(0)
    run(cache, context_of_rows(9, row_of(2, block=1, step=3)), [[[4, 5]] * 2])
    assert residents(cache) == [4, 5]


def test_tide_demotes_only_as_many_as_it_promotes() -> None:
    cache = cache_of("tide", shape_of(1, 6, 2), 3)
    # 3 comes in for one that is no target; nobody comes in unused.
    run(cache, context_of_rows(0, row_of(2)), [[[3, 1], [3, 1]]])
    assert residents(cache) == [0, 1, 3]
    run(cache, context_of_rows(1, row_of(2, step=1)), [[[3, 5], [4, 5]]])
    run(cache, context_of_rows(2, row_of(2, step=2)), [[[3, 4], [3, 4]]])
    assert residents(cache) == [3, 4, 5]
    # Between refreshes what is not there runs on the CPU, whatever its id.
    (plan,) = run(cache, context_of_rows(3, row_of(2, block=1, step=1)), [[[0, 1], [2, 3]]])
    assert plan.cpu_ids.tolist() == [0, 1, 2]


# ---- Fiddler ----


def misses_of(tokens: Sequence[int]) -> MissSet:
    ids = [[expert] for expert, count in enumerate(tokens) for _ in range(count)]
    demand = demand_of_ids(0, context_of_rows(0, row_of(len(ids))), ids, len(tokens))
    return MissSet(
        demand, demand.expert_ids, demand.num_tokens, np.zeros(len(tokens)), np.empty(0), 0
    )


def test_fiddler_copies_exactly_what_the_cpu_is_slower_at() -> None:
    # The original's constants: 7 a token on the CPU, 70 a copy.
    costs = CostModel(transfer_s=70, cpu_base_s=0, cpu_token_s=7, mean_tokens_per_miss=2)
    to_cpu = CostDispatchPolicy(costs).split(misses_of([1, 9, 10, 11, 40]))
    assert to_cpu.tolist() == [True, True, True, False, False]


@bounded(60)
@given(tokens=st.lists(st.integers(1, 6), min_size=1, max_size=8), is_balanced=st.booleans())
def test_fiddler_is_as_good_as_trying_all_subsets(tokens: list[int], is_balanced: bool) -> None:
    to_cpu = CostDispatchPolicy(COSTS, is_balanced=is_balanced).split(misses_of(tokens))

    def cost(is_on_cpu: Sequence[bool]) -> float:
        sides = (
            sum(COSTS.cpu_s(n) for n, flag in zip(tokens, is_on_cpu, strict=True) if flag),
            COSTS.transfer_s * (len(tokens) - sum(is_on_cpu)),
        )
        return max(sides) if is_balanced else sum(sides)

    subsets = itertools.product((True, False), repeat=len(tokens))
    assert cost(to_cpu.tolist()) == pytest.approx(min(map(cost, subsets)))


def test_fiddler_places_by_popularity_after_warm_up() -> None:
    shape = shape_of(2, 6, 1)
    cache = cache_of("fiddler:warmup=2", shape, 4)
    # A prompt does not make popular.
    prompt = context_of_rows(0, row_of(8, phase=Phase.PREFILL))
    run(cache, prompt, [[[0]] * 8, [[0]] * 8])
    for request in range(2):
        context = context_of_rows(1 + request, row_of(4, request=request))
        run(cache, context, [[[5], [5], [3], [3]], [[2], [2], [4], [1]]])
        assert residents(cache) == [0, 1]
        cache.end_request(request)
    cache.start_forward(context_of_rows(3, row_of(4, request=2)))
    # Ties to the lower id.
    assert residents(cache, 0) == [3, 5] and residents(cache, 1) == [1, 2]
    # Copied for a demand, and not kept.
    context = context_of_rows(4, row_of(8, request=2))
    plans = run(cache, context, [[[1]] * 8, [[1]] * 8])
    assert plans[0].load_ids.tolist() == [1] and residents(cache, 0) == [3, 5]


# ---- KTransformers ----


def test_ktransformers_never_copies_while_it_decodes() -> None:
    shape = shape_of(1, 6, 2)
    cache = cache_of("ktransformers:prefill_threshold=4", shape, 3)
    (plan,) = run(cache, context_of_rows(0, row_of(4)), [[[0, 3], [4, 5], [1, 3], [4, 5]]])
    assert plan.hit_ids.tolist() == [0, 1] and plan.cpu_ids.tolist() == [3, 4, 5]
    # Short prompts are computed likewise; long ones bring everything and leave nothing.
    (plan,) = run(cache, context_of_rows(1, row_of(3, phase=Phase.PREFILL)), [[[3, 4]] * 3])
    assert plan.cpu_ids.tolist() == [3, 4]
    (plan,) = run(cache, context_of_rows(2, row_of(4, phase=Phase.PREFILL)), [[[3, 4]] * 4])
    assert sorted(plan.load_ids.tolist()) == [3, 4] and not len(plan.cpu_ids)
    assert residents(cache) == [0, 1, 2]


def test_ktransformers_global_frequency_sizes_layers_by_use() -> None:
    shape = shape_of(3, 4, 1)
    cache = cache_of("ktransformers:placement=frequency,scope=global", shape, 6)
    assert cache.capacities.tolist() == [2, 2, 2]
    run(
        cache,
        context_of_rows(0, row_of(8)),
        [
            [[0], [0], [1], [1], [2], [2], [3], [3]],
            [[3]] * 8,
            [[1], [1], [1], [1], [1], [1], [1], [2]],
        ],
    )
    cache.end_request(0)
    cache.start_forward(context_of_rows(1, row_of(8, request=1)))
    assert cache.capacities.tolist() == [4, 1, 1]
    assert [residents(cache, layer) for layer in range(3)] == [[0, 1, 2, 3], [3], [1]]
    cache.check()


def test_ktransformers_dynamic_keeps_the_busiest_of_a_long_prefill() -> None:
    shape = shape_of(1, 6, 1)
    cache = cache_of("ktransformers:placement=dynamic,prefill_threshold=5", shape, 3)
    long = context_of_rows(0, row_of(6, phase=Phase.PREFILL))
    run(cache, long, [[[3], [3], [4], [5], [5], [1]]])
    # 3 and 5 with two tokens each, then 1 before 4.
    assert residents(cache) == [1, 3, 5]
    # Only one is used: residents fill the other places.
    long = context_of_rows(1, row_of(6, phase=Phase.PREFILL))
    run(cache, long, [[[4]] * 6])
    assert residents(cache) == [1, 3, 4]
    short = context_of_rows(2, row_of(4, phase=Phase.PREFILL))
    (plan,) = run(cache, short, [[[0], [0], [2], [2]]])
    assert plan.cpu_ids.tolist() == [0, 2] and residents(cache) == [1, 3, 4]


@pytest.mark.parametrize("spec", ["ktransformers:placement=dynamic,prefill_threshold=5", "tide"])
def test_sets_stay_what_they_are_without_cpu_experts(spec: str) -> None:
    cache = cache_of(spec, shape_of(1, 6, 1), 3, has_cpu=False)
    if spec == "tide":
        # Past the first block, where it refreshes in each step.
        run(cache, context_of_rows(0, row_of(2)), [[[0], [1]]])
    for step in (1, 3):
        (plan,) = run(cache, context_of_rows(step, row_of(2, block=1, step=step)), [[[4], [5]]])
        assert sorted(plan.load_ids.tolist()) == [4, 5]
        assert residents(cache) == [0, 1, 2]


# ---- llama.cpp ----


@pytest.mark.parametrize(
    ("spec", "num_slots", "on_device"),
    [
        ("n-cpu-moe", 8, [2, 3]),
        ("n-cpu-moe", 11, [2, 3]),
        ("n-cpu-moe", 3, []),
        ("n-cpu-moe", 16, [0, 1, 2, 3]),
        ("n-cpu-moe:n=3", 11, [3]),
        ("n-cpu-moe:n=4", 11, []),
    ],
)
def test_n_cpu_moe_holds_whole_layers(spec: str, num_slots: int, on_device: list[int]) -> None:
    cache = cache_of(spec, shape_of(4, 4, 1), num_slots)
    held = [layer for layer in range(4) if residents(cache, layer)]
    assert held == on_device
    assert all(len(residents(cache, layer)) == 4 for layer in held)


def test_n_cpu_moe_refuses_layers_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="n=2 to 4"):
        cache_of("n-cpu-moe:n=1", shape_of(4, 4, 1), 11)


def test_n_cpu_moe_copies_for_large_batches_only() -> None:
    cache = cache_of("n-cpu-moe", shape_of(2, 4, 1), 4)
    ids = [[i % 4] for i in range(32)]
    small, large = context_of_rows(0, row_of(31)), context_of_rows(1, row_of(32))
    plans = run(cache, small, [ids[:31]] * 2)
    assert plans[0].cpu_ids.tolist() == [0, 1, 2, 3] and plans[1].num_demanded == 4
    plans = run(cache, large, [ids] * 2)
    assert sorted(plans[0].load_ids.tolist()) == [0, 1, 2, 3] and residents(cache, 0) == []
    assert plans[1].hit_ids.tolist() == [0, 1, 2, 3]


# ---- paged LRU ----


def test_paged_lru_orders_by_first_appearance() -> None:
    cache = cache_of("paged-lru", shape_of(1, 8, 2), 3, has_cpu=False)
    # First appearances 4, 1, 0, 6: the last three stay.
    (plan,) = run(cache, context_of_rows(0, row_of(3)), [[[4, 1], [0, 4], [6, 1]]])
    assert residents(cache) == [0, 1, 6]
    assert sum(plan.wave_sizes) == len(plan.load_ids) == 4
    # 1 was the oldest of those that stayed, though it also appeared last.
    run(cache, context_of_rows(1, row_of(1)), [[[5, 5]]])
    assert residents(cache) == [0, 5, 6]


# ---- MoE-Infinity ----


def test_nearest_matrix_is_by_mean_cosine_of_the_layers_seen() -> None:
    collection = EamCollection(shape_of(2, 3, 1), 2)
    assert collection.nearest(np.ones((2, 3))) is None
    first, second = np.array([[9.0, 0, 0], [1, 0, 0]]), np.array([[0, 2.0, 0], [0, 3, 3]])
    collection.add(first)
    collection.add(second)
    found = collection.nearest(np.array([[1.0, 3, 0], [0, 1, 1]]))
    assert found == pytest.approx(second)
    # The second layer was not seen: only the first one speaks, its size does not matter.
    found = collection.nearest(np.array([[1.0, 0.9, 0], [0, 0, 0]]))
    assert found == pytest.approx(first)
    assert collection.nearest(np.zeros((2, 3))) is None
    # Used once each; then the second again. The first, least used, makes room.
    collection.nearest(second)
    collection.add(np.array([[0, 0, 5.0], [0, 0, 5]]))
    assert len(collection) == 2
    assert collection.nearest(first) != pytest.approx(first)
    assert collection.nearest(second) == pytest.approx(second)
    third = collection.nearest(np.array([[0, 0, 1.0], [0, 0, 0]]))
    for _ in range(9):
        collection.nearest(np.array([[0, 0, 1.0], [0, 0, 0]]))
    # Now the second is the one used least.
    collection.add(first)
    assert collection.nearest(first) == pytest.approx(first)
    assert collection.nearest(np.array([[0, 0.1, 1.0], [0, 0, 0]])) == pytest.approx(third)


def moe_infinity_after_one_request(**options: int | bool) -> ActivationMatrixPolicy:
    """A policy of two layers that has seen request 0 use experts 4 and 5 of layer 0, 6 of 1."""
    policy = ActivationMatrixPolicy(
        shape_of(2, 8, 1),
        trace_capacity=9,
        budget=9,
        **options,
    )
    policy.target(np.array([2, 2]))
    context = context_of_rows(0, row_of(3))
    policy.start_forward(context)
    for layer, ids in enumerate([[[4], [4], [5]], [[6], [6], [6]]]):
        policy.observe(demand_of_ids(layer, context, ids, 8))
    policy.end_request(0)
    return policy


def test_moe_infinity_fetches_the_working_set_after_the_prefill() -> None:
    policy = moe_infinity_after_one_request()
    prompt = context_of_rows(1, row_of(2, request=1, phase=Phase.PREFILL))
    policy.start_forward(prompt)
    assert not len(policy.predict(prompt, None))
    for layer in range(2):
        policy.observe(demand_of_ids(layer, prompt, [[4], [1]], 8))
    context = context_of_rows(2, row_of(2, request=1, block=3))
    policy.start_forward(context)
    # Counts 2 and 1 in layer 0; 3 · (1 − 1/3) = 2 in layer 1: ties go to the lower layer.
    assert policy.predict(context, None).tolist() == [4, 8 + 6, 5]
    # They are on their way now.
    demand = demand_of_ids(0, context, [[1], [2]], 8)
    policy.observe(demand)
    assert not len(policy.predict(context, demand))
    assert policy.victim_scores()[1, 6] == np.inf


def test_moe_infinity_matches_anew_at_each_block_end() -> None:
    shape = shape_of(1, 8, 1)
    cache = cache_of("moe-infinity:budget=8", shape, 2, has_cpu=False)
    for request, expert in enumerate([3, 6]):
        context = context_of_rows(request, row_of(2, request=request))
        run(cache, context, [[[expert], [expert]]])
        cache.end_request(request)
    # The prompt is like the first request, the first block like the second.
    run(cache, context_of_rows(2, row_of(2, request=2, phase=Phase.PREFILL)), [[[3], [0]]])
    run(cache, context_of_rows(3, row_of(2, request=2, phase=Phase.PREFILL)), [[[1], [0]]])
    assert residents(cache) == [0, 1]
    context = context_of_rows(4, row_of(2, request=2, block=1))
    copies = cache.start_forward(context)
    assert copies.expert_ids.tolist() == [3]
    cache.plan(demand_of_ids(0, context, [[6], [0]], 8))
    cache.end_forward(ForwardOutcome.without_logits(context))
    run(cache, context_of_rows(5, row_of(2, request=2, block=1, step=1)), [[[0], [1]]])
    assert 6 not in residents(cache)
    context = context_of_rows(6, row_of(2, request=2, block=2))
    assert cache.start_forward(context).expert_ids.tolist() == [6]
    cache.check()


def test_moe_infinity_keeps_the_needed_then_the_listed_then_the_visited() -> None:
    policy = moe_infinity_after_one_request()
    prompt = context_of_rows(1, row_of(1, request=1, phase=Phase.PREFILL))
    policy.start_forward(prompt)
    policy.observe(demand_of_ids(0, prompt, [[4]], 8))
    for step, ids in enumerate([[7, 7], [7, 7], [7, 1], [1, 2]]):
        context = context_of_rows(2 + step, row_of(2, request=1, block=1, step=step))
        policy.start_forward(context)
        demand = demand_of_ids(0, context, [[expert] for expert in ids], 8)
        policy.observe(demand)
    scores = policy.keep_scores(np.arange(8), demand)
    # Needed: 1, with more tokens and visits, and 2. Listed: 4, 5. Then the one visited most.
    assert np.argsort(-scores, kind="stable").tolist() == [1, 2, 4, 5, 7, 0, 3, 6]


def test_moe_infinity_weighs_visits_and_the_running_request() -> None:
    policy = ActivationMatrixPolicy(shape_of(1, 8, 1), trace_capacity=9, budget=9)
    policy.target(np.array([4]))
    for forward_id, expert in enumerate([6, 7, 7, 4, 0]):
        # Experts 6 and 7 are what an earlier request has left.
        context = context_of_rows(forward_id, row_of(1, request=int(forward_id > 2)))
        policy.start_forward(context)
        demand = demand_of_ids(0, context, [[expert]], 8)
        policy.observe(demand)
        if forward_id == 2:
            policy.end_request(0)
    scores = policy.keep_scores(np.arange(8), demand)
    assert np.argsort(-scores, kind="stable")[:4].tolist() == [0, 4, 7, 6]


def test_visits_end_when_an_expert_leaves() -> None:
    shape = shape_of(1, 6, 1)
    cache = cache_of("moe-infinity", shape, 2, has_cpu=False)
    # 0 is visited three times, then pushed out by a demand of two others.
    for forward_id, ids in enumerate([[0, 1], [0, 1], [0, 1], [2, 3]]):
        context = context_of_rows(forward_id, row_of(2))
        run(cache, context, [[[expert] for expert in ids]])
    assert residents(cache) == [2, 3]
    run(cache, context_of_rows(4, row_of(1)), [[[0]]])
    view = cache.policy.retention._residents
    assert view.visits[0].tolist()[0] == 1.0
    assert view.is_resident[0].nonzero()[0].tolist() == residents(cache)


@bounded(20)
@given(seed=seeds, num_slots=st.integers(0, 24))
def test_moe_infinity_as_released_is_a_global_lfu(seed: int, num_slots: int) -> None:
    shape = shape_of(3, 8, 2)
    cache = cache_of("moe-infinity:mode=release", shape, num_slots, has_cpu=False)
    router = FakeRouter(shape, seed)
    held: set[tuple[int, int]] = set()
    visits: dict[tuple[int, int], int] = {}
    for _ in range(12):
        context = router.context(4, (Phase.DENOISE,))
        cache.start_forward(context)
        for layer in range(3):
            demand = router.demand(layer, context, num_wanted=5)
            plan = cache.plan(demand)
            needed = {(layer, expert) for expert in demand.expert_ids.tolist()}
            assert {(layer, expert) for expert in plan.hit_ids.tolist()} == needed & held
            for place in needed:
                visits[place] = visits.get(place, 0) + 1
            if not needed <= held:
                ranked = sorted(
                    held | needed, key=lambda place: (place not in needed, -visits[place], place)
                )
                held = set(ranked[:num_slots])
            assert held == {(j, e) for j in range(3) for e in residents(cache, j)}
    assert not len(plan.prefetch)


# ---- FineMoE ----


def test_finemoe_selects_within_the_running_sum_and_at_least_top_k() -> None:
    shape = shape_of(3, 6, 1)
    policy = policy_of("finemoe:distance=1,budget=99,lookup=token", shape)
    maps = policy.retention
    assert isinstance(maps, ExpertMapPolicy)
    stored = np.zeros((3, 1, 6), dtype=np.float32)
    stored[:, 0] = [0.05, 0.4, 0.0, 0.3, 0.15, 0.1]
    maps.store.add(stored, np.array([[1, 0, 0]], dtype=np.float32), np.zeros((1, 0), np.float32))

    def guesses(cosine: float) -> list[int]:
        fresh = policy_of("finemoe:distance=1,budget=99,lookup=token", shape).retention
        assert isinstance(fresh, ExpertMapPolicy)
        fresh.store = maps.store
        embedding = np.array([[cosine, np.sqrt(1 - cosine**2), 0]], dtype=np.float32)
        context = replace(context_of_rows(0, row_of(1)), input_embedding=embedding)
        fresh.start_forward(context)
        found: list[int] = fresh.predict(context, None).tolist()
        assert list(fresh.start_scores) == pytest.approx([cosine])
        return found

    # 1 − s = 0.1 admits none by its sum: at least top_k.
    assert guesses(0.9) == [1]
    # Running sums 0.4, 0.7, 0.85, 0.95, 1.0, in order of probability; only layer 0 … d − 1.
    assert guesses(0.28) == [1, 3]
    assert guesses(0.1) == [1, 3, 4]
    # Who has no chance at all is never named.
    assert guesses(-0.01) == [1, 3, 4, 5, 0]


def finemoe_seen(spec: str, layers: int = 4) -> ExpertMapPolicy:
    """A policy that has lived through one forward: layer j wants experts j and j + 1 of 8."""
    policy = policy_of(spec, shape_of(layers, 8, 2)).retention
    assert isinstance(policy, ExpertMapPolicy)
    policy.target(np.full(layers, 3))
    one_forward(policy, 0)
    return policy


def one_forward(policy: ExpertMapPolicy, forward_id: int) -> list[list[int]]:
    """What is guessed at the start and after each layer."""
    num_layers = len(policy.victim_scores())
    context = context_of_rows(forward_id, row_of(2, step=forward_id))
    policy.start_forward(context)
    guesses = [policy.predict(context, None).tolist()]
    for layer in range(num_layers):
        # The last layer is the surest; nearer ones are still more urgent.
        gates = [0.6, 0.4] if layer == num_layers - 1 else [0.5, 0.5]
        ids = [[layer, layer + 1]] * 2
        demand = demand_of(layer, context, ids, [gates] * 2, num_experts=8)
        policy.observe(demand)
        guesses.append(policy.predict(context, demand).tolist())
        policy.keep_scores(demand.expert_ids, demand)
    policy.end_forward(ForwardOutcome.without_logits(context))
    # Nobody stays, so that each forward guesses anew.
    policy._residents.is_resident[:] = False
    return guesses


@pytest.mark.parametrize("lookup", ["block", "token"])
def test_finemoe_foretells_what_lies_beyond_the_distance(lookup: str) -> None:
    policy = finemoe_seen(f"finemoe:maps=topk,distance=1,budget=99,lookup={lookup}")
    # Nothing to match the first forward with; the second one finds it.
    second, third = one_forward(policy, 1), one_forward(policy, 2)
    # After layer 0: layers 2 and 3, nearer ones first. After layer 1: 3, on its way already.
    assert second == [
        [],
        [2 * 8 + 2, 2 * 8 + 3, 3 * 8 + 3, 3 * 8 + 4],
        [],
        [],
        [],
    ]
    # The start of the third: layer 0, as the second forward's match has it.
    assert third[0] == [0, 1] and third[1:] == second[1:]


def test_finemoe_quirk_lists_whole_layers_with_the_selected_first() -> None:
    policy = finemoe_seen("finemoe:maps=topk,distance=2,budget=99,quirk=true")
    guesses = one_forward(policy, 1)[1]
    assert sorted(guesses) == list(range(3 * 8, 4 * 8)) and guesses[:2] == [3 * 8 + 3, 3 * 8 + 4]
    policy.start_forward(context_of_rows(2, row_of(2)))
    assert np.isfinite(policy.victim_scores()).all()


def test_finemoe_lists_are_protected_and_the_budget_bounds_a_call() -> None:
    policy = finemoe_seen("finemoe:maps=topk,distance=1,budget=3")
    context = context_of_rows(1, row_of(2))
    policy.start_forward(context)
    demand = demand_of_ids(0, context, [[0, 1]] * 2, 8)
    policy.observe(demand)
    guesses = policy.predict(context, demand).tolist()
    assert guesses == [2 * 8 + 2, 2 * 8 + 3, 3 * 8 + 3]
    is_protected = np.isinf(policy.victim_scores())
    assert sorted(is_protected.ravel().nonzero()[0].tolist()) == [*guesses, 3 * 8 + 4]


def test_finemoe_for_a_block_lists_at_least_its_mean_demand() -> None:
    policy = policy_of("finemoe:maps=topk,distance=1,budget=99", shape_of(3, 8, 1)).retention
    assert isinstance(policy, ExpertMapPolicy)
    guesses = []
    for forward_id in range(2):
        context = context_of_rows(forward_id, row_of(4))
        policy.start_forward(context)
        for layer in range(3):
            demand = demand_of_ids(layer, context, [[0], [0], [3], [5]], 8)
            policy.observe(demand)
            guesses.append(policy.predict(context, demand).tolist())
        policy.end_forward(ForwardOutcome.without_logits(context))
    # A perfect match admits none by its sum, and top_k is 1; the block wants 3.
    assert guesses == [[], [], [], [16, 19, 21], [], []]


def test_finemoe_keeps_the_needed_then_the_listed_then_the_likely_and_visited() -> None:
    policy = finemoe_seen("finemoe:maps=topk,distance=1,budget=99", layers=3)
    contexts = [context_of_rows(index, row_of(2)) for index in range(1, 3)]
    # Layer 2 was visited at 2 and 3; now 5 is visited and 6 and 7 needed, 2 and 3 listed.
    for context, ids in zip(contexts, [[5, 5], [7, 6]], strict=True):
        policy.start_forward(context)
        for layer in (0, 2):
            demand = demand_of_ids(layer, context, [[0, 1] if layer == 0 else ids] * 2, 8)
            policy.observe(demand)
            policy.predict(context, demand)
    # The listed have only just come: worth nothing by themselves.
    policy._residents.visits[2, [2, 3]] = 0
    scores = policy.keep_scores(np.arange(8), demand)
    assert np.argsort(-scores, kind="stable").tolist() == [6, 7, 2, 3, 5, 0, 1, 4]


def test_finemoe_store_gives_up_the_most_redundant() -> None:
    store = ExpertMapStore(shape_of(1, 4, 1), 2)
    maps = np.eye(4, dtype=np.float32)
    for index in range(2):
        store.add(maps[None, index : index + 1], None, np.zeros((1, index), dtype=np.float32))
    store.add(maps[None, 2:3], None, np.array([[0.1, 0.6]], dtype=np.float32))
    assert store.maps[0].tolist() == [maps[0].tolist(), maps[2].tolist()]
    # Two of one forward do not take the same place.
    store.add(maps[None, 2:4], None, np.array([[0.1, 0.6], [0.2, 0.9]], dtype=np.float32))
    assert store.maps[0].tolist() == [maps[3].tolist(), maps[2].tolist()]


def test_finemoe_redundancy_weighs_embeddings_by_the_distance() -> None:
    policy = policy_of("finemoe:distance=3,store=2", shape_of(4, 6, 2)).retention
    assert isinstance(policy, ExpertMapPolicy)

    def forward(forward_id: int, embedding: list[float], expert: int) -> None:
        size = np.array([embedding, embedding], dtype=np.float32)
        context = replace(context_of_rows(forward_id, row_of(2)), input_embedding=size)
        policy.start_forward(context)
        policy.predict(context, None)
        for layer in range(4):
            demand = demand_of_ids(layer, context, [[expert, expert + 1]] * 2, 6)
            policy.observe(demand)
            policy.predict(context, demand)
        policy.end_forward(ForwardOutcome.without_logits(context))

    forward(0, [1, 0, 0], 0)
    forward(1, [0, 1, 0], 4)
    # Its map is the first one's, its embedding the second's, which counts for three quarters.
    forward(2, [0, 1, 0], 0)
    top = policy.store.maps[0].argmax(axis=1).tolist()
    assert top == [0, 0]


def test_finemoe_says_what_it_needs() -> None:
    shape = shape_of(4, 8, 2)
    assert policy_of("finemoe", shape).needs == {"gate_scores", "input_embedding"}
    assert not policy_of("finemoe:maps=topk", shape).needs
    policy = policy_of("finemoe", shape).retention
    assert isinstance(policy, ExpertMapPolicy)
    context = replace(context_of_rows(0, row_of(2)), input_embedding=None)
    policy.start_forward(context)
    with pytest.raises(ConfigError, match="maps=topk"):
        policy.predict(context, None)
    demand = replace(demand_of_ids(0, context, [[0, 1]] * 2, 8), gate_scores=None)
    with pytest.raises(ConfigError, match="maps=topk"):
        policy.predict(context, demand)


# ---- placements ----


@bounded(30)
@given(seed=seeds, num_slots=st.integers(0, 24), is_global=st.booleans())
def test_popular_placement_uses_every_slot(seed: int, num_slots: int, is_global: bool) -> None:
    shape = shape_of(3, 8, 2)
    policy = PopularPlacementPolicy(shape, warmup=1, is_global=is_global)
    capacities = np.array([num_slots // 3 + (layer < num_slots % 3) for layer in range(3)])
    first = policy.target(capacities)
    assert first is not None
    assert [ids.tolist() for ids in first] == [list(range(size)) for size in capacities]
    assert policy.target(capacities) is None
    for demand in FakeRouter(shape, seed).forward():
        policy.observe(demand)
    policy.end_request(0)
    second = policy.target(capacities)
    assert second is not None and sum(map(len, second)) == num_slots
    if not is_global:
        assert [len(ids) for ids in second] == capacities.tolist()
    assert policy.target(capacities) is None
