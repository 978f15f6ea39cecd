"""What the users say: one shared system prompt, then short turns that differ from user to user."""

from __future__ import annotations

import random
from dataclasses import dataclass

_RULES = (
    "You are a patient assistant of a small workshop.",
    "Answer in plain words and stay friendly.",
    "If a question is unclear, say what you understood and answer that.",
    "Never invent names, prices or dates.",
    "Keep to the topic the visitor came with.",
    "When you count, count aloud.",
    "When you tell a story, give it a beginning and an end.",
)
_ASKS = (
    "hello, my name is {name}",
    "what is {a} + {b}?",
    "tell me a short story about a {thing}",
    "spell the word {thing}",
    "what day comes after {day}?",
    "what is my name?",
    "count from {small} to {large}",
    "what is a KV page?",
)
_NAMES = ("Ada", "Milo", "Noor", "Tara", "Ivan", "Zoe", "Omar", "Lena")
_THINGS = ("dragon", "garden", "river", "lantern", "kitten", "robot", "castle", "boat")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True, slots=True)
class Scenario:
    """`users` chats of `turns` turns each; `system_words` is the length of the system prompt they share."""

    users: int
    turns: int
    max_tokens: int
    system_words: int
    seed: int

    def system_prompt(self) -> str:
        """The text every chat begins with, the same for all users of a run and different between seeds."""
        rng = random.Random(self.seed)
        words = f"Run {self.seed}.".split()
        while len(words) < self.system_words:
            words += rng.choice(_RULES).split()
        return " ".join(words[: self.system_words])

    def questions(self, user: int) -> list[str]:
        """The user's turns, reproducible by (seed, user)."""
        rng = random.Random(f"{self.seed}/{user}")
        asked = []
        for _ in range(self.turns):
            small = rng.randrange(1, 9)
            asked.append(
                rng.choice(_ASKS).format(
                    name=rng.choice(_NAMES),
                    thing=rng.choice(_THINGS),
                    day=rng.choice(_DAYS),
                    a=rng.randrange(10, 90),
                    b=rng.randrange(10, 90),
                    small=small,
                    large=small + rng.randrange(3, 9),
                )
            )
        return asked
