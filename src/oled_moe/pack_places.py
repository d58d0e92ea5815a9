"""Where a pack is written: a directory beside OUT, which gets its name at the end.

OUT.partial            the directory to be
OUT.partial.journal    what of it is on the disk
OUT.partial.shards     what `pull --pack` has set aside (stand_ins.py)
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oled_moe.errors import ConfigError, DoesNotFitError, OledMoeError

# The first file that a run has in OUT.partial.shards.
SHARDS_LOCK_NAME = ".lock"
_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What another place would not refuse.
_IS_REFUSED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)


def partial_path(out: Path) -> Path:
    """Where a pack is written until it is whole."""
    return out.with_name(f"{out.name}.partial")


def journal_path(out: Path) -> Path:
    """What tells which pieces of it are on the disk."""
    return out.with_name(f"{out.name}.partial.journal")


def shards_path(out: Path) -> Path:
    """Where `pull --pack` has what it cannot write yet."""
    return out.with_name(f"{out.name}.partial.shards")


def what_stays(out: Path) -> list[Path]:
    """What a run has left beside `out` for the next one."""
    return [path for path in (partial_path(out), shards_path(out)) if os.path.isdir(path)]


def check_place(out: Path, source: Path | None = None) -> None:
    """Prove that a pack of `source`, None where that is no path, may be made at `out`.

    Raises: ConfigError.
    """
    if "\0" in str(out):
        raise ConfigError(f"{str(out)!r} cannot be a path; name another place for the pack")
    if not out.name:
        raise ConfigError(f"{out} has no name that a pack could get; name a place below it")
    check_free(out)
    partial, above = partial_path(out), _existing(out.parent)
    if not os.path.isdir(above):
        raise ConfigError(f"{above} is no directory; name another place for the pack than {out}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{above} may not be written to; name another place for the pack")
    if os.path.lexists(partial) and (partial.is_symlink() or not os.path.isdir(partial)):
        raise ConfigError(f"{partial} is no directory; remove it, or name another place")
    if source is not None:
        _check_apart(out, source)


def check_shards(out: Path) -> None:
    """Prove that what is set aside for a pack at `out` may lie beside it: nothing but what an
    earlier run has left is there. Raises: ConfigError."""
    shards = shards_path(out)
    if not os.path.lexists(shards):
        return
    if shards.is_symlink() or not os.path.isdir(shards):
        raise ConfigError(f"{shards} is no directory; remove it, or name another place")
    if any(shards.iterdir()) and not (shards / SHARDS_LOCK_NAME).is_file():
        raise ConfigError(f"{shards} was not left by a pack; remove it, or name another place")


def check_free(out: Path) -> None:
    """Raises: ConfigError where something is at `out`; a journal that it has left goes."""
    if not os.path.lexists(out):
        return
    if not os.path.lexists(partial_path(out)):
        _forget_journal(out)
    raise ConfigError(f"{out} is there already; remove it, or name another place for the pack")


def _existing(path: Path) -> Path:
    """The last part of a path that is there."""
    return next(part for part in (path, *path.absolute().parents) if os.path.lexists(part))


def _check_apart(out: Path, source: Path) -> None:
    """Raises: ConfigError where the pack would lie in what it is made from, or the other way."""
    here, there = source.resolve(), out.parent.resolve() / out.name
    if source.is_dir() and here in there.parents:
        raise ConfigError(f"{out} lies in {source}, which is packed; name a place outside of it")
    if partial_path(there) in (here, *here.parents):
        raise ConfigError(
            f"{source} lies in {partial_path(out)}, where the pack is written until it is whole; "
            "name another place for the pack"
        )


def _forget_journal(out: Path) -> None:
    """Remove the journal of a pack that is whole: its run ended before it could."""
    try:
        with open(journal_path(out), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(file.fileno(), journal_path(out)):
                journal_path(out).unlink()
    except OSError:
        # None is there, or somebody writes it.
        return


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Has the directory above `out`. Raises: OledMoeError for what the system refuses within."""
    made = [path for path in (out.parent, *out.parent.parents) if not os.path.lexists(path)]
    try:
        with _refusals_told(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            yield
    except (Exception, KeyboardInterrupt):
        # Those that hold nothing go again.
        with suppress(OSError):
            for path in made:
                path.rmdir()
        raise


@contextmanager
def _refusals_told(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "check the disk"
        kind: type[OledMoeError] = OledMoeError
        if error.errno in _IS_FULL:
            kind, remedy = DoesNotFitError, "free space, or name another place"
        elif error.errno in _IS_REFUSED:
            kind, remedy = ConfigError, "name another place for the pack"
        stays = "; what is written stays for the next run of the same command"
        raise kind(
            f"{error.filename or partial_path(out)}: cannot be written ({error.strerror}); "
            f"{remedy}{stays if what_stays(out) else ''}"
        ) from error
