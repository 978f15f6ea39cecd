"""Concurrent writers against plain lists: acknowledged changes happened once, in the order of `rev`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from chatcache.conversations.fork_points import TurnRequest
from chatcache.conversations.prompt import Message, Prompt
from chatcache.conversations.search import SearchQuery
from chatcache.conversations.store import ConversationStore, StaleRevisionError, encode_cursor
from chatcache.conversations.tree import (
    COMPLETED,
    MAX_EDIT_ATTEMPTS,
    Conversation,
    ConversationBusyError,
    Item,
    Turn,
    plan_message_deletion,
    plan_response_deletion,
)
from chatcache.conversations.turns import PlannedTurn, TurnService, add_messages
from chatcache.errors import NotFoundError
from tests.gateway.serving import tiny_tokenizer
from tests.transfer.test_importer import tokenizer

Change = Callable[["Plain"], None]


@dataclass
class Plain:
    """One conversation as plain lists."""

    title: str = ""
    leaf: str | None = None
    parents: dict[str, str | None] = field(default_factory=dict)

    def add(self, item: str, parent: str | None) -> None:
        self.parents[item] = parent
        self.leaf = item

    def remove(self, item: str) -> None:
        above = self.parents.pop(item)
        self.parents = {name: above if parent == item else parent for name, parent in self.parents.items()}
        self.leaf = above if self.leaf == item else self.leaf

    def rename(self, title: str) -> None:
        self.title = title

    def point(self, leaf: str) -> None:
        self.leaf = leaf


async def tab(store: ConversationStore, name: str, generator: random.Random, log: dict[int, Change]) -> int:
    """Run one client that writes with the rev it read, and reads again when stale; return its conflicts."""
    num_conflicts = 0
    for step in range(12):
        tree = await store.load("me", "conv")
        head, items = tree.conversation, sorted(tree.items)
        await asyncio.sleep(0)
        kind = generator.choice(["add", "add", "add", "rename", "point", "remove"])
        try:
            if kind == "add":
                parent = generator.choice([None, *items])
                item = Item(f"{name}_{step:02}", parent, "user", f"words of {name}")
                done = await store.append("me", "conv", [item], active_leaf=item.id, expected_rev=head.rev)
                log[done.rev] = lambda plain, item=item, parent=parent: plain.add(item.id, parent)  # type: ignore[misc]
            elif kind == "rename":
                title = f"{name} {step}"
                done = await store.update("me", "conv", title=title, expected_rev=head.rev)
                log[done.rev] = lambda plain, title=title: plain.rename(title)  # type: ignore[misc]
            elif items and kind == "point":
                leaf = generator.choice(items)
                done = await store.update("me", "conv", active_leaf=leaf, expected_rev=head.rev)
                log[done.rev] = lambda plain, leaf=leaf: plain.point(leaf)  # type: ignore[misc]
            elif items:
                gone = generator.choice(items)
                done = await store.delete_messages(
                    "me", "conv", plan_message_deletion(tree, gone), expected_rev=head.rev
                )
                log[done.rev] = lambda plain, gone=gone: plain.remove(gone)  # type: ignore[misc]
        except StaleRevisionError as stale:
            num_conflicts += stale.current.rev > head.rev
    return num_conflicts


@pytest.mark.parametrize("seed", range(4))
async def test_concurrent_edits_give_one_history_by_rev(store: ConversationStore, seed: int) -> None:
    await store.create(Conversation("conv", "me", 1.0, 1.0))
    log: dict[int, Change] = {}
    tabs = [tab(store, f"t{number}", random.Random(f"{seed}.{number}"), log) for number in range(8)]
    conflicts = sum(await asyncio.gather(*tabs))
    plain = Plain()
    for rev in sorted(log):
        log[rev](plain)
    tree = await store.load("me", "conv")
    assert sorted(log) == list(range(1, tree.conversation.rev + 1)), "every revision has one writer"
    assert {item.id: item.parent_id for item in tree.items.values()} == plain.parents
    assert (tree.conversation.title, tree.conversation.active_leaf) == (plain.title, plain.leaf)
    assert conflicts > 10 and len(log) > 10
    hits = await store.search("me", SearchQuery.parse("words of"), 5)
    assert bool(hits) == bool(plain.parents)


async def test_messages_appended_concurrently_follow_each_other(store: ConversationStore) -> None:
    await store.create(Conversation("conv", "me", 1.0, 1.0))
    texts = [f"m{number}" for number in range(24)]

    def add(text: str, parent_id: str | None = None) -> Awaitable[tuple[Conversation, tuple[Item, ...]]]:
        pair: list[Message] = [{"role": "user", "content": text}, {"role": "user", "content": f"after {text}"}]
        return add_messages(store, "me", "conv", pair, parent_id)

    await asyncio.gather(*map(add, texts))
    tree = await store.load("me", "conv")
    path = [item.text for item in tree.path(tree.conversation.active_leaf)]
    assert sorted(path[::2]) == sorted(texts) and path[1::2] == [f"after {text}" for text in path[::2]]
    await asyncio.gather(*(add(text, parent_id="root") for text in texts))
    tree = await store.load("me", "conv")
    assert sum(item.parent_id is None for item in tree.items.values()) == 1 + len(texts), "the client named the place"


async def test_append_that_others_always_overtake_is_refused_as_busy(store: ConversationStore) -> None:
    await store.create(Conversation("conv", "me", 1.0, 1.0))
    message: Message = {"role": "user", "content": "x"}
    num_reads = 0

    class Overtaking:
        """A store in which another client is always slightly faster."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        async def get(self, owner: str, conversation_id: str) -> Conversation:
            nonlocal num_reads
            num_reads += 1
            head = await store.get(owner, conversation_id)
            await store.update(owner, conversation_id, title=f"title {num_reads}")
            return head

    overtaking: Any = Overtaking()
    with pytest.raises(ConversationBusyError):
        await add_messages(overtaking, "me", "conv", [message])
    assert num_reads == MAX_EDIT_ATTEMPTS
    with pytest.raises(StaleRevisionError):
        await add_messages(overtaking, "me", "conv", [message], expected_rev=num_reads)
    assert num_reads == MAX_EDIT_ATTEMPTS + 1, "a client that names a revision decides itself"
    assert not (await store.load("me", "conv")).items


