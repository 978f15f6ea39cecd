"""The head of a conversation on the wire: in lists, in notices, in a refusal that shows what is new."""

from __future__ import annotations

from chatcache.chat.tree import Conversation


def conversation_json(conversation: Conversation) -> dict[str, object]:
    """The wire form; the owner stays inside."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_at),
        "updated_at": conversation.updated_at,
        "title": conversation.title,
        "active_leaf": conversation.active_leaf,
        "rev": conversation.rev,
        "metadata": dict(conversation.metadata),
    }
