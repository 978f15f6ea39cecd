"""Import of files: drafts from an export or from ChatGPT become conversations of an owner.

Importing again changes nothing: the new ids are derived from the owner and the ids of the file.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import IN_PROGRESS, INCOMPLETE, Conversation, ConversationTree, Item, Turn
from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.transfer.chatgpt import read_chatgpt
from chatcache.transfer.draft import MAX_ITEMS, Ancestry, Draft, parents_first
from chatcache.transfer.format import (
    CONVERSATION,
    END,
    KEY,
    ExportedConversation,
    decode,
    decode_item,
    decode_turn,
    to_conversation,
)

CREATED = "created"
EXTENDED = "extended"
UNCHANGED = "unchanged"
_MAX_ECHO_DEPTH = 32
# Fields of the response object itself, which the echoed request fields must not override.
_NEVER_ECHOED = frozenset(
    {
        *("id", "object", "created_at", "status", "model", "output", "usage", "error", "incomplete_details"),
        *("instructions", "previous_response_id"),
    }
)


class _Tool(msgspec.Struct):
    """The fields of a stored function that are used."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Kind(msgspec.Struct):
    """The fields that identify the format of a file."""

    object: str | None = None
    mapping: msgspec.Raw = msgspec.Raw(b"")


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The outcome of an import.

    `status` created, extended or unchanged, and the number of new messages.
    """

    status: str
    conversation: Conversation
    num_items: int


def read_draft(data: bytes, owner: str, tokenizer: Tokenizer) -> Draft | None:
    """Read one conversation in any supported format.

    None for the key and end lines of an export.
    Raises: InvalidRequestError.
    """
    try:
        kind = msgspec.json.decode(data, type=_Kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"not a conversation: {error}") from None
    if kind.object in (KEY, END):
        return None
    if kind.object == CONVERSATION:
        return read_export(data, owner, tokenizer)
    if bytes(kind.mapping):
        return read_chatgpt(data, owner)
    raise InvalidRequestError(f'not a conversation: it has neither "object": "{CONVERSATION}" nor ChatGPT\'s "mapping"')


def read_export(data: bytes, owner: str, tokenizer: Tokenizer) -> Draft:
    """Read and check a conversation line of an export, of any version, as a conversation of `owner`.

    Token ids of another tokenizer are dropped: they would be another text here. The line's owner, revision and checksum
    are ignored: the file may have been edited. Raises: InvalidRequestError.
    """
    line = decode(data, ExportedConversation, "")
    for name, entries in (("items", line.items), ("turns", line.turns)):
        if len(entries) > MAX_ITEMS:
            raise InvalidRequestError(f"{name}: at most {MAX_ITEMS}, got {len(entries)}", param=name)
    items = tuple(decode_item(raw, index) for index, raw in enumerate(line.items))
    turns = tuple(decode_turn(raw, index) for index, raw in enumerate(line.turns))
    items = parents_first(items)
    leaf = line.conversation.active_leaf
    if leaf is not None and leaf not in {item.id for item in items}:
        raise InvalidRequestError(
            f"conversation.active_leaf: there is no item {leaf!r}", param="conversation.active_leaf"
        )
    _check_turns(turns, items)
    is_exact = line.tokenizer == tokenizer.digest
    if is_exact:
        _check_tokens(items, turns, tokenizer.vocab_size)
    else:
        items = tuple(replace(item, token_ids=()) for item in items)
        turns = tuple(replace(turn, prompt_ids=(), base_item_id=None) for turn in turns)
    return Draft(to_conversation(line.conversation, owner), items, tuple(map(_ended, turns)), is_exact=is_exact)


async def import_draft(store: ConversationStore, draft: Draft, *, dry_run: bool = False) -> ImportResult:
    """Store a draft, or the part of it that is new, all or nothing.

    `dry_run` only computes the result.
    """
    conversation_id, stored = await _find_stored(store, draft)
    stored_ids = frozenset() if stored is None else frozenset((*stored.items, *stored.turns))
    conversation, items, turns = await asyncio.to_thread(_with_new_ids, draft, conversation_id, stored_ids)
    if dry_run:
        num_new = sum(item.id not in stored_ids for item in items)
        is_same = not num_new and all(turn.id in stored_ids for turn in turns)
        head = stored.conversation if stored is not None else conversation
        return ImportResult(CREATED if stored is None else UNCHANGED if is_same else EXTENDED, head, num_new)
    merged = await store.merge(conversation, items, turns)
    changed = merged.num_items or merged.num_turns
    status = CREATED if merged.is_new else EXTENDED if changed else UNCHANGED
    return ImportResult(status, merged.conversation, merged.num_items)


async def _find_stored(store: ConversationStore, draft: Draft) -> tuple[str, ConversationTree | None]:
    """Return the id that the conversation has with its owner, and the stored original or earlier copy, if any."""
    source = draft.conversation
    copy_id = _new_id("conv", source.created_at, source.owner, source.id)
    for conversation_id in (source.id, copy_id):
        try:
            return conversation_id, await store.load(source.owner, conversation_id)
        except NotFoundError:
            continue
    return copy_id, None


def _with_new_ids(
    draft: Draft, conversation_id: str, stored_ids: frozenset[str]
) -> tuple[Conversation, tuple[Item, ...], tuple[Turn, ...]]:
    """Return the draft's conversation, items and turns under new ids.

    Members that the owner has keep theirs.
    """
    source = draft.conversation
    times = {item.id: ("msg", item.created_at) for item in draft.items}
    times |= {turn.id: ("resp", turn.created_at) for turn in draft.turns}

    def new_id_of(old: str) -> str:
        if old in stored_ids:
            return old
        prefix, time_s = times.get(old, ("resp", 0.0))
        return _new_id(prefix, time_s, source.owner, source.id, old)

    items = tuple(
        replace(
            item,
            id=new_id_of(item.id),
            parent_id=_map_optional(new_id_of, item.parent_id),
            response_id=_map_optional(new_id_of, item.response_id),
        )
        for item in draft.items
    )
    turns = tuple(
        replace(
            turn,
            id=new_id_of(turn.id),
            parent_id=new_id_of(turn.parent_id) if turn.parent_id else "",
            base_item_id=_map_optional(new_id_of, turn.base_item_id),
            previous_response_id=_map_optional(new_id_of, turn.previous_response_id),
            echo=_echo_with_new_ids(turn, conversation_id, new_id_of),
        )
        for turn in draft.turns
    )
    leaf = _map_optional(new_id_of, source.active_leaf)
    return replace(source, id=conversation_id, active_leaf=leaf), items, turns


def _echo_with_new_ids(turn: Turn, conversation_id: str, new_id_of: Callable[[str], str]) -> dict[str, object]:
    """Return the echoed request fields with their ids replaced."""
    echo = dict(turn.echo)
    if "conversation" in echo:
        echo["conversation"] = {"id": conversation_id}
    if "input_item_ids" in echo:
        given = echo["input_item_ids"]
        ids = given if isinstance(given, list) else []
        echo["input_item_ids"] = [new_id_of(each) for each in ids if isinstance(each, str)]
    if "forked_item_id" in echo:
        forked = echo["forked_item_id"]
        echo["forked_item_id"] = new_id_of(forked) if isinstance(forked, str) else None
    return echo


def _map_optional(new_id_of: Callable[[str], str], old: str | None) -> str | None:
    return new_id_of(old) if old is not None else None


def _new_id(prefix: str, time_s: float, *names: str) -> str:
    """Return an id in the format of `tree.new_id`, of the given time, derived from `names`."""
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogatepass")).hexdigest()
    return f"{prefix}_{int(time_s * 1000):012x}{digest[:16]}"


def _check_turns(turns: Sequence[Turn], items: Sequence[Item]) -> None:
    """Raise InvalidRequestError for a response with an unknown parent or a base that is not above it."""
    known = {item.id for item in items}
    ancestry = Ancestry(items)
    seen: set[str] = set()
    for index, turn in enumerate(turns):
        position = f"turns[{index}]"
        if turn.id in seen or turn.id in known:
            raise InvalidRequestError(f"{position}.id: {turn.id!r} appears twice", param="turns")
        seen.add(turn.id)
        if turn.parent_id and turn.parent_id not in known:
            raise InvalidRequestError(f"{position}.parent_id: there is no item {turn.parent_id!r}", param="turns")
        base = turn.base_item_id
        if base is not None and not (turn.parent_id and base in known and ancestry.is_on_path(base, turn.parent_id)):
            raise InvalidRequestError(f"{position}.base_item_id: {base!r} is no item above the response", param="turns")
        if _depth(turn.echo) > _MAX_ECHO_DEPTH:
            raise InvalidRequestError(f"{position}.echo: JSON may nest at most {_MAX_ECHO_DEPTH} deep", param="turns")
        if not _are_tools(turn.echo.get("tools")):
            raise InvalidRequestError(f"{position}.echo.tools: must be functions with a name", param="turns")


def _are_tools(tools: object) -> bool:
    """Check that `prompt.functions_from_echo` can read the value."""
    try:
        msgspec.convert(tools, list[_Tool] | None)
    except msgspec.ValidationError:
        return False
    return True


def _check_tokens(items: Sequence[Item], turns: Sequence[Turn], vocab_size: int) -> None:
    """Raise InvalidRequestError for a token id outside of the vocabulary."""
    rows = [(f"items: {item.id!r}", "token_ids", item.token_ids) for item in items]
    rows += [(f"turns: {turn.id!r}", "prompt_ids", turn.prompt_ids) for turn in turns]
    for position, name, ids in rows:
        if ids and max(ids) >= vocab_size:
            message = f"{position}: {name} must be between 0 and {vocab_size - 1}, got {max(ids)}"
            raise InvalidRequestError(message, param=position.partition(":")[0])


def _ended(turn: Turn) -> Turn:
    """Return a response that is no longer in progress, without echoed fields that belong to the response itself."""
    echo = {name: value for name, value in turn.echo.items() if name not in _NEVER_ECHOED}
    return replace(turn, status=INCOMPLETE if turn.status == IN_PROGRESS else turn.status, echo=echo)


def _depth(value: object) -> int:
    """Return the nesting depth of a decoded JSON value, which its parser has bounded only loosely."""
    deepest = 0
    stack = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
        stack += [(child, depth + 1) for child in children if isinstance(child, dict | list)]
    return deepest
