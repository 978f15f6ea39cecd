"""Export and import of one owner's conversations: only ids change, hostile files are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from chatcache.auth import new_key
from chatcache.conversations.fork_points import TurnRequest
from chatcache.conversations.prompt import Message
from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import (
    COMPLETED,
    FORKED,
    IN_PROGRESS,
    INCOMPLETE,
    ConversationTree,
    Item,
    new_id,
)
from chatcache.conversations.turns import TurnService
from chatcache.errors import InvalidRequestError
from chatcache.storage.sqlite import SqliteStore
from chatcache.tokenizer.chat_template import ChatTemplate
from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.transfer import token_check
from chatcache.transfer.draft import Draft
from chatcache.transfer.format import ExportWriter
from chatcache.transfer.importer import import_draft, read_draft
from chatcache.transfer.token_check import TokenCheck
from tests.support.conversation_trees import GeneratedTree, trees
from tests.support.generated_stores import full_tree
from tests.tokenizer.tokenizers import backend_of

ODD_TOOLS: list[object] = [5, [5], [{}], [{"name": 1}], {"a": 1}]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(backend_of("bytelevel"))


def export(tree: ConversationTree) -> bytes:
    return ExportWriter(tokenizer().digest).conversation(tree)


def draft_of(data: bytes, owner: str = "me") -> Draft:
    draft = read_draft(data, owner, tokenizer())
    assert draft is not None
    return draft


def renamed(data: bytes) -> Any:
    """Return an export with its ids replaced by their order of appearance."""
    file = json.loads(data)
    assert len(file.pop("sha256")) == 64  # of the ids, among others
    names: dict[str, str] = {file["conversation"]["id"]: "conversation"}
    for item in file["items"]:
        names[item["id"]] = f"item {len(names)}"
    for item in file["items"]:
        if item.get("response_id"):
            names.setdefault(item["response_id"], f"turn {len(names)}")
    for turn in sorted(file["turns"], key=lambda turn: names.get(turn["parent_id"], "")):
        names.setdefault(turn["id"], f"turn {len(names)}")

    def with_names(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_names(each) for key, each in value.items()}
        if isinstance(value, list):
            return [with_names(each) for each in value]
        return names.get(value, value) if isinstance(value, str) else value

    file = with_names(file)
    file["turns"].sort(key=lambda turn: turn["id"])
    return file


async def round_trip(store: ConversationStore, tree: ConversationTree, owner: str) -> ConversationTree:
    imported = await import_draft(store, draft_of(export(tree), owner))
    return await store.load(owner, imported.conversation.id)


async def test_import_of_an_export_keeps_everything_but_the_ids(store: ConversationStore) -> None:
    source = full_tree()
    copy = await round_trip(store, source, "you")
    before = renamed(export(source))
    assert before["turns"][1]["status"] == IN_PROGRESS
    before["turns"][1]["status"] = INCOMPLETE  # an import ends running responses
    assert renamed(export(copy)) == before
    assert not {*source.items, *source.turns, "conv_src"} & {*copy.items, *copy.turns, copy.conversation.id}
    assert [copy.token_sequence(item) for item in copy.items.values()] == [
        source.token_sequence(item) for item in source.items.values()
    ]


@settings(deadline=None, max_examples=60)
@given(trees())
@pytest.mark.slow
def test_import_of_any_exported_tree_restores_it(generated: GeneratedTree) -> None:
    async def there_and_back() -> None:
        stores = {"a": SqliteStore(":memory:"), "b": SqliteStore(":memory:")}
        settled = [replace(turn, status=COMPLETED) for turn in generated.tree.turns.values()]
        tree = ConversationTree(generated.tree.conversation, generated.tree.items.values(), settled)
        first = await round_trip(stores["a"], tree, "a")
        second = await round_trip(stores["b"], first, "b")
        assert renamed(export(first)) == renamed(export(tree)) == renamed(export(second))
        assert [first.token_sequence(item) for item in first.items.values()] == [
            tree.token_sequence(item) for item in tree.items.values()
        ]
        again = await import_draft(stores["a"], draft_of(export(tree), "a"))
        assert (again.status, again.num_items) == ("unchanged", 0)
        for each in stores.values():
            await each.close()

    asyncio.run(there_and_back())


async def test_import_again_adds_only_new_messages(store: ConversationStore) -> None:
    source = full_tree()
    for dry_run, status in ((True, "created"), (False, "created"), (True, "unchanged"), (False, "unchanged")):
        imported = await import_draft(store, draft_of(export(source)), dry_run=dry_run)
        assert (imported.status, imported.num_items) == (status, 6 if status == "created" else 0)
        assert len(await store.list_ids("me", 9)) == (0 if dry_run and status == "created" else 1)
    more = Item("msg_d", "msg_c", "user", "More", created_at=9.0)
    longer = ConversationTree(
        replace(source.conversation, active_leaf="msg_d"), (*source.items.values(), more), source.turns.values()
    )
    for dry_run, status in ((True, "extended"), (False, "extended"), (False, "unchanged")):
        imported = await import_draft(store, draft_of(export(longer)), dry_run=dry_run)
        assert (imported.status, imported.num_items) == (status, 1 if status == "extended" else 0)
    tree = await store.load("me", imported.conversation.id)
    assert [item.text for item in tree.path(tree.conversation.active_leaf)][-1] == "More"
    assert (await import_draft(store, draft_of(export(source), "you"))).status == "created"  # another owner's own copy
    assert len(await store.list_ids("me", 9)) == len(await store.list_ids("you", 9)) == 1


async def test_import_into_the_original_store_changes_nothing(store: ConversationStore) -> None:
    source = full_tree()
    await store.merge(source.conversation, tuple(source.items.values()), tuple(source.turns.values()))
    assert (await import_draft(store, draft_of(export(source)))).status == "unchanged"
    assert list(await store.list_ids("me", 9)) == ["conv_src"]


async def test_import_drops_tokens_of_another_tokenizer(store: ConversationStore) -> None:
    """The text is imported without tokens, which would be another text here."""
    data = ExportWriter("another").conversation(full_tree())
    draft = draft_of(data)
    assert not draft.is_exact and draft_of(export(full_tree())).is_exact
    copy = await store.load("me", (await import_draft(store, draft)).conversation.id)
    assert [item.text for item in copy.items.values()] == [item.text for item in full_tree().items.values()]
    assert all(copy.token_sequence(item) == () == item.token_ids for item in copy.items.values())


def test_export_of_one_branch_is_a_complete_file() -> None:
    tree = full_tree()
    file = json.loads(ExportWriter(tokenizer().digest).conversation(tree, tree.path("msg_f")))
    assert [item["id"] for item in file["items"]] == ["msg_a", "msg_f"]
    assert [turn["id"] for turn in file["turns"]] == ["resp_1"]
    assert file["conversation"]["active_leaf"] == "msg_f"
    assert [
        item.id for item in draft_of(ExportWriter(tokenizer().digest).conversation(tree, tree.path("msg_f"))).items
    ] == [
        "msg_a",
        "msg_f",
    ]
    assert json.loads(ExportWriter(tokenizer().digest).conversation(tree, ()))["items"] == []


def changed(place: str, value: object) -> bytes:
    """Return the full export with one value replaced ("items.2.parent_id")."""
    file = json.loads(export(full_tree()))
    node: Any = file
    *above, last = place.split(".")
    for name in above:
        node = node[int(name) if isinstance(node, list) else name]
    node[int(last) if isinstance(node, list) else last] = value
    return json.dumps(file).encode()


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("object", "something", "neither"),
        ("version", 3, "version"),
        ("items", {}, "items"),
        ("conversation", [], "conversation"),
        ("conversation.active_leaf", "msg_x", "active_leaf"),
        ("conversation.updated_at", -1, r"conversation\.updated_at"),
        ("conversation.created_at", 1e300, r"conversation\.created_at"),
        ("conversation.title", "x" * 201, r"conversation\.title"),
        ("conversation.metadata", {"a": 1}, r"conversation\.metadata"),
        ("items.1.parent_id", "msg_x", r"items\[1\]\.parent_id"),
        ("items.0.parent_id", "msg_c", r"items\[0\].*ancestors"),
        ("items.0.parent_id", "msg_a", r"items\[0\].*ancestors"),
        ("items.2.id", "msg_a", r"items\[2\]\.id.*items\[0\]"),
        ("items.1.role", "robot", r"items\[1\]\.role"),
        ("items.1.text", None, r"items\[1\]\.text"),
        ("items.1.token_ids", [1.5], r"items\[1\]\.token_ids"),
        ("items.1.token_ids", [-1], r"items\[1\]\.token_ids"),
        ("items.1.token_ids", [2**31], r"items\[1\]\.token_ids"),
        ("items.1.token_ids", [10**6], "token_ids must be between 0 and"),
        ("items.1.status", "odd", r"items\[1\]\.status"),
        ("items.1.parts", {"tool_calls": [{}]}, r"items\[1\]\.parts\.tool_calls"),
        ("turns.1.base_item_id", "msg_c", r"turns\[1\]\.base_item_id"),  # its own output, which would be a cycle
        ("turns.1.base_item_id", "msg_f", r"turns\[1\]\.base_item_id"),
        ("turns.1.base_item_id", "msg_x", r"turns\[1\]\.base_item_id"),
        ("turns.1.parent_id", "msg_x", r"turns\[1\]\.parent_id"),
        ("turns.1.parent_id", "", r"turns\[1\]\.base_item_id"),
        ("turns.1.id", "resp_1", r"turns\[1\]\.id"),
        ("turns.1.id", "msg_a", r"turns\[1\]\.id"),
        ("turns.1.prompt_ids", [10**6], "prompt_ids must be between 0 and"),
        ("turns.1.usage", {}, r"turns\[1\]\.usage"),
        ("turns.1.echo", [], r"turns\[1\]\.echo"),
        *(("turns.1.echo.tools", odd, r"turns\[1\]\.echo\.tools") for odd in ODD_TOOLS),
        ("turns.1.echo", json.loads('{"a":' * 40 + "1" + "}" * 40), r"turns\[1\]\.echo.*32 deep"),
    ],
)
def test_read_draft_error_names_the_field(place: str, value: object, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        read_draft(changed(place, value), "me", tokenizer())


@pytest.mark.parametrize(
    "data",
    [
        *(b"{", b"[]", b"1", b"{}", b'{"object":1}', b'{"mapping":1}', b'{"object":"conversation.export"}', b"\xff{}"),
        rb'{"object":"conversation.export","version":1,"tokenizer":"\ud800"}',
        b'{"a":' * 100_000,
        b'{"mapping":' + b"[" * 100_000,
    ],
)
def test_read_draft_of_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read_draft(data, "me", tokenizer())


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (rb"a\ud800", "a\ufffd"),
        (rb"\uDC00\ud83d\ud83d\ude00 \n", "\ufffd\ufffd\U0001f600"),
        (rb"\\ud800 \ud800", "\\ud800 \ufffd"),
    ],
)
def test_read_draft_replaces_surrogates_without_their_pair(escaped: bytes, text: str) -> None:
    node = b'{"message":{"author":{"role":"user"},"content":{"content_type":"text","parts":["%s"]}}}' % escaped
    draft = read_draft(b'{"mapping":{"a":%s}}' % node, "me", tokenizer())
    assert draft is not None and [item.text for item in draft.items] == [text]


def test_read_draft_accepts_items_in_any_order() -> None:
    file = json.loads(export(full_tree()))
    file["items"].reverse()
    items = draft_of(json.dumps(file).encode()).items
    seen: set[str | None] = {None}
    for item in items:
        assert item.parent_id in seen
        seen.add(item.id)
    assert len(items) == 6


def test_read_draft_drops_echo_fields_of_the_response_object() -> None:
    turns = draft_of(changed("turns.1.echo", {"id": "x", "output": 5, "status": "odd", "tools": []})).turns
    assert turns[1].echo == {"tools": []}


async def test_import_renames_ids_in_echoed_requests(store: ConversationStore) -> None:
    copy = await round_trip(store, full_tree(), "you")
    (turn,) = (turn for turn in copy.turns.values() if turn.echo)
    roles = {item.role: item.id for item in copy.items.values()}
    assert turn.echo["conversation"] == {"id": copy.conversation.id}
    assert turn.echo["input_item_ids"] == [roles["tool"]]
    assert copy.items[str(turn.echo["forked_item_id"])].finish_reason == FORKED
    odd = changed("turns.1.echo", {"conversation": 5, "input_item_ids": {"a": 1}, "forked_item_id": [1]})
    imported = await import_draft(store, draft_of(odd, "them"))
    (turn,) = (t for t in (await store.load("them", imported.conversation.id)).turns.values() if t.echo)
    assert turn.echo == {
        "conversation": {"id": imported.conversation.id},
        "input_item_ids": [],
        "forked_item_id": None,
    }


def test_read_draft_of_the_end_line_is_none() -> None:
    assert read_draft(ExportWriter("").end()[1], "me", tokenizer()) is None


@pytest.mark.parametrize("num_items", [2_000, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_import_of_very_deep_and_very_wide_trees(num_items: int, tmp_path: Path) -> None:
    """Chains longer than Python's recursion limit, and as many siblings, are imported, walked and exported."""
    store = SqliteStore(tmp_path / "c.db")
    for parent in (lambda at: at - 1, lambda at: 0):
        items: list[Mapping[str, object]] = [
            {
                "id": f"m{at}",
                "parent_id": f"m{parent(at)}" if at else None,
                "role": "user",
                "text": "x",
            }
            for at in range(num_items)
        ]
        head = {"id": f"c{parent(5)}", "created_at": 1.0, "updated_at": 1.0, "active_leaf": f"m{num_items - 1}"}
        file = {"object": "conversation.export", "version": 1, "tokenizer": "", "conversation": head, "turns": []}
        draft = draft_of(json.dumps({**file, "items": items[::-1]}).encode())
        imported = await import_draft(store, draft)
        tree = await store.load("me", imported.conversation.id)
        assert len(tree.path(tree.conversation.active_leaf)) == (num_items if parent(5) == 4 else 2)
        assert len(json.loads(export(tree))["items"]) == num_items
    with pytest.raises(InvalidRequestError, match="100000"):
        draft_of(json.dumps({**file, "items": [0] * 100_001}).encode())
    await store.close()


