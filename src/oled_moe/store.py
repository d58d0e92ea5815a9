"""Where the weights of routed experts rest: on disk, or all of them in host memory.

An expert travels as one *slot*: its three matrices packed as `ExpertLayout` says. A store fills
slots; it never decides which. Reads block, and any number of threads may read at once.

Legend: D hidden size, F hidden size of one expert, E experts per layer.

    slot   | gate [F, D] | up [F, D] | pad to 64 | down [D, F] | pad to 4096 |

Quantised matrices are bytes: quantization.py says what they hold.
"""

import errno
import logging
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from oled_moe.config import check_choice
from oled_moe.errors import CheckpointError, OledMoeError
from oled_moe.quantization import QuantSpec, matrix_bytes

logger = logging.getLogger(__name__)

READ_METHODS = ("direct", "buffered")
PAGE_BYTES = 4096
_CACHE_LINE_BYTES = 64
# Pages of this size are asked for where memory is large: streaming weights through small ones
# spends its time on looking up addresses.
_HUGE_PAGE_BYTES = 2**21

Matrix = Literal["gate", "up", "gate_up", "down"]


class ExpertWeights(NamedTuple):
    """The matrices of one expert. Shapes: gate_up [2F, D], gate rows first; down [D, F]."""

    gate_up: Tensor
    down: Tensor


# What an expert does to its gate: x · sigmoid(x), or GELU in its form with a tanh.
Activation = Literal["silu", "gelu_tanh"]


class PackedWeights(NamedTuple):
    """The quantised matrices of one expert, uint8: gate and up [F, D], down [D, F]."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How the matrices of one expert lie in a slot, and the activation that goes with them.

    `dtype`: that of the weights, or, where `quant` says how they are quantised, of what they are
    multiplied with.
    """

    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    activation: Activation = "silu"
    quant: QuantSpec | None = None

    @property
    def matrix_bytes(self) -> int:
        """Bytes of gate, and of up; of down too where weights are not quantised."""
        return self._bytes_of(self.intermediate_size, self.hidden_size)

    @property
    def gate_up_bytes(self) -> int:
        return 2 * self.matrix_bytes

    @property
    def down_bytes(self) -> int:
        return self._bytes_of(self.hidden_size, self.intermediate_size)

    @property
    def down_offset(self) -> int:
        return _round_up(self.gate_up_bytes, _CACHE_LINE_BYTES)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the three matrices without padding between them."""
        return self.gate_up_bytes + self.down_bytes

    @property
    def slot_bytes(self) -> int:
        return _round_up(self.down_offset + self.down_bytes, PAGE_BYTES)

    def views(self, slot: Tensor) -> ExpertWeights:
        """The matrices in a slot, not quantised, sharing its memory.

        Shapes: slot uint8 [slot_bytes].
        """
        assert self.quant is None
        gate_up = slot[: self.gate_up_bytes].view(self.dtype)
        down = slot[self.down_offset : self.down_offset + self.down_bytes].view(self.dtype)
        return ExpertWeights(
            gate_up.view(2 * self.intermediate_size, self.hidden_size),
            down.view(self.hidden_size, self.intermediate_size),
        )

    def packed_views(self, slot: Tensor) -> PackedWeights:
        """The quantised matrices in a slot, sharing its memory.

        Shapes: slot uint8 [slot_bytes].
        """
        assert self.quant is not None
        gate, up = slot[: self.gate_up_bytes].view(2, -1)
        return PackedWeights(gate, up, slot[self.down_offset : self.down_offset + self.down_bytes])

    def _bytes_of(self, num_outputs: int, num_inputs: int) -> int:
        if self.quant is not None:
            return matrix_bytes(self.quant, num_outputs, num_inputs)
        return num_outputs * num_inputs * self.dtype.itemsize


def aligned_empty(num_bytes: int, alignment: int = PAGE_BYTES) -> Tensor:
    """Uninitialised uint8 memory [num_bytes] whose address is a multiple of `alignment`.

    Pages of a large piece take up memory only once they are written.
    """
    if num_bytes >= 2 * _HUGE_PAGE_BYTES and alignment <= _HUGE_PAGE_BYTES:
        return _huge_empty(num_bytes)
    memory = torch.empty(num_bytes + alignment, dtype=torch.uint8)
    start = -memory.data_ptr() % alignment
    return memory[start : start + num_bytes]


def _huge_empty(num_bytes: int) -> Tensor:
    """Memory of its own mapping, in huge pages where the system has them."""
    mapped = mmap.mmap(-1, _round_up(num_bytes, _HUGE_PAGE_BYTES) + _HUGE_PAGE_BYTES)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # A kernel built without them; the memory is as good, only slower.
            mapped.madvise(advice)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -memory.data_ptr() % _HUGE_PAGE_BYTES
    return memory[start : start + num_bytes]


class SlotArena:
    """Equal slots one after another in one piece of memory.

    Shapes: memory uint8 [num_slots, layout.slot_bytes], contiguous, on any device.
    """

    def __init__(self, layout: ExpertLayout, memory: Tensor) -> None:
        assert memory.dtype == torch.uint8 and memory.is_contiguous()
        assert memory.ndim == 2 and memory.shape[1] == layout.slot_bytes
        self.layout = layout
        self.memory = memory
        self._slots = list(memory.unbind(0))
        self._weights: list[ExpertWeights | None] = [None] * len(memory)

    @classmethod
    def empty(cls, layout: ExpertLayout, num_slots: int) -> "SlotArena":
        """Slots in host memory, uninitialised, aligned for reading files into."""
        memory = aligned_empty(num_slots * layout.slot_bytes)
        return cls(layout, memory.view(num_slots, layout.slot_bytes))

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, slot: int) -> Tensor:
        """The bytes of a slot, uint8 [slot_bytes]."""
        return self._slots[slot]

    def weights(self, slot: int) -> ExpertWeights:
        """The matrices in a slot."""
        weights = self._weights[slot]
        if weights is None:
            weights = self._weights[slot] = self.layout.views(self._slots[slot])
        return weights


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a uint8 tensor in host memory, for reading files into."""
    memory: memoryview = tensor.numpy().data
    return memory


