"""(d) The offline queue through transformers' continuous batching, answers a quarter as long, same process rules."""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.check.context import Context
from bench.check.figures import Figure
from bench.check.offline import PEER_FACTOR, PEER_SLICE, QUEUES, Queue, make_queue
from chatcache.bench.shapes import SHAPES, write_config


def run(context: Context, name: str) -> None:
    """Measure the slice that `offline` measured, too; the ratio is taken from both when the table is made."""
    queue = make_queue(*QUEUES[context.size]).shorter(PEER_FACTOR)
    model = _load(context, name)

    def warm_up() -> None:
        _generate(context, model, Queue(queue.prompts[:4], [4] * 4))

    def measured() -> None:
        seconds, num_tokens = _generate(context, model, queue)
        context.add(Figure(f"{name}: transformers continuous batching, {PEER_SLICE}", num_tokens / seconds, "tokens/s"))
        if num_tokens < queue.num_output:
            context.note("extrapolated", f"{num_tokens} of {queue.num_output} tokens were made before time ran out")

    context.measure("warm-up", warm_up)
    context.measure("the queue", measured, needs_s=10)


def _load(context: Context, name: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    folder = context.out / "models" / f"{name}-transformers"
    write_config(SHAPES[name], folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(context.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def _generate(context: Context, model: Any, queue: Queue) -> tuple[float, int]:
    """Return seconds and tokens of the requests that finished; gives up shortly before the stage must end."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=True, temperature=0.6, eos_token_id=-1, max_new_tokens=max(queue.lengths))
    num_tokens = num_done = 0
    hints = _hints(queue)
    if not context.on_gpu:  # transformers sizes its store by the memory of a GPU
        hints["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=128)
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=5, **hints) as manager:
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


def _hints(queue: Queue) -> dict[str, Any]:
    """Tell transformers how large the queue is, as its own `generate_batch` does, where it can be told."""
    try:
        from transformers.generation.continuous_batching.utils import WorkloadHints
    except ImportError:
        return {}
    most = max(map(len, queue.prompts))
    hints = WorkloadHints(
        max_prompt_length=most, max_generated_length=max(queue.lengths), num_requests=len(queue.prompts)
    )
    return {"workload_hints": hints}
