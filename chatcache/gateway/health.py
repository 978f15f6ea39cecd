"""Liveness, readiness and metrics routes.

The server is not ready while it cannot generate or read its store.
"""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.store import StoreUnavailableError
from chatcache.errors import ChatcacheError, OverloadedError
from chatcache.gateway.api.conversations import store_of
from chatcache.gateway.auth.principal import optional_principal
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import ModelLoadingError, ShuttingDownError, error_body, error_headers, json_response
from chatcache.gateway.metrics import CONTENT_TYPE
from chatcache.gateway.schemas.server import Alive, NotReady, Ready


async def livez(request: Request) -> Response:
    """GET /livez: the process responds."""
    return json_response(Alive("alive"))


async def readyz(request: Request) -> Response:
    """GET /readyz and /health: whether the server can serve requests, with progress of loading."""
    gateway = gateway_of(request)
    health = await gateway.health()
    if gateway.admission.is_closed:
        return _not_ready(gateway, "unavailable", 1.0, ShuttingDownError("the server is shutting down"))
    if health.ready and gateway.model is not None:
        try:
            gateway.key_cache.check_loaded()
            await store_of(request).check()
        except StoreUnavailableError as store_error:
            return _not_ready(gateway, "unavailable", 1.0, store_error)
        ready = Ready("ready", gateway.model_name, health.max_model_len)
        if optional_principal(request) is not None:  # health probes come without a key and must not see the load
            ready.num_running, ready.num_waiting = health.num_running, health.num_waiting
            ready.kv_pages, ready.kv_pages_in_use = health.num_pages, health.num_pages_in_use
        return json_response(ready)
    detail = gateway.load_error or (health.detail if not health.ready else "loading the tokenizer")
    failed = gateway.load_error is not None or gateway.engine_seen_ready
    error: ChatcacheError = ModelLoadingError(detail or "the model is still loading")
    if gateway.engine_seen_ready and not health.ready:
        error = OverloadedError(detail, code="engine_unavailable")
    return _not_ready(gateway, "unavailable" if failed else "loading", round(health.load_fraction, 3), error)


def _not_ready(
    gateway: Gateway, status: Literal["loading", "unavailable"], progress: float, error: ChatcacheError
) -> Response:
    body = NotReady(status, gateway.model_name, error.message, progress, error_body(error))
    return json_response(body, error.status, error_headers(error))


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus metrics."""
    gateway = gateway_of(request)
    text = gateway.metrics.render(await gateway.health())
    return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE})
