"""Draw docs/figures/policies_on_demo.svg from the committed rows alone.

python experiments/02_policies_on_demo/plot.py
"""

import json
from pathlib import Path

import matplotlib

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


def main() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    figure, (hits, copies) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for policy, (colour, line) in STYLES.items():
        mine = sorted(
            (row for row in rows if row["policy"] == policy),
            key=lambda row: row["experts_per_layer"],
        )
        shares = [100 * row["experts_per_layer"] / row["num_experts"] for row in mine]
        for axes, name, scale in (
            (hits, "hit_rate", 100),
            (copies, "loads_per_forward", 1),
        ):
            values = [row[name] * scale for row in mine]
            axes.plot(shares, values, line, color=colour, marker="o", markersize=3, label=policy)
    hits.set_ylabel("demanded experts that were resident, %")
    copies.set_ylabel("experts copied in, per forward")
    for axes in (hits, copies):
        axes.set_xlabel("expert slots, % of all experts")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    copies.legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"Demo model, {rows[0]['num_questions']} held-out questions: same tokens in every point",
        fontsize=10,
    )
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    # Fixed ids and no date, so that rebuilding from the same rows gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "oled-moe"
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
