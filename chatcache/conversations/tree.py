"""The conversation tree.

Items that refer to their parent, and turns that record how replies were generated.

    (root) -- user a -- assistant b0        response 1, n = 2
                    `-- assistant b1 -- user c -- assistant d     response 2 continues from b1
                                    `-- user e -- assistant f     response 3: an edit of c, a fork at b1

The exact tokens of a reply are those of the reply that its prompt extends (`Turn.base_item_id`), then the prompt tokens
that its own turn added, then its own. Only the parts are stored; `token_sequence` follows the chain.

Deleting a message keeps its descendants, which lose their stored tokens because their prompts contained it:

    a -- b -- c -- d        without b:   a -- c -- d      c and d are rendered again from now on
          `-- e -- f                      `-- e -- f

Deletions are planned here as data (`MessageDeletion`) and applied by the store in one transaction.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import msgspec

from chatcache.errors import ChatcacheError, NotFoundError
from chatcache.types.events import FINISH_CANCELLED

IN_PROGRESS = "in_progress"
COMPLETED = "completed"
INCOMPLETE = "incomplete"
CANCELLED = "cancelled"
FAILED = "failed"
DELETED = "deleted"  # hidden from clients, kept for the tokens of messages that continue it
SHARE_KEY = "share"  # of a conversation's metadata: the message that a link shows, and the digest of its secret
FORKED = "fork"  # finish reason of a message that is a prefix of another


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one response. The prompt counts once for all candidates."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int = 0


class ToolCall(msgspec.Struct, frozen=True):
    """A function call written by the model.

    `arguments` is the JSON text as generated, valid or not.
    """

    call_id: str
    name: str
    arguments: str


class ReplyParts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of a message other than its text.

    `reasoning` and `tool_calls` were parsed from the model's output; `raw` is the whole output, or "" if it equals the
    text. `call_id`: the call that a message of role "tool" answers. `is_call_cut`: the arguments of the last call have
    no end, since generation ended before it or they violate their notation. `output_indexes`: positions of the reply's
    output items (reasoning, text, calls) in its response; () if they are in this order, one candidate after the other.
    """

    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    raw: str = ""
    call_id: str = ""
    is_call_cut: bool = False
    output_indexes: tuple[int, ...] = ()

    @property
    def finished_calls(self) -> tuple[ToolCall, ...]:
        """The calls whose arguments are complete."""
        return self.tool_calls[:-1] if self.is_call_cut else self.tool_calls


@dataclass(frozen=True, slots=True)
class Item:
    """One message. `token_ids` are a reply's own tokens without the one that ended it.

    Input items have none.
    """

    id: str
    parent_id: str | None
    role: str
    text: str
    token_ids: tuple[int, ...] = ()
    response_id: str | None = None
    index: int = 0
    status: str = COMPLETED
    finish_reason: str | None = None
    created_at: float = 0.0
    parts: ReplyParts = field(default_factory=ReplyParts)


