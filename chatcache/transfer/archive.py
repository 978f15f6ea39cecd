"""Everything that a store holds as one file: every owner's conversations, under their own ids, message by message.

JSON, an object a line. The first says what the file is, the last that it is whole:

    {"archive": {"version": 1}}
    {"key": {..}}      who could come in; it opens nothing
    {"conversation": {"owner": .., "rev": .., "head": {..}, "num_items": 2, "num_turns": 1, "sha256": ..}}
    {"item": {..}} {"item": {..}} {"turn": {..}}      a line each; `sha256` is of these
    {"end": {"num_conversations": 1, "num_items": 2, "num_turns": 1, "sha256": ..}}      of all lines above

Equal stores give equal files. `portable.py` is what one owner takes along to another server: less, and under new ids.

Reading an archive back, one conversation at a time; what is wrong with one is named by its line and field.

An archive goes into a store: what it lacks is added, what it has stays. Doing it again changes nothing.

The SQLite file read while a server may write it: a copy of all of it, and what it holds at one moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Protocol

import msgspec
from msgspec import Meta

from chatcache.auth import KeyRecord
from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import IN_PROGRESS, INCOMPLETE, Conversation, ConversationTree, Item, Turn
from chatcache.errors import ChatcacheError, NotFoundError
from chatcache.transfer.format import (
    Ancestry,
    PortableHead,
    PortableItem,
    PortableTurn,
    ShortText,
    TimeS,
    item_of,
    turn_of,
)

VERSION: Literal[1] = 1
PAGE = 100

Count = Annotated[int, Meta(ge=0)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class ArchiveHeader(msgspec.Struct, frozen=True):
    version: Literal[1]


class ArchivedConversation(msgspec.Struct, frozen=True):
    """Announces the messages and the responses that follow, in this order."""

    owner: Annotated[str, Meta(max_length=256)]
    rev: Count
    head: PortableHead
    num_items: Count
    num_turns: Count
    sha256: Digest


class NamedKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """`keys.KeyRecord` without the digest, with which one could make session cookies."""

    id: ShortText
    tenant: ShortText
    created_at: TimeS
    user: ShortText = ""
    name: ShortText = ""
    is_admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None
    revoked_at: TimeS | None = None


class ArchiveEnd(msgspec.Struct, frozen=True):
    """`num_keys`: records of keys, which say who could come in and let nobody in."""

    num_conversations: Count
    num_items: Count
    num_turns: Count
    num_keys: Count
    sha256: Digest


class ArchiveLine(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line: exactly one of these is there."""

    archive: ArchiveHeader | None = None
    conversation: ArchivedConversation | None = None
    item: PortableItem | None = None
    turn: PortableTurn | None = None
    key: NamedKey | None = None
    end: ArchiveEnd | None = None


class ConversationSource(Protocol):
    """As much of a store as a copy of all of it needs.

    Raises: StoreUnavailableError, NotFoundError for what went meanwhile.
    """

    async def list_owners(self) -> Sequence[str]:
        """Whoever has a conversation, in order."""
        ...

    async def list_ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]: ...

    async def load(self, owner: str, conversation_id: str) -> ConversationTree: ...

    async def key_records(self) -> Sequence[KeyRecord]: ...


class Counts:
    """What went by, and its digest."""

    def __init__(self) -> None:
        self.num_conversations = 0
        self.num_items = 0
        self.num_turns = 0
        self.num_keys = 0
        self._sha256 = hashlib.sha256()

    def add(self, line: bytes) -> None:
        self._sha256.update(line)

    def end(self) -> ArchiveEnd:
        digest = self._sha256.hexdigest()
        return ArchiveEnd(self.num_conversations, self.num_items, self.num_turns, self.num_keys, digest)


async def write_archive(source: ConversationSource, write: Callable[[bytes], object]) -> ArchiveEnd:
    """Write all that a source holds, one conversation in memory at a time; each as it is at one moment."""
    counts = Counts()

    def put(line: bytes) -> None:
        counts.add(line)
        write(line)

    put(_line(ArchiveLine(archive=ArchiveHeader(VERSION))))
    for key in await source.key_records():
        counts.num_keys += 1
        put(_line(ArchiveLine(key=_portable(key, NamedKey))))
    async for tree in _every(source):
        lines = conversation_lines(tree)
        counts.num_conversations += 1
        counts.num_items += len(tree.items)
        counts.num_turns += len(tree.turns)
        for line in lines:
            put(line)
    end = counts.end()
    write(_line(ArchiveLine(end=end)))
    return end


