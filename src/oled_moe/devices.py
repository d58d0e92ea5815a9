"""Devices: which lanes, copies, kernels and store carry plans out. The one place they differ."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from oled_moe.cache import ExpertCache
from oled_moe.config import EngineConfig
from oled_moe.costs import HardwareProfile
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels import KERNELS
from oled_moe.lanes import InlineLane, Lane, ThreadLane
from oled_moe.memory import MemoryPlan
from oled_moe.policies import OffloadPolicy
from oled_moe.slots import RatedCopy, SlotPool
from oled_moe.store import DiskExpertStore, ExpertLayout, HostExpertStore

# Told of long loading: what, how many are done, of how many.
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Tiers:
    """The experts of a model on a device, and the pieces that have to be closed."""

    experts: OffloadedExperts
    pool: SlotPool
    layout: ExpertLayout
    lanes: list[Lane]
    store: DiskExpertStore | HostExpertStore

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.store.close()


class _Parts(NamedTuple):
    """What a device's builder is given."""

    config: EngineConfig
    plan: MemoryPlan
    policy: OffloadPolicy
    store: DiskExpertStore
    hardware: HardwareProfile
    num_threads: int
    progress: Progress | None

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
) -> Tiers:
    """Build the device of `config` and copy what has to be resident before the first forward.

    `num_threads`: what kernels on the CPU may use. Takes over `store`.
    """
    parts = _Parts(config, plan, policy, store, hardware, num_threads, progress)
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
    kernel = KERNELS["cpu"](parts.num_threads)
    copies = ThreadLane("read", num_threads=parts.hardware.disk_queue_depth)
    pool = SlotPool(
        layout,
        parts.num_slots,
        copies,
        store.read_into,
        num_experts=parts.plan.shape.num_experts,
    )
    experts = OffloadedExperts(cache, pool, kernel=kernel, compute_lane=InlineLane())
    return Tiers(experts, pool, layout, [copies], store)


def _build_emulated(parts: _Parts) -> Tiers:
    """A RAM arena plays the device: NaN in free slots, a set rate, delays under a seed."""
    config, hardware, layout = parts.config, parts.hardware, parts.store.layout
    cache = parts.cache(has_cpu_experts=config.cpu_experts)
    kernel = KERNELS["cpu"](parts.num_threads)
    host = HostExpertStore.from_store(parts.store, parts.tell("experts to RAM"))
    parts.store.close()
    jitter_s = hardware.emulated_jitter_s
    copies = ThreadLane("copy", jitter_s=jitter_s, seed=config.seed)
    compute = ThreadLane("device", jitter_s=jitter_s, seed=config.seed + 1)
    cpu = None
    if config.cpu_experts:
        cpu = ThreadLane("cpu", jitter_s=jitter_s, seed=config.seed + 2)
    copy = RatedCopy(host, bytes_per_s=hardware.copy_bytes_per_s, latency_s=hardware.copy_latency_s)
    pool = SlotPool(
        layout,
        parts.num_slots,
        copies,
        copy,
        num_experts=parts.plan.shape.num_experts,
        is_poisoned=True,
    )
    experts = OffloadedExperts(
        cache, pool, kernel=kernel, compute_lane=compute, cpu_lane=cpu, host_store=host
    )
    lanes: list[Lane] = [copies, compute, *([cpu] if cpu else [])]
    return Tiers(experts, pool, layout, lanes, host)


_BUILDERS: dict[str, Callable[[_Parts], Tiers]] = {
    "cpu": _build_cpu,
    "emulated": _build_emulated,
}
