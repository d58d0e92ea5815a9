"""Placements: which experts are resident before anybody asked, and when that changes.

Static systems (KTransformers, Fiddler, llama.cpp's --n-cpu-moe) and TIDE start from one.
"""

from collections.abc import Collection
from typing import Protocol

import numpy as np

from oled_moe.types import (
    BoolArray,
    FloatArray,
    ForwardContext,
    ForwardOutcome,
    IntArray,
    LayerDemand,
    MoeShape,
    Phase,
)

# The rows whose tokens are a block's own: a prompt says little about them (policies.md 10.4, 10.5).
BLOCK_PHASES = (Phase.DENOISE, Phase.COMMIT)


class PlacementPolicy(Protocol):
    """Says who shall be resident, from outside the retention rule."""

    def target(self, capacities: IntArray) -> list[IntArray] | None:
        """Ids int64 [N], ascending, for every layer, or None to leave everything as it is.

        Asked once at start with the capacities int64 [L] in force, and before every forward. All
        other residents leave. Layers may hold more or fewer than their capacity as long as all
        together do not exceed the slots; their sizes become the capacities.
        """
        ...


class FixedPlacementPolicy:
    """A set of experts that stays, and lets nobody else in; it starts as the first of each layer.

    Placement and retention in one: members score 1 and all others 0, so that what is loaded for
    a demand is streamed. `is_member`: bool [L, E]; a subclass may change the set of a layer when
    it observes a demand, as long as the new members are resident or loaded for it.
    Source: KTransformers, placement `uniform`; TIDE, initial placement.
    """

    is_stack = False

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self.is_member: BoolArray = np.zeros((shape.num_layers, shape.num_experts), dtype=np.bool_)
        self._is_placed = False

    def target(self, capacities: IntArray) -> list[IntArray] | None:
        if self._is_placed:
            return None
        self._is_placed = True
        return self._place(np.arange(self.shape.num_experts) < capacities[:, None])

    def observe(self, demand: LayerDemand) -> None:
        pass

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        scores: FloatArray = self.is_member[demand.layer][expert_ids].astype(np.float64)
        return scores

    def _place(self, is_member: BoolArray) -> list[IntArray]:
        self.is_member = is_member
        return [row.nonzero()[0] for row in is_member]


class PopularPlacementPolicy(FixedPlacementPolicy):
    """A fixed set that is chosen anew, once, by what `warmup` requests used most.

    Tokens per expert are counted over the block's own tokens. `is_global`: the most popular of
    all layers together, so that layers differ in size; otherwise as many in each as before. Ties
    go to the lower layer, then the lower id. Also a ForwardListener: it counts requests.
    Source: KTransformers, placement `frequency`; Fiddler, popularity ranking.
    """

    def __init__(self, shape: MoeShape, *, warmup: int, is_global: bool = False) -> None:
        super().__init__(shape)
        self._num_tokens = np.zeros((shape.num_layers, shape.num_experts), dtype=np.int64)
        self._num_requests_left = warmup
        self._is_global = is_global
        self._is_chosen = False

    def target(self, capacities: IntArray) -> list[IntArray] | None:
        if not self._is_placed or self._is_chosen or self._num_requests_left > 0:
            return super().target(capacities)
        self._is_chosen = True
        counts = self._num_tokens
        if self._is_global:
            total = int(capacities.sum())
            return self._place(most_used(counts.ravel(), total).reshape(counts.shape))
        rows = [most_used(*pair) for pair in zip(counts, capacities.tolist(), strict=True)]
        return self._place(np.array(rows, dtype=np.bool_).reshape(counts.shape))

    def observe(self, demand: LayerDemand) -> None:
        if not self._is_chosen:
            self._num_tokens[demand.layer] += tokens_per_expert(demand, self.shape.num_experts)

    def start_forward(self, context: ForwardContext) -> None:
        pass

    def end_forward(self, outcome: ForwardOutcome) -> None:
        pass

    def end_request(self, request_id: int) -> None:
        self._num_requests_left -= 1


def tokens_per_expert(
    demand: LayerDemand, num_experts: int, phases: Collection[Phase] = BLOCK_PHASES
) -> IntArray:
    """Tokens int64 [E] routed to each expert, of rows in `phases` alone."""
    rows = demand.context.rows
    is_counted = [row.phase in phases for row in rows]
    if all(is_counted):
        counts = np.zeros(num_experts, dtype=np.int64)
        counts[demand.expert_ids] = demand.num_tokens
        return counts
    is_token_counted = np.repeat(is_counted, [row.num_tokens for row in rows])
    return np.bincount(demand.topk_ids[is_token_counted].ravel(), minlength=num_experts)


def most_used(counts: IntArray, num_chosen: int) -> BoolArray:
    """bool [N]: the `num_chosen` with the highest counts, ties to the lower index."""
    size = len(counts)
    is_chosen: BoolArray = np.full(size, num_chosen >= size)
    if 0 < num_chosen < size:
        # No two alike, so that a partition will do.
        ranks = counts * size - np.arange(size)
        is_chosen[np.argpartition(ranks, size - num_chosen)[size - num_chosen :]] = True
    return is_chosen
