"""GGUF files, written by the gguf package: the same weights, configs and answers."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import check_experts, load_weights, synthetic_llada2
from gguf import GGMLQuantizationType as Type
from gguf import quants
from ggufs import SCALES, encoded, random_blocks, write_config, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from oled_moe.checkpoint import Checkpoint
from oled_moe.cli import app
from oled_moe.config import EngineConfig, SamplingParams
from oled_moe.costs import DEFAULT_PROFILE
from oled_moe.encodings import EncodedRecord
from oled_moe.engine import Engine
from oled_moe.errors import CheckpointError, ModelNotFoundError
from oled_moe.gguf_files import read_gguf
from oled_moe.gguf_types import OTHER_TYPES, TYPES, GgufDecoder
from oled_moe.inspection import describe_checkpoint
from oled_moe.models import find_family
from oled_moe.outlook import open_sizes
from oled_moe.packing import pack_checkpoint

GOLDEN = Path(__file__).parent / "golden"
# A golden set, and what it is converted to where its metadata say all.
MODELS = {"llada_moe": "llada-moe", "rnd1": "rnd1", "llada2_a": "llada2", "llada2_b": "llada2"}
# These need the config.json beside them.
LOANS = {"sdar_moe": "qwen3moe", "llada2_a": "bailingmoe2"}
# Rows of whole blocks of 256, as K types have them.
WIDE: dict[str, Any] = {
    "model_type": "llada2_moe",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rotary_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "max_position_embeddings": 512,
    "vocab_size": 60,
    "mask_token_id": 57,
    "eos_token_id": 56,
    "pad_token_id": 56,
}


def golden(model: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config: dict[str, Any] = json.loads((GOLDEN / model / "config.json").read_text())
    return config, load_file(GOLDEN / model / "model.safetensors")


def check(path: Path, values: dict[str, Tensor], dtype: torch.dtype, first_layer: int) -> None:
    """Every weight of the files is that value, rounded to `dtype`, others than experts before."""
    weights, store = load_weights(path, dtype)
    records = Checkpoint.open(path).tensors
    for name, weight in weights.items():
        stored = values[name].to(records[name].dtype)
        assert torch.equal(weight, stored.to(weight.dtype)), name
    check_experts(store, values, first_layer)


def first_layer_of(config: dict[str, Any]) -> int:
    return int(config.get("first_k_dense_replace", 0))


# Types


@pytest.mark.parametrize("name", SCALES)
def test_values_of_blocks_are_those_of_the_package(name: str) -> None:
    kind = next(number for number, known in TYPES.items() if known.name == name)
    rows = random_blocks((7, 1024), Type(kind), seed=kind)
    found = GgufDecoder(TYPES[kind])([torch.from_numpy(rows)])
    expected = quants.dequantize(rows, Type(kind))
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert np.array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))
    assert len(np.unique(expected)) > 100


def test_the_types_are_those_of_the_package() -> None:
    for number, known in TYPES.items():
        assert Type(number).name == known.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (known.block_values, known.block_bytes)
    assert OTHER_TYPES == {int(kind): kind.name for kind in Type if int(kind) not in TYPES}, (
        "a type of the package that is neither read nor refused by name"
    )


# Models


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_1])
@pytest.mark.parametrize("model", MODELS)
def test_the_weights_are_those_that_were_written(model: str, kind: Type, tmp_path: Path) -> None:
    config, tensors = golden(model)
    path = tmp_path / "model.gguf"

    # Of model b the experts are too narrow for blocks; its converter would leave them as they are.
    def choose(name: str) -> Type:
        is_narrow = model == "llada2_b" and "ffn_down" in name
        return Type.F16 if is_narrow and kind not in (Type.F32, Type.BF16) else kind

    values = write_gguf(path, MODELS[model], tensors, config, choose)
    dtypes = {Type.F32: torch.float32, Type.F16: torch.float16}
    stored = dtypes.get(kind, torch.bfloat16)
    check(path, values, stored, first_layer_of(config))
    check(path, values, torch.float32, first_layer_of(config))
    if kind == Type.F32:
        assert all(torch.equal(values[name], tensors[name]) for name in tensors)
    summary = describe_checkpoint(path)
    assert summary.num_unused_tensors == 0
    assert summary.expert_dtype == str(stored).removeprefix("torch.")
    is_float = kind in (Type.F32, Type.F16, Type.BF16)
    assert summary.encoding is None if is_float else kind.name in str(summary.encoding)


@pytest.mark.parametrize("model", MODELS)
def test_the_config_is_that_of_the_model(model: str, tmp_path: Path) -> None:
    config, tensors = golden(model)
    path = tmp_path / "model.gguf"
    write_gguf(path, MODELS[model], tensors, config)
    checkpoint = Checkpoint.open(path)
    family = find_family(checkpoint.config)
    assert family.name == config["model_type"]
    # Layers without experts have a size there that nothing is read of here.
    assert family.config(checkpoint.config) == family.config(config)
    for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
        assert checkpoint.config[name] == config[name]


@pytest.mark.parametrize("model", ["llada_moe", "rnd1", "llada2_a", "sdar_moe"])
def test_the_answers_are_those_of_the_checkpoint(model: str, tmp_path: Path) -> None:
    config, tensors = golden(model)
    architecture = MODELS.get(model) or LOANS[model]
    write_gguf(tmp_path / "model.gguf", architecture, tensors, config)
    if model in LOANS:
        write_config(tmp_path, config)
    settings = EngineConfig(device="cpu", experts_per_layer=4, hardware=DEFAULT_PROFILE)
    answers = []
    for path in (GOLDEN / model, tmp_path, tmp_path / "model.gguf"):
        with Engine(path, settings) as engine:
            params = SamplingParams(max_tokens=16, ignore_eos=True)
            answers.append(engine.generate([5, 6, 7, 8], params).token_ids)
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 1


@pytest.mark.parametrize("model", LOANS)
def test_architectures_of_other_models_need_the_config(model: str, tmp_path: Path) -> None:
    config, tensors = golden(model)
    path = tmp_path / "model.gguf"
    values = write_gguf(path, LOANS[model], tensors, config, lambda _: Type.Q8_0)
    with pytest.raises(CheckpointError, match="put the config.json of the model.*beside it"):
        Checkpoint.open(path)
    write_config(tmp_path, {**config, "quantization_config": {"quant_method": "fp8"}})
    check(path, values, torch.bfloat16, first_layer_of(config))
    write_config(tmp_path, {**config, "model_type": "qwen3_moe"})
    with pytest.raises(CheckpointError, match="says model_type 'qwen3_moe'"):
        Checkpoint.open(path)


def mixed(name: str) -> Type:
    """As Q4_K_M has them: a better type for some layers' down and values."""
    if "ffn_down_exps" in name and name.startswith("blk.1."):
        return Type.Q6_K
    if name.startswith(("token_embd", "output.")):
        return Type.Q6_K
    if "shexp" in name:
        return Type.Q5_K
    return Type.Q3_K if "ffn_up_exps" in name else Type.Q4_K


