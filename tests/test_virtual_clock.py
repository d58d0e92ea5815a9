"""The virtual clock against schedules by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from oled_moe.hardware import load_hardware
from oled_moe.types import (
    CopyPlan,
    ForwardContext,
    ForwardRow,
    IntArray,
    LayerDemand,
    LayerPlan,
    MoeShape,
    Phase,
)
from oled_moe.virtual_clock import LaneTimes, VirtualClock

TIMES = LaneTimes(
    transfer_s=10.0,
    cpu_base_s=3.0,
    cpu_token_s=1.0,
    device_base_s=1.0,
    device_token_s=0.5,
    activation_round_trip_s=2.0,
)
SHAPE = MoeShape(4, 16, 1, 1)


def demand(layer: int, tokens: dict[int, int]) -> LayerDemand:
    """Experts with their token counts, one expert a token."""
    topk_ids = np.array([[e] for e, n in sorted(tokens.items()) for _ in range(n)], dtype=np.int64)
    size = len(topk_ids)
    context = ForwardContext(
        0,
        size,
        (ForwardRow(0, 0, 0, Phase.DENOISE, size),),
        np.ones(size, dtype=np.float32),
        np.zeros(size, dtype=np.uint8),
    )
    weights = np.ones((size, 1), dtype=np.float32)
    return LayerDemand.from_routing(layer, context, topk_ids, weights, num_experts=16)


def ids(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def plan(
    *,
    hits: dict[int, int] | None = None,
    staged: dict[int, int] | None = None,
    loads: Sequence[tuple[int, int]] = (),
    cpu: Sequence[int] = (),
    freed: Sequence[int] = (),
    prefetch: Sequence[tuple[int, int]] = (),
    waves: tuple[int, ...] = (),
) -> LayerPlan:
    """Experts with their slots; prefetches are (layer · 16 + expert, slot)."""
    hits, staged = hits or {}, staged or {}
    return LayerPlan(
        ids(list(hits)),
        ids(list(hits.values())),
        ids([expert for expert, _ in loads]),
        ids([slot for _, slot in loads]),
        ids(cpu),
        ids(freed),
        4,
        ids(list(staged)),
        ids(list(staged.values())),
        copies(prefetch),
        waves,
    )


def copies(pairs: Sequence[tuple[int, int]]) -> CopyPlan:
    return CopyPlan(ids([number for number, _ in pairs]), ids([slot for _, slot in pairs]))


@pytest.fixture(params=[False, True], ids=["plain", "recorded"])
def clock(request: pytest.FixtureRequest) -> VirtualClock:
    """Recording spans must not change a time."""
    clock = VirtualClock(TIMES, SHAPE)
    clock.spans = [] if request.param else None
    return clock


def test_hits_alone(clock: VirtualClock) -> None:
    clock.apply(demand(0, {1: 1, 2: 3}), plan(hits={1: 0, 2: 1}))
    assert clock.now_s == (1 + 0.5) + (1 + 1.5)
    assert clock.work.device_s == clock.now_s and clock.work.copy_stall_s == 0


def test_one_load_hides_behind_hits(clock: VirtualClock) -> None:
    clock.apply(demand(0, {1: 1, 2: 1, 3: 2}), plan(hits={1: 0, 2: 1}, loads=[(3, 2)]))
    # Copy 0..10, hits 0..3, wait 3..10, kernel 10..12.
    assert clock.now_s == 12
    assert clock.work.copy_stall_s == 7 and clock.work.copy_s == 10


def test_copies_are_one_after_another(clock: VirtualClock) -> None:
    clock.apply(demand(0, {1: 1, 2: 1, 3: 1}), plan(loads=[(1, 0), (2, 1), (3, 2)]))
    assert clock.now_s == 30 + 1.5
    assert clock.work.demanded_copy_s == 30


def test_an_evicted_hit_is_read_before_its_slot_is_refilled(clock: VirtualClock) -> None:
    clock.apply(demand(0, {1: 1, 2: 1, 3: 1}), plan(hits={1: 0, 2: 5}, loads=[(3, 5)]))
    # Hits end at 1.5 and 3; the copy into slot 5 starts at 3.
    assert clock.now_s == 3 + 10 + 1.5


def test_staging_comes_round_behind_its_reader() -> None:
    times = replace(TIMES, device_base_s=20.0)
    clock = VirtualClock(times, SHAPE)
    clock.apply(demand(0, {1: 2, 2: 2}), plan(loads=[(1, 0), (2, 0)], freed=[0]))
    # Copy 0..10, kernel 10..31, copy 31..41, kernel 41..62.
    assert clock.now_s == 62
    clock = VirtualClock(times, SHAPE)
    clock.apply(demand(0, {1: 2, 2: 2}), plan(loads=[(1, 0), (2, 1)], freed=[0, 1]))
    # Two slots: copies 0..10..20, kernels 10..31..52.
    assert clock.now_s == 52


def test_the_cpu_ends_the_layer(clock: VirtualClock) -> None:
    clock.apply(demand(0, {1: 1, 2: 2, 3: 4}), plan(hits={1: 0}, cpu=[2, 3]))
    # Round trip 2, experts 3 + 2 and 3 + 4.
    assert clock.now_s == 2 + 5 + 7
    assert clock.work.cpu_s == 12 and clock.work.cpu_stall_s == 14 - 1.5


def test_copies_and_cpu_overlap(clock: VirtualClock) -> None:
    clock.apply(demand(0, {1: 1, 2: 1, 3: 1}), plan(loads=[(1, 0), (2, 1)], cpu=[3]))
    assert clock.now_s == 21.5 and clock.work.cpu_stall_s == 0


def test_the_shared_expert_runs_behind_the_demand() -> None:
    clock = VirtualClock(replace(TIMES, layer_base_s=4.0, shared_base_s=6.0), SHAPE)
    clock.run_dense(0, 2)
    clock.apply(demand(0, {1: 2}), plan(loads=[(1, 0)]))
    # Attention 0..4; copy 4..14; shared expert 4..10; kernel 14..16.
    assert clock.now_s == 16 and clock.work.device_s == 12 and clock.work.copy_stall_s == 4
    clock.apply(demand(1, {1: 2}), plan(hits={1: 0}))
    assert clock.now_s == 16 + 6 + 2


def test_waves_block(clock: VirtualClock) -> None:
    asked = demand(0, {1: 1, 2: 1, 3: 1, 4: 1})
    clock.apply(asked, plan(hits={1: 0}, loads=[(2, 1), (3, 2), (4, 1)], waves=(2, 1)))
    # Two copies 0..20, three kernels to 24.5, one copy to 34.5, one kernel.
    assert clock.now_s == 36
    assert clock.work.copy_stall_s == 20 + 10


def test_the_cpu_waits_for_copies_that_block(clock: VirtualClock) -> None:
    clock.apply(demand(0, {1: 1, 2: 1}), plan(loads=[(1, 0)], cpu=[2], waves=(1,)))
    assert clock.now_s == 10 + 2 + 4


def test_a_copy_ahead_in_time_costs_nothing(clock: VirtualClock) -> None:
    clock.copy_ahead(copies([(16 + 3, 7)]))
    clock.apply(demand(0, {1: 1, 2: 18}), plan(hits={1: 0, 2: 1}))
    assert clock.now_s == 1.5 + 10
    start_s = clock.now_s
    clock.apply(demand(1, {3: 1, 4: 1}), plan(staged={3: 7}, hits={4: 2}))
    assert clock.num_ready == 1
    assert clock.now_s == start_s + 3 and clock.work.copy_stall_s == 0


def test_a_copy_ahead_under_way_is_waited_for(clock: VirtualClock) -> None:
    clock.copy_ahead(copies([(16 + 3, 7)]))
    clock.apply(demand(0, {1: 1}), plan(hits={1: 0}))
    clock.apply(demand(1, {3: 1, 4: 1}), plan(staged={3: 7}, loads=[(4, 2)]))
    # Copy ahead 0..10, demand known at 1.5, kernel 10..11.5; load 10..20, kernel 20..21.5.
    assert clock.num_ready == 0
    assert clock.now_s == 21.5


def test_a_copy_ahead_that_has_not_begun_becomes_urgent(clock: VirtualClock) -> None:
    clock.copy_ahead(copies([(16 + 3, 7), (32 + 5, 8), (16 + 4, 9)]))
    clock.apply(demand(0, {1: 1}), plan(hits={1: 0}))
    clock.apply(demand(1, {3: 1, 4: 1}), plan(staged={3: 7, 4: 9}))
    # 3 is under way to 10; 4 overtakes the copy for layer 2 and is there at 20.
    assert clock.num_ready == 0 and clock.now_s == 21.5
    assert clock.num_waiting == 1
    clock.apply(demand(2, {5: 1}), plan(staged={5: 8}))
    # Demanded at 21.5, and the copy lane was free from 20 on.
    assert clock.now_s == 30 + 1.5 and clock.num_ready == 0


def test_demand_goes_before_copies_ahead(clock: VirtualClock) -> None:
    clock.apply(demand(0, {1: 1}), plan(loads=[(1, 0)], prefetch=[(16 + 3, 7)]))
    # Load 0..10, copy ahead 10..20; kernel to 11.5.
    assert clock.now_s == 11.5
    clock.apply(demand(1, {3: 1}), plan(staged={3: 7}))
    assert clock.now_s == 21.5


def test_copies_ahead_into_freed_slots_are_cancelled(clock: VirtualClock) -> None:
    clock.copy_ahead(copies([(16 + 3, 7), (16 + 4, 8), (16 + 5, 9)]))
    clock.apply(demand(0, {1: 1}), plan(hits={1: 0}))
    clock.apply(demand(1, {2: 1, 6: 1}), plan(hits={2: 1}, loads=[(6, 9)], freed=[7, 8]))
    # The first is under way and completes, the others never begin.
    assert clock.num_cancelled == 2 and clock.num_waiting == 0
    assert clock.now_s == 21.5
    assert clock.work.copy_s == 20 and clock.work.demanded_copy_s == 10


def test_a_wanted_copy_into_a_freed_slot_is_made(clock: VirtualClock) -> None:
    """A staged expert that will not stay frees its slot, but only once it was read."""
    clock.copy_ahead(copies([(16 + 3, 7)]))
    clock.apply(demand(1, {3: 1, 4: 1}), plan(staged={3: 7}, loads=[(4, 7)], freed=[7]))
    # Copied on demand 0..10, read to 11.5; the load into the same slot 11.5..21.5, read to 23.
    assert clock.num_cancelled == 0 and clock.now_s == 23


def test_a_slot_promised_again_loses_its_waiting_copy(clock: VirtualClock) -> None:
    clock.copy_ahead(copies([(16 + 3, 7), (16 + 4, 8)]))
    clock.apply(demand(0, {1: 1}), plan(hits={1: 0}, prefetch=[(32 + 2, 8)]))
    # The copy for expert 3 and the new one are left.
    assert clock.num_cancelled == 1 and clock.num_waiting == 2


def test_copies_ahead_run_between_forwards(clock: VirtualClock) -> None:
    times = replace(TIMES, head_base_s=50.0)
    clock = VirtualClock(times, SHAPE)
    clock.apply(demand(0, {1: 1}), plan(hits={1: 0}, prefetch=[(16 + 3, 7)]))
    clock.end_forward(1)
    clock.apply(demand(1, {3: 1}), plan(staged={3: 7}))
    assert clock.num_ready == 1 and clock.now_s == 1.5 + 50 + 1.5


def test_times_scale_with_the_model() -> None:
    hardware = load_hardware("testbed-a")
    small, large = LaneTimes.of(hardware, 1000), LaneTimes.of(hardware, 4000)
    assert large.device_base_s == pytest.approx(4 * small.device_base_s)
    assert large.transfer_s - small.transfer_s == pytest.approx(3000 / hardware.copy_bytes_per_s)
    sized = LaneTimes.of(hardware, 1000, {"dense_bytes_per_layer": 8000, "head_bytes": 0})
    assert sized.head_base_s == 0
    assert sized.shared_base_s == pytest.approx(1000 / hardware.device_weight_bytes_per_s)
    assert sized.layer_base_s == pytest.approx(
        hardware.layer_overhead_s + 7000 / hardware.device_weight_bytes_per_s
    )
