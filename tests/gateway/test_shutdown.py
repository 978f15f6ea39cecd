"""Requests that are still running when the server stops waiting for them."""

from __future__ import annotations

import asyncio
import socket

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send

from chatcache.gateway.limits.rate_limits import RateLimiter
from chatcache.gateway.metrics import Metrics
from chatcache.gateway.middleware import RequestContextMiddleware


async def test_request_that_outlasts_the_shutdown_is_answered_503() -> None:
    started = asyncio.Event()

    async def wait_forever(scope: Scope, receive: Receive, send: Send) -> None:
        started.set()
        await asyncio.Event().wait()

    app = RequestContextMiddleware(wait_forever, Metrics(), RateLimiter())
    config = uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(timeout=60) as http:
            request = asyncio.create_task(http.get(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models"))
            await started.wait()
            server.should_exit = True
            answer = await request
        await serving
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert float(answer.headers["retry-after"]) > 0 and answer.headers["x-request-id"]
