"""`oled-moe doctor` and `oled-moe plan`: what a machine does, and what a model would do on it.

Results go to stdout, progress to stderr. Torch and numpy are imported inside functions.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from oled_moe.cli_flags import (
    MODEL_HELP,
    ExpertMemory,
    Json,
    Lossy,
    LowPrecision,
    Policy,
    Threads,
    as_flags,
    flag,
    takes_flags,
)
from oled_moe.cli_shared import (
    LogFlags,
    print_json,
    print_rows,
    print_table,
    status_line,
    use_log_flags,
    wrapped,
)
from oled_moe.cli_text import (
    Rows,
    checkup_rows,
    disk_rows,
    gigabytes_per_s,
    memory_rows,
    percent,
    seconds,
)
from oled_moe.config import BF16, DTYPE_WORDS, DTYPES, EngineConfig, format_size, parse_size
from oled_moe.errors import ConfigError, DoesNotFitError
from oled_moe.model_paths import find_sizes
from oled_moe.shapes import SHAPES

DEVICE_NAMES = ("cpu", "emulated", "cuda")
# No machine has less: a smaller number without a unit is meant otherwise.
_LEAST_MEMORY_BYTES = 2**20
SIZES_HELP = f"{MODEL_HELP[:-1]}, or sizes without files: {', '.join(SHAPES)}."
_ADVISED_FLAGS = (
    *("experts-per-layer", "expert-memory", "memory", "max-model-len", "max-num-seqs"),
    *("gpu-memory", "ram"),
)
_engine = functools.partial(flag, panel="Engine")


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """How a model would be run."""

    experts_per_layer: Annotated[
        float | None,
        _engine("--experts-per-layer", help="Expert slots per MoE layer, a mean; staging on top."),
    ] = None
    expert_memory: ExpertMemory = None
    memory: Annotated[
        str | None,
        _engine(
            "--memory",
            metavar="SIZE",
            help="Memory for everything: weights, K/V, expert slots; on cuda of the GPU.",
        ),
    ] = None
    policy: Policy = None
    no_cpu_experts: Annotated[
        bool, _engine("--no-cpu-experts", help="Compute no missing expert on the CPU.")
    ] = False
    dtype: Annotated[
        str | None,
        _engine(
            "--dtype",
            metavar="NAME",
            help=f"{DTYPE_WORDS}, or int8, int4 and so on for experts as `oled-moe pack` "
            "would make them; default: as stored.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None, _engine("--max-model-len", help="Longest prompt and answer, in tokens.")
    ] = None
    prompt_tokens: Annotated[
        int | None,
        flag(
            "--prompt-tokens",
            help="Prompt length that the first token is predicted for; default: 512, or what the "
            "model's context has room for.",
        ),
    ] = None
    lossy: Lossy = None
    low_precision: LowPrecision = None
    hardware: Annotated[
        str | None,
        _engine(
            "--hardware",
            metavar="NAME",
            help="Profile to predict by: rtx4090-ddr5, rtx3060-laptop, h200, testbed-a, "
            "testbed-b, this-machine, or a file; default: what doctor measured.",
        ),
    ] = None

    @property
    def form(self) -> str | None:
        """The quantised form that dtype names; None where it names what is computed in."""
        return None if self.dtype in (None, BF16, *DTYPES) else self.dtype

    def config(self, *, threads: int | None = None) -> EngineConfig:
        """The engine's configuration but for the device. Raises: ConfigError naming the field."""
        return EngineConfig(
            experts_per_layer=self.experts_per_layer,
            expert_memory=self.expert_memory,
            memory=self.memory,
            policy=self.policy,
            cpu_experts=not self.no_cpu_experts,
            dtype=None if self.form else self.dtype,
            max_model_len=self.max_model_len,
            threads=threads,
            lossy=self.lossy,
            low_precision=self.low_precision,
        )


