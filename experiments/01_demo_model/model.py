"""The demo model for training: LLaDA2.0's forward pass, with all experts of a layer stacked.

``forward`` serves training (autocast on fp32 weights) and evaluation (weights in fp32 or bf16);
``to_checkpoint`` and ``from_checkpoint`` translate to LLaDA2.0's tensor names. ``decode`` is block
diffusion with the prefix recomputed in every forward: slow, simple, and easy to compare with.

Shape suffixes: B batch, T tokens, N = B * T, H hidden, E experts, K top-k, F expert hidden (both
halves of gate and up together), C places per expert, D head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLACES_MULTIPLE = 32
MAX_PLACES_FACTOR = 2


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """The keys of the published config.json that shape the computation."""

    vocab_size: int = 640
    hidden_size: int = 128
    num_hidden_layers: int = 7
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    partial_rotary_factor: float = 0.5
    rope_theta: float = 1000.0
    intermediate_size: int = 384
    moe_intermediate_size: int = 32
    num_experts: int = 96
    num_experts_per_tok: int = 6
    n_group: int = 8
    topk_group: int = 4
    num_shared_experts: int = 1
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6

    def to_json(self, *, mask_id: int, eos_id: int) -> dict[str, Any]:
        """config.json as released checkpoints have it, plus the special token ids."""
        return {
            "architectures": ["LLaDA2MoeModelLM"],
            "model_type": "llada2_moe",
            **asdict(self),
            "rotary_dim": int(self.head_dim * self.partial_rotary_factor),
            "rope_scaling": None,
            "use_qk_norm": True,
            "use_qkv_bias": False,
            "use_bias": False,
            "hidden_act": "silu",
            "score_function": "sigmoid",
            "router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "max_position_embeddings": 1024,
            "sliding_window": None,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "embedding_dropout": 0.0,
            "output_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "mask_token_id": mask_id,
            "eos_token_id": eos_id,
            "pad_token_id": eos_id,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DemoConfig:
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(dtype) * weight.to(dtype)


def prepare_heads(
    heads_BTAD: Tensor, weight_AD: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Normalise query and key heads, rotate their first dims (half-split), head axis first."""
    size = 2 * cos.shape[-1]
    heads = rms_norm(heads_BTAD, weight_AD, eps, heads_BTAD.dtype)
    first, second = heads[..., : size // 2], heads[..., size // 2 : size]
    rotated = [first * cos - second * sin, second * cos + first * sin, heads[..., size:]]
    return torch.cat(rotated, dim=-1).transpose(1, 2).contiguous()


def activate(both_EFC: Tensor, weight_E1C: Tensor) -> Tensor:
    gate, up = both_EFC.chunk(2, dim=1)
    return F.silu(gate) * up * weight_E1C


def activate_backward(
    grad_EFC: Tensor, both_EFC: Tensor, weight_E1C: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``activate`` for the gate and up halves and for the weights."""
    gate, up = both_EFC.chunk(2, dim=1)
    grad_both = torch.empty_like(both_EFC)
    grad_gate, grad_up = grad_both.chunk(2, dim=1)
    grad_activated = grad_EFC * F.silu(gate)
    torch.mul(grad_activated, weight_E1C, out=grad_up)
    grad_weight = grad_activated.mul_(up).sum(1).float()
    torch.ops.aten.silu_backward(grad_EFC * up * weight_E1C, gate, grad_input=grad_gate)
    return grad_both, grad_weight


def rotary_tables(
    positions: Tensor, config: DemoConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of half the rotated dims (the other half is equal), one row a position."""
    size = int(config.head_dim * config.partial_rotary_factor)
    inverse = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = positions[..., None, None].float() * inverse
    return angles.cos().to(dtype), angles.sin().to(dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, initial: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), initial))
        self.eps = eps


