"""What a person asks of a checkpoint or a machine before a model runs, as plain values.

Checkpoints are described from JSON files and headers alone: no weight is read here, except where
`measure_tokens_per_miss` runs a model for a moment.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oled_moe.checkpoint import Checkpoint, TensorRecord
from oled_moe.config import DEVICES, EngineConfig, SamplingParams, format_size
from oled_moe.costs import DEFAULT_PROFILE, CostModel, HardwareProfile
from oled_moe.engine import (
    DEFAULT_MODEL_LEN,
    DEMO_MODEL,
    Engine,
    Progress,
    WeightSizes,
    find_model,
    plan_model,
    sampling_defaults_of,
)
from oled_moe.errors import CheckpointError, DoesNotFitError, OledMoeError
from oled_moe.memory import MemoryPlan
from oled_moe.models import Family, ModelConfig, find_family
from oled_moe.profiler import (
    default_profile_path,
    measure_hardware,
    save_profile,
    to_profile,
    usable_memory_bytes,
)
from oled_moe.store import ExpertPart
from oled_moe.tokenization import Tokenizer
from oled_moe.types import LayerDemand, LayerPlan

# The experts of LLaDA2-mini, for machines that are measured without a model.
DEFAULT_EXPERT_SHAPE = (2048, 512)
DEFAULT_EXPERT_DTYPE = "bfloat16"
_PACKAGES = ("torch", "numpy", "tokenizers", "jinja2", "psutil", "rich", "typer")
_PROMPT = "What is 12 + 30?"


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What a checkpoint holds.

    `num_experts` and `top_k` are those of one MoE layer. `dtypes`: bytes stored in each.
    `expert_bytes` is one routed expert as stored, `routed_bytes` all of them, `rest_bytes`
    everything else. `convention` says in words how the weights lie in their files.
    `sampling_defaults` are the values the checkpoint sets itself.
    Units: bytes.
    """

    path: Path
    family: str
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    vocab_size: int
    max_positions: int
    expert_dtype: str
    dtypes: Mapping[str, int]
    num_parameters: int
    num_routed_parameters: int
    expert_bytes: int
    routed_bytes: int
    rest_bytes: int
    num_files: int
    convention: str
    has_tokenizer: bool
    has_chat_template: bool
    kv_bytes_per_token: int
    sampling_defaults: Mapping[str, Any]
    num_unused_tensors: int

    @property
    def num_experts_total(self) -> int:
        return self.num_moe_layers * self.num_experts


def describe_checkpoint(model: str | Path, *, hub_cache: Path | None = None) -> CheckpointSummary:
    """Describe `demo`, a directory or a hub id in the local cache.

    Raises: ModelNotFoundError; CheckpointError where it cannot be read or lacks weights.
    """
    checkpoint = Checkpoint.open(find_model(model, hub_cache=hub_cache))
    family = find_family(checkpoint.config)
    config = family.config(checkpoint.config)
    contents = _sort_tensors(checkpoint, family, config)
    tokenizer = Tokenizer.load(checkpoint.path)
    defaults = sampling_defaults_of(checkpoint, config, tokenizer)
    routed = [record for _, record in contents.parts]
    routed_bytes = sum(record.num_bytes for record in routed)
    dtypes: dict[str, int] = {}
    for record in checkpoint.tensors.values():
        dtypes[_dtype_name(record)] = dtypes.get(_dtype_name(record), 0) + record.num_bytes
    kv_values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_size
    return CheckpointSummary(
        path=checkpoint.path,
        family=family.name,
        num_layers=config.num_layers,
        num_moe_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        expert_dtype=_dtype_name(routed[0]),
        dtypes=dtypes,
        num_parameters=sum(map(_num_values, checkpoint.tensors.values())),
        num_routed_parameters=sum(map(_num_values, routed)),
        expert_bytes=routed_bytes // (config.num_moe_layers * config.num_experts),
        routed_bytes=routed_bytes,
        rest_bytes=checkpoint.num_bytes - routed_bytes,
        num_files=len(checkpoint.file_bytes),
        convention=_convention(contents.parts, len(checkpoint.file_bytes)),
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        kv_bytes_per_token=kv_values_per_token * routed[0].dtype.itemsize,
        sampling_defaults={
            name: value
            for name in SamplingParams.__dataclass_fields__
            if (value := getattr(defaults, name)) is not None
        },
        num_unused_tensors=contents.num_unused,
    )


Parts = Sequence[tuple[ExpertPart, TensorRecord]]


@dataclass(frozen=True, slots=True)
class _Contents:
    parts: Parts
    num_unused: int


