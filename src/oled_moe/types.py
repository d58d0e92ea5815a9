"""The vocabulary shared by engine and simulator: what a router asked for, what was decided.

Plain numpy arrays and frozen values; no torch, no clocks, no files. Shape legend:
T tokens of a forward, K experts per token, A distinct experts demanded, E experts per layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol

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

    Shapes: token_confidence float32 [T], token_state uint8 [T], rows in token order;
    token_position int64 [T], absolute in each row's sequence; token_ids int64 [T]: the token at a
    prompt or committed position, at a masked one the best guess of the latest earlier forward, -1
    where there is none; input_embedding float32 [T, H]. The last three are None where whoever made
    the context does not know them, as in traces that do not hold them.
    `token_confidence` is what is known at layer time: 1 at prompt and committed positions, the
    latest earlier confidence at masked ones, 0.5 where there is none yet (policies.md 5.1).
    """

    forward_id: int
    block_length: int
    rows: tuple[ForwardRow, ...]
    token_confidence: npt.NDArray[np.float32]
    token_state: npt.NDArray[np.uint8]
    token_position: IntArray | None = None
    token_ids: IntArray | None = None
    input_embedding: npt.NDArray[np.float32] | None = None

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

    @property
    def denoising_tokens(self) -> BoolArray:
        """Which tokens, bool [T], are of rows that denoise."""
        flags = np.array([row.phase == Phase.DENOISE for row in self.rows], dtype=np.bool_)
        return flags.repeat([row.num_tokens for row in self.rows])

    @property
    def block_sizes(self) -> list[int]:
        """Tokens of each block of each row, in order: blocks lie on multiples of block_length."""
        assert self.token_position is not None, "whoever runs a model knows positions"
        sizes, end = [], 0
        for row in self.rows:
            start, end = end, end + row.num_tokens
            left = row.num_tokens
            first = self.block_length - int(self.token_position[start]) % self.block_length
            while left:
                sizes.append(min(left, first))
                left, first = left - sizes[-1], self.block_length
        return sizes

    def part(self, is_wanted: Sequence[bool]) -> "ForwardContext":
        """The same forward with some of its rows only; one flag for each row."""
        counts = [row.num_tokens for row in self.rows]
        mask = np.repeat(np.array(is_wanted, dtype=np.bool_), counts)

        def pick(values: Any) -> Any:
            return None if values is None else np.ascontiguousarray(values[mask])

        return replace(
            self,
            rows=tuple(row for row, keep in zip(self.rows, is_wanted, strict=True) if keep),
            token_confidence=pick(self.token_confidence),
            token_state=pick(self.token_state),
            token_position=pick(self.token_position),
            token_ids=pick(self.token_ids),
            input_embedding=pick(self.input_embedding),
        )


@dataclass(frozen=True, slots=True)
class ForwardOutcome:
    """What a forward came to once its logits were looked at.

    Shapes: all [T], tokens as in `context`. token_confidence float32: top-1 probability from the
    logits of this forward, NaN where none were computed; token_accepted bool: this forward turned
    a mask into a token.
    """

    context: ForwardContext
    token_confidence: npt.NDArray[np.float32]
    token_accepted: BoolArray

    @classmethod
    def without_logits(cls, context: ForwardContext) -> "ForwardOutcome":
        """The outcome of a prefill or commit: nothing was predicted, nothing accepted."""
        size = context.num_tokens
        return cls(
            context,
            np.full(size, np.nan, dtype=np.float32),
            np.zeros(size, dtype=np.bool_),
        )


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """What the router of one MoE layer asked for in one forward.

    Shapes: topk_ids int64 [T, K]; gate_weights float32 [T, K], mixing weights normalised over K,
    before the routed scaling factor; expert_ids int64 [A], ascending; num_tokens int64 [A];
    gate_scores float32 [T, E], all of the router's scores, None unless a policy asked for them.
    """

    layer: int
    context: ForwardContext
    topk_ids: IntArray
    gate_weights: npt.NDArray[np.float32]
    expert_ids: IntArray
    num_tokens: IntArray
    gate_scores: npt.NDArray[np.float32] | None = None

    @classmethod
    def from_routing(
        cls,
        layer: int,
        context: ForwardContext,
        topk_ids: IntArray,
        gate_weights: npt.NDArray[np.float32],
        *,
        num_experts: int,
        gate_scores: npt.NDArray[np.float32] | None = None,
    ) -> "LayerDemand":
        """Collect the distinct experts and their token counts."""
        counts = np.bincount(topk_ids.ravel(), minlength=num_experts)
        expert_ids = counts.nonzero()[0]
        return cls(
            layer, context, topk_ids, gate_weights, expert_ids, counts[expert_ids], gate_scores
        )


