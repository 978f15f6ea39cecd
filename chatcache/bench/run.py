"""One benchmark from a model's name to its report."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from chatcache import compose
from chatcache.bench.driver import Driver
from chatcache.bench.limits import measure_limits
from chatcache.bench.measures import MEASURES, Bench, Load
from chatcache.bench.peer import COMPARABLE, TransformersDriver, beside
from chatcache.bench.report import Report
from chatcache.bench.shapes import SHAPES, write_model
from chatcache.config import EngineConfig
from chatcache.errors import InvalidRequest
from chatcache.types.model import ModelFacts

Say = Callable[[str], None]


def run_bench(
    name: str,
    config: EngineConfig,
    *,
    shape: str | None = None,
    prompt_tokens: int,
    output_tokens: int,
    batches: tuple[int, ...],
    repeats: int,
    say: Say,
    compare: str | None = None,
) -> Report:
    """Measure the machine, then the engine on it. `shape` names a random-weight model to make instead of loading one;
    `compare` a peer (`peer.PEERS`) that does the same work afterwards.

    Raises: InvalidRequest for a benchmark no peer can do; ModelFolderError; ContextTooLong where the model's context or
    the pages do not hold the load.
    """
    if compare is not None and name not in COMPARABLE:
        raise InvalidRequest(f"compare works for {', '.join(COMPARABLE)}, not for {name}", param="compare")
    with tempfile.TemporaryDirectory(prefix="chatcache-bench-") as scratch:
        if shape is not None:
            say(f"writing random weights of {shape}")
            write_model(SHAPES[shape], Path(scratch))
            config = msgspec.structs.replace(config, model=scratch, served_model_name=shape)
        engine = compose.build_engine(config, lambda _, detail: say(detail), need_tokenizer=False)
        facts, health = engine.facts, engine.health()
        say("measuring the machine")
        limits = measure_limits(facts.step_bytes, facts.dtype, facts.device)
        load = Load(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            batches=batches,
            repeats=repeats,
            matmul_params=matmul_params(compose.model_folder(config), facts),
            kv_token_bytes=health.kv_bytes / ((health.num_pages + 1) * health.page_size),
        )

        def uncached() -> Driver:
            plain = msgspec.structs.replace(config, enable_prefix_caching=False)
            return Driver(compose.build_engine(plain, need_tokenizer=False), facts)

        bench = Bench(Driver(engine, facts), uncached, limits, load)
        say("warming up")
        bench.warm_up()
        say(f"running {name}")
        figures = MEASURES[name](bench)
        if compare is not None:
            say(f"loading {compare}")
            peer = replace(bench, driver=TransformersDriver(compose.model_folder(config), facts))
            peer.warm_up()
            say(f"running {name} on {compare}")
            figures += beside(figures, MEASURES[name](peer), compare)
    return Report(
        bench=name,
        model=compose.served_name(config),
        num_parameters=facts.num_parameters,
        weight_bytes=facts.weight_bytes,
        step_bytes=facts.step_bytes,
        dtype=facts.dtype,
        quantization=facts.quantization,
        device=facts.device,
        attention=facts.attention,
        page_size=health.page_size,
        read_bytes_per_s=limits.read_bytes_per_s,
        matmul_flops_per_s=limits.matmul_flops_per_s,
        buffer_bytes=limits.buffer_bytes,
        num_threads=torch.get_num_threads(),
        figures=tuple(figures),
    )


def matmul_params(folder: Path, facts: ModelFacts) -> int:
    """Parameters a prompt token is multiplied with: all but the embedding tables.

    (The output head sees only a prompt's last token; input embeddings are looked up.)
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tables = 1 if config.get("tie_word_embeddings", True) else 2
    return facts.num_parameters - tables * facts.vocab_size * int(config.get("hidden_size", 0))
