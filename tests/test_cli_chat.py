"""The conversation: what the model is asked, through pipes, and on a terminal of its own."""

import io
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.text import Text

from oled_moe.block_screen import MASK, printable
from oled_moe.chat_screen import Conversation, _last_lines, answer
from oled_moe.cli import main
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.engine import Engine
from oled_moe.errors import InputError

QUESTION, ANSWER = "What is 12 + 30?", "12 + 30 = 42"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("OLED_MOE_", "HF_"))]:
        monkeypatch.delenv(name)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("demo", EngineConfig(threads=1)) as engine:
        yield engine


# What the model is asked


def test_every_message_carries_what_was_said_before(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams(), system="Be brief.")
    assert answer(talk, QUESTION) == ANSWER
    turns = "<role>SYSTEM</role>Be brief.<|role_end|>"
    turns += f"<role>HUMAN</role>{QUESTION}<|role_end|><role>ASSISTANT</role>{ANSWER}<|role_end|>"
    prompt = turns + "<role>HUMAN</role>And 1 + 1?<|role_end|><role>ASSISTANT</role>"
    request = talk.request("And 1 + 1?")
    assert request.prompt == prompt
    assert request.num_prompt_tokens == len(talk.tokenizer.encode(prompt))
    assert talk.num_tokens() == len(talk.tokenizer.encode(turns))


def test_an_answer_ends_with_the_turn(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams(stop_token_ids=[5]))
    assert talk.request("x").params.stop_token_ids == (5, talk.tokenizer.token_id("<|role_end|>"))
    assert talk.request("x").params.eos_early_stop is True


def test_reset_forgets_all_but_the_system_message(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams(), system="Be brief.")
    first = talk.request(QUESTION)
    answer(talk, QUESTION)
    assert talk.request(QUESTION).prompt != first.prompt
    talk.reset()
    assert talk.request(QUESTION) == first and talk.last_result is None


def test_an_answer_gets_no_more_room_than_there_is(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams())
    assert talk.request("x").params.max_tokens == 256
    talk.add("word " * 400, "word " * 450, None)
    request = talk.request("x")
    num_free = engine.max_model_len - request.num_prompt_tokens
    assert 16 < num_free < 256 and request.params.max_tokens == num_free
    assert len(engine.generate(request.prompt, request.params).token_ids) <= num_free


def test_a_full_context_says_what_to_do_and_loses_nothing(engine: Engine) -> None:
    talk = Conversation(engine, SamplingParams())
    answer(talk, QUESTION)
    turns = list(talk.turns)
    with pytest.raises(InputError, match=r"full: .* of 1024 tokens; start anew with /reset"):
        answer(talk, "word " * 1000)
    assert talk.turns == turns
    assert answer(talk, QUESTION) == ANSWER


def test_control_characters_of_a_model_reach_no_terminal() -> None:
    assert printable("a\x1b[31mb\x07\x9b1m\n\tc\x7f") == "a\ufffd[31mb\ufffd\ufffd1m\n\tc\ufffd"


def test_a_long_answer_shows_its_end() -> None:
    console = Console(width=10, height=6, file=io.StringIO())
    shown = _last_lines(console, Text(" ".join(f"word{i}" for i in range(20))))
    assert shown.plain.split() == ["word16", "word17", "word18", "word19"]


# Through pipes