def write_mixed(path: Path) -> dict[str, Tensor]:
    return write_gguf(path, "llada2", synthetic_llada2(WIDE, seed=3), WIDE, mixed)


def test_types_that_differ_between_layers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    values = write_mixed(path)
    check(path, values, torch.bfloat16, 1)
    check(path, values, torch.float32, 1)
    words = describe_checkpoint(path).encoding or ""
    assert words.startswith("GGUF, ") and {"Q4_K", "Q6_K", "Q3_K", "Q5_K", "F32"} <= set(
        words.removeprefix("GGUF, ").split(", ")
    )


def test_a_large_tensor_is_decoded_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = write_mixed(tmp_path / "model.gguf")
    monkeypatch.setattr("oled_moe.gguf_models._CHUNK_BYTES", 1000)
    record = Checkpoint.open(tmp_path).tensors["model.word_embeddings.weight"]
    assert isinstance(record, EncodedRecord)
    assert torch.equal(record.read(), values[record.name].to(torch.bfloat16))


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    config, tensors = golden("llada2_a")
    fused = {
        f"blk.{layer}.ffn_gate_up_exps.weight": torch.stack(
            [
                torch.cat([tensors[f"{at}.{expert}.{end}_proj.weight"] for end in ("gate", "up")])
                for expert in range(16)
            ]
        ).numpy()
        for layer in (1, 2, 3)
        for at in [f"model.layers.{layer}.mlp.experts"]
    }
    rest = {
        name: tensor
        for name, tensor in tensors.items()
        if ".mlp.experts." not in name or "down_proj" in name
    }
    write_gguf(tmp_path / "model.gguf", "llada2", rest, config, extra=fused)
    check(tmp_path, tensors, torch.float32, 1)