def _sort_tensors(checkpoint: Checkpoint, family: Family, config: ModelConfig) -> _Contents:
    """Tell the routed experts from the rest. Raises: CheckpointError where something is missing."""
    weight_map = family.weight_map(config)
    missing = set(family.parameter_shapes(config))
    parts, num_unused = [], 0
    for record in checkpoint.tensors.values():
        try:
            target = weight_map(record.name)
        except KeyError:
            num_unused += 1
            continue
        if isinstance(target, ExpertPart):
            parts.append((target, record))
        elif target is not None:
            missing.discard(target)
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} parameters are missing, {min(missing)} among them; "
            "download the weights and config.json again"
        )
    matrix_size = config.hidden_size * config.moe_intermediate_size
    num_wanted = 3 * matrix_size * config.num_moe_layers * config.num_experts
    num_found = sum(_num_values(record) for _, record in parts)
    if num_found != num_wanted:
        raise CheckpointError(
            f"{checkpoint.path}: its routed experts have {num_found} parameters, config.json asks "
            f"for {num_wanted}; download the weights and config.json again"
        )
    return _Contents(parts, num_unused)


def _num_values(record: TensorRecord) -> int:
    return record.num_bytes // record.dtype.itemsize


def _dtype_name(record: TensorRecord) -> str:
    return str(record.dtype).removeprefix("torch.")


