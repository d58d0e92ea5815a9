"""Brings a model from a Hugging Face hub into the local cache, every file proved by its checksum.

`pull` brings all of a model; `HubModel` brings one file at a time and lets go of it again, for
whoever turns a model that is larger than the disk has room for into something smaller. A file's
bytes stay where they are when a download ends early, also by kill -9: the next one continues there.
No torch.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from oled_moe.config import format_size
from oled_moe.errors import (
    CheckpointError,
    DoesNotFitError,
    DownloadError,
    OledMoeError,
    ServerNotFoundError,
)
from oled_moe.hub_cache import CachedModel, is_plain_file_name
from oled_moe.hub_client import HubClient, HubFile, LostConnectionError

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
# What of a repository is read here, besides weights.
_SMALL_NAMES = (
    CONFIG_NAME,
    INDEX_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHTS_SUFFIX = ".safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_CHUNK_BYTES = 2**20
_LOCK_WAIT_S = 0.2
# Pauses before asking again for bytes that do not come; the count starts anew when enough came.
_PAUSES_S = (0.5, 1.0, 2.0)
_MAX_PAUSE_S = 10.0
_ENOUGH_BYTES = 2**20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

Action = Literal["checking", "downloading", "waiting for another process with"]
# Told of an action on a file, and how many bytes of that file are done.
Progress = Callable[[Action, HubFile, int], None]
FileState = Literal["present", "downloaded", "replaced"]


def _silent(action: Action, file: HubFile, num_bytes: int) -> None:
    """Nobody looks."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of a model that are read here; `left_out` has all others."""

    small: tuple[HubFile, ...]
    weights: tuple[HubFile, ...]
    left_out: tuple[HubFile, ...]

    @property
    def files(self) -> tuple[HubFile, ...]:
        return (*self.small, *self.weights)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class PullReport:
    """What `pull` did. `states` says of each file whether it was there, came, or came anew."""

    model: str
    revision: str
    commit: str
    path: Path
    selection: Selection
    states: Mapping[str, FileState]

    @property
    def downloaded_bytes(self) -> int:
        return sum(f.num_bytes for f in self.selection.files if self.states[f.name] != "present")


