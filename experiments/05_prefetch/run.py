"""Prefetch into staging: how near a forward comes to its busiest lane's demanded work.

    python -m experiments.05_prefetch.run

Writes results/raw/05_prefetch.jsonl and the README's tables. Rows are of these `part`s: trace,
grid (sizes, machines, staging), memory (staging slots given to the cache instead), cpu (CPU experts
on), combine (other retentions), sweep (depth and least probability), demo (recorded traces).
"""

from collections.abc import Iterator, Sequence

from experiments.paper.common import (
    DEMO_FAMILIES,
    Row,
    Table,
    demo_trace,
    mixed,
    ms,
    percent,
    select,
)
from experiments.studies import plain_row, run_study, study_row
from oled_moe.counters import ratio
from oled_moe.trace_stats import describe_trace
from oled_moe.traces import RoutingTrace

STUDY = "05_prefetch"
MACHINES = {
    "mini": ("testbed-a", "rtx4090-ddr5", "rtx3060-laptop", "h200"),
    "flash": ("testbed-b", "rtx4090-ddr5", "h200"),
}
# About 1/3, 1/2, 2/3 and 1 × the mean active set, and beyond.
CAPACITIES = {"mini": (20, 30, 40, 60, 100, 200), "flash": (30, 45, 60, 90, 100, 200)}
# The engine's default is the first.
STAGING = (8, 32, 64)
MOST = STAGING[-1]
WITHOUT, WITH = "oled+", "oled+prefetch"
SIZE = {"num_requests": 3, "num_warmup": 1, "answer_tokens": 32}
CPU_STAGING = (STAGING[0], MOST)
# Where other retentions and parameters are tried.
FEW_MACHINES, FEW_CAPACITIES = ("testbed-a", "rtx4090-ddr5"), (20, 40, 60)
PAIRS = (
    ("naive-lru", "naive-lru:prefetch=reuse"),
    ("oled", "oled:prefetch=reuse"),
    (WITHOUT, WITH),
)
SWEEP_CAPACITY, DEPTHS, LEASTS = 40, (1, 2, 3), (0.1, 0.2, 0.4, 0.6)
DEMO_MACHINE, DEMO_MULTIPLES, DEMO_STAGING = "rtx3060-laptop", (0.4, 0.67, 1.0), 16
DEMO_POLICIES = (WITHOUT, WITH, "oled+prefetch:words=true")
TARGET = 0.10


def make_rows() -> Iterator[Row]:
    for model, machines in MACHINES.items():
        trace = mixed(model, **SIZE)
        yield trace_row(trace, part="trace", model=model)
        for machine in machines:
            yield from grid_rows(trace, model, machine)
            yield from memory_rows(trace, model, machine)
    trace = mixed("mini", **SIZE)
    for machine in MACHINES["mini"]:
        yield from cpu_rows(trace, machine)
    for machine in FEW_MACHINES:
        yield from combine_rows(trace, machine)
    yield from sweep_rows(trace)
    for family in DEMO_FAMILIES:
        for is_slow in (False, True):
            yield from demo_rows(family, is_slow)


def trace_row(trace: RoutingTrace, **labels: object) -> Row:
    stats = describe_trace(trace)
    assert stats is not None
    return plain_row(STUDY, trace, active=stats.activation.mean, **labels)


def staged_row(
    trace: RoutingTrace,
    policy: str,
    C: float,
    machine: str,
    staging: int,
    *,
    has_cpu_experts: bool = False,
    **labels: object,
) -> Row:
    """`has_prefetch` and `machine` tell rows apart; `num_staging` is in the report."""
    options = {"num_staging": staging, "has_cpu_experts": has_cpu_experts}
    has_prefetch = "prefetch" in policy
    return study_row(
        STUDY, trace, policy, C, machine, options=options,
        machine=machine, has_prefetch=has_prefetch, **labels,
    )  # fmt: skip


