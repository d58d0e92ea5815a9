"""Many engines behind one address, by Ray Serve: the way past one machine.

A `Replica` is one engine with its scheduler and hosts the app that `oled-moe serve` hosts; a
`Front` takes requests from Ray's HTTP proxies and passes each to one replica, answers coming back
as they are made. `build` is the application for `serve run oled_moe.ray_serve:build model=demo
replicas=2` and for Ray's config files; `run` is `oled-moe serve MODEL --ray N`.

Conversations stick to a replica, whose slots then hold the experts they use. Which conversation a
request belongs to is mostly said in its body, and Ray's proxies choose before they have read that.
So the front reads it, and names it as `session_id` to the replicas' handle, whose router is Ray's
own ConsistentHashRouter: a replica that dies takes only its own conversations along, to the next
on the ring, and one that has as many requests as it may have (`spill_after`) lets the next ones
spill to its neighbours. The handle's option is public; the router Ray calls experimental, but one
of our own would be written against more of Ray's insides, and multiplexed models, the other way to
stick, are names that a replica must load.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import oled_moe.errors
from oled_moe.cli_shared import configure_logging
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.errors import ConfigError, MissingDependencyError, OledMoeError
from oled_moe.server import DEFAULT_MAX_BODY_BYTES, ServerSettings, create_app, default_names
from oled_moe.server_backend import LoadingBackend, Runtime, check_served, start_runtime
from oled_moe.server_errors import ApiError, to_json
from oled_moe.server_metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from ray.serve import Application

logger = logging.getLogger(__name__)

APP_NAME = "oled-moe"
REPLICA_HEADER = "x-replica"
SESSION_HEADER = "x-session-id"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# What a replica needs of a request's ASGI scope, and what of it can be sent.
_SCOPE = (
    *("type", "asgi", "http_version", "scheme", "method", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)
# Asked of every replica, beside the queue: they say how the whole service is.
_METRICS = "/metrics"
_OF_ALL_REPLICAS = ("/health", "/ready", _METRICS)
_ASK_ALL_S = 5.0
# What Ray takes to end replicas that have nothing left to do.
_RAYS_OWN_S = 10.0
# Ray's smallest is 75 MiB; requests and pieces of answers are all that goes through.
_OBJECT_STORE_BYTES = 128 * 2**20


class ServeArgs(BaseModel):
    """What a deployment is built from; every field can stand in Ray's config file or command.

    The engine's fields are those of `EngineConfig`. `num_cpus` and `num_gpus` are what Ray reserves
    for each replica; `threads` is `num_cpus` where not given, `num_gpus` 1 on device cuda and else
    0. `spill_after`: requests that wait at one replica before the next ones go elsewhere, None for
    `max_num_seqs`. `fronts`: processes that receive requests and route them; two or more survive
    the loss of one. Units: drain_s in seconds.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    replicas: int = Field(default=1, ge=1)
    fronts: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=1, gt=0)
    num_gpus: float | None = Field(default=None, ge=0)

    device: str = "cpu"
    experts_per_layer: float | None = None
    expert_memory: int | str | None = None
    memory: int | str | None = None
    policy: str | None = None
    cpu_experts: bool = True
    dtype: str | None = None
    hardware: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    threads: int | None = None
    seed: int = 0
    force: bool = False
    cuda_graphs: bool = False
    lossy: str | None = None
    low_precision: str | None = None

    max_queue: int = Field(default=64, ge=0)
    spill_after: int | None = Field(default=None, ge=0)
    drain_s: float = Field(default=30, ge=0)
    log_level: str = "warning"

    served_model_names: list[str] = []
    # Sampling parameters by name, for requests that do not say.
    sampling: dict[str, Any] = {}
    api_keys: list[str] = Field(default=[], repr=False)
    cors_origins: list[str] = []
    max_body_bytes: int = Field(default=DEFAULT_MAX_BODY_BYTES, ge=1)

    def engine_config(self) -> EngineConfig:
        """Raises: ConfigError naming the field."""
        values = {name: getattr(self, name) for name in EngineConfig.__dataclass_fields__}
        values["threads"] = self.threads or max(1, int(self.num_cpus))
        return EngineConfig(**values)

    def server_settings(self) -> ServerSettings:
        """Raises: ConfigError naming the field."""
        known = SamplingParams.__dataclass_fields__
        if unknown := sorted(set(self.sampling) - set(known)):
            raise ConfigError(
                f"sampling has {', '.join(unknown)}, which nobody knows; allowed: "
                + ", ".join(name for name in known if name != "grammar")
            )
        return ServerSettings(
            served_names=tuple(self.served_model_names or default_names(self.model)),
            defaults=SamplingParams(**self.sampling),
            api_keys=tuple(self.api_keys),
            cors_origins=tuple(self.cors_origins),
            max_body_bytes=self.max_body_bytes,
            max_at_once=self.max_num_seqs + self.max_queue,
        )

    @property
    def gpus(self) -> float:
        """GPUs of one replica."""
        if self.num_gpus is not None:
            return self.num_gpus
        return 1.0 if self.device == "cuda" else 0.0

    @property
    def most_at_once(self) -> int:
        """Requests that one replica takes before its neighbours are asked."""
        waiting = self.max_num_seqs if self.spill_after is None else self.spill_after
        return self.max_num_seqs + min(waiting, self.max_queue)


