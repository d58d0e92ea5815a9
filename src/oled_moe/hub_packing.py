"""Packs a model of the hub while it comes: one of its files of weights is on the disk at a time.

A piece of the pack is written as soon as all that it reads is there; of a piece that must wait for
a later file, what it reads is set aside (stand_ins.py). A run that was killed anywhere is
continued, and the bytes are those that `pull` and then `pack` give.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from oled_moe.config import format_size
from oled_moe.devices import Progress
from oled_moe.encodings import split_quantization
from oled_moe.errors import CheckpointError, DoesNotFitError
from oled_moe.hub import HubModel, Selection, existing_parent
from oled_moe.hub import Progress as DownloadProgress
from oled_moe.hub_client import HubFile
from oled_moe.pack_places import check_place, check_shards, writing
from oled_moe.pack_writer import (
    SPARE_BYTES,
    Journal,
    PackJob,
    Piece,
    begin_pack,
    name_pack,
    open_journal,
    seal_pack,
    write_pieces,
)
from oled_moe.packing import (
    PackReport,
    check_dtype,
    default_threads,
    make_report,
    plan_pack,
)
from oled_moe.stand_ins import StandIns, remove_stand_ins, stand_ins_of


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
    check_shards(out)
    _check_config(model, check_config)
    source = model.select()
    with writing(out), stand_ins_of(out) as directory:
        stand_ins = StandIns(directory, _files_of(source))
        plan_job = partial(_plan_job, model, source, stand_ins, dtype)
        job = _first_job(model, source, stand_ins, out, plan_job)
        with open_journal(out, job) as journal:
            num_resumed = begin_pack(job, out, journal)
            plan = _plan(job, journal, stand_ins, source)
            if not is_forced:
                free = free_bytes or _free_bytes
                _check_room(plan, job.num_bytes - num_resumed, model, out, free)
            if on_plan is not None:
                on_plan(plan)
            num_threads = num_threads or default_threads()
            # What a run that was killed had used already, and not let go of.
            for file in set(source.weights).difference(plan.fetched):
                model.forget(file)
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
            remove_stand_ins(directory)
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
    stand_ins: StandIns,
    out: Path,
    plan_job: Callable[[], PackJob],
) -> PackJob:
    """The job as headers alone tell it; nothing can be made by it."""
    for file in source.small:
        shutil.copyfile(model.fetch(file), stand_ins.directory / file.name)
    for file in source.weights:
        stand_ins.make(file.name, file.num_bytes, partial(model.read_start, file))
    with _opened(plan_job) as job:
        return job


def _plan_job(model: HubModel, source: Selection, stand_ins: StandIns, dtype: str) -> PackJob:
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


def _plan(job: PackJob, journal: Journal, stand_ins: StandIns, source: Selection) -> PackPlan:
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
