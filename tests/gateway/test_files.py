"""Export and import over HTTP: a copy on another server continues with the same tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache.config import ServerConfig
from chatcache.conversations.tree import Conversation, Item
from tests.gateway.described import Described
from tests.gateway.serving import Server, tiny_tokenizer, tokenizer_with, wait_until
from tests.gateway.test_rest import converse

IMPORT = "/v1/conversations/import"
GREEDY = {"temperature": 0, "max_output_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Another machine with the same model, a small import limit, and keys."""
    path = tmp_path_factory.mktemp("other")
    keys = ("key-of-alice", "key-of-bob")
    config = ServerConfig(db=str(path / "c.db"), api_keys=keys, max_import_bytes=1_000_000, max_body_bytes=10_000)
    with Server(config) as server:
        wait_until(lambda: server.request("GET", "/readyz")[0] == 200, "ready")
        yield server
        server.wait_idle()


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}"}


def send(server: Server, data: bytes | str, query: str = "", **headers: str) -> tuple[int, dict[str, str], Any]:
    raw = data.encode() if isinstance(data, str) else data
    return server.request("POST", IMPORT + query, raw=raw, headers={k.replace("_", "-"): v for k, v in headers.items()})


def grown(server: Server) -> str:
    """A conversation of two turns, the second with two candidates, and a fork of the first."""
    first = converse(server, "Hello there", **GREEDY)
    converse(server, "And then?", previous_response_id=first["id"], n=2, **GREEDY)
    converse(server, "Or else?", previous_item_id=first["output"][0]["id"], **GREEDY)
    conversation: str = first["conversation"]["id"]
    return conversation


def export(server: Server, conversation: str, query: str = "", **headers: str) -> Any:
    status, _, answer = server.request("GET", f"/v1/conversations/{conversation}/export{query}", headers=headers)
    assert status == 200, answer
    return answer


def as_bob(server: Server, text: str, **fields: object) -> dict[str, Any]:
    """A response on the server with keys."""
    body = {"input": text, **GREEDY, **fields}
    status, _, answer = server.request("POST", "/v1/responses", body, headers=key("bob"))
    assert status == 200, answer
    return answer  # type: ignore[no-any-return]


def test_imported_copy_continues_with_the_same_tokens(server: Server, other_server: Server) -> None:
    """The copy replies to the same question with the same tokens, on the same prompt."""
    conversation = grown(server)
    exported = export(server, conversation)
    status, _, report = send(other_server, json.dumps(exported), **key("bob"))
    assert status == 200 and (report["created"], report["failed"]) == (1, 0)
    (entry,) = report["data"]
    assert entry["token_exact"] and entry["num_items"] == len(exported["items"]) and entry["id"] != conversation
    copied = export(other_server, entry["id"], **key("bob"))
    for old, new in zip(exported["items"], copied["items"], strict=True):
        keep = ("role", "text", "token_ids", "index", "status", "finish_reason", "created_at", "parts")
        assert [old[name] for name in keep] == [new[name] for name in keep]
    assert len(exported["items"]) == 7
    assert copied["conversation"]["updated_at"] == exported["conversation"]["updated_at"]

    origin_server = converse(server, "Go on", conversation=conversation, **GREEDY)
    there = as_bob(other_server, "Go on", conversation=entry["id"])
    assert there["output"][0]["content"][0]["text"] == origin_server["output"][0]["content"][0]["text"]
    assert there["usage"]["input_tokens"] == origin_server["usage"]["input_tokens"]
    one, two = export(server, conversation), export(other_server, entry["id"], **key("bob"))
    newest = [max(each["turns"], key=lambda turn: turn["created_at"]) for each in (one, two)]
    assert (
        newest[0]["prompt_ids"] == newest[1]["prompt_ids"] and newest[0]["base_item_id"] and newest[1]["base_item_id"]
    )
    assert one["items"][-1]["token_ids"] == two["items"][-1]["token_ids"]
    again = as_bob(other_server, "And on", conversation=entry["id"])
    assert again["usage"]["input_tokens_details"]["cached_tokens"] >= there["usage"]["input_tokens"]


