"""What of a prompt is already computed. Queries: nothing here changes the pool."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from chatcache.kv.chain import Chain, Scope
from chatcache.kv.keys import TOKEN_BYTES
from chatcache.kv.pool import NULL_PAGE, PagePool


class PrefixMatch(NamedTuple):
    """Pages that already hold the first `num_tokens` tokens; the last of them perhaps only in part.

    `num_idle` of them are held by nobody now, so opening the match makes as many fewer free pages. `key` is what the
    next page, or the one of which `tail` holds a part, follows. `loads`: (entry, host page) where only the host has it;
    the entry in `pages` is then the null page.
    """

    pages: list[int]
    num_tokens: int
    key: bytes
    tail: bytes
    num_idle: int
    scope: Scope
    loads: tuple[tuple[int, int], ...] = ()


def no_match(chain: Chain) -> PrefixMatch:
    return PrefixMatch([], 0, chain.parents[0], b"", 0, chain.scope)


def longest_match(pool: PagePool, chain: Chain, most: int | None = None) -> PrefixMatch:
    """Find the longest computed prefix of at most `most` tokens, never the last one (its logits are needed)."""
    size = chain.page_bytes
    longest = _longest(chain, most)
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


def longest_match_in_both(
    pool: PagePool | None,
    host: PagePool,
    chain: Chain,
    most: int | None = None,
    own: Collection[int] | None = None,
) -> PrefixMatch:
    """Find the longest prefix that is on the device or on the host, each page where it is nearer.

    `pool` None: nothing on the device may be matched. `own`: only these host pages may be.
    """
    size = chain.page_bytes
    longest = _longest(chain, most)
    num_pages = longest // size
    pages: list[int] = []
    loads: list[tuple[int, int]] = []
    while True:
        if pool is not None:
            pages += pool.lookup(chain, num_pages, len(pages))
        hosted = host.lookup(chain, min(len(pages) + 1, num_pages), len(pages))
        if not hosted or (own is not None and hosted[0] not in own):
            break
        loads.append((len(pages), hosted[0]))
        pages.append(NULL_PAGE)
    key = chain.parents[len(pages)]
    start = len(pages) * size
    rest = chain.data[start : min(longest, start + size)]
    near = (pool.lookup_partial(key, rest) if pool is not None else None) or (NULL_PAGE, 0)
    far = host.lookup_partial(key, rest, own) or (NULL_PAGE, 0)
    num_tail = max(near[1], far[1])
    if far[1] > near[1]:
        loads.append((len(pages), far[0]))
    if num_tail:
        pages.append(near[0] if near[1] == num_tail else NULL_PAGE)
    tail = rest[: num_tail * TOKEN_BYTES]
    num_idle = sum(1 for page in pages if page != NULL_PAGE and pool is not None and not pool.refs[page])
    return PrefixMatch(pages, (start + len(tail)) // TOKEN_BYTES, key, tail, num_idle, chain.scope, tuple(loads))


def _longest(chain: Chain, most: int | None) -> int:
    """Return how many bytes of the chain's data may be matched."""
    longest = max(len(chain.data) - TOKEN_BYTES, 0)
    return longest if most is None else min(longest, most * TOKEN_BYTES)
