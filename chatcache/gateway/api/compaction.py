"""Compaction: the model replaces a long conversation by a summary, which later requests send in its place.

    input ..., compaction_trigger  ->  the model answers QUESTION  ->  output: one item `compaction` with the summary
    input: compaction, ...         ->  the summary is a message of the prompt

The summary is opaque for clients (OpenAI's field `encrypted_content`), and not secret: it is text in base64.
"""

from __future__ import annotations

import base64
import binascii
from typing import TypeGuard

import msgspec

from chatcache.errors import InvalidRequestError
from chatcache.gateway.schemas.requests import MAX_MESSAGES, MessageFields, ResponseFields

TRIGGER = "compaction_trigger"
MAX_SUMMARY_TOKENS = 4096
SUMMARY_HEAD = "Summary of the conversation so far:\n\n"
QUESTION = (
    "Summarize this conversation, so that it can be continued with nothing but the summary. Keep the user's goals and "
    "constraints, decisions, names, file paths, commands and their results, and what remains to be done. Call no "
    "functions. Answer with the summary alone."
)
_PREFIX = "chatcache."


def is_compaction(fields: ResponseFields) -> bool:
    """Check whether the input ends with a trigger."""
    return _has_trigger(fields.input)


def _has_trigger(given: str | list[MessageFields] | None) -> TypeGuard[list[MessageFields]]:
    return isinstance(given, list) and bool(given) and given[-1].type == TRIGGER


def with_question(given: str | list[MessageFields] | None) -> str | list[MessageFields] | None:
    """Replace the trigger at the end of an input, if it has one, by the question for a summary."""
    return [*given[:-1], MessageFields(role="user", content=QUESTION)] if _has_trigger(given) else given


def to_summary_request(fields: ResponseFields) -> ResponseFields:
    """Replace the trigger at the end of the input by the question for a summary.

    The tools stay in the prompt, whose pages are reused, but none is called. Nothing is stored.
    """
    return msgspec.structs.replace(
        fields,
        input=with_question(fields.input),
        tool_choice="none" if fields.tools else None,
        store=False,
        background=None,
        text=None,
        max_output_tokens=fields.max_output_tokens or MAX_SUMMARY_TOKENS,
    )


def with_trigger(given: object) -> list[object]:
    """Return the `input` of a request, as a list that ends with a trigger. Raises: InvalidRequestError."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given if given is not None else []
    if not isinstance(items, list) or len(items) >= MAX_MESSAGES:
        raise InvalidRequestError(f"input must be a string or an array of less than {MAX_MESSAGES}", param="input")
    return [*items, {"type": TRIGGER}]


def encode_summary(text: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode()


def decode_summary(content: str, param: str) -> str:
    """Return the summary of a `compaction` item. Raises: InvalidRequestError for one of another server."""
    try:
        if not content.startswith(_PREFIX):
            raise ValueError
        return base64.b64decode(content[len(_PREFIX) :], altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidRequestError(f"{param}: not a summary of this server", param=param) from None
