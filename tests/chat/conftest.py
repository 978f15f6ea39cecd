"""Every implementation of the storage contract: tests that ask for `store` run once with each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from chatcache.chat import sqlite_search
from chatcache.chat.store import ConversationStore
from chatcache.chat.store_sqlite import SqliteStore

IMPLEMENTATIONS: dict[str, Callable[[Path], ConversationStore]] = {
    "sqlite": lambda folder: SqliteStore(folder / "chat.db"),
    "sqlite-without-fts5": lambda folder: SqliteStore(folder / "chat.db"),
}


@pytest.fixture(params=list(IMPLEMENTATIONS))
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ConversationStore]:
    if request.param == "sqlite-without-fts5":
        monkeypatch.setattr(sqlite_search, "has_fts5", lambda db: False)
    store = IMPLEMENTATIONS[request.param](tmp_path)
    yield store
    await store.close()
