"""The token budget of a step: how many tokens of each prompt are computed in it.

Branches that decode come first, with one token each. The rest of `max_num_batched_tokens` is shared by the requests
that have more to compute, prompts and preempted requests alike:

- While other branches decode or several requests share it, their part takes at most about `max_prefill_time_s` seconds,
  by the measured speed. So a long prompt delays the next token of running streams by that much, not by a whole budget.
- The first request gets up to half of it, so that long prompts finish one after the other. The rest is split equally,
  with fair scheduling between namespaces and then between the requests of each; what a request does not need goes to
  the others. So a short prompt is complete after a few steps, however long the prompts before it are.

Time enters only as the measured speed; with the same speed, the same requests get the same shares.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.scheduler.request import Branch, LiveRequest

MAX_PARTIAL_PREFILLS = 4
"""While so many prompts need more than this step, only short ones start, which one step could compute."""

MIN_PREFILL_TOKENS = 32
"""The least part of a step for prompts, whatever the measured speed: the first tokens of a step cost most."""


def token_demand(request: LiveRequest) -> tuple[int, int]:
    """Count the branches that decode one token, and the other tokens that the request can compute now.

    Branches in the decode batch are left out. All branches of a lockstep request belong together.
    """
    gaps = [gap for _, gap in _missing_tokens(request)]
    if request.lockstep and any(gap > 1 for gap in gaps):
        return 0, sum(gaps)
    return gaps.count(1), sum(gap for gap in gaps if gap > 1)


def share_tokens(num_wanted: Sequence[int], num_tokens: int, groups: Sequence[str]) -> list[int]:
    """Share `num_tokens` among requests that want so many each, in service order; see above.

    `groups`: for each request, the group (namespace) it belongs to.
    """
    first = min(num_wanted[0], (num_tokens + 1) // 2)
    wanted = [num_wanted[0] - first, *num_wanted[1:]]
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    group_wants = [sum(wanted[index] for index in indexes) for indexes in members.values()]
    shares = [first] + [0] * (len(wanted) - 1)
    for indexes, group_share in zip(members.values(), split_equally(group_wants, num_tokens - first), strict=True):
        for index, share in zip(indexes, split_equally([wanted[i] for i in indexes], group_share), strict=True):
            shares[index] += share
    return shares


def split_equally(wanted: Sequence[int], total: int) -> list[int]:
    """Split `total` into equal shares, of which none is larger than wanted (max-min fairness)."""
    shares = [0] * len(wanted)
    for count, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], -(-total // (len(wanted) - count)))
        total -= shares[index]
    return shares


def split_among_branches(request: LiveRequest, budget: int, num_prefill: int) -> list[tuple[Branch, int]]:
    """Split a request's part of a step among its branches.

    `budget`: the tokens left in the step. `num_prefill`: the share of branches that need more than one token. The last
    tokens of a lockstep request (beam search) are all computed in the same step, so that its branches are sampled
    together.
    """
    gaps = _missing_tokens(request)
    if len(gaps) == 1 and gaps[0][1] == 1 and budget > 0 and not request.num_waiting_branches:
        return gaps
    if request.lockstep:
        num_wanted = sum(gap for _, gap in gaps)
        available = budget if num_wanted == len(gaps) else min(num_prefill, budget)
        if num_wanted > available or request.num_waiting_branches:
            gaps = [(branch, gap - 1) for branch, gap in gaps]
    wants: list[tuple[Branch, int]] = []
    for branch, gap in gaps:
        num_tokens = min(gap, budget) if gap <= 1 else min(gap, num_prefill, budget)
        if num_tokens > 0:
            wants.append((branch, num_tokens))
            budget -= num_tokens
            num_prefill -= num_tokens if gap > 1 else 0
    return wants


def _missing_tokens(request: LiveRequest) -> list[tuple[Branch, int]]:
    """Return the branches with pages outside the decode batch, each with its number of tokens to compute."""
    branches = request.branches.values()
    return [(b, b.num_tokens - b.table.num_tokens) for b in branches if b.table is not None and not b.in_decode_batch]
