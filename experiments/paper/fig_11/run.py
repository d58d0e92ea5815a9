"""Figure 11 is not described where we could read; this draws the paper's two worked examples.

python -m experiments.paper.fig_11.run
"""

from collections.abc import Iterator

import numpy as np

from experiments.paper.common import Row, Table, base_row, run_figure, select
from oled_moe.costs import CostModel
from oled_moe.policies.dispatch import LoadReuseDispatchPolicy, MissSet
from oled_moe.policies.retention import gate_mass
from oled_moe.types import ForwardContext, ForwardRow, LayerDemand, MoeShape, Phase, TokenState

FIGURE = "11"
# policies.md 9.1: two tokens, which experts they go to and with what weights.
CONFIDENCE = (0.8, 0.4)
ROUTES = ((0, 2), (1, 2))
WEIGHTS = ((0.5, 0.5), (0.3, 0.7))
PAPER_PRIORITIES = (0.333, 0.100, 0.567, 0.0)
# policies.md 9.2: ten misses; a copy takes 1, the CPU 1 per token.
PRIORITIES = (0.25, 0.20, 0.15, 0.10, 0.08, 0.07, 0.06, 0.04, 0.03, 0.02)
TOKENS = (3, 2, 3, 2, 1, 3, 3, 2, 2, 1)
PAPER_START = ((0, 1, 2, 3, 4), 5, 11, 0.78)
PAPER_END = ((0, 1, 2, 3, 5, 6), 6, 6, 0.83)


def demand_of(
    confidence: tuple[float, ...],
    routes: tuple[tuple[int, ...], ...],
    weights: tuple[tuple[float, ...], ...],
    num_experts: int,
) -> LayerDemand:
    size = len(confidence)
    context = ForwardContext(
        1,
        16,
        (ForwardRow(0, 0, 1, Phase.DENOISE, size),),
        np.array(confidence, dtype=np.float32),
        np.full(size, TokenState.MASKED, dtype=np.uint8),
    )
    return LayerDemand.from_routing(
        0,
        context,
        np.array(routes, dtype=np.int64),
        np.array(weights, dtype=np.float32),
        num_experts=num_experts,
    )


def make_rows(is_quick: bool) -> Iterator[Row]:
    demand = demand_of(CONFIDENCE, ROUTES, WEIGHTS, 4)
    priorities = gate_mass(demand, num_experts=4).tolist()
    yield base_row(FIGURE, example="priority", priorities=priorities)
    for is_reuse_aware in (True, False):
        for max_moves in range(5):
            copied = split(max_moves, is_reuse_aware=is_reuse_aware)
            rest = [e for e in range(len(TOKENS)) if e not in copied]
            yield base_row(
                FIGURE,
                example="dispatch",
                is_reuse_aware=is_reuse_aware,
                max_moves=max_moves,
                copied=copied,
                copy_latency=len(copied),
                cpu_latency=sum(TOKENS[e] for e in rest),
                copied_priority=sum(PRIORITIES[e] for e in copied),
            )


def split(max_moves: int, *, is_reuse_aware: bool) -> list[int]:
    """Which of the ten misses our dispatcher copies when it may make so many moves."""
    size = len(TOKENS)
    policy = LoadReuseDispatchPolicy(
        MoeShape(1, size, size, 1),
        CostModel(transfer_s=1, cpu_base_s=0, cpu_token_s=1, mean_tokens_per_miss=1),
        is_reuse_aware=is_reuse_aware,
        max_moves=max_moves,
    )
    demand = demand_of((1.0,), (tuple(range(size)),), ((1.0,) * size,), size)
    to_cpu = policy.split(
        MissSet(demand, np.arange(size), np.array(TOKENS), np.array(PRIORITIES), np.empty(0), 100)
    )
    return np.flatnonzero(~to_cpu).tolist()


def tables(rows: list[Row]) -> list[Table]:
    ours = select(rows, example="priority")[0]["priorities"]
    first = Table(
        "Priorities: token 1 (confidence 0.8) goes to E1 and E3, token 2 (0.4) to E2 and E3.",
        ("expert", "ours", "paper"),
        tuple(
            (f"E{i + 1}", f"{value:.3f}", f"{paper:.3f}")
            for i, (value, paper) in enumerate(zip(ours, PAPER_PRIORITIES, strict=True))
        ),
    )
    lines = []
    moves = select(rows, example="dispatch", is_reuse_aware=True)
    for before, row in zip([None, *moves], moves, strict=False):
        if before is not None and row["copied"] == before["copied"]:
            break
        lines.append(
            (
                f"moves: {row['max_moves']}",
                *_cells(row["copied"], row["copy_latency"], row["cpu_latency"],
                        row["copied_priority"]),
            )
        )  # fmt: skip
    lines.append(("paper, start", *_cells(*PAPER_START)))
    lines.append(("paper, end", *_cells(*PAPER_END)))
    header = ("dispatch of ten misses", "copied", "copy lane", "CPU", "priority copied")
    return [first, Table("Dispatch: a copy takes 1, the CPU 1 per token.", header, tuple(lines))]


def _cells(copied: list[int], copy: int, cpu: int, priority: float) -> tuple[str, ...]:
    return (" ".join(f"M{e + 1}" for e in copied), str(copy), str(cpu), f"{priority:.2f}")


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