def talk_through_pipes(
    lines: str | bytes, *flags: str, capfd: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    raw = lines.encode() if isinstance(lines, str) else lines
    patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    code = main(["chat", "demo", "--threads", "1", *flags])
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def test_a_line_in_is_an_answer_out(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"{QUESTION}\n\nName the capital of Iceland.\n"
    code, out, err = talk_through_pipes(lines, capfd=capfd, patch=monkeypatch)
    assert (code, out) == (0, f"{ANSWER}\nThe capital of Iceland is Reykjavik.\n")
    assert "\x1b" not in out + err and "block length 16" in err


def test_commands_speak_on_stderr(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"/help\n{QUESTION}\n/stats\n/reset\n/stats\n/system Be brief.\n/quit\n{QUESTION}\n"
    code, out, err = talk_through_pipes(lines, "-q", capfd=capfd, patch=monkeypatch)
    assert (code, out) == (0, f"{ANSWER}\n")
    assert "/system TEXT" in err and "tokens per forward" in err
    assert "2 messages" in err and "0 messages, 0 of 1024 tokens" in err
    assert "Be brief." in err


def test_a_system_message_comes_first(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    flags = ("-q", "--system", "Be brief.")
    _, _, err = talk_through_pipes("/stats\n", *flags, capfd=capfd, patch=monkeypatch)
    num_tokens = Conversation(engine, SamplingParams(), system="Be brief.").num_tokens()
    assert num_tokens > 5 and f"0 messages, {num_tokens} of 1024 tokens" in err


@pytest.mark.parametrize(
    "line, words",
    [
        ("/nonsense", "line 2: /nonsense is no command; /help lists them"),
        ("/reset now", "line 2: /reset takes nothing after it"),
        ("word " * 200, "start anew with /reset"),
    ],
)
def test_a_line_that_cannot_be_used_is_told_and_a_script_goes_on(
    line: str, words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, flags = f"{QUESTION}\n{line}\n/reset\n{QUESTION}\n", ("-q", "--max-model-len", "128")
    code, out, err = talk_through_pipes(lines, *flags, capfd=capfd, patch=monkeypatch)
    assert (code, out) == (2, f"{ANSWER}\n{ANSWER}\n")
    assert words in err and err.count("error: ") == 1


@pytest.mark.parametrize(
    "lines, flags, words",
    [
        (b"\xff\n", (), "not UTF-8"),
        ("x\ny\n", ("--t-max", "1"), "--t-max is 1"),
        ("x\ny\n", ("--algorithm", "renoising"), "algorithm is 'renoising'"),
    ],
)
def test_what_no_line_can_put_right_ends_a_script(
    lines: str | bytes,
    flags: tuple[str, ...],
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, out, err = talk_through_pipes(lines, "-q", *flags, capfd=capfd, patch=monkeypatch)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


def test_what_no_locale_can_read_is_not_utf8() -> None:
    # This locale lets any byte through, as half of a surrogate pair.
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-m", "oled_moe", "chat", "demo", "-q", "--threads", "1"]
    done = subprocess.run(
        command, input=b"hi \xff\n", env=environment, capture_output=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, b"") and b"not UTF-8" in done.stderr


@pytest.mark.parametrize("name", ["chat", "generate"])
def test_answers_that_would_go_nowhere_are_not_made(name: str) -> None:
    command = [sys.executable, "-m", "oled_moe", name, "demo", "-q", "--threads", "1"]
    command += ["--max-tokens", "4"]
    shell = ["sh", "-c", '"$@" >&-', "sh", *command]
    done = subprocess.run(shell, input=b"hi\n", stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 1 and b"stdout is closed" in done.stderr


@pytest.mark.parametrize("name", ["chat", pytest.param("generate", marks=pytest.mark.full)])
def test_answers_that_are_thrown_away_on_purpose_are_made(name: str) -> None:
    command = [sys.executable, "-m", "oled_moe", name, "demo", "-q", "--threads", "1"]
    command += ["--max-tokens", "4"]
    nowhere = ["sh", "-c", '"$@" >/dev/null', "sh", *command]
    assert subprocess.run(nowhere, input=b"hi\n", timeout=120).returncode == 0


def test_two_slashes_are_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        "oled_moe.chat_screen.answer", lambda _, text: asked.append(text) or "heard"
    )
    code, out, _ = talk_through_pipes("//etc is\n", "-q", capfd=capfd, patch=monkeypatch)
    assert (code, out, asked) == (0, "heard\n", ["/etc is"])


def test_a_cut_answer_is_said_to_be_cut(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"{QUESTION}\n"
    _, _, err = talk_through_pipes(lines, "--max-tokens", "3", capfd=capfd, patch=monkeypatch)
    assert "cut at 3 tokens; --max-tokens allows more" in err
    _, _, err = talk_through_pipes(lines, "-q", "--max-tokens", "3", capfd=capfd, patch=monkeypatch)
    assert err == ""


def test_a_model_without_a_template_cannot_talk(engine: Engine) -> None:
    bare = engine.tokenizer
    assert bare is not None
    template, bare.chat_template = bare.chat_template, None
    try:
        with pytest.raises(InputError, match=r"no chat template.*generate --raw"):
            Conversation(engine, replace(SamplingParams()))
    finally:
        bare.chat_template = template


# On a terminal

# The terminal becomes the one that Ctrl-C and Ctrl-D come from.
PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from oled_moe.cli import main
sys.exit(main())
"""


class Terminal:
    """`oled-moe chat demo` on a pseudo-terminal."""

    def __init__(self, home: Path, *flags: str) -> None:
        self.fd, inner = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "HOME": str(home)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "chat", "demo", "-q", "--threads", "1", *flags],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env=environment,
        )
        os.close(inner)
        self.seen = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        os.close(self.fd)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, pattern: str, *, patience_s: float = 120) -> str:
        """What the screen got up to the next match, which is taken away."""
        deadline = time.monotonic() + patience_s
        while not (found := re.search(pattern, self.seen)):
            left_s = deadline - time.monotonic()
            ready = select.select([self.fd], [], [], max(0, left_s))[0]
            assert ready, f"{pattern!r} did not come: {self.seen[-2000:]!r}"
            try:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            # The other end of a pseudo-terminal that closed.
            except OSError:
                raise AssertionError(f"{pattern!r} did not come: {self.seen!r}") from None
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def interrupted(self) -> int:
        """The exit code after Ctrl-C at the prompt, pressed again where it had no effect.

        CPython shows the prompt a moment before it waits for keys; a signal in between is noticed
        with the next one.
        """
        for _ in range(20):
            self.type("\x03")
            if select.select([self.fd], [], [], 3)[0]:
                break
        return self.exit_code()

    def exit_code(self) -> int:
        while select.select([self.fd], [], [], 60)[0]:
            try:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                break
        return self.process.wait(60)


def test_a_block_is_seen_filling_in_and_its_text_stays(tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        terminal.until("> ")
        terminal.type(f"{QUESTION}\n")
        shown = terminal.until(re.escape(ANSWER) + "\r\n.*> ")
        assert MASK * 8 in shown
        terminal.type("/bogus\n")
        terminal.until("/bogus is no command(.|\n)*> ")
        terminal.type("/stats\n")
        # A control key before the prompt would be handled by the terminal itself.
        terminal.until("2 messages, [0-9]+ of 1024 tokens(.|\n)*> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    path = tmp_path / ".cache" / "oled-moe" / "chat_history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().splitlines() == [QUESTION, "/bogus", "/stats"]


def test_ctrl_c_stops_the_answer_and_then_the_program(tmp_path: Path) -> None:
    slow = ("--threshold", "1", "--ignore-eos", "--max-tokens", "900")
    history = tmp_path / ".cache" / "oled-moe" / "chat_history"
    history.parent.mkdir(parents=True)
    history.write_text("Name the capital of Iceland.\n")
    with Terminal(tmp_path, *slow) as terminal:
        terminal.until("> ")
        # Arrow up: what was typed on another day.
        terminal.type("\x1b[A\n")
        terminal.until(MASK)
        terminal.type("\x03")
        terminal.until(r"\(stopped\)")
        terminal.until("> ")
        assert terminal.interrupted() == 130
        assert "error: interrupted" in terminal.seen and "Traceback" not in terminal.seen
    assert history.read_text() == "Name the capital of Iceland.\n"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
