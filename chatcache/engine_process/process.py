"""An engine in a supervised child process.

`EngineProcess` is the EngineClient of `chatcache serve`: it starts a child, detects that it ended or hangs, and starts
another one. `ChildProcess` is one child and the parent's end of its socket. `RestartPolicy` decides when a child counts
as hung and whether another one is started.
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
from chatcache.engine_process.client import EngineClientBase, check_length
from chatcache.engine_process.protocol import (
    Boot,
    Command,
    EngineFailed,
    Events,
    FrameBuffer,
    FrameTooLargeError,
    Loaded,
    LoadFailed,
    Loading,
    Notice,
    PromptScores,
    Reply,
    Stop,
    decode_error,
    decode_notice,
    encode,
)
from chatcache.engine_process.recovery import RequestRecovery
from chatcache.errors import ChatcacheError, EngineError, InvalidRequestError, OverloadedError
from chatcache.logs import LogFormat
from chatcache.types.events import EngineEvent, SearchStep
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

KILL_GRACE_S = 5.0
EXIT_GRACE_S = 5.0
MAX_SILENCE_S = 60.0

_TICKS = 10
_BUSY_CPU_FRACTION = 0.05
_TRANSIENT_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class ChildProcess(asyncio.Protocol):
    """One engine process: spawned once, reaped once.

    `receive` is called with each notice; `ended` is set when the socket closes. A frame that is not a notice closes the
    socket, which ends the child. After `disconnect`, notices of the child are ignored.
    """

    def __init__(self, receive: Callable[[Notice], None]) -> None:
        self._receive = receive
        self._frames = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._is_disconnected = False
        self.ended = asyncio.Event()
        self.started_at = time.monotonic()

    async def spawn(self, boot: Boot) -> None:
        """Start the process and send it its boot command.

        Raises: OSError when the system cannot create a process or a socket.
        """
        parent_sock, child_sock = socket.socketpair()
        try:
            with child_sock:
                self.process = _start(child_sock)
        except OSError:
            parent_sock.close()
            raise
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=parent_sock)
        self.send(boot)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            if not self._is_disconnected:
                self._receive(decode_notice(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def send(self, command: Command) -> None:
        """Write a command to the socket; it is dropped if the child has ended."""
        frame = encode(command)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def disconnect(self) -> None:
        """Ignore further notices of the child, and kill it."""
        self._is_disconnected = True
        if self._transport is not None:
            self._transport.abort()
        self.kill()

    async def reap(self, grace_s: float) -> int | None:
        """Close the socket, wait for the process and kill it after `grace_s`.

        Returns the exit status, -N for signal N, or None if the process did not even end when it was killed.
        """
        self._is_disconnected = True
        if self._transport is not None:
            self._transport.close()
        if self.process is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self.process.wait, grace_s)
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self.process.wait, KILL_GRACE_S)
        log.error("engine process %d did not end when it was killed; it is left running", self.process.pid)
        return None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def _start(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker with this process's import path; it inherits only `sock` and stderr."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "chatcache.engine_process.worker", str(sock.fileno()), str(os.getpid())],
        pass_fds=[sock.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,  # a terminal's Ctrl-C reaches the parent only
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When a child process counts as hung, and when another one is started after it ended.

    A restart waits `first_delay_s`, doubled with each death in a row up to `max_delay_s`. After `max_deaths` in a row
    no child is started any more. The row is interrupted by a child that emitted a token, and by one that was ready and
    lived for `healthy_after_s`.

    A child with work is hung when it sends no notice and uses no CPU time for `hung_after_s`, or when it uses CPU time
    but sends no notice for `lost_after_s`. A child that loads may wait for a slow disk: it is hung when it sends no
    notice and uses no CPU time for `lost_after_s`.
    """

    max_deaths: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0
    hung_after_s: float = 120.0
    lost_after_s: float = 900.0

    def delay_s(self, num_deaths: int) -> float:
        """Return the delay before the restart after `num_deaths` deaths in a row."""
        return min(self.first_delay_s * 2.0 ** min(num_deaths - 1, 100), self.max_delay_s)


