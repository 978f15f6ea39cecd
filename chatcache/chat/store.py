"""The storage contract. One test suite runs against every implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from chatcache.chat.removal import TreeEdit
from chatcache.chat.tree import Conversation, ConversationTree, Item, Turn
from chatcache.errors import ChatcacheError


class StaleRevision(ChatcacheError):
    """The conversation changed since the caller read it. Read again, then decide."""

    status = 409
    type = "conflict_error"
    code = "stale_revision"


class StoreUnusable(ChatcacheError):
    """The storage cannot be opened."""

    code = "store_unusable"


class ConversationStore(Protocol):
    """Trees by id, each visible to its owner only. A call that returns has stored what it says, durably.

    `expect` is the `rev` the caller read; None means "whatever it is". Raises: StaleRevision when it differs;
    NotFound for ids that do not exist or belong to somebody else.
    """

    async def create(self, conversation: Conversation, items: Sequence[Item] = (), turn: Turn | None = None) -> None:
        """Store a new conversation together with its first turn."""
        ...

    async def get(self, owner: str, conversation_id: str) -> Conversation: ...

    async def list(self, owner: str, limit: int, after: str | None = None) -> Sequence[Conversation]:
        """Conversations by last change, newest first, following `after`."""
        ...

    async def load(self, owner: str, conversation_id: str) -> ConversationTree: ...

    async def locate(self, owner: str, member_id: str) -> str:
        """The id of the conversation that holds this response or item."""
        ...

    async def append(
        self,
        owner: str,
        conversation_id: str,
        items: Sequence[Item],
        turn: Turn | None = None,
        *,
        active_leaf: str | None = None,
        title: str | None = None,
        expect: int | None = None,
    ) -> Conversation:
        """Add `items` (parents first), insert or replace `turn`, move the active leaf, name it if it has no title."""
        ...

    async def update(
        self,
        owner: str,
        conversation_id: str,
        *,
        title: str | None = None,
        active_leaf: str | None = None,
        metadata: Mapping[str, str] | None = None,
        expect: int | None = None,
    ) -> Conversation: ...

    async def edit(
        self, owner: str, conversation_id: str, edit: TreeEdit, *, expect: int | None = None
    ) -> Conversation:
        """Take messages and responses out and replace others, all or nothing. What a removed one held is gone."""
        ...

    async def delete(self, owner: str, conversation_id: str) -> None: ...

    async def close(self) -> None: ...
