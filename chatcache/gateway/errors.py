"""Errors of the gateway and their responses: every error has the same JSON envelope."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.store import StaleRevisionError
from chatcache.errors import ChatcacheError, OverloadedError, QuotaExceededError, RateLimitError, RequestPoisonedError
from chatcache.gateway.json_codec import encode
from chatcache.gateway.schemas.errors import Error, ErrorDetail
from chatcache.gateway.schemas.responses import ConflictDetail, Conversation

_RETRY_AFTER_S = 1


class AuthenticationError(ChatcacheError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


def key_revoked_error() -> AuthenticationError:
    return AuthenticationError("this API key was revoked", code="api_key_revoked")


def session_expired_error() -> AuthenticationError:
    return AuthenticationError("the session has expired", code="session_expired")


class PermissionDeniedError(ChatcacheError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class BodyTooLargeError(ChatcacheError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class BodyTimeoutError(ChatcacheError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class UnsupportedMediaTypeError(ChatcacheError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class ShuttingDownError(OverloadedError):
    """The server is shutting down: it finishes running requests and accepts no new ones."""

    code = "shutting_down"


class ModelLoadingError(OverloadedError):
    """The model is not loaded yet."""

    code = "model_loading"


INTERNAL_ERROR = ChatcacheError("something went wrong on the server; the log has the details under this request id")


def error_body(error: ChatcacheError) -> ErrorDetail:
    """Return the value of `"error"`.

    A conflict over a stale revision also contains the current conversation.
    """
    if isinstance(error, StaleRevisionError):
        return ConflictDetail(error.message, error.type, error.param, error.code, Conversation.from_head(error.current))
    return ErrorDetail(error.message, error.type, error.param, error.code)


def retry_after_s(error: ChatcacheError) -> int | None:
    """Seconds after which a retry may succeed; None if a retry does not help."""
    if isinstance(error, RateLimitError):
        return error.retry_after_s
    return _RETRY_AFTER_S if error.status in (429, 503) else None


def error_headers(error: ChatcacheError) -> dict[str, str]:
    """Return headers that say whether and when to retry, and how to authenticate."""
    if error.status in (429, 503):
        no_retry = {"x-should-retry": "false"} if isinstance(error, QuotaExceededError) else {}
        return {"retry-after": str(retry_after_s(error)), **no_retry}
    if error.status == 409 or error.code == RequestPoisonedError.code:
        return {"x-should-retry": "false"}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    # The rest of a rejected body is not read, so the connection cannot be reused.
    return {"connection": "close"} if error.status in (408, 413) else {}


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


def error_response(error: ChatcacheError) -> Response:
    return json_response(Error(error_body(error)), error.status, error_headers(error))


async def on_chatcache_error(request: Request, error: Exception) -> Response:
    return _error_response(request, error if isinstance(error, ChatcacheError) else INTERNAL_ERROR)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Convert the router's 404 and 405 into the JSON envelope."""
    if not isinstance(error, HTTPException):
        return _error_response(request, INTERNAL_ERROR)
    status, path = error.status_code, request.scope["path"]
    public_error = ChatcacheError(error.detail or HTTPStatus(status).phrase)
    if status == 404:
        public_error = ChatcacheError(f"no route {request.method} {path}", code="not_found")
    elif status == 405:
        allowed = (error.headers or {}).get("Allow", "")
        public_error = ChatcacheError(
            f"{path} does not take {request.method}; it takes {allowed}", code="method_not_allowed"
        )
    elif status < 500:
        public_error.code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    public_error.status = status
    public_error.type = "invalid_request_error" if status < 500 else "server_error"
    response = _error_response(request, public_error)
    response.headers.update(error.headers or {})
    return response


def _error_response(request: Request, error: ChatcacheError) -> Response:
    request.app.state.gateway.metrics.record_refusal(error)
    return error_response(error)
