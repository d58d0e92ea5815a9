"""Checkpoints: every layout gives the same model, every fault a CheckpointError."""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Convention, synthetic_llada2, write_checkpoint
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from oled_moe.checkpoint import INDEX_NAME, Checkpoint, read_weights
from oled_moe.errors import CheckpointError, ConfigError, ModelNotFoundError
from oled_moe.store import DiskExpertStore, ExpertPart, aligned_empty
from oled_moe.tensor_files import read_header

CONFIG = {
    "model_type": "llada2_moe",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "vocab_size": 40,
    "mask_token_id": 37,
}
NUM_MOE_LAYERS, NUM_EXPERTS = 2, 8
CONVENTIONS: tuple[Convention, ...] = ("single", "llada20", "llada21", "merged")
EXPERT = re.compile(
    r"model\.layers\.(\d+)\.mlp\.experts\.(?:(\d+)\.)?(gate|up|gate_up|down)_proj\.weight"
)
BIAS = "model.layers.1.mlp.gate.expert_bias"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"
NORM = "model.norm.weight"


def map_weight(name: str) -> str | ExpertPart | None:
    """Parameters are called as in the checkpoint."""
    match = EXPERT.fullmatch(name)
    if match:
        expert = None if match[2] is None else int(match[2])
        return ExpertPart(int(match[1]) - 1, expert, match[3])
    if name.endswith("rotary_emb.inv_freq"):
        return None
    if name.startswith(("model.", "lm_head.")):
        return name
    raise KeyError(name)


def make_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    return synthetic_llada2(CONFIG, dtype=dtype, seed=5)


SHAPES = {
    name: tuple(tensor.shape)
    for name, tensor in make_tensors().items()
    if not EXPERT.fullmatch(name)
}


def load(path: Path, **changes: Any) -> tuple[dict[str, Tensor], DiskExpertStore]:
    arguments: dict[str, Any] = {
        "map_weight": map_weight,
        "shapes": SHAPES,
        "num_moe_layers": NUM_MOE_LAYERS,
        "num_experts": NUM_EXPERTS,
        "hidden_size": CONFIG["hidden_size"],
        "intermediate_size": CONFIG["moe_intermediate_size"],
        "dtype": None,
        "keep_dtype": (),
        "method": "buffered",
    }
    return read_weights(Checkpoint.open(path), **(arguments | changes))


def check_experts(store: DiskExpertStore, tensors: Mapping[str, Tensor]) -> None:
    slot = aligned_empty(store.layout.slot_bytes)
    for layer in range(NUM_MOE_LAYERS):
        for expert in range(NUM_EXPERTS):
            store.read_into(layer, expert, slot)
            weights = store.layout.views(slot)
            gate, up, down = (
                tensors[f"model.layers.{layer + 1}.mlp.experts.{expert}.{matrix}_proj.weight"]
                for matrix in ("gate", "up", "down")
            )
            assert torch.equal(weights.gate_up, torch.cat([gate, up]).to(store.layout.dtype))
            assert torch.equal(weights.down, down.to(store.layout.dtype))


# What is right.


