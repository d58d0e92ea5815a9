"""The decoding loops with a model of scripted logits, and the prefix cache with a real one.

The fake model keeps token ids where a real one keeps keys: what a forward sees is what was cached.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from fakes import bounded
from hypothesis import example, given
from hypothesis import strategies as st
from products import product
from torch import Tensor

from oled_moe import Engine, EngineConfig
from oled_moe.config import DecodingParams, SamplingParams
from oled_moe.decoding import (
    FRESH_CONFIDENCE,
    MAX_PREFILL_TOKENS,
    BlockDiffusionDecoder,
    DecodingCounters,
    DecodingStep,
    StopRule,
    never_stop,
)
from oled_moe.errors import OledMoeError
from oled_moe.kv_cache import SequenceKv
from oled_moe.layers import ForwardBatch, Segment, write_kv
from oled_moe.models import Model
from oled_moe.sampling import sample
from oled_moe.types import (
    ForwardContext,
    ForwardOutcome,
    ForwardRow,
    LayerDemand,
    LayerPlan,
    Phase,
    TokenState,
)

VOCABULARY, MASK, EOS = 12, 11, 10
FOLDED = (Phase.COMMIT, Phase.DENOISE)
# All tokens up to the end of the block at work -> logits of that block [B, V].
Script = Callable[[list[int], int], Tensor]


@dataclass
class ScriptedModel:
    """Logits from a function of the tokens; K/V of one layer hold the token ids themselves."""

    script: Script
    forwards: list[ForwardBatch] = field(default_factory=list)
    sequences: list[SequenceKv] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def new_kv(self, num_positions: int) -> SequenceKv:
        self.sequences.append(
            SequenceKv(
                num_layers=1,
                num_heads=1,
                head_size=1,
                capacity=num_positions,
                dtype=torch.float32,
            )
        )
        return self.sequences[-1]

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        kv = batch.segments[0].kv
        self.forwards.append(batch)
        self.lengths.append(kv.length)
        end = kv.length + len(batch.token_ids)
        assert batch.positions.tolist() == list(range(kv.length, end))
        assert batch.token_ids.dtype == torch.int64
        assert [(s.num_tokens, s.wants_logits) for s in batch.segments] == [
            (row.num_tokens, row.phase is Phase.DENOISE) for row in batch.context.rows
        ]
        logits, start = None, 0
        for segment in batch.segments:
            assert segment.kv is kv and segment.offset == start
            keys = batch.token_ids[start : start + segment.num_tokens].float().view(-1, 1, 1)
            write_kv(0, keys, keys, [segment])
            start += segment.num_tokens
            if segment.wants_logits:
                seen = kv.written(0, start)[0].flatten().long().tolist()
                logits = self.script(seen, segment.num_tokens).clone()[segment.logit_tokens]
        return logits

    def phases(self) -> list[Phase]:
        """What each forward is counted as: a commit folded into a denoising forward is none."""
        return [batch.context.rows[-1].phase for batch in self.forwards]


def peaked(pairs: Sequence[tuple[int, float]]) -> Tensor:
    """Logits [B, V] whose softmax gives each position's token its confidence."""
    logits = torch.empty(len(pairs), VOCABULARY)
    for row, (token, confidence) in zip(logits, pairs, strict=True):
        row[:] = np.log((1 - confidence) / (VOCABULARY - 1))
        row[token] = np.log(confidence)
    return logits


def answering(
    answer: Sequence[int], confidence: Callable[[int], float] = lambda _: 0.9, *, start: int = 0
) -> Script:
    """A model that always predicts the same token at a position; `answer` begins at `start`."""

    def script(seen: list[int], block_length: int) -> Tensor:
        first = len(seen) - block_length
        places = range(first - start, len(seen) - start)
        return peaked([(answer[i % len(answer)], confidence(i + start)) for i in places])

    return script


def chaotic(seed: int, scale: float = 3.0) -> Script:
    """A model whose logits depend on every token it sees, mask and eos among the likely ones."""

    def script(seen: list[int], block_length: int) -> Tensor:
        key = zlib.crc32(repr((seed, seen)).encode())
        generator = torch.Generator().manual_seed(key)
        return scale * torch.randn(block_length, VOCABULARY, generator=generator)

    return script


def params(**values: Any) -> DecodingParams:
    base = {"mask_token_id": MASK, "eos_token_id": EOS, "block_length": 4, "max_tokens": 8}
    return DecodingParams.resolve(SamplingParams(**base | values))


@dataclass
class Run:
    steps: list[DecodingStep]
    counters: DecodingCounters
    model: ScriptedModel
    outcomes: list[ForwardOutcome]

    @property
    def answer(self) -> list[int]:
        return list(self.steps[-1].answer_ids)

    @property
    def reason(self) -> str | None:
        return self.steps[-1].finish_reason


