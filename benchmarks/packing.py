"""What a pack costs and gives: time and memory of `oled-moe pack`, reads of experts, a tight run.

A random checkpoint of LLaDA2-mini's experts, cut to a few MoE layers, is packed as stored, as int8
and as int4. `pack`: seconds and the most memory a packing process held beyond what it starts with.
`reads`: random experts per second, straight from disk, by reads in flight: from the checkpoint and
from the packs, in turn; with checksums not compared yet and compared before. `run`: replayed
forwards with expert memory that all experts fit in as int4 and not as bf16, so that bf16 comes from
disk. Everything lies under --directory.

    python benchmarks/packing.py [--part pack|reads|run] [--moe-layers 3] [--output FILE]
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from oled_moe.bench import median_interval
from oled_moe.checkpoint import Checkpoint, find_weights
from oled_moe.config import EngineConfig
from oled_moe.engine import Engine
from oled_moe.models import find_family
from oled_moe.packing import pack_checkpoint
from oled_moe.random_checkpoint import make_random_checkpoint
from oled_moe.replay import Replayer, load_replay
from oled_moe.shapes import SHAPES
from oled_moe.store import DiskExpertStore, SlotArena
from oled_moe.types import Phase

FORMS = ("bf16", "int8", "int4")
DEPTHS = (1, 2, 4)
NUM_READS = 96
NUM_REPETITIONS = 5
REPLAY = "synth:llada2-mini:block=32"
NUM_WARMUP, NUM_FORWARDS = 10, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("pack", "reads", "run"))
    parser.add_argument("--moe-layers", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("packing-benchmark"))
    parser.add_argument("--output", type=Path)
    # For the process whose memory is measured.
    parser.add_argument("--only-pack", nargs=3)
    arguments = parser.parse_args()
    if arguments.only_pack:
        print(json.dumps(pack_here(*arguments.only_pack)))
        return
    config = dict(SHAPES["llada2-mini"].config)
    config["num_hidden_layers"] = arguments.moe_layers + config["first_k_dense_replace"]
    source = make_random_checkpoint(config, (arguments.directory / "source").absolute())
    parts = {"pack": measure_pack, "reads": measure_reads, "run": measure_run}
    for name, measure in parts.items():
        if arguments.part in (None, name):
            for row in measure(source, arguments.directory.absolute()):
                line = json.dumps({"part": name, **row, "provenance": provenance()})
                print(json.dumps({"part": name, **row}))
                if arguments.output is not None:
                    with open(arguments.output, "a", encoding="utf-8") as file:
                        file.write(line + "\n")


def pack_here(source: str, out: str, form: str) -> dict[str, Any]:
    start_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s = time.perf_counter()
    report = pack_checkpoint(source, Path(out), dtype=form)
    return {
        "form": form,
        "seconds": time.perf_counter() - start_s,
        "source_bytes": report.source_bytes,
        "pack_bytes": report.pack_bytes,
        "start_bytes": 1024 * start_kib,
        "most_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def measure_pack(source: Path, directory: Path) -> Iterator[dict[str, Any]]:
    for form in FORMS:
        out = directory / form
        if out.exists():
            print(f"{out} is there and not packed again", file=sys.stderr)
            continue
        command = [sys.executable, __file__, "--only-pack", str(source), str(out), form]
        yield json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def open_store(path: Path) -> DiskExpertStore:
    checkpoint = Checkpoint.open(path)
    family = find_family(checkpoint.config)
    config = family.config(checkpoint.config)
    found = find_weights(
        checkpoint,
        map_weight=family.weight_map(config),
        shapes=family.parameter_shapes(config),
        num_moe_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        dtype=None,
    )
    return found.open_store("direct")


def measure_reads(source: Path, directory: Path) -> Iterator[dict[str, Any]]:
    stores = {"checkpoint": open_store(source)}
    stores |= {form: open_store(directory / form) for form in FORMS}
    generator = random.Random(1)
    for depth in DEPTHS:
        seconds: dict[str, list[float]] = {name: [] for name in stores}
        arenas = {name: SlotArena.empty(store.layout, depth) for name, store in stores.items()}
        for arena in arenas.values():
            arena.memory.zero_()
        with ThreadPoolExecutor(depth) as threads:
            for _ in range(NUM_REPETITIONS):
                for name, store in stores.items():
                    seconds[name].append(read_some(store, arenas[name], threads, generator))
        for name, store in stores.items():
            rate = NUM_READS / statistics.median(seconds[name])
            yield {
                "store": name,
                "depth": depth,
                "method": store.method,
                "slot_bytes": store.layout.slot_bytes,
                "experts_per_s": rate,
                "bytes_per_s": rate * store.layout.slot_bytes,
                "fastest_experts_per_s": NUM_READS / min(seconds[name]),
            }
    slot = arenas["bf16"].slot(0).numpy()
    times = []
    for _ in range(20):
        start_s = time.perf_counter()
        zlib.crc32(slot)
        times.append(time.perf_counter() - start_s)
    yield {"checksum_s": statistics.median(times), "num_bytes": slot.nbytes}
    for store in stores.values():
        store.close()


def read_some(
    store: DiskExpertStore, arena: SlotArena, threads: ThreadPoolExecutor, generator: random.Random
) -> float:
    """Random experts, each worker into a slot of its own."""
    num_workers = len(arena)
    ids = [
        (generator.randrange(store.num_layers), generator.randrange(store.num_experts))
        for _ in range(NUM_READS)
    ]

    def work(worker: int) -> None:
        for layer, expert in ids[worker::num_workers]:
            store.read_into(layer, expert, arena.slot(worker))

    start_s = time.perf_counter()
    list(threads.map(work, range(num_workers)))
    return time.perf_counter() - start_s


def measure_run(source: Path, directory: Path) -> Iterator[dict[str, Any]]:
    """Denoising forwards with the same expert memory: what int4 takes whole.

    Routing is replayed, as that of random weights is not alike from step to step.
    """
    with Engine(directory / "int4", EngineConfig(expert_memory="100%")) as engine:
        expert_memory = engine.memory_plan.expert_memory_bytes
    cached = EngineConfig(expert_memory=expert_memory, max_model_len=1024)
    uncached = EngineConfig(experts_per_layer=0, max_model_len=1024)
    stores = (
        ("int4", directory / "int4", cached),
        ("checkpoint", source, cached),
        ("checkpoint, nothing kept", source, uncached),
    )
    medians: dict[str, list[float]] = {}
    # Each twice, as the machine may change meanwhile.
    for name, path, config in stores * 2:
        with Engine(path, config) as engine, torch.inference_mode():
            plan = engine.memory_plan
            replay = load_replay(REPLAY, plan.shape, num_forwards=NUM_WARMUP + NUM_FORWARDS)
            done = Replayer(engine, replay.trace).run(NUM_WARMUP + NUM_FORWARDS)
        denoising = [each for each in done if each.phase == Phase.DENOISE][NUM_WARMUP:]
        seconds = median_interval([each.seconds for each in denoising])
        medians.setdefault(name, []).append(seconds.median)
        yield {
            "store": name,
            "replay": replay.words,
            "expert_memory_bytes": plan.expert_memory_bytes,
            "num_slots": plan.num_slots,
            "num_experts": plan.shape.num_experts_total,
            "num_forwards": len(denoising),
            "forward_s": seconds.median,
            "forward_s_low": seconds.low,
            "forward_s_high": seconds.high,
            "bytes_per_forward": statistics.mean(
                each.num_loads * plan.shape.expert_bytes for each in denoising
            ),
        }
    for name in list(medians)[1:]:
        yield {
            "int4_against": name,
            "speedup": statistics.mean(medians[name]) / statistics.mean(medians["int4"]),
            "speedup_least": min(medians[name]) / max(medians["int4"]),
        }


if __name__ == "__main__":
    main()
