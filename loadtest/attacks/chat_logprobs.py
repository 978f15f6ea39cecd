"""Chat completions with the most log-probabilities in one answer: 64 candidates of 200 tokens with 20 alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import httpx

from loadtest.attacks.harness import Attack, Target, repeat

NUM_CONNECTIONS = 2
_MESSAGES = [{"role": "user", "content": "Tell me a story."}]
_LOAD = {"messages": _MESSAGES, "n": 64, "max_tokens": 200, "ignore_eos": True}
_BODY = {**_LOAD, "logprobs": True, "top_logprobs": 20}


async def run(target: Target) -> None:
    """Create completions until cancelled."""
    await repeat(NUM_CONNECTIONS, partial(_complete, _BODY), target)


async def run_load(target: Target) -> None:
    """Create the same completions without log-probabilities: the engine computes as many tokens at once."""
    await repeat(NUM_CONNECTIONS, partial(_complete, _LOAD), target)


async def _complete(body: Mapping[str, object], http: httpx.AsyncClient, number: int) -> None:
    await http.post("/v1/chat/completions", json=body)


ATTACK = Attack(
    "chat-logprobs", "chat completions with 268,800 log-probabilities each, on 2 connections", run, run_load
)
