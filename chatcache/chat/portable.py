"""A conversation as a file: everything that is stored of it, so that another server can go on with it token by token.

One JSON object a conversation; several are one to a line. Ids are the exporting server's own; whoever reads the file
gives them new ones (`adoption`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from chatcache.chat.tree import Conversation, ConversationTree, Item, ReplyParts, Turn, Usage

KIND = "conversation.export"
END = "conversation.export.end"
VERSION: Literal[1] = 1
_LAST_TIME_S = 253_402_300_799  # the end of the year 9999

Id = Annotated[str, Meta(min_length=1, max_length=128)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TimeS = Annotated[float, Meta(ge=0, le=_LAST_TIME_S)]
ShortText = Annotated[str, Meta(max_length=512)]


class PortableHead(msgspec.Struct, frozen=True):
    """The conversation itself. `rev` counts the changes on one server, so it stays there."""

    id: Id
    created_at: TimeS
    updated_at: TimeS
    title: Annotated[str, Meta(max_length=200)] = ""
    active_leaf: Id | None = None
    metadata: Annotated[dict[ShortText, ShortText], Meta(max_length=16)] = {}


class PortableItem(msgspec.Struct, frozen=True):
    """`tree.Item`."""

    id: Id
    parent_id: Id | None
    role: Literal["system", "user", "assistant", "tool"]
    text: str
    token_ids: tuple[TokenId, ...] = ()
    response_id: Id | None = None
    index: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    status: Literal["completed", "incomplete", "cancelled", "failed", "in_progress"] = "completed"
    finish_reason: ShortText | None = None
    created_at: TimeS = 0.0
    parts: ReplyParts = ReplyParts()


class PortableTurn(msgspec.Struct, frozen=True):
    """`tree.Turn`."""

    id: Id
    parent_id: Annotated[str, Meta(max_length=128)]
    model: ShortText
    created_at: TimeS
    base_item_id: Id | None = None
    prompt_ids: tuple[TokenId, ...] = ()
    instructions: str | None = None
    previous_response_id: Id | None = None
    status: Literal["completed", "incomplete", "cancelled", "failed", "in_progress", "deleted"] = "completed"
    usage: Usage | None = None
    echo: dict[str, Any] = {}


class PortableConversation(msgspec.Struct, frozen=True):
    """The file. `tokenizer` (`Tokenizer.digest`) says whose token ids these are."""

    object: Literal["conversation.export"]
    version: Literal[1]
    tokenizer: str
    conversation: PortableHead
    items: list[msgspec.Raw]
    turns: list[msgspec.Raw]


def portable(tree: ConversationTree, items: Sequence[Item], tokenizer_digest: str) -> bytes:
    """Encode `items` of a tree, parents first, with the responses that they belong to."""
    kept = {item.id for item in items}
    c = tree.conversation
    leaf = c.active_leaf if c.active_leaf in kept else items[-1].id if items else None
    file = PortableConversation(
        object="conversation.export",
        version=VERSION,
        tokenizer=tokenizer_digest,
        conversation=PortableHead(c.id, c.created_at, c.updated_at, c.title, leaf, dict(c.metadata)),
        items=[msgspec.Raw(msgspec.json.encode(_portable_item(item))) for item in items],
        turns=[msgspec.Raw(msgspec.json.encode(_portable_turn(turn))) for turn in _turns_of(tree, kept)],
    )
    return msgspec.json.encode(file)


def end_of_export(num_conversations: int) -> bytes:
    """The last line of many: a file without it was cut short."""
    return msgspec.json.encode({"object": END, "version": VERSION, "num_conversations": num_conversations})


def item_of(item: PortableItem) -> Item:
    return Item(**{name: getattr(item, name) for name in PortableItem.__struct_fields__})


def turn_of(turn: PortableTurn) -> Turn:
    return Turn(**{name: getattr(turn, name) for name in PortableTurn.__struct_fields__})


def head_of(head: PortableHead, owner: str) -> Conversation:
    return Conversation(
        head.id, owner, head.created_at, head.updated_at, head.title, head.active_leaf, rev=1, metadata=head.metadata
    )


def _turns_of(tree: ConversationTree, kept: set[str]) -> list[Turn]:
    """Responses whose place in the tree is among what is kept, the oldest first."""
    used = {tree.items[item_id].response_id for item_id in kept}
    found = (turn for turn in tree.turns.values() if turn.parent_id in kept or (not turn.parent_id and turn.id in used))
    return sorted(found, key=lambda turn: (turn.created_at, turn.id))


def _portable_item(item: Item) -> PortableItem:
    return PortableItem(**{name: getattr(item, name) for name in PortableItem.__struct_fields__})


def _portable_turn(turn: Turn) -> PortableTurn:
    return PortableTurn(**{name: getattr(turn, name) for name in PortableTurn.__struct_fields__})
