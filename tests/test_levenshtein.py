"""Deleting and inserting in a block: LLaDA2.2's loop against one written straight from its
description, and what must hold whatever a model says."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import bounded
from hypothesis import given
from hypothesis import strategies as st
from test_decoding import Script, chaotic, peaked, run

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.config import DecodingParams, Grammar
from oled_moe.costs import DEFAULT_PROFILE
from oled_moe.decoding import FRESH_CONFIDENCE
from oled_moe.edits import NEW, edit_sources, moved
from oled_moe.engine import StepEvent
from oled_moe.errors import ConfigError
from oled_moe.sampling import Guesses
from oled_moe.scheduler import Scheduler
from oled_moe.types import Phase, TokenState
from oled_moe.unmasking import BlockState, LevenshteinUnmaskingPolicy

# As test_decoding has them; the two before are ordinary tokens there and control tokens here.
MASK, EOS, DELETE, SPLIT = 11, 10, 8, 9
GOLDEN = Path(__file__).parent / "golden" / "llada2_a"


def params(**values: Any) -> DecodingParams:
    base: dict[str, Any] = {
        "algorithm": "levenshtein",
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "delete_token_id": DELETE,
        "split_token_id": SPLIT,
        "block_length": 4,
        "max_tokens": 8,
        "threshold": 0.5,
        "edit_threshold": 0.0,
    }
    return DecodingParams.resolve(SamplingParams(**base | values))


# --- where everything goes


@pytest.mark.parametrize(
    ("written", "num_prompt", "sources"),
    [
        ([1, 2, 3, 4], 0, [0, 1, 2, 3]),
        ([1, DELETE, 3, 4], 0, [0, 2, 3, NEW]),
        ([1, SPLIT, 3, 4], 0, [0, NEW, 1, 2]),
        ([DELETE] * 4, 0, [NEW] * 4),
        ([SPLIT] * 4, 0, [NEW, 0, NEW, 1]),
        # The prompt's own tokens mean nothing.
        ([DELETE, SPLIT, 3, 4], 2, [0, 1, 2, 3]),
        ([DELETE, SPLIT, DELETE, 4], 2, [0, 1, 3, NEW]),
        ([DELETE, SPLIT, SPLIT, 4], 2, [0, 1, NEW, 2]),
        # What one gives the other takes.
        ([DELETE, SPLIT, 3, 4], 0, [NEW, 1, 2, 3]),
        ([SPLIT, 2, 3, DELETE], 0, [NEW, 0, 1, 2]),
        # The vectors of the pull request's unit tests (SGLang 31773).
        ([1, 2, 3, DELETE, SPLIT, 6, 7, 7], 2, [0, 1, 2, NEW, 4, 5, 6, 7]),
        ([1, 2, SPLIT, SPLIT, SPLIT, SPLIT], 2, [0, 1, NEW, 2, NEW, 3]),
        ([3, SPLIT, DELETE, 7, 6], 1, [0, NEW, 1, 3, 4]),
    ],
)
def test_sources_of_an_edit(written: list[int], num_prompt: int, sources: list[int]) -> None:
    is_prompt = np.arange(len(written)) < num_prompt
    found = edit_sources(np.array(written), is_prompt, delete_id=DELETE, split_id=SPLIT)
    assert found.tolist() == sources
    values = np.arange(len(written)) * 10
    assert moved(values, found, -5).tolist() == [-5 if s == NEW else 10 * s for s in sources]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 12))
def test_an_edit_keeps_length_order_and_prompt(written: list[int], num_prompt: int) -> None:
    is_prompt = np.arange(len(written)) < num_prompt
    sources = edit_sources(np.array(written), is_prompt, delete_id=DELETE, split_id=SPLIT)
    kept = [s for s in sources if s != NEW]
    assert len(sources) == len(written) and kept == sorted(set(kept))
    assert kept[: min(num_prompt, len(written))] == list(range(min(num_prompt, len(written))))
    free = [i for i in range(len(written)) if i >= num_prompt]
    deleted = [i for i in free if written[i] == DELETE]
    assert not set(kept) & set(deleted)
    # Nothing but the end of the block falls off.
    lost = sorted(set(range(len(written))) - set(kept) - set(deleted))
    assert all(i > max(kept, default=-1) for i in lost)


@given(st.integers(1, 10), st.data())
def test_deleting_what_was_inserted_undoes_it(length: int, data: Any) -> None:
    """But for what fell off at the end."""
    place = data.draw(st.integers(0, length - 1))
    is_prompt = np.zeros(length, dtype=np.bool_)
    values = np.arange(100, 100 + length)
    ids = np.zeros(length, dtype=np.int64)
    ids[place] = SPLIT
    first = edit_sources(ids, is_prompt, delete_id=DELETE, split_id=SPLIT)
    opened = moved(values, first, MASK)
    assert opened[place] == MASK
    ids[place] = DELETE
    again = moved(opened, edit_sources(ids, is_prompt, delete_id=DELETE, split_id=SPLIT), MASK)
    assert again.tolist() == [*values[:-1].tolist(), MASK]


# --- the loop, straight from its description


def reference(script: Script, prompt: list[int], chosen: DecodingParams) -> tuple[list[int], int]:
    """The description's loop over plain lists: a whole canvas each time, no cache."""
    length, num_forwards = chosen.block_length, 0
    num_blocks = -(-(len(prompt) + chosen.max_tokens) // length)
    done = prompt[: len(prompt) // length * length]
    for block in range(len(prompt) // length, num_blocks):
        fixed = prompt[block * length : (block + 1) * length]
        # Of each position: id, whether a mask, whether one that the block began with.
        now = [(t, False, False) for t in fixed] + [(MASK, True, True)] * (length - len(fixed))
        num_own = length - len(fixed)
        schedule = [num_own // chosen.steps + (t < num_own % chosen.steps) for t in range(1000)]
        history: list[list[int]] = []
        post = step = 0
        while True:
            logits = script(done + [t for t, _, _ in now], length).clone()
            num_forwards += 1
            shares = logits.softmax(-1)
            order = [
                [i for i in row.argsort(descending=True).tolist() if i != MASK] for row in logits
            ]
            best = [row[0] for row in order]
            sure = [float(shares[i, best[i]]) for i in range(length)]
            free = range(len(fixed), length)
            masks = [i for i in free if now[i][1]]
            own = [i for i in masks if now[i][2]]
            post = 0 if own else post + 1
            need = schedule[step] + len(masks) - len(own)
            taken = [i for i in masks if sure[i] > np.float32(chosen.threshold)]
            if step >= chosen.steps:
                taken = masks
            elif len(taken) < need:
                taken = sorted(masks, key=lambda i: -sure[i])[:need]
            if chosen.max_post_edit_steps:
                is_last = post >= chosen.max_post_edit_steps
            else:
                is_last = not set(own) - set(taken)
            is_last = is_last or step >= chosen.steps + chosen.max_post_edit_steps - 1
            if is_last:
                taken = masks
            changed = [
                i
                for i in free
                if not now[i][1] and sure[i] > chosen.edit_threshold and best[i] != now[i][0]
            ]
            write = {i: best[i] for i in [*taken, *changed]}
            if is_last:
                write = {
                    i: next(t for t in order[i] if t not in (DELETE, SPLIT)) for i in write
                } | {i: t for i, t in write.items() if t not in (DELETE, SPLIT)}
            else:
                whole = [write.get(i, now[i][0]) for i in range(length)]
                places = [i for i in write if write[i] != now[i][0]]
                if whole in history and places:
                    place = min(sorted(places), key=lambda i: sure[i])
                    write[place] = next(t for t in order[place] if t != write[place])
                    whole[place] = write[place]
                history.append(whole)
            is_same = not masks and all(now[i][0] == t for i, t in write.items())
            after: list[tuple[int, bool, bool]] = []
            for i, (token, is_mask, is_own) in enumerate(now):
                if write.get(i) == DELETE:
                    continue
                if write.get(i) == SPLIT:
                    after += [(MASK, True, False), (token, is_mask, is_own)]
                elif i in write:
                    after.append((write[i], False, is_own))
                else:
                    after.append((token, is_mask, is_own))
            now = (after + [(MASK, True, False)] * length)[:length]
            step += 1
            if is_last or is_same:
                break
        done += [t for t, _, _ in now]
    answer = done[len(prompt) :][: chosen.max_tokens]
    return answer[: answer.index(EOS) + 1] if EOS in answer else answer, num_forwards


CASES = {
    "seed": st.integers(0, 2**31),
    "scale": st.sampled_from([0.5, 3.0, 8.0]),
    "num_prompt": st.integers(0, 9),
    "length": st.integers(2, 6),
    "steps": st.integers(1, 8),
    "post": st.sampled_from([0, 1, 2, 7]),
    "threshold": st.sampled_from([0.2, 0.5, 0.9]),
    "edit_threshold": st.sampled_from([0.0, 0.3, 0.8]),
}


@bounded(80)
@given(**CASES)
def test_the_loop_is_the_described_one(seed: int, **case: Any) -> None:
    script, prompt, chosen = case_of(seed, **case)
    found = run(script, prompt, chosen)
    answer, num_forwards = reference(script, list(prompt), chosen)
    assert found.answer == answer
    assert found.counters.num_denoise_forwards == num_forwards


def case_of(
    seed: int, *, scale: float, num_prompt: int, length: int, post: int, **values: Any
) -> tuple[Script, list[int], DecodingParams]:
    # Control tokens and the mask are among a prompt's tokens too, where they mean nothing.
    prompt = np.random.default_rng(seed).integers(0, 12, num_prompt).tolist()
    chosen = params(
        block_length=length, max_post_edit_steps=post, max_tokens=2 * length + 1, **values
    )
    return chaotic(seed, scale), prompt, chosen


@bounded(40)
@given(**CASES)
def test_what_holds_at_every_step(seed: int, **case: Any) -> None:
    """Length, prompt, an end, no control token that anybody sees, and events that tell all."""
    script, prompt, chosen = case_of(seed, **case)
    found = run(script, prompt, chosen)
    assert not {DELETE, SPLIT, MASK} & set(found.answer)
    length, block_id, shown = chosen.block_length, -1, [(0, False)]
    num_steps = 0
    outcomes = [o for o in found.outcomes if o.context.rows[-1].phase is Phase.DENOISE]
    for step, outcome in zip(found.steps, outcomes, strict=True):
        if step.block_id != block_id:
            block_id, num_steps = step.block_id, 0
            fixed = prompt[block_id * length : (block_id + 1) * length]
            shown = [(t, False) for t in fixed] + [(MASK, True)] * (length - len(fixed))
        num_steps += 1
        assert num_steps <= chosen.max_steps
        before = list(shown)
        for change in step.changes:
            place = change.position - step.block_start
            assert place >= len(fixed) and change.from_id == shown[place][0]
            assert change.confidence == change.confidence
            shown[place] = (change.to_id, step.is_masked[place])
        assert shown == list(zip(step.token_ids, step.is_masked, strict=True))
        assert not {DELETE, SPLIT} & set(step.token_ids[len(fixed) :])
        # Nothing of the block at work is called final.
        num_before = max(0, step.block_start - len(prompt))
        assert step.is_block_done or len(step.answer_ids) <= num_before
        # The forward was of the block as it stood.
        ids = outcome.context.token_ids
        assert ids is not None
        states = outcome.context.token_state[-length:]
        assert [bool(state == TokenState.MASKED) for state in states] == [m for _, m in before]
        assert not outcome.token_accepted[-length:][[not m for _, m in before]].any()


def test_what_is_known_of_tokens_moves_with_them() -> None:
    """Layer-time confidences and guesses after a deletion and an insertion."""
    likely = [(1, 0.9), (DELETE, 0.8), (2, 0.7), (SPLIT, 0.6), (3, 0.3), (4, 0.2)]

    def script(seen: list[int], block_length: int) -> torch.Tensor:
        return peaked(likely if seen == [MASK] * 6 else [(t, 0.95) for t in (1, 2, 5, 6, 3, 4)])

    found = run(script, [], params(block_length=6, max_tokens=6))
    first = found.steps[0]
    # 1, DELETE, 2, SPLIT and two masks: the mask that was to be split stays one.
    assert first.token_ids == (1, 2, MASK, MASK, MASK, MASK)
    context = found.model.forwards[1].context
    assert context.token_confidence.tolist() == pytest.approx([1, 1, 0.5, 0.6, 0.3, 0.2])
    assert context.token_ids is not None
    assert context.token_ids.tolist() == [1, 2, -1, SPLIT, 3, 4]
    assert FRESH_CONFIDENCE == 0.5
    # The outcome is of the forward, whose positions had not moved.
    assert found.outcomes[0].token_accepted.tolist() == [True, False, True, False, False, False]
    assert found.outcomes[0].token_confidence[1] == pytest.approx(0.8)
    assert found.steps[-1].answer_probabilities[0] == pytest.approx(0.9)
    assert found.answer == [1, 2, 5, 6, 3, 4]


def test_a_cycle_is_left_by_the_next_best_token_where_the_model_is_least_sure() -> None:
    policy = LevenshteinUnmaskingPolicy(params(block_length=2, max_post_edit_steps=9))
    state = BlockState(np.array([1, 1]), np.zeros(2, np.bool_), np.zeros(2, np.bool_))
    logits = torch.zeros(2, 12)
    logits[0, [MASK, 2, 3, 1]] = torch.tensor([9.0, 6, 5, 4])
    for token, wanted in ((2, [2, 1]), (1, [1, 1]), (2, [3, 1])):
        policy.fuse(state, logits, policy.looked_at(state))
        policy.update(state, Guesses(np.array([token, 1]), np.array([0.4, 0.9], np.float32)))
        # The third would repeat the first.
        assert state.token_ids.tolist() == wanted
        assert policy.wants_forward(state)


def test_the_last_step_fills_every_mask_and_obeys_nothing() -> None:
    policy = LevenshteinUnmaskingPolicy(params(block_length=3, max_post_edit_steps=0, steps=1))
    state = BlockState.start([], block_length=3, mask_id=MASK)
    logits = torch.zeros(3, 12)
    logits[:, DELETE], logits[:, SPLIT], logits[:, 5], logits[:, MASK] = 9, 8, 7, 10
    policy.fuse(state, logits, policy.looked_at(state))
    update = policy.update(state, Guesses(np.array([DELETE] * 3), np.full(3, 0.1, np.float32)))
    assert state.token_ids.tolist() == [5, 5, 5] and update.accepted.all()
    assert update.sources is None and not policy.wants_forward(state)


# --- parameters and engines


def test_algorithms_that_do_not_obey_control_tokens_never_choose_them() -> None:
    for algorithm in ("joint_threshold", "low_confidence", "credit", "hierarchy_remasking"):
        for temperature in (0.0, 0.8):
            values = {"algorithm": algorithm, "temperature": temperature}
            found = run(chaotic(3, 9.0), [], params(**values, ignore_eos=True, max_tokens=40))
            assert len(found.answer) == 40 and not {DELETE, SPLIT} & set(found.answer)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"delete_token_id": None}, "levenshtein needs delete_token_id and split_token_id"),
        ({"split_token_id": DELETE}, "token 8 is given as delete_token_id or split_token_id and"),
        ({"delete_token_id": MASK}, "token 11 is given as"),
        ({"stop_token_ids": [9]}, "token 9 is given as"),
        (
            {"grammar": Grammar("json_object")},
            "the JSON object cannot hold while tokens",
        ),
    ],
)
def test_parameters_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        params(**values)


