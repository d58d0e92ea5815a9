"""`oled-moe bench`: policies side by side on the live engine; table, JSON, page, rows.

Results go to stdout, progress to stderr. Torch and numpy are imported inside functions.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oled_moe.cli_bench_shape import ShapeFlags, ShapeRun, check_shape_flags, run_shape
from oled_moe.cli_flags import (
    MODEL_HELP,
    POLICY_NAMES,
    EngineFlags,
    Json,
    SamplingFlags,
    flag,
    takes_flags,
)
from oled_moe.cli_shared import (
    LogFlags,
    print_json,
    print_notice,
    print_rows,
    print_table,
    read_prompt_lines,
    status_line,
    use_log_flags,
    wrapped,
)
from oled_moe.cli_text import count, device_name, percent
from oled_moe.config import EngineConfig, check_int, format_size
from oled_moe.errors import ConfigError, InputError, OledMoeError
from oled_moe.model_paths import DEMO_MODEL, find_model

if TYPE_CHECKING:
    from oled_moe.bench import BenchReport, Prompt

BenchModel = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, envvar="OLED_MOE_MODEL")
]

DEFAULT_POLICIES = ("naive-lru", "lfu", "priority", "oled")
# Without a budget everything would be resident and no policy had anything to decide.
DEFAULT_EXPERT_MEMORY = "25%"
DEFAULT_NUM_PROMPTS = 6
DEFAULT_NUM_WARMUP = 2
DEFAULT_REPETITIONS = 5
QUICK_REPETITIONS = 2
# Asked of models that bring no questions of their own; any text makes experts work.
BUILT_IN_PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 120 km in 1.5 hours. What is its average speed?",
    "Summarise how photosynthesis works in three sentences.",
    "Translate into French: The library opens at nine tomorrow.",
    "List five uses of a paper clip besides holding paper.",
    "What is the difference between a list and a tuple in Python?",
    "Write a short poem about the sea in autumn.",
    "Explain to a child why ice floats on water.",
    "If 3 pens cost 4.50 euros, what do 7 pens cost?",
    "Name the planets of the solar system in order from the sun.",
    "Give a recipe for pancakes that serves four people.",
)


@dataclass(frozen=True, slots=True)
class BenchEngineFlags(EngineFlags):
    """How the model is run under every policy."""

    policy: Annotated[
        list[str] | None,
        flag(
            "--policy",
            panel="Engine",
            metavar="NAME",
            help="NAME[:key=value,...]; repeat it or give NAME,NAME; the first is the baseline. "
            f"Default: {', '.join(DEFAULT_POLICIES)}. Of: {', '.join(POLICY_NAMES)}.",
        ),
    ] = None  # type: ignore[assignment]  # one policy elsewhere, several here
    experts_per_layer: Annotated[
        str | None,
        flag(
            "--experts-per-layer",
            panel="Engine",
            metavar="C",
            help="Expert slots per MoE layer, a mean; staging comes on top. With --shape several, "
            "as 40,100; default there: a quarter of the experts.",
        ),
    ] = None  # type: ignore[assignment]  # one number elsewhere, several here

    def policies(self) -> tuple[str, ...]:
        return tuple(split_policies(self.policy or DEFAULT_POLICIES))

    def capacities(self) -> list[float]:
        """The numbers of --experts-per-layer. Raises: ConfigError."""
        texts = [] if self.experts_per_layer is None else self.experts_per_layer.split(",")
        try:
            return [float(text) for text in texts]
        except ValueError:
            raise ConfigError(
                f"experts-per-layer is {self.experts_per_layer!r}; allowed: a number, or several "
                "as 40,100"
            ) from None

    def config(self) -> EngineConfig:
        """What all policies share but the number of experts. Raises: ConfigError."""
        plain = {name: getattr(self, name) for name in EngineFlags.__dataclass_fields__}
        plain.update(policy="oled", experts_per_layer=None)
        return EngineFlags(**plain).config()

    def config_for_model(self) -> EngineConfig:
        """The same with a budget: a quarter of the experts where none is given."""
        capacities = self.capacities()
        if len(capacities) > 1:
            raise ConfigError(
                f"experts-per-layer is {self.experts_per_layer!r}; several go with --shape: repeat "
                "--capacity instead"
            )
        config = replace(self.config(), experts_per_layer=capacities[0] if capacities else None)
        budgets = (config.experts_per_layer, config.expert_memory, config.memory)
        if all(budget is None for budget in budgets):
            return replace(config, expert_memory=DEFAULT_EXPERT_MEMORY)
        return config


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """What is asked, and how often."""

    prompts: Annotated[
        Path | None,
        flag(
            "--prompts",
            metavar="PATH",
            help="Text: one prompt a line. .jsonl: objects with prompt or prompt_ids. "
            "Default: the bundled questions for demo and its packs, else a small built-in set.",
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        flag("--num-prompts", help=f"Measured per repetition; default: {DEFAULT_NUM_PROMPTS}."),
    ] = None
    warmup: Annotated[
        int | None,
        flag(
            "--warmup",
            help=f"Uncounted requests first; default: {DEFAULT_NUM_WARMUP}. With --shape denoising "
            "forwards; default: until caches are full.",
        ),
    ] = None
    repetitions: Annotated[
        int | None,
        flag(
            "--repetitions",
            help=f"Of every policy, interleaved; default: {DEFAULT_REPETITIONS}, with --shape 1.",
        ),
    ] = None
    capacity: Annotated[
        list[float] | None,
        flag("--capacity", help="Experts per layer; repeat it to compare several cache sizes."),
    ] = None
    is_quick: Annotated[
        bool,
        flag(
            "--quick",
            help=f"{QUICK_REPETITIONS} repetitions unless told otherwise; marks the report.",
        ),
    ] = False
    is_raw: Annotated[
        bool, flag("--raw", help="Take prompts as they are, without the chat template.")
    ] = False
    out: Annotated[
        Path | None, flag("--out", metavar="PATH", help="Write an HTML page with plots.")
    ] = None
    save: Annotated[
        Path | None,
        flag("--save", metavar="PATH", help="Append a JSON row for each repetition and policy."),
    ] = None


_ENGINE, _BENCH, _SHAPE = BenchEngineFlags(), BenchFlags(), ShapeFlags()


def split_policies(texts: Sequence[str]) -> list[str]:
    """The specs in `a,b:key=1,key=2,c`: what has `=` but no `:` before it belongs to the last."""
    specs: list[str] = []
    for part in (part for text in texts for part in [None, *text.split(",")]):
        if part is None:
            is_first = True
            continue
        is_parameter = "=" in part and ":" not in part.split("=")[0]
        if is_parameter and not is_first:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
        is_first = False
    return specs


@takes_flags
def bench(
    model: BenchModel = None,
    bench: BenchFlags = _BENCH,
    as_json: Json = False,
    shape: ShapeFlags = _SHAPE,
    engine: BenchEngineFlags = _ENGINE,
    sampling: SamplingFlags = SamplingFlags(),
    log: LogFlags = LogFlags(),
) -> int:
    """Run policies side by side on the live engine and say how they compare.

    Each repetition runs every policy before the next begins. The exit code is 1 where policies
    give different tokens that must be the same, or a request fails.

    With --shape there is no model: random weights of that size are made once, and the routing of
    a trace is replayed through the real engine, against the roofline of the same run.
    """
    use_log_flags(log)
    check_shape_flags(shape, bench, engine, sampling)
    if (model is None) == (shape.shape is None):
        raise ConfigError(
            "there is no model; name one, or a --shape to run without weights"
            if model is None
            else f"both MODEL {model!r} and --shape are given; give one of them"
        )
    if model is None:
        return _bench_shape(shape, bench, engine, as_json=as_json)
    config, params = engine.config_for_model(), sampling.params()
    _check_budgets(bench, engine)
    for path in (bench.out, bench.save):
        _check_writable(path)
    check_int("num-prompts", _or(bench.num_prompts, DEFAULT_NUM_PROMPTS), minimum=1)
    check_int("warmup", _or(bench.warmup, DEFAULT_NUM_WARMUP), minimum=0)
    find_model(model)
    chosen = choose_prompts(model, bench)
    with status_line() as say:
        say("loading torch")
        from oled_moe.bench import run_bench
        from oled_moe.chat import chat_request, with_face_defaults
        from oled_moe.engine import Engine

        report = run_bench(
            model,
            engine.policies(),
            config,
            params,
            chosen.prompts,
            warmup=chosen.warmup,
            repetitions=_or(
                bench.repetitions, QUICK_REPETITIONS if bench.is_quick else DEFAULT_REPETITIONS
            ),
            capacities=bench.capacity or None,
            seed=params.seed or 0,
            is_quick=bench.is_quick,
            prepare=lambda opened, text, given: (
                (text, with_face_defaults(opened, given))
                if bench.is_raw
                else chat_request(opened, text, with_face_defaults(opened, given))
            ),
            open_engine=lambda wanted: Engine(model, wanted),
            progress=say,
        )
    values = {**report.to_dict(), "prompts": chosen.words}
    _write_files(report, values, bench)
    if as_json:
        print_json(values)
    else:
        _print_report(values)
    return 1 if report.is_failed else 0


def _bench_shape(
    shape: ShapeFlags, bench: BenchFlags, engine: BenchEngineFlags, *, as_json: bool
) -> int:
    _check_writable(bench.save)
    return run_shape(
        ShapeRun(
            shape,
            engine.policies(),
            engine.capacities(),
            engine.config(),
            warmup=bench.warmup,
            repetitions=_or(bench.repetitions, 1),
            save=bench.save,
            as_json=as_json,
        )
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _check_budgets(bench: BenchFlags, engine: BenchEngineFlags) -> None:
    budgets = ("experts_per_layer", "expert_memory", "memory")
    given = [name for name in budgets if getattr(engine, name) is not None]
    if bench.capacity and given:
        raise ConfigError(f"capacity and {given[0]} are both given; give one of them")


def _check_writable(path: Path | None) -> None:
    """Before the long part, not after it. Raises: InputError."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"{path}: is a directory; name a file")
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise InputError(f"{path}: cannot be written there; name another place")


