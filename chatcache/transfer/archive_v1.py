"""Reader of `db export` files of version 1, which have one message per line.

Nothing writes them any more.

{"archive": {"version": 1}}
{"key": {..}}
{"conversation": {"owner": .., "rev": .., "head": {..}, "num_items": 2, "num_turns": 1, "sha256": ..}}
{"item": {..}} {"item": {..}} {"turn": {..}}      one per line; `sha256` covers these lines
{"end": {"num_conversations": 1, "num_items": 2, "num_turns": 1, "num_keys": 0, "sha256": ..}}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from chatcache.conversations.tree import Item, Turn
from chatcache.transfer.archive_reader import ArchivedConversation, ArchiveReader, find_bad_base
from chatcache.transfer.format import (
    VERSION,
    Count,
    Digest,
    ExportedHead,
    ExportedItem,
    ExportedTurn,
    ExportEnd,
    KeyEntry,
    to_conversation,
    to_item,
    to_turn,
)

HEADER = b'{"archive":'
_KINDS = ("archive", "conversation", "item", "turn", "key", "end")


class HeaderV1(msgspec.Struct, frozen=True):
    """The first line."""

    version: Literal[1]


class ConversationV1(msgspec.Struct, frozen=True):
    """Announces the messages and then the responses that follow."""

    owner: Annotated[str, Meta(max_length=256)]
    rev: Count
    head: ExportedHead
    num_items: Count
    num_turns: Count
    sha256: Digest


class EndV1(msgspec.Struct, frozen=True):
    """The last line."""

    num_conversations: Count
    num_items: Count
    num_turns: Count
    num_keys: Count
    sha256: Digest


class LineV1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line: exactly one field is set."""

    archive: HeaderV1 | None = None
    conversation: ConversationV1 | None = None
    item: ExportedItem | None = None
    turn: ExportedTurn | None = None
    key: KeyEntry | None = None
    end: EndV1 | None = None


class ArchiveReaderV1(ArchiveReader):
    """Iterates over the conversations of a version 1 file. Raises: DamagedArchiveError."""

    def __iter__(self) -> Iterator[ArchivedConversation]:
        if self._next()[1].archive is None:
            raise self._damaged("the first line of an archive is missing", "archive")
        while True:
            _, line = self._next()
            if line.end is not None:
                counts = [getattr(line.end, name) for name in EndV1.__struct_fields__]
                self._check_end(ExportEnd(VERSION, *counts), "end.")
                return
            if line.key is not None:
                self._counts.num_keys += 1
            elif line.conversation is not None:
                yield self._members(line.conversation)
            else:
                raise self._damaged(f"{_kind_of(line)!r} outside a conversation", _kind_of(line))

    def _members(self, announced: ConversationV1) -> ArchivedConversation:
        first = self._number
        members: list[bytes] = []
        items: dict[str, Item] = {}
        for number in range(announced.num_items):
            data, line = self._next()
            if line.item is None:
                raise self._damaged(f"item {number + 1} of {announced.num_items} is missing", _kind_of(line))
            item = to_item(line.item)
            self._check_item(item, items, "item")
            items[item.id] = item
            members.append(data)
        turns: dict[str, Turn] = {}
        for number in range(announced.num_turns):
            data, line = self._next()
            if line.turn is None:
                raise self._damaged(f"turn {number + 1} of {announced.num_turns} is missing", _kind_of(line))
            turn = to_turn(line.turn)
            self._check_turn(turn, turns, items, "turn")
            turns[turn.id] = turn
            members.append(data)
        self._check_members(first, announced, items, turns, members)
        self._counts.add_conversation(len(items), len(turns))
        head = to_conversation(announced.head, announced.owner, announced.rev)
        return ArchivedConversation(first, head, tuple(items.values()), tuple(turns.values()))

    def _check_members(
        self,
        first: int,
        announced: ConversationV1,
        items: dict[str, Item],
        turns: dict[str, Turn],
        members: Sequence[bytes],
    ) -> None:
        last = self._number
        self._number = first
        if hashlib.sha256(b"".join(members)).hexdigest() != announced.sha256:
            raise self._damaged(
                f"the {len(members)} lines below differ from those that were written", "conversation.sha256"
            )
        leaf = announced.head.active_leaf
        if leaf is not None and leaf not in items:
            raise self._damaged(f"there is no item {leaf!r}", "conversation.head.active_leaf")
        bad = find_bad_base(items, turns)
        if bad is not None:
            self._number = first + len(items) + 1 + bad[0]
            raise self._damaged(f"{bad[1]!r} is no item above the response", "turn.base_item_id")
        self._number = last

    def _next(self) -> tuple[bytes, LineV1]:
        data = self._next_line()
        try:
            line = msgspec.json.decode(data, type=LineV1)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self._decode_error(error) from None
        num_kinds = sum(getattr(line, kind) is not None for kind in _KINDS)
        if num_kinds != 1:
            raise self._damaged(f"has {num_kinds} of {', '.join(_KINDS)}; it must have one")
        if line.end is None:
            self._counts.add_line(data)
        return data, line


def _kind_of(line: LineV1) -> str:
    return next(kind for kind in _KINDS if getattr(line, kind) is not None)
