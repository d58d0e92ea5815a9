"""Configs field by field, the map of checkpoint names, and forwards over several sequences."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from torch import Tensor

from oled_moe import Engine, EngineConfig
from oled_moe.errors import CheckpointError
from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import ForwardBatch, Segment
from oled_moe.models import Model, find_family
from oled_moe.models.llada2_moe import Config, build_weight_map, kept_dtypes, parameter_shapes
from oled_moe.store import ExpertPart
from oled_moe.types import ForwardContext, ForwardRow, LayerDemand, LayerPlan, Phase

VALUES: dict[str, Any] = {
    "model_type": "llada2_moe",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "moe_router_enable_expert_bias": True,
    "tie_word_embeddings": False,
    "mask_token_id": 37,
}
MINIMAL = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
)
WHOLE = [*MINIMAL, "head_dim", "max_position_embeddings", "n_group", "topk_group"]
MAY_BE_ZERO = ["first_k_dense_replace", "num_key_value_heads", "num_shared_experts"]
REAL = ["rope_theta", "rms_norm_eps", "routed_scaling_factor", "partial_rotary_factor"]
FLAGS = [name for name, value in VALUES.items() if isinstance(value, bool)]
WRONG: list[Any] = ["4", "", [], [4], {}, {"a": 1}, True, math.nan, -1]


def config_with(**changes: Any) -> Config:
    return Config.from_hf(VALUES | changes)


def config_without(*names: str) -> Config:
    return Config.from_hf({key: value for key, value in VALUES.items() if key not in names})


# --- config


def test_the_whole_config() -> None:
    config = config_with()
    assert (config.vocab_size, config.hidden_size, config.head_size) == (40, 32, 8)
    assert (config.num_layers, config.num_dense_layers, config.num_moe_layers) == (3, 1, 2)
    assert (config.num_heads, config.num_kv_heads, config.rotary_size) == (4, 2, 4)
    assert (config.num_experts, config.top_k) == (8, 2)
    assert (config.num_groups, config.num_kept_groups) == (4, 2)
    assert (config.rope_theta, config.norm_eps, config.routed_scale) == (10000.0, 1e-6, 2.5)
    assert config.has_qk_norm and config.has_expert_bias
    assert not config.has_qkv_bias and not config.has_output_bias and not config.is_head_tied


@pytest.mark.parametrize("name", WHOLE + MAY_BE_ZERO)
@pytest.mark.parametrize("value", [*WRONG, 1.5, 4.0], ids=repr)
def test_whole_fields(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is .*; allowed: a whole"):
        config_with(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_fields_that_may_not_be_zero(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is 0; allowed: a whole"):
        config_with(**{name: 0})


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("value", [*WRONG, 0, math.inf, 10**400], ids=lambda v: repr(v)[:12])
def test_real_fields(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is .*a number above 0"):
        config_with(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["true", 1, 0, [], {}], ids=repr)
def test_flag_fields(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is .*; allowed: true, fa"):
        config_with(**{name: value})


@pytest.mark.parametrize("name", MINIMAL)
def test_fields_without_default(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is missing"):
        config_without(name)
    with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is None"):
        config_with(**{name: None})


def test_defaults() -> None:
    config = Config.from_hf({name: VALUES[name] for name in MINIMAL})
    assert (config.head_size, config.num_kv_heads, config.rotary_size) == (8, 4, 4)
    assert (config.num_dense_layers, config.num_groups, config.num_kept_groups) == (0, 1, 1)
    assert (config.rope_theta, config.norm_eps, config.max_positions) == (600000.0, 1e-6, 32768)
    assert config_with(num_key_value_heads=0).num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"first_k_dense_replace": 3}, "first_k_dense_replace"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 16, "topk_group": 1}, "n_group"),
        ({"n_group": 8}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 9, "topk_group": 4}, "num_experts_per_tok"),
    ],
)
def test_fields_that_do_not_fit_together(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {name} is "):
        config_with(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("hidden_act", ["silu"]),
        ("score_function", "softmax"),
        ("router_dtype", "bf16"),
        ("norm_head", True),
        ("use_sliding_window", True),
        ("quantization_config", {"bits": 4}),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"factor": 4.0}),
        ("rope_scaling", "yarn"),
        ("rope_scaling", [4.0]),
        ("rope_parameters", {"rope_type": "llama3"}),
        ("rope_parameters", "default"),
        ("rope_parameters", [1]),
    ],
)
def test_options_that_are_not_run(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {name} .*allowed: "):
        config_with(**{name: value})


def test_options_without_effect_are_ignored() -> None:
    ignored = {
        "sliding_window": 4096,
        "use_sliding_window": False,
        "rope_scaling": None,
        "norm_topk_prob": False,
        "attention_dropout": 0.1,
        "hidden_act": "silu",
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "a_stranger": {},
    }
    assert config_with(**ignored) == config_with()


def test_rotary_size_by_any_name() -> None:
    assert config_without("partial_rotary_factor").rotary_size == 4
    named = VALUES | {"rotary_dim": 6}
    assert Config.from_hf(named).rotary_size == 4, "the share wins"
    del named["partial_rotary_factor"]
    assert Config.from_hf(named).rotary_size == 6
    # A product of floats would make 1 of this.
    assert Config.from_hf(named | {"head_dim": 98, "rotary_dim": 2}).rotary_size == 2
    nested = {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.25}
    del named["rope_theta"]
    config = Config.from_hf(named | {"rope_parameters": nested})
    assert (config.rotary_size, config.rope_theta) == (2, 5.0)


@pytest.mark.parametrize("value", ["4", 0, -2, 3, 10, True, 2.0], ids=repr)
def test_rotary_dim_is_checked(value: Any) -> None:
    values = {key: value for key, value in VALUES.items() if key != "partial_rotary_factor"}
    with pytest.raises(CheckpointError, match=r"^config\.json: rotary_dim is "):
        Config.from_hf(values | {"rotary_dim": value})


@pytest.mark.parametrize("value", [None, "llama", "", 5, [], {}, ["llada2_moe"]], ids=repr)
def test_unknown_families_list_the_known(value: Any) -> None:
    with pytest.raises(CheckpointError, match="model_type is .*llada2_moe, llada2_moe_veomni"):
        find_family({"model_type": value})
    with pytest.raises(CheckpointError, match="model_type"):
        find_family({})


@pytest.mark.parametrize("name", ["llada2_moe", "llada2_moe_veomni"])
def test_known_families(name: str) -> None:
    family = find_family({"model_type": name})
    assert family.name == name
    assert family.config(VALUES) == config_with()


# --- names


def test_every_synthetic_tensor_has_its_place() -> None:
    config = config_with()
    weight_map, shapes = build_weight_map(config), parameter_shapes(config)
    parameters, parts = set(), set()
    for name, tensor in synthetic_llada2(VALUES).items():
        target = weight_map(name)
        if isinstance(target, ExpertPart):
            parts.add(target)
        else:
            assert target == name and shapes[name] == tuple(tensor.shape)
            parameters.add(name)
    assert parameters == set(shapes)
    assert parts == {
        ExpertPart(layer, expert, matrix)
        for layer in range(2)
        for expert in range(8)
        for matrix in ("gate", "up", "down")
    }


def test_optional_parameters_follow_the_config() -> None:
    base = set(parameter_shapes(config_with()))
    for changes, sign, word, count in [
        ({"use_qkv_bias": True}, 1, "query_key_value.bias", 3),
        ({"use_bias": True}, 1, "dense.bias", 3),
        ({"tie_word_embeddings": True}, -1, "lm_head.weight", 1),
        ({"use_qk_norm": False}, -1, "_layernorm.weight", 6),
        ({"moe_router_enable_expert_bias": False}, -1, "expert_bias", 2),
        ({"num_shared_experts": 0}, -1, "shared_experts", 6),
    ]:
        names = set(parameter_shapes(config_with(**changes)))
        changed = names - base if sign > 0 else base - names
        assert len(names) - len(base) == sign * count == sign * len(changed)
        assert all(word in name for name in changed)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("model.layers.1.mlp.experts.7.down_proj.weight", ExpertPart(0, 7, "down")),
        ("model.layers.2.mlp.experts.gate_proj", ExpertPart(1, None, "gate")),
        ("model.layers.2.mlp.experts.up_proj.weight", ExpertPart(1, None, "up")),
        ("model.layers.2.mlp.experts.gate_up_proj", ExpertPart(1, None, "gate_up")),
        ("model.layers.0.attention.rotary_emb.inv_freq", None),
    ],
)
def test_other_layouts(name: str, target: ExpertPart | None) -> None:
    assert build_weight_map(config_with())(name) == target


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.bias",
        "model.layers.1.mlp.experts.-1.up_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight.extra",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.attention.query_key_value.bias",
    ],
)
def test_weights_that_config_json_denies(name: str) -> None:
    """A config.json of another model would leave weights out without a word."""
    with pytest.raises(CheckpointError, match="does not provide for"):
        build_weight_map(config_with())(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.experts.0.up_proj.weight",
        "model.layers.3.input_layernorm.weight",
        "lm_head.bias",
        "",
    ],
)
def test_strangers_are_key_errors(name: str) -> None:
    with pytest.raises(KeyError):
        build_weight_map(config_with())(name)


def test_the_router_stays_at_its_stored_precision() -> None:
    assert kept_dtypes(config_with()) == {
        f"model.layers.{layer}.mlp.gate.{part}"
        for layer in (1, 2)
        for part in ("weight", "expert_bias")
    }


# --- forwards over several sequences


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    tensors = synthetic_llada2(VALUES, seed=1)
    path = write_checkpoint(tmp_path_factory.mktemp("model"), tensors, VALUES)
    with Engine(path, EngineConfig(experts_per_layer=8, max_model_len=64)) as engine:
        yield engine


Part = tuple[SequenceKv, list[int], bool]


def forward(model: Model, parts: list[Part]) -> Tensor | None:
    num_tokens = sum(len(ids) for _, ids, _ in parts)
    rows = tuple(
        ForwardRow(i, 0, 0, Phase.DENOISE if wants else Phase.PREFILL, len(ids))
        for i, (_, ids, wants) in enumerate(parts)
    )
    context = ForwardContext(
        0, 4, rows, np.ones(num_tokens, np.float32), np.zeros(num_tokens, np.uint8)
    )
    positions = [kv.length + i for kv, ids, _ in parts for i in range(len(ids))]
    segments = tuple(Segment(kv, len(ids), wants) for kv, ids, wants in parts)
    ids = [token for _, part, _ in parts for token in part]
    return model.forward(
        ForwardBatch(torch.tensor(ids), torch.tensor(positions), segments, context)
    )


@pytest.mark.parametrize("wants", [(True, True), (False, True), (True, False), (False, False)])
def test_sequences_in_one_forward_do_not_touch(engine: Engine, wants: tuple[bool, bool]) -> None:
    model, random = engine.model, np.random.default_rng(5)
    prefix, first, second = (random.integers(0, 37, n).tolist() for n in (8, 4, 12))

    def sequences() -> tuple[SequenceKv, SequenceKv]:
        kv = model.new_kv(16)
        forward(model, [(kv, prefix, False)])
        kv.advance(8)
        return kv, model.new_kv(16)

    apart, together = sequences(), sequences()
    parts = list(zip((first, second), wants, strict=True))
    single = [
        forward(model, [(kv, ids, want)]) for kv, (ids, want) in zip(apart, parts, strict=True)
    ]
    batch = [(kv, ids, want) for kv, (ids, want) in zip(together, parts, strict=True)]
    joined = forward(model, batch)
    expected = [logits for logits in single if logits is not None]
    if expected:
        assert joined is not None and joined.dtype == torch.float32
        torch.testing.assert_close(joined, torch.cat(expected), atol=1e-4, rtol=1e-4)
    else:
        assert joined is None
    for one, other, ids in zip(apart, together, (first, second), strict=True):
        for layer in range(3):
            for left, right in zip(
                one.written(layer, len(ids)), other.written(layer, len(ids)), strict=True
            ):
                torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_a_forward_without_logits_skips_the_last_layers_experts(engine: Engine) -> None:
    seen: list[int] = []

    def observer(demand: LayerDemand, plan: LayerPlan) -> None:
        seen.append(demand.layer)

    engine.experts.observers.append(observer)
    try:
        forward(engine.model, [(engine.model.new_kv(8), [1] * 8, False)])
        assert seen == [0]
        forward(engine.model, [(engine.model.new_kv(8), [1] * 8, True)])
        assert seen == [0, 0, 1]
    finally:
        engine.experts.observers.remove(observer)


def test_two_blocks_of_a_sequence_in_one_forward(engine: Engine) -> None:
    """As a folded commit has them: the same as one after the other, the first without logits."""
    model, random = engine.model, np.random.default_rng(6)
    prefix, first, second = (random.integers(0, 37, n).tolist() for n in (8, 4, 4))
    wanted = torch.tensor([0, 2, 3])

    def started() -> SequenceKv:
        kv = model.new_kv(16)
        forward(model, [(kv, prefix, False)])
        kv.advance(8)
        return kv

    apart, together = started(), started()
    forward(model, [(apart, first, False)])
    apart.advance(4)
    expected = forward(model, [(apart, second, True)])
    context = ForwardContext(
        1,
        4,
        (ForwardRow(0, 2, 1, Phase.COMMIT, 4), ForwardRow(0, 3, 0, Phase.DENOISE, 4)),
        np.ones(8, np.float32),
        np.zeros(8, np.uint8),
    )
    segments = (Segment(together, 4, False), Segment(together, 4, True, 4, wanted))
    seen: list[int] = []

    def observer(demand: LayerDemand, plan: LayerPlan) -> None:
        seen.append(len(demand.topk_ids))

    engine.experts.observers.append(observer)
    try:
        logits = model.forward(
            ForwardBatch(torch.tensor(first + second), torch.arange(8, 16), segments, context)
        )
    finally:
        engine.experts.observers.remove(observer)
    assert logits is not None and expected is not None
    torch.testing.assert_close(logits, expected[wanted], atol=1e-4, rtol=1e-4)
    # The last layer computes what it must.
    assert seen == [8, 4]
    together.advance(4)
    for layer in range(3):
        for left, right in zip(apart.written(layer, 4), together.written(layer, 4), strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
