"""Figure 13: OLED's TPOT against the ideal cache's, by cache size.

python -m experiments.paper.fig_13.run
"""

from collections.abc import Iterator

from experiments.paper.common import (
    MODELS,
    SEEDS,
    Row,
    Table,
    mean_of,
    mixed,
    ms,
    percent,
    policy_rows,
    run_figure,
    select,
)
from experiments.paper.paper_numbers import FIG_13

FIGURE = "13"
SIZES = (20, 40, 60, 80, 100, 120)
POLICIES = ("OLED", "Belady", "ideal")


def make_rows(is_quick: bool) -> Iterator[Row]:
    for model in MODELS:
        for seed in SEEDS[:1] if is_quick else SEEDS:
            size = {"num_requests": 1, "answer_tokens": 16} if is_quick else {"num_requests": 3}
            trace = mixed(model, seed=seed, **{"answer_tokens": 64, **size})
            for capacity in SIZES:
                yield from policy_rows(FIGURE, trace, model, capacity, POLICIES, workload="mixed")


def gap(rows: list[Row], label: str = "OLED") -> float:
    """TPOT over the ideal's, less 1; the mean of each over seeds."""
    ideal = mean_of(select(rows, label="ideal"), "tpot_s")
    return mean_of(select(rows, label=label), "tpot_s") / ideal - 1


def tables(rows: list[Row]) -> list[Table]:
    lines = []
    for model in MODELS:
        for capacity in SIZES:
            cell = select(rows, model=model, capacity=capacity)
            by_seed = [gap(select(cell, seed=seed)) for seed in sorted({r["seed"] for r in cell})]
            shares = [
                f"{percent(mean_of(select(cell, label=label), 'expert_cache_utilization'))} / "
                f"{percent(mean_of(select(cell, label=label), 'hit_rate'))}"
                for label in ("OLED", "ideal")
            ]
            times = [
                ms(mean_of(select(cell, label=label), "tpot_s")) for label in ("OLED", "ideal")
            ]
            spread = f"{percent(gap(cell))} ({percent(min(by_seed))} to {percent(max(by_seed))})"
            lines.append((f"{model}, C = {capacity}", *times, spread, *shares))
    header = (
        "cell",
        "OLED, ms",
        "ideal, ms",
        "gap, % (seeds)",
        "OLED util. / hits, %",
        "ideal util. / hits, %",
    )
    return [_sets(rows), Table("TPOT by cache size, mixed workload.", header, tuple(lines))]


def _sets(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        ours = sorted(gap(select(rows, model=model, capacity=size)) for size in SIZES)
        paper = sorted(FIG_13["gap"].value[model])
        sets = [" ".join(percent(value) for value in each) for each in (ours, paper)]
        means = [percent(sum(each) / len(each)) for each in (ours, paper)]
        lines.append((model, *sets, *means))
    header = ("model", "ours, sorted", "paper, sorted", "our mean", "paper's mean")
    title = (
        "Gap to the ideal's TPOT, %, at six sizes; which size has which in the paper is unknown."
    )
    return Table(title, header, tuple(lines))


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
