"""One message of a short conversation, listed again and again on 64 connections."""

from __future__ import annotations

from functools import partial

import httpx

from loadtest.attacks.harness import Attack, Target, repeat

NUM_CONNECTIONS = 64


async def run(target: Target) -> None:
    """Create the conversation and read it until cancelled."""
    async with target.attacker() as http:
        message = {"type": "message", "role": "user", "content": "hello"}
        created = await http.post("/v1/conversations", json={"items": [message]})
        created.raise_for_status()
    path = f"/v1/conversations/{created.json()['id']}/items"
    await repeat(NUM_CONNECTIONS, partial(_list, path), target)


async def _list(path: str, http: httpx.AsyncClient, number: int) -> None:
    (await http.get(path)).raise_for_status()


ATTACK = Attack("many-reads", "list the items of a short conversation, on 64 connections", run)
