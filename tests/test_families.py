"""SDAR-MoE, RND1 and LLaDA-MoE: forwards against golden numbers, configs, names, shards."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoints import write_checkpoint
from fakes import LIVE_POLICIES
from safetensors.torch import load_file, save_file
from torch import Tensor

from oled_moe.config import EngineConfig
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.engine import Engine
from oled_moe.errors import CheckpointError
from oled_moe.layers import ForwardBatch, Segment, softmax_router
from oled_moe.models import FAMILIES, find_family, llada, rnd1, sdar_moe
from oled_moe.store import ExpertPart
from oled_moe.types import (
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    LayerDemand,
    LayerPlan,
    Phase,
)

GOLDEN = Path(__file__).parent / "golden"
FORWARDS = [
    ("sdar_moe", "f1"),
    ("sdar_moe", "f2"),
    ("rnd1", "f1"),
    ("llada_moe", "f1"),
    ("llada_moe", "f2"),
]
MODELS = ["sdar_moe", "rnd1", "llada_moe"]
MODULES: dict[str, Any] = {"sdar_moe": sdar_moe, "rnd1": rnd1, "llada_moe": llada}


def values_of(model: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDEN / model / "config.json").read_text())
    return values | changes


def config_of(model: str, **changes: Any) -> Any:
    return MODULES[model].Config.from_hf(values_of(model, **changes))


def open_engine(path: Path, **settings: Any) -> Engine:
    is_emulated = settings.get("device") == "emulated"
    profile = DEFAULT_EMULATED_PROFILE if is_emulated else DEFAULT_PROFILE
    return Engine(path, EngineConfig(**{"device": "cpu", "hardware": profile} | settings))


def golden_forward(model: str, name: str) -> tuple[dict[str, Tensor], Tensor, int]:
    """What the reference computed, the ids, and the block length: all of it where it is full."""
    expected = load_file(GOLDEN / model / f"forward_{name}.safetensors")
    settings = json.loads((GOLDEN / model / "forward.json").read_text())[name]
    ids = expected["input_ids"][0].long()
    return expected, ids, settings.get("block_length", len(ids))


def forward(engine: Engine, ids: Tensor, block_length: int, num_cached: int = 0) -> Any:
    """Logits of the tokens behind the first `num_cached`, which are put into K/V first, what was
    shown meanwhile, and the K/V."""
    cache = engine.model.new_kv(len(ids))
    shown: dict[str, Tensor] = {}
    engine.model.probe = shown.__setitem__
    logits = None
    for start, end in ((0, num_cached), (num_cached, len(ids))):
        count = end - start
        if not count:
            continue
        is_last = end == len(ids)
        phase = Phase.DENOISE if is_last else Phase.PREFILL
        context = ForwardContext(
            0,
            block_length,
            (ForwardRow(0, 0, 0, phase, count),),
            np.ones(count, dtype=np.float32),
            np.ones(count, dtype=np.uint8),
            np.arange(start, end),
            ids[start:end].numpy(),
            engine.model.embed(ids[start:end]).float().numpy(),
        )
        segments = (Segment(cache, count, is_last),)
        engine.experts.start_forward(context)
        logits = engine.model.forward(
            ForwardBatch(ids[start:end], torch.arange(start, end), segments, context)
        )
        engine.experts.end_forward(ForwardOutcome.without_logits(context))
        cache.advance(count)
    assert logits is not None
    return logits, shown, cache


# --- forwards against the reference


@pytest.mark.parametrize("capacity", [16, 8, 1.6])
@pytest.mark.parametrize(("model", "name"), FORWARDS)
def test_every_stage_of_a_forward(model: str, name: str, capacity: float) -> None:
    expected, ids, block_length = golden_forward(model, name)
    with open_engine(GOLDEN / model, experts_per_layer=capacity) as engine:
        logits, shown, cache = forward(engine, ids, block_length)
    torch.testing.assert_close(logits, expected["logits"], atol=4e-5, rtol=0)
    stages = ("input_layernorm_out", "attention_out", "mlp_input", "mlp_out", "layer_out")
    names = [f"layers.{layer}.{stage}" for layer in range(3) for stage in stages]
    for key in ("embed_out", "final_norm_out", *names):
        torch.testing.assert_close(shown[key], expected[key], atol=4e-5, rtol=0, msg=key)
    for layer in range(3):
        key = f"layers.{layer}.topk_idx"
        assert torch.equal(shown[key].int(), expected[key])
        key = f"layers.{layer}.topk_weight"
        torch.testing.assert_close(shown[key], expected[key], atol=1e-5, rtol=0)
        if model == "sdar_moe":
            keys, values = cache.written(layer, 0)
            wanted = expected[f"layers.{layer}.k_rope"]
            torch.testing.assert_close(keys, wanted, atol=4e-5, rtol=0)
            torch.testing.assert_close(values, expected[f"layers.{layer}.v"], atol=4e-5, rtol=0)


@pytest.mark.parametrize("name", ["f1", "f2"])
def test_last_block_against_the_prefix(name: str) -> None:
    """SDAR's finished blocks from K/V: the same logits for the last block."""
    expected, ids, length = golden_forward("sdar_moe", name)
    with open_engine(GOLDEN / "sdar_moe", experts_per_layer=2) as engine:
        logits, _, _ = forward(engine, ids, length, len(ids) - length)
    torch.testing.assert_close(logits, expected["logits"][-length:], atol=4e-5, rtol=0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("wants", [(True, True), (False, True), (True, False), (False, False)])
def test_sequences_in_one_forward_do_not_touch(model: str, wants: tuple[bool, bool]) -> None:
    first, second = torch.arange(1, 9), torch.arange(40, 56)

    def run(engine: Engine, parts: list[tuple[Tensor, bool]]) -> tuple[Tensor | None, list[Any]]:
        caches = [engine.model.new_kv(16) for _ in parts]
        size = sum(len(ids) for ids, _ in parts)
        rows = tuple(ForwardRow(i, 0, 0, Phase.DENOISE, len(p[0])) for i, p in enumerate(parts))
        context = ForwardContext(0, 16, rows, np.ones(size, np.float32), np.ones(size, np.uint8))
        segments = tuple(
            Segment(cache, len(ids), wants_logits)
            for cache, (ids, wants_logits) in zip(caches, parts, strict=True)
        )
        ids = torch.cat([ids for ids, _ in parts])
        positions = torch.cat([torch.arange(len(ids)) for ids, _ in parts])
        logits = engine.model.forward(ForwardBatch(ids, positions, segments, context))
        return logits, [
            cache.written(2, segment.num_tokens)
            for cache, segment in zip(caches, segments, strict=True)
        ]

    with open_engine(GOLDEN / model, experts_per_layer=16) as engine:
        parts = [(first, wants[0]), (second, wants[1])]
        joined, joined_kv = run(engine, parts)
        apart = [run(engine, [part]) for part in parts]
    expected = [logits for logits, _ in apart if logits is not None]
    assert len(expected) == sum(wants)
    if expected:
        assert joined is not None
        torch.testing.assert_close(joined, torch.cat(expected), atol=1e-4, rtol=0)
    else:
        assert joined is None
    for (_, (single,)), together in zip(apart, joined_kv, strict=True):
        torch.testing.assert_close(single, together, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_the_emulated_device_with_cpu_experts(model: str) -> None:
    expected, ids, block_length = golden_forward(model, "f1")
    with open_engine(GOLDEN / model, device="emulated", experts_per_layer=3) as engine:
        logits, _, _ = forward(engine, ids, block_length)
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_stays_close(model: str) -> None:
    """These weights amplify rounding (README of the sets): close at first, on average later."""
    expected, ids, block_length = golden_forward(model, "f1")
    with open_engine(GOLDEN / model, experts_per_layer=4, dtype="bfloat16") as engine:
        logits, shown, _ = forward(engine, ids, block_length)
    assert logits.dtype == torch.float32
    for key in ("layers.0.mlp_input", "layers.0.mlp_out", "layers.2.layer_out"):
        assert shown[key].dtype == torch.bfloat16
    first = expected["layers.0.mlp_input"]
    assert (shown["layers.0.mlp_input"].float() - first).abs().mean() < 0.02
    assert (logits - expected["logits"]).abs().mean() < 0.25 * expected["logits"].std()
    weights = shown["layers.0.topk_weight"]
    assert weights.dtype == torch.float32
    # SDAR and LLaDA-MoE round the mixing weights to the model's dtype, RND1 does not.
    assert torch.equal(weights, weights.bfloat16().float()) == (model != "rnd1")


@pytest.mark.parametrize("model", MODELS)
def test_policies_see_shares_that_add_up_to_one(model: str) -> None:
    expected, ids, block_length = golden_forward(model, "f1")
    demands: list[LayerDemand] = []

    def watch(demand: LayerDemand, plan: LayerPlan) -> None:
        demands.append(demand)

    with open_engine(GOLDEN / model, experts_per_layer=4) as engine:
        engine.experts.observers.append(watch)
        forward(engine, ids, block_length)
    assert [demand.layer for demand in demands] == [0, 1, 2]
    for demand in demands:
        np.testing.assert_allclose(demand.gate_weights.sum(-1), 1, atol=1e-5)
        weights = expected[f"layers.{demand.layer}.topk_weight"]
        shares = weights / weights.sum(-1, keepdim=True)
        np.testing.assert_allclose(demand.gate_weights, shares.numpy(), atol=1e-5)
    is_whole = expected["layers.0.topk_weight"].sum(-1) > 0.9999
    assert is_whole.all() == (model != "llada_moe")


@pytest.mark.parametrize("policy", sorted(LIVE_POLICIES))
@pytest.mark.parametrize("model", MODELS)
def test_no_policy_changes_what_comes_out(model: str, policy: str) -> None:
    expected, ids, block_length = golden_forward(model, "f1")
    with open_engine(GOLDEN / model, policy=policy, experts_per_layer=4) as engine:
        for _ in range(2):
            logits, _, _ = forward(engine, ids, block_length)
            torch.testing.assert_close(logits, expected["logits"], atol=4e-5, rtol=0)


# --- the router


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_the_softmax_router(dtype: torch.dtype, is_normalised: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 16, generator=generator).to(dtype)
    weight = torch.randn(8, 16, generator=generator).to(dtype)
    ids, shares, weights, scores = softmax_router(
        hidden, weight, top_k=3, is_normalised=is_normalised
    )
    logits = F.linear(hidden, weight)
    assert logits.dtype == dtype
    expected = torch.softmax(logits.double(), dim=-1)
    # One rounding of a logit in bfloat16 may go the other way.
    atol = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(scores.double(), expected, atol=atol, rtol=0)
    assert scores.dtype == weights.dtype == torch.float32
    assert torch.equal(scores.gather(1, ids), scores.sort(-1, descending=True).values[:, :3])
    chosen = scores.gather(1, ids)
    torch.testing.assert_close(shares, chosen / chosen.sum(-1, keepdim=True))
    torch.testing.assert_close(weights, shares if is_normalised else chosen)


def test_the_routers_product_is_rounded_to_the_models_dtype() -> None:
    hidden, weight = torch.ones(1, 2), torch.tensor([[256.0, 0.0], [256.0, 1.0]])
    # 257 has no place in bfloat16: it becomes 256.
    for dtype, expected in ((torch.bfloat16, [0.5, 0.5]), (torch.float32, [0.26894, 0.73106])):
        _, _, _, scores = softmax_router(
            hidden.to(dtype), weight.to(dtype), top_k=1, is_normalised=True
        )
        torch.testing.assert_close(scores, torch.tensor([expected]), atol=1e-5, rtol=0)


def test_a_routers_bias_is_part_of_the_weights() -> None:
    hidden, weight = torch.zeros(1, 4), torch.zeros(4, 4)
    bias = torch.tensor([0.0, 0.5, 0.0, 0.25])
    ids, shares, weights, _ = softmax_router(hidden, weight, bias, top_k=2, is_normalised=False)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.75, 0.5]]))
    torch.testing.assert_close(shares, torch.tensor([[0.6, 0.4]]))


