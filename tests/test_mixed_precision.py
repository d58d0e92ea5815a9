"""Lossy rule `mixed`: alone, in caches and layers, in engines, and wherever it is named."""

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoints import synthetic_llada2, write_checkpoint
from fakes import (
    LIVE_POLICIES,
    CountedCopy,
    FakeRouter,
    bounded,
    context_of,
    demand_of,
    outcome_of,
    policy_of,
    random_store,
    shape_of,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.bench import run_bench
from oled_moe.cache import ExpertCache, LowPrecision
from oled_moe.cli import main
from oled_moe.errors import CheckpointError, ConfigError, DoesNotFitError
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels import EachExpert, reference
from oled_moe.kernels.quantized import dequantized
from oled_moe.lanes import InlineLane, Lane, ThreadLane
from oled_moe.lossy import LossyRule, build_lossy
from oled_moe.packing import pack_checkpoint
from oled_moe.packs import experts_name
from oled_moe.policies.precision import MixedPrecisionPolicy, PrecisionPolicy
from oled_moe.quantization import QuantSpec, quantize
from oled_moe.recording import PromptToRecord, record_trace
from oled_moe.replay import Replayer
from oled_moe.slots import SlotPool
from oled_moe.store import ExpertWeights, HostExpertStore
from oled_moe.types import LayerDemand, LayerPlan, Phase

SHAPE = shape_of(2, 8, 3)
EVERY_PHASE = (Phase.PREFILL, Phase.DENOISE, Phase.COMMIT)
WAYS = ("block", "token")


def build(spec: str) -> LossyRule:
    return build_lossy(spec, num_experts=SHAPE.num_experts, top_k=SHAPE.top_k)


def precision_of(spec: str) -> PrecisionPolicy:
    policy = build(spec).precision
    assert policy is not None
    return policy


def mixed(share: float, by: str) -> PrecisionPolicy:
    return precision_of(f"mixed:share={share},by={by}")


# --- the policy


@pytest.mark.parametrize("by", WAYS)
@given(st.integers(0, 2**32 - 1), st.sampled_from((*EVERY_PHASE, None)))
@bounded(25)
def test_more_share_leaves_more_to_copies(by: str, seed: int, phase: Phase | None) -> None:
    phases = EVERY_PHASE if phase is None else (phase,)
    demand = FakeRouter(SHAPE, seed).forward(9, phases=phases)[0]
    untouched = demand.gate_weights.copy()
    everyone = demand.expert_ids
    low = [mixed(share, by).may_be_low(demand, everyone) for share in (0, 0.3, 0.7, 1)]
    assert all(each.dtype == np.bool_ and each.shape == everyone.shape for each in low)
    assert all((fewer <= more).all() for fewer, more in zip(low, low[1:], strict=False))
    # Prompts and commits have theirs in full; of what is left all are low in the end.
    in_full = demand.topk_ids[~demand.context.denoising_tokens]
    assert not low[0].any()
    assert np.array_equal(low[-1], ~np.isin(everyone, in_full))
    # Who else is missing plays no part.
    some = everyone[::2]
    assert np.array_equal(mixed(0.3, by).may_be_low(demand, some), low[1][::2])
    assert np.array_equal(demand.gate_weights, untouched)


def demand_by_hand(confidence: Sequence[float]) -> LayerDemand:
    return demand_of(
        0,
        context_of(0, confidence),
        [[0, 1, 2], [1, 4, 3]],
        [[0.5, 0.25, 0.25], [0.75, 0.125, 0.125]],
        num_experts=8,
    )


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        # Token 0: 2 holds 0.25, 1 and 2 hold 0.5. Token 1: 3 holds 0.125, 4 and 3 hold 0.25.
        ("share=0.1,by=token", []),
        ("share=0.125,by=token", [3]),
        ("share=0.25,by=token", [2, 3, 4]),
        # 1 matters to the second token.
        ("share=0.5,by=token", [2, 3, 4]),
        ("share=0.999,by=token", [2, 3, 4]),
        ("share=1,by=token", [0, 1, 2, 3, 4]),
        # With confidence 1 and 0.5, out of 1.5: 1 has 0.625, 0 has 0.5, 2 has 0.25; 3 and 4 have
        # 0.0625 each, of which the higher id goes first.
        ("share=0.04,by=block", []),
        ("share=0.05,by=block", [4]),
        ("share=0.1,by=block", [3, 4]),
        ("share=0.25,by=block", [2, 3, 4]),
        ("share=0.6,by=block", [0, 2, 3, 4]),
        ("share=1,by=block", [0, 1, 2, 3, 4]),
    ],
)
def test_by_hand(spec: str, expected: list[int]) -> None:
    demand = demand_by_hand([1.0, 0.5])
    is_low = precision_of(f"mixed:{spec}").may_be_low(demand, demand.expert_ids)
    assert demand.expert_ids[is_low].tolist() == expected


