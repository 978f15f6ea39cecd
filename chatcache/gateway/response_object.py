"""OpenAI's response object and its output items: built alike while a response runs and when it is retrieved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Raw

from chatcache.chat.tree import CANCELLED, INCOMPLETE, Item, Turn
from chatcache.gateway.conversations import usage_json
from chatcache.types import FINISH_LENGTH


def response_object(
    turn: Turn, output: Sequence[Mapping[str, object]], incomplete: str | None = None
) -> dict[str, Any]:
    """The object as the turn stands now. `incomplete` says why it ended early; `turn.echo` repeats the request."""
    return {
        "id": turn.id,
        "object": "response",
        "created_at": int(turn.created_at),
        "status": turn.status,
        "model": turn.model,
        "output": output,
        "usage": usage_json(turn.usage) if turn.usage is not None else None,
        "error": None,
        "incomplete_details": {"reason": incomplete} if incomplete is not None else None,
        "instructions": turn.instructions,
        "previous_response_id": turn.previous_response_id,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        **turn.echo,
    }


def output_items(
    item: Item, logprobs: Sequence[object] | Raw = (), score: float | None = None
) -> tuple[dict[str, object], ...]:
    """A finished candidate as output items."""
    message: dict[str, object] = {
        "id": item.id,
        "type": "message",
        "role": item.role,
        "status": item.status,
        "finish_reason": item.finish_reason,
        **({"score": score} if score is not None else {}),
        "content": [output_text(item.text, logprobs)],
    }
    return (message,)


def output_text(text: str, logprobs: Sequence[object] | Raw) -> dict[str, object]:
    """The content part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def why_incomplete(turn: Turn, outputs: Sequence[Item]) -> str | None:
    """OpenAI's reason, where a response ended without being complete."""
    if turn.status == CANCELLED:
        return "cancelled"
    if turn.status != INCOMPLETE:
        return None
    return "max_output_tokens" if FINISH_LENGTH in {item.finish_reason for item in outputs} else "other"
