"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    GOOD = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """`found` is a fact; `remedy` is what to do, for all that is not good."""

    what: str
    state: State
    found: str
    remedy: str = ""


def good(what: str, found: str) -> Finding:
    return Finding(what, State.GOOD, found)


def warning(what: str, found: str, remedy: str) -> Finding:
    return Finding(what, State.WARNING, found, remedy)


def bad(what: str, found: str, remedy: str) -> Finding:
    return Finding(what, State.BAD, found, remedy)
