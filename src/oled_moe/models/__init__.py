"""The model families, by the `model_type` of their config.json.

A family is a module with `Config.from_hf`, `build_weight_map`, `parameter_shapes` and `build`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from oled_moe.checkpoint import WeightMap
from oled_moe.config import FamilyDecoding
from oled_moe.errors import CheckpointError
from oled_moe.experts import OffloadedExperts
from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import ForwardBatch, Logits, RunPiece
from oled_moe.models import diffusion_gemma, llada, llada2_moe, rnd1, sdar_moe
from oled_moe.store import Activation


class ModelConfig(Protocol):
    """What the engine needs to know of any family's config."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_moe_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def kv_size(self) -> int:
        """Numbers that keys and values of one position take, all layers together."""
        ...

    @property
    def query_size(self) -> int:
        """Numbers that queries of one position take, all layers together."""
        ...

    @property
    def activation(self) -> Activation:
        """What its experts do to their gate."""
        ...

    @property
    def max_positions(self) -> int: ...
    @property
    def decoding(self) -> FamilyDecoding: ...


class Model(Protocol):
    """A loaded model: one call is one forward. `run_piece` runs the parts of it that are pure
    functions of tensors; what such a part returns may be overwritten when it runs again."""

    run_piece: RunPiece

    def forward(self, batch: ForwardBatch) -> Logits | None:
        """Logits fp32 [N, V] of the tokens that want them (`Segment.logit_tokens`), in order; None
        if no segment does. Where the batch says `reads_rows` they may be RowLogits.

        Mutates: writes K/V behind the finished part of every segment's sequence.
        """
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [T, D] of ids int64 [T]."""
        ...

    def new_kv(self, num_positions: int) -> SequenceKv:
        """Room for one sequence."""
        ...


@runtime_checkable
class ConditionedModel(Model, Protocol):
    """A model that is told what it predicted of its block a step before (`Segment.condition`)."""

    @property
    def vocab_size(self) -> int: ...

    def condition(self, logits_TV: Tensor) -> Tensor:
        """What the next step is told of a step's logits float32 [T, V]: [T, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """How the checkpoints of one architecture are read and run."""

    name: str
    module: Any

    def config(self, values: Mapping[str, Any]) -> ModelConfig:
        """Validate config.json. Raises: CheckpointError naming the field."""
        config: ModelConfig = self.module.Config.from_hf(values)
        return config

    def weight_map(self, config: ModelConfig) -> WeightMap:
        """For each checkpoint tensor: the parameter or part of an expert that it is."""
        weight_map: WeightMap = self.module.build_weight_map(config)
        return weight_map

    def parameter_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every parameter that is not part of a routed expert."""
        shapes: dict[str, tuple[int, ...]] = self.module.parameter_shapes(config)
        return shapes

    def kept_dtypes(self, config: ModelConfig) -> frozenset[str]:
        """Parameters that stay at their stored precision."""
        kept: frozenset[str] = self.module.kept_dtypes(config)
        return kept

    def build(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        experts: OffloadedExperts,
        *,
        dtype: torch.dtype,
        num_positions: int,
    ) -> Model:
        """The model over its dense weights and offloaded experts."""
        model: Model = self.module.build(
            config, weights, experts, dtype=dtype, num_positions=num_positions
        )
        return model


_FAMILIES = (
    Family("llada2_moe", llada2_moe),
    # The same model saved by dFactory with stacked experts.
    Family("llada2_moe_veomni", llada2_moe),
    Family("sdar_moe", sdar_moe),
    Family("rnd1", rnd1),
    # LLaDA-MoE.
    Family("llada", llada),
    Family("diffusion_gemma", diffusion_gemma),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises: CheckpointError listing the known model types."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type is {model_type!r}, which is not supported; "
            f"known: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
