"""Packs checkpoints: experts as aligned slots, one read each, in the form that kernels read.

Written beside the place, piece by piece in one order, and renamed at the end; a journal says which
pieces are on the disk, so that a run that was killed goes on where it was. The bytes are the same
whatever happened meanwhile. Memory: a few slots for each thread, and one chunk of what is written.

    OUT.partial            the directory to be
    OUT.partial.journal    the job, then one line for each piece that is on the disk

A piece is a tensor: written, brought to the disk (fdatasync), then entered in the journal, which is
brought to the disk too. The journal goes after the directory has its name.
"""

import fcntl
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from oled_moe.checkpoint import INDEX_NAME, Checkpoint, find_weights
from oled_moe.config import check_choice, format_size
from oled_moe.devices import Progress
from oled_moe.encodings import EncodedRecord
from oled_moe.errors import CheckpointError, ConfigError, DoesNotFitError, OledMoeError
from oled_moe.model_paths import find_model
from oled_moe.models import find_family
from oled_moe.packs import (
    DENSE_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileSum,
    PackManifest,
    expert_dtype_name,
    expert_tensor,
    experts_name,
    layout_to_dict,
)
from oled_moe.quantization import QuantSpec, quantize
from oled_moe.store import (
    PAGE_BYTES,
    DiskExpertStore,
    ExpertLayout,
    aligned_empty,
    drop_cached,
    memory_of,
)
from oled_moe.tensor_files import TensorRecord, dtype_name

# What --dtype may say besides the forms of QuantSpec.
FLOAT_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
# How weights are rounded to whole numbers.
METHOD = "nearest"
# Brought to the disk, and then entered in the journal, at a time.
_CHUNK_BYTES = 64 * 2**20
# Experts that are made at a time: each takes a few slots of memory.
_MAX_THREADS = 4
# Left free on the disk: other programs want to write too.
_SPARE_BYTES = 2**30
# Files that say how a model is used; code that came with it is left behind.
_COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md")
_COPIED_NAMES = ("LICENSE", "NOTICE")
_MAX_COPIED_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class PackReport:
    """What was packed. `num_resumed_bytes`: what an earlier run had written. Units: bytes."""

    path: Path
    expert_dtype: str
    num_experts: int
    slot_bytes: int
    source_bytes: int
    pack_bytes: int
    num_resumed_bytes: int


