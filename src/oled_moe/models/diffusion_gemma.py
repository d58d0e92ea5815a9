"""DiffusionGemma (26B-A4B), text alone: canvases of random tokens over a Gemma 4 with experts.

One set of layers does two things. As the encoder it reads prompt and finished canvases in order,
each token seeing those before it, and keeps their keys and values. As the decoder it denoises a
canvas whose tokens see all of these and each other, given what it predicted of them a step before.
Both may share a forward: rows that denoise are decoded, all others encoded. How a canvas is made
and changed from step to step is in `random_canvas.py`.

Reference: Transformers, models/diffusion_gemma/modeling_diffusion_gemma.py and
configuration_diffusion_gemma.py. What a checkpoint holds for images is left unread. Parameters keep
the names of the checkpoint without its first `model.`.
Legend: T tokens, N of them whose logits are wanted, D hidden, Q query heads, G key/value heads,
H head size, E experts, K experts per token, F inner size of an MLP, V vocabulary.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from oled_moe.checkpoint import WeightMap
from oled_moe.config import RANDOM_ALGORITHMS, FamilyDecoding, SamplingParams
from oled_moe.errors import CheckpointError
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels.linear import head_logits, linear
from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import (
    ATTENTION_SLICE,
    ForwardBatch,
    QuerySlice,
    Routing,
    RunPiece,
    Segment,
    choose_within,
    rotate,
    run_directly,
    sliced_attention,
    softmax_shares,
    write_kv,
)
from oled_moe.models.fields import MAX_EXPERTS, MAX_LAYERS, FieldReader
from oled_moe.store import Activation, ExpertPart
from oled_moe.types import Phase

Probe = Callable[[str, Tensor], None]

# Logits of so many numbers are turned into embeddings at a time.
_CONDITION_SLICE = 2**22
_SLIDING, _GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one kind of layer.

    `num_rotated` of its dimension pairs turn, at frequencies of base `rope_theta` over the whole
    head, divided by `rope_factor`. `window`: how many tokens, itself included, one that is encoded
    sees; 0 for all before it.
    """

    num_kv_heads: int
    head_size: int
    num_rotated: int
    rope_theta: float
    rope_factor: float
    window: int


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of config.json that the model depends on, validated.

    `is_sliding`: for each layer whether its attention is `sliding` or `whole`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_heads: int
    is_sliding: tuple[bool, ...]
    sliding: AttentionShape
    whole: AttentionShape
    max_positions: int
    norm_eps: float
    num_experts: int
    top_k: int
    logit_cap: float
    canvas_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.is_sliding)

    @property
    def num_moe_layers(self) -> int:
        return len(self.is_sliding)

    @property
    def num_kv_heads(self) -> int:
        return max(self.sliding.num_kv_heads, self.whole.num_kv_heads)

    @property
    def head_size(self) -> int:
        return max(self.sliding.head_size, self.whole.head_size)

    @property
    def kv_size(self) -> int:
        shapes = map(self.attention, range(self.num_layers))
        return sum(2 * shape.num_kv_heads * shape.head_size for shape in shapes)

    @property
    def query_size(self) -> int:
        shapes = map(self.attention, range(self.num_layers))
        return sum(self.num_heads * shape.head_size for shape in shapes)

    @property
    def activation(self) -> Activation:
        return "gelu_tanh"

    @property
    def decoding(self) -> FamilyDecoding:
        """Canvas after canvas, as the reference's generation config has it where it says nothing;
        nearly all experts are active in each forward, so that they are streamed."""
        first, *others = self.eos_token_ids or (None,)
        defaults = SamplingParams(
            algorithm=RANDOM_ALGORITHMS[0],
            block_length=self.canvas_length,
            temperature=1.0,
            eos_token_id=first,
            stop_token_ids=others,
        )
        return FamilyDecoding(
            RANDOM_ALGORITHMS, defaults, canvas_length=self.canvas_length, policy="stream"
        )

    def attention(self, layer: int) -> AttentionShape:
        """The shape of a layer's attention."""
        return self.sliding if self.is_sliding[layer] else self.whole

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "Config":
        """Validate the keys of a DiffusionGemma config.json; keys of no effect are ignored.

        `vision_config` is one of these: images are not read. Defaults are those of its class.
        Raises: CheckpointError naming the field, its value and what is allowed.
        """
        outer = FieldReader(values)
        outer.refuse_others({"tie_word_embeddings": (None, True), "quantization_config": (None,)})
        text = values.get("text_config")
        if not isinstance(text, Mapping):
            raise outer.error("text_config", "an object")
        read = FieldReader(text)
        read.refuse_others(
            {
                "hidden_activation": (None, "gelu_pytorch_tanh"),
                "tie_word_embeddings": (None, True),
                "attention_bias": (None, False),
                "use_bidirectional_attention": (None, "vision"),
                "quantization_config": (None,),
            }
        )
        num_layers = read.whole("num_hidden_layers", default=30, maximum=MAX_LAYERS)
        is_sliding = _layer_types(read, text, num_layers)
        sliding, whole = _attention_shapes(read, text, is_sliding)
        config = cls(
            vocab_size=read.whole("vocab_size", default=262144),
            hidden_size=read.whole("hidden_size", default=2304),
            intermediate_size=read.whole("intermediate_size", default=9216),
            moe_intermediate_size=read.whole("moe_intermediate_size"),
            num_heads=read.whole("num_attention_heads", default=8),
            is_sliding=is_sliding,
            sliding=sliding,
            whole=whole,
            max_positions=read.whole("max_position_embeddings", default=131072),
            norm_eps=read.real("rms_norm_eps", default=1e-6),
            num_experts=read.whole("num_experts", maximum=MAX_EXPERTS),
            top_k=read.whole("top_k_experts"),
            logit_cap=read.real("final_logit_softcapping", default=30.0),
            canvas_length=outer.whole("canvas_length", default=256, maximum=2**16),
            eos_token_ids=_eos_ids(read, text),
        )
        config._check_relations(read)
        return config

    def _check_relations(self, read: FieldReader) -> None:
        for shape in (self.sliding, self.whole):
            if self.num_heads % shape.num_kv_heads:
                raise read.error(
                    "num_attention_heads", f"a multiple of {shape.num_kv_heads} key/value heads"
                )
            if shape.head_size % 2:
                raise read.error("head_dim", f"an even number in every layer: {shape.head_size}")
        if self.top_k > self.num_experts:
            raise read.error("top_k_experts", f"1 to {self.num_experts} experts")