def test_import_of_an_edited_export_continues_from_its_text(server: Server) -> None:
    first = converse(server, "My name is Ada", **GREEDY)
    text = json.dumps(export(server, first["conversation"]["id"])).replace("Ada", "Bob")
    server.request("DELETE", f"/v1/conversations/{first['conversation']['id']}")
    (entry,) = send(server, text)[2]["data"]
    assert entry["status"] == "created" and not entry["token_exact"]
    items = server.request("GET", f"/v1/conversations/{entry['id']}/items?order=asc")[2]["data"]
    assert items[0]["content"][0]["text"] == "My name is Bob"
    status, _, answer = server.request("GET", f"/v1/conversations/{entry['id']}/items/{items[1]['id']}/tokens")
    assert status == 400 and "messages that this server generated" in answer["error"]["message"]
    going_on = converse(server, "What is my name?", conversation=entry["id"], **GREEDY)
    turns = export(server, entry["id"])["turns"]
    (turn,) = [each for each in turns if each["id"] == going_on["id"]]
    assert "My name is Bob" in tiny_tokenizer().decode(turn["prompt_ids"])


def test_export_of_all_contains_only_the_tenants_conversations(other_server: Server) -> None:
    ours = as_bob(other_server, "Mine")["conversation"]["id"]
    status, headers, text = other_server.request("GET", "/v1/conversations/export", headers=key("bob"))
    lines = [json.loads(line) for line in text.splitlines()]
    assert status == 200 and headers["content-type"].startswith("application/x-ndjson")
    assert headers["content-disposition"] == 'attachment; filename="conversations.jsonl"'
    assert lines[-1] == {
        "object": "conversation.export.end",
        "version": 2,
        "num_conversations": len(lines) - 1,
        "num_items": sum(len(line["items"]) for line in lines[:-1]),
        "num_turns": sum(len(line["turns"]) for line in lines[:-1]),
        "num_keys": 0,
        "sha256": hashlib.sha256(text[: text.rindex("\n", 0, -1) + 1].encode()).hexdigest(),
    }
    assert all(line["version"] == 2 and not {"owner", "rev"} & set(line) for line in lines[:-1])
    assert ours in {line["conversation"]["id"] for line in lines[:-1]}
    no_one = other_server.request("GET", "/v1/conversations/export", headers=key("alice"))
    assert [json.loads(line)["num_conversations"] for line in no_one[2].splitlines()] == [0]
    assert other_server.request("GET", f"/v1/conversations/{ours}/export", headers=key("alice"))[0] == 404
    # Importing into the same tenant, twice, changes nothing; another tenant gets a copy of its own.
    for name, query, status_name in (
        ("bob", "", "unchanged"),
        ("alice", "?dry_run=true", "created"),
        ("alice", "", "created"),
        ("alice", "", "unchanged"),
    ):
        report = send(other_server, text, query, content_type="application/x-ndjson", **key(name))[2]
        assert report[status_name] == len(lines) - 1 and report["failed"] == 0
        assert report["dry_run"] is bool(query)


def test_import_with_one_invalid_conversation_imports_the_others(server: Server, module_server: Server) -> None:
    document = Described(module_server.request("GET", "/openapi.json")[2])
    good = export(server, converse(server, "Good", **GREEDY)["conversation"]["id"])
    good["conversation"]["id"] = "conv_good"
    bad = json.loads(json.dumps(good))
    bad["items"][1]["parent_id"] = "msg_nowhere"
    for file_format in (json.dumps([good, bad, {}]), "\n".join(map(json.dumps, (good, bad, {})))):
        status, _, report = send(server, file_format)
        assert status == 200 and report["failed"] == 2
        document.check("POST", IMPORT, status, report)
        errors = [entry["error"]["message"] for entry in report["data"] if entry["status"] == "failed"]
        assert "items[1].parent_id" in errors[0] and "neither" in errors[1]
    found = server.request("GET", "/v1/conversations?limit=100")[2]["data"]
    assert sum(each["id"] == report["data"][0]["id"] for each in found) == 1
    status, _, answer = send(server, json.dumps(bad))
    assert status == 400 and answer["error"]["param"] == "items" and "items[1]" in answer["error"]["message"]


