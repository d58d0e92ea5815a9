"""Writes GGUF files as llama.cpp's converter does, by the names and formats of the gguf package."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoints import stack_experts
from gguf import GGMLQuantizationType as Type
from gguf import quants
from torch import Tensor

# From the name that a file has for a tensor to its type, for all but vectors and routers.
Choose = Callable[[str], Type]

# The names of llada2 are those of bailingmoe2, which it is a model of; the package lacks it.
_NAMES_OF = {
    "llada-moe": gguf.MODEL_ARCH.LLADA_MOE,
    "rnd1": gguf.MODEL_ARCH.RND1,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "llada2": gguf.MODEL_ARCH.BAILINGMOE2,
    "bailingmoe2": gguf.MODEL_ARCH.BAILINGMOE2,
}


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    choose: Choose = lambda _: Type.F32,
    *,
    change: Callable[[dict[str, Any]], object] = lambda _: None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> dict[str, Tensor]:
    """Write tensors of a checkpoint, the experts of a layer stacked.

    `change` edits the metadata. Returns what each tensor of the checkpoint is then, float32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    metadata = metadata_of(architecture, config)
    change(metadata)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(key, value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(300)])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    names = gguf.get_tensor_name_map(_NAMES_OF[architecture], config["num_hidden_layers"])
    values: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(stack_experts(tensors).items()):
        source = f"{name}.bias" if name.endswith(".expert_bias") else name
        target = names.get_name(source, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        is_small = tensor.ndim == 1 or "ffn_gate_inp." in target
        kind = Type.F32 if is_small else choose(target)
        blocks = encoded(tensor.float().numpy(), kind, number)
        writer.add_tensor(target, blocks, raw_dtype=kind)
        values[name] = torch.from_numpy(quants.dequantize(blocks, kind).copy()).view(tensor.shape)
    for target, array in (extra or {}).items():
        writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unstacked(values)


def encoded(values: np.ndarray[Any, Any], kind: Type, seed: int = 0) -> np.ndarray[Any, Any]:
    """Values as they are stored; where the package cannot round to a type, any that can be."""
    try:
        return quants.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(values.shape, kind, seed)


def random_blocks(shape: tuple[int, ...], kind: Type, seed: int = 0) -> np.ndarray[Any, Any]:
    """Bytes at random, but for scales: halves of about a hundredth."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    num_blocks = shape[-1] // block_values
    blocks = rng.integers(0, 256, (*shape[:-1], num_blocks, block_bytes), dtype=np.uint8)
    for place in SCALES[kind.name]:
        scales = rng.uniform(-0.01, 0.01, (*shape[:-1], num_blocks, 1)).astype(np.float16)
        blocks[..., place : place + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], num_blocks * block_bytes)


# Where the halves lie in a block.
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def metadata_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter says of a config.json."""
    width = config.get("expert_intermediate_size") or config.get("moe_intermediate_size")
    named = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": float(config["rope_theta"]),
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": width,
    }
    if architecture == "llada2":
        named |= {
            "vocab_size": config["vocab_size"],
            "rope.dimension_count": config["rotary_dim"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_shared_count": config["num_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
    metadata = {f"{architecture}.{key}": value for key, value in named.items() if value is not None}
    for name, key in (("mask", "mask"), ("eos", "eos"), ("pad", "padding")):
        metadata[f"tokenizer.ggml.{key}_token_id"] = config[f"{name}_token_id"]
    return metadata


def unstacked(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each matrix of an expert again."""
    found: dict[str, Tensor] = {}
    for name, value in values.items():
        if ".mlp.experts." not in name:
            found[name] = value
            continue
        front, _, matrix = name.removesuffix(".weight").rpartition(".")
        for expert, weight in enumerate(value):
            found[f"{front}.{expert}.{matrix}.weight"] = weight
    return found


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))
