"""Policies at full size without weights, side by side, against the roofline of the same run.

Every case, one policy at one cache size, replays the same forwards on an engine of its own.
"""

import gc
import math
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oled_moe import __version__
from oled_moe.bench import median_interval
from oled_moe.checkpoint import Checkpoint
from oled_moe.config import EngineConfig, check_int
from oled_moe.costs import (
    DEFAULT_PROFILE,
    DEFAULT_PROFILES,
    CostModel,
    HardwareProfile,
    load_profile,
)
from oled_moe.counters import ExpertCounters
from oled_moe.engine import Engine
from oled_moe.environment import Load, git_revision
from oled_moe.errors import ConfigError
from oled_moe.hardware import load_hardware
from oled_moe.inspection import package_versions
from oled_moe.machine import machine_facts
from oled_moe.memory import MemoryPlan
from oled_moe.models import find_family
from oled_moe.policies import build_policy
from oled_moe.profiler import MIN_QUEUE_DEPTH, default_profile_path
from oled_moe.replay import (
    MIN_WARMUP,
    Replay,
    ReplayedForward,
    Replayer,
    check_policy,
    num_sequences,
    num_warmup_forwards,
    positions_of_requests,
)
from oled_moe.roofline import (
    Bound,
    Effort,
    LimitProbe,
    Limits,
    ModelWork,
    measure_limits,
    preferred_disk,
)
from oled_moe.sizing import slots_of_layers
from oled_moe.store import ExpertLayout
from oled_moe.traces import RoutingTrace
from oled_moe.types import MoeShape, Phase

FORMAT_VERSION = 1
# Limits are measured again before the first counted forward and behind each so many; the forward
# after a measurement is not counted, since copies ahead had time that decoding would not give.
_FORWARDS_PER_PAUSE = 5
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """One policy at one mean of experts per layer."""

    policy: str
    experts_per_layer: float


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """What one case did: all repetitions of the counted forwards.

    `num_warmup`: forwards of any phase before the first counted one; `is_cache_full`: as many slots
    as there are had been filled by then. `copied_expert_bytes`: what one copy moves. Units: bytes.
    """

    case: ReplayCase
    plan: MemoryPlan
    forwards: tuple[ReplayedForward, ...]
    bounds: tuple[Bound, ...]
    samples: tuple[Limits, ...]
    num_warmup: int
    is_cache_full: bool
    hit_rate: float
    expert_cache_utilization: float
    effective_transfer_ratio: float
    peak_rss_bytes: int
    peak_expert_bytes: int
    num_repetitions: int
    copied_expert_bytes: int
    tiers: Mapping[str, str]

    def of_phase(self, phase: Phase) -> list[ReplayedForward]:
        return [forward for forward in self.forwards if forward.phase == phase]

    def to_dict(self, model: ModelWork, limits: Limits) -> dict[str, Any]:
        """Plain JSON values under the names of interfaces.md 1; times and bytes are those of
        forwards that denoise unless a name says otherwise. `*_per_forward`: means.

        `roofline_ratio` is the median over forwards of time over bound, each by the limits measured
        just before or after; `roofline_ratio_best` by the best limits of the whole call.
        """
        denoised = self.of_phase(Phase.DENOISE)
        seconds = [forward.seconds for forward in denoised]
        pairs = zip(self.forwards, self.bounds, strict=True)
        bounds = [bound for forward, bound in pairs if forward.phase == Phase.DENOISE]
        ratios = [took / bound.seconds for took, bound in zip(seconds, bounds, strict=True)]
        best = [model.bound(forward.work, limits).seconds for forward in denoised]
        ratio = median_interval(ratios)
        interval, duration_s = median_interval(seconds), sum(f.seconds for f in self.forwards)
        roofline_s = statistics.median(bound.seconds for bound in bounds)
        expert_bytes = self.copied_expert_bytes
        num_accepted = sum(forward.num_accepted for forward in denoised)
        num_copied = sum(forward.num_loads for forward in self.forwards)
        return {
            "policy": self.case.policy,
            "experts_per_layer": self.case.experts_per_layer,
            "replayed": True,
            "completed": len(denoised),
            "failed": 0,
            "duration": duration_s,
            "nfe": len(denoised) + len(self.of_phase(Phase.COMMIT)),
            "num_forwards": len(denoised),
            "num_warmup": self.num_warmup,
            "num_repetitions": self.num_repetitions,
            "is_cache_full": self.is_cache_full,
            "forward_s_median": interval.median,
            "forward_s_ci": [interval.low, interval.high],
            "forward_s_ci_level": interval.level,
            "forward_s_min": min(seconds),
            "forward_s_max": max(seconds),
            "forward_s": seconds,
            "phases": {phase.name.lower(): _phase_dict(self.of_phase(phase)) for phase in Phase},
            "tpf": num_accepted / len(denoised),
            "fps": len(self.forwards) / duration_s,
            "tps": num_accepted / duration_s,
            "weight_bytes_per_forward": _mean([bound.weight_bytes for bound in bounds]),
            "miss_bytes_per_forward": _mean([bound.copied_bytes for bound in bounds]),
            "load_bytes_per_forward": _mean([f.num_loads for f in denoised]) * expert_bytes,
            "prefetched_bytes_per_forward": (
                _mean([f.num_prefetched for f in denoised]) * expert_bytes
            ),
            "active_experts_per_forward": _mean(
                [sum(map(len, forward.work.expert_rows)) for forward in denoised]
            ),
            "cpu_expert_runs_per_forward": _mean([f.num_cpu_runs for f in denoised]),
            "roofline_s": roofline_s,
            "roofline_ratio": ratio.median,
            "roofline_ratio_ci": [ratio.low, ratio.high],
            "roofline_ratio_best": interval.median / statistics.median(best),
            "read_samples_bytes_per_s": [sample.read.bytes_per_s for sample in self.samples],
            "disk_samples_bytes_per_s": [sample.disk.bytes_per_s for sample in self.samples],
            "roofline_compute_s": statistics.median(bound.compute_s for bound in bounds),
            "roofline_copy_s": statistics.median(bound.copy_s for bound in bounds),
            "bound": _deciding(bounds),
            "hit_rate": self.hit_rate,
            "expert_cache_utilization": self.expert_cache_utilization,
            "effective_transfer_ratio": self.effective_transfer_ratio,
            "planning_s_median": statistics.median(f.planning_s for f in denoised),
            "planning_share": sum(f.planning_s for f in denoised) / sum(seconds),
            "bytes_by_tier": [{**self.tiers, "bytes": num_copied * expert_bytes}],
            "peak_expert_bytes": self.peak_expert_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "plan_bytes": self.plan.total_bytes,
            "plan": dict(self.plan.lines()),
            "num_slots": self.plan.num_slots,
            "num_staging": self.plan.num_staging,
            "limits": limits.to_dict(),
        }


