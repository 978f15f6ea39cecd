"""Reading a `db export` file, one conversation at a time; an error names its line and field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from chatcache.conversations.tree import Conversation, Item, Turn
from chatcache.errors import ChatcacheError, InvalidRequestError
from chatcache.transfer.draft import Ancestry
from chatcache.transfer.format import (
    ExportCounts,
    ExportedConversation,
    ExportedKey,
    ExportEnd,
    decode_item,
    decode_turn,
    digest_of,
    to_conversation,
)

MAX_LINE_BYTES = 2**30
_LINES = ExportedConversation | ExportedKey | ExportEnd


class DamagedArchiveError(ChatcacheError):
    """The file is not an archive, or it was changed.

    The message names the file, the line and the field.
    """

    status = 400
    type = "invalid_request_error"
    code = "damaged_archive"


@dataclass(frozen=True, slots=True)
class ArchivedConversation:
    """One conversation of an archive, and the number of its (first) line."""

    line: int
    conversation: Conversation
    items: tuple[Item, ...]
    turns: tuple[Turn, ...]


class ArchiveReader:
    """Iterates over the conversations of a file; afterwards `end` is its last line.

    Raises: DamagedArchiveError.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._number = 0
        self._counts = ExportCounts()
        self.end = self._counts.end()

    def __iter__(self) -> Iterator[ArchivedConversation]:
        while True:
            data = self._next_line()
            line = self._decode(data)
            if isinstance(line, ExportEnd):
                self._check_end(line, "")
                return
            self._counts.add_line(data)
            if isinstance(line, ExportedKey):
                self._counts.num_keys += 1
            else:
                yield self._conversation(line)

    def _decode(self, data: bytes) -> ExportedConversation | ExportedKey | ExportEnd:
        try:
            line: ExportedConversation | ExportedKey | ExportEnd = msgspec.json.decode(data, type=_LINES)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise self._decode_error(error) from None
        return line

    def _conversation(self, line: ExportedConversation) -> ArchivedConversation:
        if line.owner is None:
            raise self._damaged(
                "a conversation without an owner, as in an export of one owner: import that file over HTTP "
                "(POST /v1/conversations/import)",
                "owner",
            )
        items: dict[str, Item] = {}
        turns: dict[str, Turn] = {}
        try:
            for index, raw in enumerate(line.items):
                item = decode_item(raw, index)
                self._check_item(item, items, f"items[{index}]")
                items[item.id] = item
            for index, raw in enumerate(line.turns):
                turn = decode_turn(raw, index)
                self._check_turn(turn, turns, items, f"turns[{index}]")
                turns[turn.id] = turn
        except InvalidRequestError as error:
            raise self._damaged(error.message) from None
        if digest_of([*line.items, *line.turns]) != line.sha256:
            raise self._damaged("items and turns differ from those that were written", "sha256")
        leaf = line.conversation.active_leaf
        if leaf is not None and leaf not in items:
            raise self._damaged(f"there is no item {leaf!r}", "conversation.active_leaf")
        self._check_bases(items, turns)
        self._counts.add_conversation(len(items), len(turns))
        head = to_conversation(line.conversation, line.owner, line.rev if line.rev is not None else 1)
        return ArchivedConversation(self._number, head, tuple(items.values()), tuple(turns.values()))

    def _check_item(self, item: Item, before: dict[str, Item], field: str) -> None:
        if item.id in before:
            raise self._damaged(f"{item.id!r} appears twice", f"{field}.id")
        if item.parent_id is not None and item.parent_id not in before:
            raise self._damaged(f"no item {item.parent_id!r} comes before this one", f"{field}.parent_id")

    def _check_turn(self, turn: Turn, before: dict[str, Turn], items: dict[str, Item], field: str) -> None:
        if turn.id in before or turn.id in items:
            raise self._damaged(f"{turn.id!r} appears twice", f"{field}.id")

    def _check_bases(self, items: dict[str, Item], turns: dict[str, Turn]) -> None:
        bad = find_bad_base(items, turns)
        if bad is not None:
            raise self._damaged(f"{bad[1]!r} is no item above the response", f"turns[{bad[0]}].base_item_id")

    def _check_end(self, end: ExportEnd, prefix: str) -> None:
        expected = self._counts.end()
        for name in ExportEnd.__struct_fields__:
            stated, found = getattr(end, name), getattr(expected, name)
            if stated != found:
                raise self._damaged(f"states {stated}, but the lines above have {found}", f"{prefix}{name}")
        if self._file.read(1):
            self._number += 1
            raise self._damaged("something follows the end", "end")
        self.end = end

    def _next_line(self) -> bytes:
        self._number += 1
        data = self._file.readline(MAX_LINE_BYTES + 1)
        if not data:
            raise self._damaged("the file ends here, without its last line: it was cut short")
        if len(data) > MAX_LINE_BYTES:
            raise self._damaged(f"longer than {MAX_LINE_BYTES} bytes")
        if not data.endswith(b"\n"):
            raise self._damaged("the file ends within this line: it was cut short")
        return data

    def _decode_error(self, error: Exception) -> DamagedArchiveError:
        if isinstance(error, msgspec.ValidationError):
            message, _, path = str(error).partition(" - at `$")
            return self._damaged(f"{message[:1].lower()}{message[1:]}", path.rstrip("`").removeprefix("."))
        return self._damaged(f"not valid JSON: {error}")

    def _damaged(self, message: str, field: str = "") -> DamagedArchiveError:
        where = f"{self._name}: line {self._number}"
        text = f"{where}: {field}: {message}" if field else f"{where}: {message}"
        return DamagedArchiveError(text, param=field or None)


def find_bad_base(items: dict[str, Item], turns: dict[str, Turn]) -> tuple[int, str] | None:
    """Return the index and base of a turn whose base is not an ancestor, which would make a cycle of replies."""
    ancestry = Ancestry(tuple(items.values()))
    for index, turn in enumerate(turns.values()):
        base, parent = turn.base_item_id, turn.parent_id
        is_ancestor = base in items and parent in items and ancestry.is_on_path(base, parent)
        if base in items and not is_ancestor and (not parent or parent in items):
            return index, base
    return None
