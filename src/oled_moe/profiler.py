"""Measures what this machine does, and turns it into the HardwareProfile that decisions use.

Every figure is a median of repetitions with its extremes. What cannot be measured here is left
out and named in `Measurements.warnings`, never guessed in silence. Disk reads go through
`DiskExpertStore`, RAM copies are made as `HostExpertStore` makes them, so that the numbers are
those of the paths the engine takes. Nothing here reads environment variables.

Legend: D hidden size, F hidden size of one expert, N rows (tokens) of one expert.
"""

import os
import platform
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from oled_moe.config import DEVICES, DTYPES, check_choice, check_int, format_size
from oled_moe.costs import DEFAULT_PROFILE, HardwareProfile
from oled_moe.costs import default_profile_path as default_profile_path
from oled_moe.errors import CheckpointError, DoesNotFitError, OledMoeError
from oled_moe.kernels import KERNELS, ExpertKernel
from oled_moe.store import (
    READ_METHODS,
    DiskExpertStore,
    ExpertLayout,
    FileSpan,
    PlacedSpan,
    aligned_empty,
    drop_cached,
)

EXPERT_ROWS = (1, 2, 4, 8, 16, 32, 64)
FITTED_ROWS = 16
QUEUE_DEPTHS = (1, 2, 4, 8)
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")

_MIB = 2**20
_GIB = 2**30
_MIN_WORKING_SET_BYTES = 256 * _MIB
# A safetensors header has any length: experts of a checkpoint do not begin at whole blocks.
_SCRATCH_HEADER_BYTES = 1000
_SCRATCH_CHUNK_BYTES = 32 * _MIB
# Two experts' worth of nothing: what a read costs besides its bytes.
_TINY_LAYOUT = ExpertLayout(16, 8, torch.float32)
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
# Depths within this share of the fastest count as equally fast; the fewest threads win.
_DEPTH_TOLERANCE = 0.05
# Two threads on two cores wait this long when another process holds one of them.
_QUANTUM_S = 2e-3
_UNEVEN = "are mostly far above the fastest: threads waited for cores; measure again when idle"
# Cores that others may use, beyond those left over, before figures count as disturbed.
_BUSY_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work a measurement is worth.

    `step_budget_s` ends the repetitions of one step early on a slow machine (each is done at least
    once), `write_budget_s` the writing of the scratch file.
    """

    max_working_set_bytes: int
    max_matrix_size: int
    max_scratch_bytes: int
    num_repetitions: int
    num_expert_calls: int
    step_budget_s: float
    write_budget_s: float


QUICK = Effort(1 * _GIB, 1024, 128 * _MIB, 3, 24, 0.25, 1.5)
FULL = Effort(2 * _GIB, 4096, 1 * _GIB, 9, 200, 2.0, 10.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """Median and extremes of repeated measurements, in the unit of the field that holds it."""

    median: float
    minimum: float
    maximum: float
    num_repetitions: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """Seconds of one expert on `num_rows` rows, its weights not in any cache."""

    num_rows: int
    seconds: Figure


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


@dataclass(frozen=True, slots=True)
class Measurements:
    """What `measure_hardware` found.

    `expert_bytes` is one slot. Memory bandwidths are the best over thread counts; a copied byte
    counts once. `expert_copy_s` is one expert from RAM to RAM by one thread. `disk_reads` is empty
    where the disk could not be measured. `is_disturbed`: other processes were busy. `machine` is
    what `machine_facts` says.

    Units: seconds, bytes, bytes per second, floating-point operations per second.
    """

    device: str
    hidden_size: int
    intermediate_size: int
    dtype: str
    expert_bytes: int
    num_threads: int
    is_quick: bool
    working_set_bytes: int
    memory_copy_bytes_per_s: Figure
    memory_copy_threads: int
    memory_read_bytes_per_s: Figure
    memory_read_threads: int
    matrix_flops_per_s: Figure
    matrix_size: int
    expert_times: tuple[ExpertTime, ...]
    expert_copy_s: Figure
    scratch_bytes: int
    disk_reads: tuple[DiskRead, ...]
    is_disturbed: bool
    machine: dict[str, Any]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `json.dumps` takes."""
        return asdict(self)


