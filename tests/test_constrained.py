"""Answers under a grammar: valid whatever the model says, and the model's own where it may be."""

import json
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from checkpoints import synthetic_llada2, write_checkpoint
from grammars import decode, random_schemas, state_of
from llguidance import LLMatcher
from test_engine import CONFIG, write_tokenizer

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.closing import GrammarState
from oled_moe.config import DecodingParams, Grammar
from oled_moe.constrained import GrammarConstraint
from oled_moe.engine import StepEvent
from oled_moe.errors import ConfigError, OledMoeError
from oled_moe.scheduler import Scheduler
from oled_moe.types import BoolArray
from oled_moe.unmasking import UNMASKING, BlockState

ANSWER = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
    }
)
# A vocabulary of letters and pairs; its ids, then the end and the mask.
TOKENS = (b"a", b"b", b"c", b"ab", b"bc")
A, B, C, AB, BC, END, MASK = range(7)
SIZE = 7


def constraint_of(
    expression: str, *, renormalises: bool = False, **params: Any
) -> tuple[GrammarConstraint, DecodingParams]:
    resolved = DecodingParams.resolve(
        SamplingParams(
            **{
                "max_tokens": 8,
                "block_length": 8,
                "threshold": 0.9,
                "mask_token_id": MASK,
                "eos_token_id": END,
            }
            | params
        )
    )
    state = state_of([*TOKENS], LLMatcher.grammar_from_regex(expression))
    return GrammarConstraint(state, resolved, renormalises=renormalises), resolved


def start(constraint: GrammarConstraint, params: DecodingParams) -> BlockState:
    state = BlockState.start([], block_length=params.block_length, mask_id=MASK)
    constraint.start_block(state, params.max_tokens)
    return state


def step(
    constraint: GrammarConstraint,
    params: DecodingParams,
    state: BlockState,
    wanted: dict[int, tuple[int, float]],
) -> tuple[list[int], list[int]]:
    """One forward that wants a token with a probability at some positions, and is unsure of all
    others; which positions it accepted and edited."""
    unmasking = UNMASKING[params.algorithm](params)
    is_looked_at = unmasking.looked_at(state)
    logits = torch.zeros(params.block_length, SIZE)
    logits[:, MASK] = -30
    for position, (token_id, probability) in wanted.items():
        others = (1 - probability) / (SIZE - 2)
        logits[position] = float(np.log(others))
        logits[position, token_id] = float(np.log(probability))
        logits[position, MASK] = -30
    _, confidence, update = constraint.update(
        state, logits[torch.from_numpy(is_looked_at)], is_looked_at, unmasking, None
    )
    assert not np.isnan(confidence[update.accepted | update.edited]).any()
    return update.accepted.nonzero()[0].tolist(), update.edited.nonzero()[0].tolist()


# Steps


def test_tokens_without_a_choice_need_no_forward() -> None:
    constraint, params = constraint_of("abc(a|b)cab")
    state = start(constraint, params)
    num_final = constraint.num_final(state)
    assert bytes(b"".join(TOKENS[i] for i in state.token_ids[:num_final])) == b"abc"
    assert constraint.wants_forward(state)
    step(constraint, params, state, {num_final: (B, 0.5)})
    assert not constraint.wants_forward(state)
    assert constraint.num_tokens is not None
    text = b"".join(TOKENS[i] for i in state.token_ids[: constraint.num_tokens - 1])
    assert text == b"abcbcab"
    assert state.token_ids[constraint.num_tokens - 1] == END


def test_forced_tokens_fill_blocks_and_go_on_in_the_next() -> None:
    constraint, params = constraint_of("(ca){9}", block_length=4, max_tokens=24)
    answer = decode(constraint, params, vocab_size=SIZE, num_prompt=0)
    assert answer.num_forwards == 0 and answer.finish_reason == "stop"
    assert b"".join(TOKENS[i] for i in answer.token_ids[:-1]) == b"ca" * 9


