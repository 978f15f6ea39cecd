"""Conversations exported by Open WebUI, LibreChat and llama.cpp's web UI become drafts.

    Open WebUI   {"id", "title", "chat": {"title", "history": {"messages": {id: {"parentId", "role", "content"}},
                 "currentId"}}, "created_at", "updated_at"}
    LibreChat    {"conversationId", "title", "messages" or "messagesTree": [{"messageId", "parentMessageId", "text",
                 "content", "isCreatedByUser", "createdAt", "children"}], "recursive"}
    llama.cpp    {"conv": {"id", "name", "lastModified", "currNode"}, "messages": [{"id", "type", "timestamp", "role",
                 "content", "thinking" or "reasoningContent", "parent", "extra"}]}

Each is read into `_Node`s. Those without text or with another role are skipped; their children follow the nearest
message above. Source: the import and export code of these projects (2025); missing or malformed optional fields are
ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import unescape
from typing import Any

import msgspec

from chatcache.conversations.tree import Conversation, Item, ReplyParts
from chatcache.errors import InvalidRequestError
from chatcache.transfer.draft import MAX_ITEMS, Draft, parents_first

_ROLES = ("system", "user", "assistant")
_LAST_TIME_S = 253_402_300_799
_MAX_TITLE_CHARS = 200
_MAX_ID_CHARS = 128
_DETAILS = re.compile(r'<details type="(reasoning|tool_calls)"[^<>]*>')


@dataclass(slots=True)
class _Node:
    id: str
    parent: str | None
    role: str
    text: str
    created_at: float
    reasoning: str = ""


@dataclass(slots=True)
class _Found:
    """A conversation of a file: `current` is the node that was shown last."""

    id: str
    title: object
    created_at: float
    updated_at: float
    current: object
    nodes: list[_Node]


def read_foreign(data: bytes, owner: str) -> Draft | None:
    """Read and check one conversation of another program; None for an unknown format.

    Raises: InvalidRequestError.
    """
    try:
        line = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    skipped: Counter[str] = Counter()
    found = _open_webui(line, skipped) or _librechat(line, skipped) or _llama_cpp(line, skipped)
    if found is None:
        return None
    if len(found.nodes) > MAX_ITEMS:
        raise InvalidRequestError(f"messages: at most {MAX_ITEMS}, got {len(found.nodes)}", param="messages")
    shown_by = _nearest_shown(found.nodes, skipped)
    items = parents_first(
        [
            Item(
                node.id,
                shown_by.get(node.parent or ""),
                node.role,
                node.text,
                created_at=node.created_at or found.created_at,
                parts=ReplyParts(reasoning=node.reasoning),
            )
            for node in found.nodes
            if shown_by.get(node.id) == node.id
        ]
    )
    current = shown_by.get(found.current) if isinstance(found.current, str) else None
    leaf = current if current is not None else items[-1].id if items else None
    source_id = found.id or hashlib.sha256(data).hexdigest()
    title = " ".join(found.title.split())[:_MAX_TITLE_CHARS] if isinstance(found.title, str) else ""
    created_at = found.created_at or min((item.created_at for item in items), default=0.0)
    updated_at = max(found.updated_at, created_at)
    conversation = Conversation(source_id, owner, created_at, updated_at, title, leaf, rev=1)
    return Draft(conversation, items, skipped=dict(skipped))


def _nearest_shown(nodes: Sequence[_Node], skipped: Counter[str]) -> dict[str, str | None]:
    """Return for each node the message that stands for it: itself, or the nearest one above a skipped node.

    Raises: InvalidRequestError for nodes among their own ancestors.
    """
    by_id = {node.id: node for node in nodes}
    shown_by: dict[str, str | None] = {}
    for node in nodes:
        above: list[str] = []
        at: _Node | None = node
        while at is not None and at.id not in shown_by:
            if len(above) > len(nodes):
                raise InvalidRequestError(f"messages: {node.id!r} is among its own ancestors", param="messages")
            above.append(at.id)
            if at.role in _ROLES and at.text.strip():
                break
            at = by_id.get(at.parent) if at.parent is not None else None
        last = at.id if at is not None else None
        found = shown_by.get(last, last) if last is not None else None
        for each in above:
            shown_by[each] = found
        if found != node.id and node.role != "root":
            skipped[node.role if node.role not in _ROLES else "empty"] += 1
    return shown_by


def _open_webui(line: Mapping[str, Any], skipped: Counter[str]) -> _Found | None:
    chat = line.get("chat")
    history = chat.get("history") if isinstance(chat, dict) else None
    if not isinstance(chat, dict) or not isinstance(history, dict) or not isinstance(history.get("messages"), dict):
        return None
    nodes = []
    for node_id, message in history["messages"].items():
        if not isinstance(message, dict):
            continue
        role, text = _name(message.get("role")), _text(message.get("content"), skipped)
        text, reasoning = _without_details(text, skipped) if role == "assistant" else (text, "")
        parent = _optional_id(message.get("parentId"))
        nodes.append(_Node(_id(node_id), parent, role, text, _time(message.get("timestamp")), reasoning))
    created_at, updated_at = _time(line.get("created_at")), _time(line.get("updated_at"))
    title = line.get("title") or chat.get("title")
    return _Found(_name(line.get("id")), title, created_at, updated_at, history.get("currentId"), nodes)


def _without_details(text: str, skipped: Counter[str]) -> tuple[str, str]:
    """Return the text of an answer without its blocks `<details type="...">`, and the reasoning of those.

    The lines of reasoning are quoted, and in newer versions escaped. Blocks of tool calls are counted.
    """
    texts, reasoning, end = [], [], 0
    for found in _DETAILS.finditer(text):
        if found.start() < end:
            continue
        closing = text.find("</details>", found.end())
        if closing < 0:
            break
        texts.append(text[end : found.start()])
        end = closing + len("</details>")
        if found[1] == "tool_calls":
            skipped["tool_calls"] += 1
            continue
        body = text[found.end() : closing].partition("</summary>")[2].strip()
        lines = (unescape(body) if body.startswith("&gt;") else body).split("\n")
        reasoning.append("\n".join(line.removeprefix(">").removeprefix(" ") for line in lines))
    return "".join([*texts, text[end:]]).strip(), "\n\n".join(reasoning)


def _librechat(line: Mapping[str, Any], skipped: Counter[str]) -> _Found | None:
    messages = line.get("messagesTree") or line.get("messages")
    if not isinstance(line.get("conversationId"), str) or not isinstance(messages, list):
        return None
    nodes = []
    for message, parent in _flattened(messages):
        text = message.get("text")
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        reasoning = "".join(_string(part.get("think")) for part in parts if isinstance(part, dict))
        nodes.append(
            _Node(
                _id(message.get("messageId")),
                parent if parent is not None else _optional_id(message.get("parentMessageId")),
                "user" if message.get("isCreatedByUser") is True else "assistant",
                text if isinstance(text, str) and text.strip() else _text(content, skipped),
                _time(message.get("createdAt")),
                reasoning,
            )
        )
    times = [node.created_at for node in nodes]
    start, end = min(times, default=0.0), max(times, default=0.0)
    return _Found(_name(line["conversationId"]), line.get("title"), start, end, None, nodes)


def _flattened(messages: list[Any]) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield each message with the one above it, which only a nested one has."""
    stack: list[tuple[Any, str | None]] = [(message, None) for message in reversed(messages)]
    while stack:
        message, parent = stack.pop()
        if not isinstance(message, dict):
            continue
        yield message, parent
        children = message.get("children")
        if isinstance(children, list):
            above = _id(message.get("messageId"))
            stack += [(child, above) for child in reversed(children)]


