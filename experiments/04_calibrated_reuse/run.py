"""Retention by calibrated reuse: hits against the paper's priority and clairvoyant retention.

    python -m experiments.04_calibrated_reuse.run

Writes results/raw/04_calibrated_reuse.jsonl and the README's tables. Rows are of these `part`s:
trace, hits, ablation, learning (longer demo traces, recorded on the way), synthetic, recency
(simple policies on one synthetic workload), seeds.
"""

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.paper.common import (
    DEMO_FAMILIES,
    MODELS,
    ROOT,
    SEEDS,
    WORKLOADS,
    Row,
    Table,
    demo_trace,
    percent,
    select,
    synthetic,
)
from experiments.studies import gap_closed, plain_row, run_study, study_row
from oled_moe.trace_stats import describe_trace
from oled_moe.traces import RoutingTrace, load_trace

STUDY = "04_calibrated_reuse"
# With CPU experts off no decision depends on the machine; only times would, and none is shown.
HARDWARE = "rtx3060-laptop"
OFF = {"has_cpu_experts": False}
MULTIPLES = (0.4, 0.67, 1.0, 1.33, 1.67)
POLICIES = (
    "naive-lru",
    "lfu",
    "priority",
    "oled",
    "oled+",
    "oled+:allocation=uniform",
    "oled+global",
    "belady",
    "oracle-total",
)
ABLATION = {
    "oled+": "oled+",
    "no state": "oled+:state=false",
    "no transition": "oled+:transition=false",
    "no rank": "oled+:rank=false",
    "no confidence": "oled+:confidence=false",
    "none of the four": "oled+:state=false,transition=false,rank=false,confidence=false",
    "with history": "oled+:history=true",
    "whole prefill": "oled+:prefill=whole",
}
ABLATION_MULTIPLES = (0.67, 1.0)
# What the gap is between, and who closes it.
BASE, OURS, BEST = "oled", "oled+", "belady"
# As many questions as every family has.
NUM_LONG, NUM_PARTS, LONG_MULTIPLE = 110, 5, 0.67
CAPACITIES = (20, 40, 60, 80, 100, 140, 200)
SYNTHETIC_POLICIES = ("oled", "oled+", "belady", "oracle-total")
SYNTHETIC_SIZE = {"num_requests": 4, "num_warmup": 1, "answer_tokens": 80}
# Where calibrated reuse loses on synthetic traces: what simple policies do there.
RECENCY_POLICIES = ("naive-lru", "lfu", "oled+:prefill=whole", "oled+:allocation=uniform")
RECENCY_CAPACITIES = (60, 100, 140)
SEEDS_CAPACITY = 60
TARGETS = {0.4: 0.40, 0.67: 0.40, 1.0: 0.28}


def make_rows() -> Iterator[Row]:
    for family in DEMO_FAMILIES:
        for is_slow in (False, True):
            name = f"demo-{family}{'-slow' if is_slow else ''}"
            trace = demo_trace(family, is_slow, num_warmup=3 if is_slow else 8)
            labels = {"case": name, "is_slow": is_slow}
            yield trace_row(trace, **labels)
            yield from demo_rows(trace, **labels)
    yield from learning_rows()
    for model in MODELS:
        for workload in WORKLOADS:
            yield from synthetic_rows(model, workload)
        yield from recency_rows(model)
        yield from seed_rows(model)


def trace_row(trace: RoutingTrace, **labels: object) -> Row:
    stats = describe_trace(trace)
    assert stats is not None
    return plain_row(
        STUDY,
        trace,
        part="trace",
        active=stats.activation.mean,
        steps_per_block=stats.steps_per_block,
        gap_1_overlap=stats.gaps[0].overlap,
        to_first_overlap=stats.boundaries[2].overlap,
        **labels,
    )


def demo_rows(trace: RoutingTrace, **labels: object) -> Iterator[Row]:
    for multiple in MULTIPLES:
        capacity = slots(trace, multiple)
        for policy in POLICIES:
            yield study_row(
                STUDY, trace, policy, capacity, HARDWARE, options=OFF,
                part="hits", multiple=multiple, **labels,
            )  # fmt: skip
        if multiple in ABLATION_MULTIPLES:
            for name, policy in ABLATION.items():
                yield study_row(
                    STUDY, trace, policy, capacity, HARDWARE, options=OFF,
                    part="ablation", multiple=multiple, variant=name, **labels,
                )  # fmt: skip


def slots(trace: RoutingTrace, multiple: float) -> float:
    """Slots per layer: `multiple` of the mean active set, all experts at most."""
    stats = describe_trace(trace)
    assert stats is not None
    return min(round(multiple * stats.activation.mean, 2), float(trace.num_experts))


