"""Connections to one Redis server: transactions, outages, permissions, heartbeats and messages of gateways.

Every piece of work runs in its own task, so that a cancelled caller leaves no half-read reply on a connection. When a
piece of work finds that the server does not answer, all others are rejected at once until a ping succeeds; while work
waits for a connection or a lock, the server is pinged. So a caller waits only little longer than one timeout for a
silent server, however many callers there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import redis

from chatcache.conversations.store import StoreUnavailableError, StoreUnusableError
from chatcache.conversations.tree import IN_PROGRESS, INCOMPLETE, ResponseElsewhereError, Turn
from chatcache.redis_urls import (
    close_idle_connections,
    num_waited_replicas,
    open_client,
    open_sync_client,
    server_name,
    transaction,
)
from chatcache.storage.redis_layout import (
    ALL_GATEWAYS_CHANNEL,
    API_KEYS_KEY,
    RUNNING_KEY,
    alive_key,
    checkpoint_key,
    gateway_channel,
    head_key,
    turns_key,
    unpack_turn,
)

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Client = Any  # redis-py has no types
Pipe = Any
TIMEOUT_S = 0.6
SLOW_TIMEOUT_S = 30.0
_NUM_CONNECTIONS = 32
_PROBE_S = 0.2
_MAX_TRIES = 64
_LOST = (redis.ConnectionError, redis.TimeoutError, OSError)
_CLOSED = "the handler is closed"  # uvloop's RuntimeError for a connection that was just reset
_NO_ANSWER = "the store does not answer now"  # the log names the server and the reason
_SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy")
_FOREIGN_KEY = "a key outside of chatcache:"
LEASE_S = 15.0
_QUIET_S = 1.0  # after which the connection of a subscription is checked


@dataclass(frozen=True, slots=True)
class RefusedCommand:
    """The server's error message for a command that it rejected."""

    reason: str


