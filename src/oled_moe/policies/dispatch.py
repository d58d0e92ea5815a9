"""Which misses are copied in and which are computed where they lie.

A DispatchPolicy gets the misses of one layer with their tokens and retention scores and answers,
for each, whether the CPU takes it. Copied experts may stay resident; CPU experts are no candidates.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from oled_moe.costs import CostModel
from oled_moe.types import BoolArray, FloatArray, IntArray, LayerDemand, MoeShape


@dataclass(frozen=True, slots=True)
class MissSet:
    """The misses of one layer in one forward.

    Shapes: expert_ids and num_tokens int64 [M], ids ascending; scores float64 [M], the retention
    scores; hit_scores float64 [H] of the demanded residents. `capacity`: slots the layer keeps.
    """

    demand: LayerDemand
    expert_ids: IntArray
    num_tokens: IntArray
    scores: FloatArray
    hit_scores: FloatArray
    capacity: int


class DispatchPolicy(Protocol):
    """Splits the misses of a layer between the copy lane and the CPU."""

    def split(self, misses: MissSet) -> BoolArray:
        """bool [M]: True where the CPU computes the expert."""
        ...


class LoadAllDispatchPolicy:
    """Every miss is copied in: what systems without CPU kernels do."""

    def split(self, misses: MissSet) -> BoolArray:
        return np.zeros(len(misses.expert_ids), dtype=np.bool_)


class LoadReuseDispatchPolicy:
    """OLED-MoE's load- and reuse-aware dispatch: ρ split, then at most `max_moves` best moves.

    J(G) = max(|G|·T_H2D, Σ cpu(n_e) over the rest) − λ·Σ p over members of G that survive the
    layer's cut; λ = overlap·|A|·min(T_H2D, cpu(n̄)), or 0 with `is_reuse_aware=False` (the paper's
    load-only dispatch). |G| stays within δ = max(1, ⌈0.1·|M|⌉) of ρ·|M|. `overlap` None measures
    the share of a layer's demand that was in its previous one.

    Source: OLED-MoE, cooperative dispatch; policies.md 2.3, 5.8, 5.9, 5.14; architecture.md 3.4.
    """

    def __init__(
        self,
        shape: MoeShape,
        costs: CostModel,
        *,
        is_reuse_aware: bool = True,
        overlap: float | None = None,
        max_moves: int = 8,
    ) -> None:
        self._costs = costs
        self._is_reuse_aware = is_reuse_aware
        self._max_moves = max_moves
        self._fixed_overlap = overlap
        # Start values: the paper's adjacent overlap, the profile's n̄; both follow what is seen.
        self._overlap = 0.85
        self._mean_tokens = costs.mean_tokens_per_miss
        self._was_active = np.zeros((shape.num_layers, shape.num_experts), dtype=np.bool_)

    def split(self, misses: MissSet) -> BoolArray:
        context = misses.demand.context
        if context.is_prefill:
            # Every copy is streamed anyway: the CPU only where it is faster outright.
            cpu_s = self._costs.cpu_base_s + self._costs.cpu_token_s * misses.num_tokens
            return np.asarray(cpu_s < self._costs.transfer_s)
        self._follow(misses)
        order = np.argsort(-misses.scores, kind="stable")
        is_copied = self._search(misses, order)
        to_cpu = np.ones(len(order), dtype=np.bool_)
        to_cpu[order[is_copied]] = False
        return to_cpu

    def _follow(self, misses: MissSet) -> None:
        """Update the running n̄ and overlap; weight 0.98 on the past of all layers together."""
        if not misses.demand.context.is_denoise:
            return
        active = misses.demand.expert_ids
        was_active = self._was_active[misses.demand.layer]
        if was_active.any():
            self._overlap += 0.02 * (float(was_active[active].mean()) - self._overlap)
        was_active[:] = False
        was_active[active] = True
        if len(misses.num_tokens):
            self._mean_tokens += 0.02 * (float(misses.num_tokens.mean()) - self._mean_tokens)

    @property
    def copied_share(self) -> float:
        """ρ: the share of misses to copy at which both lanes take equally long."""
        mean_cpu_s = self._costs.cpu_s(self._mean_tokens)
        return mean_cpu_s / (mean_cpu_s + self._costs.transfer_s)

    def _reuse_weight(self, num_active: int) -> float:
        """λ: seconds that one unit of kept priority is taken to save in the next forward."""
        if not self._is_reuse_aware:
            return 0.0
        overlap = self._overlap if self._fixed_overlap is None else self._fixed_overlap
        mean_cpu_s = self._costs.cpu_s(self._mean_tokens)
        return overlap * num_active * min(self._costs.transfer_s, mean_cpu_s)

    def _search(self, misses: MissSet, order: IntArray) -> BoolArray:
        """Start from the top ρ·|M| by priority and take the best move while J falls."""
        num_misses = len(order)
        start = min(num_misses, int(self.copied_share * num_misses + 0.5))
        slack = max(1, -(-num_misses // 10))
        search = _MoveSearch(
            costs=self._costs,
            reuse_weight=self._reuse_weight(misses.demand.expert_ids.size),
            scores=misses.scores[order].tolist(),
            tokens=misses.num_tokens[order].tolist(),
            hit_scores=sorted(misses.hit_scores.tolist(), reverse=True),
            capacity=misses.capacity,
            bounds=(max(0, start - slack), min(num_misses, start + slack)),
        )
        return np.array(search.run(start, self._max_moves), dtype=np.bool_)


class _MoveSearch:
    """Steepest descent on J over exchanges, additions and removals.

    Misses are numbered in priority order. Of misses with equal token counts only the least wanted
    copied one and the most wanted other one can be part of a best move (J depends on tokens
    through the CPU time alone, and falls with the priority of what is copied), so a step looks at
    pairs of token counts instead of pairs of misses.
    """

    def __init__(
        self,
        *,
        costs: CostModel,
        reuse_weight: float,
        scores: list[float],
        tokens: list[int],
        hit_scores: list[float],
        capacity: int,
        bounds: tuple[int, int],
    ) -> None:
        self._transfer_s = costs.transfer_s
        self._reuse_weight = reuse_weight
        self._scores = scores
        self._cpu_s = [costs.cpu_s(n) for n in tokens]
        self._tokens = tokens
        self._hit_scores = hit_scores
        self._capacity = capacity
        self._bounds = bounds

    def run(self, num_start: int, max_moves: int) -> list[bool]:
        num_misses = len(self._scores)
        is_copied = [True] * num_start + [False] * (num_misses - num_start)
        num_copied = num_start
        cpu_s = sum(self._cpu_s[num_start:])
        benefit = self._benefit(is_copied)
        cost = max(num_copied * self._transfer_s, cpu_s) - self._reuse_weight * benefit
        for _ in range(max_moves):
            best = self._best_move(is_copied, num_copied, cpu_s, benefit)
            if best is None or best[0] >= cost - 1e-12:
                break
            cost, removed, added, benefit = best
            if removed is not None:
                is_copied[removed] = False
                num_copied -= 1
                cpu_s += self._cpu_s[removed]
            if added is not None:
                is_copied[added] = True
                num_copied += 1
                cpu_s -= self._cpu_s[added]
        return is_copied

    def _survivors(self, is_copied: list[bool]) -> tuple[list[tuple[float, bool]], bool]:
        """Hits and copies, best first, as (score, is a copy); and whether the cut binds."""
        copied = [score for score, flag in zip(self._scores, is_copied, strict=True) if flag]
        ranked = [(score, True) for score in copied] + [(s, False) for s in self._hit_scores]
        ranked.sort(key=lambda entry: -entry[0])
        return ranked, len(ranked) + 1 > self._capacity

    def _benefit(self, is_copied: list[bool]) -> float:
        ranked, _ = self._survivors(is_copied)
        return sum(score for score, is_copy in ranked[: self._capacity] if is_copy)

    def _best_move(
        self, is_copied: list[bool], num_copied: int, cpu_s: float, benefit: float
    ) -> tuple[float, int | None, int | None, float] | None:
        """(J, removed, added, benefit) of the best move; the first found wins a tie."""
        least_copied: dict[int, int] = {}
        most_wanted: dict[int, int] = {}
        for index, n in enumerate(self._tokens):
            if is_copied[index]:
                least_copied[n] = index
            elif n not in most_wanted:
                most_wanted[n] = index
        removals: list[int | None] = list(least_copied.values())
        additions: list[int | None] = list(most_wanted.values())
        lowest, highest = self._bounds
        removals.append(None)
        additions.append(None)
        last_kept, first_cut = self._cut(is_copied)
        best: tuple[float, int | None, int | None, float] | None = None
        for removed in removals:
            for added in additions:
                count = num_copied + (added is not None) - (removed is not None)
                if removed is None and added is None or not lowest <= count <= highest:
                    continue
                on_cpu_s = cpu_s
                if removed is not None:
                    on_cpu_s += self._cpu_s[removed]
                if added is not None:
                    on_cpu_s -= self._cpu_s[added]
                gained = benefit
                if self._reuse_weight:
                    gained = self._moved_benefit(benefit, removed, added, last_kept, first_cut)
                on_copy_s = count * self._transfer_s
                latency = on_copy_s if on_copy_s > on_cpu_s else on_cpu_s
                cost = latency - self._reuse_weight * gained
                if best is None or cost < best[0]:
                    best = (cost, removed, added, gained)
        return best

    def _cut(self, is_copied: list[bool]) -> tuple[tuple[float, bool], tuple[float, bool]]:
        """The last that survives the cut and the first that does not, as (score, is a copy)."""
        nothing = (-float("inf"), False)
        if not self._reuse_weight:
            return nothing, nothing
        ranked, is_binding = self._survivors(is_copied)
        if not is_binding:
            return nothing, nothing
        capacity = self._capacity
        if capacity == 0:
            return (float("inf"), False), nothing
        last_kept = ranked[capacity - 1] if len(ranked) >= capacity else nothing
        first_cut = ranked[capacity] if len(ranked) > capacity else nothing
        return last_kept, first_cut

    def _moved_benefit(
        self,
        benefit: float,
        removed: int | None,
        added: int | None,
        last_kept: tuple[float, bool],
        first_cut: tuple[float, bool],
    ) -> float:
        """Σ p over surviving copies after a move, from what stands at the edge of the cut."""
        has_room = False
        if removed is not None and self._scores[removed] >= last_kept[0]:
            benefit -= self._scores[removed]
            has_room = True
        if added is not None:
            score = self._scores[added]
            if has_room:
                if score >= first_cut[0]:
                    return benefit + score
            elif score > last_kept[0]:
                return benefit + score - (last_kept[0] if last_kept[1] else 0.0)
        if has_room and first_cut[1]:
            benefit += first_cut[0]
        return benefit
