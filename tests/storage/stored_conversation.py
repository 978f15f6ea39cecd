"""A stored conversation and one turn for it, for tests of stores."""

from __future__ import annotations

from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import INCOMPLETE, Conversation, Item, ReplyParts, ToolCall, Turn

USER = Item("msg_u", None, "user", "Hé\x00llo 🎉", created_at=1.5)
PARTS = ReplyParts("hm", (ToolCall("call_1", "f", "{"),), "hm Hi {", is_call_cut=True, output_indexes=(0, 2, 1))
REPLY = Item("msg_a", "msg_u", "assistant", "Hi", (1, 70_000, 2**31 - 1), "resp_1", 3, INCOMPLETE, "length", 2.5, PARTS)
TURN = Turn("resp_1", "msg_u", "model", 1.0, None, (5, 6), "Be kind", None)


async def create(store: ConversationStore, name: str = "conv_1", owner: str = "me") -> Conversation:
    conversation = Conversation(name, owner, created_at=1.0, updated_at=1.0, metadata={"a": "ü"})
    await store.create(conversation)
    return conversation
