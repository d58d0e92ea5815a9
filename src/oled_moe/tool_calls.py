"""Tool calls as LLaDA2's chat template writes them.

A call is `<tool_call>`, a line of JSON with `name` and `arguments`, and `</tool_call>`, each on a
line of its own (models.md 10). The template lists the tools in the prompt; here are the grammar of
a call that must come, and the parser of calls that have come. The tags must be plain text to the
tokenizer: special tokens are no part of an answer's text.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oled_moe.config import Grammar
from oled_moe.errors import InputError
from oled_moe.tokenization import Tokenizer

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Keywords of a schema whose values are JSON of the user's, not schemas.
_PLAIN_KEYWORDS = ("enum", "const", "default", "examples")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments`: a JSON object as text."""

    id: str
    name: str
    arguments: str


def check_tools(tools: object) -> None:
    """Raise InputError unless `tools` are functions as the OpenAI API describes them."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise InputError("tools must be a list of functions, one at least; leave it out for none")
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools has {len(tools)} entries; allowed: {MAX_TOOLS} at most")
    names = set()
    for position, tool in enumerate(tools):
        name = _checked_name(f"tools[{position}]", tool)
        if name in names:
            raise InputError(f"tools[{position}] is a second function {name!r}; give each once")
        names.add(name)


def _checked_name(where: str, tool: object) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InputError(f'{where} must be an object with "type": "function"')
    if not isinstance(function, Mapping):
        raise InputError(f"{where}.function must be an object with name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"{where}.function.name is {name!r}; allowed: 1 to 64 letters, digits, _ and -"
        )
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InputError(
            f"{where}.function.parameters must be a JSON schema of an object; leave it out for none"
        )
    return name


def check_tool_template(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Raise InputError where the chat template would not show these tools to the model."""
    without = tokenizer.apply_chat_template(messages)
    if tokenizer.apply_chat_template(messages, **tool_prompt_variables(tools)) == without:
        raise InputError(
            "tools are given, and this model's chat template has no place for them; leave them "
            "out, or describe them in a message"
        )


def tool_prompt_variables(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the chat template is given for these tools. Raises: InputError, as `check_tools`."""
    check_tools(tools)
    return {"tools": [dict(tool) for tool in tools]}


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], tool_choice: object, *, is_parallel: bool = True
) -> Grammar | None:
    """What an answer must be under `tool_choice`: None where it is free (auto, none).

    `required` is one call or, unless `is_parallel` is False, several; a named function is one call
    of it. The arguments obey the function's schema.
    Raises: InputError for a choice that is none, or of a function that is not among the tools.
    """
    if tool_choice is None or tool_choice in ("auto", "none"):
        return None
    functions = [tool["function"] for tool in tools]
    if tool_choice == "required":
        return _calls_grammar(functions, is_parallel=is_parallel)
    name = None
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        function = tool_choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise InputError(
            f"tool_choice is {tool_choice!r}; allowed: auto, none, required or "
            '{"type": "function", "function": {"name": ...}}'
        )
    chosen = [function for function in functions if function["name"] == name]
    if not chosen:
        known = ", ".join(function["name"] for function in functions)
        raise InputError(f"tool_choice names {name!r}; allowed: {known}")
    return _calls_grammar(chosen, is_parallel=False)


def _calls_grammar(functions: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> Grammar:
    bodies = [f"body_{number}" for number in range(len(functions))]
    lines = [
        'start: call ("\\n" call)*' if is_parallel else "start: call",
        f'call: "{OPENING}\\n" body "\\n{CLOSING}"',
        f"body: {' | '.join(bodies)}",
        *(
            f"{body}: %json {json.dumps(_call_schema(function))}"
            for body, function in zip(bodies, functions, strict=True)
        ),
    ]
    return Grammar("lark", "\n".join(lines), "tools")


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call's JSON, in the style of other JSON answers."""
    parameters = _moved(function.get("parameters") or {"type": "object", "properties": {}})
    parameters.setdefault("type", "object")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": {
            "whitespace_flexible": False,
            "item_separator": ", ?",
            "key_separator": ": ?",
        },
    }


def _moved(schema: Any) -> Any:
    """The schema with its references as they are where it is the schema of `arguments`."""
    if isinstance(schema, Mapping):
        return {key: _moved_value(key, value) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    return schema


def _moved_value(key: str, value: Any) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return f"#/properties/arguments{value[1:]}"
    return value if key in _PLAIN_KEYWORDS else _moved(value)


def new_call_id() -> str:
    """An id for a call, as the OpenAI API gives them."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Splits an answer that grows into text that may go out and calls that are complete.

    What looks like a call and is none stays text. Blanks before and behind calls are left out.
    `new_id` names calls, in their order.
    """

    def __init__(self, *, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._held = ""
        self._follows_call = False

    def feed(self, piece: str, *, is_last: bool = False) -> tuple[str, tuple[ToolCall, ...]]:
        """What is certain now and was not before: text, and calls.

        `piece` continues what was fed before; `is_last`: nothing will follow it.
        """
        text, self._held = self._held + piece, ""
        content: list[str] = []
        calls: list[ToolCall] = []
        while text:
            text = text.lstrip() if self._follows_call else text
            start = text.find(OPENING)
            found = None if start < 0 else _call_at(text, start)
            if found is not None:
                content.append(text[:start].rstrip())
                calls.append(ToolCall(self._new_id(), found.name, found.arguments))
                text, self._follows_call = text[found.end :], True
                continue
            end = self._certain_end(text, start, is_last=is_last)
            content.append(text[:end])
            self._follows_call = self._follows_call and end == 0
            if not is_last:
                self._held = text[end:]
                break
            text = text[end:]
        return "".join(content), tuple(calls)

    def _certain_end(self, text: str, start: int, *, is_last: bool) -> int:
        """How much of a text that begins with no complete call is no part of one."""
        if is_last:
            # What opens here is never closed.
            return len(text) if start < 0 else start + len(OPENING)
        if start < 0:
            sizes = [size for size in range(1, len(OPENING)) if text.endswith(OPENING[:size])]
            start = len(text) - max(sizes, default=0)
        return len(text[:start].rstrip())


@dataclass(frozen=True, slots=True)
class _FoundCall:
    """`end`: where in the text it was found in it ends."""

    name: str
    arguments: str
    end: int


def _call_at(text: str, start: int) -> _FoundCall | None:
    """The call at `start`; None where there is none, or not yet.

    The closing tag may also stand in a string of the arguments: the first that leaves JSON counts.
    """
    end = text.find(CLOSING, start)
    while end >= 0:
        call = _read_call(text[start + len(OPENING) : end])
        if call is not None:
            return _FoundCall(*call, end + len(CLOSING))
        end = text.find(CLOSING, end + 1)
    return None


def _read_call(text: str) -> tuple[str, str] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return None
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
