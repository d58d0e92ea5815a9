"""FineMoE: what the router has said so far picks an earlier forward, which foretells later layers.

Source: IntelliSys-Lab/FineMoE-EuroSys26, finemoe/runtime/model_offload.py, finemoe/memory and
core/prefetch/task_scheduler.cpp; ported to block diffusion as policies.md 6.5 says. Shape legend:
Q lookups of a forward, N stored maps, L layers, E experts, H hidden.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from oled_moe.errors import ConfigError
from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import LoadAllDispatchPolicy
from oled_moe.policies.moe_infinity import ResidentView, default_budget
from oled_moe.policies.offload import OffloadPolicy, PolicyInputs
from oled_moe.policies.placement import BLOCK_PHASES
from oled_moe.types import (
    BoolArray,
    FloatArray,
    ForwardContext,
    ForwardOutcome,
    IntArray,
    LayerDemand,
    MoeShape,
)

FloatArray32 = npt.NDArray[np.float32]
_NONE: IntArray = np.empty(0, dtype=np.int64)
_SMALL = 1e-6


class ExpertMapStore:
    """Expert maps of earlier forwards, at most `capacity`: gate distributions and embeddings.

    `maps` float32 [L, N, E]: probabilities of each layer. `rank` int16 and `mass` float32
    [N, L, E] are what selecting needs, made once: an expert's place by probability, and the
    running sum in that order. `prefix` float32 [L, N]: squared length of layers 0 … l.
    `embeddings` float32 [N, H], of unit length; H is 0 where none are given.
    """

    def __init__(self, shape: MoeShape, capacity: int) -> None:
        num_layers, num_experts = shape.num_layers, shape.num_experts
        self._capacity = capacity
        self._num_stored = 0
        self._maps = np.zeros((num_layers, capacity, num_experts), dtype=np.float32)
        self._prefix = np.zeros((num_layers, capacity), dtype=np.float32)
        self.rank = np.zeros((capacity, num_layers, num_experts), dtype=np.int16)
        self.mass = np.zeros((capacity, num_layers, num_experts), dtype=np.float32)
        self._embeddings: FloatArray32 | None = None

    def __len__(self) -> int:
        return self._num_stored

    @property
    def maps(self) -> FloatArray32:
        return self._maps[:, : self._num_stored]

    @property
    def prefix(self) -> FloatArray32:
        return self._prefix[:, : self._num_stored]

    def match_embeddings(self, embeddings: FloatArray32) -> FloatArray32:
        """Cosines [Q, N] of embeddings [Q, H] of unit length."""
        if self._embeddings is None:
            return np.zeros((len(embeddings), 0), dtype=np.float32)
        return np.asarray(embeddings @ self._embeddings[: self._num_stored].T)

    def add(
        self, maps: FloatArray32, embeddings: FloatArray32 | None, redundancy: FloatArray32
    ) -> None:
        """Store maps [L, Q, E] of one forward; where none is free, over the most redundant.

        Shapes: redundancy [Q, N] with the entries from before. Those written by this forward are
        not written twice; new ones that find no other place are dropped.
        """
        if embeddings is not None and self._embeddings is None:
            size = (self._capacity, embeddings.shape[1])
            self._embeddings = np.zeros(size, dtype=np.float32)
        redundancy = redundancy.copy()
        num_before = redundancy.shape[1]
        for query in range(maps.shape[1]):
            if self._num_stored < self._capacity:
                place = self._num_stored
                self._num_stored += 1
            else:
                place = int(redundancy[query].argmax()) if num_before else -1
                if place < 0 or redundancy[query, place] == -np.inf:
                    return
                redundancy[:, place] = -np.inf
            self._write(place, maps[:, query])
            if embeddings is not None and self._embeddings is not None:
                self._embeddings[place] = embeddings[query]

    def _write(self, place: int, one_map: FloatArray32) -> None:
        self._maps[:, place] = one_map
        self._prefix[:, place] = np.einsum("le,le->l", one_map, one_map).cumsum()
        order = np.argsort(-one_map, axis=1, kind="stable")
        places = np.arange(one_map.shape[1], dtype=np.int16)[None, :]
        np.put_along_axis(self.rank[place], order, places, axis=1)
        np.cumsum(np.take_along_axis(one_map, order, axis=1), axis=1, out=self.mass[place])


@dataclass(slots=True)
class _Search:
    """The lookups of one forward, as far as its layers have gone.

    `rows`: which lookups are whose, by (request, block). Shapes: maps [L, Q, E]; dots [Q, N]
    and squares [Q] of the layers so far; by_embedding [Q, N], embeddings [Q, H].
    """

    rows: dict[tuple[int, int], slice]
    maps: FloatArray32
    dots: FloatArray32
    squares: FloatArray32
    embeddings: FloatArray32 | None = None
    by_embedding: FloatArray32 | None = None
    last_layer: int = -1

    def cosines(self, prefix: FloatArray32) -> FloatArray32:
        """[Q, N] over the layers so far; `prefix` [N] of the last of them."""
        lengths = np.sqrt(self.squares[:, None] * prefix)
        return np.asarray(self.dots / np.maximum(lengths, 1e-12))


@dataclass(frozen=True, slots=True)
class _Match:
    """Distinct stored entries [U] that were nearest, each with its worst score [U]."""

    entries: IntArray
    scores: FloatArray32


@dataclass(slots=True)
class _Foresight:
    """What predictions say now: probabilities [L, E], and who is on the list, with urgency."""

    probability: FloatArray
    urgency: FloatArray
    is_listed: BoolArray = field(init=False)

    def __post_init__(self) -> None:
        self.is_listed = np.zeros(self.probability.shape, dtype=np.bool_)


class ExpertMapPolicy:
    """FineMoE: retention, prefetch from the nearest stored map, and the store itself.

    At the start of a forward the input embedding is looked up, for layers 0 … d − 1; after the
    router of layer l the distributions of layers 0 … l, for layers l + 1 + d to the last (so
    layer d is foretold by neither, as in the original). Of the map found with cosine s each such
    layer lists its experts by probability while their running sum is at most clip(1 − s, 0, 1),
    and at least top_k. Urgency is probability × (1 − (j − first)/(last + 1)) + 1e-6; each list
    replaces and unprotects the one before. `has_quirk`: as released, all experts of those layers
    are listed and protected, the selected ones merely first; with a quota for each layer they
    protect one another, and guesses find places only where slots are free.

    `is_per_token`: a lookup for each token of a block and the union of what they select;
    otherwise one for the mean of each sequence's block, and "at least top_k" becomes the layer's
    mean demand so far. Stored is what is looked up.
    `has_gate_scores` False works from what every trace holds: a sparse map of the top-k gate
    weights; in place of the embedding, the best match of the request's forward before serves.
    Prefills are neither looked up nor stored: they want nearly everyone (policies.md 10.5).

    Victims are the lowest by (probability + 1e-6) × visits while resident; listed ones are never
    pushed out by guesses, and by demands last. `start_scores` keeps the latest scores s of
    lookups at the start of a forward: with all masks alike they say little (policies.md 6.5).
    `budget` copies are asked for per layer, for the reason given at ActivationMatrixPolicy.
    """

    is_stack = False
    fills_pool = True
    most_beside_cpu = 0

    def __init__(
        self,
        shape: MoeShape,
        *,
        store: int,
        distance: int,
        budget: int,
        has_gate_scores: bool = True,
        is_per_token: bool = False,
        has_quirk: bool = False,
    ) -> None:
        self._shape = shape
        self._distance = min(distance, shape.num_layers)
        self._budget = budget
        self._has_gate_scores = has_gate_scores
        self._is_per_token = is_per_token
        self._has_quirk = has_quirk
        self.store = ExpertMapStore(shape, store)
        self.start_scores: deque[float] = deque(maxlen=10_000)
        self._residents = ResidentView(shape)
        size = (shape.num_layers, shape.num_experts)
        self._foresight = _Foresight(np.zeros(size), np.zeros(size))
        self._search: _Search | None = None
        # The latest match of every running request, [d, E] maps and what else selecting needs.
        self._past: dict[int, _Selected] = {}
        self._num_demands = np.zeros(shape.num_layers, dtype=np.int64)
        self._num_demanded = np.zeros(shape.num_layers, dtype=np.int64)

    # Following forwards

    def target(self, capacities: IntArray) -> None:
        """Places nothing: this is how the policy learns of the capacities."""
        self._residents.capacities = capacities

    def start_forward(self, context: ForwardContext) -> None:
        self._foresight.is_listed[:] = False
        rows, num_lookups = {}, 0
        for row in context.rows:
            if row.phase in BLOCK_PHASES:
                size = row.num_tokens if self._is_per_token else 1
                rows[row.request_id, row.block_id] = slice(num_lookups, num_lookups + size)
                num_lookups += size
        self._search = None
        if num_lookups:
            num_layers, num_experts = self._shape.num_layers, self._shape.num_experts
            self._search = _Search(
                rows,
                np.zeros((num_layers, num_lookups, num_experts), dtype=np.float32),
                np.zeros((num_lookups, len(self.store)), dtype=np.float32),
                np.zeros(num_lookups, dtype=np.float32),
            )

    def end_forward(self, outcome: ForwardOutcome) -> None:
        search = self._search
        self._search = None
        if search is None or search.last_layer < 0:
            return
        cosines = search.cosines(self.store.prefix[search.last_layer])
        if not self._has_gate_scores:
            self._remember(search, cosines)
        if search.by_embedding is not None:
            share = self._distance / self._shape.num_layers
            cosines = share * search.by_embedding + (1 - share) * cosines
        self.store.add(search.maps, search.embeddings, cosines)

    def end_request(self, request_id: int) -> None:
        self._past.pop(request_id, None)

    def observe(self, demand: LayerDemand) -> None:
        self._residents.observe(demand)
        if not demand.context.is_prefill:
            self._num_demands[demand.layer] += 1
            self._num_demanded[demand.layer] += len(demand.expert_ids)

    # Prefetch

    def predict(self, context: ForwardContext, demand: LayerDemand | None) -> IntArray:
        search = self._search
        if search is None:
            return _NONE
        if demand is None:
            selected = self._look_up_start(context, search)
        else:
            selected = self._look_up(demand, search)
        if selected is None:
            return _NONE
        self._list(selected)
        return self._guesses()

    def victim_scores(self) -> FloatArray:
        scores = self._worth(slice(None))
        scores[self._foresight.is_listed] = np.inf
        return scores

    def _look_up_start(self, context: ForwardContext, search: _Search) -> "_Selected | None":
        """Layers 0 … d − 1, from the input embedding, or from the forward before."""
        if not self._has_gate_scores:
            requests = dict.fromkeys(request_id for request_id, _ in search.rows)
            past = [self._past[request] for request in requests if request in self._past]
            return _Selected.union(past) if past else None
        if context.input_embedding is None:
            raise ConfigError(
                "policy finemoe needs the input embeddings, which are not there; give a trace "
                "that holds them, or use finemoe:maps=topk"
            )
        parts = [part for _, part in self._parts(context, context.input_embedding, search)]
        embeddings = np.concatenate(parts)
        lengths = np.sqrt(np.einsum("qh,qh->q", embeddings, embeddings))
        search.embeddings = embeddings / np.maximum(lengths, 1e-12)[:, None]
        search.by_embedding = self.store.match_embeddings(search.embeddings)
        if not len(self.store):
            return None
        match = _nearest(search.by_embedding)
        self.start_scores.extend(search.by_embedding.max(axis=1).tolist())
        return self._select(match, 0, self._distance)

    def _look_up(self, demand: LayerDemand, search: _Search) -> "_Selected | None":
        """Layers l + 1 + d to the last, from the routers of layers 0 … l."""
        layer = demand.layer
        search.last_layer = layer
        stored = self.store.maps[layer, : search.dots.shape[1]]
        for lookups, part in self._parts(demand.context, self._gate_map(demand), search):
            search.maps[layer, lookups] = part
            search.dots[lookups] += part @ stored.T
            search.squares[lookups] += np.einsum("qe,qe->q", part, part)
        first = layer + 1 + self._distance
        if first >= self._shape.num_layers or not len(stored):
            return None
        match = _nearest(search.cosines(self.store.prefix[layer]))
        return self._select(match, first, self._shape.num_layers)

    def _gate_map(self, demand: LayerDemand) -> FloatArray32:
        """A distribution over the experts for each token, [T, E]."""
        if not self._has_gate_scores:
            num_tokens = len(demand.topk_ids)
            gates = np.zeros((num_tokens, self._shape.num_experts), dtype=np.float32)
            np.put_along_axis(gates, demand.topk_ids, demand.gate_weights, axis=1)
        elif demand.gate_scores is None:
            raise ConfigError(
                "policy finemoe needs all gate scores, which are not there; give a trace that "
                "holds them, or use finemoe:maps=topk"
            )
        else:
            gates = demand.gate_scores
        return np.asarray(gates / np.maximum(gates.sum(axis=1, keepdims=True), 1e-12))

    def _parts(
        self, context: ForwardContext, values: FloatArray32, search: _Search
    ) -> Iterator[tuple[slice, FloatArray32]]:
        """Per sequence that is looked up: its lookups, and what it looks up of values [T, ·]."""
        end = 0
        for row in context.rows:
            start, end = end, end + row.num_tokens
            if row.phase in BLOCK_PHASES:
                part = values[start:end]
                if not self._is_per_token:
                    part = part.mean(axis=0, keepdims=True)
                yield search.rows[row.request_id, row.block_id], part

    def _select(self, match: _Match, first: int, end: int) -> "_Selected":
        """The selection rule, over layers `first` … `end` − 1."""
        entries = match.entries
        limit = np.clip(1 - match.scores, 0, 1)[:, None, None]
        # Running sums only grow: what is within the limit are the first so many by rank.
        num_within = (self.store.mass[entries, first:end] <= limit).sum(axis=2)
        num_selected = np.maximum(num_within, self._num_least[first:end])
        probability = self.store.maps[first:end, entries].transpose(1, 0, 2)
        is_selected = self.store.rank[entries, first:end] < num_selected[:, :, None]
        return _Selected(first, probability.max(axis=0), (probability * is_selected).max(axis=0))

    @property
    def _num_least(self) -> IntArray:
        """How many experts every layer lists at least, int64 [L]."""
        least = np.full(self._shape.num_layers, self._shape.top_k)
        if not self._is_per_token:
            mean = self._num_demanded / np.maximum(self._num_demands, 1)
            least = np.maximum(least, np.rint(mean).astype(np.int64))
        return least

    def _list(self, selected: "_Selected") -> None:
        """Replace the list."""
        foresight, first = self._foresight, selected.first
        num_layers = len(selected.probability)
        layers = slice(first, first + num_layers)
        discount = 1 - np.arange(num_layers) / (first + num_layers)
        foresight.probability[layers] = selected.probability
        foresight.urgency[layers] = selected.listed * discount[:, None] + _SMALL
        foresight.is_listed[:] = False
        foresight.is_listed[layers] = self._has_quirk or selected.listed > 0

    def _guesses(self) -> IntArray:
        is_missing = self._foresight.is_listed & ~self._residents.is_resident
        numbers = is_missing.ravel().nonzero()[0]
        urgency = self._foresight.urgency.ravel()[numbers]
        return self._residents.choose(numbers, urgency, self._budget)

    def _remember(self, search: _Search, cosines: FloatArray32) -> None:
        """Keep each request's match for the start of its next forward."""
        if not cosines.shape[1]:
            return
        for (request_id, _), lookups in search.rows.items():
            match = _nearest(cosines[lookups])
            self.start_scores.extend(cosines[lookups].max(axis=1).tolist())
            self._past[request_id] = self._select(match, 0, self._distance)

    # Retention

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        layer = demand.layer
        worth = self._worth(layer)
        # The classes of victims are one apart.
        scores = worth / (1 + worth) + self._foresight.is_listed[layer]
        scores[demand.expert_ids] += 2.0
        kept: FloatArray = scores[expert_ids]
        self._residents.keep(layer, expert_ids, kept)
        return kept

    def _worth(self, layers: int | slice) -> FloatArray:
        probability = self._foresight.probability[layers]
        worth: FloatArray = (probability + _SMALL) * self._residents.visits[layers]
        return worth


