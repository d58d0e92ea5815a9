"""Hosts an app with uvicorn on this machine: the socket, signals, draining.

The first SIGTERM or Ctrl-C stops accepting, lets running requests finish for a set time, and ends;
a second one ends at once.
"""

import asyncio
import errno
import logging
import math
import os
import signal
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from oled_moe.errors import ConfigError, OledMoeError
from oled_moe.server_backend import LoadingBackend

logger = logging.getLogger(__name__)

# For replies to go out once the last answer is over.
_FAREWELL_S = 3


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises: ConfigError for the address, OledMoeError if taken."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host is {host!r}, which has no address ({error})") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OledMoeError(
                f"port {port} of {host} is in use; end what uses it, or give another --port"
            ) from None
        raise ConfigError(f"{host}, port {port} cannot be listened on: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where browsers find it."""
    host, port = listener.getsockname()[:2]
    if listener.family == socket.AF_INET6:
        host = f"[{host}]"
    return f"http://{host}:{port}"


class DrainingServer(uvicorn.Server):
    """Serves one app until told to end; `exit_signal` is the signal that did, 0 if none."""

    def __init__(self, app: ASGIApp, backend: LoadingBackend, *, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=math.ceil(drain_s) + _FAREWELL_S,
            )
        )
        self.exit_signal = 0
        self._backend = backend
        self._drain_s = drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal. uvicorn would raise it again once all is done; a drained end is none."""
        if self.exit_signal:
            os._exit(128 + sig)
        self.exit_signal = sig
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        name = signal.Signals(self.exit_signal).name if self.exit_signal else "the end"
        logger.info("%s: draining for at most %g s", name, self._drain_s)
        drained = asyncio.ensure_future(asyncio.to_thread(self._backend.drain, self._drain_s))
        await super().shutdown(sockets)
        await drained