def test_import_of_a_truncated_file_keeps_complete_conversations(server: Server) -> None:
    good = export(server, converse(server, "Cut", **GREEDY)["conversation"]["id"])
    text = json.dumps({**good, "conversation": {**good["conversation"], "id": "conv_cut"}})
    status, _, report = send(server, f"{text}\n{text[:100]}")
    assert status == 200 and (report["created"], report["failed"]) == (1, 1)
    assert "ends within" in report["data"][1]["error"]["message"]
    for data in (text[:100], "nonsense", "[1]"):
        status, _, answer = send(server, data)
        assert status == 400 and "JSON" in answer["error"]["message"]
    for data in ("[]", '{"object":"conversation.export.end"}'):
        assert send(server, data)[2]["data"] == []


def test_chatgpt_export_is_imported_over_http(server: Server) -> None:
    mapping = {
        "r": {"id": "r", "parent": None, "children": ["u"], "message": None},
        "u": {
            "parent": "r",
            "children": ["a"],
            "message": {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["Quokka facts?"]}},
        },
        "a": {
            "parent": "u",
            "children": [],
            "message": {"author": {"role": "assistant"}, "content": {"content_type": "text", "parts": ["Smile\ud83d"]}},
        },
    }
    file = [{"title": "Quokkas", "create_time": 1.5, "current_node": "a", "id": "cg-1", "mapping": mapping}]
    for status_name in ("created", "unchanged"):
        status, _, report = send(server, json.dumps(file))
        assert status == 200 and report[status_name] == 1 and report["data"][0]["token_exact"] is False
    conversation = report["data"][0]["id"]
    (hit,) = server.request("GET", "/v1/conversations?query=quokka+fac")[2]["data"]
    assert hit["id"] == conversation and hit["match"]["role"] == "user"
    going_on = converse(server, "More", conversation=conversation, **GREEDY)
    assert going_on["status"] == "incomplete"
    written = export(server, conversation, "?format=markdown")
    assert written.startswith("# Quokkas\n\n## User\n\nQuokka facts?\n\n## Assistant\n\nSmile\ufffd\n\n## User\n\nMore")


def test_export_selects_branches(server: Server) -> None:
    conversation = grown(server)
    items = {item["id"]: item for item in export(server, conversation)["items"]}
    leaves = set(items) - {item["parent_id"] for item in items.values()}
    assert len(leaves) == 3
    for leaf in leaves:
        path = [item["id"] for item in export(server, conversation, f"?branch={leaf}")["items"]]
        assert path[-1] == leaf and len(path) == 4
        written = export(server, conversation, f"?format=markdown&branch={leaf}")
        assert written.count("\n## ") == 4
    assert export(server, conversation, "?branch=all") == export(server, conversation)
    assert export(server, conversation, "?format=markdown&branch=all").count("\n## ") == 7
    for query, status in (("?branch=msg_x", 404), ("?format=pdf", 400), ("?format=markdown&branch=", 404)):
        assert server.request("GET", f"/v1/conversations/{conversation}/export{query}")[0] == status
    headers = server.request("GET", f"/v1/conversations/{conversation}/export?format=markdown")[1]
    assert headers["content-disposition"] == f'attachment; filename="{conversation}.md"'
    assert headers["content-type"] == "text/markdown; charset=utf-8"


def test_import_has_its_own_size_limit(other_server: Server) -> None:
    """It is larger than that of other bodies; bytes count while reading, or as announced."""
    filler = {"object": "conversation.export.end", "filler": "x" * 500_000}
    assert send(other_server, json.dumps(filler), **key("bob"))[0] == 200
    for data in (json.dumps(filler) * 3, "x" * 1_000_001):
        status, _, answer = send(other_server, data, **key("bob"))
        assert (
            status == 413 and answer["error"]["code"] == "request_too_large" and "1000000" in answer["error"]["message"]
        )
    status, _, answer = send(other_server, json.dumps(filler), content_type="text/csv", **key("bob"))
    assert status == 415 and "x-ndjson" in answer["error"]["message"]
    assert send(other_server, "{}", "?dry_run=maybe", **key("bob"))[0] == 400
    assert send(other_server, "{}")[0] == 401


