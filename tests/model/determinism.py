"""Run one workload in many configurations and record the bits of its results.

Run as a script, it prints a digest of the bits, so that a test can compare processes.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from msgspec import structs
from numpy.typing import NDArray

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import LaunchedStep, Runner
from chatcache.model.sampling.sampler import PendingDraws
from chatcache.types.events import Failed, Started, Tokens
from chatcache.types.plan import KVCapacity, StepPlan, StepResult
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.model.families import VOCAB, save_random

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 1536,  # wide enough for oneDNN to add up in other orders for other numbers of rows
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHAPES = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
}
NUM_REQUESTS = 33
MAX_TOKENS = 6
PAGE = 16
SNAPSHOT_INTERVAL = 32  # tokens; the end of a prompt gets a snapshot, too, if it is half as many after the others

Cell = tuple[int, ...]  # (seed, lane, position) of a draw, each request with a seed of its own; or the tokens before it
Bits = Mapping[Cell | str, bytes]


def save_shape(name: str, folder: Path) -> Path:
    """Save the random model of a shape."""
    torch.manual_seed(sum(map(ord, name)))
    save_random(SHAPES[name](), folder)
    return folder


def load(
    folder: Path, dtype: str, *, deterministic: bool = True, device: str = "cpu", backend: str = "cpu", **more: Any
) -> Runner:
    return load_model(
        EngineConfig(
            model=str(folder),
            dtype=dtype,
            device=device,
            attention_backend=backend,
            page_size=PAGE,
            kv_memory_bytes=8 << 20,
            deterministic=deterministic,
            **more,
        )
    )


def make_requests() -> list[GenerateRequest]:
    """Return prompts that share prefixes of different lengths.

    One of them is longer than a split of the attention kernel.
    """
    draw = random.Random(5)
    shared = [draw.randrange(VOCAB) for _ in range(530)]
    requests = []
    for number in range(NUM_REQUESTS):
        common = 520 if number == 3 else draw.choice((0, 0, 7, 16, 33, 60))
        own = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 40))]
        params = SamplingParams(
            temperature=(0.0, 1.0, 0.8)[number % 3],
            top_p=0.95 if number % 4 == 1 else 1.0,
            top_k=20 if number % 5 == 2 else 0,
            seed=number,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if number % 8 == 0 else None,
        )
        prompt = tuple(shared[:common] + own)
        requests.append(GenerateRequest(request_id=str(number), prompt=prompt, params=params))
    return requests


@dataclass
class Recorder:
    """An `engine.ModelRunner` that records the logits of every draw, and ends every step before the next is planned.

    `num_pages`: a smaller number of pages to report than the runner has.
    """

    runner: Runner
    num_pages: int | None = None
    by_tokens: bool = False
    bits: dict[Cell | str, bytes] = field(default_factory=dict)
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _tokens: dict[int, list[int]] = field(default_factory=dict)

    def capacity(self) -> KVCapacity:
        capacity = replace(self.runner.capacity(), has_async_launch=False)
        return capacity if self.num_pages is None else replace(capacity, num_pages=self.num_pages)

    def check_device(self) -> None:
        self.runner.check_device()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return LaunchedStep(lambda: self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        sampler = self.runner._sampler
        enqueue = sampler.enqueue
        self._follow(plan)

        def spy(logits: torch.Tensor, index: NDArray[np.intp], *more: Any) -> PendingDraws:
            bits = logits.view(torch.int16).cpu().numpy()
            for draw, row in enumerate(index.tolist()):
                self.write(self.cell_of(plan, draw), bits[row].tobytes())
            return enqueue(logits, index, *more)

        sampler.enqueue = spy  # type: ignore[method-assign,assignment]
        try:
            return self.runner.execute(plan)
        finally:
            del sampler.enqueue  # of the instance: the class has its own

    def cell_of(self, plan: StepPlan, draw: int) -> Cell:
        if self.by_tokens:
            row = int(plan.draws.row[draw])
            end = int(plan.rows.start[row] + plan.rows.num_tokens[row])
            pages = self._tables[int(plan.rows.slot[row])]
            return tuple(self._tokens[pages[at // PAGE]][at % PAGE] for at in range(end))
        return int(plan.draws.seed[draw]), int(plan.draws.lane[draw]), int(plan.draws.position[draw])

    def _follow(self, plan: StepPlan) -> None:
        """Record the tokens whose keys and values each page holds, through the plan's page tables and copies."""
        for source, target, count in plan.forks.tolist():
            self._tables[target] = self._tables[source][:count]
        for slot, index, page in plan.updates.tolist():
            table = self._tables.setdefault(slot, [])
            table += [-1] * (index + 1 - len(table))
            table[index] = page
        for source, target in plan.copies.tolist():
            self._tokens[target] = self._tokens[source][:]
        tokens = iter(plan.rows.tokens.tolist())
        for slot, start, count in np.stack((plan.rows.slot, plan.rows.start, plan.rows.num_tokens), 1).tolist():
            for at in range(start, start + count):
                page = self._tokens.setdefault(self._tables[slot][at // PAGE], [-1] * PAGE)
                page[at % PAGE] = next(tokens)

    def write(self, cell: Cell | str, bits: bytes) -> None:
        """Record the bits of a cell, and mark a cell that was computed twice with different bits.

        A second round or a preemption computes cells again.
        """
        if self.bits.setdefault(cell, bits) != bits:
            self.bits[cell] = b"differs from itself"


@dataclass(frozen=True)
class Way:
    """How to run a workload.

    `budget`: tokens per step; `order`: 1, -1 or a seed to shuffle with; `arrivals`: new requests per step, 0 for all at
    once; `num_pages`: size of a smaller pool.
    """

    batch: int = 1
    budget: int = 2048
    cache: bool = False
    order: int = 1
    arrivals: int = 0
    rounds: int = 1
    num_pages: int | None = None
    preemption: str = "auto"

    def engine(self, recorder: Recorder) -> Engine:
        config = EngineConfig(
            page_size=PAGE,
            max_num_seqs=self.batch,
            max_num_batched_tokens=max(self.budget, self.batch),
            enable_prefix_caching=self.cache,
            preemption_mode=self.preemption,
        )
        engine = Engine(recorder, recorder.runner.model_info, config)
        if (states := engine.scheduler.kv.states) is not None:
            states.interval = SNAPSHOT_INTERVAL
        return engine

    def ordered(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        if self.order in (1, -1):
            return list(requests[:: self.order])
        return random.Random(self.order).sample(list(requests), len(requests))


REQUESTS = make_requests()
FEW = REQUESTS[4:7]
LONG = REQUESTS[2:5]
WAYS: dict[str, tuple[Sequence[GenerateRequest], Way]] = {
    **{
        f"batch{batch}-chunk{budget}-{'cached' if cache else 'uncached'}": (
            {1: FEW, 2: REQUESTS[4:10], 7: REQUESTS[4:18], 32: REQUESTS}[batch],
            Way(batch, budget, cache, order=budget + batch, arrivals=batch // 2, rounds=1 + cache),
        )
        for batch in (1, 2, 7, 32)
        for budget in (5, 37, 2048)
        for cache in (False, True)
        if budget >= batch or batch < 32  # a step holds a token of every branch at least
    },
    "in-order": (REQUESTS, Way(32, 300)),
    "backwards": (REQUESTS, Way(32, 300, order=-1)),
}


def growing_requests(count: int, num_tokens: int) -> list[GenerateRequest]:
    """Return sampled requests with short prompts and long answers, which need ever more pages."""
    params = SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    return [
        GenerateRequest(request_id=str(n), prompt=REQUESTS[n].prompt[:20], params=structs.replace(params, seed=n))
        for n in range(count)
    ]


def run(
    runner: Runner, requests: Sequence[GenerateRequest], way: Way, *, by_tokens: bool = False
) -> tuple[Bits, Engine]:
    """Return the recorded bits and the engine, for its counters."""
    recorder = Recorder(runner, way.num_pages, by_tokens)
    engine = way.engine(recorder)
    for _ in range(way.rounds):
        left = way.ordered(requests)
        outputs: dict[str, list[Any]] = {request.request_id: [] for request in requests}
        while left or engine.has_work():
            arrivals, left = (left, []) if not way.arrivals else (left[: way.arrivals], left[way.arrivals :])
            for request in arrivals:
                engine.add(request)
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Tokens):
                    outputs[event.request_id] += [*event.token_ids, *event.logprobs]
                if isinstance(event, Started):
                    outputs[event.request_id] += [event.prompt_logprobs]
        for request_id, output in outputs.items():
            recorder.write(request_id, repr(output).encode())
    assert bool(engine.health().num_cached_tokens) == way.cache
    return recorder.bits, engine


def alone(runner: Runner, requests: Iterable[GenerateRequest]) -> dict[Cell | str, bytes]:
    """Return the bits of each request run in its own engine, its prompt in one chunk."""
    bits: dict[Cell | str, bytes] = {}
    for request in requests:
        bits |= run(runner, [request], Way())[0]
    return bits


def differing(got: Bits, expected: Bits) -> list[Cell | str]:
    """Return the cells of `got` that differ from `expected`."""
    return [cell for cell, bits in got.items() if expected.get(cell) != bits]


def digest(bits: Bits) -> str:
    whole = hashlib.sha256()
    for cell in sorted(bits, key=repr):
        whole.update(repr(cell).encode() + bits[cell])
    return whole.hexdigest()


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        for dtype in ("float32", "bfloat16"):
            print(digest(run(load(Path(folder), dtype), make_requests(), Way(batch=7, budget=50, cache=True))[0]))
