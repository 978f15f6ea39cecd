"""Notifies connections about changed conversations of their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from chatcache.conversations.tree import Conversation

MAX_PENDING_CHANGES = 256


class Subscription:
    """Changes not yet sent to one connection: the newest head of each changed conversation.

    `None` stands for a deleted conversation. A new head replaces the previous one of the same conversation, so that a
    stalled reader holds at most `MAX_PENDING_CHANGES`; beyond that the oldest are dropped and `overflowed` is set.
    """

    def __init__(self) -> None:
        self.overflowed = False
        self._pending: dict[str, Conversation | None] = {}
        self._has_changes = asyncio.Event()

    def put(self, conversation_id: str, conversation: Conversation | None) -> None:
        """Add a change; replaces an earlier one of the same conversation."""
        self._pending.pop(conversation_id, None)
        self._pending[conversation_id] = conversation
        if len(self._pending) > MAX_PENDING_CHANGES:
            del self._pending[next(iter(self._pending))]
            self.overflowed = True
        self._has_changes.set()

    async def next(self) -> Mapping[str, Conversation | None]:
        """Wait for changes and return all of them, oldest first."""
        await self._has_changes.wait()
        self._has_changes.clear()
        changes, self._pending = self._pending, {}
        return changes


class ConversationHub:
    """Subscriptions by owner. Publishing never blocks. Belongs to one event loop."""

    def __init__(self) -> None:
        self._by_owner: dict[str, set[Subscription]] = {}

    def subscribe(self, owner: str) -> Subscription:
        """Receive changes of all conversations of an owner, until `unsubscribe`."""
        subscription = Subscription()
        self._by_owner.setdefault(owner, set()).add(subscription)
        return subscription

    def unsubscribe(self, owner: str, subscription: Subscription) -> None:
        subscriptions = self._by_owner.get(owner, set())
        subscriptions.discard(subscription)
        if not subscriptions:
            self._by_owner.pop(owner, None)

    def publish_update(self, conversation: Conversation) -> None:
        for subscription in self._by_owner.get(conversation.owner, ()):
            subscription.put(conversation.id, conversation)

    def publish_deletion(self, owner: str, conversation_id: str) -> None:
        for subscription in self._by_owner.get(owner, ()):
            subscription.put(conversation_id, None)
