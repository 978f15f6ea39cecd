"""One request that outlives its engines."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from chatcache.bus.messages import Scored
from chatcache.bus.told import Told

PAST_TOKENS = 3  # of each candidate: the step that was being computed, and one that may have been launched behind it


class Place(enum.Enum):
    ENGINE = enum.auto()
    HELD = enum.auto()
    TRIAL = enum.auto()
    ASIDE = enum.auto()


@dataclass(slots=True, eq=False)
class Survivor:
    """A request from its submit to its end. `call` waits for the engine's verdict until it `is_accepted`.

    `scores`: of its prompt, kept back until `Started` comes.
    """

    call: int
    told: Told
    place: Place = Place.HELD
    is_accepted: bool = False
    is_aborted: bool = False
    is_suspect: bool = False
    num_lone_deaths: int = 0
    num_tokens_past: int = 0
    scores: list[Scored] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.told.request.request_id

    def set_place(self) -> None:
        """Note how far it has to come, alone, to be innocent."""
        self.num_tokens_past = self.told.num_tokens + PAST_TOKENS * self.told.num_alive

    @property
    def is_past(self) -> bool:
        """Whether it has outlived, on trial, what it had come to when the engine died."""
        told = self.told
        return told.num_tokens >= self.num_tokens_past if told.is_plain else told.has_started
