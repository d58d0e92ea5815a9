"""What goes wrong over HTTP, and the one shape in which clients are told.

Every error body is exactly {"error": {"message", "type", "param", "code"}}, whatever raised it:
validation, authentication, routing, the engine, or what nobody expected. The same object ends a
stream that fails half way.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from oled_moe.errors import ConfigError, InputError, OledMoeError, QueueFullError, ShuttingDownError
from oled_moe.server_backend import NotServingError
from oled_moe.server_schema import ChatRequest, CompletionRequest

# The error type of a status; 400 and every other status below 500 is a request that is wrong.
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}
_FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
# How the fields of requests are written; the types that a field can take are written otherwise.
_FIELD = re.compile(r"(?!(?:str|int|float|bool|dict|list|none)$)[a-z][a-z_]*")
# What a name or a value may take of an error message.
_MAX_SHOWN = 80


class ApiError(HTTPException):
    """An error reply. `param`: the request field at fault; `code`: a word that programs test."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param = param
        self.code = code

    def envelope(self) -> dict[str, Any]:
        """The body of the reply."""
        usual = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.detail,
                "type": _TYPES.get(self.status_code, usual),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        return Response(
            to_json(self.envelope()), self.status_code, self.headers, "application/json"
        )


class ClientGoneError(Exception):
    """The client closed the connection: there is nobody to tell."""


def to_json(value: Any) -> bytes:
    """JSON in ASCII: whatever a client sent can be written back, half a character included."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def bad_request(message: str, param: str | None = None, *, code: str | None = None) -> ApiError:
    """Something in the request is not as it must be."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, param: str) -> ApiError:
    """A prompt that no answer fits behind, by the code that OpenAI's clients know."""
    return bad_request(message, param, code="context_length_exceeded")


def unexpected() -> ApiError:
    """What a client is told of an error that nobody foresaw; the log says more."""
    return ApiError(
        500, "the server failed on this request; its log says why, by X-Request-ID", code="internal"
    )


def api_error(error: BaseException) -> ApiError:
    """The reply to what the engine or the scheduler raised."""
    if isinstance(error, ApiError):
        return error
    message = " ".join(str(error).split())
    if isinstance(error, QueueFullError):
        wait_s = max(1, round(error.retry_after_s))
        return ApiError(429, message, code="queue_full", headers={"Retry-After": str(wait_s)})
    if isinstance(error, ShuttingDownError):
        return ApiError(503, message, code="draining", headers={"Retry-After": "1"})
    if isinstance(error, NotServingError):
        return ApiError(503, message, code=error.state, headers={"Retry-After": "1"})
    if isinstance(error, ConfigError | InputError):
        # Messages about a field begin with its name.
        first = message.split(" ", 1)[0]
        return bad_request(message, first if re.split(r"[.\[]", first)[0] in _FIELDS else None)
    if isinstance(error, OledMoeError):
        return ApiError(500, message, code="engine")
    return unexpected()


def of_http(error: HTTPException) -> ApiError:
    """Errors of routing: no such path, or the wrong method for it."""
    if isinstance(error, ApiError):
        return error
    message, code = str(error.detail), None
    if error.status_code == 404:
        message, code = "there is nothing at this path; /openapi.json lists what is", "not_found"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "GET")
        # Routes name what they have; HEAD is taken wherever GET is.
        allowed = "GET, HEAD" if "GET" in allowed else allowed
        message, code = f"this path does not take this method; it takes {allowed}", "method"
        return ApiError(405, message, code=code, headers={"Allow": allowed})
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def of_validation(error: RequestValidationError) -> ApiError:
    """What is most to the point of all that is wrong with a request, by the name of its field."""
    errors = error.errors()
    # An unknown field explains what else is wrong, a misspelt name its missing twin. Otherwise
    # what lies deepest, and of that what is not about its type: where a field takes several forms,
    # that is of the form that was meant.
    first = min(
        errors,
        key=lambda e: (not _is_unknown_field(e), -len(_field_path(e)), e["type"].endswith("_type")),
    )
    path = _field_path(first)
    if not path:
        return bad_request(_about_the_body(first))
    name = ".".join(path)
    return bad_request(f"{name} {_about_a_field(first)}", name)


def _is_unknown_field(error: Mapping[str, Any]) -> bool:
    return error["type"] == "extra_forbidden" and len(error["loc"]) == 2


def _field_path(error: Mapping[str, Any]) -> list[str]:
    """Field names and indices, without the names of the forms that a field can take."""
    *path, last = list(error["loc"][1:]) or [""]
    if path[:1] == ["response_format"]:
        # Told apart by their field `type`, whose value comes first.
        del path[1:2]
    elif error["type"].startswith("union_tag"):
        path, last = [*path, last], "type"
    parts = [str(part) for part in path if isinstance(part, int) or _FIELD.fullmatch(part)]
    if last != "" and (error["type"] == "extra_forbidden" or isinstance(last, int)):
        return [*parts, _cut(str(last))]
    return [*parts, last] if _FIELD.fullmatch(last) else parts


def _about_the_body(error: Mapping[str, Any]) -> str:
    if isinstance(error.get("input"), bytes):
        return "the body is not announced as JSON; send the header Content-Type: application/json"
    return "the body must be a JSON object with the fields that /openapi.json describes"


def _about_a_field(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind == "extra_forbidden":
        return "is not a field that this server knows; leave it out"
    if kind == "missing":
        return "is missing; give it"
    if kind == "union_tag_not_found":
        return "is missing; give it"
    if kind == "union_tag_invalid":
        shown = _cut(json.dumps(error["ctx"]["tag"]))
        return f"is {shown}; allowed: {error['ctx']['expected_tags']}"
    if kind in ("too_long", "too_short"):
        limits = error["ctx"]
        most, least = limits.get("max_length"), limits.get("min_length")
        allowed = f"at least {least}" if most is None else f"at most {most}"
        return f"has {limits['actual_length']} entries; allowed: {allowed}"
    shown = _cut(json.dumps(error.get("input"), default=str))
    said = str(error["msg"]).removeprefix("Value error, ")
    return f"is {shown}; {said[:1].lower()}{said[1:]}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


async def reply_to_http(request: Request, error: Exception) -> Response:
    """Exception handler of what routes and routing raise."""
    assert isinstance(error, HTTPException)
    return of_http(error).response()


async def reply_to_validation(request: Request, error: Exception) -> Response:
    """Exception handler of requests that do not match their schema."""
    assert isinstance(error, RequestValidationError)
    return of_validation(error).response()


async def reply_to_engine(request: Request, error: Exception) -> Response:
    """Exception handler of what the engine and the scheduler raise."""
    return api_error(error).response()
