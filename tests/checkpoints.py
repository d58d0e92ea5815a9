"""Writes tiny checkpoints in the layouts met in the wild (models.md 3.1), and reads them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from oled_moe.checkpoint import Checkpoint, read_weights
from oled_moe.models import find_family
from oled_moe.store import DiskExpertStore, aligned_empty

Convention = Literal["single", "llada20", "llada21", "merged"]
Shards = dict[str, dict[str, Tensor]]

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj\.weight)")


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    convention: Convention = "single",
    num_files: int = 3,
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write config and weights; `tensors` has one name for each matrix of each expert.

    - single: one file.
    - llada20: cut in name order, by bytes, into files numbered from 1.
    - llada21: file i, from 0, holds the i-th range of experts of every layer; file 0 the rest too.
    - merged: one file; the experts of a layer stacked on a leading axis.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    if convention in ("single", "merged"):
        chosen = dict(tensors) if convention == "single" else stack_experts(tensors)
        save_file(chosen, directory / "model.safetensors", {"format": "pt"})
        return directory
    if convention == "llada20":
        shards = _cut_by_bytes(tensors, num_files)
    else:
        shards = _cut_by_expert(tensors, num_files)
    for name, shard in shards.items():
        save_file(shard, directory / name, {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def synthetic_llada2(
    config: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    """Random weights for a LLaDA2 config: every tensor of models.md 3.1.

    Scaled so that activations neither vanish nor explode; `expert_bias` is float32, as in
    LLaDA2.1; the head's row of the mask token is zero, so a mask is never predicted.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator)).to(dtype)

    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    num_experts, width = config["num_experts"], config["moe_intermediate_size"]
    vocabulary = config["vocab_size"]
    embeddings = torch.randn(vocabulary, hidden, generator=generator)
    tensors = {"model.word_embeddings.weight": embeddings.to(dtype)}

    def feed_forward(prefix: str, size: int) -> None:
        tensors[f"{prefix}.gate_proj.weight"] = matrix(size, hidden)
        tensors[f"{prefix}.up_proj.weight"] = matrix(size, hidden)
        tensors[f"{prefix}.down_proj.weight"] = matrix(hidden, size)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = norm(hidden)
        tensors[f"{at}.post_attention_layernorm.weight"] = norm(hidden)
        qkv = f"{at}.attention.query_key_value.weight"
        tensors[qkv] = matrix((heads + 2 * kv_heads) * head, hidden)
        tensors[f"{at}.attention.query_layernorm.weight"] = norm(head)
        tensors[f"{at}.attention.key_layernorm.weight"] = norm(head)
        tensors[f"{at}.attention.dense.weight"] = matrix(hidden, heads * head)
        if layer < config["first_k_dense_replace"]:
            feed_forward(f"{at}.mlp", config["intermediate_size"])
            continue
        tensors[f"{at}.mlp.gate.weight"] = matrix(num_experts, hidden)
        bias = 0.1 * torch.randn(num_experts, generator=generator)
        tensors[f"{at}.mlp.gate.expert_bias"] = bias
        for expert in range(num_experts):
            feed_forward(f"{at}.mlp.experts.{expert}", width)
        if config.get("num_shared_experts"):
            feed_forward(f"{at}.mlp.shared_experts", config["num_shared_experts"] * width)
    tensors["model.norm.weight"] = norm(hidden)
    tensors["lm_head.weight"] = matrix(vocabulary, hidden)
    if config.get("mask_token_id") is not None:
        tensors["lm_head.weight"][config["mask_token_id"]] = 0
    return tensors


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stacks: dict[str, dict[int, Tensor]] = {}
    rest = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            rest[name] = tensor
    stacked = {
        name: torch.stack([experts[expert] for expert in sorted(experts)])
        for name, experts in stacks.items()
    }
    return rest | stacked


def load_weights(
    path: Path, dtype: torch.dtype | None = None, method: str = "direct"
) -> tuple[dict[str, Tensor], DiskExpertStore]:
    """All that is no expert, and the experts, as an engine has them."""
    checkpoint = Checkpoint.open(path)
    family = find_family(checkpoint.config)
    config = family.config(checkpoint.config)
    return read_weights(
        checkpoint,
        map_weight=family.weight_map(config),
        shapes=family.parameter_shapes(config),
        num_moe_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        dtype=dtype,
        keep_dtype=family.kept_dtypes(config),
        method=method,
    )


def check_experts(
    store: DiskExpertStore, values: Mapping[str, Tensor], first_layer: int = 1
) -> None:
    """Every expert of a store, which is closed then, is these values rounded to its dtype."""
    slot, layout = aligned_empty(store.layout.slot_bytes), store.layout
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            store.read_into(layer, expert, slot)
            found = layout.views(slot)
            at = f"model.layers.{layer + first_layer}.mlp.experts.{expert}"
            gate, up, down = (values[f"{at}.{end}_proj.weight"] for end in ("gate", "up", "down"))
            assert torch.equal(found.gate_up, torch.cat([gate, up]).to(layout.dtype)), at
            assert torch.equal(found.down, down.to(layout.dtype)), at
    store.close()


def _cut_by_bytes(tensors: Mapping[str, Tensor], num_files: int) -> Shards:
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: Shards = {_shard_name(i, num_files): {} for i in range(1, num_files + 1)}
    num_bytes = 0
    for name in sorted(tensors):
        file = 1 + min(num_bytes * num_files // total, num_files - 1)
        shards[_shard_name(file, num_files)][name] = tensors[name]
        num_bytes += tensors[name].nbytes
    return shards


def _cut_by_expert(tensors: Mapping[str, Tensor], num_files: int) -> Shards:
    experts = {name: int(match[2]) for name in tensors if (match := _EXPERT.fullmatch(name))}
    num_experts = 1 + max(experts.values())
    shards: Shards = {_shard_name(i, num_files): {} for i in range(num_files)}
    for name, tensor in tensors.items():
        file = experts.get(name, 0) * num_files // num_experts
        shards[_shard_name(file, num_files)][name] = tensor
    return shards


def _shard_name(number: int, num_files: int) -> str:
    return f"model-{number:05d}-of-{num_files:05d}.safetensors"