def measure_hardware(
    *,
    device: str,
    directory: Path,
    expert_shape: tuple[int, int],
    dtype: torch.dtype,
    threads: int | None = None,
    is_quick: bool = False,
    report: Callable[[str], None] | None = None,
    effort: Effort | None = None,
) -> Measurements:
    """Measure memory, arithmetic, experts of shape (D, F) and the disk that holds `directory`.

    `threads` None takes all usable cores. `report` is told each step as it begins. `effort`
    overrides what `is_quick` chooses. A scratch file is written in `directory`, at most a quarter
    of what is free there; it is unlinked before it is filled, so nothing can leave it behind.

    Raises: ConfigError for a parameter that is not allowed, DoesNotFitError where memory cannot
    hold a few experts.
    """
    check_choice("device", device, DEVICES)
    hidden_size, intermediate_size = expert_shape
    check_int("expert_shape[0] (hidden size)", hidden_size, minimum=1)
    check_int("expert_shape[1] (intermediate size)", intermediate_size, minimum=1)
    dtype_name = str(dtype).removeprefix("torch.")
    check_choice("dtype", dtype_name, DTYPES)
    facts = machine_facts()
    num_threads = facts["usable_cores"] if threads is None else threads
    check_int("threads", num_threads, minimum=1)
    effort = effort or (QUICK if is_quick else FULL)
    layout = ExpertLayout(hidden_size, intermediate_size, dtype)
    say = report or _say_nothing
    warnings: list[str] = []
    load = _Load()
    with _torch_threads(num_threads), torch.inference_mode():
        say("filling memory")
        arena = _fill_arena(layout, effort, facts["last_level_cache_bytes"], warnings)
        say("memory bandwidth")
        copy_rate, copy_threads = _best_over_threads(_copy_rates, arena, num_threads, effort)
        read_rate, read_threads = _best_over_threads(_read_rates, arena, num_threads, effort)
        say("matrix products")
        matrix_rate, matrix_size = _matrix_rate(dtype, effort)
        say("experts on the CPU")
        expert_times = _expert_times(layout, arena, effort, warnings)
        say("copies of experts")
        expert_copy_s = _expert_copy_s(arena, effort, warnings)
        is_disturbed = _warn_if_crowded(load.busy_cores(), num_threads, warnings)
        working_set_bytes = arena.numel()
        del arena
        say("cold reads from disk")
        scratch_bytes, disk_reads = _measure_disk(directory, layout, effort, warnings)
    return Measurements(
        device=device,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=dtype_name,
        expert_bytes=layout.slot_bytes,
        num_threads=num_threads,
        is_quick=is_quick,
        working_set_bytes=working_set_bytes,
        memory_copy_bytes_per_s=copy_rate,
        memory_copy_threads=copy_threads,
        memory_read_bytes_per_s=read_rate,
        memory_read_threads=read_threads,
        matrix_flops_per_s=matrix_rate,
        matrix_size=matrix_size,
        expert_times=expert_times,
        expert_copy_s=expert_copy_s,
        scratch_bytes=scratch_bytes,
        disk_reads=disk_reads,
        is_disturbed=is_disturbed,
        machine=facts,
        warnings=tuple(warnings),
    )


# From measurements to a profile


def to_profile(
    measurements: Measurements,
    device: str,
    *,
    mean_tokens_per_miss: float = DEFAULT_PROFILE.mean_tokens_per_miss,
) -> HardwareProfile:
    """The profile of `device`: what was measured, and built-in guesses, named in `note`, elsewhere.

    On `cpu` copies are cold disk reads by the best method and depth; without a disk figure that
    rate is a guess, and the profile does not call itself measured. On `emulated` copies are RAM to
    RAM. The time of an expert is fitted as α + β·n over up to 16 rows (policies.md 1.3): through
    the medians, or through the fastest times where other processes were busy, since waiting for a
    core is then most of the median.

    Raises: ConfigError for an unknown device.
    """
    check_choice("device", device, DEVICES)
    size = measurements.expert_bytes
    times = [time for time in measurements.expert_times if time.num_rows <= FITTED_ROWS]
    base_s, row_s = fit_affine(
        [float(time.num_rows) for time in times],
        [
            time.seconds.minimum if measurements.is_disturbed else time.seconds.median
            for time in times
        ],
    )
    cores = measurements.machine["usable_cores"]
    profile = replace(
        _disk_profile(measurements),
        name=f"this-machine ({cores} core{'' if cores == 1 else 's'})",
        cpu_weight_bytes_per_s=size / base_s,
        cpu_token_weight_bytes_per_s=size / row_s,
        mean_tokens_per_miss=mean_tokens_per_miss,
    )
    if device == "cpu":
        return profile
    return replace(
        profile,
        name=f"{profile.name}, emulated device",
        copy_bytes_per_s=size / measurements.expert_copy_s.median,
        copy_latency_s=0.0,
        is_measured=True,
    )


