"""Test the real `openai` client against the real server: Chat Completions, Completions, models, errors."""

from __future__ import annotations

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.gateway.serving import MAX_MODEL_LEN, MODEL, PAGE_SIZE, Server, slowed, tiny_tokenizer

pytestmark = pytest.mark.client("openai (Python)")

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello, how are you?"}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=USER, seed=7, max_tokens=40)
    stream = client.chat.completions.create(
        model=MODEL, messages=USER, seed=7, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert whole.usage.prompt_tokens == len(tiny_tokenizer().render_ids(USER))


def test_stream_helper_accepts_n_candidates(client: openai.OpenAI) -> None:
    seen: dict[int, str] = defaultdict(str)
    with client.chat.completions.stream(model=MODEL, messages=USER, n=3, seed=1, max_tokens=200) as stream:
        for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    seen[choice.index] += choice.delta.content or ""
        final = stream.current_completion_snapshot
    assert [choice.message.content for choice in final.choices] == [seen[0], seen[1], seen[2]]
    assert len(set(seen.values())) == 3
    assert all(choice.finish_reason for choice in final.choices)


def test_n_candidates_count_the_prompt_once(client: openai.OpenAI) -> None:
    one = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=4)
    many = client.chat.completions.create(model=MODEL, messages=USER, n=8, max_tokens=4)
    assert one.usage is not None and many.usage is not None
    assert many.usage.prompt_tokens == one.usage.prompt_tokens
    assert [choice.index for choice in many.choices] == list(range(8))


def test_logprobs_tokens_join_to_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, top_logprobs=3, max_tokens=12, seed=3, n=2
    )
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        special = {tiny_tokenizer().token_bytes[token] for token in tiny_tokenizer().special_ids}
        shown = [bytes(entry.bytes or ()) for entry in choice.logprobs.content]
        joined = b"".join(data for data in shown if data not in special)
        assert joined.decode("utf-8", "replace") == choice.message.content
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob <= 0 and math.isfinite(entry.logprob)
            assert entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs)
    plain = client.chat.completions.create(
        model=MODEL, messages=USER, logprobs=True, max_tokens=2, extra_body={"ignore_eos": True}
    )
    assert plain.choices[0].logprobs is not None and plain.choices[0].logprobs.content is not None
    assert plain.choices[0].logprobs.content[0].top_logprobs == []


def test_beams_are_ranked_and_equal_with_streaming(client: openai.OpenAI) -> None:
    beams = {"use_beam_search": True, "ignore_eos": True}
    whole = client.completions.create(model=MODEL, prompt="How much wood", max_tokens=6, n=3, extra_body=beams)
    stream = client.completions.create(
        model=MODEL, prompt="How much wood", max_tokens=6, n=3, extra_body=beams, stream=True
    )
    texts: dict[int, str] = defaultdict(str)
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[index] for index in range(3)] == [choice.text for choice in whole.choices]
    best = client.completions.create(
        model=MODEL, prompt="How much wood", max_tokens=6, extra_body={"beam_width": 3, "ignore_eos": True}
    )
    assert best.choices[0].text == whole.choices[0].text


def test_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=30, extra_body={"ignore_eos": True}
    )
    text = free.choices[0].message.content or ""
    stop = re.findall("[a-zA-Z ]{3}", text)[2]
    cut = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=30, stop=[stop], extra_body={"ignore_eos": True}
    )
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        temperature=0,
        max_tokens=30,
        stop=stop,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert streamed == text[: text.index(stop)]


