"""(d) Whole engine steps of random-weight models, beside the time that weights, keys and multiplications must take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.check.ceilings import Ceilings, quick
from bench.check.context import Context
from bench.check.figures import Figure, above_floor, compared
from bench.check.in_order import OneByOne
from bench.check.profile import profile_steps
from chatcache.bench.drivers import EngineDriver, Prompt
from chatcache.bench.shapes import SHAPES, RandomWeights, Shape, write_config
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import EngineError
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import Runner
from chatcache.types.events import Failed, Started
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and what its steps must at least move and multiply."""

    name: str
    shape: Shape
    runner: Runner
    config: EngineConfig
    limits: Ceilings

    def engine(self, *, ahead: bool = True) -> Engine:
        """Return an engine with fresh books; the one before must be idle."""
        return Engine(self.runner if ahead else OneByOne(self.runner), self.runner.facts, self.config)

    @property
    def read_params(self) -> int:
        """Weights that every step reads: all but an input embedding that is looked up only."""
        table = self.shape.vocab_size * self.shape.hidden
        return self.runner.facts.num_parameters - (0 if self.shape.tied else table)

    @property
    def layer_params(self) -> int:
        """Weights that every prompt token is multiplied with: those without the output head."""
        return self.read_params - self.shape.vocab_size * self.shape.hidden

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim * self.itemsize

    @property
    def itemsize(self) -> int:
        return self.runner.facts.weight_bytes // self.runner.facts.num_parameters

    def decode_floor_s(self, num_branches: int, num_tokens: float) -> float:
        """A step of one token for each branch, with `num_tokens` different tokens in their pages."""
        num_bytes = self.read_params * self.itemsize + num_tokens * self.token_bytes
        return self.limits.floor_s(num_bytes, 2.0 * num_branches * self.read_params)

    def prefill_floor_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """A prompt's new tokens, the causal half of their attention, and one row of the output head."""
        seen = num_tokens * (num_cached + (num_tokens + 1) / 2)
        attention = 4.0 * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim * seen
        num_bytes = self.read_params * self.itemsize + num_cached * self.token_bytes
        head = 2.0 * self.shape.vocab_size * self.shape.hidden
        return self.limits.floor_s(num_bytes, 2.0 * num_tokens * self.layer_params + attention + head)


@dataclass(frozen=True, slots=True)
class Sizes:
    """(branches, prompt, ratio to the floor that is the goal), prompts, shared prompts (tokens, n), histories."""

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
    """Return the models of a size."""
    return tuple(SIZES[size])


def load(context: Context, name: str, limits: Ceilings, **settings: Any) -> Loaded:
    """Build a runner of random weights, drawn on the device."""
    folder, shape = context.out / "models" / name, SHAPES[name]
    write_config(shape, folder)
    plain = {"device": context.device, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "served_model_name": name}
    if not context.on_gpu:
        plain |= {"max_num_seqs": 16, "max_model_len": 1024, "max_num_batched_tokens": 2048}
    config = EngineConfig(model=str(folder), **{**plain, **settings})
    start = time.perf_counter()
    runner = load_model(config, weights=RandomWeights(shape, context.device))
    context.add(Figure(f"{name}: start to ready, random weights", time.perf_counter() - start, "s"))
    facts = runner.facts
    context.note(f"{name}", {"attention": facts.attention, "dtype": facts.dtype, "pages": runner.capacity().num_pages})
    return Loaded(name, shape, runner, config, limits)


def run(context: Context, name: str) -> None:
    """Measure one model: decode steps first, then everything else."""
    model, sizes = load(context, name, quick(context)), SIZES[context.size][name]
    _warm_up(model, sizes)
    for branches, prompt, goal in sizes.decode:
        context.measure(
            f"decode {branches}", partial(_decode, context, model, sizes, branches, prompt, goal), needs_s=4
        )
    for prompt, n, goal in sizes.shared:
        context.measure(f"n = {n}", partial(_shared, context, model, sizes, prompt, n, goal), needs_s=4)
    context.measure("prefill", partial(_prefill, context, model, sizes), needs_s=4)
    context.measure("cached prompts", partial(_cached, context, model, sizes), needs_s=4)
    context.measure("beams", partial(_beams, context, model, sizes), needs_s=4)
    for branches, prompt, _ in sizes.decode[:2]:  # last, for what watches kernels stays and slows them
        context.measure(f"profile of {branches}", partial(_profile, context, model, sizes, branches, prompt), needs_s=4)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def start_all(engine: Engine, prompts: Sequence[Prompt], params: Params) -> None:
    """Submit the prompts and step until the last of them is computed."""
    for number, prompt in enumerate(prompts):
        engine.add(GenerateRequest(request_id=f"check-{number}", prompt=prompt, params=params))
    waiting = len(prompts)
    while waiting:
        waiting -= sum(isinstance(event, Started) for event in step(engine))


def step(engine: Engine) -> list[Any]:
    """Run one step. Raises: EngineError if a request failed."""
    events = engine.step()
    for event in events:
        if isinstance(event, Failed):
            raise EngineError(event.message, code=event.code)
    return events


def stop_all(engine: Engine, num_requests: int) -> None:
    """Give up what still runs."""
    for number in range(num_requests):
        engine.abort(f"check-{number}")
    while engine.has_work():
        step(engine)


def step_times_s(engine: Engine, prompts: Sequence[Prompt], params: Params) -> list[float]:
    """Return the seconds from one step's end to the next, all prompts computed, all branches decoding."""
    start_all(engine, prompts, params)
    step(engine)
    times, before = [], time.perf_counter()
    for _ in range(max((params.max_tokens or 1) - 4, 1)):
        step(engine)
        times.append((now := time.perf_counter()) - before)
        before = now
    stop_all(engine, len(prompts))
    return times