async def test_import_reads_a_version_1_export(store: ConversationStore) -> None:
    """A file written by the first release candidate is read like the new one."""
    first, second, end = (Path(__file__).parent / "data" / "export_v1.jsonl").read_bytes().splitlines()
    assert read_draft(end, "me", tokenizer()) is None
    assert draft_of(first) == draft_of(export(full_tree())) and draft_of(first).is_exact
    other = draft_of(second)
    assert (other.conversation.id, other.conversation.title, other.items) == ("conv_other", "Other", ())
    assert (await import_draft(store, draft_of(first))).status == "created"
    assert (await import_draft(store, draft_of(export(full_tree())))).status == "unchanged"


async def test_import_of_a_whole_store_export_drops_owners_keys_and_tokens(store: ConversationStore) -> None:
    """A line of `db export` becomes the importing owner's; its exporter did not load the tokenizer of the tokens."""
    writer = ExportWriter(None, has_owners=True)
    _, record = new_key("acme")
    assert read_draft(writer.key(record), "me", tokenizer()) is None
    tree = full_tree()
    draft = draft_of(
        writer.conversation(ConversationTree(replace(tree.conversation, owner="else", active_leaf=None), (), ())), "me"
    )
    assert draft.conversation.owner == "me" and not draft.is_exact
    copy = await import_draft(store, draft_of(writer.conversation(tree), "me"))
    assert len((await store.load("me", copy.conversation.id)).items) == len(tree.items)


