"""The export format: JSON lines, one conversation per line, with token ids.

    {"object": "conversation.export.key", "version": 2, "key": {..}}                 API keys, only in `db export`
    {"object": "conversation.export", "version": 2, "tokenizer": .., "conversation": {..}, "items": [..], "turns": [..],
     "sha256": .., "owner": .., "rev": ..}                                           owner and rev only in `db export`
    {"object": "conversation.export.end", "version": 2, "num_conversations": .., "sha256": ..}

`chatcache db export` writes the conversations of all owners, `/v1/conversations/export` those of one owner; both use
`ExportWriter`. The file of a single conversation is one conversation line. `sha256` of a conversation covers its items
and turns, `sha256` of the end line covers all lines before it. Equal stores give equal files.

Version 1 of a conversation line had no `sha256`; it is still read. Version 1 of `db export` had a line per message;
`archive` reads it.

Conversations are also exported as Markdown, with roles as headings and texts unchanged. The messages of one branch
follow each other. With all branches, messages are numbered from the root downwards, and a message that does not follow
the one before it names its parent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from chatcache.auth import KeyRecord
from chatcache.conversations.tree import Conversation, ConversationTree, Item, ReplyParts, Turn, Usage
from chatcache.errors import InvalidRequestError

CONVERSATION = "conversation.export"
KEY = "conversation.export.key"
END = "conversation.export.end"
VERSION: Literal[2] = 2
_LAST_TIME_S = 253_402_300_799  # the end of the year 9999

Id = Annotated[str, Meta(min_length=1, max_length=128)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TimeS = Annotated[float, Meta(ge=0, le=_LAST_TIME_S)]
ShortText = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Kind = TypeVar("Kind", bound=msgspec.Struct)


class ExportedHead(msgspec.Struct, frozen=True):
    """The fields of a conversation other than its messages and responses."""

    id: Id
    created_at: TimeS
    updated_at: TimeS
    title: Annotated[str, Meta(max_length=200)] = ""
    active_leaf: Id | None = None
    metadata: Annotated[dict[ShortText, ShortText], Meta(max_length=16)] = {}


class ExportedItem(msgspec.Struct, frozen=True):
    """A message: the fields of `tree.Item`."""

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


class ExportedTurn(msgspec.Struct, frozen=True):
    """A response: the fields of `tree.Turn`."""

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


class ExportedConversation(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="object", tag=CONVERSATION):
    """A conversation line.

    Items and turns are decoded one by one, so that an error names its position. `tokenizer` is the digest of the
    tokenizer that the token ids belong to, or None if the exporter did not load it.
    """

    version: Literal[1, 2]
    tokenizer: str | None
    conversation: ExportedHead
    items: list[msgspec.Raw]
    turns: list[msgspec.Raw]
    sha256: str = ""
    owner: Annotated[str, Meta(max_length=256)] | None = None
    rev: Count | None = None


class KeyEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An API key record without its digest, with which session cookies could be forged."""

    id: ShortText
    tenant: ShortText
    created_at: TimeS
    user: ShortText = ""
    name: ShortText = ""
    is_admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    tokens_per_day: int | None = None
    revoked_at: TimeS | None = None


class ExportedKey(msgspec.Struct, frozen=True, tag_field="object", tag=KEY):
    """A line that names an API key. It does not contain the key and gives no access."""

    version: Literal[2]
    key: KeyEntry


class ExportEnd(msgspec.Struct, frozen=True, tag_field="object", tag=END):
    """The last line: a file without it was cut short."""

    version: Literal[2]
    num_conversations: Count
    num_items: Count
    num_turns: Count
    num_keys: Count
    sha256: Digest


