"""Draws docs/figures/paper/fig_18a.svg from results/raw/fig_18a.jsonl alone.

python -m experiments.paper.fig_18a.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import Row, select
from experiments.paper.plots import grouped_bars, legend_below, plot_figure, subplots


def draw(rows: list[Row]) -> Figure:
    sizes = sorted({row["capacity"] for row in rows})
    figure, (line,) = subplots(1, len(sizes))
    cells = list(dict.fromkeys((row["threshold"], row["loop"]) for row in rows))
    cells.sort()
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for axes, size in zip(line, sizes, strict=True):
        hits = {
            policy: [
                100 * select(rows, capacity=size, policy=policy, threshold=t, loop=v)[0]["hit_rate"]
                for t, v in cells
            ]
            for policy in policies
        }
        grouped_bars(axes, [f"loop of {v}\nthreshold {t:g}" for t, v in cells], hits)
        axes.set_title(f"demo model, {size} of 96 slots per layer")
        axes.set_ylim(0, 100)
        axes.tick_params(axis="x", labelsize=7)
    line[0].set_ylabel("demanded experts found resident, %")
    legend_below(figure, line[0])
    return figure


def main() -> None:
    plot_figure("18a", draw)


if __name__ == "__main__":
    main()
