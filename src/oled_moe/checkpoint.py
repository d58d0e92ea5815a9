"""Reads checkpoints: a directory with config.json and weights in the safetensors format.

`Checkpoint.open` reads JSON and headers only and proves that every tensor lies within its file;
`read_weights` proves that the tensors are those a model needs, and only then reads weights.
Weights are read, never mapped, and leave the page cache again. Every fault is a CheckpointError.

Legend: D hidden size, F hidden size of one expert, E experts per layer.

    file   | header length, 8 bytes little-endian | header, JSON | tensors, without gaps |
"""

import json
import logging
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from oled_moe.config import check_choice
from oled_moe.errors import CheckpointError, ModelNotFoundError
from oled_moe.store import (
    READ_METHODS,
    Activation,
    DiskExpertStore,
    ExpertLayout,
    ExpertPart,
    FileSpan,
    Matrix,
    PlacedSpan,
    drop_cached,
    memory_of,
    read_exactly,
)

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_READ_CHUNK_BYTES = 64 * 2**20
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
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

# What a checkpoint tensor becomes: the parameter of that name, a part of an expert, or nothing
# (known and not needed). An unknown tensor raises KeyError.
WeightMap = Callable[[str], str | ExpertPart | None]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies. Units: `offset` in bytes from the start of the file."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers have been read; `file_bytes` holds the size of each file."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorRecord]
    file_bytes: Mapping[Path, int]

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Read the configuration and the headers in a directory.

        Raises: ModelNotFoundError where no checkpoint is; CheckpointError where one is that
        cannot be read.
        """
        directory = Path(path)
        names = _list_directory(directory)
        if "config.json" not in names:
            raise ModelNotFoundError(
                f"{directory} has no config.json; name the directory of a checkpoint, "
                "as it was downloaded"
            )
        config = _read_json_file(directory / "config.json")
        generation_config = {}
        if "generation_config.json" in names:
            generation_config = _read_json_file(directory / "generation_config.json")
        if INDEX_NAME in names:
            tensors, file_bytes = _read_sharded(directory)
        else:
            file = _find_single_file(directory, names)
            tensors, num_bytes = read_header(file)
            file_bytes = {file: num_bytes}
        return cls(directory, config, generation_config, tensors, file_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.num_bytes for record in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor into memory of its own.

        Raises: CheckpointError where it is not in the checkpoint or cannot be read.
        """
        record = self.tensors.get(name)
        if record is None:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}; download it again")
        memory = torch.empty(record.num_bytes, dtype=torch.uint8)
        with _open_file(record.path) as descriptor:
            for start in range(0, record.num_bytes, _READ_CHUNK_BYTES):
                chunk = memory[start : start + _READ_CHUNK_BYTES]
                offset = record.offset + start
                try:
                    read_exactly(descriptor, offset, [memory_of(chunk)])
                except EOFError as error:
                    raise _damaged(record.path, f"tensor {name!r}: {error}") from None
                drop_cached(descriptor, offset, len(chunk))
        return memory.view(record.dtype).view(record.shape)


def read_weights(
    checkpoint: Checkpoint,
    *,
    map_weight: WeightMap,
    shapes: Mapping[str, tuple[int, ...]],
    num_moe_layers: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype | None,
    keep_dtype: Collection[str],
    method: str,
    activation: Activation = "silu",
) -> tuple[dict[str, Tensor], DiskExpertStore]:
    """Read the parameters named in `shapes`, and find where each routed expert lies.

    `dtype` is what weights are converted to, None keeps each as stored; so do the parameters in
    `keep_dtype` in any case. `activation` is what experts do to their gate. `method` is how the
    store reads (see DiskExpertStore). Everything is checked before the first weight is read, and at
    most one tensor is held beyond the result.

    Raises: CheckpointError where a tensor is missing, is there twice, or has another shape or a
    dtype that is not supported.
    """
    check_choice("method", method, READ_METHODS)
    parameters, parts = _assign_tensors(checkpoint, map_weight, shapes)
    _check_parameters(checkpoint, parameters, shapes)
    size = _ExpertSize(num_moe_layers, num_experts, hidden_size, intermediate_size)
    stored_dtype = _common_dtype(checkpoint, parts)
    spans = _place_experts(checkpoint, parts, size, stored_dtype)
    weights = {}
    for name in shapes:
        weight = checkpoint.read(parameters[name].name)
        weights[name] = weight if dtype is None or name in keep_dtype else weight.to(dtype)
    layout = ExpertLayout(hidden_size, intermediate_size, dtype or stored_dtype, activation)
    store = DiskExpertStore(layout, spans, stored_dtype=stored_dtype, method=method)
    return weights, store