def fit_affine(num_rows: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Least-squares α and β of t(n) = α + β·n, both held above zero.

    A noisy machine can yield a falling line; β is then a thousandth of the mean time and α what is
    left. Needs two distinct row counts.
    """
    rows, times = np.asarray(num_rows), np.asarray(seconds)
    slope, base = np.polyfit(rows, times, 1)
    mean = float(times.mean())
    if slope <= 1e-3 * mean:
        slope = 1e-3 * mean
        base = float((times - slope * rows).mean())
    if base <= 1e-2 * mean:
        base = 1e-2 * mean
        slope = float((rows * (times - base)).sum() / (rows * rows).sum())
    return float(base), max(float(slope), 1e-3 * mean)


def _disk_profile(measurements: Measurements) -> HardwareProfile:
    """DEFAULT_PROFILE with the disk as measured, in use as the copy lane."""
    rates = {
        method: max(
            (read.bytes_per_s.median for read in measurements.disk_reads if read.method == method),
            default=None,
        )
        for method in READ_METHODS
    }
    notes = [f"{method} disk reads not measured" for method, rate in rates.items() if rate is None]
    if measurements.is_disturbed:
        notes.append("measured beside other busy processes")
    note = "; ".join(notes)
    best = best_disk_read(measurements.disk_reads)
    if best is None:
        return replace(DEFAULT_PROFILE, is_measured=False, note=note)
    # A method that was not measured must not look like the faster one.
    fastest = best.bytes_per_s.median
    guesses = (DEFAULT_PROFILE.disk_direct_bytes_per_s, DEFAULT_PROFILE.disk_buffered_bytes_per_s)
    direct, buffered = (
        rate if rate is not None else min(guess, fastest)
        for rate, guess in zip((rates[m] for m in READ_METHODS), guesses, strict=True)
    )
    expert_s = measurements.expert_bytes / fastest
    latency_s = min(best.tiny_read_s.median, expert_s / 2)
    return replace(
        DEFAULT_PROFILE,
        copy_bytes_per_s=measurements.expert_bytes / (expert_s - latency_s),
        copy_latency_s=latency_s,
        disk_method=best.method,
        disk_direct_bytes_per_s=direct,
        disk_buffered_bytes_per_s=buffered,
        disk_queue_depth=best.queue_depth,
        is_measured=True,
        note=note,
    )


def best_disk_read(reads: Sequence[DiskRead]) -> DiskRead | None:
    """The fastest way to read, or the one of about that speed that needs the fewest threads."""
    if not reads:
        return None
    fastest = max(read.bytes_per_s.median for read in reads)
    near = [r for r in reads if r.bytes_per_s.median >= fastest * (1 - _DEPTH_TOLERANCE)]
    return min(near, key=lambda read: (read.queue_depth, -read.bytes_per_s.median))


def save_profile(profile: HardwareProfile, path: Path) -> None:
    """Write the profile in one step: a reader sees the old file or the new one, whole.

    Raises: OledMoeError where the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(profile.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        raise OledMoeError(
            f"hardware profile cannot be written to {path}: {error.strerror}; name another file"
        ) from error


# Memory and arithmetic


def _fill_arena(
    layout: ExpertLayout, effort: Effort, cache_bytes: int | None, warnings: list[str]
) -> Tensor:
    """Slots [n, slot_bytes] of experts, together larger than the last-level cache if they may be.

    All hold the same values: which of them is copied over which does not matter.
    """
    cache_bytes = cache_bytes or 0
    wanted = max(_MIN_WORKING_SET_BYTES, cache_bytes * 3 // 2)
    usable = usable_memory_bytes()
    if 4 * layout.slot_bytes > usable:
        raise DoesNotFitError(
            f"two experts of {format_size(layout.slot_bytes)} would take more than half of the "
            f"{format_size(usable)} of memory to spare; measure with smaller experts"
        )
    allowed = min(wanted, effort.max_working_set_bytes, usable // 4)
    num_slots = max(2, allowed // layout.slot_bytes)
    arena = aligned_empty(num_slots * layout.slot_bytes).view(num_slots, layout.slot_bytes)
    generator = torch.Generator().manual_seed(0)
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    for matrix in layout.views(slot):
        matrix.normal_(std=0.02, generator=generator)
    arena.copy_(slot.expand_as(arena))
    if arena.numel() <= cache_bytes:
        warnings.append(
            f"the timed weights ({format_size(arena.numel())}) fit into the last-level cache "
            f"({format_size(cache_bytes)}): memory and expert figures may be too good"
        )
    return arena


def _best_over_threads(
    measure: Callable[[Tensor, Effort], list[float]],
    arena: Tensor,
    num_threads: int,
    effort: Effort,
) -> tuple[Figure, int]:
    """The highest rate and its thread count, over powers of two up to `num_threads`."""
    counts = sorted({*(2**i for i in range(num_threads.bit_length())), num_threads})
    figures = []
    for count in counts:
        with _torch_threads(count):
            figures.append((Figure.of(measure(arena, effort)), count))
    return max(figures, key=lambda figure: figure[0].median)


def _copy_rates(arena: Tensor, effort: Effort) -> list[float]:
    half = len(arena) // 2
    source, target = arena[:half], arena[half : 2 * half]
    times = _repeat(lambda: target.copy_(source), effort.num_repetitions, effort.step_budget_s)
    return [source.numel() / seconds for seconds in times]


def _read_rates(arena: Tensor, effort: Effort) -> list[float]:
    numbers = arena.view(-1).view(torch.int64)
    times = _repeat(numbers.sum, effort.num_repetitions, effort.step_budget_s)
    return [arena.numel() / seconds for seconds in times]


def _matrix_rate(dtype: torch.dtype, effort: Effort) -> tuple[Figure, int]:
    """Rate of a square product, and its size: the largest that the budget has room for."""
    size = min(256, effort.max_matrix_size)
    while True:
        left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        (seconds,) = _repeat(partial(torch.mm, left, right), 1, effort.step_budget_s)
        if 2 * size > effort.max_matrix_size or 8 * seconds > effort.step_budget_s / 4:
            break
        size *= 2
    times = _repeat(partial(torch.mm, left, right), effort.num_repetitions, effort.step_budget_s)
    return Figure.of([2 * size**3 / seconds for seconds in times]), size


def _expert_times(
    layout: ExpertLayout, arena: Tensor, effort: Effort, warnings: list[str]
) -> tuple[ExpertTime, ...]:
    experts = [layout.views(slot) for slot in arena]
    kernel: ExpertKernel = KERNELS["cpu"]
    next_expert = _cycle(len(experts))

    def compute(rows_ND: Tensor) -> None:
        kernel(rows_ND, experts[next(next_expert)])

    figures, uneven = [], []
    for num_rows in EXPERT_ROWS:
        rows_ND = torch.ones(num_rows, layout.hidden_size, dtype=layout.dtype)
        times = _repeat(partial(compute, rows_ND), effort.num_expert_calls, effort.step_budget_s)
        figures.append(ExpertTime(num_rows, Figure.of(times)))
        if _is_uneven(times):
            uneven.append(str(num_rows))
    if uneven:
        warnings.append(f"times of experts on {', '.join(uneven)} rows {_UNEVEN}")
    return tuple(figures)


def _expert_copy_s(arena: Tensor, effort: Effort, warnings: list[str]) -> Figure:
    """One expert to another slot, neither in a cache, by the calling thread alone."""
    slots = arena.numpy()
    half = len(slots) // 2
    next_slot = _cycle(half)

    def copy() -> None:
        index = next(next_slot)
        slots[half + index] = slots[index]

    times = _repeat(copy, effort.num_expert_calls, effort.step_budget_s)
    if _is_uneven(times):
        warnings.append(f"times of copied experts {_UNEVEN}")
    return Figure.of(times)


def _repeat(action: Callable[[], object], num_repetitions: int, budget_s: float) -> list[float]:
    """Seconds of each repetition, after one that is not counted; fewer when the budget is spent."""
    times: list[float] = []
    action()
    end = time.perf_counter() + budget_s
    while len(times) < num_repetitions and (not times or time.perf_counter() < end):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def _cycle(length: int) -> Iterator[int]:
    while True:
        yield from range(length)


def _is_uneven(times: Sequence[float]) -> bool:
    """Whether the median looks like waiting for a turn on a core."""
    median, least = statistics.median(times), min(times)
    return median > 2 * least and median - least > _QUANTUM_S


class _Load:
    """How many cores other processes kept busy since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        times = psutil.cpu_times()._asdict()
        # What guests of this machine use is in `user` already.
        uncounted = ("idle", "iowait", "guest", "guest_nice")
        busy_s = sum(value for name, value in times.items() if name not in uncounted)
        return time.perf_counter(), busy_s - time.process_time()

    def busy_cores(self) -> float:
        clock, others = self._now()
        return max(0.0, (others - self._start[1]) / (clock - self._start[0]))


def _warn_if_crowded(busy_cores: float, num_threads: int, warnings: list[str]) -> bool:
    """Whether other processes left fewer cores than were measured with."""
    is_crowded = busy_cores > (os.cpu_count() or 1) - num_threads + _BUSY_TOLERANCE
    if is_crowded:
        warnings.append(
            f"other processes kept {busy_cores:.1f} cores busy: memory, matrix and expert figures "
            "are those of a loaded machine, measure again when it is idle"
        )
    return is_crowded


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _say_nothing(step: str) -> None:
    del step


# Disk


def _measure_disk(
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


# Facts about the machine, cheap to find


def machine_facts(*, root: Path = Path("/")) -> dict[str, Any]:
    """Cores, memory, CPU and versions as plain JSON values; no name of the host, no measurement.

    `root` is where proc and sys are looked up.
    """
    model, flags = _cpu_model(root)
    memory = psutil.virtual_memory()
    return {
        "cpu_model": model,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "logical_cores": os.cpu_count() or 1,
        "physical_cores": psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        "cpu_quota_cores": _cgroup_cpu_quota(root),
        "usable_cores": usable_cores(root=root),
        "last_level_cache_bytes": _last_level_cache_bytes(root),
        "memory_total_bytes": int(memory.total),
        "memory_available_bytes": int(memory.available),
        "memory_limit_bytes": min((limit for limit, _ in _cgroup_memory(root)), default=None),
        "usable_memory_bytes": usable_memory_bytes(root=root),
        "platform": platform.platform(),
        "python_version": platform.python_version(),
        "torch_version": str(torch.__version__),
        "numpy_version": np.__version__,
    }


def usable_memory_bytes(*, root: Path = Path("/")) -> int:
    """What this process may still take: memory available here, and left in each of its cgroups."""
    left = [limit - used for limit, used in _cgroup_memory(root)]
    return max(0, min(int(psutil.virtual_memory().available), *left, 2**63 - 1))


def usable_cores(*, root: Path = Path("/")) -> int:
    """Physical cores that the process may run on, at most what its CPU quota pays for."""
    affinity = getattr(os, "sched_getaffinity", None)
    if affinity is None:
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    else:
        topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        cores = len({_read_text(root / topology.format(cpu)) or str(cpu) for cpu in affinity(0)})
    quota = _cgroup_cpu_quota(root)
    return max(1, int(cores if quota is None else min(cores, quota)))


def _cpu_model(root: Path) -> tuple[str, frozenset[str]]:
    text = _read_text(root / "proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return name, frozenset(flags[1].split() if flags else ())


def _last_level_cache_bytes(root: Path) -> int | None:
    sizes = []
    for index in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, size = _read_int(index / "level"), _read_text(index / "size")
        match = re.fullmatch(r"(\d+)([KM])", size or "")
        if level is not None and match:
            sizes.append((level, int(match[1]) * (1024 if match[2] == "K" else _MIB)))
    return max(sizes)[1] if sizes else None


def _cgroup_memory(root: Path) -> list[tuple[int, int]]:
    """(limit, used) of each cgroup above the process that has a limit, version 1 or 2.

    File pages that nobody has touched lately do not count as used: the kernel drops them first.
    """
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    found = []
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, usage_name, cached_name in names:
            limit, usage = _read_int(folder / limit_name), _read_int(folder / usage_name)
            # Version 1 writes "no limit" as the largest page count.
            if limit is None or limit >= 2**60:
                continue
            stat = _read_text(folder / "memory.stat") or ""
            cached = re.search(rf"^{cached_name} (\d+)$", stat, re.MULTILINE)
            used = (usage or 0) - (int(cached[1]) if cached else 0)
            found.append((limit, max(0, used)))
    return found


def _cgroup_cpu_quota(root: Path) -> float | None:
    """Cores' worth of time the tightest cgroup grants; None where there is no quota."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        pair = (_read_text(folder / "cpu.max") or "").split()
        if not pair:
            pair = [_read_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if len(pair) == 2 and all(part.isdecimal() and int(part) for part in pair):
            quotas.append(int(pair[0]) / int(pair[1]))
    return min(quotas, default=None)


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """The process's cgroups for `controller` and all above them, as far as they can be seen.

    In a container the path is often the host's and does not exist; its upper end still does.
    """
    mounts = root / "sys/fs/cgroup"
    folders: list[Path] = []
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            bases = [mounts / controllers, mounts / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                folder = base.joinpath(*parts[:depth])
                if folder.is_dir() and folder not in folders:
                    folders.append(folder)
    return folders


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read_text(path) or ""
    return int(text) if text.isdecimal() else None
