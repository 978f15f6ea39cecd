"""OpenAI's paged lists, selected by `limit`, `order` and `after`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.gateway.schemas.responses import Page

MAX_LIMIT = 100
DEFAULT_LIMIT = 20
_MAX_DIGITS = 9
ORDERS = ("asc", "desc")


class Identified(Protocol):
    """An entry of a list, which clients name by its id."""

    id: str


Entry = TypeVar("Entry", bound=Identified)


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The page of a list that a client requests. `limit` None: all entries."""

    limit: int | None
    order: str
    after: str | None

    @classmethod
    def parse(cls, query: Mapping[str, str], *, order: str = "desc", limit: int | None = DEFAULT_LIMIT) -> PageQuery:
        """Parse a query string; `order` and `limit` are the defaults. Raises: InvalidRequestError."""
        wanted = query.get("order", order)
        if wanted not in ORDERS:
            raise InvalidRequestError("order must be asc or desc", param="order")
        text = query.get("limit")
        return cls(parse_limit(text) if text is not None else limit, wanted, query.get("after"))


def parse_limit(text: str) -> int:
    """Parse a `limit` parameter. Raises: InvalidRequestError."""
    return parse_number(text, "limit", 1, MAX_LIMIT)


def parse_number(text: str, name: str, minimum: int, maximum: int) -> int:
    """Parse a number of a path or query. Raises: InvalidRequestError with the bounds."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    if not is_number or not minimum <= int(text) <= maximum:
        raise InvalidRequestError(f"{name} must be between {minimum} and {maximum}", param=name)
    return int(text)


def paginate(entries: Sequence[Entry], query: PageQuery, *, is_ordered: bool = False) -> Page[Entry]:
    """Select one page of `entries`, which are in ascending order, or in that of the page if `is_ordered`.

    Raises: NotFoundError if `after` is not the id of an entry.
    """
    ordered = entries if is_ordered or query.order == "asc" else entries[::-1]
    start = 0
    if query.after is not None:
        at = next((at for at, entry in enumerate(ordered) if entry.id == query.after), None)
        if at is None:
            raise NotFoundError(f"after: this list has no {query.after[:128]!r}", param="after")
        start = at + 1
    end = len(ordered) if query.limit is None else start + query.limit
    return make_page(ordered[start:end], has_more=end < len(ordered))


def make_page(data: Sequence[Entry], *, has_more: bool) -> Page[Entry]:
    """Build a page of `data`."""
    first_id, last_id = end_ids(data)
    return Page("list", list(data), first_id, last_id, has_more)


def end_ids(data: Sequence[Identified]) -> tuple[str, str] | tuple[None, None]:
    """Return the ids of the first and the last entry."""
    return (data[0].id, data[-1].id) if data else (None, None)
