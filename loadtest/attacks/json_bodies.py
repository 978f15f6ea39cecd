"""Bodies of up to 4 MB that are expensive to decode, on four connections."""

from __future__ import annotations

import json

import httpx

from loadtest.attacks.harness import Attack, Target, repeat

NUM_CONNECTIONS = 4
_REQUEST = b'"messages":[{"role":"user","content":"x"}],"max_tokens":1}'
_TEXT = [{"role": "user", "content": "ab c " * 780_000}]
BODIES: dict[str, bytes] = {
    "990,000 integers": b'{"x":[' + b",".join([b"1"] * 990_000) + b"]," + _REQUEST,
    "990,000 floats": b'{"x":[' + b",".join([b"1.5"] * 990_000) + b"]," + _REQUEST,
    "985,000 empty strings": b'{"x":["' + b"," * 60_000 + b'",' + b",".join([b'""'] * 985_000) + b"]," + _REQUEST,
    "49,000 objects": b'{"x":[' + b",".join([b'{"a":1}'] * 49_000) + b"]," + _REQUEST,
    "98,000 members": b'{"x":{' + b",".join(b'"%07d":1' % at for at in range(98_000)) + b"}," + _REQUEST,
    "3.9 MB of text": json.dumps({"messages": _TEXT, "max_tokens": 1}).encode(),
    "680,000 escapes": b'{"x":"' + b"\\u00e9" * 680_000 + b'",' + _REQUEST,
}


async def run(target: Target) -> None:
    """Post the bodies until cancelled; the answer does not matter."""
    bodies = list(BODIES.values())
    num_sent = 0

    async def post(http: httpx.AsyncClient, number: int) -> None:
        nonlocal num_sent
        num_sent += 1
        headers = {"content-type": "application/json"}
        body = bodies[num_sent % len(bodies)]
        await http.post("/v1/chat/completions", content=body, headers=headers)

    await repeat(NUM_CONNECTIONS, post, target)


ATTACK = Attack("json-bodies", "bodies that are expensive to decode, on 4 connections", run)