def test_confidence_weighs_in_blocks_alone() -> None:
    sure, unsure = demand_by_hand([1.0, 1.0]), demand_by_hand([0.0625, 1.0])
    for by, changes in (("block", True), ("token", False)):
        policy = mixed(0.2, by)
        low = [policy.may_be_low(demand, demand.expert_ids).tolist() for demand in (sure, unsure)]
        assert (low[0] != low[1]) == changes
    # Where nothing has any confidence nothing matters.
    nobody = demand_by_hand([0.0, 0.0])
    assert mixed(0.2, "block").may_be_low(nobody, nobody.expert_ids).all()


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("mixed:share=1.5", "share is '1.5'; allowed: a number, 0 to 1"),
        ("mixed:by=layer", "by is 'layer'; allowed: block, token"),
        ("mixed:slots=9", "slots is '9'; allowed: a whole number, 0 to 8"),
        ("mixed:low=x", "known: share, by, slots"),
    ],
)
def test_bad_specs_say_what_is_allowed(spec: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(spec)


def test_choices_are_counted_by_request() -> None:
    context = context_of(0, [0.5] * 6, phases=EVERY_PHASE)
    ids = np.array([[0, 1, 2]] * 6)
    weights = np.array([[0.5, 0.375, 0.125]] * 6, dtype=np.float32)
    rule = build("mixed")
    for low_ids in ([1, 2], []):
        rule.count_low(context, ids, weights, np.array(low_ids, dtype=np.int64))
    counts = rule.counts_of(1)
    assert (counts.num_choices, counts.num_replaced) == (12, 4)
    assert (counts.weight, counts.replaced_weight) == (4, 1)
    assert rule.counts_of(0) == rule.counts_of(2)


# --- the cache


def cache_of(
    name: str, num_slots: int, precision: PrecisionPolicy | None, *, cpu: bool = False
) -> ExpertCache:
    low = None
    if precision is not None:
        num_low = precision.slots * SHAPE.num_layers
        low = LowPrecision(
            precision,
            ExpertCache(SHAPE, policy_of("naive-lru", SHAPE), num_slots=num_low, num_staging=2),
        )
    return ExpertCache(
        SHAPE,
        policy_of(name, SHAPE),
        num_slots=num_slots,
        num_staging=2,
        has_cpu_experts=cpu,
        low=low,
    )


def plans_of(cache: ExpertCache, seed: int, num_forwards: int = 6) -> Iterator[Any]:
    """(demand, who was resident or on the way, plan) of random forwards."""
    router = FakeRouter(SHAPE, seed)
    for number in range(num_forwards):
        phases = EVERY_PHASE if number % 3 == 2 else (Phase.DENOISE,)
        demands = router.forward(6, phases=phases)
        cache.start_forward(demands[0].context)
        for demand in demands:
            there = np.union1d(cache.resident_ids(demand.layer), cache.staged_ids(demand.layer))
            yield demand, there, cache.plan(demand)
            cache.check()
        cache.end_forward(outcome_of(demands[0].context))


@pytest.mark.parametrize("name", LIVE_POLICIES)
@given(st.integers(0, 2**32 - 1), st.integers(0, 15), st.integers(0, 3), st.booleans())
@bounded(10)
def test_every_expert_is_in_one_place(
    name: str, seed: int, num_slots: int, low_slots: int, cpu: bool
) -> None:
    precision = precision_of(f"mixed:share=0.5,slots={low_slots}")
    cache = cache_of(name, num_slots, precision, cpu=cpu)
    assert cache.low is not None
    held: list[set[int]] = [set() for _ in range(SHAPE.num_layers)]
    for demand, there, plan in plans_of(cache, seed):
        everyone = np.concatenate(
            (plan.hit_ids, plan.staged_ids, plan.load_ids, plan.cpu_ids, plan.low_ids)
        )
        assert np.array_equal(np.sort(everyone), demand.expert_ids)
        assert plan.num_demanded == len(demand.expert_ids)
        # What is there in full is used in full, and what matters is never taken otherwise.
        assert not np.isin(plan.low_ids, there).any()
        assert precision.may_be_low(demand, plan.low_ids).all()
        assert not precision.may_be_low(demand, plan.load_ids).any()
        if plan.low is not None:
            assert set(plan.low.hit_ids.tolist()) <= held[demand.layer]
        held[demand.layer] = set(cache.low.cache.resident_ids(demand.layer).tolist())
        assert len(held[demand.layer]) <= low_slots


@pytest.mark.parametrize("name", ["naive-lru", "oled", "oled+prefetch", "paged-lru"])
@given(st.integers(0, 2**32 - 1))
@bounded(10)
def test_a_share_of_nothing_plans_as_without(name: str, seed: int) -> None:
    without = plans_of(cache_of(name, 7, None), seed)
    with_none = plans_of(
        cache_of(name, 7, MixedPrecisionPolicy(share=0, by="token", slots=2)), seed
    )
    for (_, _, one), (_, _, other) in zip(without, with_none, strict=True):
        for field in fields(LayerPlan):
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            if isinstance(mine, np.ndarray):
                assert np.array_equal(mine, theirs), field.name
            elif field.name != "prefetch":
                assert mine == theirs, field.name


def test_what_was_used_last_stays_in_the_lower_precision() -> None:
    cache = cache_of("naive-lru", 0, MixedPrecisionPolicy(share=1, by="block", slots=2))
    assert cache.low is not None
    for forward_id, ids in enumerate(([0, 1, 2], [2, 3, 4], [4, 5, 2])):
        demand = demand_of(
            0, context_of(forward_id, [0.5]), [ids], [[0.5, 0.25, 0.25]], num_experts=8
        )
        plan = cache.plan(demand)
        assert plan.low_ids.tolist() == sorted(ids)
    assert plan.low is not None
    # Of 2, 3 and 4 the first two were kept, ties to the lower id.
    assert plan.low.hit_ids.tolist() == [2] and sorted(plan.low.load_ids) == [4, 5]
    assert not len(cache.resident_ids(0))
    cache.forget(0)
    assert not len(cache.low.cache.resident_ids(0))


# --- one layer against a reference in float32

HIDDEN = 8
STORE = random_store(SHAPE.num_layers, SHAPE.num_experts, hidden_size=HIDDEN)
SPEC = QuantSpec(4, 32)


def quantised(store: HostExpertStore) -> HostExpertStore:
    layout = replace(store.layout, quant=SPEC)
    low = HostExpertStore(layout, store.num_layers, store.num_experts)
    for number in range(store.num_layers * store.num_experts):
        gate_up, down = store.weights(*divmod(number, store.num_experts))
        sources = (*gate_up.chunk(2), down)
        for target, matrix in zip(
            layout.packed_views(low.arena.slot(number)), sources, strict=True
        ):
            target.copy_(quantize(matrix, SPEC))
    return low


LOW_STORE = quantised(STORE)


@contextmanager
def layers(
    precision: PrecisionPolicy,
    *,
    policy: str = "oled",
    num_slots: int = 5,
    seed: int = 0,
    fail_low: Sequence[int] = (),
    is_threaded: bool = False,
) -> Iterator[OffloadedExperts]:
    """Experts over both stores, free slots NaN; threads are delayed at random under `seed`."""
    lanes: list[Lane] = [InlineLane(), InlineLane()]
    if is_threaded:
        lanes = [
            ThreadLane("copy", num_threads=1 + seed % 2, jitter_s=0.0005, seed=seed),
            ThreadLane("device", jitter_s=0.0005, seed=seed + 1),
        ]
    cache = cache_of(policy, num_slots, precision)
    assert cache.low is not None
    pools = [
        SlotPool(
            store.layout,
            table.num_slots + table.num_staging,
            lanes[0],
            CountedCopy(store, failures),
            num_experts=SHAPE.num_experts,
            is_poisoned=True,
        )
        for store, table, failures in ((STORE, cache, ()), (LOW_STORE, cache.low.cache, fail_low))
    ]
    pools[0].fill(cache.place())
    experts = OffloadedExperts(
        cache,
        pools[0],
        kernel=EachExpert(reference.expert_mlp),
        compute_lane=lanes[1],
        low_pool=pools[1],
    )
    yield experts
    for lane in lanes:
        lane.close()


def run(experts: OffloadedExperts, demand: LayerDemand, hidden_TD: Tensor) -> Tensor:
    if demand.layer == 0:
        experts.start_forward(demand.context)
    gates_TK = torch.from_numpy(demand.gate_weights)
    ids_TK = torch.from_numpy(demand.topk_ids)
    return experts.finish(
        experts.start(demand.layer, hidden_TD, ids_TK, gates_TK, demand.context), gates_TK
    )


def dense(demand: LayerDemand, hidden_TD: Tensor, low_ids: Sequence[int]) -> Tensor:
    """Every expert on every token, weighted, those of `low_ids` with the quantised weights."""
    gates_TE = torch.zeros(len(hidden_TD), SHAPE.num_experts)
    gates_TE.scatter_(1, torch.from_numpy(demand.topk_ids), torch.from_numpy(demand.gate_weights))
    total_TD = torch.zeros(len(hidden_TD), HIDDEN)
    for expert in range(SHAPE.num_experts):
        weights: ExpertWeights = STORE.weights(demand.layer, expert)
        if expert in low_ids:
            slot = LOW_STORE.arena.slot(LOW_STORE.slot_of(demand.layer, expert))
            weights = dequantized(LOW_STORE.layout, slot)
        gate_TF, up_TF = (hidden_TD @ weights.gate_up.T).chunk(2, dim=1)
        total_TD += gates_TE[:, expert, None] * ((F.silu(gate_TF) * up_TF) @ weights.down.T)
    return total_TD


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("policy", ["naive-lru", "oled", "oled+prefetch", "paged-lru"])
@pytest.mark.parametrize("spec", ["share=0.4,slots=2", "share=1,slots=0", "share=0,slots=1"])
def test_layers_equal_the_reference(policy: str, spec: str, is_threaded: bool) -> None:
    router, generator = FakeRouter(SHAPE, 3), torch.Generator().manual_seed(3)
    num_low = num_full = num_kept = 0
    seen: list[LayerPlan] = []
    precision = precision_of(f"mixed:{spec}")
    with layers(precision, policy=policy, is_threaded=is_threaded) as experts:
        experts.observers.append(lambda demand, plan: seen.append(plan))
        for number in range(8):
            phases = EVERY_PHASE if number % 3 == 2 else (Phase.DENOISE,)
            for demand in router.forward(6, phases=phases):
                hidden_TD = torch.randn(6, HIDDEN, generator=generator)
                found = run(experts, demand, hidden_TD)
                plan = seen.pop()
                expected = dense(demand, hidden_TD, plan.low_ids.tolist())
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
                num_low += len(plan.low_ids)
                num_full += len(plan.load_ids)
                num_kept += 0 if plan.low is None else len(plan.low.hit_ids)
            experts.end_forward(outcome_of(demand.context))
        experts.cache.check()
    assert (num_low > 0) == (not spec.startswith("share=0,"))
    assert (num_kept > 0) == spec.startswith("share=0.4")
    assert num_full > 0
    # The two stores do differ by more than what is compared.
    assert (dense(demand, hidden_TD, range(8)) - dense(demand, hidden_TD, ())).abs().max() > 1e-3


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("fail_at", [0, 2, 5])
def test_a_copy_that_fails_leaves_nothing_behind(fail_at: int, is_threaded: bool) -> None:
    router, generator = FakeRouter(SHAPE, 5), torch.Generator().manual_seed(5)
    seen: list[LayerPlan] = []
    precision = precision_of("mixed:share=0.7,slots=2")
    num_failed = 0
    with layers(precision, fail_low=[fail_at], is_threaded=is_threaded) as experts:
        experts.observers.append(lambda demand, plan: seen.append(plan))
        for _ in range(5):
            for demand in router.forward(6):
                hidden_TD = torch.randn(6, HIDDEN, generator=generator)
                try:
                    found = run(experts, demand, hidden_TD)
                except OSError:
                    num_failed += 1
                    experts.cache.check()
                    found = run(experts, demand, hidden_TD)
                expected = dense(demand, hidden_TD, seen[-1].low_ids.tolist())
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            experts.end_forward(outcome_of(demand.context))
        experts.cache.check()
    assert num_failed == 1


# --- engines

GOLDEN = Path(__file__).parent / "golden"
E, K = 12, 3
CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": E,
    "num_experts_per_tok": K,
    "n_group": 3,
    "topk_group": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
    "mask_token_id": 57,
    "eos_token_id": 56,
}
PARAMS = SamplingParams(max_tokens=24, block_length=8, threshold=0.3, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(20)), [9] * 8]