def run(
    script: Script,
    prompt: Sequence[int],
    chosen: DecodingParams,
    *,
    stop_rule: StopRule = never_stop,
    limit: int = 2000,
    folds: bool = True,
    all_logits: bool = False,
) -> Run:
    model, counters = ScriptedModel(script), DecodingCounters()
    outcomes: list[ForwardOutcome] = []
    decoder = BlockDiffusionDecoder(
        model,
        start_forward=lambda context: None,
        end_forward=outcomes.append,
        folds_commit=folds,
    )
    decoder.wants_all_logits = all_logits
    steps = []
    for step in decoder.decode(prompt, chosen, stop_rule=stop_rule, counters=counters):
        steps.append(step)
        assert len(steps) <= limit, "the loop does not end"
    return Run(steps, counters, model, outcomes)


# --- the reference loops: a whole canvas each time, no cache (models.md 4 and 5)


def _best(script: Script, canvas: list[int], end: int, length: int) -> tuple[list[int], Tensor]:
    logits = script(canvas[:end], length).clone()
    probabilities = logits.softmax(-1)
    probabilities[:, MASK] = -1
    return probabilities.argmax(-1).tolist(), probabilities.max(-1).values


def _cut(tokens: list[int], max_tokens: int) -> list[int]:
    tokens = tokens[:max_tokens]
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def _canvas(prompt: list[int], chosen: DecodingParams) -> tuple[list[int], list[bool], int]:
    length = chosen.block_length
    num_blocks = -(-(len(prompt) + chosen.max_tokens) // length)
    hole = [False] * len(prompt) + [True] * (num_blocks * length - len(prompt))
    return prompt + [MASK] * (len(hole) - len(prompt)), hole, num_blocks


def reference_low_confidence(
    script: Script, prompt: list[int], chosen: DecodingParams
) -> tuple[list[int], int]:
    length, num_forwards = chosen.block_length, 0
    canvas, hole, num_blocks = _canvas(prompt, chosen)
    base, extra = divmod(length, chosen.steps)
    for block in range(len(prompt) // length, num_blocks):
        places = list(range(block * length, (block + 1) * length))
        for step in range(chosen.steps):
            masked = [p for p in places if hole[p]]
            if not masked:
                break
            best, confidence = _best(script, canvas, places[-1] + 1, length)
            num_forwards += 1
            of = {p: confidence[p - places[0]] for p in masked}
            accepted = [p for p in masked if of[p] > chosen.threshold]
            if len(accepted) < base + (step < extra):
                ranked = sorted(masked, key=lambda p: -float(of[p]))
                accepted = ranked[: base + (step < extra)]
            for p in accepted:
                canvas[p], hole[p] = best[p - places[0]], False
            if chosen.eos_early_stop and any(canvas[p] == EOS for p in accepted):
                first = canvas.index(EOS, len(prompt))
                if not any(hole[len(prompt) : first]):
                    return _cut(canvas[len(prompt) :], chosen.max_tokens), num_forwards
        if EOS in canvas[len(prompt) : len(prompt) + chosen.max_tokens]:
            break
    return _cut(canvas[len(prompt) :], chosen.max_tokens), num_forwards


def reference_joint(
    script: Script, prompt: list[int], chosen: DecodingParams
) -> tuple[list[int], int]:
    length, num_forwards = chosen.block_length, 0
    canvas, hole, num_blocks = _canvas(prompt, chosen)
    for block in range(len(prompt) // length, num_blocks):
        places, post = list(range(block * length, (block + 1) * length)), 0
        while True:
            masked = [p for p in places if hole[p]]
            if not masked:
                post += 1
                if post > chosen.max_post_edit_steps:
                    break
            best, confidence = _best(script, canvas, places[-1] + 1, length)
            num_forwards += 1
            token = {p: best[p - places[0]] for p in places}
            of = {p: confidence[p - places[0]] for p in places}
            accepted = [p for p in masked if of[p] > chosen.threshold]
            if len(accepted) < chosen.num_to_transfer:
                accepted = sorted(masked, key=lambda p: -float(of[p]))[: chosen.num_to_transfer]
            edited = [
                p
                for p in places
                if p >= len(prompt)
                and not hole[p]
                and of[p] > chosen.edit_threshold
                and token[p] != canvas[p]
            ]
            for p in accepted + edited:
                canvas[p], hole[p] = token[p], False
            if not masked and not edited:
                break
        answer = canvas[len(prompt) : len(prompt) + chosen.max_tokens]
        if chosen.eos_early_stop and EOS in answer[: (block + 1) * length - len(prompt)]:
            break
    return _cut(canvas[len(prompt) :], chosen.max_tokens), num_forwards


REFERENCES = {"low_confidence": reference_low_confidence, "joint_threshold": reference_joint}

PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), max_size=11)


@bounded(25)
@given(
    algorithm=st.sampled_from(sorted(REFERENCES)),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.5, 2.0, 4.0]),
    prompt=PROMPTS,
    block_length=st.integers(1, 6),
    max_tokens=st.integers(1, 14),
    steps=st.none() | st.integers(1, 14),
    minimal_topk=st.none() | st.integers(1, 4),
    threshold=st.floats(0, 1),
    edit_threshold=st.floats(0, 1),
    max_post=st.integers(0, 4),
    num_to_transfer=st.integers(1, 7),
    early=st.booleans(),
    folds=st.booleans(),
)
def test_cached_loops_equal_the_canvas_loops(
    algorithm: str,
    seed: int,
    scale: float,
    prompt: list[int],
    block_length: int,
    max_tokens: int,
    steps: int | None,
    minimal_topk: int | None,
    threshold: float,
    edit_threshold: float,
    max_post: int,
    num_to_transfer: int,
    early: bool,
    folds: bool,
) -> None:
    values = {
        "algorithm": algorithm,
        "block_length": block_length,
        "max_tokens": max_tokens,
        "steps": steps,
        "minimal_topk": min(minimal_topk or 1, max(max_tokens, block_length)),
        "threshold": float(np.float32(threshold)),
        "edit_threshold": float(np.float32(edit_threshold)),
        "max_post_edit_steps": max_post,
        "num_to_transfer": num_to_transfer,
        "eos_early_stop": early,
    }
    chosen = params(**values)
    script = chaotic(seed, scale)
    found = run(script, prompt, chosen, folds=folds)
    answer, num_forwards = REFERENCES[algorithm](script, prompt, chosen)
    assert found.answer == answer
    assert found.counters.num_denoise_forwards == num_forwards == len(found.steps)
    assert MASK not in found.answer
    assert found.reason == ("stop" if EOS in answer else "length")
    assert not (folds and found.counters.num_commit_forwards)
    check_bookkeeping(found, prompt, chosen)


