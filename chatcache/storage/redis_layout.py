"""Keys in Redis and what they hold. What belongs to one conversation lies in one slot (`{...}` in its keys).

chatcache:schema                     the version of this layout
chatcache:{conv}:head                the conversation, and the position of its next message
chatcache:{conv}:items               hash: message id -> its position and itself
chatcache:{conv}:turns               hash: response id -> itself
chatcache:{conv}:words               folded words of titles and messages, a superset: which to read in a search
chatcache:at:<message or response>   the conversation that holds it
chatcache:list:{owner}               sorted set: an owner's conversations by `updated_at`
chatcache:ids:{owner}                sorted set: the same by id
chatcache:running                    hash: response under way -> who runs it, and its conversation
chatcache:alive:<process>            there while that process is; expires
chatcache:claim:{owner}:<key>        an idempotency key; expires
chatcache:{keys}                     hash: id of an API key -> itself, without its secret
chatcache:{keys}:version             a number that grows with every change of it
chatcache:usage:<day>                hash: id of an API key -> its tokens that day; @<gateway>: its last write; expires
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec

from chatcache.conversations.search import SearchQuery, fold_words
from chatcache.conversations.store import Claim
from chatcache.conversations.tree import Conversation, Item, Turn

PREFIX = "chatcache:"
SCHEMA_KEY = f"{PREFIX}schema"
RUNNING_KEY = f"{PREFIX}running"
API_KEYS_KEY = f"{PREFIX}{{keys}}"
API_KEYS_VERSION_KEY = f"{API_KEYS_KEY}:version"
IDS_PREFIX = f"{PREFIX}ids:"
VERSION = 1


class Head(NamedTuple):
    """A conversation, and the position that its next message has."""

    conversation: Conversation
    num_positions: int


class PositionedItem(NamedTuple):
    """A message, and its position among all of its conversation."""

    position: int
    item: Item


_HEAD = msgspec.msgpack.Decoder(tuple[Conversation, int])
_ITEM = msgspec.msgpack.Decoder(tuple[int, Item])
_TURN = msgspec.msgpack.Decoder(tuple[Turn, bytes])
_CLAIM = msgspec.msgpack.Decoder(Claim)


def head_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:head"


def items_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:items"


def turns_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:turns"


def words_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:words"


def member_key(member_id: str) -> str:
    return f"{PREFIX}at:{member_id}"


def list_key(owner: str) -> str:
    return f"{PREFIX}list:{{{_named(owner)}}}"


def ids_key(owner: str) -> str:
    return f"{IDS_PREFIX}{{{_named(owner)}}}"


def owner_from_ids_key(key: str) -> str:
    """Whose `ids_key` this is."""
    return unquote(key[len(IDS_PREFIX) + 3 : -1])


def claim_key(owner: str, key: str) -> str:
    return f"{PREFIX}claim:{{{_named(owner)}}}:{key}"


def alive_key(process: str) -> str:
    return f"{PREFIX}alive:{process}"


def usage_key(day: int) -> str:
    return f"{PREFIX}usage:{day}"


def _named(owner: str) -> str:
    """An owner in a key: no braces, and never nothing."""
    return f"o={quote(owner, safe='')}"


def pack_head(head: Head) -> bytes:
    return msgspec.msgpack.encode(tuple(head))


def unpack_head(data: bytes) -> Head:
    return Head(*_HEAD.decode(data))


def pack_item(placed: PositionedItem) -> bytes:
    return msgspec.msgpack.encode(tuple(placed))


def unpack_item(data: bytes) -> PositionedItem:
    return PositionedItem(*_ITEM.decode(data))


def pack_turn(turn: Turn) -> bytes:
    """What the request said is kept as the JSON it came in, which has numbers of any size."""
    return msgspec.msgpack.encode((replace(turn, echo={}), msgspec.json.encode(turn.echo)))


def unpack_turn(data: bytes) -> Turn:
    turn, echo = _TURN.decode(data)
    return replace(turn, echo=msgspec.json.decode(echo))


def pack_claim(claim: Claim) -> bytes:
    return msgspec.msgpack.encode(claim)


def unpack_claim(data: bytes) -> Claim:
    return _CLAIM.decode(data)


def index_words(texts: Iterable[str]) -> str:
    """The folded words of texts, each between spaces, once per text."""
    return "".join(f" {' '.join(dict.fromkeys(fold_words(text).split()))} " for text in texts if text)


def can_match(query: SearchQuery, words: str) -> bool:
    """Whether a conversation with these words could have a text that the query finds."""
    *whole, last = (word for phrase in query.phrases for word in phrase)
    return all(f" {word} " in words for word in whole) and f" {last}" in words
