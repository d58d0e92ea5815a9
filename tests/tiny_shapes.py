"""Configs of every published shape, cut down to what a test can write and run."""

from typing import Any

from oled_moe.shapes import SHAPES

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "dense_intermediate_size": 96,
    "moe_intermediate_size": 32,
    "expert_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 512,
    "mask_token_id": 500,
    "eos_token_id": 501,
    "pad_token_id": 501,
    # Of some families alone.
    "expert_capacity": 6,
    "delete_token_id": 502,
    "split_token_id": 503,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "sliding_window": 12,
    "top_k_experts": 4,
    "canvas_length": 16,
}


def tiny_config(name: str, num_moe_layers: int = 3) -> dict[str, Any]:
    """The shape with the same kinds of layers, each of few numbers."""
    return _cut(SHAPES[name].config_with(num_moe_layers))


def _cut(config: dict[str, Any]) -> dict[str, Any]:
    small = {key: value for key, value in _SMALL.items() if key in config}
    nested = {key: _cut(value) for key, value in config.items() if isinstance(value, dict)}
    return {**config, **small, **nested}
