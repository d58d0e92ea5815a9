"""Which positions of a block become tokens after a forward: plain rules over plain arrays.

An UnmaskingPolicy is asked before each forward whether one is needed, and afterwards told each
position's best token and its probability. Prompt positions never change; the mask token is never
among the tokens offered (`sample`). Every policy ends after a bounded number of forwards.
Legend: B positions of the block, N of them that are looked at, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oled_moe.config import DecodingParams
from oled_moe.errors import OledMoeError
from oled_moe.layers import best_tokens
from oled_moe.types import BoolArray, FloatArray, IntArray

ConfidenceArray = npt.NDArray[np.float32]

# Logits that are looked at together, in whole rows.
SAMPLING_SLICE = 2**19


@dataclass(slots=True)
class BlockState:
    """One block at work. Shapes: all [B]; `is_masked` says what is a hole, whatever the id."""

    token_ids: IntArray
    is_masked: BoolArray
    is_prompt: BoolArray
    num_steps: int = 0
    num_post_steps: int = 0
    is_settled: bool = False

    @classmethod
    def start(cls, prompt_ids: list[int], *, block_length: int, mask_id: int) -> "BlockState":
        """A block whose first positions are prompt and whose others are masked."""
        token_ids = np.full(block_length, mask_id, dtype=np.int64)
        token_ids[: len(prompt_ids)] = prompt_ids
        is_prompt = np.arange(block_length) < len(prompt_ids)
        return cls(token_ids, ~is_prompt, is_prompt)


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """What a forward changed. Shapes: bool [B] each, disjoint."""

    accepted: BoolArray
    edited: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))


class UnmaskingPolicy(Protocol):
    """Drives one block from masks to tokens. `edits`: accepted tokens may still be replaced."""

    edits: bool

    def wants_forward(self, state: BlockState) -> bool:
        """Whether the block needs another forward. Mutates: counters of the state."""
        ...

    def looked_at(self, state: BlockState) -> BoolArray:
        """Positions [B] whose token and confidence `update` looks at: one at least."""
        ...

    def update(
        self, state: BlockState, best_ids: IntArray, confidence: ConfidenceArray
    ) -> BlockUpdate:
        """Write what this forward settles. Mutates: the state.

        Shapes: [B]; where it does not look, ids may be −1 and confidences NaN.
        """
        ...


class Constraint(Protocol):
    """What the tokens of one answer must obey; one object a request, told of its blocks in turn."""

    def start_block(self, state: BlockState, num_left: int) -> None:
        """Before a block's first forward: write the tokens that leave no choice.

        `num_left`: answer tokens that may still come, this block's included. A block that is filled
        has no forward. Mutates: the state, and what is known of the answer.
        """
        ...

    def wants_forward(self, state: BlockState) -> bool:
        """Whether the block needs another forward; asked in place of the unmasking policy."""
        ...

    def update(
        self,
        state: BlockState,
        logits_NV: Tensor,
        is_looked_at: BoolArray,
        unmasking: UnmaskingPolicy,
        draws_N: FloatArray | None,
    ) -> tuple[IntArray, ConfidenceArray, BlockUpdate]:
        """Settle what a forward's logits allow, one position at least.

        Takes the place of `sample` and `UnmaskingPolicy.update`. Shapes: logits fp32 [N, V] and
        draws [N] of the positions looked at; returns ids int64 [B], −1 where none, confidences
        float32 [B], NaN where none, and what changed. Mutates: the state and the logits.
        """
        ...

    def num_final(self, state: BlockState) -> int:
        """How many leading positions of the block, its prompt's included, will not change."""
        ...

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the whole answer once nothing may follow them, None while something may."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the answer so far, cut where `max_tokens` cuts it, is whole."""
        ...


def transfer_schedule(block_length: int, steps: int) -> list[int]:
    """How many positions each step accepts at least: B over the steps, the first get the rest.

    Source: models.md 4; golden `decoders/schedules`.
    """
    base, extra = divmod(block_length, steps)
    return [base + (step < extra) for step in range(steps)]


