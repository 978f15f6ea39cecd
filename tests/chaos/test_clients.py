"""Test clients and checker together, with a correct gateway and with gateways that have an injected bug."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache.config import EngineConfig, ServerConfig
from chatcache.conversations.replies.events import ReplyDelta
from chatcache.conversations.turns import TurnService
from chatcache.gateway.api.idempotency import IdempotencyKey
from chatcache.gateway.responses.events import ResponseEventWriter
from tests.chaos import tagged_model
from tests.chaos.checker import Checker
from tests.chaos.client import Client, Turn
from tests.chaos.final_checks import note_stored
from tests.chaos.history import History, entries_of
from tests.chaos.plan import make_plan
from tests.chaos.runner import report
from tests.gateway.serving import Server

pytestmark = pytest.mark.slow

SEED = os.environ.get("CHATCACHE_TEST_SEED", "7")
NUM_CLIENTS, NUM_TURNS = 3, 5


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A gateway with the tagged-text model."""
    engine = EngineConfig(strict=True, max_model_len=tagged_model.MAX_MODEL_LEN)
    with Server(
        ServerConfig(db=str(tmp_path / "chat.db"), sse_keep_alive_interval_s=0),
        load_tokenizer=tagged_model.tokenizer,
        tokenizer=tagged_model.tokenizer(),
        build_engine=lambda: tagged_model.build_engine(engine, lambda *_: None),
    ) as server:
        yield server.wait_ready()


async def live(server: Server, folder: Path, manner: str = "") -> Path:
    """Run some clients, in all manners or the given one; return the history, with the stored data."""
    history = History(folder / "history.jsonl")
    try:
        clients = [
            Client(number, [server.port], history, random.Random(f"{SEED}/{number}"), asyncio.Event())
            for number in range(NUM_CLIENTS)
        ]

        async def send_all(client: Client) -> None:
            for _ in range(NUM_TURNS):
                turn: Turn = client.next_turn()
                turn.manner = manner or turn.manner
                await client.send(turn)

        await asyncio.gather(*(send_all(client) for client in clients))
        await note_stored(server.port, history)
    finally:
        history.close()
    return history.path


async def test_correct_gateway_with_all_client_actions_has_no_violations(server: Server, tmp_path: Path) -> None:
    checker = Checker(entries_of(await live(server, tmp_path)))
    assert checker.violations() == []
    assert checker.num_checked()["acknowledged turns"] >= NUM_CLIENTS * NUM_TURNS
    await asyncio.to_thread(server.wait_idle)


def send_twice(monkeypatch: pytest.MonkeyPatch) -> str:
    """Send every tenth delta twice."""
    original, num_deltas = ResponseEventWriter.delta, 0

    def delta(self: ResponseEventWriter, event: ReplyDelta) -> None:
        nonlocal num_deltas
        original(self, event)
        num_deltas += 1
        if num_deltas % 10 == 0:
            original(self, event)

    monkeypatch.setattr(ResponseEventWriter, "delta", delta)
    return "foreign"


def forget_keys(monkeypatch: pytest.MonkeyPatch) -> str:
    async def find_nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(IdempotencyKey, "find_target", find_nothing)
    monkeypatch.setattr(IdempotencyKey, "claim", lambda *_: None)
    return "doubled"


def store_no_reply(monkeypatch: pytest.MonkeyPatch) -> str:
    """Acknowledge replies without storing them."""
    original = TurnService.complete

    async def settle(self: TurnService, conversation: Any, planned: Any, outputs: Any, *more: Any) -> Any:
        return await original(self, conversation, planned, (), *more)

    monkeypatch.setattr(TurnService, "complete", settle)
    return "lost"


@pytest.mark.parametrize("inject", [send_twice, forget_keys, store_no_reply])
async def test_injected_bug_of_the_gateway_is_found_by_its_rule(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], inject: Any
) -> None:
    """The report names the rule and the command that repeats the run."""
    rule = inject(monkeypatch)
    path = await live(server, tmp_path, "twice" if rule == "doubled" else "stay")
    violations = Checker(entries_of(path)).violations()
    assert rule in {violation.rule for violation in violations}
    plan = make_plan(7, 2, "sqlite", NUM_CLIENTS)
    assert report(plan, 2, tmp_path, violations) == 1
    command = "repeat: python -m tests.chaos --minutes 2 --seed 7 --store sqlite --workers 0 --clients 3 --until-step 0"
    assert command in capfd.readouterr().err
