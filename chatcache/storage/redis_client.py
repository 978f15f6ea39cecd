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
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import redis
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.retry import Retry as SyncRetry

from chatcache.conversations.store import StoreUnavailableError, StoreUnusableError
from chatcache.conversations.tree import IN_PROGRESS, INCOMPLETE, Turn
from chatcache.storage.redis_layout import (
    API_KEYS_KEY,
    RUNNING_KEY,
    alive_key,
    head_key,
    pack_turn,
    turns_key,
    unpack_turn,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Client = Any  # redis-py comes without types
Pipe = Any

TIMEOUT_S = 0.6
SLOW_TIMEOUT_S = 30.0
_NUM_CONNECTIONS = 32
_PROBE_S = 0.2
_MAX_TRIES = 64
_LOST = (redis.ConnectionError, redis.TimeoutError, OSError)
_CLOSED = "the handler is closed"  # uvloop's word, no OSError, for a connection that was reset a moment ago
_NO_ANSWER = "the store does not answer now"  # the log says which and why


@dataclass(frozen=True, slots=True)
class RefusedCommand:
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
            self._slow_client = _client(url, SLOW_TIMEOUT_S, timeout_s)
        except (ValueError, redis.RedisError) as error:
            raise StoreUnusableError(f"not a URL of a Redis server: {error}") from None
        kwargs = self._client.connection_pool.connection_kwargs
        self.address = kwargs.get("path") or f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"
        self._check_layout = greet
        self._slots = asyncio.Semaphore(_NUM_CONNECTIONS)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._down_reason: str | None = "nobody has asked it yet"
        self._connect_task: asyncio.Task[None] | None = None
        self._num_waiting = 0
        self._ping_task: asyncio.Task[None] | None = None
        self._reconnect_task: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self, work: Callable[[Client], Awaitable[Result]], *, order: str = "", is_slow: bool = False
    ) -> Result:
        """Do `work`, to its end even if the caller leaves, behind what came before it with the same `order`.

        Raises: StoreUnavailableError; then it is not known whether what was written is there.
        """
        task = asyncio.create_task(self._run_in_order(work, order, is_slow))
        self._tasks.add(task)
        task.add_done_callback(self._retrieve_exception)
        return await asyncio.shield(task)

    async def transact(
        self,
        watched: Sequence[str],
        work: Callable[[Pipe], Awaitable[Result]],
        *,
        order: str,
        is_slow: bool = False,
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

        return await self.run(attempt, order=order, is_slow=is_slow)

    async def close(self) -> None:
        """Finish what was begun, then close all connections."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        asking = [task for task in (self._connect_task, self._ping_task, self._reconnect_task) if task is not None]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for client in (self._client, self._slow_client):
            await client.aclose(close_connection_pool=True)

    def _retrieve_exception(self, task: asyncio.Task[Any]) -> None:
        """Take note of a failure, so that none is logged as unheard when the caller has gone away."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _run_in_order(self, work: Callable[[Client], Awaitable[Result]], order: str, is_slow: bool) -> Result:
        if not order:
            return await self._run_checked(work, is_slow)
        lock = self._locks.get(order)
        if lock is None:
            lock = self._locks[order] = asyncio.Lock()
        await self._acquire(lock)
        try:
            return await self._run_checked(work, is_slow)
        finally:
            lock.release()

    async def _run_checked(self, work: Callable[[Client], Awaitable[Result]], is_slow: bool) -> Result:
        if self._connect_task is None:
            self._connect_task = asyncio.create_task(self._connect())
        if not self._connect_task.done():
            await asyncio.wait([self._connect_task])
        await self._acquire(self._slots)
        try:
            if self._down_reason is not None:
                raise StoreUnavailableError(_NO_ANSWER)
            return await work(self._slow_client if is_slow else self._client)
        except (*_LOST, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                raise
            self._mark_down(error)
            raise StoreUnavailableError(_NO_ANSWER) from error
        except redis.RedisError as error:  # read only, out of memory, cannot write its own file, not allowed
            log.warning("the store at %s refuses: %s", self.address, _said(error))
            raise StoreUnavailableError("the store takes nothing now") from error
        finally:
            self._slots.release()

    async def _acquire(self, gate: asyncio.Lock | asyncio.Semaphore) -> None:
        """Acquire it, in order. Raises: StoreUnavailableError when the server falls silent meanwhile."""
        if not self._num_waiting and not gate.locked():
            await gate.acquire()  # at once
            return
        self._num_waiting += 1
        taking = asyncio.ensure_future(gate.acquire())
        try:
            while not (await asyncio.wait([taking], timeout=_PROBE_S))[0]:
                await self._ping_once()
                if self._down_reason is not None and not taking.done():
                    raise StoreUnavailableError(_NO_ANSWER)
        except BaseException:
            if not taking.cancel() and not taking.cancelled():
                gate.release()
            raise
        finally:
            self._num_waiting -= 1

    async def _ping_once(self) -> None:
        """Ping the server on behalf of all who wait in line, unless it is known to be silent."""
        if self._down_reason is None and (self._ping_task is None or self._ping_task.done()):
            self._ping_task = asyncio.create_task(self._ping())
        if self._ping_task is not None:
            await asyncio.wait([self._ping_task])

    async def _ping(self) -> None:
        try:
            await self._client.ping()
        except (*_LOST, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                raise
            self._mark_down(error)
        except redis.RedisError:  # it answers, if not as one would like
            pass

    def _mark_down(self, error: Exception) -> None:
        """The server does not answer: refuse everybody until it does."""
        if self._down_reason is None:
            self._down_reason = _said(error)
            log.warning("the store at %s does not answer: %s", self.address, self._down_reason)
            self._reconnect_task = asyncio.create_task(self._reconnect())

    async def _connect(self) -> None:
        """Ask the server for the first time."""
        await self._try_connect()
        if self._down_reason is not None:
            log.warning("the store at %s does not answer: %s", self.address, self._down_reason)
            self._reconnect_task = asyncio.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        while self._down_reason is not None:
            await asyncio.sleep(_PROBE_S)
            await self._try_connect()
        log.warning("the store at %s answers again", self.address)

    async def _try_connect(self) -> None:
        try:
            for client in (self._client, self._slow_client):  # connections of before may lead nowhere
                await client.connection_pool.disconnect(inuse_connections=False)
            await self._client.ping()
            await self._check_layout(self._client)
        except (redis.RedisError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                raise
            self._down_reason = _said(error)
        except StoreUnusableError as error:
            self._down_reason = error.message
        else:
            self._down_reason = None


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


def run_commands(url: str, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
    """What a server answers to each command, before there is an event loop: a value, or what it says of a refusal.

    Raises: StoreUnavailableError.
    """
    options = {"socket_timeout": SLOW_TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "protocol": 2}
    client = redis.Redis.from_url(url, retry=SyncRetry(NoBackoff(), 0), **options)
    found: list[Any] = []
    try:
        for command in commands:
            try:
                found.append(client.execute_command(*command))
            except redis.ResponseError as error:
                found.append(RefusedCommand(_said(error)))
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
class RedisPermissions:
    """`settings` are empty for a user who may not see them. `has_aof`: None where nothing tells."""

    settings: dict[str, str]
    has_aof: bool | None
    can_script: bool
    can_read_all_keys: bool
    num_keys: int

    @property
    def can_read_settings(self) -> bool:
        return bool(self.settings)


def probe_permissions(url: str) -> RedisPermissions:
    """Raises: StoreUnavailableError."""
    asked: list[tuple[str | int, ...]] = [("CONFIG", "GET", name) for name in _SETTINGS]
    asked += [("WAITAOF", 1, 0, 1000), ("EVAL", "return 1", 0), ("EXISTS", _FOREIGN), ("HLEN", API_KEYS_KEY)]
    *told, aof, script, foreign, num_keys = run_commands(url, asked)
    settings = {name: value for name, each in zip(_SETTINGS, told, strict=True) if (value := _setting(each))}
    return RedisPermissions(
        settings=settings,
        has_aof=settings["appendonly"] == "yes" if "appendonly" in settings else _has_aof(aof),
        can_script=not isinstance(script, RefusedCommand),
        can_read_all_keys=not isinstance(foreign, RefusedCommand),
        num_keys=0 if isinstance(num_keys, RefusedCommand) else int(num_keys),
    )


def _setting(told: Any) -> str:
    """The value in an answer to CONFIG GET, of either shape that redis-py gives it."""
    if isinstance(told, RefusedCommand):
        return ""
    values = list(told.values()) if isinstance(told, dict) else list(told)[1:]
    value = values[0] if values else b""
    return value.decode() if isinstance(value, bytes) else str(value)


def _has_aof(waited: Any) -> bool | None:
    """WAITAOF, of Redis 7.2 and later, is for anybody, and fails where there is nothing to wait for."""
    if not isinstance(waited, RefusedCommand):
        return True
    return False if "appendonly is disabled" in waited.reason else None


LEASE_S = 15.0


async def _exists(client: Client, key: str) -> bool:
    return bool(await client.exists(key))


class GatewayHeartbeats:
    """This process's name in the store, renewed while it lives, and a look after the others."""

    def __init__(self, link: RedisConnection, lease_s: float = LEASE_S) -> None:
        self._connection = link
        self._lease_s = lease_s
        self._process = secrets.token_hex(8)
        self._own_responses: set[str] = set()
        self._loop_task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keep the lease from now on."""
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._heartbeat_loop())

    def register(self, turn: Turn | None) -> None:
        """A response is about to be stored; as under way, it is this process's until it is stored otherwise."""
        if turn is not None and turn.status == IN_PROGRESS:
            self._own_responses.add(turn.id)

    def confirm(self, turn: Turn | None, *, stored: bool) -> None:
        """It was stored, or (`stored` False) perhaps not: one that begins is nobody's then."""
        if turn is not None and (turn.status == IN_PROGRESS) != stored:
            self._own_responses.discard(turn.id)

    def record(self, pipe: Pipe, conversation_id: str, turn: Turn) -> None:
        """Note with the response itself that it runs here, or no more."""
        if turn.status == IN_PROGRESS:
            pipe.hset(RUNNING_KEY, turn.id, f"{self._process} {conversation_id}")
            self.renew(pipe)
        else:
            pipe.hdel(RUNNING_KEY, turn.id)

    def renew(self, pipe: Pipe) -> None:
        pipe.set(alive_key(self._process), 1, px=int(self._lease_s * 1000))

    async def check(self) -> None:
        """Write something. Raises: StoreUnavailableError."""

        async def write(client: Client) -> None:
            await client.set(alive_key(self._process), 1, px=int(self._lease_s * 1000))

        await self._connection.run(write)

    async def close(self) -> None:
        """Go: what is still under way is nobody's."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            with contextlib.suppress(StoreUnavailableError):
                await self._connection.run(lambda client: client.delete(alive_key(self._process)))

    async def _heartbeat_loop(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailableError):
                await self.check()
                await self._end_orphaned()
            await asyncio.sleep(self._lease_s / 3)

    async def _end_orphaned(self) -> None:
        """Responses that are under way nowhere become incomplete."""
        running: dict[bytes, bytes] = await self._connection.run(lambda client: client.hgetall(RUNNING_KEY))
        is_alive: dict[str, bool] = {self._process: True}
        for response, entry in running.items():
            process, _, conversation_id = entry.decode().partition(" ")
            if process not in is_alive:
                key = alive_key(process)
                is_alive[process] = bool(await self._connection.run(partial(_exists, key=key)))
            is_run = is_alive[process] and (process != self._process or response.decode() in self._own_responses)
            if not is_run:
                await self._end_response(conversation_id, response.decode(), entry)

    async def _end_response(self, conversation_id: str, response_id: str, entry: bytes) -> None:
        async def work(pipe: Pipe) -> None:
            stored = await pipe.hget(turns_key(conversation_id), response_id)
            present = await pipe.hget(RUNNING_KEY, response_id)
            turn = unpack_turn(stored) if stored is not None else None
            pipe.multi()
            if present == entry:
                pipe.hdel(RUNNING_KEY, response_id)
                if turn is not None and turn.status == IN_PROGRESS:
                    pipe.hset(turns_key(conversation_id), response_id, pack_turn(replace(turn, status=INCOMPLETE)))

        key = head_key(conversation_id)
        await self._connection.transact((key,), work, order=key)
