"""An engine in a thread of this process, for tests, notebooks and `chatcache chat`."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from chatcache.engine_process.client import EngineClientBase
from chatcache.engine_process.loop import StepEngine, run_engine
from chatcache.engine_process.protocol import (
    Command,
    Events,
    Loaded,
    LoadFailed,
    Notice,
    PromptScores,
    Reply,
    Stop,
    decode_error,
    encode_error,
)
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError, ModelFolderError
from chatcache.types.events import EngineEvent
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import (
    EngineHealth,
    ExplainQuery,
    Explanation,
    ModelInfo,
    PackedPrompt,
    PageAccounts,
    PageMap,
)

log = logging.getLogger(__name__)


class _ThreadCommandQueue:
    """Commands from another thread of this process."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def read(self, wait_s: float | None) -> list[Command]:
        commands: list[Command] = []
        with suppress(queue.Empty):
            commands.append(self.commands.get(wait_s != 0, wait_s))
            while True:
                commands.append(self.commands.get_nowait())
        return commands


class ThreadedEngine:
    """EngineClient of an engine that `factory` builds and that runs in a thread of this process.

    The thread starts with the first call (or `start`); a submit waits for the factory. Use it from one event loop at a
    time, and `close` it there. An exception that the engine raises ends all requests and the thread, without restart.
    """

    def __init__(self, factory: Callable[[], StepEngine]) -> None:
        self._factory = factory
        self._command_queue = _ThreadCommandQueue()
        self._client = EngineClientBase(self._command_queue.commands.put)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._loaded = asyncio.Event()
        self._error: ChatcacheError | None = None
        self.model_info: ModelInfo | None = None

    async def __aenter__(self) -> ThreadedEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the thread; returns at once. Calling again is harmless."""
        self._attach()

    async def wait_loaded(self) -> ModelInfo:
        """Wait until the engine is built.

        Raises: ChatcacheError if the factory or the engine failed, or after `close`.
        """
        self._attach()
        await self._loaded.wait()
        if self._error is not None or self.model_info is None:
            raise self._error or EngineError("the engine did not start")
        return self.model_info

    async def submit(self, request: GenerateRequest) -> None:
        self._attach()
        if self._error is not None:
            raise self._error
        await self._client.submit(request)

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        return self._client.events(request_id, after)

    def num_tokens_sent(self, request_id: str) -> int:
        return self._client.num_tokens_sent(request_id)

    async def abort(self, request_id: str) -> None:
        self._client.abort(request_id)

    async def cancel_candidate(self, request_id: str, index: int) -> None:
        await self.wait_loaded()
        await self._client.cancel_candidate(request_id, index)

    async def health(self) -> EngineHealth:
        self._attach()
        if self._error is not None:
            return EngineHealth(ready=False, detail=self._error.message)
        return self._client.health or EngineHealth(ready=False, detail="loading")

    async def explain(self, query: ExplainQuery) -> Explanation:
        await self.wait_loaded()
        return await self._client.explain(query)

    async def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        await self.wait_loaded()
        return await self._client.count_cached_tokens(prompts, namespace)

    async def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        await self.wait_loaded()
        return await self._client.page_map(namespace, operator)

    async def page_accounts(self) -> PageAccounts:
        await self.wait_loaded()
        return await self._client.page_accounts()

    async def stats(self) -> Any:
        await self.wait_loaded()
        return await self._client.invoke("stats")

    async def reset_prefix_cache(self) -> bool:
        await self.wait_loaded()
        return bool(await self._client.invoke("reset_prefix_cache"))

    async def close(self) -> None:
        """Stop the thread; requests still open end with `Failed`."""
        self._command_queue.commands.put(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._fail_all(EngineError("the engine was closed"))

    def _attach(self) -> None:
        """Deliver notices to the running event loop, and start the thread if it is not running."""
        self._loop = asyncio.get_running_loop()
        if self._thread is None and self._error is None:
            self._thread = threading.Thread(target=self._run, name="chatcache-engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            engine = self._factory()
            self._post(Loaded(engine.model_info, engine.health()))
            run_engine(engine, self._command_queue, self._post)
        except BaseException as error:  # reported to the waiting calls, since a thread has no caller
            # An invalid model folder or setting needs no traceback in the log: `wait_loaded` raises the error.
            is_known = isinstance(error, ModelFolderError | InvalidRequestError)
            log.log(logging.DEBUG if is_known else logging.ERROR, "the engine thread ended", exc_info=True)
            self._post(LoadFailed(encode_error(error)))

    def _post(self, notice: Notice) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._receive, notice)

    def _receive(self, notice: Notice) -> None:
        if isinstance(notice, Reply | PromptScores | Events):
            self._client.receive(notice)
        elif isinstance(notice, Loaded):
            self.model_info, self._client.health = notice.model_info, notice.health
            self._loaded.set()
        elif isinstance(notice, LoadFailed):
            self._fail_all(decode_error(notice.error))

    def _fail_all(self, error: ChatcacheError) -> None:
        self._error = self._error or error
        self._loaded.set()
        self._client.fail_all(error)