@pytest.mark.parametrize("method", ["direct", "buffered"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_layout_gives_the_same_model(
    tmp_path: Path, convention: Convention, dtype: torch.dtype | None, method: str
) -> None:
    tensors = make_tensors()
    write_checkpoint(tmp_path, tensors, CONFIG, convention=convention)
    weights, store = load(tmp_path, dtype=dtype, keep_dtype={BIAS}, method=method)
    assert weights.keys() == SHAPES.keys()
    for name, weight in weights.items():
        expected = tensors[name] if name == BIAS or dtype is None else tensors[name].to(dtype)
        assert weight.dtype == expected.dtype and torch.equal(weight, expected)
    assert weights[BIAS].dtype == torch.float32
    assert store.layout.dtype == (dtype or torch.bfloat16)
    check_experts(store, tensors)
    store.close()


def test_conventions_are_those_of_the_released_files(tmp_path: Path) -> None:
    old = write_checkpoint(tmp_path / "20", make_tensors(), CONFIG, convention="llada20")
    new = write_checkpoint(tmp_path / "21", make_tensors(), CONFIG, convention="llada21")
    assert (old / "model-00001-of-00003.safetensors").exists()
    assert (new / "model-00000-of-00003.safetensors").exists()

    def num_files_of_experts(path: Path) -> list[int]:
        files: dict[str, set[Path]] = {}
        for name, record in Checkpoint.open(path).tensors.items():
            if EXPERT.fullmatch(name):
                files.setdefault(name.rsplit(".", 2)[0], set()).add(record.path)
        return [len(paths) for paths in files.values()]

    assert max(num_files_of_experts(old)) == 2
    assert max(num_files_of_experts(new)) == 1


@pytest.mark.parametrize("is_stacked", [True, False])
def test_gate_and_up_as_one_tensor(tmp_path: Path, is_stacked: bool) -> None:
    tensors = make_tensors()
    fused = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    for layer in (1, 2):
        at = f"model.layers.{layer}.mlp.experts"
        gate_ups, downs = [], []
        for expert in range(NUM_EXPERTS):
            matrices = [tensors[f"{at}.{expert}.{m}_proj.weight"] for m in ("gate", "up", "down")]
            gate_ups.append(torch.cat(matrices[:2]))
            downs.append(matrices[2])
            if not is_stacked:
                fused[f"{at}.{expert}.gate_up_proj.weight"] = gate_ups[-1]
                fused[f"{at}.{expert}.down_proj.weight"] = downs[-1]
        if is_stacked:
            fused[f"{at}.gate_up_proj.weight"] = torch.stack(gate_ups)
            fused[f"{at}.down_proj.weight"] = torch.stack(downs)
    write_checkpoint(tmp_path, fused, CONFIG)
    _, store = load(tmp_path)
    check_experts(store, tensors)
    store.close()


def test_what_inspect_shows(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_checkpoint(
        tmp_path, tensors, CONFIG, convention="llada20", generation_config={"eos_token_id": 36}
    )
    checkpoint = Checkpoint.open(str(tmp_path))
    assert checkpoint.path == tmp_path
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": 36}
    assert checkpoint.tensors.keys() == tensors.keys()
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert checkpoint.file_bytes == {
        path: path.stat().st_size for path in tmp_path.glob("*.safetensors")
    }


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_tensors(), CONFIG)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.tensors) == len(make_tensors())
    assert checkpoint.generation_config == {}


def test_the_index_wins_over_a_single_file(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_checkpoint(tmp_path, tensors, CONFIG, convention="llada21")
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).tensors.keys() == tensors.keys()


def test_every_dtype_and_odd_shapes(tmp_path: Path) -> None:
    names = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8"
    tensors = {
        name: torch.arange(6).reshape(2, 3).to(getattr(torch, name))
        for name in f"{names} uint8 bool".split()
    }
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(4, 0), "long": torch.ones(999)}
    write_checkpoint(tmp_path, tensors, CONFIG)
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in tensors.items():
        loaded = checkpoint.read(name)
        assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape
        assert torch.equal(loaded.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_unused_tensors_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {f"vision.{i}": torch.ones(1) for i in range(5)}
    extra |= {"model.other": torch.ones(1), "model.rotary_emb.inv_freq": torch.ones(1)}
    write_checkpoint(tmp_path, make_tensors() | extra, CONFIG)
    with caplog.at_level(logging.WARNING):
        _, store = load(tmp_path)
    store.close()
    (record,) = caplog.records
    assert "6 tensors are not used" in record.getMessage()
    assert "'model.other'" in record.getMessage() and "inv_freq" not in record.getMessage()


# What is wrong with the tensors.


def fused_too(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.3.gate_up_proj.weight"] = torch.zeros(
        12, 16, dtype=torch.bfloat16
    )


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "parameter missing": (
        lambda tensors: tensors.pop(NORM),
        r"1 of \d+ parameters are missing: model\.norm\.weight",
    ),
    "matrix missing": (
        lambda tensors: tensors.pop(UP),
        r"1 of 48 expert matrices are missing: up of layer 0, expert 3 ",
    ),
    "parameter of other shape": (
        lambda tensors: tensors.update({NORM: torch.ones(17)}),
        r"'model\.norm\.weight' has shape \[17\], config\.json asks for \[16\]",
    ),
    "matrix transposed": (
        lambda tensors: tensors.update({UP: tensors[UP].T.contiguous()}),
        r"experts\.3\.up_proj\.weight' has shape \[16, 6\], config\.json asks for \[6, 16\]",
    ),
    "matrix of other dtype": (
        lambda tensors: tensors.update({UP: tensors[UP].float()}),
        r"experts differ in dtype.*'model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight'",
    ),
    "quantized parameter": (
        lambda tensors: tensors.update({NORM: torch.ones(16).to(torch.float8_e4m3fn)}),
        r"'model\.norm\.weight' is float8_e4m3fn; allowed: float32, float16, bfloat16",
    ),
    "quantized experts": (
        lambda tensors: tensors.update(
            {n: t.to(torch.int8) for n, t in tensors.items() if EXPERT.fullmatch(n)}
        ),
        r"is int8; allowed: float32, float16, bfloat16",
    ),
    "more experts": (
        lambda tensors: tensors.update({UP.replace(".3.", ".8."): tensors[UP]}),
        r"experts\.8\.up_proj\.weight' belongs to an expert that config\.json does not have",
    ),
    "more layers": (
        lambda tensors: tensors.update({UP.replace(".1.", ".3."): tensors[UP].clone()}),
        r"2 MoE layers of 8 experts",
    ),
    "matrix twice": (fused_too, r"both hold the gate matrix of one expert"),
    "no experts": (
        lambda tensors: [tensors.pop(n) for n in list(tensors) if EXPERT.fullmatch(n)],
        r"holds no routed experts",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensor_faults_are_found_before_anything_is_read(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = make_tensors()
    break_tensors, message = TENSOR_FAULTS[fault]
    break_tensors(tensors)
    write_checkpoint(tmp_path, {n: t.contiguous().clone() for n, t in tensors.items()}, CONFIG)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("read before checked"))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_two_tensors_for_one_parameter(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_tensors() | {"norm": torch.ones(16)}, CONFIG)
    with pytest.raises(CheckpointError, match=r"both meant for model\.norm\.weight"):
        load(tmp_path, map_weight=lambda name: NORM if name == "norm" else map_weight(name))


def test_unknown_method_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_tensors(), CONFIG)
    with pytest.raises(ConfigError, match="direct, buffered"):
        load(tmp_path, method="mmap")


# What is wrong with the files.


def write_file(path: Path, header: object, content: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def entry(begin: Any, end: Any, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADER_FAULTS: dict[str, tuple[object, str]] = {
    "not JSON": (b"{'a'", "is not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "is not valid JSON"),
    "not an object": (b"[]", "is not a JSON object"),
    "too deep": (b'{"a":' + b"[" * 100_000, "is not valid JSON"),
    "same name twice": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        "'a' is there twice",
    ),
    "tensor not an object": ({"a": [0, 8]}, "tensor 'a' is not described"),
    "unknown dtype": ({"a": entry(0, 8, "F4")}, "tensor 'a' has dtype 'F4'; allowed: .*BF16"),
    "dtype not a name": ({"a": entry(0, 8, ["F32"])}, r"dtype \['F32'\]"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "dtype None"),
    "negative size": ({"a": entry(0, 8, shape=[-1, -2])}, "tensor 'a' has shape"),
    "size not whole": ({"a": entry(0, 8, shape=[2.0])}, "tensor 'a' has shape"),
    "size a bool": ({"a": entry(0, 4, shape=[True])}, "tensor 'a' has shape"),
    "shape too large": ({"a": entry(0, 0, shape=[0, 2**62, 2**62])}, "tensor 'a' has shape"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, "shape None"),
    "negative offset": ({"a": entry(-8, 0, shape=[2])}, "tensor 'a' has data_offsets"),
    "offsets reversed": ({"a": entry(8, 0, shape=[2])}, "tensor 'a' has data_offsets"),
    "offset not whole": ({"a": entry(0, 8.0, shape=[2])}, "tensor 'a' has data_offsets"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, "data_offsets None"),
    "span of other size": ({"a": entry(0, 8, shape=[3])}, "takes 8 bytes, but F32 of .* takes 12"),
    "overlap": ({"a": entry(0, 8, shape=[2]), "b": entry(4, 8)}, "'b' overlaps"),
    "gap": ({"a": entry(4, 8)}, "nothing fills the bytes before tensor 'a'"),
    "beyond the end": ({"a": entry(0, 12, shape=[3])}, r"ends at byte \d+, the file at byte"),
    "beyond any file": ({"a": entry(0, 2**62, shape=[2**58, 4])}, "tensor 'a'"),
    "rest": ({"a": entry(0, 4)}, "4 bytes after the last tensor"),
}


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_header_faults(tmp_path: Path, fault: str) -> None:
    header, message = HEADER_FAULTS[fault]
    write_file(tmp_path / "model.safetensors", header, b"8 bytes.")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(tmp_path)
    assert "model.safetensors" in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [0, 1, 2**63, 100_000_001, 10_000])
def test_header_length_faults(tmp_path: Path, length: int) -> None:
    (tmp_path / "file").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError):
        read_header(tmp_path / "file")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("good"), make_tensors(), CONFIG)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    return write_checkpoint(directory, make_tensors(), CONFIG, convention="llada20")


