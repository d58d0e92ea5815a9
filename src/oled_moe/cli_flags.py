"""The flags that commands share: dataclasses whose fields are flags, and how commands take them.

Each flag can also be set as OLED_MOE_FLAG; a flag that is given wins. A field left None falls
through to the model's own value, then to the default of the engine.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from oled_moe.cli_config import EXCLUSIVE, use_config
from oled_moe.config import (
    ALGORITHMS,
    CANVAS_CACHES,
    CONFIDENCES,
    DEVICES,
    DTYPE_WORDS,
    EngineConfig,
    SamplingParams,
    looks_at,
)
from oled_moe.errors import CheckpointError, ConfigError, OledMoeError, TraceError

# The registry of policies needs numpy, for which `--help` does not wait; a test compares the two.
POLICY_NAMES = (
    "naive-lru",
    "lfu",
    "priority",
    "priority+adapt",
    "oled-load-aware",
    "oled",
    "oled+",
    "oled+global",
    "oled+prefetch",
    "stream",
    "moe-infinity",
    "finemoe",
    "ktransformers",
    "fiddler",
    "tide",
    "paged-lru",
    "n-cpu-moe",
)
MODEL_HELP = "`demo`, a directory, a .gguf file, or a hub id ORG/NAME that is in the local cache."
# The names that SGLang gives the decoding loops.
_ALGORITHM_ALIASES = {
    "LowConfidence": "low_confidence",
    "JointThreshold": "joint_threshold",
    "JointThresholdInDel": "levenshtein",
}


# Stands for a hyphen while help is wrapped, which would break names such as des-vote in two.
_HYPHEN = "\ue000"


def flag(*names: str, help: str, panel: str | None = None, **options: Any) -> Any:
    """One flag with its environment variable, which is named after its first long name."""
    long_name = next(name for name in names if name.startswith("--")).split("/")[0]
    return typer.Option(
        *names,
        help=help,
        envvar="OLED_MOE_" + long_name.removeprefix("--").upper().replace("-", "_"),
        show_envvar=False,
        rich_help_panel=panel,
        **options,
    )


_engine = functools.partial(flag, panel="Engine")
_decoding = functools.partial(flag, panel="Decoding")

# Flags of several commands, by their annotation.
Json = Annotated[bool, flag("--json", help="Print one JSON object instead of text.")]
_Config = Annotated[
    Path | None,
    flag(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=use_config,
        help="TOML or YAML whose keys are flags, its tables commands; flags and environment win.",
    ),
]
Device = Annotated[
    str | None, _engine("--device", metavar="NAME", help=f"{' or '.join(DEVICES)}; default: cpu.")
]
Lossy = Annotated[
    str | None,
    _engine(
        "--lossy",
        metavar="NAME",
        help="Change answers to move less. A block's tokens share experts: des-vote:experts=24, "
        "des-seq:top=2, dmoe:coverage=0.6 or resident:threshold=0.6, say; or mixed:share=0.2, by "
        "which missing experts that matter least come from --low-precision. Answers of resident "
        "and mixed depend on what is in memory.",
    ),
]
LowPrecision = Annotated[
    str | None,
    _engine(
        "--low-precision",
        metavar="PACK",
        help="A pack of the same model in int8 or int4, for --lossy mixed.",
    ),
]
Policy = Annotated[
    str | None,
    _engine(
        "--policy",
        metavar="NAME",
        help=f"NAME[:key=value,...], one of: {', '.join(POLICY_NAMES)}; default: the family's, "
        "most often oled.",
    ),
]
ExpertMemory = Annotated[
    str | None,
    _engine(
        "--expert-memory",
        metavar="SIZE",
        help="Memory for expert slots and staging: 8GiB, 512MiB, or 50% of all experts.",
    ),
]
Threads = Annotated[
    int | None, _engine("--threads", help="CPU threads; default: all cores, 1 for tiny experts.")
]


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """How a model is run."""

    device: Device = None
    experts_per_layer: Annotated[
        float | None,
        _engine(
            "--experts-per-layer", help="Expert slots per MoE layer, a mean; staging comes on top."
        ),
    ] = None
    expert_memory: ExpertMemory = None
    memory: Annotated[
        str | None,
        _engine(
            "--memory", metavar="SIZE", help="Memory for everything: weights, K/V, expert slots."
        ),
    ] = None
    policy: Policy = None
    no_cpu_experts: Annotated[
        bool, _engine("--no-cpu-experts", help="Compute no missing expert on the CPU.")
    ] = False
    dtype: Annotated[
        str | None,
        _engine("--dtype", metavar="NAME", help=f"{DTYPE_WORDS}; default: as stored."),
    ] = None
    hardware: Annotated[
        Path | None,
        _engine(
            "--hardware",
            metavar="NAME",
            help="A hardware profile by name or path; default: what doctor stored.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None, _engine("--max-model-len", help="Longest prompt and answer, in tokens.")
    ] = None
    threads: Threads = None
    lossy: Lossy = None
    low_precision: LowPrecision = None
    force: Annotated[
        bool, _engine("--force", help="Load even where the memory plan exceeds what is free.")
    ] = False

    def config(self) -> EngineConfig:
        """The engine's configuration. Raises: ConfigError naming the field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["cpu_experts"] = not values.pop("no_cpu_experts")
        return EngineConfig(**{name: v for name, v in values.items() if v is not None})


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How one answer is decoded. Without a flag the checkpoint's own value holds."""

    algorithm: Annotated[
        str | None,
        _decoding(
            "--algorithm",
            metavar="NAME",
            help=f"{', '.join(ALGORITHMS)}, or SGLang's names; default: the model family's.",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        _decoding("--max-tokens", help="Longest answer; default: 256, `serve`: what fits."),
    ] = None
    block_length: Annotated[
        int | None,
        _decoding(
            "--block-length", help="Tokens denoised together; default: the model's, else 32."
        ),
    ] = None
    steps: Annotated[
        int | None,
        _decoding(
            "--steps",
            "--denoising-steps",
            help="Most steps per block; default: block length, DiffusionGemma: 48.",
        ),
    ] = None
    threshold: Annotated[
        float | None,
        _decoding("--threshold", help="Confidence that accepts a token; default: 0.95."),
    ] = None
    edit_threshold: Annotated[
        float | None,
        _decoding("--edit-threshold", help="Confidence that replaces one; default: 0.9."),
    ] = None
    max_post_edit_steps: Annotated[
        int | None,
        _decoding("--max-post-edit-steps", help="Editing steps after the last mask; default: 16."),
    ] = None
    num_to_transfer: Annotated[
        int | None,
        _decoding("--num-to-transfer", help="Tokens accepted at least per step; default: 1."),
    ] = None
    minimal_topk: Annotated[
        int | None,
        _decoding("--minimal-topk", help="Limits steps to max-tokens divided by it; default: 1."),
    ] = None
    temperature: Annotated[
        float | None, _decoding("--temperature", help="0 takes the likeliest token; default: 0.")
    ] = None
    top_k: Annotated[
        int | None, _decoding("--top-k", help="Sample from the K likeliest tokens.")
    ] = None
    top_p: Annotated[
        float | None, _decoding("--top-p", help="Sample from the likeliest tokens up to this mass.")
    ] = None
    seed: Annotated[
        int | None,
        _decoding("--seed", help="Seed of sampling; default: 0, `serve`: another each time."),
    ] = None
    eos_early_stop: Annotated[
        bool | None,
        _decoding(
            "--eos-early-stop/--no-eos-early-stop",
            help="End as soon as all before the end token is filled in; on here, off in Python.",
        ),
    ] = None
    ignore_eos: Annotated[bool, _decoding("--ignore-eos", help="Decode all of max-tokens.")] = False
    stop: Annotated[
        list[str] | None,
        _decoding("--stop", metavar="TEXT", help="Text that ends the answer; may be repeated."),
    ] = None
    stop_token_ids: Annotated[
        str | None,
        _decoding("--stop-token-ids", metavar="IDS", help="Token ids that end the answer: 1,2."),
    ] = None
    mask_token_id: Annotated[
        int | None, _decoding("--mask-token-id", help="Where the checkpoint does not say.")
    ] = None
    eos_token_id: Annotated[
        int | None, _decoding("--eos-token-id", help="Where the checkpoint does not say.")
    ] = None
    pad_token_id: Annotated[
        int | None, _decoding("--pad-token-id", help="Where the checkpoint does not say.")
    ] = None
    delete_token_id: Annotated[
        int | None, _decoding("--delete-token-id", help="levenshtein: where config.json is silent.")
    ] = None
    split_token_id: Annotated[
        int | None, _decoding("--split-token-id", help="levenshtein: where config.json is silent.")
    ] = None
    greedy: Annotated[
        bool | None,
        _decoding("--greedy/--no-greedy", help="Take likeliest tokens at any temperature."),
    ] = None
    confidence: Annotated[
        str | None,
        _decoding(
            "--confidence",
            metavar="KIND",
            help=f"Probability by which tokens are accepted: {', '.join(CONFIDENCES)}; default: "
            "the algorithm's.",
        ),
    ] = None
    low_threshold: Annotated[
        float | None,
        _decoding("--low-threshold", help="hierarchy: of the best of each gap; default: 0.4."),
    ] = None
    remask_threshold: Annotated[
        float | None,
        _decoding("--remask-threshold", help="hierarchy_remasking: of tokens; default: 0.4."),
    ] = None
    credit_alpha: Annotated[
        float | None, _decoding("--credit-alpha", help="credit: its weight; default: 0.7.")
    ] = None
    credit_gamma: Annotated[
        float | None,
        _decoding("--credit-gamma", help="credit: power of probabilities; default: 0.2."),
    ] = None
    credit_beta: Annotated[
        float | None, _decoding("--credit-beta", help="credit: what a step leaves; default: 0.8.")
    ] = None
    factor: Annotated[
        float | None, _decoding("--factor", help="factor: higher accepts more; default: 1.")
    ] = None
    eb_threshold: Annotated[
        float | None,
        _decoding(
            "--eb-threshold",
            help="Sum of entropies: entropy_bounded, default 0.35; DiffusionGemma, default 0.1.",
        ),
    ] = None
    eb_gamma: Annotated[
        float | None,
        _decoding("--eb-gamma", help="lowest_entropy: a bound on entropies; default: a schedule."),
    ] = None
    canvas_length: Annotated[
        int | None,
        _decoding("--canvas-length", help="LLaDA-MoE, RND1: prompt and answer, for max-tokens."),
    ] = None
    eos_at_end: Annotated[
        bool | None,
        _decoding("--eos-at-end/--no-eos-at-end", help="RND1: the last slot holds eos, not pad."),
    ] = None
    canvas_cache: Annotated[
        str | None,
        _decoding(
            "--canvas-cache",
            metavar="KIND",
            help=f"LLaDA-MoE: {', '.join(CANVAS_CACHES)}; faster, other answers; default: none.",
        ),
    ] = None

    prefix_look: Annotated[
        int | None, _decoding("--prefix-look", help="vicinity: positions before; default: 16.")
    ] = None
    after_look: Annotated[
        int | None, _decoding("--after-look", help="vicinity: positions behind; default: 16.")
    ] = None
    warmup_steps: Annotated[
        int | None,
        _decoding("--warmup-steps", help="First forwards without cache; default: 4 with vicinity."),
    ] = None
    cache_update_freq: Annotated[
        int | None,
        _decoding(
            "--cache-update-freq", metavar="N", help="A whole forward every N; default: none."
        ),
    ] = None
    cont_weight: Annotated[
        float | None,
        _decoding("--cont-weight", help="LLaDA-MoE: smoothing, 0.3 for one; default: 0, none."),
    ] = None
    cont_weight_init: Annotated[
        float | None, _decoding("--cont-weight-init", help="Its first weight; default: 0.15.")
    ] = None
    cont_weight_growth: Annotated[
        float | None, _decoding("--cont-weight-growth", help="Each forward's more; default: 0.02.")
    ] = None
    threshold_decay: Annotated[
        float | None,
        _decoding("--threshold-decay", help="Smoothing's fall from 1 a forward; default: 0.02."),
    ] = None
    t_max: Annotated[
        float | None,
        _decoding(
            "--t-max", help="DiffusionGemma: first step's temperature over --temperature; 0.8."
        ),
    ] = None
    t_min: Annotated[
        float | None,
        _decoding("--t-min", help="DiffusionGemma: the same after the last; default: 0.4."),
    ] = None
    stability_threshold: Annotated[
        int | None,
        _decoding(
            "--stability-threshold",
            metavar="N",
            help="DiffusionGemma: a canvas ends once its likeliest tokens stayed N steps; "
            "default: 1.",
        ),
    ] = None
    confidence_threshold: Annotated[
        float | None,
        _decoding(
            "--confidence-threshold",
            help="DiffusionGemma: and their mean entropy is below this; default: 0.005.",
        ),
    ] = None

    def params(self) -> SamplingParams:
        """The sampling parameters as far as flags set them. Raises: ConfigError."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["algorithm"] = _ALGORITHM_ALIASES.get(values["algorithm"], values["algorithm"])
        if self.stop_token_ids is not None:
            values["stop_token_ids"] = parse_ids("stop-token-ids", self.stop_token_ids)
        values["ignore_eos"] = self.ignore_eos or None
        values["stop"] = values["stop"] or None
        return SamplingParams(**values)


def parse_ids(name: str, text: str) -> list[int]:
    """The token ids in `1,2,3`. Raises: ConfigError."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; write token ids as 1,2,3") from None


