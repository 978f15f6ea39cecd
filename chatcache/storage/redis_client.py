"""One Redis server: connections to it, transactions on it, and whether it answers.

Every piece of work runs on a task of its own, so a caller that goes away leaves no half-read reply behind for the next
one. Who finds that the server does not answer tells everybody: from then on all are refused at once, until a ping comes
back. Who has to wait in line, maybe behind work that is given long, has the server pinged meanwhile. So nobody waits
longer than one timeout and a bit for a server that is silent, however many there are.

What a Redis server lets its user see and do, found out by asking for things that change nothing.

Who runs which response: those whose process has died become incomplete, whoever notices first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import redis
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.retry import Retry as SyncRetry

from chatcache.conversations.store import StoreUnavailableError, StoreUnusableError
from chatcache.conversations.tree import IN_PROGRESS, INCOMPLETE, Turn
from chatcache.storage.redis_layout import KEYS, RUNNING, alive_key, head_key, pack_turn, turn_of, turns_key

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Client = Any  # redis-py comes without types
Pipe = Any

TIMEOUT_S = 0.6
PATIENCE_S = 30.0
_NUM_CONNECTIONS = 32
_PROBE_S = 0.2
_MAX_TRIES = 64
_LOST = (redis.ConnectionError, redis.TimeoutError, OSError)
_CLOSED = "the handler is closed"  # uvloop's word, no OSError, for a connection that was reset a moment ago
_NO_ANSWER = "the store does not answer now"  # the log says which and why


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server's own words for why it does not do something."""

    reason: str


