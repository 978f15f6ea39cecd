"""Run a server: listening socket, engine process, uvicorn, signals and shutdown.

The socket listens before the model is loaded; until then requests get status 503, code `model_loading`. The first
SIGINT or SIGTERM drains the server: new requests are refused, running answers have `--drain-timeout` seconds to finish,
and what has been generated of the others is stored. A second signal ends the process at once. Exit codes: 0 after a
drain, 1 if the engine failed for good or the port is in use, 78 for a bad model folder or an unusable store.

`Banner` writes load progress, the ready banner and shutdown messages to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from starlette.applications import Starlette

from chatcache import logs
from chatcache.cli import options
from chatcache.cli.port_check import BACKLOG, explain_bind_error, listen
from chatcache.cluster.remote_engine import RemoteEngine
from chatcache.config import EngineConfig, ServerConfig, format_size
from chatcache.conversations.store import StoreUnusableError
from chatcache.engine.protocols import EngineClient
from chatcache.engine_process.process import EngineProcess
from chatcache.errors import ChatcacheError, ModelFolderError
from chatcache.factory import BUILD_ENGINE, load_tokenizer
from chatcache.gateway.app import create_app
from chatcache.gateway.auth.keys import ApiKeyCache
from chatcache.gateway.context import Gateway
from chatcache.gateway.errors import ModelLoadingError
from chatcache.gateway.heap import keep_large_blocks_apart
from chatcache.gateway.uvicorn_limits import BoundedHttp, BoundedWebSocket, raise_fd_limit
from chatcache.storage.open import lock_store, open_store
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.stats import EngineHealth, ModelInfo

POLL_S = 0.1
SLOW_STORE_S = 2.0  # a store that has not answered by then is mentioned

Engine = EngineProcess | RemoteEngine


class Banner:
    """Prints in colour to a terminal (unless NO_COLOR is set), in plain lines to a log file."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        address: tuple[Any, ...],
        console: Console | None = None,
        key_cache: ApiKeyCache | None = None,
        *,
        has_bus: bool = False,
    ) -> None:
        self._has_own_store = has_bus and not server.redis
        self._name = escape(engine.served_model_name or engine.model)
        self._kv_memory_bytes = engine.kv_memory_bytes
        self._deterministic = ", deterministic" if engine.deterministic else ""
        self._server = server
        self._key_cache = key_cache
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self._url = f"http://{host}:{address[1]}{server.root_path}"
        self._console = console or Console(stderr=True, highlight=False)

    async def show_loading(self, engine: EngineClient) -> None:
        """Show the progress of loading until cancelled: a bar on a terminal, else a line per 10 %."""
        self._console.print(f"Listening on [bold]{self._url}[/] while {self._name} loads")
        if not self._console.is_terminal:
            await self._log_loading(engine)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task("loading", total=1.0)
            while True:
                health = await engine.health()
                bar.update(task, completed=health.load_fraction, description=health.detail or "loading")
                await asyncio.sleep(POLL_S)

    async def _log_loading(self, engine: EngineClient) -> None:
        shown = (-1, "")
        while True:
            health = await engine.health()
            tenth = int(health.load_fraction * 10)
            now = (tenth, health.detail.partition(" ")[0])
            if now != shown:
                shown = now
                self._console.print(f"{10 * tenth:3d} %  {health.detail}")
            await asyncio.sleep(POLL_S)

    async def wait_for_store(self) -> None:
        """Wait until the stored API keys were read once: until then the server is not ready."""
        store = "Redis server of --redis" if self._server.redis else "file of --db"
        begun_s, is_shown = time.monotonic(), False
        while self._key_cache is not None and not self._key_cache.is_loaded:
            if not is_shown and time.monotonic() - begun_s >= SLOW_STORE_S:
                is_shown = True
                text = f"Waiting for the {store}, which does not answer; the server is not ready until it does"
                self._console.print(f"[bold yellow]{text}[/]")
            await asyncio.sleep(POLL_S)

    def show_ready(self, model_info: ModelInfo, health: EngineHealth) -> None:
        """Print the model, the KV memory, the access rules, and the URL."""
        table = Table.grid(padding=(0, 2))
        for name, text in self._rows(model_info, health):
            table.add_row(f"[dim]{name}[/]", text)
        self._console.print(table)

    def _rows(self, model_info: ModelInfo, health: EngineHealth) -> list[tuple[str, str]]:
        page_bytes = health.kv_bytes // (health.num_pages + 1)  # num_pages excludes the null page
        num_tokens = health.num_pages * health.page_size
        context = model_info.max_model_len
        num_shared_prompts = len(self._server.shared_system_prompts)
        return [
            ("model", f"[bold]{self._name}[/]  {model_info.num_parameters / 1e6:,.1f} M parameters"),
            (
                "compute",
                f"{model_info.precision} on {model_info.device}, {model_info.attention} attention{self._deterministic}",
            ),
            (
                "KV pages",
                f"{health.num_pages:,} pages of {health.page_size} tokens, {format_size(page_bytes)} each, "
                f"{format_size(health.kv_bytes)} in all{self._unused(health, page_bytes)}",
            ),
            ("waste", self._waste(health, page_bytes)),
            *_swap_row(health, page_bytes),
            (
                "context",
                f"{context:,} tokens; {num_tokens / context:.1f} such contexts fit at once",
            ),
            *(
                [("shared", f"{num_shared_prompts} system prompt(s) shared by all tenants")]
                if num_shared_prompts
                else []
            ),
            *self._store_row(),
            ("access", self._access()),
            ("ready", f"[bold green]{self._url}[/]  (chat page; API under /v1)"),
        ]

    def _unused(self, health: EngineHealth, page_bytes: int) -> str:
        """Return a note for the KV row if --kv-memory is larger than the memory in use (the log says why)."""
        given = self._kv_memory_bytes or 0
        is_large = given - health.kv_bytes > 2 * page_bytes
        return f" (--kv-memory asked for {format_size(given)})" if is_large else ""

    def _waste(self, health: EngineHealth, page_bytes: int) -> str:
        """Return a note on KV memory without tokens: bytes outside pages, partly filled last pages."""
        text = f"up to {health.page_size - 1} unused tokens in a branch's last page"
        if self._kv_memory_bytes is None:
            return text
        held = health.kv_bytes if self._unused(health, page_bytes) else self._kv_memory_bytes
        unused = held - health.num_pages * page_bytes
        share = unused / held
        return f"{format_size(max(unused, 0))} of the memory is in no page ({share:.1%}); {text}"

    def _store_row(self) -> list[tuple[str, str]]:
        """Return a warning for a gateway of a bus whose conversations and keys the other gateways do not see."""
        if not self._has_own_store:
            return []
        text = f"{escape(self._server.db)}, for this gateway only; give --redis to share it with other gateways"
        return [("store", f"[bold yellow]{text}[/]")]

    def _access(self) -> str:
        if self._key_cache is not None and not self._key_cache.is_open:
            return f"{self._key_cache.num_keys} API key(s)"
        if _is_loopback(self._server.host):
            return "open, from this machine only"
        return "[bold yellow]open to every client that can reach this address; see `chatcache keys`[/]"

    def show_draining(self, drain_s: float) -> None:
        self._console.print(
            f"Draining: running answers have {drain_s:g} s to finish. A second signal ends the server at once."
        )

    def show_failed(self, error: ChatcacheError) -> None:
        self._console.print(f"[bold red]chatcache:[/] {escape(error.message)}", soft_wrap=True)