def _llama_cpp(line: Mapping[str, Any], skipped: Counter[str]) -> _Found | None:
    conv, messages = line.get("conv"), line.get("messages")
    if not isinstance(conv, dict) or not isinstance(messages, list):
        return None
    nodes = [
        _Node(
            _id(message.get("id")),
            _optional_id(message.get("parent")),
            "root" if message.get("type") == "root" else _name(message.get("role")),
            "\n\n".join(filter(None, (_text(message.get("content"), skipped), *_files(message.get("extra"), skipped)))),
            _time(message.get("timestamp")),
            _string(message.get("reasoningContent")) or _string(message.get("thinking")),
        )
        for message in messages
        if isinstance(message, dict)
    ]
    start = min((node.created_at for node in nodes if node.created_at), default=0.0)
    updated_at = _time(conv.get("lastModified"))
    return _Found(_name(conv.get("id")), conv.get("name"), start, updated_at, conv.get("currNode"), nodes)


def _files(extra: object, skipped: Counter[str]) -> Iterator[str]:
    """Yield the text of attached files; count the others."""
    for part in extra if isinstance(extra, list) else ():
        if not isinstance(part, dict):
            continue
        content, name = part.get("content"), _name(part.get("name")) or "file"
        if isinstance(content, str) and content.strip():
            yield f"{name}:\n\n{content.strip()}"
        else:
            skipped[_name(part.get("type")) or "unknown"] += 1


def _text(content: object, skipped: Counter[str]) -> str:
    """Return the text of a message's content: a string, or parts with a text; count the other parts."""
    if isinstance(content, str):
        return content.strip()
    texts = []
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, dict):  # LibreChat: {"type": "text", "text": {"value": ...}}
            text = text.get("value")
        if isinstance(text, str) and text.strip():
            texts.append(text.strip())
        elif isinstance(part, dict) and "think" not in part:
            skipped[_name(part.get("type")) or "unknown"] += 1
    return "\n\n".join(texts)


def _id(value: object) -> str:
    """Return the id of a message. Raises: InvalidRequestError."""
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_ID_CHARS:
        raise InvalidRequestError(f"messages: an id has 1 to {_MAX_ID_CHARS} characters", param="messages")
    return value


def _optional_id(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _name(value: object) -> str:
    return value[:_MAX_ID_CHARS] if isinstance(value, str) else ""


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _time(value: object) -> float:
    """Return a time in seconds since 1970, given in seconds, milliseconds or ISO 8601; 0 if it is none."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1000 * _LAST_TIME_S:
        return 0.0
    return float(value) / 1000 if value > 100_000_000_000 else float(value)
