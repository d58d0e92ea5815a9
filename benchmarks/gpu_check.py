"""Checks and measures device `cuda` on one GPU in one command, and writes one JSON file.

    PYTHONPATH=src python benchmarks/gpu_check.py --out gpu.json

Needs a CUDA build of torch (2.11 to 2.14), triton, numpy, safetensors, tokenizers and this source
tree. Correctness first (kernels, golden cases, every policy), then the link, the kernels, and
forwards of LLaDA2-mini's shape with random weights and replayed routing, for several capacities and
every policy, against the roofline of the same run and against everything resident. Sections share a
budget of time; what it does not reach is named under `skipped`. `--dry-run` goes the same way on
the CPU, with the emulated device and tiny sizes: its numbers mean nothing.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_PROFILES, HardwareProfile
from oled_moe.counters import ExpertCounters
from oled_moe.cuda_memory import PinnedMemory, TorchPinning
from oled_moe.devices import best_gpu_kernel
from oled_moe.engine import Engine
from oled_moe.errors import ConfigError, OledMoeError
from oled_moe.kernels import GPU_KERNELS, KERNELS, EachExpert, ExpertKernel, reference
from oled_moe.models import find_family
from oled_moe.policies import POLICIES
from oled_moe.random_checkpoint import checkpoint_bytes, make_random_checkpoint
from oled_moe.replay import Replay, ReplayedForward, Replayer, load_replay, positions_of_requests
from oled_moe.roofline import Effort, Limits, ModelWork, measure_limits
from oled_moe.shapes import find_shape
from oled_moe.store import ExpertLayout, SlotArena, aligned_empty
from oled_moe.types import IntArray, MoeShape, Phase

FORMAT_VERSION = 1
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
GOLDEN_NAMES = {
    "gen_length": "max_tokens",
    "mask_id": "mask_token_id",
    "eos_id": "eos_token_id",
    "editing_threshold": "edit_threshold",
    "max_post_steps": "max_post_edit_steps",
}
# A replay has no router scores of experts that were not chosen; this variant asks for none.
REPLAYABLE = {"finemoe": "finemoe:maps=topk"}
LIVE_POLICIES = tuple(name for name, entry in POLICIES.items() if not entry.is_clairvoyant)
# A policy with the dense parts of layers as CUDA graphs, where those measure faster.
GRAPHS_SUFFIX = " with graphs"
GRAPHS = "oled" + GRAPHS_SUFFIX
# Of the whole budget, what is over when a section has to be.
SHARES = {"correctness": 0.25, "link": 0.32, "kernels": 0.45, "runs": 0.97}
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of everything that is measured."""

    device: str
    place: torch.device
    config: dict[str, Any]
    policies: tuple[str, ...]
    capacities: tuple[int, ...]
    num_forwards: int
    num_warmup: int
    link_bytes: tuple[int, ...]
    arena_bytes: int
    kernel_rows: tuple[int, ...]
    effort: Effort
    golden_every: int

    @property
    def layout(self) -> ExpertLayout:
        config = self.config
        return ExpertLayout(config["hidden_size"], config["moe_intermediate_size"], torch.bfloat16)

    @property
    def shape(self) -> MoeShape:
        config = self.config
        num_layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
        experts, top_k = config["num_experts"], config["num_experts_per_tok"]
        return MoeShape(num_layers, experts, top_k, self.layout.slot_bytes)


def real_plan(num_moe_layers: int) -> Plan:
    return Plan(
        device="cuda",
        place=torch.device("cuda", 0),
        config=find_shape("llada2-mini").config_with(num_moe_layers),
        policies=LIVE_POLICIES,
        capacities=(40, 100),
        num_forwards=24,
        num_warmup=30,
        link_bytes=(MIB, 6 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
        arena_bytes=2 * 2**30,
        kernel_rows=(1, 2, 4, 8, 16, 32, 64),
        effort=Effort(
            working_set_bytes=2 * 2**30, max_matrix_size=8192, disk_sample_bytes=64 * MIB
        ),
        golden_every=3,
    )


def dry_plan() -> Plan:
    tiny = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "mask_token_id": 510,
        "eos_token_id": 509,
        "pad_token_id": 509,
    }
    return Plan(
        device="emulated",
        place=torch.device("cpu"),
        config={**find_shape("llada2-mini").config_with(2), **tiny},
        policies=("naive-lru", "finemoe", "oled+prefetch"),
        capacities=(4, 8),
        num_forwards=3,
        num_warmup=2,
        link_bytes=(MIB,),
        arena_bytes=MIB // 2,
        kernel_rows=(1, 16),
        effort=Effort(
            working_set_bytes=16 * MIB,
            max_matrix_size=1024,
            disk_sample_bytes=MIB // 4,
            num_repetitions=1,
        ),
        golden_every=20,
    )


