"""What the experiments on this project's own policies share: rows, files, tables, plots.

They use the rows of `experiments.paper.common`; only names and places differ:

    python -m experiments.04_calibrated_reuse.run      # rows and the README's tables
    python -m experiments.04_calibrated_reuse.plot     # the plot, from rows alone
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.paper.common import (
    RAW,
    ROOT,
    Row,
    Table,
    base_row,
    rows_path,
    simulate_row,
    with_tables,
    write_rows,
)
from oled_moe.costs import HardwareProfile
from oled_moe.counters import ratio
from oled_moe.traces import RoutingTrace
from oled_moe.types import LayerDemand, LayerPlan

FIGURES = ROOT / "docs" / "figures"


class DemandCounter:
    """An observer of replays: hits and demands of forwards that denoise, by request.

    `firsts` counts those of a block's first step alone, by request too.
    """

    def __init__(self, num_requests: int) -> None:
        self.hits, self.demands = [0] * num_requests, [0] * num_requests
        self.first_hits, self.first_demands = [0] * num_requests, [0] * num_requests

    def __call__(self, demand: LayerDemand, plan: LayerPlan) -> None:
        context = demand.context
        if not context.is_denoise:
            return
        # One request a forward: these traces hold no batches.
        (row,) = context.rows
        self.hits[row.request_id] += len(plan.hit_ids)
        self.demands[row.request_id] += plan.num_demanded
        if row.step_id == 0:
            self.first_hits[row.request_id] += len(plan.hit_ids)
            self.first_demands[row.request_id] += plan.num_demanded


def study_row(
    study: str,
    trace: RoutingTrace,
    policy: str,
    C: float,
    hardware: str | HardwareProfile,
    *,
    options: dict[str, Any] | None = None,
    **labels: Any,
) -> Row:
    """`simulate_row`, and hits and demands of measured requests as counts.

    `hits_by_request` holds the warm-up's too.
    """
    counter = DemandCounter(len(trace.requests))
    options = {"observers": [counter], **(options or {})}
    row = simulate_row(study, trace, policy, C, hardware, options=options, **labels)
    first = row["warm_up"]
    if policy.startswith("oled+global"):
        row["scope"] = "global"
    return row | {
        "experiment": study,
        "num_hits": sum(counter.hits[first:]),
        "num_demanded": sum(counter.demands[first:]),
        "num_first_hits": sum(counter.first_hits[first:]),
        "num_first_demanded": sum(counter.first_demands[first:]),
        "hits_by_request": counter.hits,
        "demands_by_request": counter.demands,
    }


def plain_row(study: str, trace: RoutingTrace, **labels: Any) -> Row:
    """A row on a trace alone."""
    return base_row(study, trace, **labels) | {"experiment": study}


def gap_closed(ours: float, base: float, best: float) -> float:
    """Share of the way from `base` to `best` that `ours` has gone."""
    return ratio(ours - base, best - base)


def study_path(study: str, folder: Path = RAW) -> Path:
    return folder / f"{study}.jsonl"


def read_study(study: str, folder: Path = RAW) -> list[Row]:
    lines = study_path(study, folder).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def run_study(
    study: str, make_rows: Callable[[], Iterable[Row]], tables: Callable[[list[Row]], list[Table]]
) -> None:
    """The command line of every run.py: `--tables-only` makes the tables of rows that are there;
    `--out` takes the rows elsewhere and leaves the README alone."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{study}.run")
    parser.add_argument("--tables-only", action="store_true")
    parser.add_argument("--out", type=Path, default=RAW)
    arguments = parser.parse_args()
    folder: Path = arguments.out
    if arguments.tables_only:
        rows = read_study(study, folder)
    else:
        rows = write_rows(study, make_rows(), folder)
        os.replace(rows_path(study, folder), study_path(study, folder))
    found = tables(rows)
    if folder.resolve() == RAW:
        replace_tables(study, found)
    print("\n\n".join(table.markdown() for table in found))


def replace_tables(study: str, found: Sequence[Table]) -> None:
    """Writes what stands between the markers of the study's README."""
    readme = ROOT / "experiments" / study / "README.md"
    readme.write_text(with_tables(readme.read_text("utf-8"), found), encoding="utf-8")


def plot_study(study: str, name: str, draw: Callable[[list[Row]], Any]) -> None:
    """The command line of every plot.py: rows to docs/figures/NAME.svg; `--png` a file to look at
    besides, `--out` another folder."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{study}.plot")
    parser.add_argument("--rows", type=Path, default=RAW)
    parser.add_argument("--out", type=Path, default=FIGURES)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    drawn = draw(read_study(study, arguments.rows))
    arguments.out.mkdir(parents=True, exist_ok=True)
    drawn.savefig(arguments.out / f"{name}.svg", metadata={"Date": None})
    if arguments.png:
        drawn.savefig(arguments.png, dpi=110)
