"""The memory plan: made before anything is loaded, printed, and kept to.

Non-expert weights, keys and values, activations and buffers come first; slots for experts get
what was granted for them, or what is left.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from oled_moe.config import EngineConfig, format_size, parse_size, size_to_type
from oled_moe.errors import DoesNotFitError
from oled_moe.sizing import slots_of_budget, slots_of_layers, staging_beside
from oled_moe.types import MoeShape

# How errors end where an engine was to be opened.
FORCE_ADVICE = "or pass force to try all the same"
# Of free memory, what an engine takes when it was given no budget.
SHARE_OF_FREE = 0.8
# Of a GPU's memory: CUDA's own context, kernels' workspaces, and what allocation loses.
GPU_RESERVE_BYTES = 2**30
# Of RAM: the system and whatever else runs.
SYSTEM_RESERVE_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a model needs besides its expert slots. Units: bytes."""

    process_bytes: int
    dense_bytes: int
    kv_bytes: int
    activation_bytes: int
    buffer_bytes: int
    host_expert_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.process_bytes
            + self.dense_bytes
            + self.kv_bytes
            + self.activation_bytes
            + self.buffer_bytes
            + self.host_expert_bytes
        )


@dataclass(frozen=True, slots=True)
class LowSlots:
    """Slots for experts in a lower precision; `shape` has their bytes."""

    shape: MoeShape
    num_slots: int
    num_staging: int

    @classmethod
    def of(cls, per_layer: int, shape: MoeShape) -> "LowSlots":
        """So many for each layer, and those that the others pass through."""
        num_slots = per_layer * shape.num_layers
        return cls(shape, num_slots, staging_beside(num_slots, shape))

    @property
    def total_bytes(self) -> int:
        return (self.num_slots + self.num_staging) * self.shape.expert_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How memory is divided. `num_slots` hold residents, `num_staging` more stream the rest; `low`
    are slots for the same experts in a lower precision, None where they are not needed."""

    model: ModelMemory
    shape: MoeShape
    num_slots: int
    num_staging: int
    low: LowSlots | None = None

    @property
    def low_bytes(self) -> int:
        """Bytes of the slots for experts in a lower precision."""
        return 0 if self.low is None else self.low.total_bytes

    @property
    def expert_memory_bytes(self) -> int:
        """All slots, whatever the precision."""
        return (self.num_slots + self.num_staging) * self.shape.expert_bytes + self.low_bytes

    @property
    def total_bytes(self) -> int:
        return self.model.total_bytes + self.expert_memory_bytes

    @property
    def holds_all_experts(self) -> bool:
        return self.num_slots == self.shape.num_experts_total

    def lines(self) -> list[tuple[str, int]]:
        """(what, bytes) for printing; the last is the total."""
        shape, model = self.shape, self.model
        per_layer = self.num_slots / shape.num_layers
        entries = [
            ("process before loading", model.process_bytes),
            ("non-expert weights", model.dense_bytes),
            ("keys and values", model.kv_bytes),
            ("activations and logits", model.activation_bytes),
            ("read buffers", model.buffer_bytes),
            ("all experts in RAM, behind the emulated device", model.host_expert_bytes),
            (
                f"expert slots: {self.num_slots} of {shape.num_experts_total} experts, "
                f"{per_layer:.4g} per layer",
                self.num_slots * shape.expert_bytes,
            ),
            (f"staging slots: {self.num_staging}", self.num_staging * shape.expert_bytes),
        ]
        if self.low is not None:
            what = (
                f"low-precision slots: {self.low.num_slots}, "
                f"{self.low.num_slots / shape.num_layers:.4g} per layer, and "
                f"{self.low.num_staging} staging"
            )
            entries.append((what, self.low_bytes))
        kept = [entry for entry in entries if entry[1] or "slots" in entry[0]]
        return [*kept, ("total", self.total_bytes)]


def process_memory_bytes() -> int:
    """What this process holds in RAM now (resident set). Units: bytes."""
    try:
        import psutil
    except ImportError:
        # benchmarks/gpu_check.py runs with little more than torch; psutil reads the same there.
        pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True, slots=True)
class GpuMemoryPlan:
    """How the memory of a GPU and the RAM behind it are divided.

    `gpu` is the plan on the GPU, its reserve counted as what was there before. `num_pinned` experts
    lie in pinned RAM, the others on disk. `host_process_bytes` and `bounce_bytes`: the program, and
    pinned buffers for experts from disk. Units: bytes.
    """

    gpu: MemoryPlan
    num_pinned: int
    host_process_bytes: int
    bounce_bytes: int

    @property
    def shape(self) -> MoeShape:
        return self.gpu.shape

    @property
    def num_on_disk(self) -> int:
        return self.shape.num_experts_total - self.num_pinned

    @property
    def pinned_bytes(self) -> int:
        return self.num_pinned * self.shape.expert_bytes

    @property
    def ram_bytes(self) -> int:
        return self.host_process_bytes + self.bounce_bytes + self.pinned_bytes

    def gpu_lines(self) -> list[tuple[str, int]]:
        """(what, bytes) on the GPU; the last is the total."""
        lines = self.gpu.lines()
        return [("reserve for CUDA itself", self.gpu.model.process_bytes), *lines[1:]]

    def ram_lines(self) -> list[tuple[str, int]]:
        """(what, bytes) in RAM; the last is the total."""
        total = self.shape.num_experts_total
        entries = [
            ("process before loading", self.host_process_bytes),
            ("pinned buffers for experts from disk", self.bounce_bytes),
            (f"experts in pinned RAM: {self.num_pinned} of {total}", self.pinned_bytes),
        ]
        return [*(entry for entry in entries if entry[1]), ("total", self.ram_bytes)]


def plan_gpu_memory(
    config: EngineConfig,
    shape: MoeShape,
    model: ModelMemory,
    *,
    gpu_bytes: int,
    ram_bytes: int,
    more_room: str = "close other programs",
) -> GpuMemoryPlan:
    """Divide a GPU's memory as `config` asks, or take all but the reserve.

    Dense weights, K/V, activations and slots share the GPU; all experts go to RAM, as far as the
    `ram_bytes` that the process may take hold them, and stay on disk otherwise. `memory` in
    `config` is memory of the GPU. Units: bytes.
    Raises: as `plan_memory`.
    """
    usable_bytes = gpu_bytes - GPU_RESERVE_BYTES
    if usable_bytes <= 0:
        raise DoesNotFitError(
            f"the GPU has {format_size(gpu_bytes)} and CUDA itself is given "
            f"{format_size(GPU_RESERVE_BYTES)} of it; raise gpu-memory"
        )
    on_gpu = replace(model, process_bytes=GPU_RESERVE_BYTES, buffer_bytes=0, host_expert_bytes=0)
    gpu = plan_memory(
        config,
        shape,
        on_gpu,
        usable_bytes=usable_bytes,
        share_of_free=1.0,
        place="of the GPU ",
        more_room=more_room,
    )
    process_bytes, total = model.process_bytes, shape.num_experts_total
    num_pinned = min(total, max(0, ram_bytes - process_bytes) // shape.expert_bytes)
    bounce_bytes = 0
    if num_pinned < total:
        bounce_bytes = model.buffer_bytes
        left = max(0, ram_bytes - process_bytes - bounce_bytes)
        num_pinned = min(total, left // shape.expert_bytes)
    if process_bytes + bounce_bytes > ram_bytes and not config.force:
        raise DoesNotFitError(
            f"the program and its buffers take {format_size(process_bytes + bounce_bytes)} of RAM "
            f"and {format_size(ram_bytes)} are free; raise ram"
        )
    return GpuMemoryPlan(gpu, num_pinned, process_bytes, bounce_bytes)


def plan_memory(
    config: EngineConfig,
    shape: MoeShape,
    model: ModelMemory,
    *,
    usable_bytes: int,
    share_of_free: float = SHARE_OF_FREE,
    place: str = "",
    more_room: str = "close other programs",
    low: LowSlots | None = None,
) -> MemoryPlan:
    """Divide memory as `config` asks, or take `share_of_free` of what is free.

    `usable_bytes` is what this process may still take; errors name `place`, and `more_room` as what
    makes that more. Slots of `low` come out of what is granted in bytes, and on top of
    `experts_per_layer`, as staging does; where all experts fit there are none. Units: bytes.
    Raises: ConfigError for a budget that makes no sense; DoesNotFitError with the number to change.
    """
    if config.experts_per_layer is not None:
        num_slots = slots_of_layers(config.experts_per_layer, shape)
        plan = MemoryPlan(model, shape, num_slots, staging_beside(num_slots, shape), low)
        if plan.holds_all_experts:
            plan = replace(plan, low=None)
    else:
        budget = _expert_budget(config, shape, model, usable_bytes, share_of_free)
        plan = _divided(budget, shape, model, low)
    extra_bytes = plan.total_bytes - model.process_bytes
    if extra_bytes > usable_bytes and not config.force:
        raise DoesNotFitError(
            f"the plan needs {format_size(extra_bytes)} {place}beside the program, and "
            f"{format_size(usable_bytes)} are free: "
            f"{_remedy(config, plan, usable_bytes, more_room)}, {FORCE_ADVICE}"
        )
    return plan


def _divided(
    budget_bytes: int, shape: MoeShape, model: ModelMemory, low: LowSlots | None
) -> MemoryPlan:
    """A plan whose slots, of all kinds, take `budget_bytes`."""
    plan = MemoryPlan(model, shape, *slots_of_budget(budget_bytes, shape))
    if low is None or plan.holds_all_experts:
        return plan
    left = budget_bytes - low.total_bytes
    if left < shape.expert_bytes:
        raise DoesNotFitError(
            f"expert slots may take {format_size(budget_bytes)}, and low-precision slots take "
            f"{format_size(low.total_bytes)} of it, which leaves no room for one expert of "
            f"{format_size(shape.expert_bytes)}; raise it to "
            f"{size_to_type(low.total_bytes + shape.expert_bytes)} or more, or lower slots of "
            "lossy mixed"
        )
    return MemoryPlan(model, shape, *slots_of_budget(left, shape), low)


def _expert_budget(
    config: EngineConfig,
    shape: MoeShape,
    model: ModelMemory,
    usable_bytes: int,
    share_of_free: float,
) -> int:
    """Bytes for slots and staging together."""
    all_bytes = shape.num_experts_total * shape.expert_bytes
    if config.expert_memory is not None:
        budget = parse_size("expert_memory", config.expert_memory, whole_bytes=all_bytes)
        if budget < shape.expert_bytes:
            raise DoesNotFitError(
                f"expert_memory is {format_size(budget)} and one expert takes "
                f"{format_size(shape.expert_bytes)}; raise it to "
                f"{size_to_type(shape.expert_bytes)} or more"
            )
        return budget
    if config.memory is not None:
        memory = parse_size("memory", config.memory, whole_bytes=usable_bytes + model.process_bytes)
        budget = memory - model.total_bytes
        if budget < shape.expert_bytes:
            least = model.total_bytes + shape.expert_bytes
            raise DoesNotFitError(
                f"memory is {format_size(memory)}, but everything except expert slots takes "
                f"{format_size(model.total_bytes)} and one slot {format_size(shape.expert_bytes)}; "
                f"raise memory to {size_to_type(least)} or more, or lower max_model_len"
            )
        return budget
    others = model.total_bytes - model.process_bytes
    return max(shape.expert_bytes, int(share_of_free * usable_bytes) - others)


def _most(most_bytes: int, least_bytes: int) -> str:
    """A size to type between the two; exact where round ones are less than is needed."""
    text = size_to_type(most_bytes, is_most=True)
    return text if parse_size("", text) >= least_bytes else f"{most_bytes}B"


def _remedy(config: EngineConfig, plan: MemoryPlan, usable_bytes: int, more_room: str) -> str:
    """Which number to change, and to what."""
    model, shape = plan.model, plan.shape
    left = usable_bytes - (model.total_bytes - model.process_bytes)
    if left < shape.expert_bytes:
        lengths = "max_model_len or max_num_seqs" if config.max_num_seqs > 1 else "max_model_len"
        # Where no keys and values are planned, nothing of them can be spared.
        shorter = f"lower {lengths}, " if model.kv_bytes else ""
        return (
            f"even one expert slot does not fit beside the rest of the model; {shorter}{more_room}"
        )
    least = plan.low_bytes + shape.expert_bytes
    if config.memory is not None:
        others = model.total_bytes
        return f"lower memory to {_most(left + others, least + others)}"
    if config.experts_per_layer is None:
        return f"lower expert_memory to {_most(left, least)}"
    num_free = max(0, left - plan.low_bytes) // shape.expert_bytes
    fitting = [n for n in range(num_free + 1) if n + staging_beside(n, shape) <= num_free]
    if not fitting:
        return f"give expert_memory {_most(left, least)} instead of experts_per_layer"
    return f"lower experts_per_layer to {fitting[-1] / shape.num_layers:.6g}"