def test_read_draft_ignores_the_checksum_of_an_edited_export() -> None:
    assert draft_of(changed("items.0.text", "edited")).items[0].text == "edited"


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def chatting() -> Tokenizer:
    return Tokenizer(backend_of("bytelevel"), template=ChatTemplate(TEMPLATE, origin="test", variables={}))


async def answer(turns: TurnService, text: str, reply: str, **position: str | None) -> str:
    """Store a turn whose reply has tokens, one per character, and return the id of the conversation."""
    planned = await turns.plan(TurnRequest("me", "m", (Message(role="user", content=text),), **position))  # type: ignore[arg-type]
    conversation = await turns.open(planned)
    assert conversation is not None
    ids = tuple(token for char in reply for token in chatting().encode(char))
    item = Item(new_id("msg"), planned.turn.parent_id, "assistant", reply, ids, planned.turn.id, finish_reason="stop")
    await turns.complete(conversation, planned, (item,), COMPLETED, None)
    return conversation.id


async def three_turns(turns: TurnService) -> Any:
    """Return the export of a conversation; the prompt of the last turn contains the other turns as text."""
    conversation = await answer(turns, "I am Ada", "Hi Ada")
    await answer(turns, "Who am I?", "Ada", conversation_id=conversation)
    await answer(turns, "And now?", "Ada", conversation_id=conversation, instructions="Be kind")
    return json.loads(export(await turns.store.load("me", conversation)))