async def test_complete_keeps_a_leaf_that_is_moved_concurrently(store: ConversationStore) -> None:
    """The leaf is moved between reading it and storing the reply: the reply is stored, and the leaf stays."""
    asked, other = Item("u", None, "user", "?"), Item("v", None, "user", "other")
    turn = Turn("resp", "u", "m", 1.0, None, (1,))
    conversation = Conversation("conv", "me", 1.0, 1.0, active_leaf="u")
    await store.create(conversation, [asked, other], turn)

    class Interrupted:
        """A store in which another client is always slightly faster."""

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        async def get(self, owner: str, conversation_id: str) -> Conversation:
            head = await store.get(owner, conversation_id)
            if head.active_leaf == "u":
                await store.update(owner, conversation_id, active_leaf="v")
            return head

    conversations = TurnService(Interrupted(), tokenizer())  # type: ignore[arg-type]
    request = TurnRequest("me", "m")
    planned = PlannedTurn(request, turn, (), Prompt("", (1,)), (), conversation, "conv")
    reply = Item("a", "u", "assistant", "!", (2,), "resp")
    head = await conversations.complete(conversation, planned, [reply], COMPLETED, None)
    tree = await store.load("me", "conv")
    assert head.active_leaf == tree.conversation.active_leaf == "v"
    assert "a" in tree.items and tree.turns["resp"].status == COMPLETED


async def two_turns(store: ConversationStore) -> None:
    """Store u1 - a1 (first) - u2 - a2 (second, on a1), and b2 as another reply to u2 (third, on a1)."""
    items = (
        Item("u1", None, "user", "My name is Ada.", response_id="first"),
        Item("a1", "u1", "assistant", "Hi", (7, 8), "first"),
        Item("u2", "a1", "user", "What is my name?", response_id="second"),
        Item("a2", "u2", "assistant", "Ada", (9, 10), "second"),
        Item("b2", "u2", "assistant", "Ada!", (9, 11), "third"),
    )
    turns = (
        Turn("first", "u1", "m", 1.0, None, (1, 2), status=COMPLETED),
        Turn("second", "u2", "m", 2.0, "a1", (3, 4), status=COMPLETED),
        Turn("third", "u2", "m", 3.0, "a1", (3, 4), status=COMPLETED),
    )
    await store.merge(Conversation("conv", "me", 1.0, 1.0, active_leaf="a2"), items, turns)


AGAIN = TurnRequest("me", "m", previous_item_id="u2")
NEXT = TurnRequest("me", "m", ({"role": "user", "content": "Hi"},), previous_response_id="second")
CONTINUED = TurnRequest("me", "m", previous_item_id="a2", fork_at=1)
CUT = TurnRequest("me", "m", ({"role": "user", "content": "Hi"},), previous_item_id="a2", fork_at=1)