def is_transient(error: OSError) -> bool:
    """Whether an error of starting a process is due to a temporary lack of system resources."""
    return error.errno in _TRANSIENT_ERRNOS


def process_cpu_s(pid: int) -> float | None:
    """Return the CPU time of all threads of a process; None if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_until_hung(
    expects_notice: Callable[[], bool],
    num_notices: Callable[[], int],
    cpu_s: Callable[[], float | None],
    policy: RestartPolicy,
    is_loading: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until the child counts as hung under `policy`.

    A step may take minutes (a long prompt on few cores, kernels that are compiled first), so a child that uses CPU time
    has more time. Time is counted in ticks of this process instead of by a clock, so that a pause of this process does
    not count against the child. A child that loads is always expected to send notices.
    """
    tick_s = policy.hung_after_s / _TICKS
    num_silent = num_still = 0

    def is_hung() -> bool:
        if is_loading():
            return num_still * tick_s >= policy.lost_after_s
        return num_still >= _TICKS or num_silent * tick_s >= policy.lost_after_s

    while not is_hung():
        before, before_s = num_notices(), cpu_s()
        await asyncio.sleep(tick_s)
        after_s = cpu_s()
        is_busy = before_s is not None and after_s is not None and after_s - before_s > _BUSY_CPU_FRACTION * tick_s
        is_silent = (is_loading() or expects_notice()) and num_notices() == before
        num_silent = num_silent + 1 if is_silent else 0
        num_still = num_still + 1 if is_silent and not is_busy else 0


