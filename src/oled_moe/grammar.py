"""Grammars of answers: JSON schemas, regular expressions and Lark, compiled by llguidance.

A GrammarCompiler is made once for a tokenizer; it makes a constraint for each answer. JSON is
written on one line, with or without a space behind commas and colons, so that blanks cannot go on
without end and most punctuation leaves no choice. What llguidance does not know of a schema is
refused, never ignored.
"""

import contextlib
import json
import re
import threading
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from oled_moe.closing import GrammarState, Speller, byte_tokenizer
from oled_moe.config import DecodingParams, Grammar
from oled_moe.constrained import GrammarConstraint
from oled_moe.errors import ConfigError
from oled_moe.tokenization import Tokenizer

# Compiling takes time that grows with the square of a grammar's size: half a second at this one.
MAX_GRAMMAR_BYTES = 65_536
# Separators are regular expressions.
_JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


class _Vocabulary(NamedTuple):
    """A tokenizer as grammars see it."""

    by_token: LLTokenizer
    by_byte: LLTokenizer
    speller: Speller


class GrammarCompiler:
    """Makes the constraints of one model's answers; any thread may call.

    `tokenizer` None, as a checkpoint without tokenizer.json has it, is refused when it is used.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        # Reading a large vocabulary takes seconds: only where a grammar is asked for, and once.
        self._vocabularies: dict[tuple[int, int | None], _Vocabulary] = {}

    def constraint(
        self, params: DecodingParams, *, renormalises: bool = False
    ) -> GrammarConstraint:
        """The constraint of one answer under `params.grammar`.

        Raises: ConfigError for a grammar that is malformed, uses what is not supported, or is too
        large, and for a tokenizer that no grammar can be used with.
        """
        return GrammarConstraint(self.state(params), params, renormalises=renormalises)

    def state(self, params: DecodingParams) -> GrammarState:
        """The start of the grammar. Raises: as `constraint`."""
        assert params.grammar is not None
        vocabulary = self._vocabulary(params.mask_token_id, params.eos_token_id)
        source = grammar_source(params.grammar)
        by_token = _matcher(vocabulary.by_token, source, params.grammar)
        by_byte = _matcher(vocabulary.by_byte, source, params.grammar)
        hints = _hints(params.grammar, vocabulary.speller)
        return GrammarState(
            by_token, by_byte, vocabulary.speller, hints=hints, title=params.grammar.title
        )

    def _vocabulary(self, mask_id: int, eos_id: int | None) -> _Vocabulary:
        key = (mask_id, eos_id)
        with self._lock:
            if key not in self._vocabularies:
                # One is enough; requests that change their ids are rare.
                self._vocabularies = {key: self._read(mask_id, eos_id)}
            return self._vocabularies[key]

    def _read(self, mask_id: int, eos_id: int | None) -> _Vocabulary:
        if self._tokenizer is None:
            raise ConfigError("a grammar needs a tokenizer, which this checkpoint lacks")
        try:
            # Ends of an answer are the constraint's to judge. llguidance needs one too, and is
            # given the token that never comes.
            by_token = LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=mask_id
            )
        except ValueError as error:
            raise ConfigError(
                f"this model's tokenizer cannot be used with a grammar: {_one_line(error)}"
            ) from None
        token_ids = range(self._vocab_size)
        # Ids that the model has and the tokenizer has not count as special, too.
        usable = np.array([not by_token.is_special_token(token_id) for token_id in token_ids])
        usable[[mask_id] if eos_id is None else [mask_id, eos_id]] = False
        bytes_of = [by_token.decode_bytes([token_id]) for token_id in token_ids]
        return _Vocabulary(by_token, byte_tokenizer(), Speller(bytes_of, usable))


def grammar_source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. Raises: ConfigError where it is no grammar at all."""
    if len(grammar.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise ConfigError(
            f"{grammar.title} is {len(grammar.text)} characters long; allowed: "
            f"{MAX_GRAMMAR_BYTES} bytes; make it smaller"
        )
    if grammar.kind == "regex":
        # llguidance drops it in silence.
        if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
            raise ConfigError(
                f"{grammar.title} ends with a backslash that escapes nothing; write two for a "
                "backslash, or leave it out"
            )
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.text))
    if grammar.kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_STYLE))
    return str(LLMatcher.grammar_from_json_schema(_schema(grammar), overrides=_JSON_STYLE))


def _schema(grammar: Grammar) -> dict[str, Any]:
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{grammar.title} cannot be read as JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ConfigError(f"{grammar.title} is {grammar.text[:50]}; allowed: a JSON object")
    if "x-guidance" in schema:
        raise ConfigError(f"{grammar.title} has x-guidance; leave it out, it is not supported")
    return schema


def _hints(grammar: Grammar, speller: Speller) -> list[bytes]:
    """How strings of a JSON grammar may end: required names of members, then listed values, those
    of few tokens first. Whether one is allowed at a place, the grammar says."""
    names: set[str] = set()
    values: set[str] = set()
    for schema in _schemas_of(grammar):
        _collect(schema, names, values)
    ends = [[_json_text(name)[1:] + b":" for name in names]]
    ends.append([_json_text(value)[1:] for value in values])
    return [
        end
        for group in ends
        for end in sorted(group, key=lambda end: (len(speller.spell(end) or end), end))
    ]


def _schemas_of(grammar: Grammar) -> list[Any]:
    """The JSON schemas that a grammar holds."""
    if grammar.kind == "json_schema":
        return [_schema(grammar)]
    if grammar.kind != "lark":
        return []
    found = []
    for match in re.finditer(r"%json\s*", grammar.text):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.JSONDecoder().raw_decode(grammar.text, match.end())[0])
    return found


def _collect(schema: Any, names: set[str], values: set[str]) -> None:
    """Required names and listed strings anywhere in a schema. Mutates: both sets."""
    if isinstance(schema, list):
        for part in schema:
            _collect(part, names, values)
    if not isinstance(schema, dict):
        return
    for key, part in schema.items():
        listed = part if isinstance(part, list) else [part]
        strings = {value for value in listed if isinstance(value, str)}
        if key == "required":
            names |= strings
        elif key in ("enum", "const"):
            values |= strings
        else:
            _collect(part, names, values)


def _json_text(value: str) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _matcher(tokenizer: LLTokenizer, source: str, grammar: Grammar) -> LLMatcher:
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
    warnings = matcher.get_grammar_warnings()
    if matcher.is_error() or warnings:
        reason = matcher.get_error() if matcher.is_error() else "; ".join(warnings)
        raise ConfigError(f"{grammar.title} cannot be used: {_one_line(reason)}")
    return matcher


def _limits() -> LLParserLimits:
    """Work that one grammar may cause: some milliseconds a step, and some tens of MiB."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        # Messages would hold the parser's state.
        verbose_errors=False,
    )


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:300]
