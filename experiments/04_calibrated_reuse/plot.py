"""Draw docs/figures/calibrated_reuse.svg from the committed rows alone.

python -m experiments.04_calibrated_reuse.plot
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.common import Row, select
from experiments.paper.plots import BLACK, BLUE, GREEN, GREY, MARKERS, ORANGE, RED, subplots
from experiments.studies import gap_closed, plot_study

STUDY = "04_calibrated_reuse"
BASE, OURS, BEST = "oled", "oled+", "belady"
GROUPS = {"all six": {}, "default threshold": {"is_slow": False}, "slow": {"is_slow": True}}
COLOURS = {"all six": BLACK, "default threshold": BLUE, "slow": ORANGE}
TARGETS = ((0.4, 40), (0.67, 40), (1.0, 28))
MODELS = {"mini": BLUE, "flash": ORANGE}


def draw(rows: list[Row]) -> Figure:
    figure, grid = subplots(1, 3, figsize=(10, 3.6))
    draw_gap(grid[0][0], select(rows, part="hits"))
    draw_ablation(grid[0][1], rows)
    draw_synthetic(grid[0][2], select(rows, part="synthetic"))
    return figure


def total(rows: Sequence[Row], name: str = "num_hits") -> int:
    return sum(row[name] for row in rows)


def gap(bounds: Sequence[Row], ours: Sequence[Row]) -> float:
    base, best = (total(select(bounds, policy=policy)) for policy in (BASE, BEST))
    return 100 * gap_closed(total(ours), base, best)


def draw_gap(axes: Axes, hits: list[Row]) -> None:
    multiples = sorted({row["multiple"] for row in hits})
    for index, case in enumerate(sorted({row["case"] for row in hits})):
        axes.plot(multiples, gaps(hits, multiples, case=case), color=GREY, alpha=0.5, linewidth=0.8,
                  label="each trace" if index == 0 else None)  # fmt: skip
    for index, (name, where) in enumerate(GROUPS.items()):
        axes.plot(multiples, gaps(hits, multiples, **where), color=COLOURS[name],
                  marker=MARKERS[index], linewidth=1.6, label=name)  # fmt: skip
    axes.plot(*zip(*TARGETS, strict=True), color=RED, marker="_", linestyle="", markersize=16,
              markeredgewidth=2, label="target")  # fmt: skip
    axes.set_ylim(0, 80)
    axes.set_xlabel("slots per layer, × mean active set")
    axes.set_ylabel("gap closed, %")
    axes.set_title("Demo traces: gap to clairvoyant, closed")
    axes.legend(ncols=2, fontsize=7)


def gaps(hits: list[Row], multiples: list[float], **where: object) -> list[float]:
    cells = [select(hits, multiple=multiple, **where) for multiple in multiples]
    return [gap(cell, select(cell, policy=OURS)) for cell in cells]


def draw_ablation(axes: Axes, rows: list[Row]) -> None:
    ablation = select(rows, part="ablation")
    variants = list({row["variant"]: None for row in ablation})[::-1]
    for offset, (multiple, colour) in enumerate(((1.0, ORANGE), (0.67, BLUE))):
        bounds = select(rows, part="hits", multiple=multiple)
        values = [
            gap(bounds, select(ablation, variant=variant, multiple=multiple))
            for variant in variants
        ]
        places = [place + 0.4 * offset - 0.2 for place in range(len(variants))]
        axes.barh(places, values, 0.38, color=colour, hatch=("///", "")[offset],
                  edgecolor="white", linewidth=0.5, label=f"{multiple:g} × active")  # fmt: skip
    axes.set_yticks(range(len(variants)), variants)
    axes.grid(visible=False, axis="y")
    axes.axvline(0, color=BLACK, linewidth=0.8)
    axes.set_xlabel("gap closed over all six, %")
    axes.set_title("What each ingredient is worth")
    handles, labels = axes.get_legend_handles_labels()
    axes.set_ylim(-1.5, len(variants) - 0.4)
    axes.legend(handles[::-1], labels[::-1], fontsize=7, loc="lower center", ncols=2)


def draw_synthetic(axes: Axes, rows: list[Row]) -> None:
    capacities = sorted({row["capacity"] for row in rows})
    styles = {"oled+": "-", "belady": "--"}
    for index, (model, colour) in enumerate(MODELS.items()):
        for policy, style in styles.items():
            values = []
            for capacity in capacities:
                here = select(rows, model=model, capacity=capacity)
                ours, base = (misses(select(here, policy=name)) for name in (policy, BASE))
                values.append(100 * ours / base)
            axes.plot(capacities, values, style, color=colour, marker=MARKERS[index],
                      linewidth=1.4, label=f"{policy}, {model}")  # fmt: skip
    axes.axhline(100, color=GREEN, linewidth=0.8, label="oled")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("slots per layer, of 256 experts")
    axes.set_ylabel("misses, % of oled's")
    axes.set_title("Synthetic traces at the paper's sizes")
    axes.legend(fontsize=7, loc="lower left", handlelength=3)


def misses(rows: Sequence[Row]) -> int:
    return total(rows, "num_demanded") - total(rows)


if __name__ == "__main__":
    plot_study(STUDY, "calibrated_reuse", draw)