def as_flags(text: str, names: Iterable[str]) -> str:
    """A message in which Python's `expert_memory` is the command line's `--expert-memory`.

    `names`: flags without dashes. Names of several words are found anywhere but in quotes and
    paths; one word may be any word, and is taken for a flag where a message says what it is, or
    what to do with it.
    """
    spelt = sorted(names, key=len, reverse=True)
    if not spelt:
        return text
    any_name = "|".join(map(re.escape, spelt))
    places = [
        rf"(?:^|(?<=: )|(?<=\band ))(?:{any_name})(?= (?:is|are|and|says|draws|needs)\b)",
        rf"(?<=\braise |\blower )(?:{any_name})(?=$|[,;.]| (?:to|by)\b)",
        rf"(?<=\bpass )(?:{any_name})(?= to\b)",
    ]
    compound = "|".join(name.replace("-", "_") for name in spelt if "-" in name)
    if compound:
        places.append(rf"(?<![\w`./-])(?:{compound})(?![\w`=/-]|\.\w)")
    # What stands in quotes is a value of the user's. An apostrophe within a word is no quote.
    quoted = r"(?<!\w)'[^']*'|\"[^\"]*\""
    return re.sub(
        "|".join([quoted, *places]),
        lambda found: found[0] if found[0][0] in "'\"" else f"--{found[0].replace('_', '-')}",
        text,
    )


