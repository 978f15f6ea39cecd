"""The whole gateway with one route more, which sends back what it hears: what its sockets do, they do for this too."""

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
KEY = "sk-of-whoever-hears-an-echo"
PROTOCOL = KEY_PROTOCOL + KEY


@contextlib.contextmanager
def echoing(config: ServerConfig, *, deflate: bool = False) -> Iterator[Server]:
    """A server as `chatcache serve` starts it: its sockets, its middleware, a key that lets in."""

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