# --- options of no golden set, against a plain dense forward


def plain_forward(values: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [T, V] under full attention, written from models.md 2 without any of the engine."""
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    eps, top_k = values["rms_norm_eps"], values["num_experts_per_tok"]

    def norm(x: Tensor, name: str) -> Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return scaled * tensors[name] if name in tensors else x

    def project(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def mlp(x: Tensor, name: str) -> Tensor:
        inner = F.silu(project(x, f"{name}.gate_proj")) * project(x, f"{name}.up_proj")
        return project(inner, f"{name}.down_proj")

    def rotate(x: Tensor) -> Tensor:
        size = int(x.shape[-1] * values.get("partial_rotary_factor", 1.0))
        steps = values["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        angles = torch.outer(torch.arange(len(ids)).double(), steps)
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def experts(x: Tensor, name: str) -> Tensor:
        scores = torch.softmax(project(x, f"{name}.gate"), -1)
        scores = scores + tensors.get(f"{name}.expert_bias", 0)
        chosen, picked = scores.topk(top_k, -1)
        if values.get("norm_topk_prob") and values["model_type"] != "llada":
            chosen = chosen / chosen.sum(-1, keepdim=True)
        rows = [
            sum(g * mlp(x[t], f"{name}.experts.{e}") for g, e in zip(gates, row, strict=True))
            for t, (gates, row) in enumerate(zip(chosen, picked.tolist(), strict=True))
        ]
        return torch.stack(rows)

    x = tensors["model.embed_tokens.weight"][ids]
    for layer in range(values["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        attention, normed = f"{at}.self_attn", norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (
            project(normed, f"{attention}.{part}_proj").view(len(ids), count, -1)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q = rotate(norm(q, f"{attention}.q_norm.weight"))
        k = rotate(norm(k, f"{attention}.k_norm.weight"))
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        mass = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5, -1)
        x = x + project(torch.einsum("hqk,khd->qhd", mass, v).flatten(1), f"{attention}.o_proj")
        normed = norm(x, f"{at}.post_attention_layernorm.weight")
        has_experts = f"{at}.mlp.gate.weight" in tensors
        out = experts(normed, f"{at}.mlp") if has_experts else mlp(normed, f"{at}.mlp")
        if f"{at}.shared_expert.up_proj.weight" in tensors:
            out = out + mlp(normed, f"{at}.shared_expert")
        x = x + out
    x = norm(x, "model.norm.weight")
    return x @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T


def random_tensors(model: str, values: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor of a config, with random values that neither vanish nor explode."""
    module = MODULES[model]
    config = module.Config.from_hf(values)
    generator = torch.Generator().manual_seed(9)
    shapes = dict(module.parameter_shapes(config))
    size = (config.moe_intermediate_size, config.hidden_size)
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            shapes[f"{at}.gate_proj.weight"] = shapes[f"{at}.up_proj.weight"] = size
            shapes[f"{at}.down_proj.weight"] = size[::-1]
    return {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if len(shape) == 2
        else 1 + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("sdar_moe", {}),
        ("sdar_moe", {"norm_topk_prob": False, "attention_bias": True}),
        ("sdar_moe", {"mlp_only_layers": [0, 2], "tie_word_embeddings": True}),
        ("sdar_moe", {"decoder_sparse_step": 2, "num_experts_per_tok": 1, "head_dim": 10}),
        ("rnd1", {"num_key_value_heads": 1}),
        ("llada_moe", {"norm_topk_prob": True, "shared_expert_intermediate_size": 24}),
        ("llada_moe", {"moe_layer_freq": [0, 1, 1], "partial_rotary_factor": 0.5}),
        ("llada_moe", {"moe_router_enable_expert_bias": True, "qk_layernorm": False}),
        ("llada_moe", {"num_key_value_heads": 2, "attention_bias": True}),
    ],
    ids=str,
)
def test_options_against_a_plain_forward(
    model: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    values = values_of(model, vocab_size=40, mask_token_id=37, eos_token_id=38, **changes)
    values["pad_token_id"] = 39
    tensors = random_tensors(model, values)
    write_checkpoint(tmp_path, tensors, values)
    ids = torch.randint(0, 37, (12,), generator=torch.Generator().manual_seed(2))
    with open_engine(tmp_path, experts_per_layer=3) as engine:
        logits, _, _ = forward(engine, ids, len(ids))
    torch.testing.assert_close(logits, plain_forward(values, tensors, ids), atol=1e-4, rtol=0)


# --- shards


@pytest.mark.parametrize("model", MODELS)
def test_one_file_a_layer(model: str, tmp_path: Path) -> None:
    """The layout of SDAR's release (models.md 3.2), through the index."""
    shards: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(GOLDEN / model / "model.safetensors").items():
        parts = name.split(".")
        file = f"layer-{parts[2]}-ep-0-of-1" if parts[1] == "layers" else "others"
        shards.setdefault(f"{file}.safetensors", {})[name] = tensor
    for file, shard in shards.items():
        save_file(shard, tmp_path / file, {"format": "pt"})
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(values_of(model)))
    assert sorted(shards) == [
        *(f"layer-{layer}-ep-0-of-1.safetensors" for layer in range(3)),
        "others.safetensors",
    ]
    expected, ids, block_length = golden_forward(model, "f1")
    with open_engine(tmp_path, experts_per_layer=2) as engine:
        logits, _, _ = forward(engine, ids, block_length)
    torch.testing.assert_close(logits, expected["logits"], atol=4e-5, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_merged_experts(model: str, tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / model / "model.safetensors")
    write_checkpoint(tmp_path, tensors, values_of(model), convention="merged")
    expected, ids, block_length = golden_forward(model, "f1")
    with open_engine(tmp_path, experts_per_layer=2) as engine:
        logits, _, _ = forward(engine, ids, block_length)
    torch.testing.assert_close(logits, expected["logits"], atol=4e-5, rtol=0)


# --- names


@pytest.mark.parametrize("model", MODELS)
def test_every_golden_tensor_has_its_place(model: str) -> None:
    config = config_of(model)
    weight_map, shapes = MODULES[model].build_weight_map(config), {}
    parts = set()
    for name, tensor in load_file(GOLDEN / model / "model.safetensors").items():
        target = weight_map(name)
        if isinstance(target, ExpertPart):
            parts.add(target)
        else:
            shapes[target] = tuple(tensor.shape)
    assert shapes == MODULES[model].parameter_shapes(config)
    assert parts == {
        ExpertPart(layer, expert, matrix)
        for layer in range(3)
        for expert in range(16)
        for matrix in ("gate", "up", "down")
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.16.up_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.bias",
        "model.layers.1.mlp.experts.-1.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.self_attn.q_proj.bias",
        "model.layers.2.self_attn.query_key_value.weight",
        "model.layers.0.mlp.gate.expert_bias",
    ],
)
def test_weights_that_config_json_denies(model: str, name: str) -> None:
    with pytest.raises(CheckpointError, match="does not provide for"):
        MODULES[model].build_weight_map(config_of(model))(name)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.experts.0.up_proj.weight",
        "model.layers.3.input_layernorm.weight",
        "model.word_embeddings.weight",
        "lm_head.bias",
        "",
    ],
)
def test_strangers_are_key_errors(model: str, name: str) -> None:
    with pytest.raises(KeyError):
        MODULES[model].build_weight_map(config_of(model))(name)


