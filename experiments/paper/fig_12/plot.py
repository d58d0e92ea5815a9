"""Draws docs/figures/paper/fig_12.svg from results/raw/fig_12.jsonl alone.

python -m experiments.paper.fig_12.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import CAPACITIES, MODELS, POLICIES, WORKLOADS, Row, mean_of, select
from experiments.paper.plots import (
    POLICY_COLOURS,
    grouped_bars,
    legend_below,
    plot_figure,
    subplots,
)


def values(cells: list[list[Row]], name: str, scale: float) -> dict[str, list[float]]:
    return {
        label: [scale * mean_of(select(cell, label=label), name) for cell in cells]
        for label in POLICIES
    }


def draw(rows: list[Row]) -> Figure:
    panels = [(model, capacity) for model in MODELS for capacity in CAPACITIES]
    figure, grid = subplots(2, len(panels), figsize=(12, 5.6))
    for column, (model, capacity) in enumerate(panels):
        cells = [select(rows, model=model, capacity=capacity, workload=w) for w in WORKLOADS]

        top, bottom = grid[0][column], grid[1][column]
        grouped_bars(top, list(WORKLOADS), values(cells, "tpot_s", 1e3), colours=POLICY_COLOURS)
        used = values(cells, "expert_cache_utilization", 100)
        grouped_bars(bottom, list(WORKLOADS), used, colours=POLICY_COLOURS)
        top.set_title(f"{model}, C = {capacity}")
        bottom.set_ylim(0, 103)
    grid[0][0].set_ylabel("TPOT, ms")
    grid[1][0].set_ylabel("expert cache utilisation, %")
    legend_below(figure, grid[0][0])
    return figure


def main() -> None:
    plot_figure("12", draw)


if __name__ == "__main__":
    main()
