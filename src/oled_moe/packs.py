"""Packed checkpoints: a manifest that names every file, every expert and their checksums.

The format is docs/pack-format.md. `open_pack` proves that small files and all headers are those
that were packed, and that the files hold what the manifest names and nothing else; weights are
compared with their checksums when they are read. Every fault is a CheckpointError.
"""

import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from oled_moe.errors import CheckpointError
from oled_moe.quantization import LAYOUT_VERSION, QuantSpec
from oled_moe.store import PAGE_BYTES, ExpertLayout, FileSpan
from oled_moe.tensor_files import TensorRecord, open_file, read_bytes, read_file, read_header

MANIFEST_NAME = "oled_pack.json"
DENSE_NAME = "dense.safetensors"
FORMAT = "oled-moe pack"
# A change of names, files or of how a slot is laid out needs another number.
FORMAT_VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def experts_name(layer: int) -> str:
    """The file that holds the experts of a layer, counting MoE layers from 0."""
    return f"experts-{layer:05d}.safetensors"


def expert_tensor(layer: int, expert: int) -> str:
    """The tensor that is the slot of an expert."""
    return f"layers.{layer}.experts.{expert}"


class FileSum(NamedTuple):
    """Bytes of a file, and the CRC-32 of all of them or of its header."""

    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class PackManifest:
    """What a pack holds.

    `copies`: files taken over as they were. `weights`: safetensors files, with the checksum of
    their header. `dense`: the checksum of each tensor that is no expert. `experts[layer][expert]`:
    the checksum of each slot, padding included. `method`: how weights were rounded to integers,
    None where they were not.
    """

    layout: ExpertLayout
    method: str | None
    copies: Mapping[str, FileSum]
    weights: Mapping[str, FileSum]
    dense: Mapping[str, int]
    experts: tuple[tuple[int, ...], ...]

    @property
    def num_layers(self) -> int:
        return len(self.experts)

    @property
    def num_experts(self) -> int:
        """Of one layer."""
        return len(self.experts[0])

    def to_bytes(self) -> bytes:
        """The one text that this manifest has; it ends with its own checksum."""
        values = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "layout": layout_to_dict(self.layout, self.method),
            "copies": _sums_to_dict(self.copies),
            "weights": _sums_to_dict(self.weights),
            "dense": {name: _hex(checksum) for name, checksum in self.dense.items()},
            "experts": [" ".join(map(_hex, layer)) for layer in self.experts],
        }
        return _text({**values, "checksum": _hex(zlib.crc32(_text(values)))})

    @classmethod
    def read(cls, path: Path) -> "PackManifest":
        """Raises: CheckpointError for another version, and where a single byte was changed."""
        content = read_file(path)
        try:
            values = json.loads(content.decode("utf-8"))
            if not isinstance(values, dict):
                raise TypeError
            version = values.get("version")
            if values.get("format") == FORMAT and version != FORMAT_VERSION:
                raise CheckpointError(
                    f"{path}: the pack has format version {version!r:.20}; allowed: "
                    f"{FORMAT_VERSION}; pack the model again with this version of oled-moe"
                )
            manifest = cls._parse(values)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _damaged(path) from None
        if manifest.to_bytes() != content:
            raise _damaged(path)
        return manifest

    @classmethod
    def _parse(cls, values: Mapping[str, Any]) -> "PackManifest":
        layout, method = layout_from_dict(values["layout"])
        experts = tuple(tuple(map(_number, layer.split())) for layer in values["experts"])
        if not experts or len({len(layer) for layer in experts}) != 1 or not experts[0]:
            raise ValueError
        return cls(
            layout,
            method,
            _sums_from_dict(values["copies"]),
            _sums_from_dict(values["weights"]),
            {name: _number(checksum) for name, checksum in values["dense"].items()},
            experts,
        )


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack whose headers have been read: where the slot of each expert lies."""

    path: Path
    manifest: PackManifest
    spans: tuple[tuple[FileSpan, ...], ...]

    @property
    def layout(self) -> ExpertLayout:
        return self.manifest.layout

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts as they are stored."""
        return self.manifest.num_layers * self.manifest.num_experts * self.layout.slot_bytes

    def slots(self) -> Iterator[TensorRecord]:
        """The slots of all experts as tensors."""
        for layer, (spans, sums) in enumerate(zip(self.spans, self.manifest.experts, strict=True)):
            for expert, (span, checksum) in enumerate(zip(spans, sums, strict=True)):
                name, shape = expert_tensor(layer, expert), (span.num_bytes,)
                yield TensorRecord(name, span.path, torch.uint8, shape, *span[1:], checksum)


def open_pack(directory: Path) -> tuple[Pack, dict[str, TensorRecord], dict[Path, int]]:
    """Read the manifest and all headers: the pack, its other tensors, and the size of each file.

    Raises: CheckpointError where a small file or a header is not the one that was packed.
    """
    manifest = PackManifest.read(directory / MANIFEST_NAME)
    files = _tensors_of(manifest)
    _check_names(directory / MANIFEST_NAME, manifest, files)
    for name, expected in manifest.copies.items():
        content = read_file(directory / name)
        if FileSum(len(content), zlib.crc32(content)) != expected:
            raise _changed(directory / name)
    tensors: dict[str, TensorRecord] = {}
    spans, file_bytes = [], {}
    for name, wanted in files.items():
        path = directory / name
        records, file_bytes[path] = read_header(path)
        if _header_sum(path, records, file_bytes[path]) != manifest.weights[name]:
            raise _changed(path)
        _check_tensors(path, wanted, records)
        if name == DENSE_NAME:
            for each, checksum in manifest.dense.items():
                tensors[each] = replace(records[each], checksum=checksum)
        else:
            spans.append(tuple(_slot_span(records[slot], manifest) for slot in wanted))
    return Pack(directory, manifest, tuple(spans)), tensors, file_bytes


