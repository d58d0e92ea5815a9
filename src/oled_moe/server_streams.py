"""Server-sent events: answers sent as they come, and the block at work between them.

Text goes out once no later step can change it, so that what was sent is always a beginning of the
answer. Frames of the block at work are at most so many a second; what changed in between is in the
next one, and the last of a block is never left out.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oled_moe.errors import OledMoeError
from oled_moe.server_answers import Answers, Frame
from oled_moe.server_errors import ClientGoneError, api_error, to_json
from oled_moe.server_replies import AnswerWriter, Form, Part

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """How often things are sent. Units: seconds."""

    keep_alive_s: float = 15.0
    frame_interval_s: float = 0.05
    clock: Callable[[], float] = time.monotonic


class EventStream(Response):
    """A reply whose events are sent as they are made; what makes them is closed in the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], answers: Answers) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # Its length is not known when it begins.
        del self.headers["content-length"]
        self._events = events
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        finally:
            self._answers.cancel()

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Wait for `work` as long as the client is there.

    Raises: ClientGoneError once the client has closed the connection; the work is cancelled then.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        # What a server's `receive` itself may raise comes before what it means.
        watcher.result()
        raise ClientGoneError
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def stream_events(
    answers: Answers, form: Form, timing: StreamTiming
) -> AsyncGenerator[bytes, None]:
    """All events of a reply, up to the one that says that it is done, or an error in its place."""
    streams = [_AnswerStream(form.writer(answer), form, timing) for answer in answers.answers]
    try:
        while True:
            answers.check()
            for stream in streams:
                for chunk in stream.due():
                    yield event_of(chunk)
            if all(stream.is_over for stream in streams):
                break
            waits_s = [stream.frame_wait_s() for stream in streams]
            wait_s = min([timing.keep_alive_s, *waits_s])
            if not await answers.wait(wait_s) and wait_s == timing.keep_alive_s:
                yield KEEP_ALIVE
        if form.shows_usage:
            yield event_of(form.usage_chunk(answers))
        yield DONE
    except OledMoeError as error:
        yield event_of(api_error(error).envelope())


def event_of(value: dict[str, Any]) -> bytes:
    """One event. JSON in ASCII holds no line end of any kind."""
    return b"data: " + to_json(value) + b"\n\n"


class _AnswerStream:
    """One answer of a stream: which chunks are due."""

    def __init__(self, writer: AnswerWriter, form: Form, timing: StreamTiming) -> None:
        self.is_over = False
        self._writer = writer
        self._form = form
        self._timing = timing
        self._is_open = False
        self._next_frame_s = 0.0

    def due(self) -> list[dict[str, Any]]:
        """Everything new that may go out now, of one moment."""
        answer = self._writer.answer
        if self.is_over or answer.event is None:
            return []
        parts = [] if self._is_open else [Part(answer.index, is_opening=True)]
        self._is_open = True
        for frame in self._due_frames():
            parts.append(Part(answer.index, frame=self._writer.frame(frame)))
        new = self._writer.take()
        if new.text or new.calls or (new.tokens and self._form.shows_logprobs):
            parts.append(new)
        if answer.is_over:
            self.is_over = True
            parts.append(Part(answer.index, finish_reason=self._writer.finish_reason))
        return [self._form.chunk(part, answer) for part in parts]

    def frame_wait_s(self) -> float:
        """How long until the frame that is held back may go out; infinite if there is none."""
        if not self._writer.answer.frames:
            return float("inf")
        return max(0.0, self._next_frame_s - self._timing.clock())

    def _due_frames(self) -> list[Frame]:
        """Mutates: the answer's frames, of which those due are taken."""
        answer, due = self._writer.answer, []
        while answer.frames:
            now_s = self._timing.clock()
            # A block's last frame is always sent, whenever it comes.
            is_last = answer.frames[0].event.is_block_done or len(answer.frames) > 1
            if not (is_last or answer.is_over or now_s >= self._next_frame_s):
                break
            self._next_frame_s = now_s + self._timing.frame_interval_s
            due.append(answer.frames.pop(0))
        return due
