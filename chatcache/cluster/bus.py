"""Redis as the transport between gateways and engine workers: streams, leases and their contents.

All keys begin with `chatcache:bus:`.

    workers        set of worker ids
    worker:<id>    `WorkerStatus`, exists while the worker renews it (`Lease`)
    gateway:<id>   exists while the gateway renews it
    in:<worker>    stream of commands; an entry has a gateway's id, its number, that of the gateway's entry before (0:
                   none), and a list of commands
    out:<worker>   stream of notices, its entries numbered 1, 2, 3, ...; an entry has a list of notices for each
                   gateway, and the `Loads` of the worker if they changed
    place:<slot>   what is cached where, see `redis_placement`

An id stands for one run of a process. A process whose lease expired takes a new one, and everything under its old id is
void. So no command or notice of a process that counted as dead can have an effect later. A gateway deletes the lease of
a worker that does not renew it, see `SilentLeases`.

An entry contains all that was collected while the previous entry was sent. The cost of a stream entry (about 0.1 ms) is
therefore shared by all requests of a step, and under load by several steps.

A failover of Redis can lose the latest entries that were accepted. A gateway finds missing notices by their numbers; a
worker that finds the end of its stream missing writes another entry. A worker publishes the number of the last entry
before which it has missed none of a gateway; a gateway whose entries are missing sends its requests again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
import redis

from chatcache.errors import InvalidRequestError
from chatcache.redis_urls import close_idle_connections, open_client
from chatcache.types.stats import EngineHealth, ModelInfo

log = logging.getLogger(__name__)

LEASE_S = 4.0  # longer than Sentinels need to name another primary
RENEW_S = 0.3
SILENT_S = 1.75  # without a renewal, while Redis answers: a worker counts as dead before its lease expires
RETAIN_S = 60.0  # of entries that were sent, and of the streams of a process that ended
TIMEOUT_S = 1.0
RETRY_S = 0.1
BLOCK_S = 1.0
OUTAGES = (
    redis.RedisError,
    OSError,
    asyncio.TimeoutError,
    RuntimeError,
)  # the last: of uvloop, for a closed connection
WatchError = redis.WatchError  # of a transaction: a watched key has changed, or the connection was lost

PREFIX = "chatcache:bus:"
WORKERS = f"{PREFIX}workers"
FROM, NUMBER, AFTER, COMMANDS, LOADS = b"from", b"number", b"after", b"commands", b"loads"

Client = Any  # redis-py has no types
Result = TypeVar("Result")
Loads = dict[str, tuple[int, int]]
"""Load of a worker by gateway: prompt tokens to compute, and branches of its requests."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker publishes with each renewal of its lease.

    `name` stays the same when the process restarts. Workers of the same `numerics` compute the same logits to the bit
    in deterministic mode. A worker that `is_draining` finishes its requests and accepts no others. `loads`: those that
    the entries before reported. `received`: by gateway, the number of its last entry before which none is missing.
    `num_renewals`: of the lease so far, so that a gateway knows whether `received` is newer than what it sent.
    """

    id: str
    name: str
    numerics: str
    model_info: ModelInfo
    health: EngineHealth
    is_draining: bool = False
    loads: Loads = {}
    num_renewals: int = 0
    received: dict[str, int] = {}


_bodies: msgspec.msgpack.Decoder[list[bytes]] = msgspec.msgpack.Decoder(list[bytes])
_statuses = msgspec.msgpack.Decoder(WorkerStatus)
_ID = re.compile(r"[^\ufffd]*\.[0-9a-f]{16}")  # as of `new_id`; U+FFFD stands for bytes that are not UTF-8
_loads: msgspec.msgpack.Decoder[Loads] = msgspec.msgpack.Decoder(Loads)


def encode_list(bodies: list[bytes]) -> bytes:
    return msgspec.msgpack.encode(bodies)


def decode_list(data: bytes) -> list[bytes]:
    """Decode a field of an entry. Raises: msgspec.DecodeError for anything else."""
    return _bodies.decode(data)


def decode_loads(data: bytes) -> Loads:
    """Decode the field LOADS of an entry. Raises: msgspec.DecodeError for anything else."""
    return _loads.decode(data)


def decode_ids(found: Iterable[bytes]) -> list[str]:
    """Decode the ids of processes, in order; anything else in the set is left out."""
    names = (each.decode(errors="replace") for each in found)
    return sorted(name for name in names if _ID.fullmatch(name))


def decode_status(worker: str, data: bytes | None) -> WorkerStatus | None:
    """Decode a worker's lease; None for one that has expired, is of another version, or has another worker's id."""
    try:
        status = _statuses.decode(data) if data else None
    except msgspec.MsgspecError as error:
        log.error("the lease of worker %s cannot be decoded: is it of another version? %s", worker, error)
        return None
    if status is not None and status.id != worker:
        log.error("the lease of worker %s has the id %r", worker, status.id)
        return None
    return status


def connect(url: str) -> Client:
    """Create a client of the Redis server at `url`. Raises: InvalidRequestError for an invalid URL."""
    try:
        return open_client(
            url,
            socket_timeout=BLOCK_S + TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            socket_keepalive=True,
        )
    except (ValueError, redis.RedisError) as error:
        raise InvalidRequestError(f"not a URL of a Redis server: {error}", param="bus") from None


def new_id(name: str) -> str:
    """Return an id for a process of this name."""
    return f"{name}.{secrets.token_hex(8)}"


def incarnation(process_id: str) -> int:
    """Return the part of an id that no other run of a process has."""
    return int(process_id.rpartition(".")[2], 16)


def worker_key(worker: str) -> str:
    return f"{PREFIX}worker:{worker}"


def gateway_key(gateway: str) -> str:
    return f"{PREFIX}gateway:{gateway}"


def inbox(worker: str) -> str:
    return f"{PREFIX}in:{worker}"


def outbox(worker: str) -> str:
    return f"{PREFIX}out:{worker}"


async def retry(call: Callable[[], Awaitable[Result]]) -> Result:
    """Return what `call` returns; repeat it through outages."""
    while True:
        with ignore_outages():
            return await call()
        await asyncio.sleep(RETRY_S)


class Lease:
    """A key that exists as long as this process renews it.

    After a failed renewal the key may have expired, and others may have acted on that: the caller takes a new id.
    The first failure of an outage is logged.
    """

    def __init__(self, client: Client, key: str) -> None:
        self._client = client
        self._key = key
        self.is_acquired = False
        self._was_answered = True
        self._renewed_at = asyncio.get_running_loop().time()

    async def renew(self, value: bytes) -> bool:
        """Renew the lease with this value; return whether it has never been interrupted.

        While the server does not answer, the result is True until the lease must have expired.
        """
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        is_held = None
        with ignore_outages():
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await self._client.set(self._key, value, px=int(LEASE_S * 1000), xx=self.is_acquired)
                    is_held = bool(answer)
            except OUTAGES as error:
                self._log_outage(error)
                if isinstance(error, redis.ResponseError):  # of a primary that is cut off from its replicas
                    await close_idle_connections(self._client)
                raise
        if is_held is not None and not self._was_answered:
            log.warning("the bus (--bus) answers again")
        self._was_answered = is_held is not None
        if is_held is None:
            return not self.is_acquired or loop.time() - self._renewed_at < LEASE_S
        self.is_acquired, self._renewed_at = True, started_at
        return is_held

    def _log_outage(self, error: BaseException) -> None:
        if not self._was_answered:
            return
        refuses = isinstance(error, redis.AuthenticationError | redis.ResponseError)
        problem = "refuses this process" if refuses else "does not answer"
        reason = str(error) or f"no answer within {TIMEOUT_S:g} s"
        log.error("the bus (--bus) %s: %s; trying again", problem, reason)

    async def wait(self) -> None:
        """Wait until the lease should be renewed again: soon if the server did not answer."""
        await asyncio.sleep(RENEW_S if self._was_answered else RETRY_S)

    async def give_up(self) -> None:
        """Delete the key, so that others need not wait until it expires."""
        with ignore_outages():
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.delete(self._key)


class SilentLeases:
    """Finds leases that exist and are not renewed, by the values that polls return.

    At most `max_gap_s` between two polls counts. So an outage, in which nothing can be renewed, is no silence.
    """

    def __init__(self, max_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_gap_s = max_gap_s
        self._clock = clock
        self._last_s = 0.0
        self._seen: dict[str, tuple[bytes, float]] = {}  # by holder: value, seconds since it was first seen

    def update(self, values: Mapping[str, bytes | None]) -> list[str]:
        """Return the holders whose value has been the same for `SILENT_S`. `values`: by holder, None without lease."""
        now_s = self._clock()
        gap_s, self._last_s = min(now_s - self._last_s, self._max_gap_s), now_s
        seen: dict[str, tuple[bytes, float]] = {}
        for holder, value in values.items():
            if value is not None:
                last, silent_s = self._seen.get(holder, (None, 0.0))
                seen[holder] = value, silent_s + gap_s if last == value else 0.0
        self._seen = seen
        return [holder for holder, (_, silent_s) in seen.items() if silent_s >= SILENT_S]


class OutageMonitor:
    """Notices outages by the times of the server's answers."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._resumed_s = self._last_s - LEASE_S

    def record_answer(self) -> None:
        """Record that the server has just answered."""
        now_s = time.monotonic()
        if now_s - self._last_s > LEASE_S / 2:
            self._resumed_s = now_s
        self._last_s = now_s

    @property
    def had_outage(self) -> bool:
        """Whether an outage has just ended: leases have expired of processes that have not ended."""
        return time.monotonic() - self._resumed_s < LEASE_S