# Prompts


@dataclass(frozen=True, slots=True)
class ChosenPrompts:
    """Prompts to measure and to warm up with, and where they come from."""

    prompts: "Sequence[Prompt]"
    warmup: "Sequence[Prompt]"
    words: str


def choose_prompts(model: str, bench: BenchFlags) -> ChosenPrompts:
    """Measured prompts first; warm-up takes others where there are any."""
    num_prompts = _or(bench.num_prompts, DEFAULT_NUM_PROMPTS)
    num_warmup = _or(bench.warmup, DEFAULT_NUM_WARMUP)
    pool: Sequence[Prompt]
    if bench.prompts is not None:
        pool, words = read_prompts(bench.prompts), str(bench.prompts)
    elif _is_demo(model):
        pool, words = _demo_questions(), "bundled questions, not seen in training"
    else:
        pool, words = BUILT_IN_PROMPTS, "built-in set"
    if num_prompts > len(pool):
        if bench.num_prompts is not None:
            raise ConfigError(
                f"num-prompts is {num_prompts}; allowed: 1 to {len(pool)}, the prompts in {words}"
            )
        num_prompts = len(pool)
    others = pool[num_prompts:] or pool
    warmup = [others[i % len(others)] for i in range(num_warmup)]
    return ChosenPrompts(pool[:num_prompts], warmup, f"{count(num_prompts, 'prompt')}, {words}")