def copy(path: Path, target: Path) -> Path:
    shutil.copytree(path, target, dirs_exist_ok=True)
    return target


def test_truncated_anywhere(good: Path, tmp_path: Path) -> None:
    path = copy(good, tmp_path) / "model.safetensors"
    content = path.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    cuts = {0, 1, 7, 8, 9, header_end // 2, header_end - 1, header_end, header_end + 1}
    for cut in cuts | {len(content) - 2, len(content) - 1}:
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*download"):
            Checkpoint.open(tmp_path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=8)), max_size=4),
    st.integers(0, 10),
)
@example([(0, b"\0" * 8)], 0)
def test_random_damage_is_an_error_or_harmless(
    tmp_path: Path, damage: list[tuple[int, bytes]], num_cut: int
) -> None:
    tensors = {"a": torch.ones(3, 4), "b": torch.zeros(5, dtype=torch.int64), "c": torch.ones(())}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    content = bytearray(path.read_bytes())
    for position, piece in damage:
        position %= len(content)
        content[position : position + len(piece)] = piece
    path.write_bytes(content[: len(content) - num_cut])
    (tmp_path / "config.json").write_text("{}")
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except CheckpointError as error:
        assert "model.safetensors" in str(error)
        return
    for name, record in checkpoint.tensors.items():
        tensor = checkpoint.read(name)
        assert tuple(tensor.shape) == record.shape and tensor.nbytes == record.num_bytes


