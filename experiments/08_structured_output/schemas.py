"""Random JSON schemas with a small instance of each, from a seed; no two runs differ."""

import json
import random
from collections.abc import Callable
from typing import Any

NAMES = ("answer", "name", "x", "items", "kind", "total", "first name", "Größe", "a_b", "0")
WORDS = ("red", "green", "blue", "north", "a longer label", "ok", "", 'with "quotes"', "naïve")
# Each with a string that it describes; anchored, as schemas and grammars read others differently.
PATTERNS = (("^[a-z]+$", "a"), ("^[A-Z]{2}-[0-9]{3}$", "AA-000"), ("^(yes|no)$", "no"))
FORMATS = (("date", "2000-01-01"), ("time", "00:00:00Z"), ("ipv4", "0.0.0.0"))
# A schema, and the text of a small value of it.
Drawn = tuple[dict[str, Any], str]


def draw_schema(seed: int, *, is_object: bool = True) -> Drawn:
    """A schema and a small instance of it, written without blanks; an object's on the whole."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        return _linked(rng)
    return _object(rng, 3) if is_object else _any(rng, 3)


def _any(rng: random.Random, depth: int) -> Drawn:
    leaves: list[Callable[[random.Random], Drawn]] = [
        _integer,
        _number,
        _literal,
        _string,
        _enumeration,
    ]
    nests: list[Callable[[random.Random, int], Drawn]] = [_object, _array, _either]
    if depth > 0 and rng.random() < 0.5:
        return rng.choice(nests)(rng, depth - 1)
    return rng.choice(leaves)(rng)


def _integer(rng: random.Random) -> Drawn:
    low = rng.choice((None, 0, 3, -20, 1000))
    schema: dict[str, Any] = {"type": "integer"}
    if low is not None:
        schema["minimum"] = low
    if rng.random() < 0.5:
        schema["maximum"] = (low or 0) + rng.randrange(200)
    return schema, str(max(low or 0, 0) if low != -20 or "maximum" not in schema else low)


def _number(rng: random.Random) -> Drawn:
    if rng.random() < 0.5:
        return {"type": "number"}, "0"
    return {"type": "number", "minimum": 0.5, "maximum": 7.25}, "1"


def _literal(rng: random.Random) -> Drawn:
    return rng.choice(
        [
            ({"type": "boolean"}, "true"),
            ({"type": "null"}, "null"),
            ({"type": ["string", "null"]}, '""'),
            ({"const": {"a": [1, "b"]}}, '{"a":[1,"b"]}'),
        ]
    )


def _string(rng: random.Random) -> Drawn:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string"}, '""'
    if kind == 1:
        least = rng.randrange(6)
        length = {"minLength": least, "maxLength": least + rng.randrange(1, 20)}
        return {"type": "string"} | length, json.dumps("a" * least)
    if kind == 2:
        pattern, text = rng.choice(PATTERNS)
        return {"type": "string", "pattern": pattern}, json.dumps(text)
    name, text = rng.choice(FORMATS)
    return {"type": "string", "format": name}, json.dumps(text)


def _enumeration(rng: random.Random) -> Drawn:
    values: list[Any] = rng.sample(WORDS, rng.randrange(1, 5))
    if rng.random() < 0.3:
        values.append(rng.choice((7, None, True, 2.5)))
    return {"enum": values}, min((_text(value) for value in values), key=len)


def _array(rng: random.Random, depth: int) -> Drawn:
    items, text = _any(rng, depth)
    least = rng.randrange(3)
    schema = {"type": "array", "items": items, "minItems": least}
    if rng.random() < 0.5:
        schema["maxItems"] = least + rng.randrange(3)
    return schema, f"[{','.join([text] * least)}]"


def _either(rng: random.Random, depth: int) -> Drawn:
    drawn = [_any(rng, depth) for _ in range(2)]
    return {"anyOf": [schema for schema, _ in drawn]}, min((text for _, text in drawn), key=len)


def _object(rng: random.Random, depth: int) -> Drawn:
    names = rng.sample(NAMES, rng.randrange(5))
    drawn = {name: _any(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: part for name, (part, _) in drawn.items()},
        "required": required,
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.choice((False, {"type": "integer"}))
    members = [f"{_text(name)}:{drawn[name][1]}" for name in names if name in required]
    return schema, f"{{{','.join(members)}}}"


def _linked(rng: random.Random) -> Drawn:
    """A list whose parts refer to the schema itself."""
    value, text = _any(rng, 1)
    node = {
        "type": "object",
        "properties": {
            "value": value,
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return (
        {"$defs": {"node": node}, "$ref": "#/$defs/node"},
        f'{{"value":{text},"next":null}}',
    )


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
