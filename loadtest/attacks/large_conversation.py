"""A conversation of 40,960 messages, or what the server allows, of which eight connections list one again and again."""

from __future__ import annotations

from functools import partial

import httpx

from loadtest.attacks.harness import Attack, Target, repeat

NUM_POSTS = 40
NUM_ITEMS = 1024  # per request: the most that one may add
NUM_CONNECTIONS = 8
_TEXT = "hello there friend " * 8


async def run(target: Target) -> None:
    """Build the conversation, as far as the server accepts it, and read it until cancelled."""
    async with target.attacker() as http:
        created = await http.post("/v1/conversations", json={})
        created.raise_for_status()
        path = f"/v1/conversations/{created.json()['id']}/items"
        items = [
            {"type": "message", "role": ("user", "assistant")[at % 2], "content": _TEXT} for at in range(NUM_ITEMS)
        ]
        for _ in range(NUM_POSTS):
            added = await http.post(path, json={"items": items})
            if added.status_code == 400:  # the limit of items per conversation
                break
            added.raise_for_status()
    await repeat(NUM_CONNECTIONS, partial(_list_one, path), target)


async def _list_one(path: str, http: httpx.AsyncClient, number: int) -> None:
    (await http.get(path, params={"limit": 1})).raise_for_status()


ATTACK = Attack("large-conversation", "list one item of a conversation of 40,960, on 8 connections", run)
