"""What conversations are in tokens, along their active paths: so that the engine can be asked what of them it has.

A list of conversations asks again and again, and most of them stand still. So what was worked out is kept until the
conversation changes (`rev`), the latest MAX_KEPT_BYTES of it.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

from chatcache.chat.conversations import Conversations
from chatcache.chat.places import Place, TurnRequest
from chatcache.chat.prompt import Prompt
from chatcache.chat.store import ConversationStore
from chatcache.chat.tools import echoed
from chatcache.chat.tree import ConversationTree, Item, Turn
from chatcache.errors import InvalidRequest
from chatcache.types.pages import PackedPrompt

MAX_KEPT_BYTES = 32 * 1024 * 1024

_NOTHING = Prompt("", ())


class Histories:
    """Active paths as prompts. Belongs to one event loop."""

    def __init__(self, conversations: Conversations, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._conversations = conversations
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[str, tuple[int, PackedPrompt]] = OrderedDict()  # (rev, prompt), latest asked last
        self._kept_bytes = 0

    async def of(self, store: ConversationStore, owner: str, conversation_id: str) -> PackedPrompt:
        """Every token up to the active leaf; behind a user's message, what a reply to it would be given.

        Nothing where the template refuses the messages. Raises: NotFound for what the owner does not have.
        """
        head = await store.get(owner, conversation_id)
        rev, kept = self._kept.get(conversation_id, (-1, None))
        if kept is not None and rev == head.rev:
            self._kept.move_to_end(conversation_id)
            return kept
        tree = await store.load(owner, conversation_id)
        prompt = await history(self._conversations, tree)
        packed = PackedPrompt(_packed(prompt.token_ids), prompt.num_public_tokens)
        self._keep(conversation_id, tree.conversation.rev, packed)
        return packed

    def _keep(self, conversation_id: str, rev: int, prompt: PackedPrompt) -> None:
        self._forget(conversation_id)
        self._kept[conversation_id] = rev, prompt
        self._kept_bytes += len(prompt.tokens)
        while self._kept_bytes > self._max_kept_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, conversation_id: str) -> None:
        if conversation_id in self._kept:
            self._kept_bytes -= len(self._kept.pop(conversation_id)[1].tokens)


async def history(conversations: Conversations, tree: ConversationTree) -> Prompt:
    """The prompt that a conversation's active path is: to the token where it is known, else as it would be rendered."""
    leaf = tree.conversation.active_leaf
    path = tree.path(leaf)
    if not path:
        return _NOTHING
    try:
        if tree.turn_of(path[-1]) is not None and tree.sequence(path[-1]):
            return await conversations.behind(tree, path[-1], len(path[-1].token_ids))
        turn = _latest_turn(tree, path)
        request = TurnRequest(
            tree.conversation.owner,
            model="",
            instructions=turn.instructions if turn is not None else None,
            functions=echoed(turn.echo.get("tools")) if turn is not None else (),
        )
        return await conversations.prompt(request, Place(tree, path))
    except InvalidRequest:  # there are messages that no template takes: two of one role, calls without an answer
        return _NOTHING


def _latest_turn(tree: ConversationTree, path: tuple[Item, ...]) -> Turn | None:
    """The one that is answering the leaf, or the last one on the path."""
    here = [turn for turn in tree.turns.values() if turn.parent_id == path[-1].id]
    if here:
        return max(here, key=lambda turn: turn.created_at)
    before = (tree.turn_of(item) for item in reversed(path))
    return next((turn for turn in before if turn is not None), None)


def _packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)
