"""Draws docs/figures/paper/fig_4a.svg from results/raw/fig_4a.jsonl alone.

python -m experiments.paper.fig_4a.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import WORKLOADS, Row, mean_of, select
from experiments.paper.paper_numbers import FIG_4A
from experiments.paper.plots import BLUE, GREEN, GREY, grouped_bars, plot_figure, subplots


def draw(rows: list[Row]) -> Figure:
    figure, ((left, right),) = subplots(1, 2)
    paper = FIG_4A["active_share"].value
    ours = {
        "one token": [100 * 8 / 256] * len(WORKLOADS),
        "a block of 16": [
            100 * mean_of(select(rows, kind="synthetic", workload=name), "active_share")
            for name in WORKLOADS
        ],
        "a block of 16, paper": [100 * paper[name] for name in WORKLOADS],
    }
    colours = {"one token": GREY, "a block of 16": BLUE, "a block of 16, paper": GREEN}
    grouped_bars(left, list(WORKLOADS), ours, colours=colours)
    left.set_title("synthetic mini, 8 of 256 per token (calibrated to the paper)")
    demo = select(rows, kind="demo")
    one = [100 * row["trace"]["top_k"] / row["trace"]["num_experts"] for row in demo]
    block = [100 * row["active_share"] for row in demo]
    grouped_bars(
        right,
        [row["workload"] for row in demo],
        {"one token": one, "a block of 16": block},
        colours=colours,
    )
    right.set_title("demo model, 6 of 96 per token (recorded)")
    left.set_ylabel("experts active per layer, %")
    for axes in (left, right):
        axes.set_ylim(0, 60)
    left.legend()
    return figure


def main() -> None:
    plot_figure("4a", draw)


if __name__ == "__main__":
    main()
