"""What may stand behind the `?` of a path, for the table."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from chatcache.types.params import MAX_TOP_LOGPROBS


class ListQuery(msgspec.Struct):
    """How lists are paged."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None


class InputItemsQuery(msgspec.Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class RetrieveQuery(msgspec.Struct):
    """`stream`: its events, those behind `starting_after`."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None


class ItemsQuery(msgspec.Struct):
    """Which items: a page of the path to `leaf` (the active leaf), or all branches in one piece, oldest first."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    leaf: str | None = None
    branches: Literal["all"] | None = None


class SearchQuery(ListQuery):
    """`query`: words that must all be in the title or in one message; the last may be the beginning of one."""

    query: Annotated[str, Meta(max_length=4096)] | None = None


class ExportQuery(msgspec.Struct):
    """`branch`: the message at which it ends, or "all". JSON is of all branches by default, Markdown of the active."""

    format: Literal["json", "markdown"] = "json"
    branch: str | None = None


class ImportQuery(msgspec.Struct):
    """`dry_run`: tell what would happen, and change nothing."""

    dry_run: bool = False


class TokenQuery(msgspec.Struct):
    """`top`: how many of the likeliest to tell."""

    top: Annotated[int, Meta(ge=1, le=MAX_TOP_LOGPROBS)] = 8


class RevQuery(msgspec.Struct):
    """The revision that the client has seen: anything else is a 409."""

    rev: Annotated[int, Meta(ge=0, le=10**15 - 1)] | None = None