@dataclass(slots=True)
class Check:
    """What was found so far, written to `out` after every section."""

    plan: Plan
    out: Path
    budget_s: float
    start_s: float = field(default_factory=time.monotonic)
    found: dict[str, Any] = field(default_factory=dict)
    skipped: list[dict[str, str]] = field(default_factory=list)
    errors: list[dict[str, str]] = field(default_factory=list)

    def has_time(self, section: str, *, needs_s: float = 0.0) -> bool:
        """Whether something that takes about `needs_s` ends within the section's share."""
        used_s = time.monotonic() - self.start_s
        return used_s + needs_s <= SHARES[section] * self.budget_s

    def skip(self, section: str, what: str, reason: str = "no time left") -> None:
        self.skipped.append({"section": section, "what": what, "reason": reason})

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """An error ends a section, not the check."""
        start_s = time.monotonic()
        say(name)
        try:
            yield
        except (OledMoeError, RuntimeError, OSError) as error:
            self.errors.append({"section": name, "error": f"{type(error).__name__}: {error}"})
            say(f"{name} failed: {error}")
        self.found.setdefault("section_s", {})[name] = round(time.monotonic() - start_s, 2)
        self.write()

    def write(self) -> None:
        cases = self.found.get("correctness", {}).get("cases", [])
        wrong = [case for case in cases if not case["is_right"]]
        values = {
            "format_version": FORMAT_VERSION,
            "is_dry_run": self.plan.device != "cuda",
            "is_correct": bool(cases) and not wrong,
            "num_cases": len(cases),
            "num_wrong": len(wrong),
            **self.found,
            "skipped": self.skipped,
            "errors": self.errors,
            "total_s": round(time.monotonic() - self.start_s, 2),
        }
        self.out.write_text(json.dumps(values, indent=1, default=str) + "\n", encoding="utf-8")

    @property
    def is_correct(self) -> bool:
        cases = self.found.get("correctness", {}).get("cases", [])
        return bool(cases) and all(case["is_right"] for case in cases) and not self.errors


def say(text: str) -> None:
    print(f"[gpu_check] {text}", file=sys.stderr, flush=True)


