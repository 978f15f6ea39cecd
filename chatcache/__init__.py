"""A self-hosted chat server on an inference engine with a shared, copy-on-write KV cache.

    from chatcache import LLM, SamplingParams
    LLM().generate("Hello", SamplingParams(n=4, max_tokens=64))

Names are resolved on first use, so importing the package loads no model library.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from chatcache import torch_environment

if TYPE_CHECKING:
    from chatcache.llm.async_llm import AsyncLLM as AsyncLLM
    from chatcache.llm.llm import LLM as LLM
    from chatcache.types.request import BeamSearchParams as BeamSearchParams
    from chatcache.types.request import PoolingParams as PoolingParams
    from chatcache.types.request import SamplingParams as SamplingParams
    from chatcache.types.request import StructuredOutputs as StructuredOutputs

torch_environment.set_defaults(os.environ)  # before torch is imported

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "BeamSearchParams", "PoolingParams", "SamplingParams", "StructuredOutputs", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from chatcache.llm.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from chatcache.llm.async_llm import AsyncLLM

        return AsyncLLM
    if name in ("SamplingParams", "BeamSearchParams", "PoolingParams", "StructuredOutputs"):
        from chatcache.types import request as params

        return getattr(params, name)
    raise AttributeError(f"module 'chatcache' has no attribute {name!r}")
