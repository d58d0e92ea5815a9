"""Draws docs/figures/paper/fig_10.svg from results/raw/fig_10.jsonl alone.

python -m experiments.paper.fig_10.plot
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.common import Row, select
from experiments.paper.fig_10.run import layer_means, pooled
from experiments.paper.paper_numbers import FIG_10
from experiments.paper.plots import BLACK, BLUE, GREEN, ORANGE, plot_figure, subplots

NAMES = {"mini": "synthetic mini", "flash": "synthetic flash", "demo": "demo, recorded"}
STYLES = {
    "mini": {"color": BLUE, "marker": "o"},
    "flash": {"color": ORANGE, "marker": "s"},
    "demo": {"color": GREEN, "marker": "^"},
}
CENTRES = [(bin_id + 0.5) / 10 for bin_id in range(10)]


def draw(rows: list[Row]) -> Figure:
    figure, ((curves, kinds, layers), (mini, flash, demo)) = subplots(2, 3, figsize=(11, 6.2))
    for model, name in NAMES.items():
        here = select(rows, model=model)
        curves.plot(CENTRES, _curve(here, 0), label=name, **STYLES[model])
        means = [100 * n / here[0]["trace"]["num_experts"] for n in layer_means(here)]
        layers.plot(range(len(means)), means, label=name, **STYLES[model])
    paper = [FIG_10["stability_low"].value, FIG_10["stability_high"].value]
    curves.plot([0.05, 0.95], paper, "*", color=BLACK, markersize=9, label="paper")
    curves.set_title("10a: stability by confidence")
    curves.legend(loc="lower left")
    _kinds(kinds, select(rows, model="demo"))
    layers.set_title("10c: active experts, %")
    layers.set_xlabel("layer")
    layers.set_ylim(0, 60)
    for axes in (curves, kinds):
        axes.set_xlabel("confidence of the earlier step")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
    for axes, model in ((mini, "mini"), (flash, "flash"), (demo, "demo")):
        _joint(axes, select(rows, model=model), NAMES[model])
    mini.set_ylabel("share of experts kept")
    return figure


def _curve(rows: list[Row], kind: int) -> list[float]:
    values = [pooled(rows, kind, bin_id) for bin_id in range(10)]
    return [np.nan if value is None else value for value in values]


def _kinds(axes: Axes, rows: list[Row]) -> None:
    styles = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
    for kind, found in enumerate(rows[0]["stability"]):
        line, marker = styles[kind]
        colour = GREEN if kind == 0 else BLACK
        axes.plot(CENTRES, _curve(rows, kind), line, marker=marker, color=colour,
                  label=found["label"])  # fmt: skip
    axes.set_title("demo: by what became of the token")
    axes.legend(loc="center left")


def _joint(axes: Axes, rows: list[Row], name: str) -> None:
    top_k = rows[0]["trace"]["top_k"]
    cells = [[pooled(rows, 0, b, kept) for b in range(10)] for kept in range(top_k + 1)]
    shares = np.array([[np.nan if v is None else v for v in line] for line in cells])
    axes.imshow(shares, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=0.7)
    for kept, line in enumerate(shares):
        for b, share in enumerate(line):
            if share >= 0.005:
                colour = "white" if share > 0.4 else "black"
                axes.text(b, kept, f"{100 * share:.0f}", ha="center", va="center", fontsize=6.5,
                          color=colour)  # fmt: skip
    axes.set_xticks(range(10), [f"{centre:.2f}" for centre in CENTRES], fontsize=7)
    axes.set_yticks(range(top_k + 1), [f"{kept}/{top_k}" for kept in range(top_k + 1)])
    axes.set_xlabel("confidence")
    axes.set_title(f"10b, {name}: % of a column")
    axes.grid(visible=False)


def main() -> None:
    plot_figure("10", draw)


if __name__ == "__main__":
    main()
