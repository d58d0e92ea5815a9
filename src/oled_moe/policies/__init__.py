"""The registry of policies: a name, one line, a source, and how to build it.

The parts of a policy and what each may decide stand in `offload.py`; each other file opens with
the Protocol of one part, or is one published system.
"""

from oled_moe.costs import CostModel
from oled_moe.errors import ConfigError
from oled_moe.policies import (
    fiddler,
    finemoe,
    ktransformers,
    moe_infinity,
    n_cpu_moe,
    paged_lru,
    tide,
)
from oled_moe.policies.allocation import AdaptiveAllocationPolicy, UniformAllocationPolicy
from oled_moe.policies.clairvoyant import BeladyRetentionPolicy, DemandFuture, OraclePolicy
from oled_moe.policies.dispatch import LoadAllDispatchPolicy, LoadReuseDispatchPolicy
from oled_moe.policies.offload import (
    OffloadPolicy,
    Parameters,
    PolicyEntry,
    PolicyInputs,
)
from oled_moe.policies.retention import (
    LfuRetentionPolicy,
    LruRetentionPolicy,
    PriorityRetentionPolicy,
)
from oled_moe.registry import look_up, parse_spec
from oled_moe.types import MoeShape

__all__ = ["POLICIES", "OffloadPolicy", "PolicyEntry", "build_policy", "is_clairvoyant"]


def _naive_lru(inputs: PolicyInputs) -> OffloadPolicy:
    return OffloadPolicy(
        inputs.spec,
        LruRetentionPolicy(inputs.shape),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
    )


def _lfu(inputs: PolicyInputs) -> OffloadPolicy:
    return OffloadPolicy(
        inputs.spec,
        LfuRetentionPolicy(inputs.shape),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
    )


def _prefill(inputs: PolicyInputs, default: str) -> str:
    return inputs.parameters.choice("prefill", ("whole", "tail"), default)


def _priority(inputs: PolicyInputs) -> OffloadPolicy:
    return OffloadPolicy(
        inputs.spec,
        PriorityRetentionPolicy(inputs.shape, prefill=_prefill(inputs, "whole")),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
    )


def _priority_adapt(inputs: PolicyInputs) -> OffloadPolicy:
    return OffloadPolicy(
        inputs.spec,
        PriorityRetentionPolicy(inputs.shape, prefill=_prefill(inputs, "whole")),
        AdaptiveAllocationPolicy(inputs.shape),
        LoadAllDispatchPolicy(),
    )


def _oled_load_aware(inputs: PolicyInputs) -> OffloadPolicy:
    return OffloadPolicy(
        inputs.spec,
        PriorityRetentionPolicy(inputs.shape, prefill=_prefill(inputs, "tail")),
        AdaptiveAllocationPolicy(inputs.shape),
        LoadReuseDispatchPolicy(inputs.shape, inputs.costs, is_reuse_aware=False),
    )


def _oled(inputs: PolicyInputs) -> OffloadPolicy:
    overlap = inputs.parameters.real("overlap", None)
    return OffloadPolicy(
        inputs.spec,
        PriorityRetentionPolicy(inputs.shape, prefill=_prefill(inputs, "tail")),
        AdaptiveAllocationPolicy(inputs.shape),
        LoadReuseDispatchPolicy(inputs.shape, inputs.costs, overlap=overlap),
    )


def _belady(inputs: PolicyInputs) -> OffloadPolicy:
    assert inputs.future is not None
    return OffloadPolicy(
        inputs.spec,
        BeladyRetentionPolicy(inputs.shape, inputs.future),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
    )


def _oracle(inputs: PolicyInputs, *, is_total: bool = False) -> OffloadPolicy:
    assert inputs.future is not None
    return OffloadPolicy(
        inputs.spec,
        # Scores the misses for dispatch; what it would keep plays no part.
        PriorityRetentionPolicy(inputs.shape),
        UniformAllocationPolicy(),
        LoadReuseDispatchPolicy(inputs.shape, inputs.costs, is_reuse_aware=False),
        oracle=OraclePolicy(inputs.future, is_total=is_total),
    )


def _oracle_total(inputs: PolicyInputs) -> OffloadPolicy:
    return _oracle(inputs, is_total=True)


