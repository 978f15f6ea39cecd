"""Taking messages out of a conversation: what stays keeps its place, and forgets the tokens that held what went.

    a -- b -- c -- d        without b:   a -- c -- d      c and d are rendered afresh from now on
          `-- e -- f                      `-- e -- f

Pure: a tree in, an edit out, which the store applies in one piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from chatcache.chat.tree import DELETED, IN_PROGRESS, ConversationTree, Item, Turn
from chatcache.errors import ChatcacheError, NotFound


class ConversationBusy(ChatcacheError):
    """A response that is being generated stands on what the caller wants to change."""

    status = 409
    type = "conflict_error"
    code = "conversation_busy"


@dataclass(frozen=True, slots=True)
class TreeEdit:
    """What to change in a stored tree: what goes, and what replaces the stored form of the same id."""

    active_leaf: str | None
    removed_items: tuple[str, ...] = ()
    removed_turns: tuple[str, ...] = ()
    items: tuple[Item, ...] = ()
    turns: tuple[Turn, ...] = ()


def without_item(tree: ConversationTree, item_id: str) -> TreeEdit:
    """Take one message out; those under it move up to its parent.

    Their prompts contained it, so their tokens are dropped: they can be continued as before, but not forked inside.
    Raises: NotFound, ConversationBusy.
    """
    item = tree.items.get(item_id)
    if item is None:
        raise NotFound(f"no message {item_id!r}", param="item_id")
    below = {each.id for each in _below(tree, item_id)}
    held = {item_id, *below}
    if any(turn.status == IN_PROGRESS and turn.parent_id in held for turn in tree.turns.values()):
        raise ConversationBusy("a response that continues this message is being generated: cancel it first")
    turns = (turn for turn in tree.turns.values() if turn.parent_id in held)
    moved = (each for each in tree.items.values() if each.id in below)
    return TreeEdit(
        active_leaf=item.parent_id if tree.conversation.active_leaf == item_id else tree.conversation.active_leaf,
        removed_items=(item_id,),
        items=tuple(
            replace(each, token_ids=(), parent_id=item.parent_id if each.parent_id == item_id else each.parent_id)
            for each in moved
        ),
        turns=tuple(
            replace(
                turn,
                base_item_id=None,
                prompt_ids=(),
                parent_id=(item.parent_id or "") if turn.parent_id == item_id else turn.parent_id,
            )
            for turn in turns
        ),
    )


def without_response(tree: ConversationTree, response_id: str) -> TreeEdit:
    """Take a response out, and those of its messages that nothing else stands on.

    What others were continued from stays in the tree as messages; the response itself cannot be found any more.
    Raises: ConversationBusy.
    """
    turn = tree.turns[response_id]
    if turn.status == IN_PROGRESS:
        raise ConversationBusy("the response is being generated: cancel it first")
    made = [each for each in tree.items.values() if tree.is_made_by(each, turn)]
    forked = tree.items.get(str(turn.echo.get("forked_item_id")))
    num_on = Counter(each.parent_id for each in tree.items.values())
    num_on.update(each.parent_id for each in tree.turns.values() if each.id != response_id)
    removed: set[str] = set()
    # Leaves first: each input stands on the one before it, the first perhaps on the beginning of another reply.
    for each in (*made, *reversed(tree.inputs(response_id)), *((forked,) if forked is not None else ())):
        if not num_on[each.id]:
            removed.add(each.id)
            num_on[each.parent_id] -= 1
    is_needed = any(each.id not in removed for each in made)
    gone = replace(turn, status=DELETED, usage=None, echo={})
    return TreeEdit(
        active_leaf=_nearest(tree, removed),
        removed_items=tuple(removed),
        removed_turns=() if is_needed else (response_id,),
        turns=(gone,) if is_needed else (),
    )


def _nearest(tree: ConversationTree, removed: Set[str]) -> str | None:
    """The active leaf, or the nearest above it that is not removed."""
    leaf = tree.conversation.active_leaf
    while leaf is not None and leaf in removed:
        leaf = tree.items[leaf].parent_id
    return leaf


def _below(tree: ConversationTree, item_id: str) -> Iterator[Item]:
    by_parent: dict[str | None, list[Item]] = {}
    for item in tree.items.values():
        by_parent.setdefault(item.parent_id, []).append(item)
    waiting = list(by_parent.get(item_id, ()))
    while waiting:
        item = waiting.pop()
        yield item
        waiting += by_parent.get(item.id, ())
