"""Offloaded experts inside any Transformers model that has the experts interface.

    model = offload_experts("path/of/a/checkpoint", expert_memory="4GiB")
    model.generate(...)                       # Transformers' own, as before
    expert_stats(model)

The weights of routed experts leave the model; its expert modules compute from the bounded slots of
an `OffloadedExperts`, through the implementation "oled_moe" of the experts interface. Everything
else, routers included, stays the model's own. For inference only.

What policies are told: a forward that continues a key/value cache counts as a denoising step, and
so does one over as many tokens as the one before it where there is no cache (a diffusion model's
next pass); any other begins requests and counts as prefill. Each sequence of a batch is a row,
padding included, since routers see it too. Every token has confidence 1: there is no mask, so
priority is gate mass alone.

Legend: T tokens, D hidden, F hidden of one expert, E experts per layer, K experts per token.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oled_moe.config import (
    DEVICES,
    EngineConfig,
    check_choice,
    exact_size,
    format_size,
    parse_size,
)
from oled_moe.costs import DEFAULT_PROFILES, CostModel, HardwareProfile, load_profile
from oled_moe.devices import Gpu, Tiers, build_tiers, open_gpu
from oled_moe.errors import ConfigError, DoesNotFitError, MissingDependencyError
from oled_moe.experts import OffloadedExperts
from oled_moe.kernels import ExpertKernel
from oled_moe.kernels.cpu import CpuExpertKernel
from oled_moe.lanes import InlineLane, Lane
from oled_moe.machine import usable_memory_bytes
from oled_moe.memory import (
    FORCE_ADVICE,
    SYSTEM_RESERVE_BYTES,
    MemoryPlan,
    ModelMemory,
    plan_gpu_memory,
    plan_memory,
    process_memory_bytes,
)
from oled_moe.policies import OffloadPolicy, build_policy
from oled_moe.profiler import default_profile_path
from oled_moe.store import ExpertStore, HostExpertStore
from oled_moe.traces import RoutingTrace, TraceRecorder, TraceRequest
from oled_moe.types import ForwardContext, ForwardOutcome, MoeShape, Phase

try:
    from transformers import PreTrainedModel

    from oled_moe.integrations.expert_modules import (
        ExpertModules,
        find_expert_modules,
        moved_to_file,
        moved_to_ram,
        put_back,
    )
    from oled_moe.integrations.model_experts import (
        IMPLEMENTATION,
        TAIL_LENGTH,
        ExpertStats,
        ModelExperts,
        OwnGateKernel,
        owner_of,
    )
    from oled_moe.integrations.pretrained import PretrainedExperts
except ImportError as missing:
    raise MissingDependencyError(
        f"offloading the experts of a Transformers model needs transformers 5.24 or newer "
        f"({missing}); install it with: pip install 'oled-moe[transformers]'"
    ) from missing

__all__ = [
    "IMPLEMENTATION",
    "ExpertStats",
    "expert_stats",
    "offload_experts",
    "offloaded_experts",
    "record_routing",
    "restore_experts",
]

logger = logging.getLogger(__name__)


def offload_experts(
    model: Any,
    expert_memory: int | str | None = None,
    *,
    experts_per_layer: float | None = None,
    policy: str | OffloadPolicy = "oled",
    device: str | None = None,
    cpu_experts: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_folder: str | Path | None = None,
    hardware: HardwareProfile | None = None,
    lossy: str | None = None,
) -> Any:
    """Take the routed experts out of a model, which is changed in place and returned, to be run
    only: it is put into evaluation mode and asks for no gradients.

    `model`: a PreTrainedModel, or the path (or hub id in the local cache) of a safetensors
    checkpoint. With a path the experts stay on disk and are read as they are needed: they are never
    all in RAM, and `dtype` None keeps the stored one. The experts of a model that is loaded already
    stay in RAM, which makes room on a GPU but none on `cpu`, or go to a file in `offload_folder`,
    which is deleted at the end.

    `expert_memory` (bytes, "4GiB", "25%" of all experts) is for all expert slots together,
    `experts_per_layer` their mean number in a layer; without either, what the machine has to spare.
    `device`: cpu, cuda, emulated; by default where the model lies. `cpu_experts` lets the CPU of a
    GPU machine compute missing experts, which rounds otherwise than the GPU does. `lossy` is what
    the engine's own models take, and refused here.

    Raises: DoesNotFitError with the smallest budget that works; ConfigError for a model whose
    experts cannot be run, saying why; CheckpointError, ModelNotFoundError. The model is unchanged
    then.
    """
    if lossy is not None:
        raise ConfigError(
            f"lossy is {lossy!r}; models of Transformers choose their experts themselves, which no "
            "rule can change here: leave it out"
        )
    source = _source_of(model, dtype, offload_folder)
    found = source.experts
    device = device or source.device
    check_choice("device", device, DEVICES)
    config = EngineConfig(
        device=device,
        expert_memory=expert_memory,
        experts_per_layer=experts_per_layer,
        policy=policy,
        cpu_experts=cpu_experts,
    )
    hardware = hardware or _stored_profile(device)
    gpu = open_gpu() if device == "cuda" else None
    plan, num_pinned = _plan(config, found, source, hardware, gpu)
    costs = CostModel.from_profile(hardware, found.layout.weight_bytes)
    chosen = _policy(config, found.shape, costs)
    kernel = None
    if found.gate_reason:
        kernel = OwnGateKernel(found.modules[0][0])
        logger.warning(
            "experts are computed one after another through torch, which is slower: %s",
            found.gate_reason,
        )
    if kernel is not None and cpu_experts:
        raise ConfigError(f"cpu_experts is True, but {found.gate_reason}; leave cpu_experts out")
    whole, store = source.load(hardware.disk_method)
    try:
        tiers = _build(config, plan, chosen, store, hardware, kernel, gpu, num_pinned)
    except BaseException:
        source.undo(store)
        raise
    whole_store = _whole_store(tiers, store)
    whole.to(torch.device("cpu") if gpu is None else gpu.device)
    budget_bytes = plan.expert_memory_bytes
    if expert_memory is not None:
        all_bytes = found.shape.num_experts_total * found.shape.expert_bytes
        budget_bytes = parse_size("expert_memory", expert_memory, whole_bytes=all_bytes)
    ModelExperts(source.experts, tiers, whole_store, plan, kernel, budget_bytes).attach(whole)
    return whole


def expert_stats(model: Any) -> ExpertStats:
    """Counts and bytes of an offloaded model. Raises: ConfigError for any other model."""
    return owner_of(model).stats()


def offloaded_experts(model: Any) -> OffloadedExperts:
    """What computes a model's experts: observers of demands and plans are added there."""
    return owner_of(model).tiers.experts


