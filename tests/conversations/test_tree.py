"""The tree against plain recursion over the same items."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.conversations.tree import Conversation, ConversationTree, Item, Turn

HEAD = Conversation("conv", "", 0.0, 0.0)


@dataclass(frozen=True)
class Grown:
    """A tree and, for every reply, the exact tokens it must stand for."""

    tree: ConversationTree
    paths: dict[str, list[str]]
    sequences: dict[str, tuple[int, ...]]


@st.composite
def trees(draw: st.DrawFn) -> Grown:
    """Grow a conversation turn by turn: continue anywhere, sometimes rendered afresh, sometimes with two candidates."""
    items: list[Item] = []
    turns: list[Turn] = []
    paths: dict[str, list[str]] = {}
    sequences: dict[str, tuple[int, ...]] = {}
    numbers = iter(range(10_000))

    def some_ids(at_least: int = 0) -> tuple[int, ...]:
        return tuple(next(numbers) for _ in range(draw(st.integers(at_least, 3))))

    for _ in range(draw(st.integers(1, 8))):
        replies = [None, *sequences]
        below = draw(st.sampled_from(replies))
        user = Item(f"u{len(items)}", below, "user", "?")
        items.append(user)
        paths[user.id] = [*(paths[below] if below else []), user.id]
        base = below if draw(st.booleans()) else None
        turn = Turn(f"r{len(turns)}", user.id, "m", 0.0, base, prompt_ids=some_ids(1))
        turns.append(turn)
        for index in range(draw(st.integers(1, 2))):
            reply = Item(f"a{len(items)}", user.id, "assistant", "!", some_ids(), turn.id, index)
            items.append(reply)
            paths[reply.id] = [*paths[user.id], reply.id]
            sequences[reply.id] = (*(sequences[base] if base else ()), *turn.prompt_ids, *reply.token_ids)
    return Grown(ConversationTree(HEAD, items, turns), paths, sequences)


@settings(deadline=None)
@given(trees())
def test_paths_and_sequences(grown: Grown) -> None:
    for item_id, path in grown.paths.items():
        assert [item.id for item in grown.tree.path(item_id)] == path
    for item_id, sequence in grown.sequences.items():
        assert grown.tree.token_sequence(grown.tree.items[item_id]) == sequence


@settings(deadline=None)
@given(trees())
def test_children_partition_the_tree(grown: Grown) -> None:
    seen = [child.id for parent in [None, *grown.tree.items] for child in grown.tree.children(parent)]
    assert sorted(seen) == sorted(grown.tree.items)
    for turn in grown.tree.turns.values():
        outputs = grown.tree.outputs(turn.id)
        assert [item.index for item in outputs] == list(range(len(outputs)))
        assert {item.parent_id for item in outputs} == {turn.parent_id}


def test_messages_nobody_generated_have_no_exact_tokens() -> None:
    given = [Item("u", None, "user", "?"), Item("a", "u", "assistant", "!", response_id="r")]
    tree = ConversationTree(HEAD, given, [Turn("r", "a2", "m", 0.0)])
    assert tree.token_sequence(tree.items["a"]) == ()
    assert tree.turn_of(tree.items["u"]) is None
