"""The storage contract, for every implementation."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest

from chatcache.conversations.search import SearchQuery
from chatcache.conversations.store import (
    Claim,
    ConversationStore,
    MergeResult,
    OwnerAssignment,
    StaleRevisionError,
    encode_cursor,
)
from chatcache.conversations.tree import (
    COMPLETED,
    SHARE_KEY,
    Conversation,
    ConversationBusyError,
    ConversationTree,
    Item,
    Turn,
    Usage,
    plan_message_deletion,
)
from chatcache.errors import NotFoundError
from tests.storage.stored_conversation import REPLY, TURN, USER, create


async def test_store_returns_what_was_stored(store: ConversationStore) -> None:
    conversation = await create(store)
    assert await store.get("me", "conv_1") == conversation
    first = await store.append("me", "conv_1", [USER], TURN, active_leaf="msg_u", title="Hello")
    settled = replace(TURN, status=COMPLETED, usage=Usage(2, 1, 3))
    second = await store.append("me", "conv_1", [REPLY], settled, active_leaf="msg_a", title="Another")
    tree = await store.load("me", "conv_1")
    assert tree.conversation == second
    assert (second.rev, second.title, second.active_leaf) == (2, "Hello", "msg_a")
    assert second.updated_at >= first.updated_at > conversation.updated_at
    assert list(tree.items.values()) == [USER, REPLY]
    assert list(tree.turns.values()) == [settled]
    for member in ("msg_u", "msg_a", "resp_1"):
        assert await store.locate("me", member) == "conv_1"
    assert await store.find_owner("conv_1") == "me"
    with pytest.raises(NotFoundError):
        await store.find_owner("conv_2")


async def test_store_hides_conversations_of_other_owners(store: ConversationStore) -> None:
    await create(store)
    await store.append("me", "conv_1", [USER], TURN)
    for work in (
        store.get("you", "conv_1"),
        store.load("you", "conv_1"),
        store.locate("you", "msg_u"),
        store.locate("you", "resp_1"),
        store.append("you", "conv_1", [REPLY]),
        store.update("you", "conv_1", title="x"),
        store.delete("you", "conv_1"),
        store.get("me", "conv_2"),
        store.locate("me", "msg_x"),
        store.list("you", 10, after="conv_1"),
    ):
        with pytest.raises(NotFoundError):
            await work
    assert await store.list("you", 10) == ()


async def test_assign_owner_moves_conversations_unchanged(store: ConversationStore) -> None:
    """Except those with a running response; repeating the call moves the rest, and then nothing."""
    heads = []
    for number in range(3):
        item, turn = replace(USER, id=f"msg_{number}", text=f"word{number}"), replace(TURN, id=f"resp_{number}")
        await create(store, f"conv_{number}", owner="")
        await store.append("", f"conv_{number}", [item], turn, title="Said")
        heads.append(await store.append("", f"conv_{number}", (), replace(turn, status=COMPLETED)))
    await create(store, "conv_mine")
    await create(store, "conv_busy", owner="")
    await store.append("", "conv_busy", [USER], TURN)
    before = await store.load("", "conv_1")
    assert await store.assign_owner("", "acme/ann") == OwnerAssignment(3, 1)
    assert list(await store.list("acme/ann", 10)) == [replace(head, owner="acme/ann") for head in reversed(heads)]
    assert [head.id for head in await store.list("", 10)] == ["conv_busy"]
    assert list(await store.list_ids("acme/ann", 10)) == ["conv_0", "conv_1", "conv_2"]
    tree = await store.load("acme/ann", "conv_1")
    assert (tree.items, tree.turns) == (before.items, before.turns)
    assert await store.locate("acme/ann", "resp_2") == "conv_2"
    assert [hit.conversation.id for hit in await store.search("acme/ann", SearchQuery.parse("word2"), 9)] == ["conv_2"]
    for work in (store.load("", "conv_1"), store.locate("", "msg_1"), store.get("acme", "conv_1")):
        with pytest.raises(NotFoundError):
            await work
    assert await store.assign_owner("", "acme/ann") == OwnerAssignment(0, 1)
    await store.append("", "conv_busy", [REPLY], replace(TURN, status=COMPLETED))
    assert await store.assign_owner("", "acme/ann") == OwnerAssignment(1, 0)
    assert (
        await store.assign_owner("", "acme/ann") == OwnerAssignment(0, 0) == await store.assign_owner("unknown", "me")
    )
    assert "conv_mine" in await store.list_ids("me", 10) and not await store.list("", 10)
    assert (await store.append("acme/ann", "conv_1", [], title="x")).rev == heads[1].rev + 1


async def test_assign_owner_during_changes_loses_nothing(store: ConversationStore) -> None:
    """A concurrent change is either part of the moved conversation or refused."""
    for number in range(5):
        await create(store, f"conv_{number}", owner="")

    async def change(number: int) -> str | None:
        try:
            await store.append("", f"conv_{number}", [replace(USER, id=f"msg_{number}")])
        except NotFoundError:
            return None
        return f"msg_{number}"

    changes = [change(number) for number in range(5)]
    *written, handed = await asyncio.gather(*changes, store.assign_owner("", "acme"))
    assert handed == OwnerAssignment(5, 0)
    trees = [await store.load("acme", f"conv_{number}") for number in range(5)]
    assert [next(iter(tree.items), None) for tree in trees] == written


async def test_stale_revision_is_refused_and_changes_nothing(store: ConversationStore) -> None:
    await create(store)
    await store.append("me", "conv_1", [USER], expected_rev=0)
    for work in (
        store.append("me", "conv_1", [REPLY], TURN, expected_rev=0),
        store.update("me", "conv_1", title="x", expected_rev=0),
        store.update("me", "conv_1", title="x", expected_rev=2),
    ):
        with pytest.raises(StaleRevisionError):
            await work
    tree = await store.load("me", "conv_1")
    assert (tree.conversation.rev, list(tree.items), list(tree.turns)) == (1, ["msg_u"], [])
    assert (await store.update("me", "conv_1", title="x", expected_rev=1)).rev == 2


async def test_append_is_all_or_nothing(store: ConversationStore) -> None:
    await create(store)
    orphan = replace(REPLY, id="msg_o", parent_id="msg_nowhere")
    with pytest.raises(NotFoundError) as refused:
        await store.append("me", "conv_1", [USER, orphan], TURN)
    assert refused.value.param == "parent_id"
    tree = await store.load("me", "conv_1")
    assert (tree.conversation.rev, list(tree.items), list(tree.turns)) == (0, [], [])
    with pytest.raises(NotFoundError) as refused:
        await store.update("me", "conv_1", active_leaf="msg_u")
    assert refused.value.param == "active_leaf"


async def test_append_with_an_unknown_leaf_is_refused(store: ConversationStore) -> None:
    """Also without messages: there would be no path from the leaf to the root."""
    await create(store)
    await store.append("me", "conv_1", [USER])
    for items in ((), (REPLY,)):
        with pytest.raises(NotFoundError):
            await store.append("me", "conv_1", items, TURN, active_leaf="msg_nowhere")
    tree = await store.load("me", "conv_1")
    assert (tree.conversation.rev, list(tree.items), list(tree.turns)) == (1, ["msg_u"], [])
    assert (await store.append("me", "conv_1", [REPLY], TURN, active_leaf=REPLY.id)).active_leaf == REPLY.id
    assert (await store.append("me", "conv_1", (), TURN, active_leaf="msg_u")).active_leaf == "msg_u"


async def test_append_under_another_conversations_item_is_refused(store: ConversationStore) -> None:
    await create(store)
    await create(store, "conv_2")
    await store.append("me", "conv_1", [USER])
    with pytest.raises(NotFoundError):
        await store.append("me", "conv_2", [REPLY])


async def say(store: ConversationStore, name: str, item_id: str) -> Conversation:
    return await store.append("me", name, [replace(USER, id=item_id)])


async def test_list_pages_by_last_message(store: ConversationStore) -> None:
    for number in range(5):
        await create(store, f"conv_{number}")
    await create(store, "conv_theirs", owner="you")
    for number in (3, 1, 4, 0, 2):
        await say(store, f"conv_{number}", f"msg_{number}")
    newest = [f"conv_{number}" for number in (2, 0, 4, 1, 3)]
    assert [c.id for c in await store.list("me", 10)] == newest
    assert [c.id for c in await store.list("me", 2)] == newest[:2]
    assert [c.id for c in await store.list("me", 2, after=newest[1])] == newest[2:4]


async def test_only_added_messages_move_a_conversation_to_the_top(store: ConversationStore) -> None:
    """Renaming, metadata, another leaf or a deletion raise `rev` only."""
    for name in ("conv_1", "conv_2"):
        await create(store, name)
        await say(store, name, f"{name}_u")
    await store.append("me", "conv_1", [replace(REPLY, parent_id="conv_1_u")], TURN)
    await say(store, "conv_2", "msg_last")
    order, then = ["conv_2", "conv_1"], (await store.get("me", "conv_1")).updated_at
    heads = [
        await store.update("me", "conv_1", title="Renamed"),
        await store.update("me", "conv_1", metadata={"pinned": "true"}),
        await store.update("me", "conv_1", active_leaf="conv_1_u"),
        await store.delete_messages("me", "conv_1", plan_message_deletion(await store.load("me", "conv_1"), "msg_a")),
    ]
    assert [head.updated_at for head in heads] == [then] * 4 and [head.rev for head in heads] == [3, 4, 5, 6]
    assert [c.id for c in await store.list("me", 10)] == order
    assert (await store.get("me", "conv_1")).updated_at == then
    settled = await store.append("me", "conv_1", (), replace(TURN, status=COMPLETED))
    assert settled.updated_at > then and [c.id for c in await store.list("me", 10)] == order[::-1]


async def test_delete_removes_the_whole_tree(store: ConversationStore) -> None:
    await create(store)
    await create(store, "conv_2")
    await store.append("me", "conv_1", [USER, REPLY], TURN)
    await store.append("me", "conv_2", [replace(USER, id="msg_2")])
    await store.delete("me", "conv_1")
    for member in ("msg_u", "msg_a", "resp_1"):
        with pytest.raises(NotFoundError):
            await store.locate("me", member)
    assert list((await store.load("me", "conv_2")).items) == ["msg_2"]


async def test_cursor_keeps_its_position_during_changes(store: ConversationStore) -> None:
    """Conversations change or are deleted between two pages: the others neither repeat nor are missing."""
    for number in range(8):
        await create(store, f"conv_{number}")
        await say(store, f"conv_{number}", f"msg_{number}")
    first = await store.list("me", 3)
    assert [c.id for c in first] == ["conv_7", "conv_6", "conv_5"]
    await say(store, "conv_5", "msg_again")
    await say(store, "conv_3", "msg_too")
    await store.delete("me", "conv_6")
    rest = [c.id for c in await store.list("me", 10, after=encode_cursor(first[-1]))]
    assert rest == ["conv_4", "conv_2", "conv_1", "conv_0"]
    for bad in ("nan~conv_1", "~", "1.5", "x~y", ""):
        with pytest.raises(NotFoundError):
            await store.list("me", 3, after=bad)


async def test_list_ids_is_sorted_by_id(store: ConversationStore) -> None:
    for name in ("conv_b", "conv_c", "conv_a"):
        await create(store, name)
    await create(store, "conv_theirs", owner="you")
    assert list(await store.list_ids("me", 2)) == ["conv_a", "conv_b"]
    assert list(await store.list_ids("me", 2, after="conv_b")) == ["conv_c"]
    assert list(await store.list_ids("me", 2, after="conv_bb")) == ["conv_c"]


async def test_delete_with_a_stale_rev_is_refused(store: ConversationStore) -> None:
    await create(store)
    head = await store.append("me", "conv_1", [USER])
    with pytest.raises(StaleRevisionError) as stale:
        await store.delete("me", "conv_1", expected_rev=0)
    assert stale.value.current == head
    await store.delete("me", "conv_1", expected_rev=1)
    with pytest.raises(NotFoundError):
        await store.get("me", "conv_1")


async def test_concurrent_appends_lose_nothing(store: ConversationStore) -> None:
    await create(store)
    await store.append("me", "conv_1", [USER])
    items = [replace(REPLY, id=f"msg_{number}") for number in range(200)]
    results = await asyncio.gather(*(store.append("me", "conv_1", [item]) for item in items))
    assert sorted(result.rev for result in results) == list(range(2, 202))
    assert len((await store.load("me", "conv_1")).items) == 201


async def test_write_of_a_cancelled_caller_is_stored(store: ConversationStore) -> None:
    await create(store)
    task = asyncio.create_task(store.append("me", "conv_1", [USER]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert list((await store.load("me", "conv_1")).items) == ["msg_u"]


@pytest.mark.slow
async def test_failure_of_a_cancelled_caller_is_not_logged(
    store: ConversationStore, caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()  # what other tests have left
    caplog.clear()
    task = asyncio.create_task(store.load("me", "conv_none"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(NotFoundError):
        await store.load("me", "conv_none")  # the writer has come past both
    gc.collect()
    await asyncio.sleep(0)
    assert not caplog.records


async def grow(store: ConversationStore) -> ConversationTree:
    """Store a - b (resp_1) - c - d (resp_2, on b), and e as a sibling of c."""
    await create(store)
    items = [
        Item("a", None, "user", "one"),
        Item("b", "a", "assistant", "two", (1, 2), "resp_1"),
        Item("c", "b", "user", "three"),
        Item("d", "c", "assistant", "four", (3,), "resp_2"),
        Item("e", "b", "user", "five"),
    ]
    first, second = Turn("resp_1", "a", "m", 1.0, None, (8, 9)), Turn("resp_2", "c", "m", 2.0, "b", (7,))
    await store.append("me", "conv_1", items[:2], first)
    await store.append("me", "conv_1", items[2:], second, active_leaf="d")
    for turn in (first, second):
        await store.append("me", "conv_1", (), replace(turn, status=COMPLETED))
    return await store.load("me", "conv_1")


async def take_out(store: ConversationStore, item_id: str) -> Conversation:
    tree = await store.load("me", "conv_1")
    return await store.delete_messages(
        "me", "conv_1", plan_message_deletion(tree, item_id), expected_rev=tree.conversation.rev
    )


async def test_delete_messages_moves_children_up_and_drops_their_tokens(store: ConversationStore) -> None:
    tree = await grow(store)
    assert tree.token_sequence(tree.items["d"]) == (8, 9, 1, 2, 7, 3)
    head = await take_out(store, "b")
    after = await store.load("me", "conv_1")
    assert (head.rev, head.active_leaf, list(after.items)) == (5, "d", ["a", "c", "d", "e"])
    assert {item.id: item.parent_id for item in after.items.values()} == {"a": None, "c": "a", "d": "c", "e": "a"}
    assert after.token_sequence(after.items["d"]) == () and after.turns["resp_2"].prompt_ids == ()
    with pytest.raises(NotFoundError):
        await store.locate("me", "b")


async def test_delete_messages_moves_the_active_leaf_to_the_parent(store: ConversationStore) -> None:
    await grow(store)
    for item, leaf in (("d", "c"), ("c", "b"), ("e", "b"), ("b", "a"), ("a", None)):
        assert (await take_out(store, item)).active_leaf == leaf
    assert not (await store.load("me", "conv_1")).items


async def test_delete_messages_of_a_shared_leaf_keeps_the_link_to_the_rest(store: ConversationStore) -> None:
    await grow(store)
    await store.update("me", "conv_1", metadata={"k": "v", SHARE_KEY: "d digest"})
    for item, metadata in (("e", "d digest"), ("d", "c digest"), ("a", "c digest"), ("c", "b digest")):
        assert (await take_out(store, item)).metadata == {"k": "v", SHARE_KEY: metadata}
    assert (await take_out(store, "b")).metadata == (await store.get("me", "conv_1")).metadata == {"k": "v"}


async def test_delete_messages_with_a_stale_rev_changes_nothing(store: ConversationStore) -> None:
    tree = await grow(store)
    edit = plan_message_deletion(tree, "d")
    before = await store.update("me", "conv_1", title="meanwhile")
    for owner, error in (("me", StaleRevisionError), ("you", NotFoundError)):
        with pytest.raises(error):
            await store.delete_messages(owner, "conv_1", edit, expected_rev=tree.conversation.rev)
    after = await store.load("me", "conv_1")
    assert (after.conversation, after.items, after.turns) == (before, tree.items, tree.turns)


async def test_append_that_depends_on_a_deleted_member_stores_nothing(store: ConversationStore) -> None:
    await grow(store)
    await create(store, "conv_2")
    await store.append("me", "conv_2", [Item("elsewhere", None, "user", "six")])
    await take_out(store, "d")
    before = await store.load("me", "conv_1")
    question, turn = Item("f", "e", "user", "seven", response_id="resp_3"), Turn("resp_3", "f", "m", 3.0, "b", (4,))
    for gone in ("d", "resp_x", "elsewhere", "conv_1"):
        claim = Claim("key", "digest", "resp_3")
        with pytest.raises(ConversationBusyError):
            await store.append("me", "conv_1", [question], turn, claim=claim, depends_on=["a", "b", "e", gone])
        assert await store.find_claim("me", "key") is None
    after = await store.load("me", "conv_1")
    assert (after.conversation, after.items, after.turns) == (before.conversation, before.items, before.turns)
    head = await store.append("me", "conv_1", [question], turn, depends_on=["a", "b", "e", "resp_1", "resp_2"])
    assert head.rev == before.conversation.rev + 1
    assert "resp_3" in (await store.load("me", "conv_1")).turns


async def test_merge_adds_missing_members_once(store: ConversationStore) -> None:
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


async def test_merge_with_ids_of_others_is_refused(store: ConversationStore) -> None:
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