@takes_flags
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=SIZES_HELP, envvar="OLED_MOE_MODEL"),
    ] = None,
    device: Annotated[
        str | None,
        _engine(
            "--device",
            metavar="NAME",
            help=f"The device to measure for: {', '.join(DEVICE_NAMES)}; default: all that are "
            "here, and MODEL on cpu.",
        ),
    ] = None,
    is_quick: Annotated[
        bool, flag("--quick/--full", help="Seconds instead of about a minute, less exact.")
    ] = False,
    directory: Annotated[
        Path | None,
        flag(
            "--directory",
            metavar="PATH",
            help="Where to measure the disk; default: where the model is.",
        ),
    ] = None,
    threads: Threads = None,
    is_unsaved: Annotated[
        bool, flag("--no-save", help="Do not store the profile that later runs decide by.")
    ] = False,
    flags: PlanFlags = PlanFlags(),
    as_json: Json = False,
    log: LogFlags = LogFlags(),
) -> int:
    """Measure this machine, store what was found, and say whether MODEL fits and how fast it is.

    Of MODEL only config.json and headers are read. The exit code is 4 where it does not fit.
    """
    use_log_flags(log)
    _check_device(device)
    config = flags.config(threads=threads)
    if model is not None:
        find_sizes(model)
    with status_line() as say:
        say("loading torch")
        from oled_moe.inspection import Question, check_machine

        question = None
        if model is not None:
            question = Question(
                model, config, device or "cpu", flags.prompt_tokens, flags.hardware, flags.form
            )
        checkup = check_machine(
            question,
            device,
            is_quick=is_quick,
            directory=directory,
            threads=threads,
            saves=not is_unsaved,
            say=say,
        )
    if checkup["outlook"] is not None:
        checkup["outlook"] = with_flags(checkup["outlook"])
        checkup["fit"] = checkup["outlook"]["fit"]
    if as_json:
        print_json(checkup)
    else:
        _print_checkup(checkup)
    is_fitting = checkup["fit"] is None or checkup["fit"]["is_fitting"]
    return 0 if is_fitting else DoesNotFitError.exit_code


@takes_flags
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=SIZES_HELP,
            envvar="OLED_MOE_MODEL",
        ),
    ],
    gpu_memory: Annotated[
        str | None,
        flag("--gpu-memory", metavar="SIZE", help="Plan for a GPU with so much memory: 16GiB."),
    ] = None,
    ram: Annotated[
        str | None,
        flag("--ram", metavar="SIZE", help="RAM of the machine; default: what this one has."),
    ] = None,
    device: Annotated[
        str | None,
        _engine(
            "--device",
            metavar="NAME",
            help=f"{', '.join(DEVICE_NAMES)}; default: cuda with --gpu-memory, else cpu.",
        ),
    ] = None,
    flags: PlanFlags = PlanFlags(),
    as_json: Json = False,
    log: LogFlags = LogFlags(),
) -> int:
    """Say whether MODEL fits a machine one only imagines, which cache it gets, and how fast it is.

    Nothing is measured, and only config.json, index and headers are read: neither the weights nor
    the machine need to be there. The exit code is 4 where it does not fit.
    """
    use_log_flags(log)
    _check_device(device)
    config = flags.config()
    find_sizes(model)
    with status_line() as say:
        say("loading torch")
        from oled_moe.outlook import find_hardware, imagine, open_sizes, outlook

        say("reading headers")
        opened = open_sizes(model, config, form=flags.form)
        device = device or ("cuda" if gpu_memory is not None else "cpu")
        hardware, source = find_hardware(flags.hardware, device)
        machine = imagine(
            device,
            hardware,
            gpu_bytes=_size("gpu-memory", gpu_memory),
            ram_bytes=_size("ram", ram),
        )
        say("predicting")
        view = outlook(
            opened,
            config,
            machine,
            hardware,
            hardware_source=source,
            prompt_tokens=flags.prompt_tokens,
        ).to_dict()
    view = with_flags(view)
    if as_json:
        print_json(view)
    else:
        print_outlook(view)
    return 0 if view["fit"]["is_fitting"] else DoesNotFitError.exit_code


def _check_device(device: str | None) -> None:
    if device is not None and device not in DEVICE_NAMES:
        raise ConfigError(f"device is {device!r}; allowed: {', '.join(DEVICE_NAMES)}")


def _size(name: str, text: str | None) -> int | None:
    """Raises: ConfigError for what is no size above 0."""
    if text is None:
        return None
    if text.strip().isdecimal() and int(text) < _LEAST_MEMORY_BYTES:
        raise ConfigError(
            f"{name} is {text!r}, which would be bytes; write a size above 0 with its unit, such "
            "as 16GiB"
        )
    try:
        return parse_size(name, text)
    except ConfigError:
        raise ConfigError(
            f"{name} is {text!r}; write a size above 0, such as 16GiB or 512MiB"
        ) from None


def with_flags(view: dict[str, Any]) -> dict[str, Any]:
    """An outlook whose advice names flags as they are typed."""
    fit = view["fit"]
    words = {name: as_flags(fit[name], _ADVISED_FLAGS) for name in ("verdict", "remedy")}
    return {**view, "fit": {**fit, **words}}


# Printing


