"""Everything that a store holds as one file: every owner's conversations, under their own ids, message by message.

JSON, an object a line. The first says what the file is, the last that it is whole:

    {"archive": {"version": 1}}
    {"key": {..}}      who could come in; it opens nothing
    {"conversation": {"owner": .., "rev": .., "head": {..}, "num_items": 2, "num_turns": 1, "sha256": ..}}
    {"item": {..}} {"item": {..}} {"turn": {..}}      a line each; `sha256` is of these
    {"end": {"num_conversations": 1, "num_items": 2, "num_turns": 1, "sha256": ..}}      of all lines above

Equal stores give equal files. `portable.py` is what one owner takes along to another server: less, and under new ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from chatcache.chat.keys import KeyRecord
from chatcache.chat.portable import PortableHead, PortableItem, PortableTurn, ShortText, TimeS
from chatcache.chat.tree import Conversation, ConversationTree
from chatcache.errors import NotFound

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
    """As much of a store as a copy of all of it needs. Raises: StoreUnavailable, NotFound for what went meanwhile."""

    async def owners(self) -> Sequence[str]:
        """Whoever has a conversation, in order."""
        ...

    async def ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]: ...

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
    for owner in await source.owners():
        after: str | None = None
        while ids := await source.ids(owner, PAGE, after):
            for conversation_id in ids:
                try:
                    tree = await source.load(owner, conversation_id)
                except NotFound:  # deleted meanwhile
                    continue
                yield tree
            after = ids[-1]


def _portable(member: object, kind: Callable[..., Any]) -> Any:
    return kind(**{name: getattr(member, name) for name in kind.__struct_fields__})  # type: ignore[attr-defined]


def _line(line: ArchiveLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
