"""Requests of a key that is revoked while they are answered end: those that wait with a 401, streams where they are."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatcache.errors import ChatcacheError
from chatcache.gateway.errors import revoked
from chatcache.gateway.keyring import Keyring
from chatcache.gateway.principal import Principal, who
from chatcache.gateway.sse import EventStream, stream_in


class EndRevoked:
    """To what is inside, a key that was revoked looks like a client that has left. Sockets see to it themselves."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            principal = who(scope)
        except ChatcacheError:  # nobody's: there is nothing to revoke
            await self._app(scope, receive, send)
            return
        await self._answer(principal, scope, receive, send)

    async def _answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        ended: asyncio.Event = asyncio.Event()
        answer = _Answer(send)
        with self._keyring.watching(principal, ended.set):
            try:
                await self._app(scope, _Ears(receive, ended), answer)
            except ClientDisconnect:
                if not ended.is_set():
                    raise
                if not answer.has_begun:
                    raise revoked() from None
            if ended.is_set():
                await answer.end(stream_in(scope))


class _Ears:
    """`receive` that hears of a revocation, once the body is whole, as of a client that leaves."""

    def __init__(self, receive: Receive, revoked: asyncio.Event) -> None:
        self._receive = receive
        self._revoked = revoked
        self._is_whole = False

    async def __call__(self) -> Message:
        if not self._is_whole:
            message = await self._receive()
            self._is_whole = not message.get("more_body", False)
            return message
        tasks = [asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._revoked.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            heard = tasks[0]
            return heard.result() if heard.done() else {"type": "http.disconnect"}  # type: ignore[return-value]
        finally:
            for task in tasks:
                task.cancel()


class _Answer:
    """`send` that knows how far the answer is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_ended = False
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
        elif not message.get("more_body", False):
            self._has_ended = True
        await self._send(message)

    async def end(self, stream: EventStream | None) -> None:
        """Finish what has begun: a stream says why."""
        if self.has_begun and not self._has_ended:
            last = stream.last_words(revoked()) if stream is not None else b""
            await self({"type": "http.response.body", "body": last, "more_body": False})
