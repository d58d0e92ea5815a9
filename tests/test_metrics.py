"""What one request took, built from counters."""

import math

import pytest

from oled_moe.counters import ExpertCounters
from oled_moe.decoding import DecodingCounters
from oled_moe.metrics import GenerationStats, generation_stats


def stats_of(
    experts: ExpertCounters,
    decoding: DecodingCounters | None = None,
    *,
    num_tokens: int = 10,
    planning_s: float = 0.0,
) -> GenerationStats:
    return generation_stats(
        decoding or DecodingCounters(),
        experts,
        num_tokens=num_tokens,
        expert_bytes=100,
        max_resident_experts=7,
        expert_memory_bytes=800,
        planning_s=planning_s,
    )


def test_nothing_seen_is_zero_and_not_nan() -> None:
    stats = stats_of(ExpertCounters(), DecodingCounters(start_s=0.0), num_tokens=0)
    numbers = [getattr(stats, name) for name in GenerationStats.__dataclass_fields__]
    assert all(math.isfinite(number) for number in numbers)
    assert stats.hit_rate == stats.tpot_s == stats.tokens_per_forward == 0


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


def test_counts_become_bytes() -> None:
    experts = ExpertCounters()
    experts.num_loads, experts.num_cpu_runs = 5, 2
    stats = stats_of(experts)
    assert (stats.expert_loads, stats.bytes_loaded, stats.cpu_expert_runs) == (5, 500, 2)
