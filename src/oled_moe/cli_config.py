"""Flags from a file: `--config FILE` of every command.

The file is TOML or YAML. Its keys are long flag names, its tables commands: what stands outside of
them is for every command that has the flag. A flag that is given wins over the environment, and
that over the file; `config show` tells which won.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from oled_moe.errors import InputError

# Of each group at most one may be set.
EXCLUSIVE = (
    ("model", "shape"),
    ("experts_per_layer", "expert_memory", "memory"),
    ("prompt", "prompt_file", "prompt_ids"),
)
# What SGLang's --dllm-algorithm-config calls them.
_ALIASES = {"block-size": "block-length"}
# Its keys of which nothing here knows, with the value that asks for nothing.
_NEUTRAL = {"penalty-lambda": 0}
# What has to be known before a command's flags are read, or asks for something else than a run.
_NOT_IN_FILES = ("config", "help", "json", "version")
# Flags whose values no message shows.
SECRETS = ("api-key",)
HIDDEN = "(hidden)"

Values = Mapping[str, Any]


def use_config(ctx: typer.Context, value: Path | None) -> None:
    """Make what a file says the defaults of the other flags, before these are read."""
    if value is not None:
        ctx.default_map = defaults_of(ctx, value)


def defaults_of(ctx: Any, path: Path) -> dict[str, Any]:
    """What a file says of the flags of a command, by their names in Python.

    Raises: InputError for a file that is not there or cannot be read, and for keys that are no
    flag of this command, or outside of tables of any.
    """
    values = read_config(path)
    commands = dict(commands_of(ctx.find_root().command))
    name = _name_of(ctx)
    found: dict[str, Any] = {}
    _check_once(path, "", values)
    for key, value in values.items():
        flag = _flag_of(key)
        if isinstance(value, Mapping):
            _check_table(path, key, value, commands)
            continue
        if flag in _NEUTRAL and value == _NEUTRAL[flag]:
            continue
        if not any(flag in flags for flags in commands.values()):
            raise InputError(f"{path}: {_unknown(key, [f for c in commands.values() for f in c])}")
        if flag in commands[name]:
            found.update(_default(path, key, value, commands[name][flag], flag))
    own: dict[str, Any] = {}
    for key, value in _table_of(values, name).items():
        flag = _flag_of(key)
        own.update(_default(path, key, value, commands[name][flag], flag))
    for group in EXCLUSIVE:
        if not own.keys().isdisjoint(group):
            found = {each: value for each, value in found.items() if each not in group}
    return {**found, **own}


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a file. Raises: InputError."""
    if path.suffix.lower() not in (".toml", ".yaml", ".yml"):
        raise InputError(f"{path}: a config file ends in .toml, .yaml or .yml; rename it")
    try:
        # To open a pipe that nobody writes to would take for ever.
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is no file; --config takes a TOML or YAML file")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; --config takes a TOML or YAML file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read as UTF-8 text ({reason})") from None
    try:
        values = _parse(text, is_toml=path.suffix.lower() == ".toml")
    except ValueError as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}; mend the file") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"{path}: holds no keys with values; write lines like `threads: 4`")
    return values


def _parse(text: str, *, is_toml: bool) -> Any:
    if is_toml:
        import sys

        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        return tomllib.loads(text)
    import yaml

    class OnceLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        """Refuses a key that comes twice, as TOML does; YAML keeps the last in silence."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise ValueError(f"line {key.start_mark.line + 1}: {key.value} comes twice")
                    seen.add(key.value)
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(text, OnceLoader)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except yaml.MarkedYAMLError as error:
        # Not all of it: that quotes the line, in which there may be a key.
        line = 0 if error.problem_mark is None else error.problem_mark.line + 1
        raise ValueError(f"line {line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (LookupError, AttributeError, TypeError) as error:
        # What PyYAML raises for a value that its tag does not fit.
        raise ValueError(f"a value is not what its tag says ({error})") from None


def commands_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every command, as `trace record`, with its flags by their long names."""
    for name, each in getattr(command, "commands", {}).items():
        yield from commands_of(each, (*path, name))
    if path and not hasattr(command, "commands"):
        yield " ".join(path), flags_of(command)


