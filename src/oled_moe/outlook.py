"""What to expect of a model on a machine: does it fit, which cache, how fast.

From config.json and headers alone: no weight is read, no GPU and no second machine is needed.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch

from oled_moe.checkpoint import INDEX_NAME, Checkpoint
from oled_moe.config import (
    DEFAULT_RENOISING_STEPS,
    DTYPE_WORDS,
    DTYPES,
    ONE_BLOCK_ALGORITHMS,
    EngineConfig,
    SamplingParams,
    block_routing_words,
    check_int,
    format_size,
)
from oled_moe.costs import (
    DEFAULT_PROFILES,
    HardwareProfile,
    default_profile_path,
    load_profile,
)
from oled_moe.cuda import DEVICE_INDEX, MOST_AHEAD, check_cuda
from oled_moe.encodings import split_quantization
from oled_moe.engine import (
    DEFAULT_MODEL_LEN,
    ProcessMemory,
    WeightSizes,
    dtype_words,
    lossy_of,
    low_slots_of,
    open_low_precision,
    plan_model,
    plan_on_gpu,
    sampling_defaults_of,
)
from oled_moe.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
)
from oled_moe.hardware import load_hardware
from oled_moe.machine import machine_facts, usable_memory_bytes
from oled_moe.memory import (
    FORCE_ADVICE,
    SHARE_OF_FREE,
    SYSTEM_RESERVE_BYTES,
    GpuMemoryPlan,
    LowSlots,
    MemoryPlan,
    plan_gpu_memory,
    plan_memory,
)
from oled_moe.model_paths import find_sizes, is_hub_id
from oled_moe.models import Family, ModelConfig, find_family
from oled_moe.prediction import (
    DEFAULT_BLOCK_LENGTH,
    DEFAULT_PROMPT_TOKENS,
    Denoising,
    ModelSizes,
    Prediction,
    Residency,
    predict,
)
from oled_moe.quantization import FORM_WORDS, QuantSpec
from oled_moe.shapes import find_shape
from oled_moe.store import ExpertLayout, ExpertPart
from oled_moe.synthesis import MAX_BLOCK_LENGTH
from oled_moe.types import MoeShape

# Of what an index says the weights take; some count biases and buffers in, some do not.
_INDEX_TOLERANCE = 0.02
# Families whose routing has a preset of its own.
_PRESETS: Mapping[str, str] = {
    "sdar_moe": "sdar-30b",
    "rnd1": "rnd1",
    "llada": "llada-moe-7b",
    "diffusion_gemma": "diffusion-gemma-26b",
}
# What a GPU is taken to be where nobody says.
DEFAULT_GPU_HARDWARE = "rtx4090-ddr5"


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model of which only sizes are known. `notes` say where they come from, if not from headers.

    `denoising`: as the checkpoint and its family say. `has_weights`: whether every file is there.
    """

    name: str
    path: Path | None
    family: str
    config: ModelConfig
    weights: WeightSizes
    sizes: ModelSizes
    denoising: Denoising
    has_weights: bool
    notes: tuple[str, ...]


def open_sizes(
    model: str | Path,
    wanted: EngineConfig | None = None,
    *,
    form: str | None = None,
    hub_cache: Path | None = None,
) -> OpenedModel:
    """The sizes of `demo`, a directory, a hub id in the local cache, or a shape of shapes.py.

    Headers say them; where weights are missing, config.json does. `form`: a quantised one, such as
    int4, that the experts of what is no such pack yet are taken to have.
    Raises: ModelNotFoundError; CheckpointError where what is there cannot be read; ConfigError for
    a form that no kernel reads or that a pack has not.
    """
    opened = _open_as_stored(model, wanted or EngineConfig(), hub_cache)
    if form is None:
        return opened
    try:
        spec = QuantSpec.parse(form)
    except ConfigError:
        raise ConfigError(
            f"dtype is {form!r}; allowed: {DTYPE_WORDS}; for experts {FORM_WORDS}"
        ) from None
    return _as_pack(opened, spec)


