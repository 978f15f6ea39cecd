"""The storage contract. One test suite runs against every implementation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from chatcache.auth import KeyStore
from chatcache.conversations.search import SearchHit, SearchQuery
from chatcache.conversations.tree import Conversation, ConversationTree, Item, MessageDeletion, Turn
from chatcache.errors import ChatcacheError


class StaleRevisionError(ChatcacheError):
    """The conversation changed since the caller read it: `present` is what it is now. Read again, then decide."""

    status = 409
    type = "conflict_error"
    code = "stale_revision"

    def __init__(self, present: Conversation, expected: int) -> None:
        super().__init__(f"conversation {present.id!r} is at rev {present.rev}, not {expected}", param="rev")
        self.current = present


class StoreUnusableError(ChatcacheError):
    """The storage cannot be opened."""

    code = "store_unusable"


class StoreUnavailableError(ChatcacheError):
    """The storage does not answer, or takes nothing, for now. Whether it took what it was just given is not known."""

    status = 503
    code = "store_unavailable"


@dataclass(frozen=True, slots=True)
class Claim:
    """An idempotency key: what came with it (`digest`), and the id of what that made. Kept for `CLAIM_TTL_S`."""

    key: str
    digest: str
    target: str


class IdempotencyConflictError(ChatcacheError):
    """The key was used before: `claim` says for what. Nothing was stored."""

    status = 409
    type = "conflict_error"
    code = "idempotency_key_reuse"

    def __init__(self, claim: Claim) -> None:
        super().__init__(
            "this Idempotency-Key came with another request before: use a new one", param="idempotency_key"
        )
        self.claim = claim


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What a merge did: nothing, if no conversation was created and no message or response added."""

    conversation: Conversation
    is_new: bool
    num_items: int
    num_turns: int


@dataclass(frozen=True, slots=True)
class OwnerAssignment:
    """Conversations that have a new owner, and those that stay because a response is under way in them."""

    num_conversations: int = 0
    num_busy: int = 0


CLAIM_TTL_S = 24 * 3600


def encode_cursor(conversation: Conversation) -> str:
    """A place in the list of conversations that stays where it is when this one changes or goes."""
    return f"{conversation.updated_at!r}~{conversation.id}"


def decode_cursor(text: str) -> tuple[float, str] | None:
    """`updated_at` and id of a cursor, or None for what is none (an id, say)."""
    time, mark, conversation_id = text.partition("~")
    try:
        updated_at = float(time)
    except ValueError:
        return None
    return (updated_at, conversation_id) if mark and math.isfinite(updated_at) else None


class ConversationStore(Protocol):
    """Trees by id, each visible to its owner only. A call that returns has stored what it says, durably.

    `expected_rev` is the `rev` the caller read; None means any.
    Raises: StaleRevisionError when `rev` differs; IdempotencyConflictError for a claim whose key is;
    NotFoundError for ids that do not
    exist or belong to somebody else; StoreUnavailableError.
    """

    @property
    def keys(self) -> KeyStore:
        """The API keys, kept in the same place."""
        ...

    async def check(self) -> None:
        """Whether it would store something now. Raises: StoreUnavailableError."""
        ...

    async def create(
        self,
        conversation: Conversation,
        items: Sequence[Item] = (),
        turn: Turn | None = None,
        *,
        claim: Claim | None = None,
    ) -> None:
        """Store a new conversation together with its first turn."""
        ...

    async def find_claim(self, owner: str, key: str) -> Claim | None:
        """What the owner used an idempotency key for, if it is still known."""
        ...

    async def get(self, owner: str, conversation_id: str) -> Conversation: ...

    async def list(self, owner: str, limit: int, after: str | None = None) -> Sequence[Conversation]:
        """Conversations by `updated_at`, newest first, following `after`: an id, or a `encode_cursor` one."""
        ...

    async def search(self, owner: str, query: SearchQuery, limit: int, after: str | None = None) -> Sequence[SearchHit]:
        """Conversations where the title or a message matches, of any branch, in the order of `list`.

        A hit names the message that matches best (`search.Found.score`) of the newest `NUM_COMPARED` that match, the
        newest of several.
        """
        ...

    async def list_ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]:
        """Ids of all conversations in their own order, which no change disturbs, above `after`."""
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
        expected_rev: int | None = None,
        claim: Claim | None = None,
    ) -> Conversation:
        """Add `items` (parents first), insert or replace `turn`, move the active leaf, name it if it has no title.

        Raises: NotFoundError for a parent or leaf that is not there (any more).
        """
        ...

    async def update(
        self,
        owner: str,
        conversation_id: str,
        *,
        title: str | None = None,
        active_leaf: str | None = None,
        metadata: Mapping[str, str] | None = None,
        expected_rev: int | None = None,
    ) -> Conversation: ...

    async def delete_messages(
        self, owner: str, conversation_id: str, edit: MessageDeletion, *, expected_rev: int | None = None
    ) -> Conversation:
        """Take messages and responses out and replace others, all or nothing. What a removed one held is gone."""
        ...

    async def merge(self, conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn]) -> MergeResult:
        """Store a conversation, or add what one with its id lacks: items (parents first) and turns, by id.

        What is stored already stays as it is; merging again changes nothing.
        Raises: NotFoundError where an id is somebody else's or of another conversation; then nothing is stored.
        """
        ...

    async def delete(self, owner: str, conversation_id: str, *, expected_rev: int | None = None) -> None: ...

    async def assign_owner(self, owner: str, to: str) -> OwnerAssignment:
        """Make all that an owner has another's, as it is; again does the rest. Idempotency keys stay whose they are."""
        ...

    async def close(self) -> None: ...
