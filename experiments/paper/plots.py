"""How the plots of the paper's figures look and where they go. Reads rows, never simulates.

Colours are Okabe and Ito's, which colour-blind readers tell apart; the ground is white, so that
plots read the same on light and dark pages. Every line or bar also differs by marker or hatch.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.paper.common import PLOTS, RAW, Row, read_rows

# Same ids and no date: the same rows give the same file.
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "oled-moe",
        "svg.fonttype": "path",
        "figure.facecolor": "white",
        "axes.facecolor": "white",
        "savefig.facecolor": "white",
        "font.size": 9,
        "axes.titlesize": 9,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "lines.markersize": 4,
    }
)
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7",
)  # fmt: skip
GREY = "#888888"
CYCLE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Lines alone: a pattern of dots takes 140 KB in an SVG.
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++", "//")
# By the names of common.POLICIES: the same policy looks the same in every figure.
POLICY_COLOURS = {
    "KTransformers": GREY,
    "KTransformers (frequency)": "#bbbbbb",
    "MoE-Infinity": PINK,
    "FineMoE": SKY,
    "naive (LRU)": ORANGE,
    "OLED": RED,
    "Belady": GREEN,
    "ideal": BLACK,
}
WORKLOAD_COLOURS = {"math": BLUE, "code": ORANGE, "quiz": GREEN, "mixed": GREY}


def subplots(num_rows: int, num_columns: int, **options: object) -> tuple[Figure, list[list[Axes]]]:
    """A grid of axes as nested lists; sizes from the number of panels unless `figsize` says."""
    options.setdefault("figsize", (min(10.0, 3.6 * num_columns + 0.6), 2.7 * num_rows + 0.5))
    figure, grid = plt.subplots(
        num_rows, num_columns, squeeze=False, layout="constrained", **options
    )
    return figure, grid.tolist()


def plot_path(figure: str, folder: Path = PLOTS) -> Path:
    return folder / f"fig_{figure}.svg"


def plot_figure(figure: str, draw: Callable[[list[Row]], Figure]) -> None:
    """The command line of every plot.py: `--rows` and `--out` are folders, `--png` a file to look
    at besides."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.paper.fig_{figure}.plot")
    parser.add_argument("--rows", type=Path, default=RAW)
    parser.add_argument("--out", type=Path, default=PLOTS)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    drawn = draw(read_rows(figure, arguments.rows))
    path = plot_path(figure, arguments.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, metadata={"Date": None})
    if arguments.png:
        drawn.savefig(arguments.png, dpi=110)


def grouped_bars(
    axes: Axes,
    groups: list[str],
    series: dict[str, list[float]],
    *,
    colours: dict[str, str] | None = None,
    spread: dict[str, list[float]] | None = None,
) -> None:
    """One group of bars per name in `groups`, one bar in each per series; NaN leaves a gap."""
    width = 0.82 / len(series)
    for index, (name, values) in enumerate(series.items()):
        left = [g + (index - (len(series) - 1) / 2) * width for g in range(len(groups))]
        axes.bar(
            left,
            values,
            width,
            label=name,
            color=(colours or {}).get(name, CYCLE[index % len(CYCLE)]),
            hatch=HATCHES[index % len(HATCHES)],
            edgecolor="white",
            linewidth=0.5,
            yerr=(spread or {}).get(name),
            error_kw={"elinewidth": 0.8, "capsize": 1.5},
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")


def lines(
    axes: Axes,
    x: list[float],
    series: dict[str, list[float]],
    *,
    colours: dict[str, str] | None = None,
) -> None:
    """One line with markers per series."""
    for index, (name, values) in enumerate(series.items()):
        axes.plot(
            x,
            values,
            label=name,
            color=(colours or {}).get(name, CYCLE[index % len(CYCLE)]),
            marker=MARKERS[index % len(MARKERS)],
            linewidth=1.4,
        )


def legend_below(figure: Figure, axes: Axes, *, num_columns: int = 4) -> None:
    """One legend for all panels, under them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=num_columns)
