"""Replay of a routing trace on virtual clocks: what any policy would do on any machine.

Decisions come from the same `ExpertCache` and policy objects as in the engine; only the executor
differs: a `VirtualClock` instead of slots, copies and kernels. No real clock is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from oled_moe.cache import ExpertCache
from oled_moe.config import check_int
from oled_moe.costs import CostModel, HardwareProfile
from oled_moe.counters import ExpertCounters, ratio
from oled_moe.errors import ConfigError, TraceError
from oled_moe.policies import OffloadPolicy, build_policy, is_clairvoyant
from oled_moe.policies.allocation import uniform_capacities
from oled_moe.policies.dispatch import MissSet
from oled_moe.sizing import slots_of_layers, staging_beside
from oled_moe.traces import RoutingTrace
from oled_moe.types import (
    NO_COPIES,
    CopyPlan,
    ForwardContext,
    ForwardOutcome,
    IntArray,
    LayerDemand,
    LayerPlan,
    MoeShape,
    Phase,
)
from oled_moe.virtual_clock import LaneTimes, LaneWork, Span, VirtualClock

# Sees a demand and what was decided for it, as the engine's observers do.
Observer = Callable[[LayerDemand, LayerPlan], None]
_NONE: IntArray = np.empty(0, dtype=np.int64)


class OracleCache:
    """Plans for policies with an `oracle`: as many hits as it grants, filled at no cost.

    Hits are the experts with most tokens, ties to the lower id: the choice that leaves the least
    work to be made up for. Misses are split by the policy's dispatch where there are CPU experts
    and otherwise streamed through the staging slots. The interface is `ExpertCache`'s.
    Source: policies.md 6.3.
    """

    def __init__(
        self,
        shape: MoeShape,
        policy: OffloadPolicy,
        *,
        num_slots: int,
        num_staging: int,
        has_cpu_experts: bool = False,
    ) -> None:
        self.shape = shape
        self.policy = policy
        self.num_slots = num_slots
        self.num_staging = num_staging
        self.has_cpu_experts = has_cpu_experts
        self.capacities = uniform_capacities(num_slots, shape)

    def place(self) -> list[tuple[int, int, int]]:
        return []

    def start_forward(self, context: ForwardContext) -> CopyPlan:
        return NO_COPIES

    def plan(self, demand: LayerDemand) -> LayerPlan:
        """Decide everything for one demand. Mutates: the policy's statistics."""
        policy, capacity = self.policy, int(self.capacities[demand.layer])
        assert policy.oracle is not None
        policy.retention.observe(demand)
        policy.dispatch.observe(demand)
        num_hits = policy.oracle.num_hits(demand, capacity, self.num_slots)
        is_hit = np.zeros(len(demand.expert_ids), dtype=np.bool_)
        is_hit[np.argsort(-demand.num_tokens, kind="stable")[:num_hits]] = True
        hit_ids, hit_slots = demand.expert_ids[is_hit], np.arange(num_hits)
        load_ids, load_tokens = demand.expert_ids[~is_hit], demand.num_tokens[~is_hit]
        cpu_ids = _NONE
        if self.has_cpu_experts and len(load_ids):
            scores = policy.retention.keep_scores(demand.expert_ids, demand)
            to_cpu = policy.dispatch.split(
                MissSet(demand, load_ids, load_tokens, scores[~is_hit], scores[is_hit], capacity)
            )
            cpu_ids, load_ids, load_tokens = (
                load_ids[to_cpu],
                load_ids[~to_cpu],
                load_tokens[~to_cpu],
            )
        load_ids = load_ids[np.argsort(-load_tokens, kind="stable")]
        slots = self.num_slots + np.arange(len(load_ids)) % max(1, self.num_staging)
        return LayerPlan(hit_ids, hit_slots, load_ids, slots, cpu_ids, slots, capacity)

    def end_forward(self, outcome: ForwardOutcome) -> None:
        pass

    def end_request(self, request_id: int) -> None:
        pass


