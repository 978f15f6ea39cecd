"""Records of running requests on the bus, from which another gateway takes them over when theirs ends.

    records:<gateway>   hash: `RequestRecord` by request id
    recorded            set of the gateways that have records

A record is in the hash of one gateway at a time: that gateway owns the request. The events of a request are not in its
record. They are in the outboxes of the workers that ran it, and `Attempt` says where. So a gateway that takes the
request over reads the same events, in the same batches, as the one before.

A failover of Redis can lose the latest changes: a record is missing, a deleted one is back, or records that a gateway
has taken over are still those of the other one. `GatewayRecords` finds these differences.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from chatcache.cluster import bus
from chatcache.engine_process.protocol import Answer, Events, Notice, PromptScores, decode_notice
from chatcache.types.events import EngineEvent, SearchStep
from chatcache.types.request import GenerateRequest

log = logging.getLogger(__name__)

RECORDED = f"{bus.PREFIX}recorded"
_ENTRIES_PER_READ = 64

GatewayNotice = tuple[str, Notice]
Item = PromptScores | SearchStep | EngineEvent


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """One command that made a worker send the events of a request to a gateway: `Submit` or `Adopt`.

    `call`: its number; the events follow the answer to it, in entries after `entry` of the worker's outbox. `last_seq`:
    the last event before it, None if all events that the attempt before has sent are valid.
    """

    gateway: str
    worker: str
    call: int
    entry: int
    last_seq: int | None = None


class RequestRecord(msgspec.Struct, frozen=True):
    """A request that another gateway can take over.

    `numerics`: of the workers that ran it. `data`: what the gateway knows besides.
    """

    request: GenerateRequest
    attempts: tuple[Attempt, ...]
    numerics: str
    data: bytes


_records = msgspec.msgpack.Decoder(RequestRecord)


def records_key(gateway: str) -> str:
    return f"{bus.PREFIX}records:{gateway}"


async def write_records(client: bus.Client, gateway: str, records: Iterable[RequestRecord]) -> None:
    """Store records of a gateway's requests. Raises: an error of `bus.OUTAGES`."""
    encoded = {record.request.request_id: msgspec.msgpack.encode(record) for record in records}
    if encoded:
        async with client.pipeline(transaction=True) as pipe:
            pipe.hset(records_key(gateway), mapping=encoded)
            pipe.sadd(RECORDED, gateway)
            await pipe.execute()


async def delete_records(client: bus.Client, gateway: str, request_ids: Collection[str]) -> None:
    """Delete records of a gateway. Raises: an error of `bus.OUTAGES`."""
    if request_ids:
        await client.hdel(records_key(gateway), *request_ids)


async def find_orphaned(client: bus.Client) -> list[str]:
    """Return the gateways that have records and no lease any more. Raises: an error of `bus.OUTAGES`."""
    recorded = {name.decode() for name in await client.smembers(RECORDED)}
    return sorted(recorded - await bus.alive(client, recorded))


async def take_records(client: bus.Client, old: str, new: str) -> list[RequestRecord]:
    """Make gateway `new` the owner of the requests of `old`, a gateway without a lease, and return their records.

    Of several gateways that try, one gets them. Raises: an error of `bus.OUTAGES`, also for those that do not.
    """
    async with client.pipeline(transaction=True) as pipe:
        await pipe.watch(records_key(old))
        found: dict[bytes, bytes] = await pipe.hgetall(records_key(old))
        pipe.multi()
        if found:
            pipe.hset(records_key(new), mapping=found)
            pipe.sadd(RECORDED, new)
        pipe.delete(records_key(old))
        pipe.srem(RECORDED, old)
        await pipe.execute()
    return _decode_records(found)


def _decode_records(found: Mapping[bytes, bytes]) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    for name, data in found.items():
        try:
            records.append(_records.decode(data))
        except msgspec.MsgspecError as error:
            log.error("the record of request %s cannot be decoded: is it of another version? %s", name.decode(), error)
    return records


