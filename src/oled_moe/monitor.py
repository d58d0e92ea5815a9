"""ExpertMonitor: what the experts of a running engine do, for a page and for metrics.

It observes demands, plans and forwards on the thread that runs the model, where it keeps
references and adds a few numbers; what is read is made on the reader's thread, whichever it is.
Shape legend: L layers, E experts of a layer.
"""

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from oled_moe.counters import ratio
from oled_moe.types import (
    BoolArray,
    CopyPlan,
    FloatArray,
    ForwardContext,
    IntArray,
    LayerDemand,
    LayerPlan,
)

if TYPE_CHECKING:
    from oled_moe.engine import Engine
    from oled_moe.scheduler import Scheduler, StepReport

# Denoising forwards that the time series go back.
NUM_POINTS = 300
# Forwards over which the time per output token is taken: single ones may commit nothing.
TPOT_WINDOW = 16

# What an expert did in the latest forward, one character each.
STATE_NAMES = {
    ".": "away",
    "r": "resident",
    "h": "hit",
    "a": "copied ahead",
    "l": "loaded and kept",
    "s": "loaded for once",
    "c": "ran on the CPU",
    "p": "ran in a lower precision",
}
_AWAY, _RESIDENT, _HIT, _AHEAD, _LOADED, _STREAMED, _CPU, _LOW = map(ord, STATE_NAMES)

# The memory that slots are in, by device.
_SLOT_TIERS = {"cpu": "ram", "emulated": "emulated", "cuda": "gpu"}


@dataclass(frozen=True, slots=True)
class ExpertTotals:
    """Everything counted since the monitor began.

    Shapes: int64 [L], utilization float64 [L]. `misses` are `loads`, `cpu_runs` and
    `low_runs`, those computed from copies in a lower precision. `ahead`:
    demanded experts whose copy had been asked for before, neither hits nor misses; the copies of
    `ahead_ready` of them were complete. `evictions`: experts resident after one forward and not
    after the next. `resident`, `utilization` (hits by `capacity`) and `capacity` are the latest
    forward's. `num_bytes`: bytes of experts copied, by the memories (from, to). `tier`: the memory
    that slots are in.
    """

    tier: str
    num_forwards: int
    hits: IntArray
    loads: IntArray
    cpu_runs: IntArray
    low_runs: IntArray
    ahead: IntArray
    ahead_ready: IntArray
    evictions: IntArray
    num_ahead: int
    num_fetches: int
    fetch_s: float
    stall_s: float
    resident: IntArray
    capacity: IntArray
    utilization: FloatArray
    num_bytes: dict[tuple[str, str], int]

    @property
    def misses(self) -> IntArray:
        """Demanded experts that were not there in full: loaded, run on the CPU or in a lower
        precision."""
        return self.loads + self.cpu_runs + self.low_runs


class ForwardPoint(NamedTuple):
    """One denoising forward. Ratios are means over its layers."""

    forward_s: float
    num_requests: int
    num_new_tokens: int
    hit_rate: float
    utilization: float


class _Seen(NamedTuple):
    """One layer of a forward; `num_ready` of the staged experts were there when demanded."""

    layer: int
    plan: LayerPlan
    num_ready: int


class _Row(IntEnum):
    """Rows of the table of counts."""

    HITS = 0
    LOADS = 1
    CPU_RUNS = 2
    AHEAD = 3
    AHEAD_READY = 4
    EVICTIONS = 5
    LOW_RUNS = 6