def _print_checkup(checkup: Mapping[str, Any]) -> None:
    print_rows([*checkup_rows(checkup), *_further_rows(checkup)])
    reads = checkup["disk_reads"]
    if reads:
        print("\nCold reads of experts from disk, by reads in flight:")
        methods = sorted({read["method"] for read in reads})
        print_table(("in flight", *methods), disk_rows(reads))
    products = checkup["measurements"]["products"]
    if products:
        print("\nWeights worked through per second, by rows that each meets:")
        _print_products(products)
    if checkup["outlook"] is not None:
        print()
        print_outlook(checkup["outlook"])
    if checkup["warnings"]:
        print()
        for warning in checkup["warnings"]:
            print(wrapped(f"Warning: {warning}"))
    print()
    for device, entry in checkup["devices"].items():
        if entry["stored_at"] is None:
            print(wrapped(f"The profile for {device} was not stored."))
        else:
            print(wrapped(f"The profile for {device} is stored in {entry['stored_at']}."))


def _further_rows(checkup: Mapping[str, Any]) -> Rows:
    """Software around layers, copies, GPUs and versions."""
    profile, measured = checkup["profile"], checkup["measurements"]
    facts, gpu = measured["machine"], measured["gpu"]
    rows: Rows = [
        (
            "software",
            f"{seconds(profile['layer_overhead_s'])} per layer, "
            f"{seconds(profile['load_overhead_s'])} per copied expert, beside weights and bytes",
        )
    ]
    for copy in (*measured["copies"], *(gpu["copies"] if gpu else ())):
        pinned = "pinned " if copy["is_pinned"] else ""
        rate = copy["num_bytes"] / copy["seconds"]["median"]
        rows.append(
            (
                "copy",
                f"{pinned}{copy['source'].upper()} to {copy['target'].upper()}, "
                f"{format_size(copy['num_bytes'])}: "
                f"{seconds(copy['seconds']['median'])}, {gigabytes_per_s(rate)}",
            )
        )
    for found in facts["gpus"]:
        capability = found["compute_capability"]
        size = format_size(found["memory_bytes"])
        rows.append(("GPU", f"{found['name']}, {size}, compute capability {capability}"))
    if gpu is not None:
        rows.append(
            (
                "GPU measured",
                f"memory reads {gpu['memory_read_bytes_per_s']['median'] / 1e9:.0f} GB/s, products "
                f"{gpu['matrix_flops_per_s']['median'] / 1e12:.1f} TFLOP/s",
            )
        )
    rows.append(
        (
            "versions",
            f"python {facts['python_version']}, torch {facts['torch_version']}, CUDA "
            f"{facts['cuda_version'] or 'none'}, triton {facts['triton_version'] or 'none'}, "
            f"native kernels {facts['native_kernels']}",
        )
    )
    return rows


def _print_products(products: Sequence[Mapping[str, Any]]) -> None:
    short = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    table: dict[str, dict[int, str]] = {}
    for product in products:
        dtype = short.get(product["dtype"], product["dtype"])
        label = f"{product['place']} {product['operation']} {dtype}, GB/s"
        rate = product["weight_bytes"] / product["seconds"]["median"]
        table.setdefault(label, {})[product["num_rows"]] = f"{rate / 1e9:.1f}"
    all_rows = sorted({product["num_rows"] for product in products})
    lines = [
        (label, *(cells.get(rows, "-") for rows in all_rows)) for label, cells in table.items()
    ]
    print_table(("rows", *map(str, all_rows)), lines)


def print_outlook(view: Mapping[str, Any]) -> None:
    """Whether a model fits, its cache, its speed and the arithmetic behind it, in words."""
    fit, prediction = view["fit"], view["prediction"]
    print(wrapped(f"{view['model']}: {fit['verdict']}"))
    if fit["remedy"] and fit["plan"] is not None:
        print(wrapped(f"To change that: {fit['remedy']}."))
    for note in [*view["notes"], *(prediction["notes"] if prediction else ())]:
        print(wrapped(f"Note: {note}."))
    if fit["plan"] is not None:
        print()
        print_rows(_cache_rows(view))
    if prediction is None:
        return
    print()
    print_rows(_speed_rows(prediction))
    print("\nOne forward on typical text:")
    _print_terms(prediction)
    print()
    print(wrapped(_caveat(prediction)))


def _cache_rows(view: Mapping[str, Any]) -> Rows:
    """Machine, cache and the lines of the memory plan."""
    machine, cache, plan = view["machine"], view["cache"], view["fit"]["plan"]
    free = format_size(machine["ram_bytes"])
    where = f"{free} of RAM for the process"
    if machine["reserve_bytes"]:
        where += f", {format_size(machine['reserve_bytes'])} left to the system"
    if machine["gpu_bytes"] is not None:
        where = f"GPU with {format_size(machine['gpu_bytes'])}, {where}"
    rows: Rows = [
        ("device", f"{view['device']}: {where}"),
        ("machine", f"{view['hardware']} ({view['hardware_source']})"),
        ("weights", view["dtype"]),
        (
            "cache",
            f"{cache['experts_per_layer']:.4g} of {cache['num_experts_per_layer']} experts per "
            f"layer in {cache['num_layers']} layers, {cache['num_slots']} slots, "
            f"{cache['num_staging']} staging, policy {cache['policy']}; a forward wants "
            f"about {cache['active_per_layer']:.0f} per layer",
        ),
    ]
    lines = [(line["what"], line["bytes"]) for line in plan["lines"]]
    if view["spare_bytes"] is not None:
        lines.append(("left free, unless --memory says otherwise", view["spare_bytes"]))
    rows += memory_rows(lines)
    if "ram_lines" in plan:
        lines = memory_rows([(line["what"], line["bytes"]) for line in plan["ram_lines"]])
        rows += [("RAM" if label else "", text) for label, text in lines]
    return rows


