"""One engine worker on the bus as a gateway sees it, and sums over several workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from chatcache.cluster import bus
from chatcache.engine_process.client import EngineClientBase
from chatcache.engine_process.protocol import (
    FRAME_HEADER_BYTES,
    Command,
    FrameTooLargeError,
    Notice,
    decode_notice,
    encode,
)
from chatcache.errors import InvalidRequestError, OverloadedError
from chatcache.types.stats import Durations, EngineHealth, Explanation, PageAccounts, PageMap, SlotUsage

log = logging.getLogger(__name__)

MAX_RENEWALS = 7  # of the worker's lease, until it has received what was sent before


class RemoteWorker:
    """One life of a worker process, as a gateway sees it.

    `receive` is called with this worker and each of its notices, `receive_loads` with its load when it changes.
    `is_lost` is set when notices or commands are missing (`has_gap`), or cannot be processed.
    """

    def __init__(
        self,
        client: bus.Client,
        status: bus.WorkerStatus,
        gateway: str,
        numbers: itertools.count[int],
        receive: Callable[[RemoteWorker, Notice], None],
        receive_loads: Callable[[str, bus.Loads, str], None],
    ) -> None:
        self.status = status
        self.is_lost = False
        self.has_gap = False
        self.gateway = gateway
        self.queries = EngineClientBase(self.send, numbers=numbers)
        self._client = client
        self._numbers = numbers
        self._number = 0  # of the last entry with commands
        self._expected = 0  # number of an entry that the worker must have received soon
        self._num_waited_renewals = 0
        self._receive = receive
        self._receive_loads = receive_loads
        self._commands: list[bytes] = []
        self._writer = bus.StreamWriter(client, bus.inbox(status.id), self._take)
        self._tasks: list[asyncio.Task[None]] = []
        self.position = 0  # number of the last entry of its outbox that was read

    @property
    def id(self) -> str:
        return self.status.id

    @property
    def is_ready(self) -> bool:
        return self.status.health.ready and not self.status.is_draining and not self.is_lost

    async def start(self) -> None:
        """Read this worker's notices from now on. It ends earlier requests. Raises: an error of `bus.OUTAGES`."""
        last = await bus.last_entry(self._client, bus.outbox(self.id))
        self.position = int(last.partition("-")[0])
        self._tasks = [asyncio.create_task(self._read(last)), asyncio.create_task(self._writer.run())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)
        self._writer.wake()  # an entry without commands

    def update(self, status: bus.WorkerStatus) -> None:
        """Take the present status; the worker is lost if commands do not reach it."""
        is_renewed, self.status = status.num_renewals != self.status.num_renewals, status
        if status.received.get(self.gateway, 0) >= self._expected:
            self._expected, self._num_waited_renewals = self._number, 0
        elif is_renewed:
            self._num_waited_renewals += 1
            if self._num_waited_renewals == MAX_RENEWALS:
                log.error("commands to worker %s were lost", self.id)
                self.is_lost = self.has_gap = True

    def send(self, command: Command) -> None:
        """Send a command.

        Raises: InvalidRequestError for a command that cannot be encoded; nothing was sent then.
        """
        try:
            self._commands.append(encode(command)[FRAME_HEADER_BYTES:])
        except (FrameTooLargeError, msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
        self._writer.wake()

    async def close(self) -> None:
        """Stop reading and writing; pending queries fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.queries.fail_calls(OverloadedError("the engine worker ended", code="engine_unavailable"))

    def _take(self) -> Mapping[bytes, bytes]:
        if not self._commands and self._number:
            return {}
        commands, self._commands = self._commands, []
        after, self._number = self._number, next(self._numbers)
        return {
            bus.FROM: self.gateway.encode(),
            bus.NUMBER: b"%d" % self._number,
            bus.AFTER: b"%d" % after,
            bus.COMMANDS: bus.encode_list(commands),
        }

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self.is_lost = True
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the connection to worker %s failed", self.id, exc_info=error)

    async def _read(self, last: str) -> None:
        reader = bus.StreamReader(self._client, bus.outbox(self.id), last)
        own = self.gateway.encode()
        while not self.is_lost:
            for number, fields in await reader.read():
                if number != self.position + 1:
                    log.error("notices %d to %d of worker %s are missing", self.position + 1, number - 1, self.id)
                    self.is_lost = self.has_gap = True
                    return
                self.position = number
                try:
                    if bus.LOADS in fields:
                        self._receive_loads(self.id, bus.decode_loads(fields[bus.LOADS]), self.gateway)
                    for body in bus.decode_list(fields[own]) if own in fields else ():
                        self._receive(self, decode_notice(body))
                except (msgspec.MsgspecError, ValueError) as error:
                    log.error("notice %d of worker %s is invalid: %s", number, self.id, error)
                    self.is_lost = True
                    return


_SUMMED = ("kv_bytes", "state_bytes", "max_queued_requests", "max_queued_tokens", "owed_s")


def add_reports(reports: Sequence[EngineHealth]) -> EngineHealth:
    """Add up health reports: counts and histograms are summed, texts and limits are those of the first.

    Raises: ValueError without a report.
    """
    if not reports:
        raise ValueError("no report")
    first = reports[0]
    summed: dict[str, Any] = {}
    for name in EngineHealth.__struct_fields__:
        values = [getattr(report, name) for report in reports]
        if name.startswith("num_") or name in _SUMMED:
            summed[name] = sum(values)
        elif isinstance(values[0], Durations):
            counts = tuple(sum(column) for column in zip(*(each.counts for each in values), strict=True))
            summed[name] = Durations(counts, sum(each.total_s for each in values))
        elif isinstance(values[0], SlotUsage):
            parts = SlotUsage.__struct_fields__
            summed[name] = SlotUsage(**{part: sum(getattr(each, part) for each in values) for part in parts})
    return msgspec.structs.replace(first, **summed)


def join_maps(maps: Sequence[PageMap]) -> PageMap:
    """Return the maps of several workers one after the other."""
    return PageMap(
        page_size=maps[0].page_size,
        num_pages=sum(each.num_pages for each in maps),
        num_pages_per_cell=max(each.num_pages_per_cell for each in maps),
        cells="".join(each.cells for each in maps),
    )


def add_accounts(accounts: Sequence[PageAccounts]) -> PageAccounts:
    """Add up the pages of requests, conversations, namespaces and states of several workers."""
    return PageAccounts(
        num_pages_in_use=sum(each.num_pages_in_use for each in accounts),
        page_bytes=accounts[0].page_bytes,
        requests=_sum_by_key(each.requests for each in accounts),
        conversations=_sum_by_key(each.conversations for each in accounts),
        namespaces=_sum_by_key(each.namespaces for each in accounts),
        states=_sum_by_key(each.states for each in accounts),
    )


def best_explanation(found: Sequence[Explanation]) -> Explanation:
    """Return the explanation of the worker that has cached most of the prompt.

    With several workers, its pages have no place in the page map, which joins those of all workers.
    """
    best = max(found, key=lambda each: each.num_cached_tokens)
    if len(found) == 1:
        return best
    pages = tuple(msgspec.structs.replace(page, map_index=None) for page in best.pages)
    return msgspec.structs.replace(best, pages=pages)


def _sum_by_key(dicts: Any) -> dict[str, float]:
    """Add up the values of each key."""
    total: dict[str, float] = {}
    for each in dicts:
        for key, value in each.items():
            total[key] = total.get(key, 0.0) + value
    return total
