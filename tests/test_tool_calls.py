"""Tool calls: which tools are taken, the grammar of a call, and calls found in an answer."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_moe import Engine, EngineConfig, SamplingParams
from oled_moe.config import Grammar
from oled_moe.errors import InputError
from oled_moe.model_paths import find_model
from oled_moe.tokenization import Tokenizer
from oled_moe.tool_calls import (
    ToolCall,
    ToolCallParser,
    check_tool_template,
    check_tools,
    tool_grammar,
    tool_prompt_variables,
)


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/city"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    },
)
NOW = tool("now")
TOOLS = [WEATHER, NOW]


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    with Engine("demo", EngineConfig(expert_memory="25%", threads=1)) as engine:
        yield engine


# Rules under a grammar


def test_a_rule_that_does_not_hold_under_a_grammar_is_named_once(
    demo: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    grammar = Grammar("json_object")
    for algorithm in ("threshold", "low_confidence", "hierarchy", "credit", "hierarchy"):
        demo.check([1], SamplingParams(algorithm=algorithm, grammar=grammar))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "not by the rule of hierarchy" in said[0] and "credit" in said[1]


# Tools


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([], "one at least"),
        ("get_weather", "must be a list"),
        ([1], r"tools\[0\]"),
        ([{"type": "web_search"}], '"type": "function"'),
        ([{"type": "function"}], "function must be an object"),
        ([tool("two words")], "two words"),
        ([tool("x" * 65)], "64"),
        ([NOW, NOW], "second function 'now'"),
        ([tool("f", {"type": "array"})], "schema of an object"),
        ([tool(f"f{i}") for i in range(129)], "128"),
    ],
)
def test_tools_that_are_refused(tools: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_tools(tools)


def test_tools_that_are_taken() -> None:
    check_tools(TOOLS)
    assert tool_prompt_variables(TOOLS) == {"tools": TOOLS}


def test_a_template_without_a_place_for_tools() -> None:
    tokenizer = Tokenizer.load(find_model("demo"))
    assert tokenizer is not None
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(InputError, match="no place for them"):
        check_tool_template(tokenizer, messages, TOOLS)
    tokenizer.chat_template = (
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}"
    )
    check_tool_template(tokenizer, messages, TOOLS)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_free_choice_has_no_grammar(choice: str | None) -> None:
    assert tool_grammar(TOOLS, choice) is None


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("always", "allowed: auto, none, required"),
        ({"type": "function"}, "allowed: auto"),
        ({"type": "function", "function": {"name": "other"}}, "allowed: get_weather, now"),
    ],
)
def test_choices_that_are_refused(choice: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        tool_grammar(TOOLS, choice)


@pytest.mark.parametrize("num_spare", [0, 40])
@pytest.mark.parametrize(
    ("name", "arguments"), [("get_weather", '{"city":"Rome","days":1}'), ("now", "{}")]
)
def test_a_named_call_obeys_its_schema(
    demo: Engine, name: str, arguments: str, num_spare: int
) -> None:
    grammar = tool_grammar(TOOLS, {"type": "function", "function": {"name": name}})
    small = f'<tool_call>\n{{"name":"{name}","arguments":{arguments}}}\n</tool_call>'
    assert demo.tokenizer is not None
    max_tokens = len(demo.tokenizer.encode(small)) + num_spare
    call = only_call(demo, grammar, max_tokens)
    assert call.name == name
    if name == "get_weather":
        jsonschema.validate(json.loads(call.arguments), WEATHER["function"]["parameters"])


def test_a_required_call_is_of_one_of_the_tools(demo: Engine) -> None:
    call = only_call(demo, tool_grammar(TOOLS, "required", is_parallel=False), 90)
    assert call.name in ("get_weather", "now")


def only_call(engine: Engine, grammar: Grammar | None, max_tokens: int) -> ToolCall:
    """The call that the model makes of a prompt it knows nothing of."""
    params = SamplingParams(grammar=grammar, max_tokens=max_tokens)
    result = engine.generate("Weather in Oslo?", params)
    assert result.finish_reason == "stop" and result.text is not None
    assert result.text.startswith("<tool_call>\n{") and result.text.endswith("}\n</tool_call>")
    content, calls = ToolCallParser().feed(result.text, is_last=True)
    assert content == "" and len(calls) == 1
    return calls[0]


# Answers


def written(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def parse(pieces: list[str]) -> tuple[list[str], list[ToolCall]]:
    """What goes out after each piece, and all calls."""
    ids = itertools.count()
    parser = ToolCallParser(new_id=lambda: f"call_{next(ids)}")
    contents, calls = [], []
    for position, piece in enumerate(pieces):
        content, found = parser.feed(piece, is_last=position == len(pieces) - 1)
        contents.append(content)
        calls += found
    return contents, calls


CALL = written("get_weather", {"city": "Oslo", "days": 2})


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("Hello there.\n", "Hello there.\n", []),
        (CALL, "", ["get_weather"]),
        (f"I look.\n\n{CALL}\n{written('now', {})}", "I look.", ["get_weather", "now"]),
        (f"{CALL}\nDone.", "Done.", ["get_weather"]),
        # A closing tag inside of a string of the arguments.
        (written("now", {"x": "</tool_call>"}), "", ["now"]),
        # What is no call stays text.
        ("<tool_call>\nnonsense\n</tool_call>", "<tool_call>\nnonsense\n</tool_call>", []),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', None, []),
        ('<tool_call>{"name": "a"}</tool_call>', None, []),
        ('<tool_call>{"name": "a", "arguments": {', None, []),
        (f"<tool_call>bad</tool_call> {CALL} end", "<tool_call>bad</tool_call>end", None),
        ("a < b, <tool and <tool_cal", "a < b, <tool and <tool_cal", []),
    ],
)
def test_what_an_answer_holds(text: str, content: str | None, names: list[str] | None) -> None:
    contents, calls = parse([text])
    assert "".join(contents) == (text if content is None else content)
    assert [call.name for call in calls] == (["get_weather"] if names is None else names)


def test_arguments_and_ids_of_calls() -> None:
    _, calls = parse([f"{CALL}{written('now', {'ü': [1, None]})}"])
    assert [call.id for call in calls] == ["call_0", "call_1"]
    assert json.loads(calls[0].arguments) == {"city": "Oslo", "days": 2}
    assert calls[1].arguments == '{"ü": [1, null]}'
    first, second = (ToolCallParser().feed(CALL, is_last=True)[1][0].id for _ in range(2))
    assert first.startswith("call_") and first != second


PARTS = ["Hello", " ", "\n", CALL, "<tool_call>", "</tool_call>", "<tool", "{", "ü", "<"]


@given(st.lists(st.sampled_from(PARTS), max_size=8), st.data())
def test_pieces_say_the_same_as_the_whole(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    contents, calls = parse(pieces)
    whole, whole_calls = parse([text])
    assert "".join(contents) == "".join(whole) and calls == whole_calls


def test_text_goes_out_as_soon_as_it_is_no_call() -> None:
    contents, calls = parse(["Hi ", "there <to", "morrow> ", CALL[:20], CALL[20:], ""])
    assert contents == ["Hi", " there", " <tomorrow>", "", "", ""] and len(calls) == 1
