"""HTTP clients that disconnect from responses: when each response ends, and resumption."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatcache.config import EngineConfig, ServerConfig
from tests.gateway.responding import (
    LONG,
    PATH,
    Events,
    Json,
    begin,
    counted,
    disconnects,
    leave,
    num_running,
    num_tasks,
    occupied,
    running_id,
    so_far,
)
from tests.gateway.serving import Server, hurry, parse_head, post_bytes, read_all, slowed, unchunk, wait_until
from tests.gateway.test_disconnect import close_hard

TTL_S = 0.3
PING = b": keep-alive\n"
RESUMED = 'chatcache_streams_resumed_total{transport="sse"}'


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one slot whose long prompts take many steps."""
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "c.db"), disconnect_grace_period_s=TTL_S)
    engine_config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=16)
    with Server(config, engine_config=engine_config) as server:
        server.wait_ready().stream(PATH, input="Hi", max_output_tokens=1)  # what runs as long as the server is there
        yield server


PHASES = ["queued", "prefill", "decode"]
# A background response without streaming has no waiting client that could disconnect.
KINDS = [(kind, stream) for kind in ("unstored", "stored", "background") for stream in (True, False)][:-1]


@pytest.mark.parametrize(("kind", "stream"), KINDS)
@pytest.mark.parametrize(
    ("phase", "how"), [*((phase, "fin") for phase in PHASES), ("decode", "rst"), ("decode", "half")]
)
@pytest.mark.slow
def test_client_disconnect_ends_its_own_response(narrow: Server, kind: str, phase: str, how: str, stream: bool) -> None:
    idle = num_tasks(narrow)
    body = {**LONG, "stream": stream, "store": kind != "unstored", "background": kind == "background"}
    if phase == "prefill":
        body |= {"input": "word " * 150, "max_output_tokens": 300}
    before = disconnects(narrow)
    with slowed(narrow, 0.03), occupied(narrow) if phase == "queued" else contextlib.nullcontext():
        connection = begin(narrow, body)
        response_id = running_id(narrow)
        if phase == "decode":
            wait_until(lambda: bool(so_far(narrow, response_id)), "something said")
        leave(connection, how)
        wait_until(lambda: disconnects(narrow) == before + 1, "the leaving to be noticed")
        if kind == "unstored":
            wait_until(lambda: num_running(narrow) == 0, "its end")
            assert narrow.request("GET", f"{PATH}/{response_id}")[0] == 404
        elif kind == "stored":
            wait_until(lambda: num_running(narrow) == 0, "its end, when nobody came back")
            ended = narrow.request("GET", f"{PATH}/{response_id}")[2]
            assert ended["status"] == "cancelled"
            said = bool(ended["output"] and ended["output"][0]["content"][0]["text"])
            assert said or phase != "decode"
            assert not said or phase != "queued"
        else:
            assert narrow.request("GET", f"{PATH}/{response_id}")[2]["status"] == "in_progress"
            assert num_running(narrow) == 1
    if kind == "background":
        wait_until(lambda: num_running(narrow) == 0, "it to be done")
        done = narrow.request("GET", f"{PATH}/{response_id}")[2]
        assert done["status"] == "incomplete" and done["usage"]["output_tokens"] >= 300
    connection.close()
    narrow.wait_idle()
    wait_until(lambda: num_tasks(narrow) <= idle, "every task to end")


