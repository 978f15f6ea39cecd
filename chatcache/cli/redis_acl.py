"""`chatcache redis-acl`: write a password file and an ACL file for a Redis server."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from chatcache.cli.options import env
from chatcache.errors import ChatcacheError

USER = "chatcache"
PERMISSIONS = "~chatcache:* &chatcache:* +@all -@scripting -@admin -@dangerous"
REPLICA_PERMISSIONS = (
    "+psync +replconf +ping"  # https://redis.io/docs/latest/operate/oss_and_stack/management/security/acl/
)
SENTINEL_PERMISSIONS = (
    "&* +multi +exec +replicaof +slaveof +ping +subscribe +publish +role +info +config|rewrite "
    "+client|setname +client|kill +script|kill"
)
ACL_FILE = "users.acl"
PASSWORD_FILE = "password"
MIN_PASSWORD_CHARS = 16

Password = Annotated[
    str,
    typer.Option(
        "--password",
        envvar=env("redis-password"),
        show_envvar=False,
        help="Use this password instead of a generated one.",
        show_default=False,
    ),
]


def redis_acl(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", file_okay=False, show_default=False)],
    password: Password = "",
) -> None:
    """Write a password file and an ACL file for a Redis server.

    The user `chatcache` may access keys of chatcache only and may not run scripts. The users `replica` and `sentinel`
    are for replicas and Sentinels. All have the same password; an existing one is kept. Start Redis with
    `--aclfile FOLDER/users.acl`; its URL is then redis://chatcache@HOST:6379/0?password_file=FOLDER/password.
    """
    if password and (len(password) < MIN_PASSWORD_CHARS or not password.isprintable() or " " in password):
        raise typer.BadParameter(
            f"a password has at least {MIN_PASSWORD_CHARS} characters and no spaces.",
            param_hint="CHATCACHE_REDIS_PASSWORD",
        )
    file = folder / PASSWORD_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = file.read_text(encoding="utf-8") if file.exists() else ""
        wanted = password or kept or secrets.token_urlsafe(32)
        _write_file(file, wanted, 0o640)
        _write_file(
            folder / ACL_FILE, acl_file(wanted), 0o644
        )  # contains only a digest, and Redis runs as another user
    except OSError as error:
        raise ChatcacheError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    origin = "kept" if wanted == kept else "given" if password else "generated"
    typer.echo(f"the password of the Redis user {USER!r} is in {file} ({origin})")


def acl_file(password: str) -> str:
    """Return the ACL file, which contains a digest instead of the password.

    Logging in as the default user is disabled, but that user keeps all permissions: Redis replays its append-only file
    as the default user and drops every transaction that this user may not run (redis issue 14541).
    """
    digest = hashlib.sha256(password.encode()).hexdigest()
    users = {USER: PERMISSIONS, "replica": REPLICA_PERMISSIONS, "sentinel": SENTINEL_PERMISSIONS}
    lines = [f"user {name} on #{digest} {permissions}\n" for name, permissions in users.items()]
    return "user default off resetpass ~* &* +@all\n" + "".join(lines)


def _write_file(path: Path, text: str, mode: int) -> None:
    """Write a file atomically with permissions `mode`; keep one with the same content."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text(encoding="utf-8") == text:
            return
    partial = path.with_name(f".{path.name}.partial")
    with open(os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, mode), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
