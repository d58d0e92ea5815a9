"""Other ways to run a model whose experts do not fit, beside ours: same forwards, same memory.

Every system runs in a process of its own under one memory limit (a cgroup; where none can be made,
a locked ballast leaves just that much), one after another, round by round. All replay the same
routing at LLaDA2-mini's shape with random weights, through the same attention, head and dense
parts; only where routed experts come from differs:

    oled-moe P    our engine with policy P and so many experts per layer as the limit holds
    mmap          the checkpoint memory-mapped, computed in place by our kernel; the page cache is
                  the expert cache
    mmap+announce the same, with the demanded experts announced to the system (MADV_WILLNEED)
    accelerate    Hugging Face accelerate's disk offload of the same experts as nn.Modules
    eager         torch, every expert in RAM, one after another, outside the limit
    resident      ours with every expert in RAM, outside the limit

    pip install accelerate
    python benchmarks/peers.py --experts-per-layer 64 --output results/raw/peers.jsonl
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from provenance import provenance
from torch import Tensor, nn

from oled_moe import Engine, EngineConfig
from oled_moe.checkpoint import Checkpoint
from oled_moe.experts import OffloadedExperts, PendingLayer
from oled_moe.kernels import KERNELS, EachExpert, ExpertKernel, reference
from oled_moe.models import find_family
from oled_moe.random_checkpoint import default_directory, make_random_checkpoint
from oled_moe.replay import Replayer, load_replay
from oled_moe.shapes import find_shape
from oled_moe.store import ExpertLayout, ExpertPart, HostExpertStore, SlotArena
from oled_moe.types import ForwardContext, IntArray, LayerDemand, Phase

OURS = ("naive-lru", "oled+", "oled+prefetch")
PEERS = ("mmap", "mmap+announce", "accelerate")
UNLIMITED = ("eager", "resident")
SLACK = 1.05


class PeerExperts:
    """Experts without a cache of ours: rows sorted by expert, one call, the same sum."""

    def __init__(self, experts: OffloadedExperts) -> None:
        self._experts = experts
        self.wants_gate_scores = False

    def start(
        self,
        layer: int,
        hidden_TD: Tensor,
        topk_ids_TK: Tensor,
        gate_weights_TK: Tensor,
        context: ForwardContext,
        gate_scores_TE: Tensor | None = None,
    ) -> PendingLayer:
        topk_ids, gates = topk_ids_TK.numpy(), gate_weights_TK.numpy()
        if self._experts.routing is not None:
            topk_ids, gates = self._experts.routing(layer, context)
        num_experts = self._experts.cache.shape.num_experts
        demand = LayerDemand.from_routing(layer, context, topk_ids, gates, num_experts=num_experts)
        pending = self._experts._prepare(demand, hidden_TD, [])
        self.announce(layer, demand.expert_ids)
        return pending

    def finish(self, pending: PendingLayer, weights_TK: Tensor) -> Tensor:
        starts, ends = pending.rows_of(pending.demand.expert_ids)
        self.compute(pending, pending.demand.expert_ids, starts, ends)
        return self._experts._combine(pending, weights_TK)

    def announce(self, layer: int, expert_ids: IntArray) -> None:
        """Tell whoever reads what is coming."""

    def compute(
        self, pending: PendingLayer, expert_ids: IntArray, starts: IntArray, ends: IntArray
    ) -> None:
        raise NotImplementedError


class ArenaExperts(PeerExperts):
    """Weights in one arena a layer, wherever its memory comes from."""

    def __init__(
        self, experts: OffloadedExperts, arenas: list[SlotArena], kernel: ExpertKernel
    ) -> None:
        super().__init__(experts)
        self._arenas = arenas
        self._kernel = kernel

    def compute(
        self, pending: PendingLayer, expert_ids: IntArray, starts: IntArray, ends: IntArray
    ) -> None:
        arena = self._arenas[pending.demand.layer]
        self._kernel(arena, pending.rows_ND, pending.out_ND, expert_ids, starts, ends)


class MappedExperts(ArenaExperts):
    """The checkpoint's files, mapped. Its experts lie one behind another, as in a slot."""

    def __init__(
        self,
        experts: OffloadedExperts,
        checkpoint: Checkpoint,
        layout: ExpertLayout,
        *,
        is_announced: bool,
    ) -> None:
        self._is_announced = is_announced
        self._maps: list[mmap.mmap] = []
        self._starts: list[int] = []
        arenas = []
        for path, start, num_experts in expert_regions(checkpoint, layout):
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            mapped.madvise(mmap.MADV_RANDOM)
            self._maps.append(mapped)
            self._starts.append(start)
            count = num_experts * layout.slot_bytes
            values = np.frombuffer(mapped, dtype=np.uint8, count=count, offset=start)
            with warnings.catch_warnings():
                # Nothing writes to it.
                warnings.simplefilter("ignore")
                memory = torch.from_numpy(values).view(num_experts, layout.slot_bytes)
            arenas.append(SlotArena(layout, memory))
        self._slot_bytes = layout.slot_bytes
        super().__init__(experts, arenas, KERNELS["cpu"](torch.get_num_threads()))

    def announce(self, layer: int, expert_ids: IntArray) -> None:
        if self._is_announced:
            for expert in expert_ids.tolist():
                start = self._starts[layer] + expert * self._slot_bytes
                self._maps[layer].madvise(mmap.MADV_WILLNEED, start, self._slot_bytes)


