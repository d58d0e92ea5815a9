"""Draws docs/figures/paper/fig_11.svg from results/raw/fig_11.jsonl alone.

python -m experiments.paper.fig_11.plot
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.common import Row, select
from experiments.paper.fig_11.run import PAPER_PRIORITIES, PRIORITIES, TOKENS
from experiments.paper.plots import BLUE, GREEN, GREY, ORANGE, grouped_bars, plot_figure, subplots


def draw(rows: list[Row]) -> Figure:
    figure, ((left, right),) = subplots(
        1, 2, figsize=(9.5, 3.2), gridspec_kw={"width_ratios": [1, 2]}
    )
    ours = select(rows, example="priority")[0]["priorities"]
    series = {"ours": ours, "paper": list(PAPER_PRIORITIES)}
    colours = {"ours": BLUE, "paper": GREEN}
    grouped_bars(left, ["E1", "E2", "E3", "E4"], series, colours=colours)
    left.set_title("priorities of two tokens' experts")
    left.legend()
    _moves(right, select(rows, example="dispatch", is_reuse_aware=True))
    return figure


def _moves(axes: Axes, rows: list[Row]) -> None:
    shown = [row for i, row in enumerate(rows) if not i or row["copied"] != rows[i - 1]["copied"]]
    for line, row in enumerate(reversed(shown)):
        copied = row["copied"]
        rest = [e for e in range(len(TOKENS)) if e not in copied]
        _lane(axes, line + 0.17, copied, [1] * len(copied), BLUE)
        _lane(axes, line - 0.17, rest, [TOKENS[e] for e in rest], ORANGE)
        axes.text(11.3, line, f"priority copied {row['copied_priority']:.2f}", va="center",
                  fontsize=8)  # fmt: skip
    names = [f"moves: {row['max_moves']}" for row in reversed(shown)]
    axes.set_yticks(range(len(shown)), names)
    axes.set_xlim(0, 14.5)
    axes.set_xticks(range(0, 12, 2))
    axes.set_xlabel("time; blue: copy lane, 1 a copy; orange: CPU, 1 a token")
    axes.set_title(f"dispatch of ten misses, M1 (p = {PRIORITIES[0]}) to M10 ({PRIORITIES[-1]})")
    axes.grid(visible=False)


def _lane(axes: Axes, y: float, misses: list[int], sizes: list[int], colour: str) -> None:
    start = 0
    for miss, size in zip(misses, sizes, strict=True):
        axes.barh(y, size, 0.32, left=start, color=colour, edgecolor="white")
        axes.text(start + size / 2, y, f"M{miss + 1}", ha="center", va="center", fontsize=7,
                  color="white" if colour == BLUE else "black")  # fmt: skip
        start += size
    axes.plot([start, start], [y - 0.17, y + 0.17], color=GREY)


def main() -> None:
    plot_figure("11", draw)


if __name__ == "__main__":
    main()
