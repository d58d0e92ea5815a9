"""LLaDA-MoE (7B-A1B): diffusion over the whole sequence, full attention, a softmax-routed MoE.

Reference: the LLaDA-MoE modelling code as carried by ZHZisZZ/dllm; facts in models.md 1.4, 2.4 and
3.3, numbers in the golden set. Attention is full: the block of a forward's context is the whole
sequence. Parameters keep the names of the checkpoint.
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
from oled_moe.config import UNTRAINED_ALGORITHMS, FamilyDecoding, SamplingParams
from oled_moe.errors import CheckpointError
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels.linear import head_logits, linear
from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import (
    ForwardBatch,
    Logits,
    Routing,
    RowLogits,
    RunPiece,
    block_attention,
    choose_within,
    rms_norm,
    rotary_table,
    rotate,
    run_directly,
    softmax_router,
    softmax_shares,
    swiglu,
    write_kv,
)
from oled_moe.models.fields import MAX_EXPERTS, MAX_LAYERS, FieldReader
from oled_moe.store import Activation, ExpertPart

Probe = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of config.json that the model depends on, validated.

    `moe_layers`: which layers hold experts, ascending; the others have an MLP of
    `intermediate_size`, 0 where there are none. `shared_size`: inner size of the shared expert, 0
    where there is none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    shared_size: int
    num_layers: int
    moe_layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_size: int
    rope_theta: float
    max_positions: int
    norm_eps: float
    num_experts: int
    top_k: int
    has_qk_norm: bool
    has_attention_bias: bool
    has_expert_bias: bool
    is_head_tied: bool

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

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
        """Block after block, all of the canvas in every forward; models.md 7.1."""
        defaults = SamplingParams(
            algorithm="threshold", max_tokens=256, block_length=32, confidence="raw"
        )
        return FamilyDecoding(UNTRAINED_ALGORITHMS, defaults, is_whole=True, fills_behind_eos=True)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "Config":
        """Validate the keys of a LLaDA-MoE config.json; keys of no effect are ignored.

        norm_topk_prob is one of these: the reference never normalises.
        Raises: CheckpointError naming the field, its value and what is allowed.
        """
        read = FieldReader(values)
        _refuse_unsupported(read, values)
        rope = read.rope_parameters()
        num_heads = read.whole("num_attention_heads")
        hidden_size = read.whole("hidden_size")
        if hidden_size % num_heads:
            raise read.error("num_attention_heads", f"a divisor of hidden_size {hidden_size}")
        head_size = hidden_size // num_heads
        num_layers = read.whole("num_hidden_layers", maximum=MAX_LAYERS)
        moe_layers = _moe_layers(read, num_layers)
        has_dense_layers = len(moe_layers) < num_layers
        share = read.real(
            "partial_rotary_factor", default=rope.get("partial_rotary_factor", 1.0), maximum=1.0
        )
        config = cls(
            vocab_size=read.whole("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.whole("dense_intermediate_size") if has_dense_layers else 0,
            moe_intermediate_size=read.whole("expert_intermediate_size"),
            shared_size=read.whole("shared_expert_intermediate_size", default=0, minimum=0),
            num_layers=num_layers,
            moe_layers=moe_layers,
            num_heads=num_heads,
            num_kv_heads=read.whole("num_key_value_heads", default=num_heads),
            head_size=head_size,
            rotary_size=int(head_size * share),
            rope_theta=read.real("rope_theta", default=rope.get("rope_theta")),
            max_positions=read.whole("max_position_embeddings", default=4096),
            norm_eps=read.real("rms_norm_eps", default=1e-5),
            num_experts=read.whole("num_experts", maximum=MAX_EXPERTS),
            top_k=read.whole("num_experts_per_tok"),
            has_qk_norm=read.flag("qk_layernorm", default=False),
            has_attention_bias=read.flag("attention_bias", default=False),
            has_expert_bias=read.flag("moe_router_enable_expert_bias", default=False),
            is_head_tied=read.flag("tie_word_embeddings", default=False),
        )
        config._check_relations(read)
        return config

    def _check_relations(self, read: FieldReader) -> None:
        if self.num_heads % self.num_kv_heads:
            raise read.error("num_key_value_heads", f"a divisor of {self.num_heads} heads")
        if self.rotary_size % 2 or not self.rotary_size:
            raise read.error(
                "partial_rotary_factor", f"what makes an even part of {self.head_size} dimensions"
            )
        if self.top_k > self.num_experts:
            raise read.error("num_experts_per_tok", f"1 to {self.num_experts} experts")


def _refuse_unsupported(read: FieldReader, values: Mapping[str, Any]) -> None:
    if values.get("num_experts") is None:
        raise CheckpointError(
            "config.json: num_experts is missing: models of model_type 'llada' without experts "
            "have nothing to offload and are not run; take LLaDA-MoE"
        )
    read.refuse_others(
        {
            "hidden_act": (None, "silu"),
            "moe_router_score_function": (None, "softmax"),
            "routed_scaling_factor": (None, 1),
            "router_num_group": (None,),
            "router_topk_group": (None,),
            "clip_qkv": (None,),
            "quantization_config": (None,),
        }
    )


def _moe_layers(read: FieldReader, num_layers: int) -> tuple[int, ...]:
    """Layers with experts: those marked 1 in moe_layer_freq; absent is all of them."""
    marks = read.wholes("moe_layer_freq", default=[1] * num_layers, maximum=1)
    if len(marks) != num_layers or 1 not in marks:
        raise read.error("moe_layer_freq", f"{num_layers} numbers, 1 for layers with experts")
    return tuple(layer for layer, mark in enumerate(marks) if mark)


_EXPERT_NAME = re.compile(
    r"model\.layers\.(\d{1,9})\.mlp\.experts\.(?:(\d{1,9})\.)?"
    r"(gate_proj|up_proj|down_proj|gate_up_proj)(?:\.weight)?"
)
_LAYER_NAME = re.compile(r"model\.layers\.(\d{1,9})\.(?:mlp|self_attn|shared_expert)\.")
_MATRICES: dict[str, Any] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
}


def build_weight_map(config: Config) -> WeightMap:
    """Checkpoint names to parameters (same name) and expert parts; KeyError for a stranger."""
    shapes = parameter_shapes(config)
    moe_index = {layer: index for index, layer in enumerate(config.moe_layers)}

    def weight_map(name: str) -> str | ExpertPart | None:
        match = _EXPERT_NAME.fullmatch(name)
        if match:
            layer = moe_index.get(int(match[1]))
            expert = None if match[2] is None else int(match[2])
            if layer is not None and (expert or 0) < config.num_experts:
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
    """What is added in fp32; the router's weight is used in the model's dtype."""
    if not config.has_expert_bias:
        return frozenset()
    return frozenset(f"model.layers.{layer}.mlp.expert_bias" for layer in config.moe_layers)


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter outside the routed experts (models.md 3.3)."""
    hidden, head = config.hidden_size, config.head_size
    outputs = {"q": config.num_heads * head, "k": config.num_kv_heads * head}
    outputs["v"] = outputs["k"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.is_head_tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        shapes[f"{name}.input_layernorm.weight"] = (hidden,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        for part, size in outputs.items():
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (size, hidden)
            if config.has_attention_bias:
                shapes[f"{name}.self_attn.{part}_proj.bias"] = (size,)
        shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, outputs["q"])
        if config.has_attention_bias:
            shapes[f"{name}.self_attn.o_proj.bias"] = (hidden,)
        if config.has_qk_norm:
            shapes[f"{name}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{name}.self_attn.k_norm.weight"] = (head,)
        if layer not in config.moe_layers:
            shapes.update(_mlp_shapes(f"{name}.mlp", hidden, config.intermediate_size))
            continue
        shapes[f"{name}.mlp.gate.weight"] = (config.num_experts, hidden)
        if config.has_expert_bias:
            shapes[f"{name}.mlp.expert_bias"] = (config.num_experts,)
        if config.shared_size:
            shapes.update(_mlp_shapes(f"{name}.shared_expert", hidden, config.shared_size))
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
) -> "LladaMoe":
    """The model over its dense weights and offloaded experts.

    Mutates: takes the attention's projections out of `weights`, so that none is held twice.
    """
    return LladaMoe(config, weights, experts, dtype=dtype, num_positions=num_positions)


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

    `qkv` [(Q + 2 · G) · H, D]: the three projections as one product. `head_norm`: query and key
    norms of every head, [Q + G, H]. `mlp`: the shared expert where the layer has a router.
    `moe_index`: the layer's number among those with experts.
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
    moe_index: int | None

    @classmethod
    def of(cls, config: Config, weights: dict[str, Tensor], layer: int) -> "_Layer":
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        mlp, moe_index, qkv_bias, head_norm = None, None, None, None
        if layer not in config.moe_layers:
            mlp = _Mlp.of(weights, f"{name}.mlp")
        else:
            moe_index = config.moe_layers.index(layer)
            mlp = _Mlp.of(weights, f"{name}.shared_expert") if config.shared_size else None
        if config.has_attention_bias:
            qkv_bias = torch.cat([weights.pop(f"{attention}.{x}_proj.bias") for x in "qkv"])
        if config.has_qk_norm:
            counts = (("q", config.num_heads), ("k", config.num_kv_heads))
            head_norm = torch.cat(
                [weights[f"{attention}.{x}_norm.weight"].expand(n, -1) for x, n in counts]
            )
        return cls(
            weights[f"{name}.input_layernorm.weight"],
            weights[f"{name}.post_attention_layernorm.weight"],
            torch.cat([weights.pop(f"{attention}.{x}_proj.weight") for x in "qkv"]),
            qkv_bias,
            head_norm,
            weights[f"{attention}.o_proj.weight"],
            weights.get(f"{attention}.o_proj.bias"),
            mlp,
            None if moe_index is None else weights[f"{name}.mlp.gate.weight"],
            weights.get(f"{name}.mlp.expert_bias"),
            moe_index,
        )


