"""The command line: parses flags, runs one thing, prints. Only it and the other `cli_` files print.

Results go to stdout, everything else to stderr; with --json stdout is one JSON object, errors
included. Torch, numpy and rich are imported inside commands: `--help` waits for none of them.
"""

import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import oled_moe
from oled_moe.cli_bench import bench
from oled_moe.cli_bench_serve import bench_serve
from oled_moe.cli_chat import chat
from oled_moe.cli_flags import (
    MODEL_HELP,
    Device,
    EngineFlags,
    ExpertMemory,
    Json,
    PanelCommand,
    Policy,
    SamplingFlags,
    Threads,
    flag,
    parse_ids,
    takes_flags,
)
from oled_moe.cli_pack import pack
from oled_moe.cli_plan import doctor, plan
from oled_moe.cli_pull import pull
from oled_moe.cli_reproduce import reproduce
from oled_moe.cli_serve import serve
from oled_moe.cli_settings import config_app
from oled_moe.cli_shared import (
    LogFlags,
    LogFormat,
    LogLevel,
    Model,
    check_output,
    configure_logging,
    note,
    open_engine,
    print_json,
    print_notice,
    print_rows,
    print_table,
    status_line,
    use_log_flags,
    versions,
    wrapped,
)
from oled_moe.cli_simulate import simulate
from oled_moe.cli_text import (
    checkpoint_rows,
    comparison_rows,
    count,
    device_name,
    machine_rows,
    plan_rows,
    stats_rows,
)
from oled_moe.cli_trace import summary_of, summary_rows, trace_app
from oled_moe.config import (
    DecodingParams,
    EngineConfig,
    check_int,
    format_size,
)
from oled_moe.errors import ConfigError, InputError, OledMoeError
from oled_moe.model_paths import find_model

if TYPE_CHECKING:
    from oled_moe.demo_screen import Answer, DemoRun, Question
    from oled_moe.engine import Engine, GenerationResult, StepEvent

logger = logging.getLogger(__name__)