class StreamWriter:
    """Writes the entries that `take` returns to a stream, one at a time, each until the server accepts it.

    `take` returns the fields of the next entry, or nothing. With `is_numbered`, entries have the ids 1-0, 2-0, ..., and
    the server refuses repetitions; otherwise an entry may be written twice when the connection breaks. It
    `is_displaced`, and ends, if the stream has an entry of a higher number, which it has not written.
    """

    def __init__(
        self, client: Client, key: str, take: Callable[[], Mapping[bytes, bytes]], *, is_numbered: bool = False
    ) -> None:
        self._client = client
        self._key = key
        self._take = take
        self._is_numbered = is_numbered
        self._wanted = asyncio.Event()
        self._is_failing = False
        self.is_displaced = False
        self.num_sent = 0
        self.num_accepted = 0

    def wake(self) -> None:
        """Tell the writer that `take` has something to return."""
        self._wanted.set()

    async def run(self) -> None:
        """Write until cancelled, or displaced."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while fields := self._take():
                self.num_sent += 1
                await self._write(fields)
                if self.is_displaced:
                    return
                self.num_accepted = self.num_sent

    async def _write(self, fields: Mapping[bytes, bytes]) -> None:
        entry = f"{self.num_sent}-0" if self._is_numbered else "*"
        while True:
            with ignore_outages():
                try:
                    await self._client.xadd(self._key, dict(fields), id=entry)
                    self._is_failing = False
                    return
                except OUTAGES as error:
                    if self._is_numbered and "equal or smaller" in str(error):
                        # Equal: the answer to an earlier try was lost.
                        self.is_displaced = await last_entry(self._client, self._key) != entry
                        return
                    if not self._is_failing:
                        log.warning("the bus does not accept an entry: %s", error)
                    self._is_failing = True
                    if isinstance(error, redis.ResponseError):
                        await close_idle_connections(self._client)
                    raise
            await asyncio.sleep(RETRY_S)


class StreamReader:
    """Reads the entries of a stream after `last`."""

    def __init__(self, client: Client, key: str, last: str = "0-0") -> None:
        self._client = client
        self._key = key
        self.last = last

    async def read(self) -> list[tuple[int, dict[bytes, bytes]]]:
        """Return the next entries, as number and fields; none after a second without any. Waits through outages."""
        found = None
        with ignore_outages():
            found = await self._client.xread({self._key: self.last}, block=int(BLOCK_S * 1000), count=64)
        if found is None:
            await asyncio.sleep(RETRY_S)
            return []
        entries = found[0][1] if found else []
        if entries:
            self.last = entries[-1][0].decode()
        return [(int(entry.partition(b"-")[0]), fields) for entry, fields in entries]


@contextmanager
def ignore_outages() -> Iterator[None]:
    """Ignore that the server does not answer, but not that the task is cancelled meanwhile.

    redis-py sometimes turns a cancellation into such an error, and loses one that comes when it has just sent a command
    (`asyncio.wait_for` before Python 3.12).
    """
    task = asyncio.current_task()
    num_before = task.cancelling() if task is not None else 0
    with suppress(*OUTAGES):
        yield
    if task is not None and task.cancelling() > num_before:
        raise asyncio.CancelledError


async def last_entry(client: Client, key: str) -> str:
    """Return the id of the last entry of a stream, "0-0" without one."""
    entries = await client.xrevrange(key, count=1)
    return entries[0][0].decode() if entries else "0-0"


async def alive(client: Client, gateways: Iterable[str]) -> set[str]:
    """Return which of these gateways hold their lease."""
    names = list(gateways)
    values = await client.mget([gateway_key(name) for name in names]) if names else []
    return {name for name, value in zip(names, values, strict=True) if value is not None}
