"""Hosts an app with uvicorn on this machine: the socket, connections, signals, draining.

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
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from oled_moe.errors import ConfigError, OledMoeError
from oled_moe.server_backend import LoadingBackend

logger = logging.getLogger(__name__)

# For replies to go out once the last answer is over.
_FAREWELL_S = 3
# A request's line and headers; those of browsers and proxies are a tenth of it.
MAX_HEADER_BYTES = 64 * 2**10
# How long one request may take to arrive; otherwise a thousand connections that say nothing, or a
# byte a minute, would keep everybody else out for good.
ARRIVAL_S = 60.0


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


class Connection(H11Protocol):
    """One connection: what a client does wrong ends it, and nothing more.

    h11 rather than httptools, which bounds no header: 100 MB of one would be kept.
    """

    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_the_rest()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._wait_for_the_rest()
        else:
            self._wait_no_more()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in words where no reply has begun."""
        self._tell_the_app()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def eof_received(self) -> None:
        """The client has gone: the transport closes once this returns."""
        self._tell_the_app()

    def shutdown(self) -> None:
        """The server drains: an answer may go on, but nobody waits for the rest of a request."""
        super().shutdown()
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_started:
            self._tell_the_app()
            self.transport.close()

    def _wait_for_the_rest(self) -> None:
        if self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL_S, self._end_waiting)

    def _wait_no_more(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _end_waiting(self) -> None:
        """The time is over. Who has said nothing is told nothing: browsers open connections in
        advance, and would take it for the answer to what they ask next."""
        has_begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if has_begun and not self.transport.is_closing():
            self.send_400_response(f"The request did not arrive whole within {ARRIVAL_S:g} s.")
        else:
            self.transport.close()

    def _tell_the_app(self) -> None:
        # Otherwise it may write to a transport that is closing, which uvloop's raise for.
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()


def uvicorn_config(app: ASGIApp, *, drain_s: float) -> uvicorn.Config:
    """How uvicorn hosts an app here, whatever else is installed beside it."""
    logging.getLogger("uvicorn.error").addFilter(_is_worth_a_line)
    return uvicorn.Config(
        app,
        http=Connection,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=math.ceil(drain_s) + _FAREWELL_S,
    )


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Not what any client can make uvicorn say; that is told to those who look for it."""
    message = record.getMessage()
    if message.startswith(("Invalid HTTP request", "Unsupported upgrade request")):
        logger.debug(message)
        return False
    return not message.startswith("No supported WebSocket library")


class DrainingServer(uvicorn.Server):
    """Serves one app until told to end; `exit_signal` is the signal that did, 0 if none.

    `on_drain` is called once a signal has come.
    """

    def __init__(
        self,
        app: ASGIApp,
        backend: LoadingBackend,
        *,
        drain_s: float,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(uvicorn_config(app, drain_s=drain_s))
        self.exit_signal = 0
        self._backend = backend
        self._drain_s = drain_s
        self._on_drain = on_drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal. uvicorn would raise it again once all is done; a drained end is none."""
        if self.exit_signal:
            os._exit(128 + sig)
        self.exit_signal = sig
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.exit_signal:
            self._on_drain()
            name = signal.Signals(self.exit_signal).name
            logger.info("%s: draining for at most %g s", name, self._drain_s)
        drained = asyncio.ensure_future(asyncio.to_thread(self._backend.drain, self._drain_s))
        await super().shutdown(sockets)
        await drained
