"""Draws docs/figures/paper/fig_17a.svg from results/raw/fig_17a.jsonl alone.

python -m experiments.paper.fig_17a.plot
"""

import statistics

from matplotlib.figure import Figure

from experiments.paper.common import MODELS, Row
from experiments.paper.fig_17a.run import ALL, SIZES, slowdowns
from experiments.paper.paper_numbers import FIG_17A
from experiments.paper.plots import BLUE, ORANGE, legend_below, lines, plot_figure, subplots


def draw(rows: list[Row]) -> Figure:
    figure, (line,) = subplots(1, 2)
    for axes, model in zip(line, MODELS, strict=True):
        over = {
            policy: [
                1 + statistics.fmean(slowdowns(rows, model, policy, capacity)) for capacity in SIZES
            ]
            + [1.0]
            for policy in ("oled", "naive-lru")
        }
        lines(axes, [*SIZES, ALL], over, colours={"oled": BLUE, "naive-lru": ORANGE})
        paper = 1 + FIG_17A["over_full_residency"].value[model]
        axes.plot(100, paper, "k*", markersize=10, linestyle="none", label="the paper's OLED-MoE")
        axes.set_yscale("log")
        ticks = [1, 1.2, 1.5, 2, 3, 4]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("expert slots per layer (C); 256: all")
        axes.set_title(model)
    line[0].set_ylabel("TPOT over full residency's")
    legend_below(figure, line[0])
    return figure


def main() -> None:
    plot_figure("17a", draw)


if __name__ == "__main__":
    main()
