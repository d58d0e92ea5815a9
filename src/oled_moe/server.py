"""create_app: the HTTP API of OpenAI, vLLM's probes and metrics, and the page, as one ASGI app.

The app is given a `Backend` and knows neither how a model is loaded nor which server hosts the
app: `oled-moe serve` hosts it with uvicorn, a Ray replica by itself, tests in their own process.
It needs of the backend only `runtime()`: an engine (for its tokenizer, its limits and defaults), a
scheduler and perhaps a monitor, or NotServingError. What must be set is in `ServerSettings`.
"""

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import oled_moe
from oled_moe.config import SamplingParams
from oled_moe.errors import OledMoeError
from oled_moe.server_answers import Answers, Question
from oled_moe.server_backend import Backend, NotServingError, Runtime
from oled_moe.server_errors import (
    ApiError,
    bad_request,
    reply_to_engine,
    reply_to_http,
    reply_to_validation,
)
from oled_moe.server_metrics import CONTENT_TYPE, ServerMetrics
from oled_moe.server_middleware import ApiKeys, BodyLimit, RequestLog, SameThing, StrictRoute
from oled_moe.server_openapi import DescribedApp, errors
from oled_moe.server_prompts import (
    MAX_LENGTHS_TOKENIZED,
    chat_prompt,
    chat_questions,
    completion_questions,
    encode,
    template_variables,
    tokenizer_of,
    tool_dicts,
)
from oled_moe.server_replies import ChatForm, CompletionForm, Form
from oled_moe.server_schema import (
    ChatReply,
    ChatRequest,
    CompletionReply,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    SamplingRequest,
    StatusReply,
    TokenizeReply,
    TokenizeRequest,
    TokenizerReply,
    VersionReply,
)
from oled_moe.server_streams import EventStream, StreamTiming, stream_events, unless_gone

if TYPE_CHECKING:
    from oled_moe.tool_calls import ToolCallParser

DEFAULT_MAX_BODY_BYTES = 8 * 2**20
# What the page may do: run and fetch what comes from here, and nothing else.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How an app behaves whatever the model is.

    `served_names`: names that requests may ask for; the first is the one that replies bear.
    `defaults`: sampling parameters of requests that do not say. `max_at_once`: most answers that
    one request may ask for. Without `api_keys` everybody is let in.
    """

    served_names: tuple[str, ...]
    defaults: SamplingParams = SamplingParams()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_at_once: int = 64
    timing: StreamTiming = StreamTiming()


def default_names(model: str) -> tuple[str, ...]:
    """What requests may call a model that was given as `demo`, a directory or a hub id.

    The first does not say where on this machine a directory is.
    """
    path = Path(model)
    names = (path.resolve().name, model) if path.exists() else (model, path.name)
    return tuple(dict.fromkeys(name for name in names if name))


@dataclass(frozen=True, slots=True)
class Serving:
    """What routes share."""

    backend: Backend
    settings: ServerSettings
    metrics: ServerMetrics
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.settings.served_names[0]

    def runtime(self, model: str | None = None) -> Runtime:
        """What answers requests for a model. Raises: NotServingError, ApiError 404."""
        runtime = self.backend.runtime()
        self.metrics.attach(runtime)
        if model and model not in self.settings.served_names:
            names = ", ".join(self.settings.served_names)
            raise ApiError(
                404,
                f"model {model!r} is not served here; allowed: {names}, or an empty name",
                param="model",
                code="model_not_found",
            )
        return runtime


def create_app(backend: Backend, settings: ServerSettings) -> FastAPI:
    """The app that serves one model. Nothing is started, and nothing global is touched."""
    app = DescribedApp(has_keys=bool(settings.api_keys))
    app.router.route_class = StrictRoute
    serving = Serving(backend, settings, ServerMetrics(settings.served_names[0]))
    _add_answers(app, serving)
    _add_models(app, serving)
    _add_tokens(app, serving)
    _add_probes(app, serving)
    _add_page(app)
    app.add_exception_handler(HTTPException, reply_to_http)
    app.add_exception_handler(RequestValidationError, reply_to_validation)
    app.add_exception_handler(OledMoeError, reply_to_engine)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            # Clients add some of their own, and nothing here trusts one.
            allow_headers=("*",),
            expose_headers=("X-Request-ID", "X-Replica", "Retry-After"),
        )
    app.add_middleware(SameThing)
    app.add_middleware(RequestLog)
    return app


# Answers


def _add_answers(app: FastAPI, serving: Serving) -> None:
    stream = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}

    @app.post(
        "/v1/chat/completions",
        response_model=ChatReply,
        responses={**errors(400, 404, 413, 429, 500, 503), 200: stream},
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        runtime = serving.runtime(body.model)
        form = ChatForm(
            reply_id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=body.model or serving.name,
            tokenizer=tokenizer_of(runtime.engine),
            shows_logprobs=bool(body.logprobs),
            stream_options=body.stream_options,
            make_parser=_parser_of(body),
        )

        def ask() -> list[Question]:
            return chat_questions(runtime.engine, body, serving.settings.defaults)

        return await _answer(serving, runtime, request, body, form, ask)

    @app.post(
        "/v1/completions",
        response_model=CompletionReply,
        responses={**errors(400, 404, 413, 429, 500, 503), 200: stream},
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on from prompts, which are taken as they are."""
        runtime = serving.runtime(body.model)
        form = CompletionForm(
            reply_id=f"cmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=body.model or serving.name,
            tokenizer=tokenizer_of(runtime.engine),
            shows_logprobs=body.logprobs is not None,
            stream_options=body.stream_options,
            echoes=bool(body.echo),
        )

        def ask() -> list[Question]:
            return completion_questions(runtime.engine, body, serving.settings.defaults)

        return await _answer(serving, runtime, request, body, form, ask)


