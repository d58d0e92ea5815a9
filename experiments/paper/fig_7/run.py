"""Figure 7: overlap of demanded experts by gap and across block boundaries; hidden states.

python -m experiments.paper.fig_7.run
"""

from collections.abc import Iterator

import numpy as np

from experiments.paper.common import (
    DEMO_FAMILIES,
    MODELS,
    WORKLOADS,
    Row,
    Table,
    base_row,
    demo_trace,
    mean_of,
    run_figure,
    select,
    synthetic,
)
from experiments.paper.paper_numbers import FIG_7
from oled_moe.trace_stats import (
    BOUNDARIES,
    TraceRows,
    hidden_cosine,
    overlap_at_boundaries,
    overlap_by_gap,
    unrelated_overlap,
)
from oled_moe.traces import RoutingTrace

FIGURE = "7"


def row_of(trace: RoutingTrace, **labels: object) -> Row:
    """All requests are looked at: no cache takes part, so nothing is warmed."""
    rows = TraceRows(trace)
    cosine = hidden_cosine(trace)
    gaps = overlap_by_gap(rows)
    boundaries = overlap_at_boundaries(rows)
    return base_row(FIGURE, trace, **labels) | {
        "overlap_by_gap": [gap.overlap for gap in gaps],
        "jaccard_by_gap": [gap.jaccard for gap in gaps],
        "pairs_by_gap": [gap.num_pairs for gap in gaps],
        "boundaries": {each.label: each.overlap for each in boundaries},
        "boundary_pairs": {each.label: each.num_pairs for each in boundaries},
        "unrelated": unrelated_overlap(rows).overlap,
        "steps_per_block": len(rows.denoise) / len(np.unique(rows.block_key[rows.denoise])),
        "hidden_cosine": None if cosine is None else cosine.mean,
        "hidden_cosine_by_kind": None if cosine is None else cosine.by_kind,
        "hidden_cosine_per_layer": None if cosine is None else cosine.per_layer,
    }


def make_rows(is_quick: bool) -> Iterator[Row]:
    for model in MODELS:
        for workload in WORKLOADS:
            trace = synthetic(
                model, workload, num_requests=1 if is_quick else 6, seed=0, num_warmup=0
            )
            yield row_of(trace, kind="synthetic", model=model, workload=workload)
    for family in DEMO_FAMILIES:
        trace = demo_trace(family, slow=True, num_warmup=0)
        yield row_of(trace, kind="demo", model="demo", workload=family)


def tables(rows: list[Row]) -> list[Table]:
    first = BOUNDARIES[2]
    lines = []
    for model in (*MODELS, "demo"):
        here = select(rows, model=model)
        gaps = [[row["overlap_by_gap"][gap - 1] for row in here] for gap in (1, 2, 4, 8)]
        cosine = [row["hidden_cosine"] for row in here if row["hidden_cosine"] is not None]
        lines.append(
            (
                model if model == "demo" else f"synthetic {model}",
                *(_mean(values) for values in gaps),
                _mean([row["boundaries"][first] for row in here]),
                f"{mean_of(here, 'unrelated'):.2f}",
                _mean(cosine),
            )
        )
    low, high = FIG_7["adjacent"].value
    paper = (f"{low:.2f} to {high:.2f}", "-", "-", "-", f"above {FIG_7['boundary'].value:.2f}")
    lines.append(("paper, four models", *paper, "-", f"up to {FIG_7['hidden_cosine'].value:.2f}"))
    header = (
        "model",
        "gap 1",
        "gap 2",
        "gap 4",
        "gap 8",
        "block to next block",
        "unrelated requests",
        "hidden cosine",
    )
    title = (
        "Share of a step's experts that an earlier step of the block had, mean over workloads; "
        "*block to next block*: last step to the next block's first."
    )
    return [Table(title, header, tuple(lines)), _cosines(rows)]


def _cosines(rows: list[Row]) -> Table:
    lines = []
    for row in select(rows, kind="demo"):
        kinds = row["hidden_cosine_by_kind"]
        layers = [value for value in row["hidden_cosine_per_layer"] if value is not None]
        lines.append(
            (
                row["workload"],
                f"{row['hidden_cosine']:.2f}",
                f"{min(layers):.2f} to {max(layers):.2f}",
                *(_mean([] if value is None else [value]) for value in kinds.values()),
            )
        )
    kinds = select(rows, kind="demo")[0]["hidden_cosine_by_kind"]
    header = ("demo model", "mean", "by layer", *kinds)
    return Table("Cosine of hidden states, adjacent steps, by what the earlier step did to a "
                 "token.", header, tuple(lines))  # fmt: skip


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.2f}" if known else "-"


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