def _as_pack(opened: OpenedModel, quant: QuantSpec) -> OpenedModel:
    """The sizes of what `oled-moe pack` would make. Raises: ConfigError for another form's pack."""
    layout = opened.weights.layout
    if layout.quant == quant:
        return opened
    if layout.quant is not None:
        raise ConfigError(
            f"dtype is '{quant}' and {opened.name} is packed as {layout.quant}; leave dtype out"
        )
    layout = replace(layout, quant=quant)
    shape = replace(opened.sizes.shape, expert_bytes=layout.slot_bytes)
    note = f"experts as `oled-moe pack` makes them with --dtype {quant}"
    return replace(
        opened,
        # A pack's slots are read as they lie.
        weights=replace(opened.weights, layout=layout, read_slots=1),
        sizes=replace(opened.sizes, shape=shape, expert_form=str(quant)),
        notes=(*opened.notes, note),
    )


def _open_as_stored(model: str | Path, wanted: EngineConfig, hub_cache: Path | None) -> OpenedModel:
    name = str(model)
    path = find_sizes(model, hub_cache=hub_cache)
    if path is None:
        note = f"{name} is not in the local hub cache: its sizes are taken from its name"
        return _open_shape(name, wanted, notes=[note] if is_hub_id(name) else [])
    missing = _missing_weights(path)
    if not missing:
        return _opened(name, Checkpoint.open(path), wanted, has_weights=True, notes=[])
    generation_path = path / "generation_config.json"
    generation = _read_object(generation_path) if generation_path.is_file() else {}
    checkpoint = Checkpoint(path, _read_object(path / "config.json"), generation, {}, {})
    note = f"sizes are those of config.json: {missing}; download it before you run the model"
    return _opened(name, checkpoint, wanted, has_weights=False, notes=[note])


def _open_shape(name: str, wanted: EngineConfig, *, notes: list[str]) -> OpenedModel:
    """The published sizes that go by a name, or by the last part of a hub id."""
    shape = find_shape(name.rpartition("/")[2])
    checkpoint = Checkpoint(Path(name), dict(shape.config), {}, {}, {})
    note = f"sizes are the published ones of {shape.name}, no files are here; {shape.note}".rstrip(
        "; ."
    )
    return _opened(name, checkpoint, wanted, has_weights=False, notes=[*notes, note])


def _missing_weights(path: Path) -> str:
    """What of the weights is not there, in words; empty where nothing is missing or known."""
    if not (path / "config.json").is_file():
        return ""
    index_path = path / INDEX_NAME
    if index_path.is_file():
        files = _read_object(index_path).get("weight_map")
        if not isinstance(files, dict):
            return ""
        names = {name for name in files.values() if isinstance(name, str)}
        missing = sorted(name for name in names if not os.path.lexists(path / name))
        return f"{len(missing)} of {len(names)} weight files are missing" if missing else ""
    has_weights = any(any(path.glob(f"*.{end}")) for end in ("safetensors", "bin", "gguf"))
    return "" if has_weights else "there is no weight file"


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises: CheckpointError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as JSON ({str(error)[:120]}); download it again"
        ) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: is not a JSON object; download it again")
    return values


def _opened(
    name: str, checkpoint: Checkpoint, wanted: EngineConfig, *, has_weights: bool, notes: list[str]
) -> OpenedModel:
    # Where there are only sizes, those of the weights as they are decoded.
    plain, quantised = split_quantization(checkpoint.config)
    if quantised is not None:
        checkpoint = replace(checkpoint, config=plain)
        notes = [*notes, f"its weights are {quantised.words}; sizes are those of bfloat16"]
    family = find_family(checkpoint.config)
    config = family.config(checkpoint.config)
    if wanted.max_model_len is not None and wanted.max_model_len > config.max_positions:
        raise ConfigError(
            f"max_model_len is {wanted.max_model_len}; allowed: 1 to {config.max_positions}, the "
            "model's max_position_embeddings"
        )
    _check_index(checkpoint, family, config)
    if has_weights:
        weights = WeightSizes.of(checkpoint, family, config, wanted)
    else:
        weights = _weights_of_config(checkpoint.config, family, config, wanted)
    defaults = sampling_defaults_of(checkpoint, config, None)
    capacity = config.decoding.expert_capacity
    if capacity is not None:
        notes = [
            *notes,
            f"block routing: {block_routing_words(capacity, config.num_experts)}; which experts "
            "these are is made up",
        ]
    return OpenedModel(
        name=name,
        path=checkpoint.path if checkpoint.path.exists() else None,
        family=family.name,
        config=config,
        weights=weights,
        sizes=_model_sizes(family, config, weights),
        denoising=_denoising(family, config, defaults),
        has_weights=has_weights,
        notes=tuple(notes),
    )