def flags_of(command: Any) -> dict[str, Any]:
    flags = {}
    for param in command.params:
        if param.param_type_name == "argument":
            flags[param.name.replace("_", "-")] = param
        for name in (*param.opts, *param.secondary_opts):
            if name.startswith("--") and name[2:] not in _NOT_IN_FILES:
                flags[name[2:]] = param
    return flags


def _name_of(ctx: Any) -> str:
    names = []
    while ctx.parent is not None:
        names.append(ctx.info_name)
        ctx = ctx.parent
    return " ".join(reversed(names))


def _flag_of(key: str) -> str:
    name = key.removeprefix("--").replace("_", "-")
    return _ALIASES.get(name, name)


def _table_of(values: Values, name: str) -> Values:
    table: Any = values
    for part in name.split():
        table = table.get(part, {}) if isinstance(table, Mapping) else {}
    return table if isinstance(table, Mapping) else {}


def _check_table(
    path: Path, name: str, table: Values, commands: Mapping[str, Mapping[str, Any]]
) -> None:
    is_group = any(each.startswith(f"{name} ") for each in commands)
    if name not in commands and not is_group:
        raise InputError(f"{path}: table {_unknown(name, list(commands), 'command')}")
    if not is_group:
        _check_once(path, f"{name}.", table)
    for key, value in table.items():
        if is_group and isinstance(value, Mapping):
            _check_table(path, f"{name} {key}", value, commands)
        elif is_group:
            raise InputError(f"{path}: {name}.{key} is no table; {name} has commands, not flags")
        elif not isinstance(key, str) or _flag_of(key) not in commands[name]:
            raise InputError(f"{path}: {name}.{_unknown(str(key), list(commands[name]))}")


def _check_once(path: Path, where: str, table: Values) -> None:
    """Refuse two spellings of one flag. Raises: InputError."""
    spelt: dict[str, str] = {}
    for key in table:
        first = spelt.setdefault(_flag_of(str(key)), str(key))
        if first != key and isinstance(key, str):
            raise InputError(f"{path}: {where}{first} and {where}{key} are one flag; give one")


def _unknown(key: str, allowed: Sequence[str], kind: str = "flag") -> str:
    if _flag_of(key) in _NOT_IN_FILES and kind == "flag":
        return f"{key} cannot be set in a file; give --{_flag_of(key)}"
    near = difflib.get_close_matches(_flag_of(key), allowed, 1)
    hint = f"did you mean {near[0]}?" if near else "see --help for those there are"
    return f"{key} is no {kind}; {hint}"


def _shown(value: Any) -> str:
    """A value for messages; of what is nested only the kind, for a few lines may nest terabytes."""
    if isinstance(value, list):
        return "a list"
    return "a table" if isinstance(value, dict) else repr(value)


def _default(path: Path, key: str, value: Any, param: Any, flag: str) -> dict[str, Any]:
    """The value as the parameter takes it, by its name."""
    is_switch = getattr(param, "is_flag", False)
    wanted = "true or false" if is_switch else "text or a number"
    for each in value if isinstance(value, list) and not is_switch else [value]:
        if each is None or isinstance(each, list | dict) or is_switch != isinstance(each, bool):
            shown = HIDDEN if flag in SECRETS else _shown(each)
            raise InputError(f"{path}: {key} is {shown}; allowed: {wanted}")
    if isinstance(value, list) and not param.multiple:
        # Flags that take several write them with commas.
        value = ",".join(map(str, value))
    elif param.multiple and not isinstance(value, list):
        value = [value]
    if f"--{flag}" in param.secondary_opts:
        value = not value
    return {param.name: value if is_switch or param.multiple else str(value)}