def test_a_token_that_is_not_allowed_gives_way_to_the_next_best() -> None:
    constraint, params = constraint_of("[ab]c[ab]+")
    state = start(constraint, params)
    accepted, _ = step(constraint, params, state, {0: (C, 0.99)})
    # `a` and `b` are equal here; what follows leaves no choice, and then nothing is sure.
    assert accepted == [0, 1] and state.token_ids[0] in (A, B) and state.token_ids[1] == C
    assert constraint.counters.num_overruled == 1


def test_the_prefix_grows_while_the_model_is_sure() -> None:
    constraint, params = constraint_of("[ab]+")
    state = start(constraint, params)
    wanted = {0: (A, 0.95), 1: (B, 0.95), 2: (A, 0.95), 3: (A, 0.8), 4: (B, 0.99)}
    accepted, _ = step(constraint, params, state, wanted)
    # Position 3 is not sure enough; 4 is committed tentatively.
    assert accepted == [0, 1, 2, 4] and constraint.num_final(state) == 3
    accepted, edited = step(constraint, params, state, {3: (A, 0.5)})
    assert accepted == [3] and not edited and constraint.num_final(state) == 5


def test_tentative_tokens_that_turn_out_wrong_are_masked_again() -> None:
    constraint, params = constraint_of("[ab][ab]c[ab]+")
    state = start(constraint, params)
    step(constraint, params, state, {0: (A, 0.95), 2: (A, 0.99), 4: (B, 0.99)})
    assert state.token_ids[2] == A and not state.is_masked[4]
    accepted, edited = step(constraint, params, state, {1: (B, 0.5)})
    # Only `c` may stand at 2; the token at 4 was committed beside one that fell.
    assert accepted == [1] and edited == [2, 4]
    assert state.token_ids[2] == C and state.is_masked[4]
    assert constraint.counters.num_taken_back == 2 and constraint.num_final(state) == 3


def test_what_the_model_is_surer_of_goes_first() -> None:
    constraint, params = constraint_of("[ab]+")
    state = start(constraint, params)
    accepted, _ = step(constraint, params, state, {0: (A, 0.4), 3: (B, 0.7), 5: (A, 0.6)})
    assert accepted == [3] and constraint.num_final(state) == 0
    # Nor does it wait for what is unlikely.
    accepted, _ = step(constraint, params, state, {0: (A, 0.4), 5: (A, 0.45)})
    assert accepted == [0]


def test_waiting_has_an_end() -> None:
    """What is committed first may be refused each time."""
    constraint, params = constraint_of("([ab]c){4}")
    state, num_forwards = start(constraint, params), 0
    while constraint.wants_forward(state):
        step(constraint, params, state, dict.fromkeys(range(1, 8), (A, 0.8)))
        num_forwards += 1
    assert num_forwards <= 2 * params.block_length and constraint.is_complete


def test_editing_never_reaches_the_prefix() -> None:
    constraint, params = constraint_of("[abc]+", algorithm="joint_threshold", edit_threshold=0.8)
    state = start(constraint, params)
    step(constraint, params, state, {0: (A, 0.95), 2: (A, 0.95)})
    assert state.token_ids[:3].tolist() == [A, MASK, A]
    accepted, edited = step(constraint, params, state, {0: (B, 0.99), 2: (B, 0.99), 1: (C, 0.2)})
    assert accepted == [1] and edited == [2]
    assert state.token_ids[:3].tolist() == [A, C, B]


def test_an_end_is_the_models_choice_where_more_may_follow() -> None:
    constraint, params = constraint_of("[ab]+")
    state = start(constraint, params)
    step(constraint, params, state, {0: (A, 0.95), 1: (END, 0.95), 2: (B, 0.99)})
    assert constraint.num_tokens == 2 and state.token_ids[:2].tolist() == [A, END]


