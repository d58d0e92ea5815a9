"""MoE-Infinity: the running request is likened to finished ones, and their experts are fetched.

Source: EfficientMoE/MoE-Infinity, moe_infinity/memory, core/parallel/expert_dispatcher.cpp and
core/prefetch/task_scheduler.cpp; ported to block diffusion as policies.md 6.4 says.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oled_moe.errors import ConfigError
from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import LoadAllDispatchPolicy
from oled_moe.policies.offload import OffloadPolicy, PolicyInputs
from oled_moe.types import (
    BoolArray,
    FloatArray,
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    IntArray,
    LayerDemand,
    MoeShape,
    Phase,
)

_NONE: IntArray = np.empty(0, dtype=np.int64)
# Steps between the classes of victims; a score itself is a sum of logarithms in -45 … 1.
_LISTED, _NEEDED = 100.0, 200.0
_SMALL = 1e-6


class EamCollection:
    """Activation matrices [L, E] of finished requests, `capacity` at most, and how often each was
    the nearest. Source: MoE-Infinity, the EAMC; rows from a file, which stay for good, are not
    built.
    """

    def __init__(self, shape: MoeShape, capacity: int) -> None:
        self._size = (shape.num_layers, shape.num_experts)
        self._capacity = capacity
        # Rows of unit length, for one product gives all similarities; and their lengths.
        self._units = np.empty((0, *self._size), dtype=np.float32)
        self._lengths = np.empty((0, shape.num_layers), dtype=np.float32)
        self._num_uses: list[int] = []

    def __len__(self) -> int:
        return len(self._num_uses)

    def nearest(self, counts: FloatArray) -> FloatArray | None:
        """The stored counts float64 [L, E] most like `counts`: mean cosine of their layers, over
        those that `counts` has seen; None where nothing is stored or seen. Mutates: its uses."""
        units, lengths = _unit_rows(counts)
        if not len(self) or not lengths.any():
            return None
        num_stored = len(self)
        similarity = self._units[:num_stored].reshape(num_stored, -1) @ units.ravel()
        best = int(np.argmax(similarity))
        self._num_uses[best] += 1
        counts = self._units[best] * self._lengths[best][:, None]
        return counts.astype(np.float64)

    def add(self, counts: FloatArray) -> None:
        """Store a finished request, at the place of the least used where there is none left."""
        num_stored = len(self)
        if num_stored < self._capacity:
            if num_stored == len(self._units):
                room = min(self._capacity, max(16, 2 * num_stored))
                self._units.resize((room, *self._size), refcheck=False)
                self._lengths.resize((room, self._size[0]), refcheck=False)
            place = num_stored
            self._num_uses.append(0)
        else:
            place = self._num_uses.index(min(self._num_uses))
            self._num_uses[place] = 0
        self._units[place], self._lengths[place] = _unit_rows(counts)


class ResidentView:
    """What a policy can tell of who is resident, and its visits while it is: bool and float [L, E].

    Nobody tells a policy who is resident; it follows the retention rule from what it answered.
    Between two looks it may be wrong about experts that a guess has pushed out or that found no
    place: harmless, for it only decides what need not be guessed and whose visits count on.
    """

    def __init__(self, shape: MoeShape) -> None:
        size = (shape.num_layers, shape.num_experts)
        self.is_resident: BoolArray = np.zeros(size, dtype=np.bool_)
        self.visits: FloatArray = np.zeros(size)
        self.capacities: IntArray = np.full(shape.num_layers, shape.num_experts)
        self._has_left: BoolArray = np.zeros(size, dtype=np.bool_)
        self._is_settled = False

    def observe(self, demand: LayerDemand) -> None:
        """Count a visit of each demanded expert; whoever has left starts from none."""
        self._is_settled = False
        visits, has_left = self.visits[demand.layer], self._has_left[demand.layer]
        visits[has_left] = 0.0
        has_left[:] = False
        visits[demand.expert_ids] += 1.0

    def keep(self, layer: int, expert_ids: IntArray, scores: FloatArray) -> None:
        """Follow the retention rule of a layer, once for each demand; ids are the candidates."""
        if self._is_settled:
            return
        self._is_settled = True
        order = np.argsort(-scores, kind="stable")
        is_resident = self.is_resident[layer]
        is_resident[:] = False
        is_resident[expert_ids[order[: int(self.capacities[layer])]]] = True
        np.logical_not(is_resident, out=self._has_left[layer])

    def keep_globally(self, demand: LayerDemand, scores: FloatArray) -> None:
        """The same with one pool for all layers; scores [L, E]."""
        self.is_resident[demand.layer, demand.expert_ids] = True
        candidates = self.is_resident.ravel().nonzero()[0]
        excess = len(candidates) - int(self.capacities.sum())
        if excess > 0:
            order = np.argsort(scores.ravel()[candidates[::-1]], kind="stable")
            out = candidates[::-1][order[:excess]]
            self.is_resident.ravel()[out] = False
            self._has_left.ravel()[out] = True

    def choose(self, numbers: IntArray, urgency: FloatArray, budget: int) -> IntArray:
        """The most urgent `budget` of guesses that are taken for absent; now taken for there."""
        chosen = numbers[np.argsort(-urgency, kind="stable")[:budget]]
        self.is_resident.ravel()[chosen] = True
        return chosen


@dataclass(slots=True)
class _Request:
    """One running request: tokens [L, E] of its prompt and of its blocks, its last match."""

    prompt: FloatArray
    blocks: FloatArray
    block_id: int | None = None
    predicted: FloatArray | None = None

    @property
    def counts(self) -> FloatArray:
        return self.blocks if self.blocks.any() else self.prompt


class ActivationMatrixPolicy:
    """MoE-Infinity as its paper has it: retention, prefetch, and the record of requests.

    A request is matched where it begins a block: by its prompt before the first, then by the
    tokens of all its blocks so far. The C best of each layer in the matched matrix, over running
    requests together, are the working set. What is missing of it is copied in, from the layer
    after the one at work on, by count · (1 − (j − l)/(L + 1)).
    Victims are ordered by place in the model (1 − j/L) × share in the running requests × visits
    while resident, each normalised + 1e-6; the working set of this and later layers and the layer
    at work go last, what is needed now never before them.

    `budget` copies are asked for per layer. The original queues them all, with the rest replaced
    at the next layer; which are made by then depends on a clock, and policies have none. The
    default, half of top_k, is about what a copy lane does beside one layer.
    """

    is_stack = False
    fills_pool = True
    most_beside_cpu = 0

    def __init__(
        self, shape: MoeShape, *, trace_capacity: int, budget: int, is_global: bool = False
    ) -> None:
        self._shape = shape
        self._budget = budget
        self._is_global = is_global
        self._collection = EamCollection(shape, trace_capacity)
        self._residents = ResidentView(shape)
        self._requests: dict[int, _Request] = {}
        size = (shape.num_layers, shape.num_experts)
        self._running: FloatArray = np.zeros(size)
        self._predicted: FloatArray = np.zeros(size)
        self._is_wanted: BoolArray = np.zeros(size, dtype=np.bool_)
        # The layer at work, and those that the last guesses are for.
        self._layer = -1
        self._guessed_layers = _NONE
        layers = np.arange(shape.num_layers)
        self._place_terms: FloatArray = np.log(1 - layers / max(shape.num_layers, 1) + _SMALL)

    # Following requests

    def target(self, capacities: IntArray) -> None:
        """Places nothing: this is how the policy learns of the capacities."""
        self._residents.capacities = capacities

    def start_forward(self, context: ForwardContext) -> None:
        self._layer = -1
        has_matched = False
        for row in context.rows:
            request = self._request(row.request_id)
            if row.phase == Phase.DENOISE and row.block_id != request.block_id:
                request.block_id = row.block_id
                request.predicted = self._collection.nearest(request.counts)
                has_matched = True
        if has_matched:
            self._choose_wanted()

    def end_forward(self, outcome: ForwardOutcome) -> None:
        pass

    def end_request(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._running -= request.blocks
        if request.blocks.any():
            self._collection.add(request.blocks)
        self._choose_wanted()

    def observe(self, demand: LayerDemand) -> None:
        self._layer = demand.layer
        self._residents.observe(demand)
        for row, counts in _tokens_by_row(demand, self._shape.num_experts):
            request = self._request(row.request_id)
            if row.phase == Phase.PREFILL:
                request.prompt[demand.layer] += counts
            else:
                request.blocks[demand.layer] += counts
                self._running[demand.layer] += counts

    def _request(self, request_id: int) -> _Request:
        if request_id not in self._requests:
            size = self._running.shape
            self._requests[request_id] = _Request(np.zeros(size), np.zeros(size))
        return self._requests[request_id]

    def _choose_wanted(self) -> None:
        """The working set anew."""
        self._predicted[:] = 0.0
        for request in self._requests.values():
            if request.predicted is not None:
                self._predicted += request.predicted
        # An expert's rank in its layer, ties to the lower id.
        rank = np.argsort(np.argsort(-self._predicted, axis=1, kind="stable"), axis=1)
        capacities = self._residents.capacities[:, None]
        self._is_wanted = (rank < capacities) & (self._predicted > 0)

    # Prefetch

    def predict(self, context: ForwardContext, demand: LayerDemand | None) -> IntArray:
        first = 0 if demand is None else demand.layer + 1
        num_experts = self._shape.num_experts
        is_missing = self._is_wanted[first:] > self._residents.is_resident[first:]
        numbers = is_missing.ravel().nonzero()[0] + first * num_experts
        if not len(numbers):
            return _NONE
        distance = numbers // num_experts - max(first - 1, 0)
        urgency = self._predicted.ravel()[numbers] * (1 - distance / (self._shape.num_layers + 1))
        guesses = self._residents.choose(numbers, urgency, self._budget)
        self._guessed_layers = np.unique(guesses // num_experts)
        return guesses

    def victim_scores(self) -> FloatArray:
        scores = np.full(self._is_wanted.shape, np.inf)
        first = max(self._layer, 0)
        layers = np.arange(len(scores)) if self._is_global else self._guessed_layers
        scores[layers] = self._worth(layers)
        scores[first:][self._is_wanted[first:]] = np.inf
        if self._layer >= 0:
            scores[self._layer] = np.inf
        return scores

    # Retention

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        layer = demand.layer
        scores = self._worth(np.array([layer]))[0]
        scores[self._is_wanted[layer]] += _LISTED
        scores[demand.expert_ids] += _NEEDED
        kept: FloatArray = scores[expert_ids]
        self._residents.keep(layer, expert_ids, kept)
        return kept

    def all_scores(self, demand: LayerDemand) -> FloatArray:
        layer = demand.layer
        scores = self._worth(np.arange(self._shape.num_layers))
        is_protected = self._is_wanted.copy()
        is_protected[:layer] = False
        is_protected[layer] = True
        scores[is_protected] += _LISTED
        scores[layer, demand.expert_ids] += _NEEDED
        self._residents.keep_globally(demand, scores)
        return scores

    def _worth(self, layers: IntArray) -> FloatArray:
        """Logarithm of the product of all three terms, float64 [N, E], for layers [N]."""
        running, visits = self._running[layers], self._residents.visits[layers]
        share = running / np.maximum(running.sum(axis=1, keepdims=True), 1.0)
        frequency = visits / max(float(self._residents.visits.sum()), 1.0)
        worth: FloatArray = np.log((share + _SMALL) * (frequency + _SMALL))
        worth += self._place_terms[layers][:, None]
        return worth


class VisitRetentionPolicy:
    """MoE-Infinity as released: one pool for all layers, the least visited leaves first.

    The reset of an expert's visits when it leaves sits behind a `return` there and never happens,
    so they count on; and nothing is prefetched. What is needed now is never evicted.
    Source: core/parallel/expert_dispatcher.cpp, as read in policies.md 6.4.
    """

    is_stack = False

    def __init__(self, shape: MoeShape) -> None:
        self._num_visits = np.zeros((shape.num_layers, shape.num_experts))

    def observe(self, demand: LayerDemand) -> None:
        self._num_visits[demand.layer, demand.expert_ids] += 1

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        scores: FloatArray = self.all_scores(demand)[demand.layer, expert_ids]
        return scores

    def all_scores(self, demand: LayerDemand) -> FloatArray:
        scores = self._num_visits.copy()
        scores[demand.layer, demand.expert_ids] += 2.0**40
        return np.asarray(scores)


def default_budget(shape: MoeShape) -> int:
    """Guesses per layer that a copy lane is taken to manage beside it."""
    return max(1, shape.top_k // 2)


def build(inputs: PolicyInputs) -> OffloadPolicy:
    """MoE-Infinity by `mode`: its paper, with layer quotas or one pool (`scope`), or its code."""
    parameters, shape = inputs.parameters, inputs.shape
    is_release = parameters.choice("mode", ("paper", "release"), "paper") == "release"
    scope = parameters.choice("scope", ("layer", "global"), "global" if is_release else "layer")
    capacity = parameters.integer("trace_capacity", 1000, minimum=1, maximum=100_000)
    budget = parameters.integer("budget", default_budget(shape), minimum=1, maximum=10_000)
    assert capacity is not None and budget is not None
    allocation, dispatch = UniformAllocationPolicy(), LoadAllDispatchPolicy()
    if is_release:
        if scope == "layer":
            raise ConfigError(
                "policy parameter scope is 'layer' with mode=release, which has one pool for all "
                "layers; allowed there: global. Layer quotas come with mode=paper"
            )
        visits = VisitRetentionPolicy(shape)
        return OffloadPolicy(inputs.spec, visits, allocation, dispatch, is_global=True)
    is_global = scope == "global"
    policy = ActivationMatrixPolicy(
        shape, trace_capacity=capacity, budget=budget, is_global=is_global
    )
    return OffloadPolicy(
        inputs.spec,
        policy,
        allocation,
        dispatch,
        prefetch=policy,
        placement=policy,
        listeners=(policy,),
        is_global=is_global,
    )


def _unit_rows(counts: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Rows [L, E] of length 1, all 0 where there were no counts, and their lengths [L]."""
    lengths = np.sqrt(np.einsum("le,le->l", counts, counts))
    return counts / np.maximum(lengths, 1.0)[:, None], lengths


def _tokens_by_row(demand: LayerDemand, num_experts: int) -> Iterator[tuple[ForwardRow, IntArray]]:
    """For each row of a demand the tokens int64 [E] it sends to every expert."""
    rows, end = demand.context.rows, 0
    for row in rows:
        start, end = end, end + row.num_tokens
        yield row, np.bincount(demand.topk_ids[start:end].ravel(), minlength=num_experts)
