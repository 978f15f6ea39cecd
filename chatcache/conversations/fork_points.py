"""Where a turn continues.

At a response, at a message, at the end of a conversation, or inside a reply.

A fork inside a reply keeps its first tokens, and thereby its KV pages, whether the reply is finished or still running:

    user --- reply R ............... (running or finished)
        `--- R cut --- user ---      with input: the cut reply is stored as a message of its own
        |--- R cut + other text      without input: R is continued, as one more candidate
        `--- R cut + token + ...     the same, with a token chosen by the client
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chatcache.auth import namespace_of
from chatcache.conversations.prompt import Function, Message, argument_schemas, functions_from_echo
from chatcache.conversations.replies.parser import ReplyContext
from chatcache.conversations.store import ConversationStore, StaleRevisionError
from chatcache.conversations.tree import (
    DELETED,
    FORKED,
    IN_PROGRESS,
    INCOMPLETE,
    ConversationTree,
    Item,
    ReplyParts,
    ResponseElsewhereError,
    Turn,
    main_output,
    new_id,
)
from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.tokenizer import Tokenizer

_MAX_BYTES_OF_CHARACTER = 4
ROOT = "root"
_NOTHING_TO_FORK = "fork_at needs a message to fork: previous_item_id"


@dataclass(frozen=True, slots=True)
class ReplyPrefix:
    """The beginning of a reply: its first token ids and the text that they stand for.

    The reply is candidate `index` of the response `turn` and was generated after the token ids `prompt`.
    `text`: the raw output. `visible_text` and `parts`: its message text, and its reasoning and tool calls. The last
    `num_partial_tokens` of `ids` begin a character whose bytes are incomplete; the texts do not contain it yet.
    """

    turn: Turn
    index: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    visible_text: str
    parts: ReplyParts
    num_partial_tokens: int = 0

    def to_item(self) -> Item:
        """Return the prefix as a message of its own, a sibling of the reply that it was cut from."""
        return Item(
            id=new_id("msg"),
            parent_id=self.turn.parent_id,
            role="assistant",
            text=self.visible_text,
            token_ids=self.ids,
            response_id=self.turn.id,
            index=self.index,
            status=INCOMPLETE,
            finish_reason=FORKED,
            created_at=time.time(),
            parts=self.parts,
        )


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for a new turn: its input, and the position in a conversation to continue from.

    The position is the message `previous_item_id` ("root": before all messages), else the response
    `previous_response_id`, else the active leaf of `conversation_id`; without all three the turn begins a new
    conversation. `fork_at`: keep only that many tokens of the reply at the position. `fork_with`: a token id to put
    after them. `running_prefix`: the beginning of a reply that is still being generated. `rev`: the expected revision
    of the conversation. `template_kwargs`: variables of the chat template. `preserve_thinking`: whether earlier replies
    keep their reasoning in the prompt; None for the conversation's setting. `reply_start`: the text with which the
    reply begins. `has_ended`: `previous_response_id` has ended, even if the store does not have its end yet.
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
    running_prefix: ReplyPrefix | None = None
    functions: tuple[Function, ...] = ()
    rev: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    preserve_thinking: bool | None = None
    reply_start: str = ""
    has_ended: bool = False

    @property
    def namespace(self) -> str:
        """The KV cache namespace: the tenant."""
        return namespace_of(self.owner)


@dataclass(frozen=True, slots=True)
class ContinuationPoint:
    """The position in a conversation tree at which a turn continues.

    `tree`: None for a new conversation. `path`: the messages before the turn. `prefix`: the beginning of a reply that
    follows `path`, if the turn forks a reply.
    """

    tree: ConversationTree | None
    path: tuple[Item, ...]
    prefix: ReplyPrefix | None = None


class ContinuationResolver:
    """Finds where in a stored conversation a request continues.

    That is after a message or response, inside a stored or running reply, or in a new conversation.
    """

    def __init__(self, store: ConversationStore, tokenizer: Tokenizer, reply_format: ReplyFormat) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._reply_format = reply_format

    async def resolve(self, request: TurnRequest) -> ContinuationPoint:
        """Load the conversation of a request and find the position at which it continues.

        Raises: NotFoundError for ids that the owner does not have, InvalidRequestError for an impossible position,
        StaleRevisionError.
        """
        owner, item_id, response_id = request.owner, request.previous_item_id, request.previous_response_id
        member = item_id if item_id is not None and item_id != ROOT else response_id
        if request.running_prefix is not None:
            member, item_id = request.running_prefix.turn.id, None
        conversation_id = request.conversation_id
        if member is not None:
            holder = await self._locate(owner, member, "previous_item_id" if member == item_id else None)
            if conversation_id is not None and holder != conversation_id:
                raise InvalidRequestError(
                    f"{member!r} is not in conversation {conversation_id!r}", param="conversation"
                )
            if response_id not in (None, member) and await self._locate(owner, response_id, None) != holder:
                raise InvalidRequestError(
                    f"{member!r} is not in the conversation of {response_id!r}", param="previous_item_id"
                )
            conversation_id = holder
        if conversation_id is None:
            if item_id == ROOT:
                raise InvalidRequestError("previous_item_id 'root' needs a conversation", param="previous_item_id")
            if request.fork_at is not None:
                raise InvalidRequestError(_NOTHING_TO_FORK, param="fork_at")
            if request.rev is not None:
                raise InvalidRequestError("rev needs a conversation to be the revision of", param="rev")
            return ContinuationPoint(None, ())
        end = request.running_prefix.turn.id if request.running_prefix is not None else item_id or response_id
        limit = 0 if end == ROOT else None
        tree = await self._store.load_path(owner, conversation_id, end if end != ROOT else None, limit=limit)
        if request.rev is not None and request.rev != tree.conversation.rev:
            raise StaleRevisionError(tree.conversation, request.rev)
        if request.running_prefix is not None:
            return ContinuationPoint(tree, tree.path(request.running_prefix.turn.parent_id), request.running_prefix)
        if item_id is None and response_id in tree.turns and not request.has_ended:
            check_runs_here(tree.turns[response_id], "continue", "previous_response_id")
        path = tree.path(_leaf(tree, item_id, response_id))
        if request.fork_at is None:
            return ContinuationPoint(tree, path)
        if not path:
            raise InvalidRequestError(_NOTHING_TO_FORK, param="fork_at")
        context = self.reply_context(tree, path[-1])
        prefix = await asyncio.to_thread(cut_reply, context, tree, path[-1], request.fork_at, request.fork_with)
        if request.input and prefix.ids == path[-1].token_ids:
            return ContinuationPoint(tree, path)
        return ContinuationPoint(tree, path[:-1], prefix)

    def reply_context(self, tree: ConversationTree, item: Item) -> ReplyContext:
        """Return the parsing context with which a stored reply was parsed."""
        turn = tree.turn_of(item)
        functions = argument_schemas(functions_from_echo(turn.echo.get("tools")) if turn is not None else ())
        return ReplyContext(self._tokenizer, self._reply_format if item.parts.raw else ReplyFormat(), functions or None)

    async def _locate(self, owner: str, member: str, param: str | None) -> str:
        try:
            return await self._store.locate(owner, member)
        except NotFoundError:
            if param is not None:
                raise NotFoundError(f"no message {member!r}", param=param) from None
            raise _no_response(member) from None


def cut_reply(
    context: ReplyContext, tree: ConversationTree, item: Item, num_tokens: int, fork_with: int | None = None
) -> ReplyPrefix:
    """Return the prefix of a stored reply that a fork continues.

    It has the first `num_tokens` tokens of the reply, then the token `fork_with` if given. Without `fork_with`, tokens
    of an incomplete last character are dropped. Raises: InvalidRequestError naming `fork_at` or `fork_with`.
    """
    turn, prompt = require_generated(tree, item, "fork_at")
    check_fork_at(num_tokens, len(item.token_ids))
    ids = fork_token_ids(context, item.token_ids[:num_tokens], fork_with)
    first_ids = item.token_ids[: num_tokens or None]
    _, hidden = drop_partial_character(context, prompt, first_ids, skip_special_tokens=True)
    skips = (item.parts.raw or item.text).startswith(hidden)  # else it was generated with special tokens visible
    call_ids = [call.call_id for call in item.parts.tool_calls]
    return build_prefix(context, turn, item.index, prompt, ids, call_ids, skips=skips, is_exact=fork_with is not None)


def build_prefix(
    context: ReplyContext,
    turn: Turn,
    index: int,
    prompt: tuple[int, ...],
    ids: tuple[int, ...],
    call_ids: Sequence[str],
    *,
    skips: bool,
    is_exact: bool,
) -> ReplyPrefix:
    """Build the `ReplyPrefix` of a reply that begins with the tokens `ids`; parse their text.

    `skips`: special tokens are not part of the text. `is_exact`: keep all of `ids`; otherwise tokens of an incomplete
    last character are dropped. `call_ids`: ids already assigned to the tool calls of the reply.
    """
    whole, text = drop_partial_character(context, prompt, ids, skip_special_tokens=skips)
    parser = context.new_parser(prompt, call_ids, turn.id, index)
    parser.push(text)
    parser.finish()
    num_partial = len(ids) - len(whole) if is_exact else 0
    kept = ids if is_exact else whole
    return ReplyPrefix(turn, index, prompt, kept, text, parser.text, parser.parts(text), num_partial)


def fork_token_ids(context: ReplyContext, ids: tuple[int, ...], fork_with: int | None) -> tuple[int, ...]:
    """Return `ids` followed by the token `fork_with`, if given.

    Raises: InvalidRequestError if `fork_with` is not a token id or would end the reply.
    """
    if fork_with is None:
        return ids
    num_ids = context.tokenizer.vocab_size
    if not 0 <= fork_with < num_ids:
        raise InvalidRequestError(f"fork_with must be a token id between 0 and {num_ids - 1}", param="fork_with")
    if fork_with in context.tokenizer.eos_token_ids:
        raise InvalidRequestError("fork_with: that token ends the reply, so nothing can follow it", param="fork_with")
    return (*ids, fork_with)


def require_generated(tree: ConversationTree, item: Item, param: str) -> tuple[Turn, tuple[int, ...]]:
    """Return the response that generated a message, and the exact token ids of its prompt.

    Raises: InvalidRequestError naming `param` where the prompt or the message's tokens are not known.
    """
    turn, sequence = tree.turn_of(item), tree.token_sequence(item)
    if turn is None or not item.token_ids or not sequence:
        raise InvalidRequestError(f"{param} is for messages that this server generated", param=param)
    return turn, sequence[: -len(item.token_ids)]


def check_fork_at(fork_at: int, num_tokens: int) -> None:
    """Raise InvalidRequestError if `fork_at` is more than the number of tokens of the reply."""
    if fork_at > num_tokens:
        raise InvalidRequestError(
            f"fork_at must be at most {num_tokens}, the message's tokens, got {fork_at}", param="fork_at"
        )


def drop_partial_character(
    context: ReplyContext, prompt: Sequence[int], ids: Sequence[int], *, skip_special_tokens: bool
) -> tuple[tuple[int, ...], str]:
    """Drop tokens at the end of `ids` that hold only a part of a character's UTF-8 bytes.

    Return the remaining tokens and their text.
    """

    def decode(first_ids: Sequence[int]) -> str:
        stream = context.text_stream(prompt, skip_special_tokens=skip_special_tokens)
        return stream.push(first_ids) + stream.finish()

    for num_dropped in range(min(_MAX_BYTES_OF_CHARACTER, len(ids))):
        kept = tuple(ids[: len(ids) - num_dropped])
        text = decode(kept)
        if not text.endswith("\ufffd"):
            return kept, text
    return tuple(ids), decode(ids)


def check_runs_here(turn: Turn, action: str, param: str) -> None:
    """Check that a response which does not run in this process has ended. Raises: ResponseElsewhereError."""
    if turn.status == IN_PROGRESS:
        raise ResponseElsewhereError(turn.id, action, param)


def _no_response(response_id: str) -> NotFoundError:
    message = f"no response {response_id!r}"
    return NotFoundError(message, param="previous_response_id", code="previous_response_not_found")


def _leaf(tree: ConversationTree, item_id: str | None, response_id: str | None) -> str | None:
    if item_id == ROOT:
        return None
    if item_id is not None:
        if item_id not in tree.items:
            raise NotFoundError(f"no message {item_id!r}", param="previous_item_id")
        return item_id
    if response_id is not None:
        turn = tree.turns.get(response_id)
        if turn is None or turn.status == DELETED:
            raise _no_response(response_id)
        outputs = tree.outputs(response_id)
        return main_output(outputs, turn.status).id if outputs else turn.parent_id or None
    return tree.conversation.active_leaf
