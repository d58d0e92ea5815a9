"""Counters against sums done by hand."""

import math

import numpy as np
import pytest

from oled_moe.decoding import DecodingCounters
from oled_moe.metrics import ExpertCounters, GenerationStats
from oled_moe.types import ForwardContext, ForwardRow, LayerDemand, LayerPlan, Phase

NONE: list[int] = []


def observe(
    counters: ExpertCounters,
    forward_id: int,
    layer: int,
    *,
    hits: list[int],
    loads: list[int],
    cpu: list[int] = NONE,
    capacity: int = 4,
    phase: Phase = Phase.DENOISE,
) -> None:
    wanted = sorted([*hits, *loads, *cpu])
    row = ForwardRow(0, 0, 0, phase, len(wanted))
    num_tokens = len(wanted)
    context = ForwardContext(
        forward_id,
        max(1, num_tokens),
        (row,),
        np.ones(num_tokens, dtype=np.float32),
        np.zeros(num_tokens, dtype=np.uint8),
    )
    demand = LayerDemand.from_routing(
        layer,
        context,
        np.array(wanted, dtype=np.int64).reshape(-1, 1),
        np.ones((num_tokens, 1), dtype=np.float32),
        num_experts=16,
    )

    def ids(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    counters(
        demand,
        LayerPlan(
            ids(hits), ids(hits), ids(loads), ids(loads), ids(cpu), ids([]), capacity=capacity
        ),
    )


def stats_of(
    counters: ExpertCounters,
    decoding: DecodingCounters | None = None,
    *,
    num_tokens: int = 10,
    planning_s: float = 0.0,
) -> GenerationStats:
    return counters.stats(
        decoding or DecodingCounters(),
        num_tokens=num_tokens,
        expert_bytes=100,
        max_resident_experts=7,
        expert_memory_bytes=800,
        planning_s=planning_s,
    )


def test_ratios_are_means_of_layers_then_of_forwards() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1, 2], capacity=4)
    observe(counters, 0, 1, hits=[1], loads=[], capacity=2)
    observe(counters, 1, 0, hits=[1, 2], loads=[3, 4], capacity=4)
    # Forward 0: (0/4 + 1/2) / 2 and (0/2 + 1/1) / 2; forward 1 has one layer: 2/4 and 2/4.
    stats = stats_of(counters)
    assert stats.expert_cache_utilization == pytest.approx((0.25 + 0.5) / 2)
    assert stats.hit_rate == pytest.approx((0.5 + 0.5) / 2)
    assert stats.pooled_utilization == pytest.approx(3 / 10)
    assert stats.pooled_hit_rate == pytest.approx(3 / 7)


def test_only_denoising_forwards_count_for_ratios() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1, 2, 3], phase=Phase.PREFILL)
    observe(counters, 1, 0, hits=[1], loads=[5])
    observe(counters, 2, 0, hits=[], loads=[7], phase=Phase.COMMIT)
    stats = stats_of(counters)
    assert (stats.hit_rate, stats.expert_cache_utilization) == (0.5, 0.25)
    # Bytes are moved by every forward.
    assert (stats.expert_loads, stats.bytes_loaded) == (5, 500)


def test_experts_run_elsewhere_are_demand_but_no_hits() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[1], loads=[2], cpu=[3, 4])
    stats = stats_of(counters)
    assert (stats.hit_rate, stats.cpu_expert_runs, stats.expert_loads) == (0.25, 2, 1)


def test_effective_transfers_are_wanted_by_the_next_denoising_forward_of_the_layer() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1, 2, 3])
    observe(counters, 0, 1, hits=[], loads=[9])
    observe(counters, 1, 0, hits=[], loads=[8], phase=Phase.COMMIT)
    # Of 1, 2, 3 two are hits; 3 had to come again.
    observe(counters, 2, 0, hits=[1, 2], loads=[3])
    # Layer 1: 9 is not wanted.
    observe(counters, 2, 1, hits=[4], loads=[])
    # Layer 0: 3 is wanted and here; layer 1 loaded nothing that could count.
    observe(counters, 3, 0, hits=[3], loads=[5])
    observe(counters, 3, 1, hits=[9], loads=[])
    assert stats_of(counters).effective_transfer_ratio == pytest.approx(3 / 5)


def test_nothing_seen_is_zero_and_not_nan() -> None:
    stats = stats_of(ExpertCounters(), DecodingCounters(start_s=0.0), num_tokens=0)
    numbers = [getattr(stats, name) for name in GenerationStats.__dataclass_fields__]
    assert all(math.isfinite(number) for number in numbers)
    assert stats.hit_rate == stats.tpot_s == stats.tokens_per_forward == 0


def test_a_layer_without_slots_uses_none() -> None:
    counters = ExpertCounters()
    observe(counters, 0, 0, hits=[], loads=[1], capacity=0)
    observe(counters, 0, 1, hits=[1], loads=[], capacity=1)
    assert stats_of(counters).expert_cache_utilization == 0.5


def test_times_and_forwards() -> None:
    decoding = DecodingCounters(
        num_prefill_forwards=2,
        num_denoise_forwards=6,
        num_commit_forwards=2,
        start_s=100.0,
        prefill_end_s=101.0,
        first_token_s=103.0,
        last_token_s=111.0,
    )
    stats = stats_of(ExpertCounters(), decoding, num_tokens=20, planning_s=1.1)
    assert stats.tokens_per_forward == 20 / 8
    assert stats.ttft_s == 3.0
    assert stats.tpot_s == 10.0 / 20
    assert stats.policy_overhead == pytest.approx(0.1)
    counts = (
        stats.num_prefill_forwards,
        stats.num_denoise_forwards,
        stats.num_commit_forwards,
        stats.max_resident_experts,
        stats.expert_memory_bytes,
    )
    assert counts == (2, 6, 2, 7, 800)
