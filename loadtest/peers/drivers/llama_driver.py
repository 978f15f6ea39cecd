"""Driver of llama.cpp, through the C functions of llama-cpp-python.

Batches, shared prompts and kept prompts work as in llama.cpp's server.
"""

from __future__ import annotations

from typing import Any

import llama_cpp as ll  # type: ignore[import-not-found,unused-ignore]
from serve import UnsupportedError, folder, num_threads, serve  # type: ignore[import-not-found]  # in the same folder

MAX_BRANCHES, MAX_BATCH = 32, 2048


class Engine:
    def __init__(self) -> None:
        ll.llama_backend_init()
        self.quiet = ll.llama_log_callback(lambda level, text, data: None)
        ll.llama_log_set(self.quiet, None)
        self.model: Any = ll.llama_model_load_from_file(folder().encode(), ll.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {folder()}")
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 16384, MAX_BATCH, 512
        params.n_seq_max, params.kv_unified = MAX_BRANCHES, True
        params.n_threads = params.n_threads_batch = num_threads()
        self.context: Any = ll.llama_init_from_model(self.model, params)
        self.memory = ll.llama_get_memory(self.context)
        self.batch = ll.llama_batch_init(MAX_BATCH, 0, 1)
        self.kept: list[int] = []  # the prompt whose keys and values sequence 0 holds

    def generate(self, prompts: list[list[int]], max_tokens: int, n: int) -> int:
        if n > 1 and len(prompts) > 1:
            raise UnsupportedError("n candidates of several prompts")
        lengths, last = [], []
        for number, prompt in enumerate(prompts):
            done = self._reuse(prompt) if len(prompts) == 1 else self._clear(number)
            last.append(self._prompt(prompt, done, number, n))
            lengths.append(len(prompt))
        if n > 1:
            for branch in range(1, n):
                ll.llama_memory_seq_cp(self.memory, 0, branch, -1, -1)
            lengths, last = lengths * n, [self._sample(self.samplers(n)[0], self.at) for _ in range(n)]
        samplers, count = self.samplers(n), len(last)
        for step in range(max_tokens - 1):
            for branch in range(count):
                self._put(branch, last[branch], lengths[branch] + step, branch, True)
            self._decode(count)
            last = [self._sample(samplers[0], branch) for branch in range(count)]
        self.kept = prompts[0] if max_tokens == 1 and count == 1 else []
        return count * max_tokens

    def beam(self, prompt: list[int], width: int, max_tokens: int) -> int:
        raise UnsupportedError("llama.cpp has no beam search")

    def samplers(self, n: int) -> list[Any]:
        """Return the sampler to use, as a list: greedy for one candidate, else at temperature 1."""
        if not hasattr(self, "_samplers"):
            self._samplers = {False: ll.llama_sampler_init_greedy(), True: ll.llama_sampler_init_dist(0)}
        return [self._samplers[n > 1]]

    def _reuse(self, prompt: list[int]) -> int:
        """Return how many tokens of the prompt the KV cache holds; clear it if it holds none."""
        if not self.kept or prompt[: len(self.kept)] != self.kept or len(prompt) == len(self.kept):
            return self._clear(0)
        return len(self.kept)

    def _clear(self, number: int) -> int:
        if number == 0:
            for branch in range(MAX_BRANCHES):
                ll.llama_memory_seq_rm(self.memory, branch, -1, -1)
        self.kept = []
        return 0

    def _prompt(self, prompt: list[int], done: int, branch: int, n: int) -> int:
        """Compute a prompt from token `done` on, as sequence `branch`, and sample the next token."""
        for first in range(done, len(prompt), MAX_BATCH):
            part = prompt[first : first + MAX_BATCH]
            for index, token in enumerate(part):
                position = first + index
                self._put(index, token, position, branch, position == len(prompt) - 1)
            self._decode(len(part))
            self.at = len(part) - 1
        return self._sample(self.samplers(n)[0], self.at)

    def _put(self, index: int, token: int, position: int, branch: int, has_logits: bool) -> None:
        batch = self.batch
        batch.token[index], batch.pos[index], batch.logits[index] = token, position, has_logits
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, branch

    def _decode(self, count: int) -> None:
        self.batch.n_tokens = count
        if ll.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _sample(self, sampler: Any, index: int) -> int:
        return int(ll.llama_sampler_sample(sampler, self.context, index))


if __name__ == "__main__":
    serve(Engine())
