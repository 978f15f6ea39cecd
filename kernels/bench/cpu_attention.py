"""Paged attention on this CPU beside its limits: python kernels/bench/cpu_attention.py [--json FILE]

Decode is bound by reading keys and values: achieved bytes per second over the read bandwidth of a buffer as large.
Rows that share a prompt are compared with the same rows ungrouped: keys per second, and the ratio is the gain.
Prefill is bound by matrix multiplication: achieved FLOPs (the causal half of them) over the matmul rate. Pages are
shuffled, as they are after a while of serving. All in the same run, each the best of many.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from dataclasses import asdict, dataclass, replace

import torch
from chatcache_kernels import ceilings, cpu
from chatcache_kernels.types import AttentionBatch, KVPages
from torch import Tensor

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128), "multi-head": (8, 8, 64)}  # H, Hkv, D


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. `achieved` and `limit` in `unit`."""

    name: str
    time_us: float
    achieved: float
    limit: float
    unit: str

    def line(self) -> str:
        """Return the table's line."""
        rates = f"{self.achieved:9.1f} {self.limit:9.1f} {self.unit:7} {self.achieved / self.limit:5.2f}"
        return f"{self.name:52} {self.time_us:10.1f} {rates}"


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of equal length in shuffled pages of 16 tokens, bfloat16 everywhere."""

    pages: KVPages
    batch: AttentionBatch
    q: Tensor

    @classmethod
    def build(cls, shape: tuple[int, int, int], num_rows: int, context: int, new: int) -> Workload:
        """Return rows that hold `context` tokens, the last `new` of them new."""
        heads, kv_heads, head_dim = shape
        row_pages = -(-context // 16)
        num_pages = num_rows * row_pages + 1
        pages = cpu.allocate_pages(1, num_pages, 16, kv_heads, head_dim, torch.bfloat16)
        pages.k.normal_(), pages.v.normal_()
        tables = (torch.randperm(num_pages - 1) + 1).view(num_rows, row_pages)
        counts = torch.full((num_rows,), new)
        batch = AttentionBatch.build(tables, context - counts, counts, 16)
        return cls(pages, batch, torch.randn(num_rows * new, heads, head_dim).to(torch.bfloat16))

    def time_s(self) -> float:
        """Return the best time of one layer's attention."""
        return ceilings.best_s(lambda: cpu.paged_attention(self.q, self.pages, 0, self.batch, 0.1))


def decode(name: str, num_rows: int, context: int) -> Figure:
    """Measure one new token a row."""
    work = Workload.build(SHAPES[name], num_rows, context, 1)
    num_bytes = num_rows * context * work.pages.page_bytes // 16
    seconds = work.time_s()
    limit = ceilings.read_bytes_per_s(num_bytes)
    label = f"decode  {name}, {num_rows} x {context} ({num_bytes / 2**20:.1f} MiB)"
    return Figure(label, seconds * 1e6, num_bytes / seconds / 1e9, limit / 1e9, "GB/s")


def shared(name: str, num_rows: int, prompt: int) -> Figure:
    """Measure branches of one prompt that have gone on for 20 tokens each, beside the same rows read one by one."""
    heads, kv_heads, head_dim = SHAPES[name]
    common, own = prompt // 16, 2
    num_pages = common + num_rows * own + 1
    pages = cpu.allocate_pages(1, num_pages, 16, kv_heads, head_dim, torch.bfloat16)
    pages.k.normal_(), pages.v.normal_()
    shuffled = torch.randperm(num_pages - 1) + 1
    tables = torch.cat((shuffled[:common].expand(num_rows, -1), shuffled[common:].view(num_rows, own)), 1)
    batch = AttentionBatch.build(tables, torch.full((num_rows,), prompt + 20), torch.ones(num_rows), 16)
    rows, start, num_tokens = (x.numpy() for x in (batch.tables, batch.start, batch.num_tokens))
    together = replace(batch, work=cpu.prepare(rows, start, num_tokens, 16, heads // kv_heads))
    q = torch.randn(num_rows, heads, head_dim).to(torch.bfloat16)
    keys = num_rows * (prompt + 21) / 1e6
    apart_s, seconds = Workload(pages, batch, q).time_s(), Workload(pages, together, q).time_s()
    return Figure(f"shared  {name}, {num_rows} x {prompt}", seconds * 1e6, keys / seconds, keys / apart_s, "Mkey/s")


def prefill(name: str, context: int, new: int) -> Figure:
    """Measure one row's chunk of `new` tokens after context - new cached ones."""
    heads, _, head_dim = SHAPES[name]
    work = Workload.build(SHAPES[name], 1, context, new)
    flops = 4 * heads * head_dim * new * (context - new / 2)
    seconds = work.time_s()
    limit = ceilings.matmul_flops_per_s(torch.bfloat16)
    return Figure(
        f"prefill {name}, {new} after {context - new}", seconds * 1e6, flops / seconds / 1e9, limit / 1e9, "GFLOP/s"
    )


def measure() -> list[Figure]:
    """Measure every line of the table."""
    figures = [decode(name, rows, 2048) for name in SHAPES for rows in (1, 8, 32)]
    figures += [shared(name, 8, prompt) for name in ("SmolLM2-135M", "Llama-3-8B") for prompt in (1024, 2048, 4096)]
    return figures + [prefill("SmolLM2-135M", *sizes) for sizes in ((512, 512), (2048, 2048), (2560, 512), (2112, 64))]


def main() -> None:
    """Print the table, and write it where --json says."""
    parser = argparse.ArgumentParser(description="Paged attention on this CPU beside its limits.")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':52} {'us':>10} {'achieved':>9} {'limit':>9} {'':7} ratio")
    figures = measure()
    for figure in figures:
        print(figure.line())
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
