"""Quantised checkpoints of other tools: written here as their layouts say, read as their values."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from torch import Tensor

from oled_moe.checkpoint import Checkpoint, read_weights
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, DEFAULT_PROFILE
from oled_moe.encodings import EncodedRecord
from oled_moe.engine import Engine
from oled_moe.errors import CheckpointError
from oled_moe.inspection import describe_checkpoint
from oled_moe.models import find_family
from oled_moe.outlook import open_sizes
from oled_moe.packing import pack_checkpoint
from oled_moe.store import DiskExpertStore, aligned_empty

CONFIG = {
    "model_type": "llada2_moe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "vocab_size": 40,
    "mask_token_id": 37,
}
DENSE = "model.layers.0.mlp.gate_proj"
UP = "model.layers.1.mlp.experts.2.up_proj"

# From a weight [O, K] to its tensors by the ends of their names, and the values they stand for.
Writer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]


def is_quantised(name: str) -> bool:
    """As tools do it: linear layers but for router, embeddings and head."""
    return name.endswith(("_proj.weight", "attention.dense.weight"))


def to_int32(codes: Tensor, bits: int, axis: int) -> Tensor:
    """Codes along an axis, the first in the lowest bits; filled up with zeros."""
    rows = codes if axis == 0 else codes.T
    num_packed = 32 // bits
    packed = []
    for start in range(0, len(rows), num_packed):
        word = torch.zeros(rows.shape[1], dtype=torch.int64)
        for i, row in enumerate(rows[start : start + num_packed]):
            word += row.long() << bits * i
        packed.append(torch.where(word >= 2**31, word - 2**32, word))
    whole = torch.stack(packed).int()
    return (whole if axis == 0 else whole.T).contiguous()


def by_groups(weight: Tensor, group_size: int) -> Tensor:
    return weight.float().unflatten(1, (-1, group_size))


def gptq(bits: int, group_size: int, *, is_v2: bool = False, order: bool = False) -> Writer:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        size = inputs if group_size < 0 else group_size
        most = 2**bits - 1
        # With act-order neighbours are of different groups.
        group = torch.arange(inputs) // size
        if order:
            group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))]
        scales = torch.zeros(inputs // size, outputs, dtype=torch.float16)
        zeros = torch.zeros(inputs // size, outputs, dtype=torch.int32)
        for g in range(inputs // size):
            columns = weight[:, group == g].float()
            scales[g] = (columns.amax(1) - columns.amin(1)).clamp(min=1e-3) / most
            zeros[g] = (-columns.amin(1) / scales[g].float()).round().clamp(1, most)
        codes = (weight.float().T / scales.float()[group] + zeros[group]).round().clamp(0, most)
        values = (codes - zeros[group]) * scales.float()[group]
        stored_zeros = zeros if is_v2 else zeros - 1
        tensors = {
            ".qweight": to_int32(codes, bits, 0),
            ".qzeros": to_int32(stored_zeros, bits, 1),
            ".scales": scales,
            ".g_idx": group.int(),
        }
        return tensors, values.T

    return write


def compressed(
    bits: int, group_size: int | None, *, has_zeros: bool = False, order: bool = False
) -> Writer:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        size = group_size or inputs
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        group = torch.arange(inputs) // size
        if order:
            group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(2))]
        scales = torch.zeros(outputs, inputs // size, dtype=torch.bfloat16)
        zeros = torch.zeros(outputs, inputs // size, dtype=torch.int32)
        for g in range(inputs // size):
            columns = weight[:, group == g].float()
            scales[:, g] = columns.abs().amax(1).clamp(min=1e-3) / high
            if has_zeros:
                zeros[:, g] = torch.arange(outputs) % 5 - 2
        wide = scales.float()[:, group]
        codes = (weight.float() / wide + zeros[:, group]).round().clamp(low, high)
        tensors = {
            ".weight_packed": to_int32(codes - low, bits, 1),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([outputs, inputs]),
        }
        if has_zeros:
            tensors[".weight_zero_point"] = to_int32(zeros - low, bits, 0)
        if order:
            tensors[".weight_g_idx"] = group.int()
        return tensors, (codes - zeros[:, group]) * wide

    return write


def int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    codes = (weight.float() / scales.float()).round().clamp(-128, 127)
    return {".weight": codes.to(torch.int8), ".weight_scale": scales}, codes * scales.float()


def fp8(block: tuple[int, int] | None, suffix: str = ".weight_scale_inv") -> Writer:
    def write(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = block or weight.shape
        num_rows, num_columns = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(num_rows, num_columns)
        values = torch.zeros(weight.shape)
        for r in range(num_rows):
            for c in range(num_columns):
                place = (
                    slice(r * rows, r * rows + rows),
                    slice(c * columns, c * columns + columns),
                )
                scales[r, c] = weight[place].float().abs().max().clamp(min=1e-6) / 448
                codes[place] = (weight[place].float() / scales[r, c]).to(torch.float8_e4m3fn)
                values[place] = codes[place].float() * scales[r, c]
        stored = scales if block else scales.reshape(())
        return {".weight": codes, suffix: stored}, values

    return write


def gptq_config(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def packed_config(bits: int, **more: Any) -> dict[str, Any]:
    return compressed_config("pack-quantized", num_bits=bits, type="int", **more)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 12]}
GROUP8 = {"strategy": "group", "group_size": 8}
CASES: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8 blocks": (fp8((8, 12)), FP8),
    "fp8 tensors": (fp8(None), FP8 | {"weight_block_size": None}),
    "gptq": (gptq(4, 8), gptq_config(4, 8)),
    "gptq 8 bits rows": (gptq(8, -1), gptq_config(8, -1)),
    "gptq 2 bits": (gptq(2, 8), gptq_config(2, 8)),
    "gptq v2": (gptq(4, 8, is_v2=True), gptq_config(4, 8, checkpoint_format="gptq_v2")),
    "gptq order": (gptq(4, 8, order=True), gptq_config(4, 8, desc_act=True)),
    "compressed": (compressed(4, 8), packed_config(4, **GROUP8)),
    "compressed rows": (compressed(4, None), packed_config(4, strategy="channel")),
    "compressed zeros": (compressed(4, 8, has_zeros=True), packed_config(4, **GROUP8)),
    "compressed order": (compressed(4, 8, order=True), packed_config(4, **GROUP8)),
    "compressed order and zeros": (
        compressed(4, 8, has_zeros=True, order=True),
        packed_config(4, **GROUP8),
    ),
    "compressed 8 bits": (compressed(8, 8), packed_config(8, **GROUP8)),
    "compressed int8": (
        int8,
        compressed_config("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "compressed fp8 blocks": (
        fp8((8, 8), ".weight_scale"),
        compressed_config(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[8, 8]
        ),
    ),
    "compressed fp8 tensors": (
        fp8(None, ".weight_scale"),
        compressed_config("naive-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
}


def write(
    path: Path, case: str, change: Callable[[dict[str, Tensor]], object] = lambda _: None
) -> dict[str, Tensor]:
    """Write the checkpoint of a case; returns what its weights are."""
    writer, settings = CASES[case]
    tensors, values = {}, {}
    for name, weight in synthetic_llada2(CONFIG, dtype=torch.bfloat16, seed=4).items():
        if not is_quantised(name):
            tensors[name] = values[name] = weight
            continue
        parts, values[name] = writer(weight)
        tensors.update({name.removesuffix(".weight") + end: part for end, part in parts.items()})
    change(tensors)
    write_checkpoint(path, tensors, {**CONFIG, "quantization_config": settings})
    return values


def load(
    path: Path, dtype: torch.dtype | None = None, method: str = "direct"
) -> tuple[dict[str, Tensor], DiskExpertStore]:
    checkpoint = Checkpoint.open(path)
    family = find_family(checkpoint.config)
    config = family.config(checkpoint.config)
    return read_weights(
        checkpoint,
        map_weight=family.weight_map(config),
        shapes=family.parameter_shapes(config),
        num_moe_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        dtype=dtype,
        keep_dtype=family.kept_dtypes(config),
        method=method,
    )


def check_experts(store: DiskExpertStore, values: Mapping[str, Tensor]) -> None:
    slot = aligned_empty(store.layout.slot_bytes)
    for layer in range(2):
        for expert in range(4):
            store.read_into(layer, expert, slot)
            weights = store.layout.views(slot)
            at = f"model.layers.{layer + 1}.mlp.experts.{expert}"
            gate, up, down = (values[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            dtype = store.layout.dtype
            torch.testing.assert_close(
                weights.gate_up, torch.cat([gate, up]).to(dtype), rtol=0, atol=0
            )
            torch.testing.assert_close(weights.down, down.to(dtype), rtol=0, atol=0)
    store.close()


@pytest.mark.parametrize("method", ["direct", "buffered"])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_that_were_written(case: str, method: str, tmp_path: Path) -> None:
    values = write(tmp_path, case)
    weights, store = load(tmp_path, method=method)
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
    _, store = load(tmp_path, torch.float32)
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
    weights, store = load(tmp_path / "pack")
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
    weights, store = load(tmp_path)
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
        load(tmp_path)


def test_a_group_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, "gptq", put(".g_idx", torch.full((32,), 9, dtype=torch.int32)))
    _, store = load(tmp_path)
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
        _, store = load(tmp_path / name)
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
    _, store = load(tmp_path)
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
    _, store = load(tmp_path)
    check_experts(store, values)
    store.close()


def test_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        at = "model.layers.1.mlp.experts.gate_up_proj"
        tensors[f"{at}.weight"] = torch.zeros(4, 32, 32, dtype=torch.float8_e4m3fn)
        tensors[f"{at}.weight_scale_inv"] = torch.ones(4, 4, 3)

    write(tmp_path, "fp8 blocks", change)
    with pytest.raises(CheckpointError, match="stacks quantised experts"):
        load(tmp_path)


def test_a_config_that_says_more_than_there_is(tmp_path: Path) -> None:
    tensors = synthetic_llada2(CONFIG, dtype=torch.bfloat16, seed=4)
    write_checkpoint(tmp_path, tensors, {**CONFIG, "quantization_config": gptq_config(4, 8)})
    with pytest.raises(CheckpointError, match="no tensor is stored so"):
        Checkpoint.open(tmp_path)
