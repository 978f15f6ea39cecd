"""Requests that an engine which died had begun: brought to where their callers saw them last.

To this engine such a request is as if it had been preempted: its branches have tokens and no pages, and catch up. Its
noise is keyed by seed, branch and position, so what is drawn next is what the other engine would have drawn.
"""

from __future__ import annotations

from chatcache.decoding.sampling import SamplingStrategy
from chatcache.engine.events import EventQueue
from chatcache.errors import EngineError
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.actions import Finish
from chatcache.types.request import ResumePoint


def resume_request(request: LiveRequest, scheduler: Scheduler, outbox: EventQueue) -> bool:
    """Have a request scheduled, a resumed one with what it had; False if that was all, and its end is told now.

    Raises: EngineError where a request cannot be resumed, and what a grammar raises that is followed again.
    """
    resumed, request.resume_point = request.resume_point, None
    if resumed is not None:
        for end in _restore(request, resumed):
            outbox.output(request, end)
    if request.branches:
        scheduler.add(request)
    else:
        outbox.finished(request)
    return bool(request.branches)


def _restore(request: LiveRequest, resumed: ResumePoint) -> tuple[Finish, ...]:
    """Give a request what it had; return the ends of candidates that were not told."""
    if resumed.num_cached_tokens is not None:
        request.started, request.first_token_s = True, request.accepted_s
        request.num_cached_tokens = resumed.num_cached_tokens
        request.num_prompt_top = None  # its scores were told
    return _branch(request, resumed) if resumed.candidates else ()


def _branch(request: LiveRequest, resumed: ResumePoint) -> tuple[Finish, ...]:
    strategy = request.strategy
    if not isinstance(strategy, SamplingStrategy):
        raise EngineError("The engine died, and what it had begun of this request cannot be continued.")
    ends = strategy.resume(resumed.candidates)
    told = {each.index: each.tokens for each in resumed.candidates}
    request.num_output_tokens = sum(map(len, told.values())) // TOKEN_BYTES
    if not request.num_output_tokens:
        request.max_branches -= sum(each.is_done for each in resumed.candidates)
        return ends
    request.branches = {
        index: Branch(
            index,
            request,
            bytearray(told[index]),
            request.num_prompt_tokens + len(told[index]) // TOKEN_BYTES,
            ordinal=index,
        )
        for index in strategy.live_candidates
    }
    request.num_branches_created = len(told)
    request.max_branches = len(request.branches)
    request.choose_fork_sources()
    return ends
