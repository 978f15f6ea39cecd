"""What a terminal sees of `chatcache serve`: the load, the facts, the end. Everything goes to stderr."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from chatcache.config import EngineConfig, ServerConfig, format_size
from chatcache.engine.protocols import EngineClient
from chatcache.errors import ChatcacheError
from chatcache.gateway.auth.keys import ApiKeyCache
from chatcache.types.stats import EngineHealth, ModelInfo

POLL_S = 0.1


class Banner:
    """Prints to a terminal in colour (unless NO_COLOR), to a log file in plain lines."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        address: tuple[Any, ...],
        console: Console | None = None,
        key_cache: ApiKeyCache | None = None,
    ) -> None:
        self._name = escape(engine.served_model_name or engine.model)
        self._kv_memory_bytes = engine.kv_memory_bytes
        self._deterministic = ", deterministic" if engine.deterministic else ""
        self._server = server
        self._key_cache = key_cache
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self._url = f"http://{host}:{address[1]}{server.root_path}"
        self._console = console or Console(stderr=True, highlight=False)

    async def show_loading(self, engine: EngineClient) -> None:
        """Follow the load until cancelled: a bar on a terminal, else one line per 10 %."""
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
        told = (-1, "")
        while True:
            health = await engine.health()
            tenth = int(health.load_fraction * 10)
            now = (tenth, health.detail.partition(" ")[0])
            if now != told:
                told = now
                self._console.print(f"{10 * tenth:3d} %  {health.detail}")
            await asyncio.sleep(POLL_S)

    async def wait_for_store(self) -> None:
        """Wait until the stored API keys were read once: until then the server is not ready."""
        if self._key_cache is None or self._key_cache.is_loaded:
            return
        store = "Redis server of --redis" if self._server.redis else "file of --db"
        self._console.print(f"[bold yellow]Waiting for the {store}, which does not answer: not ready until it does[/]")
        while not self._key_cache.is_loaded:  # noqa: ASYNC110 - the key cache has no event for it
            await asyncio.sleep(POLL_S)

    def show_ready(self, facts: ModelInfo, health: EngineHealth) -> None:
        """The facts of what now serves."""
        table = Table.grid(padding=(0, 2))
        for name, text in self._rows(facts, health):
            table.add_row(f"[dim]{name}[/]", text)
        self._console.print(table)

    def _rows(self, facts: ModelInfo, health: EngineHealth) -> list[tuple[str, str]]:
        page_bytes = health.kv_bytes // (health.num_pages + 1)  # the null page takes its bytes too
        num_tokens = health.num_pages * health.page_size
        num_public = len(self._server.shared_system_prompts)
        return [
            ("model", f"[bold]{self._name}[/]  {facts.num_parameters / 1e6:,.1f} M parameters"),
            ("compute", f"{facts.precision} on {facts.device}, {facts.attention} attention{self._deterministic}"),
            (
                "KV pages",
                f"{health.num_pages:,} pages of {health.page_size} tokens, {format_size(page_bytes)} each, "
                f"{format_size(health.kv_bytes)} in all{self._unused(health, page_bytes)}",
            ),
            ("waste", self._waste(health, page_bytes)),
            *_swap_row(health, page_bytes),
            (
                "context",
                f"{facts.max_model_len:,} tokens; {num_tokens / facts.max_model_len:.1f} such contexts fit at once",
            ),
            *([("public", f"{num_public} system prompt(s) shared by all tenants")] if num_public else []),
            ("access", self._access()),
            ("ready", f"[bold green]{self._url}[/]  (chat page; API under /v1)"),
        ]

    def _unused(self, health: EngineHealth, page_bytes: int) -> str:
        """Name the size of --kv-memory where it is larger than all pages that this machine and model can use."""
        given = self._kv_memory_bytes or 0
        is_large = given - health.kv_bytes > 2 * page_bytes
        return f" of the {format_size(given)} of --kv-memory: more cannot be used" if is_large else ""

    def _waste(self, health: EngineHealth, page_bytes: int) -> str:
        """What of the memory no token will ever use: what fills no page, and the ends of the last pages."""
        text = f"up to {health.page_size - 1} unused tokens in a branch's last page"
        if self._kv_memory_bytes is None:
            return text
        unused = self._kv_memory_bytes - health.num_pages * page_bytes
        share = unused / self._kv_memory_bytes
        return f"{format_size(max(unused, 0))} of the memory hold no page ({share:.1%}); {text}"

    def _access(self) -> str:
        if self._key_cache is not None and not self._key_cache.is_open:
            return f"{self._key_cache.num_keys} API key(s)"
        if _is_loopback(self._server.host):
            return "open, from this machine only"
        return "[bold yellow]open to everyone who can reach this address; see `chatcache keys`[/]"

    def show_draining(self, drain_s: float) -> None:
        self._console.print(f"Draining: open answers have {drain_s:g} s to finish. Once more kills.")

    def show_failed(self, error: ChatcacheError) -> None:
        self._console.print(f"[bold red]chatcache:[/] {escape(error.message)}", soft_wrap=True)


def _swap_row(health: EngineHealth, page_bytes: int) -> list[tuple[str, str]]:
    if not health.num_host_pages:
        return []
    size = format_size(health.num_host_pages * page_bytes)
    return [("swap", f"{health.num_host_pages:,} host pages, {size}, for requests that must wait")]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