class ExpertPart(NamedTuple):
    """What a checkpoint tensor is to an expert.

    `layer` counts MoE layers from 0; `expert` None says that the tensor stacks all experts of the
    layer on a leading axis E.
    """

    layer: int
    expert: int | None
    matrix: Matrix


class FileSpan(NamedTuple):
    """Consecutive bytes of a file."""

    path: Path
    offset: int
    num_bytes: int


# A span and where its first byte goes in a slot of the stored dtype.
PlacedSpan = tuple[FileSpan, int]


class ExpertStore(Protocol):
    """All routed experts of a model, one slot's worth at a time."""

    @property
    def layout(self) -> ExpertLayout: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    def read_into(self, layer: int, expert: int, slot: Tensor) -> None:
        """Fill a slot with one expert; blocks; may be called from many threads.

        Shapes: slot uint8 [layout.slot_bytes], contiguous, in host memory.
        Mutates: slot; its padding may be left as it was.
        Raises: CheckpointError where the bytes cannot be had; OledMoeError after `close`.
        """
        ...

    def close(self) -> None:
        """Give files and memory back, once reads that are under way have ended."""
        ...


class _Run(NamedTuple):
    """Consecutive bytes of a file that one read fetches; `pieces` are (slot offset, bytes)."""

    path: Path
    offset: int
    num_bytes: int
    pieces: tuple[tuple[int, int], ...]


class Encoding(NamedTuple):
    """How experts lie in files that hold them in another form than a slot's.

    The spans of an expert fill a buffer of `num_bytes`, or less of it where others need more;
    `decode(layer, expert, buffer, slot)` makes a slot of it.
    """

    num_bytes: int
    decode: Callable[[int, int, Tensor, Tensor], None]