def learning_rows() -> Iterator[Row]:
    """On traces of more requests, too large to keep: recorded into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / "experiments" / "03_traces" / "record.py"
        sizes = ["--num-requests", str(NUM_LONG), "--num-slow", "1"]
        command = [sys.executable, str(script), "--out", folder, *sizes]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for family in DEMO_FAMILIES:
            trace = load_trace(Path(folder) / f"demo-{family}.trace.safetensors")
            trace = dataclasses.replace(trace, extra={**trace.extra, "warmup_requests": 8})
            for policy in (BASE, OURS, BEST):
                yield study_row(
                    STUDY, trace, policy, slots(trace, LONG_MULTIPLE), HARDWARE, options=OFF,
                    part="learning", multiple=LONG_MULTIPLE, case=f"demo-{family}",
                )  # fmt: skip


def synthetic_rows(model: str, workload: str) -> Iterator[Row]:
    trace = synthetic(model, workload, **SYNTHETIC_SIZE)
    labels = {"case": f"{model}-{workload}", "model": model, "workload": workload}
    yield trace_row(trace, **labels) | {"part": "synthetic trace"}
    for capacity in CAPACITIES:
        for policy in SYNTHETIC_POLICIES:
            yield study_row(
                STUDY, trace, policy, capacity, HARDWARE, options=OFF, part="synthetic", **labels
            )


def recency_rows(model: str) -> Iterator[Row]:
    trace = synthetic(model, "math", **SYNTHETIC_SIZE)
    for capacity in RECENCY_CAPACITIES:
        for policy in RECENCY_POLICIES:
            yield study_row(
                STUDY, trace, policy, capacity, HARDWARE, options=OFF,
                part="recency", model=model, workload="math",
            )  # fmt: skip


def seed_rows(model: str) -> Iterator[Row]:
    """One cell with three seeds, to see what chance does."""
    for seed in SEEDS:
        trace = synthetic(model, "math", seed=seed, **SYNTHETIC_SIZE)
        for policy in (BASE, OURS, BEST):
            yield study_row(
                STUDY, trace, policy, SEEDS_CAPACITY, HARDWARE, options=OFF,
                part="seeds", model=model, workload="math",
            )  # fmt: skip


# Tables


GROUPS = {
    "default threshold": {"is_slow": False},
    "slow, one token a step": {"is_slow": True},
    "all six": {},
}


def tables(rows: list[Row]) -> list[Table]:
    return [
        trace_table(rows),
        *(hit_table(rows, name) for name in GROUPS),
        gap_table(rows),
        other_table(rows),
        first_step_table(rows),
        *learning_tables(rows),
        ablation_table(rows),
        synthetic_table(rows),
        recency_table(rows),
        seed_table(rows),
    ]


def trace_table(rows: list[Row]) -> Table:
    lines = []
    for row in select(rows, part="trace"):
        hits = select(rows, part="hits", case=row["case"], policy=OURS, multiple=1.0)[0]
        share = hits["num_first_demanded"] / hits["num_demanded"]
        overlap = "-" if row["gap_1_overlap"] is None else f"{row['gap_1_overlap']:.2f}"
        lines.append(
            (
                row["case"],
                f"{hits['num_requests']} of {row['trace']['num_requests']}",
                str(hits["num_denoise_forwards"]),
                f"{row['steps_per_block']:.1f}",
                percent(share),
                f"{row['active']:.1f} of {row['trace']['num_experts']}",
                overlap,
                f"{row['to_first_overlap']:.2f}",
            )
        )
    header = (
        "trace", "requests measured", "denoising forwards", "steps/block",
        "demand at a block's first step, %", "active",
        "overlap with the step before", "of a first step with the block before",
    )  # fmt: skip
    return Table("The recorded traces.", header, tuple(lines))


def hit_table(rows: list[Row], group: str) -> Table:
    lines = []
    for policy in POLICIES:
        cells = [
            select(rows, part="hits", policy=policy, multiple=multiple, **GROUPS[group])
            for multiple in MULTIPLES
        ]
        lines.append((f"`{policy}`", *(percent(hit_share(cell)) for cell in cells)))
    title = f"Hits of 100 demanded experts, pooled over the traces: {group}."
    return Table(title, ("policy", *times_active(MULTIPLES)), tuple(lines))


def times_active(multiples: Iterable[float]) -> tuple[str, ...]:
    return tuple(f"{multiple:g} × active" for multiple in multiples)


def hit_share(rows: Sequence[Row]) -> float:
    return total(rows, "num_hits") / total(rows, "num_demanded")


def total(rows: Sequence[Row], name: str) -> int:
    return sum(row[name] for row in rows)


def gap_of(rows: Sequence[Row], ours: str = OURS, name: str = "num_hits") -> float:
    """Gap closed over all traces in `rows` together."""
    ours_, base, best = (total(select(rows, policy=p), name) for p in (ours, BASE, BEST))
    return gap_closed(ours_, base, best)


def gap_span(rows: Sequence[Row]) -> tuple[float, float]:
    """5th and 95th percentile of the gap closed over resampled requests, each trace by itself."""
    rng = np.random.default_rng(0)
    sums = np.zeros((3, 1000))
    for case in {row["case"]: None for row in rows}:
        mine = select(rows, case=case)
        first = mine[0]["warm_up"]
        hits = [select(mine, policy=p)[0]["hits_by_request"][first:] for p in (OURS, BASE, BEST)]
        drawn = rng.integers(0, len(hits[0]), (1000, len(hits[0])))
        sums += np.array(hits)[:, drawn].sum(axis=2)
    shares = (sums[0] - sums[1]) / (sums[2] - sums[1])
    low, high = np.percentile(shares, (5, 95))
    return float(low), float(high)


def gap_table(rows: list[Row]) -> Table:
    hits = select(rows, part="hits")
    cases = [row["case"] for row in select(rows, part="trace")]
    groups = {case: select(hits, case=case) for case in cases}
    groups |= {f"**{name}**": select(hits, **where) for name, where in GROUPS.items()}
    lines = []
    for name, mine in groups.items():
        cells = []
        for multiple in MULTIPLES:
            here = select(mine, multiple=multiple)
            low, high = gap_span(here)
            cells.append(f"{100 * gap_of(here):.0f} ({100 * low:.0f} to {100 * high:.0f})")
        lines.append((name, *cells))
    targets = [f"{100 * TARGETS[m]:.0f}" if m in TARGETS else "-" for m in MULTIPLES]
    lines.append(("target", *targets))
    title = (
        "Gap closed by `oled+`, %: of the hits that `belady` has over `oled`. In brackets the 5th "
        "and 95th percentile when the measured requests are drawn anew."
    )
    return Table(title, ("trace", *times_active(MULTIPLES)), tuple(lines))


def other_table(rows: list[Row]) -> Table:
    """Gap closed by every policy that does not know the future."""
    hits = select(rows, part="hits")
    header = ["policy"]
    header += [f"{name}, {m:g}" for m in ABLATION_MULTIPLES for name in ("default", "slow", "all")]
    cells = [
        select(hits, multiple=multiple, **where)
        for multiple in ABLATION_MULTIPLES
        for where in GROUPS.values()
    ]
    lines = [
        (f"`{policy}`", *(f"{100 * gap_of(cell, policy):.0f}" for cell in cells))
        for policy in POLICIES
        if policy not in (BASE, BEST, "oracle-total")
    ]
    title = "The same measure for the other policies, %, traces pooled; below 0: worse than `oled`."
    return Table(title, tuple(header), tuple(lines))


def first_step_table(rows: list[Row]) -> Table:
    """Where the gap is, and where it is closed: at a block's first step, and later."""
    hits = select(rows, part="hits")
    lines = []
    for group, where in GROUPS.items():
        for multiple in ABLATION_MULTIPLES:
            here = select(hits, multiple=multiple, **where)
            gap, first = (
                total(select(here, policy=BEST), name) - total(select(here, policy=BASE), name)
                for name in ("num_hits", "num_first_hits")
            )
            later = [
                total(select(here, policy=p), "num_hits")
                - total(select(here, policy=p), "num_first_hits")
                for p in (OURS, BASE, BEST)
            ]
            lines.append(
                (
                    group,
                    f"{multiple:g}",
                    percent(first / gap),
                    f"{100 * gap_of(here, name='num_first_hits'):.0f}",
                    f"{100 * gap_closed(*later):.0f}",
                )
            )
    header = (
        "traces", "× active", "share of the gap at first steps, %",
        "closed there, %", "closed at later steps, %",
    )  # fmt: skip
    return Table("A block's first step against its later ones.", header, tuple(lines))


