"""The proof that branches and page tables agree on what is in the pages. For tests and self-checks: O(tokens)."""

from __future__ import annotations

from collections.abc import Iterable

from chatcache.kv.cache import KVCache
from chatcache.kv.pool import BrokenInvariant
from chatcache.kv.table import PageTable
from chatcache.sched.request import LiveRequest


def check_tokens(kv: KVCache, running: Iterable[LiveRequest]) -> None:
    """Verify that every table of these requests, all of them up to date, knows its branch's tokens, in order.

    Raises: BrokenInvariant naming the first branch of which that is not so.
    """
    for request in running:
        for branch in request.branches.values():
            if branch.table is not None and _known_tokens(kv, branch.table) != branch.span(0, branch.table.num_tokens):
                raise BrokenInvariant(f"branch {branch.id} of {request.request_id}: its pages know other tokens")


def _known_tokens(kv: KVCache, table: PageTable) -> bytes | None:
    """Return the tokens that the names of the full pages stand for, and the tail's."""
    contents = [kv.pool.content(page) for page in table.pages()[: table.num_tokens // kv.page_size]]
    if any(content is None for content in contents):
        return None
    return b"".join([content.tokens for content in contents if content is not None]) + table.tail
