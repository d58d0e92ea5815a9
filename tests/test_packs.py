"""Manifests of packs: rewritten ones, whose own checksum is right, still have to fit the files."""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import load_weights
from safetensors.torch import load_file, save_file
from test_packing import CONFIG, write_source

from oled_moe.checkpoint import Checkpoint
from oled_moe.errors import CheckpointError
from oled_moe.inspection import describe_checkpoint, verify_pack
from oled_moe.packing import pack_checkpoint
from oled_moe.packs import MANIFEST_NAME, PackManifest
from oled_moe.tensor_files import read_header

Values = dict[str, Any]
LAST = "experts-00001.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed")
    pack_checkpoint(write_source(path / "source"), path / "pack", dtype="int8")
    return path / "pack"


@pytest.fixture
def pack(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "pack"))


def text(values: Values) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def rewrite(pack: Path, change: Callable[[Values], object]) -> None:
    """Change a manifest as somebody would who knows its format."""
    path = pack / MANIFEST_NAME
    values = json.loads(path.read_bytes())
    del values["checksum"]
    change(values)
    values["checksum"] = f"{zlib.crc32(text(values)):08x}"
    path.write_bytes(text(values))


def entry_of(path: Path, *, is_header: bool) -> Values:
    """What a manifest says of a file."""
    content = path.read_bytes()
    if is_header:
        records, _ = read_header(path)
        content = content[: min(record.offset for record in records.values())]
    return {"num_bytes": path.stat().st_size, "checksum": f"{zlib.crc32(content):08x}"}


def load_all(path: Path) -> None:
    load_weights(path)[1].close()


def inspect(path: Path) -> None:
    describe_checkpoint(path)
    verify_pack(path)


def check_refused(pack: Path, words: str) -> None:
    for check in (describe_checkpoint, load_all):
        with pytest.raises(CheckpointError, match=words):
            check(pack)


def test_rewriting_alone_is_no_fault(pack: Path) -> None:
    rewrite(pack, lambda values: None)
    inspect(pack)
    load_all(pack)


def drop_expert(values: Values) -> None:
    values["experts"] = [layer.rpartition(" ")[0] for layer in values["experts"]]


def add_expert(values: Values) -> None:
    values["experts"] = [f"{layer} 00000000" for layer in values["experts"]]


def drop_file(values: Values) -> None:
    del values["weights"][LAST]


def drop_layer(values: Values) -> None:
    drop_file(values)
    values["experts"].pop()


CHANGES: dict[str, tuple[Callable[[Values], object], str]] = {
    "a layer": (lambda values: values["experts"].pop(), "names weights that are not those"),
    "a layer and its file": (drop_layer, "holds 1 layers of 6.*config.json asks for 2 of 6"),
    "a layer more": (lambda values: values["experts"].append(values["experts"][0]), "names weig"),
    "a file": (drop_file, "names weights that are not those of its 2 layers: .*experts-00001"),
    "a file more": (
        lambda values: values["weights"].update({"more.safetensors": values["weights"][LAST]}),
        "names weights that are not those",
    ),
    "an expert": (drop_expert, r"'layers\.0\.experts\.5' .*is not in oled_pack"),
    "an expert more": (add_expert, r"'layers\.0\.experts\.6' is missing"),
    "a parameter": (lambda values: values["dense"].pop(NORM), f"{NORM}.*is not in oled_pack"),
    "a parameter more": (
        lambda values: values["dense"].update({"model.more": "00000000"}),
        r"'model\.more' is missing",
    ),
    "a parameter of another name": (
        lambda values: values["dense"].update({"layers.1.experts.3": values["dense"].pop(NORM)}),
        "is not in oled_pack|is missing",
    ),
    "the config": (lambda values: values["copies"].pop("config.json"), "names no config.json"),
    "another size": (lambda values: values["layout"].update(hidden_size=24), "damaged"),
    "another number": (lambda values: values["layout"].update(hidden_size=True), "damaged"),
    "a method of plain numbers": (lambda values: values["layout"].update(method=None), "damaged"),
    "a method that is none": (lambda values: values["layout"].update(method=[1]), "damaged"),
    "a fraction": (
        lambda values: values["copies"]["README.md"].update(num_bytes=6.0),
        "damaged",
    ),
    "a place outside": (
        lambda values: values["copies"].update({"../x": values["copies"]["README.md"]}),
        "damaged",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_manifest_that_does_not_fit(what: str, pack: Path) -> None:
    change, words = CHANGES[what]
    rewrite(pack, change)
    check_refused(pack, words)


def test_a_layer_that_config_and_manifest_lack(pack: Path) -> None:
    """Cut out of both alike it is a smaller model, which lacks nothing."""

    def change(values: Values) -> None:
        drop_layer(values)
        (pack / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
        values["copies"]["config.json"] = entry_of(pack / "config.json", is_header=False)

    rewrite(pack, change)
    inspect(pack)
    load_all(pack)


def test_parameters_that_were_taken_out_of_the_file_too(pack: Path) -> None:
    path = pack / "dense.safetensors"
    tensors = load_file(path)
    del tensors[NORM]
    save_file(tensors, path)

    def change(values: Values) -> None:
        del values["dense"][NORM]
        values["weights"]["dense.safetensors"] = entry_of(path, is_header=True)

    rewrite(pack, change)
    check_refused(pack, f"missing.*{NORM}|{NORM}.*missing")


def test_a_parameter_of_another_shape(pack: Path) -> None:
    path = pack / "dense.safetensors"
    tensors = load_file(path)
    tensors[NORM] = tensors[NORM].reshape(4, 5)
    save_file(tensors, path)
    entry = entry_of(path, is_header=True)
    rewrite(pack, lambda values: values["weights"].update({"dense.safetensors": entry}))
    check_refused(pack, rf"'{NORM}' has shape \[4, 5\], config.json asks for \[20\]")


def test_an_expert_in_the_file_of_another_layer(pack: Path) -> None:
    """Files swapped, names and all: every slot is there, in the wrong file."""
    first = pack / "experts-00000.safetensors"
    last, away = pack / LAST, pack / "away"
    first.rename(away)
    last.rename(first)
    away.rename(last)

    def change(values: Values) -> None:
        weights = values["weights"]
        for path in (first, last):
            weights[path.name] = entry_of(path, is_header=True)

    rewrite(pack, change)
    check_refused(pack, "experts-00000.*'layers.0.experts.0' is missing")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b"{" * 100_000, b'{"format": "oled-moe pack"}', b"null"]
)
def test_what_is_no_manifest(content: bytes, pack: Path) -> None:
    (pack / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{MANIFEST_NAME}: "):
        Checkpoint.open(pack)


def test_a_manifest_that_is_a_directory(pack: Path) -> None:
    (pack / MANIFEST_NAME).unlink()
    (pack / MANIFEST_NAME).mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        Checkpoint.open(pack)


def test_links_to_the_files_do(packed: Path, tmp_path: Path) -> None:
    """As caches of models have them."""
    for path in packed.iterdir():
        (tmp_path / path.name).symlink_to(path)
    inspect(tmp_path)
    load_all(tmp_path)
    assert PackManifest.read(tmp_path / MANIFEST_NAME).num_layers == 2
