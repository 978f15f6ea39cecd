"""Catalogued errors as data, and back."""

from __future__ import annotations

import msgspec

from chatcache.errors import (
    ChatcacheError,
    ContextTooLong,
    DeviceLost,
    EngineFault,
    InvalidRequest,
    ModelFolderError,
    NotFound,
    Overloaded,
    RateLimited,
    RequestPoisoned,
    UnsupportedParameter,
)

_KINDS: dict[str, type[ChatcacheError]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequest,
        UnsupportedParameter,
        ContextTooLong,
        NotFound,
        Overloaded,
        RateLimited,
        EngineFault,
        DeviceLost,
        RequestPoisoned,
        ModelFolderError,
    )
}


class Fault(msgspec.Struct, frozen=True):
    """A `ChatcacheError` as data. `kind` is the name of its class, one of `_KINDS`."""

    kind: str
    message: str
    code: str
    param: str | None = None


def to_fault(error: BaseException) -> Fault:
    """Describe an error as data; what is not in the catalogue becomes an `EngineFault` naming its type."""
    if isinstance(error, ChatcacheError):
        kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
        return Fault(next(kinds, EngineFault.__name__), error.message, error.code, error.param)
    return Fault(EngineFault.__name__, f"{type(error).__name__}: {error}", EngineFault.code)


def from_fault(fault: Fault) -> ChatcacheError:
    """Rebuild the catalogued error a fault describes."""
    kind = _KINDS.get(fault.kind, EngineFault)
    return kind(fault.message, param=fault.param, code=fault.code)
