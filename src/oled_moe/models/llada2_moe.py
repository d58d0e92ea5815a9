"""LLaDA2.0 and LLaDA2.1 (mini 16B, flash 100B): block diffusion over a sigmoid-routed MoE.

Reference: the released LLaDA2.0 modelling code as carried by ZHZisZZ/dllm; facts in models.md
1.1, 2.2 and 3.1, numbers in the golden sets. Parameters keep the names of the checkpoint.
Legend: T tokens, N of them whose logits are wanted, D hidden, Q query heads, G key/value heads,
H head size, R rotated dimensions, E experts, K experts per token, F inner size of an MLP.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.checkpoint import WeightMap
from oled_moe.config import BLOCK_ALGORITHMS, FamilyDecoding, SamplingParams
from oled_moe.errors import CheckpointError
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels.linear import head_logits, linear
from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import (
    ForwardBatch,
    Routing,
    RunPiece,
    admit,
    block_attention,
    choose_within,
    grouped_sigmoid_router,
    rms_norm,
    rotary_table,
    rotate,
    router_weight,
    run_directly,
    sigmoid_shares,
    swiglu,
    write_kv,
)
from oled_moe.models.fields import MAX_EXPERTS, MAX_LAYERS, FieldReader
from oled_moe.store import Activation, ExpertPart
from oled_moe.types import ForwardContext

Probe = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of config.json that the model depends on, validated.

    `expert_capacity`: with block routing, how many experts a block admits; `block_size`: the only
    block length it is meant for, None where any is. Both None without block routing.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_layers: int
    num_dense_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_size: int
    rope_theta: float
    max_positions: int
    norm_eps: float
    num_experts: int
    top_k: int
    num_groups: int
    num_kept_groups: int
    num_shared_experts: int
    routed_scale: float
    has_qk_norm: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_expert_bias: bool
    is_head_tied: bool
    expert_capacity: int | None = None
    block_size: int | None = None

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def kv_size(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size

    @property
    def query_size(self) -> int:
        return self.num_layers * self.num_heads * self.head_size

    @property
    def activation(self) -> Activation:
        return "silu"

    @property
    def decoding(self) -> FamilyDecoding:
        """Block after block; models.md 4 and 5."""
        return FamilyDecoding(
            BLOCK_ALGORITHMS,
            SamplingParams(block_length=self.block_size),
            block_length=self.block_size,
            expert_capacity=self.expert_capacity,
        )

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "Config":
        """Validate the keys of a LLaDA2 config.json; keys of no effect are ignored.

        Raises: CheckpointError naming the field, its value and what is allowed.
        """
        read = FieldReader(values)
        read.refuse_others(_IMPLEMENTED)
        rope = read.rope_parameters()
        num_heads = read.whole("num_attention_heads")
        hidden_size = read.whole("hidden_size")
        head_size = read.whole("head_dim", default=hidden_size // num_heads)
        num_layers = read.whole("num_hidden_layers", maximum=MAX_LAYERS)
        num_experts = read.whole("num_experts", maximum=MAX_EXPERTS)
        rotary_size = read.whole("rotary_dim", default=head_size // 2)
        nested = rope.get("partial_rotary_factor")
        if nested is not None or values.get("partial_rotary_factor") is not None:
            share = read.real("partial_rotary_factor", default=nested, maximum=1.0)
            rotary_size = int(head_size * share)
        config = cls(
            vocab_size=read.whole("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.whole("intermediate_size"),
            moe_intermediate_size=read.whole("moe_intermediate_size"),
            num_layers=num_layers,
            num_dense_layers=read.whole("first_k_dense_replace", default=0, minimum=0),
            num_heads=num_heads,
            num_kv_heads=read.whole("num_key_value_heads", default=num_heads, minimum=0)
            or num_heads,
            head_size=head_size,
            rotary_size=rotary_size,
            rope_theta=read.real("rope_theta", default=rope.get("rope_theta", 600000.0)),
            max_positions=read.whole("max_position_embeddings", default=32768),
            norm_eps=read.real("rms_norm_eps", default=1e-6),
            num_experts=num_experts,
            top_k=read.whole("num_experts_per_tok"),
            num_groups=read.whole("n_group", default=1),
            num_kept_groups=read.whole("topk_group", default=1),
            num_shared_experts=read.whole("num_shared_experts", default=1, minimum=0),
            routed_scale=read.real("routed_scaling_factor", default=1.0),
            has_qk_norm=read.flag("use_qk_norm", default=True),
            has_qkv_bias=read.flag("use_qkv_bias", default=False),
            has_output_bias=read.flag("use_bias", default=False),
            has_expert_bias=read.flag("moe_router_enable_expert_bias", default=True),
            is_head_tied=read.flag("tie_word_embeddings", default=False),
            **_block_routing(read, values, num_experts),
        )
        # Of the two names for the rotated part, the one that was used.
        has_share = values.get("partial_rotary_factor") is not None
        config._check_relations(read, "partial_rotary_factor" if has_share else "rotary_dim")
        return config

    def _check_relations(self, read: FieldReader, rotary_name: str) -> None:
        if self.num_dense_layers >= self.num_layers:
            raise read.error("first_k_dense_replace", f"0 to {self.num_layers - 1}")
        if self.num_heads % self.num_kv_heads:
            raise read.error("num_key_value_heads", f"a divisor of {self.num_heads} heads")
        if self.rotary_size % 2 or not 0 < self.rotary_size <= self.head_size:
            raise read.error(rotary_name, f"an even part of head_dim {self.head_size}")
        if self.num_experts % self.num_groups:
            raise read.error("n_group", f"a divisor of {self.num_experts} experts")
        if self.num_kept_groups > self.num_groups:
            raise read.error("topk_group", f"1 to {self.num_groups}")
        group_size = self.num_experts // self.num_groups
        if self.num_kept_groups < self.num_groups and group_size < 2:
            raise read.error("n_group", "groups of two experts or more")
        if self.top_k > self.num_kept_groups * group_size:
            raise read.error(
                "num_experts_per_tok", f"1 to {self.num_kept_groups * group_size} selectable"
            )


def _block_routing(
    read: FieldReader, values: Mapping[str, Any], num_experts: int
) -> dict[str, int | None]:
    """`expert_capacity` and `block_size`; without the first the second means nothing."""
    if values.get("expert_capacity") is None:
        return {}
    top_k = read.whole("num_experts_per_tok")
    capacity = read.whole("expert_capacity", minimum=top_k, maximum=num_experts)
    if values.get("block_size") is None:
        return {"expert_capacity": capacity}
    return {"expert_capacity": capacity, "block_size": read.whole("block_size", maximum=2**20)}


# Options that change the numbers, and the values that code here implements; None is absent.
_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "score_function": (None, "sigmoid"),
    "router_dtype": (None, "fp32", "float32"),
    "norm_head": (None, False),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
}
_EXPERT_NAME = re.compile(
    r"model\.layers\.(\d+)\.mlp\.experts\.(?:(\d+)\.)?"
    r"(gate_proj|up_proj|down_proj|gate_up_proj)(?:\.weight)?"
)
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,9})\.(?:mlp|attention)\.")
_MATRICES: dict[str, Any] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
}


def build_weight_map(config: Config) -> WeightMap:
    """Checkpoint names to parameters (same name) and expert parts; KeyError for a stranger."""
    shapes = parameter_shapes(config)

    def weight_map(name: str) -> str | ExpertPart | None:
        match = _EXPERT_NAME.fullmatch(name)
        if match:
            layer = int(match[1]) - config.num_dense_layers
            expert = None if match[2] is None else int(match[2])
            if 0 <= layer < config.num_moe_layers and (expert or 0) < config.num_experts:
                return ExpertPart(layer, expert, _MATRICES[match[3]])
        if name.endswith("rotary_emb.inv_freq"):
            return None
        if name not in shapes:
            match = _LAYER_NAME.match(name)
            if match and int(match[1]) < config.num_layers:
                raise CheckpointError(
                    f"the checkpoint holds {name}, which config.json does not provide for; "
                    "take the config.json that belongs to these weights"
                )
            raise KeyError(name)
        return name

    return weight_map


def kept_dtypes(config: Config) -> frozenset[str]:
    """What the router reads: it works in fp32, from weights and bias as stored.

    The bias is bf16 in 2.0 and fp32 in 2.1 (models.md 3.1).
    """
    return frozenset(
        f"model.layers.{layer}.mlp.gate.{part}"
        for layer in range(config.num_dense_layers, config.num_layers)
        for part in ("weight", "expert_bias")
    )


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter outside the routed experts (models.md 3.1)."""
    hidden, head = config.hidden_size, config.head_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.is_head_tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        shapes[f"{name}.input_layernorm.weight"] = (hidden,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{name}.attention.query_key_value.weight"] = (qkv, hidden)
        shapes[f"{name}.attention.dense.weight"] = (hidden, config.num_heads * head)
        if config.has_qkv_bias:
            shapes[f"{name}.attention.query_key_value.bias"] = (qkv,)
        if config.has_output_bias:
            shapes[f"{name}.attention.dense.bias"] = (hidden,)
        if config.has_qk_norm:
            shapes[f"{name}.attention.query_layernorm.weight"] = (head,)
            shapes[f"{name}.attention.key_layernorm.weight"] = (head,)
        if layer < config.num_dense_layers:
            shapes.update(_mlp_shapes(f"{name}.mlp", hidden, config.intermediate_size))
            continue
        shapes[f"{name}.mlp.gate.weight"] = (config.num_experts, hidden)
        if config.has_expert_bias:
            shapes[f"{name}.mlp.gate.expert_bias"] = (config.num_experts,)
        if config.num_shared_experts:
            width = config.num_shared_experts * config.moe_intermediate_size
            shapes.update(_mlp_shapes(f"{name}.mlp.shared_experts", hidden, width))
    return shapes


def _mlp_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }


