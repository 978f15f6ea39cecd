"""Import of files: drafts from an export or from ChatGPT become conversations of an owner.

Importing again changes nothing: the new ids are derived from the owner and the ids of the file.

ChatGPT's `conversations.json` is a mapping of nodes with parent and children, many of them hidden.

    client-created-root -- system (hidden) -- user -- assistant: code to a tool -- tool -- assistant -- user ...
                                                `---- assistant (regenerated)

Visible messages become items; children of a skipped node become children of that node's nearest visible ancestor. Steps
of one answer (a call, then the text about its result) become one message where no branch separates them.
Source: public descriptions of the export; missing or malformed optional fields are ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import (
    IN_PROGRESS,
    INCOMPLETE,
    SHARE_KEY,
    Conversation,
    ConversationTree,
    Item,
    Turn,
)
from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.transfer.draft import MAX_ITEMS, Ancestry, Draft, parents_first
from chatcache.transfer.foreign import read_foreign
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
from chatcache.transfer.token_check import TokenCheck

_LAST_TIME_S = 253_402_300_799
_MAX_TITLE_CHARS = 200
_FENCE = re.compile(r"`{3,}")
# A pair of surrogates, a surrogate alone (the group), or another escape.
_SURROGATES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
_SOURCE_MARK = re.compile("( ?)(\ue200([^\ue200-\ue202]*)(?:\ue202[^\ue200\ue201]*)?\ue201|[\ue203-\ue206])")
_SOURCES = (None, "cite", "filecite", "navlist")
_HIDDEN_TYPES = frozenset(
    {"thoughts", "reasoning_recap", "user_editable_context", "model_editable_context", "app_pairing_content"}
)


class _Export(msgspec.Struct):
    mapping: dict[str, msgspec.Raw]
    title: Any = None
    create_time: Any = None
    update_time: Any = None
    current_node: Any = None
    conversation_id: Any = None
    id: Any = None


class _Node(msgspec.Struct):
    parent: str | None = None
    children: list[str] = []
    message: msgspec.Raw = msgspec.Raw(b"null")


class _Author(msgspec.Struct):
    role: str = ""


class _Message(msgspec.Struct):
    author: _Author = msgspec.field(default_factory=_Author)
    content: dict[str, Any] | None = None
    create_time: Any = None
    metadata: dict[str, Any] | None = None


@dataclass(slots=True)
class _DraftMessage:
    """A future item; its texts may still grow by further steps of the same answer."""

    id: str
    parent: _DraftMessage | None
    role: str
    texts: list[str]
    created_at: float


@dataclass(slots=True)
class _ImportState:
    """The messages found so far, while the nodes of a ChatGPT conversation are visited.

    `shown_by`: for each node id, the message that contains the node, or the nearest one above a skipped node.
    `skipped`: number of skipped nodes by reason.
    """

    started_s: float
    shown_by: dict[str, _DraftMessage | None] = field(default_factory=dict)
    kept: list[_DraftMessage] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def read_chatgpt(data: bytes, owner: str) -> Draft:
    """Read and check one conversation of a ChatGPT export.

    Raises: InvalidRequestError naming the invalid node.
    """
    try:
        export = msgspec.json.decode(data, type=_Export)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequestError(f"mapping: {error}", param="mapping") from None
    if len(export.mapping) > MAX_ITEMS:
        raise InvalidRequestError(f"mapping: at most {MAX_ITEMS} nodes, got {len(export.mapping)}", param="mapping")
    nodes = {node_id: _decoded(raw, _Node, node_id) for node_id, raw in export.mapping.items()}
    created_at = _time(export.create_time, 0.0)
    state = _ImportState(created_at)
    _walk(nodes, state)
    items = tuple(
        Item(
            each.id,
            each.parent.id if each.parent is not None else None,
            each.role,
            "\n\n".join(each.texts),
            created_at=each.created_at,
        )
        for each in state.kept
    )
    current = state.shown_by.get(export.current_node) if isinstance(export.current_node, str) else None
    leaf = current.id if current is not None else items[-1].id if items else None
    conversation = Conversation(
        _source_id(export, data),
        owner,
        created_at,
        _time(export.update_time, created_at),
        _title(export.title),
        leaf,
        rev=1,
    )
    return Draft(conversation, items, skipped=dict(state.skipped))


def _walk(nodes: dict[str, _Node], state: _ImportState) -> None:
    """Visit every node below the roots, parents before children, siblings in their given order."""
    children: dict[str | None, list[str]] = {}
    for node_id, node in nodes.items():
        parent = node.parent if node.parent in nodes else None
        children.setdefault(parent, []).append(node_id)
    for parent_id, found in children.items():
        if parent_id is not None:
            order = {child: at for at, child in enumerate(nodes[parent_id].children)}
            found.sort(key=lambda child, order=order: order.get(child, len(order)))  # type: ignore[misc]
    roots = [(root, None, False) for root in reversed(children.get(None, []))]
    stack: list[tuple[str, _DraftMessage | None, bool]] = list(roots)
    num_seen = 0
    while stack:
        node_id, above, is_alone = stack.pop()
        num_seen += 1
        shown = _add_node(node_id, _decoded(nodes[node_id].message, _Message, node_id), above, is_alone, state)
        state.shown_by[node_id] = shown
        below = children.get(node_id, [])
        alone = len(below) == 1 and (is_alone or shown is not above)
        stack += [(child, shown, alone) for child in reversed(below)]
    if num_seen < len(nodes):
        in_cycle = next(node_id for node_id in nodes if node_id not in state.shown_by)
        raise InvalidRequestError(f"mapping: the node {in_cycle[:128]!r} is among its own ancestors", param="mapping")


def _add_node(
    node_id: str, message: _Message | None, above: _DraftMessage | None, is_alone: bool, state: _ImportState
) -> _DraftMessage | None:
    """Add a visible node to the messages, and return the message that its children follow.

    `above`: the message that the node follows; it is returned for a skipped node and extended by a further step of the
    same answer. `is_alone`: no branch separates the node from `above`.
    """
    if message is None:
        return above
    role = message.author.role
    hidden = _hidden_reason(message, above)
    text = "" if hidden else _text(message.content or {}, state.skipped)
    if role == "assistant":
        text = _with_sources(text, message.metadata or {})
    if hidden or not text:
        if hidden:
            state.skipped[hidden] += 1
        return above
    if role == "assistant" and above is not None and above.role == role and is_alone:
        above.texts.append(text)
        return above
    message_item = _DraftMessage(node_id, above, role, [text], _time(message.create_time, state.started_s))
    state.kept.append(message_item)
    return message_item


def _hidden_reason(message: _Message, above: _DraftMessage | None) -> str | None:
    """Return the name under which a node is counted as skipped, or None for a visible one."""
    role, content = message.author.role, message.content or {}
    if (message.metadata or {}).get("is_visually_hidden_from_conversation") is True:
        return "hidden"
    if role == "system":
        return None if above is None else "system"  # a system message at the start is kept as the instructions
    if role not in ("user", "assistant"):
        return role[:64] or "unknown"
    kind = content.get("content_type")
    return kind if isinstance(kind, str) and kind in _HIDDEN_TYPES else None


def _text(content: dict[str, Any], skipped: Counter[str]) -> str:
    """Return the text of a node's content; count contents without text in `skipped` by type."""
    kind = content.get("content_type")
    parts = content.get("parts")
    if isinstance(parts, list):
        return "\n".join(filter(None, (_part(part, skipped) for part in parts))).strip()
    for name in ("text", "result"):
        text = content.get(name)
        if isinstance(text, str) and text.strip():
            return _fenced(text, content.get("language")) if kind == "code" else text.strip()
    if content:
        skipped[kind[:64] if isinstance(kind, str) and kind else "unknown"] += 1
    return ""


