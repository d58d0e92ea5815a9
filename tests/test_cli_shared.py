"""What commands say while they work: on a terminal one line, elsewhere a line now and then."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from oled_moe import cli_shared
from oled_moe.cli import main
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
