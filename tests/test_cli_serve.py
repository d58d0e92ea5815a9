"""`oled-moe serve` as a process: its flags, its signals, its exit codes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served import QUESTION, content_of, events_of

from oled_moe.cli import main
from oled_moe.cli_serve import ServerFlags
from oled_moe.errors import ConfigError, InputError

LONG = {**QUESTION, "ignore_eos": True, "max_tokens": 900, "threshold": 1, "steps": 16}
# Every forward reads its experts: LONG is then far from done when a signal comes, however late.
SLOW = ("demo", "--threads", "1", "--experts-per-layer", "0")


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("OLED_MOE_", "HF_"))]:
        monkeypatch.delenv(name)


class Served:
    """A server in a process of its own, at `url`."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "oled_moe", "serve", *arguments, "--port", "0"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.said = ""
        self.url = ""
        for line in self.process.stderr:
            self.said += line
            if line.startswith("listening"):
                self.url = line.split()[1].rstrip(",")
                break

    def read_block(self) -> str:
        """What it says up to the last line of the block that it begins with."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if line.startswith("page"):
                return self.said
        raise AssertionError(self.said)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit code."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=120)
        self.said += errors
        return self.process.returncode


@pytest.fixture
def serve() -> Iterator[Any]:
    started: list[Served] = []

    def start(*arguments: str) -> Served:
        started.append(Served(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate(timeout=120)


def test_a_server_from_its_first_word_to_its_last(serve: Any) -> None:
    served = serve(
        "demo", "--api-key", "secret", "--served-model-name", "tiny", "--threads", "1",
        "--drain-timeout", "600",
    )  # fmt: skip
    # Whatever comes first: the server is there, and says whether there is a model.
    assert httpx2.get(f"{served.url}/health", timeout=60).status_code == 200
    headers = {"Authorization": "Bearer secret"}
    with httpx2.Client(base_url=served.url, headers=headers, timeout=60) as http:
        while (response := http.get("/ready")).status_code != 200:
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "loading"
            time.sleep(0.05)
        said = served.read_block()
        assert f"{served.url}/v1" in said and "8 at once, 64 more wait" in said
        assert "secret" not in said and "low_confidence" in said and "at most what fits" in said
        reply = http.post("/v1/chat/completions", json={**QUESTION, "model": "tiny"}).json()
        assert reply["model"] == "tiny"
        assert "42" in reply["choices"][0]["message"]["content"]
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx2.get(f"{served.url}/v1/models").status_code == 401
    check_that_term_waits_for_answers_and_not_for_stalled_uploads(served, headers)
    assert "Traceback" not in served.said and "ERROR" not in served.said


def check_that_term_waits_for_answers_and_not_for_stalled_uploads(
    served: Served, headers: dict[str, str]
) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    head += b"Authorization: Bearer secret\r\n"
    begun = (b"POST /v1/comp", head, head + b"Content-Length: 100\r\n\r\n{")
    clients = [socket.create_connection((host, int(port)), timeout=60) for _ in begun]
    for client, piece in zip(clients, begun, strict=True):
        client.sendall(piece)
    # Whatever was sent before this has been read.
    assert httpx2.get(f"{served.url}/health", timeout=60).status_code == 200
    events: list[Any] = []
    url = f"{served.url}/v1/chat/completions"
    body = {**LONG, "max_tokens": 64, "stream": True}
    with httpx2.stream("POST", url, json=body, headers=headers, timeout=60) as response:
        for number, line in enumerate(response.iter_lines()):
            events += events_of(line)
            if number == 0:
                served.process.send_signal(signal.SIGTERM)
    assert events[-1] == "[DONE]" and content_of(events)
    # Waited for 120 s at most, of the 600 that answers may take.
    assert served.end(0) == 0
    assert [client.recv(100) for client in clients] == [b"", b"", b""]
    for client in clients:
        client.close()


def test_term_under_load_ends_within_its_time_and_says_so_to_clients(serve: Any) -> None:
    served = serve(*SLOW, "--drain-timeout", "0.2")
    served.read_block()
    ends: list[str] = []

    def ask() -> None:
        with httpx2.stream(
            "POST", f"{served.url}/v1/chat/completions", json={**LONG, "stream": True}, timeout=60
        ) as response:
            events = [e for line in response.iter_lines() for e in events_of(line)]
            last = events[-1]
            ends.append(last if isinstance(last, str) else last["error"]["code"])

    clients = [threading.Thread(target=ask) for _ in range(12)]
    for client in clients:
        client.start()
    while json.loads(httpx2.get(f"{served.url}/experts", timeout=60).text)["num_running"] < 8:
        time.sleep(0.01)
    assert served.end() == 0
    for client in clients:
        client.join()
    # Twelve answers of 900 steps are far from done.
    assert ends == ["draining"] * 12


def test_ctrl_c_is_an_end_like_any_other_and_a_second_signal_ends_at_once(serve: Any) -> None:
    served = serve("demo", "--threads", "1")
    told = served.read_block()
    assert served.end(signal.SIGINT) == 0
    # One line, and no error: it has done what it was there for.
    (said,) = served.said.removeprefix(told).splitlines()
    assert said.startswith("ending") and "30 s" in said
    served = serve(*SLOW, "--drain-timeout", "600")
    served.read_block()
    with httpx2.stream(
        "POST", f"{served.url}/v1/chat/completions", json={**LONG, "stream": True}, timeout=60
    ) as response:
        next(response.iter_lines())
        served.process.send_signal(signal.SIGTERM)
        # It takes no more connections once it drains.
        while is_listening(served.url):
            time.sleep(0.01)
        assert served.end(signal.SIGTERM) == 128 + signal.SIGTERM


def is_listening(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_a_model_that_cannot_be_loaded_ends_the_server(serve: Any) -> None:
    served = serve("no/such-model")
    served.process.wait(timeout=120)
    assert served.end(0) == 3
    assert "oled-moe pull no/such-model" in served.said and "Traceback" not in served.said
    # It is said at once, before torch is there, and before anybody is told to come.
    assert len(served.said.splitlines()) == 1 and not served.url


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--port", "65536"], 2, "port is 65536"),
        (["--host", "no.such.host.invalid"], 2, "no.such.host.invalid"),
        (["--max-num-seqs", "0"], 2, "max-num-seqs is 0"),
        (["--max-body", "0"], 2, "max-body is 0"),
        (["--max-body", "much"], 2, "max-body is 'much'"),
        (["--drain-timeout", "-1"], 2, "drain-timeout is -1"),
        (["--api-key", ""], 2, "API key 1"),
        (["--api-key-file", "/no/such/file"], 2, "/no/such/file"),
        (["--ray", "0"], 2, "ray is 0"),
        (["--served-model-name", ""], 2, "served-model-name is ''"),
        (["--served-model-name", "x" * 2000], 2, "1 to 1024"),
        (["--cors-origin", ""], 2, "cors-origin is ''"),
        (["--cors-origin", "https://a.example/"], 2, "without a slash"),
        (["--cors-origin", "a.example"], 2, "SCHEME://HOST"),
        # What only the model's config and headers can tell.
        (["--lossy", "des-vote:experts=999"], 2, "experts is '999'"),
        (["--policy", "psychic"], 2, "psychic"),
        (["--experts-per-layer", "9999"], 2, "--experts-per-layer is 9999"),
        (["--hardware", "no-such-machine"], 3, "no-such-machine"),
        (["--max-model-len", "8"], 2, "max-model-len is 8, shorter than a block of 16"),
        (["--max-model-len", "99999"], 2, "--max-model-len is 99999"),
        (["--memory", "1MiB"], 4, "raise"),
        (["--algorithm", "renoising"], 2, "algorithm is 'renoising'"),
        (["--t-min", "0.5"], 2, "--t-min is 0.5; it goes with algorithm renoising"),
        (["--canvas-cache", "dual"], 2, "--canvas-cache is 'dual'"),
    ],
)
def test_wrong_flags_are_told(
    capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert main(["serve", "demo", *arguments]) == code
    errors = capfd.readouterr().err
    assert said in errors and len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["no/such-model"], 3, "oled-moe pull no/such-model"),
        (["demo", "--max-model-len", "8"], 2, "max-model-len is 8, shorter than a block of 16"),
        (["demo", "--memory", "1MiB"], 4, "raise"),
        (["demo", "--algorithm", "renoising"], 2, "algorithm is 'renoising'"),
        (["demo", "--host", "no.such.host.invalid"], 2, "no.such.host.invalid"),
        (["demo", "--port", "0"], 2, "port is 0"),
    ],
)
def test_what_replicas_would_fail_for_is_told_before_ray_is_started(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    # All of it, here: what it imports warns of what it uses.
    pytest.importorskip("ray.serve", reason="ray is not installed")
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    assert main(["serve", *arguments, "--ray", "2"]) == code
    errors = capfd.readouterr().err
    assert said in errors and len(errors.splitlines()) == 1


def test_a_port_in_use_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "demo", "--port", str(port)]) == 1
    errors = capfd.readouterr().err
    assert f"port {port}" in errors and "--port" in errors and len(errors.splitlines()) == 1


def test_a_dry_run_says_whether_it_fits(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "--dry-run", "--max-num-seqs", "3"]) == 0
    assert "fits" in capfd.readouterr().out


def test_keys_come_from_flags_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("two\n\n three \n")
    assert ServerFlags(api_key=["one"], api_key_file=path).api_keys() == ("one", "two", "three")
    path.write_text("\n")
    with pytest.raises(InputError, match="no key"):
        ServerFlags(api_key_file=path).api_keys()
    with pytest.raises(ConfigError) as caught:
        ServerFlags(api_key=["good", "bad key"]).api_keys()
    assert "API key 2" in str(caught.value) and "bad key" not in str(caught.value)
