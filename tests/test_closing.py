"""The shortest way to the end of an answer, against all ways."""

import itertools
import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
from fakes import bounded
from grammars import state_of
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from oled_moe.closing import Speller

TOKENS = (b"a", b"b", b"c", b"ab", b"bc", b"ca", b"aab", b"cc")
LONGEST = 4


def expressions() -> st.SearchStrategy[str]:
    """Regular expressions over a, b and c."""
    return st.recursive(
        st.sampled_from(["a", "b", "c", "[ab]", "[bc]", "ab", "cab"]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
            inner.map(lambda part: f"({part})*"),
            inner.map(lambda part: f"({part})+"),
            inner.map(lambda part: f"({part}){{2,3}}"),
        ),
        max_leaves=6,
    )


def all_answers() -> Iterator[tuple[int, str]]:
    """Every text of a few tokens and how many it took, the shortest first."""
    for size in range(LONGEST + 1):
        for tokens in itertools.product(TOKENS, repeat=size):
            yield size, b"".join(tokens).decode()


ANSWERS = list(all_answers())


@given(expressions())
@bounded(150)
def test_a_closing_is_the_shortest_of_all_answers(expression: str) -> None:
    state = state_of(TOKENS, LLMatcher.grammar_from_regex(expression))
    shortest = next((n for n, text in ANSWERS if re.fullmatch(expression, text)), None)
    closing = state.shortest_closing()
    if shortest is None:
        assert closing is None or len(closing.token_ids) > LONGEST
        assert state.first_closing(LONGEST) is None
        return
    assert closing is not None
    assert closing.is_proven and len(closing.token_ids) == shortest
    assert re.fullmatch(expression, closing.text.decode())
    assert b"".join(TOKENS[i] for i in closing.token_ids) == closing.text
    assert state.first_closing(shortest) is not None
    if shortest:
        assert state.first_closing(shortest - 1) is None


@given(expressions(), st.integers(0, 2**16))
@bounded(60)
def test_a_closing_leads_to_the_end_from_anywhere(expression: str, seed: int) -> None:
    state = state_of(TOKENS, LLMatcher.grammar_from_regex(expression))
    rng = np.random.default_rng(seed)
    for _ in range(6):
        closing = state.closing(100)
        if closing is None:
            break
        mark = state.mark()
        for token_id in closing.token_ids:
            assert state.allows(token_id)
            state.consume(token_id)
        assert state.is_accepting
        state.return_to(mark)
        allowed = state.allowed().nonzero()[0]
        if not len(allowed):
            break
        state.consume(int(rng.choice(allowed)))


@given(st.text("abc", max_size=12))
def test_spelling_takes_the_fewest_tokens(text: str) -> None:
    speller = Speller(TOKENS, np.ones(len(TOKENS), dtype=np.bool_))
    token_ids = speller.spell(text.encode())
    assert token_ids is not None
    assert b"".join(TOKENS[i] for i in token_ids) == text.encode()
    fewest = next((n for n, other in ANSWERS if other == text), None)
    assert len(token_ids) == fewest or (fewest is None and len(token_ids) > LONGEST)


def test_what_no_tokens_spell() -> None:
    speller = Speller(TOKENS, np.ones(len(TOKENS), dtype=np.bool_))
    assert speller.spell(b"abd") is None
    usable = np.array([token != b"c" for token in TOKENS])
    assert Speller(TOKENS, usable).spell(b"c") is None


BYTES = tuple(bytes([value]) for value in range(256))


@pytest.mark.parametrize(
    ("schema", "shortest"),
    [
        ({"type": "object"}, "{}"),
        ({}, "0"),
        ({"type": "array", "minItems": 3, "items": {"type": "string"}}, '["","",""]'),
        ({"enum": ["a long value", "b", True]}, '"b"'),
        # A required name is not the first that is allowed, nor may others fill the budget.
        (
            {
                "type": "object",
                "properties": {"zz": {"type": "null"}},
                "required": ["zz"],
                "additionalProperties": {"type": "integer"},
            },
            '{"zz":null}',
        ),
        # The way into the same thing again is not the way out.
        (
            {
                "$defs": {
                    "n": {
                        "type": "object",
                        "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                        "required": ["n"],
                        "additionalProperties": False,
                    }
                },
                "$ref": "#/$defs/n",
            },
            '{"n":null}',
        ),
    ],
)
def test_small_values_of_schemas(schema: dict[str, object], shortest: str) -> None:
    style = {"whitespace_flexible": False}
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=style)
    closing = state_of(BYTES, source).shortest_closing()
    assert closing is not None
    assert len(closing.token_ids) <= len(shortest)


def test_a_value_without_end_has_no_closing() -> None:
    schema = {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"n": {"$ref": "#/$defs/n"}},
                "required": ["n"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/n",
    }
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    assert state_of(BYTES, source).first_closing(50) is None


def test_coming_back_to_a_place_and_going_on_elsewhere() -> None:
    state = state_of(TOKENS, LLMatcher.grammar_from_regex("(ab|ca)+c?"))
    start = state.mark()
    state.consume(TOKENS.index(b"ab"))
    assert state.is_accepting and state.since(0) == (TOKENS.index(b"ab"),)
    middle = state.mark()
    state.consume(TOKENS.index(b"c"))
    state.return_to(middle)
    assert state.is_accepting and state.num_tokens == 1
    # A place can be returned to again and again.
    for _ in range(2):
        state.return_to(start)
        assert not state.is_accepting and state.num_tokens == 0
        state.consume(TOKENS.index(b"ca"))
        assert state.is_accepting
    state.return_to(start)
    assert not state.allows(TOKENS.index(b"b"))
