"""Whose conversations, and whose pages: an owner is a tenant, or one user of it as "tenant/user"."""

from __future__ import annotations

import re

from chatcache.errors import InvalidRequest

MAX_NAME_CHARS = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def owner_name(tenant: str, user: str = "") -> str:
    """The owner of a user's conversations; of the tenant's own without a user. Raises: InvalidRequest for a name."""
    check_name(tenant, "tenant")
    if not user:
        return tenant
    return f"{tenant}/{check_name(user, 'user')}"


def namespace_of(owner: str) -> str:
    """The tenant of an owner: its users share pages, and nothing else."""
    return owner.partition("/")[0]


def check_name(name: str, param: str) -> str:
    """Raises: InvalidRequest unless it is 1 to 64 letters, digits, `_`, `.` or `-`."""
    if not _NAME.fullmatch(name):
        message = f"{param} must be 1 to {MAX_NAME_CHARS} letters, digits, '_', '.' or '-', got {name!r}"
        raise InvalidRequest(message, param=param)
    return name