def restore_experts(model: Any) -> Any:
    """Put all experts back into the model as they were, and return it; it can be saved then.

    They have to fit into memory. Statistics end; parameters go on asking for no gradients.
    """
    owner_of(model).restore()
    return model


@contextmanager
def record_routing(model: Any, *, name: str = "model") -> Iterator[Callable[[], RoutingTrace]]:
    """Records what routers choose meanwhile; calling what is yielded makes the trace.

    with record_routing(model) as trace:
        model.generate(...)
    trace().save(path)
    """
    owner = owner_of(model)
    recorder = TraceRecorder(replace(owner.shape, expert_bytes=owner.tiers.layout.weight_bytes))
    contexts: list[ForwardContext] = []

    def end_forward(outcome: ForwardOutcome) -> None:
        contexts.append(outcome.context)
        recorder.observe_outcome(outcome)

    def build() -> RoutingTrace:
        return recorder.build(
            _requests_of(contexts),
            model_type=owner.model_type,
            model_name=name,
            block_length=TAIL_LENGTH,
            threshold=1.0,
        )

    owner.tiers.experts.observers.append(recorder.observe_demand)
    owner.outcome_observers.append(end_forward)
    try:
        yield build
    finally:
        owner.tiers.experts.observers.remove(recorder.observe_demand)
        owner.outcome_observers.remove(end_forward)


def _requests_of(contexts: Sequence[ForwardContext]) -> dict[int, TraceRequest]:
    prompts: dict[int, int] = {}
    generated: dict[int, int] = {}
    for row in itertools.chain.from_iterable(context.rows for context in contexts):
        counts = prompts if row.phase == Phase.PREFILL else generated
        counts[row.request_id] = counts.get(row.request_id, 0) + row.num_tokens
    return {
        request_id: TraceRequest(
            f"request-{request_id}",
            "unknown",
            prompts.get(request_id, 0),
            generated.get(request_id, 0),
        )
        for request_id in sorted(prompts.keys() | generated.keys())
    }


