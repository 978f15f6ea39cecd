"""`chatcache doctor`: every check, a line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from chatcache.cli import exits, options
from chatcache.cli.doctor.findings import Finding, State
from chatcache.cli.options import env
from chatcache.config import EngineConfig, ServerConfig

SERVER = ServerConfig()
Url = Annotated[
    str | None,
    typer.Option(envvar=env("url"), show_envvar=False, help="Look at this running server instead of this machine."),
]
Key = Annotated[
    str | None,
    typer.Option("--api-key", envvar=env("api-key"), show_envvar=False, help="A key that opens that server."),
]
_MARKS = {State.GOOD: "[green]ok  [/]", State.WARNING: "[yellow]look[/]", State.BAD: "[red]bad [/]"}


def doctor(
    model: options.Model = "",
    url: Url = None,
    api_key: Key = None,
    host: options.Host = SERVER.host,
    port: options.Port = SERVER.port,
    db: options.Db = SERVER.db,
    redis: options.RedisUrl = SERVER.redis,
) -> None:
    """Look at this machine and these settings, or at a running server (--url), and say what to do about it.

    Ends with 1 if anything is bad.
    """
    console = Console(highlight=False, soft_wrap=True)
    findings = (
        _server(url, api_key)
        if url is not None
        else _here(
            model, ServerConfig(host=host, port=port, db=db, redis=redis, api_keys=(api_key,) if api_key else ())
        )
    )
    worst = State.GOOD
    for finding in findings:
        console.print(f"{_MARKS[finding.state]} [bold]{finding.what}[/]  {escape(finding.found)}")
        if finding.remedy:
            console.print(f"     [dim]{escape(finding.remedy)}[/]")
        worst = State.BAD if State.BAD in (worst, finding.state) else worst
    raise typer.Exit(exits.ERROR if worst is State.BAD else 0)


def _here(model: str, config: ServerConfig) -> Iterator[Finding]:
    from chatcache.cli.doctor.machine import machine
    from chatcache.cli.doctor.settings import settings

    yield from machine()
    yield from settings(EngineConfig(model=model), config)


def _server(url: str, api_key: str | None) -> Iterator[Finding]:
    from chatcache.cli.doctor.server import server

    yield from server(url, api_key)
