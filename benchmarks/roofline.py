"""How near one expert comes to what memory and arithmetic of this machine allow.

Run `python benchmarks/roofline.py --quick`; `--output` appends the row as JSON. The roof for N
rows is the larger of reading the weights once at the best bandwidth and computing 6·N·D·F
operations at the best matrix rate.
"""

import argparse
import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import torch

from oled_moe.config import DTYPES
from oled_moe.profiler import Measurements, measure_hardware, to_profile


def roof_s(found: Measurements, num_rows: int) -> float:
    """The shortest time that bandwidth and arithmetic leave for one expert."""
    read_s = found.expert_bytes / found.memory_read_bytes_per_s.maximum
    flops = 6 * num_rows * found.hidden_size * found.intermediate_size
    return max(read_s, flops / found.matrix_flops_per_s.maximum)


def print_table(found: Measurements) -> None:
    memory, matrix = found.memory_read_bytes_per_s, found.matrix_flops_per_s
    print(f"\n{found.machine['cpu_model']}, {found.num_threads} threads, {found.dtype}")
    print(f"at best {memory.maximum / 1e9:.1f} GB/s read, {matrix.maximum / 1e9:.0f} GFLOP/s")
    print("\nrows   median us   fastest us   roof us   share of roof")
    for row in found.expert_times:
        roof, took = roof_s(found, row.num_rows), row.seconds
        print(
            f"{row.num_rows:4}  {took.median * 1e6:10.0f}  {took.minimum * 1e6:11.0f}  "
            f"{roof * 1e6:8.0f}  {roof / took.median:14.0%}"
        )
    print("\ncold reads   in flight   GB/s (least to most)")
    for read in found.disk_reads:
        rate = read.bytes_per_s
        print(
            f"{read.method:10}  {read.queue_depth:10}   {rate.median / 1e9:.2f} "
            f"({rate.minimum / 1e9:.2f} to {rate.maximum / 1e9:.2f})"
        )
    for warning in found.warnings:
        print(f"warning: {warning}")


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="seconds instead of half a minute")
    parser.add_argument("--directory", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, help="file to append the row to, as JSON")
    options = parser.parse_args()
    found = measure_hardware(
        device="cpu",
        directory=options.directory,
        expert_shape=(options.hidden_size, options.intermediate_size),
        dtype=getattr(torch, options.dtype),
        threads=options.threads,
        is_quick=options.quick,
        report=lambda step: print(f"measuring {step}", flush=True),
    )
    print_table(found)
    if options.output is not None:
        row = {
            "benchmark": "roofline",
            "commit": commit(),
            "profile": asdict(to_profile(found, "cpu")),
            "measurements": found.to_dict(),
        }
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
