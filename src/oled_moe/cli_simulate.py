"""`oled-moe simulate`: replays a routing trace under any policy on any hardware profile.

Results go to stdout, progress to stderr. Numpy is imported inside functions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oled_moe.cli_flags import Json, flag, takes_flags
from oled_moe.cli_shared import (
    LogFlags,
    print_json,
    print_rows,
    print_table,
    status_line,
    use_log_flags,
    wrapped,
)
from oled_moe.cli_text import percent, seconds
from oled_moe.config import format_size, parse_size, size_to_type
from oled_moe.errors import ConfigError, DoesNotFitError, OledMoeError
from oled_moe.registry import parse_spec

if TYPE_CHECKING:
    from oled_moe.simulator import SimulationReport
    from oled_moe.traces import RoutingTrace

DEFAULT_HARDWARE = "testbed-a"
DEFAULT_POLICY = "oled"
# Where no size is given: as much as the demo takes.
DEFAULT_EXPERT_MEMORY = "25%"

TracePath = Annotated[
    Path | None,
    typer.Argument(metavar="TRACE", help="A file NAME.trace.safetensors, recorded or synthetic."),
]


@dataclass(frozen=True, slots=True)
class SimulateFlags:
    """What is replayed, and where."""

    policy: Annotated[
        list[str] | None,
        flag(
            "--policy",
            metavar="NAME",
            help="NAME[:key=value,...]; repeat it for a table. tide:interval=best looks for the "
            f"best interval. --list tells all. Default: {DEFAULT_POLICY}.",
        ),
    ] = None
    experts_per_layer: Annotated[
        list[str] | None,
        flag(
            "--experts-per-layer",
            metavar="C",
            help="Expert slots per MoE layer, a mean: 40, or several as 20,40,100; staging comes "
            "on top.",
        ),
    ] = None
    expert_memory: Annotated[
        str | None,
        flag(
            "--expert-memory",
            metavar="SIZE",
            help="Memory for expert slots and staging: 8GiB, or 50% of all experts; "
            f"default: {DEFAULT_EXPERT_MEMORY}.",
        ),
    ] = None
    hardware: Annotated[
        str | None,
        flag(
            "--hardware",
            metavar="NAME",
            help="A built-in profile (testbed-a, testbed-b, rtx4090-ddr5, rtx3060-laptop, h200), "
            "this-machine as doctor measured it, or the path of a profile; "
            f"default: {DEFAULT_HARDWARE}.",
        ),
    ] = None
    no_cpu_experts: Annotated[
        bool, flag("--no-cpu-experts", help="Compute no missing expert on the CPU.")
    ] = False
    staging: Annotated[
        int | None, flag("--staging", help="Staging slots; default: as the engine has them.")
    ] = None
    warmup_requests: Annotated[
        int | None,
        flag("--warmup-requests", help="Requests replayed first and not measured; default: 0."),
    ] = None
    gantt: Annotated[
        Path | None,
        flag("--gantt", metavar="FILE.svg", help="Draw the lanes of one forward over time."),
    ] = None
    forward: Annotated[
        int | None,
        flag("--forward", help="The forward to draw, from 0; default: one in the middle."),
    ] = None


@dataclass(frozen=True, slots=True)
class _Size:
    """One size of the fast tier, as `simulate` takes it."""

    num_slots: int
    num_staging: int | None


@takes_flags
def simulate(
    trace: TracePath = None,
    flags: SimulateFlags = SimulateFlags(),
    is_list: Annotated[
        bool, flag("--list", help="Print every policy, its parameters and its source.")
    ] = False,
    as_json: Json = False,
    log: LogFlags = LogFlags(),
) -> None:
    """Replay a routing trace: hits are exact, times are those of a hardware profile."""
    use_log_flags(log)
    if is_list:
        _print_policies(as_json=as_json)
        return
    if trace is None:
        raise ConfigError("there is no trace; name a file, or see all policies with --list")
    with status_line() as say:
        say("reading the trace")
        from oled_moe.hardware import load_hardware
        from oled_moe.traces import load_trace

        hardware = load_hardware(flags.hardware or DEFAULT_HARDWARE)
        loaded = load_trace(trace)
        options = {
            "hardware": hardware,
            "has_cpu_experts": False if flags.no_cpu_experts else None,
            "warmup_requests": flags.warmup_requests or 0,
            "trace_name": trace.name,
            "trace_hash": _hash(trace),
        }
        results, extras = _replay_all(loaded, flags, options, say)
    if flags.gantt is not None:
        _draw(results[0], flags.gantt, _drawn_forward(loaded, flags))
    _print_results(results, extras, is_measured=hardware.is_measured, as_json=as_json)
    if flags.gantt is not None and not as_json:
        print(f"The lanes of one forward are drawn in {flags.gantt}.")


def _replay_all(
    trace: "RoutingTrace",
    flags: SimulateFlags,
    options: dict[str, Any],
    say: Callable[[str], None],
) -> "tuple[list[SimulationReport], list[dict[str, Any]]]":
    """A report for every policy and size, and what else is to be said of each."""
    sizes = _sizes(trace, flags)
    policies = flags.policy or [DEFAULT_POLICY]
    if flags.gantt is not None and flags.gantt.suffix.lower() != ".svg":
        raise ConfigError(f"gantt is {str(flags.gantt)!r}; the picture is an SVG: name it FILE.svg")
    if flags.gantt is not None and len(policies) * len(sizes) > 1:
        raise ConfigError("gantt draws one run; give one --policy and one --experts-per-layer")
    if flags.forward is not None and flags.gantt is None:
        raise ConfigError("forward says what to draw; give --gantt FILE.svg too")
    if flags.gantt is not None:
        options["record_forward"] = _drawn_forward(trace, flags)
    results, extras = [], []
    for policy in policies:
        for size in sizes:
            say(f"{policy}, {size.num_slots} slots")
            report, extra = _replay(trace, policy, size, options)
            results.append(report)
            extras.append(extra)
    return results, extras


def _replay(
    trace: "RoutingTrace", policy: str, size: _Size, options: Mapping[str, Any]
) -> "tuple[SimulationReport, dict[str, Any]]":
    from oled_moe.simulator import best_tide_interval, simulate

    name, parameters = parse_spec("policy", policy)
    sized = {**options, "num_slots": size.num_slots, "num_staging": size.num_staging}
    if name == "tide" and parameters.get("interval") == "best":
        del parameters["interval"]
        rest = ",".join(f"{key}={value}" for key, value in parameters.items())
        found = best_tide_interval(trace, parameters=rest, **sized)
        times = {str(interval): report.tpot_s for interval, report in found.reports.items()}
        return found.reports[found.best], {"interval": found.best, "tpot_s_by_interval": times}
    return simulate(trace, policy, **sized), {}


def _sizes(trace: "RoutingTrace", flags: SimulateFlags) -> list[_Size]:
    from oled_moe.sizing import slots_of_budget, slots_of_layers

    shape = trace.shape
    if flags.experts_per_layer and flags.expert_memory is not None:
        raise ConfigError("experts-per-layer and expert-memory are both given; give one of them")
    if flags.experts_per_layer:
        means = [_mean(part) for text in flags.experts_per_layer for part in text.split(",")]
        return [_Size(slots_of_layers(mean, shape), flags.staging) for mean in means]
    all_bytes = shape.num_experts_total * shape.expert_bytes
    text = flags.expert_memory or DEFAULT_EXPERT_MEMORY
    budget = parse_size("expert-memory", text, whole_bytes=all_bytes)
    if budget < shape.expert_bytes:
        raise DoesNotFitError(
            f"expert-memory is {format_size(budget)} and one expert takes "
            f"{format_size(shape.expert_bytes)}; raise it to "
            f"{size_to_type(shape.expert_bytes)} or more"
        )
    num_slots, num_staging = slots_of_budget(budget, shape)
    return [_Size(num_slots, num_staging if flags.staging is None else flags.staging)]


def _mean(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"experts-per-layer is {text!r}; write a number, or several as 20,40,100"
        ) from None


def _hash(path: Path) -> str:
    """SHA-256 of the file."""
    import hashlib

    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _drawn_forward(trace: "RoutingTrace", flags: SimulateFlags) -> int:
    """The forward that was asked for, else one in the middle that denoises."""
    if flags.forward is not None:
        return flags.forward
    middle: int = trace.num_forwards // 2
    row_of: list[int] = trace.forward_row_offset.tolist()
    phases: list[int] = trace.row_phase.tolist()
    order: list[int] = [*range(middle, trace.num_forwards), *range(middle)]
    for forward_id in order:
        if 1 in phases[row_of[forward_id] : row_of[forward_id + 1]]:
            return forward_id
    return middle


def _draw(report: "SimulationReport", path: Path, forward_id: int) -> None:
    from oled_moe.gantt import gantt_svg

    try:
        path.write_text(gantt_svg(report, forward_id), encoding="utf-8")
    except OSError as error:
        raise OledMoeError(
            f"{path}: cannot be written ({error.strerror}); name another file"
        ) from None


# Printing


def _print_results(
    results: "list[SimulationReport]",
    extras: list[dict[str, Any]],
    *,
    is_measured: bool,
    as_json: bool,
) -> None:
    values = [{**report.to_dict(), **extra} for report, extra in zip(results, extras, strict=True)]
    if as_json:
        print_json(values[0] if len(values) == 1 else {"results": values})
        return
    header = (
        "policy", "experts/layer", "hit rate", "utilisation", "per token", "first token",
        "loads", "on CPU", "copied ahead", "of which used",
    )  # fmt: skip
    print_table(header, [_row(report) for report in results], num_keys=2)
    for report, extra in zip(results, extras, strict=True):
        if extra:
            times = extra["tpot_s_by_interval"]
            told = ", ".join(f"{i}: {seconds(times[i])}" for i in dict.fromkeys(("1", "2")))
            print(
                f"Best interval {extra['interval']}: {seconds(report.tpot_s)} per token ({told})."
            )
    first = results[0]
    print()
    where = (
        "measured here"
        if is_measured
        else ("from data sheets, not measured: its JSON in oled_moe/hardware says how")
    )
    cpu = "with CPU experts" if first.has_cpu_experts else "without CPU experts"
    print_rows(
        [
            ("simulated on", f"{first.hardware} ({where}), {cpu}"),
            ("trace", f"{first.trace}, {first.trace_source}, sha256 {first.trace_hash[:12]}"),
            (
                "counted",
                f"{first.num_forwards} forwards of {first.num_requests} requests, "
                f"{first.num_tokens} tokens"
                + (f", after {first.warmup_requests} to warm up" if first.warmup_requests else ""),
            ),
        ]
    )


def _row(report: "SimulationReport") -> tuple[str, ...]:
    used = report.useful_prefetched_bytes + report.late_prefetched_bytes
    ahead = report.prefetched_bytes
    return (
        report.policy,
        f"{report.experts_per_layer:.4g}",
        percent(report.hit_rate),
        percent(report.expert_cache_utilization),
        seconds(report.tpot_s),
        seconds(report.ttft_s),
        str(report.expert_loads),
        str(report.cpu_expert_runs),
        format_size(ahead) if ahead else "-",
        percent(used / ahead) if ahead else "-",
    )


def _print_policies(*, as_json: bool) -> None:
    from oled_moe.policies import POLICIES

    if as_json:
        print_json(
            {
                "policies": [
                    {
                        "name": name,
                        "summary": entry.summary,
                        "parameters": list(entry.parameters),
                        "source": entry.source,
                        "is_clairvoyant": entry.is_clairvoyant,
                    }
                    for name, entry in POLICIES.items()
                ]
            }
        )
        return
    rows = []
    for name, entry in POLICIES.items():
        rows.append((name, entry.summary))
        if entry.parameters:
            rows.append(("", f"parameters: {', '.join(entry.parameters)}"))
        rows.append(("", f"source: {entry.source}"))
        if entry.is_clairvoyant:
            rows.append(("", "knows the trace ahead: a bound, in simulation only"))
    print_rows(rows)
    print()
    print(wrapped("Parameters are written as NAME:key=value,key=value."))
