"""Draws docs/figures/paper/fig_15a.svg from results/raw/fig_15a.jsonl alone.

python -m experiments.paper.fig_15a.plot
"""

import statistics

from matplotlib.figure import Figure

from experiments.paper.common import CAPACITIES, MODELS, Row, mean_of, select
from experiments.paper.plots import grouped_bars, legend_below, plot_figure, subplots
from experiments.paper.sweeps import changes


def draw(rows: list[Row]) -> Figure:
    figure, ((left, right),) = subplots(1, 2, figsize=(10, 3.6))
    cells = [(model, capacity) for model in MODELS for capacity in CAPACITIES]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    hits: dict[str, list[float]] = {policy: [] for policy in policies}
    away: dict[str, list[float]] = {policy: [] for policy in policies}
    for model, capacity in cells:
        here = select(rows, model=model, capacity=capacity)
        for policy in policies:
            mine = select(here, policy=policy)
            over = [100 + 100 * c for c in changes(mine, select(here, policy="naive-lru"))]
            times[policy].append(statistics.fmean(over))
            away[policy].append(max(over) - min(over))
            hits[policy].append(100 * mean_of(mine, "hit_rate"))
    groups = [f"{model}\nC={capacity}" for model, capacity in cells]
    grouped_bars(left, groups, times, spread={p: [a / 2 for a in away[p]] for p in policies})
    left.set_ylabel("TPOT, % of naive LRU's")
    grouped_bars(right, groups, hits)
    right.set_ylabel("demanded experts found resident, %")
    right.set_ylim(0, 100)
    legend_below(figure, left, num_columns=7)
    return figure


def main() -> None:
    plot_figure("15a", draw)


if __name__ == "__main__":
    main()
