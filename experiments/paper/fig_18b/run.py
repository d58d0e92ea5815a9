"""Figure 18b: how long deciding takes, per forward, measured on this machine.

python -m experiments.paper.fig_18b.run
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from experiments.paper.common import (
    CAPACITIES,
    HARDWARE,
    MODELS,
    Row,
    Table,
    num_warmup,
    run_figure,
    select,
    simulate_row,
)
from experiments.paper.paper_numbers import FIG_18B
from experiments.paper.sweeps import short_mixed, signed
from oled_moe.cache import ExpertCache
from oled_moe.costs import CostModel
from oled_moe.hardware import load_hardware
from oled_moe.policies import build_policy
from oled_moe.sizing import slots_of_layers, staging_beside
from oled_moe.traces import RoutingTrace
from oled_moe.types import LayerDemand

FIGURE = "18b"
POLICIES = ("naive-lru", "priority", "priority+adapt", "oled-load-aware", "oled", "oled+")
# The parts of `oled` that the paper's figure has, as roles of OffloadPolicy.
PARTS = {"priority": "retention", "adaptation": "allocation", "split": "dispatch"}
PART_POLICY = "oled"
NUM_PASSES = 3


class Timed:
    """Hands every call on and adds up how long they take."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return value(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start_s

        setattr(self, name, call)
        return call


def make_rows(is_quick: bool) -> Iterator[Row]:
    for model in MODELS:
        trace = short_mixed(model, 0)
        for capacity in CAPACITIES:
            for policy in POLICIES:
                yield measure(trace, model, policy, capacity, 1 if is_quick else NUM_PASSES)


