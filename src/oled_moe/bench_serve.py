"""Load on an OpenAI endpoint, ours or another's: requests sent on time, replies timed. No torch.

Only what a client can see is measured. `bench_serve_figures.py` turns the outcomes into numbers.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx2
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from oled_moe.config import check_choice, check_int, check_real
from oled_moe.errors import ConfigError, InputError, OledMoeError, ServerNotFoundError

ENDPOINTS = ("chat", "completions")
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# How our server signs its models; no other knows our fields.
OWNER = "oled-moe"
_CONNECT_TIMEOUT_S = 10.0
_MAX_REASON_LETTERS = 300
_KEY = re.compile(r"[!-~]+")
# Common words, so that any tokenizer takes about one token for each.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education"
).split()

Progress = Callable[[int, int], None]
Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True, slots=True)
class ServePrompt:
    """One request: a text, or a conversation; `max_tokens` may differ from that of the others."""

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """What is asked of a server, and when.

    Requests arrive at random, `request_rate` a second on average (inf: all at once), and at most
    `max_concurrency` are under way. `num_warmups` come before and are not counted. Where the server
    is ours and `wants_frames`, it is asked to send the block at work, whose times are kept.

    Units: seconds. Raises: ConfigError for a field outside its range.
    """

    url: str
    prompts: Sequence[ServePrompt]
    endpoint: str = "chat"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    request_rate: float = math.inf
    max_concurrency: int | None = None
    num_warmups: int = 1
    max_tokens: int | None = None
    temperature: float = 0.0
    ignores_eos: bool = False
    wants_frames: bool = True
    seed: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_choice("endpoint", self.endpoint, ENDPOINTS)
        if self.request_rate != math.inf:
            check_real("request-rate", self.request_rate, minimum=1e-6)
        if self.max_concurrency is not None:
            check_int("max-concurrency", self.max_concurrency, minimum=1)
        if self.max_tokens is not None:
            check_int("max-tokens", self.max_tokens, minimum=1)
        check_int("num-warmups", self.num_warmups, minimum=0)
        check_int("seed", self.seed, minimum=0)
        check_real("temperature", self.temperature, minimum=0)
        check_real("timeout", self.timeout_s, minimum=0.001)
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            # Without the key, which is nobody's to read.
            raise ConfigError(
                "api-key cannot be sent in a header; allowed: letters, digits and signs of ASCII, "
                "without spaces, at least one"
            )
        if not self.prompts:
            raise ConfigError("there is no prompt; allowed: one or more")
        if self.endpoint == "completions" and any(p.text is None for p in self.prompts):
            raise ConfigError("a prompt is a conversation, which the endpoint completions lacks")


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it. `start_s` counts from the start of the run, all other times
    from when the request was sent. What the server does not tell is None.

    `chunk_s`: arrivals of text. `frame_s`: arrivals of the block at work. `block_end_s`: when each
    block was known to be done. `block_tokens`: positions of each that got a token. `canvas_tokens`:
    positions that were computed, those behind the end of the answer too. `diffusion`: the server's
    own account of the answer. Units: seconds.
    """

    start_s: float = 0.0
    end_s: float = 0.0
    error: str = ""
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    chunk_s: list[float] = field(default_factory=list)
    frame_s: list[float] = field(default_factory=list)
    block_end_s: list[float] = field(default_factory=list)
    block_tokens: list[int] = field(default_factory=list)
    canvas_tokens: int | None = None
    diffusion: Mapping[str, Any] | None = None

    @property
    def is_ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True)
class ServeRun:
    """A load and what came of it. `before` and `after` are the server's metrics, where it is ours.

    Units: seconds.
    """

    load: ServeLoad
    model: str
    is_ours: bool
    duration_s: float
    outcomes: Sequence[Outcome]
    before: Samples | None
    after: Samples | None