def _tensors_of(manifest: PackManifest) -> dict[str, Sequence[str]]:
    """Which tensors lie in which file."""
    files: dict[str, Sequence[str]] = {DENSE_NAME: list(manifest.dense)}
    for layer in range(manifest.num_layers):
        experts = range(manifest.num_experts)
        files[experts_name(layer)] = [expert_tensor(layer, expert) for expert in experts]
    return files


def _check_names(path: Path, manifest: PackManifest, files: Collection[str]) -> None:
    """Raises: CheckpointError where a manifest names other files than a pack has."""
    if wrong := manifest.weights.keys() ^ set(files):
        raise CheckpointError(
            f"{path}: names weights that are not those of its {manifest.num_layers} layers: "
            f"{min(wrong):.200}; {_AGAIN}"
        )
    if "config.json" not in manifest.copies:
        raise CheckpointError(f"{path}: names no config.json; {_AGAIN}")


def _check_tensors(path: Path, wanted: Collection[str], found: Collection[str]) -> None:
    """Raises: CheckpointError where a file has other tensors than the manifest says."""
    for name in sorted({*wanted} ^ {*found}):
        what = "is missing" if name in wanted else f"is not in {MANIFEST_NAME}"
        raise CheckpointError(f"{path}: tensor {name!r:.200} {what}; {_AGAIN}")


_AGAIN = "pack the model again"


def _slot_span(record: TensorRecord, manifest: PackManifest) -> FileSpan:
    is_slot = record.dtype == torch.uint8 and record.shape == (manifest.layout.slot_bytes,)
    if not is_slot or record.offset % PAGE_BYTES:
        raise CheckpointError(f"{record.path}: tensor {record.name!r} is no slot; {_AGAIN}")
    return FileSpan(record.path, record.offset, record.num_bytes)


def _header_sum(path: Path, records: Mapping[str, TensorRecord], num_bytes: int) -> FileSum:
    """The tensors fill what is behind the header, so it ends where the first of them begins."""
    end = min((record.offset for record in records.values()), default=num_bytes)
    with open_file(path) as descriptor:
        return FileSum(num_bytes, zlib.crc32(read_bytes(descriptor, path, 0, end)))


def expert_dtype_name(layout: ExpertLayout) -> str:
    """How experts are stored: `bfloat16`, `int4-g64`."""
    return str(layout.dtype).removeprefix("torch.") if layout.quant is None else str(layout.quant)


def layout_to_dict(layout: ExpertLayout, method: str | None) -> dict[str, Any]:
    """A layout as JSON values."""
    quant = layout.quant
    return {
        "dtype": str(layout.dtype).removeprefix("torch."),
        "hidden_size": layout.hidden_size,
        "intermediate_size": layout.intermediate_size,
        "slot_bytes": layout.slot_bytes,
        "quant": None if quant is None else str(quant),
        "quant_layout": None if quant is None else LAYOUT_VERSION,
        "method": method,
    }


def layout_from_dict(values: Mapping[str, Any]) -> tuple[ExpertLayout, str | None]:
    """The layout and the method of rounding. Raises: KeyError, TypeError, ValueError."""
    hidden_size, intermediate_size = values["hidden_size"], values["intermediate_size"]
    if not all(type(size) is int and 0 < size < 2**24 for size in (hidden_size, intermediate_size)):
        raise ValueError
    quant = None if values["quant"] is None else QuantSpec.parse(values["quant"])
    if quant is not None and values["quant_layout"] != LAYOUT_VERSION:
        raise CheckpointError(
            f"{MANIFEST_NAME}: experts have the quantised layout {values['quant_layout']!r:.20}; "
            f"allowed: {LAYOUT_VERSION}; {_AGAIN} with this version of oled-moe"
        )
    method = values["method"]
    if (method is None) != (quant is None) or not isinstance(method, str | None):
        raise ValueError
    layout = ExpertLayout(hidden_size, intermediate_size, DTYPES[values["dtype"]], quant=quant)
    return layout, method


def _text(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=True) + "\n").encode("ascii")


def _hex(checksum: int) -> str:
    return f"{checksum:08x}"


def _number(checksum: str) -> int:
    if len(checksum) != 8:
        raise ValueError
    return int(checksum, 16)


def _sums_to_dict(sums: Mapping[str, FileSum]) -> dict[str, Any]:
    return {
        name: {"num_bytes": entry.num_bytes, "checksum": _hex(entry.checksum)}
        for name, entry in sums.items()
    }


def _sums_from_dict(values: Mapping[str, Any]) -> dict[str, FileSum]:
    sums = {}
    for name, entry in values.items():
        if not name or name.startswith(".") or {"/", "\\"} & set(name) or not name.isprintable():
            raise ValueError
        if type(entry["num_bytes"]) is not int:
            raise ValueError
        sums[name] = FileSum(entry["num_bytes"], _number(entry["checksum"]))
    return sums


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: is not what was packed: it is damaged or edited; {_AGAIN}")


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: is damaged or edited; {_AGAIN}")
