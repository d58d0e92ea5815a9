"""Writes a pack piece by piece, so that a run that was killed goes on where it was.

Written beside the place and renamed at the end; a journal says which pieces are on the disk. The
bytes are the same whatever happened meanwhile. Memory: a few pieces for each thread.

    OUT.partial            the directory to be
    OUT.partial.journal    the job, then one line for each piece that is on the disk

A piece is written, brought to the disk (fdatasync), then entered in the journal, which is brought
to the disk too. The journal goes after the directory has its name.
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
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from oled_moe.config import format_size
from oled_moe.devices import Progress
from oled_moe.errors import CheckpointError, DoesNotFitError, OledMoeError
from oled_moe.packs import DENSE_NAME, MANIFEST_NAME, FileSum, PackManifest, experts_name
from oled_moe.store import PAGE_BYTES, ExpertLayout, drop_cached
from oled_moe.tensor_files import dtype_name

# Brought to the disk, and then entered in the journal, at a time.
CHUNK_BYTES = 64 * 2**20
# Left free on the disk: other programs want to write too.
_SPARE_BYTES = 2**30


class Piece(NamedTuple):
    """A tensor or a part of one to be written: `make` gives its bytes, the same ones every time.

    `is_rest`: it goes on with the tensor of the piece before, and its checksum with that one's.
    """

    num_bytes: int
    make: Callable[[], memoryview]
    is_rest: bool = False


@dataclass(frozen=True, slots=True)
class PackFile:
    """A safetensors file to be written, from its first byte to its last."""

    name: str
    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(piece.num_bytes for piece in self.pieces)

    def start(self, piece: int) -> int:
        """Where a piece begins."""
        return len(self.header) + sum(each.num_bytes for each in self.pieces[:piece])


@dataclass(frozen=True, slots=True)
class PackJob:
    """All that is to be written. `identity`: what a run must share with the one it continues;
    `close` gives back what pieces are made from."""

    source: Path
    layout: ExpertLayout
    method: str | None
    files: tuple[PackFile, ...]
    dense_names: tuple[str, ...]
    num_layers: int
    num_experts: int
    copies: tuple[Path, ...]
    source_bytes: int
    identity: Mapping[str, Any]
    close: Callable[[], None]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def partial_path(out: Path) -> Path:
    """Where a pack is written until it is whole."""
    return out.with_name(f"{out.name}.partial")


def file_header(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
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


# The journal


class Journal:
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
def open_journal(partial: Path, job: PackJob) -> Iterator[Journal]:
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
        yield Journal(file, done)


def _other_job(partial: Path, line: bytes, job: PackJob) -> CheckpointError:
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


def write_pack(
    job: PackJob,
    out: Path,
    journal: Journal,
    progress: Progress | None,
    free_bytes: Callable[[Path], int] | None,
    num_threads: int,
) -> int:
    """Write what is missing and give it its name; returns how many bytes were there already.

    `free_bytes` says what a directory's disk has room for; None asks the system.
    Raises: CheckpointError, DoesNotFitError, OSError.
    """
    partial = partial_path(out)
    partial.mkdir(exist_ok=True)
    _sync_directory(partial.parent)
    num_done = _num_done(job, partial, journal)
    _check_room(job.num_bytes - num_done, out, (free_bytes or _free_bytes)(out.parent))
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
    return num_done


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


def _num_done(job: PackJob, partial: Path, journal: Journal) -> int:
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
    file: PackFile,
    journal: Journal,
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
            if target.tell() - settled >= CHUNK_BYTES:
                settled = _settle(target, settled)
                journal.enter(file.name, checksums)
                checksums = []
            counter.add(content.nbytes)
        _settle(target, settled)
        journal.enter(file.name, checksums)


def _made(
    pieces: Sequence[Piece], threads: ThreadPoolExecutor, num_ahead: int
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
        content = content[target.write(content[:CHUNK_BYTES]) :]


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


def _manifest(job: PackJob, journal: Journal, copies: Mapping[str, FileSum]) -> PackManifest:
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


def _source_files(job: PackJob) -> dict[str, list[int]]:
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
