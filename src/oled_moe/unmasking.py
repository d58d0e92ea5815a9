"""Which positions of a block become tokens after a forward: plain rules over plain arrays.

An UnmaskingPolicy is asked before each forward whether one is needed, and afterwards told each
position's best token and its probability. Prompt positions never change; the mask token is never
among the tokens offered (`guess`). Every policy ends after a bounded number of forwards.
Legend: B positions of the block, N of them that are looked at, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from oled_moe.config import DecodingParams
from oled_moe.edits import edit_sources, moved
from oled_moe.errors import OledMoeError
from oled_moe.layers import Logits, best_tokens
from oled_moe.sampling import ConfidenceArray, Guesses
from oled_moe.types import BoolArray, FloatArray, IntArray


@dataclass(slots=True)
class BlockState:
    """One block at work. Shapes: all [B]; `is_masked` says what is a hole, whatever the id.

    `least_threshold`: whatever a rule's own threshold is, this one holds if it is higher.
    """

    token_ids: IntArray
    is_masked: BoolArray
    is_prompt: BoolArray
    num_steps: int = 0
    num_post_steps: int = 0
    is_settled: bool = False
    least_threshold: float = 0.0

    @classmethod
    def start(cls, prompt_ids: list[int], *, block_length: int, mask_id: int) -> "BlockState":
        """A block whose first positions are prompt and whose others are masked."""
        token_ids = np.full(block_length, mask_id, dtype=np.int64)
        token_ids[: len(prompt_ids)] = prompt_ids
        is_prompt = np.arange(block_length) < len(prompt_ids)
        return cls(token_ids, ~is_prompt, is_prompt)


@dataclass(frozen=True, slots=True)
class BlockUpdate:
    """What a forward changed: masks that became tokens, and tokens that became others or masks.

    `sources`: where then each position's content was taken from (`edit_sources`), None where all
    stayed in place. Shapes: bool [B] each, disjoint, as positions were in the forward; int64 [B].
    """

    accepted: BoolArray
    edited: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    sources: IntArray | None = None


class UnmaskingPolicy(Protocol):
    """Drives one block from masks to tokens.

    `edits`: accepted tokens may still be replaced; `fuses`: it changes logits before anything is
    guessed from them; `entropy_of`: the distribution whose entropy it wants, if any.
    """

    edits: bool
    fuses: bool
    entropy_of: str | None

    def wants_forward(self, state: BlockState) -> bool:
        """Whether the block needs another forward. Mutates: counters of the state."""
        ...

    def looked_at(self, state: BlockState) -> BoolArray:
        """Positions [B] whose token and confidence `update` looks at: one at least."""
        ...

    def fuse(self, state: BlockState, logits_NV: Tensor, is_looked_at: BoolArray) -> Tensor:
        """Logits [N, V] to guess from, in place of the model's. Mutates: what it remembers."""
        ...

    def update(self, state: BlockState, guesses: Guesses) -> BlockUpdate:
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
        logits_NV: Logits,
        is_looked_at: BoolArray,
        unmasking: UnmaskingPolicy,
        draws_N: FloatArray | None,
    ) -> tuple[IntArray, ConfidenceArray, BlockUpdate]:
        """Settle what a forward's logits allow, one position at least; how often a token may be
        taken back is bounded.

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
    def error(self) -> OledMoeError | None:
        """Why the answer could not go on; it has ended then. None while all is well."""
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


class _Rule:
    """What most rules share: they look at masks, until there are none, and need nothing but tokens
    and confidences."""

    edits = False
    fuses = False
    entropy_of: str | None = None

    def wants_forward(self, state: BlockState) -> bool:
        return bool(state.is_masked.any())

    def looked_at(self, state: BlockState) -> BoolArray:
        is_seen: BoolArray = state.is_masked.copy()
        return is_seen

    def fuse(self, state: BlockState, logits_NV: Tensor, is_looked_at: BoolArray) -> Tensor:
        return logits_NV


class _AcceptingRule(_Rule, ABC):
    """Rules that never change what they accepted."""

    def update(self, state: BlockState, guesses: Guesses) -> BlockUpdate:
        accepted = self._chosen(state, guesses)
        state.token_ids[accepted] = guesses.token_ids[accepted]
        state.is_masked[accepted] = False
        state.num_steps += 1
        return BlockUpdate(accepted, np.zeros_like(accepted))

    @abstractmethod
    def _chosen(self, state: BlockState, guesses: Guesses) -> BoolArray:
        """Masked positions [B] that become tokens."""


class _ScheduledRule(_AcceptingRule, ABC):
    """Rules of so many steps, each with a number of positions that it accepts at least."""

    def __init__(self, params: DecodingParams) -> None:
        self._schedule = transfer_schedule(params.block_length, params.steps)

    def wants_forward(self, state: BlockState) -> bool:
        return bool(state.is_masked.any()) and state.num_steps < len(self._schedule)

    def _num_least(self, state: BlockState) -> int:
        return self._schedule[state.num_steps]


class LowConfidenceUnmaskingPolicy(_ScheduledRule):
    """LLaDA2.0, and SDAR's dynamic rule: all masked positions above the threshold, at least the
    scheduled number.

    Source: released LLaDA2.0 `generate` (models.md 4); SDAR (models.md 6).
    """

    def __init__(self, params: DecodingParams) -> None:
        super().__init__(params)
        self._threshold = params.threshold

    def _chosen(self, state: BlockState, guesses: Guesses) -> BoolArray:
        threshold = max(self._threshold, state.least_threshold)
        return _confident_masks(state, guesses.confidence, threshold, self._num_least(state))


class JointThresholdUnmaskingPolicy(_Rule):
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

    def update(self, state: BlockState, guesses: Guesses) -> BlockUpdate:
        best_ids, confidence = guesses.token_ids, guesses.confidence
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


class LevenshteinUnmaskingPolicy(_Rule):
    """LLaDA2.2: as 2.1, and positions may be deleted and inserted (`edit_sources`).

    Masks that edits bring in do not count as the block's own: these are accepted by schedule, with
    as many more as there are new ones. Once none of its own is left, or after `max_steps` at the
    latest, steps are counted; the last of them fills every mask, with no control token. A step that
    would repeat what an earlier one wrote takes the next best token where it is least sure.
    Source: `generate` of LLaDA2.2 as described by FLX-OSS/FluxServe (development guide, section 4),
    deterministic where that draws at random; sgl-project/sglang pull request 31773.
    """

    edits = True
    # Nothing is changed there; the best few tokens of each position are looked at.
    fuses = True

    def __init__(self, params: DecodingParams) -> None:
        self._threshold = params.threshold
        self._edit_threshold = params.edit_threshold
        self._num_steps = params.steps
        self._max_steps = params.max_steps
        self._max_post_steps = params.max_post_edit_steps
        self._mask_id = params.mask_token_id
        assert params.delete_token_id is not None and params.split_token_id is not None
        self._delete_id, self._split_id = params.delete_token_id, params.split_token_id
        self._is_own: BoolArray | None = None
        self._schedule: list[int] = []
        self._ranked_NK = torch.empty(0)
        self._row_of: IntArray = np.empty(0, dtype=np.int64)
        self._written: set[bytes] = set()
        self._is_over = False

    def wants_forward(self, state: BlockState) -> bool:
        return not self._is_over

    def looked_at(self, state: BlockState) -> BoolArray:
        is_seen: BoolArray = ~state.is_prompt
        return is_seen

    def fuse(self, state: BlockState, logits_NV: Tensor, is_looked_at: BoolArray) -> Tensor:
        # Of four tokens one at least is neither the mask nor a control token.
        self._ranked_NK = logits_NV.topk(min(4, logits_NV.shape[-1])).indices
        self._row_of = np.cumsum(is_looked_at) - 1
        return logits_NV

    def update(self, state: BlockState, guesses: Guesses) -> BlockUpdate:
        if self._is_own is None:
            self._is_own = state.is_masked.copy()
            self._schedule = transfer_schedule(int(self._is_own.sum()), self._num_steps)
        is_own = self._is_own & state.is_masked
        state.num_post_steps = 0 if is_own.any() else state.num_post_steps + 1
        accepted = self._chosen(state, guesses.confidence, is_own)
        is_final = self._is_final(state, accepted, is_own)
        if is_final:
            accepted = state.is_masked.copy()
        best_ids = guesses.token_ids.copy()
        is_sure = ~state.is_prompt & (guesses.confidence > np.float32(self._edit_threshold))
        edited = is_sure & ~state.is_masked & (best_ids != state.token_ids)
        if is_final:
            self._take_tokens_only(best_ids, accepted | edited)
        else:
            self._leave_cycle(state, best_ids, accepted | edited, guesses.confidence)
        edited &= best_ids != state.token_ids
        state.is_settled = not state.is_masked.any() and not edited.any()
        state.num_steps += 1
        self._is_over = is_final or state.is_settled
        return self._write(state, best_ids, accepted, edited)

    def _chosen(
        self, state: BlockState, confidence: ConfidenceArray, is_own: BoolArray
    ) -> BoolArray:
        """Masks [B] that become tokens where this step is not the last."""
        if state.num_steps >= self._num_steps:
            masks: BoolArray = state.is_masked.copy()
            return masks
        num_new = int(state.is_masked.sum() - is_own.sum())
        num_least = self._schedule[state.num_steps] + num_new
        return _confident_masks(state, confidence, self._threshold, num_least)

    def _is_final(self, state: BlockState, accepted: BoolArray, is_own: BoolArray) -> bool:
        if state.num_steps >= self._max_steps - 1:
            return True
        if self._max_post_steps:
            return state.num_post_steps >= self._max_post_steps
        return not bool((is_own & ~accepted).any())

    def _take_tokens_only(self, best_ids: IntArray, is_written: BoolArray) -> None:
        """Put the best other token in the place of control tokens. Mutates: the ids."""
        for place in (is_written & self._is_control(best_ids)).nonzero()[0]:
            best_ids[place] = self._others(int(place))[0]

    def _leave_cycle(
        self,
        state: BlockState,
        best_ids: IntArray,
        is_written: BoolArray,
        confidence: ConfidenceArray,
    ) -> None:
        """Write what has not been written before, if the next best token makes it so. Mutates: the
        ids."""
        written = np.where(is_written, best_ids, state.token_ids)
        changed = (written != state.token_ids).nonzero()[0]
        if written.tobytes() in self._written and len(changed):
            place = int(changed[np.argmin(confidence[changed])])
            ranked = [i for i in self._best_few(place) if i not in (best_ids[place], self._mask_id)]
            best_ids[place] = written[place] = ranked[0]
        self._written.add(written.tobytes())

    def _write(
        self, state: BlockState, best_ids: IntArray, accepted: BoolArray, edited: BoolArray
    ) -> BlockUpdate:
        """Write tokens, then obey control tokens. Mutates: the state."""
        is_written = accepted | edited
        written = np.where(is_written, best_ids, state.token_ids)
        is_control = is_written & self._is_control(best_ids)
        accepted, edited = accepted & ~is_control, edited & ~is_control
        state.token_ids[accepted | edited] = best_ids[accepted | edited]
        state.is_masked[accepted] = False
        if not is_control.any():
            return BlockUpdate(accepted, edited)
        # Ids that only look like control tokens were there before, in the prompt.
        sources = edit_sources(
            written, state.is_prompt, delete_id=self._delete_id, split_id=self._split_id
        )
        assert self._is_own is not None
        state.token_ids = moved(state.token_ids, sources, self._mask_id)
        state.is_masked = moved(state.is_masked, sources, True)
        self._is_own = moved(self._is_own, sources, False)
        return BlockUpdate(accepted, edited, sources)

    def _is_control(self, token_ids: IntArray) -> BoolArray:
        is_control: BoolArray = (token_ids == self._delete_id) | (token_ids == self._split_id)
        return is_control

    def _best_few(self, place: int) -> list[int]:
        ids: list[int] = self._ranked_NK[int(self._row_of[place])].tolist()
        return ids

    def _others(self, place: int) -> list[int]:
        """The best tokens of a position that are neither mask nor control token."""
        unwanted = (self._mask_id, self._delete_id, self._split_id)
        return [token_id for token_id in self._best_few(place) if token_id not in unwanted]


class SequentialUnmaskingPolicy(_ScheduledRule):
    """SDAR's order of reading: the scheduled number from the first mask on.

    Source: models.md 6.
    """

    def _chosen(self, state: BlockState, guesses: Guesses) -> BoolArray:
        return _positions(state, state.is_masked.nonzero()[0][: self._num_least(state)])


class StaticUnmaskingPolicy(_ScheduledRule):
    """SDAR's static rule, LLaDA's fixed counts: the scheduled number of the most confident.

    Source: models.md 6, 7.1 and 8.
    """

    def _chosen(self, state: BlockState, guesses: Guesses) -> BoolArray:
        return _positions(state, _best_masks(state, guesses.confidence)[: self._num_least(state)])


class EntropyBoundedUnmaskingPolicy(_AcceptingRule):
    """SDAR: those of least entropy while their sum stays below the bound, one at least.

    Source: JetEngine's form of it (models.md 6). That closes a block after `denoising_steps` even
    with masks in it, which would be part of the answer; here `steps` is not looked at, and a block
    ends when it is full.
    """

    entropy_of: str | None = "tempered"

    def __init__(self, params: DecodingParams) -> None:
        self._bound = params.eb_threshold

    def _chosen(self, state: BlockState, guesses: Guesses) -> BoolArray:
        assert guesses.entropy is not None
        masked = state.is_masked.nonzero()[0]
        ranked = masked[np.argsort(guesses.entropy[masked], kind="stable")]
        num_below = int(np.searchsorted(np.cumsum(guesses.entropy[ranked]), self._bound))
        return _positions(state, ranked[: max(1, num_below)])


class ThresholdUnmaskingPolicy(_AcceptingRule):
    """dInfer and Fast-dLLM: all from the threshold on, at least the best.

    Source: models.md 7.1 and 8.
    """

    def __init__(self, params: DecodingParams) -> None:
        self._threshold = params.threshold

    def _chosen(self, state: BlockState, guesses: Guesses) -> BoolArray:
        is_best = _best_mask(state, guesses.confidence)
        best = guesses.confidence[is_best].min(initial=np.inf)
        threshold = np.float32(min(max(self._threshold, state.least_threshold), best - 1e-5))
        is_high: BoolArray = state.is_masked & (guesses.confidence >= threshold)
        return is_best | is_high


class HierarchyUnmaskingPolicy(_AcceptingRule):
    """dInfer: all above the threshold, the best of each gap if it is above the lower one, and the
    best of all. Source: models.md 8.
    """

    def __init__(self, params: DecodingParams) -> None:
        self._threshold = params.threshold
        self._low_threshold = params.low_threshold

    def _chosen(self, state: BlockState, guesses: Guesses) -> BoolArray:
        threshold = max(self._threshold, state.least_threshold)
        return _by_hierarchy(
            state.is_masked, guesses.confidence, threshold, self._low_threshold
        ) | _best_mask(state, guesses.confidence)


class HierarchyRemaskingUnmaskingPolicy(_Rule):
    """dInfer's older hierarchy: tokens below the threshold for that are masks again, unless they
    are among those accepted, which are one more than they. Source: models.md 8.
    """

    edits = True

    def __init__(self, params: DecodingParams) -> None:
        self._threshold = params.threshold
        self._low_threshold = params.low_threshold
        self._remask_threshold = params.remask_threshold
        self._mask_id = params.mask_token_id

    def looked_at(self, state: BlockState) -> BoolArray:
        is_seen: BoolArray = ~state.is_prompt
        return is_seen

    def update(self, state: BlockState, guesses: Guesses) -> BlockUpdate:
        was_masked, old_ids = state.is_masked.copy(), state.token_ids.copy()
        is_low = ~was_masked & ~state.is_prompt
        is_low &= guesses.confidence < np.float32(self._remask_threshold)
        is_open = was_masked | is_low
        threshold = max(self._threshold, state.least_threshold)
        chosen = _by_hierarchy(is_open, guesses.confidence, threshold, self._low_threshold)
        num_least = int(is_low.sum()) + 1
        if chosen.sum() < num_least:
            ranked = _ranked(is_open.nonzero()[0], guesses.confidence)
            chosen[ranked[:num_least]] = True
        state.token_ids[is_open] = self._mask_id
        state.token_ids[chosen] = guesses.token_ids[chosen]
        state.is_masked = is_open & ~chosen
        state.num_steps += 1
        return BlockUpdate(was_masked & chosen, ~was_masked & (state.token_ids != old_ids))


class CreditUnmaskingPolicy(ThresholdUnmaskingPolicy):
    """dInfer's credit: what was likeliest in earlier steps is raised, then the threshold rule.

    Its probability to a power is added to a token's credit each time it is a mask's likeliest;
    credit decays from step to step. Source: models.md 8.
    """

    fuses = True

    def __init__(self, params: DecodingParams) -> None:
        super().__init__(params)
        self._alpha = params.credit_alpha
        self._gamma = params.credit_gamma
        self._beta = params.credit_beta
        self._mask_id = params.mask_token_id
        self._credit_BV: Tensor | None = None

    def fuse(self, state: BlockState, logits_NV: Tensor, is_looked_at: BoolArray) -> Tensor:
        if self._credit_BV is None:
            self._credit_BV = logits_NV.new_zeros(len(is_looked_at), logits_NV.shape[-1])
        else:
            self._credit_BV *= self._beta
        rows = torch.from_numpy(is_looked_at.nonzero()[0]).to(logits_NV.device)
        is_masked = torch.from_numpy(state.is_masked[is_looked_at]).to(logits_NV.device)
        ids_N, probability_N, _ = best_tokens(logits_NV, self._mask_id)
        earned_N = probability_N.pow(self._gamma) * is_masked
        self._credit_BV[rows, ids_N] += earned_N
        return logits_NV + self._alpha * torch.log1p(self._credit_BV[rows])


class FactorUnmaskingPolicy(_AcceptingRule):
    """Fast-dLLM's factor: as many as are surer, each in its rank, than what grows with their
    number, one at least. Source: models.md 7.1.
    """

    def __init__(self, params: DecodingParams) -> None:
        self._factor = params.factor

    def _chosen(self, state: BlockState, guesses: Guesses) -> BoolArray:
        ranked = _best_masks(state, guesses.confidence)
        required = 1 - self._factor / (np.arange(len(ranked)) + 2)
        is_short = ~(guesses.confidence[ranked] >= required)
        # The first always passes, and where only the last falls short all are taken.
        is_short[:1] = is_short[-1:] = False
        num_taken = int(is_short.argmax()) if is_short.any() else len(ranked)
        return _positions(state, ranked[:num_taken])


class LowestEntropyUnmaskingPolicy(_AcceptingRule):
    """RND1: after each of its steps so many stay masked as are scheduled, those of most entropy; or
    with `eb_gamma` the most confident are filled as far as entropies bound their joint error.

    It fills the whole answer as one block. There are forwards in which nothing is filled.
    Source: models.md 7.2; the bound: running sum less running maximum of entropies at most gamma.
    """

    entropy_of: str | None = "filtered"

    def __init__(self, params: DecodingParams) -> None:
        self._num_steps = params.steps
        self._gamma = params.eb_gamma

    def _chosen(self, state: BlockState, guesses: Guesses) -> BoolArray:
        assert guesses.entropy is not None
        masked = state.is_masked.nonzero()[0]
        num_left = max(0, self._num_steps - 1 - state.num_steps)
        if not num_left:
            return _positions(state, masked)
        if self._gamma is None:
            num_kept = int(np.count_nonzero(~state.is_prompt)) * num_left // self._num_steps
            ranked = masked[np.argsort(guesses.entropy[masked], kind="stable")]
            return _positions(state, ranked[: max(0, len(masked) - num_kept)])
        ranked = _ranked(masked, guesses.confidence)
        entropy = guesses.entropy[ranked]
        is_bounded = np.cumsum(entropy) - np.maximum.accumulate(entropy) <= self._gamma
        return _positions(state, ranked[: max(1, int(np.count_nonzero(is_bounded)))])


def _confident_masks(
    state: BlockState, confidence: ConfidenceArray, threshold: float, num_least: int
) -> BoolArray:
    """Masked positions above the threshold (strictly), else the `num_least` best of them."""
    high: BoolArray = state.is_masked & (confidence > np.float32(threshold))
    if high.sum() >= num_least:
        return high
    return _positions(state, _best_masks(state, confidence)[:num_least])


def _by_hierarchy(
    is_open: BoolArray, confidence: ConfidenceArray, threshold: float, low_threshold: float
) -> BoolArray:
    """Open positions above the threshold, and of each run of them the best above the lower one."""
    chosen: BoolArray = is_open & (confidence > np.float32(threshold))
    positions = is_open.nonzero()[0]
    for run in np.split(positions, (np.diff(positions) > 1).nonzero()[0] + 1):
        best = _ranked(run, confidence)[:1]
        chosen[best] |= confidence[best] > np.float32(low_threshold)
    return chosen


def _ranked(positions: IntArray, confidence: ConfidenceArray) -> IntArray:
    """The positions, the most confident first."""
    ranked: IntArray = positions[np.argsort(-confidence[positions], kind="stable")]
    return ranked


def _best_masks(state: BlockState, confidence: ConfidenceArray) -> IntArray:
    """Masked positions, the most confident first."""
    return _ranked(state.is_masked.nonzero()[0], confidence)


def _best_mask(state: BlockState, confidence: ConfidenceArray) -> BoolArray:
    """The most confident masked position, as [B]."""
    return _positions(state, _best_masks(state, confidence)[:1])


def _positions(state: BlockState, positions: IntArray) -> BoolArray:
    chosen = np.zeros_like(state.is_masked)
    chosen[positions] = True
    return chosen


UNMASKING: dict[str, Callable[[DecodingParams], UnmaskingPolicy]] = {
    "low_confidence": LowConfidenceUnmaskingPolicy,
    "joint_threshold": JointThresholdUnmaskingPolicy,
    "levenshtein": LevenshteinUnmaskingPolicy,
    "sequential": SequentialUnmaskingPolicy,
    "low_confidence_static": StaticUnmaskingPolicy,
    "low_confidence_dynamic": LowConfidenceUnmaskingPolicy,
    "entropy_bounded": EntropyBoundedUnmaskingPolicy,
    "threshold": ThresholdUnmaskingPolicy,
    "hierarchy": HierarchyUnmaskingPolicy,
    "hierarchy_remasking": HierarchyRemaskingUnmaskingPolicy,
    "credit": CreditUnmaskingPolicy,
    "factor": FactorUnmaskingPolicy,
    "lowest_entropy": LowestEntropyUnmaskingPolicy,
}
