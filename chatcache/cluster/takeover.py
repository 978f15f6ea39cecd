"""Records of running requests on the bus, from which another gateway takes them over when theirs has ended.

    records:<gateway>   hash: `RequestRecord` by request id
    recorded            set of the gateways that have records

A record is in the hash of one gateway at a time: that gateway owns the request. The events of a request are not in its
record. They are in the outboxes of the workers that ran it, and `Attempt` says where. So a gateway that takes the
request over reads the same events, in the same batches, as the one before.

    lease gone -> take_records -> Adopt to the worker -> read_outboxes, history -> replay -> on_adopt

Nothing is taken over while the bus has just been away, when the leases of gateways expired that have not ended.

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
from chatcache.cluster.placed_requests import Attempt, Item, PlacedRequest, PlacedRequests, RequestRecord
from chatcache.engine_process.protocol import Answer, Events, Notice, PromptScores, decode_notice
from chatcache.errors import InvalidRequestError
from chatcache.types.events import SearchStep
from chatcache.types.request import GenerateRequest

log = logging.getLogger(__name__)

RECORDED = f"{bus.PREFIX}recorded"
ADOPT_TIMEOUT_S = 2.0  # for the workers to give the requests of a lost gateway to this one
_ADOPT_POLL_S = 0.01
_ENTRIES_PER_READ = 64

GatewayNotice = tuple[str, Notice]
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


async def take_records(client: bus.Client, old: str, new: str) -> list[RequestRecord]:
    """Make gateway `new` the owner of the requests of `old`, a gateway without a lease, and return their records.

    Of several gateways that try, one gets them. Records that cannot be decoded are deleted. Raises: an error of
    `bus.OUTAGES`, also for those that do not.
    """
    async with client.pipeline(transaction=True) as pipe:
        await pipe.watch(records_key(old))
        found: dict[bytes, bytes] = await pipe.hgetall(records_key(old))
        taken = [msgspec.structs.replace(each, num_takeovers=each.num_takeovers + 1) for each in _decode_records(found)]
        pipe.multi()
        if taken:
            mapping = {each.request.request_id: msgspec.msgpack.encode(each) for each in taken}
            pipe.hset(records_key(new), mapping=mapping)
            pipe.sadd(RECORDED, new)
        pipe.delete(records_key(old))
        pipe.srem(RECORDED, old)
        await pipe.execute()
    return taken


def _decode_records(found: Mapping[bytes, bytes]) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    for name, data in found.items():
        try:
            records.append(_records.decode(data))
        except msgspec.MsgspecError as error:
            log.error(
                "the record of request %s cannot be decoded: is it of another version? %s",
                name.decode(errors="replace"),
                error,
            )
    return records


class GatewayRecords:
    """The records of one gateway.

    `gateway`: its id on the bus, empty while they move to another one. `names`: ids of the requests that have one, or
    will have one when the bus answers. `are_uncertain`: the bus may have other records of this gateway since an outage.
    """

    def __init__(self, client: bus.Client) -> None:
        self._client = client
        self.gateway = ""
        self.names: set[str] = set()
        self.are_uncertain = False
        self._discarded: set[str] = set()

    async def write(self, records: Sequence[RequestRecord]) -> bool:
        """Store records, and return whether the bus has answered; otherwise `restore` stores them."""
        self.names.update(record.request.request_id for record in records)
        if self.gateway:
            with bus.ignore_outages():
                async with asyncio.timeout(bus.TIMEOUT_S):
                    await write_records(self._client, self.gateway, records)
                return True
        self.are_uncertain = True
        return False

    def discard(self, name: str) -> None:
        """Have the record of a request deleted soon."""
        if name in self.names:
            self.names.discard(name)
            self._discarded.add(name)

    async def delete_discarded(self) -> None:
        """Delete the records that are not needed any more. Raises: an error of `bus.OUTAGES`."""
        if discarded := set(self._discarded):
            await self._client.hdel(records_key(self.gateway), *discarded)
            self._discarded -= discarded

    async def take(self, old: str) -> list[RequestRecord]:
        """Take over the records of `old`, which has ended. Raises: an error of `bus.OUTAGES`."""
        try:
            records = await take_records(self._client, old, self.gateway)
        except bus.WatchError:  # another gateway has them, or this one has and the answer was lost
            self.are_uncertain = True
            return []
        self.names.update(record.request.request_id for record in records)
        return records

    async def restore(self, present: Sequence[RequestRecord]) -> list[RequestRecord]:
        """Store the `present` records again, and return the others that the bus has of this gateway.

        It has taken these over without having received them, or has deleted them. Without its lease, another gateway
        may have taken the present ones: nothing is stored. Raises: an error of `bus.OUTAGES`.
        """
        gateway = self.gateway
        if not await bus.alive(self._client, [gateway]):
            return []
        await write_records(self._client, gateway, present)
        found = _decode_records(await self._client.hgetall(records_key(gateway)))
        self.are_uncertain = False
        others = [record for record in found if record.request.request_id not in self.names | self._discarded]
        self.names.update(record.request.request_id for record in others)
        return others

    async def move(self, gateway: str, owns: Callable[[str], Awaitable[bool]] | None) -> set[str]:
        """Move the records to a new id of this gateway, and return the names of the requests that it has lost.

        Another gateway has taken their records. If no gateway has a record, the other one has ended the request, or
        Redis has lost the record: `owns` decides, without it they are lost. Waits through outages.
        """
        old, self.gateway = self.gateway, ""

        async def move() -> tuple[set[str], set[str]]:
            await take_records(self._client, old, gateway)
            missing = self.names - await self._names_of(gateway)
            taken: set[str] = set()
            for other in bus.decode_ids(await self._client.smembers(RECORDED)) if missing else ():
                taken |= missing & await self._names_of(other)
            return missing, taken

        missing, taken = await bus.retry(move) if old else (set(), set())
        owned: set[str] = set()
        if owns is not None:
            asked = list(missing - taken)
            answers = await asyncio.gather(*map(owns, asked))
            owned = {name for name, is_own in zip(asked, answers, strict=True) if is_own}
        lost = missing - owned
        self.names -= lost
        self.are_uncertain = bool(old)  # those that Redis has lost are stored again
        self.gateway = gateway
        return lost

    async def _names_of(self, gateway: str) -> set[str]:
        return {name.decode(errors="replace") for name in await self._client.hkeys(records_key(gateway))}


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


class Takeover:
    """Records the requests of this gateway, and takes over those of gateways that have ended: see `RequestRecorder`.

    An adopted request reads its events from the first on. Without `on_adopt`, nothing is taken over.
    """

    def __init__(self, client: bus.Client, records: GatewayRecords, requests: PlacedRequests) -> None:
        self.on_adopt: Callable[[GenerateRequest, bytes, int, int], Awaitable[bool]] | None = None
        self.on_lost: Callable[[str], None] | None = None
        self.owns: Callable[[str], Awaitable[bool]] | None = None
        self.num_adopted = 0
        self._client = client
        self._records = records
        self._requests = requests
        self._tasks: set[asyncio.Task[None]] = set()

    async def record(self, request_id: str, data: bytes) -> bool:
        """Leave a record of a running request; return False if the bus does not answer, and stores it later."""
        if (placed := self._requests.get(request_id)) is None:
            return True
        placed.data = data
        return await self._records.write([placed.to_record()])

    def discard_record(self, request_id: str) -> None:
        self._records.discard(request_id)

    def leave(self, request_id: str) -> None:
        if request_id in self._records.names and (placed := self._requests.get(request_id)) is not None:
            self._requests.forget(placed)

    async def close(self) -> None:
        """End what is being taken over, and delete the records that are not needed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with bus.ignore_outages():
            await self._records.delete_discarded()

    async def update(self, workers: Collection[str], *, had_outage: bool) -> None:
        """Delete records that are not needed, and take over the requests of gateways that have ended.

        `workers`: ids of the connected ones. `had_outage`: see `OutageMonitor`. Raises: an error of `bus.OUTAGES`.
        """
        await self._records.delete_discarded()
        if self._records.are_uncertain:
            present = [placed.to_record() for placed in self._requests if placed.id in self._records.names]
            self._start(await self._records.restore(present))
        used = {each.worker for placed in self._requests if placed.data for each in placed.attempts}
        for worker in used.difference(workers):  # which have ended
            await self._client.pexpire(bus.outbox(worker), int(bus.RETAIN_S * 1000))
        if self.on_adopt is None or had_outage:
            return
        recorded = bus.decode_ids(await self._client.smembers(RECORDED))
        alive = await bus.alive(self._client, recorded)
        for gateway in [each for each in recorded if each not in alive]:
            if self._records.gateway not in ("", gateway) and (records := await self._records.take(gateway)):
                log.warning("gateway %s has ended: %d of its requests are taken over", gateway, len(records))
                self._start(records)

    async def change_id(self, gateway: str) -> None:
        """Use a new id, and give up the requests that another gateway has taken over while this one had no lease."""
        for name in await self._records.move(gateway, self.owns):
            if (placed := self._requests.get(name)) is not None:
                self._requests.forget(placed)
            if self.on_lost is not None:
                self.on_lost(name)
            self._requests.client.drop_log(name)

    def _start(self, records: Sequence[RequestRecord]) -> None:
        task = asyncio.create_task(self._adopt(records))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("requests cannot be taken over", exc_info=error)

    async def _adopt(self, records: Sequence[RequestRecord]) -> None:
        """Continue requests of gateways that have ended, except those that run here."""
        adopted = await self._claim(records)
        outboxes = await read_outboxes(self._client, records)
        for record, placed in adopted:
            try:
                is_continued = await self._continue(placed, record.data, history(record, outboxes))
            except Exception:
                log.exception("request %s cannot be taken over", placed.id)
                is_continued = False
            self.num_adopted += is_continued
            if not is_continued and self.on_adopt is None:  # this gateway drains: the next one takes the request over
                self._requests.forget(placed)
                self._requests.client.drop_log(placed.id)
            elif not is_continued:
                self._requests.give_up(placed)
                self.discard_record(placed.id)

    async def _claim(self, records: Sequence[RequestRecord]) -> list[tuple[RequestRecord, PlacedRequest]]:
        """Add the requests, and have the workers that run them send further events to this gateway."""
        adopted: list[tuple[RequestRecord, PlacedRequest]] = []
        for record in [each for each in records if self._requests.get(each.request.request_id) is None]:
            try:
                adopted.append((record, await self._requests.open_recorded(record)))
            except InvalidRequestError:  # it has just ended here
                self.discard_record(record.request.request_id)
        await self._records.write([placed.to_record() for _, placed in adopted])
        for record, placed in adopted:
            self._requests.adopt(placed, record.attempts[-1].gateway)
        deadline = asyncio.get_running_loop().time() + ADOPT_TIMEOUT_S
        while any(placed.worker is not None and not placed.is_answered for _, placed in adopted):
            await asyncio.sleep(_ADOPT_POLL_S)
            if asyncio.get_running_loop().time() > deadline:
                break
        for _, placed in adopted:
            if not placed.is_answered:
                placed.worker = None  # an answer after the outbox was read would leave a gap before its events
        return adopted

    async def _continue(self, placed: PlacedRequest, data: bytes, items: Sequence[Item] | None) -> bool:
        """Repeat what was sent of a request and continue it; return whether that is possible."""
        if items is None:
            log.error("request %s cannot be taken over: events of it are missing", placed.id)
        if items is None or placed.id not in self._records.names:  # another gateway has taken it over meanwhile
            return False
        self._requests.replay(placed, items)
        journal, number = placed.journal, placed.num_takeovers
        return self.on_adopt is not None and await self.on_adopt(journal.request, data, journal.last_seq, number)