def _with_sources(text: str, metadata: dict[str, Any]) -> str:
    """Return a text with links in place of the marks of its sources, which are of private-use characters."""
    given = metadata.get("content_references")
    references = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    links = {str(each.get("matched_text")): each.get("alt") for each in references}

    def link(found: re.Match[str]) -> str:
        space, mark, kind = found.groups()
        if mark not in links and kind not in _SOURCES:
            return found[0]
        shown = links.get(mark)
        return f"{space}{shown}" if isinstance(shown, str) and shown else ""

    return _SOURCE_MARK.sub(link, text).strip()


def _part(part: object, skipped: Counter[str]) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text, kind = part.get("text"), part.get("content_type")
        if isinstance(text, str) and text:
            return text
        name = kind[:64] if isinstance(kind, str) and kind else "unknown"
        skipped[name] += 1
        return f"[{name}]"
    return ""


def _fenced(code: str, language: object) -> str:
    """Return code between fences longer than any fence inside it."""
    longest = max((len(match.group()) for match in _FENCE.finditer(code)), default=2)
    fence = "`" * (longest + 1)
    name = language if isinstance(language, str) and re.fullmatch(r"[\w+#.-]{1,32}", language) else ""
    return f"{fence}{'' if name == 'unknown' else name}\n{code.rstrip()}\n{fence}"