def _denoising(family: Family, config: ModelConfig, defaults: SamplingParams) -> Denoising:
    """How the family's models denoise where a request asks for nothing else."""
    decoding = config.decoding
    max_tokens = defaults.max_tokens or 256
    is_one_block = set(decoding.algorithms) <= set(ONE_BLOCK_ALGORITHMS)
    block_length = max_tokens if is_one_block else defaults.block_length or DEFAULT_BLOCK_LENGTH
    block_length = min(block_length, MAX_BLOCK_LENGTH)
    # One block is filled in so many steps, a random canvas in so many at most; elsewhere confidence
    # decides.
    tokens_per_step = max_tokens / (defaults.steps or max_tokens) if is_one_block else 0.0
    if decoding.canvas_length:
        tokens_per_step = block_length / (defaults.steps or DEFAULT_RENOISING_STEPS)
    return Denoising(
        block_length=block_length,
        canvas_tokens=max_tokens if decoding.is_whole else 0,
        tokens_per_step=tokens_per_step,
        preset=_PRESETS.get(family.name),
        expert_capacity=decoding.expert_capacity or 0,
        is_random=decoding.canvas_length > 0,
    )


def _config_dtype(values: Mapping[str, Any]) -> torch.dtype:
    """What config.json says the weights are stored as; bfloat16 where it does not."""
    named = str(values.get("torch_dtype") or values.get("dtype") or "bfloat16")
    name = named.removeprefix("torch.")
    dtype: torch.dtype = getattr(torch, name if name in DTYPES else "bfloat16")
    return dtype


def _weights_of_config(
    values: Mapping[str, Any], family: Family, config: ModelConfig, wanted: EngineConfig
) -> WeightSizes:
    """The sizes that the headers would say, from config.json alone."""
    stored = _config_dtype(values)
    dtype: torch.dtype = getattr(torch, wanted.dtype) if wanted.dtype else stored
    kept = family.kept_dtypes(config)
    dense_bytes = sum(
        prod(shape) * (stored if name in kept else dtype).itemsize
        for name, shape in family.parameter_shapes(config).items()
    )
    layout = ExpertLayout(
        config.hidden_size, config.moe_intermediate_size, dtype, config.activation
    )
    return WeightSizes(layout, dense_bytes, 1 if dtype == stored else 2)


def _check_index(checkpoint: Checkpoint, family: Family, config: ModelConfig) -> None:
    """Raises: CheckpointError where the index is not that of a model of this config.json."""
    index_path = checkpoint.path / INDEX_NAME
    if not index_path.is_file():
        return
    index = _read_object(index_path)
    names, metadata = index.get("weight_map"), index.get("metadata")
    fault, has_others = _fault_of_names(names if isinstance(names, dict) else {}, family, config)
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not fault and isinstance(said, int) and said > 0:
        num_values = sum(map(prod, family.parameter_shapes(config).values()))
        num_values += _num_expert_values(config)
        num_bytes = num_values * _config_dtype(checkpoint.config).itemsize
        # Tensors of other parts, such as eyes, are counted too.
        is_fine = has_others and said > num_bytes
        if not is_fine and abs(num_bytes - said) > _INDEX_TOLERANCE * said:
            fault = (
                f"says that the weights take {format_size(said)}, where config.json makes it "
                f"{format_size(num_bytes)}"
            )
    if fault:
        raise CheckpointError(
            f"{index_path}: {fault}: index and config.json do not belong together; download both "
            "again"
        )


def _fault_of_names(names: Iterable[str], family: Family, config: ModelConfig) -> tuple[str, bool]:
    """What is wrong with the tensors of an index, empty where nothing is; whether it lists others
    than the model's."""
    weight_map, found, has_others = family.weight_map(config), set[str | int](), False
    for name in names:
        try:
            target = weight_map(name)
        except CheckpointError:
            return f"lists {name[:200]}, which config.json does not provide for", has_others
        except KeyError:
            has_others = True
            continue
        if target is not None:
            found.add(target.layer if isinstance(target, ExpertPart) else target)
    missing = [name for name in family.parameter_shapes(config) if name not in found]
    missing += [f"experts of MoE layer {i}" for i in range(config.num_moe_layers) if i not in found]
    if missing:
        return f"lacks {len(missing)} of the model's tensors, {missing[0]} first", has_others
    return "", has_others


