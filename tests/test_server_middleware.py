"""What requests pass through before any route: ids, keys, sizes, strict JSON."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from served import SETTINGS, Exchange, ReadyBackend, fake_runtime
from starlette.testclient import TestClient

from oled_moe.server import ServerSettings, create_app
from oled_moe.server_errors import ApiError
from oled_moe.server_middleware import MAX_DEPTH, parse_json
from oled_moe.server_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

JSON = {"Content-Type": "application/json"}


def client(**settings: Any) -> TestClient:
    app = create_app(ReadyBackend(fake_runtime()), ServerSettings(("demo",), **settings))
    return TestClient(app, raise_server_exceptions=False)


def error_of(response: Any) -> dict[str, Any]:
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    error: dict[str, Any] = body["error"]
    return error


# Request ids


def test_a_request_id_is_echoed_or_made() -> None:
    with client() as http:
        assert (
            http.get("/health", headers={"X-Request-ID": "a:b-1"}).headers["x-request-id"]
            == "a:b-1"
        )
        made = http.get("/health").headers["x-request-id"]
        assert len(made) == 32 and made != http.get("/health").headers["x-request-id"]


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "é".encode().decode("latin-1")])
def test_a_request_id_that_would_spoil_logs_is_refused(given: str) -> None:
    with client() as http:
        response = http.get("/health", headers={"X-Request-ID": given.encode("latin-1")})
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Request-ID"
    assert response.headers["x-request-id"] != given


# Keys


def test_each_key_opens_and_nothing_else_does() -> None:
    with client(api_keys=("one", "two")) as http:
        for key, status in (
            ("Bearer one", 200),
            ("bearer two", 200),
            ("Bearer  two ", 200),
            ("Bearer three", 401),
            ("Bearer on", 401),
            ("Bearer", 401),
            ("Basic one", 401),
            ("one", 401),
        ):
            response = http.get("/v1/models", headers={"Authorization": key})
            assert response.status_code == status, key
        response = http.get("/v1/models")
    assert response.status_code == 401
    error = error_of(response)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


def test_what_is_open_and_what_is_not() -> None:
    opened = ("/health", "/ready", "/version", "/metrics", "/", "/openapi.json")
    closed = ("/v1/models", "/tokenizer_info", "/experts", "/v1/nothing", "/pages")
    with client(api_keys=("one",)) as http:
        assert all(http.get(path).status_code != 401 for path in opened)
        assert all(http.get(path).status_code == 401 for path in closed)
        # The key is asked for before the body is looked at.
        assert http.post("/v1/completions", content=b"{").status_code == 401


# Sizes


def test_a_body_that_announces_too_much_is_refused_unread() -> None:
    with client(max_body_bytes=100) as http:
        response = http.post("/v1/completions", content=b"x" * 101, headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("announced", [{}, {"content-length": "5"}])
def test_a_body_is_counted_whatever_it_announces(announced: dict[str, str]) -> None:
    async def play() -> None:
        settings = ServerSettings(("demo",), max_body_bytes=100)
        app = create_app(ReadyBackend(fake_runtime()), settings)
        exchange = Exchange(app, "/v1/completions", "x" * 101, **announced)
        assert await exchange.start() == 413
        await exchange.task

    asyncio.run(play())


def test_a_body_of_just_the_limit_is_taken() -> None:
    body = b'{"prompt": [75, 76], "max_tokens": 0}'
    with client(max_body_bytes=len(body)) as http:
        response = http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] == "max_tokens"


# JSON


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "object"),
        (b"{", "is not JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": "\xff"}', "UTF-8 from byte 7"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested deeper"),
        (b'{"a": 1} x', "is not JSON"),
    ],
)
def test_what_is_no_plain_json_is_refused_in_words(body: bytes, said: str) -> None:
    with client() as http:
        response = http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert said in error_of(response)["message"]


def test_json_is_read_as_it_is() -> None:
    text = '{"a": [1, 2.5, -3, true, null, "\\u00e9\\ud83d\\ude00é"], "b": {}}'
    assert parse_json(text.encode()) == {"a": [1, 2.5, -3, True, None, "é😀é"], "b": {}}
    assert parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    with pytest.raises(ApiError):
        parse_json(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))


def test_a_body_that_is_not_announced_as_json_is_refused() -> None:
    with client() as http:
        for kind in ({}, {"Content-Type": "text/plain"}):
            response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers=kind)
            assert response.status_code == 400
            assert "Content-Type: application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"stop": ["a"] * 5}, "stop has 5 entries; allowed: at most 4", "stop"),
        ({"prompt": []}, "prompt has 0 entries; allowed: at least 1", "prompt"),
        ({"prompt": [[]]}, "prompt.0 has 0 entries; allowed: at least 1", "prompt.0"),
        ({"prompt": [1, "a"]}, 'prompt.1 is "a"; input should be a valid integer', "prompt.1"),
        (
            {"x" * 5000: 1},
            "x" * 80 + "... is not a field that this server knows; leave it out",
            "x" * 80 + "...",
        ),
        ({"stop": "y" * 5000}, f'stop is "{"y" * 79}...; ', "stop"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema is missing",
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema is not a field",
            "response_format.schema",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type is \"xml\"; allowed: 'text', 'json_object', 'json_schema'",
            "response_format.type",
        ),
        ({"response_format": {}}, "response_format.type is missing", "response_format.type"),
        ({"response_format": "json"}, 'response_format is "json"; ', "response_format"),
        ({"echo": True, "logprobs": 1}, "logprobs is 1; not supported here (a", "logprobs"),
    ],
)
def test_fields_are_refused_in_few_words(fields: dict[str, Any], message: str, param: str) -> None:
    with client() as http:
        response = http.post("/v1/completions", json={"prompt": "a", **fields})
    assert response.status_code == 400
    error = error_of(response)
    assert error["message"].startswith(message) and error["param"] == param
    assert len(response.content) < 500


_USER = {"role": "user"}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (ChatRequest, {f"k{i}": 0 for i in range(5000)}),
        (ChatRequest, {"messages": [{}] * 4000}),
        (ChatRequest, {"messages": [{f"k{i}": 0 for i in range(5000)}]}),
        (ChatRequest, {"messages": [{**_USER, "content": [{"type": "x"}] * 4000}]}),
        (ChatRequest, {"messages": [{**_USER, "content": [{"type": "text"}] * 5000}]}),
        (ChatRequest, {"messages": [{**_USER, "tool_calls": [{}] * 100}]}),
        (ChatRequest, {"messages": [_USER], "tools": [{"a": 1, "b": 2}] * 100}),
        (CompletionRequest, {"prompt": [-1] * 5000}),
        (CompletionRequest, {"prompt": ["a", 1] * 5000}),
        (CompletionRequest, {"prompt": [[-1] * 5000] * 60}),
        (TokenizeRequest, {"messages": [{}] * 4000}),
        (DetokenizeRequest, {"tokens": ["a"] * 5000}),
    ],
)
def test_what_is_wrong_many_times_is_not_told_many_times(
    model: type[BaseModel], fields: dict[str, Any]
) -> None:
    # Each error takes its time, and the loop that checks a body serves everybody.
    with pytest.raises(ValidationError) as caught:
        model.model_validate(fields)
    assert caught.value.error_count() < 20


# CORS and routing


def test_other_origins_are_let_in_only_where_asked() -> None:
    asked = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        # OpenAI's client for browsers says of itself what it is.
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    with client() as http:
        assert (
            "access-control-allow-origin" not in http.options("/v1/models", headers=asked).headers
        )
    with client(cors_origins=("https://a.example",), api_keys=("one",)) as http:
        # A browser asks without the key.
        response = http.options("/v1/chat/completions", headers=asked)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        other = http.options("/v1/models", headers={**asked, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_routing_errors_have_the_same_shape() -> None:
    with client() as http:
        missing, wrong = http.get("/nothing"), http.delete("/v1/models")
    assert missing.status_code == 404 and error_of(missing)["code"] == "not_found"
    assert wrong.status_code == 405 and wrong.headers["allow"] == "GET, HEAD"
    assert error_of(wrong)["code"] == "method"


def test_head_and_a_slash_at_the_end_are_what_they_look_like() -> None:
    with client(api_keys=("one",)) as http:
        for path in ("/health", "/ready", "/version", "/"):
            head, whole = http.head(path), http.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(whole.content))
        # No redirect, by which a key or a body may be lost, and none to learn without a key.
        assert http.get("/health/", follow_redirects=False).status_code == 200
        assert http.get("/v1/models/", follow_redirects=False).status_code == 401
        http.headers["Authorization"] = "Bearer one"
        assert http.get("/v1/models/").json()["object"] == "list"
        assert http.get("/v1/models/demo/").json()["id"] == "demo"
        bad = http.post("/v1/chat/completions/", json={}, follow_redirects=False)
        assert error_of(bad)["param"] == "messages"
        post_only = http.head("/v1/chat/completions")
        assert post_only.status_code == 405 and post_only.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(),
        RuntimeError("unable to perform operation on <TCPTransport closed=True>; closed"),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/nothing"])
def test_a_reply_to_nobody_is_499(
    error: Exception, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        raise error

    asyncio.run(create_app(ReadyBackend(fake_runtime()), SETTINGS)(scope, receive, send))
    assert f"GET {path} 499" in caplog.text and "Traceback" not in caplog.text


def test_an_unexpected_error_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    runtime = fake_runtime()
    runtime.monitor = object()
    app = create_app(ReadyBackend(runtime), SETTINGS)
    with TestClient(app, raise_server_exceptions=False) as http:
        response = http.get("/experts", headers={"X-Request-ID": "find-me"})
    assert response.status_code == 500
    assert error_of(response)["type"] == "server_error"
    assert "snapshot" not in response.text
    assert "find-me" in caplog.text and "snapshot" in caplog.text
