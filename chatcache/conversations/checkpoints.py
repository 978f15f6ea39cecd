"""Checkpoints of running replies: their output up to now, stored about once a second.

A checkpoint holds only what is new since the one before, so that all checkpoints of a reply together are about as long
as the reply. Text that a parser or a stop string still holds back may change later; therefore a part of an output is
given with its offset, from which on it replaces what was stored before:

    checkpoint 1    offset  0   "The quick br"
    checkpoint 2    offset 10   "brown fox "        ->   "The quick brown fox jumps"
    checkpoint 3    offset 20   "jumps"

If the gateway dies, the store applies the checkpoints and ends the response as incomplete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from chatcache.conversations.tree import (
    INCOMPLETE,
    Conversation,
    Item,
    ToolCall,
    Turn,
    head_after_append,
    main_output,
)

_MAX_REVISED_CHARS = 1024  # at the end of a text; a longer revision stores the whole text again


class Offsets(msgspec.Struct, frozen=True, array_like=True):
    """The lengths of the parts of a candidate that earlier checkpoints hold."""

    text: int = 0
    token_ids: int = 0
    reasoning: int = 0
    raw: int = 0
    arguments: tuple[int, ...] = ()


class CandidateCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """The output of one candidate from `offsets` on, as a message."""

    item: Item
    offsets: Offsets


class ReplyCheckpoint(NamedTuple):
    """New output of a running response, encoded for the store."""

    conversation_id: str
    response_id: str
    data: bytes


_CANDIDATES = msgspec.msgpack.Decoder(list[CandidateCheckpoint])


class CheckpointEncoder:
    """Encodes the output of one response since its last checkpoint that was stored."""

    def __init__(self) -> None:
        self._saved: dict[int, Item] = {}  # by index of the candidate
        self._pending: dict[int, Item] = {}

    def encode(self, items: Iterable[Item]) -> bytes | None:
        """Return what changed in the candidates `items`, or None. Call `confirm` once it is stored."""
        self._pending = {item.index: item for item in items if _has_changed(self._saved.get(item.index), item)}
        found = [_since(self._saved.get(index), item) for index, item in self._pending.items()]
        return msgspec.msgpack.encode(found) if found else None

    def confirm(self) -> None:
        """Take the last result of `encode` as stored."""
        self._saved |= self._pending
        self._pending = {}


def restore(checkpoints: Iterable[bytes]) -> list[Item]:
    """Return the candidates that checkpoints hold, given in order. Applying one of them twice changes nothing."""
    items: dict[int, Item] = {}
    for data in checkpoints:
        for checkpoint in _CANDIDATES.decode(data):
            index = checkpoint.item.index
            items[index] = _applied(items.get(index), checkpoint)
    return [items[index] for index in sorted(items)]


def end_interrupted(head: Conversation, turn: Turn, items: Sequence[Item]) -> tuple[Conversation, Turn]:
    """Return the conversation and a response as they are after a crash that left `items` of the response."""
    ended = replace(turn, status=INCOMPLETE)
    if not items:
        return head, ended
    is_active = head.active_leaf == turn.parent_id
    leaf = main_output(items, INCOMPLETE).id if is_active else None
    reason = {"incomplete_details": {"reason": "interrupted"}}
    return head_after_append(head, leaf), replace(ended, echo={**turn.echo, **reason})


def _has_changed(saved: Item | None, item: Item) -> bool:
    if saved is None:
        return bool(item.token_ids or item.text)
    return (saved.token_ids, saved.text, saved.parts, saved.finish_reason, saved.status) != (
        *(item.token_ids, item.text, item.parts, item.finish_reason, item.status),
    )


def _since(saved: Item | None, item: Item) -> CandidateCheckpoint:
    if saved is None:
        return CandidateCheckpoint(item, Offsets(arguments=(0,) * len(item.parts.tool_calls)))
    parts, before = item.parts, saved.parts
    old_arguments = [call.arguments for call in before.tool_calls[: len(parts.tool_calls)]]
    old_arguments += [""] * (len(parts.tool_calls) - len(old_arguments))
    offsets = Offsets(
        text=_num_kept(saved.text, item.text),
        token_ids=len(saved.token_ids) if item.token_ids[: len(saved.token_ids)] == saved.token_ids else 0,
        reasoning=_num_kept(before.reasoning, parts.reasoning),
        raw=_num_kept(before.raw, parts.raw),
        arguments=tuple(
            _num_kept(old, call.arguments) for old, call in zip(old_arguments, parts.tool_calls, strict=True)
        ),
    )
    calls = (
        ToolCall(call.call_id, call.name, call.arguments[offset:])
        for call, offset in zip(parts.tool_calls, offsets.arguments, strict=True)
    )
    new_parts = msgspec.structs.replace(
        parts,
        reasoning=parts.reasoning[offsets.reasoning :],
        tool_calls=tuple(calls),
        raw=parts.raw[offsets.raw :],
    )
    new = replace(item, text=item.text[offsets.text :], token_ids=item.token_ids[offsets.token_ids :], parts=new_parts)
    return CandidateCheckpoint(new, offsets)


def _num_kept(old: str, new: str) -> int:
    """Return how many first characters of `old` the new text keeps, perhaps less than all that it has in common."""
    if new.startswith(old):
        return len(old)
    num_sure = max(0, len(old) - _MAX_REVISED_CHARS)
    return num_sure if new.startswith(old[:num_sure]) else 0


def _applied(item: Item | None, checkpoint: CandidateCheckpoint) -> Item:
    new, offsets = checkpoint.item, checkpoint.offsets
    if item is None:
        return new
    old_calls = [call.arguments for call in item.parts.tool_calls]
    calls = (
        ToolCall(call.call_id, call.name, (old_calls[at][:offset] if at < len(old_calls) else "") + call.arguments)
        for at, (call, offset) in enumerate(zip(new.parts.tool_calls, offsets.arguments, strict=True))
    )
    parts = msgspec.structs.replace(
        new.parts,
        reasoning=item.parts.reasoning[: offsets.reasoning] + new.parts.reasoning,
        tool_calls=tuple(calls),
        raw=item.parts.raw[: offsets.raw] + new.parts.raw,
    )
    return replace(
        new,
        text=item.text[: offsets.text] + new.text,
        token_ids=item.token_ids[: offsets.token_ids] + new.token_ids,
        parts=parts,
    )