INTERRUPTED = 130
_TRUE_WORDS = ("1", "true", "t", "yes", "y", "on")
app = typer.Typer(
    name="oled-moe",
    help="Runs mixture-of-experts diffusion language models larger than the memory at hand.",
    epilog="Every flag can be set in the environment, --expert-memory as OLED_MOE_EXPERT_MEMORY, "
    "or in a file given as --config; `config show serve` tells what won.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code of errors.py, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_json = "--json" in arguments or os.environ.get("OLED_MOE_JSON", "").lower() in _TRUE_WORDS
    _mend_streams()
    try:
        return _run(arguments, is_json=is_json)
    except BrokenPipeError:
        # Whoever read the output has gone; nothing is left to say, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print_notice(f"error: the output cannot be written ({error.strerror})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _mend_streams() -> None:
    """Closed streams become empty ones, and what a stream cannot encode is escaped."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: list[str], *, is_json: bool) -> int:
    try:
        # Without standalone mode typer raises what it would print.
        code = app(arguments, prog_name="oled-moe", standalone_mode=False)
        sys.stdout.flush()
    except OledMoeError as error:
        return _report_error(str(error), error.exit_code, is_json=is_json)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        raise
    # The one handler of what nobody expected: users get a line, not a traceback.
    except Exception as error:
        usage = _usage_message(error)
        if usage is not None:
            return _report_error(usage, 2, is_json=is_json)
        if isinstance(error, OSError) and error.filename is None:
            raise
        if logger.isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        message = f"unexpected {type(error).__name__}: {error} (--log-level debug shows where)"
        return _report_error(message, 1, is_json=is_json)
    if code == INTERRUPTED:
        return _report_error("interrupted", INTERRUPTED, is_json=is_json)
    return code if isinstance(code, int) else 0


def _usage_message(error: Exception) -> str | None:
    """The message of an error in the command line itself, None for any other error."""
    # Typer has click within itself or beside it, by version; all its usage errors have one base.
    usage_error = typer.BadParameter.__base__
    if usage_error is None or not isinstance(error, usage_error):
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "oled-moe"
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]  # click's
    return f"{message}; see {command} --help"


def _report_error(message: str, exit_code: int, *, is_json: bool) -> int:
    message = " ".join(message.split())
    print_notice(f"error: {message}")
    if is_json:
        print_json({"error": {"message": message, "exit_code": exit_code}})
        sys.stdout.flush()
    return exit_code


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    is_version: Annotated[bool, flag("--version", help="Print the version.")] = False,
) -> None:
    configure_logging(log_level or "warning", log_format or "text")
    if is_version:
        print(f"oled-moe {oled_moe.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(cls=PanelCommand, short_help="Watch a small bundled model at work, experts offloaded.")
@takes_flags
def demo(
    device: Device = None,
    policy: Policy = None,
    expert_memory: ExpertMemory = "25%",
    num_questions: Annotated[int, flag("-n", "--num-questions", help="How many questions.")] = 6,
    threads: Threads = None,
    as_json: Json = False,
    log: LogFlags = LogFlags(),
) -> int:
    """Answer held-out questions with a quarter of the experts in memory, then with all of them.

    Runs a small model that comes with the program. The answers of both runs must be the same,
    token for token; otherwise the exit code is 1.
    """
    use_log_flags(log)
    # Experts computed on the CPU may round differently; without them the tokens must agree.
    config = EngineConfig(
        device=device or "cpu",
        policy=policy,
        expert_memory=expert_memory,
        threads=threads,
        cpu_experts=False,
    )
    run = _run_demo(config, num_questions, is_quiet=as_json)
    if as_json:
        print_json({**run.to_dict(), "versions": versions()})
    return 0 if run.is_same else 1


@app.command(cls=PanelCommand, short_help="Answer one prompt.")
@takes_flags
def generate(
    model: Model,
    prompt: Annotated[
        str | None, flag("-p", "--prompt", metavar="TEXT", help="The prompt; else stdin.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        flag("--prompt-file", metavar="PATH", help="A UTF-8 file that holds the prompt."),
    ] = None,
    prompt_ids: Annotated[
        str | None, flag("--prompt-ids", metavar="IDS", help="The prompt as token ids: 1,2,3.")
    ] = None,
    system: Annotated[
        str | None, flag("--system", metavar="TEXT", help="A system message before it.")
    ] = None,
    is_raw: Annotated[
        bool, flag("--raw", help="Take the prompt as it is, without the chat template.")
    ] = False,
    stream: Annotated[
        bool | None,
        flag("--stream/--no-stream", help="Print text as it is settled; default: on a terminal."),
    ] = None,
    is_quiet: Annotated[bool, flag("-q", "--quiet", help="Only errors on stderr.")] = False,
    as_json: Json = False,
    engine: EngineFlags = EngineFlags(),
    sampling: SamplingFlags = SamplingFlags(),
    log: LogFlags = LogFlags(),
) -> None:
    """Answer one prompt: text on stdout; the plan in effect and statistics on stderr."""
    use_log_flags(log)
    check_output()
    config, params = engine.config(), sampling.params()
    text = _read_prompt(prompt, prompt_file, prompt_ids)
    if system is not None and (is_raw or prompt_ids is not None):
        raise ConfigError("system needs the chat template; leave out --raw and --prompt-ids")
    from oled_moe.chat import chat_request, with_face_defaults

    with open_engine(model, config, is_quiet=is_quiet) as opened:
        params = with_face_defaults(opened, params)
        request: str | list[int] = text
        if prompt_ids is not None:
            request = parse_ids("prompt-ids", prompt_ids)
        elif not is_raw:
            request, params = chat_request(opened, text, params, system=system)
        decoding = DecodingParams.resolve(params.with_defaults(opened.sampling_defaults))
        is_streaming = not as_json and (sys.stdout.isatty() if stream is None else stream)
        events = opened.stream(request, params)
        if not is_quiet:
            note("plan", plan_rows(model, opened, decoding))
        result = _print_answer(events, is_streaming=is_streaming, is_silent=as_json)
        if as_json:
            print_json(_generation_dict(model, opened, decoding, result))
        if not is_quiet:
            note("statistics", stats_rows(opened, result))


app.command(cls=PanelCommand, short_help="Download a model from the hub.")(pull)
app.command(cls=PanelCommand, short_help="Talk with a model.")(chat)
app.command(cls=PanelCommand, short_help="Serve a model over OpenAI's API, with a page.")(serve)
app.command(cls=PanelCommand, short_help="Measure this machine; say whether MODEL fits.")(doctor)
app.command(cls=PanelCommand, short_help="Say what MODEL would do on another machine.")(plan)
app.command(cls=PanelCommand, short_help="Pack MODEL: an expert one read, optionally int8, int4.")(
    pack
)
app.command(cls=PanelCommand, short_help="Run policies side by side; table, page.")(bench)
app.command("bench-serve", cls=PanelCommand, short_help="Put load on a server; table, JSON.")(
    bench_serve
)
app.command(cls=PanelCommand, short_help="Replay a routing trace under any policy.")(simulate)
app.command(cls=PanelCommand, short_help="Redo a figure of the paper.")(reproduce)


app.add_typer(trace_app, name="trace", short_help="Record routing, look at it, make it up.")
app.add_typer(config_app, name="config", short_help="Say which settings a command takes.")


@app.command(cls=PanelCommand, short_help="Say what a checkpoint or a trace holds.")
@takes_flags
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help=MODEL_HELP, envvar="OLED_MOE_MODEL")],
    is_verified: Annotated[
        bool,
        flag("--verify/--no-verify", help="Read all of a pack and compare checksums."),
    ] = True,
    as_json: Json = False,
    log: LogFlags = LogFlags(),
) -> None:
    """Say what a checkpoint holds, from its config and headers alone, or what a trace holds.

    A pack is read whole and compared with its checksums.
    """
    use_log_flags(log)
    from oled_moe.traces import is_trace, load_trace

    if is_trace(path):
        trace = load_trace(path)
        if as_json:
            print_json(summary_of(trace, Path(path)))
        else:
            print_rows(summary_rows(trace, Path(path)))
        return
    find_model(path)
    from oled_moe.inspection import describe_checkpoint, verify_pack

    summary = describe_checkpoint(path)
    num_verified = None
    if summary.is_pack and is_verified:
        with status_line(is_quiet=as_json) as say:

            def progress(what: str, done: int, total: int) -> None:
                say(f"{what}: {format_size(done)} of {format_size(total)}")

            num_verified = verify_pack(path, progress=progress)
    if as_json:
        values = {**asdict(summary), "path": str(summary.path), "verified_bytes": num_verified}
        print_json(values)
    else:
        print_rows(checkpoint_rows(summary, num_verified))


@app.command(cls=PanelCommand, short_help="Print versions, and facts about this machine.")
@takes_flags
def version(as_json: Json = False) -> None:
    """Print the versions that matter, and facts about this machine."""
    from oled_moe.inspection import package_versions
    from oled_moe.machine import machine_facts

    facts = machine_facts()
    if as_json:
        print_json({**versions(), "machine": facts})
        return
    numbers = list(package_versions().items())
    print_rows([("oled-moe", oled_moe.__version__), ("python", facts["python_version"]), *numbers])
    print()
    print_rows(machine_rows(facts))


# What the commands share


def _read_prompt(prompt: str | None, file: Path | None, ids: str | None) -> str:
    """The prompt text from the one place that was named, else from stdin; empty beside ids.

    One line end at the end of a file or of stdin is not part of the prompt.
    """
    given = [
        name
        for name, value in (("-p", prompt), ("--prompt-file", file), ("--prompt-ids", ids))
        if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both given; give one of them")
    if ids is not None:
        return ""
    if prompt is not None:
        return prompt
    try:
        if file is not None:
            if file.exists() and not file.is_file():
                raise InputError(f"{file}: is not a file; name a text file")
            return file.read_text(encoding="utf-8").removesuffix("\n")
        if not sys.stdin.isatty():
            text = sys.stdin.read()
            if text:
                return text.removesuffix("\n")
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); name a text file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt is not UTF-8 text ({error}); convert it first") from None
    raise ConfigError("there is no prompt; give -p TEXT, --prompt-file FILE, or pipe it in")


# Printing


def _print_answer(
    events: "Iterator[StepEvent]", *, is_streaming: bool, is_silent: bool
) -> "GenerationResult":
    """Print the text as it is settled, or at the end; token ids where there is no tokenizer."""
    num_printed = 0
    result: GenerationResult | None = None
    for event in events:
        if is_streaming and event.text:
            print(event.text[num_printed:], end="", flush=True)
            num_printed = len(event.text)
        result = event.result
    assert result is not None
    if not is_silent:
        text = result.text
        if text is None:
            text = " ".join(map(str, result.token_ids))
        print(text[num_printed:], end="" if text.endswith("\n") else "\n", flush=True)
    return result


# generate


def _generation_dict(
    model: str, engine: "Engine", decoding: DecodingParams, result: "GenerationResult"
) -> dict[str, Any]:
    from oled_moe.inspection import plan_to_dict

    return {
        "model": model,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stats": asdict(result.stats),
        "device": engine.config.device,
        "policy": engine.policy.name,
        "lossy": engine.config.lossy,
        "low_precision": engine.low_form,
        "hardware": engine.hardware.name,
        "hardware_source": engine.hardware_source,
        "plan": plan_to_dict(engine.gpu_plan or engine.memory_plan),
        "params": asdict(decoding),
        "versions": versions(),
    }


# demo


def _run_demo(config: EngineConfig, num_questions: int, *, is_quiet: bool) -> "DemoRun":
    """Both runs, told as they go unless `is_quiet`."""
    from rich.console import Console

    from oled_moe.demo_screen import DemoRun, load_questions, pick_questions

    bundled = load_questions(find_model("demo"))
    check_int("num-questions", num_questions, minimum=1, maximum=len(bundled))
    questions = pick_questions(bundled, num_questions)
    console = (
        None
        if is_quiet
        else Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
    )
    with open_engine("demo", config) as engine:
        facts = {
            "device": config.device,
            "policy": engine.policy.name,
            "hardware": engine.hardware.name,
            "hardware_source": engine.hardware_source,
        }
        num_experts = engine.memory_plan.shape.num_experts_total
        if console is not None:
            _introduce(engine, len(questions))
        offloaded = _ask_all(engine, questions, console)
    if console is not None:
        print("The same again with all experts in memory.")
    with open_engine("demo", replace(config, expert_memory="100%")) as engine:
        resident = _ask_all(engine, questions, None)
    run = DemoRun(offloaded, resident, num_experts, facts)
    if console is not None:
        _print_outcome(run)
    return run


def _introduce(engine: "Engine", num_questions: int) -> None:
    plan, config = engine.memory_plan, engine.config
    all_bytes = plan.shape.num_experts_total * plan.shape.expert_bytes
    words = (
        "A small diffusion model that comes with oled-moe answers "
        f"{count(num_questions, 'question')} that it has not seen in training."
    )
    print(wrapped(words))
    rows = [
        (
            "experts",
            f"{plan.num_slots + plan.num_staging} of {plan.shape.num_experts_total} in memory "
            f"({plan.num_slots} slots, {plan.num_staging} staging): "
            f"{format_size(plan.expert_memory_bytes)} of {format_size(all_bytes)}",
        ),
        ("device", device_name(config.device)),
        ("policy", engine.policy.name),
        ("hardware", f"{engine.hardware.name} ({engine.hardware_source})"),
    ]
    print_rows(rows)
    print()


def _ask_all(engine: "Engine", questions: "Sequence[Question]", console: Any) -> "list[Answer]":
    """Answer every question, after one that is not counted; shown on `console` if there is one."""
    from oled_moe.demo_screen import Asked, answer_lines, watch_question

    answers = []
    with status_line() as say:
        say("warming up")
        Asked(engine, questions[0]).answer()
        say("")
        for i, question in enumerate(questions, start=1):
            if console is None:
                say(f"question {i} of {len(questions)}")
            asked = Asked(engine, question)
            if console is not None and console.is_terminal:
                answer = watch_question(console, asked, heading=f"{i}  {question.text}")
            else:
                answer = asked.answer()
            if console is not None:
                console.print(answer_lines(i, answer))
            answers.append(answer)
    return answers


def _print_outcome(run: "DemoRun") -> None:
    if run.is_same:
        print("Both runs gave the same tokens.")
    else:
        print("The two runs gave other tokens. That must not be; please report it.")
    num_correct = sum(answer.is_correct for answer in run.offloaded)
    print(f"{num_correct} of {len(run.offloaded)} answers are right.\n")
    first = f"{run.offloaded[0].result.stats.max_resident_experts} experts"
    rows = comparison_rows(run.offloaded_stats, run.resident_stats, run.num_experts)
    print_table(("", first, "all experts"), rows)
