"""Pinned host memory, the experts in it, and what is copied between it and a GPU.

The GPU reads pinned memory by itself, so that copies from it run beside everything else. Experts
that do not fit into it come from disk through a ring of pinned buffers, read by threads.
"""

import itertools
import logging
import queue
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from oled_moe.cuda import Enqueue, Mark, StreamApi, WouldBlock
from oled_moe.store import PAGE_BYTES, ExpertLayout, ExpertStore, HostExpertStore, aligned_empty

logger = logging.getLogger(__name__)

# Pinned buffers through which small tensors go to the GPU, and their size at first.
_NUM_UPLOADS = 16
_UPLOAD_BYTES = 2**18
# Where one registration of everything is refused, parts down to about this size are tried.
_LEAST_PINNED_BYTES = 64 * 2**20
_ALIGNMENT = 64


class PinApi(Protocol):
    """What is needed to pin memory. Units: bytes."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin memory in place; why not, where that is refused."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` of this address."""
        ...


class TorchPinning:
    """Pins memory in place through CUDA's runtime.

    torch's own pinned memory would round a large piece up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's

    def register(self, address: int, num_bytes: int) -> str | None:
        result = self._runtime.cudaHostRegister(address, num_bytes, 0)
        if result == self._runtime.cudaError.success:
            return None
        # The refusal stays behind as CUDA's last error, and the next kernel would be blamed for it.
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return str(self._runtime.cudaGetErrorString(result))

    def unregister(self, address: int) -> None:
        self._runtime.cudaHostUnregister(address)


class PinnedMemory:
    """Host memory, page-aligned, pinned as far as the system allows.

    `memory` is uint8 [num_bytes]. No piece of `granule_bytes` crosses the end of a registration,
    so that each is copied whole. What cannot be pinned is said once and copied more slowly.
    """

    def __init__(self, memory: Tensor, api: PinApi, *, granule_bytes: int = PAGE_BYTES) -> None:
        self.memory = memory
        self._api = api
        self._addresses: list[int] = []
        # Memory must not go back to the system while it is pinned, whoever forgets to close.
        self._release = weakref.finalize(self, _unregister, api, self._addresses)
        self.num_pinned_bytes, reason = self._register(granule_bytes)
        if reason is not None:
            logger.warning(
                "only %d of %d MiB of host memory could be pinned (%s): copies of the rest are "
                "slower; raise the limit of locked memory (ulimit -l)",
                self.num_pinned_bytes // 2**20,
                memory.numel() // 2**20,
                reason,
            )

    @classmethod
    def empty(cls, num_bytes: int, api: PinApi) -> "PinnedMemory":
        """Uninitialised memory of exactly this size."""
        return cls(aligned_empty(num_bytes), api)

    def close(self) -> None:
        """Undo the pinning; the memory itself lives as long as it is referred to."""
        self._release()

    def _register(self, granule_bytes: int) -> tuple[int, str | None]:
        """Bytes that were pinned, and why the rest was not."""
        base, total = self.memory.data_ptr(), self.memory.numel()
        start, size = 0, total
        while start < total:
            num_bytes = min(size, total - start)
            reason = self._api.register(base + start, num_bytes)
            if reason is None:
                self._addresses.append(base + start)
                start += num_bytes
                continue
            if num_bytes <= max(granule_bytes, _LEAST_PINNED_BYTES):
                return start, reason
            size = max(granule_bytes, num_bytes // 2 // granule_bytes * granule_bytes)
        return start, None


def _unregister(api: PinApi, addresses: list[int]) -> None:
    while addresses:
        api.unregister(addresses.pop())


class PinnedExpertStore(HostExpertStore):
    """The first `num_experts` experts of every layer in pinned memory."""

    def __init__(
        self, layout: ExpertLayout, num_layers: int, num_experts: int, pinning: PinApi
    ) -> None:
        super().__init__(layout, num_layers, num_experts)
        memory = self.arena.memory.view(-1)
        self._pinned = PinnedMemory(memory, pinning, granule_bytes=layout.slot_bytes)

    @property
    def num_pinned_bytes(self) -> int:
        return self._pinned.num_pinned_bytes

    def fill(
        self,
        store: ExpertStore,
        *,
        num_threads: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read the experts this holds; `progress(num_done, num_experts_total)` after each."""
        total = self.num_layers * self.num_experts

        def read(index: int) -> None:
            layer, expert = divmod(index, self.num_experts)
            store.read_into(layer, expert, self.arena.slot(index))

        with ThreadPoolExecutor(num_threads) as threads:
            for done, _ in enumerate(threads.map(read, range(total)), start=1):
                if progress is not None:
                    progress(done, total)

    def close(self) -> None:
        self._pinned.close()
        super().close()