def _is_demo(model: str) -> bool:
    """Whether it is the bundled model or a pack of it: what it was trained to answer is known."""
    # Sizes and words of a model; packing copies both as they are, whatever it does to weights.
    names, demo = ("config.json", "tokenizer.json"), find_model(DEMO_MODEL)
    try:
        path = find_model(model)
        return all((path / name).read_bytes() == (demo / name).read_bytes() for name in names)
    except (OSError, OledMoeError):
        # Opening it says what is wrong with it.
        return False


def _demo_questions() -> list[str]:
    """All bundled questions, the families taking turns."""
    from oled_moe.demo_screen import load_questions

    families: dict[str, list[str]] = {}
    for question in load_questions(find_model("demo")):
        families.setdefault(question.family, []).append(question.text)
    rounds = range(max(map(len, families.values()), default=0))
    return [texts[i] for i in rounds for texts in families.values() if i < len(texts)]


def read_prompts(path: Path) -> "list[Prompt]":
    """Prompts of a file: text or token ids.

    Raises: InputError naming the line that is no prompt.
    """
    is_json, lines = read_prompt_lines(path)
    is_json |= path.suffix == ".jsonl"
    return [_json_prompt(place, line) if is_json else line for place, line in lines]


def _json_prompt(where: str, line: str) -> "Prompt":
    allowed = 'write {"prompt": "text"} or {"prompt_ids": [1, 2]}'
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: is not JSON; {allowed}") from None
    if isinstance(value, str) and value:
        return value
    if isinstance(value, dict):
        text, ids = value.get("prompt", value.get("question")), value.get("prompt_ids")
        if isinstance(text, str) and text and ids is None:
            return text
        if isinstance(ids, list) and ids and text is None and all(type(i) is int for i in ids):
            return tuple(ids)
    raise InputError(f"{where}: is no prompt; {allowed}")


# Output


def _write_files(report: "BenchReport", values: Mapping[str, Any], bench: BenchFlags) -> None:
    if bench.out is not None:
        from oled_moe.report import render_report

        bench.out.write_text(render_report(values), encoding="utf-8")
        print_notice(f"page written to {bench.out}")
    if bench.save is not None:
        with bench.save.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in report.rows())
        print_notice(f"rows appended to {bench.save}")


