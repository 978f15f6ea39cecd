"""Taking over and giving up responses while the store does not answer, or names another gateway."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chatcache.conversations.store import StoreUnavailableError
from chatcache.conversations.tree import Turn
from chatcache.errors import EngineError, NotFoundError
from chatcache.gateway import peers
from chatcache.gateway.auth.principal import OPEN_SERVER_PRINCIPAL
from chatcache.gateway.limits.rate_limits import RequestCost
from chatcache.gateway.responses import takeover
from chatcache.gateway.responses.event_log import ResponseLog
from chatcache.gateway.responses.registry import ResponseRegistry
from chatcache.gateway.responses.run import LiveResponse
from chatcache.types.request import GenerateRequest, SamplingParams

REQUEST = GenerateRequest(request_id="resp", prompt=(1,), params=SamplingParams(max_tokens=5))
RECORD = takeover.ReplyRecord(
    principal=OPEN_SERVER_PRINCIPAL,
    turn=Turn("resp", "", "m", 1.0),
    conversation_id="conv",
    rendering="",
    divergence=None,
    prefix=None,
    reply_start="",
    fork_with=None,
    functions=None,
    thinks=False,
    settings={},
    ttl_s=None,
    extended=False,
    compacts=False,
    cost=RequestCost(1),
)


class Gateway:
    """The parts of a gateway that `take_over` uses itself. `given_up`: responses that it leaves to others."""

    def __init__(self) -> None:
        self.responses = ResponseRegistry()
        self.peers = self
        self.given_up: list[str] = []

    def give_up(self, response_id: str) -> None:
        self.given_up.append(response_id)


async def take_over(monkeypatch: pytest.MonkeyPatch, gateway: Gateway, errors: list[Exception]) -> bool:
    """Take a response over with a store that raises these errors first."""

    async def attempt(*_: object) -> bool:
        if errors:
            raise errors.pop(0)
        return True

    async def start_successor(*_: Any) -> str:
        raise NotImplementedError

    monkeypatch.setattr(takeover, "_take_over", attempt)
    monkeypatch.setattr(takeover, "RETRY_S", 0.001)
    return await takeover.take_over(gateway, start_successor, REQUEST, RECORD.encode(), 3, 1)  # type: ignore[arg-type]


async def test_takeover_while_the_store_does_not_answer_succeeds_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    errors: list[Exception] = [StoreUnavailableError("planted"), StoreUnavailableError("planted")]
    assert await take_over(monkeypatch, gateway, errors)
    assert not errors and not gateway.given_up


@pytest.mark.parametrize("error", [NotFoundError("planted"), RuntimeError("planted")])
async def test_takeover_that_fails_gives_the_response_up(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    gateway = Gateway()
    assert not await take_over(monkeypatch, gateway, [error])
    assert gateway.given_up == ["resp"]
    await gateway.responses.wait_restored("resp")  # readers do not wait


class Channel:
    """A store that names the gateway `other` as the one that runs every response, after `num_errors` errors."""

    name = "here"
    take_over = give_up = leave_responses = None

    def __init__(self, num_errors: int) -> None:
        self.num_errors = num_errors

    async def find_runner(self, _: str) -> str:
        self.num_errors -= 1
        if self.num_errors >= 0:
            raise StoreUnavailableError("planted")
        return "other"


async def runs_here(channel: Channel) -> bool:
    parts: Any = (channel, ResponseRegistry(), None, None, None, None)
    return await peers.GatewayPeers(*parts).runs_here("resp")


async def test_gateway_waits_for_the_store_before_it_continues_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PAUSE_S", 0.001)
    channel = Channel(3)
    assert not await runs_here(channel) and channel.num_errors == -1
    monkeypatch.setattr(peers, "OWN_S", 0.01)
    assert await runs_here(Channel(10**6)), "it has no record, and the store does not say whose the response is"


async def test_failure_of_a_response_that_another_gateway_runs_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned: list[str] = []
    monkeypatch.setattr(LiveResponse, "abandon", lambda self: abandoned.append(self.id))
    parts: Any = (Channel(0), ResponseRegistry(), None, None, None, None)
    run: Any = LiveResponse.__new__(LiveResponse)
    run.id, run.log = "resp", ResponseLog("resp")
    run._gateway, run._encode_record = SimpleNamespace(peers=peers.GatewayPeers(*parts)), lambda _: b""
    await run._fail(EngineError("planted"))
    assert abandoned == ["resp"] and run.log.num_frames == 0
