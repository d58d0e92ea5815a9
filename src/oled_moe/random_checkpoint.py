"""Random checkpoints of a given shape: real in size and layout, meaningless in value.

Written shard by shard in a hidden directory beside the place, which is renamed when all is there:
whatever happens meanwhile, nothing that looks finished is left, and the next call goes on with the
shards that are complete. One process writes, others wait for it.

    shard 1      | embeddings, head, attention, norms, dense layers, routers |
    shard 2 + n  | experts of MoE layer n: gate, up, down of each, one behind the other, or, as
                   the family has them, gate and up of all, and down of all |

Values come from one pool of random numbers, taken at another offset for every tensor.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from oled_moe.checkpoint import INDEX_NAME
from oled_moe.config import format_size
from oled_moe.errors import CheckpointError, DoesNotFitError, OledMoeError
from oled_moe.models import Family, ModelConfig, find_family
from oled_moe.store import PAGE_BYTES, ExpertPart, drop_cached, memory_of

# Marks config.json and every shard; a change of names, values or layout needs another number.
VERSION = 1
MARK = "oled_moe_random_checkpoint"
_CONFIG_NAME = "config.json"
_VALUE_BYTES = 2
_POOL_VALUES = 48 * 2**20
_DRAWN_VALUES = 2**22
_STD = 0.02
# Written and dropped from the page cache at a time.
_CHUNK_BYTES = 64 * 2**20
# Left free on the disk: other programs want to write too.
_SPARE_BYTES = 2**30

# Norms, and what else multiplies.
_SCALE_NAME = re.compile(r"(norm(_\d)?\.weight|scale|scalar)$")

Pool = npt.NDArray[np.uint8]
# Is told (what, bytes done, bytes in all).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor to be written, in bfloat16."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * _VALUE_BYTES


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One file to be written."""

    file_name: str
    tensors: tuple[TensorSpec, ...]

    def header(self) -> bytes:
        """The head of the file, padded so that the first tensor begins at a whole page."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", MARK: str(VERSION)}}
        start = 0
        for tensor in self.tensors:
            end = start + tensor.num_bytes
            entries[tensor.name] = {
                "dtype": "BF16",
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE_BYTES)
        return len(text).to_bytes(8, "little") + text

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.header()) + sum(tensor.num_bytes for tensor in self.tensors)


def checkpoint_shards(config: Mapping[str, Any]) -> list[ShardSpec]:
    """The files of a checkpoint of this config.json, in Hugging Face names and shards.

    In each shard tensors of whole pages come first, so that these begin at whole pages.
    Raises: CheckpointError for a config that no family here reads, or whose experts are named
    otherwise than here: a tensor for each matrix, or for all of a layer's of one kind.
    """
    family = find_family(config)
    model = family.config(config)
    shapes = family.parameter_shapes(model)
    dense = [TensorSpec(name, shape) for name, shape in shapes.items()]
    dense.sort(key=lambda tensor: tensor.num_bytes % PAGE_BYTES != 0)
    num_files = 1 + model.num_moe_layers
    shards = [ShardSpec(_shard_name(1, num_files), tuple(dense))]
    for number, tensors in enumerate(_expert_layers(family, model), start=2):
        shards.append(ShardSpec(_shard_name(number, num_files), tuple(tensors)))
    if len(shards) != num_files:
        raise CheckpointError(
            f"config.json: model_type is {family.name!r}, whose experts have names that random "
            "checkpoints are not written with; take another shape"
        )
    return shards


def _expert_layers(family: Family, model: ModelConfig) -> Iterator[Iterator[TensorSpec]]:
    """The tensors of each MoE layer's experts, by the first names that the family knows."""
    weight_map = family.weight_map(model)
    for layer in range(model.num_layers):
        for prefix, first, tensors in (
            (f"model.layers.{layer}.mlp.experts", "0.gate_proj.weight", _expert_tensors),
            (f"model.decoder.layers.{layer}.experts", "gate_up_proj", _stacked_tensors),
        ):
            with suppress(KeyError, CheckpointError):
                if isinstance(weight_map(f"{prefix}.{first}"), ExpertPart):
                    yield tensors(prefix, model)
                    break


