"""Where snapshots of recurrent state are taken: prefill chunks end there, and the step saves the state.

A snapshot is worth its slot where another request can start on it:

    marks      the ends of messages: the first one, usually the end of the system prompt that conversations share, and
               the last NUM_LAST_MARKS, where the next or a repeated turn begins
    divergence where the cached pages of a prompt end, if that is at least a page after the snapshot that it starts on:
               the prompts that share those tokens may be many, as with examples before the question
    boundary   the last page boundary of a prompt, if it is half an interval or more after the snapshots before it and
               no mark is after it: the same prompt may come again. The rest of the prompt then takes a step of its own,
               which costs as much as dozens of prompt tokens, on a GPU hundreds
    interval   multiples of `StatePool.interval` tokens, in prompts and in replies, for forks inside a message

A fork shares the state of its source as it is. So a branch that others wait to be forked from stops exactly at the
number of tokens that they share. The end of a branch needs no copy: its state becomes a snapshot when it is closed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chatcache.kv_cache.prefix_match import PrefixMatch
from chatcache.kv_cache.states import StatePool
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.types.request import GenerateRequest

NUM_LAST_MARKS = 2


def message_marks(request: GenerateRequest, end_ids: Collection[int]) -> list[int]:
    """Return the marks of a prompt to take snapshots at: the ends of messages and of the public tokens.

    `end_ids`: the tokens that end a message.
    """
    ends = [index for index, token in enumerate(request.prompt, 1) if token in end_ids]
    marks = sorted({*ends, request.num_public_tokens}.intersection(range(1, len(request.prompt))))
    return [*marks[:1], *marks[1:][-NUM_LAST_MARKS:]]


def add_divergence(request: LiveRequest, match: PrefixMatch, page_size: int) -> None:
    """Mark where the cached pages of a starting request end, unless a snapshot less than a page before is there."""
    end = match.num_page_tokens
    nearest = max((mark for mark in request.marks if mark <= end), default=0)
    if page_size <= end - max(nearest, match.num_tokens):
        request.marks = sorted([*request.marks, end])


def prompt_positions(states: StatePool, request: LiveRequest, page_size: int) -> list[int]:
    """Return the numbers of prompt tokens after which a snapshot is taken, without those at intervals."""
    boundary = (request.num_prompt_tokens - 1) // page_size * page_size
    before = max((boundary // states.interval * states.interval, *request.marks[-1:]))
    is_far = boundary - before >= states.interval // 2
    return [*request.marks, boundary] if is_far else [*request.marks]


def is_snapshot_position(states: StatePool, branch: Branch, num_tokens: int, page_size: int) -> bool:
    """Return whether a snapshot of a branch is taken after its first `num_tokens` tokens."""
    return not num_tokens % states.interval or num_tokens in prompt_positions(states, branch.request, page_size)


def cut_at_snapshots(
    states: StatePool, wants: Sequence[tuple[Branch, int]], page_size: int
) -> list[tuple[Branch, int]]:
    """Reduce the tokens granted to each branch so that it stops at its next snapshot or fork.

    Beams are sampled together: if one of them stops, no other computes its last token.
    """
    cut = [(branch, _num_tokens_to_stop(states, branch, num_tokens, page_size)) for branch, num_tokens in wants]
    if cut and cut[0][0].request.lockstep and cut != list(wants):
        cut = [(b, n - (b.table is not None and b.table.num_tokens + n == b.num_tokens)) for b, n in cut]
    return [(branch, num_tokens) for branch, num_tokens in cut if num_tokens]


def _num_tokens_to_stop(states: StatePool, branch: Branch, num_tokens: int, page_size: int) -> int:
    if num_tokens == 1 or branch.table is None:
        return num_tokens
    start = branch.table.num_tokens
    stops = [(start // states.interval + 1) * states.interval, *prompt_positions(states, branch.request, page_size)]
    stops += fork_positions(branch)
    return min([start + num_tokens, *(stop for stop in stops if stop > start)]) - start


def fork_positions(branch: Branch) -> list[int]:
    """Return the numbers of tokens that the branches waiting to be forked from this one share with it."""
    others = branch.request.branches.values()
    return [other.num_shared_tokens for other in others if other.table is None and other.fork_source is branch]


def max_start_tokens(branch: Branch) -> int | None:
    """Return the most tokens a branch with a state may start on: those that its future forks share; None for any."""
    return min(fork_positions(branch), default=None)
