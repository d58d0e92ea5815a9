"""A Transformers checkpoint opened in two parts: experts stay in its files, the rest is loaded.

Transformers itself loads the rest, with its own renamings and conversions; those of experts are
read as a map from tensors to parts of experts, so that every expert is found where it lies.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from oled_moe.checkpoint import Checkpoint, read_weights
from oled_moe.config import dtype_name
from oled_moe.errors import CheckpointError, ConfigError
from oled_moe.integrations.expert_modules import (
    WEIGHTS,
    ExpertModules,
    find_expert_modules,
    strip,
)
from oled_moe.model_paths import find_model
from oled_moe.store import DiskExpertStore, ExpertPart, Matrix

_MATRIX_OF: dict[str, Matrix] = {"gate_up_proj": "gate_up", "down_proj": "down"}
# What each source of a converter is, by what it makes.
_SOURCES: dict[str, tuple[Matrix, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}

# What Transformers raises, wherever it comes upon it, for a config that says what cannot be, and
# for files that are not what their headers said.
_REFUSALS = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    *(ArithmeticError, RuntimeError, StrictDataclassError),
)


@dataclass(frozen=True, slots=True)
class PretrainedExperts:
    """A checkpoint whose headers are read. `experts` has modules without weights, of a model that
    is never run; `parts` says what its tensors are to experts. Units: bytes."""

    path: Path
    model_class: Any
    dtype: torch.dtype
    checkpoint: Checkpoint
    parts: Mapping[str, ExpertPart]
    experts: ExpertModules
    dense_bytes: int

    @classmethod
    def open(cls, path: str | Path, dtype: torch.dtype | str | None) -> "PretrainedExperts":
        """Read config and headers. `dtype` None: what the config says, else the experts' own.

        Raises: ModelNotFoundError, CheckpointError, ConfigError.
        """
        directory = find_model(path)
        checkpoint = Checkpoint.open(directory)
        if checkpoint.pack is not None:
            raise ConfigError(
                f"{directory}: is a pack of oled-moe, which Transformers does not read; name the "
                "checkpoint that it came from"
            )
        if checkpoint.path.suffix == ".gguf":
            raise ConfigError(
                f"{checkpoint.path}: is a GGUF file, which is read for this package's own families "
                "only; name a checkpoint with *.safetensors files"
            )
        config = _config_of(directory)
        model_class = _class_of(config)
        wanted = _dtype_of(dtype) or _dtype_of(getattr(config, "dtype", None))
        outline = _outline_of(directory, model_class, config)
        found = find_expert_modules(outline)
        if found.is_transposed:
            raise ConfigError(
                f"{directory}: {model_class.__name__} keeps its experts transposed, which is not "
                "read from a checkpoint; load the model and give it instead of the path"
            )
        parts = _parts_of(checkpoint, outline, found)
        stored = next(checkpoint.tensors[name].dtype for name in parts)
        wanted = wanted or stored
        num_dense = sum(each.numel() for each in outline.parameters())
        num_dense -= sum(up.numel() + down.numel() for up, down in found.parameters)
        return cls(
            directory,
            model_class,
            wanted,
            checkpoint,
            parts,
            find_expert_modules(outline, wanted),
            num_dense * wanted.itemsize,
        )

    def open_store(self, method: str) -> DiskExpertStore:
        """All experts where they lie. Raises: CheckpointError where one is missing or misshapen."""
        shape, layout = self.experts.shape, self.experts.layout
        _, store = read_weights(
            self.checkpoint,
            map_weight=self.parts.get,
            shapes={},
            num_moe_layers=shape.num_layers,
            num_experts=shape.num_experts,
            hidden_size=layout.hidden_size,
            intermediate_size=layout.intermediate_size,
            dtype=layout.dtype,
            keep_dtype=(),
            method=method,
        )
        return store

    def load_rest(self) -> tuple[PreTrainedModel, ExpertModules]:
        """The model without its experts' weights, and its expert modules."""
        base, found = self.model_class, self.experts
        prefix = f"{base.base_model_prefix}."
        names = [name for group in found.names for name in group]
        expected = [re.escape(name.removeprefix(prefix)) for name in names]

        def init(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            base.__init__(model, config, *args, **kwargs)
            strip(tuple(model.get_submodule(name) for name in names))
            stripped = {f"{name}.{weight}" for name in names for weight in WEIGHTS}
            tied = model.all_tied_weights_keys
            model.all_tied_weights_keys = {
                target: source for target, source in tied.items() if target not in stripped
            }
            model._keys_to_ignore_on_load_unexpected |= {
                rf"(^|\.){name}\.({'|'.join(WEIGHTS)})$" for name in expected
            }

        # The same class but for what it has once it is made: loading finds no room for experts.
        without = type(base.__name__, (base,), {"__init__": init, "__module__": base.__module__})
        try:
            model = without.from_pretrained(self.path, dtype=self.dtype)  # type: ignore[attr-defined]
        except (SafetensorError, *_REFUSALS) as error:
            raise CheckpointError(
                f"{self.path}: Transformers cannot load what is no expert: {_first_line(error)}; "
                "if its files changed meanwhile, try again, else download it again"
            ) from error
        model.__class__ = base
        modules = tuple(tuple(model.get_submodule(name) for name in group) for group in found.names)
        return model, ExpertModules(
            found.names,
            modules,
            found.shape,
            found.layout,
            found.is_transposed,
            found.gate_reason,
        )


def _config_of(directory: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(directory)
    except _REFUSALS as error:
        raise CheckpointError(
            f"{directory}: Transformers cannot read its config.json: {_first_line(error)}"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{directory}: its weights are quantized; allowed: float32, float16, bfloat16"
        )
    return config


def _outline_of(directory: Path, model_class: Any, config: Any) -> PreTrainedModel:
    """The model without any weights."""
    try:
        with torch.device("meta"):
            outline: PreTrainedModel = model_class(config)
    except _REFUSALS as error:
        raise CheckpointError(
            f"{directory}: Transformers makes no {model_class.__name__} of its config.json: "
            f"{_first_line(error)}; check its numbers, or download it again"
        ) from error
    return outline


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    # Such as "Validation error for field 'hidden_size':", with the reason below.
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])


