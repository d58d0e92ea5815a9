"""Counters of one request: plain numbers out.

Definitions: policies.md 3 and trace-format.md, replay rule 6. Ratios are means over the layers of
a forward, then over the forwards that denoise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oled_moe.decoding import DecodingCounters
from oled_moe.types import IntArray, LayerDemand, LayerPlan


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one answer took.

    `num_denoise_forwards` is the reference's num_forwards. `tokens_per_forward`: answer tokens per
    denoising or commit forward. `ttft_s`: to the first committed token; `tpot_s`: from the end of
    prefill to the last token, per token, commits included. `expert_cache_utilization`: share of a
    layer's slots whose expert was demanded, before anything moved; `hit_rate`: share of the demand
    that was resident; `pooled_*`: the same as ratios of sums. `effective_transfer_ratio`: share of
    experts loaded by a denoising forward that the layer's next denoising forward found resident
    and wanted. `max_resident_experts`: most ever held since the engine began, slots and staging,
    all layers; `expert_memory_bytes`: what those slots may take at most. `policy_overhead`: share
    of the request's time spent deciding.

    Units: seconds, bytes.
    """

    num_prefill_forwards: int
    num_denoise_forwards: int
    num_commit_forwards: int
    tokens_per_forward: float
    ttft_s: float
    tpot_s: float
    expert_cache_utilization: float
    hit_rate: float
    pooled_utilization: float
    pooled_hit_rate: float
    effective_transfer_ratio: float
    expert_loads: int
    bytes_loaded: int
    cpu_expert_runs: int
    max_resident_experts: int
    expert_memory_bytes: int
    policy_overhead: float


class ExpertCounters:
    """Watches demands and plans of one request; an observer of `OffloadedExperts`."""

    def __init__(self) -> None:
        self.num_loads = 0
        self.num_cpu_runs = 0
        self._utilization = _MeanOfMeans()
        self._hit_rate = _MeanOfMeans()
        self._num_transferred = 0
        self._num_reused = 0
        self._last_loads: dict[int, IntArray] = {}

    def __call__(self, demand: LayerDemand, plan: LayerPlan) -> None:
        self.num_loads += len(plan.load_ids)
        self.num_cpu_runs += len(plan.cpu_ids)
        if not demand.context.is_denoise:
            return
        forward_id, num_hits = demand.context.forward_id, len(plan.hit_ids)
        self._utilization.add(forward_id, num_hits, plan.capacity)
        self._hit_rate.add(forward_id, num_hits, plan.num_demanded)
        earlier = self._last_loads.get(demand.layer)
        if earlier is not None:
            self._num_transferred += len(earlier)
            self._num_reused += int(np.isin(earlier, plan.hit_ids).sum())
        self._last_loads[demand.layer] = plan.load_ids

    def stats(
        self,
        counters: DecodingCounters,
        *,
        num_tokens: int,
        expert_bytes: int,
        max_resident_experts: int,
        expert_memory_bytes: int,
        planning_s: float,
    ) -> GenerationStats:
        """Everything as one value. Units: seconds, bytes."""
        num_forwards = counters.num_denoise_forwards + counters.num_commit_forwards
        decode_s = counters.last_token_s - counters.prefill_end_s
        total_s = counters.last_token_s - counters.start_s
        return GenerationStats(
            num_prefill_forwards=counters.num_prefill_forwards,
            num_denoise_forwards=counters.num_denoise_forwards,
            num_commit_forwards=counters.num_commit_forwards,
            tokens_per_forward=_ratio(num_tokens, num_forwards),
            ttft_s=counters.first_token_s - counters.start_s,
            tpot_s=_ratio(decode_s, num_tokens),
            expert_cache_utilization=self._utilization.mean(),
            hit_rate=self._hit_rate.mean(),
            pooled_utilization=self._utilization.pooled(),
            pooled_hit_rate=self._hit_rate.pooled(),
            effective_transfer_ratio=_ratio(self._num_reused, self._num_transferred),
            expert_loads=self.num_loads,
            bytes_loaded=self.num_loads * expert_bytes,
            cpu_expert_runs=self.num_cpu_runs,
            max_resident_experts=max_resident_experts,
            expert_memory_bytes=expert_memory_bytes,
            policy_overhead=_ratio(planning_s, total_s),
        )


class _MeanOfMeans:
    """Ratios averaged within a forward, then over forwards; and the ratio of sums."""

    def __init__(self) -> None:
        self._forward_id = -1
        self._ratios: list[float] = []
        self._means: list[float] = []
        self._sum_parts = 0
        self._sum_wholes = 0

    def add(self, forward_id: int, part: int, whole: int) -> None:
        if forward_id != self._forward_id:
            self._close_forward()
            self._forward_id = forward_id
        self._ratios.append(_ratio(part, whole))
        self._sum_parts += part
        self._sum_wholes += whole

    def mean(self) -> float:
        self._close_forward()
        return _ratio(sum(self._means), len(self._means))

    def pooled(self) -> float:
        return _ratio(self._sum_parts, self._sum_wholes)

    def _close_forward(self) -> None:
        if self._ratios:
            self._means.append(sum(self._ratios) / len(self._ratios))
            self._ratios = []


def _ratio(part: float, whole: float) -> float:
    """part / whole, 0 where there is no whole."""
    return part / whole if whole else 0.0


def combine_stats(stats: Sequence[GenerationStats], num_tokens: Sequence[int]) -> GenerationStats:
    """Several answers as one; `num_tokens` are the answers' lengths.

    Counts add up and maxima stay maxima. Ratios of experts are weighted by denoising forwards, the
    transfer ratio by loads, times per token by tokens; `ttft_s` is the mean over answers, and
    `policy_overhead` is weighted by the time spent decoding. Needs at least one answer.
    """
    num_forwards = [each.num_denoise_forwards for each in stats]
    decode_s = [each.tpot_s * tokens for each, tokens in zip(stats, num_tokens, strict=True)]
    num_decode_forwards = sum(num_forwards) + sum(each.num_commit_forwards for each in stats)

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in stats)

    def mean(name: str, weights: Sequence[float]) -> float:
        parts = zip(stats, weights, strict=True)
        return _ratio(sum(getattr(each, name) * weight for each, weight in parts), sum(weights))

    return GenerationStats(
        num_prefill_forwards=total("num_prefill_forwards"),
        num_denoise_forwards=sum(num_forwards),
        num_commit_forwards=total("num_commit_forwards"),
        tokens_per_forward=_ratio(sum(num_tokens), num_decode_forwards),
        ttft_s=mean("ttft_s", [1.0] * len(stats)),
        tpot_s=_ratio(sum(decode_s), sum(num_tokens)),
        expert_cache_utilization=mean("expert_cache_utilization", num_forwards),
        hit_rate=mean("hit_rate", num_forwards),
        pooled_utilization=mean("pooled_utilization", num_forwards),
        pooled_hit_rate=mean("pooled_hit_rate", num_forwards),
        effective_transfer_ratio=mean(
            "effective_transfer_ratio", [each.expert_loads for each in stats]
        ),
        expert_loads=total("expert_loads"),
        bytes_loaded=total("bytes_loaded"),
        cpu_expert_runs=total("cpu_expert_runs"),
        max_resident_experts=max(each.max_resident_experts for each in stats),
        expert_memory_bytes=max(each.expert_memory_bytes for each in stats),
        policy_overhead=mean("policy_overhead", decode_s),
    )
