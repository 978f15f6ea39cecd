"""The worker's side of the bus: runs the commands of all gateways on one engine, and returns their notices.

Each request belongs to the gateway that sent it, and is aborted when that gateway's lease has expired; one of a
conversation continues for `ADOPT_S`, in which another gateway may adopt it. When this worker's own lease has expired,
it aborts all requests, because the gateways run them elsewhere, and takes a new id.

Tokens of such a request are sent in batches, `BATCH_S` apart. The gateway makes one delta of each batch. So a gateway
that adopts the request, and reads the same batches, makes the same deltas.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from chatcache.cluster import bus
from chatcache.engine_process.process import EngineProcess
from chatcache.engine_process.protocol import (
    FRAME_HEADER_BYTES,
    Abort,
    Adopt,
    Answer,
    CancelCandidate,
    Command,
    CountCached,
    Events,
    Explain,
    ExplainReply,
    Invoke,
    MapPages,
    Notice,
    PageAccountsReply,
    PageMapReply,
    Reply,
    Submit,
    call_id_of,
    decode_command,
    encode_error,
    encode_notice,
)
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError, NotFoundError
from chatcache.types.events import Beams, EngineEvent, SearchStep, Tokens
from chatcache.types.request import GenerateRequest, num_branches

log = logging.getLogger(__name__)

MAX_RETAINED_BYTES = 64 * 2**20  # of notices that were sent
BATCH_S = 0.033
ADOPT_S = 10.0


class Outgoing:
    """Notices for the gateways that no entry contains yet."""

    def __init__(self) -> None:
        self._bodies: dict[str, list[bytes]] = {}
        self._events: dict[str, list[EngineEvent]] = {}

    def add(self, gateway: str, notice: Notice) -> None:
        """Append a notice."""
        self._seal(gateway)
        self._bodies.setdefault(gateway, []).extend(frame[FRAME_HEADER_BYTES:] for frame in encode_notice(notice))

    def add_event(self, gateway: str, event: EngineEvent) -> None:
        """Append an event; neighbours become one notice."""
        self._events.setdefault(gateway, []).append(event)

    def take(self) -> dict[bytes, bytes]:
        """Return the fields of the next entry: one per gateway."""
        for gateway in list(self._events):
            self._seal(gateway)
        bodies, self._bodies = self._bodies, {}
        return {gateway.encode(): bus.encode_list(each) for gateway, each in bodies.items()}

    def _seal(self, gateway: str) -> None:
        if events := self._events.pop(gateway, None):
            frames = encode_notice(Events(tuple(events)))
            self._bodies.setdefault(gateway, []).extend(frame[FRAME_HEADER_BYTES:] for frame in frames)


class GatewayLoads:
    """The requests of each gateway, as `bus.Loads`. `is_changed`: since `read` returned the `last` ones."""

    def __init__(self) -> None:
        self._loads: bus.Loads = {}
        self.last: bus.Loads = {}
        self.is_changed = False

    def add(self, gateway: str, num_tokens: int, num_branches: int) -> None:
        """Add prompt tokens to compute and branches, or remove them if negative."""
        before = self._loads.get(gateway, (0, 0))
        self._loads[gateway] = before[0] + num_tokens, before[1] + num_branches
        if self._loads[gateway] == (0, 0):
            del self._loads[gateway]
        self.is_changed = True

    def read(self) -> bus.Loads:
        """Return the loads, and keep them as the `last` ones."""
        self.last, self.is_changed = dict(self._loads), False
        return self.last


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request of a gateway, and the task that runs it.

    `early_steps`: choices of its search that the engine reported before the task has sent the answer to its submit.
    `num_new_tokens`: of its prompt, until they are computed. `is_adoptable`: another gateway may adopt it. `first`: the
    first entry that may have a notice of it. `batch`: events that wait for `timer`.
    """

    gateway: str
    call: int
    num_new_tokens: int = 0
    num_branches: int = 0
    is_adoptable: bool = False
    first: int = 0
    task: asyncio.Task[None] | None = None
    is_answered: bool = False
    is_aborted: bool = False
    early_steps: list[SearchStep] = field(default_factory=list)
    batch: list[Tokens | Beams] = field(default_factory=list)
    batch_sent_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


