"""What a person asks of a checkpoint or a machine before a model runs, as plain values.

Checkpoints are described from JSON files and headers alone: no weight is read here, except where
`measure_tokens_per_miss` runs a model for a moment.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from oled_moe.checkpoint import Checkpoint, Parts, find_weights
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_PROFILE, PROFILE_DEVICES, CostModel, HardwareProfile
from oled_moe.cuda import check_cuda
from oled_moe.devices import Progress
from oled_moe.encodings import EncodedRecord, split_quantization
from oled_moe.engine import Engine, sampling_defaults_of
from oled_moe.errors import CheckpointError, DoesNotFitError, OledMoeError
from oled_moe.hardware import load_hardware
from oled_moe.hub_cache import default_hub_cache
from oled_moe.kernels import KERNELS
from oled_moe.measuring import QUICK
from oled_moe.model_paths import DEMO_MODEL, find_model
from oled_moe.models import ModelConfig, find_family
from oled_moe.outlook import (
    OpenedModel,
    open_sizes,
    outlook,
    plan_for,
    this_machine,
)
from oled_moe.outlook import plan_to_dict as plan_to_dict
from oled_moe.packs import expert_dtype_name
from oled_moe.profiler import (
    Measurements,
    default_profile_path,
    expert_products,
    measure_hardware,
    save_profile,
    to_profile,
)
from oled_moe.store import ExpertLayout, SlotArena
from oled_moe.tensor_files import TensorRecord
from oled_moe.tokenization import Tokenizer
from oled_moe.types import ForwardOutcome, LayerDemand, LayerPlan

# The experts of LLaDA2-mini, for machines that are measured without a model.
DEFAULT_EXPERT_SHAPE = (2048, 512)
DEFAULT_EXPERT_DTYPE = "bfloat16"
_PACKAGES = ("torch", "numpy", "tokenizers", "jinja2", "psutil", "rich", "typer")
_PROMPT = "What is 12 + 30?"
_NUM_TIMED_EXPERTS = 32


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What a checkpoint holds.

    `num_experts` and `top_k` are those of one MoE layer. `dtypes`: bytes stored in each.
    `expert_bytes` is one routed expert as stored, `routed_bytes` all of them, `rest_bytes`
    everything else. `convention` says in words how the weights lie in their files, `encoding` how
    they are quantised where they are decoded when they are read.
    `sampling_defaults` are the values the checkpoint sets itself. `expert_capacity`: the experts of
    a layer that a block admits, None without block routing.
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
    is_pack: bool
    encoding: str | None
    expert_capacity: int | None = None

    @property
    def num_experts_total(self) -> int:
        return self.num_moe_layers * self.num_experts


def check_config(values: Mapping[str, Any]) -> None:
    """Raises: CheckpointError for a config.json of a model that cannot be run here."""
    plain, _ = split_quantization(values)
    find_family(plain).config(plain)


def describe_checkpoint(model: str | Path, *, hub_cache: Path | None = None) -> CheckpointSummary:
    """Describe `demo`, a directory or a hub id in the local cache.

    Raises: ModelNotFoundError; CheckpointError where it cannot be read, or lacks weights that
    loading would ask for.
    """
    checkpoint = Checkpoint.open(find_model(model, hub_cache=hub_cache))
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
    tokenizer = Tokenizer.load(checkpoint.path)
    defaults = sampling_defaults_of(checkpoint, config, tokenizer)
    routed, pack = [record for record, _ in found.experts], checkpoint.pack
    dtype = pack.layout.dtype if pack is not None else routed[0].dtype
    routed_bytes = sum(record.stored_bytes for record in routed)
    num_routed = sum(map(_num_values, routed))
    if pack is not None:
        routed_bytes, num_routed = pack.expert_bytes, _num_wanted(config)
    kv_values_per_token = config.kv_size
    num_experts_total = config.num_moe_layers * config.num_experts
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
        expert_dtype=_name(dtype) if pack is None else expert_dtype_name(pack.layout),
        dtypes=_stored_dtypes(checkpoint),
        num_parameters=sum(_num_values(record) for record in checkpoint.tensors.values())
        + (num_routed if pack is not None else 0),
        num_routed_parameters=num_routed,
        expert_bytes=routed_bytes // num_experts_total,
        routed_bytes=routed_bytes,
        rest_bytes=checkpoint.num_bytes - routed_bytes,
        num_files=len(checkpoint.file_bytes),
        convention=_convention(found.experts, len(checkpoint.file_bytes)),
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        kv_bytes_per_token=kv_values_per_token * dtype.itemsize,
        sampling_defaults={
            name: value
            for name in SamplingParams.__dataclass_fields__
            if (value := getattr(defaults, name)) is not None
        },
        num_unused_tensors=len(found.unused),
        is_pack=pack is not None,
        encoding=checkpoint.encoding,
        expert_capacity=config.decoding.expert_capacity,
    )


def verify_pack(
    model: str | Path, *, hub_cache: Path | None = None, progress: Progress | None = None
) -> int:
    """Read all of a pack and compare it with its checksums; returns how many bytes were read.

    What `describe_checkpoint` reads is compared there: small files and headers.
    Raises: CheckpointError naming what is damaged, the first three of it.
    """
    checkpoint = Checkpoint.open(find_model(model, hub_cache=hub_cache))
    pack = checkpoint.pack
    if pack is None:
        raise CheckpointError(f"{checkpoint.path} is no pack, so nothing says what it should be")
    slot = torch.empty(pack.layout.slot_bytes, dtype=torch.uint8)
    what, num_done, damaged = f"reading {checkpoint.path}", 0, []
    for record in (*checkpoint.tensors.values(), *pack.slots()):
        try:
            record.verify(slot)
        except CheckpointError as error:
            damaged.append(str(error))
        num_done += record.num_bytes
        if progress is not None:
            progress(what, num_done, checkpoint.num_bytes)
    if damaged:
        rest = f"; and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise CheckpointError("; ".join(damaged[:3]) + rest)
    return num_done


def _stored_dtypes(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes stored in each dtype, packed experts by the name of their form."""
    dtypes: dict[str, int] = {}
    if checkpoint.pack is not None:
        dtypes[expert_dtype_name(checkpoint.pack.layout)] = checkpoint.pack.expert_bytes
    for record in checkpoint.tensors.values():
        parts = record.parts if isinstance(record, EncodedRecord) else (record,)
        for part in parts:
            dtypes[_name(part.dtype)] = dtypes.get(_name(part.dtype), 0) + part.num_bytes
    return dtypes


