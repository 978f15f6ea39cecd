"""An archive goes into a store: what it lacks is added, what it has stays. Doing it again changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from chatcache.chat.archive import ArchiveEnd
from chatcache.chat.archive_reader import Archived, ArchiveReader
from chatcache.chat.store import ConversationStore
from chatcache.chat.tree import IN_PROGRESS, INCOMPLETE
from chatcache.errors import NotFound


class Restored:
    """What became of an archive's conversations."""

    def __init__(self) -> None:
        self.num_created = 0
        self.num_extended = 0
        self.num_unchanged = 0
        self.num_refused = 0
        self.num_items = 0


def check_archive(path: Path) -> ArchiveEnd:
    """Read all of a file and change nothing. Raises: DamagedArchive, OSError."""
    with path.open("rb") as file:
        reader = ArchiveReader(file, str(path))
        for _ in reader:
            pass
    return reader.end


async def restore(store: ConversationStore, path: Path, refuse: Callable[[str], object]) -> Restored:
    """Merge every conversation of a checked file, each all or nothing. `refuse` hears of those that cannot be.

    Raises: DamagedArchive, OSError, StoreUnavailable; what came before is stored then.
    """
    done = Restored()
    with path.open("rb") as file:
        for archived in ArchiveReader(file, str(path)):
            try:
                await _merge(store, archived, done)
            except NotFound as error:
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
