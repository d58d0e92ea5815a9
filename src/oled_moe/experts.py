"""OffloadedExperts: the routed experts of all layers, the one place where decisions meet bytes.

demand -> plan -> copies, hits, CPU experts at once -> combine. Outputs are combined in fp32 in
ascending expert id, so the sum does not depend on what was cached.
Legend: T tokens, D hidden, K experts per token, N = T · K rows, in order of expert.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oled_moe.cache import ExpertCache
from oled_moe.kernels import ExpertKernel
from oled_moe.lanes import Event, Lane
from oled_moe.slots import SlotPool
from oled_moe.store import ExpertWeights, HostExpertStore
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


@dataclass(slots=True)
class PendingLayer:
    """A layer whose copies and CPU experts are under way; `events` of all kernels submitted."""

    demand: LayerDemand
    plan: LayerPlan
    rows_ND: Tensor
    out_ND: Tensor
    order_N: IntArray
    rows_of: dict[int, slice]
    events: list[Event]


class OffloadedExperts:
    """Computes the routed experts of a layer from slots, whatever is resident.

    `compute_lane` runs the device's kernels, `cpu_lane` those of experts that stay in the slow
    tier (`host_store`; both None where there is no second place to compute). `observers` see every
    demand and its plan once the layer is done, `copy_observers` what is copied ahead before a
    forward. `wants_gate_scores` asks the model for all router scores. One thread calls.
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
    ) -> None:
        self.cache = cache
        self.pool = pool
        self.observers: list[Observer] = []
        self.copy_observers: list[CopyObserver] = []
        self.wants_gate_scores = "gate_scores" in cache.policy.needs
        self.planning_s = 0.0
        self._kernel = kernel
        self._cpu_kernel = cpu_kernel or kernel
        self._compute_lane = compute_lane
        self._cpu_lane = cpu_lane
        self._host_store = host_store
        # The layer between `start` and the end of `finish`, and the events of what it runs.
        self._unfinished: tuple[int, list[Event]] | None = None

    def start_forward(self, context: ForwardContext) -> None:
        """Before the first layer: set going what is copied ahead."""
        start_s = time.perf_counter()
        try:
            copies = self.cache.start_forward(context)
            self.planning_s += time.perf_counter() - start_s
            self.pool.copy_ahead(copies)
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
        # The layer's one device-to-host synchronisation.
        topk_ids = topk_ids_TK.numpy()
        gate_weights = gate_weights_TK.numpy()
        start_s = time.perf_counter()
        demand = LayerDemand.from_routing(
            layer,
            context,
            topk_ids,
            gate_weights,
            num_experts=self.cache.shape.num_experts,
            gate_scores=None if gate_scores_TE is None else gate_scores_TE.numpy(),
        )
        events: list[Event] = []
        self._unfinished = (layer, events)
        try:
            plan = self.cache.plan(demand)
            self.planning_s += time.perf_counter() - start_s
            self.pool.apply(demand, plan)
            order_N = np.argsort(topk_ids.ravel(), kind="stable")
            rows_ND = hidden_TD[torch.from_numpy(order_N // topk_ids.shape[1])]
            ends = np.cumsum(demand.num_tokens).tolist()
            rows = map(slice, [0, *ends[:-1]], ends)
            rows_of = dict(zip(demand.expert_ids.tolist(), rows, strict=True))
            pending = PendingLayer(
                demand, plan, rows_ND, torch.empty_like(rows_ND), order_N, rows_of, events
            )
            self._submit_cpu_experts(pending)
        except BaseException:
            self._abandon()
            raise
        return pending

    def finish(self, pending: PendingLayer, weights_TK: Tensor) -> Tensor:
        """Run hits, then loads as they arrive; returns the weighted sum fp32 [T, D].

        Shapes: weights fp32 [T, K], final mixing weights in router order.
        Raises: what a copy or kernel raised; the layer's residents are forgotten then.
        """
        try:
            self._submit_device_experts(pending)
            for event in pending.events:
                event.wait()
            self.pool.release(pending.plan)
        except BaseException:
            self._abandon()
            raise
        self._unfinished = None
        for observer in self.observers:
            observer(pending.demand, pending.plan)
        return _combine(pending.out_ND, pending.order_N, weights_TK)

    def _submit_device_experts(self, pending: PendingLayer) -> None:
        plan, pool = pending.plan, self.pool
        loads = list(zip(plan.load_ids.tolist(), plan.load_slots.tolist(), strict=True))
        # Synchronous loads: no kernel before the copies of its wave, no copy before the kernels of
        # the last wave.
        waves = plan.wave_sizes or (len(loads),)
        barrier = [pool.ready(load) for load in range(waves[0])] if plan.wave_sizes else []
        for expert, slot in zip(plan.hit_ids.tolist(), plan.hit_slots.tolist(), strict=True):
            self._submit_reader(pending, expert, slot, barrier)
        for expert, slot in zip(plan.staged_ids.tolist(), plan.staged_slots.tolist(), strict=True):
            self._submit_reader(pending, expert, slot, [*barrier, pool.ready_staged(slot)])
        first = 0
        for wave, size in enumerate(waves):
            if wave:
                for event in pending.events:
                    event.wait()
                pool.next_wave()
                barrier = [pool.ready(load) for load in range(first, first + size)]
            for load in range(first, first + size):
                self._submit_reader(pending, *loads[load], barrier or [pool.ready(load)])
            first += size

    def _submit_reader(
        self, pending: PendingLayer, expert: int, slot: int, after: list[Event]
    ) -> None:
        work = self._work(pending, expert, self.pool.weights(slot), self._kernel)
        pending.events.append(self._compute_lane.submit(work, after=after))
        self.pool.submitted_reader(slot, pending.events[-1])

    def _submit_cpu_experts(self, pending: PendingLayer) -> None:
        if not len(pending.plan.cpu_ids):
            return
        assert self._cpu_lane is not None and self._host_store is not None
        for expert in pending.plan.cpu_ids.tolist():
            weights = self._host_store.weights(pending.demand.layer, expert)
            work = self._work(pending, expert, weights, self._cpu_kernel)
            pending.events.append(self._cpu_lane.submit(work))

    def _work(
        self, pending: PendingLayer, expert: int, weights: ExpertWeights, kernel: ExpertKernel
    ) -> Callable[[], None]:
        rows = pending.rows_of[expert]

        def work() -> None:
            pending.out_ND[rows] = kernel(pending.rows_ND[rows], weights)

        return work

    def _abandon(self) -> None:
        """Let everything under way end, then forget the layer: a slot may hold half an expert.

        What was to be copied ahead may not have been queued, so that is forgotten too.
        """
        assert self._unfinished is not None
        layer, events = self._unfinished
        self.pool.drain(events)
        self.cache.forget(layer)
        self.cache.forget_ahead()
        self._unfinished = None


def _combine(out_ND: Tensor, order_N: IntArray, weights_TK: Tensor) -> Tensor:
    """Σ weight · output per token, fp32, in ascending expert id whatever the router's order."""
    num_tokens, top_k = weights_TK.shape
    place_of = np.empty_like(order_N)
    place_of[order_N] = np.arange(len(order_N))
    # Rows lie in ascending expert id, so a token's rows in ascending place are in that order too.
    place_TK = torch.from_numpy(np.sort(place_of.reshape(num_tokens, top_k), axis=1))
    weights_N = weights_TK.flatten()[torch.from_numpy(order_N)]
    total_TD = torch.zeros(num_tokens, out_ND.shape[1], dtype=torch.float32)
    for k in range(top_k):
        place_T = place_TK[:, k]
        total_TD += out_ND[place_T].float() * weights_N[place_T, None]
    return total_TD