def test_second_turn_hits_the_whole_history(client: openai.OpenAI) -> None:
    """Replies of the hash model never equal their own tokenisation: only stored ids can hit their pages."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "Be brief. " * 6}, *USER]
    history = 0
    for turn in range(4):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, seed=turn)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        if turn:
            cached = answer.usage.prompt_tokens_details.cached_tokens or 0
            assert history - PAGE_SIZE <= cached <= history
        history = answer.usage.prompt_tokens + answer.usage.completion_tokens
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": f"And then? {turn}"},
        ]


@pytest.mark.parametrize(
    ("body", "error", "code", "param"),
    [
        ({"n": 0}, openai.BadRequestError, "invalid_value", "n"),
        ({"model": "nope"}, openai.NotFoundError, "model_not_found", "model"),
        (
            {"messages": [{"role": "user", "content": "wood " * 3000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            None,
        ),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "unsupported_parameter", "tools"),
    ],
)
def test_errors_raise_their_classes(
    client: openai.OpenAI, body: dict[str, object], error: type[openai.APIStatusError], code: str, param: str | None
) -> None:
    with pytest.raises(error) as caught:
        client.post("/chat/completions", body={"model": MODEL, "messages": USER, **body}, cast_to=object)
    assert caught.value.code == code
    assert caught.value.request_id
    if param is not None:
        assert caught.value.param == param
    if code == "context_length_exceeded":
        assert str(MAX_MODEL_LEN) in caught.value.message


async def test_leaving_a_stream_frees_its_pages(async_client: openai.AsyncOpenAI, server: Server) -> None:
    with slowed(server, 0.01):
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=USER, n=4, stream=True, max_tokens=900, extra_body={"ignore_eos": True}
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert await asyncio.to_thread(server.num_pages_in_use) > 0
        await stream.close()
        await asyncio.to_thread(server.wait_idle)


@pytest.mark.slow
async def test_fifty_concurrent_streams_equal_single_ones(async_client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=USER, seed=seed, max_tokens=20, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    together = await asyncio.gather(*map(ask, range(50)))
    alone = [await ask(seed) for seed in (0, 17, 49)]
    assert [together[0], together[17], together[49]] == alone


def test_models_list_has_an_id_with_a_slash(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")  # the client's own way to open a socket
def test_responses_connect_streams_continues_and_forks(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        connection.response.create(model=MODEL, input="Hello!", max_output_tokens=12)
        first = collect(connection)
        connection.response.create(model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=12)
        second = collect(connection)
        connection.response.create(model=MODEL, input="Or else?", previous_response_id=first.id, max_output_tokens=12)
        fork = collect(connection)
    assert first.usage is not None and second.usage is not None and fork.usage is not None
    history = first.usage.input_tokens + first.usage.output_tokens
    assert history - PAGE_SIZE <= second.usage.input_tokens_details.cached_tokens <= history
    assert history <= fork.usage.input_tokens_details.cached_tokens < fork.usage.input_tokens
    assert first.conversation == second.conversation == fork.conversation


def collect(connection: openai.resources.responses.responses.ResponsesConnection) -> openai.types.responses.Response:
    """Read one response to its end; check that its deltas join to its text and its numbers have no gap."""
    text = ""
    for number, event in enumerate(connection):
        assert event.type != "error", event
        assert event.sequence_number == number
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type in ("response.completed", "response.incomplete"):
            assert event.response.output_text == text
            return event.response
    raise AssertionError("the connection ended early")


class Legs(pydantic.BaseModel):
    count: Literal[2, 4]


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool
    legs: Legs
    nicknames: Annotated[list[Literal["Rex", "Mia"]], pydantic.Field(max_length=2)]


def test_parsed_answer_is_an_instance_of_the_class(client: openai.OpenAI) -> None:
    """The hash model does not generate JSON unless the schema enforces it."""
    answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Pet, n=3, seed=1, max_tokens=300)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Pet)
        assert choice.message.parsed == Pet.model_validate_json(choice.message.content or "")
        assert choice.finish_reason == "stop"


def test_streamed_answer_is_parsed_incrementally(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=USER, response_format=Pet, seed=2, max_tokens=300
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Pet)


@pytest.mark.refused("400 `invalid_constraint`: the message names `response_format`")
def test_unsupported_schema_is_a_bad_request(client: openai.OpenAI) -> None:
    schema = {"name": "x", "schema": {"type": "no such type"}, "strict": True}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER, extra_body=form)
    assert caught.value.param == "response_format"
    assert "structured_outputs" not in caught.value.message


def test_vllm_fields_are_accepted_from_the_client(client: openai.OpenAI) -> None:
    choice = {"structured_outputs": {"choice": ["red", "green"]}}
    answer = client.chat.completions.create(model=MODEL, messages=USER, max_tokens=20, extra_body=choice)
    assert answer.choices[0].message.content in ("red", "green")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", best_of=3, stream=True)
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_parameter")
    best = client.completions.create(model=MODEL, prompt="x", best_of=3, n=2, max_tokens=4)
    assert len(best.choices) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", extra_body={"num_beam_groups": 2})
    assert caught.value.param == "num_beam_groups"


def test_embeddings_are_the_same_in_both_encodings(client: openai.OpenAI) -> None:
    """The client asks for base64 and decodes it, unless asked for floats."""
    texts = ["Hello there", "How are you?"]
    packed = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [each.embedding for each in packed.data] == [each.embedding for each in plain.data]
    assert [each.index for each in packed.data] == [0, 1]
    assert all(math.hypot(*each.embedding) == pytest.approx(1.0, abs=1e-6) for each in packed.data)
    ids = [tiny_tokenizer().encode(text, add_special_tokens=True) for text in texts]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(map(len, ids))
    tokens = client.embeddings.create(model=MODEL, input=[list(each) for each in ids], dimensions=3)
    assert [len(each.embedding) for each in tokens.data] == [3, 3]
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input="")
    assert caught.value.param == "input"


async def test_concurrent_embeddings_have_their_own_values(async_client: openai.AsyncOpenAI) -> None:
    texts = [f"text number {number}" for number in range(40)]
    alone = await asyncio.gather(*(async_client.embeddings.create(model=MODEL, input=text) for text in texts))
    together = await async_client.embeddings.create(model=MODEL, input=texts)
    assert [each.data[0].embedding for each in alone] == [each.embedding for each in together.data]