class ExportCounts:
    """Running totals of an export and the SHA-256 of its lines, for its writer or its reader."""

    def __init__(self) -> None:
        self.num_conversations = 0
        self.num_items = 0
        self.num_turns = 0
        self.num_keys = 0
        self._sha256 = hashlib.sha256()

    def add_line(self, line: bytes) -> None:
        self._sha256.update(line)

    def add_conversation(self, num_items: int, num_turns: int) -> None:
        self.num_conversations += 1
        self.num_items += num_items
        self.num_turns += num_turns

    def end(self) -> ExportEnd:
        """Return the end line for the lines counted so far."""
        counts = (self.num_conversations, self.num_items, self.num_turns, self.num_keys)
        return ExportEnd(VERSION, *counts, self._sha256.hexdigest())


class ExportWriter:
    """Encodes the lines of one export; each line ends with a newline.

    `tokenizer`: the digest of the tokenizer that the stored token ids belong to, None if unknown. `has_owners`: write
    owners and revisions, for an export of a whole store.
    """

    def __init__(self, tokenizer: str | None, *, has_owners: bool = False) -> None:
        self._tokenizer = tokenizer
        self._has_owners = has_owners
        self._counts = ExportCounts()

    def key(self, record: KeyRecord) -> bytes:
        """Return the line that names an API key."""
        self._counts.num_keys += 1
        return self._line(ExportedKey(VERSION, _copy_fields(record, KeyEntry)))

    def conversation(self, tree: ConversationTree, items: Sequence[Item] | None = None) -> bytes:
        """Return the line of a conversation with its messages and responses.

        `items`: write only these messages, parents first, and their responses.
        """
        head = tree.conversation
        turns: Iterable[Turn] = tree.turns.values()
        leaf = head.active_leaf
        if items is None:
            items = tuple(tree.items.values())
        else:
            kept = {item.id for item in items}
            turns = _turns_of(tree, kept)
            if leaf not in kept:
                leaf = items[-1].id if items else None
        encoded_items = [msgspec.json.encode(_copy_fields(item, ExportedItem)) for item in items]
        in_order = sorted(turns, key=lambda turn: (turn.created_at, turn.id))
        encoded_turns = [msgspec.json.encode(_copy_fields(turn, ExportedTurn)) for turn in in_order]
        self._counts.add_conversation(len(encoded_items), len(encoded_turns))
        line = ExportedConversation(
            version=VERSION,
            tokenizer=self._tokenizer,
            conversation=ExportedHead(head.id, head.created_at, head.updated_at, head.title, leaf, dict(head.metadata)),
            items=[msgspec.Raw(each) for each in encoded_items],
            turns=[msgspec.Raw(each) for each in encoded_turns],
            sha256=digest_of([*encoded_items, *encoded_turns]),
            owner=head.owner if self._has_owners else None,
            rev=head.rev if self._has_owners else None,
        )
        return self._line(line)

    def end(self) -> tuple[ExportEnd, bytes]:
        """Return the totals of the export and its last line, encoded, which contains them."""
        end = self._counts.end()
        return end, msgspec.json.encode(end) + b"\n"

    def _line(self, line: msgspec.Struct) -> bytes:
        data = msgspec.json.encode(line) + b"\n"
        self._counts.add_line(data)
        return data


def digest_of(parts: Iterable[bytes | msgspec.Raw]) -> str:
    """Return the SHA-256 of parts, each followed by a newline."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
        digest.update(b"\n")
    return digest.hexdigest()


def decode(data: bytes | msgspec.Raw, kind: type[Kind], position: str) -> Kind:
    """Decode a part of a file. Raises: InvalidRequestError naming the field below `position`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = (position + path.rstrip("`")).removeprefix(".") or "the conversation"
        raise InvalidRequestError(f"{field}: {message[:1].lower()}{message[1:]}", param=field) from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        where = position or "the conversation"
        raise InvalidRequestError(f"{where}: not valid JSON: {error}", param=position or None) from None


def decode_item(data: bytes | msgspec.Raw, index: int) -> Item:
    """Decode message `index` of a line. Raises: InvalidRequestError naming the field."""
    return to_item(decode(data, ExportedItem, f"items[{index}]"))


def decode_turn(data: bytes | msgspec.Raw, index: int) -> Turn:
    """Decode response `index` of a line. Raises: InvalidRequestError naming the field."""
    return to_turn(decode(data, ExportedTurn, f"turns[{index}]"))


