"""How a response stands: from its log while that is kept, from the tree afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from chatcache.conversations.store import ConversationStore
from chatcache.conversations.tree import DELETED, IN_PROGRESS, ConversationTree, ToolCall
from chatcache.errors import InvalidRequestError, NotFoundError
from chatcache.gateway.json_codec import encode
from chatcache.gateway.responses.event_log import TERMINAL, ResponseLog
from chatcache.gateway.responses.objects import (
    call_item,
    incomplete_reason,
    output_items,
    output_text,
    reasoning_item,
    response_object,
)
from chatcache.gateway.schemas.responses import OutputItem, OutputMessage, Response


class _Lifecycle(msgspec.Struct):
    """`response.created` and the terminal frames, as far as they are read again."""

    response: msgspec.Raw
    receipt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Finished(msgspec.Struct):
    """`response.output_item.done`."""

    output_index: int
    item: dict[str, Any]


def encode_logged_response(log: ResponseLog) -> bytes:
    """The response object: the final one, with its receipt if it was cancelled, or all that is known so far."""
    milestones = log.milestones()
    end = next((frame for frame in milestones if frame.kind in TERMINAL), None)
    if end is not None:
        return _with(_final(end.data), b'"saved":false') if log.is_unsaved else _final(end.data)
    created = msgspec.json.decode(milestones[0].data, type=_Lifecycle)
    finished = [msgspec.json.decode(frame.data, type=_Finished) for frame in milestones[1:]]
    outputs: dict[Any, object] = {text["output_index"]: _unfinished(text) for text in log.texts()}
    outputs |= {each.output_index: each.item for each in finished}
    response = msgspec.json.decode(created.response)
    return encode({**response, "output": [outputs[index] for index in sorted(outputs)]})


def encode_created_response(log: ResponseLog) -> bytes:
    """The response object as it was when the response began."""
    return bytes(msgspec.json.decode(log.milestones()[0].data, type=_Lifecycle).response)


def stored_response(tree: ConversationTree, response_id: str) -> Response:
    """The response object. Log-probabilities are not stored."""
    turn = tree.turns[response_id]
    outputs = tree.outputs(response_id)
    items = [each for output in outputs for each in output_items(output)]
    return response_object(turn, items, incomplete_reason(turn, outputs))


def stream_expired_error(response_id: str) -> InvalidRequestError:
    message = f"the events of {response_id[:128]} are not kept here any more: retrieve it without stream"
    return InvalidRequestError(message, param="stream", code="stream_expired")


async def load_response_tree(store: ConversationStore, owner: str, response_id: str) -> ConversationTree:
    """The tree that holds a stored response. Raises: NotFoundError, also for one that was deleted."""
    missing = NotFoundError(f"no response {response_id[:128]!r}", param="response_id")
    try:
        tree = await store.load(owner, await store.locate(owner, response_id))
    except NotFoundError:
        raise missing from None
    turn = tree.turns.get(response_id)
    if turn is None or turn.status == DELETED:
        raise missing
    return tree


def _final(frame: bytes) -> bytes:
    end = msgspec.json.decode(frame, type=_Lifecycle)
    response = bytes(end.response)
    if isinstance(end.receipt, msgspec.UnsetType):
        return response
    return _with(response, b'"receipt":%s' % bytes(end.receipt))


def _with(response: bytes, member: bytes) -> bytes:
    """An encoded object with one more member."""
    return b"%s,%s}" % (response[:-1], member)


def _unfinished(text: Mapping[str, Any]) -> OutputItem:
    """An output item that is still growing."""
    item_id, candidate = text["item_id"], text["candidate"]
    if text["type"] == "function_call":
        call = ToolCall(text["call_id"], text["name"], text["arguments"])
        return call_item(item_id, candidate, call, IN_PROGRESS)
    if text["type"] == "reasoning":
        return reasoning_item(item_id, candidate, text["text"], IN_PROGRESS)
    return OutputMessage(item_id, "assistant", "in_progress", [output_text(text["text"])], candidate)
