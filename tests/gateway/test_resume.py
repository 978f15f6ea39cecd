"""`chatcache.v1`: responses outlive their WebSockets and can be resumed from any other."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from websockets.sync.client import ClientConnection, connect

from chatcache.gateway.responses import event_log as response_log
from chatcache.gateway.websocket import connection as prewarm
from tests.gateway.frames import LONG, TERMINAL, Frame, ask, receive, send, until_end
from tests.gateway.responding import counted
from tests.gateway.serving import PAGE_SIZE, Server, held, hurry, slowed, tiny_tokenizer, wait_until

MAX_LAG = 30  # frames; fewer than the frames of sixteen finished candidates


@contextlib.contextmanager
def tab(url: str) -> Iterator[ClientConnection]:
    """One more browser tab of the same user."""
    # max_queue: a client that leaves with frames unread would wait for its own closing handshake
    with connect(url, subprotocols=["chatcache.v1"], max_size=None, max_queue=None) as connection:  # type: ignore[list-item]
        assert receive(connection)["type"] == "session.created"
        yield connection


def until(socket: ClientConnection, *kinds: str) -> list[Frame]:
    frames = [receive(socket)]
    while frames[-1]["type"] not in kinds:
        frames.append(receive(socket))
    return frames


def begin(socket: ClientConnection, **fields: Any) -> str:
    send(socket, **{**LONG, **fields})
    response_id: str = until(socket, "response.output_text.delta")[0]["response"]["id"]
    return response_id


def numbered(frames: list[Frame]) -> list[Frame]:
    return [frame for frame in frames if "sequence_number" in frame and frame["type"] != "response.resumed"]


def shown(frames: list[Frame]) -> dict[int, str]:
    """Return the text that a page shows after these frames; check for gaps and repeats."""
    texts: dict[int, str] = {}
    expected = 0
    for frame in numbered(frames):
        if frame["type"] == "response.snapshot":
            assert frame["sequence_number"] >= expected - 1
            texts = {output["output_index"]: output["text"] for output in frame["outputs"]}
        else:
            assert frame["sequence_number"] == expected
        expected = frame["sequence_number"] + 1
        if frame["type"] == "response.output_text.delta":
            texts[frame["output_index"]] = texts.get(frame["output_index"], "") + frame["delta"]
    return texts


def reload_until_the_end(url: str, response_id: str, seed: int) -> tuple[list[Frame], int]:
    """Reload a tab at random until the response ends; return frames and reload count."""
    draws = random.Random(seed)
    seen: list[Frame] = []
    num_reloads = 0
    while not seen or seen[-1]["type"] not in TERMINAL:
        with tab(url) as socket:
            last = numbered(seen)
            after = last[-1]["sequence_number"] if last else -1
            send(socket, "response.resume", response_id=response_id, starting_after=after, stream_id=f"tab{seed}")
            resumed = receive(socket)
            assert resumed["type"] == "response.resumed" and resumed["sequence_number"] >= after
            for _ in range(draws.randrange(1, 9)):
                seen.append(receive(socket))
                assert seen[-1]["stream_id"] == f"tab{seed}"
                if seen[-1]["type"] in TERMINAL:
                    break
            num_reloads += 1
    return seen, num_reloads


@contextlib.contextmanager
def lasting(server: Server) -> Iterator[None]:
    """Set a grace period of one minute for responses that start in the block."""
    config = server.gateway.config
    server.gateway.config = replace(config, disconnect_grace_period_s=60.0)
    try:
        yield
    finally:
        server.gateway.config = config


def reload_in_three_tabs(server: Server, url: str, n: int, first_seed: int = 0) -> int:
    """Check that each of three tabs ends with the whole text; return the number of reloads."""
    found: dict[int, tuple[list[Frame], int]] = {}
    with slowed(server, 0.004), lasting(server):
        with connect(url) as socket:
            response_id = begin(socket, n=n, max_output_tokens=300)
        tabs = [
            threading.Thread(
                target=lambda seed=seed: found.update({seed: reload_until_the_end(url, response_id, seed)})
            )
            for seed in range(first_seed, first_seed + 3)
        ]
        for thread in tabs:
            thread.start()
        for thread in tabs:
            thread.join(60)
    assert len(found) == 3
    final = found[first_seed][0][-1]["response"]
    whole = {index: item["content"][0]["text"] for index, item in enumerate(final["output"])}
    assert len(whole) == n and all(shown(frames) == whole for frames, _ in found.values())
    assert all(frames[-1]["response"] == final for frames, _ in found.values())
    return sum(num_reloads for _, num_reloads in found.values())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.slow
def test_reloads_of_three_tabs_receive_identical_events(server: Server, url: str, n: int) -> None:
    """Goal G14, at the size of a test."""
    assert reload_in_three_tabs(server, url, n) > 9


@pytest.mark.long
def test_thousand_reloads_receive_identical_events(server: Server, url: str) -> None:
    num_reloads = seed = 0
    while num_reloads < 1000:
        num_reloads += reload_in_three_tabs(server, url, 1 + seed % 3, seed)
        seed += 3


def test_ended_response_can_be_resumed_from_any_number(server: Server, url: str, socket: ClientConnection) -> None:
    send(socket, input="Hello", n=2, max_output_tokens=40, ignore_eos=True)
    frames = until_end(socket)
    response_id, last = frames[0]["response"]["id"], frames[-1]["sequence_number"]
    with tab(url) as page:
        for after in (*random.Random(1).sample(range(last), 4), -1, last - 1):
            send(page, "response.resume", response_id=response_id, starting_after=after)
            assert until(page, "response.resumed")[-1] == {
                "type": "response.resumed", "response_id": response_id, "status": "incomplete", "sequence_number": last,
            }  # fmt: skip
            assert numbered(until_end(page)) == frames[after + 1 :]
        send(page, "response.resume", response_id=response_id, starting_after=last)
        assert until(page, "response.resumed")[-1]["sequence_number"] == last
        assert ask(page, input="nothing more came of it")["output"]


def test_long_response_is_resumed_with_one_snapshot(
    server: Server, url: str, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "MAX_LAG_FRAMES", MAX_LAG)
    send(socket, **{**LONG, "max_output_tokens": 40}, n=16)
    frames = until_end(socket)
    assert len(frames) > 2 * MAX_LAG
    with tab(url) as page:
        send(page, "response.resume", response_id=frames[0]["response"]["id"])
        again = until_end(page)
    assert [frame["type"] for frame in numbered(again)] == ["response.created", "response.snapshot", frames[-1]["type"]]
    assert again[-1] == frames[-1] and shown(again) == shown(frames)


def test_resume_before_the_first_token_reports_in_progress(server: Server, url: str, socket: ClientConnection) -> None:
    with held(server) as let_go, tab(url) as page:
        send(socket, **{**LONG, "max_output_tokens": 2})
        response_id = until(socket, "response.in_progress")[0]["response"]["id"]
        send(page, "response.resume", response_id=response_id, starting_after=1)
        resumed = receive(page)
        let_go()
        rest = until_end(page)
    assert (resumed["status"], resumed["sequence_number"]) == ("in_progress", 1)
    assert numbered(rest)[0]["sequence_number"] == 2


def test_resume_of_unknown_or_future_events_is_rejected(server: Server, url: str) -> None:
    with tab(url) as page:
        done = ask(page, input="Hi")
        cases: list[tuple[Frame, int, str]] = [
            ({"response_id": "resp_x"}, 404, "response_id"),
            ({"response_id": "x" * 10_000}, 400, "response_id"),
            ({"response_id": 5}, 400, "response_id"),
            ({}, 400, "response_id"),
            ({"response_id": done["id"], "starting_after": 10_000}, 400, "starting_after"),
            ({"response_id": done["id"], "starting_after": -2}, 400, "starting_after"),
        ]
        for fields, status, param in cases:
            send(page, "response.resume", **fields)
            error = receive(page)
            assert (error["status"], error["error"]["param"]) == (status, param)
        with slowed(server, 0.005):
            send(page, **LONG)
            running = until(page, "response.created")[-1]["response"]["id"]
            send(page, "response.resume", response_id=running)
            assert until(page, "error")[-1]["error"]["param"] == "response_id"
            send(page, "response.cancel", response_id=running)
            until_end(page)


def test_response_without_reader_continues_for_the_grace_period(server: Server, url: str) -> None:
    """`disconnect_grace_period_s` is longer than this test."""
    with slowed(server, 0.003), lasting(server):
        with tab(url) as page:
            response_id = begin(page, max_output_tokens=150)
        wait_until(lambda: server.num_pages_in_use() == 0, "the response to be done")
    with tab(url) as page:
        send(page, "response.resume", response_id=response_id)
        end = until_end(page)[-1]["response"]
    assert end["incomplete_details"] == {"reason": "max_output_tokens"} and end["usage"]["output_tokens"] == 150


def test_unstored_response_ends_with_its_last_reader(server: Server, url: str) -> None:
    with slowed(server, 0.05), tab(url) as second:
        with tab(url) as first:
            response_id = begin(first, store=False)
            send(second, "response.resume", response_id=response_id)
            until(second, "response.output_text.delta")
        before = server.num_pages_in_use()
        until(second, "response.output_text.delta")
        assert server.num_pages_in_use() >= before > 0
        second.close()
        wait_until(lambda: server.num_pages_in_use() == 0, "it to end with its last reader", timeout_s=20.0)


def test_cancelling_connection_receives_the_receipt(server: Server, url: str) -> None:
    with slowed(server, 0.01), tab(url) as reading, tab(url) as other:
        response_id = begin(reading, n=2)
        send(other, "response.cancel", response_id=response_id)
        reported = receive(other)
        end = until_end(reading)[-1]
        assert reported == {
            "type": "response.cancelled", "response_id": response_id, "status": "cancelled", "receipt": end["receipt"],
        }  # fmt: skip
        assert end["receipt"]["tokens_after_stop"] >= 0 and end["receipt"]["pages_freed"] > 0
        send(other, "response.cancel", response_id=response_id)
        assert receive(other)["status"] == 404


def test_subscribers_receive_every_conversation_change(server: Server, url: str) -> None:
    with tab(url) as page, connect(url) as other:
        for _ in range(2):  # twice is once
            send(page, "conversation.subscribe")
        assert receive(page) == {"type": "conversation.subscribed", "running": []}
        done = ask(other, input="Hello there", max_output_tokens=3)
        conversation = done["conversation"]["id"]
        updates = [receive(page)]
        while updates[-1].get("conversation", {}).get("active_leaf") != done["output"][0]["id"]:
            updates.append(receive(page))
        assert {update["type"] for update in updates} == {"conversation.updated"}
        assert [update["conversation"]["rev"] for update in updates] == sorted(
            {update["conversation"]["rev"] for update in updates}
        )
        server.request("POST", f"/v1/conversations/{conversation}", {"title": "Renamed"})
        assert receive(page)["conversation"]["title"] == "Renamed"
        server.request("DELETE", f"/v1/conversations/{conversation}")
        assert receive(page) == {"type": "conversation.deleted", "conversation_id": conversation}
        with pytest.raises(TimeoutError):
            page.recv(timeout=0.1)


def test_subscription_lists_running_responses(server: Server, url: str) -> None:
    """After a reload, and in a tab that was open before."""
    with slowed(server, 0.02), tab(url) as before, connect(url) as other:
        send(before, "conversation.subscribe")
        assert receive(before)["running"] == []
        response_id = begin(other)
        update = receive(before)
        assert update["running"] == [response_id]
        with tab(url) as after:
            send(after, "conversation.subscribe")
            (running,) = receive(after)["running"]
            assert running == {"response_id": response_id, "conversation_id": update["conversation"]["id"]}
            send(after, "response.resume", response_id=response_id, starting_after=-1)
            assert until(after, "response.created")[0]["status"] == "in_progress"
        send(other, "response.cancel", response_id=response_id)
        until_end(other)


@pytest.mark.slow
def test_acknowledging_client_receives_at_most_one_window(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_log, "MAX_LAG_FRAMES", MAX_LAG)
    with slowed(server, 0.02), tab(url) as page:
        send(page, **{**LONG, "max_output_tokens": 200}, n=16)
        response_id = until(page, "response.created")[0]["response"]["id"]
        send(page, "response.ack", response_id=response_id, sequence_number=0)
        last = 0
        while last < MAX_LAG:
            last = receive(page).get("sequence_number", last)
        hurry(server)
        wait_until(lambda: server.num_pages_in_use() == 0, "the engine to be done, whatever the client reads")
        with contextlib.suppress(TimeoutError):
            while True:
                last = json.loads(page.recv(timeout=1.0)).get("sequence_number", last)
        assert last < MAX_LAG + 100
        send(page, "response.ack", response_id=response_id, sequence_number=10**9)
        assert until(page, "error")[-1]["error"]["param"] == "sequence_number"
        send(page, "response.ack", response_id=response_id, sequence_number=last)
        snapshot = until(page, "response.snapshot")[-1]
        with pytest.raises(TimeoutError):
            page.recv(timeout=0.2)
        send(page, "response.ack", response_id=response_id, sequence_number=snapshot["sequence_number"])
        assert until_end(page)[-1]["sequence_number"] == snapshot["sequence_number"] + 1
        send(page, "response.ack", response_id=response_id, sequence_number=last)  # too late is nothing
        assert ask(page, input="still here")["output"]


DRAFT = "It was a dark and stormy night, and the pages were all in use; except at occasional intervals. " * 3
PIECE_TOKENS = 8


def test_prewarm_computes_the_prompt_of_the_next_turn(server: Server, url: str) -> None:
    with tab(url) as page:
        first = ask(page, input="Hello", instructions="Tell stories.")
        place = {"previous_response_id": first["id"], "instructions": "Tell stories."}
        before = server.request("GET", "/v1/conversations?limit=100")[2]["data"]
        for length in (100, 200):  # the first is replaced, or done
            send(page, "prompt.prewarm", input=DRAFT[:length], **place)
        send(page, "prompt.prewarm", input=DRAFT, **place)
        warmed = until(page, "prompt.prewarmed")
        while warmed[-1]["input_tokens"] < 200:
            warmed = until(page, "prompt.prewarmed")
        assert warmed[-1]["status"] == "done" and warmed[-1]["warm_tokens"] == warmed[-1]["input_tokens"]
        assert server.request("GET", "/v1/conversations?limit=100")[2]["data"] == before
        server.wait_idle()
        second = ask(page, input=DRAFT, **place)
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert second["usage"]["input_tokens"] == warmed[-1]["input_tokens"]
        assert cached >= warmed[-1]["input_tokens"] - PAGE_SIZE


def test_prewarm_waits_while_a_request_runs(server: Server, url: str) -> None:
    with slowed(server, 0.01), tab(url) as page, connect(url) as other:
        response_id = begin(other)
        send(page, "prompt.prewarm", input=DRAFT)
        warmed = receive(page)
        assert (warmed["type"], warmed["status"], warmed["warm_tokens"]) == ("prompt.prewarmed", "busy", 0)
        send(other, "response.cancel", response_id=response_id)
        until_end(other)
    with tab(url) as page:
        send(page, "prompt.prewarm", input=DRAFT, previous_item_id="msg_x")
        assert receive(page)["error"]["param"] == "previous_item_id"


def test_disconnect_cancels_the_prewarm(server: Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prewarm, "PIECE_TOKENS", PIECE_TOKENS)

    def num_steps() -> int:
        """Of the engine; each piece takes one."""
        return server.call(server.engine.health()).num_steps

    before, draft = num_steps(), f"Never said before. {DRAFT}" * 3
    num_pieces = len(tiny_tokenizer().encode(draft)) // PIECE_TOKENS
    with slowed(server, 0.05):
        with tab(url) as page:
            send(page, "prompt.prewarm", input=draft)
            wait_until(lambda: num_steps() > before + 1, "prewarming to begin")
        wait_until(lambda: counted(server, "chatcache_ws_connections") == 0, "the leaving to be noticed")
        server.wait_idle()
    assert num_steps() - before < num_pieces
