"""Import of ChatGPT's `conversations.json`.

A mapping of nodes with parent and children, many of them hidden.

    client-created-root -- system (hidden) -- user -- assistant: code to a tool -- tool -- assistant -- user ...
                                                `---- assistant (regenerated)

Visible messages become items; children of a skipped node become children of that node's nearest visible ancestor. Steps
of one answer (a call, then the text about its result) become one message where no branch separates them.
Source: public descriptions of the export; missing or malformed optional fields are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from chatcache.conversations.tree import Conversation, Item
from chatcache.errors import InvalidRequestError
from chatcache.transfer.draft import MAX_ITEMS, Draft

_LAST_TIME_S = 253_402_300_799
_MAX_TITLE_CHARS = 200
_FENCE = re.compile(r"`{3,}")
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
    """The result so far.

    `shown_by` maps every node to the message that contains it, or the nearest one above.
    """

    started_s: float
    shown_by: dict[str, _DraftMessage | None] = field(default_factory=dict)
    kept: list[_DraftMessage] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


def read_chatgpt(data: bytes, owner: str) -> Draft:
    """Read and check one conversation of the export.

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
    """Visit every node below the roots, parents first, siblings in the order of the parent's list."""
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
    """Return the message that contains this node, or the one above if the node is not visible.

    `is_alone`: no branch separates this node from the message above.
    """
    if message is None:
        return above
    role = message.author.role
    hidden = _hidden_reason(message, above)
    text = "" if hidden else _text(message.content or {}, state.skipped)
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
    """Return the text of a content; other kinds are counted by type."""
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
