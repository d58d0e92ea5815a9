"""Several replicas behind one address, by a Ray cluster of this machine in a process of its own."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import yaml
from live_server import abandoned_request
from pydantic import ValidationError
from starlette.requests import Request

from oled_moe.config import EngineConfig
from oled_moe.errors import ConfigError, MissingDependencyError, OledMoeError
from oled_moe.ray_serve import (
    Caller,
    Front,
    Replica,
    ServeArgs,
    _divided,
    build,
    merge_metrics,
    session_key,
)
from oled_moe.server_backend import LoadingBackend

EXAMPLES = Path(__file__).parent.parent / "examples" / "ray"
START_S, WAIT_S = 400, 120
# The first test waits for the start, which takes three processes of torch.
pytestmark = pytest.mark.timeout(600)

# Arguments


def test_every_field_of_the_engine_can_be_set() -> None:
    assert {field.name for field in fields(EngineConfig)} <= set(ServeArgs.model_fields)


def test_arguments_reach_the_engine_and_the_app() -> None:
    # As words: that is how `serve run` gives them.
    words = {"model": "demo", "experts_per_layer": "4", "num_cpus": "3", "max_num_seqs": "2"}
    args = ServeArgs(**words, sampling={"threshold": 0.9}, api_keys=["secret"])  # type: ignore[arg-type]
    config, settings = args.engine_config(), args.server_settings()
    assert (config.experts_per_layer, config.threads, config.max_num_seqs) == (4.0, 3, 2)
    assert settings.defaults.threshold == 0.9
    assert settings.api_keys == ("secret",) and "secret" not in repr(args)
    assert settings.served_names[0] == "demo"


def test_a_replica_takes_what_it_runs_and_a_little_more() -> None:
    assert ServeArgs(model="demo", max_num_seqs=4).most_at_once == 8
    assert ServeArgs(model="demo", max_num_seqs=4, spill_after=0).most_at_once == 4
    # More than its scheduler lets wait would be refused, not spilled.
    assert ServeArgs(model="demo", max_num_seqs=4, spill_after=9, max_queue=2).most_at_once == 6


def test_a_replica_whose_scheduler_failed_is_unwell() -> None:
    replica = object.__new__(Replica)
    replica._backend = LoadingBackend(lambda: pytest.fail("it is not started"), lambda: None)
    replica.check_health()
    replica._backend.error = OledMoeError("it fell over")
    with pytest.raises(OledMoeError, match="it fell over"):
        replica.check_health()


def test_replicas_of_one_machine_divide_it() -> None:
    both = _divided(ServeArgs(model="demo", replicas=2), 8)
    three = _divided(ServeArgs(model="demo", replicas=3), 8)
    assert (both.engine_config().threads, three.engine_config().threads) == (4, 2)
    assert isinstance(both.memory, int) and isinstance(three.memory, int)
    assert 1.4 < both.memory / three.memory < 1.6
    given = ServeArgs(model="demo", replicas=2, num_cpus=1, expert_memory="25%")
    assert _divided(given, 8) == given


def test_a_gpu_each_on_cuda() -> None:
    assert ServeArgs(model="demo").gpus == 0
    assert ServeArgs(model="demo", device="cuda").gpus == 1
    assert ServeArgs(model="demo", device="cuda", num_gpus=0.5).gpus == 0.5


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValidationError, match="replica_count"):
        ServeArgs(model="demo", replica_count=2)  # type: ignore[call-arg]
    with pytest.raises(
        ConfigError, match="sampling has top_q, which nobody knows; allowed: .*top_p"
    ):
        ServeArgs(model="demo", sampling={"top_q": 1}).server_settings()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'oled-moe\[ray\]'"):
        build(ServeArgs(model="demo"))


def test_the_example_is_an_application() -> None:
    config = yaml.safe_load((EXAMPLES / "serve.yaml").read_text(encoding="utf-8"))
    args = ServeArgs(**config["applications"][0]["args"])
    assert args.engine_config().threads == args.num_cpus
    schema = pytest.importorskip("ray.serve.schema", reason="ray is not installed")
    application = schema.ServeDeploySchema.model_validate(config).applications[0]
    assert application.import_path == "oled_moe.ray_serve:build"


# Which conversation


def key(body: Any, **headers: str) -> str:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return session_key(names, json.dumps(body).encode())


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A conversation: system, user, assistant, user, assistant and so on."""
    roles = ["system", *["user", "assistant"] * len(texts)]
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts)], **more}  # noqa: B905


