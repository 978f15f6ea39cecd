"""Stored turns: assemble a turn's prompt, open it, settle it.

A turn is planned without writing, submitted, and only then opened: a request the engine refuses leaves no trace.

Items as they are made: of what a client wrote, and of what a model said.

Messages that clients write into a conversation without asking for an answer.

What conversations are in tokens, along their active paths: so that the engine can be asked what of them it has.

A list of conversations asks again and again, and most of them stand still. So what was worked out is kept until the
conversation changes (`rev`), the latest MAX_KEPT_BYTES of it.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from chatcache.conversations.fork_points import (
    ROOT,
    ContinuationPoint,
    ContinuationResolver,
    ReplyPrefix,
    TurnRequest,
    require_generated,
)
from chatcache.conversations.offsets import Span, token_char_offsets
from chatcache.conversations.prompt import (
    Known,
    Message,
    Prompt,
    PromptLimits,
    SharedSystemPrompts,
    assemble,
    functions_from_echo,
    link_tool_results,
    message_from_item,
    parts_from_message,
    reply_key,
    template_variables,
    tool_calls_of,
)
from chatcache.conversations.replies.events import ReplyDone
from chatcache.conversations.store import Claim, ConversationStore, StaleRevisionError
from chatcache.conversations.token_memo import TokenMemo
from chatcache.conversations.tree import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Conversation,
    ConversationTree,
    Item,
    Turn,
    Usage,
    main_output,
    new_id,
)
from chatcache.errors import InvalidRequestError
from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.events import FINISH_STOP
from chatcache.types.stats import PackedPrompt

_TITLE_CHARS = 60


def output_item(turn: Turn, item_id: str, done: ReplyDone, created_at: float) -> Item:
    """The stored form of a finished candidate."""
    status = COMPLETED if done.finish_reason == FINISH_STOP else INCOMPLETE
    return Item(
        id=item_id,
        parent_id=turn.parent_id,
        role="assistant",
        text=done.text,
        token_ids=done.stored_ids,
        response_id=turn.id,
        index=done.index,
        status=status,
        finish_reason=done.finish_reason,
        created_at=created_at,
        parts=done.parts,
    )


def input_items(messages: Sequence[Message], parent_id: str | None, now: float) -> tuple[Item, ...]:
    """Messages that a client wrote as items, each under the one before it."""
    items: list[Item] = []
    for message in messages:
        parts = parts_from_message(message)
        item = Item(new_id("msg"), parent_id, message["role"], message["content"], created_at=now, parts=parts)
        items.append(item)
        parent_id = item.id
    return tuple(items)


def title_of(messages: Sequence[Message]) -> str | None:
    """The first line a user wrote, cut at a word."""
    for message in messages:
        line = message["content"].strip().split("\n", 1)[0].strip()
        if message["role"] == "user" and line:
            return line if len(line) <= _TITLE_CHARS else line[:_TITLE_CHARS].rsplit(" ", 1)[0] + "…"
    return None


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A turn with its ids chosen and its prompt assembled; nothing is written yet.

    `inputs` are the new items; outputs will hang under `turn.parent_id`. `conversation` is None when a new one is due,
    which will then have the id `conversation_id`. `cut` is the new message that a fork leaves behind for its inputs to
    stand on; `prefix` is the reply that goes on, where there are no inputs.
    """

    request: TurnRequest
    turn: Turn
    messages: tuple[Message, ...]
    prompt: Prompt
    inputs: tuple[Item, ...]
    conversation: Conversation | None
    conversation_id: str
    cut_item: Item | None = None
    prefix: ReplyPrefix | None = None


