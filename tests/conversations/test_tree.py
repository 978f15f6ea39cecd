"""The conversation tree against plain recursion, and deletions against what the remaining paths must then contain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.conversations.store import ConversationStore, StaleRevisionError
from chatcache.conversations.tree import (
    COMPLETED,
    DELETED,
    FORKED,
    IN_PROGRESS,
    SHARE_KEY,
    Conversation,
    ConversationBusyError,
    ConversationTree,
    Item,
    MessageDeletion,
    Turn,
    plan_message_deletion,
    plan_response_deletion,
)
from chatcache.errors import NotFoundError
from tests.support.conversation_trees import GeneratedTree, trees

HEAD = Conversation("conv", "me", 0.0, 0.0, active_leaf="a1")


@settings(deadline=None)
@given(trees())
def test_tree_paths_and_token_sequences_equal_recursion(generated: GeneratedTree) -> None:
    for item_id, path in generated.paths.items():
        assert [item.id for item in generated.tree.path(item_id)] == path
    for item_id, sequence in generated.sequences.items():
        assert generated.tree.token_sequence(generated.tree.items[item_id]) == sequence


@settings(deadline=None)
@given(trees())
def test_tree_children_partition_the_items(generated: GeneratedTree) -> None:
    seen = [child.id for parent in [None, *generated.tree.items] for child in generated.tree.children(parent)]
    assert sorted(seen) == sorted(generated.tree.items)
    for turn in generated.tree.turns.values():
        outputs = generated.tree.outputs(turn.id)
        assert [item.index for item in outputs] == list(range(len(outputs)))
        assert {item.parent_id for item in outputs} == {turn.parent_id}


def test_token_sequence_of_client_messages_is_empty() -> None:
    given = [Item("u", None, "user", "?"), Item("a", "u", "assistant", "!", response_id="r")]
    tree = ConversationTree(Conversation("conv", "", 0.0, 0.0), given, [Turn("r", "a2", "m", 0.0)])
    assert tree.token_sequence(tree.items["a"]) == ()
    assert tree.turn_of(tree.items["u"]) is None


def small() -> ConversationTree:
    """Return u0 -> (a1, b1) -> u2 -> a3; a1 is continued, b1 is not; f1 is a prefix of b1 without descendants."""
    turns = (
        Turn("r1", "u0", "m", 0.0, None, (1, 2), status=COMPLETED, echo={"metadata": {"k": "v"}}),
        Turn("r2", "u2", "m", 0.0, "a1", (4, 5), status=COMPLETED),
    )
    items = (
        Item("u0", None, "user", "u0", response_id="r1"),
        Item("a1", "u0", "assistant", "a1", (3,), "r1"),
        Item("b1", "u0", "assistant", "b1", (9, 8), "r1", 1),
        Item("u2", "a1", "user", "u2", response_id="r2"),
        Item("a3", "u2", "assistant", "a3", (6,), "r2"),
    )
    return ConversationTree(HEAD, items, turns)


def applied(tree: ConversationTree, edit: MessageDeletion) -> ConversationTree:
    """Return what a store must contain after the deletion."""
    items = {**tree.items, **{item.id: item for item in edit.items}}
    turns = {**tree.turns, **{turn.id: turn for turn in edit.turns}}
    return ConversationTree(
        replace(tree.conversation, active_leaf=edit.active_leaf),
        (item for item in items.values() if item.id not in edit.removed_items),
        (turn for turn in turns.values() if turn.id not in edit.removed_turns),
    )


def leaves(tree: ConversationTree) -> Iterator[Item]:
    parents = {item.parent_id for item in tree.items.values()}
    return (item for item in tree.items.values() if item.id not in parents)


@given(trees(), st.data())
@settings(max_examples=150, deadline=None)
def test_message_deletion_keeps_every_other_message_on_its_path(generated: GeneratedTree, data: st.DataObject) -> None:
    tree = generated.tree
    for _ in range(data.draw(st.integers(1, 3))):
        if not tree.items:
            return
        gone = data.draw(st.sampled_from(sorted(tree.items)))
        settled = {each.id: replace(each, status=COMPLETED) for each in tree.turns.values()}
        tree = ConversationTree(tree.conversation, tree.items.values(), settled.values())
        after = applied(tree, plan_message_deletion(tree, gone))
        for item in after.items.values():
            before = [each.id for each in tree.path(item.id)]
            assert [each.id for each in after.path(item.id)] == [each for each in before if each != gone]
            if gone in before:
                assert after.token_sequence(item) == () == item.token_ids
            else:
                assert after.token_sequence(item) == tree.token_sequence(item)
            assert (after.turn_of(item) is None) == (tree.turn_of(tree.items[item.id]) is None)
        tree = after


def test_deletion_under_a_running_response_is_refused() -> None:
    tree = small()
    live = ConversationTree(
        HEAD,
        (i for i in tree.items.values() if i.id != "a3"),
        (tree.turns["r1"], Turn("r2", "u2", "m", 0.0, "a1", (4,))),
    )
    assert live.turns["r2"].status == IN_PROGRESS
    for item_id in ("u0", "a1", "u2"):
        with pytest.raises(ConversationBusyError):
            plan_message_deletion(live, item_id)
    assert plan_message_deletion(live, "b1").removed_items == ("b1",)
    with pytest.raises(ConversationBusyError):
        plan_response_deletion(live, "r2")
    with pytest.raises(NotFoundError):
        plan_message_deletion(live, "r1")


def test_turn_on_an_edited_prompt_has_no_token_sequence() -> None:
    """Its base is a reply whose prompt is unknown or which was deleted."""
    tree = small()
    late = Turn("r2", "u2", "m", 0.0, "a1", (4, 5), status=COMPLETED)
    for gone in ("u0", "a1"):
        after = applied(tree, plan_message_deletion(tree, gone))
        mixed = ConversationTree(HEAD, (*after.items.values(), tree.items["a3"]), (*after.turns.values(), late))
        assert mixed.items["a3"].token_ids and mixed.token_sequence(mixed.items["a3"]) == ()


def test_response_deletion_removes_messages_without_dependents() -> None:
    tree = small()
    edit = plan_response_deletion(tree, "r1")
    after = applied(tree, edit)
    assert set(after.items) == {"u0", "a1", "u2", "a3"}
    assert after.turns["r1"].status == DELETED and after.turns["r1"].echo == {}
    assert after.token_sequence(after.items["a3"]) == (1, 2, 3, 4, 5, 6)

    edit = plan_response_deletion(after, "r2")
    last = applied(after, edit)
    assert set(last.items) == {"u0", "a1"} and set(last.turns) == {"r1"}
    assert last.conversation.active_leaf == "a1"
    assert set(applied(last, plan_response_deletion(last, "r1")).items) == set()


def test_response_deletion_of_an_unknown_response_raises() -> None:
    with pytest.raises(NotFoundError) as raised:
        plan_response_deletion(small(), "resp_x")
    assert raised.value.param == "response_id"


def test_deletion_moves_the_end_of_a_link_to_a_message_that_stays() -> None:
    head = replace(HEAD, metadata={"k": "v", SHARE_KEY: "a3 digest"})
    tree = ConversationTree(head, small().items.values(), small().turns.values())
    assert plan_message_deletion(tree, "a1").metadata is None, "the last message stays"
    assert plan_message_deletion(tree, "a3").metadata == {"k": "v", SHARE_KEY: "u2 digest"}
    assert plan_response_deletion(tree, "r2").metadata == {"k": "v", SHARE_KEY: "a1 digest"}
    alone = ConversationTree(replace(head, metadata={SHARE_KEY: "u0 digest"}), [tree.items["u0"]], ())
    assert plan_message_deletion(alone, "u0").metadata == {}
    assert plan_message_deletion(small(), "a3").metadata is None


def test_response_deletion_removes_the_prefix_stored_by_its_fork() -> None:
    tree = small()
    cut = Item("f1", "u0", "assistant", "b", (9,), "r1", 1, finish_reason=FORKED)
    fork = Turn("r3", "u4", "m", 0.0, "f1", (7,), status=COMPLETED, echo={"forked_item_id": "f1"})
    items = (*tree.items.values(), cut, Item("u4", "f1", "user", "?", response_id="r3"))
    generated = ConversationTree(replace(HEAD, active_leaf="u4"), items, (*tree.turns.values(), fork))
    edit = plan_response_deletion(generated, "r3")
    assert set(edit.removed_items) == {"u4", "f1"} and edit.removed_turns == ("r3",)
    assert edit.active_leaf == "u0"
    assert "f1" not in plan_response_deletion(generated, "r1").removed_items


def test_assistant_message_in_the_input_is_not_an_output() -> None:
    turn = Turn("r1", "a1", "m", 0.0, None, (1,))
    items = (
        Item("u0", None, "user", "?", response_id="r1"),
        Item("a1", "u0", "assistant", "as if", response_id="r1"),
        Item("a2", "a1", "assistant", "!", (2,), "r1"),
    )
    tree = ConversationTree(HEAD, items, [turn])
    assert [item.id for item in tree.outputs("r1")] == ["a2"]
    assert [item.id for item in tree.inputs("r1")] == ["u0", "a1"]


async def test_store_applies_a_deletion_completely_or_not_at_all(store: ConversationStore) -> None:
    tree = small()
    await store.create(HEAD, tuple(tree.items.values()), tree.turns["r1"])
    for status in (IN_PROGRESS, tree.turns["r2"].status):
        await store.append("me", "conv", (), replace(tree.turns["r2"], status=status))
    for item_id in ("a1", "u0", "b1", "u2", "a3"):
        loaded = await store.load("me", "conv")
        edit = plan_message_deletion(loaded, item_id)
        rev = loaded.conversation.rev
        for owner, stale, error in (("you", None, NotFoundError), ("me", rev - 1, StaleRevisionError)):
            with pytest.raises(error):
                await store.delete_messages(owner, "conv", edit, expected_rev=stale)
        head = await store.delete_messages("me", "conv", edit, expected_rev=rev)
        want, got = applied(loaded, edit), await store.load("me", "conv")
        assert head == got.conversation and head.rev == rev + 1 and head.active_leaf == edit.active_leaf
        assert (got.items, got.turns) == (want.items, want.turns)
    assert not got.items and head.active_leaf is None