class DiskExpertStore:
    """Experts that are read from checkpoint files each time they are asked for.

    `spans[layer][expert]` says where the bytes lie and where they go in a slot of
    `stored_dtype`; they are converted where `layout` has another dtype. With an `encoding` they go
    into its buffer. Where an expert is one span as large as a slot, it is the whole slot, padding
    included; `checksums[layer][expert]` are CRC-32 of those, compared at an expert's first read.
    `method` is how files are read, after construction the method in use:

    - `buffered`: into the slot itself; the page cache is asked to drop what was read, so that it
      neither hides nor doubles the memory that experts take.
    - `direct`: past the page cache through a buffer of the reading thread. Falls back to buffered,
      with a warning, where the platform or the file system does not support it.

    Raises: CheckpointError for a file that cannot be opened; ConfigError for an unknown method.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        spans: Sequence[Sequence[Sequence[PlacedSpan]]],
        *,
        stored_dtype: torch.dtype,
        method: str = "direct",
        encoding: Encoding | None = None,
        checksums: Sequence[Sequence[int]] | None = None,
    ) -> None:
        check_choice("method", method, READ_METHODS)
        self.layout = layout
        self.num_layers = len(spans)
        self.num_experts = len(spans[0]) if spans else 0
        stored = replace(layout, dtype=stored_dtype)
        self._encoding = encoding
        # What quantised weights are multiplied with is not in their bytes.
        if encoding is None and stored != layout and layout.quant is None:
            self._encoding = _conversion(stored, layout)
        self._runs = [[_merge(placed) for placed in experts] for experts in spans]
        self._checksums = checksums
        self._is_verified = bytearray(self.num_layers * self.num_experts)
        assert all(len(experts) == self.num_experts for experts in spans)
        allowed = {stored.weight_bytes, stored.slot_bytes} if encoding is None else None
        assert all(
            allowed is None or sum(run.num_bytes for run in runs) in allowed
            for experts in self._runs
            for runs in experts
        )
        self._max_run_bytes = max(
            (run.num_bytes for experts in self._runs for runs in experts for run in runs), default=0
        )
        # Such runs are read where they belong, without a buffer.
        self._is_whole_pages = all(
            run.offset % PAGE_BYTES == 0 and len(runs) == 1 and run.num_bytes % PAGE_BYTES == 0
            for experts in self._runs
            for runs in experts
            for run in runs
        )
        paths = sorted({run.path for experts in self._runs for runs in experts for run in runs})
        self.method, self._descriptors = _open_files(paths, method)
        self._release = weakref.finalize(self, _close_files, self._descriptors)
        self._idle = threading.Condition()
        self._num_reading = 0
        self._scratch = threading.local()

    @property
    def scratch_bytes(self) -> int:
        """Memory that each reading thread holds besides the slot it fills."""
        bounce = 0 if self.method == "buffered" or self._is_whole_pages else self._bounce_bytes
        return bounce + (self._encoding.num_bytes if self._encoding else 0)

    @property
    def _bounce_bytes(self) -> int:
        return _round_up(self._max_run_bytes, PAGE_BYTES) + PAGE_BYTES

    def spans(self, layer: int, expert: int) -> tuple[FileSpan, ...]:
        """Which bytes of which files `read_into` reads."""
        runs = self._runs[layer][expert]
        return tuple(FileSpan(run.path, run.offset, run.num_bytes) for run in runs)

    def read_into(self, layer: int, expert: int, slot: Tensor) -> None:
        assert 0 <= layer < self.num_layers and 0 <= expert < self.num_experts
        assert slot.dtype == torch.uint8 and slot.shape == (self.layout.slot_bytes,)
        with self._open():
            if self._encoding is None:
                self._read(layer, expert, slot)
                return
            stored = self._thread_buffer("stored", self._encoding.num_bytes)
            self._read(layer, expert, stored)
            self._encoding.decode(layer, expert, stored, slot)

    def close(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: self._num_reading == 0)
            self._release()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Keeps the files open within; a descriptor closed under a read could be another file."""
        with self._idle:
            if not self._release.alive:
                raise OledMoeError("the expert store is closed; open the checkpoint again")
            self._num_reading += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_reading -= 1
                self._idle.notify_all()

    def _read(self, layer: int, expert: int, slot: Tensor) -> None:
        memory = memory_of(slot)
        for run in self._runs[layer][expert]:
            where = f"{run.path}: layer {layer}, expert {expert} (counting MoE layers from 0)"
            buffers = [memory[start : start + size] for start, size in run.pieces]
            descriptor = self._descriptors[run.path]
            try:
                if self.method == "direct":
                    _read_direct(descriptor, run.offset, buffers, self._bounce)
                else:
                    read_exactly(descriptor, run.offset, buffers)
                    drop_cached(descriptor, run.offset, run.num_bytes)
            except EOFError as error:
                raise CheckpointError(
                    f"{where}: {error}; the file was cut short, download it again"
                ) from None
            except OSError as error:
                raise CheckpointError(
                    f"{where}: cannot be read ({error.strerror}); check the disk"
                ) from error
        if self._checksums is not None:
            self._verify(layer, expert, memory)

    def _verify(self, layer: int, expert: int, memory: memoryview) -> None:
        """Compare what was read with its checksum, once for each expert."""
        assert self._checksums is not None
        index = layer * self.num_experts + expert
        if self._is_verified[index]:
            return
        (run,) = self._runs[layer][expert]
        # zlib lets other threads run meanwhile.
        if zlib.crc32(memory[: run.num_bytes]) != self._checksums[layer][expert]:
            raise CheckpointError(
                f"{run.path}: layer {layer}, expert {expert} (counting MoE layers from 0) is not "
                "what was packed: the file is damaged, pack the model again"
            )
        self._is_verified[index] = True

    def _bounce(self) -> memoryview:
        return memory_of(self._thread_buffer("bounce", self._bounce_bytes))

    def _thread_buffer(self, name: str, num_bytes: int) -> Tensor:
        buffer: Tensor | None = getattr(self._scratch, name, None)
        if buffer is None:
            buffer = aligned_empty(num_bytes)
            setattr(self._scratch, name, buffer)
        return buffer


