"""Draws docs/figures/paper/fig_16a.svg from results/raw/fig_16a.jsonl alone.

python -m experiments.paper.fig_16a.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import CAPACITIES, MODELS, Row, select
from experiments.paper.plots import BLUE, ORANGE, legend_below, plot_figure, subplots

COLOURS = {"naive-lru": ORANGE, "oled": BLUE}
MARKERS = {40: "o", 100: "s"}


def draw(rows: list[Row]) -> Figure:
    figure, grid = subplots(2, 3, figsize=(10, 5.4))
    names = ("expert_cache_utilization", "hit_rate")
    for line, model in zip(grid, MODELS, strict=True):
        here = select(rows, model=model)
        batches = sorted({row["batch"] for row in here})
        for policy, colour in COLOURS.items():
            for capacity in CAPACITIES:
                mine = select(here, policy=policy, capacity=capacity)
                for axes, name in zip(line[:2], names, strict=True):
                    axes.plot(
                        batches,
                        [100 * select(mine, batch=batch)[0][name] for batch in batches],
                        color=colour,
                        marker=MARKERS[capacity],
                        linestyle="-" if capacity == 40 else "--",
                        label=f"{policy}, C={capacity}",
                    )
        active = [select(here, batch=batch)[0]["active"] for batch in batches]
        line[2].plot(batches, [100 * value / 256 for value in active], color="black", marker="^")
        for axes in line:
            axes.set_xscale("log", base=2)
            axes.set_xticks(batches, [str(batch) for batch in batches])
            axes.set_ylim(0, 103)
        line[0].set_ylabel(f"{model}, %")
    titles = ("utilisation", "hit rate", "active experts of 256")
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title)
    for axes in grid[1]:
        axes.set_xlabel("batch size")
    legend_below(figure, grid[0][0])
    return figure


def main() -> None:
    plot_figure("16a", draw)


if __name__ == "__main__":
    main()
