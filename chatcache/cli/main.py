"""Entry point of the `chatcache` command: read the settings file, then run a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from chatcache import __version__
from chatcache.cli import bench, chat, db, keys, manifests, redis_acl, serve, worker
from chatcache.cli.doctor import doctor
from chatcache.cli.options import EXIT_CONFIG, EXIT_ERROR, RENAMED_OPTIONS, CommandGroup, env
from chatcache.config import FILE_NAME, read_config_file, settings_by_command, suggest_corrections
from chatcache.errors import ChatcacheError, InvalidRequestError, ModelFolderError

app = typer.Typer(
    name="chatcache",
    cls=CommandGroup,
    help="A self-hosted ChatGPT-style server. Settings: flag > CHATCACHE_<FLAG> > chatcache.toml > default.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve.serve)
app.command()(serve.gateway)
app.command()(worker.worker)
app.command()(chat.chat)
app.command()(bench.bench)
app.command()(doctor)
app.command("redis-acl")(redis_acl.redis_acl)
app.command()(manifests.manifests)
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
    source = context.get_parameter_source("config")
    if source is not None and source.name != "DEFAULT" and (config.is_dir() or not config.exists()):
        raise typer.BadParameter(f"no such file: {config.absolute()}.", param_hint="--config")
    try:
        values = read_config_file(config)
        for old in values:
            if new := RENAMED_OPTIONS.get(old.replace("_", "-")):
                raise InvalidRequestError(f"{config}: the setting {old!r} is now called {new!r}")
        context.default_map = _nest_groups(settings_by_command(values, _parameter_names(context.command), config))
    except InvalidRequestError as error:
        raise typer.BadParameter(error.message, param_hint="--config") from None
    _check_variables(context.command)


def _check_variables(app: object) -> None:
    """Warn about misspelt environment variables, and refuse those that were renamed.

    Unknown variables are no error, since other programs may use the prefix. Only names close to a known one are
    reported: a misspelt API key variable would leave the server open.
    """
    prefix = env("")
    given = [name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)]
    known = [variable.removeprefix(prefix) for variable in _variables(app)]
    for old, new in RENAMED_OPTIONS.items():
        if (name := env(old)) in os.environ:
            raise typer.BadParameter(f"the variable {name} is now called {env(new)}.", param_hint=name)
    for name, meant in sorted(suggest_corrections(given, known).items()):
        print(f"chatcache: unknown variable {prefix}{name} is ignored; did you mean {prefix}{meant}?", file=sys.stderr)


def _variables(command: object) -> Iterator[str]:
    """Yield the environment variables that a command and its subcommands read."""
    for param in getattr(command, "params", ()):
        yield from [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    for subcommand in getattr(command, "commands", {}).values():
        yield from _variables(subcommand)


def _parameter_names(group: object, prefix: str = "") -> dict[str, list[str]]:
    """Return the parameter names of each command; commands of a group are keyed "GROUP COMMAND"."""
    found: dict[str, list[str]] = {}
    for name, command in getattr(group, "commands", {}).items():
        if hasattr(command, "commands"):
            found |= _parameter_names(command, f"{prefix}{name} ")
        else:
            found[prefix + name] = [str(param.name) for param in command.params]
    return found


def _nest_groups(values: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Convert settings by command to click's `default_map`, in which groups are nested."""
    nested: dict[str, Any] = {}
    for path, settings in values.items():
        *groups, name = path.split()
        target = nested
        for group in groups:
            target = target.setdefault(group, {})
        target[name] = settings
    return nested


def main() -> None:
    """Run the command line; a ChatcacheError or the OSError of a file becomes a line on stderr and an exit code."""
    try:
        app()
    except ModelFolderError as error:
        print(f"chatcache: {error.message}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except ChatcacheError as error:
        print(f"chatcache: {error.message}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except OSError as error:
        if not isinstance(error.filename, str | os.PathLike):
            raise
        print(f"chatcache: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
