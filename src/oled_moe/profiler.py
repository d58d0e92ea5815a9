"""Measures what this machine does, and turns it into the HardwareProfile that decisions use.

Every figure is a median of repetitions with its extremes. What cannot be measured here is left
out and named in `Measurements.warnings`, never guessed in silence. RAM copies are made as
`HostExpertStore` makes them, so that the numbers are those of the paths the engine takes; disks
are measured in `disk_speed.py`. Nothing here reads environment variables.

Legend: D hidden size, F hidden size of one expert, N rows (tokens) of one expert.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oled_moe.config import DTYPES, check_choice, check_int, format_size
from oled_moe.costs import DEFAULT_PROFILE, PROFILE_DEVICES, HardwareProfile, WeightRate
from oled_moe.costs import default_profile_path as default_profile_path
from oled_moe.devices import best_gpu_kernel
from oled_moe.disk_speed import DiskRead, best_disk_read, measure_disk
from oled_moe.errors import ConfigError, DoesNotFitError, OledMoeError
from oled_moe.kernels import KERNELS, ExpertKernel
from oled_moe.kernels.linear import linear
from oled_moe.kernels.native import native_kernels
from oled_moe.machine import machine_facts, usable_memory_bytes
from oled_moe.measuring import FULL, QUICK, Effort, Figure
from oled_moe.packs import expert_dtype_name
from oled_moe.quantization import QuantSpec, quantize
from oled_moe.store import (
    READ_METHODS,
    ExpertLayout,
    ExpertWeights,
    SlotArena,
    aligned_empty,
)
from oled_moe.types import IntArray

EXPERT_ROWS = (1, 2, 4, 8, 16, 32, 64)
DENSE_ROWS = (1, 8, 16, 32, 64)
MEASURED_DTYPES = (torch.bfloat16, torch.float32)
# Copies are timed at these multiples of an expert.
COPY_SHARES = (0.25, 1.0, 4.0)
FITTED_ROWS = 16
# Below this size of an expert the engine computes with one thread: waking others costs more.
SMALL_EXPERT_BYTES = 2**18
# Experts of one call: enough that what a call costs besides them does not show.
_GROUP_SIZE = 8
_DENSE_WIDTH = 4096

_MIB = 2**20
_GIB = 2**30
_MIN_WORKING_SET_BYTES = 256 * _MIB
# Reads in flight at least: between two of its reads a thread needs a core, and kernels have it.
MIN_QUEUE_DEPTH = 4
# Two threads on two cores wait this long when another process holds one of them.
_QUANTUM_S = 2e-3
_UNEVEN = "are mostly far above the fastest: threads waited for cores; measure again when idle"
# Cores that others may use, beyond those left over, before figures count as disturbed.
_BUSY_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class ExpertTime:
    """Seconds of one expert on `num_rows` rows, its weights not in any cache."""

    num_rows: int
    seconds: Figure


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Seconds of `weight_bytes` of weights on `num_rows` rows: one expert of several in a call, or
    one large matrix; the weights not in any cache. The fields are those of `WeightRate`."""

    place: str
    operation: str
    dtype: str
    num_rows: int
    weight_bytes: int
    seconds: Figure


@dataclass(frozen=True, slots=True)
class CopyTime:
    """Seconds of one copy from `source` to `target`, each ram or gpu. Units: bytes."""

    source: str
    target: str
    is_pinned: bool
    num_bytes: int
    seconds: Figure


@dataclass(frozen=True, slots=True)
class GpuMeasurements:
    """What a GPU was found to do. `round_trip_s`: one token's activations there and back.

    Units: seconds, bytes, bytes per second, floating-point operations per second.
    """

    name: str
    memory_bytes: int
    memory_read_bytes_per_s: Figure
    matrix_flops_per_s: Figure
    round_trip_s: Figure
    products: tuple[ProductTime, ...]
    copies: tuple[CopyTime, ...]


