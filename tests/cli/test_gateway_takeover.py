"""A killed `chatcache gateway`: another one finishes its responses, with the same events."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from chatcache.auth import utc_day
from chatcache.cluster.takeover import records_key
from chatcache.config import ServerConfig
from chatcache.gateway.limits.rate_limits import CLEANUP_INTERVAL_S
from chatcache.storage.redis_layout import API_KEYS_KEY, usage_key
from tests.cli.servers import GatewayOnly, Worker, until_status
from tests.gateway.frames import receive, send
from tests.gateway.keyed import give
from tests.support.redis_servers import RedisServer, redis_server

MANY_TOKENS = 2000
MIN_EVENTS = 20
NUM_KILLS = 50
TIMEOUT_S = 300.0
TAKEOVER_TIMEOUT_S = 60.0
SUSPENDED_S = 7.0
BODY: dict[str, Any] = {"background": True, "stream": True, "ignore_eos": True, "seed": 1, "input": "Tell me a lot"}
LOGPROBS = "message.output_text.logprobs"

_RANDOM_IDS = """
import sys
import chatcache.gateway.responses.events as events
from chatcache.cli.main import main
from chatcache.conversations.tree import new_id

events.derive_id = lambda kind, *_: new_id(kind)
sys.exit(main())
"""
_CLOCKED_BATCHES = """
import sys
import chatcache.gateway.responses.run as run
from chatcache.cli.main import main

class Clocked(run.DeltaBatcher):
    def __init__(self, emit, window_s):
        super().__init__(emit, 0.033)

    async def flush(self):
        if sys._getframe(1).f_locals.get("event").__class__ is not run.ReplyBatchEnd:
            await super().flush()

run.DeltaBatcher = Clocked
sys.exit(main())
"""
_SLOW_BATCHES = """
import asyncio
import sys
import chatcache.gateway.responses.run as run
from chatcache.cli.main import main

class Slow(run.DeltaBatcher):
    async def flush(self):
        await asyncio.sleep(0.02)
        await super().flush()

run.DeltaBatcher = Slow
sys.exit(main())
"""
_GOING_ON = """
import sys
import chatcache.gateway.responses.run as run
from chatcache.cli.main import main

run.LiveResponse.abandon = lambda self: None
sys.exit(main())
"""
_SILENT_STORE = """
import sys
from chatcache.cli.main import main
from chatcache.conversations.store import StoreUnavailableError
from chatcache.gateway.peers import GatewayPeers

runs_here = GatewayPeers.runs_here

async def ask_later(self, response_id):
    errors, find_runner = [StoreUnavailableError("planted")] * 2, self.find_runner
    async def find(response_id):
        if errors:
            raise errors.pop()
        return await find_runner(response_id)
    self.find_runner = find
    try:
        return await runs_here(self, response_id)
    finally:
        self.find_runner = find_runner