def _num_wanted(config: ModelConfig) -> int:
    """Parameters of all routed experts."""
    matrix_size = config.hidden_size * config.moe_intermediate_size
    return 3 * matrix_size * config.num_moe_layers * config.num_experts


def _num_values(record: TensorRecord) -> int:
    return record.num_bytes // record.dtype.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _convention(parts: Parts, num_files: int) -> str:
    """How the experts lie in their files, in words (models.md 3.1)."""
    if not parts:
        return "packed: each expert is one aligned read, with a checksum"
    if any(part.expert is None for _, part in parts):
        return "the experts of a layer stacked in one tensor"
    if num_files == 1:
        return "one file, one tensor for each matrix of an expert"
    files: dict[tuple[int, int | None], set[Path]] = {}
    for record, part in parts:
        files.setdefault((part.layer, part.expert), set()).add(record.path)
    if any(len(paths) > 1 for paths in files.values()):
        return "shards cut by size: matrices of one expert can lie in different files (LLaDA2.0)"
    return "shards cut by expert: each expert lies whole in one file (LLaDA2.1)"


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


class _ForwardTimer:
    """When forwards ended, and how many experts they demanded and copied; for one engine."""

    def __init__(self) -> None:
        self._moments: list[float] = []
        self._num_experts = self._num_loads = 0

    def on_demand(self, demand: LayerDemand, plan: LayerPlan) -> None:
        self._num_experts += len(demand.expert_ids)
        self._num_loads += len(plan.load_ids) + len(plan.staged_ids)

    def on_outcome(self, outcome: ForwardOutcome) -> None:
        del outcome
        self._moments.append(perf_counter())

    def forward_s(self, *, is_disturbed: bool) -> float:
        """The median forward; where others were busy, one that few were faster than."""
        return float(np.quantile(np.diff(self._moments), 0.1 if is_disturbed else 0.5))

    @property
    def num_experts(self) -> float:
        """Demanded by a mean forward."""
        return self._num_experts / len(self._moments)

    @property
    def num_loads(self) -> float:
        """Copied on demand for a mean forward."""
        return self._num_loads / len(self._moments)


