"""Exports of Open WebUI, LibreChat and llama.cpp's web UI, reduced to the fields that matter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chatcache.errors import InvalidRequestError
from chatcache.transfer.draft import Draft
from chatcache.transfer.foreign import read_foreign

Json = dict[str, Any]
ROOT = "00000000-0000-0000-0000-000000000000"


def read(line: Json) -> Draft:
    draft = read_foreign(json.dumps(line).encode(), "me")
    assert draft is not None
    return draft


def tree(draft: Draft) -> list[tuple[str, str | None, str, str]]:
    return [(item.id, item.parent_id, item.role, item.text) for item in draft.items]


def open_webui(*messages: Json, current: str | None = None) -> Json:
    history = {"messages": {each["id"]: each for each in messages}, "currentId": current}
    chat = {"title": "inner", "models": ["m"], "history": history, "messages": list(messages)}
    return {"id": "owui-1", "user_id": "u", "title": "A  chat", "chat": chat, "created_at": 1700000000, "updated_at": 5}


def test_open_webui_chat_is_read_with_its_branches() -> None:
    parts = [{"type": "text", "text": "Look"}, {"type": "image_url"}]
    draft = read(
        open_webui(
            {"id": "a", "parentId": None, "childrenIds": ["b", "c"], "role": "user", "content": " Hi ", "timestamp": 9},
            {"id": "b", "parentId": "a", "role": "assistant", "content": "One"},
            {"id": "c", "parentId": "a", "role": "assistant", "content": "Two", "model": "m"},
            {
                "id": "d",
                "parentId": "c",
                "role": "user",
                "content": parts,
            },
            current="b",
        )
    )
    assert tree(draft) == [
        ("a", None, "user", "Hi"),
        ("b", "a", "assistant", "One"),
        ("c", "a", "assistant", "Two"),
        ("d", "c", "user", "Look"),
    ]
    head = draft.conversation
    assert (head.id, head.owner, head.title, head.active_leaf) == ("owui-1", "me", "A chat", "b")
    assert (head.created_at, head.updated_at) == (1700000000, 1700000000)
    assert [item.created_at for item in draft.items] == [9, 1700000000, 1700000000, 1700000000]
    assert draft.skipped == {"image_url": 1}


@pytest.mark.parametrize("quoted", ["> Is 1 < 2?\n> \n> &gt; yes", "&gt; Is 1 &lt; 2?\n&gt; \n&gt; &amp;gt; yes"])
def test_open_webui_blocks_of_reasoning_and_calls_are_no_text(quoted: str) -> None:
    text = f"""\