GatewayPeers.runs_here = ask_later
sys.exit(main())
"""


class PatchedGateway(GatewayOnly):
    """A gateway that runs `program`."""

    program: str

    def command(self, folder: str, *more: str) -> list[str]:
        return [sys.executable, "-c", self.program, *super().command(folder, *more)[3:]]


class GatewayWithSlowBatches(PatchedGateway):
    """It has the events of a response that it takes over only after a while."""

    program = _SLOW_BATCHES


class GatewayWithRandomIds(PatchedGateway):
    """Injected bug: the ids of items are not functions of the response."""

    program = _RANDOM_IDS


class GatewayWithClockedBatches(PatchedGateway):
    """Injected bug: the clock decides which tokens form a delta."""

    program = _CLOCKED_BATCHES


class GatewayWithSilentStore(PatchedGateway):
    """The store does not answer its first questions after it was suspended."""

    program = _SILENT_STORE


class GatewayThatGoesOn(PatchedGateway):
    """Injected bug: the gateway continues the responses that another one has taken over."""

    program = _GOING_ON


@pytest.fixture(scope="module")
def bus(long_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, Worker]]:
    """A Redis, and a worker on it."""
    cwd = tmp_path_factory.mktemp("worker")
    with redis_server(cwd / "redis") as server, contextlib.ExitStack() as stack:
        worker = Worker(long_folder, cwd, "--bus", server.url, "--worker-name", "w", "--kv-memory", "64MiB")
        stack.callback(worker.stop)
        worker.saw("is ready")
        yield server, worker


class Gateways:
    """Two gateways; `kill` ends the first, and `replace_first` starts another one, which becomes the second."""

    def __init__(self, kind: type[GatewayOnly], folder: Path, cwd: Path, redis: RedisServer, *more: str) -> None:
        self._start: Callable[[], GatewayOnly] = partial(
            kind, folder, cwd, "--bus", redis.url, "--redis", redis.url, *more
        )
        self.processes = [self._start() for _ in range(2)]

    def start(self) -> None:
        self.first, self.second = (httpx.Client(base_url=each.ready(), timeout=TIMEOUT_S) for each in self.processes)
        self.model = self.first.get("/v1/models").json()["data"][0]["id"]

    def kill(self) -> None:
        self.processes[0].signal(signal.SIGKILL)

    def replace_first(self) -> None:
        self.processes[0].stop()
        self.first.close()
        self.processes = [self.processes[1], self._start()]
        self.first, self.second = self.second, httpx.Client(base_url=self.processes[1].ready(), timeout=TIMEOUT_S)

    def swap(self) -> None:
        self.processes.reverse()
        self.first, self.second = self.second, self.first

    def stop(self) -> None:
        for client in (self.first, self.second):
            client.close()
        for process in self.processes:
            process.stop()


@contextlib.contextmanager
def gateways(kind: type[GatewayOnly], folder: Path, cwd: Path, redis: RedisServer, *more: str) -> Iterator[Gateways]:
    found = Gateways(kind, folder, cwd, redis, *more)
    try:
        found.start()
        yield found
    finally:
        found.stop()


Event = dict[str, Any]


def events_of(response: httpx.Response) -> Iterator[Event]:
    """Yield the events of a stream, without its end if the connection breaks."""
    with contextlib.suppress(httpx.TransportError):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


class Stream:
    """A response through the first gateway, read in a thread until the gateway is killed."""

    def __init__(self, both: Gateways, more: Event) -> None:
        self.seen: list[Event] = []
        self._is_running = threading.Event()
        self._body = {"model": both.model, **BODY, "max_output_tokens": MANY_TOKENS, **more}
        self._min_events = 1 if "beam_width" in more else MIN_EVENTS
        self._client = both.first
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._client.stream("POST", "/v1/responses", json=self._body) as response:
            if response.status_code != 200:
                self.seen.append(json.loads(response.read()))
                self._is_running.set()
            for event in events_of(response):
                self.seen.append(event)
                if len(self.seen) == self._min_events:
                    self._is_running.set()

    @property
    def id(self) -> str:
        """The id of the response, as soon as it has a few events; beams have one until they end."""
        assert self._is_running.wait(TIMEOUT_S), self.seen
        assert "error" not in self.seen[0], self.seen
        return str(self.seen[0]["response"]["id"])

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)


class WaitingRequest:
    """A request through the first gateway for a whole response, sent in a thread."""

    def __init__(self, both: Gateways) -> None:
        self._answers: list[Event] = []
        body = {"model": both.model, **BODY, "max_output_tokens": MANY_TOKENS, "background": False, "stream": False}
        client = both.first
        self._thread = threading.Thread(
            target=lambda: self._answers.append(client.post("/v1/responses", json=body).json())
        )
        self._thread.start()

    def result(self) -> Event:
        self._thread.join(TIMEOUT_S)
        return self._answers[0]


def read_stream(client: httpx.Client, response_id: str, **query: int) -> list[Event]:
    """Read a stream, again while the gateway refuses it with 503: on a busy machine the takeover takes longer."""
    path, deadline_s = f"/v1/responses/{response_id}", time.monotonic() + TAKEOVER_TIMEOUT_S
    while True:
        with client.stream("GET", path, params={"stream": "true", **query}) as response:
            if response.status_code == 200:
                return list(events_of(response))
            assert response.status_code == 503 and time.monotonic() < deadline_s, response.read()


def retrieve(client: httpx.Client, response_id: str) -> Event:
    """Return a response, as `read_stream` its stream."""
    deadline_s = time.monotonic() + TAKEOVER_TIMEOUT_S
    while True:
        answer = client.get(f"/v1/responses/{response_id}")
        if answer.status_code == 200:
            found: Event = answer.json()
            return found
        assert answer.status_code == 503 and time.monotonic() < deadline_s, answer.text


def wait_recorded(server: RedisServer, text: bytes) -> None:
    """Wait until a gateway has recorded a request with this text on the bus."""
    deadline_s = time.monotonic() + TAKEOVER_TIMEOUT_S
    while not any(text in b"".join(server.admin.hvals(key)) for key in server.admin.keys(records_key("*"))):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def check_rest(both: Gateways, stream: Stream) -> Event:
    """Check that the second gateway has the whole stream, and return its last event."""
    stream.join()
    seen = stream.seen
    rest = read_stream(both.second, stream.id, starting_after=seen[-1]["sequence_number"])
    whole = read_stream(both.second, stream.id)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[: len(seen)] == seen
    assert whole[len(seen) :] == rest
    return rest[-1]


KINDS: dict[str, Event] = {
    "candidates": {"n": 2},
    "logprobs": {"include": [LOGPROBS], "top_logprobs": 2},
    "beams": {"beam_width": 2, "seed": None, "max_output_tokens": 1500},
    "regex": {"structured_outputs": {"regex": "[a-z ]{6000}"}, "temperature": 1.0, "ignore_eos": False},
    "budget": {"stop": ["no such text"], "presence_penalty": 0.5, "temperature": 1.0},
}


@pytest.mark.slow
def test_responses_of_a_killed_gateway_go_on_with_the_same_events(
    bus: tuple[RedisServer, Worker], long_folder: Path, tmp_path: Path
) -> None:
    with gateways(GatewayOnly, long_folder, tmp_path, bus[0]) as both:
        streams = {name: Stream(both, more) for name, more in KINDS.items() if name != "beams"}
        assert all(stream.id for stream in streams.values())
        streams["beams"] = Stream(both, KINDS["beams"])
        assert streams["beams"].id
        both.kill()
        response_id = streams["candidates"].id
        running = retrieve(both.second, response_id)
        assert running["id"] == response_id and running["status"] == "in_progress", running
        for name, stream in streams.items():
            end = check_rest(both, stream)
            assert end["type"] == "response.incomplete", name
            assert end["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
            stored = both.second.get(f"/v1/responses/{stream.id}").json()
            texts = [[item["content"][0]["text"] for item in each["output"]] for each in (stored, end["response"])]
            assert stored["status"] == "incomplete" and texts[0] == texts[1], name
        end = read_stream(both.second, response_id)[-1]
        assert end["response"]["usage"]["output_tokens"] == 2 * MANY_TOKENS
        body = {"model": both.model, "input": "And?", "previous_response_id": response_id, "max_output_tokens": 4}
        answer = both.second.post("/v1/responses", json=body).json()
        assert answer["usage"]["input_tokens"] > MANY_TOKENS
        assert f"chatcache_responses_taken_over_total {len(KINDS)}.0" in both.second.get("/metrics").text
        assert both.processes[1].output.count("is taken over from a gateway") == len(KINDS)


@pytest.mark.slow
def test_steering_input_that_a_killed_gateway_has_accepted_is_answered(
    bus: tuple[RedisServer, Worker], long_folder: Path, tmp_path: Path
) -> None:
    """The worker is suspended meanwhile, so that the first gateway cannot end the response."""
    with gateways(GatewayOnly, long_folder, tmp_path, bus[0]) as both:
        stream = Stream(both, {"max_output_tokens": 8 * MANY_TOKENS})
        url = str(both.first.base_url.join("/v1/responses")).replace("http", "ws")
        protocols: Any = ["chatcache.v1"]
        with connect(url, subprotocols=protocols, compression=None, proxy=None) as socket:
            send(socket, "response.resume", response_id=stream.id, starting_after=0)
            bus[1].signal(signal.SIGSTOP)
            try:
                send(socket, "response.steer", previous_response_id=stream.id, input="Shorter")
                while (frame := receive(socket))["type"] != "response.steer.accepted":
                    pass
                wait_recorded(bus[0], b"Shorter")
                both.kill()
            finally:
                bus[1].signal(signal.SIGCONT)
        end = check_rest(both, stream)
        assert end["type"] == "response.incomplete"
        assert end["response"]["incomplete_details"] == {"reason": "steered"}
        assert frame in read_stream(both.second, stream.id)
        conversation = end["response"]["conversation"]["id"]
        items: list[Event] = both.second.get(f"/v1/conversations/{conversation}/items").json()["data"]
        given = {item["content"][0]["text"] for item in items if item["role"] == "user"}
        assert given == {"Tell me a lot", "Shorter"}


@pytest.mark.slow
def test_stopped_gateway_leaves_its_responses_to_the_other_one(
    bus: tuple[RedisServer, Worker], long_folder: Path, tmp_path: Path
) -> None:
    """The next one answers for a response when it has all events that a client may have seen."""
    with gateways(GatewayWithSlowBatches, long_folder, tmp_path, bus[0], "--drain-timeout", "0") as both:
        stream = Stream(both, {})
        assert stream.id
        both.processes[0].signal(signal.SIGTERM)
        assert both.processes[0].wait() == 0
        stream.join()
        error = stream.seen.pop()
        assert error["code"] == "gateway_unreachable"
        assert error["sequence_number"] == stream.seen[-1]["sequence_number"] + 1, "that of the event that follows"
        end = check_rest(both, stream)
        assert end["type"] == "response.incomplete" and end["response"]["usage"]["output_tokens"] == MANY_TOKENS


@contextlib.contextmanager
def limited_key(both: Gateways, redis: RedisServer) -> Iterator[str]:
    """Have the clients of both gateways use a key with limits; yield its id."""
    held = give(ServerConfig(redis=redis.url), "tenant", tokens_per_day=10**6, max_concurrent=1)
    try:
        for client in (both.first, both.second):
            until_status(str(client.base_url.join("/v1/models")), 401)
            client.headers.update(held.bearer)
        yield held.record.id
    finally:
        redis.admin.delete(API_KEYS_KEY)


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
def test_response_that_another_gateway_continues_is_charged_once(
    bus: tuple[RedisServer, Worker], long_folder: Path, tmp_path: Path, end: signal.Signals
) -> None:
    redis = bus[0]
    with (
        gateways(GatewayOnly, long_folder, tmp_path, redis, "--drain-timeout", "0") as both,
        limited_key(both, redis) as key_id,
    ):
        stream = Stream(both, {})
        assert stream.id
        both.processes[0].signal(end)
        last = read_stream(both.second, stream.id)[-1]
        both.processes[0].signal(signal.SIGCONT)
        usage = last["response"]["usage"]
        cost = usage["total_tokens"] - usage["input_tokens_details"]["cached_tokens"]

        def charged() -> int:
            return int(redis.admin.hget(usage_key(utc_day(time.time())), key_id) or 0)

        deadline_s = time.monotonic() + TAKEOVER_TIMEOUT_S
        while not charged() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        time.sleep(CLEANUP_INTERVAL_S + 1)  # for the first gateway to store what it has charged
        assert charged() == cost


@pytest.mark.slow
def test_streams_continue_with_the_other_gateway(
    bus: tuple[RedisServer, Worker], long_folder: Path, tmp_path: Path
) -> None:
    """Streams of a suspended gateway, and streams through the other gateway, follow the response without an error."""
    with gateways(GatewayOnly, long_folder, tmp_path, bus[0]) as both:
        stream = Stream(both, {})
        waiting = WaitingRequest(both)
        through_other: list[Event] = []
        reading = threading.Thread(target=lambda: through_other.extend(read_stream(both.second, stream.id)))
        reading.start()
        url = str(both.second.base_url.join("/v1/responses")).replace("http", "ws")
        protocols: Any = ["chatcache.v1"]
        with connect(url, subprotocols=protocols, compression=None, proxy=None, max_size=None) as socket:
            send(socket, "response.resume", response_id=stream.id)
            while receive(socket)["type"] != "response.resumed":
                pass
            both.processes[0].signal(signal.SIGSTOP)
            assert retrieve(both.second, stream.id)["id"] == stream.id
            both.processes[0].signal(signal.SIGCONT)
            while (frame := receive(socket))["type"] != "response.incomplete":
                assert frame["type"] != "error", frame
        stream.join()
        reading.join(TIMEOUT_S)
        whole = read_stream(both.second, stream.id)
        assert stream.seen == through_other == whole == read_stream(both.first, stream.id)
        assert whole[-1]["response"]["usage"]["output_tokens"] == MANY_TOKENS
        assert waiting.result()["usage"]["output_tokens"] == MANY_TOKENS
        body = {"model": both.model, "input": "And?", "previous_response_id": stream.id, "max_output_tokens": 4}
        until_status(str(both.first.base_url.join("/readyz")), 200)  # it has found the worker again
        assert both.first.post("/v1/responses", json=body).json()["usage"]["output_tokens"] == 4


def check_suspended_gateways(both: Gateways, num_stops: int, suspended_s: float) -> None:
    """Suspend the gateway that runs a response until another one has ended it: nothing that it does then counts."""
    for number in range(num_stops):
        stream = Stream(both, {"n": 2, "seed": number})
        suspended = both.processes[0]
        assert stream.id
        suspended.signal(signal.SIGSTOP)
        woken_at_s = time.monotonic() + suspended_s
        try:
            whole = read_stream(both.second, stream.id)
            stored = both.second.get(f"/v1/responses/{stream.id}").json()
            time.sleep(max(0.0, woken_at_s - time.monotonic()))
        finally:
            suspended.signal(signal.SIGCONT)
        stream.join()
        assert stream.seen == whole, "its clients get what the other gateway has sent"
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert whole[-1]["response"]["usage"]["output_tokens"] == 2 * MANY_TOKENS
        assert all(retrieve(client, stream.id) == stored for client in (both.first, both.second))
        both.swap()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GatewayOnly, GatewayWithSilentStore])
@pytest.mark.parametrize(("num_stops", "suspended_s"), [(1, 0.0), pytest.param(20, 15.0, marks=pytest.mark.long)])
def test_suspended_gateway_sends_and_stores_nothing_of_its_own(
    kind: type[GatewayOnly],
    num_stops: int,
    suspended_s: float,
    bus: tuple[RedisServer, Worker],
    long_folder: Path,
    tmp_path: Path,
) -> None:
    with gateways(kind, long_folder, tmp_path, bus[0]) as both:
        check_suspended_gateways(both, num_stops, suspended_s)


@pytest.mark.slow
def test_stream_waits_for_a_gateway_that_does_not_answer_for_a_while(
    bus: tuple[RedisServer, Worker], long_folder: Path, tmp_path: Path
) -> None:
    """The gateway that has ended the response is suspended when the one with the stream looks for it."""
    with gateways(GatewayOnly, long_folder, tmp_path, bus[0]) as both:
        stream = Stream(both, {"max_output_tokens": 600})
        assert stream.id
        both.processes[0].signal(signal.SIGSTOP)
        try:
            whole = read_stream(both.second, stream.id)
            both.processes[1].signal(signal.SIGSTOP)
        finally:
            both.processes[0].signal(signal.SIGCONT)
        time.sleep(SUSPENDED_S)
        both.processes[1].signal(signal.SIGCONT)
        stream.join()
        assert stream.seen == whole


@pytest.mark.slow
def test_suspended_gateway_that_goes_on_is_detected(
    bus: tuple[RedisServer, Worker], long_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream never ends."""
    monkeypatch.setattr(Stream, "join", lambda stream: stream._thread.join(5))
    with gateways(GatewayThatGoesOn, long_folder, tmp_path, bus[0]) as both, pytest.raises(AssertionError):
        check_suspended_gateways(both, 1, 0.0)


