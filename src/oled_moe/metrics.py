"""What one request took, or several together: plain numbers, built from counters."""

from collections.abc import Sequence
from dataclasses import dataclass

from oled_moe.counters import ExpertCounters, ratio
from oled_moe.decoding import DecodingCounters
from oled_moe.lossy import ChoiceCounts


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one answer took.

    `num_denoise_forwards` is the reference's num_forwards; a forward that stores a finished block
    and denoises the next counts there, once. `num_commit_forwards` had no block to denoise.
    `tokens_per_forward`: answer tokens per denoising or commit forward. `ttft_s`: to the first
    committed token; `tpot_s`: from the end of prefill to the last token, per token, commits
    included. `expert_cache_utilization`: share of a layer's slots whose expert was demanded, before
    anything moved; `hit_rate`: share of the demand that was resident; `pooled_*`: the same as
    ratios of sums. `effective_transfer_ratio`: share of experts loaded by a denoising forward that
    the layer's next denoising forward found resident and wanted. `max_resident_experts`: most ever
    held since the engine began, slots and staging, all layers; `expert_memory_bytes`: what those
    slots may take at most. `policy_overhead`: share of the request's time spent deciding.
    `bytes_loaded` counts copies on demand; `bytes_prefetched` those ahead of it, `bytes_wasted` the
    ones among them that nothing used; `ready_rate` is the hit rate with what was copied ahead in
    time. `choices_replaced`: how often a lossy rule gave a token another expert than it had chosen,
    or a copy of it in a lower precision; `replaced_share` that as a share of all choices in the
    denoising rows of its forwards, `replaced_weight_share` the same by mixing weights; 0 without a
    rule. `low_expert_runs`: how often an expert was computed from such a copy in its forwards;
    `low_expert_loads` of them were copied on demand, `low_bytes_loaded`, and are counted in
    `expert_loads` and `bytes_loaded` too.

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
    ready_rate: float = 0.0
    bytes_prefetched: int = 0
    bytes_wasted: int = 0
    choices_replaced: int = 0
    replaced_share: float = 0.0
    replaced_weight_share: float = 0.0
    low_expert_runs: int = 0
    low_expert_loads: int = 0
    low_bytes_loaded: int = 0


def generation_stats(
    counters: DecodingCounters,
    experts: ExpertCounters,
    *,
    num_tokens: int,
    expert_bytes: int,
    max_resident_experts: int,
    expert_memory_bytes: int,
    planning_s: float,
    choices: ChoiceCounts | None = None,
    low_expert_bytes: int = 0,
) -> GenerationStats:
    """Everything about one request as one value; `choices` where there is a lossy rule,
    `low_expert_bytes` where experts may be in a lower precision.

    Units: seconds, bytes.
    """
    choices = choices or ChoiceCounts()
    low_bytes = experts.num_low_loads * low_expert_bytes
    num_forwards = counters.num_denoise_forwards + counters.num_commit_forwards
    decode_s = counters.last_token_s - counters.prefill_end_s
    total_s = counters.last_token_s - counters.start_s
    return GenerationStats(
        num_prefill_forwards=counters.num_prefill_forwards,
        num_denoise_forwards=counters.num_denoise_forwards,
        num_commit_forwards=counters.num_commit_forwards,
        tokens_per_forward=ratio(num_tokens, num_forwards),
        ttft_s=counters.first_token_s - counters.start_s,
        tpot_s=ratio(decode_s, num_tokens),
        expert_cache_utilization=experts.utilization.mean(),
        hit_rate=experts.hit_rate.mean(),
        pooled_utilization=experts.utilization.pooled(),
        pooled_hit_rate=experts.hit_rate.pooled(),
        effective_transfer_ratio=experts.effective_transfer_ratio,
        expert_loads=experts.num_loads + experts.num_low_loads,
        bytes_loaded=experts.num_loads * expert_bytes + low_bytes,
        cpu_expert_runs=experts.num_cpu_runs,
        max_resident_experts=max_resident_experts,
        expert_memory_bytes=expert_memory_bytes,
        policy_overhead=ratio(planning_s, total_s),
        ready_rate=experts.ready_rate.mean(),
        bytes_prefetched=(experts.num_prefetched - experts.num_cancelled) * expert_bytes,
        bytes_wasted=max(0, experts.num_wasted) * expert_bytes,
        choices_replaced=choices.num_replaced,
        replaced_share=ratio(choices.num_replaced, choices.num_choices),
        replaced_weight_share=ratio(choices.replaced_weight, choices.weight),
        low_expert_runs=experts.num_low_runs,
        low_expert_loads=experts.num_low_loads,
        low_bytes_loaded=low_bytes,
    )


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
        return ratio(sum(getattr(each, name) * weight for each, weight in parts), sum(weights))

    return GenerationStats(
        num_prefill_forwards=total("num_prefill_forwards"),
        num_denoise_forwards=sum(num_forwards),
        num_commit_forwards=total("num_commit_forwards"),
        tokens_per_forward=ratio(sum(num_tokens), num_decode_forwards),
        ttft_s=mean("ttft_s", [1.0] * len(stats)),
        tpot_s=ratio(sum(decode_s), sum(num_tokens)),
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
        ready_rate=mean("ready_rate", num_forwards),
        bytes_prefetched=total("bytes_prefetched"),
        bytes_wasted=total("bytes_wasted"),
        choices_replaced=total("choices_replaced"),
        replaced_share=mean("replaced_share", num_forwards),
        replaced_weight_share=mean("replaced_weight_share", num_forwards),
        low_expert_runs=total("low_expert_runs"),
        low_expert_loads=total("low_expert_loads"),
        low_bytes_loaded=total("low_bytes_loaded"),
    )