# Where experts come from


class _LoadedModel:
    """A model that is in memory: its experts go to RAM, or to a file."""

    def __init__(self, model: PreTrainedModel, offload_folder: Path | None) -> None:
        self.model = model
        self.experts = find_expert_modules(model)
        weights = self.experts.parameters[0][0]
        if weights.device.type not in ("cpu", "cuda"):
            raise ConfigError(
                f"the experts' weights are on {weights.device}; load the model on cpu or cuda, "
                "or give the path of its checkpoint"
            )
        if getattr(model, "hf_device_map", None):
            raise ConfigError(
                "the model is spread over several places by a device_map; load it without one, or "
                "give the path of its checkpoint"
            )
        self.device = weights.device.type
        self._folder = offload_folder

    def new_dense_bytes(self, device: str) -> int:
        """What other weights will take up anew on `device`."""
        if (device == "cuda") == (self.device == "cuda"):
            return 0
        expert_bytes = sum(up.nbytes + down.nbytes for up, down in self.experts.parameters)
        all_bytes: int = sum(each.nbytes for each in self.model.parameters())
        return all_bytes - expert_bytes

    def load(self, method: str) -> tuple[PreTrainedModel, ExpertStore]:
        if self._folder is None:
            return self.model, moved_to_ram(self.experts)
        return self.model, moved_to_file(self.experts, self._folder, method)

    def undo(self, store: ExpertStore) -> None:
        put_back(self.experts, store, torch.device(self.device))
        store.close()


class _PretrainedModel:
    """A checkpoint: its experts stay where they are."""

    device = "cpu"

    def __init__(self, path: str | Path, dtype: torch.dtype | str | None) -> None:
        self._pretrained = PretrainedExperts.open(path, dtype)
        self.experts = self._pretrained.experts

    def new_dense_bytes(self, device: str) -> int:
        return self._pretrained.dense_bytes

    def load(self, method: str) -> tuple[PreTrainedModel, ExpertStore]:
        store = self._pretrained.open_store(method)
        try:
            model, self.experts = self._pretrained.load_rest()
        except BaseException:
            store.close()
            raise
        return model, store

    def undo(self, store: ExpertStore) -> None:
        store.close()


_Source = _LoadedModel | _PretrainedModel


def _source_of(
    model: Any, dtype: torch.dtype | str | None, offload_folder: str | Path | None
) -> _Source:
    if isinstance(model, str | Path):
        if offload_folder is not None:
            raise ConfigError(
                "offload_folder is for models that are loaded already; the experts of a checkpoint "
                "are read from its own files"
            )
        return _PretrainedModel(model, dtype)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model is a {type(model).__name__}; allowed: a PreTrainedModel of Transformers, or "
            "the path of a checkpoint"
        )
    if dtype is not None:
        raise ConfigError("dtype is for checkpoints; convert a loaded model with model.to(dtype)")
    return _LoadedModel(model, None if offload_folder is None else Path(offload_folder))


# Room, policy and device


def _stored_profile(device: str) -> HardwareProfile:
    """What `oled-moe doctor` measured here, else a guess."""
    path = default_profile_path(device)
    return load_profile(path) if path.is_file() else DEFAULT_PROFILES[device]


def _plan(
    config: EngineConfig,
    found: ExpertModules,
    source: _Source,
    hardware: HardwareProfile,
    gpu: Gpu | None,
) -> tuple[MemoryPlan, int]:
    """The memory plan, and how many experts RAM is to hold for a GPU."""
    shape = found.shape
    _check_budget(config, shape)
    memory = ModelMemory(
        process_bytes=process_memory_bytes(),
        dense_bytes=source.new_dense_bytes(config.device),
        kv_bytes=0,
        activation_bytes=0,
        buffer_bytes=2 * hardware.disk_queue_depth * shape.expert_bytes,
        host_expert_bytes=0,
    )
    usable_bytes = usable_memory_bytes()
    try:
        return _divided(config, shape, memory, usable_bytes, source, gpu)
    except DoesNotFitError as error:
        # Here nothing is forced.
        raise DoesNotFitError(str(error).replace(f", {FORCE_ADVICE}", "")) from None