def read_header(path: Path) -> tuple[dict[str, TensorRecord], int]:
    """The tensors of a safetensors file and the size of the file.

    Raises: CheckpointError unless the tensors fill the file exactly, without gap or overlap.
    """
    with _open_file(path) as descriptor:
        num_file_bytes = os.fstat(descriptor).st_size
        if num_file_bytes < 8:
            raise _damaged(path, f"has {num_file_bytes} bytes and no header")
        length = int.from_bytes(_read_bytes(descriptor, path, 0, 8), "little")
        if length > MAX_HEADER_BYTES or 8 + length > num_file_bytes:
            raise _damaged(
                path,
                f"says that its header has {length} bytes; allowed: up to {MAX_HEADER_BYTES} "
                f"and what the file of {num_file_bytes} bytes can hold",
            )
        header = _parse_json(_read_bytes(descriptor, path, 8, length), f"{path}: header")
    header.pop("__metadata__", None)
    start = 8 + length
    records = [_parse_record(path, start, name, entry) for name, entry in header.items()]
    _check_contiguous(path, records, start, num_file_bytes)
    return {record.name: record for record in records}, num_file_bytes


def _parse_record(path: Path, start: int, name: str, entry: Any) -> TensorRecord:
    where = f"tensor {name!r:.200}"
    if not isinstance(entry, dict):
        raise _damaged(path, f"{where} is not described by an object")
    dtype_name, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    dtype = _DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(
            f"{path}: {where} has dtype {dtype_name!r:.80}; allowed: {', '.join(_DTYPES)}; "
            "use a checkpoint with weights in BF16, F16 or F32"
        )
    if not _is_shape(shape):
        raise _damaged(path, f"{where} has shape {shape!r:.80}; allowed: whole numbers from 0")
    if not _is_offsets(offsets):
        raise _damaged(path, f"{where} has data_offsets {offsets!r:.80}; allowed: [begin, end]")
    begin, end = offsets
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise _damaged(
            path,
            f"{where} takes {end - begin} bytes, but {dtype_name} of shape {shape} "
            f"takes {num_bytes}",
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
            raise _damaged(path, f"tensor {record.name!r} overlaps the one before it")
        if record.offset > end:
            raise _damaged(path, f"nothing fills the bytes before tensor {record.name!r}")
        end += record.num_bytes
        if end > num_file_bytes:
            raise _damaged(
                path,
                f"tensor {record.name!r} ends at byte {end}, the file at byte {num_file_bytes}",
            )
    if end < num_file_bytes:
        raise _damaged(path, f"{num_file_bytes - end} bytes after the last tensor belong to none")


def _read_sharded(directory: Path) -> tuple[dict[str, TensorRecord], dict[Path, int]]:
    index_path = directory / INDEX_NAME
    weight_map = _read_json_file(index_path, is_unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged(index_path, "has no weight_map from tensor names to files")
    for name, shard in weight_map.items():
        _check_shard_name(index_path, name, shard)
    shards = {}
    file_bytes = {}
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        if not os.path.lexists(path):
            raise CheckpointError(f"{path} is missing, {INDEX_NAME} names it; download it again")
        shards[shard], file_bytes[path] = read_header(path)
    tensors = {}
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{directory / shard} does not hold tensor {name!r}, which {INDEX_NAME} says "
                "is there; download both again"
            )
        tensors[name] = shards[shard][name]
    return tensors, file_bytes


def _check_shard_name(index_path: Path, name: str, shard: Any) -> None:
    is_plain = (
        isinstance(shard, str)
        and shard.isprintable()
        and not {"/", "\\"} & set(shard)
        and shard.endswith(".safetensors")
    )
    if not is_plain:
        raise CheckpointError(
            f"{index_path}: tensor {name!r} is said to be in {shard!r:.200}; allowed: the name of "
            "a *.safetensors file in the same directory"
        )


def _find_single_file(directory: Path, names: Sequence[str]) -> Path:
    if SINGLE_NAME in names:
        return directory / SINGLE_NAME
    found = [name for name in names if name.endswith(".safetensors")]
    if len(found) == 1:
        return directory / found[0]
    if found:
        raise CheckpointError(
            f"{directory} has {len(found)} *.safetensors files and no {INDEX_NAME}, which says "
            "what is in which; download it too"
        )
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        raise CheckpointError(
            f"{directory} has weights in pickle files only ({pickles[0]}), which can run code "
            "when read; only *.safetensors files are read: load it with transformers and store it "
            "with save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"{directory} has no *.safetensors file; download the weights too")


def _list_directory(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except NotADirectoryError:
        raise CheckpointError(
            f"{directory} is a file; name the directory that holds it and config.json"
        ) from None
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"there is no directory {directory}; name the directory of a downloaded checkpoint"
        ) from None
    except ValueError:
        raise ModelNotFoundError(f"{str(directory)!r} cannot be the path of a directory") from None
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be listed ({error.strerror}); check its permissions"
        ) from error


def _read_json_file(path: Path, *, is_unique: bool = False) -> dict[str, Any]:
    with _open_file(path) as descriptor:
        text = _read_bytes(descriptor, path, 0, os.fstat(descriptor).st_size)
    return _parse_json(text, str(path), is_unique=is_unique)


def _parse_json(text: bytearray, where: str, *, is_unique: bool = True) -> dict[str, Any]:
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
def _open_file(path: Path) -> Iterator[int]:
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


def _read_bytes(descriptor: int, path: Path, offset: int, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    try:
        read_exactly(descriptor, offset, [memoryview(content)])
    except EOFError as error:
        raise _damaged(path, str(error)) from None
    return content


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; {_DAMAGED}")


# What read_weights checks.


@dataclass(frozen=True, slots=True)
class _ExpertSize:
    """What the experts of a model should be."""

    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int

    def shape(self, part: ExpertPart) -> tuple[int, ...]:
        sizes = {
            "gate": (self.intermediate_size, self.hidden_size),
            "up": (self.intermediate_size, self.hidden_size),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }
        stacked = (self.num_experts,) if part.expert is None else ()
        return (*stacked, *sizes[part.matrix])

    def experts(self, part: ExpertPart) -> Iterable[int]:
        return range(self.num_experts) if part.expert is None else (part.expert,)


Parts = Sequence[tuple[TensorRecord, ExpertPart]]


def _assign_tensors(
    checkpoint: Checkpoint, map_weight: WeightMap, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, TensorRecord], Parts]:
    """Tell parameters from parts of experts; warn of tensors that are neither."""
    parameters: dict[str, TensorRecord] = {}
    parts: list[tuple[TensorRecord, ExpertPart]] = []
    unused: list[str] = []
    for name, record in checkpoint.tensors.items():
        try:
            target = map_weight(name)
        except KeyError:
            unused.append(repr(name))
            continue
        if target is None:
            continue
        if isinstance(target, ExpertPart):
            parts.append((record, target))
        elif target in parameters:
            raise CheckpointError(
                f"{checkpoint.path}: tensors {parameters[target].name!r} and {name!r} are both "
                f"meant for {target}; allowed: one of them"
            )
        elif target in shapes:
            parameters[target] = record
        else:
            unused.append(repr(name))
    if unused:
        logger.warning(
            "%d tensors are not used by this architecture: %s", len(unused), _first(unused)
        )
    return parameters, parts


def _check_parameters(
    checkpoint: Checkpoint,
    parameters: Mapping[str, TensorRecord],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    missing = [name for name in shapes if name not in parameters]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} of {len(shapes)} parameters are missing: "
            f"{_first(missing)}; download the weights and config.json again"
        )
    for name, shape in shapes.items():
        _check_tensor(parameters[name], tuple(shape))


