"""GET /v1/admin: the counts equal those of the store and the requests made; only admin keys may read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache.gateway.api import administration
from tests.gateway.keyed import Held, Keyed, keyed

SECRET = "a marmot in the title"


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keyed]:
    with keyed(tmp_path) as keys:
        yield keys


def read(keys: Keyed, by: Held) -> tuple[int, Any, str]:
    status, headers, text = keys.server.request("GET", "/v1/admin", headers=by.bearer)
    assert status != 200 or headers["cache-control"] == "no-store"
    return status, json.loads(text) if isinstance(text, str) else text, json.dumps(text)


def create(keys: Keyed, by: Held, count: int) -> None:
    for _ in range(count):
        body = {"title": SECRET, "items": [{"role": "user", "content": SECRET}]}
        status, _, _ = keys.server.request("POST", "/v1/conversations", body, headers=by.bearer)
        assert status == 200


def test_overview_counts_conversations_of_every_user_without_content(keys: Keyed) -> None:
    for by, count in ((keys.ann, 3), (keys.bob, 1), (keys.other, 2)):
        create(keys, by, count)
    status, body, text = read(keys, keys.admin)
    assert status == 200
    counted = {(user["tenant"], user["user"]): user["conversations"] for user in body["users"]}
    assert counted == {("acme", "ann"): 3, ("acme", "bob"): 1, ("other", ""): 2, ("ops", ""): 0}
    tenants = {entry["tenant"]: (entry["keys"], entry["conversations"]) for entry in body["tenants"]}
    assert tenants == {"acme": (2, 4), "other": (1, 2), "ops": (1, 0)}
    assert "marmot" not in text
    for held in (keys.ann, keys.bob, keys.other, keys.admin):
        assert held.key not in text and held.record.digest.hex() not in text


def test_overview_lists_keys_with_limits_rights_and_revocation(keys: Keyed) -> None:
    limited = keys.give("acme", "cy", name="laptop", requests_per_minute=60, tokens_per_day=1000)
    listed = {entry["id"]: entry for entry in read(keys, keys.admin)[1]["keys"]}
    assert len(listed) == 6
    found = listed[limited.record.id]
    assert (found["tenant"], found["user"], found["name"], found["is_admin"]) == ("acme", "cy", "laptop", False)
    assert (found["requests_per_minute"], found["tokens_per_day"], found["max_concurrent"]) == (60, 1000, None)
    assert listed[keys.admin.record.id]["is_admin"]
    assert listed[keys.gone.record.id]["revoked_at"] is not None and found["revoked_at"] is None


def test_overview_is_refused_without_admin_right(keys: Keyed) -> None:
    for held in (keys.ann, keys.other):
        status, body, _ = read(keys, held)
        assert (status, body["error"]["code"]) == (403, "admin_only")
    assert read(keys, keys.gone)[0] == 401
    assert keys.server.request("GET", "/v1/admin")[0] == 401
    status, _, _ = keys.server.request("GET", "/v1/admin", headers=keys.session_of(keys.bob))
    assert status == 403
    status, _, _ = keys.server.request("GET", "/v1/admin", headers=keys.session_of(keys.admin))
    assert status == 200


def test_overview_server_counts_follow_a_request(keys: Keyed) -> None:
    before = read(keys, keys.admin)[1]["server"]
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "ignore_eos": True}
    status, _, answer = keys.server.request("POST", "/v1/chat/completions", body, headers=keys.ann.bearer)
    assert status == 200
    usage = (json.loads(answer) if isinstance(answer, str) else answer)["usage"]
    after = read(keys, keys.admin)[1]["server"]
    assert after["num_output_tokens"] - before["num_output_tokens"] == usage["completion_tokens"]
    assert after["ready"] and after["num_running"] == 0 and after["num_pages"] > 0 and after["workers"] == []


def test_overview_count_ends_at_the_limit(keys: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(administration, "MAX_COUNTED", 4)
    monkeypatch.setattr(administration, "_CHUNK", 3)
    create(keys, keys.ann, 5)
    create(keys, keys.bob, 3)
    counted = {user["user"]: user["conversations"] for user in read(keys, keys.admin)[1]["users"]}
    assert (counted["ann"], counted["bob"]) == (4, 3)
