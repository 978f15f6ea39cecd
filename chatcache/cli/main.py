"""The `chatcache` command: where settings are read and the rooms are put together.

options.py   every flag: name, environment variable, bounds
serve.py     `chatcache serve`: flags to settings
server.py    the listening socket, the engine process, uvicorn, signals, exit codes
http.py      uvicorn's protocols, bounded; ws_protocol.py: WebSocket frames and refused handshakes
banner.py    what a terminal sees while the model loads and when it is ready
chat.py      `chatcache chat`; backends.py: an engine in this process, or a server by URL
bench.py     `chatcache bench`
db.py        `chatcache db`: copies of all conversations
keys.py      `chatcache keys`: who may use a server
redis_user.py  `chatcache redis-acl`: a password and rights for a Redis server; redis_url.py: URLs that name its file
doctor/      `chatcache doctor`: what this machine has and lacks
exits.py     exit codes
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from chatcache import __version__
from chatcache.cli import bench, chat, db, exits, keys, redis_acl, serve
from chatcache.cli.doctor import doctor
from chatcache.cli.options import RENAMED_OPTIONS, CommandGroup, env
from chatcache.config import FILE_NAME, read_config_file, settings_by_command, suggest_corrections
from chatcache.errors import ChatcacheError, InvalidRequestError, ModelFolderError

app = typer.Typer(
    name="chatcache",
    cls=CommandGroup,
    help="A chat server with a shared KV cache. Settings: flag > CHATCACHE_<FLAG> > chatcache.toml > default.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(bench.bench)
app.command()(doctor)
app.command("redis-acl")(redis_acl.redis_acl)
app.add_typer(db.app)
app.add_typer(keys.app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chatcache {__version__}")
        raise typer.Exit


@app.callback()
def settings(
    context: typer.Context,
    config: Annotated[Path, typer.Option(envvar=env("config"), show_envvar=False, help="Settings file.")] = Path(
        FILE_NAME
    ),
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Read the settings file into the defaults of the commands."""
    try:
        values = read_config_file(config)
        for old in sorted(values.keys() & {name.replace("-", "_") for name in RENAMED_OPTIONS}):
            new = RENAMED_OPTIONS[old.replace("_", "-")]
            raise InvalidRequestError(f"{config}: the setting {old!r} is now called {new!r}")
        context.default_map = _nested(settings_by_command(values, _flags(context.command), config))
    except InvalidRequestError as error:
        raise typer.BadParameter(error.message, param_hint="--config") from None
    _tell_misspelt(context.command)


def _tell_misspelt(app: object) -> None:
    """A variable that nobody reads is no fault: others have some of that prefix. But one letter off a key leaves a
    server open."""
    prefix = env("")
    given = [name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)]
    known = [variable.removeprefix(prefix) for variable in _variables(app)]
    for old, new in RENAMED_OPTIONS.items():
        if (name := env(old)) in os.environ:
            raise typer.BadParameter(f"the variable {name} is now called {env(new)}.", param_hint=name)
    for name, meant in sorted(suggest_corrections(given, known).items()):
        print(f"chatcache: nothing reads {prefix}{name}; {prefix}{meant} is a setting", file=sys.stderr)


def _variables(command: object) -> Iterator[str]:
    """The environment variables that a command reads, and those below it."""
    for param in getattr(command, "params", ()):
        yield from [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    for below in getattr(command, "commands", {}).values():
        yield from _variables(below)


def _flags(group: object, above: str = "") -> dict[str, list[str]]:
    """Each command and the names of its parameters; those of a group come behind its name."""
    found: dict[str, list[str]] = {}
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            found |= _flags(command, f"{above}{name} ")
        else:
            found[above + name] = [str(param.name) for param in command.params]
    return found


def _nested(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Settings by command as click takes them: those of a group's commands within the group's."""
    nested: dict[str, Any] = {}
    for path, settings in values.items():
        *groups, name = path.split()
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = settings
    return nested


def main() -> None:
    """Run the command line; a catalogued error is one line on stderr and an exit code, never a traceback."""
    try:
        app()
    except ModelFolderError as error:
        print(f"chatcache: {error.message}", file=sys.stderr)
        sys.exit(exits.CONFIG)
    except ChatcacheError as error:
        print(f"chatcache: {error.message}", file=sys.stderr)
        sys.exit(exits.ERROR)