@dataclass(frozen=True, slots=True)
class Measurements:
    """What `measure_hardware` found.

    `expert_bytes` is one slot. Memory bandwidths are the best over thread counts; a copied byte
    counts once. `expert_times` are those of `dtype`, `products` all, dense ones too. `copies` go by
    one thread, `expert_copy_s` is one expert's from RAM to RAM. `gpu` is None without one.
    `disk_reads` is empty
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
    products: tuple[ProductTime, ...] = ()
    copies: tuple[CopyTime, ...] = ()
    gpu: GpuMeasurements | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `json.dumps` takes."""
        return asdict(self)


def measure_hardware(
    *,
    device: str,
    directory: Path,
    expert_shape: tuple[int, int],
    dtype: torch.dtype,
    quant: QuantSpec | None = None,
    threads: int | None = None,
    is_quick: bool = False,
    report: Callable[[str], None] | None = None,
    effort: Effort | None = None,
) -> Measurements:
    """Measure memory, arithmetic, experts of shape (D, F) and the disk that holds `directory`.

    `quant`: a form of experts that is timed too. `threads` None takes all usable cores. `report` is
    told each step as it begins. `effort` overrides what `is_quick` chooses. A scratch file is
    written in `directory`, at most a quarter of what is free there; it is unlinked before it is
    filled, so nothing can leave it behind.

    Raises: ConfigError for a parameter that is not allowed, DoesNotFitError where memory cannot
    hold a few experts.
    """
    check_choice("device", device, PROFILE_DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' and torch sees no GPU here; allowed: cpu, emulated")
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
        is_small = threads is None and layout.weight_bytes < SMALL_EXPERT_BYTES
        with _torch_threads(1 if is_small else num_threads):
            say("experts on the CPU")
            products = _expert_products(layout, quant, arena, effort, warnings)
            say("dense products")
            products += _dense_products(layout, arena, effort)
        say("copies of experts")
        copies = _copies(layout, arena, effort, warnings)
        is_disturbed = _warn_if_crowded(load.busy_cores(), num_threads, warnings)
        working_set_bytes = arena.numel()
        del arena
        say("cold reads from disk")
        scratch_bytes, disk_reads = measure_disk(directory, layout, effort, warnings)
        gpu = _measure_gpu(layout, effort, say, warnings)
    experts = [p for p in products if (p.operation, p.dtype) == ("expert", dtype_name)]
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
        expert_times=tuple(ExpertTime(time.num_rows, time.seconds) for time in experts),
        expert_copy_s=next(c.seconds for c in copies if c.num_bytes == layout.slot_bytes),
        scratch_bytes=scratch_bytes,
        disk_reads=disk_reads,
        is_disturbed=is_disturbed,
        machine=facts,
        warnings=tuple(warnings),
        products=products,
        copies=copies,
        gpu=gpu,
    )


# From measurements to a profile


def to_profile(
    measurements: Measurements,
    device: str,
    *,
    mean_tokens_per_miss: float = DEFAULT_PROFILE.mean_tokens_per_miss,
    layer_overhead_s: float = 0.0,
    forward_overhead_s: float = 0.0,
    load_overhead_s: float = 0.0,
) -> HardwareProfile:
    """The profile of `device`: what was measured, and built-in guesses, named in `note`, elsewhere.

    On `cpu` copies are cold disk reads by the best method and depth; without a disk figure that
    rate is a guess, and the profile does not call itself measured. On `emulated` copies are RAM to
    RAM, on `cuda` pinned RAM to GPU. Software around layers is measured elsewhere. The time of an
    expert is fitted as α + β·n over up to 16 rows (policies.md 1.3): through the medians, or
    through the fastest times where other processes were busy, since waiting for a core is then
    most of the median.

    Raises: ConfigError for an unknown device, or `cuda` where no GPU was measured.
    """
    check_choice("device", device, PROFILE_DEVICES)
    size, is_disturbed = measurements.expert_bytes, measurements.is_disturbed
    base_s, row_s = _fit_rows(
        [(time.num_rows, time.seconds) for time in measurements.expert_times], is_disturbed
    )
    gpu, machine = measurements.gpu, measurements.machine
    products = (*measurements.products, *(gpu.products if gpu else ()))
    cores = machine["usable_cores"]
    profile = replace(
        _disk_profile(measurements),
        name=f"this-machine ({cores} core{'' if cores == 1 else 's'})",
        cpu_weight_bytes_per_s=size / base_s,
        cpu_token_weight_bytes_per_s=size / row_s,
        mean_tokens_per_miss=mean_tokens_per_miss,
        layer_overhead_s=layer_overhead_s,
        forward_overhead_s=forward_overhead_s,
        load_overhead_s=load_overhead_s,
        is_disturbed=is_disturbed,
        memory_read_bytes_per_s=_rate(measurements.memory_read_bytes_per_s, is_disturbed),
        matrix_flops_per_s=_rate(measurements.matrix_flops_per_s, is_disturbed),
        weight_rates=tuple(_weight_rate(product, is_disturbed) for product in products),
        ram_bytes=machine.get("memory_limit_bytes") or machine.get("memory_total_bytes"),
        gpu_memory_bytes=(gpu.memory_bytes or None) if gpu else None,
    )
    if device == "cpu":
        return profile
    if device == "cuda":
        return _gpu_profile(profile, measurements)
    return replace(
        profile,
        name=f"{profile.name}, emulated device",
        copy_bytes_per_s=size / measurements.expert_copy_s.median,
        copy_latency_s=0.0,
        is_measured=True,
    )


