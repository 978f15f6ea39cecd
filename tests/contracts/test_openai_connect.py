"""Test the WebSocket mode of the openai client: `client.responses.connect()` with streams, prefill and steering."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import (
    Response,
    ResponseSteerAcceptedEvent,
    ResponseSteerFailedEvent,
)

from tests.gateway.serving import MODEL, PAGE_SIZE, Server, hurry, slowed

# The client opens the connection in a way that websockets 17 deprecates.
pytestmark = [
    pytest.mark.client("openai (Python)"),
    pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning"),
]

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture
def connection(server: Server) -> Iterator[Any]:
    """Untyped: each test expects particular events of about sixty types."""
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
        client.responses.connect() as connection,
    ):
        yield connection


def create_long(connection: Any, **fields: object) -> None:
    """Create a response that ends only by its limit."""
    connection.send({"type": "response.create", "ignore_eos": True, **fields})


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def until_end(connection: Any) -> list[Any]:
    events = [connection.recv()]
    while events[-1].type not in TERMINAL:
        events.append(connection.recv())
    return events


def test_turns_hit_the_tokens_of_the_last_turn(connection: Any) -> None:
    create_long(connection, model=MODEL, input="Hello", max_output_tokens=30)
    events = until_end(connection)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first = events[-1].response
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == first.output_text and first.status == "incomplete"
    connection.response.create(model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=5)
    second = until_end(connection)[-1].response
    history = first.usage.input_tokens + first.usage.output_tokens
    assert cached(second) >= history - PAGE_SIZE - 1 and second.previous_response_id == first.id


def test_streams_run_concurrently_and_each_in_order(server: Server, connection: Any) -> None:
    ends: list[tuple[str, str]] = []
    texts: dict[str, str] = {}
    with slowed(server, 0.02):
        for lane, num_tokens in (("slow", 400), ("quick", 3), ("slow", 3)):
            create_long(connection, input=lane, stream_id=lane, max_output_tokens=num_tokens, store=False)
        while len(ends) < 3:
            event = connection.recv()
            assert event.stream_id in ("slow", "quick")
            if event.type == "response.output_text.delta":
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            if event.type in TERMINAL:
                ends.append((event.stream_id, event.response.output[0].id))
                assert texts[event.response.output[0].id] == event.response.output_text
                hurry(server)
    assert [lane for lane, _ in ends] == ["quick", "slow", "slow"]


def test_stream_forks_from_another(connection: Any) -> None:
    connection.response.create(input="Hello", stream_id="a", max_output_tokens=20)
    first = until_end(connection)[-1].response
    for lane in ("b", "c"):
        connection.response.create(
            input=f"to {lane}", stream_id=lane, previous_response_id=first.id, max_output_tokens=3
        )
    ends = [until_end(connection)[-1] for _ in range(2)]
    assert {end.stream_id for end in ends} == {"b", "c"}
    assert all(cached(end.response) > first.usage.input_tokens - PAGE_SIZE for end in ends)


def test_prefill_computes_the_prompt_and_generates_nothing(connection: Any) -> None:
    instructions = "You know everything about pages. " * 12
    connection.response.create(input="Hello", instructions=instructions, generate=False)
    events = until_end(connection)
    warm = events[-1].response
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.completed"]
    assert warm.output == [] and warm.usage.output_tokens == 0 and cached(warm) < PAGE_SIZE
    connection.response.create(
        input="And now?", instructions=instructions, previous_response_id=warm.id, max_output_tokens=3
    )
    turn = until_end(connection)[-1].response
    # all except the eleven tokens of the generation prompt, which another message replaces
    assert cached(turn) >= warm.usage.input_tokens - 11 - PAGE_SIZE and turn.previous_response_id == warm.id


def test_errors_are_events_and_the_connection_stays_open(connection: Any) -> None:
    connection.response.create(input="x", model="nope", stream_id="a")
    event = connection.recv()
    assert event.type == "error" and event.stream_id == "a" and event.status == 404
    connection.response.create(input="x", background=True)
    assert connection.recv().type == "error"
    connection.response.create(input="x", max_output_tokens=2)
    assert until_end(connection)[-1].response.output


def test_steering_changes_a_running_response(server: Server, connection: Any) -> None:
    with slowed(server, 0.02):
        create_long(connection, input="Count!", stream_id="a", max_output_tokens=300)
        first = connection.recv().response.id
        while connection.recv().type != "response.output_text.delta":
            pass
        connection.response.steer(previous_response_id=first, input="Backwards, please")
        events = until_end(connection)
        accepted = [event for event in events if isinstance(event, ResponseSteerAcceptedEvent)]
        assert [event.steer.previous_response_id for event in accepted] == [first]
        assert accepted[0].stream_id == "a"
        end = events[-1].response
        assert (end.id, end.status, end.incomplete_details.reason) == (first, "incomplete", "steered")
        created = connection.recv()
        assert created.type == "response.created" and created.response.previous_response_id == first
        assert created.stream_id == "a" and created.response.id != first
        connection.send({"type": "response.cancel", "response_id": created.response.id})
        second = until_end(connection)[-1].response
        assert cached(second) >= end.usage.input_tokens + end.usage.output_tokens - PAGE_SIZE - 1
        connection.response.steer(
            previous_response_id=first, input=[{"role": "user", "content": "x", "type": "message"}]
        )
        failed = connection.recv()
        assert isinstance(failed, ResponseSteerFailedEvent) and failed.error.code == "response_not_active"
        assert failed.steer.previous_response_id == first and failed.steer.id is None


@pytest.fixture
async def asynchronous(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


async def test_async_client_streams_a_response(asynchronous: AsyncOpenAI) -> None:
    async with asynchronous.responses.connect() as connection:
        await connection.response.create(input="Hello", max_output_tokens=5)
        kinds = [event.type async for event in _until_end(connection)]
    assert kinds[0] == "response.created" and kinds[-1] in TERMINAL


async def _until_end(connection: Any) -> AsyncIterator[Any]:
    async for event in connection:
        yield event
        if event.type in TERMINAL:
            return
