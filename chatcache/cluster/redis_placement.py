"""Placement index in Redis, shared by the gateways on a bus.

    place:<slot>   records of 20 bytes: check of a page key, incarnation of a worker, time, continuation

A gateway adds what it learned with one APPEND, without reading, and reads all boundaries of a prompt with one MGET.
Slot and check are 52 bits of the page key. A false match leads to a worker that has nothing cached, never to wrong
pages.

The index is bounded: it has at most NUM_SLOTS keys, which expire TTL_S after their last record, and a gateway that
reads a log of more than MAX_RECORDS records replaces it by those that matter.

No request depends on it. While Redis does not answer, `lookup` returns None, at once after the first failure, so that
the hash of the conversation decides; records are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from struct import Struct
from typing import TypeVar

from chatcache.cluster import bus
from chatcache.cluster.placement import MAX_CONTINUATIONS, MAX_HOLDERS, TTL_S, Boundary, Place

log = logging.getLogger(__name__)

NUM_SLOTS = 2**20
MAX_RECORDS = 64
PAUSE_S = 1.0  # without lookups, after one that failed
REFRESH_S = 60.0  # in which a gateway does not repeat a record
MAX_REMEMBERED = 20_000
MAX_PENDING = 50_000
_RECORD = Struct("<IQII")  # check, incarnation, seconds, continuation (0: none)

Record = tuple[int, int, int, int]
Key = TypeVar("Key")
Value = TypeVar("Value")


class RedisPlacementIndex:
    """Placement index of all gateways whose `client` uses the same Redis.

    `run` writes what was recorded. Workers are identified by their incarnation, which no other process has.
    """

    def __init__(self, client: bus.Client) -> None:
        self._client = client
        self._appends: dict[int, bytes] = {}
        self._rewrites: dict[int, bytes] = {}
        self._wanted = asyncio.Event()
        self._recorded: OrderedDict[tuple[Hashable, int], tuple[float, int]] = OrderedDict()
        self._full: OrderedDict[Hashable, None] = OrderedDict()  # places with MAX_CONTINUATIONS
        self._paused_until_s = 0.0

    async def lookup(
        self, boundaries: Sequence[Boundary], now_s: float, workers: Mapping[int, str]
    ) -> list[Place | None] | None:
        """Return the place of each boundary, None where nothing is known; None for all while Redis does not answer.

        `workers`: incarnation -> name; others are not alive and hold nothing.
        """
        if not boundaries:
            return []
        if time.monotonic() < self._paused_until_s:
            return None
        places = [_slot_and_check(boundary.key) for boundary in boundaries]
        logs = None
        with bus.ignore_outages():
            async with asyncio.timeout(bus.TIMEOUT_S):
                logs = await self._client.mget([_key(slot) for slot, _ in places])
        if logs is None:
            self._paused_until_s = time.monotonic() + PAUSE_S
            log.warning("the placement index does not answer: conversations are hashed to workers")
            return None
        found: list[Place | None] = []
        for boundary, (slot, check), data in zip(boundaries, places, logs, strict=True):
            place = None
            if data:
                if len(data) > MAX_RECORDS * _RECORD.size:
                    self._rewrites[slot] = compact(data, now_s)
                    self._wanted.set()
                place = read_place(data, check, now_s, workers)
            if place is not None and len(place.continuations) >= MAX_CONTINUATIONS:
                _remember(self._full, boundary.key, None)
            found.append(place)
        return found

    def record(self, boundaries: Iterable[Boundary], incarnation: int, now_s: float) -> None:
        """Record that a worker has computed tokens with these boundaries."""
        for boundary in boundaries:
            slot, check = _slot_and_check(boundary.key)
            continuation = 0
            if boundary.continuation is not None and boundary.key not in self._full:
                continuation = _slot_and_check(boundary.continuation)[1] or 1
            known = self._recorded.get((boundary.key, incarnation))
            if known is None or known[0] < now_s - REFRESH_S or continuation not in (0, known[1]):
                self._append(slot, _RECORD.pack(check, incarnation, int(now_s), continuation))
                _remember(self._recorded, (boundary.key, incarnation), (now_s, continuation))

    def _append(self, slot: int, record: bytes) -> None:
        if len(self._appends) < MAX_PENDING:
            self._appends[slot] = self._appends.get(slot, b"") + record
            self._wanted.set()

    async def run(self) -> None:
        """Write records until cancelled."""
        lifetime_ms = int(TTL_S * 1000)
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            appends, self._appends = self._appends, {}
            rewrites, self._rewrites = self._rewrites, {}
            with bus.ignore_outages():
                async with self._client.pipeline(transaction=False) as pipe:
                    for slot, data in rewrites.items():
                        pipe.set(_key(slot), data, px=lifetime_ms)
                    for slot, data in appends.items():
                        pipe.append(_key(slot), data)
                        pipe.pexpire(_key(slot), lifetime_ms)
                    await pipe.execute()


def read_place(data: bytes, check: int, now_s: float, workers: Mapping[int, str]) -> Place | None:
    """Return the place with this check in a log; None if no live worker holds it and no continuation is known."""
    place, oldest_s = Place(), now_s - TTL_S
    for found, incarnation, at_s, continuation in _records(data):
        if found != check or at_s < oldest_s:
            continue
        name = workers.get(incarnation)
        if name is not None:
            place.holders.pop(name, None)  # the latest comes last
            place.holders[name] = incarnation
        place.recorded_at_s = at_s
        if continuation and len(place.continuations) < MAX_CONTINUATIONS:
            place.continuations.add(continuation)
    for name in list(place.holders)[:-MAX_HOLDERS]:
        del place.holders[name]
    return place if place.recorded_at_s else None


def compact(data: bytes, now_s: float) -> bytes:
    """Return the latest records of a log, without those that add no holder and no continuation to a place."""
    kept: list[Record] = []
    holders: dict[int, set[int]] = {}
    continuations: dict[int, set[int]] = {}
    for record in reversed(_records(data)):
        check, incarnation, at_s, continuation = record
        if at_s < now_s - TTL_S:
            continue
        here, after = holders.setdefault(check, set()), continuations.setdefault(check, set())
        is_new = incarnation not in here and len(here) < MAX_HOLDERS
        follows = continuation and continuation not in after and len(after) < MAX_CONTINUATIONS
        if is_new or follows:
            here.add(incarnation)
            if continuation:
                after.add(continuation)
            kept.append(record)
            if len(kept) == MAX_RECORDS // 2:
                break
    return b"".join(_RECORD.pack(*record) for record in reversed(kept))


def _records(data: bytes) -> list[Record]:
    whole = len(data) - len(data) % _RECORD.size
    return list(_RECORD.iter_unpack(data[:whole]))


def _remember(memory: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """Store a value as the latest, and forget the oldest beyond MAX_REMEMBERED."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > MAX_REMEMBERED:
        memory.popitem(last=False)


def _slot_and_check(key: Hashable) -> tuple[int, int]:
    if not isinstance(key, bytes):
        raise TypeError("the key of a boundary must be bytes")
    return int.from_bytes(key[:3], "little") % NUM_SLOTS, int.from_bytes(key[3:7], "little")


def _key(slot: int) -> str:
    return f"{bus.PREFIX}place:{slot:05x}"