def test_a_tied_head(tmp_path: Path) -> None:
    config, tensors = golden("llada_moe")
    del tensors["lm_head.weight"]
    write_gguf(tmp_path / "model.gguf", "llada-moe", tensors, config)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.config["tie_word_embeddings"] is True
    check(tmp_path, tensors, torch.float32, 0)


def test_a_pack_of_a_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    values = write_mixed(source / "model.gguf")
    with pytest.raises(CheckpointError, match="has no config.json, which a pack carries"):
        pack_checkpoint(source / "model.gguf", tmp_path / "pack")
    write_config(source, WIDE)
    pack_checkpoint(source / "model.gguf", tmp_path / "pack")
    check(tmp_path / "pack", values, torch.bfloat16, 1)
    report = pack_checkpoint(source, tmp_path / "small", dtype="int4-g64")
    assert report.expert_dtype == "int4-g64"
    settings = EngineConfig(device="cpu", experts_per_layer=2, hardware=DEFAULT_PROFILE)
    with Engine(tmp_path / "small", settings) as engine:
        params = SamplingParams(max_tokens=16, block_length=16, ignore_eos=True)
        assert len(engine.generate([1, 2, 3], params).token_ids) == 16


def test_the_plan_counts_what_decoding_takes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_mixed(path)
    sizes = open_sizes(path).weights
    assert sizes.layout.weight_bytes == 3 * 256 * 256 * 2
    weights, store = load_weights(path, torch.bfloat16)
    assert sizes.dense_bytes == sum(weight.nbytes for weight in weights.values())
    assert store.scratch_bytes <= sizes.read_slots * sizes.layout.slot_bytes
    store.close()


def test_info_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_mixed(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN.parent.parent / "src" / "oled_moe" / "demo" / name, tmp_path)
    summary = describe_checkpoint(path)
    assert summary.has_tokenizer and summary.has_chat_template
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0, result.output
    assert "Q4_K" in result.output


# Files


def test_a_model_in_several_files(tmp_path: Path) -> None:
    config, tensors = golden("llada2_a")
    halves: list[dict[str, Tensor]] = [{}, {}]
    for name, tensor in tensors.items():
        halves["layers.2" in name][name] = tensor
    names = [f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        write_gguf(tmp_path / name, "llada2", half, config)
    for path in (tmp_path, tmp_path / names[0], tmp_path / names[1]):
        check(path, tensors, torch.float32, 1)
    write_gguf(tmp_path / names[1], "llada2", tensors, config)
    with pytest.raises(CheckpointError, match="is there twice"):
        Checkpoint.open(tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match="one of 2 files, of which 1 are not beside it"):
        Checkpoint.open(tmp_path)


def test_several_models(tmp_path: Path) -> None:
    config, tensors = golden("rnd1")
    for name in ("a-Q4_0.gguf", "b-Q8_0.gguf"):
        write_gguf(tmp_path / name, "rnd1", tensors, config)
    with pytest.raises(CheckpointError, match="2 models in GGUF.*a-Q4_0.gguf, b-Q8_0.gguf"):
        Checkpoint.open(tmp_path)
    (tmp_path / "a-Q4_0.gguf").rename(tmp_path / "mmproj-a.gguf")
    assert Checkpoint.open(tmp_path).path == tmp_path / "b-Q8_0.gguf"


def test_safetensors_go_first(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "rnd1", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert Checkpoint.open(tmp_path).path == tmp_path


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        Checkpoint.open(tmp_path / "model.gguf")


Change = Callable[[dict[str, Any]], object]


def put(key: str, value: Any) -> Change:
    return lambda metadata: metadata.update({key: value})


def drop(key: str) -> Change:
    return lambda metadata: metadata.pop(key)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("llada2.expert_group_count"), "lack llada2.expert_group_count; put the config.json"),
        (drop("llada2.rope.freq_base"), "lack llada2.rope.freq_base"),
        (put("llada2.block_count", "many"), "block_count is 'many'; allowed: a number"),
        (put("llada2.expert_count", True), "expert_count is True; allowed: a number"),
        (put("llada2.expert_gating_func", 1), "expert_gating_func is 1; allowed.*: 2"),
        (put("general.alignment", 24 + 1), "general.alignment 25"),
    ],
)
def test_metadata_that_do_not_do(change: Change, words: str, tmp_path: Path) -> None:
    config, tensors = golden("llada2_a")
    write_gguf(tmp_path / "model.gguf", "llada2", tensors, config, change=change)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def test_rotary_scaling_is_refused(tmp_path: Path) -> None:
    config, tensors = golden("llada2_a")
    change = put("llada2.rope.scaling.type", "yarn")
    write_gguf(tmp_path / "model.gguf", "llada2", tensors, config, change=change)
    with pytest.raises(CheckpointError, match="'yarn' rotary scaling"):
        describe_checkpoint(tmp_path)