def learning_tables(rows: list[Row]) -> list[Table]:
    short = select(rows, part="hits", multiple=LONG_MULTIPLE)
    lines = [
        (case, *thirds(select(short, case=case), 3))
        for case in [row["case"] for row in select(rows, part="trace")]
    ]
    lines += [(f"**{name}**", *thirds(select(short, **where), 3)) for name, where in GROUPS.items()]
    header = ("trace", "first third", "second", "last")
    title = f"Gap closed at {LONG_MULTIPLE} × active by thirds of the requests, warm-up included, %"
    long = select(rows, part="learning")
    families = [f"demo-{family}" for family in DEMO_FAMILIES]
    longer = [(case, *thirds(select(long, case=case), NUM_PARTS)) for case in families]
    longer.append(("**all three**", *thirds(long, NUM_PARTS)))
    per_part = NUM_LONG // NUM_PARTS
    spans = [f"{part * per_part + 1} to {(part + 1) * per_part}" for part in range(NUM_PARTS)]
    return [
        Table(f"{title}.", header, tuple(lines)),
        Table(
            f"The same over {NUM_LONG} requests at the default threshold, by request, %.",
            ("trace", *spans),
            tuple(longer),
        ),
    ]


def thirds(rows: Sequence[Row], num_parts: int) -> tuple[str, ...]:
    """Gap closed in each of so many equal parts of the requests."""
    sums = np.zeros((3, num_parts))
    for index, policy in enumerate((OURS, BASE, BEST)):
        for row in select(rows, policy=policy):
            parts = np.array_split(np.array(row["hits_by_request"]), num_parts)
            sums[index] += [part.sum() for part in parts]
    shares = (sums[0] - sums[1]) / (sums[2] - sums[1])
    return tuple(f"{100 * share:.0f}" for share in shares)


