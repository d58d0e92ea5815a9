"""Full-size runs without weights: the real engine, driven by the routing of a trace.

Every forward of a trace is made a forward of the model: the same tokens at the same positions, in
the same phases. What routers compute is replaced by what the trace says, so loads, kernels and
their overlap are real while the weights mean nothing. Decisions are those of the simulator for the
same trace.

Time runs from the end of one forward to the end of the next: preparing a forward counts, and the
copy lane gets no time that a decoder would not leave it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oled_moe.config import DecodingParams, SamplingParams
from oled_moe.counters import ExpertCounters
from oled_moe.engine import Engine
from oled_moe.errors import ConfigError, TraceError
from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import ForwardBatch, Logits, Segment
from oled_moe.models import ConditionedModel
from oled_moe.policies import OffloadPolicy
from oled_moe.registry import parse_spec
from oled_moe.roofline import ForwardWork
from oled_moe.sampling import sample
from oled_moe.synthesis import PRESETS, SynthesisParams, synthesize
from oled_moe.traces import RoutingTrace, TraceForward, load_trace
from oled_moe.types import (
    CopyPlan,
    ForwardContext,
    IntArray,
    LayerDemand,
    LayerPlan,
    MoeShape,
    Phase,
    TokenState,
)

SYNTH_PREFIX = "synth:"
# Denoising forwards that are not counted: at least, and at most where a cache fills up slowly.
MIN_WARMUP = 5
MAX_WARMUP = 30
_MAX_REQUESTS = 4096
_ALIASES = {"block": "block_length"}
_OF_THE_SHAPE = ("num_layers", "num_experts", "top_k", "expert_bytes")

GateArray = npt.NDArray[np.float32]


# The trace


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace that fits a model, and in words where it comes from."""

    trace: RoutingTrace
    words: str

    @property
    def num_denoise_forwards(self) -> int:
        is_denoise = self.trace.row_phase == Phase.DENOISE
        return len(np.unique(self.trace.row_forward[is_denoise]))


def load_replay(spec: str, shape: MoeShape, *, num_forwards: int) -> Replay:
    """The trace file, or with `synth:PRESET[:key=value,...]` a trace made up for this shape.

    `num_forwards`: denoising forwards that a made-up trace should hold. Raises: ConfigError,
    TraceError where the trace does not fit the model.
    """
    if spec.startswith(SYNTH_PREFIX):
        return _synthetic(spec, shape, num_forwards)
    trace = load_trace(spec)
    words = f"{trace.source}, {Path(spec).name} ({trace.model_name})"
    if trace.num_moe_layers != shape.num_layers:
        words += f", {shape.num_layers} of its {trace.num_moe_layers} MoE layers"
    return Replay(fit_trace(trace, shape), words)


def _synthetic(spec: str, shape: MoeShape, num_forwards: int) -> Replay:
    preset, given = parse_spec("replay", spec.removeprefix(SYNTH_PREFIX))
    if preset not in PRESETS:
        raise ConfigError(
            f"replay {spec!r}: unknown preset {preset!r}; known: {', '.join(PRESETS)}"
        )
    changes: dict[str, Any] = dict(_synthesis_values(spec, given))
    changes.update({name: getattr(shape, name) for name in _OF_THE_SHAPE})
    # One of a canvas holds many forwards, each of many tokens.
    num_requests = 1 if PRESETS[preset].is_canvas else 4
    while True:
        # Requests come one after another: more of them leave the first as they are.
        trace = synthesize(preset, **{"num_requests": num_requests, **changes})
        replay = Replay(trace, "")
        is_enough = replay.num_denoise_forwards >= num_forwards
        if is_enough or "num_requests" in changes or num_requests >= _MAX_REQUESTS:
            break
        num_requests *= 2
    words = (
        f"synthetic, preset {preset}, blocks of {trace.block_length}"
        f"{' in canvases' if PRESETS[preset].is_canvas else ''}, {shape.num_layers} MoE "
        f"layer{'' if shape.num_layers == 1 else 's'} of {shape.num_experts} experts"
    )
    return Replay(trace, words)


