"""Which positions become tokens: thresholds, schedules, filters, and inputs that make no sense."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from oled_moe.config import ALGORITHMS, RANDOM_ALGORITHMS, DecodingParams, SamplingParams
from oled_moe.errors import OledMoeError
from oled_moe.sampling import (
    ConfidenceArray,
    Guesses,
    filtered_probabilities,
    guess,
    sample,
)
from oled_moe.types import IntArray
from oled_moe.unmasking import (
    UNMASKING,
    BlockState,
    BlockUpdate,
    JointThresholdUnmaskingPolicy,
    LowConfidenceUnmaskingPolicy,
    UnmaskingPolicy,
    transfer_schedule,
)

GOLDEN = Path(__file__).parent / "golden" / "decoders"
TABLES = json.loads((GOLDEN / "decoders.json").read_text())
MASK = 7


def params(**values: Any) -> DecodingParams:
    return DecodingParams.resolve(SamplingParams(**{"mask_token_id": MASK} | values))


def state_of(*, masked: str) -> BlockState:
    """`m` is a mask, `.` an accepted token 1, `p` a prompt token 0."""
    ids = np.array([{"m": MASK, ".": 1, "p": 0}[letter] for letter in masked])
    letters = np.array(list(masked))
    return BlockState(ids, letters == "m", letters == "p")


def block_params(algorithm: str, length: int, **values: Any) -> DecodingParams:
    """Parameters of an answer of one block. Control tokens are none that is guessed here."""
    ids = {"delete_token_id": 8, "split_token_id": 9} if algorithm == "levenshtein" else {}
    return params(algorithm=algorithm, block_length=length, max_tokens=length, **ids, **values)


def guesses_of(best_ids: IntArray, confidence: ConfidenceArray) -> Guesses:
    """The less confident, the more entropy."""
    return Guesses(best_ids, confidence, 1 - confidence)


def confident(*values: float) -> ConfidenceArray:
    return np.array(values, dtype=np.float32)


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


# --- golden


@pytest.mark.parametrize("row", TABLES["schedules"], ids=lambda row: f"{row['steps']} steps")
def test_golden_schedules(row: dict[str, Any]) -> None:
    assert transfer_schedule(row["block_length"], row["steps"]) == row["transfer"]


@pytest.mark.parametrize("row", TABLES["filters"], ids=lambda row: row["name"])
def test_golden_filters(row: dict[str, Any]) -> None:
    golden = load_file(GOLDEN / "decoders.safetensors")
    found = filtered_probabilities(
        golden["filter.logits"], temperature=1.0, top_k=row["top_k"], top_p=row["top_p"]
    )
    assert (found > 0).sum(-1).tolist() == row["kept"]
    torch.testing.assert_close(found, golden[f"{row['name']}.probs"], atol=1e-6, rtol=1e-5)


def golden_params(row: dict[str, Any], **values: Any) -> DecodingParams:
    names = ("threshold", "low_threshold", "remask_threshold", "factor", "credit_alpha")
    values |= {name: row[name] for name in names if name in row}
    values |= {"credit_gamma": row.get("boost_gamma"), "credit_beta": row.get("decay_beta")}
    base = {"mask_token_id": 297, "block_length": 16, "max_tokens": 16}
    return params(**base | values)


def updated(
    policy: UnmaskingPolicy, state: BlockState, logits: Tensor, chosen: DecodingParams
) -> BlockUpdate:
    """What a forward with such logits [B, V] makes of a block."""
    is_looked_at = policy.looked_at(state)
    fused = policy.fuse(state, logits[torch.from_numpy(is_looked_at)].clone(), is_looked_at)
    found = guess(fused, chosen, None, entropy_of=policy.entropy_of)
    return policy.update(state, found.spread(is_looked_at))


SINGLE = {
    "fixed count": "low_confidence_static",
    "Fast-dLLM threshold": "threshold",
    "Fast-dLLM factor": "factor",
    "hierarchy_fast_v2": "hierarchy",
    "hierarchy_remasking": "hierarchy_remasking",
}


def golden_block(ids: Tensor) -> BlockState:
    state = BlockState.start([], block_length=len(ids), mask_id=297)
    state.token_ids = ids.numpy().astype(np.int64)
    state.is_masked = state.token_ids == 297
    return state


@pytest.mark.parametrize(
    "row", [row for row in TABLES["decoders"] if "k" not in row], ids=lambda row: row["name"]
)
def test_golden_decoders(row: dict[str, Any]) -> None:
    """Every call of a decoder on one block, credit with its memory of those before."""
    golden, name = load_file(GOLDEN / "decoders.safetensors"), row["name"]
    algorithm = SINGLE.get(row["decoder"], row["decoder"])
    chosen = golden_params(row, algorithm=algorithm)
    policy = UNMASKING[algorithm](chosen)
    if name.startswith("single."):
        calls = [(golden["single.logits"], golden["single.x"])]
        transfer, x0 = golden[f"{name}.transfer"].bool(), golden[f"{name}.x0"]
        after = [torch.where(transfer, x0, golden["single.x"])]
    else:
        befores = golden[f"{name}.block_ids_before"]
        calls = list(zip(golden[f"{name}.logits"], befores, strict=True))
        after = list(golden[f"{name}.block_ids_after"])
    for (logits, before), wanted in zip(calls, after, strict=True):
        state = golden_block(before)
        update = updated(policy, state, logits, chosen)
        assert state.token_ids.tolist() == wanted.tolist()
        assert (state.is_masked == (wanted == 297).numpy()).all()
        assert (update.accepted == ((before == 297) & (wanted != 297)).numpy()).all()
        assert (update.edited == ((before != 297) & (wanted != before)).numpy()).all()


def test_golden_fixed_count() -> None:
    (row,) = (row for row in TABLES["decoders"] if "k" in row)
    golden = load_file(GOLDEN / "decoders.safetensors")
    assert transfer_schedule(16, 6)[0] == row["k"]
    for algorithm in ("low_confidence_static", "low_confidence"):
        chosen = golden_params(row, algorithm=algorithm, steps=6, threshold=1.0)
        state = golden_block(golden["single.x"])
        masked = state.is_masked.copy()
        update = updated(UNMASKING[algorithm](chosen), state, golden["single.logits"], chosen)
        x0 = golden["single.fixed_k3.x0"].numpy()
        accepted = golden["single.fixed_k3.transfer"].numpy().astype(bool)
        assert (update.accepted == accepted).all()
        assert (state.token_ids[accepted] == x0[accepted]).all() and (masked >= accepted).all()


@given(st.integers(1, 200), st.integers(1, 200))
def test_schedule_covers_the_block(block_length: int, steps: int) -> None:
    schedule = transfer_schedule(block_length, steps)
    assert len(schedule) == steps and sum(schedule) == block_length
    assert schedule == sorted(schedule, reverse=True)
    assert schedule[0] - schedule[-1] <= 1


# --- low confidence


def test_threshold_is_strict() -> None:
    policy = LowConfidenceUnmaskingPolicy(params(block_length=4, steps=4, threshold=0.5))
    state = state_of(masked="mmmm")
    update = policy.update(state, Guesses(ids(1, 2, 3, 4), confident(0.5, 0.6, 0.7, 0.5)))
    assert update.accepted.tolist() == [False, True, True, False]
    assert state.token_ids.tolist() == [MASK, 2, 3, MASK]
    # In float32, as the reference compares: 0.95 stored in float32 is not above 0.95.
    policy = LowConfidenceUnmaskingPolicy(params(block_length=4, steps=4, threshold=0.95))
    update = policy.update(
        state_of(masked="mmmm"), Guesses(ids(1, 2, 3, 4), confident(0.95, 0.95, 0, 0.96))
    )
    assert update.accepted.tolist() == [False, False, False, True]


def test_the_best_scheduled_number_where_few_are_confident() -> None:
    policy = LowConfidenceUnmaskingPolicy(params(block_length=6, steps=2, threshold=0.9))
    update = policy.update(
        state_of(masked="pm.mmm"),
        Guesses(ids(*range(6)), confident(0.99, 0.2, 0.99, 0.95, 0.1, 0.3)),
    )
    assert update.accepted.tolist() == [False, True, False, True, False, True]
    assert not update.edited.any()


def test_fewer_masks_than_scheduled() -> None:
    policy = LowConfidenceUnmaskingPolicy(params(block_length=4, steps=1, threshold=0.9))
    state = state_of(masked="p.mm")
    update = policy.update(state, Guesses(ids(5, 5, 5, 5), confident(0.1, 0.1, 0.1, 0.1)))
    assert update.accepted.tolist() == [False, False, True, True]
    assert state.token_ids.tolist() == [0, 1, 5, 5]


def test_tail_of_a_long_schedule_may_accept_nothing() -> None:
    policy = LowConfidenceUnmaskingPolicy(
        params(block_length=2, steps=4, max_tokens=4, threshold=0.9)
    )
    state = state_of(masked="mm")
    state.num_steps = 2
    update = policy.update(state, Guesses(ids(1, 1), confident(0.1, 0.2)))
    assert not update.accepted.any()
    assert policy.wants_forward(state)
    update = policy.update(state, Guesses(ids(1, 1), confident(0.1, 0.95)))
    assert update.accepted.tolist() == [False, True]
    assert not policy.wants_forward(state), "the schedule is over"


# --- joint threshold


def joint(**values: Any) -> JointThresholdUnmaskingPolicy:
    return JointThresholdUnmaskingPolicy(params(algorithm="joint_threshold", **values))


def test_edits_happen_while_masks_remain_and_never_in_the_prompt() -> None:
    policy = joint(threshold=0.5, edit_threshold=0.7, block_length=6)
    state = state_of(masked="p..m.m")
    update = policy.update(
        state, Guesses(ids(5, 5, 5, 5, 1, 5), confident(0.99, 0.9, 0.7, 0.4, 0.99, 0.6))
    )
    # Prompt; edited; threshold is strict; below; the same token already; accepted.
    assert update.edited.tolist() == [False, True, False, False, False, False]
    assert update.accepted.tolist() == [False, False, False, False, False, True]
    assert state.token_ids.tolist() == [0, 5, 1, MASK, 1, 5]
    assert not state.is_settled


def test_best_ones_where_too_few_are_confident() -> None:
    policy = joint(threshold=0.5, num_to_transfer=2, block_length=4)
    update = policy.update(
        state_of(masked="mmmp"), Guesses(ids(1, 2, 3, 4), confident(0.6, 0.1, 0.2, 0.9))
    )
    assert update.accepted.tolist() == [True, False, True, False]
    policy = joint(threshold=0.5, num_to_transfer=9, block_length=4)
    update = policy.update(
        state_of(masked="mm.p"), Guesses(ids(1, 2, 1, 4), confident(0.1, 0.1, 0.9, 0.9))
    )
    assert update.accepted.tolist() == [True, True, False, False]


def test_settled_only_when_nothing_was_masked_or_edited() -> None:
    policy = joint(edit_threshold=0.5, block_length=2)
    state = state_of(masked="m.")
    policy.update(state, Guesses(ids(1, 1), confident(0.9, 0.9)))
    assert not state.is_settled, "there was a mask before"
    policy.update(state, Guesses(ids(2, 1), confident(0.9, 0.9)))
    assert not state.is_settled, "there was an edit"
    policy.update(state, Guesses(ids(3, 1), confident(0.4, 0.9)))
    assert state.is_settled and not policy.wants_forward(state)


@pytest.mark.parametrize("limit", [0, 1, 4, 16])
def test_oscillation_ends_after_the_post_steps(limit: int) -> None:
    policy = joint(edit_threshold=0.0, max_post_edit_steps=limit, block_length=2)
    state, num_forwards = state_of(masked=".."), 0
    while policy.wants_forward(state):
        token = 2 + num_forwards % 2
        policy.update(state, Guesses(ids(token, token), confident(0.9, 0.9)))
        num_forwards += 1
    assert num_forwards == limit
    assert not state.is_settled


# --- every policy


def run(policy: UnmaskingPolicy, state: BlockState, confidence: ConfidenceArray, limit: int) -> int:
    """Forwards until the block is done, the same confidence each time."""
    num_forwards = 0
    while policy.wants_forward(state):
        policy.update(state, guesses_of(np.arange(len(confidence)) % MASK, confidence))
        num_forwards += 1
        assert num_forwards <= limit, "the loop does not end"
    return num_forwards


FLOATS = st.floats(0, 1, width=32) | st.just(math.nan)


@bounded(150)
@given(
    algorithm=st.sampled_from(sorted(UNMASKING)),
    confidence=st.lists(FLOATS, min_size=1, max_size=9),
    num_prompt=st.integers(0, 8),
    steps=st.integers(1, 20),
    threshold=st.floats(0, 1),
    num_to_transfer=st.integers(1, 12),
)
def test_every_block_ends_without_masks_and_with_its_prompt(
    algorithm: str,
    confidence: list[float],
    num_prompt: int,
    steps: int,
    threshold: float,
    num_to_transfer: int,
) -> None:
    length = len(confidence)
    prompt = [MASK] * min(num_prompt, length - 1)
    chosen = block_params(
        algorithm, length, steps=steps, threshold=threshold, num_to_transfer=num_to_transfer
    )
    state = BlockState.start(prompt, block_length=length, mask_id=MASK)
    run(UNMASKING[algorithm](chosen), state, np.array(confidence, np.float32), 2 * length + 20)
    assert not state.is_masked.any()
    assert state.token_ids[: len(prompt)].tolist() == prompt
    assert MASK not in state.token_ids[len(prompt) :]


@bounded(100)
@given(
    letters=st.text("m.p", min_size=1, max_size=10),
    seed=st.integers(0, 2**31),
    threshold=st.floats(0, 1),
    algorithm=st.sampled_from(sorted(UNMASKING)),
)
def test_updates_tell_exactly_what_changed(
    letters: str, seed: int, threshold: float, algorithm: str
) -> None:
    random = np.random.default_rng(seed)
    state = state_of(masked=letters)
    before, masked = state.token_ids.copy(), state.is_masked.copy()
    policy = UNMASKING[algorithm](
        block_params(algorithm, len(letters), threshold=threshold, edit_threshold=threshold)
    )
    best = random.integers(0, MASK, len(letters))
    update = policy.update(state, guesses_of(best, random.random(len(letters), dtype=np.float32)))
    changed = update.accepted | update.edited
    assert not (update.accepted & update.edited).any()
    assert not (changed & state.is_prompt).any()
    assert (update.accepted <= masked).all() and not (update.edited & masked).any()
    is_remasked = update.edited & (state.token_ids == MASK)
    assert algorithm == "hierarchy_remasking" or not is_remasked.any()
    wanted = np.where(is_remasked, MASK, np.where(changed, best, before))
    assert (state.token_ids == wanted).all()
    assert (state.is_masked == (masked & ~update.accepted | is_remasked)).all()
    is_waiting = algorithm == "lowest_entropy" or not masked.any()
    assert is_waiting or state.is_masked.sum() < masked.sum(), "a step with masks makes progress"


@bounded(100)
@given(
    letters=st.text("m.p", min_size=1, max_size=10),
    seed=st.integers(0, 2**31),
    threshold=st.floats(0, 1),
    algorithm=st.sampled_from(sorted(UNMASKING)),
)
def test_updates_look_only_where_they_say(
    letters: str, seed: int, threshold: float, algorithm: str
) -> None:
    random = np.random.default_rng(seed)
    states = [state_of(masked=letters) for _ in range(2)]
    chosen = block_params(algorithm, len(letters), threshold=threshold, edit_threshold=threshold)
    policies = [UNMASKING[algorithm](chosen) for _ in range(2)]
    best = random.integers(0, MASK, len(letters))
    confidence = random.random(len(letters), dtype=np.float32)
    is_seen = policies[1].looked_at(states[1])
    assert not (is_seen & states[1].is_prompt).any() and (is_seen >= states[1].is_masked).all()
    whole = policies[0].update(states[0], guesses_of(best, confidence))
    part = policies[1].update(
        states[1],
        guesses_of(np.where(is_seen, best, -1), np.where(is_seen, confidence, np.float32(np.nan))),
    )
    assert (part.accepted == whole.accepted).all() and (part.edited == whole.edited).all()
    assert (states[0].token_ids == states[1].token_ids).all()
    assert states[0].is_settled == states[1].is_settled


def test_a_block_starts_with_its_prompt() -> None:
    state = BlockState.start([3, MASK], block_length=4, mask_id=MASK)
    assert state.token_ids.tolist() == [3, MASK, MASK, MASK]
    assert state.is_prompt.tolist() == [True, True, False, False]
    assert state.is_masked.tolist() == [False, False, True, True]
    assert state.is_masked.sum() == 2


# --- sampling


def test_greedy_is_argmax_without_the_mask_and_confidence_with_it() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 5.0], [0.0, 0.0, 4.0, -9.0]])
    expected = logits.softmax(-1)
    best_ids, confidence = sample(logits.clone(), params(mask_token_id=3), None)
    assert best_ids.tolist() == [1, 2] and best_ids.dtype == np.int64
    assert confidence.dtype == np.float32
    assert confidence == pytest.approx(expected[[0, 1], [1, 2]].numpy(), rel=1e-5)


def test_what_a_confidence_is_a_probability_of() -> None:
    """The likeliest token and a drawn one, under each of the distributions; never the mask."""
    logits = torch.tensor([[2.0, 1.0, 0.0, 3.0]])
    raw, tempered = logits.softmax(-1)[0], (logits / 0.5).softmax(-1)[0]
    settings = {"mask_token_id": 3, "temperature": 0.5, "top_k": 2}
    for kind, shares in (("raw", raw), ("tempered", tempered)):
        for greedy, draw, token in ((True, None, 0), (False, 0.99, 1)):
            chosen = params(**settings, confidence=kind, greedy=greedy)
            draws = None if draw is None else np.array([draw])
            found = guess(logits.clone(), chosen, draws)
            assert found.token_ids.tolist() == [token] and found.entropy is None
            assert found.confidence == pytest.approx([float(shares[token])], rel=1e-5)
    # Of the two likeliest of all four; drawn from the two that are not the mask.
    best = guess(logits.clone(), params(**settings, greedy=True), None)
    assert best.confidence == pytest.approx([1 / (1 + math.e**2)], rel=1e-5)
    drawn = guess(logits.clone(), params(**settings), np.array([0.0]))
    assert drawn.confidence == pytest.approx([1 / (1 + math.e**-2)], rel=1e-5)


def test_entropy_of_a_distribution_with_zeros_is_a_number() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -50.0]])
    chosen = params(mask_token_id=3, temperature=1.0, top_k=2, greedy=True)
    found = guess(logits.clone(), chosen, None, entropy_of="filtered")
    share = 1 / (1 + math.exp(-1))
    expected = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert found.entropy == pytest.approx([expected], rel=1e-5)
    whole = guess(logits.clone(), chosen, None, entropy_of="tempered").entropy
    assert whole is not None and whole[0] > expected
    assert guess(logits.clone(), params(mask_token_id=3), None, entropy_of="raw").entropy == whole


def test_greedy_at_temperature_1_is_greedy() -> None:
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(4))
    plain = guess(logits.clone(), params(), None)
    for values in ({}, {"confidence": "raw", "top_k": 3}, {"confidence": "tempered", "top_p": 0.2}):
        found = guess(logits.clone(), params(temperature=1.0, greedy=True, **values), None)
        assert (found.token_ids == plain.token_ids).all()
        assert found.confidence == pytest.approx(plain.confidence, rel=1e-6)


@pytest.mark.parametrize("mask_id", [0, 3])
@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, 0.0, 0.0],
        [9.0, -9.0, -9.0, 9.0],
        [3e38, -3e38, 3e38, 3e38],
    ],
    ids=str,
)
def test_any_logits_give_a_token_that_is_not_the_mask(mask_id: int, row: list[float]) -> None:
    for temperature in (0.0, 1e-320, 1e-46, 1e-30, 1.0, 1e30, 1.7e308):
        for filters in ({}, {"top_k": 1}, {"top_k": 99}, {"top_p": 0}, {"top_p": 1}):
            chosen = params(mask_token_id=mask_id, temperature=temperature, **filters)
            best_ids, confidence = sample(torch.tensor([row, row]), chosen, np.array([0.2, 0.9]))
            assert ((best_ids >= 0) & (best_ids < 4) & (best_ids != mask_id)).all()
            assert ((confidence >= 0) & (confidence <= 1.001)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "row",
    [
        [math.nan] * 4,
        [1.0, math.nan, 2.0, 9.0],
        [math.inf, 1.0, 2.0, 3.0],
        [math.inf] * 4,
        [-math.inf] * 4,
        [0.0, -math.inf, 1.0, 2.0],
        [math.nan, math.inf, -math.inf, 1.0],
    ],
    ids=str,
)
def test_logits_that_are_not_finite_are_an_error(row: list[float], temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], row])
    with pytest.raises(OledMoeError, match="not finite"):
        sample(logits, params(temperature=temperature, mask_token_id=3), np.zeros(2))


def test_tiny_temperature_is_argmax() -> None:
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    greedy, _ = sample(logits.clone(), params(), None)
    for temperature in (1e-30, 1e-46, 5e-324):
        draws = np.random.default_rng(0).random(20)
        drawn, confidence = sample(logits.clone(), params(temperature=temperature), draws)
        assert (drawn == greedy).all() and (confidence == 1).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_depends_on_its_logits_and_its_draw_alone(temperature: float) -> None:
    """Whatever other rows are looked at, and in how many slices."""
    chosen = params(temperature=temperature, top_p=0.9)
    logits = 3 * torch.randn(9, 500, generator=torch.Generator().manual_seed(1))
    draws = np.random.default_rng(2).random(9)
    whole_ids, whole = sample(logits.clone(), chosen, draws)
    for rows in ([0], [8, 3], [1, 2, 4, 7], list(range(9))):
        ids, confidence = sample(logits[rows].clone(), chosen, draws[rows])
        assert (ids == whole_ids[rows]).all()
        assert confidence == pytest.approx(whole[rows], rel=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_slices_of_rows_come_together_in_order(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = params(temperature=temperature)
    logits = 3 * torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    draws = np.random.default_rng(2).random(7)
    whole_ids, whole = sample(logits.clone(), chosen, draws)
    for size in (1, 80, 121):
        monkeypatch.setattr("oled_moe.sampling.SAMPLING_SLICE", size)
        ids, confidence = sample(logits.clone(), chosen, draws)
        assert (ids == whole_ids).all()
        assert confidence == pytest.approx(whole, rel=1e-6)


def test_draws_at_the_ends_find_tokens_that_have_a_probability() -> None:
    # Probabilities 0, 0.25, 0, 0.75, 0, and nothing behind: rounding or not, never a zero.
    logits = torch.tensor([[-1e9, 0.0, -1e9, math.log(3.0), -1e9, -1e9, -1e9, 5.0]])
    chosen = params(temperature=1.0)
    for draw, expected in ((0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 2**-53, 3), (1.0, 3)):
        ids, confidence = sample(logits.clone(), chosen, np.array([draw]))
        assert ids.tolist() == [expected]
        assert confidence == pytest.approx([0.25 if expected == 1 else 0.75], rel=1e-6)


def expected_probabilities(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> list[float]:
    """The filters of models.md 4 in plain Python, one row."""
    scaled = [logit / temperature for logit in logits]
    kept = set(range(len(logits)))
    if top_k is not None:
        least = sorted(scaled, reverse=True)[min(top_k, len(scaled)) - 1]
        kept = {i for i in kept if scaled[i] >= least}
    if top_p is not None:
        total = sum(math.exp(scaled[i]) for i in kept)
        before, survivors = 0.0, set()
        for i in sorted(kept, key=lambda i: -scaled[i]):
            if not survivors or before <= top_p:
                survivors.add(i)
            before += math.exp(scaled[i]) / total
        kept = survivors
    total = sum(math.exp(scaled[i]) for i in kept)
    return [math.exp(scaled[i]) / total if i in kept else 0.0 for i in range(len(logits))]


@bounded(150)
@given(
    order=st.permutations(range(8)),
    temperature=st.floats(0.3, 3),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.none() | st.sampled_from([0.0, 0.05, 0.31, 0.5, 0.77, 0.93, 1.0]),
)
def test_filters_equal_plain_python(
    order: list[int], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = [0.37 * rank + 0.01 * rank**2 for rank in order]
    found = filtered_probabilities(
        torch.tensor([logits]), temperature=temperature, top_k=top_k, top_p=top_p
    )
    expected = expected_probabilities(logits, temperature, top_k, top_p)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_top_k_keeps_ties() -> None:
    found = filtered_probabilities(
        torch.tensor([[2.0, 1.0, 1.0, 0.0]]), temperature=1.0, top_k=2, top_p=None
    )
    assert (found[0] > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8}])
def test_drawn_tokens_follow_the_filtered_distribution(filters: dict[str, Any]) -> None:
    logits = [0.5, 2.0, 1.2, -0.3, 1.7, 9.0]
    mask_id, num_draws = 5, 20000
    expected = expected_probabilities(logits[:5], 0.8, filters.get("top_k"), filters.get("top_p"))
    drawn, confidence = sample(
        torch.tensor([logits]).expand(num_draws, -1).clone(),
        params(mask_token_id=mask_id, temperature=0.8, **filters),
        np.random.default_rng(3).random(num_draws),
    )
    shares = np.bincount(drawn, minlength=6) / num_draws
    assert shares[mask_id] == 0
    # Four standard deviations of a share of 20000 draws are at most 0.0142.
    assert shares[:5] == pytest.approx(np.array(expected), abs=0.0142)
    assert (shares[:5][np.array(expected) == 0] == 0).all()
    assert confidence == pytest.approx(np.array(expected)[drawn], rel=1e-4)


# --- what an algorithm looks at

FIELDS: dict[str, Any] = {
    "threshold": 0.5,
    "edit_threshold": 0.5,
    "max_post_edit_steps": 3,
    "num_to_transfer": 2,
    "steps": 4,
    "low_threshold": 0.2,
    "remask_threshold": 0.2,
    "factor": 2.0,
    "credit_alpha": 1.0,
    "credit_gamma": 0.5,
    "credit_beta": 0.5,
    "eb_threshold": 0.2,
    "eb_gamma": 0.2,
}


class Watched:
    """Parameters that note which of them are read."""

    def __init__(self, values: DecodingParams) -> None:
        self.seen: set[str] = set()
        self._values = values

    def __getattr__(self, name: str) -> Any:
        self.seen.add(name)
        # Most steps are made of these.
        if name == "max_steps" and self._values.algorithm == "levenshtein":
            self.seen.update(("steps", "max_post_edit_steps"))
        return getattr(self._values, name)


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a not in RANDOM_ALGORITHMS])
def test_what_a_rule_looks_at_is_what_it_is_said_to(algorithm: str) -> None:
    """Neither is a field refused that a rule reads, nor one taken that it does not."""
    watched = Watched(
        block_params(algorithm, 8)
        if algorithm != "lowest_entropy"
        else params(algorithm=algorithm, max_tokens=8)
    )
    UNMASKING[algorithm](watched)  # type: ignore[arg-type]  # it is read as they are
    ignored = SamplingParams(**FIELDS).not_looked_at_by(algorithm)
    assert set(FIELDS) - set(ignored) == watched.seen & set(FIELDS)
    kept = SamplingParams(**FIELDS).looked_at_by(algorithm)
    assert not kept.not_looked_at_by(algorithm)
    assert all(getattr(kept, name) == FIELDS[name] for name in set(FIELDS) - set(ignored))
