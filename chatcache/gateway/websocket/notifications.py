"""Notifies connections about changed conversations of their owner, and messages of other gateways about them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import msgspec

from chatcache.conversations.store import ConversationStore, StoreUnavailableError
from chatcache.conversations.tree import Conversation
from chatcache.errors import NotFoundError

MAX_PENDING_CHANGES = 256
MAX_REMOTE_CONVERSATIONS = 4096  # of which is known what other gateways run in them


class Changed(msgspec.Struct, tag=True, array_like=True):
    """A changed conversation (None: it was deleted), with the responses that run in it on the sender."""

    sender: str
    owner: str
    conversation_id: str
    conversation: Conversation | None
    running: list[str]


class Running(msgspec.Struct, tag=True, array_like=True):
    """The responses that run on the sender in a conversation."""

    sender: str
    owner: str
    conversation_id: str
    running: list[str]


class Subscription:
    """Changes not yet sent to one connection: the newest head of each changed conversation.

    `None` stands for a deleted conversation. A new head replaces the previous one of the same conversation, so that a
    stalled reader holds at most `MAX_PENDING_CHANGES`; beyond that the oldest are dropped. `has_missed` is set when
    changes were dropped, or messages of other gateways may have been lost.
    """

    def __init__(self) -> None:
        self.has_missed = False
        self._pending: dict[str, Conversation | None] = {}
        self._has_changes = asyncio.Event()

    def put(self, conversation_id: str, conversation: Conversation | None) -> None:
        """Add a change; replaces an earlier one of the same conversation."""
        self._pending.pop(conversation_id, None)
        self._pending[conversation_id] = conversation
        if len(self._pending) > MAX_PENDING_CHANGES:
            del self._pending[next(iter(self._pending))]
            self.has_missed = True
        self._has_changes.set()

    def report_missed(self) -> None:
        self.has_missed = True
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
        self._remote: dict[tuple[str, str], dict[str, str]] = {}  # owner, conversation -> response -> its gateway

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

    def report_missed(self) -> None:
        """Notify all subscriptions that changes of other gateways may have been lost."""
        for subscriptions in self._by_owner.values():
            for subscription in subscriptions:
                subscription.report_missed()

    async def refresh(self, store: ConversationStore, owner: str, conversation_id: str) -> None:
        """Notify the subscriptions of a conversation in which other responses run than before."""
        if owner not in self._by_owner:
            return
        conversation: Conversation | None = None
        try:
            conversation = await store.get(owner, conversation_id)
        except NotFoundError:  # it was deleted
            pass
        except StoreUnavailableError:
            return
        self._notify(owner, conversation_id, conversation)

    def set_running(self, sender: str, owner: str, conversation_id: str, running: Sequence[str]) -> bool:
        """Record which responses run in a conversation on the gateway `sender`; return whether others ran before."""
        before = self._remote.pop((owner, conversation_id), {})
        kept = {response_id: gateway for response_id, gateway in before.items() if gateway != sender}
        now = kept | dict.fromkeys(running, sender)
        if now:
            self._remote[owner, conversation_id] = now
            if len(self._remote) > MAX_REMOTE_CONVERSATIONS:
                del self._remote[next(iter(self._remote))]
        return now.keys() != before.keys()

    def remote_ids(self) -> set[str]:
        """Return the ids of all responses that are known to run on other gateways."""
        return {response_id for running in self._remote.values() for response_id in running}

    def remove_running(self, ended: Set[str]) -> list[tuple[str, str]]:
        """Remove responses that have ended on other gateways; return the owner and the conversation of each."""
        found = [place for place, running in self._remote.items() if not ended.isdisjoint(running)]
        for place in found:
            left = {name: gateway for name, gateway in self._remote.pop(place).items() if name not in ended}
            if left:
                self._remote[place] = left
        return found

    def running_elsewhere(self, owner: str, conversation_id: str | None = None) -> Iterator[tuple[str, str]]:
        """Yield the conversation and the id of each response that is known to run on another gateway."""
        for (found_owner, found), running in self._remote.items():
            if found_owner == owner and conversation_id in (None, found):
                yield from ((found, response_id) for response_id in running)

    def _publish(self, owner: str, conversation_id: str, conversation: Conversation | None) -> None:
        self._notify(owner, conversation_id, conversation)
        if self.relay is not None:
            self.relay(owner, conversation_id, conversation)

    def _notify(self, owner: str, conversation_id: str, conversation: Conversation | None) -> None:
        for subscription in self._by_owner.get(owner, ()):
            subscription.put(conversation_id, conversation)
