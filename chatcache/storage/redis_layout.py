"""The Redis key layout and the encoding of values.

All keys of one conversation are in one cluster slot (`{...}` in the key):

    chatcache:schema                     the version of this layout
    chatcache:{conv}:head                the conversation, and the position of its next message
    chatcache:{conv}:items               hash: message id -> position and message
    chatcache:{conv}:order               list: message id by position, those of deleted messages included
    chatcache:{conv}:members             sorted set: response id, position and id of each message of a response
    chatcache:{conv}:turns               hash: response id -> response
    chatcache:{conv}:checkpoint:<response>  list: an empty entry, then checkpoints; exists while it is in progress
    chatcache:{conv}:words               folded words of titles and messages, a superset: candidates of a search
    chatcache:at:<message or response>   the conversation that contains it
    chatcache:list:{owner}               sorted set: an owner's conversations by `updated_at`
    chatcache:ids:{owner}                sorted set: the same by id
    chatcache:running                    hash: response in progress -> its gateway process and conversation
    chatcache:alive:<process>            exists while that process is alive; expires
    chatcache:claim:{owner}:<key>        an idempotency key; expires
    chatcache:prompts:{tenant}           hash: name -> saved prompt
    chatcache:{keys}                     hash: id of an API key -> its record, without the secret
    chatcache:{keys}:version             a number that grows with every change of the keys
    chatcache:usage:<day>                hash: id of an API key -> tokens of that day; @<gateway>: last write; expires
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import quote, unquote

import msgspec

from chatcache.conversations.search import SearchQuery, fold_words
from chatcache.conversations.store import Claim, SavedPrompt
from chatcache.conversations.tree import Conversation, Item, Turn

PREFIX = "chatcache:"
SCHEMA_KEY = f"{PREFIX}schema"
ALL_GATEWAYS_CHANNEL = "chatcache:gateways"
RUNNING_KEY = f"{PREFIX}running"
API_KEYS_KEY = f"{PREFIX}{{keys}}"
API_KEYS_VERSION_KEY = f"{API_KEYS_KEY}:version"
IDS_PREFIX = f"{PREFIX}ids:"
VERSION = 2


class Head(NamedTuple):
    """A conversation, and the position of its next message."""

    conversation: Conversation
    num_positions: int


class PositionedItem(NamedTuple):
    """A message, and its position in its conversation."""

    position: int
    item: Item


_HEAD = msgspec.msgpack.Decoder(tuple[Conversation, int])
_ITEM = msgspec.msgpack.Decoder(tuple[int, Item])
_TURN = msgspec.msgpack.Decoder(tuple[Turn, bytes])
_CLAIM = msgspec.msgpack.Decoder(Claim)
_PROMPT = msgspec.msgpack.Decoder(SavedPrompt)


def head_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:head"


def items_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:items"


def order_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:order"


def members_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:members"


def member_entry(placed: PositionedItem) -> str:
    """Return the entry of a message that belongs to a response. Entries of a response are sorted by position."""
    return f"{placed.item.response_id}\0{placed.position:010d}\0{placed.item.id}"


def member_range(response_id: str) -> tuple[str, str]:
    """Return the bounds of the entries of a response, for ZRANGEBYLEX."""
    return f"[{response_id}\0", f"({response_id}\1"


def conversation_of_head(key: str) -> str:
    """Return the conversation of a `head_key`."""
    return key[len(PREFIX) + 1 : -len("}:head")]


def turns_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:turns"


def words_key(conversation_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:words"


def checkpoint_key(conversation_id: str, response_id: str) -> str:
    return f"{PREFIX}{{{conversation_id}}}:checkpoint:{response_id}"


def member_key(member_id: str) -> str:
    return f"{PREFIX}at:{member_id}"


def list_key(owner: str) -> str:
    return f"{PREFIX}list:{{{_owner_part(owner)}}}"


def ids_key(owner: str) -> str:
    return f"{IDS_PREFIX}{{{_owner_part(owner)}}}"


def owner_from_ids_key(key: str) -> str:
    """Return the owner of an `ids_key`."""
    return unquote(key[len(IDS_PREFIX) + 3 : -1])


def claim_key(owner: str, key: str) -> str:
    return f"{PREFIX}claim:{{{_owner_part(owner)}}}:{key}"


def prompts_key(tenant: str) -> str:
    return f"{PREFIX}prompts:{{{_owner_part(tenant)}}}"


def gateway_channel(name: str) -> str:
    """Return the channel of the messages to one gateway."""
    return f"chatcache:gateway:{name}"


def alive_key(process: str) -> str:
    return f"{PREFIX}alive:{process}"


def usage_key(day: int) -> str:
    return f"{PREFIX}usage:{day}"


def _owner_part(owner: str) -> str:
    """Return an owner as part of a key: without braces and never empty."""
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
    """Encode a response. The echoed request is kept as JSON, which has numbers of any size."""
    return msgspec.msgpack.encode((replace(turn, echo={}), msgspec.json.encode(turn.echo)))


def unpack_turn(data: bytes) -> Turn:
    turn, echo = _TURN.decode(data)
    return replace(turn, echo=msgspec.json.decode(echo))


def pack_claim(claim: Claim) -> bytes:
    return msgspec.msgpack.encode(claim)


def unpack_claim(data: bytes) -> Claim:
    return _CLAIM.decode(data)


def pack_prompt(prompt: SavedPrompt) -> bytes:
    return msgspec.msgpack.encode(prompt)


def unpack_prompt(data: bytes) -> SavedPrompt:
    return _PROMPT.decode(data)


def index_words(texts: Iterable[str]) -> str:
    """Return the folded words of the texts for the search, surrounded by spaces.

    A word that occurs several times in one text is listed once for that text.
    """
    return "".join(f" {' '.join(dict.fromkeys(fold_words(text).split()))} " for text in texts if text)


def can_match(query: SearchQuery, words: str) -> bool:
    """Check whether a conversation with these words can contain a text that the query finds."""
    *whole, last = (word for phrase in query.phrases for word in phrase)
    return all(f" {word} " in words for word in whole) and f" {last}" in words
