"""The response object of a response: from its log while that exists, then from the store."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import msgspec

from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import (
    DELETED,
    IN_PROGRESS,
    ConversationTree,
    ResponseElsewhereError,
    ToolCall,
    Turn,
    no_response_error,
)
from chatcache.errors import ChatcacheError, InvalidRequestError, NotFoundError
from chatcache.gateway.json_codec import encode
from chatcache.gateway.responses.event_log import TERMINAL, ResponseLog
from chatcache.gateway.responses.objects import (
    HAS_LOGPROBS,
    SCORES,
    call_item,
    has_summary,
    incomplete_reason,
    output_items,
    output_text,
    reasoning_item,
    response_object,
)
from chatcache.gateway.schemas.fields import LOGPROBS
from chatcache.gateway.schemas.responses import OutputItem, OutputMessage, Response


class _Lifecycle(msgspec.Struct):
    """The fields of `response.created` and terminal frames that are read again."""

    response: msgspec.Raw
    receipt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _ItemDone(msgspec.Struct):
    """The frame `response.output_item.done`."""

    output_index: int
    item: msgspec.Raw


def encode_logged_response(log: ResponseLog) -> bytes:
    """Encode the response object: the final one with its receipt, or the current state.

    It refers to `log.logprobs`.
    """
    milestones = log.milestones()
    first = next(milestones)
    if first.kind in TERMINAL:
        response = _decode_final(first.data)
        return _with_member(response, b'"saved":false') if log.is_unsaved else response
    created = msgspec.json.decode(first.data, type=_Lifecycle)
    finished = [msgspec.json.decode(frame.data, type=_ItemDone) for frame in milestones]
    response = msgspec.json.decode(created.response)
    summarizes = has_summary(response)
    outputs: dict[Any, object] = {text["output_index"]: _unfinished_item(text, summarizes) for text in log.texts()}
    outputs |= {done.output_index: done.item for done in finished}
    return encode({**response, "output": [outputs[index] for index in sorted(outputs)]})


def encode_created_response(log: ResponseLog) -> bytes:
    """Encode the response object of `response.created`."""
    return bytes(msgspec.json.decode(log.created().data, type=_Lifecycle).response)


def stored_response(tree: ConversationTree, response_id: str) -> Response:
    """Build the response object of a stored response. It names log-probabilities, which are not stored, as omitted."""
    turn = tree.turns[response_id]
    outputs = tree.outputs(response_id)
    summarizes = has_summary(turn.echo)
    scores = dict(enumerate(_scores(turn)))
    items: list[OutputItem] = []
    indexes: list[int] = []
    for output in outputs:
        items += output_items(output, score=scores.get(output.index), summarizes=summarizes)
        indexes += sorted(output.parts.output_indexes)
    if len(indexes) == len(items):
        items = [item for _, item in sorted(zip(indexes, items, strict=True), key=itemgetter(0))]
    response = response_object(turn, items, incomplete_reason(turn, outputs))
    if turn.echo.get(HAS_LOGPROBS):
        response.omitted = [LOGPROBS]
    return response


def _scores(turn: Turn) -> list[float | None]:
    """Return the scores of ranked candidates; those of an imported response may be malformed."""
    try:
        return msgspec.convert(turn.echo.get(SCORES, []), list[float | None])
    except msgspec.ValidationError:
        return []


def no_stream_error(tree: ConversationTree, response_id: str) -> ChatcacheError:
    """Return the error for streaming a response without a log: another gateway has it, or it no longer exists."""
    if tree.turns[response_id].status == IN_PROGRESS:
        return ResponseElsewhereError(response_id, "stream", "stream")
    message = f"the events of {response_id[:128]} are no longer available: retrieve it without stream"
    return InvalidRequestError(message, param="stream", code="stream_expired")


async def load_response_tree(store: ConversationStore, owner: str, response_id: str) -> ConversationTree:
    """Load a response with its messages, as a part of its conversation tree.

    Raises: NotFoundError, also for a deleted response.
    """
    try:
        tree = await store.load_path(owner, await store.locate(owner, response_id), response_id, limit=0)
    except NotFoundError:
        raise no_response_error(response_id) from None
    turn = tree.turns.get(response_id)
    if turn is None or turn.status == DELETED:
        raise no_response_error(response_id)
    return tree


def _decode_final(frame: bytes) -> bytes:
    terminal = msgspec.json.decode(frame, type=_Lifecycle)
    response = bytes(terminal.response)
    if isinstance(terminal.receipt, msgspec.UnsetType):
        return response
    return _with_member(response, b'"receipt":%s' % bytes(terminal.receipt))


def _with_member(response: bytes, member: bytes) -> bytes:
    """Add a member to an encoded object."""
    return b"%s,%s}" % (response[:-1], member)


def _unfinished_item(text: Mapping[str, Any], summarizes: bool) -> OutputItem:
    """Build an output item that is still being generated."""
    item_id, candidate = text["item_id"], text["candidate"]
    if text["type"] == "function_call":
        name = ".".join(filter(None, (text.get("namespace"), text["name"])))
        call = ToolCall(text["call_id"], name, text["arguments"])
        return call_item(item_id, candidate, call, IN_PROGRESS)
    if text["type"] == "reasoning":
        return reasoning_item(item_id, candidate, text["text"], IN_PROGRESS, summarizes=summarizes)
    return OutputMessage(item_id, "assistant", "in_progress", [output_text(text["text"])], candidate)