class LowConfidenceUnmaskingPolicy:
    """LLaDA2.0: all masked positions above the threshold, at least the scheduled number.

    Source: released LLaDA2.0 `generate` (models.md 4).
    """

    edits = False

    def __init__(self, params: DecodingParams) -> None:
        self._threshold = params.threshold
        self._schedule = transfer_schedule(params.block_length, params.steps)

    def wants_forward(self, state: BlockState) -> bool:
        return bool(state.is_masked.any()) and state.num_steps < len(self._schedule)

    def looked_at(self, state: BlockState) -> BoolArray:
        is_seen: BoolArray = state.is_masked.copy()
        return is_seen

    def update(
        self, state: BlockState, best_ids: IntArray, confidence: ConfidenceArray
    ) -> BlockUpdate:
        accepted = _confident_masks(
            state, confidence, self._threshold, self._schedule[state.num_steps]
        )
        state.token_ids[accepted] = best_ids[accepted]
        state.is_masked[accepted] = False
        state.num_steps += 1
        return BlockUpdate(accepted, np.zeros_like(accepted))


class JointThresholdUnmaskingPolicy:
    """LLaDA2.1: mask-to-token and token-to-token edits, then post-edit steps.

    Source: released LLaDA2.1 `generate` (models.md 5).
    """

    edits = True

    def __init__(self, params: DecodingParams) -> None:
        self._threshold = params.threshold
        self._edit_threshold = params.edit_threshold
        self._num_to_transfer = params.num_to_transfer
        self._max_post_steps = params.max_post_edit_steps

    def wants_forward(self, state: BlockState) -> bool:
        if state.is_settled:
            return False
        if not state.is_masked.any():
            state.num_post_steps += 1
        return state.num_post_steps <= self._max_post_steps

    def looked_at(self, state: BlockState) -> BoolArray:
        # Words may be edited too.
        is_seen: BoolArray = ~state.is_prompt
        return is_seen

    def update(
        self, state: BlockState, best_ids: IntArray, confidence: ConfidenceArray
    ) -> BlockUpdate:
        had_masks = bool(state.is_masked.any())
        accepted = np.zeros_like(state.is_masked)
        if had_masks:
            accepted = _confident_masks(state, confidence, self._threshold, self._num_to_transfer)
        edited = (
            ~state.is_masked
            & ~state.is_prompt
            & (confidence > self._edit_threshold)
            & (best_ids != state.token_ids)
        )
        changed = accepted | edited
        state.token_ids[changed] = best_ids[changed]
        state.is_masked[accepted] = False
        state.num_steps += 1
        state.is_settled = not had_masks and not edited.any()
        return BlockUpdate(accepted, edited)


def _confident_masks(
    state: BlockState, confidence: ConfidenceArray, threshold: float, num_least: int
) -> BoolArray:
    """Masked positions above the threshold (strictly), else the `num_least` best of them."""
    high: BoolArray = state.is_masked & (confidence > np.float32(threshold))
    if high.sum() >= num_least:
        return high
    masked = state.is_masked.nonzero()[0]
    best = np.argsort(-confidence[masked], kind="stable")[:num_least]
    chosen = np.zeros_like(state.is_masked)
    chosen[masked[best]] = True
    return chosen


UNMASKING: dict[str, Callable[[DecodingParams], UnmaskingPolicy]] = {
    "low_confidence": LowConfidenceUnmaskingPolicy,
    "joint_threshold": JointThresholdUnmaskingPolicy,
}


