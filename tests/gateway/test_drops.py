"""Dropping candidates over WebSocket: one ends with a receipt, the others are unchanged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from chatcache.gateway.responses.run import LiveResponse
from tests.gateway.frames import LONG, Frame, ask, items_of, receive, send, until_end
from tests.gateway.serving import Server, held, hurry, slowed, wait_until
from tests.gateway.test_tenants import ONE, TWO, shared

__all__ = ["shared"]

PROTOCOL = Subprotocol("chatcache.v1")
SEEDED: Frame = {"input": "Say it in eight ways", "seed": 7, "max_output_tokens": 60, "ignore_eos": True}


@pytest.fixture
def second(url: str) -> Iterator[ClientConnection]:
    with connect(url, subprotocols=[PROTOCOL], max_size=None) as connection:
        assert receive(connection)["type"] == "session.created"
        yield connection


def until(page: ClientConnection, kind: str, frames: list[Frame] | None = None, **fields: Any) -> Frame:
    """Read to a frame of this type with these fields; earlier frames are added to `frames`."""
    while True:
        frame = receive(page)
        if frames is not None:
            frames.append(frame)
        if frame["type"] == kind and all(frame.get(name) == value for name, value in fields.items()):
            return frame


def started(page: ClientConnection, **fields: Any) -> str:
    """Start a response and wait for its first text; return its id."""
    send(page, **fields)
    response_id: str = until(page, "response.created")["response"]["id"]
    until(page, "response.output_text.delta")
    return response_id


def texts(response: Frame) -> dict[int, str]:
    return {item["candidate"]: item["content"][0]["text"] for item in response["output"]}


def test_drop_seven_of_eight_candidates_leaves_the_eighth_unchanged(server: Server, page: ClientConnection) -> None:
    expected = texts(ask(page, **SEEDED, n=8))
    with slowed(server, 0.1):
        name = started(page, **SEEDED, n=8)
        before = server.num_pages_in_use()
        reported: list[Frame] = []
        for candidate in range(7):
            send(page, "response.drop", response_id=name, candidate=candidate)
        for candidate in range(7):
            note = until(page, "response.dropped", reported)
            assert (note["response_id"], note["candidate"]) == (name, candidate) and "sequence_number" not in note
            receipt = note["receipt"]
            assert receipt["pages_freed"] > 0 and receipt["stop_latency_ms"] > 0
            assert receipt["tokens_after_stop"] >= 0
        assert server.num_pages_in_use() < before + 7, "all but one have ceased to grow"
        hurry(server)
        reported += until_end(page)
    response = reported[-1]["response"]
    got = texts(response)
    assert response["status"] == "incomplete" and response["incomplete_details"]["reason"] == "max_output_tokens"
    assert got[7] == expected[7]
    for item in response["output"]:
        index = item["candidate"]
        assert (item["status"], item["finish_reason"]) == ("incomplete", "length" if index == 7 else "cancelled")
        assert expected[index].startswith(got[index]) and (index == 7 or got[index] != expected[index])
        ends = [f for f in reported if f["type"] == "response.output_item.done" and f["item"]["candidate"] == index]
        assert len(ends) == 1 and ends[0]["item"] == item
        late = [f for f in reported[reported.index(ends[0]) :] if f.get("item_id") == item["id"]]
        assert late == [], "nothing is said behind its end"
    stored = items_of(server, response)
    assert all(stored[item["id"]]["finish_reason"] == item["finish_reason"] for item in response["output"])
    assert server.request("GET", f"/v1/responses/{name}")[2]["output"] == response["output"]


def reasons(response: Frame) -> list[str]:
    return [item["finish_reason"] for item in response["output"]]


def test_dropped_candidate_leaves_a_completed_response(server: Server, page: ClientConnection) -> None:
    """The other candidates end by themselves, so the response is completed."""
    body = {"input": "Which one stays?", "n": 3, "max_output_tokens": 120}
    wanted = ["length", "stop", "stop"]
    seed = next(seed for seed in range(33, 500) if reasons(ask(page, **body, ignore_eos=False, seed=seed)) == wanted)
    with slowed(server, 0.1):
        name = started(page, **body, seed=seed)
        send(page, "response.drop", response_id=name, candidate=0)
        until(page, "response.dropped")
        hurry(server)
        response = until_end(page)[-1]["response"]
    assert (response["status"], reasons(response)) == ("completed", ["cancelled", "stop", "stop"])
    kept = response["output"][1]
    head = server.request("GET", f"/v1/conversations/{response['conversation']['id']}")[2]
    assert head["active_leaf"] == kept["id"]
    after = ask(page, input="Go on", previous_response_id=name)
    items = items_of(server, after)
    assert items[items[after["output"][0]["id"]]["parent_id"]]["parent_id"] == kept["id"]


def test_fork_of_a_running_response_uses_a_remaining_candidate(server: Server, page: ClientConnection) -> None:
    with slowed(server, 0.01):
        name = started(page, **LONG, n=2, stream_id="first")
        send(page, "response.drop", response_id=name, candidate=0)
        until(page, "response.dropped", candidate=0)
        short = {"max_output_tokens": 3, "ignore_eos": True}
        after = started(page, input="Now you", previous_response_id=name, **short, stream_id="second")
        until(page, "response.incomplete", stream_id="second")
        send(page, "response.cancel", response_id=name)
        response = until(page, "response.incomplete", stream_id="first")["response"]
    items = items_of(server, response)
    fork = server.request("GET", f"/v1/responses/{after}")[2]["forked_item_id"]
    assert fork is not None and items[fork]["index"] == 1


def test_drop_of_the_last_candidate_cancels_the_response(
    server: Server, page: ClientConnection, second: ClientConnection
) -> None:
    with slowed(server, 0.02):
        name = started(page, **LONG, n=2)
        send(second, "response.drop", response_id=name, candidate=1)
        assert until(second, "response.dropped")["candidate"] == 1, "told though it does not read the response"
        assert until(page, "response.dropped")["candidate"] == 1
        send(second, "response.drop", response_id=name, candidate=0)
        cancelled = until(second, "response.cancelled")
        end = until_end(page)[-1]
    assert cancelled["receipt"] == end["receipt"] and end["receipt"]["pages_freed"] > 0
    assert end["response"]["status"] == "cancelled"
    assert {item["finish_reason"] for item in end["response"]["output"]} == {"cancelled"}


def test_drop_of_all_candidates_ends_the_response(server: Server, page: ClientConnection) -> None:
    with slowed(server, 0.02):
        name = started(page, **LONG, n=4)
        for candidate in (2, 0, 3, 1, 2):
            send(page, "response.drop", response_id=name, candidate=candidate)
        end = until(page, "response.incomplete")  # that 2 was dropped already may be an error
    assert end["response"]["status"] == "cancelled" and end["receipt"]["pages_freed"] > 0
    assert end["receipt"]["stop_latency_ms"] > 0
    assert len(end["response"]["output"]) == 4
    assert ask(page, input="Still here")["output"]


def test_drop_of_an_ended_candidate_is_answered_while_the_first_drop_is_completed(
    server: Server, page: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop, is_second = LiveResponse.drop, threading.Event()

    async def late(self: LiveResponse, candidate: int) -> Any:
        receipt = await drop(self, candidate)
        await asyncio.to_thread(is_second.wait)
        return receipt

    monkeypatch.setattr(LiveResponse, "drop", late)
    with slowed(server, 0.01):
        name = started(page, **LONG, n=3)
        send(page, "response.drop", response_id=name, candidate=1)
        until(page, "response.dropped", candidate=1)
        assert refused(page, response_id=name, candidate=1)[:2] == (404, "candidate")
        is_second.set()
        send(page, "response.cancel", response_id=name)
        until_end(page)


def refused(page: ClientConnection, **fields: Any) -> tuple[int, str, str | None]:
    send(page, "response.drop", **fields)
    error = until(page, "error")
    return error["status"], error["error"]["param"], error["error"]["code"]


def test_drop_with_invalid_fields_is_rejected(server: Server, page: ClientConnection) -> None:
    with slowed(server, 0.01):
        name = started(page, **LONG, n=3)
        send(page, "response.drop", response_id=name, candidate=1)
        until(page, "response.dropped", candidate=1)
        assert refused(page, response_id=name, candidate=1)[:2] == (404, "candidate"), "dropped twice"
        assert refused(page, response_id=name, candidate=3)[:2] == (400, "candidate")
        assert refused(page, response_id=name, candidate=64)[:2] == (400, "candidate")
        assert refused(page, response_id=name, candidate=-1)[:2] == (400, "candidate")
        assert refused(page, response_id=name, candidate="1")[:2] == (400, "candidate")
        assert refused(page, response_id=name)[:2] == (400, "candidate")
        assert refused(page, candidate=0)[:2] == (400, "response_id")
        assert refused(page, response_id="resp_nobody", candidate=0)[:2] == (404, "response_id")
        send(page, "response.cancel", response_id=name)
        until_end(page)
        assert refused(page, response_id=name, candidate=0)[:2] == (404, "response_id"), "it has ended"


@pytest.mark.parametrize("fields", [{"beam_width": 3}, {"n": 2, "best_of": 3}, {"n": 2, "distinct": True}])
def test_drop_of_beams_and_ranked_candidates_is_rejected(server: Server, page: ClientConnection, fields: Frame) -> None:
    with slowed(server, 0.01):
        send(page, **LONG, **fields)
        name = until(page, "response.created")["response"]["id"]
        assert refused(page, response_id=name, candidate=0) == (400, "candidate", "unsupported_parameter")
        send(page, "response.cancel", response_id=name)
        assert until_end(page)[-1]["response"]["status"] == "cancelled"


def test_drop_of_a_finished_candidate_is_rejected(server: Server, page: ClientConnection) -> None:
    """Some candidates end by themselves while others continue."""
    with slowed(server, 0.1):
        send(page, input="End when you like", n=6, max_output_tokens=900)
        frames: list[Frame] = []
        item = until(page, "response.output_item.done", frames)["item"]
        name = frames[0]["response"]["id"]
        assert refused(page, response_id=name, candidate=item["candidate"])[:2] == (404, "candidate")
        send(page, "response.cancel", response_id=name)
        until_end(page)


def test_drop_before_the_first_token_ends_the_candidate(server: Server, page: ClientConnection) -> None:
    with held(server) as let_go:
        send(page, **SEEDED, n=3)
        name = until(page, "response.created")["response"]["id"]
        wait_until(lambda: server.engine._command_queue.commands.empty(), "the engine to have it")
        send(page, "response.drop", response_id=name, candidate=0)
        wait_until(lambda: not server.engine._command_queue.commands.empty(), "the engine to be told")
        let_go()
        note = until(page, "response.dropped")
        assert note["candidate"] == 0
    response = until_end(page)[-1]["response"]
    assert [item["finish_reason"] for item in response["output"]] == ["cancelled", "length", "length"]
    expected = texts(ask(page, **SEEDED, n=3))
    assert {index: text for index, text in texts(response).items() if index} == {1: expected[1], 2: expected[2]}


def test_plain_websocket_rejects_drop_and_receives_item_ends(server: Server, page: ClientConnection, url: str) -> None:
    with connect(url) as plain, slowed(server, 0.01):
        send(plain, **LONG, n=2)
        name = until(plain, "response.created")["response"]["id"]
        until(plain, "response.output_text.delta")
        send(plain, "response.drop", response_id=name, candidate=0)
        assert until(plain, "error")["error"]["param"] == "type"
        send(page, "response.drop", response_id=name, candidate=0)
        frames: list[Frame] = []
        item = until(plain, "response.output_item.done", frames)["item"]
        assert (item["candidate"], item["status"], item["finish_reason"]) == (0, "incomplete", "cancelled")
        send(plain, "response.cancel", response_id=name)
        frames += until_end(plain)
    numbers = [frame["sequence_number"] for frame in frames if frame["type"] != "error"]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert not any(frame["type"] == "response.dropped" for frame in frames)


def test_drop_of_a_foreign_response_is_not_found(shared: Server) -> None:
    url = f"ws://127.0.0.1:{shared.port}/v1/responses"
    with (
        connect(url, additional_headers=ONE, subprotocols=[PROTOCOL]) as mine,
        connect(url, additional_headers=TWO, subprotocols=[PROTOCOL]) as theirs,
        slowed(shared, 0.01),
    ):
        name = started(mine, **LONG, n=2)
        assert refused(theirs, response_id=name, candidate=0)[:2] == (404, "response_id")
        send(mine, "response.cancel", response_id=name)
        response = until_end(mine)[-1]["response"]
    assert response["status"] == "cancelled"
    wait_until(lambda: shared.num_pages_in_use() == 0, "no page in use")
