"""Test OpenAI's Responses with the openai client, over HTTP, SSE and WebSocket."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseInputMessageItem, ResponseInputText, ResponseOutputMessage

from tests.contracts.test_openai_client import collect
from tests.gateway.serving import MODEL, PAGE_SIZE, Server, hurry, slowed, wait_until
from tests.support.pdfs import pdf_of

pytestmark = pytest.mark.client("openai (Python)")

LONG: dict[str, Any] = {"model": MODEL, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
GREEDY: dict[str, Any] = {"ignore_eos": True, "skip_special_tokens": False}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def cached(response: Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def num_tokens(response: Response) -> int:
    assert response.usage is not None
    return response.usage.total_tokens


@pytest.mark.parametrize("data", [b"Buy milk.", pdf_of(["Buy milk."])], ids=["text", "PDF"])
def test_file_input(client: openai.OpenAI, data: bytes) -> None:
    """The same file has the same prompt in Responses and Chat Completions."""
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    answer = client.responses.create(
        model=MODEL,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_file", "filename": "notes", "file_data": url},
                    {"type": "input_text", "text": "What is to be done?"},
                ],
            }
        ],
    )
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "file", "file": {"filename": "notes", "file_data": url}},
                    {"type": "text", "text": "What is to be done?"},
                ],
            }
        ],
    )
    item = client.responses.input_items.list(answer.id).data[0]
    assert isinstance(item, ResponseInputMessageItem) and isinstance(item.content[0], ResponseInputText)
    assert item.content[0].text == "File: notes\n```\nBuy milk.\n```\n\nWhat is to be done?"
    assert answer.usage is not None and completion.usage is not None
    assert answer.usage.input_tokens == completion.usage.prompt_tokens


def messages(response: Response) -> list[ResponseOutputMessage]:
    assert all(isinstance(item, ResponseOutputMessage) for item in response.output)
    return [item for item in response.output if isinstance(item, ResponseOutputMessage)]


def text_of(message: ResponseOutputMessage) -> str:
    part = message.content[0]
    assert part.type == "output_text"
    return part.text


def stored_form(response: Response) -> dict[str, Any]:
    """Return the fields that are equal in two answers to equal requests."""
    fields = response.to_dict()
    mine = {"id", "created_at", "conversation", "input_item_ids", "parent_item_id", "usage"}
    output = [{**item, "id": None} for item in fields["output"]]  # type: ignore[attr-defined]
    return {name: value for name, value in fields.items() if name not in mine} | {"output": output}


def test_whole_streamed_and_helper_results_are_equal(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": "How are you?", "max_output_tokens": 120}
    ask["extra_body"] = {"seed": 5}
    whole = client.responses.create(**ask, metadata={"a": "b"})
    assert whole.object == "response" and whole.status == "completed" and whole.metadata == {"a": "b"}
    events = list(client.responses.create(**ask, metadata={"a": "b"}, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[-1].type == "response.completed"
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert stored_form(events[-1].response) == stored_form(whole)
    with client.responses.stream(**ask, metadata={"a": "b"}) as stream:
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    raw = client.responses.with_raw_response.create(**ask)
    assert raw.headers["x-request-id"] and raw.parse().output_text == whole.output_text
    with client.responses.with_streaming_response.create(**ask) as open_answer:
        assert json.loads(open_answer.read())["status"] == "completed"


def test_retrieved_response_equals_the_answer(client: openai.OpenAI, server: Server) -> None:
    with_logprobs: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    first = client.responses.create(
        model=MODEL,
        input="Hi",
        max_output_tokens=9,
        instructions="Be kind",
        extra_body={"ignore_eos": True},
        **with_logprobs,
    )
    assert first.status == "incomplete" and first.incomplete_details is not None
    assert first.incomplete_details.reason == "max_output_tokens"
    assert client.responses.retrieve(first.id) == first
    server.call(forget(server, first.id))
    later = client.responses.retrieve(first.id)
    part, kept = messages(first)[0].content[0], messages(later)[0].content[0]
    assert part.type == kept.type == "output_text"
    assert part.logprobs and len(part.logprobs[0].top_logprobs or ()) == 2
    assert kept.logprobs == []
    part.logprobs = []
    assert later.model_extra is not None and later.model_extra.pop("omitted") == ["message.output_text.logprobs"]
    assert later == first


async def forget(server: Server, response_id: str) -> None:
    """Drop the event log, as after 15 minutes."""
    server.gateway.responses.remove(response_id)


@pytest.mark.parametrize("more", [{"n": 3}, {"n": 2, "beam_width": 3, "ignore_eos": True}, {"n": 2, "best_of": 4}])
def test_candidates_are_output_items(client: openai.OpenAI, more: dict[str, Any]) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 12}
    whole = client.responses.create(**ask, extra_body={**more, **({} if "beam_width" in more else {"seed": 2})})
    assert len(messages(whole)) == more["n"]
    seen: dict[int, str] = defaultdict(str)
    stream = client.responses.create(
        **ask, stream=True, extra_body={**more, **({} if "beam_width" in more else {"seed": 2})}
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            seen[event.output_index] += event.delta
    assert [seen[index] for index in range(more["n"])] == [text_of(message) for message in messages(whole)]
    scores = [item["score"] for item in whole.to_dict()["output"] if "score" in item]
    assert scores == sorted(scores, reverse=True) and bool(scores) == (more != {"n": 3})


class Answer(pydantic.BaseModel):
    colour: Literal["red", "green"]


def test_parsed_answer_is_an_instance_of_the_class(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="Which?", text_format=Answer, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Answer)
    with client.responses.stream(model=MODEL, input="Which?", text_format=Answer, max_output_tokens=200) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def by_json(client: openai.OpenAI, **fields: Any) -> Response:
    return client.responses.create(model=MODEL, max_output_tokens=20, **fields)  # type: ignore[no-any-return]


def by_sse(client: openai.OpenAI, **fields: Any) -> Response:
    last = list(client.responses.create(model=MODEL, max_output_tokens=20, stream=True, **fields))[-1]
    assert last.type in ("response.completed", "response.incomplete")
    return last.response  # type: ignore[no-any-return]


def by_socket(client: openai.OpenAI, **fields: Any) -> Response:
    with client.responses.connect() as connection:
        connection.response.create(model=MODEL, max_output_tokens=20, **fields)
        return collect(connection)


TRANSPORTS = [by_json, by_sse, by_socket]


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # the client's own way to open a socket
@pytest.mark.parametrize("first_by", TRANSPORTS)
@pytest.mark.parametrize("then_by", TRANSPORTS)
def test_the_second_turn_finds_the_whole_history(client: openai.OpenAI, first_by: Any, then_by: Any) -> None:
    """Use any pair of transports; replies of the hash model never equal their own tokenisation."""
    # A text of its own: another case with an equal short reply would have put the second question in the cache.
    first = first_by(client, input=f"Tell me about pages, {first_by.__name__} and {then_by.__name__}. " * 3)
    second = then_by(client, input="And then?", previous_response_id=first.id)
    assert num_tokens(first) - PAGE_SIZE <= cached(second) <= num_tokens(first)
    conversation = first.conversation
    assert conversation is not None and conversation == second.conversation
    third = first_by(client, input="So?", conversation=conversation.id)
    assert num_tokens(second) - PAGE_SIZE <= cached(third) <= num_tokens(second)
    fork = then_by(client, input="Or else?", previous_response_id=first.id)
    assert fork.usage is not None and num_tokens(first) <= cached(fork) < fork.usage.input_tokens


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
@pytest.mark.parametrize("by", [by_json, by_sse])
@pytest.mark.parametrize("fork_at", [1, 6, 17, 20])
def test_fork_at_a_token_prefills_nothing_before_it(client: openai.OpenAI, by: Any, fork_at: int) -> None:
    origin = by(client, input="Tell me of the sea", temperature=0, extra_body=GREEDY)
    assert origin.usage is not None and origin.usage.output_tokens == 20
    item = messages(origin)[0]
    place = {"previous_item_id": item.id, "fork_at": fork_at, **GREEDY}
    on = by(client, temperature=0, extra_body=place)
    assert on.usage is not None and text_of(messages(on)[0]).startswith(text_of(item).rstrip("\ufffd"))
    # All except the last token, which must be computed again to continue after it.
    assert on.usage.input_tokens - cached(on) == 1
    other = by(client, temperature=0, input="Stop!", extra_body=place)
    assert other.usage is not None
    # Whole characters are kept, so up to three tokens less than requested.
    assert cached(other) >= origin.usage.input_tokens + fork_at - 3
    count = client.responses.input_tokens.count(model=MODEL, input="Stop!", extra_body=place)
    assert count.input_tokens == other.usage.input_tokens


def test_background_response_runs_without_the_client(client: openai.OpenAI, server: Server) -> None:
    with slowed(server, 0.05):
        begun = client.responses.create(input="Hi", background=True, model=MODEL, max_output_tokens=200, **IGNORE)
        assert begun.status in ("queued", "in_progress") and begun.output == [] and begun.background
        texts = []
        while (now := client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
            texts.append(now.output_text)
            if len(set(texts)) > 4:
                hurry(server)
    assert now.status == "incomplete" and num_tokens(now) and any(texts)
    assert all(now.output_text.startswith(text) for text in texts)
    assert texts == sorted(texts, key=len)


IGNORE: dict[str, Any] = {"extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize("while_it_runs", [True, False])
def test_stream_resumes_after_any_event(client: openai.OpenAI, server: Server, while_it_runs: bool) -> None:
    with slowed(server, 0.003):
        begun = client.responses.create(input="Hi", background=True, model=MODEL, max_output_tokens=40, **IGNORE)
        if not while_it_runs:
            wait_until(lambda: client.responses.retrieve(begun.id).status == "incomplete", "the end")
        events = list(client.responses.retrieve(begun.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for number in (0, 1, len(events) // 2, len(events) - 2):
        rest = list(client.responses.retrieve(begun.id, stream=True, starting_after=number))
        assert rest == events[number + 1 :]
    assert list(client.responses.retrieve(begun.id, stream=True, starting_after=len(events) - 1)) == []
    with client.responses.stream(response_id=begun.id, starting_after=4) as stream:
        assert [event.sequence_number for event in stream] == list(range(5, len(events)))
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(begun.id, stream=True, starting_after=len(events))
    assert caught.value.param == "starting_after"
    server.call(forget(server, begun.id))
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(begun.id, stream=True, starting_after=1)
    assert caught.value.code == "stream_expired" and "without stream" in caught.value.message


def test_cancel_returns_the_text_so_far(client: openai.OpenAI, server: Server) -> None:
    with slowed(server, 0.1):  # a busy machine may stop the gateway for a moment after it has noted the stop
        begun = client.responses.create(input="Hi", background=True, **LONG)
        wait_until(lambda: bool(client.responses.retrieve(begun.id).output_text), "something said")
        ended = client.responses.cancel(begun.id)
    assert ended.status == "cancelled" and ended.output_text
    receipt = ended.to_dict()["receipt"]
    assert isinstance(receipt, dict) and receipt["pages_freed"] > 0 and receipt["tokens_after_stop"] <= 2
    again = client.responses.cancel(begun.id)
    assert again == ended == client.responses.retrieve(begun.id)
    done = client.responses.create(model=MODEL, input="Hi", max_output_tokens=3)
    assert client.responses.cancel(done.id) == done
    server.call(forget(server, begun.id))
    later = client.responses.cancel(begun.id)
    assert later.status == "cancelled" and later.output_text == ended.output_text
    follow = client.responses.create(model=MODEL, input="Go on", previous_response_id=begun.id, max_output_tokens=2)
    assert cached(follow) >= num_tokens(later) - PAGE_SIZE


def test_deleted_response_is_not_found(client: openai.OpenAI, server: Server) -> None:
    alone = client.responses.create(model=MODEL, input="My secret", max_output_tokens=5)
    assert alone.conversation is not None
    client.responses.delete(alone.id)
    for work in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            work(alone.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="What was it?", previous_response_id=alone.id)
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(alone.conversation.id)

    first = client.responses.create(model=MODEL, input="One", max_output_tokens=5)
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=first.id, max_output_tokens=5)
    assert second.conversation is not None
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="Two", previous_response_id=first.id)
    kept = list(client.conversations.items.list(second.conversation.id))
    assert len(kept) == 4
    third = client.responses.create(model=MODEL, input="Three", previous_response_id=second.id, max_output_tokens=5)
    assert cached(third) >= num_tokens(second) - PAGE_SIZE, "a later response keeps the pages"

    with slowed(server, 0.05):
        running = client.responses.create(input="Hi", background=True, **LONG)
        client.responses.delete(running.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(running.id)


def test_conversation_outlives_its_responses(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(metadata={"mine": "1"})
    answer = client.responses.create(model=MODEL, input="Hi", conversation=conversation.id, max_output_tokens=3)
    assert len(list(client.conversations.items.list(conversation.id))) == 2
    client.responses.delete(answer.id)
    assert list(client.conversations.items.list(conversation.id)) == []
    assert client.conversations.retrieve(conversation.id).metadata == {"mine": "1"}


def test_input_items_are_paged(client: openai.OpenAI) -> None:
    talk: list[Any] = [{"role": "user" if n % 2 else "assistant", "content": f"m{n}"} for n in range(1, 24)]
    answer = client.responses.create(model=MODEL, input=talk, max_output_tokens=2)
    assert len(answer.output) == 1
    for order in ("asc", "desc"):
        for limit in (1, 7, 23, 100):
            pages = client.responses.input_items.list(answer.id, limit=limit, order=order)
            found = [item.to_dict()["content"][0]["text"] for item in pages]  # type: ignore[index]
            assert found == [each["content"] for each in talk][:: 1 if order == "asc" else -1]
    assert len(client.responses.input_items.list(answer.id).data) == 20
    follow = client.responses.create(model=MODEL, input="x", previous_response_id=answer.id, max_output_tokens=2)
    assert len(client.responses.input_items.list(follow.id).data) == 1


def test_token_count_is_exact_and_stores_nothing(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hi", instructions="Be kind", max_output_tokens=5)
    assert first.conversation is not None and first.usage is not None
    counted = client.responses.input_tokens.count(model=MODEL, input="Hi", instructions="Be kind")
    assert counted.object == "response.input_tokens" and counted.input_tokens == first.usage.input_tokens
    place: dict[str, Any] = {"previous_response_id": first.id, "input": "And?", "instructions": "Be kind"}
    counted = client.responses.input_tokens.count(model=MODEL, **place)
    assert len(list(client.conversations.items.list(first.conversation.id))) == 2
    second = client.responses.create(model=MODEL, max_output_tokens=2, **place)
    assert second.usage is not None and counted.input_tokens == second.usage.input_tokens


def test_growing_reply_is_counted_up_to_its_current_end(client: openai.OpenAI, server: Server) -> None:
    with slowed(server, 0.01):
        begun = client.responses.create(input="Hi", background=True, **LONG)
        wait_until(lambda: len(client.responses.retrieve(begun.id).output_text) > 20, "something said")
        counted = client.responses.input_tokens.count(model=MODEL, input="x", previous_response_id=begun.id)
        ended = client.responses.cancel(begun.id)
    alone = client.responses.input_tokens.count(model=MODEL, input="Hi")
    whole = client.responses.input_tokens.count(model=MODEL, input="x", previous_response_id=begun.id)
    assert ended.usage is not None and ended.usage.input_tokens == alone.input_tokens
    assert alone.input_tokens + 8 < counted.input_tokens <= whole.input_tokens
    assert whole.input_tokens - ended.usage.output_tokens < counted.input_tokens


def test_unstored_responses_are_not_found(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="Hi", store=False, max_output_tokens=3)
    assert answer.conversation is None and answer.output
    for work in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            work(answer.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hi", store=False, background=True)
    assert caught.value.param == "background"


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"input": "x", "max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens"),
        ({"input": "x", "stream": "yes"}, openai.BadRequestError, "stream"),
        ({"input": "x", "background": 1}, openai.BadRequestError, "background"),
        ({"input": [{"role": "x", "content": "y"}]}, openai.BadRequestError, "input[0].role"),
        ({"input": "x", "previous_response_id": "resp_x"}, openai.NotFoundError, "previous_response_id"),
        ({"input": "x", "conversation": "conv_x"}, openai.NotFoundError, "conversation"),
        ({"input": "x", "model": "nope"}, openai.NotFoundError, "model"),
        ({"input": "x", "stream_beams": True, "beam_width": 2}, openai.BadRequestError, "stream_beams"),
        ({}, openai.BadRequestError, "input"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_refused_requests_raise_their_classes(
    client: openai.OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    """Refuse before the first byte, so that a streaming request has its status too."""
    with pytest.raises(error) as caught:
        client.post("/responses", body={"stream": stream, **fields}, cast_to=object)
    assert caught.value.param == param and caught.value.request_id


async def test_async_client_streams_and_cancels(async_client: openai.AsyncOpenAI, server: Server) -> None:
    whole = await async_client.responses.create(model=MODEL, input="Hi", max_output_tokens=100, extra_body={"seed": 9})
    text = ""
    async for event in await async_client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=100, stream=True, extra_body={"seed": 9}
    ):
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text
    async with async_client.responses.stream(
        model=MODEL, input="Hi", max_output_tokens=100, extra_body={"seed": 9}
    ) as stream:
        assert (await stream.get_final_response()).output_text == text
    with slowed(server, 0.02):
        begun = await async_client.responses.create(input="Hi", background=True, **LONG)
        numbers = []
        async for event in await async_client.responses.retrieve(begun.id, stream=True, starting_after=1):
            numbers.append(event.sequence_number)
            if len(numbers) == 8:
                await async_client.responses.cancel(begun.id)
    assert numbers == list(range(2, numbers[-1] + 1))
    assert (await async_client.responses.retrieve(begun.id)).status == "cancelled"
    items = [item async for item in await async_client.responses.input_items.list(begun.id)]
    assert len(items) == 1
    await async_client.responses.delete(begun.id)
