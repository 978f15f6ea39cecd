"""Test OpenAI's Conversations with the openai client: create, items, pages, update, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai.types.conversations import ConversationItem
from openai.types.conversations.message import Message

from tests.gateway.serving import Server

pytestmark = pytest.mark.client("openai (Python)")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def said(item: ConversationItem) -> tuple[str, str]:
    assert isinstance(item, Message), item
    part = item.content[0]
    assert part.type in ("input_text", "output_text")
    return item.role, getattr(part, "text", "")


def test_conversation_is_created_changed_and_deleted(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(
        items=[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}], metadata={"topic": "tea"}
    )
    assert conversation.object == "conversation" and conversation.metadata == {"topic": "tea"}
    assert client.conversations.retrieve(conversation.id) == conversation
    changed = client.conversations.update(conversation.id, metadata={"topic": "coffee"})
    assert changed.metadata == {"topic": "coffee"} and changed.id == conversation.id

    added = client.conversations.items.create(
        conversation.id,
        items=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Once"}]},
            {"role": "developer", "content": "Be kind"},
        ],
    )
    assert added.object == "list" and [said(item) for item in added.data] == [("user", "Once"), ("system", "Be kind")]
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[1].id)
    one = client.conversations.items.retrieve(added.first_id, conversation_id=conversation.id)
    assert one == added.data[0]

    newest_first = [said(item)[1] for item in client.conversations.items.list(conversation.id)]
    assert newest_first == ["Be kind", "Once", "Hi!", "Hello"]
    head = client.conversations.items.delete(added.first_id, conversation_id=conversation.id)
    assert head.id == conversation.id
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.first_id, conversation_id=conversation.id)
    left = [said(item)[1] for item in client.conversations.items.list(conversation.id, order="asc")]
    assert left == ["Hello", "Hi!", "Be kind"]

    gone = client.conversations.delete(conversation.id)
    assert gone.deleted and gone.id == conversation.id and gone.object == "conversation.deleted"
    with pytest.raises(openai.NotFoundError) as caught:
        client.conversations.retrieve(conversation.id)
    assert caught.value.code == "not_found" and caught.value.request_id


def test_client_pagination_returns_each_item_once(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[{"role": "user", "content": str(n)} for n in range(23)])
    for limit in (1, 5, 100):
        found = [said(item)[1] for item in client.conversations.items.list(conversation.id, limit=limit, order="asc")]
        assert found == [str(n) for n in range(23)]
    first = client.conversations.items.list(conversation.id)
    assert len(first.data) == 20 and first.has_more and first.has_next_page()
    assert len(first.get_next_page().data) == 3


def test_empty_conversation_has_no_items(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    assert list(client.conversations.items.list(conversation.id)) == []
    with pytest.raises(openai.BadRequestError) as caught:
        client.conversations.items.create(conversation.id, items=[])
    assert caught.value.param == "items"


async def test_async_client_creates_and_lists(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        conversations = await asyncio.gather(*(client.conversations.create() for _ in range(5)))
        for conversation in conversations:
            await client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "a"}])
            assert [said(item) async for item in client.conversations.items.list(conversation.id)] == [("user", "a")]
            await client.conversations.delete(conversation.id)
