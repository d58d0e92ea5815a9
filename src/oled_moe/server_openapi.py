"""The OpenAPI document: what routes say of themselves, and what is true of all of them."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

import oled_moe
from oled_moe.server_middleware import OPEN_PATHS
from oled_moe.server_schema import ErrorReply

_WHEN = {
    400: "The request is not as it must be.",
    401: "An API key is wanted.",
    404: "No such model here.",
    413: "The body is too large.",
    429: "As many requests wait as may.",
    500: "The server failed.",
    503: "The model is being loaded, or the server is about to end.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route may reply beside success, for its declaration."""
    found: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorReply, "description": _WHEN[status]} for status in statuses
    }
    if 429 in found:
        retry = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        found[429]["headers"] = {"Retry-After": retry}
    return found


class DescribedApp(FastAPI):
    """An app whose OpenAPI document is made when it is first asked for."""

    def __init__(self, *, has_keys: bool) -> None:
        # Interactive documentation would fetch its scripts from elsewhere.
        super().__init__(
            title="OLED-MoE",
            version=oled_moe.__version__,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )
        self._has_keys = has_keys

    def openapi(self) -> dict[str, Any]:
        """The document of the routes there are."""
        if self.openapi_schema is None:
            self.openapi_schema = self._describe()
        return self.openapi_schema

    def _describe(self) -> dict[str, Any]:
        document = get_openapi(
            title=self.title,
            version=self.version,
            description="OpenAI's API for mixture-of-experts diffusion language models. Errors "
            "have one shape. Fields that are not known are refused.",
            routes=self.routes,
        )
        for path, operations in document["paths"].items():
            for operation in operations.values():
                # What FastAPI says of its own way to refuse, which is not used here.
                operation["responses"].pop("422", None)
                if self._has_keys and path not in OPEN_PATHS:
                    _ask_for_key(operation)
        components = document["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            components["schemas"].pop(name, None)
        if self._has_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        return document


def _ask_for_key(operation: dict[str, Any]) -> None:
    """Say that an operation wants a key. Mutates: the operation."""
    body = {"schema": {"$ref": "#/components/schemas/ErrorReply"}}
    operation["security"] = [{"key": []}]
    operation["responses"]["401"] = {
        "description": _WHEN[401],
        "content": {"application/json": body},
    }
