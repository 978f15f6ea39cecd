"""Side tasks: short questions about a conversation, asked at its end and not stored.

    user -- assistant -- user -- assistant          stored; its pages are cached
                                     `-- question -- answer         a fork: computed, read, discarded

A side task costs only the tokens of its own question and of a short answer. The one task is naming a conversation.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from msgspec.structs import replace

from chatcache.auth import namespace_of
from chatcache.conversations.fork_points import TurnRequest
from chatcache.conversations.prompt import Message, argument_schemas
from chatcache.conversations.replies.service import ChatService, Reply
from chatcache.conversations.tree import ConversationTree, Item, new_id
from chatcache.conversations.turns import TurnService, setup_of
from chatcache.errors import InvalidRequestError
from chatcache.types.request import GenerateRequest, SamplingParams

MAX_TITLE_CHARS = 60
MAX_THINKING_TOKENS = 32
MAX_TITLE_WORDS = 10  # a few more than asked for; a longer answer is not a title
_THOUGHTS = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_LABEL = re.compile(r"(?i)^(?:title|titel|titre|título)\s*[:：]\s*")
_LEADING_MARKUP = " *_`#>•"
_TRAILING_MARKUP = " *_`.。:;,"
_PAIRS = frozenset(('""', "''", "“”", "„“", "„”", "«»", "»«", "‘’", "「」", "『』", "《》", "()", "[]"))


@dataclass(frozen=True, slots=True)
class SideTask:
    """A question about a conversation and the maximum length of its answer."""

    name: str
    question: str
    max_tokens: int


TITLE = SideTask(
    name="title",
    question=(
        "Give this conversation a title of at most six words, in the language it is held in. "
        "Answer with the title alone: no quotation marks, no explanation."
    ),
    max_tokens=32,
)


class SideTasks:
    """Runs side tasks over stored conversations."""

    def __init__(self, conversations: TurnService, service: ChatService) -> None:
        self._turns = conversations
        self._service = service

    async def start(self, task: SideTask, tree: ConversationTree, model: str, priority: int) -> Reply:
        """Ask the question at the end of the active branch.

        The reply must be read to its end or closed.
        Raises: InvalidRequestError (code "nothing_said") without a reply on the branch, errors of
        `EngineClient.submit`.
        """
        head = tree.conversation
        last = _last_reply(tree)
        turn = tree.turn_of(last)
        setup = setup_of(turn) if turn is not None else {}
        planned = await self._turns.plan(
            TurnRequest(
                owner=head.owner,
                model=model,
                input=(Message(role="user", content=task.question),),
                conversation_id=head.id,
                previous_item_id=last.id,
                store=False,
                **setup,
            )
        )
        params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens)
        marks = self._service.thinking.marks(planned.prompt.token_ids)
        if marks is not None:  # the template's own switch would make another prompt
            max_tokens = task.max_tokens + MAX_THINKING_TOKENS + len(marks.closing_ids)
            params = replace(
                params, max_tokens=max_tokens, thinking_token_budget=MAX_THINKING_TOKENS, thinking_marks=marks
            )
        request = GenerateRequest(
            request_id=new_id(task.name),
            prompt=planned.prompt.token_ids,
            params=params,
            namespace=namespace_of(head.owner),
            num_public_tokens=planned.prompt.num_public_tokens,
            conversation_id=head.id,
            priority=priority,
        )
        functions = argument_schemas(planned.request.functions) or None
        return await self._service.start(request, planned.prompt.key, functions=functions, owner=head.owner)


def clean_title(text: str) -> str:
    """Return one line without markup, or "" if the answer contains no usable title."""
    for line in _THOUGHTS.sub("", text).split("\n"):
        shown = "".join(_displayed(char) for char in line)
        plain = _without_markup(_LABEL.sub("", _without_markup(" ".join(shown.split()))))
        if any(char.isalnum() for char in plain):
            return _shortened(plain) if len(plain.split()) <= MAX_TITLE_WORDS else ""
    return ""


def _displayed(char: str) -> str:
    """Return a character as it is displayed: control characters become spaces or vanish."""
    if char in "\u200c\u200d":  # joiners: parts of words and of emoji
        return char
    category = unicodedata.category(char)
    return " " if category == "Cc" else "" if category[0] == "C" else char


def _without_markup(text: str) -> str:
    """Remove markup, surrounding quotation marks and a full stop."""
    while True:
        inner = text.lstrip(_LEADING_MARKUP).removeprefix("- ").rstrip(_TRAILING_MARKUP)
        if inner[:1] + inner[-1:] in _PAIRS and len(inner) > 1:
            inner = inner[1:-1]
        if inner == text:
            return text
        text = inner


def _shortened(title: str) -> str:
    """Cut a title to `MAX_TITLE_CHARS`, between words if possible."""
    if len(title) <= MAX_TITLE_CHARS:
        return title
    head = title[: MAX_TITLE_CHARS - 1]
    words, space, _ = head.rpartition(" ")
    return (words if space and len(words) > MAX_TITLE_CHARS // 2 else head).rstrip() + "…"


def _last_reply(tree: ConversationTree) -> Item:
    """Return the last reply of the active branch. Raises: InvalidRequestError."""
    for item in reversed(tree.path(tree.conversation.active_leaf)):
        if item.role == "assistant" and item.text:
            return item
    raise InvalidRequestError("the conversation has no reply yet", param="conversation", code="nothing_said")
