"""(d) 256 requests at once, prompts and answers of 100 to 1,024 tokens: tokens per second beside the floor."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.check.ceilings import quick
from bench.check.context import Context
from bench.check.figures import Figure, compared, rate
from bench.check.model import Loaded, load, step
from chatcache.engine.engine import Engine
from chatcache.types.request import GenerateRequest, SamplingParams

MOST_IDS = 10_000


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests: prompts, and how many tokens each answer has."""

    prompts: Sequence[tuple[int, ...]]
    lengths: Sequence[int]

    @property
    def num_output(self) -> int:
        return sum(self.lengths)

    def shorter(self, factor: int) -> Queue:
        """The same prompts with answers 1 / factor as long."""
        return Queue(self.prompts, [max(1, length // factor) for length in self.lengths])

    def text(self) -> str:
        return f"{len(self.prompts)} requests, {sum(map(len, self.prompts))} in, {self.num_output} out"


def make_queue(num_requests: int, least: int = 100, most: int = 1024, most_ids: int = MOST_IDS) -> Queue:
    """The workload other engines are compared by: uniform lengths, seed 0."""
    source = random.Random(0)
    prompts = [
        tuple(source.randint(0, most_ids) for _ in range(source.randint(least, most))) for _ in range(num_requests)
    ]
    return Queue(prompts, [source.randint(least, most) for _ in range(num_requests)])


QUEUES = {"full": (256, 100, 1024, MOST_IDS), "cpu": (8, 10, 60, MOST_IDS), "tiny": (5, 3, 12, 500)}


def floor_s(model: Loaded, queue: Queue) -> float:
    """All prompts computed once, then one step per token of the longest answer, each at its own roofline."""
    total = sum(model.prefill_floor_s(len(prompt)) for prompt in queue.prompts)
    flops_only = 2.0 * model.layer_params * sum(map(len, queue.prompts)) / model.limits.matmul_flops_per_s
    total = max(min(total, flops_only * 1.5), flops_only)  # short prompts share a step, so none waits for the weights
    running = list(zip(map(len, queue.prompts), queue.lengths, strict=True))
    for done in range(1, max(queue.lengths)):
        running = [(prompt, length) for prompt, length in running if length > done]
        total += model.decode_floor_s(len(running), sum(prompt + done for prompt, _ in running))
    return total


def generate(engine: Engine, queue: Queue) -> float:
    """Run the queue and return its seconds; lengths are exact."""
    start = time.perf_counter()
    for number, (prompt, length) in enumerate(zip(queue.prompts, queue.lengths, strict=True)):
        params = SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True, seed=number)
        engine.add(GenerateRequest(request_id=f"offline-{number}", prompt=prompt, params=params))
    while engine.has_work():
        step(engine)
    return time.perf_counter() - start


def run(context: Context, name: str) -> None:
    """Measure the queue, running ahead and one by one, and a shorter one that the peer can finish."""
    model, queue = load(context, name, quick(context)), make_queue(*QUEUES[context.size])
    context.note("workload", queue.text())
    generate(model.engine(), queue.shorter(max(queue.lengths)))

    def whole() -> None:
        engine = model.engine()
        seconds = generate(engine, queue)
        health = engine.health()
        assert health.num_output_tokens == queue.num_output, health
        limit = queue.num_output / floor_s(model, queue)
        context.add(rate(f"{name}: {queue.text()}", queue.num_output / seconds, "tokens/s", limit, ">= 0.70"))
        context.note(
            f"{name}: offline", {"steps": health.num_steps, "preemptions": health.num_preemptions, "s": seconds}
        )
        if model.runner.capacity().runs_ahead:
            slower = generate(model.engine(ahead=False), queue)
            context.add(compared(f"{name}: the same, one by one over ahead", slower, "s", seconds))

    def short() -> None:
        engine, fewer = model.engine(), queue.shorter(PEER_FACTOR)
        generate(engine, fewer)
        seconds = min(generate(model.engine(), fewer) for _ in range(2))
        context.add(Figure(f"{name}: {PEER_SLICE}", fewer.num_output / seconds, "tokens/s"))

    context.measure("the queue", whole, needs_s=10)
    context.measure("the shorter queue", short, needs_s=5)


PEER_FACTOR = 4
PEER_SLICE = "the same prompts, answers a quarter as long"
