"""TIDE: between refreshes nothing moves; a refresh brings in the busiest experts of that step.

Source: ims-kdks/TIDE, model/modeling_llada2_moe.py and main.py; arXiv 2605.20179; policies.md 6.8.
"""

import numpy as np

from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import MissSet
from oled_moe.policies.offload import OffloadPolicy, PolicyInputs
from oled_moe.policies.placement import FixedPlacementPolicy, most_used, tokens_per_expert
from oled_moe.types import (
    BoolArray,
    ForwardContext,
    ForwardOutcome,
    LayerDemand,
    MoeShape,
    Phase,
)


class IntervalPolicy(FixedPlacementPolicy):
    """Refreshes a layer's set in every step of a request's first block, then in each τ-th step.

    A refresh follows the router of the same step: the target are the K experts with most tokens,
    those with none excluded; absent ones are promoted, and only as many others demoted, from the
    highest id. All other misses run on the CPU. Only denoised tokens count (the original counts
    its recomputed prefix too). Forwards of several sequences, which the original does not have,
    refresh when one of theirs is due.
    Prefills, which it does not have either, stream their misses; they and commit passes leave
    the set alone. The CPU computes what a commit pass misses.
    """

    def __init__(self, shape: MoeShape, *, interval: int) -> None:
        super().__init__(shape)
        self._interval = interval
        self._first_block: dict[int, int] = {}
        self._is_due = False

    def start_forward(self, context: ForwardContext) -> None:
        self._is_due = False
        for row in context.rows:
            if row.phase == Phase.DENOISE:
                first_block = self._first_block.setdefault(row.request_id, row.block_id)
                is_first = row.block_id == first_block
                self._is_due |= is_first or row.step_id % self._interval == 0

    def end_forward(self, outcome: ForwardOutcome) -> None:
        pass

    def end_request(self, request_id: int) -> None:
        self._first_block.pop(request_id, None)

    def observe(self, demand: LayerDemand) -> None:
        if not self._is_due:
            return
        num_experts, is_member = self.shape.num_experts, self.is_member[demand.layer]
        counts = tokens_per_expert(demand, num_experts, (Phase.DENOISE,))
        size = int(np.count_nonzero(is_member))
        is_target = most_used(counts, size) & (counts > 0)
        # Other members are unused wherever some of them stay: targets are fewer than slots then.
        rank = 2 * is_target.astype(np.int64) + is_member
        self.is_member[demand.layer] = most_used(rank, size)

    def split(self, misses: MissSet) -> BoolArray:
        if misses.demand.context.is_prefill:
            return np.zeros(len(misses.expert_ids), dtype=np.bool_)
        return np.asarray(misses.scores == 0)


def build(inputs: PolicyInputs) -> OffloadPolicy:
    """TIDE with `interval` τ; `overlap=true` lets a layer compute while its refresh copies."""
    interval = inputs.parameters.integer("interval", 2, minimum=1, maximum=1024)
    assert interval is not None
    policy = IntervalPolicy(inputs.shape, interval=interval)
    return OffloadPolicy(
        inputs.spec,
        policy,
        UniformAllocationPolicy(),
        policy,
        placement=policy,
        listeners=(policy,),
        is_synchronous=not inputs.parameters.flag("overlap", False),
    )
