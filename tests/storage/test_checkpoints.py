"""Checkpoints of running responses in every store: what a crash leaves, and what the end of a response deletes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chatcache.conversations.checkpoints import CheckpointEncoder, ReplyCheckpoint
from chatcache.conversations.search import SearchQuery
from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import COMPLETED, IN_PROGRESS, INCOMPLETE, Conversation, ConversationTree, Item, Turn
from chatcache.storage.redis import RedisStore
from chatcache.storage.sqlite import SqliteStore
from tests.support.redis_servers import RedisServer

HEAD = Conversation("conv", "me", 1.0, 1.0, active_leaf="msg_u")
USER = Item("msg_u", None, "user", "Hello", response_id="resp", created_at=1.0)
TURN = Turn("resp", "msg_u", "m", 1.0, prompt_ids=(1, 2), echo={"n": 2})
Open = Callable[[], ConversationStore]


def output(index: int, text: str, status: str = INCOMPLETE, reason: str = "cancelled") -> Item:
    return Item(f"msg_{index}", "msg_u", "assistant", text, tuple(range(len(text))), "resp", index, status, reason, 2.0)


@pytest.fixture(params=["sqlite", "redis"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Open the same stored data once more."""
    opened: list[ConversationStore] = []
    server: RedisServer | None = request.getfixturevalue("empty_redis") if request.param == "redis" else None

    def open_again() -> ConversationStore:
        opened.append(RedisStore(server.url, lease_s=3.0) if server is not None else SqliteStore(tmp_path / "chat.db"))
        return opened[-1]

    yield open_again
    for store in opened:
        await store.close()
    if server is not None:
        left = [key for key in server.admin.keys("*") if b":checkpoint:" in key]
        assert not left


async def save(store: ConversationStore, encoder: CheckpointEncoder, *items: Item) -> None:
    data = encoder.encode(items)
    assert data is not None
    await store.checkpoint([ReplyCheckpoint("conv", "resp", data), ReplyCheckpoint("conv", "resp_unknown", data)])
    encoder.confirm()


async def load_ended(store: ConversationStore) -> ConversationTree:
    """Load the conversation once the response is not in progress: in Redis, that takes a heartbeat."""
    while True:
        tree = await store.load("me", "conv")
        if tree.turns["resp"].status != IN_PROGRESS:
            return tree
        await asyncio.sleep(0.02)


async def test_crash_leaves_the_output_of_checkpoints(open_store: Open) -> None:
    store, encoder = open_store(), CheckpointEncoder()
    await store.create(HEAD, [USER], TURN)
    await save(store, encoder, output(1, "The qu"))
    done = output(0, "Yes", COMPLETED, "stop")
    await save(store, encoder, output(1, "The quick brown"), done)
    await store.close()  # without an end of the response
    store = open_store()
    tree = await load_ended(store)
    assert list(tree.items.values()) == [USER, done, output(1, "The quick brown")]
    turn = tree.turns["resp"]
    assert turn == replace(TURN, status=INCOMPLETE, echo={"n": 2, "incomplete_details": {"reason": "interrupted"}})
    assert tree.conversation.active_leaf == "msg_0" and tree.conversation.rev == HEAD.rev + 1
    assert tree.token_sequence(tree.items["msg_1"]) == (1, 2, *range(15))
    assert [hit.item_id for hit in await store.search("me", SearchQuery.parse("brown"), 5)] == ["msg_1"]
    assert await store.locate("me", "msg_1") == "conv"
    continued = Item("msg_next", "msg_1", "user", "Go on")
    assert (await store.append("me", "conv", [continued], active_leaf="msg_next")).rev == HEAD.rev + 2


async def test_crash_without_checkpoints_leaves_the_response_empty(open_store: Open) -> None:
    store = open_store()
    await store.create(HEAD, [USER], TURN)
    await store.close()
    tree = await load_ended(open_store())
    assert tree.turns["resp"] == replace(TURN, status=INCOMPLETE)
    assert list(tree.items) == ["msg_u"] and tree.conversation == HEAD


async def test_crash_keeps_an_active_leaf_that_was_moved(open_store: Open) -> None:
    store, encoder = open_store(), CheckpointEncoder()
    await store.create(HEAD, [USER], TURN)
    other = Item("msg_other", None, "user", "Something else")
    await store.append("me", "conv", [other], active_leaf="msg_other")
    await save(store, encoder, output(0, "Text"))
    await store.close()
    assert (await load_ended(open_store())).conversation.active_leaf == "msg_other"


async def test_end_of_a_response_replaces_its_checkpoints(open_store: Open) -> None:
    store, encoder = open_store(), CheckpointEncoder()
    await store.create(HEAD, [USER], TURN)
    await save(store, encoder, output(0, "The qu"))
    final = output(0, "The quick", COMPLETED, "stop")
    ended = replace(TURN, status=COMPLETED)
    await store.append("me", "conv", [final], ended)
    await save(store, encoder, output(0, "The quick bro"))  # was on its way
    await store.close()
    tree = await load_ended(open_store())
    assert list(tree.items.values()) == [USER, final] and tree.turns["resp"] == ended


async def test_deleted_conversation_leaves_no_checkpoints(open_store: Open, tmp_path: Path) -> None:
    store, encoder = open_store(), CheckpointEncoder()
    await store.create(HEAD, [USER], TURN)
    await save(store, encoder, output(0, "The qu"))
    await store.delete("me", "conv")
    await save(store, encoder, output(0, "The quick"))
    assert await open_store().list("me", 5) == ()
