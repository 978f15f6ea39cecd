"""Search in every store, against a plain reading of all texts; the index, against no index."""

from __future__ import annotations

import random
import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from chatcache.conversations.search import (
    MAX_COMPARED_MESSAGES,
    SearchHit,
    SearchQuery,
    iter_words,
)
from chatcache.conversations.store import ConversationStore, StoreUnusableError, encode_cursor
from chatcache.conversations.tree import Conversation, Item, plan_message_deletion
from chatcache.storage import sqlite_schema
from chatcache.storage.sqlite import SqliteStore

ALPHABET = [
    "cat",
    "cats",
    "catalogue",
    "dog",
    "Dög",
    "do",
    "你好",
    "好你",
    "你",
    "🎉",
    "e",
    "I'm",
    "x-y",
    "!",
    '"',
    "*",
    "AND",
]


def plain_words(text: str) -> list[str]:
    """Split into words independently (oracle), for the alphabet above."""
    out: list[str] = []
    current = ""
    for char in text.replace("ö", "o").lower():
        if char in "你好🎉":
            out += [current, char]
            current = ""
        elif char.isascii() and char.isalnum():
            current += char
        else:
            out.append(current)
            current = ""
    return [word for word in [*out, current] if word]


def matches(query: str, text: str) -> bool:
    """Check that every space-separated part is in the text as adjacent words; the last word may be a prefix."""
    have = plain_words(text)
    parts = [part for part in map(plain_words, query.split(" ")) if part]
    if not parts:
        return False
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        for at in range(len(have) - len(part) + 1):
            there = have[at : at + len(part)]
            if there == part or (is_last and there[:-1] == part[:-1] and there[-1].startswith(part[-1])):
                break
        else:
            return False
    return True


@pytest.mark.parametrize(
    ("num_steps", "num_queries"), [(120, 60), pytest.param(250, 150, marks=pytest.mark.slow)], ids=["small", "full"]
)
async def test_search_of_random_stores_equals_brute_force(
    num_steps: int, num_queries: int, store: ConversationStore
) -> None:
    """Random trees grow, are renamed, lose messages and are deleted: every query equals brute force, in order."""
    generator = random.Random(7)

    def text() -> str:
        return " ".join(generator.choices(ALPHABET, k=generator.randint(0, 6)))

    model: dict[str, dict[str, str]] = {}
    titles: dict[str, str] = {}
    for step in range(num_steps):
        kind = generator.random()
        if kind < 0.2 or not model:
            name = f"conv_{step}"
            titles[name], model[name] = text(), {}
            owner = "me" if generator.random() < 0.8 else "you"
            await store.create(Conversation(name, owner, 1.0, 1.0, titles[name]))
            if owner == "you":
                await store.append("you", name, [Item(f"their_{step}", None, "user", "cat dog 你好")])
                del titles[name], model[name]
            continue
        name = generator.choice(list(model))
        if kind < 0.7:
            item = Item(f"msg_{step}", generator.choice([None, *model[name]]), "user", text())
            model[name][item.id] = item.text
            await store.append("me", name, [item])
        elif kind < 0.8:
            titles[name] = text() or "none"
            await store.update("me", name, title=titles[name])
        elif kind < 0.9 and model[name]:
            gone = generator.choice(list(model[name]))
            del model[name][gone]
            await store.delete_messages("me", name, plan_message_deletion(await store.load("me", name), gone))
        elif kind > 0.95:
            del model[name], titles[name]
            await store.delete("me", name)
    order = [conversation.id for conversation in await store.list("me", 1000)]
    num_found = 0
    for _ in range(num_queries):
        query = " ".join(generator.choices([*ALPHABET, "ca", "c", "d"], k=generator.randint(1, 3)))
        expected = [c for c in order if any(matches(query, each) for each in (titles[c], *model[c].values()))]
        hits: list[SearchHit] = []
        after = None
        while page := await store.search("me", SearchQuery.parse(query), 4, after):
            hits += page
            after = encode_cursor(page[-1].conversation)
        assert [hit.conversation.id for hit in hits] == expected, query
        num_found += len(hits)
        for hit in hits:
            texts = model[hit.conversation.id]
            assert bool(hit.title_marks) == matches(query, titles[hit.conversation.id])
            assert (hit.item_id is not None) == any(matches(query, each) for each in texts.values())
            if hit.item_id is not None:
                assert matches(query, texts[hit.item_id]) and hit.snippet is not None and hit.snippet.marks
    assert num_found > num_queries


