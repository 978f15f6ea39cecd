"""Requests that are still running when the server stops waiting for them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from chatcache.gateway.limits.rate_limits import RateLimiter
from chatcache.gateway.metrics import Metrics
from chatcache.gateway.middleware import RequestContextMiddleware
from tests.gateway.serving import Server, slowed, wait_until


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


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": ["Hi", "Ho"]}),
    ],
)
def test_stream_that_the_server_ends_has_an_error_and_no_finish_reason(
    server: Server, path: str, prompt: dict[str, Any]
) -> None:
    service = server.gateway.loaded_model().service
    with ThreadPoolExecutor(1) as pool, slowed(server, 0.02):
        streamed = pool.submit(server.stream, path, **prompt, n=2, max_tokens=900, ignore_eos=True)
        wait_until(lambda: service.num_live == len(prompt.get("prompt", "x")), "the requests")
        begun = server.runner.num_steps
        wait_until(lambda: server.runner.num_steps > begun + 3, "some tokens")
        server.call(service.abort_live())
        *chunks, error = map(json.loads, re.findall(rb"data: ({.*})\n\n", streamed.result()[1]))
    assert error["error"]["code"] == "shutting_down"
    assert {choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]} == {None}
