"""Stage "transformers models": decode steps of models that run through transformers, captured and uncaptured."""

from __future__ import annotations

import statistics
from typing import Any

from bench.check.context import StageContext
from bench.check.limits import stage_limits
from chatcache.bench.drivers import TRANSFORMERS_SHAPES, EngineDriver, write_transformers_model
from chatcache.bench.report import compare, compare_to_floor
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import AsyncLaunch, Runner
from chatcache.types.request import SamplingParams

TINY: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "intermediate_size": 32, "vocab_size": 512, "max_position_embeddings": 2048,
}  # fmt: skip
SHAPES = {**TRANSFORMERS_SHAPES, "tiny": TINY}
WORK = {"full": ((1, 64), 512, 24), "cpu": ((1,), 64, 8), "tiny": ((1,), 8, 5)}
"""Numbers of branches, tokens of their prompts, and tokens of their answers."""


def run(context: StageContext, name: str) -> None:
    """Measure the decode steps of one model next to reading its weights, and next to uncaptured steps."""
    folder, limits = context.out / "models" / name, stage_limits(context)
    write_transformers_model(SHAPES[name], folder, device=context.device)
    branches, num_prompt, num_output = WORK[context.size]
    options: dict[str, Any] = {"max_num_seqs": 64} if context.on_gpu else {"max_num_seqs": 4, "kv_memory_bytes": 2**26}
    config = EngineConfig(model=str(folder), device=context.device, max_model_len=2048, **options)
    captured_s: dict[int, float] = {}

    def measure(graphs: AsyncLaunch | None) -> None:
        runner = load_model(config, async_launch=graphs)
        num_captured, num_capturable = runner.captured_steps
        if num_capturable:
            label = f"{name}: captured steps"
            context.add(compare(label, num_captured, "graphs", num_capturable, "planned", ">= 1.00"))
        for count in branches:
            step_s = _step_s(runner, config, count, num_prompt, num_output)
            label = f"{name}: decode step, {count} x {num_prompt}"
            if graphs is None:
                captured_s[count] = step_s
                floor_s = runner.model_info.step_bytes / limits.read_bytes_per_s
                context.add(compare_to_floor(label, step_s, floor_s))
            elif count in captured_s:
                context.add(compare(f"{label}, uncaptured", step_s * 1e3, "ms", captured_s[count] * 1e3, "captured"))
        runner.close()

    context.measure("decode", lambda: measure(None))
    if context.on_gpu:
        context.measure("uncaptured", lambda: measure(AsyncLaunch(())), needs_s=8)


def _step_s(runner: Runner, config: EngineConfig, count: int, num_prompt: int, num_output: int) -> float:
    """Return the median seconds of a decode step of so many branches."""
    driver = EngineDriver(Engine(runner, runner.model_info, config))
    params = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=0)
    return statistics.median(driver.step_times_s([driver.prompt(num_prompt) for _ in range(count)], params))
