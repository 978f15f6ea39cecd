"""Parts of conversation trees and pages of messages, in every store, against the whole tree; and what they read."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from chatcache.conversations.store import ConversationFullError, ConversationStore, ItemQuery
from chatcache.conversations.tree import FORKED, Conversation, ConversationTree, Item, Turn, plan_message_deletion
from chatcache.errors import NotFoundError
from chatcache.storage import redis_reads, sqlite
from chatcache.storage.redis import RedisStore
from chatcache.storage.redis_layout import SCHEMA_KEY, VERSION, members_key, order_key
from chatcache.storage.sqlite import SqliteStore
from tests.support.redis_servers import RedisServer


def random_turns(rng: random.Random, count: int) -> tuple[list[Item], list[Turn]]:
    """Turns anywhere in a tree, with several inputs or none, several candidates or none, and forks of replies."""
    items: list[Item] = []
    turns: list[Turn] = []
    for number in range(count):
        name, parent = f"resp_{number}", rng.choice([None, *items[-6:]])
        parent_id = parent.id if parent is not None else None
        for _ in range(rng.randint(0 if parent is not None else 1, 2)):
            items.append(Item(f"msg_{len(items)}", parent_id, "user", "?", response_id=name))
            parent_id = items[-1].id
        base = parent.id if parent is not None and parent.token_ids else None
        turns.append(Turn(name, parent_id or "", "m", 1.0, base, (number,)))
        for index in range(rng.randint(0, 2)):
            items.append(Item(f"msg_{len(items)}", parent_id, "assistant", "!", (len(items),), name, index))
        if rng.random() < 0.3 and items[-1].role == "assistant":
            items.append(replace(items[-1], id=f"msg_{len(items)}", finish_reason=FORKED))
    return items, turns


async def fill(store: ConversationStore, seed: int, num_turns: int = 25) -> ConversationTree:
    """Store a random tree, delete some of its messages, and return what is left."""
    rng = random.Random(seed)
    items, turns = random_turns(rng, num_turns)
    await store.create(Conversation("conv", "me", 1.0, 1.0))
    for at in range(0, len(items), 7):
        await store.append("me", "conv", items[at : at + 7])
    for turn in turns:
        await store.append("me", "conv", [], turn)
    for item in rng.sample(items, 4):
        tree = await store.load("me", "conv")
        turns = [replace(turn, status="completed") for turn in tree.turns.values()]
        tree = ConversationTree(tree.conversation, tree.items.values(), turns)
        await store.delete_messages("me", "conv", plan_message_deletion(tree, item.id))
    await store.append("me", "conv", [], active_leaf=rng.choice(list((await store.load("me", "conv")).items)))
    return await store.load("me", "conv")


@pytest.mark.parametrize("seed", range(4))
async def test_path_equals_the_path_in_the_whole_tree(store: ConversationStore, seed: int) -> None:
    tree = await fill(store, seed)
    leaf = tree.conversation.active_leaf
    active = await store.load_path("me", "conv")
    assert active.conversation == tree.conversation and active.path(leaf) == tree.path(leaf)
    for item in tree.items.values():
        part = await store.load_path("me", "conv", item.id)
        path = tree.path(item.id)
        assert tuple(part.items.values()) == path
        assert part.turn_of(item) == tree.turn_of(item)
        assert part.token_sequence(item) == tree.token_sequence(item)
        for limit in (0, 1, 3):
            part = await store.load_path("me", "conv", item.id, limit=limit)
            assert tuple(part.items.values()) == path[len(path) - min(limit, len(path)) :]


@pytest.mark.parametrize("seed", range(4))
async def test_path_to_a_response_has_its_messages(store: ConversationStore, seed: int) -> None:
    tree = await fill(store, seed)
    for response_id, turn in tree.turns.items():
        part = await store.load_path("me", "conv", response_id)
        own = await store.load_path("me", "conv", response_id, limit=0)
        for found in (part, own):
            assert found.turns[response_id] == turn
            assert found.outputs(response_id) == tree.outputs(response_id)
            assert found.inputs(response_id) == tree.inputs(response_id)
        assert {item.response_id for item in own.items.values()} <= {response_id}
        for output in tree.outputs(response_id):
            assert part.path(output.id) == tree.path(output.id)
        assert part.path(turn.parent_id or None) == tree.path(turn.parent_id or None)


@pytest.mark.parametrize("limit", [1, 3, 1000, None])
async def test_pages_equal_slices_of_the_whole_tree(store: ConversationStore, limit: int | None) -> None:
    tree = await fill(store, seed=11)
    names = list(tree.items)
    for leaf in (None, names[-1], names[len(names) // 2]):
        path = [item.id for item in tree.path(leaf if leaf is not None else tree.conversation.active_leaf)]
        for all_branches, wanted in ((True, names), (False, path)):
            for is_descending in (False, True):
                ordered = wanted[::-1] if is_descending else wanted
                for start in (None, *ordered[::3]):
                    query = ItemQuery(leaf, all_branches, start, limit, is_descending)
                    page = await store.list_items("me", "conv", query)
                    first = ordered.index(start) if start is not None else 0
                    assert list(page.items) == ordered[first:][:limit], query
                    assert page.num_stored_items == (len(names) if all_branches else None)
                    assert all(page.turn_of(each) == tree.turn_of(each) for each in page.items.values())


async def test_unknown_messages_are_refused_or_have_no_path(store: ConversationStore) -> None:
    tree = await fill(store, seed=2)
    assert not (await store.load_path("me", "conv", "msg_x")).items
    for param, query in (("leaf", ItemQuery(leaf="msg_x")), ("after", ItemQuery(start="msg_x", is_descending=False))):
        with pytest.raises(NotFoundError) as caught:
            await store.list_items("me", "conv", query)
        assert caught.value.param == param
    elsewhere = next(name for name in tree.items if name not in dict.fromkeys(i.id for i in tree.path("msg_0")))
    with pytest.raises(NotFoundError):
        await store.list_items("me", "conv", ItemQuery(leaf="msg_0", start=elsewhere, is_descending=False))
    for work in (store.load_path("you", "conv"), store.list_items("you", "conv", ItemQuery())):
        with pytest.raises(NotFoundError):
            await work


async def test_append_beyond_the_limit_of_items_is_refused(store: ConversationStore) -> None:
    await store.create(Conversation("conv", "me", 1.0, 1.0))
    await store.append("me", "conv", [Item("msg_0", None, "user", "x"), Item("msg_1", None, "user", "x")], max_items=3)
    new = [Item("msg_2", None, "user", "x"), Item("msg_3", None, "user", "x")]
    with pytest.raises(ConversationFullError, match="at most 3 messages; this one has 2 and would get 2 more"):
        await store.append("me", "conv", new, max_items=3)
    assert (await store.append("me", "conv", new[:1], max_items=3)).rev == 2
    await store.append("me", "conv", [], Turn("resp_1", "msg_2", "m", 1.0), max_items=3)
    await store.append("me", "conv", new[1:])  # the reply of a turn that was accepted
    assert list((await store.load("me", "conv")).items) == ["msg_0", "msg_1", "msg_2", "msg_3"]


NUM_ITEMS = 600


async def chain(store: ConversationStore) -> None:
    """Store a conversation with one long path."""
    items = [Item(f"msg_{at}", f"msg_{at - 1}" if at else None, "user", "x") for at in range(NUM_ITEMS)]
    await store.create(Conversation("conv", "me", 1.0, 1.0, active_leaf=items[-1].id), items)


@pytest.mark.parametrize("implementation", ["sqlite", "redis"])
async def test_page_decodes_only_its_messages(
    implementation: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of a page does not grow with the conversation."""
    decoded: list[object] = []
    module, name = (sqlite, "row_to_item") if implementation == "sqlite" else (redis_reads, "unpack_item")
    original = getattr(module, name)

    def counted(data: object) -> object:
        decoded.append(data)
        return original(data)

    monkeypatch.setattr(module, name, counted)
    store: ConversationStore = (
        SqliteStore(tmp_path / "chat.db")
        if implementation == "sqlite"
        else RedisStore(request.getfixturevalue("empty_redis").url)
    )
    await chain(store)
    for query in (
        ItemQuery(limit=3),
        ItemQuery(limit=3, start="msg_300"),
        ItemQuery(all_branches=True, limit=3),
        ItemQuery(all_branches=True, limit=3, start="msg_300", is_descending=False),
    ):
        decoded.clear()
        assert len((await store.list_items("me", "conv", query)).items) == 3
        assert len(decoded) <= 4, query
    decoded.clear()
    await store.load_path("me", "conv", limit=1)
    assert len(decoded) == 1
    decoded.clear()
    await store.append("me", "conv", [Item("msg_new", "msg_599", "user", "x")], active_leaf="msg_new")
    assert not decoded, "appending reads no message"
    await store.close()


