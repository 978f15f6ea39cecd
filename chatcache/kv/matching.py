"""What of a prompt is already computed. Queries: nothing here changes the pool."""

from __future__ import annotations

from typing import NamedTuple

from chatcache.kv.chain import Chain, Scope
from chatcache.kv.keys import TOKEN_BYTES
from chatcache.kv.pool import PagePool


class PrefixMatch(NamedTuple):
    """Pages that already hold the first `num_tokens` tokens; the last of them perhaps only in part.

    `num_idle` of them are held by nobody now, so opening the match makes as many fewer free pages. `key` is what the
    next page, or the one of which `tail` holds a part, follows.
    """

    pages: list[int]
    num_tokens: int
    key: bytes
    tail: bytes
    num_idle: int
    scope: Scope


def no_match(chain: Chain) -> PrefixMatch:
    return PrefixMatch([], 0, chain.parents[0], b"", 0, chain.scope)


def longest_match(pool: PagePool, chain: Chain) -> PrefixMatch:
    """Find the longest computed prefix, never the last token (its logits are needed)."""
    size = chain.page_bytes
    longest = max(len(chain.data) - TOKEN_BYTES, 0)
    pages = pool.lookup(chain, longest // size)
    key = chain.parents[len(pages)]
    start = len(pages) * size
    tail = b""
    partial = pool.lookup_partial(key, chain.data[start : min(longest, start + size)])
    if partial is not None:
        pages.append(partial[0])
        tail = chain.data[start : start + partial[1] * TOKEN_BYTES]
    refs = pool.refs
    num_idle = sum(1 for page in pages if not refs[page])
    return PrefixMatch(pages, (start + len(tail)) // TOKEN_BYTES, key, tail, num_idle, chain.scope)
