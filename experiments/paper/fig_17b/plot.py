"""Draws docs/figures/paper/fig_17b.svg from results/raw/fig_17b.jsonl alone.

python -m experiments.paper.fig_17b.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import CAPACITIES, MODELS, Row
from experiments.paper.fig_17b.run import LINKS_GB_PER_S, POLICIES, tpots
from experiments.paper.plots import BLUE, ORANGE, legend_below, plot_figure, subplots

COLOURS = {"naive-lru": ORANGE, "oled": BLUE}


def draw(rows: list[Row]) -> Figure:
    figure, (line,) = subplots(1, 2)
    for axes, model in zip(line, MODELS, strict=True):
        for policy in POLICIES:
            for capacity in CAPACITIES:
                axes.plot(
                    LINKS_GB_PER_S,
                    tpots(rows, model, capacity, policy),
                    color=COLOURS[policy],
                    marker="o" if capacity == 40 else "s",
                    linestyle="-" if capacity == 40 else "--",
                    label=f"{policy}, C={capacity}",
                )
        axes.set_ylim(bottom=0)
        axes.set_xticks(LINKS_GB_PER_S)
        axes.set_xlabel("rate of the link, GB/s")
        axes.set_title(model)
    line[0].set_ylabel("TPOT, ms")
    legend_below(figure, line[0])
    return figure


def main() -> None:
    plot_figure("17b", draw)


if __name__ == "__main__":
    main()