def to_item(item: ExportedItem) -> Item:
    return Item(**{name: getattr(item, name) for name in ExportedItem.__struct_fields__})


def to_turn(turn: ExportedTurn) -> Turn:
    return Turn(**{name: getattr(turn, name) for name in ExportedTurn.__struct_fields__})


def to_conversation(head: ExportedHead, owner: str, rev: int = 1) -> Conversation:
    times = (head.created_at, head.updated_at)
    return Conversation(head.id, owner, *times, head.title, head.active_leaf, rev, head.metadata)


def _turns_of(tree: ConversationTree, kept: set[str]) -> list[Turn]:
    """Return the responses that belong to the messages with the ids `kept`."""
    used = {tree.items[item_id].response_id for item_id in kept}
    return [turn for turn in tree.turns.values() if turn.parent_id in kept or (not turn.parent_id and turn.id in used)]


def _copy_fields(member: object, kind: type[Kind]) -> Kind:
    return kind(**{name: getattr(member, name) for name in kind.__struct_fields__})


_ROLES = {"user": "User", "assistant": "Assistant", "system": "System", "tool": "Tool"}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def branch_markdown(title: str, path: Sequence[Item]) -> str:
    """Return the messages of one branch as a Markdown document."""
    return _document(title, ((_ROLES.get(item.role, item.role), item) for item in path))


def tree_markdown(tree: ConversationTree) -> str:
    """Return all branches of a conversation as a Markdown document, each message once."""
    return _document(tree.conversation.title, _numbered(tree))


def _document(title: str, entries: Iterator[tuple[str, Item]]) -> str:
    parts = [f"# {' '.join(title.split()) or 'Conversation'}"]
    for heading, item in entries:
        parts.append(f"## {heading}")
        parts += [text for text in (_reasoning(item), _closed(item.text.strip("\n")), *_calls(item)) if text]
    return "\n\n".join(parts) + "\n"


def _numbered(tree: ConversationTree) -> Iterator[tuple[str, Item]]:
    children: dict[str | None, list[Item]] = {}
    for item in tree.items.values():
        children.setdefault(item.parent_id, []).append(item)
    numbers: dict[str, int] = {}
    before: str | None = None
    stack = _numbered_last_first(children.get(None, ()))
    while stack:
        number, item = stack.pop()
        numbers[item.id] = len(numbers) + 1
        heading = f"{numbers[item.id]} · {_ROLES.get(item.role, item.role)}"
        num_siblings = len(children[item.parent_id])
        if num_siblings > 1:
            heading += f" · {number} of {num_siblings}"
        if item.parent_id != before:
            heading += f" · after {numbers[item.parent_id]}" if item.parent_id is not None else " · from the start"
        before = item.id
        yield heading, item
        stack += _numbered_last_first(children.get(item.id, ()))


def _numbered_last_first(items: Sequence[Item]) -> list[tuple[int, Item]]:
    return list(enumerate(items, start=1))[::-1]


def _reasoning(item: Item) -> str:
    """Return the model's reasoning as a block quote."""
    text = item.parts.reasoning.strip()
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n")) if text else ""


def _calls(item: Item) -> Iterator[str]:
    for call in item.parts.tool_calls:
        longest = max((len(run) for run in re.findall("`+", call.arguments)), default=0)
        fence = "`" * max(3, longest + 1)
        yield f"Call of `{call.name}`:\n\n{fence}json\n{call.arguments}\n{fence}"


def _closed(text: str) -> str:
    """Return the text with its last code block closed, so that it does not include what follows.

    Source: CommonMark 0.31, 4.5.
    """
    fence = ""
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line.rstrip("\r"))
        if match is None:
            continue
        mark, rest = match.groups()
        if not fence:
            if mark[0] == "~" or "`" not in rest:
                fence = mark
        elif mark[0] == fence[0] and len(mark) >= len(fence) and not rest.strip():
            fence = ""
    return f"{text}\n{fence}" if fence else text
