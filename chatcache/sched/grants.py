"""How what is left of a step's budget is split over the branches of one request."""

from __future__ import annotations

from chatcache.sched.request import Branch, LiveRequest


def tokens_wanted(request: LiveRequest, budget: int, num_later: int) -> list[tuple[Branch, int]]:
    """Split what is left of the budget over the request's branches, the steady ones aside: they have theirs.

    A chunk of a long prompt leaves one token for every branch that comes after it (`num_later`). The last tokens of a
    lockstep request are computed in one step or not at all, so that its branches are drawn together.
    """
    branches = request.branches.values()
    gaps = [(b, b.num_tokens - b.table.num_tokens) for b in branches if b.table is not None and not b.is_steady]
    if len(gaps) == 1 and gaps[0][1] == 1 and budget > 0 and not request.num_waiting_branches:
        return gaps
    if request.lockstep:
        num_wanted = sum(gap for _, gap in gaps)
        longest = budget if num_wanted == len(gaps) else budget - num_later
        if num_wanted > longest or request.num_waiting_branches:
            gaps = [(branch, gap - 1) for branch, gap in gaps]
    wants: list[tuple[Branch, int]] = []
    for branch, gap in gaps:
        num_tokens = min(gap, 1 if gap == 1 else max(budget - num_later, 1), budget)
        if num_tokens > 0:
            wants.append((branch, num_tokens))
            budget -= num_tokens
    return wants