class TurnService:
    """Turns over a store."""

    def __init__(
        self,
        store: ConversationStore,
        tokenizer: Tokenizer,
        shared_prompts: SharedSystemPrompts | None = None,
        reply_format: ReplyFormat | None = None,
        token_memo: TokenMemo | None = None,
        limits: PromptLimits | None = None,
    ) -> None:
        self.store = store
        self._limits = limits
        self._tokenizer = tokenizer
        self._resolver = ContinuationResolver(
            store, tokenizer, reply_format if reply_format is not None else ReplyFormat()
        )
        self._token_memo = token_memo if token_memo is not None else TokenMemo()
        self._shared_prompts = shared_prompts if shared_prompts is not None else SharedSystemPrompts()

    async def plan(self, request: TurnRequest) -> PlannedTurn:
        """Raises: NotFoundError for ids the owner does not have, InvalidRequestError for a turn that says nothing."""
        place = await self._resolver.resolve(request)
        if place.prefix is not None and not request.input:
            return await self._plan_continuation(request, place, place.prefix)
        stump = place.prefix.to_item() if place.prefix is not None else None
        if stump is not None:
            place = replace(place, path=(*place.path, stump))
        if not request.input and (not place.path or place.path[-1].role == "assistant"):
            raise InvalidRequestError("input is empty: only a user message can be answered again", param="input")
        messages = _messages(request, place)
        prompt = await asyncio.to_thread(self._assemble, request, place, messages)
        now = time.time()
        inputs = input_items(request.input, place.path[-1].id if place.path else None, now)
        base, added = _base(place, prompt, offset=request.instructions is not None)
        turn = Turn(
            id=new_id("resp"),
            parent_id=(inputs or place.path)[-1].id,
            model=request.model,
            created_at=now,
            base_item_id=base,
            prompt_ids=added,
            instructions=request.instructions,
            previous_response_id=request.previous_response_id,
        )
        inputs = tuple(replace(item, response_id=turn.id) for item in inputs)
        conversation = place.tree.conversation if place.tree else None
        return PlannedTurn(
            request,
            turn,
            messages,
            prompt,
            inputs,
            conversation,
            conversation.id if conversation else new_id("conv"),
            stump,
        )

    async def _plan_continuation(
        self, request: TurnRequest, place: ContinuationPoint, start: ReplyPrefix
    ) -> PlannedTurn:
        """Plan one more candidate beside a reply, with the same beginning."""
        origin = start.turn
        if request.instructions not in (None, origin.instructions):
            raise InvalidRequestError(
                "a reply goes on under its own instructions: leave them out", param="instructions"
            )
        if place.tree is None:
            raise InvalidRequestError("only a stored reply can go on", param="fork_at")
        if request.functions and not _has_tools_of(origin, request):
            raise InvalidRequestError("a reply goes on with its own tools: leave them out", param="tools")
        request = replace(
            request, instructions=origin.instructions, functions=functions_from_echo(origin.echo.get("tools"))
        )
        messages, prompt = await self._prompt_of_ids(request, place, (*start.prompt, *start.ids))
        turn = replace(
            origin,
            id=new_id("resp"),
            model=request.model,
            created_at=time.time(),
            previous_response_id=request.previous_response_id,
            status=IN_PROGRESS,
            usage=None,
        )
        conversation = place.tree.conversation
        return PlannedTurn(request, turn, messages, prompt, (), conversation, conversation.id, prefix=start)

    async def prompt_up_to(self, tree: ConversationTree, item: Item, num_tokens: int) -> Prompt:
        """The prompt that ends with the first `num_tokens` tokens of a stored reply, to the token.

        Raises: InvalidRequestError for a message that has none.
        """
        turn, prompt = require_generated(tree, item, "item_id")
        functions = functions_from_echo(turn.echo.get("tools"))
        request = TurnRequest(tree.conversation.owner, turn.model, instructions=turn.instructions, functions=functions)
        ids = (*prompt, *item.token_ids[:num_tokens])
        return (await self._prompt_of_ids(request, ContinuationPoint(tree, tree.path(item.parent_id)), ids))[1]

    async def assemble_prompt(self, request: TurnRequest, place: ContinuationPoint) -> Prompt:
        """The prompt of a place as it would be rendered now. Raises: InvalidRequestError."""
        return await asyncio.to_thread(self._assemble, request, place, _messages(request, place))

    async def token_offsets(self, tree: ConversationTree, item: Item) -> list[Span]:
        """What each token of a stored reply shows. Raises: InvalidRequestError for a message that has none."""
        _, prompt = require_generated(tree, item, "item_id")
        return await asyncio.to_thread(token_char_offsets, self._resolver.reply_context(tree, item), prompt, item)

    async def _prompt_of_ids(
        self, request: TurnRequest, place: ContinuationPoint, ids: tuple[int, ...]
    ) -> tuple[tuple[Message, ...], Prompt]:
        """The messages of a prompt that is tokens already, and the prompt with its head as text."""
        messages = _messages(request, place)
        head = await asyncio.to_thread(self._tokenizer.render, messages, **template_variables(request.functions))
        prompt = Prompt(head, ids, num_reused=len(ids))
        num_public = self._shared_prompts.count_shared_tokens(self._tokenizer, messages, prompt)
        return messages, replace(prompt, num_public_tokens=num_public)

    async def open(self, planned: PlannedTurn, claim: Claim | None = None) -> Conversation | None:
        """Store the input and that an answer is under way. None when the turn is not to be stored.

        Raises: StaleRevisionError where the request expects another revision; NotFoundError for what was deleted
        meanwhile;
        IdempotencyConflictError.
        """
        request = planned.request
        if not request.store:
            return None
        leaf, title = planned.turn.parent_id, title_of(request.input)
        items = planned.inputs if planned.cut_item is None else (planned.cut_item, *planned.inputs)
        if planned.conversation is not None:
            return await self.store.append(
                request.owner,
                planned.conversation.id,
                items,
                planned.turn,
                active_leaf=leaf,
                title=title,
                expected_rev=request.rev,
                claim=claim,
            )
        now = planned.turn.created_at
        conversation = Conversation(
            planned.conversation_id, request.owner, now, now, title or "", active_leaf=leaf, rev=1
        )
        await self.store.create(conversation, items, planned.turn, claim=claim)
        return conversation

    async def complete(
        self,
        conversation: Conversation,
        planned: PlannedTurn,
        outputs: Sequence[Item],
        status: str,
        usage: Usage | None,
    ) -> Conversation:
        """Store how the turn ended. The active leaf stays where it is if somebody has gone on elsewhere meanwhile."""
        turn = replace(planned.turn, status=status, usage=usage)
        owner, conversation_id = conversation.owner, conversation.id
        while True:
            present = await self.store.get(owner, conversation_id)
            if not outputs or present.active_leaf != turn.parent_id:
                return await self.store.append(owner, conversation_id, outputs, turn)
            try:
                return await self.store.append(
                    owner,
                    conversation_id,
                    outputs,
                    turn,
                    active_leaf=main_output(outputs, status).id,
                    expected_rev=present.rev,
                )
            except StaleRevisionError:  # somebody changed it in between, perhaps the leaf
                continue

    async def retry_complete(
        self,
        conversation: Conversation,
        planned: PlannedTurn,
        outputs: Sequence[Item],
        status: str,
        usage: Usage | None,
    ) -> Conversation:
        """`settle`, after a try of which nobody knows whether it came through."""
        tree = await self.store.load(conversation.owner, conversation.id)
        present = tree.turns.get(planned.turn.id)
        if present is not None and present.status == status and all(item.id in tree.items for item in outputs):
            return tree.conversation
        return await self.complete(conversation, planned, outputs, status, usage)

    def _assemble(self, request: TurnRequest, place: ContinuationPoint, messages: Sequence[Message]) -> Prompt:
        offset = len(messages) - len(place.path) - len(request.input)

        def known(index: int, head: str, message: Message) -> Known | None:
            at = index - offset
            stored = _stored(place.tree, place.path[at], request) if place.tree and 0 <= at < len(place.path) else None
            if stored is not None:
                return stored
            return self._token_memo.recall(
                request.namespace, head, reply_key(message["content"], tool_calls_of(message))
            )

        prompt = assemble(self._tokenizer, messages, known, template_variables(request.functions), self._limits)
        num_public = self._shared_prompts.count_shared_tokens(self._tokenizer, messages, prompt)
        return replace(prompt, num_public_tokens=num_public)


