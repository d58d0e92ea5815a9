"""Synthetic traces: routing made up by a small model of a router, calibrated to the paper.

For shapes nobody here can run (LLaDA2.0-mini and -flash) and for what-if questions. Every number
is drawn from seeds; the same parameters give the same trace.

How it works. At each layer a token has a latent distribution over experts, the exponential of

    sharpness * (popularity + topic + role + own),

four normal components whose shares of the variance are parameters: `popularity` belongs to the
model, `topic` to the request, `role` to a class of tokens that the request keeps coming back to
(each block holds the same classes at other positions), and the rest to the position itself. A
position first takes K experts from it without replacement. From step to step a token keeps each
expert with a probability that rises with its confidence and is drawn anew from a beta
distribution for each token and layer; what it does not keep, lowest gate weights first, is
replaced from the latent distribution. A mask that becomes a token exchanges its own component for
that of the token's id, and keeps `flip` less; tokens accepted longer ago keep more. Confidence
rises with the share of the block that is filled; tokens are accepted as the decoder does it, and
prompts, the folding of their tail into the first block, commits and skipped last layers are the
engine's. What the presets reach is in docs/trace-format.md and asserted in the tests.

Shape legend: B tokens of a block, T tokens, L layers, E experts per layer, K per token, V token
ids, R roles.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from oled_moe.config import check_choice, check_int
from oled_moe.errors import ConfigError
from oled_moe.traces import RoutingTrace, TraceRequest
from oled_moe.types import BoolArray, IntArray, MoeShape, Phase, TokenState

WORKLOADS = ("math", "code", "quiz")
# RND1's block is its whole answer, by default 256 tokens.
MAX_BLOCK_LENGTH = 1024
# Longest prompt part in one forward, as the engine's.
_MAX_PREFILL_TOKENS = 2048
# Prompt tokens routed together: bounds memory.
_CHUNK = 64
_VOCABULARY = 256
# Added to the logit of popularity + topic; sizes as in the paper's figure 4a.
_WORKLOAD_FOCUS = {"math": 0.27, "code": -0.27, "quiz": 0.0}
_WORKLOAD_EASE = {"math": 0.0, "code": 0.4, "quiz": -0.3}

Array32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SynthesisParams:
    """What a synthetic trace looks like. Units: expert_bytes is one expert.

    `sharpness` sets how many experts a block activates; `popularity`, `topic` and `role` are shares
    of the variance, what is left of 1 belongs to the position. `heterogeneity` is how much layers
    differ, as the standard deviation of the logit of popularity + topic: more of them, fewer
    experts. A token keeps an expert from one step
    to the next with probability `stability_low` at confidence 0, `stability_high` at 1;
    `dispersion` is a + b of the beta distribution it is drawn from. `flip` is what a token keeps
    less in the forward after its acceptance, `settle` what it keeps more later on; None sets
    `settle` so that confidence alone still gives `stability_high` on the whole. `ease` shifts
    the logit of confidence: easier text takes fewer steps. `tokens_per_step`: how many a step
    accepts, the surest; 0 takes the threshold. `expert_capacity`: with block routing, how many
    experts of a layer a block admits, 0 for all; here those that its tokens are likeliest to choose
    as it begins, and prompts are free. With `is_canvas` every forward holds prompt, answer
    and all masks, and blocks follow the prompt. `model_seed` draws the model, `seed` the requests.
    `workload` is one of WORKLOADS, or mixed: each in turn.
    """

    num_layers: int = 20
    num_experts: int = 256
    top_k: int = 8
    expert_bytes: int = 6291456
    model_type: str = "llada2_moe"
    model_name: str = "synthetic"
    block_length: int = 16
    threshold: float = 0.95
    workload: str = "mixed"
    num_requests: int = 12
    prompt_tokens: int = 96
    answer_tokens: int = 128
    batch_size: int = 1
    sharpness: float = 3.4
    heterogeneity: float = 0.5
    popularity: float = 0.25
    topic: float = 0.4
    role: float = 0.3
    stability_low: float = 0.588
    stability_high: float = 0.822
    dispersion: float = 3.0
    flip: float = 0.15
    settle: float | None = None
    ease: float = 2.8
    tokens_per_step: int = 0
    expert_capacity: int = 0
    is_canvas: bool = False
    model_seed: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("num_experts", self.num_experts, minimum=1, maximum=2**15 - 1)
        check_int("top_k", self.top_k, minimum=1, maximum=self.num_experts)
        check_int("block_length", self.block_length, minimum=1, maximum=MAX_BLOCK_LENGTH)
        for name in ("num_layers", "expert_bytes", "num_requests", "answer_tokens", "batch_size"):
            check_int(name, getattr(self, name), minimum=1)
        for name in ("prompt_tokens", "tokens_per_step", "model_seed", "seed"):
            check_int(name, getattr(self, name), minimum=0)
        if self.expert_capacity:
            check_int(
                "expert_capacity",
                self.expert_capacity,
                minimum=self.top_k,
                maximum=self.num_experts,
            )
        check_choice("workload", self.workload, (*WORKLOADS, "mixed"))
        limits = {"sharpness": 20.0, "heterogeneity": 2.0, "dispersion": 1e6}
        for name in _FLOATS:
            value, limit = getattr(self, name), limits.get(name, 1.0)
            if not 0 <= value <= limit:
                raise ConfigError(f"{name} is {value}; allowed: 0 to {limit:g}")
        if not self.dispersion > 0:
            raise ConfigError(f"dispersion is {self.dispersion}; allowed: more than 0")
        if self.settle is not None and not 0 <= self.settle <= 1:
            raise ConfigError(f"settle is {self.settle}; allowed: 0 to 1, or None")
        if not -10 <= self.ease <= 10:
            raise ConfigError(f"ease is {self.ease}; allowed: -10 to 10")
        if self.popularity + self.topic + self.role > 1:
            raise ConfigError(
                "popularity, topic and role are shares of one variance and sum to "
                f"{self.popularity + self.topic + self.role:g}; allowed: 1 at most"
            )

    @property
    def shape(self) -> MoeShape:
        return MoeShape(self.num_layers, self.num_experts, self.top_k, self.expert_bytes)


_FLOATS = (
    "threshold",
    "sharpness",
    "heterogeneity",
    "popularity",
    "topic",
    "role",
    "stability_low",
    "stability_high",
    "dispersion",
    "flip",
)

# LLaDA2.0-mini has 19 MoE layers in its published config; the paper counts 20, and its figures are
# what presets are compared with. Experts are bfloat16.
PRESETS: Mapping[str, SynthesisParams] = {
    "llada2-mini": SynthesisParams(model_name="synthetic llada2-mini"),
    "llada2-flash": SynthesisParams(
        num_layers=32,
        expert_bytes=25165824,
        model_name="synthetic llada2-flash",
        sharpness=5.0,
        popularity=0.06,
        topic=0.08,
        role=0.84,
    ),
    # Block routing over flash's experts; how often a block's choice changes nobody has published.
    "llada2.2-flash": SynthesisParams(
        num_layers=31,
        expert_bytes=25165824,
        model_name="synthetic llada2.2-flash",
        block_length=32,
        sharpness=5.0,
        popularity=0.06,
        topic=0.08,
        role=0.84,
        expert_capacity=48,
    ),
    # How many experts these activate nobody has published: parameters are mini's, an assumption.
    "sdar-30b": SynthesisParams(
        num_layers=48,
        num_experts=128,
        expert_bytes=9437184,
        model_type="sdar_moe",
        model_name="synthetic sdar-30b",
        block_length=4,
    ),
    "rnd1": SynthesisParams(
        num_layers=48,
        num_experts=128,
        expert_bytes=9437184,
        model_type="rnd1",
        model_name="synthetic rnd1",
        block_length=256,
        answer_tokens=256,
        num_requests=1,
        tokens_per_step=1,
        is_canvas=True,
    ),
    "llada-moe-7b": SynthesisParams(
        num_layers=16,
        num_experts=64,
        expert_bytes=12582912,
        model_type="llada",
        model_name="synthetic llada-moe-7b",
        block_length=32,
        num_requests=3,
        is_canvas=True,
    ),
    # A canvas is a block here: those before it are read once, and kept. Its random tokens are taken
    # to have half of mini's in common, since none of them is a mask.
    "diffusion-gemma-26b": SynthesisParams(
        num_layers=30,
        num_experts=128,
        expert_bytes=11894784,
        model_type="diffusion_gemma",
        model_name="synthetic diffusion-gemma-26b",
        block_length=256,
        answer_tokens=256,
        num_requests=2,
        popularity=0.125,
        topic=0.2,
        role=0.15,
        tokens_per_step=16,
    ),
}


def synthesize(preset: str | SynthesisParams = "llada2-mini", **changes: Any) -> RoutingTrace:
    """A synthetic trace: a preset by name, or parameters, with some of them changed.

    Raises: ConfigError for a preset or parameter that is unknown or not allowed.
    """
    if isinstance(preset, str):
        check_choice("preset", preset, tuple(PRESETS))
        preset = PRESETS[preset]
    names = [field.name for field in fields(SynthesisParams)]
    if unknown := sorted(set(changes) - set(names)):
        raise ConfigError(f"unknown parameter {unknown[0]}; known: {', '.join(names)}")
    params = replace(preset, **changes)
    model = _Model.of(params)
    requests = [_Request(model, params, index) for index in range(params.num_requests)]
    return _assemble(params, requests)


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of the trace to be. Shapes: [T], [T, L, K] as in the trace."""

    block_id: int
    step_id: int
    phase: Phase
    positions: IntArray
    states: npt.NDArray[np.uint8]
    confidence: Array32
    accepted: BoolArray
    token_ids: IntArray
    expert_ids: npt.NDArray[np.int16]
    gate_weights: Array32