def _common_dtype(checkpoint: Checkpoint, parts: Parts) -> torch.dtype:
    if not parts:
        raise CheckpointError(
            f"{checkpoint.path} holds no routed experts; allowed: mixture-of-experts checkpoints"
        )
    first = parts[0][0]
    for record, _ in parts:
        if record.dtype != first.dtype:
            raise CheckpointError(
                f"{checkpoint.path}: experts differ in dtype, {first.name!r} is "
                f"{_name(first.dtype)}, {record.name!r} is {_name(record.dtype)}; "
                "convert all experts to one"
            )
    return first.dtype


def _place_experts(
    checkpoint: Checkpoint, parts: Parts, size: _ExpertSize, dtype: torch.dtype
) -> list[list[list[PlacedSpan]]]:
    """For each layer and expert, which bytes go where in a slot of this dtype."""
    layout = ExpertLayout(size.hidden_size, size.intermediate_size, dtype)
    targets = {
        "gate": 0,
        "up": layout.matrix_bytes,
        "gate_up": 0,
        "down": layout.down_offset,
    }
    owners: dict[tuple[int, int, Matrix], TensorRecord] = {}
    spans: list[list[list[PlacedSpan]]] = [
        [[] for _ in range(size.num_experts)] for _ in range(size.num_layers)
    ]
    for record, part in parts:
        _check_part(record, part, size)
        num_bytes = layout.matrix_bytes * len(_covered(part.matrix))
        for position, expert in enumerate(size.experts(part)):
            for matrix in _covered(part.matrix):
                other = owners.setdefault((part.layer, expert, matrix), record)
                if other is not record:
                    raise CheckpointError(
                        f"{checkpoint.path}: tensors {other.name!r} and {record.name!r} both hold "
                        f"the {matrix} matrix of one expert; allowed: one of them"
                    )
            span = FileSpan(record.path, record.offset + position * num_bytes, num_bytes)
            spans[part.layer][expert].append((span, targets[part.matrix]))
    _check_complete(checkpoint, owners, size)
    return spans


