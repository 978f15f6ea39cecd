"""What gateways that share a store do for each other: commands and events of running responses, and notifications.

    client -> this gateway: RemoteResponse --- Cancel, Drop, Watch, Fork, ... ---> the gateway that runs it
                            its event log <--- the next frames of the log ----------

A `RemoteResponse` keeps a copy of the log of a response that runs on another gateway, so every route serves it like one
of this process, with the same frames and numbers. The copy asks for the frames after its last one whenever it has read
the previous answer. A lost message is asked for again, and a slow reader is sent nothing that it cannot take. A client
may have read more at the other gateway than the copy has: `catch_up` waits for it. Every question names the owner, and
both gateways check that the response is the owner's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from chatcache.conversations.checkpoints import ReplyCheckpoint
from chatcache.conversations.fork_points import ReplyPrefix
from chatcache.conversations.store import ConversationStore, StoreUnavailableError
from chatcache.conversations.tree import Conversation
from chatcache.errors import ChatcacheError, NotFoundError
from chatcache.gateway.errors import (
    INTERNAL_ERROR,
    GatewayUnreachableError,
    LogUnreachableError,
    decode_error,
    encode_error,
    unreachable_error,
)
from chatcache.gateway.limits.rate_limits import Charge, RateLimiter
from chatcache.gateway.responses.event_log import LogCopy, ResponseLog, TimedReader
from chatcache.gateway.responses.registry import (
    AddSteer,
    Cancel,
    CheckDrop,
    Command,
    CountFrames,
    Drop,
    Find,
    Fork,
    LoggedResponse,
    ResponseRegistry,
    ReturnSteers,
    Run,
    TakeSteers,
    Watch,
)
from chatcache.gateway.responses.steering import Steer, SteerRefusedError
from chatcache.gateway.schemas.responses import Receipt
from chatcache.gateway.websocket.notifications import Changed, ConversationHub, Running

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # a gateway that does not answer for so long counts as unreachable
WATCH_S = 2.0  # a question for frames is answered after this time, with none
TAKEOVER_S = 8.0  # a gateway without a lease on the bus is replaced earlier
CHECK_RUNNING_S = 5.0  # how often what runs elsewhere is compared with the store
GIVE_UP_S = 15.0  # a response is given up if its gateway does not answer for so long
OWN_S = 2.0  # for a store that seems silent since this process was suspended; the lease on the bus lasts longer
IDLE_S = 30.0  # a copy without use is dropped
MAX_COPIES_BYTES = 16 * 1024 * 1024  # of logs that have ended
_PAUSE_S = 0.2


class Channel(Protocol):
    """Messages between gateways (implemented by `storage.redis_client.GatewayChannel`)."""

    name: str

    async def send(self, name: str | None, data: bytes) -> int: ...

    async def listen(self, receive: Callable[[bytes], None], on_subscribe: Callable[[], None]) -> None: ...

    async def find_runner(self, response_id: str) -> str | None: ...

    async def take_over(self, conversation_id: str, response_id: str, num_takeovers: int) -> bool: ...

    def give_up(self, response_id: str) -> None: ...

    async def running_ids(self) -> Sequence[str]: ...

    def leave_responses(self) -> None: ...


class Question(msgspec.Struct, tag=True, array_like=True):
    """A command of another gateway. `number`: of its answer. `sender`: where the answer goes."""

    number: int
    sender: str
    owner: str
    response_id: str
    command: Command


class Answer(msgspec.Struct, tag=True, array_like=True):
    """The result of a command, encoded, or its error."""

    number: int
    sender: str
    result: bytes = b""
    error: dict[str, Any] | None = None


class Hello(msgspec.Struct, tag=True, array_like=True):
    """A gateway has subscribed: the others report what runs on them."""

    sender: str


class Removed(msgspec.Struct, tag=True, array_like=True):
    """A deleted response."""

    sender: str
    owner: str
    response_id: str


class Charged(msgspec.Struct, tag=True, array_like=True):
    """What the sender has charged to API keys."""

    sender: str
    charges: list[Charge]


Message = Question | Answer | Changed | Running | Hello | Removed | Charged
_MESSAGES = msgspec.msgpack.Decoder(Message)


class RemoteResponse:
    """A response that runs on another gateway: a `Run` whose log is a copy."""

    def __init__(
        self, peers: GatewayPeers, owner: str, response_id: str, runner: str, token_bytes: Sequence[bytes] = ()
    ) -> None:
        self.id = response_id
        self.owner = owner
        self.log = ResponseLog(response_id, token_bytes)
        self.logged = LoggedResponse(response_id, owner, self.log, self)
        self._peers = peers
        self._runner = runner
        self._used_s = time.monotonic()

    def start(self) -> None:
        """Follow the log until its end, or until it is not used any more."""
        self.task = asyncio.create_task(self._follow(), name=self.id)

    def touch(self) -> None:
        """Record that the copy is used."""
        self._used_s = time.monotonic()

    async def read(self) -> int:
        """Append the next frames, if there are any soon, and return how many the log has there.

        Raises: ChatcacheError.
        """
        watch = Watch(self.log.num_frames, self.log.logprobs.sizes(), self.log.num_readers > 0)
        copied: LogCopy = await self._ask(watch, LogCopy, WATCH_S)
        try:
            self.logged.successor = copied.successor
            self.log.append_copy(copied)
        except (ValueError, msgspec.DecodeError) as error:
            log.error("%s: wrong frames of another gateway: %s", self.id, error)
            raise GatewayUnreachableError("the events of the response cannot be read from its gateway") from None
        return copied.num_frames

    async def catch_up(self) -> None:
        """Wait until the copy has all frames that the log has now. Raises: GatewayUnreachableError."""
        if self.log.terminal is not None:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                num_frames: int = await self._ask(CountFrames(), int)
                await self.log.wait_for_frame(num_frames - 1)
        except (ChatcacheError, TimeoutError):
            raise unreachable_error() from None

    async def _follow(self) -> None:
        error = await self._read_all()
        if error is not None:
            self.log.fail(error)
        self._peers.forget(self, keep=self.log.is_closed and not self.log.is_unsaved)

    async def _read_all(self) -> ChatcacheError | None:
        """Read until the end of the log; return why that failed, None if it did not."""
        failing_since_s: float | None = None
        while not self.log.is_closed:
            if not self.log.num_readers and time.monotonic() - self._used_s > IDLE_S:
                return unreachable_error()
            try:
                await self.read()
                failing_since_s = None
            except (GatewayUnreachableError, StoreUnavailableError, NotFoundError) as error:
                # Not found: another gateway has taken the response over, or soon will.
                failing_since_s = failing_since_s or time.monotonic()
                if time.monotonic() - failing_since_s > GIVE_UP_S or await self._has_died():
                    return unreachable_error() if isinstance(error, NotFoundError) else error
                await asyncio.sleep(_PAUSE_S)
            except ChatcacheError as error:
                return error
            except Exception:
                log.exception("%s: its events could not be copied", self.id)
                return INTERNAL_ERROR
        return None

    async def _has_died(self) -> bool:
        with contextlib.suppress(StoreUnavailableError):
            return await self._peers.find_runner(self.id) != self._runner
        return False

    async def checkpoints(self) -> list[ReplyCheckpoint]:
        return []

    def confirm_checkpoints(self) -> None:
        pass

    async def reply_prefix(
        self, item_id: str | None, num_tokens: int | None, fork_with: int | None
    ) -> ReplyPrefix | None:
        found: ReplyPrefix | None = await self._ask(Fork(item_id, num_tokens, fork_with), ReplyPrefix | None)
        return found

    async def steer(self, input_value: object) -> None:
        try:
            await self._ask(AddSteer(input_value), None)
        except ChatcacheError as error:
            raise SteerRefusedError(error.message, code=error.code) from None

    async def check_drop(self, candidate: int) -> bool:
        is_cancel: bool = await self._ask(CheckDrop(candidate), bool)
        return is_cancel

    async def drop(self, candidate: int) -> Receipt | None:
        receipt: Receipt | None = await self._ask(Drop(candidate), Receipt | None)
        return receipt

    async def cancel(self, reason: str = "") -> Receipt | None:
        receipt: Receipt | None = await self._ask(Cancel(reason), Receipt | None)
        await asyncio.wait([self.task], timeout=ANSWER_S)  # until the copy has the end
        return receipt

    async def interrupt(self) -> None:
        """Do nothing: the response does not end with this gateway."""

    async def _ask(self, command: Command, result: Any, extra_s: float = 0.0) -> Any:
        return await self._peers.ask(self._runner, self.owner, self.id, command, result, extra_s)


class GatewayPeers:
    """The other gateways of the store. Belongs to one event loop."""

    def __init__(
        self,
        channel: Channel,
        responses: ResponseRegistry,
        hub: ConversationHub,
        store: ConversationStore,
        limiter: RateLimiter,
        token_bytes: Callable[[], Sequence[bytes]],
    ) -> None:
        """`responses`: those of this process. `hub`, `limiter`: receive what other gateways change and charge.

        `token_bytes` returns the bytes of each token, or raises a ChatcacheError while there is no tokenizer.
        """
        self.find_runner = channel.find_runner
        self.take_over = channel.take_over
        self.give_up = channel.give_up
        self.leave_responses = channel.leave_responses
        self.waits_for_takeover = False
        self._channel = channel
        self._responses = responses
        self._hub = hub
        self._limiter = limiter
        self._store = store
        self._token_bytes = token_bytes
        self._copies = ResponseRegistry(MAX_COPIES_BYTES)
        self._opening: dict[tuple[str, str], asyncio.Task[LoggedResponse]] = {}
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Queue[Answer]] = {}
        self._watching: set[int] = set()  # numbers of questions for frames
        self._readers = WeakValueDictionary[tuple[str, str], TimedReader]()  # until their timers fire
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Receive messages until cancelled."""
        self._hub.relay, self._responses.on_end = self._relay, self._relay_running
        self._limiter.publish = lambda charges: self._publish(Charged(self._channel.name, list(charges)))
        self._start_task(self._check_running())
        try:
            await self._channel.listen(self._receive, self._on_subscribe)
        finally:
            tasks = [*self._tasks, *(run.task for run in self._copies.running())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def runs_here(self, response_id: str) -> bool:
        """Return whether this gateway runs a response, as the store says; True if it is silent for `OWN_S`."""
        deadline_s = time.monotonic() + OWN_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(StoreUnavailableError):
                return await self.find_runner(response_id) == self._channel.name
            await asyncio.sleep(_PAUSE_S)
        return True

    async def find(self, owner: str, response_id: str, *, ended: bool = False) -> LoggedResponse | None:
        """Return a response of this owner that runs on another gateway, with a copy of its log; None if none does.

        `ended`: also one whose log another gateway still has. Raises: GatewayUnreachableError, StoreUnavailableError.
        """
        found = self._copies.find(owner, response_id)
        if found is not None:
            if isinstance(found.run, RemoteResponse):
                found.run.touch()
            return found
        runner = await self.find_runner(response_id)
        if self.waits_for_takeover and runner is not None and await self._is_owned(owner, response_id):
            found = await self._open_or_take_over(owner, response_id, runner)
            if found is not None:
                return found
            runner = None
        runs_elsewhere = runner not in (None, self._channel.name)
        if not (runs_elsewhere or ended) or not await self._is_owned(owner, response_id):
            return None
        if not runs_elsewhere:
            runner = await self._find_log(owner, response_id)
        return await self._open_once_started(owner, response_id, runner) if runner is not None else None

    async def _open_once_started(self, owner: str, response_id: str, runner: str) -> LoggedResponse | None:
        """Open a response of a gateway that may have stored it and not have started it yet; None if it has ended."""
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return await self._open(owner, response_id, runner)
            except NotFoundError:
                if time.monotonic() > deadline_s or await self.find_runner(response_id) != runner:
                    return None
            await asyncio.sleep(_PAUSE_S)

    async def _open_or_take_over(self, owner: str, response_id: str, runner: str) -> LoggedResponse | None:
        """Open a response of a gateway, or of the one that takes it over because that gateway does not run it any more.

        None if it has ended elsewhere. Raises: GatewayUnreachableError, StoreUnavailableError.
        """
        deadline_s = time.monotonic() + TAKEOVER_S
        current: str | None = runner
        while current is not None:
            opening = asyncio.create_task(self._open_unless_here(owner, response_id, current))
            try:
                while not (await asyncio.wait([opening], timeout=_PAUSE_S))[0]:
                    if (found := await self._find_restored(owner, response_id)) is not None:
                        return found
                if (opened := opening.result()) is not None:
                    return opened
            except (GatewayUnreachableError, NotFoundError):  # it does not answer, or has given the response up
                pass
            finally:
                opening.cancel()
            if time.monotonic() > deadline_s:
                raise unreachable_error()
            await asyncio.sleep(_PAUSE_S)
            current = await self.find_runner(response_id)
        return self._responses.find(owner, response_id)  # it may have ended here

    async def _open_unless_here(self, owner: str, response_id: str, runner: str) -> LoggedResponse | None:
        if runner != self._channel.name:
            return await self._open(owner, response_id, runner)
        return await self._find_restored(owner, response_id)

    async def _find_restored(self, owner: str, response_id: str) -> LoggedResponse | None:
        await self._responses.wait_restored(response_id)
        return self._responses.find(owner, response_id)

    async def fork(
        self, owner: str, response_id: str | None, item_id: str | None, num_tokens: int | None, fork_with: int | None
    ) -> ReplyPrefix | None:
        """Return the beginning of a reply that runs on another gateway, by its response or its message.

        None if it does not run on another gateway. Raises: ChatcacheError, as the other gateway does.
        """
        if response_id is None and item_id is not None:
            response_id = await self._running_response(item_id)
        runner = await self.find_runner(response_id) if response_id is not None else None
        if response_id is None or runner in (None, self._channel.name) or not await self._is_owned(owner, response_id):
            return None
        command = Fork(item_id, num_tokens, fork_with)
        prefix: ReplyPrefix | None = await self.ask(runner or "", owner, response_id, command, ReplyPrefix | None)
        return prefix

    async def ask(
        self, runner: str, owner: str, response_id: str, command: Command, result: Any, extra_s: float = 0.0
    ) -> Any:
        """Return the answer of another gateway, of type `result`. `extra_s`: how long the command itself may wait.

        Raises: GatewayUnreachableError without an answer in time, StoreUnavailableError, or the error of the answer.
        """
        async with self._answers() as (number, answers):
            if isinstance(command, Watch):
                self._watching.add(number)
            question = Question(number, self._channel.name, owner, response_id, command)
            if not await self._channel.send(runner, msgspec.msgpack.encode(question)):
                raise unreachable_error()
            try:
                async with asyncio.timeout(ANSWER_S + extra_s):
                    answer = await answers.get()
            except TimeoutError:
                raise unreachable_error() from None
        if answer.error is not None:
            raise decode_error(answer.error)
        return msgspec.msgpack.decode(answer.result, type=result)

    async def has_others(self) -> bool:
        """Return whether another gateway is listening."""
        with contextlib.suppress(StoreUnavailableError):
            return await self._channel.send(None, msgspec.msgpack.encode(Hello(self._channel.name))) > 1
        return False

    def publish_removal(self, owner: str, response_id: str) -> None:
        """Have all gateways drop the log of a deleted response."""
        self._copies.remove(response_id)
        self._publish(Removed(self._channel.name, owner, response_id))

    def forget(self, run: RemoteResponse, *, keep: bool) -> None:
        """Record that a copy is complete (`keep`), or not read any more."""
        self._copies.end(run.id, keep=keep)

    @contextlib.asynccontextmanager
    async def _answers(self) -> AsyncIterator[tuple[int, asyncio.Queue[Answer]]]:
        """Yield a number for a question and the queue of its answers."""
        number, answers = next(self._numbers), asyncio.Queue[Answer]()
        self._asked[number] = answers
        try:
            yield number, answers
        finally:
            del self._asked[number]
            self._watching.discard(number)

    async def _is_owned(self, owner: str, response_id: str) -> bool:
        with contextlib.suppress(NotFoundError):
            await self._store.locate(owner, response_id)
            return True
        return False

    async def _running_response(self, item_id: str) -> str | None:
        """Return the running response that may have this message: its id begins with the same digits."""
        digits = item_id.partition("_")[2][:12]
        if len(digits) < 12:
            return None
        found = await self._channel.running_ids()
        return next((name for name in found if name.partition("_")[2][:12] == digits), None)

    async def _open(self, owner: str, response_id: str, runner: str) -> LoggedResponse:
        """Begin to copy a log. Raises: ChatcacheError."""
        key = (owner, response_id)
        if key in self._opening:
            return await asyncio.shield(self._opening[key])
        opening = self._opening[key] = asyncio.create_task(self._read_first(owner, response_id, runner))
        opening.add_done_callback(lambda task: (self._opening.pop(key, None), task.cancelled() or task.exception()))
        return await asyncio.shield(opening)

    async def _read_first(self, owner: str, response_id: str, runner: str) -> LoggedResponse:
        run = RemoteResponse(self, owner, response_id, runner, self._token_bytes())
        while await run.read() > run.log.num_frames:
            pass  # a large log takes several answers
        successor, run.logged = run.logged.successor, self._copies.add(run)
        run.logged.successor = successor
        run.start()
        return run.logged

    @contextlib.asynccontextmanager
    async def taken_steers(self, owner: str, response_id: str) -> AsyncIterator[tuple[Steer, ...]]:
        """Take the steering input that waits at an ended response of another gateway; give it back after an error.

        Raises: LogUnreachableError, StoreUnavailableError.
        """
        sender, steers = await self._ask_all(owner, response_id, TakeSteers(), tuple[Steer, ...]) or ("", ())
        try:
            yield steers
        except BaseException:
            if steers:
                self._start_task(self._return_steers(sender, owner, response_id, steers))
            raise

    async def _return_steers(self, gateway: str, owner: str, response_id: str, steers: tuple[Steer, ...]) -> None:
        try:
            await self.ask(gateway, owner, response_id, ReturnSteers(steers), None)
        except ChatcacheError as error:
            log.warning("%s: steering input that waited there is lost: %s", response_id, error)

    async def _find_log(self, owner: str, response_id: str) -> str | None:
        """Return a gateway that has the log of a response which has ended; None if none has it.

        Raises: LogUnreachableError, StoreUnavailableError.
        """
        found = await self._ask_all(owner, response_id, Find(), None)
        return found[0] if found is not None else None

    async def _ask_all(self, owner: str, response_id: str, command: Command, result: Any) -> tuple[str, Any] | None:
        """Ask the gateway that has the log of a response; return its name and answer. None if none has it.

        Raises: LogUnreachableError if one that may have it does not answer, StoreUnavailableError.
        """
        async with self._answers() as (number, answers):
            question = Question(number, self._channel.name, owner, response_id, command)
            num_receivers = await self._channel.send(None, msgspec.msgpack.encode(question))
            try:
                async with asyncio.timeout(ANSWER_S):
                    for _ in range(num_receivers):
                        answer: Answer = await answers.get()
                        if answer.error is None:
                            return answer.sender, msgspec.msgpack.decode(answer.result, type=result)
            except TimeoutError:
                raise LogUnreachableError("a gateway that may have the events does not answer") from None
        return None

    def _on_subscribe(self) -> None:
        """Ask again for frames and for what runs elsewhere: the answers may have been lost with the connection."""
        self._start_task(self._greet())
        for number in self._watching:
            self._asked[number].put_nowait(Answer(number, "", error=encode_error(unreachable_error())))

    async def _greet(self) -> None:
        """Have the other gateways report what runs on them, and make up for the messages that were lost."""
        while True:
            with contextlib.suppress(StoreUnavailableError):
                await self._channel.send(None, msgspec.msgpack.encode(Hello(self._channel.name)))
                self._hub.report_missed()
                await self._drop_ended()
                await self._drop_deleted()
                return
            await asyncio.sleep(_PAUSE_S)

    async def _check_running(self) -> None:
        """Drop what does not run elsewhere any more, again and again: a gateway that dies does not report it."""
        while True:
            await asyncio.sleep(CHECK_RUNNING_S)
            with contextlib.suppress(StoreUnavailableError):
                await self._drop_ended()

    async def _drop_ended(self) -> None:
        if reported := self._hub.remote_ids():
            running = set(await self._channel.running_ids()).difference(run.id for run in self._responses.running())
            for owner, conversation_id in self._hub.remove_running(reported - running):
                self._start_task(self._hub.refresh(self._store, owner, conversation_id))

    async def _drop_deleted(self) -> None:
        """Do what the deletion of a conversation requires if it was deleted while no message arrived."""
        for owner, conversation_id in self._responses.conversations() | self._copies.conversations():
            try:
                await self._store.get(owner, conversation_id)
            except NotFoundError:
                self._on_change(Changed("", owner, conversation_id, None, []))

    def _receive(self, data: bytes) -> None:
        try:
            message = _MESSAGES.decode(data)
        except msgspec.DecodeError as error:
            log.warning("a message of another gateway cannot be read (is it of another version?): %s", error)
            return
        if isinstance(message, Answer):
            if (answers := self._asked.get(message.number)) is not None:
                answers.put_nowait(message)
        elif isinstance(message, Question):  # of this gateway, too: `_find_log` waits for as many answers as receivers
            self._start_task(self._answer(message))
        elif message.sender == self._channel.name:
            return
        elif isinstance(message, Changed):
            self._on_change(message)
        elif isinstance(message, Running):
            if self._hub.set_running(message.sender, message.owner, message.conversation_id, message.running):
                self._start_task(self._hub.refresh(self._store, message.owner, message.conversation_id))
        elif isinstance(message, Charged):
            self._limiter.add_charges(message.sender, message.charges)
        elif isinstance(message, Hello):
            for run in self._responses.running():
                self._relay_running(run)
        elif self._responses.find(message.owner, message.response_id) is not None:
            self._responses.remove(message.response_id)
        else:
            self._copies.remove(message.response_id)

    def _start_task(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, question: Question) -> None:
        """Run a command of another gateway and send the answer."""
        answer = Answer(question.number, self._channel.name)
        try:
            answer.result = msgspec.msgpack.encode(await self._run(question))
        except Exception as error:
            if not isinstance(error, ChatcacheError):
                log.exception("a command of another gateway failed")
            answer.error = encode_error(error if isinstance(error, ChatcacheError) else INTERNAL_ERROR)
        with contextlib.suppress(StoreUnavailableError):  # the sender asks again or reports it
            await self._channel.send(question.sender, msgspec.msgpack.encode(answer))

    async def _run(self, question: Question) -> object:
        """Run a command as if it came from a client of this gateway. Raises: ChatcacheError."""
        command = question.command
        await self._responses.wait_restored(question.response_id)
        found = self._responses.find(question.owner, question.response_id, deleted=True)
        if found is None:
            raise NotFoundError(f"no response {question.response_id[:128]!r} is running or has recently ended")
        if isinstance(command, Find):
            return None
        if isinstance(command, Watch):
            return await self._watch(found, command, question.sender)
        if isinstance(command, CountFrames):
            return found.log.num_frames
        if isinstance(command, TakeSteers):
            steers, found.steers = found.steers, ()
            return steers
        if isinstance(command, ReturnSteers):
            found.steers = (*command.steers, *found.steers)
            return None
        if isinstance(command, Fork):
            run = found.run
            return await run.reply_prefix(command.item_id, command.num_tokens, command.fork_with) if run else None
        if found.run is None:
            if isinstance(command, Cancel):
                return None
            raise NotFoundError(f"response {found.id!r} has ended", param="response_id")
        return await _run_command(found.run, command)

    async def _watch(self, found: LoggedResponse, command: Watch, sender: str) -> LogCopy:
        if command.is_read:
            reader = self._readers.setdefault((found.id, sender), TimedReader(found.log))
            reader.extend(2 * WATCH_S + ANSWER_S)
        elif (reader_here := self._readers.get((found.id, sender))) is not None:
            reader_here.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S):
                await found.log.wait_for_frame(command.position)
        copied = found.log.copy(command.position, command.logprob_sizes)
        if copied.is_closed:
            copied.successor = found.successor
            if (last := self._readers.get((found.id, sender))) is not None:
                last.end()
        return copied

    def _relay(self, owner: str, conversation_id: str, conversation: Conversation | None) -> None:
        if conversation is None:
            self._copies.remove_conversation(owner, conversation_id)
        running = self._running_in(owner, conversation_id)
        self._publish(Changed(self._channel.name, owner, conversation_id, conversation, running))

    def _relay_running(self, run: Run) -> None:
        if (conversation_id := run.log.conversation_id) is not None:
            running = self._running_in(run.owner, conversation_id)
            self._publish(Running(self._channel.name, run.owner, conversation_id, running))

    def _running_in(self, owner: str, conversation_id: str) -> list[str]:
        return [run.id for run in self._responses.running(owner) if run.log.conversation_id == conversation_id]

    def _publish(self, message: Message) -> None:
        """Send a message to all gateways, soon."""

        async def send() -> None:
            with contextlib.suppress(StoreUnavailableError):
                await self._channel.send(None, msgspec.msgpack.encode(message))

        self._start_task(send())

    def _on_change(self, change: Changed) -> None:
        self._hub.set_running(change.sender, change.owner, change.conversation_id, change.running)
        self._hub.receive(change.owner, change.conversation_id, change.conversation)
        if change.conversation is None:
            self._copies.remove_conversation(change.owner, change.conversation_id)
            for run in self._responses.remove_conversation(change.owner, change.conversation_id):
                self._start_task(run.cancel())


async def _run_command(run: Run, command: Cancel | CheckDrop | Drop | AddSteer) -> object:
    if isinstance(command, Cancel):
        return await run.cancel(command.reason)
    if isinstance(command, CheckDrop):
        return await run.check_drop(command.candidate)
    if isinstance(command, Drop):
        await run.check_drop(command.candidate)
        return await run.drop(command.candidate)
    await run.steer(command.input_value)
    return None
