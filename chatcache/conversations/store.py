"""The contracts of stored conversations and saved prompts. One test suite runs against every implementation."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from chatcache.auth import KeyStore
from chatcache.conversations.checkpoints import ReplyCheckpoint
from chatcache.conversations.search import SearchHit, SearchQuery
from chatcache.conversations.tree import Conversation, ConversationTree, Item, MessageDeletion, Turn
from chatcache.errors import ChatcacheError, InvalidRequestError, NotFoundError


class StaleRevisionError(ChatcacheError):
    """The conversation was changed since the caller read it; `current` is its new version."""

    status = 409
    type = "conflict_error"
    code = "stale_revision"

    def __init__(self, present: Conversation, expected: int) -> None:
        super().__init__(f"conversation {present.id!r} is at rev {present.rev}, not {expected}", param="rev")
        self.current = present


class StoreUnusableError(ChatcacheError):
    """The store cannot be opened: wrong file, wrong server, newer version or damage."""

    code = "store_unusable"


class StoreUnavailableError(ChatcacheError):
    """The store does not answer or rejects writes at the moment.

    It is unknown whether the last write was stored.
    """

    status = 503
    code = "store_unavailable"


@dataclass(frozen=True, slots=True)
class Claim:
    """An idempotency key, the digest of its request, and the id of the object that this created.

    The store keeps it for `CLAIM_TTL_S` seconds.
    """

    key: str
    digest: str
    target: str


class IdempotencyConflictError(ChatcacheError):
    """The idempotency key was used before, by the request of `claim`. Nothing was stored."""

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
    """What a merge added. `is_new`: the conversation did not exist before."""

    conversation: Conversation
    is_new: bool
    num_items: int
    num_turns: int


@dataclass(frozen=True, slots=True)
class OwnerAssignment:
    """Counts of the conversations that got a new owner and of those that were skipped.

    A conversation is skipped (`num_busy`) while a response is in progress in it.
    """

    num_conversations: int = 0
    num_busy: int = 0


CLAIM_TTL_S = 24 * 3600
MAX_ITEMS = 16_384  # per conversation, without imported messages and without the last replies


@dataclass(frozen=True, slots=True)
class ItemQuery:
    """A page of the messages of a conversation.

    They are those on the path to `leaf` (None: the active leaf), or all by age if `all_branches`; then the tree has
    `num_stored_items`. `start`: the first message of the page (None: the newest, or the oldest in ascending order).
    `limit`: None for all.
    """

    leaf: str | None = None
    all_branches: bool = False
    start: str | None = None
    limit: int | None = None
    is_descending: bool = True


class ConversationFullError(InvalidRequestError):
    """A request would add messages beyond the limit of items per conversation."""

    def __init__(self, num_items: int, num_new: int, max_items: int) -> None:
        super().__init__(
            f"a conversation has at most {max_items} messages; this one has {num_items} and would get {num_new} more",
            param="conversation",
            code="conversation_full",
        )


def encode_cursor(conversation: Conversation) -> str:
    """Return a position in the conversation list, as text for a client.

    It stays valid when the conversation changes or is deleted.
    """
    return f"{conversation.updated_at!r}~{conversation.id}"


def decode_cursor(text: str) -> tuple[float, str] | None:
    """Return the `updated_at` and id of a cursor, or None if the text is not a cursor."""
    time, mark, conversation_id = text.partition("~")
    try:
        updated_at = float(time)
    except ValueError:
        return None
    return (updated_at, conversation_id) if mark and math.isfinite(updated_at) else None


MAX_SAVED_PROMPTS = 200  # per tenant
_VARIABLE = re.compile(r"\{\{[ \t]*([^{}\s](?:[^{}\n]{0,62}[^{}\s])?)[ \t]*\}\}")


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """A text to start a message with, which all users of a tenant share. Times are seconds since 1970.

    `{{name}}` in the text is a variable, which the user replaces before sending.
    """

    name: str
    text: str
    description: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0

    @property
    def variables(self) -> list[str]:
        """The names of the variables in the text, each once, in their order."""
        return list(dict.fromkeys(_VARIABLE.findall(self.text)))

    def changed(self, name: str | None, text: str | None, description: str | None) -> SavedPrompt:
        """Return the prompt with these fields, changed now. None keeps a field."""
        fields = {"name": name, "text": text, "description": description}
        changes = {field: value for field, value in fields.items() if value is not None}
        return replace(self, **changes, updated_at=time.time())  # type: ignore[arg-type]


class PromptExistsError(ChatcacheError):
    """The tenant has another saved prompt of that name."""

    status = 409
    type = "conflict_error"
    code = "prompt_exists"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is a saved prompt {name!r} already: change it, or use another name", param="name")


class PromptLibraryFullError(InvalidRequestError):
    """The tenant has as many saved prompts as it may have."""

    def __init__(self, num_prompts: int) -> None:
        super().__init__(
            f"a tenant has at most {MAX_SAVED_PROMPTS} saved prompts; this one has {num_prompts}: delete one first",
            param="name",
            code="prompt_library_full",
        )


def unknown_prompt(name: str) -> NotFoundError:
    return NotFoundError(f"no saved prompt {name[:128]!r}", param="name")


class SavedPromptStore(Protocol):
    """Saved prompts by name, each visible to the users of its tenant only.

    A call that returns has stored its data durably. Raises: NotFoundError for a name that the tenant does not have;
    PromptExistsError for a new name that it has; PromptLibraryFullError; StoreUnavailableError.
    """

    async def list(self, tenant: str) -> Sequence[SavedPrompt]:
        """Return all prompts of the tenant, by name."""
        ...

    async def get(self, tenant: str, name: str) -> SavedPrompt: ...

    async def create(self, tenant: str, prompt: SavedPrompt) -> None: ...

    async def update(
        self,
        tenant: str,
        name: str,
        *,
        new_name: str | None = None,
        text: str | None = None,
        description: str | None = None,
    ) -> SavedPrompt:
        """Change the given fields, and return the changed prompt."""
        ...

    async def delete(self, tenant: str, name: str) -> None: ...


class ConversationStore(Protocol):
    """Conversation trees by id, each visible to its owner only.

    A call that returns has stored its data durably. `expected_rev` is the `rev` that the caller has read; None accepts
    any. A `claim` is stored in the same transaction as the object that it names. Raises: StaleRevisionError when `rev`
    differs; IdempotencyConflictError for a claim whose key was used before; NotFoundError for ids that do not exist or
    belong to another owner; StoreUnavailableError.
    """

    @property
    def keys(self) -> KeyStore:
        """The API keys, stored in the same file or server."""
        ...

    @property
    def saved_prompts(self) -> SavedPromptStore:
        """The saved prompts, stored in the same file or server."""
        ...

    async def check(self) -> None:
        """Check that the store would accept a write now. Raises: StoreUnavailableError."""
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
        """Return the owner's claim with this idempotency key, or None if it is unknown or expired."""
        ...

    async def get(self, owner: str, conversation_id: str) -> Conversation: ...

    async def find_owner(self, conversation_id: str) -> str:
        """Return the owner of a conversation, for a reader who does not know it. Raises: NotFoundError."""
        ...

    async def list(self, owner: str, limit: int, after: str | None = None) -> Sequence[Conversation]:
        """Return conversations by `updated_at`, newest first, following `after` (an id or cursor)."""
        ...

    async def search(self, owner: str, query: SearchQuery, limit: int, after: str | None = None) -> Sequence[SearchHit]:
        """Return conversations of which the title or any message matches, in the order of `list`.

        All branches are searched. A hit names the best match (`search.TextMatch.score`) among the newest
        `MAX_COMPARED_MESSAGES` matching messages; of equal matches the newest.
        """
        ...

    async def list_ids(self, owner: str, limit: int, after: str | None = None) -> Sequence[str]:
        """Return ids of the owner's conversations that are greater than `after`, in ascending order.

        Unlike the order of `list`, this order does not change when conversations are updated.
        """
        ...

    async def load(self, owner: str, conversation_id: str) -> ConversationTree:
        """Load the whole tree, which may be large: where a part is enough, use the two methods below."""
        ...

    async def load_path(
        self, owner: str, conversation_id: str, end: str | None = None, *, limit: int | None = None
    ) -> ConversationTree:
        """Load the part of the tree on the path to `end` (None: the active leaf), root first.

        `end` is a message or a response; of a response, all its input and output messages are loaded, and the path to
        the first of them. `limit`: only so many messages of the path, those next to its end. The part has the
        responses that its messages belong to. An unknown `end` has an empty path.
        """
        ...

    async def list_items(self, owner: str, conversation_id: str, query: ItemQuery) -> ConversationTree:
        """Load a page of messages, in its order, with the responses that they belong to.

        A descending page begins at `query.start` even if that is on another path. Raises: NotFoundError for an unknown
        `leaf`, and for a `start` that is unknown or, in ascending order, not on the path.
        """
        ...

    async def locate(self, owner: str, member_id: str) -> str:
        """Return the id of the conversation that contains this response or item."""
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
        max_items: int | None = None,
        depends_on: Sequence[str] = (),
    ) -> Conversation:
        """Add `items` (parents first), insert or replace `turn`, and move the active leaf.

        `title` is set if the conversation has none. `depends_on`: messages and responses of the conversation from which
        the prompt of `turn` was made.

        Raises: NotFoundError for a parent or leaf that does not exist (any more); ConversationBusyError if a member of
        `depends_on` was deleted; ConversationFullError if there are `items` and the conversation would then have more
        than `max_items`.
        """
        ...

    async def checkpoint(self, checkpoints: Sequence[ReplyCheckpoint]) -> None:
        """Store new output of running responses, to be used if this process dies before they end.

        Responses that a crash left in progress become incomplete, with the messages that their checkpoints hold. Those
        of a response that has ended are ignored; the end of a response deletes its checkpoints.
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
        self, owner: str, conversation_id: str, deletion: MessageDeletion, *, expected_rev: int | None = None
    ) -> Conversation:
        """Apply a deletion: remove messages and responses and replace others, all or nothing."""
        ...

    async def merge(self, conversation: Conversation, items: Sequence[Item], turns: Sequence[Turn]) -> MergeResult:
        """Store a conversation, or add the items and turns that the stored one does not have.

        Items and turns are compared by id; `items` are parents first. Stored ones stay as they are, and merging again
        changes nothing.
        Raises: NotFoundError where an id belongs to another owner or conversation; then nothing is stored.
        """
        ...

    async def delete(self, owner: str, conversation_id: str, *, expected_rev: int | None = None) -> None: ...

    async def assign_owner(self, owner: str, to: str) -> OwnerAssignment:
        """Move all conversations of one owner to another; repeating the call moves the rest.

        Conversations with a response in progress are skipped. Idempotency keys keep their owner.
        """
        ...

    async def close(self) -> None: ...
