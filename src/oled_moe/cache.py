"""ExpertCache: who is in which slot, and what to do for each demand.

The one place that applies the retention rule: after a demand a layer's slots hold the best of
resident or copied experts by score, ties to the lower id. Everything is decided before anything
moves; engine and simulator drive the same object. One thread plans.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from oled_moe.errors import ConfigError
from oled_moe.policies import OffloadPolicy
from oled_moe.policies.allocation import uniform_capacities
from oled_moe.policies.dispatch import MissSet
from oled_moe.policies.precision import PrecisionPolicy
from oled_moe.policies.retention import GlobalRetentionPolicy, SizedRetentionPolicy
from oled_moe.types import (
    NO_COPIES,
    BoolArray,
    CopyPlan,
    FloatArray,
    ForwardContext,
    ForwardOutcome,
    IntArray,
    LayerDemand,
    LayerPlan,
    MoeShape,
    Phase,
)

_NONE: IntArray = np.empty(0, dtype=np.int64)


class LowPrecision(NamedTuple):
    """Copies of all experts in a lower precision: which misses `policy` takes from them, and who
    of them lies in which of their own slots."""

    policy: PrecisionPolicy
    cache: "ExpertCache"


class ExpertCache:
    """Residency table of one pool of equal slots, shared by all layers.

    The pool has `num_slots` slots for residents and `num_staging` more, through which experts that
    will not stay are streamed and in which guesses wait for their layer. A layer's capacity is a
    count, not a range of slots. With a slot for every expert (`is_complete`) nothing is ever
    decided again once all are resident.

    For each forward: `start_forward`, `plan` for every layer in order, `end_forward`. Where the
    policy `spares_running`, prompts take no slot from experts that requests at work used in the
    latest denoising forward, which may be the same. With `low`, misses that would be copied and
    matter little are left to it: they are no candidates for a slot here.

    Raises: ConfigError where there is not one slot, or more slots than experts, and for a policy
    that knows the future.
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
        low: LowPrecision | None = None,
    ) -> None:
        total = shape.num_experts_total
        if not 0 <= num_slots <= total:
            raise ConfigError(f"expert slots: {num_slots}; allowed: 0 to {total}, all experts")
        if num_slots < total and num_staging < 1:
            raise ConfigError(
                f"staging slots: {num_staging}; allowed: 1 or more unless all {total} fit"
            )
        if policy.oracle is not None:
            raise ConfigError(f"policy {policy.name!r} works in `oled-moe simulate` only")
        self.shape = shape
        self.policy = policy
        self.num_slots = num_slots
        self.num_staging = num_staging
        self.has_cpu_experts = has_cpu_experts
        self.low = low
        self.capacities = uniform_capacities(num_slots, shape)
        self._tell_sizes()
        self._slot_of = np.full((shape.num_layers, shape.num_experts), -1, dtype=np.int64)
        # Guesses in staging slots; and residents copied ahead that no demand has used yet.
        self._staged_of = np.full_like(self._slot_of, -1)
        self._is_fresh = np.zeros_like(self._slot_of, dtype=np.bool_)
        # layer · E + expert of the resident or guess in a slot, -1 where there is neither.
        self._owner = np.full(num_slots + num_staging, -1, dtype=np.int64)
        self._free: deque[int] = deque(range(num_slots + num_staging))
        self._num_resident = [0] * shape.num_layers
        self._num_resident_total = 0
        self._num_staged = 0
        self._copies_ahead = policy.prefetch is not None or policy.placement is not None
        # Requests seen denoising that have not ended; what they wanted last, and whether the
        # forward at work must leave that alone.
        self._denoising: set[int] = set()
        self._is_in_use = np.zeros_like(self._is_fresh)
        self._is_guest = False

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

    def staged_ids(self, layer: int) -> IntArray:
        """Ids int64 [N], ascending, of the layer's guesses in staging slots."""
        ids: IntArray = (self._staged_of[layer] >= 0).nonzero()[0]
        return ids

    def slot_of(self, layer: int, expert: int) -> int:
        """The slot that holds an expert, -1 where it is not resident."""
        return int(self._slot_of[layer, expert])

    def hits(self, demand: LayerDemand) -> tuple[IntArray, IntArray]:
        """Ids and slots of demanded residents, a look-up alone: the `hit_ids` and `hit_slots` that
        `plan` will say, for kernels that start before the rest is decided."""
        slots = self._slot_of[demand.layer][demand.expert_ids]
        is_hit = slots >= 0
        if self._copies_ahead:
            is_hit &= ~self._is_fresh[demand.layer][demand.expert_ids]
        return demand.expert_ids[is_hit], slots[is_hit]

    def fill(self) -> list[tuple[int, int, int]]:
        """Make every expert resident; returns (layer, expert, slot) in the order to load.

        Raises: ConfigError unless there is a slot for each.
        """
        if self.num_slots != self.shape.num_experts_total:
            raise ConfigError("the cache has fewer slots than the model has experts")
        everyone = np.arange(self.shape.num_experts)
        copies = self._place([everyone] * self.shape.num_layers)
        return self._located(copies)

    def place(self) -> list[tuple[int, int, int]]:
        """What the policy wants resident from the start: (layer, expert, slot) to load first."""
        if self.policy.placement is None:
            return []
        target = self.policy.placement.target(self.capacities)
        return [] if target is None else self._located(self._place(target))

    def start_forward(self, context: ForwardContext) -> CopyPlan:
        """Before the first layer: copies to make while nothing urgent waits.

        Mutates: residency, where the policy places or guesses experts.
        """
        policy, copies = self.policy, NO_COPIES
        prefilled = {row.request_id for row in context.rows if row.phase == Phase.PREFILL}
        self._denoising |= {row.request_id for row in context.rows if row.phase == Phase.DENOISE}
        self._is_guest = (
            policy.spares_running and bool(prefilled) and bool(self._denoising - prefilled)
        )
        for listener in policy.listeners:
            listener.start_forward(context)
        if policy.placement is not None:
            target = policy.placement.target(self.capacities)
            if target is not None:
                copies = self._place(target)
                self._is_fresh.ravel()[copies.expert_ids] = True
        if policy.prefetch is not None and not self.is_complete:
            guesses = self._guess(policy.prefetch.predict(context, None), -1)
            copies = CopyPlan(
                np.concatenate((copies.expert_ids, guesses.expert_ids)),
                np.concatenate((copies.slots, guesses.slots)),
            )
        return copies

    def plan(self, demand: LayerDemand) -> LayerPlan:
        """Decide everything for one demand and update the table to how the layer ends.

        Hits count before anything moves. Mutates: residency, and the policy's statistics.
        """
        layer = demand.layer
        capacity = int(self.capacities[layer])
        # A layer that has yet to shrink still holds, and is measured by, what it had. So is a
        # layer that has no share of its own.
        num_held = max(capacity, self._num_resident[layer])
        if self.policy.is_global:
            num_held = self._num_resident[layer]
        slots = self._slot_of[layer][demand.expert_ids]
        is_hit = slots >= 0
        hit_ids = demand.expert_ids[is_hit]
        if self.is_complete and not (self._copies_ahead and self._is_fresh[layer].any()):
            return LayerPlan(hit_ids, slots, _NONE, _NONE, _NONE, _NONE, num_held)
        if self._copies_ahead:
            return self._plan_ahead(demand, is_hit, num_held)
        self._observe(demand, len(hit_ids), num_held)
        return self._plan_misses(demand, is_hit, slots[is_hit], num_held, _NONE, _NONE)

    def _plan_ahead(self, demand: LayerDemand, is_hit: BoolArray, num_held: int) -> LayerPlan:
        """`plan` for policies that copy experts ahead of their demand."""
        layer, expert_ids = demand.layer, demand.expert_ids
        slot_of, staged_of = self._slot_of[layer], self._staged_of[layer]
        # Residents on their first use may still be on their way: staged, wherever they lie.
        is_first_use = is_hit & self._is_fresh[layer][expert_ids]
        self._is_fresh[layer][expert_ids[is_first_use]] = False
        is_staged = staged_of[expert_ids] >= 0
        missed_guesses = np.setdiff1d(self.staged_ids(layer), expert_ids, assume_unique=True)
        missed_slots = staged_of[missed_guesses]
        self._unstage(layer, missed_guesses)
        self._owner[missed_slots] = -1
        self._free.extend(missed_slots.tolist())
        self._observe(demand, int(np.count_nonzero(is_hit & ~is_first_use)), num_held)
        copies = NO_COPIES
        if self.policy.prefetch is not None and not self.is_complete:
            copies = self._guess(self.policy.prefetch.predict(demand.context, demand), layer)
        staged_ids = expert_ids[is_staged]
        plan = self._plan_misses(
            demand,
            is_hit,
            slot_of[expert_ids[is_hit]],
            num_held,
            staged_ids,
            staged_of[staged_ids],
        )
        if self.policy.is_global and len(copies):
            # What was guessed for other layers may have lost its place to what this layer loads.
            stays = self._owner[copies.slots] == copies.expert_ids
            copies = CopyPlan(copies.expert_ids[stays], copies.slots[stays])
        is_plain = ~is_first_use[is_hit]
        first_ids = plan.hit_ids[~is_plain]
        all_staged = np.concatenate((plan.staged_ids, first_ids))
        order = np.argsort(all_staged)
        return replace(
            plan,
            hit_ids=plan.hit_ids[is_plain],
            hit_slots=plan.hit_slots[is_plain],
            staged_ids=all_staged[order],
            staged_slots=np.concatenate((plan.staged_slots, plan.hit_slots[~is_plain]))[order],
            freed_slots=np.concatenate(
                (plan.freed_slots, missed_slots[self._owner[missed_slots] < 0])
            ),
            prefetch=copies,
        )

    def _observe(self, demand: LayerDemand, num_hits: int, num_held: int) -> None:
        if demand.context.is_denoise and self.policy.spares_running:
            self._is_in_use[demand.layer] = False
            self._is_in_use[demand.layer, _wanted_at_work(demand)] = True
        self.policy.retention.observe(demand)
        self.policy.dispatch.observe(demand)
        if demand.context.is_denoise:
            self.policy.allocation.observe(
                demand.layer,
                activation_ratio=len(demand.expert_ids) / self.shape.num_experts,
                utilization=num_hits / num_held if num_held else 0.0,
            )

    def _plan_misses(
        self,
        demand: LayerDemand,
        is_hit: BoolArray,
        hit_slots: IntArray,
        num_held: int,
        staged_ids: IntArray,
        staged_slots: IntArray,
    ) -> LayerPlan:
        layer, slot_of, is_global = demand.layer, self._slot_of[demand.layer], self.policy.is_global
        hit_ids = demand.expert_ids[is_hit]
        # A layer without a miss decides nothing, unless it has yet to give slots up.
        if len(hit_ids) == len(demand.expert_ids) and (
            is_global or self._num_resident[layer] <= self.capacities[layer]
        ):
            return LayerPlan(hit_ids, hit_slots, _NONE, _NONE, _NONE, _NONE, num_held)
        # Until shrinking layers have given slots up, growing ones wait (policies.md 5.5).
        num_free = self.num_slots - self._num_resident_total
        limit = min(int(self.capacities[layer]), self._num_resident[layer] + num_free)
        if is_global:
            limit = self.num_slots
        is_active = np.zeros(self.shape.num_experts, dtype=np.bool_)
        is_active[demand.expert_ids] = True
        is_candidate = is_active | (slot_of >= 0)
        candidates = is_candidate.nonzero()[0]
        if is_global:
            every_score = self._global_retention.all_scores(demand)
            score_of = every_score[layer]
        else:
            score_of = np.empty(self.shape.num_experts)
            score_of[candidates] = self.policy.retention.keep_scores(candidates, demand)

        is_miss = ~is_hit
        if len(staged_ids):
            is_miss &= self._staged_of[layer][demand.expert_ids] < 0
        load_ids, load_tokens = demand.expert_ids[is_miss], demand.num_tokens[is_miss]
        cpu_ids = _NONE
        if self.has_cpu_experts and len(load_ids):
            there = np.concatenate((hit_ids, staged_ids)) if len(staged_ids) else hit_ids
            to_cpu = self.policy.dispatch.split(
                MissSet(
                    demand,
                    load_ids,
                    load_tokens,
                    score_of[load_ids],
                    score_of[there],
                    limit,
                )
            )
            cpu_ids = load_ids[to_cpu]
            if len(cpu_ids):
                to_load = ~to_cpu
                load_ids, load_tokens = load_ids[to_load], load_tokens[to_load]
                is_candidate[cpu_ids] = False
                candidates = is_candidate.nonzero()[0]
        low_plan = None
        if self.low is not None and len(load_ids):
            is_low = self.low.policy.may_be_low(demand, load_ids)
            if is_low.any():
                low_ids = load_ids[is_low]
                low_demand = replace(demand, expert_ids=low_ids, num_tokens=load_tokens[is_low])
                low_plan = self.low.cache.plan(low_demand)
                load_ids, load_tokens = load_ids[~is_low], load_tokens[~is_low]
                is_candidate[low_ids] = False
                candidates = is_candidate.nonzero()[0]

        if is_global:
            is_kept = self._keep_globally(layer, load_ids, staged_ids, every_score)
        else:
            is_kept = np.zeros(self.shape.num_experts, dtype=np.bool_)
            order = np.argsort(-score_of[candidates], kind="stable")
            if self._is_guest:
                order = order[np.argsort(~self._in_use(layer)[candidates[order]], kind="stable")]
            is_kept[candidates[order[:limit]]] = True
        # What stays goes before what is streamed, so that staging slots come round late; most
        # tokens first, for their compute is the longest to hide copies behind.
        stays = is_kept[load_ids]
        load_ids = load_ids[np.lexsort((-load_tokens, ~stays))]
        late = self._settle(layer, staged_ids, staged_slots, is_kept) if len(staged_ids) else []
        load_slots, freed_slots, read_slots = self._assign(
            layer, load_ids, int(np.count_nonzero(stays)), is_kept, is_active, late
        )
        waves = _waves(load_slots.tolist(), read_slots) if self.policy.is_synchronous else ()
        return LayerPlan(
            hit_ids,
            hit_slots,
            load_ids,
            load_slots,
            cpu_ids,
            freed_slots,
            num_held,
            staged_ids,
            staged_slots,
            wave_sizes=waves,
            low=low_plan,
        )

    def _in_use(self, layer: int) -> BoolArray:
        """Residents [E] of a layer that requests at work wanted last."""
        in_use: BoolArray = self._is_in_use[layer] & (self._slot_of[layer] >= 0)
        return in_use

    def _keep_globally(
        self, layer: int, load_ids: IntArray, staged_ids: IntArray, every_score: FloatArray
    ) -> BoolArray:
        """The retention rule over all layers at once; bool [E]: who of `layer` stays.

        Mutates: residents of other layers that are out leave at once; nobody reads them now.
        """
        num_experts = self.shape.num_experts
        is_candidate = (self._slot_of >= 0).ravel()
        first = layer * num_experts
        is_candidate[first + load_ids] = True
        is_candidate[first + staged_ids] = True
        candidates = is_candidate.nonzero()[0]
        order = np.argsort(-every_score.ravel()[candidates], kind="stable")
        if self._is_guest:
            in_use = (self._is_in_use & (self._slot_of >= 0)).ravel()[candidates[order]]
            order = order[np.argsort(~in_use, kind="stable")]
        out = candidates[order[self.num_slots :]]
        is_candidate[out] = False
        for number in out[(out < first) | (out >= first + num_experts)].tolist():
            self._free.append(self._evict(number))
        return is_candidate[first : first + num_experts]

    def _settle(
        self, layer: int, staged_ids: IntArray, staged_slots: IntArray, is_kept: BoolArray
    ) -> list[int]:
        """Demanded guesses become residents where they lie, or leave once they were read.

        Returns the slots of the latter. Mutates: the table.
        """
        self._unstage(layer, staged_ids)
        stays = is_kept[staged_ids]
        self._slot_of[layer][staged_ids[stays]] = staged_slots[stays]
        self._add_residents(layer, int(np.count_nonzero(stays)))
        left_slots = staged_slots[~stays]
        self._owner[left_slots] = -1
        slots: list[int] = left_slots.tolist()
        return slots

    def _assign(
        self,
        layer: int,
        load_ids: IntArray,
        num_kept: int,
        is_kept: BoolArray,
        is_active: BoolArray,
        late: list[int],
    ) -> tuple[IntArray, IntArray, list[int]]:
        """A slot for each load, the first `num_kept` of which stay; the slots left free; and those
        that are free but read by this layer first.

        Slots in the order they are used: free ones, those of evicted experts this layer does not
        read, then round again those that streamed experts passed through; those of evicted hits
        and of guesses that leave (`late`), which the layer reads first, only where nothing else is
        left. Mutates: the table, to how it is when the layer is done.
        """
        slot_of = self._slot_of[layer]
        evicted = ((slot_of >= 0) & ~is_kept).nonzero()[0]
        evicted_slots = slot_of[evicted]
        is_read = is_active[evicted]
        self._owner[evicted_slots] = -1
        slot_of[evicted] = -1
        if self._copies_ahead:
            self._is_fresh[layer][evicted] = False
        left_slots = np.array(late, dtype=np.int64)
        late = [*evicted_slots[is_read].tolist(), *late]
        read_slots = list(late)
        free = self._free
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
        touched = np.concatenate((evicted_slots, left_slots, load_slots[num_kept:]))
        return load_slots, touched[self._owner[touched] < 0], read_slots

    # Copies ahead of their demand

    def _place(self, target: Sequence[IntArray]) -> CopyPlan:
        """Make exactly `target` resident, ids for each layer; what is missing has to be copied.

        Mutates: residency and capacities, which become the sizes of the target.
        """
        sizes = np.array([len(ids) for ids in target], dtype=np.int64)
        assert len(sizes) == self.shape.num_layers and sizes.sum() <= self.num_slots, (
            "a placement holds more experts than there are slots"
        )
        is_wanted = np.zeros(self._slot_of.shape, dtype=np.bool_)
        for layer, ids in enumerate(target):
            is_wanted[layer, ids] = True
        is_resident = self._slot_of >= 0
        for number in (is_resident & ~is_wanted).ravel().nonzero()[0].tolist():
            self._free.append(self._evict(number))
        # Guesses of what is placed now would be there twice.
        guessed = (is_wanted & (self._staged_of >= 0)).ravel().nonzero()[0]
        for number in guessed.tolist():
            layer, expert = divmod(number, self.shape.num_experts)
            slot = int(self._staged_of[layer, expert])
            self._unstage(layer, np.array([expert]))
            self._owner[slot] = -1
            self._free.append(slot)
        numbers = (is_wanted & ~is_resident).ravel().nonzero()[0]
        slots = [self._take(number, self._free.popleft()) for number in numbers.tolist()]
        self.capacities = sizes
        self._tell_sizes()
        return CopyPlan(numbers, np.array(slots, dtype=np.int64))

    def _guess(self, guesses: IntArray, layer: int) -> CopyPlan:
        """Slots for the guesses that are not there yet, as far as there is room.

        `layer` is the one at work, -1 before the first. Mutates: the tables.
        """
        assert self.policy.prefetch is not None
        owner_layers = guesses // self.shape.num_experts
        is_new = (self._slot_of.ravel()[guesses] < 0) & (self._staged_of.ravel()[guesses] < 0)
        numbers = guesses[is_new & (owner_layers != layer)]
        if not len(numbers):
            return NO_COPIES
        if self.policy.prefetch.fills_pool:
            return self._guess_into_pool(numbers, layer)
        # Streams of the layers to come need slots to pass through.
        reserve = max(1, self.num_staging // 4)
        most = self.num_staging - reserve - self._num_staged
        if self.has_cpu_experts:
            most = min(most, self.policy.prefetch.most_beside_cpu)
        numbers = numbers[: max(0, most)]
        slots = [self._free.popleft() for _ in range(len(numbers))]
        self._staged_of.ravel()[numbers] = slots
        self._owner[slots] = numbers
        self._num_staged += len(numbers)
        return CopyPlan(numbers, np.array(slots, dtype=np.int64))

    def _guess_into_pool(self, numbers: IntArray, layer: int) -> CopyPlan:
        """Guesses become residents of their layers at once, the least wanted residents leave."""
        assert self.policy.prefetch is not None
        victim_scores = self.policy.prefetch.victim_scores().astype(float)
        victim_scores[self._slot_of < 0] = np.inf
        if self._is_guest:
            victim_scores[self._is_in_use] = np.inf
        if layer >= 0:
            # Whoever the layer at work reads stays until it is done.
            victim_scores[layer] = np.inf
        taken, slots = [], []
        for number in numbers.tolist():
            target, expert = divmod(number, self.shape.num_experts)
            has_room = self.policy.is_global or self._num_resident[target] < self.capacities[target]
            if has_room and self._num_resident_total < self.num_slots:
                slot = self._free.popleft()
            else:
                rivals = victim_scores if self.policy.is_global else victim_scores[target]
                lowest = int(rivals.argmin())
                if rivals.flat[lowest] == np.inf:
                    continue
                if not self.policy.is_global:
                    lowest += target * self.shape.num_experts
                victim_scores.flat[lowest] = np.inf
                slot = self._evict(lowest)
            self._take(number, slot)
            self._is_fresh[target, expert] = True
            taken.append(number)
            slots.append(slot)
        return CopyPlan(np.array(taken, dtype=np.int64), np.array(slots, dtype=np.int64))

    def _tell_sizes(self) -> None:
        if isinstance(self.policy.retention, SizedRetentionPolicy):
            self.policy.retention.resize(self.capacities)

    def _unstage(self, layer: int, ids: IntArray) -> None:
        """Guesses stop being guesses; what becomes of their slots is the caller's to say."""
        self._staged_of[layer][ids] = -1
        self._num_staged -= len(ids)

    def end_forward(self, outcome: ForwardOutcome) -> None:
        """After the last layer of a forward: let the allocation move capacities.

        Layers that must shrink do so at their next demand. Mutates: `capacities`.
        """
        for listener in self.policy.listeners:
            listener.end_forward(outcome)
        if outcome.context.is_denoise:
            capacities = self.policy.allocation.end_forward(self.capacities)
            if capacities is not None:
                self.capacities = capacities
                self._tell_sizes()

    def end_request(self, request_id: int) -> None:
        """A request has ended, well or not."""
        self._denoising.discard(request_id)
        for listener in self.policy.listeners:
            listener.end_request(request_id)

    def forget(self, layer: int) -> IntArray:
        """Drop all residents and guesses of a layer, after a forward that failed in it; their
        slots [N].

        Also mends the tables where a plan of that layer was cut short by an interrupt.
        """
        slots: IntArray = (self._owner // self.shape.num_experts == layer).nonzero()[0]
        self._slot_of[layer] = -1
        self._staged_of[layer] = -1
        self._is_fresh[layer] = False
        self._recount()
        if self.low is not None:
            self.low.cache.forget(layer)
        return slots

    def forget_ahead(self) -> None:
        """Drop everything copied ahead that no demand has used, after a failure: some of these
        copies may never have been queued."""
        self._staged_of[:] = -1
        self._slot_of[self._is_fresh] = -1
        self._is_fresh[:] = False
        self._recount()

    def _recount(self) -> None:
        """Owners, free slots and counts anew from who lies where: they may be a step ahead or
        behind, and a slot may have left its owner already."""
        self._owner[:] = -1
        for table in (self._slot_of, self._staged_of):
            numbers = (table >= 0).ravel().nonzero()[0]
            self._owner[table.ravel()[numbers]] = numbers
        self._free = deque((self._owner < 0).nonzero()[0].tolist())
        self._num_resident = np.count_nonzero(self._slot_of >= 0, axis=1).tolist()
        self._num_resident_total = sum(self._num_resident)
        self._num_staged = int(np.count_nonzero(self._staged_of >= 0))

    def _located(self, copies: CopyPlan) -> list[tuple[int, int, int]]:
        """(layer, expert, slot) of each copy."""
        pairs = zip(copies.expert_ids.tolist(), copies.slots.tolist(), strict=True)
        return [(*divmod(number, self.shape.num_experts), slot) for number, slot in pairs]

    def _take(self, number: int, slot: int) -> int:
        layer, expert = divmod(number, self.shape.num_experts)
        self._slot_of[layer, expert] = slot
        self._owner[slot] = number
        self._add_residents(layer, 1)
        return slot

    def _evict(self, number: int) -> int:
        """One resident leaves; its slot, which is on no list yet."""
        layer, expert = divmod(number, self.shape.num_experts)
        slot = int(self._slot_of[layer, expert])
        self._slot_of[layer, expert] = -1
        self._is_fresh[layer, expert] = False
        self._owner[slot] = -1
        self._add_residents(layer, -1)
        return slot

    def _add_residents(self, layer: int, change: int) -> None:
        self._num_resident[layer] += change
        self._num_resident_total += change

    @property
    def _global_retention(self) -> GlobalRetentionPolicy:
        retention: GlobalRetentionPolicy = self.policy.retention  # type: ignore[assignment]  # offload.py promises it
        return retention

    def check(self) -> None:
        """Assert that the tables are inverse to each other and every count holds."""
        assert not ((self._slot_of >= 0) & (self._staged_of >= 0)).any(), "an expert is there twice"
        place_of = np.maximum(self._slot_of, self._staged_of)
        layers, experts = (place_of >= 0).nonzero()
        slots = place_of[layers, experts]
        owners = layers * self.shape.num_experts + experts
        # Of two experts in one slot, one is not its owner.
        assert np.array_equal(self._owner[slots], owners), "slot and owner tables differ"
        assert (self._owner >= 0).sum() == len(slots), "a slot is owned by a stranger"
        free = sorted(self._free)
        assert free == (self._owner < 0).nonzero()[0].tolist(), "free list and owners differ"
        counts = np.count_nonzero(self._slot_of >= 0, axis=1).tolist()
        assert counts == self._num_resident, "resident counts differ"
        assert sum(counts) == self._num_resident_total, "the total of residents differs"
        assert sum(counts) <= self.num_slots, "more residents than slots"
        assert self._num_staged == np.count_nonzero(self._staged_of >= 0), "guess counts differ"
        assert self._num_staged < max(self.num_staging, 1), "guesses leave no slot to stream by"
        assert not (self._is_fresh & (self._slot_of < 0)).any(), "a stranger waits for a first use"
        total = int(self.capacities.sum())
        if self.policy.placement is None:
            assert total == self.num_slots, "capacities do not sum to the slots"
        assert total <= self.num_slots, "capacities exceed the slots"
        if self.low is not None:
            self.low.cache.check()


def _wanted_at_work(demand: LayerDemand) -> IntArray:
    """The experts that others than prompt tokens asked for; ids may come twice."""
    rows = demand.context.rows
    if all(row.phase != Phase.PREFILL for row in rows):
        return demand.expert_ids
    is_prompt = np.repeat(
        [row.phase == Phase.PREFILL for row in rows], [row.num_tokens for row in rows]
    )
    wanted: IntArray = demand.topk_ids[~is_prompt].ravel()
    return wanted


def _waves(load_slots: list[int], read_slots: list[int]) -> tuple[int, ...]:
    """Sizes of the waves of synchronous loads: one ends where a slot in use would be refilled."""
    sizes = []
    in_use, size = set(read_slots), 0
    for slot in load_slots:
        if slot in in_use:
            if size:
                sizes.append(size)
            elif not sizes:
                # Not one load fits beside what the layer reads: hits alone are the first wave.
                sizes.append(0)
            in_use, size = set(), 0
        in_use.add(slot)
        size += 1
    return (*sizes, size) if size else tuple(sizes)
