"""What crosses the bus: commands go to the engine, notices come back."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from chatcache.bus.faults import Fault
from chatcache.config import EngineConfig
from chatcache.logs import LogFormat
from chatcache.types.events import EngineEvent
from chatcache.types.health import EngineHealth
from chatcache.types.model import ModelFacts
from chatcache.types.pages import Explanation, PackedPrompt, PageAccounts, PageMap
from chatcache.types.request import GenerateRequest


class Boot(msgspec.Struct, frozen=True, tag="boot"):
    """First command to a child: build the engine `factory` ("module:function") makes of `config`."""

    factory: str
    config: EngineConfig
    log_level: str = "info"
    log_format: LogFormat = "text"


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    call: int
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Arguments as of `EngineClient.drop`."""

    call: int
    request_id: str
    index: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    call: int
    what: Literal["accounts", "stats", "reset_prefix_cache"]


class Explain(msgspec.Struct, frozen=True, tag="explain"):
    """Arguments as of `EngineClient.explain`."""

    call: int
    prompt: tuple[int, ...]
    namespace: str = ""
    num_public_tokens: int = 0
    operator: bool = False


class CountCached(msgspec.Struct, frozen=True, tag="count_cached"):
    """Arguments as of `EngineClient.num_cached`."""

    call: int
    prompts: tuple[PackedPrompt, ...]
    namespace: str = ""


class MapPages(msgspec.Struct, frozen=True, tag="map_pages"):
    """Arguments as of `EngineClient.page_map`."""

    call: int
    namespace: str = ""
    operator: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop; what still runs is dropped."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    fraction: float
    detail: str


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    facts: ModelFacts
    health: EngineHealth


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    fault: Fault


class Ending(msgspec.Struct, frozen=True, tag="ending"):
    """The engine ends, of this; no event follows."""

    fault: Fault


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Reply to `call`: `fault`, or `value` (None for an accepted submit)."""

    call: int
    fault: Fault | None = None
    value: Any = None


class Explained(msgspec.Struct, frozen=True, tag="explained"):
    """Reply to an `Explain`."""

    call: int
    value: Explanation


class Accounted(msgspec.Struct, frozen=True, tag="accounted"):
    """Reply to an `Ask` for the accounts."""

    call: int
    value: PageAccounts


class Mapped(msgspec.Struct, frozen=True, tag="mapped"):
    """Reply to a `MapPages`."""

    call: int
    value: PageMap


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """Prompt log-probabilities of a request whose `Started` comes behind without them.

    There may be hundreds of thousands: they travel in parts, and stay encoded until somebody reads them.
    """

    request_id: str
    part: bytes


class Events(msgspec.Struct, frozen=True, tag="events"):
    """One step's events; `health` is there when the last one told is older than a moment."""

    events: tuple[EngineEvent, ...] = ()
    health: EngineHealth | None = None


Command = Boot | Submit | Abort | Drop | Ask | Explain | CountCached | MapPages | Stop
Reply = Answer | Explained | Accounted | Mapped
Notice = Loading | Loaded | LoadFailed | Ending | Reply | Scored | Events
