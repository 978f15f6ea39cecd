"""Driver of vLLM's CPU build: `LLM` with the engine in this process and prefix caching."""

from __future__ import annotations

import os
from typing import Any

from serve import folder, num_threads, serve  # type: ignore[import-not-found]  # in the same folder

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads() - 1}")


class Engine:
    def __init__(self) -> None:
        from vllm import LLM  # type: ignore[import-not-found,unused-ignore]

        self.llm: Any = LLM(model=folder(), dtype="bfloat16", max_model_len=4096, max_num_seqs=64)

    def generate(self, prompts: list[list[int]], max_tokens: int, n: int) -> int:
        from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]

        params = SamplingParams(
            n=n, temperature=1.0 if n > 1 else 0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    def beam(self, prompt: list[int], width: int, max_tokens: int) -> int:
        from vllm.sampling_params import BeamSearchParams  # type: ignore[import-not-found,unused-ignore]

        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
        (output,) = self.llm.beam_search([{"prompt_token_ids": prompt}], params)
        return sum(len(one.tokens) - len(prompt) for one in output.sequences)


if __name__ == "__main__":
    serve(Engine())
