"""How fast a model would run, from its sizes and a machine's numbers; nothing is loaded or timed.

Which experts are found in their slots comes from replaying the asked policy on short synthetic
traces of the model's shape: three texts, from hard (few tokens a forward, much reuse) to easy.
Times are weight bytes over measured rates; a forward takes at least its busiest lane, at most the
sum of all lanes. Every result is a range, widened by how well the machine is known.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from oled_moe.config import check_choice, check_int
from oled_moe.costs import HardwareProfile
from oled_moe.errors import ConfigError, TraceError
from oled_moe.policies import is_clairvoyant
from oled_moe.simulator import SimulationReport, simulate
from oled_moe.synthesis import MAX_BLOCK_LENGTH, PRESETS, synthesize
from oled_moe.types import (
    ForwardContext,
    LayerDemand,
    LayerPlan,
    MoeShape,
    TokenState,
)

logger = logging.getLogger(__name__)

DEFAULT_PROMPT_TOKENS = 512
DEFAULT_BLOCK_LENGTH = 32


@dataclass(frozen=True, slots=True)
class Text:
    """A kind of text as parameters of synthesis; `shared` scales what tokens have in common."""

    ease: float = 2.8
    stability_low: float = 0.588
    stability_high: float = 0.822
    shared: float = 1.0

    def changes(self, preset: str) -> dict[str, float]:
        """Parameters of `synthesize` that differ from the preset's."""
        params = PRESETS[preset]
        scaled = {name: self.shared * getattr(params, name) for name in _SHARED}
        return {
            "ease": self.ease,
            "stability_low": self.stability_low,
            "stability_high": self.stability_high,
            **scaled,
        }


_SHARED = ("popularity", "topic", "role")
# Tokens a forward, at blocks of 32 about 1.6, 2.6 and 8. LLaDA2.0's report has 2.55 for mini at
# threshold 0.95 and 3.31 at 0.85, the demo model reaches 4.1 to 6.4 at blocks of 16. Reuse goes the
# other way: the harder a text, the less changes from step to step. The hardest keeps more than the
# paper says of LLaDA2.0, the easiest as little as the demo model's recorded traces.
TEXTS: Mapping[str, Text] = {
    "hard text": Text(ease=2.0, stability_low=0.75, stability_high=0.92),
    "typical text": Text(),
    "easy text": Text(ease=4.8, stability_low=0.4, stability_high=0.65, shared=0.6),
}
TYPICAL = "typical text"
# How far off the arithmetic may be besides: where the machine was measured, where it was busy with
# other work then, and where it was not measured.
MEASURED_MARGIN, DISTURBED_MARGIN, GUESSED_MARGIN = 0.2, 0.4, 0.5
# Presets of families of which no count of active experts is published, and what is assumed.
_ASSUMED: Mapping[str, str] = {
    **dict.fromkeys(
        ("sdar-30b", "rnd1", "llada-moe-7b"),
        "what tokens with as much in common as LLaDA2.0-mini's would",
    ),
    "diffusion-gemma-26b": "what tokens with half as much in common as LLaDA2.0-mini's would, "
    "since none of them is a mask",
}
# Seconds per token: people read about five words, seven tokens, a second.
SPEEDS = ((0.02, "fast"), (0.1, "good"), (0.5, "usable"))
SLOWEST = "slow"

