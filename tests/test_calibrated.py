"""Calibrated reuse: rates are counted, tokens followed, guesses made only for layers to come."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeRouter, demand_of, policy_of, shape_of
from products import product

from oled_moe.errors import ConfigError
from oled_moe.hardware import load_hardware
from oled_moe.policies.calibrated import (
    CalibratedRetentionPolicy,
    GlobalCalibratedRetentionPolicy,
    Ingredients,
    Rates,
    ReuseEstimator,
    match_tokens,
    row_starts,
)
from oled_moe.policies.reuse_prefetch import ReusePrefetchPolicy
from oled_moe.simulator import SimulationReport, simulate
from oled_moe.traces import RoutingTrace, load_trace
from oled_moe.types import ForwardContext, ForwardRow, LayerDemand, Phase, TokenState

TRACES = Path(__file__).parent.parent / "results" / "traces"
SHAPE = shape_of(2, 12, 2)
FIXED, MASKED = TokenState.COMMITTED, TokenState.MASKED


def context_of(
    forward_id: int,
    states: Sequence[int],
    *,
    request_id: int = 0,
    block_id: int = 0,
    step_id: int = 1,
    phase: Phase = Phase.DENOISE,
    confidence: Sequence[float] | None = None,
    token_ids: Sequence[int] | None = None,
) -> ForwardContext:
    """One row of a block of its own length."""
    size = len(states)
    return ForwardContext(
        forward_id,
        size,
        (ForwardRow(request_id, block_id, step_id, phase, size),),
        np.array(confidence if confidence is not None else [0.6] * size, dtype=np.float32),
        np.array(states, dtype=np.uint8),
        np.arange(block_id * size, (block_id + 1) * size),
        None if token_ids is None else np.array(token_ids),
    )


def demand(context: ForwardContext, ids: Sequence[Sequence[int]], layer: int = 0) -> LayerDemand:
    gates = [[1 / len(row)] * len(row) for row in ids]
    return demand_of(layer, context, ids, gates, num_experts=SHAPE.num_experts)


def estimator_of(**ingredients: bool) -> ReuseEstimator:
    return ReuseEstimator(SHAPE, Ingredients(**ingredients))


# ---- counting ----


def test_rates_are_hits_of_trials() -> None:
    random = np.random.default_rng(0)
    rates = Rates(3, 4, 0.5)
    hits, trials = np.full((3, 4), 0.5), np.ones((3, 4))
    for _ in range(20):
        codes = random.integers(0, 3, 5)
        is_kept = random.random((5, 4)) < 0.3
        rates.learn(codes, is_kept)
        for token, code in enumerate(codes):
            hits[code] += is_kept[token]
            trials[code] += 1
    found = 1 - np.exp(rates.log_misses(np.arange(3), 4))
    assert np.allclose(found, hits / trials)


def test_old_evidence_fades() -> None:
    rates = Rates(1, 1, 0.5)
    for _ in range(2000):
        rates.learn(np.array([0]), np.array([[False]]))
    for _ in range(700):
        rates.learn(np.array([0]), np.array([[True]]))
    # Without forgetting it would be 700 of 2,700.
    assert 1 - np.exp(rates.log_misses(np.array([0]), 1)[0, 0]) > 0.45


def test_without_rank_all_ranks_share_one_rate() -> None:
    rates = Rates(1, 1, 0.5)
    rates.learn(np.array([0]), np.array([[True, False, False, False]]))
    found = rates.log_misses(np.array([0]), 4)
    assert np.allclose(1 - np.exp(found), 1.5 / 5)


def test_tokens_are_matched_by_request_and_position() -> None:
    one = ForwardRow(7, 2, 0, Phase.DENOISE, 2)
    other = ForwardRow(9, 0, 3, Phase.DENOISE, 3)
    earlier = (one, other)
    later = ForwardContext(
        1,
        3,
        (other, one),
        np.ones(5, dtype=np.float32),
        np.zeros(5, dtype=np.uint8),
        np.array([0, 1, 2, 6, 7]),
    )
    assert row_starts(later) == (0, 6)
    assert match_tokens(earlier, (6, 0), later).tolist() == [3, 4, 0, 1, 2]
    # Another block of the same request, or a request that is gone: nobody.
    assert match_tokens(earlier, (4, 3), later).tolist() == [-1] * 5


# ---- the estimate ----


def kept_and_flipped(estimator: ReuseEstimator, num_forwards: int = 60) -> ForwardContext:
    """Fixed tokens keep experts 0 and 1, masks draw two of 2 to 11 anew each time."""
    random = np.random.default_rng(1)
    for forward_id in range(num_forwards):
        context = context_of(forward_id, [FIXED, FIXED, MASKED, MASKED])
        masks = [random.permutation(np.arange(2, 12))[:2].tolist() for _ in range(2)]
        estimator.observe(demand(context, [[0, 1], [1, 0], *masks]))
    return context


def test_what_tokens_keep_ranks_above_what_they_change() -> None:
    estimator = estimator_of()
    kept_and_flipped(estimator)
    probabilities = estimator.probabilities[0]
    assert probabilities[:2].min() > 0.9 and probabilities[2:].max() < 0.7
    assert ((probabilities > 0) & (probabilities < 1)).all()
    # The other layer has seen nothing yet.
    assert (estimator.probabilities[1] == 0.5).all()


def test_state_tells_new_words_from_old_masks() -> None:
    """A mask keeps its experts until it becomes a word; the most confident one is next."""
    random = np.random.default_rng(3)
    with_state, without = estimator_of(), estimator_of(state=False, confidence=False)
    for block in range(60):
        # Other experts in every block: no expert's own record tells anything.
        experts = random.permutation(12).tolist()
        others = [experts[2:4], experts[4:6]]
        for step in range(2):
            states = [MASKED] * 3 if step == 0 else [FIXED, MASKED, MASKED]
            context = context_of(
                2 * block + step,
                states,
                block_id=block,
                step_id=step + 1,
                confidence=[0.9, 0.5, 0.5] if step == 0 else [1.0, 0.6, 0.5],
            )
            first = experts[0:2] if step == 0 else experts[6:8]
            gaps = []
            for estimator in (with_state, without):
                estimator.observe(demand(context, [first, *others]))
                found = estimator.probabilities[0]
                gaps.append(found[others].min() - found[experts[0:2]].max())
            if step == 0:
                last_gaps = gaps
    with_gap, without_gap = last_gaps
    assert with_gap > 0.2 and with_gap > without_gap + 0.1


def test_after_a_commit_only_the_experts_own_record_counts() -> None:
    """Commit passes want 0 to 3 and are followed by a block that wants 4 to 7."""
    estimator = estimator_of()
    for number in range(30):
        commit = context_of(2 * number, [FIXED] * 4, block_id=number, phase=Phase.COMMIT)
        first = context_of(2 * number + 1, [MASKED] * 4, block_id=number + 1, step_id=0)
        estimator.observe(demand(commit, [[0, 1], [2, 3], [0, 1], [2, 3]]))
        after_commit = estimator.probabilities[0].copy()
        estimator.observe(demand(first, [[4, 5], [6, 7], [4, 5], [6, 7]]))
    assert after_commit[4:8].min() > 0.7 > 0.3 > after_commit[:4].max()


def test_a_prompts_tail_stands_for_its_end() -> None:
    shape = shape_of(1, 12, 1)
    scores = {}
    for prefill in ("tail", "whole"):
        estimator = ReuseEstimator(shape, Ingredients(), prefill=prefill)
        for number in range(20):
            size = 8
            context = ForwardContext(
                2 * number,
                4,
                (ForwardRow(number, 0, 0, Phase.PREFILL, size),),
                np.ones(size, dtype=np.float32),
                np.zeros(size, dtype=np.uint8),
                np.arange(size),
            )
            # Which experts the tail wants changes, and the block that follows wants the same.
            tail = [number % 4, 4 + number % 4]
            ids = [[8], [9], [10], [11], *([i] for i in tail * 2)]
            gates = [[1.0]] * size
            estimator.observe(demand_of(0, context, ids, gates, num_experts=12))
            scores[prefill] = estimator.probabilities[0].copy()
            block = context_of(2 * number + 1, [MASKED] * 4, request_id=number, step_id=0)
            estimator.observe(
                demand_of(0, block, [[i] for i in tail * 2], gates[:4], num_experts=12)
            )
    number = 19
    wanted, others = [number % 4, 4 + number % 4], [8, 9, 10, 11]
    assert scores["tail"][wanted].min() > scores["tail"][others].max()


def test_where_a_word_was_routed_before_is_remembered() -> None:
    """Word 5 goes to experts 8 and 9 whenever a mask becomes it."""
    random = np.random.default_rng(2)
    with_history, without = estimator_of(history=True), estimator_of()
    for block in range(60):
        for step in range(2):
            is_word = step == 1
            context = context_of(
                2 * block + step,
                [FIXED if is_word else MASKED, MASKED],
                block_id=block,
                step_id=step + 1,
                confidence=[1.0 if is_word else 0.9, 0.3],
                token_ids=[5, -1],
            )
            other = random.permutation(8)[:2].tolist()
            first = [8, 9] if is_word else random.permutation(8)[:2].tolist()
            for estimator in (with_history, without):
                estimator.observe(demand(context, [first, other]))
                if step == 0 and block == 59:
                    estimator.snapshot = estimator.probabilities[0].copy()
    # Seen from the last forward before the word: 8 and 9 are expected only by memory of the word.
    before = {name: e.snapshot for name, e in (("with", with_history), ("without", without))}
    assert before["with"][8] > 0.9 and before["with"][9] > 0.9
    assert before["with"][8] >= before["without"][8]


def test_other_tokens_without_positions_are_refused_by_value() -> None:
    with pytest.raises(ConfigError, match="whole, tail"):
        ReuseEstimator(SHAPE, Ingredients(), prefill="head")


def test_who_is_likely_stays_and_who_is_not_goes_by_age() -> None:
    retention = CalibratedRetentionPolicy(estimator_of(), SHAPE.num_layers)
    router = FakeRouter(SHAPE, seed=0)
    for _ in range(3):
        demands = router.forward(1, num_wanted=2)
        for each in demands:
            retention.observe(each)
    estimator, last = retention.estimator, demands[0]
    estimator.probabilities[0] = [0.9, 0.5, 0.04, 0.04, 0.2, *[0.01] * 7]
    estimator._age[0] = [30, 0, 5, 2, 1, *range(6, 13)]
    everyone = np.arange(12)
    order = np.argsort(-retention.keep_scores(everyone, last), kind="stable").tolist()
    assert order == [0, 1, 4, 3, 2, *range(5, 12)]
    # With twice the room of what is wanted, 0.2 is unlikely too, and its age decides.
    retention.resize(np.array([12, 12]))
    estimator._age[0, 4] = 9
    order = np.argsort(-retention.keep_scores(everyone, last), kind="stable").tolist()
    assert order[:4] == [0, 1, 3, 2] and order.index(4) > order.index(5)


def test_over_all_layers_the_next_one_to_run_goes_first() -> None:
    shape = shape_of(4, 6, 2)
    retention = GlobalCalibratedRetentionPolicy(ReuseEstimator(shape, Ingredients()), shape)
    context = FakeRouter(shape, seed=0).context(4, (Phase.DENOISE,))
    for layer in range(4):
        retention.observe(FakeRouter(shape, seed=layer).demand(layer, context))
    retention.estimator.probabilities[:] = 0.5
    order = retention.all_scores(FakeRouter(shape, seed=0).demand(1, context))[:, 0]
    # Layer 2 runs next, then 3, then 0 and 1 of the next forward.
    assert np.argsort(-order).tolist() == [2, 3, 0, 1]


# ---- guesses ----


def test_guesses_are_for_the_next_layers_only_and_likely() -> None:
    shape = shape_of(3, 12, 2)
    prefetch = ReusePrefetchPolicy(shape, depth=2, least_probability=0.6)
    router = FakeRouter(shape, seed=4)
    for forward_id in range(25):
        context = router.context(4, (Phase.DENOISE,))
        assert set((prefetch.predict(context, None) // 12).tolist()) <= {0, 1}
        for layer in range(3):
            each = router.demand(layer, context, num_wanted=6)
            guessed = (prefetch.predict(context, each) // 12).tolist()
            assert set(guessed) <= set(range(layer + 1, min(layer + 3, 3)))
            assert guessed == sorted(guessed), "nearer layers come first"
        if forward_id == 0:
            assert not guessed
    assert prefetch.victim_scores().shape == (3, 12)


def test_guesses_follow_what_has_become_of_tokens() -> None:
    """Words keep their experts; a mask that has become a word does not."""
    prefetch = ReusePrefetchPolicy(SHAPE, least_probability=0.5)
    forward_id = 0
    for block in range(50):
        # Half of the blocks are done in one step, half keep a mask.
        second = [FIXED, MASKED] if block % 2 else [FIXED, FIXED]
        for step, states in enumerate(([MASKED, MASKED], second)):
            context = context_of(forward_id, states, block_id=block, step_id=step)
            prefetch.predict(context, None)
            routes = [
                [0, 1] if state == MASKED else [2 + (block % 5) * 2, 3 + (block % 5) * 2]
                for state in states
            ]
            prefetch.predict(context, demand(context, routes, layer=0))
            forward_id += 1
    context = context_of(forward_id, [MASKED, MASKED], block_id=99, step_id=0)
    prefetch.predict(context, demand(context, [[0, 1], [0, 1]], layer=0))
    # One of the two masks has become a word: its experts are less sure than in a block of masks.
    half = context_of(forward_id + 1, [FIXED, MASKED], block_id=99)
    none = context_of(forward_id + 1, [FIXED, FIXED], block_id=99)
    assert 0 in prefetch.predict(half, None)
    assert 0 not in prefetch.predict(none, None)


# ---- on recorded traces ----


def demo_trace(name: str) -> RoutingTrace:
    return load_trace(TRACES / f"demo-{name}.trace.safetensors")


def run(trace: RoutingTrace, policy: str, capacity: float, **settings: object) -> SimulationReport:
    return simulate(
        trace,
        policy,
        experts_per_layer=capacity,
        hardware=load_hardware("rtx3060-laptop"),
        has_cpu_experts=False,
        **settings,
    )


@pytest.mark.parametrize(
    "name, capacity",
    product(
        ["arithmetic", "code", "facts", "arithmetic-slow", "code-slow", "facts-slow"],
        (16, 28, 42),
    ),
)
def test_misses_no_more_than_oled_on_recorded_traces(name: str, capacity: int) -> None:
    trace = demo_trace(name)
    oled, plus = (run(trace, policy, capacity) for policy in ("oled", "oled+"))
    assert plus.pooled_hit_rate > oled.pooled_hit_rate


def test_guesses_are_mostly_used_and_change_no_hit() -> None:
    trace = demo_trace("code-slow")
    plain = run(trace, "oled+", 28, num_staging=24)
    ahead = run(trace, "oled+prefetch", 28, num_staging=24)
    assert ahead.hit_rate == plain.hit_rate
    assert ahead.ready_rate > plain.ready_rate
    assert ahead.wasted_prefetched_bytes < 0.5 * ahead.prefetched_bytes
    assert ahead.tpot_s < plain.tpot_s


@pytest.mark.parametrize("base", ["naive-lru", "lfu", "priority", "oled", "oled+"])
def test_guesses_combine_with_any_retention(base: str) -> None:
    policy = policy_of(f"{base}:prefetch=reuse,depth=2,least=0.3", SHAPE)
    assert isinstance(policy.prefetch, ReusePrefetchPolicy)
    assert policy_of(base, SHAPE).prefetch is None


def test_an_interrupt_leaves_nothing_half_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator, router = estimator_of(), FakeRouter(SHAPE, seed=5)
    for each in router.forward():
        estimator.observe(each)
    whole = ReuseEstimator._predict

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReuseEstimator, "_predict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        estimator.observe(router.forward()[0])
    monkeypatch.setattr(ReuseEstimator, "_predict", whole)
    for each in router.forward():
        estimator.observe(each)
    assert np.isfinite(estimator.probabilities).all()
