"""The policy `stream`: it notices demands for nearly everything, keeps one set, streams others."""

import numpy as np

from oled_moe.cache import ExpertCache
from oled_moe.costs import DEFAULT_EMULATED_PROFILE, CostModel
from oled_moe.policies import build_policy
from oled_moe.policies.stream import StreamPolicy
from oled_moe.types import (
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    IntArray,
    LayerDemand,
    LayerPlan,
    MoeShape,
    Phase,
)

SHAPE = MoeShape(num_layers=3, num_experts=12, top_k=2, expert_bytes=4096)
NUM_SLOTS, NUM_STAGING = 12, 6


class Driver:
    """Forwards of one request through a cache; every layer wants what it is told to."""

    def __init__(self, spec: str = "stream") -> None:
        costs = CostModel.from_profile(DEFAULT_EMULATED_PROFILE, SHAPE.expert_bytes)
        policy = build_policy(spec, SHAPE, costs)
        self.cache = ExpertCache(SHAPE, policy, num_slots=NUM_SLOTS, num_staging=NUM_STAGING)
        assert isinstance(policy.retention, StreamPolicy)
        self.policy = policy.retention
        self.ahead: IntArray = np.empty(0, dtype=np.int64)
        self._num_forwards = 0

    def forward(self, wanted: list[int], phase: Phase = Phase.DENOISE) -> list[LayerPlan]:
        ids = np.array(wanted).reshape(-1, SHAPE.top_k)
        size = len(ids)
        context = ForwardContext(
            self._num_forwards,
            size,
            (ForwardRow(0, 0, self._num_forwards, phase, size),),
            np.full(size, 0.5, dtype=np.float32),
            np.full(size, 2, dtype=np.uint8),
        )
        self._num_forwards += 1
        self.ahead = self.cache.start_forward(context).expert_ids
        # Of a token's two the higher id weighs more, and the more the lower both are.
        weights = (1 + ids.astype(np.float32)) / (1 + ids).sum(1, keepdims=True)
        plans = []
        for layer in range(SHAPE.num_layers):
            demand = LayerDemand.from_routing(
                layer, context, ids, weights.astype(np.float32), num_experts=SHAPE.num_experts
            )
            plans.append(self.cache.plan(demand))
            self.cache.check()
        self.cache.end_forward(ForwardOutcome.without_logits(context))
        return plans

    @property
    def residents(self) -> list[list[int]]:
        return [self.cache.resident_ids(layer).tolist() for layer in range(SHAPE.num_layers)]

    @property
    def streams(self) -> list[bool]:
        return [self.policy.streams(layer) for layer in range(SHAPE.num_layers)]


EVERYTHING = list(range(12))
ALL_BUT_ONE = [*range(11), 0]
FEW = [0, 1, 2, 3]


def test_it_streams_once_nearly_everything_is_wanted_again_and_again() -> None:
    driver = Driver()
    seen = []
    for _ in range(8):
        driver.forward(EVERYTHING)
        seen.append(driver.streams)
    first = seen.index([True] * 3)
    assert 1 < first < 6 and seen == [[False] * 3] * first + [[True] * 3] * (8 - first)
    # Those with the most gate mass: by layer as many as there are slots.
    assert driver.residents == [[1, 3, 5, 7]] * 3


def test_prompts_do_not_make_it_stream() -> None:
    driver = Driver()
    for _ in range(9):
        driver.forward(EVERYTHING, Phase.PREFILL)
    assert driver.streams == [False] * 3


def test_what_it_keeps_stays_while_it_streams() -> None:
    driver = Driver()
    for _ in range(8):
        driver.forward(EVERYTHING)
    kept = driver.residents
    # One member is not wanted, then few experts are, once: nobody leaves.
    for wanted in (ALL_BUT_ONE, EVERYTHING, FEW, EVERYTHING):
        plans = driver.forward(wanted)
        assert driver.residents == kept and driver.streams == [True] * 3
        for plan, members in zip(plans, kept, strict=True):
            ready = {*plan.hit_ids.tolist(), *plan.staged_ids.tolist()}
            assert set(members) & set(wanted) <= ready


def test_guesses_are_the_others_of_the_next_layer_in_order() -> None:
    driver = Driver()
    for _ in range(8):
        driver.forward(EVERYTHING)
    others, num_staged = [0, 2, 4, 6, 8, 9, 10, 11], 0
    waiting: dict[int, list[int]] = {}
    for _ in range(4):
        for layer, plan in enumerate(driver.forward(EVERYTHING)):
            assert plan.hit_ids.tolist() == [1, 3, 5, 7]
            if layer in waiting:
                assert plan.staged_ids.tolist() == waiting.pop(layer)
            assert sorted([*plan.staged_ids, *plan.load_ids]) == others
            # As many as staging leaves room for, which holds what this layer reads now.
            found = plan.prefetch.expert_ids.tolist()
            coming = (layer + 1) % 3
            assert found == [coming * 12 + expert for expert in others[: len(found)]]
            assert len(found) == (0 if len(plan.staged_ids) else NUM_STAGING - 1)
            if found:
                waiting[coming] = others[: len(found)]
            num_staged += len(plan.staged_ids)
    # Of 12 layers at least every second found what had been copied ahead.
    assert num_staged >= 6 * (NUM_STAGING - 1)


def test_it_stops_only_well_below_the_bound() -> None:
    driver = Driver("stream:bound=0.9,slack=0.3")
    for _ in range(12):
        driver.forward(EVERYTHING)
    assert driver.streams == [True] * 3
    for _ in range(20):
        driver.forward([*range(9), 0])
    assert driver.streams == [True] * 3, "0.75 is between the bounds"
    for _ in range(20):
        driver.forward(FEW)
    assert driver.streams == [False] * 3
    for _ in range(20):
        driver.forward([*range(9), 0])
    assert driver.streams == [False] * 3, "0.75 is not enough to begin"


def test_without_streaming_it_keeps_by_priority_and_guesses_nothing() -> None:
    driver = Driver()
    for wanted in ([0, 1], [2, 3], [4, 5], [6, 7]):
        plans = driver.forward(wanted)
        assert not any(len(plan.prefetch) for plan in plans)
    assert driver.residents == [[4, 5, 6, 7]] * 3
