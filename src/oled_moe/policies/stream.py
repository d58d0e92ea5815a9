"""Streaming: for models that want nearly every expert in each forward.

With canvases of hundreds of tokens no choice of residents makes hits: so many slots, so many hits.
What is left to win is time. A layer whose demands take nearly all experts keeps one set for good,
and all others pass through staging, in order of layer and expert, copied while the layer before
computes. Source: this project; the rest as OLED-MoE with equal slots for every layer.
"""

import numpy as np

from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import LoadReuseDispatchPolicy
from oled_moe.policies.offload import OffloadPolicy, PolicyInputs
from oled_moe.policies.retention import PriorityRetentionPolicy, gate_mass
from oled_moe.types import FloatArray, ForwardContext, IntArray, LayerDemand, MoeShape

# What the past counts in a layer's active share, and in how much each expert was wanted.
_SHARE_MEMORY, _MASS_MEMORY = 0.7, 0.9
# Above every score of the priority, which are 1 at most.
_MEMBER_SCORE = 2.0


class StreamPolicy:
    """Retention and prefetch in one, layer by layer.

    A layer streams once the moving average of its active share, over denoising forwards, reaches
    `bound`, until it falls below `bound − slack`. It then keeps as many experts as it has slots,
    those with the highest gate mass so far; none of them leaves while it streams. Guesses are all
    others of the next `depth` layers, that of the next forward's first layer among them. A layer
    that does not stream keeps by priority and guesses nothing.
    """

    is_stack = False
    fills_pool = False

    def __init__(
        self,
        shape: MoeShape,
        *,
        bound: float = 0.8,
        slack: float = 0.1,
        depth: int = 1,
        prefill: str = "tail",
        most_beside_cpu: int = 0,
    ) -> None:
        self.most_beside_cpu = most_beside_cpu
        self._shape = shape
        self._bound = bound
        self._slack = slack
        self._depth = min(depth, shape.num_layers - 1)
        self._priority = PriorityRetentionPolicy(shape, prefill=prefill)
        size = shape.num_layers, shape.num_experts
        # From 0, so that a set is chosen by several forwards.
        self._share = np.zeros(shape.num_layers)
        self._mass: FloatArray = np.zeros(size)
        self._capacities: IntArray = np.zeros(shape.num_layers, dtype=np.int64)
        # Of layers that stream.
        self._members: dict[int, IntArray] = {}

    def resize(self, capacities: IntArray) -> None:
        self._capacities = capacities.copy()
        self._members = {layer: self._best(layer) for layer in self._members}

    def streams(self, layer: int) -> bool:
        """Whether a layer keeps one set for good."""
        return layer in self._members

    def observe(self, demand: LayerDemand) -> None:
        self._priority.observe(demand)
        if not demand.context.is_denoise:
            return
        layer, num_experts = demand.layer, self._shape.num_experts
        active = len(demand.expert_ids) / num_experts
        self._share[layer] += (1 - _SHARE_MEMORY) * (active - self._share[layer])
        share = self._share[layer]
        self._mass[layer] *= _MASS_MEMORY
        self._mass[layer] += gate_mass(demand, num_experts=num_experts)
        if share >= self._bound:
            if layer not in self._members:
                self._members[layer] = self._best(layer)
        elif share < self._bound - self._slack:
            self._members.pop(layer, None)

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        scores = self._priority.keep_scores(expert_ids, demand)
        members = self._members.get(demand.layer)
        if members is not None:
            scores[np.isin(expert_ids, members)] = _MEMBER_SCORE
        return scores

    def predict(self, context: ForwardContext, demand: LayerDemand | None) -> IntArray:
        layer = -1 if demand is None else demand.layer
        parts = [np.empty(0, dtype=np.int64)]
        if context.is_denoise:
            for ahead in range(1, self._depth + 1):
                coming = (layer + ahead) % self._shape.num_layers
                members = self._members.get(coming)
                if members is not None:
                    others = np.setdiff1d(np.arange(self._shape.num_experts), members)
                    parts.append(coming * self._shape.num_experts + others)
        return np.concatenate(parts)

    def victim_scores(self) -> FloatArray:
        return np.zeros((self._shape.num_layers, self._shape.num_experts))

    def _best(self, layer: int) -> IntArray:
        """The experts wanted most so far, as many as the layer has slots; ties to the lower id."""
        best: IntArray = np.argsort(-self._mass[layer], kind="stable")[: self._capacities[layer]]
        return best


def build(inputs: PolicyInputs) -> OffloadPolicy:
    """Streaming with `bound`, `slack` and `depth`; `prefill` as for `oled`."""
    parameters = inputs.parameters
    bound = parameters.real("bound", 0.8)
    slack = parameters.real("slack", 0.1)
    depth = parameters.integer("depth", 1, minimum=1, maximum=64)
    prefill = parameters.choice("prefill", ("whole", "tail"), "tail")
    assert bound is not None and slack is not None and depth is not None
    policy = StreamPolicy(
        inputs.shape,
        bound=bound,
        slack=slack,
        depth=depth,
        prefill=prefill,
        most_beside_cpu=inputs.costs.num_idle_copies,
    )
    return OffloadPolicy(
        inputs.spec,
        policy,
        UniformAllocationPolicy(),
        LoadReuseDispatchPolicy(inputs.shape, inputs.costs),
        prefetch=policy,
        spares_running=prefill == "tail",
    )
