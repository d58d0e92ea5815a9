"""Figure 5: TPOT and utilisation of earlier systems against the ideal cache, mixed workload.

python -m experiments.paper.fig_5.run
"""

from collections.abc import Iterator

from experiments.paper.common import (
    CAPACITIES,
    MODELS,
    POLICIES,
    SEEDS,
    Row,
    Table,
    mixed,
    policy_rows,
    run_figure,
    select,
)
from experiments.paper.comparison import CELL_HEADER, PRIOR, bare_tpot, cell_lines, span, value
from experiments.paper.paper_numbers import FIG_5

FIGURE = "5"


def make_rows(is_quick: bool) -> Iterator[Row]:
    for model in MODELS:
        for seed in SEEDS[:1] if is_quick else SEEDS:
            size = {"num_requests": 1, "answer_tokens": 16} if is_quick else {"num_requests": 3}
            trace = mixed(model, seed=seed, **{"answer_tokens": 64, **size})
            for capacity in CAPACITIES:
                yield from policy_rows(FIGURE, trace, model, capacity, POLICIES, workload="mixed")


def tables(rows: list[Row]) -> list[Table]:
    cells = {
        (model, capacity): select(rows, model=model, capacity=capacity)
        for model in MODELS
        for capacity in CAPACITIES
    }
    found = [
        Table(f"{model}, C = {capacity}.", CELL_HEADER, tuple(cell_lines(cell)))
        for (model, capacity), cell in cells.items()
    ]
    systems = [(cell, label) for cell in cells.values() for label in PRIOR]
    over = [
        value(cell, label, "tpot_s") / value(cell, "ideal", "tpot_s") for cell, label in systems
    ]
    bare = [bare_tpot(cell, label) / bare_tpot(cell, "ideal") for cell, label in systems]
    name = "expert_cache_utilization"
    below = [1 - value(cell, label, name) / value(cell, "ideal", name) for cell, label in systems]
    lines = (
        ("TPOT over the ideal's", span(over), span(bare), span(FIG_5["over_ideal"].value)),
        (
            "utilisation below the ideal's, % of it",
            span(below, 1, 100),
            "-",
            span(FIG_5["utilization_below"].value, 1, 100),
        ),
    )
    header = ("earlier systems, all cells", "ours", "less the profile's software time", "paper")
    return [Table("The ranges that the paper gives.", header, lines), *found]


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