def change_index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    [
        *("../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..", "", "\0"),
        *("a\\b.safetensors", "pytorch_model.bin", "\ud800.safetensors", 7, None, ["a"], {"a": 1}),
    ],
)
def test_index_names_no_plain_file(sharded: Path, tmp_path: Path, name: Any) -> None:
    copy(sharded, tmp_path)
    change_index(tmp_path, lambda weight_map: weight_map.update({NORM: name}))
    with pytest.raises(CheckpointError, match=r"index\.json: tensor 'model\.norm\.weight'"):
        Checkpoint.open(tmp_path)


def test_index_names_missing_file(sharded: Path, tmp_path: Path) -> None:
    copy(sharded, tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing"):
        Checkpoint.open(tmp_path)
    change_index(tmp_path, lambda weight_map: weight_map.update({NORM: "9" * 300 + ".safetensors"}))
    with pytest.raises(CheckpointError, match="is missing"):
        Checkpoint.open(tmp_path)


def test_index_names_tensor_that_is_not_there(sharded: Path, tmp_path: Path) -> None:
    copy(sharded, tmp_path)
    shard = "model-00001-of-00003.safetensors"
    change_index(tmp_path, lambda weight_map: weight_map.update({"ghost": shard}))
    with pytest.raises(CheckpointError, match=f"{shard} does not hold tensor 'ghost'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *('{"weight_map": {}}', '{"weight_map": []}', "{}", "[]", "", "{", "null"),
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    ],
)
def test_index_that_is_no_index(sharded: Path, tmp_path: Path, text: str) -> None:
    copy(sharded, tmp_path)
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(tmp_path)


def test_damaged_shard(sharded: Path, tmp_path: Path) -> None:
    path = copy(sharded, tmp_path) / "model-00003-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: tensor"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"text"', b'{"a": "\xff"}', b"9" * 9999])
def test_bad_json_file(good: Path, tmp_path: Path, name: str, content: bytes) -> None:
    (copy(good, tmp_path) / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is not"):
        Checkpoint.open(tmp_path)


# What is wrong with the place.


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", f"{tmp_path}/\0", "\ud800"):
        with pytest.raises(ModelNotFoundError):
            Checkpoint.open(path)
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        Checkpoint.open(tmp_path)


def test_path_of_a_file(good: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file; name the directory"):
        Checkpoint.open(good / "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickle_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"only \*\.safetensors files are read.*save_pretr"):
        Checkpoint.open(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file"):
        Checkpoint.open(tmp_path)


def test_several_files_without_index(sharded: Path, tmp_path: Path) -> None:
    (copy(sharded, tmp_path) / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"has 3 .* files and no {INDEX_NAME}"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_not_a_regular_file(
    good: Path, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    path = copy(good, tmp_path) / name
    path.unlink()
    make(path)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        Checkpoint.open(tmp_path)


def test_unreadable_file(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read \(Permission denied"):
        Checkpoint.open(good)


def test_unreadable_directory(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be listed \(Permission denied"):
        Checkpoint.open(good)


# What goes wrong after opening.


def test_file_deleted_after_opening(good: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(copy(good, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        checkpoint.read(NORM)


def test_file_truncated_after_opening(good: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(copy(good, tmp_path))
    record = checkpoint.tensors[NORM]
    os.truncate(record.path, record.offset + record.num_bytes - 1)
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight': the file ends"):
        checkpoint.read(NORM)


def test_reading_a_tensor_that_is_not_there(good: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tensor 'ghost'"):
        Checkpoint.open(good).read("ghost")