def _swap_row(health: EngineHealth, page_bytes: int) -> list[tuple[str, str]]:
    if not health.num_host_pages:
        return []
    size = format_size(health.num_host_pages * page_bytes)
    return [("swap", f"{health.num_host_pages:,} host pages, {size}, for preempted requests")]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
    bus_url: str = "",
    build_engine: str = BUILD_ENGINE,
    load: Callable[[EngineConfig], Tokenizer] = load_tokenizer,
) -> int:
    """Serve until a signal or a failure, and return the exit code.

    `bus_url`: use the engines of the workers on this Redis server instead of an own one. `build_engine`
    ("module:function", imported in the engine process) and `load` let tests serve without a model.
    """
    logs.configure_logging(server_config.log_level, server_config.log_format, "gateway")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the banner prints the same facts
    raise_fd_limit()
    keep_large_blocks_apart()
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
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock_store(server_config))
            store = open_store(server_config)
            lock = stack.pop_all()  # until the server ends
    except StoreUnusableError as error:
        sock.close()
        _print_error(server_config, f"{'--redis' if server_config.redis else '--db'} {error.message}")
        return options.EXIT_CONFIG
    engine: Engine = (
        RemoteEngine(bus_url, socket.gethostname(), server_config.routing)
        if bus_url
        else EngineProcess(
            engine_config, build_engine, log_level=server_config.log_level, log_format=server_config.log_format
        )
    )
    app = create_app(
        server_config,
        engine,
        lambda: load(engine_config),
        engine_config.served_model_name or "",
        store=store,
        seed=engine_config.seed,
    )
    console = Console(file=logs.LogWriter(log), width=1000) if server_config.log_format == "json" else None
    key_cache = app.state.gateway.key_cache
    banner = Banner(engine_config, server_config, sock.getsockname(), console, key_cache, has_bus=bool(bus_url))
    with lock, asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(app, engine, server_config, sock, banner))


