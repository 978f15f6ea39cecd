"""Saved prompts over HTTP: shared by the users of a tenant, unknown to others, within limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache.conversations.store import MAX_SAVED_PROMPTS
from chatcache.gateway.api import prompts
from chatcache.gateway.schemas.requests import MAX_DESCRIPTION_CHARS, MAX_PROMPT_CHARS
from tests.gateway.keyed import Held, Keyed, keyed

Json = dict[str, Any]
TEXT = "Translate into {{language}}: {{text}}"


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keyed]:
    with keyed(tmp_path) as keys:
        yield keys


def call(keys: Keyed, by: Held, method: str, path: str = "", body: Json | None = None) -> tuple[int, Any]:
    status, _, answer = keys.server.request(method, f"/v1/prompts{path}", body, by.bearer)
    return status, answer


def names(keys: Keyed, by: Held) -> list[str]:
    status, answer = call(keys, by, "GET")
    assert status == 200
    return [prompt["name"] for prompt in answer["data"]]


def foreign_access(keys: Keyed) -> list[str]:
    """List what the user of another tenant can do with a prompt of ann's tenant."""
    found = [f"lists {name}" for name in names(keys, keys.other)]
    for method, body in (("GET", None), ("POST", {"text": "stolen"}), ("DELETE", None)):
        status, answer = call(keys, keys.other, method, "/translate", body)
        found += [f"{method} {status}"] if status != 404 else []
        found += ["received the text"] if TEXT in str(answer) else []
    status, answer = call(keys, keys.ann, "GET", "/translate")
    return [*found, *(["changed it"] if status != 200 or answer["text"] != TEXT else [])]


def test_prompt_is_shared_by_the_users_of_a_tenant(keys: Keyed) -> None:
    status, made = call(keys, keys.ann, "POST", body={"name": "translate", "text": TEXT})
    assert status == 200
    assert made | {"created_at": 0, "updated_at": 0} == {
        "object": "prompt",
        "name": "translate",
        "text": TEXT,
        "description": "",
        "variables": ["language", "text"],
        "created_at": 0,
        "updated_at": 0,
    }
    assert call(keys, keys.bob, "GET", "/translate") == (200, made)
    assert call(keys, keys.bob, "GET") == (200, {"object": "list", "data": [made]})
    changed = call(keys, keys.bob, "POST", "/translate", {"name": "to", "description": "Any language"})[1]
    assert (changed["name"], changed["text"], changed["description"]) == ("to", TEXT, "Any language")
    assert call(keys, keys.ann, "GET", "/to") == (200, changed) and names(keys, keys.ann) == ["to"]
    assert call(keys, keys.ann, "DELETE", "/to") == (200, {"id": "to", "object": "prompt", "deleted": True})
    assert names(keys, keys.bob) == [] and call(keys, keys.bob, "GET", "/to")[0] == 404


def test_prompt_of_another_tenant_does_not_exist(keys: Keyed) -> None:
    call(keys, keys.ann, "POST", body={"name": "translate", "text": TEXT})
    assert foreign_access(keys) == []
    # The same name is free for them.
    assert call(keys, keys.other, "POST", body={"name": "translate", "text": "theirs"})[0] == 200
    assert call(keys, keys.bob, "GET", "/translate")[1]["text"] == TEXT


def test_prompt_without_tenant_check_is_detected(keys: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected bug: all tenants are one."""
    monkeypatch.setattr(prompts, "tenant_of", lambda request: "one")
    call(keys, keys.ann, "POST", body={"name": "translate", "text": TEXT})
    assert {"lists translate", "GET 200", "POST 200", "changed it"} <= set(foreign_access(keys))


@pytest.mark.parametrize(
    ("body", "param", "limit"),
    [
        ({"text": "x"}, "name", "required"),
        ({"name": "a"}, "text", "required"),
        ({"name": "a", "text": ""}, "text", "1"),
        ({"name": "a", "text": "x" * (MAX_PROMPT_CHARS + 1)}, "text", f"{MAX_PROMPT_CHARS}"),
        (
            {"name": "a", "text": "x", "description": "x" * (MAX_DESCRIPTION_CHARS + 1)},
            "description",
            f"{MAX_DESCRIPTION_CHARS}",
        ),
        ({"name": "a", "text": 7}, "text", "string"),
        *(({"name": name, "text": "x"}, "name", "") for name in ("", "-a", "A", "a b", "ä", "a/b", "a\n", "a" * 65)),
    ],
)
def test_prompt_with_a_bad_field_is_refused_by_name_and_limit(keys: Keyed, body: Json, param: str, limit: str) -> None:
    status, answer = call(keys, keys.ann, "POST", body=body)
    assert (status, answer["error"]["param"]) == (400, param) and limit in answer["error"]["message"]
    assert names(keys, keys.ann) == []


def test_prompt_change_without_a_field_or_to_a_bad_name_is_refused(keys: Keyed) -> None:
    for name in ("a", "b"):
        call(keys, keys.ann, "POST", body={"name": name, "text": "x"})
    assert call(keys, keys.ann, "POST", "/a", {})[0] == 400
    assert call(keys, keys.ann, "POST", "/a", {"name": "A"})[1]["error"]["param"] == "name"
    assert call(keys, keys.ann, "POST", "/a", {"name": "a\n"})[1]["error"]["param"] == "name"
    status, answer = call(keys, keys.ann, "POST", "/a", {"name": "b"})
    assert (status, answer["error"]["code"]) == (409, "prompt_exists")
    assert call(keys, keys.ann, "POST", body={"name": "a", "text": "y"})[1]["error"]["code"] == "prompt_exists"
    assert call(keys, keys.ann, "POST", "/c", {"text": "y"})[0] == 404
    assert names(keys, keys.bob) == ["a", "b"]


def test_prompts_up_to_all_limits_are_listed_whole(keys: Keyed) -> None:
    texts = ["€" * MAX_PROMPT_CHARS, *["x" * MAX_PROMPT_CHARS] * (MAX_SAVED_PROMPTS - 1)]
    for at, text in enumerate(texts):
        assert call(keys, keys.ann, "POST", body={"name": f"p{at:03}", "text": text})[0] == 200
    status, answer = call(keys, keys.ann, "POST", body={"name": "more", "text": "x"})
    assert (status, answer["error"]["code"]) == (400, "prompt_library_full")
    assert str(MAX_SAVED_PROMPTS) in answer["error"]["message"]
    listed = call(keys, keys.bob, "GET")[1]["data"]
    assert [prompt["text"] for prompt in listed] == texts
