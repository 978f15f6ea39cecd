"""OpenAI's response object and its output items, for running and for stored responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, cast

from msgspec import UNSET

from chatcache.conversations.prompt import Divergence
from chatcache.conversations.tree import CANCELLED, COMPLETED, INCOMPLETE, Item, ToolCall, Turn
from chatcache.gateway.schemas.completions import TokenLogprob
from chatcache.gateway.schemas.responses import (
    FunctionCall,
    ItemStatus,
    OutputItem,
    OutputMessage,
    Reasoning,
    ReasoningText,
    ReplyItem,
    Response,
    ResponseText,
    ResponseUsage,
    SummaryText,
)
from chatcache.gateway.schemas.server import MissCause
from chatcache.types.events import FINISH_LENGTH

# Keys of `Turn.echo` that are not part of the response object.
HAS_LOGPROBS = "has_logprobs"
STATISTICS = "statistics"
SCORES = "scores"  # of ranked candidates, by index; None for one that did not end
# Fields that `Turn.echo` has for every request. An imported turn may lack them.
_ECHO_DEFAULTS: dict[str, Any] = {
    "conversation": None,
    "input_item_ids": [],
    "forked_item_id": None,
    "store": True,
    "background": False,
    "metadata": {},
    "max_output_tokens": None,
    "top_logprobs": 0,
    "n": 1,
    "temperature": None,
    "top_p": None,
    "error": None,
    "incomplete_details": None,
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
}


def response_object(turn: Turn, output: Sequence[OutputItem], incomplete: str | None = None) -> Response:
    """Build the response object of a turn.

    `incomplete`: why it ended early. `turn.echo` contains the fields that repeat the request.
    """
    details = {"incomplete_details": {"reason": incomplete}} if incomplete is not None else {}
    echo = {name: value for name, value in turn.echo.items() if name in Response.__struct_fields__}
    fields: dict[str, Any] = {
        "id": turn.id,
        "object": "response",
        "created_at": int(turn.created_at),
        "status": turn.status,
        "model": turn.model,
        "output": output,
        "usage": ResponseUsage.from_usage(turn.usage) if turn.usage is not None else None,
        "instructions": turn.instructions,
        "previous_response_id": turn.previous_response_id,
        "parent_item_id": turn.parent_id if turn.echo.get("store", True) else None,
        "truncation": "disabled",
    }
    return Response(**{**_ECHO_DEFAULTS, **details, **fields, **echo})


def output_items(
    item: Item,
    logprobs: list[TokenLogprob] | None = None,
    score: float | None = None,
    *,
    summarizes: bool = False,
) -> tuple[ReplyItem, ...]:
    """Convert a finished candidate into output items (reasoning, text, calls), in the order in which they began.

    A candidate without calls has a message, even if it is empty. A call that was cut off is incomplete. `summarizes`:
    the reasoning is sent as its summary.
    """
    parts = item.parts
    items: list[ReplyItem] = []
    if parts.reasoning:
        items.append(reasoning_item(reasoning_id(item.id), item.index, parts.reasoning, summarizes=summarizes))
    if item.text or not parts.tool_calls:
        items.append(
            OutputMessage(
                id=item.id,
                role="assistant",
                status=cast(ItemStatus, item.status),
                content=[output_text(item.text, logprobs)],
                candidate=item.index,
                finish_reason=item.finish_reason,
                score=score if score is not None else UNSET,
            )
        )
    for number, call in enumerate(parts.tool_calls):
        status = COMPLETED if number < len(parts.finished_calls) else INCOMPLETE
        items.append(call_item(call_item_id(item.id, number), item.index, call, status))
    if len(parts.output_indexes) == len(items):
        return tuple(each for _, each in sorted(zip(parts.output_indexes, items, strict=True), key=itemgetter(0)))
    return tuple(items)


def reasoning_item(
    item_id: str, candidate: int, text: str | None, status: str = COMPLETED, *, summarizes: bool = False
) -> Reasoning:
    """Build a reasoning item; `text` is None before the first token."""
    item = Reasoning(item_id, cast(ItemStatus, status), summary=[], content=[], candidate=candidate)
    if text is not None and summarizes:
        item.summary.append(SummaryText(text))
    elif text is not None:
        item.content.append(ReasoningText(text))
    return item


def has_summary(echo: Mapping[str, Any]) -> bool:
    """Whether the request of a response asked for a summary of the reasoning. `echo`: of its turn, or the response."""
    return bool((echo.get("reasoning") or {}).get("summary"))


def call_item(item_id: str, candidate: int, call: ToolCall, status: str) -> FunctionCall:
    """Build the item of a call; a qualified name is split into the namespace and the name."""
    namespace, _, name = call.name.rpartition(".")
    return FunctionCall(
        item_id,
        cast(ItemStatus, status),
        call.call_id,
        name,
        call.arguments,
        candidate,
        namespace=namespace or UNSET,
    )


def reasoning_id(item_id: str) -> str:
    """Return the id of a candidate's reasoning item."""
    return f"rs_{item_id.removeprefix('msg_')}"


def call_item_id(item_id: str, number: int) -> str:
    """Return the id of the item of a candidate's call."""
    return f"fc_{item_id.removeprefix('msg_')}_{number}"


def output_text(text: str, logprobs: list[TokenLogprob] | None = None) -> ResponseText:
    """Build the content part of a message."""
    return ResponseText(text, [], logprobs if logprobs is not None else [])


def incomplete_reason(turn: Turn, outputs: Sequence[Item]) -> str | None:
    """Return OpenAI's reason for an incomplete response."""
    if turn.status == CANCELLED:
        return "cancelled"
    if turn.status != INCOMPLETE:
        return None
    return "max_output_tokens" if FINISH_LENGTH in {item.finish_reason for item in outputs} else "interrupted"


TEMPLATE_CHANGED: Literal["template_changed"] = "template_changed"


def miss_cause(reason: Any, at_token: int, detail: str, divergence: Divergence | None, page_size: int) -> MissCause:
    """Explain why a prompt is not cached from `at_token` on.

    If the chat template renders a stored reply differently within that page, the template is the reason.
    """
    if divergence is not None and divergence.token_index - page_size < at_token <= divergence.token_index:
        detail = f"the chat template renders message {divergence.message_index} differently than when it was generated"
        return MissCause(TEMPLATE_CHANGED, at_token, detail)
    return MissCause(reason, at_token, detail)
