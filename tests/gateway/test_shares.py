"""A tenant above its half of the queue is rejected before tokenising."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache.config import EngineConfig
from chatcache.gateway.auth.principal import KeyLimits
from chatcache.gateway.limits import admission
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.gateway.clocks import Clock
from tests.gateway.limited import LimitedServer, keys_with, limited_server
from tests.gateway.serving import CHATML, post_bytes, tokenizer_with, wait_until

CHAT = "/v1/chat/completions"
MOST, MOST_TOKENS = 4, 1000
TENANTS = {name: KeyLimits() for name in ("one", "two", "three")}
LONG = "word " * 150


class Crowd:
    """A server where one request runs, ever so slowly; so many more may queue. All connections are kept open."""

    def __init__(self, server: LimitedServer) -> None:
        self.server = server
        self.opened: list[socket.socket] = []

    def stream(self, tenant: str, content: str) -> None:
        body = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 3000}
        connection = self.server.connect()
        self.opened.append(connection)
        data = json.dumps({**body, "ignore_eos": True}).encode()
        connection.sendall(
            post_bytes(self.server.port, CHAT, data, f"authorization: Bearer {self.server.held[tenant].key}\r\n")
        )

    def num_waiting(self) -> int:
        return self.server.call(self.server.engine.health()).num_waiting

    def queue(self, tenant: str, count: int, content: str = "Hi") -> None:
        """Open streams and wait until the engine has queued them."""
        before = self.num_waiting()
        for _ in range(count):
            self.stream(tenant, content)
        wait_until(lambda: self.num_waiting() == before + count, f"{count} more in the queue", 60)

    def leave(self, count: int | None = None) -> None:
        """Close the oldest of the connections, all but the one that runs, and wait until the engine knows."""
        gone = self.opened[1 : None if count is None else 1 + count]
        left = self.num_waiting() - len(gone)
        for each in gone:
            self.opened.remove(each)
            each.close()
        wait_until(lambda: self.num_waiting() == left, f"{left} left in the queue", 60)


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    engine = EngineConfig(max_num_seqs=1, max_queued_requests=MOST, max_queued_tokens=MOST_TOKENS)
    tokenizer = tokenizer_with(CHATML)
    db = str(tmp_path / "chat.db")
    with limited_server(
        db,
        Clock(),
        keys_with(db, TENANTS),
        engine_config=engine,
        tokenizer=tokenizer,
        load_tokenizer=lambda: tokenizer,
        eos_every=0,
        max_model_len=4096,
    ) as server:
        server.runner.delay_s = 0.05
        crowd = Crowd(server)
        crowd.stream("three", "Hi")
        wait_until(lambda: server.num_pages_in_use() > 0, "one runs", 60)
        yield crowd
        for each in crowd.opened:
            each.close()


def refusal(server: LimitedServer, tenant: str, content: str = "Hi") -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    status, headers, answer = server.request("POST", CHAT, body, server.bearer(tenant))
    assert headers["retry-after"] == "1"
    return status, answer["error"]["code"]


def check_shares(crowd: Crowd, tokenised: list[str]) -> None:
    """Fill the queue from two sides. Raises: AssertionError where a share does not hold."""
    server = crowd.server
    crowd.queue("one", MOST // 2)
    tokenised.clear()
    assert refusal(server, "one") == (429, "rate_limit_exceeded")
    assert tokenised == [], "before tokenising"
    crowd.queue("two", MOST // 2)
    assert refusal(server, "two") == (429, "rate_limit_exceeded")
    assert refusal(server, "three") == (503, "overloaded")
    crowd.leave(1)
    crowd.queue("three", 1)


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the tokenizer was asked to do."""
    calls: list[str] = []
    for name in ("encode", "render"):
        original = getattr(Tokenizer, name)

        def spied(self: Tokenizer, *args: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
            calls.append(_name)
            return _original(self, *args, **more)

        monkeypatch.setattr(Tokenizer, name, spied)
    return calls


def test_tenant_share_is_half_of_the_queue(crowd: Crowd, tokenised: list[str]) -> None:
    check_shares(crowd, tokenised)


def test_missing_tenant_share_is_detected(crowd: Crowd, tokenised: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "check_tenant_share", lambda *_: None)
    with pytest.raises(AssertionError, match="before tokenising"):
        check_shares(crowd, tokenised)


def test_long_prompts_fill_the_tenant_share_first(crowd: Crowd) -> None:
    crowd.queue("one", 1, LONG)
    assert refusal(crowd.server, "one", LONG) == (429, "rate_limit_exceeded")
    crowd.queue("two", 1, LONG)
    assert refusal(crowd.server, "three", LONG) == (503, "overloaded")


def test_tenant_share_excludes_started_and_disconnected_requests(crowd: Crowd) -> None:
    controller = crowd.server.gateway.admission
    wait_until(lambda: controller.queue_size("three") == (0, 0), "the gateway to know that it runs", 60)
    crowd.queue("one", 2)
    assert controller.queue_size("one").num_requests == 2
    crowd.leave()
    wait_until(lambda: controller.queue_size("one") == (0, 0), "they left", 60)
    crowd.queue("one", 2)
