"""The vocabulary shared by engine and simulator: what a router asked for, what was decided.

Plain numpy arrays and frozen values; no torch, no clocks, no files. Shape legend:
T tokens of a forward, K experts per token, A distinct experts demanded, E experts per layer.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MoeShape:
    """The routed experts of a model. Units: `expert_bytes` is one expert as it lies in a slot."""

    num_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int

    @property
    def num_experts_total(self) -> int:
        return self.num_layers * self.num_experts


class Phase(IntEnum):
    """What a sequence does in a forward (values as in the trace format)."""

    PREFILL = 0
    DENOISE = 1
    COMMIT = 2


class TokenState(IntEnum):
    """What a position holds at the start of a forward (values as in the trace format)."""

    PROMPT = 0
    COMMITTED = 1
    MASKED = 2


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One sequence's part of a forward."""

    request_id: int
    block_id: int
    step_id: int
    phase: Phase
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One call of the model, as policies may see it while its layers run.

    Shapes: token_confidence float32 [T], token_state uint8 [T], rows in token order.
    `token_confidence` is what is known at layer time: 1 at prompt and committed positions, the
    latest earlier confidence at masked ones, 0.5 where there is none yet (policies.md 5.1).
    """

    forward_id: int
    block_length: int
    rows: tuple[ForwardRow, ...]
    token_confidence: npt.NDArray[np.float32]
    token_state: npt.NDArray[np.uint8]

    # Derived once: every layer asks. Whether any sequence denoises (only such forwards count for
    # statistics), and whether all of them are in prefill.
    is_denoise: bool = field(init=False)
    is_prefill: bool = field(init=False)

    def __post_init__(self) -> None:
        phases = [row.phase for row in self.rows]
        object.__setattr__(self, "is_denoise", Phase.DENOISE in phases)
        object.__setattr__(self, "is_prefill", phases == [Phase.PREFILL] * len(phases))

    @property
    def num_tokens(self) -> int:
        return len(self.token_confidence)


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """What the router of one MoE layer asked for in one forward.

    Shapes: topk_ids int64 [T, K]; gate_weights float32 [T, K], mixing weights normalised over K,
    before the routed scaling factor; expert_ids int64 [A], ascending; num_tokens int64 [A].
    """

    layer: int
    context: ForwardContext
    topk_ids: IntArray
    gate_weights: npt.NDArray[np.float32]
    expert_ids: IntArray
    num_tokens: IntArray

    @classmethod
    def from_routing(
        cls,
        layer: int,
        context: ForwardContext,
        topk_ids: IntArray,
        gate_weights: npt.NDArray[np.float32],
        *,
        num_experts: int,
    ) -> "LayerDemand":
        """Collect the distinct experts and their token counts."""
        counts = np.bincount(topk_ids.ravel(), minlength=num_experts)
        expert_ids = counts.nonzero()[0]
        return cls(layer, context, topk_ids, gate_weights, expert_ids, counts[expert_ids])


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What to do for one demand, in full, before anything moves.

    Every demanded expert is in exactly one of hits, loads and cpu. Copies are issued in the order
    of `load_ids`; a slot may appear twice in `load_slots` (a staging slot refilled within the
    layer), and may be the slot of a hit that is evicted: each refill waits for its last reader.
    `freed_slots` hold nothing wanted once the layer is done; one may be named twice. `capacity`
    is what utilisation is measured by: the layer's slots, or more where it has yet to shrink.
    Shapes: all int64, hit_ids and cpu_ids ascending; freed_slots in any order.
    """

    hit_ids: IntArray
    hit_slots: IntArray
    load_ids: IntArray
    load_slots: IntArray
    cpu_ids: IntArray
    freed_slots: IntArray
    capacity: int

    @property
    def num_demanded(self) -> int:
        return len(self.hit_ids) + len(self.load_ids) + len(self.cpu_ids)


class PlanExecutor(Protocol):
    """Whoever carries plans out: slots that hold bytes, or a simulator's clocks."""

    def apply(self, demand: LayerDemand, plan: LayerPlan) -> None:
        """Start everything the plan asks for, in its order."""
        ...
