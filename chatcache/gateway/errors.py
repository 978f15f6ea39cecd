"""Errors of the gateway and their HTTP responses: one JSON envelope for every route and every cause."""

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
    """The server drains: what runs may finish."""

    code = "shutting_down"


class ModelLoadingError(OverloadedError):
    """The model is not there yet."""

    code = "model_loading"


INTERNAL_ERROR = ChatcacheError("something went wrong on the server; the log has the details under this request id")


def error_body(error: ChatcacheError) -> ErrorDetail:
    """The value of `"error"`. A writer with a stale revision also gets the conversation as it is now."""
    if isinstance(error, StaleRevisionError):
        return ConflictDetail(error.message, error.type, error.param, error.code, Conversation.from_head(error.current))
    return ErrorDetail(error.message, error.type, error.param, error.code)


def retry_after_s(error: ChatcacheError) -> int | None:
    """When to try again; None where that does not help."""
    if isinstance(error, RateLimitError):
        return error.retry_after_s
    return _RETRY_AFTER_S if error.status in (429, 503) else None


def error_headers(error: ChatcacheError) -> dict[str, str]:
    """Headers that tell a client what to do about it."""
    if error.status in (429, 503):
        stop = {"x-should-retry": "false"} if isinstance(error, QuotaExceededError) else {}
        return {"retry-after": str(retry_after_s(error)), **stop}
    if error.status == 409 or error.code == RequestPoisonedError.code:
        return {"x-should-retry": "false"}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    # What is left of a refused body is not read.
    return {"connection": "close"} if error.status in (408, 413) else {}


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


def error_response(error: ChatcacheError) -> Response:
    return json_response(Error(error_body(error)), error.status, error_headers(error))


async def on_chatcache_error(request: Request, error: Exception) -> Response:
    return _refusal(request, error if isinstance(error, ChatcacheError) else INTERNAL_ERROR)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router in the envelope."""
    if not isinstance(error, HTTPException):
        return _refusal(request, INTERNAL_ERROR)
    status, path = error.status_code, request.scope["path"]
    wire = ChatcacheError(error.detail or HTTPStatus(status).phrase)
    if status == 404:
        wire = ChatcacheError(f"no route {request.method} {path}", code="not_found")
    elif status == 405:
        allowed = (error.headers or {}).get("Allow", "")
        wire = ChatcacheError(f"{path} does not take {request.method}; it takes {allowed}", code="method_not_allowed")
    elif status < 500:
        wire.code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    wire.status = status
    wire.type = "invalid_request_error" if status < 500 else "server_error"
    response = _refusal(request, wire)
    response.headers.update(error.headers or {})
    return response


def _refusal(request: Request, error: ChatcacheError) -> Response:
    request.app.state.gateway.metrics.record_refusal(error)
    return error_response(error)
