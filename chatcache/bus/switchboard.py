"""The client's half of the bus: calls awaiting their answers, logs of running requests, the last health heard."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, Literal, cast

from chatcache.bus.faults import from_fault
from chatcache.bus.log import RETENTION_S, EventLogs
from chatcache.bus.messages import (
    Abort,
    Answer,
    Ask,
    Command,
    CountCached,
    Drop,
    Events,
    Explain,
    MapPages,
    Reply,
    Scored,
    Submit,
)
from chatcache.errors import ChatcacheError
from chatcache.types.events import EngineEvent
from chatcache.types.health import EngineHealth
from chatcache.types.pages import Explanation, PackedPrompt, PageAccounts, PageMap
from chatcache.types.request import GenerateRequest

COUNTED_BYTES = 4 * 8_192


class Switchboard:
    """Turns calls into commands and notices into results. Belongs to one event loop.

    `send` hands a command to the engine and never waits.
    """

    def __init__(self, send: Callable[[Command], None], retention_s: float = RETENTION_S) -> None:
        self._send = send
        self._logs = EventLogs(retention_s)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self.health: EngineHealth | None = None

    @property
    def num_open(self) -> int:
        """Requests submitted that have not ended."""
        return self._logs.num_open

    async def submit(self, request: GenerateRequest) -> None:
        """Hand a request over and wait for the engine's verdict; a cancelled wait withdraws the request."""
        self._logs.open(request.request_id)
        try:
            await self._call(lambda call: Submit(call, request))
        except BaseException as error:
            self._logs.drop(request.request_id)
            if isinstance(error, asyncio.CancelledError):
                self._send(Abort(request.request_id))
            raise

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        return self._logs.read(request_id, after)

    def num_told(self, request_id: str) -> int:
        return self._logs.num_tokens(request_id)

    def abort(self, request_id: str) -> None:
        self._send(Abort(request_id))

    async def drop(self, request_id: str, index: int) -> None:
        await self._call(partial(Drop, request_id=request_id, index=index))

    async def explain(
        self, prompt: Sequence[int], namespace: str, num_public_tokens: int, operator: bool
    ) -> Explanation:
        value = await self._call(lambda call: Explain(call, tuple(prompt), namespace, num_public_tokens, operator))
        return cast(Explanation, value)

    async def num_cached(self, prompts: Sequence[PackedPrompt], namespace: str) -> list[int]:
        counts: list[int] = []
        for some in _shares(prompts):
            counts += await self._call(partial(CountCached, prompts=some, namespace=namespace))
        return counts

    async def page_map(self, namespace: str, operator: bool) -> PageMap:
        return cast(PageMap, await self._call(lambda call: MapPages(call, namespace, operator)))

    async def accounts(self) -> PageAccounts:
        return cast(PageAccounts, await self._call(lambda call: Ask(call, "accounts")))

    async def ask(self, what: Literal["stats", "reset_prefix_cache"]) -> Any:
        return await self._call(lambda call: Ask(call, what))

    async def _call(self, command: Callable[[int], Command]) -> Any:
        call = next(self._numbers)
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(command(call))
            return await future
        finally:
            del self._calls[call]

    def receive(self, notice: Reply | Scored | Events) -> None:
        """File what the engine said."""
        if isinstance(notice, Scored):
            self._logs.add_scores(notice.request_id, notice.part)
            return
        if isinstance(notice, Reply):
            future = self._calls.get(notice.call)
            if future is not None and not future.done():
                if isinstance(notice, Answer) and notice.fault is not None:
                    future.set_exception(from_fault(notice.fault))
                else:
                    future.set_result(notice.value)
            return
        if notice.health is not None:
            self.health = notice.health
        for event in notice.events:
            self._logs.append(event)

    @property
    def num_calls(self) -> int:
        """Calls without an answer yet."""
        return len(self._calls)

    def fail_calls(self, error: ChatcacheError, keep: Container[int] = ()) -> None:
        """Every pending call raises `error`, but for those to `keep`."""
        for call, future in self._calls.items():
            if call not in keep and not future.done():
                future.set_exception(error)

    def hang_up(self, error: ChatcacheError) -> None:
        """The engine is gone: every open request ends with one `Failed`, every pending call raises `error`."""
        self.fail_calls(error)
        self._logs.fail_open(error.message, error.code)


def _shares(prompts: Sequence[PackedPrompt]) -> Iterator[tuple[PackedPrompt, ...]]:
    """Split prompts so that the engine, which answers between two steps, is held up for a millisecond at a time."""
    some: list[PackedPrompt] = []
    for prompt in prompts:
        some.append(prompt)
        if sum(len(each.tokens) for each in some) >= COUNTED_BYTES:
            yield tuple(some)
            some = []
    if some:
        yield tuple(some)
