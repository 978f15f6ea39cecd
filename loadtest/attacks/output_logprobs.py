"""Background responses with the most log-probabilities: 64 candidates of 200 tokens with 20 alternatives each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import httpx

from loadtest.attacks.harness import Attack, Target, repeat

NUM_CONNECTIONS = 2
_LOAD = {"input": "Tell me a story.", "n": 64, "max_output_tokens": 200, "ignore_eos": True, "background": True}
_BODY = {**_LOAD, "include": ["message.output_text.logprobs"], "top_logprobs": 20}


async def run(target: Target) -> None:
    """Create responses and read each when it has ended, until cancelled."""
    await repeat(NUM_CONNECTIONS, partial(_respond, _BODY), target)


async def run_load(target: Target) -> None:
    """Create the same responses without log-probabilities: the engine computes as many tokens at once."""
    await repeat(NUM_CONNECTIONS, partial(_respond, _LOAD), target)


async def _respond(body: Mapping[str, object], http: httpx.AsyncClient, number: int) -> None:
    created = await http.post("/v1/responses", json=body)
    if created.status_code != 200:  # the queue is full
        await asyncio.sleep(0.5)
        return
    path = f"/v1/responses/{created.json()['id']}"
    while True:
        await asyncio.sleep(1.0)
        if b'"status":"in_progress"' not in (await http.get(path)).content[:200]:
            return


ATTACK = Attack(
    "output-logprobs", "background responses with 268,800 log-probabilities each, on 2 connections", run, run_load
)