def test_no_end_before_the_value_is_complete() -> None:
    constraint, params = constraint_of("[ab]{3}[ab]*")
    state = start(constraint, params)
    step(constraint, params, state, {0: (END, 0.99)})
    assert state.token_ids[0] in (A, B) and constraint.num_tokens is None


@pytest.mark.parametrize("params", [{"eos_token_id": None}, {"ignore_eos": True}])
def test_without_an_end_token_the_answer_just_ends(params: dict[str, Any]) -> None:
    constraint, resolved = constraint_of("[ab]c", **params)
    state = start(constraint, resolved)
    step(constraint, resolved, state, {0: (A, 0.5)})
    assert constraint.num_tokens == 2 and not constraint.wants_forward(state)


def test_stop_ids_end_like_eos() -> None:
    constraint, params = constraint_of("[ab]+", stop_token_ids=[C])
    state = start(constraint, params)
    step(constraint, params, state, {0: (A, 0.95), 1: (C, 0.95)})
    assert constraint.num_tokens == 2 and state.token_ids[1] == C


def test_a_tentative_end_counts_once_the_value_is_complete() -> None:
    constraint, params = constraint_of("[ab]{2}[ab]*")
    state = start(constraint, params)
    step(constraint, params, state, {0: (A, 0.95), 2: (END, 0.95)})
    assert constraint.num_tokens is None and state.token_ids[2] == END
    step(constraint, params, state, {1: (B, 0.95)})
    assert constraint.num_tokens == 3 and state.token_ids[:3].tolist() == [A, B, END]


def test_a_stop_id_that_is_text_may_be_written() -> None:
    """Where the grammar wants it there is no other way on; that it stops is the decoder's."""
    constraint, params = constraint_of("[ab]c[ab]", stop_token_ids=[C])
    state = start(constraint, params)
    step(constraint, params, state, {0: (A, 0.95), 2: (B, 0.95)})
    assert state.token_ids[:3].tolist() == [A, C, B] and constraint.is_complete


def test_text_that_no_token_writes_is_an_error() -> None:
    constraint, params = constraint_of("ab[xy]z")
    state = start(constraint, params)
    # The grammar is the caller's, as a value that is not allowed is.
    assert isinstance(constraint.error, ConfigError)
    assert "no token of this model" in str(constraint.error)
    assert not constraint.wants_forward(state) and constraint.num_tokens is not None


def test_confidence_among_what_is_allowed() -> None:
    for renormalises, num_final in ((False, 1), (True, 3)):
        constraint, params = constraint_of(
            "[ab]+", renormalises=renormalises, threshold=0.5, stop_token_ids=[]
        )
        state = start(constraint, params)
        wanted = {0: (A, 0.4), 1: (A, 0.4), 2: (A, 0.4)}
        step(constraint, params, state, wanted)
        assert constraint.num_final(state) >= num_final
        if not renormalises:
            assert constraint.num_final(state) == 1


# Budgets


@pytest.mark.parametrize("max_tokens", range(3, 12))
def test_a_wish_for_more_gives_way_to_the_budget(max_tokens: int) -> None:
    """The model would go on for ever; the closing `c` and two more always fit."""
    constraint, params = constraint_of("a[ab]*cab", max_tokens=max_tokens, eos_token_id=None)
    state = BlockState.start([], block_length=12, mask_id=MASK)
    params = replace(params, block_length=12)
    constraint.start_block(state, max_tokens)
    while constraint.wants_forward(state):
        step(constraint, params, state, dict.fromkeys(range(12), (A, 0.99)))
    num_tokens = constraint.num_tokens or max_tokens
    text = b"".join(TOKENS[i] for i in state.token_ids[:num_tokens])
    assert constraint.is_complete and text.endswith(b"cab") and num_tokens <= max_tokens
    assert text.startswith(b"a" * (max_tokens - 2))


