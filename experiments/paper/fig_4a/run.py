"""Figure 4a: distinct experts of a block of 16 against one token's, by workload.

python -m experiments.paper.fig_4a.run
"""

from collections.abc import Iterator

from experiments.paper.common import (
    DEMO_FAMILIES,
    WORKLOADS,
    Row,
    Table,
    base_row,
    demo_trace,
    num_warmup,
    percent,
    run_figure,
    select,
    synthetic,
    without_warmup,
)
from experiments.paper.paper_numbers import FIG_4A
from oled_moe.trace_stats import TraceRows, activation
from oled_moe.traces import RoutingTrace

FIGURE = "4a"


def row_of(figure: str, trace: RoutingTrace, **labels: object) -> Row:
    """Active experts and tokens per block of the measured requests; figure 4b takes it too."""
    found = activation(TraceRows(without_warmup(trace)))
    return base_row(figure, trace, **labels) | {
        "active": found.mean,
        "active_share": found.ratio,
        "over_one_token": found.over_one_token,
        "flops_over_one_token": found.flops_over_one_token,
        "measured_requests": len(trace.requests) - num_warmup(trace),
    }


def make_rows(is_quick: bool) -> Iterator[Row]:
    yield from rows_of(FIGURE, is_quick)


def rows_of(figure: str, is_quick: bool) -> Iterator[Row]:
    for seed in (0,) if is_quick else (0, 1, 2):
        for workload in WORKLOADS:
            trace = synthetic(
                "mini", workload, num_requests=1 if is_quick else 8, seed=seed, num_warmup=0
            )
            yield row_of(figure, trace, kind="synthetic", workload=workload)
    for family in DEMO_FAMILIES:
        trace = demo_trace(family, slow=True, num_warmup=0)
        yield row_of(figure, trace, kind="demo", workload=family)


def tables(rows: list[Row]) -> list[Table]:
    shares, ratios = FIG_4A["active_share"].value, FIG_4A["over_one_token"].value
    lines = []
    for workload, stands_for in WORKLOADS.items():
        here = select(rows, kind="synthetic", workload=workload)
        active = [row["active_share"] for row in here]
        over = [row["over_one_token"] for row in here]
        lines.append(
            (
                f"{workload} for {stands_for}, synthetic mini",
                spread(active, 100, 1),
                percent(shares[workload]),
                spread(over, 1, 2),
                f"{ratios[workload]:.1f}",
            )
        )
    for row in select(rows, kind="demo"):
        share, over = row["active_share"], row["over_one_token"]
        lines.append((f"{row['workload']}, demo", percent(share), "-", f"{over:.2f}", "-"))
    header = ("requests", "active, %", "paper", "over one token's", "paper")
    return [Table("Distinct experts of a layer that a block of 16 demands.", header, tuple(lines))]


def spread(values: list[float], scale: float, digits: int) -> str:
    """Mean over seeds, and how far from it they lie."""
    mean = sum(values) / len(values)
    away = max(abs(value - mean) for value in values)
    return f"{scale * mean:.{digits}f} ± {scale * away:.{digits}f}"


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
