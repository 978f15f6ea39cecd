"""Notifies connections about changed conversations of their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from chatcache.conversations.tree import Conversation

MAX_PENDING_CHANGES = 256
MAX_REMOTE_CONVERSATIONS = 4096  # of which is known what other gateways run in them


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
    """Subscriptions by owner. Publishing never blocks. Belongs to one event loop.

    `relay` sends each change to the other gateways of the store: its owner, the conversation's id, and the conversation
    (None: it was deleted). Their changes arrive by `receive`.
    """

    def __init__(self) -> None:
        self.relay: Callable[[str, str, Conversation | None], None] | None = None
        self._by_owner: dict[str, set[Subscription]] = {}
        self._remote: dict[tuple[str, str], dict[str, Sequence[str]]] = {}  # owner, conversation -> gateway -> running

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
        self._publish(conversation.owner, conversation.id, conversation)

    def publish_deletion(self, owner: str, conversation_id: str) -> None:
        self._publish(owner, conversation_id, None)

    def receive(self, owner: str, conversation_id: str, conversation: Conversation | None) -> None:
        """Notify the subscriptions of a change that another gateway has made."""
        self._notify(owner, conversation_id, conversation)

    def set_running(self, sender: str, owner: str, conversation_id: str, running: Sequence[str]) -> None:
        """Record which responses run in a conversation on the gateway `sender`."""
        gateways = self._remote.pop((owner, conversation_id), {})
        gateways.pop(sender, None)
        if running:
            gateways[sender] = running
        if gateways:
            self._remote[owner, conversation_id] = gateways
            if len(self._remote) > MAX_REMOTE_CONVERSATIONS:
                del self._remote[next(iter(self._remote))]

    def running_elsewhere(self, owner: str, conversation_id: str | None = None) -> Iterator[tuple[str, str]]:
        """Yield the conversation and the id of each response that is known to run on another gateway."""
        for (found_owner, found), gateways in self._remote.items():
            if found_owner == owner and conversation_id in (None, found):
                for running in gateways.values():
                    yield from ((found, response_id) for response_id in running)

    def _publish(self, owner: str, conversation_id: str, conversation: Conversation | None) -> None:
        self._notify(owner, conversation_id, conversation)
        if self.relay is not None:
            self.relay(owner, conversation_id, conversation)

    def _notify(self, owner: str, conversation_id: str, conversation: Conversation | None) -> None:
        for subscription in self._by_owner.get(owner, ()):
            subscription.put(conversation_id, conversation)
