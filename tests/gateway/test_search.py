"""Search over HTTP: all branches, stable pages, correct marks, tenants, arbitrary queries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from chatcache.config import ServerConfig
from tests.gateway.described import Described
from tests.gateway.serving import Server

WRITERS = ("alice", "bob")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("library")
    keys = tuple(f"key-of-{name}" for name in WRITERS)
    with Server(ServerConfig(db=str(path / "c.db"), api_keys=keys)) as server:
        yield server


def call(server: Server, name: str, method: str, path: str, body: object = None) -> Any:
    headers = {"authorization": f"Bearer key-of-{name}"}
    status, _, answer = server.request(method, path, body, headers=headers)
    assert status == 200, answer
    return answer


def say(server: Server, name: str, text: str, title: str = "None") -> str:
    made = call(
        server, name, "POST", "/v1/conversations", {"items": [{"role": "user", "content": text}], "title": title}
    )
    found: str = made["id"]
    return found


def find(server: Server, name: str, query: str, more: str = "") -> Any:
    return call(server, name, "GET", f"/v1/conversations?query={quote(query)}{more}")


def test_search_finds_words_on_every_branch_with_their_marks(library: Server) -> None:
    conversation = say(library, "alice", "🎉 Über die Brücke — über alles, " + "und so weiter " * 40, "Brückenbau")
    path = f"/v1/conversations/{conversation}/items"
    first = call(library, "alice", "GET", f"{path}?branches=all")["data"][0]["id"]
    for text in ("a walrus answers", "a branch about quokkas"):
        call(library, "alice", "POST", path, {"items": [{"role": "assistant", "content": text}], "parent_id": first})
    document = Described(library.request("GET", "/openapi.json")[2])
    answer = find(library, "alice", "UBER bruck")
    document.check("GET", "/v1/conversations", 200, answer)
    (hit,) = answer["data"]
    match = hit["match"]
    assert hit["id"] == conversation and match["item_id"] == first and match["role"] == "user"
    text = match["snippet"]["text"]
    assert [text[start:end] for start, end in match["snippet"]["marks"]] == ["Über", "Brücke", "über"]
    assert text.endswith("…") and len(text) <= 201 and match["title_marks"] == []
    (titled,) = find(library, "alice", "brücken")["data"]
    assert [titled["title"][start:end] for start, end in titled["match"]["title_marks"]] == ["Brückenbau"]
    assert titled["match"]["item_id"] is None and titled["match"]["snippet"] is None
    for query in ("walrus", "quokk"):  # the branch that is not shown now as well
        assert [each["id"] for each in find(library, "alice", query)["data"]] == [conversation]
    assert find(library, "bob", "walrus")["data"] == []


def test_pages_of_search_results_stay_consistent_during_changes(library: Server) -> None:
    made = [say(library, "bob", f"needle {number}") for number in range(7)]
    page = find(library, "bob", "needle", "&limit=3")
    assert [each["id"] for each in page["data"]] == made[:3:-1] and page["has_more"]
    call(library, "bob", "POST", f"/v1/conversations/{made[4]}", {"title": "moved up"})
    call(library, "bob", "DELETE", f"/v1/conversations/{made[3]}")
    page = find(library, "bob", "needle", f"&limit=3&after={quote(page['next'])}")
    assert [each["id"] for each in page["data"]] == [made[2], made[1], made[0]]
    assert not page["has_more"] and page["next"] is None
    listed = call(library, "bob", "GET", "/v1/conversations?limit=2")
    rest = call(library, "bob", "GET", f"/v1/conversations?limit=100&after={quote(listed['next'])}")
    assert len({each["id"] for each in (*listed["data"], *rest["data"])}) == 6
    assert all("match" not in each for each in listed["data"])


@pytest.mark.parametrize(
    "query",
    [
        '"',
        "' OR 1=1 --",
        "a AND",
        "NEAR(",
        "*",
        "^x",
        "col:x",
        "\x00",
        "%",
        "🏳️‍🌈",
        "\u202e",
        " ",
        "x" * 4096,
        "é" * 4000,
    ],
)
def test_search_with_any_query_responds_200(library: Server, query: str) -> None:
    answer = find(library, "alice", query)
    assert answer["object"] == "list"
    words = " ".join(f"{number:x}" for number in range(1000))
    assert find(library, "alice", words)["data"] == []


def test_search_with_invalid_parameters_is_refused(library: Server) -> None:
    headers = {"authorization": "Bearer key-of-alice"}
    for query, status in (("x" * 4097, 400), ("x&limit=0", 400), ("x&after=conv_nowhere", 404), ("x&after=1.5~x", 200)):
        got, _, answer = library.request("GET", f"/v1/conversations?query={query}", headers=headers)
        assert got == status
        assert status != 400 or answer["error"]["param"] in ("query", "limit")
