"""The complete gateway with an additional WebSocket route that echoes each message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import uvicorn
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from chatcache.cli.server import loop_factory, uvicorn_config
from chatcache.config import ServerConfig
from chatcache.gateway.auth.middleware import KEY_PROTOCOL
from chatcache.gateway.routing import ProtectedRoute
from chatcache.gateway.websocket.frames import CLIENT_GONE
from tests.gateway.serving import Server

PATH = "/echo"
KEY = "sk-of-the-echo-route-client"
PROTOCOL = KEY_PROTOCOL + KEY


@contextlib.contextmanager
def echoing(config: ServerConfig, *, deflate: bool = False) -> Iterator[Server]:
    """Start a server as `chatcache serve` does: its sockets, its middleware, one valid API key."""

    def settings(app: object, config: ServerConfig) -> uvicorn.Config:
        wanted = uvicorn_config(app, config)
        wanted.ws_per_message_deflate = deflate
        return wanted

    with Server(
        msgspec.structs.replace(config, api_keys=(KEY,)), settings=settings, loop_factory=loop_factory()
    ) as server:
        server.app.router.routes.append(ProtectedRoute(WebSocketRoute(PATH, echo), "key"))
        yield server


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    with contextlib.suppress(*CLIENT_GONE):
        while (message := await socket.receive())["type"] == "websocket.receive":
            await socket.send({**message, "type": "websocket.send"})
