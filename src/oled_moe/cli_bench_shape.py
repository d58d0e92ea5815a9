"""`oled-moe bench --shape`: full-size runs without weights; flags, table, JSON, rows.

Results go to stdout, progress to stderr. Torch and numpy are imported inside functions.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from oled_moe.cli_flags import SamplingFlags, flag
from oled_moe.cli_shared import (
    print_json,
    print_notice,
    print_rows,
    print_table,
    status_line,
    wrapped,
)
from oled_moe.cli_text import count, device_name, percent, seconds
from oled_moe.config import EngineConfig, check_int, format_size
from oled_moe.errors import ConfigError
from oled_moe.shapes import SHAPES, Shape, find_shape

if TYPE_CHECKING:
    from oled_moe.replay_bench import ReplayReport

DEFAULT_FORWARDS = 40
# Of the experts of a layer, where no size is given.
_DEFAULT_SHARE = 0.25
_SHAPE_PANEL = "Full size without weights"


@dataclass(frozen=True, slots=True)
class ShapeFlags:
    """What is run where there are no weights."""

    shape: Annotated[
        str | None,
        flag(
            "--shape",
            metavar="NAME",
            panel=_SHAPE_PANEL,
            help=f"Random weights of this size instead of MODEL: {', '.join(SHAPES)}, or one of "
            "their published names.",
        ),
    ] = None
    moe_layers: Annotated[
        int | None,
        flag("--moe-layers", panel=_SHAPE_PANEL, help="Fewer MoE layers than the model has."),
    ] = None
    replay: Annotated[
        str | None,
        flag(
            "--replay",
            metavar="TRACE",
            panel=_SHAPE_PANEL,
            help="Where routing comes from: a trace file, or synth:PRESET[:key=value,...], as "
            "synth:llada2-mini:block=32, the default for the mini size.",
        ),
    ] = None
    forwards: Annotated[
        int | None,
        flag(
            "--forwards",
            panel=_SHAPE_PANEL,
            help=f"Denoising forwards that count; default: {DEFAULT_FORWARDS}.",
        ),
    ] = None
    checkpoint_dir: Annotated[
        Path | None,
        flag(
            "--checkpoint-dir",
            metavar="PATH",
            panel=_SHAPE_PANEL,
            help="Where random weights are kept; default: ~/.cache/oled-moe/shapes.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """What is asked of a run, all flags taken together; None is a default that the run finds."""

    flags: ShapeFlags
    policies: Sequence[str]
    capacities: Sequence[float]
    config: EngineConfig
    warmup: int | None
    repetitions: int
    save: Path | None
    as_json: bool


def check_shape_flags(shape: ShapeFlags, bench: Any, engine: Any, sampling: SamplingFlags) -> None:
    """Refuse what makes no sense together, by name. Raises: ConfigError."""
    if shape.shape is None:
        for name in _given(shape, [field.name for field in fields(ShapeFlags)]):
            raise ConfigError(f"{name} goes with --shape; name a shape, or leave it out")
        return
    remedies = {"--capacity": "--experts-per-layer C,C", "--out": "--json or --save"}
    names = ("prompts", "num_prompts", "capacity", "is_quick", "is_raw", "out")
    not_here = ("expert_memory", "memory", "lossy", "low_precision")
    unused = [*_given(bench, names), *_given(engine, not_here)]
    unused += _given(sampling, [field.name for field in fields(SamplingFlags)])
    for name in unused:
        instead = remedies.get(name, "")
        if name in ("--expert-memory", "--memory"):
            instead = "--experts-per-layer"
        raise ConfigError(
            f"{name} does not go with --shape; "
            + (f"give {instead}" if instead else "leave it out")
        )


def _given(flags: Any, names: Sequence[str]) -> list[str]:
    """Which flags differ from their defaults, as they are typed."""
    default = type(flags)()
    return [
        "--" + name.removeprefix("is_").replace("_", "-")
        for name in names
        if getattr(flags, name) != getattr(default, name) and getattr(flags, name) != []
    ]


def run_shape(run: ShapeRun) -> int:
    """Check everything, make the weights, replay, print. Raises: OledMoeError of any kind."""
    flags = run.flags
    assert flags.shape is not None
    shape = find_shape(flags.shape)
    config = shape.config_with(flags.moe_layers)
    forwards = DEFAULT_FORWARDS if flags.forwards is None else flags.forwards
    check_int("forwards", forwards, minimum=1)
    check_int("repetitions", run.repetitions, minimum=1)
    if run.warmup is not None:
        check_int("warmup", run.warmup, minimum=0)
    capacities = run.capacities or [_DEFAULT_SHARE * shape.num_experts]
    with status_line() as say:
        say("loading torch")
        from oled_moe.random_checkpoint import default_directory, make_random_checkpoint
        from oled_moe.replay import MAX_WARMUP, load_replay
        from oled_moe.replay_bench import (
            check_cases,
            check_length,
            num_replayed,
            run_replay_bench,
            shape_of_config,
            warmup_for,
        )

        experts = shape_of_config(config)
        cases = check_cases(run.policies, capacities, experts)
        most_warmup = MAX_WARMUP if run.warmup is None else run.warmup
        spec = flags.replay or f"synth:{shape.preset}:block={shape.block_length}"
        replay = load_replay(spec, experts, num_forwards=num_replayed(forwards, most_warmup))
        warmup = warmup_for(replay.trace, capacities) if run.warmup is None else run.warmup
        check_length(replay, forwards, warmup)

        def progress(what: str, done: int, total: int) -> None:
            say(f"{what}: {format_size(done)} of {format_size(total)}" if total else what)

        directory = flags.checkpoint_dir or default_directory()
        name = f"{shape.name}-{experts.num_layers}layers"
        path = make_random_checkpoint(config, directory / name, progress=progress)
        report = run_replay_bench(
            path,
            replay,
            cases,
            run.config,
            num_forwards=forwards,
            num_warmup=warmup,
            repetitions=run.repetitions,
            progress=say,
        )
    facts = _facts(shape, experts.num_layers)
    _print(report, facts, run)
    return 0


def _facts(shape: Shape, num_moe_layers: int) -> dict[str, Any]:
    return {
        "shape": shape.name,
        "model": f"{shape.name}, {num_moe_layers} of {shape.num_moe_layers} MoE layers",
        "note": shape.note,
    }


def _print(report: "ReplayReport", facts: Mapping[str, Any], run: ShapeRun) -> None:
    values = {**facts, **report.to_dict()}
    values["notes"] = _notes(values)
    if run.save is not None:
        with run.save.open("a", encoding="utf-8") as file:
            for row in report.rows():
                line = {**row, **facts, "notes": values["notes"]}
                file.write(json.dumps(line, default=str, allow_nan=False) + "\n")
        print_notice(f"rows appended to {run.save}")
    if run.as_json:
        print_json(values)
        return
    print_rows(_setup_rows(values))
    print()
    print_table(_HEADER, [_run_row(each) for each in values["runs"]], num_keys=2)
    print()
    print(wrapped(_READING))
    for remark in values["notes"]:
        print(wrapped(f"Note: {remark}"))


_HEADER = (
    "policy", "C", "forward", "roof", "ratio", "bound", "hits", "missed", "deciding",
)  # fmt: skip
_READING = (
    "forward: median over the denoising forwards that count, in its 95 % interval. roof: what the "
    "limits leave as the shortest time of such a forward, its median, at the rates measured just "
    "before and after it (those of disks and shared machines change within seconds, so a ratio may "
    "fall below 1); bound says what sets it. "
    "missed: bytes that had to be copied for one. deciding: planning as a share of the time."
)


def _run_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        run["policy"],
        f"{run['experts_per_layer']:g}",
        _interval(run["forward_s_median"], *run["forward_s_ci"]),
        seconds(run["roofline_s"]),
        f"{run['roofline_ratio']:.2f}",
        run["bound"],
        percent(run["hit_rate"]),
        format_size(run["miss_bytes_per_forward"]),
        percent(run["planning_share"]),
    )


def _interval(middle: float, low: float, high: float) -> str:
    """`742 ms [700, 801]`: the interval in the unit of the median."""
    scale, unit = (1.0, "s") if middle >= 1 else (1e3, "ms")
    values = (scale * value for value in (middle, low, high))
    middle_text, *ends = (f"{v:.0f}" if v >= 1000 else f"{v:.3g}" for v in values)
    return f"{middle_text} {unit} [{', '.join(ends)}]"


def _setup_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    hardware, limits, runs = values["hardware"], values["limits"], values["runs"]
    first = runs[0]
    peaks = ", ".join(
        f"{format_size(run['peak_rss_bytes'])} of {format_size(run['plan_bytes'])}" for run in runs
    )
    return [
        ("model", f"{values['model']}, {values['dtype']}, random weights"),
        ("weights", values["checkpoint"]),
        ("routing", f"replayed: {values['replay']}"),
        ("device", device_name(values["device"])),
        ("CPU experts", "on" if values["has_cpu_experts"] else "off"),
        ("hardware", f"{hardware['name']} ({hardware['source']})"),
        (
            "forwards",
            f"{count(first['num_forwards'], 'denoising forward')} of {values['block_length']} "
            f"tokens a block counted, {first['num_warmup']} of any kind before them not",
        ),
        ("limits at best", _limit_words(limits)),
        ("memory", f"peak of the plan: {peaks}"),
        (
            "machine",
            f"others kept {values['other_busy_cores']:.2f} cores busy; load average "
            f"{values['load_average_before'][0]:.2f} before",
        ),
    ]


def _limit_words(limits: Mapping[str, Any]) -> str:
    read, matrix, disk = limits["read"], limits["matrix"], limits["disk"]
    words = (
        f"reads {read['bytes_per_s'] / 1e9:.1f} GB/s ({read['method']}, "
        f"{count(read['num_threads'], 'thread')}), {matrix['flops_per_s'] / 1e9:.0f} GFLOP/s "
        f"({matrix['dtype']}), disk {disk['bytes_per_s'] / 1e9:.2f} GB/s ({disk['method']}, "
        f"{disk['queue_depth']} in flight)"
    )
    link = limits["link"]
    if link is None:
        return words
    return f"{words}, link {link['bytes_per_s'] / 1e9:.1f} GB/s ({link['method']})"


def _notes(values: Mapping[str, Any]) -> list[str]:
    """What a reader must know of these numbers."""
    source = values["trace_source"]
    notes = [
        f"The weights are random and the routing is replayed ({source}): sizes, loads and times "
        "are those of a real model of this shape, its tokens mean nothing."
    ]
    notes += [values["note"]] if values["note"] else []
    notes += values["limits"]["notes"]
    if values["is_emulated"]:
        notes.append(
            "Emulated device: the link's speed is set, not measured, and the device computes on "
            "this CPU."
        )
    if not values["is_idle"]:
        notes.append(
            f"The machine was not idle: other processes kept {values['other_busy_cores']:.1f} "
            "cores busy, which shows in times."
        )
    if not all(run["is_cache_full"] for run in values["runs"]):
        notes.append("Some caches were not full when counting began; give a larger --warmup.")
    return notes