def _messages(request: TurnRequest, place: ContinuationPoint) -> tuple[Message, ...]:
    """Instructions, history, input. Raises: InvalidRequestError for the output of a call that was not made."""
    system = () if request.instructions is None else (Message(role="system", content=request.instructions),)
    old = (*system, *(message_from_item(item) for item in place.path))
    return tuple(link_tool_results((*old, *request.input), "input", num_old=len(old)))


def _stored(tree: ConversationTree, item: Item, request: TurnRequest) -> Known | None:
    """A reply of the tree, where its ids are of the prompt that the request would give it now."""
    turn = tree.turn_of(item)
    # The ids are of the prompt as it was: other instructions or tools then mean another prompt now.
    if turn is None or turn.instructions != request.instructions or not _has_tools_of(turn, request):
        return None
    ids = tree.token_sequence(item)
    return Known(item.parts.raw or item.text, ids) if ids else None


def _base(place: ContinuationPoint, prompt: Prompt, *, offset: int) -> tuple[str | None, tuple[int, ...]]:
    """The stored reply that a prompt extends, and the ids it adds; all of them where that reply is not stored."""
    if prompt.base_message is None or prompt.base_message - offset >= len(place.path):
        return None, prompt.token_ids
    item = place.path[prompt.base_message - offset]
    ids = place.tree.token_sequence(item) if place.tree is not None else ()
    if not ids or ids != prompt.token_ids[: prompt.num_reused]:
        return None, prompt.token_ids
    return item.id, prompt.token_ids[prompt.num_reused :]


def _has_tools_of(turn: Turn, request: TurnRequest) -> bool:
    """Whether the request has the same functions as the one that `turn` answered."""
    return functions_from_echo(turn.echo.get("tools")) == request.functions