class HubModel:
    """One model at one commit of it: which files it has, brought one by one.

    `states` says of each file that was fetched how it came here.
    Raises: what `HubClient.list_files` raises, DownloadError once it was asked often enough.
    """

    def __init__(
        self, client: HubClient, cache: Path, name: str, revision: str | None = None
    ) -> None:
        self.name = name
        self.revision = revision or "main"
        self._client = client
        self.cached = CachedModel(cache, name)
        self.states: dict[str, FileState] = {}
        pauses_s = iter(_PAUSES_S)
        while True:
            try:
                self.commit, self.files = client.list_files(name, self.revision)
                return
            except LostConnectionError as error:
                _pause(pauses_s, error, str(error))
            except ServerNotFoundError as error:
                if self.cached.find_snapshot(revision) is None:
                    raise
                raise ServerNotFoundError(
                    f"{error}; {name} is in the local cache already and can be used as it is"
                ) from None

    @property
    def _by_name(self) -> dict[str, HubFile]:
        """The files that can be files here: none in folders, no odd names."""
        return {file.name: file for file in self.files if is_plain_file_name(file.name)}

    def read_config(self) -> dict[str, Any]:
        """Fetch config.json. Raises: CheckpointError where there is none."""
        if CONFIG_NAME not in self._by_name:
            raise CheckpointError(
                f"{self.name} has no {CONFIG_NAME}, so it is no checkpoint that can be run here; "
                "name the repository of the original weights"
            )
        return self._read_json(self._by_name[CONFIG_NAME])

    def select(self) -> Selection:
        """Which files are read here. Fetches the index, where there is one, to know the weights.

        Raises: CheckpointError where the weights are not there, or not as safetensors.
        """
        by_name = self._by_name
        small = [by_name[name] for name in _SMALL_NAMES if name in by_name]
        weights = [file for name, file in by_name.items() if name.endswith(_WEIGHTS_SUFFIX)]
        if INDEX_NAME in by_name:
            weights = self._named_by_index(by_name)
        if not weights:
            raise CheckpointError(_no_weights(self.name, list(by_name)))
        chosen = {file.name for file in (*small, *weights)}
        left_out = [file for file in self.files if file.name not in chosen]
        return Selection(tuple(small), tuple(weights), tuple(left_out))

    def _named_by_index(self, by_name: Mapping[str, HubFile]) -> list[HubFile]:
        weight_map = self._read_json(by_name[INDEX_NAME]).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.name}: {INDEX_NAME} has no weight_map; tell its owner")
        named = sorted({str(shard) for shard in weight_map.values()})
        missing = [shard for shard in named if shard not in by_name]
        if missing:
            raise CheckpointError(
                f"{self.name} lacks {len(missing)} of {len(named)} files that {INDEX_NAME} names, "
                f"{missing[0]!r:.200} among them; choose another --revision, or tell its owner"
            )
        return [by_name[shard] for shard in named]

    def _read_json(self, file: HubFile) -> dict[str, Any]:
        try:
            value = json.loads(self.fetch(file).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self.name}: {file.name} is not valid JSON ({error}); tell its owner"
            ) from None
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.name}: {file.name} is not a JSON object; tell its owner")
        return value

    def find(self, file: HubFile) -> Path | None:
        """Where a file of the right size lies already; its bytes are not looked at."""
        path = self.cached.find_file(self.commit, file.name, file.checksum)
        return path if path is not None and path.stat().st_size == file.num_bytes else None

    def missing_bytes(self, files: Sequence[HubFile]) -> int:
        """How many more bytes of these files the disk must hold."""
        missing = 0
        for file in files:
            if self.find(file) is None:
                partial = self.cached.partial(file.checksum)
                there = partial.stat().st_size if partial.is_file() else 0
                missing += max(0, file.num_bytes - there)
        return missing

    def fetch(self, file: HubFile, progress: Progress = _silent) -> Path:
        """A file with the right checksum: the one that is there, else downloaded.

        Raises: DownloadError, ModelNotFoundError, DoesNotFitError.
        Mutates: the cache, and `states`.
        """
        with _disk_errors(self.cached.cache), self._locked(file, progress):
            path = self.cached.find_file(self.commit, file.name, file.checksum)
            if path is not None and _is_intact(path, file, progress):
                self.states.setdefault(file.name, "present")
                return path
            if path is not None:
                logger.info("%s is damaged and is downloaded again", path)
                self.cached.forget_file(self.commit, file.name, file.checksum)
            downloaded = self._download(file, progress)
            self.states[file.name] = "downloaded" if path is None else "replaced"
            return downloaded

    def read_start(self, file: HubFile, num_bytes: int) -> bytes:
        """The first bytes of a file, fewer where it is shorter. No checksum covers them.

        Raises: as `fetch`.
        """
        num_bytes = min(num_bytes, file.num_bytes)
        pauses_s = iter(_PAUSES_S)
        content = bytearray()
        while len(content) < num_bytes:
            content.clear()
            lost = LostConnectionError("the hub ended its reply")
            try:
                with self._client.read(self.name, self.commit, file, 0) as (_, chunks):
                    while len(content) < num_bytes and (chunk := next(chunks, b"")):
                        content += chunk
            except LostConnectionError as error:
                lost = error
            if len(content) < num_bytes:
                _pause(pauses_s, lost, f"the beginning of {file.name} broke off ({lost})")
        return bytes(content[:num_bytes])

    def forget(self, file: HubFile) -> None:
        """Give the disk space of a file back, unless it was pulled to stay. Mutates: the cache."""
        if not self.cached.is_published(file.name, file.checksum):
            self.cached.forget_file(self.commit, file.name, file.checksum)

    def publish(self, files: Sequence[HubFile]) -> Path:
        """Have this model found by its name, with these files. Returns its directory."""
        with _disk_errors(self.cached.cache):
            checksums = {file.name: file.checksum for file in files}
            return self.cached.publish(self.commit, self.revision, checksums)

    @contextmanager
    def _locked(self, file: HubFile, progress: Progress) -> Iterator[None]:
        """Nobody else writes this file meanwhile; a process that dies leaves no lock."""
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # lazily

        path = self.cached.lock(file.checksum)
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(WeakFileLock(path, timeout=_LOCK_WAIT_S))
            except TimeoutError:
                progress("waiting for another process with", file, 0)
                logger.info("another process is downloading %s; waiting for it", file.name)
                stack.enter_context(WeakFileLock(path))
            yield

    def _download(self, file: HubFile, progress: Progress) -> Path:
        blob, partial = self.cached.blob(file.checksum), self.cached.partial(file.checksum)
        blob.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            with open(partial, "ab+") as opened:
                arrival = _Arrival(file, opened, progress)
                self._receive(arrival)
            if arrival.is_intact():
                partial.replace(blob)
                return blob
            # What an earlier run left, or the way here, may have damaged it.
            partial.unlink(missing_ok=True)
        raise DownloadError(
            f"{file.name} of {self.name} came damaged twice: its bytes do not have the checksum "
            f"that the hub names, {file.checksum}; try again later"
        )

    def _receive(self, arrival: "_Arrival") -> None:
        """Take bytes until there are as many as there should be."""
        file = arrival.file
        pauses_s = iter(_PAUSES_S)
        while arrival.num_bytes < file.num_bytes:
            start = arrival.num_bytes
            lost = LostConnectionError(f"the hub ended its reply at byte {start}")
            try:
                with self._client.read(self.name, self.commit, file, start) as (first, chunks):
                    arrival.continue_at(first)
                    for chunk in chunks:
                        arrival.add(chunk)
            except LostConnectionError as error:
                lost = error
            if arrival.num_bytes - start >= _ENOUGH_BYTES:
                pauses_s = iter(_PAUSES_S)
            if arrival.num_bytes < file.num_bytes:
                there = f"{format_size(arrival.num_bytes)} of {format_size(file.num_bytes)}"
                _pause(pauses_s, lost, f"{file.name} broke off at {there}, which are kept ({lost})")