def _synthesis_values(spec: str, given: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Parameters as numbers. Raises: ConfigError."""
    defaults = asdict(SynthesisParams())
    # None by default, a number otherwise.
    kinds: dict[str, type] = {name: type(value) for name, value in defaults.items()}
    kinds["settle"] = float
    known = [name for name in kinds if name not in (*_OF_THE_SHAPE, "is_canvas")]
    for key, text in given.items():
        name = _ALIASES.get(key, key)
        if name not in known:
            raise ConfigError(
                f"replay {spec!r}: unknown parameter {key!r}; known: block, {', '.join(known)}"
            )
        try:
            yield name, kinds[name](text)
        except ValueError:
            raise ConfigError(f"replay {spec!r}: {key} is {text!r}; allowed: a number") from None


def fit_trace(trace: RoutingTrace, shape: MoeShape) -> RoutingTrace:
    """The trace with the layers and expert size of a model: its first layers and its last.

    The last stays the last, since there the forwards without logits skip the experts.
    Raises: TraceError for a trace with fewer layers, or other experts.
    """
    ours, theirs = (shape.num_experts, shape.top_k), (trace.num_experts, trace.top_k)
    if ours != theirs:
        raise TraceError(
            f"the trace routes to {theirs[1]} of {theirs[0]} experts, the model to {ours[1]} of "
            f"{ours[0]}; replay a trace of such a model, or synth:PRESET"
        )
    if trace.num_moe_layers < shape.num_layers:
        raise TraceError(
            f"the trace has {trace.num_moe_layers} MoE layers, the model {shape.num_layers}; give "
            f"--moe-layers {trace.num_moe_layers} at most"
        )
    layers = [*range(shape.num_layers - 1), trace.num_moe_layers - 1]
    return replace(
        trace,
        num_moe_layers=shape.num_layers,
        expert_bytes=shape.expert_bytes,
        expert_ids=trace.expert_ids[:, layers],
        gate_weights=trace.gate_weights[:, layers],
        gate_scores=None,
        hidden_cosine=None,
    )


def num_warmup_forwards(trace: RoutingTrace, capacities: Sequence[int]) -> int:
    """Denoising forwards until each layer was asked for as many experts as its capacity, within
    MIN_WARMUP and MAX_WARMUP. `capacities`: slots of each layer."""
    seen = np.zeros((trace.num_moe_layers, trace.num_experts), dtype=np.bool_)
    num_denoise = 0
    for forward in trace.forwards():
        is_full = bool((seen.sum(axis=1) >= np.array(capacities)).all())
        if num_denoise >= MAX_WARMUP or (num_denoise >= MIN_WARMUP and is_full):
            break
        for demand in forward.demands:
            seen[demand.layer, demand.expert_ids] = True
        num_denoise += forward.context.is_denoise
    return num_denoise


# One engine, driven by a trace


@dataclass(frozen=True, slots=True)
class ReplayedForward:
    """One forward as it went.

    `num_prefetched`: copies ahead asked for; `num_filled`: slots that held an expert at some time
    so far; `num_pauses`: how often the replay had paused before it, `is_after_pause`: just then.
    Units: seconds.
    """

    phase: Phase
    seconds: float
    planning_s: float
    work: ForwardWork
    num_loads: int
    num_cpu_runs: int
    num_prefetched: int
    num_accepted: int
    num_filled: int
    num_pauses: int = 0
    is_after_pause: bool = False


@dataclass(slots=True)
class _Observed:
    """What one forward's layers asked for and were given, kept until no clock runs."""

    layers: list[tuple[LayerDemand, LayerPlan, int]] = field(default_factory=list)
    ahead: list[CopyPlan] = field(default_factory=list)


class Replayer:
    """Drives an engine through the forwards of a trace, in order, each once.

    The engine is one that has run nothing yet, and runs nothing else meanwhile.
    Raises: TraceError for a trace of neither block diffusion over a prefix nor whole canvases,
    ConfigError for a policy that looks at what a replay does not have.
    """

    def __init__(self, engine: Engine, trace: RoutingTrace, *, seed: int = 0) -> None:
        check_policy(engine.policy)
        if engine.config.lossy is not None:
            raise ConfigError(
                f"lossy is {engine.config.lossy!r}; a replay has its experts from a trace, which "
                "none is replaced in: leave it out"
            )
        self._engine = engine
        self._trace = trace
        self._kv: dict[int, SequenceKv] = {}
        # Where the keys and values of each sequence end, those of its block at work included.
        self._written: dict[int, int] = {}
        self._num_positions = positions_of_requests(trace)
        self._params = DecodingParams.resolve(
            SamplingParams(temperature=0.0).with_defaults(engine.sampling_defaults)
        )
        self._random = np.random.default_rng(seed)
        self._is_recorded = trace.source == "recorded"
        # Models without a mask look at all of a canvas, and are told of the step before.
        self._has_random_canvas = engine.model_config.decoding.canvas_length > 0
        self._conditions: dict[int, torch.Tensor] = {}
        self._observed = _Observed()

    def run(
        self,
        num_forwards: int,
        counters: Callable[[int], ExpertCounters | None] | None = None,
        pause: Callable[[int], bool] | None = None,
    ) -> list[ReplayedForward]:
        """Run until `num_forwards` denoising forwards are done.

        `counters(index)` names who counts the forward of that index, if anybody. `pause(index)` may
        take its time before a forward and says whether it did; no clock runs meanwhile.
        """
        forwards = self._first(num_forwards)
        inputs = [self._inputs(forward) for forward in forwards]
        experts = self._engine.experts
        observed: list[_Observed] = []
        times: list[tuple[float, float, int]] = []
        paused: list[bool] = []
        experts.observers.append(self._observe)
        experts.copy_observers.append(self._observe_ahead)
        last_s, last_planning_s = perf_counter(), experts.planning_s
        try:
            for index, (forward, token_ids) in enumerate(zip(forwards, inputs, strict=True)):
                paused.append(pause is not None and pause(index))
                if paused[-1]:
                    last_s = perf_counter()
                self._observed = _Observed()
                observed.append(self._observed)
                self._forward(forward, token_ids)
                now_s, planning_s = perf_counter(), experts.planning_s
                num_filled = experts.pool.num_filled
                times.append((now_s - last_s, planning_s - last_planning_s, num_filled))
                last_s, last_planning_s = now_s, planning_s
        finally:
            experts.routing = None
            experts.observers.remove(self._observe)
            experts.copy_observers.remove(self._observe_ahead)
        done = []
        for index, (forward, seen, taken) in enumerate(zip(forwards, observed, times, strict=True)):
            counter = counters(index) if counters is not None else None
            summary = self._summary(forward, seen, taken, counter)
            num_pauses = sum(paused[: index + 1])
            done.append(replace(summary, num_pauses=num_pauses, is_after_pause=paused[index]))
        return done

    def _first(self, num_denoise: int) -> list[TraceForward]:
        """The forwards up to the denoising one of that number."""
        found = []
        for forward in self._trace.forwards():
            found.append(forward)
            num_denoise -= forward.context.is_denoise
            if num_denoise <= 0:
                break
        return found

    def _inputs(self, forward: TraceForward) -> torch.Tensor:
        """Token ids: the mask where it stands, the trace's own elsewhere, random ones where it has
        none or has those of another vocabulary."""
        context, vocab_size = forward.context, self._engine.model_config.vocab_size
        token_ids = self._random.integers(0, vocab_size, context.num_tokens)
        if context.token_ids is not None:
            is_known = (context.token_ids >= 0) & (context.token_ids < vocab_size)
            token_ids = np.where(is_known, context.token_ids, token_ids)
        is_masked = context.token_state == TokenState.MASKED
        if self._has_random_canvas:
            token_ids = np.where(
                is_masked, self._random.integers(0, vocab_size, len(is_masked)), token_ids
            )
            return torch.from_numpy(token_ids)
        return torch.from_numpy(np.where(is_masked, self._params.mask_token_id, token_ids))

    def _forward(self, forward: TraceForward, token_ids: torch.Tensor) -> None:
        engine, context = self._engine, forward.context
        assert context.token_position is not None
        batch = ForwardBatch(
            token_ids,
            torch.from_numpy(context.token_position),
            self._segments(forward),
            context,
            reads_rows=engine.model_config.decoding.is_whole,
        )
        if engine.wants_input_embedding:
            embedding = engine.model.embed(token_ids).float().cpu().numpy()
            context = replace(context, input_embedding=embedding)
            batch = replace(batch, context=context)
        engine.experts.routing = _Routing(forward)
        engine.start_forward(context)
        logits_NV = engine.model.forward(batch)
        if logits_NV is not None:
            sample(logits_NV, self._params, None)
            self._remember(context, logits_NV)
        engine.experts.end_forward(forward.outcome)
        for request_id in forward.ended_requests:
            self._kv.pop(request_id)
            self._conditions.pop(request_id, None)
            engine.cache.end_request(request_id)

    def _remember(self, context: ForwardContext, logits_NV: Logits) -> None:
        """What each canvas's next step is told, if the model is told anything."""
        model = self._engine.model
        if not isinstance(model, ConditionedModel):
            return
        assert isinstance(logits_NV, torch.Tensor)
        denoised = [row for row in context.rows if row.phase == Phase.DENOISE]
        parts = torch.split(logits_NV, [row.num_tokens for row in denoised])
        for row, logits_CV in zip(denoised, parts, strict=True):
            self._conditions[row.request_id] = model.condition(logits_CV)

    def _segments(self, forward: TraceForward) -> tuple[Segment, ...]:
        """One for each row; sequences advance to where the first of their rows begins."""
        positions = forward.context.token_position
        assert positions is not None
        segments, first = [], 0
        ends: dict[int, int] = {}
        for row in forward.context.rows:
            here = slice(first, first + row.num_tokens)
            start, end = int(positions[here][0]), int(positions[here][-1]) + 1
            kv = self._kv.get(row.request_id)
            if kv is None:
                kv = self._engine.model.new_kv(self._num_positions[row.request_id])
                self._kv[row.request_id] = kv
            is_first = row.request_id not in ends
            if is_first and kv.length < start <= self._written.get(row.request_id, 0):
                kv.advance(start - kv.length)
            if end - start != row.num_tokens or start != ends.get(row.request_id, kv.length):
                raise TraceError(
                    f"forward {forward.context.forward_id}: its rows do not follow one another in "
                    "their sequences; a replay needs block diffusion over a prefix, or canvases"
                )
            ends[row.request_id] = end
            segments.append(
                Segment(
                    kv,
                    row.num_tokens,
                    row.phase == Phase.DENOISE,
                    start - kv.length,
                    self._logit_tokens(forward, here) if row.phase == Phase.DENOISE else None,
                    self._conditions.get(row.request_id) if row.step_id else None,
                )
            )
            first += row.num_tokens
        self._written.update(ends)
        return tuple(segments)

    def _logit_tokens(self, forward: TraceForward, here: slice) -> torch.Tensor:
        """Those that were looked at when it was recorded; a synthetic trace says of more tokens
        how sure a model would be, but decoding looks at masks alone."""
        is_told = ~np.isnan(forward.outcome.token_confidence[here])
        is_wanted = is_told & (forward.context.token_state[here] == TokenState.MASKED)
        if self._is_recorded or self._has_random_canvas or not is_wanted.any():
            is_wanted = is_told
        return torch.from_numpy(is_wanted.nonzero()[0])

    def _observe(self, demand: LayerDemand, plan: LayerPlan) -> None:
        num_ready = self._engine.experts.pool.num_staged_ready
        self._observed.layers.append((demand, plan, num_ready))

    def _observe_ahead(self, copies: CopyPlan) -> None:
        self._observed.ahead.append(copies)

    def _summary(
        self,
        forward: TraceForward,
        seen: _Observed,
        taken: tuple[float, float, int],
        counters: ExpertCounters | None,
    ) -> ReplayedForward:
        context = forward.context
        if counters is not None:
            for copies in seen.ahead:
                counters.copied_ahead(copies)
            for demand, plan, num_ready in seen.layers:
                counters(demand, plan, num_ready)
        plans = [plan for _, plan, _ in seen.layers]
        logits = [self._logit_count(forward, row_index) for row_index in range(len(context.rows))]
        denoised = [row.num_tokens for row in context.rows if row.phase == Phase.DENOISE]
        work = ForwardWork(
            num_tokens=context.num_tokens,
            num_last_tokens=sum(denoised),
            num_logits=sum(logits),
            expert_rows=tuple(demand.num_tokens for demand, _, _ in seen.layers),
            num_misses=sum(len(plan.load_ids) + len(plan.staged_ids) for plan in plans),
        )
        return ReplayedForward(
            phase=_phase_of(context),
            seconds=taken[0],
            planning_s=taken[1],
            work=work,
            num_loads=sum(len(plan.load_ids) for plan in plans),
            num_cpu_runs=sum(len(plan.cpu_ids) for plan in plans),
            num_prefetched=sum(map(len, seen.ahead)) + sum(len(plan.prefetch) for plan in plans),
            num_accepted=int(forward.outcome.token_accepted.sum()),
            num_filled=taken[2],
        )

    def _logit_count(self, forward: TraceForward, row_index: int) -> int:
        rows = forward.context.rows
        if rows[row_index].phase != Phase.DENOISE:
            return 0
        first = sum(row.num_tokens for row in rows[:row_index])
        here = slice(first, first + rows[row_index].num_tokens)
        return len(self._logit_tokens(forward, here))


def check_policy(policy: OffloadPolicy) -> None:
    """Raises: ConfigError for a policy that looks at what a replay does not have."""
    if "gate_scores" in policy.needs:
        raise ConfigError(
            f"policy {policy.name!r} looks at all router scores, which a replay does not have; "
            "its parameters may do without (finemoe:maps=topk does)"
        )


class _Routing:
    """The routes of one forward, in place of the routers'."""

    def __init__(self, forward: TraceForward) -> None:
        self._context = forward.context
        self._demands = {demand.layer: demand for demand in forward.demands}

    def __call__(self, layer: int, context: ForwardContext) -> tuple[IntArray, GateArray]:
        demand = self._demands.get(layer)
        if demand is not None and demand.context.rows == context.rows:
            return demand.topk_ids, demand.gate_weights
        if demand is None or not set(context.rows) <= set(demand.context.rows):
            raise TraceError(
                f"forward {self._context.forward_id}: the trace says nothing of MoE layer {layer}, "
                "which the model runs; record it with this version"
            )
        is_here = [row in context.rows for row in demand.context.rows]
        mask = np.repeat(is_here, [row.num_tokens for row in demand.context.rows])
        return demand.topk_ids[mask], demand.gate_weights[mask]


def _phase_of(context: ForwardContext) -> Phase:
    """A forward that denoises anything is a denoising one, whatever else is in it."""
    if context.is_denoise:
        return Phase.DENOISE
    return Phase.PREFILL if context.is_prefill else Phase.COMMIT


def positions_of_requests(trace: RoutingTrace) -> list[int]:
    """How many positions each request reaches."""
    reached = np.zeros(len(trace.requests), dtype=np.int64)
    requests = trace.row_request[trace.token_row()]
    np.maximum.at(reached, requests, trace.token_position.astype(np.int64) + 1)
    return list(map(int, reached))


def num_sequences(trace: RoutingTrace) -> int:
    """The most requests that are under way at one time."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    rows = zip(trace.row_forward.tolist(), trace.row_request.tolist(), strict=True)
    for forward, request in rows:
        first.setdefault(request, forward)
        last[request] = forward
    changes = [(forward, 1) for forward in first.values()]
    changes += [(forward + 1, -1) for forward in last.values()]
    count = most = 0
    for _, change in sorted(changes):
        count += change
        most = max(most, count)
    return most
