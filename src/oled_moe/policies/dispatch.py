"""Which misses are copied in and which are computed where they lie.

A DispatchPolicy gets the misses of one layer with their tokens and retention scores and answers,
for each, whether the CPU takes it. Copied experts may stay resident; CPU experts are no candidates.
"""

from bisect import insort
from typing import NamedTuple, Protocol

import numpy as np

from oled_moe.costs import CostModel
from oled_moe.types import BoolArray, FloatArray, IntArray, LayerDemand, MoeShape


class MissSet(NamedTuple):
    """The misses of one layer in one forward.

    Shapes: expert_ids and num_tokens int64 [M], ids ascending; scores float64 [M], the retention
    scores; hit_scores float64 [H] of the demanded residents. `capacity`: experts the layer can
    keep; M is at least 1.
    """

    demand: LayerDemand
    expert_ids: IntArray
    num_tokens: IntArray
    scores: FloatArray
    hit_scores: FloatArray
    capacity: int


class DispatchPolicy(Protocol):
    """Splits the misses of a layer between the copy lane and the CPU."""

    def observe(self, demand: LayerDemand) -> None:
        """Take note of a demand; called once for each, before `split` if there are misses."""
        ...

    def split(self, misses: MissSet) -> BoolArray:
        """bool [M]: True where the CPU computes the expert."""
        ...


class LoadAllDispatchPolicy:
    """Every miss is copied in: what systems without CPU kernels do."""

    def observe(self, demand: LayerDemand) -> None:
        pass

    def split(self, misses: MissSet) -> BoolArray:
        return np.zeros(len(misses.expert_ids), dtype=np.bool_)


