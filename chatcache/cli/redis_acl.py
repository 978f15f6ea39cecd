"""`chatcache redis-acl`: the one user of a Redis server that is ours alone, its rights, and its password in a file."""

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

NAME = "chatcache"
RIGHTS = "~chatcache:* &chatcache:* +@all -@scripting -@admin -@dangerous"
ACL_FILE = "users.acl"
PASSWORD_FILE = "password"
LEAST_CHARACTERS = 16

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
    """Write a password and an ACL file for a Redis server: one user, limited to keys of chatcache, without scripts.

    Start Redis with `--aclfile FOLDER/users.acl`; its URL is then
    redis://chatcache@HOST:6379/0?password_file=FOLDER/password. Existing files are kept.
    """
    if password and (len(password) < LEAST_CHARACTERS or not password.isprintable() or " " in password):
        raise typer.BadParameter(
            f"a password has {LEAST_CHARACTERS} or more characters, no spaces.", param_hint="CHATCACHE_REDIS_PASSWORD"
        )
    file = folder / PASSWORD_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = file.read_text(encoding="utf-8") if file.exists() else ""
        wanted = password or kept or secrets.token_urlsafe(32)
        _put(file, wanted, 0o640)
        _put(folder / ACL_FILE, acl(wanted), 0o644)  # it has a digest; Redis runs as another user
    except OSError as error:
        raise ChatcacheError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    what = "kept" if wanted == kept else "given" if password else "made"
    typer.echo(f"the password of the Redis user {NAME!r} is in {file} ({what})")


def acl(password: str) -> str:
    """The ACL file: nobody else gets in, and who reads the file cannot either.

    Redis reads its append-only file back as the default user, and drops every transaction that this user may not do
    (redis issue 14541): nobody can log in as that one, but it has all rights.
    """
    digest = hashlib.sha256(password.encode()).hexdigest()
    return f"user default off resetpass ~* &* +@all\nuser {NAME} on #{digest} {RIGHTS}\n"


def _put(path: Path, text: str, mode: int) -> None:
    """Write a file whole, with that mode from the beginning; one that says the same already stays."""
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
