"""Who wants to know of which conversation: every tab hears of every change, whoever made it."""

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
        self._waiting: dict[str, Conversation | None] = {}
        self._news = asyncio.Event()

    def put(self, conversation_id: str, conversation: Conversation | None) -> None:
        self._waiting.pop(conversation_id, None)
        self._waiting[conversation_id] = conversation
        if len(self._waiting) > MAX_PENDING_CHANGES:
            del self._waiting[next(iter(self._waiting))]
            self.overflowed = True
        self._news.set()

    async def next(self) -> Mapping[str, Conversation | None]:
        """Wait for changes and take them all, oldest first."""
        await self._news.wait()
        self._news.clear()
        taken, self._waiting = self._waiting, {}
        return taken


class ConversationHub:
    """Subscriptions by owner. Publishing never waits. Belongs to one event loop."""

    def __init__(self) -> None:
        self._by_owner: dict[str, set[Subscription]] = {}

    def subscribe(self, owner: str) -> Subscription:
        """Hear of all conversations of a tenant from now on. `unsubscribe` it when the connection ends."""
        subscription = Subscription()
        self._by_owner.setdefault(owner, set()).add(subscription)
        return subscription

    def unsubscribe(self, owner: str, subscription: Subscription) -> None:
        found = self._by_owner.get(owner, set())
        found.discard(subscription)
        if not found:
            self._by_owner.pop(owner, None)

    def publish_update(self, conversation: Conversation) -> None:
        for subscription in self._by_owner.get(conversation.owner, ()):
            subscription.put(conversation.id, conversation)

    def publish_deletion(self, owner: str, conversation_id: str) -> None:
        for subscription in self._by_owner.get(owner, ()):
            subscription.put(conversation_id, None)
