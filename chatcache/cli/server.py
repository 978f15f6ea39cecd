"""Run a server: listening socket, engine process, uvicorn, signals and shutdown.

The socket listens before the model is loaded; until then requests get status 503, code `model_loading`. The first
SIGINT or SIGTERM drains the server: new requests are refused, running answers have `--drain-timeout` seconds to finish,
and what has been generated of the others is stored. A second signal ends the process at once. Exit codes: 0 after a
drain, 1 if the engine failed for good or the port is in use, 78 for a bad model folder or an unusable store.
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
from chatcache.cli import options
from chatcache.cli.banner import Banner
from chatcache.cli.port_check import BACKLOG, explain_bind_error, listen
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

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 0.5  # for interrupted answers to be stored
CONNECTIONS_TIMEOUT_S = 1  # for finished responses to be sent
ENGINE_EXIT_TIMEOUT_S = 0.5  # for an idle engine to exit
KEEP_ALIVE_S = 75
_POLL_S = 0.05


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    build_engine: str = BUILD_ENGINE,
    load: Callable[[EngineConfig], Tokenizer] = load_tokenizer,
) -> int:
    """Serve until a signal or a failure, and return the exit code.

    `build_engine` ("module:function", imported in the engine process) and `load` let tests serve without a model.
    """
    logs.configure_logging(server_config.log_level, server_config.log_format, "gateway")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the banner prints the same facts
    raise_fd_limit()
    try:
        sock = listen(server_config.host, server_config.port)
    except OSError as error:
        where = f"{server_config.host}:{server_config.port}"
        found = explain_bind_error(server_config.host, server_config.port, error)
        _print_error(
            server_config, f"cannot listen on {where}: {found.reason}{f'; {found.remedy}' if found.remedy else ''}"
        )
        return options.EXIT_ERROR
    try:
        store = open_store(server_config)
    except StoreUnusableError as error:
        sock.close()
        _print_error(server_config, f"{'--redis' if server_config.redis else '--db'} {error.message}")
        return options.EXIT_CONFIG
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


def _print_error(config: ServerConfig, message: str) -> None:
    if config.log_format == "json":
        log.critical("%s", message)
    else:
        print(f"chatcache: {message}", file=sys.stderr)


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
        await engine.close(ENGINE_EXIT_TIMEOUT_S)


async def _watch(engine: EngineProcess, server: _Server, banner: Banner) -> ChatcacheError:
    """Show the progress of loading; when the engine fails for good, stop the server."""
    async with _running(_show_start(engine, banner)):
        error = await engine.wait_failed()
    banner.show_failed(error)
    server.stop()
    return error


async def _show_start(engine: EngineProcess, banner: Banner) -> None:
    """Show that the model is loading, that the store does not answer yet, then the ready banner."""
    with contextlib.suppress(ChatcacheError):  # `_watch` shows why the engine failed
        async with _running(banner.show_loading(engine)):
            facts = await engine.wait_loaded()
        await banner.wait_for_store()
        banner.show_ready(facts, await engine.health())
        reduce_gc()


@contextlib.asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a coroutine concurrently with the block, and cancel it at the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _exit_code(error: ChatcacheError | None) -> int:
    if error is None:
        return options.EXIT_OK
    return options.EXIT_CONFIG if isinstance(error, ModelFolderError) else options.EXIT_ERROR


def reduce_gc() -> None:
    """Freeze the objects of the loaded server and make full garbage collections rare.

    The objects of a stream are in no reference cycle, so reference counts free them. With thousands of open streams, a
    full collection takes a third of a second, during which no stream receives data.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which raise the signal again after a drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Stop listening and exit after finished responses have been sent."""
        self.should_exit = True


async def drain(gateway: Gateway, timeout_s: float) -> None:
    """Wait up to `timeout_s` for running answers to finish, then interrupt and store the others."""
    gateway.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not gateway.is_idle:  # noqa: ASYNC110 - there is no single event to wait for
                await asyncio.sleep(_POLL_S)
    await gateway.interrupt(SAVE_TIMEOUT_S)


def _handle_signals(
    server: _Server, kill: Callable[[], None], banner: Banner, gateway: Gateway, drain_timeout_s: float
) -> None:
    draining: list[asyncio.Task[None]] = []

    def handle() -> None:
        if draining:
            kill()
            os._exit(options.EXIT_KILLED)
        banner.show_draining(drain_timeout_s)
        draining.append(asyncio.create_task(drain(gateway, drain_timeout_s)))
        draining[0].add_done_callback(lambda _: server.stop())

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
        timeout_graceful_shutdown=CONNECTIONS_TIMEOUT_S,
        root_path=config.root_path,
        backlog=BACKLOG,
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
