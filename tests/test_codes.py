"""Codes of quantised checkpoints in packs: the values that the checkpoint has, to the bit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_weights, synthetic_llada2
from gguf import GGMLQuantizationType as Type
from ggufs import write_config, write_gguf
from quantised import (
    Writer,
    compressed,
    compressed_config,
    fp8,
    gptq,
    gptq_config,
    int8,
    packed_config,
    write_quantised,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from oled_moe.checkpoint import Checkpoint
from oled_moe.cli import app
from oled_moe.codes import CodeGrid, CodesError, StoredCodes, StoredForm, common_form, hold
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_PROFILE
from oled_moe.engine import Engine
from oled_moe.errors import CheckpointError
from oled_moe.inspection import verify_pack
from oled_moe.packing import pack_checkpoint
from oled_moe.packs import MANIFEST_NAME, PackManifest
from oled_moe.quantization import QuantSpec, decode, dequantize, encode, weights_of
from oled_moe.store import aligned_empty

# Rows of 96 end within a group of 64.
CONFIG: dict[str, Any] = {
    "model_type": "llada2_moe",
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rotary_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 64,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "mask_token_id": 37,
    "eos_token_id": 36,
    "pad_token_id": 36,
}
HALF, NARROW = torch.float16, torch.bfloat16
UP = "model.layers.1.mlp.experts.2.up_proj"


def groups(size: int) -> dict[str, Any]:
    return {"strategy": "group", "group_size": size}


def plain_int8(strategy: str) -> dict[str, Any]:
    return compressed_config("int-quantized", num_bits=8, type="int", strategy=strategy)


def one_scale(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = (weight.float().abs().max() / 127).to(NARROW)
    codes = (weight.float() / scale.float()).round()
    tensors = {".weight": codes.to(torch.int8), ".weight_scale": scale.reshape(1)}
    return tensors, codes * scale.float()


def with_zeros(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """int8 with zero points, a scale for each row."""
    low, high = weight.float().amin(1, keepdim=True), weight.float().amax(1, keepdim=True)
    scales = ((high - low) / 250).to(NARROW)
    zeros = (-125 - low / scales.float()).round()
    codes = (weight.float() / scales.float() + zeros).round().clamp(-128, 127)
    tensors = {
        ".weight": codes.to(torch.int8),
        ".weight_scale": scales,
        ".weight_zero_point": zeros.to(torch.int8),
    }
    return tensors, (codes - zeros) * scales.float()


# Its writer and settings, the form that keeps it, and whether scales are rounded.
KEPT: dict[str, tuple[Writer, dict[str, Any], str, bool]] = {
    "gptq": (gptq(4, 32), gptq_config(4, 32, sym=False), "int4-g32-asym", True),
    "gptq bf16": (
        gptq(4, 32, scale_dtype=NARROW),
        gptq_config(4, 32, desc_act=False),
        "int4-g32-asym",
        False,
    ),
    "gptq sym": (
        gptq(4, 32, is_symmetric=True, scale_dtype=NARROW),
        gptq_config(4, 32, sym=True),
        "int4-g32",
        False,
    ),
    "gptq v2": (
        gptq(4, 64, is_v2=True, scale_dtype=torch.float32),
        gptq_config(4, 64, checkpoint_format="gptq_v2"),
        "int4-g64-asym",
        True,
    ),
    "gptq wide groups": (
        gptq(4, 96, is_symmetric=True, scale_dtype=NARROW),
        gptq_config(4, 96, sym=True),
        "int4-row",
        False,
    ),
    "gptq rows": (gptq(4, -1), gptq_config(4, -1), "int4-row-asym", True),
    "gptq rows in any order": (
        gptq(4, -1, order=True),
        gptq_config(4, -1, desc_act=True),
        "int4-row-asym",
        True,
    ),
    "gptq static groups": (
        gptq(4, 32),
        gptq_config(4, 32, desc_act=True, static_groups=True),
        "int4-g32-asym",
        True,
    ),
    "gptq 2 bits": (
        gptq(2, 32, is_symmetric=True, scale_dtype=NARROW),
        gptq_config(2, 32, sym=True),
        "int4-g32",
        False,
    ),
    "gptq 8 bits": (gptq(8, 32), gptq_config(8, 32), "int8-g32-asym", True),
    "compressed": (compressed(4, 32), packed_config(4, **groups(32)), "int4-g32", False),
    "compressed zeros": (
        compressed(4, 32, has_zeros=True),
        packed_config(4, **groups(32)),
        "int4-g32-asym",
        False,
    ),
    "compressed rows": (
        compressed(4, None),
        packed_config(4, strategy="channel"),
        "int4-row",
        False,
    ),
    "compressed 8 bits": (compressed(8, 32), packed_config(8, **groups(32)), "int8-g32", False),
    "int8 rows": (int8, plain_int8("channel"), "int8-row", False),
    "int8 tensors": (one_scale, plain_int8("tensor"), "int8-row", False),
    "int8 zeros": (with_zeros, plain_int8("channel"), "int8-row-asym", False),
}
# Why their codes are not kept.
NOT_KEPT: dict[str, tuple[Writer, dict[str, Any], str]] = {
    "order": (gptq(4, 32, order=True), gptq_config(4, 32, desc_act=True), "act-order"),
    "compressed order": (
        compressed(4, 32, order=True),
        packed_config(4, **groups(32)),
        "act-order",
    ),
    "groups": (gptq(4, 16), gptq_config(4, 16), r"groups of 16, .*\(32, 64, 128\)"),
    "fp8": (
        fp8((32, 32)),
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        "floating-point numbers of 8 bits",
    ),
}


def in_bf16(path: Path) -> Path:
    """The same checkpoint with its scales rounded."""
    file = path / "model.safetensors"
    tensors = {
        name: tensor.to(NARROW) if name.endswith("scales") else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)
    return path


def values_in(path: Path) -> list[Tensor]:
    """What each matrix of every expert stands for in a pack, float32."""
    _, store = load_weights(path)
    layout, quant = store.layout, store.layout.quant
    assert quant is not None
    slot, found = aligned_empty(layout.slot_bytes), []
    width, hidden = layout.intermediate_size, layout.hidden_size
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            store.read_into(layer, expert, slot)
            gate, up, down = layout.packed_views(slot)
            found += [dequantize(each, quant, width, hidden) for each in (gate, up)]
            found.append(dequantize(down, quant, hidden, width))
    store.close()
    return found


def decoded(path: Path) -> list[Tensor]:
    """The same of a checkpoint, as it is read without packing."""
    _, store = load_weights(path, torch.float32)
    slot, found = aligned_empty(store.layout.slot_bytes), []
    for layer in range(store.num_layers):
        for expert in range(store.num_experts):
            store.read_into(layer, expert, slot)
            gate_up, down = store.layout.views(slot)
            found += [each.clone() for each in (*gate_up.chunk(2), down)]
    store.close()
    return found


@pytest.mark.parametrize("dtype", [None, "int"])
@pytest.mark.parametrize("case", KEPT)
def test_a_pack_stands_for_the_same_values(case: str, dtype: str | None, tmp_path: Path) -> None:
    """By default, and where a number of bits alone is asked for."""
    writer, settings, form, is_rounded = KEPT[case]
    write_quantised(tmp_path / "source", writer, settings, CONFIG)
    exact = decoded(tmp_path / "source")
    dtype = dtype and form[:4]
    report = pack_checkpoint(tmp_path / "source", tmp_path / "pack", dtype=dtype)
    assert report.expert_dtype == form
    assert ("scales rounded from" in report.rounding) == is_rounded
    assert PackManifest.read(tmp_path / "pack" / MANIFEST_NAME).method == "stored"
    verify_pack(tmp_path / "pack")
    found = values_in(tmp_path / "pack")
    if is_rounded:
        for value, wanted in zip(found, exact, strict=True):
            assert ((value - wanted).abs() <= wanted.abs() * 2**-8).all()
        exact = decoded(in_bf16(tmp_path / "source"))
    for value, wanted in zip(found, exact, strict=True):
        assert torch.equal(value, wanted)
    assert any(len(value.unique()) > 4 for value in found)


@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("gptq bf16", "int4-g32-asym"),
        ("gptq bf16", "int8-g32-asym"),
        ("gptq sym", "int4-g32-asym"),
        ("gptq sym", "int8"),
        ("compressed rows", "int4-g64"),
        ("compressed rows", "int4-g32-asym"),
        ("compressed rows", "int8-row"),
    ],
)
def test_wider_forms_stand_for_the_same_values(case: str, form: str, tmp_path: Path) -> None:
    writer, settings, _, _ = KEPT[case]
    write_quantised(tmp_path / "source", writer, settings, CONFIG)
    report = pack_checkpoint(tmp_path / "source", tmp_path / "pack", dtype=form)
    assert report.expert_dtype.startswith(form) and "codes and scales as" in report.rounding
    for value, wanted in zip(
        values_in(tmp_path / "pack"), decoded(tmp_path / "source"), strict=True
    ):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize(
    ("case", "options", "words"),
    [
        ("gptq bf16", {"dtype": "int4-g32"}, "not as stored: int4-g32 does not hold int4-g32-asym"),
        ("gptq bf16", {"dtype": "int4-g64-asym"}, "int4-g64-asym does not hold"),
        ("compressed 8 bits", {"dtype": "int4"}, "int4-g64 does not hold int8-g32"),
        (
            "gptq bf16",
            {"dtype": "int4", "method": "searched"},
            "rounded, scales searched for the least error",
        ),
        ("gptq bf16", {"dtype": "int4-g32-asym", "method": "nearest"}, "rounded to the nearest"),
    ],
)
def test_rounded_anew_where_the_form_or_the_method_says_so(
    case: str, options: dict[str, str], words: str, tmp_path: Path
) -> None:
    writer, settings, _, _ = KEPT[case]
    write_quantised(tmp_path / "source", writer, settings, CONFIG)
    report = pack_checkpoint(tmp_path / "source", tmp_path / "pack", **options)
    assert words in report.rounding
    assert PackManifest.read(tmp_path / "pack" / MANIFEST_NAME).method != "stored"


@pytest.mark.parametrize("case", NOT_KEPT)
def test_what_no_form_keeps_is_decoded_and_said(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, settings, words = NOT_KEPT[case]
    write_quantised(tmp_path / "source", writer, settings, CONFIG)
    report = pack_checkpoint(tmp_path / "source", tmp_path / "pack")
    assert report.expert_dtype == "bfloat16"
    (warning,) = (record.getMessage() for record in caplog.records)
    for text in (report.rounding, warning):
        assert re.search(words, text)


def test_codes_that_are_not_what_headers_say(tmp_path: Path) -> None:
    """A zero beside the middle, an order, a scale that is no number: named where they lie."""
    writer, settings, _, _ = KEPT["gptq sym"]

    def put(end: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
        return lambda tensors: tensors.__setitem__(UP + end, tensor)

    bad = {
        "a zero is not the middle": put(".qzeros", torch.full((3, 8), 7, dtype=torch.int32)),
        "g_idx puts inputs": put(".g_idx", torch.arange(96).int() % 3),
        "a scale is not finite": put(".scales", torch.full((3, 64), torch.inf)),
    }
    for number, (words, change) in enumerate(bad.items()):
        source, out = tmp_path / f"source{number}", tmp_path / f"pack{number}"
        write_quantised(source, writer, settings, CONFIG, change)
        with pytest.raises(CheckpointError, match=rf"layer 0, expert 2.*up: {words}.*--dtype bf16"):
            pack_checkpoint(source, out)
        assert not out.exists()


def test_a_pack_of_such_a_pack_is_the_pack(tmp_path: Path) -> None:
    writer, settings, _, _ = KEPT["compressed zeros"]
    write_quantised(tmp_path / "source", writer, settings, CONFIG)
    pack_checkpoint(tmp_path / "source", tmp_path / "one")
    pack_checkpoint(tmp_path / "one", tmp_path / "two")
    report = pack_checkpoint(tmp_path / "one", tmp_path / "three", dtype="int4")
    assert report.rounding == "as packed"
    for path in (tmp_path / "one").iterdir():
        for other in ("two", "three"):
            assert path.read_bytes() == (tmp_path / other / path.name).read_bytes()


def test_an_engine_runs_them(tmp_path: Path) -> None:
    """And what it computes is near what it computes with the values of the checkpoint."""
    writer, settings, _, _ = KEPT["gptq bf16"]
    write_quantised(tmp_path / "source", writer, settings, CONFIG)
    pack_checkpoint(tmp_path / "source", tmp_path / "pack")
    config = EngineConfig(device="cpu", experts_per_layer=2, hardware=DEFAULT_PROFILE)
    params = SamplingParams(max_tokens=16, block_length=16, ignore_eos=True)
    shares = []
    for name in ("source", "pack"):
        with Engine(tmp_path / name, config) as engine:
            shares.append(engine.generate([1, 2, 3], params).probabilities)
    assert shares[0] == pytest.approx(shares[1], abs=0.05)


def test_the_command_says_what_becomes_of_weights(tmp_path: Path) -> None:
    writer, settings, _, _ = KEPT["gptq"]
    write_quantised(tmp_path / "source", writer, settings, CONFIG)
    arguments = ["pack", str(tmp_path / "source"), str(tmp_path / "pack")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "3 experts as int4-g32-asym" in said
    assert "codes as stored (GPTQ, 4 bits, groups of 32), scales rounded from float16" in said


# GGUF


@pytest.mark.parametrize(
    ("kinds", "form"),
    [
        ((Type.Q4_0, Type.Q4_0), "int4-g32"),
        ((Type.Q8_0, Type.Q8_0), "int8-g32"),
        ((Type.Q5_0, Type.Q5_0), "int8-g32"),
        ((Type.Q4_0, Type.Q8_0), "int8-g32"),
    ],
)
def test_blocks_of_gguf_files_keep_their_codes(
    kinds: tuple[Type, Type], form: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = synthetic_llada2(CONFIG, seed=5)
    write_gguf(
        source / "model.gguf",
        "llada2",
        tensors,
        CONFIG,
        lambda name: kinds["ffn_down_exps" in name] if "exps" in name else Type.F16,
    )
    write_config(source, CONFIG)
    report = pack_checkpoint(source / "model.gguf", tmp_path / "pack")
    assert report.expert_dtype == form and "scales rounded from float16" in report.rounding
    for value, exact in zip(values_in(tmp_path / "pack"), decoded(source), strict=True):
        codes = exact.unflatten(1, (-1, 32))
        scale = codes.abs().amax(2, keepdim=True)
        rounded = value.unflatten(1, (-1, 32))
        # One number for each block: by how much its scale was rounded.
        by = (rounded.abs().amax(2, keepdim=True) / scale).nan_to_num(1.0)
        assert ((by - 1).abs() <= 2**-8).all()
        torch.testing.assert_close(rounded, codes * by, rtol=1e-6, atol=0)


def test_layers_of_plain_numbers_among_codes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()

    def choose(name: str) -> Type:
        is_coded = "exps" in name and "down" not in name
        return Type.Q8_0 if is_coded else Type.BF16

    write_gguf(source / "model.gguf", "llada2", synthetic_llada2(CONFIG, seed=5), CONFIG, choose)
    write_config(source, CONFIG)
    report = pack_checkpoint(source, tmp_path / "pack")
    assert report.expert_dtype == "bfloat16" and "some are BF16, plain numbers" in report.rounding


def test_types_of_gguf_files_that_are_decoded(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = synthetic_llada2(CONFIG, seed=5)
    write_config(source, CONFIG)
    for kind in (Type.Q4_1, Type.F16):

        def choose(name: str, kind: Type = kind) -> Type:
            return kind if "exps" in name else Type.F16

        write_gguf(source / "model.gguf", "llada2", tensors, CONFIG, choose)
        report = pack_checkpoint(source, tmp_path / kind.name)
        assert report.expert_dtype == ("bfloat16" if kind == Type.Q4_1 else "float16")
        assert ("Q4_1 has minima" in report.rounding) == (kind == Type.Q4_1)


# Forms


def grid(bits: int, size: int | None, is_symmetric: bool = True) -> CodeGrid:
    return CodeGrid(bits, size, is_symmetric, NARROW)


@pytest.mark.parametrize(
    ("grids", "form"),
    [
        ([grid(4, 128)], "int4-g128"),
        ([grid(4, 256)], "int4-g128"),
        ([grid(4, 96), grid(4, 64)], "int4-g32"),
        ([grid(4, None)], "int4-row"),
        ([grid(4, None), grid(4, 64)], "int4-g64"),
        ([grid(3, 32), grid(4, 32, False)], "int4-g32-asym"),
        ([grid(4, 32), grid(5, 32)], "int8-g32"),
    ],
)
def test_the_form_that_keeps_all(grids: list[CodeGrid], form: str) -> None:
    found = common_form(set(grids))
    assert isinstance(found, StoredForm) and str(found.spec) == form and not found.rounded


def test_no_form_keeps_them() -> None:
    assert "groups of 16, 48" in str(common_form({grid(4, 48), grid(4, 16)}))


def test_rounded_scales_are_named() -> None:
    grids = {CodeGrid(4, 32, True, dtype) for dtype in (HALF, NARROW, torch.float32)}
    found = common_form(grids)
    assert isinstance(found, StoredForm) and found.rounded == ("float16", "float32")


@pytest.mark.parametrize("num_inputs", [32, 96, 200])
@pytest.mark.parametrize("size", [None, 64, 128, 256])
@pytest.mark.parametrize("form", ["int4-g32", "int4-g64-asym", "int8-g64-asym"])
def test_groups_are_cut_into_smaller_ones(size: int | None, num_inputs: int, form: str) -> None:
    """Through the bytes of a pack; a last group may be shorter."""
    spec, generator = QuantSpec.parse(form), torch.Generator().manual_seed(num_inputs)
    num_groups = -(-num_inputs // size) if size else 1
    codes = torch.randint(-8, 8, (5, num_inputs), generator=generator)
    scales = torch.randn(5, num_groups, generator=generator).to(NARROW)
    zeros = None if spec.is_symmetric else torch.randint(-8, 9, scales.shape, generator=generator)
    held = hold(StoredCodes(codes, scales, zeros, size), spec)
    group_K = torch.arange(num_inputs) // (size or num_inputs)
    wanted = codes - (0 if zeros is None else zeros[:, group_K])
    assert torch.equal(weights_of(held, spec), wanted * scales.float()[:, group_K])
    again = decode(encode(held, spec), spec, 5, num_inputs)
    assert torch.equal(again.codes_OK, held.codes_OK)


@pytest.mark.parametrize(
    ("codes", "zeros", "words"),
    [
        ([8], None, "a code is no whole number from -8 to 7"),
        ([0.5], None, "a code is no whole number"),
        ([0], [300], "a zero is no whole number from -8 to 247"),
        ([0], [float("nan")], "a zero"),
    ],
)
def test_numbers_that_no_code_can_be(
    codes: list[float], zeros: list[float] | None, words: str
) -> None:
    stored = StoredCodes(
        torch.tensor([codes]),
        torch.ones(1, 1),
        None if zeros is None else torch.tensor([zeros]),
        None,
    )
    with pytest.raises(CodesError, match=words):
        hold(stored, QuantSpec.parse("int4-row-asym"))


def test_loading_still_decodes(tmp_path: Path) -> None:
    """Without packing slots hold values, whatever the codes are."""
    writer, settings, _, _ = KEPT["compressed"]
    write_quantised(tmp_path, writer, settings, CONFIG)
    _, store = load_weights(tmp_path)
    assert store.layout.quant is None
    store.close()
    assert "4 bits" in str(Checkpoint.open(tmp_path).encoding)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == settings
