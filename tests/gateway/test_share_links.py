"""Links to a branch of a conversation: readable without a key, revocable, without scripts."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from chatcache.config import ServerConfig
from tests.gateway.serving import Server, wait_until

Json = dict[str, Any]
ANN = {"authorization": "Bearer key-of-ann"}
BOB = {"authorization": "Bearer key-of-bob"}
HOSTILE = (
    "<script>alert(1)</script> [x](javascript:alert(1)) ![y](https://evil.example/p.png) <img src=x onerror=alert(1)>"
)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    db = tmp_path_factory.mktemp("db") / "chat.db"
    with Server(ServerConfig(db=str(db), api_keys=("key-of-ann", "key-of-bob"))) as server:
        wait_until(lambda: server.request("GET", "/readyz")[0] == 200, "ready")
        yield server


def create(server: Server, *texts: str, title: str = "A talk") -> tuple[str, list[str]]:
    items = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    created = server.request("POST", "/v1/conversations", {"items": items, "title": title}, ANN)[2]
    listed = server.request("GET", f"/v1/conversations/{created['id']}/items?order=asc", headers=ANN)[2]
    return created["id"], [item["id"] for item in listed["data"]]


def share(server: Server, conversation: str, **fields: Any) -> Json:
    status, _, answer = server.request("POST", f"/v1/conversations/{conversation}/share", fields, ANN)
    assert status == 200, answer
    return answer  # type: ignore[no-any-return]


def read(server: Server, path: str) -> tuple[int, dict[str, str], str]:
    """Read a link without a key."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, {}, error.read().decode()


def test_link_shows_the_path_to_its_message_without_a_key(keyed: Server) -> None:
    conversation, items = create(keyed, "first question", "first answer", "second question", "second answer")
    made = share(keyed, conversation, leaf=items[1])
    assert made["id"] == conversation and made["leaf"] == items[1] and len(made["path"]) > 80
    status, headers, page = read(keyed, made["path"])
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "first question" in page and "first answer" in page and "second" not in page
    assert "script-src" not in headers["content-security-policy"]
    assert headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert (headers["referrer-policy"], headers["x-robots-tag"]) == ("no-referrer", "noindex")
    assert headers["cache-control"] == "private, no-store"
    # the secret is stored nowhere
    head = keyed.request("GET", f"/v1/conversations/{conversation}", headers=ANN)[2]
    assert made["path"].rpartition(".")[2] not in json.dumps(head)
    # without a leaf: the active branch
    assert "second answer" in read(keyed, share(keyed, conversation)["path"])[2]


def test_link_ends_when_it_is_revoked_replaced_or_its_conversation_is_deleted(keyed: Server) -> None:
    conversation, items = create(keyed, "question", "answer")
    path = f"/v1/conversations/{conversation}"
    first, second = share(keyed, conversation)["path"], share(keyed, conversation)["path"]
    assert first != second and [read(keyed, each)[0] for each in (first, second)] == [404, 200]
    assert keyed.request("DELETE", f"{path}/share", headers=ANN)[0] == 200
    assert keyed.request("DELETE", f"{path}/share", headers=ANN)[0] == 200
    assert read(keyed, second)[0] == 404
    third = share(keyed, conversation, leaf=items[0])["path"]
    assert keyed.request("DELETE", f"{path}/items/{items[0]}", headers=ANN)[0] == 200
    assert read(keyed, third)[0] == 404, "no message of the path is left"
    fourth = share(keyed, conversation)["path"]
    assert read(keyed, fourth)[0] == 200
    assert keyed.request("DELETE", path, headers=ANN)[0] == 200
    assert read(keyed, fourth)[0] == 404