def test_reader_that_returns_within_the_grace_period_keeps_the_response(
    narrow: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second reader connects before the first leaves and stays longer than the grace period."""
    monkeypatch.setattr("chatcache.gateway.responses.run._MIN_FIRST_READER_S", TTL_S)
    with slowed(narrow, 0.01):
        first = begin(narrow, {**LONG, "stream": True, "max_output_tokens": 120})
        response_id = running_id(narrow)
        with Events(narrow, f"{PATH}/{response_id}?stream=true") as second:
            second.next()
            close_hard(first)
            rest = list(second)
    assert rest[-1]["type"] == "response.incomplete"
    assert rest[-1]["response"]["usage"]["output_tokens"] == 120


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 60))])
def test_stream_cut_anywhere_can_be_resumed(server: Server, seed: int) -> None:
    """Random cuts and pauses: no gap, no repeated event, the whole text."""
    draws = random.Random(seed)
    n = draws.choice([1, 2, 5])
    body = {**LONG, "n": n, "max_output_tokens": 60, "stream": True, "background": True}
    seen: list[Json] = []
    num_cuts = -1
    before = counted(server, RESUMED)
    with slowed(server, 0.008):
        stream = Events(server, PATH, body)
        while True:
            with stream:
                for _ in range(draws.choice([1, 2, 3, 5, 9])):
                    event = stream.next()
                    if event is None:
                        break
                    seen.append(event)
            num_cuts += 1
            if event is None:
                break
            response_id = seen[0]["response"]["id"]
            stream = Events(server, f"{PATH}/{response_id}?stream=true&starting_after={seen[-1]['sequence_number']}")
    assert num_cuts > 0 and counted(server, RESUMED) == before + num_cuts
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    final = seen[-1]["response"]
    assert final["status"] == "incomplete" and final["usage"]["output_tokens"] == 60 * n
    texts = dict.fromkeys(range(n), "")
    for event in seen:
        if event["type"] == "response.output_text.delta":
            texts[event["output_index"]] += event["delta"]
    assert texts == {index: item["content"][0]["text"] for index, item in enumerate(final["output"])}
    assert server.request("GET", f"{PATH}/{response_id}")[2] == final


def test_sse_pings_contain_no_blank_line(tmp_path: Path) -> None:
    asked = {"input": "Hi", "max_output_tokens": 200, "ignore_eos": True, "stream": True}
    with Server(ServerConfig(db=str(tmp_path / "c.db"), sse_keep_alive_interval_s=0.05)) as server:
        server.wait_ready()
        with slowed(server, 0.3), server.connect() as connection:
            connection.sendall(post_bytes(server.port, PATH, json.dumps(asked).encode()))
            answer = b""
            while answer.count(PING) < 3:
                piece = connection.recv(65536)
                assert piece, answer
                answer += piece
            hurry(server)
            head, _, rest = (answer + read_all(connection)).partition(b"\r\n\r\n")
    headers, data = parse_head(head)[1], unchunk(rest)
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache, no-transform" and headers["x-accel-buffering"] == "no"
    assert data.count(PING) >= 3 and PING + b"\n" not in data and b"\r" not in data
    events = data.replace(PING, b"")
    assert re.fullmatch(rb"(event: [a-z_.]+\ndata: \{[^\x00-\x1f]+\}\n\n)+", events)
    assert b"[DONE]" not in data and re.search(rb"^(id|retry):", data, re.M) is None


def test_client_that_does_not_read_does_not_delay_its_response(server: Server) -> None:
    with server.connect() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {**LONG, "n": 4, "max_output_tokens": 200, "stream": True}
        with slowed(server, 0.05):
            stalled.sendall(post_bytes(server.port, PATH, json.dumps(body).encode()))
            wait_until(lambda: num_running(server) == 1, "it to be under way")
            response_id = running_id(server)
        wait_until(lambda: num_running(server) == 0, "it to be done")
        done = server.request("GET", f"{PATH}/{response_id}")[2]
        assert done["usage"]["output_tokens"] == 800
        data = read_all(stalled)
    assert b"event: response.incomplete" in data and data.count(b"sequence_number") > 8


def test_cancel_ends_a_waiting_or_prefilling_request(narrow: Server) -> None:
    for body, around in (
        ({**LONG}, occupied(narrow)),
        ({**LONG, "input": "word " * 150, "max_output_tokens": 300}, contextlib.nullcontext()),
    ):
        with slowed(narrow, 0.1), around:
            waiting = narrow.post(PATH, **body, background=True)[2]
            ended = narrow.post(f"{PATH}/{waiting['id']}/cancel")[2]
            assert ended["status"] == "cancelled" and ended["receipt"]["tokens_after_stop"] <= 1
        narrow.wait_idle()


def test_cancel_by_another_client_answers_the_waiting_client(narrow: Server) -> None:
    with slowed(narrow, 0.01):
        connection = begin(narrow, LONG)
        response_id = running_id(narrow)
        wait_until(lambda: bool(so_far(narrow, response_id)), "something said")
        receipt = narrow.post(f"{PATH}/{response_id}/cancel")[2]["receipt"]
        answer = json.loads(read_all(connection).partition(b"\r\n\r\n")[2])
    assert answer["status"] == "cancelled" and answer["receipt"] == receipt and answer["output"]
    connection.close()
