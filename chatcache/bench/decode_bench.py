"""Host time of a decode step for each decoding mode, in an engine whose runner draws random tokens.

Everything that the engine does per token is included: planning, strategies, page tables and events. The runner is not.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from chatcache.bench.report import Figure, compare
from chatcache.config import EngineConfig
from chatcache.decoding.grammar.state import Constraint
from chatcache.decoding.sampling import SamplingStrategy
from chatcache.decoding.stopping import StopRules
from chatcache.decoding.strategy import make_strategy
from chatcache.engine.engine import Engine
from chatcache.types.actions import Strategy
from chatcache.types.plan import KVCapacity, StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from chatcache.types.stats import ModelInfo

BRANCH_TOKEN_GOAL_US = 5.0
PYTHON_CALLS_GOAL = 40
GOAL_BRANCHES = 64
"""From how many branches on the cost of a branch-token has a goal; with fewer, the cost of the step counts."""
VOCAB_SIZE = 32_000
NUM_WARM_UP_STEPS = 40
BEAM_WIDTH = 8
PROMPT_TOKENS = 2_000
PAGE_SIZE = 16
GRAMMAR = "grammar"
MODES = ("plain", "penalties", "logit_bias", "min_tokens", "logprobs", GRAMMAR, "beams")


class _AnyTokenGrammar:
    """Grammar that allows every token: the cost of following a real one is that of its library."""

    _words = np.full(VOCAB_SIZE // 32, 0xFFFFFFFF, np.uint32)

    def fork(self, grammar_state: object) -> _AnyTokenGrammar:
        return self

    def mask(self, grammar_state: object, num_tokens: int) -> Any:
        return self._words

    def consume(self, token: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _CompletedStep:
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class _RandomRunner:
    """Draws random tokens with decreasing log-probabilities, and measures its own CPU time."""

    def __init__(self, capacity: KVCapacity) -> None:
        self._capacity = capacity
        self._random = np.random.default_rng(0)
        self.used_ns = 0

    def capacity(self) -> KVCapacity:
        return self._capacity

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def check_device(self) -> None:
        """Do nothing."""

    def launch(self, plan: StepPlan) -> _CompletedStep:
        start = time.thread_time_ns()
        draws = plan.draws
        shape = (len(draws.row), int(draws.width.max(initial=1)))
        tops = (len(draws.row), int(draws.num_top.max(initial=0)))
        result = StepResult(
            self._random.integers(2, VOCAB_SIZE, shape, np.int32),
            -np.cumsum(self._random.random(shape, np.float32), axis=1, dtype=np.float32),
            self._random.integers(2, VOCAB_SIZE, tops, np.int32),
            -np.cumsum(self._random.random(tops, np.float32), axis=1, dtype=np.float32),
        )
        self.used_ns += time.thread_time_ns() - start
        return _CompletedStep(result)


def measure_decoding(num_branches: int, num_steps: int, repeats: int) -> list[Figure]:
    """Measure each mode with `num_branches` branches; for a single branch also count the Python calls of a step."""
    figures: list[Figure] = []
    for mode in MODES:
        engine, runner = _start(mode, num_branches, num_steps * (repeats + 1))
        cost = statistics.median(_step_us(engine, runner, num_steps) for _ in range(repeats)) / num_branches
        name = f"{mode}, {num_branches:,} branches: branch-token"
        if num_branches >= GOAL_BRANCHES:
            figures.append(compare(name, cost, "us", BRANCH_TOKEN_GOAL_US, "goal", "<= 1.00"))
        else:
            figures.append(Figure(name, cost, "us"))
        if num_branches == 1 and mode == "plain":
            calls = count_python_calls(engine, num_steps)
            figures.append(
                compare("Python calls of a step, 1 branch", calls, "calls", PYTHON_CALLS_GOAL, "goal", "<= 1.00")
            )
    return figures


def _start(mode: str, num_branches: int, num_steps: int) -> tuple[Engine, _RandomRunner]:
    """Start requests with `num_branches` branches in total, and run steps until all of them decode."""
    width = min(BEAM_WIDTH, num_branches) if mode == "beams" else 1
    num_tokens = num_steps + 2 * NUM_WARM_UP_STEPS
    num_pages = num_branches * ((PROMPT_TOKENS + num_tokens) // PAGE_SIZE + 1)
    capacity = KVCapacity(num_pages + 1, PAGE_SIZE, num_branches, PROMPT_TOKENS + num_tokens)
    runner = _RandomRunner(capacity)
    config = EngineConfig(max_num_seqs=num_branches, max_num_batched_tokens=num_branches * PROMPT_TOKENS)
    model_info = ModelInfo(
        name="bench", digest="00" * 32, vocab_size=VOCAB_SIZE, max_model_len=capacity.max_model_len, eos_token_ids=(0,)
    )
    engine = Engine(runner, model_info, config, make_strategy=_grammar_strategy if mode == GRAMMAR else make_strategy)
    random = np.random.default_rng(0)
    for number in range(num_branches // width):
        prompt = tuple(random.integers(2, VOCAB_SIZE, PROMPT_TOKENS - number % PAGE_SIZE).tolist())
        engine.add(GenerateRequest(request_id=f"r{number}", prompt=prompt, params=_params(mode, num_tokens, width)))
    for _ in range(NUM_WARM_UP_STEPS):
        engine.step()
    if sum(len(request.branches) for request in engine.scheduler.running) != num_branches:
        raise ValueError(f"not all branches decode in mode {mode}")
    return engine, runner


def _params(mode: str, max_tokens: int, width: int) -> Params:
    sampling = SamplingParams(max_tokens=max_tokens)
    modes: dict[str, Params] = {
        "penalties": replace(sampling, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
        "logit_bias": replace(sampling, logit_bias={7: 1.0}),
        "min_tokens": replace(sampling, min_tokens=max_tokens),
        "logprobs": replace(sampling, logprobs=5),
        "beams": BeamSearchParams(max_tokens=max_tokens, beam_width=width),
    }
    return modes.get(mode, sampling)


def _grammar_strategy(
    request: GenerateRequest, model_info: ModelInfo, *, seed: int, max_tokens: int, token_bytes: object
) -> Strategy:
    params = cast("SamplingParams", request.params)
    rules = StopRules.of(params, model_info, max_tokens=max_tokens, token_bytes=None)
    grammar = cast("Constraint", _AnyTokenGrammar())
    return SamplingStrategy(params, rules, seed=seed % 2**64, prompt=request.prompt, constraint=grammar)


def _step_us(engine: Engine, runner: _RandomRunner, num_steps: int) -> float:
    """Return the mean CPU time of a step without the runner's."""
    runner.used_ns, start = 0, time.thread_time_ns()
    for _ in range(num_steps):
        engine.step()
    return (time.thread_time_ns() - start - runner.used_ns) / num_steps / 1e3


def count_python_calls(engine: Engine, num_steps: int) -> float:
    """Return how many Python functions a step calls, the median of `num_steps`."""
    counts: list[float] = []
    count = 0
    package = str(Path(__file__).parents[1])

    def is_engine_code(file_name: str) -> bool:
        return file_name.startswith(package) and file_name != __file__

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and is_engine_code(frame.f_code.co_filename)

    for _ in range(num_steps):
        count, before = 0, sys.getprofile()
        sys.setprofile(on_event)
        try:
            engine.step()
        finally:
            sys.setprofile(before)
        counts.append(count)
    return statistics.median(counts)
