"""`chatcache db`: back up, export and import conversations, and assign owners.

All commands work while a server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from chatcache.auth import owner_name
from chatcache.cli import options
from chatcache.config import ServerConfig, format_size
from chatcache.conversations.store import (
    ConversationStore,
    OwnerAssignment,
    StoreUnavailableError,
    StoreUnusableError,
)
from chatcache.errors import ChatcacheError, InvalidRequestError
from chatcache.storage.sqlite import SqliteSnapshot, SqliteStore, back_up
from chatcache.transfer.archive import (
    ConversationSource,
    check_archive,
    restore,
    write_archive,
)

DB = ServerConfig().db
REDIS_TIMEOUT_S = 30.0
STDOUT = Path("-")

app = typer.Typer(
    name="db",
    cls=options.CommandGroup,
    help="Back up, export and import all conversations; assign an owner. Works while a server runs.",
    no_args_is_help=True,
)

# Also read from the environment and the settings file: with conversations in Redis, a copy of the SQLite file of --db
# would not contain them.
NoRedis = Annotated[str, typer.Option("--redis", envvar=options.env("redis"), hidden=True)]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")]
File = Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, show_default=False)]


@app.command()
def backup(file: File, db: options.DbFile = DB, redis: NoRedis = "", force: Force = False) -> None:
    """Copy the SQLite file of --db and check the copy.

    To restore: stop the server, replace the file of --db by FILE, remove its -wal and -shm files. For a Redis server,
    copy the folder with its append-only files, or use `chatcache db export`.
    """
    if redis:
        raise typer.BadParameter(
            "only SQLite files can be copied. For a Redis server, copy the folder with its append-only files, or use "
            "`chatcache db export`.",
            param_hint="--redis",
        )
    if file == STDOUT:
        raise ChatcacheError("a backup is a file; `chatcache db export -` writes the conversations to stdout")
    with _new_file(file, force, db) as partial:
        num_bytes = back_up(Path(db), partial)
    typer.echo(f"{file}: {format_size(num_bytes)}, checked")


@app.command("export")
def export_(
    context: typer.Context, file: File, db: options.DbFile = DB, redis: options.RedisUrl = "", force: Force = False
) -> None:
    """Write the conversations of all owners, with token ids, to a file of JSON lines.

    FILE can be a pipe, a device such as /dev/stdout, or - for stdout.

    Example: chatcache db export - | gzip > monday.jsonl.gz
    """
    options.refuse_two_stores(context)
    is_stream = file == STDOUT or file.is_fifo() or file.is_char_device()

    async def run() -> None:
        async with open_source(db, redis) as source:
            with _open_stream(file) if is_stream else _open_new(file, force, "" if redis else db) as out:
                end = await write_archive(source, out.write)
        typer.echo(f"{file}: {end.num_conversations} conversations, {end.num_items} messages", err=is_stream)

    asyncio.run(run())


@app.command("import")
def import_(context: typer.Context, file: File, db: options.DbFile = DB, redis: options.RedisUrl = "") -> None:
    """Add the conversations of an exported file that are not in the store.

    Existing data is not changed. The whole file is checked first; nothing is added from a damaged one. Exit code 1 if a
    conversation could not be added.
    """
    options.refuse_two_stores(context)
    if file == STDOUT or file.is_fifo() or file.is_char_device():
        raise ChatcacheError(
            f"{file}: an import is read twice, so it cannot come from a pipe; write it to a file first"
        )

    async def run() -> int:
        async with _open_store(db, redis) as store:
            done = await restore(store, file, lambda warning: typer.echo(f"chatcache: {warning}", err=True))
        typer.echo(
            f"{file}: {done.num_created} conversations added, {done.num_extended} extended, {done.num_unchanged} "
            f"unchanged, {done.num_refused} refused; {done.num_items} messages added"
        )
        return options.EXIT_ERROR if done.num_refused else 0

    try:
        end = check_archive(file)
        code = asyncio.run(run())
    except OSError as error:
        raise ChatcacheError(f"{file}: {error.strerror}") from error
    if end.num_keys:
        typer.echo(
            f"{file}: the file lists {end.num_keys} keys, which are not imported, as exports contain no secrets; "
            "without keys the server is open to every client: create one with `chatcache keys create`"
        )
    raise typer.Exit(code)


@app.command("assign-owner")
def assign_owner(
    context: typer.Context,
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant that becomes the owner.", show_default=False)],
    user: Annotated[str, typer.Option("--user", help="User of the tenant; default: the tenant itself.")] = "",
    db: options.DbFile = DB,
    redis: options.RedisUrl = "",
) -> None:
    """Assign the conversations that were created before the server had keys to an owner.

    The owner must have a key. Works while a server runs. A conversation in which an answer is being generated is
    skipped: run the command again later.

    Example: chatcache db assign-owner --tenant acme --user ann
    """
    options.refuse_two_stores(context)
    try:
        owner = owner_name(tenant, user)
    except InvalidRequestError as error:
        raise typer.BadParameter(f"{error.message}.", param_hint=f"--{error.param}") from None
    if not redis and not Path(db).is_file():
        raise ChatcacheError(f"no such file: {Path(db).absolute()}; --db must name the file of the server")

    async def run() -> OwnerAssignment:
        async with _open_store(db, redis) as store:
            if not any(key.owner == owner and key.revoked_at is None for key in await store.keys.list()):
                flags = f"--tenant {tenant}{f' --user {user}' if user else ''}"
                raise ChatcacheError(
                    f"{owner} has no key to read them with; create one with `chatcache keys create {flags}`"
                )
            return await store.assign_owner("", owner)

    assigned = asyncio.run(run())
    typer.echo(f"{assigned.num_conversations} conversations assigned to {owner}")
    if assigned.num_busy:
        typer.echo(
            f"{assigned.num_busy} conversations were skipped, because a response is running in them, or was when the "
            "server was killed (until its next start); run the command again later",
            err=True,
        )


def check_redis(url: str) -> None:
    """Check that the Redis server of --redis can be used. Raises: StoreUnusableError, StoreUnavailableError."""
    from chatcache.storage.redis import check_server

    try:
        check_server(url)
    except StoreUnavailableError as error:
        raise StoreUnavailableError(
            f"the Redis server of --redis does not answer: {error.message.removesuffix('.')}; "
            f"{redis_remedy(error) or 'start it, or correct the URL'}"
        ) from error


def redis_remedy(error: StoreUnavailableError) -> str:
    """Return what to do about a TLS certificate that was not accepted; "" for other errors."""
    if "CERTIFICATE_VERIFY_FAILED" not in error.message:
        return ""
    if "mismatch" in error.message:
        return "use a host name or address of its certificate in the URL"
    return "trust its authority with &ssl_ca_certs=FILE in the URL"


@contextlib.asynccontextmanager
async def open_source(db: str, redis: str) -> AsyncIterator[ConversationSource]:
    """Open the store for reading.

    Raises: StoreUnusableError, StoreUnavailableError.
    """
    if not redis:
        snapshot = SqliteSnapshot(Path(db))
        try:
            yield snapshot
        finally:
            await snapshot.close()
        return
    from chatcache.storage.redis import RedisStore

    check_redis(redis)
    store = RedisStore(redis, timeout_s=REDIS_TIMEOUT_S)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def _open_store(db: str, redis: str) -> AsyncIterator[ConversationStore]:
    """Open the store for writing.

    Raises: StoreUnusableError, StoreUnavailableError.
    """
    if redis:
        from chatcache.storage.redis import RedisStore

        check_redis(redis)
        store: ConversationStore = RedisStore(redis, timeout_s=REDIS_TIMEOUT_S)
    else:
        store = SqliteStore(db, server_may_run=True)
    try:
        yield store
    finally:
        await store.close()


@contextlib.contextmanager
def _open_stream(path: Path) -> Iterator[BinaryIO]:
    """Open stdout, a pipe or a device. Raises: StoreUnusableError if it cannot be written."""
    try:
        with open(1, "wb", closefd=False) if path == STDOUT else path.open("wb") as out:
            yield out
    except OSError as error:
        raise StoreUnusableError(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _open_new(path: Path, force: bool, db: str) -> Iterator[BinaryIO]:
    with _new_file(path, force, db) as partial, partial.open("wb") as out:
        yield out


@contextlib.contextmanager
def _new_file(path: Path, force: bool, db: str) -> Iterator[Path]:
    """Yield a temporary file next to `path`, which is renamed to `path` after fsync.

    Only the current user may read it. Raises: StoreUnusableError if `path` cannot be written, exists and `force` is not
    set, is something else than a file, which a rename would remove, or belongs to the store `db` ("" for Redis), which
    a server may have open.
    """
    if path.exists() and not path.is_file():
        raise StoreUnusableError(f"{path} is not a regular file")
    path = Path(os.path.realpath(path))  # a rename would replace a symbolic link instead of its file
    for store in (f"{os.path.realpath(db)}{end}" for end in ("", "-wal", "-shm", "-lock") if db):
        if path == Path(store) or (path.exists() and Path(store).exists() and path.samefile(store)):
            raise StoreUnusableError(f"{path} belongs to the store itself; choose another file")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        if path.exists() and not force:
            raise FileExistsError
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            yield partial
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            _rename_complete(partial, path, force)
        finally:
            partial.unlink(missing_ok=True)
    except FileExistsError:
        raise StoreUnusableError(f"{path} already exists; use --force to replace it") from None
    except OSError as error:
        raise StoreUnusableError(f"{path} cannot be written: {error.strerror}") from error


def _rename_complete(partial: Path, path: Path, force: bool) -> None:
    """Rename a complete file and sync its folder.

    Raises: FileExistsError if another program created `path` in the meantime and `force` is not set.
    """
    if force:
        partial.replace(path)
    else:
        path.hardlink_to(partial)  # unlike a rename, a link never replaces a file
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