def test_reference_arguments() -> None:
    args = {"delete_token_id": 290, "split_token_id": 291, "gen_length": 64}
    found = SamplingParams.from_reference("llada2_moe", args)
    assert (found.algorithm, found.threshold, found.edit_threshold) == ("levenshtein", 0.5, 0.0)
    assert (found.steps, found.max_post_edit_steps, found.split_token_id) == (32, 16, 291)
    capped = SamplingParams.from_reference("llada2_moe", {"max_steps_per_block": 48})
    assert capped.algorithm == "levenshtein"
    with pytest.raises(ConfigError, match="max_steps_per_block is 47; allowed: 48 or more"):
        SamplingParams.from_reference("llada2_moe", {"max_steps_per_block": 47})


def checkpoint(directory: Path, **fields: Any) -> Path:
    """The golden model with more in its config.json."""
    shutil.copytree(GOLDEN, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))
    return directory


def opened(path: Path) -> Engine:
    settings = EngineConfig(
        experts_per_layer=12, threads=1, hardware=DEFAULT_PROFILE, max_num_seqs=4
    )
    return Engine(path, settings)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("edits") / "model"
    # Tokens that this model's random weights like well.
    with opened(checkpoint(path, delete_token_id=120, split_token_id=7)) as found:
        yield found


PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [120, 7, 8], [2] * 9)
BASE = SamplingParams(max_tokens=10, block_length=6, max_post_edit_steps=4, ignore_eos=True)


def written(event: StepEvent) -> list[tuple[int, int, int]]:
    return [(change.position, change.from_id, change.to_id) for change in event.changes]


def answers(engine: Engine, **values: Any) -> list[list[StepEvent]]:
    return [list(engine.stream(prompt, replace(BASE, **values))) for prompt in PROMPTS]


def test_what_others_never_choose_is_their_own_affair() -> None:
    """Control tokens are a request's own: who shares its forwards may have them in the answer."""
    prompt, params = [5] * 7, SamplingParams(max_tokens=9, block_length=8)
    with opened(GOLDEN) as engine:
        alone = engine.generate(prompt, params).token_ids
        other = replace(params, delete_token_id=alone[0])
        running = [engine.begin(engine.check(prompt, each)) for each in (other, params)]
        last: list[StepEvent] = []
        while not last or last[1].result is None:
            last = engine.denoise(running)
        for each in running:
            engine.end(each)
        assert last[1].result.token_ids == alone
        assert alone[0] not in last[0].answer_ids


def test_a_checkpoint_that_declares_them_is_edited_by_default(engine: Engine) -> None:
    chosen = engine.check([1]).params
    assert (chosen.algorithm, chosen.threshold, chosen.edit_threshold) == ("levenshtein", 0.5, 0)
    assert (chosen.delete_token_id, chosen.split_token_id) == (120, 7)
    num_holes = 0
    for events in answers(engine):
        result = events[-1].result
        assert result is not None and len(result.token_ids) == 10
        assert not {120, 7, 297} & set(result.token_ids)
        for event in events:
            num_holes += sum(change.to_id == 297 for change in event.changes)
    assert num_holes, "this model deletes and inserts"
    plain = engine.check([1], SamplingParams(algorithm="joint_threshold")).params
    assert plain.threshold == 0.5
    with pytest.raises(ConfigError, match="control token id is 999; allowed"):
        engine.check([1], SamplingParams(delete_token_id=999))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_seeds_decide_everything_alone_and_in_company(engine: Engine, temperature: float) -> None:
    wanted = answers(engine, temperature=temperature, seed=5)
    again = answers(engine, temperature=temperature, seed=5)
    last = [events[-1].result for events in wanted]
    assert [e[-1].result.token_ids for e in again] == [r.token_ids for r in last]  # type: ignore[union-attr]
    found: dict[int, list[StepEvent]] = {number: [] for number in range(len(PROMPTS))}
    done = threading.Semaphore(0)
    num_together: list[int] = []

    def hear(number: int, event: StepEvent) -> None:
        found[number].append(event)
        if event.result is not None:
            done.release()

    with Scheduler(engine) as scheduler:
        scheduler.observers.append(lambda report: num_together.append(report.num_requests))
        # No forward before all are there.
        with engine._turn:
            for number, prompt in enumerate(PROMPTS):
                scheduler.submit(
                    prompt,
                    replace(BASE, temperature=temperature, seed=5),
                    on_event=lambda event, number=number: hear(number, event),
                    on_error=lambda error: done.release(),
                )
        for _ in PROMPTS:
            assert done.acquire(timeout=60)
    assert max(num_together) > 1
    for number, events in enumerate(wanted):
        assert list(map(written, found[number])) == list(map(written, events))


def test_without_the_tokens_nothing_changes(tmp_path: Path) -> None:
    prompt = [3, 1, 4]
    with opened(GOLDEN) as engine:
        plain = engine.generate(prompt, SamplingParams(max_tokens=16, block_length=8))
        assert engine.check([1]).params.algorithm == "low_confidence"
        with pytest.raises(ConfigError, match="algorithm levenshtein needs"):
            engine.check([1], SamplingParams(algorithm="levenshtein"))
    # One of the two alone names no way of decoding; it is not answered either.
    one = checkpoint(tmp_path / "one", delete_token_id=plain.token_ids[0])
    with opened(one) as engine:
        chosen = engine.check([1]).params
        assert (chosen.algorithm, chosen.threshold) == ("low_confidence", 0.95)
        other = engine.generate(prompt, SamplingParams(max_tokens=16, block_length=8))
        assert plain.token_ids[0] not in other.token_ids