def check_bookkeeping(found: Run, prompt: list[int], chosen: DecodingParams) -> None:
    """What holds for every run: contexts, counts, cache contents, and what steps show."""
    length, model = chosen.block_length, found.model
    (kv,) = model.sequences
    num_whole = len(prompt) // length
    assert kv.capacity == -(-(len(prompt) + chosen.max_tokens) // length) * length
    counts = [model.phases().count(phase) for phase in Phase]
    counters = found.counters
    assert counts == [
        counters.num_prefill_forwards,
        counters.num_denoise_forwards,
        counters.num_commit_forwards,
    ]
    assert counts[0] == (num_whole > 0)
    # Every finished block but the last is in the cache, and the cache holds its final tokens.
    blocks = {step.block_id: step for step in found.steps if step.is_block_done}
    last = max(blocks)
    assert sorted(blocks) == list(range(num_whole, last + 1))
    assert kv.length == last * length
    final = prompt[: num_whole * length]
    final += [token for block in range(num_whole, last) for token in blocks[block].token_ids]
    assert kv.written(0, 0)[0].flatten().tolist() == final
    assert [batch.context.forward_id for batch in model.forwards] == list(range(sum(counts)))
    check_contexts(found, prompt, chosen)
    check_steps(found, prompt, chosen)


def check_contexts(found: Run, prompt: list[int], chosen: DecodingParams) -> None:
    length = chosen.block_length
    steps = iter(found.steps)
    latest: dict[int, float] = {}
    step_ids: dict[int, int] = {}
    for batch, outcome, prefix in zip(
        found.model.forwards, found.outcomes, found.model.lengths, strict=True
    ):
        context = batch.context
        assert outcome.context is context
        assert context.block_length == length
        assert context.num_tokens == len(batch.token_ids)
        phases = [row.phase for row in context.rows]
        assert phases in ([Phase.PREFILL], [Phase.COMMIT], [Phase.DENOISE], list(FOLDED))
        assert context.is_denoise == (Phase.DENOISE in phases)
        end = 0
        for row in context.rows:
            first, end = end, end + row.num_tokens
            start = prefix + first
            token_ids = batch.token_ids[first:end].tolist()
            assert row.block_id == start // length
            positions = range(start, start + row.num_tokens)
            assert context.token_position is not None
            assert context.token_position[first:end].tolist() == list(positions)
            states = [TokenState(state) for state in context.token_state[first:end]]
            assert [state is TokenState.PROMPT for state in states] == [
                position < len(prompt) for position in positions
            ]
            confidences = context.token_confidence[first:end]
            if row.phase is not Phase.DENOISE:
                assert (confidences == 1).all()
                assert TokenState.MASKED not in states
                assert np.isnan(outcome.token_confidence[first:end]).all()
                assert not outcome.token_accepted[first:end].any()
                continue
            assert row.num_tokens == length and row.step_id == step_ids.get(row.block_id, 0)
            step_ids[row.block_id] = row.step_id + 1
            for position, state, confidence in zip(positions, states, confidences, strict=True):
                if state is TokenState.MASKED:
                    assert token_ids[position - start] == MASK
                    assert confidence == np.float32(latest.get(position, FRESH_CONFIDENCE))
                else:
                    assert confidence == 1
            step = next(steps)
            assert (step.block_id, step.step_id, step.block_start) == (
                row.block_id,
                row.step_id,
                start,
            )
            masked_before = {
                p for p, s in zip(positions, states, strict=True) if s is TokenState.MASKED
            }
            masked_after = {p for p, m in zip(positions, step.is_masked, strict=True) if m}
            changed = {change.position for change in step.changes}
            assert masked_before - masked_after == changed & masked_before
            accepted = outcome.token_accepted[first:end].nonzero()[0] + start
            assert set(accepted.tolist()) == masked_before - masked_after
            before = dict(zip(positions, token_ids, strict=True))
            after = dict(zip(positions, step.token_ids, strict=True))
            assert changed == {p for p in positions if before[p] != after[p]}
            assert all(c.from_id == before[c.position] for c in step.changes)
            assert all(c.to_id == after[c.position] != MASK for c in step.changes)
            assert all(position >= len(prompt) for position in changed)
            seen = found.model.script([*found_prefix(found, start), *token_ids], length)
            _, confidence = _best_of(seen)
            latest.update(zip(positions, confidence, strict=True))
            # What was looked at has its confidence, and nothing else has one.
            is_known = ~np.isnan(outcome.token_confidence[first:end])
            is_wanted = [p >= len(prompt) for p in positions]
            if chosen.algorithm == "low_confidence":
                is_wanted = [p in masked_before for p in positions]
            assert is_known.tolist() == is_wanted
            np.testing.assert_array_equal(
                outcome.token_confidence[first:end][is_known], np.array(confidence)[is_known]
            )
    assert next(steps, None) is None


def found_prefix(found: Run, length: int) -> list[int]:
    (kv,) = found.model.sequences
    keys = kv.written(0, kv.capacity - kv.length)[0]
    return list(map(int, keys.flatten()[:length].tolist()))


def _best_of(logits: Tensor) -> tuple[list[int], list[float]]:
    best_ids, confidence = sample(logits.clone(), params(), None)
    return best_ids.tolist(), confidence.tolist()


def check_steps(found: Run, prompt: list[int], chosen: DecodingParams) -> None:
    """Answers only grow; whatever a step shows is part of the final answer."""
    for earlier, later in zip(found.steps, found.steps[1:], strict=False):
        assert later.answer_ids[: len(earlier.answer_ids)] == earlier.answer_ids
        assert not earlier.is_last and earlier.finish_reason is None
        assert earlier.is_block_done == (later.block_id != earlier.block_id)
    last = found.steps[-1]
    assert last.is_last and last.is_block_done
    assert len(last.answer_ids) <= chosen.max_tokens


# --- LLaDA2.0


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [([], 8), ([], 5), ([1], 1), ([1, 2], 7), ([1, 2, 3, 4], 4), ([1] * 9, 6), ([1] * 8, 1)],
)
@pytest.mark.parametrize("folds", [False, True])
def test_lengths_of_prompt_and_answer(prompt: list[int], max_tokens: int, folds: bool) -> None:
    answer = [1, 2, 3, 4, 5, 6, 7]
    chosen = params(max_tokens=max_tokens, threshold=0.5)
    found = run(answering(answer, start=len(prompt)), prompt, chosen, folds=folds)
    assert found.answer == [answer[i % 7] for i in range(max_tokens)]
    assert found.reason == "length"
    num_blocks = -(-(len(prompt) + max_tokens) // 4) - len(prompt) // 4
    # One forward a block suffices for a confident model; the last block is not committed.
    assert found.counters.num_denoise_forwards == num_blocks
    assert found.counters.num_commit_forwards == (0 if folds else num_blocks - 1)
    folded = [len(batch.context.rows) == 2 for batch in found.model.forwards]
    assert sum(folded) == (num_blocks - 1 if folds else 0)
    assert found.counters.num_prefill_forwards == (len(prompt) >= 4)
    check_bookkeeping(found, prompt, chosen)


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
@pytest.mark.parametrize(
    "prompt", [[MASK], [1, MASK, 2], [MASK] * 4, [MASK] * 6, [1, 2, 3, 4, MASK]]
)
def test_a_mask_in_the_prompt_is_prompt(algorithm: str, prompt: list[int]) -> None:
    found = run(answering([1, 2, 3]), prompt, params(algorithm=algorithm, edit_threshold=0.0))
    assert len(found.answer) == 8 and MASK not in found.answer
    (kv,) = found.model.sequences
    assert found_prefix(found, min(len(prompt), kv.capacity)) == prompt
    for step in found.steps:
        ids = step.token_ids[: max(0, len(prompt) - step.block_start)]
        assert list(ids) == prompt[step.block_start :]
        assert not any(step.is_masked[: len(ids)])


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
def test_a_model_that_prefers_the_mask_never_emits_it(algorithm: str) -> None:
    def script(seen: list[int], block_length: int) -> Tensor:
        logits = torch.zeros(block_length, VOCABULARY)
        logits[:, MASK], logits[:, 3] = 30.0, 1.0
        return logits

    found = run(script, [1], params(algorithm=algorithm))
    assert found.answer == [3] * 8
    # The mask takes part in the softmax: nothing is confident, one position a step.
    assert found.counters.num_denoise_forwards >= 8
    assert all(change.confidence < 1e-10 for step in found.steps for change in step.changes)


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_an_error(algorithm: str, value: float) -> None:
    def script(seen: list[int], block_length: int) -> Tensor:
        logits = torch.zeros(block_length, VOCABULARY)
        logits[0] = value
        return logits if value > 0 or value != value else torch.full_like(logits, value)

    with pytest.raises(OledMoeError, match="not finite"):
        run(script, [1, 2], params(algorithm=algorithm), limit=100)


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constant_logits_end(algorithm: str, temperature: float) -> None:
    def script(seen: list[int], block_length: int) -> Tensor:
        return torch.zeros(block_length, VOCABULARY)

    prompt = [1, 2, 3, 4, 5]
    chosen = params(algorithm=algorithm, temperature=temperature, ignore_eos=True)
    found = run(script, prompt, chosen, limit=100)
    assert len(found.answer) == 8 and MASK not in found.answer
    assert found_prefix(found, 5) == prompt
    for batch in found.model.forwards:
        assert np.isfinite(batch.context.token_confidence).all()


def test_eos_ends_after_its_block_and_is_kept() -> None:
    script = answering([1, EOS, 2, 3, 4, 5, 6, 7], lambda p: 0.5 + p / 100)
    found = run(script, [], params())
    assert (found.answer, found.reason) == ([1, EOS], "stop")
    assert found.counters.num_denoise_forwards == 4, "the whole block is decoded"
    assert found.counters.num_commit_forwards == 0


def test_eos_early_stop_waits_for_the_holes_before_it() -> None:
    # Accepted in the order 1 (eos), 3, 0, 2: no stop at the eos itself, nor when the hole closes.
    order = {1: 0.9, 3: 0.8, 0: 0.7, 2: 0.6}
    found = run(answering([1, EOS, 2, 3], order.__getitem__), [], params(eos_early_stop=True))
    assert (found.answer, found.counters.num_denoise_forwards) == ([1, EOS], 4)
    # Accepted 0, then 1 (eos): stops at once.
    order = {0: 0.9, 1: 0.8, 2: 0.7, 3: 0.6}
    found = run(answering([1, EOS, 2, 3], order.__getitem__), [], params(eos_early_stop=True))
    assert (found.answer, found.counters.num_denoise_forwards) == ([1, EOS], 2)
    assert found.steps[-1].is_masked == (False, False, True, True)
    # A second eos accepted later finds the first one complete.
    order = {1: 0.9, 0: 0.8, 3: 0.7, 2: 0.6}
    found = run(answering([1, EOS, 2, EOS], order.__getitem__), [], params(eos_early_stop=True))
    assert (found.answer, found.counters.num_denoise_forwards) == ([1, EOS], 3)


def test_eos_beyond_max_tokens_is_surplus() -> None:
    found = run(answering([1, 2, EOS, 3]), [], params(max_tokens=2))
    assert (found.answer, found.reason) == ([1, 2], "length")
    found = run(answering([1, 2, EOS, 3]), [], params(max_tokens=2, eos_early_stop=True))
    assert (found.answer, found.reason) == ([1, 2], "length")


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
@pytest.mark.parametrize("early", [False, True])
def test_eos_in_the_prompt_ends_nothing(algorithm: str, early: bool) -> None:
    prompt = [EOS, 1, EOS, 2, EOS]
    chosen = params(algorithm=algorithm, eos_early_stop=early)
    found = run(answering([1, 2, 3]), prompt, chosen)
    assert (len(found.answer), found.reason) == (8, "length")


def test_eos_in_the_prompt_is_not_the_first_of_the_answer() -> None:
    order = {0: 0.5, 1: 0.8, 2: 0.7, 3: 0.9}
    script = answering([1, 2, EOS], order.__getitem__, start=1)
    chosen = params(eos_early_stop=True, max_tokens=3)
    found = run(script, [EOS], chosen)
    assert (found.answer, found.counters.num_denoise_forwards) == ([1, 2, EOS], 3)


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
@pytest.mark.parametrize("early", [False, True])
def test_ignore_eos_decodes_everything(algorithm: str, early: bool) -> None:
    chosen = params(algorithm=algorithm, eos_early_stop=early, ignore_eos=True)
    found = run(answering([1, EOS, 2]), [], chosen)
    assert (found.answer, found.reason) == ([1, EOS, 2, 1, EOS, 2, 1, EOS], "length")


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
def test_without_an_eos_id_only_stop_ids_end(algorithm: str) -> None:
    open_end = params(algorithm=algorithm, eos_token_id=None)
    assert open_end.eos_token_id is None
    assert run(answering([1, EOS, 2]), [], open_end).reason == "length"
    chosen = replace(open_end, stop_token_ids=(2, 7))
    found = run(answering([1, EOS, 2, 7]), [], chosen)
    assert (found.answer, found.reason) == ([1, EOS, 2], "stop")
    assert {step.block_id for step in found.steps} == {0}


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
def test_stop_rule_cuts_after_a_block(algorithm: str) -> None:
    asked: list[list[int]] = []

    def rule(answer: Sequence[int]) -> int | None:
        asked.append(list(answer))
        return 5 if len(answer) > 5 else None

    found = run(
        answering([1, 2, 3]), [1], params(algorithm=algorithm, max_tokens=20), stop_rule=rule
    )
    assert (found.answer, found.reason) == ([2, 3, 1, 2, 3], "stop")
    assert [len(answer) for answer in asked] == [3, 7]


def test_stop_rule_sees_nothing_behind_the_eos() -> None:
    asked: list[list[int]] = []

    def rule(answer: Sequence[int]) -> int | None:
        asked.append(list(answer))
        return None

    found = run(answering([1, EOS, 2, 3]), [], params(), stop_rule=rule)
    assert asked == [[1, EOS]] == [found.answer]


def test_stop_rule_may_keep_nothing() -> None:
    found = run(answering([1, 2]), [], params(), stop_rule=lambda answer: 0)
    assert (found.answer, found.reason) == ([], "stop")


# --- LLaDA2.1


def oscillating(seen: list[int], block_length: int) -> Tensor:
    """Always wants another token than the one that stands there."""
    block = seen[-block_length:]
    return peaked([(1 if token != 1 else 2, 0.95) for token in block])


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 16])
def test_oscillation_takes_the_post_steps_and_a_commit(limit: int, folds: bool) -> None:
    chosen = params(
        algorithm="joint_threshold", threshold=0.5, edit_threshold=0.5, max_post_edit_steps=limit
    )
    found = run(oscillating, [], chosen, folds=folds)
    # One forward fills a block, the post steps follow; the first of two blocks is committed.
    assert found.counters.num_denoise_forwards == 2 * (1 + limit)
    assert found.counters.num_commit_forwards == (not folds)
    check_bookkeeping(found, [], chosen)


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 16])
def test_a_settled_block_needs_no_commit_forward(limit: int, folds: bool) -> None:
    chosen = params(algorithm="joint_threshold", threshold=0.5, max_post_edit_steps=limit)
    found = run(answering([1, 2, 3]), [], chosen, folds=folds)
    # A post step that changes nothing settles the block; with none allowed it cannot be known.
    assert found.counters.num_denoise_forwards == 2 * (1 + min(limit, 1))
    folded = [len(batch.context.rows) == 2 for batch in found.model.forwards]
    assert (found.counters.num_commit_forwards, sum(folded)) == (
        (limit == 0 and not folds),
        (limit == 0 and folds),
    )
    check_bookkeeping(found, [], chosen)