class LoadReuseDispatchPolicy:
    """OLED-MoE's load- and reuse-aware dispatch: ρ split, then at most `max_moves` best moves.

    J(G) = max(|G|·T_H2D, Σ cpu(n_e) over the rest) − λ·Σ p over members of G that survive the
    layer's cut; λ = overlap·|A|·min(T_H2D, cpu(n̄)), or 0 with `is_reuse_aware=False` (the paper's
    load-only dispatch). |G| stays within δ = max(1, ⌈0.1·|M|⌉) of ρ·|M|. `overlap` None measures
    the share of a layer's demand that was in its previous one. `has_probabilities`: scores are
    chances of being wanted next, so that λ is just min(T_H2D, cpu(n̄)).

    Source: OLED-MoE, cooperative dispatch; policies.md 2.3, 5.8, 5.9, 5.14; architecture.md 3.4.
    """

    def __init__(
        self,
        shape: MoeShape,
        costs: CostModel,
        *,
        is_reuse_aware: bool = True,
        overlap: float | None = None,
        has_probabilities: bool = False,
        max_moves: int = 8,
    ) -> None:
        self._costs = costs
        self._is_reuse_aware = is_reuse_aware
        self._max_moves = max_moves
        self._has_probabilities = has_probabilities
        self._fixed_overlap = overlap
        # Start values: the paper's adjacent overlap, the profile's n̄; both follow what is seen.
        self._overlap = 0.85
        self._mean_tokens = costs.mean_tokens_per_miss
        self._was_active = np.zeros((shape.num_layers, shape.num_experts), dtype=np.bool_)
        self._has_past = [False] * shape.num_layers

    def observe(self, demand: LayerDemand) -> None:
        """Follow the overlap of adjacent demands; weight 0.98 on the past of all layers."""
        if not demand.context.is_denoise:
            return
        was_active, active = self._was_active[demand.layer], demand.expert_ids
        if self._has_past[demand.layer]:
            share = np.count_nonzero(was_active[active]) / len(active)
            self._overlap += 0.02 * (share - self._overlap)
        self._has_past[demand.layer] = True
        was_active[:] = False
        was_active[active] = True

    def split(self, misses: MissSet) -> BoolArray:
        context = misses.demand.context
        if context.is_prefill:
            # Every copy is streamed anyway: the CPU only where it is faster outright.
            cpu_s = self._costs.cpu_base_s + self._costs.cpu_token_s * misses.num_tokens
            return np.asarray(cpu_s < self._costs.transfer_s)
        if context.is_denoise:
            mean_tokens = int(misses.num_tokens.sum()) / len(misses.num_tokens)
            self._mean_tokens += 0.02 * (mean_tokens - self._mean_tokens)
        order = (-misses.scores).argsort(kind="stable")
        to_cpu = np.full(len(order), True)
        to_cpu[order[self._search(misses, order)]] = False
        return to_cpu

    @property
    def copied_share(self) -> float:
        """ρ: the share of misses to copy at which both lanes take equally long."""
        mean_cpu_s = self._costs.cpu_s(self._mean_tokens)
        return mean_cpu_s / (mean_cpu_s + self._costs.transfer_s)

    def _search(self, misses: MissSet, order: IntArray) -> list[int]:
        """Start from the top ρ·|M| by priority and take the best move while J falls."""
        costs, num_misses = self._costs, len(order)
        start = min(num_misses, int(self.copied_share * num_misses + 0.5))
        slack = max(1, -(-num_misses // 10))
        # λ: seconds that one unit of kept priority is taken to save in the next forward.
        reuse_weight = 0.0
        if self._is_reuse_aware:
            overlap = self._overlap if self._fixed_overlap is None else self._fixed_overlap
            num_active = len(misses.demand.expert_ids)
            mean_cpu_s = costs.cpu_s(self._mean_tokens)
            chance = 1.0 if self._has_probabilities else overlap * num_active
            reuse_weight = chance * min(costs.transfer_s, mean_cpu_s)
        search = _MoveSearch(
            costs=costs,
            reuse_weight=reuse_weight,
            scores=misses.scores[order],
            tokens=misses.num_tokens[order],
            hit_scores=misses.hit_scores,
            capacity=misses.capacity,
            bounds=(max(0, start - slack), min(num_misses, start + slack)),
        )
        return search.run(start, self._max_moves)


# (miss, its CPU time, priority lost, whether a place falls free)
_Removal = tuple[int, float, float, bool]
# (miss, its CPU time, priority gained, the same where a place is free)
_Addition = tuple[int, float, float, float]


class _Group:
    """The misses with one token count, in priority order; the first `num_copied` are copied."""

    __slots__ = ("members", "num_copied")

    def __init__(self) -> None:
        self.members: list[int] = []
        self.num_copied = 0


class _MoveSearch:
    """Steepest descent on J over exchanges, additions and removals.

    Misses are numbered in priority order. Of misses with equal token counts only the least wanted
    copied one and the most wanted other one can be part of a best move (J depends on tokens
    through the CPU time alone, and falls with the priority of what is copied), so a step looks at
    pairs of token counts instead of pairs of misses. Plain lists: with some tens of misses they
    are faster than arrays.

    Shapes: scores float64 [M] and tokens int64 [M], both in descending order of score; hit_scores
    float64 [H] in any order.
    """

    def __init__(
        self,
        *,
        costs: CostModel,
        reuse_weight: float,
        scores: FloatArray,
        tokens: IntArray,
        hit_scores: FloatArray,
        capacity: int,
        bounds: tuple[int, int],
    ) -> None:
        self._transfer_s = costs.transfer_s
        self._reuse_weight = reuse_weight
        self._scores: list[float] = scores.tolist()
        self._tokens: list[int] = tokens.tolist()
        self._cpu_s: list[float] = (costs.cpu_base_s + costs.cpu_token_s * tokens).tolist()
        self._capacity = capacity
        self._bounds = bounds
        # Whether hits and copies together can ever be more than the layer keeps.
        self._is_cut = reuse_weight > 0 and len(hit_scores) + bounds[1] > capacity
        if self._is_cut:
            ascending = np.sort(hit_scores)
            self._hits: list[float] = ascending[::-1].tolist()
            # For each miss, the hits ranked before it.
            better = len(ascending) - ascending.searchsorted(scores, side="right")
            self._num_better_hits: list[int] = better.tolist()

    def run(self, num_start: int, max_moves: int) -> list[int]:
        """The misses to copy, in priority order, starting from the first `num_start`."""
        groups: dict[int, _Group] = {}
        for index, n in enumerate(self._tokens):
            group = groups.get(n)
            if group is None:
                group = groups[n] = _Group()
            group.members.append(index)
            group.num_copied += index < num_start
        copied = list(range(num_start))
        cpu_s = sum(self._cpu_s[num_start:])
        benefit = sum(self._scores[: self._num_surviving(copied)])
        cost = max(num_start * self._transfer_s, cpu_s) - self._reuse_weight * benefit
        for _ in range(max_moves):
            best = self._best_move(groups, copied, cpu_s, benefit)
            if best is None or best[0] >= cost - 1e-12:
                break
            cost, removed, added, benefit = best
            if removed is not None:
                copied.remove(removed)
                groups[self._tokens[removed]].num_copied -= 1
                cpu_s += self._cpu_s[removed]
            if added is not None:
                insort(copied, added)
                groups[self._tokens[added]].num_copied += 1
                cpu_s -= self._cpu_s[added]
        return copied

    def _num_surviving(self, copied: list[int]) -> int:
        """How many of the copies, which are in priority order, survive the layer's cut."""
        if not self._is_cut:
            return len(copied)
        # The rank among hits and copies only grows along the copies.
        low, high = 0, len(copied)
        while low < high:
            middle = (low + high) // 2
            if middle + self._num_better_hits[copied[middle]] < self._capacity:
                low = middle + 1
            else:
                high = middle
        return low

    def _best_move(
        self, groups: dict[int, _Group], copied: list[int], cpu_s: float, benefit: float
    ) -> tuple[float, int | None, int | None, float] | None:
        """(J, removed, added, benefit) of the best move; the first found wins a tie."""
        least_copied = [g.members[g.num_copied - 1] for g in groups.values() if g.num_copied]
        most_wanted = [
            g.members[g.num_copied] for g in groups.values() if g.num_copied < len(g.members)
        ]
        removals, additions, heir = self._price(least_copied, most_wanted, copied)
        transfer_s, reuse_weight = self._transfer_s, self._reuse_weight
        num_copied, (lowest, highest) = len(copied), self._bounds
        best_cost = float("inf")
        best: tuple[float, int | None, int | None, float] | None = None
        on_copy_s = num_copied * transfer_s
        for removed, freed_s, lost, has_room in removals:
            rest_cpu_s, rest_benefit = cpu_s + freed_s, benefit - lost
            for added, taken_s, gain, gain_with_room in additions:
                on_cpu_s = rest_cpu_s - taken_s
                moved = rest_benefit + (gain_with_room if has_room else gain)
                latency_s = on_copy_s if on_copy_s > on_cpu_s else on_cpu_s
                cost = latency_s - reuse_weight * moved
                if cost < best_cost:
                    best_cost, best = cost, (cost, removed, added, moved)
        if num_copied > lowest:
            for removed, freed_s, lost, has_room in removals:
                moved = benefit - lost + (heir if has_room else 0.0)
                latency_s = max((num_copied - 1) * transfer_s, cpu_s + freed_s)
                cost = latency_s - reuse_weight * moved
                if cost < best_cost:
                    best_cost, best = cost, (cost, removed, None, moved)
        if num_copied < highest:
            for added, taken_s, gain, _ in additions:
                moved = benefit + gain
                latency_s = max((num_copied + 1) * transfer_s, cpu_s - taken_s)
                cost = latency_s - reuse_weight * moved
                if cost < best_cost:
                    best_cost, best = cost, (cost, None, added, moved)
        return best

    def _price(
        self, removals: list[int], additions: list[int], copied: list[int]
    ) -> tuple[list["_Removal"], list["_Addition"], float]:
        """What each half of a move does to CPU time and benefit, and who inherits a free place."""
        scores, cpu_s = self._scores, self._cpu_s
        if not self._is_cut:
            return (
                [(i, cpu_s[i], scores[i], False) for i in removals],
                [(i, cpu_s[i], scores[i], scores[i]) for i in additions],
                0.0,
            )
        last_kept, is_last_a_copy, first_cut, is_first_a_copy = self._edge(copied)
        # A place that falls free goes to the first that was cut, be it a hit or a copy.
        heir = first_cut if is_first_a_copy else 0.0
        pushed_out = last_kept if is_last_a_copy else 0.0
        return (
            [
                (i, cpu_s[i], scores[i], True)
                if scores[i] >= last_kept
                else (i, cpu_s[i], 0.0, False)
                for i in removals
            ],
            [
                (
                    i,
                    cpu_s[i],
                    scores[i] - pushed_out if scores[i] >= last_kept else 0.0,
                    scores[i] if scores[i] >= first_cut else heir,
                )
                for i in additions
            ],
            heir,
        )

    def _edge(self, copied: list[int]) -> "_Edge":
        """What stands on both sides of the cut among hits and copies."""
        num_surviving = self._num_surviving(copied)
        num_hits = self._capacity - num_surviving
        nothing = -float("inf")
        kept_copy = self._scores[copied[num_surviving - 1]] if num_surviving else float("inf")
        kept_hit = float("inf")
        if num_hits > 0:
            # With room to spare nothing is the last to be kept.
            kept_hit = self._hits[num_hits - 1] if num_hits <= len(self._hits) else nothing
        cut_copy = self._scores[copied[num_surviving]] if num_surviving < len(copied) else nothing
        cut_hit = self._hits[num_hits] if num_hits < len(self._hits) else nothing
        return _Edge(
            min(kept_copy, kept_hit),
            kept_copy < kept_hit,
            max(cut_copy, cut_hit),
            cut_copy >= cut_hit and cut_copy > nothing,
        )


class _Edge(NamedTuple):
    """The last score that survives the cut and the first that does not, and whose they are."""

    last_kept: float
    is_last_kept_a_copy: bool
    first_cut: float
    is_first_cut_a_copy: bool
