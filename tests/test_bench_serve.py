"""Load on a scripted server: what is sent, what is timed, what failures are called."""

import asyncio
import contextlib
import json
import math
import socket
import statistics
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server
from served import SETTINGS, ReadyBackend, demo_runtime

from oled_moe.bench_serve import (
    Outcome,
    ServeLoad,
    ServePrompt,
    ServeRun,
    arrivals,
    bench_serve,
    demo_prompts,
    random_prompts,
    repeat,
    split_url,
)
from oled_moe.bench_serve_figures import NOTES, PERCENTILES, TIMES, serve_figures
from oled_moe.cli import main
from oled_moe.cli_bench_serve import read_serve_prompts
from oled_moe.errors import ConfigError, InputError, ServerNotFoundError
from oled_moe.server import create_app


class ScriptedServer:
    """An HTTP server that does what the prompt says; `is_ours` makes it sign as oled-moe.

    `bodies` are the requests that came, `most_at_once` how many were under way together.
    """

    def __init__(self, *, is_ours: bool = False, key: str | None = None) -> None:
        self.is_ours = is_ours
        self.key = key
        self.is_garbled = False
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.most_at_once = 0
        self.num_wanted_at_once = 0
        self._num_now = 0
        self._num_metrics_read = 0
        self._talks: set[asyncio.Task[Any]] = set()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,))
        self._thread.start()
        assert ready.wait(30)

    def _serve(self, ready: threading.Event) -> None:
        asyncio.run(self._main(ready))

    async def _main(self, ready: threading.Event) -> None:
        self._loop, self._enough = asyncio.get_running_loop(), asyncio.Event()
        self._is_over = asyncio.Event()
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        async with server:
            await self._is_over.wait()
            server.close()
            for task in self._talks:
                task.cancel()
            await asyncio.gather(*self._talks, return_exceptions=True)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split()
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(writer, path, headers, body)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._talks.discard(task)
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: bytes
    ) -> None:
        self.paths.append(path)
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return _reply(writer, 401, {"error": {"message": "bad key"}})
        if path == "/v1/models" and self.is_garbled:
            head = b"HTTP/1.1 200 X\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n"
            writer.write(head + b"{ }")
            return
        if path == "/v1/models":
            owner = "oled-moe" if self.is_ours else "somebody"
            return _reply(writer, 200, {"data": [{"id": "first", "owned_by": owner}]})
        if path == "/metrics":
            self._num_metrics_read += 1
            return _reply(writer, 200, _metrics(self._num_metrics_read))
        request = json.loads(body)
        self.bodies.append(request)
        self._num_now += 1
        self.most_at_once = max(self.most_at_once, self._num_now)
        if self._num_now >= self.num_wanted_at_once:
            self._enough.set()
        try:
            await self._perform(writer, request)
        finally:
            self._num_now -= 1

    async def _perform(self, writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        is_chat = "messages" in request
        does = request["messages"][0]["content"] if is_chat else request["prompt"]
        if self.num_wanted_at_once:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enough.wait(), 60)
        if does == "error 500":
            return _reply(writer, 500, {"error": {"message": "out of luck", "type": "x"}})
        if does == "error without words":
            return _reply(writer, 503, "")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        async for event in self._events(does, is_chat, bool(request.get("diffusing"))):
            if event is None:
                raise ConnectionError("as the script says")
            payload = event if isinstance(event, str) else json.dumps(event)
            data = f"data: {payload}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    async def _events(
        self, does: str, is_chat: bool, has_frames: bool
    ) -> AsyncIterator[dict[str, Any] | str | None]:
        def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> Any:
            said = {"delta": {"content": text, **more}} if is_chat else {"text": text}
            return {"choices": [{"index": 0, "finish_reason": finish, **said}]}

        def frame(block: int, filled: range, masked: int, *, final: bool) -> Any:
            changed = [{"pos": pos, "from": None, "to": "x", "conf": 1.0} for pos in filled]
            shown = {"block": block, "changed": changed, "masked": masked, "final": final}
            return chunk("", diffusion=shown)

        if is_chat:
            yield chunk(None, role="assistant")
        if does == "hang":
            await asyncio.sleep(600)
        if has_frames:
            yield frame(2, range(3), 3, final=False)
            yield frame(2, range(3, 6), 0, final=True)
        yield chunk("one ")
        if does == "error in the stream":
            yield {"error": {"message": "the engine failed"}}
            return
        if does == "disconnect":
            yield None
        if does == "end too early":
            return
        if does == "garbage":
            yield "{"
            return
        if does == "other form":
            yield {"choices": [["what"]]}
            return
        if has_frames:
            yield frame(3, range(6, 10), 2, final=False)
        yield chunk("two")
        yield chunk(None, finish="stop")
        usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": 9}
        if self.is_ours:
            usage["diffusion"] = {"nfe": 3, "blocks": 2, "edited_tokens": 0}
        if does != "no usage":
            yield {"choices": [], "usage": usage}
        yield "[DONE]"


