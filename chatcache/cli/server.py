"""One `chatcache serve`: a listening socket, an engine process, uvicorn between them, and how it all ends.

The socket listens first, the model loads behind it (503 `model_loading` until then). The first SIGINT or SIGTERM
drains (see `drain`), the second kills. Exit codes: 0 drained, 1 the engine is beyond hope or the port taken,
78 a bad model folder or an unusable store.

How a server leaves: no new work, what runs may finish, what does not is ended with what it has said.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

import uvicorn
from rich.console import Console
from starlette.applications import Starlette

from chatcache import logs
from chatcache.cli import exits
from chatcache.cli.banner import Banner
from chatcache.config import EngineConfig, ServerConfig
from chatcache.conversations.store import StoreUnusableError
from chatcache.engine_process.process import EngineProcess
from chatcache.errors import ChatcacheError, ModelFolderError
from chatcache.factory import BUILD_ENGINE, load_tokenizer
from chatcache.gateway.app import create_app
from chatcache.gateway.context import Gateway
from chatcache.gateway.uvicorn_limits import BoundedHttp, BoundedWebSocket, raise_fd_limit
from chatcache.storage.open import open_store
from chatcache.tokenizer.tokenizer import Tokenizer

LAST_S = 0.5  # for what is ended to be stored
_POLL_S = 0.05


async def drain(gateway: Gateway, timeout_s: float) -> None:
    """Wait until nothing is being answered, `timeout_s` at most; then end what still is."""
    gateway.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not gateway.is_idle:  # noqa: ASYNC110 - what it waits for has no one event
                await asyncio.sleep(_POLL_S)
    await gateway.interrupt(LAST_S)


log = logging.getLogger(__name__)

LEAVE_S = 1
EXIT_GRACE_S = 0.5  # for an engine with nothing left to do
KEEP_ALIVE_S = 75
BACKLOG = 2048


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    build_engine: str = BUILD_ENGINE,
    load: Callable[[EngineConfig], Tokenizer] = load_tokenizer,
) -> int:
    """Serve until a signal or a failure; returns the exit code. `build_engine`: "module:function", as of `bus.worker`.

    `build_engine` and `load` are the load test's way to serve without a model.
    """
    logs.configure_logging(server_config.log_level, server_config.log_format, "gateway")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the banner tells what it would
    raise_fd_limit()
    try:
        sock = listen(server_config.host, server_config.port)
    except OSError as error:
        where = f"{server_config.host}:{server_config.port}"
        from chatcache.cli.port_check import explain_bind_error  # which needs an HTTP client

        found = explain_bind_error(server_config.host, server_config.port, error)
        _refuse(server_config, f"cannot listen on {where}: {found.why}{f'; {found.remedy}' if found.remedy else ''}")
        return exits.ERROR
    try:
        store = open_store(server_config)
    except StoreUnusableError as error:
        sock.close()
        _refuse(server_config, f"{'--redis' if server_config.redis else '--db'} {error.message}")
        return exits.CONFIG
    engine = EngineProcess(
        engine_config, build_engine, log_level=server_config.log_level, log_format=server_config.log_format
    )
    app = create_app(
        server_config, engine, lambda: load(engine_config), engine_config.served_model_name or "", store=store
    )
    console = Console(file=logs.LogWriter(log), width=1000) if server_config.log_format == "json" else None
    banner = Banner(engine_config, server_config, sock.getsockname(), console, app.state.gateway.key_cache)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(app, engine, server_config, sock, banner))


def _refuse(config: ServerConfig, sentence: str) -> None:
    if config.log_format == "json":
        log.critical("%s", sentence)
    else:
        print(f"chatcache: {sentence}", file=sys.stderr)


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen, on the first address `host` resolves to.

    Raises: OSError.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


async def _serve(
    app: Starlette, engine: EngineProcess, server_config: ServerConfig, sock: socket.socket, banner: Banner
) -> int:
    await engine.start()
    server = _Server(uvicorn_config(app, server_config))
    _handle_signals(server, engine.kill, banner, app.state.gateway, server_config.drain_timeout_s)
    watcher = asyncio.create_task(_watch(engine, server, banner))
    try:
        await server.serve(sockets=[sock])
        return _exit_code(await watcher if watcher.done() else None)
    finally:
        watcher.cancel()
        await engine.close(EXIT_GRACE_S)


async def _watch(engine: EngineProcess, server: _Server, banner: Banner) -> ChatcacheError:
    """Show the load, then wait for an engine that is beyond hope, and end the server with it."""
    async with _meanwhile(_show_start(engine, banner)):
        error = await engine.wait_failed()
    banner.show_failed(error)
    server.leave()
    return error


async def _show_start(engine: EngineProcess, banner: Banner) -> None:
    """Show the load of the model, the wait for a store that does not answer yet, and what then serves."""
    with contextlib.suppress(ChatcacheError):  # `_watch` shows why the engine failed
        async with _meanwhile(banner.show_loading(engine)):
            facts = await engine.wait_loaded()
        await banner.wait_for_store()
        banner.show_ready(facts, await engine.health())
        calm_gc()


@contextlib.asynccontextmanager
async def _meanwhile(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` beside the block and end it with the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _exit_code(error: ChatcacheError | None) -> int:
    if error is None:
        return exits.DRAINED
    return exits.CONFIG if isinstance(error, ModelFolderError) else exits.ERROR


def calm_gc() -> None:
    """Keep the cycle collector from walking all there is every few seconds.

    What streams keep is in no cycle, and is freed by its count; but with thousands of them open a walk of everything
    takes a third of a second, in which nobody hears anything.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: it would raise the signal again after a drain, and exit non-zero."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def leave(self) -> None:
        """Stop listening, let answers that are over be sent, then end."""
        self.should_exit = True


def _handle_signals(
    server: _Server, kill: Callable[[], None], banner: Banner, gateway: Gateway, drain_timeout_s: float
) -> None:
    draining: list[asyncio.Task[None]] = []

    def handle() -> None:
        if draining:
            kill()
            os._exit(exits.KILLED)
        banner.show_draining(drain_timeout_s)
        draining.append(asyncio.create_task(drain(gateway, drain_timeout_s)))
        draining[0].add_done_callback(lambda _: server.leave())

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, handle)


def uvicorn_config(app: object, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        http=BoundedHttp,
        ws=BoundedWebSocket,
        ws_max_size=config.max_frame_bytes,
        ws_per_message_deflate=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LEAVE_S,
        root_path=config.root_path,
        backlog=BACKLOG,
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
