"""What `LLM` and `AsyncLLM` share: options, loading and prompts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import fields

from chatcache import factory
from chatcache.config import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    PAGE_SIZES,
    EngineConfig,
    format_size,
    parse_size,
)
from chatcache.decoding.strategy import MAX_TOKENS, check_bool, check_integer, check_seed
from chatcache.engine.engine import Engine
from chatcache.errors import InvalidRequestError
from chatcache.llm.prompts import PromptReader
from chatcache.model.loading.memory_budget import free_host_bytes
from chatcache.model.runner import Runner
from chatcache.types.request import ALL_LOGPROBS, Params, format_value, num_branches

ENTRY_BYTES = 400  # of one alternative, in events and output
_MAX_OPTIONS = {
    "max_model_len": MAX_TOKENS,
    "tensor_parallel_size": MAX_TOKENS,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
}


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
        model: str | Path = "",
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
        self.config = EngineConfig(
            model=_path_text(model),
            device=device,
            dtype=dtype,
            attention_backend=attention_backend,
            quantization="none" if quantization is None else quantization,
            chat_template=_path_text(chat_template),
            pooling=pooling,
            kv_cache_dtype=kv_cache_dtype,
            kv_memory_bytes=_parse_size("kv_memory", kv_memory),
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            preemption_mode=preemption_mode,
            swap_space_bytes=_parse_size("swap_space", swap_space),
            deterministic=deterministic,
            seed=seed,
        )
        _check_config(self.config)
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
        counts = [(num_branches(each), each.max_tokens or 0) for each in every]
        valid = [pair for pair in counts if all(type(n) is int and 0 < n <= MAX_TOKENS for n in pair)]
        num_entries = sum(branches * tokens for branches, tokens in valid) * vocab_size  # the engine rejects the others
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


def _path_text(path: str | Path) -> str:
    return str(path) if isinstance(path, Path) else path


def _parse_size(name: str, value: int | str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error}", param=name) from None


def _check_config(config: EngineConfig) -> None:
    """Verify the types of all options, and the range of the numbers.

    Raises: InvalidRequestError.
    """
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if field.type is bool:
            check_bool(name, value)
        elif field.type is str and not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be text, got {format_value(value)}", param=name)
        elif name in _MAX_OPTIONS and (name, value) != ("max_model_len", None):
            check_integer(name, value, 1, _MAX_OPTIONS[name])
    check_seed(config.seed)
    if type(config.page_size) is not int or config.page_size not in PAGE_SIZES:
        raise InvalidRequestError(
            f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {format_value(config.page_size)}",
            param="page_size",
        )