def _reply(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))


def _metrics(reading: int) -> str:
    """The first reading is before the run; the second has 30 hits and 10 misses more."""
    hits, misses, moved = (5 + 30 * reading, 2 + 10 * reading, 1000 * reading)
    return f"""# TYPE oled_moe:expert_cache_hits counter
oled_moe:expert_cache_hits_total{{layer="0",tier="ram"}} {hits}
# TYPE oled_moe:expert_cache_misses counter
oled_moe:expert_cache_misses_total{{layer="0",tier="ram"}} {misses}
# TYPE oled_moe:expert_bytes counter
oled_moe:expert_bytes_total{{src="disk",dst="ram"}} {moved}
# TYPE oled_moe:denoise_steps counter
oled_moe:denoise_steps_total {10 * reading}
# TYPE oled_moe:tier_bytes gauge
oled_moe:tier_bytes{{tier="ram"}} 4096
"""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def our_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer(is_ours=True)
    yield server
    server.close()


def prompts(*texts: str) -> list[ServePrompt]:
    return [ServePrompt(text) for text in texts]


# What is sent


def test_requests_are_what_openai_servers_take(server: ScriptedServer) -> None:
    load = ServeLoad(server.url, prompts("a", "b"), max_tokens=12, num_warmups=1)
    run = bench_serve(load)
    assert (run.model, run.is_ours, len(run.outcomes)) == ("first", False, 2)
    assert len(server.bodies) == 3 and server.paths.count("/v1/chat/completions") == 3
    assert server.bodies[1] == {
        "model": "first",
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0.0,
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_completions_and_what_is_special(server: ScriptedServer) -> None:
    special = [ServePrompt("a", None, 3)]
    load = ServeLoad(
        server.url, special, endpoint="completions", model="mine", ignores_eos=True, num_warmups=0
    )
    (outcome,) = bench_serve(load).outcomes
    body = server.bodies[0]
    assert outcome.is_ok and outcome.text == "one two"
    assert server.paths[-1] == "/v1/completions"
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("mine", "a", 3)
    assert body["ignore_eos"] is True and "messages" not in body


def test_conversations_go_as_they_are(server: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    bench_serve(ServeLoad(server.url, [ServePrompt(None, messages)], num_warmups=0))
    assert server.bodies[0]["messages"] == messages
    with pytest.raises(ConfigError, match="conversation"):
        ServeLoad(server.url, [ServePrompt(None, messages)], endpoint="completions")


def test_no_more_than_allowed_are_under_way(server: ScriptedServer) -> None:
    # Each waits until three are there, which is how many may be.
    server.num_wanted_at_once = 3
    load = ServeLoad(server.url, prompts(*"abcdefghi"), max_concurrency=3, num_warmups=0)
    run = bench_serve(load)
    assert all(each.is_ok for each in run.outcomes) and server.most_at_once == 3


def test_without_a_limit_all_come_at_once(server: ScriptedServer) -> None:
    server.num_wanted_at_once = 20
    run = bench_serve(ServeLoad(server.url, prompts(*["a"] * 20), num_warmups=0))
    assert all(each.is_ok for each in run.outcomes) and server.most_at_once == 20


def test_arrivals_are_a_poisson_process_of_that_rate() -> None:
    load = ServeLoad("http://x", prompts(*["a"] * 4000), request_rate=50.0, seed=3)
    due = arrivals(load)
    gaps = [later - earlier for earlier, later in zip(due, due[1:], strict=False)]
    assert due[0] == 0 and min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    # Exponential: the spread is the mean.
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert arrivals(load) == due
    assert set(arrivals(ServeLoad("http://x", load.prompts))) == {0.0}


def test_requests_wait_for_their_time(server: ScriptedServer) -> None:
    load = ServeLoad(server.url, prompts(*"abcde"), request_rate=40.0, num_warmups=0)
    run = bench_serve(load)
    for outcome, due_s in zip(run.outcomes, arrivals(load), strict=True):
        assert outcome.start_s >= due_s


# What is heard


def test_foreign_servers_tell_what_they_tell(server: ScriptedServer) -> None:
    figures = serve_figures(bench_serve(ServeLoad(server.url, prompts("a", "b", "c"))))
    assert (figures["completed"], figures["failed"], figures["errors"]) == (3, 0, [""] * 3)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (21, 27)
    assert figures["output_lens"] == [9, 9, 9] and figures["generated_texts"] == ["one two"] * 3
    assert figures["mean_ttft_ms"] > 0 and figures["mean_tpot_ms"] > 0
    # 4.5 tokens in a piece.
    assert figures["tokens_per_chunk"] == 4.5 and figures["is_itl_degenerate"] is True
    unknown = ["nfe", "tpf", "fps", "canvas_tokens", "canvas_token_throughput", "server"]
    unknown += [f"mean_{name}_ms" for name in list(TIMES)[4:]]
    assert {name: figures[name] for name in unknown} == dict.fromkeys(unknown)
    assert figures["tps"] == figures["output_throughput"] == figures["useful_token_throughput"]


def test_our_server_tells_more(our_server: ScriptedServer) -> None:
    run = bench_serve(ServeLoad(our_server.url, prompts("a", "b")))
    figures = serve_figures(run)
    assert all(body["diffusing"] is True for body in our_server.bodies)
    assert run.outcomes[0].block_tokens == [6, 4] and run.outcomes[0].canvas_tokens == 12
    assert (figures["useful_tokens"], figures["canvas_tokens"]) == (18, 24)
    assert figures["canvas_token_throughput"] > figures["useful_token_throughput"]
    assert (figures["nfe"], figures["tpf"], figures["blocks"]) == (6, 3.0, 4)
    for name in list(TIMES)[4:]:
        assert figures[f"median_{name}_ms"] > 0
    assert figures["server"] == {
        "expert_hit_rate": 0.75,
        "denoise_steps": 10,
        "expert_bytes": {"disk->ram": 1000},
        "tier_bytes": {"ram": 4096},
    }


def test_frames_are_asked_for_only_where_wanted(our_server: ScriptedServer) -> None:
    run = bench_serve(ServeLoad(our_server.url, prompts("a"), wants_frames=False))
    assert all("diffusing" not in body for body in our_server.bodies)
    assert run.outcomes[0].frame_s == [] and run.outcomes[0].canvas_tokens is None


@pytest.mark.parametrize(
    "does, reason",
    [
        ("error 500", "HTTP 500: out of luck"),
        ("error without words", "HTTP 503: no reason given"),
        ("error in the stream", "error in the stream: the engine failed"),
        ("disconnect", "connection lost: "),
        ("end too early", "the stream ended before the answer did"),
        ("garbage", "an event is no JSON object: {"),
        ("other form", "an event has not the form of OpenAI's: "),
    ],
)
def test_failures_are_told_apart(server: ScriptedServer, does: str, reason: str) -> None:
    figures = serve_figures(bench_serve(ServeLoad(server.url, prompts("a", does, "b"))))
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["errors"][1].startswith(reason)
    assert figures["failure_reasons"] == {figures["errors"][1]: 1}
    # Only what succeeded counts.
    assert figures["total_output_tokens"] == 18


def test_a_request_without_end_is_given_up(server: ScriptedServer) -> None:
    load = ServeLoad(server.url, prompts("hang", "a"), num_warmups=0, timeout_s=3)
    first, second = bench_serve(load).outcomes
    assert first.error == "no end within 3 s" and second.is_ok


def test_tokens_that_nobody_counted_are_not_invented(server: ScriptedServer) -> None:
    figures = serve_figures(bench_serve(ServeLoad(server.url, prompts("no usage", "a"))))
    assert figures["completed"] == 2 and figures["output_lens"] == [None, 9]
    for name in ("total_output_tokens", "output_throughput", "tokens_per_chunk", "tps"):
        assert figures[name] is None
    assert figures["mean_ttft_ms"] > 0 and figures["request_throughput"] > 0


# Figures of given times


def run_of(*outcomes: Outcome, duration_s: float = 2.0) -> ServeRun:
    load = ServeLoad("http://x", prompts(*["a"] * len(outcomes)))
    return ServeRun(load, "m", True, duration_s, outcomes, None, None)


def test_times_by_their_definitions() -> None:
    outcome = Outcome(
        end_s=2.0,
        text="x",
        finish_reason="stop",
        prompt_tokens=4,
        output_tokens=11,
        chunk_s=[0.5, 1.0, 1.75],
        frame_s=[0.25, 0.5],
        block_end_s=[0.75, 2.0],
        block_tokens=[6, 5],
        canvas_tokens=16,
        diffusion={"nfe": 4, "blocks": 2, "edited_tokens": 1},
    )
    figures = serve_figures(run_of(outcome))
    means = {name: figures[f"mean_{name}_ms"] for name in TIMES}
    assert means == pytest.approx(
        {
            "ttft": 500,
            "tpot": 150,
            "itl": 625,
            "e2el": 2000,
            "tpot_after_first_block": 200,
            "time_to_first_block": 750,
            "time_to_first_frame": 250,
            "inter_block_latency": 1250,
        }
    )
    assert (figures["tpf"], figures["fps"], figures["tps"]) == (11 / 4, 2.0, 5.5)
    assert figures["single_chunk_answers"] == 0
    assert (figures["canvas_token_throughput"], figures["useful_share"]) == (8.0, 11 / 16)
    assert figures["itls"] == [[0.5, 0.75]] and figures["ttfts"] == [0.5]


def test_spread_over_requests() -> None:
    times = [0.1 * (i + 1) for i in range(101)]
    outcomes = [Outcome(end_s=time, finish_reason="stop", output_tokens=1) for time in times]
    figures = serve_figures(run_of(*outcomes))
    assert figures["min_e2el_ms"] == pytest.approx(100)
    assert figures["max_e2el_ms"] == pytest.approx(10100)
    assert figures["mean_e2el_ms"] == pytest.approx(5100)
    assert figures["median_e2el_ms"] == pytest.approx(5100)
    for percentile in PERCENTILES:
        assert figures[f"p{percentile}_e2el_ms"] == pytest.approx(100 * (percentile + 1))
    assert figures["std_e2el_ms"] == pytest.approx(1e3 * statistics.pstdev(times))
    # One token has no time between tokens, and no text no time to the first.
    assert figures["mean_tpot_ms"] is None and figures["mean_ttft_ms"] is None


# Prompts and addresses


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://127.0.0.1:8000", ("http://127.0.0.1:8000", None)),
        ("http://127.0.0.1:8000/v1/", ("http://127.0.0.1:8000", None)),
        ("https://x.example/v1/chat/completions", ("https://x.example", "chat")),
        ("http://x:80/v1/completions", ("http://x", "completions")),
    ],
)
def test_addresses(url: str, expected: tuple[str, str | None]) -> None:
    assert split_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000", "ftp://x", "http://", "http://x/other", "", "h", "http://x:65536",
        "http://x:0", "http://x:-1", "http://x:http", "http://[::1",
    ],
)  # fmt: skip
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="URL is"):
        split_url(url)