<details type="reasoning" done="true" duration="3">
<summary>Thought for 3 seconds</summary>
{quoted}
</details>
I look.
<details type="tool_calls" done="true" id="c" name="f" arguments="&quot;{{}}&quot;">
<summary>Tool Executed</summary>
</details>
<details><summary>More</summary>Yes</details>
<details type="reasoning" done="false">"""
    question = {"id": "a", "parentId": None, "role": "user", "content": '<details type="reasoning">x</details>'}
    draft = read(open_webui(question, {"id": "b", "parentId": "a", "role": "assistant", "content": text}))
    assert draft.items[0].text == question["content"]
    assert draft.items[1].parts.reasoning == "Is 1 < 2?\n\n&gt; yes" and draft.skipped == {"tool_calls": 1}
    assert draft.items[1].text == (
        'I look.\n\n<details><summary>More</summary>Yes</details>\n<details type="reasoning" done="false">'
    )


def test_messages_below_a_skipped_one_follow_the_nearest_above() -> None:
    draft = read(
        open_webui(
            {"id": "a", "parentId": None, "role": "user", "content": "Hi"},
            {"id": "b", "parentId": "a", "role": "tool", "content": "{}"},
            {"id": "c", "parentId": "b", "role": "assistant", "content": ""},
            {"id": "d", "parentId": "c", "role": "assistant", "content": "Yes"},
            current="c",
        )
    )
    assert tree(draft) == [("a", None, "user", "Hi"), ("d", "a", "assistant", "Yes")]
    assert draft.conversation.active_leaf == "a" and draft.skipped == {"tool": 1, "empty": 1}


def message(name: str, parent: str, text: str, *, user: bool, **more: Any) -> Json:
    times = {"createdAt": "2025-03-01T10:00:00.500Z"}
    return {"messageId": name, "parentMessageId": parent, "text": text, "isCreatedByUser": user, **times, **more}


def test_librechat_conversation_is_read_flat_and_nested() -> None:
    think = [{"type": "think", "think": "Hm."}, {"type": "text", "text": {"value": "Two"}}]
    flat = [
        message("a", ROOT, "Hi", user=True),
        message("b", "a", "One", user=False),
        message("c", "a", "", user=False, content=think),
    ]
    answers = [{**flat[1], "children": []}, {**flat[2], "children": []}]
    nested = [{**flat[0], "children": answers}]
    for messages, recursive in ((flat, False), (nested, True)):
        draft = read(
            {"conversationId": "lc-1", "title": "T", "branches": True, "recursive": recursive, "messages": messages}
        )
        assert tree(draft) == [
            ("a", None, "user", "Hi"),
            ("b", "a", "assistant", "One"),
            ("c", "a", "assistant", "Two"),
        ]
        assert draft.items[2].parts.reasoning == "Hm."
        assert draft.conversation.id == "lc-1" and draft.conversation.active_leaf == "c"
        assert draft.conversation.created_at == 1740823200.5


def test_llama_cpp_conversation_is_read_without_its_root() -> None:
    conv = {"id": "ll-1", "name": "T", "lastModified": 1740823200500, "currNode": "b"}
    messages = [
        {"id": "r", "type": "root", "role": "system", "content": "", "parent": None, "timestamp": 1740823200000},
        {"id": "s", "type": "text", "role": "system", "content": "Be brief.", "parent": "r"},
        {
            "id": "a",
            "type": "text",
            "role": "user",
            "content": "Hi",
            "parent": "s",
            "timestamp": 1740823200000,
            "extra": [
                {"type": "textFile", "name": "n.txt", "content": "notes"},
                {"type": "imageFile", "name": "p.png", "base64Url": "data:"},
            ],
        },
        {"id": "b", "type": "text", "role": "assistant", "content": "Yes", "thinking": "Hm.", "parent": "a"},
    ]
    draft = read({"conv": conv, "messages": messages})
    assert tree(draft) == [
        ("s", None, "system", "Be brief."),
        ("a", "s", "user", "Hi\n\nn.txt:\n\nnotes"),
        ("b", "a", "assistant", "Yes"),
    ]
    assert draft.items[2].parts.reasoning == "Hm." and draft.conversation.updated_at == 1740823200.5
    assert draft.skipped == {"imageFile": 1}


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"chat": {}},
        {"chat": {"history": {"messages": []}}},
        {"conversationId": "x"},
        {"conv": {}, "messages": {}},
        {"messages": []},
    ],
)
def test_other_objects_are_of_an_unknown_format(line: Json) -> None:
    assert read_foreign(json.dumps(line).encode(), "me") is None


@pytest.mark.parametrize(
    "messages",
    [
        [{"id": "a", "parentId": "a", "role": "tool", "content": ""}],
        [
            {"id": "a", "parentId": "b", "role": "user", "content": "x"},
            {"id": "b", "parentId": "a", "role": "user", "content": "y"},
        ],
        [{"id": "", "parentId": None, "role": "user", "content": "x"}],
        [{"id": "x" * 129, "parentId": None, "role": "user", "content": "x"}],
    ],
)
def test_malformed_trees_are_refused(messages: list[Json]) -> None:
    with pytest.raises(InvalidRequestError):
        read(open_webui(*messages))


def test_malformed_optional_fields_are_ignored() -> None:
    line = open_webui({"id": "a", "parentId": 5, "role": "user", "content": "x", "timestamp": "soon"}, current="zz")
    draft = read(line | {"title": 7, "created_at": -1, "updated_at": True, "id": None})
    assert tree(draft) == [("a", None, "user", "x")]
    assert draft.conversation.title == "inner" or draft.conversation.title == ""
    assert len(draft.conversation.id) == 64 and draft.conversation.active_leaf == "a"
    many = {str(n): {"id": str(n), "parentId": str(n - 1), "role": "tool"} for n in range(3000)}
    line["chat"]["history"]["messages"] = many
    assert read(line).items == ()
