"""/v1/session: a browser exchanges its API key for a session cookie."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from chatcache.gateway.auth.middleware import read_api_key, read_session_cookie
from chatcache.gateway.auth.principal import SESSION_LIFETIME_S, Principal, principal_of, set_cookie_header
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import AuthenticationError, json_response
from chatcache.gateway.schemas.server import Session, SessionDeleted


async def get_session(request: Request) -> Response:
    """GET /v1/session: the tenant and user of the request's key or cookie.

    Raises: see `principal_of`.
    """
    principal = principal_of(request)
    session = read_session_cookie(request.headers) if read_api_key(request.scope, request.headers) is None else None
    return json_response(_session(principal, session.expires_at if session is not None else None))


async def create_session(request: Request) -> Response:
    """POST /v1/session: exchange the API key for a cookie.

    The key itself is required: a session cookie cannot be used to get a new one and so to outlive its expiry.
    """
    principal = principal_of(request)
    if not principal.key_id:  # an open server
        return json_response(_session(principal, None))
    if read_api_key(request.scope, request.headers) is None:
        raise AuthenticationError("send the API key itself: Authorization: Bearer KEY")
    value, expires_at = gateway_of(request).key_cache.create_session(principal)
    headers = {"set-cookie": _cookie(request, value, SESSION_LIFETIME_S), "cache-control": "no-store"}
    return json_response(_session(principal, expires_at), headers=headers)


async def delete_session(request: Request) -> Response:
    """DELETE /v1/session: delete the cookie, also an invalid one."""
    headers = {"set-cookie": _cookie(request, "", 0), "cache-control": "no-store"}
    return json_response(SessionDeleted("session", deleted=True), headers=headers)


def _cookie(request: Request, value: str, max_age_s: int) -> str:
    path = gateway_of(request).config.root_path
    return set_cookie_header(value, max_age_s, path, secure=request.scope["scheme"] == "https")


def _session(principal: Principal, expires_at: int | None) -> Session:
    return Session(
        object="session",
        key_id=principal.key_id or None,
        tenant=principal.tenant,
        user=principal.owner.partition("/")[2],
        is_admin=principal.is_admin,
        expires_at=expires_at,
    )