def expert_regions(checkpoint: Checkpoint, layout: ExpertLayout) -> list[tuple[Path, int, int]]:
    """For each MoE layer the file, first byte and number of experts, which must be slots as we
    lay them out: true of checkpoints that `random_checkpoint` made."""
    family = find_family(checkpoint.config)
    model = family.config(checkpoint.config)
    weight_map = family.weight_map(model)
    targets = {"gate": 0, "up": layout.matrix_bytes, "down": layout.down_offset}
    firsts: list[set[tuple[Path, int]]] = [set() for _ in range(model.num_moe_layers)]
    for record in checkpoint.tensors.values():
        part = weight_map(record.name)
        if isinstance(part, ExpertPart):
            assert part.expert is not None
            start = record.offset - targets[part.matrix] - part.expert * layout.slot_bytes
            firsts[part.layer].add((record.path, start))
    assert all(len(first) == 1 for first in firsts), "experts do not lie like slots"
    return [(*first.pop(), model.num_experts) for first in firsts]


class AccelerateExperts(PeerExperts):
    """nn.Modules whose weights accelerate reads from the checkpoint before each is called."""

    def __init__(
        self, experts: OffloadedExperts, checkpoint: Checkpoint, layout: ExpertLayout, folder: Path
    ) -> None:
        super().__init__(experts)
        from accelerate import disk_offload, init_empty_weights

        family = find_family(checkpoint.config)
        model = family.config(checkpoint.config)
        weight_map = family.weight_map(model)
        with init_empty_weights():
            self._layers = nn.ModuleList(
                nn.ModuleList(
                    ExpertModule(layout.hidden_size, layout.intermediate_size)
                    for _ in range(model.num_experts)
                )
                for _ in range(model.num_moe_layers)
            ).to(layout.dtype)
        index = {}
        for record in checkpoint.tensors.values():
            part = weight_map(record.name)
            if isinstance(part, ExpertPart):
                index[f"{part.layer}.{part.expert}.{part.matrix}_proj.weight"] = {
                    "safetensors_file": str(record.path),
                    "weight_name": record.name,
                    "dtype": str(layout.dtype).removeprefix("torch."),
                    "shape": list(record.shape),
                }
        (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
        disk_offload(self._layers, str(folder), execution_device=torch.device("cpu"))

    def compute(
        self, pending: PendingLayer, expert_ids: IntArray, starts: IntArray, ends: IntArray
    ) -> None:
        layer: Any = self._layers[pending.demand.layer]
        for expert, start, end in zip(expert_ids, starts, ends, strict=True):
            pending.out_ND[start:end] = layer[expert](pending.rows_ND[start:end])


class ExpertModule(nn.Module):
    """One expert as Transformers writes it."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, rows_ND: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(rows_ND)) * self.up_proj(rows_ND))


# One system, in its own process


def run_system(args: argparse.Namespace) -> dict[str, Any]:
    """Replay the forwards and say what each denoising one took."""
    path = Path(args.checkpoint)
    is_ours = args.system not in PEERS and args.system != "eager"
    capacity = 256.0 if args.system == "resident" else args.experts_per_layer
    config = EngineConfig(
        device="cpu",
        policy=args.system if args.system in OURS else "naive-lru",
        experts_per_layer=capacity if is_ours else 0,
        max_model_len=1024,
    )
    with Engine(path, config) as engine, tempfile.TemporaryDirectory() as folder:
        num_wanted = args.warmup + args.forwards
        replay = load_replay(args.replay, engine.memory_plan.shape, num_forwards=num_wanted)
        if not is_ours:
            engine.model._experts = peer_experts(args.system, engine, Path(folder))  # type: ignore[attr-defined]
        with torch.inference_mode():
            done = Replayer(engine, replay.trace).run(num_wanted)
        counted = [each for each in done if each.phase == Phase.DENOISE][args.warmup :]
        return {
            "seconds": [each.seconds for each in counted],
            "num_misses": sum(each.work.num_misses for each in counted) if is_ours else None,
            "plan_bytes": engine.memory_plan.total_bytes if is_ours else None,
        }


def peer_experts(system: str, engine: Engine, folder: Path) -> PeerExperts:
    """The system's experts, in the place of the engine's own."""
    checkpoint, layout = Checkpoint.open(engine.path), engine.experts.pool.arena.layout
    if system == "accelerate":
        return AccelerateExperts(engine.experts, checkpoint, layout, folder)
    if system == "eager":
        host = resident_store(checkpoint, layout)
        size = host.num_experts
        arenas = [
            SlotArena(layout, host.arena.memory[i * size : (i + 1) * size])
            for i in range(host.num_layers)
        ]
        return ArenaExperts(engine.experts, arenas, EachExpert(reference.expert_mlp))
    is_announced = system == "mmap+announce"
    return MappedExperts(engine.experts, checkpoint, layout, is_announced=is_announced)


def resident_store(checkpoint: Checkpoint, layout: ExpertLayout) -> HostExpertStore:
    """Every expert in RAM."""
    from oled_moe.roofline import open_experts

    disk = open_experts(checkpoint, method="direct")
    try:
        return HostExpertStore.from_store(disk)
    finally:
        disk.close()


# Memory limits


@contextmanager
def limited_to(
    limit_bytes: int | None, disk_bytes_per_s: int | None = None
) -> Iterator[tuple[str, Callable[[], None] | None]]:
    """How memory is limited, and what a child process does at its start to be limited.

    `disk_bytes_per_s`: what it may read of the disk that holds the checkpoint, by a cgroup too.
    """
    groups, how = [], "none"
    try:
        if limit_bytes is not None:
            group = make_cgroup("memory", limit_bytes)
            how = "ballast" if group is None else "cgroup"
            groups += [] if group is None else [group]
        if disk_bytes_per_s is not None:
            group = make_cgroup("blkio", disk_bytes_per_s)
            if group is None:
                raise SystemExit("no cgroup that limits disk reads can be made here")
            groups.append(group)

        def enter() -> None:
            for each in groups:
                (each / "cgroup.procs").write_text(str(os.getpid()))

        with ballast(limit_bytes) if how == "ballast" else nullcontext():  # type: ignore[arg-type]
            yield how, enter if groups else None
    finally:
        for group in groups:
            group.rmdir()


def make_cgroup(controller: str, limit: int) -> Path | None:
    """A cgroup of version 1 or 2 below this process's own with that limit on memory or on reads;
    None where none can be made."""
    device = os.stat(default_directory().parent).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    settings = {
        "memory": (("memory.limit_in_bytes", f"{limit}"), ("memory.max", f"{limit}")),
        "blkio": (
            ("blkio.throttle.read_bps_device", f"{number} {limit}"),
            ("io.max", f"{number} rbps={limit}"),
        ),
    }
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if controllers == controller:
            base, (name, value) = Path("/sys/fs/cgroup") / controller, settings[controller][0]
        elif controllers == "":
            base, (name, value) = Path("/sys/fs/cgroup"), settings[controller][1]
        else:
            continue
        group = base / place.strip("/") / f"oled-moe-{controller}-{os.getpid()}"
        try:
            group.mkdir()
            (group / name).write_text(value)
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    return None


@contextmanager
def ballast(limit_bytes: int) -> Iterator[None]:
    """Locked memory that leaves `limit_bytes` to everybody else."""
    import ctypes

    import psutil

    size = max(0, psutil.virtual_memory().available - limit_bytes)
    memory = np.ones(size, dtype=np.uint8)
    library = ctypes.CDLL(None, use_errno=True)
    if library.mlock(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size)):
        raise SystemExit(
            f"neither a memory cgroup nor a locked ballast of {size} bytes can be made "
            f"({os.strerror(ctypes.get_errno())}); run as root or raise `ulimit -l`"
        )
    try:
        yield
    finally:
        library.munlock(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size))


# All of them, interleaved


def drop_page_cache(path: Path) -> None:
    """Every system begins with a cold checkpoint."""
    for file in path.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run_child(args: argparse.Namespace, system: str, path: Path, limit: int | None) -> Any:
    drop_page_cache(path)
    command = [sys.executable, __file__, "--system", system, "--checkpoint", str(path)]
    command += ["--experts-per-layer", str(args.experts_per_layer), "--replay", args.replay]
    command += ["--warmup", str(args.warmup), "--forwards", str(args.forwards)]
    disk = getattr(args, "disk_bytes_per_s", None)
    with limited_to(limit, disk) as (how, enter):
        start_s = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=enter)
        took_s = time.perf_counter() - start_s
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"system": system, "error": error[0], "limited_by": how, "took_s": took_s}
    return {"system": system, "limited_by": how, "took_s": took_s, **json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moe-layers", type=int, default=5)
    parser.add_argument("--experts-per-layer", type=float, default=64)
    parser.add_argument("--replay", default="synth:llada2-mini:block=32")
    parser.add_argument("--warmup", type=int, default=5, help="denoising forwards not counted")
    parser.add_argument("--forwards", type=int, default=8, help="denoising forwards counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--disk-bytes-per-s", type=int, help="let the systems read no faster than this"
    )
    parser.add_argument("--systems", default=",".join((*OURS, *PEERS, *UNLIMITED)))
    parser.add_argument("--output", type=Path, help="append one JSON row per system")
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    parser.add_argument("--system", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.system is not None:
        print(json.dumps(run_system(args)))
        return
    path = make_random_checkpoint(
        find_shape("llada2-mini").config_with(args.moe_layers),
        default_directory() / f"llada2-mini-{args.moe_layers}layers",
    )
    probe = run_child(args, OURS[0], path, None)
    if "error" in probe:
        raise SystemExit(probe["error"])
    limit = int(SLACK * probe["plan_bytes"])
    print(f"memory limit {limit / 2**30:.2f} GiB: our plan and {SLACK - 1:.0%}", file=sys.stderr)
    seconds: dict[str, list[float]] = {}
    found: dict[str, list[Any]] = {}
    for round_id in range(args.rounds):
        systems = args.systems.split(",")
        for system in systems if round_id % 2 == 0 else systems[::-1]:
            one = run_child(args, system, path, None if system in UNLIMITED else limit)
            found.setdefault(system, []).append(one)
            if "error" in one:
                print(f"{system}: {one['error']}", file=sys.stderr)
                continue
            seconds.setdefault(system, []).extend(one["seconds"])
            median = statistics.median(one["seconds"])
            print(f"round {round_id} {system}: {median:.3f} s a forward", file=sys.stderr)
    base = statistics.median(seconds[OURS[-1]]) if OURS[-1] in seconds else float("nan")
    print(f"{'system':16} {'s per forward':>14} {'least':>8} {'most':>8} {'ratio':>7}")
    for system, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{system:16} {median:14.3f} {min(times):8.3f} {max(times):8.3f} {median / base:7.2f}"
        )
    if args.output:
        with args.output.open("a", encoding="utf-8") as file:
            for system, runs in found.items():
                times = seconds.get(system, [])
                row = {
                    "benchmark": "peers",
                    **provenance(),
                    "system": system,
                    "shape": "llada2-mini, random weights, routing replayed",
                    "moe_layers": args.moe_layers,
                    "experts_per_layer": args.experts_per_layer,
                    "replay": args.replay,
                    "limit_bytes": None if system in UNLIMITED else limit,
                    "limited_by": runs[0]["limited_by"],
                    "disk_bytes_per_s": args.disk_bytes_per_s,
                    "rounds": args.rounds,
                    "num_warmup": args.warmup,
                    "num_forwards": len(times),
                    "forward_s_median": statistics.median(times) if times else None,
                    "forward_s_min": min(times, default=None),
                    "forward_s_max": max(times, default=None),
                    "ratio_to_prefetch": statistics.median(times) / base if times else None,
                    "errors": [run["error"] for run in runs if "error" in run],
                }
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
