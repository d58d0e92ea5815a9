"""`oled-moe trace record|show|synth`: routing traces made, looked at and made up.

Results go to stdout, progress to stderr. Torch and numpy are imported inside functions.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oled_moe.cli_flags import (
    EngineFlags,
    Json,
    PanelCommand,
    SamplingFlags,
    flag,
    takes_flags,
)
from oled_moe.cli_shared import (
    LogFlags,
    Model,
    open_engine,
    print_json,
    print_rows,
    print_table,
    read_prompt_lines,
    status_line,
    use_log_flags,
)
from oled_moe.cli_text import number, percent
from oled_moe.config import SamplingParams, check_int, format_size
from oled_moe.errors import InputError

if TYPE_CHECKING:
    from oled_moe.engine import Engine
    from oled_moe.recording import PromptToRecord
    from oled_moe.trace_stats import Overlap, TraceStats
    from oled_moe.traces import RoutingTrace

# Repeated here because their modules need numpy; a test compares.
SUFFIX = ".trace.safetensors"
PRESET_NAMES = (
    *("llada2-mini", "llada2-flash", "llada2.2-flash"),
    *("sdar-30b", "rnd1", "llada-moe-7b", "diffusion-gemma-26b"),
)
WORKLOAD_NAMES = ("math", "code", "quiz", "mixed")

trace_app = typer.Typer(
    name="trace",
    help="Record, look at and make up routing traces.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@trace_app.callback(invoke_without_command=True)
def trace(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


Out = Annotated[
    Path,
    flag("--out", metavar="FILE", help=f"Where to write; {SUFFIX} is appended where missing."),
]
Overwrite = Annotated[bool, flag("--overwrite", help="Replace the file should it exist.")]
TracePath = Annotated[Path, typer.Argument(metavar="FILE", help=f"A trace, NAME{SUFFIX}.")]


@dataclass(frozen=True, slots=True)
class RecordFlags:
    """What is recorded besides routes."""

    gate_scores: Annotated[
        bool,
        flag("--gate-scores", panel="Recording", help="All router scores: E numbers per token."),
    ] = False
    hidden_cosine: Annotated[
        bool,
        flag("--hidden-cosine", panel="Recording", help="Similarity of hidden states over steps."),
    ] = False
    input_embedding: Annotated[
        bool, flag("--input-embedding", panel="Recording", help="The embeddings of all tokens.")
    ] = False
    no_token_ids: Annotated[
        bool, flag("--no-token-ids", panel="Recording", help="Leave the tokens themselves out.")
    ] = False

    def include(self) -> tuple[str, ...]:
        """The optional tensors that are wanted."""
        wanted = {
            "gate_scores": self.gate_scores,
            "hidden_cosine": self.hidden_cosine,
            "input_embedding": self.input_embedding,
            "token_ids": not self.no_token_ids,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


@trace_app.command(cls=PanelCommand, short_help="Run prompts and record what is routed.")
@takes_flags
def record(
    model: Model,
    prompts: Annotated[
        Path,
        flag(
            "--prompts",
            metavar="FILE",
            help='JSON lines {"prompt": TEXT} (or "messages", or "prompt_ids"; "id" and "workload" '
            "as you like), or plain text, one prompt a line.",
        ),
    ],
    out: Out,
    workload: Annotated[
        str, flag("--workload", metavar="NAME", help="Of prompts that do not name one.")
    ] = "unknown",
    limit: Annotated[int | None, flag("--limit", help="Only the first N prompts.")] = None,
    is_raw: Annotated[
        bool, flag("--raw", help="Take prompts as they are, without the chat template.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    recorded: RecordFlags = RecordFlags(),
    engine: EngineFlags = EngineFlags(),
    sampling: SamplingFlags = SamplingFlags(),
    log: LogFlags = LogFlags(),
) -> None:
    """Answer prompts one after another and write down what was routed.

    Without a flag for memory all experts stay in it; the trace does not depend on that.
    """
    use_log_flags(log)
    config, params = engine.config(), sampling.params()
    if limit is not None:
        check_int("limit", limit, minimum=1)
    path = _free_path(out, overwrite=overwrite)
    entries = _read_prompts(prompts)[:limit]
    from oled_moe.chat import with_face_defaults

    with open_engine(model, config, is_quiet=as_json) as opened:
        params = with_face_defaults(opened, params)
        items, params = _items(opened, entries, params, workload=workload, is_raw=is_raw)
        from oled_moe.recording import record_trace

        with status_line(is_quiet=as_json) as say:

            def progress(done: int, total: int) -> None:
                say(f"recording: prompt {done + 1} of {total}")

            trace = record_trace(
                opened,
                items,
                params,
                include=recorded.include(),
                model_name=model,
                progress=progress,
            )
    _write(trace, path, as_json=as_json)


@trace_app.command(cls=PanelCommand, short_help="Print what a trace says about routing.")
@takes_flags
def show(file: TracePath, as_json: Json = False, log: LogFlags = LogFlags()) -> None:
    """Overlap, activation, stability and how cacheable the routing is."""
    use_log_flags(log)
    from oled_moe.trace_stats import describe_trace
    from oled_moe.traces import load_trace

    trace = load_trace(file)
    stats = describe_trace(trace)
    if as_json:
        print_json({**summary_of(trace, file), "stats": None if stats is None else stats.to_dict()})
        return
    print_rows(summary_rows(trace, file))
    if stats is None:
        print("\nNothing denoises in it, so there is nothing more to say.")
        return
    _print_stats(stats, trace.top_k, trace.num_experts)


@trace_app.command(cls=PanelCommand, short_help="Make up a trace like those of the paper's models.")
@takes_flags
def synth(
    out: Out,
    preset: Annotated[
        str,
        flag("--preset", metavar="NAME", help=f"{', '.join(PRESET_NAMES)}."),
    ] = "llada2-mini",
    workload: Annotated[
        str | None,
        flag("--workload", metavar="NAME", help=f"{', '.join(WORKLOAD_NAMES)}; default: mixed."),
    ] = None,
    num_requests: Annotated[int | None, flag("--num-requests", help="Default: 12.")] = None,
    prompt_tokens: Annotated[
        int | None, flag("--prompt-tokens", help="Mean prompt length; default: 96.")
    ] = None,
    answer_tokens: Annotated[
        int | None, flag("--answer-tokens", help="Mean answer length; default: 128.")
    ] = None,
    block_length: Annotated[
        int | None, flag("--block-length", help="1 to 1024; default: the preset's.")
    ] = None,
    batch_size: Annotated[
        int | None, flag("--batch-size", help="Sequences per forward; default: 1.")
    ] = None,
    num_layers: Annotated[
        int | None, flag("--num-layers", help="MoE layers; default: the preset's.")
    ] = None,
    heterogeneity: Annotated[
        float | None, flag("--heterogeneity", help="How much layers differ; default: 0.5.")
    ] = None,
    flip: Annotated[
        float | None,
        flag("--flip", help="Share of its experts that a token loses on acceptance."),
    ] = None,
    threshold: Annotated[
        float | None, flag("--threshold", help="Confidence that accepts a token; default: 0.95.")
    ] = None,
    seed: Annotated[int | None, flag("--seed", help="Of the requests; default: 0.")] = None,
    model_seed: Annotated[
        int | None, flag("--model-seed", help="Of the model; default: 0.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    log: LogFlags = LogFlags(),
) -> None:
    """Make up a trace from seeds; the same flags give the same file."""
    use_log_flags(log)
    given: dict[str, Any] = {
        "workload": workload,
        "num_requests": num_requests,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "block_length": block_length,
        "batch_size": batch_size,
        "num_layers": num_layers,
        "heterogeneity": heterogeneity,
        "flip": flip,
        "threshold": threshold,
        "seed": seed,
        "model_seed": model_seed,
    }
    path = _free_path(out, overwrite=overwrite)
    from oled_moe.synthesis import synthesize

    changes = {name: value for name, value in given.items() if value is not None}
    _write(synthesize(preset, **changes), path, as_json=as_json)


# Files


def _free_path(out: Path, *, overwrite: bool) -> Path:
    """Where to write: with the suffix, in a folder that is there, and not over another file.

    Raises: InputError.
    """
    if not out.name:
        raise InputError(f"out is {str(out)!r}; name a file")
    if not out.name.endswith(SUFFIX):
        stem = out.name.removesuffix(".safetensors").removesuffix(".trace")
        out = out.with_name(stem + SUFFIX)
    if out.is_dir():
        raise InputError(f"{out}: is a directory; name a file")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: there is no such directory; make it first")
    if out.exists() and not overwrite:
        raise InputError(f"{out}: exists; give --overwrite to replace it, or another name")
    return out


def _write(trace: "RoutingTrace", path: Path, *, as_json: bool) -> None:
    from oled_moe.traces import save_trace

    save_trace(trace, path)
    if as_json:
        print_json(summary_of(trace, path))
    else:
        print_rows(summary_rows(trace, path))


def _read_prompts(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Where each prompt stands in the file, and its fields. Raises: InputError naming the line."""
    is_json, lines = read_prompt_lines(path)
    if not is_json:
        return [(place, {"prompt": line}) for place, line in lines]
    return [(place, _parse_entry(place, line)) for place, line in lines]