def _decoded(raw: msgspec.Raw, kind: Any, node_id: str) -> Any:
    if bytes(raw) == b"null":
        return None if kind is _Message else kind()
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequestError(f"mapping[{node_id[:128]!r}]: {error}", param="mapping") from None


def _source_id(export: _Export, data: bytes) -> str:
    for found in (export.conversation_id, export.id):
        if isinstance(found, str) and found:
            return found
    return hashlib.sha256(data).hexdigest()


def _title(title: object) -> str:
    return " ".join(title.split())[:_MAX_TITLE_CHARS] if isinstance(title, str) else ""


def _time(value: object, otherwise: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= _LAST_TIME_S else otherwise  # type: ignore[operator,arg-type]


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
    """The fields of a stored function definition that are used."""

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

    `status` created, extended or unchanged, and the number of new messages. `is_exact`: replies have their tokens.
    """

    status: str
    conversation: Conversation
    num_items: int
    is_exact: bool


def read_draft(data: bytes, owner: str, tokenizer: Tokenizer) -> Draft | None:
    """Read one conversation in any supported format.

    None for the key and end lines of an export. A surrogate without its pair, of a text that was cut, becomes U+FFFD.
    Raises: InvalidRequestError.
    """
    try:
        kind = msgspec.json.decode(data, type=_Kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        repaired = _SURROGATES.sub(lambda match: rb"\ufffd" if match[1] else match[0], data)
        if repaired != data:
            return read_draft(repaired, owner, tokenizer)
        raise InvalidRequestError(f"not a conversation: {error}") from None
    if kind.object in (KEY, END):
        return None
    if kind.object == CONVERSATION:
        return read_export(data, owner, tokenizer)
    if bytes(kind.mapping):
        return read_chatgpt(data, owner)
    if (draft := read_foreign(data, owner)) is not None:
        return draft
    raise InvalidRequestError(
        f'not a conversation: it is neither of this server ("object": "{CONVERSATION}") nor exported by ChatGPT, '
        "Open WebUI, LibreChat or llama.cpp"
    )


def read_export(data: bytes, owner: str, tokenizer: Tokenizer) -> Draft:
    """Read and check a conversation line of an export, for import as a conversation of `owner`.

    All versions are read. Token ids of another tokenizer are dropped: they would be another text here. The line's
    owner, revision and checksum are ignored: the file may have been edited, see `token_check`. Raises:
    InvalidRequestError.
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
    conversation = _unshared(to_conversation(line.conversation, owner))
    return Draft(conversation, items, tuple(map(_ended, turns)), is_exact=is_exact)


async def import_draft(
    store: ConversationStore, draft: Draft, check: TokenCheck | None = None, *, dry_run: bool = False
) -> ImportResult:
    """Store a draft, or the part of it that is new, all or nothing.

    `check`: of the new tokens; None to trust them. `dry_run` only computes the result.
    """
    conversation_id, stored = await _find_stored(store, draft)
    stored_ids = frozenset() if stored is None else frozenset((*stored.items, *stored.turns))
    conversation, items, turns = await asyncio.to_thread(_with_new_ids, draft, conversation_id, stored_ids)
    tree = await asyncio.to_thread(_merged, conversation, items, turns, stored)
    if check is not None:
        await check.run(tree, {*(item.id for item in items), *(turn.id for turn in turns)} - stored_ids)
    is_exact = (
        draft.is_exact
        and all(tree.items[item.id].token_ids or not item.token_ids for item in items)
        and all(tree.turns[turn.id].prompt_ids or not turn.prompt_ids for turn in turns)
    )
    items = tuple(tree.items[item.id] for item in items)
    turns = tuple(tree.turns[turn.id] for turn in turns)
    if dry_run:
        num_new = sum(item.id not in stored_ids for item in items)
        is_same = not num_new and all(turn.id in stored_ids for turn in turns)
        head = stored.conversation if stored is not None else conversation
        return ImportResult(CREATED if stored is None else UNCHANGED if is_same else EXTENDED, head, num_new, is_exact)
    merged = await store.merge(conversation, items, turns)
    changed = merged.num_items or merged.num_turns
    status = CREATED if merged.is_new else EXTENDED if changed else UNCHANGED
    return ImportResult(status, merged.conversation, merged.num_items, is_exact)


def _merged(
    conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn], stored: ConversationTree | None
) -> ConversationTree:
    """Return the conversation as it will be stored: what is stored already stays as it is."""
    if stored is None:
        return ConversationTree(conversation, items, turns)
    return ConversationTree(conversation, (*items, *stored.items.values()), (*turns, *stored.turns.values()))