async def test_page_reads_few_rows_of_a_large_conversation(tmp_path: Path) -> None:
    """The virtual machine of SQLite executes about as much for a page of a long conversation as for a short one."""
    store = SqliteStore(tmp_path / "chat.db")
    await chain(store)
    await store.close()
    db = sqlite3.connect(tmp_path / "chat.db")
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    db.set_progress_handler(count, 10)
    sqlite.read_items(db, "me", "conv", ItemQuery(limit=1))
    num_page, steps = steps, 0
    sqlite.read_tree(db, "me", "conv")
    assert num_page * 10 < steps
    db.close()


async def test_order_of_layout_1_is_built_when_the_server_is_connected(empty_redis: RedisServer) -> None:
    store = RedisStore(empty_redis.url)
    tree = await fill(store, seed=5)
    await store.close()
    kept = [empty_redis.admin.lrange(order_key("conv"), 0, -1), empty_redis.admin.zrange(members_key("conv"), 0, -1)]
    assert all(kept)
    empty_redis.admin.delete(order_key("conv"), members_key("conv"))
    empty_redis.admin.set(SCHEMA_KEY, 1)
    store = RedisStore(empty_redis.url)
    built = await store.load("me", "conv")
    assert list(built.items.values()) == list(tree.items.values())
    page = await store.list_items("me", "conv", ItemQuery(all_branches=True, limit=4))
    assert list(page.items) == list(tree.items)[:-5:-1]
    assert empty_redis.admin.get(SCHEMA_KEY) == str(VERSION).encode()
    await store.close()