def _convention(parts: Parts, num_files: int) -> str:
    """How the experts lie in their files, in words (models.md 3.1)."""
    if any(part.expert is None for part, _ in parts):
        return "the experts of a layer stacked in one tensor"
    if num_files == 1:
        return "one file, one tensor for each matrix of an expert"
    files: dict[tuple[int, int | None], set[Path]] = {}
    for part, record in parts:
        files.setdefault((part.layer, part.expert), set()).add(record.path)
    if any(len(paths) > 1 for paths in files.values()):
        return "shards cut by size: matrices of one expert can lie in different files (LLaDA2.0)"
    return "shards cut by expert: each expert lies whole in one file (LLaDA2.1)"


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model can run on this machine, in a sentence; `plan` is None where it cannot."""

    is_fitting: bool
    verdict: str
    plan: MemoryPlan | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plan = None if self.plan is None else plan_to_dict(self.plan)
        return {"is_fitting": self.is_fitting, "verdict": self.verdict, "plan": plan}


def plan_to_dict(plan: MemoryPlan) -> dict[str, Any]:
    """A memory plan as plain JSON values."""
    return {
        "num_slots": plan.num_slots,
        "num_staging": plan.num_staging,
        "num_experts": plan.shape.num_experts_total,
        "expert_bytes": plan.shape.expert_bytes,
        "expert_memory_bytes": plan.expert_memory_bytes,
        "total_bytes": plan.total_bytes,
        "lines": [{"what": what, "bytes": size} for what, size in plan.lines()],
    }


def check_fit(
    model: str | Path, config: EngineConfig, *, usable_bytes: int, hub_cache: Path | None = None
) -> Fit:
    """The verdict on a model before anything of it is loaded. Raises: as `Engine`."""
    checkpoint = Checkpoint.open(find_model(model, hub_cache=hub_cache))
    family = find_family(checkpoint.config)
    model_config = family.config(checkpoint.config)
    sizes = WeightSizes.of(checkpoint, family, model_config, config)
    max_model_len = config.max_model_len or min(model_config.max_positions, DEFAULT_MODEL_LEN)
    try:
        plan = plan_model(config, model_config, sizes, max_model_len, DEFAULT_PROFILE)
    except DoesNotFitError as error:
        return Fit(False, f"It does not fit: {error}.", None)
    needs = f"The plan takes {format_size(plan.total_bytes)}; {format_size(usable_bytes)} are free."
    if plan.holds_all_experts:
        total = plan.shape.num_experts_total
        return Fit(True, f"It fits: all {total} experts stay in memory. {needs}", plan)
    per_layer = plan.num_slots / plan.shape.num_layers
    return Fit(
        True,
        f"It runs with its experts offloaded: {per_layer:.3g} of {plan.shape.num_experts} experts "
        f"per layer stay in memory, the rest is fetched when wanted. {needs}",
        plan,
    )


class _MissCounter:
    """Tokens of missed experts in denoising forwards; of all demanded ones where none is missed."""

    def __init__(self) -> None:
        self._missed = np.zeros(2, dtype=np.int64)
        self._demanded = np.zeros(2, dtype=np.int64)

    def __call__(self, demand: LayerDemand, plan: LayerPlan) -> None:
        if demand.context.is_denoise:
            is_miss = ~np.isin(demand.expert_ids, plan.hit_ids)
            self._missed += is_miss.sum(), demand.num_tokens[is_miss].sum()
            self._demanded += len(is_miss), demand.num_tokens.sum()

    def mean(self) -> float:
        num_experts, num_tokens = self._missed if self._missed[0] else self._demanded
        return float(num_tokens) / max(int(num_experts), 1)


def measure_tokens_per_miss(
    model: str | Path, *, hub_cache: Path | None = None, progress: Progress | None = None
) -> float:
    """n̄: tokens per missed expert of a short answer with a quarter of the experts in memory.

    Source: policies.md 2.1; an offline figure that dispatch refines while it runs.
    """
    config = EngineConfig(expert_memory="25%")
    with Engine(model, config, hub_cache=hub_cache, progress=progress) as engine:
        counter = _MissCounter()
        engine.experts.observers.append(counter)
        has_text = engine.tokenizer is not None
        engine.generate(_PROMPT if has_text else [0] * 8, SamplingParams(max_tokens=64))
        return counter.mean()


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """What dispatch weighs for one expert on one device.

    `t_h2d_s`: slow tier to a slot. `tau_s`: CPU time per token where a missed expert has n̄ tokens,
    so that n̄·τ is what it costs. `copy_share` is ρ, the share of misses that is copied.
    Units: seconds.
    """

    t_h2d_s: float
    tau_s: float
    copy_share: float


def expert_times(profile: HardwareProfile, expert_bytes: int) -> ExpertTimes:
    """Apply a profile to experts of one size."""
    costs = CostModel.from_profile(profile, expert_bytes)
    cpu_s = costs.cpu_s(profile.mean_tokens_per_miss)
    return ExpertTimes(
        costs.transfer_s,
        cpu_s / profile.mean_tokens_per_miss,
        cpu_s / (cpu_s + costs.transfer_s),
    )


def check_machine(
    model: str | None,
    device: str | None,
    *,
    is_quick: bool,
    directory: Path | None,
    threads: int | None,
    saves: bool,
    hub_cache: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure, store the profiles of `device` or of all, and judge `model`: plain JSON values.

    Without a model, experts of LLaDA2-mini are measured. n̄ comes from a run of the model where it
    fits and there is time, else of the bundled one. `say` is told what is going on.
    Raises: as `describe_checkpoint` and `measure_hardware`.
    """
    (hidden_size, intermediate_size), dtype = DEFAULT_EXPERT_SHAPE, DEFAULT_EXPERT_DTYPE
    fit = None
    if model is not None:
        summary = describe_checkpoint(model, hub_cache=hub_cache)
        hidden_size, intermediate_size = summary.hidden_size, summary.moe_intermediate_size
        dtype = summary.expert_dtype
        config = EngineConfig(device=device or "cpu", threads=threads)
        fit = check_fit(model, config, usable_bytes=usable_memory_bytes(), hub_cache=hub_cache)
        directory = directory or summary.path
    measured = measure_hardware(
        device=device or "cpu",
        directory=directory or _default_directory(hub_cache),
        expert_shape=(hidden_size, intermediate_size),
        dtype=getattr(torch, dtype),
        threads=threads,
        is_quick=is_quick,
        report=lambda step: say(f"measuring {step}"),
    )
    runs_model = model is not None and fit is not None and fit.is_fitting and not is_quick
    say("measuring tokens per missed expert")
    mean, source, notes = _tokens_per_miss(model if runs_model else None, hub_cache)
    devices = {}
    for name in DEVICES if device is None else (device,):
        profile = to_profile(measured, name, mean_tokens_per_miss=mean)
        path = default_profile_path(name)
        is_stored = False
        if saves:
            # What was measured is shown all the same.
            try:
                save_profile(profile, path)
                is_stored = True
            except OledMoeError as error:
                notes.append(f"the profile was not stored: {error}")
        devices[name] = {
            **asdict(expert_times(profile, measured.expert_bytes)),
            "profile": json.loads(profile.to_json()),
            "stored_at": str(path) if is_stored else None,
        }
    first = next(iter(devices.values()))
    return {
        "model": model,
        "t_h2d_s": first["t_h2d_s"],
        "tau_s": first["tau_s"],
        "mean_tokens_per_miss": mean,
        "mean_tokens_per_miss_source": source,
        "profile": first["profile"],
        "devices": devices,
        "disk_reads": [asdict(read) for read in measured.disk_reads],
        "fit": None if fit is None else fit.to_dict(),
        "warnings": [*measured.warnings, *notes],
        "measurements": measured.to_dict(),
        "versions": package_versions(),
    }


def _default_directory(hub_cache: Path | None) -> Path:
    """Where models would be: the hub cache, else here."""
    cache = hub_cache or Path.home() / ".cache" / "huggingface" / "hub"
    return cache if cache.is_dir() else Path.cwd()


def _tokens_per_miss(model: str | None, hub_cache: Path | None) -> tuple[float, str, list[str]]:
    """n̄ of a model, None for the bundled one; where it comes from; warnings."""
    is_bundled = model is None or model == DEMO_MODEL
    try:
        mean = measure_tokens_per_miss(model or DEMO_MODEL, hub_cache=hub_cache)
    except OledMoeError as error:
        guess = DEFAULT_PROFILE.mean_tokens_per_miss
        return guess, "a guess", [f"tokens per missed expert not measured: {error}"]
    return mean, f"measured on {'the bundled demo model' if is_bundled else model}", []


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter for what comes out."""
    return {name: version(name) for name in _PACKAGES}
