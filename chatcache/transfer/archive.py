"""Export of a whole store to one file, and restore of such a file into a store.

The conversations of all owners keep their ids, owners and revisions. A restore adds what the store lacks and changes
nothing that it has, so restoring again changes nothing. The file format is that of `format`, with owners.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol

from chatcache.auth import KeyRecord
from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import IN_PROGRESS, INCOMPLETE, ConversationTree
from chatcache.errors import NotFoundError
from chatcache.transfer.archive_reader import ArchivedConversation, ArchiveReader
from chatcache.transfer.archive_v1 import HEADER, ArchiveReaderV1
from chatcache.transfer.format import ExportEnd, ExportWriter

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
