"""Packs a model of the hub while it comes: one of its files of weights is on the disk at a time.

Beside the pack to be stands a directory that is the checkpoint but for most of its bytes: instead
of each file of weights a sparse *stand-in* of full size with its header, and, while the file itself
is there, a link to it. A piece of the pack is written as soon as all that it reads is there; of a
piece that must wait for a later file, what it reads is set aside in the stand-in.

    OUT.partial.shards/config.json, …      small files
    OUT.partial.shards/NAME.safetensors    stand-ins
    OUT.partial.shards/.aside              the model's files, then lines [name, spans]: what is set
                                           aside in a stand-in; the last line of a name counts

A line follows the bytes that it speaks of, and comes before their loss, so a run that was killed
anywhere is continued, and the bytes are those that `pull` and then `pack` give.
"""

import fcntl
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from oled_moe.config import format_size
from oled_moe.devices import Progress
from oled_moe.encodings import split_quantization
from oled_moe.errors import CheckpointError, DoesNotFitError, DownloadError, OledMoeError
from oled_moe.hub import HubModel, Selection, existing_parent
from oled_moe.hub import Progress as DownloadProgress
from oled_moe.hub_client import HubFile
from oled_moe.pack_writer import (
    SPARE_BYTES,
    Journal,
    PackJob,
    Piece,
    begin_pack,
    name_pack,
    open_journal,
    partial_path,
    seal_pack,
    write_pieces,
)
from oled_moe.packing import (
    PackReport,
    check_dtype,
    check_place,
    default_threads,
    make_report,
    plan_pack,
    writing,
)
from oled_moe.tensor_files import MAX_HEADER_BYTES

# Most headers are shorter: one request brings them.
_START_BYTES = 2**20
_COPY_BYTES = 16 * 2**20
_ASIDE_NAME = ".aside"
_LOCK_NAME = ".lock"

