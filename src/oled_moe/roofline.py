"""What memory, arithmetic and disk of this machine leave as the shortest time of a forward.

Limits are measured in the run that they are compared with. Per operation of a forward: the bytes
of weights it must read over the best streaming read, or its FLOPs over the best matrix rate,
whichever is larger; summed. Against that stand the bytes of misses over the best rate of the disk
or the link. The bound is the larger of the two.

Legend: D hidden size, F hidden size of one expert, T tokens of a forward.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oled_moe.checkpoint import Checkpoint
from oled_moe.config import format_size
from oled_moe.disk_speed import BUFFERED_ADVANTAGE
from oled_moe.kernels.native import native_kernels
from oled_moe.machine import usable_cores, usable_memory_bytes
from oled_moe.models import find_family
from oled_moe.store import (
    READ_METHODS,
    DiskExpertStore,
    ExpertLayout,
    ExpertPart,
    FileSpan,
    PlacedSpan,
    aligned_empty,
    drop_cached,
)
from oled_moe.types import IntArray

QUEUE_DEPTHS = (1, 2, 4, 8)
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.word_embeddings.weight", "model.embed_tokens.weight")
# Products that make queries, keys and values; families run them as one.
_PROJECTIONS = ("query_key_value", ".q_proj.", ".k_proj.", ".v_proj.")
# Memory that is left to others while the streaming read is measured.
_SPARE_BYTES = 2**30
# Large enough for a GPU; what takes a CPU too long is left out.
_MATRIX_SIZES = (1024, 2048, 4096, 8192)
_MATRIX_BUDGET_S = 1.0
_LINK_BYTES = 256 * 2**20


# What a forward has to do


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """What one forward asks for, whatever is resident.

    `num_last_tokens`: of its tokens those that the last layer computes, `num_logits` those whose
    logits are wanted. `expert_rows`: for each MoE layer that ran the tokens of each active expert,
    int64 [A]. `num_misses`: demanded experts that had to be copied for it.
    """

    num_tokens: int
    num_last_tokens: int
    num_logits: int
    expert_rows: tuple[IntArray, ...]
    num_misses: int


@dataclass(frozen=True, slots=True)
class Operations:
    """The products of a forward. Shapes: int64 [N] both. Units: bytes, floating-point operations.

    Left out is what is small beside weights: norms, attention scores, the look-up of embeddings.
    """

    weight_bytes: IntArray
    flops: IntArray


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The sizes that the work of a forward follows from.

    `shapes`: parameters outside the routed experts; `itemsize` and `expert_itemsize` are bytes of a
    value where it is computed with, `copied_expert_bytes` what one miss moves.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_layers: int
    expert_values: int
    itemsize: int
    copied_expert_bytes: int

    def operations(self, work: ForwardWork) -> Operations:
        """Every product with weights: each active expert with its rows, projections, dense and
        shared MLPs, routers, and the head for the positions computed."""
        dense = [
            (shape[0] * shape[1], self._rows(name, work))
            for name, shape in self.shapes.items()
            if len(shape) == 2
        ]
        values = np.array([size for size, rows in dense if rows], dtype=np.int64)
        rows = np.array([rows for _, rows in dense if rows], dtype=np.int64)
        expert_rows = np.concatenate([np.empty(0, dtype=np.int64), *work.expert_rows])
        values = np.concatenate([values, np.full(len(expert_rows), self.expert_values)])
        rows = np.concatenate([rows, expert_rows])
        return Operations(self.itemsize * values, 2 * values * rows)

    def _rows(self, name: str, work: ForwardWork) -> int:
        """How many tokens meet a parameter."""
        if name == _HEAD:
            return work.num_logits
        if name in _EMBEDDINGS:
            return 0 if _HEAD in self.shapes else work.num_logits
        if name.startswith(f"model.layers.{self.num_layers - 1}."):
            # Keys and values are written for every token, whoever needs the layer's result.
            is_for_all = any(part in name for part in _PROJECTIONS)
            return work.num_tokens if is_for_all else work.num_last_tokens
        return work.num_tokens

    def bound(self, work: ForwardWork, limits: "Limits") -> "Bound":
        """The shortest time of a forward under `limits`."""
        operations = self.operations(work)
        read_s = operations.weight_bytes / limits.read.bytes_per_s
        arithmetic_s = operations.flops / limits.matrix.flops_per_s
        is_flops = arithmetic_s > read_s
        copied_bytes = work.num_misses * self.copied_expert_bytes
        return Bound(
            memory_s=float(read_s[~is_flops].sum()),
            arithmetic_s=float(arithmetic_s[is_flops].sum()),
            copy_s=copied_bytes / limits.copy_bytes_per_s,
            copy_name=limits.copy_name,
            weight_bytes=int(operations.weight_bytes.sum()),
            copied_bytes=copied_bytes,
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """The least a forward takes: `memory_s` for the operations that reading decides,
    `arithmetic_s` for those that FLOPs decide, against `copy_s`. Units: seconds, bytes."""

    memory_s: float
    arithmetic_s: float
    copy_s: float
    copy_name: str
    weight_bytes: int
    copied_bytes: int

    @property
    def compute_s(self) -> float:
        return self.memory_s + self.arithmetic_s

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.copy_s)

    @property
    def name(self) -> str:
        """What decides: memory, cpu (arithmetic), disk or link."""
        if self.copy_s > self.compute_s:
            return self.copy_name
        return "cpu" if self.arithmetic_s > self.memory_s else "memory"


# What the machine can do


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """The best streaming read. Units: bytes."""

    bytes_per_s: float
    method: str
    num_threads: int
    working_set_bytes: int


@dataclass(frozen=True, slots=True)
class MatrixLimit:
    """The best square product. Units: floating-point operations."""

    flops_per_s: float
    size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class DiskLimit:
    """The best way to read random experts of the checkpoint, cold. Units: bytes."""

    bytes_per_s: float
    method: str
    queue_depth: int
    sample_bytes: int


@dataclass(frozen=True, slots=True)
class LinkLimit:
    """The rate of the link that misses come over: `method` set by the profile, or measured from
    pinned memory. Units: bytes."""

    bytes_per_s: float
    method: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of everything measured; `link`, where there is one, is what misses come over.

    `read_sweep` and `disk_sweep`: every way of reading that was tried, `read` and `disk` are the
    fastest. `num_rounds`: how often all was measured, before and after a run. `notes` say what a
    reader must know. Units: bytes per second.
    """

    read: ReadLimit
    matrix: MatrixLimit
    disk: DiskLimit
    link: LinkLimit | None = None
    num_rounds: int = 1
    notes: tuple[str, ...] = ()
    read_sweep: tuple[ReadLimit, ...] = ()
    disk_sweep: tuple[DiskLimit, ...] = ()

    @property
    def copy_bytes_per_s(self) -> float:
        return self.disk.bytes_per_s if self.link is None else self.link.bytes_per_s

    @property
    def copy_name(self) -> str:
        return "disk" if self.link is None else "link"

    def better_of(self, other: "Limits") -> "Limits":
        """The faster of two measurements, limit by limit."""
        links = [limit for limit in (self.link, other.link) if limit is not None]
        return Limits(
            max(self.read, other.read, key=lambda limit: limit.bytes_per_s),
            max(self.matrix, other.matrix, key=lambda limit: limit.flops_per_s),
            max(self.disk, other.disk, key=lambda limit: limit.bytes_per_s),
            max(links, key=lambda limit: limit.bytes_per_s, default=None),
            self.num_rounds + other.num_rounds,
            tuple(dict.fromkeys((*self.notes, *other.notes))),
            self.read_sweep + other.read_sweep,
            self.disk_sweep + other.disk_sweep,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. Units: bytes; `disk_sample_bytes` is read at each depth and method."""

    working_set_bytes: int = 4 * 2**30
    max_matrix_size: int = _MATRIX_SIZES[-1]
    disk_sample_bytes: int = 384 * 2**20
    num_repetitions: int = 3


def measure_limits(
    checkpoint: Path,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    link_bytes_per_s: float | None = None,
    effort: Effort | None = None,
    report: Callable[[str], None] | None = None,
) -> Limits:
    """Measure memory and matrix products where layers compute, and where misses come from.

    `device` as in EngineConfig. `link_bytes_per_s` is the set rate of an emulated link; that of a
    GPU is measured. On the CPU all usable cores work. `report` is told each step as it begins.
    Raises: CheckpointError where experts cannot be read.
    """
    effort, say = effort or Effort(), report or (lambda step: None)
    num_threads = usable_cores()
    notes: list[str] = []
    place = torch.device("cuda" if device == "cuda" else "cpu")
    link = None if link_bytes_per_s is None else LinkLimit(link_bytes_per_s, "set")
    with _kept_threads():
        say("best streaming read")
        if place.type == "cuda":
            reads = [_measure_gpu_read(effort, notes)]
            link = _measure_link(effort)
        else:
            reads = _measure_read(effort, num_threads, notes)
        say("best matrix product")
        torch.set_num_threads(num_threads)
        matrix = _measure_matrix(dtype, place, effort)
    say("best disk reads")
    sweep = _measure_disk(checkpoint, effort)
    read = max(reads, key=lambda limit: limit.bytes_per_s)
    disk = max(sweep, key=lambda limit: limit.bytes_per_s)
    return Limits(read, matrix, disk, link, 1, tuple(notes), tuple(reads), sweep)


@contextmanager
def _kept_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure_read(effort: Effort, num_threads: int, notes: list[str]) -> list[ReadLimit]:
    """torch, numpy and the native kernels, on 1 to all threads, each going through the same large
    piece of memory."""
    allowed = max(2**20, usable_memory_bytes() - _SPARE_BYTES)
    num_bytes = min(effort.working_set_bytes, allowed) // 2**20 * 2**20
    if num_bytes < effort.working_set_bytes:
        notes.append(
            f"the streaming read was measured over {format_size(num_bytes)} instead of "
            f"{format_size(effort.working_set_bytes)}: more memory was not free"
        )
    # Written once, so that every page is there and none is the shared page of zeros.
    numbers = aligned_empty(num_bytes).fill_(1).view(torch.int64)
    native = native_kernels()
    found = []
    for count in range(1, num_threads + 1):
        torch.set_num_threads(count)
        readers: dict[str, Callable[[], object]] = {"torch sum": numbers.sum}
        if native is not None:
            readers["native read"] = partial(native.read, numbers, count)
        with ThreadPoolExecutor(count) as pool:
            parts = np.array_split(numbers.numpy(), count)
            readers["numpy sum"] = partial(_sum_all, pool, parts)
            for method, read in readers.items():
                best_s = min(_repeat(read, effort.num_repetitions))
                found.append(ReadLimit(num_bytes / best_s, method, count, num_bytes))
    return found


def _sum_all(pool: ThreadPoolExecutor, parts: Sequence["np.ndarray[Any, Any]"]) -> int:
    return sum(int(part) for part in pool.map(np.sum, parts))


class LimitProbe:
    """Measures again, in moments between forwards, what `limits` found best at the start.

    What else runs on a machine, and on the one below it where it is virtual, changes memory and
    disk rates by half from second to second: a forward is set against the rates around it.
    `memory` is what is read, the slots of the experts. On a GPU there is nothing to repeat.
    """

    def __init__(
        self, checkpoint: Path, limits: Limits, memory: Tensor, effort: Effort | None = None
    ) -> None:
        self._effort = effort or Effort()
        self._limits = limits
        self._checkpoint = Checkpoint.open(checkpoint)
        self._random = np.random.default_rng()
        self._numbers: Tensor | None = None
        if memory.device.type == "cpu":
            num_bytes = min(memory.numel(), self._effort.working_set_bytes) // 8 * 8
            self._numbers = memory.view(-1)[:num_bytes].view(torch.int64)
        self._store = None
        if limits.link is None:
            self._store = open_experts(self._checkpoint, method=limits.disk.method)

    def sample(self) -> Limits:
        """The limits with memory and disk rates of this moment."""
        read, disk = self._limits.read, self._limits.disk
        if self._numbers is not None and self._numbers.numel():
            with _kept_threads():
                torch.set_num_threads(read.num_threads)
                times = _repeat(self._read_once, 2)
            num_bytes = self._numbers.nbytes
            read = replace(read, bytes_per_s=num_bytes / min(times), working_set_bytes=num_bytes)
        if self._store is not None:
            disk = _disk_limit(
                self._checkpoint, self._store, disk.queue_depth, self._effort, self._random
            )
        return replace(self._limits, read=read, disk=disk)

    def _read_once(self) -> None:
        assert self._numbers is not None
        native = native_kernels()
        if self._limits.read.method == "native read" and native is not None:
            native.read(self._numbers, self._limits.read.num_threads)
        else:
            self._numbers.sum()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def _measure_gpu_read(effort: Effort, notes: list[str]) -> ReadLimit:
    """The GPU summing one large piece of its own memory."""
    free, _ = torch.cuda.mem_get_info()
    num_bytes = min(effort.working_set_bytes, max(2**20, free - _SPARE_BYTES)) // 2**20 * 2**20
    if num_bytes < effort.working_set_bytes:
        notes.append(
            f"the streaming read was measured over {format_size(num_bytes)} instead of "
            f"{format_size(effort.working_set_bytes)}: more GPU memory was not free"
        )
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device="cuda")
    best_s = min(_repeat(_and_wait(numbers.sum), effort.num_repetitions))
    return ReadLimit(num_bytes / best_s, "torch sum on the GPU", 1, num_bytes)


def _measure_link(effort: Effort) -> LinkLimit:
    """Copies from pinned host memory to the GPU."""
    num_bytes = min(_LINK_BYTES, effort.working_set_bytes)
    source = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    copy = _and_wait(partial(target.copy_, source, non_blocking=True))
    return LinkLimit(num_bytes / min(_repeat(copy, effort.num_repetitions)), "from pinned memory")


def _and_wait(action: Callable[[], object]) -> Callable[[], None]:
    """The same, ended when the GPU has done it."""

    def run() -> None:
        action()
        torch.cuda.synchronize()

    return run


def _measure_matrix(dtype: torch.dtype, place: torch.device, effort: Effort) -> MatrixLimit:
    """The best rate over growing sizes, as far as a product does not take too long."""
    found: list[MatrixLimit] = []
    for size in _MATRIX_SIZES:
        if size > effort.max_matrix_size and found:
            break
        size = min(size, effort.max_matrix_size)
        left, right = (torch.ones(size, size, dtype=dtype, device=place) for _ in range(2))
        product: Callable[[], object] = partial(torch.mm, left, right.T)
        if place.type == "cuda":
            product = _and_wait(product)
        times = _repeat(product, effort.num_repetitions)
        name = str(dtype).removeprefix("torch.")
        found.append(MatrixLimit(2 * size**3 / min(times), size, name))
        if 8 * min(times) > _MATRIX_BUDGET_S:
            break
    return max(found, key=lambda limit: limit.flops_per_s)


def _repeat(action: Callable[[], object], num_repetitions: int) -> list[float]:
    """Seconds of each repetition, after one that is not counted."""
    times = []
    action()
    for _ in range(num_repetitions):
        start_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - start_s)
    return times


# The disk


def preferred_disk(limits: Limits) -> DiskLimit:
    """How an engine should read: the fastest direct way, unless reading through the page cache is
    faster by far, for that takes the processor's time."""
    direct = [each for each in limits.disk_sweep if each.method == "direct"]
    best = max(direct, key=lambda limit: limit.bytes_per_s, default=limits.disk)
    is_much_slower = best.bytes_per_s * BUFFERED_ADVANTAGE < limits.disk.bytes_per_s
    return limits.disk if is_much_slower else best


def _measure_disk(directory: Path, effort: Effort) -> tuple[DiskLimit, ...]:
    """Random experts of a checkpoint, by every method and queue depth."""
    checkpoint = Checkpoint.open(directory)
    # Other experts each time: what is below this system may keep those of the last measurement.
    random = np.random.default_rng()
    found: list[DiskLimit] = []
    for method in READ_METHODS:
        store = open_experts(checkpoint, method=method)
        try:
            # Where direct reads are refused the store reads buffered, which comes anyway.
            if store.method != method:
                continue
            found += [
                _disk_limit(checkpoint, store, depth, effort, random) for depth in QUEUE_DEPTHS
            ]
        finally:
            store.close()
    return tuple(found)


def open_experts(checkpoint: Checkpoint, *, method: str) -> DiskExpertStore:
    """The routed experts of a checkpoint with one tensor for each matrix of each expert."""
    family = find_family(checkpoint.config)
    model = family.config(checkpoint.config)
    weight_map = family.weight_map(model)
    spans: list[list[list[PlacedSpan]]] = [
        [[] for _ in range(model.num_experts)] for _ in range(model.num_moe_layers)
    ]
    layout = None
    for record in checkpoint.tensors.values():
        part = weight_map(record.name)
        if not isinstance(part, ExpertPart):
            continue
        assert part.expert is not None, "stacked experts are not read here"
        layout = ExpertLayout(model.hidden_size, model.moe_intermediate_size, record.dtype)
        target = {"gate": 0, "up": layout.matrix_bytes, "down": layout.down_offset}[part.matrix]
        span = FileSpan(record.path, record.offset, record.num_bytes)
        spans[part.layer][part.expert].append((span, target))
    assert layout is not None
    return DiskExpertStore(layout, spans, stored_dtype=layout.dtype, method=method)


def _disk_limit(
    checkpoint: Checkpoint,
    store: DiskExpertStore,
    depth: int,
    effort: Effort,
    random: np.random.Generator,
) -> DiskLimit:
    """All experts of a random sample shared out among `depth` threads, none in the page cache."""
    size = store.layout.weight_bytes
    num_total = store.num_layers * store.num_experts
    num_reads = min(num_total, max(2 * depth, effort.disk_sample_bytes // size))
    order = random.permutation(num_total)[:num_reads].tolist()
    slots = [aligned_empty(store.layout.slot_bytes).zero_() for _ in range(depth)]
    gate = threading.Barrier(depth + 1)

    def read(slot: Tensor, experts: Sequence[int]) -> None:
        # Each thread makes its buffers before the clock runs.
        store.read_into(*divmod(experts[0], store.num_experts), slot)
        gate.wait()
        for expert in experts[1:]:
            store.read_into(*divmod(expert, store.num_experts), slot)

    shares = [[order[0], *order[i::depth]] for i in range(depth)]
    _drop_all(checkpoint)
    with ThreadPoolExecutor(depth) as pool:
        done = [
            pool.submit(_or_break, gate, read, *pair) for pair in zip(slots, shares, strict=True)
        ]
        with suppress(threading.BrokenBarrierError):
            gate.wait()
        start_s = time.perf_counter()
        for each in done:
            each.result()
        seconds = time.perf_counter() - start_s
    return DiskLimit(num_reads * size / seconds, store.method, depth, num_reads * size)


def _or_break(
    gate: threading.Barrier,
    read: Callable[[Tensor, Sequence[int]], None],
    slot: Tensor,
    experts: Sequence[int],
) -> None:
    """A thread that fails must not leave the others waiting; they say nothing of it."""
    try:
        read(slot, experts)
    except threading.BrokenBarrierError:
        return
    except BaseException:
        gate.abort()
        raise


def _drop_all(checkpoint: Checkpoint) -> None:
    for path, num_bytes in checkpoint.file_bytes.items():
        with open(path, "rb") as file:
            drop_cached(file.fileno(), 0, num_bytes)