async def import_checked(turns: TurnService, file: object, owner: str) -> tuple[bool, ConversationTree]:
    check = TokenCheck(turns, chatting(), ReplyFormat())
    imported = await import_draft(turns.store, draft_of(json.dumps(file).encode(), owner), check)
    return imported.is_exact, await turns.store.load(owner, imported.conversation.id)


def exact_replies(tree: ConversationTree) -> list[bool]:
    replies = [item for item in tree.items.values() if item.role == "assistant"]
    assert all(bool(item.token_ids) == bool(tree.token_sequence(item)) for item in replies)
    return [bool(item.token_ids) for item in replies]


async def check_prompts(turns: TurnService, tree: ConversationTree) -> None:
    """Check that what continues or forks a reply has exactly the text of the messages in its prompt."""
    for reply in [item for item in tree.items.values() if item.role == "assistant"]:
        request = TurnRequest("you", "m", (Message(role="user", content="So?"),), previous_item_id=reply.id)
        planned = await turns.plan(request)
        shown = chatting().render(planned.messages, add_generation_prompt=True)
        assert chatting().decode(planned.prompt.token_ids, skip_special_tokens=False) == shown
        if reply.token_ids:
            prompt = await turns.prompt_up_to(tree, reply, len(reply.token_ids))
            written = chatting().decode(prompt.token_ids, skip_special_tokens=False)
            assert written == prompt.text + reply.text