def test_import_with_another_tokenizer_keeps_the_text_only(server: Server, tmp_path: Path) -> None:
    exported = export(server, grown(server))
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    same_words = tokenizer_with(template)
    assert same_words.digest == tiny_tokenizer().digest  # templates do not change what ids mean
    exported["tokenizer"] = "other"
    status, _, report = send(server, json.dumps(exported), "?dry_run=true")
    assert status == 200 and report["data"][0]["token_exact"] is False


@pytest.mark.slow
def test_large_import_does_not_block_the_event_loop(server: Server) -> None:
    """During an import of 4 MiB, other requests are served and lists show whole conversations."""
    text = "word " * 400
    items = [
        {"id": f"m{at}", "parent_id": f"m{at - 1}" if at else None, "role": "user", "text": text} for at in range(40)
    ]
    head = {"created_at": 1.0, "updated_at": 1.0, "active_leaf": "m39"}
    lines = [
        json.dumps(
            {
                "object": "conversation.export",
                "version": 1,
                "tokenizer": "",
                "conversation": {**head, "id": f"bulk{number}"},
                "items": items,
                "turns": [],
            }
        )
        for number in range(50)
    ]
    reports: list[Any] = []
    sending = threading.Thread(target=lambda: reports.append(send(server, "\n".join(lines))))
    sending.start()
    num_answers = 0
    while sending.is_alive():
        assert server.request("GET", "/livez")[0] == 200
        for each in server.request("GET", "/v1/conversations?limit=100")[2]["data"]:
            if each["active_leaf"] and each["updated_at"] == 1.0 and num_answers % 5 == 0:
                path = f"/v1/conversations/{each['id']}/items?branches=all"
                assert len(server.request("GET", path)[2]["data"]) == 40
                break
        num_answers += 1
    sending.join()
    assert reports[0][0] == 200 and reports[0][2]["created"] == 50 and num_answers
    for each in reports[0][2]["data"]:
        server.request("DELETE", f"/v1/conversations/{each['id']}")


def test_export_of_all_skips_conversations_deleted_meanwhile(tmp_path: Path) -> None:
    """Export 250 conversations while half are deleted: complete lines and the right count."""
    with Server(ServerConfig(db=str(tmp_path / "c.db"))) as server:
        server.wait_ready()
        store = server.gateway.store
        assert store is not None

        async def fill() -> None:
            for number in range(250):
                item = Item(f"m{number}", None, "user", "x" * 2000)
                await store.merge(Conversation(f"conv_{number:03}", "", 1.0, 1.0, active_leaf=item.id), [item], [])

        async def thin() -> None:
            await asyncio.gather(*(store.delete("", f"conv_{number:03}") for number in range(1, 250, 2)))

        server.call(fill())
        deleting = threading.Thread(target=lambda: server.call(thin()))
        deleting.start()
        text = server.request("GET", "/v1/conversations/export")[2]
        deleting.join()
        lines = [json.loads(line) for line in text.splitlines()]
        names = [line["conversation"]["id"] for line in lines[:-1]]
        assert names == sorted(set(names)) and {f"conv_{number:03}" for number in range(0, 250, 2)} <= set(names)
        assert lines[-1]["num_conversations"] == len(names)


def test_export_of_another_program_is_imported_once(server: Server) -> None:
    messages = {
        "a": {"id": "a", "parentId": None, "role": "user", "content": "Hello"},
        "b": {"id": "b", "parentId": "a", "role": "assistant", "content": "Hi there"},
    }
    chat = {"title": "T", "history": {"messages": messages, "currentId": "b"}}
    exported = json.dumps([{"id": "owui", "title": "Greeting", "chat": chat, "created_at": 1}])
    status, _, report = send(server, exported, content_type="application/json")
    assert (status, report["created"], report["num_items"]) == (200, 1, 2), report
    assert report["data"][0]["title"] == "Greeting" and not report["data"][0]["token_exact"]
    again = send(server, exported, content_type="application/json")[2]
    assert (again["unchanged"], again["num_items"]) == (1, 0)
    follow = converse(server, "And?", conversation=report["data"][0]["id"], **GREEDY)
    assert follow["status"] in ("completed", "incomplete")