@dataclass(frozen=True, slots=True)
class Turn:
    """A stored response: how its replies were generated, and the token ids of its prompt.

    The prompt consists of all tokens up to and including the reply `base_item_id` (None: no stored reply is reused),
    then `prompt_ids`, which are empty if the exact prompt is unknown. `parent_id`: the message that the replies follow
    ("": they are roots). `echo`: request fields that the response object repeats (metadata, temperature, tools, ...).
    """

    id: str
    parent_id: str
    model: str
    created_at: float
    base_item_id: str | None = None
    prompt_ids: tuple[int, ...] = ()
    instructions: str | None = None
    previous_response_id: str | None = None
    status: str = IN_PROGRESS
    usage: Usage | None = None
    echo: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its messages: the head of a message tree.

    `owner` is the tenant or user and is never sent to clients. `rev` grows by one with every change. `updated_at`, the
    sort key of lists, is the time of the last added message or response; renaming or deleting does not move a
    conversation to the top of the list.
    """

    id: str
    owner: str
    created_at: float
    updated_at: float
    title: str = ""
    active_leaf: str | None = None
    rev: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)


def head_after_append(head: Conversation, active_leaf: str | None = None, title: str | None = None) -> Conversation:
    """Return the head after messages or a response were added.

    `title` applies to an untitled conversation.
    """
    return replace(
        head,
        title=head.title or title or "",
        active_leaf=active_leaf if active_leaf is not None else head.active_leaf,
        rev=head.rev + 1,
        updated_at=max(time.time(), head.updated_at),
    )


def head_after_update(
    head: Conversation,
    *,
    title: str | None = None,
    active_leaf: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Conversation:
    """Return the head after the given fields were set."""
    return replace(
        head,
        title=title if title is not None else head.title,
        active_leaf=active_leaf if active_leaf is not None else head.active_leaf,
        metadata=metadata if metadata is not None else head.metadata,
        rev=head.rev + 1,
    )


def head_after_deletion(head: Conversation, deletion: MessageDeletion) -> Conversation:
    """Return the head after messages or a response were deleted."""
    return replace(head_after_update(head, metadata=deletion.metadata), active_leaf=deletion.active_leaf)


def main_output(outputs: Sequence[Item], status: str) -> Item:
    """Return the candidate that a conversation continues with by default.

    This is the first one that the client did not cancel, or the first of all if the response or every candidate was
    cancelled.
    """
    kept = [item for item in outputs if item.finish_reason != FINISH_CANCELLED]
    return kept[0] if kept and status != CANCELLED else outputs[0]


class ConversationTree:
    """A loaded conversation, read-only.

    `num_stored_items`: if this is a part of it, and they were counted, the messages of the whole conversation.
    """

    def __init__(
        self,
        conversation: Conversation,
        items: Iterable[Item],
        turns: Iterable[Turn],
        num_stored_items: int | None = None,
    ) -> None:
        self.conversation = conversation
        self.items: dict[str, Item] = {item.id: item for item in items}
        self.turns: dict[str, Turn] = {turn.id: turn for turn in turns}
        self.num_stored_items = num_stored_items

    def path(self, item_id: str | None) -> tuple[Item, ...]:
        """Return the items from the root to `item_id`. Raises: KeyError for an unknown id."""
        path: list[Item] = []
        while item_id is not None:
            item = self.items[item_id]
            path.append(item)
            item_id = item.parent_id
        return tuple(reversed(path))

    def children(self, item_id: str | None) -> tuple[Item, ...]:
        """Return the items under `item_id` (None: the roots), oldest first."""
        return tuple(item for item in self.items.values() if item.parent_id == item_id)

    def outputs(self, response_id: str) -> tuple[Item, ...]:
        """Return the candidates of a response by index, without prefixes that were forked off them."""
        turn = self.turns[response_id]
        found = (item for item in self.items.values() if self.is_generated_by(item, turn))
        return tuple(sorted((item for item in found if item.finish_reason != FORKED), key=lambda item: item.index))

    def inputs(self, response_id: str) -> tuple[Item, ...]:
        """Return the input messages of a response in order, assistant messages included."""
        turn = self.turns[response_id]
        found = (item for item in self.items.values() if item.response_id == response_id)
        return tuple(item for item in found if not self.is_generated_by(item, turn))

    def is_generated_by(self, item: Item, turn: Turn) -> bool:
        """Check whether `item` is a reply of `turn`, or a prefix of one that a fork stored."""
        return item.response_id == turn.id and item.role == "assistant" and (item.parent_id or "") == turn.parent_id

    def turn_of(self, item: Item) -> Turn | None:
        """Return the response that generated `item`, or None when it came from a client."""
        if item.role != "assistant" or item.response_id is None:
            return None
        turn = self.turns.get(item.response_id)
        return turn if turn is not None and self.is_generated_by(item, turn) else None

    def token_sequence(self, reply: Item) -> tuple[int, ...]:
        """Return every token up to and including `reply`, as in its KV pages.

        Empty if they are not known.
        """
        parts: list[tuple[int, ...]] = []
        item: Item | None = reply
        while item is not None:
            turn = self.turn_of(item)
            if turn is None or not turn.prompt_ids:
                return ()
            parts += (item.token_ids, turn.prompt_ids)
            if turn.base_item_id is not None and turn.base_item_id not in self.items:
                return ()
            item = self.items[turn.base_item_id] if turn.base_item_id is not None else None
        return tuple(token for part in reversed(parts) for token in part)


class ConversationBusyError(ChatcacheError):
    """A response in progress, or about to begin, depends on what a client changes, or many change it at once."""

    status = 409
    type = "conflict_error"
    code = "conversation_busy"


def no_response_error(response_id: str) -> NotFoundError:
    return NotFoundError(f"no response {response_id[:128]!r}", param="response_id")


def deleted_meanwhile_error() -> ConversationBusyError:
    message = "a message that this response continues was deleted meanwhile: read the conversation, then send it again"
    return ConversationBusyError(message)


MAX_EDIT_ATTEMPTS = 100  # of a change that others overtake


def changes_too_often_error() -> ConversationBusyError:
    return ConversationBusyError("the conversation changes too often for this change: try again")


class ResponseElsewhereError(ChatcacheError):
    """The response is running in another gateway, and only that gateway can do what the request asks for."""

    status = 409
    type = "conflict_error"
    code = "response_on_other_gateway"

    def __init__(self, response_id: str, action: str, param: str) -> None:
        message = f"{response_id[:128]} runs on another gateway: {action} it there, or retry after its end"
        super().__init__(message, param=param)


@dataclass(frozen=True, slots=True)
class MessageDeletion:
    """The changes to a stored tree that delete a message or a response.

    `removed_items` and `removed_turns`: ids to remove. `items` and `turns`: new versions of those that stay but change.
    `active_leaf`: the new one. `metadata`: the new one; None if it does not change.
    """

    active_leaf: str | None
    removed_items: tuple[str, ...] = ()
    removed_turns: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()
    turns: tuple[Turn, ...] = ()
    metadata: Mapping[str, str] | None = None


def plan_message_deletion(tree: ConversationTree, item_id: str) -> MessageDeletion:
    """Plan the removal of one message; its children move up to its parent.

    Prompts below contained the message, so their tokens are dropped: replies can be continued, but not forked inside.
    Raises: NotFoundError, ConversationBusyError.
    """
    item = tree.items.get(item_id)
    if item is None:
        raise NotFoundError(f"no message {item_id!r}", param="item_id")
    below = {each.id for each in _below(tree, item_id)}
    held = {item_id, *below}
    if any(turn.status == IN_PROGRESS and turn.parent_id in held for turn in tree.turns.values()):
        raise ConversationBusyError("a response that continues this message is being generated: cancel it first")
    turns = (turn for turn in tree.turns.values() if turn.parent_id in held)
    moved = (each for each in tree.items.values() if each.id in below)
    return MessageDeletion(
        active_leaf=_nearest(tree, tree.conversation.active_leaf, {item_id}),
        metadata=_metadata_without(tree, {item_id}),
        removed_items=(item_id,),
        items=tuple(
            replace(each, token_ids=(), parent_id=item.parent_id if each.parent_id == item_id else each.parent_id)
            for each in moved
        ),
        turns=tuple(
            replace(
                turn,
                base_item_id=None,
                prompt_ids=(),
                parent_id=(item.parent_id or "") if turn.parent_id == item_id else turn.parent_id,
            )
            for turn in turns
        ),
    )


def plan_response_deletion(tree: ConversationTree, response_id: str) -> MessageDeletion:
    """Plan the removal of a response and of its messages that nothing else depends on.

    Messages that other messages or responses follow stay in the tree; the response itself cannot be found any more.
    Raises: NotFoundError, ConversationBusyError.
    """
    turn = tree.turns.get(response_id)
    if turn is None:
        raise no_response_error(response_id)
    if turn.status == IN_PROGRESS:
        raise ConversationBusyError("the response is being generated: cancel it first")
    made = [each for each in tree.items.values() if tree.is_generated_by(each, turn)]
    forked = tree.items.get(str(turn.echo.get("forked_item_id")))
    num_dependents = Counter(each.parent_id for each in tree.items.values())
    num_dependents.update(each.parent_id for each in tree.turns.values() if each.id != response_id)
    removed: set[str] = set()
    # Leaves first: each input is a child of the one before it, the first perhaps of a forked reply's prefix.
    for each in (*made, *reversed(tree.inputs(response_id)), *((forked,) if forked is not None else ())):
        if not num_dependents[each.id]:
            removed.add(each.id)
            num_dependents[each.parent_id] -= 1
    is_needed = any(each.id not in removed for each in made)
    deleted = replace(turn, status=DELETED, usage=None, echo={})
    return MessageDeletion(
        active_leaf=_nearest(tree, tree.conversation.active_leaf, removed),
        metadata=_metadata_without(tree, removed),
        removed_items=tuple(removed),
        removed_turns=() if is_needed else (response_id,),
        turns=(deleted,) if is_needed else (),
    )


def _nearest(tree: ConversationTree, item_id: str | None, removed: Set[str]) -> str | None:
    """Return the message, or its nearest ancestor that is not among the `removed` ids."""
    while item_id is not None and item_id in removed:
        item_id = tree.items[item_id].parent_id
    return item_id


def _metadata_without(tree: ConversationTree, removed: Set[str]) -> Mapping[str, str] | None:
    """Return the metadata in which the link shows the rest of its branch; None if its last message stays.

    A link without a message left is removed.
    """
    metadata = dict(tree.conversation.metadata)
    leaf, _, digest = metadata.pop(SHARE_KEY, "").partition(" ")
    if leaf not in removed:
        return None
    rest = _nearest(tree, leaf, removed)
    return metadata if rest is None else metadata | {SHARE_KEY: f"{rest} {digest}"}


def _below(tree: ConversationTree, item_id: str) -> Iterator[Item]:
    by_parent: dict[str | None, list[Item]] = {}
    for item in tree.items.values():
        by_parent.setdefault(item.parent_id, []).append(item)
    waiting = list(by_parent.get(item_id, ()))
    while waiting:
        item = waiting.pop()
        yield item
        waiting += by_parent.get(item.id, ())


def new_id(prefix: str, separator: str = "_") -> str:
    """Return an id that sorts by creation time.

    Prefix, 12 hex digits of milliseconds since 1970, 16 random ones.
    """
    return f"{prefix}{separator}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"


def derive_id(prefix: str, origin_id: str, *index: int) -> str:
    """Return the id of part `index` of an object: a function of the object's id, of the form of `new_id`."""
    time_digits = origin_id.replace("-", "_").rpartition("_")[2][:12]
    name = " ".join((origin_id, *map(str, index)))
    return f"{prefix}_{time_digits}{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
