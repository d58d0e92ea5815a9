"""Figure 15b: each part of OLED-MoE against what it replaces, over cache sizes.

python -m experiments.paper.fig_15b.run
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from experiments.paper.common import (
    CAPACITIES,
    HARDWARE,
    MODELS,
    SEEDS,
    Row,
    Table,
    mean_of,
    percent,
    run_figure,
    select,
    simulate_row,
)
from experiments.paper.sweeps import cell, changes, over_seeds, short_mixed
from oled_moe.hardware import load_hardware
from oled_moe.policies import OffloadPolicy
from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import LoadAllDispatchPolicy
from oled_moe.policies.retention import PriorityRetentionPolicy
from oled_moe.simulator import simulate
from oled_moe.traces import RoutingTrace
from oled_moe.types import FloatArray, IntArray, LayerDemand, MoeShape, TokenState

FIGURE = "15b"
SIZES = (20, 40, 60, 80, 100, 120)
POLICIES = ("lfu", "naive-lru", "priority", "priority+adapt", "oled-load-aware", "oled")


class KnowingTrace(RoutingTrace):
    """Tells policies a forward's own confidence while its layers run (policies.md 5.1 b)."""

    __slots__ = ()

    def layer_time_confidence(self) -> npt.NDArray[np.float32]:
        known = np.nan_to_num(self.token_confidence, nan=1.0)
        return np.where(self.token_state == TokenState.MASKED, known, np.float32(1))


class UnsureTrace(RoutingTrace):
    """Tells policies no confidence: priority is gate weight alone."""

    __slots__ = ()

    def layer_time_confidence(self) -> npt.NDArray[np.float32]:
        return np.ones(self.num_tokens, dtype=np.float32)


class RandomTiesPolicy(PriorityRetentionPolicy):
    """Priority whose inactive residents leave in random order, not the longest unused first."""

    def __init__(self, shape: MoeShape) -> None:
        super().__init__(shape)
        self._random = np.random.default_rng(0)

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        scores = super().keep_scores(expert_ids, demand)
        return np.where(scores >= 0, scores, -self._random.random(len(scores)) - 1)


def _as(kind: type[RoutingTrace], trace: RoutingTrace) -> RoutingTrace:
    fields = dataclasses.fields(RoutingTrace)
    return kind(**{field.name: getattr(trace, field.name) for field in fields})


def _random_ties(shape: MoeShape) -> OffloadPolicy:
    return OffloadPolicy(
        "priority with random ties",
        RandomTiesPolicy(shape),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
    )


VARIANTS: dict[str, Callable[[RoutingTrace], RoutingTrace]] = {
    "this forward's confidence": lambda trace: _as(KnowingTrace, trace),
    "no confidence": lambda trace: _as(UnsureTrace, trace),
}
RANDOM_TIES = "random ties"


def make_rows(is_quick: bool) -> Iterator[Row]:
    for seed in SEEDS[:1] if is_quick else SEEDS:
        for model in MODELS:
            trace = short_mixed(model, seed, **({"answer_tokens": 32} if is_quick else {}))
            for capacity in SIZES:
                for policy in POLICIES:
                    yield simulate_row(
                        FIGURE, trace, policy, capacity, HARDWARE[model], model=model, variant=None
                    )
            yield from _variants(trace, model)


def _variants(trace: RoutingTrace, model: str) -> Iterator[Row]:
    for variant, change in VARIANTS.items():
        changed = change(trace)
        for capacity in CAPACITIES:
            yield simulate_row(
                FIGURE, changed, "priority", capacity, HARDWARE[model], model=model, variant=variant
            )
    for capacity in CAPACITIES:
        # The row of the policy by name, with the counts of the variant in their place.
        row = simulate_row(
            FIGURE, trace, "priority", capacity, HARDWARE[model], model=model, variant=RANDOM_TIES
        )
        yield row | _counts_of_random_ties(trace, row)


def _counts_of_random_ties(trace: RoutingTrace, row: Row) -> Row:
    report = simulate(
        trace,
        _random_ties(trace.shape),
        hardware=load_hardware(row["hardware"]["name"]),
        experts_per_layer=row["capacity"],
        warmup_requests=row["warm_up"],
    ).to_dict()
    labels = {"policy", "hardware", "trace", "trace_hash"}
    return {name: value for name, value in report.items() if name in row.keys() - labels}


def pairs(rows: list[Row], model: str, capacity: int) -> dict[str, list[float]]:
    """TPOT of each part against what it replaces, by seed, as shares of the latter."""
    here = select(rows, model=model, capacity=capacity, variant=None)

    def of(policy: str, base: str) -> list[float]:
        return changes(select(here, policy=policy), select(here, policy=base))

    return {
        "priority vs LRU": of("priority", "naive-lru"),
        "priority vs LFU": of("priority", "lfu"),
        "adapt vs uniform": of("priority+adapt", "priority"),
        "load+reuse vs load": of("oled", "oled-load-aware"),
    }


def tables(rows: list[Row]) -> list[Table]:
    return [_tpot(rows), _hits(rows), _transfers(rows), _variant_table(rows)]


def _tpot(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        for capacity in SIZES:
            found = pairs(rows, model, capacity)
            texts = [over_seeds(values, scale=100) for values in found.values()]
            lines.append((model, str(capacity), *texts))
    header = ("model", "C", *pairs(rows, "mini", SIZES[0]))
    title = "Change of TPOT, %; less is better. Mean of three seeds, and their distance from it."
    return Table(title, header, tuple(lines))


def _hits(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        for capacity in SIZES:
            here = select(rows, model=model, capacity=capacity, variant=None)
            texts = []
            for policy in POLICIES:
                mine = select(here, policy=policy)
                hits, used = (mean_of(mine, n) for n in ("hit_rate", "expert_cache_utilization"))
                texts.append(f"{percent(hits)} / {percent(used)}")
            lines.append((model, str(capacity), *texts))
    return Table("Hit rate / utilisation, %.", ("model", "C", *POLICIES), tuple(lines))


def _transfers(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        for capacity in SIZES:
            here = select(rows, model=model, capacity=capacity, variant=None)
            texts = []
            for policy in ("priority+adapt", "oled-load-aware", "oled"):
                mine = select(here, policy=policy)
                texts.append(cell(mine, "effective_transfer_ratio", scale=100))
                texts.append(f"{mean_of(mine, 'expert_loads'):.0f}")
            lines.append((model, str(capacity), *texts))
    header = (
        "model", "C", "priority+adapt, used %", "copies", "load only, used %", "copies",
        "load + reuse, used %", "copies",
    )  # fmt: skip
    return Table("Effective transfer ratio: copies used in the next forward.", header, tuple(lines))


def _variant_table(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        for capacity in CAPACITIES:
            here = select(rows, model=model, capacity=capacity, policy="priority")
            base = select(here, variant=None)
            texts = [cell(base, "hit_rate", scale=100, digits=2)]
            for variant in (*VARIANTS, RANDOM_TIES):
                mine = select(here, variant=variant)
                more = [
                    row["hit_rate"] - select(base, seed=row["seed"])[0]["hit_rate"] for row in mine
                ]
                texts.append(over_seeds(more, scale=100, digits=2))
            lines.append((model, str(capacity), *texts))
    header = ("model", "C", "priority, hit rate %", *VARIANTS, RANDOM_TIES)
    title = "Variants of priority: points of hit rate more."
    return Table(title, header, tuple(lines))


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
