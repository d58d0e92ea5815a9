"""How long a replay takes: about 1,000 forwards of 20 layers with 256 experts, blocks of 32.

    python benchmarks/simulation.py

Prints one JSON row per policy: seconds of CPU time of one core, reading the trace included.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from provenance import provenance

from oled_moe.hardware import load_hardware
from oled_moe.simulator import simulate
from oled_moe.synthesis import synthesize
from oled_moe.traces import load_trace, save_trace

POLICIES = ("naive-lru", "oled", "oled+", "oled+prefetch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts-per-layer", type=float, default=40)
    capacity = parser.parse_args().experts_per_layer
    trace = synthesize("llada2-mini", seed=0, num_requests=16, block_length=32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replayed.trace.safetensors"
        save_trace(trace, path)
        for policy in POLICIES:
            start_s = time.process_time()
            report = simulate(
                load_trace(path),
                policy,
                experts_per_layer=capacity,
                hardware=load_hardware("testbed-a"),
            )
            row = {
                "benchmark": "simulation",
                "policy": policy,
                "experts_per_layer": capacity,
                "num_forwards": report.num_forwards,
                "cpu_s": round(time.process_time() - start_s, 2),
            }
            print(json.dumps(row | provenance()), flush=True)


if __name__ == "__main__":
    main()