def test_deleted_messages_disappear_from_a_link(keyed: Server) -> None:
    conversation, items = create(keyed, "first question", "first answer", "second question", "second answer")
    made = share(keyed, conversation, leaf=items[2])
    for gone, left in ((items[2], ["first question", "first answer"]), (items[0], ["first answer"])):
        assert keyed.request("DELETE", f"/v1/conversations/{conversation}/items/{gone}", headers=ANN)[0] == 200
        status, _, page = read(keyed, made["path"])
        assert status == 200
        assert [text for text in ("first question", "first answer", "second") if text in page] == left


def test_wrong_links_of_all_kinds_get_the_same_answer(keyed: Server) -> None:
    conversation, _ = create(keyed, "question", "answer")
    never = read(keyed, f"/share/{conversation}.{'x' * 43}")
    made = share(keyed, conversation)["path"]
    wrong = [
        made[:-1] + ("A" if made[-1] != "A" else "B"),
        f"/share/{conversation}.",
        f"/share/{conversation}",
        f"/share/conv_x.{made.rpartition('.')[2]}",
        "/share/.",
        "/share/x",
    ]
    bodies = {re.sub(r"req_\w+", "", body) for status, _, body in (never, *(read(keyed, each) for each in wrong))}
    assert [read(keyed, each)[0] for each in wrong] == [404] * len(wrong)
    assert len(bodies) == 1, bodies


def test_another_tenant_cannot_share_or_end_a_link(keyed: Server) -> None:
    conversation, _ = create(keyed, "question", "answer")
    made = share(keyed, conversation)["path"]
    for method in ("POST", "DELETE"):
        assert keyed.request(method, f"/v1/conversations/{conversation}/share", headers=BOB)[0] == 404
    assert read(keyed, made)[0] == 200
    assert keyed.request("POST", f"/v1/conversations/{conversation}/share", {"leaf": "msg_x"}, ANN)[0] == 404


def test_copies_and_imports_are_not_shared(keyed: Server) -> None:
    conversation, _ = create(keyed, "question", "answer")
    share(keyed, conversation)
    copy = keyed.request("POST", f"/v1/conversations/{conversation}/branch", headers=ANN)[2]
    exported = keyed.request("GET", f"/v1/conversations/{conversation}/export", headers=ANN)[2]
    assert "share" in exported["conversation"]["metadata"] and copy["metadata"] == {}
    entry = keyed.request("POST", "/v1/conversations/import", exported, BOB)[2]["data"][0]
    assert keyed.request("GET", f"/v1/conversations/{entry['id']}", headers=BOB)[2]["metadata"] == {}


def test_full_metadata_leaves_no_room_for_a_link(keyed: Server) -> None:
    conversation, _ = create(keyed, "question")
    metadata = {str(number): "x" for number in range(16)}
    assert keyed.request("POST", f"/v1/conversations/{conversation}", {"metadata": metadata}, ANN)[0] == 200
    status, _, answer = keyed.request("POST", f"/v1/conversations/{conversation}/share", {}, ANN)
    assert (status, answer["error"]["param"]) == (400, "metadata")


def test_hostile_texts_are_harmless_in_the_page_and_the_file(keyed: Server) -> None:
    conversation, items = create(keyed, HOSTILE, HOSTILE, title=HOSTILE)
    page = read(keyed, share(keyed, conversation)["path"])[2]
    status, headers, file = keyed.request(
        "GET", f"/v1/conversations/{conversation}/export?format=html&branch={items[1]}", headers=ANN
    )
    assert status == 200 and headers["content-disposition"].endswith(f'"{conversation}.html"')
    assert 'http-equiv="content-security-policy"' in page
    for text in (page, file if isinstance(file, str) else file.decode()):
        assert not re.search(r"<script|<img|<a [^>]*javascript:|\son\w+=[^&]*>", text.split("</style>")[1])
        assert "&lt;script&gt;" in text
    status, _, answer = keyed.request(
        "GET", f"/v1/conversations/{conversation}/export?format=html&branch=all", headers=ANN
    )
    assert (status, answer["error"]["param"]) == (400, "branch")