def sample(
    logits_NV: Tensor, params: DecodingParams, draws_N: FloatArray | None
) -> tuple[IntArray, ConfidenceArray]:
    """One token per position, never the mask, and its probability.

    Greedy at temperature 0: the argmax, its probability over the whole vocabulary. Otherwise the
    token at which the running sum of probabilities after temperature, top-k and top-p passes the
    position's draw, with the probability under that distribution. What a position gets depends on
    nothing but its logits and its draw.

    Shapes: fp32 [N, V], draws float64 [N] in [0, 1) -> int64 [N], float32 [N]. Mutates: logits.
    Raises: OledMoeError for logits that are not finite, which would decode to noise.
    Source: models.md 4, filters; 11.1 and 11.3 for what is not copied.
    """
    if params.temperature == 0:
        ids_N, probability_N, is_finite = best_tokens(logits_NV, params.mask_token_id)
    else:
        assert draws_N is not None
        # The extremes show any NaN and any overflow in one pass.
        is_finite = torch.stack(logits_NV.aminmax()).isfinite().all()
        draws = torch.from_numpy(draws_N).to(logits_NV.device)
        # Whole rows at a time, so that whatever is made on the way stays small beside the logits.
        num_rows = max(1, SAMPLING_SLICE // logits_NV.shape[-1])
        slices = [slice(first, first + num_rows) for first in range(0, len(logits_NV), num_rows)]
        parts = [_drawn(logits_NV[part], params, draws[part]) for part in slices]
        ids_N, probability_N = (torch.cat(part) for part in zip(*parts, strict=True))
    # One synchronisation with the device for everything; doubles hold ids and fp32 exactly.
    found = torch.cat((is_finite[None].double(), ids_N.double(), probability_N.double()))
    flag, ids, probabilities = np.split(found.cpu().numpy(), [1, 1 + len(ids_N)])
    if not flag[0]:
        raise OledMoeError(
            "the model computed numbers that are not finite; its weights or config.json are "
            "damaged, or the dtype is too narrow: download it again, or try float32"
        )
    return ids.astype(np.int64), probabilities.astype(np.float32)


def _drawn(logits_NV: Tensor, params: DecodingParams, draws_N: Tensor) -> tuple[Tensor, Tensor]:
    """Id and probability of each row, [N] each. Mutates: logits."""
    logits_NV[:, params.mask_token_id] = float("-inf")
    probabilities_NV = filtered_probabilities(
        logits_NV, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
    )
    sums_NV = probabilities_NV.cumsum(-1, dtype=torch.float64)
    total_N1 = sums_NV[:, -1:].contiguous()
    ids_N1 = torch.searchsorted(sums_NV, draws_N[:, None] * total_N1, right=True)
    # Rounding must not carry a draw past the last token that has any probability, nor may numbers
    # that are not finite, which the caller refuses, carry it out of the vocabulary.
    ids_N1 = torch.minimum(ids_N1, torch.searchsorted(sums_NV, total_N1))
    ids_N1 = ids_N1.clamp(max=logits_NV.shape[-1] - 1)
    return ids_N1[:, 0], probabilities_NV.gather(1, ids_N1)[:, 0]


def filtered_probabilities(
    logits_NV: Tensor, *, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Softmax after temperature, then top-k (ties stay), then top-p (the first always stays).

    Shapes: fp32 [N, V] -> fp32 [N, V].
    """
    # The maximum goes first, so that a tiny temperature cannot overflow; one that is 0 or infinite
    # in the logits' precision would make NaN.
    limits = torch.finfo(logits_NV.dtype)
    temperature = min(max(temperature, limits.tiny), limits.max)
    logits_NV = (logits_NV - logits_NV.max(-1, keepdim=True).values) / temperature
    if top_k is not None and top_k < logits_NV.shape[-1]:
        smallest = logits_NV.topk(top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < smallest, float("-inf"))
    if top_p is not None and top_p < 1:
        ranked = logits_NV.sort(dim=-1, descending=True)
        before = ranked.values.softmax(-1).cumsum(-1)
        is_dropped = (before > top_p).roll(1, dims=-1)
        is_dropped[:, 0] = False
        is_dropped = torch.zeros_like(is_dropped).scatter_(1, ranked.indices, is_dropped)
        logits_NV = logits_NV.masked_fill(is_dropped, float("-inf"))
    return logits_NV.softmax(-1)
