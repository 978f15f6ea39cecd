"""Resume requests that another engine had begun before it ended.

A resumed request looks like a preempted one: its branches have tokens but no pages, and the scheduler recomputes them.
Sampling noise is keyed by seed, branch and position, so this engine samples the tokens that the other one would have.
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


def resume_request(request: LiveRequest, scheduler: Scheduler, event_queue: EventQueue) -> bool:
    """Queue a request, after restoring its resume point; return False if it ended by that.

    A request whose candidates have all ended is finished at once. Raises: EngineError for a request that cannot be
    resumed, and any error of a grammar that replays the tokens.
    """
    resumed, request.resume_point = request.resume_point, None
    if resumed is not None:
        for end in _restore(request, resumed):
            event_queue.emit_output(request, end)
    if request.branches:
        scheduler.add(request)
    else:
        event_queue.emit_finished(request)
    return bool(request.branches)


def _restore(request: LiveRequest, resumed: ResumePoint) -> tuple[Finish, ...]:
    """Restore the progress of a request; return the ends of candidates still to emit."""
    if resumed.num_cached_tokens is not None:
        request.started, request.first_token_s = True, request.accepted_s
        request.num_cached_tokens = resumed.num_cached_tokens
        request.num_prompt_top = None  # its scores were sent
    return _restore_branches(request, resumed) if resumed.candidates else ()


def _restore_branches(request: LiveRequest, resumed: ResumePoint) -> tuple[Finish, ...]:
    strategy = request.strategy
    if not isinstance(strategy, SamplingStrategy):
        raise EngineError("The engine process ended, and this request cannot be resumed.")
    ends = strategy.resume(resumed.candidates)
    sent_tokens = {each.index: each.tokens for each in resumed.candidates}
    request.num_output_tokens = sum(map(len, sent_tokens.values())) // TOKEN_BYTES
    if not request.num_output_tokens:
        request.max_branches -= sum(each.is_done for each in resumed.candidates)
        return ends
    request.branches = {
        index: Branch(
            index,
            request,
            bytearray(sent_tokens[index]),
            request.num_prompt_tokens + len(sent_tokens[index]) // TOKEN_BYTES,
            ordinal=index,
        )
        for index in strategy.live_candidates
    }
    request.num_branches_created = len(sent_tokens)
    request.max_branches = len(request.branches)
    request.choose_fork_sources()
    return ends
