"""`chatcache bench latency [--mixed] | throughput | beam | prefix | embed | contention`: speed next to measured limits.

Everything that a figure is compared with is measured in the same run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from chatcache import factory
from chatcache.bench.contention import NUM_BUSY, speeds_by_busy_processes
from chatcache.bench.device import Roofline, measure_limits
from chatcache.bench.drivers import Driver, EngineDriver, RunTimes, TransformersDriver, write_named_model
from chatcache.bench.report import Figure, compare, figure_table
from chatcache.config import EngineConfig, format_size
from chatcache.errors import InvalidRequestError
from chatcache.types.request import BeamSearchParams, Params, SamplingParams
from chatcache.types.stats import ModelInfo

MAX_BUFFER_BYTES = 2**30
BUSY_GOAL = ">= 0.65"  # next to one busy process, with two threads on two cores
WARM_UP_TOKENS = 4
DEFAULT_PROMPT_TOKENS, MIXED_PROMPT_TOKENS = 512, 6000
COMPARABLE = ("latency", "throughput", "beam", "embed", "contention")
"""The benchmarks that transformers can run, too."""


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes of a benchmark.

    `prompt_tokens` of 0 is the default: 512, or 6,000 of `mixed`, at most as many as fit the model's context.
    """

    prompt_tokens: int
    output_tokens: int
    batches: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One run of one benchmark.

    Units: bandwidth in bytes/s, matrix multiplication rate in FLOP/s.
    """

    bench: str
    model: str
    num_parameters: int
    weight_bytes: int
    step_bytes: int
    dtype: str
    quantization: str
    device: str
    attention: str
    page_size: int
    read_bytes_per_s: float
    matmul_flops_per_s: float
    buffer_bytes: int
    num_threads: int
    figures: tuple[Figure, ...]

    def text(self) -> str:
        """Return the model, the limits of the machine, and a row for each figure."""
        precision = self.dtype if self.quantization == "none" else f"{self.dtype}, {self.quantization} weights,"
        return "\n".join(
            (
                f"{self.bench}  {self.model}: {self.num_parameters / 1e6:,.1f} M parameters, {precision} on "
                f"{self.device} ({self.num_threads} threads), {self.attention} attention, pages of {self.page_size}",
                f"limits of this machine, measured now: read {self.read_bytes_per_s / 1e9:.1f} GB/s over "
                f"{format_size(self.buffer_bytes)}, {self.dtype} matmul {self.matmul_flops_per_s / 1e9:,.0f} GFLOP/s",
                figure_table(self.figures),
            )
        )


@dataclass(frozen=True, slots=True)
class EngineBench:
    """An engine, a factory for one without prefix caching, and the roofline of its steps."""

    driver: Driver
    build_uncached: Callable[[], Driver]
    roofline: Roofline
    load: Load

    def warm_up(self) -> None:
        """Run once untimed, for compilation and the first touch of memory."""
        self.driver.run([self.driver.prompt(self.load.prompt_tokens)], _greedy(WARM_UP_TOKENS))
        self.driver.run([self.driver.prompt(8) for _ in range(max(self.load.batches))], _greedy(WARM_UP_TOKENS))

    def run_repeatedly(self, num_prompts: int, num_tokens: int, params: Params) -> list[RunTimes]:
        """Run one batch several times, with new prompts each time."""
        return [
            self.driver.run([self.driver.prompt(num_tokens) for _ in range(num_prompts)], params)
            for _ in range(self.load.repeats)
        ]

    def decode_limit(self, num_branches: int, num_shared: int, num_own: float) -> float:
        """Return the highest decode speed that the measured limits allow, in tokens/s.

        A step reads the weights, shared tokens once, and each branch's own tokens.
        """
        return num_branches / self.roofline.decode_s(num_branches, num_shared + num_branches * num_own)

    def prefill_limit(self, num_tokens: int) -> float:
        """Return the highest prefill speed in tokens/s, without the arithmetic of attention."""
        return num_tokens / self.roofline.prefill_s(num_tokens)


# -- benchmarks ---------------------------------------------------------------------------------------------------


def latency(bench: EngineBench) -> list[Figure]:
    """Measure one request alone: time to first token, prefill and decode speed."""
    load = bench.load
    runs = bench.run_repeatedly(1, load.prompt_tokens, _greedy(load.output_tokens))
    first_s = statistics.median(run.prefill_s for run in runs)
    step_s = statistics.median(run.step_s for run in runs)
    prefill_limit = bench.prefill_limit(load.prompt_tokens)
    decode_limit = bench.decode_limit(1, 0, load.prompt_tokens + load.output_tokens / 2)
    name = f"prefill, {load.prompt_tokens} tokens"
    return [
        compare(name, load.prompt_tokens / first_s, "tokens/s", prefill_limit, "matmul rate"),
        compare("decode, batch 1", 1 / step_s, "tokens/s", decode_limit, "read bandwidth"),
        Figure("time to first token", first_s * 1e3, "ms"),
        Figure("inter-token latency", step_s * 1e3, "ms"),
    ]


NUM_STREAMS = 8
STREAM_TOKENS = 64
QUESTION_TOKENS = 30


def mixed_latency(bench: EngineBench) -> list[Figure]:
    """Measure 8 running streams, and the first token of short questions, while long prompts arrive."""
    load, driver = bench.load, bench.driver
    if not isinstance(driver, EngineDriver):
        raise TypeError(f"only this engine runs mixed requests, not {type(driver).__name__}")
    times = driver.run_mixed(NUM_STREAMS, STREAM_TOKENS, load.prompt_tokens, QUESTION_TOKENS, load.repeats)
    alone_ms = statistics.median(times.gap_alone_s) * 1e3
    p50, p99 = (float(each) * 1e3 for each in np.percentile(times.gap_s, (50, 99)))
    question_ms, long_ms = (statistics.median(each) * 1e3 for each in (times.question_s, times.long_prompt_s))
    without = "without long prompts (less is better)"
    return [
        compare(f"inter-token latency of {NUM_STREAMS} streams, p50", p50, "ms", alone_ms, without),
        compare(f"inter-token latency of {NUM_STREAMS} streams, p99", p99, "ms", alone_ms, without),
        compare(
            f"time to first token, {QUESTION_TOKENS} tokens", question_ms, "ms", long_ms, "the long prompt before it"
        ),
        Figure(f"time to first token, {load.prompt_tokens} tokens", long_ms, "ms"),
    ]


def throughput(bench: EngineBench) -> list[Figure]:
    """Measure decode speed by batch size, then a mixed queue from submission to end."""
    load, figures = bench.load, []
    prompt_tokens = max(load.prompt_tokens // 8, 8)
    for batch in load.batches:
        runs = bench.run_repeatedly(batch, prompt_tokens, _greedy(load.output_tokens))
        per_s = statistics.median(run.decode_tokens_per_s for run in runs)
        limit = bench.decode_limit(batch, 0, prompt_tokens + load.output_tokens / 2)
        figures.append(compare(f"decode, batch {batch}", per_s, "tokens/s", limit, "roofline"))
    num_prompts = 2 * max(load.batches)
    lengths = [max(load.prompt_tokens * (1 + index % 4) // 4, 8) for index in range(num_prompts)]
    run = bench.driver.run([bench.driver.prompt(length) for length in lengths], _greedy(load.output_tokens))
    figures += [
        Figure(f"{num_prompts} mixed, output", run.num_output_tokens / run.total_s, "tokens/s"),
        Figure(f"{num_prompts} mixed, prompt", sum(lengths) / run.total_s, "tokens/s"),
    ]
    return figures


def beam(bench: EngineBench) -> list[Figure]:
    """Measure beam search against n-best of the same width; only forks and page copies differ."""
    load, figures = bench.load, []
    for width in (4, 8):
        sampled_params = SamplingParams(n=width, max_tokens=load.output_tokens, ignore_eos=True, seed=0)
        beam_params = BeamSearchParams(
            beam_width=width, max_tokens=load.output_tokens, ignore_eos=True, early_stopping="never"
        )
        sampled, beams = (
            bench.run_repeatedly(1, load.prompt_tokens, params) for params in (sampled_params, beam_params)
        )
        beam_s, sampled_s = (statistics.median(run.step_s for run in runs) for runs in (beams, sampled))
        limit = bench.decode_limit(width, load.prompt_tokens, load.output_tokens / 2)
        limit_name = "roofline, prompt read once"
        figures += [
            compare(f"n={width} decode", width / sampled_s, "tokens/s", limit, limit_name),
            compare(f"beam {width} decode", width / beam_s, "tokens/s", limit, limit_name),
            compare(f"beam {width} step", beam_s * 1e3, "ms", sampled_s * 1e3, f"n={width} step (less is better)"),
            Figure(f"beam {width} total", statistics.median(run.total_s for run in beams), "s"),
            Figure(f"beam {width} peak pages", max(run.peak_pages for run in beams), "pages"),
        ]
    return figures


def prefix(bench: EngineBench) -> list[Figure]:
    """Measure a long history repeated with a short new turn, and the cost of cache misses."""
    load, driver = bench.load, bench.driver
    cold, warm, cached = [], [], 0
    for _ in range(load.repeats):
        history = driver.prompt(load.prompt_tokens)
        cold.append(driver.run([history], _greedy(1)).prefill_s)
        run = driver.run([history + driver.prompt(16)], _greedy(1))
        warm.append(run.prefill_s)
        cached = run.num_cached[0]
    on, off = _total_times(driver, bench.build_uncached(), load)
    name = f"first token, {load.prompt_tokens} cached + 16 new"
    warm_ms, cold_ms = statistics.median(warm) * 1e3, statistics.median(cold) * 1e3
    return [
        compare(name, warm_ms, "ms", cold_ms, "the miss (less is better)"),
        compare("tokens from cache", cached, "tokens", load.prompt_tokens, "the history"),
        compare("throughput at 0 % hits", 1 / min(on), "runs/s", 1 / min(off), "prefix caching off"),
    ]


def _total_times(driver: Driver, uncached: Driver, load: Load) -> tuple[list[float], list[float]]:
    """Return the seconds of batches with and without prefix caching, in two engines run in turn."""
    on: list[float] = []
    off: list[float] = []
    uncached.run([uncached.prompt(load.prompt_tokens)], _greedy(2))
    for _ in range(max(load.repeats, 3)):
        for each, times in ((driver, on), (uncached, off)):
            prompts = [each.prompt(load.prompt_tokens // 4) for _ in range(8)]
            times.append(each.run(prompts, _greedy(load.output_tokens // 4)).total_s)
    return on, off


def contention(bench: EngineBench) -> list[Figure]:
    """Measure decode speed by batch size next to busy processes, against the idle machine."""
    load, figures = bench.load, []
    prompt_tokens = max(load.prompt_tokens // 8, 8)
    for batch in load.batches:

        def measure(batch: int = batch) -> float:
            prompts = [bench.driver.prompt(prompt_tokens) for _ in range(batch)]
            return bench.driver.run(prompts, _greedy(load.output_tokens)).decode_tokens_per_s

        speeds = speeds_by_busy_processes(measure, (0, *NUM_BUSY), load.repeats)
        figures.append(Figure(f"decode, batch {batch}, idle", speeds[0], "tokens/s"))
        figures += [
            compare(f"decode, batch {batch}, {count} busy", speeds[count], "tokens/s", speeds[0], "idle", goal)
            for count, goal in zip(NUM_BUSY, (BUSY_GOAL, ""), strict=True)
        ]
    return figures


def embed(bench: EngineBench) -> list[Figure]:
    """Measure embeddings by batch size, of prompts of equal length."""
    load, driver, figures = bench.load, bench.driver, []
    num_tokens = max(load.prompt_tokens // 8, 8)
    for batch in load.batches:
        runs_s = [driver.embed_s([driver.prompt(num_tokens) for _ in range(batch)]) for _ in range(load.repeats + 1)]
        per_s = batch / statistics.median(runs_s[1:])
        limit = bench.prefill_limit(batch * num_tokens) / num_tokens
        figures.append(compare(f"{num_tokens} tokens, batch {batch}", per_s, "embeddings/s", limit, "matmul rate"))
    return figures


BENCHMARKS: dict[str, Callable[[EngineBench], list[Figure]]] = {
    "latency": latency,
    "mixed": mixed_latency,
    "throughput": throughput,
    "beam": beam,
    "prefix": prefix,
    "embed": embed,
    "contention": contention,
}


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


# -- a run --------------------------------------------------------------------------------------------------------


def run_engine_bench(
    name: str,
    config: EngineConfig,
    load: Load,
    *,
    shape: str | None = None,
    compare_with_transformers: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> EngineReport:
    """Measure the limits of the machine, then the engine.

    `shape` names a model with random weights that is made instead of loading one.
    Raises: InvalidRequestError for a benchmark that transformers cannot run; ModelFolderError; ContextLengthError if
    the load does not fit the model's context or the pages.
    """
    if compare_with_transformers and name not in COMPARABLE:
        raise InvalidRequestError(f"compare works for {', '.join(COMPARABLE)}, not for {name}", param="compare")
    with tempfile.TemporaryDirectory(prefix="chatcache-bench-") as scratch:
        if shape is not None:
            on_progress(f"writing random weights of {shape}")
            write_named_model(shape, Path(scratch))
            config = msgspec.structs.replace(config, model=scratch, served_model_name=shape)
        engine = factory.build_engine(config, lambda _, detail: on_progress(detail), need_tokenizer=False)
        model_info, health = engine.model_info, engine.health()
        if not load.prompt_tokens:
            fitting = max(model_info.max_model_len - max(load.output_tokens, WARM_UP_TOKENS), 1)
            prompt_tokens = MIXED_PROMPT_TOKENS if name == "mixed" else DEFAULT_PROMPT_TOKENS
            load = replace(load, prompt_tokens=min(prompt_tokens, fitting))
        on_progress("measuring the machine")
        limits = measure_limits(min(model_info.step_bytes, MAX_BUFFER_BYTES), model_info.dtype, model_info.device)
        roofline = Roofline(
            limits,
            step_bytes=model_info.step_bytes,
            kv_token_bytes=health.kv_bytes / ((health.num_pages + 1) * health.page_size),
            layer_params=count_matmul_params(factory.model_folder(config), model_info),
        )

        def build_uncached() -> EngineDriver:
            uncached = msgspec.structs.replace(config, enable_prefix_caching=False)
            return EngineDriver(factory.build_engine(uncached, need_tokenizer=False))

        bench = EngineBench(EngineDriver(engine), build_uncached, roofline, load)
        figures = _run(name, bench, on_progress)
        if compare_with_transformers:
            on_progress("loading transformers")
            peer = replace(bench, driver=TransformersDriver(factory.model_folder(config), model_info))
            figures += compare_with_peer(figures, _run(name, peer, on_progress), "transformers")
    return EngineReport(
        bench=name,
        model=factory.served_name(config),
        num_parameters=model_info.num_parameters,
        weight_bytes=model_info.weight_bytes,
        step_bytes=model_info.step_bytes,
        dtype=model_info.dtype,
        quantization=model_info.quantization,
        device=model_info.device,
        attention=model_info.attention,
        page_size=health.page_size,
        read_bytes_per_s=limits.read_bytes_per_s,
        matmul_flops_per_s=limits.matmul_flops_per_s,
        buffer_bytes=limits.buffer_bytes,
        num_threads=torch.get_num_threads(),
        figures=tuple(figures),
    )


def _run(name: str, bench: EngineBench, on_progress: Callable[[str], None]) -> list[Figure]:
    on_progress("warming up")
    bench.warm_up()
    on_progress(f"running {name}")
    return BENCHMARKS[name](bench)


def compare_with_peer(ours: Sequence[Figure], theirs: Sequence[Figure], peer_name: str) -> list[Figure]:
    """Return the ratios of our figures to the peer's figures of the same name.

    A ratio above 1 is faster for speeds and slower for times.
    """
    peer_values = {figure.name: figure.value for figure in theirs if figure.unit != "pages"}
    found = []
    for figure in ours:
        if figure.name in peer_values:
            limit_name = peer_name if figure.unit.endswith("/s") else f"{peer_name} (less is better)"
            found.append(compare(figure.name, figure.value, figure.unit, peer_values[figure.name], limit_name))
    return found


def count_matmul_params(folder: Path, model_info: ModelInfo) -> int:
    """Return the parameters a prompt token is multiplied with: all but the embedding tables and unused experts.

    Only a prompt's last token reaches the output head, and input embeddings are looked up.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tables, hidden = 1 if config.get("tie_word_embeddings", True) else 2, int(config.get("hidden_size", 0))
    unused = 0
    if config.get("model_type") == "qwen3_moe":
        num_unused = config.get("num_experts", config.get("num_local_experts")) - config["num_experts_per_tok"]
        unused = config["num_hidden_layers"] * num_unused * 3 * hidden * config["moe_intermediate_size"]
    return model_info.num_parameters - tables * model_info.vocab_size * hidden - unused
