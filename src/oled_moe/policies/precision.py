"""Which missing experts may be computed from a copy in a lower precision.

A PrecisionPolicy is shown a demand and answers for some of its experts. What is resident in full
precision is used in full, whatever a policy would say of it.
Legend: T tokens, K experts per token, E experts, M experts asked about.
"""

from typing import Literal, Protocol, runtime_checkable

import numpy as np

from oled_moe.types import BoolArray, FloatArray, IntArray, LayerDemand

By = Literal["block", "token"]


@runtime_checkable
class PrecisionPolicy(Protocol):
    """Says which experts of a demand matter too little to be fetched in full; keeps no state.

    `slots`: how many experts of a layer, a mean, are kept in the lower precision.
    """

    slots: int

    def may_be_low(self, demand: LayerDemand, expert_ids: IntArray) -> BoolArray:
        """bool [M] for ids int64 [M] of the demand: True where a copy of fewer bits will do."""
        ...


class MixedPrecisionPolicy:
    """The least important choices, those that hold `share` of the importance, may be low.

    `token`: each token orders its own choices by mixing weight, and an expert that matters to one
    of the tokens matters. `block`: the experts of the layer are ordered by weight × confidence,
    summed over the tokens of the forward, which is how OLED-MoE ranks them (policies.md 2.2). Only
    rows that denoise are judged: what a prompt or a finished block asks for comes in full, since
    its keys and values stay.
    Source: HOBBIT (arXiv 2411.01433, its abstract), which replaces the less critical misses of a
    token so; both orders, for blocks of tokens that share their misses, are ours.
    """

    def __init__(self, *, share: float, by: By, slots: int) -> None:
        self._share = share
        self._by = by
        self.slots = slots

    def may_be_low(self, demand: LayerDemand, expert_ids: IntArray) -> BoolArray:
        if self._share == 0 or not demand.context.is_denoise:
            return np.zeros(len(expert_ids), dtype=np.bool_)
        is_ours = demand.context.denoising_tokens
        if self._by == "token":
            matters = ~self._least_of_tokens(demand)
            matters[~is_ours] = True
            return np.isin(expert_ids, demand.topk_ids[matters], invert=True)
        low_ids = self._least_of_layer(demand, is_ours)
        in_full = demand.topk_ids[~is_ours]
        is_low: BoolArray = np.isin(expert_ids, low_ids) & ~np.isin(expert_ids, in_full)
        return is_low

    def _least_of_tokens(self, demand: LayerDemand) -> BoolArray:
        """Which choices [T, K] are the least of their token's."""
        weights_TK = demand.gate_weights.astype(np.float64)
        order_TK = np.argsort(-weights_TK, axis=1, kind="stable")
        is_least = np.empty(weights_TK.shape, dtype=np.bool_)
        ordered = np.take_along_axis(weights_TK, order_TK, axis=1)
        np.put_along_axis(is_least, order_TK, self._is_tail(ordered), axis=1)
        return is_least

    def _least_of_layer(self, demand: LayerDemand, is_ours: BoolArray) -> IntArray:
        """Ids of the least of the experts that tokens `is_ours` [T] ask for."""
        weights = demand.gate_weights * demand.context.token_confidence[:, None]
        ids = demand.topk_ids[is_ours].ravel()
        wanted = np.unique(ids)
        sums = np.bincount(ids, weights[is_ours].ravel()).astype(np.float64, copy=False)
        mass = sums[wanted]
        order = np.argsort(-mass, kind="stable")
        least: IntArray = wanted[order[self._is_tail(mass[order])]]
        return least

    def _is_tail(self, values: FloatArray) -> BoolArray:
        """Where values in descending order, with all behind them, hold `share` of their sum."""
        # Summed from the smallest up: what is worth anything never vanishes beside the largest.
        behind = np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]
        is_tail: BoolArray = behind <= self._share * behind[..., :1]
        return is_tail