@dataclass(frozen=True, slots=True)
class _Model:
    """What all requests share. Shapes: popularity [L, E], tokens [V, L, E], focus [L]."""

    popularity: Array32
    tokens: Array32
    focus: npt.NDArray[np.float64]

    @classmethod
    def of(cls, params: SynthesisParams) -> "_Model":
        rng = np.random.default_rng([params.model_seed, 0])
        size = (params.num_layers, params.num_experts)
        wobble = rng.standard_normal(params.num_layers)
        if params.num_layers > 1:
            # Standardised, so that the mean over layers is what presets were calibrated for.
            wobble = (wobble - wobble.mean()) / wobble.std()
        return cls(
            rng.standard_normal(size, dtype=np.float32),
            rng.standard_normal((_VOCABULARY, *size), dtype=np.float32),
            params.heterogeneity * wobble,
        )


def _weights(params: SynthesisParams, focus_L: npt.NDArray[np.float64]) -> Array32:
    """Of popularity, topic, role and own; `focus` shifts the first two. Shapes: [4, L, 1]."""
    base = params.popularity + params.topic
    shared = np.full(len(focus_L), base)
    if 0 < base < 1:
        shared = 1 / (1 + np.exp(-(np.log(base / (1 - base)) + focus_L)))
    first = params.popularity / base if base else 0.0
    second = min(1.0, params.role / (1 - base)) if base < 1 else 0.0
    shares = [shared * first, shared * (1 - first), (1 - shared) * second]
    shares.append((1 - shared) * (1 - second))
    weights = params.sharpness * np.sqrt(np.maximum(np.array(shares), 0.0))
    return weights[:, :, None].astype(np.float32)