def _covered(matrix: Matrix) -> tuple[Matrix, ...]:
    return ("gate", "up") if matrix == "gate_up" else (matrix,)


def _check_part(record: TensorRecord, part: ExpertPart, size: _ExpertSize) -> None:
    is_known = 0 <= part.layer < size.num_layers
    if part.expert is not None:
        is_known = is_known and 0 <= part.expert < size.num_experts
    if not is_known:
        raise CheckpointError(
            f"{record.path}: tensor {record.name!r} belongs to an expert that config.json does "
            f"not have; it says {size.num_layers} MoE layers of {size.num_experts} experts: "
            "download both again"
        )
    _check_tensor(record, size.shape(part))


def _check_tensor(record: TensorRecord, shape: tuple[int, ...]) -> None:
    if record.shape != shape:
        raise CheckpointError(
            f"{record.path}: tensor {record.name!r} has shape {list(record.shape)}, config.json "
            f"asks for {list(shape)}; they are not of one model, download both again"
        )
    if record.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"{record.path}: tensor {record.name!r} is {_name(record.dtype)}; allowed: "
            f"{', '.join(map(_name, WEIGHT_DTYPES))}; use a checkpoint that is not quantized"
        )


def _check_complete(
    checkpoint: Checkpoint,
    owners: Collection[tuple[int, int, Matrix]],
    size: _ExpertSize,
) -> None:
    matrices: tuple[Matrix, ...] = ("gate", "up", "down")
    missing = [
        f"{matrix} of layer {layer}, expert {expert}"
        for layer in range(size.num_layers)
        for expert in range(size.num_experts)
        for matrix in matrices
        if (layer, expert, matrix) not in owners
    ]
    if missing:
        total = 3 * size.num_layers * size.num_experts
        raise CheckpointError(
            f"{checkpoint.path}: {len(missing)} of {total} expert matrices are missing: "
            f"{_first(missing)} (counting MoE layers from 0); "
            "download the weights and config.json again"
        )


def _first(names: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    return f"{shown}, …" if len(names) > limit else shown


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
