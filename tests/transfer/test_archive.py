"""Export and restore of a whole store: equal stores give equal bytes; damage is named and changes nothing."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import random
import sqlite3
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chatcache.auth import new_key
from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import IN_PROGRESS, INCOMPLETE, Conversation, ConversationTree, Item, Turn
from chatcache.storage.redis import RedisStore
from chatcache.storage.sqlite import SqliteSnapshot, SqliteStore
from chatcache.transfer.archive import (
    ConversationSource,
    DamagedArchiveError,
    check_archive,
    restore,
    write_archive,
)
from chatcache.transfer.format import ExportWriter
from tests.support.generated_stores import OWNERS, everything, fill, full_tree, trees
from tests.support.redis_servers import RedisServer

V1 = Path(__file__).parent / "data" / "archive_v1.jsonl"
MAX_PEAK_BYTES = 2**20  # of 100,000 messages it was two thirds of that, and 190 MiB where all are kept


async def export(source: ConversationSource, path: Path) -> None:
    with path.open("wb") as file:
        await write_archive(source, file.write)


async def export_of(source: ConversationSource, path: Path) -> bytes:
    await export(source, path)
    return await asyncio.to_thread(path.read_bytes)


async def export_file(db: Path, path: Path) -> bytes:
    snapshot = SqliteSnapshot(db)
    try:
        return await export_of(snapshot, path)
    finally:
        await snapshot.close()


async def check_and_restore(store: ConversationStore, path: Path) -> tuple[int, int, int, int]:
    check_archive(path)
    refused: list[str] = []
    done = await restore(store, path, refused.append)
    assert len(refused) == done.num_refused
    return done.num_created, done.num_extended, done.num_unchanged, done.num_refused


def rows_of(db: Path) -> list[tuple[object, ...]]:
    """Return every row, in the order of the conversations."""
    connection = sqlite3.connect(db)
    found: list[tuple[object, ...]] = list(connection.execute("SELECT * FROM conversations ORDER BY id"))
    names = [name for _, name, *_ in connection.execute("PRAGMA table_info(items)") if name != "position"]
    found += connection.execute(f"SELECT {', '.join(names)} FROM items ORDER BY conversation_id, position")
    found += connection.execute("SELECT * FROM turns ORDER BY id")
    connection.close()
    return found


@pytest.mark.parametrize("num_conversations", [5, pytest.param(25, marks=pytest.mark.slow)])
async def test_archive_from_sqlite_to_redis_to_sqlite_is_byte_identical(
    num_conversations: int, tmp_path: Path, empty_redis: RedisServer
) -> None:
    first = SqliteStore(tmp_path / "first.db")
    await fill(first, 40 * num_conversations)
    before = [line async for line in everything(first)]
    await first.close()
    data = await export_file(tmp_path / "first.db", tmp_path / "a.jsonl")

    redis = RedisStore(empty_redis.url)
    assert await check_and_restore(redis, tmp_path / "a.jsonl") == (num_conversations, 0, 0, 0)
    assert [line async for line in everything(redis)] == before
    assert await export_of(redis, tmp_path / "b.jsonl") == data
    assert await check_and_restore(redis, tmp_path / "b.jsonl") == (0, 0, num_conversations, 0)  # once more: nothing
    assert await export_of(redis, tmp_path / "b.jsonl") == data
    await redis.close()

    last = SqliteStore(tmp_path / "last.db")
    assert await check_and_restore(last, tmp_path / "b.jsonl") == (num_conversations, 0, 0, 0)
    assert await check_and_restore(last, tmp_path / "b.jsonl") == (0, 0, num_conversations, 0)
    await last.close()
    assert await export_file(tmp_path / "last.db", tmp_path / "c.jsonl") == data
    assert rows_of(tmp_path / "last.db") == rows_of(tmp_path / "first.db")


async def test_archive_lists_keys_without_secrets(store: ConversationStore, tmp_path: Path) -> None:
    keyed = SqliteStore(tmp_path / "a.db")
    key, record = new_key("acme", "ada", "laptop", requests_per_minute=9)
    await keyed.keys.create(record)
    await fill(keyed, 40)
    await keyed.close()
    data = await export_file(tmp_path / "a.db", tmp_path / "a")
    named = json.loads(data.splitlines()[0])["key"]
    assert named["id"] == record.id and named["tenant"] == "acme" and named["requests_per_minute"] == 9
    digest = record.digest
    for secret in (key, key.split("_", 2)[2], digest.hex(), base64.b64encode(digest).decode()[:20]):
        assert secret.encode() not in data
    assert await check_and_restore(store, tmp_path / "a") == (1, 0, 0, 0)
    assert check_archive(tmp_path / "a").num_keys == 1


async def test_injected_bug_lost_token_is_detected_by_the_comparison(tmp_path: Path) -> None:
    """A store that loses one token of one message."""
    first, second = SqliteStore(tmp_path / "first.db"), SqliteStore(tmp_path / "second.db")
    for number, (conversation, items, turns) in enumerate(trees(200)):
        await first.merge(conversation, items, turns)
        if number == 2:
            at = next(at for at, item in enumerate(items) if len(item.token_ids) > 1)
            worse = Item(**{name: getattr(items[at], name) for name in Item.__slots__} | {"token_ids": (1,)})
            items[at] = worse
        await second.merge(conversation, items, turns)
    await first.close()
    await second.close()
    one = await export_file(tmp_path / "first.db", tmp_path / "a")
    assert await export_file(tmp_path / "second.db", tmp_path / "b") != one
    assert rows_of(tmp_path / "first.db") != rows_of(tmp_path / "second.db")


async def test_restore_keeps_stored_data_and_adds_missing_data(store: ConversationStore, tmp_path: Path) -> None:
    source = SqliteStore(tmp_path / "source.db")
    await fill(source, 120)
    await source.close()
    await export_file(tmp_path / "source.db", tmp_path / "a")
    (first, items, turns), *_ = trees(120)
    await store.merge(first, items[:10], [turn for turn in turns if turn.parent_id in {each.id for each in items[:10]}])
    await store.update(first.owner, first.id, title="kept", active_leaf=items[9].id)
    # An id of the file that is another owner's here: that conversation is refused, whole, and the others come.
    other, (taken, *_), _ = list(trees(120))[1]
    await store.create(Conversation("conv_else", "else", 1.0, 1.0), [Item(taken.id, None, "user", "mine")])
    assert await check_and_restore(store, tmp_path / "a") == (1, 1, 0, 1)
    tree = await store.load(first.owner, first.id)
    assert tree.conversation.title == "kept"
    assert set(tree.items) == {each.id for each in items} and set(tree.turns) == {each.id for each in turns}
    assert other.id not in await store.list_ids(other.owner, 100)
    assert await check_and_restore(store, tmp_path / "a") == (0, 0, 2, 1)


async def test_running_response_is_exported_and_restored_as_incomplete(
    store: ConversationStore, tmp_path: Path
) -> None:
    server = SqliteStore(tmp_path / "a.db")
    running = Turn("resp_1", "msg_1", "model", 1.0, status=IN_PROGRESS)
    await server.create(Conversation("conv_1", "me", 1.0, 1.0), [Item("msg_1", None, "user", "Hi")], running)
    data = await export_file(tmp_path / "a.db", tmp_path / "a")
    assert (await server.load("me", "conv_1")).turns["resp_1"].status == IN_PROGRESS  # nothing was changed
    assert b'"status":"in_progress"' in data
    assert await check_and_restore(store, tmp_path / "a") == (1, 0, 0, 0)
    assert (await store.load("me", "conv_1")).turns["resp_1"].status == INCOMPLETE
    second = SqliteStore(tmp_path / "a.db", server_may_run=True)
    assert await check_and_restore(second, tmp_path / "a") == (0, 0, 1, 0)
    assert (await server.load("me", "conv_1")).turns["resp_1"].status == IN_PROGRESS
    await second.close()
    await server.close()


def _edited(number: int, change: Callable[[dict[str, Any]], object]) -> Callable[[list[bytes]], object]:
    """Return a function that changes one line and encodes it as the exporter does."""

    def edit(lines: list[bytes]) -> None:
        line = msgspec.json.decode(lines[number - 1])
        change(line)
        lines[number - 1] = msgspec.json.encode(line) + b"\n"

    return edit


Damages = dict[str, tuple[Callable[[list[bytes]], object], str]]

DAMAGED: Damages = {
    "another number": (
        _edited(1, lambda line: line["items"][1].update(token_ids=[1, "2"])),
        "line 1: items[1].token_ids[1]: ",
    ),
    "a negative token": (
        _edited(1, lambda line: line["items"][1].update(token_ids=[-1])),
        "line 1: items[1].token_ids[0]: ",
    ),
    "another text": (_edited(1, lambda line: line["items"][1].update(text="!")), "line 1: sha256: "),
    "another owner": (_edited(1, lambda line: line.update(owner="x")), "line 4: sha256: "),
    "no owner": (_edited(1, lambda line: line.pop("owner")), "line 1: owner: "),
    "no parent": (_edited(1, lambda line: line["items"][1].update(parent_id="x")), "line 1: items[1].parent_id: "),
    "a wrong kind": (_edited(1, lambda line: line.update(object="x")), "line 1: object: "),
    "no JSON": (lambda lines: lines.__setitem__(1, b"{\n"), "line 2: not valid JSON"),
    "no UTF-8": (lambda lines: lines.__setitem__(1, lines[1].replace(b"msg", b"\xffsg", 1)), "line 2: "),
    "an item gone": (_edited(1, lambda line: line["items"].pop(0)), "line 1: items[0].parent_id: "),
    "two items swapped": (
        _edited(1, lambda line: line["items"].insert(0, line["items"].pop(1))),
        "line 1: items[0].parent_id: ",
    ),
    "an item twice": (_edited(1, lambda line: line["items"].append(line["items"][0])), "line 1: items[40].id: "),
    "a turn gone": (_edited(1, lambda line: line["turns"].pop()), "line 1: sha256: "),
    "a turn with the id of an item": (
        _edited(1, lambda line: line["turns"][3].update(id=line["items"][0]["id"])),
        "line 1: turns[3].id: ",
    ),
    "one conversation gone": (lambda lines: lines.pop(1), "line 3: num_conversations: "),
    "the end gone": (lambda lines: lines.pop(), "cut short"),
    "cut within a line": (lambda lines: lines.__setitem__(-1, lines[-1][:20]), "cut short"),
    "more after the end": (lambda lines: lines.append(b"{}\n"), "something follows the end"),
    "another version": (_edited(1, lambda line: line.update(version=3)), "line 1: version: "),
    "an end of another version": (_edited(4, lambda line: line.update(version=1)), "line 4: version: "),
    "no export": (lambda lines: lines.insert(0, b"{}\n"), "line 1: object missing required field `object`"),
    "empty": (lambda lines: lines.clear(), "line 1: "),
}
DAMAGED_V1: Damages = {
    "another number": (_edited(5, lambda line: line["item"].update(token_ids=[1, "2"])), "line 5: item.token_ids[1]: "),
    "a negative token": (_edited(5, lambda line: line["item"].update(token_ids=[-1])), "line 5: item.token_ids[0]: "),
    "another text": (_edited(5, lambda line: line["item"].update(text="!")), "line 3: conversation.sha256: "),
    "another owner": (_edited(3, lambda line: line["conversation"].update(owner="x")), "end.sha256: "),
    "no parent": (_edited(5, lambda line: line["item"].update(parent_id="x")), "line 5: item.parent_id: "),
    "a wrong kind": (_edited(5, lambda line: line.update(text={})), "line 5: "),
    "no JSON": (lambda lines: lines.__setitem__(5, b"{\n"), "line 6: not valid JSON"),
    "no UTF-8": (lambda lines: lines.__setitem__(5, lines[5].replace(b"msg", b"\xffsg", 1)), "line 6: "),
    "a line gone": (lambda lines: lines.pop(4), "line 5: item.parent_id: "),
    "two swapped": (lambda lines: lines.insert(3, lines.pop(4)), "line 4: item.parent_id: "),
    "one conversation gone": (lambda lines: lines.__delitem__(slice(2, 63)), "end.num_conversations: "),
    "the end gone": (lambda lines: lines.pop(), "cut short"),
    "cut within a line": (lambda lines: lines.__setitem__(-1, lines[-1][:20]), "cut short"),
    "more after the end": (lambda lines: lines.append(b"{}\n"), "something follows the end"),
    "another version": (_edited(1, lambda line: line["archive"].update(version=2)), "line 1: archive.version: "),
    "no header": (lambda lines: lines.pop(0), "line 1: "),
    "two headers": (lambda lines: lines.insert(1, lines[0]), "line 2: archive: "),
}
CASES = [
    *(pytest.param(2, edit, message, id=name) for name, (edit, message) in DAMAGED.items()),
    *(pytest.param(1, edit, message, id=f"{name}, version 1") for name, (edit, message) in DAMAGED_V1.items()),
]


@pytest.mark.parametrize(("version", "edit", "message"), CASES)
async def test_restore_of_a_damaged_file_names_line_and_field(
    version: int, edit: Callable[[list[bytes]], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    data = V1.read_bytes() if version == 1 else await _archive_of(path, 120)
    store = SqliteStore(tmp_path / "b.db")
    lines = data.splitlines(keepends=True)
    edit(lines)
    path.write_bytes(b"".join(lines))
    with pytest.raises(DamagedArchiveError) as refused:
        await check_and_restore(store, path)
    assert message in refused.value.message and str(path) in refused.value.message
    assert not [line async for line in everything(store)]
    await store.close()


@pytest.mark.parametrize("version", [1, 2])
async def test_check_archive_detects_every_flipped_bit_and_every_cut(version: int, tmp_path: Path) -> None:
    data = V1.read_bytes() if version == 1 else await _archive_of(tmp_path / "a", 40)
    generator = random.Random(8)
    for _ in range(200):
        at = generator.randrange(len(data))
        if generator.random() < 0.8:
            damaged = data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]
        else:
            damaged = data[:at]
        (tmp_path / "b").write_bytes(damaged)
        with pytest.raises(DamagedArchiveError):
            check_archive(tmp_path / "b")
    (tmp_path / "b").write_bytes(data)
    assert check_archive(tmp_path / "b").num_items == (86 if version == 1 else 40)


async def test_restore_reads_a_version_1_archive(store: ConversationStore, tmp_path: Path) -> None:
    """A file written by the first release candidate gives the same store, and the same new archive, as the original."""
    original = SqliteStore(tmp_path / "original.db")
    await fill(original, 80)
    tree = full_tree()
    await original.merge(tree.conversation, tuple(tree.items.values()), tuple(tree.turns.values()))
    assert await check_and_restore(store, V1) == (3, 0, 0, 0)
    end = check_archive(V1)
    assert (end.num_conversations, end.num_items, end.num_turns, end.num_keys) == (3, 86, 42, 1)
    owners = (*OWNERS, "me")
    restored = [line async for line in everything(store, owners)]
    running = repr(IN_PROGRESS)
    assert restored == [line.replace(running, repr(INCOMPLETE)) async for line in everything(original, owners)]
    assert await check_and_restore(store, V1) == (0, 0, 3, 0)
    await original.close()


async def test_db_import_refuses_the_export_of_one_owner(tmp_path: Path) -> None:
    writer = ExportWriter("digest")
    (tmp_path / "a").write_bytes(writer.conversation(full_tree()) + writer.end()[1])
    with pytest.raises(DamagedArchiveError, match="line 1: owner: a conversation without an owner"):
        check_archive(tmp_path / "a")


class KeepingSource:
    """An injected bug: a source that keeps every conversation that it has read."""

    def __init__(self, source: SqliteSnapshot) -> None:
        self.list_owners, self.list_ids, self.key_records, self._source = (
            source.list_owners,
            source.list_ids,
            source.key_records,
            source,
        )
        self.kept: list[ConversationTree] = []

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        self.kept.append(await self._source.load(owner, conversation_id))
        return self.kept[-1]


@pytest.mark.parametrize("num_items", [1_200, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.slow
async def test_archive_memory_does_not_grow_with_the_store(num_items: int, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db")
    await fill(store, num_items)
    await store.close()

    async def most_bytes(keeps_all: bool) -> int:
        snapshot = SqliteSnapshot(tmp_path / "a.db")
        gc.collect()
        tracemalloc.start()
        try:
            await export(KeepingSource(snapshot) if keeps_all else snapshot, tmp_path / "a")
            check_archive(tmp_path / "a")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            await snapshot.close()

    correct, injected = await most_bytes(keeps_all=False), await most_bytes(keeps_all=True)
    assert correct < MAX_PEAK_BYTES < injected


async def _archive_of(path: Path, num_items: int) -> bytes:
    store = SqliteStore(path.with_suffix(".db"))
    await fill(store, num_items)
    await store.close()
    return await export_file(path.with_suffix(".db"), path)
