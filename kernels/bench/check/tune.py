"""Stage "tune attention": time every launch configuration on this chip, for `configs.py`.

A configuration belongs to a tile height and a head size, not to a batch. Each is therefore timed over several loads,
and the best one has the smallest worst ratio: the largest ratio of its time to the best time for a load.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from unittest import mock

from chatcache_kernels.triton.configs import Config, MergeConfig

from bench.check.context import StageContext
from bench.check.workload import Heads, Rows, Workload, build, equal_rows, make_batch, tree_rows
from chatcache.bench.device import time_work
from chatcache.bench.report import Figure, compare

MAX_PROCESSES = 8
WARPS, STAGES, PROGRAMS = (4, 8), (2, 3, 4, 5), (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Load:
    """A workload whose attention work items all have one tile height.

    `share`: see `work_list.plan_work`.
    """

    name: str
    rows: Rows
    share: str = "auto"


@dataclass(frozen=True, slots=True)
class Kind:
    """Entry of `configs.py` to tune: a tile height (`queries`) and a head size, with workloads.

    `blocks`: the numbers of keys per tile to try.
    """

    queries: int
    heads: Heads
    loads: Sequence[Load]
    blocks: Sequence[int]

    @property
    def name(self) -> str:
        return f"({self.queries}, {self.heads.head_dim})"

    def candidates(self) -> list[Config]:
        """Return the launch configurations to compile; `programs` varies without compilation."""
        parts = (False, True) if self.queries <= 32 else (True,)
        stages = STAGES if self.queries <= 32 else STAGES[:3]
        shapes = itertools.product(parts, self.blocks, WARPS, stages)
        return [
            Config(rows=self.queries, block_n=block, num_warps=warps, num_stages=depth, programs=2, unmasked_loop=part)
            for part, block, warps, depth in shapes
        ]


def kinds(size: str) -> list[Kind]:
    """Return the entries of `configs.py` to tune at this size."""
    if size == "tiny":
        loads = [Load("decode", equal_rows(1, 9, 1), "never")]
        return [Kind(16, Heads(4, 2, 16), loads, (16,))]
    decode = [
        Load("64 x 1024", equal_rows(64, 1024, 1), "never"),
        Load("8 x 8192", equal_rows(8, 8192, 1), "never"),
        Load("256 x 1024", equal_rows(256, 1024, 1), "never"),
        Load("1 x 8192", equal_rows(1, 8192, 1), "never"),
    ]
    prompt = [Load("prompt 4096", equal_rows(1, 4096, 4096)), Load("chunk 512 after 8192", equal_rows(1, 8704, 512))]
    shared = [Load("32 after 16384", tree_rows([(1, 16_384), (32, 32)]), "always")]
    found = []
    for heads in (Heads(32, 8, 128), Heads(32, 8, 64)):
        found.append(Kind(16, heads, decode, (16, 32, 64, 128)))
        found.append(Kind(64, heads, [*prompt, *shared], (32, 64, 128)))
    return found


MERGES = [MergeConfig(*one) for one in itertools.product((16, 32, 64), (2, 4, 8), (2, 4, 8))]


def run(context: StageContext) -> None:
    """Rank the launch configurations of every entry, and compare the current one with the best."""
    for kind in kinds(context.size):
        context.measure(f"tune {kind.name}", lambda kind=kind: _tune(context, kind), needs_s=20)  # type: ignore[misc]
    context.measure("tune merge", lambda: _tune_merge(context), needs_s=5)


def _works(context: StageContext, kind: Kind) -> list[Workload]:
    kernels = importlib.import_module("chatcache_kernels.triton")
    found = []
    for load in kind.loads:
        work = build(kernels, kind.heads, load.rows, context.device, context.size)
        batch = make_batch(kernels, kind.heads, load.rows, context.device, load.share)  # type: ignore[arg-type]
        found.append(replace(work, batch=batch))
    return found


def _tune(context: StageContext, kind: Kind) -> None:
    candidates = kind.candidates() if context.size != "tiny" else kind.candidates()[:2]
    if context.on_gpu:
        _compile_all(kind, candidates)
    works, times = _works(context, kind), {}
    current = _current(context, kind)
    tried = [replace(one, programs=programs) for one in candidates for programs in PROGRAMS]
    for config in [current, *tried] if context.size != "tiny" else [current, *candidates]:
        try:
            times[config] = [_time_us(context, work, config) for work in works]
        except Exception as error:  # too much shared memory, or too many registers, on this chip
            context.note(f"{kind.name} {config}", f"{type(error).__name__}: {error}"[:200])
    _report(context, kind, current, times)


def _time_us(context: StageContext, work: Workload, config: Config) -> float:
    attention = importlib.import_module("chatcache_kernels.triton.attention")
    with mock.patch.object(attention, "choose_config", return_value=config):
        return time_work(work.attend, work.num_layers, context.device, repeats=7, budget_s=0.05).median_s * 1e6


def _current(context: StageContext, kind: Kind) -> Config:
    import torch
    from chatcache_kernels.triton.configs import choose_config, get_chip

    return choose_config(get_chip(torch.device(context.device)), kind.queries, kind.heads.head_dim, 2)


def _report(context: StageContext, kind: Kind, current: Config, times: dict[Config, list[float]]) -> None:
    """Rank configurations by their worst ratio to the best time of a workload; store the ranks."""
    bests = [min(column) for column in zip(*times.values(), strict=True)]
    worst = {one: max(us / best for us, best in zip(row, bests, strict=True)) for one, row in times.items()}
    ranked = sorted(worst, key=lambda one: worst[one])
    rows = [{**asdict(one), "worst ratio": worst[one], "us": times[one]} for one in ranked]
    context.note(f"tune {kind.name}", {"loads": [load.name for load in kind.loads], "ranked": rows})
    print(f"   {kind.name}: {ranked[0]} worst {worst[ranked[0]]:.3f}", flush=True)
    for index, load in enumerate(kind.loads):
        name = f"tune {kind.name}, {load.name}: current over best"
        context.add(compare(name, times[current][index], "us", times[ranked[0]][index], "best"))


def _tune_merge(context: StageContext) -> None:
    """Rank the configurations of the merge kernel by the time of the whole attention call."""
    merge = importlib.import_module("chatcache_kernels.triton.attention")
    loads = kinds(context.size)[0]
    first_load = replace(loads, loads=[loads.loads[min(1, len(loads.loads) - 1)]])
    (work,), times = _works(context, first_load), {}
    for config in [merge.MERGE, *(MERGES if context.size != "tiny" else MERGES[:1])]:
        with mock.patch.object(merge, "MERGE", config):
            timing = time_work(work.attend, work.num_layers, context.device, repeats=7, budget_s=0.05)
        times[config] = timing.median_s * 1e6
    best = min(times, key=lambda one: times[one])
    context.note("tune merge", sorted(([us, asdict(one)] for one, us in times.items()), key=lambda pair: pair[0]))
    context.add(Figure(f"tune merge: best {best.block_s} {best.num_warps} {best.programs}", times[best], "us"))


def _compile_all(kind: Kind, candidates: Sequence[Config]) -> None:
    """Compile the candidates in several processes, to fill Triton's cache.

    Errors are ignored here: the timing fails on the same candidates and records them.
    """
    count = min(MAX_PROCESSES, max(1, (os.cpu_count() or 2) // 2))
    parts = [list(candidates[number::count]) for number in range(count)]
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_some, [replace(kind, loads=())] * count, parts))


def _compile_some(kind: Kind, configs: Sequence[Config]) -> None:
    import torch

    attention = importlib.import_module("chatcache_kernels.triton.attention")
    kernels = importlib.import_module("chatcache_kernels.triton")
    group = kind.heads.num_heads // kind.heads.num_kv_heads
    many = max(1, kind.queries // group)
    rows = equal_rows(1, 64 + many, many) if kind.queries > 16 else equal_rows(2, 600, 1)
    work = build(kernels, kind.heads, rows, "cuda", "tiny")
    for config in configs:
        try:
            with torch.inference_mode(), mock.patch.object(attention, "choose_config", return_value=config):
                work.attend(0)
        except Exception as error:
            print(f"   {config}: {type(error).__name__}", flush=True)
    torch.cuda.synchronize()
