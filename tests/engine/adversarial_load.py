"""Adversarial load in simulated time: a flood of requests, and tenants that wait.

Time is counted in engine steps and arrivals are drawn from a seed, so a run does not depend on the machine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import ChatcacheError, OverloadedError, RateLimitError
from chatcache.types.events import Finished, Started, Tokens
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB, PAGE = 64, 8
SLOTS = 6
NUM_PROMPT, NUM_OUTPUT = 16, 24
MOST, MOST_TOKENS = 40, 40 * NUM_PROMPT
FLOOD = "flood"
OVERLOAD = 10


@dataclass
class AdversarialLoad:
    """A run of `num_steps` steps with polite tenants and a flood.

    Each of `num_polite` tenants has one request at any time. The flood sends OVERLOAD times what the engine can serve,
    for `num_floods` tenants in turn. `waits`: steps from a polite request to its first token. `widest`: the largest
    queue, of all tenants and of one.
    """

    policy: str = "fair"
    num_polite: int = 10
    num_floods: int = 1
    num_steps: int = 400
    seed: int = 0
    waits: list[int] = field(default_factory=list)
    refusals: Counter[type[ChatcacheError]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    widest: tuple[int, int] = (0, 0)
    num_drawn: int = 0

    def run(self) -> AdversarialLoad:
        config = EngineConfig(
            scheduling_policy=self.policy,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=256,
            max_queued_requests=MOST,
            max_queued_tokens=MOST_TOKENS,
            strict=True,
        )
        runner = FakeRunner(fake_capacity(SLOTS * (NUM_PROMPT + NUM_OUTPUT) // PAGE * 4, PAGE), VOCAB)
        self._engine = Engine(runner, fake_model_info(VOCAB), config, clock=runner.clock)
        self._rng = np.random.default_rng(self.seed)
        self._asked: dict[str, int] = {}  # when, by request
        idle = {f"polite{number}": int(self._rng.integers(NUM_OUTPUT)) for number in range(self.num_polite)}
        rate = OVERLOAD * SLOTS / NUM_OUTPUT
        for step in range(self.num_steps):
            for number in range(int(self._rng.poisson(rate)) if self.num_floods else 0):
                flood = f"{FLOOD}{(step + number) % self.num_floods}"
                self._ask(flood, step)
            for tenant in [tenant for tenant, when in idle.items() if when <= step]:
                if self._ask(tenant, step):
                    del idle[tenant]
            self._measure()
            for event in self._engine.step():
                tenant = event.request_id.partition(".")[0]
                if isinstance(event, Tokens):
                    self.num_drawn += len(event.token_ids)
                elif isinstance(event, Started) and not tenant.startswith(FLOOD):
                    self.waits.append(step + 1 - self._asked[event.request_id])
                elif isinstance(event, Finished) and not tenant.startswith(FLOOD):
                    idle[tenant] = step + 1 + int(self._rng.integers(4))
        return self

    @property
    def tokens_per_step(self) -> float:
        return self.num_drawn / self.num_steps

    @property
    def slowest_wait(self) -> float:
        """Return the 95th percentile of the waits, in steps."""
        return float(np.percentile(self.waits, 95))

    def _ask(self, tenant: str, step: int) -> bool:
        name = f"{tenant}.{len(self._asked)}"
        self._asked[name] = step
        num_output = int(self._rng.integers(NUM_OUTPUT // 2, NUM_OUTPUT * 3 // 2))
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        prompt = tuple(self._rng.integers(1, VOCAB, NUM_PROMPT).tolist())
        try:
            self._engine.add(GenerateRequest(request_id=name, prompt=prompt, params=params, namespace=tenant))
        except (RateLimitError, OverloadedError) as error:
            self.refusals[type(error)] += 1
            self.refused[tenant] += 1
            return False
        return True

    def _measure(self) -> None:
        waiting = Counter(each.namespace for each in self._engine.scheduler.waiting)
        now = waiting.total(), max(waiting.values(), default=0)
        self.widest = max(self.widest[0], now[0]), max(self.widest[1], now[1])
