"""Score the bundled demo model through the engine, a quarter of its experts in memory.

    python experiments/01_demo_model/score.py

Greedy, block 16, threshold 0.95, every held-out question once; prints exact answers and answer
tokens per forward (denoising and commit forwards) and writes results/raw/01_demo_model.jsonl, one
row per group. `evaluate.py` is the same score from the training code's own slow decoding.
"""

import argparse
import hashlib
import json
import platform
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import tasks
import torch
from evaluate import Scored, limit_each_group, read_records, summarise

from oled_moe import Engine, EngineConfig, SamplingParams, __version__
from oled_moe.model_paths import find_model

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "results" / "raw" / "01_demo_model.jsonl"
MAX_TOKENS = 96


def score(engine: Engine, record: dict[str, Any]) -> Scored:
    """One question as a user turn; a forced prefix is the start of the reply."""
    assert engine.tokenizer is not None
    messages = [{"role": "user", "content": record["question"]}]
    prefix = record.get("prefix", "")
    prompt = engine.tokenizer.apply_chat_template(messages) + prefix
    params = SamplingParams(
        max_tokens=MAX_TOKENS, block_length=16, threshold=0.95, temperature=0, eos_early_stop=True
    )
    result = engine.generate(prompt, params)
    answer = prefix + (result.text or "")
    num_forwards = result.stats.num_denoise_forwards + result.stats.num_commit_forwards
    is_right = result.finish_reason == "stop" and tasks.grade(record, answer)
    return Scored(record, answer, is_right, len(result.token_ids), num_forwards)


def groups(scored: list[Scored]) -> dict[str, dict[str, float]]:
    """Stories and the two JSON forms by themselves, then each family without its JSON forms."""
    by_group = summarise(scored)
    for family in tasks.FAMILIES:
        record = {"form": "", "family": f"family {family}"}
        members = [
            replace(item, record=record)
            for item in scored
            if item.record["family"] == family and not item.record["form"].startswith("json")
        ]
        by_group |= summarise(members)
    return by_group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: as stored")
    parser.add_argument("--limit", type=int, default=0, help="questions of each group, 0 for all")
    parser.add_argument("--errors", action="store_true", help="print every wrong answer")
    parser.add_argument("--no-rows", action="store_true", help="do not write the rows")
    arguments = parser.parse_args()
    folder = find_model("demo")
    records = read_records(folder / "heldout.jsonl")
    if arguments.limit:
        records = limit_each_group(records, arguments.limit)
    config = EngineConfig(expert_memory="25%", dtype=arguments.dtype, threads=1)
    with Engine("demo", config) as engine:
        scored = [score(engine, record) for record in records]
    weights = (folder / "model.safetensors").read_bytes()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    base = {
        "experiment": "01_demo_model",
        "version": 1,
        "commit": commit,
        "model_sha256": hashlib.sha256(weights).hexdigest()[:16],
        "dtype": arguments.dtype or "as stored (bfloat16)",
        "block_length": 16,
        "threshold": 0.95,
        "expert_memory": "25%",
        "versions": {
            "oled_moe": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    rows = []
    for item in scored:
        if arguments.errors and not item.is_right:
            print(json.dumps({**item.record, "answer": item.answer}))
    for name, entry in groups(scored).items():
        print(
            f"{name:20} {entry['accuracy']:6.1%} of {entry['num']:4.0f}"
            f"  {entry['tokens_per_forward']:.2f} tokens/forward"
        )
        rows.append(base | {"group": name, **entry})
    if not arguments.no_rows and not arguments.limit:
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
