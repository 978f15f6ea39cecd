"""Two `chatcache gateway` processes and a worker, with a proxy without stickiness in front of the gateways."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import threading
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

MAX_MODEL_LEN = 8192
NUM_EVENTS = 12

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


class RoundRobin:
    """TCP proxy in a thread: each connection goes to the next of the ports."""

    def __init__(self, ports: list[int]) -> None:
        self.port = 0
        self.counts = dict.fromkeys(ports, 0)
        self._next = itertools.cycle(ports)
        self._loop = asyncio.new_event_loop()
        self._is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_listening.wait(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._done = asyncio.Event()
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_listening.set()
        await self._done.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = next(self._next)
        self.counts[port] += 1
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, back), _copy(there, writer), return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@pytest.fixture(scope="module")
def long_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context in which a reply runs for several seconds."""
    path = tmp_path_factory.mktemp("long")
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_MODEL_LEN}))
    return path


@pytest.fixture(scope="module")
def redis(long_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis with a worker on it."""
    cwd = tmp_path_factory.mktemp("worker")
    with redis_server(cwd / "redis") as server, contextlib.ExitStack() as stack:
        worker = Worker(long_folder, cwd, "--bus", server.url, "--worker-name", "w")
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
        self.openai = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60, default_headers=headers)
        self.model = self.openai.models.list().data[0].id
        self.openai.models.list()  # an even number of connections

    def begin(self) -> str:
        """Start a long response, and return its id when it has a text."""
        response = self.openai.responses.create(
            model=self.model,
            input="Tell me a lot",
            background=True,
            max_output_tokens=MAX_MODEL_LEN - 200,
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
        assert frame["type"] != "error", frame
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
