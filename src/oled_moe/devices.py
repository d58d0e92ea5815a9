"""Devices: which lanes, copies, kernels and store carry plans out. The one place they differ."""

import logging
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from oled_moe.cache import ExpertCache, LowPrecision
from oled_moe.config import EngineConfig
from oled_moe.costs import HardwareProfile
from oled_moe.cuda import (
    DEVICE_INDEX,
    MOST_AHEAD,
    StreamApi,
    StreamCopyLane,
    StreamLane,
    StreamSlotPool,
    TorchStreams,
    check_cuda,
    cuda_errors,
    has_triton,
)
from oled_moe.cuda_graphs import GraphApi, TorchGraphs
from oled_moe.cuda_memory import (
    BounceRing,
    CudaLink,
    HostCopy,
    PinApi,
    PinnedExpertStore,
    PinnedMemory,
    TorchPinning,
)
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels import GPU_KERNELS, KERNELS, ExpertKernel, Upload
from oled_moe.lanes import CopyLane, InlineLane, Lane, ThreadLane
from oled_moe.memory import LowSlots, MemoryPlan
from oled_moe.policies import OffloadPolicy
from oled_moe.policies.allocation import UniformAllocationPolicy
from oled_moe.policies.dispatch import DispatchPolicy, LoadAllDispatchPolicy, MissSet
from oled_moe.policies.precision import PrecisionPolicy
from oled_moe.policies.retention import LruRetentionPolicy
from oled_moe.slots import Copy, RatedCopy, SlotPool
from oled_moe.store import DiskExpertStore, ExpertLayout, HostExpertStore, SlotArena
from oled_moe.types import BoolArray, LayerDemand

logger = logging.getLogger(__name__)

# Told of long loading: what, how many are done, of how many.
Progress = Callable[[str, int, int], None]


class Closable(Protocol):
    """Holds something that does not go away by itself."""

    def close(self) -> None: ...


class Gpu(NamedTuple):
    """A GPU that is ready, and what is needed of it. Units: bytes."""

    device: torch.device
    free_bytes: int
    api: StreamApi
    pinning: PinApi
    make_kernel: Callable[[Upload], ExpertKernel]
    make_graphs: Callable[[], GraphApi]


def open_gpu() -> Gpu:
    """The GPU of device `cuda`: the first that CUDA_VISIBLE_DEVICES leaves.

    Raises: MissingDependencyError, ConfigError where there is none to use.
    """
    check_cuda()
    device = torch.device("cuda", DEVICE_INDEX)
    with cuda_errors("while starting"):
        pinning = TorchPinning(device)
        free_bytes, _ = torch.cuda.mem_get_info(device)
    return Gpu(
        device,
        free_bytes,
        TorchStreams(device),
        pinning,
        best_gpu_kernel,
        lambda: TorchGraphs(device),
    )


class LowStore(NamedTuple):
    """All experts in a lower precision, which misses `policy` takes from there, and their slots."""

    policy: PrecisionPolicy
    store: DiskExpertStore
    slots: LowSlots

    def cache(self) -> LowPrecision:
        """The table of its slots. What misses take here was wanted by little alone: the latest
        stay, whatever ranks the others."""
        shape = self.slots.shape
        latest = OffloadPolicy(
            "naive-lru",
            LruRetentionPolicy(shape),
            UniformAllocationPolicy(),
            LoadAllDispatchPolicy(),
        )
        cache = ExpertCache(
            shape,
            latest,
            num_slots=self.slots.num_slots,
            num_staging=self.slots.num_staging,
        )
        return LowPrecision(self.policy, cache)

    def pool(self, copies: CopyLane, copy: Copy, *, is_poisoned: bool = False) -> SlotPool:
        """Its slots, filled through the lane that fills the others."""
        return SlotPool(
            self.store.layout,
            self.slots.num_slots + self.slots.num_staging,
            copies,
            copy,
            num_experts=self.slots.shape.num_experts,
            is_poisoned=is_poisoned,
        )


@dataclass(slots=True)
class Tiers:
    """The experts of a model on a device, and the pieces that have to be closed."""

    experts: OffloadedExperts
    pool: SlotPool
    layout: ExpertLayout
    lanes: list[Lane]
    store: DiskExpertStore | HostExpertStore
    others: list[Closable] = field(default_factory=list)

    def close(self) -> None:
        for piece in (*self.lanes, self.store, *self.others):
            piece.close()


class _Parts(NamedTuple):
    """What a device's builder is given."""

    config: EngineConfig
    plan: MemoryPlan
    policy: OffloadPolicy
    store: DiskExpertStore
    hardware: HardwareProfile
    num_threads: int
    progress: Progress | None
    gpu: Gpu | None
    num_pinned: int
    low: LowStore | None

    @property
    def num_slots(self) -> int:
        return self.plan.num_slots + self.plan.num_staging

    def cache(self, *, has_cpu_experts: bool) -> ExpertCache:
        return ExpertCache(
            self.plan.shape,
            self.policy,
            num_slots=self.plan.num_slots,
            num_staging=self.plan.num_staging,
            has_cpu_experts=has_cpu_experts,
            low=None if self.low is None else self.low.cache(),
        )

    def tell(self, what: str) -> Callable[[int, int], None] | None:
        progress = self.progress
        return None if progress is None else lambda done, total: progress(what, done, total)


