"""Stage "tune attention": time launch configurations on this chip, for `configs.py` and `work_list.SPLIT_TOKENS`.

A configuration belongs to a tile height and a head size, not to a batch. Each is therefore timed over several loads,
and the best one has the smallest worst ratio: the largest ratio of its time to the best time for a load. All candidates
are compiled first, in parallel; the numbers of programs are then tried for the best few, as they need no compilation.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

from chatcache_kernels import work_list
from chatcache_kernels.triton.configs import Config, MergeConfig
from chatcache_kernels.types import AttentionBatch

from bench.check.context import StageContext
from bench.check.workload import Heads, Rows, Workload, build, equal_rows, make_batch, tree_rows
from chatcache.bench.device import time_work
from chatcache.bench.report import compare, format_table

C = TypeVar("C")
"""A candidate: a configuration of attention or of the merge, or (keys of a decode item, configuration)."""

LaunchConfig = TypeVar("LaunchConfig", Config, MergeConfig)

MAX_PROCESSES = 14
MAX_SHARED_BYTES = 227 << 10
MAX_LAYERS = 64
NUM_PRINTED = 6
SPLITS = (256, 512, 1024, 2048)
MERGES = [MergeConfig(*one) for one in itertools.product((4, 8, 16, 32), (1, 2, 4), (8, 16))]


@dataclass(frozen=True, slots=True)
class Load:
    """A workload whose attention work items mostly have one tile height.

    `share`: see `work_list.plan_work`.
    """

    name: str
    rows: Rows
    share: str = "never"


@dataclass(frozen=True, slots=True)
class Kind:
    """Entry of `configs.py` to tune: a tile height (`queries`) and a head size, with workloads and candidates.

    `shapes`: (keys per tile, warps) to try. `unmasked`: values of `unmasked_loop`. `num_layers`: maximum number of
    layers that one measurement runs.
    """

    queries: int
    heads: Heads
    loads: Sequence[Load]
    shapes: Sequence[tuple[int, int]]
    stages: Sequence[int]
    programs: Sequence[int]
    unmasked: Sequence[bool] = (True,)
    num_layers: int = MAX_LAYERS

    @property
    def name(self) -> str:
        return f"({self.queries}, {self.heads.head_dim})"

    def candidates(self) -> list[Config]:
        """Return the launch configurations to compile: those that fit the shared memory of a multiprocessor."""
        found = [
            Config(self.queries, block, warps, depth, programs=self.programs[-1], unmasked_loop=part)
            for (block, warps), depth, part in itertools.product(self.shapes, self.stages, self.unmasked)
        ]
        return [config for config in found if self._shared_bytes(config) <= MAX_SHARED_BYTES]

    def _shared_bytes(self, config: Config) -> int:
        """Return about how much shared memory a program takes: its queries, and the tiles in flight."""
        num_tiles = config.num_stages - (self.queries <= 32)  # large tiles are multiplied from shared memory
        return (num_tiles * 2 * config.block_n + self.queries) * self.heads.head_dim * 2


def kinds(size: str) -> list[Kind]:
    """Return the entries of `configs.py` to tune at this size, the most important first."""
    if size == "tiny":
        return [Kind(16, Heads(4, 2, 16), [Load("decode", equal_rows(1, 9, 1))], [(16, 1)], (1, 2), (1, 2))]
    decode = [Load(f"{rows} x {length}", equal_rows(rows, length, 1)) for rows, length in DECODE_LOADS]
    shared = [
        Load("32 after 16384", tree_rows([(1, 16_384), (32, 32)]), "always"),
        Load("64 after 2048", tree_rows([(1, 2048), (64, 64)]), "always"),
        Load("16 x 16 after 2048", equal_rows(16, 2064, 16)),
    ]
    prefill = [
        Load("8192", equal_rows(1, 8192, 8192)),
        Load("16 x 512", equal_rows(16, 512, 512)),
        Load("512 after 16384", equal_rows(1, 16_896, 512)),
    ]
    small = [(32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4), (128, 8)]
    shared_shapes, prefill_shapes = [(32, 4), (64, 4), (64, 8), (128, 4), (128, 8)], [(32, 8), (64, 8), (128, 8)]
    found = []
    for heads in (Heads(32, 8, 128), Heads(32, 8, 64)):
        found += [
            Kind(16, heads, decode, small, (2, 3, 4, 5), (1, 2, 3, 4, 6, 8), (False, True)),
            Kind(128, heads, prefill, prefill_shapes, (2, 3, 4), (1, 2, 4, 8), (True, False), num_layers=4),
            Kind(64, heads, shared, shared_shapes, (2, 3, 4), (1, 2, 4, 8)),
        ]
    return found


DECODE_LOADS = ((1, 1024), (1, 16384), (8, 2048), (64, 1024), (256, 512))


def run(context: StageContext) -> None:
    """Rank the launch configurations of every entry, the sizes of decode items, and those of the merge."""
    entries = kinds(context.size)
    if context.on_gpu:
        jobs: list[tuple[Kind, Config | MergeConfig]] = [(kind, one) for kind in entries for one in kind.candidates()]
        jobs += [(entries[0], one) for one in MERGES if one.programs == MERGES[0].programs]
        context.measure(f"compile {len(jobs)} candidates", partial(_compile_all, jobs))
    best: dict[str, Config] = {}
    for kind in entries[:2]:
        context.measure(f"tune {kind.name}", partial(_tune, context, kind, best), needs_s=15)
    decode, all_heads = entries[0], [entries[0].heads]
    if context.size != "tiny":
        all_heads.append(Heads(16, 8, 128))
    for heads in all_heads:
        tune_split = partial(_tune_split, context, replace(decode, heads=heads), best.get(decode.name))
        context.measure(f"tune split {heads.name}", tune_split, needs_s=10)
    context.measure("tune merge", partial(_tune_merge, context, decode), needs_s=10)
    for kind in entries[2:]:
        context.measure(f"tune {kind.name}", partial(_tune, context, kind, best), needs_s=15)


def _tune(context: StageContext, kind: Kind, best: dict[str, Config]) -> None:
    """Rank the candidates of an entry, then the numbers of programs for the first ones; keep the best in `best`."""
    loads = {load.name: _build(context, kind.heads, load) for load in kind.loads}
    current = _current(context, kind)
    candidates = kind.candidates()
    times = _time_all(context, kind, loads, [current, *candidates])
    first = sorted(times, key=_worst_ratios(times).__getitem__)[:NUM_PRINTED]
    others = [replace(one, programs=n) for one in dict.fromkeys((*first, current)) for n in kind.programs]
    times |= _time_all(context, kind, loads, [one for one in others if one not in times])
    ranked = _report(context, f"tune {kind.name}", list(loads), current, times)
    best[kind.name] = ranked[0]


def _tune_split(context: StageContext, kind: Kind, best: Config | None) -> None:
    """Rank pairs of keys per decode item and programs, for the best decode configuration."""
    current = _current(context, kind)
    config = best or current
    pairs = [(split, replace(config, programs=n)) for split in SPLITS for n in kind.programs]
    by_load = ("by load", current)
    times: dict[Any, list[float]] = {pair: [] for pair in [by_load, *pairs]}
    for load in kind.loads:
        work = _build(context, kind.heads, load)
        batches: dict[Any, AttentionBatch] = {"by load": work.batch}
        for split in SPLITS:
            with mock.patch.multiple(work_list, SPLIT_TOKENS=split, LOAD_SPLITS=(1,)):
                batches[split] = _plan(context, work, load).batch
        for (split, one), row in times.items():
            row.append(_time_us(context, kind, replace(work, batch=batches[split]), one))
    name = f"tune split {kind.heads.name}"
    _report(context, name, [load.name for load in kind.loads], by_load, times)


def _tune_merge(context: StageContext, kind: Kind) -> None:
    """Rank the configurations of the merge kernel by the time of the whole attention call."""
    merge = importlib.import_module("chatcache_kernels.triton.attention").MERGE
    loads = {load.name: _build(context, kind.heads, load) for load in kind.loads[:4]}
    candidates = [merge, *(MERGES if context.size != "tiny" else MERGES[:1])]
    _report(context, "tune merge", list(loads), merge, _time_all(context, kind, loads, candidates))


def _build(context: StageContext, heads: Heads, load: Load) -> Workload:
    kernels = importlib.import_module("chatcache_kernels.triton")
    return _plan(context, build(kernels, heads, load.rows, context.device, context.size), load)


def _plan(context: StageContext, work: Workload, load: Load) -> Workload:
    """Return the workload with the attention of its rows planned as `load` and `work_list` say."""
    batch = make_batch(work.kernels, work.heads, load.rows, context.device, load.share)  # type: ignore[arg-type]
    return replace(work, batch=batch)


def _time_all(
    context: StageContext, kind: Kind, loads: Mapping[str, Workload], candidates: Sequence[LaunchConfig]
) -> dict[LaunchConfig, list[float]]:
    """Time candidates over all loads until the stage's time is nearly over; those that do not compile are left out."""
    times: dict[LaunchConfig, list[float]] = {}
    for config in dict.fromkeys(candidates):
        if context.time_left_s < 3:
            context.skip(f"tune {kind.name}: {config}", "no time left")
            break
        try:
            times[config] = [_time_us(context, kind, work, config) for work in loads.values()]
        except Exception as error:  # too much shared memory, or too many registers, on this chip
            context.note(f"{kind.name} {config}", f"{type(error).__name__}: {error}"[:200])
    return times


