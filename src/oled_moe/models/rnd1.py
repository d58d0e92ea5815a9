"""RND1 (Base-0910, 30B-A3B): diffusion over the whole sequence, with the layers of SDAR-MoE.

Reference: RadicalNumerics/RND1, the "hf" backend; facts in models.md 1.3, 2.3 and 3.2, numbers in
the golden set. Attention is full: the block of a forward's context is the whole sequence. Logits
are those of each position as computed; that position i is predicted by logits i - 1 is a matter
of decoding, which `Config.decoding` tells.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oled_moe.config import ONE_BLOCK_ALGORITHMS, FamilyDecoding, SamplingParams
from oled_moe.models import sdar_moe
from oled_moe.models.fields import MAX_EXPERTS, MAX_LAYERS, FieldReader
from oled_moe.models.sdar_moe import build as build
from oled_moe.models.sdar_moe import build_weight_map as build_weight_map
from oled_moe.models.sdar_moe import kept_dtypes as kept_dtypes
from oled_moe.models.sdar_moe import parameter_shapes as parameter_shapes

logger = logging.getLogger(__name__)

# What RND1's config class sets whatever config.json says. It sets the sizes too; those are read,
# since a size that is not the tensors' own is found out by their shapes.
_FORCED: Mapping[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_scaling": False,
    "rope_theta": 1000000.0,
    "sliding_window": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


@dataclass(frozen=True, slots=True)
class Config(sdar_moe.Config):
    """The fields of config.json that the model depends on, validated; the rest as its class has."""

    @property
    def decoding(self) -> FamilyDecoding:
        """The whole canvas at once, each token told by the logits before it; models.md 7.2."""
        defaults = SamplingParams(algorithm="lowest_entropy", max_tokens=256)
        return FamilyDecoding(
            ONE_BLOCK_ALGORITHMS, defaults, is_whole=True, shift=1, num_reserved=1
        )

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "Config":
        """Read the sizes in an RND1 config.json; warns of values that its class would replace.

        Raises: CheckpointError naming the field, its value and what is allowed.
        """
        read = FieldReader(values)
        read.refuse_others({"quantization_config": (None,)})
        for name, forced in _FORCED.items():
            if values.get(name) not in (None, forced):
                logger.warning(
                    "config.json: %s is %.200s; RND1 is run with %r, as its own code does",
                    name,
                    repr(values[name]),
                    forced,
                )
        num_layers = read.whole("num_hidden_layers", default=48, maximum=MAX_LAYERS)
        config = cls(
            vocab_size=read.whole("vocab_size", default=151936),
            hidden_size=read.whole("hidden_size", default=2048),
            intermediate_size=0,
            moe_intermediate_size=read.whole("moe_intermediate_size", default=768),
            num_layers=num_layers,
            moe_layers=tuple(range(num_layers)),
            num_heads=read.whole("num_attention_heads", default=32),
            num_kv_heads=read.whole("num_key_value_heads", default=4),
            head_size=read.whole("head_dim", default=128),
            rope_theta=_FORCED["rope_theta"],
            max_positions=read.whole("max_position_embeddings", default=40960),
            norm_eps=_FORCED["rms_norm_eps"],
            num_experts=read.whole("num_experts", default=128, maximum=MAX_EXPERTS),
            top_k=read.whole("num_experts_per_tok", default=8),
            is_normalised=True,
            are_weights_rounded=False,
            has_attention_bias=False,
            is_head_tied=False,
        )
        config.check_relations(read)
        return config
