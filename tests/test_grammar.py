"""Compiling grammars: what is accepted, what is refused and how, and what it is built on."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import oled_moe.grammar
from oled_moe.config import DecodingParams, Grammar, SamplingParams
from oled_moe.errors import ConfigError
from oled_moe.grammar import MAX_GRAMMAR_BYTES, GrammarCompiler
from oled_moe.model_paths import find_model
from oled_moe.tokenization import Tokenizer

VOCAB_SIZE = 640
MASK_ID, EOS_ID = 639, 635
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(find_model("demo"))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE)


def params_of(grammar: Grammar) -> DecodingParams:
    return DecodingParams.resolve(
        SamplingParams(grammar=grammar, mask_token_id=MASK_ID, eos_token_id=EOS_ID)
    )


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether the whole text obeys the grammar."""
    state = compiler.state(params_of(grammar))
    for token_id in tokenizer.encode(text):
        if not state.allows(token_id):
            return False
        state.consume(token_id)
    return state.is_accepting


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (
            Grammar.json_schema(ANSWER),
            ['{"answer": 42}', '{"answer":-7}', '{"answer": 1, "more":true}'],
            ['{"answer":  42}', '{ "answer": 42}', '{"answer": 4.5}', "{}", '{"answer":1}\n'],
        ),
        (
            Grammar("json_object"),
            ["{}", '{"a": [1,2, {"b":null}]}'],
            ["[]", "1", "", '{"a" : 1}', '{"a"}'],
        ),
        (Grammar("regex", "[0-9]+|none"), ["7", "42", "none"], ["", "4a", "non"]),
        (
            Grammar("lark", 'start: "yes" ("," "yes")*'),
            ["yes", "yes,yes"],
            ["", "yes,", "no", "yes, yes"],
        ),
    ],
)
def test_what_grammars_accept(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    grammar: Grammar,
    right: list[str],
    wrong: list[str],
) -> None:
    for text in right:
        assert accepts(compiler, tokenizer, grammar, text), text
    for text in wrong:
        assert not accepts(compiler, tokenizer, grammar, text), text


def test_special_tokens_are_never_text(compiler: GrammarCompiler) -> None:
    state = compiler.state(params_of(Grammar("regex", "(.|\n)*")))
    is_allowed = state.allowed()
    assert not is_allowed[634:].any() and is_allowed[:634].sum() > 500


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", '{"type": "numeral"}'), "numeral"),
        (Grammar("json_schema", "[1]"), "a JSON object"),
        (Grammar("json_schema", "{"), "cannot be read as JSON"),
        (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar("json_schema", '{"not": {"type": "null"}}'), "not"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'), "retriev"),
        (Grammar("json_schema", '{"type": "string", "format": "nonsense"}'), "nonsense"),
        (Grammar("json_schema", '{"x-guidance": {"lenient": true}}'), "x-guidance"),
        (Grammar("json_schema", '{"anyOf": []}'), "anyOf"),
        (Grammar("regex", "a\\\\\\"), "the regular expression ends with a backslash"),
        (Grammar("regex", "a\\", "structured_outputs.regex"), "structured_outputs.regex ends"),
        (Grammar("regex", "(a"), "regular expression"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("lark", 'start: a\na: "x'), "Lark"),
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("lark", "start: <|role_end|>"), "Lark"),
        (Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), "allowed: 65536 bytes"),
    ],
)
def test_what_is_refused(compiler: GrammarCompiler, grammar: Grammar, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        compiler.constraint(params_of(grammar))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": 1}
    return schema


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema(nested(300)),
        Grammar("json_schema", "[" * 20_000 + "]" * 20_000),
        Grammar.json_schema({"enum": [f"value {i} " * 3 for i in range(1_500)]}),
        Grammar("regex", r"(\w{1,200}\s){1,200}(\d{1,500}[a-z]){1,500}"),
        Grammar.json_schema({"type": "array", "minItems": 10**9}),
    ],
)
def test_hostile_grammars_are_refused_or_harmless(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    try:
        constraint = compiler.constraint(params_of(grammar))
    except ConfigError:
        return
    assert constraint.num_tokens is None


def test_a_tokenizer_that_grammars_cannot_use(tokenizer: Tokenizer) -> None:
    params = params_of(Grammar("json_object"))
    with pytest.raises(ConfigError, match="lacks"):
        GrammarCompiler(None, VOCAB_SIZE).constraint(params)
    with pytest.raises(ConfigError, match="600 vs 640"):
        GrammarCompiler(tokenizer, 600).constraint(params)


def test_ids_without_a_token_are_never_allowed(tokenizer: Tokenizer) -> None:
    """A model's vocabulary is often padded."""
    state = GrammarCompiler(tokenizer, 704).state(params_of(Grammar("regex", ".*")))
    is_allowed = state.allowed()
    assert len(is_allowed) == 704 and not is_allowed[640:].any()


def test_a_vocabulary_is_read_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = oled_moe.grammar.byte_tokenizer
    monkeypatch.setattr(oled_moe.grammar, "byte_tokenizer", lambda: made.append(1) or real())
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE)
    params = params_of(Grammar.json_schema(ANSWER))
    threads = [threading.Thread(target=compiler.state, args=(params,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_grammars_of_answers_are_apart(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    params = params_of(Grammar.json_schema(ANSWER))
    one, other = compiler.state(params), compiler.state(replace(params, max_tokens=7))
    for token_id in tokenizer.encode(json.dumps({"answer": 5})):
        one.consume(token_id)
    assert one.is_accepting and not other.is_accepting and other.num_tokens == 0


def test_a_demo_tokenizer_file_is_what_it_was_read_from(tokenizer: Tokenizer) -> None:
    path = Path(find_model("demo")) / "tokenizer.json"
    written = json.loads(tokenizer.to_json())
    assert written["model"]["vocab"] == json.loads(path.read_text())["model"]["vocab"]