class GatewayRecords:
    """The records of one gateway.

    `names`: ids of the requests that have one, or will have one when the bus answers. `are_uncertain`: the bus may have
    other records of this gateway since an outage.
    """

    def __init__(self, client: bus.Client) -> None:
        self._client = client
        self.names: set[str] = set()
        self.are_uncertain = False
        self._discarded: set[str] = set()

    async def write(self, gateway: str, records: Sequence[RequestRecord]) -> bool:
        """Store records, and return whether the bus has answered; otherwise `restore` stores them."""
        self.names.update(record.request.request_id for record in records)
        with bus.ignore_outages():
            async with asyncio.timeout(bus.TIMEOUT_S):
                await write_records(self._client, gateway, records)
            return True
        self.are_uncertain = True
        return False

    def discard(self, name: str) -> None:
        """Have the record of a request deleted soon."""
        if name in self.names:
            self.names.discard(name)
            self._discarded.add(name)

    async def delete_discarded(self, gateway: str) -> None:
        """Delete the records that are not needed any more. Raises: an error of `bus.OUTAGES`."""
        discarded, self._discarded = self._discarded, set()
        try:
            await delete_records(self._client, gateway, discarded)
        except bus.OUTAGES:
            self._discarded |= discarded
            raise

    async def take(self, old: str, gateway: str) -> list[RequestRecord]:
        """Take over the records of `old`, which has ended. Raises: an error of `bus.OUTAGES`."""
        try:
            records = await take_records(self._client, old, gateway)
        except bus.WatchError:  # another gateway has them, or this one has and the answer was lost
            self.are_uncertain = True
            return []
        self.names.update(record.request.request_id for record in records)
        return records

    async def restore(self, gateway: str, present: Sequence[RequestRecord]) -> list[RequestRecord]:
        """Store the `present` records again, and return the others that the bus has of this gateway.

        It has taken these over without having received them, or has deleted them. Raises: an error of `bus.OUTAGES`.
        """
        await write_records(self._client, gateway, present)
        found = _decode_records(await self._client.hgetall(records_key(gateway)))
        self.are_uncertain = False
        others = [record for record in found if record.request.request_id not in self.names | self._discarded]
        self.names.update(record.request.request_id for record in others)
        return others

    async def move(self, old: str, new: str, owns: Callable[[str], Awaitable[bool]] | None) -> set[str]:
        """Move the records to a new id of this gateway, and return the names of the requests that it has lost.

        Another gateway has taken their records. If no gateway has a record, the other one has ended the request, or
        Redis has lost the record: `owns` decides, without it they are lost. Waits through outages.
        """

        async def move() -> tuple[set[str], set[str]]:
            await take_records(self._client, old, new)
            missing = self.names - await self._names_of(new)
            taken: set[str] = set()
            for gateway in await self._client.smembers(RECORDED) if missing else ():
                taken |= missing & await self._names_of(gateway.decode())
            return missing, taken

        missing, taken = await bus.retry(move)
        lost = taken | {name for name in missing - taken if owns is None or not await owns(name)}
        self.names -= lost
        self.are_uncertain = True  # those that Redis has lost are stored again
        return lost

    async def _names_of(self, gateway: str) -> set[str]:
        return {name.decode() for name in await self._client.hkeys(records_key(gateway))}


async def keep_outboxes(client: bus.Client, workers: Iterable[str]) -> None:
    """Keep the outboxes of workers that have ended from expiring soon. Raises: an error of `bus.OUTAGES`."""
    for worker in workers:
        await client.pexpire(bus.outbox(worker), int(bus.RETAIN_S * 1000))


async def read_outboxes(client: bus.Client, records: Sequence[RequestRecord]) -> dict[str, list[GatewayNotice] | None]:
    """Return the notices of all attempts by worker; None for a worker whose outbox is incomplete.

    Waits through outages.
    """
    attempts = [attempt for record in records for attempt in record.attempts]
    found: dict[str, list[GatewayNotice] | None] = {}
    for worker in sorted({attempt.worker for attempt in attempts}):
        own = [attempt for attempt in attempts if attempt.worker == worker]
        gateways = {attempt.gateway.encode(): attempt.gateway for attempt in own}
        first = min(attempt.entry for attempt in own)
        found[worker] = await bus.retry(partial(_read_outbox, client, worker, gateways, first))
    return found


async def _read_outbox(
    client: bus.Client, worker: str, gateways: Mapping[bytes, str], last: int
) -> list[GatewayNotice] | None:
    """Return the notices for these gateways in the entries after number `last`. Raises: an error of `bus.OUTAGES`."""
    found: list[GatewayNotice] = []
    while True:
        entries = await client.xrange(bus.outbox(worker), min=f"{last + 1}-0", count=_ENTRIES_PER_READ)
        for entry, fields in entries:
            number = int(entry.partition(b"-")[0])
            if number != last + 1:
                return None
            last = number
            try:
                for name in gateways.keys() & fields.keys():
                    found += ((gateways[name], decode_notice(body)) for body in bus.decode_list(fields[name]))
            except (msgspec.MsgspecError, ValueError) as error:
                log.error("notice %d of worker %s is invalid: %s", number, worker, error)
                return None
        if len(entries) < _ENTRIES_PER_READ:
            return found


def history(record: RequestRecord, outboxes: Mapping[str, Sequence[GatewayNotice] | None]) -> list[Item] | None:
    """Return everything that workers have sent of a request, in order; None if something is missing.

    `outboxes`: by worker, from `read_outboxes`.
    """
    name = record.request.request_id
    items: list[Item] = []
    last = record.request.resume_point.last_seq if record.request.resume_point is not None else 0
    for number, attempt in enumerate(record.attempts):
        notices = outboxes.get(attempt.worker)
        if notices is None:
            return None
        later = [each.last_seq for each in record.attempts[number + 1 :] if each.last_seq is not None]
        for item in _items_of(attempt, name, notices):
            if isinstance(item, PromptScores | SearchStep):
                items.append(item)
            elif item.seq <= min(later, default=item.seq):
                if item.seq != last + 1:
                    return None
                last = item.seq
                items.append(item)
        if later and last < min(later):
            return None
    return items


def _items_of(attempt: Attempt, name: str, notices: Iterable[GatewayNotice]) -> Iterable[Item]:
    """Yield what a worker sent of a request from the answer to the attempt on."""
    is_answered = False
    for gateway, notice in notices:
        if gateway != attempt.gateway:
            continue
        if isinstance(notice, Answer):
            is_answered = notice.error is None if notice.call == attempt.call else is_answered
        elif not is_answered:
            continue
        elif isinstance(notice, PromptScores):
            if notice.request_id == name:
                yield notice
        elif isinstance(notice, Events):
            yield from (step for step in notice.search_steps if step.request_id == name)
            yield from (event for event in notice.events if event.request_id == name)
