"""Fiddler: the popular experts stay on the device; each miss goes where it is done sooner.

Source: efeslab/fiddler, src/fiddler/mixtral.py; policies.md 6.7.
"""

import numpy as np

from oled_moe.costs import CostModel
from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import MissSet
from oled_moe.policies.offload import OffloadPolicy, PolicyInputs
from oled_moe.policies.placement import PopularPlacementPolicy
from oled_moe.types import BoolArray, LayerDemand


class CostDispatchPolicy:
    """Per miss, the copy or the CPU, by measured times.

    `is_balanced` False: the least sum of all times, which is a choice for each expert alone: it
    is copied exactly where the CPU would take longer than the copy. The original enumerates all
    2^E subsets for the same answer. True: the least maximum of both sides, which its comment
    announces; copies cost the same, so the experts with most tokens are the ones to copy.
    Source: efeslab/fiddler, src/fiddler/mixtral.py, with profiled costs for its 7 and 70.
    """

    def __init__(self, costs: CostModel, *, is_balanced: bool = False) -> None:
        self._costs = costs
        self._is_balanced = is_balanced

    def observe(self, demand: LayerDemand) -> None:
        pass

    def split(self, misses: MissSet) -> BoolArray:
        costs = self._costs
        cpu_s = costs.cpu_base_s + costs.cpu_token_s * misses.num_tokens
        if not self._is_balanced:
            return np.asarray(cpu_s <= costs.transfer_s)
        order = np.argsort(-cpu_s, kind="stable")
        num_copied = np.arange(len(order) + 1)
        rest_s = np.concatenate((cpu_s[order][::-1].cumsum()[::-1], [0.0]))
        # The first of equal maxima: no copy that does not pay.
        best = int(np.argmin(np.maximum(num_copied * costs.transfer_s, rest_s)))
        to_cpu = np.full(len(order), True)
        to_cpu[order[:best]] = False
        return to_cpu


def build(inputs: PolicyInputs) -> OffloadPolicy:
    """Fiddler by the `rule` sum or max, placed after `warmup` requests."""
    rule = inputs.parameters.choice("rule", ("sum", "max"), "sum")
    warmup = inputs.parameters.integer("warmup", 1, minimum=1, maximum=1_000_000)
    assert warmup is not None
    placement = PopularPlacementPolicy(inputs.shape, warmup=warmup)
    return OffloadPolicy(
        inputs.spec,
        placement,
        UniformAllocationPolicy(),
        CostDispatchPolicy(inputs.costs, is_balanced=rule == "max"),
        placement=placement,
        listeners=(placement,),
    )
