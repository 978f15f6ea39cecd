"""What `LLM` and `AsyncLLM` share: options, loading and prompts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatcache import factory
from chatcache.config import PAGE_SIZES, EngineConfig, format_size, parse_size
from chatcache.engine.engine import Engine
from chatcache.errors import InvalidRequestError
from chatcache.llm.prompts import PromptReader
from chatcache.model.loading.memory_budget import free_host_bytes
from chatcache.model.runner import Runner
from chatcache.types.request import ALL_LOGPROBS, Params, num_branches

ENTRY_BYTES = 400  # of one alternative, in events and output


class LLMBase:
    """Options of a model and its engine.

    `model`: a folder, a Hugging Face id, or "" for the demo model. `kv_memory`: bytes or "2GiB"; None selects a share
    of free memory. `max_num_seqs`: the most candidates or beams in one step, and of one request (at most 1,024).

    `scheduling_policy`: fair (between namespaces; an `LLM` has only one, so it is fcfs) | fcfs | priority.
    `preemption_mode`: what to do when pages run out: auto | swap | recompute; `swap_space`: host memory for swapped
    pages, 0 for none. `deterministic`: logits do not depend, to the bit, on batch, chunking, cache or preemption;
    slower. `quantization`: None | "int8" (CPUs) | "fp8" (GPUs) for 8-bit weights. `kv_cache_dtype`: "auto" | "fp8" for
    keys and values in 8 bits (GPUs). `chat_template`: a file, instead of the model's own template. `pooling`: of
    embeddings: "auto" (as the model folder says, else last) | "last" | "mean". `tensor_parallel_size`: number of
    processes that compute each layer together (native decoders on CPUs).
    """

    def __init__(
        self,
        model: str = "",
        *,
        device: str = "auto",
        dtype: str = "auto",
        attention_backend: str = "auto",
        quantization: str | None = None,
        chat_template: str | Path = "",
        pooling: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_memory: int | str | None = None,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        page_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        scheduling_policy: str = "fair",
        preemption_mode: str = "auto",
        swap_space: int | str | None = None,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        if page_size not in PAGE_SIZES:
            raise InvalidRequestError(
                f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {page_size!r}", param="page_size"
            )
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": 1 if max_model_len is None else max_model_len,
            "tensor_parallel_size": tensor_parallel_size,
        }
        for name, value in limits.items():
            if type(value) is not int or value < 1:
                raise InvalidRequestError(f"{name} must be a positive integer, got {value!r:.40}", param=name)
        self.config = EngineConfig(
            model=str(model),
            device=device,
            dtype=dtype,
            attention_backend=attention_backend,
            quantization=quantization or "none",
            chat_template=str(chat_template),
            pooling=pooling,
            kv_cache_dtype=kv_cache_dtype,
            kv_memory_bytes=None if kv_memory is None else parse_size(kv_memory),
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            preemption_mode=preemption_mode,
            swap_space_bytes=None if swap_space is None else parse_size(swap_space),
            deterministic=deterministic,
            seed=seed,
        )
        self._tokenizer = factory.load_tokenizer(self.config) if factory.has_tokenizer(self.config) else None
        self._reader = PromptReader(self._tokenizer, self.config.model)
        self._token_text = functools.cache(self._decode_token) if self._tokenizer is not None else None
        self._numbers = itertools.count()
        self._start()

    def _start(self) -> None:
        """Load the model, or prepare to."""
        raise NotImplementedError

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer.

        Raises: InvalidRequestError for a model folder without one.
        """
        return self._reader.tokenizer

    def _load_engine(self) -> tuple[Engine, Runner]:
        """Load the model. The caller closes both."""
        runner = factory.load_runner(self.config)
        return factory.new_engine(runner, self.config, self._tokenizer), runner

    def _decode_token(self, token: int) -> str:
        return self._reader.tokenizer.decode([token], skip_special_tokens=False)

    def _check_logprobs(self, params: Sequence[Params], vocab_size: int) -> None:
        """Verify that the log-probabilities of whole vocabularies (`logprobs=-1`) of these requests fit in memory.

        Raises: InvalidRequestError, also without `max_tokens`, which is the only bound.
        """
        every = [each for each in params if each.logprobs == ALL_LOGPROBS]
        if any(each.max_tokens is None for each in every):
            raise InvalidRequestError("logprobs=-1 needs max_tokens", param="max_tokens")
        num_entries = sum(num_branches(each) * (each.max_tokens or 0) * vocab_size for each in every)
        num_free = free_host_bytes()
        if num_entries * ENTRY_BYTES > num_free:
            raise InvalidRequestError(
                f"logprobs=-1 of {len(every)} prompts x candidates x max_tokens x {vocab_size} tokens needs about "
                f"{format_size(num_entries * ENTRY_BYTES)} of memory; {format_size(num_free)} are free",
                param="logprobs",
            )

    def _check_priority(self, *, is_given: bool) -> None:
        if is_given and self.config.scheduling_policy != "priority":
            raise InvalidRequestError('priority needs scheduling_policy="priority"', param="priority")