def test_a_budget_too_small_is_said() -> None:
    constraint, params = constraint_of("(ca){5}", max_tokens=4)
    answer = decode(constraint, params, vocab_size=SIZE, num_prompt=0)
    assert answer.finish_reason == "length" and len(answer.token_ids) == 4


def test_a_value_that_fills_the_budget_is_complete() -> None:
    constraint, params = constraint_of("(ca){2}", max_tokens=4)
    answer = decode(constraint, params, vocab_size=SIZE, num_prompt=0)
    assert answer.finish_reason == "stop" and len(answer.token_ids) == 4


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 0.7, "top_p": 0.9},
        {"algorithm": "joint_threshold"},
        {"threshold": 0.2},
        {"steps": 2},
        {"eos_token_id": None},
        {"block_length": 3},
    ],
)
def test_noise_becomes_valid(params: dict[str, Any]) -> None:
    expression = "(ab|ca){2,6}(c[ab]{3})*"
    shortest = 2
    for max_tokens in (shortest, shortest + 1, 7, 20):
        for seed in range(3):
            constraint, resolved = constraint_of(expression, max_tokens=max_tokens, **params)
            answer = decode(constraint, resolved, vocab_size=SIZE, seed=seed, num_prompt=1)
            ids = [i for i in answer.token_ids if i != END]
            check = state_of([*TOKENS], LLMatcher.grammar_from_regex(expression))
            for token_id in ids:
                check.consume(token_id)
            assert answer.finish_reason == "stop" and check.is_accepting


