"""The engine as a Python object, without a server: `LLM` for batches of prompts, `AsyncLLM` for streams.

Names and defaults of parameters and outputs are vLLM's. Reading order: prompts, outputs, base, llm, async_llm.
"""