class RedisConnection:
    """Bounded connections to one server. Belongs to one event loop from its first use on.

    `check_layout` runs whenever the server is found again, on a server that may hold anything by then.
    """

    def __init__(self, url: str, greet: Callable[[Client], Awaitable[None]], *, timeout_s: float = TIMEOUT_S) -> None:
        """Raises: StoreUnusableError for a URL that is none, or a server that does not let us in."""
        try:
            self._client = _client(url, timeout_s, timeout_s)
            # For work that takes the server itself long; whether it is there at all, the others find out.
            self._patient = _client(url, PATIENCE_S, timeout_s)
        except (ValueError, redis.RedisError) as error:
            raise StoreUnusableError(f"not a URL of a Redis server: {error}") from None
        kwargs = self._client.connection_pool.connection_kwargs
        self.where = kwargs.get("path") or f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"
        self._greet = greet
        self._slots = asyncio.Semaphore(_NUM_CONNECTIONS)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._down: str | None = "nobody has asked it yet"
        self._first: asyncio.Task[None] | None = None
        self._num_in_line = 0
        self._asking: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self, work: Callable[[Client], Awaitable[Result]], *, order: str = "", is_patient: bool = False
    ) -> Result:
        """Do `work`, to its end even if the caller leaves, behind what came before it with the same `order`.

        Raises: StoreUnavailableError; then it is not known whether what was written is there.
        """
        task = asyncio.create_task(self._ordered(work, order, is_patient))
        self._tasks.add(task)
        task.add_done_callback(self._hear)
        return await asyncio.shield(task)

    async def transact(
        self,
        watched: Sequence[str],
        work: Callable[[Pipe], Awaitable[Result]],
        *,
        order: str,
        is_patient: bool = False,
    ) -> Result:
        """Do `work` if none of the keys changes meanwhile, and again if one does.

        `work` reads at once through the pipe it is given, then calls its `multi()` and queues what is to be done: all
        of that or nothing. What it raises undoes all.
        """

        async def attempt(client: Client) -> Result:
            for _ in range(_MAX_TRIES):
                async with client.pipeline(transaction=True) as pipe:
                    try:
                        await pipe.watch(*watched)
                        result = await work(pipe)
                        await pipe.execute()
                        return result
                    except redis.WatchError as error:
                        lost = error.__context__
                        if isinstance(lost, _LOST):  # redis-py would have us try again, but it may have been done
                            raise redis.ConnectionError(_said(lost)) from None
            raise StoreUnavailableError("others change the same all the time")

        return await self.run(attempt, order=order, is_patient=is_patient)

    async def close(self) -> None:
        """Finish what was begun, then close all connections."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        asking = [task for task in (self._first, self._asking, self._probing) if task is not None]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for client in (self._client, self._patient):
            await client.aclose(close_connection_pool=True)

    def _hear(self, task: asyncio.Task[Any]) -> None:
        """Take note of a failure, so that none is logged as unheard when the caller has gone away."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _ordered(self, work: Callable[[Client], Awaitable[Result]], order: str, is_patient: bool) -> Result:
        if not order:
            return await self._guarded(work, is_patient)
        lock = self._locks.get(order)
        if lock is None:
            lock = self._locks[order] = asyncio.Lock()
        await self._wait_in_line(lock)
        try:
            return await self._guarded(work, is_patient)
        finally:
            lock.release()

    async def _guarded(self, work: Callable[[Client], Awaitable[Result]], is_patient: bool) -> Result:
        if self._first is None:
            self._first = asyncio.create_task(self._find())
        if not self._first.done():
            await asyncio.wait([self._first])
        await self._wait_in_line(self._slots)
        try:
            if self._down is not None:
                raise StoreUnavailableError(_NO_ANSWER)
            return await work(self._patient if is_patient else self._client)
        except (*_LOST, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                raise
            self._lose(error)
            raise StoreUnavailableError(_NO_ANSWER) from error
        except redis.RedisError as error:  # read only, out of memory, cannot write its own file, not allowed
            log.warning("the store at %s refuses: %s", self.where, _said(error))
            raise StoreUnavailableError("the store takes nothing now") from error
        finally:
            self._slots.release()

    async def _wait_in_line(self, gate: asyncio.Lock | asyncio.Semaphore) -> None:
        """Acquire it, in order. Raises: StoreUnavailableError when the server falls silent meanwhile."""
        if not self._num_in_line and not gate.locked():
            await gate.acquire()  # at once
            return
        self._num_in_line += 1
        taking = asyncio.ensure_future(gate.acquire())
        try:
            while not (await asyncio.wait([taking], timeout=_PROBE_S))[0]:
                await self._ask()
                if self._down is not None and not taking.done():
                    raise StoreUnavailableError(_NO_ANSWER)
        except BaseException:
            if not taking.cancel() and not taking.cancelled():
                gate.release()
            raise
        finally:
            self._num_in_line -= 1

    async def _ask(self) -> None:
        """Ping the server on behalf of all who wait in line, unless it is known to be silent."""
        if self._down is None and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ping())
        if self._asking is not None:
            await asyncio.wait([self._asking])

    async def _ping(self) -> None:
        try:
            await self._client.ping()
        except (*_LOST, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                raise
            self._lose(error)
        except redis.RedisError:  # it answers, if not as one would like
            pass

    def _lose(self, error: Exception) -> None:
        """The server does not answer: refuse everybody until it does."""
        if self._down is None:
            self._down = _said(error)
            log.warning("the store at %s does not answer: %s", self.where, self._down)
            self._probing = asyncio.create_task(self._find_again())

    async def _find(self) -> None:
        """Ask the server for the first time."""
        await self._try()
        if self._down is not None:
            log.warning("the store at %s does not answer: %s", self.where, self._down)
            self._probing = asyncio.create_task(self._find_again())

    async def _find_again(self) -> None:
        while self._down is not None:
            await asyncio.sleep(_PROBE_S)
            await self._try()
        log.warning("the store at %s answers again", self.where)

    async def _try(self) -> None:
        try:
            for client in (self._client, self._patient):  # connections of before may lead nowhere
                await client.connection_pool.disconnect(inuse_connections=False)
            await self._client.ping()
            await self._greet(self._client)
        except (redis.RedisError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                raise
            self._down = _said(error)
        except StoreUnusableError as error:
            self._down = error.message
        else:
            self._down = None


def _client(url: str, timeout_s: float, connect_timeout_s: float) -> Client:
    pool = ConnectionPool.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=connect_timeout_s,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        decode_responses=False,
        max_connections=2 * _NUM_CONNECTIONS,
    )
    return Redis(connection_pool=pool)


def probe_server(url: str, key: str) -> bytes | None:
    """The value of a key, before there is an event loop, or None.

    Raises: StoreUnusableError for a server that does not let us in; StoreUnavailableError where there is none yet.
    """
    options = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "protocol": 2}
    try:
        client = redis.Redis.from_url(url, retry=SyncRetry(NoBackoff(), 0), **options)
    except ValueError as error:
        raise StoreUnusableError(f"not a URL of a Redis server: {error}") from None
    try:
        value: bytes | None = client.get(key)
    except redis.AuthenticationError as error:  # a connection error, to redis-py
        raise StoreUnusableError(f"the Redis server does not let us in: {_said(error)}") from None
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise StoreUnavailableError(_said(error)) from None
    except redis.RedisError as error:
        raise StoreUnusableError(f"the Redis server cannot be used: {_said(error)}") from None
    finally:
        client.close()
    return value


