"""Chat templates: jinja2 in its sandbox, with the helpers that Transformers gives templates.

A module of its own, imported when a template is used: nothing else needs jinja2.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from oled_moe.errors import InputError

# What running somebody's template over somebody's messages can raise.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A template, compiled when it is first used: that takes far longer than using it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._compiled: jinja2.Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        specials: Mapping[str, str],
        variables: Mapping[str, Any],
    ) -> str:
        """The text that it makes of a conversation, special tokens and other variables.

        Raises: InputError where it refuses.
        """
        try:
            if self._compiled is None:
                self._compiled = _template_environment().from_string(self.text)
            return self._compiled.render(
                messages=[dict(message) for message in messages], **specials, **variables
            )
        except _TEMPLATE_ERRORS as error:
            raise InputError(f"the chat template refused the messages: {error}") from None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any, indent: int | None = None, *, ensure_ascii: bool = False, **options: Any
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
