"""`oled-moe config show`: a command's settings, and where each is from."""

from collections.abc import Sequence
from typing import Any

import typer

from oled_moe.cli_config import HIDDEN, SECRETS, commands_of, flags_of
from oled_moe.cli_flags import PanelCommand
from oled_moe.cli_shared import print_json, print_rows
from oled_moe.errors import InputError

_SOURCES = {"COMMANDLINE": "command line", "DEFAULT": "default", "DEFAULT_MAP": "config file"}

config_app = typer.Typer(
    no_args_is_help=True, help="Say which settings a command takes.", rich_markup_mode=None
)


@config_app.callback()
def _root() -> None:
    """Keeps `show` a command of its own while it is the only one."""


def show_settings(ctx: Any, words: Sequence[str]) -> list[tuple[str, Any, str]]:
    """(flag, value, where it is from) of all flags of a command that have a value.

    `words`: the command and what would be typed behind it. Raises: InputError for no command.
    """
    root = ctx.find_root()
    command, parent, rest = root.command, root, list(words)
    while hasattr(command, "commands"):
        name = rest.pop(0) if rest else ""
        if name not in command.commands:
            known = [each for each, _ in commands_of(root.command)]
            asked = " ".join(words[: len(words) - len(rest)])
            raise InputError(f"{asked!r} is no command; allowed: {', '.join(known)}")
        command = command.commands[name]
        if hasattr(command, "commands"):
            parent = type(root)(command, info_name=name, parent=parent)
    for param in command.params:
        # What is asked is where values come from, not whether all are there.
        param.required = False
    own = command.make_context(name, rest, parent=parent)
    if isinstance(command, PanelCommand):
        command.settle(own)
    settings = []
    for flag, param in flags_of(command).items():
        value = own.params.get(param.name)
        first = next((each for each in param.opts if each.startswith("--")), None)
        if value is None or value == () or (first is not None and first != f"--{flag}"):
            continue
        source = own.get_parameter_source(param.name).name
        if source == "ENVIRONMENT":
            where = param.envvar if isinstance(param.envvar, str) else " or ".join(param.envvar)
        else:
            where = _SOURCES.get(source, source.lower())
        shown = HIDDEN if flag in SECRETS else value
        settings.append((flag, shown, where))
    return settings


@config_app.command(
    short_help="Print a command's settings, and where each is from.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def show(ctx: typer.Context) -> None:
    """Print a command's settings, and where each is from: command line, environment, file, default.

    Write the command with its flags behind it: `config show serve --config mine.toml`.
    """
    words = [word for word in ctx.args if word != "--json"]
    if not words or words[0] in ("-h", "--help"):
        print(ctx.get_help())
        return
    settings = show_settings(ctx, words)
    if len(words) != len(ctx.args):
        print_json(
            {flag: {"value": _plain(value), "source": where} for flag, value, where in settings}
        )
        return
    if not settings:
        print("This command has no settings.")
        return
    print_rows([(flag, f"{_text(value)}  ({where})") for flag, value, where in settings])


def _plain(value: Any) -> Any:
    """The value as JSON has it: what is no number, switch or list is text."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float) else str(value)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
