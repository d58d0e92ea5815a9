"""The expert modules of a Transformers model: which there are, what they compute, their weights.

Whatever cannot be computed from slots is refused by name, before anything is changed.
Legend: D hidden, F hidden of one expert, E experts per layer.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations import moe

from oled_moe.config import size_to_type
from oled_moe.errors import ConfigError
from oled_moe.store import (
    DiskExpertStore,
    ExpertLayout,
    ExpertStore,
    FileSpan,
    HostExpertStore,
    PlacedSpan,
    aligned_empty,
    memory_of,
)
from oled_moe.types import MoeShape

# Names what computes a model's experts, on the model and on its expert modules.
OWNER = "_oled_moe_experts"
WEIGHTS = ("gate_up_proj", "down_proj")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# How configs name the experts of a token.
_TOP_K_NAMES = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
_SILU_CLASSES = (nn.SiLU, type(ACT2FN["silu"]))


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """All expert modules of a model, by layer; modules of a layer share one set of weights.

    `names` are the modules' paths in the model. `is_transposed`: a module keeps its matrices as
    [D, 2F] and [F, D]. `gate_reason` says why the modules' own activation has to be called; empty
    where it is SwiGLU.
    """

    names: tuple[tuple[str, ...], ...]
    modules: tuple[tuple[Any, ...], ...]
    shape: MoeShape
    layout: ExpertLayout
    is_transposed: bool
    gate_reason: str

    @property
    def parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Stacked gate and up, and down, of each layer."""
        return [(group[0].gate_up_proj, group[0].down_proj) for group in self.modules]


def find_expert_modules(model: PreTrainedModel, dtype: torch.dtype | None = None) -> ExpertModules:
    """The expert modules of `model`, which may be on the meta device; `dtype` of its slots, by
    default the weights'.

    Raises: ConfigError for a model without any, and for experts that cannot be run.
    """
    if hasattr(model, OWNER):
        raise ConfigError("the experts of this model are offloaded already")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError("the model is quantized; allowed: weights in float32, float16, bfloat16")
    groups: dict[str, list[tuple[str, Any]]] = {}
    source_of: dict[int, str] = {}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_concatenated"):
            _check_module(name, module)
            # Tied modules are one layer. Tied weights are one object, on the meta device not yet.
            weight = f"{name}.gate_up_proj"
            source = source_of.setdefault(id(module.gate_up_proj), tied.get(weight, weight))
            groups.setdefault(source, []).append((name, module))
    if not groups:
        raise ConfigError(
            f"{type(model).__name__} has no expert modules with the experts interface of "
            "Transformers; allowed: models that take experts_implementation"
        )
    first_name, first = next(iter(groups.values()))[0]
    for name, module in (pair for group in groups.values() for pair in group):
        if _signature(module) != _signature(first):
            raise ConfigError(
                f"the experts of {first_name} and {name} differ in number, size or dtype; "
                "allowed: models whose expert layers are all alike"
            )
    num_experts, *_ = first.gate_up_proj.shape
    is_transposed = bool(first.is_transposed)
    wide, hidden_size = first.gate_up_proj.shape[1:]
    if is_transposed:
        wide, hidden_size = hidden_size, wide
    layout = ExpertLayout(hidden_size, wide // 2, dtype or first.gate_up_proj.dtype)
    shape = MoeShape(len(groups), num_experts, _top_k(first), layout.slot_bytes)
    return ExpertModules(
        tuple(tuple(name for name, _ in group) for group in groups.values()),
        tuple(tuple(module for _, module in group) for group in groups.values()),
        shape,
        layout,
        is_transposed,
        _gate_reason([module for group in groups.values() for _, module in group]),
    )


def _check_module(name: str, module: Any) -> None:
    """Raises: ConfigError for what slots of three matrices cannot compute."""
    reason = None
    if not module.has_gate:
        reason = "have no gate"
    elif module.has_bias:
        reason = "have biases"
    elif module.has_post_expert_norm:
        reason = "normalise each expert's output"
    elif module._is_expert_parallel:
        reason = "are spread over several processes"
    elif module.gate_up_proj.dtype not in _DTYPES:
        reason = f"are stored as {str(module.gate_up_proj.dtype).removeprefix('torch.')}"
    if reason is not None:
        raise ConfigError(
            f"{name}: experts of {type(module).__name__} {reason}; allowed: gate, up and down "
            "matrices without bias, in float32, float16 or bfloat16"
        )


def _signature(module: Any) -> tuple[object, ...]:
    up, down = module.gate_up_proj, module.down_proj
    return up.shape, down.shape, up.dtype, down.dtype, module.is_transposed, up.device.type


def _top_k(module: Any) -> int:
    """The experts that a router chooses for each token."""
    for name in _TOP_K_NAMES:
        value = getattr(module.config, name, None)
        if type(value) is int and value > 0:
            return value
    raise ConfigError(
        f"the config of {type(module).__name__} says nowhere how many experts a token takes; "
        f"allowed: a whole number as one of {', '.join(_TOP_K_NAMES)}"
    )


def _gate_reason(modules: list[Any]) -> str:
    """Why the experts are not plain SwiGLU; empty where they are."""
    for module in modules:
        if type(module)._apply_gate is not moe._default_apply_gate:
            return f"{type(module).__name__} has a gate of its own"
        if not isinstance(module.act_fn, _SILU_CLASSES):
            return f"the activation of {type(module).__name__} is {type(module.act_fn).__name__}"
    return ""


# Moving weights


def moved_to_ram(found: ExpertModules) -> HostExpertStore:
    """All experts in host memory, and no longer in their modules."""
    store = HostExpertStore(found.layout, found.shape.num_layers, found.shape.num_experts)
    for layer in range(found.shape.num_layers):
        for expert in range(found.shape.num_experts):
            _pack(found, layer, expert, store.arena.slot(store.slot_of(layer, expert)))
        strip(found.modules[layer])
    return store


def moved_to_file(found: ExpertModules, folder: Path, method: str) -> DiskExpertStore:
    """All experts in a file without a name in `folder`, and no longer in their modules.

    Raises: ConfigError where the file cannot be written; the modules are as they were then.
    """
    layout, shape = found.layout, found.shape
    slot = aligned_empty(layout.slot_bytes)
    slot.zero_()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="experts-") as file:
            for layer in range(shape.num_layers):
                for expert in range(shape.num_experts):
                    _pack(found, layer, expert, slot)
                    file.write(memory_of(slot))
            file.flush()
            spans = [
                [
                    _spans(layout, Path(file.name), layer * shape.num_experts + expert)
                    for expert in range(shape.num_experts)
                ]
                for layer in range(shape.num_layers)
            ]
            # The store opens the file, which then lives as long as it does.
            store = DiskExpertStore(layout, spans, stored_dtype=layout.dtype, method=method)
    except OSError as error:
        raise ConfigError(
            f"offload_folder {folder}: experts cannot be written there ({error.strerror}); name a "
            f"directory with {size_to_type(shape.num_experts_total * layout.slot_bytes)} to spare"
        ) from error
    for modules in found.modules:
        strip(modules)
    return store


