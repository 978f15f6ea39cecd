"""The plan of a run: when each request is sent, how long prompt and reply are, and which tokens the prompt has.

Everything is drawn from a seed before the run, so that arrivals depend neither on the server nor on its replies. A
conversation arrives at its planned time; its later turns are sent a planned think time after the previous reply.

Prompts are sequences of units, numbers below the size of an alphabet in which one unit is one token; `server` turns
them into token ids or text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from loadtest.lengths import LengthDistribution
from loadtest.open_loop.traces import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One request. Its prompt is the history of the conversation followed by `num_prompt_tokens` new tokens.

    `block_ids` determines the tokens of a prompt from a block-hash trace. `num_ideal_cached`: how many tokens of such a
    prompt are found in an infinite cache. `think_s`: pause after the previous reply.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    think_s: float = 0.0
    block_ids: tuple[int, ...] = ()
    num_ideal_cached: int = 0


@dataclass(frozen=True, slots=True)
class PlannedConversation:
    """Turns of one user, the first of which is sent `at_s` seconds after the start of the run."""

    at_s: float
    turns: tuple[PlannedTurn, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All conversations of a run in order of their arrival, within `window_s` seconds.

    `block_tokens`: tokens of one block of a block-hash trace. `num_cut`: requests shortened to the length limits.
    """

    conversations: tuple[PlannedConversation, ...]
    window_s: float
    seed: str
    block_tokens: int = BLOCK_TOKENS
    num_cut: int = 0

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def rate(self) -> float:
        """Planned requests per second."""
        return self.num_requests / self.window_s


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """How lengths are fitted to a server: multiplied by `scale`, then cut to the maxima, in tokens."""

    scale: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None

    def fit(self, num_prompt: int, num_output: int) -> tuple[int, int]:
        return _fit(num_prompt, self.scale, self.max_prompt), _fit(num_output, self.scale, self.max_output)

    def cuts(self, num_prompt: int, num_output: int) -> bool:
        """Whether the maxima, not only the scale, change these lengths."""
        return self.fit(num_prompt, num_output) != LengthLimits(self.scale).fit(num_prompt, num_output)


def _fit(length: int, scale: float, limit: int | None) -> int:
    scaled = max(round(length * scale), 1)
    return scaled if limit is None else min(scaled, limit)


@dataclass(frozen=True, slots=True)
class Turns:
    """Shape of a synthetic conversation: number of turns, and the mean of the exponential think times, in seconds."""

    count: int = 1
    mean_think_s: float = 0.0


def plan_poisson(
    rate: float, window_s: float, lengths: LengthDistribution, limits: LengthLimits, turns: Turns, seed: str
) -> Plan:
    """Plan Poisson arrivals: exponential times between conversations, `rate` requests per second in all."""
    rng = random.Random(f"{seed}/arrivals")
    gaps = iter(lambda: rng.expovariate(rate / turns.count), None)
    times = list(takewhile(lambda at_s: at_s < window_s, accumulate(gaps)))
    drawn = [[lengths.sample(rng) for _ in range(turns.count)] for _ in times]
    thinks = [[_think_s(rng, turns) if number else 0.0 for number in range(turns.count)] for _ in times]
    conversations = tuple(
        PlannedConversation(
            at_s,
            tuple(PlannedTurn(*limits.fit(*each), think_s) for each, think_s in zip(sizes, pauses, strict=True)),
        )
        for at_s, sizes, pauses in zip(times, drawn, thinks, strict=True)
    )
    num_cut = sum(limits.cuts(*each) for sizes in drawn for each in sizes)
    return Plan(conversations, window_s, seed, num_cut=num_cut)


def _think_s(rng: random.Random, turns: Turns) -> float:
    return rng.expovariate(1 / turns.mean_think_s) if turns.mean_think_s else 0.0


def scale_to_rate(trace: Sequence[Sequence[TraceRequest]], rate: float, window_s: float) -> float:
    """Return the factor of the times with which as many requests of a trace arrive as `rate` asks for.

    The trace is taken from its start. Raises: ValueError if it has too few requests.
    """
    num_left = max(round(rate * window_s), 1)
    for turns in trace:
        if num_left <= 0:
            return window_s / turns[0].at_s * (1 + 1e-9) if turns[0].at_s else 1.0
        num_left -= len(turns)
    if num_left > 0:
        raise ValueError(f"the trace has {num_left} requests too few for {rate:g} requests/s in {window_s:g} s")
    return window_s / (trace[-1][0].at_s or window_s) * (1 - 1e-9)  # the whole trace, with its last arrival


def plan_trace(
    trace: Sequence[Sequence[TraceRequest]], time_scale: float, window_s: float, limits: LengthLimits, seed: str
) -> Plan:
    """Plan the first requests of a trace: arrivals within `window_s` after times were multiplied by `time_scale`.

    Think times stay as recorded. The scale of the lengths applies to blocks, too, so the reuse of prefixes stays that
    of the trace.
    """
    block_tokens = max(round(BLOCK_TOKENS * limits.scale), 1)
    chosen = [turns for turns in trace if turns[0].at_s * time_scale < window_s]
    seen: dict[int, int] = {}
    conversations = [
        PlannedConversation(
            turns[0].at_s * time_scale, tuple(_plan_turn(turn, limits, block_tokens, seen) for turn in turns)
        )
        for turns in chosen
    ]
    num_cut = sum(limits.cuts(turn.num_prompt_tokens, turn.num_output_tokens) for turns in chosen for turn in turns)
    return Plan(tuple(conversations), window_s, seed, block_tokens, num_cut)


def _plan_turn(turn: TraceRequest, limits: LengthLimits, block_tokens: int, seen: dict[int, int]) -> PlannedTurn:
    """Plan one request. `seen`: tokens of each block that an infinite cache holds, to which those of this are added."""
    num_prompt, num_output = limits.fit(turn.num_prompt_tokens, turn.num_output_tokens)
    block_ids = turn.block_ids[: -(-num_prompt // block_tokens)]
    num_cached, is_cached = 0, True
    for index, block in enumerate(block_ids):
        num_here = min(num_prompt - index * block_tokens, block_tokens)
        if is_cached:
            num_cached += min(seen.get(block, 0), num_here)
            is_cached = seen.get(block, 0) >= block_tokens
        seen[block] = max(seen.get(block, 0), num_here)
    return PlannedTurn(num_prompt, num_output, turn.think_s, block_ids, min(num_cached, num_prompt - 1))


class PromptTokens:
    """Draws the units of prompts, each below `num_units`, from the seed of a plan."""

    def __init__(self, plan: Plan, num_units: int) -> None:
        self._seed, self._block_tokens = plan.seed, plan.block_tokens
        self._units = range(num_units)

    def draw(self, turn: PlannedTurn, conversation: int, number: int) -> list[int]:
        """Return the new units of a turn, the `number`-th of the given conversation."""
        units: list[int] = []
        for block in turn.block_ids:
            units += self._choose(f"block {block}", self._block_tokens)
        del units[turn.num_prompt_tokens :]
        return units + self._choose(f"{conversation}/{number}", turn.num_prompt_tokens - len(units))

    def _choose(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self._seed}/{name}").choices(self._units, k=count)
