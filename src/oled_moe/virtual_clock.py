"""VirtualClock: carries plans out on three lanes of plain numbers; no bytes, no real clock.

Time of a layer (policies.md 1.3): the device runs attention and router, then the demand is known;
the shared expert, hits, and what was copied, as it arrives, run on the device while the copy lane
loads and the CPU computes its experts one after another; the layer ends with the last of them.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from oled_moe.config import check_int
from oled_moe.costs import CostModel, HardwareProfile
from oled_moe.types import CopyPlan, LayerDemand, LayerPlan, MoeShape

# Where a trace does not say: weights of a layer's attention, router and shared expert, and of the
# output head, in experts. LLaDA2.0-mini and -flash have heads of 102 and 51 experts.
DEFAULT_DENSE_EXPERTS = 4
DEFAULT_HEAD_EXPERTS = 64
DEVICE, COPY, CPU = "device", "copy", "cpu"
LANES = (DEVICE, COPY, CPU)


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
