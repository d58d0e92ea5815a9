"""Policies that know what will be demanded: bounds for all others, in simulation only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oled_moe.types import FloatArray, IntArray, LayerDemand, MoeShape

# A distance that stands for never; finite, so that scores stay numbers.
_NEVER = 1e15


@dataclass(frozen=True, slots=True)
class DemandFuture:
    """Which experts every forward of a trace demands.

    `active[i][l]`: ids int64 [A], ascending, of forward i at layer l; None where the layer's
    experts are skipped. `forward_id` of a context is the index i.
    """

    active: Sequence[Sequence[IntArray | None]]

    @property
    def num_forwards(self) -> int:
        return len(self.active)


class BeladyRetentionPolicy:
    """Clairvoyant retention: what is wanted soonest stays (trace-format.md, replay rule 4).

    Under the retention rule, which may also stream a miss without keeping it, no other demand-
    filled policy at the same uniform capacities has more hits.
    Source: Belady 1966, with bypass; checked against brute force in the tests.
    """

    is_stack = True

    def __init__(self, shape: MoeShape, future: DemandFuture) -> None:
        # next_use[l][i, e]: the forward after i in which layer l activates e. Kept as int32: 20
        # layers of 256 experts over 1,000 forwards are 20 MB.
        never = np.iinfo(np.int32).max
        self._next_use = np.full(
            (shape.num_layers, future.num_forwards, shape.num_experts), never, dtype=np.int32
        )
        for layer in range(shape.num_layers):
            coming = np.full(shape.num_experts, never, dtype=np.int32)
            for forward_id in range(future.num_forwards - 1, -1, -1):
                self._next_use[layer, forward_id] = coming
                ids = future.active[forward_id][layer]
                if ids is not None:
                    coming[ids] = forward_id

    def observe(self, demand: LayerDemand) -> None:
        pass

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        forward_id = demand.context.forward_id
        next_use = self._next_use[demand.layer, forward_id][expert_ids].astype(float)
        never = np.iinfo(np.int32).max
        scores: FloatArray = np.where(next_use == never, -_NEVER, forward_id - next_use)
        return scores


class OraclePolicy:
    """Upper bounds: how many of a demand are resident if slots could be filled at no cost.

    `is_total` False: min(|A|, C_l) at every layer. True: slots move freely between layers too; the
    hits of one forward sum to at most all slots and are shared out in proportion to demand.
    Source: OLED-MoE's ideal cache bound; policies.md 6.3.
    """

    def __init__(self, future: DemandFuture, *, is_total: bool = False) -> None:
        self._future = future
        self._is_total = is_total
        self._quotas: tuple[int, dict[int, int]] = (-1, {})

    def num_hits(self, demand: LayerDemand, capacity: int, num_slots: int) -> int:
        """How many of the demanded experts are found resident."""
        num_active = len(demand.expert_ids)
        if not self._is_total:
            return min(num_active, capacity)
        forward_id = demand.context.forward_id
        if self._quotas[0] != forward_id:
            self._quotas = (forward_id, self._share_out(forward_id, num_slots))
        return self._quotas[1][demand.layer]

    def _share_out(self, forward_id: int, num_slots: int) -> dict[int, int]:
        """Slots over the layers of a forward by largest remainder, none above its demand."""
        sizes = {
            layer: len(ids)
            for layer, ids in enumerate(self._future.active[forward_id])
            if ids is not None
        }
        total = sum(sizes.values())
        if total <= num_slots:
            return sizes
        quotas = {layer: size * num_slots // total for layer, size in sizes.items()}
        left = num_slots - sum(quotas.values())
        by_remainder = sorted(sizes, key=lambda layer: -(sizes[layer] * num_slots % total))
        for layer in by_remainder[:left]:
            quotas[layer] += 1
        return quotas