def write_model(path: Path, seed: int, **settings: Any) -> Path:
    values = CONFIG | settings
    weights = synthetic_llada2(values, seed=seed)
    weights["lm_head.weight"] *= 12
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    return write_checkpoint(path, rounded, values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), 5)


@pytest.fixture(scope="module")
def packs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("packs")
    for form in ("int4", "int8", "bf16"):
        pack_checkpoint(model, directory / form, dtype=form)
    return {form: str(directory / form) for form in ("int4", "int8", "bf16")}


def open_engine(path: str | Path, low: str | None = None, **settings: Any) -> Engine:
    common = {"experts_per_layer": 4, "cpu_experts": False, "threads": 1}
    if low is not None:
        common |= {"lossy": "mixed:share=0.4,slots=2", "low_precision": low}
    return Engine(path, EngineConfig(**(common | settings)))


def answers_of(path: str | Path, low: str | None = None, **settings: Any) -> list[list[int]]:
    with open_engine(path, low, **settings) as engine:
        return [engine.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def exact(model: Path) -> list[list[int]]:
    return answers_of(model)


def test_where_nothing_is_replaced_answers_are_the_models(
    model: Path, packs: dict[str, str], exact: list[list[int]]
) -> None:
    low = packs["int4"]
    assert answers_of(model, low, lossy="mixed:share=0") == exact
    # As a pack, which is the same model.
    assert answers_of(packs["bf16"], low, lossy="mixed:share=0") == exact
    # All experts fit: the second model is not held, and nothing is taken from it.
    with open_engine(model, low, lossy="mixed:share=1", experts_per_layer=E) as engine:
        assert engine.memory_plan.low is None and engine.experts.low_pool is None
        results = [engine.generate(prompt, PARAMS) for prompt in PROMPTS]
    assert [each.token_ids for each in results] == exact
    assert not any(each.stats.choices_replaced + each.stats.low_expert_runs for each in results)


@pytest.mark.parametrize(("high", "form"), [("model", "int4"), ("model", "int8"), ("int8", "int4")])
def test_what_is_replaced_depends_on_plans_alone(
    model: Path, packs: dict[str, str], high: str, form: str
) -> None:
    path = packs.get(high, model)
    found = answers_of(path, packs[form])
    # Slots of the emulated device are NaN until their copy is complete.
    assert answers_of(path, packs[form], device="emulated") == found
    assert answers_of(path, packs[form]) == found


def test_with_nothing_kept_all_is_as_in_the_second_model(packs: dict[str, str]) -> None:
    """Prompts and commits come in full; of one block behind no prompt to speak of all is low."""
    prompt = SamplingParams(max_tokens=8, block_length=8, threshold=1.0, ignore_eos=True)
    seen: list[LayerPlan] = []
    common = {"experts_per_layer": 0, "policy": "naive-lru"}
    with open_engine(packs["bf16"], packs["int4"], lossy="mixed:share=1", **common) as engine:
        engine.experts.observers.append(lambda demand, plan: seen.append(plan))
        mixed = engine.generate([], prompt)
    with open_engine(packs["int4"], **common) as engine:
        low = engine.generate([], prompt)
    assert mixed.token_ids == low.token_ids and mixed.probabilities == low.probabilities
    assert all(plan.num_demanded == len(plan.low_ids) for plan in seen)
    assert mixed.stats.replaced_share == mixed.stats.replaced_weight_share == 1


def test_counters_add_up_and_the_budget_is_kept(model: Path, packs: dict[str, str]) -> None:
    loads = low_loads = runs = pairs = 0
    weight = 0.0

    def observe(demand: LayerDemand, plan: LayerPlan) -> None:
        nonlocal loads, low_loads, runs, pairs, weight
        loads += len(plan.load_ids)
        if plan.low is not None:
            low_loads += len(plan.low.load_ids)
            runs += len(plan.low.load_ids) + len(plan.low.hit_ids)
        is_low = np.isin(demand.topk_ids, plan.low_ids)
        pairs += int(is_low.sum())
        weight += float(demand.gate_weights[is_low].sum())

    budget = 120 * 1024
    settings = {"experts_per_layer": None, "expert_memory": budget}
    with open_engine(model, packs["int4"], **settings) as engine:
        plan = engine.memory_plan
        assert plan.low is not None and plan.low.num_slots == 2 * 2
        high, low = engine.experts.pool.arena, engine.experts.low_pool.arena  # type: ignore[union-attr]
        held = high.memory.nbytes + low.memory.nbytes
        assert held == plan.expert_memory_bytes <= budget < held + plan.shape.expert_bytes
        assert sum(size for _, size in plan.lines()[:-1]) == plan.total_bytes
        engine.experts.observers.append(observe)
        stats = engine.generate(PROMPTS[1], PARAMS).stats
        expert_bytes = high.layout.weight_bytes, low.layout.weight_bytes
    assert low_loads > 0 and runs > low_loads
    assert (stats.expert_loads, stats.low_expert_loads) == (loads + low_loads, low_loads)
    assert stats.low_expert_runs == runs
    assert stats.low_bytes_loaded == low_loads * expert_bytes[1]
    assert stats.bytes_loaded == loads * expert_bytes[0] + stats.low_bytes_loaded
    assert stats.choices_replaced == pairs
    assert 0 < stats.replaced_share < 1 and 0 < stats.replaced_weight_share < stats.replaced_share
    assert weight > 0


def test_requests_that_share_forwards_are_counted_apart(model: Path, packs: dict[str, str]) -> None:
    pairs = {0: 0, 1: 0, 2: 0}

    def observe(demand: LayerDemand, plan: LayerPlan) -> None:
        end = 0
        for row in demand.context.rows:
            start, end = end, end + row.num_tokens
            is_low = np.isin(demand.topk_ids[start:end], plan.low_ids)
            pairs[row.request_id] += int(is_low.sum())
            assert row.phase == Phase.DENOISE or not is_low.any()

    with open_engine(model, packs["int4"], max_num_seqs=3) as engine:
        engine.experts.observers.append(observe)
        running = [engine.begin(engine.check(prompt, PARAMS)) for prompt in PROMPTS]
        replaced = {}
        while running:
            for request, event in zip(list(running), engine.denoise(running), strict=True):
                if event.result is not None:
                    replaced[request.request_id] = event.result.stats.choices_replaced
                    running.remove(request)
                    engine.end(request)
    assert replaced == pairs and sum(count > 0 for count in pairs.values()) >= 2


@pytest.mark.parametrize("name", ["sdar_moe", "rnd1", "llada_moe", "diffusion_gemma"])
def test_other_families_mix_too(name: str, tmp_path: Path) -> None:
    pack_checkpoint(GOLDEN / name, tmp_path / "low", dtype="int4")
    has_blocks = name in ("sdar_moe", "llada_moe")
    params = SamplingParams(max_tokens=8, **({"block_length": 8} if has_blocks else {}))
    config = EngineConfig(
        experts_per_layer=2,
        lossy="mixed:share=0.5,slots=1",
        low_precision=str(tmp_path / "low"),
        threads=1,
    )
    with Engine(GOLDEN / name, config) as engine:
        stats = engine.generate([3, 1, 4, 1, 5, 9], params).stats
    assert 0 < stats.replaced_share < 1


# --- what does not belong, and what is damaged


def test_other_packs_are_refused(model: Path, packs: dict[str, str], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", 6)
    pack_checkpoint(other, tmp_path / "other4", dtype="int4")
    with pytest.raises(ConfigError, match=r"a pack of another model: .*gate.* differs from that"):
        open_engine(model, str(tmp_path / "other4"))
    deeper = write_model(tmp_path / "deeper", 5, num_hidden_layers=4)
    pack_checkpoint(deeper, tmp_path / "deeper4", dtype="int4")
    with pytest.raises(ConfigError, match="a pack of a model of other sizes or settings"):
        open_engine(model, str(tmp_path / "deeper4"))
    with pytest.raises(ConfigError, match=r"which is no pack; make one with oled-moe pack"):
        open_engine(model, str(model))
    with pytest.raises(ConfigError, match=r"take 12.0 KiB each and those of the model 12.0 KiB"):
        open_engine(model, packs["bf16"])
    with pytest.raises(ConfigError, match="allowed: a pack of fewer bytes"):
        open_engine(packs["int4"], packs["int8"])
    with pytest.raises(ConfigError, match="would be computed in float32; allowed: int8 and int4"):
        open_engine(model, packs["bf16"], dtype="float32")


def test_damage_is_found_when_an_expert_is_read(
    model: Path, packs: dict[str, str], tmp_path: Path
) -> None:
    damaged = tmp_path / "low"
    pack_checkpoint(model, damaged, dtype="int4")
    path = damaged / experts_name(1)
    content = bytearray(path.read_bytes())
    # The last expert's slot ends the file, with padding that is checked too.
    for expert in range(E):
        content[len(content) - 4096 * (E - expert)] ^= 1
    path.write_bytes(content)
    with open_engine(model, str(damaged)) as engine:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="layer 1, expert .* is not what was packed"):
                engine.generate(PROMPTS[1], PARAMS)
            engine.cache.check()
    with (
        pytest.raises(CheckpointError, match="layer 1, expert 0"),
        open_engine(model, str(damaged), device="emulated"),
    ):
        pass


def test_slots_that_leave_no_room(model: Path, packs: dict[str, str]) -> None:
    settings = {"experts_per_layer": None, "lossy": "mixed:slots=12"}
    with pytest.raises(DoesNotFitError, match=r"96.0 KiB of it.*raise it to 108KiB or more"):
        open_engine(model, packs["int4"], expert_memory=100 * 1024, **settings)
    with open_engine(model, packs["int4"], expert_memory=110592, **settings) as engine:
        assert engine.memory_plan.num_slots + engine.memory_plan.num_staging == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lossy": "mixed"}, "low_precision is not given; name a pack"),
        ({"low_precision": "x"}, "it goes with lossy mixed"),
        ({"low_precision": "x", "lossy": "dmoe"}, "lossy is 'dmoe'; it goes with lossy mixed"),
        ({"low_precision": 7, "lossy": "mixed"}, "low_precision is 7"),
        ({"low_precision": "x", "lossy": "mixed", "device": "cuda"}, "devices cpu and emulated"),
    ],
)
def test_rule_and_pack_go_together(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**settings)


