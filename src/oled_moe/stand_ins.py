"""What stands for files of weights that are not on the disk, while a pack is made of them.

Beside the pack to be stands a directory that is the checkpoint but for most of its bytes: instead
of each file of weights a sparse *stand-in* of full size with its header, and, while the file itself
is there, a link to it. What is set aside of a file lies in its stand-in, where it lay in the file.

    OUT.partial.shards/config.json, …      small files
    OUT.partial.shards/NAME.safetensors    stand-ins
    OUT.partial.shards/.aside              the model's files, then lines [name, ranges]: what is set
                                           aside in a stand-in; the last line of a name counts.
                                           Before each line stands its checksum

A line follows the bytes that it speaks of, and comes before their loss.
"""

import fcntl
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from oled_moe.errors import DownloadError, OledMoeError
from oled_moe.pack_places import SHARDS_LOCK_NAME, partial_path, shards_path
from oled_moe.pack_writer import Piece, of_line, to_line
from oled_moe.tensor_files import MAX_HEADER_BYTES

# Most headers are shorter: one request brings them.
_START_BYTES = 2**20
_COPY_BYTES = 16 * 2**20
_ASIDE_NAME = ".aside"

# Where bytes begin in a file, and how many.
Range = tuple[int, int]


@contextmanager
def stand_ins_of(out: Path) -> Iterator[Path]:
    """The directory of stand-ins, for this process alone; it goes where a run leaves nothing in
    them nor in the pack. Raises: OledMoeError."""
    directory = shards_path(out)
    directory.mkdir(exist_ok=True)
    with open(directory / SHARDS_LOCK_NAME, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OledMoeError(f"another process writes {directory}; wait for it") from None
        try:
            yield directory
        except (Exception, KeyboardInterrupt):
            if not os.path.lexists(partial_path(out)) and not _has_aside(directory):
                with suppress(OSError):
                    remove_stand_ins(directory)
            raise


def remove_stand_ins(directory: Path) -> None:
    """Remove the directory; until the end it can be told to be one of ours."""
    for path in directory.iterdir():
        if path.name != SHARDS_LOCK_NAME:
            path.unlink()
    (directory / SHARDS_LOCK_NAME).unlink()
    directory.rmdir()


def _has_aside(directory: Path) -> bool:
    """Whether anything was set aside: there are lines behind the first."""
    record = directory / _ASIDE_NAME
    return record.is_file() and record.read_bytes().count(b"\n") > 1


class StandIns:
    """The files of weights in a directory, as far as they are there. Mutates: the directory.

    `files`: what the model consists of; what was set aside of another is worth nothing.
    """

    def __init__(self, directory: Path, files: Mapping[str, Any]) -> None:
        self.directory = directory
        self._record = directory / _ASIDE_NAME
        self._aside: dict[str, set[Range]] = {}
        found = self._record.read_bytes() if self._record.exists() else b""
        # What a kill left of a line is no line.
        lines = [line + b"\n" for line in found.split(b"\n")[:-1]]
        first = to_line(files)
        try:
            known = [of_line(line.removesuffix(b"\n")) for line in lines[1:]]
        except ValueError:
            # What the record says is not to be trusted, nor what is set aside.
            lines = []
        if not lines or lines[0] != first:
            for path in directory.iterdir():
                if path.name != SHARDS_LOCK_NAME:
                    path.unlink()
            lines, known = [first], []
        for name, ranges in known:
            self._aside[name] = {(offset, num_bytes) for offset, num_bytes in ranges}
        _write_synced(self._record, b"".join(lines))

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
            file.write(to_line([name, sorted(ranges)]))
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
