"""Draws docs/figures/paper/fig_4b.svg from results/raw/fig_4b.jsonl alone.

python -m experiments.paper.fig_4b.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import WORKLOADS, Row, mean_of, select
from experiments.paper.paper_numbers import FIG_4B
from experiments.paper.plots import BLUE, GREEN, GREY, grouped_bars, plot_figure, subplots


def draw(rows: list[Row]) -> Figure:
    figure, ((axes,),) = subplots(1, 1, figsize=(4.6, 3.0))
    cells = {name: select(rows, kind="synthetic", workload=name) for name in WORKLOADS}
    paper = FIG_4B["block_flops"].value / 1e6
    series = {
        "one token": [mean_of(cell, "token_flops") / 1e6 for cell in cells.values()],
        "a block of 16": [mean_of(cell, "block_flops") / 1e6 for cell in cells.values()],
        "a block of 16, paper": [paper] * len(cells),
    }
    colours = {"one token": GREY, "a block of 16": BLUE, "a block of 16, paper": GREEN}
    grouped_bars(axes, list(cells), series, colours=colours)
    axes.set_title("synthetic mini, routed experts of one layer")
    axes.set_ylabel("MFLOPs")
    axes.set_ylim(0, 1150)
    axes.legend(ncols=1)
    return figure


def main() -> None:
    plot_figure("4b", draw)


if __name__ == "__main__":
    main()
