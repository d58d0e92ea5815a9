"""The registry of policies: a name, one line, a source, and how to build it.

The parts of a policy and what each may decide stand in `offload.py`; each other file opens with
the Protocol of one part, or is one published system.
"""

from dataclasses import replace

from oled_moe.costs import CostModel
from oled_moe.errors import ConfigError
from oled_moe.policies import (
    fiddler,
    finemoe,
    ktransformers,
    moe_infinity,
    n_cpu_moe,
    paged_lru,
    stream,
    tide,
)
from oled_moe.policies.allocation import AdaptiveAllocationPolicy, UniformAllocationPolicy
from oled_moe.policies.calibrated import (
    CalibratedRetentionPolicy,
    GlobalCalibratedRetentionPolicy,
    Ingredients,
    ReuseEstimator,
)
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
from oled_moe.policies.reuse_prefetch import ReusePrefetchPolicy
from oled_moe.registry import look_up, parse_spec
from oled_moe.types import MoeShape

__all__ = ["POLICIES", "OffloadPolicy", "PolicyEntry", "build_policy", "is_clairvoyant"]


def _naive_lru(inputs: PolicyInputs) -> OffloadPolicy:
    policy = OffloadPolicy(
        inputs.spec,
        LruRetentionPolicy(inputs.shape),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
    )
    return _with_prefetch(policy, inputs)


def _lfu(inputs: PolicyInputs) -> OffloadPolicy:
    policy = OffloadPolicy(
        inputs.spec,
        LfuRetentionPolicy(inputs.shape),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
    )
    return _with_prefetch(policy, inputs)


def _prefill(inputs: PolicyInputs, default: str) -> str:
    return inputs.parameters.choice("prefill", ("whole", "tail"), default)


def _priority(inputs: PolicyInputs) -> OffloadPolicy:
    prefill = _prefill(inputs, "whole")
    policy = OffloadPolicy(
        inputs.spec,
        PriorityRetentionPolicy(inputs.shape, prefill=prefill),
        UniformAllocationPolicy(),
        LoadAllDispatchPolicy(),
        spares_running=prefill == "tail",
    )
    return _with_prefetch(policy, inputs)


def _priority_adapt(inputs: PolicyInputs) -> OffloadPolicy:
    prefill = _prefill(inputs, "whole")
    policy = OffloadPolicy(
        inputs.spec,
        PriorityRetentionPolicy(inputs.shape, prefill=prefill),
        AdaptiveAllocationPolicy(inputs.shape),
        LoadAllDispatchPolicy(),
        spares_running=prefill == "tail",
    )
    return _with_prefetch(policy, inputs)


def _oled_load_aware(inputs: PolicyInputs) -> OffloadPolicy:
    prefill = _prefill(inputs, "tail")
    policy = OffloadPolicy(
        inputs.spec,
        PriorityRetentionPolicy(inputs.shape, prefill=prefill),
        AdaptiveAllocationPolicy(inputs.shape),
        LoadReuseDispatchPolicy(inputs.shape, inputs.costs, is_reuse_aware=False),
        spares_running=prefill == "tail",
    )
    return _with_prefetch(policy, inputs)


def _oled(inputs: PolicyInputs) -> OffloadPolicy:
    prefill = _prefill(inputs, "tail")
    overlap = inputs.parameters.real("overlap", None)
    policy = OffloadPolicy(
        inputs.spec,
        PriorityRetentionPolicy(inputs.shape, prefill=prefill),
        AdaptiveAllocationPolicy(inputs.shape),
        LoadReuseDispatchPolicy(inputs.shape, inputs.costs, overlap=overlap),
        spares_running=prefill == "tail",
    )
    return _with_prefetch(policy, inputs)


def _oled_plus(
    inputs: PolicyInputs, *, is_global: bool = False, prefetch: str = "none"
) -> OffloadPolicy:
    parameters, prefill = inputs.parameters, _prefill(inputs, "tail")
    ingredients = Ingredients(
        state=parameters.flag("state", True),
        transition=parameters.flag("transition", True),
        rank=parameters.flag("rank", True),
        confidence=parameters.flag("confidence", True),
        history=parameters.flag("history", False),
    )
    estimator = ReuseEstimator(inputs.shape, ingredients, prefill=prefill)
    retention: CalibratedRetentionPolicy
    if is_global:
        retention = GlobalCalibratedRetentionPolicy(estimator, inputs.shape)
    else:
        retention = CalibratedRetentionPolicy(estimator, inputs.shape.num_layers)
    adapts = (
        not is_global
        and parameters.choice("allocation", ("adaptive", "uniform"), "adaptive") == "adaptive"
    )
    policy = OffloadPolicy(
        inputs.spec,
        retention,
        AdaptiveAllocationPolicy(inputs.shape) if adapts else UniformAllocationPolicy(),
        LoadReuseDispatchPolicy(inputs.shape, inputs.costs, has_probabilities=True),
        listeners=(retention,),
        is_global=is_global,
        spares_running=prefill == "tail",
        needs=frozenset({"token_ids"} if ingredients.history else ()),
    )
    return _with_prefetch(policy, inputs, prefetch)


def _oled_plus_global(inputs: PolicyInputs) -> OffloadPolicy:
    return _oled_plus(inputs, is_global=True)


def _oled_plus_prefetch(inputs: PolicyInputs) -> OffloadPolicy:
    return _oled_plus(inputs, prefetch="reuse")