def _parse_entry(place: str, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: is no JSON ({error}); write one object a line") from None
    if not isinstance(entry, dict):
        raise InputError(f"{place}: is no object; write one with prompt, messages or prompt_ids")
    kinds = [name for name in ("prompt", "messages", "prompt_ids") if name in entry]
    if len(kinds) != 1:
        found = " and ".join(kinds or sorted(map(repr, entry))) or "nothing"
        raise InputError(f"{place}: has {found}; give one of prompt, messages, prompt_ids")
    value = entry[kinds[0]]
    if kinds[0] == "prompt" and not isinstance(value, str):
        raise InputError(f"{place}: prompt is {value!r}; allowed: a string")
    if kinds[0] == "prompt_ids" and not _is_list_of(value, int):
        raise InputError(f"{place}: prompt_ids is {value!r}; allowed: a list of whole numbers")
    if kinds[0] == "messages" and not _are_messages(value):
        raise InputError(f'{place}: messages is {value!r}; allowed: [{{"role": …, "content": …}}]')
    for name in ("id", "workload"):
        if name in entry and not isinstance(entry[name], str | int):
            raise InputError(f"{place}: {name} is {entry[name]!r}; allowed: a string")
    return entry


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, kind) and not isinstance(item, bool) for item in value
    )


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(item, dict)
            and isinstance(item.get("role"), str)
            and isinstance(item.get("content"), str)
            for item in value
        )
    )