class _Request:
    """Makes the rows of one request; its randomness depends on nothing but seed and index."""

    def __init__(self, model: _Model, params: SynthesisParams, index: int) -> None:
        self._model, self._params = model, params
        self._rng = rng = np.random.default_rng([params.seed, index, 1])
        mixed = WORKLOADS[index % len(WORKLOADS)]
        self.workload = mixed if params.workload == "mixed" else params.workload
        # Lengths vary by a third either way.
        self.num_prompt_tokens = int(params.prompt_tokens * rng.uniform(0.67, 1.33))
        num_answer = max(1, int(params.answer_tokens * rng.uniform(0.67, 1.33)))
        length = params.block_length
        # Blocks of a canvas begin where the prompt ends.
        origin = self.num_prompt_tokens % length if params.is_canvas else 0
        num_in_blocks = self.num_prompt_tokens - origin + num_answer
        num_positions = origin + -(-num_in_blocks // length) * length
        self.num_generated_tokens = num_positions - self.num_prompt_tokens
        self._token_ids = rng.integers(0, _VOCABULARY, num_positions)
        size = (params.num_layers, params.num_experts)
        num_roles = 16
        topic = rng.standard_normal(size, dtype=np.float32)
        roles = rng.standard_normal((num_roles, *size), dtype=np.float32)
        weights = _weights(params, model.focus + _WORKLOAD_FOCUS[self.workload])
        self._roles_RLE = weights[0] * model.popularity + weights[1] * topic + weights[2] * roles
        self._own_weight = weights[3]

    def rows(self) -> Iterator[_Row]:
        """In the order in which the engine would run them."""
        if self._params.is_canvas:
            yield from self._canvas()
            return
        length = self._params.block_length
        prompt_end = self.num_prompt_tokens // length * length
        chunk = max(length, _MAX_PREFILL_TOKENS // length * length)
        for start in range(0, prompt_end, chunk):
            yield self._prefill(start, min(start + chunk, prompt_end))
        num_blocks = len(self._token_ids) // length
        for block_id in range(prompt_end // length, num_blocks):
            yield from self._block(block_id, is_last=block_id == num_blocks - 1)

    def _prefill(self, start: int, end: int) -> _Row:
        parts = [
            self._first_routes(
                self._race(self._latent_slowness(self._token_ids[first : min(first + _CHUNK, end)]))
            )
            for first in range(start, end, _CHUNK)
        ]
        ids = np.concatenate([part[0] for part in parts])
        weights = np.concatenate([part[1] for part in parts])
        return self._row(
            start // self._params.block_length, 0, Phase.PREFILL, start,
            np.full(end - start, TokenState.PROMPT, dtype=np.uint8),
            self._token_ids[start:end], ids, weights,
        )  # fmt: skip

    def _block(self, block_id: int, *, is_last: bool) -> Iterator[_Row]:
        params, rng = self._params, self._rng
        length = params.block_length
        start = block_id * length
        truth = self._token_ids[start : start + length]
        states = np.full(length, TokenState.MASKED, dtype=np.uint8)
        states[: max(0, self.num_prompt_tokens - start)] = TokenState.PROMPT
        ease = rng.normal(params.ease + _WORKLOAD_EASE[self.workload], 2.2, length)
        shown = np.where(states == TokenState.PROMPT, truth, -1)
        roles = self._block_roles(length)
        own = rng.standard_normal((length, *self._roles_RLE.shape[1:]), dtype=np.float32)
        is_prompt = states == TokenState.PROMPT
        own[is_prompt] = self._model.tokens[truth[is_prompt]]
        slowness = self._slowness(roles, own)
        is_shut = self._shut_out(slowness)
        slowness[:, is_shut] = np.inf
        ids, affinity = self._first_routes(self._race(slowness))
        step_id = 0
        while True:
            is_masked = states == TokenState.MASKED
            confidence = self._confidence(ease, is_masked, 1 - is_masked.mean())
            accepted = self._accept(confidence, is_masked)
            yield self._row(
                block_id, step_id, Phase.DENOISE, start, states.copy(), shown.copy(),
                ids, affinity, confidence, accepted,
            )  # fmt: skip
            step_id += 1
            is_done = accepted[is_masked].all()
            if is_done and is_last:
                return
            keep = self._keep_probability(confidence, is_masked, accepted)
            own[accepted] = self._model.tokens[truth[accepted]]
            slowness[accepted] = self._slowness(roles[accepted], own[accepted])
            slowness[:, is_shut] = np.inf
            ids, affinity = self._next_routes(ids, affinity, slowness, keep)
            states[accepted] = TokenState.COMMITTED
            is_right = rng.random(length) < confidence
            guess = np.where(is_right, truth, rng.integers(0, _VOCABULARY, length))
            shown = np.where(states == TokenState.MASKED, guess, truth)
            if is_done:
                yield self._row(
                    block_id, step_id, Phase.COMMIT, start, states, shown, ids, affinity
                )
                return

    def _canvas(self) -> Iterator[_Row]:
        """Every position in every forward, and the answer's blocks one after another.

        Nothing is told of how sure a model would be outside the block at work.
        """
        params, rng = self._params, self._rng
        length, size, num_prompt = params.block_length, len(self._token_ids), self.num_prompt_tokens
        states = np.full(size, TokenState.MASKED, dtype=np.uint8)
        states[:num_prompt] = TokenState.PROMPT
        shown = np.where(states == TokenState.PROMPT, self._token_ids, -1)
        ease = rng.normal(params.ease + _WORKLOAD_EASE[self.workload], 2.2, size)
        roles = self._block_roles(size)
        own = rng.standard_normal((size, *self._roles_RLE.shape[1:]), dtype=np.float32)
        own[:num_prompt] = self._model.tokens[self._token_ids[:num_prompt]]
        slowness = self._slowness(roles, own)
        ids, affinity = self._first_routes(self._race(slowness))
        for start in range(num_prompt, size, length):
            block = slice(start, start + length)
            for step_id in range(length):
                is_masked = states == TokenState.MASKED
                filled = 1 - is_masked[block].mean()
                confidence = self._confidence(ease, is_masked, filled)
                accepted = np.zeros(size, dtype=np.bool_)
                accepted[block] = self._accept(confidence[block], is_masked[block])
                told = np.full(size, np.nan, dtype=np.float32)
                told[block] = confidence[block]
                yield self._row(
                    start // length, step_id, Phase.DENOISE, 0, states.copy(), shown.copy(),
                    ids, affinity, told, accepted,
                )  # fmt: skip
                keep = self._keep_probability(confidence, is_masked, accepted)
                own[accepted] = self._model.tokens[self._token_ids[accepted]]
                slowness[accepted] = self._slowness(roles[accepted], own[accepted])
                ids, affinity = self._next_routes(ids, affinity, slowness, keep)
                states[accepted] = TokenState.COMMITTED
                shown[accepted] = self._token_ids[accepted]
                if not (states[block] == TokenState.MASKED).any():
                    break

    # Routes

    def _block_roles(self, size: int) -> IntArray:
        """The same roles in every block, at other positions."""
        num_roles = len(self._roles_RLE)
        return self._rng.permutation(np.arange(max(size, num_roles)) % num_roles)[:size]

    def _slowness(self, roles: IntArray, own: Array32) -> Array32:
        """exp(-latent): the rates of an exponential race, inverted. Shapes: [T, L, E]."""
        latent = self._roles_RLE[roles] + self._own_weight * own
        slowness: Array32 = np.exp(-latent, dtype=np.float32)
        return slowness

    def _shut_out(self, slowness: Array32) -> BoolArray:
        """Experts that a block does not admit: all but those that some token favours most.
        Shapes: [L, E]."""
        capacity = self._params.expert_capacity or self._params.num_experts
        favour = (1 / slowness).max(axis=0)
        ranks = np.argsort(np.argsort(-favour, axis=1), axis=1)
        is_shut: BoolArray = ranks >= capacity
        return is_shut

    def _latent_slowness(self, token_ids: IntArray) -> Array32:
        return self._slowness(self._block_roles(len(token_ids)), self._model.tokens[token_ids])

    def _race(self, slowness: Array32) -> Array32:
        """Arrival times; the first K to arrive are K draws without replacement."""
        times = self._rng.standard_exponential(slowness.shape, dtype=np.float32)
        times *= slowness
        return times

    def _first_routes(self, times: Array32) -> tuple[npt.NDArray[np.int16], Array32]:
        ids = _first(times, self._params.top_k)
        affinity = self._rng.standard_exponential(ids.shape, dtype=np.float32) + np.float32(0.3)
        return ids, -np.sort(-affinity, axis=2)

    def _keep_probability(
        self, confidence: Array32, is_masked: BoolArray, accepted: BoolArray
    ) -> npt.NDArray[np.float64]:
        params = self._params
        span = params.stability_high - params.stability_low
        keep = params.stability_low + span * confidence.astype(np.float64)
        # A third: about three steps as an accepted token follow each acceptance.
        settle = params.flip / 3 if params.settle is None else params.settle
        keep -= np.where(accepted, params.flip, 0.0)
        keep += np.where(is_masked, 0.0, settle)
        return np.clip(keep, 0.0, 1.0)

    def _next_routes(
        self,
        ids: npt.NDArray[np.int16],
        affinity: Array32,
        slowness: Array32,
        keep: npt.NDArray[np.float64],
    ) -> tuple[npt.NDArray[np.int16], Array32]:
        params, rng = self._params, self._rng
        num_open = params.expert_capacity or params.num_experts
        top_k, num_free = params.top_k, num_open - params.top_k
        shape = ids.shape[:2]
        mean = np.clip(keep, 1e-3, 1 - 1e-3)[:, None]
        kept_share = rng.beta(mean * params.dispersion, (1 - mean) * params.dispersion, shape)
        num_new = np.minimum(rng.binomial(top_k, 1 - kept_share), num_free)
        times = self._race(slowness)
        np.put_along_axis(times, ids.astype(np.int64), np.float32(np.inf), axis=2)
        fresh = _first(times, min(top_k, num_free)) if num_free else ids
        fresh = np.concatenate([fresh, ids[:, :, fresh.shape[2] :]], axis=2)
        # Who leaves: mostly those of little weight.
        leaving = np.argsort(affinity * rng.random(affinity.shape, dtype=np.float32), axis=2)
        ranks = np.arange(top_k)
        is_new = ranks < num_new[:, :, None]
        ids_by_rank = np.where(is_new, fresh, np.take_along_axis(ids, leaving, axis=2))
        new_affinity = rng.standard_exponential(affinity.shape, dtype=np.float32) + np.float32(0.3)
        old_affinity = np.take_along_axis(affinity, leaving, axis=2)
        affinity = np.where(is_new, np.float32(0.7) * new_affinity, old_affinity)
        order = np.argsort(-affinity, axis=2)
        return (
            np.take_along_axis(ids_by_rank, order, axis=2),
            np.take_along_axis(affinity, order, axis=2),
        )

    # Decoding

    def _confidence(
        self, ease: npt.NDArray[np.float64], is_masked: BoolArray, filled: float
    ) -> Array32:
        """Of this forward's logits: masked tokens gain as the block fills, others are sure."""
        rng, size = self._rng, len(ease)
        logit = ease - 1.2 + 4.0 * filled + rng.normal(0, 0.5, size)
        sure = 1 - rng.beta(1, 24, size)
        confidence = np.where(is_masked, 1 / (1 + np.exp(-logit)), sure)
        return confidence.astype(np.float32)

    def _accept(self, confidence: Array32, is_masked: BoolArray) -> BoolArray:
        """Masked tokens at or above the threshold, the surest one at least; or so many a step."""
        if self._params.tokens_per_step:
            sure_first = np.argsort(np.where(is_masked, -confidence, np.inf))
            chosen = np.zeros(len(is_masked), dtype=np.bool_)
            chosen[sure_first[: self._params.tokens_per_step]] = True
            return chosen & is_masked
        accepted: BoolArray = is_masked & (confidence >= self._params.threshold)
        if is_masked.any() and not accepted.any():
            accepted[np.where(is_masked, confidence, -1).argmax()] = True
        return accepted

    def _row(
        self,
        block_id: int,
        step_id: int,
        phase: Phase,
        start: int,
        states: npt.NDArray[np.uint8],
        token_ids: IntArray,
        ids: npt.NDArray[np.int16],
        affinity: Array32,
        confidence: Array32 | None = None,
        accepted: BoolArray | None = None,
    ) -> _Row:
        size = len(states)
        weights = affinity / affinity.sum(axis=2, keepdims=True)
        if phase != Phase.DENOISE:
            # Nobody reads what the last layer's experts would add where there are no logits.
            ids, weights = ids.copy(), weights.copy()
            ids[:, -1], weights[:, -1] = -1, 0
        return _Row(
            block_id,
            step_id,
            phase,
            np.arange(start, start + size),
            states,
            np.full(size, np.nan, dtype=np.float32) if confidence is None else confidence,
            np.zeros(size, dtype=np.bool_) if accepted is None else accepted,
            token_ids,
            ids,
            weights,
        )


def _first(times: Array32, count: int) -> npt.NDArray[np.int16]:
    """The `count` that arrive first, in order. Shapes: [T, L, count]."""
    if count < times.shape[2]:
        found = np.argpartition(times, count, axis=2)[:, :, :count]
    else:
        found = np.broadcast_to(np.arange(times.shape[2]), times.shape)
    order = np.argsort(np.take_along_axis(times, found, axis=2), axis=2)
    return np.take_along_axis(found, order, axis=2).astype(np.int16)


def _assemble(params: SynthesisParams, requests: list[_Request]) -> RoutingTrace:
    """Run `batch_size` requests side by side, the next one as soon as one is done."""
    waiting = iter([(index, request.rows()) for index, request in enumerate(requests)])
    running: list[tuple[int, Iterator[_Row]]] = []
    forwards: list[int] = []
    owners: list[int] = []
    rows: list[_Row] = []
    forward_id = 0
    while True:
        while len(running) < params.batch_size and (new := next(waiting, None)) is not None:
            running.append(new)
        still = []
        for index, source in running:
            row = next(source, None)
            if row is not None:
                forwards.append(forward_id)
                owners.append(index)
                rows.append(row)
                still.append((index, source))
        if not running:
            break
        running = still
        forward_id += 1

    def joined(name: str, dtype: Any) -> Any:
        return np.concatenate([getattr(row, name) for row in rows]).astype(dtype, copy=False)

    sizes = [len(row.states) for row in rows]
    return RoutingTrace(
        source="synthetic",
        model_type=params.model_type,
        model_name=params.model_name,
        num_moe_layers=params.num_layers,
        num_experts=params.num_experts,
        top_k=params.top_k,
        expert_bytes=params.expert_bytes,
        block_length=params.block_length,
        threshold=params.threshold,
        requests=tuple(
            TraceRequest(
                f"{request.workload}-{index}",
                request.workload,
                request.num_prompt_tokens,
                request.num_generated_tokens,
            )
            for index, request in enumerate(requests)
        ),
        row_forward=np.array(forwards, dtype=np.int32),
        row_request=np.array(owners, dtype=np.int32),
        row_block=np.array([row.block_id for row in rows], dtype=np.int32),
        row_step=np.array([row.step_id for row in rows], dtype=np.int32),
        row_phase=np.array([row.phase for row in rows], dtype=np.uint8),
        row_token_offset=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        token_position=joined("positions", np.int32),
        token_state=joined("states", np.uint8),
        token_confidence=joined("confidence", np.float32),
        token_accepted=joined("accepted", np.uint8),
        expert_ids=joined("expert_ids", np.int16),
        gate_weights=joined("gate_weights", np.float32),
        token_ids=joined("token_ids", np.int32),
        extra={"synthesis": {field.name: getattr(params, field.name) for field in fields(params)}},
    )
