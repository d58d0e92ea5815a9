"""Draw docs/figures/policies_on_demo.svg from the committed rows alone.

python experiments/02_policies_on_demo/plot.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "results" / "raw" / "02_policies_on_demo.jsonl"
FIGURE = ROOT / "docs" / "figures" / "policies_on_demo.svg"
# In the order of the ablation; colours that stay apart in grey and for colour-blind readers.
STYLES = {
    "lfu": ("#999999", ":"),
    "naive-lru": ("#666666", "--"),
    "priority": ("#56b4e9", "-"),
    "priority+adapt": ("#0072b2", "-"),
    "oled-load-aware": ("#e69f00", "-"),
    "oled": ("#d55e00", "-"),
}


def draw(axes: Axes, rows: list[dict[str, Any]], name: str, scale: float) -> None:
    for policy, (colour, line) in STYLES.items():
        mine = [row for row in rows if row["policy"] == policy]
        mine.sort(key=lambda row: row["experts_per_layer"])
        shares = [100 * row["experts_per_layer"] / row["num_experts"] for row in mine]
        values = [row[name] * scale for row in mine]
        axes.plot(shares, values, line, color=colour, marker="o", markersize=3, label=policy)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    thresholds = sorted({row["threshold"] for row in rows})
    figure, grid = plt.subplots(
        2, len(thresholds), figsize=(9, 6), layout="constrained", sharex=True, sharey="row"
    )
    for column, threshold in enumerate(thresholds):
        here = [row for row in rows if row["threshold"] == threshold]
        draw(grid[0][column], here, "hit_rate", 100)
        draw(grid[1][column], here, "loads_per_forward", 1)
        passes = here[0]["num_forwards"] / here[0]["num_questions"]
        grid[0][column].set_title(
            f"threshold {threshold}: {passes:.1f} passes per answer", fontsize=9
        )
        grid[1][column].set_xlabel("expert slots, % of all experts")
    for left in grid[:, 0]:
        left.set_ylim(bottom=0)
    grid[0][0].set_ylabel("demanded experts resident, %")
    grid[1][0].set_ylabel("experts copied in, per forward")
    grid[1][-1].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"Demo model, {rows[0]['num_questions']} held-out questions; "
        "all points of a column gave the same tokens",
        fontsize=10,
    )
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    # Fixed ids and no date, so that rebuilding from the same rows gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "oled-moe"
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
