"""Floods of requests are queued or rejected in order, and users of a tenant share one share.

The engine's events are recorded in its own thread, step by step, so that nothing depends on timing. The same load for
minutes, with times: `python -m tests.gateway.overload`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from chatcache.config import EngineConfig
from chatcache.engine import admission as engine_admission
from chatcache.engine.engine import Engine
from chatcache.gateway import errors
from chatcache.gateway.auth.principal import KeyLimits
from chatcache.gateway.limits import admission as gateway_admission
from chatcache.types.events import EngineEvent, Started
from chatcache.types.request import GenerateRequest
from tests.gateway.clocks import Clock
from tests.gateway.keyed import Held, give
from tests.gateway.limited import LimitedServer, keys_with, limited_server
from tests.gateway.overload import Load
from tests.gateway.serving import post_bytes, wait_until

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
CHAT = "/v1/chat/completions"
MOST = 12
POLITE = tuple(f"polite{number}" for number in range(10))
FLOOD, BUSY = "flood", "busy"
SLOTS = 4
LONGEST = 8192


class Watch:
    """What the engine saw: start order, and the largest queue in total and per tenant."""

    def __init__(self) -> None:
        self.tenants: dict[str, str] = {}
        self.started: list[str] = []
        self.widest = (0, 0)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    seen = Watch()
    add, step = Engine.add, Engine.step

    def watched_add(self: Engine, request: GenerateRequest) -> None:
        add(self, request)
        seen.tenants[request.request_id] = request.namespace
        waiting = Counter(each.namespace for each in self.scheduler.waiting)
        now = waiting.total(), max(waiting.values(), default=0)
        seen.widest = max(seen.widest[0], now[0]), max(seen.widest[1], now[1])

    def watched_step(self: Engine) -> list[EngineEvent]:
        events = step(self)
        seen.started += [seen.tenants[event.request_id] for event in events if isinstance(event, Started)]
        return events

    monkeypatch.setattr(Engine, "add", watched_add)
    monkeypatch.setattr(Engine, "step", watched_step)
    return seen


def flooded(folder: Path, held: Mapping[str, Held] | None = None, **engine: Any) -> Any:
    db = str(folder / "chat.db")
    held = held if held is not None else keys_with(db, {name: KeyLimits() for name in (FLOOD, BUSY, *POLITE)})
    config = EngineConfig(**{"max_num_seqs": SLOTS, "max_queued_requests": MOST, **engine})
    return limited_server(db, Clock(), held, engine_config=config, max_model_len=LONGEST)


@contextmanager
def stream(server: LimitedServer, held: Held, watch: Watch, num_tokens: int = 4) -> Iterator[None]:
    """Open a stream that the engine has accepted."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": num_tokens}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    before = len(watch.tenants)
    with server.connect() as connection:
        connection.sendall(post_bytes(server.port, CHAT, data, f"authorization: Bearer {held.key}\r\n"))
        wait_until(lambda: len(watch.tenants) == before + 1, "the engine has it", 60)
        yield


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - other threads make it true
        await asyncio.sleep(0.01)


def rush(server: LimitedServer, watch: Watch, num_floods: int = 100) -> None:
    """Flood a server with all slots taken, while ten other tenants retry until they are served.

    Raises: AssertionError if a request is rejected without a wait, a limit is exceeded or a tenant starves.
    """
    load = Load(server.port, [], random.Random(SEED))
    refused: Counter[str] = Counter()

    async def ask(name: str) -> int:
        status = await load.send_chat(server.held[name].key, num_tokens=6)
        refused[name] += status != 200
        return status

    async def retry_until_served(name: str) -> None:
        for _ in range(2):
            while True:
                if await ask(name) == 200:
                    break
                await asyncio.sleep(0.02)

    async def all_clients(slots: ExitStack) -> None:
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            for _ in range(num_floods):
                tasks.create_task(ask(FLOOD))
            for name in POLITE:
                tasks.create_task(retry_until_served(name))
            await until(lambda: refused[FLOOD] + list(watch.tenants.values()).count(FLOOD) == num_floods)
            server.runner.delay_s = 0
            slots.close()

    with ExitStack() as slots:
        server.runner.delay_s = 0.02
        for _ in range(SLOTS):
            slots.enter_context(stream(server, server.held[BUSY], watch, num_tokens=LONGEST - 100))
        wait_until(lambda: len(watch.started) == SLOTS, "every slot is taken", 60)
        asyncio.run(all_clients(slots))
    report = load.report
    assert watch.widest[0] <= MOST, f"{watch.widest[0]} were waiting"
    assert watch.widest[1] == MOST // 2, f"{watch.widest[1]} of one tenant were waiting"
    assert not report.problems, f"problems: {report.problems[:3]}"
    assert set(report.statuses) <= {200, 429, 503} and report.statuses[429] > 0
    assert Counter(watch.started)[FLOOD] + 2 * len(POLITE) == report.statuses[200]
    assert server.request("GET", "/livez")[0] == 200


def no_shares(patch: pytest.MonkeyPatch) -> None:
    for module in (gateway_admission, engine_admission):
        patch.setattr(module, "check_tenant_share", lambda *_: None)


def no_queue_limit(patch: pytest.MonkeyPatch) -> None:
    for module in (gateway_admission, engine_admission):
        patch.setattr(module, "check_tenant_share", lambda *_: None)
        patch.setattr(module, "check_queue", lambda *_: None)


def no_word_of_when(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(errors, "error_headers", lambda error: {})


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (no_shares, r"\d+ of one tenant were waiting"),
        (no_queue_limit, r"^\d+ were waiting"),
        (no_word_of_when, r"problems: \[.(429|503) "),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_flood_check_finds_an_injected_bug(
    bug: Callable[[pytest.MonkeyPatch], None],
    words: str,
    tmp_path: Path,
    watch: Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch)
    with flooded(tmp_path) as server, pytest.raises(AssertionError, match=words):
        rush(server, watch, num_floods=50)


def order_of(folder: Path, watch: Watch, policy: str) -> list[str]:
    """Return the order in which requests start.

    Four users of one tenant send three requests each, then another tenant sends one.
    """
    held: dict[str, Held] = {}
    with (
        flooded(folder, held, scheduling_policy=policy, max_num_seqs=1, max_queued_requests=100) as server,
        ExitStack() as streams,
    ):
        held["first"], held["other"] = give(server.config, "first"), give(server.config, "other")
        users = ("ann", "bob", "cid", "dee")
        held |= {user: give(server.config, "acme", user) for user in users}
        server.call(server.gateway.key_cache.refresh())
        server.runner.delay_s = 0.02
        with stream(server, held["first"], watch, num_tokens=LONGEST - 100):
            for name in (*users * 3, "other"):
                streams.enter_context(stream(server, held[name], watch))
            assert watch.started == ["first"]
        server.runner.delay_s = 0
        wait_until(lambda: len(watch.started) == 14, "all were served", 60)
    return watch.started[1:]


def test_fair_scheduling_treats_users_of_a_tenant_as_one(tmp_path: Path, watch: Watch) -> None:
    assert order_of(tmp_path, watch, "fair").index("other") <= 2


def test_fcfs_scheduling_is_not_fair_between_tenants(tmp_path: Path, watch: Watch) -> None:
    assert order_of(tmp_path, watch, "fcfs").index("other") == 12