def test_every_turn_of_a_conversation_has_one_key() -> None:
    first = key(chat("be brief", "hello"))
    assert first and first == key(chat("be brief", "hello", "hi", "and now?"), x_other="1")
    assert first != key(chat("be brief", "good day"))
    assert first != key(chat("be long", "hello"))


def test_a_user_and_a_session_go_before_the_messages() -> None:
    one, two = chat("a", "b", user="ann"), chat("c", "d", user="ann")
    assert key(one) == key(two) != key(chat("a", "b"))
    assert key(one, x_session_id="s") == key({}, x_session_id="s") != key(one)
    # A user who is called like a session is not that session.
    assert key(one, x_session_id="ann") != key(one)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[1]",
        b'{"prompt": "once"}',
        b'{"messages": 3, "user": 4}',
        b'{"messages": [{"role": "system"}, "user", 5]}',
        b"[" * 100_000,
        b'{"user": ' + b"9" * 100_000 + b"}",
    ],
)
def test_what_names_no_conversation_has_no_key(body: bytes) -> None:
    assert session_key({}, body) == ""


@pytest.mark.parametrize("depth", [100, 900, 990, 3000])
def test_deep_messages_are_left_to_the_replica_to_refuse(depth: int) -> None:
    body = '{"messages": [{"role": "user", "content": ' + "[" * depth + "]" * depth + "}]}"
    assert len(session_key({}, body.encode())) in (0, 64)


def test_metrics_of_replicas_are_put_together() -> None:
    page = (
        "# HELP x:steps_total Steps.\n# TYPE x:steps_total counter\nx:steps_total 3.0\n"
        '# HELP x:s Time.\n# TYPE x:s histogram\nx:s_bucket{le="+Inf"} 2.0\nx:s_count 2.0\n'
    )
    merged = merge_metrics({"b": page, "a": page.replace("3.0", "5.0")})
    assert merged.splitlines() == [
        "# HELP x:steps_total Steps.",
        "# TYPE x:steps_total counter",
        'x:steps_total{replica="a"} 5.0',
        'x:steps_total{replica="b"} 3.0',
        "# HELP x:s Time.",
        "# TYPE x:s histogram",
        'x:s_bucket{replica="a",le="+Inf"} 2.0',
        'x:s_count{replica="a"} 2.0',
        'x:s_bucket{replica="b",le="+Inf"} 2.0',
        'x:s_count{replica="b"} 2.0',
    ]


# The front, before replicas that fail


class FakeReplicas:
    """A handle whose replicas answer with what is on the list: an error, or messages and errors."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.num_cancelled = 0
        self.answer = self

    def options(self, *, stream: bool, session_id: str) -> "FakeReplicas":
        assert stream and session_id
        return self

    def remote(self, scope: dict[str, Any], body: bytes) -> "FakeAnswer":
        assert scope["path"] == "/v1/chat/completions" and body
        return FakeAnswer(self, self._answers.pop(0))

    def broadcast(self, method: str, scope: dict[str, Any]) -> "FakeReplicas":
        assert method == "answer_whole" and scope["path"] == "/metrics"
        return self

    async def results_async(self, **_: Any) -> list[Any]:
        return [(f"replica {number}", messages) for number, messages in enumerate(self._answers)]


class FakeAnswer:
    def __init__(self, replicas: FakeReplicas, messages: list[Any]) -> None:
        self._replicas = replicas
        self._messages = list(messages)

    def __aiter__(self) -> "FakeAnswer":
        return self

    async def __anext__(self) -> dict[str, Any]:
        if not self._messages:
            raise StopAsyncIteration
        message = self._messages.pop(0)
        if isinstance(message, BaseException):
            raise message
        return dict(message)

    def cancel(self) -> None:
        self._replicas.num_cancelled += 1


def head(media_type: str) -> dict[str, Any]:
    headers = [(b"content-type", media_type.encode()), (b"x-request-id", b"1")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def piece(body: bytes, *, has_more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": has_more}


def through_front(
    replicas: FakeReplicas, path: str = "/v1/chat/completions"
) -> list[dict[str, Any]]:
    """What the front sends to a client."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [],
        "server": ("here", 80),
        "scheme": "http",
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(chat("a", "b")).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        response = await Front(replicas, 1000)(Request(scope, receive))
        await response(scope, receive, send)

    asyncio.run(run())
    return sent


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
def test_metrics_are_those_of_all_replicas(path: str) -> None:
    pytest.importorskip("ray.serve.exceptions", reason="ray is not installed")
    page = [head("text/plain"), piece(b"# TYPE x:n gauge\nx:n 1.0\n", has_more=False)]
    _, body = through_front(FakeReplicas(page, page), path)
    assert b'replica="replica 0"' in body["body"] and b'replica="replica 1"' in body["body"]