def _expert_tensors(prefix: str, model: ModelConfig) -> Iterator[TensorSpec]:
    """The matrices of all experts of a layer, each expert's side by side."""
    size = (model.moe_intermediate_size, model.hidden_size)
    for expert in range(model.num_experts):
        for matrix, shape in (("gate", size), ("up", size), ("down", size[::-1])):
            yield TensorSpec(f"{prefix}.{expert}.{matrix}_proj.weight", shape)


def _stacked_tensors(prefix: str, model: ModelConfig) -> Iterator[TensorSpec]:
    """The matrices of all experts of a layer, one tensor for each kind."""
    num, inner, hidden = model.num_experts, model.moe_intermediate_size, model.hidden_size
    yield TensorSpec(f"{prefix}.gate_up_proj", (num, 2 * inner, hidden))
    yield TensorSpec(f"{prefix}.down_proj", (num, hidden, inner))


def checkpoint_bytes(config: Mapping[str, Any]) -> int:
    """What the files of such a checkpoint take on the disk, but for two small JSON files."""
    return sum(shard.num_bytes for shard in checkpoint_shards(config))


def default_directory() -> Path:
    """Where random checkpoints are kept."""
    return Path.home() / ".cache" / "oled-moe" / "shapes"


def make_random_checkpoint(
    config: Mapping[str, Any],
    path: Path,
    *,
    progress: Progress | None = None,
    free_bytes: Callable[[Path], int] | None = None,
) -> Path:
    """Write a random checkpoint of `config` at `path`, unless it is there already; returns `path`.

    `free_bytes` says what a directory's disk has room for; None asks the system.

    Raises: DoesNotFitError where the disk is too small, CheckpointError where something else is at
    `path`, OledMoeError where it cannot be written.
    """
    config = {**config, MARK: VERSION}
    shards = checkpoint_shards(config)
    if _is_there(path, config, shards):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_writer(path, progress):
            # Whoever wrote while this waited may have been writing the same.
            if not _is_there(path, config, shards):
                _write(config, shards, path, progress, free_bytes or _free_bytes)
    except OSError as error:
        raise OledMoeError(
            f"{path}: the random checkpoint cannot be written ({error.strerror}); "
            "name another --checkpoint-dir"
        ) from error
    return path


def _write(
    config: Mapping[str, Any],
    shards: Sequence[ShardSpec],
    path: Path,
    progress: Progress | None,
    free_bytes: Callable[[Path], int],
) -> None:
    partial = _partial_path(path)
    partial.mkdir(exist_ok=True)
    done = _keep_complete(partial, shards)
    missing = [shard for shard in shards if shard.file_name not in done]
    num_needed = sum(shard.num_bytes for shard in missing)
    try:
        _check_room(num_needed, path, free_bytes(path.parent))
        total = sum(shard.num_bytes for shard in shards)
        num_written = total - num_needed
        pool = _make_pool() if missing else np.empty(0, dtype=np.uint8)
        for shard in missing:
            for num_bytes in _write_shard(partial / shard.file_name, shard, pool):
                num_written += num_bytes
                if progress is not None:
                    progress(f"writing random weights to {path}", num_written, total)
        _write_json(partial / INDEX_NAME, _index(shards))
        _write_json(partial / _CONFIG_NAME, config)
    except (DoesNotFitError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # A full disk is in everybody's way.
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, DoesNotFitError):
            raise
        raise DoesNotFitError(
            f"the disk of {path.parent} became full while the random checkpoint was written; "
            "what was written is removed: free space, name another --checkpoint-dir or lower "
            "--moe-layers"
        ) from error
    os.replace(partial, path)