_NONE: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies nobody waits for yet: experts that were guessed or placed ahead of their layer.

    `expert_ids` are numbers over all layers, layer · E + expert; `slots` where they go. Every
    slot is free of readers. Shapes: int64 [N], most urgent first.
    """

    expert_ids: IntArray
    slots: IntArray

    def __len__(self) -> int:
        return len(self.slots)


NO_COPIES = CopyPlan(_NONE, _NONE)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What to do for one demand, in full, before anything moves.

    Every demanded expert is in exactly one of hits, staged, loads, cpu and low. Hits lie in their
    slots. Staged ones were copied ahead and are wanted for the first time: their copy may still be
    waiting or under way, and is now as urgent as a load. Copies of loads are issued in the order
    of `load_ids`; a slot may appear twice in `load_slots` (a staging slot refilled within the
    layer), and may be the slot of a hit that is evicted: each refill waits for its last reader.
    `freed_slots` hold nothing wanted once the layer is done; one may be named twice. A copy ahead
    into one of them that nobody wanted and that has not begun need not be made.
    `prefetch` are copies for later layers, to be made while the copy lane has nothing urgent.
    `wave_sizes`, where not empty, makes loads synchronous: the copies of a wave are complete
    before any of its kernels run (the first wave holds hits and staged too), and the next wave's
    copies begin when those kernels are done. They sum to the loads.
    `capacity` is what utilisation is measured by: the layer's slots, more where it has yet to
    shrink, and what it held where all layers share one pool.
    `low`, where not None, is the plan of the misses that are computed from copies in a lower
    precision, which have slots of their own.
    Shapes: all int64; hit_ids, staged_ids and cpu_ids ascending; freed_slots in any order.
    """

    hit_ids: IntArray
    hit_slots: IntArray
    load_ids: IntArray
    load_slots: IntArray
    cpu_ids: IntArray
    freed_slots: IntArray
    capacity: int
    staged_ids: IntArray = field(default_factory=lambda: _NONE)
    staged_slots: IntArray = field(default_factory=lambda: _NONE)
    prefetch: CopyPlan = NO_COPIES
    wave_sizes: tuple[int, ...] = ()
    low: "LayerPlan | None" = None

    @property
    def num_demanded(self) -> int:
        num_full = len(self.hit_ids) + len(self.staged_ids) + len(self.load_ids) + len(self.cpu_ids)
        return num_full if self.low is None else num_full + self.low.num_demanded

    @property
    def low_ids(self) -> IntArray:
        """Ids int64 [N], ascending, of the experts computed in a lower precision."""
        if self.low is None:
            return _NONE
        ids: IntArray = np.sort(np.concatenate((self.low.hit_ids, self.low.load_ids)))
        return ids


class PlanExecutor(Protocol):
    """Whoever carries plans out: slots that hold bytes, or a simulator's clocks."""

    def copy_ahead(self, copies: CopyPlan) -> None:
        """Make copies while nothing urgent waits."""
        ...

    def apply(self, demand: LayerDemand, plan: LayerPlan) -> None:
        """Start everything the plan asks for, in its order."""
        ...
