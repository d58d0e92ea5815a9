"""Experts from disk under a memory limit: time against the bound, and what prefetch is worth.

For each cache size `oled-moe bench --shape llada2-mini` runs `naive-lru`, `oled+` and
`oled+prefetch` over the same forwards in a process that may hold its plan and 5 % more (a cgroup,
where one can be made). Printed is each policy's time over the larger bound, and how much of what
`oled+prefetch` saves over `naive-lru` comes from fewer bytes read, how much from overlap: the first
is the difference in bytes copied over the disk rate measured around the forwards, the second is the
rest.

    python benchmarks/offload.py --experts-per-layer 64,102 --output results/raw/offload.jsonl
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import SLACK, limited_to, run_child
from provenance import provenance

from oled_moe.random_checkpoint import default_directory, make_random_checkpoint
from oled_moe.shapes import find_shape

POLICIES = ("naive-lru", "oled+", "oled+prefetch")
COLUMNS = (
    "policy",
    "experts_per_layer",
    "forward_s_median",
    "forward_s_ci",
    "forward_s_min",
    "roofline_s",
    "roofline_ratio",
    "roofline_ratio_ci",
    "roofline_ratio_best",
    "roofline_compute_s",
    "roofline_copy_s",
    "bound",
    "hit_rate",
    "weight_bytes_per_forward",
    "miss_bytes_per_forward",
    "load_bytes_per_forward",
    "prefetched_bytes_per_forward",
    "planning_share",
    "peak_rss_bytes",
    "plan_bytes",
    "num_forwards",
    "num_warmup",
    "num_repetitions",
    "disk_samples_bytes_per_s",
    "read_samples_bytes_per_s",
)


def run_bench(args: argparse.Namespace, capacity: float, limit: int | None) -> dict[str, Any]:
    """One call of the command line, limited."""
    command = [sys.executable, "-m", "oled_moe", "bench", "--shape", "llada2-mini"]
    command += ["--moe-layers", str(args.moe_layers), "--replay", args.replay]
    command += ["--experts-per-layer", f"{capacity:g}", "--policy", ",".join(POLICIES)]
    command += ["--forwards", str(args.forwards), "--repetitions", str(args.repetitions), "--json"]
    with limited_to(limit, args.disk_bytes_per_s) as (how, enter):
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=enter)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return {"limited_by": how, **json.loads(done.stdout)}


def shares(lru: dict[str, Any], best: dict[str, Any]) -> dict[str, float]:
    """What `best` saves over `lru`, and how much of it by fewer bytes and by overlap."""
    samples = lru["disk_samples_bytes_per_s"] + best["disk_samples_bytes_per_s"]
    rate = statistics.median(samples)
    saved_s = lru["forward_s_median"] - best["forward_s_median"]
    fewer_bytes = copied_bytes(lru) - copied_bytes(best)
    by_bytes_s = fewer_bytes / rate
    return {
        "saved_s": saved_s,
        "saved_by_bytes_s": by_bytes_s,
        "saved_by_overlap_s": saved_s - by_bytes_s,
    }


def copied_bytes(run: dict[str, Any]) -> float:
    """Bytes asked for per forward, wanted or guessed; guesses dropped in time are counted too."""
    return float(run["load_bytes_per_forward"] + run["prefetched_bytes_per_forward"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moe-layers", type=int, default=5)
    parser.add_argument("--experts-per-layer", default="64,102")
    parser.add_argument("--replay", default="synth:llada2-mini:block=32")
    parser.add_argument("--forwards", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument(
        "--disk-bytes-per-s", type=int, help="let the engine read no faster than this"
    )
    parser.add_argument("--unlimited", action="store_true", help="no memory limit")
    parser.add_argument("--output", type=Path, help="append one JSON row per policy and size")
    args = parser.parse_args()
    path = make_random_checkpoint(
        find_shape("llada2-mini").config_with(args.moe_layers),
        default_directory() / f"llada2-mini-{args.moe_layers}layers",
    )
    rows = []
    for capacity in map(float, args.experts_per_layer.split(",")):
        limit = None
        if not args.unlimited:
            probe = argparse.Namespace(
                experts_per_layer=capacity, replay=args.replay, warmup=0, forwards=1
            )
            found = run_child(probe, POLICIES[0], path, None)
            if "error" in found:
                raise SystemExit(found["error"])
            limit = int(SLACK * found["plan_bytes"])
        report = run_bench(args, capacity, limit)
        runs = {run["policy"]: run for run in report["runs"]}
        for run in report["runs"]:
            print(
                f"C {capacity:g} {run['policy']:14} {run['forward_s_median'] * 1e3:7.0f} ms  "
                f"bound {run['roofline_s'] * 1e3:6.0f} ms ({run['bound']})  "
                f"ratio {run['roofline_ratio']:.2f} "
                f"[{run['roofline_ratio_ci'][0]:.2f}, {run['roofline_ratio_ci'][1]:.2f}]  "
                f"misses {run['miss_bytes_per_forward'] / 1e6:5.0f} MB  "
                f"rss/plan {run['peak_rss_bytes'] / run['plan_bytes']:.3f}"
            )
        saved = shares(runs[POLICIES[0]], runs[POLICIES[-1]])
        print(
            f"C {capacity:g} {POLICIES[-1]} saves {saved['saved_s'] * 1e3:.0f} ms over "
            f"{POLICIES[0]}: {saved['saved_by_bytes_s'] * 1e3:.0f} ms by fewer bytes, "
            f"{saved['saved_by_overlap_s'] * 1e3:.0f} ms by overlap"
        )
        for run in report["runs"]:
            rows.append(
                {
                    "benchmark": "offload",
                    **provenance(),
                    "shape": "llada2-mini, random weights, routing replayed",
                    "moe_layers": args.moe_layers,
                    "replay": report["replay"],
                    "limited_by": report["limited_by"],
                    "limit_bytes": limit,
                    "disk_bytes_per_s": args.disk_bytes_per_s,
                    "is_idle": report.get("is_idle"),
                    **{name: run[name] for name in COLUMNS},
                    **(saved if run["policy"] == POLICIES[-1] else {}),
                }
            )
    if args.output:
        with args.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
