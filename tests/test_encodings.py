"""Quantised checkpoints of other tools: written here as their layouts say, read as their values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import check_experts, load_weights, synthetic_llada2, write_checkpoint
from quantised import (
    CASES,
    CONFIG,
    FP8,
    GROUP8,
    compressed_config,
    gptq_config,
    packed_config,
    write,
)
from torch import Tensor

from oled_moe.checkpoint import Checkpoint
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.encodings import EncodedRecord
from oled_moe.engine import Engine
from oled_moe.errors import CheckpointError
from oled_moe.inspection import describe_checkpoint
from oled_moe.outlook import open_sizes
from oled_moe.packing import pack_checkpoint
from oled_moe.store import aligned_empty

DENSE = "model.layers.0.mlp.gate_proj"
UP = "model.layers.1.mlp.experts.2.up_proj"


@pytest.mark.parametrize("method", ["direct", "buffered"])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_that_were_written(case: str, method: str, tmp_path: Path) -> None:
    values = write(tmp_path, case)
    weights, store = load_weights(tmp_path, method=method)
    assert store.layout.dtype == torch.bfloat16
    for name, weight in weights.items():
        assert torch.equal(weight, values[name].to(weight.dtype)), name
    check_experts(store, values)
    # Quantising has changed something, so that this compares what it says.
    original = synthetic_llada2(CONFIG, dtype=torch.bfloat16, seed=4)
    assert not torch.equal(values[f"{UP}.weight"].to(torch.bfloat16), original[f"{UP}.weight"])


@pytest.mark.parametrize("case", CASES)
def test_wider_values_are_exact(case: str, tmp_path: Path) -> None:
    values = write(tmp_path, case)
    _, store = load_weights(tmp_path, torch.float32)
    check_experts(store, values)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_the_engine_runs_them_as_their_values(device: str, tmp_path: Path) -> None:
    values = write(tmp_path / "quantised", "fp8 blocks")
    plain = {name: value.to(torch.bfloat16) for name, value in values.items()}
    write_checkpoint(tmp_path / "plain", plain, CONFIG)
    profile = DEFAULT_PROFILE if device == "cpu" else DEFAULT_EMULATED_PROFILE
    config = EngineConfig(device=device, experts_per_layer=2, hardware=profile, cpu_experts=False)
    params = SamplingParams(max_tokens=32, block_length=16, ignore_eos=True)
    answers = []
    for name in ("quantised", "plain"):
        with Engine(tmp_path / name, config) as engine:
            answers.append(engine.generate([1, 2, 3], params).token_ids)
    assert answers[0] == answers[1]


def test_a_pack_of_them_holds_their_values(tmp_path: Path) -> None:
    values = write(tmp_path / "source", "gptq")
    pack_checkpoint(tmp_path / "source", tmp_path / "pack")
    weights, store = load_weights(tmp_path / "pack")
    assert torch.equal(weights[f"{DENSE}.weight"], values[f"{DENSE}.weight"].to(torch.bfloat16))
    check_experts(store, values)


def test_what_is_said_of_them(tmp_path: Path) -> None:
    write(tmp_path, "compressed")
    summary = describe_checkpoint(tmp_path)
    assert summary.encoding == "compressed-tensors pack-quantized, 4 bits, groups of 8"
    assert summary.expert_dtype == "bfloat16" and "int32" in summary.dtypes
    # Four bits, and a scale for eight of them.
    assert summary.expert_bytes == 3 * (32 * 16 // 2 + 2 * 32 * 16 // 8)
    sizes = open_sizes(tmp_path)
    assert sizes.sizes.dtype == "bfloat16" and sizes.weights.read_slots > 2
    assert "quantization_config" not in Checkpoint.open(tmp_path).config


def test_some_may_be_left_as_they_were(tmp_path: Path) -> None:
    def restore(tensors: dict[str, Tensor]) -> None:
        for end in (".qweight", ".qzeros", ".scales", ".g_idx"):
            del tensors[DENSE + end]
        tensors[f"{DENSE}.weight"] = torch.ones(48, 32, dtype=torch.bfloat16)

    write(tmp_path, "gptq", restore)
    weights, store = load_weights(tmp_path)
    store.close()
    assert torch.equal(weights[f"{DENSE}.weight"], torch.ones(48, 32, dtype=torch.bfloat16))
    records = Checkpoint.open(tmp_path).tensors
    assert not isinstance(records[f"{DENSE}.weight"], EncodedRecord)


# Refused by name


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'.*allowed: fp8"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({"bits": 4}, "quant_method None"),
        ("int4", "has int4"),
        (gptq_config(3, 8), "bits 3.*allowed: 2, 4, 8"),
        (gptq_config(4, 0), "group_size 0"),
        (gptq_config(4, 8, checkpoint_format="marlin"), "'marlin'.*allowed: gptq, gptq_v2"),
        (FP8 | {"fmt": "e5m2"}, "'e5m2'.*allowed: e4m3"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (compressed_config("nvfp4-pack-quantized", num_bits=4, **GROUP8), "'nvfp4-pack-quant"),
        (compressed_config("marlin-24", num_bits=4, **GROUP8), "'marlin-24'.*pack-quantized"),
        (packed_config(3, **GROUP8), "3 bits.*2, 4 or 8"),
        (packed_config(4, strategy="token"), "'token'.*tensor, channel, group, block"),
        (packed_config(4, strategy="group", group_size=-1), "group of"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "0 config_groups"),
    ],
)
def test_what_is_not_read_is_named(settings: Any, words: str, tmp_path: Path) -> None:
    tensors = synthetic_llada2(CONFIG, dtype=torch.bfloat16, seed=4)
    write_checkpoint(tmp_path, tensors, {**CONFIG, "quantization_config": settings})
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint.open(tmp_path)
    assert "oled-moe pack" in str(caught.value)


def drop(end: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(UP + end)


def put(end: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.__setitem__(UP + end, tensor)


@pytest.mark.parametrize(
    "case, change, words",
    [
        ("gptq", drop(".qzeros"), r"lacks \.qzeros"),
        ("gptq", put(".scales", torch.ones(3, 16)), r"scales.*shape \[3, 16\].*\[4, 16\]"),
        ("gptq", put(".g_idx", torch.zeros(31, dtype=torch.int32)), r"g_idx.*\[31\].*\[32\]"),
        ("gptq", put(".qweight", torch.ones(4, 16)), "qweight.*float32.*asks for"),
        ("compressed", drop(".weight_scale"), "lacks weight_scale"),
        ("compressed", put(".weight_shape", torch.tensor([16, 64])), r"weight of shape \[16, 64\]"),
        ("compressed", put(".weight_scale", torch.ones(16, 3)), r"\[16, 3\].*\[16, 4\]"),
        ("fp8 blocks", put(".weight_scale_inv", torch.ones(2, 2)), r"\[2, 2\].*\[2, 3\]"),
        ("fp8 blocks", put(".weight", torch.ones(16, 32)), "float32.*asks for.*e4m3"),
        ("fp8 blocks", drop(".weight_scale_inv"), "float8_e4m3fn|not quantised as the first"),
    ],
)
def test_tensors_that_do_not_belong_together(
    case: str, change: Callable[[dict[str, Tensor]], object], words: str, tmp_path: Path
) -> None:
    write(tmp_path, case, change)
    with pytest.raises(CheckpointError, match=words):
        load_weights(tmp_path)


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, "gptq", put(".g_idx", torch.full((32,), 9, dtype=torch.int32)))
    _, store = load_weights(tmp_path)
    slot = aligned_empty(store.layout.slot_bytes)
    with pytest.raises(CheckpointError, match=r"layer 0, .*: .*: g_idx names a group that is not"):
        store.read_into(0, 2, slot)
    store.close()


def test_inputs_in_order_may_be_said_by_minus_one(tmp_path: Path) -> None:
    """As compressed-tensors fills weight_g_idx where nothing was reordered; 40 is no group."""
    slots = []
    for name, fill in (("no", None), ("all", -1), ("bad", 40)):
        (tmp_path / name).mkdir()
        if fill is None:
            write(tmp_path / name, "compressed zeros")
        else:
            order = torch.full((32,), fill, dtype=torch.int32)
            write(tmp_path / name, "compressed zeros", put(".weight_g_idx", order))
        _, store = load_weights(tmp_path / name)
        slots.append(aligned_empty(store.layout.slot_bytes).zero_())
        if name == "bad":
            with pytest.raises(CheckpointError, match="names a group that is not there"):
                store.read_into(0, 2, slots[-1])
        else:
            store.read_into(0, 2, slots[-1])
        store.close()
    assert torch.equal(slots[0], slots[1])


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    write(tmp_path, "gptq", put(".scales", torch.full((4, 16), torch.nan, dtype=torch.float16)))
    _, store = load_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"layer 0, expert 2 .* scales are damaged"):
        store.read_into(0, 2, aligned_empty(store.layout.slot_bytes))
    store.close()


def test_experts_that_are_not_alike(tmp_path: Path) -> None:
    plain = torch.arange(16 * 32).view(16, 32).to(torch.bfloat16)

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{UP}.weight_scale_inv"]
        tensors[f"{UP}.weight"] = plain

    values = write(tmp_path, "fp8 blocks", change)
    # Without its scales a tensor is not one of that format, and is read as it is.
    values[f"{UP}.weight"] = plain.float()
    _, store = load_weights(tmp_path)
    check_experts(store, values)
    store.close()


def test_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        at = "model.layers.1.mlp.experts.gate_up_proj"
        tensors[f"{at}.weight"] = torch.zeros(4, 32, 32, dtype=torch.float8_e4m3fn)
        tensors[f"{at}.weight_scale_inv"] = torch.ones(4, 4, 3)

    write(tmp_path, "fp8 blocks", change)
    with pytest.raises(CheckpointError, match="stacks quantised experts"):
        load_weights(tmp_path)


def test_a_config_that_says_more_than_there_is(tmp_path: Path) -> None:
    tensors = synthetic_llada2(CONFIG, dtype=torch.bfloat16, seed=4)
    write_checkpoint(tmp_path, tensors, {**CONFIG, "quantization_config": gptq_config(4, 8)})
    with pytest.raises(CheckpointError, match="no tensor is stored so"):
        Checkpoint.open(tmp_path)
