"""Counters against sums done by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from oled_moe.counters import ExpertCounters
from oled_moe.types import (
    CopyPlan,
    ForwardContext,
    ForwardRow,
    IntArray,
    LayerDemand,
    LayerPlan,
    Phase,
)

NONE: list[int] = []


def ids(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def copies(num: int) -> CopyPlan:
    return CopyPlan(np.arange(num), np.arange(num))


def observe(
    counters: ExpertCounters,
    forward_id: int,
    layer: int,
    *,
    hits: list[int],
    loads: list[int] = NONE,
    cpu: list[int] = NONE,
    staged: list[int] = NONE,
    num_ready: int = 0,
    num_prefetched: int = 0,
    capacity: int = 4,
    phase: Phase = Phase.DENOISE,
    blocks: dict[int, int] | None = None,
) -> None:
    """Show one layer of a forward; `blocks` are the requests in it and the blocks they are in."""
    wanted = sorted([*hits, *loads, *cpu, *staged])
    blocks = blocks or {0: 0}
    sizes = [len(wanted), *[0] * (len(blocks) - 1)]
    context = ForwardContext(
        forward_id,
        max(1, len(wanted)),
        tuple(
            ForwardRow(request, block, 0, phase, size)
            for (request, block), size in zip(blocks.items(), sizes, strict=True)
        ),
        np.ones(len(wanted), dtype=np.float32),
        np.zeros(len(wanted), dtype=np.uint8),
    )
    demand = LayerDemand.from_routing(
        layer,
        context,
        ids(wanted).reshape(-1, 1),
        np.ones((len(wanted), 1), dtype=np.float32),
        num_experts=16,
    )
    plan = LayerPlan(
        ids(hits),
        ids(hits),
        ids(loads),
        ids(loads),
        ids(cpu),
        ids([]),
        capacity,
        ids(staged),
        ids(staged),
        copies(num_prefetched),
    )
    counters(demand, plan, num_ready)


def test_ratios_are_means_of_layers_then_of_forwards() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1, 2], capacity=4)
    observe(counters, 0, 1, hits=[1], capacity=2)
    observe(counters, 1, 0, hits=[1, 2], loads=[3, 4], capacity=4)
    # Forward 0: (0/4 + 1/2) / 2 and (0/2 + 1/1) / 2; forward 1 has one layer: 2/4 and 2/4.
    assert counters.utilization.mean() == pytest.approx((0.25 + 0.5) / 2)
    assert counters.hit_rate.mean() == pytest.approx((0.5 + 0.5) / 2)
    assert counters.utilization.pooled() == pytest.approx(3 / 10)
    assert counters.hit_rate.pooled() == pytest.approx(3 / 7)


def test_a_mean_may_be_taken_on_the_way() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[1], loads=[2])
    assert counters.hit_rate.mean() == counters.hit_rate.mean() == 0.5
    observe(counters, 1, 0, hits=[1, 2])
    assert counters.hit_rate.mean() == 0.75


def test_only_denoising_forwards_count_for_ratios() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1, 2, 3], phase=Phase.PREFILL)
    observe(counters, 1, 0, hits=[1], loads=[5])
    observe(counters, 2, 0, hits=[], loads=[7], phase=Phase.COMMIT)
    assert (counters.hit_rate.mean(), counters.utilization.mean()) == (0.5, 0.25)
    # Bytes are moved by every forward.
    assert (counters.num_loads, counters.num_denoise_loads) == (5, 1)


def test_experts_run_elsewhere_are_demand_but_no_hits() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[1], loads=[2], cpu=[3, 4])
    assert (counters.hit_rate.mean(), counters.num_cpu_runs, counters.num_loads) == (0.25, 2, 1)


def test_experts_copied_ahead_are_ready_but_no_hits() -> None:
    counters = ExpertCounters()
    counters.copied_ahead(copies(3))
    observe(counters, 0, 0, hits=[1], staged=[2, 3], num_ready=1, loads=[4], num_prefetched=4)
    assert counters.hit_rate.mean() == 0.25 and counters.ready_rate.mean() == 0.5
    assert counters.utilization.mean() == 0.25 and counters.ready_utilization.mean() == 0.5
    assert (counters.num_prefetched, counters.num_useful, counters.num_late) == (7, 1, 1)
    counters.cancelled(2)
    # Seven asked for, two never begun, two used.
    assert counters.num_wasted == 3
    assert counters.num_loads == 1


def test_copies_ahead_count_in_every_phase() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], staged=[2], num_ready=1, phase=Phase.PREFILL)
    assert counters.num_useful == 1 and counters.ready_rate.mean() == 0


def test_effective_transfers_are_wanted_by_the_next_denoising_forward_of_the_layer() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1, 2, 3])
    observe(counters, 0, 1, hits=[], loads=[9])
    observe(counters, 1, 0, hits=[], loads=[8], phase=Phase.COMMIT)
    # Of 1, 2, 3 two are hits; 3 had to come again.
    observe(counters, 2, 0, hits=[1, 2], loads=[3])
    # Layer 1: 9 is not wanted.
    observe(counters, 2, 1, hits=[4])
    # Layer 0: 3 is wanted and here; layer 1 loaded nothing that could count.
    observe(counters, 3, 0, hits=[3], loads=[5])
    observe(counters, 3, 1, hits=[9])
    assert counters.effective_transfer_ratio == pytest.approx(3 / 5)


def test_staged_experts_are_transferred_too() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], staged=[1], loads=[2])
    observe(counters, 1, 0, hits=[1])
    assert counters.effective_transfer_ratio == 0.5


def test_block_boundaries_are_left_out_on_request() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1, 2], blocks={0: 0})
    observe(counters, 1, 0, hits=[1, 2], loads=[3], blocks={0: 0})
    observe(counters, 2, 0, hits=[1], loads=[4], blocks={0: 1})
    # 1 and 2 stay within the block; 3 does not, and is not wanted.
    assert counters.effective_transfer_ratio == pytest.approx(2 / 3)
    assert counters.effective_transfer_ratio_within_blocks == 1.0


def test_transfers_of_a_request_that_ended_have_no_next_forward() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1], blocks={0: 0})
    observe(counters, 1, 0, hits=[1], blocks={1: 0})
    assert counters.effective_transfer_ratio == 0.0
    observe(counters, 2, 0, hits=[], loads=[5], blocks={1: 0})
    observe(counters, 3, 0, hits=[5], blocks={1: 0, 2: 4})
    assert counters.effective_transfer_ratio == 1.0


def test_a_layer_without_slots_uses_none() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1], capacity=0)
    observe(counters, 0, 1, hits=[1], capacity=1)
    assert counters.utilization.mean() == 0.5


def test_nothing_seen_is_zero_and_not_nan() -> None:
    counters = ExpertCounters()
    assert counters.hit_rate.mean() == counters.hit_rate.pooled() == 0
    assert counters.effective_transfer_ratio == counters.num_wasted == 0
