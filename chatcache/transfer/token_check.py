"""Compare the token ids of an imported file, which may have been edited, with its texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from dataclasses import replace

import msgspec

from chatcache.conversations.fork_points import ContinuationPoint, ContinuationResolver, TurnRequest
from chatcache.conversations.tree import ConversationTree, Item, Turn
from chatcache.conversations.turns import TurnService, setup_of
from chatcache.errors import InvalidRequestError
from chatcache.tokenizer.reply_format import ReplyFormat
from chatcache.tokenizer.tokenizer import Tokenizer

_MAX_CHECKED_CHARS = 64_000_000  # of all prompts that are rendered to check the tokens of one import
_CHARS_PER_MESSAGE = 40  # the cost of an empty message, in characters
_CHARS_PER_TOKEN = 4  # of a token that is decoded


class TokenCheck:
    """Compares the token ids of a file, which may have been edited, with its texts.

    The tokens of a response are kept if its prompt is the one that this server builds from the messages before it, and
    if the tokens of its replies are their texts, reasoning and calls. Else the response and what extends it have none.
    `num_chars`: the work so far, in characters that are rendered.
    """

    def __init__(self, turns: TurnService, tokenizer: Tokenizer, reply_format: ReplyFormat) -> None:
        self._turns = turns
        self._resolver = ContinuationResolver(turns.store, tokenizer, reply_format)
        self.num_chars = 0

    async def run(self, tree: ConversationTree, new_ids: Set[str]) -> None:
        """Drop tokens of the new items and turns of a tree where they are not those of the text.

        Beyond `_MAX_CHECKED_CHARS`, in all runs together, the remaining ones are dropped.
        """
        for turn, replies in await asyncio.to_thread(_turns_to_check, tree, new_ids):
            is_new = turn.id in new_ids
            wrong = await self._find_wrong_replies(tree, turn, replies, is_new=is_new)
            if wrong == []:
                continue
            if is_new:
                turn = replace(turn, prompt_ids=(), base_item_id=None)
                tree.turns[turn.id] = turn
            for item in replies if is_new or wrong is None else wrong:
                if item.id in new_ids:
                    # A reply without tokens after a known prompt would be an empty one.
                    response_id = None if turn.prompt_ids else item.response_id
                    tree.items[item.id] = replace(item, token_ids=(), response_id=response_id)

    async def _find_wrong_replies(
        self, tree: ConversationTree, turn: Turn, replies: Sequence[Item], *, is_new: bool
    ) -> list[Item] | None:
        """Return the replies whose tokens are not their texts; None if the prompt is wrong or not to be checked.

        The prompt of a response that is stored already (not `is_new`) is right.
        """
        if self.num_chars > _MAX_CHECKED_CHARS:
            return None
        path = await asyncio.to_thread(tree.path, turn.parent_id or None)
        prompt = await asyncio.to_thread(_prompt_of, tree, turn)
        self.num_chars += sum(len(item.text) + _CHARS_PER_MESSAGE for item in path)
        self.num_chars += _CHARS_PER_TOKEN * sum(map(len, (prompt, *(item.token_ids for item in replies))))
        if not prompt or (is_new and not await self._is_prompt(tree, turn, path, prompt)):
            return None
        return await asyncio.to_thread(self._wrong_replies, tree, replies, prompt)

    async def _is_prompt(
        self, tree: ConversationTree, turn: Turn, path: tuple[Item, ...], prompt: tuple[int, ...]
    ) -> bool:
        """Check that `prompt`, that of a response, has the tokens of the messages before it."""
        request = TurnRequest(tree.conversation.owner, turn.model, **setup_of(turn))
        try:
            assembled = await self._turns.assemble_prompt(request, ContinuationPoint(tree, path))
        except InvalidRequestError:  # the template rejects the messages, or they are too long for the model
            return False
        return assembled.token_ids == prompt

    def _wrong_replies(self, tree: ConversationTree, replies: Sequence[Item], prompt: Sequence[int]) -> list[Item]:
        return [item for item in replies if not self._is_reply(tree, item, prompt)]

    def _is_reply(self, tree: ConversationTree, item: Item, prompt: Sequence[int]) -> bool:
        """Check that the tokens of a reply are its text and parts.

        Of the special tokens, only those that end a reply may be missing in the text (`ignore_eos`).
        """
        context = self._resolver.reply_context(tree, item)
        call_ids = [call.call_id for call in item.parts.tool_calls]
        hidden = context.tokenizer.special_ids.intersection(item.token_ids) - context.mark_ids
        may_skip = bool(hidden) and hidden.issubset(context.tokenizer.eos_token_ids)
        for skips in (False, True) if may_skip else (False,):
            stream = context.text_stream(prompt, skip_special_tokens=skips)
            raw = stream.push(item.token_ids) + stream.finish()
            parser = context.new_parser(prompt, call_ids, item.id, item.index)
            parser.push(raw)
            parser.finish()
            parts = msgspec.structs.replace(
                parser.parts(raw), is_call_cut=item.parts.is_call_cut, output_indexes=item.parts.output_indexes
            )  # not part of the text
            if (parser.text, parts) == (item.text, item.parts):
                return True
        return False


def _turns_to_check(tree: ConversationTree, new_ids: Set[str]) -> list[tuple[Turn, list[Item]]]:
    """Return the responses that are new or have new replies with their replies, those that others extend first.

    Drops the tokens of new messages that no response has generated.
    """
    replies: dict[str, list[Item]] = {turn.id: [] for turn in tree.turns.values() if turn.id in new_ids}
    for item in tree.items.values():
        turn = tree.turn_of(item)
        if turn is not None and (turn.id in new_ids or item.id in new_ids):
            replies.setdefault(turn.id, []).append(item)
        elif item.id in new_ids and item.token_ids:
            tree.items[item.id] = replace(item, token_ids=())
    position = {item_id: at for at, item_id in enumerate(tree.items)}
    found = [(tree.turns[turn_id], items) for turn_id, items in replies.items()]
    found = [(turn, items) for turn, items in found if turn.prompt_ids or any(item.token_ids for item in items)]
    return sorted(found, key=lambda each: position.get(each[0].parent_id, -1))


def _prompt_of(tree: ConversationTree, turn: Turn) -> tuple[int, ...]:
    """Return all tokens before the replies of a response; empty if they are not known."""
    return tree.token_sequence(Item("", turn.parent_id or None, "assistant", "", response_id=turn.id))