# Parameters of whatever takes `prefetch=reuse`.
_PREFETCH = ("prefetch", "depth", "least", "words")


def _with_prefetch(
    policy: OffloadPolicy, inputs: PolicyInputs, default: str = "none"
) -> OffloadPolicy:
    """The policy with guesses into staging, if `prefetch=reuse` asks for them."""
    parameters = inputs.parameters
    if parameters.choice("prefetch", ("none", "reuse"), default) == "none":
        parameters.refuse(_PREFETCH[1:], "prefetch=reuse is not given")
        return policy
    depth = parameters.integer("depth", 1, minimum=1, maximum=64)
    least = parameters.real("least", 0.4)
    has_words = parameters.flag("words", False)
    assert depth is not None and least is not None
    return replace(
        policy,
        prefetch=ReusePrefetchPolicy(
            inputs.shape,
            depth=depth,
            least_probability=least,
            has_history=has_words,
            most_beside_cpu=inputs.costs.num_idle_copies,
        ),
        needs=policy.needs | ({"token_ids"} if has_words else set()),
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


_INGREDIENTS = ("prefill", "state", "transition", "rank", "confidence", "history")

POLICIES: dict[str, PolicyEntry] = {
    "naive-lru": PolicyEntry(
        _naive_lru,
        "keeps what recent forwards used; every miss is loaded",
        "OLED-MoE, baseline",
        _PREFETCH,
    ),
    "lfu": PolicyEntry(
        _lfu,
        "keeps what was active in most forwards; every miss is loaded",
        "classic LFU",
        _PREFETCH,
    ),
    "priority": PolicyEntry(
        _priority,
        "keeps by confidence × gate weight; every miss is loaded",
        "OLED-MoE, expert priority",
        ("prefill", *_PREFETCH),
    ),
    "priority+adapt": PolicyEntry(
        _priority_adapt,
        "priority, and each layer gets the slots it earns",
        "OLED-MoE, layer-adaptive allocation",
        ("prefill", *_PREFETCH),
    ),
    "oled-load-aware": PolicyEntry(
        _oled_load_aware,
        "priority+adapt, and misses are split to balance copy lane and CPU",
        "OLED-MoE, load-only dispatch (λ = 0)",
        ("prefill", *_PREFETCH),
    ),
    "oled": PolicyEntry(
        _oled,
        "OLED-MoE whole: the split also weighs what a copy saves later",
        "OLED-MoE (EuroSys '27)",
        ("prefill", "overlap", *_PREFETCH),
    ),
    "oled+": PolicyEntry(
        _oled_plus,
        "oled with retention by calibrated reuse instead of confidence × gate weight",
        "this project",
        (*_INGREDIENTS, "allocation", *_PREFETCH),
    ),
    "oled+global": PolicyEntry(
        _oled_plus_global,
        "oled+ with one ranking over all layers, discounted by time to next use",
        "this project",
        _INGREDIENTS,
    ),
    "oled+prefetch": PolicyEntry(
        _oled_plus_prefetch,
        "oled+ with guesses copied into staging while the copy lane is idle",
        "this project",
        (*_INGREDIENTS, "allocation", *_PREFETCH),
    ),
    "stream": PolicyEntry(
        stream.build,
        "oled, but layers that want nearly all experts keep one set and stream the others ahead",
        "this project",
        ("prefill", "bound", "slack", "depth"),
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
        "vLLM PR 37190 (fixed cache per layer, LRU)",
    ),
    "n-cpu-moe": PolicyEntry(
        n_cpu_moe.build,
        "the first layers' experts on the host, all of the others on the device",
        "llama.cpp --n-cpu-moe",
        ("n", "min_batch"),
    ),
    "belady": PolicyEntry(
        _belady,
        "keeps what is wanted soonest, knowing the trace: a bound on hits, every miss loaded",
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


def is_clairvoyant(spec: str, *, has_future: bool = True) -> bool:
    """Whether a policy needs the trace ahead. Raises: ConfigError as `build_policy`."""
    return _find(parse_spec("policy", spec)[0], has_future=has_future).is_clairvoyant


def _find(name: str, *, has_future: bool) -> PolicyEntry:
    """An unknown name is told which there are, and of those alone that can be had."""
    allowed = POLICIES
    if not has_future and name not in POLICIES:
        allowed = {key: entry for key, entry in POLICIES.items() if not entry.is_clairvoyant}
    return look_up("policy", name, allowed)


def build_policy(
    spec: str, shape: MoeShape, costs: CostModel, *, future: DemandFuture | None = None
) -> OffloadPolicy:
    """Build the policy that `NAME[:key=value,...]` names.

    Raises: ConfigError for an unknown name or parameter, listing the known ones (without a future
    those that need none), and for a clairvoyant policy without a future.
    """
    name, parameters = parse_spec("policy", spec)
    entry = _find(name, has_future=future is not None)
    for key in parameters:
        if key not in entry.parameters:
            known = ", ".join(entry.parameters) or "none"
            raise ConfigError(f"policy {name!r} has no parameter {key!r}; known: {known}")
    if entry.is_clairvoyant and future is None:
        raise ConfigError(
            f"policy {name!r} must know the future; it runs in `oled-moe simulate` only"
        )
    return entry.build(PolicyInputs(spec, shape, costs, Parameters(parameters), future))
