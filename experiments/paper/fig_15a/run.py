"""Figure 15a: what each part of OLED-MoE adds, from naive LRU to the whole.

python -m experiments.paper.fig_15a.run
"""

import statistics
from collections.abc import Iterator

from experiments.paper.common import (
    CAPACITIES,
    DEMO_FAMILIES,
    HARDWARE,
    MODELS,
    SEEDS,
    Row,
    Table,
    demo_trace,
    mean_of,
    percent,
    run_figure,
    select,
    simulate_row,
)
from experiments.paper.paper_numbers import FIG_15A
from experiments.paper.sweeps import cell, changes, over_seeds, short_mixed, signed

FIGURE = "15a"
# The paper's four, the dispatch without its reuse term between them, and ours behind. First an LRU
# that ranks single uses where naive-lru ranks forwards, and whose copies block the layer.
POLICIES = (
    "paged-lru", "naive-lru", "priority", "priority+adapt", "oled-load-aware", "oled", "oled+"
)  # fmt: skip
# The paper's steps: what is compared with what, and its name in paper_numbers.
STEPS = (
    ("priority", "naive-lru", "priority"),
    ("priority+adapt", "priority", "adapt"),
    ("oled", "priority+adapt", "coop"),
)
# Its experts are so small that a machine's profile would send nearly all misses to the CPU: what
# splits misses is left out there.
DEMO_POLICIES = ("paged-lru", "naive-lru", "priority", "priority+adapt")
# The demo demands about 42 of 96: as many slots per demanded expert as mini has at 40 and 100.
DEMO_CAPACITIES = (28, 70)
ANSWER_TOKENS = 96


def make_rows(is_quick: bool) -> Iterator[Row]:
    for seed in SEEDS[:1] if is_quick else SEEDS:
        for model in MODELS:
            trace = short_mixed(model, seed, answer_tokens=32 if is_quick else ANSWER_TOKENS)
            for capacity in CAPACITIES:
                for policy in POLICIES:
                    yield simulate_row(
                        FIGURE, trace, policy, capacity, HARDWARE[model], model=model, kind="mixed"
                    )
    for family in DEMO_FAMILIES:
        for capacity in DEMO_CAPACITIES:
            for policy in DEMO_POLICIES:
                yield simulate_row(
                    FIGURE, demo_trace(family, slow=True), policy, capacity, HARDWARE["mini"],
                    model="demo", kind=family,
                )  # fmt: skip


def mean_change(rows: list[Row], policy: str, base: str, **labels: object) -> float:
    """Mean change of TPOT over models, capacities and seeds that fit the labels."""
    found: list[float] = []
    for model in MODELS:
        for capacity in CAPACITIES:
            if not labels.items() <= {"model": model, "capacity": capacity}.items():
                continue
            here = select(rows, model=model, capacity=capacity)
            found += changes(select(here, policy=policy), select(here, policy=base))
    return statistics.fmean(found)


def tables(rows: list[Row]) -> list[Table]:
    return [_cells(rows), _steps(rows), _demo(rows)]


def _cells(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        for capacity in CAPACITIES:
            here = select(rows, model=model, capacity=capacity)
            base = select(here, policy="naive-lru")
            for policy in POLICIES:
                mine = select(here, policy=policy)
                lines.append(
                    (
                        f"{model}, C={capacity}",
                        policy,
                        cell(mine, "tpot_s", scale=1e3),
                        over_seeds(changes(mine, base), scale=100),
                        cell(mine, "hit_rate", scale=100),
                        cell(mine, "expert_cache_utilization", scale=100),
                        cell(mine, "effective_transfer_ratio", scale=100),
                    )
                )
    header = (
        "model", "policy", "TPOT, ms", "against naive LRU, %", "hit rate, %", "utilisation, %",
        "transfers used, %",
    )  # fmt: skip
    return Table("Mixed workload, mean of three seeds.", header, tuple(lines))


def _steps(rows: list[Row]) -> Table:
    paper, lines = FIG_15A["steps"].value, []
    for policy, base, name in STEPS:
        change = signed(mean_change(rows, policy, base), 2)
        lines.append((f"{policy} after {base}, mean", change, signed(paper[name], 2)))
    for capacity in CAPACITIES:
        change = signed(mean_change(rows, "oled", "naive-lru", capacity=capacity))
        theirs = signed(FIG_15A["whole"].value[capacity])
        lines.append((f"oled against naive-lru, C={capacity}", change, theirs))
    for model in MODELS:
        change = signed(mean_change(rows, "oled", "naive-lru", model=model))
        theirs = signed(FIG_15A["whole_by_model"].value[model])
        lines.append((f"oled against naive-lru, {model}", change, theirs))
    for policy, base in (("oled-load-aware", "priority+adapt"), ("oled", "oled-load-aware")):
        change = signed(mean_change(rows, policy, base), 2)
        lines.append((f"{policy} after {base}, mean", change, "-"))
    lines.append(("oled+ against oled, mean", signed(mean_change(rows, "oled+", "oled"), 2), "-"))
    return Table("Change of TPOT, %.", ("step", "ours", "paper"), tuple(lines))


def _demo(rows: list[Row]) -> Table:
    lines = []
    for capacity in DEMO_CAPACITIES:
        for policy in DEMO_POLICIES:
            mine = select(rows, model="demo", capacity=capacity, policy=policy)
            lines.append(
                (
                    f"{capacity} of 96",
                    policy,
                    percent(mean_of(mine, "hit_rate")),
                    percent(mean_of(mine, "expert_cache_utilization")),
                    percent(mean_of(mine, "effective_transfer_ratio")),
                )
            )
    header = ("slots per layer", "policy", "hit rate, %", "utilisation, %", "transfers used, %")
    title = "Demo model, one token a step, mean of three families; counts alone."
    return Table(title, header, tuple(lines))


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
