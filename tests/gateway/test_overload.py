"""Requests beyond the queue limit are rejected at once, before tokenising."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from chatcache.config import EngineConfig, ServerConfig
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.gateway.serving import CHATML, Server, tokenizer_with, wait_until

MAX_WAITING = 4
MAX_TOKENS = 300
LONG = "word " * 120  # 150 tokens by its characters, more by the tokenizer


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Server]:
    """One request runs, ever so slowly; `MAX_WAITING` more may queue, of `MAX_TOKENS` prompt tokens."""
    config = EngineConfig(max_num_seqs=1, max_queued_requests=MAX_WAITING, max_queued_tokens=MAX_TOKENS)
    with Server(
        ServerConfig(db=str(tmp_path / "chat.db"), disconnect_grace_period_s=0.2),
        engine_config=config,
        tokenizer=tokenizer_with(CHATML),
        load_tokenizer=lambda: tokenizer_with(CHATML),
        eos_every=0,
    ) as server:
        server.wait_ready()
        server.runner.delay_s = 0.02
        yield server
        server.runner.delay_s = 0
        server.wait_idle()


def _asks(server: Server, count: int, content: str = "Hi", max_tokens: int = 800) -> list[Any]:
    """Open streams and leave them open, without reading their responses."""
    connections = []
    for _ in range(count):
        connection = server.connect()
        asked = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": max_tokens}
        body = json.dumps(asked | {"ignore_eos": True})
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        connections.append(connection)
    return connections


def _waiting(server: Server) -> tuple[int, int]:
    health = server.call(server.engine.health())
    return health.num_waiting, health.num_waiting_tokens


def test_full_queue_rejects_requests_before_tokenising(crowded: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = _asks(crowded, 1)
    wait_until(lambda: crowded.num_pages_in_use() > 0, "one runs")
    connections += _asks(crowded, MAX_WAITING)
    wait_until(lambda: _waiting(crowded)[0] == MAX_WAITING, "a full queue")
    made: list[str] = []
    for name in ("encode", "render"):
        original = getattr(Tokenizer, name)

        def spied(self: Tokenizer, *args: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
            made.append(_name)
            return _original(self, *args, **more)

        monkeypatch.setattr(Tokenizer, name, spied)
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
    }
    for path, body in bodies.items():
        status, headers, answer = crowded.request("POST", path, body)
        assert (status, answer["error"]["code"]) == (503, "overloaded") and headers["retry-after"] == "1", path
    with connect(f"ws://127.0.0.1:{crowded.port}/v1/responses") as socket:
        socket.send(json.dumps({"type": "response.create", "input": "Hi"}))
        refusal = json.loads(socket.recv(timeout=60))
        assert (refusal["type"], refusal["status"], refusal["error"]["code"]) == ("error", 503, "overloaded")
    assert made == []
    assert crowded.request("GET", "/v1/conversations")[2]["data"] == []  # nothing of them was stored
    for connection in connections:
        connection.close()


def test_long_prompts_fill_the_token_queue_first(crowded: Server) -> None:
    connections = _asks(crowded, 1)
    wait_until(lambda: crowded.num_pages_in_use() > 0, "one runs")
    connections += _asks(crowded, 1, LONG, 200)
    wait_until(lambda: _waiting(crowded)[0] == 1, "one waits")
    status, _, answer = crowded.request(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    )
    assert status == 503 and f"of at most {MAX_TOKENS}" in answer["error"]["message"]
    crowded.runner.delay_s = 0
    for connection in connections:
        connection.close()
    crowded.wait_idle()
    status, _, _ = crowded.request(
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    )
    assert status == 200  # a single long prompt is admitted


def test_flood_is_served_or_rejected_and_the_queue_never_overflows(crowded: Server) -> None:
    crowded.runner.delay_s = 0.001
    outcomes: list[tuple[int, str | None]] = []
    most = [0, 0]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            for at, number in enumerate(_waiting(crowded)):
                most[at] = max(most[at], number)

    def flood(number: int) -> None:
        for turn in range(12):
            text = LONG if (number + turn) % 5 == 0 else "Hi"
            status, headers, _ = crowded.request(
                "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
            )
            outcomes.append((status, headers.get("retry-after")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    floods = [threading.Thread(target=flood, args=(number,)) for number in range(16)]
    for thread in floods:
        thread.start()
    for thread in floods:
        thread.join()
    done.set()
    watcher.join()
    assert set(outcomes) == {(200, None), (503, "1")}
    assert 0 < most[0] <= MAX_WAITING
    status, _, _ = crowded.request("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 2})
    assert status == 200