async def test_checked_import_of_an_export_keeps_all_tokens(store: ConversationStore) -> None:
    turns = TurnService(store, chatting())
    file = await three_turns(turns)
    is_exact, copy = await import_checked(turns, file, "you")
    source = await store.load("me", file["conversation"]["id"])
    assert is_exact and exact_replies(copy) == [True, True, True]
    assert [turn.base_item_id is not None for turn in copy.turns.values()] == [False, True, False]
    assert list(map(copy.token_sequence, copy.items.values())) == list(
        map(source.token_sequence, source.items.values())
    )


@pytest.mark.parametrize(
    ("place", "value", "exact"),
    [
        ("items.0.text", "I am Bob", [False, False, False]),
        ("items.1.text", "Hi Bob", [False, False, False]),
        ("items.1.parts", {"raw": "Hi Bob"}, [False, False, True]),
        ("items.1.parts", {"reasoning": "Bob?", "raw": "Hi Ada"}, [False, False, True]),
        ("items.2.text", "And I?", [True, False, False]),
        ("items.1.token_ids", [], [False, False, True]),
        ("items.3.text", "Bob", [True, False, False]),
        ("items.3.token_ids", [5, 6], [True, False, True]),
        ("items.5.text", "Bob", [True, True, False]),
        ("items.5.token_ids", chatting().encode_rendered("Ada<|im_start|>"), [True, True, False]),
        ("turns.0.prompt_ids", chatting().encode("I am Bob"), [False, False, True]),
        ("turns.0.instructions", "Be rude", [False, False, True]),
        ("turns.1.prompt_ids", [5], [True, False, True]),
        ("turns.1.base_item_id", None, [True, False, True]),
        ("turns.1.echo", {"tools": [{"name": "f"}]}, [True, True, True]),
        ("turns.2.instructions", "Be rude", [True, True, False]),
    ],
)
async def test_checked_import_of_an_edited_export_has_the_tokens_of_its_text(
    store: ConversationStore, place: str, value: object, exact: list[bool]
) -> None:
    """No reply continues from tokens of another text than the messages show."""
    turns = TurnService(store, chatting())
    file = await three_turns(turns)
    part, at, name = place.split(".")
    file[part][int(at)][name] = value
    is_exact, copy = await import_checked(turns, file, "you")
    assert exact_replies(copy) == exact and is_exact == all(exact)
    await check_prompts(turns, copy)


