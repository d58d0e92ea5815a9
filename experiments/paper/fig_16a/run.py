"""Figure 16a: how many sequences share a forward.

python -m experiments.paper.fig_16a.run
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from experiments.paper.common import (
    CAPACITIES,
    HARDWARE,
    MODELS,
    NUM_WARMUP_MIXED,
    Row,
    Table,
    percent,
    run_figure,
    select,
    simulate_row,
)
from experiments.paper.sweeps import short_mixed
from oled_moe.traces import RoutingTrace
from oled_moe.types import LayerDemand, LayerPlan

FIGURE = "16a"
BATCHES = (1, 2, 4, 8, 16, 32)
POLICIES = ("naive-lru", "oled")


class ActiveCounter:
    """What measured forwards that denoise demand: distinct experts a layer, and sequences."""

    def __init__(self) -> None:
        self.num_demands = self.num_active = self.num_sequences = 0

    def __call__(self, demand: LayerDemand, plan: LayerPlan) -> None:
        rows = demand.context.rows
        if demand.context.is_denoise and all(r.request_id >= NUM_WARMUP_MIXED for r in rows):
            self.num_demands += 1
            self.num_active += len(demand.expert_ids)
            self.num_sequences += len(rows)

    def numbers(self) -> Row:
        return {
            "active": self.num_active / self.num_demands,
            "sequences": self.num_sequences / self.num_demands,
        }


def while_full(trace: RoutingTrace, batch: int) -> RoutingTrace:
    """The trace up to the last forward with `batch` sequences; what follows only runs empty."""
    first_row = trace.forward_row_offset
    last = np.flatnonzero(np.diff(first_row) == batch)[-1]
    num_rows = int(first_row[last + 1])
    num_tokens = int(trace.row_token_offset[num_rows])
    cut = {
        name: array[: num_rows + 1 if name == "row_token_offset" else num_rows]
        if name.startswith("row_")
        else array[:num_tokens]
        for name, array in trace.tensors().items()
    }
    return dataclasses.replace(trace, **cut)


def make_rows(is_quick: bool) -> Iterator[Row]:
    for model in MODELS:
        for batch in BATCHES[:3] if is_quick else BATCHES:
            # The warm-up is among those that start; who is done makes place for the next.
            trace = short_mixed(
                model, 0, batch_size=batch, num_requests=max(6, 2 * batch), answer_tokens=48
            )
            trace = while_full(trace, batch)
            for capacity in CAPACITIES:
                for policy in POLICIES:
                    counter = ActiveCounter()
                    row = simulate_row(
                        FIGURE, trace, policy, capacity, HARDWARE[model],
                        options={"observers": (counter,)}, model=model, batch=batch,
                    )  # fmt: skip
                    # Requests that were cut off have no time per token.
                    yield row | counter.numbers() | {"tpot_s": None, "num_tokens": None}


def tables(rows: list[Row]) -> list[Table]:
    lines = []
    for model in MODELS:
        for batch in BATCHES:
            here = select(rows, model=model, batch=batch)
            if not here:
                continue
            texts = []
            for capacity in CAPACITIES:
                for policy in POLICIES:
                    row = select(here, capacity=capacity, policy=policy)[0]
                    texts.append(
                        f"{percent(row['expert_cache_utilization'])} / {percent(row['hit_rate'])}"
                    )
            active, experts = here[0]["active"], here[0]["trace"]["num_experts"]
            lines.append(
                (
                    model,
                    str(batch),
                    f"{here[0]['sequences']:.1f}",
                    f"{active:.0f} ({percent(active / experts)} %)",
                    *texts,
                )
            )
    header = (
        "model", "batch", "sequences a forward", "active experts of 256",
        *(f"C={capacity}, {policy}" for capacity in CAPACITIES for policy in POLICIES),
    )  # fmt: skip
    return [Table("Utilisation / hit rate, %; mixed workload, one seed.", header, tuple(lines))]


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
