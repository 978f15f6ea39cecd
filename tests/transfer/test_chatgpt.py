"""Import of ChatGPT's export: visible messages are imported, hidden ones counted, malformed files refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from chatcache.conversations.store import ConversationStore
from chatcache.errors import InvalidRequestError
from chatcache.transfer.draft import Draft, parents_first
from chatcache.transfer.importer import import_draft, read_chatgpt

Node = dict[str, Any]


def node(name: str, parent: str | None, role: str = "user", text: object = "", **fields: Any) -> Node:
    """Return a node with a text message; `content` and other fields may be given whole."""
    content = fields.pop("content", {"content_type": "text", "parts": [text]})
    author: Node = {"role": role, "name": None, "metadata": {}}
    message = {"id": name, "author": author, "create_time": None, "content": content, "metadata": {}, "weight": 1.0}
    return {"id": name, "parent": parent, "children": [], "message": {**message, **fields}}


def file_of(*nodes: Node, **fields: Any) -> bytes:
    mapping = {each["id"]: each for each in nodes}
    for each in nodes:
        if each["parent"] in mapping:
            mapping[each["parent"]]["children"].append(each["id"])
    whole = {"title": "Trip", "create_time": 1700000000.5, "update_time": 1700000100.25, "mapping": mapping}
    return json.dumps({**whole, "conversation_id": "c-1", **fields}).encode()


def read(*nodes: Node, **fields: Any) -> Draft:
    draft = read_chatgpt(file_of(*nodes, **fields), "me")
    assert parents_first(draft.items) == draft.items
    return draft


def shape(draft: Draft) -> list[tuple[str, str | None, str, str]]:
    return [(item.id, item.parent_id, item.role, item.text) for item in draft.items]


ROOT: Node = {"id": "root", "parent": None, "children": [], "message": None}
EMPTY_SYSTEM = node("sys", "root", "system", "", metadata={"is_visually_hidden_from_conversation": True})


def test_read_chatgpt_of_an_ordinary_conversation() -> None:
    draft = read(
        ROOT,
        EMPTY_SYSTEM,
        node("u", "sys", text="Where to?", create_time=1700000001.5),
        node("a", "u", "assistant", "Rome"),
        node("u2", "a", text="And then?"),
        node("a2", "u2", "assistant", "Naples"),
        current_node="a2",
    )
    assert shape(draft) == [
        ("u", None, "user", "Where to?"),
        ("a", "u", "assistant", "Rome"),
        ("u2", "a", "user", "And then?"),
        ("a2", "u2", "assistant", "Naples"),
    ]
    head = draft.conversation
    assert (head.id, head.title, head.active_leaf, head.created_at, head.updated_at) == (
        *("c-1", "Trip", "a2"),
        *(1700000000.5, 1700000100.25),
    )
    assert draft.items[0].created_at == 1700000001.5 and draft.items[1].created_at == 1700000000.5
    assert draft.skipped == {"hidden": 1} and not draft.is_exact


def test_read_chatgpt_keeps_branch_order_and_current_node() -> None:
    draft = read(
        ROOT,
        node("u", "root", text="Hi"),
        node("b", "u", "assistant", "second"),
        node("a", "u", "assistant", "first"),
        node("u2", "b", text="edited"),
        node("u1", "b", text="once"),
        current_node="u1",
    )
    assert [item.id for item in draft.items] == ["u", "b", "u2", "u1", "a"]
    assert draft.conversation.active_leaf == "u1"
    file = json.loads(file_of(ROOT, node("u", "root", text="Hi"), node("b", "u", text="2"), node("a", "u", text="1")))
    file["mapping"]["u"]["children"] = ["a", "b"]
    assert [item.id for item in read_chatgpt(json.dumps(file).encode(), "me").items] == ["u", "a", "b"]


def test_read_chatgpt_merges_steps_of_one_answer() -> None:
    """A search, code, its output and the answer become one message; a regenerated last step is a branch."""
    code = {"content_type": "code", "language": "python", "text": "print('```')"}
    steps = (
        ROOT,
        node("u", "root", text="Plot it"),
        node("think", "u", "assistant", content={"content_type": "thoughts", "thoughts": [{"content": "hm"}]}),
        node("code", "think", "assistant", content=code, recipient="python"),
        node("out", "code", "tool", content={"content_type": "execution_output", "text": "```"}),
        node("say", "out", "assistant", "Done"),
    )
    draft = read(*steps, current_node="say")
    assert shape(draft) == [
        ("u", None, "user", "Plot it"),
        ("code", "u", "assistant", "````python\nprint('```')\n````\n\nDone"),
    ]
    assert draft.conversation.active_leaf == "code" and draft.skipped == {"thoughts": 1, "tool": 1}
    branched = read(*(dict(each, children=[]) for each in steps), node("say2", "out", "assistant", "Done again"))
    assert [(item.id, item.parent_id) for item in branched.items] == [
        ("u", None),
        ("code", "u"),
        ("say", "code"),
        ("say2", "code"),
    ]


def test_read_chatgpt_converts_or_counts_unusual_contents() -> None:
    image = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://x"}
    transcript = {"content_type": "audio_transcription", "text": "spoken"}
    draft = read(
        ROOT,
        node("about", "root", content={"content_type": "user_editable_context", "user_profile": "I am"}),
        node("sys", "about", "system", "Be brief"),
        node(
            "a",
            "sys",
            content={"content_type": "multimodal_text", "parts": [image, "what is it?", transcript, None, 5]},
        ),
        node("b", "a", "assistant", content={"content_type": "tether_quote", "url": "http://x", "text": "quoted"}),
        node("c", "b", content={"content_type": "hologram", "shape": 3}),
        node("d", "c", "assistant", content=None),
        node("e", "d", "robot", "beep"),
        node("f", "e", "system", "late"),
        node("g", "f", content={"content_type": "code", "language": "unknown", "text": "x"}),
        node("h", "g", "assistant", content={"content_type": "system_error", "name": "E", "text": "it broke"}),
        node("i", "h", content={"content_type": "multimodal_text", "parts": [{"odd": 1}]}),
    )
    assert [(role, text) for _, _, role, text in shape(draft)] == [
        ("system", "Be brief"),
        ("user", "[image_asset_pointer]\nwhat is it?\nspoken"),
        ("assistant", "quoted"),
        ("user", "```\nx\n```"),
        ("assistant", "it broke"),
        ("user", "[unknown]"),
    ]
    expected = {"user_editable_context": 1, "image_asset_pointer": 1, "hologram": 1, "robot": 1, "system": 1}
    assert draft.skipped == {**expected, "unknown": 1}


def test_read_chatgpt_shows_sources_as_links() -> None:
    cite, place = "\ue200cite\ue202turn0search1\ue201", '\ue200entity\ue202["city","Oslo","in Norway"]\ue201'
    links = [
        {"matched_text": cite, "alt": "([a.org](https://a.org/))", "type": "grouped_webpages"},
        {"matched_text": "\ue200cite\ue202turn0search2\ue201", "alt": None},
        {"matched_text": place, "alt": "Oslo"},
        "malformed",
    ]
    text = f"\ue203One\ue204 {cite}. Two \ue200cite\ue202turn0search2\ue201 of {place}, \ue200url\ue202x\ue201."
    message = {"metadata": {"content_references": links}}
    draft = read(node("a", None, "assistant", text, **message), node("b", "a", "user", cite))
    shown = "One ([a.org](https://a.org/)). Two of Oslo, \ue200url\ue202x\ue201."
    assert [item.text for item in draft.items] == [shown, cite]


@pytest.mark.parametrize(
    "fields",
    [
        {"title": None, "create_time": None, "update_time": "yesterday", "current_node": 5},
        {"title": 7, "create_time": -1, "update_time": 1e400, "current_node": "gone"},
        {"title": "x\ny" * 300, "create_time": True, "conversation_id": None, "id": None},
    ],
)
def test_read_chatgpt_ignores_missing_head_fields(fields: dict[str, Any]) -> None:
    data = file_of(ROOT, node("u", "root", text="Hi"), node("a", "u", "assistant", "Ho"), **fields)
    draft = read_chatgpt(data.replace(b"Infinity", b"1e300"), "me")
    head = draft.conversation
    assert head.active_leaf == "a" and len(head.title) <= 200 and "\n" not in head.title
    assert 0 <= head.created_at <= head.updated_at < 1e10 or head.created_at == 0
    assert head.id == read_chatgpt(data.replace(b"Infinity", b"1e300"), "me").conversation.id


@pytest.mark.slow
def test_read_chatgpt_of_hostile_trees() -> None:
    """Cycles are refused; orphans are roots; more than 100,000 nodes are refused."""
    for parents in ({"a": "b", "b": "a"}, {"a": "a"}):
        circle = [node(name, parent, text="x") for name, parent in parents.items()]
        with pytest.raises(InvalidRequestError, match="ancestors"):
            read(ROOT, node("u", "root", text="Hi"), *circle)
    orphan = read(node("u", "nowhere", text="Hi"), node("a", "u", "assistant", "Ho"))
    assert shape(orphan) == [("u", None, "user", "Hi"), ("a", "u", "assistant", "Ho")]
    lying = json.loads(file_of(ROOT, node("u", "root", text="Hi")))
    lying["mapping"]["root"]["children"] = ["u", "u", "ghost", "root"]
    assert len(read_chatgpt(json.dumps(lying).encode(), "me").items) == 1
    many = json.dumps({"mapping": {f"n{at}": {} for at in range(100_001)}}).encode()
    with pytest.raises(InvalidRequestError, match="100000"):
        read_chatgpt(many, "me")


@pytest.mark.parametrize("num_nodes", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_read_chatgpt_of_a_deep_chain(num_nodes: int) -> None:
    """The chain is longer than Python's recursion limit."""
    deep = [node(f"n{at}", f"n{at - 1}" if at else None, text="x") for at in range(num_nodes)]
    draft = read(*deep, current_node=f"n{num_nodes - 1}")
    assert len(draft.items) == num_nodes and draft.conversation.active_leaf == f"n{num_nodes - 1}"