def _num_expert_values(config: ModelConfig) -> int:
    size = 3 * config.hidden_size * config.moe_intermediate_size
    return size * config.num_moe_layers * config.num_experts


def _model_sizes(family: Family, config: ModelConfig, weights: WeightSizes) -> ModelSizes:
    layout = weights.layout
    item_bytes = layout.dtype.itemsize
    vocabulary = (config.vocab_size, config.hidden_size)
    matrices = [
        shape
        for shape in family.parameter_shapes(config).values()
        if len(shape) > 1 and shape != vocabulary
    ]
    return ModelSizes(
        shape=MoeShape(config.num_moe_layers, config.num_experts, config.top_k, layout.slot_bytes),
        body_bytes=sum(map(prod, matrices)) * item_bytes,
        head_bytes=prod(vocabulary) * item_bytes,
        vocab_size=config.vocab_size,
        kv_bytes_per_token=config.kv_size * item_bytes,
        attention_size=config.query_size,
        dtype=str(layout.dtype).removeprefix("torch."),
        expert_form="" if layout.quant is None else str(layout.quant),
        plain_expert_bytes=replace(layout, quant=None).slot_bytes,
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a model is to run. `ram_bytes` is what the process may take, on the machine at hand
    beyond what it has; `gpu_bytes` what is free on the GPU. `is_imagined`: another machine, of
    whose RAM `reserve_bytes` are left to the system. `process_bytes`: what the program takes before
    a model is there, None for what it takes now."""

    device: str
    ram_bytes: int
    gpu_bytes: int | None = None
    is_imagined: bool = False
    process_bytes: int | None = None
    reserve_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def this_machine(device: str) -> Machine:
    """The machine at hand, for a device that it has.

    Raises: MissingDependencyError, ConfigError where `cuda` cannot run here.
    """
    gpu_bytes = None
    if device == "cuda":
        check_cuda()
        gpu_bytes = int(torch.cuda.mem_get_info(DEVICE_INDEX)[0])
    found = ProcessMemory.now()
    return Machine(device, found.usable_bytes, gpu_bytes, process_bytes=found.process_bytes)


def imagine(
    device: str,
    hardware: HardwareProfile,
    *,
    gpu_bytes: int | None = None,
    ram_bytes: int | None = None,
) -> Machine:
    """A machine of which only sizes are known; None takes the profile's, else those found here.

    What a system needs for itself is taken off the RAM.
    Raises: ConfigError where a size is missing, or given for a device that has no such memory.
    """
    if gpu_bytes is not None and device != "cuda":
        raise ConfigError(
            f"gpu-memory is given and device is {device!r}; leave one out, or take --device cuda"
        )
    if device == "cuda":
        gpu_bytes = gpu_bytes or hardware.gpu_memory_bytes
        if gpu_bytes is None:
            raise ConfigError(
                f"how much memory the GPU has is not known for {hardware.name}; give "
                "--gpu-memory SIZE"
            )
        ram_bytes = ram_bytes or hardware.ram_bytes
    if ram_bytes is None and device != "cuda":
        return Machine(device, usable_memory_bytes())
    if ram_bytes is None:
        facts = machine_facts()
        limit = facts["memory_limit_bytes"]
        ram_bytes = min(facts["memory_total_bytes"], limit or facts["memory_total_bytes"])
    reserve = min(SYSTEM_RESERVE_BYTES, ram_bytes // 4)
    return Machine(device, ram_bytes - reserve, gpu_bytes, is_imagined=True, reserve_bytes=reserve)


def find_hardware(name: str | Path | None, device: str) -> tuple[HardwareProfile, str]:
    """The profile to predict by, and where it comes from, in words.

    Raises: as `load_hardware`.
    """
    if name is not None:
        return load_hardware(name), str(name)
    path = default_profile_path(device)
    if path.is_file():
        return load_profile(path), str(path)
    if device == "cuda":
        return load_hardware(DEFAULT_GPU_HARDWARE), "assumed; --hardware names another"
    return DEFAULT_PROFILES[device], "not measured: run `oled-moe doctor`"


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model can run on a machine.

    `word`: fits, tight or does not fit; `verdict` a sentence; `remedy` which number to change,
    empty where none needs to. `plan`: None where it cannot run; a GpuMemoryPlan on `cuda`.
    """

    word: str
    verdict: str
    remedy: str
    plan: MemoryPlan | GpuMemoryPlan | None

    @property
    def is_fitting(self) -> bool:
        return self.plan is not None

    @property
    def slots(self) -> MemoryPlan | None:
        """The plan of the memory that holds slots."""
        return self.plan.gpu if isinstance(self.plan, GpuMemoryPlan) else self.plan

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plan = None if self.plan is None else plan_to_dict(self.plan)
        return {
            "is_fitting": self.is_fitting,
            "word": self.word,
            "verdict": self.verdict,
            "remedy": self.remedy,
            "plan": plan,
        }


def plan_to_dict(plan: MemoryPlan | GpuMemoryPlan) -> dict[str, Any]:
    """A memory plan as plain JSON values."""
    if isinstance(plan, GpuMemoryPlan):
        return {
            **plan_to_dict(plan.gpu),
            "lines": _line_dicts(plan.gpu_lines()),
            "ram_lines": _line_dicts(plan.ram_lines()),
            "num_pinned": plan.num_pinned,
            "num_on_disk": plan.num_on_disk,
            "ram_bytes": plan.ram_bytes,
        }
    return {
        "num_slots": plan.num_slots,
        "num_staging": plan.num_staging,
        "num_low_slots": 0 if plan.low is None else plan.low.num_slots + plan.low.num_staging,
        "low_slots_bytes": plan.low_bytes,
        "num_experts": plan.shape.num_experts_total,
        "expert_bytes": plan.shape.expert_bytes,
        "expert_memory_bytes": plan.expert_memory_bytes,
        "total_bytes": plan.total_bytes,
        "lines": _line_dicts(plan.lines()),
    }


def _line_dicts(lines: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"what": what, "bytes": size} for what, size in lines]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to expect of a model on a machine: whether it fits, with which cache, how fast.

    `prediction` is None where it does not fit. `hardware_source` says where the numbers of the
    machine come from.
    """

    model: OpenedModel
    machine: Machine
    config: EngineConfig
    hardware: HardwareProfile
    hardware_source: str
    fit: Fit
    prediction: Prediction | None

    @property
    def spare_bytes(self) -> int | None:
        """What a plan without a budget leaves of free memory, though experts are away; else None.

        On a GPU such a plan leaves nothing but its reserve.
        """
        plan, config = self.fit.plan, self.config
        is_given = (config.experts_per_layer, config.expert_memory, config.memory) != (None,) * 3
        if not isinstance(plan, MemoryPlan) or is_given or plan.holds_all_experts:
            return None
        taken = plan.total_bytes
        if not self.machine.is_imagined:
            taken -= plan.model.process_bytes
        return max(0, self.machine.ram_bytes - taken)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        slots = self.fit.slots
        cache = None
        if slots is not None and self.prediction is not None:
            cache = {
                "policy": self.prediction.policy,
                "experts_per_layer": slots.num_slots / slots.shape.num_layers,
                "num_experts_per_layer": slots.shape.num_experts,
                "num_layers": slots.shape.num_layers,
                "num_slots": slots.num_slots,
                "num_staging": slots.num_staging,
                "active_per_layer": self.prediction.typical.active_per_layer,
            }
        return {
            "model": self.model.name,
            "path": None if self.model.path is None else str(self.model.path),
            "family": self.model.family,
            "has_weights": self.model.has_weights,
            "dtype": dtype_words(self.model.weights.layout),
            "device": self.machine.device,
            "machine": self.machine.to_dict(),
            "hardware": self.hardware.name,
            "hardware_source": self.hardware_source,
            "is_hardware_measured": self.hardware.is_measured,
            "fit": self.fit.to_dict(),
            "spare_bytes": self.spare_bytes,
            "cache": cache,
            "prediction": None if self.prediction is None else self.prediction.to_dict(),
            "notes": list(self.model.notes),
        }


def outlook(
    model: OpenedModel,
    config: EngineConfig,
    machine: Machine,
    hardware: HardwareProfile,
    *,
    hardware_source: str,
    prompt_tokens: int | None = None,
) -> Outlook:
    """Plan a model and predict its speed from sizes alone. `config.device` is not looked at.

    `prompt_tokens`: DEFAULT_PROMPT_TOKENS where None, or what the model's context has room for.
    Raises: ConfigError for numbers that make no sense, and as `open_low_precision`. What does not
    fit is said in the outlook.
    """
    model = replace(model, notes=(*model.notes, *_lossy_notes(config)))
    num_behind = model.denoising.canvas_tokens + model.config.decoding.num_reserved
    most = model.config.max_positions - num_behind
    if prompt_tokens is None:
        prompt_tokens = max(1, min(DEFAULT_PROMPT_TOKENS, most))
    check_int("prompt-tokens", prompt_tokens, minimum=1, maximum=most)
    try:
        plan = plan_for(model, config, machine, hardware)
    except DoesNotFitError as error:
        # Commands that only look ahead have no --force.
        why = str(error).replace(f", {FORCE_ADVICE}", "")
        fit = Fit("does not fit", f"It does not fit: {why}.", why, None)
        return Outlook(model, machine, config, hardware, hardware_source, fit, None)
    prediction = predict(
        model.sizes,
        _residency(plan, config, machine, hardware),
        hardware,
        policy=policy_name(config, model.config.decoding.policy),
        prompt_tokens=prompt_tokens,
        denoising=model.denoising,
    )
    fit = _fit(plan, config, machine, prediction.typical.active_per_layer)
    return Outlook(model, machine, config, hardware, hardware_source, fit, prediction)


def _lossy_notes(config: EngineConfig) -> list[str]:
    """What of a lossy rule is not in the prediction."""
    if config.lossy is None:
        return []
    if config.low_precision is not None:
        missed = "misses are predicted as if all came in full, low-precision slots are counted"
    else:
        missed = "what is predicted is without it"
    return [f"lossy {config.lossy} changes answers: {missed}"]


def policy_name(config: EngineConfig, default: str) -> str:
    """The policy as text. Raises: ConfigError for a policy object, which predicts nothing here."""
    policy = default if config.policy is None else config.policy
    if not isinstance(policy, str):
        raise ConfigError(f"policy is {policy!r}; allowed here: the name of a policy")
    return policy


def plan_for(
    model: OpenedModel, config: EngineConfig, machine: Machine, hardware: HardwareProfile
) -> MemoryPlan | GpuMemoryPlan:
    """The memory plan of a model on a machine, this one or another.

    Raises: as `plan_model` and `open_low_precision`.
    """
    here = replace(config, device=machine.device)
    rule = lossy_of(config, model.config)
    pack = open_low_precision(here, model.config, model.weights.layout)
    low = low_slots_of(rule, pack, model.config)
    plan = _plan_with(model, here, machine, hardware, low)
    if low is not None and isinstance(plan, MemoryPlan) and plan.low is None:
        # All experts fit in full: nothing of the pack is held anywhere.
        return _plan_with(model, here, machine, hardware, None)
    return plan


def _plan_with(
    model: OpenedModel,
    here: EngineConfig,
    machine: Machine,
    hardware: HardwareProfile,
    low: LowSlots | None,
) -> MemoryPlan | GpuMemoryPlan:
    """`plan_for` a config of the machine's device, with slots for a lower precision."""
    positions = here.max_model_len or min(model.config.max_positions, DEFAULT_MODEL_LEN)
    if not machine.is_imagined:
        found = None
        if machine.process_bytes is not None:
            found = ProcessMemory(machine.process_bytes, machine.ram_bytes)
        sizes = (here, model.config, model.weights, positions, hardware)
        if machine.gpu_bytes is None:
            return plan_model(*sizes, low, found=found)
        return plan_on_gpu(*sizes, gpu_bytes=machine.gpu_bytes, found=found)
    # What a model needs besides slots is the same wherever it runs.
    anywhere = replace(here, experts_per_layer=0, expert_memory=None, memory=None, force=True)
    is_gpu = machine.gpu_bytes is not None
    needs = plan_model(
        replace(anywhere, device="cpu") if is_gpu else anywhere,
        model.config, model.weights, positions, hardware, low,
    )  # fmt: skip
    if machine.gpu_bytes is not None:
        # One buffer for each reading thread and each copy that is on its way to the GPU.
        depth = hardware.disk_queue_depth
        buffer_bytes = needs.model.buffer_bytes // depth * (depth + MOST_AHEAD + 1)
        return plan_gpu_memory(
            here,
            needs.shape,
            replace(needs.model, buffer_bytes=buffer_bytes),
            gpu_bytes=machine.gpu_bytes,
            ram_bytes=machine.ram_bytes,
            more_room="raise gpu-memory",
        )
    # Another machine has not loaded the program yet.
    usable_bytes = max(0, machine.ram_bytes - needs.model.process_bytes)
    return plan_memory(
        here, needs.shape, needs.model, usable_bytes=usable_bytes, more_room="raise ram", low=low
    )