def conversation_lines(tree: ConversationTree) -> list[bytes]:
    c = tree.conversation
    items = (ArchiveLine(item=_portable(item, PortableItem)) for item in tree.items.values())
    turns = (ArchiveLine(turn=_portable(turn, PortableTurn)) for _, turn in sorted(tree.turns.items()))
    members = [_line(line) for lines in (items, turns) for line in lines]
    head = PortableHead(c.id, c.created_at, c.updated_at, c.title, c.active_leaf, dict(c.metadata))
    digest = digest_of(members)
    announced = ArchivedConversation(c.owner, c.rev, head, len(tree.items), len(tree.turns), digest)
    return [_line(ArchiveLine(conversation=announced)), *members]


def digest_of(lines: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def conversation_of(archived: ArchivedConversation) -> Conversation:
    head = archived.head
    times = (head.created_at, head.updated_at)
    return Conversation(head.id, archived.owner, *times, head.title, head.active_leaf, archived.rev, head.metadata)


async def _every(source: ConversationSource) -> AsyncIterator[ConversationTree]:
    for owner in await source.list_owners():
        after: str | None = None
        while ids := await source.list_ids(owner, PAGE, after):
            for conversation_id in ids:
                try:
                    tree = await source.load(owner, conversation_id)
                except NotFoundError:  # deleted meanwhile
                    continue
                yield tree
            after = ids[-1]


def _portable(member: object, kind: Callable[..., Any]) -> Any:
    return kind(**{name: getattr(member, name) for name in kind.__struct_fields__})  # type: ignore[attr-defined]


def _line(line: ArchiveLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


MAX_LINE_BYTES = 2**28
_KINDS = ("archive", "conversation", "item", "turn", "key", "end")


class DamagedArchiveError(ChatcacheError):
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
    """The conversations of a file, and afterwards its `end`. Holds one conversation. Raises: DamagedArchiveError."""

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

    def _damaged(self, message: str, field: str = "") -> DamagedArchiveError:
        where = f"{self._name}: line {self._number}"
        return DamagedArchiveError(
            f"{where}: {field}: {message}" if field else f"{where}: {message}", param=field or None
        )


def _kind_of(line: ArchiveLine) -> str:
    return next(kind for kind in _KINDS if getattr(line, kind) is not None)


class Restored:
    """What became of an archive's conversations."""

    def __init__(self) -> None:
        self.num_created = 0
        self.num_extended = 0
        self.num_unchanged = 0
        self.num_refused = 0
        self.num_items = 0


def check_archive(path: Path) -> ArchiveEnd:
    """Read all of a file and change nothing. Raises: DamagedArchiveError, OSError."""
    with path.open("rb") as file:
        reader = ArchiveReader(file, str(path))
        for _ in reader:
            pass
    return reader.end


async def restore(store: ConversationStore, path: Path, refuse: Callable[[str], object]) -> Restored:
    """Merge every conversation of a checked file, each all or nothing. `refuse` hears of those that cannot be.

    Raises: DamagedArchiveError, OSError, StoreUnavailableError; what came before is stored then.
    """
    done = Restored()
    with path.open("rb") as file:
        for archived in ArchiveReader(file, str(path)):
            try:
                await _merge(store, archived, done)
            except NotFoundError as error:
                done.num_refused += 1
                refuse(f"{path}: line {archived.line}: {error.message}")
    return done


async def _merge(store: ConversationStore, archived: Archived, done: Restored) -> None:
    turns = [replace(turn, status=INCOMPLETE) if turn.status == IN_PROGRESS else turn for turn in archived.turns]
    merged = await store.merge(archived.conversation, archived.items, turns)
    done.num_items += merged.num_items
    if merged.is_new:
        done.num_created += 1
    elif merged.num_items or merged.num_turns:
        done.num_extended += 1
    else:
        done.num_unchanged += 1
