"""Lossy rules by name: the registry, and what a rule at work in an engine has replaced.

They change answers, so they are opt-in (`EngineConfig.lossy`) and named wherever results are.
Either tokens share experts (sharing.py), or missing experts come in a lower precision
(policies/precision.py). Plain numpy, no torch.
Legend: T tokens, K experts per token, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from oled_moe.errors import ConfigError
from oled_moe.policies.offload import Parameters
from oled_moe.policies.precision import By, MixedPrecisionPolicy, PrecisionPolicy
from oled_moe.registry import look_up, parse_spec
from oled_moe.sharing import (
    DesSeqPolicy,
    DesVotePolicy,
    DmoePolicy,
    ResidentPolicy,
    RoutedTokens,
    SharingPolicy,
)
from oled_moe.types import BoolArray, ForwardContext, IntArray, Phase


@dataclass(frozen=True, slots=True)
class LossyEntry:
    """One line of the registry; `parameters` are the keys its builder understands."""

    build: Callable[[Parameters, int, int], SharingPolicy | PrecisionPolicy]
    summary: str
    source: str
    parameters: tuple[str, ...]


def _des_vote(parameters: Parameters, num_experts: int, top_k: int) -> SharingPolicy:
    return DesVotePolicy(
        experts=parameters.integer("experts", None, minimum=top_k, maximum=num_experts),
        coverage=parameters.real("coverage", None),
    )


def _des_seq(parameters: Parameters, num_experts: int, top_k: int) -> SharingPolicy:
    top = parameters.integer("top", None, minimum=1, maximum=top_k)
    if top is None:
        raise ConfigError(f"lossy rule des-seq: give top, 1 to {top_k}, as des-seq:top=3")
    return DesSeqPolicy(top=top)


def _dmoe(parameters: Parameters, num_experts: int, top_k: int) -> SharingPolicy:
    coverage = parameters.real("coverage", 0.6)
    minimum = parameters.integer("minimum", min(16, num_experts), minimum=1, maximum=num_experts)
    assert coverage is not None and minimum is not None
    return DmoePolicy(coverage=coverage, minimum=minimum)


def _resident(parameters: Parameters, num_experts: int, top_k: int) -> SharingPolicy:
    threshold = parameters.real("threshold", 0.5)
    assert threshold is not None
    return ResidentPolicy(threshold=threshold)


def _mixed(parameters: Parameters, num_experts: int, top_k: int) -> PrecisionPolicy:
    share = parameters.real("share", 0.2)
    slots = parameters.integer("slots", top_k, minimum=0, maximum=num_experts)
    assert share is not None and slots is not None
    by: By = "token" if parameters.choice("by", ("block", "token"), "block") == "token" else "block"
    return MixedPrecisionPolicy(share=share, by=by, slots=slots)


LOSSY: dict[str, LossyEntry] = {
    "des-vote": LossyEntry(
        _des_vote,
        "a block's tokens vote with their weights; the experts with most votes stay",
        "DES (arXiv 2602.00879)",
        ("experts", "coverage"),
    ),
    "des-seq": LossyEntry(
        _des_seq,
        "what any token of the block has among its own first experts stays",
        "DES (arXiv 2602.00879)",
        ("top",),
    ),
    "dmoe": LossyEntry(
        _dmoe,
        "the experts that hold a share of the block's summed scores stay",
        "dMoE (arXiv 2605.30876), fscdc/dMoE",
        ("coverage", "minimum"),
    ),
    "resident": LossyEntry(
        _resident,
        "masked tokens of low confidence take resident experts only: answers depend on the cache",
        "this project",
        ("threshold",),
    ),
    "mixed": LossyEntry(
        _mixed,
        "missing experts that matter least come from a pack in a lower precision: answers depend "
        "on the cache",
        "HOBBIT (arXiv 2411.01433)",
        ("share", "by", "slots"),
    ),
}


def build_lossy(spec: str, *, num_experts: int, top_k: int) -> "LossyRule":
    """Build the rule that `NAME[:key=value,...]` names, for layers of so many experts.

    Raises: ConfigError for an unknown name or parameter, listing the known ones.
    """
    name, values = parse_spec("lossy rule", spec)
    entry = look_up("lossy rule", name, LOSSY)
    for key in values:
        if key not in entry.parameters:
            known = ", ".join(entry.parameters)
            raise ConfigError(f"lossy rule {name!r} has no parameter {key!r}; known: {known}")
    policy = entry.build(Parameters(values, kind="lossy"), num_experts, top_k)
    return LossyRule(spec, policy)


@dataclass(frozen=True, slots=True)
class ChoiceCounts:
    """Choices of an expert by a token, at all layers of forwards that denoise: how many a rule saw,
    and how many of them it replaced, by an expert that the token had not chosen or by a copy in a
    lower precision. `weight` and `replaced_weight` are the mixing weights of both."""

    num_choices: int = 0
    num_replaced: int = 0
    weight: float = 0.0
    replaced_weight: float = 0.0


class LossyRule:
    """A rule at work in one engine, and what it has replaced, by request.

    It has either `sharing` or `precision`; the other is None.
    """

    def __init__(self, spec: str, policy: SharingPolicy | PrecisionPolicy) -> None:
        self.spec = spec
        self.sharing: SharingPolicy | None = None
        self.precision: PrecisionPolicy | None = None
        if isinstance(policy, PrecisionPolicy):
            self.precision = policy
        else:
            self.sharing = policy
        self._counts: dict[int, ChoiceCounts] = {}

    @property
    def depends_on_cache(self) -> bool:
        """Whether answers depend on what is resident, hence on memory, policy and company."""
        return self.sharing is None or self.sharing.depends_on_cache

    @property
    def words(self) -> str:
        """What it does to experts, for people."""
        if self.precision is not None:
            return "missing experts that matter least are taken in a lower precision"
        return "experts are shared"

    def allowed(self, context: ForwardContext, routed: RoutedTokens) -> BoolArray | None:
        """Which experts each token of a forward may choose, bool [T, E]; None where all may all.

        Only rows that denoise are the rule's; `routed` has the tokens of all rows.
        """
        if self.sharing is None or not context.is_denoise:
            return None
        is_ours = context.denoising_tokens
        if is_ours.all():
            return self.sharing.allowed(routed)
        # Blocks are numbered from 0 on among those that are left.
        block_of = np.unique(routed.block_of[is_ours], return_inverse=True)[1]
        ours = replace(
            routed,
            scores=routed.scores[is_ours],
            topk_ids=routed.topk_ids[is_ours],
            weights=routed.weights[is_ours],
            token_state=routed.token_state[is_ours],
            token_confidence=routed.token_confidence[is_ours],
            block_of=block_of,
        )
        allowed = np.ones(routed.scores.shape, dtype=np.bool_)
        allowed[is_ours] = self.sharing.allowed(ours)
        return allowed

    def count_taken(
        self,
        context: ForwardContext,
        own_ids: IntArray,
        weights: npt.NDArray[np.float32],
        taken_ids: IntArray,
    ) -> None:
        """Count what tokens chose themselves, by which weights, and what they were given instead.

        Shapes: all [T, K].
        """
        is_lost = ~(own_ids[:, :, None] == taken_ids[:, None, :]).any(-1)
        self._count(context, is_lost, weights)

    def count_low(
        self,
        context: ForwardContext,
        topk_ids: IntArray,
        weights: npt.NDArray[np.float32],
        low_ids: IntArray,
    ) -> None:
        """Count the choices of experts that were taken in a lower precision.

        Shapes: ids and weights [T, K]; low_ids int64 [N].
        """
        self._count(context, np.isin(topk_ids, low_ids), weights)

    def _count(
        self,
        context: ForwardContext,
        is_replaced: BoolArray,
        weights: npt.NDArray[np.float32],
    ) -> None:
        end = 0
        for row in context.rows:
            start, end = end, end + row.num_tokens
            if row.phase != Phase.DENOISE:
                continue
            before = self.counts_of(row.request_id)
            replaced, own = is_replaced[start:end], weights[start:end]
            self._counts[row.request_id] = ChoiceCounts(
                before.num_choices + replaced.size,
                before.num_replaced + int(np.count_nonzero(replaced)),
                before.weight + float(own.sum()),
                before.replaced_weight + float(own[replaced].sum()),
            )

    def counts_of(self, request_id: int) -> ChoiceCounts:
        """What has been replaced for a request so far."""
        return self._counts.get(request_id, ChoiceCounts())

    def end_request(self, request_id: int) -> None:
        """Forget a request. Mutates: the counts."""
        self._counts.pop(request_id, None)
