"""Steering: a response ends early and its successor in the same stream answers the input."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from websockets.sync.client import ClientConnection, connect

from chatcache.conversations.tree import COMPLETED
from chatcache.gateway.responses import run as live_response
from chatcache.gateway.responses.events import ResponseEventWriter
from chatcache.gateway.responses.steering import MAX_PENDING_STEERS
from chatcache.gateway.responses.takeover import RecordedSteer, ReplyRecord
from tests.gateway.frames import LONG, Frame, ask, items_of, receive, send, text_of, until_end
from tests.gateway.serving import PAGE_SIZE, Server, held, hurry, slowed, wait_until

LONG_LANE: Frame = {**LONG, "stream_id": "lane"}


def until(socket: ClientConnection, kind: str) -> list[Frame]:
    frames = [receive(socket)]
    while frames[-1]["type"] != kind:
        frames.append(receive(socket))
    return frames


def begin(socket: ClientConnection, **fields: Any) -> str:
    """Start a response, wait for its first text and return its id."""
    send(socket, **{**LONG_LANE, **fields})
    frames = until(socket, "response.output_text.delta")
    response_id: str = frames[0]["response"]["id"]
    return response_id


def kinds(frames: list[Frame]) -> list[str]:
    return [frame["type"] for frame in frames]


def cached(response: Frame) -> int:
    tokens: int = response["usage"]["input_tokens_details"]["cached_tokens"]
    return tokens


def test_steer_ends_the_response_and_its_successor_continues(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.02):
        first = begin(socket, instructions="Be brief.", temperature=0.5, metadata={"a": "b"})
        send(socket, "response.steer", previous_response_id=first, input="No: in French!")
        frames = until(socket, "response.incomplete")
        end = frames[-1]["response"]
        assert kinds(frames).count("response.steer.accepted") == 1
        steer = next(frame for frame in frames if frame["type"] == "response.steer.accepted")["steer"]
        assert steer["previous_response_id"] == first and steer["id"].startswith("steer_")
        assert end["id"] == first and end["incomplete_details"] == {"reason": "steered"}
        assert end["status"] == "incomplete" and "receipt" not in frames[-1]
        numbers = [frame["sequence_number"] for frame in frames]
        assert numbers == list(range(numbers[0], numbers[0] + len(frames)))
        created = receive(socket)
        send(socket, "response.cancel", response_id=created["response"]["id"])
        rest = until(socket, "response.incomplete")
    assert created["type"] == "response.created" and created["sequence_number"] == 0
    second = rest[-1]["response"]
    assert created["response"]["previous_response_id"] == first and created["response"]["id"] == second["id"]
    assert all(frame["stream_id"] == "lane" for frame in [*frames, created, *rest])
    assert [second[name] for name in ("temperature", "instructions", "metadata", "max_output_tokens")] == [
        end[name] for name in ("temperature", "instructions", "metadata", "max_output_tokens")
    ]
    # everything computed was kept: the successor's prompt is the steered response's, its tokens and the new turn
    assert cached(second) >= end["usage"]["input_tokens"] + end["usage"]["output_tokens"] - PAGE_SIZE - 1
    items = items_of(server, second)
    said = items[second["input_item_ids"][0]]
    assert said["content"][0]["text"] == "No: in French!" and said["parent_id"] == end["output"][0]["id"]
    assert items[said["parent_id"]]["content"][0]["text"] == text_of(end)


class SlowRecorder:
    """Stores records of responses slowly, or not at all.

    `steers`: the steering input in each record. `was_sent`: for each record with some, whether the event that accepts
    the last one had been sent before the record was stored.
    """

    on_adopt: Any = None
    on_lost: Any = None
    owns: Any = None

    def __init__(self, server: Server) -> None:
        self.answers = True
        self.steers: list[tuple[RecordedSteer, ...]] = []
        self.was_sent: list[bool] = []
        self._responses = server.gateway.responses

    async def record(self, request_id: str, data: bytes) -> bool:
        steers = msgspec.msgpack.decode(data, type=ReplyRecord).steers
        if steers:
            await asyncio.sleep(0.3)  # in which the response continues
            run: Any = next(each for each in self._responses.running() if each.id == request_id)
            self.was_sent.append(run.log.last_number >= steers[-1].sequence_number)
        self.steers.append(steers)
        return self.answers

    def leave(self, request_id: str) -> None: ...

    def discard_record(self, request_id: str) -> None: ...


@contextlib.contextmanager
def recording(server: Server) -> Iterator[SlowRecorder]:
    server.gateway.recorder = recorder = SlowRecorder(server)
    try:
        yield recorder
    finally:
        server.gateway.recorder = None


def test_steer_is_recorded_with_its_number_before_its_event_is_sent(server: Server, socket: ClientConnection) -> None:
    with recording(server) as recorder, slowed(server, 0.02):
        first = begin(socket)
        send(socket, "response.steer", previous_response_id=first, input="Shorter")
        accepted = until(socket, "response.steer.accepted")[-1]
        send(socket, "response.cancel", response_id=until(socket, "response.created")[-1]["response"]["id"])
        until_end(socket)
    recorded = next(steers for steers in recorder.steers if steers)
    assert [each.id for each in recorded] == [accepted["steer"]["id"]]
    assert recorded[0].sequence_number == accepted["sequence_number"]
    assert recorder.was_sent == [False]


def test_steer_that_cannot_be_recorded_is_refused(server: Server, socket: ClientConnection) -> None:
    with recording(server) as recorder, slowed(server, 0.02):
        first = begin(socket)
        recorder.answers = False
        send(socket, "response.steer", previous_response_id=first, input="Lost")
        assert until(socket, "response.steer.failed")[-1]["error"]["code"] == "steering_unavailable"
        assert recorder.steers[-1] == (), "it would be accepted by the gateway that takes the response over"
        recorder.answers = True
        send(socket, "response.steer", previous_response_id=first, input="Shorter")
        until(socket, "response.steer.accepted")
        created = until(socket, "response.created")[-1]["response"]
        send(socket, "response.cancel", response_id=created["id"])
        end = until_end(socket)[-1]["response"]
    said = [items_of(server, end)[name]["content"][0]["text"] for name in created["input_item_ids"]]
    assert said == ["Shorter"]


def test_cancel_with_a_reason_is_stored_as_steered(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.1):
        first = begin(socket)
        send(socket, "response.cancel", response_id=first, reason="steered")
        end = until(socket, "response.incomplete")[-1]
    assert end["response"]["incomplete_details"] == {"reason": "steered"} and end["receipt"]["tokens_after_stop"] <= 1
    answer = items_of(server, end["response"])[end["response"]["output"][0]["id"]]
    assert (answer["incomplete_details"], answer["finish_reason"]) == ({"reason": "steered"}, "cancelled")
    send(socket, "response.cancel", response_id=first, reason="bored")
    assert receive(socket)["error"]["param"] == "reason"


def test_steered_answer_keeps_its_reason_and_its_successor_starts_afresh(
    server: Server, socket: ClientConnection
) -> None:
    """The text with which the first reply began is no part of the settings that a successor repeats."""
    with slowed(server, 0.02):
        begun = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One,"}]
        first = begin(socket, input=begun, continue_final_message=True)
        send(socket, "response.steer", previous_response_id=first, input="No!")
        end = until(socket, "response.incomplete")[-1]["response"]
        created = receive(socket)
        assert created["type"] == "response.created", created
        send(socket, "response.cancel", response_id=created["response"]["id"])
        until_end(socket)
    assert text_of(end).startswith("One,")
    answer = items_of(server, end)[end["output"][0]["id"]]
    assert answer["incomplete_details"] == {"reason": "steered"}


def test_steer_successor_ignores_the_revision_of_the_first_request(server: Server, socket: ClientConnection) -> None:
    """The first response changed the conversation itself, so its successor is not stale."""
    made = server.post("/v1/conversations")[2]
    with slowed(server, 0.02):
        first = begin(socket, conversation=made["id"], rev=made["rev"])
        send(socket, "response.steer", previous_response_id=first, input="No!")
        until(socket, "response.incomplete")
        created = receive(socket)
        assert created["type"] == "response.created", created
        send(socket, "response.cancel", response_id=created["response"]["id"])
        until_end(socket)
    send(socket, **LONG_LANE, conversation=made["id"], rev=made["rev"])
    refused = receive(socket)
    assert refused["status"] == 409 and refused["error"]["code"] == "stale_revision"
    assert refused["error"]["conversation"]["id"] == made["id"]


def test_steer_inputs_are_answered_together_in_order(server: Server, socket: ClientConnection) -> None:
    """The first steer stops the engine; those before its last step are still accepted."""
    with held(server) as let_go:
        send(socket, **LONG_LANE)
        first = until(socket, "response.in_progress")[0]["response"]["id"]
        for text in ("one", "two", "three"):
            send(socket, "response.steer", previous_response_id=first, input=[{"role": "user", "content": text}])
        frames = [frame for _ in range(3) for frame in until(socket, "response.steer.accepted")]
        let_go()
        frames += until(socket, "response.incomplete")
    assert kinds(frames).count("response.steer.accepted") == 3
    second = receive(socket)["response"]
    send(socket, "response.cancel", response_id=second["id"])
    until_end(socket)
    items = items_of(server, second)
    assert [items[each]["content"][0]["text"] for each in second["input_item_ids"]] == ["one", "two", "three"]


@pytest.mark.slow
def test_steer_successor_precedes_queued_responses_of_the_stream(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.02):
        first = begin(socket)
        send(socket, input="next in lane", max_output_tokens=3, ignore_eos=True, stream_id="lane")
        send(socket, "response.steer", previous_response_id=first, input="steered")
        until(socket, "response.incomplete")
        hurry(server)
        successor, queued = until_end(socket), until_end(socket)
    assert successor[0]["response"]["previous_response_id"] == first
    assert queued[0]["response"]["previous_response_id"] is None
    assert queued[-1]["type"] == "response.incomplete" and len(queued[-1]["response"]["output"]) == 1


def failed(socket: ClientConnection) -> Frame:
    frame = until(socket, "response.steer.failed")[-1]
    assert frame["error"]["type"] == "invalid_request_error" and frame["error"]["message"]
    assert isinstance(frame["sequence_number"], int)
    return frame


@pytest.mark.parametrize(
    "given",
    [
        None, "", [], 5, {}, [5], [{"role": "assistant", "content": "x"}], [{"role": "user"}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"role": "user", "content": "x", "id": "msg_1"}],
        [{"type": "function_call_output", "call_id": "c", "output": ""}],
    ],
)  # fmt: skip
def test_steer_with_invalid_input_returns_the_input(server: Server, socket: ClientConnection, given: object) -> None:
    with slowed(server, 0.02):
        first = begin(socket, max_output_tokens=300)
        send(socket, "response.steer", previous_response_id=first, input=given)
        frame = failed(socket)
        assert frame["error"]["code"] == "invalid_input" and frame["stream_id"] == "lane"
        assert frame["steer"] == {"input": given, "previous_response_id": first}
        hurry(server)
        assert until_end(socket)[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_steer_with_unknown_fields_is_rejected(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.02):
        first = begin(socket, max_output_tokens=300)
        send(socket, "response.steer", previous_response_id=first, input="x", stream_id="lane")
        assert failed(socket)["error"]["code"] == "invalid_input"
        hurry(server)
        until_end(socket)


def test_steer_of_unsuitable_responses_is_rejected(server: Server, socket: ClientConnection, url: str) -> None:
    done = ask(socket, input="Hi", ignore_eos=False, max_output_tokens=900)
    short = ask(socket, input="Hi", max_output_tokens=2)
    assert (done["status"], short["status"]) == ("completed", "incomplete")
    codes = {done["id"]: "response_already_completed", short["id"]: "response_not_active"}
    for response_id, code in {**codes, "resp_x": "response_not_found"}.items():
        send(socket, "response.steer", previous_response_id=response_id, input="x")
        frame = failed(socket)
        assert frame["error"]["code"] == code and "stream_id" not in frame and "id" not in frame["steer"]
    with slowed(server, 0.02), connect(url) as other:
        send(socket, **LONG, store=False)
        unstored = until(socket, "response.output_text.delta")[0]["response"]["id"]
        send(socket, "response.steer", previous_response_id=unstored, input="x")
        assert failed(socket)["error"]["code"] == "steering_not_supported"
        send(socket, "response.cancel", response_id=unstored)
        until_end(socket)
        elsewhere = begin(other)
        send(socket, "response.steer", previous_response_id=elsewhere, input="x")
        assert failed(socket)["error"]["code"] == "response_not_found"
        send(other, "response.cancel", response_id=elsewhere)
        until_end(other)


def test_steer_pending_input_is_bounded(server: Server, socket: ClientConnection) -> None:
    with held(server) as let_go:
        send(socket, **LONG_LANE)
        first = until(socket, "response.in_progress")[0]["response"]["id"]
        for number in range(MAX_PENDING_STEERS + 1):
            send(socket, "response.steer", previous_response_id=first, input=str(number))
        frame = failed(socket)
        assert frame["error"]["code"] == "too_many_pending_steers" and frame["steer"]["input"] == str(
            MAX_PENDING_STEERS
        )
        let_go()
    second = until(socket, "response.created")[-1]["response"]
    assert len(second["input_item_ids"]) == MAX_PENDING_STEERS
    send(socket, "response.cancel", response_id=second["id"])
    until_end(socket)


def test_cancel_after_steer_returns_the_input(server: Server, socket: ClientConnection) -> None:
    with held(server) as let_go:
        send(socket, **LONG_LANE)
        first = until(socket, "response.in_progress")[0]["response"]["id"]
        send(socket, "response.steer", previous_response_id=first, input="x")
        frames = until(socket, "response.steer.accepted")
        run: Any = server.gateway.responses.get("", first).run
        send(socket, "response.cancel", response_id=first)
        wait_until(lambda: run._cancelled_s is not None, "it to be cancelled")
        let_go()
        frames += until(socket, "response.steer.failed")
    end = next(frame for frame in frames if frame["type"] == "response.incomplete")
    assert end["response"]["status"] == "cancelled" and end["receipt"]
    accepted = next(frame for frame in frames if frame["type"] == "response.steer.accepted")
    assert frames[-1]["error"]["code"] == "successor_creation_failed"
    assert frames[-1]["steer"] == {"input": "x", "previous_response_id": first, "id": accepted["steer"]["id"]}
    assert frames[-1]["sequence_number"] == end["sequence_number"] + 1
    assert ask(socket, input="still here", stream_id="lane")["output"]


def test_steer_input_waits_for_function_outputs(
    server: Server, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input is kept and put before the client's next input; a failed request leaves it."""
    stub = {"type": "function_call_output", "call_id": "call_1", "name": "f"}
    monkeypatch.setattr(live_response, "required_input", lambda _: [stub])
    monkeypatch.setattr(ResponseEventWriter, "status", lambda *_: COMPLETED)
    with held(server) as let_go:
        send(socket, **{**LONG_LANE, "max_output_tokens": 1})
        first = until(socket, "response.in_progress")[0]["response"]["id"]
        for text in ("one", "two"):
            send(socket, "response.steer", previous_response_id=first, input=text)
        frames = [frame for _ in range(2) for frame in until(socket, "response.steer.accepted")]
        let_go()
        frames += [*until(socket, "response.completed"), receive(socket), receive(socket)]
    monkeypatch.undo()
    accepted = [frame["steer"]["id"] for frame in frames if frame["type"] == "response.steer.accepted"]
    pending = frames[-2:]
    assert [frame["type"] for frame in pending] == ["response.steer.pending"] * 2 and len(accepted) == 2
    assert [frame["steer"]["id"] for frame in pending] == accepted
    assert all(frame["required_input"] == [stub] and frame["stream_id"] == "lane" for frame in pending)
    assert {frame["reason"] for frame in pending} == {"waiting_for_required_input"}
    again = {"previous_response_id": first, "max_output_tokens": 2, "stream_id": "lane"}
    for param, value in (("temperature", 9), ("input", 5)):
        send(socket, **{"input": "three", **again, param: value})
        assert receive(socket)["error"]["param"] == param
    second = ask(socket, input="three", **again)
    items = items_of(server, second)
    assert [items[each]["content"][0]["text"] for each in second["input_item_ids"]] == ["one", "two", "three"]
    third = ask(socket, input="four", **again)
    assert len(third["input_item_ids"]) == 1, "it was committed once"


