"""Kernels for one expert's rows, by name; all agree with `reference`.

Which kernel runs depends on rows, shape, dtype and device alone, never on who is resident or on
a measurement of the run: that would make outputs depend on the cache.
"""

from collections.abc import Callable

from torch import Tensor

from oled_moe.kernels import cpu, reference
from oled_moe.store import ExpertWeights

ExpertKernel = Callable[[Tensor, ExpertWeights], Tensor]

KERNELS: dict[str, ExpertKernel] = {
    "reference": reference.expert_mlp,
    "cpu": cpu.expert_mlp,
}
