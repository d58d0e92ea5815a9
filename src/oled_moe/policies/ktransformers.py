"""KTransformers: a static set of experts on the device, the CPU computes all others.

Source: kvcache-ai/ktransformers, kt-kernel/python/experts_base.py and
doc/en/kt-kernel/experts-sched-Tutorial.md; kvcache-ai/sglang, kt_ep_wrapper.py; policies.md 6.6.
"""

import numpy as np

from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import MissSet
from oled_moe.policies.offload import OffloadPolicy, PolicyInputs
from oled_moe.policies.placement import (
    FixedPlacementPolicy,
    PopularPlacementPolicy,
    most_used,
    tokens_per_expert,
)
from oled_moe.types import BoolArray, LayerDemand, MoeShape, Phase


class StaticDispatchPolicy:
    """Misses run on the CPU, but for long prefills: `prefill_threshold` prompt tokens or more.

    Those bring the whole layer to the device, streamed. Deferring the lighter experts of a token
    by a layer (the original's m > 0) changes results and is not built.
    Source: kt_ep_wrapper.py, gpu_prefill_token_threshold.
    """

    def __init__(self, prefill_threshold: int) -> None:
        self._prefill_threshold = prefill_threshold

    def observe(self, demand: LayerDemand) -> None:
        pass

    def split(self, misses: MissSet) -> BoolArray:
        if is_long_prefill(misses.demand, self._prefill_threshold):
            return np.zeros(len(misses.expert_ids), dtype=np.bool_)
        # A member that is missing, after a copy that failed, comes back.
        return np.asarray(misses.scores == 0)


class DynamicPlacementPolicy(FixedPlacementPolicy):
    """After a long prefill a layer keeps those of its experts to which most tokens went.

    Ties go to lower ids. Where fewer experts were used than there are slots, residents fill the
    rest: the original copies in unused experts there, which nobody has asked for.
    Source: kt_ep_wrapper.py, dynamic expert update; policies.md 6.6.
    """

    def __init__(self, shape: MoeShape, *, prefill_threshold: int) -> None:
        super().__init__(shape)
        self._prefill_threshold = prefill_threshold

    def observe(self, demand: LayerDemand) -> None:
        if not is_long_prefill(demand, self._prefill_threshold):
            return
        layer, num_experts = demand.layer, self.shape.num_experts
        counts = tokens_per_expert(demand, num_experts, (Phase.PREFILL,))
        # An unused expert that is not resident is out of reach: below all others.
        reachable = np.where((counts > 0) | self.is_member[layer], counts, -1)
        size = int(np.count_nonzero(self.is_member[layer]))
        self.is_member[layer] = most_used(reachable, size)


def is_long_prefill(demand: LayerDemand, threshold: int) -> bool:
    """Whether a forward has at least `threshold` tokens of prompts in it."""
    rows = demand.context.rows
    return sum(row.num_tokens for row in rows if row.phase == Phase.PREFILL) >= threshold


def build(inputs: PolicyInputs) -> OffloadPolicy:
    """KTransformers with a `placement`: uniform, frequency (with `scope`, `warmup`) or dynamic."""
    parameters = inputs.parameters
    kind = parameters.choice("placement", ("uniform", "frequency", "dynamic"), "uniform")
    is_global = parameters.choice("scope", ("layer", "global"), "layer") == "global"
    warmup = parameters.integer("warmup", 1, minimum=1, maximum=1_000_000)
    threshold = parameters.integer("prefill_threshold", 512, minimum=1, maximum=1_000_000)
    assert warmup is not None and threshold is not None
    dispatch = StaticDispatchPolicy(threshold)
    allocation = UniformAllocationPolicy()
    if kind == "frequency":
        popular = PopularPlacementPolicy(inputs.shape, warmup=warmup, is_global=is_global)
        return OffloadPolicy(
            inputs.spec, popular, allocation, dispatch, placement=popular, listeners=(popular,)
        )
    placement = FixedPlacementPolicy(inputs.shape)
    if kind == "dynamic":
        placement = DynamicPlacementPolicy(inputs.shape, prefill_threshold=threshold)
    return OffloadPolicy(inputs.spec, placement, allocation, dispatch, placement=placement)