def build(
    config: Config,
    weights: dict[str, Tensor],
    experts: OffloadedExperts,
    *,
    dtype: torch.dtype,
    num_positions: int,
) -> "Llada2Moe":
    """The model over its dense weights and offloaded experts."""
    return Llada2Moe(config, weights, experts, dtype=dtype, num_positions=num_positions)


@dataclass(frozen=True, slots=True)
class _Mlp:
    """gate [F, D], up [F, D], down [D, F]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], name: str) -> "_Mlp":
        return cls(*(weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")))


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's dense weights, as the forward reads them; None where the model has none.

    `head_norm`: query and key norms of every head, [Q + G, H]. The router works in fp32; its weight
    is kept as `router_weight` says.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp: _Mlp | None
    router: Tensor | None
    router_bias: Tensor | None

    @classmethod
    def of(cls, config: Config, weights: Mapping[str, Tensor], layer: int) -> "_Layer":
        name = f"model.layers.{layer}"
        is_dense, router, router_bias = layer < config.num_dense_layers, None, None
        head_norm, mlp = None, f"{name}.mlp"
        qkv = weights[f"{name}.attention.query_key_value.weight"]
        if config.has_qk_norm:
            query, key = (
                weights[f"{name}.attention.{x}_layernorm.weight"] for x in ("query", "key")
            )
            counts = (config.num_heads, config.num_kv_heads)
            head_norm = torch.cat(
                [w.expand(n, -1) for w, n in zip((query, key), counts, strict=True)]
            )
        if not is_dense:
            mlp = f"{name}.mlp.shared_experts"
            router = router_weight(weights[f"{name}.mlp.gate.weight"], qkv.dtype)
            router_bias = weights.get(f"{name}.mlp.gate.expert_bias")
        return cls(
            weights[f"{name}.input_layernorm.weight"],
            weights[f"{name}.post_attention_layernorm.weight"],
            qkv,
            weights.get(f"{name}.attention.query_key_value.bias"),
            head_norm,
            weights[f"{name}.attention.dense.weight"],
            weights.get(f"{name}.attention.dense.bias"),
            _Mlp.of(weights, mlp) if is_dense or config.num_shared_experts else None,
            router,
            None if router_bias is None else router_bias.float(),
        )


class Llada2Moe:
    """LLaDA2's forward over segments of several sequences.

    `probe`, where set, is shown intermediate tensors by the names of the golden sets.
    """

    def __init__(
        self,
        config: Config,
        weights: dict[str, Tensor],
        experts: OffloadedExperts,
        *,
        dtype: torch.dtype,
        num_positions: int,
    ) -> None:
        self.config = config
        self.probe: Probe | None = None
        self.run_piece: RunPiece = run_directly
        self._experts = experts
        self._dtype = dtype
        self._embeddings = weights["model.word_embeddings.weight"]
        self._layers = [_Layer.of(config, weights, layer) for layer in range(config.num_layers)]
        self._final_norm = weights["model.norm.weight"]
        self._head = self._embeddings if config.is_head_tied else weights["lm_head.weight"]
        self._device = self._embeddings.device
        self._cos_sin = rotary_table(
            num_positions, config.rotary_size, config.rope_theta, dtype, self._device
        )

    def new_kv(self, num_positions: int) -> SequenceKv:
        return SequenceKv(
            num_layers=self.config.num_layers,
            num_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            capacity=num_positions,
            dtype=self._dtype,
            device=self._device,
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids.to(self._device), self._embeddings)

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        hidden_TD = self.embed(batch.token_ids)
        self._show("embed_out", hidden_TD)
        positions = batch.positions.to(self._device)
        cos_TR, sin_TR = (table[positions] for table in self._cos_sin)
        last = self.config.num_layers - 1
        for layer in range(last):
            queries_TQH = self._write_kv(layer, hidden_TD, cos_TR, sin_TR, batch)
            hidden_TD = self._layer(layer, hidden_TD, queries_TQH, batch)
        queries_TQH = self._write_kv(last, hidden_TD, cos_TR, sin_TR, batch)
        if not batch.wants_logits:
            return None
        if not batch.all_want_logits:
            hidden_TD, queries_TQH = batch.wanted(hidden_TD), batch.wanted(queries_TQH)
            batch = batch.wanted_part()
        hidden_TD = self._layer(last, hidden_TD, queries_TQH, batch)
        return self._logits(hidden_TD, batch.logit_tokens())

    def _logits(self, hidden_TD: Tensor, tokens_N: Tensor | None) -> Tensor:
        if tokens_N is not None:
            hidden_TD = hidden_TD[tokens_N.to(self._device)]
        hidden_ND = rms_norm(hidden_TD, self._final_norm, self.config.norm_eps)
        self._show("final_norm_out", hidden_ND)
        return head_logits(hidden_ND, self._head)

    def _layer(
        self, layer: int, hidden_TD: Tensor, queries_TQH: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """All of a layer behind the projections to queries, keys and values."""
        attended = self._attend(layer, queries_TQH, batch)
        if self._layers[layer].router is None:
            (hidden_TD,) = self._run(layer, "dense", self._dense, attended, hidden_TD)
        else:
            hidden_TD = self._moe(layer, attended, hidden_TD, batch)
        self._show(f"layers.{layer}.layer_out", hidden_TD)
        return hidden_TD

    def _dense(self, layer: int, attended: Tensor, hidden_TD: Tensor) -> tuple[Tensor]:
        """A layer with an ordinary MLP, behind attention."""
        mlp = self._layers[layer].mlp
        assert mlp is not None
        hidden_TD, normed_TD = self._behind_attention(layer, attended, hidden_TD)
        return (hidden_TD + _swiglu(normed_TD, mlp),)

    def _behind_attention(
        self, layer: int, attended: Tensor, hidden_TD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Hidden states with attention's [T, Q · H] added, and these normed for what follows."""
        weights = self._layers[layer]
        attention_TD = linear(attended, weights.output, weights.output_bias)
        self._show(f"layers.{layer}.attention_out", attention_TD)
        hidden_TD = hidden_TD + attention_TD
        normed_TD = rms_norm(hidden_TD, weights.post_norm, self.config.norm_eps)
        self._show(f"layers.{layer}.mlp_input", normed_TD)
        return hidden_TD, normed_TD

    def _run(
        self, layer: int, name: str, piece: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """A part of a layer, through `run_piece` where nobody looks into it."""
        run = self.run_piece if self.probe is None else run_directly
        return run((layer, name), partial(piece, layer), *inputs)

    def _write_kv(
        self, layer: int, hidden_TD: Tensor, cos_TR: Tensor, sin_TR: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Put this forward's keys and values behind each sequence; returns queries [T, Q, H]."""
        heads, values = self._run(layer, "project", self._project, hidden_TD, cos_TR, sin_TR)
        keys = heads[:, self.config.num_heads :]
        write_kv(layer, keys, values, batch.segments)
        return heads[:, : self.config.num_heads]

    def _project(
        self, layer: int, hidden_TD: Tensor, cos_TR: Tensor, sin_TR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, Q + G, H], normed and rotated, and values [T, G, H]."""
        config, weights = self.config, self._layers[layer]
        normed_TD = rms_norm(hidden_TD, weights.input_norm, config.norm_eps)
        self._show(f"layers.{layer}.input_layernorm_out", normed_TD)
        fused = linear(normed_TD, weights.qkv, weights.qkv_bias)
        fused = fused.view(len(normed_TD), -1, config.head_size)
        first_value = config.num_heads + config.num_kv_heads
        heads, values = fused[:, :first_value], fused[:, first_value:]
        if weights.head_norm is not None:
            heads = rms_norm(heads, weights.head_norm, config.norm_eps)
        return rotate(heads, cos_TR, sin_TR), values

    def _attend(self, layer: int, queries_TQH: Tensor, batch: ForwardBatch) -> Tensor:
        """Each segment over its sequence's keys and values; returns [T, Q · H]."""
        return block_attention(layer, queries_TQH, batch)

    def _route(self, layer: int, attended: Tensor, hidden_TD: Tensor) -> tuple[Tensor, ...]:
        """Hidden states behind attention, normed ones, and what the router makes of these: ids,
        shares and weights [T, K], all scores [T, E]."""
        config, weights = self.config, self._layers[layer]
        assert weights.router is not None
        hidden_TD, normed_TD = self._behind_attention(layer, attended, hidden_TD)
        ids_TK, gates_TK, scores_TE = grouped_sigmoid_router(
            normed_TD,
            weights.router,
            weights.router_bias,
            num_groups=config.num_groups,
            num_kept_groups=config.num_kept_groups,
            top_k=config.top_k,
        )
        return hidden_TD, normed_TD, *self._routing(ids_TK, gates_TK, scores_TE)

    def _routing(self, ids_TK: Tensor, gates_TK: Tensor, scores_TE: Tensor) -> Routing:
        config = self.config
        # With one expert per token the router's weight is not normalised; its share is 1.
        shares_TK = gates_TK if config.top_k > 1 else torch.ones_like(gates_TK)
        return Routing(ids_TK, shares_TK, gates_TK * config.routed_scale, scores_TE)

    def _restrict(self, layer: int, routing: Routing, context: ForwardContext) -> Routing:
        """What tokens choose among the experts that their block admits, where the model has block
        routing, and that a lossy rule allows, where there is one.

        Block routing is among all admitted experts: groups play no part. Source: models.md 1.1,
        policies.md 7; sgl-project/sglang PR 31768, the reference of its kernel tests.
        """
        config, scores_TE = self.config, routing.scores_TE
        if config.expert_capacity is None and not self._experts.limits_choices:
            return routing
        bias_E = self._layers[layer].router_bias
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        num_groups, num_kept_groups = config.num_groups, config.num_kept_groups
        is_admitted_TE = None
        if config.expert_capacity is not None:
            num_groups = num_kept_groups = 1
            is_admitted_TE = admit(choice_TE, context.block_sizes, config.expert_capacity)
            choice_TE = choice_TE.masked_fill(~is_admitted_TE, float("-inf"))

        def choose(allowed_TE: Tensor) -> Routing:
            ids_TK = choose_within(
                choice_TE,
                allowed_TE if is_admitted_TE is None else allowed_TE & is_admitted_TE,
                top_k=config.top_k,
                num_groups=num_groups,
                num_kept_groups=num_kept_groups,
            )
            return self._routing(ids_TK, sigmoid_shares(scores_TE, ids_TK), scores_TE)

        if is_admitted_TE is not None:
            routing = choose(is_admitted_TE)
        moe_layer = layer - config.num_dense_layers
        return self._experts.restrict(moe_layer, routing, choice_TE, context, choose)

    def _shared(self, layer: int, normed_TD: Tensor) -> tuple[Tensor]:
        """The shared expert."""
        mlp = self._layers[layer].mlp
        assert mlp is not None
        return (_swiglu(normed_TD, mlp),)

    def _moe(self, layer: int, attended: Tensor, hidden_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """A layer with experts, behind attention."""
        hidden_TD, normed_TD, *routed = self._run(layer, "route", self._route, attended, hidden_TD)
        routing = self._restrict(layer, Routing(*routed), batch.context)
        self._show(f"layers.{layer}.topk_idx", routing.ids_TK)
        self._show(f"layers.{layer}.topk_weight", routing.weights_TK)
        pending = self._experts.start(
            layer - self.config.num_dense_layers,
            normed_TD,
            routing.ids_TK,
            routing.shares_TK,
            batch.context,
            routing.scores_TE if self._experts.wants_gate_scores else None,
        )
        shared_TD = None
        if self._layers[layer].mlp is not None:
            (shared_TD,) = self._run(layer, "shared", self._shared, normed_TD)
            self._show(f"layers.{layer}.shared_out", shared_TD)
        out_TD = self._experts.finish(pending, routing.weights_TK).to(normed_TD.dtype)
        self._show(f"layers.{layer}.routed_out", out_TD)
        return hidden_TD + (out_TD if shared_TD is None else out_TD + shared_TD)

    def _show(self, name: str, value: Tensor) -> None:
        if self.probe is not None:
            self.probe(name, value)


def _swiglu(hidden_TD: Tensor, mlp: _Mlp) -> Tensor:
    return swiglu(hidden_TD, mlp.gate, mlp.up, mlp.down)
