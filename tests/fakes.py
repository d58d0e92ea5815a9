"""Shared fakes: routers that ask for random experts, and experts that are random numbers.

Gate weights and confidences are multiples of 1/16, so that sums of their products are exact and
ties are real ties.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import settings
from products import num_examples
from torch import Tensor

from oled_moe.costs import DEFAULT_EMULATED_PROFILE, CostModel
from oled_moe.policies import POLICIES, OffloadPolicy, build_policy
from oled_moe.store import ExpertLayout, HostExpertStore
from oled_moe.types import (
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    IntArray,
    LayerDemand,
    MoeShape,
    Phase,
)

# Policies that can run without knowing the future.
LIVE_POLICIES = tuple(name for name, entry in POLICIES.items() if not entry.is_clairvoyant)

# The same and what else their parameters make of them.
LIVE_SPECS = (
    *LIVE_POLICIES,
    "moe-infinity:mode=release",
    "moe-infinity:scope=global",
    "finemoe:maps=topk,lookup=token",
    "finemoe:quirk=true",
    "ktransformers:placement=frequency",
    "ktransformers:placement=frequency,scope=global",
    "ktransformers:placement=dynamic,prefill_threshold=1",
    "fiddler:rule=max",
    "tide:interval=1,overlap=true",
    "n-cpu-moe:min_batch=1",
    "oled+:history=true,allocation=uniform",
    "oled+prefetch:words=true,depth=2,least=0",
    "naive-lru:prefetch=reuse,least=0.1",
)

# An emulated link that takes no time: sleeping is not what most tests are about.
FAST_LINK = replace(DEFAULT_EMULATED_PROFILE, copy_latency_s=0.0, copy_bytes_per_s=1e15)

# One copy takes as long as two tokens on the CPU: both lanes are worth using.
COSTS = CostModel(transfer_s=2.0, cpu_base_s=0.5, cpu_token_s=0.75, mean_tokens_per_miss=2.0)


def bounded(max_examples: int) -> settings:
    """So many drawn examples in the default run, and as many more as products.py says in a full."""
    return settings(max_examples=num_examples(max_examples))


def shape_of(num_layers: int, num_experts: int, top_k: int) -> MoeShape:
    return MoeShape(num_layers, num_experts, top_k, expert_bytes=1024)


def policy_of(name: str, shape: MoeShape, costs: CostModel = COSTS) -> OffloadPolicy:
    return build_policy(name, shape, costs)


def context_of(
    forward_id: int,
    confidence: Sequence[float],
    *,
    phases: Sequence[Phase] = (Phase.DENOISE,),
    block_length: int = 4,
) -> ForwardContext:
    """One row for each phase, the tokens shared out evenly, what is left over to the last."""
    share = len(confidence) // len(phases)
    sizes = [share] * (len(phases) - 1)
    sizes.append(len(confidence) - sum(sizes))
    rows = tuple(
        ForwardRow(request_id=i, block_id=0, step_id=0, phase=phase, num_tokens=size)
        for i, (phase, size) in enumerate(zip(phases, sizes, strict=True))
    )
    states = np.full(len(confidence), 2, dtype=np.uint8)
    size = len(confidence)
    random = np.random.default_rng(forward_id)
    return ForwardContext(
        forward_id,
        block_length,
        rows,
        np.array(confidence, dtype=np.float32),
        states,
        # Every row has its tokens from position 0 on.
        np.concatenate([np.arange(count) for count in sizes]),
        random.integers(-1, 9, size),
        random.random((size, 3), dtype=np.float32),
    )


def outcome_of(context: ForwardContext) -> ForwardOutcome:
    """Of a denoising forward: random confidences, about a third of the tokens accepted."""
    if not context.is_denoise:
        return ForwardOutcome.without_logits(context)
    random = np.random.default_rng(context.forward_id)
    confidence = random.random(context.num_tokens, dtype=np.float32)
    return ForwardOutcome(context, confidence, confidence > 0.7)


def demand_of(
    layer: int,
    context: ForwardContext,
    topk_ids: Sequence[Sequence[int]] | IntArray,
    gate_weights: Sequence[Sequence[float]],
    *,
    num_experts: int,
) -> LayerDemand:
    ids = np.array(topk_ids, dtype=np.int64)
    weights = np.array(gate_weights, dtype=np.float32)
    scores = np.full((len(ids), num_experts), 1 / 32, dtype=np.float32)
    np.put_along_axis(scores, ids, weights, axis=1)
    return LayerDemand.from_routing(
        layer, context, ids, weights, num_experts=num_experts, gate_scores=scores
    )


class FakeRouter:
    """Random demands in which, like in denoising, most of the last ones come back.

    `num_wanted` limits the experts a forward chooses from: 1 up to all of them.
    """

    def __init__(self, shape: MoeShape, seed: int) -> None:
        self._shape = shape
        self._random = np.random.default_rng(seed)
        self._popular = self._random.random((shape.num_layers, shape.num_experts))
        self.num_forwards = 0

    def context(self, num_tokens: int, phases: Sequence[Phase]) -> ForwardContext:
        confidence = self._random.integers(0, 17, num_tokens) / 16
        self.num_forwards += 1
        return context_of(self.num_forwards - 1, confidence.tolist(), phases=phases)

    def demand(
        self, layer: int, context: ForwardContext, *, num_wanted: int | None = None
    ) -> LayerDemand:
        shape, random = self._shape, self._random
        popular = self._popular[layer]
        popular += random.normal(0, 0.1, shape.num_experts)
        num_wanted = max(shape.top_k, num_wanted or shape.num_experts)
        wanted = np.argsort(popular)[:num_wanted]
        size = (context.num_tokens, len(wanted))
        topk_ids = wanted[np.argsort(random.random(size))[:, : shape.top_k]]
        gates = random.integers(1, 17, topk_ids.shape) / 16
        return demand_of(layer, context, topk_ids, gates.tolist(), num_experts=shape.num_experts)

    def forward(
        self,
        num_tokens: int = 6,
        *,
        phases: Sequence[Phase] = (Phase.DENOISE,),
        num_wanted: int | None = None,
    ) -> list[LayerDemand]:
        """The demands of all layers in one forward."""
        context = self.context(num_tokens, phases)
        return [
            self.demand(layer, context, num_wanted=num_wanted)
            for layer in range(self._shape.num_layers)
        ]


def random_store(
    num_layers: int, num_experts: int, *, hidden_size: int = 8, width: int = 6, seed: int = 0
) -> HostExpertStore:
    """Experts of fp32 random numbers, in host memory."""
    layout = ExpertLayout(hidden_size, width, torch.float32)
    store = HostExpertStore(layout, num_layers, num_experts)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(num_layers):
        for expert in range(num_experts):
            for matrix in store.weights(layer, expert):
                matrix.copy_(torch.randn(matrix.shape, generator=generator))
    return store


class CountedCopy:
    """Fills slots from a store and fails at the copies whose numbers, from 0, are given."""

    def __init__(self, store: HostExpertStore, fail_at: Sequence[int] = ()) -> None:
        self._store = store
        self._fail_at = set(fail_at)
        self.copied: list[tuple[int, int]] = []

    def __call__(self, layer: int, expert: int, slot: Tensor) -> None:
        number = len(self.copied)
        self.copied.append((layer, expert))
        if number in self._fail_at:
            # Half an expert is worse than none: what is left behind must not be taken for one.
            slot[:] = 0xFF
            raise OSError(f"copy {number} fails")
        self._store.read_into(layer, expert, slot)
