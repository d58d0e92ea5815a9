"""A real server on a loopback port, for tests that speak HTTP to it or show it to a browser."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
