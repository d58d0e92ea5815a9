"""What clients do to connections, by raw bytes on a real socket."""

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import live_server
from starlette.types import Receive, Scope, Send

from oled_moe import server_host
from oled_moe.server_host import MAX_HEADER_BYTES
from oled_moe.server_middleware import RequestLog

HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"


async def trickle(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, then sends ten pieces whether or not anybody reads them."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(10):
        await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
        await asyncio.sleep(0.002)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
def address(caplog: pytest.LogCaptureFixture) -> Iterator[tuple[str, int]]:
    caplog.set_level(logging.DEBUG)
    with live_server(RequestLog(trickle)) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def say(address: tuple[str, int], *pieces: bytes) -> bytes:
    """Send pieces and read until the server closes."""
    reply = b""
    with socket.create_connection(address, timeout=60) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
            while received := client.recv(65536):
                reply += received
        # The server closed while more was on its way to it.
        except ConnectionError:
            pass
    return reply


def statuses(caplog: pytest.LogCaptureFixture, number: int) -> list[Any]:
    """The status of each request in the log, once there are so many."""
    for _ in range(6000):
        found = [r.args[2] for r in caplog.records if r.msg.startswith("%s %s %s in ")]  # type: ignore[index]
        if len(found) >= number:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{found}, not {number} requests")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno > logging.INFO]


def test_headers_are_bounded(address: tuple[str, int], caplog: pytest.LogCaptureFixture) -> None:
    ok = HEAD + b"X: " + b"a" * (MAX_HEADER_BYTES // 2) + b"\r\nConnection: close\r\n\r\n"
    assert say(address, ok).startswith(b"HTTP/1.1 200")
    for endless in (
        [HEAD + b"X: ", *[b"a" * 65536] * 40],
        [HEAD, *[b"X%d: a\r\n" % i * 1000 for i in range(1000)]],
        [b"GET /", *[b"a" * 65536] * 40],
    ):
        reply = say(address, *endless)
        # A reply may be lost where the client was still sending; the connection is over anyway.
        assert reply == b"" or reply.startswith(b"HTTP/1.1 4")
    assert statuses(caplog, 1) == [200]
    assert warnings(caplog) == []


def test_what_is_no_http_is_400_and_a_debug_line(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    assert say(address, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    upgrade = b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert say(address, HEAD + upgrade).startswith(b"HTTP/1.1 200")
    # A body that stops being one in its middle.
    chunked = HEAD.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n"
    assert say(address, chunked + b"1\r\na\r\n", b"what\r\n").startswith(b"HTTP/1.1 400")
    assert warnings(caplog) == []
    # httpcore and asyncio speak at this level too.
    ours = [r.getMessage() for r in caplog.records if r.name == "oled_moe.server_host"]
    assert len(ours) == 3


@pytest.mark.parametrize(
    ("begun", "reply"),
    [
        (b"", b""),
        (HEAD, b"HTTP/1.1 400"),
        (HEAD + b"Content-Length: 5\r\n\r\n1234", b"HTTP/1.1 400"),
    ],
)
def test_who_never_finishes_a_request_is_not_waited_for(
    address: tuple[str, int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    begun: bytes,
    reply: bytes,
) -> None:
    monkeypatch.setattr(server_host, "ARRIVAL_S", 0.1)
    # What the server says of itself, or nothing, and then the end: the client only listens.
    heard = say(address, begun)
    assert heard.startswith(reply) and (reply or not heard)
    assert warnings(caplog) == []


def test_an_answer_may_take_longer_than_a_request(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_host, "ARRIVAL_S", 0.01)
    heard = say(address, HEAD + b"Connection: close\r\n\r\n")
    assert heard.count(b"x" * 1000) == 10


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("wait_s", [0.0, 0.01, 0.05])
def test_clients_that_pipeline_and_leave_are_499(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture, is_reset: bool, wait_s: float
) -> None:
    for _ in range(10):
        with socket.create_connection(address, timeout=60) as client:
            client.sendall((HEAD + b"\r\n") * 20)
            time.sleep(wait_s)
            if is_reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert say(address, HEAD + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
    statuses(caplog, 1)
    assert warnings(caplog) == []
