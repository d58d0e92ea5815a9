"""What the HTTP app is given to serve: a Backend, which has a loaded model or says why not.

`LoadingBackend` loads in a thread, so that a server can listen first. Nothing here knows HTTP.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from oled_moe.config import ONE_BLOCK_ALGORITHMS, DecodingParams, SamplingParams
from oled_moe.errors import CheckpointError, ConfigError, OledMoeError

if TYPE_CHECKING:
    from oled_moe.engine import Engine, EnginePlan
    from oled_moe.monitor import ExpertMonitor
    from oled_moe.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A loaded model, who runs its requests, and who watches its experts."""

    engine: "Engine"
    scheduler: "Scheduler"
    monitor: "ExpertMonitor | None" = None

    def close(self) -> None:
        """End everything at once; unfinished requests are told."""
        self.scheduler.close()
        if self.monitor is not None:
            self.monitor.close()
        self.engine.close()


class NotServingError(OledMoeError):
    """There is no model to answer with now. `state`: loading, draining or failed."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class Backend(Protocol):
    """Whoever has a model, or will have one."""

    def runtime(self) -> Runtime:
        """What to answer with. Raises: NotServingError while there is nothing, or nothing new."""
        ...


class LoadingBackend:
    """A Backend whose model is loaded by a thread of its own.

    `load` makes the runtime. `on_end` is called from that thread once it has, or has failed, in
    which case `error` says why; and once more should the scheduler fail later.
    """

    def __init__(self, load: Callable[[], Runtime], on_end: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._load = load
        self._on_end = on_end
        self._runtime: Runtime | None = None
        self._is_draining = False
        self._lock = threading.Lock()
        # Reading a model cannot be interrupted; the process must be able to end meanwhile.
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_loading(self) -> bool:
        """Whether the thread is still at it, which nothing can stop."""
        return self._thread.is_alive()

    @property
    def loaded(self) -> Runtime | None:
        """What was loaded, whether or not it takes requests now."""
        return self._runtime

    def runtime(self) -> Runtime:
        if self._is_draining:
            raise NotServingError("draining", "the server is about to end; ask another one")
        if self.error is not None:
            what = "could not be loaded" if self._runtime is None else "answers no more"
            raise NotServingError("failed", f"the model {what}: {self.error}")
        if self._runtime is None:
            raise NotServingError("loading", "the model is being loaded; try again soon")
        return self._runtime

    def drain(self, drain_s: float) -> None:
        """Take no new requests, give running ones `drain_s` seconds, then end everything."""
        with self._lock:
            self._is_draining = True
            runtime = self._runtime
        if runtime is not None:
            runtime.scheduler.close(drain_s=drain_s)
            runtime.close()

    def _run(self) -> None:
        try:
            runtime = self._load()
        # Kept, not handled: whoever waits for the model raises it again.
        except BaseException as error:
            self.error = error
        else:
            runtime.scheduler.on_failure = self._fail
            with self._lock:
                self._runtime = runtime
                is_late = self._is_draining
            if is_late:
                runtime.close()
        self._on_end()

    def _fail(self, failure: OledMoeError) -> None:
        """On the scheduler's thread, its last act."""
        self.error = failure
        self._on_end()


def start_runtime(
    make_engine: "Callable[[], Engine]",
    *,
    max_waiting: int,
    defaults: SamplingParams | None = None,
) -> Runtime:
    """An engine, its scheduler and its monitor. `defaults`: of requests that do not say.

    Raises: whatever `make_engine` raises; ConfigError where no such request could be answered.
    """
    # Torch comes with these; a server listens before it is there.
    from oled_moe.monitor import ExpertMonitor
    from oled_moe.scheduler import Scheduler

    engine = make_engine()
    try:
        check_served(engine.plan, defaults or SamplingParams())
        scheduler = Scheduler(engine, max_waiting=max_waiting)
        monitor = ExpertMonitor(engine, scheduler)
    except BaseException:
        engine.close()
        raise
    return Runtime(engine, scheduler, monitor)


def check_served(plan: "EnginePlan", defaults: SamplingParams) -> None:
    """Refuse what would have every request refused. `defaults`: of requests that do not say.

    Raises: CheckpointError where there is no tokenizer; ConfigError for blocks that are longer than
    answers may be, and for whatever the model is not decoded by.
    """
    if plan.tokenizer is None:
        raise CheckpointError(
            f"{plan.path} has no tokenizer.json, and a server writes text; without one only "
            "`generate --prompt-ids` works"
        )
    given = defaults.with_defaults(plan.sampling_defaults)
    # Algorithms that make one block of the answer take whatever length that has.
    shortest = replace(given, max_tokens=given.block_length or 1)
    block_length = DecodingParams.resolve(shortest).block_length
    if block_length > plan.max_model_len:
        raise ConfigError(
            f"max-model-len is {plan.max_model_len}, shorter than a block of {block_length} "
            f"tokens: every request would be refused; give {block_length} or more, or a smaller "
            "--block-length"
        )
    is_one_block = given.algorithm in ONE_BLOCK_ALGORITHMS
    if defaults.canvas_length is None:
        defaults = replace(defaults, max_tokens=shortest.max_tokens if is_one_block else 1)
    plan.resolve(defaults, 1)