def _items(
    engine: "Engine",
    entries: Sequence[tuple[str, dict[str, Any]]],
    params: SamplingParams,
    *,
    workload: str,
    is_raw: bool,
) -> tuple[list["PromptToRecord"], SamplingParams]:
    """Prompts as the engine takes them, and parameters that end answers with a turn."""
    from oled_moe.chat import chat_request
    from oled_moe.recording import PromptToRecord

    items, chat_params = [], params
    for index, (place, entry) in enumerate(entries):
        if "prompt_ids" in entry:
            prompt: str | list[int] = entry["prompt_ids"]
        elif "messages" in entry:
            tokenizer = engine.tokenizer
            if is_raw or tokenizer is None or tokenizer.chat_template is None:
                raise InputError(f"{place}: messages need the model's chat template; give prompt")
            prompt = tokenizer.apply_chat_template(entry["messages"])
            _, chat_params = chat_request(engine, "", params)
        elif is_raw:
            prompt = entry["prompt"]
        else:
            prompt, chat_params = chat_request(engine, entry["prompt"], params)
        name = str(entry.get("id", index))
        items.append(PromptToRecord(prompt, name, str(entry.get("workload", workload))))
    return items, chat_params


# What a trace holds


def summary_of(trace: "RoutingTrace", path: Path) -> dict[str, Any]:
    """As JSON: the header and the sizes."""
    header = {name: value for name, value in trace.header().items() if name != "requests"}
    return {
        "path": str(path),
        **header,
        "num_requests": len(trace.requests),
        "num_forwards": trace.num_forwards,
        "num_rows": trace.num_rows,
        "num_tokens": trace.num_tokens,
        "optional_tensors": _optional(trace),
        "file_bytes": path.stat().st_size,
    }


def summary_rows(trace: "RoutingTrace", path: Path) -> list[tuple[str, str]]:
    """As text: what `inspect` says of a trace."""
    workloads: dict[str, int] = {}
    for request in trace.requests:
        workloads[request.workload] = workloads.get(request.workload, 0) + 1
    named = ", ".join(f"{many} {name}" for name, many in workloads.items())
    num_generated = sum(request.num_generated_tokens for request in trace.requests)
    return [
        ("path", str(path)),
        # The names of made-up models say that they are.
        (
            "trace",
            f"{trace.source}, {trace.model_name.removeprefix('synthetic ')} ({trace.model_type})",
        ),
        (
            "experts",
            f"{trace.num_moe_layers} layers, {trace.num_experts} per layer, top {trace.top_k}; "
            f"{format_size(trace.expert_bytes)} each",
        ),
        ("decoding", f"blocks of {trace.block_length}, threshold {trace.threshold:g}"),
        ("requests", f"{len(trace.requests)}: {named}"),
        (
            "forwards",
            f"{trace.num_forwards:,}, {trace.num_rows:,} rows, {number(trace.num_tokens)} tokens "
            f"run for {number(num_generated)} generated",
        ),
        ("also holds", ", ".join(_optional(trace)) or "nothing optional"),
        ("size", format_size(path.stat().st_size)),
    ]