# Layers replayed; the others are taken to be like them.
_MAX_LAYERS = 4
_NUM_REQUESTS = 3
_WARMUP_REQUESTS = 1
_ANSWER_TOKENS = 96
_MAX_TRACE_PROMPT = 256
# Of a canvas every position is in every forward: fewer and shorter requests hold as many tokens.
_NUM_CANVAS_REQUESTS = 2
_CANVAS_ANSWER_TOKENS = 32
# Of blocks this long one alone is answered by each of few requests.
_LONG_BLOCK = 128
# Of a block, where steps are set: routes of more would only be more of the same.
_MAX_TRACED_STEPS = 12
# Longest prompt part in one forward, as the engine's.
_MAX_PREFILL_TOKENS = 2048
# From this size of an expert on, a model is taken to route like LLaDA2.0-flash.
_FLASH_EXPERT_BYTES = 16 * 2**20
# Passes over the logits that sampling makes: write, maximum, exponentials, sum.
_LOGITS_PASSES = 4
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_DEVICES = ("cpu", "emulated", "cuda")

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a forward of a model reads and computes. Units: bytes.

    `body_bytes`: matrices of all layers outside the routed experts; `head_bytes`: the output head;
    `attention_size`: heads · head size, summed over layers. `expert_form`: how routed experts are
    quantised, empty where they are of `dtype`; `plain_expert_bytes`: one of them in `dtype`.
    """

    shape: MoeShape
    body_bytes: int
    head_bytes: int
    vocab_size: int
    kv_bytes_per_token: int
    attention_size: int
    dtype: str
    expert_form: str = ""
    plain_expert_bytes: int = 0

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Denoising:
    """What the forwards of a model follow from beside its sizes.

    `canvas_tokens`: those of an answer, where every forward takes prompt and answer whole; 0 where
    it takes a block. `tokens_per_step`: how many a step accepts, where that is set; 0 where
    confidence decides. `preset`: synthetic routing that comes nearest; None chooses LLaDA2.0-mini's
    or -flash's by the size of the experts. `expert_capacity`: experts of a layer that a block
    admits, 0 for all. `is_random`: blocks begin as random tokens behind a prompt that was read
    whole; every step looks at all of a block, and tells the next what it predicted.
    """

    block_length: int = DEFAULT_BLOCK_LENGTH
    canvas_tokens: int = 0
    tokens_per_step: float = 0.0
    preset: str | None = None
    expert_capacity: int = 0
    is_random: bool = False

    def __post_init__(self) -> None:
        check_int("block_length", self.block_length, minimum=1, maximum=MAX_BLOCK_LENGTH)
        check_int("canvas_tokens", self.canvas_tokens, minimum=0)

    def preset_for(self, plain_expert_bytes: int) -> str:
        """The preset's name, by the size of experts that are not quantised."""
        is_large = plain_expert_bytes >= _FLASH_EXPERT_BYTES
        return self.preset or ("llada2-flash" if is_large else "llada2-mini")