def _residency(
    plan: MemoryPlan | GpuMemoryPlan,
    config: EngineConfig,
    machine: Machine,
    hardware: HardwareProfile,
) -> Residency:
    if isinstance(plan, GpuMemoryPlan):
        return Residency(
            machine.device,
            plan.gpu.num_slots,
            plan.gpu.num_staging,
            disk_share=plan.num_on_disk / plan.shape.num_experts_total,
            # The engine computes none on the CPU where some of them are on disk.
            has_cpu_experts=config.cpu_experts
            and hardware.has_cpu_experts
            and not plan.num_on_disk,
        )
    is_emulated = machine.device == "emulated"
    return Residency(
        machine.device,
        plan.num_slots,
        plan.num_staging,
        disk_share=0.0 if is_emulated else 1.0,
        has_cpu_experts=is_emulated and config.cpu_experts,
    )


def _how_to_keep(active: float, slots: MemoryPlan, config: EngineConfig, machine: Machine) -> str:
    """Which number to change, and by how much, for slots that hold `active` experts per layer."""
    shape = slots.shape
    if config.experts_per_layer is not None:
        return f"raise experts-per-layer to {ceil(active)}"
    more_bytes = (ceil(active * shape.num_layers) - slots.num_slots) * shape.expert_bytes
    more = format_size(more_bytes)
    if config.expert_memory is not None:
        return f"raise expert-memory by {more}"
    if config.memory is not None:
        return f"raise memory by {more}"
    if machine.gpu_bytes is not None:
        is_flag = machine.is_imagined
        return f"raise gpu-memory by {more}" if is_flag else f"free {more} more GPU memory"
    # Without a budget the engine takes a share of what is free.
    more = format_size(more_bytes / SHARE_OF_FREE)
    return f"raise ram by {more}" if machine.is_imagined else f"free {more} more RAM"


