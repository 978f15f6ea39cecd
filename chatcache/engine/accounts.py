"""Who holds the pages, and how well they are filled: figures for people, worked out when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from chatcache.kv.audit import PageUsage, fractional_pages, page_usage
from chatcache.kv.cache import KVCache
from chatcache.sched.request import LiveRequest
from chatcache.sched.scheduler import Scheduler
from chatcache.types.pages import PageAccounts

USAGE_INTERVAL_S = 1.0


def page_accounts(kv: KVCache, requests: Sequence[LiveRequest], page_bytes: int) -> PageAccounts:
    """Charge every page in use to the requests that hold it, and sum up by conversation and namespace.

    O(pages held).
    """
    charges = fractional_pages([request.tables() for request in requests])
    conversations: dict[str, float] = {}
    namespaces: dict[str, float] = {}
    for request, charge in zip(requests, charges, strict=True):
        conversations[request.conversation_id] = conversations.get(request.conversation_id, 0.0) + charge
        namespaces[request.namespace] = namespaces.get(request.namespace, 0.0) + charge
    return PageAccounts(
        num_pages_in_use=kv.pool.num_in_use,
        page_bytes=page_bytes,
        requests={request.request_id: charge for request, charge in zip(requests, charges, strict=True)},
        conversations=conversations,
        namespaces=namespaces,
    )


class UsageGauge:
    """Page usage for who asks often: counted anew at most once in USAGE_INTERVAL_S, since counting is O(pages held)."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._usage: PageUsage | None = None
        self._counted_at = 0.0

    def read(self) -> PageUsage:
        now = self._clock()
        if self._usage is None or now - self._counted_at >= USAGE_INTERVAL_S:
            self._usage = page_usage(self._scheduler.kv, self._scheduler.tables())
            self._counted_at = now
        return self._usage
