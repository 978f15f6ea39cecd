"""The real application on a real socket, over an engine whose model is a hash: exact about pages, fast, torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn

from chatcache.config import EngineConfig, ServerConfig
from chatcache.conversations.store import ConversationStore
from chatcache.engine.engine import Engine
from chatcache.engine.stats import CacheInspector
from chatcache.engine_process.threaded import ThreadedEngine
from chatcache.gateway.app import create_app
from chatcache.gateway.context import Gateway
from chatcache.gateway.uvicorn_limits import BoundedHttp, BoundedWebSocket
from chatcache.kv_cache.stats import PageUsage
from chatcache.tokenizer.chat_template import ChatTemplate
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.plan import StepPlan, StepResult
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info
from tests.support.invariant_checks import MAX_STRICT_PAGES
from tests.tokenizer.tokenizers import backend_of

Result = TypeVar("Result")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAGE_SIZE = 4
MAX_MODEL_LEN = 1024
MODEL = "org/tiny-hash"


def tokenizer_with(template: str) -> Tokenizer:
    backend = backend_of("bytelevel")
    eos = backend.token_to_id("<|im_end|>")
    assert eos is not None
    return Tokenizer(
        backend, eos_token_ids=(eos,), template=ChatTemplate(template, origin="test", variables={"eos_token": ""})
    )


@cache
def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE whose tokens the hash model draws at random: replies never are their own re-tokenisation."""
    return tokenizer_with(CHATML)


class CheckedEngine(Engine):
    """An engine that checks its page invariants, in its own thread, when asked while it is idle.

    Huge pools are checked in parts, as the engine itself does.
    """

    @property
    def cache(self) -> CacheInspector:
        pages = super().cache
        if self._kv.pool.num_pages <= MAX_STRICT_PAGES and pages.stats().num_in_use == 0:
            pages.check()
        return pages


def plain_settings(app: object, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_config=None,  # the default configuration hides errors from caplog
        log_level="error",
        ws_max_size=config.max_frame_bytes,
        timeout_graceful_shutdown=2,
        access_log=False,
        root_path=config.root_path,
        http=BoundedHttp,
        ws=BoundedWebSocket,
        ws_per_message_deflate=False,
    )


@dataclass
class Server:
    """A running gateway. `runner.delay_s` slows the engine's steps down."""

    config: ServerConfig
    store: ConversationStore | None = None
    load_tokenizer: Callable[[], Tokenizer] = tiny_tokenizer
    num_pages: int = 2048
    num_states: int = 0  # of a hybrid model
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    eos_every: int = 24
    tokenizer: Tokenizer = field(default_factory=tiny_tokenizer)
    max_model_len: int = MAX_MODEL_LEN
    runner_class: type[FakeRunner] = FakeRunner
    build_engine: Callable[[], Engine] | None = None  # one with a model of its own
    settings: Callable[[object, ServerConfig], uvicorn.Config] = plain_settings
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None

    def __post_init__(self) -> None:
        tokenizer = self.tokenizer
        eos = tokenizer.eos_token_ids
        capacity = fake_capacity(
            self.num_pages, PAGE_SIZE, max_model_len=self.max_model_len, num_states=self.num_states
        )
        self.runner = self.runner_class(capacity, tokenizer.vocab_size, eos[0], eos_every=self.eos_every)
        model_info = fake_model_info(tokenizer.vocab_size, eos, self.max_model_len)
        self.engine_gate = threading.Event()
        self.engine_gate.set()
        self.inner: Engine | None = None

        def build() -> Engine:
            self.engine_gate.wait()
            if self.build_engine is not None:
                self.inner = self.build_engine()
                return self.inner
            special = tokenizer.special_ids
            self.inner = CheckedEngine(
                self.runner, model_info, self.engine_config, tokenizer.token_bytes, special_ids=special
            )
            return self.inner

        self._build = build

    def __enter__(self) -> Server:
        # Of protocol TCP by name, like the real server's: else asyncio leaves Nagle's algorithm on; frames wait 40 ms.
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(1024)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-server")
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.engine_gate.set()
        self._uvicorn.should_exit = True
        self._thread.join(60)
        self._listener.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.loop_factory) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = ThreadedEngine(self._build)
        await self.engine.start()
        app = create_app(self.config, self.engine, lambda: self.load_tokenizer(), MODEL, store=self.store)
        self.app = app
        self.gateway: Gateway = app.state.gateway
        self._uvicorn = uvicorn.Server(self.settings(app, self.config))
        serving = asyncio.create_task(self._uvicorn.serve([self._listener]))
        while not self._uvicorn.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        self._started.set()
        await serving
        await self.engine.close()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def num_pages_in_use(self) -> int:
        usage: PageUsage = self.call(self.engine.stats())
        return usage.num_in_use

    def wait_ready(self) -> Server:
        wait_until(lambda: self.request("GET", "/readyz")[0] == 200, "ready")
        return self

    def wait_idle(self) -> None:
        """Every request ended and gave all its pages back; the engine's own invariants hold (`CheckedEngine`)."""
        wait_until(lambda: self.num_pages_in_use() == 0, "no page in use")

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> tuple[int, dict[str, str], Any]:
        """One request over a raw socket: (status, lower-case headers, JSON body or text)."""
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        head = {"host": f"127.0.0.1:{self.port}", "connection": "close", "content-length": str(len(data))}
        if data:
            head["content-type"] = "application/json"
        head |= headers or {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        with self.connect() as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data)
            return split_response(read_all(connection))

    def post(self, path: str, **body: object) -> tuple[int, dict[str, str], Any]:
        return self.request("POST", path, body)

    def stream(self, path: str, **body: object) -> tuple[dict[str, str], bytes]:
        """POST and return (headers, the body's exact bytes, chunked coding undone)."""
        data = json.dumps({**body, "stream": True}).encode()
        with self.connect() as connection:
            connection.sendall(post_bytes(self.port, path, data))
            head, _, rest = read_all(connection).partition(b"\r\n\r\n")
        return parse_head(head)[1], unchunk(rest)