async def _find_stored(store: ConversationStore, draft: Draft) -> tuple[str, ConversationTree | None]:
    """Return the id under which the draft is stored, and the conversation that has it, if any.

    This is the original, if the owner has it, or the copy that an earlier import has made.
    """
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
    """Return the draft's conversation, messages and responses under the ids that the owner gets.

    Ids in `stored_ids`, which the owner has already, stay as they are.
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


def copy_branch(tree: ConversationTree, leaf: str, conversation_id: str, title: str | None = None) -> Draft:
    """Return the messages on the path to `leaf`, with their tokens, as a new conversation with new ids.

    `title`: None for that of the conversation.
    """
    head = tree.conversation
    items = tree.path(leaf)
    turn_ids = {item.response_id for item in items}
    kept = {item.id for item in items}
    turns = tuple(
        replace(turn, status=INCOMPLETE if turn.status == IN_PROGRESS else turn.status)
        for turn in tree.turns.values()
        if turn.id in turn_ids and (not turn.parent_id or turn.parent_id in kept)
    )
    now = time.time()
    source = replace(
        _unshared(head),
        id=conversation_id,
        created_at=now,
        updated_at=now,
        title=title if title is not None else head.title,
        active_leaf=leaf,
        rev=1,
    )
    draft = Draft(source, items, turns, is_exact=True)
    conversation, items, turns = _with_new_ids(draft, conversation_id, frozenset())
    return replace(draft, conversation=conversation, items=items, turns=turns)


def _unshared(conversation: Conversation) -> Conversation:
    """Return a conversation without the link to it: a copy is not shared."""
    return replace(conversation, metadata={k: v for k, v in conversation.metadata.items() if k != SHARE_KEY})


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
    """Raise InvalidRequestError for a response with an invalid id, parent, base or echo.

    The base, the reply that its prompt extends, must be on the path to the parent of the response.
    """
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
    """Return a response as ended, without the echoed fields that belong to the response itself."""
    echo = {name: value for name, value in turn.echo.items() if name not in _NEVER_ECHOED}
    return replace(turn, status=INCOMPLETE if turn.status == IN_PROGRESS else turn.status, echo=echo)


def _depth(value: object) -> int:
    """Return the nesting depth of a decoded JSON value."""
    deepest = 0
    stack = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        deepest = max(deepest, depth)
        children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
        stack += [(child, depth + 1) for child in children if isinstance(child, dict | list)]
    return deepest