def test_eos_may_be_edited_away() -> None:
    def script(seen: list[int], block_length: int) -> Tensor:
        is_full = MASK not in seen[-block_length:]
        return peaked([(3 if is_full else EOS, 0.95)] * block_length)

    for early in (False, True):
        chosen = params(
            algorithm="joint_threshold", threshold=0.5, edit_threshold=0.5, eos_early_stop=early
        )
        found = run(script, [], chosen)
        assert (found.answer, found.reason) == ([3] * 8, "length")
        assert all(EOS not in step.answer_ids for step in found.steps)


@pytest.mark.parametrize("early", [False, True])
def test_eos_with_and_without_early_stop(early: bool) -> None:
    chosen = params(algorithm="joint_threshold", max_tokens=12, eos_early_stop=early)
    found = run(answering([1, EOS, 2]), [], chosen)
    assert (found.answer, found.reason) == ([1, EOS], "stop")
    # Without early stop the reference goes on through all blocks; the answer stays as it was.
    assert {step.block_id for step in found.steps} == ({0} if early else {0, 1, 2})
    assert all(step.answer_ids == (1, EOS) for step in found.steps if step.block_id > 0)


# --- prefill, contexts, sampling


@pytest.mark.parametrize(
    ("num_tokens", "block_length"),
    [(1, 4), (2048, 4), (2052, 4), (5000, 4), (2999, 3000), (6001, 3000)],
)
def test_long_prompts_are_prefilled_in_whole_blocks(num_tokens: int, block_length: int) -> None:
    prompt = [1 + i % 7 for i in range(num_tokens)]
    chosen = params(max_tokens=1, block_length=block_length, steps=1, threshold=0.0)
    found = run(lambda seen, length: torch.zeros(length, VOCABULARY), prompt, chosen)
    phases = found.model.phases()
    sizes = [
        len(batch.token_ids)
        for batch, phase in zip(found.model.forwards, phases, strict=True)
        if phase is Phase.PREFILL
    ]
    assert sum(sizes) == num_tokens // block_length * block_length
    assert all(size <= max(MAX_PREFILL_TOKENS, block_length) for size in sizes)
    assert all(size % block_length == 0 for size in sizes)
    assert len(sizes) == -(-sum(sizes) // max(block_length, MAX_PREFILL_TOKENS // 4 * 4))
    (kv,) = found.model.sequences
    assert kv.written(0, 0)[0].flatten().tolist() == prompt[: sum(sizes)]


def test_forward_ids_and_hooks_run_on_across_requests() -> None:
    model = ScriptedModel(answering([1, 2, 3]))
    ended: list[bool] = []
    decoder = BlockDiffusionDecoder(
        model,
        start_forward=lambda context: None,
        end_forward=lambda outcome: ended.append(outcome.context.is_denoise),
    )
    for request_id in (4, 9):
        list(decoder.decode([1] * 5, params(), request_id=request_id))
    contexts = [batch.context for batch in model.forwards]
    assert [context.forward_id for context in contexts] == list(range(len(contexts)))
    assert ended == [context.is_denoise for context in contexts]
    assert [context.rows[0].request_id for context in contexts] == sorted(
        [4, 9] * (len(contexts) // 2)
    )


def test_seeds_of_a_request() -> None:
    def answer(seed: int, script: Script) -> list[int]:
        return run(script, [1], params(temperature=1.0, max_tokens=40, seed=seed)).answer

    def flat(seen: list[int], block_length: int) -> Tensor:
        return torch.zeros(block_length, VOCABULARY)

    assert answer(3, flat) == answer(3, flat)
    assert answer(3, flat) != answer(4, flat)
    assert MASK not in answer(3, flat)


@bounded(25)
@given(
    algorithm=st.sampled_from(sorted(REFERENCES)),
    seed=st.integers(0, 10**6),
    prompt=PROMPTS,
    max_tokens=st.integers(1, 14),
    early=st.booleans(),
    temperature=st.sampled_from([0.0, 0.8]),
    top_p=st.none() | st.floats(0, 1),
)
@example("joint_threshold", 0, [], 9, False, 0.8, None)
def test_neither_folding_nor_more_logits_change_what_comes_out(
    algorithm: str,
    seed: int,
    prompt: list[int],
    max_tokens: int,
    early: bool,
    temperature: float,
    top_p: float | None,
) -> None:
    """Greedy or sampled: the same steps, with one forward fewer for each commit."""
    chosen = params(
        algorithm=algorithm,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        eos_early_stop=early,
        seed=seed,
    )
    found = run(chaotic(seed), prompt, chosen)
    assert MASK not in found.answer
    check_steps(found, prompt, chosen)
    (kv,) = found.model.sequences
    assert kv.capacity == -(-(len(prompt) + max_tokens) // 4) * 4
    for folds, all_logits in ((False, False), (True, True), (False, True)):
        other = run(chaotic(seed), prompt, chosen, folds=folds, all_logits=all_logits)
        assert other.steps == found.steps
        num_folded = sum(len(batch.context.rows) == 2 for batch in found.model.forwards)
        assert other.counters.num_commit_forwards == (0 if folds else num_folded)
        if all_logits:
            rows = [batch.context.rows[-1] for batch in other.model.forwards]
            for row, outcome in zip(rows, other.outcomes, strict=True):
                is_known = ~np.isnan(outcome.token_confidence[-row.num_tokens :])
                assert is_known.all() == is_known.any() == (row.phase is Phase.DENOISE)


def test_no_forward_for_a_block_that_is_not_decoded() -> None:
    """The last block, and one that ends the answer, are not committed in any way."""
    script = answering([1, 2, 3, EOS, 4, 5])
    for early in (False, True):
        found = run(script, [], params(max_tokens=40, eos_early_stop=early, threshold=0.5))
        assert (found.answer, len(found.model.forwards)) == ([1, 2, 3, EOS], 1)
    found = run(answering([1, 2]), [], params(max_tokens=8, threshold=0.5))
    assert [len(batch.token_ids) for batch in found.model.forwards] == [4, 8]
    (kv,) = found.model.sequences
    assert kv.length == 4


def test_moments_are_in_order() -> None:
    counters = run(answering([1, 2]), [1] * 4, params()).counters
    moments = [
        counters.start_s,
        counters.prefill_end_s,
        counters.first_token_s,
        counters.last_token_s,
    ]
    assert moments == sorted(moments)
    assert counters.first_token_s < counters.last_token_s


# --- a real model: cached, chunked, and whole


CONFIG = {
    "model_type": "llada2_moe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "vocab_size": 40,
    "mask_token_id": 37,
    "eos_token_id": 36,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_checkpoint(
        tmp_path_factory.mktemp("model"), synthetic_llada2(CONFIG, seed=3), CONFIG
    )
    with Engine(path, EngineConfig(experts_per_layer=8)) as engine:
        yield engine


def forward_all(model: Model, token_ids: list[int], block_length: int) -> tuple[Tensor, SequenceKv]:
    """Logits of every position from one forward over everything; nothing cached before."""
    num_tokens = len(token_ids)
    kv = model.new_kv(num_tokens)
    row = ForwardRow(0, 0, 0, Phase.DENOISE, num_tokens)
    context = ForwardContext(
        0,
        block_length,
        (row,),
        np.ones(num_tokens, dtype=np.float32),
        np.zeros(num_tokens, dtype=np.uint8),
    )
    segments = (Segment(kv, num_tokens, True),)
    logits = model.forward(
        ForwardBatch(torch.tensor(token_ids), torch.arange(num_tokens), segments, context)
    )
    assert logits is not None
    return logits, kv


@dataclass
class Recording:
    """The real model, keeping its sequences and, of each forward with logits, its tokens, whose
    logits these are, and the logits."""

    model: Model
    sequences: list[SequenceKv] = field(default_factory=list)
    logits: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)

    def new_kv(self, num_positions: int) -> SequenceKv:
        self.sequences.append(self.model.new_kv(num_positions))
        return self.sequences[-1]

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        logits = self.model.forward(batch)
        if logits is not None:
            wanted = batch.segments[-1].logit_tokens
            assert wanted is not None
            self.logits.append((batch.token_ids.tolist(), wanted, logits.clone()))
        return logits


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
@pytest.mark.parametrize("num_prompt, block_length", product((0, 3, 21, 8), (8, 4)))
def test_the_prefix_cache_is_exact(
    engine: Engine, algorithm: str, num_prompt: int, block_length: int
) -> None:
    random = np.random.default_rng(num_prompt)
    prompt = random.integers(0, 36, num_prompt).tolist()
    chosen = params(
        algorithm=algorithm,
        mask_token_id=37,
        eos_token_id=None,
        block_length=block_length,
        max_tokens=11,
        threshold=0.3,
        edit_threshold=0.2,
        max_post_edit_steps=3,
    )
    recomputed: list[Tensor] = []

    def script(seen: list[int], length: int) -> Tensor:
        recomputed.append(forward_all(engine.model, seen, length)[0][-length:])
        return recomputed[-1]

    whole = run(script, prompt, chosen)
    recording = Recording(engine.model)
    decoder = BlockDiffusionDecoder(
        recording, start_forward=lambda context: None, end_forward=lambda outcome: None
    )
    steps = list(decoder.decode(prompt, chosen))
    assert list(steps[-1].answer_ids) == whole.answer and len(whole.answer) == 11
    inputs = [batch.token_ids.tolist() for batch in whole.model.forwards if batch.wants_logits]
    assert [ids for ids, _, _ in recording.logits] == inputs
    for expected, (_, wanted, logits) in zip(recomputed, recording.logits, strict=True):
        torch.testing.assert_close(logits, expected[wanted], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("algorithm", sorted(REFERENCES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seeds", [(0, 3), pytest.param((1, 2), marks=pytest.mark.full)])
def test_a_real_model_says_the_same_folded_or_not(
    engine: Engine, algorithm: str, temperature: float, seeds: tuple[int, ...]
) -> None:
    """Tokens, and keys and values of the finished blocks; the commit's rows skip the last layer."""
    for seed in seeds:
        prompt = np.random.default_rng(seed).integers(0, 36, 3 + 5 * seed).tolist()
        chosen = params(
            algorithm=algorithm,
            temperature=temperature,
            mask_token_id=37,
            eos_token_id=None,
            block_length=8,
            max_tokens=45,
            threshold=0.3,
            edit_threshold=0.2,
            max_post_edit_steps=2,
            seed=seed,
        )
        found: list[tuple[list[DecodingStep], SequenceKv]] = []
        for folds, all_logits in ((True, False), (False, False), (True, True)):
            recording, seen = Recording(engine.model), list[LayerDemand]()

            def observe(
                demand: LayerDemand, plan: LayerPlan, seen: list[LayerDemand] = seen
            ) -> None:
                seen.append(demand)

            engine.experts.observers.append(observe)
            decoder = BlockDiffusionDecoder(
                recording,
                start_forward=engine.experts.start_forward,
                end_forward=engine.experts.end_forward,
                folds_commit=folds,
            )
            decoder.wants_all_logits = all_logits
            found.append((list(decoder.decode(prompt, chosen)), recording.sequences[0]))
            engine.experts.observers.remove(observe)
            is_folded = [len(d.topk_ids) == 16 for d in seen if d.context.is_denoise]
            # Settled blocks of LLaDA2.1 need no commit.
            assert any(is_folded) == folds or algorithm == "joint_threshold"
            assert folds or not any(is_folded)
            assert {len(d.topk_ids) for d in seen if d.layer == 1} == {8}
        (steps, kv), *others = found
        for other_steps, other_kv in others:
            assert [step.token_ids for step in other_steps] == [step.token_ids for step in steps]
            assert other_kv.length == kv.length
            for layer in range(CONFIG["num_hidden_layers"]):
                for left, right in zip(
                    other_kv.written(layer, 0), kv.written(layer, 0), strict=True
                ):
                    torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_chunked_prefill_equals_one_piece(engine: Engine) -> None:
    prompt = np.random.default_rng(0).integers(0, 36, MAX_PREFILL_TOKENS + 150).tolist()
    recording = Recording(engine.model)
    counters = DecodingCounters()
    decoder = BlockDiffusionDecoder(
        recording, start_forward=lambda context: None, end_forward=lambda outcome: None
    )
    chosen = params(mask_token_id=37, eos_token_id=None, max_tokens=4, block_length=32)
    next(decoder.decode(prompt, chosen, counters=counters))
    assert counters.num_prefill_forwards == 2
    (kv,) = recording.sequences
    num_whole = len(prompt) // 32 * 32
    assert kv.length == num_whole
    _, whole = forward_all(engine.model, prompt[:num_whole], 32)
    for layer in range(CONFIG["num_hidden_layers"]):
        chunked = kv.written(layer, 0)
        for found, expected in zip(chunked, whole.written(layer, num_whole), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
