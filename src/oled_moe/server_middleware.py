"""What every request passes through before it meets a route, as plain ASGI.

From outside in: `RequestLog` names, times and logs requests and answers for what nobody expected;
`SameThing` knows other ways to ask for what routes answer; `ApiKeys` lets in who may come in;
`BodyLimit` counts what is sent; `StrictRoute` reads JSON.
"""

import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oled_moe.config import format_size
from oled_moe.server_errors import ApiError, ClientGoneError, bad_request, to_json, unexpected

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
# Open to whoever can connect, as with vLLM: probes, metrics, and the page, which asks for the key.
OPEN_PATHS = {"/", "/health", "/ready", "/version", "/metrics", "/openapi.json"}
OPEN_PREFIX = "/page/"
# Deeper than any schema that people write; far from what recursion in a library could bear.
MAX_DEPTH = 64
# More digits than a 64-bit number or a float has any use for.
_MAX_DIGITS = 40


class RequestLog:
    """Gives every request an id, echoed as X-Request-ID; logs it; is the one handler of what
    nobody expected."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id")
        is_good = given is None or _REQUEST_ID.fullmatch(given) is not None
        request_id = given if given is not None and is_good else uuid.uuid4().hex
        reply = _Reply(send, request_id)
        start_s = time.perf_counter()
        try:
            if is_good:
                await self._app(scope, receive, reply.send)
            else:
                error = bad_request(
                    "X-Request-ID is not usable; allowed: 1 to 128 letters, digits and ._:/+=-",
                    "X-Request-ID",
                )
                await error.response()(scope, receive, reply.send)
        except ClientGoneError:
            reply.status = 499
        except Exception:
            logger.exception("request %s failed unexpectedly", request_id)
            with suppress(ClientGoneError):
                await reply.fail(scope, receive)
        finally:
            logger.info(
                "%s %s %s in %.3f s, request %s",
                scope["method"],
                # A line of a log is one line, whatever a client asks for.
                scope["path"].encode("unicode_escape").decode("ascii"),
                reply.status or "nothing",
                time.perf_counter() - start_s,
                request_id,
            )


class _Reply:
    """What goes out in answer to one request, and how far that is."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.status = 0
        self._send = send
        self._request_id = request_id
        self._is_stream = False
        self._is_complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self._request_id
            headers["X-Content-Type-Options"] = "nosniff"
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            self._is_complete = not message.get("more_body", False)
        await self._pass_on(message)

    async def fail(self, scope: Scope, receive: Receive) -> None:
        """Say that the server failed, in the form that what has gone out allows."""
        error = unexpected()
        if not self.status:
            await error.response()(scope, receive, self.send)
        elif not self._is_complete:
            body = b"data: " + to_json(error.envelope()) + b"\n\n" if self._is_stream else b""
            self.status = error.status_code
            await self._pass_on({"type": "http.response.body", "body": body})

    async def _pass_on(self, message: Message) -> None:
        """Raises: ClientGoneError where there is no connection any more."""
        try:
            await self._send(message)
        except OSError:
            raise ClientGoneError from None
        except RuntimeError as error:
            # How uvloop's transports say it.
            if "closed" not in str(error):
                raise
            raise ClientGoneError from None


class SameThing:
    """Has HEAD answered as GET without the body, and a path that ends with a slash as without.

    Redirects would do for the slash, but not every client follows one with its body and its key,
    and behind a proxy they would name an address that is not the client's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        is_head = scope["method"] == "HEAD"
        asked = {**scope, "path": scope["path"].rstrip("/") or "/"}
        if is_head:
            asked["method"] = "GET"
        await self._app(asked, receive, send_head if is_head else send)


class ApiKeys:
    """Lets requests with one of the keys pass, as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope) and not self._has_key(scope):
            error = ApiError(
                401,
                "this server wants an API key; send Authorization: Bearer KEY with one of its keys",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        offered = given.strip().encode()
        # Every key is compared to its end: neither which nor how much of it matched shows in time.
        matches = [hmac.compare_digest(offered, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Refuses bodies beyond `max_bytes`: those that announce it at once, others on the way."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self._max_bytes):
            await self._too_large().response()(scope, receive, send)
            return
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, count, send)

    def _too_large(self) -> ApiError:
        # What is left of the body is not read: this connection is of no more use.
        return ApiError(
            413,
            f"the body is larger than {format_size(self._max_bytes)}, what this server takes; "
            "send less, or start it with a larger --max-body",
            code="request_too_large",
            headers={"Connection": "close"},
        )


class StrictRoute(APIRoute):
    """A route whose JSON is read strictly: UTF-8, finite numbers, bounded depth and digits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


def parse_json(body: bytes) -> Any:
    """The value of a JSON body. Raises: ApiError 400 that says what is wrong with it."""
    try:
        text = body.decode("utf-8")
        value = json.loads(
            text, parse_constant=_no_constant, parse_int=_parse_int, parse_float=_parse_float
        )
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 from byte {error.start} on; send UTF-8") from None
    except json.JSONDecodeError as error:
        raise bad_request(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    _check_nesting(value, may_hold_surrogates="\\ud" in text.lower())
    return value


def _no_constant(name: str) -> NoReturn:
    raise bad_request(f"the body holds {name}, which is no JSON number; send a finite one")


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise bad_request(f"the body holds a number of {len(digits)} digits; send a smaller one")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise bad_request(f"the body holds {digits[:20]}, too large for a number; send less")
    return value


def _too_deep() -> ApiError:
    return bad_request(f"the body is nested deeper than {MAX_DEPTH} levels; send a flatter one")


def _check_nesting(value: Any, *, may_hold_surrogates: bool) -> None:
    """Raise ApiError where a value is too deep, or a string holds half of a character."""
    level = [value]
    for _ in range(MAX_DEPTH):
        if may_hold_surrogates:
            _check_strings(level)
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
                inner += each if may_hold_surrogates else ()
            elif isinstance(each, list):
                inner += each
        if not inner:
            return
        level = inner
    raise _too_deep()


def _check_strings(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise bad_request(
                    "the body holds half of a surrogate pair (\\ud800 to \\udfff alone); "
                    "send whole characters"
                ) from None
