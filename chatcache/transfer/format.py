"""A conversation as a file: everything that is stored of it, so that another server can go on with it token by token.

One JSON object a conversation; several are one to a line. Ids are the exporting server's own; whoever reads the file
gives them new ones (`adoption`).

What an imported file says, before it is anybody's: a checked tree under the ids of its file.

Files come from strangers. Whatever a draft holds can be stored and walked: every parent exists and comes first, and
nothing goes round in circles.

Reading our own export form: what is wrong is named by its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from chatcache.conversations.tree import (
    IN_PROGRESS,
    INCOMPLETE,
    Conversation,
    ConversationTree,
    Item,
    ReplyParts,
    Turn,
    Usage,
)
from chatcache.errors import InvalidRequestError
from chatcache.tokenizer.tokenizer import Tokenizer

KIND = "conversation.export"
END = "conversation.export.end"
VERSION: Literal[1] = 1
_LAST_TIME_S = 253_402_300_799  # the end of the year 9999

Id = Annotated[str, Meta(min_length=1, max_length=128)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TimeS = Annotated[float, Meta(ge=0, le=_LAST_TIME_S)]
ShortText = Annotated[str, Meta(max_length=512)]


class PortableHead(msgspec.Struct, frozen=True):
    """The conversation itself. `rev` counts the changes on one server, so it stays there."""

    id: Id
    created_at: TimeS
    updated_at: TimeS
    title: Annotated[str, Meta(max_length=200)] = ""
    active_leaf: Id | None = None
    metadata: Annotated[dict[ShortText, ShortText], Meta(max_length=16)] = {}


class PortableItem(msgspec.Struct, frozen=True):
    """`tree.Item`."""

    id: Id
    parent_id: Id | None
    role: Literal["system", "user", "assistant", "tool"]
    text: str
    token_ids: tuple[TokenId, ...] = ()
    response_id: Id | None = None
    index: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    status: Literal["completed", "incomplete", "cancelled", "failed", "in_progress"] = "completed"
    finish_reason: ShortText | None = None
    created_at: TimeS = 0.0
    parts: ReplyParts = ReplyParts()


class PortableTurn(msgspec.Struct, frozen=True):
    """`tree.Turn`."""

    id: Id
    parent_id: Annotated[str, Meta(max_length=128)]
    model: ShortText
    created_at: TimeS
    base_item_id: Id | None = None
    prompt_ids: tuple[TokenId, ...] = ()
    instructions: str | None = None
    previous_response_id: Id | None = None
    status: Literal["completed", "incomplete", "cancelled", "failed", "in_progress", "deleted"] = "completed"
    usage: Usage | None = None
    echo: dict[str, Any] = {}


class PortableConversation(msgspec.Struct, frozen=True):
    """The file. `tokenizer` (`Tokenizer.digest`) says whose token ids these are."""

    object: Literal["conversation.export"]
    version: Literal[1]
    tokenizer: str
    conversation: PortableHead
    items: list[msgspec.Raw]
    turns: list[msgspec.Raw]


def portable(tree: ConversationTree, items: Sequence[Item], tokenizer_digest: str) -> bytes:
    """Encode `items` of a tree, parents first, with the responses that they belong to."""
    kept = {item.id for item in items}
    c = tree.conversation
    leaf = c.active_leaf if c.active_leaf in kept else items[-1].id if items else None
    file = PortableConversation(
        object="conversation.export",
        version=VERSION,
        tokenizer=tokenizer_digest,
        conversation=PortableHead(c.id, c.created_at, c.updated_at, c.title, leaf, dict(c.metadata)),
        items=[msgspec.Raw(msgspec.json.encode(_portable_item(item))) for item in items],
        turns=[msgspec.Raw(msgspec.json.encode(_portable_turn(turn))) for turn in _turns_of(tree, kept)],
    )
    return msgspec.json.encode(file)


def end_of_export(num_conversations: int) -> bytes:
    """The last line of many: a file without it was cut short."""
    return msgspec.json.encode({"object": END, "version": VERSION, "num_conversations": num_conversations})


def item_of(item: PortableItem) -> Item:
    return Item(**{name: getattr(item, name) for name in PortableItem.__struct_fields__})


def turn_of(turn: PortableTurn) -> Turn:
    return Turn(**{name: getattr(turn, name) for name in PortableTurn.__struct_fields__})


def head_of(head: PortableHead, owner: str) -> Conversation:
    return Conversation(
        head.id, owner, head.created_at, head.updated_at, head.title, head.active_leaf, rev=1, metadata=head.metadata
    )


def _turns_of(tree: ConversationTree, kept: set[str]) -> list[Turn]:
    """Responses whose place in the tree is among what is kept, the oldest first."""
    used = {tree.items[item_id].response_id for item_id in kept}
    found = (turn for turn in tree.turns.values() if turn.parent_id in kept or (not turn.parent_id and turn.id in used))
    return sorted(found, key=lambda turn: (turn.created_at, turn.id))


def _portable_item(item: Item) -> PortableItem:
    return PortableItem(**{name: getattr(item, name) for name in PortableItem.__struct_fields__})


def _portable_turn(turn: Turn) -> PortableTurn:
    return PortableTurn(**{name: getattr(turn, name) for name in PortableTurn.__struct_fields__})


MAX_ITEMS = 100_000


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversation to be imported; its ids are the file's. `items` are parents first.

    `skipped`: what of the file is no message, by kind. `is_exact`: replies come with the tokens they were made of.
    """

    conversation: Conversation
    items: tuple[Item, ...]
    turns: tuple[Turn, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    is_exact: bool = False


def parents_first(items: Sequence[Item]) -> tuple[Item, ...]:
    """Order a tree so that every parent comes before its children, moving nothing that need not move.

    Raises: InvalidRequestError naming the item: two of one id, a parent that is not there, a circle.
    """
    if len(items) > MAX_ITEMS:
        raise InvalidRequestError(f"items: at most {MAX_ITEMS}, got {len(items)}", param="items")
    places: dict[str, int] = {}
    for at, item in enumerate(items):
        if places.setdefault(item.id, at) != at:
            raise InvalidRequestError(
                f"items[{at}].id: {item.id!r} was items[{places[item.id]}] already", param="items"
            )
    for at, item in enumerate(items):
        if item.parent_id is not None and item.parent_id not in places:
            raise InvalidRequestError(f"items[{at}].parent_id: there is no item {item.parent_id!r}", param="items")
    done: set[str] = set()
    ordered: list[Item] = []
    for at, item in enumerate(items):
        above: list[Item] = []
        on_the_way: set[str] = set()
        while item.id not in done:
            if item.id in on_the_way:
                raise InvalidRequestError(f"items[{at}]: {item.id!r} is among its own ancestors", param="items")
            on_the_way.add(item.id)
            above.append(item)
            if item.parent_id is None:
                break
            item = items[places[item.parent_id]]
        ordered += reversed(above)
        done |= on_the_way
    return tuple(ordered)


class Ancestry:
    """Who is above whom, in constant time however deep the tree: a walk numbers each item on its way in and out."""

    def __init__(self, items: Sequence[Item]) -> None:
        """`items` are parents first."""
        children: dict[str | None, list[str]] = {}
        for item in items:
            children.setdefault(item.parent_id, []).append(item.id)
        self._entered: dict[str, int] = {}
        self._left: dict[str, int] = {}
        clock = 0
        waiting = [(item_id, False) for item_id in children.get(None, ())]
        while waiting:
            item_id, is_leaving = waiting.pop()
            clock += 1
            if is_leaving:
                self._left[item_id] = clock
                continue
            self._entered[item_id] = clock
            waiting.append((item_id, True))
            waiting += [(child, False) for child in children.get(item_id, ())]

    def is_on_path(self, above: str, below: str) -> bool:
        """Whether `above` is `below` or one of its ancestors."""
        return self._entered[above] <= self._entered[below] and self._left[below] <= self._left[above]


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

    Raises: InvalidRequestError.
    """
    file = _decoded(data, PortableConversation, "")
    for name, entries in (("items", file.items), ("turns", file.turns)):
        if len(entries) > MAX_ITEMS:
            raise InvalidRequestError(f"{name}: at most {MAX_ITEMS}, got {len(entries)}", param=name)
    items = tuple(item_of(_decoded(raw, PortableItem, f"items[{at}]")) for at, raw in enumerate(file.items))
    turns = tuple(turn_of(_decoded(raw, PortableTurn, f"turns[{at}]")) for at, raw in enumerate(file.turns))
    items = parents_first(items)
    known = {item.id for item in items}
    leaf = file.conversation.active_leaf
    if leaf is not None and leaf not in known:
        raise InvalidRequestError(
            f"conversation.active_leaf: there is no item {leaf!r}", param="conversation.active_leaf"
        )
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
        raise InvalidRequestError(f"{where}: {message[:1].lower()}{message[1:]}", param=where) from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"{place or 'the conversation'}: not valid JSON: {error}", param=place or None
        ) from None


def _check_turns(turns: Sequence[Turn], items: Sequence[Item]) -> None:
    """Raises: InvalidRequestError for a response that hangs nowhere, or extends what is not above it."""
    known = {item.id for item in items}
    ancestry = Ancestry(items)
    seen: set[str] = set()
    for at, turn in enumerate(turns):
        place = f"turns[{at}]"
        if turn.id in seen or turn.id in known:
            raise InvalidRequestError(f"{place}.id: {turn.id!r} appears twice", param="turns")
        seen.add(turn.id)
        if turn.parent_id and turn.parent_id not in known:
            raise InvalidRequestError(f"{place}.parent_id: there is no item {turn.parent_id!r}", param="turns")
        base = turn.base_item_id
        if base is not None and not (turn.parent_id and base in known and ancestry.is_on_path(base, turn.parent_id)):
            raise InvalidRequestError(f"{place}.base_item_id: {base!r} is no item above the response", param="turns")
        if _depth(turn.echo) > _MAX_ECHO_DEPTH:
            raise InvalidRequestError(f"{place}.echo: JSON may nest at most {_MAX_ECHO_DEPTH} deep", param="turns")
        if not _are_tools(turn.echo.get("tools")):
            raise InvalidRequestError(f"{place}.echo.tools: must be functions with a name", param="turns")


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
            raise InvalidRequestError(message, param=place.partition(":")[0])


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