# --- where it is named

Said = Callable[..., str]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Said]:
    num_threads = torch.get_num_threads()

    def run(*arguments: str, code: int = 0) -> str:
        assert main(arguments) == code
        captured = capsys.readouterr()
        return captured.out if "--json" in arguments else captured.out + captured.err

    yield run
    torch.set_num_threads(num_threads)


def flags(packs: dict[str, str], rule: str = "mixed:share=0.4") -> tuple[str, ...]:
    return ("--lossy", rule, "--low-precision", packs["int4"], "--experts-per-layer", "4")


def test_generate_names_the_rule(said: Said, model: Path, packs: dict[str, str]) -> None:
    common = ["generate", str(model), "--prompt-ids", "1,2", "--max-tokens", "16", "--threads", "1"]
    words = " ".join(said(*common, *flags(packs)).split())
    for part in (
        "mixed:share=0.4: missing experts that matter least are taken in a lower precision",
        "answers are not the model's own and depend on what is in memory",
        f"low precision {packs['int4']}, int4-g64",
        "low-precision slots: 6, 3 per layer, and 2 staging",
        "expert choices replaced",
        "of their weight",
        "int4-g64",
        "experts run in it",
    ):
        assert part in words, part
    answer = json.loads(said(*common, *flags(packs), "--json"))
    assert answer["lossy"] == "mixed:share=0.4" and answer["low_precision"] == "int4-g64"
    assert answer["stats"]["low_expert_runs"] > 0 and answer["plan"]["num_low_slots"] == 8
    assert json.loads(said(*common, "--json"))["low_precision"] is None
    everything = said(*common, *flags(packs)[:-1], "12")
    assert "all experts fit in full, so none is taken from there" in everything
    assert "is not given" in said(*common, "--lossy", "mixed", code=2)
    assert "no model at nowhere" in said(*common, *flags({"int4": "nowhere"}), code=3)


