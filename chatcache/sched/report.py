"""What a request that asks for it is told of its start: why no more of its prompt was found."""

from __future__ import annotations

from chatcache.kv.cache import KVCache
from chatcache.kv.explain import NEVER_COMPUTED
from chatcache.sched.queue import Start
from chatcache.types.events import Miss


def first_miss(kv: KVCache, start: Start) -> Miss | None:
    """Say why the first token that misses does, as the cache stands now. A query; O(prompt)."""
    request, fork = start.request, start.fork
    if fork is not None:  # of what a running branch has, which need not have a name yet
        at = fork.num_tokens
        if at >= request.num_prompt_tokens - 1:
            return None
        detail = f"the running branch that this prompt begins like goes on otherwise from token {at} on"
        return Miss(NEVER_COMPUTED, at, detail, kv.page_size)
    told = kv.explain(request.chain or kv.chain(request.prompt_bytes, request.scope))
    return Miss(told.reason, told.at_token, told.detail, kv.page_size) if told.reason else None
