"""Replay of a routing trace on virtual clocks: what any policy would do on any machine.

Decisions come from the same `ExpertCache` and policy objects as in the engine; only the executor
differs: three lanes of plain numbers instead of slots, copies and kernels. No clock is read.

Time of a layer (policies.md 1.3): the device runs attention and router, then the demand is known;
the shared expert, hits, and what was copied, as it arrives, run on the device while the copy lane
loads and the CPU computes its experts one after another; the layer ends with the last of them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from oled_moe.cache import ExpertCache
from oled_moe.config import check_int
from oled_moe.costs import CostModel, HardwareProfile
from oled_moe.counters import ExpertCounters, ratio
from oled_moe.errors import ConfigError
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

# Where a trace does not say: weights of a layer's attention, router and shared expert, and of the
# output head, in experts. LLaDA2.0-mini and -flash have heads of 102 and 51 experts.
DEFAULT_DENSE_EXPERTS = 4
DEFAULT_HEAD_EXPERTS = 64
DEVICE, COPY, CPU = "device", "copy", "cpu"
LANES = (DEVICE, COPY, CPU)
# What policies may need and no trace is without.
_ALWAYS_THERE = frozenset({"token_position"})
# Sees a demand and what was decided for it, as the engine's observers do.
Observer = Callable[[LayerDemand, LayerPlan], None]
_NONE: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """Times of one model's pieces on one machine: α + β·tokens each. Units: seconds.

    `layer_*`: attention and router, with the software around a layer; `shared_*`: the shared
    expert; `end_*`: head and sampling, with the software around a forward.
    """

    transfer_s: float
    cpu_base_s: float
    cpu_token_s: float
    device_base_s: float
    device_token_s: float
    activation_round_trip_s: float = 0.0
    layer_base_s: float = 0.0
    layer_token_s: float = 0.0
    shared_base_s: float = 0.0
    shared_token_s: float = 0.0
    forward_base_s: float = 0.0
    head_base_s: float = 0.0
    head_token_s: float = 0.0

    @classmethod
    def of(
        cls, hardware: HardwareProfile, expert_bytes: int, sizes: Mapping[str, Any] | None = None
    ) -> "LaneTimes":
        """Scale a profile to a model; `sizes` may hold the keys of a trace's header
        `dense_bytes_per_layer` (of which one expert's worth is the shared expert), `head_bytes`.

        Raises: ConfigError where one of these is no size.
        """
        dense_bytes = _size(sizes, "dense_bytes_per_layer", DEFAULT_DENSE_EXPERTS * expert_bytes)
        head_bytes = _size(sizes, "head_bytes", DEFAULT_HEAD_EXPERTS * expert_bytes)
        shared_bytes = min(expert_bytes, dense_bytes // 2)
        costs = CostModel.from_profile(hardware, expert_bytes)
        rate = hardware.device_weight_bytes_per_s or hardware.cpu_weight_bytes_per_s
        token_rate = (
            hardware.device_token_weight_bytes_per_s or hardware.cpu_token_weight_bytes_per_s
        )
        return cls(
            transfer_s=costs.transfer_s,
            cpu_base_s=costs.cpu_base_s,
            cpu_token_s=costs.cpu_token_s,
            device_base_s=expert_bytes / rate,
            device_token_s=expert_bytes / token_rate,
            activation_round_trip_s=hardware.activation_round_trip_s,
            layer_base_s=hardware.layer_overhead_s + (dense_bytes - shared_bytes) / rate,
            layer_token_s=(dense_bytes - shared_bytes) / token_rate,
            shared_base_s=shared_bytes / rate,
            shared_token_s=shared_bytes / token_rate,
            forward_base_s=hardware.forward_overhead_s,
            head_base_s=head_bytes / rate,
            head_token_s=head_bytes / token_rate,
        )


def _size(sizes: Mapping[str, Any] | None, name: str, default: int) -> int:
    value = (sizes or {}).get(name, default)
    check_int(f"trace header: {name}", value, minimum=0)
    return int(value)


class Span(NamedTuple):
    """One piece of work on a lane, for pictures. Units: seconds on the virtual clock."""

    lane: str
    kind: str
    layer: int
    start_s: float
    end_s: float
    label: str


@dataclass(slots=True)
class LaneWork:
    """Sums over the forwards counted. Units: seconds.

    `*_s` of a lane is the time it was busy; stalls are times in which the device had nothing to
    run but waited for a copy, or for the CPU at the end of a layer. `demanded_copy_s`: copies of
    what was demanded alone, copies ahead in the forward that wanted them.
    """

    device_s: float = 0.0
    copy_s: float = 0.0
    cpu_s: float = 0.0
    demanded_copy_s: float = 0.0
    copy_stall_s: float = 0.0
    cpu_stall_s: float = 0.0


class _WaitingCopy(NamedTuple):
    """A copy ahead that has not begun."""

    number: int
    slot: int
    asked_s: float


class VirtualClock:
    """Carries plans out on three lanes of numbers: a PlanExecutor without bytes.

    The device runs its work in order. The copy lane is one engine: what a layer demands goes
    before copies ahead, and a copy in progress is not interrupted. A copy ahead that has not begun
    when its layer wants it becomes urgent; one into a slot that the plan frees or fills again is
    cancelled; one in progress completes, and is waste. A copy waits for the slot's last reader.
    Kernels run in the order hits, staged experts, loads; the last two as their copies complete. In
    a synchronous plan the CPU's experts wait for the first wave's copies too: they block the layer.

    Source: policies.md 1.3 and 5.18; the contract of `LayerPlan`.
    """

    def __init__(self, times: LaneTimes, shape: MoeShape) -> None:
        self.times = times
        self.now_s = 0.0
        self.work = LaneWork()
        self.num_ready = 0
        self.num_cancelled = 0
        self.spans: list[Span] | None = None
        self._num_experts = shape.num_experts
        self._copy_free_s = 0.0
        self._waiting: deque[_WaitingCopy] = deque()
        # When the copy into a slot that was copied ahead is complete.
        self._ready_s: dict[int, float] = {}
        # Last readers within the layer at work; all earlier ones are done.
        self._idle_s: dict[int, float] = {}

    @property
    def num_waiting(self) -> int:
        """Copies ahead that have not begun."""
        return len(self._waiting)

    def start_forward(self) -> None:
        """Software before the first layer."""
        self._run_device("software", -1, self.times.forward_base_s, "forward")

    def run_dense(self, layer: int, num_tokens: int) -> None:
        """Attention and router of one layer, before its demand is known."""
        seconds = self.times.layer_base_s + self.times.layer_token_s * num_tokens
        self._run_device("dense", layer, seconds, "attention, router")

    def end_forward(self, num_tokens: int) -> None:
        """Head and sampling for `num_tokens`, none where no logits are wanted."""
        if num_tokens:
            seconds = self.times.head_base_s + self.times.head_token_s * num_tokens
            self._run_device("dense", -1, seconds, "head, sampling")
        if self._waiting:
            self._advance(self.now_s)

    def copy_ahead(self, copies: CopyPlan) -> None:
        if len(copies):
            self._refill(copies.slots.tolist())
            self._ask(copies, self.now_s)

    def apply(self, demand: LayerDemand, plan: LayerPlan) -> None:
        """Run the layer's experts; `now_s` is then its end.

        Mutates: `num_ready`, the staged experts that were complete when this was called, and
        `num_cancelled`, the copies ahead that this plan made pointless.
        """
        self.num_ready = self.num_cancelled = 0
        if self._waiting:
            self._advance(self.now_s)
        self._idle_s = {}
        has_copies = len(plan.load_ids) or len(plan.staged_ids)
        if has_copies or len(plan.cpu_ids) or self._waiting or len(plan.prefetch):
            self._apply_misses(demand, plan)
            return
        times, num_tokens = self.times, demand.topk_ids.shape[0]
        seconds = (
            times.shared_base_s
            + times.shared_token_s * num_tokens
            + times.device_base_s * len(plan.hit_ids)
            + times.device_token_s * demand.topk_ids.size
        )
        if self.spans is None:
            self.now_s += seconds
            self.work.device_s += seconds
            return
        shared_s = times.shared_base_s + times.shared_token_s * num_tokens
        self._run_device("shared", demand.layer, shared_s, "shared expert")
        self._run_device("hit", demand.layer, seconds - shared_s, f"{len(plan.hit_ids)} hits")

    def _apply_misses(self, demand: LayerDemand, plan: LayerPlan) -> None:
        times, layer, start_s = self.times, demand.layer, self.now_s
        tokens_of = dict(zip(demand.expert_ids.tolist(), demand.num_tokens.tolist(), strict=True))
        staged = self._take_staged(layer, plan)
        self._cancel(plan)
        shared_s = times.shared_base_s + times.shared_token_s * demand.topk_ids.shape[0]
        self._run_device("shared", layer, shared_s, "shared expert")
        cpu_start_s = start_s
        if plan.wave_sizes:
            cpu_start_s = self._run_waves(layer, plan, staged, tokens_of, start_s)
        else:
            self._run_overlapped(layer, plan, staged, tokens_of, start_s)
        if len(plan.prefetch):
            self._refill(plan.prefetch.slots.tolist())
            self._ask(plan.prefetch, start_s)
        self._run_cpu(layer, plan, tokens_of, cpu_start_s)

    # Copies ahead

    def _ask(self, copies: CopyPlan, asked_s: float) -> None:
        for number, slot in zip(copies.expert_ids.tolist(), copies.slots.tolist(), strict=True):
            self._waiting.append(_WaitingCopy(number, slot, asked_s))

    def _advance(self, until_s: float) -> None:
        """Begin the copies ahead that the lane has time for before `until_s`."""
        waiting, transfer_s = self._waiting, self.times.transfer_s
        while waiting:
            copy = waiting[0]
            start_s = max(self._copy_free_s, copy.asked_s, self._idle_s.get(copy.slot, 0.0))
            if start_s >= until_s:
                return
            waiting.popleft()
            self._ready_s[copy.slot] = self._run_copy("ahead", copy.number, start_s, transfer_s)

    def _take_staged(self, layer: int, plan: LayerPlan) -> list[tuple[float, int, int]]:
        """(ready, expert, slot) of the staged experts, as they arrive; makes waiting ones urgent.

        Those whose copy has not begun stand at the end, with no time yet: infinity.
        """
        if not len(plan.staged_ids):
            return []
        staged = []
        urgent = set()
        waiting = {copy.slot: copy.number for copy in self._waiting}
        for expert, slot in zip(plan.staged_ids.tolist(), plan.staged_slots.tolist(), strict=True):
            if waiting.get(slot) == layer * self._num_experts + expert:
                urgent.add(slot)
                ready_s = float("inf")
            else:
                ready_s = self._ready_s.pop(slot)
            self.num_ready += ready_s <= self.now_s
            staged.append((ready_s, expert, slot))
        if urgent:
            self._waiting = deque(copy for copy in self._waiting if copy.slot not in urgent)
        staged.sort()
        return staged

    def _cancel(self, plan: LayerPlan) -> None:
        """Drop copies ahead whose slot holds nothing wanted any more."""
        if self._waiting or self._ready_s:
            self._refill([*plan.freed_slots.tolist(), *plan.load_slots.tolist()])

    def _refill(self, slots: list[int]) -> None:
        """`slots` hold something else from now on."""
        for slot in slots:
            self._ready_s.pop(slot, None)
        if self._waiting:
            gone = set(slots)
            kept = deque(copy for copy in self._waiting if copy.slot not in gone)
            self.num_cancelled += len(self._waiting) - len(kept)
            self._waiting = kept

    # One layer

    def _run_overlapped(
        self,
        layer: int,
        plan: LayerPlan,
        staged: list[tuple[float, int, int]],
        tokens_of: dict[int, int],
        start_s: float,
    ) -> None:
        """Copies and kernels at once, each as soon as it can."""
        self._run_hits(layer, plan, tokens_of)
        for ready_s, expert, slot in staged:
            if ready_s == float("inf"):
                ready_s = self._load(layer, expert, slot, start_s, "late")
            self._run_expert("staged", layer, expert, slot, tokens_of[expert], ready_s)
        is_stream = set(plan.freed_slots.tolist()) if self.spans is not None else ()
        for expert, slot in zip(plan.load_ids.tolist(), plan.load_slots.tolist(), strict=True):
            kind = "stream" if slot in is_stream else "load"
            ready_s = self._load(layer, expert, slot, start_s, kind)
            self._run_expert(kind, layer, expert, slot, tokens_of[expert], ready_s)
        self._note_demanded(plan)

    def _run_waves(
        self,
        layer: int,
        plan: LayerPlan,
        staged: list[tuple[float, int, int]],
        tokens_of: dict[int, int],
        start_s: float,
    ) -> float:
        """Copies that block: a wave's kernels behind all its copies, the next wave behind them.

        Returns when the first wave's copies are complete.
        """
        loads = list(zip(plan.load_ids.tolist(), plan.load_slots.tolist(), strict=True))
        first_ready_s = start_s
        for index, size in enumerate(plan.wave_sizes):
            wave, loads = loads[:size], loads[size:]
            ready_s, kernels = start_s, []
            if index == 0:
                for staged_s, expert, slot in staged:
                    if staged_s == float("inf"):
                        staged_s = self._load(layer, expert, slot, start_s, "late")
                    ready_s = max(ready_s, staged_s)
                    kernels.append(("staged", expert, slot))
            for expert, slot in wave:
                ready_s = max(ready_s, self._load(layer, expert, slot, start_s, "load"))
                kernels.append(("load", expert, slot))
            if index == 0:
                first_ready_s = ready_s
                self._wait_for_copy(ready_s)
                self._run_hits(layer, plan, tokens_of)
            for kind, expert, slot in kernels:
                self._run_expert(kind, layer, expert, slot, tokens_of[expert], ready_s)
            start_s = self.now_s
        self._note_demanded(plan)
        return first_ready_s

    def _run_hits(self, layer: int, plan: LayerPlan, tokens_of: dict[int, int]) -> None:
        hit_ids, times = plan.hit_ids.tolist(), self.times
        if self.spans is None and not len(plan.load_slots) and not len(plan.prefetch):
            num_tokens = sum([tokens_of[expert] for expert in hit_ids])
            seconds = times.device_base_s * len(hit_ids) + times.device_token_s * num_tokens
            self.now_s += seconds
            self.work.device_s += seconds
            return
        start_s = self.now_s
        for expert, slot in zip(hit_ids, plan.hit_slots.tolist(), strict=True):
            self.now_s += times.device_base_s + times.device_token_s * tokens_of[expert]
            self._idle_s[slot] = self.now_s
        self.work.device_s += self.now_s - start_s
        if self.spans is not None and hit_ids:
            label = f"{len(hit_ids)} hits"
            self.spans.append(Span(DEVICE, "hit", layer, start_s, self.now_s, label))

    def _run_expert(
        self, kind: str, layer: int, expert: int, slot: int, num_tokens: int, ready_s: float
    ) -> None:
        self._wait_for_copy(ready_s)
        seconds = self.times.device_base_s + self.times.device_token_s * num_tokens
        self._run_device(kind, layer, seconds, f"expert {expert}")
        self._idle_s[slot] = self.now_s

    def _run_cpu(
        self, layer: int, plan: LayerPlan, tokens_of: dict[int, int], start_s: float
    ) -> None:
        if not len(plan.cpu_ids):
            return
        times, cpu_ids = self.times, plan.cpu_ids.tolist()
        num_tokens = sum([tokens_of[expert] for expert in cpu_ids])
        busy_s = times.cpu_base_s * len(cpu_ids) + times.cpu_token_s * num_tokens
        end_s = start_s + busy_s + times.activation_round_trip_s
        self.work.cpu_s += busy_s
        if self.spans is not None:
            label = f"{len(cpu_ids)} experts"
            self.spans.append(Span(CPU, "cpu", layer, start_s, end_s, label))
        if end_s > self.now_s:
            self.work.cpu_stall_s += end_s - self.now_s
            self.now_s = end_s

    def _load(self, layer: int, expert: int, slot: int, asked_s: float, kind: str) -> float:
        """Copy on demand; returns when it is complete."""
        start_s = max(self._copy_free_s, asked_s, self._idle_s.get(slot, 0.0))
        number = layer * self._num_experts + expert
        return self._run_copy(kind, number, start_s, self.times.transfer_s)

    def _run_copy(self, kind: str, number: int, start_s: float, seconds: float) -> float:
        self._copy_free_s = start_s + seconds
        self.work.copy_s += seconds
        if self.spans is not None:
            layer, expert = divmod(number, self._num_experts)
            label = f"expert {expert}"
            self.spans.append(Span(COPY, kind, layer, start_s, self._copy_free_s, label))
        return self._copy_free_s

    def _run_device(self, kind: str, layer: int, seconds: float, label: str) -> None:
        if self.spans is not None and seconds:
            self.spans.append(Span(DEVICE, kind, layer, self.now_s, self.now_s + seconds, label))
        self.now_s += seconds
        self.work.device_s += seconds

    def _wait_for_copy(self, ready_s: float) -> None:
        if ready_s > self.now_s:
            self.work.copy_stall_s += ready_s - self.now_s
            self.now_s = ready_s

    def _note_demanded(self, plan: LayerPlan) -> None:
        num_copies = len(plan.load_ids) + len(plan.staged_ids)
        self.work.demanded_copy_s += num_copies * self.times.transfer_s


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
        for forward in self._trace.forwards(self._policy.needs - _ALWAYS_THERE):
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