POLICIES: dict[str, PolicyEntry] = {
    "naive-lru": PolicyEntry(
        _naive_lru, "keeps what recent forwards used; every miss is loaded", "OLED-MoE, baseline"
    ),
    "lfu": PolicyEntry(
        _lfu, "keeps what was active in most forwards; every miss is loaded", "classic LFU"
    ),
    "priority": PolicyEntry(
        _priority,
        "keeps by confidence × gate weight; every miss is loaded",
        "OLED-MoE, expert priority",
        ("prefill",),
    ),
    "priority+adapt": PolicyEntry(
        _priority_adapt,
        "priority, and each layer gets the slots it earns",
        "OLED-MoE, layer-adaptive allocation",
        ("prefill",),
    ),
    "oled-load-aware": PolicyEntry(
        _oled_load_aware,
        "priority+adapt, and misses are split to balance copy lane and CPU",
        "OLED-MoE, load-only dispatch (λ = 0)",
        ("prefill",),
    ),
    "oled": PolicyEntry(
        _oled,
        "OLED-MoE whole: the split also weighs what a copy saves later",
        "OLED-MoE (EuroSys '27)",
        ("prefill", "overlap"),
    ),
    "moe-infinity": PolicyEntry(
        moe_infinity.build,
        "fetches what the most similar earlier request used; every miss is loaded",
        "MoE-Infinity, EfficientMoE/MoE-Infinity",
        ("mode", "scope", "trace_capacity", "budget"),
    ),
    "finemoe": PolicyEntry(
        finemoe.build,
        "fetches what earlier forwards with similar gates used; every miss is loaded",
        "FineMoE (EuroSys '26), IntelliSys-Lab/FineMoE-EuroSys26",
        ("store", "distance", "maps", "lookup", "quirk", "budget"),
    ),
    "ktransformers": PolicyEntry(
        ktransformers.build,
        "a static set on the device, the CPU computes all other experts",
        "KTransformers, kvcache-ai/ktransformers",
        ("placement", "scope", "warmup", "prefill_threshold"),
    ),
    "fiddler": PolicyEntry(
        fiddler.build,
        "popular experts stay on the device; each miss is copied or not by measured costs",
        "Fiddler, efeslab/fiddler",
        ("rule", "warmup"),
    ),
    "tide": PolicyEntry(
        tide.build,
        "every few steps the busiest experts come in; between, the CPU computes misses",
        "TIDE (arXiv 2605.20179), ims-kdks/TIDE",
        ("interval", "overlap"),
    ),
    "paged-lru": PolicyEntry(
        paged_lru.build,
        "experts as pages: LRU by single use, copies block the layer",
        "mixtral-offloading, dvmazur/mixtral-offloading",
    ),
    "n-cpu-moe": PolicyEntry(
        n_cpu_moe.build,
        "the first layers' experts on the host, all of the others on the device",
        "llama.cpp --n-cpu-moe",
        ("n", "min_batch"),
    ),
    "belady": PolicyEntry(
        _belady,
        "keeps what is wanted soonest, knowing the trace; every miss is loaded",
        "Belady 1966, with bypass",
        is_clairvoyant=True,
    ),
    "oracle": PolicyEntry(
        _oracle,
        "finds min(|A|, C) of every demand resident, at no cost: the paper's ideal",
        "OLED-MoE, ideal cache bound",
        is_clairvoyant=True,
    ),
    "oracle-total": PolicyEntry(
        _oracle_total,
        "oracle, with slots moving freely between layers",
        "bound for adaptive capacities",
        is_clairvoyant=True,
    ),
}


def is_clairvoyant(spec: str) -> bool:
    """Whether a policy needs the trace ahead. Raises: ConfigError for an unknown name."""
    return look_up("policy", parse_spec("policy", spec)[0], POLICIES).is_clairvoyant


def build_policy(
    spec: str, shape: MoeShape, costs: CostModel, *, future: DemandFuture | None = None
) -> OffloadPolicy:
    """Build the policy that `NAME[:key=value,...]` names.

    Raises: ConfigError for an unknown name or parameter, listing the known ones, and for a
    clairvoyant policy without a future.
    """
    name, parameters = parse_spec("policy", spec)
    entry = look_up("policy", name, POLICIES)
    for key in parameters:
        if key not in entry.parameters:
            known = ", ".join(entry.parameters) or "none"
            raise ConfigError(f"policy {name!r} has no parameter {key!r}; known: {known}")
    if entry.is_clairvoyant and future is None:
        raise ConfigError(
            f"policy {name!r} must know the future; it runs in `oled-moe simulate` only"
        )
    return entry.build(PolicyInputs(spec, shape, costs, Parameters(parameters), future))
