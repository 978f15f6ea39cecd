"""Stages "offline" and "peer": a queue of requests in our engine, and in transformers.

256 requests at once, with prompts and answers of 100 to 1,024 tokens; transformers runs answers a quarter as long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from bench.check.context import StageContext
from bench.check.limits import stage_limits
from bench.check.model import LoadedModel, load
from bench.check.stages import PEER
from chatcache.bench.drivers import SHAPES, EngineDriver, write_config
from chatcache.bench.report import Figure, compare
from chatcache.types.request import SamplingParams

MAX_TOKEN_ID = 10_000
PEER_FACTOR = 4
PEER_WORK = "the same prompts, answers a quarter as long"


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests: prompts, and the number of tokens of each answer."""

    prompts: Sequence[tuple[int, ...]]
    lengths: Sequence[int]

    @property
    def num_output(self) -> int:
        return sum(self.lengths)

    def shorter(self, factor: int) -> Queue:
        """Return the same prompts with answers 1 / factor as long."""
        return Queue(self.prompts, [max(1, length // factor) for length in self.lengths])

    def text(self) -> str:
        return f"{len(self.prompts)} requests, {sum(map(len, self.prompts))} in, {self.num_output} out"


def make_queue(num_requests: int, low: int = 100, high: int = 1024, max_token_id: int = MAX_TOKEN_ID) -> Queue:
    """Return the workload that engines are compared with: uniform lengths, seed 0."""
    source = random.Random(0)
    prompts = [
        tuple(source.randint(0, max_token_id) for _ in range(source.randint(low, high))) for _ in range(num_requests)
    ]
    return Queue(prompts, [source.randint(low, high) for _ in range(num_requests)])


QUEUES = {"full": (256, 100, 1024, MAX_TOKEN_ID), "cpu": (8, 10, 60, MAX_TOKEN_ID), "tiny": (5, 3, 12, 500)}


def floor_s(model: LoadedModel, queue: Queue) -> float:
    """Return the queue's roofline in seconds: all prompts, then the longest answer's steps."""
    roofline, num_prompt_tokens = model.roofline, sum(map(len, queue.prompts))
    total = sum(roofline.prefill_s(len(prompt)) for prompt in queue.prompts)
    flops_only = 2.0 * roofline.layer_params * num_prompt_tokens / roofline.limits.matmul_flops_per_s
    total = max(
        min(total, flops_only * 1.5), flops_only
    )  # short prompts share a step, so they read the weights together
    running = list(zip(map(len, queue.prompts), queue.lengths, strict=True))
    for done in range(1, max(queue.lengths)):
        running = [(prompt, length) for prompt, length in running if length > done]
        total += roofline.decode_s(len(running), sum(prompt + done for prompt, _ in running))
    return total


def generate(driver: EngineDriver, queue: Queue) -> float:
    """Run the queue and return its seconds; answers have exactly the given lengths."""
    start = time.perf_counter()
    for number, (prompt, length) in enumerate(zip(queue.prompts, queue.lengths, strict=True)):
        params = SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, seed=number)
        driver.submit([prompt], params)
    while driver.engine.has_work():
        driver.step()
    return time.perf_counter() - start


def run(context: StageContext, name: str) -> None:
    """Measure the queue with and without asynchronous scheduling, and one of shorter answers."""
    model, queue = load(context, name, stage_limits(context)), make_queue(*QUEUES[context.size])
    context.note("workload", queue.text())
    generate(model.driver(), queue.shorter(max(queue.lengths)))

    def measure_queue() -> None:
        driver = model.driver()
        seconds = generate(driver, queue)
        health = driver.engine.health()
        assert health.num_output_tokens == queue.num_output, health
        limit = queue.num_output / floor_s(model, queue)
        label = f"{name}: {queue.text()}"
        context.add(compare(label, queue.num_output / seconds, "tokens/s", limit, "roofline", ">= 0.70"))
        counts = {"steps": health.num_steps, "preemptions": health.num_preemptions, "s": seconds}
        context.note(f"{name}: offline", counts)
        if model.runner.capacity().has_async_launch:
            synchronous_s = generate(model.driver(ahead=False), queue)
            label = f"{name}: the same, synchronous over asynchronous"
            context.add(compare(label, synchronous_s, "s", seconds, "asynchronous"))

    def measure_shorter_queue() -> None:
        shorter = queue.shorter(PEER_FACTOR)
        generate(model.driver(), shorter)
        seconds = min(generate(model.driver(), shorter) for _ in range(2))
        context.add(Figure(f"{name}: {PEER_WORK}", shorter.num_output / seconds, "tokens/s"))

    context.measure("the queue", measure_queue, needs_s=10)
    context.measure("the shorter queue", measure_shorter_queue, needs_s=5)


# -- transformers -------------------------------------------------------------------------------------------------


def run_transformers(context: StageContext, name: str) -> None:
    """Measure the throughput of Hugging Face transformers on the request queue, for `compare_stages`.

    Answers are shorter by PEER_FACTOR, so that it ends in time.
    """
    queue = make_queue(*QUEUES[context.size]).shorter(PEER_FACTOR)
    model = _load_transformers(context, name)

    def warm_up() -> None:
        _generate_with_transformers(context, model, Queue(queue.prompts[:4], [4] * 4))

    def measure_queue() -> None:
        seconds, num_tokens = _generate_with_transformers(context, model, queue)
        context.add(Figure(f"{name}: {PEER}, {PEER_WORK}", num_tokens / seconds, "tokens/s"))
        if num_tokens < queue.num_output:
            context.note(
                "extrapolated", f"{num_tokens} of {queue.num_output} tokens were generated before the time limit"
            )

    context.measure("warm-up", warm_up)
    context.measure("the queue", measure_queue, needs_s=10)


def _load_transformers(context: StageContext, name: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    folder = context.out / "models" / f"{name}-transformers"
    write_config(SHAPES[name], folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(context.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def _generate_with_transformers(context: StageContext, model: Any, queue: Queue) -> tuple[float, int]:
    """Return seconds and tokens of the finished requests, within the time of the stage."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=-1, max_new_tokens=max(queue.lengths))
    num_tokens = num_done = 0
    hints = _workload_hints(queue)
    with ExitStack() as patches:
        if (
            not context.on_gpu
        ):  # transformers sizes its KV cache by the memory of a GPU, and reads that of a CPU by psutil
            hints["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128)
            memory = (torch.device("cpu"), 2**30, 0, 0)
            name = "transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown"
            patches.enter_context(mock.patch(name, return_value=memory))
        manager = patches.enter_context(
            model.continuous_batching_context_manager(generation_config=config, block=True, timeout=5, **hints)
        )
        start = time.perf_counter()
        for prompt, length in zip(queue.prompts, queue.lengths, strict=True):
            manager.add_request(list(prompt), max_new_tokens=length)
        while num_done < len(queue.prompts):
            result = manager.get_result(timeout=0.5)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                num_done, num_tokens = num_done + 1, num_tokens + len(result.generated_tokens)
            elif not manager.is_running() or context.time_left_s < 5:
                break
        seconds = time.perf_counter() - start
    if not num_done:
        raise RuntimeError("no request finished")
    return seconds, num_tokens


def _workload_hints(queue: Queue) -> dict[str, Any]:
    """Return the size of the queue for versions of transformers that accept it."""
    try:
        from transformers.generation.continuous_batching.utils import WorkloadHints
    except ImportError:
        return {}
    longest = max(map(len, queue.prompts))
    hints = WorkloadHints(
        max_prompt_length=longest, max_generated_length=max(queue.lengths), num_requests=len(queue.prompts)
    )
    return {"workload_hints": hints}
