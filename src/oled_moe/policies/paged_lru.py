"""Paged LRU: experts as pages that are brought in on demand, all of a layer's misses at once.

Source: the plain demand-paging cache of mixtral-offloading (src/expert_cache.py), without its
speculation, four buffers and copies back to the host; policies.md 6.1, 10.2.
"""

import numpy as np

from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import LoadAllDispatchPolicy
from oled_moe.policies.offload import OffloadPolicy, PolicyInputs
from oled_moe.types import FloatArray, IntArray, LayerDemand, MoeShape


class OrderedLruRetentionPolicy:
    """LRU to the single use: within a forward, who first appears later is the more recent.

    Appearance goes over the tokens in order, and over the ranks of each.
    """

    is_stack = True

    def __init__(self, shape: MoeShape) -> None:
        self._last_use = np.full((shape.num_layers, shape.num_experts), -1, dtype=np.int64)
        self._num_uses = [0] * shape.num_layers

    def observe(self, demand: LayerDemand) -> None:
        layer, order = demand.layer, demand.topk_ids.ravel()
        start = self._num_uses[layer]
        self._num_uses[layer] = end = start + len(order)
        # From the back: of several uses the first in the forward is written last.
        self._last_use[layer, order[::-1]] = np.arange(end - 1, start - 1, -1)

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        scores: FloatArray = self._last_use[demand.layer][expert_ids].astype(np.float64)
        return scores


def build(inputs: PolicyInputs) -> OffloadPolicy:
    """Paged LRU; copies block the layer, wave by wave where its demand exceeds its slots."""
    return OffloadPolicy(
        inputs.spec,
        OrderedLruRetentionPolicy(inputs.shape),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
        is_synchronous=True,
    )