def test_plan_counts_its_slots(said: Said, model: Path, packs: dict[str, str]) -> None:
    def view_of(*arguments: str) -> Any:
        return json.loads(said("plan", str(model), *arguments, "--prompt-tokens", "64", "--json"))

    def sizes_of(view: Any) -> dict[str, int]:
        return {line["what"]: line["bytes"] for line in view["fit"]["plan"]["lines"]}

    emulated = ("--ram", "8GiB", "--device", "emulated")
    for more in ((), ("--ram", "8GiB"), emulated):
        view = view_of(*more, *flags(packs))
        assert sizes_of(view)["low-precision slots: 6, 3 per layer, and 2 staging"] == 8 * 4096
        plan = view["fit"]["plan"]
        assert plan["low_slots_bytes"] == 8 * 4096
        assert plan["expert_memory_bytes"] == (8 + 2) * 12288 + 8 * 4096
        assert any("as if all came in full" in note for note in view["notes"])
    in_ram = "all experts in RAM, behind the emulated device"
    assert sizes_of(view)[in_ram] == 2 * E * (12288 + 4096)
    assert sizes_of(view_of(*emulated, *flags(packs)[:-1], "12"))[in_ram] == 2 * E * 12288
    notes = view_of("--lossy", "dmoe")["notes"]
    assert any("what is predicted is without it" in note for note in notes)


