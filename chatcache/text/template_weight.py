"""How long a value would be if it was written out, or gone through in C, where no meter ticks.

A list that holds another twice, which holds another twice, and so on, takes a few words of memory and more time than
there is to print, to hash or to compare with its like.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import Any

from jinja2.exceptions import SecurityError

MAX_LENGTH = 8 << 20  # characters or entries of one value made within
_ENTRY = 32  # what an entry takes beside its text: a quarter of a million of them are too many, and soon counted
_DICT_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset, *_DICT_VIEWS)

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
COMPARING_TESTS = frozenset(
    ["==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge", "in"]
)


class TemplateTooCostly(SecurityError):
    """A template takes more time or memory than any chat needs."""


def is_container(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def weight(value: Any) -> int:
    """About the characters of a value written out, counted as often as it is there; not much beyond `MAX_LENGTH`."""
    if not is_container(value):
        return len(value) if isinstance(value, str) else 1
    total = 0
    walks: list[Iterator[Any]] = [_entries(value)]
    while walks:
        for each in walks[-1]:
            total += _ENTRY + (len(each) if isinstance(each, str) else 0)
            if total > MAX_LENGTH:
                return total
            if is_container(each):
                walks.append(_entries(each))
                break
        else:
            walks.pop()
    return total


def check_weight(*values: Any, times: int = 1) -> None:
    """Refuse what would be too long. Raises: TemplateTooCostly."""
    for value in values:
        if is_container(value) and weight(value) * times > MAX_LENGTH:
            raise TemplateTooCostly(
                f"the chat template makes a value of more than {MAX_LENGTH} characters with its entries"
            )


def check_comparison(left: Any, right: Any) -> None:
    """Two values are gone through in step: it is over as soon as the shorter is. Raises: TemplateTooCostly."""
    if is_container(left) and is_container(right) and weight(left) > MAX_LENGTH:
        check_weight(right)


def check_search(value: Any, within: Any) -> None:
    """A value is hashed, or compared with each entry. Raises: TemplateTooCostly."""
    check_weight(value, times=max(1, len(within)) if is_container(within) else 1)


def checked(value: Any) -> Any:
    """The value, if it is not too long. Raises: TemplateTooCostly."""
    check_weight(value)
    return value


def compared(names: Sequence[str], *values: Any) -> Any:
    """Compare as Python does, one after another."""
    found: Any = True
    for name, left, right in zip(names, values, values[1:], strict=False):
        (check_search if name in ("in", "notin") else check_comparison)(left, right)
        found = _COMPARISONS[name](left, right)
        if not found:
            break
    return found


def with_short_search(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def bounded(value: Any, other: Any) -> Any:
        check_comparison(value, other)
        check_search(value, other)
        return made(value, other)

    return bounded


def _entries(value: Iterable[Any]) -> Iterator[Any]:
    return chain(value.keys(), value.values()) if isinstance(value, dict) else iter(value)