@dataclass(frozen=True, slots=True)
class Residency:
    """How experts are held: slots, and for misses the share that lies on disk.

    On `cpu` every miss comes from disk; on `cuda` only those that RAM has no room for.
    """

    device: str
    num_slots: int
    num_staging: int
    disk_share: float = 1.0
    has_cpu_experts: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    """From the best case to the worst, and what is most likely. Units: seconds."""

    low_s: float
    likely_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the arithmetic of a forward. Units: bytes, seconds; `bytes_per_s` bytes/time."""

    lane: str
    what: str
    num_bytes: int
    bytes_per_s: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class TextPrediction:
    """What is expected on one kind of text; means over forwards that denoise.

    `active_per_layer`: distinct experts that a forward wants of a layer. `forward_low_s` if all
    lanes overlap, `forward_high_s` if none does; `tpot_*`, `ttft_*` in the same sense. No margin.
    """

    text: str
    tokens_per_forward: float
    active_per_layer: float
    hit_rate: float
    loads_per_forward: float
    cpu_runs_per_forward: float
    forward_low_s: float
    forward_high_s: float
    tpot_low_s: float
    tpot_high_s: float
    ttft_low_s: float
    ttft_high_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Speed of a model on a machine. `terms`: the arithmetic of one forward on typical text.

    `margin`: what low ends were divided by and high ends multiplied with, less 1. `bound`: the lane
    that takes longest. `speed`: a word for the likely `tpot`, by SPEEDS.
    """

    policy: str
    hardware: str
    is_hardware_measured: bool
    prompt_tokens: int
    block_length: int
    canvas_tokens: int
    routing: str
    margin: float
    speed: str
    bound: str
    ttft: Range
    tpot: Range
    forward: Range
    tokens_per_forward: tuple[float, float]
    texts: tuple[TextPrediction, ...]
    terms: tuple[Term, ...]
    notes: tuple[str, ...]

    @property
    def typical(self) -> TextPrediction:
        return next(text for text in self.texts if text.text == TYPICAL)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the meaning of the words among them."""
        limits = {word: limit for limit, word in SPEEDS}
        return {**asdict(self), "speed_limits_s": limits}


def predict(
    sizes: ModelSizes,
    residency: Residency,
    hardware: HardwareProfile,
    *,
    policy: str = "oled",
    prompt_tokens: int = DEFAULT_PROMPT_TOKENS,
    denoising: Denoising | None = None,
) -> Prediction:
    """The range of TTFT, TPOT and forward times. A second or so of replaying.

    Raises: ConfigError for a policy or a number that is not allowed.
    """
    check_choice("device", residency.device, _DEVICES)
    check_int("prompt-tokens", prompt_tokens, minimum=1)
    denoising = denoising or Denoising()
    if is_clairvoyant(policy, has_future=False):
        raise ConfigError(
            f"policy is {policy!r}, which knows the trace ahead: a bound, in simulation only; name "
            "a policy that an engine can run"
        )
    times = Times(sizes, residency, hardware)
    preset = denoising.preset_for(sizes.plain_expert_bytes or sizes.shape.expert_bytes)
    notes: list[str] = []
    if denoising.is_random:
        notes.append(
            "a canvas is taken to need every step that it may: one that settles before is done "
            "sooner, and how many are is published nowhere"
        )
    if sizes.expert_form and not times.has_form_rates:
        notes.append(
            f"how fast experts of {sizes.expert_form} are computed was not measured: their own "
            f"bytes at the rates of {sizes.dtype}, and as much arithmetic as {sizes.dtype} takes"
        )
    if preset in _ASSUMED:
        notes.append(
            "how many experts this family activates is not published: taken to be "
            f"{_ASSUMED[preset]}"
        )
    runs = []
    for text, kind in TEXTS.items():
        run = _Replay(times, prompt_tokens, denoising)
        policy = run.replay(preset, kind, policy, notes)
        runs.append((text, run))
    texts = tuple(run.prediction(text) for text, run in runs)
    typical_run = dict(runs)[TYPICAL]
    margin = _margin(hardware)
    if hardware.is_disturbed:
        notes.append(
            "other processes were busy while the machine was measured: times are those of an idle "
            "one, as far as they can be told"
        )
    typical = next(text for text in texts if text.text == TYPICAL)
    tpot = _range(texts, typical, "tpot", margin)
    terms = typical_run.terms()
    return Prediction(
        policy=policy,
        hardware=hardware.name,
        is_hardware_measured=hardware.is_measured,
        prompt_tokens=prompt_tokens,
        block_length=denoising.block_length,
        canvas_tokens=denoising.canvas_tokens,
        routing=f"synthetic, after {preset}",
        margin=margin,
        speed=speed_word(tpot.likely_s),
        bound=_longest_lane(terms),
        ttft=_range(texts, typical, "ttft", margin),
        tpot=tpot,
        forward=_range(texts, typical, "forward", margin),
        tokens_per_forward=(
            min(text.tokens_per_forward for text in texts),
            max(text.tokens_per_forward for text in texts),
        ),
        texts=texts,
        terms=terms,
        notes=tuple(dict.fromkeys(notes)),
    )


def _margin(hardware: HardwareProfile) -> float:
    if not hardware.is_measured:
        return GUESSED_MARGIN
    return DISTURBED_MARGIN if hardware.is_disturbed else MEASURED_MARGIN


def speed_word(tpot_s: float) -> str:
    """fast, good, usable or slow."""
    return next((word for limit, word in SPEEDS if tpot_s <= limit), SLOWEST)


def _range(
    texts: Sequence[TextPrediction], typical: TextPrediction, name: str, margin: float
) -> Range:
    def ends(text: TextPrediction) -> tuple[float, float]:
        return getattr(text, f"{name}_low_s"), getattr(text, f"{name}_high_s")

    low, high = ends(typical)
    return Range(
        min(ends(text)[0] for text in texts) / (1 + margin),
        # Halfway, as a factor, between lanes that overlap entirely and not at all.
        float(np.sqrt(low * high)),
        max(ends(text)[1] for text in texts) * (1 + margin),
    )


def _longest_lane(terms: Sequence[Term]) -> str:
    lanes: dict[str, float] = {}
    for term in terms:
        lanes[term.lane] = lanes.get(term.lane, 0.0) + term.seconds
    return max(lanes, key=lambda lane: lanes[lane])


# Times of the pieces


class Times:
    """Seconds of the pieces of a forward: by rates measured at so many rows where there are any,
    else by the larger of reading and arithmetic, else by the profile's affine times."""

    def __init__(self, sizes: ModelSizes, residency: Residency, hardware: HardwareProfile) -> None:
        self.sizes, self.residency, self.hardware = sizes, residency, hardware
        self.is_gpu = residency.device == "cuda"
        place = "cuda" if self.is_gpu else "cpu"
        self._expert = _ExpertProduct(hardware, place, sizes)
        self._dense = _Product(hardware, place, "dense", sizes.dtype)
        self._cpu_expert = _ExpertProduct(hardware, "cpu", sizes)
        self.has_form_rates = self._expert.has_form_rates
        expert_bytes = sizes.shape.expert_bytes
        disk_s = expert_bytes / max(
            hardware.disk_direct_bytes_per_s, hardware.disk_buffered_bytes_per_s
        )
        link_s = hardware.copy_latency_s + expert_bytes / hardware.copy_bytes_per_s
        # The profile of a machine with a GPU says `copy` of its link.
        is_gpu_profile = hardware.device_weight_bytes_per_s is not None
        has_disk_copies = residency.device == "cpu"
        self.copy_s = disk_s if has_disk_copies and is_gpu_profile else link_s
        self.disk_s = 0.0 if has_disk_copies else disk_s * residency.disk_share

    def experts_s(self, num_tokens: npt.ArrayLike) -> float:
        """Of experts in slots, each with so many tokens."""
        return float(self._expert.seconds(num_tokens).sum())

    def cpu_experts_s(self, num_tokens: npt.ArrayLike) -> float:
        """Of experts computed where they lie, in RAM."""
        return float(self._cpu_expert.seconds(num_tokens).sum())

    def body_s(self, num_tokens: float) -> float:
        """Of attention's projections, routers, shared experts and dense layers."""
        return float(self._dense.seconds(self.sizes.body_bytes, num_tokens))

    def head_s(self, num_tokens: float) -> float:
        """Of the output head and sampling from its logits."""
        if not num_tokens:
            return 0.0
        logits_bytes = 4 * self.sizes.vocab_size * num_tokens * _LOGITS_PASSES
        return float(
            self._dense.seconds(self.sizes.head_bytes, num_tokens)
            + logits_bytes / self._dense.read_bytes_per_s
        )

    def attention_s(self, num_tokens: float, num_positions: float) -> float:
        """Of scores and sums over `num_positions` keys and values."""
        read_bytes = self.sizes.kv_bytes_per_token * num_positions
        # As much arithmetic as a matrix of so many bytes that each token meets.
        equal_bytes = 2 * self.sizes.attention_size * num_positions * self.sizes.item_bytes
        return float(
            read_bytes / self._dense.read_bytes_per_s
            + self._dense.arithmetic_s(equal_bytes, num_tokens)
        )

    def software_s(self, num_loads: float) -> float:
        """Of everything that is neither weights nor copies, for one forward with so many copies."""
        hardware = self.hardware
        layers_s = hardware.layer_overhead_s * self.sizes.shape.num_layers
        return hardware.forward_overhead_s + layers_s + num_loads * hardware.load_overhead_s


