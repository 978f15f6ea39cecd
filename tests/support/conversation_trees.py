"""Hypothesis strategy for conversation trees whose paths and exact token sequences are known."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from chatcache.conversations.tree import Conversation, ConversationTree, Item, Turn

HEAD = Conversation("conv", "", 0.0, 0.0)


@dataclass(frozen=True)
class GeneratedTree:
    """A tree and the exact paths and token sequences that it must have."""

    tree: ConversationTree
    paths: dict[str, list[str]]
    sequences: dict[str, tuple[int, ...]]


@st.composite
def trees(draw: st.DrawFn) -> GeneratedTree:
    """Draw a conversation turn by turn: continue anywhere, sometimes rendered again, sometimes with two candidates."""
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
    return GeneratedTree(ConversationTree(HEAD, items, turns), paths, sequences)
