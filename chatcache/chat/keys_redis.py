"""Keys on a Redis server: a hash of them, a number that every change makes greater, a hash of tokens to a day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from chatcache.chat.keys import DAY_S, KEEP_USAGE_DAYS, WRITER, KeyRecord
from chatcache.chat.redis_link import Client, Pipe, RedisLink
from chatcache.chat.redis_rows import KEYS, KEYS_VERSION, usage_key
from chatcache.errors import NotFound

_KEY = msgspec.msgpack.Decoder(KeyRecord)


class RedisKeys:
    """`KeyStore` over a link that somebody else closes."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def create(self, record: KeyRecord) -> None:
        async def work(client: Client) -> None:
            async with client.pipeline(transaction=True) as pipe:
                _put(pipe, record)
                await pipe.execute()

        await self._link.run(work)

    async def list(self) -> Sequence[KeyRecord]:
        found: Mapping[bytes, bytes] = await self._link.run(lambda client: client.hgetall(KEYS))
        return sorted(map(_KEY.decode, found.values()), key=lambda record: (record.created_at, record.id))

    async def revoke(self, key_id: str, at: float) -> KeyRecord:
        async def work(pipe: Pipe) -> KeyRecord:
            data = await pipe.hget(KEYS, key_id)
            if data is None:
                raise NotFound(f"no key {key_id!r}", param="id")
            present = _KEY.decode(data)
            pipe.multi()
            if present.revoked_at is not None:
                return present
            revoked = replace(present, revoked_at=at)
            _put(pipe, revoked)
            return revoked

        return await self._link.transact((KEYS,), work, order=KEYS)

    async def version(self) -> int:
        return int(await self._link.run(lambda client: client.get(KEYS_VERSION)) or 0)

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None:
        key = usage_key(day)

        async def work(pipe: Pipe) -> None:
            last = int(await pipe.hget(key, WRITER + writer) or 0)
            pipe.multi()
            if last < number:
                pipe.hset(key, WRITER + writer, number)
                for key_id, count in tokens.items():
                    pipe.hincrby(key, key_id, count)
                pipe.expire(key, KEEP_USAGE_DAYS * DAY_S)

        await self._link.transact((key,), work, order=key)

    async def usage(self, day: int) -> Mapping[str, int]:
        found: Mapping[bytes, bytes] = await self._link.run(lambda client: client.hgetall(usage_key(day)))
        counts = {name.decode(): int(count) for name, count in found.items()}
        return {key_id: count for key_id, count in counts.items() if not key_id.startswith(WRITER)}


def _put(pipe: Pipe, record: KeyRecord) -> None:
    pipe.hset(KEYS, record.id, msgspec.msgpack.encode(record))
    pipe.incr(KEYS_VERSION)
