"""Stage "model": engine steps of models with random weights, next to their rooflines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.check.context import StageContext
from bench.check.limits import stage_limits
from bench.check.profile import profile_steps
from chatcache.bench.device import Limits, Roofline
from chatcache.bench.drivers import SHAPES, EngineDriver, RandomWeights, Shape, write_config
from chatcache.bench.report import Figure, compare, compare_to_floor
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine.protocols import StepHandle
from chatcache.model.attention import FP8_CAPABILITY
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import Runner
from chatcache.types.plan import KVCapacity, StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, Params, SamplingParams
from chatcache.types.stats import ModelInfo


class SynchronousRunner:
    """A runner without asynchronous scheduling: every step ends before the next one is planned."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def capacity(self) -> KVCapacity:
        return replace(self._runner.capacity(), has_async_launch=False)

    def check_device(self) -> None:
        self._runner.check_device()

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def launch(self, plan: StepPlan) -> StepHandle:
        return self._runner.launch(plan)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with random weights, and the roofline of its steps."""

    name: str
    runner: Runner
    config: EngineConfig
    roofline: Roofline

    def driver(self, seed: int = 0, *, ahead: bool = True) -> EngineDriver:
        """Return a driver of a new engine, with asynchronous scheduling if `ahead`.

        The previous engine must be idle.
        """
        runner = self.runner if ahead else SynchronousRunner(self.runner)
        return EngineDriver(Engine(runner, self.runner.model_info, self.config), seed)


def roofline_of(shape: Shape, model_info: ModelInfo, limits: Limits) -> Roofline:
    """Return the roofline of a model of this shape; an untied input embedding is not read."""
    head_params = shape.vocab_size * shape.hidden
    read_params = model_info.num_parameters - (0 if shape.tied else head_params)
    itemsize = 4 if model_info.dtype == "float32" else 2
    return Roofline(
        limits,
        step_bytes=model_info.step_bytes if model_info.quantization != "none" else read_params * itemsize,
        kv_token_bytes=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize,
        layer_params=read_params - head_params,
        head_params=head_params,
        attention_flops=4.0 * shape.num_layers * shape.num_heads * shape.head_dim,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workloads of the model stage.

    `decode`: (branches, prompt tokens, goal); `shared`: (prompt tokens, n, goal); the others are numbers of tokens or
    beams.
    """

    decode: Sequence[tuple[int, int, str]]
    prefill: Sequence[int]
    shared: Sequence[tuple[int, int, str]]
    histories: Sequence[int]
    beams: Sequence[int]
    output: int = 32


FULL = Sizes(
    [(1, 1024, ""), (64, 1024, ""), (8, 1024, ""), (256, 512, "")],
    (512, 2048, 8000),
    [(4096, 8, ""), (4096, 32, "")],
    (1024, 4096),
    (4, 8),
)
SIZES: dict[str, dict[str, Sizes]] = {
    "full": {
        "qwen3-0.6b": replace(
            FULL,
            decode=[(1, 1024, ">= 0.40"), (64, 1024, ">= 0.70"), (8, 1024, ""), (256, 512, ">= 0.70")],
            shared=[(4096, 8, "<= 1.35"), (4096, 32, "<= 1.90")],
            histories=(1024, 4096, 32_000),
        ),
        "llama3-8b": replace(
            FULL,
            decode=[(1, 1024, ">= 0.80"), (64, 1024, ">= 0.80"), (8, 1024, ">= 0.80"), (256, 512, ">= 0.75")],
            shared=[(4096, 8, "<= 1.10"), (4096, 32, "<= 1.20")],
        ),
    },
    "cpu": {"smollm2-135m": Sizes([(1, 256, ""), (8, 64, "")], (512,), [(512, 4, "")], (512,), (4,), 12)},
    "tiny": {"tiny": Sizes([(1, 8, ""), (3, 9, "")], (16,), [(32, 3, "")], (64,), (2,), 5)},
}


def names(size: str) -> tuple[str, ...]:
    """Return the names of the models that the stage measures at this size."""
    return tuple(SIZES[size])


