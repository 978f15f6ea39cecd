"""The storage contract of edits: messages that are taken out of a tree, conversations that are merged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chatcache.conversations.store import ConversationStore, MergeResult, StaleRevisionError
from chatcache.conversations.tree import COMPLETED, Conversation, ConversationTree, Item, Turn, plan_message_deletion
from chatcache.errors import NotFoundError
from tests.conversations.stored import REPLY, TURN, USER, create


async def grow(store: ConversationStore) -> ConversationTree:
    """a - b (resp_1) - c - d (resp_2, on b), and e beside c."""
    await create(store)
    items = [
        Item("a", None, "user", "one"),
        Item("b", "a", "assistant", "two", (1, 2), "resp_1"),
        Item("c", "b", "user", "three"),
        Item("d", "c", "assistant", "four", (3,), "resp_2"),
        Item("e", "b", "user", "five"),
    ]
    await store.append("me", "conv_1", items[:2], Turn("resp_1", "a", "m", 1.0, None, (8, 9), status=COMPLETED))
    second = Turn("resp_2", "c", "m", 2.0, "b", (7,), status=COMPLETED)
    await store.append("me", "conv_1", items[2:], second, active_leaf="d")
    return await store.load("me", "conv_1")


async def take_out(store: ConversationStore, item_id: str) -> Conversation:
    tree = await store.load("me", "conv_1")
    return await store.delete_messages(
        "me", "conv_1", plan_message_deletion(tree, item_id), expected_rev=tree.conversation.rev
    )


async def test_what_stood_on_a_deleted_message_moves_up_and_forgets_its_tokens(store: ConversationStore) -> None:
    tree = await grow(store)
    assert tree.token_sequence(tree.items["d"]) == (8, 9, 1, 2, 7, 3)
    head = await take_out(store, "b")
    after = await store.load("me", "conv_1")
    assert (head.rev, head.active_leaf, list(after.items)) == (3, "d", ["a", "c", "d", "e"])
    assert {item.id: item.parent_id for item in after.items.values()} == {"a": None, "c": "a", "d": "c", "e": "a"}
    assert after.token_sequence(after.items["d"]) == () and after.turns["resp_2"].prompt_ids == ()
    with pytest.raises(NotFoundError):
        await store.locate("me", "b")


async def test_the_active_leaf_falls_back_when_it_is_deleted(store: ConversationStore) -> None:
    await grow(store)
    for item, leaf in (("d", "c"), ("c", "b"), ("e", "b"), ("b", "a"), ("a", None)):
        assert (await take_out(store, item)).active_leaf == leaf
    assert not (await store.load("me", "conv_1")).items


async def test_a_stale_edit_changes_nothing(store: ConversationStore) -> None:
    tree = await grow(store)
    edit = plan_message_deletion(tree, "d")
    before = await store.update("me", "conv_1", title="meanwhile")
    for owner, error in (("me", StaleRevisionError), ("you", NotFoundError)):
        with pytest.raises(error):
            await store.delete_messages(owner, "conv_1", edit, expected_rev=tree.conversation.rev)
    after = await store.load("me", "conv_1")
    assert (after.conversation, after.items, after.turns) == (before, tree.items, tree.turns)


async def test_merging_adds_what_is_missing_and_nothing_twice(store: ConversationStore) -> None:
    conversation = Conversation("conv_1", "me", 1.0, 5.0, "Title", "msg_u", 4, {"a": "b"})
    assert await store.merge(conversation, [USER], []) == MergeResult(conversation, True, 1, 0)
    assert await store.merge(conversation, [USER], []) == MergeResult(conversation, False, 0, 0)
    longer = replace(conversation, title="Other", active_leaf="msg_a")
    merged = await store.merge(longer, [replace(USER, text="changed"), REPLY], [TURN])
    assert (merged.is_new, merged.num_items, merged.num_turns) == (False, 1, 1)
    assert (merged.conversation.title, merged.conversation.active_leaf) == ("Title", "msg_a")
    assert merged.conversation.rev == 5 and merged.conversation.updated_at > 5.0
    tree = await store.load("me", "conv_1")
    assert (list(tree.items.values()), list(tree.turns.values())) == ([USER, REPLY], [TURN])
    assert await store.merge(longer, [USER, REPLY], [TURN]) == MergeResult(merged.conversation, False, 0, 0)


async def test_a_merge_touches_nothing_of_others(store: ConversationStore) -> None:
    await store.merge(Conversation("conv_1", "me", 1.0, 1.0), [USER, REPLY], [TURN])
    mine = await store.load("me", "conv_1")
    for conversation, items, turns in (
        (Conversation("conv_1", "you", 1.0, 1.0), [replace(USER, id="msg_2")], []),
        (Conversation("conv_2", "you", 1.0, 1.0), [USER], []),
        (Conversation("conv_2", "me", 1.0, 1.0), [replace(USER, id="msg_2"), REPLY], []),
        (Conversation("conv_2", "me", 1.0, 1.0), [], [TURN]),
        (Conversation("conv_2", "me", 1.0, 1.0), [replace(USER, id="msg_2", parent_id="nowhere")], []),
    ):
        with pytest.raises(NotFoundError):
            await store.merge(conversation, items, turns)
    assert list(await store.list_ids("me", 9)) == ["conv_1"] and list(await store.list_ids("you", 9)) == []
    after = await store.load("me", "conv_1")
    assert (after.conversation, after.items, after.turns) == (mine.conversation, mine.items, mine.turns)
