"""A server with the real page and scripted replies at a chosen speed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from chatcache.gateway.static import Assets, RootFiles, index

SESSION = {
    "model": "scripted",
    "max_model_len": 8192,
    "limits": {"max_frame_bytes": 1 << 20, "max_n": 64, "max_beam_width": 64, "max_lanes": 16, "max_frames_per_s": 200},
}
START_TIMEOUT_S = 20.0


def frames(deltas: Sequence[str]) -> list[dict[str, Any]]:
    """Return the WebSocket frames of one response whose text is the joined deltas."""
    response = {"id": "resp_1", "status": "in_progress", "conversation": None, "input_item_ids": ["msg_1"]}
    position = {"item_id": "msg_2", "output_index": 0, "content_index": 0}
    text = "".join(deltas)
    usage = {"input_tokens": 40, "input_tokens_details": {"cached_tokens": 32}, "output_tokens": len(deltas)}
    item = {"id": "msg_2", "type": "message", "role": "assistant", "finish_reason": "stop"}
    frames: list[dict[str, Any]] = [
        {"type": "response.created", "response": response},
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}},
    ]
    frames += [{"type": "response.output_text.delta", **position, "delta": delta, "logprobs": []} for delta in deltas]
    frames += [
        {"type": "response.output_text.done", **position, "text": text, "logprobs": []},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": response | {"status": "completed", "usage": usage}},
    ]
    return [frame | {"sequence_number": number} for number, frame in enumerate(frames)]


class Script:
    """Deltas of the next replies, and their number per second."""

    def __init__(self) -> None:
        self.deltas: Sequence[str] = ("Hello.",)
        self.deltas_per_s = 1000.0

    async def serve(self, socket: WebSocket) -> None:
        """Answer every `response.create` of one connection."""
        await socket.accept(subprotocol="chatcache.v1")
        await socket.send_json({"type": "session.created", "session": SESSION})
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                frame = await socket.receive_json()
                if frame["type"] == "response.create" and frame.get("generate") is not False:
                    async for outgoing in self._paced():
                        await socket.send_json(outgoing | {"stream_id": frame["stream_id"]})

    async def _paced(self) -> AsyncIterator[dict[str, Any]]:
        started = time.perf_counter()
        for number, frame in enumerate(frames(self.deltas)):
            ahead = number / self.deltas_per_s - (time.perf_counter() - started)
            if ahead > 0:
                await asyncio.sleep(ahead)
            yield frame


@contextlib.contextmanager
def scripted(script: Script) -> Iterator[str]:
    """Run a server with this script and yield its URL."""

    async def nothing(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None})

    async def ready(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ready", "model": "scripted", "max_model_len": SESSION["max_model_len"]})

    app = Starlette(
        routes=[
            Route("/", index),
            Mount("/assets", Assets("assets")),
            Route("/readyz", ready),
            WebSocketRoute("/v1/responses", script.serve),
            Route("/v1/{rest:path}", nothing, methods=["GET", "POST", "DELETE"]),
            RootFiles(),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