async def _answer(
    serving: Serving,
    runtime: Runtime,
    request: Request,
    body: SamplingRequest,
    form: Form,
    ask: Callable[[], list[Question]],
) -> Response:
    """Ask, wait and reply, as long as the client is there."""
    questions = await unless_gone(request.receive, run_in_threadpool(ask))
    most = serving.settings.max_at_once
    if len(questions) > most:
        raise bad_request(f"the request asks for {len(questions)} answers; allowed: {most}", "n")
    answers = Answers(runtime, questions, serving.metrics, keeps_frames=bool(body.diffusing))
    try:
        await unless_gone(request.receive, run_in_threadpool(answers.submit))
        if body.stream:
            events = stream_events(answers, form, serving.settings.timing)
            return EventStream(events, answers)
        await unless_gone(request.receive, answers.finished())
        return Response(form.whole(answers).model_dump_json(), media_type="application/json")
    except BaseException:
        answers.cancel()
        raise


def _parser_of(body: ChatRequest) -> "Callable[[], ToolCallParser] | None":
    """What looks for tool calls in an answer that may hold some."""
    if not body.tools or body.tool_choice == "none":
        return None
    from oled_moe.tool_calls import ToolCallParser

    return ToolCallParser


# Models and tokens


def _add_models(app: FastAPI, serving: Serving) -> None:
    def card() -> ModelCard:
        runtime = serving.runtime()
        return ModelCard(
            id=serving.name,
            created=serving.created,
            root=serving.name,
            max_model_len=runtime.engine.max_model_len,
            lossy=runtime.engine.config.lossy,
            low_precision=runtime.engine.low_form,
        )

    @app.get("/v1/models", response_model=ModelList, responses=errors(400, 500, 503))
    def models() -> ModelList:
        """The model that is served here."""
        return ModelList(data=[card()])

    # A name may hold a slash, as those of hubs do.
    @app.get(
        "/v1/models/{model:path}", response_model=ModelCard, responses=errors(400, 404, 500, 503)
    )
    def model(model: str) -> ModelCard:
        """The model by one of its names."""
        serving.runtime(model)
        return card()


