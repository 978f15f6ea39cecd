"""`chatcache bench`: measure speed next to the limit measured in the same run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from chatcache.cli import options
from chatcache.config import EngineConfig

if TYPE_CHECKING:
    from chatcache.bench.engine_bench import EngineReport
    from chatcache.bench.kv_bench import KVReport

Which = Annotated[
    Literal["latency", "throughput", "beam", "prefix", "embed", "contention", "kv"],
    typer.Argument(help="What to measure.", show_default=False),
]
NamedModel = Annotated[str, typer.Option("--model", help="Same as the argument MODEL.", show_default=False)]
ShapeName = Annotated[
    Literal["tiny", "smollm2-135m", "qwen3-0.6b", "llama3-8b", "qwen3.5-0.8b", "qwen3-moe-1b", "gemma3-1b"] | None,
    typer.Option("--shape", help="Random weights of this shape instead of MODEL.", show_default=False),
]
Mixed = Annotated[
    bool,
    typer.Option(
        "--mixed", help="Latency of running streams and short questions while long prompts arrive.", show_default=False
    ),
]
PromptTokens = Annotated[
    int | None,
    options.integer_option(
        "--prompt-tokens",
        min=16,
        max=2**20,
        help="Length of the prompts; default: 512, with --mixed 6000, at most what fits the context.",
        show_default=False,
    ),
]
OutputTokens = Annotated[int, options.integer_option(min=4, max=2**20, help="Tokens to generate per request.")]
Batch = Annotated[
    list[int],
    options.integer_option(
        "--batch", min=1, max=4096, help="Batch size of throughput and contention; may be given several times."
    ),
]
Repeats = Annotated[int, options.integer_option(min=1, max=1000, help="Repetitions; the median is reported.")]
Compare = Annotated[
    Literal["transformers"] | None,
    typer.Option("--compare", help="Also measure this library with the same load.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.", show_default=False)]


def bench(
    which: Which,
    model: options.Model = "",
    named_model: NamedModel = "",
    shape: ShapeName = None,
    mixed: Mixed = False,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = 64,
    batch: Batch = [1, 8, 32],  # noqa: B006 (typer copies it)
    repeats: Repeats = 3,
    compare: Compare = None,
    as_json: Json = False,
    out: Out = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention_backend: options.AttentionBackend = "auto",
    quantization: options.Quantization = "none",
    kv_cache_dtype: options.KVCacheDtype = "auto",
    kv_memory: options.KVMemory = None,
    page_size: options.PageSize = 16,
    max_num_seqs: options.MaxNumSeqs = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 2048,
    max_prefill_time: options.MaxPrefillTime = None,
    deterministic: options.Deterministic = False,
) -> None:
    """Measure the engine and the limits of the machine.

    WHICH: latency, throughput, beam, prefix, embed, contention, or kv (pages and scheduling, without a model).
    """
    if model and named_model and model != named_model:
        raise typer.BadParameter(
            f"{named_model!r} and the argument MODEL, {model!r}, differ; give one of them.", param_hint="--model"
        )
    if mixed and which != "latency":
        raise typer.BadParameter(f"it is an option of bench latency, not of bench {which}.", param_hint="--mixed")
    if which == "kv":
        _bench_kv(page_size, repeats, as_json, out)
        return
    from chatcache.bench.engine_bench import Load, run_engine_bench

    config = EngineConfig(
        model=named_model or model,
        device=device,
        dtype=dtype,
        attention_backend=attention_backend,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        kv_memory_bytes=kv_memory,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_time_s=max_prefill_time,
        deterministic=deterministic,
    )
    load = Load(prompt_tokens=prompt_tokens or 0, output_tokens=output_tokens, batches=tuple(batch), repeats=repeats)
    with Console(stderr=True).status("loading") as status:
        report = run_engine_bench(
            "mixed" if mixed else which,
            config,
            load,
            shape=shape,
            compare_with_transformers=compare is not None,
            on_progress=status.update,
        )
    _print(report, as_json, out)


def _bench_kv(page_size: int, repeats: int, as_json: bool, out: Path | None) -> None:
    from chatcache.bench.kv_bench import KVLoad, run_kv_bench

    with Console(stderr=True).status("pages") as status:
        report = run_kv_bench(KVLoad(page_size=page_size, repeats=repeats), status.update)
    _print(report, as_json, out)


def _print(report: EngineReport | KVReport, as_json: bool, out: Path | None) -> None:
    from chatcache.bench.report import write_json

    if out is not None:
        write_json(out, dataclasses.asdict(report))
    typer.echo(json.dumps(dataclasses.asdict(report), indent=1) if as_json else report.text())