async def test_search_names_the_best_message(store: ConversationStore) -> None:
    await store.create(Conversation("conv", "me", 1.0, 1.0))
    texts = ["category category category", "one cat", "a cat and a cat", "cat, cat", "catalogue", "nothing"]
    items = [Item(f"m{at}", None, "user" if at % 2 else "assistant", text) for at, text in enumerate(texts)]
    await store.append("me", "conv", items)

    async def best(query: str) -> tuple[str | None, str | None]:
        (hit,) = await store.search("me", SearchQuery.parse(query), 5)
        return hit.item_id, hit.role

    assert await best("cat") == ("m3", "user")  # whole words before beginnings, more before fewer, then the newest
    assert await best("cate") == ("m0", "assistant")
    assert await best("catal") == ("m4", "assistant")
    assert await best("and cat") == ("m2", "assistant")
    await store.append("me", "conv", [Item(f"n{at}", None, "user", "one cat") for at in range(MAX_COMPARED_MESSAGES)])
    assert await best("cat") == (f"n{MAX_COMPARED_MESSAGES - 1}", "user")  # only the newest are compared


@pytest.mark.parametrize(
    "query",
    [
        '"',
        "'; DROP TABLE items; --",
        "a AND OR NOT NEAR(a b, 2)",
        "title_words : cat",
        "^cat - {x y}: *",
        "((((((",
        "%_\\",
        "\x00",
        "🏳️‍🌈",
        "\u202e\ufeff",
        "ｃａｔ",
        " ".join(f"{number:x}" for number in range(1000)),
        "x" * 4096,
        "你" * 2000,
        "½ № ﷺ ㍿ 𝕮𝖆𝖙 İ ß",
    ],
)
async def test_search_with_hostile_queries_is_safe(store: ConversationStore, query: str) -> None:
    await store.create(Conversation("conv", "me", 1.0, 1.0, "½ 𝕮𝖆𝖙"))
    await store.append("me", "conv", [Item("m", None, "user", query), Item("n", None, "user", "other")])
    hits = await store.search("me", SearchQuery.parse(query), 5)
    has_words = any(True for _ in iter_words(query))
    assert [hit.item_id for hit in hits] == (["m"] if has_words else [])


async def test_older_file_is_indexed_after_a_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the schema before this one is backed up, then its text is found."""
    path = tmp_path / "chat.db"
    store = SqliteStore(path)
    await store.merge(Conversation("conv", "me", 1.0, 1.0, "Old title"), [Item("m", None, "user", "old words")], [])
    await store.close()
    db = sqlite3.connect(path)
    for name in ("item_words_go", "title_words_go", "titles_of_new"):
        db.execute(f"DROP TRIGGER {name}")
    since = re.findall(r"CREATE TABLE (\w+)", "".join(sqlite_schema.MIGRATIONS[2:]))
    for name in ("item_words", "title_words", *since):
        db.execute(f"DROP TABLE {name}")
    db.execute("DROP INDEX conversations_by_id")
    db.execute("PRAGMA user_version = 2")
    db.close()
    store = SqliteStore(path)
    for query in ("old wor", "title"):
        assert [h.conversation.id for h in await store.search("me", SearchQuery.parse(query), 5)] == ["conv"]
    await store.append("me", "conv", [Item("n", "m", "user", "new words")])
    await store.update("me", "conv", title="Younger")
    assert len(await store.search("me", SearchQuery.parse("new"), 5)) == 1
    assert await store.search("me", SearchQuery.parse("title"), 5) == ()
    await store.close()
    backup = sqlite3.connect(f"{path}.before-schema-{len(sqlite_schema.MIGRATIONS)}")
    tables = {name for (name,) in backup.execute("SELECT name FROM sqlite_master")}
    assert backup.execute("SELECT text FROM items").fetchall() == [("old words",)] and "item_words" not in tables
    backup.close()


async def test_file_written_without_fts5_is_indexed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chat.db"
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_schema, "has_fts5", lambda db: False)
        store = SqliteStore(path)
        await store.merge(Conversation("conv", "me", 1.0, 1.0, "Title"), [Item("m", None, "user", "words")], [])
        assert len(await store.search("me", SearchQuery.parse("words"), 5)) == 1
        await store.close()
    store = SqliteStore(path)
    for query in ("words", "title"):
        assert len(await store.search("me", SearchQuery.parse(query), 5)) == 1
    await store.close()
    monkeypatch.setattr(sqlite_schema, "has_fts5", lambda db: False)
    with pytest.raises(StoreUnusableError, match="FTS5"):
        SqliteStore(path)


async def test_rolled_back_write_leaves_no_words(store: ConversationStore) -> None:
    await store.create(Conversation("conv", "me", 1.0, 1.0))
    good = Item("m", None, "user", "ghost")
    with pytest.raises(Exception, match="nowhere"):
        await store.append("me", "conv", [good, replace(good, id="n", parent_id="nowhere")])
    assert await store.search("me", SearchQuery.parse("ghost"), 5) == ()
