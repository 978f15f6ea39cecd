"""Stored turns: plan a turn, store its input, and store its result.

A turn is planned without writing, submitted to the engine, and only then opened in the store, so that a request that
the engine rejects leaves no trace. `ConversationPrompts` caches the tokens of whole conversations for cache statistics.

`Alternatives` reports the model's distribution at one position of a stored reply: one token is generated after prompt +
reply[:index], which the cache holds, with a logit bias that forces reply[index]; the raw log-probabilities of that
token and of the likeliest ones are reported.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatcache.conversations.file_blocks import split_files
from chatcache.conversations.fork_points import (
    ROOT,
    ContinuationPoint,
    ContinuationResolver,
    ReplyPrefix,
    TurnRequest,
    build_prefix,
    require_generated,
)
from chatcache.conversations.offsets import Span, token_char_offsets
from chatcache.conversations.prompt import (
    Known,
    Message,
    Prompt,
    PromptLimits,
    SharedSystemPrompts,
    argument_schemas,
    assemble,
    functions_from_echo,
    link_tool_results,
    message_from_item,
    parts_from_message,
    recall_key,
    reply_key,
    template_variables,
    tool_calls_of,
)
from chatcache.conversations.replies.events import ReplyDone
from chatcache.conversations.replies.parser import ReplyContext
from chatcache.conversations.store import MAX_ITEMS, Claim, ConversationStore, StaleRevisionError
from chatcache.conversations.token_memo import TokenMemo
from chatcache.conversations.tree import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    MAX_EDIT_ATTEMPTS,
    Conversation,
    ConversationTree,
    Item,
    Turn,
    Usage,
    changes_too_often_error,
    main_output,
    new_id,
)
from chatcache.errors import InvalidRequestError
from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.thinking import KEEPS, KWARGS, ThinkingControls, check_template_kwargs
from chatcache.tokenizer.tokenizer import Tokenizer
from chatcache.types.events import FINISH_STOP
from chatcache.types.stats import PackedPrompt

PRESERVE_THINKING = "preserve_thinking"  # also the key of the setting in a conversation's metadata
_TITLE_CHARS = 60
MAX_CACHED_BYTES = 32 * 1024 * 1024
_EMPTY_PROMPT = Prompt("", ())


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A turn with its ids and its prompt, before anything is written.

    `inputs` are the new items; outputs become children of `turn.parent_id`. `conversation` is None for a new
    conversation, which then gets the id `conversation_id`. `cut_item` is the truncated reply that a fork stores as the
    parent of its inputs; `prefix` is the beginning of the reply, if the turn continues one or the client wrote it.
    `depends_on`: the stored messages of the prompt, and the response that `cut_item` belongs to.
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
    depends_on: tuple[str, ...] = ()


class TurnService:
    """Plans turns over a store and stores their inputs and results."""

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
        reply_format = reply_format if reply_format is not None else ReplyFormat()
        self._reply_format = reply_format
        self._thinking = ThinkingControls(tokenizer, reply_format)
        self._resolver = ContinuationResolver(store, tokenizer, reply_format)
        self._token_memo = token_memo if token_memo is not None else TokenMemo()
        self._shared_prompts = shared_prompts if shared_prompts is not None else SharedSystemPrompts()

    async def plan(self, request: TurnRequest) -> PlannedTurn:
        """Assemble the prompt of a turn and choose its ids.

        Raises: NotFoundError for ids that the owner does not have, InvalidRequestError for a turn without input.
        """
        point = await self._resolver.resolve(request)
        if point.prefix is not None and not request.input:
            if request.reply_start:
                raise InvalidRequestError("fork_at continues a reply by its tokens, not by a text", param="fork_at")
            return await self._plan_continuation(request, point, point.prefix)
        depends_on = tuple(item.id for item in point.path)
        cut_item: Item | None = None
        if point.prefix is not None:
            cut_item = point.prefix.to_item()
            depends_on = (*depends_on, point.prefix.turn.id)
            point = replace(point, path=(*point.path, cut_item))
        if not request.input and not point.path:
            raise InvalidRequestError("input is required", param="input", code="missing_required_parameter")
        if not request.input and point.path[-1].role == "assistant":
            raise InvalidRequestError("input is empty: only a user message can be answered again", param="input")
        request = self._with_setting(request, point.tree.conversation if point.tree is not None else None)
        messages = _messages(request, point)
        prompt = await asyncio.to_thread(self._assemble, request, point, messages)
        now = time.time()
        inputs = input_items(request.input, point.path[-1].id if point.path else None, now)
        base, added = _base(point, prompt, offset=request.instructions is not None)
        turn = Turn(
            id=new_id("resp"),
            parent_id=(inputs or point.path)[-1].id,
            model=request.model,
            created_at=now,
            base_item_id=base,
            prompt_ids=added,
            instructions=request.instructions,
            previous_response_id=request.previous_response_id,
        )
        inputs = tuple(replace(item, response_id=turn.id) for item in inputs)
        conversation = point.tree.conversation if point.tree else None
        prefix: ReplyPrefix | None = None
        if request.reply_start:
            prefix = await asyncio.to_thread(self._begin_reply, request, turn, prompt)
            prompt = replace(prompt, token_ids=(*prompt.token_ids, *prefix.ids))
        return PlannedTurn(
            request,
            turn,
            messages,
            prompt,
            inputs,
            conversation,
            conversation.id if conversation else new_id("conv"),
            cut_item,
            prefix,
            depends_on,
        )

    def _begin_reply(self, request: TurnRequest, turn: Turn, prompt: Prompt) -> ReplyPrefix:
        """Return the text with which the reply to `prompt` begins as the prefix of a reply."""
        text = self._tokenizer.escape_reply(self._thinking.begin_reply(request.reply_start, "", prompt.text))
        ids = tuple(self._tokenizer.encode_after(prompt.text, text))
        context = ReplyContext(self._tokenizer, self._reply_format, argument_schemas(request.functions) or None)
        return build_prefix(context, turn, 0, prompt.token_ids, ids, (), skips=True, is_exact=True)

    async def _plan_continuation(
        self, request: TurnRequest, point: ContinuationPoint, prefix: ReplyPrefix
    ) -> PlannedTurn:
        """Plan one more candidate of a reply that begins with the same tokens."""
        origin = prefix.turn
        if request.instructions not in (None, origin.instructions):
            raise InvalidRequestError(
                "a continued reply keeps its own instructions: leave them out", param="instructions"
            )
        if point.tree is None:
            raise InvalidRequestError("only a stored reply can be continued", param="fork_at")
        if request.functions and not _has_tools_of(origin, request):
            raise InvalidRequestError("a continued reply keeps its own tools: leave them out", param="tools")
        request = replace(request, **setup_of(origin))
        messages, prompt = await self._prompt_of_ids(request, point, (*prefix.prompt, *prefix.ids))
        turn = replace(
            origin,
            id=new_id("resp"),
            model=request.model,
            created_at=time.time(),
            previous_response_id=request.previous_response_id,
            status=IN_PROGRESS,
            usage=None,
        )
        conversation = point.tree.conversation
        depends_on = tuple(item.id for item in point.path)
        return PlannedTurn(
            request, turn, messages, prompt, (), conversation, conversation.id, prefix=prefix, depends_on=depends_on
        )

    async def prompt_up_to(self, tree: ConversationTree, item: Item, num_tokens: int) -> Prompt:
        """Return the exact prompt that ends with the first `num_tokens` tokens of a stored reply.

        Raises: InvalidRequestError for a message whose tokens are not stored.
        """
        turn, prompt = require_generated(tree, item, "item_id")
        request = TurnRequest(tree.conversation.owner, turn.model, **setup_of(turn))
        ids = (*prompt, *item.token_ids[:num_tokens])
        return (await self._prompt_of_ids(request, ContinuationPoint(tree, tree.path(item.parent_id)), ids))[1]

    async def assemble_prompt(self, request: TurnRequest, point: ContinuationPoint) -> Prompt:
        """Return the prompt of a turn at a position as it would be rendered now.

        Raises: InvalidRequestError.
        """
        return await asyncio.to_thread(self._assemble, request, point, _messages(request, point))

    async def token_offsets(self, tree: ConversationTree, item: Item) -> list[Span]:
        """Return which characters each token of a stored reply shows.

        Raises: InvalidRequestError for a message whose tokens are not stored.
        """
        _, prompt = require_generated(tree, item, "item_id")
        return await asyncio.to_thread(token_char_offsets, self._resolver.reply_context(tree, item), prompt, item)

    async def _prompt_of_ids(
        self, request: TurnRequest, point: ContinuationPoint, ids: tuple[int, ...]
    ) -> tuple[tuple[Message, ...], Prompt]:
        """Return the messages of a prompt whose token ids are given, and the prompt."""
        messages = _messages(request, point)
        variables = template_variables(request.functions, request.template_kwargs)
        head = await asyncio.to_thread(self._tokenizer.render, messages, **variables)
        prompt = Prompt(head, ids, num_reused=len(ids))
        num_public = self._shared_prompts.count_shared_tokens(self._tokenizer, messages, prompt)
        return messages, replace(prompt, num_public_tokens=num_public)

    async def open(self, planned: PlannedTurn, claim: Claim | None = None) -> Conversation | None:
        """Store the input and a response in progress. Return None when the turn is not to be stored.

        Raises: StaleRevisionError where the request expects another revision; ConversationBusyError if messages of the
        prompt were deleted after planning; NotFoundError if the conversation was; IdempotencyConflictError.
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
                max_items=MAX_ITEMS,
                depends_on=planned.depends_on,
            )
        now = planned.turn.created_at
        conversation = Conversation(
            planned.conversation_id,
            request.owner,
            now,
            now,
            title or "",
            active_leaf=leaf,
            metadata={PRESERVE_THINKING: "true"} if request.preserve_thinking else {},
            rev=1,
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
        """Store the result of a turn.

        The active leaf is not moved if another client moved it after the turn began.
        """
        turn = replace(planned.turn, status=status, usage=usage)
        owner, conversation_id = conversation.owner, conversation.id
        while True:
            current = await self.store.get(owner, conversation_id)
            if not outputs or current.active_leaf != turn.parent_id:
                return await self.store.append(owner, conversation_id, outputs, turn)
            try:
                return await self.store.append(
                    owner,
                    conversation_id,
                    outputs,
                    turn,
                    active_leaf=main_output(outputs, status).id,
                    expected_rev=current.rev,
                )
            except StaleRevisionError:  # another writer changed it in between, perhaps the leaf
                continue

    async def retry_complete(
        self,
        conversation: Conversation,
        planned: PlannedTurn,
        outputs: Sequence[Item],
        status: str,
        usage: Usage | None,
    ) -> Conversation:
        """Store the result of a turn, unless an earlier attempt with unknown outcome has stored it."""
        tree = await self.store.load_path(conversation.owner, conversation.id, planned.turn.id, limit=0)
        current = tree.turns.get(planned.turn.id)
        if current is not None and current.status == status and all(item.id in tree.items for item in outputs):
            return tree.conversation
        return await self.complete(conversation, planned, outputs, status, usage)

    def _with_setting(self, request: TurnRequest, conversation: Conversation | None) -> TurnRequest:
        """Resolve whether the request keeps the reasoning of earlier replies, by the conversation's setting."""
        keeps = request.preserve_thinking
        if keeps is None:
            keeps = conversation is not None and conversation.metadata.get(PRESERVE_THINKING) == "true"
        kwargs = {**request.template_kwargs, **self._thinking.keeps} if keeps else request.template_kwargs
        return replace(request, preserve_thinking=keeps, template_kwargs=kwargs)

    def _assemble(self, request: TurnRequest, point: ContinuationPoint, messages: Sequence[Message]) -> Prompt:
        offset = len(messages) - len(point.path) - len(request.input)
        kept_until = self._thinking.closing_marker if request.preserve_thinking else ""

        def known(index: int, head: str, message: Message) -> Known | None:
            position = index - offset
            is_in_path = point.tree is not None and 0 <= position < len(point.path)
            stored = _stored(point.tree, point.path[position], request) if is_in_path and point.tree else None
            if stored is not None:
                return stored
            head = recall_key(head, keeps_reasoning=bool(kept_until))
            return self._token_memo.recall(
                request.namespace, head, reply_key(message["content"], tool_calls_of(message))
            )

        variables = template_variables(request.functions, request.template_kwargs)
        prompt = assemble(self._tokenizer, messages, known, variables, self._limits, kept_until)
        num_public = self._shared_prompts.count_shared_tokens(self._tokenizer, messages, prompt)
        return replace(prompt, num_public_tokens=num_public)


def output_item(turn: Turn, item_id: str, done: ReplyDone, created_at: float) -> Item:
    """Return the stored form of a finished candidate."""
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
    """Return client messages as items, each the child of the one before it."""
    items: list[Item] = []
    for message in messages:
        parts = parts_from_message(message)
        item = Item(new_id("msg"), parent_id, message["role"], message["content"], created_at=now, parts=parts)
        items.append(item)
        parent_id = item.id
    return tuple(items)


def title_of(messages: Sequence[Message]) -> str | None:
    """Return a title: the first line that a user wrote, cut between words; else the names of attached files."""
    for message in messages:
        if message["role"] != "user":
            continue
        names, text = split_files(message["content"])
        if line := text.strip().split("\n", 1)[0].strip() or ", ".join(names):
            return line if len(line) <= _TITLE_CHARS else line[:_TITLE_CHARS].rsplit(" ", 1)[0] + "…"
    return None


def _messages(request: TurnRequest, point: ContinuationPoint) -> tuple[Message, ...]:
    """Return instructions, history and input.

    Raises: InvalidRequestError for the result of a call that was not made.
    """
    system = () if request.instructions is None else (Message(role="system", content=request.instructions),)
    old = (*system, *(message_from_item(item) for item in point.path))
    return tuple(link_tool_results((*old, *request.input), "input", num_old=len(old)))


def _stored(tree: ConversationTree, item: Item, request: TurnRequest) -> Known | None:
    """Return a stored reply if the request would build the same prompt for it now, else None."""
    turn = tree.turn_of(item)
    # The ids belong to the prompt as it was then: other instructions or tools make another prompt now.
    if turn is None or turn.instructions != request.instructions or not _has_tools_of(turn, request):
        return None
    if _kwargs_of(turn, KEEPS) != _without(request.template_kwargs, KEEPS):
        return None
    if turn.echo.get(PRESERVE_THINKING) and not request.preserve_thinking:
        return None
    ids = tree.token_sequence(item)
    return Known(item.parts.raw or item.text, ids) if ids else None


def _base(point: ContinuationPoint, prompt: Prompt, *, offset: int) -> tuple[str | None, tuple[int, ...]]:
    """Return the id of the stored reply that a prompt begins with, and the token ids after it.

    Without such a reply: None and all token ids. `offset`: the number of messages before `point.path` in the prompt.
    """
    if prompt.base_message is None or prompt.base_message - offset >= len(point.path):
        return None, prompt.token_ids
    item = point.path[prompt.base_message - offset]
    ids = point.tree.token_sequence(item) if point.tree is not None else ()
    if not ids or ids != prompt.token_ids[: prompt.num_reused]:
        return None, prompt.token_ids
    return item.id, prompt.token_ids[prompt.num_reused :]


def setup_of(turn: Turn) -> dict[str, Any]:
    """Return the fields of a `TurnRequest` that determine the prompt of a stored turn besides its messages."""
    return {
        "instructions": turn.instructions,
        "functions": functions_from_echo(turn.echo.get("tools")),
        "template_kwargs": _kwargs_of(turn),
        "preserve_thinking": bool(turn.echo.get(PRESERVE_THINKING)),
    }


def _kwargs_of(turn: Turn, left_out: Collection[str] = ()) -> dict[str, Any]:
    kwargs = turn.echo.get(KWARGS)
    if not isinstance(kwargs, dict):
        return {}
    try:
        check_template_kwargs(kwargs, ())  # an imported turn may have any
    except InvalidRequestError:
        return {}
    return _without(kwargs, left_out)


def _without(kwargs: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in left_out}


def _has_tools_of(turn: Turn, request: TurnRequest) -> bool:
    """Check whether the request has the same functions as the one that `turn` answered."""
    return functions_from_echo(turn.echo.get("tools")) == request.functions


async def save_new_conversation(
    store: ConversationStore,
    owner: str,
    messages: Sequence[Message] = (),
    metadata: Mapping[str, str] | None = None,
    title: str | None = None,
    claim: Callable[[str], Claim] | None = None,
) -> Conversation:
    """Store a new conversation, empty or with its first messages.

    The default title is the first user message. `claim` builds an idempotency claim from the conversation's id. Raises:
    IdempotencyConflictError.
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
    """Append messages to a conversation and make the last one the active leaf.

    `parent_id`: the message that they follow (None: the active leaf, which is read again if the conversation changes
    meanwhile; "root": none). Raises: NotFoundError; StaleRevisionError for another revision than `expected_rev`;
    ConversationBusyError.
    """
    for _ in range(MAX_EDIT_ATTEMPTS):
        parent, rev = parent_id, expected_rev
        if parent_id is None:
            head = await store.get(owner, conversation_id)
            parent, rev = head.active_leaf, head.rev if expected_rev is None else expected_rev
        items = input_items(messages, None if parent == ROOT else parent, time.time())
        try:
            conversation = await store.append(
                owner,
                conversation_id,
                items,
                active_leaf=items[-1].id,
                title=title_of(messages),
                expected_rev=rev,
                max_items=MAX_ITEMS,
            )
        except StaleRevisionError:
            if expected_rev is not None:
                raise
        else:
            return conversation, items
    raise changes_too_often_error()


class ConversationPrompts:
    """A bounded cache of the prompts of active paths. Belongs to one event loop.

    Lists of conversations ask for these prompts again and again, so a prompt is kept until the conversation's `rev`
    changes; the least recently used ones are evicted beyond `MAX_CACHED_BYTES`.
    """

    def __init__(self, conversations: TurnService, max_cached_bytes: int = MAX_CACHED_BYTES) -> None:
        self._turns = conversations
        self._max_cached_bytes = max_cached_bytes
        # By conversation id: (rev, prompt), most recently used last.
        self._cached: OrderedDict[str, tuple[int, PackedPrompt]] = OrderedDict()
        self._cached_bytes = 0

    async def get(self, store: ConversationStore, owner: str, conversation_id: str) -> PackedPrompt:
        """Return every token up to the active leaf (a user message: the prompt of a reply to it).

        The prompt is empty where the chat template rejects the messages. Raises: NotFoundError.
        """
        head = await store.get(owner, conversation_id)
        rev, kept = self._cached.get(conversation_id, (-1, None))
        if kept is not None and rev == head.rev:
            self._cached.move_to_end(conversation_id)
            return kept
        tree = await store.load_path(owner, conversation_id)
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
    """Return the prompt of a conversation's active path.

    Stored tokens where known, else as rendered now.
    """
    leaf = tree.conversation.active_leaf
    path = tree.path(leaf)
    if path and not path[-1].token_ids and tree.token_sequence(path[-1]):  # an answer that ended before its first token
        path = path[:-1]
    if not path:
        return _EMPTY_PROMPT
    try:
        if tree.turn_of(path[-1]) is not None and tree.token_sequence(path[-1]):
            return await conversations.prompt_up_to(tree, path[-1], len(path[-1].token_ids))
        turn = _latest_turn(tree, path)
        request = TurnRequest(
            tree.conversation.owner,
            model="",
            **(setup_of(turn) if turn is not None else {}),
        )
        return await conversations.assemble_prompt(request, ContinuationPoint(tree, path))
    except InvalidRequestError:  # a template may reject the messages: two of one role, calls without a result
        return _EMPTY_PROMPT


def _latest_turn(tree: ConversationTree, path: tuple[Item, ...]) -> Turn | None:
    """Return the newest response to the last message of `path`, else the last one on the path."""
    answering = [turn for turn in tree.turns.values() if turn.parent_id == path[-1].id]
    if answering:
        return max(answering, key=lambda turn: turn.created_at)
    before = (tree.turn_of(item) for item in reversed(path))
    return next((turn for turn in before if turn is not None), None)


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)