def _gpu_profile(profile: HardwareProfile, measurements: Measurements) -> HardwareProfile:
    """The profile with copies and weights as on the GPU that was measured."""
    gpu = measurements.gpu
    if gpu is None:
        raise ConfigError("device is 'cuda' and no GPU was measured; allowed here: cpu, emulated")
    pinned = [c for c in gpu.copies if c.is_pinned and c.target == "gpu"]
    copies = pinned or [c for c in gpu.copies if c.target == "gpu"]
    size = measurements.expert_bytes
    latency_s, expert_s = fit_affine(
        [copy.num_bytes / size for copy in copies], [copy.seconds.median for copy in copies]
    )
    experts = [
        (time.num_rows, time.seconds)
        for time in gpu.products
        if (time.operation, time.dtype) == ("expert", measurements.dtype)
    ]
    base_s, row_s = _fit_rows(experts, False)
    return replace(
        profile,
        name=f"{profile.name}, {gpu.name}",
        copy_bytes_per_s=size / expert_s,
        copy_latency_s=latency_s,
        device_weight_bytes_per_s=size / base_s,
        device_token_weight_bytes_per_s=size / row_s,
        activation_round_trip_s=gpu.round_trip_s.median,
        has_cpu_experts=True,
        is_measured=True,
    )


def _fit_rows(times: Sequence[tuple[int, Figure]], is_disturbed: bool) -> tuple[float, float]:
    """α and β of an expert's time over up to FITTED_ROWS rows."""
    fitted = [(rows, figure) for rows, figure in times if rows <= FITTED_ROWS]
    return fit_affine(
        [float(rows) for rows, _ in fitted], [_time(figure, is_disturbed) for _, figure in fitted]
    )


def _time(figure: Figure, is_disturbed: bool) -> float:
    return figure.minimum if is_disturbed else figure.median


def _rate(figure: Figure, is_disturbed: bool) -> float:
    return figure.maximum if is_disturbed else figure.median


