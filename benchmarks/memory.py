"""Peak memory against the printed plan, with a checkpoint four times larger than --expert-memory.

Writes a synthetic LLaDA2 checkpoint (random weights, bf16, 2.0-mini's shard convention) whose
routed experts take four times the budget, runs it in a process of its own, and compares that
process's peak resident memory (VmHWM) with the plan's total. The page cache is dropped while
reading, so it neither hides nor doubles what experts take. Prints one JSON line per run.

    python benchmarks/memory.py [--directory DIR] [--keep]
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance

CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2560,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 9,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
    "mask_token_id": 32000,
    "eos_token_id": 32001,
}
EXPERT_BYTES = 3 * 1024 * 512 * 2
ALL_EXPERTS_BYTES = 8 * 64 * EXPERT_BYTES
BUDGET_BYTES = ALL_EXPERTS_BYTES // 4


def run_child(directory: str, policy: str) -> None:
    """Generate under the budget and print what it took; runs alone in its process."""
    from oled_moe import Engine, EngineConfig, SamplingParams

    config = EngineConfig(expert_memory=BUDGET_BYTES, policy=policy)
    with Engine(directory, config) as engine:
        # Long enough for prefill in pieces, whose activations are the largest.
        prompt = [(i * 7919) % 32000 for i in range(3000)]
        params = SamplingParams(max_tokens=64, block_length=32, steps=8, ignore_eos=True)
        stats = engine.generate(prompt, params).stats
        plan = engine.memory_plan
        peak_bytes = peak_rss_bytes()
        print(
            json.dumps(
                {
                    "benchmark": "memory",
                    "policy": policy,
                    "experts_bytes": ALL_EXPERTS_BYTES,
                    "expert_memory_bytes": BUDGET_BYTES,
                    "plan": dict(plan.lines()),
                    "plan_bytes": plan.total_bytes,
                    "peak_rss_bytes": peak_bytes,
                    "peak_over_plan": round(peak_bytes / plan.total_bytes, 4),
                    "max_resident_experts": stats.max_resident_experts,
                    "slots_and_staging": plan.num_slots + plan.num_staging,
                    "bytes_loaded": stats.bytes_loaded,
                }
            )
        )


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not report VmHWM")


def write_synthetic(directory: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import torch
    from checkpoints import synthetic_llada2, write_checkpoint

    weights = synthetic_llada2(CONFIG, dtype=torch.bfloat16, seed=0)
    write_checkpoint(directory, weights, CONFIG, convention="llada20", num_files=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="where to write the checkpoint (1.6 GB)")
    parser.add_argument("--policy", default="oled")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_child(arguments.child, arguments.policy)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        write_synthetic(Path(scratch))
        child = [sys.executable, __file__, "--child", scratch, "--policy", arguments.policy]
        row = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
    print(json.dumps(row | provenance()))
    if row["peak_over_plan"] > 1.1:
        raise SystemExit("peak memory exceeds the plan by more than 10 %")


if __name__ == "__main__":
    main()
