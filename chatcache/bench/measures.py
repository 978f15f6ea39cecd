"""The benchmarks. Each returns figures; what it compares with is measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from chatcache.bench.driver import Driver, Prompt, Run
from chatcache.bench.limits import Limits
from chatcache.bench.report import Figure, compared, rate
from chatcache.types.model import ModelFacts
from chatcache.types.params import BeamSearchParams, Params, SamplingParams


@dataclass(frozen=True, slots=True)
class Load:
    """What to run. `matmul_params` are the weights each token is multiplied with, `kv_token_bytes` one token's KV."""

    prompt_tokens: int
    output_tokens: int
    batches: tuple[int, ...]
    repeats: int
    matmul_params: int
    kv_token_bytes: float


class Driving(Protocol):
    """What a measure needs of an engine."""

    @property
    def facts(self) -> ModelFacts: ...

    def prompt(self, num_tokens: int) -> Prompt: ...

    def run(self, prompts: list[Prompt], params: Params) -> Run: ...


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine to measure, one like it without prefix caching, and what the machine can do."""

    driver: Driving
    uncached: Callable[[], Driver]
    limits: Limits
    load: Load

    def warm_up(self) -> None:
        """Pay for compilation and first touches before anything is timed."""
        prompt = self.driver.prompt(self.load.prompt_tokens)
        self.driver.run([prompt], _greedy(4))
        self.driver.run([self.driver.prompt(8) for _ in range(max(self.load.batches))], _greedy(4))

    def runs(self, num_prompts: int, num_tokens: int, params: SamplingParams | BeamSearchParams) -> list[Run]:
        """Repeat one batch with fresh prompts."""
        return [
            self.driver.run([self.driver.prompt(num_tokens) for _ in range(num_prompts)], params)
            for _ in range(self.load.repeats)
        ]

    def decode_limit(self, num_branches: int, num_shared: int, num_own: float) -> float:
        """Tokens/s at best: each step reads the weights, the shared tokens' KV once and each branch's own."""
        kv_bytes = (num_shared + num_branches * num_own) * self.load.kv_token_bytes
        flops = 2.0 * num_branches * self.load.matmul_params
        return num_branches / self.limits.step_s(self.driver.facts.step_bytes + kv_bytes, flops)

    def prefill_limit(self, num_tokens: int) -> float:
        """Tokens/s at best, attention's own share left out."""
        return num_tokens / self.limits.step_s(self.driver.facts.step_bytes, 2.0 * num_tokens * self.load.matmul_params)


def latency(bench: Bench) -> list[Figure]:
    """One request alone: time to first token, prefill and decode speed."""
    load = bench.load
    runs = bench.runs(1, load.prompt_tokens, _greedy(load.output_tokens))
    first_s = statistics.median(run.prefill_s for run in runs)
    step_s = statistics.median(run.step_s for run in runs)
    limit = bench.decode_limit(1, 0, load.prompt_tokens + load.output_tokens / 2)
    return [
        rate(
            f"prefill, {load.prompt_tokens} tokens",
            load.prompt_tokens / first_s,
            bench.prefill_limit(load.prompt_tokens),
            "matmul rate",
        ),
        rate("decode, batch 1", 1 / step_s, limit, "read bandwidth"),
        Figure(name="time to first token", value=first_s * 1e3, unit="ms"),
        Figure(name="inter-token latency", value=step_s * 1e3, unit="ms"),
    ]


def throughput(bench: Bench) -> list[Figure]:
    """Many requests at once: decode speed by batch, then a mixed queue from submit to end."""
    load, figures = bench.load, []
    prompt_tokens = max(load.prompt_tokens // 8, 8)
    for batch in load.batches:
        runs = bench.runs(batch, prompt_tokens, _greedy(load.output_tokens))
        per_s = statistics.median(run.decode_tokens_per_s for run in runs)
        limit = bench.decode_limit(batch, 0, prompt_tokens + load.output_tokens / 2)
        figures.append(rate(f"decode, batch {batch}", per_s, limit, "roofline"))
    num_prompts = 2 * max(load.batches)
    lengths = [max(load.prompt_tokens * (1 + index % 4) // 4, 8) for index in range(num_prompts)]
    run = bench.driver.run([bench.driver.prompt(length) for length in lengths], _greedy(load.output_tokens))
    figures += [
        Figure(name=f"{num_prompts} mixed, output", value=run.num_output_tokens / run.total_s, unit="tokens/s"),
        Figure(name=f"{num_prompts} mixed, prompt", value=sum(lengths) / run.total_s, unit="tokens/s"),
    ]
    return figures


def beam(bench: Bench) -> list[Figure]:
    """Beam search beside n-best of the same width: forks and page copies are all that may differ."""
    load, figures = bench.load, []
    for width in (4, 8):
        sampled = bench.runs(1, load.prompt_tokens, _sampled(width, load.output_tokens))
        beams = bench.runs(
            1,
            load.prompt_tokens,
            BeamSearchParams(beam_width=width, max_tokens=load.output_tokens, ignore_eos=True, early_stopping="never"),
        )
        step_s = statistics.median(run.step_s for run in beams)
        peer_s = statistics.median(run.step_s for run in sampled)
        limit = bench.decode_limit(width, load.prompt_tokens, load.output_tokens / 2)
        figures += [
            rate(f"n={width} decode", width / peer_s, limit, "roofline, prompt read once"),
            rate(f"beam {width} decode", width / step_s, limit, "roofline, prompt read once"),
            compared(f"beam {width} step", step_s * 1e3, "ms", peer_s * 1e3, f"n={width} step (less is better)"),
            Figure(name=f"beam {width} in all", value=statistics.median(run.total_s for run in beams), unit="s"),
            Figure(name=f"beam {width} pages at most", value=max(run.peak_pages for run in beams), unit="pages"),
        ]
    return figures


def prefix(bench: Bench) -> list[Figure]:
    """A long history again with a short new turn, and what the cache costs where nothing hits."""
    load, driver = bench.load, bench.driver
    cold, warm, cached = [], [], 0
    for _ in range(load.repeats):
        history = driver.prompt(load.prompt_tokens)
        cold.append(driver.run([history], _greedy(1)).prefill_s)
        run = driver.run([history + driver.prompt(16)], _greedy(1))
        warm.append(run.prefill_s)
        cached = run.num_cached[0]
    first_s, again_s = statistics.median(cold), statistics.median(warm)
    on: list[float] = []
    off: list[float] = []
    peer = bench.uncached()
    peer.run([peer.prompt(load.prompt_tokens)], _greedy(2))
    for _ in range(max(load.repeats, 3)):  # interleaved, so that a disturbance hits both
        for each, times in ((driver, on), (peer, off)):
            prompts = [each.prompt(load.prompt_tokens // 4) for _ in range(8)]
            times.append(each.run(prompts, _greedy(load.output_tokens // 4)).total_s)
    return [
        compared(
            f"first token, {load.prompt_tokens} cached + 16 new",
            again_s * 1e3,
            "ms",
            first_s * 1e3,
            "the miss (less is better)",
        ),
        compared("tokens from cache", cached, "tokens", load.prompt_tokens, "the history"),
        compared("throughput at 0 % hits", 1 / min(on), "runs/s", 1 / min(off), "prefix caching off"),
    ]


MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "latency": latency,
    "throughput": throughput,
    "beam": beam,
    "prefix": prefix,
}


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _sampled(n: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=num_tokens, ignore_eos=True, seed=0)
