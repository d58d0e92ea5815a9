"""Recording a routing trace from a live engine: prompts one after another, all that was routed.

Whatever device and policy the engine has: with experts on one device, what is recorded does not
depend on them, unless a lossy rule shares experts, which the header then names. Nothing is written
here; an interrupted recording leaves nothing behind.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from oled_moe import __version__
from oled_moe.config import DecodingParams, SamplingParams
from oled_moe.engine import Engine
from oled_moe.errors import ConfigError
from oled_moe.traces import RoutingTrace, TraceRecorder, TraceRequest
from oled_moe.types import ForwardContext, ForwardOutcome, MoeShape

# What `include` may name, in the order of the format.
OPTIONAL = ("gate_scores", "hidden_cosine", "input_embedding", "token_ids")
DEFAULT_INCLUDE = ("token_ids",)
_LAYER_OUT = re.compile(r"layers\.(\d+)\.layer_out")

Progress = Callable[[int, int], None]
Probe = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class PromptToRecord:
    """A prompt, as text or token ids, and what the trace calls it."""

    prompt: str | Sequence[int]
    id: str
    workload: str = "unknown"


def record_trace(
    engine: Engine,
    prompts: Sequence[PromptToRecord],
    params: SamplingParams | None = None,
    *,
    include: Collection[str] = DEFAULT_INCLUDE,
    model_name: str | None = None,
    progress: Progress | None = None,
) -> RoutingTrace:
    """Answer the prompts and return what was routed meanwhile.

    `include` names optional tensors; `progress(done, total)` counts prompts.
    Raises: ConfigError for an unknown tensor or no prompts; as `Engine.generate` otherwise.
    """
    params = params or SamplingParams()
    if unknown := sorted(set(include) - set(OPTIONAL)):
        raise ConfigError(f"include names {unknown[0]}; allowed: {', '.join(OPTIONAL)}")
    if not prompts:
        raise ConfigError("there are no prompts to record; give one at least")
    decoding = DecodingParams.resolve(params.with_defaults(engine.sampling_defaults))
    shape = _shape_as_stored(engine)
    recorder = TraceRecorder(shape, include=include)
    requests: dict[int, TraceRequest] = {}
    with _observing(engine, recorder, include) as latest:
        for index, item in enumerate(prompts):
            if progress is not None:
                progress(index, len(prompts))
            result = engine.generate(item.prompt, params)
            # The engine serves one request at a time, so the last forward was this one's.
            request_id = latest[-1].rows[0].request_id
            requests[request_id] = TraceRequest(
                item.id, item.workload, _num_tokens(engine, item.prompt), len(result.token_ids)
            )
    return recorder.build(
        requests,
        model_type=_model_type(engine),
        model_name=model_name or engine.path.name,
        block_length=decoding.block_length,
        threshold=decoding.threshold,
        extra={
            "recording": {
                "oled_moe": __version__,
                "device": engine.config.device,
                "policy": engine.policy.name,
                # A rule's name where what was routed is not the model's own choice.
                "lossy": engine.config.lossy,
                "low_precision": engine.low_form,
                "decoding": asdict(decoding),
            }
        },
    )


def _shape_as_stored(engine: Engine) -> MoeShape:
    config, expert_bytes = engine.model_config, engine.experts.pool.arena.layout.weight_bytes
    return MoeShape(config.num_moe_layers, config.num_experts, config.top_k, expert_bytes)


def _model_type(engine: Engine) -> str:
    """The family's name, which is that of the config's module."""
    return type(engine.model_config).__module__.rpartition(".")[2]


def _num_tokens(engine: Engine, prompt: str | Sequence[int]) -> int:
    if not isinstance(prompt, str):
        return len(prompt)
    assert engine.tokenizer is not None
    return len(engine.tokenizer.encode(prompt))


@contextmanager
def _observing(
    engine: Engine, recorder: TraceRecorder, include: Collection[str]
) -> Iterator[list[ForwardContext]]:
    """Have the recorder see everything; yields a list that holds the latest forward."""
    latest: list[ForwardContext] = []
    cosine = _CosineProbe(engine, recorder) if "hidden_cosine" in include else None

    def end_forward(outcome: ForwardOutcome) -> None:
        latest[:] = [outcome.context]
        if cosine is not None:
            cosine.end_forward(outcome)
        recorder.observe_outcome(outcome)

    experts = engine.experts
    before = experts.wants_gate_scores, engine.wants_input_embedding, engine.wants_all_logits
    experts.wants_gate_scores = before[0] or "gate_scores" in include
    engine.wants_input_embedding = before[1] or "input_embedding" in include
    # A trace says how confident the model was of what had been accepted, too.
    engine.wants_all_logits = True
    experts.observers.append(recorder.observe_demand)
    engine.outcome_observers.append(end_forward)
    try:
        if cosine is not None:
            cosine.attach()
        yield latest
    finally:
        experts.wants_gate_scores, engine.wants_input_embedding, engine.wants_all_logits = before
        experts.observers.remove(recorder.observe_demand)
        engine.outcome_observers.remove(end_forward)
        if cosine is not None:
            cosine.detach()


class _CosineProbe:
    """Compares each MoE layer's input with the same position's in the request's last forward.

    What a layer is given is what the layer before it put out. A probe that was set before goes on
    seeing everything.
    """

    def __init__(self, engine: Engine, recorder: TraceRecorder) -> None:
        self._model: Any = engine.model
        self._recorder = recorder
        config = engine.model_config
        self._num_dense = config.num_layers - config.num_moe_layers
        self._num_moe = config.num_moe_layers
        self._outer: Probe | None = None
        self._inputs: dict[int, torch.Tensor] = {}
        # (request, position) of each row of the stores below, by request.
        self._before: dict[int, dict[int, dict[int, torch.Tensor]]] = {}

    def attach(self) -> None:
        if not hasattr(self._model, "probe"):
            raise ConfigError("this model shows no hidden states; leave hidden_cosine out")
        self._outer = self._model.probe
        self._model.probe = self._see

    def detach(self) -> None:
        if hasattr(self._model, "probe"):
            self._model.probe = self._outer

    def _see(self, name: str, value: torch.Tensor) -> None:
        if self._outer is not None:
            self._outer(name, value)
        if name == "embed_out":
            self._inputs = {}
            layer = 0
        elif found := _LAYER_OUT.fullmatch(name):
            layer = int(found[1]) + 1
        else:
            return
        if 0 <= layer - self._num_dense < self._num_moe:
            self._inputs[layer - self._num_dense] = value.float().clone()

    def end_forward(self, outcome: ForwardOutcome) -> None:
        """Hand the cosines on, and keep the inputs for the next forward. Mutates: the recorder."""
        context = outcome.context
        assert context.token_position is not None
        requests = np.repeat(
            [row.request_id for row in context.rows], [row.num_tokens for row in context.rows]
        ).tolist()
        # Requests that are no longer running need not be kept.
        self._before = {r: kept for r, kept in self._before.items() if r in set(requests)}
        keys = list(zip(requests, context.token_position.tolist(), strict=True))
        for layer, inputs_TD in self._inputs.items():
            if len(inputs_TD) != len(keys):
                continue
            known = [self._before.get(r, {}).get(layer, {}).get(p) for r, p in keys]
            cosine = np.full(len(keys), np.nan, dtype=np.float32)
            is_known = [row for row, vector in enumerate(known) if vector is not None]
            if is_known:
                before = torch.stack([vector for vector in known if vector is not None])
                found = torch.cosine_similarity(inputs_TD[is_known], before, dim=1)
                cosine[is_known] = found.clamp(-1, 1).numpy()
            self._recorder.observe_cosine(layer, cosine)
            for row, (request, position) in enumerate(keys):
                by_layer = self._before.setdefault(request, {}).setdefault(layer, {})
                by_layer[position] = inputs_TD[row]
        self._inputs = {}
