"""What the tests of the HTTP server share: the demo model behind an app, a scheduler that does as
it is told, and one HTTP exchange seen message by message."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.decoding import TokenChange
from oled_moe.engine import Engine, GenerationResult, StepEvent
from oled_moe.errors import QueueFullError
from oled_moe.metrics import GenerationStats
from oled_moe.model_paths import find_model
from oled_moe.scheduler import RequestHandle
from oled_moe.server import ServerSettings
from oled_moe.server_backend import NotServingError, Runtime, start_runtime
from oled_moe.tokenization import Tokenizer

QUESTION = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
MASK_ID, EOS_ID = 639, 635
SETTINGS = ServerSettings(served_names=("demo",))
STATS = GenerationStats(
    num_prefill_forwards=1,
    num_denoise_forwards=2,
    num_commit_forwards=1,
    tokens_per_forward=1.5,
    ttft_s=0.1,
    tpot_s=0.1,
    expert_cache_utilization=0.5,
    hit_rate=0.75,
    pooled_utilization=0.5,
    pooled_hit_rate=0.75,
    effective_transfer_ratio=0.5,
    expert_loads=3,
    bytes_loaded=300,
    cpu_expert_runs=0,
    max_resident_experts=4,
    expert_memory_bytes=1000,
    policy_overhead=0.1,
    bytes_prefetched=100,
)


class ReadyBackend:
    """A model that is there; `error` instead, while it is set."""

    def __init__(self, runtime: Any) -> None:
        self.error: NotServingError | None = None
        self._runtime = runtime

    def runtime(self) -> Any:
        if self.error is not None:
            raise self.error
        return self._runtime


@contextmanager
def demo_runtime(
    *, max_num_seqs: int = 4, max_waiting: int = 64, dtype: str | None = None, **settings: Any
) -> Iterator[Runtime]:
    """The demo model and its scheduler, on one thread."""
    config = EngineConfig(max_num_seqs=max_num_seqs, threads=1, dtype=dtype, **settings)
    runtime = start_runtime(lambda: Engine("demo", config), max_waiting=max_waiting)
    try:
        yield runtime
    finally:
        runtime.close()


class FakeScheduler:
    """Keeps what is submitted; tests say what happens to it.

    `submitted`: handle, prompt ids, parameters and callbacks of each request, in their order.
    """

    def __init__(self) -> None:
        self.submitted: list[SimpleNamespace] = []
        self.cancelled: list[RequestHandle] = []
        self.observers: list[Callable[..., None]] = []
        self.num_running = self.num_waiting = self.kv_tokens = 0
        self.kv_capacity_tokens = 100
        self.max_submitted = 1000

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        on_event: Callable[[StepEvent], None],
        on_error: Callable[[BaseException], None],
    ) -> RequestHandle:
        if len(self.submitted) >= self.max_submitted:
            raise QueueFullError("the queue is full; try again later", 7.4)
        handle = RequestHandle(len(prompt), 1.0)
        request = SimpleNamespace(
            handle=handle, prompt=list(prompt), params=params, on_event=on_event, on_error=on_error
        )
        self.submitted.append(request)
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        self.cancelled.append(handle)


class FakeEngine:
    """The demo model's tokenizer and limits, without the model."""

    def __init__(self, *, max_model_len: int = 64, **defaults: Any) -> None:
        self.path = find_model("demo")
        self.tokenizer = Tokenizer.load(self.path)
        self.max_model_len = max_model_len
        self.model_config = SimpleNamespace(vocab_size=640)
        self.config = EngineConfig()
        self.low_form: str | None = None
        ids = {"mask_token_id": MASK_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
        self.sampling_defaults = SamplingParams(block_length=4, **ids, **defaults)

    def encode(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text)


def fake_runtime(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(engine=FakeEngine(**options), scheduler=FakeScheduler(), monitor=None)


class Script:
    """The events of one answer, made step by step for blocks of four tokens behind a prompt."""

    def __init__(self, engine: FakeEngine, num_prompt_tokens: int) -> None:
        self._engine = engine
        self._start = num_prompt_tokens
        self._ids: list[int] = []

    def step(
        self,
        text: str,
        *,
        num_masked: int = 0,
        reason: str | None = None,
        step_id: int = 0,
        changes: Sequence[TokenChange] = (),
        confidence: float = 0.5,
    ) -> StepEvent:
        """`text` is final from now on; `reason` ends the answer."""
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        ids = tuple(tokenizer.encode(text))
        probabilities = (confidence,) * len(ids)
        result = None
        if reason is not None:
            result = GenerationResult(text, list(ids), reason, STATS, list(probabilities))
        done = 4 - num_masked
        return StepEvent(
            block_id=(self._start + max(0, len(ids) - 1)) // 4,
            step_id=step_id,
            block_start=(self._start + max(0, len(ids) - 1)) // 4 * 4,
            token_ids=(75,) * done + (MASK_ID,) * num_masked,
            is_masked=(False,) * done + (True,) * num_masked,
            changes=tuple(changes),
            is_block_done=not num_masked,
            text=text,
            answer_ids=ids,
            answer_probabilities=probabilities,
            result=result,
        )


class Exchange:
    """One HTTP request to an ASGI app, its reply taken message by message."""

    def __init__(self, app: Any, path: str, body: Any = None, **headers: str) -> None:
        self._has_left = asyncio.Event()
        self._outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        raw = b"" if body is None else json.dumps(body).encode()
        self._unread = [{"type": "http.request", "body": raw, "more_body": False}]
        names = {"content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET" if body is None else "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in names.items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._outgoing.put))

    async def _receive(self) -> dict[str, Any]:
        """As servers do: the request, then that the client has left, as often as it is asked."""
        if self._unread:
            return self._unread.pop()
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def message(self) -> dict[str, Any]:
        """The next message, or the error with which the app ended."""
        getter = asyncio.ensure_future(self._outgoing.get())
        await asyncio.wait({getter, self.task}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        if not getter.done() and self.task.done():
            getter.cancel()
            self.task.result()
            raise AssertionError("the app ended without a further message")
        return getter.result()

    async def start(self) -> int:
        """The status."""
        message = await self.message()
        assert message["type"] == "http.response.start"
        return int(message["status"])

    async def events(self, number: int) -> list[Any]:
        """So many server-sent events; comments as text."""
        found: list[Any] = []
        while len(found) < number:
            found += events_of((await self.message()).get("body", b"").decode())
        return found

    async def rest(self) -> list[Any]:
        """All events up to the end of the reply."""
        found: list[Any] = []
        while True:
            message = await self.message()
            found += events_of(message.get("body", b"").decode())
            if not message.get("more_body", False):
                return found

    def is_quiet(self) -> bool:
        """Whether nothing waits to be read."""
        return self._outgoing.empty()

    async def leave(self) -> None:
        """Close the connection, as a client does; returns once the app has ended."""
        self._has_left.set()
        await asyncio.wait_for(asyncio.shield(self.task), 60)


def events_of(text: str) -> list[Any]:
    """The events in a piece of a stream: objects, or strings for what is no JSON."""
    found: list[Any] = []
    for event in text.split("\n\n"):
        if event.startswith("data: "):
            payload = event.removeprefix("data: ")
            found.append(payload if payload == "[DONE]" else json.loads(payload))
        elif event:
            found.append(event)
    return found


def chunks_of(text: str) -> list[dict[str, Any]]:
    """Its objects alone: no keep-alives, which a busy machine sends, and no end mark."""
    return [event for event in events_of(text) if isinstance(event, dict)]


def content_of(events: Sequence[Any]) -> str:
    """The text of the first choice of a streamed chat."""
    deltas = [e["choices"][0]["delta"] for e in events if isinstance(e, dict) and e.get("choices")]
    return "".join(delta.get("content", "") for delta in deltas)


async def submitted(scheduler: FakeScheduler, number: int = 1) -> list[SimpleNamespace]:
    """Wait until so many requests are there."""
    for _ in range(12000):
        if len(scheduler.submitted) >= number:
            return scheduler.submitted
        await asyncio.sleep(0.005)
    raise AssertionError(f"{len(scheduler.submitted)} requests were submitted, not {number}")