def _add_tokens(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize", response_model=TokenizeReply, responses=errors(400, 404, 413, 500, 503))
    def tokenize(body: TokenizeRequest) -> TokenizeReply:
        """The tokens of a text, or of a conversation as the chat template writes it."""
        engine = serving.runtime(body.model).engine
        tokenizer, param = tokenizer_of(engine), "prompt"
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt and messages: give one of them", "prompt")
        text = body.prompt
        if body.messages is not None:
            variables = template_variables(body.chat_template_kwargs)
            variables["add_generation_prompt"] = body.add_generation_prompt
            tools = tool_dicts(body.tools) if body.tools else ()
            text, _ = chat_prompt(engine, body.messages, SamplingParams(), variables, tools)
            param = "messages"
        tokens = encode(engine, text or "", param, num_lengths=MAX_LENGTHS_TOKENIZED)
        return TokenizeReply(
            count=len(tokens),
            max_model_len=engine.max_model_len,
            tokens=tokens,
            token_strs=[tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
            if body.return_token_strs
            else None,
        )

    @app.post(
        "/detokenize", response_model=DetokenizeReply, responses=errors(400, 404, 413, 500, 503)
    )
    def detokenize(body: DetokenizeRequest) -> DetokenizeReply:
        """The text of tokens, special ones included."""
        engine = serving.runtime(body.model).engine
        vocab_size = engine.model_config.vocab_size
        most = MAX_LENGTHS_TOKENIZED * engine.max_model_len
        if len(body.tokens) > most:
            raise bad_request(f"tokens has {len(body.tokens)} entries; allowed: {most}", "tokens")
        for token in body.tokens:
            if token >= vocab_size:
                raise bad_request(f"tokens holds {token}; allowed: 0 to {vocab_size - 1}", "tokens")
        text = tokenizer_of(engine).decode(body.tokens, skip_special_tokens=False)
        return DetokenizeReply(prompt=text)

    @app.get("/tokenizer_info", response_model=TokenizerReply, responses=errors(400, 500, 503))
    def tokenizer_info() -> TokenizerReply:
        """What evaluation harnesses ask before they tokenize here."""
        engine = serving.runtime().engine
        tokenizer, defaults = tokenizer_of(engine), engine.sampling_defaults

        def token(token_id: int | None) -> str | None:
            if token_id is None:
                return None
            return tokenizer.decode([token_id], skip_special_tokens=False)

        return TokenizerReply(
            tokenizer_class="PreTrainedTokenizerFast",
            eos_token=token(defaults.eos_token_id),
            pad_token=token(defaults.pad_token_id),
            mask_token=token(defaults.mask_token_id),
            chat_template=tokenizer.chat_template,
            model_max_length=engine.max_model_len,
            vocab_size=engine.model_config.vocab_size,
        )


# Probes and the page


def _add_probes(app: FastAPI, serving: Serving) -> None:
    @app.get("/health", response_model=StatusReply, responses=errors(400, 500))
    async def health() -> StatusReply:
        """Whether the server is there at all."""
        return StatusReply(status="ok")

    @app.get("/ready", response_model=StatusReply, responses=errors(400, 500, 503))
    async def ready() -> StatusReply:
        """Whether requests are answered: not while the model is loading, or the server ending."""
        serving.runtime()
        return StatusReply(status="ready")

    @app.get("/version", response_model=VersionReply, responses=errors(400, 500))
    async def version() -> VersionReply:
        return VersionReply(version=oled_moe.__version__)

    @app.get(
        "/metrics",
        response_class=Response,
        responses={
            **errors(400, 500),
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        },
    )
    def metrics() -> Response:
        """Numbers for Prometheus, in its text form."""
        # Without a model there are fewer of them.
        with suppress(NotServingError):
            serving.runtime()
        return Response(serving.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/experts", responses=errors(400, 404, 500, 503))
    def experts() -> JSONResponse:
        """What the experts did in the latest forwards, for the page."""
        monitor = serving.runtime().monitor
        if monitor is None:
            raise ApiError(404, "experts are not watched here", code="not_found")
        return JSONResponse(monitor.snapshot())


def _add_page(app: FastAPI) -> None:
    """The page's files by name: a path that comes from a client is never looked up on disk."""
    files = {file.name: file for file in _PAGE.iterdir()} if _PAGE.is_dir() else {}

    def reply(name: str) -> Response:
        file = files.get(name)
        if file is None or file.suffix not in _MEDIA_TYPES:
            raise HTTPException(404)
        return Response(
            file.read_bytes(),
            media_type=_MEDIA_TYPES[file.suffix],
            headers={
                "Content-Security-Policy": PAGE_POLICY,
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-cache",
            },
        )

    # Load balancers and `curl -I` ask for the head alone.
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def page() -> Response:
        return reply("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    def page_file(name: str) -> Response:
        return reply(name)