def _fit(
    plan: MemoryPlan | GpuMemoryPlan, config: EngineConfig, machine: Machine, active: float
) -> Fit:
    """The verdict on a plan; `active`: experts that a forward wants of a layer."""
    slots = plan.gpu if isinstance(plan, GpuMemoryPlan) else plan
    has = machine.ram_bytes if machine.gpu_bytes is None else machine.gpu_bytes
    where = "are free" if machine.gpu_bytes is None else "of GPU memory are there"
    needs = f"The plan takes {format_size(slots.total_bytes)}; {format_size(has)} {where}."
    total, shape = slots.shape.num_experts_total, slots.shape
    if slots.holds_all_experts:
        return Fit("fits", f"It fits: all {total} experts stay in memory. {needs}", "", plan)
    per_layer = slots.num_slots / shape.num_layers
    sentence = (
        f"{per_layer:.3g} of {shape.num_experts} experts per layer stay in memory, the rest is "
        f"fetched when wanted. {needs}"
    )
    advice = []
    if per_layer < active:
        advice.append(
            f"a forward wants about {active:.0f} experts per layer: "
            f"{_how_to_keep(active, slots, config, machine)} to keep them all"
        )
    if isinstance(plan, GpuMemoryPlan) and plan.num_on_disk:
        more = format_size(plan.num_on_disk * shape.expert_bytes)
        remedy = f"raise ram by {more}" if machine.is_imagined else f"free {more} more RAM"
        advice.append(
            f"{plan.num_on_disk} experts do not fit into RAM and stay on disk: {remedy} to hold "
            "them"
        )
    if advice:
        remedy = "; ".join(advice)
        return Fit("tight", f"It runs, but is tight: {sentence}", remedy, plan)
    return Fit("fits", f"It fits with its experts offloaded: {sentence}", "", plan)