def _divided(
    config: EngineConfig,
    shape: MoeShape,
    memory: ModelMemory,
    usable_bytes: int,
    source: _Source,
    gpu: Gpu | None,
) -> tuple[MemoryPlan, int]:
    if gpu is None:
        return plan_memory(config, shape, memory, usable_bytes=usable_bytes), 0
    reserve_bytes = min(SYSTEM_RESERVE_BYTES, usable_bytes // 10)
    moved_bytes = shape.num_experts_total * shape.expert_bytes if source.device == "cuda" else 0
    plan = plan_gpu_memory(
        config,
        shape,
        memory,
        # Experts that leave the GPU make room on it and need room in RAM.
        gpu_bytes=gpu.free_bytes + moved_bytes,
        ram_bytes=usable_bytes - reserve_bytes + memory.process_bytes - moved_bytes,
    )
    return plan.gpu, plan.num_pinned


def _check_budget(config: EngineConfig, shape: MoeShape) -> None:
    """One expert of each layer at least. Raises: ConfigError, DoesNotFitError."""
    least_bytes = shape.num_layers * shape.expert_bytes
    if config.experts_per_layer is not None and config.experts_per_layer < 1:
        raise DoesNotFitError(
            f"experts_per_layer is {config.experts_per_layer:g}; raise it to 1 or more"
        )
    if config.expert_memory is None:
        return
    all_bytes = shape.num_experts_total * shape.expert_bytes
    budget_bytes = parse_size("expert_memory", config.expert_memory, whole_bytes=all_bytes)
    if budget_bytes < least_bytes:
        raise DoesNotFitError(
            f"expert_memory is {format_size(budget_bytes)}, less than one expert of "
            f"{format_size(shape.expert_bytes)} for each of {shape.num_layers} layers; raise it to "
            f"{exact_size(least_bytes)} or more"
        )


def _policy(config: EngineConfig, shape: MoeShape, costs: CostModel) -> OffloadPolicy:
    policy = config.policy
    if isinstance(policy, str):
        policy = build_policy(policy, shape, costs)
    if not isinstance(policy, OffloadPolicy):
        raise ConfigError(f"policy is {policy!r}; allowed: a name or an OffloadPolicy")
    if policy.needs:
        raise ConfigError(
            f"policy {policy.name!r} needs {', '.join(sorted(policy.needs))}, which the experts "
            "interface of Transformers does not hand over; take another, such as oled"
        )
    return policy


def _build(
    config: EngineConfig,
    plan: MemoryPlan,
    policy: OffloadPolicy,
    store: ExpertStore,
    hardware: HardwareProfile,
    kernel: ExpertKernel | None,
    gpu: Gpu | None,
    num_pinned: int,
) -> Tiers:
    """The tiers of the device, computing by `kernel` where there is one. Leaves `store` open."""
    num_threads = torch.get_num_threads()
    if gpu is not None and kernel is not None:
        own = kernel
        gpu = gpu._replace(make_kernel=lambda upload: own)
    tiers = build_tiers(
        config,
        plan,
        policy,
        _Borrowed(store),  # type: ignore[arg-type]  # it is read and closed, no more
        hardware,
        num_threads=num_threads,
        gpu=gpu,
        num_pinned=num_pinned,
    )
    if config.device == "cpu":
        kernel = kernel or CpuExpertKernel(num_threads)
    if kernel is not None and gpu is None:
        lane: Lane = InlineLane() if config.device == "cpu" else tiers.lanes[1]
        before = tiers.experts
        tiers.experts = OffloadedExperts(
            before.cache, before.pool, kernel=kernel, compute_lane=lane
        )
    return tiers


class _Borrowed:
    """A store that stays open when it is closed: a device that fails to start loses nothing."""

    def __init__(self, store: ExpertStore) -> None:
        self.layout = store.layout
        self.num_layers = store.num_layers
        self.num_experts = store.num_experts
        self.read_into = store.read_into

    def close(self) -> None:
        return None


def _whole_store(tiers: Tiers, store: ExpertStore) -> ExpertStore:
    """Where all experts are from now on; closes `store` where a device has copied them."""
    for piece in (tiers.store, *tiers.others):
        if isinstance(piece, HostExpertStore) and piece.num_experts == store.num_experts:
            store.close()
            return piece
    return store
