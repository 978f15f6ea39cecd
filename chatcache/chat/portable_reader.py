"""Reading our own export form: what is wrong is named by its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from chatcache.chat.drafts import MAX_ITEMS, Ancestry, Draft, parents_first
from chatcache.chat.portable import PortableConversation, PortableItem, PortableTurn, head_of, item_of, turn_of
from chatcache.chat.tree import IN_PROGRESS, INCOMPLETE, Item, Turn
from chatcache.errors import InvalidRequest
from chatcache.text.tokenizer import Tokenizer

_MAX_ECHO_DEPTH = 32
# What a response object says of itself; nothing that it repeats of a request may say otherwise.
_NEVER_ECHOED = frozenset(
    {
        *("id", "object", "created_at", "status", "model", "output", "usage", "error", "incomplete_details"),
        *("instructions", "previous_response_id"),
    }
)


class _Tool(msgspec.Struct):
    """What is used of a function that a stored request told the model of."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Kind = TypeVar("Kind", bound=msgspec.Struct)


def read_portable(data: bytes, owner: str, tokenizer: Tokenizer) -> Draft:
    """Check a file of ours. Token ids of another tokenizer are left out: they would say something else here.

    Raises: InvalidRequest.
    """
    file = _decoded(data, PortableConversation, "")
    for name, entries in (("items", file.items), ("turns", file.turns)):
        if len(entries) > MAX_ITEMS:
            raise InvalidRequest(f"{name}: at most {MAX_ITEMS}, got {len(entries)}", param=name)
    items = tuple(item_of(_decoded(raw, PortableItem, f"items[{at}]")) for at, raw in enumerate(file.items))
    turns = tuple(turn_of(_decoded(raw, PortableTurn, f"turns[{at}]")) for at, raw in enumerate(file.turns))
    items = parents_first(items)
    known = {item.id for item in items}
    leaf = file.conversation.active_leaf
    if leaf is not None and leaf not in known:
        raise InvalidRequest(f"conversation.active_leaf: there is no item {leaf!r}", param="conversation.active_leaf")
    _check_turns(turns, items)
    is_exact = file.tokenizer == tokenizer.digest
    if is_exact:
        _check_tokens(items, turns, tokenizer.vocab_size)
    else:
        items = tuple(replace(item, token_ids=()) for item in items)
        turns = tuple(replace(turn, prompt_ids=(), base_item_id=None) for turn in turns)
    return Draft(head_of(file.conversation, owner), items, tuple(map(_settled, turns)), is_exact=is_exact)


def _decoded(data: bytes | msgspec.Raw, kind: type[Kind], place: str) -> Kind:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        where = (place + path.rstrip("`")).removeprefix(".") or "the conversation"
        raise InvalidRequest(f"{where}: {message[:1].lower()}{message[1:]}", param=where) from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"{place or 'the conversation'}: not valid JSON: {error}", param=place or None) from None


def _check_turns(turns: Sequence[Turn], items: Sequence[Item]) -> None:
    """Raises: InvalidRequest for a response that hangs nowhere, or extends what is not above it."""
    known = {item.id for item in items}
    ancestry = Ancestry(items)
    seen: set[str] = set()
    for at, turn in enumerate(turns):
        place = f"turns[{at}]"
        if turn.id in seen or turn.id in known:
            raise InvalidRequest(f"{place}.id: {turn.id!r} appears twice", param="turns")
        seen.add(turn.id)
        if turn.parent_id and turn.parent_id not in known:
            raise InvalidRequest(f"{place}.parent_id: there is no item {turn.parent_id!r}", param="turns")
        base = turn.base_item_id
        if base is not None and not (turn.parent_id and base in known and ancestry.is_on_path(base, turn.parent_id)):
            raise InvalidRequest(f"{place}.base_item_id: {base!r} is no item above the response", param="turns")
        if _depth(turn.echo) > _MAX_ECHO_DEPTH:
            raise InvalidRequest(f"{place}.echo: JSON may nest at most {_MAX_ECHO_DEPTH} deep", param="turns")
        if not _are_tools(turn.echo.get("tools")):
            raise InvalidRequest(f"{place}.echo.tools: must be functions with a name", param="turns")


def _are_tools(tools: object) -> bool:
    """Whether `tools.echoed` can read them."""
    try:
        msgspec.convert(tools, list[_Tool] | None)
    except msgspec.ValidationError:
        return False
    return True


def _check_tokens(items: Sequence[Item], turns: Sequence[Turn], vocab_size: int) -> None:
    rows = [(f"items: {item.id!r}", "token_ids", item.token_ids) for item in items]
    rows += [(f"turns: {turn.id!r}", "prompt_ids", turn.prompt_ids) for turn in turns]
    for place, name, ids in rows:
        if ids and max(ids) >= vocab_size:
            message = f"{place}: {name} must be between 0 and {vocab_size - 1}, got {max(ids)}"
            raise InvalidRequest(message, param=place.partition(":")[0])


def _settled(turn: Turn) -> Turn:
    """A response as it is once nobody is making it."""
    echo = {name: value for name, value in turn.echo.items() if name not in _NEVER_ECHOED}
    return replace(turn, status=INCOMPLETE if turn.status == IN_PROGRESS else turn.status, echo=echo)


def _depth(value: object) -> int:
    """How deep a decoded JSON value nests; its parser has bounded that already, if loosely."""
    deepest = 0
    waiting = [(value, 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
        waiting += [(child, depth + 1) for child in children if isinstance(child, dict | list)]
    return deepest
