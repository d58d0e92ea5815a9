"""Figure 12: every system on every workload, both models, two cache sizes.

python -m experiments.paper.fig_12.run
"""

import statistics
from collections.abc import Callable, Iterator

from experiments.paper.common import (
    CAPACITIES,
    MODELS,
    POLICIES,
    WORKLOADS,
    Row,
    Table,
    ms,
    percent,
    policy_rows,
    run_figure,
    select,
    synthetic,
)
from experiments.paper.comparison import PRIOR, bare_tpot, span, value
from experiments.paper.paper_numbers import ABSTRACT, FIG_12

FIGURE = "12"
UTILIZATION = "expert_cache_utilization"


def make_rows(is_quick: bool) -> Iterator[Row]:
    size = {"num_requests": 1, "answer_tokens": 16} if is_quick else {"num_requests": 4}
    for model in MODELS:
        for workload in WORKLOADS:
            trace = synthetic(model, workload, seed=0, **{"answer_tokens": 80, **size})
            for capacity in CAPACITIES:
                yield from policy_rows(FIGURE, trace, model, capacity, POLICIES, workload=workload)


def tables(rows: list[Row]) -> list[Table]:
    cells = {
        (model, capacity, workload): select(rows, model=model, capacity=capacity, workload=workload)
        for model in MODELS
        for capacity in CAPACITIES
        for workload in WORKLOADS
    }
    return [_summary(cells), _times(cells), _utilizations(cells)]


Cells = dict[tuple[str, int, str], list[Row]]


def _summary(cells: Cells) -> Table:
    whole, bare = (_speedups(cells, time) for time in (_tpot, bare_tpot))
    best = [max(value(cell, label, UTILIZATION) for label in PRIOR) for cell in cells.values()]
    oled = [value(cell, "OLED", UTILIZATION) for cell in cells.values()]
    gains = [
        value(cell, "OLED", UTILIZATION) / value(cell, label, UTILIZATION)
        for cell in cells.values()
        for label in PRIOR
    ]
    paper = [f"{FIG_12[name].value:.2f}" for name in ("mean_speedup", "max_speedup")]
    strongest = [[min(by_label.values()) for by_label in each.values()] for each in (whole, bare)]
    lines = [
        (
            "TPOT, strongest earlier system over OLED, mean",
            *(f"{statistics.fmean(each):.2f}" for each in strongest),
            paper[0],
        ),
        ("the same, up to", *(f"{max(each):.2f}" for each in strongest), paper[1]),
        ("every earlier system over OLED", *map(_all, (whole, bare)), _of("tpot_speedup")),
    ]
    for model in MODELS:
        means = [f"{_mean(each, model):.2f}" for each in (whole, bare)]
        by_model = FIG_12["mean_speedup_by_model"].value[model]
        lines.append((f"the same, mean, {model}", *means, f"{by_model:.2f}"))
    paper_from, paper_to = FIG_12["utilization"].value
    lines.append(
        (
            "utilisation, best earlier system and OLED, mean, %",
            f"{percent(statistics.fmean(best))} and {percent(statistics.fmean(oled))}",
            "-",
            f"{percent(paper_from)} and {percent(paper_to)}",
        )
    )
    lines.append(
        ("utilisation, OLED over every earlier", span(gains), "-", _of("utilization_gain"))
    )
    header = ("all cells", "ours", "less the profile's software time", "paper")
    return Table("What the paper says in words.", header, tuple(lines))


# By cell and earlier system.
Speedups = dict[tuple[str, int, str], dict[str, float]]


def _speedups(cells: Cells, time: Callable[[list[Row], str], float]) -> Speedups:
    return {
        key: {label: time(cell, label) / time(cell, "OLED") for label in PRIOR}
        for key, cell in cells.items()
    }


def _tpot(cell: list[Row], label: str) -> float:
    return value(cell, label, "tpot_s")


def _all(speedups: Speedups) -> str:
    return span(each for by_label in speedups.values() for each in by_label.values())


def _mean(speedups: Speedups, model: str) -> float:
    mine = (by_label.values() for key, by_label in speedups.items() if key[0] == model)
    return statistics.fmean(each for values in mine for each in values)


def _of(name: str) -> str:
    return span(ABSTRACT[name].value)


def _times(cells: Cells) -> Table:
    lines = [
        (f"{model}, C = {capacity}, {workload}",)
        + tuple(ms(value(cell, label, "tpot_s")) for label in POLICIES)
        for (model, capacity, workload), cell in cells.items()
    ]
    return Table("TPOT, ms.", ("cell", *POLICIES), tuple(lines))


def _utilizations(cells: Cells) -> Table:
    lines = [
        (f"{model}, C = {capacity}, {workload}", *(_shares(cell, label) for label in POLICIES))
        for (model, capacity, workload), cell in cells.items()
    ]
    return Table("Utilisation / hit rate, %.", ("cell", *POLICIES), tuple(lines))


def _shares(cell: list[Row], label: str) -> str:
    return " / ".join(percent(value(cell, label, name)) for name in (UTILIZATION, "hit_rate"))


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
