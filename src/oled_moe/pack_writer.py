"""Writes a pack piece by piece, so that a run that was killed goes on where it was.

Written beside the place and renamed at the end; a journal says which pieces are on the disk. The
bytes are the same whatever happened meanwhile. Memory: a few pieces for each thread.

The journal has the job on its first line, then one line for each piece that is on the disk. A
piece is written, brought to the disk (fdatasync), then entered in the journal, which is brought to
the disk too. Pieces may be written in any order, but for the parts of one tensor. The journal goes
after the directory has its name.
"""

import fcntl
import json
import os
import re
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from oled_moe.config import format_size
from oled_moe.devices import Progress
from oled_moe.errors import CheckpointError, ConfigError, DoesNotFitError, OledMoeError
from oled_moe.pack_places import check_free, is_at, journal_path, partial_path
from oled_moe.packs import DENSE_NAME, MANIFEST_NAME, FileSum, PackManifest, experts_name
from oled_moe.store import PAGE_BYTES, ExpertLayout, FileSpan, drop_cached
from oled_moe.tensor_files import dtype_name, read_file

# A change of what a journal holds needs another number.
JOURNAL_VERSION = 3
# Brought to the disk, and then entered in the journal, at a time.
CHUNK_BYTES = 64 * 2**20
# What a kill, or the loss of power, may leave of a journal's first line, and no other file has.
_BEGINNING = re.compile(rb"\0*$|[0-9a-f]{0,8}$|[0-9a-f]{8} ")
# Left free on the disk: other programs want to write too.
SPARE_BYTES = 2**30


class Piece(NamedTuple):
    """A tensor or a part of one to be written: `make` gives its bytes, the same ones every time.

    `spans` is what it reads. `is_rest`: it goes on with the tensor of the piece before, and its
    checksum with that one's.
    """

    num_bytes: int
    make: Callable[[], memoryview]
    spans: tuple[FileSpan, ...]
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

    @property
    def starts(self) -> list[int]:
        """Where each piece begins."""
        sizes = [piece.num_bytes for piece in self.pieces[:-1]]
        return list(accumulate(sizes, initial=len(self.header)))


@dataclass(frozen=True, slots=True)
class PackJob:
    """All that is to be written. `source`: what from, in words; `rounding`: what becomes of the
    weights of experts, in words; `identity`: what a run must share
    with the one it continues; `source_state` gives `identity["source"]` as it is now; `close` gives
    back what pieces are made from."""

    source: str
    layout: ExpertLayout
    method: str | None
    rounding: str
    files: tuple[PackFile, ...]
    dense_names: tuple[str, ...]
    num_layers: int
    num_experts: int
    copies: tuple[Path, ...]
    source_bytes: int
    identity: Mapping[str, Any]
    source_state: Callable[[], Mapping[str, Any]]
    close: Callable[[], None]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


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