def test_what_is_refused_by_name(tmp_path: Path) -> None:
    config, tensors = golden("rnd1")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "diffusion-gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'diffusion-gemma', which.*allowed: llada-moe, rnd1"):
        Checkpoint.open(path)
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    write_gguf(path, "rnd1", tensors, config, extra=extra)
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_sinks.weight' is none that a model"):
        Checkpoint.open(path)
    write_gguf(path, "rnd1", tensors, config, extra={"rope_freqs.weight": np.ones(4, np.int8)})
    with pytest.raises(CheckpointError, match="'rope_freqs.weight' is of type I8, which.*Q4_K"):
        Checkpoint.open(path)


# Damage


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of two tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "rnd1")
    writer.add_float32("rnd1.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    for name in ("first", "second"):
        kind = Type.Q8_0
        writer.add_tensor(name, encoded(np.ones((3, 32), np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_header(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small)
    header = read_gguf(path)
    assert header.metadata["rnd1.attention.layer_norm_rms_epsilon"] == 1e-6
    assert header.metadata["tokenizer.ggml.tokens"] is None
    expected = [
        (tensor.name, tuple(tensor.shape[::-1]), tensor.data_offset, tensor.n_bytes)
        for tensor in gguf.GGUFReader(path).tensors
    ]
    assert expected == [
        (tensor.name, tensor.shape, tensor.offset, tensor.num_bytes) for tensor in header.tensors
    ]


def replaced(content: bytes, name: bytes, skip: int, form: str, value: int) -> bytes:
    """With a number that lies `skip` bytes behind a name."""
    at = content.index(name) + len(name) + skip
    packed = struct.pack(form, value)
    return content[:at] + packed + content[at + len(packed) :]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: b"GGML" + c[4:], "does not begin as a GGUF file"),
        (lambda c: c[:4] + struct.pack("<I", 1) + c[8:], "of version 1; allowed"),
        (lambda c: c[:4] + struct.pack(">I", 3) + c[8:], "big-endian; allowed"),
        (lambda c: c[:8] + struct.pack("<Q", 2**40) + c[16:], "says that it has 1099511627776"),
        (lambda c: c[:24] + struct.pack("<Q", 2**30) + c[32:], "text has 1073741824 bytes"),
        (lambda c: c[:100], "ends within its header"),
        (lambda c: c[:-64], "ends at byte"),
        (lambda c: replaced(c, b"first", 0, "<I", 9), "'first' has 9 axes"),
        (lambda c: replaced(c, b"first", 4, "<Q", 33), "rows of 33 values.*blocks of 32"),
        (lambda c: replaced(c, b"first", 4, "<Q", 0), r"shape \[3, 0\]"),
        (lambda c: replaced(c, b"first", 4, "<Q", 2**62), "shape"),
        (lambda c: replaced(c, b"first", 20, "<I", 20), "type IQ4_NL, which"),
        (lambda c: replaced(c, b"first", 20, "<I", 99), "type number 99, which"),
        (lambda c: replaced(c, b"second", 24, "<Q", 0), "begins within another"),
        (lambda c: replaced(c, b"second", 24, "<Q", 256), "nothing fills the bytes before"),
        (lambda c: replaced(c, b"second", 24, "<Q", 129), "unaligned"),
    ],
)
def test_damaged_headers(
    change: Callable[[bytes], bytes], words: str, small: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(change(small))
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(path)


@given(position=st.integers(0, 10_000), value=st.integers(0, 255), length=st.integers(0, 10_000))
def test_no_damage_is_another_error(
    position: int, value: int, length: int, small: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(small)
    content[position % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content[: length % (4 * len(content))])
    try:
        header = read_gguf(path)
    except CheckpointError:
        return
    assert all(tensor.offset + tensor.num_bytes <= len(content) for tensor in header.tensors)