def _optional(trace: "RoutingTrace") -> list[str]:
    names = ("gate_scores", "hidden_cosine", "input_embedding", "token_ids")
    return [name for name in names if getattr(trace, name) is not None]


# Statistics


def _print_stats(stats: "TraceStats", top_k: int, num_experts: int) -> None:
    active = stats.activation
    rows = stats.rows_by_phase
    phases = ", ".join(f"{many:,} {phase}" for phase, many in rows.items())
    print_rows(
        [
            ("rows", f"{phases}; {stats.steps_per_block:.1f} denoising steps a block"),
            ("", ""),
            (
                "active experts",
                f"{active.mean:.1f} of {num_experts} ({percent(active.ratio)}) for a block, "
                f"{active.union:.1f} for a forward",
            ),
            (
                "against a token",
                f"{active.over_one_token:.1f} times the experts of one token, "
                f"{active.flops_over_one_token:.1f} times its FLOPs",
            ),
            ("by workload", _named(stats.workloads, "{:.1f}")),
            ("by layer", " ".join(_cell(value, "{:.0f}") for value in active.per_layer)),
            ("by step", " ".join(_cell(value, "{:.0f}") for value in active.by_step)),
            ("by masks left", _named(active.by_masks, "{:.0f}")),
        ]
    )
    print("\nOverlap: the share of a row's experts that an earlier row had")
    print_table(
        ("steps apart", "overlap", "Jaccard", "pairs"), [_overlap_row(g) for g in stats.gaps]
    )
    print()
    ends = [*stats.boundaries, stats.unrelated]
    print_table(("block boundary", "overlap", "Jaccard", "pairs"), [_overlap_row(g) for g in ends])
    _print_stability(stats, top_k)
    _print_consistency(stats, top_k)


def _print_stability(stats: "TraceStats", top_k: int) -> None:
    print("\nStability: the share of a token's experts it has a step later, by its confidence")
    edges = [f".{low}" for low in range(10)]
    rows = [
        (
            item.label,
            *(_cell(mean, "{:.2f}") for mean in item.means),
            _cell(item.mean, "{:.2f}"),
            _cell(item.correlation, "{:+.2f}"),
        )
        for item in stats.stability
    ]
    print_table(("from", *edges, "all", "corr."), rows)
    print("\nExperts kept, all tokens: share of each number in a bin of confidence")
    table = stats.stability[0].table
    kept = [
        (f"{many} of {top_k}", *(_cell(None if b is None else b[many], "{:.2f}") for b in table))
        for many in range(top_k, -1, -1)
    ]
    print_table(("from", *edges), kept)
    if stats.hidden_cosine is not None:
        cosine = stats.hidden_cosine
        print("\nCosine of a layer's input with that a step before")
        by_layer = " ".join(_cell(value, "{:.2f}") for value in cosine.per_layer)
        kinds = ", ".join(f"{kind} {_cell(v, '{:.2f}')}" for kind, v in cosine.by_kind.items())
        print_rows([("mean", f"{cosine.mean:.2f}"), ("by layer", by_layer), ("by token", kinds)])


def _print_consistency(stats: "TraceStats", top_k: int) -> None:
    found = stats.consistency
    srp = "-" if found.srp is None else f"{found.srp:.3f}"
    print("\nLocal routing consistency (moe-lrc)")
    print_rows(
        [
            (
                "SRP",
                f"{srp}: the best F1 of one set of experts for all tokens of a block, "
                f"{found.srp_size:.1f} times K of them",
            )
        ]
    )
    rows = [
        (f"{size} ({size // top_k} K)", percent(share), percent(found.block_sch[size]))
        for size, share in found.sch.items()
    ]
    print_table(("experts cached", "SCH, a step", "SCH, all steps of a block"), rows)


def _overlap_row(item: "Overlap") -> tuple[str, str, str, str]:
    return (
        item.label,
        _cell(item.overlap, "{:.3f}"),
        _cell(item.jaccard, "{:.3f}"),
        f"{item.num_pairs:,}",
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _named(values: dict[Any, float], form: str) -> str:
    return ", ".join(f"{name}: {form.format(value)}" for name, value in values.items())