def _time_us(context: StageContext, kind: Kind, work: Workload, config: Config | MergeConfig) -> float:
    with _use(config):
        num_layers = min(work.num_layers, kind.num_layers)
        return time_work(work.attend, num_layers, context.device, repeats=7, budget_s=0.03).median_s * 1e6


@contextmanager
def _use(config: Config | MergeConfig) -> Iterator[None]:
    """Launch attention tiles of the configuration's height with it, or merges."""
    attention = importlib.import_module("chatcache_kernels.triton.attention")
    choose: Callable[..., Config] = attention.choose_config

    def choose_or_use(*arguments: Any, **options: Any) -> Config:
        found = choose(*arguments, **options)
        return config if isinstance(config, Config) and found.rows == config.rows else found

    name, value = ("MERGE", config) if isinstance(config, MergeConfig) else ("choose_config", choose_or_use)
    with mock.patch.object(attention, name, value):
        yield


def _current(context: StageContext, kind: Kind) -> Config:
    import torch
    from chatcache_kernels.triton.configs import choose_config, get_chip

    return choose_config(get_chip(torch.device(context.device)), kind.queries, kind.heads.head_dim, 2)


def _worst_ratios(times: Mapping[C, Sequence[float]]) -> dict[C, float]:
    """Return the largest ratio of each candidate's times to the best time of a load."""
    bests = [min(column) for column in zip(*times.values(), strict=True)]
    return {one: max(us / best for us, best in zip(row, bests, strict=True)) for one, row in times.items()}


