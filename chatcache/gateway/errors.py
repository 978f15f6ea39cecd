"""Errors of the gateway and their responses.

Every error has the same JSON envelope, except for the paths of Anthropic's and Ollama's APIs, which have theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from chatcache.conversations.store import StaleRevisionError
from chatcache.conversations.tree import ResponseElsewhereError
from chatcache.errors import (
    ChatcacheError,
    NotFoundError,
    OverloadedError,
    QuotaExceededError,
    RateLimitError,
    RequestPoisonedError,
)
from chatcache.gateway.json_codec import encode
from chatcache.gateway.schemas.anthropic import ErrorCode, MessagesError, MessagesErrorDetail
from chatcache.gateway.schemas.ollama import OllamaError
from chatcache.gateway.schemas.responses import ConflictDetail, Conversation
from chatcache.gateway.schemas.server import Error, ErrorDetail

REQUEST_ID = "chatcache.request_id"  # key of the request id in the ASGI scope
ERROR_CODE = "chatcache.error_code"  # key of the error's code, in a request that failed
MESSAGES_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"
# Routes of Ollama that manage its models, and those of features that this server has elsewhere or not at all.
_OLLAMA_REFUSALS = {
    **dict.fromkeys(
        ("pull", "push", "create", "copy", "delete", "blobs"),
        "this server has one model, chosen when it starts (chatcache serve MODEL)",
    ),
    **dict.fromkeys(("me", "signout", "web_search", "web_fetch"), "this server does not call ollama.com"),
}
THREAD_NOT_FOUND = "thread_not_found"
_RETRY_AFTER_S = 1
# Anthropic's error types by status; other statuses are `invalid_request_error` or `api_error`.
_MESSAGES_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


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


class GatewayUnreachableError(OverloadedError):
    """The gateway that runs the response does not answer."""

    code = "gateway_unreachable"


class LogUnreachableError(GatewayUnreachableError):
    """A gateway that may have the events of a response that has ended does not answer."""


class McpServerError(ChatcacheError):
    """An MCP server does not answer, or answers with an error or with something else than MCP."""

    status = 502
    type = "server_error"
    code = "mcp_server_error"


INTERNAL_ERROR = ChatcacheError("something went wrong on the server; the log has the details under this request id")


def unreachable_error() -> GatewayUnreachableError:
    return GatewayUnreachableError("the gateway that runs the response does not answer; try again in a moment")


def encode_error(error: ChatcacheError) -> dict[str, Any]:
    """Return the fields of an error, for another gateway."""
    names = ("message", "status", "type", "code", "param")
    return {name: getattr(error, name) for name in names}


def decode_error(fields: Mapping[str, Any]) -> ChatcacheError:
    """Return the error of another gateway."""
    error = NotFoundError(fields["message"]) if fields["status"] == 404 else ChatcacheError(fields["message"])
    if fields["code"] == GatewayUnreachableError.code:
        return GatewayUnreachableError(fields["message"])
    error.status, error.type, error.code, error.param = (fields[name] for name in ("status", "type", "code", "param"))
    return error


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
    if isinstance(error, ResponseElsewhereError):  # a retry may reach the gateway that runs the response
        return {}
    if error.status == 409 or error.code == RequestPoisonedError.code:
        return {"x-should-retry": "false"}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    # The rest of a rejected body is not read, so the connection cannot be reused.
    return {"connection": "close"} if error.status in (408, 413) else {}


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")


def is_messages_api(scope: Scope) -> bool:
    """Whether the path of the request belongs to Anthropic's Messages API."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def is_ollama_api(scope: Scope) -> bool:
    """Whether the path of the request belongs to Ollama's API."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.startswith(OLLAMA_PATH)


def messages_error(error: ChatcacheError, scope: Scope) -> MessagesError:
    """Build the error body of the Messages API."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    detail = MessagesErrorDetail(_MESSAGES_ERROR_TYPES.get(error.status, default), error.message)
    if error.code == THREAD_NOT_FOUND:
        detail.details = ErrorCode(error.code)
    return MessagesError(detail, scope.get(REQUEST_ID))


def error_response(error: ChatcacheError, scope: Scope) -> Response:
    """Build the response to a request that failed, in the envelope of the API that its path belongs to."""
    scope[ERROR_CODE] = error.code
    body: object = Error(error_body(error))
    if is_messages_api(scope):
        body = messages_error(error, scope)
    elif is_ollama_api(scope):
        body = OllamaError(error.message)
    return json_response(body, error.status, error_headers(error))


async def on_chatcache_error(request: Request, error: Exception) -> Response:
    return _error_response(request, error if isinstance(error, ChatcacheError) else INTERNAL_ERROR)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Convert the router's 404 and 405 into the JSON envelope."""
    if not isinstance(error, HTTPException):
        return _error_response(request, INTERNAL_ERROR)
    status, path = error.status_code, request.scope["path"]
    public_error = ChatcacheError(error.detail or HTTPStatus(status).phrase)
    if status == 404:
        public_error = ChatcacheError(_describe_missing(request), code="not_found")
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


_OPENAI_NAMES = ("chat", "completions", "responses", "conversations", "embeddings", "models")
_BASE_URLS = "the base URL of OpenAI's clients ends in /v1, that of Anthropic's and Ollama's does not"


def _describe_missing(request: Request) -> str:
    """Describe a route that does not exist; for those of Ollama and for those of a wrong base URL, say why."""
    missing = f"no route {request.method} {request.scope['path']}"
    path: str = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    if not is_ollama_api(request.scope):
        first_name = path.removeprefix("/").partition("/")[0]
        is_wrong_base = path.startswith(("/v1/v1/", "/v1/api/")) or first_name in _OPENAI_NAMES
        return f"{missing}: {_BASE_URLS}" if is_wrong_base else missing
    name = path.removeprefix(OLLAMA_PATH).partition("/")[0]
    return f"{missing}: {reason}" if (reason := _OLLAMA_REFUSALS.get(name)) else missing


def _error_response(request: Request, error: ChatcacheError) -> Response:
    request.app.state.gateway.metrics.record_refusal(error)
    return error_response(error, request.scope)