def post_bytes(port: int, path: str, data: bytes, extra: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"{extra}content-length: {len(data)}\r\n\r\n"
    ).encode() + data


def read_all(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(status.split(" ")[1]), {name.lower(): value for name, value in headers.items()}


def split_response(data: bytes) -> tuple[int, dict[str, str], Any]:
    head, _, body = data.partition(b"\r\n\r\n")
    status, headers = parse_head(head)
    if headers.get("transfer-encoding") == "chunked":
        body = unchunk(body)
    text = body.decode()
    return (
        status,
        headers,
        json.loads(text) if headers.get("content-type", "").startswith("application/json") and text else text,
    )


def unchunk(data: bytes) -> bytes:
    parts: list[bytes] = []
    while data:
        size, _, data = data.partition(b"\r\n")
        num_bytes = int(size, 16)
        parts.append(data[:num_bytes])
        data = data[num_bytes + 2 :]
        if not num_bytes:
            break
    return b"".join(parts)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.01)


def host_of(url: str) -> str:
    return urlsplit(url).netloc


@contextlib.contextmanager
def held(server: Server) -> Iterator[Callable[[], None]]:
    """No engine step begins until what this gives is called, or the block ends."""
    let_go, execute = threading.Event(), server.runner.execute

    def wait_and_execute(plan: StepPlan) -> StepResult:
        let_go.wait()
        return execute(plan)

    server.runner.execute = wait_and_execute  # type: ignore[method-assign]
    try:
        yield let_go.set
    finally:
        let_go.set()
        del server.runner.execute


@contextlib.contextmanager
def slowed(server: Server, delay_s: float) -> Iterator[None]:
    """Make every engine step take at least `delay_s`, so that there is time to interrupt it.

    Let what is interrupted take many seconds, and call `hurry` once it was: machines may be busy.
    """
    server.runner.delay_s = delay_s
    try:
        yield
    finally:
        hurry(server)


@contextlib.contextmanager
def failing_after(server: Server, num_steps: int) -> Iterator[None]:
    """Make every step after the next `num_steps` fail.

    Its message must not leave the server.
    """
    original, calls = server.runner.execute, 0

    def execute(plan: StepPlan) -> StepResult:
        nonlocal calls
        calls += 1
        if calls > num_steps:
            raise RuntimeError("secret detail of the inside")
        return original(plan)

    server.runner.execute = execute  # type: ignore[method-assign]
    try:
        yield
    finally:
        server.runner.execute = original  # type: ignore[method-assign]


def hurry(server: Server) -> None:
    """From here on steps take no longer than they must."""
    server.runner.delay_s = 0.0