async def test_checked_import_compares_new_replies_with_the_messages_that_are_stored(store: ConversationStore) -> None:
    turns = TurnService(store, chatting())
    file = await three_turns(turns)
    edited = {**file, "items": file["items"][:2], "turns": file["turns"][:1]}
    edited["items"] = [{**file["items"][0], "text": "I am Bob"}, file["items"][1]]
    edited["conversation"] = {**file["conversation"], "active_leaf": file["items"][1]["id"]}
    assert exact_replies((await import_checked(turns, edited, "you"))[1]) == [False]
    is_exact, copy = await import_checked(turns, file, "you")
    assert not is_exact and exact_replies(copy) == [False, False, False]
    assert next(iter(copy.items.values())).text == "I am Bob"
    await check_prompts(turns, copy)


async def test_checked_import_of_another_candidate_has_the_tokens_of_its_text(store: ConversationStore) -> None:
    """The response is stored already, and so are its prompt and its first candidate."""
    turns = TurnService(store, chatting())
    file = await three_turns(turns)
    await import_checked(turns, file, "you")
    for text, is_exact in (("Hi Ada", True), ("Hi Bob", False)):
        file["items"].append({**file["items"][1], "id": f"msg {text}", "index": 1, "text": text})
        imported, copy = await import_checked(turns, file, "you")
        assert imported == is_exact and exact_replies(copy)[3:] == [True, False][: len(copy.items) - 6]
        await check_prompts(turns, copy)


async def test_checked_import_of_a_response_of_stored_replies_has_no_tokens(store: ConversationStore) -> None:
    turns = TurnService(store, chatting())
    file = await three_turns(turns)
    await import_checked(turns, {**file, "turns": []}, "you")
    is_exact, copy = await import_checked(turns, file, "you")
    assert not is_exact and exact_replies(copy) == [False, False, False] and len(copy.turns) == 3
    await check_prompts(turns, copy)


async def test_work_of_a_checked_import_is_bounded(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_check, "_MAX_CHECKED_CHARS", 400)
    turns = TurnService(store, chatting())
    file = await three_turns(turns)
    check = TokenCheck(turns, chatting(), ReplyFormat())
    for owner, exact in (("you", [True, True, False]), ("them", [False, False, False])):  # the bound is that of both
        imported = await import_draft(store, draft_of(json.dumps(file).encode(), owner), check)
        copy = await store.load(owner, imported.conversation.id)
        assert not imported.is_exact and exact_replies(copy) == exact


async def test_work_of_a_checked_import_counts_tokens(store: ConversationStore) -> None:
    turns, check = TurnService(store, chatting()), TokenCheck(TurnService(store, chatting()), chatting(), ReplyFormat())
    file = await three_turns(turns)
    file["items"][1]["token_ids"] *= 1000
    await import_draft(store, draft_of(json.dumps(file).encode(), "you"), check)
    assert check.num_chars > 4 * len(file["items"][1]["token_ids"])