def test_bench_and_traces_name_the_rule(model: Path, packs: dict[str, str]) -> None:
    config = EngineConfig(
        experts_per_layer=4, lossy="mixed:share=0.6", low_precision=packs["int4"], threads=1
    )
    prompts = [tuple(prompt) for prompt in PROMPTS]
    report = run_bench(
        model, ["naive-lru", "oled"], config, PARAMS, prompts, repetitions=1, is_quick=True
    )
    for row in report.rows():
        assert (row["lossy"], row["low_precision"]) == ("mixed:share=0.6", "int4-g64")
        assert row["low_expert_runs"] > 0 and row["replaced_weight_share"] > 0
        assert row["bytes_loaded"] > row["low_bytes_loaded"] > 0
    assert not report.tokens.must_agree
    values = report.to_dict()
    assert any("taken in a lower precision" in note for note in values["notes"])
    assert json.dumps(values)
    with open_engine(model, packs["int4"]) as engine:
        trace = record_trace(engine, [PromptToRecord([1, 2], "a")], PARAMS)
        assert trace.extra["recording"]["lossy"] == "mixed:share=0.4,slots=2"
        assert trace.extra["recording"]["low_precision"] == "int4-g64"
        with pytest.raises(ConfigError, match="lossy is 'mixed"):
            Replayer(engine, trace)


def test_refused_where_it_cannot_work(said: Said, packs: dict[str, str]) -> None:
    refused = said("bench", "--shape", "llada2-mini", "--low-precision", packs["int4"], code=2)
    assert "--low-precision does not go with --shape" in refused
    # What was recorded is replayed in one precision: no flag of simulate says otherwise.
    assert "No such option: --lossy" in said("simulate", "x", "--lossy", "mixed", code=2)


# --- the experiment


def test_the_experiments_tables_are_those_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(root))
    study = importlib.import_module("experiments.11_mixed_precision.run")
    lines = (root / "results" / "raw" / "11_mixed_precision.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(r["threshold"], r["model"], r["lossy"]) for r in rows] == list(study.cells())
    assert all(row.keys() >= {"experiment", "commit", "versions"} for row in rows)
    readme = (root / "experiments" / "11_mixed_precision" / "README.md").read_text("utf-8")
    assert all(table.markdown() in readme for table in study.tables(rows))
