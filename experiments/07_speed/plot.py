"""Draw docs/figures/speed.svg from the committed rows alone.

python -m experiments.07_speed.plot
"""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "results" / "raw"
FIGURE = ROOT / "docs" / "figures" / "speed.svg"
OURS, THEIRS, BOUND = "#d55e00", "#999999", "#0072b2"
NAMES = {
    "accelerate": "accelerate, disk offload",
    "mmap": "memory-mapped",
    "mmap+announce": "memory-mapped, announced",
    "naive-lru": "OLED-MoE engine, LRU",
    "oled+": "OLED-MoE engine, oled+",
    "oled+prefetch": "OLED-MoE engine, oled+prefetch",
}

SHORT = {"naive-lru": "LRU", "oled+": "oled+", "oled+prefetch": "prefetch"}


def read_rows(name: str) -> list[dict[str, Any]]:
    lines = (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def draw_peers(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Seconds per forward of every system under the same limit."""
    found = {row["system"]: row for row in rows if row["limit_bytes"] is not None}
    systems = [name for name in NAMES if name in found]
    values = [found[name]["forward_s_median"] for name in systems]
    low = [value - found[n]["forward_s_min"] for n, value in zip(systems, values, strict=True)]
    high = [found[n]["forward_s_max"] - value for n, value in zip(systems, values, strict=True)]
    colours = [OURS if name in ("naive-lru", "oled+", "oled+prefetch") else THEIRS
               for name in systems]  # fmt: skip
    places = range(len(systems))[::-1]
    axes.barh(places, values, xerr=(low, high), color=colours, height=0.65, error_kw={"lw": 0.8})
    axes.set_yticks(places, [NAMES[name] for name in systems], fontsize=8)
    for place, name, value in zip(places, systems, values, strict=True):
        right = found[name]["forward_s_max"]
        axes.annotate(
            f"{value:.2f} s", (right, place), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(right=3 * max(found[name]["forward_s_max"] for name in systems))
    axes.set_xlabel("seconds per forward: median, least to most")
    limit = next(iter(found.values()))
    axes.set_title(
        f"one memory limit, {limit['limit_bytes'] / 2**30:.1f} GiB "
        f"({limit['experts_per_layer']:.0f} of 256 experts)",
        fontsize=9,
    )
    axes.spines[["top", "right"]].set_visible(False)


def draw_bounds(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Time of a forward beside the bound of the machine it ran on."""
    labels, times, bounds, ratios = [], [], [], []
    for row in rows:
        size = "all" if row["experts_per_layer"] == 256 else f"{row['experts_per_layer']:.0f}"
        labels.append(f"{SHORT[row['policy']]}\n{size}")
        times.append(row["forward_s_median"])
        bounds.append(row["roofline_s"])
        ratios.append(row["roofline_ratio"])
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], times, 0.4, color=OURS, label="forward")
    axes.bar([p + 0.2 for p in places], bounds, 0.4, color=BOUND, label="bound of the same run")
    for place, top, ratio in zip(places, times, ratios, strict=True):
        axes.annotate(
            f"{ratio:.2f}", (place, top), xytext=(0, 2), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    axes.set_xticks(places, labels, fontsize=7)
    axes.set_xlabel("policy, and experts of each layer in memory")
    axes.set_ylabel("seconds per forward")
    axes.set_title("against memory and disk; number: ratio", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=(1, 1.15)
    )
    draw_peers(left, read_rows("peers"))
    # Where everything is resident the disk plays no part; elsewhere the rows with a steady disk.
    offload = [
        row
        for row in read_rows("offload")
        if row.get("disk_bytes_per_s") or row["experts_per_layer"] == 256
    ]
    draw_bounds(right, sorted(offload, key=lambda row: row["experts_per_layer"]))
    figure.suptitle(
        "LLaDA2-mini's shape, 5 of 19 MoE layers, blocks of 32, 2 CPU cores; random weights, "
        "routing replayed",
        fontsize=10,
    )
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    # Fixed ids and no date, so that rebuilding from the same rows gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "oled-moe"
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