def split_url(url: str) -> tuple[str, str | None]:
    """A server's address without path, and the endpoint where the path names one.

    Raises: ConfigError for what is no such address.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL("")
    if parsed.port is not None and not 0 < parsed.port < 2**16:
        raise ConfigError(f"URL is {url!r}; allowed: a port from 1 to 65535")
    path = parsed.path.rstrip("/")
    endpoints = {"": None, "/v1": None, **{known: name for name, known in _PATHS.items()}}
    if parsed.scheme not in ("http", "https") or not parsed.host or path not in endpoints:
        raise ConfigError(
            f"URL is {url!r}; allowed: http://HOST:PORT, or the same with /v1 or with one of "
            f"{', '.join(_PATHS.values())} behind it"
        )
    return str(parsed.copy_with(path="/", query=None, fragment=None)).rstrip("/"), endpoints[path]


# Prompts


def demo_prompts(num_prompts: int, seed: int) -> list[ServePrompt]:
    """Held-out questions for the bundled demo model, in an order drawn by the seed."""
    path = Path(__file__).parent / "demo" / "heldout.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        questions = [json.loads(line)["question"] for line in lines]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: cannot be read ({error!r}); install oled-moe again") from None
    return repeat([ServePrompt(text) for text in questions], num_prompts, seed)


def random_prompts(
    num_prompts: int, seed: int, *, num_words: int, range_ratio: float
) -> list[ServePrompt]:
    """Words without meaning; lengths are uniform, `range_ratio` to either side of `num_words`."""
    check_int("random-input-len", num_words, minimum=1)
    check_real("random-range-ratio", range_ratio, minimum=0, maximum=1)
    draw = np.random.default_rng(seed)
    low = max(1, math.floor(num_words * (1 - range_ratio)))
    high = math.ceil(num_words * (1 + range_ratio))
    lengths = draw.integers(low, high, size=num_prompts, endpoint=True)
    return [ServePrompt(" ".join(draw.choice(_WORDS, size=length))) for length in lengths]


def repeat(prompts: Sequence[ServePrompt], num_prompts: int, seed: int) -> list[ServePrompt]:
    """As many prompts as asked for, shuffled, over and over where there are too few."""
    draw = np.random.default_rng(seed)
    chosen: list[ServePrompt] = []
    while len(chosen) < num_prompts:
        chosen += [prompts[index] for index in draw.permutation(len(prompts))]
    return chosen[:num_prompts]


# The run


def bench_serve(load: ServeLoad, *, progress: Progress | None = None) -> ServeRun:
    """Send the load and wait for every reply; `progress(done, total)` is told of each.

    Raises: ServerNotFoundError where nobody answers, OledMoeError where the answer cannot be read,
    ConfigError for a refused key or a server that names no model.
    """
    return asyncio.run(_run(load, progress or (lambda done, total: None)))


async def _run(load: ServeLoad, progress: Progress) -> ServeRun:
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    timeout = httpx2.Timeout(load.timeout_s, connect=_CONNECT_TIMEOUT_S)
    # No proxies from the environment: a measurement goes straight to the server.
    async with httpx2.AsyncClient(
        base_url=load.url,
        headers=headers,
        timeout=timeout,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    ) as client:
        model, is_ours = await _find_model(client, load)
        sender = _Sender(client, load, model, wants_frames=is_ours and load.wants_frames)
        for index in range(load.num_warmups):
            await sender.send(load.prompts[index % len(load.prompts)], perf_counter())
        before = await _read_metrics(client) if is_ours else None
        start_s = perf_counter()
        outcomes = await _send_all(sender, load, start_s, progress)
        duration_s = perf_counter() - start_s
        after = await _read_metrics(client) if is_ours else None
    return ServeRun(load, model, is_ours, duration_s, outcomes, before, after)


async def _find_model(client: httpx2.AsyncClient, load: ServeLoad) -> tuple[str, bool]:
    """The model to ask for, and whether the server is ours."""
    try:
        response = await client.get("/v1/models")
    except httpx2.TransportError as error:
        raise ServerNotFoundError(
            f"no server answers at {load.url} ({_words_of(error)}); start one with: oled-moe serve "
            "MODEL, or check the address"
        ) from None
    except httpx2.RequestError as error:
        raise OledMoeError(
            f"{load.url} answers, but not as an OpenAI server does ({_words_of(error)}); check the "
            "address, and what lies between"
        ) from None
    if response.status_code in (401, 403):
        raise ConfigError(f"{load.url} refuses the API key; give the right one with --api-key")
    try:
        cards = response.json()["data"]
        names = [str(card["id"]) for card in cards]
        owners = {card.get("owned_by") for card in cards}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names, owners = [], set()
    if load.model is None and not names:
        raise ConfigError(f"{load.url} names no model at /v1/models; give it with --model")
    return load.model or names[0], OWNER in owners


async def _read_metrics(client: httpx2.AsyncClient) -> Samples | None:
    """Every sample at /metrics by name and labels; None where there is no such page."""
    try:
        response = await client.get("/metrics")
        if response.status_code != 200:
            return None
        families = list(text_string_to_metric_families(response.text))
    except (httpx2.RequestError, ValueError):
        return None
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in families
        for sample in family.samples
    }


def arrivals(load: ServeLoad) -> list[float]:
    """When each request is due, from the start of the run. Units: seconds."""
    num = len(load.prompts)
    if load.request_rate == math.inf:
        return [0.0] * num
    gaps = np.random.default_rng(load.seed).exponential(1 / load.request_rate, size=num)
    # The first is due at once: time before it would be no load.
    return [float(time_s) for time_s in np.cumsum(gaps) - gaps[0]]


async def _send_all(
    sender: "_Sender", load: ServeLoad, start_s: float, progress: Progress
) -> list[Outcome]:
    num, num_done = len(load.prompts), 0
    gate = asyncio.Semaphore(load.max_concurrency or num)

    async def send(prompt: ServePrompt) -> Outcome:
        nonlocal num_done
        async with gate:
            outcome = await sender.send(prompt, start_s)
        num_done += 1
        progress(num_done, num)
        return outcome

    tasks = []
    for due_s, prompt in zip(arrivals(load), load.prompts, strict=True):
        delay_s = start_s + due_s - perf_counter()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        tasks.append(asyncio.create_task(send(prompt)))
    return await asyncio.gather(*tasks)


class _Sender:
    """Sends requests of one load."""

    def __init__(
        self, client: httpx2.AsyncClient, load: ServeLoad, model: str, *, wants_frames: bool
    ) -> None:
        self._client = client
        self._load = load
        self._model = model
        self._wants_frames = wants_frames

    async def send(self, prompt: ServePrompt, run_start_s: float) -> Outcome:
        """One request until its end; whatever goes wrong is the outcome's error."""
        sent_s = perf_counter()
        reply = _Reply(sent_s)
        reply.outcome.start_s = sent_s - run_start_s
        try:
            await asyncio.wait_for(self._stream(prompt, reply), self._load.timeout_s)
        except asyncio.TimeoutError:
            reply.fail(f"no end within {self._load.timeout_s:g} s")
        except httpx2.TransportError as error:
            reply.fail(f"connection lost: {_words_of(error)}")
        except httpx2.HTTPError as error:
            reply.fail(_words_of(error))
        return reply.outcome

    def _body(self, prompt: ServePrompt) -> dict[str, Any]:
        load = self._load
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        max_tokens = prompt.max_tokens or load.max_tokens
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if load.ignores_eos:
            body["ignore_eos"] = True
        if self._wants_frames and load.endpoint == "chat":
            body["diffusing"] = True
        if load.endpoint == "completions":
            body["prompt"] = prompt.text
        else:
            text = [{"role": "user", "content": prompt.text}]
            body["messages"] = text if prompt.messages is None else list(prompt.messages)
        return body

    async def _stream(self, prompt: ServePrompt, reply: "_Reply") -> None:
        path, body = _PATHS[self._load.endpoint], self._body(prompt)
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                reply.fail(f"HTTP {response.status_code}: {_message_of(await response.aread())}")
                return
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    reply.hear(line.removeprefix("data:").strip())
                if reply.is_over:
                    break
        reply.close()


