"""Terminal output of `chatcache serve`: load progress, ready banner, shutdown messages.

Everything is written to stderr.
"""

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
    """Prints in colour to a terminal (unless NO_COLOR is set), in plain lines to a log file."""

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
        if self._key_cache is None or self._key_cache.is_loaded:
            return
        store = "Redis server of --redis" if self._server.redis else "file of --db"
        self._console.print(
            f"[bold yellow]Waiting for the {store}, which does not answer; the server is not ready until it does[/]"
        )
        while not self._key_cache.is_loaded:  # noqa: ASYNC110 - the key cache has no event for it
            await asyncio.sleep(POLL_S)

    def show_ready(self, facts: ModelInfo, health: EngineHealth) -> None:
        """Print the model, the KV memory, the access rules, and the URL."""
        table = Table.grid(padding=(0, 2))
        for name, text in self._rows(facts, health):
            table.add_row(f"[dim]{name}[/]", text)
        self._console.print(table)

    def _rows(self, facts: ModelInfo, health: EngineHealth) -> list[tuple[str, str]]:
        page_bytes = health.kv_bytes // (health.num_pages + 1)  # num_pages excludes the null page
        num_tokens = health.num_pages * health.page_size
        num_shared_prompts = len(self._server.shared_system_prompts)
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
            *(
                [("shared", f"{num_shared_prompts} system prompt(s) shared by all tenants")]
                if num_shared_prompts
                else []
            ),
            ("access", self._access()),
            ("ready", f"[bold green]{self._url}[/]  (chat page; API under /v1)"),
        ]

    def _unused(self, health: EngineHealth, page_bytes: int) -> str:
        """Return a note for the KV row if --kv-memory is larger than the pages that can be used."""
        given = self._kv_memory_bytes or 0
        is_large = given - health.kv_bytes > 2 * page_bytes
        return f" of the {format_size(given)} of --kv-memory: more cannot be used" if is_large else ""

    def _waste(self, health: EngineHealth, page_bytes: int) -> str:
        """Return how much KV memory no token can use: bytes outside pages and unfilled last pages."""
        text = f"up to {health.page_size - 1} unused tokens in a branch's last page"
        if self._kv_memory_bytes is None:
            return text
        unused = self._kv_memory_bytes - health.num_pages * page_bytes
        share = unused / self._kv_memory_bytes
        return f"{format_size(max(unused, 0))} of the memory is in no page ({share:.1%}); {text}"

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
