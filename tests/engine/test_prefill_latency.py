"""Running streams and short questions next to long prompts: bounded steps, by a clock that the runner advances."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.types.events import Started, Tokens
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 64
TOKEN_S = 0.001
BUDGET = 512
LONG = 3000


class TimedRunner(FakeRunner):
    """Takes 1 ms per token, on a clock of its own."""

    now_s = 0.0
    token_s = TOKEN_S

    def execute(self, plan: StepPlan) -> StepResult:
        self.now_s += self.token_s * len(plan.rows.tokens)
        return super().execute(plan)


class TimedEngine:
    """An engine on the runner's clock."""

    def __init__(self, *, max_prefill_time_s: float = 0.05, policy: str = "fair", token_s: float = TOKEN_S) -> None:
        self.runner = TimedRunner(fake_capacity(2048, 16), VOCAB)
        self.runner.token_s = token_s
        config = EngineConfig(
            max_num_batched_tokens=BUDGET,
            max_prefill_time_s=max_prefill_time_s,
            enable_prefix_caching=False,
            scheduling_policy=policy,
            strict=True,
        )
        self.engine = Engine(self.runner, fake_model_info(VOCAB), config, clock=lambda: self.runner.now_s)

    def ask(self, name: str, num_prompt: int, max_tokens: int = 2, namespace: str = "") -> None:
        prompt = tuple(1 + (7 * i + sum(map(ord, name))) % (VOCAB - 1) for i in range(num_prompt))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(GenerateRequest(request_id=name, prompt=prompt, params=params, namespace=namespace))

    def steps(self) -> Iterator[tuple[float, set[str], set[str]]]:
        """Yield the seconds of each step, the requests that started, and those that got a token."""
        while self.engine.has_work():
            before, events = self.runner.now_s, self.engine.step()
            started = {event.request_id for event in events if isinstance(event, Started)}
            tokens = {event.request_id for event in events if isinstance(event, Tokens)}
            yield self.runner.now_s - before, started, tokens

    def run_until(self, *names: str) -> list[tuple[float, set[str], set[str]]]:
        """Step until these requests have their first token; return the steps."""
        left, steps = set(names), []
        for step in self.steps():
            steps.append(step)
            left -= step[1]
            if not left:
                break
        return steps


def test_streams_get_a_token_in_bounded_time_next_to_a_long_prompt() -> None:
    timed = TimedEngine()
    streams = {f"s{i}" for i in range(8)}
    for name in sorted(streams):
        timed.ask(name, 20, 400)
    timed.run_until(*streams)
    timed.ask("long", LONG)
    steps = timed.run_until("long")
    assert all(streams <= tokens for _, _, tokens in steps)
    assert max(seconds for seconds, _, _ in steps) <= 0.05 + 8 * TOKEN_S + 1e-9
    assert len(steps) <= 1.2 * LONG / 50, "and the prompt gets all of that time"


def test_without_a_limit_streams_wait_for_a_whole_budget() -> None:
    timed = TimedEngine(max_prefill_time_s=0.0)
    timed.ask("stream", 20, 400)
    timed.run_until("stream")
    timed.ask("long", LONG)
    assert max(seconds for seconds, _, _ in timed.run_until("long")) == pytest.approx(BUDGET * TOKEN_S)


def test_a_prompt_alone_uses_the_whole_budget() -> None:
    timed = TimedEngine()
    timed.ask("warm", 100)
    list(timed.steps())
    timed.ask("long", LONG)
    assert len(timed.run_until("long")) == -(-LONG // BUDGET)


def test_health_reports_the_measured_speeds_and_the_owed_seconds() -> None:
    timed = TimedEngine(max_prefill_time_s=0.0)
    assert timed.engine.health().seconds_per_prompt_token == 0.0
    timed.ask("first", 100, max_tokens=4)
    list(timed.steps())
    health = timed.engine.health()
    assert health.seconds_per_prompt_token == pytest.approx(TOKEN_S)
    assert health.seconds_per_step == pytest.approx(TOKEN_S) and health.owed_s == 0.0
    timed.ask("long", LONG)
    timed.ask("next", 100)
    assert timed.engine.health().owed_s == pytest.approx((LONG + 100) * TOKEN_S)
    next(timed.steps())
    assert timed.engine.health().owed_s == pytest.approx((LONG + 100 - BUDGET) * TOKEN_S)
    list(timed.steps())
    assert timed.engine.health().owed_s == 0.0


@pytest.mark.parametrize("limit", [0.05, 0.0])
@pytest.mark.parametrize("num_long", [1, 2, 6])
def test_a_short_question_starts_within_a_few_steps_of_long_prompts(num_long: int, limit: float) -> None:
    timed = TimedEngine(max_prefill_time_s=limit)
    timed.ask("warm", 100)
    list(timed.steps())
    for number in range(num_long):
        timed.ask(f"long{number}", LONG)
    for _, _ in zip(range(2), timed.steps(), strict=False):
        pass
    timed.ask("question", 30)
    num_steps = len(timed.run_until("question"))
    assert num_steps <= (1 if limit == 0.0 else 6)


def test_long_prompts_end_one_after_the_other() -> None:
    """Not all at the end, which equal shares would cause."""
    timed = TimedEngine(max_prefill_time_s=0.0)
    for number in range(4):
        timed.ask(f"long{number}", LONG)
    ends = [count for count, (_, started, _) in enumerate(timed.steps(), 1) for _ in started]
    total = 4 * LONG / BUDGET
    assert ends[0] <= 0.5 * total and ends == sorted(ends)


def test_a_tenant_with_many_prompts_does_not_delay_the_prompt_of_another() -> None:
    num_steps = {}
    for policy in ("fair", "fcfs"):
        timed = TimedEngine(max_prefill_time_s=0.0, policy=policy)
        for number in range(3):
            timed.ask(f"heavy{number}", LONG, namespace="heavy")
        next(timed.steps())
        timed.ask("light", 1000, namespace="light")
        num_steps[policy] = len(timed.run_until("light"))
    assert num_steps["fair"] <= 8 < num_steps["fcfs"]


def test_the_measured_speed_is_the_only_effect_of_time() -> None:
    plans = []
    for slowness in (1.0, 1024.0):  # a slower runner, and a limit to match
        timed = TimedEngine(max_prefill_time_s=0.05 * slowness, token_s=TOKEN_S * slowness)
        for number in range(3):
            timed.ask(f"p{number}", 700, 20)
        plans.append([sorted(tokens) for _, _, tokens in timed.steps()])
    assert plans[0] == plans[1]