class _Piece(NamedTuple):
    """A tensor or a part of one to be written: `make` gives its bytes, the same ones every time.

    `is_rest`: it goes on with the tensor of the piece before, and its checksum with that one's.
    """

    num_bytes: int
    make: Callable[[], memoryview]
    is_rest: bool = False


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    header: bytes
    pieces: tuple[_Piece, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(piece.num_bytes for piece in self.pieces)

    def start(self, piece: int) -> int:
        """Where a piece begins."""
        return len(self.header) + sum(each.num_bytes for each in self.pieces[:piece])


@dataclass(frozen=True, slots=True)
class _Job:
    """All that is to be written. `identity`: what a run must share with the one it continues."""

    source: Path
    layout: ExpertLayout
    method: str | None
    files: tuple[_File, ...]
    dense_names: tuple[str, ...]
    num_layers: int
    num_experts: int
    copies: tuple[Path, ...]
    source_bytes: int
    identity: Mapping[str, Any]
    store: DiskExpertStore

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def partial_path(out: Path) -> Path:
    """Where a pack is written until it is whole."""
    return out.with_name(f"{out.name}.partial")


def pack_checkpoint(
    model: str | Path,
    out: Path,
    *,
    dtype: str | None = None,
    dense_dtype: str | None = None,
    hub_cache: Path | None = None,
    progress: Progress | None = None,
    free_bytes: Callable[[Path], int] | None = None,
    num_threads: int | None = None,
) -> PackReport:
    """Pack `demo`, a directory or a hub id in the local cache at `out`.

    `dtype`: bf16, int8, int4 or another form of `QuantSpec` for experts, `dense_dtype`: bf16 for
    the rest; None keeps what is stored. A run that was killed is continued.

    Raises: ConfigError for a dtype, and where something is at `out`; CheckpointError for a source
    that cannot be read, or has changed since the run that is continued; DoesNotFitError where the
    disk is too small; OledMoeError where it cannot be written.
    """
    source = find_model(model, hub_cache=hub_cache)
    if os.path.lexists(out):
        raise ConfigError(f"{out} is there already; remove it, or name another place for the pack")
    job = _plan(source, dtype, dense_dtype)
    partial = partial_path(out)
    num_threads = num_threads or min(_MAX_THREADS, os.cpu_count() or 1)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _journal_of(partial, job) as journal:
            return _write(job, out, journal, progress, free_bytes or _free_bytes, num_threads)
    except OSError as error:
        raise OledMoeError(
            f"{partial}: cannot be written ({error.strerror}); what is written stays for the next "
            "run of the same command, or remove it and name another place"
        ) from error
    finally:
        job.store.close()


# What is to be written


def _plan(source: Path, dtype: str | None, dense_dtype: str | None) -> _Job:
    """Everything that is known before a weight is read. Raises: as `pack_checkpoint`."""
    if dense_dtype is not None:
        check_choice("dense-dtype", dense_dtype, tuple(FLOAT_DTYPES))
    checkpoint = Checkpoint.open(source)
    family = find_family(checkpoint.config)
    config = family.config(checkpoint.config)
    parameters, store = find_weights(
        checkpoint,
        map_weight=family.weight_map(config),
        shapes=family.parameter_shapes(config),
        num_moe_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        dtype=FLOAT_DTYPES.get(dtype or ""),
        method="direct",
    )
    try:
        layout, method = _target(checkpoint, store.layout, dtype)
        kept = family.kept_dtypes(config)
        dense = [
            (record, _dense_dtype(record, None if target in kept else dense_dtype))
            for target, record in parameters.items()
        ]
        # Tensors of whole pages come first, so that these begin at whole pages.
        dense.sort(key=lambda entry: _num_bytes(*entry) % PAGE_BYTES != 0)
        files = [_dense_file(dense)]
        for layer in range(store.num_layers):
            files.append(_expert_file(store, layout, layer))
        copies = _find_copies(source)
        return _Job(
            source=source,
            layout=layout,
            method=method,
            files=tuple(files),
            dense_names=tuple(record.name for record, _ in dense),
            num_layers=store.num_layers,
            num_experts=store.num_experts,
            copies=copies,
            source_bytes=checkpoint.num_bytes,
            identity=_identity(checkpoint, layout, method, dense_dtype, copies),
            store=store,
        )
    except BaseException:
        store.close()
        raise


def _target(
    checkpoint: Checkpoint, stored: ExpertLayout, dtype: str | None
) -> tuple[ExpertLayout, str | None]:
    """What slots become, and how weights are rounded to it. Raises: ConfigError."""
    pack = checkpoint.pack
    if dtype is None or dtype in FLOAT_DTYPES:
        if dtype is not None and stored.quant is not None:
            raise ConfigError(
                f"dtype is {dtype!r} and {checkpoint.path} is packed as {stored.quant}; pack the "
                "checkpoint that it came from"
            )
        return stored, None if pack is None else pack.manifest.method
    try:
        quant = QuantSpec.parse(dtype)
    except ConfigError as error:
        raise ConfigError(f"dtype: {error}; or bf16, or none to keep what is stored") from None
    if stored.quant == quant and pack is not None:
        return stored, pack.manifest.method
    if stored.quant is not None:
        raise ConfigError(
            f"dtype is {dtype!r} and {checkpoint.path} is packed as {stored.quant}; pack the "
            "checkpoint that it came from"
        )
    return replace(stored, quant=quant), METHOD


def _dense_dtype(record: TensorRecord, wanted: str | None) -> torch.dtype:
    return record.dtype if wanted is None else FLOAT_DTYPES[wanted]


def _num_bytes(record: TensorRecord, dtype: torch.dtype) -> int:
    return prod(record.shape) * dtype.itemsize


def _dense_file(dense: Sequence[tuple[TensorRecord, torch.dtype]]) -> _File:
    header = _header([(record.name, dtype, record.shape) for record, dtype in dense])
    pieces = [piece for record, dtype in dense for piece in _dense_pieces(record, dtype)]
    return _File(DENSE_NAME, header, tuple(pieces))


def _dense_pieces(record: TensorRecord, dtype: torch.dtype) -> Iterator[_Piece]:
    """A tensor in parts, so that an embedding is never held whole; one that is encoded, as one."""
    if isinstance(record, EncodedRecord):
        yield _Piece(_num_bytes(record, dtype), lambda: _bytes_of(record.read(), dtype))
        return

    def part(start: int, num_bytes: int) -> _Piece:
        def make() -> memoryview:
            stored = torch.empty(num_bytes, dtype=torch.uint8)
            if start == 0 and num_bytes:
                record.verify(stored)
            record.read_range(start, stored)
            return _bytes_of(stored.view(record.dtype), dtype)

        num_packed = num_bytes // record.dtype.itemsize * dtype.itemsize
        return _Piece(num_packed, make, is_rest=start > 0)

    for start in range(0, max(record.num_bytes, 1), _CHUNK_BYTES):
        yield part(start, min(_CHUNK_BYTES, record.num_bytes - start))


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    return memory_of(tensor.to(dtype).contiguous().view(-1).view(torch.uint8))


def _expert_file(store: DiskExpertStore, layout: ExpertLayout, layer: int) -> _File:
    def piece(expert: int) -> _Piece:
        return _Piece(layout.slot_bytes, lambda: memory_of(_slot(store, layout, layer, expert)))

    names = [expert_tensor(layer, expert) for expert in range(store.num_experts)]
    header = _header([(name, torch.uint8, (layout.slot_bytes,)) for name in names])
    pieces = tuple(piece(expert) for expert in range(store.num_experts))
    return _File(experts_name(layer), header, pieces)


def _slot(store: DiskExpertStore, layout: ExpertLayout, layer: int, expert: int) -> Tensor:
    """One expert as it is packed; zeros where nothing lies."""
    stored = aligned_empty(store.layout.slot_bytes).zero_()
    store.read_into(layer, expert, stored)
    quant = layout.quant
    if quant is None or store.layout.quant is not None:
        return stored
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    gate_up, down = store.layout.views(stored)
    width = layout.intermediate_size
    sources = (gate_up[:width], gate_up[width:], down)
    try:
        for target, matrix in zip(layout.packed_views(slot), sources, strict=True):
            target.copy_(quantize(matrix, quant))
    except CheckpointError as error:
        raise CheckpointError(f"layer {layer}, expert {expert}: {error}") from None
    return slot


def _header(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The head of a safetensors file, padded so that the first tensor begins at a whole page."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape in tensors:
        end = start + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": dtype_name(dtype),
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text


def _find_copies(source: Path) -> tuple[Path, ...]:
    """Config, tokenizer, templates, words and licence of a checkpoint."""
    return tuple(
        path
        for path in sorted(source.iterdir())
        if path.is_file()
        and path.name not in (INDEX_NAME, MANIFEST_NAME)
        and path.name.isprintable()
        and not path.name.startswith(".")
        and (path.suffix in _COPIED_SUFFIXES or path.stem in _COPIED_NAMES)
        and path.stat().st_size <= _MAX_COPIED_BYTES
    )


def _identity(
    checkpoint: Checkpoint,
    layout: ExpertLayout,
    method: str | None,
    dense_dtype: str | None,
    copies: Sequence[Path],
) -> dict[str, Any]:
    """The options, and every source file by size and time of change."""
    files = {}
    for path in (*checkpoint.file_bytes, *copies):
        found = path.stat()
        files[path.name] = [found.st_size, found.st_mtime_ns]
    return {
        "version": FORMAT_VERSION,
        "layout": layout_to_dict(layout, method),
        "dense_dtype": dense_dtype,
        "source": files,
    }


# The journal


class _Journal:
    """Which pieces of which file are on the disk, and their checksums."""

    def __init__(self, file: BinaryIO, done: dict[str, list[int]]) -> None:
        self._file = file
        self.done = done

    def enter(self, name: str, checksums: Sequence[int]) -> None:
        """Pieces of a file, the next ones, are on the disk."""
        for checksum in checksums:
            self._file.write(json.dumps([name, checksum]).encode() + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self.done.setdefault(name, []).extend(checksums)


def _journal_path(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.journal")


@contextmanager
def _journal_of(partial: Path, job: _Job) -> Iterator[_Journal]:
    """Open the journal, alone, and read what an earlier run has done.

    Raises: CheckpointError where that run had another job.
    """
    path = _journal_path(partial)
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OledMoeError(f"another process writes {partial}; wait for it") from None
        file.seek(0)
        # What a kill left of a line is no line. Without its directory a journal tells nothing.
        found = file.read().split(b"\n")[:-1] if partial.exists() else []
        identity = json.dumps(job.identity, sort_keys=True).encode()
        if found and found[0] != identity:
            raise _other_job(partial, found[0], job)
        if not found and partial.exists():
            raise CheckpointError(f"{partial}: was not left by a pack; remove it")
        done: dict[str, list[int]] = {}
        for line in found[1:]:
            name, checksum = json.loads(line)
            done.setdefault(name, []).append(checksum)
        file.truncate(sum(len(line) + 1 for line in found))
        if not found:
            file.write(identity + b"\n")
        file.flush()
        os.fsync(file.fileno())
        _sync_directory(partial.parent)
        yield _Journal(file, done)


def _other_job(partial: Path, line: bytes, job: _Job) -> CheckpointError:
    """In which way the job that was begun is another."""
    try:
        begun = json.loads(line)
    except ValueError:
        begun = {}
    what = "was begun with other options"
    if begun.get("source") != job.identity["source"]:
        before, now = begun.get("source") or {}, job.identity["source"]
        changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        what = f"was begun from other files: {changed[0]} has changed in {job.source}"
    return CheckpointError(
        f"{partial}: {what}; remove it and {_journal_path(partial).name} to begin anew, or name "
        "another place for the pack"
    )


# Writing


def _write(
    job: _Job,
    out: Path,
    journal: _Journal,
    progress: Progress | None,
    free_bytes: Callable[[Path], int],
    num_threads: int,
) -> PackReport:
    partial = partial_path(out)
    partial.mkdir(exist_ok=True)
    _sync_directory(partial.parent)
    num_done = _num_done(job, partial, journal)
    _check_room(job.num_bytes - num_done, out, free_bytes(out.parent))
    counter = _Counter(f"packing {out}", num_done, job.num_bytes, progress)
    # Whole experts keep the threads busy: none of them needs more for its products.
    with ThreadPoolExecutor(num_threads, "pack", torch.set_num_threads, (1,)) as threads:
        for file in job.files:
            _write_file(partial, file, journal, threads, num_threads + 1, counter)
    copies = {path.name: _copy(path, partial / path.name) for path in job.copies}
    if _source_files(job) != job.identity["source"]:
        raise CheckpointError(
            f"{job.source}: has changed while it was packed; remove {partial} and its journal, and "
            "pack it again"
        )
    _write_synced(partial / MANIFEST_NAME, _manifest(job, journal, copies).to_bytes())
    _sync_directory(partial)
    os.rename(partial, out)
    _sync_directory(out.parent)
    _journal_path(partial).unlink()
    return PackReport(
        path=out,
        expert_dtype=expert_dtype_name(job.layout),
        num_experts=job.num_layers * job.num_experts,
        slot_bytes=job.layout.slot_bytes,
        source_bytes=job.source_bytes,
        pack_bytes=job.num_bytes,
        num_resumed_bytes=num_done,
    )


@dataclass(slots=True)
class _Counter:
    what: str
    num_done: int
    num_bytes: int
    progress: Progress | None

    def add(self, num_bytes: int) -> None:
        self.num_done += num_bytes
        if self.progress is not None:
            self.progress(self.what, self.num_done, self.num_bytes)


def _num_done(job: _Job, partial: Path, journal: _Journal) -> int:
    """Bytes that need not be written again. Raises: CheckpointError where some have gone."""
    num_bytes = 0
    for file in job.files:
        pieces = journal.done.get(file.name, [])
        if not pieces:
            continue
        end = file.start(len(pieces))
        path = partial / file.name
        if len(pieces) > len(file.pieces) or not path.is_file() or path.stat().st_size < end:
            raise CheckpointError(
                f"{path}: lacks what the journal says was written; remove {partial} and its "
                "journal, and pack again"
            )
        num_bytes += end
    return num_bytes


def _write_file(
    partial: Path,
    file: _File,
    journal: _Journal,
    threads: ThreadPoolExecutor,
    num_ahead: int,
    counter: _Counter,
) -> None:
    """Write what is missing of a file, in order, while threads make what comes next."""
    num_done = len(journal.done.get(file.name, []))
    if num_done == len(file.pieces) and num_done:
        return
    path = partial / file.name
    with open(path, "r+b" if num_done else "wb", buffering=0) as target:
        if num_done:
            target.truncate(file.start(num_done))
            target.seek(file.start(num_done))
        else:
            _write_all(target, memoryview(file.header))
            counter.add(len(file.header))
            _sync_directory(partial)
        settled, checksums = target.tell(), list[int]()
        checksum = journal.done[file.name][-1] if num_done else 0
        pieces = file.pieces[num_done:]
        for piece, content in zip(pieces, _made(pieces, threads, num_ahead), strict=True):
            checksum = zlib.crc32(content, checksum if piece.is_rest else 0)
            checksums.append(checksum)
            _write_all(target, content)
            if target.tell() - settled >= _CHUNK_BYTES:
                settled = _settle(target, settled)
                journal.enter(file.name, checksums)
                checksums = []
            counter.add(content.nbytes)
        _settle(target, settled)
        journal.enter(file.name, checksums)


def _made(
    pieces: Sequence[_Piece], threads: ThreadPoolExecutor, num_ahead: int
) -> Iterator[memoryview]:
    """The bytes of pieces in order; at most `num_ahead` are made and not yet taken."""
    pending: deque[Future[memoryview]] = deque()
    try:
        for piece in pieces:
            pending.append(threads.submit(piece.make))
            if len(pending) >= num_ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _write_all(target: BinaryIO | Any, content: memoryview) -> None:
    while content.nbytes:
        content = content[target.write(content[:_CHUNK_BYTES]) :]


def _settle(target: Any, settled: int) -> int:
    """Bring what was written from the page cache to the disk; returns where that ends."""
    end: int = target.tell()
    os.fdatasync(target.fileno())
    drop_cached(target.fileno(), settled, end - settled)
    return end


def _copy(source: Path, target: Path) -> FileSum:
    content = source.read_bytes()
    _write_synced(target, content)
    return FileSum(len(content), zlib.crc32(content))


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(job: _Job, journal: _Journal, copies: Mapping[str, FileSum]) -> PackManifest:
    # The last piece of a tensor has the checksum of all of it.
    pieces = [*job.files[0].pieces[1:], None]
    sums = [
        checksum
        for checksum, after in zip(journal.done[DENSE_NAME], pieces, strict=True)
        if after is None or not after.is_rest
    ]
    dense = dict(zip(job.dense_names, sums, strict=True))
    return PackManifest(
        layout=job.layout,
        method=job.method,
        copies=copies,
        weights={file.name: FileSum(file.num_bytes, zlib.crc32(file.header)) for file in job.files},
        dense=dense,
        experts=tuple(tuple(journal.done[experts_name(layer)]) for layer in range(job.num_layers)),
    )


def _source_files(job: _Job) -> dict[str, list[int]]:
    """Size and time of change of every source file as they are now."""
    found = {}
    for name in job.identity["source"]:
        state = (job.source / name).stat()
        found[name] = [state.st_size, state.st_mtime_ns]
    return found


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _check_room(num_needed: int, out: Path, num_free: int) -> None:
    if num_needed + _SPARE_BYTES > num_free:
        raise DoesNotFitError(
            f"the pack takes {format_size(num_needed)} more in {out.parent}, where "
            f"{format_size(num_free)} are free and {format_size(_SPARE_BYTES)} should stay so: "
            "free space, name another place, or pack as int8 or int4"
        )


def report_to_dict(report: PackReport) -> dict[str, Any]:
    """As JSON values."""
    return {**asdict(report), "path": str(report.path)}
