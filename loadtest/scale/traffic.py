"""Traffic of the simulation: drawn conversations and recorded block-hash traces, by scenario."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

from loadtest.open_loop.traces import BLOCK_TOKENS, TraceRequest, read_trace

Node = tuple[object, ...]
Chain = tuple[tuple[Node, int], ...]
"""A prompt as segments: identity of the segment's content after the segments before it, and its tokens."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Workers and traffic. Rates are per second and worker, lengths in tokens, means of exponential distributions.

    `num_groups` system prompts are chosen with Zipf weights. `slow_share` of the workers are `slow_factor` times
    slower. `restart_share` of the workers lose their caches at half time.
    """

    name: str
    title: str
    num_workers: int = 100
    rate: float = 0.6
    duration_s: float = 300.0
    num_turns: float = 8.0
    think_s: float = 25.0
    num_groups: int = 20
    system_tokens: int = 1500
    user_tokens: int = 120
    output_tokens: int = 250
    fork_share: float = 0.1
    skew: float = 1.1
    cache_tokens: int = 120_000
    prefill_rate: float = 4000.0
    slow_share: float = 0.0
    slow_factor: float = 2.5
    restart_share: float = 0.0
    trace: Path | None = None


BASE = Scenario("base", "Chats with 8 turns, 20 system prompts")
SCENARIOS = {
    each.name: each
    for each in (
        BASE,
        replace(BASE, name="pressure", title="As base, caches of 25,000 tokens", cache_tokens=25_000),
        replace(BASE, name="unequal", title="As base, 30 % of the workers 2.5 times slower", slow_share=0.3),
        replace(BASE, name="hot prefix", title="3 system prompts of 6,000 tokens", num_groups=3, system_tokens=6000),
        replace(BASE, name="sparse", title="As base, 1/30 of the requests", rate=0.02, duration_s=2000.0),
        replace(BASE, name="restarts", title="As base, 20 % of the workers restart at half time", restart_share=0.2),
        replace(
            BASE, name="two workers", title="2 workers, 1 system prompt, requests seldom overlap", num_workers=2,
            rate=0.025, duration_s=20_000.0, num_groups=1, cache_tokens=30_000,
        ),
    )
}  # fmt: skip
TRACE = Scenario(
    "trace", "Recorded block-hash trace, compressed to half of the prefill capacity; caches of 500,000 tokens",
    cache_tokens=500_000,
)  # fmt: skip
TRACE_LOAD = 0.5


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """New tokens of a turn, tokens of its reply, and the pause before it."""

    user_tokens: int
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that starts at a time with a prompt (`start`) and continues turn by turn.

    `fork_at`: share of its history after which another conversation branches off, or None. `has_messages`: whether
    the ends of messages are known to the gateway.
    """

    key: Node
    start_s: float
    start: Chain
    turns: tuple[PlannedTurn, ...]
    fork_at: float | None = None
    has_messages: bool = True


def draw_conversations(scenario: Scenario, seed: int) -> list[Conversation]:
    """Draw Poisson arrivals of conversations, or read the scenario's trace."""
    if scenario.trace is not None:
        return _from_trace(scenario, scenario.trace, seed)
    rng, now = random.Random(seed), 0.0
    weights = [1 / (rank + 1) ** scenario.skew for rank in range(scenario.num_groups)]
    per_s = scenario.rate * scenario.num_workers / scenario.num_turns
    conversations: list[Conversation] = []
    while (now := now + rng.expovariate(per_s)) < scenario.duration_s:
        group = rng.choices(range(scenario.num_groups), weights)[0]
        num_turns = 1 + min(40, int(rng.expovariate(1 / max(0.01, scenario.num_turns - 1))))
        turns = tuple(
            PlannedTurn(
                max(8, int(rng.expovariate(1 / scenario.user_tokens))),
                max(4, int(rng.expovariate(1 / scenario.output_tokens))),
                rng.expovariate(1 / scenario.think_s),
            )
            for _ in range(num_turns)
        )
        fork_at = rng.random() if rng.random() < scenario.fork_share else None
        start = ((("system", group), scenario.system_tokens),)
        conversations.append(Conversation((len(conversations),), now, start, turns, fork_at))
    return conversations


_read = cache(read_trace)


def _from_trace(scenario: Scenario, path: Path, seed: int) -> list[Conversation]:
    """One conversation per request of the trace; its key is the first two blocks, where requests begin to differ."""
    requests = sorted(
        (turn for turns in _read(path) for turn in turns if turn.block_ids), key=lambda request: request.at_s
    )
    if not requests:
        raise ValueError(f"{path}: has no block hashes")
    num_tokens = sum(request.num_prompt_tokens for request in requests)
    shortest_s = num_tokens / (TRACE_LOAD * scenario.prefill_rate * scenario.num_workers)
    at_s = _spread([request.at_s for request in requests], seed)
    scale = shortest_s / at_s[-1]
    return [
        Conversation(
            ("trace", *request.block_ids[:2]),
            start_s * scale,
            _blocks(request),
            (PlannedTurn(0, request.num_output_tokens, 0.0),),
            has_messages=False,
        )
        for start_s, request in zip(at_s, requests, strict=True)
    ]


def _spread(at_s: list[float], seed: int) -> list[float]:
    """Spread requests with equal times over the time to the next request: traces have coarse clocks.

    `at_s` is ascending and stays so.
    """
    rng, spread = random.Random(seed), list[float]()
    times = sorted(set(at_s))
    until = dict(zip(times, [*times[1:], times[-1]], strict=True))
    for time_s, group in groupby(at_s):
        spread += sorted(rng.uniform(time_s, until[time_s]) for _ in group)
    return spread


def _blocks(request: TraceRequest) -> Chain:
    lengths = [BLOCK_TOKENS] * len(request.block_ids)
    lengths[-1] = min(BLOCK_TOKENS, max(1, request.num_prompt_tokens - BLOCK_TOKENS * (len(lengths) - 1)))
    return tuple((("block", block), length) for block, length in zip(request.block_ids, lengths, strict=True))