def test_experts_are_counted_among_layers_that_have_them() -> None:
    weight_map = sdar_moe.build_weight_map(config_of("sdar_moe", mlp_only_layers=[1]))
    name = "model.layers.{}.mlp.experts.5.down_proj.weight"
    assert weight_map(name.format(0)) == ExpertPart(0, 5, "down")
    assert weight_map(name.format(2)) == ExpertPart(1, 5, "down")
    assert weight_map("model.layers.1.mlp.down_proj.weight")
    with pytest.raises(CheckpointError, match="does not provide for"):
        weight_map(name.format(1))
    assert weight_map("model.layers.0.self_attn.rotary_emb.inv_freq") is None


def test_only_a_routers_bias_keeps_its_precision() -> None:
    assert not sdar_moe.kept_dtypes(config_of("sdar_moe"))
    assert not llada.kept_dtypes(config_of("llada_moe"))
    config = config_of("llada_moe", moe_router_enable_expert_bias=True)
    names = {f"model.layers.{layer}.mlp.expert_bias" for layer in range(3)}
    assert llada.kept_dtypes(config) == names <= set(llada.parameter_shapes(config))


# --- configs


@pytest.mark.parametrize("name", ["sdar_moe", "rnd1", "llada"])
def test_known_families(name: str) -> None:
    model = "llada_moe" if name == "llada" else name
    family = find_family({"model_type": name})
    assert FAMILIES[name] is family and family.config(values_of(model)) == config_of(model)


