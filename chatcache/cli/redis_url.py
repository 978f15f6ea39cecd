"""URLs of Redis servers whose password stands in a file, and so in no command line and no environment."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

_MOST_CHARACTERS = 4096


def with_password(url: str) -> str:
    """The URL with the password of the file that its `password_file` names, if it names one.

    Raises: ValueError, OSError.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    name = query.pop("password_file", None)
    if name is None:
        return url
    if parts.password is not None:
        raise ValueError("it has a password and a password_file")
    with Path(name).open(encoding="utf-8") as file:
        password = file.read(_MOST_CHARACTERS).strip()
    if not password:
        raise ValueError(f"{name} is empty")
    user, _, where = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{where}", query=urlencode(query)))