_TIME_HEADER = ("policy", "TTFT", "TPOT", "TPOT ratio", "end to end", "output tok/s")
_EXPERT_HEADER = (
    "policy", "hit rate", "utilisation", "used", "loads", "loaded", "on CPU", "deciding",
)  # fmt: skip


def _print_report(values: Mapping[str, Any]) -> None:
    cases = values["cases"]
    print_rows(_setup_rows(values))
    print()
    print_table(_TIME_HEADER, [_time_row(case) for case in cases])
    print()
    print_table(_EXPERT_HEADER, [_expert_row(case) for case in cases])
    print()
    print(wrapped(_reading(values)))
    print(wrapped(_token_words(values["tokens"])))
    for remark in values["notes"]:
        print(wrapped(f"Note: {remark}"))


def _setup_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    hardware = values["hardware"]
    plans = dict.fromkeys(
        f"{case['num_slots']} slots and {case['num_staging']} staging" for case in values["cases"]
    )
    busy, average = values["other_busy_cores"], values["load_average_before"][0]
    return [
        ("model", f"{values['model']}, {values['dtype']}"),
        ("device", device_name(values["device"])),
        ("experts", f"{'; '.join(plans)} for {values['plan']['num_experts']} experts, each policy"),
        ("CPU experts", "on" if values["has_cpu_experts"] else "off"),
        ("lossy", values["lossy"] or "no"),
        *([("low precision", values["low_precision"])] if values["low_precision"] else []),
        ("hardware", f"{hardware['name']} ({hardware['source']})"),
        ("prompts", values["prompts"]),
        ("warm-up", values["warmup"]["words"]),
        ("repetitions", f"{values['repetitions']}, interleaved, order seed {values['seed']}"),
        ("engines", values["engines"]),
        ("machine", f"others kept {busy:.2f} cores busy; load average {average:.2f} before"),
    ]


def _time_row(case: Mapping[str, Any]) -> tuple[str, ...]:
    medians, ratio = case["medians"], case["ratios"]["tpot_s"]
    is_baseline = case["label"] == case["baseline"]
    return (
        case["label"],
        _time(medians["ttft_s"]),
        _time(medians["tpot_s"]),
        "baseline" if is_baseline else _number(ratio, 3),
        _time(medians["e2el_s"]),
        _number(medians["output_throughput"], 1),
    )


def _expert_row(case: Mapping[str, Any]) -> tuple[str, ...]:
    medians = case["medians"]
    shares = ("hit_rate", "expert_cache_utilization", "effective_transfer_ratio")
    say = {
        **dict.fromkeys(shares, percent),
        "expert_loads": lambda value: f"{value:.0f}",
        "bytes_loaded": format_size,
        "cpu_expert_runs": lambda value: f"{value:.0f}",
        "policy_overhead": percent,
    }
    return (
        case["label"],
        *(words(medians[name]["median"]) if medians[name] else "-" for name, words in say.items()),
    )


def _time(median: Mapping[str, float] | None) -> str:
    """`16.9 ms [13.2, 39.7]`: the interval in the unit of the median."""
    if not median:
        return "-"
    scale, unit = (1.0, "s") if median["median"] >= 1 else (1e3, "ms")
    values = (scale * median[name] for name in ("low", "median", "high"))
    low, middle, high = (f"{v:.0f}" if v >= 1000 else f"{v:.3g}" for v in values)
    return f"{middle} {unit}" + (f" [{low}, {high}]" if low != high else "")


def _number(median: Mapping[str, float] | None, decimals: int) -> str:
    if not median:
        return "-"
    low, middle, high = (f"{median[n]:.{decimals}f}" for n in ("low", "median", "high"))
    return middle + (f" [{low}, {high}]" if low != high else "")


def _reading(values: Mapping[str, Any]) -> str:
    first = values["cases"][0]["medians"]["tpot_s"]
    if first is None:
        return "No request was answered."
    words = f"Medians of {values['repetitions']} repetitions"
    if first["level"]:
        words += f" in their {100 * first['level']:.4g} % confidence intervals (order statistics)"
    return (
        f"{words}; loads and bytes are those of one repetition. TPOT ratio: to the first policy "
        "at the same capacity, repetition by repetition; an interval that holds 1 shows no "
        "difference. used: copied experts that the layer's next pass found and wanted."
    )


def _token_words(tokens: Mapping[str, Any]) -> str:
    if tokens["is_failed"]:
        return (
            f"The policies gave different tokens ({tokens['difference']}). That must not be; "
            "please report it."
        )
    if tokens["difference"] is None:
        return "All policies gave the same tokens."
    shares = ", ".join(f"{label} {percent(share)}" for label, share in tokens["agreement"].items())
    return f"Answers equal to those of the first policy: {shares}."
