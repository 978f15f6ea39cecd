"""Items as they are made: of what a client wrote, and of what a model said."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.chat.events import ReplyDone
from chatcache.chat.ids import new_id
from chatcache.chat.messages import parts_of
from chatcache.chat.prompt import Message
from chatcache.chat.tree import COMPLETED, INCOMPLETE, Item, Turn
from chatcache.types.events import FINISH_STOP

_TITLE_CHARS = 60


def output_item(turn: Turn, item_id: str, done: ReplyDone, created_at: float) -> Item:
    """The stored form of a finished candidate."""
    status = COMPLETED if done.finish_reason == FINISH_STOP else INCOMPLETE
    return Item(
        id=item_id,
        parent_id=turn.parent_id,
        role="assistant",
        text=done.text,
        token_ids=done.settled_ids,
        response_id=turn.id,
        index=done.index,
        status=status,
        finish_reason=done.finish_reason,
        created_at=created_at,
        parts=done.parts,
    )


def input_items(messages: Sequence[Message], parent_id: str | None, now: float) -> tuple[Item, ...]:
    """Messages that a client wrote as items, each under the one before it."""
    items: list[Item] = []
    for message in messages:
        parts = parts_of(message)
        item = Item(new_id("msg"), parent_id, message["role"], message["content"], created_at=now, parts=parts)
        items.append(item)
        parent_id = item.id
    return tuple(items)


def title_of(messages: Sequence[Message]) -> str | None:
    """The first line a user wrote, cut at a word."""
    for message in messages:
        line = message["content"].strip().split("\n", 1)[0].strip()
        if message["role"] == "user" and line:
            return line if len(line) <= _TITLE_CHARS else line[:_TITLE_CHARS].rsplit(" ", 1)[0] + "…"
    return None
