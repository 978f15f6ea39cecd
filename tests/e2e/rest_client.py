"""REST calls that prepare conversations for the page tests."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any


def call(server: str, method: str, path: str, body: Any = None) -> Any:
    """Send one request and return the decoded response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        server + path, data=data, method=method, headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def create_conversation(server: str, texts: Sequence[str], **fields: Any) -> str:
    """Create a conversation of alternating user and assistant messages and return its id."""
    roles = ("user", "assistant")
    items = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    made = call(server, "POST", "/v1/conversations", {"items": items, **fields})
    return str(made["id"])


def create_conversation_with_call(server: str) -> str:
    """Create a conversation whose answer calls two functions, one with an output and a second answer; return its id."""
    call_item = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
    items = [
        {"role": "user", "content": "Weather?"},
        call_item,
        {**call_item, "call_id": "call_2", "name": "time"},
        {"type": "function_call_output", "call_id": "call_1", "output": '{"degrees": 21}'},
        {"role": "assistant", "content": "It is warm."},
    ]
    return str(call(server, "POST", "/v1/conversations", {"items": items})["id"])
