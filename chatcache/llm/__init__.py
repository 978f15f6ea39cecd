"""The engine as a Python object, without server or process: for scripts, notebooks and evaluations.

offline.py   LLM: prompts in, outputs out, in one thread
outputs.py   RequestOutput and CompletionOutput, gathered from the engine's events
"""

from chatcache.llm.offline import LLM
from chatcache.llm.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]
