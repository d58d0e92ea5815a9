"""Draws docs/figures/paper/fig_7.svg from results/raw/fig_7.jsonl alone.

python -m experiments.paper.fig_7.plot
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.common import Row, mean_of, select
from experiments.paper.paper_numbers import FIG_7
from experiments.paper.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    HATCHES,
    ORANGE,
    PINK,
    RED,
    SKY,
    plot_figure,
    subplots,
)

NAMES = {"mini": "synthetic mini", "flash": "synthetic flash", "demo": "demo, recorded"}
COLOURS = {"mini": BLUE, "flash": ORANGE, "demo": GREEN}
MARKERS = {"mini": "o", "flash": "s", "demo": "^"}


def draw(rows: list[Row]) -> Figure:
    figure, ((left, middle, right),) = subplots(1, 3, figsize=(11, 3.4))
    low, high = FIG_7["adjacent"].value
    left.axhspan(low, high, xmax=0.09, color=GREY, alpha=0.5, label="paper, gap 1")
    for model, name in NAMES.items():
        here = select(rows, model=model)
        gaps = [row["overlap_by_gap"] for row in here]
        # Gaps that all workloads reach, so that a mean is over the same ones everywhere.
        known = [values for values in zip(*gaps, strict=True) if None not in values]
        means = [sum(values) / len(values) for values in known]
        style = {"color": COLOURS[model], "marker": MARKERS[model]}
        left.plot(range(1, len(means) + 1), means, label=name, **style)
        left.axhline(mean_of(here, "unrelated"), color=COLOURS[model], linestyle=":", linewidth=1)
    left.set_xlabel("gap, steps of a block")
    left.set_ylabel("overlap of demanded experts")
    left.set_title("within a block; dotted: unrelated requests")
    left.set_ylim(0, 1)
    left.legend(loc="lower left")
    _boundaries(middle, rows)
    _cosines(right, rows)
    return figure


def _boundaries(axes: Axes, rows: list[Row]) -> None:
    labels = list(rows[0]["boundaries"])
    for index, (model, name) in enumerate(NAMES.items()):
        here = select(rows, model=model)
        means = [sum(row["boundaries"][label] for row in here) / len(here) for label in labels]
        places = [x + 0.27 * (index - 1) for x in range(len(labels))]
        hatch = HATCHES[index]
        axes.bar(places, means, 0.27, color=COLOURS[model], hatch=hatch, edgecolor="white",
                 label=name)  # fmt: skip
    axes.axhline(FIG_7["boundary"].value, color=BLACK, linestyle="--", linewidth=1)
    axes.set_xticks(
        range(len(labels)),
        ["last step\nto commit", "commit to\nnext block", "last step to\nnext block"],
    )
    axes.set_title("across blocks; dashed: the paper's bound")
    axes.set_ylim(0, 1)
    axes.grid(visible=False, axis="x")


def _cosines(axes: Axes, rows: list[Row]) -> None:
    demo = select(rows, model="demo")
    kinds = list(demo[0]["hidden_cosine_by_kind"])
    colours = (PINK, SKY, RED)
    for index, row in enumerate(demo):
        values = [row["hidden_cosine"], *row["hidden_cosine_by_kind"].values()]
        places = [x + 0.27 * (index - 1) for x in range(len(values))]
        hatch = HATCHES[index]
        axes.bar(places, values, 0.27, color=colours[index], hatch=hatch, edgecolor="white",
                 label=row["workload"])  # fmt: skip
    axes.axhline(FIG_7["hidden_cosine"].value, color=BLACK, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(kinds) + 1), ["all", *(kind.replace(" ", "\n") for kind in kinds)])
    axes.set_title("hidden cosine, demo; dashed: paper, up to")
    axes.set_ylim(0, 1.19)
    axes.legend(ncols=3, loc="upper center")
    axes.grid(visible=False, axis="x")


def main() -> None:
    plot_figure("7", draw)


if __name__ == "__main__":
    main()