@pytest.mark.long
def test_fifty_killed_gateways_leave_no_response_incomplete(
    bus: tuple[RedisServer, Worker], long_folder: Path, tmp_path: Path
) -> None:
    with gateways(GatewayOnly, long_folder, tmp_path, bus[0]) as both:
        for number in range(NUM_KILLS):
            names = [*KINDS][number % 3 : number % 3 + 3]
            streams = [
                Stream(both, {**KINDS[name], "max_output_tokens": 600, "seed": None if name == "beams" else number})
                for name in names
            ]
            assert all(stream.id for stream in streams)
            both.kill()
            for stream in streams:
                end = check_rest(both, stream)
                assert end["type"] == "response.incomplete", (number, end)
                assert end["response"]["incomplete_details"] == {"reason": "max_output_tokens"}, (number, end)
            both.replace_first()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GatewayWithRandomIds, GatewayWithClockedBatches])
def test_injected_bugs_are_caught(
    bus: tuple[RedisServer, Worker], long_folder: Path, tmp_path: Path, kind: type[PatchedGateway]
) -> None:
    with gateways(kind, long_folder, tmp_path, bus[0]) as both:
        stream = Stream(both, {})
        assert stream.id
        both.kill()
        with pytest.raises(AssertionError):
            check_rest(both, stream)
