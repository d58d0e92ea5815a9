"""Draws docs/figures/paper/fig_14.svg from results/raw/fig_14.jsonl alone.

python -m experiments.paper.fig_14.plot
"""

from matplotlib.figure import Figure

from experiments.paper.common import MODELS, Row, mean_of, select
from experiments.paper.fig_14.run import COPIES_ALONE
from experiments.paper.paper_numbers import FIG_14
from experiments.paper.plots import (
    BLUE,
    PINK,
    POLICY_COLOURS,
    legend_below,
    lines,
    plot_figure,
    subplots,
)


def draw(rows: list[Row]) -> Figure:
    figure, (upper, lower) = subplots(2, 2)
    labels = list(dict.fromkeys(row["label"] for row in rows))
    for column, model in enumerate(MODELS):
        here = select(rows, model=model)
        lengths = sorted({row["prompt_tokens"] for row in here})
        by_length = [select(here, prompt_tokens=length) for length in lengths]
        times = {
            label: [mean_of(select(each, label=label), "ttft_s") for each in by_length]
            for label in labels
        }
        lines(upper[column], lengths, times, colours=POLICY_COLOURS | {COPIES_ALONE: PINK})
        upper[column].set_title(f"{model}, C=100")
        low, high = FIG_14["ttft_s"].value[model]
        upper[column].axhspan(low, high, color="#dddddd", zorder=0, label="the paper's range")
        upper[column].set_ylim(0, 1.05 * high)
        active = [100 * mean_of(each, "prefill_active_share") for each in by_length]
        lower[column].plot(lengths, active, color=BLUE, marker="o", label="ours")
        for share in FIG_14["active_share"].value[model]:
            lower[column].axhline(100 * share, color="#888888", linestyle="--", linewidth=1)
        lower[column].set_ylim(0, 102)
        lower[column].set_xlabel("prompt tokens, mean")
        for axes in (upper[column], lower[column]):
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [str(length) for length in lengths])
    upper[0].set_ylabel("time to first token, s")
    lower[0].set_ylabel("experts active in prefill, %\n(dashed: the paper's three lengths)")
    legend_below(figure, upper[0], num_columns=5)
    return figure


def main() -> None:
    plot_figure("14", draw)


if __name__ == "__main__":
    main()
