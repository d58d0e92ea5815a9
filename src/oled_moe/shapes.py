"""Sizes of published models by name, as the config.json of a checkpoint that this package runs.

For plans and runs at full size without weights: nothing here reads or writes a file. Ids of special
tokens, which some published files leave to the tokenizer, are in the configs here.
Source: models.md 1.
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
_LLADA2_FLASH: dict[str, Any] = {
    **_LLADA2,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
}
# SDAR-30B-A3B and RND1 are the same network, trained from the same model.
_QWEN3_MOE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "mask_token_id": 151669,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes. `config` is a config.json, of whose layers the first `num_dense_layers` have
    no experts; `preset` is the synthetic routing that comes nearest, `block_length` what it is
    replayed with; `note` says what differs from the model itself."""

    name: str
    config: Mapping[str, Any]
    num_dense_layers: int = 0
    preset: str = "llada2-mini"
    block_length: int = 32
    note: str = ""

    @property
    def num_layers(self) -> int:
        return int(self._text["num_hidden_layers"])

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def num_experts(self) -> int:
        return int(self._text["num_experts"])

    def config_with(self, num_moe_layers: int | None) -> dict[str, Any]:
        """The config with that many MoE layers behind the dense ones; None is all of them.

        Raises: ConfigError for more layers than the model has.
        """
        most = self.num_moe_layers
        num_moe_layers = most if num_moe_layers is None else num_moe_layers
        check_int("moe-layers", num_moe_layers, minimum=1, maximum=most)
        text = _with_layers(self._text, self.num_dense_layers + num_moe_layers)
        return {**self.config, _TEXT: text} if _TEXT in self.config else text

    @property
    def _text(self) -> Mapping[str, Any]:
        """The part of the config that is about the language model."""
        text: Mapping[str, Any] = self.config.get(_TEXT, self.config)
        return text


_TEXT = "text_config"


def _with_layers(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Fewer layers, and as many entries in the lists that have one for each layer."""
    all_layers = config["num_hidden_layers"]
    cut = {
        name: value[:num_layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == all_layers
    }
    return {**config, **cut, "num_hidden_layers": num_layers}


_SHAPES = (
    Shape(
        "llada2-mini",
        {
            **_LLADA2,
            "hidden_size": 2048,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
        },
        num_dense_layers=1,
    ),
    Shape(
        "llada2-flash",
        _LLADA2_FLASH,
        num_dense_layers=1,
        preset="llada2-flash",
    ),
    # What FLX-OSS/FluxServe and sgl-project/sglang PR 31768 say of it.
    Shape(
        "llada2.2-flash",
        {
            **_LLADA2_FLASH,
            "rope_theta": 3000000.0,
            "expert_capacity": 48,
            "block_size": 32,
            "delete_token_id": 156930,
            "split_token_id": 156931,
        },
        num_dense_layers=1,
        preset="llada2.2-flash",
        note="taken to be LLaDA2.0-flash with block routing, from descriptions: no config.json of "
        "it was at hand",
    ),
    Shape(
        "sdar-30b",
        {"model_type": "sdar_moe", **_QWEN3_MOE, "max_position_embeddings": 32768},
        preset="sdar-30b",
        block_length=4,
    ),
    Shape(
        "rnd1",
        {"model_type": "rnd1", **_QWEN3_MOE, "max_position_embeddings": 40960},
        preset="rnd1",
        block_length=256,
    ),
    Shape(
        "llada-moe-7b",
        {
            "model_type": "llada",
            "vocab_size": 157184,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "moe_layer_freq": [1] * 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "dense_intermediate_size": 8192,
            "expert_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "qk_layernorm": True,
            "rope_theta": 50000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "mask_token_id": 156895,
            "eos_token_id": 156892,
            "pad_token_id": 156892,
        },
        preset="llada-moe-7b",
    ),
    # Layers and their heads as the header of a GGUF of it says (lemonade-sdk/lemonade issue 2531),
    # the rest as the defaults of its class in Transformers.
    Shape(
        "diffusion-gemma-26b",
        {
            "model_type": "diffusion_gemma",
            "canvas_length": 256,
            "text_config": {
                "vocab_size": 262144,
                "hidden_size": 2816,
                "num_hidden_layers": 30,
                "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "num_global_key_value_heads": 2,
                "head_dim": 256,
                "global_head_dim": 512,
                "sliding_window": 1024,
                "intermediate_size": 2112,
                "moe_intermediate_size": 704,
                "num_experts": 128,
                "top_k_experts": 8,
                "max_position_embeddings": 262144,
                "eos_token_id": 1,
            },
        },
        preset="diffusion-gemma-26b",
        block_length=256,
        note="text alone, without what it sees images with",
    ),
)
SHAPES: Mapping[str, Shape] = MappingProxyType({shape.name: shape for shape in _SHAPES})

# Published names, which one may as well type, in small letters.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "llada2.0-mini": "llada2-mini",
        "llada2.1-mini": "llada2-mini",
        "llada2.0-flash": "llada2-flash",
        "llada2.1-flash": "llada2-flash",
        "sdar-30b-a3b": "sdar-30b",
        "sdar-30b-a3b-chat": "sdar-30b",
        "sdar-30b-a3b-sci": "sdar-30b",
        "rnd1-base": "rnd1",
        "rnd1-base-0910": "rnd1",
        "diffusiongemma-26b-a4b": "diffusion-gemma-26b",
        "diffusiongemma-26b-a4b-it": "diffusion-gemma-26b",
        "llada-moe": "llada-moe-7b",
        "llada-moe-7b-a1b": "llada-moe-7b",
        "llada-moe-7b-a1b-base": "llada-moe-7b",
        "llada-moe-7b-a1b-instruct": "llada-moe-7b",
    }
)


def shape_name(name: str) -> str:
    """The name here of what somebody typed; itself where there is none."""
    return ALIASES.get(name.lower(), name.lower())


def find_shape(name: str) -> Shape:
    """A shape by any of its names. Raises: ConfigError that lists the known ones."""
    key = shape_name(name)
    return look_up("shape", key if key in SHAPES else name, SHAPES)
