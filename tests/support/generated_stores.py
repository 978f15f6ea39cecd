"""Stores filled from a seed with trees, unusual texts, numbers and owners."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator

from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import (
    COMPLETED,
    FORKED,
    IN_PROGRESS,
    INCOMPLETE,
    Conversation,
    ConversationTree,
    Item,
    ReplyParts,
    ToolCall,
    Turn,
    Usage,
)

OWNERS = ("", "ada", "ada/ü b", "o={x}:%2F")
TEXTS = ("", "Hé\x00llo 🎉", "line\nbreak\u2028", '"quoted" \\ {', "word " * 50)
ECHO = {"temperature": 0.1, "big": 2**63 - 1, "tools": [{"name": "f", "parameters": {"type": "object"}}], "none": None}


def trees(num_items: int, seed: int = 8, items_each: int = 40) -> Iterator[tuple[Conversation, list[Item], list[Turn]]]:
    """Yield conversations with that many messages together; every reply belongs to a response."""
    generator = random.Random(seed)
    for number in range(-(-num_items // items_each)):
        name = f"{number:05d}{generator.randrange(16**8):08x}"
        items: list[Item] = []
        turns: list[Turn] = []
        for at in range(items_each):
            parent = generator.choice(items[-6:]).id if items else None
            time_s = 1_700_000_000 + number + at / 7
            if at % 2 == 0:
                items.append(Item(f"msg_{name}_{at}", parent, "user", generator.choice(TEXTS), created_at=time_s))
                continue
            ids = tuple(generator.randrange(2**31) for _ in range(generator.randrange(60)))
            turn = Turn(
                *(
                    f"resp_{name}_{at}",
                    items[-1].id,
                    "model",
                    time_s,
                    None,
                    ids[:9],
                    generator.choice((None, "Be kind")),
                ),
                previous_response_id=generator.choice((None, "resp_gone")),
                status=COMPLETED,
                usage=generator.choice((None, Usage(9, 1, 50, 2))),
                echo=generator.choice(({}, ECHO)),
            )
            parts = (
                ReplyParts("thought", (ToolCall("c", "f", "{}"),), "raw") if generator.random() < 0.2 else ReplyParts()
            )
            reply = (turn.parent_id, "assistant", generator.choice(TEXTS), ids, turn.id, generator.randrange(3))
            items.append(Item(f"msg_{name}_{at}", *reply, COMPLETED, "stop", time_s, parts))
            turns.append(turn)
        owner, times = generator.choice(OWNERS), (1_700_000_000.25, 1_700_000_000 + generator.random())
        leaf = generator.choice(items).id
        yield (
            Conversation(
                f"conv_{name}", owner, *times, generator.choice(TEXTS)[:200], leaf, generator.randrange(99), {"k": "ü"}
            ),
            items,
            turns,
        )


async def fill(store: ConversationStore, num_items: int, seed: int = 8) -> None:
    for conversation, items, turns in trees(num_items, seed):
        await store.merge(conversation, items, turns)


async def everything(store: ConversationStore, owners: tuple[str, ...] = OWNERS) -> AsyncIterator[str]:
    """Yield everything that can be read of a store through its contract."""
    for owner in owners:
        for name in await store.list_ids(owner, 10_000):
            tree = await store.load(owner, name)
            yield repr((tree.conversation, list(tree.items.values()), sorted(tree.turns.items())))


def full_tree() -> ConversationTree:
    """Return a tree that uses every field that can be stored."""
    head = Conversation("conv_src", "me", 1.25, 7.5, "Tïtle 🎉", "msg_c", 9, {"system": "Be kind"})
    calls = (ToolCall("call_1", "find", '{"q": "\\u0000"}'),)
    items = (
        Item("msg_a", None, "user", "Hé\x00llo\n```\ncode\n", response_id="resp_1", created_at=1.5),
        Item("msg_b", "msg_a", "assistant", "", (1, 2), "resp_1", 0, COMPLETED, "stop", 2.0, ReplyParts("hm", calls)),
        Item("msg_t", "msg_b", "tool", "found", parts=ReplyParts(call_id="call_1"), response_id="resp_2"),
        Item("msg_c", "msg_t", "assistant", "So", (3,), "resp_2", 0, INCOMPLETE, "length", 3.0, ReplyParts(raw="So ")),
        Item("msg_f", "msg_a", "assistant", "beg", (4,), "resp_1", 1, INCOMPLETE, FORKED, 2.5),
        Item("msg_s", None, "system", "another root"),
    )
    echo = {
        "conversation": {"id": "conv_src"},
        "input_item_ids": ["msg_t"],
        "forked_item_id": "msg_f",
        "tools": [{"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": None}],
    }
    turns = (
        Turn("resp_1", "msg_a", "m", 1.0, None, (8, 9), "Be kind", None, COMPLETED, Usage(2, 1, 3)),
        Turn("resp_2", "msg_t", "m", 2.0, "msg_b", (7,), None, "resp_1", IN_PROGRESS, None, echo),
    )
    return ConversationTree(head, items, turns)
