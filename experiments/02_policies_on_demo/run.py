"""Every policy on the demo model at several capacities: hits, loads and bytes, counted live.

    python experiments/02_policies_on_demo/run.py

Writes results/raw/02_policies_on_demo.jsonl, one row per (threshold, policy, capacity). Counts are
exact and repeat; no time is reported here.
"""

import argparse
import hashlib
import json
import platform
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from oled_moe import Engine, EngineConfig, SamplingParams, __version__
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.metrics import GenerationStats
from oled_moe.model_paths import find_model

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "results" / "raw" / "02_policies_on_demo.jsonl"
CAPACITIES = (8, 12, 16, 24, 32, 48, 64)
LOAD_POLICIES = ("naive-lru", "lfu", "priority", "priority+adapt")
DISPATCH_POLICIES = ("oled-load-aware", "oled")
NUM_WARM_UP = 3
# As the model is meant to be run: it fills a block in one or two passes. And above any probability:
# one token per pass, which gives the many passes per block that large models need.
THRESHOLDS = (0.95, 1.0)


def questions(num_questions: int) -> list[str]:
    """The first held-out questions of each family in turn, the same for every row."""
    path = find_model("demo") / "heldout.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    by_family: dict[str, list[str]] = {}
    for record in records:
        by_family.setdefault(record["family"], []).append(record["question"])
    turns = zip(*by_family.values(), strict=False)
    return [question for turn in turns for question in turn][:num_questions]


def answer_all(
    engine: Engine, texts: list[str], threshold: float
) -> tuple[list[list[int]], list[GenerationStats]]:
    assert engine.tokenizer is not None
    params = SamplingParams(max_tokens=96, eos_early_stop=True, threshold=threshold)
    tokens, stats = [], []
    for text in texts:
        messages = [{"role": "user", "content": text}]
        result = engine.generate(engine.tokenizer.apply_chat_template(messages), params)
        tokens.append(result.token_ids)
        stats.append(result.stats)
    return tokens, stats


def measure(
    threshold: float, policy: str, capacity: int, device: str, texts: list[str]
) -> dict[str, Any]:
    hardware = DEFAULT_EMULATED_PROFILE if device == "emulated" else DEFAULT_PROFILE
    config = EngineConfig(
        device=device, policy=policy, experts_per_layer=capacity, hardware=hardware, threads=1
    )
    with Engine("demo", config) as engine:
        answer_all(engine, texts[:NUM_WARM_UP], threshold)
        tokens, stats = answer_all(engine, texts[NUM_WARM_UP:], threshold)
        num_experts = engine.model_config.num_experts
    num_forwards = sum(s.num_denoise_forwards + s.num_commit_forwards for s in stats)
    num_denoise = sum(s.num_denoise_forwards for s in stats)

    def mean(name: str) -> float:
        return sum(getattr(s, name) * s.num_denoise_forwards for s in stats) / num_denoise

    return {
        "threshold": threshold,
        "policy": policy,
        "experts_per_layer": capacity,
        "num_experts": num_experts,
        "device": device,
        "hardware": asdict(hardware),
        "num_tokens": sum(map(len, tokens)),
        "num_forwards": num_forwards,
        "hit_rate": mean("hit_rate"),
        "expert_cache_utilization": mean("expert_cache_utilization"),
        "effective_transfer_ratio": mean("effective_transfer_ratio"),
        "expert_loads": sum(s.expert_loads for s in stats),
        "cpu_expert_runs": sum(s.cpu_expert_runs for s in stats),
        "loads_per_forward": sum(s.expert_loads for s in stats) / num_forwards,
        "tokens_sha256": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16],
    }


def provenance(num_questions: int) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    model = (find_model("demo") / "model.safetensors").read_bytes()
    return {
        "experiment": "02_policies_on_demo",
        "version": 1,
        "commit": commit,
        "model": "demo",
        "model_sha256": hashlib.sha256(model).hexdigest()[:16],
        "num_questions": num_questions,
        "warm_up": NUM_WARM_UP,
        "seed": 0,
        "versions": {
            "oled_moe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-questions", type=int, default=21)
    arguments = parser.parse_args()
    texts = questions(arguments.num_questions)
    base = provenance(len(texts) - NUM_WARM_UP)
    cells = [(p, c, "cpu") for p in LOAD_POLICIES for c in CAPACITIES]
    cells += [(p, c, "emulated") for p in DISPATCH_POLICIES for c in CAPACITIES]
    with ROWS.open("w") as file:
        for threshold in THRESHOLDS:
            for cell in cells:
                row = base | measure(threshold, *cell, texts)
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(threshold, *cell, f"hit rate {row['hit_rate']:.3f}", flush=True)


if __name__ == "__main__":
    main()