def _spans(layout: ExpertLayout, path: Path, number: int) -> list[PlacedSpan]:
    start = number * layout.slot_bytes
    down = layout.down_offset
    return [
        (FileSpan(path, start, layout.gate_up_bytes), 0),
        (FileSpan(path, start + down, layout.matrix_bytes), down),
    ]


def _pack(found: ExpertModules, layer: int, expert: int, slot: Tensor) -> None:
    """Fill a slot with one expert of a module. Mutates: slot."""
    module, views = found.modules[layer][0], found.layout.views(slot)
    for view, name in zip(views, WEIGHTS, strict=True):
        weight = getattr(module, name).detach()[expert]
        view.copy_(weight.T if found.is_transposed else weight)


def strip(modules: tuple[Any, ...]) -> None:
    """Take the weights out of modules. Mutates: modules."""
    for module in modules:
        for name in WEIGHTS:
            delattr(module, name)
        # Nothing is left that loading a checkpoint would have to initialise.
        module._is_hf_initialized = True


def put_back(found: ExpertModules, store: ExpertStore, device: torch.device) -> None:
    """Give modules that were stripped their weights again. Mutates: the modules."""
    slot = aligned_empty(found.layout.slot_bytes)
    for layer, modules in enumerate(found.modules):
        stacked = [
            torch.empty(
                (found.shape.num_experts, *(view.T if found.is_transposed else view).shape),
                dtype=found.layout.dtype,
                device=device,
            )
            for view in found.layout.views(slot)
        ]
        for expert in range(found.shape.num_experts):
            store.read_into(layer, expert, slot)
            for weight, view in zip(stacked, found.layout.views(slot), strict=True):
                weight[expert] = view.T if found.is_transposed else view
        for name, weight in zip(WEIGHTS, stacked, strict=True):
            parameter = nn.Parameter(weight, requires_grad=False)
            for module in modules:
                setattr(module, name, parameter)
