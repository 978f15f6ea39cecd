"""Saved prompts: one contract on every store."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from chatcache.conversations import store as contract
from chatcache.conversations.store import ConversationStore, PromptExistsError, PromptLibraryFullError, SavedPrompt
from chatcache.errors import NotFoundError

GREET = SavedPrompt("greet", "Say hello to {{name}} 🎉\x00", "Hé", 1.5, 1.5)


async def test_saved_prompts_returns_what_was_stored_by_name(store: ConversationStore) -> None:
    prompts = store.saved_prompts
    assert tuple(await prompts.list("acme")) == ()
    other = replace(GREET, name="ask")
    await prompts.create("acme", GREET)
    await prompts.create("acme", other)
    assert await prompts.get("acme", "greet") == GREET
    assert tuple(await prompts.list("acme")) == (other, GREET)
    await prompts.delete("acme", "ask")
    assert tuple(await prompts.list("acme")) == (GREET,)
    with pytest.raises(NotFoundError):
        await prompts.delete("acme", "ask")
    with pytest.raises(NotFoundError):
        await prompts.get("acme", "ask")


@pytest.mark.parametrize("other", ["", "acm", "acme2", "o={x}:%2F", "acme/ann"])
async def test_saved_prompts_of_another_tenant_do_not_exist(store: ConversationStore, other: str) -> None:
    prompts = store.saved_prompts
    await prompts.create("acme", GREET)
    assert tuple(await prompts.list(other)) == ()
    for call in (
        prompts.get(other, "greet"),
        prompts.update(other, "greet", text="x"),
        prompts.delete(other, "greet"),
    ):
        with pytest.raises(NotFoundError):
            await call
    await prompts.create(other, replace(GREET, text="another"))
    await prompts.update(other, "greet", description="theirs")
    assert await prompts.get("acme", "greet") == GREET


async def test_saved_prompts_update_changes_given_fields_only(store: ConversationStore) -> None:
    prompts = store.saved_prompts
    await prompts.create("acme", GREET)
    changed = await prompts.update("acme", "greet", text="Hi")
    assert (changed.text, changed.description, changed.created_at) == ("Hi", "Hé", 1.5) and changed.updated_at > 1.5
    assert await prompts.get("acme", "greet") == changed
    moved = await prompts.update("acme", "greet", new_name="hello", description="")
    assert (moved.name, moved.text, moved.description) == ("hello", "Hi", "")
    assert tuple(await prompts.list("acme")) == (moved,)
    assert (await prompts.update("acme", "hello", new_name="hello", text="x")).name == "hello"


async def test_saved_prompts_name_in_use_is_refused_and_nothing_changes(store: ConversationStore) -> None:
    prompts = store.saved_prompts
    other = replace(GREET, name="ask")
    await prompts.create("acme", GREET)
    await prompts.create("acme", other)
    with pytest.raises(PromptExistsError) as refused:
        await prompts.create("acme", replace(GREET, text="x"))
    assert refused.value.param == "name" and "'greet'" in refused.value.message
    with pytest.raises(PromptExistsError):
        await prompts.update("acme", "greet", new_name="ask", text="x")
    assert tuple(await prompts.list("acme")) == (other, GREET)


async def test_saved_prompts_beyond_the_limit_are_refused(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, so that a check outside of the transaction would let more in."""
    limit = contract.MAX_SAVED_PROMPTS
    created = (store.saved_prompts.create("acme", replace(GREET, name=f"p{at:03}")) for at in range(limit + 9))
    results = await asyncio.gather(*created, return_exceptions=True)
    refused = [each for each in results if each is not None]
    assert len(refused) == 9 and all(isinstance(each, PromptLibraryFullError) for each in refused)
    assert str(limit) in str(refused[0])
    assert len(await store.saved_prompts.list("acme")) == limit
    await store.saved_prompts.create("other", GREET)
    await store.saved_prompts.delete("acme", "p000")
    await store.saved_prompts.create("acme", GREET)


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("Translate into {{language}}", ["language"]),
        ("{{a}} {{ b c }} {{a}}", ["a", "b c"]),
        ("{{}} {{ }} {x} {{{y}}} {{a\nb}} }}{{", ["y"]),
        (f"{{{{{'x' * 64}}}}} {{{{{'y' * 65}}}}}", ["x" * 64]),
        ("{{größe}}", ["größe"]),
    ],
)
def test_variables_of_a_prompt_are_names_in_double_braces(text: str, variables: list[str]) -> None:
    assert SavedPrompt("p", text).variables == variables
