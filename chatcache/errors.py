"""Errors that are reported to callers, with HTTP status, OpenAI `type`, `code` and `param`.

All packages raise these. The gateway translates them into error responses, and the CLI into exit codes. Any other
exception is a bug: the client receives `internal_error`, without the text of the exception.
"""

from __future__ import annotations


class ChatcacheError(Exception):
    """Base class of all errors that are reported to the caller.

    `param` is the invalid field of the request (OpenAI's `error.param`), `code` a stable machine-readable name.
    """

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(ChatcacheError):
    """A field is missing, has the wrong type or is out of range.

    The message names the field and the limit.
    """

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedParameterError(InvalidRequestError):
    """A known parameter that is not supported, and would change the result if ignored."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """The prompt plus the requested output exceed the model's context or the KV pool.

    The message has the numbers.
    """

    code = "context_length_exceeded"


class NotFoundError(ChatcacheError):
    """A resource that the request names does not exist, or belongs to another tenant."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class OverloadedError(ChatcacheError):
    """The engine accepts no new requests at present (queue full, model loading, draining).

    Clients should retry.
    """

    status = 503
    type = "server_error"
    code = "overloaded"


class RateLimitError(ChatcacheError):
    """An API key or a tenant has reached its limit, although the server has capacity.

    The client can retry after `retry_after_s`.
    """

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after_s: int = 1, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class QuotaExceededError(RateLimitError):
    """The daily token quota of an API key is used up; retrying before the next day is useless."""

    code = "insufficient_quota"


class EngineError(ChatcacheError):
    """The execution of this request failed; other requests are not affected."""

    code = "engine_error"


class DeviceLostError(EngineError):
    """The device has failed for good (a sticky CUDA error); the engine process has to exit."""

    code = "device_lost"


class RequestPoisonedError(EngineError):
    """The request crashed the engine process twice, the second time alone; it is not retried."""

    code = "request_poisoned"


class ModelFolderError(ChatcacheError):
    """The model folder cannot be loaded. The message names the file and the reason."""

    code = "model_folder_error"