def _conversion(stored: ExpertLayout, layout: ExpertLayout) -> Encoding:
    """From slots of one dtype to slots of another."""

    def convert(layer: int, expert: int, source: Tensor, slot: Tensor) -> None:
        for target, matrix in zip(layout.views(slot), stored.views(source), strict=True):
            target.copy_(matrix)

    return Encoding(stored.slot_bytes, convert)


class HostExpertStore:
    """Experts that all lie in host memory, each in a slot of its own: `slot_of` says which."""

    def __init__(self, layout: ExpertLayout, num_layers: int, num_experts: int) -> None:
        self.layout = layout
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._arena: SlotArena | None = SlotArena.empty(layout, num_layers * num_experts)

    @classmethod
    def from_store(
        cls, store: ExpertStore, progress: Callable[[int, int], None] | None = None
    ) -> "HostExpertStore":
        """Copy every expert of `store`; `progress(num_done, num_experts_total)` after each."""
        host = cls(store.layout, store.num_layers, store.num_experts)
        total = store.num_layers * store.num_experts
        for index in range(total):
            layer, expert = divmod(index, store.num_experts)
            store.read_into(layer, expert, host.arena.slot(index))
            if progress is not None:
                progress(index + 1, total)
        return host

    @property
    def arena(self) -> SlotArena:
        """Where the experts lie. Raises: OledMoeError after `close`."""
        if self._arena is None:
            raise OledMoeError("the expert store is closed; open the checkpoint again")
        return self._arena

    def slot_of(self, layer: int, expert: int) -> int:
        """The slot of `arena` that holds an expert."""
        assert 0 <= layer < self.num_layers and 0 <= expert < self.num_experts
        return layer * self.num_experts + expert

    def read_into(self, layer: int, expert: int, slot: Tensor) -> None:
        # numpy copies on the calling thread alone; torch would start workers for each I/O thread.
        slot.numpy()[:] = self.arena.slot(self.slot_of(layer, expert)).numpy()

    def weights(self, layer: int, expert: int) -> ExpertWeights:
        """The matrices of one expert where they lie, for computing on the CPU."""
        return self.arena.weights(self.slot_of(layer, expert))

    def close(self) -> None:
        self._arena = None