def load(context: StageContext, name: str, limits: Limits, quantization: str = "none", **settings: Any) -> LoadedModel:
    """Build a runner with random weights, drawn on the device."""
    folder, shape = context.out / "models" / name, SHAPES[name]
    name = name if quantization == "none" else f"{name} {quantization}"
    write_config(shape, folder)
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    if not context.on_gpu:
        sizes = {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 2048}
    options = {"device": context.device, "served_model_name": name, "quantization": quantization, **sizes, **settings}
    config = EngineConfig(model=str(folder), **options)
    start = time.perf_counter()
    runner = load_model(config, weights=RandomWeights(shape, context.device))
    context.add(Figure(f"{name}: start to ready, random weights", time.perf_counter() - start, "s"))
    num_captured, num_capturable = runner.captured_steps
    if num_capturable:
        figure = compare(f"{name}: captured decode steps", num_captured, "graphs", num_capturable, "planned", ">= 1.00")
        context.add(figure)
    model_info = runner.model_info
    context.note(
        f"{name}", {"attention": model_info.attention, "dtype": model_info.dtype, "pages": runner.capacity().num_pages}
    )
    return LoadedModel(name, runner, config, roofline_of(shape, model_info, limits))


def run(context: StageContext, name: str) -> None:
    """Measure one model: decode steps first, then the rest."""
    model, sizes = load(context, name, stage_limits(context)), SIZES[context.size][name]
    _warm_up(model, sizes)
    for branches, prompt, goal in sizes.decode:
        context.measure(
            f"decode {branches}", partial(_measure_decode, context, model, sizes, branches, prompt, goal), needs_s=4
        )
    for prompt, n, goal in sizes.shared:
        context.measure(f"n = {n}", partial(_measure_shared, context, model, sizes, prompt, n, goal), needs_s=4)
    context.measure("prefill", partial(_measure_prefill, context, model, sizes), needs_s=4)
    context.measure("cached prompts", partial(_measure_cached, context, model, sizes), needs_s=4)
    context.measure("beams", partial(_measure_beams, context, model, sizes), needs_s=4)
    for branches, prompt, _ in sizes.decode[:2]:  # last, because the profiler stays loaded and slows kernels down
        context.measure(f"profile of {branches}", partial(_profile, context, model, sizes, branches, prompt), needs_s=4)


def run_fp8(context: StageContext, name: str) -> None:
    """Measure decode steps and prefill of a model with FP8 weights; the rate of products is that of bfloat16."""
    if not context.on_gpu or torch.cuda.get_device_capability() < FP8_CAPABILITY:
        context.skip(f"{name} in FP8", "this device has no FP8 products")
        return
    model, sizes = load(context, name, stage_limits(context), "fp8"), SIZES[context.size][name]
    _warm_up(model, sizes)
    for branches, prompt, _ in sizes.decode:
        measure = partial(_measure_decode, context, model, sizes, branches, prompt, "")
        context.measure(f"decode {branches}", measure, needs_s=4)
    context.measure("prefill", partial(_measure_prefill, context, model, sizes), needs_s=4)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _warm_up(model: LoadedModel, sizes: Sizes) -> None:
    driver = model.driver()
    for branches, prompt, _ in sizes.decode:
        driver.step_times_s([driver.prompt(min(prompt, 64)) for _ in range(branches)], greedy(6))


def _spread(times: list[float], scale: float) -> tuple[float, float]:
    return min(times) * scale, max(times) * scale


def _measure_decode(
    context: StageContext, model: LoadedModel, sizes: Sizes, branches: int, prompt: int, goal: str
) -> None:
    medians = {}
    for ahead in (True, False):
        driver = model.driver(branches, ahead=ahead)
        times = driver.step_times_s([driver.prompt(prompt) for _ in range(branches)], greedy(sizes.output))
        medians[ahead] = statistics.median(times)
        if ahead:
            floor_s = model.roofline.decode_s(branches, branches * (prompt + sizes.output / 2))
            figure = compare_to_floor(f"{model.name}: decode step, {branches} x {prompt}", medians[True], floor_s, goal)
            context.add(replace(figure, spread=_spread(times, 1e3)))
            context.add(Figure(f"{model.name}: decode, {branches} x {prompt}", branches / medians[True], "tokens/s"))
        if not model.runner.capacity().has_async_launch:
            context.skip(f"{model.name}: asynchronous against synchronous", "this runner does not run ahead")
            return
    name = f"{model.name}: step {branches} x {prompt}, synchronous over asynchronous"
    context.add(compare(name, medians[False] * 1e3, "ms", medians[True] * 1e3, "asynchronous"))