def session_key(headers: Mapping[str, str], body: bytes) -> str:
    """Which conversation a request belongs to; empty where nothing says so.

    In this order: the header x-session-id, the field `user`, the messages up to the first of the
    user, which every later turn repeats. A bare prompt belongs to no conversation: few-shot prompts
    that begin alike would all crowd at one replica.
    """
    try:
        conversation = _conversation(headers, body)
        said = json.dumps(conversation, sort_keys=True)
    # What is no JSON, or too deep, is refused by the replica, whichever it is.
    except (ValueError, RecursionError):
        return ""
    # A digest, because Ray writes keys to its logs.
    return hashlib.sha256(said.encode()).hexdigest() if conversation else ""


def _conversation(headers: Mapping[str, str], body: bytes) -> list[Any]:
    """What says which conversation it is, and its kind; empty where nothing does."""
    if session := headers.get(SESSION_HEADER):
        return ["session", session]
    request = json.loads(body)
    if not isinstance(request, dict):
        return []
    if isinstance(user := request.get("user"), str) and user:
        return ["user", user]
    messages: Any = request.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") == "user":
            return ["messages", messages[: i + 1]]
    return []


_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)")


def merge_metrics(pages: Mapping[str, str]) -> str:
    """One page of metrics from those of replicas, every sample labelled with its replica."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for replica, page in sorted(pages.items()):
        family = ""
        for line in page.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head, _ = families.setdefault(family, ([], []))
                if line not in head:
                    head.append(line)
            elif found := _SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                marked = f'replica="{replica}"' + (f",{labels}" if labels else "")
                families.setdefault(family, ([], []))[1].append(f"{name}{{{marked}}} {value}")
    return "".join(f"{line}\n" for family in families.values() for part in family for line in part)


class Caller:
    """The client of one request as an ASGI server shows it: its body, and from when on it is gone.

    That it is gone is said as often as it is asked: whoever asks once may not be who has to know.
    """

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._is_gone = asyncio.Event()

    def leave(self) -> None:
        self._is_gone.set()

    async def receive(self) -> dict[str, Any]:
        """The body, then, once the client has left, that it has."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}