def test_a_full_house_is_a_429() -> None:
    exceptions = pytest.importorskip("ray.serve.exceptions", reason="ray is not installed")
    error = exceptions.BackPressureError(num_queued_requests=3, max_queued_requests=3)
    start, body = through_front(FakeReplicas([error]))
    assert start["status"] == 429 and (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "queue_full"


def test_a_request_that_a_dead_replica_had_is_asked_again_once() -> None:
    dead = pytest.importorskip("ray.exceptions", reason="ray is not installed").ActorDiedError()
    whole = [head("application/json"), piece(b"{}", has_more=False)]
    start, body = through_front(FakeReplicas([dead], whole))
    assert (start["status"], body["body"]) == (200, b"{}")
    # Ray's proxy adds the id.
    assert start["headers"] == [(b"content-type", b"application/json")]
    start, body = through_front(FakeReplicas([dead], [dead], whole))
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "replica_died"


def test_a_stream_whose_replica_dies_ends_with_an_error_event() -> None:
    dead = pytest.importorskip("ray.exceptions", reason="ray is not installed").ActorDiedError()
    replicas = FakeReplicas([head("text/event-stream"), piece(b"data: 1\n\n"), dead])
    _, first, last = through_front(replicas)
    assert first["body"] == b"data: 1\n\n"
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["code"] == "replica_died"
    assert not last.get("more_body") and replicas.num_cancelled == 1
    # Half a JSON object cannot be mended: the connection is cut.
    with pytest.raises(type(dead)):
        through_front(FakeReplicas([head("application/json"), piece(b"{"), dead]))


def test_whoever_asks_hears_that_the_client_has_left() -> None:
    """A reply waits for its client in steps, and any of them may be the one that hears of it."""

    async def play() -> None:
        caller = Caller(b"hi")
        assert (await caller.receive())["body"] == b"hi"
        watchers = [asyncio.ensure_future(caller.receive()) for _ in range(2)]
        await asyncio.sleep(0)
        watchers.pop().cancel()
        caller.leave()
        found = [await watchers.pop(), await caller.receive(), await caller.receive()]
        assert found == [{"type": "http.disconnect"}] * 3

    asyncio.run(play())


# Two replicas


@dataclass(frozen=True)
class Service:
    """`oled-moe serve demo --ray 2`, running."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def ask(self, body: dict[str, Any], **headers: str) -> httpx2.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self.url}/v1/chat/completions"
        return httpx2.post(url, json=body, headers=names, timeout=WAIT_S)

    def replica_pids(self) -> dict[str, int]:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return {name: int(pid) for name, pid in re.findall(r"replica (\w+), process (\d+):", text)}

    def total(self, sample: str) -> float:
        """A sample of the metrics, given as `name{labels`, summed over the replicas."""
        page = httpx2.get(f"{self.url}/metrics", timeout=WAIT_S).text
        name, _, labels = sample.partition("{")
        found = re.findall(rf"^{name}\{{replica=.*{labels}.*\}} (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))

    def num_running(self) -> float:
        return self.total("oled_moe:num_requests_running")


def wait_until(holds: Any, what: str, limit_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, f"{what} did not happen within {limit_s} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    pytest.importorskip("ray", reason="ray is not installed")
    home = tmp_path_factory.mktemp("ray")
    port = free_port()
    # Sockets lie in Ray's folder, and their paths may not be long.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        env = {
            **os.environ,
            "HOME": str(home),
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            # As important as the tests, which would starve the replicas where cores are few.
            "RAY_worker_niceness": "0",
        }
        log = home / "log.txt"
        command = [sys.executable, "-m", "oled_moe", "serve", "demo", "--ray", "2"]
        command += ["--port", str(port), "--log-level", "info"]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
        started: list[psutil.Process] = []
        try:
            service = Service(process, f"http://127.0.0.1:{port}", log)
            wait_until(lambda: is_ready(service), "the start", START_S)
            started = psutil.Process(process.pid).children(recursive=True)
            yield service
        finally:
            if process.poll() is None:
                started += psutil.Process(process.pid).children(recursive=True)
                process.terminate()
                try:
                    process.wait(WAIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            for child in started:
                if child.is_running():
                    child.kill()


def is_ready(service: Service) -> bool:
    assert service.process.poll() is None, service.log.read_text(encoding="utf-8")[-3000:]
    try:
        reply = httpx2.get(f"{service.url}/ready", timeout=WAIT_S)
    except httpx2.TransportError:
        return False
    return reply.status_code == 200 and len(service.replica_pids()) == 2


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


QUESTION = "What is 12 + 30?"
# No model ends this by itself.
# A token a forward, so that it lasts while others look.
LONG = {"ignore_eos": True, "max_tokens": 200, "threshold": 1}


def text_of(reply: httpx2.Response) -> str:
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def test_both_replicas_answer(service: Service) -> None:
    seen = {}
    for i in range(40):
        reply = service.ask(chat("", QUESTION, user=f"user {i}"))
        seen[reply.headers["X-Replica"]] = text_of(reply)
        if len(seen) == 2:
            break
    assert set(seen) == set(service.replica_pids())
    assert all("42" in text for text in seen.values())


def test_a_conversation_stays_on_its_replica(service: Service) -> None:
    for i in range(3):
        first = service.ask(chat("", f"What is 12 + {i}?"))
        turns = ["", f"What is 12 + {i}?", text_of(first), "What is 3 * 4?"]
        second = service.ask(chat(*turns))
        third = service.ask(chat(*turns, text_of(second), "What is the capital of France?"))
        assert (
            second.headers["X-Replica"]
            == third.headers["X-Replica"]
            == (first.headers["X-Replica"])
        )


def test_one_request_id(service: Service) -> None:
    reply = service.ask(chat("", QUESTION), x_request_id="mine")
    assert reply.headers.get_list("X-Request-ID") == ["mine"]


def test_errors_are_those_of_the_app(service: Service) -> None:
    reply = service.ask({"messages": [], "presence": 1})
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    reply = httpx2.get(f"{service.url}/nowhere", timeout=WAIT_S)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("settings", [LONG, {"diffusing": True}])
def test_a_stream_comes_in_pieces_as_it_is_made(service: Service, settings: dict[str, Any]) -> None:
    body = chat("", QUESTION, stream=True, **settings)
    num_pieces, num_running, text = 0, 0.0, ""
    url = f"{service.url}/v1/chat/completions"
    with httpx2.stream("POST", url, json=body, timeout=WAIT_S) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                num_pieces += 1
                if num_pieces == 1:
                    num_running = service.num_running()
                delta = json.loads(line[6:])["choices"][0]["delta"]
                text += delta.get("content") or ""
        assert line == "data: [DONE]" or not line
    # The first pieces were there while the rest was still being made.
    assert num_pieces > 3 and (num_running == 1 or settings != LONG)
    assert text == text_of(service.ask({**body, "stream": False, "diffusing": False}))


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_goes_frees_its_place(service: Service, is_streamed: bool) -> None:
    aborted = 'oled_moe:request_success_total{finished_reason="abort"'
    before = service.total(aborted)
    # Longer than anybody takes to leave.
    body = chat("", QUESTION, stream=is_streamed, **{**LONG, "max_tokens": 900})
    path = "/v1/chat/completions"
    if is_streamed:
        url = f"{service.url}{path}"
        with httpx2.stream("POST", url, json=body, timeout=WAIT_S) as reply:
            next(reply.iter_raw())
    else:
        with abandoned_request(service.url, path, body):
            wait_until(lambda: service.num_running() == 1, "the start of a request")
    wait_until(lambda: service.total(aborted) == before + 1, "the end of an abandoned request")
    wait_until(lambda: service.num_running() == 0, "an empty house")


@pytest.mark.parametrize(
    "num_requests, num_tokens", [(24, 48), pytest.param(40, 200, marks=pytest.mark.full)]
)
def test_a_full_replica_spills_to_the_other(
    service: Service, num_requests: int, num_tokens: int
) -> None:
    # Long enough that all are there together.
    body = chat("", QUESTION, user="busy", **{**LONG, "max_tokens": num_tokens})
    url = f"{service.url}/v1/chat/completions"
    with httpx2.Client(timeout=WAIT_S) as http, ThreadPoolExecutor(num_requests) as pool:
        replies = list(pool.map(lambda _: http.post(url, json=body), range(num_requests)))
    assert {reply.headers["X-Replica"] for reply in replies} == set(service.replica_pids())
    assert len({text_of(reply) for reply in replies}) == 1


def test_a_replica_that_dies_is_replaced_and_its_conversations_go_on(service: Service) -> None:
    body = chat("", QUESTION, user="loyal")
    before = service.replica_pids()
    home = service.ask(body).headers["X-Replica"]
    os.kill(before[home], signal.SIGKILL)
    reply = service.ask(body)
    assert "42" in text_of(reply) and reply.headers["X-Replica"] != home
    wait_until(lambda: len(service.replica_pids()) == 3, "a new replica")


def test_sigterm_ends_it(service: Service) -> None:
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(WAIT_S) == 0
