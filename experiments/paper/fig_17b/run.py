"""Figure 17b: the rate of the PCIe link.

python -m experiments.paper.fig_17b.run
"""

import dataclasses
from collections.abc import Iterator

from experiments.paper.common import (
    CAPACITIES,
    HARDWARE,
    MODELS,
    SEEDS,
    Row,
    Table,
    mean_of,
    run_figure,
    select,
    simulate_row,
)
from experiments.paper.sweeps import cell, short_mixed
from oled_moe.hardware import load_hardware

FIGURE = "17b"
LINKS_GB_PER_S = (16, 32, 48, 64, 96, 128)
# What copies reach of a link's rate, as the testbeds' profiles have it.
COPY_SHARE = 0.87
POLICIES = ("naive-lru", "oled")


def make_rows(is_quick: bool) -> Iterator[Row]:
    for seed in SEEDS[:1] if is_quick else SEEDS:
        for model in MODELS:
            trace = short_mixed(model, seed, **({"answer_tokens": 32} if is_quick else {}))
            for link in LINKS_GB_PER_S:
                profile = dataclasses.replace(
                    load_hardware(HARDWARE[model]), copy_bytes_per_s=COPY_SHARE * link * 1e9
                )
                for capacity in CAPACITIES:
                    for policy in POLICIES:
                        yield simulate_row(
                            FIGURE, trace, policy, capacity, profile, model=model, link=link
                        )


def tpots(rows: list[Row], model: str, capacity: int, policy: str) -> list[float]:
    """Mean TPOT by link. Units: milliseconds."""
    here = select(rows, model=model, capacity=capacity, policy=policy)
    return [1e3 * mean_of(select(here, link=link), "tpot_s") for link in LINKS_GB_PER_S]


def tables(rows: list[Row]) -> list[Table]:
    lines = []
    for model in MODELS:
        for capacity in CAPACITIES:
            for policy in POLICIES:
                here = select(rows, model=model, capacity=capacity, policy=policy)
                found = tpots(rows, model, capacity, policy)
                at_64 = select(here, link=64)
                lines.append(
                    (
                        f"{model}, C={capacity}",
                        policy,
                        *(f"{value:.1f}" for value in found),
                        f"{found[0] / found[-1]:.2f}",
                        cell(at_64, "hit_rate", scale=100),
                        cell(at_64, "expert_cache_utilization", scale=100),
                    )
                )
    header = (
        "model", "policy", *(f"{link} GB/s" for link in LINKS_GB_PER_S), "16 over 128",
        "hit rate at 64, %", "utilisation at 64, %",
    )  # fmt: skip
    return [Table("TPOT by the link's rate, ms; mean of three seeds.", header, tuple(lines))]


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
