"""`oled-moe chat`: a conversation on the terminal, or line by line through pipes.

Torch and rich are imported inside functions.
"""

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from oled_moe.cli_flags import EngineFlags, SamplingFlags, as_flags, flag, takes_flags
from oled_moe.cli_shared import (
    LogFlags,
    Model,
    check_output,
    note,
    open_engine,
    print_notice,
    print_rows,
    use_log_flags,
    wrapped,
)
from oled_moe.cli_text import Rows, count, plan_rows, stats_rows
from oled_moe.config import DecodingParams
from oled_moe.errors import ConfigError, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from oled_moe.chat_screen import Conversation

logger = logging.getLogger(__name__)

PROMPT = "> "
COMMANDS: Rows = [
    ("/reset", "forget the conversation; the system message stays"),
    ("/system TEXT", "set the system message; without TEXT there is none"),
    ("/stats", "what the last answer took"),
    ("/help", "this list"),
    ("/quit", "leave, as Ctrl-D does; Ctrl-C stops an answer"),
    ("//...", "a message that begins with one slash"),
]
MAX_HISTORY_LINES = 1000
_FLAG_NAMES = [
    field.name.replace("_", "-") for kind in (EngineFlags, SamplingFlags) for field in fields(kind)
]


@takes_flags
def chat(
    model: Model,
    system: Annotated[
        str | None, flag("--system", metavar="TEXT", help="A system message before all others.")
    ] = None,
    is_quiet: Annotated[bool, flag("-q", "--quiet", help="Only errors on stderr.")] = False,
    engine: EngineFlags = EngineFlags(),
    sampling: SamplingFlags = SamplingFlags(),
    log: LogFlags = LogFlags(),
) -> int:
    """Talk with a model; its block is seen being denoised.

    Where input or output is no terminal, every line that comes in is a message, and its answer
    goes out as plain text. A line that cannot be used is told on stderr; the conversation goes on,
    and the exit code is 2. Lines that begin with a slash are commands; /help lists them.
    """
    use_log_flags(log)
    check_output()
    config, params = engine.config(), sampling.params()
    with open_engine(model, config, is_quiet=is_quiet) as opened:
        from oled_moe.chat_screen import Conversation

        conversation = Conversation(opened, params, system=system)
        if not is_quiet:
            decoding = DecodingParams.resolve(params.with_defaults(opened.sampling_defaults))
            note("plan", plan_rows(model, opened, decoding))
        if sys.stdin.isatty() and sys.stdout.isatty():
            _talk(conversation)
            return 0
        return _answer_lines(conversation, is_quiet=is_quiet)


def _talk(conversation: "Conversation") -> None:
    """The conversation on a terminal, until the user leaves."""
    from rich.console import Console

    console = Console(highlight=False)
    print(wrapped("Type a message. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves."))
    with _line_editing():
        while True:
            try:
                line = input(PROMPT)
            except EOFError:
                print()
                return
            except UnicodeDecodeError as error:
                print_notice(f"the line is not UTF-8 text ({error}); type it again")
                continue
            if line.strip() == "/quit":
                return
            try:
                _hear(console, conversation, line)
            # What the user can put right; the line is still in the history.
            except (InputError, ConfigError) as error:
                print_notice(as_flags(str(error), _FLAG_NAMES))


def _hear(console: "Console", conversation: "Conversation", line: str) -> None:
    """One line of the terminal: a command, a message, or nothing."""
    from oled_moe.chat_screen import show_answer

    if _is_command(line):
        print_rows(_obey(conversation, line))
    elif line.strip():
        if not show_answer(console, conversation, _message(line)):
            console.print("(stopped)", style="dim")
        elif cut := _cut_words(conversation):
            console.print(f"({cut})", style="dim")


def _answer_lines(conversation: "Conversation", *, is_quiet: bool) -> int:
    """The conversation through pipes: answers on stdout, all else on stderr; the exit code.

    What a user could put right on a terminal does not end a script either: as sqlite3 does, it goes
    on, and the exit code says that something was wrong.
    """
    code = 0
    for number, line in enumerate(_input_lines(), 1):
        if line.strip() == "/quit":
            break
        try:
            _answer_line(conversation, line, is_quiet=is_quiet)
        except (InputError, ConfigError) as error:
            print_notice(f"error: line {number}: {as_flags(str(error), _FLAG_NAMES)}")
            code = error.exit_code
    return code


def _answer_line(conversation: "Conversation", line: str, *, is_quiet: bool) -> None:
    from oled_moe.block_screen import printable
    from oled_moe.chat_screen import answer

    if _is_command(line):
        print_rows(_obey(conversation, line), stream=sys.stderr)
    elif line.strip():
        text = printable(answer(conversation, _message(line)))
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        if not is_quiet and (cut := _cut_words(conversation)):
            print_notice(cut)


def _input_lines() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Some locales let through what is no text, which would be refused in other words later.
        sys.stdin.reconfigure(errors="strict")
    try:
        for line in sys.stdin:
            yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"the input is not UTF-8 text ({error}); convert it first") from None


def _cut_words(conversation: "Conversation") -> str | None:
    """Says so where the last answer ended for want of room."""
    result = conversation.last_result
    if result is None or result.finish_reason != "length":
        return None
    return f"cut at {count(len(result.token_ids), 'token')}; --max-tokens allows more"


# Commands


def _is_command(line: str) -> bool:
    return line.startswith("/") and not line.startswith("//")


def _message(line: str) -> str:
    return line.removeprefix("/") if line.startswith("//") else line


def _obey(conversation: "Conversation", line: str) -> Rows:
    """Do what a command says; returns what to print. Raises: InputError for an unknown one."""
    name, _, text = line.strip().partition(" ")
    if name == "/system":
        conversation.system = text.strip() or None
        return [("system", conversation.system or "no system message any more")]
    if text and name in ("/reset", "/stats", "/help"):
        raise InputError(f"{name} takes nothing after it; /help lists commands")
    if name == "/reset":
        conversation.reset()
        return [("reset", "the conversation begins anew")]
    if name == "/stats":
        return _stats(conversation)
    if name == "/help":
        return COMMANDS
    raise InputError(
        f"{name} is no command; /help lists them; a message that begins with a slash is written "
        "with two"
    )


def _stats(conversation: "Conversation") -> Rows:
    engine, result = conversation.engine, conversation.last_result
    rows = [] if result is None else stats_rows(engine, result)
    num_messages = count(len(conversation.turns), "message")
    taken = f"{conversation.num_tokens()} of {engine.max_model_len} tokens"
    return [*rows, ("conversation", f"{num_messages}, {taken}")]


# Lines typed before


@contextmanager
def _line_editing() -> Iterator[None]:
    """Arrow keys edit the line and bring back earlier ones, those of earlier days too."""
    try:
        import readline
    except ImportError:
        logger.warning("this Python has no readline: lines cannot be edited or called back")
        yield
        return
    path = Path.home() / ".cache" / "oled-moe" / "chat_history"
    readline.clear_history()
    readline.set_history_length(MAX_HISTORY_LINES)
    try:
        _make_private(path)
        readline.read_history_file(path)
    except OSError as error:
        logger.warning("%s: earlier lines cannot be kept (%s)", path, error.strerror)
        yield
        return
    try:
        yield
    finally:
        readline.write_history_file(path)


def _make_private(path: Path) -> None:
    """A file that only its owner reads, whatever it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