@dataclass(frozen=True, slots=True)
class Software:
    """What the program itself takes, beside weights and bytes. Units: seconds.

    `layer_s`: one layer, the loop around a forward counted as one more; `load_s`: one copy on
    demand of an expert of no size.
    """

    layer_s: float
    load_s: float


def measure_software(device: str, *, is_disturbed: bool = False) -> Software:
    """Time the bundled model, whose weights are a few MB: its forwards are nearly all software.

    Its experts, measured apart, are taken off; copies are what a quarter of the experts in memory
    takes more than all.
    """
    resident, layout, num_layers = _time_demo(device, "100%")
    few, _, _ = _time_demo(device, "25%")
    arena = SlotArena.empty(layout, 2 * _NUM_TIMED_EXPERTS)
    arena.memory.zero_()
    products, _ = expert_products("cpu", KERNELS["cpu"](1), arena, QUICK)
    time = next(product.seconds for product in products if product.num_rows == 2)
    expert_s = time.minimum if is_disturbed else time.median
    # To a GPU such experts are nothing beside starting their kernel.
    if device == "cuda":
        expert_s = 0.0
    forward_s = resident.forward_s(is_disturbed=is_disturbed)
    layer_s = (forward_s - resident.num_experts * expert_s) / (num_layers + 1)
    loads_s = few.forward_s(is_disturbed=is_disturbed) - forward_s
    return Software(
        # Where experts seem to explain nearly all, something else was measured.
        max(layer_s, forward_s / (num_layers + 1) / 10),
        max(0.0, loads_s / max(1.0, few.num_loads)),
    )


def _time_demo(device: str, expert_memory: str) -> tuple[_ForwardTimer, ExpertLayout, int]:
    """An answer at one token a step, many forwards of one kind; the layout; the layers."""
    timer = _ForwardTimer()
    params = SamplingParams(max_tokens=32, threshold=1.0)
    config = EngineConfig(device=device, expert_memory=expert_memory, cpu_experts=False)
    with Engine(DEMO_MODEL, config) as engine:
        engine.generate(_PROMPT, params)
        engine.experts.observers.append(timer.on_demand)
        engine.outcome_observers.append(timer.on_outcome)
        engine.generate(_PROMPT, params)
        model = engine.model_config
        layout = ExpertLayout(
            model.hidden_size, model.moe_intermediate_size, engine.dtype, model.activation
        )
        return timer, layout, model.num_layers


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


@dataclass(frozen=True, slots=True)
class Question:
    """What `doctor` is asked of a model besides measuring: how it is to run.

    `hardware`: the profile to predict by, by name or path; None for what is being measured. `form`:
    a quantised one that its experts are taken to have.
    """

    model: str
    config: EngineConfig
    device: str
    prompt_tokens: int | None = None
    hardware: str | Path | None = None
    form: str | None = None


