"""Where a turn continues: at a response, at a message, at the end of a conversation, inside a reply."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from chatcache.chat.forks import ReplyStart, cut
from chatcache.chat.owners import namespace_of
from chatcache.chat.prompt import Message
from chatcache.chat.reading import Speech
from chatcache.chat.store import ConversationStore, StaleRevision
from chatcache.chat.tools import Function, echoed
from chatcache.chat.tree import DELETED, ConversationTree, Item, main_output
from chatcache.errors import InvalidRequest, NotFound
from chatcache.text.reply_format import ReplyFormat
from chatcache.text.tokenizer import Tokenizer

ROOT = "root"
_NOTHING_TO_FORK = "fork_at needs a message to fork: previous_item_id"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a client asked to say and where. `owner`: whose conversations; at most one of the three places is needed.

    `fork_at` cuts the reply that the place names after so many tokens, and `fork_with`, if there is one, is the token
    that it goes on with; `running` is that reply while it is generated, cut already. `rev`: the revision that the
    client has seen; nothing is said in any other.
    """

    owner: str
    model: str
    input: tuple[Message, ...] = ()
    instructions: str | None = None
    conversation_id: str | None = None
    previous_response_id: str | None = None
    previous_item_id: str | None = None
    store: bool = True
    fork_at: int | None = None
    fork_with: int | None = None
    running: ReplyStart | None = None
    functions: tuple[Function, ...] = ()
    rev: int | None = None

    @property
    def namespace(self) -> str:
        """Of the pages."""
        return namespace_of(self.owner)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn continues. `start`: the beginning of a reply that comes after `path`."""

    tree: ConversationTree | None
    path: tuple[Item, ...]
    start: ReplyStart | None = None


class Places:
    """Finds places in a store's trees."""

    def __init__(self, store: ConversationStore, tokenizer: Tokenizer, form: ReplyFormat) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._form = form

    async def find(self, request: TurnRequest) -> Place:
        """Raises: NotFound for ids the owner lacks, InvalidRequest for a place that cannot be; StaleRevision."""
        owner, item_id, response_id = request.owner, request.previous_item_id, request.previous_response_id
        member = item_id if item_id is not None and item_id != ROOT else response_id
        if request.running is not None:
            member, item_id = request.running.turn.id, None
        conversation_id = request.conversation_id
        if member is not None:
            held_by = await self._locate(owner, member, "previous_item_id" if member == item_id else None)
            if conversation_id is not None and held_by != conversation_id:
                raise InvalidRequest(f"{member!r} is not in conversation {conversation_id!r}", param="conversation")
            conversation_id = held_by
        if conversation_id is None:
            if item_id == ROOT:
                raise InvalidRequest("previous_item_id 'root' needs a conversation", param="previous_item_id")
            if request.fork_at is not None:
                raise InvalidRequest(_NOTHING_TO_FORK, param="fork_at")
            if request.rev is not None:
                raise InvalidRequest("rev needs a conversation to be the revision of", param="rev")
            return Place(None, ())
        tree = await self._store.load(owner, conversation_id)
        if request.rev is not None and request.rev != tree.conversation.rev:
            raise StaleRevision(tree.conversation, request.rev)
        if request.running is not None:
            return Place(tree, tree.path(request.running.turn.parent_id), request.running)
        path = tree.path(_leaf(tree, item_id, response_id))
        if request.fork_at is None:
            return Place(tree, path)
        if not path:
            raise InvalidRequest(_NOTHING_TO_FORK, param="fork_at")
        speech = self.speech_of(tree, path[-1])
        start = await asyncio.to_thread(cut, speech, tree, path[-1], request.fork_at, request.fork_with)
        if request.input and start.ids == path[-1].token_ids:
            return Place(tree, path)
        return Place(tree, path[:-1], start)

    def speech_of(self, tree: ConversationTree, item: Item) -> Speech:
        """How a stored reply was read."""
        turn = tree.turn_of(item)
        names = {function.name for function in echoed(turn.echo.get("tools"))} if turn is not None else set()
        return Speech(self._tokenizer, self._form if item.parts.raw else ReplyFormat(), names or None)

    async def _locate(self, owner: str, member: str, param: str | None) -> str:
        try:
            return await self._store.locate(owner, member)
        except NotFound:
            if param is not None:
                raise NotFound(f"no message {member!r}", param=param) from None
            raise _no_response(member) from None


def _no_response(response_id: str) -> NotFound:
    message = f"no response {response_id!r}"
    return NotFound(message, param="previous_response_id", code="previous_response_not_found")


def _leaf(tree: ConversationTree, item_id: str | None, response_id: str | None) -> str | None:
    if item_id == ROOT:
        return None
    if item_id is not None:
        if item_id not in tree.items:
            raise NotFound(f"no message {item_id!r}", param="previous_item_id")
        return item_id
    if response_id is not None:
        turn = tree.turns.get(response_id)
        if turn is None or turn.status == DELETED:
            raise _no_response(response_id)
        outputs = tree.outputs(response_id)
        return main_output(outputs, turn.status).id if outputs else turn.parent_id or None
    return tree.conversation.active_leaf