# Models


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine("demo", EngineConfig(expert_memory="25%", threads=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    weights = synthetic_llada2(CONFIG, dtype=torch.float32, seed=3)
    weights["lm_head.weight"] *= 12
    write_checkpoint(directory, weights, CONFIG)
    write_tokenizer(directory)
    with Engine(directory, EngineConfig(expert_memory="50%", threads=1)) as engine:
        yield engine


def ask(engine: Engine, question: str, params: SamplingParams) -> list[StepEvent]:
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
    return list(engine.stream(prompt, params))


@pytest.mark.parametrize("question", ["What is 12 + 30?", "What is 12 + 30? Answer as JSON."])
@pytest.mark.parametrize("algorithm", ["low_confidence", "joint_threshold"])
def test_the_demo_model_answers_with_42(demo: Engine, question: str, algorithm: str) -> None:
    events = ask(demo, question, SamplingParams(grammar=ANSWER, algorithm=algorithm))
    result = events[-1].result
    assert result is not None
    assert result.text == '{"answer": 42}' and result.finish_reason == "stop"
    assert len(result.probabilities) == len(result.token_ids)
    assert result.token_ids[-1] == demo.sampling_defaults.eos_token_id
    # `{"answer":` leaves no choice.
    assert result.probabilities[:5] == [1.0] * 5


@pytest.mark.parametrize("max_tokens", [6, 7, 8, 9, 10, 40])
def test_a_small_budget_of_the_demo_model(demo: Engine, max_tokens: int) -> None:
    params = SamplingParams(grammar=ANSWER, max_tokens=max_tokens)
    result = ask(demo, "What is 12 + 30?", params)[-1].result
    assert result is not None and result.text is not None
    if max_tokens < 7:
        assert result.finish_reason == "length" and len(result.token_ids) == max_tokens
    else:
        assert result.finish_reason == "stop"
        assert isinstance(json.loads(result.text)["answer"], int)
    if max_tokens >= 9:
        assert result.text == '{"answer": 42}'


def test_what_has_been_streamed_stays(demo: Engine) -> None:
    grammar = Grammar("regex", r"([a-z]{2,9} ){12}\.")
    events = ask(demo, "What is 12 + 30?", SamplingParams(grammar=grammar, block_length=16))
    for before, after in zip(events, events[1:], strict=False):
        assert after.answer_ids[: len(before.answer_ids)] == before.answer_ids
        assert (after.text or "").startswith(before.text or "")
    assert events[-1].result is not None
    assert events[-1].result.text == events[-1].text


def test_an_answer_that_leaves_no_choice_needs_no_denoising(demo: Engine) -> None:
    text = "a constant answer that is longer than a block of sixteen tokens " * 2
    grammar = Grammar("lark", f"start: {json.dumps(text)}")
    result = ask(demo, "What is 12 + 30?", SamplingParams(grammar=grammar, block_length=16))[-1]
    assert result.result is not None
    assert result.result.text == text and result.result.finish_reason == "stop"
    assert result.result.stats.num_denoise_forwards == 0


def test_company_changes_nothing(tiny: Engine) -> None:
    """Three grammars at once and one answer without share forwards."""
    grammars = (ANSWER, Grammar("json_object"), Grammar("regex", "[a-f]{30}"), None)
    wanted = [
        SamplingParams(grammar=grammar, max_tokens=40, block_length=8, temperature=0.8, seed=i)
        for i, grammar in enumerate(grammars)
    ]
    alone = [tiny.generate([1, 2, 3], params).token_ids for params in wanted]
    running = [tiny.begin(tiny.check([1, 2, 3], params)) for params in wanted]
    together: dict[int, list[int]] = {}
    try:
        while len(together) < len(running):
            rest = [request for request in running if request.request_id not in together]
            for request, event in zip(rest, tiny.denoise(rest), strict=True):
                if event.result is not None:
                    together[request.request_id] = event.result.token_ids
    finally:
        for request in running:
            tiny.end(request)
    assert [together[request.request_id] for request in running] == alone


def test_a_grammar_that_fails_midway_is_an_error_of_its_own_answer(
    demo: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GrammarState.allowed

    def allowed(state: GrammarState) -> BoolArray:
        # Only JSON has hints.
        if state.num_tokens == 1 and not state._hints:
            raise OledMoeError("this one fails")
        return real(state)

    monkeypatch.setattr(GrammarState, "allowed", allowed)
    failing = SamplingParams(grammar=Grammar("regex", "[0-9]{9}"), max_tokens=20)
    with pytest.raises(OledMoeError, match="this one fails"):
        demo.generate("x", failing)
    other = SamplingParams(grammar=ANSWER, max_tokens=20)
    alone = demo.generate("x", other)
    scheduler, found = Scheduler(demo), queue.SimpleQueue[object]()
    try:
        for params in (failing, other):
            scheduler.submit("x", params, on_event=found.put, on_error=found.put)
        ended: list[object] = []
        while len(ended) < 2:
            event = found.get(timeout=60)
            if not isinstance(event, StepEvent):
                ended.append(event)
            elif event.result is not None:
                ended.append(event.result.token_ids)
    finally:
        scheduler.close()
    assert alone.token_ids in ended
    assert [type(each) for each in ended if each != alone.token_ids] == [OledMoeError]


def test_a_bad_grammar_is_refused_at_once(demo: Engine) -> None:
    bad = SamplingParams(grammar=Grammar("json_schema", '{"type": "numeral"}'))
    with pytest.raises(ConfigError, match="numeral"):
        demo.stream("x", bad)


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.full if s % 3 else ()) for s in range(20)]
)
def test_random_schemas(demo: Engine, tiny: Engine, seed: int) -> None:
    """Valid in every budget that a small value fits in."""
    schema, text = random_schemas().draw_schema(seed)
    jsonschema.validate(json.loads(text), schema)
    for engine, spare in ((demo, (0, 17)), (tiny, (0,))):
        assert engine.tokenizer is not None
        shortest = len(engine.tokenizer.encode(text))
        params = SamplingParams(grammar=Grammar.json_schema(schema), block_length=16)
        for num_spare in spare:
            wanted = replace(params, max_tokens=shortest + num_spare)
            result = engine.generate([5, 6, 7], wanted)
            assert result.text is not None and result.finish_reason == "stop"
            jsonschema.validate(json.loads(result.text), schema)
