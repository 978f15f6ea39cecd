"""An engine in a supervised child process: what `chatcache serve` holds as its EngineClient."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import msgspec

from chatcache.bus.child import Child
from chatcache.bus.codec import FrameTooLarge
from chatcache.bus.faults import from_fault
from chatcache.bus.messages import (
    Boot,
    Command,
    Ending,
    Events,
    Loaded,
    LoadFailed,
    Loading,
    Notice,
    Reply,
    Scored,
    Stop,
)
from chatcache.bus.supervision import RestartPolicy, cpu_s, is_passing, wait_hung
from chatcache.bus.survivors import Survivors
from chatcache.bus.switchboard import Switchboard
from chatcache.config import EngineConfig
from chatcache.errors import ChatcacheError, ContextTooLong, EngineFault, InvalidRequest, Overloaded
from chatcache.logs import LogFormat
from chatcache.types.events import EngineEvent
from chatcache.types.health import EngineHealth
from chatcache.types.model import ModelFacts
from chatcache.types.pages import Explanation, PackedPrompt, PageAccounts, PageMap
from chatcache.types.request import GenerateRequest

log = logging.getLogger(__name__)

EXIT_GRACE_S = 5.0
STALL_S = 60.0


class EngineProcess:
    """EngineClient over a child process that loads the model and steps the engine.

    When the child dies, or hangs, health tells why, a new child is started as `policy` allows, and running requests go
    on with it (see `survivors`). A fault while the first child loads is final: `wait_loaded` raises it. Belongs to one
    event loop. `factory` is "module:function", see `bus.worker`.
    """

    def __init__(
        self,
        config: EngineConfig,
        factory: str,
        *,
        log_level: str = "info",
        log_format: LogFormat = "text",
        policy: RestartPolicy | None = None,
    ) -> None:
        self._boot = Boot(factory, config, log_level, log_format)
        self._policy = policy or RestartPolicy()
        self._survivors = Survivors(self._send, lambda notice: self._board.receive(notice))
        self._board = Switchboard(self._survivors.send)
        self._child: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._detail = "starting"
        self._load_fraction = 0.0
        self._ready = False
        self._heard_at = time.monotonic()
        self._num_heard = 0
        self._last_words: ChatcacheError | None = None
        self._error: ChatcacheError | None = None
        self._loaded = asyncio.Event()
        self._failed = asyncio.Event()
        self.facts: ModelFacts | None = None
        self.num_restarts = 0

    async def __aenter__(self) -> EngineProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the present child."""
        return self._child.process.pid if self._child and self._child.process else None

    async def start(self) -> None:
        """Start supervising; returns at once. Calling again is harmless."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def wait_loaded(self) -> ModelFacts:
        """Wait until the model is loaded for the first time.

        Raises: what the load failed of, a ModelFolderError for instance.
        """
        await self._loaded.wait()
        if self.facts is None:
            raise self._error or EngineFault("the engine was closed")
        return self.facts

    async def wait_failed(self) -> ChatcacheError:
        """Wait until there is no hope left: the load failed, or too many children died in a row."""
        await self._failed.wait()
        return self._error or EngineFault("the engine was closed")

    async def submit(self, request: GenerateRequest) -> None:
        self._check(request.prompt)
        if not self._is_owed():
            self._heard_at = time.monotonic()  # an idle engine owes no sign of life until now
        await self._board.submit(request)

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        return self._board.events(request_id, after)

    def num_told(self, request_id: str) -> int:
        return self._board.num_told(request_id)

    async def abort(self, request_id: str) -> None:
        self._board.abort(request_id)

    async def drop(self, request_id: str, index: int) -> None:
        self._check()
        await self._board.drop(request_id, index)

    async def health(self) -> EngineHealth:
        """What the engine last said (at most a moment ago), or why it cannot say anything."""
        return msgspec.structs.replace(self._health(), num_restarts=self.num_restarts)

    def _health(self) -> EngineHealth:
        if not self._ready or self._board.health is None:
            return EngineHealth(
                ready=False, detail=self._detail, model=self._boot.config.model, load_fraction=self._load_fraction
            )
        health, silent_s = self._survivors.with_held(self._board.health), time.monotonic() - self._heard_at
        if self._is_owed() and silent_s > STALL_S:
            return msgspec.structs.replace(health, ready=False, detail=f"no step for {silent_s:.0f} s")
        return health

    async def explain(
        self, prompt: Sequence[int], namespace: str = "", num_public_tokens: int = 0, *, operator: bool = False
    ) -> Explanation:
        self._check(prompt)
        return await self._board.explain(prompt, namespace, num_public_tokens, operator)

    async def num_cached(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        self._check()
        return await self._board.num_cached(prompts, namespace)

    async def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        self._check()
        return await self._board.page_map(namespace, operator)

    async def accounts(self) -> PageAccounts:
        self._check()
        return await self._board.accounts()

    async def stats(self) -> Any:
        return await self._ask("stats")

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._ask("reset_prefix_cache"))

    async def close(self, grace_s: float = EXIT_GRACE_S) -> None:
        """Stop the child, kill it if it lingers; requests still open end with `Failed`."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._child is not None:
            self._child.send(Stop())
            await self._child.reap(grace_s if self._ready else 0.0)
        self._down(EngineFault("the engine was closed"))
        self._loaded.set()

    def kill(self) -> None:
        """End the child at once, without waiting: for a second Ctrl-C."""
        if self._child is not None:
            self._child.kill()

    async def _ask(self, what: Any) -> Any:
        self._check()
        return await self._board.ask(what)

    def _check(self, prompt: Sequence[int] = ()) -> None:
        """Refuse what the child need not see. Raises: Overloaded without one, ContextTooLong."""
        if not self._ready:
            raise Overloaded(self._detail, code="engine_unavailable" if self.facts or self._error else "model_loading")
        if self.facts and len(prompt) > self.facts.max_model_len:  # it may not even fit a frame
            raise ContextTooLong(
                f"the prompt has {len(prompt)} tokens; "
                f"this model's maximum context length is {self.facts.max_model_len} tokens",
                param="prompt",
            )

    def _send(self, command: Command) -> None:
        """Raises: InvalidRequest for what no frame can carry; nothing was sent then."""
        if self._child is None:
            return
        try:
            self._child.send(command)
        except (FrameTooLarge, msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
            raise InvalidRequest(f"the engine cannot be sent this: {error}") from error

    async def _supervise(self) -> None:
        num_deaths = 0
        while True:
            told_before = self._survivors.num_told
            child = await self._spawn()
            if child is None:
                return
            is_hung = await self._outlived(child)
            was_ready, self._ready = self._ready, False
            status = await child.reap(0.0 if is_hung else EXIT_GRACE_S)
            served = self._survivors.num_told > told_before
            was_healthy = was_ready and time.monotonic() - child.born_at >= self._policy.healthy_after_s
            num_deaths = 1 if served or was_healthy else num_deaths + 1
            how = (
                f"{'has work' if was_ready else 'is loading'} and says nothing"
                if is_hung
                else f"died ({_describe(status)})"
            )
            error = self._last_words or EngineFault(f"the engine process {how}")
            if num_deaths >= self._policy.max_deaths or (self._last_words and self.facts is None):
                self._give_up(error)
                return
            num_poisoned = self._survivors.died(error, is_sure=is_hung or status != -signal.SIGKILL)
            num_deaths = 0 if num_poisoned else num_deaths  # it will not happen again
            delay_s = self._policy.delay_s(num_deaths) if num_deaths else 0.0
            await self._wait_to_start(error, delay_s)
            self.num_restarts += 1

    async def _spawn(self) -> Child | None:
        """Return a new child; None, with all given up, when no waiting would help."""
        num_refused = 0
        while True:
            self._child, self._last_words = Child(self._receive), None
            try:
                await self._child.spawn(self._boot)
                return self._child
            except OSError as reason:
                refused = EngineFault(f"the engine process could not be started: {reason}")
                if self.facts is None or not is_passing(reason):
                    self._give_up(refused)
                    return None
                num_refused += 1  # not among the deaths: none of the engine's doing
                await self._wait_to_start(refused, self._policy.delay_s(num_refused))

    async def _wait_to_start(self, error: ChatcacheError, delay_s: float) -> None:
        self._pause(error, f"{error.message}; starting a new one in {delay_s:g} s")
        log.error("%s; starting a new one in %g s", error.message, delay_s)
        await asyncio.sleep(delay_s)

    async def _outlived(self, child: Child) -> bool:
        """Wait for the end of a child; say whether it came to that because it hung."""
        pid = child.process.pid if child.process is not None else 0
        heard, is_loading = lambda: self._num_heard, lambda: not self._ready
        hanging = asyncio.create_task(wait_hung(self._is_owed, heard, partial(cpu_s, pid), self._policy, is_loading))
        ended = asyncio.create_task(child.ended.wait())
        try:
            await asyncio.wait((hanging, ended), return_when=asyncio.FIRST_COMPLETED)
            is_hung = not ended.done()
            if is_hung:
                child.cut_off()
            return is_hung
        finally:
            hanging.cancel()
            ended.cancel()

    def _is_owed(self) -> bool:
        """Whether the child has anything to say something about."""
        return self._ready and bool(self._survivors.num_in_engine or self._board.num_calls)

    def _receive(self, notice: Notice) -> None:
        self._heard_at = time.monotonic()
        self._num_heard += 1
        if isinstance(notice, Reply | Scored | Events):
            self._survivors.receive(notice)
        elif isinstance(notice, Loading):
            self._load_fraction, self._detail = notice.fraction, notice.detail
        elif isinstance(notice, Loaded):
            self.facts, self._board.health, self._last_words = notice.facts, notice.health, None
            self._ready, self._detail, self._load_fraction = True, "", 1.0
            self._loaded.set()
            if self.num_restarts:
                log.warning("the engine is back")
            self._survivors.up()
        elif isinstance(notice, LoadFailed | Ending):
            self._last_words = from_fault(notice.fault)

    def _pause(self, error: ChatcacheError, detail: str) -> None:
        """Not ready for a while. Running requests wait; who asked something is told to ask again."""
        self._ready, self._load_fraction, self._detail = False, 0.0, detail
        self._board.fail_calls(Overloaded(error.message, code="engine_unavailable"), keep=self._survivors.calls)

    def _down(self, error: ChatcacheError) -> None:
        """Not ready from here on; everybody waiting is told."""
        self._ready, self._load_fraction, self._detail = False, 0.0, error.message
        self._survivors.forget_all()
        self._board.hang_up(error)

    def _give_up(self, error: ChatcacheError) -> None:
        log.debug("%s; giving up", error.message)  # `wait_failed` tells whoever runs this
        self._error = error
        self._down(error)
        self._loaded.set()
        self._failed.set()


def _describe(status: int | None) -> str:
    if status is None:
        return "it does not end"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
