"""How much may wait: a whole queue for everybody, and half of it for any one tenant.

Counted in requests and in tokens of their prompts. Somebody of whom nothing waits is never too long to queue.
"""

from __future__ import annotations

from typing import NamedTuple

from chatcache.errors import OverloadedError, RateLimitError

TENANTS_PER_QUEUE = 2  # how many it takes to fill it


class QueueSize(NamedTuple):
    """What waits, or what may."""

    num_requests: int
    num_tokens: int


def check_tenant_share(mine: QueueSize, num_tokens: int, most: QueueSize) -> None:
    """Verify that a tenant of which so much waits may add a prompt. Raises: RateLimitError."""
    num_requests, most_tokens = (max(1, number // TENANTS_PER_QUEUE) for number in most)
    if mine.num_requests >= num_requests:
        raise RateLimitError(
            f"{mine.num_requests} requests of this tenant are waiting already, of at most {num_requests}; "
            "try again later"
        )
    if mine.num_requests and mine.num_tokens + num_tokens > most_tokens:
        raise RateLimitError(
            f"{mine.num_tokens} prompt tokens of this tenant are waiting already, of at most {most_tokens}; "
            "try again later"
        )


def check_queue(everybody: QueueSize, num_tokens: int, most: QueueSize) -> None:
    """Verify that a prompt may be added to all that wait. Raises: OverloadedError."""
    if everybody.num_requests >= most.num_requests:
        raise OverloadedError(f"{everybody.num_requests} requests are waiting already; try again later")
    if everybody.num_requests and everybody.num_tokens + num_tokens > most.num_tokens:
        raise OverloadedError(
            f"{everybody.num_tokens} prompt tokens are waiting already, of at most {most.num_tokens}; try again later"
        )