def _report(
    context: StageContext, name: str, loads: Sequence[str], current: C, times: Mapping[C, list[float]]
) -> list[C]:
    """Print the best candidates and the current one, store all of them, and return them ranked."""
    worst = _worst_ratios(times)
    ranked = sorted(worst, key=worst.__getitem__)
    rows = [{"candidate": _describe(one), "worst ratio": worst[one], "us": times[one]} for one in ranked]
    context.note(name, {"loads": list(loads), "ranked": rows})
    printed = [*ranked[:NUM_PRINTED], *([current] if current in ranked[NUM_PRINTED:] else [])]
    cells = [
        (
            f"{ranked.index(one) + 1}",
            _short(one) + (" (current)" if one == current else ""),
            f"{worst[one]:.3f}",
            *(f"{us:.2f}" for us in times[one]),
        )
        for one in printed
    ]
    print(f"\n{name}: best of {len(ranked)}, us a call")
    print(format_table(("", "candidate", "worst", *loads), cells, "><>" + ">" * len(loads)), flush=True)
    for index, load in enumerate(loads):
        best = times[ranked[0]][index]
        context.add(compare(f"{name}, {load}: current over best", times[current][index], "us", best, "best"))
    return ranked


def _describe(candidate: Any) -> Any:
    """Return a candidate as JSON: a configuration, or keys per item with one."""
    return [candidate[0], asdict(candidate[1])] if isinstance(candidate, tuple) else asdict(candidate)


def _short(candidate: Any) -> str:
    """Return a candidate as a cell of a table."""
    if isinstance(candidate, tuple):
        return f"split {candidate[0]}, {_short(candidate[1])}"
    if isinstance(candidate, MergeConfig):
        return f"block_s {candidate.block_s}, warps {candidate.num_warps}, programs {candidate.programs}"
    return (
        f"block_n {candidate.block_n}, warps {candidate.num_warps}, stages {candidate.num_stages}, "
        f"programs {candidate.programs}" + (", unmasked_loop" if candidate.unmasked_loop else "")
    )


def _compile_all(jobs: Sequence[tuple[Kind, Config | MergeConfig]]) -> None:
    """Compile candidates in several processes, to fill Triton's cache.

    Errors are ignored here: the timing fails on the same candidates and records them.
    """
    count = min(MAX_PROCESSES, max(1, (os.cpu_count() or 2) - 2))
    jobs = [(replace(kind, loads=()), config) for kind, config in jobs]
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, jobs))


def _compile(job: tuple[Kind, Config | MergeConfig]) -> None:
    """Launch one candidate over a small workload."""
    import torch

    (kind, config), kernels = job, importlib.import_module("chatcache_kernels.triton")
    num_new = max(1, kind.queries * kind.heads.num_kv_heads // kind.heads.num_heads)
    rows = equal_rows(1, 64 + num_new, num_new) if kind.queries > 16 else equal_rows(2, 600, 1)
    try:
        work = build(kernels, kind.heads, rows, "cuda", "tiny")
        with torch.inference_mode(), _use(config):
            work.attend(0)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"   {kind.name} {_short(config)}: {type(error).__name__}", flush=True)
