"""OpenAI's response object and its output items: built alike while a response runs and when it is retrieved.

Why a prompt misses the cache, as people are told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Raw

from chatcache.conversations.prompt import Divergence
from chatcache.conversations.tree import CANCELLED, COMPLETED, INCOMPLETE, Item, ToolCall, Turn, Usage
from chatcache.types.events import FINISH_LENGTH


def usage_json(usage: Usage) -> dict[str, object]:
    """OpenAI's Responses usage."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        },
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }


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
        "parent_item_id": turn.parent_id if turn.echo.get("store", True) else None,
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
    """A finished candidate as output items: what it thought, what it said, what it called.

    One without a call has a message, be it empty.
    """
    parts = item.parts
    items: list[dict[str, object]] = []
    if parts.reasoning:
        items.append(reasoning_item(reasoning_id(item.id), item.index, parts.reasoning))
    if item.text or not parts.tool_calls:
        items.append(
            {
                "id": item.id,
                "type": "message",
                "role": item.role,
                "status": item.status,
                "finish_reason": item.finish_reason,
                "candidate": item.index,
                **({"score": score} if score is not None else {}),
                "content": [output_text(item.text, logprobs)],
            }
        )
    for number, call in enumerate(parts.tool_calls):
        last = number == len(parts.tool_calls) - 1
        items.append(call_item(call_item_id(item.id, number), item.index, call, item.status if last else COMPLETED))
    return tuple(items)


def reasoning_item(item_id: str, candidate: int, text: str | None, status: str = COMPLETED) -> dict[str, object]:
    """`text`: None while there is none."""
    content = [reasoning_text(text)] if text is not None else []
    return {
        "id": item_id,
        "type": "reasoning",
        "status": status,
        "candidate": candidate,
        "summary": [],
        "content": content,
    }


def call_item(item_id: str, candidate: int, call: ToolCall, status: str) -> dict[str, object]:
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "candidate": candidate,
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
    }


def reasoning_id(item_id: str) -> str:
    """The id of what a message's candidate thought."""
    return f"rs_{item_id.removeprefix('msg_')}"


def call_item_id(item_id: str, number: int) -> str:
    """The id of the item of a candidate's call."""
    return f"fc_{item_id.removeprefix('msg_')}_{number}"


def reasoning_text(text: str) -> dict[str, object]:
    """The content part of what was thought."""
    return {"type": "reasoning_text", "text": text}


def output_text(text: str, logprobs: Sequence[object] | Raw) -> dict[str, object]:
    """The content part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def why_incomplete(turn: Turn, outputs: Sequence[Item]) -> str | None:
    """OpenAI's reason, where a response ended without being complete."""
    if turn.status == CANCELLED:
        return "cancelled"
    if turn.status != INCOMPLETE:
        return None
    return "max_output_tokens" if FINISH_LENGTH in {item.finish_reason for item in outputs} else "interrupted"


TEMPLATE_CHANGED = "template_changed"


def miss_json(
    reason: str, at_token: int, detail: str, divergence: Divergence | None, page_size: int
) -> dict[str, object]:
    """What misses from where the chat template left a reply of ours misses for that."""
    if divergence is not None and divergence.token_index - page_size < at_token <= divergence.token_index:
        written = f"message {divergence.message_index} otherwise than it was when a reply was generated"
        reason, detail = TEMPLATE_CHANGED, f"the chat template writes {written}"
    return {"reason": reason, "at_token": at_token, "detail": detail}