def answers(url: str, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
    """What a server answers to each command, before there is an event loop: a value, or what it says of a refusal.

    Raises: StoreUnavailableError.
    """
    options = {"socket_timeout": PATIENCE_S, "socket_connect_timeout": TIMEOUT_S, "protocol": 2}
    client = redis.Redis.from_url(url, retry=SyncRetry(NoBackoff(), 0), **options)
    found: list[Any] = []
    try:
        for command in commands:
            try:
                found.append(client.execute_command(*command))
            except redis.ResponseError as error:
                found.append(Refusal(_said(error)))
    except (redis.RedisError, OSError) as error:
        raise StoreUnavailableError(_said(error)) from None
    finally:
        client.close()
    return found


def _said(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


_SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy")
_FOREIGN = "a key that is none of chatcache's"


@dataclass(frozen=True, slots=True)
class Rights:
    """`settings` are empty for a user who may not see them. `has_aof`: None where nothing tells."""

    settings: dict[str, str]
    has_aof: bool | None
    may_script: bool
    sees_all_keys: bool
    num_keys: int

    @property
    def may_administer(self) -> bool:
        return bool(self.settings)


def probe_permissions(url: str) -> Rights:
    """Raises: StoreUnavailableError."""
    asked: list[tuple[str | int, ...]] = [("CONFIG", "GET", name) for name in _SETTINGS]
    asked += [("WAITAOF", 1, 0, 1000), ("EVAL", "return 1", 0), ("EXISTS", _FOREIGN), ("HLEN", KEYS)]
    *told, aof, script, foreign, num_keys = answers(url, asked)
    settings = {name: value for name, each in zip(_SETTINGS, told, strict=True) if (value := _setting(each))}
    return Rights(
        settings=settings,
        has_aof=settings["appendonly"] == "yes" if "appendonly" in settings else _has_aof(aof),
        may_script=not isinstance(script, Refusal),
        sees_all_keys=not isinstance(foreign, Refusal),
        num_keys=0 if isinstance(num_keys, Refusal) else int(num_keys),
    )


def _setting(told: Any) -> str:
    """The value in an answer to CONFIG GET, of either shape that redis-py gives it."""
    if isinstance(told, Refusal):
        return ""
    values = list(told.values()) if isinstance(told, dict) else list(told)[1:]
    value = values[0] if values else b""
    return value.decode() if isinstance(value, bytes) else str(value)


def _has_aof(waited: Any) -> bool | None:
    """WAITAOF, of Redis 7.2 and later, is for anybody, and fails where there is nothing to wait for."""
    if not isinstance(waited, Refusal):
        return True
    return False if "appendonly is disabled" in waited.reason else None


LEASE_S = 15.0


class GatewayHeartbeats:
    """This process's name in the store, renewed while it lives, and a look after the others."""

    def __init__(self, link: RedisConnection, lease_s: float = LEASE_S) -> None:
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
        """Write something. Raises: StoreUnavailableError."""

        async def write(client: Client) -> None:
            await client.set(alive_key(self._process), 1, px=int(self._lease_s * 1000))

        await self._link.run(write)

    async def close(self) -> None:
        """Go: what is still under way is nobody's."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            with contextlib.suppress(StoreUnavailableError):
                await self._link.run(lambda client: client.delete(alive_key(self._process)))

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailableError):
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