class LladaMoe:
    """LLaDA-MoE's forward over segments of several sequences.

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
        self._embeddings = weights["model.embed_tokens.weight"]
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

    def forward(self, batch: ForwardBatch) -> Logits | None:
        hidden_TD = self.embed(batch.token_ids) if batch.inputs_TD is None else batch.inputs_TD
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
        return self._logits(hidden_TD, batch)

    def _logits(self, hidden_TD: Tensor, batch: ForwardBatch) -> Logits:
        tokens_N = batch.logit_tokens()
        if tokens_N is not None:
            hidden_TD = hidden_TD[tokens_N.to(self._device)]
        hidden_ND = rms_norm(hidden_TD, self._final_norm, self.config.norm_eps)
        self._show("final_norm_out", hidden_ND)
        if batch.reads_rows:
            return RowLogits(hidden_ND, self._head, self._embeddings)
        return head_logits(hidden_ND, self._head)

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

    def _attend(self, layer: int, queries_TQH: Tensor, batch: ForwardBatch) -> Tensor:
        """Each segment over its sequence's keys and values; returns [T, Q · H]."""
        return block_attention(layer, queries_TQH, batch)

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

    def _dense(self, layer: int, attended: Tensor, hidden_TD: Tensor) -> tuple[Tensor]:
        """A layer with an ordinary MLP, behind attention."""
        mlp = self._layers[layer].mlp
        assert mlp is not None
        hidden_TD, normed_TD = self._behind_attention(layer, attended, hidden_TD)
        return (hidden_TD + swiglu(normed_TD, mlp.gate, mlp.up, mlp.down),)

    def _route(self, layer: int, attended: Tensor, hidden_TD: Tensor) -> tuple[Tensor, ...]:
        """Hidden states behind attention, normed ones, and what the router makes of these: ids,
        shares and mixing weights [T, K], all scores [T, E]."""
        weights = self._layers[layer]
        assert weights.router is not None
        hidden_TD, normed_TD = self._behind_attention(layer, attended, hidden_TD)
        ids_TK, shares_TK, weights_TK, scores_TE = softmax_router(
            normed_TD,
            weights.router,
            weights.router_bias,
            top_k=self.config.top_k,
            is_normalised=False,
        )
        weights_TK = weights_TK.to(self._dtype).float()
        return hidden_TD, normed_TD, ids_TK, shares_TK, weights_TK, scores_TE

    def _restrict(self, moe_index: int, routing: Routing, batch: ForwardBatch) -> Routing:
        """What tokens choose where a lossy rule limits them."""
        scores_TE = routing.scores_TE

        def choose(allowed_TE: Tensor) -> Routing:
            ids_TK = choose_within(scores_TE, allowed_TE, top_k=self.config.top_k)
            shares_TK, weights_TK = softmax_shares(scores_TE, ids_TK, is_normalised=False)
            return Routing(ids_TK, shares_TK, weights_TK.to(self._dtype).float(), scores_TE)

        return self._experts.restrict(moe_index, routing, scores_TE, batch.context, choose)

    def _shared(self, layer: int, normed_TD: Tensor) -> tuple[Tensor]:
        """The shared expert."""
        mlp = self._layers[layer].mlp
        assert mlp is not None
        return (swiglu(normed_TD, mlp.gate, mlp.up, mlp.down),)

    def _moe(self, layer: int, attended: Tensor, hidden_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """A layer with experts, behind attention."""
        hidden_TD, normed_TD, *routed = self._run(layer, "route", self._route, attended, hidden_TD)
        weights = self._layers[layer]
        assert weights.moe_index is not None
        routing = self._restrict(weights.moe_index, Routing(*routed), batch)
        self._show(f"layers.{layer}.topk_idx", routing.ids_TK)
        self._show(f"layers.{layer}.topk_weight", routing.weights_TK)
        pending = self._experts.start(
            weights.moe_index,
            normed_TD,
            routing.ids_TK,
            routing.shares_TK,
            batch.context,
            routing.scores_TE if self._experts.wants_gate_scores else None,
        )
        shared_TD = None
        if weights.mlp is not None:
            (shared_TD,) = self._run(layer, "shared", self._shared, normed_TD)
        out_TD = self._experts.finish(pending, routing.weights_TK).to(normed_TD.dtype)
        if shared_TD is not None:
            out_TD = out_TD + shared_TD
        self._show(f"layers.{layer}.mlp_out", out_TD)
        return hidden_TD + out_TD

    def _run(
        self, layer: int, name: str, piece: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """A part of a layer, through `run_piece` where nobody looks into it."""
        run = self.run_piece if self.probe is None else run_directly
        return run((layer, name), partial(piece, layer), *inputs)

    def _show(self, name: str, value: Tensor) -> None:
        if self.probe is not None:
            self.probe(name, value)
