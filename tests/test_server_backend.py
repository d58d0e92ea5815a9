"""Loading beside a server that listens already: what requests are told, and what is left behind."""

import threading
from typing import Any

import pytest
from checkpoints import synthetic_llada2, write_checkpoint

from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.engine import Engine
from oled_moe.errors import CheckpointError, ConfigError, OledMoeError, ShuttingDownError
from oled_moe.server_backend import LoadingBackend, NotServingError, Runtime, start_runtime


class Closing:
    """Something that is closed, at most for so long."""

    def __init__(self, closed: list[Any], name: str) -> None:
        self._closed, self._name = closed, name

    def close(self, drain_s: float = 0.0) -> None:
        self._closed.append((self._name, drain_s))


def runtime_of(closed: list[Any]) -> Runtime:
    parts = {name: Closing(closed, name) for name in ("engine", "scheduler", "monitor")}
    return Runtime(**parts)  # type: ignore[arg-type]  # fakes


def state_of(backend: LoadingBackend) -> str:
    try:
        backend.runtime()
    except NotServingError as error:
        return error.state
    return "ready"


def test_a_model_is_there_once_it_is_loaded() -> None:
    may_end, has_ended = threading.Event(), threading.Event()
    runtime = runtime_of([])

    def load() -> Runtime:
        may_end.wait(60)
        return runtime

    backend = LoadingBackend(load, has_ended.set)
    backend.start()
    assert state_of(backend) == "loading" and backend.is_loading
    may_end.set()
    assert has_ended.wait(60)
    assert backend.runtime() is runtime is backend.loaded


def test_a_model_that_cannot_be_loaded_is_told_to_everybody() -> None:
    def load() -> Runtime:
        raise CheckpointError("the file is torn")

    has_ended = threading.Event()
    backend = LoadingBackend(load, has_ended.set)
    backend.start()
    assert has_ended.wait(60)
    assert isinstance(backend.error, CheckpointError)
    with pytest.raises(NotServingError, match="torn") as caught:
        backend.runtime()
    assert caught.value.state == "failed"


def test_a_scheduler_that_fails_later_is_told_to_everybody() -> None:
    runtime, ends = runtime_of([]), threading.Semaphore(0)
    backend = LoadingBackend(lambda: runtime, ends.release)
    backend.start()
    assert ends.acquire(timeout=60) and backend.error is None
    assert runtime.scheduler.on_failure is not None
    runtime.scheduler.on_failure(OledMoeError("it fell over"))
    assert ends.acquire(timeout=60) and str(backend.error) == "it fell over"
    with pytest.raises(NotServingError, match="answers no more: it fell over") as caught:
        backend.runtime()
    assert caught.value.state == "failed"


def test_draining_ends_requests_before_the_engine() -> None:
    closed: list[Any] = []
    has_ended = threading.Event()
    backend = LoadingBackend(lambda: runtime_of(closed), has_ended.set)
    backend.start()
    has_ended.wait(60)
    backend.drain(3.0)
    assert state_of(backend) == "draining"
    assert closed[0] == ("scheduler", 3.0)
    assert closed[-1] == ("engine", 0.0)


def test_a_model_that_is_loaded_too_late_is_closed() -> None:
    closed: list[Any] = []
    may_end, has_ended = threading.Event(), threading.Event()

    def load() -> Runtime:
        may_end.wait(60)
        return runtime_of(closed)

    backend = LoadingBackend(load, has_ended.set)
    backend.start()
    backend.drain(3.0)
    may_end.set()
    assert has_ended.wait(60)
    assert ("engine", 0.0) in closed and state_of(backend) == "draining"


def test_a_runtime_leaves_nothing_behind(tmp_path: Any) -> None:
    threads = set(threading.enumerate())
    config = EngineConfig(max_num_seqs=2, threads=1)
    runtime = start_runtime(lambda: Engine("demo", config), max_waiting=3)
    assert runtime.scheduler.max_waiting == 3 and runtime.monitor is not None
    runtime.close()
    assert set(threading.enumerate()) <= threads
    with pytest.raises(ShuttingDownError):
        runtime.scheduler.submit([1], None, on_event=print, on_error=print)


@pytest.mark.parametrize(
    ("max_model_len", "defaults", "is_good"),
    [
        (15, SamplingParams(), False),
        (16, SamplingParams(), True),
        (8, SamplingParams(block_length=8), True),
        (16, SamplingParams(block_length=17), False),
    ],
)
def test_a_block_longer_than_any_answer_is_refused_at_once(
    max_model_len: int, defaults: SamplingParams, is_good: bool
) -> None:
    config = EngineConfig(max_model_len=max_model_len, threads=1)
    threads = set(threading.enumerate())
    if is_good:
        start_runtime(lambda: Engine("demo", config), max_waiting=1, defaults=defaults).close()
    else:
        with pytest.raises(ConfigError, match=f"max-model-len is {max_model_len}, shorter"):
            start_runtime(lambda: Engine("demo", config), max_waiting=1, defaults=defaults)
    assert set(threading.enumerate()) <= threads


def test_a_model_without_a_tokenizer_is_refused_and_closed(tmp_path: Any) -> None:
    config: dict[str, Any] = {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "vocab_size": 260,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 64,
        "mask_token_id": 256,
        "eos_token_id": 257,
    }
    write_checkpoint(tmp_path, synthetic_llada2(config), config)
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(Engine(tmp_path, EngineConfig(threads=1)))
        return engines[-1]

    with pytest.raises(CheckpointError, match="tokenizer.json"):
        start_runtime(make, max_waiting=1)
    with pytest.raises(Exception, match="closed"):
        engines[0].generate([1])
