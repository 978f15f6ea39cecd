"""The transports: what a client sends to open a stream, and nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

# From the server's port: what to send at once, and what to send behind the server's first answer.
Request = Callable[[int], tuple[bytes, bytes]]
MAX_TOKENS = 20_000
_PROMPT = "Tell me about the tide, please."


def _post(path: str, body: dict[str, object], port: int) -> tuple[bytes, bytes]:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data, b""


def chat(port: int) -> tuple[bytes, bytes]:
    messages = [{"role": "user", "content": _PROMPT}]
    return _post("/v1/chat/completions", {"messages": messages, "stream": True, "max_tokens": MAX_TOKENS}, port)


def responses(port: int) -> tuple[bytes, bytes]:
    body: dict[str, object] = {"input": _PROMPT, "stream": True, "store": False, "max_output_tokens": MAX_TOKENS}
    return _post("/v1/responses", body, port)


def socket(port: int) -> tuple[bytes, bytes]:
    handshake = (
        f"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        f"sec-websocket-version: 13\r\nsec-websocket-key: {base64.b64encode(bytes(16)).decode()}\r\n\r\n"
    ).encode()
    body = {
        "type": "response.create",
        "input": _PROMPT,
        "store": False,
        "ignore_eos": True,
        "max_output_tokens": MAX_TOKENS,
    }
    text = json.dumps(body).encode()
    assert 125 < len(text) < 1 << 16
    return handshake, b"\x81\xfe" + len(text).to_bytes(2, "big") + bytes(4) + text  # masked with zeros


WIRES: dict[str, Request] = {"chat": chat, "responses": responses, "socket": socket}
