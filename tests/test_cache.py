"""ExpertCache: the retention rule against a naive replay, and what holds after every plan."""

import sys
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from types import FrameType

import numpy as np
import pytest
from fakes import (
    LIVE_POLICIES,
    LIVE_SPECS,
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
from oled_moe.errors import ConfigError
from oled_moe.policies import OffloadPolicy
from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import LoadAllDispatchPolicy
from oled_moe.policies.retention import LruRetentionPolicy
from oled_moe.types import CopyPlan, IntArray, LayerDemand, LayerPlan, MoeShape, Phase

STACK_POLICIES = ("naive-lru", "lfu", "priority")
# Those that are nothing but the retention rule with scores of trace-format.md.
RULE_POLICIES = (*STACK_POLICIES, "priority+adapt", "oled-load-aware", "oled")
seeds = st.integers(0, 2**32 - 1)
phase_lists = st.sampled_from(
    [
        (Phase.DENOISE,),
        (Phase.PREFILL,),
        (Phase.COMMIT,),
        (Phase.COMMIT, Phase.DENOISE),
        (Phase.PREFILL, Phase.DENOISE),
    ]
)


class NaiveLayer:
    """One layer's scores straight from the replay rules of trace-format.md, in exact numbers."""

    def __init__(self, kind: str, *, counts_tail_only: bool = False) -> None:
        self._kind = kind
        self._counts_tail_only = counts_tail_only
        self._last_active: dict[int, int] = {}
        self._num_forwards: dict[int, int] = {}
        self._mass: dict[int, Fraction] = {}

    def observe(self, demand: LayerDemand) -> set[int]:
        """Note a demand and return A."""
        context = demand.context
        counted = set(range(context.num_tokens))
        if self._counts_tail_only and context.is_prefill:
            counted, end = set(), 0
            for row in context.rows:
                tokens = range(end, end + row.num_tokens)
                counted |= set(tokens[-context.block_length :])
                end += row.num_tokens
        mass: dict[int, Fraction] = {}
        for token, ids in enumerate(demand.topk_ids.tolist()):
            for rank, expert in enumerate(ids):
                gate = Fraction(float(demand.gate_weights[token, rank]))
                confidence = Fraction(float(context.token_confidence[token]))
                mass.setdefault(expert, Fraction(0))
                if token in counted:
                    mass[expert] += gate * confidence
        total = sum(mass.values())
        self._mass = {expert: part / total if total else part for expert, part in mass.items()}
        for expert in mass:
            self._last_active[expert] = context.forward_id
            self._num_forwards[expert] = self._num_forwards.get(expert, 0) + 1
        return set(mass)

    def score(self, expert: int, forward_id: int) -> Fraction:
        if self._kind == "naive-lru":
            return Fraction(self._last_active[expert])
        if self._kind == "lfu":
            return Fraction(self._num_forwards[expert])
        if expert in self._mass:
            return self._mass[expert]
        return Fraction(self._last_active[expert] - forward_id)

    def best(self, candidates: Iterable[int], limit: int, forward_id: int) -> set[int]:
        ranked = sorted(candidates, key=lambda e: (-self.score(e, forward_id), e))
        return set(ranked[:limit])


class FakeSlots:
    """What lies in which slot, if a plan is carried out as its docstring says."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self._content: dict[int, tuple[int, int]] = {}

    def copy_ahead(self, copies: CopyPlan) -> None:
        assert len(set(copies.slots.tolist())) == len(copies)
        for number, slot in zip(copies.expert_ids.tolist(), copies.slots.tolist(), strict=True):
            self._content[slot] = divmod(number, self._cache.shape.num_experts)
        # What a placement or guess put out before it names nobody's slot any more.
        cache = self._cache
        self._content = {
            slot: (layer, expert)
            for slot, (layer, expert) in self._content.items()
            if cache.slot_of(layer, expert) == slot or expert in cache.staged_ids(layer)
        }

    def carry_out(self, layer: int, plan: LayerPlan) -> None:
        """Hits and staged are read, loads copied and read in their order, freed slots lost."""
        read_slots = {*plan.hit_slots.tolist(), *plan.staged_slots.tolist()}
        for expert, slot in zip(plan.hit_ids.tolist(), plan.hit_slots.tolist(), strict=True):
            assert self._content[slot] == (layer, expert), "a hit is not where the plan says"
        for expert, slot in zip(plan.staged_ids.tolist(), plan.staged_slots.tolist(), strict=True):
            assert self._content[slot] == (layer, expert), "a guess is not where the plan says"
        # Slots of copies ahead have no readers in this layer.
        loaded = set(plan.load_slots.tolist())
        assert not set(plan.prefetch.slots.tolist()) & (read_slots | loaded)
        self.copy_ahead(plan.prefetch)
        for expert, slot in zip(plan.load_ids.tolist(), plan.load_slots.tolist(), strict=True):
            assert 0 <= slot < self._cache.num_slots + self._cache.num_staging
            self._content[slot] = (layer, expert)
        for slot in plan.freed_slots.tolist():
            self._content.pop(slot, None)
        self.check()

    def forget(self, slots: IntArray) -> None:
        for slot in slots.tolist():
            self._content.pop(slot, None)
        self.check()

    def check(self) -> None:
        """Every resident lies in its slot; nothing else is left."""
        expected = {
            self._cache.slot_of(layer, expert): (layer, expert)
            for layer in range(self._cache.shape.num_layers)
            for expert in self._cache.resident_ids(layer).tolist()
        }
        staged = {
            (layer, expert)
            for layer in range(self._cache.shape.num_layers)
            for expert in self._cache.staged_ids(layer).tolist()
        }
        found = dict(self._content)
        for slot, place in self._content.items():
            if slot not in expected:
                assert place in staged
                staged.remove(place)
                del found[slot]
        assert found == expected and not staged


def copies_ahead(policy: OffloadPolicy) -> bool:
    return policy.prefetch is not None or policy.placement is not None


def check_plan(cache: ExpertCache, demand: LayerDemand, plan: LayerPlan, before: set[int]) -> None:
    """What must hold of any plan; `before`: the layer's residents when it was made."""
    hits, loads, on_cpu = plan.hit_ids.tolist(), plan.load_ids.tolist(), plan.cpu_ids.tolist()
    staged = plan.staged_ids.tolist()
    assert sorted(hits + staged + loads + on_cpu) == demand.expert_ids.tolist()
    assert plan.num_demanded == len(demand.expert_ids)
    assert set(hits) == (before & set(demand.expert_ids.tolist())) - set(staged)
    if not copies_ahead(cache.policy):
        assert not staged and not len(plan.prefetch)
    assert hits == sorted(hits) and on_cpu == sorted(on_cpu)
    residents = set(cache.resident_ids(demand.layer).tolist())
    assert not residents & set(on_cpu)
    assert residents <= before | set(loads) | set(staged)
    assert sum(plan.wave_sizes) == (len(loads) if plan.wave_sizes else 0)
    owned = {
        cache.slot_of(layer, expert)
        for layer in range(cache.shape.num_layers)
        for expert in cache.resident_ids(layer).tolist()
    }
    assert not owned & set(plan.freed_slots.tolist())
    # What stays is loaded first, and what many tokens wait for before what few do.
    tokens = dict(zip(demand.expert_ids.tolist(), demand.num_tokens.tolist(), strict=True))
    order = [(expert not in residents, -tokens[expert]) for expert in loads]
    assert order == sorted(order)
    cache.check()


def cache_of(
    policy: str,
    shape: MoeShape,
    num_slots: int,
    *,
    num_staging: int = 1,
    has_cpu_experts: bool = False,
) -> ExpertCache:
    return ExpertCache(
        shape,
        policy_of(policy, shape),
        num_slots=num_slots,
        num_staging=num_staging,
        has_cpu_experts=has_cpu_experts,
    )


# ---- the rule ----


@pytest.mark.parametrize("policy", RULE_POLICIES)
@bounded(25)
@given(data=st.data())
def test_plans_hold_the_rule_and_the_invariants(policy: str, data: st.DataObject) -> None:
    """Random demands of any size, capacities that move, CPU experts: all checks after each plan."""
    draw = data.draw
    num_layers, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    shape = shape_of(num_layers, num_experts, draw(st.integers(1, min(3, num_experts))))
    cache = cache_of(
        policy,
        shape,
        draw(st.integers(0, shape.num_experts_total)),
        num_staging=draw(st.integers(1, 4)),
        has_cpu_experts=draw(st.booleans()),
    )
    is_oled = policy.startswith("oled")
    kind = policy if policy in STACK_POLICIES else "priority"
    naive = [NaiveLayer(kind, counts_tail_only=is_oled) for _ in range(num_layers)]
    slots = FakeSlots(cache)
    router = FakeRouter(shape, draw(seeds))
    for _ in range(draw(st.integers(6, 14))):
        demands = router.forward(
            draw(st.integers(1, 8)),
            phases=draw(phase_lists),
            num_wanted=draw(st.integers(1, num_experts)),
        )
        for layer, demand in enumerate(demands):
            before = set(cache.resident_ids(layer).tolist())
            limit = min(
                int(cache.capacities[layer]), len(before) + cache.num_slots - cache.num_resident
            )
            plan = cache.plan(demand)
            check_plan(cache, demand, plan, before)
            slots.carry_out(layer, plan)
            naive[layer].observe(demand)
            candidates = before | set(plan.load_ids.tolist())
            best = naive[layer].best(candidates, limit, demand.context.forward_id)
            assert set(cache.resident_ids(layer).tolist()) == best
            assert plan.capacity == max(int(cache.capacities[layer]), len(before))
            if not cache.has_cpu_experts or not is_oled:
                assert not len(plan.cpu_ids)
        cache.end_forward(outcome_of(demands[0].context))
        cache.check()


@pytest.mark.parametrize("policy", LIVE_SPECS)
@bounded(10)
@given(data=st.data())
def test_plans_of_any_policy_hold_the_invariants(policy: str, data: st.DataObject) -> None:
    """Placements, guesses, global pools, CPU experts: whatever a policy does, tables stay sound."""
    draw = data.draw
    num_layers, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    shape = shape_of(num_layers, num_experts, draw(st.integers(1, min(3, num_experts))))
    cache = cache_of(
        policy,
        shape,
        draw(st.integers(0, shape.num_experts_total)),
        num_staging=draw(st.integers(1, 6)),
        has_cpu_experts=draw(st.booleans()),
    )
    slots = FakeSlots(cache)
    for layer, expert, slot in cache.place():
        slots.copy_ahead(CopyPlan(np.array([layer * num_experts + expert]), np.array([slot])))
    slots.check()
    router = FakeRouter(shape, draw(seeds))
    for _ in range(draw(st.integers(6, 14))):
        phases = draw(phase_lists)
        context = router.context(draw(st.integers(len(phases), 8)), phases)
        slots.copy_ahead(cache.start_forward(context))
        slots.check()
        for layer in range(num_layers - draw(st.integers(0, 1))):
            demand = router.demand(layer, context, num_wanted=draw(st.integers(1, num_experts)))
            before = set(cache.resident_ids(layer).tolist())
            plan = cache.plan(demand)
            check_plan(cache, demand, plan, before)
            slots.carry_out(layer, plan)
            assert cache.has_cpu_experts or not len(plan.cpu_ids)
        cache.end_forward(outcome_of(context))
        cache.check()
        if draw(st.booleans()):
            cache.end_request(draw(st.integers(0, 1)))


@pytest.mark.parametrize("policy", STACK_POLICIES)
@bounded(25)
@given(
    seed=seeds,
    num_experts=st.integers(2, 12),
    capacity=st.integers(0, 12),
    num_wanted=st.integers(1, 12),
)
def test_replay_agrees_with_the_rules_to_the_last_hit(
    policy: str, seed: int, num_experts: int, capacity: int, num_wanted: int
) -> None:
    """Hits, utilisation and residents of every forward, by replay rules 1 to 5 alone."""
    shape = shape_of(2, num_experts, 2)
    capacity = min(capacity, num_experts)
    cache = cache_of(policy, shape, 2 * capacity)
    naive = [NaiveLayer(policy) for _ in range(2)]
    residents: list[set[int]] = [set(), set()]
    router = FakeRouter(shape, seed)
    for _ in range(25):
        for layer, demand in enumerate(router.forward(4, num_wanted=num_wanted)):
            plan = cache.plan(demand)
            active = naive[layer].observe(demand)
            assert set(plan.hit_ids.tolist()) == active & residents[layer]
            assert plan.capacity == capacity
            residents[layer] = naive[layer].best(
                residents[layer] | active, capacity, demand.context.forward_id
            )
            assert set(cache.resident_ids(layer).tolist()) == residents[layer]


@pytest.mark.parametrize("policy", STACK_POLICIES)
@bounded(20)
@given(seed=seeds, num_wanted=st.integers(1, 10))
def test_more_slots_hold_all_that_fewer_hold(policy: str, seed: int, num_wanted: int) -> None:
    shape = shape_of(2, 10, 2)
    caches = [cache_of(policy, shape, 2 * capacity) for capacity in range(11)]
    router = FakeRouter(shape, seed)
    assert all(cache.policy.retention.is_stack for cache in caches)
    for _ in range(12):
        for layer, demand in enumerate(router.forward(4, num_wanted=num_wanted)):
            hits = [len(cache.plan(demand).hit_ids) for cache in caches]
            assert hits == sorted(hits)
            held = [set(cache.resident_ids(layer).tolist()) for cache in caches]
            assert all(fewer <= more for fewer, more in zip(held, held[1:], strict=False))


@pytest.mark.parametrize("policy", RULE_POLICIES)
@pytest.mark.parametrize("has_cpu_experts", [False, True])
def test_no_misses_where_everything_fits(policy: str, has_cpu_experts: bool) -> None:
    shape = shape_of(2, 8, 2)
    cache = cache_of(policy, shape, 16, num_staging=0 + has_cpu_experts)
    router = FakeRouter(shape, seed=1)
    seen: list[set[int]] = [set(), set()]
    for _ in range(40):
        for layer, demand in enumerate(router.forward(3)):
            plan = cache.plan(demand)
            assert set(plan.load_ids.tolist()) == set(demand.expert_ids.tolist()) - seen[layer]
            seen[layer] |= set(demand.expert_ids.tolist())
        cache.end_forward(outcome_of(demand.context))
    assert cache.is_complete and seen == [set(range(8))] * 2
    cache.check()


@pytest.mark.parametrize("policy", RULE_POLICIES)
@pytest.mark.parametrize("num_staging", [1, 3])
def test_all_misses_where_nothing_fits(policy: str, num_staging: int) -> None:
    shape = shape_of(2, 8, 2)
    cache = cache_of(policy, shape, 0, num_staging=num_staging)
    slots, router = FakeSlots(cache), FakeRouter(shape, seed=1)
    for _ in range(12):
        for layer, demand in enumerate(router.forward(6)):
            plan = cache.plan(demand)
            assert not len(plan.hit_ids) and len(plan.load_ids) == len(demand.expert_ids)
            slots.carry_out(layer, plan)
        cache.end_forward(outcome_of(demand.context))
        assert cache.num_resident == 0 and not cache.capacities.any()


def test_hits_are_pinned_until_the_layer_is_done() -> None:
    """A load takes an evicted hit's slot only where no other is left (policies.md 10.1)."""
    shape = shape_of(1, 6, 3)
    cache = cache_of("naive-lru", shape, 3, num_staging=1)
    slots = FakeSlots(cache)

    def plan_of(forward_id: int, ids: Sequence[int]) -> LayerPlan:
        demand = demand_of(
            0, context_of(forward_id, [1.0]), [list(ids)], [[1.0] * len(ids)], num_experts=6
        )
        plan = cache.plan(demand)
        slots.carry_out(0, plan)
        return plan

    plan_of(0, [3, 4, 5])
    # All tie, so the lower ids stay: both hits leave, and the first load has the free slot.
    plan = plan_of(1, [0, 1, 2, 4, 5])
    assert plan.hit_ids.tolist() == [4, 5]
    assert cache.resident_ids(0).tolist() == [0, 1, 2]
    is_hit_slot = np.isin(plan.load_slots, plan.hit_slots).tolist()
    assert is_hit_slot == sorted(is_hit_slot) and is_hit_slot.count(True) == 1


# ---- capacities that move ----


class ScriptedAllocation(UniformAllocationPolicy):
    """Answers with the capacities it was given, one after another."""

    def __init__(self, script: Sequence[Sequence[int]]) -> None:
        self._script = [np.array(capacities, dtype=np.int64) for capacities in script]

    def end_forward(self, capacities: IntArray) -> IntArray | None:
        return self._script.pop(0) if self._script else None


def scripted_cache(shape: MoeShape, num_slots: int, script: Sequence[Sequence[int]]) -> ExpertCache:
    policy = OffloadPolicy(
        "scripted", LruRetentionPolicy(shape), ScriptedAllocation(script), LoadAllDispatchPolicy()
    )
    return ExpertCache(shape, policy, num_slots=num_slots, num_staging=1)


def wanting(shape: MoeShape) -> Callable[[int, int, Sequence[int]], LayerDemand]:
    def demand(forward_id: int, layer: int, ids: Sequence[int]) -> LayerDemand:
        gates = [[1.0]] * len(ids)
        context = context_of(forward_id, [1.0] * len(ids))
        return demand_of(layer, context, [[i] for i in ids], gates, num_experts=shape.num_experts)

    return demand


def test_growing_layers_wait_for_shrinking_ones() -> None:
    shape = shape_of(2, 8, 1)
    cache = scripted_cache(shape, 8, [[7, 1]])
    slots, demand = FakeSlots(cache), wanting(shape)
    for layer in (0, 1):
        slots.carry_out(layer, cache.plan(demand(0, layer, [0, 1, 2, 3])))
    cache.end_forward(outcome_of(context_of(0, [1.0])))
    # Layer 0 comes first and may grow, but nobody has given anything up yet.
    slots.carry_out(0, cache.plan(demand(1, 0, range(8))))
    assert len(cache.resident_ids(0)) == 4
    # A layer that shrinks does so even where it misses nothing, and reads its hits first.
    plan = cache.plan(demand(1, 1, [2, 3]))
    assert plan.hit_ids.tolist() == [2, 3] and len(plan.freed_slots) == 3
    slots.carry_out(1, plan)
    assert cache.resident_ids(1).tolist() == [2]
    slots.carry_out(0, cache.plan(demand(2, 0, range(8))))
    assert len(cache.resident_ids(0)) == 7
    cache.check()


@bounded(40)
@given(seed=seeds, num_staging=st.integers(1, 4))
def test_any_sequence_of_capacities_is_safe(seed: int, num_staging: int) -> None:
    """Whatever an allocation policy answers, as long as the sum is right."""
    random = np.random.default_rng(seed)
    shape = shape_of(3, 6, 2)
    total = int(random.integers(0, 19))
    script = []
    for _ in range(20):
        capacities = [0, 0, 0]
        while sum(capacities) < total:
            layer = int(random.integers(3))
            capacities[layer] += capacities[layer] < 6
        script.append(capacities)
    cache = ExpertCache(
        shape,
        OffloadPolicy(
            "scripted",
            LruRetentionPolicy(shape),
            ScriptedAllocation(script),
            LoadAllDispatchPolicy(),
        ),
        num_slots=total,
        num_staging=num_staging,
    )
    slots, router = FakeSlots(cache), FakeRouter(shape, seed)
    for _ in range(20):
        for layer, demand in enumerate(router.forward(3)):
            before = set(cache.resident_ids(layer).tolist())
            plan = cache.plan(demand)
            check_plan(cache, demand, plan, before)
            slots.carry_out(layer, plan)
            assert len(cache.resident_ids(layer)) <= plan.capacity
        cache.end_forward(outcome_of(demand.context))


# ---- filling and forgetting ----


def test_fill_makes_everything_resident_once() -> None:
    shape = shape_of(2, 4, 1)
    cache, demand = cache_of("oled", shape, 8, num_staging=0), wanting(shape)
    loaded = cache.plan(demand(0, 1, [2])).load_ids.tolist()
    loads = cache.fill()
    assert sorted([(1, e) for e in loaded] + [(layer, e) for layer, e, _ in loads]) == [
        (layer, expert) for layer in range(2) for expert in range(4)
    ]
    assert all(cache.slot_of(layer, expert) == slot for layer, expert, slot in loads)
    assert cache.is_complete and cache.num_resident == 8
    cache.check()
    assert cache.fill() == []
    plan = cache.plan(demand(1, 0, [0, 3]))
    assert plan.hit_ids.tolist() == [0, 3]
    assert plan.hit_slots.tolist() == [cache.slot_of(0, 0), cache.slot_of(0, 3)]


def test_fill_needs_a_slot_for_each() -> None:
    with pytest.raises(ConfigError, match="fewer slots"):
        cache_of("oled", shape_of(2, 4, 1), 7).fill()


@pytest.mark.parametrize(
    ("num_slots", "num_staging", "named"),
    [(9, 1, "0 to 8"), (-1, 1, "0 to 8"), (7, 0, "1 or more"), (0, 0, "1 or more")],
)
def test_impossible_sizes_are_refused(num_slots: int, num_staging: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        cache_of("oled", shape_of(2, 4, 1), num_slots, num_staging=num_staging)


@pytest.mark.parametrize("policy", LIVE_POLICIES)
@bounded(15)
@given(seed=seeds, num_slots=st.integers(0, 18))
def test_a_forgotten_layer_starts_over(policy: str, seed: int, num_slots: int) -> None:
    shape = shape_of(3, 6, 2)
    random = np.random.default_rng(seed)
    cache = cache_of(policy, shape, num_slots, has_cpu_experts=True)
    slots, router = FakeSlots(cache), FakeRouter(shape, seed)
    for layer, expert, slot in cache.place():
        slots.copy_ahead(CopyPlan(np.array([layer * 6 + expert]), np.array([slot])))
    for _ in range(15):
        demands = router.forward(4)
        slots.copy_ahead(cache.start_forward(demands[0].context))
        for layer, demand in enumerate(demands):
            before = set(cache.resident_ids(layer).tolist())
            plan = cache.plan(demand)
            check_plan(cache, demand, plan, before)
            slots.carry_out(layer, plan)
            if random.random() < 0.2:
                lost = cache.resident_ids(layer).tolist()
                where = {cache.slot_of(layer, expert) for expert in lost}
                others = cache.num_resident - len(lost)
                num_staged = len(cache.staged_ids(layer))
                freed = cache.forget(layer)
                assert where <= set(freed.tolist()) and len(freed) == len(where) + num_staged
                assert not len(cache.resident_ids(layer)) and cache.num_resident == others
                slots.forget(freed)
                cache.check()
        cache.end_forward(outcome_of(demands[0].context))


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_plans_repeat(policy: str) -> None:
    """Two caches that see the same demands plan the same."""
    shape = shape_of(2, 9, 3)
    caches = [cache_of(policy, shape, 7, num_staging=2, has_cpu_experts=True) for _ in range(2)]
    router = FakeRouter(shape, seed=11)
    for _ in range(20):
        demands = router.forward()
        one, other = (cache.start_forward(demands[0].context) for cache in caches)
        assert one.slots.tolist() == other.slots.tolist()
        for demand in demands:
            one, other = (cache.plan(demand) for cache in caches)
            for field in ("hit_ids", "hit_slots", "load_ids", "load_slots", "cpu_ids"):
                assert getattr(one, field).tolist() == getattr(other, field).tolist()
            assert one.staged_slots.tolist() == other.staged_slots.tolist()
            assert one.prefetch.expert_ids.tolist() == other.prefetch.expert_ids.tolist()
        for cache in caches:
            cache.end_forward(outcome_of(demands[0].context))
    assert caches[0].capacities.tolist() == caches[1].capacities.tolist()


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in cache.py, as Ctrl-C would."""

    def __init__(self, line: int) -> None:
        self._lines_left = line
        self.has_come = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> "Interrupt | None":
        if not frame.f_code.co_filename.endswith("cache.py") or self.has_come:
            return None
        if event == "line":
            self._lines_left -= 1
            if self._lines_left < 0:
                self.has_come = True
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("num_slots", [5, 9])
def test_forgetting_mends_a_plan_that_was_cut_short(num_slots: int) -> None:
    shape = shape_of(2, 8, 3)
    line = 0
    while True:
        cache, router = cache_of("priority", shape, num_slots), FakeRouter(shape, seed=5)
        for demand in [*router.forward(), *router.forward()]:
            cache.plan(demand)
        interrupt, tracer = Interrupt(line), sys.gettrace()
        sys.settrace(interrupt)
        try:
            cache.plan(router.forward()[1])
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracer)
        if not interrupt.has_come:
            break
        cache.forget(1)
        cache.check()
        assert not len(cache.resident_ids(1)) and len(cache.resident_ids(0))
        for demand in router.forward():
            cache.plan(demand)
            cache.check()
        line += 1
    assert line > 30
