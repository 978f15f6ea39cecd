"""Two `chatcache gateway` processes and a worker, with a proxy without stickiness in front of the gateways."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIStatusError, OpenAI
from openai.types.responses import Response
from websockets.sync.client import ClientConnection, connect

from tests.cli.servers import GatewayOnly, Worker
from tests.gateway.frames import Frame, receive, send, until_end
from tests.support.redis_servers import RedisServer, redis_server
from tests.support.round_robin import RoundRobin

NUM_EVENTS = 12
LONG_REPLY = 8000  # tokens

_WITHOUT_PEERS = """
import sys
from chatcache.gateway.peers import GatewayPeers
from chatcache.cli.main import main

async def find_none(*_, **__):
    return None

GatewayPeers.find = GatewayPeers.fork = find_none
sys.exit(main())
"""


class GatewayWithoutPeers(GatewayOnly):
    """Injected bug: the gateway knows only the responses that it runs."""

    def command(self, folder: str, *more: str) -> list[str]:
        return [sys.executable, "-c", _WITHOUT_PEERS, *super().command(folder, *more)[3:]]


@pytest.fixture(scope="module")
def redis(long_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis with a worker on it."""
    cwd = tmp_path_factory.mktemp("worker")
    with redis_server(cwd / "redis") as server, contextlib.ExitStack() as stack:
        worker = Worker(long_folder, cwd, "--bus", server.url, "--worker-name", "w", "--kv-memory", "64MiB")
        stack.callback(worker.stop)
        worker.saw("is ready")
        yield server


@contextlib.contextmanager
def gateways(kind: type[GatewayOnly], folder: Path, cwd: Path, redis: RedisServer) -> Iterator[RoundRobin]:
    with contextlib.ExitStack() as stack:
        found = [kind(folder, cwd, "--bus", redis.url, "--redis", redis.url) for _ in range(2)]
        for gateway in found:
            stack.callback(gateway.stop)
        proxy = RoundRobin([httpx.URL(gateway.ready()).port or 0 for gateway in found])
        stack.callback(proxy.close)
        yield proxy


class Clients:
    """The official client and WebSockets, through the proxy. Every request has a connection of its own."""

    def __init__(self, proxy: RoundRobin) -> None:
        self._proxy = proxy
        url, headers = f"http://127.0.0.1:{proxy.port}/v1", {"connection": "close"}
        self.openai = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300, default_headers=headers)
        self.model = self.openai.models.list().data[0].id
        self.openai.models.list()  # an even number of connections

    def begin(self) -> str:
        """Start a long response, and return its id when it has a text."""
        response = self.openai.responses.create(
            model=self.model,
            input="Tell me a lot",
            background=True,
            max_output_tokens=LONG_REPLY,
            extra_body={"ignore_eos": True, "seed": 1},
        )
        while not self.retrieve(response.id).output_text:
            pass
        return response.id

    def retrieve(self, response_id: str) -> Response:
        return self.openai.responses.retrieve(response_id)

    def events(self, response_id: str, after: int) -> list[str]:
        """Return the first events after a cursor."""
        with self.openai.responses.retrieve(response_id, stream=True, starting_after=after) as stream:
            return [event.to_json() for event in itertools.islice(stream, NUM_EVENTS)]

    def fork(self, response_id: str) -> Response:
        return self.openai.responses.create(
            model=self.model, input="And?", previous_response_id=response_id, max_output_tokens=4, temperature=0
        )

    @contextlib.contextmanager
    def socket(self) -> Iterator[ClientConnection]:
        url = f"ws://127.0.0.1:{self._proxy.port}/v1/responses"
        protocols: Any = ["chatcache.v1"]
        with connect(url, subprotocols=protocols, compression=None, proxy=None) as socket:
            assert receive(socket)["type"] == "session.created"
            yield socket


def until(socket: ClientConnection, *kinds: str) -> Frame:
    while (frame := receive(socket))["type"] not in kinds:
        assert frame["type"] not in ("error", "response.steer.failed"), frame.get("error")
    return frame


def check_stream(clients: Clients) -> None:
    response_id = clients.begin()
    first, second = (clients.events(response_id, 3) for _ in range(2))
    assert first == second
    assert [json.loads(event)["sequence_number"] for event in first] == list(range(4, 4 + NUM_EVENTS))
    clients.openai.responses.cancel(response_id)


def check_cancel(clients: Clients) -> None:
    ids = [clients.begin() for _ in range(2)]
    for response_id in ids:
        clients.openai.models.list()  # the two cancels go through different gateways
        assert clients.openai.responses.cancel(response_id).status == "cancelled"
    for response_id in ids:
        first, second = (clients.retrieve(response_id) for _ in range(2))
        assert first == second and first.status == "cancelled" and first.output_text


def check_fork(clients: Clients) -> None:
    response_id = clients.begin()
    for _ in range(2):
        said = len(clients.retrieve(response_id).output_text)
        forks = [clients.fork(response_id) for _ in range(2)]
        assert all(fork.usage is not None and fork.usage.input_tokens > said for fork in forks)
    assert clients.retrieve(response_id).status == "in_progress"
    clients.openai.responses.cancel(response_id)


def check_steer(clients: Clients) -> None:
    response_id = clients.begin()
    with clients.socket() as one, clients.socket() as other:
        for socket in (one, other):
            send(socket, "response.resume", response_id=response_id, starting_after=0)
            until(socket, "response.resumed")
            send(socket, "response.steer", previous_response_id=response_id, input="Shorter")
            until(socket, "response.steer.accepted")
            ended = until(socket, "response.incomplete")
            assert ended["response"]["incomplete_details"] == {"reason": "steered"}
            successor = until(socket, "response.created")["response"]
            assert successor["previous_response_id"] == response_id
            response_id = successor["id"]
        assert clients.openai.responses.cancel(response_id).status == "cancelled"


def check_chat(clients: Clients) -> None:
    previous: Frame = {}
    conversations = set()
    for text in ("Hello", "Again", "More"):
        with clients.socket() as socket:
            send(socket, input=text, max_output_tokens=8, ignore_eos=True, **previous)
            frames = until_end(socket)
        numbers = [frame["sequence_number"] for frame in frames if "sequence_number" in frame]
        assert numbers == list(range(len(numbers)))
        response = frames[-1]["response"]
        assert response["usage"]["output_tokens"] == 8
        previous = {"previous_response_id": response["id"]}
        conversations.add(response["conversation"]["id"])
    assert len(conversations) == 1


CHECKS: tuple[Callable[[Clients], None], ...] = (check_stream, check_cancel, check_fork, check_steer, check_chat)


@pytest.mark.slow
def test_clients_through_a_proxy_without_stickiness_see_one_server(
    redis: RedisServer, long_folder: Path, tmp_path: Path
) -> None:
    with gateways(GatewayOnly, long_folder, tmp_path, redis) as proxy:
        clients = Clients(proxy)
        for check in CHECKS:
            check(clients)
        first, second = proxy.counts.values()
        assert abs(first - second) <= 1 and first > 10


@pytest.mark.slow
def test_gateways_that_do_not_ask_each_other_fail_these_checks(
    redis: RedisServer, long_folder: Path, tmp_path: Path
) -> None:
    with gateways(GatewayWithoutPeers, long_folder, tmp_path, redis) as proxy:
        clients = Clients(proxy)
        for check in (check_stream, check_cancel):
            with pytest.raises((AssertionError, APIStatusError)):
                check(clients)