def test_datasets_are_drawn_by_their_seed() -> None:
    assert demo_prompts(5, 1) == demo_prompts(5, 1) != demo_prompts(5, 2)
    assert len({prompt.text for prompt in demo_prompts(400, 0)}) > 300
    drawn = random_prompts(200, 0, num_words=100, range_ratio=0.5)
    lengths = [len((prompt.text or "").split()) for prompt in drawn]
    assert drawn == random_prompts(200, 0, num_words=100, range_ratio=0.5)
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert sorted(p.text or "" for p in repeat(prompts("a", "b"), 4, 0)) == ["a", "a", "b", "b"]


def test_prompt_files(tmp_path: Path) -> None:
    text, objects = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\ntwo\n")
    assert read_serve_prompts(text) == prompts("one", "two")
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "a", "max_tokens": 3}, {"messages": messages}, {"question": "q"}]
    objects.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_serve_prompts(objects) == [
        ServePrompt("a", None, 3), ServePrompt(None, messages), ServePrompt("q"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line", ["{}", '{"prompt": ""}', '{"prompt": "a", "messages": [{}]}', "[1]", "{", "1"]
)
def test_prompt_files_that_are_none(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2: is no prompt"):
        read_serve_prompts(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "chats"}, {"request_rate": 0.0}, {"request_rate": math.nan},
        {"max_concurrency": 0}, {"max_tokens": 0}, {"num_warmups": -1}, {"seed": -1},
        {"timeout_s": 0.0}, {"temperature": -1.0}, {"prompts": []},
    ],
)  # fmt: skip
def test_loads_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServeLoad(**{"url": "http://x", "prompts": prompts("a"), **wrong})


# The command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_nobody_answers(capfd: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerNotFoundError):
        bench_serve(ServeLoad(url, prompts("a")))
    assert main(["bench-serve", url]) == 3
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and f"no server answers at {url}" in err


def test_a_refused_key_is_said_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    server = ScriptedServer(key="right")
    try:
        assert main(["bench-serve", server.url, "--api-key", "wrong"]) == 2
        assert "--api-key" in capfd.readouterr().err
        arguments = ["bench-serve", server.url, "--api-key", "right", "--num-prompts", "2"]
        assert main(arguments) == 0
    finally:
        server.close()


@pytest.mark.parametrize("key", ["sch\u00fcssel", "two words", "line\n", ""])
def test_a_key_that_cannot_be_sent_is_not_shown(
    server: ScriptedServer, capfd: pytest.CaptureFixture[str], key: str
) -> None:
    assert main(["bench-serve", server.url, "--api-key", key]) == 2
    _, err = capfd.readouterr()
    assert "api-key cannot be sent" in err and err.count("\n") == 1
    assert not key or key not in err
    assert server.paths == []


def test_an_answer_that_cannot_be_read_is_one_line(
    server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server.is_garbled = True
    assert main(["bench-serve", server.url]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and f"{server.url} answers, but not as" in err


def test_the_table_and_the_file(
    our_server: ScriptedServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    arguments = ["bench-serve", our_server.url, "--num-prompts", "4", "--out", str(path)]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    assert err == "" and "Successful requests:                     4" in out
    for line in (
        "Mean TTFT (ms):",
        "P99 ITL (ms):",
        "Canvas tokens (in whole blocks):",
        "Expert hit rate (%):",
    ):
        assert line in out
    assert "not between tokens" in out
    figures = json.loads(path.read_text())
    assert figures["completed"] == 4 and figures["dataset"] == "demo"


def test_json_has_every_promised_field(
    our_server: ScriptedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench-serve", our_server.url, "--json", "--num-prompts", "2"]) == 0
    figures = json.loads(capfd.readouterr().out)
    promised = """completed failed duration total_input_tokens total_output_tokens
        request_throughput output_throughput total_token_throughput ttfts itls input_lens
        output_lens errors environment git_revision seed nfe tpf fps tps date model_id
        num_prompts request_rate max_concurrency is_itl_degenerate useful_token_throughput
        canvas_token_throughput client_machine server notes""".split()
    promised += [
        f"{statistic}_{name}_ms"
        for name in TIMES
        for statistic in ("mean", "median", "std", "min", "max", "p50", "p90", "p95", "p99")
    ]
    assert set(promised) <= set(figures)
    assert figures["request_rate"] == "inf" and figures["notes"] == NOTES


def test_all_failed_is_1(server: ScriptedServer, tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "p.txt"
    path.write_text("error 500\n")
    arguments = ["bench-serve", server.url, "--dataset", str(path), "--num-prompts", "3"]
    assert main(arguments) == 1
    assert "3 requests failed: HTTP 500: out of luck" in capfd.readouterr().out
    path.write_text("error 500\ngood\n")
    assert main(arguments) == 0


def test_what_is_asked_wrongly_is_2(server: ScriptedServer, tmp_path: Path, capfd: Any) -> None:
    for flags in (
        ["--dataset", "nothing"], ["--request-rate", "-1"], ["--num-prompts", "0"],
        ["--out", str(tmp_path / "no" / "where.json")], ["--endpoint", "x"],
    ):  # fmt: skip
        assert main(["bench-serve", server.url, *flags]) == 2
        assert capfd.readouterr().err.startswith("error: ")
    assert server.bodies == []


# The real server


def test_the_real_server_tells_all_of_it() -> None:
    with demo_runtime(max_num_seqs=4) as runtime:
        with live_server(create_app(ReadyBackend(runtime), SETTINGS)) as url:
            load = ServeLoad(url, demo_prompts(12, 0), max_concurrency=4, max_tokens=40)
            figures = serve_figures(bench_serve(load))
    assert (figures["completed"], figures["failed"], figures["is_oled_moe"]) == (12, 0, True)
    assert [name for name, value in figures.items() if value is None] == []
    for each in figures["diffusion"]:
        assert each["nfe"] > 0
    # Positions behind the end of an answer are computed and of no use.
    assert figures["useful_tokens"] < figures["canvas_tokens"] <= figures["blocks"] * 16
    assert figures["server"]["denoise_steps"] <= figures["nfe"]
    assert figures["server"]["expert_hit_rate"] == 1.0
    for firsts, ends in zip(figures["ttfts"], figures["e2els"], strict=True):
        assert 0 < firsts <= ends
