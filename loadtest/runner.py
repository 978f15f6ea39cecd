"""Run the scenario: every user is one task that sends its next turn when the last answer has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx

from loadtest.client import Turn, stream_turn
from loadtest.scenario import Scenario


async def pick_model(http: httpx.AsyncClient) -> str:
    """Name of the first model served. Raises: httpx.HTTPError when the server is not there."""
    answer = await http.get("/v1/models")
    answer.raise_for_status()
    return str(answer.json()["data"][0]["id"])


async def run(
    scenario: Scenario, url: str, api_key: str | None, on_turn: Callable[[Turn], None], timeout_s: float = 120.0
) -> tuple[list[Turn], float]:
    """Return every turn (failed ones too) and the wall time in seconds; `on_turn` is called as each ends."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=scenario.users + 1)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout_s) as http:
        model = await pick_model(http)
        begun = time.perf_counter()
        chats = [_chat(http, model, scenario, user, begun, on_turn) for user in range(scenario.users)]
        turns = [turn for chat in await asyncio.gather(*chats) for turn in chat]
        return turns, time.perf_counter() - begun


async def _chat(
    http: httpx.AsyncClient, model: str, scenario: Scenario, user: int, begun: float, on_turn: Callable[[Turn], None]
) -> list[Turn]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": scenario.system_prompt()}]
    done: list[Turn] = []
    for number, question in enumerate(scenario.questions(user)):
        messages.append({"role": "user", "content": question})
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": scenario.max_tokens,
            "temperature": 0.7,
            "seed": scenario.seed + user,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        turn = Turn(user=user, turn=number, started_s=time.perf_counter() - begun)
        await stream_turn(http, body, turn)
        done.append(turn)
        on_turn(turn)
        if turn.error is not None:
            break
        messages.append({"role": "assistant", "content": turn.text})
    return done
