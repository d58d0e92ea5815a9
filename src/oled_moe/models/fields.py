"""Reads the fields of a config.json for the families: every value checked, every fault named."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from oled_moe.errors import CheckpointError

# Far beyond any model; larger values are damage, and would be built before anything is compared.
MAX_SIZE = 2**24
MAX_LAYERS = 1000
MAX_EXPERTS = 2**15 - 1


class FieldReader:
    """The fields of one config.json; null counts as absent.

    Raises: CheckpointError naming the field, its value and what is allowed.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def error(self, name: str, allowed: str) -> CheckpointError:
        """What to raise where a field has a value that is not allowed."""
        if name not in self._values:
            return CheckpointError(f"config.json: {name} is missing; allowed: {allowed}")
        value = repr(self._values[name])
        return CheckpointError(f"config.json: {name} is {value[:200]}; allowed: {allowed}")

    def whole(
        self,
        name: str,
        *,
        default: int | None = None,
        minimum: int = 1,
        maximum: int = MAX_SIZE,
    ) -> int:
        value = self._value(name, default)
        if not _is_whole(value, minimum, maximum):
            raise self.error(name, f"a whole number, {minimum} to {maximum}")
        number: int = value
        return number

    def wholes(self, name: str, *, default: Sequence[int], maximum: int) -> tuple[int, ...]:
        """A list of whole numbers from 0 on."""
        values = self._value(name, default)
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise self.error(name, "a list of whole numbers")
        if not all(_is_whole(value, 0, maximum) for value in values):
            raise self.error(name, f"a list of whole numbers, 0 to {maximum}")
        return tuple(values)

    def real(self, name: str, *, default: Any = None, maximum: float = float("inf")) -> float:
        value = self._value(name, default)
        is_real = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_real or not 0 < value <= min(maximum, sys.float_info.max):
            limit = f", at most {maximum:g}" if maximum != float("inf") else ""
            raise self.error(name, f"a number above 0{limit}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true, false")
        return value

    def refuse_others(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse options that change the numbers and that no code of the family implements.

        `allowed`: for each field the values that it may have, None where it may be absent.
        """
        for name, choices in allowed.items():
            value = self._values.get(name)
            if value not in choices:
                words = ", ".join("absent" if item is None else repr(item) for item in choices)
                raise CheckpointError(
                    f"config.json: {name} is {repr(value)[:200]}, which this version does not "
                    f"run; allowed: {words}"
                )

    def rope_parameters(self) -> Mapping[str, Any]:
        """`rope_parameters`, the newer place for rope_theta and others; empty where absent.

        Raises: CheckpointError where any form of scaling is asked for.
        """
        for name in ("rope_scaling", "rope_parameters"):
            rope = self._values.get(name)
            if rope is not None and not isinstance(rope, Mapping):
                raise self.error(name, "an object, absent")
            if rope:
                kind = rope.get("rope_type", rope.get("type", "default"))
                if "factor" in rope and kind == "default":
                    kind = "unnamed"
                if kind != "default":
                    raise CheckpointError(
                        f"config.json: {name} asks for {repr(kind)[:80]} rotary scaling, which "
                        "this version does not run; allowed: none"
                    )
        return self._values.get("rope_parameters") or {}

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        return default if value is None else value


def _is_whole(value: Any, minimum: int, maximum: int) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and minimum <= value <= maximum
