"""How many slots each layer gets out of the total.

An AllocationPolicy is shown every layer's activation ratio and utilisation and, after each
denoising forward, may return new capacities. They always sum to the total.
"""

from typing import Protocol

import numpy as np

from oled_moe.types import FloatArray, IntArray, MoeShape


def uniform_capacities(total: int, shape: MoeShape) -> IntArray:
    """`total` slots over the layers as evenly as whole slots allow, first layers first."""
    base, extra = divmod(total, max(shape.num_layers, 1))
    return base + (np.arange(shape.num_layers) < extra).astype(np.int64)


class AllocationPolicy(Protocol):
    """Turns what was seen of each layer into whole capacities."""

    def observe(self, layer: int, *, activation_ratio: float, utilization: float) -> None:
        """Note one layer of a denoising forward: |A|/E, and |A ∩ R|/C before anything moves."""
        ...

    def end_forward(self, capacities: IntArray) -> IntArray | None:
        """After a denoising forward: new capacities int64 [L], or None to leave them."""
        ...


class UniformAllocationPolicy:
    """Every layer keeps the capacity it started with."""

    def observe(self, layer: int, *, activation_ratio: float, utilization: float) -> None:
        pass

    def end_forward(self, capacities: IntArray) -> IntArray | None:
        return None


class AdaptiveAllocationPolicy:
    """OLED-MoE's layer-adaptive capacities: C_l ∝ a_l · u_l every `period` denoising forwards.

    Statistics are smoothed with weight `smoothing` on the past: without it the rule swings for
    ever where capacity exceeds the active set (policies.md 5.2). Bounds: min(top_k, mean capacity)
    and the number of experts, and at most a quarter of a layer's capacity per update (5.4).

    Source: OLED-MoE, layer-adaptive allocation; architecture.md 3.3.
    """

    def __init__(self, shape: MoeShape, *, period: int = 5, smoothing: float = 0.9) -> None:
        self._shape = shape
        self._period = period
        self._smoothing = smoothing
        self._activation = np.full(shape.num_layers, np.nan)
        self._utilization = np.full(shape.num_layers, np.nan)
        self._num_forwards = 0

    def observe(self, layer: int, *, activation_ratio: float, utilization: float) -> None:
        for smoothed, value in (
            (self._activation, activation_ratio),
            (self._utilization, utilization),
        ):
            past = smoothed[layer]
            smoothed[layer] = (
                value if past != past else self._smoothing * past + (1 - self._smoothing) * value
            )

    def end_forward(self, capacities: IntArray) -> IntArray | None:
        self._num_forwards += 1
        if self._num_forwards % self._period:
            return None
        weights = np.nan_to_num(self._activation * self._utilization)
        return allocate(weights, capacities, self._shape)


def allocate(weights: FloatArray, capacities: IntArray, shape: MoeShape) -> IntArray:
    """Whole capacities proportional to `weights` within the bounds; the sum stays what it was.

    Shapes: float64 [L] not negative, int64 [L] -> int64 [L].
    """
    total = int(capacities.sum())
    step = np.maximum(1, capacities // 4)
    floor = min(shape.top_k, total // max(shape.num_layers, 1))
    # A layer may start below the floor (a mean that is no whole number); never force it down.
    lowest = np.minimum(capacities, np.maximum(floor, capacities - step))
    highest = np.minimum(shape.num_experts, capacities + step)
    share = _scale_into(weights, lowest.astype(float), highest.astype(float), float(total))
    if (np.abs(share - capacities) < 1).all():
        # Nobody is owed a slot. Moving on the remainders alone would swap slots for ever.
        return capacities
    return _round_to_sum(share, lowest, highest, total)


def _scale_into(
    weights: FloatArray, lowest: FloatArray, highest: FloatArray, total: float
) -> FloatArray:
    """clip(s·weights, lowest, highest) with the s for which it sums to `total`.

    Clamped layers hand what they cannot take to the others in proportion to weight; a layer of
    weight 0 takes part with a vanishing one, so that a sum always exists.
    """
    largest = float(weights.max(initial=0.0))
    weights = np.maximum(weights / largest, 1e-9) if largest > 0 else np.ones_like(weights)
    low, high = 0.0, float(highest.max(initial=1.0)) / float(weights.min(initial=1.0)) + 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if np.clip(middle * weights, lowest, highest).sum() < total:
            low = middle
        else:
            high = middle
    return np.clip(high * weights, lowest, highest)


def _round_to_sum(share: FloatArray, lowest: IntArray, highest: IntArray, total: int) -> IntArray:
    """Largest remainder within the bounds; ties to the lower layer (policies.md 5.3)."""
    whole = np.clip(np.floor(share + 1e-9).astype(np.int64), lowest, highest)
    order = np.argsort(-(share - whole), kind="stable")
    missing = total - int(whole.sum())
    while missing:
        step = 1 if missing > 0 else -1
        for layer in order if step > 0 else order[::-1]:
            if missing and lowest[layer] <= whole[layer] + step <= highest[layer]:
                whole[layer] += step
                missing -= step
    return whole
