"""Figure 10: routing stability by token confidence, jointly, and active experts by layer.

python -m experiments.paper.fig_10.run
"""

from collections.abc import Iterator
from dataclasses import asdict

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
from experiments.paper.paper_numbers import FIG_10
from oled_moe.trace_stats import TraceRows, activation, routing_stability
from oled_moe.traces import RoutingTrace

FIGURE = "10"
# Bins with fewer tokens than this, over all workloads, are left out: one token says nothing.
FEWEST_TOKENS = 20


def row_of(trace: RoutingTrace, **labels: object) -> Row:
    """All requests are looked at: no cache takes part, so nothing is warmed."""
    stability = routing_stability(trace)
    active = activation(TraceRows(trace))
    return base_row(FIGURE, trace, **labels) | {
        "stability": [asdict(each) for each in stability],
        "active": active.mean,
        "active_per_layer": active.per_layer,
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
    return [_curves(rows), _ends(rows), _kinds(rows), _layers(rows)]


def pooled(rows: list[Row], kind: int, bin_id: int, kept: int | None = None) -> float | None:
    """Mean stability in a bin, or the share with `kept` experts kept; weighed by tokens."""
    name = "means" if kept is None else "table"
    total = weight = 0.0
    for row in rows:
        found = row["stability"][kind]
        value, count = found[name][bin_id], found["counts"][bin_id]
        if value is not None:
            total += count * (value if kept is None else value[kept])
            weight += count
    return total / weight if weight >= FEWEST_TOKENS else None


def _curves(rows: list[Row]) -> Table:
    header = ("confidence", *(f"{(b + 0.5) / 10:.2f}" for b in range(10)), "correlation")
    lines = []
    for model in (*MODELS, "demo"):
        here = select(rows, model=model)
        cells = [_number(pooled(here, 0, bin_id)) for bin_id in range(10)]
        correlation = [row["stability"][0]["correlation"] for row in here]
        mean = sum(correlation) / len(correlation)
        lines.append((_name(model), *cells, f"{mean:.2f}"))
    paper = [FIG_10["stability_low"].value, FIG_10["stability_high"].value]
    lines.append(("paper", f"{paper[0]:.2f}", *["-"] * 8, f"{paper[1]:.2f}", "-"))
    return Table(
        "10a: stability by confidence, all tokens; -: fewer than 20.", header, tuple(lines)
    )


def _ends(rows: list[Row]) -> Table:
    lines = []
    for model in (*MODELS, "demo"):
        here = select(rows, model=model)
        top_k = here[0]["trace"]["top_k"]
        cells = [_number(pooled(here, 0, b, kept)) for kept in (top_k, 0) for b in (0, 9)]
        lines.append((_name(model), *cells))
    paper = [FIG_10["all_kept_low"].value, FIG_10["all_kept_high"].value]
    lines.append(("paper", f"{paper[0]:.2f}", f"{paper[1]:.2f}", "-", "-"))
    header = (
        "share of tokens",
        "all experts kept, at 0.05",
        "at 0.95",
        "none kept, at 0.05",
        "at 0.95",
    )
    return Table("10b: the ends of the joint table; all of it is drawn.", header, tuple(lines))


def _kinds(rows: list[Row]) -> Table:
    labels = [each["label"] for each in rows[0]["stability"]]
    lines = []
    for model in (*MODELS, "demo"):
        here = select(rows, model=model)
        means = []
        for kind in range(len(labels)):
            found = [row["stability"][kind] for row in here]
            total = sum(each["num_tokens"] for each in found)
            kept = sum(each["num_tokens"] * (each["mean"] or 0) for each in found)
            means.append(_number(kept / total if total else None))
        lines.append((_name(model), *means))
    return Table("Stability by what the earlier step did to a token (not in the paper).",
                 ("model", *labels), tuple(lines))  # fmt: skip


def _layers(rows: list[Row]) -> Table:
    lines = []
    for model in (*MODELS, "demo"):
        here = select(rows, model=model)
        layers = layer_means(here)
        paper = FIG_10["active"].value.get(model)
        lines.append(
            (
                _name(model),
                f"{mean_of(here, 'active'):.1f} of {here[0]['trace']['num_experts']}",
                f"about {paper}" if paper else "-",
                f"{min(layers):.0f} to {max(layers):.0f}",
            )
        )
    return Table("10c: active experts of a layer.", ("model", "mean", "paper", "over layers"),
                 tuple(lines))  # fmt: skip


def layer_means(rows: list[Row]) -> list[float]:
    """Active experts of each layer, mean over workloads."""
    return [
        sum(values) / len(values)
        for values in zip(*(row["active_per_layer"] for row in rows), strict=True)
    ]


def _name(model: str) -> str:
    return model if model == "demo" else f"synthetic {model}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
