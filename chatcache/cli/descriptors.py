"""How many descriptors this process may have open, and how many of them connections."""

from __future__ import annotations

import contextlib
import sys

if sys.platform != "win32":
    import resource

KEPT_DESCRIPTORS = 128


def _most() -> int:
    if sys.platform == "win32":
        return sys.maxsize
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if most != resource.RLIM_INFINITY else sys.maxsize


def raise_most() -> None:
    """Take all the system allows; shells and service managers give 1,024 where it would allow thousands."""
    if sys.platform != "win32":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # macOS: "unlimited" is more than it takes
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """How many may be open at once, so that files, and a new engine, always find a descriptor of this process free."""
    most = _most()
    return max(most // 2, most - KEPT_DESCRIPTORS)
