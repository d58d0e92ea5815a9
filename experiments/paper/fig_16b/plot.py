"""Draws docs/figures/paper/fig_16b.svg from results/raw/fig_16b.jsonl alone.

python -m experiments.paper.fig_16b.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import MODELS, Row, select
from experiments.paper.fig_16b.run import LENGTHS, SIZES, best
from experiments.paper.plots import legend_below, lines, plot_figure, subplots

SHADES = ("#08306b", "#2171b5", "#6baed6", "#31a354", "#e69f00", "#d55e00", "#7f2704")


def draw(rows: list[Row]) -> Figure:
    figure, (line,) = subplots(1, 2, figsize=(9, 4))
    for axes, model in zip(line, MODELS, strict=True):
        here = select(rows, model=model)
        times = {
            f"C={size}": [
                1e3 * select(here, capacity=size, block_length=length)[0]["tpot_s"]
                for length in LENGTHS
            ]
            for size in SIZES
        }
        lines(axes, list(LENGTHS), times, colours=dict(zip(times, SHADES, strict=True)))
        for size in SIZES:
            length = best(rows, model, size)
            value = times[f"C={size}"][LENGTHS.index(length)]
            axes.plot(length, value, marker="*", color="black", markersize=10, zorder=3)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="both", labelsize=7)
        axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
        axes.set_xlabel("block length")
        axes.set_title(f"{model}; stars: the best of each C")
    line[0].set_ylabel("TPOT, ms")
    legend_below(figure, line[0], num_columns=7)
    return figure


def main() -> None:
    plot_figure("16b", draw)


if __name__ == "__main__":
    main()