def test_released_configs() -> None:
    """The released sizes of models.md 1.2 and 1.4; RND1's class needs no config at all."""
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "rope_theta": 1000000,
        "norm_topk_prob": True,
    }
    assert num_parameters("sdar_moe", sizes) == 61_064_245_248 // 2
    assert num_parameters("rnd1", {}) == 61_064_245_248 // 2
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "expert_intermediate_size": 1024,
        "dense_intermediate_size": 8192,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rope_theta": 50000,
        "qk_layernorm": True,
        "vocab_size": 157184,
    }
    assert num_parameters("llada_moe", sizes) == 7_356_880_896


def num_parameters(model: str, values: dict[str, Any]) -> int:
    module = MODULES[model]
    config = module.Config.from_hf(values)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    dense = sum(math.prod(shape) for shape in module.parameter_shapes(config).values())
    return int(dense + config.num_moe_layers * config.num_experts * expert)


def test_what_norm_topk_prob_does() -> None:
    """Honoured by SDAR, whose class says false; forced by RND1; without effect on LLaDA-MoE."""
    values = values_of("sdar_moe")
    assert sdar_moe.Config.from_hf(values).is_normalised
    del values["norm_topk_prob"]
    assert not sdar_moe.Config.from_hf(values).is_normalised
    assert config_of("rnd1", norm_topk_prob=False).is_normalised
    assert config_of("llada_moe", norm_topk_prob=True) == config_of("llada_moe")


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"rope_theta": 10000.0},
        {"rms_norm_eps": 1e-5},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"sliding_window": 4096},
        {"use_sliding_window": True},
    ],
    ids=str,
)
def test_rnd1_forces_what_its_class_forces(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    (name,) = changes
    with caplog.at_level(logging.WARNING):
        assert config_of("rnd1") == config_of("rnd1", **{name: None})
        assert not caplog.messages
        assert config_of("rnd1", **changes) == config_of("rnd1")
    (message,) = caplog.messages
    assert message.startswith(f"config.json: {name} is ")


WHOLE = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts"]
WHOLE += ["num_experts_per_tok", "num_key_value_heads", "max_position_embeddings"]
OWN_WHOLE = {
    "sdar_moe": ["moe_intermediate_size", "head_dim", "decoder_sparse_step"],
    "rnd1": ["moe_intermediate_size", "head_dim"],
    "llada_moe": ["expert_intermediate_size"],
}
WHOLE_FIELDS = [(model, name) for model in MODELS for name in WHOLE + OWN_WHOLE[model]]
WRONG: list[Any] = ["4", "", [], [4], {}, True, math.nan, -1, 0, 1.5, 4.0, 2**40]


@pytest.mark.parametrize(("model", "name"), WHOLE_FIELDS)
def test_whole_fields(model: str, name: str) -> None:
    for value in WRONG:
        with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is .*: a whole"):
            config_of(model, **{name: value})


REAL_FIELDS = [
    ("sdar_moe", "rope_theta"),
    ("sdar_moe", "rms_norm_eps"),
    ("llada_moe", "rope_theta"),
    ("llada_moe", "rms_norm_eps"),
    ("llada_moe", "partial_rotary_factor"),
]


@pytest.mark.parametrize(("model", "name"), REAL_FIELDS)
def test_real_fields(model: str, name: str) -> None:
    for value in ["4", [], {}, True, math.nan, -1, 0, math.inf, 10**400]:
        with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is .*above 0"):
            config_of(model, **{name: value})


FLAG_FIELDS = [
    ("sdar_moe", "norm_topk_prob"),
    ("sdar_moe", "attention_bias"),
    ("sdar_moe", "tie_word_embeddings"),
    ("llada_moe", "qk_layernorm"),
    ("llada_moe", "attention_bias"),
    ("llada_moe", "moe_router_enable_expert_bias"),
    ("llada_moe", "tie_word_embeddings"),
]


@pytest.mark.parametrize(("model", "name"), FLAG_FIELDS)
def test_flag_fields(model: str, name: str) -> None:
    for value in ["true", 1, 0, [], {}]:
        with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is .*: true, false"):
            config_of(model, **{name: value})


@pytest.mark.parametrize("model", ["sdar_moe", "llada_moe"])
def test_fields_without_default(model: str) -> None:
    required = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    required += ["num_experts", "num_experts_per_tok"]
    own = {"sdar_moe": ["num_key_value_heads", "moe_intermediate_size"]}
    required += own.get(model, ["expert_intermediate_size", "rope_theta"])
    for name in required:
        values = values_of(model)
        del values[name]
        with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is missing"):
            MODULES[model].Config.from_hf(values)


@pytest.mark.parametrize(
    ("model", "changes", "name"),
    [
        ("sdar_moe", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("sdar_moe", {"head_dim": 15}, "head_dim"),
        ("sdar_moe", {"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ("sdar_moe", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers"),
        ("sdar_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("sdar_moe", {"mlp_only_layers": "012"}, "mlp_only_layers"),
        ("sdar_moe", {"mlp_only_layers": [True]}, "mlp_only_layers"),
        ("sdar_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ("sdar_moe", {"decoder_sparse_step": 4}, "decoder_sparse_step"),
        ("sdar_moe", {"mlp_only_layers": [1], "intermediate_size": 0}, "intermediate_size"),
        ("sdar_moe", {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ("sdar_moe", {"rope_scaling": False}, "rope_scaling"),
        ("sdar_moe", {"rope_parameters": {"factor": 2.0}}, "rope_parameters"),
        ("sdar_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("sdar_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("sdar_moe", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("rnd1", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("rnd1", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("rnd1", {"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ("llada_moe", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llada_moe", {"num_attention_heads": 3}, "num_attention_heads"),
        ("llada_moe", {"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ("llada_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("llada_moe", {"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ("llada_moe", {"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ("llada_moe", {"moe_layer_freq": [1, 1]}, "moe_layer_freq"),
        ("llada_moe", {"moe_layer_freq": [0, 0, 0]}, "moe_layer_freq"),
        ("llada_moe", {"moe_layer_freq": [1, 1, 2]}, "moe_layer_freq"),
        ("llada_moe", {"moe_layer_freq": 1}, "moe_layer_freq"),
        ("llada_moe", {"shared_expert_intermediate_size": -1}, "shared_expert_interm"),
        ("llada_moe", {"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
        ("llada_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ("llada_moe", {"router_num_group": 4}, "router_num_group"),
        ("llada_moe", {"router_topk_group": 2}, "router_topk_group"),
        ("llada_moe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("llada_moe", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_run(model: str, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {name}.* allowed: "):
        config_of(model, **changes)


def test_a_llada_without_experts_is_told_so() -> None:
    values = {"model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32}
    with pytest.raises(CheckpointError, match="without experts have nothing to offload"):
        find_family(values).config(values)


def test_rope_theta_may_be_nested() -> None:
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    for model in ("sdar_moe", "llada_moe"):
        values = values_of(model, **nested)
        assert config_of(model, **nested).rope_theta != 5.0
        del values["rope_theta"]
        assert MODULES[model].Config.from_hf(values).rope_theta == 5.0


def test_optional_fields_without_effect_on_layers_that_lack_them() -> None:
    values = values_of("sdar_moe")
    for name in ("intermediate_size", "mlp_only_layers", "decoder_sparse_step"):
        del values[name]
    assert sdar_moe.Config.from_hf(values) == config_of("sdar_moe")
    values = values_of("llada_moe")
    for name in ("dense_intermediate_size", "moe_layer_freq", "partial_rotary_factor"):
        del values[name]
    assert llada.Config.from_hf(values) == config_of("llada_moe")
    # A window that is switched off is never used (models.md 11).
    assert config_of("sdar_moe", sliding_window=4096) == config_of("sdar_moe")
