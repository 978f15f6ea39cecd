"""Who runs which response: those whose process has died become incomplete, whoever notices first."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace

from chatcache.chat.redis_link import Client, Pipe, RedisLink
from chatcache.chat.redis_rows import RUNNING, alive_key, head_key, pack_turn, turn_of, turns_key
from chatcache.chat.store import StoreUnavailable
from chatcache.chat.tree import IN_PROGRESS, INCOMPLETE, Turn

LEASE_S = 15.0


class Leases:
    """This process's name in the store, renewed while it lives, and a look after the others."""

    def __init__(self, link: RedisLink, lease_s: float = LEASE_S) -> None:
        self._link = link
        self._lease_s = lease_s
        self._process = secrets.token_hex(8)
        self._mine: set[str] = set()
        self._keeping: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Keep the lease from now on."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())

    def expect(self, turn: Turn | None) -> None:
        """A response is about to be stored; as under way, it is this process's until it is stored otherwise."""
        if turn is not None and turn.status == IN_PROGRESS:
            self._mine.add(turn.id)

    def settled(self, turn: Turn | None, *, stored: bool) -> None:
        """It was stored, or (`stored` False) perhaps not: one that begins is nobody's then."""
        if turn is not None and (turn.status == IN_PROGRESS) != stored:
            self._mine.discard(turn.id)

    def put(self, pipe: Pipe, conversation_id: str, turn: Turn) -> None:
        """Note with the response itself that it runs here, or no more."""
        if turn.status == IN_PROGRESS:
            pipe.hset(RUNNING, turn.id, f"{self._process} {conversation_id}")
            self.renew(pipe)
        else:
            pipe.hdel(RUNNING, turn.id)

    def renew(self, pipe: Pipe) -> None:
        pipe.set(alive_key(self._process), 1, px=int(self._lease_s * 1000))

    async def check(self) -> None:
        """Write something. Raises: StoreUnavailable."""

        async def write(client: Client) -> None:
            await client.set(alive_key(self._process), 1, px=int(self._lease_s * 1000))

        await self._link.run(write)

    async def close(self) -> None:
        """Go: what is still under way is nobody's."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            with contextlib.suppress(StoreUnavailable):
                await self._link.run(lambda client: client.delete(alive_key(self._process)))

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self.check()
                await self._sweep()
            await asyncio.sleep(self._lease_s / 3)

    async def _sweep(self) -> None:
        """Responses that are under way nowhere become incomplete."""
        running: dict[bytes, bytes] = await self._link.run(lambda client: client.hgetall(RUNNING))
        is_alive: dict[str, bool] = {self._process: True}
        for response, entry in running.items():
            process, _, conversation_id = entry.decode().partition(" ")
            if process not in is_alive:
                is_alive[process] = bool(await self._link.run(lambda client, p=process: client.exists(alive_key(p))))  # type: ignore[misc]
            is_run = is_alive[process] and (process != self._process or response.decode() in self._mine)
            if not is_run:
                await self._end(conversation_id, response.decode(), entry)

    async def _end(self, conversation_id: str, response_id: str, entry: bytes) -> None:
        async def work(pipe: Pipe) -> None:
            stored = await pipe.hget(turns_key(conversation_id), response_id)
            present = await pipe.hget(RUNNING, response_id)
            turn = turn_of(stored) if stored is not None else None
            pipe.multi()
            if present == entry:
                pipe.hdel(RUNNING, response_id)
                if turn is not None and turn.status == IN_PROGRESS:
                    pipe.hset(turns_key(conversation_id), response_id, pack_turn(replace(turn, status=INCOMPLETE)))

        key = head_key(conversation_id)
        await self._link.transact((key,), work, order=key)