@dataclass(frozen=True, slots=True)
class _Selected:
    """Layers from `first` on: the matched probabilities, and those of selected experts, else 0.

    Shapes: [J, E] each, J the layers.
    """

    first: int
    probability: FloatArray32
    listed: FloatArray32

    @classmethod
    def union(cls, parts: "list[_Selected]") -> "_Selected":
        """Of the same layers: an expert counts by its highest value."""
        return cls(
            parts[0].first,
            np.max([part.probability for part in parts], axis=0),
            np.max([part.listed for part in parts], axis=0),
        )


def _nearest(cosines: FloatArray32) -> _Match:
    """The best entry of each lookup, [Q, N]. Of lookups with one entry the worst score stays: it
    selects whatever the others do."""
    best = cosines.argmax(axis=1)
    entries, index = np.unique(best, return_inverse=True)
    scores = np.full(len(entries), np.inf, dtype=np.float32)
    np.minimum.at(scores, index, cosines[np.arange(len(best)), best])
    return _Match(entries, scores)


def build(inputs: PolicyInputs) -> OffloadPolicy:
    """FineMoE with `store` maps, `distance` d, `maps`, `lookup`, `quirk` and `budget`."""
    parameters, shape = inputs.parameters, inputs.shape
    num_layers = max(1, shape.num_layers)
    distance = parameters.integer(
        "distance", max(1, int(num_layers / 4 + 0.5)), minimum=1, maximum=num_layers
    )
    store = parameters.integer("store", 1000, minimum=1, maximum=10_000)
    budget = parameters.integer("budget", default_budget(shape), minimum=1, maximum=10_000)
    assert distance is not None and store is not None and budget is not None
    is_full = parameters.choice("maps", ("full", "topk"), "full") == "full"
    policy = ExpertMapPolicy(
        shape,
        store=store,
        distance=distance,
        budget=budget,
        has_gate_scores=is_full,
        is_per_token=parameters.choice("lookup", ("block", "token"), "block") == "token",
        has_quirk=parameters.flag("quirk", False),
    )
    return OffloadPolicy(
        inputs.spec,
        policy,
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
        prefetch=policy,
        placement=policy,
        listeners=(policy,),
        needs=frozenset({"gate_scores", "input_embedding"} if is_full else ()),
    )
