"""Steering: input that interrupts a running response and is answered by its successor.

response A: accepted -> A ends, incomplete ("steered") -> successor B continues from A with the input
            A has called functions                     -> pending until a response.create brings their outputs
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from chatcache.conversations.tree import Item, new_id
from chatcache.errors import ChatcacheError
from chatcache.gateway.json_codec import encode
from chatcache.gateway.schemas.requests import MAX_MESSAGES, ResponseFields

MAX_PENDING_STEERS = 8
MAX_PENDING_BYTES = 1024 * 1024
_FIELDS = frozenset({"type", "previous_response_id", "input"})
_MESSAGE_FIELDS = frozenset({"type", "role", "content"})
# Fields of a request that belong to its place in a conversation; a response that continues it does not repeat them.
_POSITION_FIELDS = (
    *("input", "conversation", "previous_item_id", "previous_response_id", "fork_at", "fork_with", "rev"),
    "continue_final_message",
)


class SteerRefusedError(ChatcacheError):
    """Steering input was rejected or could not be applied.

    `code` is OpenAI's, or "steering_unavailable" if it could not be recorded for other gateways.
    """

    status = 400
    type = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class Steer:
    """Accepted steering input for a running response.

    `input_value`: as the client sent it. `messages`: the same as a list of messages.
    """

    id: str
    input_value: object
    messages: tuple[Mapping[str, Any], ...]
    num_bytes: int


class SteerQueue:
    """The steering input of one response, in order."""

    def __init__(self) -> None:
        self._waiting: list[Steer] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, input_value: object) -> Steer:
        """Queue input. Raises: SteerRefusedError for invalid or too much input."""
        messages = parse_steer_input(input_value)
        steer = Steer(new_id("steer"), input_value, messages, len(encode(input_value)))
        if (
            len(self._waiting) >= MAX_PENDING_STEERS
            or sum(each.num_bytes for each in self._waiting) + steer.num_bytes > MAX_PENDING_BYTES
        ):
            raise SteerRefusedError(
                f"at most {MAX_PENDING_STEERS} submissions of {MAX_PENDING_BYTES} bytes together "
                "may wait for a response",
                code="too_many_pending_steers",
            )
        self._waiting.append(steer)
        return steer

    def remove(self, steer: Steer) -> None:
        """Remove input that was refused after all."""
        self._waiting.remove(steer)

    def restore(self, steer: Steer) -> None:
        """Queue input that another gateway has accepted."""
        self._waiting.append(steer)

    def pop_all(self) -> tuple[Steer, ...]:
        """Return all queued input and empty the queue."""
        taken, self._waiting = tuple(self._waiting), []
        return taken


def restored_steer(steer_id: str, input_value: object) -> Steer:
    """Return steering input that another gateway has accepted. Raises: SteerRefusedError for invalid input."""
    return Steer(steer_id, input_value, parse_steer_input(input_value), len(encode(input_value)))


def check_fields(body: Mapping[str, Any]) -> None:
    """Reject fields that `response.steer` does not have. Raises: SteerRefusedError."""
    for name in body:
        if name not in _FIELDS:
            raise SteerRefusedError(f"response.steer does not take {name[:64]!r}", code="invalid_input")


def parse_steer_input(input_value: object) -> tuple[Mapping[str, Any], ...]:
    """Convert steering input into messages. Raises: SteerRefusedError."""
    if isinstance(input_value, str):
        input_value = [{"role": "user", "content": input_value}] if input_value else []
    if not isinstance(input_value, list) or not 1 <= len(input_value) <= MAX_MESSAGES:
        raise SteerRefusedError("input must be a text or a list of user messages, and not empty", code="invalid_input")
    for index, message in enumerate(input_value):
        if not isinstance(message, dict) or not message.keys() <= _MESSAGE_FIELDS:
            raise SteerRefusedError(f"input[{index}] must be a message of type, role and content", code="invalid_input")
        if message.get("type", "message") != "message" or message.get("role") != "user":
            raise SteerRefusedError(f"input[{index}] must be a message of role user", code="invalid_input")
        if not _is_content(message.get("content")):
            raise SteerRefusedError(f"input[{index}].content must be text or input_text parts", code="invalid_input")
    return tuple(input_value)


def _is_content(content: object) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "input_text" and isinstance(part.get("text"), str)
        for part in content
    )


def response_settings(fields: ResponseFields, *shared: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a request that a response which continues it repeats, without unknown ones.

    `shared`: the fields that several routes have.
    """
    position: dict[str, Any] = dict.fromkeys(_POSITION_FIELDS)
    fields = msgspec.structs.replace(fields, **position)
    settings = [each for kind in (fields, *shared) for each in msgspec.to_builtins(kind).items()]
    return {name: value for name, value in settings if value is not None}


def successor_body(settings: Mapping[str, Any], response_id: str, steers: Sequence[Steer]) -> dict[str, Any]:
    """Build the `response.create` that continues a response with its settings."""
    return {**settings, "previous_response_id": response_id, "input": queued_input(steers, None)}


def queued_input(steers: Sequence[Steer], own_input: object) -> object:
    """Put queued steering input before a request's own input; return an invalid one as it is, to be refused."""
    if isinstance(own_input, str):
        own_input = [{"role": "user", "content": own_input}]
    if not isinstance(own_input, list | None):
        return own_input
    return [*(message for steer in steers for message in steer.messages), *(own_input or ())]


def required_input(output: Item) -> list[dict[str, str]]:
    """Return the function outputs that a reply waits for, as items without their `output`."""
    return [
        {"type": "function_call_output", "call_id": call.call_id, "name": call.name}
        for call in output.parts.finished_calls
    ]


def has_function_outputs(input_value: object) -> bool:
    """Return whether the input of a request has outputs of functions."""
    items = input_value if isinstance(input_value, list) else ()
    return any(isinstance(item, dict) and item.get("type") == "function_call_output" for item in items)


def not_steerable_error(terminal: str | None) -> SteerRefusedError:
    """Return the error for steering a response that has ended or is about to end."""
    if terminal == "response.completed":
        return SteerRefusedError("the response has completed", code="response_already_completed")
    return SteerRefusedError("the response takes no more input", code="response_not_active")


def steer_json(steer: Steer, response_id: str) -> dict[str, object]:
    return {"id": steer.id, "previous_response_id": response_id}


def steer_failed_fields(
    error: ChatcacheError, input_value: object, response_id: str, steer_id: str | None = None
) -> dict[str, object]:
    """Return the fields of `response.steer.failed`, which contain the input again."""
    refusal = {"code": error.code, "message": error.message, "type": "invalid_request_error"}
    steer = {"input": input_value, "previous_response_id": response_id}
    return {"error": refusal, "steer": {**steer, "id": steer_id} if steer_id is not None else steer}
