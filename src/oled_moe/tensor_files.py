"""Files of weights in the safetensors format, and the JSON files beside them, read with suspicion.

A header proves that the tensors fill their file exactly. Every fault is a CheckpointError.

    file   | header length, 8 bytes little-endian | header, JSON | tensors, without gaps |
"""

import json
import math
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from oled_moe.errors import CheckpointError
from oled_moe.store import drop_cached, memory_of, read_exactly

MAX_HEADER_BYTES = 100_000_000
_READ_CHUNK_BYTES = 64 * 2**20
_DAMAGED = "the file is damaged or incomplete, download it again"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """What a header calls a dtype."""
    return _NAMES[dtype]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies. Units: `offset` in bytes from the start of the file.

    `checksum`: the CRC-32 of its bytes, where whoever wrote the file told it.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: int | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes in its file, whatever it becomes when it is read."""
        return self.num_bytes

    def read(self) -> Tensor:
        """Read it into memory of its own.

        Raises: CheckpointError where it cannot be read or is damaged.
        """
        memory = torch.empty(self.num_bytes, dtype=torch.uint8)
        checksum = 0
        for start in range(0, self.num_bytes, _READ_CHUNK_BYTES):
            chunk = memory[start : start + _READ_CHUNK_BYTES]
            self.read_range(start, chunk)
            if self.checksum is not None:
                checksum = zlib.crc32(memory_of(chunk), checksum)
        self._compare(checksum)
        return memory.view(self.dtype).view(self.shape)

    def verify(self, buffer: Tensor) -> None:
        """Read it through a buffer and compare its checksum, where there is one.

        Shapes: buffer uint8, one-dimensional, of any size above 0. Raises: as `read`.
        """
        if self.checksum is None:
            return
        checksum = 0
        for start in range(0, self.num_bytes, len(buffer)):
            chunk = buffer[: self.num_bytes - start]
            self.read_range(start, chunk)
            checksum = zlib.crc32(memory_of(chunk), checksum)
        self._compare(checksum)

    def read_range(self, start: int, target: Tensor) -> None:
        """Fill `target`, uint8, with its bytes from `start` on, unchecked.

        Raises: CheckpointError where they cannot be read.
        """
        with open_file(self.path) as descriptor:
            try:
                read_exactly(descriptor, self.offset + start, [memory_of(target)])
            except EOFError as error:
                raise damaged(self.path, f"tensor {self.name!r}: {error}") from None
            drop_cached(descriptor, self.offset + start, len(target))

    def _compare(self, checksum: int) -> None:
        if self.checksum is not None and checksum != self.checksum:
            raise CheckpointError(
                f"{self.path}: tensor {self.name!r} is not what was packed: the file is damaged, "
                "pack the model again"
            )


def read_header(path: Path) -> tuple[dict[str, TensorRecord], int]:
    """The tensors of a safetensors file and the size of the file.

    Raises: CheckpointError unless the tensors fill the file exactly, without gap or overlap.
    """
    with open_file(path) as descriptor:
        num_file_bytes = os.fstat(descriptor).st_size
        if num_file_bytes < 8:
            raise damaged(path, f"has {num_file_bytes} bytes and no header")
        length = int.from_bytes(read_bytes(descriptor, path, 0, 8), "little")
        if length > MAX_HEADER_BYTES or 8 + length > num_file_bytes:
            raise damaged(
                path,
                f"says that its header has {length} bytes; allowed: up to {MAX_HEADER_BYTES} "
                f"and what the file of {num_file_bytes} bytes can hold",
            )
        header = parse_json(read_bytes(descriptor, path, 8, length), f"{path}: header")
    header.pop("__metadata__", None)
    start = 8 + length
    records = [_parse_record(path, start, name, entry) for name, entry in header.items()]
    _check_contiguous(path, records, start, num_file_bytes)
    return {record.name: record for record in records}, num_file_bytes


def _parse_record(path: Path, start: int, name: str, entry: Any) -> TensorRecord:
    where = f"tensor {name!r:.200}"
    if not isinstance(entry, dict):
        raise damaged(path, f"{where} is not described by an object")
    named, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    dtype = _DTYPES.get(named) if isinstance(named, str) else None
    if dtype is None:
        raise CheckpointError(
            f"{path}: {where} has dtype {named!r:.80}; allowed: {', '.join(_DTYPES)}; "
            "use a checkpoint with weights in BF16, F16 or F32"
        )
    if not _is_shape(shape):
        raise damaged(path, f"{where} has shape {shape!r:.80}; allowed: whole numbers from 0")
    if not _is_offsets(offsets):
        raise damaged(path, f"{where} has data_offsets {offsets!r:.80}; allowed: [begin, end]")
    begin, end = offsets
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise damaged(
            path,
            f"{where} takes {end - begin} bytes, but {named} of shape {shape} takes {num_bytes}",
        )
    return TensorRecord(name, path, dtype, tuple(shape), start + begin, num_bytes)


def _is_sizes(value: Any, max_length: int) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= max_length
        and all(type(size) is int and 0 <= size < 2**63 for size in value)
    )


def _is_shape(value: Any) -> TypeGuard[list[int]]:
    """Whether a tensor can have this shape: torch counts strides even where a size is 0."""
    return _is_sizes(value, 64) and math.prod(max(size, 1) for size in value) < 2**60


def _is_offsets(value: Any) -> TypeGuard[list[int]]:
    return _is_sizes(value, 2) and len(value) == 2 and value[0] <= value[1]


def _check_contiguous(
    path: Path, records: Iterable[TensorRecord], start: int, num_file_bytes: int
) -> None:
    end = start
    for record in sorted(records, key=lambda record: (record.offset, record.num_bytes)):
        if record.offset < end:
            raise damaged(path, f"tensor {record.name!r} overlaps the one before it")
        if record.offset > end:
            raise damaged(path, f"nothing fills the bytes before tensor {record.name!r}")
        end += record.num_bytes
        if end > num_file_bytes:
            raise damaged(
                path,
                f"tensor {record.name!r} ends at byte {end}, the file at byte {num_file_bytes}",
            )
    if end < num_file_bytes:
        raise damaged(path, f"{num_file_bytes - end} bytes after the last tensor belong to none")


def read_json_file(path: Path, *, is_unique: bool = False) -> dict[str, Any]:
    return parse_json(read_file(path), str(path), is_unique=is_unique)


def parse_json(text: bytes | bytearray, where: str, *, is_unique: bool = True) -> dict[str, Any]:
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique_keys if is_unique else None
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not valid JSON ({error}); download the file again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is not a JSON object; download the file again")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"{max(counts, key=counts.__getitem__)!r:.200} is there twice")
    return values


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    """A descriptor to read from; what the system reports meanwhile becomes a CheckpointError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} is not a regular file; put the downloaded file there")
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); check that it exists and is readable"
        ) from error


def read_file(path: Path) -> bytes:
    """A whole small file. Raises: CheckpointError."""
    with open_file(path) as descriptor:
        return bytes(read_bytes(descriptor, path, 0, os.fstat(descriptor).st_size))


def read_bytes(descriptor: int, path: Path, offset: int, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    try:
        read_exactly(descriptor, offset, [memoryview(content)])
    except EOFError as error:
        raise damaged(path, str(error)) from None
    return content


def damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; {_DAMAGED}")