@pytest.mark.parametrize(
    ("mapping", "named"),
    [
        ({"n1": 5}, "n1"),
        ({"n1": {"parent": 5}}, "n1"),
        ({"n1": {"children": "x"}}, "n1"),
        ({"n1": {"message": []}}, "n1"),
        ({"n1": {"message": {"author": {"role": 1}}}}, "n1"),
        ({"n1": {"message": {"content": "x"}}}, "n1"),
        ({"n1": {"message": {"content": json.loads("[" * 200 + "]" * 200)}}}, "n1"),
        ([], "mapping"),
        (None, "mapping"),
    ],
)
def test_read_chatgpt_error_names_the_node(mapping: object, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        read_chatgpt(json.dumps({"mapping": mapping}).encode(), "me")


def test_read_chatgpt_of_random_trees_equals_recursion() -> None:
    """Every visible message is imported once, under its nearest visible ancestor."""
    generator = random.Random(11)
    for _ in range(200):
        nodes: list[Node] = [dict(ROOT, children=[])]
        for at in range(generator.randint(1, 25)):
            parent = generator.choice(nodes)["id"]
            role = generator.choice(["user", "assistant", "tool", "system"])
            nodes.append(node(f"n{at}", parent, role, generator.choice(["", f"text {at}", f"text {at}"])))
        draft = read(*nodes)
        by_id = {each["id"]: each for each in nodes}
        shown = [
            each for each in nodes[1:] if each["message"]["author"]["role"] in ("user", "assistant") and _text_of(each)
        ]
        texts = "\n\n".join(item.text for item in draft.items)
        shown_texts = sorted(part for part in texts.split("\n\n") if part)
        first_system = [item.text for item in draft.items if item.role == "system"]
        assert shown_texts == sorted([_text_of(each) for each in shown] + first_system)
        above = {item.id: item.parent_id for item in draft.items}
        for each in shown:
            if each["id"] in above:
                parent = by_id[each["parent"]]
                while parent["id"] not in above and parent["parent"] is not None:
                    parent = by_id[parent["parent"]]
                nearest = parent["id"] if parent["id"] in above else None
                assert above[each["id"]] == nearest


def _text_of(each: Node) -> str:
    text: str = each["message"]["content"]["parts"][0]
    return text


async def test_import_of_a_newer_chatgpt_export_adds_new_messages(store: ConversationStore) -> None:
    old = (ROOT, node("u", "root", text="Hi"), node("a", "u", "assistant", "Ho"))
    first = await import_draft(store, read(*(dict(each, children=[]) for each in old), current_node="a"))
    again = await import_draft(store, read(*(dict(each, children=[]) for each in old), current_node="a"))
    new = (*(dict(each, children=[]) for each in old), node("u2", "a", text="More"))
    longer = await import_draft(store, read(*new, current_node="u2"))
    assert [each.status for each in (first, again, longer)] == ["created", "unchanged", "extended"]
    tree = await store.load("me", longer.conversation.id)
    assert [item.text for item in tree.path(tree.conversation.active_leaf)] == ["Hi", "Ho", "More"]
    assert len(await store.list("me", 10)) == 1