class _Reply:
    """Listens to one reply as it arrives."""

    def __init__(self, sent_s: float) -> None:
        self.outcome = Outcome()
        self.is_over = False
        self._sent_s = sent_s
        self._block: int | None = None
        self._filled: set[int] = set()
        self._num_masked = 0

    def fail(self, reason: str) -> None:
        """The request failed, unless it had already."""
        self.outcome.error = self.outcome.error or reason[:_MAX_REASON_LETTERS]
        self.outcome.end_s = self.outcome.end_s or self._now()
        self.is_over = True

    def close(self) -> None:
        """No more will come."""
        if self.outcome.finish_reason is None:
            self.fail("the stream ended before the answer did")

    def hear(self, payload: str) -> None:
        """One event of the stream."""
        if payload == "[DONE]":
            self.is_over = True
            return
        try:
            chunk = json.loads(payload)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            self.fail(f"an event is no JSON object: {payload}")
        elif "error" in chunk:
            self.fail(f"error in the stream: {_message_of(payload)}")
        else:
            try:
                self._hear_chunk(chunk)
            except (AttributeError, KeyError, TypeError):
                self.fail(f"an event has not the form of OpenAI's: {payload}")

    def _hear_chunk(self, chunk: Mapping[str, Any]) -> None:
        now, outcome = self._now(), self.outcome
        usage = chunk.get("usage") or {}
        outcome.prompt_tokens = usage.get("prompt_tokens", outcome.prompt_tokens)
        outcome.output_tokens = usage.get("completion_tokens", outcome.output_tokens)
        outcome.diffusion = usage.get("diffusion", outcome.diffusion)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            if text:
                outcome.text += text
                outcome.chunk_s.append(now)
            if frame := delta.get("diffusion"):
                self._hear_frame(frame, now)
            if choice.get("finish_reason") is not None:
                outcome.finish_reason = choice["finish_reason"]
                outcome.end_s = now
                self._end_block(now)

    def _hear_frame(self, frame: Mapping[str, Any], now: float) -> None:
        """The block at work: whatever came before it is done."""
        self.outcome.frame_s.append(now)
        if frame.get("block") != self._block:
            self._end_block(now)
            self._block = frame.get("block")
        self._filled.update(change["pos"] for change in frame["changed"])
        self._num_masked = frame["masked"]
        if frame.get("final"):
            self._end_block(now)

    def _end_block(self, now: float) -> None:
        if self._block is None:
            return
        self.outcome.block_end_s.append(now)
        self.outcome.block_tokens.append(len(self._filled))
        num_positions = len(self._filled) + self._num_masked
        self.outcome.canvas_tokens = (self.outcome.canvas_tokens or 0) + num_positions
        self._block = None
        self._filled.clear()

    def _now(self) -> float:
        return perf_counter() - self._sent_s


def _message_of(body: str | bytes) -> str:
    """What an error reply says, in the envelope of OpenAI or else as it is."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body if isinstance(body, str) else body.decode(errors="replace")
        return " ".join(text.split()) or "no reason given"


def _words_of(error: Exception) -> str:
    return str(error) or type(error).__name__