# Where bytes begin in a file, and how many.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """What `pull_pack` is about to do: which files of weights come, in this order.

    `aside_bytes`: the most that is set aside at a time; `most_bytes`: the most that one file of
    weights takes together with what is set aside then. Units: bytes.
    """

    selection: Selection
    fetched: tuple[HubFile, ...]
    pack_bytes: int
    aside_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class PulledPack:
    """What `pull_pack` did. `downloaded_bytes`: of this run, whole files. Units: bytes."""

    model: str
    revision: str
    commit: str
    downloaded_bytes: int
    pack: PackReport


def pull_pack(
    model: HubModel,
    out: Path,
    *,
    dtype: str,
    check_config: Callable[[Mapping[str, Any]], None],
    is_forced: bool = False,
    on_plan: Callable[[PackPlan], None] | None = None,
    downloading: DownloadProgress = lambda action, file, num_bytes: None,
    packing: Progress | None = None,
    free_bytes: Callable[[Path], int] | None = None,
    num_threads: int | None = None,
) -> PulledPack:
    """Pack a model at `out` while it is downloaded; a run that was killed is continued.

    `dtype`, `free_bytes` and `num_threads` as in `pack_checkpoint`, `check_config` as in `pull`;
    `is_forced` does not look at disk space.

    Raises: what `pack_checkpoint`, `HubModel.select` and `HubModel.fetch` raise; CheckpointError
    for weights whose headers do not say all that planning needs.
    """
    check_dtype(dtype)
    check_place(out)
    _check_config(model, check_config)
    source = model.select()
    with writing(out), _locked(out) as directory:
        stand_ins = _StandIns(directory, _files_of(source))
        plan_job = partial(_plan_job, model, source, stand_ins, dtype)
        job = _first_job(model, source, stand_ins, out, plan_job)
        with open_journal(partial_path(out), job) as journal:
            num_resumed = begin_pack(job, out, journal)
            plan = _plan(job, journal, stand_ins, source)
            if not is_forced:
                free = free_bytes or _free_bytes
                _check_room(plan, job.num_bytes - num_resumed, model, out, free)
            if on_plan is not None:
                on_plan(plan)
            num_threads = num_threads or default_threads()
            for file in plan.fetched:
                stand_ins.put(file.name, model.fetch(file, downloading))
                is_ready = partial(stand_ins.has_all, file.name)
                with _opened(plan_job) as job:
                    write_pieces(job, out, journal, packing, num_threads, is_ready)
                stand_ins.keep(file.name, _missing(job, journal))
                model.forget(file)
            seal_pack(job, out, journal)
            # Only the name is missing: a run that goes on from here fetches no weights.
            for file in source.files:
                model.forget(file)
            shutil.rmtree(directory)
            name_pack(out)
    downloaded = [file for file in source.files if model.states.get(file.name) in _CAME]
    num_bytes = sum(file.num_bytes for file in downloaded)
    report = make_report(job, out, num_resumed)
    return PulledPack(model.name, model.revision, model.commit, num_bytes, report)


_CAME = ("downloaded", "replaced")


def _check_config(model: HubModel, check_config: Callable[[Mapping[str, Any]], None]) -> None:
    config = model.read_config()
    try:
        check_config(config)
        _, encoding = split_quantization(config)
    except CheckpointError as error:
        raise CheckpointError(f"{model.name} cannot be packed here: {error}") from None
    if encoding is not None and encoding.hints:
        raise CheckpointError(
            f"{model.name} is stored as {encoding.words}, which says the shape of a weight among "
            "the weights, so it cannot be packed while it comes; pull it without --pack, then "
            "run: oled-moe pack"
        )


# Planning


def _files_of(source: Selection) -> dict[str, list[Any]]:
    return {file.name: [file.num_bytes, file.checksum] for file in source.files}


def _first_job(
    model: HubModel,
    source: Selection,
    stand_ins: "_StandIns",
    out: Path,
    plan_job: Callable[[], PackJob],
) -> PackJob:
    """The job as headers alone tell it; nothing can be made by it."""
    for file in source.small:
        shutil.copyfile(model.fetch(file), stand_ins.directory / file.name)
    for file in source.weights:
        stand_ins.make(file.name, file.num_bytes, partial(model.read_start, file))
    try:
        with _opened(plan_job) as job:
            return job
    except CheckpointError:
        # No checksum covers headers so far: what does not fit may have been damaged on its way.
        if not partial_path(out).exists():
            shutil.rmtree(stand_ins.directory)
        raise


def _plan_job(model: HubModel, source: Selection, stand_ins: "_StandIns", dtype: str) -> PackJob:
    """What is to be written, as `pack` would plan it; its source is known by checksums."""
    job = plan_pack(stand_ins.directory, dtype)
    files = _files_of(source)
    return replace(
        job,
        source=model.name,
        identity={**job.identity, "source": files},
        source_state=lambda: files,
    )


@contextmanager
def _opened(plan_job: Callable[[], PackJob]) -> Iterator[PackJob]:
    job = plan_job()
    try:
        yield job
    finally:
        job.close()


def _missing(job: PackJob, journal: Journal) -> list[Piece]:
    return [file.pieces[piece] for file in job.files for piece in journal.missing(file)]


def _plan(job: PackJob, journal: Journal, stand_ins: "_StandIns", source: Selection) -> PackPlan:
    """Which files must come, and what they make the disk hold at most."""
    reads = [stand_ins.lacking(piece) for piece in _missing(job, journal)]
    needed = {name for ranges in reads for name, _ in ranges}
    fetched = [file for file in source.weights if file.name in needed]
    position = {file.name: i for i, file in enumerate(fetched)}
    # Of each file: how much of it waits for a later one, and for which at the latest.
    kept, until = [0] * len(fetched), list(range(len(fetched)))
    for ranges in reads:
        last = max((position[name] for name, _ in ranges), default=0)
        for name, (_, num_bytes) in ranges:
            if (i := position[name]) < last:
                kept[i] += num_bytes
                until[i] = max(until[i], last)
    aside = [sum(kept[i] for i in range(now + 1) if until[i] >= now) for now in range(len(fetched))]
    most = [file.num_bytes + held for file, held in zip(fetched, aside, strict=True)]
    return PackPlan(
        source, tuple(fetched), job.num_bytes, max(aside, default=0), max(most, default=0)
    )


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _check_room(
    plan: PackPlan,
    pack_bytes: int,
    model: HubModel,
    out: Path,
    free_bytes: Callable[[Path], int],
) -> None:
    """Raises: DoesNotFitError. `pack_bytes`: what is still to be written."""
    here, there = existing_parent(out.parent), existing_parent(model.cached.cache)
    largest = max((file.num_bytes for file in plan.fetched), default=0)
    if os.stat(here).st_dev == os.stat(there).st_dev:
        needs = [(out.parent, here, pack_bytes + plan.most_bytes)]
    else:
        needs = [
            (out.parent, here, pack_bytes + plan.aside_bytes),
            (model.cached.cache, there, largest),
        ]
    for place, directory, needed in needs:
        free = free_bytes(directory)
        if needed + SPARE_BYTES > free:
            raise DoesNotFitError(
                f"{model.name}, packed while it comes, takes up to {format_size(needed)} more in "
                f"{place}, where {format_size(free)} are free and {format_size(SPARE_BYTES)} "
                "should stay so: free space, name another place with --out or HF_HUB_CACHE, pack "
                "as int8 or int4, or give --force"
            )


# What stands for files of weights


@contextmanager
def _locked(out: Path) -> Iterator[Path]:
    """The directory of stand-ins, for this process alone. Raises: OledMoeError."""
    directory = partial_path(out).with_name(f"{partial_path(out).name}.shards")
    directory.mkdir(exist_ok=True)
    with open(directory / _LOCK_NAME, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OledMoeError(f"another process writes {directory}; wait for it") from None
        yield directory


class _StandIns:
    """The files of weights in a directory, as far as they are there.

    `files`: what the model consists of; what was set aside of another is worth nothing.
    """

    def __init__(self, directory: Path, files: Mapping[str, Any]) -> None:
        self.directory = directory
        self._record = directory / _ASIDE_NAME
        self._aside: dict[str, set[Range]] = {}
        first = json.dumps(files, sort_keys=True).encode()
        found = self._record.read_bytes() if self._record.exists() else b""
        # What a kill left of a line is no line.
        lines = found.split(b"\n")[:-1]
        if not lines or lines[0] != first:
            for path in directory.iterdir():
                if path.name != _LOCK_NAME:
                    path.unlink()
            lines = [first]
        for line in lines[1:]:
            name, ranges = json.loads(line)
            self._aside[name] = {(offset, num_bytes) for offset, num_bytes in ranges}
        _write_synced(self._record, b"".join(line + b"\n" for line in lines))

    def make(self, name: str, num_bytes: int, read_start: Callable[[int], bytes]) -> None:
        """Have a stand-in, as it is if there is one. `read_start` gives the file's first bytes."""
        path = self.directory / name
        if path.is_file() and not path.is_symlink() and path.stat().st_size == num_bytes:
            return
        self._note(name, set())
        start = read_start(_START_BYTES)
        if (length := _header_bytes(start)) > len(start):
            start = read_start(length)
        with self._replacing(name) as target:
            target.write(start[:length])
            target.truncate(num_bytes)

    def put(self, name: str, whole: Path) -> None:
        """Have the file itself stand there. Raises: DownloadError where it begins otherwise."""
        path, draft = self.directory / name, self._draft(name)
        if _read_header(path) != _read_header(whole):
            raise DownloadError(
                f"{name}: its header came damaged when the pack was begun; remove what begins with "
                f"{self.directory.with_suffix('')} and run the same command again"
            )
        self._note(name, set())
        draft.unlink(missing_ok=True)
        draft.symlink_to(whole.absolute())
        os.replace(draft, path)

    def keep(self, name: str, waiting: Iterable[Piece]) -> None:
        """Let go of the file itself, and of all that no piece waits for."""
        needed: dict[str, set[Range]] = defaultdict(set)
        for piece in waiting:
            for path, *span in piece.spans:
                needed[path.name].add((span[0], span[1]))
        self._write(name, needed[name])
        self._note(name, needed[name])
        for other in [other for other in self._aside if not needed[other]]:
            self._note(other, set())
            self._write(other, set())

    def lacking(self, piece: Piece) -> list[tuple[str, Range]]:
        """What a piece reads that is not set aside."""
        reads = [(path.name, (offset, num_bytes)) for path, offset, num_bytes in piece.spans]
        return [(name, read) for name, read in reads if read not in self._aside.get(name, ())]

    def has_all(self, present: str, piece: Piece) -> bool:
        """Whether a piece can be made while the file `present` is there."""
        return all(name == present for name, _ in self.lacking(piece))

    def _note(self, name: str, ranges: set[Range]) -> None:
        """Enter what is set aside of a file, where that has changed."""
        if ranges == self._aside.get(name, set()):
            return
        self._aside[name] = ranges
        if not ranges:
            del self._aside[name]
        with open(self._record, "ab") as file:
            file.write(json.dumps([name, sorted(ranges)]).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _write(self, name: str, ranges: Iterable[Range]) -> None:
        """Have a stand-in of what stands there, with these bytes of it."""
        path = self.directory / name
        with open(path, "rb") as source, self._replacing(name) as target:
            target.write(_read_header(path))
            for offset, num_bytes in sorted(ranges):
                source.seek(offset)
                target.seek(offset)
                for start in range(0, num_bytes, _COPY_BYTES):
                    target.write(source.read(min(_COPY_BYTES, num_bytes - start)))
            target.truncate(path.stat().st_size)

    @contextmanager
    def _replacing(self, name: str) -> Iterator[BinaryIO]:
        """A file that takes the place of a stand-in, at once."""
        draft = self._draft(name)
        draft.unlink(missing_ok=True)
        with open(draft, "wb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        os.replace(draft, self.directory / name)
        _sync_directory(self.directory)

    def _draft(self, name: str) -> Path:
        return self.directory / f".{name}.new"


def _header_bytes(start: bytes) -> int:
    """How long the header is with which a safetensors file begins, and its length before it."""
    return 8 + min(int.from_bytes(start[:8], "little"), MAX_HEADER_BYTES)


def _read_header(path: Path) -> bytes:
    with open(path, "rb") as file:
        start = file.read(8)
        return start + file.read(_header_bytes(start) - 8)


def _write_synced(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.new")
    with open(draft, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