class Replica:
    """One engine, and the HTTP app over it, in a process of Ray's. Raises: what loading raises."""

    def __init__(self, args: ServeArgs) -> None:
        from ray import serve

        configure_logging(args.log_level, "text")
        self.name = serve.get_replica_context().replica_id.unique_id

        def load() -> Runtime:
            from oled_moe.engine import Engine

            config = args.engine_config()
            return start_runtime(
                lambda: Engine(args.model, config),
                max_waiting=args.max_queue,
                defaults=SamplingParams(**args.sampling),
            )

        is_over = threading.Event()
        self._backend = LoadingBackend(load, is_over.set)
        self._backend.start()
        is_over.wait()
        if self._backend.error is not None:
            raise self._backend.error
        self._app: Any = create_app(self._backend, args.server_settings())
        logger.info("replica %s, process %d: %s is loaded", self.name, os.getpid(), args.model)

    def __del__(self) -> None:
        # Called by Ray too, once running requests are done or their time is over.
        if hasattr(self, "_app"):
            self._backend.drain(0.0)

    def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises."""
        if self._backend.error is not None:
            raise self._backend.error

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """The ASGI messages with which the app answers a request, as they come."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        caller = Caller(body)
        task = asyncio.ensure_future(self._app(scope, caller.receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    mark = (REPLICA_HEADER.encode(), self.name.encode())
                    message = {**message, "headers": [*message["headers"], mark]}
                yield message
            await task
        finally:
            # Ray cancels this when the client has gone: the app hears of it as from any server.
            caller.leave()
            await asyncio.wait([task])

    async def answer_whole(self, scope: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        """The replica's name, and all messages of its answer to a request without a body."""
        return self.name, [message async for message in self.answer(scope, b"")]


class Front:
    """Receives HTTP requests and passes each to the replica of its conversation."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas = replicas
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        # As the app has it: a slash at the end is nothing.
        scope["path"] = scope["path"].rstrip("/") or "/"
        try:
            if scope["path"] in _OF_ALL_REPLICAS:
                return await self._ask_all(scope)
            return await self._ask_one(scope, request.headers, await self._body(request))
        except ApiError as error:
            return error.response()
        except ClientDisconnect:
            # Nobody is left to read this; it is for the log.
            return Response(status_code=499)

    async def _body(self, request: Request) -> bytes:
        """The body, or of one that is too long just enough for the app to refuse it."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                break
        return bytes(body)

    async def _ask_one(
        self, scope: dict[str, Any], headers: Mapping[str, str], body: bytes
    ) -> Response:
        """The answer of one replica, begun again if that dies before it says anything."""
        from ray.exceptions import RayActorError

        handle = self._replicas.options(stream=True, session_id=session_key(headers, body))
        try:
            answer, start = await self._begin(handle, scope, body)
        except RayActorError:
            logger.warning("a replica died with a request; another one is asked")
            try:
                answer, start = await self._begin(handle, scope, body)
            except RayActorError:
                raise _replica_died() from None
        return _Relayed(answer, start)

    async def _begin(
        self, handle: Any, scope: dict[str, Any], body: bytes
    ) -> tuple[Any, dict[str, Any]]:
        """A replica's answer and the first of its messages. Raises: ApiError, RayActorError."""
        from ray.serve.exceptions import BackPressureError

        answer = handle.answer.remote(scope, body)
        try:
            with _unavailable_is_503():
                return answer, await anext(answer)
        except BackPressureError:
            raise ApiError(
                429,
                "every replica is busy and the queue is full; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            ) from None
        except asyncio.CancelledError:
            answer.cancel()
            raise

    async def _ask_all(self, scope: dict[str, Any]) -> Response:
        """Metrics of all replicas, or of the rest what the best of them says."""
        # The metrics must come in the one form that is merged.
        kept = [pair for pair in scope["headers"] if pair[0].lower() != b"accept"]
        asked = self._replicas.broadcast("answer_whole", {**scope, "headers": kept})
        with _unavailable_is_503():
            answers = await asked.results_async(timeout_s=_ASK_ALL_S, return_exceptions=True)
        said = {each[0]: each[1] for each in answers if isinstance(each, tuple)}
        if not said:
            raise ApiError(503, "no replica is there; try again soon", code="loading")
        best = min(said.values(), key=lambda messages: messages[0]["status"])
        if scope["path"] != _METRICS or best[0]["status"] != 200:
            response = Response(_body_of(best), best[0]["status"])
            response.raw_headers = _kept_headers(best[0])
            return response
        pages = {
            name: _body_of(messages).decode()
            for name, messages in said.items()
            if messages[0]["status"] == 200
        }
        return Response(merge_metrics(pages), media_type=CONTENT_TYPE)


def _body_of(messages: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def _kept_headers(start: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """Those of an answer but for the request's id, which Ray's proxy adds itself."""
    return [(name, value) for name, value in start["headers"] if name.lower() != b"x-request-id"]


@contextmanager
def _unavailable_is_503() -> Iterator[None]:
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        yield
    except (DeploymentUnavailableError, TimeoutError):
        raise ApiError(503, "no replica answers; try again soon", code="loading") from None


def _replica_died() -> ApiError:
    return ApiError(
        500, "the replica that answered has died; send the request again", code="replica_died"
    )


class _Relayed(Response):
    """An answer that passes through, message by message.

    It does not look whether the client is there: Ray's proxy does, and cancels.
    """

    def __init__(self, answer: Any, start: dict[str, Any]) -> None:
        super().__init__(status_code=start["status"])
        self.raw_headers = _kept_headers(start)
        self._answer = answer
        self._start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from ray.exceptions import RayActorError

        try:
            await send({**self._start, "headers": self.raw_headers})
            async for message in self._answer:
                await send(message)
        except RayActorError:
            logger.warning("a replica died while it answered")
            # What else has begun can only be cut off.
            if not self.headers.get("content-type", "").startswith("text/event-stream"):
                raise
            error = b"data: " + to_json(_replica_died().envelope()) + b"\n\n"
            await send({"type": "http.response.body", "body": error})
        finally:
            self._answer.cancel()


def build(args: ServeArgs) -> "Application":
    """The application. Raises: ConfigError, MissingDependencyError."""
    _need_ray()
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    args.engine_config()
    args.server_settings()
    if args.device == "cuda" and args.gpus == 0:
        raise ConfigError("num_gpus is 0 and device is 'cuda'; give each replica a GPU, or a share")
    # Ray's own lines on every request are for those who ask for them.
    logs = {
        "log_level": args.log_level.upper(),
        "enable_access_log": args.log_level in ("info", "debug"),
    }
    replicas = serve.deployment(
        Replica,
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": args.num_cpus, "num_gpus": args.gpus},
        max_ongoing_requests=args.most_at_once,
        # Ray's own smallest: it passes through here even if nothing waits.
        max_queued_requests=max(1, args.max_queue),
        graceful_shutdown_timeout_s=args.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=1,
        logging_config=logs,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER,
            request_router_kwargs={"num_fallback_replicas": args.replicas - 1},
        ),
    )
    front = serve.deployment(
        Front,
        num_replicas=args.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=args.replicas * args.most_at_once + 2 * args.max_queue,
        graceful_shutdown_timeout_s=args.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=logs,
    )
    return front.bind(replicas.bind(args), args.max_body_bytes)


def _need_ray() -> None:
    try:
        import ray.serve  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            "Ray Serve is not installed, and several replicas need it; "
            "install it with: pip install 'oled-moe[ray]'"
        ) from None


def run(
    args: ServeArgs,
    *,
    host: str,
    port: int,
    on_ready: Callable[[], None],
    on_drain: Callable[[], None],
) -> None:
    """Serve from replicas on this machine until SIGTERM or Ctrl-C, then drain and end all.

    A second signal ends at once. `on_ready` is called when requests are answered, `on_drain` when a
    signal has ended that. Cores and memory that `args` do not speak of are divided evenly.
    Raises: ConfigError, MissingDependencyError, whatever loading the model raises, and
    KeyboardInterrupt for a signal before all replicas are loaded.
    """
    _need_ray()
    from ray import serve

    from oled_moe.engine import plan_engine
    from oled_moe.machine import usable_cores
    from oled_moe.server_host import open_socket

    if port == 0:
        raise ConfigError("port is 0; with several replicas give the port to listen on")
    num_cores = usable_cores()
    args = _divided(args, num_cores)
    app = build(args)
    # Ray wraps what fails in pages of its own, after half a minute; better to know before.
    check_served(plan_engine(args.model, args.engine_config()), SamplingParams(**args.sampling))
    open_socket(host, port).close()
    # Ray only counts; nothing may wait for a core that this machine does not have.
    most_cores = max(num_cores, math.ceil(args.replicas * args.num_cpus))
    with _local_cluster(most_cores, host, port):
        _deploy(app)
        try:
            on_ready()
            _wait_for_a_signal()
            on_drain()
        finally:
            with _leaving_after(args.drain_s + _RAYS_OWN_S):
                serve.delete(APP_NAME)


def _divided(args: ServeArgs, num_cores: int) -> ServeArgs:
    """The arguments for replicas that have one machine together: an engine alone takes it all."""
    from oled_moe.machine import usable_memory_bytes
    from oled_moe.memory import SHARE_OF_FREE

    shares: dict[str, int] = {}
    if "num_cpus" not in args.model_fields_set:
        shares["num_cpus"] = max(1, num_cores // args.replicas)
    budgets = (args.experts_per_layer, args.expert_memory, args.memory)
    if args.device == "cpu" and budgets == (None, None, None) and args.replicas > 1:
        shares["memory"] = int(usable_memory_bytes() * SHARE_OF_FREE) // args.replicas
    return args.model_copy(update=shares)


@contextmanager
def _local_cluster(num_cores: int, host: str, port: int) -> Iterator[None]:
    """Ray and its HTTP proxy on this machine, for as long as the context lasts."""
    import ray
    from ray import serve

    # People who start a local server have not been asked by Ray whether it may report that.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    level = logging.getLogger().getEffectiveLevel()
    ray.init(
        address="local",
        num_cpus=num_cores,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        logging_level=level,
    )
    # Ray has set its own handlers, which end the process without draining.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port},
            logging_config={"log_level": logging.getLevelName(level)},
        )
        yield
    finally:
        ray.shutdown()


def _wait_for_a_signal() -> None:
    """Return on SIGTERM or Ctrl-C."""
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


@contextmanager
def _leaving_after(most_s: float) -> Iterator[None]:
    """End the program if what is done here takes longer.

    A supervisor may signal Ray's own processes too; whoever then asks Ray waits a minute for them.
    """

    def leave() -> None:
        logger.error(
            "Ray did not end the replicas within %g s; signal this process alone, not Ray's "
            "processes with it, to let answers finish",
            most_s,
        )
        logging.shutdown()
        os._exit(1)

    timer = threading.Timer(most_s, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _interrupt(number: int, frame: object) -> None:
    """Wherever the program is, it ends; the next signal finds the system's own handlers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _deploy(app: "Application") -> None:
    """Start the application. Raises: the error for which a replica could not start."""
    from ray import serve

    try:
        serve.run(app, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        # Ray keeps the traceback of a replica that could not start, as text.
        deployments = serve.status().applications[APP_NAME].deployments.values()
        traces = "".join(each.message for each in deployments)
        found = re.findall(r"^oled_moe\.errors\.(\w+): (.+)$", traces, re.MULTILINE)
        if not found:
            reason = (traces.strip() or str(error)).splitlines()[-1]
            raise OledMoeError(f"the replicas could not start: {reason}; see Ray's log") from error
        name, message = found[-1]
        raise getattr(oled_moe.errors, name)(message) from None
