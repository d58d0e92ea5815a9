"""Sizes of published models by name, as the config.json of a checkpoint that this package runs.

For runs at full size without weights: nothing here reads or writes a file.
Source: models.md 1.1 and 1.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from oled_moe.config import check_int
from oled_moe.registry import look_up

_LLADA2: dict[str, Any] = {
    "model_type": "llada2_moe",
    "vocab_size": 157184,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000.0,
    "use_qk_norm": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "mask_token_id": 156895,
    "eos_token_id": 156892,
    "pad_token_id": 156892,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes. `config` is a config.json; `note` says what differs from the model itself;
    `preset` is the synthetic routing that comes nearest."""

    name: str
    config: Mapping[str, Any]
    preset: str = "llada2-mini"
    note: str = ""

    @property
    def num_dense_layers(self) -> int:
        return int(self.config["first_k_dense_replace"])

    @property
    def num_moe_layers(self) -> int:
        return int(self.config["num_hidden_layers"]) - self.num_dense_layers

    def config_with(self, num_moe_layers: int | None) -> dict[str, Any]:
        """The config with that many MoE layers behind the dense ones; None is all of them.

        Raises: ConfigError for more layers than the model has.
        """
        most = self.num_moe_layers
        num_moe_layers = most if num_moe_layers is None else num_moe_layers
        check_int("moe-layers", num_moe_layers, minimum=1, maximum=most)
        return {**self.config, "num_hidden_layers": self.num_dense_layers + num_moe_layers}


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "llada2-mini": Shape(
            "llada2-mini",
            {
                **_LLADA2,
                "hidden_size": 2048,
                "num_hidden_layers": 20,
                "num_attention_heads": 16,
                "intermediate_size": 5120,
                "moe_intermediate_size": 512,
            },
        ),
        "llada2-flash": Shape(
            "llada2-flash",
            {
                **_LLADA2,
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "intermediate_size": 9216,
                "moe_intermediate_size": 1024,
            },
            preset="llada2-flash",
        ),
        "sdar-30b": Shape(
            "sdar-30b",
            {
                **_LLADA2,
                "vocab_size": 151936,
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "first_k_dense_replace": 0,
                "num_attention_heads": 32,
                # Required by the config and, without dense layers, used by none.
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "partial_rotary_factor": 1.0,
                "rope_theta": 1000000.0,
                "num_experts": 128,
                "n_group": 1,
                "topk_group": 1,
                "num_shared_experts": 0,
                "routed_scaling_factor": 1.0,
                "moe_router_enable_expert_bias": False,
                "mask_token_id": 151669,
                "eos_token_id": 151645,
                "pad_token_id": 151643,
            },
            note="sdar-30b has SDAR-30B-A3B's sizes, run by the layer code of LLaDA2: the router "
            "is a sigmoid instead of a softmax, and its weights stay fp32.",
        ),
    }
)


def find_shape(name: str) -> Shape:
    """A shape by name. Raises: ConfigError that lists the known ones."""
    return look_up("shape", name, SHAPES)
