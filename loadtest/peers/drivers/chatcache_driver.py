"""Driver of chatcache, through `LLM`."""

from __future__ import annotations

from typing import Any

from serve import folder, num_threads, serve  # type: ignore[import-not-found]  # in the same folder


class Engine:
    def __init__(self) -> None:
        from chatcache import LLM  # before torch, whose idle threads would spin otherwise

        import torch  # isort: skip

        torch.set_num_threads(num_threads())

        self.llm = LLM(model=folder(), dtype="bfloat16", kv_memory="2GiB", max_num_seqs=64)

    def generate(self, prompts: list[list[int]], max_tokens: int, n: int) -> int:
        from chatcache import SamplingParams

        params = SamplingParams(n=n, temperature=1.0 if n > 1 else 0.0, max_tokens=max_tokens, ignore_eos=True)
        return _count(self.llm.generate(prompts, params, use_tqdm=False))

    def beam(self, prompt: list[int], width: int, max_tokens: int) -> int:
        from chatcache import BeamSearchParams

        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True, early_stopping="never")
        return _count(self.llm.beam_search([prompt], params))


def _count(outputs: list[Any]) -> int:
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)


if __name__ == "__main__":
    serve(Engine())
