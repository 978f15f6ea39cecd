"""An engine in a supervised child process: what `chatcache serve` holds as its EngineClient.

One engine child: its process, and the parent's end of the socket it speaks on.

When a child is given up, and when another one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from chatcache.config import EngineConfig
from chatcache.engine_process.client import EngineClientBase
from chatcache.engine_process.protocol import (
    Boot,
    Command,
    Ending,
    Events,
    FrameBuffer,
    FrameTooLargeError,
    Loaded,
    LoadFailed,
    Loading,
    Notice,
    Reply,
    Scored,
    Stop,
    decode_error,
    decode_notice,
    encode,
)
from chatcache.engine_process.recovery import RequestRecovery
from chatcache.errors import ChatcacheError, ContextLengthError, EngineError, InvalidRequestError, OverloadedError
from chatcache.logs import LogFormat
from chatcache.types.events import EngineEvent
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import EngineHealth, Explanation, ModelInfo, PackedPrompt, PageAccounts, PageMap

KILL_GRACE_S = 5.0

log = logging.getLogger(__name__)


class ChildProcess(asyncio.Protocol):
    """Spawned once, reaped once. `receive` gets each notice; `ended` is set when the socket closes.

    A frame that is no notice closes the socket: a child that garbles is a dead child. So is one that was `cut_off`:
    should it ever wake, nobody hears it.
    """

    def __init__(self, receive: Callable[[Notice], None]) -> None:
        self._receive = receive
        self._frames = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._is_cut_off = False
        self.ended = asyncio.Event()
        self.born_at = time.monotonic()

    async def spawn(self, boot: Boot) -> None:
        """Start the process and send it its boot command.

        Raises: OSError when the system has no room for a process.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = _start(theirs)
        except OSError:
            ours.close()
            raise
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self.send(boot)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            if not self._is_cut_off:
                self._receive(decode_notice(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def send(self, command: Command) -> None:
        """Queue a command; one for a child that is gone is dropped."""
        frame = encode(command)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def cut_off(self) -> None:
        """Hear nothing from it any more, and end it."""
        self._is_cut_off = True
        if self._transport is not None:
            self._transport.abort()
        self.kill()

    async def reap(self, grace_s: float) -> int | None:
        """Close the socket, wait for the process, kill it after `grace_s`. Returns its exit status, -N for signal N.

        None: not even that ended it; it is left to itself.
        """
        self._is_cut_off = True
        if self._transport is not None:
            self._transport.close()
        if self.process is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self.process.wait, grace_s)
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self.process.wait, KILL_GRACE_S)
        log.error("engine process %d does not die; it is left to itself", self.process.pid)
        return None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def _start(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker that inherits `sock` and stderr and nothing else, and sees the modules this process sees."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "chatcache.engine_process.worker", str(sock.fileno()), str(os.getpid())],
        pass_fds=[sock.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,  # a terminal's Ctrl-C reaches the parent only
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


_TICKS = 10
_BUSY_SHARE = 0.05
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer a child's death: wait `first_delay_s`, doubling to `max_delay_s`; give up at `max_deaths` in a row.

    Any token told ends the row, and so does a life of `healthy_after_s`, loading and more. A child that has work and
    neither says nor computes anything for `hung_after_s` is as good as dead, and so is one that computes for
    `lost_after_s` and says nothing. One that loads may wait for a slow disk: it is given up when it neither says nor
    computes anything for `lost_after_s`.
    """

    max_deaths: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0
    hung_after_s: float = 120.0
    lost_after_s: float = 900.0

    def delay_s(self, num_deaths: int) -> float:
        return min(self.first_delay_s * 2.0 ** min(num_deaths - 1, 100), self.max_delay_s)


def is_passing(error: OSError) -> bool:
    """Whether the system only has no room for a process, or its socket, just now."""
    return error.errno in _NO_ROOM


def cpu_s(pid: int) -> float | None:
    """Return what the threads of a process have computed so far; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_hung(
    is_owed: Callable[[], bool],
    num_heard: Callable[[], int],
    cpu_s: Callable[[], float | None],
    policy: RestartPolicy,
    is_loading: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until nothing was heard for too long, though something was owed all the time.

    A step may take minutes: a long prompt on a few cores, kernels that are compiled first. So a child that computes has
    more time. Counted in ticks of this process, not by a clock: while it was stopped itself, nobody was late.
    A child that is loading always owes something.
    """
    tick_s = policy.hung_after_s / _TICKS
    num_silent = num_still = 0

    def is_hung() -> bool:
        if is_loading():
            return num_still * tick_s >= policy.lost_after_s
        return num_still >= _TICKS or num_silent * tick_s >= policy.lost_after_s

    while not is_hung():
        before, before_s = num_heard(), cpu_s()
        await asyncio.sleep(tick_s)
        after_s = cpu_s()
        is_busy = before_s is not None and after_s is not None and after_s - before_s > _BUSY_SHARE * tick_s
        is_silent = (is_loading() or is_owed()) and num_heard() == before
        num_silent = num_silent + 1 if is_silent else 0
        num_still = num_still + 1 if is_silent and not is_busy else 0


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
        self._survivors = RequestRecovery(self._send, lambda notice: self._board.receive(notice))
        self._board = EngineClientBase(self._survivors.send)
        self._child: ChildProcess | None = None
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
        self.facts: ModelInfo | None = None
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

    async def wait_loaded(self) -> ModelInfo:
        """Wait until the model is loaded for the first time.

        Raises: what the load failed of, a ModelFolderError for instance.
        """
        await self._loaded.wait()
        if self.facts is None:
            raise self._error or EngineError("the engine was closed")
        return self.facts

    async def wait_failed(self) -> ChatcacheError:
        """Wait until there is no hope left: the load failed, or too many children died in a row."""
        await self._failed.wait()
        return self._error or EngineError("the engine was closed")

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
        self._down(EngineError("the engine was closed"))
        self._loaded.set()

    def kill(self) -> None:
        """End the child at once, without waiting: for a second Ctrl-C."""
        if self._child is not None:
            self._child.kill()

    async def _ask(self, what: Any) -> Any:
        self._check()
        return await self._board.ask(what)

    def _check(self, prompt: Sequence[int] = ()) -> None:
        """Refuse what the child need not see. Raises: OverloadedError without one, ContextLengthError."""
        if not self._ready:
            raise OverloadedError(
                self._detail, code="engine_unavailable" if self.facts or self._error else "model_loading"
            )
        if self.facts and len(prompt) > self.facts.max_model_len:  # it may not even fit a frame
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; "
                f"this model's maximum context length is {self.facts.max_model_len} tokens",
                param="prompt",
            )

    def _send(self, command: Command) -> None:
        """Raises: InvalidRequestError for what no frame can carry; nothing was sent then."""
        if self._child is None:
            return
        try:
            self._child.send(command)
        except (FrameTooLargeError, msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
            raise InvalidRequestError(f"the engine cannot be sent this: {error}") from error

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
            error = self._last_words or EngineError(f"the engine process {how}")
            if num_deaths >= self._policy.max_deaths or (self._last_words and self.facts is None):
                self._give_up(error)
                return
            num_poisoned = self._survivors.died(error, is_sure=is_hung or status != -signal.SIGKILL)
            num_deaths = 0 if num_poisoned else num_deaths  # it will not happen again
            delay_s = self._policy.delay_s(num_deaths) if num_deaths else 0.0
            await self._wait_to_start(error, delay_s)
            self.num_restarts += 1

    async def _spawn(self) -> ChildProcess | None:
        """Return a new child; None, with all given up, when no waiting would help."""
        num_refused = 0
        while True:
            self._child, self._last_words = ChildProcess(self._receive), None
            try:
                await self._child.spawn(self._boot)
                return self._child
            except OSError as reason:
                refused = EngineError(f"the engine process could not be started: {reason}")
                if self.facts is None or not is_passing(reason):
                    self._give_up(refused)
                    return None
                num_refused += 1  # not among the deaths: none of the engine's doing
                await self._wait_to_start(refused, self._policy.delay_s(num_refused))

    async def _wait_to_start(self, error: ChatcacheError, delay_s: float) -> None:
        self._pause(error, f"{error.message}; starting a new one in {delay_s:g} s")
        log.error("%s; starting a new one in %g s", error.message, delay_s)
        await asyncio.sleep(delay_s)

    async def _outlived(self, child: ChildProcess) -> bool:
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
            self._last_words = decode_error(notice.fault)

    def _pause(self, error: ChatcacheError, detail: str) -> None:
        """Not ready for a while. Running requests wait; who asked something is told to ask again."""
        self._ready, self._load_fraction, self._detail = False, 0.0, detail
        self._board.fail_calls(OverloadedError(error.message, code="engine_unavailable"), keep=self._survivors.calls)

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