def ablation_table(rows: list[Row]) -> Table:
    header = ["variant"]
    header += [f"{name}, {m:g}" for m in ABLATION_MULTIPLES for name in ("default", "slow", "all")]
    lines = []
    for variant in ABLATION:
        cells = []
        for multiple in ABLATION_MULTIPLES:
            for where in GROUPS.values():
                bounds = select(rows, part="hits", multiple=multiple, **where)
                mine = select(rows, part="ablation", multiple=multiple, variant=variant, **where)
                base, best = (total(select(bounds, policy=p), "num_hits") for p in (BASE, BEST))
                cells.append(f"{100 * gap_closed(total(mine, 'num_hits'), base, best):.1f}")
        lines.append((variant, *cells))
    title = "What each ingredient is worth: gap closed, %, traces pooled, at 0.67 and 1 × active."
    return Table(title, tuple(header), tuple(lines))


def misses(rows: Sequence[Row]) -> int:
    return total(rows, "num_demanded") - total(rows, "num_hits")


def synthetic_table(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        for capacity in CAPACITIES:
            here = select(rows, part="synthetic", model=model, capacity=capacity)
            base, ours, best, bound = (select(here, policy=policy) for policy in SYNTHETIC_POLICIES)
            changes = [
                misses(select(ours, workload=w)) / misses(select(base, workload=w)) - 1
                for w in WORKLOADS
            ]
            lines.append(
                (
                    model,
                    str(capacity),
                    percent(hit_share(base)),
                    f"{misses(base) / total(base, 'num_denoise_forwards'):.1f}",
                    f"{100 * (misses(ours) / misses(base) - 1):+.2f}",
                    f"{100 * min(changes):+.2f} to {100 * max(changes):+.2f}",
                    f"{100 * (misses(best) / misses(base) - 1):+.1f}",
                    f"{100 * (misses(bound) / misses(base) - 1):+.1f}",
                )
            )
    header = (
        "model", "C", "`oled` hits, %", "misses/forward", "misses of `oled+`, % more",
        "by workload", "`belady`", "`oracle-total`",
    )  # fmt: skip
    title = "Synthetic traces at the paper's sizes: misses against `oled`, three workloads pooled."
    return Table(title, header, tuple(lines))


def recency_table(rows: list[Row]) -> Table:
    policies = (OURS, *RECENCY_POLICIES, BEST)
    lines = []
    for model in MODELS:
        for capacity in RECENCY_CAPACITIES:
            here = select(rows, model=model, capacity=capacity, workload="math")
            here = select(here, part="synthetic") + select(here, part="recency")
            base = misses(select(here, policy=BASE))
            cells = [misses(select(here, policy=policy)) / base - 1 for policy in policies]
            lines.append((model, str(capacity), *(f"{100 * cell:+.1f}" for cell in cells)))
    header = ("model", "C", *(f"`{policy}`" for policy in policies))
    title = "Other policies on the synthetic workload math: misses, % more than `oled`."
    return Table(title, header, tuple(lines))


def seed_table(rows: list[Row]) -> Table:
    lines = []
    for model in MODELS:
        cells = []
        for seed in SEEDS:
            base, ours = (
                select(rows, part="seeds", model=model, seed=seed, policy=p) for p in (BASE, OURS)
            )
            cells.append(f"{100 * (misses(ours) / misses(base) - 1):+.2f}")
        lines.append((model, *cells))
    title = f"One cell with three seeds (math, C = {SEEDS_CAPACITY}): misses of `oled+`, % more."
    return Table(title, ("model", *(f"seed {seed}" for seed in SEEDS)), tuple(lines))


def main() -> None:
    run_study(STUDY, make_rows, tables)


if __name__ == "__main__":
    main()
