"""What the commands share: flags of all, logging, opening an engine, and printing.

Results go to stdout, everything else to stderr. Torch and numpy are imported inside functions.
"""

import json
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

import oled_moe
from oled_moe.cli_flags import MODEL_HELP, flag
from oled_moe.config import EngineConfig, check_choice
from oled_moe.errors import InputError, OledMoeError
from oled_moe.model_paths import find_model

if TYPE_CHECKING:
    from oled_moe.engine import Engine

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
# Narrower text than this is not worth reading; a terminal of fewer columns wraps lines itself.
_LEAST_WIDTH = 40
_LEAST_LABEL = 12
# How often a status line is replaced at most.
_STATUS_INTERVAL_S = 0.1
# How often there is a line of progress at most where nothing can be replaced, as in a file.
_LINE_INTERVAL_S = 20.0


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, envvar="OLED_MOE_MODEL")]
LogLevel = Annotated[
    str | None,
    flag("--log-level", metavar="NAME", help=f"{', '.join(LOG_LEVELS)}; default: warning."),
]
LogFormat = Annotated[
    str | None, flag("--log-format", metavar="NAME", help="text or json; default: text.")
]


@dataclass(frozen=True, slots=True)
class LogFlags:
    """How the program talks on stderr."""

    log_level: LogLevel = None
    log_format: LogFormat = None


def use_log_flags(log: LogFlags) -> None:
    """Flags behind the command win over those before it."""
    if log.log_level is not None or log.log_format is not None:
        current = logging.getLevelName(logging.getLogger().level).lower()
        configure_logging(
            log.log_level or current, log.log_format or ("json" if _logs_json() else "text")
        )