def grid_rows(trace: RoutingTrace, model: str, machine: str) -> Iterator[Row]:
    for capacity in CAPACITIES[model]:
        for staging in STAGING:
            for policy in (WITHOUT, WITH):
                yield staged_row(
                    trace, policy, capacity, machine, staging, part="grid", model=model
                )


def memory_rows(trace: RoutingTrace, model: str, machine: str) -> Iterator[Row]:
    """No prefetch, the fewest staging slots, and the others as slots of the cache."""
    for capacity in CAPACITIES[model][:4]:
        more = capacity + (MOST - STAGING[0]) / trace.num_moe_layers
        yield staged_row(
            trace, WITHOUT, more, machine, STAGING[0], part="memory", model=model, beside=capacity
        )


def cpu_rows(trace: RoutingTrace, machine: str) -> Iterator[Row]:
    for staging in CPU_STAGING:
        for capacity in FEW_CAPACITIES:
            for policy in (WITHOUT, WITH):
                yield staged_row(
                    trace, policy, capacity, machine, staging, has_cpu_experts=True, part="cpu",
                    model="mini",
                )  # fmt: skip


def combine_rows(trace: RoutingTrace, machine: str) -> Iterator[Row]:
    for capacity in FEW_CAPACITIES:
        for pair in PAIRS[:2]:
            for policy in pair:
                yield staged_row(
                    trace, policy, capacity, machine, MOST, part="combine", model="mini"
                )


def sweep_rows(trace: RoutingTrace) -> Iterator[Row]:
    for machine in FEW_MACHINES:
        for depth in DEPTHS:
            for least in LEASTS:
                policy = f"{WITH}:depth={depth},least={least:g}"
                yield staged_row(
                    trace, policy, SWEEP_CAPACITY, machine, MOST, part="sweep", model="mini",
                    depth=depth, least=least,
                )  # fmt: skip


def demo_rows(family: str, is_slow: bool) -> Iterator[Row]:
    trace = demo_trace(family, is_slow, num_warmup=3 if is_slow else 8)
    stats = describe_trace(trace)
    assert stats is not None
    case = f"demo-{family}{'-slow' if is_slow else ''}"
    for multiple in DEMO_MULTIPLES:
        capacity = round(multiple * stats.activation.mean, 2)
        for policy in DEMO_POLICIES:
            yield staged_row(
                trace, policy, capacity, DEMO_MACHINE, DEMO_STAGING, part="demo",
                case=case, is_slow=is_slow, multiple=multiple,
            )  # fmt: skip


# Tables


def tables(rows: list[Row]) -> list[Table]:
    return [
        trace_table(rows),
        *(grid_table(rows, model) for model in MACHINES),
        *(byte_table(rows, model) for model in MACHINES),
        memory_table(rows),
        cpu_table(rows),
        combine_table(rows),
        sweep_table(rows),
        demo_table(rows),
    ]


def one(rows: Sequence[Row], **labels: object) -> Row:
    (row,) = select(rows, **labels)
    return row


def above(row: Row) -> str:
    """How much longer than its busiest lane's demanded work a forward takes, %."""
    return f"{100 * (row['forward_to_busiest_lane'] - 1):.1f}"


def change(row: Row, base: Row) -> str:
    return f"{100 * (row['forward_s'] / base['forward_s'] - 1):+.1f}"


def trace_table(rows: list[Row]) -> Table:
    lines = []
    for row in select(rows, part="trace"):
        model = row["model"]
        first = select(rows, part="grid", model=model)[0]
        lines.append(
            (
                model,
                f"{first['num_requests']} of {row['trace']['num_requests']}",
                str(first["num_denoise_forwards"]),
                f"{row['active']:.1f} of {row['trace']['num_experts']}",
            )
        )
    header = ("model", "requests measured", "denoising forwards", "active")
    return Table("The synthetic traces.", header, tuple(lines))


