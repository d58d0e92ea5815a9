"""Draw docs/figures/lossy_sharing.svg from the committed rows alone.

python -m experiments.09_lossy_sharing.plot
"""

from typing import Any

import matplotlib
from matplotlib.axes import Axes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.studies import plot_study

# One colour and mark a rule, which stay apart in grey and for colour-blind readers.
STYLES = {
    "off": ("#000000", "*"),
    "des-vote": ("#0072b2", "o"),
    "des-seq": ("#e69f00", "s"),
    "dmoe": ("#009e73", "^"),
    "resident": ("#d55e00", "D"),
}


def rule_of(row: dict[str, Any]) -> tuple[str, str]:
    """A row's rule, and the number that tells it from others of the same rule."""
    name, _, parameters = (row["lossy"] or "off").partition(":")
    return name, parameters.partition(",")[0].partition("=")[2]


def draw_panel(axes: Axes, rows: list[dict[str, Any]], name: str) -> None:
    """Right answers against what `name` counts, every rule a line."""
    for rule, (colour, mark) in STYLES.items():
        mine = [row for row in rows if rule_of(row)[0] == rule]
        mine.sort(key=lambda row: row[name])
        x = [row[name] for row in mine]
        y = [100 * row["right"] / row["num_questions"] for row in mine]
        axes.plot(
            x, y, "-", color=colour, marker=mark, markersize=9 if rule == "off" else 5,
            linewidth=1, label=rule,
        )  # fmt: skip
        for row, left, top in zip(mine, x, y, strict=True):
            axes.annotate(
                rule_of(row)[1], (left, top), xytext=(4, -9), textcoords="offset points",
                fontsize=7, color=colour,
            )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw(rows: list[dict[str, Any]]) -> Any:
    """Both thresholds, by distinct experts and by loads; a quarter of the experts in memory."""
    quarter = [row for row in rows if row["expert_memory"] == "25%"]
    thresholds = sorted({row["threshold"] for row in quarter})
    figure, grid = plt.subplots(
        len(thresholds), 2, figsize=(9, 6.4), layout="constrained", sharey="row", squeeze=False
    )
    for axes, threshold in zip(grid, thresholds, strict=True):
        here = [row for row in quarter if row["threshold"] == threshold]
        draw_panel(axes[0], here, "experts_per_block")
        draw_panel(axes[1], here, "loads_per_token")
        passes = "one token per pass" if threshold == 1 else f"threshold {threshold}"
        axes[0].set_ylabel(f"right answers, %\n({passes}, {here[0]['num_questions']} questions)")
    grid[-1][0].set_xlabel("distinct experts of a block, per layer and forward")
    grid[-1][1].set_xlabel("experts loaded per answer token, all layers")
    grid[0][1].legend(frameon=False, fontsize=8)
    figure.suptitle(
        "Demo model, a quarter of its experts in memory: answers under lossy rules", fontsize=10
    )
    # Fixed ids, so that rebuilding from the same rows gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "oled-moe"
    return figure


if __name__ == "__main__":
    plot_study("09_lossy_sharing", "lossy_sharing", draw)