class TextFormatter(logging.Formatter):
    """A line, wrapped on a terminal; what comes after the first, as of a traceback, is kept."""

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return "\n".join([wrapped(first, sys.stderr), *others])


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(level: str, form: str) -> None:
    check_choice("log-level", level, LOG_LEVELS)
    check_choice("log-format", form, LOG_FORMATS)
    handler = logging.StreamHandler()
    text = TextFormatter("%(levelname)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def open_engine(model: str, config: EngineConfig, *, is_quiet: bool = False) -> "Engine":
    """Load a model, with progress on stderr."""
    with status_line(is_quiet=is_quiet) as say:
        find_model(model)
        say("loading torch")
        from oled_moe.engine import Engine

        say(f"loading {model}")

        def progress(what: str, done: int, total: int) -> None:
            say(f"{what}: {done} of {total}")

        return Engine(model, config, progress=progress)


@contextmanager
def status_line(*, is_quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Says on stderr what goes on: on a terminal by a line that is replaced by the next and gone at
    the end, elsewhere by a line of its own every few seconds, so that what is short says nothing.
    """
    is_terminal = sys.stderr.isatty()
    interval_s = _STATUS_INTERVAL_S if is_terminal else _LINE_INTERVAL_S
    last_s = -interval_s if is_terminal else time.monotonic()

    def say(text: str) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        # Counts may come by the thousand; nobody reads so fast, and logs keep every one.
        is_due = now_s - last_s >= interval_s
        if is_quiet or not (is_due or (is_terminal and not text)):
            return
        if is_terminal:
            width = shutil.get_terminal_size().columns
            print(f"\r\x1b[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)
        elif text:
            _print_progress(text)
        last_s = now_s

    try:
        yield say
    finally:
        if is_terminal and not is_quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print_progress(text: str) -> None:
    if _logs_json():
        text = json.dumps({"event": "progress", "message": text}, ensure_ascii=False)
    print(text, file=sys.stderr, flush=True)


def _logs_json() -> bool:
    return any(isinstance(h.formatter, JsonFormatter) for h in logging.getLogger().handlers)


def read_prompt_lines(path: Path) -> tuple[bool, list[tuple[str, str]]]:
    """Whether a file holds JSON lines, and (where it stands, line) of every line with something.

    JSON lines if the first such line is an object. Raises: InputError for what is no text file.
    """
    try:
        # Whatever wrote the file may have put a byte order mark before it.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read as UTF-8 text ({reason})") from None
    # Not splitlines: what JSON and people call a line ends with a line feed alone.
    lines = [(n, line.removesuffix("\r")) for n, line in enumerate(text.split("\n"), 1)]
    found = [(f"{path}, line {n}", line) for n, line in lines if line.strip()]
    if not found:
        raise InputError(f"{path}: holds no prompt; write one a line")
    return found[0][1].lstrip().startswith("{"), found


def versions() -> dict[str, str]:
    from oled_moe.inspection import package_versions

    return {"oled_moe": oled_moe.__version__, **package_versions()}


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


Rows = Sequence[tuple[str, str]]


def note(event: str, rows: Rows) -> None:
    """A block on stderr, in the form of the log."""
    if _logs_json():
        print(json.dumps({"event": event, **_by_label(rows)}, ensure_ascii=False), file=sys.stderr)
        return
    print_rows(rows, stream=sys.stderr)
    if event == "plan":
        print(file=sys.stderr, flush=True)


def _by_label(rows: Rows) -> dict[str, str]:
    """Rows as an object; those without a label go on with the one above."""
    found: dict[str, str] = {}
    label = ""
    for given, value in rows:
        label, text = given or label, " ".join(value.split())
        found[label] = f"{found[label]}; {text}" if label in found else text
    return found


def line_width(stream: TextIO | None = None) -> int:
    """Columns of the terminal that a stream is; elsewhere a line may be as long as it likes."""
    stream = stream or sys.stdout
    return max(_LEAST_WIDTH, shutil.get_terminal_size().columns) if stream.isatty() else sys.maxsize


def wrapped(text: str, stream: TextIO | None = None) -> str:
    """A paragraph, wrapped where the stream, else stdout, is a terminal."""
    return "\n".join(_wrap(text, line_width(stream)))


def print_notice(text: str) -> None:
    """A sentence on stderr."""
    print(wrapped(text, sys.stderr), file=sys.stderr)


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False) or [""]


def print_rows(rows: Rows, *, stream: TextIO | None = None) -> None:
    """Two columns; on a terminal the second is wrapped within itself."""
    stream = stream or sys.stdout
    indent = max(len(label) for label, _ in rows) + 2
    width = max(_LEAST_WIDTH - indent, line_width(stream) - indent)
    for label, value in rows:
        lines = _wrap(value, width)
        print(f"{label:<{indent}}{lines[0]}".rstrip(), file=stream)
        for line in lines[1:]:
            print(" " * indent + line, file=stream)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_keys: int = 1) -> None:
    """Columns with a heading; all but the first are numbers and end at one edge.

    Where a terminal is too narrow, the first column is wrapped, and what is still too wide becomes
    several tables, one below the other, each with the first `num_keys` columns: those that tell a
    row from all others.
    """
    for line in table_lines(header, rows, line_width(), num_keys=num_keys):
        print(line)


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, num_keys: int = 1
) -> Iterator[str]:
    """The lines of a table, `width` letters at most as far as single cells allow."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    least_label = min(widths[0], max(_LEAST_LABEL, width // 4))
    keys = list(range(1, num_keys))
    groups = [[*keys]]
    for column in range(num_keys, len(header)):
        taken = sum(widths[i] + 2 for i in (*groups[-1], column))
        if len(groups[-1]) > len(keys) and least_label + taken > width:
            groups.append([*keys])
        groups[-1].append(column)
    for number, group in enumerate(groups):
        if number:
            yield ""
        spare = width - sum(widths[i] + 2 for i in group)
        label_width = min(widths[0], max(least_label, spare))
        for row in [header, *rows]:
            first, *others = _label_lines(row[0], label_width)
            cells = [first.ljust(label_width), *(row[i].rjust(widths[i]) for i in group)]
            yield "  ".join(cells).rstrip()
            yield from others


def _label_lines(label: str, width: int) -> list[str]:
    """A first cell within so many letters; what is indented stays so."""
    if len(label) <= width:
        return [label]
    indent = " " * (len(label) - len(label.lstrip()))
    return [indent + line for line in _wrap(label.strip(), max(1, width - len(indent)))]


def check_output() -> None:
    """Raise OledMoeError where answers would go nowhere: nobody closes stdout who wants them."""
    # What a closed stdout is replaced with; one that a user sends there himself has another name.
    if getattr(sys.stdout, "name", None) == os.devnull:
        raise OledMoeError("stdout is closed; leave it open, or send it to a file or a program")
