"""The catalogue of errors a user can meet; each knows its HTTP status, OpenAI `type`, `code` and `param`.

Rooms raise these (or return values); only the gateway turns them into wire bodies, only the CLI into exit codes.
Anything else that escapes a room is a bug and ends as `internal_error`, never as its own text on the wire.
"""

from __future__ import annotations


class ChatcacheError(Exception):
    """Base of every error with a meaning for the caller.

    `param` is the field at fault (OpenAI's `error.param`), `code` the stable machine-readable name.
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
    """A field is missing, of the wrong type or out of its bounds. The message names the field and the limit."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class UnsupportedParameterError(InvalidRequestError):
    """A known field whose honouring would change the result, which chatcache does not do."""

    code = "unsupported_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output can never fit the model's context or the KV pool; the numbers are in the message."""

    code = "context_length_exceeded"


class NotFoundError(ChatcacheError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class OverloadedError(ChatcacheError):
    """The engine refuses new work for now (queue full, model loading, draining). Clients should retry."""

    status = 503
    type = "server_error"
    code = "overloaded"


class RateLimitError(ChatcacheError):
    """More than a key or a tenant may take for now; the server itself has room. Waiting `retry_after_s` helps."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after_s: int = 1, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class QuotaExceededError(RateLimitError):
    """A key's tokens of the day are used up. Trying again before the day is over is no use."""

    code = "insufficient_quota"


class EngineError(ChatcacheError):
    """Something failed while this request was executing; only this request ends."""

    code = "engine_error"


class DeviceLostError(EngineError):
    """The device answers no more (a sticky CUDA error): this process must end, and say why."""

    code = "device_lost"


class RequestPoisonedError(EngineError):
    """The engine died of this request, and died again when it ran alone; it is not tried once more."""

    code = "request_poisoned"


class ModelFolderError(ChatcacheError):
    """The model folder cannot be served. The message names the file and the reason."""

    code = "model_folder_error"
