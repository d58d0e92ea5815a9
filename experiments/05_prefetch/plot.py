"""Draw docs/figures/prefetch.svg from the committed rows alone.

python -m experiments.05_prefetch.plot
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.common import Row, select
from experiments.paper.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    RED,
    SKY,
    grouped_bars,
    legend_below,
    subplots,
)
from experiments.studies import plot_study

STUDY = "05_prefetch"
TARGET = 10
# Where most is useful; elsewhere nearly all is late.
BYTES_OF = "testbed-a"
KINDS = {"useful": (GREEN, ""), "late": (ORANGE, "///"), "wasted": (GREY, "...")}
LINES = {8: (SKY, MARKERS[1]), 32: (BLUE, MARKERS[2]), 64: (BLACK, MARKERS[0])}


def draw(rows: list[Row]) -> Figure:
    grid_rows = select(rows, part="grid")
    cells = list({(row["model"], row["machine"]): None for row in grid_rows})
    figure, grid = subplots(3, 3, figsize=(10, 7.6))
    panels = [axes for line in grid for axes in line]
    for axes, (model, machine) in zip(panels, cells, strict=False):
        draw_machine(axes, select(grid_rows, model=model, machine=machine))
        axes.set_title(f"{model}, {machine}")
        axes.set_ylabel("above busiest lane, %")
    draw_bytes(panels[-2], select(grid_rows, model="mini", machine=BYTES_OF))
    draw_cpu(panels[-1], select(rows, part="cpu"))
    legend_below(figure, panels[0], num_columns=5)
    return figure


def draw_machine(axes: Axes, rows: list[Row]) -> None:
    most = max(row["num_staging"] for row in rows)
    draw_line(axes, select(rows, has_prefetch=False, num_staging=most), ORANGE, "X", "no prefetch")
    for staging, (colour, marker) in LINES.items():
        mine = select(rows, has_prefetch=True, num_staging=staging)
        draw_line(axes, mine, colour, marker, f"prefetch, {staging} staging slots")
    axes.axhline(TARGET, color=RED, linewidth=0.8, linestyle="--", label="target")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("slots per layer")


def draw_line(axes: Axes, rows: list[Row], colour: str, marker: str, label: str) -> None:
    axes.plot(
        [row["capacity"] for row in rows],
        [100 * (row["forward_to_busiest_lane"] - 1) for row in rows],
        color=colour, marker=marker, linewidth=1.3, label=label,
    )  # fmt: skip


def draw_bytes(axes: Axes, rows: list[Row]) -> None:
    """What became of the bytes copied ahead, with most staging slots."""
    most = max(row["num_staging"] for row in rows)
    mine = select(rows, has_prefetch=True, num_staging=most)
    capacities = [str(row["capacity"]) for row in mine]
    bottom = [0.0] * len(mine)
    for kind, (colour, hatch) in KINDS.items():
        values = [row[f"{kind}_prefetched_bytes"] / 1e9 for row in mine]
        axes.bar(
            capacities, values, 0.7, bottom=bottom, label=kind, color=colour, hatch=hatch,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.grid(visible=False, axis="x")
    axes.set_title(f"Copied ahead: mini, {BYTES_OF}, {most} staging")
    axes.set_ylabel("GB")
    axes.set_xlabel("slots per layer")
    axes.legend(fontsize=7)


def draw_cpu(axes: Axes, rows: list[Row]) -> None:
    """What prefetch does to a forward where the CPU computes misses too."""
    most = max(row["num_staging"] for row in rows)
    machines = list({row["machine"]: None for row in rows})
    series: dict[str, list[float]] = {}
    for row in select(rows, num_staging=most, has_prefetch=True):
        (base,) = select(
            rows, num_staging=most, has_prefetch=False, machine=row["machine"],
            capacity=row["capacity"],
        )  # fmt: skip
        change = 100 * (row["forward_s"] / base["forward_s"] - 1)
        series.setdefault(f"C = {row['capacity']}", []).append(change)
    names = [name.partition("-")[0] if "rtx" in name else name for name in machines]
    grouped_bars(axes, names, series)
    axes.axhline(0, color=BLACK, linewidth=0.8)
    axes.set_title(f"CPU experts on: mini, {most} staging")
    axes.set_ylabel("time with prefetch, % more")
    axes.legend(fontsize=7)


if __name__ == "__main__":
    plot_study(STUDY, "prefetch", draw)
