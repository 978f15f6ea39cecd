"""Forking a request that still runs: what is computed of it is shared as it is, without a name being worked out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from chatcache.kv.keys import TOKEN_BYTES
from chatcache.sched.request import Branch, LiveRequest
from chatcache.sched.steady import SteadyBranches


class LiveFork(NamedTuple):
    """The first `num_tokens` tokens of `branch` are computed and begin the prompt. `is_whole`: no more is possible."""

    branch: Branch
    num_tokens: int
    is_whole: bool


def find_fork(request: LiveRequest, running: Sequence[LiveRequest], steady: SteadyBranches) -> LiveFork | None:
    """Find the branch that `request.fork_of` hints at, or a sibling with more in common; None if there is none.

    Only when it first starts. The hint is about cost alone: a fork is taken for what its tokens are, never for what a
    client says they are.
    Which sibling carries a candidate is its strategy's affair, so the longest beginning decides.
    """
    point = request.fork_of
    if point is None or request.num_cached_tokens is not None or request.num_prompt_top is not None:
        return None
    same = (other for other in running if other.request_id == point.request_id)
    source = next((other for other in same if other.namespace == request.namespace), None)
    best: LiveFork | None = None
    for branch in source.branches.values() if source is not None else ():
        if branch.table is None:
            continue
        steady.flush(branch)
        longest = min(branch.table.num_tokens, request.num_prompt_tokens - 1)
        num_tokens = _num_common(branch.span(0, longest), request.prompt_bytes)
        better = best is None or (num_tokens, branch.id == point.index) > (best.num_tokens, False)
        if num_tokens and better:
            best = LiveFork(branch, num_tokens, num_tokens == longest)
    return best


def _num_common(head: bytes, tokens: bytes) -> int:
    """Count the tokens of `head` with which `tokens` begins."""
    if tokens.startswith(head):
        return len(head) // TOKEN_BYTES
    different = np.frombuffer(head, "<i4") != np.frombuffer(tokens[: len(head)], "<i4")
    return int(np.argmax(different))
