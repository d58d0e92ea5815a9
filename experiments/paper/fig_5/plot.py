"""Draws docs/figures/paper/fig_5.svg from results/raw/fig_5.jsonl alone.

python -m experiments.paper.fig_5.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import CAPACITIES, MODELS, POLICIES, Row, mean_of, select
from experiments.paper.plots import (
    POLICY_COLOURS,
    grouped_bars,
    legend_below,
    plot_figure,
    subplots,
)


def draw(rows: list[Row]) -> Figure:
    figure, ((left, right),) = subplots(1, 2, figsize=(9.5, 3.6))
    cells = {
        f"{model}\nC = {capacity}": select(rows, model=model, capacity=capacity)
        for model in MODELS
        for capacity in CAPACITIES
    }
    over, used, spread = {}, {}, {}
    for label in POLICIES:
        over[label], spread[label] = [], []
        for cell in cells.values():
            ideal = {row["seed"]: row["tpot_s"] for row in select(cell, label="ideal")}
            ratios = [row["tpot_s"] / ideal[row["seed"]] for row in select(cell, label=label)]
            mean = sum(ratios) / len(ratios)
            over[label].append(mean)
            spread[label].append(max(abs(ratio - mean) for ratio in ratios))
        used[label] = [
            100 * mean_of(select(cell, label=label), "expert_cache_utilization")
            for cell in cells.values()
        ]
    grouped_bars(left, list(cells), over, colours=POLICY_COLOURS, spread=spread)
    left.axhline(1, color="black", linewidth=0.8)
    left.set_ylabel("TPOT over the ideal cache's")
    grouped_bars(right, list(cells), used, colours=POLICY_COLOURS)
    right.set_ylabel("expert cache utilisation, %")
    title = "Synthetic traces, mixed workload; whiskers: the farthest of three seeds"
    figure.suptitle(title, fontsize=9)
    legend_below(figure, left)
    return figure


def main() -> None:
    plot_figure("5", draw)


if __name__ == "__main__":
    main()
