"""What the table says of one method of a path, and of one WebSocket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from chatcache.gateway.access import ACCESS


class Body(NamedTuple):
    """A request body: the fields of several structs as one object, under one name."""

    name: str
    kinds: tuple[type[msgspec.Struct], ...]
    required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path, as it is routed.

    `answer`: the type of a 200, None for text that is not JSON. `stream`: the type of each event where SSE is offered.
    `also`: media types of text that it can be instead. `takes`: those of a body that is a file. `errors`: statuses
    beside those every route may answer with; `failures`: bodies that are more than the envelope. `once`: takes an
    `Idempotency-Key`. Whether it needs a key is in `access.py`.
    """

    method: str
    path: str
    summary: str
    answer: object
    body: Body | None = None
    query: type[msgspec.Struct] | None = None
    stream: object = None
    media_type: str = "application/json"
    also: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    failures: Mapping[int, object] = field(default_factory=dict)
    once: bool = False

    @property
    def needs_key(self) -> bool:
        return ACCESS[self.path] != "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """A WebSocket: the messages it takes, by their `type`."""

    path: str
    summary: str
    messages: Mapping[str, Body]
