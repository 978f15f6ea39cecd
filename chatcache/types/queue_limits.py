"""Limits of the waiting queue, for all tenants together and half of that for each one.

Both count waiting requests and the tokens of their prompts. The token limit never rejects the first waiting request of
the queue or of a tenant, however long its prompt is.
"""

from __future__ import annotations

from typing import NamedTuple

from chatcache.errors import OverloadedError, RateLimitError

TENANTS_PER_QUEUE = 2
"""How many tenants at their limit fill the queue."""


class QueueSize(NamedTuple):
    """Number of waiting requests and of their prompt tokens, present or maximum."""

    num_requests: int
    num_tokens: int


def check_tenant_share(present: QueueSize, num_tokens: int, limit: QueueSize) -> None:
    """Check that one more prompt of `num_tokens` stays within a tenant's share of the queue.

    `present` is what the tenant has queued, and `limit` the limit of the whole queue. Raises: RateLimitError.
    """
    max_requests, max_tokens = (max(1, number // TENANTS_PER_QUEUE) for number in limit)
    if present.num_requests >= max_requests:
        raise RateLimitError(
            f"{present.num_requests} requests of this tenant are waiting already, of at most {max_requests}; "
            "try again later"
        )
    if present.num_requests and present.num_tokens + num_tokens > max_tokens:
        raise RateLimitError(
            f"{present.num_tokens} prompt tokens of this tenant are waiting already, of at most {max_tokens}; "
            "try again later"
        )


def check_queue(present: QueueSize, num_tokens: int, limit: QueueSize) -> None:
    """Check that one more prompt of `num_tokens` stays within the limit of the whole queue.

    `present`: what is queued now. Raises: OverloadedError.
    """
    if present.num_requests >= limit.num_requests:
        raise OverloadedError(f"{present.num_requests} requests are waiting already; try again later")
    if present.num_requests and present.num_tokens + num_tokens > limit.num_tokens:
        raise OverloadedError(
            f"{present.num_tokens} prompt tokens are waiting already, of at most {limit.num_tokens}; try again later"
        )
