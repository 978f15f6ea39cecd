"""The JSON envelope of all errors."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct):
    """Description of an error.

    `param`: the request field that caused it. `code`: a stable, machine-readable name of the cause.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The body of every error response."""

    error: ErrorDetail
