"""What commands say while they work: on a terminal one line, elsewhere a line now and then."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from oled_moe import cli_shared
from oled_moe.cli import main
from oled_moe.cli_flags import as_flags
from oled_moe.cli_shared import configure_logging, note, status_line, table_lines


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cli_shared, "time", clock)
    return clock


@pytest.fixture
def as_text() -> Iterator[None]:
    yield
    configure_logging("warning", "text")


def said(clock: Clock, stream: io.StringIO, patch: pytest.MonkeyPatch, *, quiet: bool) -> str:
    """What is seen of 100 sentences, one a second."""
    patch.setattr("sys.stderr", stream)
    with status_line(is_quiet=quiet) as say:
        for number in range(100):
            say(f"step {number}")
            say("")
            clock.now_s += 1
    return stream.getvalue()


def test_where_nothing_can_be_replaced_there_is_a_line_every_twenty_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = said(clock, io.StringIO(), monkeypatch, quiet=False).splitlines()
    assert lines == [f"step {number}" for number in range(20, 100, 20)]
    assert said(clock, io.StringIO(), monkeypatch, quiet=True) == ""
    assert said(clock, Terminal(), monkeypatch, quiet=True) == ""


def test_on_a_terminal_one_line_is_replaced_and_gone_at_the_end(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = said(clock, Terminal(), monkeypatch, quiet=False)
    assert "\n" not in shown and shown.endswith("\r\x1b[K") and "\r\x1b[Kstep 99" in shown


@pytest.mark.parametrize("form", ["text", "json"])
def test_long_work_is_told_to_a_file(
    form: str,
    as_text: None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(cli_shared, "_LINE_INTERVAL_S", 0.0)
    assert main(["pack", "demo", str(tmp_path / "out"), "--log-format", form]) == 0
    lines = capfd.readouterr().err.splitlines()
    if form == "json":
        events = [json.loads(line) for line in lines]
        assert {event["event"] for event in events} == {"progress"}
        lines = [event["message"] for event in events]
    assert any(line.startswith("packing ") and " %, " in line for line in lines)
    assert not any("\x1b" in line or "\r" in line for line in lines)


HEADER = ("policy", "hit rate", "utilisation", "per token")
ROWS = [("a policy of many words", "50.0 %", "12.0 %", "3.1 ms"), ("lru", "1 %", "2 %", "3 s")]


def test_a_table_that_fits_has_one_line_for_each_row() -> None:
    lines = list(table_lines(HEADER, ROWS, 1000))
    assert lines[2] == "lru                          1 %          2 %        3 s"
    assert len({len(line) for line in lines}) == 1 and len(lines) == 3
    assert list(table_lines(HEADER, ROWS, len(lines[0]))) == lines


@pytest.mark.parametrize("width", range(25, 60))
def test_a_table_is_wrapped_and_parted_but_never_cut(width: int) -> None:
    lines = list(table_lines(HEADER, ROWS, width))
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for cell in (*HEADER[1:], *(cell for row in ROWS for cell in row[1:])):
        assert all(words.count(part) >= 1 for part in cell.split())
    # Each part has the first column.
    assert words.count("policy") == 2 * (lines.count("") + 1)


def test_a_note_as_json_has_all_its_rows(as_text: None, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "json")
    note(
        "plan",
        [("memory", "2 MiB  weights"), ("", "1 MiB  slots"), ("", "3 MiB  total"), ("x", "")],
    )
    assert json.loads(capsys.readouterr().err) == {
        "event": "plan",
        "memory": "2 MiB weights; 1 MiB slots; 3 MiB total",
        "x": "",
    }


def test_parts_of_a_table_have_all_columns_that_tell_rows_apart() -> None:
    header = ("policy", "C", "hit rate", "loads", "per token")
    rows = [("lru", "40", "50 %", "1000", "3.1 ms"), ("lru", "100", "90 %", "10", "1.1 ms")]
    lines = list(table_lines(header, rows, 26, num_keys=2))
    parts = "\n".join(lines).split("\n\n")
    assert len(parts) > 1 and max(map(len, lines)) <= 26
    for part in parts:
        assert [line.split()[:2] for line in part.split("\n")] == [
            ["policy", "C"],
            ["lru", "40"],
            ["lru", "100"],
        ]


# Messages


def test_sentences_are_wrapped_on_a_terminal_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging("warning", "text")
    assert main(["inspect", "./nowhere"]) == 3
    logging.getLogger("some").warning("%s", "a warning of many words " * 5)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 60 and len(lines) >= 4
    sentence = " ".join(lines)
    assert "`demo`, a directory with config.json, a .gguf file, or a hub id ORG/NAME" in sentence
    assert "WARNING: a warning of many words a warning of" in sentence


@pytest.mark.parametrize(
    ("message", "spelt"),
    [
        ("expert_memory is 1 KiB; raise it", "--expert-memory is 1 KiB; raise it"),
        ("memory is 1 B; lower max_model_len", "--memory is 1 B; lower --max-model-len"),
        ("x: memory is 1 B, or pass force to try", "x: --memory is 1 B, or pass --force to try"),
        ("lossy and low_precision are given", "--lossy and --low-precision are given"),
        ("raise memory to 3MiB or lower memory", "raise --memory to 3MiB or lower --memory"),
        ("experts-per-layer is 'x'", "--experts-per-layer is 'x'"),
        # What is no flag, or is one already, or is a value, a key or a path.
        ("the GPU ran out of memory", "the GPU ran out of memory"),
        ("low-precision slots; give --memory", "low-precision slots; give --memory"),
        ("unknown key 'max_model_len'", "unknown key 'max_model_len'"),
        ("MODEL is 'a: memory is x'; memory is 1 B", "MODEL is 'a: memory is x'; memory is 1 B"),
        ("memory is 'raise memory, lower memory'", "--memory is 'raise memory, lower memory'"),
        ("a layer's experts; lower memory", "a layer's experts; lower --memory"),
        ("a/max_model_len: not there", "a/max_model_len: not there"),
    ],
)
def test_messages_name_flags_as_they_are_typed(message: str, spelt: str) -> None:
    names = ("expert-memory", "memory", "max-model-len", "lossy", "low-precision", "force")
    assert as_flags(message, (*names, "experts-per-layer")) == spelt
    assert as_flags(spelt, (*names, "experts-per-layer")) == spelt
