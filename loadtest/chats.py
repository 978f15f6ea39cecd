"""Multi-turn chats that share a system prompt: the texts, and the requests that send them.

Closed loop: each user sends the next turn when the last answer has ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from loadtest.client import Turn, stream_turn

RULES = (
    "You are a patient assistant of a small workshop.",
    "Answer in plain words and stay friendly.",
    "If a question is unclear, say what you understood and answer that.",
    "Never invent names, prices or dates.",
    "Keep to the topic the visitor came with.",
    "When you count, count aloud.",
    "When you tell a story, give it a beginning and an end.",
)
QUESTIONS = (
    "hello, my name is {name}",
    "what is {a} + {b}?",
    "tell me a short story about a {thing}",
    "spell the word {thing}",
    "what day comes after {day}?",
    "what is my name?",
    "count from {small} to {large}",
    "what is a KV page?",
)
NAMES = ("Ada", "Milo", "Noor", "Tara", "Ivan", "Zoe", "Omar", "Lena")
THINGS = ("dragon", "garden", "river", "lantern", "kitten", "robot", "castle", "boat")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True, slots=True)
class Scenario:
    """`users` chats of `turns` turns each, with a shared system prompt of `system_words` words."""

    users: int
    turns: int
    max_tokens: int
    system_words: int
    seed: int

    def system_prompt(self) -> str:
        """Return the text at the start of every chat; it depends on the seed only."""
        rng = random.Random(self.seed)
        words = f"Run {self.seed}.".split()
        while len(words) < self.system_words:
            words += rng.choice(RULES).split()
        return " ".join(words[: self.system_words])

    def questions(self, user: int) -> list[str]:
        """Return the turns of a user; they depend on the seed and the user only."""
        rng = random.Random(f"{self.seed}/{user}")
        questions = []
        for _ in range(self.turns):
            small = rng.randrange(1, 9)
            questions.append(
                rng.choice(QUESTIONS).format(
                    name=rng.choice(NAMES),
                    thing=rng.choice(THINGS),
                    day=rng.choice(DAYS),
                    a=rng.randrange(10, 90),
                    b=rng.randrange(10, 90),
                    small=small,
                    large=small + rng.randrange(3, 9),
                )
            )
        return questions


async def first_model(http: httpx.AsyncClient) -> str:
    """Return the name of the first model that the server lists."""
    response = await http.get("/v1/models")
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


async def run_chats(
    scenario: Scenario, url: str, api_key: str | None, on_turn: Callable[[Turn], None], timeout_s: float = 120.0
) -> tuple[list[Turn], float]:
    """Return all turns, with failed ones, and the wall time in seconds.

    `on_turn` is called when a turn ends. Raises: httpx.HTTPError if the server does not answer.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=scenario.users + 1)
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout_s) as http:
        model = await first_model(http)
        start = time.perf_counter()
        chats = [_run_chat(http, model, scenario, user, start, on_turn) for user in range(scenario.users)]
        turns = [turn for chat in await asyncio.gather(*chats) for turn in chat]
        return turns, time.perf_counter() - start


async def _run_chat(
    http: httpx.AsyncClient, model: str, scenario: Scenario, user: int, start: float, on_turn: Callable[[Turn], None]
) -> list[Turn]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": scenario.system_prompt()}]
    turns: list[Turn] = []
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
        turn = await stream_turn(http, body, Turn(user=user, turn=number, started_s=time.perf_counter() - start))
        turns.append(turn)
        on_turn(turn)
        if turn.error is not None:
            break
        messages.append({"role": "assistant", "content": turn.text})
    return turns
