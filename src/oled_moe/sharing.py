"""Lossy expert sharing: rules by which a block's tokens make do with fewer distinct experts.

A rule says which experts each token may choose; the model's own rule then chooses among those and
gives the weights. Prompts and commits keep their own experts, so that what is kept of finished
blocks is computed in full: rules see the rows alone that denoise. Plain numpy, no torch.
Legend: T tokens, K experts per token, E experts, B blocks.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from oled_moe.errors import ConfigError
from oled_moe.types import BoolArray, FloatArray, IntArray, TokenState


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """What one layer's router made of some tokens, for rules to look at.

    Shapes: scores float32 [T, E], by which the router ranks, its bias included, -inf where an
    expert must not be chosen; topk_ids int64 [T, K]; weights float32 [T, K], shares of the own
    choice; token_state uint8 [T] and token_confidence float32 [T] as in ForwardContext; block_of
    int64 [T], from 0 on and ascending: tokens of one block of one sequence, or of one canvas, have
    the same; is_resident bool [E].
    """

    scores: npt.NDArray[np.float32]
    topk_ids: IntArray
    weights: npt.NDArray[np.float32]
    token_state: npt.NDArray[np.uint8]
    token_confidence: npt.NDArray[np.float32]
    block_of: IntArray
    is_resident: BoolArray


class SharingPolicy(Protocol):
    """Says which experts tokens may choose; keeps no state.

    `depends_on_cache`: what comes out depends on what is resident, hence on memory, policy and
    company.
    """

    depends_on_cache: bool

    def allowed(self, routed: RoutedTokens) -> BoolArray:
        """bool [T, E]. A token for which fewer than K experts are allowed takes the rest from its
        own best."""
        ...


class DesVotePolicy:
    """The block's tokens vote with their mixing weights; the experts with most votes stay.

    Either so many `experts`, or as many as it takes to hold `coverage` of all votes.
    Source: DES-Vote (arXiv 2602.00879, its abstract), as ported in policies.md 7.
    """

    depends_on_cache = False

    def __init__(self, *, experts: int | None = None, coverage: float | None = None) -> None:
        if (experts is None) == (coverage is None):
            raise ConfigError(
                "lossy rule des-vote: give one of experts and coverage, as des-vote:experts=40"
            )
        self._num_experts, self._coverage = experts, coverage

    def allowed(self, routed: RoutedTokens) -> BoolArray:
        votes_BE = _sum_by_block(routed, routed.topk_ids, routed.weights)
        if self._coverage is not None:
            return _covering(votes_BE, self._coverage, 1)[routed.block_of]
        return _best(votes_BE, np.full(len(votes_BE), self._num_experts))[routed.block_of]


class DesSeqPolicy:
    """What any of the block's tokens ranks among its own `top` experts stays.

    Source: DES-Seq (arXiv 2602.00879, its abstract), as ported in policies.md 7.
    """

    depends_on_cache = False

    def __init__(self, *, top: int) -> None:
        self._top = top

    def allowed(self, routed: RoutedTokens) -> BoolArray:
        order_TK = np.argsort(-routed.weights, axis=1, kind="stable")[:, : self._top]
        first_ids = np.take_along_axis(routed.topk_ids, order_TK, axis=1)
        wanted_BE = _sum_by_block(routed, first_ids, np.ones(first_ids.shape))
        is_wanted: BoolArray = wanted_BE > 0
        return is_wanted[routed.block_of]


class DmoePolicy:
    """The experts that hold `coverage` of the block's summed scores stay, `minimum` at least.

    A score counts where it is among its token's K best of all, without groups; one below 0, which
    a bias can make, counts 0. Trained for in dMoE; on other checkpoints it is no more than a vote.
    Source: fscdc/dMoE, modeling_llada2_moe_be_adaptive.py (policies.md 7).
    """

    depends_on_cache = False

    def __init__(self, *, coverage: float = 0.6, minimum: int = 16) -> None:
        self._coverage, self._minimum = coverage, minimum

    def allowed(self, routed: RoutedTokens) -> BoolArray:
        top_k = routed.topk_ids.shape[1]
        best_ids = np.argpartition(-routed.scores, top_k - 1, axis=1)[:, :top_k]
        scores = np.maximum(np.take_along_axis(routed.scores, best_ids, axis=1), 0)
        sums_BE = _sum_by_block(routed, best_ids, scores)
        return _covering(sums_BE, self._coverage, self._minimum)[routed.block_of]


class ResidentPolicy:
    """Masked tokens whose confidence is below `threshold` take resident experts only.

    The confidence is what is known at layer time: that of the latest earlier forward, 0.5 where
    there is none. Source: policies.md 7, cache-aware variants.
    """

    depends_on_cache = True

    def __init__(self, *, threshold: float) -> None:
        self._threshold = threshold

    def allowed(self, routed: RoutedTokens) -> BoolArray:
        is_masked = routed.token_state == TokenState.MASKED
        is_free = ~is_masked | (routed.token_confidence >= self._threshold)
        allowed: BoolArray = is_free[:, None] | routed.is_resident[None, :]
        return allowed


def _sum_by_block(
    routed: RoutedTokens, ids_TN: IntArray, values_TN: npt.NDArray[np.floating]
) -> FloatArray:
    """Sums [B, E] of values [T, N] that tokens give to expert ids [T, N]."""
    num_experts, num_blocks = routed.scores.shape[1], int(routed.block_of[-1]) + 1
    places = (routed.block_of[:, None] * num_experts + ids_TN).ravel()
    weights = values_TN.ravel().astype(np.float64)
    sums: FloatArray = np.bincount(places, weights, minlength=num_blocks * num_experts)  # type: ignore[assignment]  # with weights it is of floats
    return sums.reshape(num_blocks, num_experts)


def _best(values_BE: FloatArray, counts_B: IntArray) -> BoolArray:
    """The so many largest of each row, ties to the lower id; bool [B, E]."""
    order_BE = np.argsort(-values_BE, axis=1, kind="stable")
    is_best = np.empty(values_BE.shape, dtype=np.bool_)
    ranks = np.broadcast_to(np.arange(values_BE.shape[1]), values_BE.shape)
    np.put_along_axis(is_best, order_BE, ranks < counts_B[:, None], axis=1)
    return is_best


def _covering(values_BE: FloatArray, coverage: float, minimum: int) -> BoolArray:
    """The largest of each row up to a share of its sum, and the one that crosses it."""
    descending = -np.sort(-values_BE, axis=1)
    before = np.cumsum(descending, axis=1) - descending
    is_needed = (before < coverage * values_BE.sum(1, keepdims=True)) & (descending > 0)
    return _best(values_BE, np.maximum(is_needed.sum(1), minimum))