def read_exactly(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fill the buffers, one after another, with the file's bytes from `offset` on.

    Raises: EOFError where the file ends before; OSError as the system reports it.
    """
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        count = os.preadv(descriptor, pending, offset)
        if count == 0:
            missing = sum(buffer.nbytes for buffer in pending)
            raise EOFError(f"the file ends at byte {offset}, {missing} bytes too early")
        offset += count
        while pending and count >= pending[0].nbytes:
            count -= pending.pop(0).nbytes
        if count:
            pending[0] = pending[0][count:]


def drop_cached(descriptor: int, offset: int, num_bytes: int) -> None:
    """Ask the page cache to forget these bytes, with the whole of the pages at both ends."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is not None:
        start = offset // PAGE_BYTES * PAGE_BYTES
        end = _round_up(offset + num_bytes, PAGE_BYTES)
        advise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


def _read_direct(
    descriptor: int,
    offset: int,
    buffers: Sequence[memoryview],
    make_bounce: Callable[[], memoryview],
) -> None:
    """As `read_exactly`, for a descriptor that takes only whole blocks at aligned addresses.

    Where file offset, addresses and sizes are all aligned, the bytes go where they belong at once;
    otherwise through the buffer that `make_bounce` makes.
    """
    total = sum(buffer.nbytes for buffer in buffers)
    if offset % PAGE_BYTES == 0 and all(map(_is_aligned, buffers)):
        if os.preadv(descriptor, buffers, offset) == total:
            return
        # Cut short: what is left need not begin at a whole block.
    bounce = make_bounce()
    start = offset // PAGE_BYTES * PAGE_BYTES
    needed = offset - start + total
    num_read = 0
    while num_read < needed:
        aligned = num_read // PAGE_BYTES * PAGE_BYTES
        block = bounce[aligned : _round_up(needed, PAGE_BYTES)]
        count = os.preadv(descriptor, [block], start + aligned)
        if aligned + count <= num_read:
            missing = needed - num_read
            raise EOFError(f"the file ends at byte {start + num_read}, {missing} bytes too early")
        num_read = aligned + count
    source = offset - start
    for buffer in buffers:
        # numpy lets other threads run while it copies, a memoryview does not.
        np.asarray(buffer)[:] = np.asarray(bounce[source : source + buffer.nbytes])
        source += buffer.nbytes


def _is_aligned(buffer: memoryview) -> bool:
    address = np.asarray(buffer).__array_interface__["data"][0]
    return bool(address % PAGE_BYTES == 0 and buffer.nbytes % PAGE_BYTES == 0)


def _merge(placed: Sequence[PlacedSpan]) -> tuple[_Run, ...]:
    """Join spans that follow one another in a file, wherever in the slot they go."""
    runs: list[_Run] = []
    for (path, offset, num_bytes), target in sorted(placed):
        last = runs[-1] if runs else None
        piece = (target, num_bytes)
        if last is not None and last.path == path and last.offset + last.num_bytes == offset:
            pieces = (*last.pieces, piece)
            runs[-1] = _Run(path, last.offset, last.num_bytes + num_bytes, pieces)
        else:
            runs.append(_Run(path, offset, num_bytes, (piece,)))
    return tuple(runs)


def _open_files(paths: Sequence[Path], method: str) -> tuple[str, dict[Path, int]]:
    """The method that works here, and a descriptor for each file."""
    if method == "direct":
        try:
            return "direct", _open_each(paths, _open_direct)
        except _DirectRefused as refused:
            logger.warning("reading experts through the page cache: %s", refused)
    if getattr(os, "posix_fadvise", None) is None:
        logger.warning(
            "this platform cannot drop pages from its cache: experts may be cached twice, "
            "and read times are not those of the disk"
        )
    return "buffered", _open_each(paths, _open_buffered)


class _DirectRefused(Exception):
    pass


def _open_each(paths: Sequence[Path], open_file: Callable[[Path], int]) -> dict[Path, int]:
    descriptors: dict[Path, int] = {}
    try:
        for path in paths:
            descriptors[path] = open_file(path)
    except OSError as error:
        _close_files(descriptors)
        raise CheckpointError(
            f"{path}: cannot be opened ({error.strerror}); check that it exists and is readable"
        ) from error
    except _DirectRefused:
        _close_files(descriptors)
        raise
    return descriptors


def _open_direct(path: Path) -> int:
    """Open past the page cache and read a block, since some file systems refuse only then."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise _DirectRefused("this platform has no O_DIRECT")
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | flag)
        os.preadv(descriptor, [memory_of(aligned_empty(PAGE_BYTES))], PAGE_BYTES)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            raise _DirectRefused(f"{path}: O_DIRECT is refused ({error.strerror})") from None
        raise
    return descriptor


def _open_buffered(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    advise = getattr(os, "posix_fadvise", None)
    if advise is not None:
        # Reading ahead would cache experts that nobody asked for.
        advise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _close_files(descriptors: Mapping[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