class ExpertMonitor:
    """Watches an engine and the scheduler that runs it, until closed.

    `totals` and `snapshot` may be called from any thread. The thread that runs the model pays an
    append per layer, and a few additions per layer at the end of a forward.
    """

    def __init__(self, engine: "Engine", scheduler: "Scheduler") -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._shape = shape = engine.cache.shape
        self._pool = engine.experts.pool
        self._tier = _SLOT_TIERS[engine.config.device]
        # The first experts of every layer come from RAM, the others from disk.
        self._num_hosted = shape.num_experts if engine.config.device == "emulated" else 0
        if engine.gpu_plan is not None:
            self._num_hosted = engine.gpu_plan.num_pinned // shape.num_layers
        self._sources = [
            *(["ram"] if self._num_hosted else []),
            *(["disk"] if self._num_hosted < shape.num_experts else []),
        ]
        # Only the thread that runs the model sees these.
        self._seen: list[_Seen] = []
        self._context: ForwardContext | None = None
        self._first_cancelled = self._pool.num_cancelled
        self._first_copies = self._copy_times()
        self._first_wait_s = engine.experts.wait_s
        self._asked_ahead = np.zeros(2, dtype=np.int64)
        # These are shared; whoever touches them holds the lock, readers for as long as they copy.
        self._lock = threading.Lock()
        self._counts = np.zeros((len(_Row), shape.num_layers), dtype=np.int64)
        self._latest: list[LayerPlan | None] = [None] * shape.num_layers
        self._is_resident = self._residents()
        # Copies from RAM and from disk: on demand, and ahead of it.
        self._num_loaded = np.zeros(2, dtype=np.int64)
        self._num_low_loads = 0
        self._num_ahead = np.zeros(2, dtype=np.int64)
        self._points: deque[ForwardPoint] = deque(maxlen=NUM_POINTS)
        self._num_forwards = 0
        engine.experts.observers.append(self._saw_layer)
        engine.experts.copy_observers.append(self._saw_copies)
        scheduler.observers.append(self._saw_step)

    def close(self) -> None:
        """Stop watching; what was counted stays readable."""
        self._engine.experts.observers.remove(self._saw_layer)
        self._engine.experts.copy_observers.remove(self._saw_copies)
        self._scheduler.observers.remove(self._saw_step)

    def totals(self) -> ExpertTotals:
        """The counts as after the latest forward."""
        with self._lock:
            counts, latest = self._counts.copy(), list(self._latest)
            resident = np.count_nonzero(self._is_resident, axis=1)
            num_copies, num_forwards = self._num_loaded + self._num_ahead, self._num_forwards
            num_low_loads = self._num_low_loads
            num_ahead = int(self._num_ahead.sum())
        num_fetches, fetch_s = self._copy_times()
        capacity = self._capacities(latest)
        hits = np.array([0 if plan is None else len(plan.hit_ids) for plan in latest])
        num_bytes = (num_copies * self._shape.expert_bytes).tolist()
        low = self._engine.memory_plan.low
        if low is not None:
            # All of them come from where the first experts of every layer do.
            num_bytes[0 if self._num_hosted else 1] += num_low_loads * low.shape.expert_bytes
        return ExpertTotals(
            tier=self._tier,
            num_forwards=num_forwards,
            hits=counts[_Row.HITS],
            loads=counts[_Row.LOADS],
            cpu_runs=counts[_Row.CPU_RUNS],
            low_runs=counts[_Row.LOW_RUNS],
            ahead=counts[_Row.AHEAD],
            ahead_ready=counts[_Row.AHEAD_READY],
            evictions=counts[_Row.EVICTIONS],
            num_ahead=num_ahead,
            num_fetches=num_fetches - self._first_copies[0],
            fetch_s=fetch_s - self._first_copies[1],
            stall_s=self._engine.experts.wait_s - self._first_wait_s,
            resident=resident,
            capacity=capacity,
            utilization=hits / np.maximum(capacity, 1),
            num_bytes={
                (source, self._tier): moved
                for source, moved in zip(("ram", "disk"), num_bytes, strict=True)
                if source in self._sources
            },
        )

    def snapshot(self) -> dict[str, Any]:
        """Everything the page shows, ready for JSON. Units: seconds, bytes; ratios 0 to 1.

        `layers[i].states` has one character for each expert of MoE layer i (`state_names`): what
        it did in the latest forward, where it did something. `series` has one entry for each of
        the latest denoising forwards, null where a ratio has no whole.
        """
        totals = self.totals()
        with self._lock:
            points, latest = list(self._points), list(self._latest)
            is_resident = self._is_resident.copy()
        shape, scheduler = self._shape, self._scheduler
        return {
            "device": self._engine.config.device,
            "policy": self._engine.policy.name,
            "lossy": self._engine.config.lossy,
            "low_precision": self._engine.low_form,
            "tier": totals.tier,
            "num_experts": shape.num_experts,
            "top_k": shape.top_k,
            "expert_bytes": shape.expert_bytes,
            "num_slots": self._engine.cache.num_slots,
            "num_staging": self._engine.cache.num_staging,
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "kv_tokens": scheduler.kv_tokens,
            "kv_capacity_tokens": scheduler.kv_capacity_tokens,
            "num_forwards": totals.num_forwards,
            "state_names": {
                state: name
                for state, name in STATE_NAMES.items()
                if ord(state) != _LOW or self._engine.low_form is not None
            },
            "layers": _layer_records(totals, _states(is_resident, latest)),
            "bytes": [
                {"src": source, "dst": target, "bytes": moved}
                for (source, target), moved in totals.num_bytes.items()
            ],
            "series": _series(points),
        }

    def _saw_layer(self, demand: LayerDemand, plan: LayerPlan) -> None:
        if demand.context is not self._context:
            # Whatever is left over is of a forward that failed, or that no scheduler ran.
            self._end_forward()
            self._context = demand.context
        self._seen.append(_Seen(demand.layer, plan, self._pool.num_staged_ready))

    def _saw_copies(self, copies: CopyPlan) -> None:
        self._asked_ahead += self._by_source(copies.expert_ids % self._shape.num_experts)

    def _saw_step(self, report: "StepReport") -> None:
        ratios = self._end_forward()
        if report.kind == "denoise":
            point = ForwardPoint(
                report.forward_s, report.num_requests, report.num_new_tokens, *ratios
            )
            with self._lock:
                self._points.append(point)

    def _end_forward(self) -> tuple[float, float]:
        """Count what was seen since the last time; its hit rate and utilisation."""
        seen, self._seen = self._seen, []
        if not seen:
            return math.nan, math.nan
        hit_rate = utilization = 0.0
        is_resident = self._residents()
        with self._lock:
            for layer, plan, num_ready in seen:
                num_hits = len(plan.hit_ids)
                self._counts[:, layer] += (
                    num_hits,
                    len(plan.load_ids),
                    len(plan.cpu_ids),
                    len(plan.staged_ids),
                    num_ready,
                    0,
                    0 if plan.low is None else plan.low.num_demanded,
                )
                self._latest[layer] = plan
                if len(plan.load_ids):
                    self._num_loaded += self._by_source(plan.load_ids)
                if plan.low is not None:
                    self._num_low_loads += len(plan.low.load_ids)
                if len(plan.prefetch):
                    ids = plan.prefetch.expert_ids % self._shape.num_experts
                    self._asked_ahead += self._by_source(ids)
                hit_rate += ratio(num_hits, plan.num_demanded)
                utilization += ratio(num_hits, plan.capacity)
            gone = self._is_resident & ~is_resident
            self._counts[_Row.EVICTIONS] += np.count_nonzero(gone, axis=1)
            self._is_resident = is_resident
            self._count_ahead()
            self._num_forwards += 1
        return hit_rate / len(seen), utilization / len(seen)

    def _count_ahead(self) -> None:
        """Copies ahead without those that were called off before they began.

        Which those were the pool does not tell: they are taken off the slower source, where most
        wait. A copy may be called off in a later forward than it was asked for in, and totals
        never fall.
        """
        num_cancelled = self._pool.num_cancelled - self._first_cancelled
        slower = 1 if self._num_hosted < self._shape.num_experts else 0
        asked = self._asked_ahead.copy()
        asked[slower] -= num_cancelled
        np.maximum(self._num_ahead, asked, out=self._num_ahead)

    def _by_source(self, expert_ids: IntArray) -> IntArray:
        """How many of some experts, by their ids within layers, come from RAM and from disk."""
        num_hosted = int(np.count_nonzero(expert_ids < self._num_hosted))
        return np.array((num_hosted, len(expert_ids) - num_hosted))

    def _copy_times(self) -> tuple[int, float]:
        """How many experts were copied, of either precision, and the seconds that took."""
        low_pool = self._engine.experts.low_pool
        pools = [self._pool, *([] if low_pool is None else [low_pool])]
        counts, seconds = zip(*(pool.copy_times for pool in pools), strict=True)
        return sum(counts), sum(seconds)

    def _residents(self) -> BoolArray:
        """Who is resident now, bool [L, E]; asked on the thread that plans."""
        is_resident = np.zeros((self._shape.num_layers, self._shape.num_experts), dtype=np.bool_)
        for layer in range(self._shape.num_layers):
            is_resident[layer, self._engine.cache.resident_ids(layer)] = True
        return is_resident

    def _capacities(self, latest: Sequence[LayerPlan | None]) -> IntArray:
        """What utilisation was measured by; before the first forward, the cache's own."""
        planned = self._engine.cache.capacities.tolist()
        pairs = zip(latest, planned, strict=True)
        return np.array([size if plan is None else plan.capacity for plan, size in pairs])


