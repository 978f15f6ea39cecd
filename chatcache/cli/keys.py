"""`chatcache keys`: create, list and revoke API keys, with or without a running server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from chatcache.auth import MAX_NAME_CHARS, KeyRecord, KeyStore, new_key
from chatcache.cli import options
from chatcache.cli.db import check_redis, open_source
from chatcache.config import ServerConfig
from chatcache.errors import ChatcacheError, InvalidRequestError
from chatcache.storage.open import open_keys

DB = ServerConfig().db
ALPHABET = f"1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 _ . -"

app = typer.Typer(
    name="keys",
    help="""Manage API keys. A running server applies changes within 5 seconds.

    A server is open until it has a key; from then on every client needs one, even if that key is revoked. A key belongs
    to a tenant, or to one of its users. Users of a tenant share cached pages; each user has their own conversations.
    """,
    no_args_is_help=True,
)

Json = Annotated[bool, typer.Option("--json", help="Write JSON.", show_default=False)]


def _limit(name: str, help: str) -> Any:
    return options.integer_option(f"--{name}", help=help, min=1, show_default="no limit")


@app.command()
def create(
    context: typer.Context,
    tenant: Annotated[
        str,
        typer.Option("--tenant", help=f"Tenant: a company, a team, an application ({ALPHABET}).", show_default=False),
    ],
    user: Annotated[
        str, typer.Option("--user", help=f"User of the tenant ({ALPHABET}); default: the tenant itself.")
    ] = "",
    name: Annotated[str, typer.Option("--name", help=f"Label of the key, for example laptop ({ALPHABET}).")] = "",
    admin: Annotated[
        bool, typer.Option("--admin", help="Administrator: may also read /metrics.", show_default=False)
    ] = False,
    requests_per_minute: Annotated[
        int | None, _limit("requests-per-minute", "Candidates requested per minute.")
    ] = None,
    tokens_per_minute: Annotated[int | None, _limit("tokens-per-minute", "Computed tokens per minute.")] = None,
    max_concurrent: Annotated[
        int | None, _limit("max-concurrent", "Candidates that run or wait at the same time.")
    ] = None,
    tokens_per_day: Annotated[int | None, _limit("tokens-per-day", "Computed tokens per day (UTC).")] = None,
    db: options.DbFile = DB,
    redis: options.RedisUrl = "",
    as_json: Json = False,
) -> None:
    """Create a key and print it once; only its SHA-256 is stored.

    Example: chatcache keys create --tenant acme --user ann --requests-per-minute 60
    """
    options.refuse_two_stores(context)
    try:
        key, record = new_key(
            tenant,
            user,
            name,
            is_admin=admin,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            max_concurrent=max_concurrent,
            tokens_per_day=tokens_per_day,
        )
    except InvalidRequestError as error:
        hint = f"--{(error.param or '').replace('_', '-')}"
        raise typer.BadParameter(f"{error.message}.", param_hint=hint) from None

    is_new_file = not redis and not Path(db).exists()
    is_first = asyncio.run(_save(record, db, redis))
    if is_new_file:
        path = Path(db).absolute()
        typer.echo(
            f"chatcache: {path} did not exist and was created. Start the server with --db {path}; a server with "
            "another file does not have this key, and stays open if it has no other.",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps({"key": key, **_public_fields(record)}))
    else:
        typer.echo(key)
        _print_notes(record, db, redis, is_first=is_first)


async def _save(record: KeyRecord, db: str, redis: str) -> bool:
    """Store a new key; return whether it is the only one of the store."""
    async with _open_keys(db, redis) as keys:
        await keys.create(record)
        return len(await keys.list()) == 1


def _print_notes(record: KeyRecord, db: str, redis: str, *, is_first: bool) -> None:
    """Print to stderr where a new key is stored and what it changes."""
    where = "the Redis server" if redis else str(Path(db).absolute())
    typer.echo(f"{record.id} for {record.owner}, in {where}. The key is not shown again.", err=True)
    typer.echo("Clients send it as `Authorization: Bearer KEY`; the page asks for it once.", err=True)
    if is_first:
        typer.echo("From now on every client needs a key.", err=True)
        if asyncio.run(_has_unowned_conversations(db, redis)):
            flags = f"--tenant {record.tenant}{f' --user {record.user}' if record.user else ''}"
            typer.echo(
                f"Earlier conversations have no owner; `chatcache db assign-owner {flags}` (same store) assigns one.",
                err=True,
            )


@app.command("list")
def list_(context: typer.Context, db: options.DbFile = DB, redis: options.RedisUrl = "", as_json: Json = False) -> None:
    """List all keys, including revoked ones, without their secrets.

    With --json, each key is one JSON object on its own line; without keys nothing is printed.
    """
    options.refuse_two_stores(context)

    async def run() -> list[KeyRecord]:
        async with _open_keys(db, redis, must_exist=True) as keys:
            return list(await keys.list())

    records = asyncio.run(run())
    if as_json:
        for record in records:
            typer.echo(json.dumps(_public_fields(record)))
        return
    if not records:
        typer.echo("There are no keys: the server is open, unless it has a key of --api-key.")
        return
    rows = [("ID", "OWNER", "NAME", "CREATED", "ACCESS", "LIMITS"), *map(_row, records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command()
def revoke(
    context: typer.Context,
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the key, as shown by `list`: key_...", show_default=False)
    ],
    db: options.DbFile = DB,
    redis: options.RedisUrl = "",
    as_json: Json = False,
) -> None:
    """Revoke a key permanently.

    Within 5 s running servers refuse it, close its sockets and end its streams. The owner's conversations are kept.
    """
    options.refuse_two_stores(context)

    async def run() -> KeyRecord:
        async with _open_keys(db, redis, must_exist=True) as keys:
            return await keys.revoke(key_id, time.time())

    record = asyncio.run(run())
    typer.echo(json.dumps(_public_fields(record)) if as_json else f"{record.id} of {record.owner} is revoked")


@contextlib.asynccontextmanager
async def _open_keys(db: str, redis: str, *, must_exist: bool = False) -> AsyncIterator[KeyStore]:
    """Open the keys of a store; `must_exist`: do not create a new SQLite file.

    Raises: ChatcacheError, StoreUnusableError, StoreUnavailableError.
    """
    if redis:
        await asyncio.to_thread(check_redis, redis)
    elif must_exist:
        await asyncio.to_thread(_check_file_exists, Path(db))
    async with open_keys(ServerConfig(db=db, redis=redis)) as keys:
        yield keys


async def _has_unowned_conversations(db: str, redis: str) -> bool:
    """Return whether the store has conversations without an owner; False if it cannot be read."""
    with contextlib.suppress(ChatcacheError):
        async with open_source(db, redis) as source:
            return bool(await source.list_ids("", 1))
    return False


def _check_file_exists(db: Path) -> None:
    """Raise ChatcacheError if there is no file, because opening it would create one."""
    if not db.is_file():
        raise ChatcacheError(f"no such file: {db.absolute()}; --db must name the file of the server")


def _public_fields(record: KeyRecord) -> dict[str, object]:
    """Return the fields of a key that may be printed, in JSON types."""
    return {
        "id": record.id,
        "tenant": record.tenant,
        "user": record.user,
        "name": record.name,
        "is_admin": record.is_admin,
        "requests_per_minute": record.requests_per_minute,
        "tokens_per_minute": record.tokens_per_minute,
        "max_concurrent": record.max_concurrent,
        "tokens_per_day": record.tokens_per_day,
        "created_at": record.created_at,
        "revoked_at": record.revoked_at,
    }


def _row(record: KeyRecord) -> tuple[str, ...]:
    limits = {
        "requests/min": record.requests_per_minute,
        "tokens/min": record.tokens_per_minute,
        "at once": record.max_concurrent,
        "tokens/day": record.tokens_per_day,
    }
    access = "admin" if record.is_admin else "use"
    if record.revoked_at is not None:
        access = f"none: revoked {_time(record.revoked_at)}"
    listed = ", ".join(f"{limit:,} {unit}" for unit, limit in limits.items() if limit is not None)
    return record.id, record.owner, record.name or "-", _time(record.created_at), access, listed or "-"


def _time(since_1970_s: float) -> str:
    return datetime.fromtimestamp(since_1970_s, UTC).strftime("%Y-%m-%d %H:%M")
