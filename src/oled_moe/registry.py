"""Look-up by name: an unknown name is an error that lists the known ones."""

from collections.abc import Mapping
from typing import TypeVar

from oled_moe.errors import ConfigError

Value = TypeVar("Value")


def look_up(kind: str, name: str, known: Mapping[str, Value]) -> Value:
    """Return `known[name]`.

    Raises: ConfigError that names the kind, the name and every known name.
    """
    try:
        return known[name]
    except KeyError:
        names = ", ".join(sorted(known))
        raise ConfigError(f"unknown {kind} {name!r}; known: {names}") from None


def parse_spec(kind: str, spec: str) -> tuple[str, dict[str, str]]:
    """Split `NAME[:key=value,...]` into the name and its parameters, still as text.

    Raises: ConfigError where a parameter has no `=` or is given twice.
    """
    name, _, rest = spec.partition(":")
    parameters: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if key in parameters:
            raise ConfigError(f"{kind} {spec!r}: {key} is given twice; give it once")
        if not equals or not key:
            raise ConfigError(
                f"{kind} {spec!r}: {item!r} is not one key=value; write NAME:key=value,key=value"
            )
        parameters[key] = value
    return name, parameters