def _layer_types(read: FieldReader, text: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Whether each layer's attention slides; absent, all but every sixth do, and the last never."""
    types = text.get("layer_types")
    if types is None:
        types = [_GLOBAL if (layer + 1) % 6 == 0 else _SLIDING for layer in range(num_layers)]
    is_list = isinstance(types, Sequence) and not isinstance(types, str)
    if not is_list or len(types) != num_layers or not set(types) <= {_SLIDING, _GLOBAL}:
        raise read.error("layer_types", f"{num_layers} of {_SLIDING}, {_GLOBAL}")
    return (*(kind == _SLIDING for kind in types[:-1]), False)


def _attention_shapes(
    read: FieldReader, text: Mapping[str, Any], is_sliding: Sequence[bool]
) -> tuple[AttentionShape, AttentionShape]:
    """The attention of sliding layers, and of those that see everything before them."""
    ropes = text.get("rope_parameters") or {}
    if not isinstance(ropes, Mapping):
        raise read.error("rope_parameters", "an object, absent")
    num_kv_heads = read.whole("num_key_value_heads", default=4)
    head_size = read.whole("head_dim", default=256)
    overrides = {
        "head_dim": read.whole("global_head_dim", default=512),
        "num_key_value_heads": read.whole("num_global_key_value_heads", default=num_kv_heads),
    }
    if text.get("per_layer_config") is not None:
        overrides = _layer_overrides(read, text["per_layer_config"], is_sliding)
    whole_heads = overrides.get("num_key_value_heads", num_kv_heads)
    whole_size = overrides.get("head_dim", head_size)
    # At one token the reference would keep everything.
    window = read.whole("sliding_window", default=512, minimum=2)
    slides = _rope(ropes, _SLIDING, {"rope_type": "default", "rope_theta": 1e4})
    turns = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    return (
        AttentionShape(num_kv_heads, head_size, *slides(head_size), window),
        AttentionShape(whole_heads, whole_size, *_rope(ropes, _GLOBAL, turns)(whole_size), 0),
    )


def _layer_overrides(read: FieldReader, layers: Any, is_sliding: Sequence[bool]) -> dict[str, int]:
    """What `per_layer_config` says of the layers that see everything: the same of each."""
    allowed = "the same head_dim and num_key_value_heads for each layer of full_attention"
    if layers == {}:
        # Nothing differs.
        return {}
    wanted = {str(layer) for layer, slides in enumerate(is_sliding) if not slides}
    if not isinstance(layers, Mapping) or {str(layer) for layer in layers} != wanted:
        raise read.error("per_layer_config", allowed)
    first, *others = layers.values()
    if not isinstance(first, Mapping) or any(other != first for other in others):
        raise read.error("per_layer_config", allowed)
    if not set(first) <= {"head_dim", "num_key_value_heads"}:
        raise read.error("per_layer_config", allowed)
    fields = FieldReader(first)
    return {name: fields.whole(name) for name in first}


def _rope(
    ropes: Mapping[str, Any], kind: str, default: Mapping[str, Any]
) -> Callable[[int], tuple[int, float, float]]:
    """How one kind of layer rotates: from a head size to pairs that turn, base and divisor.

    Source: Transformers, modeling_rope_utils.py, proportional; the default type of this family has
    tables that fit a head only where all of it turns.
    """
    values = ropes.get(kind, default)
    name = f"rope_parameters.{kind}"
    if not isinstance(values, Mapping):
        raise CheckpointError(f"config.json: {name} is {values!r:.200}; allowed: an object")
    read = FieldReader(values)
    is_partial = values.get("rope_type") == "proportional"
    read.refuse_others({"rope_type": ("default", "proportional")})
    if not is_partial:
        read.refuse_others({"partial_rotary_factor": (None, 1.0), "factor": (None,)})
    theta, factor = read.real("rope_theta"), read.real("factor", default=1.0)
    share = read.real("partial_rotary_factor", default=1.0, maximum=1.0)
    return lambda head_size: (int(share * head_size // 2), theta, factor)


def _eos_ids(read: FieldReader, text: Mapping[str, Any]) -> tuple[int, ...]:
    if isinstance(text.get("eos_token_id"), list):
        return read.wholes("eos_token_id", default=(), maximum=2**31)
    return (read.whole("eos_token_id", default=1, minimum=0),)


_EXPERT_NAME = re.compile(r"decoder\.layers\.(\d{1,9})\.experts\.(gate_up_proj|down_proj)")
_MATRICES: dict[str, Any] = {"gate_up_proj": "gate_up", "down_proj": "down"}
# Images.
_UNREAD = ("encoder.vision_tower.", "encoder.embed_vision.")


def build_weight_map(config: Config) -> WeightMap:
    """Checkpoint names to parameters and expert parts; KeyError for a stranger.

    Names may lack `model.`. What belongs to images is known and not read; so are the encoder's
    copies of the decoder's weights and a head of its own, which are tied to these.
    """
    shapes = parameter_shapes(config)

    def weight_map(name: str) -> str | ExpertPart | None:
        name = name.removeprefix("model.")
        if name.startswith(_UNREAD) or name == "lm_head.weight":
            return None
        match = _EXPERT_NAME.fullmatch(name)
        if match and int(match[1]) < config.num_layers:
            return ExpertPart(int(match[1]), None, _MATRICES[match[2]])
        if name in shapes:
            return name
        twin = name.replace("encoder.language_model.", "decoder.", 1)
        if twin != name and (twin in shapes or _EXPERT_NAME.fullmatch(twin)):
            return None
        if re.match(r"decoder\.layers\.\d{1,9}\.", twin):
            raise CheckpointError(
                f"the checkpoint holds {name}, which config.json does not provide for; "
                "take the config.json that belongs to these weights"
            )
        raise KeyError(name)

    return weight_map


def kept_dtypes(config: Config) -> frozenset[str]:
    """None: everything works in the model's dtype."""
    return frozenset()


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter outside the routed experts."""
    hidden, width = config.hidden_size, config.intermediate_size
    condition = "decoder.self_conditioning"
    shapes: dict[str, tuple[int, ...]] = {
        "decoder.embed_tokens.weight": (config.vocab_size, hidden),
        "decoder.norm.weight": (hidden,),
        f"{condition}.pre_norm.weight": (hidden,),
        **_mlp_shapes(condition, hidden, width),
    }
    for layer in range(config.num_layers):
        name, shape = f"decoder.layers.{layer}", config.attention(layer)
        queries, keys = config.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        for norm in _NORMS:
            shapes[f"{name}.{norm}.weight"] = (hidden,)
        shapes |= _mlp_shapes(f"{name}.mlp", hidden, width)
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (queries, hidden),
            f"{name}.self_attn.k_proj.weight": (keys, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, queries),
            f"{name}.self_attn.q_norm.weight": (shape.head_size,),
            f"{name}.self_attn.k_norm.weight": (shape.head_size,),
            f"{name}.router.proj.weight": (config.num_experts, hidden),
            f"{name}.router.scale": (hidden,),
            f"{name}.router.per_expert_scale": (config.num_experts,),
            f"{name}.layer_scalar": (1,),
            f"encoder.language_model.layers.{layer}.layer_scalar": (1,),
        }
        if config.is_sliding[layer]:
            shapes[f"{name}.self_attn.v_proj.weight"] = (keys, hidden)
    return shapes


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
)


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
) -> "DiffusionGemma":
    """The model over its dense weights and offloaded experts.

    Mutates: takes the attention's projections out of `weights`, so that none is held twice.
    """
    return DiffusionGemma(config, weights, experts, dtype=dtype, num_positions=num_positions)


@dataclass(frozen=True, slots=True)
class _Mlp:
    """gate [F, D], up [F, D], down [D, F]."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], name: str) -> "_Mlp":
        return cls(*(weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down")))

    def __call__(self, hidden_TD: Tensor) -> Tensor:
        gate_TF = F.gelu(linear(hidden_TD, self.gate), approximate="tanh")
        return linear(gate_TF * linear(hidden_TD, self.up), self.down)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's dense weights, as the forward reads them.

    `qkv`: the projections as one product; layers that see everything have no values of their own
    there, theirs are the keys before these are normed and turned. `head_norm`: query and key norms
    of every head, [Q + G, H]. `norms` by the names of the checkpoint. Scalars [1].
    """

    shape: AttentionShape
    norms: Mapping[str, Tensor]
    qkv: Tensor
    head_norm: Tensor
    output: Tensor
    mlp: _Mlp
    router: Tensor
    router_scale: Tensor
    expert_scale: Tensor
    decoder_scalar: Tensor
    encoder_scalar: Tensor

    @classmethod
    def of(cls, config: Config, weights: dict[str, Tensor], layer: int) -> "_Layer":
        name, shape = f"decoder.layers.{layer}", config.attention(layer)
        attention = f"{name}.self_attn"
        parts = "qkv" if config.is_sliding[layer] else "qk"
        counts = (("q", config.num_heads), ("k", shape.num_kv_heads))
        return cls(
            shape,
            {norm: weights[f"{name}.{norm}.weight"] for norm in _NORMS},
            torch.cat([weights.pop(f"{attention}.{part}_proj.weight") for part in parts]),
            torch.cat([weights[f"{attention}.{x}_norm.weight"].expand(n, -1) for x, n in counts]),
            weights[f"{attention}.o_proj.weight"],
            _Mlp.of(weights, f"{name}.mlp"),
            weights[f"{name}.router.proj.weight"],
            weights[f"{name}.router.scale"],
            weights[f"{name}.router.per_expert_scale"],
            weights[f"{name}.layer_scalar"],
            weights[f"encoder.language_model.layers.{layer}.layer_scalar"],
        )


class _Seen(NamedTuple):
    """Queries of one call, and the first key that they see; `part` counts keys from there on."""

    segment: Segment
    first_key: int
    part: QuerySlice


class _Forward:
    """What all layers of one forward ask of its batch.

    `is_canvas` bool [T, 1]. Attention is cut up once for each kind of layer, by its window.
    """

    def __init__(self, batch: ForwardBatch, windows: set[int], device: torch.device) -> None:
        self.batch = batch
        rows = batch.context.rows
        self.canvases = [row.phase == Phase.DENOISE for row in rows]
        counts = torch.tensor([row.num_tokens for row in rows])
        is_canvas = torch.repeat_interleave(torch.tensor(self.canvases), counts)
        self.is_canvas = is_canvas[:, None].to(device)
        pairs = list(zip(batch.segments, self.canvases, strict=True))
        self._seen = {
            window: [seen for pair in pairs for seen in _seen_by(*pair, window)]
            for window in windows
        }

    def attend(self, layer: int, queries_TQH: Tensor, window: int) -> Tensor:
        """Each segment over its sequence's keys and values; returns [T, Q · H].

        Products of queries and keys are taken as they are: both were normed.
        """
        slices = []
        for segment, first_key, part in self._seen[window]:
            keys_GSH, values_GSH = segment.kv.layer(layer)
            slices.append((part, (keys_GSH[:, first_key:], values_GSH[:, first_key:])))
        return sliced_attention(queries_TQH, slices, 1.0)


def _seen_by(segment: Segment, is_canvas: bool, window: int) -> list[_Seen]:
    """What the tokens of a segment see, in slices of queries.

    A canvas sees all of itself and, where there is a window, one token less than it of what was
    read before; a token that is read sees itself and those before it, within the window.
    Source: Transformers, models/diffusion_gemma/modeling_diffusion_gemma.py
    (create_diffusion_decoder_attention_mask, create_masks_for_generate) and cache_utils.py
    (DynamicSlidingWindowLayer).
    """
    device, start = segment.kv.device, segment.kv.length + segment.offset
    end = start + segment.num_tokens
    slices = []
    for first in range(start, end, ATTENTION_SLICE):
        last = min(first + ATTENTION_SLICE, end)
        bounds = first - start, last - start
        if is_canvas:
            first_key = max(0, start - window + 1) if window else 0
            slices.append(_Seen(segment, first_key, QuerySlice(*bounds, end - first_key, None)))
            continue
        first_key = max(0, first - window + 1) if window else 0
        queries = torch.arange(first, last, device=device)[:, None]
        keys = torch.arange(first_key, last, device=device)[None, :]
        mask_TS = keys <= queries
        if window:
            mask_TS &= keys > queries - window
        slices.append(_Seen(segment, first_key, QuerySlice(*bounds, last - first_key, mask_TS)))
    return slices


class DiffusionGemma:
    """DiffusionGemma's forward over segments of several sequences.

    `probe`, where set, is shown intermediate tensors.
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
        self._embeddings = weights["decoder.embed_tokens.weight"]
        self._layers = [_Layer.of(config, weights, layer) for layer in range(config.num_layers)]
        self._final_norm = weights["decoder.norm.weight"]
        self._condition_norm = weights["decoder.self_conditioning.pre_norm.weight"]
        self._condition_mlp = _Mlp.of(weights, "decoder.self_conditioning")
        self._device = self._embeddings.device
        # Rounded to the model's dtype, as the reference rounds it.
        scale = torch.tensor(config.hidden_size**0.5)
        self._embedding_scale = scale.to(self._device, dtype)
        self._router_scale = config.hidden_size**-0.5
        self._cos_sin = {
            shape.window: _rotary_table(num_positions, shape, dtype, self._device)
            for shape in (config.sliding, config.whole)
        }

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def new_kv(self, num_positions: int) -> SequenceKv:
        shapes = [layer.shape for layer in self._layers]
        return SequenceKv(
            num_layers=self.config.num_layers,
            num_heads=[shape.num_kv_heads for shape in shapes],
            head_size=[shape.head_size for shape in shapes],
            capacity=num_positions,
            dtype=self._dtype,
            device=self._device,
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids.to(self._device), self._embeddings) * self._embedding_scale

    def condition(self, logits_TV: Tensor) -> Tensor:
        """What the next step is told of this one's prediction: the mean embedding of each position
        under its distribution, [T, D].

        Logits are rounded to the model's dtype first, as the reference keeps them.
        """
        num_rows = max(1, _CONDITION_SLICE // logits_TV.shape[-1])
        parts = []
        for logits in torch.split(logits_TV, num_rows):
            shares = logits.to(self._dtype).softmax(-1, dtype=torch.float32).to(self._dtype)
            parts.append(shares @ self._embeddings * self._embedding_scale)
        return torch.cat(parts)

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        config = self.config
        windows = {layer.shape.window for layer in self._layers}
        forward = _Forward(batch, windows, self._device)
        hidden_TD = self._inputs(forward)
        self._show("embed_out", hidden_TD)
        positions = batch.positions.to(self._device)
        turns = {
            window: tuple(table[positions] for table in self._cos_sin[window]) for window in windows
        }
        last = config.num_layers - 1
        for layer in range(last):
            queries_TQH = self._write_kv(layer, hidden_TD, turns, batch)
            hidden_TD = self._layer(layer, hidden_TD, queries_TQH, forward)
        queries_TQH = self._write_kv(last, hidden_TD, turns, batch)
        if not batch.wants_logits:
            return None
        if not batch.all_want_logits:
            hidden_TD, queries_TQH = batch.wanted(hidden_TD), batch.wanted(queries_TQH)
            batch = batch.wanted_part()
            forward = _Forward(batch, windows, self._device)
        hidden_TD = self._layer(last, hidden_TD, queries_TQH, forward)
        return self._logits(hidden_TD, batch.logit_tokens())

    def _inputs(self, forward: _Forward) -> Tensor:
        """Embeddings [T, D]; those of canvases with what the last step predicted of them."""
        hidden_TD, end = self.embed(forward.batch.token_ids), 0
        parts = []
        for segment, is_canvas in zip(forward.batch.segments, forward.canvases, strict=True):
            start, end = end, end + segment.num_tokens
            part = hidden_TD[start:end]
            if is_canvas:
                known = segment.condition
                if known is not None:
                    normed = self._norm(known.to(self._device), self._condition_norm)
                    part = part + self._condition_mlp(normed)
                part = self._norm(part, None)
            parts.append(part)
        return torch.cat(parts)

    def _logits(self, hidden_TD: Tensor, tokens_N: Tensor | None) -> Tensor:
        if tokens_N is not None:
            hidden_TD = hidden_TD[tokens_N.to(self._device)]
        hidden_ND = self._norm(hidden_TD, self._final_norm)
        self._show("final_norm_out", hidden_ND)
        logits_NV = head_logits(hidden_ND, self._embeddings)
        return logits_NV.div_(self.config.logit_cap).tanh_().mul_(self.config.logit_cap)

    def _write_kv(
        self,
        layer: int,
        hidden_TD: Tensor,
        turns: Mapping[int, tuple[Tensor, ...]],
        batch: ForwardBatch,
    ) -> Tensor:
        """Put this forward's keys and values behind each sequence; returns queries [T, Q, H]."""
        window = self._layers[layer].shape.window
        name = "project" if window else "project_whole"
        heads, values = self._run(layer, name, self._project, hidden_TD, *turns[window])
        write_kv(layer, heads[:, self.config.num_heads :], values, batch.segments)
        return heads[:, : self.config.num_heads]

    def _project(
        self, layer: int, hidden_TD: Tensor, cos_TR: Tensor, sin_TR: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, Q + G, H], normed and rotated, and values [T, G, H], normed."""
        weights, num_heads = self._layers[layer], self.config.num_heads
        shape = weights.shape
        normed_TD = self._norm(hidden_TD, weights.norms["input_layernorm"])
        fused = linear(normed_TD, weights.qkv).view(len(normed_TD), -1, shape.head_size)
        first_value = num_heads + (shape.num_kv_heads if shape.window else 0)
        values = self._norm(fused[:, first_value : first_value + shape.num_kv_heads], None)
        heads = self._norm(fused[:, : num_heads + shape.num_kv_heads], weights.head_norm)
        return rotate(heads, cos_TR, sin_TR), values

    def _layer(
        self, layer: int, hidden_TD: Tensor, queries_TQH: Tensor, forward: _Forward
    ) -> Tensor:
        """All of a layer behind the projections to queries, keys and values."""
        weights, batch = self._layers[layer], forward.batch
        window = weights.shape.window
        attended = forward.attend(layer, queries_TQH, window)
        name = "route" if window else "route_whole"
        hidden_TD, normed_TD, *routed = self._run(layer, name, self._route, attended, hidden_TD)
        routing = self._restrict(layer, Routing(*routed), batch)
        pending = self._experts.start(
            layer,
            normed_TD,
            routing.ids_TK,
            routing.shares_TK,
            batch.context,
            routing.scores_TE if self._experts.wants_gate_scores else None,
        )
        (shared_TD,) = self._run(layer, "shared", self._shared, hidden_TD)
        out_TD = self._experts.finish(pending, routing.weights_TK).to(normed_TD.dtype)
        (hidden_TD,) = self._run(
            layer, "end", self._end, hidden_TD, shared_TD, out_TD, forward.is_canvas
        )
        self._show(f"layers.{layer}.layer_out", hidden_TD)
        return hidden_TD

    def _route(self, layer: int, attended: Tensor, hidden_TD: Tensor) -> tuple[Tensor, ...]:
        """Hidden states with attention added, what experts read of them, and what the router makes
        of them: ids, shares and mixing weights [T, K], all scores [T, E]."""
        weights = self._layers[layer]
        attention_TD = linear(attended, weights.output)
        normed_TD = self._norm(attention_TD, weights.norms["post_attention_layernorm"])
        hidden_TD = hidden_TD + normed_TD
        routed_TD = self._norm(hidden_TD, None) * weights.router_scale * self._router_scale
        scores_TE = linear(routed_TD, weights.router).softmax(-1, dtype=torch.float32)
        ids_TK = scores_TE.topk(self.config.top_k, dim=-1).indices
        experts_TD = self._norm(hidden_TD, weights.norms["pre_feedforward_layernorm_2"])
        return hidden_TD, experts_TD, *self._routing(layer, ids_TK, scores_TE)

    def _routing(self, layer: int, ids_TK: Tensor, scores_TE: Tensor) -> Routing:
        shares_TK, _ = softmax_shares(scores_TE, ids_TK, is_normalised=True)
        weights_TK = shares_TK * self._layers[layer].expert_scale[ids_TK].float()
        return Routing(ids_TK, shares_TK, weights_TK, scores_TE)

    def _restrict(self, layer: int, routing: Routing, batch: ForwardBatch) -> Routing:
        """What tokens choose where a lossy rule limits them."""
        scores_TE = routing.scores_TE

        def choose(allowed_TE: Tensor) -> Routing:
            ids_TK = choose_within(scores_TE, allowed_TE, top_k=self.config.top_k)
            return self._routing(layer, ids_TK, scores_TE)

        return self._experts.restrict(layer, routing, scores_TE, batch.context, choose)

    def _shared(self, layer: int, hidden_TD: Tensor) -> tuple[Tensor]:
        """The MLP beside the experts, normed on either side."""
        weights = self._layers[layer]
        normed_TD = self._norm(hidden_TD, weights.norms["pre_feedforward_layernorm"])
        shared_TD = weights.mlp(normed_TD)
        return (self._norm(shared_TD, weights.norms["post_feedforward_layernorm_1"]),)

    def _end(
        self,
        layer: int,
        hidden_TD: Tensor,
        shared_TD: Tensor,
        experts_TD: Tensor,
        is_canvas: Tensor,
    ) -> tuple[Tensor]:
        """MLP and experts put together, added, and scaled as encoder or decoder scale."""
        weights = self._layers[layer]
        experts_TD = self._norm(experts_TD, weights.norms["post_feedforward_layernorm_2"])
        both_TD = self._norm(shared_TD + experts_TD, weights.norms["post_feedforward_layernorm"])
        scalar = torch.where(is_canvas, weights.decoder_scalar, weights.encoder_scalar)
        return ((hidden_TD + both_TD) * scalar,)

    def _norm(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        """x / √(mean(x²) + eps) · weight in fp32, rounded once; of the last dimension.

        Other families round before the weight, so that `layers.rms_norm` is not this.
        """
        wide = hidden.float()
        mean = wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps
        normed = wide * torch.pow(mean, -0.5)
        if weight is not None:
            normed = normed * weight.float()
        return normed.to(hidden.dtype)

    def _run(
        self, layer: int, name: str, piece: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """A part of a layer, through `run_piece` where nobody looks into it."""
        run = self.run_piece if self.probe is None else run_directly
        return run((layer, name), partial(piece, layer), *inputs)

    def _show(self, name: str, value: Tensor) -> None:
        if self.probe is not None:
            self.probe(name, value)


def _rotary_table(
    num_positions: int, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, H], computed in fp32 and cast; pairs that do not turn have 1, 0.

    Source: Transformers, modeling_rope_utils.py, proportional.
    """
    steps = torch.arange(0, 2 * shape.num_rotated, 2, dtype=torch.float32)
    frequency = torch.zeros(shape.head_size // 2)
    frequency[: shape.num_rotated] = 1.0 / (shape.rope_theta ** (steps / shape.head_size))
    frequency /= shape.rope_factor
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