def _span(values: Mapping[str, float]) -> str:
    return f"{seconds(values['low_s'])} to {seconds(values['high_s'])}"


def _speed_rows(prediction: Mapping[str, Any]) -> Rows:
    tpot, ttft, forward = prediction["tpot"], prediction["ttft"], prediction["forward"]
    rates = f"{_number(1 / tpot['high_s'])} to {_number(1 / tpot['low_s'])} tokens a second"
    limits = ", ".join(
        f"{word} up to {1e3 * limit:g} ms" for word, limit in prediction["speed_limits_s"].items()
    )
    hits = sorted(text["hit_rate"] for text in prediction["texts"])
    hit_rate = percent(hits[0])
    if percent(hits[-1]) != hit_rate:
        hit_rate += f" to {percent(hits[-1])}"
    return [
        (
            "per token",
            f"{_span(tpot)}, likely {seconds(tpot['likely_s'])} ({rates}): "
            f"{prediction['speed']} ({limits}, slow above)",
        ),
        (
            "first token",
            f"{_span(ttft)}, likely {seconds(ttft['likely_s'])}, for a prompt of "
            f"{prediction['prompt_tokens']} tokens{_first_words(prediction)}",
        ),
        (
            "one forward",
            f"{_span(forward)}, likely {seconds(forward['likely_s'])}; {_yield_words(prediction)}",
        ),
        (
            "hit rate",
            f"{hit_rate}, replayed on routing that is {prediction['routing']}",
        ),
    ]


def _first_words(prediction: Mapping[str, Any]) -> str:
    """Why the first token of a canvas may take less than a mean forward."""
    if not prediction["canvas_tokens"]:
        return ""
    words = "; it comes with the first forward"
    if prediction["ttft"]["likely_s"] < prediction["forward"]["likely_s"]:
        words += ", whose masks want fewer different experts than tokens do later"
    return words


def _yield_words(prediction: Mapping[str, Any]) -> str:
    """What a forward takes and what comes of it."""
    low, high = prediction["tokens_per_forward"]
    is_set = low == high
    each = f"{low:.2g}" if is_set else f"{low:.2g} to {high:.2g}"
    why = "as many steps as are set" if is_set else "which depends on the text"
    words = f"{each} token{'' if each == '1' else 's'} each, {why}"
    behind = prediction["canvas_tokens"]
    if not behind:
        return words
    canvas = prediction["prompt_tokens"] + behind
    fewest, most = round(behind / high), round(behind / low)
    forwards = str(most) if is_set else f"{fewest} to {most}"
    return (
        f"{words}; it takes the whole canvas of {canvas} tokens, prompt and answer, and an answer "
        f"of {behind} takes {forwards} forwards"
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def _print_terms(prediction: Mapping[str, Any]) -> None:
    table = []
    for term in prediction["terms"]:
        rate = term["bytes_per_s"]
        size = format_size(term["num_bytes"]) if rate else ""
        speed = gigabytes_per_s(rate) if rate else ""
        table.append((f"  {term['lane']}: {term['what']}", size, speed, seconds(term["seconds"])))
    print_table(("", "weights", "rate", "time"), table)
    lanes: dict[str, float] = {}
    for term in prediction["terms"]:
        lanes[term["lane"]] = lanes.get(term["lane"], 0.0) + term["seconds"]
    if len(lanes) > 1:
        sums = ", ".join(f"{lane} {seconds(value)}" for lane, value in lanes.items())
        longest = seconds(max(lanes.values()))
        total = seconds(sum(lanes.values()))
        print(
            wrapped(
                f"Together {sums}: {longest} if all overlap, {total} if nothing does; "
                f"{prediction['bound']} decides."
            )
        )


def _caveat(prediction: Mapping[str, Any]) -> str:
    known = (
        "rates were measured here"
        if prediction["is_hardware_measured"]
        else "rates come from data sheets or guesses, not from a measurement"
    )
    return (
        "Ranges span hard to easy text, lanes that overlap or not, and "
        f"{100 * prediction['margin']:.0f} % for what the arithmetic leaves out; {known}. Time per "
        "token is forward time over tokens per forward."
    )