class Attention(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        rows = (self.num_heads + 2 * self.num_kv) * self.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=False)
        self.dense = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps, initial=1.5)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps, initial=1.5)

    def forward(self, x_BTH: Tensor, tables: tuple[Tensor, Tensor], bias_BTT: Tensor) -> Tensor:
        num_batch, num_tokens, _ = x_BTH.shape
        fused = self.query_key_value(x_BTH).view(num_batch, num_tokens, -1, self.head_dim)
        num_both = self.num_heads + self.num_kv
        weight_AD = torch.cat(
            [
                (self.query_layernorm.weight * self.head_dim**-0.5).expand(self.num_heads, -1),
                self.key_layernorm.weight.expand(self.num_kv, -1),
            ]
        )
        both = prepare_heads(fused[:, :, :num_both], weight_AD, self.eps, *tables)
        query, key = both.split([self.num_heads, self.num_kv], dim=1)
        value = fused[:, :, num_both:].transpose(1, 2)
        # Query heads that share a key head are stacked along the token axis of one product.
        repeat = self.num_heads // self.num_kv
        query = query.reshape(num_batch * self.num_kv, repeat * num_tokens, self.head_dim)
        key = key.reshape(num_batch * self.num_kv, num_tokens, self.head_dim)
        value = value.reshape(num_batch * self.num_kv, num_tokens, self.head_dim)
        scores = torch.bmm(query, key.transpose(1, 2))
        scores = scores.view(num_batch, self.num_heads, num_tokens, num_tokens)
        weights = torch.softmax(scores.add_(bias_BTT[:, None]), dim=-1)
        mixed = torch.bmm(weights.view(-1, repeat * num_tokens, num_tokens), value)
        mixed = mixed.view(num_batch, self.num_heads, num_tokens, self.head_dim).transpose(1, 2)
        return self.dense(mixed.reshape(num_batch, num_tokens, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class StackedExperts(torch.autograd.Function):
    """All experts of a layer as padded batched products in bf16, with a written-out backward.

    Unused places hold token 0 with weight 0, so they add nothing to any result or gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        weight_NK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        place_NK: Tensor,
        token_EC: Tensor,
    ) -> Tensor:
        num_experts, num_places = token_EC.shape
        gate_up16, down16 = gate_up.bfloat16(), down.bfloat16()
        x_ECH = _gather_places(x_NH, token_EC)
        # One extra place takes what does not fit.
        weight_E1C = x_NH.new_zeros(num_experts * num_places + 1, dtype=torch.bfloat16)
        weight_E1C[place_NK.reshape(-1)] = weight_NK.reshape(-1).bfloat16()
        weight_E1C = weight_E1C[:-1].view(num_experts, 1, num_places)
        both_EFC = torch.bmm(gate_up16, x_ECH.transpose(1, 2))
        hidden_EFC = activate(both_EFC, weight_E1C)
        ctx.save_for_backward(
            x_ECH, both_EFC, hidden_EFC, weight_E1C, gate_up16, down16, place_NK, token_EC
        )
        return _sum_places(hidden_EFC.transpose(1, 2), down16.transpose(1, 2), place_NK)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        x_ECH, both_EFC, hidden_EFC, weight_E1C, gate_up16, down16, place_NK, token_EC = (
            ctx.saved_tensors
        )
        grad_ECH = _gather_places(grad_NH, token_EC)
        grad_down = torch.bmm(hidden_EFC, grad_ECH).transpose(1, 2)
        grad_hidden = torch.bmm(down16.transpose(1, 2), grad_ECH.transpose(1, 2))
        grad_both, grad_weight = activate_backward(grad_hidden, both_EFC, weight_E1C)
        grad_weight = grad_weight.view(-1)
        grad_weight = torch.cat([grad_weight, grad_weight.new_zeros(1)])[place_NK]
        grad_gate_up = torch.bmm(grad_both, x_ECH)
        grad_x = _sum_places(grad_both.transpose(1, 2), gate_up16, place_NK)
        return grad_x, grad_weight, grad_gate_up.float(), grad_down.float(), None, None


def _gather_places(rows_NH: Tensor, token_EC: Tensor) -> Tensor:
    return rows_NH.bfloat16().index_select(0, token_EC.view(-1)).view(*token_EC.shape, -1)


def _sum_places(left: Tensor, right: Tensor, place_NK: Tensor) -> Tensor:
    """Multiply, then sum each token's places; the place past the end counts as zero."""
    num_experts, num_places, width = left.shape[0], left.shape[1], right.shape[2]
    rows = left.new_empty(num_experts * num_places + 1, width)
    rows[-1] = 0
    torch.bmm(left, right, out=rows[:-1].view(num_experts, num_places, width))
    return F.embedding_bag(place_NK, rows, mode="sum")


def place_tokens(expert_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give each (token, choice) a place in its expert's row.

    Shapes: place_NK (index into the E * C places, E * C when it does not fit), token_EC, load_E.
    """
    num_tokens, top_k = expert_NK.shape
    flat = expert_NK.reshape(-1)
    load = torch.bincount(flat, minlength=num_experts)
    limit = max(PLACES_MULTIPLE, MAX_PLACES_FACTOR * num_tokens * top_k // num_experts)
    num_places = min(int(load.max()), limit)
    num_places = -(-num_places // PLACES_MULTIPLE) * PLACES_MULTIPLE
    order = torch.argsort(flat, stable=True)
    ordered = flat[order]
    rank = torch.arange(flat.numel()) - (load.cumsum(0) - load)[ordered]
    overflow = num_experts * num_places
    place = torch.where(rank < num_places, ordered * num_places + rank, overflow)
    token = torch.zeros(overflow + 1, dtype=torch.long)
    token[place] = order // top_k
    place_NK = torch.empty_like(flat)
    place_NK[order] = place
    return place_NK.view(num_tokens, top_k), token[:-1].view(num_experts, num_places), load


class SparseMoE(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        experts, hidden = config.num_experts, config.hidden_size
        width = config.moe_intermediate_size
        self.gate = nn.Parameter(torch.randn(experts, hidden) * 0.05)
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * width, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * width**-0.5)
        self.shared_experts = MLP(hidden, width * config.num_shared_experts)
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.imbalance = torch.zeros(())

    def route(self, x_NH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Group-limited top-k on biased scores, weights from the un-biased ones; all scores."""
        config = self.config
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(x_NH.float() @ self.gate.float().T)
        with torch.no_grad():
            biased = scores + self.expert_bias
            groups = biased.view(-1, config.n_group, config.num_experts // config.n_group)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
            kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
            biased = groups.masked_fill(~kept[..., None], float("-inf")).view_as(biased)
            chosen = biased.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * config.routed_scaling_factor, scores

    def forward(self, x_BTH: Tensor) -> Tensor:
        x_NH = x_BTH.reshape(-1, x_BTH.shape[-1])
        chosen, weights, scores = self.route(x_NH)
        if torch.is_grad_enabled():
            place, token, load = place_tokens(chosen, self.config.num_experts)
            self.load += load
            shares = (scores / scores.sum(-1, keepdim=True)).mean(0)
            self.imbalance = len(load) * (load / load.sum() * shares).sum()
            routed = StackedExperts.apply(x_NH, weights, self.gate_up, self.down, place, token)
        else:
            routed = self._run_each(x_NH, chosen, weights)
        return routed.view_as(x_BTH).to(x_BTH.dtype) + self.shared_experts(x_BTH)

    def _run_each(self, x_NH: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The rule as written: expert outputs in the model dtype, the sum over experts in fp32."""
        out = torch.zeros(x_NH.shape, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, choice = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x_NH[rows], self.gate_up[expert]).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, rows, result.float() * weights[rows, choice, None])
        return out


class Layer(nn.Module):
    def __init__(self, config: DemoConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        is_dense = index < config.first_k_dense_replace
        self.mlp: MLP | SparseMoE = (
            MLP(config.hidden_size, config.intermediate_size) if is_dense else SparseMoE(config)
        )

    def forward(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        bias: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        norm = self.input_layernorm
        normed = rms_norm(x, norm.weight, norm.eps, dtype)
        x = x + self.attention(normed, tables, bias)
        norm = self.post_attention_layernorm
        normed = rms_norm(x, norm.weight, norm.eps, dtype)
        return x + self.mlp(normed)


class DemoModel(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.word_embeddings.weight, std=0.5)
        nn.init.zeros_(self.lm_head.weight)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.lm_head:
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if isinstance(module, Attention):
                nn.init.normal_(module.dense.weight, std=0.02)
            if isinstance(module, MLP):
                nn.init.normal_(module.down_proj.weight, std=0.02)
            if isinstance(module, SparseMoE):
                nn.init.normal_(module.down, std=0.02)
                nn.init.normal_(module.shared_experts.down_proj.weight, std=0.02)

    def forward(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        bias_BTT: Tensor,
        keep: Tensor | None = None,
    ) -> Tensor:
        """fp32 logits, of all positions or of the flat positions in ``keep``."""
        hidden = self.word_embeddings(ids_BT)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else hidden.dtype
        tables, bias = rotary_tables(positions_BT, self.config, dtype), bias_BTT.to(dtype)
        for layer in self.layers:
            hidden = layer(hidden, tables, bias, dtype)
        if keep is not None:
            hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, keep)
        return self.lm_head(rms_norm(hidden, self.norm.weight, self.norm.eps, dtype)).float()


def attention_bias(allowed: Tensor) -> Tensor:
    """0 where attention is allowed, a large negative number elsewhere (fp32)."""
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -1e9)


def to_checkpoint(model: DemoModel) -> dict[str, Tensor]:
    """All tensors under LLaDA2.0's names: bf16, and expert_bias in fp32."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        full = name if name.startswith("lm_head") else f"model.{name}"
        if name.endswith("expert_bias"):
            tensors[full.replace("mlp.expert_bias", "mlp.gate.expert_bias")] = value.float().clone()
        elif name.endswith("mlp.gate"):
            tensors[f"{full}.weight"] = value.bfloat16()
        elif name.endswith("mlp.gate_up"):
            base = full.removesuffix("gate_up")
            for expert, both in enumerate(value.bfloat16()):
                gate, up = both.chunk(2)
                tensors[f"{base}experts.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{base}experts.{expert}.up_proj.weight"] = up.clone()
        elif name.endswith("mlp.down"):
            base = full.removesuffix("down")
            for expert, down in enumerate(value.bfloat16()):
                tensors[f"{base}experts.{expert}.down_proj.weight"] = down.clone()
        else:
            tensors[full] = value.bfloat16()
    return tensors


def from_checkpoint(
    config: DemoConfig, tensors: dict[str, Tensor], dtype: torch.dtype
) -> DemoModel:
    """The evaluation model; every tensor in ``dtype`` but expert_bias, which stays fp32."""
    model = DemoModel(config)
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        full = name if name.startswith("lm_head") else f"model.{name}"
        base = full.rpartition(".")[0] + ".experts."
        experts = range(config.num_experts)
        if name.endswith("expert_bias"):
            state[name] = tensors[full.replace("mlp.expert_bias", "mlp.gate.expert_bias")]
        elif name.endswith("mlp.gate"):
            state[name] = tensors[f"{full}.weight"]
        elif name.endswith("mlp.gate_up"):
            parts = ("gate_proj", "up_proj")
            state[name] = torch.stack(
                [torch.cat([tensors[f"{base}{e}.{p}.weight"] for p in parts]) for e in experts]
            )
        elif name.endswith("mlp.down"):
            state[name] = torch.stack([tensors[f"{base}{e}.down_proj.weight"] for e in experts])
        else:
            state[name] = tensors[full]
    model.load_state_dict(state)
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer: ids up to and including eos, and the forwards an engine would need for it."""

    ids: list[int]
    num_forwards: int


@torch.no_grad()
def decode(
    model: Callable[[Tensor, Tensor, Tensor], Tensor],
    prompts: list[list[int]],
    *,
    mask_id: int,
    eos_id: int,
    block_length: int = 16,
    threshold: float = 0.95,
    max_new_tokens: int = 96,
) -> list[Decoded]:
    """Greedy block diffusion for several prompts side by side.

    Rule: fill the positions whose confidence is above ``threshold``, at least the best one. A
    forward is counted for each denoising pass, and one more for each finished block but the last.
    """
    num_blocks = [-(-(len(p) + max_new_tokens) // block_length) for p in prompts]
    width = max(num_blocks) * block_length
    ids = torch.full((len(prompts), width), mask_id)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    block = [len(p) // block_length for p in prompts]
    num_forwards, active = [0] * len(prompts), set(range(len(prompts)))
    while active:
        rows = sorted(active)
        reach = (max(block[r] for r in rows) + 1) * block_length
        positions = torch.arange(reach)
        allowed = positions[None, :] // block_length <= positions[:, None] // block_length
        bias = attention_bias(allowed)[None].expand(len(rows), -1, -1)
        logits = model(ids[rows, :reach], positions.expand(len(rows), -1), bias)
        logits[..., mask_id] = float("-inf")
        confidence, best = logits.softmax(-1).max(-1)
        for index, row in enumerate(rows):
            start = block[row] * block_length
            here = slice(start, start + block_length)
            num_forwards[row] += 1
            masked = ids[row, here] == mask_id
            sure = torch.where(masked, confidence[index, here], -1.0)
            take = sure > threshold
            take[sure.argmax()] = True
            ids[row, here] = torch.where(take & masked, best[index, here], ids[row, here])
            if (ids[row, here] == mask_id).any():
                continue
            done = (ids[row, len(prompts[row]) : start + block_length] == eos_id).any()
            block[row] += 1
            if bool(done) or block[row] >= num_blocks[row]:
                active.discard(row)
            else:
                num_forwards[row] += 1
    return [
        Decoded(_until_eos(ids[row, len(p) :].tolist(), eos_id), num_forwards[row])
        for row, p in enumerate(prompts)
    ]


def _until_eos(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id) + 1] if eos_id in ids else ids
