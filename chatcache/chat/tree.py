"""The conversation tree: items that know their parent, and nothing that could disagree with that.

    (root) -- user a -- assistant b0        response 1, n = 2
                    `-- assistant b1 -- user c -- assistant d     response 2 continues from b1
                                    `-- user e -- assistant f     response 3: an edit of c, a fork at b1

A reply's exact tokens: those of the reply it was assembled on (`Turn.base_item_id`), then the prompt tokens that its
own turn added, then its own. Only these are stored; sequences are rebuilt by following the chain.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from chatcache.types.events import FINISH_CANCELLED

IN_PROGRESS = "in_progress"
COMPLETED = "completed"
INCOMPLETE = "incomplete"
CANCELLED = "cancelled"
FAILED = "failed"
DELETED = "deleted"  # a response that cannot be found any more, kept for the tokens of messages that stand on it
FORKED = "fork"  # the finish reason of a message that is the beginning of another


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one response. The prompt counts once, however many candidates share it."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int = 0


class ToolCall(msgspec.Struct, frozen=True):
    """A function the model asked for. `arguments` is the JSON text it wrote, valid or not."""

    call_id: str
    name: str
    arguments: str


class ReplyParts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a message is beside its text.

    `reasoning` and `tool_calls` were parsed out of what the model wrote, which is `raw` in full ("": it is the text
    alone). `call_id`: the call that a message of role "tool" answers.
    """

    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    raw: str = ""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Item:
    """One message. `token_ids` are a reply's own tokens without the one that ended it; input items have none."""

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
    """One response: which reply its prompt extends token by token (None: rendered afresh), and what it added.

    `parent_id`: what its outputs hang under ("": they are roots). `prompt_ids` are empty where the exact prompt is not
    known any more. `echo`: what the response object repeats of the request and nothing else keeps (metadata,
    temperature, tools, ...).
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
    """The head of a tree. `owner` is the tenant, never shown on the wire.

    `rev` grows by one with every change. `updated_at`, by which lists are sorted, is when messages or a response came
    last: who renames, marks or prunes an old conversation does not find it among the newest.
    """

    id: str
    owner: str
    created_at: float
    updated_at: float
    title: str = ""
    active_leaf: str | None = None
    rev: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)


def grown(head: Conversation, active_leaf: str | None = None, title: str | None = None) -> Conversation:
    """What becomes of a head when messages or a response are added. A `title` is for one that has none."""
    return replace(
        head,
        title=head.title or title or "",
        active_leaf=active_leaf if active_leaf is not None else head.active_leaf,
        rev=head.rev + 1,
        updated_at=max(time.time(), head.updated_at),
    )


def revised(
    head: Conversation,
    *,
    title: str | None = None,
    active_leaf: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Conversation:
    """What becomes of a head when what is given is set."""
    return replace(
        head,
        title=title if title is not None else head.title,
        active_leaf=active_leaf if active_leaf is not None else head.active_leaf,
        metadata=metadata if metadata is not None else head.metadata,
        rev=head.rev + 1,
    )


def main_output(outputs: Sequence[Item], status: str) -> Item:
    """The candidate with which a response goes on: the first, or the first that was not dropped."""
    kept = [item for item in outputs if item.finish_reason != FINISH_CANCELLED]
    return kept[0] if kept and status != CANCELLED else outputs[0]


class ConversationTree:
    """A loaded conversation, read-only."""

    def __init__(self, conversation: Conversation, items: Iterable[Item], turns: Iterable[Turn]) -> None:
        self.conversation = conversation
        self.items: dict[str, Item] = {item.id: item for item in items}
        self.turns: dict[str, Turn] = {turn.id: turn for turn in turns}

    def path(self, item_id: str | None) -> tuple[Item, ...]:
        """Items from the root to `item_id`. Raises: KeyError for an unknown id."""
        path: list[Item] = []
        while item_id is not None:
            item = self.items[item_id]
            path.append(item)
            item_id = item.parent_id
        return tuple(reversed(path))

    def children(self, item_id: str | None) -> tuple[Item, ...]:
        """Items under `item_id` (None: the roots), oldest first."""
        return tuple(item for item in self.items.values() if item.parent_id == item_id)

    def outputs(self, response_id: str) -> tuple[Item, ...]:
        """The candidates of a response, by index; not what was forked off them."""
        turn = self.turns[response_id]
        found = (item for item in self.items.values() if self.is_made_by(item, turn))
        return tuple(sorted((item for item in found if item.finish_reason != FORKED), key=lambda item: item.index))

    def inputs(self, response_id: str) -> tuple[Item, ...]:
        """The messages that came with the request, in order; an assistant's among them is not an output."""
        turn = self.turns[response_id]
        found = (item for item in self.items.values() if item.response_id == response_id)
        return tuple(item for item in found if not self.is_made_by(item, turn))

    def is_made_by(self, item: Item, turn: Turn) -> bool:
        """Whether the response generated `item`; beginnings of its replies that forks left behind count."""
        return item.response_id == turn.id and item.role == "assistant" and (item.parent_id or "") == turn.parent_id

    def turn_of(self, item: Item) -> Turn | None:
        """The response that produced `item`, or None when it came from a client."""
        if item.role != "assistant" or item.response_id is None:
            return None
        turn = self.turns.get(item.response_id)
        return turn if turn is not None and self.is_made_by(item, turn) else None

    def sequence(self, reply: Item) -> tuple[int, ...]:
        """Every token up to and including `reply`: exactly what its pages hold. Empty where they are not known."""
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