def measure(trace: RoutingTrace, model: str, policy: str, capacity: int, num_passes: int) -> Row:
    """Medians over the measured forwards that denoise, of as many passes over the trace."""
    row = simulate_row(FIGURE, trace, policy, capacity, HARDWARE[model], model=model)
    kept = ("hit_rate", "expert_cache_utilization", "forward_s", "num_slots", "num_staging")
    passes = [replay(trace, model, policy, capacity) for _ in range(num_passes)]
    medians = [statistics.median(each["whole"]) for each in passes]
    every = sorted(seconds for each in passes for seconds in each["whole"])
    result = {key: value for key, value in row.items() if key in kept or key in _LABELS}
    result |= {
        "overhead_s": statistics.median(every),
        "quartiles_s": [every[len(every) // 4], every[3 * len(every) // 4]],
        "spread": max(medians) - min(medians),
        "repetitions": num_passes,
        "num_timed_forwards": len(every),
        "machine": "this one, shared with other work; not a testbed of the paper",
    }
    if policy == PART_POLICY:
        split = [replay(trace, model, policy, capacity, has_parts=True) for _ in passes]
        result["parts_s"] = {
            part: statistics.median(s for each in split for s in each[part]) for part in PARTS
        }
    return result


_LABELS = (
    "experiment", "version", "policy", "capacity", "model", "trace", "trace_hash", "seed",
    "warm_up", "scope", "hardware", "commit", "versions", "architecture", "num_cores",
)  # fmt: skip


def replay(
    trace: RoutingTrace, model: str, policy: str, capacity: int, *, has_parts: bool = False
) -> dict[str, list[float]]:
    """Seconds of each measured denoising forward: from its layers' routes to their plans, and what
    follows its logits. Making the demand (unique experts, token counts) is part of it."""
    shape = trace.shape
    slots = slots_of_layers(capacity, shape)
    costs = CostModel.from_profile(load_hardware(HARDWARE[model]), shape.expert_bytes)
    built = build_policy(policy, shape, costs)
    timed: dict[str, Timed] = {}
    if has_parts:
        timed = {part: Timed(getattr(built, role)) for part, role in PARTS.items()}
        built = replace(built, **{role: timed[part] for part, role in PARTS.items()})
    cache = ExpertCache(
        shape, built, num_slots=slots, num_staging=staging_beside(slots, shape),
        has_cpu_experts=True,
    )  # fmt: skip
    found: dict[str, list[float]] = {"whole": [], **{part: [] for part in timed}}
    gc.collect()
    gc.disable()
    try:
        for forward in trace.forwards(built.needs - {"token_position"}):
            before = {part: proxy.seconds for part, proxy in timed.items()}
            seconds = _seconds(lambda here=forward: cache.start_forward(here.context))
            for demand in forward.demands:
                seconds += _seconds(lambda here=demand: _plan(cache, here))
            seconds += _seconds(lambda here=forward: cache.end_forward(here.outcome))
            for request_id in forward.ended_requests:
                cache.end_request(request_id)
            rows = forward.context.rows
            if forward.context.is_denoise and rows[0].request_id >= num_warmup(trace):
                found["whole"].append(seconds)
                for part, proxy in timed.items():
                    found[part].append(proxy.seconds - before[part])
    finally:
        gc.enable()
    return found


def _plan(cache: ExpertCache, demand: LayerDemand) -> None:
    made = LayerDemand.from_routing(
        demand.layer, demand.context, demand.topk_ids, demand.gate_weights,
        num_experts=cache.shape.num_experts,
    )  # fmt: skip
    cache.plan(made)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def tables(rows: list[Row]) -> list[Table]:
    return [_against_paper(rows), _parts(rows), _policies(rows)]


def _against_paper(rows: list[Row]) -> Table:
    parts, forwards = FIG_18B["parts"].value, FIG_18B["forward_s"].value
    lines = []
    for model in MODELS:
        for capacity in CAPACITIES:
            row = select(rows, model=model, capacity=capacity, policy="oled")[0]
            ours, whole = row["overhead_s"], forwards[model, capacity]
            paper = sum(parts[model, capacity])
            lines.append(
                (
                    f"{model}, C={capacity}",
                    f"{1e3 * ours:.2f}",
                    f"{1e3 * paper * whole:.2f}",
                    f"{1e3 * row['forward_s']:.0f}",
                    f"{1e3 * whole:.0f}",
                    f"{100 * ours / row['forward_s']:.2f}",
                    f"{100 * paper:.2f}",
                )
            )
    header = (
        "model", "deciding, ms a forward", "paper", "forward, ms (simulated)", "paper",
        "share, %", "paper",
    )  # fmt: skip
    return Table("`oled`: medians over forwards that denoise.", header, tuple(lines))


def _parts(rows: list[Row]) -> Table:
    theirs, forwards = FIG_18B["parts"].value, FIG_18B["forward_s"].value
    lines = []
    for model in MODELS:
        for capacity in CAPACITIES:
            row = select(rows, model=model, capacity=capacity, policy=PART_POLICY)[0]
            texts = []
            for index, part in enumerate(PARTS):
                paper = theirs[model, capacity][index] * forwards[model, capacity]
                texts += [f"{1e3 * row['parts_s'][part]:.2f}", f"{1e3 * paper:.2f}"]
            lines.append((f"{model}, C={capacity}", *texts))
    header = ("model", *(text for part in PARTS for text in (f"{part}, ms", "paper")))
    title = "Its parts; each call is timed, which adds to them. The rest is the table of slots."
    return Table(title, header, tuple(lines))


def _policies(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        for capacity in CAPACITIES:
            for policy in POLICIES:
                row = select(rows, model=model, capacity=capacity, policy=policy)[0]
                base = select(rows, model=model, capacity=capacity, policy="naive-lru")[0]
                low, high = row["quartiles_s"]
                lines.append(
                    (
                        f"{model}, C={capacity}",
                        policy,
                        f"{1e3 * row['overhead_s']:.2f}",
                        f"{1e3 * low:.2f} to {1e3 * high:.2f}",
                        f"{1e6 * row['overhead_s'] / row['trace']['num_layers']:.0f}",
                        signed(row["overhead_s"] / base["overhead_s"] - 1, 0),
                        f"{100 * row['hit_rate']:.1f} / "
                        f"{100 * row['expert_cache_utilization']:.1f}",
                    )
                )
    header = (
        "model", "policy", "ms a forward", "quartiles", "us a layer", "over naive LRU, %",
        "hit rate / utilisation, %",
    )  # fmt: skip
    return Table("All policies.", header, tuple(lines))


def main() -> None:
    run_figure(FIGURE, make_rows, tables)


if __name__ == "__main__":
    main()