def _states(is_resident: BoolArray, latest: Sequence[LayerPlan | None]) -> list[str]:
    """For each layer a string of E characters, see `STATE_NAMES`."""
    states = np.where(is_resident, _RESIDENT, _AWAY).astype(np.uint8)
    for row, stays, plan in zip(states, is_resident, latest, strict=True):
        if plan is not None:
            row[plan.hit_ids] = _HIT
            row[plan.staged_ids] = _AHEAD
            row[plan.load_ids] = np.where(stays[plan.load_ids], _LOADED, _STREAMED)
            row[plan.cpu_ids] = _CPU
            row[plan.low_ids] = _LOW
    return [row.tobytes().decode("ascii") for row in states]


def _layer_records(totals: ExpertTotals, states: Sequence[str]) -> list[dict[str, Any]]:
    names = ("hits", "loads", "cpu_runs", "low_runs", "ahead", "evictions", "resident", "capacity")
    columns = [getattr(totals, name).tolist() for name in names]
    records = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    for record, ratio_of_hits, row in zip(records, totals.utilization, states, strict=True):
        record["utilization"] = round(float(ratio_of_hits), 4)
        record["states"] = row
    return records


def _series(points: Sequence[ForwardPoint]) -> dict[str, list[float | None]]:
    return {
        "forward_s": [_rounded(point.forward_s, 6) for point in points],
        "num_requests": [point.num_requests for point in points],
        "num_new_tokens": [point.num_new_tokens for point in points],
        "hit_rate": [_rounded(point.hit_rate, 4) for point in points],
        "utilization": [_rounded(point.utilization, 4) for point in points],
        "tpot_s": [_rounded(seconds, 6) for seconds in running_tpot_s(points)],
    }


def running_tpot_s(points: Sequence[ForwardPoint]) -> list[float]:
    """Seconds per output token of one request, over the last `TPOT_WINDOW` forwards at each.

    Requests that share a forward each wait for all of it, so it counts once for each of them. NaN
    where no token was committed.
    """
    waited_s = np.cumsum([0.0, *(point.forward_s * point.num_requests for point in points)])
    num_tokens = np.cumsum([0, *(point.num_new_tokens for point in points)])
    values = []
    for end in range(1, len(points) + 1):
        start = max(0, end - TPOT_WINDOW)
        tokens = int(num_tokens[end] - num_tokens[start])
        values.append(float(waited_s[end] - waited_s[start]) / tokens if tokens else math.nan)
    return values


def _rounded(value: float, digits: int) -> float | None:
    """JSON knows no NaN."""
    return None if math.isnan(value) else round(value, digits)
