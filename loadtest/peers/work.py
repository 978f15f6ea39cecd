"""What is measured: each figure from one or two commands that every engine gets with the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

OUTPUT = 64


class Asked(Protocol):
    """A running engine."""

    def ask(self, **command: Any) -> dict[str, Any]: ...


class NotDone(Exception):
    """The engine does not do this."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`measure(engine, prompts)` returns its value; `prompts(count, length)` makes tokens nobody has seen."""

    name: str
    group: str
    unit: str
    more_is_better: bool
    measure: Callable[[Asked, Prompts], float]


class Prompts:
    """Random token ids: the same for every engine in one round, others in every round."""

    def __init__(self, seed: str, vocab_size: int) -> None:
        self._random, self._vocab_size = random.Random(seed), vocab_size

    def __call__(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]

    def state(self) -> Any:
        """Return where the prompts are, for `restore`."""
        return self._random.getstate()

    def restore(self, state: Any) -> None:
        """Go back there: the next engine gets the same tokens."""
        self._random.setstate(state)


def seconds(engine: Asked, prompts: list[list[int]], max_tokens: int, n: int = 1, do: str = "generate") -> float:
    """Return how long a command took. Raises: NotDone."""
    answer = engine.ask(do=do, prompts=prompts, max_tokens=max_tokens, n=n)
    if "not" in answer:
        raise NotDone(answer["not"])
    return float(answer["s"])


def decode(batch: int, length: int = 64, n: int = 1) -> Callable[[Asked, Prompts], float]:
    """Tokens/s after the first: a run of many tokens less a run of one, over fresh prompts."""

    def measure(engine: Asked, prompts: Prompts) -> float:
        first = seconds(engine, prompts(batch, length), 1, n)
        whole = seconds(engine, prompts(batch, length), OUTPUT + 1, n)
        return batch * n * OUTPUT / max(whole - first, 1e-9)

    return measure


def prefill(length: int) -> Callable[[Asked, Prompts], float]:
    return lambda engine, prompts: length / seconds(engine, prompts(1, length), 1)


def beam(width: int) -> Callable[[Asked, Prompts], float]:
    return lambda engine, prompts: seconds(engine, prompts(1, 512), OUTPUT, width, "beam")


def first_token(cached: bool) -> Callable[[Asked, Prompts], float]:
    """Milliseconds to the first token of a history, or of that history and 16 tokens more."""

    def measure(engine: Asked, prompts: Prompts) -> float:
        (history,), (more,) = prompts(1, 2048), prompts(1, 16)
        miss = seconds(engine, [history], 1)
        return 1e3 * (seconds(engine, [history + more], 1) if cached else miss)

    return measure


FIGURES = (
    Figure("decode, batch 1", "latency", "tokens/s", True, decode(1)),
    Figure("decode, batch 8", "throughput", "tokens/s", True, decode(8)),
    Figure("decode, batch 32", "throughput", "tokens/s", True, decode(32)),
    Figure("n = 8 after 1k", "nbest", "tokens/s", True, decode(1, 1024, 8)),
    Figure("beam 4, 512 + 64", "beam", "s", False, beam(4)),
    Figure("beam 8, 512 + 64", "beam", "s", False, beam(8)),
    Figure("prefill 512", "latency", "tokens/s", True, prefill(512)),
    Figure("prefill 2048", "latency", "tokens/s", True, prefill(2048)),
    Figure("first token, 2k anew", "prefix", "ms", False, first_token(cached=False)),
    Figure("first token, 2k cached + 16", "prefix", "ms", False, first_token(cached=True)),
)
GROUPS = (*dict.fromkeys(figure.group for figure in FIGURES), "start")