def takes_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags of every dataclass among its parameters, one by one, and --config.

    The command itself still gets the dataclass.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = parameter.annotation
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = kind
        hints = get_type_hints(kind, include_extras=True)
        parameters.extend(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        )

    parameters.append(
        inspect.Parameter(
            "config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_Config
        )
    )

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        del values["config_file"]
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _rank(ctx: Any, name: str) -> int:
    """How strong the place is that a flag's value is from; 0 for its default."""
    source = ctx.get_parameter_source(name)
    places = ("DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")
    return 0 if source is None or source.name not in places else places.index(source.name) + 1


class PanelCommand(typer.core.TyperCommand):
    """Plain help, its flags grouped by panel. Importing rich for it would take too long."""

    def make_context(self, *args: Any, **values: Any) -> Any:
        """Errors in values tell where these are from, where that is no flag."""
        try:
            return super().make_context(*args, **values)
        except typer.BadParameter as error:
            param, ctx = error.param, error.ctx
            if param is not None and ctx is not None and param.name is not None:
                source = ctx.get_parameter_source(param.name)
                if source is not None and source.name == "DEFAULT_MAP":
                    error.message += " (in the config file)"
            raise

    def invoke(self, ctx: Any) -> Any:
        """Errors name flags as they are typed, but for those of files, whose keys are what they
        are."""
        self.settle(ctx)
        try:
            return super().invoke(ctx)
        except OledMoeError as error:
            if not isinstance(error, CheckpointError | TraceError):
                error.args = (as_flags(str(error), self.flag_names()),)
            raise

    def settle(self, ctx: Any) -> None:
        """Of flags that exclude each other, one that is given wins over one from the environment,
        and that over one of a file. Mutates: the parameters of `ctx`."""
        for group in EXCLUSIVE:
            ranks = {name: _rank(ctx, name) for name in group if ctx.params.get(name) is not None}
            for name, rank in ranks.items():
                if 0 < rank < max(ranks.values()):
                    ctx.params[name] = None
        self._drop_what_another_algorithm_looks_at(ctx)

    def flag_names(self) -> set[str]:
        """Long names of all flags, without the dashes."""
        names = (name for param in self.params for name in param.opts)
        return {name[2:] for name in names if name.startswith("--")}

    def _drop_what_another_algorithm_looks_at(self, ctx: Any) -> None:
        """What the environment or a file says of decoding is for its own algorithm, not for one
        that is given, or that the environment says."""
        algorithm = ctx.params.get("algorithm")
        if algorithm is None:
            return
        rank = _rank(ctx, "algorithm")
        algorithm = _ALGORITHM_ALIASES.get(algorithm, algorithm)
        for name in ctx.params:
            is_weaker = 0 < _rank(ctx, name) < rank
            if is_weaker and algorithm in ALGORITHMS and not looks_at(algorithm, name):
                ctx.params[name] = None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                panel = getattr(param, "rich_help_panel", None)
                name = "Arguments" if is_argument else panel or "Options"
                panels.setdefault(name, []).append(record)
        begin = len(formatter.buffer)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl([(what, help.replace("-", _HYPHEN)) for what, help in records])
        formatter.buffer[begin:] = [text.replace(_HYPHEN, "-") for text in formatter.buffer[begin:]]