class _Product:
    """Times of weights that meet rows, at one place and dtype; `form` where they are quantised."""

    def __init__(
        self,
        hardware: HardwareProfile,
        place: str,
        operation: str,
        dtype: str,
        *,
        form: str | None = None,
    ) -> None:
        is_gpu = place == "cuda" and hardware.device_weight_bytes_per_s is not None
        weight_rate = hardware.device_weight_bytes_per_s if is_gpu else None
        token_rate = hardware.device_token_weight_bytes_per_s if is_gpu else None
        self._base_rate = weight_rate or hardware.cpu_weight_bytes_per_s
        self._token_rate = token_rate or hardware.cpu_token_weight_bytes_per_s
        self._item_bytes = _ITEM_BYTES[dtype]
        is_cpu = place == "cpu"
        self._matrix_flops = hardware.matrix_flops_per_s if is_cpu else None
        read_rate = hardware.memory_read_bytes_per_s if is_cpu else None
        self._has_roofline = self._matrix_flops is not None and read_rate is not None
        self.read_bytes_per_s = read_rate or self._base_rate
        rates = sorted(
            (rate.num_rows, 1 / rate.bytes_per_s)
            for rate in hardware.weight_rates
            if (rate.place, rate.operation, rate.dtype) == (place, operation, form or dtype)
        )
        self._rows = np.array([rows for rows, _ in rates], dtype=np.float64)
        self._s_per_byte = np.array([seconds for _, seconds in rates], dtype=np.float64)

    @property
    def is_measured(self) -> bool:
        """Whether times by rows are known of just this product."""
        return len(self._rows) > 0

    def seconds(
        self, num_bytes: float, num_rows: npt.ArrayLike, plain_bytes: float | None = None
    ) -> FloatArray:
        """Seconds of each product of weights that take `num_bytes` with so many rows.

        `plain_bytes`: what these weights would take in the product's dtype, which says how much
        arithmetic they are; None where they do take that.
        """
        rows = np.asarray(num_rows, dtype=np.float64)
        plain_bytes = num_bytes if plain_bytes is None else plain_bytes
        if self.is_measured:
            # The fewest rows are mostly reading, what more take besides is arithmetic.
            s_per_byte = self._interpolate(rows)
            further = np.maximum(0.0, s_per_byte - self._s_per_byte[0])
            measured: FloatArray = num_bytes * s_per_byte + (plain_bytes - num_bytes) * further
            return measured
        if self._has_roofline:
            read_s = num_bytes / self.read_bytes_per_s
            bound: FloatArray = np.maximum(read_s, self.arithmetic_s(plain_bytes, rows))
            return bound
        affine: FloatArray = np.asarray(
            num_bytes / self._base_rate + rows * (plain_bytes / self._token_rate)
        )
        return affine

    def arithmetic_s(self, num_bytes: float, num_rows: npt.ArrayLike) -> FloatArray:
        """Seconds of the multiplications and additions alone."""
        rows = np.asarray(num_rows, dtype=np.float64)
        if self._matrix_flops is None:
            affine: FloatArray = rows * (num_bytes / self._token_rate)
            return affine
        flops: FloatArray = 2 * rows * (num_bytes / self._item_bytes)
        return flops / self._matrix_flops

    def _interpolate(self, rows: FloatArray) -> FloatArray:
        """Seconds per byte, along lines between the rows measured and beyond the last."""
        known, values = self._rows, self._s_per_byte
        found: FloatArray = np.interp(rows, known, values)
        if len(known) > 1:
            slope = max(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
            found = found + slope * np.maximum(0.0, rows - known[-1])
        return found


class _ExpertProduct:
    """Times of a model's experts, quantised or not, at one place: as measured in their own form,
    else their own bytes at the rates of their dtype, and its arithmetic."""

    def __init__(self, hardware: HardwareProfile, place: str, sizes: ModelSizes) -> None:
        self._num_bytes, self._plain_bytes = sizes.shape.expert_bytes, sizes.plain_expert_bytes
        self._product = _Product(hardware, place, "expert", sizes.dtype)
        self.has_form_rates = False
        if not sizes.expert_form:
            self._plain_bytes = self._num_bytes
            return
        own = _Product(hardware, place, "expert", sizes.dtype, form=sizes.expert_form)
        if own.is_measured:
            self._product, self._plain_bytes = own, self._num_bytes
            self.has_form_rates = True

    def seconds(self, num_rows: npt.ArrayLike) -> FloatArray:
        """Seconds of each of several experts with so many rows."""
        return self._product.seconds(self._num_bytes, num_rows, self._plain_bytes)


# Replays


@dataclass(slots=True)
class _Work:
    """Of one forward, its replayed layers alone. Units: seconds; numbers of experts."""

    context: ForwardContext
    device_s: float = 0.0
    cpu_s: float = 0.0
    num_active: int = 0
    num_hits: int = 0
    num_copies: int = 0
    num_cpu_runs: int = 0
    num_cpu_layers: int = 0


@dataclass(slots=True)
class _Lanes:
    """Seconds of one forward by lane."""

    device_s: float
    copy_s: float
    cpu_s: float
    disk_s: float

    def low_s(self, *, is_cpu_shared: bool) -> float:
        if is_cpu_shared:
            return max(self.device_s + self.cpu_s, self.copy_s, self.disk_s)
        return max(self.device_s, self.copy_s, self.cpu_s, self.disk_s)

    @property
    def high_s(self) -> float:
        return self.device_s + self.copy_s + self.cpu_s + self.disk_s


@dataclass(slots=True)
class _Replay:
    """One text replayed, and what is counted on the way."""

    times: Times
    prompt_tokens: int
    denoising: Denoising
    work: dict[int, _Work] = field(default_factory=dict)
    num_tokens: float = 0
    wasted_per_forward: float = 0.0
    scale: float = 1.0

    def replay(self, preset: str, text: Text, policy: str, notes: list[str]) -> str:
        """Count everything; returns the policy that was replayed. Mutates: `notes`."""
        shape = self.times.sizes.shape
        num_layers = min(shape.num_layers, _MAX_LAYERS)
        self.scale = shape.num_layers / num_layers
        trace = synthesize(
            preset,
            num_layers=num_layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            expert_bytes=shape.expert_bytes,
            **self._request_changes(),
            **text.changes(preset),
        )
        residency = self.times.residency
        num_slots = round(residency.num_slots * num_layers / shape.num_layers)
        num_left = trace.shape.num_experts_total - num_slots

        def run(policy: str) -> SimulationReport:
            return simulate(
                trace,
                policy,
                hardware=self.times.hardware,
                num_slots=num_slots,
                num_staging=min(residency.num_staging, num_left),
                has_cpu_experts=residency.has_cpu_experts,
                warmup_requests=_WARMUP_REQUESTS,
                observers=[self],
            )

        try:
            report = run(policy)
        except TraceError as error:
            note = f"predicted as if for policy oled: {error}"
            logger.warning(note)
            notes.append(note)
            policy = "oled"
            self.work.clear()
            report = run(policy)
        self.num_tokens = report.num_tokens
        if self.denoising.tokens_per_step:
            num_steps = sum(work.context.is_denoise for work in self.work.values())
            self.num_tokens = self.denoising.tokens_per_step * num_steps
        wasted = report.wasted_prefetched_bytes / shape.expert_bytes
        self.wasted_per_forward = self.scale * wasted / max(1, report.num_forwards)
        return policy

    def __call__(self, demand: LayerDemand, plan: LayerPlan) -> None:
        """Observe one layer of the replay."""
        context = demand.context
        if any(row.request_id < _WARMUP_REQUESTS for row in context.rows):
            return
        work = self.work.setdefault(context.forward_id, _Work(context))
        rows = demand.num_tokens * self._row_scale(context)
        is_cpu = np.isin(demand.expert_ids, plan.cpu_ids)
        work.device_s += self.times.experts_s(rows[~is_cpu])
        if len(plan.cpu_ids):
            work.cpu_s += self.times.cpu_experts_s(rows[is_cpu])
            work.num_cpu_layers += 1
        work.num_active += len(demand.expert_ids)
        # Where every expert has a slot, all are copied before the first forward.
        holds_all = self.times.residency.num_slots == self.times.sizes.shape.num_experts_total
        work.num_hits += len(demand.expert_ids) if holds_all else len(plan.hit_ids)
        work.num_copies += 0 if holds_all else len(plan.load_ids) + len(plan.staged_ids)
        work.num_cpu_runs += len(plan.cpu_ids)

    def _request_changes(self) -> dict[str, Any]:
        """Lengths of the traced requests, which are shorter than those predicted for."""
        length, is_canvas = self._traced_block, bool(self.denoising.canvas_tokens)
        is_few = is_canvas or length >= _LONG_BLOCK
        least_prompt = 2 * length if self._num_prefill_tokens else 1
        answer = max(_ANSWER_TOKENS, length if is_few else 2 * length)
        # A part of a token accepts none: then steps are more than tokens.
        tokens_per_step = ceil(self.denoising.tokens_per_step)
        if tokens_per_step and not is_canvas:
            tokens_per_step = max(tokens_per_step, ceil(length / _MAX_TRACED_STEPS))
        return {
            "is_canvas": is_canvas,
            "block_length": length,
            "tokens_per_step": tokens_per_step,
            "expert_capacity": self.denoising.expert_capacity,
            "num_requests": _NUM_CANVAS_REQUESTS if is_few else _NUM_REQUESTS,
            "prompt_tokens": max(least_prompt, min(self.prompt_tokens, _MAX_TRACE_PROMPT)),
            "answer_tokens": _CANVAS_ANSWER_TOKENS if is_canvas else answer,
        }

    @property
    def _traced_block(self) -> int:
        length = self.denoising.block_length
        return min(length, _CANVAS_ANSWER_TOKENS) if self.denoising.canvas_tokens else length

    @property
    def _num_prefill_tokens(self) -> int:
        """Tokens of the prompt's whole blocks; the rest is part of the first block, unless blocks
        are random. A canvas takes its prompt along in every forward."""
        length = 1 if self.denoising.is_random else self.denoising.block_length
        return 0 if self.denoising.canvas_tokens else self.prompt_tokens // length * length

    def _row_scale(self, context: ForwardContext) -> float:
        """Traced requests are short: each expert of longer ones meets so many times more rows."""
        if self.denoising.canvas_tokens:
            return (self.prompt_tokens + self.denoising.canvas_tokens) / context.num_tokens
        if not context.is_prefill:
            return 1.0
        return min(self._num_prefill_tokens, _MAX_PREFILL_TOKENS) / context.num_tokens

    def _num_logits(self, context: ForwardContext) -> float:
        """Masks of the block at work, or all of it where there is no mask; decoding looks at no
        other position."""
        if not context.is_denoise:
            return 0.0
        if self.denoising.is_random:
            return float(self.denoising.block_length)
        length, states = self._traced_block, context.token_state
        masked = np.flatnonzero(states == TokenState.MASKED)
        if self.denoising.canvas_tokens and len(masked):
            num_prompt = int((states == TokenState.PROMPT).sum())
            end = num_prompt + ((masked[0] - num_prompt) // length + 1) * length
            masked = masked[masked < end]
        return len(masked) * self.denoising.block_length / length

    def _head_s(self, context: ForwardContext) -> float:
        """Of logits and sampling, and of as much again where the next step is told of them."""
        passes = 2 if self.denoising.is_random else 1
        return passes * self.times.head_s(self._num_logits(context))

    def _num_positions(self, context: ForwardContext) -> float:
        """Keys and values that a forward's tokens look at."""
        if self.denoising.canvas_tokens:
            return self.prompt_tokens + self.denoising.canvas_tokens
        if context.is_prefill:
            return self._num_prefill_tokens / 2
        if self.denoising.is_random:
            return self.prompt_tokens + self.denoising.block_length
        return self.prompt_tokens + _ANSWER_TOKENS / 2

    def _lanes(self, work: _Work) -> _Lanes:
        times, context = self.times, work.context
        num_copies = self.scale * work.num_copies + self.wasted_per_forward
        num_tokens = context.num_tokens * self._row_scale(context)
        device_s = (
            self.scale * work.device_s
            + times.body_s(num_tokens)
            + self._head_s(context)
            + times.attention_s(num_tokens, self._num_positions(context))
            + times.software_s(num_copies)
        )
        round_trips_s = self.scale * work.num_cpu_layers * times.hardware.activation_round_trip_s
        return _Lanes(
            device_s,
            num_copies * times.copy_s,
            self.scale * work.cpu_s + round_trips_s,
            (num_copies + self.scale * work.num_cpu_runs) * times.disk_s,
        )

    def prediction(self, text: str) -> TextPrediction:
        """Means and sums of what was counted."""
        lanes = {forward_id: self._lanes(work) for forward_id, work in self.work.items()}
        denoise = [i for i, work in self.work.items() if work.context.is_denoise]
        commits = [
            i for i, work in self.work.items() if i not in denoise and not work.context.is_prefill
        ]
        lows = self._ends(lanes, denoise, is_low=True)
        highs = self._ends(lanes, denoise, is_low=False)
        # At best a block's commit costs nothing beside the next block's first forward.
        commits_s = sum(self._ends(lanes, commits, is_low=False))
        mean = self._mean_over(denoise)
        num_layers = self.times.sizes.shape.num_layers
        num_active = mean("num_active")
        ttft_low_s, ttft_high_s = self._ttft(lanes, denoise)
        return TextPrediction(
            text=text,
            tokens_per_forward=self.num_tokens / len(denoise),
            active_per_layer=num_active / num_layers,
            hit_rate=mean("num_hits") / num_active,
            loads_per_forward=mean("num_copies") + self.wasted_per_forward,
            cpu_runs_per_forward=mean("num_cpu_runs"),
            forward_low_s=float(np.mean(lows)),
            forward_high_s=(sum(highs) + commits_s) / len(denoise),
            tpot_low_s=sum(lows) / self.num_tokens,
            tpot_high_s=(sum(highs) + commits_s) / self.num_tokens,
            ttft_low_s=ttft_low_s,
            ttft_high_s=ttft_high_s,
        )

    def _ends(
        self, lanes: Mapping[int, _Lanes], forward_ids: Sequence[int], *, is_low: bool
    ) -> list[float]:
        # The emulated device is this CPU too.
        is_shared = self.times.residency.device != "cuda"
        return [
            lanes[i].low_s(is_cpu_shared=is_shared) if is_low else lanes[i].high_s
            for i in forward_ids
        ]

    def _mean_over(self, forward_ids: Sequence[int]) -> Any:
        def mean(name: str) -> float:
            values = [getattr(self.work[i], name) for i in forward_ids]
            return self.scale * float(np.mean(values))

        return mean

    def _ttft(self, lanes: Mapping[int, _Lanes], denoise: Sequence[int]) -> tuple[float, float]:
        """Prefill, in as many parts as it takes, and the first forward that denoises."""
        num_parts = -(-self._num_prefill_tokens // _MAX_PREFILL_TOKENS)
        prefill = [i for i, work in self.work.items() if work.context.is_prefill]
        firsts: dict[int, int] = {}
        for i in denoise:
            for row in self.work[i].context.rows:
                firsts.setdefault(row.request_id, i)
        first_ids = list(firsts.values())
        ends = []
        for is_low in (True, False):
            prefill_s = np.mean(self._ends(lanes, prefill, is_low=is_low)) if prefill else 0.0
            first_s = np.mean(self._ends(lanes, first_ids, is_low=is_low))
            ends.append(float(num_parts * prefill_s + first_s))
        return ends[0], ends[1]

    def terms(self) -> tuple[Term, ...]:
        """The arithmetic of a mean forward that denoises."""
        times, sizes = self.times, self.times.sizes
        ids = [i for i, work in self.work.items() if work.context.is_denoise]
        mean = self._mean_over(ids)
        contexts = [self.work[i].context for i in ids]
        num_tokens = float(np.mean([c.num_tokens * self._row_scale(c) for c in contexts]))
        head_s = float(np.mean([self._head_s(c) for c in contexts]))
        expert_bytes = sizes.shape.expert_bytes
        device = "GPU" if times.is_gpu else "compute"
        num_cpu = mean("num_cpu_runs")
        num_copies = mean("num_copies") + self.wasted_per_forward
        positions = self._num_positions(contexts[0])
        terms = [
            _term(
                device, "active experts", (mean("num_active") - num_cpu) * expert_bytes,
                mean("device_s"),
            ),
            _term(
                device, "attention, routers, shared experts", sizes.body_bytes,
                times.body_s(num_tokens),
            ),
            _term(
                device, "output head, sampling",
                sizes.head_bytes * (2 if self.denoising.is_random else 1), head_s,
            ),
            _term(
                device, "keys and values", sizes.kv_bytes_per_token * positions,
                times.attention_s(num_tokens, positions),
            ),
            _term(device, "software around layers", 0, times.software_s(num_copies)),
            _term("CPU", "experts computed in RAM", num_cpu * expert_bytes, mean("cpu_s")),
            _term(
                "disk" if times.residency.device == "cpu" else "link", "missing experts",
                num_copies * expert_bytes, num_copies * times.copy_s,
            ),
            _term(
                "disk", "missing experts not in RAM",
                (num_copies + num_cpu) * expert_bytes * times.residency.disk_share,
                (num_copies + num_cpu) * times.disk_s,
            ),
        ]  # fmt: skip
        return tuple(term for term in terms if term.seconds > 0)


def _term(lane: str, what: str, num_bytes: float, seconds: float) -> Term:
    rate = num_bytes / seconds if seconds and num_bytes else None
    return Term(lane, what, round(num_bytes), rate, seconds)
