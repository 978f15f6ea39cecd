"""The worker's side of the bus: runs the commands of all gateways on one engine, and returns their notices.

Each request belongs to the gateway that sent it, and is aborted when that gateway's lease has expired. When this
worker's own lease has expired, it aborts all requests, because the gateways run them elsewhere, and takes a new id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from chatcache.cluster import bus
from chatcache.engine_process.process import EngineProcess
from chatcache.engine_process.protocol import (
    FRAME_HEADER_BYTES,
    Abort,
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
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError
from chatcache.types.events import EngineEvent, SearchStep
from chatcache.types.request import GenerateRequest, num_branches

log = logging.getLogger(__name__)

MAX_RETAINED_BYTES = 64 * 2**20  # of notices that were sent


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
    `num_new_tokens`: of its prompt, until they are computed.
    """

    gateway: str
    call: int
    num_new_tokens: int = 0
    num_branches: int = 0
    task: asyncio.Task[None] | None = None
    is_answered: bool = False
    is_aborted: bool = False
    early_steps: list[SearchStep] = field(default_factory=list)


class WorkerHost:
    """Connects one engine to the bus until cancelled.

    `name` is published; `numerics`: see `WorkerStatus`. Belongs to one event loop.
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
        self._sent: list[tuple[float, int, int]] = []  # entries that are retained: time, number, bytes
        self.is_draining = False
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
                log.error("the lease of this worker expired: its requests are ended, and it begins anew")
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
        writer = bus.StreamWriter(self._client, bus.outbox(self.id), self._take, is_numbered=True)
        self._writer = writer
        lease = bus.Lease(self._client, bus.worker_key(self.id))
        tasks = [asyncio.create_task(writer.run()), asyncio.create_task(self._read())]
        try:
            while await lease.renew(await self._status()):
                with bus.ignore_outages():
                    await self._keep_streams()
                    await self._end_requests_of_lost_gateways()
                for task in tasks:
                    if task.done():
                        task.result()  # raises: a defect ends the worker instead of silencing it
                await asyncio.sleep(bus.RENEW_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await lease.give_up()

    async def _status(self) -> bytes:
        model_info = self._engine.model_info
        if model_info is None:
            raise EngineError("the engine was closed")
        status = bus.WorkerStatus(
            id=self.id,
            name=self._name,
            numerics=self._numerics,
            model_info=model_info,
            health=await self._engine.health(),
            is_draining=self.is_draining,
            loads=self._loads.last,
        )
        return msgspec.msgpack.encode(status)

    async def _keep_streams(self) -> None:
        """Register this worker, keep its streams from expiring, and remove old entries."""
        lifetime_ms = int(bus.RETAIN_S * 1000)
        out, into = bus.outbox(self.id), bus.inbox(self.id)
        oldest = self._discard_sent()
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.sadd(bus.WORKERS, self.id)
            pipe.pexpire(out, lifetime_ms)
            pipe.pexpire(into, lifetime_ms)
            pipe.xtrim(out, minid=f"{oldest}-0", approximate=False)
            await pipe.execute()

    def _discard_sent(self) -> int:
        """Return the number of the oldest entry that is retained."""
        earliest_s = asyncio.get_running_loop().time() - bus.RETAIN_S
        num_bytes = sum(size for _, _, size in self._sent)
        while self._sent and (self._sent[0][0] < earliest_s or num_bytes > MAX_RETAINED_BYTES):
            num_bytes -= self._sent.pop(0)[2]
        return self._sent[0][1] if self._sent else (self._writer.num_sent if self._writer else 0)

    def _take(self) -> Mapping[bytes, bytes]:
        fields = self._outgoing.take()
        if self._loads.is_changed:
            fields[bus.LOADS] = msgspec.msgpack.encode(self._loads.read())
        if fields and self._writer is not None:
            now = asyncio.get_running_loop().time()
            self._sent.append((now, self._writer.num_sent + 1, sum(map(len, fields.values()))))
        return fields

    async def _end_requests_of_lost_gateways(self) -> None:
        gateways = {each.gateway for each in self._requests.values()}
        if lost := gateways - await bus.alive(self._client, gateways):
            log.warning("the requests of gateways that ended are aborted: %s", ", ".join(sorted(lost)))
            await self._abort({name for name, each in self._requests.items() if each.gateway in lost})

    # -- commands -----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        reader = bus.StreamReader(self._client, bus.inbox(self.id))
        while True:
            for _, fields in await reader.read():
                gateway = fields.get(bus.FROM, b"").decode(errors="replace")
                try:
                    bodies = bus.decode_list(fields.get(bus.COMMANDS, b""))
                except msgspec.MsgspecError as error:
                    log.error("an entry of %r is no list of commands: %s", gateway, error)
                    continue
                for body in bodies:
                    await self._apply(gateway, body)
            with bus.ignore_outages():
                await self._client.xtrim(bus.inbox(self.id), minid=_after(reader.last), approximate=False)

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
        request, num_new = command.request, command.num_new_tokens
        running = self._requests[name] = RunningRequest(
            gateway, command.call, len(request.prompt) if num_new is None else num_new, num_branches(request.params)
        )
        self._loads.add(gateway, running.num_new_tokens, running.num_branches)
        running.task = asyncio.create_task(self._run(gateway, command.call, command.request))

    async def _run(self, gateway: str, call: int, request: GenerateRequest) -> None:
        """Run one request to its end, and send its answer and its events until it `is_aborted` by this worker."""
        name = request.request_id
        resumed = request.resume_point
        running = self._requests[name]
        try:
            await self._engine.submit(request)
            if not running.is_aborted:
                self._send(gateway, Answer(call))
                running.is_answered = True
                self._forward_search_steps(tuple(running.early_steps))
            async for event in self._engine.events(name, resumed.last_seq if resumed is not None else 0):
                if running.num_new_tokens:
                    self._loads.add(gateway, -running.num_new_tokens, 0)
                    running.num_new_tokens = 0
                if not running.is_aborted:
                    self._outgoing.add_event(gateway, event)
                    self._wake()
        except Exception as error:
            if not isinstance(error, ChatcacheError):
                log.exception("request %s failed", name)
            self._send(gateway, Answer(call, encode_error(error)))
        finally:
            del self._requests[name]
            self._loads.add(gateway, -running.num_new_tokens, -running.num_branches)
            self._wake()

    async def _abort(self, names: set[str]) -> None:
        """Abort requests and wait until the engine has ended them; their remaining events are not sent."""
        aborted = [self._requests[name] for name in names if name in self._requests]
        for running in aborted:
            running.is_aborted = True
        for name in names:
            await self._engine.abort(name)
        await asyncio.gather(*(running.task for running in aborted if running.task is not None))

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
