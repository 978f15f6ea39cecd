"""Export of a whole store to one file, and restore of such a file into a store.

The conversations of all owners keep their ids, owners and revisions. A restore adds what the store lacks and changes
nothing that it has, so restoring again changes nothing. The file format is that of `format`, with owners.

Files of version 1 have one message per line. They are still read, but not written:

{"archive": {"version": 1}}
{"key": {..}}
{"conversation": {"owner": .., "rev": .., "head": {..}, "num_items": 2, "num_turns": 1, "sha256": ..}}
{"item": {..}} {"item": {..}} {"turn": {..}}      one per line; `sha256` covers these lines
{"end": {"num_conversations": 1, "num_items": 2, "num_turns": 1, "num_keys": 0, "sha256": ..}}

Files are read one conversation at a time; an error names its line and field.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Protocol

import msgspec
from msgspec import Meta

from chatcache.auth import KeyRecord
from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import IN_PROGRESS, INCOMPLETE, Conversation, ConversationTree, Item, Turn
from chatcache.errors import ChatcacheError, InvalidRequestError, NotFoundError
from chatcache.transfer.draft import Ancestry
from chatcache.transfer.format import (
    VERSION,
    Count,
    Digest,
    ExportCounts,
    ExportedConversation,
    ExportedHead,
    ExportedItem,
    ExportedKey,
    ExportedTurn,
    ExportEnd,
    ExportWriter,
    KeyEntry,
    decode_item,
    decode_turn,
    digest_of,
    to_conversation,
    to_item,
    to_turn,
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
    """Return the index and `base_item_id` of the first invalid turn, or None if there is none.

    The base of a turn, the reply that its prompt extends, must be on the path to the turn's parent: otherwise replies
    could extend each other in a cycle.
    """
    ancestry = Ancestry(tuple(items.values()))
    for index, turn in enumerate(turns.values()):
        base, parent = turn.base_item_id, turn.parent_id
        is_ancestor = base in items and parent in items and ancestry.is_on_path(base, parent)
        if base in items and not is_ancestor and (not parent or parent in items):
            return index, base
    return None


HEADER = b'{"archive":'
_KINDS = ("archive", "conversation", "item", "turn", "key", "end")


class HeaderV1(msgspec.Struct, frozen=True):
    """The first line of a version 1 file."""

    version: Literal[1]


class ConversationV1(msgspec.Struct, frozen=True):
    """The line of a version 1 file before the messages and responses of a conversation."""

    owner: Annotated[str, Meta(max_length=256)]
    rev: Count
    head: ExportedHead
    num_items: Count
    num_turns: Count
    sha256: Digest


class EndV1(msgspec.Struct, frozen=True):
    """The last line of a version 1 file, with totals."""

    num_conversations: Count
    num_items: Count
    num_turns: Count
    num_keys: Count
    sha256: Digest


class LineV1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a version 1 file: exactly one field is set."""

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


_PAGE = 100


class ConversationSource(Protocol):
    """The methods of a store that an export of all conversations needs.

    Raises: StoreUnavailableError; NotFoundError for a conversation that was deleted meanwhile.
    """

    async def list_owners(self) -> Sequence[str]:
        """Return every owner of a conversation, in order."""
        ...

    async def list_ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]: ...

    async def load(self, owner: str, conversation_id: str) -> ConversationTree: ...

    async def key_records(self) -> Sequence[KeyRecord]: ...


class RestoreCounts:
    """The number of conversations of an archive by outcome, and of messages added."""

    def __init__(self) -> None:
        self.num_created = 0
        self.num_extended = 0
        self.num_unchanged = 0
        self.num_refused = 0
        self.num_items = 0


async def write_archive(source: ConversationSource, write: Callable[[bytes], object]) -> ExportEnd:
    """Write all conversations of a source, one in memory at a time, each as it is at one moment."""
    writer = ExportWriter(None, has_owners=True)
    for key in await source.key_records():
        write(writer.key(key))
    async for tree in _all_trees(source):
        write(writer.conversation(tree))
    end, line = writer.end()
    write(line)
    return end


def check_archive(path: Path) -> ExportEnd:
    """Read a whole file without changing anything. Raises: DamagedArchiveError, OSError."""
    with path.open("rb") as file:
        reader = _open_reader(file, str(path))
        for _ in reader:
            pass
    return reader.end


async def restore(store: ConversationStore, path: Path, on_refused: Callable[[str], object]) -> RestoreCounts:
    """Merge every conversation of a checked file, each all or nothing.

    `on_refused` receives a message for each conversation that cannot be merged.
    Raises: DamagedArchiveError, OSError, StoreUnavailableError; conversations merged before stay stored.
    """
    counts = RestoreCounts()
    with path.open("rb") as file:
        for archived in _open_reader(file, str(path)):
            try:
                await _merge(store, archived, counts)
            except NotFoundError as error:
                counts.num_refused += 1
                on_refused(f"{path}: line {archived.line}: {error.message}")
    return counts


def _open_reader(file: BinaryIO, name: str) -> ArchiveReader:
    """Return the reader of the file's version."""
    is_v1 = file.read(len(HEADER)) == HEADER
    file.seek(0)
    return ArchiveReaderV1(file, name) if is_v1 else ArchiveReader(file, name)


async def _all_trees(source: ConversationSource) -> AsyncIterator[ConversationTree]:
    for owner in await source.list_owners():
        after: str | None = None
        while ids := await source.list_ids(owner, _PAGE, after):
            for conversation_id in ids:
                try:
                    tree = await source.load(owner, conversation_id)
                except NotFoundError:  # deleted meanwhile
                    continue
                yield tree
            after = ids[-1]


async def _merge(store: ConversationStore, archived: ArchivedConversation, counts: RestoreCounts) -> None:
    turns = [replace(turn, status=INCOMPLETE) if turn.status == IN_PROGRESS else turn for turn in archived.turns]
    merged = await store.merge(archived.conversation, archived.items, turns)
    counts.num_items += merged.num_items
    if merged.is_new:
        counts.num_created += 1
    elif merged.num_items or merged.num_turns:
        counts.num_extended += 1
    else:
        counts.num_unchanged += 1