def _phase_dict(forwards: Sequence[ReplayedForward]) -> dict[str, Any]:
    """How long the forwards of one phase took; None where there were none."""
    seconds = [forward.seconds for forward in forwards]
    return {
        "num_forwards": len(seconds),
        "forward_s_median": statistics.median(seconds) if seconds else None,
        "forward_s_min": min(seconds, default=None),
        "num_tokens_mean": _mean([f.work.num_tokens for f in forwards]) if seconds else None,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _deciding(bounds: Sequence[Bound]) -> str:
    """What bounds most of the time."""
    shares: dict[str, float] = {}
    for bound in bounds:
        shares[bound.name] = shares.get(bound.name, 0.0) + bound.seconds
    return max(shares, key=lambda name: shares[name])


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """All runs, and what holds for all of them; `setup` is plain JSON values."""

    setup: Mapping[str, Any]
    model: ModelWork
    limits: Limits
    runs: tuple[ReplayRun, ...]

    def to_dict(self) -> dict[str, Any]:
        runs = [run.to_dict(self.model, self.limits) for run in self.runs]
        return {**self.setup, "limits": self.limits.to_dict(), "runs": runs}

    def rows(self) -> list[dict[str, Any]]:
        """One for each run, with where it comes from."""
        base = {"benchmark": "bench-shape", **self.setup}
        return [{**base, **run.to_dict(self.model, self.limits)} for run in self.runs]


def check_cases(
    policies: Sequence[str], capacities: Sequence[float], shape: MoeShape
) -> list[ReplayCase]:
    """Every policy at every capacity, checked before anything long begins.

    Raises: ConfigError for policies and capacities that are unknown or given twice, and for a
    policy that looks at what a replay does not have.
    """
    for what, values in (("policy", policies), ("experts-per-layer", capacities)):
        if len(set(values)) < len(values):
            raise ConfigError(f"one {what} is given twice in {list(values)}; give each once")
    costs = CostModel.from_profile(DEFAULT_PROFILE, shape.expert_bytes)
    for policy in policies:
        check_policy(build_policy(policy, shape, costs))
    for capacity in capacities:
        slots_of_layers(capacity, shape)
    return [ReplayCase(policy, capacity) for capacity in capacities for policy in policies]


def shape_of_config(config: Mapping[str, Any]) -> MoeShape:
    """The routed experts of a bfloat16 checkpoint with this config.json."""
    model = find_family(config).config(config)
    layout = ExpertLayout(model.hidden_size, model.moe_intermediate_size, torch.bfloat16)
    return MoeShape(model.num_moe_layers, model.num_experts, model.top_k, layout.slot_bytes)


def warmup_for(trace: RoutingTrace, capacities: Sequence[float]) -> int:
    """Denoising forwards that fill the largest of these caches, see `num_warmup_forwards`."""
    partial = [math.ceil(c) for c in capacities if c < trace.num_experts]
    if not partial:
        return MIN_WARMUP
    return num_warmup_forwards(trace, [max(partial)] * trace.num_moe_layers)


def num_replayed(num_forwards: int, num_warmup: int) -> int:
    """How many denoising forwards are run for so many that count."""
    return num_warmup + num_forwards + -(-num_forwards // _FORWARDS_PER_PAUSE)


def check_length(replay: Replay, num_forwards: int, num_warmup: int) -> None:
    """Raises: ConfigError for a trace that has too few forwards."""
    num_others = num_replayed(num_forwards, num_warmup) - num_forwards
    if replay.num_denoise_forwards < num_forwards + num_others:
        raise ConfigError(
            f"forwards is {num_forwards}, beside {num_others} that are not counted; allowed: "
            f"{replay.num_denoise_forwards} together, the denoising forwards of the trace; give a "
            "longer one, or lower --forwards"
        )


def run_replay_bench(
    checkpoint: Path,
    replay: Replay,
    cases: Sequence[ReplayCase],
    config: EngineConfig,
    *,
    num_forwards: int,
    num_warmup: int | None = None,
    repetitions: int = 1,
    effort: Effort | None = None,
    progress: Say | None = None,
) -> ReplayReport:
    """Replay a trace under every case on engines of their own, and set it against the machine.

    `num_forwards` denoising forwards count, behind `num_warmup` that do not (None: as `warmup_for`
    says). Every other repetition goes through the cases backwards. Limits are measured before and
    after, and memory and disk again every few forwards.

    Raises: ConfigError, DoesNotFitError; TraceError for a trace that cannot be replayed.
    """
    check_int("forwards", num_forwards, minimum=1)
    check_int("repetitions", repetitions, minimum=1)
    if num_warmup is None:
        num_warmup = warmup_for(replay.trace, [case.experts_per_layer for case in cases])
    check_int("warmup", num_warmup, minimum=0)
    check_length(replay, num_forwards, num_warmup)
    say, load = progress or (lambda text: None), Load()
    bench = _ReplayBench(checkpoint, replay.trace, config, num_warmup, num_forwards)
    limits = bench.measure(effort, say)
    bench.use_disk_of(limits)
    order = [list(cases)[:: -1 if r % 2 else 1] for r in range(repetitions)]
    done: dict[ReplayCase, list[ReplayRun]] = {case: [] for case in cases}
    for repetition, row in enumerate(order, start=1):
        for case in row:
            say(
                f"{case.policy} at {case.experts_per_layer:g} experts per layer, repetition "
                f"{repetition} of {repetitions}"
            )
            done[case].append(bench.run(case, limits, effort))
    limits = limits.better_of(bench.measure(effort, say))
    setup = {
        "format_version": FORMAT_VERSION,
        "replayed": True,
        "replay": replay.words,
        "trace_source": replay.trace.source,
        "block_length": replay.trace.block_length,
        **bench.facts,
        "repetitions": repetitions,
        "order": [[asdict(case) for case in row] for row in order],
        **load.facts(),
        "environment": machine_facts(),
        "versions": {"oled_moe": __version__, **package_versions()},
        "git_revision": git_revision(),
    }
    runs = tuple(_merged(done[case]) for case in cases)
    return ReplayReport(setup, bench.model, limits, runs)


class _ReplayBench:
    """The engines of all cases, one after another, and what they are driven with."""

    def __init__(
        self,
        checkpoint: Path,
        trace: RoutingTrace,
        config: EngineConfig,
        num_warmup: int,
        num_forwards: int,
    ) -> None:
        opened = Checkpoint.open(checkpoint)
        family = find_family(opened.config)
        model = family.config(opened.config)
        self._dtype: torch.dtype = getattr(torch, config.dtype) if config.dtype else torch.bfloat16
        stored = ExpertLayout(model.hidden_size, model.moe_intermediate_size, torch.bfloat16)
        used = ExpertLayout(model.hidden_size, model.moe_intermediate_size, self._dtype)
        is_disk = config.device == "cpu"
        self.model = ModelWork(
            shapes=family.parameter_shapes(model),
            num_layers=model.num_layers,
            expert_values=3 * model.hidden_size * model.moe_intermediate_size,
            itemsize=self._dtype.itemsize,
            copied_expert_bytes=stored.weight_bytes if is_disk else used.slot_bytes,
        )
        self._checkpoint = checkpoint
        self._trace = trace
        self._config = _sized_for(trace, config)
        self._is_disk = is_disk
        self._num_warmup = num_warmup
        self._num_forwards = num_forwards
        self._first_counted = _index_behind(trace, num_warmup)
        self.facts: dict[str, Any] = {}

    def measure(self, effort: Effort | None, say: Say) -> Limits:
        """What the machine does now."""
        is_emulated = self._config.device == "emulated"
        return measure_limits(
            self._checkpoint,
            dtype=self._dtype,
            device=self._config.device,
            link_bytes_per_s=_profile_of(self._config).copy_bytes_per_s if is_emulated else None,
            effort=effort,
            report=lambda step: say(f"measuring: {step}"),
        )

    def use_disk_of(self, limits: Limits) -> None:
        """Where nobody has measured this machine's disk yet, read as was just found best."""
        is_known = default_profile_path(self._config.device).is_file()
        if not self._is_disk or is_known or self._config.hardware is not None:
            return
        disk = preferred_disk(limits)
        profile = replace(
            DEFAULT_PROFILE,
            name="built-in guess, disk as measured in this run",
            copy_bytes_per_s=disk.bytes_per_s,
            disk_method=disk.method,
            disk_queue_depth=max(disk.queue_depth, MIN_QUEUE_DEPTH),
        )
        self._config = replace(self._config, hardware=profile)

    def run(self, case: ReplayCase, limits: Limits, effort: Effort | None) -> ReplayRun:
        """One engine, opened, driven and closed again."""
        gc.collect()
        _reset_peak()
        config = replace(self._config, policy=case.policy, experts_per_layer=case.experts_per_layer)
        counters, first = ExpertCounters(), self._first_counted
        with Engine(self._checkpoint, config) as engine:
            self.facts = self.facts or _facts(engine, self._checkpoint)
            pauses = _Pauses(
                LimitProbe(self._checkpoint, limits, engine.experts.pool.arena.memory, effort),
                self._trace,
                first,
            )
            with closing(pauses):
                forwards = Replayer(engine, self._trace, seed=config.seed).run(
                    num_replayed(self._num_forwards, self._num_warmup),
                    lambda index: counters if index >= first else None,
                    pauses,
                )
                pauses.sample()
            plan, pool = engine.memory_plan, engine.experts.pool
            peak_rss_bytes = _peak_rss_bytes()
            num_filled = forwards[first - 1].num_filled if first else 0
            counted = [forward for forward in forwards[first:] if not forward.is_after_pause]
            run = ReplayRun(
                case=case,
                plan=plan,
                forwards=tuple(counted),
                bounds=tuple(self.model.bound(f.work, pauses.around(f)) for f in counted),
                samples=tuple(pauses.samples),
                num_warmup=first,
                is_cache_full=num_filled >= plan.num_slots,
                hit_rate=counters.hit_rate.mean(),
                expert_cache_utilization=counters.utilization.mean(),
                effective_transfer_ratio=counters.effective_transfer_ratio,
                peak_rss_bytes=peak_rss_bytes,
                peak_expert_bytes=pool.num_filled * plan.shape.expert_bytes,
                num_repetitions=1,
                copied_expert_bytes=self.model.copied_expert_bytes,
                tiers={"src": "disk", "dst": "ram"}
                if self._is_disk
                else {"src": "ram", "dst": f"{config.device} device"},
            )
        return run


class _Pauses:
    """Measures limits before the first counted forward, and every few denoising ones from there.

    `first`: index of the forward that counting begins with.
    """

    def __init__(self, probe: LimitProbe, trace: RoutingTrace, first: int) -> None:
        self._probe = probe
        is_denoise = [forward.context.is_denoise for forward in trace.forwards()]
        counted = [index for index, flag in enumerate(is_denoise) if flag and index >= first]
        self._at = set(counted[:: _FORWARDS_PER_PAUSE + 1])
        self.samples: list[Limits] = []

    def __call__(self, index: int) -> bool:
        if index not in self._at:
            return False
        self.sample()
        return True

    def sample(self) -> None:
        self.samples.append(self._probe.sample())

    def around(self, forward: ReplayedForward) -> Limits:
        """The better of the limits measured before a forward and after it."""
        before = self.samples[max(0, forward.num_pauses - 1)]
        return before.better_of(self.samples[forward.num_pauses])

    def close(self) -> None:
        self._probe.close()


def _merged(runs: Sequence[ReplayRun]) -> ReplayRun:
    """The repetitions of a case as one run: forwards together, ratios averaged, peaks at most."""
    num = len(runs)
    return replace(
        runs[0],
        forwards=tuple(forward for run in runs for forward in run.forwards),
        bounds=tuple(bound for run in runs for bound in run.bounds),
        samples=tuple(sample for run in runs for sample in run.samples),
        is_cache_full=all(run.is_cache_full for run in runs),
        hit_rate=sum(run.hit_rate for run in runs) / num,
        expert_cache_utilization=sum(run.expert_cache_utilization for run in runs) / num,
        effective_transfer_ratio=sum(run.effective_transfer_ratio for run in runs) / num,
        peak_rss_bytes=max(run.peak_rss_bytes for run in runs),
        peak_expert_bytes=max(run.peak_expert_bytes for run in runs),
        num_repetitions=num,
    )


def _sized_for(trace: RoutingTrace, config: EngineConfig) -> EngineConfig:
    """Room for the sequences of a trace. Raises: ConfigError where the user gave less."""
    num_positions = max(positions_of_requests(trace))
    if config.max_model_len is not None and config.max_model_len < num_positions:
        raise ConfigError(
            f"max-model-len is {config.max_model_len}; allowed: {num_positions} or more, as far as "
            "the trace's sequences reach"
        )
    return replace(
        config,
        max_model_len=config.max_model_len or num_positions,
        max_num_seqs=max(config.max_num_seqs, num_sequences(trace)),
    )


def _index_behind(trace: RoutingTrace, num_denoise: int) -> int:
    """The index of the first forward behind so many denoising ones."""
    if not num_denoise:
        return 0
    for index, forward in enumerate(trace.forwards()):
        num_denoise -= forward.context.is_denoise
        if not num_denoise:
            return index + 1
    raise AssertionError("the trace is shorter than was checked")


def _profile_of(config: EngineConfig) -> HardwareProfile:
    """The profile that an engine of this configuration decides by."""
    if isinstance(config.hardware, HardwareProfile):
        return config.hardware
    if isinstance(config.hardware, str | Path):
        return load_hardware(config.hardware)
    path = default_profile_path(config.device)
    return load_profile(path) if path.is_file() else DEFAULT_PROFILES[config.device]


def _facts(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    """What holds for all cases."""
    config = engine.config
    settings = asdict(replace(config, policy="", experts_per_layer=None, hardware=None))
    for name in ("policy", "experts_per_layer", "hardware"):
        del settings[name]
    return {
        "checkpoint": str(checkpoint),
        "device": config.device,
        "is_emulated": config.device == "emulated",
        "has_cpu_experts": config.device != "cpu" and config.cpu_experts,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "num_moe_layers": engine.model_config.num_moe_layers,
        "num_experts": engine.model_config.num_experts,
        "hardware": {**asdict(engine.hardware), "source": engine.hardware_source},
        "config": settings,
        "seed": config.seed,
    }


def _reset_peak() -> None:
    """Let the peak of this process's memory begin anew, where the system can."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")


def _peak_rss_bytes() -> int:
    """The most memory this process held since `_reset_peak`, or ever where that cannot be."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
