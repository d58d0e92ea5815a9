"""The header of a GGUF file, read with suspicion: its metadata, and where each tensor lies.

Versions 2 and 3, little-endian. Arrays of the metadata are skipped: they hold the vocabulary,
which tokenizer.json says better. Every fault is a CheckpointError.
Source: ggml, docs/gguf.md.

    file   | GGUF, version, counts | metadata | tensors: name, size, type, offset | pad | weights |
"""

import io
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from oled_moe.errors import CheckpointError
from oled_moe.gguf_types import OTHER_TYPES, TYPES, GgufType
from oled_moe.tensor_files import damaged, open_file

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ENTRIES = 2**20
_MAX_TEXT_BYTES = 2**26
# By the number that stands for a kind of value: how one is written.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_FLOAT32, _TEXT, _ARRAY = 6, 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. Units: `offset` in bytes from the start of the file.

    `shape` is as torch has it, the axis whose values are neighbours last.
    """

    name: str
    path: Path
    type: GgufType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the values along the last axis."""
        return self.shape[-1] // self.type.block_values * self.type.block_bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says before its weights."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    num_file_bytes: int


def read_gguf(path: Path) -> GgufHeader:
    """The header of a file.

    Raises: CheckpointError unless the tensors fill the rest of it, but for padding.
    """
    with open_file(path) as descriptor:
        num_file_bytes = os.fstat(descriptor).st_size
        with open(descriptor, "rb", buffering=2**20, closefd=False) as file:
            reader = _Reader(path, file, num_file_bytes)
            version, num_tensors, num_values = reader.begin()
            metadata = dict(reader.entry() for _ in range(num_values))
            if len(metadata) < num_values:
                raise damaged(path, "a key of its metadata is there twice")
            alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
            if type(alignment) is not int or not 0 < alignment < 2**20 or alignment % 8:
                raise damaged(path, f"has general.alignment {alignment!r:.40}")
            found = [reader.tensor() for _ in range(num_tensors)]
            start = -(-reader.position // alignment) * alignment
    tensors = tuple(
        GgufTensor(name, path, kind, shape, start + offset) for name, kind, shape, offset in found
    )
    _check_places(path, tensors, start, alignment, num_file_bytes)
    return GgufHeader(metadata, tensors, num_file_bytes)


class _Reader:
    """What lies one after another in a header; nothing is trusted to be as long as it says."""

    def __init__(self, path: Path, file: BinaryIO, num_file_bytes: int) -> None:
        self.position = 0
        self._path = path
        self._file = file
        self._num_file_bytes = num_file_bytes

    def begin(self) -> tuple[int, int, int]:
        """Version, and how many tensors and metadata follow."""
        if self._take(4) != MAGIC:
            raise damaged(self._path, "does not begin as a GGUF file does")
        version = self._number("I")
        if version not in _VERSIONS:
            kind = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise CheckpointError(
                f"{self._path} is a GGUF file {kind}; allowed: little-endian, version 2 or 3; "
                "convert the model anew"
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        if max(num_tensors, num_values) > _MAX_ENTRIES:
            raise damaged(
                self._path,
                f"says that it has {num_tensors} tensors and {num_values} metadata; allowed: up to "
                f"{_MAX_ENTRIES} of each",
            )
        return version, num_tensors, num_values

    def entry(self) -> tuple[str, Any]:
        """A key and its value, None for an array."""
        key = self._text()
        kind = self._number("I")
        if kind == _ARRAY:
            self._skip_array(key)
            return key, None
        return key, self._value(key, kind)

    def tensor(self) -> tuple[str, GgufType, tuple[int, ...], int]:
        """Name, type, shape, and offset from the first weight."""
        name = self._text()
        num_axes = self._number("I")
        if not 1 <= num_axes <= 4:
            raise damaged(self._path, f"tensor {name!r:.200} has {num_axes} axes")
        shape = tuple(self._number("Q") for _ in range(num_axes))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            raise CheckpointError(
                f"{self._path}: tensor {name!r:.200} is of type "
                f"{OTHER_TYPES.get(kind, f'number {kind}')}, which this version does not read; "
                f"allowed: {', '.join(known.name for known in TYPES.values())}; take another "
                "quantisation of the model"
            )
        block = TYPES[kind].block_values
        if not all(0 < size < 2**40 for size in shape) or prod(shape) >= 2**50:
            raise damaged(self._path, f"tensor {name!r:.200} has shape {list(shape)}")
        if shape[-1] % block:
            raise damaged(
                self._path,
                f"tensor {name!r:.200} of type {TYPES[kind].name} has rows of {shape[-1]} values, "
                f"which are not whole blocks of {block}",
            )
        return name, TYPES[kind], shape, offset

    def _value(self, key: str, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind not in _SCALARS:
            raise damaged(self._path, f"{key!r:.200} is a value of kind {kind}")
        value = self._number(_SCALARS[kind])
        # The shortest number that is this float32: 1e-06, not 9.999999974752427e-07.
        return _shortest(value) if kind == _FLOAT32 else value

    def _skip_array(self, key: str) -> None:
        kind, length = self._number("I"), self._number("Q")
        if kind in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[kind]))
        elif kind == _TEXT and length <= self._num_file_bytes // 8:
            for _ in range(length):
                self._skip(self._number("Q"))
        else:
            raise damaged(self._path, f"{key!r:.200} is {length} values of kind {kind}")

    def _text(self) -> str:
        length = self._number("Q")
        if length > _MAX_TEXT_BYTES:
            raise damaged(self._path, f"says that a text has {length} bytes")
        return self._take(length).decode("utf-8", "replace")

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _take(self, num_bytes: int) -> bytes:
        self._advance(num_bytes)
        content = self._file.read(num_bytes)
        if len(content) < num_bytes:
            raise damaged(self._path, "ends within its header")
        return content

    def _skip(self, num_bytes: int) -> None:
        self._advance(num_bytes)
        self._file.seek(num_bytes, io.SEEK_CUR)

    def _advance(self, num_bytes: int) -> None:
        self.position += num_bytes
        if self.position > self._num_file_bytes:
            raise damaged(self._path, "ends within its header")


def _shortest(value: float) -> float:
    """Of the numbers that are this one in float32, that with the fewest digits."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.unpack("<f", struct.pack("<f", short))[0] == value:
                return short
        except OverflowError:
            continue
    return value


def _check_places(
    path: Path, tensors: Iterable[GgufTensor], start: int, alignment: int, num_file_bytes: int
) -> None:
    """Raises: CheckpointError where tensors overlap, leave gaps, or are there twice."""
    end, names = start, set()
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.name in names:
            raise damaged(path, f"tensor {tensor.name!r:.200} is there twice")
        names.add(tensor.name)
        if tensor.offset < end or tensor.offset % alignment:
            raise damaged(path, f"tensor {tensor.name!r:.200} begins within another, or unaligned")
        if tensor.offset - end >= alignment:
            raise damaged(path, f"nothing fills the bytes before tensor {tensor.name!r:.200}")
        end = tensor.offset + tensor.num_bytes
        if end > num_file_bytes:
            raise damaged(
                path,
                f"tensor {tensor.name!r:.200} ends at byte {end}, the file at byte "
                f"{num_file_bytes}",
            )