def finish(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def timed(work: Callable[[], object], place: torch.device, *, num: int = 5) -> dict[str, float]:
    """Median and least seconds of `num` calls, after one that is not counted."""
    work()
    finish(place)
    times = []
    for _ in range(num):
        start_s = time.perf_counter()
        work()
        finish(place)
        times.append(time.perf_counter() - start_s)
    return {"median_s": statistics.median(times), "min_s": min(times)}


def machine() -> dict[str, Any]:
    packages = ("torch", "triton", "numpy", "safetensors", "tokenizers")
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    facts: dict[str, Any] = {
        "versions": versions,
        "cuda": torch.version.cuda,
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        facts["gpu"] = gpu.name
        facts["gpu_bytes"] = gpu.total_memory
        facts["compute_capability"] = [gpu.major, gpu.minor]
        facts["gpu_processors"] = gpu.multi_processor_count
    return facts


# Correctness


def check_correctness(check: Check) -> None:
    """Kernels against the plain form; golden runs for every policy, with and without CPU experts;
    the same tokens whatever is resident."""
    cases: list[dict[str, Any]] = []
    check.found["correctness"] = {"cases": cases}
    for dtype in (torch.float32, torch.bfloat16):
        cases.append(kernel_case(check.plan, dtype))
    policies = check.plan.policies
    runs = [("oled", 16.0, False), *((policy, 3.0, False) for policy in policies)]
    runs += [("oled", 1.0, False), ("oled", 3.0, True), ("oled+prefetch", 4.0, True)]
    if check.plan.device == "cuda":
        runs.append((GRAPHS, 4.0, False))
    for policy, capacity, cpu_experts in runs:
        name = f"golden {policy}, {capacity:g} per layer, CPU experts {cpu_experts}"
        if not check.has_time("correctness"):
            check.skip("correctness", name)
            continue
        cases.append({"name": name, **golden_case(check.plan, policy, capacity, cpu_experts)})
        if not cases[-1]["is_right"]:
            say(f"WRONG: {cases[-1]}")


def golden_case(plan: Plan, policy: str, capacity: float, cpu_experts: bool) -> dict[str, Any]:
    """Answers of the tiny models against the reference's; which runs differ."""
    wrong, num_runs = [], 0
    config = EngineConfig(
        device=plan.device,
        policy=policy.removesuffix(GRAPHS_SUFFIX),
        experts_per_layer=capacity,
        cpu_experts=cpu_experts,
        cuda_graphs=policy.endswith(GRAPHS_SUFFIX),
        hardware=DEFAULT_PROFILES[plan.device],
    )
    try:
        with Engine(GOLDEN / "llada2_a", config) as engine:
            for algorithm, file in (("low_confidence", "v20"), ("joint_threshold", "v21")):
                path = GOLDEN / "llada2_a" / f"generate_{file}.json"
                for run in json.loads(path.read_text())[:: plan.golden_every]:
                    args = {GOLDEN_NAMES.get(key, key): value for key, value in run["args"].items()}
                    params = SamplingParams(algorithm=algorithm, **args)
                    result = engine.generate(run["prompt_ids"], params)
                    num_runs += 1
                    same_count = result.stats.num_denoise_forwards == run["num_forwards"]
                    if result.token_ids != run["output_ids"] or not same_count:
                        wrong.append(f"{file} {run['name']}")
    except OledMoeError as error:
        return {"is_right": False, "num_runs": num_runs, "error": str(error)}
    return {"is_right": not wrong, "num_runs": num_runs, "wrong": wrong}


def kernel_case(plan: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """The device's kernel against products in float64, at the shape's own sizes."""
    sizes = [1, 2, 3, 16, 17, 32, 33, 100]
    layout = replace(plan.layout, dtype=dtype)
    arena = random_arena(layout, len(sizes), plan.place)
    ends = np.cumsum(sizes)
    starts = ends - np.array(sizes)
    slots = np.arange(len(sizes))[::-1].copy()
    rows_ND = random_rows(int(ends[-1]), layout, plan.place)
    out_ND = torch.full_like(rows_ND, float("nan"))
    device_kernel(plan)(arena, rows_ND, out_ND, slots, starts, ends)
    worst = 0.0
    for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
        weights = arena.weights(slot)
        wide = type(weights)(*(matrix.double() for matrix in weights))
        expected = reference.expert_mlp(rows_ND[start:end].double(), wide)
        worst = max(worst, float((out_ND[start:end].double() - expected).abs().max()))
    # NaN is not below anything.
    is_right = worst <= (1e-3 if dtype == torch.float32 else 6e-2)
    return {"name": f"kernel, {dtype}", "is_right": is_right, "largest_error": worst}


def device_kernel(plan: Plan) -> ExpertKernel:
    if plan.place.type == "cuda":
        return best_gpu_kernel(upload_to(plan.place))
    return EachExpert(reference.expert_mlp)


def upload_to(place: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(place)


def random_arena(layout: ExpertLayout, num_slots: int, place: torch.device) -> SlotArena:
    """Weights that keep activations near 1."""
    memory = torch.zeros((num_slots, layout.slot_bytes), dtype=torch.uint8, device=place)
    arena = SlotArena(layout, memory)
    generator = torch.Generator(place).manual_seed(0)
    for slot in range(num_slots):
        for matrix in arena.weights(slot):
            drawn = torch.randn(matrix.shape, generator=generator, device=place)
            matrix.copy_(drawn * matrix.shape[1] ** -0.5)
    return arena


def random_rows(num_rows: int, layout: ExpertLayout, place: torch.device) -> torch.Tensor:
    generator = torch.Generator(place).manual_seed(1)
    size = (num_rows, layout.hidden_size)
    return torch.randn(size, generator=generator, device=place).to(layout.dtype)


# The link


def check_link(check: Check) -> None:
    """Copies from host to device by size, from pinned and from ordinary memory; and how much is
    pinned for what was asked."""
    plan, rows = check.plan, []
    is_cuda = plan.place.type == "cuda"
    for num_bytes in plan.link_bytes:
        if not check.has_time("link"):
            check.skip("link", f"copies of {num_bytes} bytes")
            continue
        target = torch.empty(num_bytes, dtype=torch.uint8, device=plan.place)
        row: dict[str, Any] = {"num_bytes": num_bytes}
        for kind in ("pinned", "pageable"):
            source = aligned_empty(num_bytes).fill_(1)
            pinned = None
            if is_cuda and kind == "pinned":
                pinned = PinnedMemory(source, TorchPinning(plan.place))
                row["pinned_bytes"] = pinned.num_pinned_bytes
            num = max(1, min(16, 2**28 // num_bytes))

            def copies(
                target: torch.Tensor = target, source: torch.Tensor = source, num: int = num
            ) -> None:
                for _ in range(num):
                    target.copy_(source, non_blocking=True)

            best_s = timed(copies, plan.place)["min_s"] / num
            row[f"{kind}_bytes_per_s"] = num_bytes / best_s
            if pinned is not None:
                pinned.close()
        rows.append(row)
    check.found["link"] = rows


# Kernels


def check_kernels(check: Check) -> None:
    """Time and rate of weights by rows, through more slots than any cache holds."""
    plan, layout = check.plan, check.plan.layout
    num_slots = max(8, plan.arena_bytes // layout.slot_bytes)
    num_experts = min(64, num_slots // 4)
    arena = random_slots(layout, num_slots, plan.place)
    rows: list[dict[str, Any]] = []
    check.found["kernels"] = {"num_experts": num_experts, "num_slots": num_slots, "rows": rows}
    names = ("triton", "grouped", "each") if plan.place.type == "cuda" else ("grouped", "each")
    for num_rows in plan.kernel_rows:
        for name in names:
            if not check.has_time("kernels"):
                check.skip("kernels", f"{name} at {num_rows} rows")
                continue
            try:
                kernel = GPU_KERNELS[name](upload_to(plan.place))
                measured = time_kernel(kernel, arena, num_experts, num_rows, plan.place)
            except (RuntimeError, ImportError) as error:
                check.skip("kernels", f"{name} at {num_rows} rows", str(error).splitlines()[0])
                continue
            rate = num_experts * layout.weight_bytes / measured["min_s"]
            rows.append(
                {"kernel": name, "num_rows": num_rows, **measured, "weight_bytes_per_s": rate}
            )


def random_slots(layout: ExpertLayout, num_slots: int, place: torch.device) -> SlotArena:
    """Slots of small random numbers, made in one go."""
    arena = SlotArena(
        layout, torch.empty((num_slots, layout.slot_bytes), dtype=torch.uint8, device=place)
    )
    arena.memory.view(-1).view(torch.bfloat16).normal_(std=0.02)
    return arena


def time_kernel(
    kernel: ExpertKernel, arena: SlotArena, num_experts: int, num_rows: int, place: torch.device
) -> dict[str, float]:
    rows_ND = random_rows(num_experts * num_rows, arena.layout, place)
    out_ND = torch.empty_like(rows_ND)
    starts: IntArray = np.arange(num_experts, dtype=np.int64) * num_rows
    random = np.random.default_rng(0)
    order = random.permutation(len(arena))
    groups = [
        order[i : i + num_experts] for i in range(0, len(order) - num_experts + 1, num_experts)
    ]

    def work() -> None:
        for slots in groups:
            kernel(arena, rows_ND, out_ND, slots, starts, starts + num_rows)

    measured = timed(work, place, num=5)
    return {name: seconds / len(groups) for name, seconds in measured.items()}


# Forwards at full size


@dataclass(frozen=True, slots=True)
class Stage:
    """What all runs have in common."""

    checkpoint: Path
    replay: Replay
    work: ModelWork
    limits: Limits
    profile: HardwareProfile


def check_runs(check: Check, directory: Path | None) -> None:
    """Every policy at every capacity, and everything resident, on the same trace."""
    plan = check.plan
    with tempfile.TemporaryDirectory(dir=directory or roomy_directory(plan)) as folder:
        stage = prepare(check, Path(folder) / "checkpoint")
        runs: list[dict[str, Any]] = []
        check.found["runs"] = runs
        everything = ("oled", plan.shape.num_experts)
        cases = [everything, *((p, c) for c in plan.capacities for p in plan.policies)]
        if plan.device == "cuda":
            graphed = ((GRAPHS, c) for c in (plan.shape.num_experts, *plan.capacities))
            cases[1:1] = graphed
        longest_s = 0.0
        for policy, capacity in cases:
            name = f"{policy} at {capacity} experts per layer"
            if not check.has_time("runs", needs_s=longest_s):
                check.skip("runs", name)
                continue
            start_s = time.monotonic()
            say(name)
            try:
                runs.append(run_case(plan, stage, REPLAYABLE.get(policy, policy), capacity))
            except OledMoeError as error:
                check.skip("runs", name, str(error))
            longest_s = max(longest_s, time.monotonic() - start_s)
            check.write()
    resident = next((run for run in runs if run["experts_per_layer"] == everything[1]), None)
    for run in runs:
        if resident is not None:
            run["times_full_residency"] = run["forward_s_median"] / resident["forward_s_median"]


def roomy_directory(plan: Plan) -> Path | None:
    """Memory where there is enough of it: many engines read the checkpoint. None: a usual place."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        return None
    free = os.statvfs(memory)
    is_roomy = free.f_bavail * free.f_frsize > 3 * checkpoint_bytes(plan.config)
    return memory if is_roomy else None


def prepare(check: Check, checkpoint: Path) -> Stage:
    plan = check.plan
    make_random_checkpoint(plan.config, checkpoint)
    family = find_family(plan.config)
    model = family.config(plan.config)
    work = ModelWork(
        shapes=family.parameter_shapes(model),
        num_layers=model.num_layers,
        expert_values=3 * model.hidden_size * model.moe_intermediate_size,
        itemsize=plan.layout.dtype.itemsize,
        copied_expert_bytes=plan.layout.slot_bytes,
    )
    rate = None if plan.device == "cuda" else DEFAULT_PROFILES[plan.device].copy_bytes_per_s
    limits = measure_limits(
        checkpoint,
        dtype=torch.bfloat16,
        device=plan.device,
        link_bytes_per_s=rate,
        effort=plan.effort,
        report=lambda step: say(f"measuring: {step}"),
    )
    profile = measured_profile(plan, limits)
    num_forwards = plan.num_warmup + plan.num_forwards
    replay = load_replay("synth:llada2-mini:block=32", plan.shape, num_forwards=num_forwards)
    check.found["limits"] = limits.to_dict()
    check.found["profile"] = json.loads(profile.to_json())
    check.found["setup"] = {
        "replayed": True,
        "replay": replay.words,
        "num_moe_layers": plan.shape.num_layers,
        "num_forwards": plan.num_forwards,
        "num_warmup": plan.num_warmup,
        "checkpoint_bytes": checkpoint_bytes(plan.config),
    }
    return Stage(checkpoint, replay, work, limits, profile)


def measured_profile(plan: Plan, limits: Limits) -> HardwareProfile:
    """What decisions go by: the link as measured, and the CPU by its times at 1 and 16 rows."""
    layout, place = plan.layout, torch.device("cpu")
    num_slots = max(8, min(plan.arena_bytes, 2**28) // layout.slot_bytes)
    arena = random_slots(layout, num_slots, place)
    kernel = KERNELS["cpu"](torch.get_num_threads())
    num_experts = min(16, num_slots // 2)
    one_s, many_s = (
        time_kernel(kernel, arena, num_experts, rows, place)["median_s"] / num_experts
        for rows in (1, 16)
    )
    token_s = max(1e-9, (many_s - one_s) / 15)
    return replace(
        DEFAULT_PROFILES[plan.device],
        name="as measured in this run",
        copy_bytes_per_s=limits.copy_bytes_per_s,
        cpu_weight_bytes_per_s=layout.weight_bytes / max(1e-9, one_s - token_s),
        cpu_token_weight_bytes_per_s=layout.weight_bytes / token_s,
        disk_method="buffered",
        disk_queue_depth=8,
        is_measured=True,
    )


def run_case(plan: Plan, stage: Stage, policy: str, capacity: int) -> dict[str, Any]:
    """One engine, opened, driven and closed again."""
    gc.collect()
    counters, first = ExpertCounters(), plan.num_warmup
    positions = max(positions_of_requests(stage.replay.trace))
    config = EngineConfig(
        device=plan.device,
        policy=policy.removesuffix(GRAPHS_SUFFIX),
        experts_per_layer=capacity,
        cuda_graphs=policy.endswith(GRAPHS_SUFFIX),
        hardware=stage.profile,
        max_model_len=positions,
    )
    open_s = time.perf_counter()
    with Engine(stage.checkpoint, config) as engine:
        open_s = time.perf_counter() - open_s
        forwards = Replayer(engine, stage.replay.trace).run(
            plan.num_warmup + plan.num_forwards, lambda i: counters if i >= first else None
        )
        memory = engine.memory_plan.total_bytes
    return {
        "policy": policy,
        "experts_per_layer": capacity,
        "open_s": open_s,
        "plan_bytes": memory,
        "hit_rate": counters.hit_rate.mean(),
        "effective_transfer_ratio": counters.effective_transfer_ratio,
        **summary(stage, forwards, first),
    }


def summary(stage: Stage, forwards: Sequence[ReplayedForward], first: int) -> dict[str, Any]:
    """Times of denoising forwards behind the warm-up, and of each answer's start."""
    counted = [one for one in forwards[first:] if one.phase == Phase.DENOISE]
    times = [one.seconds for one in counted]
    bounds = [stage.work.bound(one.work, stage.limits) for one in counted]
    median_s = statistics.median(times)
    roofline_s = statistics.median(bound.seconds for bound in bounds)
    names = [bound.name for bound in bounds]
    num_accepted = sum(one.num_accepted for one in forwards[first:])
    # The first answer meets a cold engine.
    starts = first_tokens(stage, forwards)
    starts = starts[1:] or starts
    return {
        "num_counted": len(counted),
        "forward_s_median": median_s,
        "forward_s_min": min(times),
        "forward_s_quartiles": np.quantile(times, [0.25, 0.75]).tolist(),
        "planning_s_median": statistics.median(one.planning_s for one in counted),
        "num_starts": len(starts),
        "ttft_s_median": statistics.median([s for s, _ in starts]) if starts else None,
        "ttft_roofline_s": statistics.median([s for _, s in starts]) if starts else None,
        "tpot_s": sum(one.seconds for one in forwards[first:]) / max(1, num_accepted),
        "weight_bytes_per_forward": statistics.median(bound.weight_bytes for bound in bounds),
        "miss_bytes_per_forward": statistics.median(bound.copied_bytes for bound in bounds),
        "loads_per_forward": statistics.mean(one.num_loads for one in counted),
        "cpu_runs_per_forward": statistics.mean(one.num_cpu_runs for one in counted),
        "roofline_s": roofline_s,
        "roofline_ratio": median_s / roofline_s,
        "bound": max(set(names), key=names.count),
        "bounds": {name: names.count(name) for name in sorted(set(names))},
        "bound_detail": asdict(bounds[len(bounds) // 2]),
    }


def first_tokens(stage: Stage, forwards: Sequence[ReplayedForward]) -> list[tuple[float, float]]:
    """For each answer, seconds of its prefill and first denoising forward, and their bound."""
    starts, taken_s, bound_s = [], 0.0, 0.0
    for one in forwards:
        is_prefill = one.phase == Phase.PREFILL
        if not is_prefill and not taken_s:
            continue
        taken_s += one.seconds
        bound_s += stage.work.bound(one.work, stage.limits).seconds
        if not is_prefill:
            starts.append((taken_s, bound_s))
            taken_s = bound_s = 0.0
    return starts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--moe-layers", type=int, default=3)
    parser.add_argument("--checkpoint-dir", type=Path, help="where the random weights go meanwhile")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    args = parser.parse_args()
    if args.dry_run:
        plan = dry_plan()
    else:
        if not torch.cuda.is_available():
            raise ConfigError("torch sees no GPU here; --dry-run goes through the check without")
        plan = real_plan(args.moe_layers)
    check = Check(plan, args.out, 60 * args.minutes)
    check.found["machine"] = machine()
    with check.section("correctness"):
        check_correctness(check)
    with check.section("link"):
        check_link(check)
    with check.section("kernels"):
        check_kernels(check)
    with check.section("runs"):
        check_runs(check, args.checkpoint_dir)
    check.write()
    say(f"{'all right' if check.is_correct else 'NOT ALL RIGHT'}; see {args.out}")
    return 0 if check.is_correct else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OledMoeError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
