"""A real server on a loopback port, for tests that speak HTTP to it or show it to a browser."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from oled_moe.server_host import uvicorn_config


@contextmanager
def live_server(app: ASGIApp) -> Iterator[str]:
    """Serve `app` from a thread; yields the URL it is at."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, drain_s=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def abandoned_request(url: str, path: str, body: Any) -> Iterator[None]:
    """A request that is on its way, and whose client is gone once the block ends."""
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        yield