def _profile(context: StageContext, model: LoadedModel, sizes: Sizes, branches: int, prompt: int) -> None:
    driver = model.driver(1000 + branches)
    prompts = [driver.prompt(prompt) for _ in range(branches)]
    request_ids = driver.start_decoding(prompts, greedy(sizes.output))
    found = profile_steps(driver.step, 4 if sizes.output > 8 else 1, context.device)
    driver.abort(request_ids)
    context.note(f"profile: {model.name}, {branches} x {prompt}", found.as_json())
    print(found.text(), flush=True)
    if found.device_ms:
        name = f"{model.name}: device busy in a step, {branches} x {prompt}"
        context.add(compare(name, found.device_ms, "ms", found.wall_ms, "step"))


def _measure_prefill(context: StageContext, model: LoadedModel, sizes: Sizes) -> None:
    driver = model.driver(7)
    for length in sizes.prefill:
        times = [driver.run([driver.prompt(length)], greedy(1)).prefill_s for _ in range(5)]
        goal = {"llama3-8b": ">= 0.60", "qwen3-0.6b": ">= 0.35"}.get(model.name, "") if length >= 2000 else ""
        figure = compare_to_floor(
            f"{model.name}: prefill {length}", statistics.median(times), model.roofline.prefill_s(length), goal
        )
        context.add(replace(figure, spread=_spread(times, 1e3)))


def _measure_cached(context: StageContext, model: LoadedModel, sizes: Sizes) -> None:
    """Measure a history repeated with 64 new tokens, next to its first computation."""
    driver = model.driver(8)
    for length in sizes.histories:
        misses, hits, cached = [], [], 0
        for _ in range(3):
            history = driver.prompt(length)
            misses.append(driver.run([history], greedy(1)).prefill_s)
            again = driver.run([history + driver.prompt(64)], greedy(1))
            hits.append(again.prefill_s)
            cached = again.num_cached[0]
        hit_s, miss_s = statistics.median(hits), statistics.median(misses)
        floor_s = model.roofline.prefill_s(64, length)
        ideal = floor_s / model.roofline.prefill_s(length)
        context.add(compare_to_floor(f"{model.name}: first token, {length} cached + 64 new", hit_s, floor_s))
        name = f"{model.name}: {length} cached over computed (x 3 of ideal)"
        context.add(compare(name, hit_s * 1e3, "ms", miss_s * 1e3, "computed", f"<= {3 * ideal:.3f}"))
        context.add(
            compare(f"{model.name}: tokens from cache of {length}", cached, "tokens", length, "history", ">= 0.98")
        )


def _step_s(model: LoadedModel, prompt: int, params: Params) -> float:
    driver = model.driver(9)
    return statistics.median(driver.step_times_s([driver.prompt(prompt)], params))


def _sampled(n: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=num_tokens, ignore_eos=True, seed=0)


def _measure_shared(context: StageContext, model: LoadedModel, sizes: Sizes, prompt: int, n: int, goal: str) -> None:
    """Measure a step of n branches of one prompt, next to a step of one branch."""
    alone_s, many_s = (_step_s(model, prompt, _sampled(each, sizes.output)) for each in (1, n))
    floor_s = model.roofline.decode_s(n, prompt + n * sizes.output / 2)
    context.add(compare_to_floor(f"{model.name}: step, n = {n} after {prompt}", many_s, floor_s))
    name = f"{model.name}: step, n = {n} over n = 1 after {prompt}"
    context.add(compare(name, many_s * 1e3, "ms", alone_s * 1e3, "n = 1", goal))


def _measure_beams(context: StageContext, model: LoadedModel, sizes: Sizes) -> None:
    """Measure a beam step, next to the n-best step of the same width."""
    prompt = min(length for length in sizes.prefill)
    for width in sizes.beams:
        beams = BeamSearchParams(beam_width=width, max_tokens=sizes.output, ignore_eos=True, early_stopping="never")
        beam_s, best_s = (_step_s(model, prompt, params) for params in (beams, _sampled(width, sizes.output)))
        name = f"{model.name}: beam {width} step over n = {width}"
        context.add(compare(name, beam_s * 1e3, "ms", best_s * 1e3, f"n = {width}", "<= 1.25"))
