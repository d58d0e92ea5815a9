"""llama.cpp's --n-cpu-moe: the experts of the first layers on the host, all others on the device.

Source: ggml-org/llama.cpp, --n-cpu-moe, and PR 15346 for batches; policies.md 8.
"""

import numpy as np

from oled_moe.errors import ConfigError
from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import MissSet
from oled_moe.policies.offload import OffloadPolicy, PolicyInputs
from oled_moe.policies.placement import FixedPlacementPolicy
from oled_moe.types import BoolArray, IntArray, LayerDemand, MoeShape


class WholeLayerPlacementPolicy(FixedPlacementPolicy):
    """Layers from `num_host_layers` on hold all their experts, those below none.

    None: as few on the host as the slots allow. Slots left over hold nothing, as there.
    Raises: ConfigError from `target` where the slots cannot hold the layers asked for.
    """

    def __init__(self, shape: MoeShape, *, num_host_layers: int | None) -> None:
        super().__init__(shape)
        self._num_host_layers = num_host_layers

    def target(self, capacities: IntArray) -> list[IntArray] | None:
        if self._is_placed:
            return None
        self._is_placed = True
        num_layers, num_experts = self.is_member.shape
        num_slots = int(capacities.sum())
        least = num_layers - num_slots // max(num_experts, 1)
        num_host = least if self._num_host_layers is None else self._num_host_layers
        if num_host < least:
            needed = (num_layers - num_host) * num_experts
            raise ConfigError(
                f"policy n-cpu-moe: n={num_host} keeps {num_layers - num_host} layers of "
                f"{num_experts} experts on the device, which takes {needed} slots of {num_slots}; "
                f"allowed here: n={least} to {num_layers}, or give more expert memory"
            )
        is_member = np.zeros_like(self.is_member)
        is_member[num_host:] = True
        return self._place(is_member)


class BatchDispatchPolicy:
    """From `min_batch` tokens on, the used experts are streamed to the device; below, the CPU.

    Source: llama.cpp PR 15346. A block of 32 tokens sits on its threshold.
    """

    def __init__(self, min_batch: int) -> None:
        self._min_batch = min_batch

    def observe(self, demand: LayerDemand) -> None:
        pass

    def split(self, misses: MissSet) -> BoolArray:
        is_small = len(misses.demand.topk_ids) < self._min_batch
        return np.asarray((misses.scores == 0) & is_small)


def build(inputs: PolicyInputs) -> OffloadPolicy:
    """--n-cpu-moe with `n` layers on the host (default: as few as fit) and `min_batch`."""
    parameters = inputs.parameters
    num_host_layers = parameters.integer("n", None, minimum=0, maximum=inputs.shape.num_layers)
    min_batch = parameters.integer("min_batch", 32, minimum=1, maximum=1_000_000)
    assert min_batch is not None
    placement = WholeLayerPlacementPolicy(inputs.shape, num_host_layers=num_host_layers)
    return OffloadPolicy(
        inputs.spec,
        placement,
        UniformAllocationPolicy(),
        BatchDispatchPolicy(min_batch),
        placement=placement,
    )