def grid_table(rows: list[Row], model: str) -> Table:
    (trace,) = select(rows, part="trace", model=model)
    lines = []
    for machine in MACHINES[model]:
        for capacity in CAPACITIES[model]:
            here = select(rows, part="grid", model=model, machine=machine, capacity=capacity)
            base = [one(here, has_prefetch=False, num_staging=s) for s in STAGING]
            ours = [one(here, has_prefetch=True, num_staging=s) for s in STAGING]
            lines.append(
                (
                    machine,
                    f"{capacity} ({capacity / trace['active']:.2f})",
                    ms(base[-1]["busiest_lane_s"]),
                    ms(base[-1]["forward_s"]),
                    ms(ours[-1]["forward_s"]),
                    change(ours[-1], base[-1]),
                    above(base[0]),
                    above(base[-1]),
                    *(above(row) for row in ours),
                )
            )
    header = (
        "machine", "C (× active)", "busiest lane, ms", "`oled+`, ms", "with prefetch, ms",
        "change, %", "`oled+` above bound, %, staging 8", "64",
        *(f"prefetch above bound, %, staging {staging}" for staging in STAGING[:1]),
        *(f"{staging}" for staging in STAGING[1:]),
    )  # fmt: skip
    title = f"{model}: a denoising forward against its busiest lane; times at {MOST} staging slots."
    return Table(title, header, tuple(lines))


def giga(row: Row, name: str) -> str:
    return f"{row[name] / 1e9:.2f}"


def byte_table(rows: list[Row], model: str) -> Table:
    lines = []
    for machine in MACHINES[model]:
        for capacity in CAPACITIES[model]:
            here = select(
                rows, part="grid", model=model, machine=machine, capacity=capacity, num_staging=MOST
            )
            base, ours = one(here, has_prefetch=False), one(here, has_prefetch=True)
            lines.append((machine, str(capacity), giga(base, "bytes_loaded"), *copied(base, ours)))
    header = ("machine", "C", "without: loaded, GB", *COPIED)
    title = f"{model}: bytes and lanes at {MOST} staging slots, over the measured requests."
    return Table(title, header, tuple(lines))


COPIED = (
    "with: loaded, GB", "useful, GB", "late, GB", "wasted, GB", "wasted of all copies, %",
    "copy lane busy, %", "device busy, %",
)  # fmt: skip


def copied(base: Row, ours: Row) -> tuple[str, ...]:
    both = [
        f"{percent(base[n])} to {percent(ours[n])}" for n in ("copy_occupancy", "device_occupancy")
    ]
    return (
        giga(ours, "bytes_loaded"),
        *(giga(ours, f"{kind}_prefetched_bytes") for kind in ("useful", "late", "wasted")),
        percent(wasted_share(ours)),
        *both,
    )


def wasted_share(row: Row) -> float:
    """Of all bytes copied."""
    copied_bytes = row["bytes_loaded"] + row["prefetched_bytes"]
    return ratio(row["wasted_prefetched_bytes"], copied_bytes)


def memory_table(rows: list[Row]) -> Table:
    lines = []
    for row in select(rows, part="memory"):
        ours = one(
            rows, part="grid", model=row["model"], machine=row["machine"],
            capacity=row["beside"], num_staging=MOST, has_prefetch=True,
        )  # fmt: skip
        lines.append(
            (
                row["model"],
                row["machine"],
                str(row["num_slots"] + row["num_staging"]),
                f"{row['capacity']:g} + {row['num_staging']}",
                ms(row["forward_s"]),
                f"{row['beside']} + {ours['num_staging']}",
                ms(ours["forward_s"]),
                change(ours, row),
            )
        )
    header = (
        "model", "machine", "slots in all", "without: C + staging", "`oled+`, ms",
        "with: C + staging", "`oled+prefetch`, ms", "change, %",
    )  # fmt: skip
    return Table(
        "Equal memory: the staging slots given to the cache instead.", header, tuple(lines)
    )


