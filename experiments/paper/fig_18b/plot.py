"""Draws docs/figures/paper/fig_18b.svg from results/raw/fig_18b.jsonl alone.

python -m experiments.paper.fig_18b.plot
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.common import CAPACITIES, MODELS, Row, select
from experiments.paper.fig_18b.run import PARTS
from experiments.paper.paper_numbers import FIG_18B
from experiments.paper.plots import BLUE, GREEN, ORANGE, legend_below, plot_figure, subplots

COLOURS = dict(zip(PARTS, (BLUE, ORANGE, GREEN), strict=True))
WIDTH = 0.38


def draw(rows: list[Row]) -> Figure:
    figure, (line,) = subplots(1, 2)
    cells = [(model, capacity) for model in MODELS for capacity in CAPACITIES]
    forwards = FIG_18B["forward_s"].value
    for axes, is_share in zip(line, (False, True), strict=True):
        for place, (model, capacity) in enumerate(cells):
            row = select(rows, model=model, capacity=capacity, policy="oled")[0]
            ours = 100 / row["forward_s"] if is_share else 1e3
            theirs = 100 if is_share else 1e3 * forwards[model, capacity]
            shares = FIG_18B["parts"].value[model, capacity]
            low = low_paper = 0.0
            for part, share in zip(PARTS, shares, strict=True):
                label = part if not place else None
                value = row["parts_s"][part] * ours
                _bar(axes, place - WIDTH / 2, value, low, COLOURS[part], "", label)
                _bar(axes, place + WIDTH / 2, share * theirs, low_paper, COLOURS[part], "///", None)
                low, low_paper = low + value, low_paper + share * theirs
            label = "all of deciding" if not place else None
            axes.plot(place - WIDTH / 2, row["overhead_s"] * ours, "k_", markersize=14, label=label)
        axes.set_xticks(range(len(cells)), [f"{model}\nC={capacity}" for model, capacity in cells])
        axes.grid(visible=False, axis="x")
    line[0].set_ylabel("ms per forward")
    line[1].set_ylabel("% of a forward")
    line[0].set_title("plain: ours; hatched: the paper")
    legend_below(figure, line[0])
    return figure


def _bar(
    axes: Axes, x: float, height: float, bottom: float, colour: str, hatch: str, label: str | None
) -> None:
    axes.bar(
        x, height, WIDTH, bottom=bottom, color=colour, hatch=hatch, label=label, edgecolor="white"
    )


def main() -> None:
    plot_figure("18b", draw)


if __name__ == "__main__":
    main()