class RedisConnection:
    """A bounded pool of connections to one server.

    Belongs to one event loop from its first use on. `check_layout` checks the layout of the stored data whenever the
    server is connected for the first time or after an outage, because it may contain other data by then.
    """

    def __init__(
        self, url: str, check_layout: Callable[[Client], Awaitable[None]], *, timeout_s: float | None = None
    ) -> None:
        """Configure the connections; `timeout_s` is TIMEOUT_S by default. Raises: StoreUnusableError for a bad URL."""
        timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        try:
            self._client = _client(url, timeout_s, timeout_s)
            # For work that takes the server long; outages are detected by the other client.
            self._slow_client = _client(url, SLOW_TIMEOUT_S, timeout_s)
            self._num_waited_replicas = num_waited_replicas(url)
        except (ValueError, redis.RedisError) as error:
            raise StoreUnusableError(f"not a URL of a Redis server: {error}") from None
        self.address = server_name(url)
        self._check_layout = check_layout
        self._slots = asyncio.Semaphore(_NUM_CONNECTIONS)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._down_reason: str | None = "not connected yet"
        self._connect_task: asyncio.Task[None] | None = None
        self._num_waiting = 0
        self._ping_task: asyncio.Task[None] | None = None
        self._reconnect_task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self, work: Callable[[Client], Awaitable[Result]], *, order: str = "", is_slow: bool = False
    ) -> Result:
        """Run `work`, to its end even if the caller is cancelled.

        It starts after earlier work of the same `order`. `is_slow`: allow `SLOW_TIMEOUT_S` for it.
        Raises: StoreUnavailableError; it is then unknown whether writes were stored.
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
        """Run `work` under WATCH of the keys, and again if one of them changed meanwhile.

        `work` reads through the pipe, then calls its `multi()` and queues the writes, which are executed all or not at
        all. An exception of `work` discards them.
        """

        async def attempt(client: Client) -> Result:
            for _ in range(_MAX_TRIES):
                async with transaction(client, self._num_waited_replicas) as pipe:
                    try:
                        await pipe.watch(*watched)
                        result = await work(pipe)
                        await pipe.execute()
                        return result
                    except redis.WatchError as error:
                        lost = error.__context__
                        if isinstance(lost, _LOST):  # a lost connection: the write may have happened
                            raise redis.ConnectionError(_error_text(lost)) from None
            raise StoreUnavailableError("the conversation is changed by others all the time")

        return await self.run(attempt, order=order, is_slow=is_slow)

    async def close(self) -> None:
        """Finish running work, then close all connections."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._is_closed = True  # redis-py sometimes turns a cancellation into a connection error
        tasks = [task for task in (self._connect_task, self._ping_task, self._reconnect_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in (self._client, self._slow_client):
            await client.aclose(close_connection_pool=True)

    def _retrieve_exception(self, task: asyncio.Task[Any]) -> None:
        """Mark a task's exception as retrieved, so that asyncio does not log it.

        The caller, which would have received it, may have been cancelled.
        """
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
        except redis.RedisError as error:  # read only, out of memory, disk error, no permission
            log.warning("the store at %s refuses: %s", self.address, _error_text(error))
            await self._close_idle_connections()
            raise StoreUnavailableError("the store rejects writes now") from error
        finally:
            self._slots.release()

    async def _acquire(self, gate: asyncio.Lock | asyncio.Semaphore) -> None:
        """Acquire a lock or semaphore; waiting callers get it in the order of their calls.

        Raises: StoreUnavailableError if the server stops answering meanwhile.
        """
        if not self._num_waiting and not gate.locked():
            await gate.acquire()  # without waiting
            return
        self._num_waiting += 1
        acquiring = asyncio.ensure_future(gate.acquire())
        try:
            while not (await asyncio.wait([acquiring], timeout=_PROBE_S))[0]:
                await self._ping_once()
                if self._down_reason is not None and not acquiring.done():
                    raise StoreUnavailableError(_NO_ANSWER)
        except BaseException:
            if not acquiring.cancel() and not acquiring.cancelled():
                gate.release()
            raise
        finally:
            self._num_waiting -= 1

    async def _ping_once(self) -> None:
        """Ping the server on behalf of all waiting callers, unless it is known to be silent.

        The first connection takes the place of the ping: until it ends, nothing is known.
        """
        if self._connect_task is not None and not self._connect_task.done():
            await asyncio.wait([self._connect_task])
            return
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
        except redis.RedisError:  # an error reply is an answer
            pass

    def _mark_down(self, error: Exception) -> None:
        """Reject all work until the server answers again."""
        if self._down_reason is None:
            self._down_reason = _error_text(error)
            log.warning("the store at %s does not answer: %s", self.address, self._down_reason)
            self._reconnect_task = asyncio.create_task(self._reconnect())

    async def _connect(self) -> None:
        """Connect to the server for the first time."""
        await self._try_connect()
        if self._down_reason is not None:
            log.warning("the store at %s does not answer: %s", self.address, self._down_reason)
            self._reconnect_task = asyncio.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        while self._down_reason is not None:
            if self._is_closed:
                return
            await asyncio.sleep(_PROBE_S)
            await self._try_connect()
        log.warning("the store at %s answers again", self.address)

    async def _try_connect(self) -> None:
        try:
            await self._close_idle_connections()  # they may be dead
            await self._client.ping()
            await self._check_layout(self._client)
        except (redis.RedisError, OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                raise
            self._down_reason = _error_text(error)
        except StoreUnusableError as error:
            self._down_reason = error.message
        else:
            self._down_reason = None

    async def _close_idle_connections(self) -> None:
        for client in (self._client, self._slow_client):
            await close_idle_connections(client)


class RunningEntry(NamedTuple):
    """An entry in the table of running responses: the process that runs one, and how often it was taken over."""

    process: str
    conversation_id: str
    num_takeovers: int

    @classmethod
    def decode(cls, entry: bytes) -> RunningEntry:
        process, conversation_id, *number = entry.decode().split(" ")
        return cls(process, conversation_id, int(*number))


class GatewayHeartbeats:
    """The liveness lease of this gateway process, and the clean-up after processes that died.

    A response in progress belongs to one process. When that process's lease expires, any gateway marks it incomplete.
    """

    def __init__(
        self,
        link: RedisConnection,
        end_response: Callable[[str, str, bytes], Awaitable[None]],
        lease_s: float = LEASE_S,
    ) -> None:
        """Use a connection.

        `end_response` ends an orphaned response, given its conversation, its id and its entry in the table of running
        responses, unless the entry has changed.
        """
        self._connection = link
        self._end_response = end_response
        self._lease_s = lease_s
        self.process = self._process = secrets.token_hex(8)
        self._own_responses: set[str] = set()
        self._given_up: dict[str, float] = {}  # when this process stopped running a response, in monotonic seconds
        self.leaves_responses = False  # to another process, which takes them over soon
        self._loop_task: asyncio.Task[None] | None = None

    async def find_runner(self, response_id: str) -> str | None:
        """Return the process that runs a response, None if none does.

        A response whose process has died is ended first. Raises: StoreUnavailableError.
        """

        async def read(client: Client) -> tuple[bytes | None, bool]:
            entry: bytes | None = await client.hget(RUNNING_KEY, response_id)
            if entry is None:
                return None, False
            process = RunningEntry.decode(entry).process
            return entry, process == self._process or await _exists(client, alive_key(process))

        entry, is_alive = await self._connection.run(read)
        if entry is None:
            return None
        found = RunningEntry.decode(entry)
        if is_alive:
            return found.process
        await self._end_response(found.conversation_id, response_id, entry)
        return None

    async def running_ids(self) -> Sequence[str]:
        """Return the ids of all running responses, of every process. Raises: StoreUnavailableError."""
        found: list[bytes] = await self._connection.run(lambda client: client.hkeys(RUNNING_KEY))
        return [name.decode() for name in found]

    async def take_over(self, conversation_id: str, response_id: str, num_takeovers: int) -> bool:
        """Have this process run a response of a process that has ended, whose result is then refused.

        `num_takeovers`: of the response, this one included; the caller has it from the record of the response, which
        one process has at a time. Returns False if the response does not run any more, or if a process with a higher
        number runs it: this one was suspended meanwhile. Raises: StoreUnavailableError.
        """
        key = head_key(conversation_id)

        async def work(pipe: Pipe) -> bool:
            entry, head = await pipe.hget(RUNNING_KEY, response_id), await pipe.get(key)
            pipe.multi()
            if entry is None or head is None or RunningEntry.decode(entry).num_takeovers > num_takeovers:
                return False
            pipe.set(key, head)  # a change that the other process has begun fails, and begins again
            pipe.hset(RUNNING_KEY, response_id, f"{self._process} {conversation_id} {num_takeovers}")
            self.renew(pipe)
            return True

        self._given_up.pop(response_id, None)
        self._own_responses.add(response_id)
        is_taken = False
        try:
            is_taken = await self._connection.transact((key,), work, order=key)
        finally:
            if not is_taken:
                self._own_responses.discard(response_id)
        return is_taken

    def give_up(self, response_id: str) -> None:
        """Record that this process does not run a response any more.

        It is ended as orphaned unless another process takes it over within the time of a lease.
        """
        if response_id in self._own_responses:
            self._own_responses.discard(response_id)
            self._given_up[response_id] = time.monotonic()

    async def require_own(self, pipe: Pipe, conversation_id: str, turn: Turn | None) -> None:
        """Check that no other process runs a response, or has ended or deleted it.

        One that was only interrupted, because the lease of this process had expired, may end.

        Raises: ResponseElsewhereError.
        """
        if turn is None or turn.status == IN_PROGRESS:
            return
        entry: bytes | None = await pipe.hget(RUNNING_KEY, turn.id)
        if entry is not None:
            is_elsewhere = RunningEntry.decode(entry).process != self._process
        else:
            stored = await pipe.hget(turns_key(conversation_id), turn.id)
            found = unpack_turn(stored) if stored is not None else None
            # An interrupted one is incomplete and has no usage.
            is_elsewhere = found is None or found.usage is not None or found.status not in (IN_PROGRESS, INCOMPLETE)
        if is_elsewhere:
            raise ResponseElsewhereError(turn.id, "end", "response_id")

    def start(self) -> None:
        """Start renewing the lease, unless started."""
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._heartbeat_loop())

    def register(self, turn: Turn | None) -> None:
        """Record, before a response in progress is stored, that this process runs it."""
        if turn is not None and turn.status == IN_PROGRESS:
            self._own_responses.add(turn.id)

    def confirm(self, turn: Turn | None, *, stored: bool) -> None:
        """Record whether the write of a response succeeded.

        A new response whose write failed or has an unknown outcome (`stored` False) is no longer this process's own; if
        it was stored after all, it is ended as orphaned.
        """
        if turn is not None and (turn.status == IN_PROGRESS) != stored:
            self._own_responses.discard(turn.id)

    def record(self, pipe: Pipe, conversation_id: str, turn: Turn) -> None:
        """Queue, together with the write of a response, an entry in the table of running responses.

        It records that this process runs the response. If the response has ended, its entry is removed. Its list of
        checkpoints exists as long, because a checkpoint is only added to a list that exists.
        """
        key = checkpoint_key(conversation_id, turn.id)
        if turn.status == IN_PROGRESS:
            pipe.hset(RUNNING_KEY, turn.id, f"{self._process} {conversation_id}")
            pipe.rpush(key, b"")
            self.renew(pipe)
        else:
            pipe.hdel(RUNNING_KEY, turn.id)
            pipe.delete(key)

    def renew(self, pipe: Pipe) -> None:
        pipe.set(alive_key(self._process), 1, px=int(self._lease_s * 1000))

    async def check(self) -> None:
        """Check that the server accepts writes: renew the lease. Raises: StoreUnavailableError."""

        async def write(client: Client) -> None:
            await client.set(alive_key(self._process), 1, px=int(self._lease_s * 1000))

        await self._connection.run(write)

    async def close(self) -> None:
        """Give up the lease, so that responses still in progress become incomplete, unless they are left to others."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
            if self.leaves_responses:
                return
            with contextlib.suppress(StoreUnavailableError):
                await self._connection.run(lambda client: client.delete(alive_key(self._process)))

    async def _heartbeat_loop(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailableError):
                await self.check()
                await self._end_orphaned()
            await asyncio.sleep(self._lease_s / 3)

    async def _end_orphaned(self) -> None:
        """End responses whose process is not alive."""
        running: dict[bytes, bytes] = await self._connection.run(lambda client: client.hgetall(RUNNING_KEY))
        is_alive: dict[str, bool] = {self._process: True}
        earliest_s = time.monotonic() - self._lease_s
        self._given_up = {name: given_s for name, given_s in self._given_up.items() if given_s > earliest_s}
        own = self._own_responses | self._given_up.keys()
        for response, entry in running.items():
            process, conversation_id, _ = RunningEntry.decode(entry)
            if process not in is_alive:
                key = alive_key(process)
                is_alive[process] = bool(await self._connection.run(partial(_exists, key=key)))
            is_run = is_alive[process] and (process != self._process or response.decode() in own)
            if not is_run:
                await self._end_response(conversation_id, response.decode(), entry)


class GatewayChannel:
    """Messages between the gateways that share a server, by PUBLISH and SUBSCRIBE.

    A message arrives at most once and is stored nowhere. The server reports how many gateways receive it, so that the
    sender notices at once if the receiver has gone.
    """

    def __init__(self, url: str, connection: RedisConnection, heartbeats: GatewayHeartbeats) -> None:
        self.name = heartbeats.process
        self.find_runner = heartbeats.find_runner
        self.take_over = heartbeats.take_over
        self.give_up = heartbeats.give_up
        self._heartbeats = heartbeats
        self.running_ids = heartbeats.running_ids
        self._connection = connection
        self._client = _client(url, TIMEOUT_S, TIMEOUT_S)

    def leave_responses(self) -> None:
        """Keep the lease when the store is closed, until another gateway has taken the responses over."""
        self._heartbeats.leaves_responses = True

    async def send(self, name: str | None, data: bytes) -> int:
        """Send a message to one gateway, or to all (None), this one included.

        Returns how many receive it. Raises: StoreUnavailableError.
        """
        channel = ALL_GATEWAYS_CHANNEL if name is None else gateway_channel(name)
        return int(await self._connection.run(lambda client: client.publish(channel, data)))

    async def listen(self, receive: Callable[[bytes], None], on_subscribe: Callable[[], None]) -> None:
        """Pass every message to `receive`, until cancelled. A lost connection is opened again.

        `on_subscribe` is called whenever that has happened: messages may have been lost before.
        """
        is_reported = False
        try:
            while True:
                try:
                    async with self._client.pubsub() as subscription:
                        await subscription.subscribe(ALL_GATEWAYS_CHANNEL, gateway_channel(self.name))
                        _raise_lost_cancellation()
                        is_reported = False
                        on_subscribe()
                        await self._receive(subscription, receive)
                except (redis.RedisError, OSError, RuntimeError) as error:
                    if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                        raise
                    _raise_lost_cancellation()
                    if not is_reported:
                        log.warning("no messages from other gateways now: %s", _error_text(error))
                    is_reported = True
                await asyncio.sleep(_PROBE_S)
        finally:
            await self._client.aclose(close_connection_pool=True)

    async def _receive(self, subscription: Any, receive: Callable[[bytes], None]) -> None:
        """Receive until the connection is lost, silent after a ping, or to a server that is not the primary."""
        is_pinged = False
        while True:
            message = await subscription.get_message(timeout=_QUIET_S)
            if message is not None:
                is_pinged = False
                if message["type"] == "message":
                    receive(message["data"])
            elif is_pinged:
                raise redis.ConnectionError("the server does not answer a ping")
            else:
                is_pinged = True
                await subscription.ping()
                _raise_lost_cancellation()
                await self._check_subscribed()

    async def _check_subscribed(self) -> None:
        """Raise redis.ConnectionError if the primary has no subscription: a former one, which is cut off, has it."""
        channel = gateway_channel(self.name)
        with contextlib.suppress(StoreUnavailableError):
            ((_, num_subscribed),) = await self._connection.run(lambda client: client.pubsub_numsub(channel))
            if not num_subscribed:
                raise redis.ConnectionError("another server is the primary now")


def _raise_lost_cancellation() -> None:
    """Raise CancelledError if this task was cancelled.

    redis-py sometimes turns a cancellation into a connection error, and loses one that comes when it has just sent a
    command (`asyncio.wait_for` before Python 3.12).
    """
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError


async def _exists(client: Client, key: str) -> bool:
    return bool(await client.exists(key))


def _client(url: str, timeout_s: float, connect_timeout_s: float) -> Client:
    return open_client(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=connect_timeout_s,
        socket_keepalive=True,
        max_connections=2 * _NUM_CONNECTIONS,
    )


def probe_server(url: str, key: str) -> bytes | None:
    """Connect synchronously and read one key, to check that the server can be used.

    Returns None if the key does not exist. Raises: StoreUnusableError for an invalid URL or a rejected login;
    StoreUnavailableError if there is no server.
    """
    try:
        client = open_sync_client(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    except ValueError as error:
        raise StoreUnusableError(f"not a URL of a Redis server: {error}") from None
    try:
        value: bytes | None = client.get(key)
    except redis.AuthenticationError as error:  # a connection error for redis-py
        raise StoreUnusableError(f"the Redis server rejects the login: {_error_text(error)}") from None
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise StoreUnavailableError(_error_text(error)) from None
    except redis.RedisError as error:
        raise StoreUnusableError(f"the Redis server cannot be used: {_error_text(error)}") from None
    finally:
        client.close()
    return value


def run_commands(url: str, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
    """Return a server's answers to commands, without an event loop: values, or `RefusedCommand`.

    Raises: StoreUnavailableError.
    """
    client = open_sync_client(url, socket_timeout=SLOW_TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    found: list[Any] = []
    try:
        for command in commands:
            try:
                found.append(client.execute_command(*command))
            except redis.ResponseError as error:
                found.append(RefusedCommand(_error_text(error)))
    except (redis.RedisError, OSError) as error:
        raise StoreUnavailableError(_error_text(error)) from None
    finally:
        client.close()
    return found


def _error_text(error: BaseException) -> str:
    """Return the message, without the command of a pipeline that redis-py quotes: it contains stored data."""
    text = str(error).rpartition(" of pipeline caused error: ")[2]
    return " ".join(text.split()) or type(error).__name__


@dataclass(frozen=True, slots=True)
class RedisPermissions:
    """What the Redis user may do.

    `settings` is empty without CONFIG permission; `has_aof` is None if unknown. `can_publish`: on chatcache's channels.
    """

    settings: dict[str, str]
    has_aof: bool | None
    can_script: bool
    can_read_all_keys: bool
    can_publish: bool
    num_keys: int

    @property
    def can_read_settings(self) -> bool:
        """Whether the user may read the server's configuration."""
        return bool(self.settings)


def probe_permissions(url: str) -> RedisPermissions:
    """Determine the permissions of the URL's user by commands that change nothing.

    Raises: StoreUnavailableError.
    """
    asked: list[tuple[str | int, ...]] = [("CONFIG", "GET", name) for name in _SETTINGS]
    asked += [("WAITAOF", 1, 0, 1000), ("EVAL", "return 1", 0), ("EXISTS", _FOREIGN_KEY), ("HLEN", API_KEYS_KEY)]
    asked += [("PUBLISH", gateway_channel("doctor"), "")]  # nothing listens there
    *config_answers, aof, script, foreign, num_keys, published = run_commands(url, asked)
    settings = {name: value for name, each in zip(_SETTINGS, config_answers, strict=True) if (value := _setting(each))}
    return RedisPermissions(
        settings=settings,
        has_aof=settings["appendonly"] == "yes" if "appendonly" in settings else _has_aof(aof),
        can_script=not isinstance(script, RefusedCommand),
        can_read_all_keys=not isinstance(foreign, RefusedCommand),
        can_publish=not isinstance(published, RefusedCommand),
        num_keys=0 if isinstance(num_keys, RefusedCommand) else int(num_keys),
    )


def _setting(config_answers: Any) -> str:
    """Return the value in an answer to CONFIG GET, of either shape that redis-py returns."""
    if isinstance(config_answers, RefusedCommand):
        return ""
    values = list(config_answers.values()) if isinstance(config_answers, dict) else list(config_answers)[1:]
    value = values[0] if values else b""
    return value.decode() if isinstance(value, bytes) else str(value)


def _has_aof(waited: Any) -> bool | None:
    """Return from an answer to WAITAOF whether the server has an append-only file.

    Every user may send the command (Redis 7.2 and later), and it fails without such a file. None if unknown.
    """
    if not isinstance(waited, RefusedCommand):
        return True
    return False if "appendonly is disabled" in waited.reason else None