def _warm_up(model: Loaded, sizes: Sizes) -> None:
    engine = model.engine()
    driver = EngineDriver(engine)
    for branches, prompt, _ in sizes.decode:
        step_times_s(engine, [driver.prompt(min(prompt, 64)) for _ in range(branches)], greedy(6))


def _spread(times: list[float], scale: float) -> tuple[float, float]:
    return min(times) * scale, max(times) * scale


def _decode(context: Context, model: Loaded, sizes: Sizes, branches: int, prompt: int, goal: str) -> None:
    medians = {}
    for ahead in (True, False):
        engine = model.engine(ahead=ahead)
        driver = EngineDriver(engine, seed=branches)
        times = step_times_s(engine, [driver.prompt(prompt) for _ in range(branches)], greedy(sizes.output))
        medians[ahead] = statistics.median(times)
        if ahead:
            floor_s = model.decode_floor_s(branches, branches * (prompt + sizes.output / 2))
            figure = above_floor(f"{model.name}: decode step, {branches} x {prompt}", medians[True], floor_s, goal)
            context.add(replace(figure, spread=_spread(times, 1e3)))
            context.add(Figure(f"{model.name}: decode, {branches} x {prompt}", branches / medians[True], "tokens/s"))
        if not model.runner.capacity().runs_ahead:
            context.left_out(f"{model.name}: running ahead, on against off", "this runner does not run ahead")
            return
    name = f"{model.name}: step {branches} x {prompt}, one by one over ahead"
    context.add(compared(name, medians[False] * 1e3, "ms", medians[True] * 1e3))


def _profile(context: Context, model: Loaded, sizes: Sizes, branches: int, prompt: int) -> None:
    engine = model.engine()
    driver = EngineDriver(engine, seed=1000 + branches)
    prompts = [driver.prompt(prompt) for _ in range(branches)]
    start_all(engine, prompts, greedy(sizes.output))
    step(engine)
    found = profile_steps(partial(step, engine), 4 if sizes.output > 8 else 1, context.device)
    stop_all(engine, branches)
    context.note(f"profile: {model.name}, {branches} x {prompt}", found.as_json())
    print(found.text(), flush=True)
    if found.device_ms:
        name = f"{model.name}: device busy in a step, {branches} x {prompt}"
        context.add(compared(name, found.device_ms, "ms", found.wall_ms))


def _prefill(context: Context, model: Loaded, sizes: Sizes) -> None:
    engine = model.engine()
    driver = EngineDriver(engine, seed=7)
    for length in sizes.prefill:
        times = [driver.run([driver.prompt(length)], greedy(1)).prefill_s for _ in range(5)]
        goal = {"llama3-8b": ">= 0.60", "qwen3-0.6b": ">= 0.35"}.get(model.name, "") if length >= 2000 else ""
        figure = above_floor(
            f"{model.name}: prefill {length}", statistics.median(times), model.prefill_floor_s(length), goal
        )
        context.add(replace(figure, spread=_spread(times, 1e3)))


def _cached(context: Context, model: Loaded, sizes: Sizes) -> None:
    """A history again with 64 new tokens, beside its first time."""
    engine = model.engine()
    driver = EngineDriver(engine, seed=8)
    for length in sizes.histories:
        misses, hits, cached = [], [], 0
        for _ in range(3):
            history = driver.prompt(length)
            misses.append(driver.run([history], greedy(1)).prefill_s)
            again = driver.run([history + driver.prompt(64)], greedy(1))
            hits.append(again.prefill_s)
            cached = again.num_cached[0]
        hit_s, miss_s = statistics.median(hits), statistics.median(misses)
        floor_s = model.prefill_floor_s(64, length)
        ideal = floor_s / model.prefill_floor_s(length)
        context.add(above_floor(f"{model.name}: first token, {length} cached + 64 new", hit_s, floor_s))
        name = f"{model.name}: {length} cached over computed (x 3 of ideal)"
        context.add(compared(name, hit_s * 1e3, "ms", miss_s * 1e3, f"<= {3 * ideal:.3f}"))
        context.add(compared(f"{model.name}: tokens from cache of {length}", cached, "tokens", length, ">= 0.98"))


def _step_s(model: Loaded, prompt: int, params: Params) -> float:
    engine = model.engine()
    driver = EngineDriver(engine, seed=9)
    return statistics.median(step_times_s(engine, [driver.prompt(prompt)], params))


def _sampled(n: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=num_tokens, ignore_eos=True, seed=0)


def _shared(context: Context, model: Loaded, sizes: Sizes, prompt: int, n: int, goal: str) -> None:
    """A step of n branches over one prompt, beside that of one branch."""
    alone_s, many_s = (_step_s(model, prompt, _sampled(each, sizes.output)) for each in (1, n))
    floor_s = model.decode_floor_s(n, prompt + n * sizes.output / 2)
    context.add(above_floor(f"{model.name}: step, n = {n} after {prompt}", many_s, floor_s))
    name = f"{model.name}: step, n = {n} over n = 1 after {prompt}"
    context.add(compared(name, many_s * 1e3, "ms", alone_s * 1e3, goal))


def _beams(context: Context, model: Loaded, sizes: Sizes) -> None:
    """A beam step beside the n-best step of the same width."""
    prompt = min(length for length in sizes.prefill)
    for width in sizes.beams:
        beams = BeamSearchParams(beam_width=width, max_tokens=sizes.output, ignore_eos=True, early_stopping="never")
        beam_s, best_s = (_step_s(model, prompt, params) for params in (beams, _sampled(width, sizes.output)))
        name = f"{model.name}: beam {width} step over n = {width}"
        context.add(compared(name, beam_s * 1e3, "ms", best_s * 1e3, "<= 1.25"))