def _print_error(config: ServerConfig, message: str) -> None:
    if config.log_format == "json":
        log.critical("%s", message)
    else:
        print(f"chatcache: {message}", file=sys.stderr)


async def _serve(
    app: Starlette, engine: Engine, server_config: ServerConfig, sock: socket.socket, banner: Banner
) -> int:
    await engine.start()
    server = _Server(uvicorn_config(app, server_config))
    _handle_signals(server, engine.kill, banner, app.state.gateway, server_config.drain_timeout_s)
    watcher = asyncio.create_task(_watch(engine, server, banner, app.state.gateway))
    try:
        await server.serve(sockets=[sock])
        return _exit_code(await watcher if watcher.done() else None)
    finally:
        watcher.cancel()
        await engine.close(ENGINE_EXIT_TIMEOUT_S)


async def _watch(engine: Engine, server: _Server, banner: Banner, gateway: Gateway) -> ChatcacheError:
    """Show the progress of loading; when the engine fails for good, stop the server.

    Return the error with which the engine failed.
    """
    async with _running(show_start(engine, banner, gateway)):
        error = await engine.wait_failed()
    banner.show_failed(error)
    server.stop()
    return error


async def show_start(engine: Engine, banner: Banner, gateway: Gateway) -> None:
    """Show that the model is loading, that the store does not answer yet, then the ready banner."""
    with contextlib.suppress(ChatcacheError):  # `_watch` shows why the engine failed
        async with _running(banner.show_loading(engine)):
            model_info = await engine.wait_loaded()
        await banner.wait_for_store()
        try:
            await gateway.wait_loaded()  # the workers of a bus can be ready before the tokenizer of a gateway
        except ModelLoadingError as error:
            banner.show_failed(error)
            return
        banner.show_ready(model_info, await engine.health())
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
        draining.append(asyncio.create_task(drain(gateway, drain_timeout_s)))
        draining[0].add_done_callback(lambda _: server.stop())
        banner.show_draining(drain_timeout_s)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, handle)


def uvicorn_config(app: object, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        forwarded_allow_ips="*",  # of X-Forwarded-Proto only the attribute Secure of the client's own cookie depends
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
