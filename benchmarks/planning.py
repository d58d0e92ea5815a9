"""How long deciding takes: median time of ExpertCache.plan per layer at LLaDA2-mini's shape.

Demands are synthetic: 32 tokens, top-8 of 256 experts. Popularity is skewed so that a block of 16
activates about 60 experts, as the paper reports for mini (policies.md 3), which makes about 80 at
block 32; 13 of the 32 tokens change their route from one pass to the next, which makes adjacent
passes overlap by about 0.87. `--even` spreads popularity, for a harder case of about 117
active experts. Prints one JSON line per policy and capacity. No weights, no torch.

    python benchmarks/planning.py [--even]
"""

import argparse
import json
import time

import numpy as np
from provenance import provenance

from oled_moe.cache import ExpertCache
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, CostModel
from oled_moe.policies import POLICIES, build_policy
from oled_moe.types import (
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    LayerDemand,
    MoeShape,
    Phase,
    TokenState,
)

SHAPE = MoeShape(num_layers=19, num_experts=256, top_k=8, expert_bytes=6 * 2**20)
NUM_TOKENS = 32
NUM_FORWARDS = 60
NUM_WARM_UP = 10


def routings(seed: int, *, skew: float = 0.2) -> list[np.ndarray]:
    """[forward][layer] -> ids [T, K]: each token keeps most of its experts from pass to pass."""
    random = np.random.default_rng(seed)
    popularity = random.gamma(skew, size=(SHAPE.num_layers, SHAPE.num_experts)) + 1e-6
    popularity /= popularity.sum(axis=1, keepdims=True)
    current = np.stack(
        [
            np.stack(
                [
                    random.choice(
                        SHAPE.num_experts, SHAPE.top_k, replace=False, p=popularity[layer]
                    )
                    for _ in range(NUM_TOKENS)
                ]
            )
            for layer in range(SHAPE.num_layers)
        ]
    )
    passes = []
    for _ in range(NUM_FORWARDS):
        passes.append(current.copy())
        for layer in range(SHAPE.num_layers):
            for token in random.choice(NUM_TOKENS, 13, replace=False):
                current[layer, token] = random.choice(
                    SHAPE.num_experts, SHAPE.top_k, replace=False, p=popularity[layer]
                )
    return passes


def measure(policy: str, experts_per_layer: int, passes: list[np.ndarray]) -> dict[str, object]:
    costs = CostModel.from_profile(DEFAULT_EMULATED_PROFILE, SHAPE.expert_bytes)
    cache = ExpertCache(
        SHAPE,
        build_policy(policy, SHAPE, costs),
        num_slots=experts_per_layer * SHAPE.num_layers,
        num_staging=8,
        has_cpu_experts=True,
    )
    cache.place()
    random = np.random.default_rng(1)
    seconds, active, misses, overlaps = [], [], [], []
    last: dict[int, np.ndarray] = {}
    for forward_id, routed in enumerate(passes):
        context = ForwardContext(
            forward_id,
            NUM_TOKENS,
            (ForwardRow(0, 0, forward_id, Phase.DENOISE, NUM_TOKENS),),
            random.uniform(0.1, 1.0, NUM_TOKENS).astype(np.float32),
            np.full(NUM_TOKENS, TokenState.MASKED, dtype=np.uint8),
            np.arange(NUM_TOKENS),
        )
        cache.start_forward(context)
        for layer in range(SHAPE.num_layers):
            gates = random.dirichlet(np.ones(SHAPE.top_k), NUM_TOKENS).astype(np.float32)
            ids = routed[layer]
            start = time.perf_counter()
            demand = LayerDemand.from_routing(
                layer, context, ids, gates, num_experts=SHAPE.num_experts
            )
            plan = cache.plan(demand)
            elapsed = time.perf_counter() - start
            if forward_id >= NUM_WARM_UP:
                seconds.append(elapsed)
                active.append(len(demand.expert_ids))
                misses.append(len(plan.load_ids) + len(plan.cpu_ids))
                overlaps.append(np.isin(demand.expert_ids, last[layer]).mean())
            last[layer] = demand.expert_ids
        cache.end_forward(
            ForwardOutcome(context, context.token_confidence, context.token_state == 0)
        )
    return {
        "benchmark": "planning",
        "policy": policy,
        "experts_per_layer": experts_per_layer,
        "median_us": round(float(np.median(seconds)) * 1e6, 1),
        "p90_us": round(float(np.quantile(seconds, 0.9)) * 1e6, 1),
        "mean_active": round(float(np.mean(active)), 1),
        "mean_overlap": round(float(np.mean(overlaps)), 3),
        "mean_misses": round(float(np.mean(misses)), 1),
        "num_plans": len(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--even", action="store_true", help="about 117 active experts a layer")
    parser.add_argument("--policy", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    passes = routings(seed=0, skew=0.6 if arguments.even else 0.2)
    base = provenance()
    live = [name for name, entry in POLICIES.items() if not entry.is_clairvoyant]
    # These demands hold no gate scores.
    specs = ["finemoe:maps=topk" if name == "finemoe" else name for name in live]
    for policy in arguments.policy or specs:
        for experts_per_layer in (40, 100, 180):
            row = measure(policy, experts_per_layer, passes) | base
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