def check_machine(
    question: Question | None,
    device: str | None,
    *,
    is_quick: bool,
    directory: Path | None,
    threads: int | None,
    saves: bool,
    hub_cache: Path | None = None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure, store the profiles of `device` or of all, and judge a model: plain JSON values.

    Without a model, experts of LLaDA2-mini are measured. n̄ comes from a run of the model where it
    fits and there is time, else of the bundled one. `say` is told what is going on.
    Raises: as `open_sizes`, `this_machine` and `measure_hardware`.
    """
    (hidden_size, intermediate_size), dtype = DEFAULT_EXPERT_SHAPE, DEFAULT_EXPERT_DTYPE
    model, machine, given = None, None, None
    if device == "cuda":
        check_cuda()
    if question is not None:
        say("reading headers")
        model = open_sizes(question.model, question.config, form=question.form, hub_cache=hub_cache)
        machine = this_machine(question.device)
        if question.hardware is not None:
            given = load_hardware(question.hardware)
        hidden_size = model.config.hidden_size
        intermediate_size = model.config.moe_intermediate_size
        dtype = model.sizes.dtype
        directory = directory or model.path
    measured = measure_hardware(
        device=device or "cpu",
        directory=directory or _default_directory(hub_cache),
        expert_shape=(hidden_size, intermediate_size),
        dtype=getattr(torch, dtype),
        quant=None if model is None else model.weights.layout.quant,
        threads=threads,
        is_quick=is_quick,
        report=lambda step: say(f"measuring {step}"),
    )
    profiles, source, notes = _profiles(
        question, model, measured, device, is_quick=is_quick, hub_cache=hub_cache, say=say
    )
    devices = {
        name: {
            **asdict(expert_times(profile, measured.expert_bytes)),
            "profile": json.loads(profile.to_json()),
            "stored_at": _store(profile, name, notes) if saves else None,
        }
        for name, profile in profiles.items()
    }
    view = None
    if question is not None and model is not None and machine is not None:
        say("predicting")
        profile = given or profiles.get(question.device) or next(iter(profiles.values()))
        view = outlook(
            model,
            question.config,
            machine,
            profile,
            hardware_source="measured now" if given is None else str(question.hardware),
            prompt_tokens=question.prompt_tokens,
        )
    first = next(iter(devices.values()))
    return {
        "model": None if question is None else question.model,
        "t_h2d_s": first["t_h2d_s"],
        "tau_s": first["tau_s"],
        "mean_tokens_per_miss": first["profile"]["mean_tokens_per_miss"],
        "mean_tokens_per_miss_source": source,
        "profile": first["profile"],
        "devices": devices,
        "disk_reads": [asdict(read) for read in measured.disk_reads],
        "fit": None if view is None else view.fit.to_dict(),
        "outlook": None if view is None else view.to_dict(),
        "warnings": [*measured.warnings, *notes],
        "measurements": measured.to_dict(),
        "versions": package_versions(),
    }


def _profiles(
    question: Question | None,
    model: OpenedModel | None,
    measured: Measurements,
    device: str | None,
    *,
    is_quick: bool,
    hub_cache: Path | None,
    say: Callable[[str], None],
) -> tuple[dict[str, HardwareProfile], str, list[str]]:
    """A profile for each device asked for; where n̄ comes from; warnings."""
    runs_model = False
    if question is not None and model is not None and model.has_weights and not is_quick:
        guess = to_profile(measured, "cpu")
        machine = this_machine("cpu")
        try:
            plan_for(model, EngineConfig(expert_memory="25%"), machine, guess)
            runs_model = True
        except DoesNotFitError:
            runs_model = False
    say("measuring tokens per missed expert")
    name = question.model if question is not None and runs_model else None
    mean, source, notes = _tokens_per_miss(name, hub_cache)
    say("measuring software around layers")
    profiles: dict[str, HardwareProfile] = {}
    software = Software(0.0, 0.0)
    for each in _measured_devices(measured) if device is None else (device,):
        # Quickly, one device stands for all.
        if not profiles or not is_quick:
            software = _software(each, measured.is_disturbed, notes)
        profiles[each] = to_profile(
            measured,
            each,
            mean_tokens_per_miss=mean,
            layer_overhead_s=software.layer_s,
            forward_overhead_s=software.layer_s,
            load_overhead_s=software.load_s,
        )
    return profiles, source, notes


def _measured_devices(measured: Measurements) -> tuple[str, ...]:
    """All that this machine has; a GPU where it could be measured."""
    names = (name for name in PROFILE_DEVICES if name != "cuda")
    return (*names, "cuda") if measured.gpu is not None else tuple(names)


def _software(device: str, is_disturbed: bool, notes: list[str]) -> Software:
    """Zeros and a note where it cannot be measured."""
    try:
        return measure_software(device, is_disturbed=is_disturbed)
    except OledMoeError as error:
        notes.append(f"software around layers not measured for {device}: {error}")
        return Software(0.0, 0.0)


def _store(profile: HardwareProfile, device: str, notes: list[str]) -> str | None:
    """Where it was stored; None and a note where it was not: what was measured is shown anyway."""
    path = default_profile_path(device)
    try:
        save_profile(profile, path)
        return str(path)
    except OledMoeError as error:
        notes.append(f"the profile was not stored: {error}")
        return None


def _default_directory(hub_cache: Path | None) -> Path:
    """Where models would be: the hub cache, else here."""
    cache = hub_cache or default_hub_cache()
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
