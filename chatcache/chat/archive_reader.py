"""Reading an archive back, one conversation at a time; what is wrong with one is named by its line and field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from chatcache.chat.archive import ArchivedConversation, ArchiveEnd, ArchiveLine, Counts, conversation_of, digest_of
from chatcache.chat.drafts import Ancestry
from chatcache.chat.portable import item_of, turn_of
from chatcache.chat.tree import Conversation, Item, Turn
from chatcache.errors import ChatcacheError

MAX_LINE_BYTES = 2**28
_KINDS = ("archive", "conversation", "item", "turn", "key", "end")


class DamagedArchive(ChatcacheError):
    """The file is no archive, or not as it was written. The message names the file, the line and the field."""

    status = 400
    type = "invalid_request_error"
    code = "damaged_archive"


@dataclass(frozen=True, slots=True)
class Archived:
    """One conversation of an archive, and the line that announces it."""

    line: int
    conversation: Conversation
    items: tuple[Item, ...]
    turns: tuple[Turn, ...]


class ArchiveReader:
    """The conversations of a file, and afterwards its `end`. Holds one conversation. Raises: DamagedArchive."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._number = 0
        self._counts = Counts()
        self.end = ArchiveEnd(0, 0, 0, 0, "")  # what the last line says, once it has been read

    def __iter__(self) -> Iterator[Archived]:
        if self._next()[1].archive is None:
            raise self._damaged("an archive begins otherwise", "archive")
        while True:
            expected = self._counts.end()
            _, line = self._next()
            if line.end is not None:
                self._check_end(line.end, expected)
                return
            if line.key is not None:
                self._counts.num_keys += 1
            elif line.conversation is not None:
                yield self._members(line.conversation)
            else:
                raise self._damaged(f"{_kind_of(line)!r} outside a conversation", _kind_of(line))

    def _members(self, announced: ArchivedConversation) -> Archived:
        first, members = self._number, []
        items: dict[str, Item] = {}
        for at in range(announced.num_items):
            data, line = self._next()
            if line.item is None:
                raise self._damaged(f"item {at + 1} of {announced.num_items} is missing", _kind_of(line))
            item = item_of(line.item)
            self._check_item(item, items)
            items[item.id] = item
            members.append(data)
        turns: dict[str, Turn] = {}
        for at in range(announced.num_turns):
            data, line = self._next()
            if line.turn is None:
                raise self._damaged(f"turn {at + 1} of {announced.num_turns} is missing", _kind_of(line))
            if line.turn.id in turns or line.turn.id in items:
                raise self._damaged(f"{line.turn.id!r} appears twice", "turn.id")
            turns[line.turn.id] = turn_of(line.turn)
            members.append(data)
        if digest_of(members) != announced.sha256:
            self._number = first
            raise self._damaged(f"the {len(members)} lines below are not what was written", "conversation.sha256")
        leaf = announced.head.active_leaf
        if leaf is not None and leaf not in items:
            self._number = first
            raise self._damaged(f"there is no item {leaf!r}", "conversation.head.active_leaf")
        self._check_bases(first, items, turns)
        self._counts.num_conversations += 1
        self._counts.num_items += len(items)
        self._counts.num_turns += len(turns)
        return Archived(first, conversation_of(announced), tuple(items.values()), tuple(turns.values()))

    def _check_item(self, item: Item, above: dict[str, Item]) -> None:
        if item.id in above:
            raise self._damaged(f"{item.id!r} appears twice", "item.id")
        if item.parent_id is not None and item.parent_id not in above:
            raise self._damaged(f"no item {item.parent_id!r} comes before this one", "item.parent_id")

    def _check_bases(self, first: int, items: dict[str, Item], turns: dict[str, Turn]) -> None:
        """Who follows replies to what they extend must get to an end."""
        ancestry = Ancestry(tuple(items.values()))
        for at, turn in enumerate(turns.values()):
            base, parent = turn.base_item_id, turn.parent_id
            is_below = base in items and parent in items and ancestry.is_on_path(base, parent)
            if base in items and not is_below and (not parent or parent in items):
                self._number = first + len(items) + 1 + at
                raise self._damaged(f"{base!r} is no item above the response", "turn.base_item_id")

    def _check_end(self, end: ArchiveEnd, expected: ArchiveEnd) -> None:
        for name in ArchiveEnd.__struct_fields__:
            told, found = getattr(end, name), getattr(expected, name)
            if told != found:
                raise self._damaged(f"says {told}, but what is above has {found}", f"end.{name}")
        if self._file.read(1):
            self._number += 1
            raise self._damaged("something follows the end", "end")
        self.end = end

    def _next(self) -> tuple[bytes, ArchiveLine]:
        self._number += 1
        data = self._file.readline(MAX_LINE_BYTES + 1)
        if not data:
            raise self._damaged("the file ends here, without its last line: it was cut short")
        if len(data) > MAX_LINE_BYTES:
            raise self._damaged(f"longer than {MAX_LINE_BYTES} bytes")
        if not data.endswith(b"\n"):
            raise self._damaged("the file ends within this line: it was cut short")
        try:
            line = msgspec.json.decode(data, type=ArchiveLine)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$")
            raise self._damaged(f"{message[:1].lower()}{message[1:]}", path.rstrip("`").removeprefix(".")) from None
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self._damaged(f"not valid JSON: {error}") from None
        num_kinds = sum(getattr(line, kind) is not None for kind in _KINDS)
        if num_kinds != 1:
            raise self._damaged(f"holds {num_kinds} of {', '.join(_KINDS)}; it must be one")
        if line.end is None:
            self._counts.add(data)
        return data, line

    def _damaged(self, message: str, field: str = "") -> DamagedArchive:
        where = f"{self._name}: line {self._number}"
        return DamagedArchive(f"{where}: {field}: {message}" if field else f"{where}: {message}", param=field or None)


def _kind_of(line: ArchiveLine) -> str:
    return next(kind for kind in _KINDS if getattr(line, kind) is not None)
