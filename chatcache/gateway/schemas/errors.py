"""The error envelope."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct):
    """`param` is the field at fault, `code` a stable name for the cause."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The one form of every refusal and failure."""

    error: ErrorDetail
