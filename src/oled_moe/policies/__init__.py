"""The registry of policies: a name, one line, a source, and how to build it.

A policy is three independent choices: which experts a layer keeps, how many slots each layer
gets, and which misses run on the CPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oled_moe.costs import CostModel
from oled_moe.errors import ConfigError
from oled_moe.policies.allocation import (
    AdaptiveAllocationPolicy,
    AllocationPolicy,
    UniformAllocationPolicy,
)
from oled_moe.policies.dispatch import (
    DispatchPolicy,
    LoadAllDispatchPolicy,
    LoadReuseDispatchPolicy,
)
from oled_moe.policies.retention import (
    LfuRetentionPolicy,
    LruRetentionPolicy,
    PriorityRetentionPolicy,
    RetentionPolicy,
)
from oled_moe.registry import look_up, parse_spec
from oled_moe.types import MoeShape


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Everything that decides for one run; its parts hold state, so it serves one engine."""

    name: str
    retention: RetentionPolicy
    allocation: AllocationPolicy
    dispatch: DispatchPolicy


Builder = Callable[[str, MoeShape, CostModel, Mapping[str, str]], OffloadPolicy]


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One line of the registry; `parameters` are the keys its builder understands."""

    build: Builder
    summary: str
    source: str
    parameters: tuple[str, ...] = ()


def _naive_lru(
    name: str, shape: MoeShape, costs: CostModel, parameters: Mapping[str, str]
) -> OffloadPolicy:
    return OffloadPolicy(
        name, LruRetentionPolicy(shape), UniformAllocationPolicy(), LoadAllDispatchPolicy()
    )


def _lfu(
    name: str, shape: MoeShape, costs: CostModel, parameters: Mapping[str, str]
) -> OffloadPolicy:
    return OffloadPolicy(
        name, LfuRetentionPolicy(shape), UniformAllocationPolicy(), LoadAllDispatchPolicy()
    )


def _priority(
    name: str, shape: MoeShape, costs: CostModel, parameters: Mapping[str, str]
) -> OffloadPolicy:
    retention = PriorityRetentionPolicy(shape, prefill=parameters.get("prefill", "whole"))
    return OffloadPolicy(name, retention, UniformAllocationPolicy(), LoadAllDispatchPolicy())


def _priority_adapt(
    name: str, shape: MoeShape, costs: CostModel, parameters: Mapping[str, str]
) -> OffloadPolicy:
    retention = PriorityRetentionPolicy(shape, prefill=parameters.get("prefill", "whole"))
    return OffloadPolicy(name, retention, AdaptiveAllocationPolicy(shape), LoadAllDispatchPolicy())


def _oled_load_aware(
    name: str, shape: MoeShape, costs: CostModel, parameters: Mapping[str, str]
) -> OffloadPolicy:
    return OffloadPolicy(
        name,
        PriorityRetentionPolicy(shape, prefill=parameters.get("prefill", "tail")),
        AdaptiveAllocationPolicy(shape),
        LoadReuseDispatchPolicy(shape, costs, is_reuse_aware=False),
    )


def _oled(
    name: str, shape: MoeShape, costs: CostModel, parameters: Mapping[str, str]
) -> OffloadPolicy:
    overlap = None
    if "overlap" in parameters:
        overlap = _share("overlap", parameters["overlap"])
    return OffloadPolicy(
        name,
        PriorityRetentionPolicy(shape, prefill=parameters.get("prefill", "tail")),
        AdaptiveAllocationPolicy(shape),
        LoadReuseDispatchPolicy(shape, costs, overlap=overlap),
    )


def _share(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"policy parameter {name} is {text!r}; allowed: a number, 0 to 1")
    return value


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
}


def build_policy(spec: str, shape: MoeShape, costs: CostModel) -> OffloadPolicy:
    """Build the policy that `NAME[:key=value,...]` names.

    Raises: ConfigError for an unknown name or parameter, listing the known ones.
    """
    name, parameters = parse_spec("policy", spec)
    entry = look_up("policy", name, POLICIES)
    for key in parameters:
        if key not in entry.parameters:
            known = ", ".join(entry.parameters) or "none"
            raise ConfigError(f"policy {name!r} has no parameter {key!r}; known: {known}")
    return entry.build(spec, shape, costs, parameters)