class WorkerHost:
    """Connects one engine to the bus until cancelled.

    `name` is published; `numerics`: see `WorkerStatus`. `is_connected`: the bus has had this worker's lease. Belongs to
    one event loop.
    """

    def __init__(self, engine: EngineProcess, url: str, name: str, numerics: str) -> None:
        self._engine = engine
        self._engine.on_search_steps = self._forward_search_steps
        self._client = bus.connect(url)
        self._name = name
        self._numerics = numerics
        self._outgoing = Outgoing()
        self._requests: dict[str, RunningRequest] = {}
        self._loads = GatewayLoads()
        self._calls: set[asyncio.Task[None]] = set()
        self._writer: bus.StreamWriter | None = None
        self._sent: deque[tuple[float, int, int]] = deque()  # entries that are retained: time, number, bytes
        self._num_sent_bytes = 0
        self._num_renewals = 0
        self._received: dict[str, int] = {}  # see `WorkerStatus`
        self._lost_since: dict[str, float] = {}  # by gateway whose lease has expired
        self.is_draining = False
        self.is_connected = asyncio.Event()
        self.id = ""

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    async def run(self) -> None:
        """Serve commands; returns only by cancellation."""
        await self._engine.wait_loaded()
        try:
            while True:
                self.id = bus.new_id(self._name)
                await self._serve_until_lease_expires()
                is_displaced = self._writer is not None and self._writer.is_displaced
                reason = "others have written to its stream" if is_displaced else "its lease expired"
                log.error("this worker begins anew under another id and ends its requests: %s", reason)
                await self._abort(set(self._requests))
                self._outgoing = Outgoing()
        finally:
            tasks = [running.task for running in self._requests.values() if running.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

    async def _serve_until_lease_expires(self) -> None:
        """Serve under one id. The lease is published last, so that nothing is sent to a worker that does not read."""
        self._sent.clear()
        self._received.clear()
        self._num_sent_bytes = 0
        writer = bus.StreamWriter(self._client, bus.outbox(self.id), self._take, is_numbered=True)
        self._writer = writer
        lease = bus.Lease(self._client, bus.worker_key(self.id))
        tasks = [asyncio.create_task(writer.run()), asyncio.create_task(self._read())]
        try:
            while not writer.is_displaced and await lease.renew(await self._status()):
                if lease.is_acquired:
                    self.is_connected.set()
                if len(tasks) == 2:
                    tasks.append(asyncio.create_task(self._maintain()))
                for task in tasks:
                    if task.done():
                        task.result()  # raises: a defect ends the worker instead of silencing it
                await lease.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await lease.give_up()

    async def _maintain(self) -> None:
        """Do what follows a renewal of the lease; it may wait for the engine, and the renewals do not."""
        while True:
            with bus.ignore_outages():
                await self._keep_streams()
                await self._end_requests_of_lost_gateways()
            await asyncio.sleep(bus.RENEW_S)

    async def _status(self) -> bytes:
        model_info = self._engine.model_info
        if model_info is None:
            raise EngineError("the engine was closed")
        self._num_renewals += 1
        status = bus.WorkerStatus(
            id=self.id,
            name=self._name,
            numerics=self._numerics,
            model_info=model_info,
            health=await self._engine.health(),
            is_draining=self.is_draining,
            loads=self._loads.last,
            num_renewals=self._num_renewals,
            received=self._received,
        )
        return msgspec.msgpack.encode(status)

    async def _keep_streams(self) -> None:
        """Register this worker, keep its streams from expiring, and remove old entries.

        If the latest entry is missing, another one is written, so that the gateways find the gap.
        """
        lifetime_ms = int(bus.RETAIN_S * 1000)
        out, into = bus.outbox(self.id), bus.inbox(self.id)
        oldest, num_accepted = self._discard_sent(), self._writer.num_accepted if self._writer is not None else 0
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(bus.WORKERS, self.id)
            pipe.pexpire(out, lifetime_ms)
            pipe.pexpire(into, lifetime_ms)
            pipe.xtrim(out, minid=f"{oldest}-0", approximate=False)
            pipe.xrevrange(out, count=1)
            *_, latest = await pipe.execute()
        if num_accepted and (not latest or int(latest[0][0].partition(b"-")[0]) < num_accepted):
            log.warning("notices of this worker were lost with a Redis server")
            self._loads.is_changed = True
            self._wake()

    def _discard_sent(self) -> int:
        """Return the number of the oldest entry that is retained.

        Those of requests that can be adopted are retained as long as they run, within `MAX_RETAINED_BYTES`.
        """
        earliest_s = asyncio.get_running_loop().time() - bus.RETAIN_S
        needed = min((each.first for each in self._requests.values() if each.is_adoptable), default=2**63)
        while self._sent:
            sent_s, number, size = self._sent[0]
            is_needed = sent_s >= earliest_s or number >= needed
            if is_needed and self._num_sent_bytes <= MAX_RETAINED_BYTES:
                break
            self._sent.popleft()
            self._num_sent_bytes -= size
        return self._sent[0][1] if self._sent else self._num_sent

    def _take(self) -> Mapping[bytes, bytes]:
        fields = self._outgoing.take()
        if self._loads.is_changed:
            fields[bus.LOADS] = msgspec.msgpack.encode(self._loads.read())
        if fields and self._writer is not None:
            now, size = asyncio.get_running_loop().time(), sum(map(len, fields.values()))
            self._sent.append((now, self._writer.num_sent + 1, size))
            self._num_sent_bytes += size
        return fields

    @property
    def _num_sent(self) -> int:
        return self._writer.num_sent if self._writer is not None else 0

    async def _end_requests_of_lost_gateways(self) -> None:
        gateways = {each.gateway for each in self._requests.values()} | self._received.keys()
        lost = gateways - await bus.alive(self._client, gateways)
        for name in lost:
            self._received.pop(name, None)
        now = time.monotonic()
        self._lost_since = {name: self._lost_since.get(name, now) for name in lost}
        ended = {
            name
            for name, each in self._requests.items()
            if each.gateway in lost and not (each.is_adoptable and now - self._lost_since[each.gateway] < ADOPT_S)
        }
        if ended:
            log.warning("%d requests of gateways that ended are aborted: %s", len(ended), ", ".join(sorted(lost)))
            await self._abort(ended)

    # -- commands -----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        reader = bus.StreamReader(self._client, bus.inbox(self.id))
        while True:
            entries = await reader.read()
            for _, fields in entries:
                gateway = fields.get(bus.FROM, b"").decode(errors="replace")
                try:
                    number, after = int(fields[bus.NUMBER]), int(fields[bus.AFTER])
                    bodies = bus.decode_list(fields[bus.COMMANDS])
                except (msgspec.MsgspecError, KeyError, ValueError) as error:
                    log.error("an entry of %r is no list of commands: %s", gateway, error)
                    continue
                if await self._is_new(gateway, number, after):
                    for body in bodies:
                        await self._apply(gateway, body)
            if not entries:  # after a failover, the ids of new entries can be smaller than that of the last one
                reader.last = "0-0"
                continue
            with bus.ignore_outages():
                await self._client.xtrim(bus.inbox(self.id), minid=_after(reader.last), approximate=False)

    async def _is_new(self, gateway: str, number: int, after: int) -> bool:
        """Return whether an entry was not received before. `after`: the number of the gateway's entry before.

        Without one, the gateway has connected, perhaps again because entries were missing: its requests are ended.
        """
        received = self._received.get(gateway, 0)
        if number <= received:
            return False
        if after == 0:
            await self._abort({name for name, each in self._requests.items() if each.gateway == gateway})
        if after in (0, received):
            self._received[gateway] = number
        return True

    async def _apply(self, gateway: str, body: bytes) -> None:
        try:
            command = decode_command(body)
        except msgspec.MsgspecError as error:
            log.error("a command of %r cannot be decoded: %s", gateway, error)
            if (call := call_id_of(body)) is not None:
                refused = InvalidRequestError(f"the worker cannot decode this command: {error}")
                self._send(gateway, Answer(call, encode_error(refused)))
            return
        if isinstance(command, Submit):
            await self._submit(gateway, command)
        elif isinstance(command, Abort):
            if self._belongs_to(command.request_id, gateway):
                await self._engine.abort(command.request_id)
        elif isinstance(command, Adopt):
            self._adopt(gateway, command)
        elif isinstance(command, CancelCandidate | Invoke | Explain | CountCached | MapPages):
            task = asyncio.create_task(self._answer(gateway, command))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        else:
            log.error("gateway %r sent a %s", gateway, type(command).__name__)

    async def _submit(self, gateway: str, command: Submit) -> None:
        """Start a request. One that runs already is ended first: its gateway has missed some of its events."""
        name = command.request.request_id
        if (running := self._requests.get(name)) is not None:
            if (running.gateway, running.call) == (gateway, command.call):  # the entry was written twice
                return
            await self._abort({name})
            moved = EngineError(f"request {name!r} was sent again by another gateway")
            self._send(running.gateway, Answer(running.call, encode_error(moved)))
        request, num_new = command.request, command.num_new_tokens
        running = self._requests[name] = RunningRequest(
            gateway,
            command.call,
            len(request.prompt) if num_new is None else num_new,
            num_branches(request.params),
            is_adoptable=bool(request.conversation_id),
            first=self._num_sent,
        )
        self._loads.add(gateway, running.num_new_tokens, running.num_branches)
        running.task = asyncio.create_task(self._run(running, command.request))
        await asyncio.sleep(0)  # the engine has the request before an abort that follows

    async def _run(self, running: RunningRequest, request: GenerateRequest) -> None:
        """Run one request to its end, and send its answer and its events until it `is_aborted` by this worker."""
        name = request.request_id
        resumed = request.resume_point
        try:
            await self._engine.submit(request)
            if not running.is_aborted:
                self._send(running.gateway, Answer(running.call))
                running.is_answered = True
                self._forward_search_steps(tuple(running.early_steps))
            async for event in self._engine.events(name, resumed.last_seq if resumed is not None else 0):
                if running.num_new_tokens:
                    self._loads.add(running.gateway, -running.num_new_tokens, 0)
                    running.num_new_tokens = 0
                if running.is_aborted:
                    continue
                if running.is_adoptable and isinstance(event, Tokens | Beams):
                    self._add_to_batch(running, event)
                else:
                    self._send_batch(running)
                    self._outgoing.add_event(running.gateway, event)
                    self._wake()
        except Exception as error:
            if not isinstance(error, ChatcacheError):
                log.exception("request %s failed", name)
            self._send_batch(running)
            self._send(running.gateway, Answer(running.call, encode_error(error)))
        finally:
            del self._requests[name]
            if running.timer is not None:
                running.timer.cancel()
            self._loads.add(running.gateway, -running.num_new_tokens, -running.num_branches)
            self._wake()

    def _add_to_batch(self, running: RunningRequest, event: Tokens | Beams) -> None:
        """Send an event with the next batch: after the other events of its step, if the last batch is `BATCH_S` ago."""
        running.batch.append(event)
        if running.timer is None:
            due_s = running.batch_sent_s + BATCH_S
            running.timer = asyncio.get_running_loop().call_at(due_s, self._send_batch, running)

    def _send_batch(self, running: RunningRequest) -> None:
        if running.timer is not None:
            running.timer.cancel()
            running.timer = None
        batch, running.batch = running.batch, []
        if not batch or running.is_aborted:
            return
        running.batch_sent_s = asyncio.get_running_loop().time()
        for event in batch[:-1]:
            self._outgoing.add_event(running.gateway, msgspec.structs.replace(event, has_more=True))
        self._outgoing.add_event(running.gateway, batch[-1])
        self._wake()

    def _adopt(self, gateway: str, command: Adopt) -> None:
        """Give a request to another gateway. What was not sent yet is sent to the one before."""
        running = self._requests.get(command.request_id)
        if running is None or running.gateway != command.gateway or running.is_aborted or not running.is_answered:
            missing = NotFoundError(f"gateway {command.gateway!r} has no request {command.request_id!r} here")
            self._send(gateway, Answer(command.call, encode_error(missing)))
            return
        self._send_batch(running)
        self._loads.add(running.gateway, -running.num_new_tokens, -running.num_branches)
        self._loads.add(gateway, running.num_new_tokens, running.num_branches)
        running.gateway, running.call = gateway, command.call
        self._send(gateway, Answer(command.call))

    async def _abort(self, names: set[str]) -> None:
        """Abort requests and wait until the engine has ended them; their remaining events are not sent."""
        aborted = [self._requests[name] for name in names if name in self._requests]
        for running in aborted:
            running.is_aborted = True
        for name in names:
            await self._engine.abort(name)
        if tasks := [running.task for running in aborted if running.task is not None]:
            await asyncio.wait(tasks)  # unlike `gather`, does not cancel them when it is cancelled

    def _belongs_to(self, request_id: str, gateway: str) -> bool:
        running = self._requests.get(request_id)
        return running is not None and running.gateway == gateway

    async def _answer(self, gateway: str, command: CancelCandidate | Invoke | Explain | CountCached | MapPages) -> None:
        try:
            reply = await self._call(gateway, command)
        except ChatcacheError as error:
            reply = Answer(command.call, encode_error(error))
        except Exception as error:
            log.exception("%s failed", type(command).__name__)
            reply = Answer(command.call, encode_error(error))
        self._send(gateway, reply)

    async def _call(self, gateway: str, command: Command) -> Reply:
        engine = self._engine
        match command:
            case CancelCandidate(call, request_id, index):
                if self._belongs_to(request_id, gateway):
                    await engine.cancel_candidate(request_id, index)
                return Answer(call)
            case Explain(call, query):
                return ExplainReply(call, await engine.explain(query))
            case CountCached(call, prompts, namespace):
                return Answer(call, value=await engine.count_cached_tokens(prompts, namespace))
            case MapPages(call, namespace, operator):
                return PageMapReply(call, await engine.page_map(namespace, operator=operator))
            case Invoke(call, "accounts"):
                return PageAccountsReply(call, await engine.page_accounts())
            case Invoke(call, "stats"):
                return Answer(call, value=await engine.stats())
            case Invoke(call, "reset_prefix_cache"):
                return Answer(call, value=await engine.reset_prefix_cache())
        raise InvalidRequestError("not a call")

    # -- notices ------------------------------------------------------------------------------------------------------

    def _forward_search_steps(self, steps: tuple[SearchStep, ...]) -> None:
        """Send the choices of searches to their gateways, before the events of the step."""
        for step in steps:
            running = self._requests.get(step.request_id)
            if running is None or running.is_aborted:
                continue
            if running.is_answered:
                self._send(running.gateway, Events(search_steps=(step,)))
            else:
                running.early_steps.append(step)

    def _send(self, gateway: str, notice: Notice) -> None:
        self._outgoing.add(gateway, notice)
        self._wake()

    def _wake(self) -> None:
        if self._writer is not None:
            self._writer.wake()


def numerics_of(engine: EngineProcess, is_deterministic: bool, version: str) -> str:
    """Name what the bits of the logits depend on: version, precision, device, kernels and mode."""
    info = engine.model_info
    if info is None:
        raise EngineError("the engine was closed")
    mode = "deterministic" if is_deterministic else "batched"
    return " ".join((version, info.digest, info.precision, info.device, info.attention, mode))


def _after(entry: str) -> str:
    """Return the id after that of an entry."""
    time_ms, _, number = entry.partition("-")
    return f"{time_ms}-{int(number) + 1}"
