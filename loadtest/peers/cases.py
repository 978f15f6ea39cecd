"""The benchmark cases, made of commands that all engines get with the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from chatcache.bench.contention import NUM_BUSY, busy_processes

NUM_OUTPUT_TOKENS = 64


class Engine(Protocol):
    """A running engine that executes commands, on `cpus` (None: on all)."""

    @property
    def cpus(self) -> Collection[int] | None: ...

    def execute(self, **command: Any) -> dict[str, Any]: ...


class UnsupportedError(Exception):
    """The engine does not support the command."""


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark. `measure(engine, prompts)` returns its value."""

    name: str
    group: str
    unit: str
    more_is_better: bool
    measure: Callable[[Engine, Prompts], float]


class Prompts:
    """Random token ids: the same for all engines in one round, different in each round."""

    def __init__(self, seed: str, vocab_size: int) -> None:
        self._random, self._vocab_size = random.Random(seed), vocab_size

    def __call__(self, count: int, length: int) -> list[list[int]]:
        """Return prompts that were not used before."""
        return [[self._random.randrange(self._vocab_size) for _ in range(length)] for _ in range(count)]

    def state(self) -> Any:
        """Return the state of the generator, for `restore`."""
        return self._random.getstate()

    def restore(self, state: Any) -> None:
        """Set the state of the generator, so that the next engine gets the same tokens."""
        self._random.setstate(state)


def seconds(engine: Engine, prompts: list[list[int]], max_tokens: int, n: int = 1, do: str = "generate") -> float:
    """Run a command in an engine and return its duration in seconds. Raises: UnsupportedError."""
    result = engine.execute(do=do, prompts=prompts, max_tokens=max_tokens, n=n)
    if "unsupported" in result:
        raise UnsupportedError(result["unsupported"])
    return float(result["s"])


def decode(batch: int, length: int = 64, n: int = 1) -> Callable[[Engine, Prompts], float]:
    """Return a function that measures decode speed in tokens/s, without the first token.

    It subtracts the time of one token from the time of many.
    """

    def measure(engine: Engine, prompts: Prompts) -> float:
        first = seconds(engine, prompts(batch, length), 1, n)
        whole = seconds(engine, prompts(batch, length), NUM_OUTPUT_TOKENS + 1, n)
        return batch * n * NUM_OUTPUT_TOKENS / max(whole - first, 1e-9)

    return measure


def share_of_idle(batch: int, num_busy: int) -> Callable[[Engine, Prompts], float]:
    """Return a function that measures decode speed next to busy processes, relative to that without them."""

    def measure(engine: Engine, prompts: Prompts) -> float:
        idle = decode(batch)(engine, prompts)
        with busy_processes(num_busy, engine.cpus):
            return decode(batch)(engine, prompts) / idle

    return measure


def prefill(length: int) -> Callable[[Engine, Prompts], float]:
    """Return a function that measures the tokens/s of one prompt until the first new token."""
    return lambda engine, prompts: length / seconds(engine, prompts(1, length), 1)


def beam(width: int) -> Callable[[Engine, Prompts], float]:
    """Return a function that measures the seconds of one beam search."""
    return lambda engine, prompts: seconds(engine, prompts(1, 512), NUM_OUTPUT_TOKENS, width, "beam")


def first_token(cached: bool) -> Callable[[Engine, Prompts], float]:
    """Return a function that measures the ms to the first token after a history of 2,048 tokens.

    If `cached`, of that history with 16 more tokens, after the history itself was computed.
    """

    def measure(engine: Engine, prompts: Prompts) -> float:
        (history,), (more,) = prompts(1, 2048), prompts(1, 16)
        miss = seconds(engine, [history], 1)
        return 1e3 * (seconds(engine, [history + more], 1) if cached else miss)

    return measure


CASES = (
    Case("decode, batch 1", "latency", "tokens/s", True, decode(1)),
    Case("decode, batch 8", "throughput", "tokens/s", True, decode(8)),
    Case("decode, batch 32", "throughput", "tokens/s", True, decode(32)),
    Case("n = 8 after 1k", "nbest", "tokens/s", True, decode(1, 1024, 8)),
    Case("beam 4, 512 + 64", "beam", "s", False, beam(4)),
    Case("beam 8, 512 + 64", "beam", "s", False, beam(8)),
    Case("prefill 512", "latency", "tokens/s", True, prefill(512)),
    Case("prefill 2048", "latency", "tokens/s", True, prefill(2048)),
    Case("first token, 2k anew", "prefix", "ms", False, first_token(cached=False)),
    Case("first token, 2k cached + 16", "prefix", "ms", False, first_token(cached=True)),
    *(
        Case(f"decode, batch {batch}, {count} busy", "contention", "of idle", True, share_of_idle(batch, count))
        for batch in (1, 8)
        for count in NUM_BUSY
    ),
)
GROUPS = (*dict.fromkeys(case.group for case in CASES), "start")
