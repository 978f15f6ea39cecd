"""Messages that clients write into a conversation without asking for an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from chatcache.chat.ids import new_id
from chatcache.chat.items import input_items, title_of
from chatcache.chat.places import ROOT
from chatcache.chat.prompt import Message
from chatcache.chat.store import Claim, ConversationStore
from chatcache.chat.tree import Conversation, Item


async def create(
    store: ConversationStore,
    owner: str,
    messages: Sequence[Message] = (),
    metadata: Mapping[str, str] | None = None,
    title: str | None = None,
    claim: Callable[[str], Claim] | None = None,
) -> Conversation:
    """Store a new conversation, perhaps with its first messages, named after what a user says in them.

    `claim` makes an idempotency key's of the id it will have. Raises: KeyTaken.
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


async def add(
    store: ConversationStore,
    owner: str,
    conversation_id: str,
    messages: Sequence[Message],
    parent_id: str | None = None,
    *,
    expect: int | None = None,
) -> tuple[Conversation, tuple[Item, ...]]:
    """Append messages under `parent_id` (None: the active leaf; "root": a branch of its own), which then are active.

    Raises: NotFound, StaleRevision.
    """
    if parent_id is None:
        parent_id = (await store.get(owner, conversation_id)).active_leaf
    items = input_items(messages, None if parent_id == ROOT else parent_id, time.time())
    conversation = await store.append(
        owner, conversation_id, items, active_leaf=items[-1].id, title=title_of(messages), expect=expect
    )
    return conversation, items