class _Cache(Protocol):
    """What is replayed through: ExpertCache, or OracleCache."""

    def place(self) -> list[tuple[int, int, int]]: ...
    def start_forward(self, context: ForwardContext) -> CopyPlan: ...
    def plan(self, demand: LayerDemand) -> LayerPlan: ...
    def end_forward(self, outcome: ForwardOutcome) -> None: ...
    def end_request(self, request_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What a policy did with a trace on a machine, requests of the warm-up left out.

    `expert_cache_utilization`, `hit_rate`: experts kept since an earlier use, over forwards that
    denoise (trace-format.md, replay rule 6); `ready_*` also count copies ahead that were complete
    when the layer's demand was known. `pooled_*`: ratios of sums. `num_forwards`: all model calls.
    `tpot_s`: from the end of a request's prefill to the end of its last denoising forward, commits
    included, summed over requests, over all tokens generated; requests that share forwards each
    wait for the whole of them. `ttft_s`: mean over requests, from the start of the first forward
    to the end of the first that denoises it. `forward_s`: mean over forwards that denoise;
    `busiest_lane_s`: the same for the work of each such forward's busiest lane, counting what was
    demanded alone; their ratio is 1 where nothing else costs time. `*_occupancy`: share of time a
    lane was busy; `*_stall_share`: share in which the device waited for copies, for the CPU.
    `expert_loads`, `bytes_loaded`: copies on demand in all phases; `prefetched_bytes`: copies ahead
    begun, of which `useful` were in time, `late` wanted before they were complete, and `wasted`.
    Units: seconds, bytes.
    """

    policy: str
    hardware: str
    trace: str
    trace_source: str
    trace_hash: str
    experts_per_layer: float
    num_slots: int
    num_staging: int
    has_cpu_experts: bool
    warmup_requests: int
    num_requests: int
    num_forwards: int
    num_denoise_forwards: int
    num_tokens: int
    expert_cache_utilization: float
    hit_rate: float
    pooled_utilization: float
    pooled_hit_rate: float
    ready_utilization: float
    ready_rate: float
    effective_transfer_ratio: float
    effective_transfer_ratio_within_blocks: float
    tpot_s: float
    ttft_s: float
    forward_s: float
    busiest_lane_s: float
    forward_to_busiest_lane: float
    device_occupancy: float
    copy_occupancy: float
    cpu_occupancy: float
    copy_stall_share: float
    cpu_stall_share: float
    expert_loads: int
    denoise_expert_loads: int
    bytes_loaded: int
    cpu_expert_runs: int
    prefetched_bytes: int
    useful_prefetched_bytes: int
    late_prefetched_bytes: int
    wasted_prefetched_bytes: int
    spans: tuple[Span, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All numbers by name; the spans of a recorded forward are left out."""
        values = asdict(replace(self, spans=()))
        del values["spans"]
        return values


def simulate(
    trace: RoutingTrace,
    policy: str | OffloadPolicy,
    *,
    hardware: HardwareProfile,
    experts_per_layer: float | None = None,
    num_slots: int | None = None,
    num_staging: int | None = None,
    has_cpu_experts: bool | None = None,
    warmup_requests: int = 0,
    record_forward: int | None = None,
    observers: Sequence[Observer] = (),
    trace_name: str = "",
    trace_hash: str = "",
) -> SimulationReport:
    """Replay a trace under one policy, from empty slots.

    One of `experts_per_layer` (a mean, 0 to all) and `num_slots` (over all layers) is given;
    `num_staging` None is the engine's rule, `has_cpu_experts` None what the profile says. The first
    `warmup_requests` requests of the trace are replayed but not measured, and no forward that holds
    a row of one. `record_forward`: index of the forward whose `spans` are kept. `observers` see
    every demand and its plan. An OffloadPolicy object serves one replay, for it holds state.
    Raises: ConfigError for sizes and names that are not allowed, TraceError where the policy looks
    at what the trace does not hold.
    """
    shape = trace.shape
    slots = _slots(shape, experts_per_layer, num_slots)
    staging = staging_beside(slots, shape) if num_staging is None else num_staging
    check_int("num_staging", staging, minimum=0)
    check_int("warmup_requests", warmup_requests, minimum=0, maximum=len(trace.requests) - 1)
    if record_forward is not None:
        check_int("forward", record_forward, minimum=0, maximum=trace.num_forwards - 1)
    if has_cpu_experts is None:
        has_cpu_experts = hardware.has_cpu_experts
    if isinstance(policy, str):
        future = trace.future() if is_clairvoyant(policy) else None
        costs = CostModel.from_profile(hardware, shape.expert_bytes)
        policy = build_policy(policy, shape, costs, future=future)
    kind = ExpertCache if policy.oracle is None else OracleCache
    cache: _Cache = kind(
        shape, policy, num_slots=slots, num_staging=staging, has_cpu_experts=has_cpu_experts
    )
    times = LaneTimes.of(hardware, shape.expert_bytes, trace.extra)
    run = _Replay(trace, policy, cache, VirtualClock(times, shape), warmup_requests)
    run.run(record_forward, observers)
    return SimulationReport(
        policy=policy.name,
        hardware=hardware.name,
        trace=trace_name or trace.model_name,
        trace_source=trace.source,
        trace_hash=trace_hash,
        experts_per_layer=slots / shape.num_layers,
        num_slots=slots,
        num_staging=staging,
        has_cpu_experts=has_cpu_experts,
        warmup_requests=warmup_requests,
        **run.numbers(),
    )


def _slots(shape: MoeShape, experts_per_layer: float | None, num_slots: int | None) -> int:
    if (experts_per_layer is None) == (num_slots is None):
        raise ConfigError("give one of experts_per_layer and num_slots")
    if num_slots is None:
        assert experts_per_layer is not None
        return slots_of_layers(experts_per_layer, shape)
    check_int("num_slots", num_slots, minimum=0, maximum=shape.num_experts_total)
    return num_slots


@dataclass(slots=True)
class _RequestTimes:
    """Moments of one request on the virtual clock. Units: seconds."""

    start_s: float
    prefill_end_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None


class _Replay:
    """One pass over a trace, and what is counted on the way."""

    def __init__(
        self,
        trace: RoutingTrace,
        policy: OffloadPolicy,
        cache: _Cache,
        clock: VirtualClock,
        warmup_requests: int,
    ) -> None:
        self._trace = trace
        self._policy = policy
        self._cache = cache
        self._clock = clock
        self._warmup_requests = warmup_requests
        self._counters = ExpertCounters()
        self._requests: dict[int, _RequestTimes] = {}
        self._total = LaneWork()
        self._measured_s = 0.0
        self._num_forwards = 0
        self._denoise_s: list[float] = []
        self._busiest_s: list[float] = []
        self._spans: tuple[Span, ...] = ()

    def run(self, record_forward: int | None, observers: Sequence[Observer]) -> None:
        cache, clock, counters = self._cache, self._clock, self._counters
        num_layers = self._trace.shape.num_layers
        # Copied before time 0: the engine loads these before it takes requests.
        cache.place()
        try:
            self._trace.check_needs(self._policy.needs)
        except TraceError as error:
            raise TraceError(
                f"policy {self._policy.name!r}: {error}; its parameters may do without it "
                "(finemoe:maps=topk does)"
            ) from None
        for forward in self._trace.forwards(self._policy.needs):
            context = forward.context
            is_measured = all(row.request_id >= self._warmup_requests for row in context.rows)
            is_recorded = context.forward_id == record_forward
            if is_recorded:
                clock.spans = []
            start_s = clock.now_s
            clock.work = LaneWork()
            clock.num_cancelled = 0
            copies = cache.start_forward(context)
            clock.copy_ahead(copies)
            if is_measured:
                counters.copied_ahead(copies)
                counters.cancelled(clock.num_cancelled)
            clock.start_forward()
            next_layer = 0
            for demand in forward.demands:
                while next_layer <= demand.layer:
                    clock.run_dense(next_layer, context.num_tokens)
                    next_layer += 1
                plan = cache.plan(demand)
                clock.apply(demand, plan)
                for observer in observers:
                    observer(demand, plan)
                if is_measured:
                    counters(demand, plan, clock.num_ready)
                    if clock.num_cancelled:
                        counters.cancelled(clock.num_cancelled)
            for layer in range(next_layer, num_layers):
                clock.run_dense(layer, context.num_tokens)
            clock.end_forward(_num_logits(context))
            cache.end_forward(forward.outcome)
            for request_id in forward.ended_requests:
                cache.end_request(request_id)
            self._note_moments(context, start_s)
            if is_measured:
                self._note_work(context, start_s)
            if is_recorded:
                self._spans, clock.spans = tuple(clock.spans or ()), None
        counters.cancelled(clock.num_waiting)

    def _note_moments(self, context: ForwardContext, start_s: float) -> None:
        now_s = self._clock.now_s
        for row in context.rows:
            if row.request_id not in self._requests:
                self._requests[row.request_id] = _RequestTimes(start_s, start_s)
            moments = self._requests[row.request_id]
            if row.phase == Phase.PREFILL:
                moments.prefill_end_s = now_s
            elif row.phase == Phase.DENOISE:
                if moments.first_token_s is None:
                    moments.first_token_s = now_s
                moments.last_token_s = now_s

    def _note_work(self, context: ForwardContext, start_s: float) -> None:
        work, total, taken_s = self._clock.work, self._total, self._clock.now_s - start_s
        total.device_s += work.device_s
        total.copy_s += work.copy_s
        total.cpu_s += work.cpu_s
        total.copy_stall_s += work.copy_stall_s
        total.cpu_stall_s += work.cpu_stall_s
        self._measured_s += taken_s
        self._num_forwards += 1
        if context.is_denoise:
            self._denoise_s.append(taken_s)
            self._busiest_s.append(max(work.device_s, work.demanded_copy_s, work.cpu_s))

    def numbers(self) -> dict[str, Any]:
        """The measured part of a SimulationReport."""
        counters, total, expert_bytes = self._counters, self._total, self._trace.expert_bytes
        measured = [
            (moments, self._trace.requests[request_id].num_generated_tokens)
            for request_id, moments in self._requests.items()
            if request_id >= self._warmup_requests
        ]
        decoded = [
            (moments.last_token_s - moments.prefill_end_s, num_tokens)
            for moments, num_tokens in measured
            if moments.last_token_s is not None
        ]
        waits = [
            moments.first_token_s - moments.start_s
            for moments, _ in measured
            if moments.first_token_s is not None
        ]
        forward_s = ratio(sum(self._denoise_s), len(self._denoise_s))
        busiest_s = ratio(sum(self._busiest_s), len(self._busiest_s))
        num_tokens = sum(tokens for _, tokens in decoded)
        return {
            "num_requests": len(measured),
            "num_forwards": self._num_forwards,
            "num_denoise_forwards": len(self._denoise_s),
            "num_tokens": num_tokens,
            "expert_cache_utilization": counters.utilization.mean(),
            "hit_rate": counters.hit_rate.mean(),
            "pooled_utilization": counters.utilization.pooled(),
            "pooled_hit_rate": counters.hit_rate.pooled(),
            "ready_utilization": counters.ready_utilization.mean(),
            "ready_rate": counters.ready_rate.mean(),
            "effective_transfer_ratio": counters.effective_transfer_ratio,
            "effective_transfer_ratio_within_blocks": (
                counters.effective_transfer_ratio_within_blocks
            ),
            "tpot_s": ratio(sum(seconds for seconds, _ in decoded), num_tokens),
            "ttft_s": ratio(sum(waits), len(waits)),
            "forward_s": forward_s,
            "busiest_lane_s": busiest_s,
            "forward_to_busiest_lane": ratio(forward_s, busiest_s),
            "device_occupancy": ratio(total.device_s, self._measured_s),
            "copy_occupancy": ratio(total.copy_s, self._measured_s),
            "cpu_occupancy": ratio(total.cpu_s, self._measured_s),
            "copy_stall_share": ratio(total.copy_stall_s, self._measured_s),
            "cpu_stall_share": ratio(total.cpu_stall_s, self._measured_s),
            "expert_loads": counters.num_loads,
            "denoise_expert_loads": counters.num_denoise_loads,
            "bytes_loaded": counters.num_loads * expert_bytes,
            "cpu_expert_runs": counters.num_cpu_runs,
            "prefetched_bytes": (counters.num_prefetched - counters.num_cancelled) * expert_bytes,
            "useful_prefetched_bytes": counters.num_useful * expert_bytes,
            "late_prefetched_bytes": counters.num_late * expert_bytes,
            "wasted_prefetched_bytes": counters.num_wasted * expert_bytes,
            "spans": self._spans,
        }


def _num_logits(context: ForwardContext) -> int:
    """Tokens whose logits a forward computes: those of rows that denoise."""
    return sum(row.num_tokens for row in context.rows if row.phase == Phase.DENOISE)


def sweep(
    trace: RoutingTrace,
    policies: Iterable[str],
    capacities: Iterable[float],
    *,
    hardware: HardwareProfile,
    **options: Any,
) -> Iterator[SimulationReport]:
    """A report for every policy and mean capacity, policies outermost; `options` as `simulate`."""
    sizes = list(capacities)
    for policy in policies:
        for capacity in sizes:
            yield simulate(trace, policy, experts_per_layer=capacity, hardware=hardware, **options)


@dataclass(frozen=True, slots=True)
class TideIntervals:
    """TIDE replayed with several refresh intervals: the one with the lowest TPOT, and all."""

    best: int
    reports: Mapping[int, SimulationReport]


def best_tide_interval(
    trace: RoutingTrace,
    *,
    hardware: HardwareProfile,
    intervals: Sequence[int] = tuple(range(1, 33)),
    parameters: str = "",
    **options: Any,
) -> TideIntervals:
    """The interval of policy `tide` at which a token takes least time; ties to the shorter.

    Intervals 1 and 2, the paper's smallest and the example's, are always among the reports.
    `parameters`: further ones of the policy, `key=value,...`.
    Source: policies.md 6.8, interval selection by replay.
    """
    rest = f",{parameters}" if parameters else ""
    reports = {
        interval: simulate(trace, f"tide:interval={interval}{rest}", hardware=hardware, **options)
        for interval in sorted({1, 2, *intervals})
    }
    best = min(sorted(intervals), key=lambda interval: reports[interval].tpot_s)
    return TideIntervals(best, reports)