class _Arrival:
    """A file on its way: its bytes so far, on disk and in its checksum."""

    def __init__(self, file: HubFile, opened: BinaryIO, progress: Progress) -> None:
        self.file = file
        self.num_bytes = 0
        self._opened = opened
        self._progress = progress
        self._digest = _new_digest(file)
        there = os.fstat(opened.fileno()).st_size
        # More bytes than there should be are of no file that is known.
        if there > file.num_bytes:
            opened.truncate(0)
            there = 0
        opened.seek(0)
        while self.num_bytes < there and (chunk := opened.read(_CHUNK_BYTES)):
            self._count("checking", chunk)

    def continue_at(self, first: int) -> None:
        """The next bytes begin at `first`; where that is not the end, all begins anew."""
        if first == self.num_bytes:
            return
        self._opened.truncate(0)
        self._digest = _new_digest(self.file)
        self.num_bytes = 0
        if first:
            raise LostConnectionError(f"the hub sent bytes from {first} on, which nobody asked for")

    def add(self, chunk: bytes) -> None:
        """Raises: DownloadError for more bytes than there should be."""
        if self.num_bytes + len(chunk) > self.file.num_bytes:
            self._opened.truncate(0)
            raise DownloadError(
                f"{self.file.name} is longer than the {self.file.num_bytes} bytes that the hub "
                "lists; try again later"
            )
        self._opened.write(chunk)
        # Else bytes would wait here for more, and be lost with the process.
        self._opened.flush()
        self._count("downloading", chunk)

    def is_intact(self) -> bool:
        return bool(self._digest.hexdigest() == self.file.checksum)

    def _count(self, action: Action, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.num_bytes += len(chunk)
        self._progress(action, self.file, self.num_bytes)


def pull(
    model: HubModel,
    *,
    check_config: Callable[[Mapping[str, Any]], None],
    is_forced: bool = False,
    on_selection: Callable[[Selection], None] | None = None,
    progress: Progress = _silent,
) -> PullReport:
    """Bring all that is read here of a model, and only then have it found by its name.

    `check_config` sees config.json before anything large is fetched, and raises for a model that
    cannot be run; `on_selection` is told what is about to be fetched. `is_forced` looks neither at
    the config nor at disk space.

    Raises: CheckpointError, DoesNotFitError, and what `HubModel.fetch` raises.
    """
    config = model.read_config()
    if not is_forced:
        try:
            check_config(config)
        except CheckpointError as error:
            raise CheckpointError(
                f"{model.name} cannot be run here: {error} (--force downloads it all the same)"
            ) from None
    selection = model.select()
    if not is_forced:
        _check_disk(model, selection)
    if on_selection is not None:
        on_selection(selection)
    for file in selection.files:
        model.fetch(file, progress)
    path = model.publish(selection.files)
    return PullReport(model.name, model.revision, model.commit, path, selection, dict(model.states))


def stream_weights(
    model: HubModel,
    weights: Sequence[HubFile],
    use: Callable[[HubFile, Path], None],
    progress: Progress = _silent,
) -> None:
    """Have `use` see each file of weights in turn; at most one of them lies on the disk at a time.

    Files of a model that was pulled before stay. Raises: what `HubModel.fetch` and `use` raise; the
    file that was being used stays then, for the next try.
    """
    for file in weights:
        use(file, model.fetch(file, progress))
        model.forget(file)


def _check_disk(model: HubModel, selection: Selection) -> None:
    missing = model.missing_bytes(selection.files)
    place = existing_parent(model.cached.cache)
    free = shutil.disk_usage(place).free
    if missing > free:
        raise DoesNotFitError(
            f"{model.name} needs {format_size(missing)} more on the disk of {model.cached.cache}, "
            f"which has {format_size(free)} free; make room, set HF_HUB_CACHE to a place on a "
            "larger disk, or give --force"
        )


def existing_parent(path: Path) -> Path:
    """The directory that is there of a path that need not be: its disk is the path's."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())


@contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    """What the disk refuses becomes one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise DoesNotFitError(
                f"the disk of {cache} is full; make room, and the same command continues where it "
                "was"
            ) from None
        raise OledMoeError(
            f"the hub cache {cache} cannot be used ({error.strerror}: {error.filename or cache}); "
            "check its permissions, or set HF_HUB_CACHE to another place"
        ) from None


def _is_intact(path: Path, file: HubFile, progress: Progress) -> bool:
    if path.stat().st_size != file.num_bytes:
        return False
    digest = _new_digest(file)
    num_bytes = 0
    with open(path, "rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            progress("checking", file, num_bytes)
    return bool(digest.hexdigest() == file.checksum)


def _new_digest(file: HubFile) -> Any:
    if len(file.checksum) == hashlib.sha256().digest_size * 2:
        return hashlib.sha256()
    # What git calls a file's id: the checksum of its kind, its size and its bytes.
    return hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)


def _pause(pauses_s: Iterator[float], error: LostConnectionError, what: str) -> None:
    """Wait before asking again. Raises: DownloadError of `what`, once that was done enough."""
    pause_s = next(pauses_s, None)
    if error.wait_s > _MAX_PAUSE_S:
        raise DownloadError(f"{what}; it says to ask again in {error.wait_s:.0f} s")
    if pause_s is None:
        raise DownloadError(f"{what}; try again later")
    logger.info("%s; asking again", error)
    time.sleep(max(pause_s, error.wait_s))


def _no_weights(name: str, file_names: Sequence[str]) -> str:
    pickles = [file for file in file_names if file.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{name} has weights in pickle files only ({pickles[0]}), which can run code when "
            f"read; only *{_WEIGHTS_SUFFIX} files are read: look for a copy with those"
        )
    return f"{name} has no *{_WEIGHTS_SUFFIX} file; name a repository with weights in that format"