@pytest.mark.parametrize("gone", ["u1", "a1", "u2"])
@pytest.mark.parametrize("request_", [AGAIN, NEXT, CONTINUED, CUT], ids=["again", "next", "continued", "cut"])
async def test_open_after_a_message_of_the_prompt_was_deleted_stores_nothing(
    store: ConversationStore, request_: TurnRequest, gone: str
) -> None:
    await two_turns(store)
    planned = await TurnService(store, tiny_tokenizer()).plan(request_)
    await store.delete_messages("me", "conv", plan_message_deletion(await store.load("me", "conv"), gone))
    before = await store.load("me", "conv")
    with pytest.raises(ConversationBusyError):
        await TurnService(store, tiny_tokenizer()).open(planned)
    after = await store.load("me", "conv")
    assert (after.conversation, after.items, after.turns) == (before.conversation, before.items, before.turns)


async def test_open_after_the_response_of_a_cut_reply_was_deleted_stores_nothing(store: ConversationStore) -> None:
    """The prefix of the reply would belong to a response that does not exist: `u2` stays because of `b2`."""
    await two_turns(store)
    planned = await TurnService(store, tiny_tokenizer()).plan(CUT)
    await store.delete_messages("me", "conv", plan_response_deletion(await store.load("me", "conv"), "second"))
    assert {"u2", "b2"} <= (await store.load("me", "conv")).items.keys()
    with pytest.raises(ConversationBusyError):
        await TurnService(store, tiny_tokenizer()).open(planned)


@pytest.mark.parametrize("request_", [AGAIN, NEXT, CONTINUED, CUT], ids=["again", "next", "continued", "cut"])
async def test_open_after_the_deletion_of_another_branch_stores_the_turn(
    store: ConversationStore, request_: TurnRequest
) -> None:
    await two_turns(store)
    planned = await TurnService(store, tiny_tokenizer()).plan(request_)
    await store.delete_messages("me", "conv", plan_message_deletion(await store.load("me", "conv"), "b2"))
    await TurnService(store, tiny_tokenizer()).open(planned)
    tree = await store.load("me", "conv")
    assert tree.turns[planned.turn.id].base_item_id in tree.items


async def test_delete_during_writes_leaves_nothing(store: ConversationStore) -> None:
    """Half the writers come before the deletion and half after it: none fails otherwise, and nothing remains."""
    for number in range(10):
        name = f"conv_{number}"
        await store.create(Conversation(name, "me", 1.0, 1.0))
        writes = [store.append("me", name, [Item(f"{name}_{k}", None, "user", "ghost")]) for k in range(20)]
        gone = store.delete("me", name)
        jobs = [*writes[:10], gone, *writes[10:]]
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(each is None or isinstance(each, Conversation | NotFoundError) for each in outcomes)
    assert await store.list("me", 100) == ()
    assert await store.search("me", SearchQuery.parse("ghost"), 5) == ()


async def test_list_by_cursor_during_writes_repeats_and_misses_nothing(store: ConversationStore) -> None:
    """Pages are read by cursor while conversations change: none repeats, and no unchanged one is missing."""
    for number in range(60):
        await store.merge(Conversation(f"conv_{number:02}", "me", 1.0, float(number)), [], [])
    touched: set[str] = set()
    generator = random.Random(4)

    async def write() -> None:
        for step in range(60):
            name = f"conv_{generator.randint(0, 59):02}"
            touched.add(name)
            try:
                if step % 3 == 0:
                    await store.delete("me", name)
                else:
                    await store.update("me", name, title=f"t{step}")
            except NotFoundError:
                pass
            await store.merge(Conversation(f"new_{step}", "me", 1.0, generator.random() * 60), [], [])

    async def read() -> list[str]:
        seen: list[str] = []
        after = None
        while page := await store.list("me", 4, after):
            seen += [each.id for each in page]
            after = encode_cursor(page[-1])
            await asyncio.sleep(0)
        return seen

    writing = asyncio.create_task(write())
    for _ in range(5):
        seen = await read()
        assert len(seen) == len(set(seen))
        assert {f"conv_{number:02}" for number in range(60)} - touched <= set(seen)
    await writing


async def test_same_import_concurrently_creates_one_conversation(store: ConversationStore) -> None:
    conversation = Conversation("conv", "me", 1.0, 1.0, active_leaf="b")
    items = [Item("a", None, "user", "x"), Item("b", "a", "assistant", "y")]
    longer = [*items, Item("c", "b", "user", "z")]
    jobs = [store.merge(conversation, items if number % 2 else longer, []) for number in range(20)]
    merged = await asyncio.gather(*jobs)
    assert sum(each.is_new for each in merged) == 1 and sum(each.num_items for each in merged) == 3
    tree = await store.load("me", "conv")
    assert list(tree.items.values()) == longer and replace(tree.conversation, updated_at=1.0).title == ""
