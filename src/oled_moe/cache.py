"""ExpertCache: who is in which slot, and what to do for each demand.

The one place that applies the retention rule: after a demand a layer's slots hold the best of
resident or loaded experts by score, ties to the lower id. Everything is decided before anything
moves; engine and simulator drive the same object. One thread plans.
"""

from collections import deque

import numpy as np

from oled_moe.errors import ConfigError
from oled_moe.policies import OffloadPolicy
from oled_moe.policies.allocation import uniform_capacities
from oled_moe.policies.dispatch import MissSet
from oled_moe.types import BoolArray, IntArray, LayerDemand, LayerPlan, MoeShape

_NONE: IntArray = np.empty(0, dtype=np.int64)


class ExpertCache:
    """Residency table of one pool of equal slots, shared by all layers.

    The pool has `num_slots` slots for residents and `num_staging` more through which experts that
    will not stay are streamed. A layer's capacity is a count, not a range of slots. With a slot
    for every expert (`is_complete`) nothing is ever decided again once all are resident.

    Raises: ConfigError where there is not one slot, or more slots than experts.
    Source: architecture.md 3.2 and 3.3; policies.md 2.3 and 5.5.
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
        total = shape.num_experts_total
        if not 0 <= num_slots <= total:
            raise ConfigError(f"expert slots: {num_slots}; allowed: 0 to {total}, all experts")
        if num_slots < total and num_staging < 1:
            raise ConfigError(
                f"staging slots: {num_staging}; allowed: 1 or more unless all {total} fit"
            )
        self.shape = shape
        self.policy = policy
        self.num_slots = num_slots
        self.num_staging = num_staging
        self.has_cpu_experts = has_cpu_experts
        self.capacities = uniform_capacities(num_slots, shape)
        self._slot_of = np.full((shape.num_layers, shape.num_experts), -1, dtype=np.int64)
        self._owner = np.full(num_slots + num_staging, -1, dtype=np.int64)
        self._free: deque[int] = deque(range(num_slots + num_staging))
        self._num_resident = [0] * shape.num_layers
        self._num_resident_total = 0

    @property
    def is_complete(self) -> bool:
        """Whether every expert of every layer is resident."""
        return self._num_resident_total == self.shape.num_experts_total

    @property
    def num_resident(self) -> int:
        """Experts resident now, all layers."""
        return self._num_resident_total

    def resident_ids(self, layer: int) -> IntArray:
        """Ids int64 [N], ascending, of the experts resident in `layer`."""
        ids: IntArray = (self._slot_of[layer] >= 0).nonzero()[0]
        return ids

    def slot_of(self, layer: int, expert: int) -> int:
        """The slot that holds an expert, -1 where it is not resident."""
        return int(self._slot_of[layer, expert])

    def fill(self) -> list[tuple[int, int, int]]:
        """Make every expert resident; returns (layer, expert, slot) in the order to load.

        Raises: ConfigError unless there is a slot for each.
        """
        if self.num_slots != self.shape.num_experts_total:
            raise ConfigError("the cache has fewer slots than the model has experts")
        loads = []
        for layer in range(self.shape.num_layers):
            for expert in range(self.shape.num_experts):
                if self._slot_of[layer, expert] < 0:
                    slot = self._free.popleft()
                    self._take(layer, expert, slot)
                    loads.append((layer, expert, slot))
        return loads

    def plan(self, demand: LayerDemand) -> LayerPlan:
        """Decide everything for one demand and update the table to how the layer ends.

        Hits count before anything moves. Mutates: residency, and the policy's statistics.
        """
        layer = demand.layer
        capacity = int(self.capacities[layer])
        # A layer that has yet to shrink still holds, and is measured by, what it had.
        num_held = max(capacity, self._num_resident[layer])
        slot_of = self._slot_of[layer]
        slots = slot_of[demand.expert_ids]
        is_hit = slots >= 0
        hit_ids = demand.expert_ids[is_hit]
        if self.is_complete:
            return LayerPlan(hit_ids, slots, _NONE, _NONE, _NONE, _NONE, num_held)
        self._observe(demand, len(hit_ids), num_held)
        if len(hit_ids) == len(demand.expert_ids) and num_held == capacity:
            return LayerPlan(hit_ids, slots, _NONE, _NONE, _NONE, _NONE, num_held)
        return self._plan_misses(demand, is_hit, slots[is_hit], num_held)

    def _observe(self, demand: LayerDemand, num_hits: int, num_held: int) -> None:
        self.policy.retention.observe(demand)
        self.policy.dispatch.observe(demand)
        if demand.context.is_denoise:
            self.policy.allocation.observe(
                demand.layer,
                activation_ratio=len(demand.expert_ids) / self.shape.num_experts,
                utilization=num_hits / num_held if num_held else 0.0,
            )

    def _plan_misses(
        self, demand: LayerDemand, is_hit: BoolArray, hit_slots: IntArray, num_held: int
    ) -> LayerPlan:
        layer, slot_of = demand.layer, self._slot_of[demand.layer]
        # Until shrinking layers have given slots up, growing ones wait (policies.md 5.5).
        num_free = self.num_slots - self._num_resident_total
        limit = min(int(self.capacities[layer]), self._num_resident[layer] + num_free)
        is_active = np.zeros(self.shape.num_experts, dtype=np.bool_)
        is_active[demand.expert_ids] = True
        is_candidate = is_active | (slot_of >= 0)
        candidates = is_candidate.nonzero()[0]
        scores = self.policy.retention.keep_scores(candidates, demand)
        score_of = np.empty(self.shape.num_experts)
        score_of[candidates] = scores

        is_miss = ~is_hit
        hit_ids = demand.expert_ids[is_hit]
        load_ids, load_tokens = demand.expert_ids[is_miss], demand.num_tokens[is_miss]
        cpu_ids = _NONE
        if self.has_cpu_experts and len(load_ids):
            misses = MissSet(
                demand,
                load_ids,
                load_tokens,
                score_of[load_ids],
                score_of[hit_ids],
                limit,
            )
            to_cpu = self.policy.dispatch.split(misses)
            cpu_ids = load_ids[to_cpu]
            if len(cpu_ids):
                to_load = ~to_cpu
                load_ids, load_tokens = load_ids[to_load], load_tokens[to_load]
                is_candidate[cpu_ids] = False
                candidates = is_candidate.nonzero()[0]
                scores = score_of[candidates]

        order = np.argsort(-scores, kind="stable")
        is_kept = np.zeros(self.shape.num_experts, dtype=np.bool_)
        is_kept[candidates[order[:limit]]] = True
        # What stays goes before what is streamed, so that staging slots come round late; most
        # tokens first, for their compute is the longest to hide copies behind.
        stays = is_kept[load_ids]
        load_ids = load_ids[np.lexsort((-load_tokens, ~stays))]
        load_slots, freed_slots = self._assign(
            layer, load_ids, int(np.count_nonzero(stays)), is_kept, is_active
        )
        return LayerPlan(hit_ids, hit_slots, load_ids, load_slots, cpu_ids, freed_slots, num_held)

    def _assign(
        self,
        layer: int,
        load_ids: IntArray,
        num_kept: int,
        is_kept: BoolArray,
        is_active: BoolArray,
    ) -> tuple[IntArray, IntArray]:
        """A slot for each load, the first `num_kept` of which stay; and the slots left free.

        Slots in the order they are used: free ones, those of evicted experts this layer does not
        read, then round again those that streamed experts passed through; those of evicted hits,
        which the layer reads first, only where nothing else is left. Mutates: the table, to how
        it is when the layer is done.
        """
        slot_of = self._slot_of[layer]
        evicted = ((slot_of >= 0) & ~is_kept).nonzero()[0]
        evicted_slots = slot_of[evicted]
        is_read = is_active[evicted]
        self._owner[evicted_slots] = -1
        slot_of[evicted] = -1
        free, late = self._free, evicted_slots[is_read].tolist()
        free.extend(evicted_slots[~is_read].tolist())
        kept_slots = [free.popleft() if free else late.pop(0) for _ in range(num_kept)]
        streamed_slots = []
        for _ in range(len(load_ids) - num_kept):
            slot = free.popleft() if free else late.pop(0)
            streamed_slots.append(slot)
            free.append(slot)
        free.extend(late)
        kept_ids = load_ids[:num_kept]
        slot_of[kept_ids] = kept_slots
        self._owner[kept_slots] = layer * self.shape.num_experts + kept_ids
        self._add_residents(layer, num_kept - len(evicted))
        load_slots = np.array(kept_slots + streamed_slots, dtype=np.int64)
        touched = np.concatenate((evicted_slots, load_slots[num_kept:]))
        return load_slots, touched[self._owner[touched] < 0]

    def end_forward(self, *, is_denoise: bool) -> None:
        """After the last layer of a forward: let the allocation move capacities.

        Layers that must shrink do so at their next demand. Mutates: `capacities`.
        """
        if is_denoise:
            capacities = self.policy.allocation.end_forward(self.capacities)
            if capacities is not None:
                self.capacities = capacities

    def forget(self, layer: int) -> IntArray:
        """Drop all residents of a layer, after a forward that failed in it; their slots [N].

        Also mends the tables where a plan of that layer was cut short by an interrupt.
        """
        slots: IntArray = (self._owner // self.shape.num_experts == layer).nonzero()[0]
        self._owner[slots] = -1
        self._slot_of[layer] = -1
        # Made anew from the owners, not adjusted: these may be a step ahead or behind.
        self._free = deque((self._owner < 0).nonzero()[0].tolist())
        self._num_resident[layer] = 0
        self._num_resident_total = sum(self._num_resident)
        return slots

    def _take(self, layer: int, expert: int, slot: int) -> None:
        self._slot_of[layer, expert] = slot
        self._owner[slot] = layer * self.shape.num_experts + expert
        self._add_residents(layer, 1)

    def _add_residents(self, layer: int, change: int) -> None:
        self._num_resident[layer] += change
        self._num_resident_total += change

    def check(self) -> None:
        """Assert that the tables are inverse to each other and every count holds."""
        layers, experts = (self._slot_of >= 0).nonzero()
        slots = self._slot_of[layers, experts]
        assert len(np.unique(slots)) == len(slots), "two experts share a slot"
        owners = layers * self.shape.num_experts + experts
        assert np.array_equal(self._owner[slots], owners), "slot and owner tables differ"
        assert (self._owner >= 0).sum() == len(slots), "a slot is owned by a stranger"
        free = sorted(self._free)
        assert free == (self._owner < 0).nonzero()[0].tolist(), "free list and owners differ"
        counts = np.bincount(layers, minlength=self.shape.num_layers)
        assert counts.tolist() == self._num_resident, "resident counts differ"
        assert len(slots) == self._num_resident_total, "the total of residents differs"
        assert len(slots) <= self.num_slots, "more residents than slots"
        assert int(self.capacities.sum()) == self.num_slots, "capacities do not sum to the slots"