class EngineProcess:
    """EngineClient of an engine in a supervised child process.

    The child loads the model and runs the steps. When it ends or hangs, `health` reports why, `policy` decides whether
    a new child is started, and running requests are resumed by it (see `recovery`). An error while the first child
    loads is final: `wait_loaded` raises it. Belongs to one event loop. `factory` is "module:function", see `worker`.
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
        self._recovery = RequestRecovery(self._send, self._forward)
        self._client = EngineClientBase(self._recovery.send)
        self._child: ChildProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._detail = "starting"
        self._load_fraction = 0.0
        self._ready = False
        self._last_notice_at = time.monotonic()
        self._num_notices = 0
        self._child_error: ChatcacheError | None = None
        self._error: ChatcacheError | None = None
        self._loaded = asyncio.Event()
        self._failed = asyncio.Event()
        self.model_info: ModelInfo | None = None
        self.num_restarts = 0
        self.on_search_steps: Callable[[tuple[SearchStep, ...]], None] | None = None  # before the events of the step

    async def __aenter__(self) -> EngineProcess:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the current child; None without one."""
        return self._child.process.pid if self._child and self._child.process else None

    async def start(self) -> None:
        """Start supervising; returns at once. Calling again is harmless."""
        if self._supervisor is None:
            self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def wait_loaded(self) -> ModelInfo:
        """Wait until the model is loaded for the first time.

        Raises: the error of the load, for instance ModelFolderError.
        """
        await self._loaded.wait()
        if self.model_info is None:
            raise self._error or EngineError("the engine was closed")
        return self.model_info

    async def wait_failed(self) -> ChatcacheError:
        """Wait until no child will be started any more: the load failed, or too many died in a row."""
        await self._failed.wait()
        return self._error or EngineError("the engine was closed")

    async def submit(self, request: GenerateRequest) -> None:
        self._check(request.prompt)
        if not self._expects_notice():
            self._last_notice_at = time.monotonic()  # an idle engine sends no notices
        await self._client.submit(request)

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        return self._client.events(request_id, after)

    def num_tokens_sent(self, request_id: str) -> int:
        return self._client.num_tokens_sent(request_id)

    async def abort(self, request_id: str) -> None:
        self._client.abort(request_id)

    async def cancel_candidate(self, request_id: str, index: int) -> None:
        self._check()
        await self._client.cancel_candidate(request_id, index)

    async def health(self) -> EngineHealth:
        """Return the last health report of the engine, or why there is none."""
        return msgspec.structs.replace(self._health(), num_restarts=self.num_restarts)

    def _health(self) -> EngineHealth:
        if not self._ready or self._client.health is None:
            return EngineHealth(
                ready=False, detail=self._detail, model=self._boot.config.model, load_fraction=self._load_fraction
            )
        health, silent_s = self._recovery.with_held(self._client.health), time.monotonic() - self._last_notice_at
        if self._expects_notice() and silent_s > MAX_SILENCE_S:
            return msgspec.structs.replace(health, ready=False, detail=f"no step for {silent_s:.0f} s")
        return health

    async def explain(self, query: ExplainQuery) -> Explanation:
        self._check(query.prompt)
        return await self._client.explain(query)

    async def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        self._check()
        return await self._client.count_cached_tokens(prompts, namespace)

    async def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        self._check()
        return await self._client.page_map(namespace, operator)

    async def page_accounts(self) -> PageAccounts:
        self._check()
        return await self._client.page_accounts()

    async def stats(self) -> Any:
        return await self._invoke("stats")

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._invoke("reset_prefix_cache"))

    async def close(self, grace_s: float = EXIT_GRACE_S) -> None:
        """Stop the child, and kill it after `grace_s`; open requests end with `Failed`."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        if self._child is not None:
            self._child.send(Stop())
            await self._child.reap(grace_s if self._ready else 0.0)
        self._fail_all(EngineError("the engine was closed"))
        self._loaded.set()

    def kill(self) -> None:
        """Kill the child without waiting for it, for instance after a second Ctrl-C."""
        if self._child is not None:
            self._child.kill()

    async def _invoke(self, method: Any) -> Any:
        self._check()
        return await self._client.invoke(method)

    def _check(self, prompt: Sequence[int] = ()) -> None:
        """Reject calls that cannot succeed, before they are sent.

        Raises: OverloadedError without a child, ContextLengthError.
        """
        if not self._ready:
            if self.model_info or self._error:
                raise OverloadedError(self._detail, code="engine_unavailable")
            raise OverloadedError(f"the model is still loading ({self._detail})", code="model_loading")
        if self.model_info:
            check_length(prompt, self.model_info)  # a longer one might exceed a frame

    def _send(self, command: Command) -> None:
        """Send a command to the child.

        Raises: InvalidRequestError for a command that cannot be encoded; nothing was sent then.
        """
        if self._child is None:
            return
        try:
            self._child.send(command)
        except (FrameTooLargeError, msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error

    async def _supervise(self) -> None:
        num_deaths = 0
        while True:
            num_sent_before = self._recovery.num_tokens_sent
            child = await self._spawn()
            if child is None:
                return
            is_hung = await self._wait_exit(child)
            was_ready, self._ready = self._ready, False
            status = await child.reap(0.0 if is_hung else EXIT_GRACE_S)
            served = self._recovery.num_tokens_sent > num_sent_before
            was_healthy = was_ready and time.monotonic() - child.started_at >= self._policy.healthy_after_s
            num_deaths = 1 if served or was_healthy else num_deaths + 1
            how = (
                f"{'has work' if was_ready else 'is loading'} but does not respond"
                if is_hung
                else f"died ({_describe(status)})"
            )
            error = self._child_error or EngineError(f"the engine process {how}")
            if num_deaths >= self._policy.max_deaths or (self._child_error and self.model_info is None):
                self._give_up(error)
                return
            num_poisoned = self._recovery.on_exit(error, is_sure=is_hung or status != -signal.SIGKILL)
            num_deaths = 0 if num_poisoned else num_deaths  # the requests that caused it were ended
            delay_s = self._policy.delay_s(num_deaths) if num_deaths else 0.0
            await self._wait_to_start(error, delay_s)
            self.num_restarts += 1

    async def _spawn(self) -> ChildProcess | None:
        """Start a child, retrying while system resources are short.

        On other errors, and if the first child cannot be started, gives up and returns None.
        """
        num_refused = 0
        while True:
            self._child, self._child_error = ChildProcess(self._receive), None
            try:
                await self._child.spawn(self._boot)
                return self._child
            except OSError as reason:
                refused = EngineError(f"the engine process could not be started: {reason}")
                if self.model_info is None or not is_transient(reason):
                    self._give_up(refused)
                    return None
                num_refused += 1  # not counted as deaths: the engine did not cause them
                await self._wait_to_start(refused, self._policy.delay_s(num_refused))

    async def _wait_to_start(self, error: ChatcacheError, delay_s: float) -> None:
        self._suspend(error, f"{error.message}; starting a new one in {delay_s:g} s")
        log.error("%s; starting a new one in %g s", error.message, delay_s)
        await asyncio.sleep(delay_s)

    async def _wait_exit(self, child: ChildProcess) -> bool:
        """Wait until the child ends or hangs; return whether it hung."""
        pid = child.process.pid if child.process is not None else 0
        num_notices, is_loading = lambda: self._num_notices, lambda: not self._ready
        hanging = asyncio.create_task(
            wait_until_hung(self._expects_notice, num_notices, partial(process_cpu_s, pid), self._policy, is_loading)
        )
        ended = asyncio.create_task(child.ended.wait())
        try:
            await asyncio.wait((hanging, ended), return_when=asyncio.FIRST_COMPLETED)
            is_hung = not ended.done()
            if is_hung:
                child.disconnect()
            return is_hung
        finally:
            hanging.cancel()
            ended.cancel()

    def _expects_notice(self) -> bool:
        """Whether the child has requests or calls, so that it must send notices."""
        return self._ready and bool(self._recovery.num_in_engine or self._client.num_calls)

    def _receive(self, notice: Notice) -> None:
        self._last_notice_at = time.monotonic()
        self._num_notices += 1
        if isinstance(notice, Reply | PromptScores | Events):
            self._recovery.receive(notice)
        elif isinstance(notice, Loading):
            self._load_fraction, self._detail = notice.fraction, notice.detail
        elif isinstance(notice, Loaded):
            self.model_info, self._client.health, self._child_error = notice.model_info, notice.health, None
            self._ready, self._detail, self._load_fraction = True, "", 1.0
            self._loaded.set()
            if self.num_restarts:
                log.warning("the engine process was restarted")
            self._recovery.on_started()
        elif isinstance(notice, LoadFailed | EngineFailed):
            self._child_error = decode_error(notice.error)

    def _forward(self, notice: Reply | PromptScores | Events) -> None:
        if isinstance(notice, Events) and notice.search_steps and self.on_search_steps is not None:
            self.on_search_steps(notice.search_steps)
        self._client.receive(notice)

    def _suspend(self, error: ChatcacheError, detail: str) -> None:
        """Become not ready until the next child.

        Requests are held; pending calls raise OverloadedError.
        """
        self._ready, self._load_fraction, self._detail = False, 0.0, detail
        self._client.fail_calls(
            OverloadedError(error.message, code="engine_unavailable"), keep=self._recovery.pending_calls
        )

    def _fail_all(self, error: ChatcacheError) -> None:
        """Become not ready for good; fail all requests and calls."""
        self._ready, self._load_fraction, self._detail = False, 0.0, error.message
        self._recovery.clear()
        self._client.fail_all(error)

    def _give_up(self, error: ChatcacheError) -> None:
        log.debug("%s; giving up", error.message)  # `wait_failed` returns the error to the caller
        self._error = error
        self._fail_all(error)
        self._loaded.set()
        self._failed.set()


def _describe(status: int | None) -> str:
    if status is None:
        return "it did not end"
    return f"signal {-status}" if status < 0 else f"exit status {status}"