class BounceRing:
    """Pinned buffers of one slot each, taken in turn by threads that read files.

    Shapes: buffers uint8 [num_buffers, slot_bytes].
    """

    def __init__(self, buffers: Tensor) -> None:
        self._free: queue.SimpleQueue[tuple[Tensor, Mark | None]] = queue.SimpleQueue()
        for buffer in buffers.unbind(0):
            self._free.put((buffer, None))

    def take(self) -> Tensor:
        """A buffer that nothing reads any more; blocks until there is one."""
        buffer, mark = self._free.get()
        if mark is not None:
            mark.synchronize()
        return buffer

    def give_back(self, buffer: Tensor, mark: Mark | None) -> None:
        """The buffer is free once the stream is past `mark`; None: at once."""
        self._free.put((buffer, mark))


class HostCopy:
    """Copies an expert into a slot of the GPU: from pinned memory, else from disk.

    `pinned` holds the first experts of every layer, None holds none; the rest is in `disk`.
    """

    def __init__(
        self,
        api: StreamApi,
        pinned: PinnedExpertStore | None,
        disk: ExpertStore | None,
        ring: BounceRing | None,
    ) -> None:
        self._api = api
        self._pinned = pinned
        self._disk = disk
        self._ring = ring

    def __call__(self, layer: int, expert: int, slot: Tensor) -> None:
        pinned = self._pinned
        if pinned is None or expert >= pinned.num_experts:
            raise WouldBlock(partial(self._read, layer, expert, slot))
        self._api.copy(slot, pinned.arena.slot(pinned.slot_of(layer, expert)))

    def _read(self, layer: int, expert: int, slot: Tensor, enqueue: Enqueue) -> Mark:
        assert self._disk is not None and self._ring is not None
        buffer, mark = self._ring.take(), None
        try:
            self._disk.read_into(layer, expert, buffer)
            mark = enqueue(lambda: self._api.copy(slot, buffer))
            return mark
        finally:
            self._ring.give_back(buffer, mark)


class _Buffer:
    """A pinned buffer, larger when needed, and the mark behind the last copy from it."""

    def __init__(self, memory: Tensor, pinning: PinApi) -> None:
        self._pinning = pinning
        self._memory = memory
        # Memory of its own, once it has outgrown what it was given.
        self._own: PinnedMemory | None = None
        self.mark: Mark | None = None

    def room(self, num_bytes: int) -> Tensor:
        """The buffer, uint8 of at least `num_bytes`, free to be written."""
        if self.mark is not None:
            self.mark.synchronize()
            self.mark = None
        if num_bytes > len(self._memory):
            if self._own is not None:
                self._own.close()
            self._own = PinnedMemory.empty(1 << (num_bytes - 1).bit_length(), self._pinning)
            self._memory = self._own.memory
        return self._memory

    def close(self) -> None:
        if self.mark is not None:
            self.mark.synchronize()
        if self._own is not None:
            self._own.close()


class CudaLink:
    """Small tensors between GPU and host through pinned buffers, on the current stream."""

    def __init__(self, device: torch.device, api: StreamApi, pinning: PinApi) -> None:
        self._device = device
        self._api = api
        self._pinned = PinnedMemory.empty((1 + _NUM_UPLOADS) * _UPLOAD_BYTES, pinning)
        parts = self._pinned.memory.view(-1, _UPLOAD_BYTES).unbind(0)
        self._download, *self._uploads = (_Buffer(part, pinning) for part in parts)
        self._turns = itertools.cycle(self._uploads)

    def to_host(self, *tensors: Tensor) -> Sequence[Tensor]:
        sizes = [_round_up(tensor.nbytes) for tensor in tensors]
        buffer = self._download.room(sum(sizes))
        views, start = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._api.copy(view, tensor)
            views.append(view)
            start += size
        self._api.mark().synchronize()
        # The buffer is used again by the next layer; demands are kept for longer.
        return [view.clone() for view in views]

    def to_device(self, tensor: Tensor) -> Tensor:
        upload = next(self._turns)
        buffer = upload.room(tensor.nbytes)
        source = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        source.copy_(tensor)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._api.copy(target, source)
        upload.mark = self._api.mark()
        return target

    def close(self) -> None:
        """Unpin the buffers, once nothing is copied from them."""
        for buffer in (self._download, *self._uploads):
            buffer.close()
        self._pinned.close()


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
