"""The cache that all Hugging Face tools share: where it is, and where files of a model lie in it.

No network and no torch. Source of the layout: huggingface_hub, its guide "Understand caching".

    models--ORG--NAME/
      blobs/CHECKSUM             a file's bytes; sha256 of a large file, git's own of a small one
      blobs/CHECKSUM.incomplete  those that have come so far
      snapshots/COMMIT/FILE      links to blobs, under the names that files have in that commit
      refs/REVISION              the commit that a branch or tag was when it was last asked for
"""

import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oled_moe.errors import ConfigError

# What the hub allows in either half of a name; not `..` and not `--`, which parts the halves here.
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_FILE_NAME = re.compile(r"[\w.+-]+", re.ASCII)
_REVISION = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.ASCII)
_MAX_NAME_LETTERS = 96


def default_hub_cache() -> Path:
    """Where Hugging Face tools keep what they download: HF_HUB_CACHE, else below HF_HOME.

    The one location that does not come through a flag: every tool on the machine must agree on it.
    """
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if cache := os.environ.get(variable):
            return _expanded(cache)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return _expanded(cache) / "huggingface" / "hub"
    return Path.home() / ".cache" / "huggingface" / "hub"


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a model on a hub, ORG/NAME."""
    return (
        len(name) <= _MAX_NAME_LETTERS
        and _HUB_ID.fullmatch(name) is not None
        and not {"..", "--"} & {name[i : i + 2] for i in range(len(name))}
    )


def is_plain_file_name(name: str) -> bool:
    """Whether a name from a hub can be that of a file here: no folder, nothing odd."""
    return _FILE_NAME.fullmatch(name) is not None and name not in (".", "..")


def check_revision(revision: str) -> None:
    """Raises: ConfigError for what can be neither a branch, nor a tag, nor a commit."""
    if not _REVISION.fullmatch(revision) or {".", ".."} & set(revision.split("/")):
        raise ConfigError(
            f"revision is {revision!r}; allowed: the name of a branch or tag, or a commit"
        )


@dataclass(frozen=True, slots=True)
class CachedModel:
    """The folder of one model in the cache, which need not exist yet."""

    cache: Path
    name: str

    @property
    def folder(self) -> Path:
        return self.cache / self._folder_name

    @property
    def _folder_name(self) -> str:
        return f"models--{self.name.replace('/', '--')}"

    def blob(self, checksum: str) -> Path:
        return self.folder / "blobs" / checksum

    def partial(self, checksum: str) -> Path:
        """Where the bytes of a file lie until all have come."""
        return self.folder / "blobs" / f"{checksum}.incomplete"

    def lock(self, checksum: str) -> Path:
        """The file that whoever writes a blob locks; huggingface_hub locks the same."""
        return self.cache / ".locks" / self._folder_name / f"{checksum}.lock"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def find_file(self, commit: str, file_name: str, checksum: str) -> Path | None:
        """A file that is there in full, if nothing went wrong with its bytes."""
        # Where there are no links, tools put the bytes themselves into the snapshot.
        for path in (self.blob(checksum), self.snapshot(commit) / file_name):
            if path.is_file():
                return path
        return None

    def forget_file(self, commit: str, file_name: str, checksum: str) -> None:
        """Remove a file's bytes, and its name in this snapshot."""
        for path in (self.snapshot(commit) / file_name, self.blob(checksum)):
            path.unlink(missing_ok=True)

    def is_published(self, file_name: str, checksum: str) -> bool:
        """Whether some snapshot has these bytes under any name, or a file of that name itself."""
        blob = self.blob(checksum).resolve()
        return any(
            path.resolve() == blob if path.is_symlink() else path.name == file_name
            for path in self.folder.glob("snapshots/*/*")
        )

    def find_snapshot(self, revision: str | None = None) -> Path | None:
        """The snapshot of a revision; of None the one that `main` points to, else the newest."""
        named = self._snapshot_of(revision or "main")
        if named is not None or revision is not None:
            return named
        snapshots = [path for path in self.folder.glob("snapshots/*") if path.is_dir()]
        return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)

    def _snapshot_of(self, revision: str) -> Path | None:
        reference = self.folder / "refs" / revision
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
        return path if (path := self.snapshot(commit)).is_dir() else None

    def publish(self, commit: str, revision: str, checksums: Mapping[str, str]) -> Path:
        """Have the files of a commit found by their names, then the commit by its revision.

        `checksums` has that of each file's blob. Until then nobody takes what has come so far for
        the model. Mutates: the cache. Returns the snapshot.
        """
        snapshot = self.snapshot(commit)
        snapshot.mkdir(parents=True, exist_ok=True)
        uses = Counter(checksums.values())
        for name, checksum in checksums.items():
            uses[checksum] -= 1
            if not (snapshot / name).exists():
                _link(self.blob(checksum), snapshot / name, is_needed_again=uses[checksum] > 0)
        if revision != commit:
            _write_at_once(self.folder / "refs" / revision, commit)
        return snapshot


def _link(blob: Path, path: Path, *, is_needed_again: bool) -> None:
    """Give a blob a name: a relative link, or the bytes themselves where the disk has no links."""
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except FileExistsError:
        # Another process was as far at the same moment; names never change what they mean.
        pass
    except OSError:
        if is_needed_again:
            shutil.copyfile(blob, path)
        else:
            blob.replace(path)


def _write_at_once(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
