"""OffloadedExperts: the routed experts of all layers, the one place where decisions meet bytes.

demand -> hits at once where the device works by itself -> plan -> copies, CPU experts, hits,
loads as they arrive -> combine. A kernel call takes all experts that are there. Outputs are
combined in fp32 in ascending expert id, so the sum does not depend on what was cached.
Legend: T tokens, D hidden, K experts per token, N = T · K rows, in order of expert, G experts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oled_moe.cache import ExpertCache
from oled_moe.kernels import ExpertKernel
from oled_moe.kernels.rows import combine
from oled_moe.lanes import Event, Lane
from oled_moe.layers import Routing
from oled_moe.lossy import LossyRule
from oled_moe.sharing import RoutedTokens
from oled_moe.slots import SlotPool
from oled_moe.store import HostExpertStore
from oled_moe.types import (
    CopyPlan,
    ForwardContext,
    ForwardOutcome,
    IntArray,
    LayerDemand,
    LayerPlan,
)

Observer = Callable[[LayerDemand, LayerPlan], None]
CopyObserver = Callable[[CopyPlan], None]
# Ids int64 [T, K] and gate weights float32 [T, K] of an MoE layer, in place of the router's.
RoutingSource = Callable[[int, ForwardContext], tuple[IntArray, npt.NDArray[np.float32]]]


def stable_order(values: IntArray) -> IntArray:
    """np.argsort(values, kind="stable") of numbers from 0 on; several times faster for small ones,
    which numpy sorts by their digits."""
    if len(values) and values.max() < 2**15:
        return np.argsort(values.astype(np.int16), kind="stable")
    return np.argsort(values, kind="stable")


class HostLink(Protocol):
    """Small tensors between the device that computes layers and the host that plans."""

    def to_host(self, *tensors: Tensor) -> Sequence[Tensor]:
        """All of them in host memory, with one synchronisation at most."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """A host tensor where layers compute, behind the work submitted so far; does not block."""
        ...


class _SameMemory:
    """The link of a device that computes in host memory."""

    def to_host(self, *tensors: Tensor) -> Sequence[Tensor]:
        return tensors

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass(slots=True)
class PendingLayer:
    """A layer whose copies and CPU experts are under way; `events` of all kernels submitted.

    `bounds` [A + 1]: rows of the demand's i-th expert are bounds[i] : bounds[i + 1]. `has_hits`:
    the hits are submitted. `cpu_out`: rows of `out_ND` that the CPU computes, and its results.
    """

    demand: LayerDemand
    rows_ND: Tensor
    out_ND: Tensor
    order_N: IntArray
    bounds: IntArray
    events: list[Event]
    plan: LayerPlan | None = None
    has_hits: bool = False
    cpu_out: tuple[IntArray, Tensor] | None = None

    def rows_of(self, expert_ids: IntArray) -> tuple[IntArray, IntArray]:
        """First rows and ends [G] of some of the demanded experts."""
        places = np.searchsorted(self.demand.expert_ids, expert_ids)
        return self.bounds[places], self.bounds[places + 1]


class OffloadedExperts:
    """Computes the routed experts of a layer from slots, whatever is resident.

    `compute_lane` runs the device's kernels, `cpu_lane` those of experts that stay in the slow
    tier (`host_store`; both None where there is no second place to compute). `link` takes what is
    planned by to the host and back; None where layers compute in host memory. `observers` see every
    demand and its plan once the layer is done, `copy_observers` what is copied ahead before a
    forward. `wants_gate_scores` asks the model for all router scores. `routing`, where not None,
    replaces what routers choose; `lossy` is the rule that limits what they may choose, or has
    misses taken from `low_pool`, which holds experts in a lower precision. One thread calls.
    """

    def __init__(
        self,
        cache: ExpertCache,
        pool: SlotPool,
        *,
        kernel: ExpertKernel,
        compute_lane: Lane,
        cpu_lane: Lane | None = None,
        cpu_kernel: ExpertKernel | None = None,
        host_store: HostExpertStore | None = None,
        link: HostLink | None = None,
        low_pool: SlotPool | None = None,
    ) -> None:
        assert (low_pool is None) == (cache.low is None)
        self.cache = cache
        self.pool = pool
        self.low_pool = low_pool
        self.observers: list[Observer] = []
        self.copy_observers: list[CopyObserver] = []
        self.wants_gate_scores = "gate_scores" in cache.policy.needs
        self.routing: RoutingSource | None = None
        self.lossy: LossyRule | None = None
        # Seconds of the calling thread: planning and queueing, and waiting for copies.
        self.planning_s = 0.0
        self.wait_s = 0.0
        self._kernel = kernel
        self._cpu_kernel = cpu_kernel or kernel
        self._compute_lane = compute_lane
        self._cpu_lane = cpu_lane
        self._host_store = host_store
        self._link: HostLink = link or _SameMemory()
        # Where kernels run by themselves, hits start before the rest is decided. Where the caller
        # runs them the copies are queued first, and synchronous loads come before any kernel.
        self._starts_hits = not (compute_lane.runs_at_once or cache.policy.is_synchronous)
        # The layer between `start` and the end of `finish`, and the events of what it runs.
        self._unfinished: tuple[int, list[Event]] | None = None

    def start_forward(self, context: ForwardContext) -> None:
        """Before the first layer: set going what is copied ahead."""
        start_s = time.perf_counter()
        try:
            copies = self.cache.start_forward(context)
            self.pool.copy_ahead(copies)
            self.planning_s += time.perf_counter() - start_s
        except BaseException:
            self.cache.forget_ahead()
            raise
        if len(copies):
            for observer in self.copy_observers:
                observer(copies)

    def end_forward(self, outcome: ForwardOutcome) -> None:
        """After the last layer, once the logits were looked at."""
        start_s = time.perf_counter()
        self.cache.end_forward(outcome)
        self.planning_s += time.perf_counter() - start_s

    @property
    def limits_choices(self) -> bool:
        """Whether a lossy rule says which experts tokens may choose."""
        return self.lossy is not None and self.lossy.sharing is not None

    def restrict(
        self,
        layer: int,
        routing: Routing,
        choice_TE: Tensor,
        context: ForwardContext,
        choose: Callable[[Tensor], Routing],
    ) -> Routing:
        """What tokens choose where a lossy rule limits them; `routing` itself without one.

        `choice_TE`: the scores that the router ranks by; `choose` makes its choice among allowed
        experts, bool [T, E].
        """
        if not self.limits_choices or not context.is_denoise:
            return routing
        assert self.lossy is not None
        scores, ids, shares = self._link.to_host(choice_TE, routing.ids_TK, routing.shares_TK)
        is_resident = np.zeros(self.cache.shape.num_experts, dtype=np.bool_)
        is_resident[self.cache.resident_ids(layer)] = True
        # What denoises is one block or one canvas, wherever it begins; no rule sees other rows.
        sizes = [row.num_tokens for row in context.rows]
        routed = RoutedTokens(
            scores.numpy(),
            ids.numpy(),
            shares.numpy(),
            context.token_state,
            context.token_confidence,
            np.repeat(np.arange(len(sizes)), sizes),
            is_resident,
        )
        allowed = self.lossy.allowed(context, routed)
        if allowed is None:
            return routing
        limited = choose(self._link.to_device(torch.from_numpy(allowed)))
        own_ids, own_shares = ids.numpy().copy(), shares.numpy().copy()
        (taken,) = self._link.to_host(limited.ids_TK)
        self.lossy.count_taken(context, own_ids, own_shares, taken.numpy())
        return limited

    def start(
        self,
        layer: int,
        hidden_TD: Tensor,
        topk_ids_TK: Tensor,
        gate_weights_TK: Tensor,
        context: ForwardContext,
        gate_scores_TE: Tensor | None = None,
    ) -> PendingLayer:
        """Plan the layer and set its copies and CPU experts going; `finish` does the rest.

        Shapes: ids int64 [T, K]; gate weights fp32 [T, K], normalised, before any scaling; all
        router scores fp32 [T, E] where `wants_gate_scores`.
        """
        if self._unfinished is not None:
            # Whoever called was interrupted between the two, by Ctrl-C for instance.
            self._abandon()
        events: list[Event] = []
        self._unfinished = (layer, events)
        try:
            # The layer's one device-to-host synchronisation. Activations come along where the CPU
            # may have to compute with them.
            scores = [] if gate_scores_TE is None else [gate_scores_TE]
            activations = [] if self._cpu_lane is None else [hidden_TD]
            ids, gates, *rest = self._link.to_host(
                topk_ids_TK, gate_weights_TK, *scores, *activations
            )
            start_s = time.perf_counter()
            topk_ids, gate_weights = ids.numpy(), gates.numpy()
            if self.routing is not None:
                topk_ids, gate_weights = self.routing(layer, context)
            demand = LayerDemand.from_routing(
                layer,
                context,
                topk_ids,
                gate_weights,
                num_experts=self.cache.shape.num_experts,
                gate_scores=rest[0].numpy() if scores else None,
            )
            self.planning_s += time.perf_counter() - start_s
            pending = self._prepare(demand, hidden_TD, events)
            self._submit_hits_early(pending)
            start_s = time.perf_counter()
            plan = pending.plan = self.cache.plan(demand)
            self.pool.apply(demand, plan)
            if plan.low is not None:
                assert self.low_pool is not None
                self.low_pool.apply(demand, plan.low)
            if pending.has_hits:
                self.pool.submitted_readers(plan.hit_slots.tolist(), events[0])
            self.planning_s += time.perf_counter() - start_s
            if len(plan.cpu_ids):
                self._submit_cpu_experts(pending, rest[-1], plan.cpu_ids)
            if self.lossy is not None and self.lossy.precision is not None:
                self.lossy.count_low(context, topk_ids, gate_weights, plan.low_ids)
        except BaseException:
            self._abandon()
            raise
        return pending

    def finish(self, pending: PendingLayer, weights_TK: Tensor) -> Tensor:
        """Run hits, then loads as they arrive; returns the weighted sum fp32 [T, D].

        Shapes: weights fp32 [T, K], final mixing weights in router order.
        Raises: what a copy or kernel raised; the layer's residents are forgotten then.
        """
        assert pending.plan is not None
        try:
            self._submit_device_experts(pending, pending.plan)
            for event in pending.events:
                event.wait()
            if pending.cpu_out is not None:
                rows, out = pending.cpu_out
                index = self._link.to_device(torch.from_numpy(rows))
                pending.out_ND[index] = self._link.to_device(out)
            self.pool.release(pending.plan)
            if pending.plan.low is not None:
                assert self.low_pool is not None
                self.low_pool.release(pending.plan.low)
        except BaseException:
            self._abandon()
            raise
        self._unfinished = None
        for observer in self.observers:
            observer(pending.demand, pending.plan)
        return self._combine(pending, weights_TK)

    def _prepare(self, demand: LayerDemand, hidden_TD: Tensor, events: list[Event]) -> PendingLayer:
        """The rows of each expert, one after another."""
        top_k = demand.topk_ids.shape[1]
        order_N = stable_order(demand.topk_ids.ravel())
        bounds = np.zeros(len(demand.expert_ids) + 1, dtype=np.int64)
        np.cumsum(demand.num_tokens, out=bounds[1:])
        tokens_N = self._link.to_device(torch.from_numpy(order_N // top_k))
        rows_ND = hidden_TD.index_select(0, tokens_N)
        return PendingLayer(demand, rows_ND, torch.empty_like(rows_ND), order_N, bounds, events)

    def _submit_hits_early(self, pending: PendingLayer) -> None:
        """Start the hits where kernels run by themselves: a look-up is all that comes before."""
        if not self._starts_hits:
            return
        hit_ids, hit_slots = self.cache.hits(pending.demand)
        if len(hit_ids):
            work = self._work(pending, self.pool, hit_ids, hit_slots)
            pending.events.append(self._compute_lane.submit(work))
            pending.has_hits = True

    def _submit_device_experts(self, pending: PendingLayer, plan: LayerPlan) -> None:
        """What is there first, of both precisions, then what is on its way."""
        # Synchronous loads: no kernel before the copies of its wave, no copy before the kernels of
        # the last wave.
        waves = plan.wave_sizes or (len(plan.load_ids),)
        barrier = [self.pool.ready(load) for load in range(waves[0])] if plan.wave_sizes else []
        if not pending.has_hits:
            self._submit_readers(pending, self.pool, plan.hit_ids, plan.hit_slots, barrier)
        low = plan.low
        if low is not None:
            assert self.low_pool is not None
            self._submit_readers(pending, self.low_pool, low.hit_ids, low.hit_slots, barrier)
        self._submit_copied(pending, self.pool, plan, waves, barrier)
        if low is not None:
            assert self.low_pool is not None
            self._submit_copied(pending, self.low_pool, low, (len(low.load_ids),), [])

    def _submit_copied(
        self,
        pending: PendingLayer,
        pool: SlotPool,
        plan: LayerPlan,
        waves: tuple[int, ...],
        barrier: list[Event],
    ) -> None:
        """Staged experts and loads of one pool, each behind its copy."""
        if self._compute_lane.runs_at_once and not barrier:
            self._compute_arrivals(pending, pool, plan)
            return
        for staged in range(len(plan.staged_ids)):
            arrived = pool.ready_staged(int(plan.staged_slots[staged]))
            one = slice(staged, staged + 1)
            self._submit_readers(
                pending, pool, plan.staged_ids[one], plan.staged_slots[one], [*barrier, arrived]
            )
        first = 0
        for wave, size in enumerate(waves):
            if wave:
                for event in pending.events:
                    event.wait()
                pool.next_wave()
                barrier = [pool.ready(load) for load in range(first, first + size)]
            if barrier:
                loads = slice(first, first + size)
                self._submit_readers(
                    pending, pool, plan.load_ids[loads], plan.load_slots[loads], barrier
                )
            else:
                for load in range(first, first + size):
                    one = slice(load, load + 1)
                    after = [pool.ready(load)]
                    self._submit_readers(
                        pending, pool, plan.load_ids[one], plan.load_slots[one], after
                    )
            first += size

    def _compute_arrivals(self, pending: PendingLayer, pool: SlotPool, plan: LayerPlan) -> None:
        """Where the caller computes: whatever has arrived, in one call, until all have."""
        staged_slots = plan.staged_slots.tolist()
        # Numbers of staged experts, then of loads, that are still to be computed.
        num_staged = len(staged_slots)
        left = list(range(num_staged + len(plan.load_ids)))
        ids = np.concatenate((plan.staged_ids, plan.load_ids))
        slots = np.concatenate((plan.staged_slots, plan.load_slots))

        def event_of(number: int) -> Event:
            if number < num_staged:
                return pool.ready_staged(staged_slots[number])
            return pool.ready(number - num_staged)

        def is_there(number: int) -> bool:
            if number < num_staged:
                return event_of(number).is_fired
            return pool.has_arrived(number - num_staged)

        while left:
            there = [number for number in left if is_there(number)]
            if not there:
                # A load that is not queued yet waits for a reader, which is none of the computed:
                # a staged expert, and those come first.
                start_s = time.perf_counter()
                event_of(left[0]).wait()
                self.wait_s += time.perf_counter() - start_s
                there = [left[0]]
            after = [event_of(number) for number in there]
            self._submit_readers(pending, pool, ids[there], slots[there], after)
            left = [number for number in left if number not in there]

    def _submit_readers(
        self,
        pending: PendingLayer,
        pool: SlotPool,
        expert_ids: IntArray,
        slots: IntArray,
        after: Sequence[Event],
    ) -> None:
        if not len(expert_ids):
            return
        work = self._work(pending, pool, expert_ids, slots)
        event = self._compute_lane.submit(work, after=after)
        pending.events.append(event)
        pool.submitted_readers(slots.tolist(), event)

    def _work(
        self, pending: PendingLayer, pool: SlotPool, expert_ids: IntArray, slots: IntArray
    ) -> Callable[[], None]:
        starts, ends = pending.rows_of(expert_ids)
        arena, kernel = pool.arena, self._kernel

        def work() -> None:
            kernel(arena, pending.rows_ND, pending.out_ND, slots, starts, ends)

        return work

    def _submit_cpu_experts(
        self, pending: PendingLayer, hidden_TD: Tensor, cpu_ids: IntArray
    ) -> None:
        """Hidden states are the host's; the results are put among the others once, at the end."""
        assert self._cpu_lane is not None and self._host_store is not None
        starts, ends = pending.rows_of(cpu_ids)
        rows = np.concatenate([np.arange(*pair) for pair in zip(starts, ends, strict=True)])
        tokens = pending.order_N[rows] // pending.demand.topk_ids.shape[1]
        rows_ND = hidden_TD.index_select(0, torch.from_numpy(tokens))
        out_ND = torch.empty_like(rows_ND)
        sizes = ends - starts
        own_ends = np.cumsum(sizes)
        slots = self._host_store.slot_of(pending.demand.layer, 0) + cpu_ids
        arena, kernel = self._host_store.arena, self._cpu_kernel

        def work() -> None:
            kernel(arena, rows_ND, out_ND, slots, own_ends - sizes, own_ends)

        pending.cpu_out = (rows, out_ND)
        pending.events.append(self._cpu_lane.submit(work))

    def _combine(self, pending: PendingLayer, weights_TK: Tensor) -> Tensor:
        """Σ weight · output per token, fp32, in ascending expert id whatever the router's order."""
        top_k = weights_TK.shape[1]
        # Rows lie in ascending expert id; grouped by token, each token's are in that order too.
        places_N = stable_order(pending.order_N // top_k)
        both = np.stack((places_N, pending.order_N[places_N]))
        places, choices = self._link.to_device(torch.from_numpy(both))
        weights = weights_TK.flatten().index_select(0, choices)
        return combine(
            pending.out_ND, places.view(weights_TK.shape), weights.view(weights_TK.shape)
        )

    def _abandon(self) -> None:
        """Let everything under way end, then forget the layer: a slot may hold half an expert.

        What was to be copied ahead may not have been queued, so that is forgotten too.
        """
        assert self._unfinished is not None
        layer, events = self._unfinished
        self.pool.drain(events)
        if self.low_pool is not None:
            self.low_pool.drain(events)
        self.cache.forget(layer)
        self.cache.forget_ahead()
        self._unfinished = None
