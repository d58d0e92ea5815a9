"""Figure 17a: how close a small cache comes to having every expert resident.

python -m experiments.paper.fig_17a.run
"""

import dataclasses
from collections.abc import Iterator

from experiments.paper.common import (
    HARDWARE,
    MODELS,
    SEEDS,
    Row,
    Table,
    run_figure,
    select,
    simulate_row,
)
from experiments.paper.paper_numbers import FIG_17A, FIG_18B
from experiments.paper.sweeps import cell, changes, over_seeds, short_mixed
from oled_moe.hardware import load_hardware

FIGURE = "17a"
SIZES = (10, 20, 40, 60, 80, 100, 150, 200)
ALL = 256
POLICIES = ("naive-lru", "oled")
# Every expert found resident from the first forward on, at no cost.
FULL = "oracle"
SOFTWARE, BARE = "as set from the paper", "none"


def make_rows(is_quick: bool) -> Iterator[Row]:
    for seed in SEEDS[:1] if is_quick else SEEDS:
        for model in MODELS:
            trace = short_mixed(model, seed, **({"answer_tokens": 32} if is_quick else {}))
            profile = load_hardware(HARDWARE[model])
            bare = dataclasses.replace(profile, layer_overhead_s=0.0, forward_overhead_s=0.0)
            labels = {"model": model, "overhead": SOFTWARE}
            for policy in POLICIES:
                for capacity in SIZES:
                    yield simulate_row(FIGURE, trace, policy, capacity, profile, **labels)
            yield simulate_row(FIGURE, trace, FULL, ALL, profile, **labels)
            labels["overhead"] = BARE
            for capacity in (40, 100):
                yield simulate_row(FIGURE, trace, "oled", capacity, bare, **labels)
            yield simulate_row(FIGURE, trace, FULL, ALL, bare, **labels)


def slowdowns(
    rows: list[Row], model: str, policy: str, capacity: int, overhead: str = SOFTWARE
) -> list[float]:
    """TPOT over full residency's, by seed."""
    here = select(rows, model=model, overhead=overhead)
    full = select(here, policy=FULL)
    return changes(select(here, policy=policy, capacity=capacity), full)


def tables(rows: list[Row]) -> list[Table]:
    return [_sizes(rows), _without_overhead(rows)]


def _sizes(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        for capacity in SIZES:
            here = select(rows, model=model, capacity=capacity, overhead=SOFTWARE)
            oled, lru = select(here, policy="oled"), select(here, policy="naive-lru")
            paper = FIG_17A["over_full_residency"].value[model] if capacity == 100 else None
            lines.append(
                (
                    model,
                    str(capacity),
                    cell(oled, "tpot_s", scale=1e3),
                    cell(oled, "forward_s", scale=1e3),
                    _paper_forward(model, capacity),
                    over_seeds(slowdowns(rows, model, "oled", capacity), scale=100),
                    "-" if paper is None else f"{100 * paper:.0f}",
                    over_seeds(slowdowns(rows, model, "naive-lru", capacity), scale=100),
                    f"{cell(oled, 'hit_rate', scale=100)} / {cell(lru, 'hit_rate', scale=100)}",
                    cell(oled, "expert_cache_utilization", scale=100),
                )
            )
        full = select(rows, model=model, policy=FULL, overhead=SOFTWARE)
        tpot = cell(full, "tpot_s", scale=1e3)
        forward = cell(full, "forward_s", scale=1e3)
        lines.append((model, "256, all", tpot, forward, "-", "0", "-", "0", "100", "-"))
    header = (
        "model", "C", "TPOT of oled, ms", "its forward, ms", "paper", "over full residency, %",
        "paper", "naive-lru over it, %", "hit rate oled / naive-lru, %",
        "utilisation of oled, %",
    )  # fmt: skip
    return Table("Mixed workload, mean of three seeds.", header, tuple(lines))


def _paper_forward(model: str, capacity: int) -> str:
    seconds = FIG_18B["forward_s"].value.get((model, capacity))
    return "-" if seconds is None else f"{1e3 * seconds:.0f}"


def _without_overhead(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        for capacity in (40, 100):
            texts = [
                over_seeds(slowdowns(rows, model, "oled", capacity, overhead), scale=100)
                for overhead in (SOFTWARE, BARE)
            ]
            lines.append((model, str(capacity), *texts))
    header = ("model", "C", "with the profile's software time", "without")
    return Table("oled over full residency, %.", header, tuple(lines))


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