def test_steer_concurrent_with_the_end_is_answered_or_returned(server: Server, socket: ClientConnection) -> None:
    """Either accepted with a successor, or rejected; never both, never neither."""
    for num_tokens in range(1, 13):
        send(socket, **{**LONG_LANE, "max_output_tokens": num_tokens})
        first = until(socket, "response.created")[-1]["response"]["id"]
        time.sleep(num_tokens * 0.001)
        send(socket, "response.steer", previous_response_id=first, input="x")
        seen: list[str] = []
        while "response.steer.failed" not in seen and seen.count("response.created") == 0:
            seen.append(receive(socket)["type"])
        accepted = "response.steer.accepted" in seen
        assert accepted == ("response.created" in seen)
        if accepted or "response.incomplete" not in seen:
            until_end(socket)


def test_resumed_reader_receives_the_steer_successor(
    server: Server, socket: ClientConnection, page: ClientConnection
) -> None:
    with slowed(server, 0.02):
        first = begin(socket)
        send(page, "response.resume", response_id=first, stream_id="mine")
        until(page, "response.output_text.delta")
        send(page, "response.steer", previous_response_id=first, input="from another tab")
        seen = until(page, "response.incomplete")
        created = until(page, "response.created")[-1]
        assert until(socket, "response.created")[-1]["response"] == created["response"]
        send(socket, "response.cancel", response_id=created["response"]["id"])
        rest = until(page, "response.incomplete")
    assert {frame["stream_id"] for frame in [*seen, *rest]} == {"mine"}
    assert rest[-1]["response"]["previous_response_id"] == first
    # and so does who comes when both have ended
    send(page, "response.resume", response_id=first, stream_id="later")
    assert until(page, "response.incomplete")[-1]["response"]["id"] == first
    assert until(page, "response.incomplete")[-1]["response"]["id"] == created["response"]["id"]
