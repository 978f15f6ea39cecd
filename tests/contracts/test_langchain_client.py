"""Test langchain-openai against the real server."""

from __future__ import annotations

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from tests.gateway.serving import MODEL, PAGE_SIZE, Server, tiny_tokenizer

pytestmark = pytest.mark.client("langchain-openai")

ASKED = [SystemMessage("Be brief."), HumanMessage("Hello, how are you?")]


@pytest.fixture
def chat(server: Server) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("unused"),
        seed=7,
        max_completion_tokens=40,
        max_retries=0,
        stream_usage=True,
    )


def gathered(chat: ChatOpenAI) -> AIMessageChunk:
    chunks = list(chat.stream(ASKED))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert isinstance(whole, AIMessageChunk)
    return whole


def test_stream_joins_to_the_invoke_result(chat: ChatOpenAI) -> None:
    said = chat.invoke(ASKED)
    streamed = gathered(chat)
    assert said.content and streamed.content == said.content
    assert said.response_metadata["finish_reason"] == streamed.response_metadata["finish_reason"]
    assert isinstance(said, AIMessage) and said.usage_metadata is not None and streamed.usage_metadata is not None
    prompt = said.usage_metadata["input_tokens"]
    assert streamed.usage_metadata["output_tokens"] == said.usage_metadata["output_tokens"]
    cached = streamed.usage_metadata["input_token_details"]["cache_read"]
    assert prompt - PAGE_SIZE <= cached <= prompt


async def test_async_stream_equals_the_invoke_result(chat: ChatOpenAI) -> None:
    said = "".join([str(chunk.content) async for chunk in chat.astream(ASKED)])
    assert said == (await chat.ainvoke(ASKED)).content


def test_generate_returns_several_candidates(chat: ChatOpenAI) -> None:
    result = chat.generate([ASKED], n=3)
    texts = [generation.text for generation in result.generations[0]]
    assert len(texts) == len(set(texts)) == 3


def test_second_turn_hits_the_first(chat: ChatOpenAI) -> None:
    first = chat.invoke(ASKED)
    second = chat.invoke([*ASKED, first, HumanMessage("And then?")])
    assert isinstance(first, AIMessage) and isinstance(second, AIMessage)
    assert first.usage_metadata is not None and second.usage_metadata is not None
    history = first.usage_metadata["total_tokens"]
    assert history - PAGE_SIZE <= second.usage_metadata["input_token_details"]["cache_read"] <= history


class Pet(BaseModel):
    """A pet."""

    kind: str
    tame: bool


def test_structured_output_is_an_instance_of_the_class(chat: ChatOpenAI) -> None:
    """Parse JSON of the hash model, which only the schema can enforce."""
    limited = ChatOpenAI(
        model=MODEL, base_url=chat.openai_api_base, api_key=SecretStr("unused"), seed=2, max_completion_tokens=300
    )
    assert isinstance(limited.with_structured_output(Pet, method="json_schema").invoke(ASKED), Pet)


@pytest.mark.slow
def test_responses_api_returns_structured_output(chat: ChatOpenAI) -> None:
    """Use the same class over /v1/responses."""
    stateful = ChatOpenAI(
        model=MODEL,
        base_url=chat.openai_api_base,
        api_key=SecretStr("unused"),
        max_completion_tokens=30,
        use_responses_api=True,
        max_retries=0,
        extra_body={"ignore_eos": True},  # the reply of the hash model may be empty
    )
    said = stateful.invoke("Hello!")
    assert said.text
    chunks = list(stateful.stream("Hello again!"))
    assert "".join(chunk.text for chunk in chunks)


def embedder(server: Server, sends_ids: bool = True) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("unused"),
        check_embedding_ctx_length=sends_ids,
        max_retries=0,
    )


def test_embeddings_of_texts(server: Server) -> None:
    texts = ["Hello there", "How are you?"]
    client = embedder(server, False)
    together = client.embed_documents(texts)
    assert together == [client.embed_query(text) for text in texts]
    assert together != [together[0]] * 2
    assert all(sum(value * value for value in each) == pytest.approx(1.0) for each in together)


class ServedEncoding:
    """Replaces tiktoken's encoding, which the client would download, by the tokenizer of the server."""

    def encode_ordinary(self, text: str) -> list[int]:
        return list(tiny_tokenizer().encode(text, add_special_tokens=True))


def test_embeddings_of_token_ids(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the client tokenises and sends token ids; those of another tokenizer may not exist here."""
    monkeypatch.setattr("tiktoken.encoding_for_model", lambda name: ServedEncoding())
    texts = ["Hello there", "How are you?"]
    assert embedder(server).embed_documents(texts) == embedder(server, False).embed_documents(texts)
    monkeypatch.setattr(ServedEncoding, "encode_ordinary", lambda self, text: [100_000])
    with pytest.raises(openai.BadRequestError, match="token ids must be between 0 and"):
        embedder(server).embed_query("Hello")


@pytest.mark.refused("400 `unsupported_parameter`: only text and file parts are supported")
def test_image_input(chat: ChatOpenAI) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    with pytest.raises(openai.BadRequestError, match="only text and file parts are supported") as caught:
        chat.invoke([HumanMessage([part])])
    assert caught.value.code == "unsupported_parameter"
