"""Generate the configuration page from the command-line options.

Usage: `python -m tests.cli.configuration_page`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from chatcache.cli.main import app
from tests.gateway.documents import DOCS

PAGE = DOCS / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Generated from the command-line options by `python -m tests.cli.configuration_page`. Do not edit. -->

A setting is taken from the first of these places that has it:

1. the command-line flag, for example `--kv-memory 2GiB`;
2. the environment variable of the same name: `CHATCACHE_` and the flag in capitals, for example
   `CHATCACHE_KV_MEMORY=2GiB`. Several values of one option are separated by spaces. A misspelt variable that
   resembles a known one is reported at the start, and one that resembles `CHATCACHE_API_KEY` keeps
   `chatcache serve` from starting without a key;
3. `chatcache.toml` in the working directory, or the file given with `chatcache --config FILE serve` or
   `CHATCACHE_CONFIG` (which must exist): one flat table with the flags' names, for example `kv-memory = "2GiB"`.
   Unknown names are refused;
4. the default.

Of `--db` and `--redis`, give one: both together are refused, except that a Redis server of a flag or variable replaces
a `db` of the settings file.

Sizes are bytes, or a number with a unit: `kB`, `MB`, `GB`, `KiB`, `MiB`, `GiB`.
"""


class Parameter(NamedTuple):
    """An argument or option of a command, as its function declares it."""

    name: str
    annotation: Any
    info: ArgumentInfo | OptionInfo
    default: Any

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the names of an option. typer stores the first one as `default` of the annotation."""
        declared = tuple(str(each) for each in (self.info.default, *(self.info.param_decls or ())) if _is_flag(each))
        return declared or (f"--{self.name.replace('_', '-')}",)

    @property
    def is_option(self) -> bool:
        return isinstance(self.info, OptionInfo)

    @property
    def label(self) -> str:
        """Return the argument's name in a usage line."""
        name = str(self.info.metavar or self.name).upper()
        return name if self.is_required else f"[{name}]"

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty


def commands(group: typer.Typer = app, name: str = "chatcache") -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the full name and the function of each command, commands of groups included."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{name} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for each in group.registered_groups:
        assert each.typer_instance is not None
        yield from commands(each.typer_instance, f"{name} {each.name or each.typer_instance.info.name}")


def parameters(command: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a command's function, in order."""
    hints = get_type_hints(command, include_extras=True)
    found = []
    for name, parameter in inspect.signature(command).parameters.items():
        annotation = hints[name]
        if get_origin(annotation) is not Annotated:
            continue  # the context
        kind, *more = get_args(annotation)
        info = next(each for each in more if isinstance(each, ArgumentInfo | OptionInfo))
        found.append(Parameter(name, kind, info, parameter.default))
    return found


def page() -> str:
    """Return the text of configuration.md."""
    return "\n".join([_INTRODUCTION, *(_section(name, command) for name, command in commands())])


def _section(name: str, command: Callable[..., Any]) -> str:
    every = parameters(command)
    usage = " ".join([name, *(each.label for each in every if not each.is_option), "[OPTIONS]"])
    lines = [f"## {name}", "", f"`{usage}`", "", inspect.cleandoc(command.__doc__ or ""), ""]
    rows = [_row(each) for each in every if each.is_option and not each.info.hidden]
    if rows:
        lines += ["| option | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(option: Parameter) -> str:
    flag, values = option.flags[0], _values(option)
    cell = f"`{flag} {values}`" if values else f"`{flag}`"
    return f"| {cell} | {_default(option)} | {_escaped(option.info.help or '')}{_variable(option)} |"


def _variable(option: Parameter) -> str:
    usual = "CHATCACHE_" + option.flags[0].removeprefix("--").upper().replace("-", "_")
    if option.info.envvar == usual:
        return ""
    return f" Variable: `{option.info.envvar}`." if option.info.envvar else " No environment variable."


def _values(option: Parameter) -> str:
    """Return the value column: choices, or a placeholder with the range of numbers."""
    kinds = [kind for kind in (get_args(option.annotation) or (option.annotation,)) if kind is not type(None)]
    if bool in kinds:
        return ""
    if option.info.metavar and option.info.min is None:
        return option.info.metavar
    if get_origin(option.annotation) is Literal or get_origin(kinds[0]) is Literal:
        choices = get_args(option.annotation if get_origin(option.annotation) is Literal else kinds[0])
        return _escaped("|".join(map(str, choices)))
    words = {int: "N", float: "X", Path: "FILE"}
    low, high = option.info.min, option.info.max
    word = next((words[kind] for kind in kinds if kind in words), "TEXT")
    return f"{word} ({low:,} to {high:,})" if low is not None and high is not None and high < 2**62 else word


def _default(option: Parameter) -> str:
    if option.is_required:
        return "required"
    if isinstance(option.info.show_default, str):
        return option.info.show_default
    if option.default is None or option.default is False or option.default in ("", []):
        return ""
    values = option.default if isinstance(option.default, list | tuple) else [option.default]
    return "`" + " ".join(map(str, values)) + "`"


def _is_flag(value: object) -> bool:
    return isinstance(value, str) and value.startswith("--")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
