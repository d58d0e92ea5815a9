"""`oled-moe serve`: the OpenAI-compatible server. FastAPI and torch are imported inside."""

import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from oled_moe.cli_flags import EngineFlags, SamplingFlags, flag, takes_flags
from oled_moe.cli_shared import LogFlags, Model, note, open_engine, status_line, use_log_flags
from oled_moe.cli_text import plan_rows
from oled_moe.config import (
    DecodingParams,
    EngineConfig,
    SamplingParams,
    check_int,
    check_real,
    parse_size,
)
from oled_moe.errors import ConfigError, DoesNotFitError, InputError
from oled_moe.model_paths import find_model

if TYPE_CHECKING:
    import socket

    from oled_moe.server import ServerSettings
    from oled_moe.server_backend import Runtime

logger = logging.getLogger(__name__)

# What the field `model` of a request may hold.
_MAX_NAME_LETTERS = 1024
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


def _server(*names: str, help: str, **options: Any) -> Any:
    return flag(*names, help=help, panel="Server", **options)


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """How a model is served."""

    host: Annotated[str, _server("--host", help="Address to listen on; 0.0.0.0: all.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _server("--port", help="0: any that is free.")] = 8000
    api_key: Annotated[
        list[str] | None,
        _server("--api-key", metavar="KEY", help="Let in only who sends it; may be repeated."),
    ] = None
    api_key_file: Annotated[
        Path | None, _server("--api-key-file", metavar="PATH", help="Such keys, one a line.")
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _server(
            "--served-model-name",
            metavar="NAME",
            help="What requests call the model; may be repeated. Default: its last name.",
        ),
    ] = None
    max_num_seqs: Annotated[
        int,
        _server(
            "--max-num-seqs",
            "--max-running-requests",
            help="Most answers at work at once.",
        ),
    ] = 8
    max_queue: Annotated[
        int, _server("--max-queue", help="Most that wait, before others get 429.")
    ] = 64
    cors_origin: Annotated[
        list[str] | None,
        _server(
            "--cors-origin",
            metavar="URL",
            help="Web pages of which other origin may ask; may be repeated. Default: none.",
        ),
    ] = None
    max_body: Annotated[str, _server("--max-body", metavar="SIZE", help="Largest request.")] = (
        "8MiB"
    )
    drain_timeout: Annotated[
        float,
        _server(
            "--drain-timeout",
            metavar="SECONDS",
            help="How long running answers may go on after SIGTERM.",
        ),
    ] = 30.0
    ray: Annotated[
        int | None,
        _server("--ray", metavar="N", help="Serve from N replicas by Ray Serve (extra `ray`)."),
    ] = None

    def check(self) -> None:
        """Raise ConfigError for a value that is not allowed, naming the flag."""
        check_int("max-num-seqs", self.max_num_seqs, minimum=1)
        check_int("max-queue", self.max_queue, minimum=0)
        check_int("port", self.port, minimum=0, maximum=65535)
        check_int("max-body", self.max_body_bytes, minimum=1)
        check_real("drain-timeout", self.drain_timeout, minimum=0, maximum=86400)
        if self.ray is not None:
            check_int("ray", self.ray, minimum=1)
        for name in self.served_model_name or ():
            if not name.strip() or len(name) > _MAX_NAME_LETTERS:
                raise ConfigError(
                    f"served-model-name is {name[:80]!r}; allowed: 1 to {_MAX_NAME_LETTERS} "
                    "letters, not only spaces"
                )
        for origin in self.cors_origin or ():
            if _ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    f"cors-origin is {origin!r}; allowed: SCHEME://HOST or SCHEME://HOST:PORT "
                    "without a slash behind it, as browsers write it, or * for all"
                )

    @property
    def max_body_bytes(self) -> int:
        return parse_size("max-body", self.max_body)

    def api_keys(self) -> tuple[str, ...]:
        """All keys. Raises: InputError, ConfigError; no message holds a key."""
        keys = [*(self.api_key or ()), *_keys_of(self.api_key_file)]
        for number, key in enumerate(keys, 1):
            if not key or not all("!" <= character <= "~" for character in key):
                raise ConfigError(
                    f"API key {number} cannot be sent in a header; allowed: letters, digits and "
                    "signs of ASCII, without spaces, at least one"
                )
        return tuple(keys)


def _keys_of(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise InputError(f"{path}: cannot be read ({reason}); give a file of keys") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise InputError(f"{path}: holds no key; write one a line")
    return keys


@takes_flags
def serve(
    model: Model,
    is_dry: Annotated[
        bool, flag("--dry-run", help="Print whether it fits and how fast it is, and end.")
    ] = False,
    is_quiet: Annotated[bool, flag("-q", "--quiet", help="Only errors on stderr.")] = False,
    server: ServerFlags = ServerFlags(),
    engine: EngineFlags = EngineFlags(),
    sampling: SamplingFlags = SamplingFlags(),
    log: LogFlags = LogFlags(),
) -> int:
    """Serve MODEL to OpenAI clients, with a page to try it at /.

    Decoding flags are for requests that do not say; without --max-tokens an answer may be as long
    as fits, without --seed each draw is another. Ctrl-C and SIGTERM let running answers finish,
    then end with 0; a second one ends at once.
    """
    use_log_flags(log)
    server.check()
    config = replace(engine.config(), max_num_seqs=server.max_num_seqs)
    params, keys = sampling.params(), server.api_keys()
    if is_dry:
        return _print_plan(model, config)
    # Before anybody is told where it listens; a model that is not there before torch is.
    find_model(model)
    if server.ray is not None:
        _serve_by_ray(model, server, config, params, keys, is_quiet=is_quiet)
        return 0
    _check(model, config, params, is_quiet=is_quiet)
    from oled_moe.server import ServerSettings, default_names
    from oled_moe.server_host import open_socket

    settings = ServerSettings(
        served_names=tuple(server.served_model_name or default_names(model)),
        defaults=params,
        api_keys=keys,
        cors_origins=tuple(server.cors_origin or ()),
        max_body_bytes=server.max_body_bytes,
        max_at_once=server.max_num_seqs + server.max_queue,
    )
    listener = open_socket(server.host, server.port)
    _warn_if_open(server.host, keys)
    service = _Service(model, config, settings, server.max_queue, listener, is_quiet)
    return service.run(server.drain_timeout)


def _check(model: str, config: EngineConfig, params: SamplingParams, *, is_quiet: bool) -> None:
    """Refuse early, by headers alone, what could not be served. Raises: whatever planning does."""
    with status_line(is_quiet=is_quiet) as say:
        say("loading torch")
        from oled_moe.engine import plan_engine
        from oled_moe.server_backend import check_served

        say(f"reading headers of {model}")
        check_served(plan_engine(model, config), params)


def _note_end(drain_s: float, *, is_quiet: bool) -> None:
    """Say that a signal was heard: what it asks for may take a while."""
    if not is_quiet:
        what = f"answers at work may go on for {drain_s:g} s; a second Ctrl-C ends at once"
        note("ending", [("ending", what)])


class _Service:
    """One model behind one socket, from listening to the end."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        settings: "ServerSettings",
        max_queue: int,
        listener: "socket.socket",
        is_quiet: bool,
    ) -> None:
        from oled_moe.server_backend import LoadingBackend
        from oled_moe.server_host import url_of

        self._model = model
        self._config = config
        self._settings = settings
        self._max_queue = max_queue
        self._listener = listener
        self._is_quiet = is_quiet
        self._url = url_of(listener)
        self._backend = LoadingBackend(self._load, self._loaded)

    def run(self, drain_s: float) -> int:
        """Serve until told to end; the exit code. Raises: whatever loading raises."""
        from oled_moe.server import create_app
        from oled_moe.server_host import DrainingServer

        app = create_app(self._backend, self._settings)
        self._server = DrainingServer(
            app,
            self._backend,
            drain_s=drain_s,
            on_drain=lambda: self._ending(drain_s),
        )
        if not self._is_quiet:
            note("listening", [("listening", f"{self._url}, while {self._model} is loaded")])
        self._backend.start()
        self._server.run(sockets=[self._listener])
        if self._backend.error is not None:
            raise self._backend.error
        if self._backend.is_loading:
            # Nothing can stop the thread that loads, and nothing of it needs to be saved.
            is_interrupted = self._server.exit_signal == signal.SIGINT
            if is_interrupted:
                print("error: interrupted", file=sys.stderr)
            sys.stderr.flush()
            os._exit(128 + signal.SIGINT if is_interrupted else 0)
        # Ended as asked, by Ctrl-C as by SIGTERM: a server has no other way to be done.
        return 0

    def _load(self) -> "Runtime":
        from oled_moe.server_backend import start_runtime

        return start_runtime(
            lambda: open_engine(self._model, self._config, is_quiet=self._is_quiet),
            max_waiting=self._max_queue,
            defaults=self._settings.defaults,
        )

    def _loaded(self) -> None:
        """On the thread that loads: the model is there, or never will be."""
        if self._backend.error is not None:
            self._server.should_exit = True
        elif not self._is_quiet:
            runtime = self._backend.loaded
            if runtime is not None:
                note("serving", self._rows(runtime))

    def _ending(self, drain_s: float) -> None:
        if self._backend.loaded is not None:
            _note_end(drain_s, is_quiet=self._is_quiet)

    def _rows(self, runtime: "Runtime") -> list[tuple[str, str]]:
        """The effective plan, and where to find it."""
        engine, settings = runtime.engine, self._settings
        decoding = DecodingParams.resolve(settings.defaults.with_defaults(engine.sampling_defaults))
        rows = plan_rows(self._model, engine, decoding)
        most_tokens = settings.defaults.max_tokens or engine.sampling_defaults.max_tokens
        if most_tokens is None:
            rows = [
                (name, text.rpartition(", at most")[0] + ", at most what fits")
                if name == "decoding"
                else (name, text)
                for name, text in rows
            ]
        return [
            *rows,
            (
                "requests",
                f"{self._config.max_num_seqs} at once, {self._max_queue} more wait; "
                f"{engine.max_model_len} tokens each at most",
            ),
            ("names", ", ".join(settings.served_names)),
            (
                "API keys",
                str(len(settings.api_keys)) if settings.api_keys else "none are asked for",
            ),
            ("API", f"{self._url}/v1"),
            ("page", f"{self._url}/"),
        ]


def _serve_by_ray(
    model: str,
    server: ServerFlags,
    config: EngineConfig,
    params: SamplingParams,
    keys: Sequence[str],
    *,
    is_quiet: bool,
) -> None:
    """Serve from replicas. Raises: MissingDependencyError, and whatever loading raises."""
    from oled_moe.ray_serve import ServeArgs, run

    engine = {field.name: getattr(config, field.name) for field in fields(config)}
    if config.hardware is not None:
        engine["hardware"] = str(config.hardware)
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    level = logging.getLogger().getEffectiveLevel()
    args = ServeArgs(
        model=model,
        replicas=server.ray or 1,
        **engine,
        max_queue=server.max_queue,
        drain_s=server.drain_timeout,
        log_level=logging.getLevelName(level).lower(),
        served_model_names=list(server.served_model_name or ()),
        sampling={name: value for name, value in given.items() if value is not None},
        api_keys=list(keys),
        cors_origins=list(server.cors_origin or ()),
        max_body_bytes=server.max_body_bytes,
    )
    url = f"http://{server.host}:{server.port}"

    def on_ready() -> None:
        _warn_if_open(server.host, keys)
        if not is_quiet:
            rows = [("replicas", str(args.replicas)), ("API", f"{url}/v1"), ("page", f"{url}/")]
            note("serving", rows)

    run(
        args,
        host=server.host,
        port=server.port,
        on_ready=on_ready,
        on_drain=lambda: _note_end(server.drain_timeout, is_quiet=is_quiet),
    )


def _warn_if_open(host: str, keys: Sequence[str]) -> None:
    try:
        is_local = ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local and not keys:
        logger.warning("%s can be reached from other machines, and no --api-key is asked for", host)


def _print_plan(model: str, config: EngineConfig) -> int:
    """What `plan` says of this machine, for the server's number of sequences."""
    from oled_moe.cli_plan import print_outlook, with_flags
    from oled_moe.outlook import find_hardware, open_sizes, outlook, this_machine

    hardware, source = find_hardware(config.hardware, config.device)  # type: ignore[arg-type]  # flags give a path
    view = outlook(
        open_sizes(model, config),
        config,
        this_machine(config.device),
        hardware,
        hardware_source=source,
    ).to_dict()
    print_outlook(with_flags(view))
    return 0 if view["fit"]["is_fitting"] else DoesNotFitError.exit_code
