"""SlotPool: no slot is refilled before its reader is done, none is read before it is filled."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from fakes import CountedCopy, context_of, demand_of, random_store
from torch import Tensor

from oled_moe.lanes import DONE, InlineLane, Lane, ThreadEvent, ThreadLane
from oled_moe.slots import RatedCopy, SlotPool, poison
from oled_moe.store import ExpertWeights, HostExpertStore
from oled_moe.types import NO_COPIES, CopyPlan, LayerDemand, LayerPlan

NUM_EXPERTS = 6


@pytest.fixture(scope="module")
def store() -> HostExpertStore:
    return random_store(2, NUM_EXPERTS)


@pytest.fixture(params=["inline", "thread", "threads"])
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    made: Lane = InlineLane()
    if request.param != "inline":
        made = ThreadLane("copy", num_threads=3 if request.param == "threads" else 1)
    yield made
    made.close()


def a_demand(layer: int = 0) -> LayerDemand:
    return demand_of(layer, context_of(0, [1.0]), [[0]], [[1.0]], num_experts=NUM_EXPERTS)


def plan_of(
    *,
    hits: Sequence[tuple[int, int]] = (),
    loads: Sequence[tuple[int, int]] = (),
    freed: Sequence[int] = (),
    staged: Sequence[tuple[int, int]] = (),
    prefetch: CopyPlan = NO_COPIES,
    waves: Sequence[int] = (),
) -> LayerPlan:
    """A plan from (expert, slot) pairs."""
    hit_array = np.array(hits, dtype=np.int64).reshape(-1, 2)
    load_array = np.array(loads, dtype=np.int64).reshape(-1, 2)
    return LayerPlan(
        hit_array[:, 0],
        hit_array[:, 1],
        load_array[:, 0],
        load_array[:, 1],
        np.empty(0, dtype=np.int64),
        np.array(freed, dtype=np.int64),
        capacity=4,
        staged_ids=np.array([expert for expert, _ in staged], dtype=np.int64),
        staged_slots=np.array([slot for _, slot in staged], dtype=np.int64),
        prefetch=prefetch,
        wave_sizes=tuple(waves),
    )


def ahead_of(*copies: tuple[int, int, int]) -> CopyPlan:
    """Copies ahead from (layer, expert, slot)."""
    numbers = [layer * NUM_EXPERTS + expert for layer, expert, _ in copies]
    return CopyPlan(np.array(numbers), np.array([slot for _, _, slot in copies]))


def holds(pool: SlotPool, slot: int, expected: ExpertWeights) -> bool:
    return all(map(torch.equal, pool.weights(slot), expected))


def is_poisoned(pool: SlotPool, slot: int) -> bool:
    return all(bool(matrix.isnan().all()) for matrix in pool.weights(slot))


def read_all(pool: SlotPool, plan: LayerPlan) -> None:
    """Readers that are done as soon as they are submitted."""
    for slot in plan.hit_slots.tolist():
        pool.submitted_readers([slot], DONE)
    for index, slot in enumerate(plan.load_slots.tolist()):
        pool.ready(index).wait()
        pool.submitted_readers([slot], DONE)


def test_fill_brings_every_expert_and_tells_how_far_it_is(
    store: HostExpertStore, lane: Lane
) -> None:
    pool = SlotPool(store.layout, 12, lane, store.read_into, num_experts=NUM_EXPERTS)
    loads = [(layer, expert, 11 - 6 * layer - expert) for layer in range(2) for expert in range(6)]
    told: list[tuple[int, int]] = []
    pool.fill(loads, lambda done, total: told.append((done, total)))
    assert told == [(done, 12) for done in range(1, 13)]
    assert all(holds(pool, slot, store.weights(layer, expert)) for layer, expert, slot in loads)
    assert pool.num_filled == pool.num_slots == 12


def test_plan_is_carried_out(store: HostExpertStore, lane: Lane) -> None:
    pool = SlotPool(store.layout, 3, lane, store.read_into, num_experts=NUM_EXPERTS)
    plan = plan_of(loads=[(4, 2), (1, 0)])
    pool.apply(a_demand(layer=1), plan)
    read_all(pool, plan)
    assert holds(pool, 2, store.weights(1, 4)) and holds(pool, 0, store.weights(1, 1))
    assert pool.num_filled == 2


class NotedReads:
    """A copy that notes its experts, and readers that say what they found in their slot."""

    def __init__(self, store: HostExpertStore) -> None:
        self.store = store
        self.events: list[str] = []

    def __call__(self, layer: int, expert: int, slot: Tensor) -> None:
        self.events.append(f"copy {expert}")
        self.store.read_into(layer, expert, slot)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_refill_never_overtakes_its_reader(store: HostExpertStore, num_threads: int) -> None:
    """Every copy through one slot: each waits until the reader of the one before is done."""
    noted = NotedReads(store)
    copies = ThreadLane("copy", num_threads=num_threads, jitter_s=0.001, seed=1)
    readers = ThreadLane("device", jitter_s=0.001, seed=2)
    pool = SlotPool(store.layout, 1, copies, noted, num_experts=NUM_EXPERTS)
    pool.fill([(0, 5, 0)])
    plan = plan_of(hits=[(5, 0)], loads=[(expert, 0) for expert in range(5)], freed=[0])

    def reader(expert: int) -> None:
        found = "right" if holds(pool, 0, store.weights(0, expert)) else "wrong"
        noted.events.append(f"read {expert} {found}")

    for _ in range(4):
        noted.events.clear()
        pool.apply(a_demand(), plan)
        # The hit's reader is not even submitted yet: nothing may move.
        assert noted.events == []
        pool.submitted_readers([0], readers.submit(lambda: reader(5)))
        for index in range(5):
            work = readers.submit(lambda e=index: reader(e), after=(pool.ready(index),))
            pool.submitted_readers([0], work)
        pool.release(plan)
        work.wait()
        expected = ["read 5 right"]
        for expert in range(5):
            expected += [f"copy {expert}", f"read {expert} right"]
        assert noted.events == expected
        pool.fill([(0, 5, 0)])
    copies.close()
    readers.close()


def test_copies_that_wait_hold_back_those_behind_them(store: HostExpertStore) -> None:
    """Copies keep their order, so demand that was ranked first arrives first."""
    copy = CountedCopy(store)
    pool = SlotPool(store.layout, 2, InlineLane(), copy, num_experts=NUM_EXPERTS)
    pool.fill([(0, 0, 0)])
    plan = plan_of(hits=[(0, 0)], loads=[(1, 1), (2, 0), (3, 1)])
    pool.apply(a_demand(), plan)
    assert copy.copied[1:] == [(0, 1)]
    pool.submitted_readers([0], DONE)
    assert copy.copied[1:] == [(0, 1), (0, 2)]
    pool.submitted_readers([1], DONE)
    assert copy.copied[1:] == [(0, 1), (0, 2), (0, 3)]
    assert pool.num_filled == 2


def test_what_is_free_is_nan(store: HostExpertStore, lane: Lane) -> None:
    pool = SlotPool(
        store.layout, 3, lane, store.read_into, is_poisoned=True, num_experts=NUM_EXPERTS
    )
    assert all(is_poisoned(pool, slot) for slot in range(3))
    plan = plan_of(loads=[(0, 0), (1, 1)], freed=[1, 1])
    pool.apply(a_demand(), plan)
    read_all(pool, plan)
    assert holds(pool, 1, store.weights(0, 1))
    pool.release(plan)
    assert [is_poisoned(pool, slot) for slot in range(3)] == [False, True, True]
    assert holds(pool, 0, store.weights(0, 0))


def test_release_waits_for_the_reader(store: HostExpertStore) -> None:
    pool = SlotPool(
        store.layout, 1, InlineLane(), store.read_into, is_poisoned=True, num_experts=NUM_EXPERTS
    )
    plan = plan_of(loads=[(0, 0)], freed=[0])
    pool.apply(a_demand(), plan)
    reader = ThreadEvent()
    pool.submitted_readers([0], reader)
    release = threading.Thread(target=pool.release, args=(plan,))
    release.start()
    assert holds(pool, 0, store.weights(0, 0))
    reader.fire()
    release.join()
    assert is_poisoned(pool, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_nan_in_every_format(dtype: torch.dtype) -> None:
    slot = torch.zeros(64, dtype=torch.uint8)
    poison(slot)
    assert slot.view(dtype).isnan().all()


def test_slot_is_nan_while_it_is_copied(store: HostExpertStore) -> None:
    class Watched:
        """A store that looks at the slot just before it fills it."""

        layout, num_layers, num_experts = store.layout, 2, NUM_EXPERTS
        was_poisoned = False

        def read_into(self, layer: int, expert: int, slot: Tensor) -> None:
            self.was_poisoned = bool((slot == 0xFF).all())
            store.read_into(layer, expert, slot)

        def close(self) -> None: ...

    watched = Watched()
    slot = torch.zeros(store.layout.slot_bytes, dtype=torch.uint8)
    RatedCopy(watched, bytes_per_s=1e12, latency_s=0.0)(1, 2, slot)
    assert watched.was_poisoned
    assert all(map(torch.equal, store.layout.views(slot), store.weights(1, 2)))


@pytest.mark.parametrize("fail_at", range(3))
def test_pool_is_usable_after_a_failed_copy(store: HostExpertStore, fail_at: int) -> None:
    copies = ThreadLane("copy", num_threads=2)
    pool = SlotPool(store.layout, 2, copies, CountedCopy(store, [fail_at]), num_experts=NUM_EXPERTS)
    # One slot three times: the last copy is never queued, its slot's reader not submitted.
    plan = plan_of(loads=[(0, 0), (1, 1), (2, 0), (3, 0)])
    pool.apply(a_demand(), plan)
    readers = []
    for index in range(3):
        readers.append(copies.submit(lambda: None, after=(pool.ready(index),)))
        pool.submitted_readers([plan.load_slots.tolist()[index]], readers[-1])
    with pytest.raises(OSError, match=f"copy {fail_at} fails"):
        for event in readers:
            event.wait()
    pool.drain(readers)
    again = plan_of(loads=[(4, 0), (5, 1)], freed=[0])
    pool.apply(a_demand(layer=1), again)
    read_all(pool, again)
    assert holds(pool, 0, store.weights(1, 4)) and holds(pool, 1, store.weights(1, 5))
    copies.close()


def test_drain_waits_for_copies_and_readers(store: HostExpertStore) -> None:
    """Nothing may write into a slot once it is given away."""
    copies, readers = ThreadLane("copy", jitter_s=0.002), ThreadLane("device", jitter_s=0.002)
    copy, read = CountedCopy(store), []
    pool = SlotPool(store.layout, 4, copies, copy, num_experts=NUM_EXPERTS)
    plan = plan_of(loads=[(expert, expert) for expert in range(4)])
    pool.apply(a_demand(), plan)
    events = [readers.submit(lambda n=n: read.append(n), after=(pool.ready(n),)) for n in range(4)]
    pool.drain(events)
    assert len(copy.copied) == 4 and read == [0, 1, 2, 3]
    copies.close()
    readers.close()


# ---- copies ahead of their demand ----


class GatedCopy:
    """Copies from a store once the gate is open; notes what was begun."""

    def __init__(self, store: HostExpertStore) -> None:
        self._store = store
        self.gate = threading.Event()
        self.begun: list[tuple[int, int]] = []

    def __call__(self, layer: int, expert: int, slot: Tensor) -> None:
        self.begun.append((layer, expert))
        assert self.gate.wait(60)
        self._store.read_into(layer, expert, slot)


def test_a_guess_is_there_when_its_layer_wants_it(store: HostExpertStore, lane: Lane) -> None:
    pool = SlotPool(store.layout, 3, lane, store.read_into, num_experts=NUM_EXPERTS)
    pool.copy_ahead(ahead_of((1, 4, 2)))
    plan = plan_of(staged=[(4, 2)], loads=[(0, 0)], prefetch=ahead_of((0, 5, 1)))
    pool.apply(a_demand(layer=1), plan)
    pool.ready_staged(2).wait()
    assert holds(pool, 2, store.weights(1, 4))
    pool.submitted_readers([2], DONE)
    read_all(pool, plan)
    later = plan_of(staged=[(5, 1)])
    pool.apply(a_demand(layer=0), later)
    pool.ready_staged(1).wait()
    assert holds(pool, 1, store.weights(0, 5)) and pool.num_filled == 3


def test_demand_overtakes_guesses_and_unwanted_ones_are_never_made(store: HostExpertStore) -> None:
    copy, copies = GatedCopy(store), ThreadLane("copy")
    pool = SlotPool(store.layout, 4, copies, copy, num_experts=NUM_EXPERTS)
    pool.copy_ahead(ahead_of((0, 0, 0), (0, 1, 1), (0, 2, 2)))
    while not copy.begun:
        pass
    # Guess 0 is under way, 1 is not wanted, 2 is wanted now; one expert was not guessed.
    plan = plan_of(staged=[(2, 2)], loads=[(5, 3)], freed=[0, 1, 3])
    pool.apply(a_demand(), plan)
    assert pool.num_staged_ready == 0 and pool.num_cancelled == 1
    copy.gate.set()
    pool.ready_staged(2).wait()
    pool.submitted_readers([2], DONE)
    read_all(pool, plan)
    pool.release(plan)
    copies.close()
    assert copy.begun == [(0, 0), (0, 2), (0, 5)]
    assert holds(pool, 2, store.weights(0, 2)) and holds(pool, 3, store.weights(0, 5))


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_slot_is_refilled_behind_an_unwanted_guess(
    store: HostExpertStore, is_under_way: bool
) -> None:
    copy, copies, blocker = GatedCopy(store), ThreadLane("copy", num_threads=2), threading.Event()
    pool = SlotPool(store.layout, 1, copies, copy, num_experts=NUM_EXPERTS)
    if not is_under_way:
        for _ in range(2):
            copies.submit(lambda: blocker.wait(60) and None)
    pool.copy_ahead(ahead_of((0, 0, 0)))
    while is_under_way and not copy.begun:
        pass
    plan = plan_of(loads=[(3, 0)], freed=[0])
    pool.apply(a_demand(), plan)
    blocker.set()
    copy.gate.set()
    pool.ready(0).wait()
    assert holds(pool, 0, store.weights(0, 3))
    assert ((0, 0) in copy.begun) is is_under_way
    read_all(pool, plan)
    copies.close()


def test_a_failed_guess_hurts_only_who_wanted_it(store: HostExpertStore, lane: Lane) -> None:
    if isinstance(lane, InlineLane):
        pytest.skip("inline work raises where it is submitted")
    copy = CountedCopy(store, fail_at=[0, 1])
    pool = SlotPool(store.layout, 3, lane, copy, num_experts=NUM_EXPERTS)
    pool.copy_ahead(ahead_of((0, 0, 0)))
    pool.copy_ahead(ahead_of((0, 1, 1)))
    while len(copy.copied) < 2:
        pass
    # Nobody wants guess 0: its slot is simply filled again.
    plan = plan_of(loads=[(2, 0)], staged=[(1, 1)], freed=[0])
    pool.apply(a_demand(), plan)
    with pytest.raises(OSError, match="fails"):
        pool.ready_staged(1).wait()
    pool.ready(0).wait()
    assert holds(pool, 0, store.weights(0, 2))


def test_freed_guesses_are_poisoned_once_their_copy_ended(store: HostExpertStore) -> None:
    copy, copies = GatedCopy(store), ThreadLane("copy")
    pool = SlotPool(store.layout, 2, copies, copy, num_experts=NUM_EXPERTS, is_poisoned=True)
    pool.copy_ahead(ahead_of((0, 0, 0)))
    while not copy.begun:
        pass
    plan = plan_of(freed=[0])
    pool.apply(a_demand(), plan)
    copy.gate.set()
    pool.release(plan)
    assert is_poisoned(pool, 0)
    copies.close()


def test_waves_keep_copies_behind_the_kernels_before(store: HostExpertStore, lane: Lane) -> None:
    copy = CountedCopy(store)
    pool = SlotPool(store.layout, 3, lane, copy, num_experts=NUM_EXPERTS)
    plan = plan_of(loads=[(0, 0), (1, 1), (2, 2), (3, 0)], waves=[2, 2])
    pool.apply(a_demand(), plan)
    for index, slot in ((0, 0), (1, 1)):
        pool.ready(index).wait()
        pool.submitted_readers([slot], DONE)
    assert sorted(copy.copied) == [(0, 0), (0, 1)]
    pool.next_wave()
    for index, slot in ((2, 2), (3, 0)):
        pool.ready(index).wait()
        pool.submitted_readers([slot], DONE)
    assert holds(pool, 0, store.weights(0, 3)) and len(copy.copied) == 4