def _class_of(config: Any) -> Any:
    names = getattr(config, "architectures", None) or []
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    raise ConfigError(
        f"architectures in config.json is {names}; allowed: the name of a model class of "
        f"transformers {transformers.__version__}"
    )


def _dtype_of(value: torch.dtype | str | None) -> torch.dtype | None:
    if value is None:
        return None
    name = dtype_name(str(value).removeprefix("torch."))
    found: torch.dtype = getattr(torch, name)
    return found


def _parts_of(
    checkpoint: Checkpoint, outline: PreTrainedModel, found: ExpertModules
) -> dict[str, ExpertPart]:
    """What the checkpoint's tensors are to experts; those that are nothing to them are left out."""
    conversions = get_model_conversion_mapping(outline)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    state = outline.state_dict()
    layer_of = {
        f"{name}.{weight}": (layer, weight)
        for layer, group in enumerate(found.names)
        for name in group
        for weight in WEIGHTS
    }
    parts: dict[str, ExpertPart] = {}
    seen: set[ExpertPart] = set()
    for name in checkpoint.tensors:
        target, pattern = rename_source_key(
            name, renamings, converters, outline.base_model_prefix, state
        )
        if target not in layer_of:
            continue
        layer, weight = layer_of[target]
        part = ExpertPart(layer, None, _MATRIX_OF[weight])
        if pattern is not None:
            converter = next(each for each in converters if pattern in each.source_patterns)
            _check_converter(checkpoint, name, weight, converter)
            matrix = _SOURCES[weight][converter.source_patterns.index(pattern)]
            part = ExpertPart(layer, _last_number(name), matrix)
        # Weights that modules share may be stored for each of them.
        if part not in seen:
            seen.add(part)
            parts[name] = part
    if not parts:
        raise CheckpointError(
            f"{checkpoint.path} holds no weights of {found.names[0][0]}; download it again"
        )
    return parts


def _last_number(name: str) -> int:
    """12 of model.layers.3.mlp.experts.12.up_proj.weight."""
    return [int(part) for part in name.split(".") if part.isdigit()][-1]


def _check_converter(
    checkpoint: Checkpoint, name: str, weight: str, converter: WeightConverter
) -> None:
    """Raises: ConfigError unless experts lie one by one and are stacked as they are."""
    operations = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    plain: list[tuple[type, int | None]] = [(MergeModulelist, 0)]
    if weight == "gate_up_proj":
        plain.append((Concatenate, 1))
    if operations != plain or len(converter.source_patterns) != len(_SOURCES[weight]):
        raise ConfigError(
            f"{checkpoint.path}: Transformers makes experts of {name} by "
            f"{', '.join(kind.__name__ for kind, _ in operations)}, which is not done for single "
            "experts; load the model and give it instead of the path"
        )