def build_tiers(
    config: EngineConfig,
    plan: MemoryPlan,
    policy: OffloadPolicy,
    store: DiskExpertStore,
    hardware: HardwareProfile,
    *,
    num_threads: int,
    progress: Progress | None = None,
    gpu: Gpu | None = None,
    num_pinned: int = 0,
    low: LowStore | None = None,
) -> Tiers:
    """Build the device of `config` and copy what has to be resident before the first forward.

    `num_threads`: what kernels on the CPU may use. `gpu` and `num_pinned`, of `cuda` alone: the GPU
    and how many experts RAM is to hold for it. Takes over `store`, and that of `low`.
    """
    assert low is None or config.device != "cuda"
    parts = _Parts(
        config, plan, policy, store, hardware, num_threads, progress, gpu, num_pinned, low
    )
    tiers = _BUILDERS[config.device](parts)
    cache, pool = tiers.experts.cache, tiers.pool
    try:
        if plan.holds_all_experts:
            pool.fill(cache.fill(), parts.tell("experts to slots"))
        else:
            pool.fill(cache.place(), parts.tell("placed experts to slots"))
    except BaseException:
        tiers.close()
        raise
    return tiers


def _build_cpu(parts: _Parts) -> Tiers:
    """Slots in RAM, filled from disk by reading threads; the caller's thread computes."""
    store, layout = parts.store, parts.store.layout
    cache = parts.cache(has_cpu_experts=False)
    kernel = KERNELS["cpu"](None)
    # Guesses keep a disk busy with few reads at a time, and demand soon finds threads free.
    num_readers = parts.hardware.disk_queue_depth
    copies = ThreadLane("read", num_threads=num_readers, most_ahead=max(1, num_readers // 2))
    pool = SlotPool(
        layout,
        parts.num_slots,
        copies,
        store.read_into,
        num_experts=parts.plan.shape.num_experts,
    )
    low, low_pool = parts.low, None
    if low is not None:
        low_pool = low.pool(copies, low.store.read_into)
    experts = OffloadedExperts(
        cache, pool, kernel=kernel, compute_lane=InlineLane(), low_pool=low_pool
    )
    return Tiers(experts, pool, layout, [copies], store, [] if low is None else [low.store])


def _build_emulated(parts: _Parts) -> Tiers:
    """A RAM arena plays the device: NaN in free slots, a set rate, delays under a seed."""
    config, hardware, layout = parts.config, parts.hardware, parts.store.layout
    cache = parts.cache(has_cpu_experts=config.cpu_experts)
    kernel = KERNELS["cpu"](None)
    host = HostExpertStore.from_store(parts.store, parts.tell("experts to RAM"))
    parts.store.close()
    jitter_s = hardware.emulated_jitter_s
    copies = ThreadLane("copy", jitter_s=jitter_s, seed=config.seed)
    compute = ThreadLane("device", jitter_s=jitter_s, seed=config.seed + 1)
    cpu = None
    if config.cpu_experts:
        cpu = ThreadLane("cpu", jitter_s=jitter_s, seed=config.seed + 2)
    copy = _link_from(host, hardware)
    low_pool, others = None, list[Closable]()
    if parts.low is not None:
        low_host = HostExpertStore.from_store(
            parts.low.store, parts.tell("low-precision experts to RAM")
        )
        parts.low.store.close()
        others.append(low_host)
        low_pool = parts.low.pool(copies, _link_from(low_host, hardware), is_poisoned=True)
    pool = SlotPool(
        layout,
        parts.num_slots,
        copies,
        copy,
        num_experts=parts.plan.shape.num_experts,
        is_poisoned=True,
    )
    experts = OffloadedExperts(
        cache,
        pool,
        kernel=kernel,
        compute_lane=compute,
        cpu_lane=cpu,
        host_store=host,
        low_pool=low_pool,
    )
    lanes: list[Lane] = [copies, compute, *([cpu] if cpu else [])]
    return Tiers(experts, pool, layout, lanes, host, others)


def _link_from(host: HostExpertStore, hardware: HardwareProfile) -> RatedCopy:
    """Copies from RAM at the rate that the profile says."""
    return RatedCopy(host, bytes_per_s=hardware.copy_bytes_per_s, latency_s=hardware.copy_latency_s)


def _build_cuda(parts: _Parts) -> Tiers:
    """Slots in GPU memory, filled from pinned RAM, and from disk where RAM does not hold all."""
    gpu, plan, layout = parts.gpu, parts.plan, parts.store.layout
    assert gpu is not None
    link = CudaLink(gpu.device, gpu.api, gpu.pinning)
    with cuda_errors("while making room for experts"):
        memory = torch.empty(
            (parts.num_slots, layout.slot_bytes), dtype=torch.uint8, device=gpu.device
        )
    arena = SlotArena(layout, memory)
    with cuda_errors("while starting its kernels"):
        kernel = _started(gpu.make_kernel(link.to_device), arena, link.to_device)
    # What lies in its slot for good needs no second place.
    per_layer = 0 if plan.holds_all_experts else parts.num_pinned // plan.shape.num_layers
    host = _pinned_experts(parts, gpu, per_layer) if per_layer else None
    others: list[Closable] = [link, *([host] if host else [])]
    ring = None
    if per_layer == plan.shape.num_experts:
        parts.store.close()
    else:
        num_buffers = parts.hardware.disk_queue_depth + MOST_AHEAD + 1
        bounce = PinnedMemory.empty(num_buffers * layout.slot_bytes, gpu.pinning)
        others.append(bounce)
        ring = BounceRing(bounce.memory.view(num_buffers, layout.slot_bytes))
    copies = StreamCopyLane(gpu.api, num_readers=parts.hardware.disk_queue_depth)
    compute = StreamLane(gpu.api)
    pool = StreamSlotPool(
        layout,
        parts.num_slots,
        copies,
        HostCopy(gpu.api, host, parts.store, ring),
        num_experts=plan.shape.num_experts,
        arena=arena,
        api=gpu.api,
    )
    has_cpu_experts = parts.config.cpu_experts and host is not None
    cpu = ThreadLane("cpu") if has_cpu_experts else None
    if 0 < per_layer < plan.shape.num_experts:
        logger.warning(
            "RAM holds %d of %d experts of a layer, the rest is read from disk for every load and "
            "never computed on the CPU; free RAM, or take a machine with more",
            per_layer,
            plan.shape.num_experts,
        )
        hosted = _HostedDispatchPolicy(parts.policy.dispatch, per_layer)
        parts = parts._replace(policy=replace(parts.policy, dispatch=hosted))
    experts = OffloadedExperts(
        parts.cache(has_cpu_experts=has_cpu_experts),
        pool,
        kernel=kernel,
        compute_lane=compute,
        cpu_lane=cpu,
        cpu_kernel=KERNELS["cpu"](None),
        host_store=host if has_cpu_experts else None,
        link=link,
    )
    lanes: list[Lane] = [copies, compute, *([cpu] if cpu else [])]
    return Tiers(experts, pool, layout, lanes, parts.store, others)


def _pinned_experts(parts: _Parts, gpu: Gpu, per_layer: int) -> PinnedExpertStore:
    """The first experts of every layer, read into pinned RAM."""
    shape = parts.plan.shape
    host = PinnedExpertStore(parts.store.layout, shape.num_layers, per_layer, gpu.pinning)
    try:
        host.fill(
            parts.store,
            num_threads=parts.hardware.disk_queue_depth,
            progress=parts.tell("experts to pinned RAM"),
        )
    except BaseException:
        host.close()
        raise
    return host


class _HostedDispatchPolicy:
    """Another's choices, as far as the weights lie in RAM: those of the first `num_hosted` experts
    of every layer. What it would have the CPU compute besides is loaded."""

    def __init__(self, dispatch: DispatchPolicy, num_hosted: int) -> None:
        self._dispatch = dispatch
        self._num_hosted = num_hosted

    def observe(self, demand: LayerDemand) -> None:
        self._dispatch.observe(demand)

    def split(self, misses: MissSet) -> BoolArray:
        to_cpu: BoolArray = self._dispatch.split(misses) & (misses.expert_ids < self._num_hosted)
        return to_cpu


def best_gpu_kernel(upload: Upload) -> ExpertKernel:
    """Triton's kernel where it can be had, else torch's products one expert after another."""
    reason = None
    if not has_triton():
        reason = "triton is not installed (pip install triton)"
    elif torch.cuda.get_device_capability(DEVICE_INDEX) < (8, 0):
        reason = "the GPU is older than compute capability 8.0"
    if reason is None:
        return GPU_KERNELS["triton"](upload)
    logger.warning("experts are computed one by one, which is slower: %s", reason)
    return GPU_KERNELS["each"](upload)


def _started(kernel: ExpertKernel, arena: SlotArena, upload: Upload) -> ExpertKernel:
    """The kernel once it has run for few and for many rows, so that no answer waits for compilers.

    Another, with a warning, where it cannot be compiled here.
    """
    layout = arena.layout
    ends = np.array([1, 1 + 32, 1 + 32 + 64], dtype=np.int64)
    rows_ND = torch.zeros(
        (int(ends[-1]), layout.hidden_size), dtype=layout.dtype, device=arena.memory.device
    )
    starts = ends - np.array([1, 32, 64])
    try:
        # What the slot holds does not matter: nobody looks at the result.
        kernel(arena, rows_ND, torch.empty_like(rows_ND), np.zeros(3, dtype=np.int64), starts, ends)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        logger.warning(
            "experts are computed one by one, which is slower: the kernel cannot be compiled here "
            "(%s); triton needs a C compiler and the headers of Python",
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
        )
        return GPU_KERNELS["each"](upload)
    return kernel


_BUILDERS: dict[str, Callable[[_Parts], Tiers]] = {
    "cpu": _build_cpu,
    "cuda": _build_cuda,
    "emulated": _build_emulated,
}
