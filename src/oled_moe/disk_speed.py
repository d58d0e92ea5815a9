"""Measures how fast experts come from a disk that has none of them in memory.

Reads go through `DiskExpertStore`, so that the numbers are those of the path the engine takes.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oled_moe.config import format_size
from oled_moe.errors import CheckpointError
from oled_moe.machine import usable_memory_bytes
from oled_moe.measuring import Effort, Figure
from oled_moe.store import (
    READ_METHODS,
    DiskExpertStore,
    ExpertLayout,
    FileSpan,
    PlacedSpan,
    drop_cached,
)

QUEUE_DEPTHS = (1, 2, 4, 8)
# A safetensors header has any length: experts of a checkpoint do not begin at whole blocks.
_SCRATCH_HEADER_BYTES = 1000
_SCRATCH_CHUNK_BYTES = 32 * 2**20
# Two experts' worth of nothing: what a read costs besides its bytes.
_TINY_LAYOUT = ExpertLayout(16, 8, torch.float32)
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
# How much faster reads through the page cache must be to be worth it: they cost a copy on a core
# that computes otherwise, about 0.35 s per GB against 0.05 where this was measured.
BUFFERED_ADVANTAGE = 1.5
# Depths within this share of the fastest count as equally fast; the fewest threads win.
_DEPTH_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class DiskRead:
    """Cold reads of single experts with `queue_depth` of them in flight.

    Units: bytes_per_s counts whole slots over all reads; tiny_read_s is the time per read, again
    over all in flight, of so few bytes that only the overhead is left.
    """

    method: str
    queue_depth: int
    bytes_per_s: Figure
    tiny_read_s: Figure


def best_disk_read(reads: Sequence[DiskRead]) -> DiskRead | None:
    """The fastest way to read, or the one of about that speed that needs the fewest threads.

    Direct, unless reading through the page cache is faster by `BUFFERED_ADVANTAGE`.
    """
    if not reads:
        return None
    direct = [read for read in reads if read.method == "direct"]
    fastest = max(read.bytes_per_s.median for read in reads)
    if direct and fastest < BUFFERED_ADVANTAGE * max(r.bytes_per_s.median for r in direct):
        reads = direct
        fastest = max(read.bytes_per_s.median for read in reads)
    near = [r for r in reads if r.bytes_per_s.median >= fastest * (1 - _DEPTH_TOLERANCE)]
    return min(near, key=lambda read: (read.queue_depth, -read.bytes_per_s.median))


def measure_disk(
    directory: Path, layout: ExpertLayout, effort: Effort, warnings: list[str]
) -> tuple[int, tuple[DiskRead, ...]]:
    """The size of the scratch file and the figures; (0, ()) and a warning where there are none."""
    if not hasattr(os, "preadv"):
        warnings.append("disk reads not measured: this platform has no preadv")
        return 0, ()
    try:
        free = shutil.disk_usage(directory).free
        num_experts = min(effort.max_scratch_bytes, free // 4) // layout.weight_bytes
        if num_experts < 2:
            warnings.append(
                f"disk reads not measured: two experts of {format_size(layout.weight_bytes)} are "
                f"more than the scratch file in {directory} may take "
                f"({format_size(min(effort.max_scratch_bytes, free // 4))})"
            )
            return 0, ()
        _warn_if_in_memory(directory, warnings)
        with ExitStack() as stack:
            descriptor, path = stack.enter_context(_scratch_file(directory))
            size = _SCRATCH_HEADER_BYTES + num_experts * layout.weight_bytes
            os.ftruncate(descriptor, size)
            stores = _open_stores(path, layout, num_experts, warnings)
            for store in stores:
                stack.callback(store.expert.close)
                stack.callback(store.tiny.close)
            path.unlink()
            written = _fill(descriptor, size, effort, warnings)
            num_written = (written - _SCRATCH_HEADER_BYTES) // layout.weight_bytes
            if num_written < 2:
                warnings.append("disk reads not measured: the scratch file is too short")
                return written, ()
            return written, _disk_reads(descriptor, stores, num_written, effort, warnings)
    except (OSError, CheckpointError) as error:
        warnings.append(f"disk reads not measured in {directory}: {error}")
        return 0, ()


@dataclass(frozen=True, slots=True)
class _ScratchStore:
    """The scratch file read one way: as whole experts, and a few bytes at the start of each."""

    expert: DiskExpertStore
    tiny: DiskExpertStore


def _open_stores(
    path: Path, layout: ExpertLayout, num_experts: int, warnings: list[str]
) -> list[_ScratchStore]:
    starts = [_SCRATCH_HEADER_BYTES + i * layout.weight_bytes for i in range(num_experts)]

    def open_store(layout: ExpertLayout, method: str) -> DiskExpertStore:
        spans = [[_placed(path, start, layout) for start in starts]]
        return DiskExpertStore(layout, spans, stored_dtype=layout.dtype, method=method)

    # Where an expert is smaller than the tiny one, reading it is all overhead anyway.
    tiny = min(layout, _TINY_LAYOUT, key=lambda layout: layout.weight_bytes)
    stores = []
    for method in READ_METHODS:
        store = open_store(layout, method)
        if store.method != method:
            store.close()
            warnings.append(f"{method} reads (O_DIRECT) are not supported in {path.parent}")
            continue
        stores.append(_ScratchStore(store, open_store(tiny, method)))
    if getattr(os, "posix_fadvise", None) is None:
        warnings.append(
            "this platform cannot drop pages from its cache: buffered disk reads are not cold"
        )
    return stores


def _placed(path: Path, start: int, layout: ExpertLayout) -> list[PlacedSpan]:
    size = layout.matrix_bytes
    return [
        (FileSpan(path, start, 2 * size), 0),
        (FileSpan(path, start + 2 * size, size), layout.down_offset),
    ]


@contextmanager
def _scratch_file(directory: Path) -> Iterator[tuple[int, Path]]:
    descriptor, name = tempfile.mkstemp(prefix="oled-moe-scratch-", dir=directory)
    path = Path(name)
    try:
        yield descriptor, path
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _fill(descriptor: int, size: int, effort: Effort, warnings: list[str]) -> int:
    """Write bytes that do not compress until `size` or the budget is reached; how many are there.

    They are on the disk and no longer in the page cache when this returns.
    Raises: OSError where nothing can be written.
    """
    chunk = np.random.default_rng(0).integers(2**63, size=_SCRATCH_CHUNK_BYTES // 8)
    end = time.perf_counter() + effort.write_budget_s
    written, reason = 0, "writing is slow here"
    while written < size and (not written or time.perf_counter() < end):
        chunk += 1
        try:
            written += os.pwrite(descriptor, chunk.data.cast("B")[: size - written], written)
            os.fsync(descriptor)
        except OSError as error:
            if not written:
                raise
            reason = str(error)
            break
    if written < size:
        warnings.append(
            f"the scratch file is {format_size(written)} instead of {format_size(size)}: {reason}"
        )
    drop_cached(descriptor, 0, size)
    return written


def _disk_reads(
    descriptor: int,
    stores: Sequence[_ScratchStore],
    num_experts: int,
    effort: Effort,
    warnings: list[str],
) -> tuple[DiskRead, ...]:
    reads = []
    for store in stores:
        for depth in QUEUE_DEPTHS:
            needed = depth * (store.expert.layout.slot_bytes + store.expert.scratch_bytes)
            if needed > usable_memory_bytes() // 4:
                warnings.append(
                    f"{store.expert.method} reads with {depth} in flight not measured: their "
                    f"buffers would take {format_size(needed)}"
                )
                continue
            try:
                reads.append(_disk_read(descriptor, store, depth, num_experts, effort))
            except CheckpointError as error:
                warnings.append(f"{store.expert.method} reads not measured: {error}")
                break
    return tuple(reads)


def _disk_read(
    descriptor: int, store: _ScratchStore, depth: int, num_experts: int, effort: Effort
) -> DiskRead:
    with ThreadPoolExecutor(depth) as pool:
        try:
            per_read = [
                _cold_read_s(descriptor, each, pool, depth, num_experts, effort)
                for each in (store.expert, store.tiny)
            ]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    size = store.expert.layout.slot_bytes
    rates = [size / seconds for seconds in per_read[0]]
    return DiskRead(store.expert.method, depth, Figure.of(rates), Figure.of(per_read[1]))


def _cold_read_s(
    descriptor: int,
    store: DiskExpertStore,
    pool: ThreadPoolExecutor,
    depth: int,
    num_experts: int,
    effort: Effort,
) -> list[float]:
    """Seconds per read, each from a batch of random experts shared out among `depth` threads."""
    slots = [torch.zeros(store.layout.slot_bytes, dtype=torch.uint8) for _ in range(depth)]
    order = _random_experts(num_experts)
    gate = threading.Barrier(depth)

    def first_read(slot: Tensor) -> None:
        # The pool's threads meet here: each makes its buffers before the clock runs.
        gate.wait()
        store.read_into(0, 0, slot)

    def read(slot: Tensor, experts: Sequence[int]) -> None:
        for expert in experts:
            store.read_into(0, expert, slot)

    list(pool.map(first_read, slots))
    times: list[float] = []
    end = time.perf_counter() + effort.step_budget_s / 2
    while len(times) < effort.num_repetitions and (not times or time.perf_counter() < end):
        batch = [next(order) for _ in range(max(8, 2 * depth))]
        drop_cached(descriptor, 0, os.fstat(descriptor).st_size)
        start = time.perf_counter()
        list(pool.map(read, slots, [batch[i::depth] for i in range(depth)]))
        times.append((time.perf_counter() - start) / len(batch))
    return times


def _random_experts(num_experts: int) -> Iterator[int]:
    """All experts in one random order after another."""
    rng = np.random.default_rng(0)
    while True:
        yield from rng.permutation(num_experts).tolist()


def _warn_if_in_memory(directory: Path, warnings: list[str]) -> None:
    import psutil

    place = directory.resolve()
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if place.is_relative_to(mount.mountpoint)
    ]
    mount = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    if mount is not None and mount.fstype in _MEMORY_FILE_SYSTEMS:
        warnings.append(
            f"{directory} lies in memory ({mount.fstype}): its reads are not those of a disk; "
            "name the folder that holds the checkpoint"
        )
