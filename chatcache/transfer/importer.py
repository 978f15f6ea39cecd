"""Drafts become an owner's conversations. Doing it again changes nothing: new ids follow from the owner and the old."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import Conversation, ConversationTree, Item, Turn
from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.transfer.chatgpt import read_chatgpt
from chatcache.transfer.format import END, KIND, Draft, read_portable

CREATED = "created"
EXTENDED = "extended"
UNCHANGED = "unchanged"


class _Kind(msgspec.Struct):
    """Enough of a file to see whose form it has."""

    object: str | None = None
    mapping: msgspec.Raw = msgspec.Raw(b"")


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What became of a draft: `status` created, extended or unchanged, and how much of it was new."""

    status: str
    conversation: Conversation
    num_items: int


def read_draft(data: bytes, owner: str, tokenizer: Tokenizer) -> Draft | None:
    """Read one conversation, whichever form it has; None for the line that ends an export.

    Raises: InvalidRequestError.
    """
    try:
        kind = msgspec.json.decode(data, type=_Kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"not a conversation: {error}") from None
    if kind.object == END:
        return None
    if kind.object == KIND:
        return read_portable(data, owner, tokenizer)
    if bytes(kind.mapping):
        return read_chatgpt(data, owner)
    raise InvalidRequestError(f'not a conversation: it has neither "object": "{KIND}" nor ChatGPT\'s "mapping"')


async def import_draft(store: ConversationStore, draft: Draft, *, dry_run: bool = False) -> ImportResult:
    """Store a draft, or what of it is new; all or nothing. `dry_run` only tells what would happen."""
    conversation_id, present = await _present(store, draft)
    held = frozenset() if present is None else frozenset((*present.items, *present.turns))
    conversation, items, turns = await asyncio.to_thread(_renamed, draft, conversation_id, held)
    if dry_run:
        num_new = sum(item.id not in held for item in items)
        is_same = not num_new and all(turn.id in held for turn in turns)
        head = present.conversation if present is not None else conversation
        return ImportResult(CREATED if present is None else UNCHANGED if is_same else EXTENDED, head, num_new)
    merged = await store.merge(conversation, items, turns)
    changed = merged.num_items or merged.num_turns
    status = CREATED if merged.is_new else EXTENDED if changed else UNCHANGED
    return ImportResult(status, merged.conversation, merged.num_items)


async def _present(store: ConversationStore, draft: Draft) -> tuple[str, ConversationTree | None]:
    """The id that the conversation has with its owner, and what they have of it: the original, or an earlier copy."""
    source = draft.conversation
    copy_id = _new_id("conv", source.created_at, source.owner, source.id)
    for conversation_id in (source.id, copy_id):
        try:
            return conversation_id, await store.load(source.owner, conversation_id)
        except NotFoundError:
            continue
    return copy_id, None


def _renamed(
    draft: Draft, conversation_id: str, held: frozenset[str]
) -> tuple[Conversation, tuple[Item, ...], tuple[Turn, ...]]:
    """The draft under its new ids; what the owner has under the old ones keeps them."""
    source = draft.conversation
    times = {item.id: ("msg", item.created_at) for item in draft.items}
    times |= {turn.id: ("resp", turn.created_at) for turn in draft.turns}

    def named(old: str) -> str:
        if old in held:
            return old
        prefix, time_s = times.get(old, ("resp", 0.0))
        return _new_id(prefix, time_s, source.owner, source.id, old)

    items = tuple(
        replace(
            item,
            id=named(item.id),
            parent_id=_maybe(named, item.parent_id),
            response_id=_maybe(named, item.response_id),
        )
        for item in draft.items
    )
    turns = tuple(
        replace(
            turn,
            id=named(turn.id),
            parent_id=named(turn.parent_id) if turn.parent_id else "",
            base_item_id=_maybe(named, turn.base_item_id),
            previous_response_id=_maybe(named, turn.previous_response_id),
            echo=_renamed_echo(turn, conversation_id, named),
        )
        for turn in draft.turns
    )
    leaf = _maybe(named, source.active_leaf)
    return replace(source, id=conversation_id, active_leaf=leaf), items, turns


def _renamed_echo(turn: Turn, conversation_id: str, named: Callable[[str], str]) -> dict[str, object]:
    """What a response repeats of its request, where that is ids."""
    echo = dict(turn.echo)
    if "conversation" in echo:
        echo["conversation"] = {"id": conversation_id}
    if "input_item_ids" in echo:
        given = echo["input_item_ids"]
        ids = given if isinstance(given, list) else []
        echo["input_item_ids"] = [named(each) for each in ids if isinstance(each, str)]
    if "forked_item_id" in echo:
        forked = echo["forked_item_id"]
        echo["forked_item_id"] = named(forked) if isinstance(forked, str) else None
    return echo


def _maybe(named: Callable[[str], str], old: str | None) -> str | None:
    return named(old) if old is not None else None


def _new_id(prefix: str, time_s: float, *names: str) -> str:
    """An id like those of `ids.new_id`, of the same time, that follows from `names`."""
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{prefix}_{int(time_s * 1000):012x}{digest[:16]}"