async def save_new_conversation(
    store: ConversationStore,
    owner: str,
    messages: Sequence[Message] = (),
    metadata: Mapping[str, str] | None = None,
    title: str | None = None,
    claim: Callable[[str], Claim] | None = None,
) -> Conversation:
    """Store a new conversation, perhaps with its first messages, named after what a user says in them.

    `claim` makes an idempotency key's of the id it will have. Raises: IdempotencyConflictError.
    """
    now = time.time()
    items = input_items(messages, None, now)
    conversation = Conversation(
        id=new_id("conv"),
        owner=owner,
        created_at=now,
        updated_at=now,
        title=title or title_of(messages) or "",
        active_leaf=items[-1].id if items else None,
        metadata=metadata or {},
    )
    await store.create(conversation, items, claim=claim(conversation.id) if claim is not None else None)
    return conversation


async def add_messages(
    store: ConversationStore,
    owner: str,
    conversation_id: str,
    messages: Sequence[Message],
    parent_id: str | None = None,
    *,
    expected_rev: int | None = None,
) -> tuple[Conversation, tuple[Item, ...]]:
    """Append messages under `parent_id` (None: the active leaf; "root": a branch of its own), which then are active.

    Raises: NotFoundError, StaleRevisionError.
    """
    if parent_id is None:
        parent_id = (await store.get(owner, conversation_id)).active_leaf
    items = input_items(messages, None if parent_id == ROOT else parent_id, time.time())
    conversation = await store.append(
        owner, conversation_id, items, active_leaf=items[-1].id, title=title_of(messages), expected_rev=expected_rev
    )
    return conversation, items


MAX_CACHED_BYTES = 32 * 1024 * 1024

_NOTHING = Prompt("", ())


class ConversationPrompts:
    """Active paths as prompts. Belongs to one event loop."""

    def __init__(self, conversations: TurnService, max_kept_bytes: int = MAX_CACHED_BYTES) -> None:
        self._turns = conversations
        self._max_cached_bytes = max_kept_bytes
        self._cached: OrderedDict[str, tuple[int, PackedPrompt]] = OrderedDict()  # (rev, prompt), latest asked last
        self._cached_bytes = 0

    async def get(self, store: ConversationStore, owner: str, conversation_id: str) -> PackedPrompt:
        """Every token up to the active leaf; behind a user's message, what a reply to it would be given.

        Nothing where the template refuses the messages. Raises: NotFoundError for what the owner does not have.
        """
        head = await store.get(owner, conversation_id)
        rev, kept = self._cached.get(conversation_id, (-1, None))
        if kept is not None and rev == head.rev:
            self._cached.move_to_end(conversation_id)
            return kept
        tree = await store.load(owner, conversation_id)
        prompt = await active_path_prompt(self._turns, tree)
        packed = PackedPrompt(_packed(prompt.token_ids), prompt.num_public_tokens)
        self._store(conversation_id, tree.conversation.rev, packed)
        return packed

    def _store(self, conversation_id: str, rev: int, prompt: PackedPrompt) -> None:
        self._evict(conversation_id)
        self._cached[conversation_id] = rev, prompt
        self._cached_bytes += len(prompt.tokens)
        while self._cached_bytes > self._max_cached_bytes:
            self._evict(next(iter(self._cached)))

    def _evict(self, conversation_id: str) -> None:
        if conversation_id in self._cached:
            self._cached_bytes -= len(self._cached.pop(conversation_id)[1].tokens)


async def active_path_prompt(conversations: TurnService, tree: ConversationTree) -> Prompt:
    """The prompt that a conversation's active path is: to the token where it is known, else as it would be rendered."""
    leaf = tree.conversation.active_leaf
    path = tree.path(leaf)
    if not path:
        return _NOTHING
    try:
        if tree.turn_of(path[-1]) is not None and tree.token_sequence(path[-1]):
            return await conversations.prompt_up_to(tree, path[-1], len(path[-1].token_ids))
        turn = _latest_turn(tree, path)
        request = TurnRequest(
            tree.conversation.owner,
            model="",
            instructions=turn.instructions if turn is not None else None,
            functions=functions_from_echo(turn.echo.get("tools")) if turn is not None else (),
        )
        return await conversations.assemble_prompt(request, ContinuationPoint(tree, path))
    except InvalidRequestError:  # there are messages that no template takes: two of one role, calls without an answer
        return _NOTHING


def _latest_turn(tree: ConversationTree, path: tuple[Item, ...]) -> Turn | None:
    """The one that is answering the leaf, or the last one on the path."""
    here = [turn for turn in tree.turns.values() if turn.parent_id == path[-1].id]
    if here:
        return max(here, key=lambda turn: turn.created_at)
    before = (tree.turn_of(item) for item in reversed(path))
    return next((turn for turn in before if turn is not None), None)


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)
