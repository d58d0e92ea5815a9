"""Draws docs/figures/paper/fig_13.svg from results/raw/fig_13.jsonl alone.

python -m experiments.paper.fig_13.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import MODELS, Row, mean_of, select
from experiments.paper.fig_13.run import POLICIES, SIZES, gap
from experiments.paper.paper_numbers import FIG_13
from experiments.paper.plots import (
    BLACK,
    GREEN,
    GREY,
    POLICY_COLOURS,
    RED,
    lines,
    plot_figure,
    subplots,
)


def draw(rows: list[Row]) -> Figure:
    figure, (times, gaps) = subplots(2, len(MODELS), figsize=(8.4, 5.6), sharex=True)
    for column, model in enumerate(MODELS):
        cells = [select(rows, model=model, capacity=size) for size in SIZES]
        series = {
            label: [1e3 * mean_of(select(cell, label=label), "tpot_s") for cell in cells]
            for label in POLICIES
        }
        lines(times[column], list(SIZES), series, colours=POLICY_COLOURS)
        times[column].set_title(model)
        times[column].set_ylim(bottom=0)
        below = gaps[column]
        for value in FIG_13["gap"].value[model]:
            below.axhline(100 * value, color=GREY, linestyle=":", linewidth=1)
        below.plot([], [], ":", color=GREY, label="paper's six, sizes not known")
        below.plot(SIZES, [100 * gap(cell) for cell in cells], "o-", color=RED, label="OLED")
        belady = [100 * gap(cell, "Belady") for cell in cells]
        below.plot(SIZES, belady, "^--", color=GREEN, label="Belady, all misses copied")
        below.axhline(0, color=BLACK, linewidth=0.8)
        # Belady's first points lie far above: it may not use the CPU (top row).
        below.set_ylim(-0.5, 20)
        below.set_xlabel("C, expert slots per layer")
    times[0].set_ylabel("TPOT, ms")
    gaps[0].set_ylabel("over the ideal's TPOT, %")
    times[0].legend()
    gaps[0].legend()
    return figure


def main() -> None:
    plot_figure("13", draw)


if __name__ == "__main__":
    main()