def _is_there(path: Path, config: Mapping[str, Any], shards: Sequence[ShardSpec]) -> bool:
    """Whether this very checkpoint is at `path`.

    Raises: CheckpointError where something else is.
    """
    if not os.path.lexists(path):
        return False
    remedy = "remove it, or name another --checkpoint-dir"
    try:
        found = json.loads((path / _CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found != config:
        raise CheckpointError(
            f"{path}: is not the random checkpoint that belongs there, of this shape and version; "
            f"{remedy}"
        )
    for shard in shards:
        if not _is_complete(path / shard.file_name, shard):
            raise CheckpointError(f"{path / shard.file_name}: is damaged or missing; {remedy}")
    return True


def _partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


@contextmanager
def _only_writer(path: Path, progress: Progress | None) -> Iterator[None]:
    """Hold the lock of `path`; the system lets go of it should this process die."""
    with open(path.with_name(f".{path.name}.lock"), "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is not None:
                progress(f"waiting: another process writes {path}", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _keep_complete(partial: Path, shards: Sequence[ShardSpec]) -> set[str]:
    """The shards that a killed run completed; everything else in its directory is removed."""
    by_name = {shard.file_name: shard for shard in shards}
    done = set()
    for found in partial.iterdir():
        shard = by_name.get(found.name)
        if shard is not None and _is_complete(found, shard):
            done.add(found.name)
        elif found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()
    return done


def _is_complete(path: Path, shard: ShardSpec) -> bool:
    """Whether a file has the size and the header of `shard`; it got its name last of all."""
    header = shard.header()
    try:
        with open(path, "rb") as file:
            is_size_right = os.fstat(file.fileno()).st_size == shard.num_bytes
            return is_size_right and file.read(len(header)) == header
    except OSError:
        return False


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _check_room(num_needed: int, path: Path, num_free: int) -> None:
    """Raises: DoesNotFitError."""
    if num_needed + _SPARE_BYTES > num_free:
        raise DoesNotFitError(
            f"the random checkpoint takes {format_size(num_needed)} more in {path.parent}, where "
            f"{format_size(num_free)} are free and {format_size(_SPARE_BYTES)} should stay so: "
            "free space, name another --checkpoint-dir or lower --moe-layers"
        )


# Bytes


def _make_pool() -> Pool:
    """Normal random numbers in bfloat16, as bytes: no more compressible than trained weights."""
    generator = torch.Generator().manual_seed(VERSION)
    values = torch.empty(_POOL_VALUES, dtype=torch.bfloat16)
    for start in range(0, _POOL_VALUES, _DRAWN_VALUES):
        part = values[start : start + _DRAWN_VALUES]
        part.copy_(torch.randn(len(part), generator=generator) * _STD)
    pool: Pool = values.view(torch.uint8).numpy()
    return pool


def _write_shard(path: Path, shard: ShardSpec, pool: Pool) -> Iterator[int]:
    """Write under another name and rename at the end; yields bytes written, bit by bit."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb", buffering=0) as file:
        writer = _Writer(file.fileno())
        yield from writer.write(memoryview(shard.header()))
        for tensor in shard.tensors:
            for part in _values(tensor, pool):
                yield from writer.write(part)
        writer.settle()
    os.replace(temporary, path)


class _Writer:
    """Appends to a file, and now and then moves what was written from the page cache to the disk.

    Raises: OSError as the system reports it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._end = 0
        self._settled = 0

    def write(self, part: memoryview) -> Iterator[int]:
        while len(part):
            count = os.write(self._descriptor, part[:_CHUNK_BYTES])
            part = part[count:]
            self._end += count
            if self._end - self._settled >= _CHUNK_BYTES:
                self.settle()
            yield count

    def settle(self) -> None:
        os.fdatasync(self._descriptor)
        drop_cached(self._descriptor, self._settled, self._end - self._settled)
        self._settled = self._end


def _values(tensor: TensorSpec, pool: Pool) -> Iterator[memoryview]:
    """The bytes of a tensor: ones where it scales, else the pool from an offset of the name's."""
    if _SCALE_NAME.search(tensor.name):
        ones = torch.ones(tensor.num_bytes // _VALUE_BYTES, dtype=torch.bfloat16)
        yield memory_of(ones.view(torch.uint8))
        return
    start = zlib.crc32(tensor.name.encode()) * 2654435761 % (len(pool) // _VALUE_BYTES)
    start *= _VALUE_BYTES
    missing = tensor.num_bytes
    while missing:
        part = pool[start : start + missing]
        yield part.data
        missing -= len(part)
        start = 0


def _shard_name(number: int, num_files: int) -> str:
    return f"model-{number:05d}-of-{num_files:05d}.safetensors"


def _index(shards: Sequence[ShardSpec]) -> dict[str, Any]:
    tensors = [(tensor, shard.file_name) for shard in shards for tensor in shard.tensors]
    return {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor, _ in tensors)},
        "weight_map": {tensor.name: file_name for tensor, file_name in tensors},
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
