"""A retention policy of one's own on the bundled demo model.

    python examples/own_policy.py

A policy is plain code over plain arrays: it is shown what each layer's router asked for and gives
every expert a score; the cache keeps the best. This one keeps what most tokens asked for lately.
"""

import numpy as np

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.policies import OffloadPolicy
from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import LoadAllDispatchPolicy
from oled_moe.types import FloatArray, IntArray, LayerDemand


class DecayedTokensRetentionPolicy:
    """Scores experts by their tokens, each forward counting half as much as the next."""

    is_stack = True

    def __init__(self) -> None:
        self._tokens: dict[int, dict[int, float]] = {}

    def observe(self, demand: LayerDemand) -> None:
        layer = self._tokens.setdefault(demand.layer, {})
        for expert in layer:
            layer[expert] /= 2
        for expert, count in zip(demand.expert_ids, demand.num_tokens, strict=True):
            layer[int(expert)] = layer.get(int(expert), 0.0) + float(count)

    def keep_scores(self, expert_ids: IntArray, demand: LayerDemand) -> FloatArray:
        layer = self._tokens[demand.layer]
        return np.array([layer.get(int(expert), 0.0) for expert in expert_ids])


QUESTIONS = ("What is 12 + 30?", "What is the capital of Peru?", "Calculate 7 * 8.")


def main() -> None:
    own = OffloadPolicy(
        "decayed-tokens",
        DecayedTokensRetentionPolicy(),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
    )
    # One token per pass: with many passes over a block there is something to keep from one to the
    # next, as with large models.
    params = SamplingParams(max_tokens=64, threshold=1.0, eos_early_stop=True)
    for policy in ("naive-lru", own, "priority"):
        with Engine("demo", EngineConfig(experts_per_layer=24, policy=policy)) as engine:
            assert engine.tokenizer is not None
            results = []
            for question in QUESTIONS:
                messages = [{"role": "user", "content": question}]
                prompt = engine.tokenizer.apply_chat_template(messages)
                results.append(engine.generate(prompt, params))
            hit_rate = sum(result.stats.hit_rate for result in results) / len(results)
            answers = "; ".join(result.text or "" for result in results)
            print(f"{engine.policy.name:15} hit rate {hit_rate:.3f}  {answers}")


if __name__ == "__main__":
    main()
