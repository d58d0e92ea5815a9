"""Draws docs/figures/paper/fig_15b.svg from results/raw/fig_15b.jsonl alone.

python -m experiments.paper.fig_15b.plot
"""

import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.common import MODELS, Row, mean_of, select
from experiments.paper.fig_15b.run import SIZES, pairs
from experiments.paper.plots import lines, plot_figure, subplots

USED = "effective_transfer_ratio"


def draw(rows: list[Row]) -> Figure:
    figure, grid = subplots(2, 3, figsize=(10, 5.4))
    for line, model in zip(grid, MODELS, strict=True):
        found = [pairs(rows, model, size) for size in SIZES]
        means = {name: [100 * statistics.fmean(each[name]) for each in found] for name in found[0]}
        _lines(line[0], {name: means[name] for name in ("priority vs LRU", "priority vs LFU")})
        _lines(line[1], {"adapt vs uniform": means["adapt vs uniform"]})
        here = select(rows, model=model, variant=None)
        used = {
            label: [
                100
                * mean_of(select(here, policy=policy, capacity=size), "effective_transfer_ratio")
                for size in SIZES
            ]
            for label, policy in (
                ("copy every miss", "priority+adapt"),
                ("load only", "oled-load-aware"),
                ("load + reuse", "oled"),
            )
        }
        _lines(line[2], used)
        line[2].set_ylim(0, 100)
        line[0].set_ylabel(f"{model}\nchange of TPOT, %")
        line[2].set_ylabel("copies used next, %")
    for axes, title in zip(
        grid[0], ("priority", "layer-adaptive slots", "what is copied"), strict=True
    ):
        axes.set_title(title)
    for axes in grid[1]:
        axes.set_xlabel("expert slots per layer (C)")
    for axes in grid[0]:
        axes.legend()
    return figure


def _lines(axes: Axes, series: dict[str, list[float]]) -> None:
    lines(axes, list(SIZES), series)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(SIZES)


def main() -> None:
    plot_figure("15b", draw)


if __name__ == "__main__":
    main()