def cpu_table(rows: list[Row]) -> Table:
    lines = []
    cells = [
        (machine, staging, capacity)
        for machine in MACHINES["mini"]
        for staging in CPU_STAGING
        for capacity in FEW_CAPACITIES
    ]
    for machine, staging, capacity in cells:
        here = select(rows, part="cpu", machine=machine, capacity=capacity, num_staging=staging)
        base, ours = one(here, has_prefetch=False), one(here, has_prefetch=True)
        lines.append(
            (
                machine,
                str(staging),
                str(capacity),
                ms(base["forward_s"]),
                ms(ours["forward_s"]),
                change(ours, base),
                above(base),
                above(ours),
                f"{base['cpu_expert_runs']} to {ours['cpu_expert_runs']}",
                *(giga(ours, f"{kind}_prefetched_bytes") for kind in ("useful", "late", "wasted")),
            )
        )
    header = (
        "machine", "staging", "C", "`oled+`, ms", "with prefetch, ms", "change, %",
        "above its own bound, %", "with prefetch", "CPU runs", "useful, GB", "late, GB",
        "wasted, GB",
    )  # fmt: skip
    return Table("With CPU experts: mini.", header, tuple(lines))


def combine_table(rows: list[Row]) -> Table:
    lines = []
    for machine in FEW_MACHINES:
        for capacity in FEW_CAPACITIES:
            here = select(rows, part="combine", machine=machine, capacity=capacity)
            here += select(
                rows, part="grid", model="mini", machine=machine, capacity=capacity,
                num_staging=MOST,
            )  # fmt: skip
            for plain, guessing in PAIRS:
                base, ours = one(here, policy=plain), one(here, policy=guessing)
                lines.append(
                    (
                        machine,
                        str(capacity),
                        f"`{plain}`",
                        ms(base["forward_s"]),
                        ms(ours["forward_s"]),
                        change(ours, base),
                        above(base),
                        above(ours),
                    )
                )
    header = (
        "machine", "C", "retention", "without, ms", "with prefetch, ms", "change, %",
        "above bound, %", "with prefetch",
    )  # fmt: skip
    title = f"With other retentions: mini, {MOST} staging slots, no CPU experts."
    return Table(title, header, tuple(lines))


def sweep_table(rows: list[Row]) -> Table:
    lines = []
    for machine in FEW_MACHINES:
        for depth in DEPTHS:
            cells = [
                one(rows, part="sweep", machine=machine, depth=depth, least=least)
                for least in LEASTS
            ]
            lines.append(
                (
                    machine,
                    str(depth),
                    *(f"{above(row)} / {percent(wasted_share(row))}" for row in cells),
                )
            )
    header = ("machine", "depth", *(f"least {least:g}" for least in LEASTS))
    title = (
        f"Depth and least probability: mini, C = {SWEEP_CAPACITY}, {MOST} staging slots; % above "
        "the bound / % of all copies wasted."
    )
    return Table(title, header, tuple(lines))


def demo_table(rows: list[Row]) -> Table:
    demo = select(rows, part="demo")
    lines = []
    for case in {row["case"]: None for row in demo}:
        for multiple in DEMO_MULTIPLES:
            here = select(demo, case=case, multiple=multiple)
            base, ours, words = (one(here, policy=policy) for policy in DEMO_POLICIES)
            lines.append(
                (
                    case,
                    f"{multiple:g}",
                    *(ms(row["forward_s"]) for row in (base, ours, words)),
                    *(above(row) for row in (base, ours, words)),
                    *(f"{percent(useful_share(row))}" for row in (ours, words)),
                )
            )
    header = (
        "trace", "× active", "`oled+`, ms", "prefetch", "with words", "above bound, %", "prefetch",
        "with words", "used of bytes copied ahead, %", "with words",
    )  # fmt: skip
    title = f"The demo model's traces on {DEMO_MACHINE}, {DEMO_STAGING} staging slots."
    return Table(title, header, tuple(lines))


def useful_share(row: Row) -> float:
    """Useful or late, of what was copied ahead."""
    used = row["useful_prefetched_bytes"] + row["late_prefetched_bytes"]
    return ratio(used, row["prefetched_bytes"])


def main() -> None:
    run_study(STUDY, make_rows, tables)


if __name__ == "__main__":
    main()
