"""Seeded fuzzing of POST bodies: responses are well-formed, and the error log stays empty."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from tests.gateway.mutator import Message, Mutator
from tests.gateway.serving import Server, read_all, split_response

pytestmark = pytest.mark.slow

USER: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
CALLED: list[Any] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SCHEMA: Message = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]}
FORMAT: Message = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
VALID: dict[str, list[Message]] = {
    "/v1/chat/completions": [
        {"messages": USER, "max_tokens": 2, "n": 2, "logprobs": True, "top_logprobs": 2, "logit_bias": {"1": 5}},
        {"messages": CALLED, "max_tokens": 2, "tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False},
        {"messages": USER, "max_tokens": 2, "beam_width": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": USER, "max_tokens": 2, "response_format": FORMAT, "seed": 1, "stop": ["a", "b"]},
    ],
    "/v1/completions": [
        {"prompt": ["Hi", [1, 2]], "max_tokens": 1, "echo": True, "logprobs": 1},
        {"prompt": [1, 2, 3], "max_tokens": 1, "prompt_logprobs": 1, "structured_outputs": {"choice": ["a", "b"]}},
    ],
    "/v1/embeddings": [
        {"input": ["Hi", "there"], "encoding_format": "base64", "dimensions": 2, "user": "x"},
        {"input": [[1, 2], [3]], "model": None, "priority": 0, "cache_salt": "x"},
    ],
    "/v1/score": [{"text_1": "Hi", "text_2": ["there", "you"]}, {"queries": ["a"], "documents": "b"}],
    "/v1/rerank": [{"query": "Hi", "documents": ["there", {"text": "you"}], "top_n": 1, "return_documents": False}],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 2, "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"]},
        {"input": [{"type": "message", "role": "user", "content": "Hi"}], "max_output_tokens": 2, "store": False},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}], "max_output_tokens": 2},
    ],
    "/v1/responses/input_tokens": [{"input": "Hi", "instructions": "Be short.", "conversation": {"id": "x"}}],
    "/v1/conversations": [{"items": USER, "metadata": {"a": "b"}, "title": "x"}],
    "/v1/conversations/import": [
        {"version": 1, "conversation": {"id": "x"}, "items": [{"id": "m", "parent_id": None}]}
    ],
    "/tokenize": [{"prompt": "Hi"}, {"messages": USER, "add_generation_prompt": True}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/v1/cache/explain": [{"messages": USER}, {"prompt": [1, 2]}, {"input": "Hi", "previous_item_id": "msg_x"}],
}


def _post(server: Server, path: str, data: bytes) -> tuple[int, dict[str, str], Any]:
    """As bytes are: what is no JSON at all too."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\nconnection: close\r\n"
    with server.connect() as connection:
        connection.sendall(
            f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
        )
        return split_response(read_all(connection))


def _fuzz(server: Server, seed: int, num_bodies: int) -> None:
    pick, mutators = random.Random(seed), {path: Mutator(seed, bodies) for path, bodies in VALID.items()}
    for _ in range(num_bodies):
        path = pick.choice(list(VALID))
        message = mutators[path].message()
        data = message if isinstance(message, bytes) else message.encode()
        status, headers, answer = _post(server, path, data)
        assert status < 500, (path, data[:500], answer)
        assert headers["x-request-id"], (path, data[:500])
        assert "Traceback" not in str(answer) and 'File "' not in str(answer), (path, data[:500], answer)
        if status >= 400:
            assert set(answer["error"]) == {"message", "type", "param", "code"}, (path, data[:500], answer)


def _check(server: Server, caplog: pytest.LogCaptureFixture, seed: int, num_bodies: int) -> None:
    _fuzz(server, seed, num_bodies)
    server.wait_idle()
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_mutated_bodies_get_well_formed_responses(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    _check(server, caplog, seed=6, num_bodies=1500)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_many_mutated_bodies_get_well_formed_responses(
    server: Server, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    _check(server, caplog, seed=seed, num_bodies=5_000)
