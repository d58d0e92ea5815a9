"""Which experts a layer keeps: scores for the retention rule that `cache.py` applies.

A RetentionPolicy is shown every demand of a layer (`observe`) and then asked for one score per
expert; the layer keeps the best, ties to the lower id. It never sees who is resident.
"""

from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from oled_moe.errors import ConfigError
from oled_moe.types import FloatArray, IntArray, LayerDemand, MoeShape


class RetentionPolicy(Protocol):
    """Scores experts for one layer's demand; a higher score is kept longer.

    `is_stack`: scores depend on demands alone, so what S slots hold S + 1 slots hold too.
    """

    is_stack: bool

    def observe(self, demand: LayerDemand) -> None:
        """Take note of a demand; called once for each, before `keep_scores`."""
        ...

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        """Finite scores float64 [N] for ids int64 [N] of the demand's layer."""
        ...


@runtime_checkable
class SizedRetentionPolicy(RetentionPolicy, Protocol):
    """Retention that ranks otherwise where there is much room."""

    def resize(self, capacities: IntArray) -> None:
        """Told at start and whenever they change: the slots int64 [L] of every layer."""
        ...


class GlobalRetentionPolicy(RetentionPolicy, Protocol):
    """Retention over one pool of slots for all layers."""

    def all_scores(self, demand: LayerDemand) -> FloatArray:
        """Finite scores float64 [L, E] on one scale, asked after `observe`."""
        ...


def gate_mass(demand: LayerDemand, *, num_experts: int) -> FloatArray:
    """p(e) of policies.md 2.2 for all experts: gate weight × confidence, summed, normalised.

    Shapes: float64 [E]; sums to 1, or is all 0 where every confidence is 0.
    Source: OLED-MoE, eq. for expert priority, ψ = identity.
    """
    weights = demand.gate_weights * demand.context.token_confidence[:, None]
    mass = np.bincount(demand.topk_ids.ravel(), weights.ravel(), num_experts).astype(
        float, copy=False
    )
    total = float(mass.sum())
    if total > 0:
        mass /= total
    return mass


class LruRetentionPolicy:
    """Naive LRU: the forward of the last activation (trace-format.md, replay rule 4)."""

    is_stack = True

    def __init__(self, shape: MoeShape) -> None:
        self._last_active = np.full((shape.num_layers, shape.num_experts), -1.0)

    def observe(self, demand: LayerDemand) -> None:
        self._last_active[demand.layer, demand.expert_ids] = demand.context.forward_id

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        scores: FloatArray = self._last_active[demand.layer][expert_ids]
        return scores


class LfuRetentionPolicy:
    """LFU: forwards in which the expert was active so far, never reset (replay rule 4)."""

    is_stack = True

    def __init__(self, shape: MoeShape) -> None:
        self._num_forwards = np.zeros((shape.num_layers, shape.num_experts))

    def observe(self, demand: LayerDemand) -> None:
        self._num_forwards[demand.layer, demand.expert_ids] += 1

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        scores: FloatArray = self._num_forwards[demand.layer][expert_ids]
        return scores


class PriorityRetentionPolicy:
    """OLED-MoE: confidence-weighted gate mass; inactive experts below, the latest used first.

    `prefill="tail"`: in a forward that only prefills, the mass counts the last block of each
    row's tokens alone, for those resemble the first block to be decoded (policies.md 5.10).
    Source: OLED-MoE section on priority; replay rule 4 for the inactive.
    """

    is_stack = True

    def __init__(self, shape: MoeShape, *, prefill: str = "whole") -> None:
        if prefill not in ("whole", "tail"):
            raise ConfigError(f"policy parameter prefill is {prefill!r}; allowed: whole, tail")
        self._num_experts = shape.num_experts
        self._prefill = prefill
        self._last_active = np.full((shape.num_layers, shape.num_experts), -1.0)
        self._mass: dict[int, FloatArray] = {}

    def observe(self, demand: LayerDemand) -> None:
        self._last_active[demand.layer, demand.expert_ids] = demand.context.forward_id
        if self._prefill == "tail" and demand.context.is_prefill:
            demand = _tail_of_rows(demand)
        self._mass[demand.layer] = gate_mass(demand, num_experts=self._num_experts)

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        age = demand.context.forward_id - self._last_active[demand.layer][expert_ids]
        # An active expert has age 0 and p >= 0; an inactive one has mass 0 and age >= 1.
        scores: FloatArray = self._mass[demand.layer][expert_ids] - age
        return scores


def _tail_of_rows(demand: LayerDemand) -> LayerDemand:
    """The same demand with confidence 0 outside the last block of every row."""
    confidence = np.zeros_like(demand.context.token_confidence)
    end = 0
    for row in demand.context.rows:
        end += row.num_tokens
        start = max(end - demand.context.block_length, end - row.num_tokens)
        confidence[start:end] = demand.context.token_confidence[start:end]
    return replace(demand, context=replace(demand.context, token_confidence=confidence))