def to_line(values: Any) -> bytes:
    """JSON behind its own checksum: a wrong digit in it would make a wrong pack."""
    text = json.dumps(values, sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def of_line(line: bytes) -> Any:
    """Raises: ValueError."""
    checksum, _, text = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError
    return json.loads(text)


class Journal:
    """Which pieces of which file are on the disk, and their checksums: `done[file][piece]`."""

    def __init__(self, file: BinaryIO, done: dict[str, dict[int, int]]) -> None:
        self._file = file
        self.done = done

    def enter(self, name: str, checksums: Mapping[int, int]) -> None:
        """These pieces of a file are on the disk."""
        for piece, checksum in checksums.items():
            self._file.write(to_line([name, piece, checksum]))
        self._file.flush()
        os.fdatasync(self._file.fileno())
        self.done.setdefault(name, {}).update(checksums)

    def missing(self, file: PackFile) -> list[int]:
        """Which pieces of a file are not on the disk, in order."""
        done = self.done.get(file.name, {})
        return [piece for piece in range(len(file.pieces)) if piece not in done]


@contextmanager
def open_journal(out: Path, job: PackJob) -> Iterator[Journal]:
    """Open the journal, alone, and read what an earlier run has done.

    Where nothing is done at the end, nothing stays.
    Raises: CheckpointError where that run had another job; ConfigError where a pack has come.
    """
    with _locked(out) as file:
        try:
            # Between the first look and the lock another run may have ended.
            check_free(out)
            done = _read_journal(file, out, job)
        except OledMoeError:
            if not os.fstat(file.fileno()).st_size:
                journal_path(out).unlink()
            raise
        journal = Journal(file, done)
        try:
            yield journal
        except (Exception, KeyboardInterrupt):
            if not journal.done:
                _remove(job, out)
            raise


@contextmanager
def _locked(out: Path) -> Iterator[BinaryIO]:
    """The journal's file, for this process alone. Raises: OledMoeError."""
    while True:
        with open(journal_path(out), "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OledMoeError(
                    f"another process writes {partial_path(out)}; wait for it"
                ) from None
            # Whoever had it may have removed it before letting go.
            if is_at(file.fileno(), journal_path(out)):
                yield file
                return


def _read_journal(file: BinaryIO, out: Path, job: PackJob) -> dict[str, dict[int, int]]:
    """What an earlier run has done; the job is in the journal then.

    Raises: CheckpointError where it was not this job, or none at all.
    """
    file.seek(0)
    content, partial = file.read(), partial_path(out)
    # What a kill left of a line is no line.
    lines = content.split(b"\n")[:-1]
    begun = _begun(lines[0]) if lines else None
    if lines and begun is None or not _BEGINNING.match(content):
        raise CheckpointError(
            f"{journal_path(out)}: is not the journal of a pack, or damaged; {_remove_both(out)}"
        )
    if not os.path.lexists(partial):
        # Without its directory a journal tells nothing.
        lines = []
    elif begun is None:
        raise CheckpointError(f"{partial}: was not left by a pack; remove it")
    elif lines[0] + b"\n" != to_line(job.identity):
        raise _other_job(out, begun, job)
    done: dict[str, dict[int, int]] = {}
    num_pieces = {each.name: len(each.pieces) for each in job.files}
    for line in lines[1:]:
        name, piece, checksum = _entry(line, num_pieces, out)
        done.setdefault(name, {})[piece] = checksum
    file.truncate(sum(len(line) + 1 for line in lines))
    if not lines:
        file.write(to_line(job.identity))
    file.flush()
    os.fsync(file.fileno())
    _sync_directory(out.parent)
    return done


def _begun(line: bytes) -> Mapping[str, Any] | None:
    """The job on the first line of a journal; None where it is no journal."""
    try:
        values = of_line(line)
    except (ValueError, RecursionError):
        return None
    is_job = isinstance(values, dict) and {"journal", "source"} <= values.keys()
    return values if is_job and isinstance(values["source"], dict) else None


def _entry(line: bytes, num_pieces: Mapping[str, int], out: Path) -> tuple[str, int, int]:
    """A piece that is done. Raises: CheckpointError."""
    try:
        name, piece, checksum = of_line(line)
        is_piece = type(piece) is int and 0 <= piece < num_pieces[name]
        if not is_piece or type(checksum) is not int or not 0 <= checksum < 2**32:
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError(
            f"{journal_path(out)}: the line {line[:80]!r} names no piece of this pack, so the "
            f"journal is damaged; {_remove_both(out)}"
        ) from None
    return name, piece, checksum


def _remove_both(out: Path) -> str:
    return (
        f"remove {partial_path(out)} and {journal_path(out).name} to begin anew, or name another "
        "place for the pack"
    )


def _other_job(out: Path, begun: Mapping[str, Any], job: PackJob) -> CheckpointError:
    """In which way the job that was begun is another."""
    what = "was begun with other options"
    if begun["journal"] != job.identity["journal"]:
        what = "was begun by another version of oled-moe"
    elif begun["source"] != job.identity["source"]:
        before, now = begun["source"], job.identity["source"]
        changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        name = changed[0].rpartition("/")[2]
        what = f"was begun from other files: {name} has changed in {job.source}"
        if not before.keys() & now.keys():
            what = f"was begun from another model than {job.source}"
    return CheckpointError(
        f"{partial_path(out)}: {what}; remove it and {journal_path(out).name} to begin anew, or "
        "name another place for the pack"
    )


def _remove(job: PackJob, out: Path) -> None:
    """Remove what a run has made, and nothing else."""
    partial = partial_path(out)
    names = [*(file.name for file in job.files), *(path.name for path in job.copies), MANIFEST_NAME]
    with suppress(OSError):
        for name in names:
            (partial / name).unlink(missing_ok=True)
        partial.rmdir()
    if not os.path.lexists(partial):
        journal_path(out).unlink(missing_ok=True)


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
    num_done = begin_pack(job, out, journal)
    _check_room(job.num_bytes - num_done, out, (free_bytes or _free_bytes)(out.parent))
    write_pieces(job, out, journal, progress, num_threads)
    seal_pack(job, out, journal)
    name_pack(out)
    return num_done


def begin_pack(job: PackJob, out: Path, journal: Journal) -> int:
    """Make the directory, or see what it has; returns how many bytes were there already.

    Raises: CheckpointError where some have gone.
    """
    partial = partial_path(out)
    partial.mkdir(exist_ok=True)
    _sync_directory(partial.parent)
    return _num_done(job, partial, journal)


def write_pieces(
    job: PackJob,
    out: Path,
    journal: Journal,
    progress: Progress | None,
    num_threads: int,
    is_ready: Callable[[Piece], bool] = lambda piece: True,
) -> None:
    """Write those of the missing pieces that can be made now. Raises: CheckpointError, OSError."""
    partial = partial_path(out)
    num_done = _num_done(job, partial, journal)
    counter = _Counter(f"packing {out}", num_done, job.num_bytes, progress)
    # Whole experts keep the threads busy: none of them needs more for its products.
    with ThreadPoolExecutor(num_threads, "pack", torch.set_num_threads, (1,)) as threads:
        for file in job.files:
            wanted = [piece for piece in journal.missing(file) if is_ready(file.pieces[piece])]
            if wanted:
                _write_file(partial, file, wanted, journal, threads, num_threads + 1, counter)


def seal_pack(job: PackJob, out: Path, journal: Journal) -> None:
    """Write what else belongs to a pack that has all its pieces, the manifest last.

    Raises: CheckpointError where the source is no more what it was; OSError.
    """
    partial = partial_path(out)
    copies = {path.name: _copy(path, partial / path.name) for path in job.copies}
    if job.source_state() != job.identity["source"]:
        raise CheckpointError(
            f"{job.source}: has changed while it was packed; remove {partial} and its journal, and "
            "pack it again"
        )
    _write_synced(partial / MANIFEST_NAME, _manifest(job, journal, copies).to_bytes())
    _sync_directory(partial)


def name_pack(out: Path) -> None:
    """Give a sealed pack its name; the journal goes. Raises: ConfigError where it is taken."""
    partial = partial_path(out)
    # An empty directory would be replaced without a word.
    if os.path.lexists(out):
        raise ConfigError(
            f"{out} has come while the pack was written, which lies whole in {partial}; remove "
            f"{out} and run the same command again"
        )
    os.rename(partial, out)
    _sync_directory(out.parent)
    journal_path(out).unlink()


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
        done = journal.done.get(file.name)
        if not done:
            continue
        last, path = max(done), partial / file.name
        num_pieces = len(file.pieces)
        end = file.starts[last] + file.pieces[last].num_bytes if last < num_pieces else 0
        if not end or not path.is_file() or path.stat().st_size < end:
            raise CheckpointError(
                f"{path}: lacks what the journal says was written; remove {partial} and its "
                "journal, and pack again"
            )
        num_bytes += len(file.header) + sum(file.pieces[piece].num_bytes for piece in done)
    return num_bytes


def _write_file(
    partial: Path,
    file: PackFile,
    wanted: Sequence[int],
    journal: Journal,
    threads: ThreadPoolExecutor,
    num_ahead: int,
    counter: _Counter,
) -> None:
    """Write pieces of a file, in order, while threads make what comes next."""
    done, starts = journal.done.get(file.name, {}), file.starts
    with open(partial / file.name, "r+b" if done else "wb", buffering=0) as target:
        if not done:
            _write_all(target, memoryview(file.header))
            counter.add(len(file.header))
            _sync_directory(partial)
        unsettled: dict[int, int] = {}
        num_unsettled, checksum = 0, 0
        contents = _made([file.pieces[piece] for piece in wanted], threads, num_ahead)
        for piece, content in zip(wanted, contents, strict=True):
            before = unsettled.get(piece - 1, done.get(piece - 1, checksum))
            checksum = zlib.crc32(content, before if file.pieces[piece].is_rest else 0)
            target.seek(starts[piece])
            _write_all(target, content)
            unsettled[piece] = checksum
            num_unsettled += content.nbytes
            if num_unsettled >= CHUNK_BYTES:
                _settle(target, starts[min(unsettled)])
                journal.enter(file.name, unsettled)
                unsettled, num_unsettled = {}, 0
            counter.add(content.nbytes)
        _settle(target, starts[wanted[0]] if done else 0)
        journal.enter(file.name, unsettled)


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


def _settle(target: Any, start: int) -> None:
    """Bring what was written from `start` on out of the page cache to the disk."""
    os.fdatasync(target.fileno())
    drop_cached(target.fileno(), start, target.tell() - start)


def _copy(source: Path, target: Path) -> FileSum:
    content = read_file(source)
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
        for checksum, after in zip(_in_order(journal, DENSE_NAME), pieces, strict=True)
        if after is None or not after.is_rest
    ]
    dense = dict(zip(job.dense_names, sums, strict=True))
    return PackManifest(
        layout=job.layout,
        method=job.method,
        copies=copies,
        weights={file.name: FileSum(file.num_bytes, zlib.crc32(file.header)) for file in job.files},
        dense=dense,
        experts=tuple(_in_order(journal, experts_name(layer)) for layer in range(job.num_layers)),
    )


def _in_order(journal: Journal, name: str) -> tuple[int, ...]:
    """The checksums of all pieces of a file."""
    return tuple(checksum for _, checksum in sorted(journal.done[name].items()))


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _check_room(num_needed: int, out: Path, num_free: int) -> None:
    if num_needed + SPARE_BYTES > num_free:
        raise DoesNotFitError(
            f"the pack takes {format_size(num_needed)} more in {out.parent}, where "
            f"{format_size(num_free)} are free and {format_size(SPARE_BYTES)} should stay so: "
            "free space, name another place, or pack as int8 or int4"
        )