def _weight_rate(product: ProductTime, is_disturbed: bool) -> WeightRate:
    rate = product.weight_bytes / _time(product.seconds, is_disturbed)
    return WeightRate(product.place, product.operation, product.dtype, product.num_rows, rate)


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
        disk_queue_depth=max(best.queue_depth, MIN_QUEUE_DEPTH),
        is_measured=True,
        note=note,
    )


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
    wanted = max(_MIN_WORKING_SET_BYTES, effort.min_working_set_bytes, cache_bytes * 3 // 2)
    usable = usable_memory_bytes()
    if 4 * layout.slot_bytes > usable:
        raise DoesNotFitError(
            f"two experts of {format_size(layout.slot_bytes)} would take more than half of the "
            f"{format_size(usable)} of memory to spare; measure with smaller experts"
        )
    allowed = min(wanted, effort.max_working_set_bytes, usable // 4)
    num_slots = max(2, allowed // layout.slot_bytes)
    arena = aligned_empty(num_slots * layout.slot_bytes).view(num_slots, layout.slot_bytes)
    _fill_slots(layout, arena)
    if arena.numel() < effort.min_working_set_bytes - layout.slot_bytes:
        warnings.append(
            f"memory was read over {format_size(arena.numel())} instead of "
            f"{format_size(effort.min_working_set_bytes)}: no more was free"
        )
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
    """By torch's sum, or by our own kernels' read where that is faster."""
    numbers = arena.view(-1).view(torch.int64)
    times = _repeat(numbers.sum, effort.num_repetitions, effort.step_budget_s)
    native = native_kernels()
    if native is not None:
        read = partial(native.read, numbers, torch.get_num_threads())
        own = _repeat(read, effort.num_repetitions, effort.step_budget_s)
        times = min(times, own, key=statistics.median)
    return [arena.numel() / seconds for seconds in times]


def _matrix_rate(dtype: torch.dtype, effort: Effort) -> tuple[Figure, int]:
    """The best rate of a square product over growing sizes, and its size; larger ones are left out
    where the budget has no room for them."""
    size, found = min(256, effort.max_matrix_size), []
    while size <= effort.max_matrix_size:
        left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
        # Transposed, as weights are multiplied.
        product = partial(torch.mm, left, right.T)
        times = _repeat(product, effort.num_repetitions, effort.step_budget_s)
        found.append((Figure.of([2 * size**3 / seconds for seconds in times]), size))
        # The least counts: one slow repetition says that somebody else had the core.
        if 8 * min(times) > effort.step_budget_s / 4:
            break
        size *= 2
    return max(found, key=lambda each: each[0].median)


def _fill_slots(layout: ExpertLayout, arena: Tensor) -> None:
    """The same random weights in every slot. Mutates: arena."""
    generator = torch.Generator().manual_seed(0)
    plain = replace(layout, quant=None)
    random = torch.zeros(plain.slot_bytes, dtype=torch.uint8)
    for matrix in plain.views(random):
        matrix.normal_(std=0.02, generator=generator)
    slot = random if layout.quant is None else _quantised(layout, plain.views(random))
    arena.copy_(slot.expand_as(arena))


def _quantised(layout: ExpertLayout, weights: ExpertWeights) -> Tensor:
    """A slot of quantised weights, rounded the quickest way."""
    assert layout.quant is not None
    slot = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    matrices = (*weights.gate_up.chunk(2), weights.down)
    for target, matrix in zip(layout.packed_views(slot), matrices, strict=True):
        target.copy_(quantize(matrix, layout.quant, "nearest"))
    return slot


def _expert_products(
    layout: ExpertLayout,
    quant: QuantSpec | None,
    arena: Tensor,
    effort: Effort,
    warnings: list[str],
) -> tuple[ProductTime, ...]:
    """Experts in the layout's dtype, in the others and in a quantised form, where there is one.

    Mutates: arena, which holds the last afterwards.
    """
    products, uneven = [], []
    dtypes = dict.fromkeys((layout.dtype, *MEASURED_DTYPES))
    layouts = [replace(layout, dtype=dtype) for dtype in dtypes]
    if quant is not None:
        layouts.append(replace(layout, quant=quant))
    for typed in layouts:
        slots = arena.view(-1)[: arena.numel() // typed.slot_bytes * typed.slot_bytes]
        if len(slots) < 2 * typed.slot_bytes:
            continue
        slots = slots.view(-1, typed.slot_bytes)
        if typed != layout:
            _fill_slots(typed, slots)
        kernel = KERNELS["cpu"](torch.get_num_threads())
        found, crowded = expert_products("cpu", kernel, SlotArena(typed, slots), effort)
        products += found
        uneven += crowded if typed == layout else []
    if uneven:
        warnings.append(f"times of experts on {', '.join(map(str, uneven))} rows {_UNEVEN}")
    return tuple(products)


def expert_products(
    place: str,
    kernel: ExpertKernel,
    arena: SlotArena,
    effort: Effort,
    synchronize: Callable[[], None] | None = None,
) -> tuple[list[ProductTime], list[int]]:
    """Experts of an arena by rows, several in a call; and the row counts with uneven times."""
    layout = arena.layout
    group = min(_GROUP_SIZE, len(arena))
    next_group = _cycle(len(arena) // group)
    products, uneven = [], []
    for num_rows in EXPERT_ROWS:
        device = arena.memory.device
        rows_ND = torch.ones(group * num_rows, layout.hidden_size, dtype=layout.dtype).to(device)
        out_ND = torch.empty_like(rows_ND)
        starts: IntArray = np.arange(0, group * num_rows, num_rows)

        def compute(
            rows_ND: Tensor = rows_ND, out_ND: Tensor = out_ND, starts: IntArray = starts
        ) -> None:
            slots: IntArray = np.arange(group) + next(next_group) * group
            kernel(arena, rows_ND, out_ND, slots, starts, starts + len(rows_ND) // group)
            if synchronize is not None:
                synchronize()

        num_calls = max(3, effort.num_expert_calls // group)
        times = [each / group for each in _repeat(compute, num_calls, effort.step_budget_s)]
        name = expert_dtype_name(layout)
        products.append(
            ProductTime(place, "expert", name, num_rows, layout.slot_bytes, Figure.of(times))
        )
        if _is_uneven(times):
            uneven.append(num_rows)
    return products, uneven


def _dense_products(layout: ExpertLayout, arena: Tensor, effort: Effort) -> tuple[ProductTime, ...]:
    """Large matrices [O, D]. Mutates: arena."""
    products: list[ProductTime] = []
    weights = arena.view(-1)
    # A pattern of bits that is a small number in every dtype.
    weights.view(torch.int16).fill_(0x3C00)
    for dtype in dict.fromkeys((layout.dtype, *MEASURED_DTYPES)):
        products += dense_products("cpu", weights, layout.hidden_size, dtype, effort)
    return tuple(products)


def dense_products(
    place: str,
    memory: Tensor,
    hidden_size: int,
    dtype: torch.dtype,
    effort: Effort,
    synchronize: Callable[[], None] | None = None,
) -> list[ProductTime]:
    """Products with one matrix of `memory` after another, by rows. Shapes: memory uint8 [n]."""
    row_bytes = hidden_size * dtype.itemsize
    width = min(_DENSE_WIDTH, len(memory) // row_bytes)
    matrix_bytes = width * row_bytes
    if not matrix_bytes:
        return []
    num_matrices = len(memory) // matrix_bytes
    matrices = memory[: num_matrices * matrix_bytes].view(dtype).view(num_matrices, width, -1)
    next_matrix = _cycle(num_matrices)
    products = []
    for num_rows in DENSE_ROWS:
        rows_TD = torch.ones(num_rows, hidden_size, dtype=dtype, device=memory.device)

        def compute(rows_TD: Tensor = rows_TD) -> None:
            linear(rows_TD, matrices[next(next_matrix)])
            if synchronize is not None:
                synchronize()

        num_calls = max(3, effort.num_expert_calls // 4)
        times = _repeat(compute, num_calls, effort.step_budget_s)
        name = str(dtype).removeprefix("torch.")
        products.append(ProductTime(place, "dense", name, num_rows, matrix_bytes, Figure.of(times)))
    return products


def _copies(
    layout: ExpertLayout, arena: Tensor, effort: Effort, warnings: list[str]
) -> tuple[CopyTime, ...]:
    """Within RAM, at several sizes, neither end in a cache, by the calling thread alone."""
    memory = arena.view(-1).numpy()
    half = len(memory) // 2
    copies = []
    for share in COPY_SHARES:
        size = int(share * layout.slot_bytes)
        if size > half:
            continue
        next_place = _cycle(half // size)

        def copy(size: int = size, next_place: Iterator[int] = next_place) -> None:
            start = next(next_place) * size
            memory[half + start : half + start + size] = memory[start : start + size]

        times = _repeat(copy, effort.num_expert_calls, effort.step_budget_s)
        if share == 1 and _is_uneven(times):
            warnings.append(f"times of copied experts {_UNEVEN}")
        copies.append(CopyTime("ram", "ram", False, size, Figure.of(times)))
    return tuple(copies)


def _measure_gpu(
    layout: ExpertLayout, effort: Effort, say: Callable[[str], None], warnings: list[str]
) -> GpuMeasurements | None:
    """The first GPU, None without one; a warning where it could not be measured."""
    if not torch.cuda.is_available():
        return None
    say("the GPU")
    try:
        return measure_gpu(torch.device("cuda", 0), layout, effort)
    # A driver that fails, a kernel that does not compile, memory that is taken.
    except RuntimeError as error:
        warnings.append(f"the GPU was not measured: {str(error).splitlines()[0]}")
        return None


def measure_gpu(device: torch.device, layout: ExpertLayout, effort: Effort) -> GpuMeasurements:
    """Measure one GPU; a `cpu` device goes the same way, without pinned memory.

    Raises: RuntimeError from torch.
    """
    is_cuda = device.type == "cuda"
    synchronize = torch.cuda.synchronize if is_cuda else _do_nothing
    name, memory_bytes = device.type, 0
    if is_cuda:
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = properties.name, int(properties.total_memory)
    wanted = max(effort.max_working_set_bytes // 2, 2 * layout.slot_bytes)
    num_slots = max(2, wanted // layout.slot_bytes)
    arena = torch.zeros(num_slots, layout.slot_bytes, dtype=torch.uint8, device=device)
    if is_cuda:
        kernel = best_gpu_kernel(lambda tensor: tensor.to(device))
    else:
        kernel = KERNELS["cpu"](torch.get_num_threads())
    products, _ = expert_products("cuda", kernel, SlotArena(layout, arena), effort, synchronize)
    products += dense_products(
        "cuda", arena.view(-1), layout.hidden_size, layout.dtype, effort, synchronize
    )
    numbers = arena.view(-1).view(torch.int64)

    def read() -> None:
        numbers.sum()
        synchronize()

    reads = _repeat(read, effort.num_repetitions, effort.step_budget_s)
    return GpuMeasurements(
        name=name,
        memory_bytes=memory_bytes,
        memory_read_bytes_per_s=Figure.of([arena.numel() / seconds for seconds in reads]),
        matrix_flops_per_s=_gpu_matrix_rate(device, layout.dtype, effort, synchronize),
        round_trip_s=_round_trip_s(device, layout, effort, synchronize),
        products=tuple(products),
        copies=_gpu_copies(arena, layout, effort, synchronize),
    )


def _gpu_matrix_rate(
    device: torch.device, dtype: torch.dtype, effort: Effort, synchronize: Callable[[], None]
) -> Figure:
    size = effort.max_matrix_size
    left = torch.ones(size, size, dtype=dtype, device=device)

    def multiply() -> None:
        torch.mm(left, left)
        synchronize()

    times = _repeat(multiply, effort.num_repetitions, effort.step_budget_s)
    return Figure.of([2 * size**3 / seconds for seconds in times])


def _round_trip_s(
    device: torch.device, layout: ExpertLayout, effort: Effort, synchronize: Callable[[], None]
) -> Figure:
    """32 tokens' activations to RAM and back."""
    rows_TD = torch.zeros(32, layout.hidden_size, dtype=layout.dtype, device=device)

    def there_and_back() -> None:
        rows_TD.copy_(rows_TD.cpu())
        synchronize()

    return Figure.of(_repeat(there_and_back, effort.num_expert_calls, effort.step_budget_s))


def _gpu_copies(
    arena: Tensor, layout: ExpertLayout, effort: Effort, synchronize: Callable[[], None]
) -> tuple[CopyTime, ...]:
    """RAM to GPU at several sizes, pinned and not."""
    flat, copies = arena.view(-1), []
    for is_pinned in (False, True) if arena.is_cuda else (False,):
        host = torch.ones(len(flat) // 2, dtype=torch.uint8, pin_memory=is_pinned)
        for share in COPY_SHARES:
            size = int(share * layout.slot_bytes)
            if size > len(host):
                continue
            next_place = _cycle(len(host) // size)

            def copy(
                host: Tensor = host, size: int = size, next_place: Iterator[int] = next_place
            ) -> None:
                start = next(next_place) * size
                part = slice(start, start + size)
                flat[part].copy_(host[part], non_blocking=True)
                synchronize()

            times = _repeat(copy, effort.num_expert_calls, effort.step_budget_s)
            copies.append(CopyTime("ram", "gpu", is_pinned, size, Figure.of(times)))
    return tuple(copies)


def _do_nothing() -> None:
    pass


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
        import psutil

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
