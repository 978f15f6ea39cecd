"""What of a prompt is already computed. Queries: nothing here changes the pool.

Why a prompt hits as far as it does: a query over names, for people who wonder where their cache went.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from chatcache.kv_cache.page_hash import TOKEN_BYTES, CacheScope, PageHashChain, hash_page
from chatcache.kv_cache.pool import NULL_PAGE, PagePool, num_common_tokens
from chatcache.types.stats import Explanation, PageHit


class PrefixMatch(NamedTuple):
    """Pages that already hold the first `num_tokens` tokens; the last of them perhaps only in part.

    `num_idle` of them are held by nobody now, so opening the match makes as many fewer free pages. `key` is what the
    next page, or the one of which `tail` holds a part, follows. `loads`: (entry, host page) where only the host has it;
    the entry in `pages` is then the null page.
    """

    pages: list[int]
    num_tokens: int
    key: bytes
    tail_tokens: bytes
    num_idle: int
    scope: CacheScope
    loads: tuple[tuple[int, int], ...] = ()


def empty_match(chain: PageHashChain) -> PrefixMatch:
    return PrefixMatch([], 0, chain.parents[0], b"", 0, chain.scope)


def match_device(pool: PagePool, chain: PageHashChain, most: int | None = None) -> PrefixMatch:
    """Find the longest computed prefix of at most `most` tokens, never the last one (its logits are needed)."""
    size = chain.page_bytes
    longest = _max_matched_bytes(chain, most)
    pages = pool.match_full_pages(chain, longest // size)
    key = chain.parents[len(pages)]
    start = len(pages) * size
    tail = b""
    partial = pool.match_partial_page(key, chain.data[start : min(longest, start + size)])
    if partial is not None:
        pages.append(partial[0])
        tail = chain.data[start : start + partial[1] * TOKEN_BYTES]
    refs = pool.refs
    num_idle = sum(1 for page in pages if not refs[page])
    return PrefixMatch(pages, (start + len(tail)) // TOKEN_BYTES, key, tail, num_idle, chain.scope)


def match_device_and_host(
    pool: PagePool | None,
    host: PagePool,
    chain: PageHashChain,
    most: int | None = None,
    own: Collection[int] | None = None,
) -> PrefixMatch:
    """Find the longest prefix that is on the device or on the host, each page where it is nearer.

    `pool` None: nothing on the device may be matched. `own`: only these host pages may be.
    """
    size = chain.page_bytes
    longest = _max_matched_bytes(chain, most)
    num_pages = longest // size
    pages: list[int] = []
    loads: list[tuple[int, int]] = []
    while True:
        if pool is not None:
            pages += pool.match_full_pages(chain, num_pages, len(pages))
        hosted = host.match_full_pages(chain, min(len(pages) + 1, num_pages), len(pages))
        if not hosted or (own is not None and hosted[0] not in own):
            break
        loads.append((len(pages), hosted[0]))
        pages.append(NULL_PAGE)
    key = chain.parents[len(pages)]
    start = len(pages) * size
    rest = chain.data[start : min(longest, start + size)]
    near = (pool.match_partial_page(key, rest) if pool is not None else None) or (NULL_PAGE, 0)
    far = host.match_partial_page(key, rest, own) or (NULL_PAGE, 0)
    num_tail = max(near[1], far[1])
    if far[1] > near[1]:
        loads.append((len(pages), far[0]))
    if num_tail:
        pages.append(near[0] if near[1] == num_tail else NULL_PAGE)
    tail = rest[: num_tail * TOKEN_BYTES]
    num_idle = sum(1 for page in pages if page != NULL_PAGE and pool is not None and not pool.refs[page])
    return PrefixMatch(pages, (start + len(tail)) // TOKEN_BYTES, key, tail, num_idle, chain.scope, tuple(loads))


def _max_matched_bytes(chain: PageHashChain, most: int | None) -> int:
    """Return how many bytes of the chain's data may be matched."""
    longest = max(len(chain.data) - TOKEN_BYTES, 0)
    return longest if most is None else min(longest, most * TOKEN_BYTES)


NEVER_COMPUTED = "never_computed"
EVICTED = "evicted"
DIVERGED = "diverged"
OTHER_NAMESPACE = "other_namespace"
MAX_DIVERGED_TOKENS = 64


def explain(
    pool: PagePool, chain: PageHashChain, match: PrefixMatch, foreign: Iterable[PrefixMatch] = ()
) -> Explanation:
    """Say which pages of the chain hit, and why the first that does not does not.

    `foreign`: what the same tokens would match in other namespaces, if the asker may know that.
    """
    reason, detail, diverged = "", "", b""
    if match.num_tokens < chain.num_tokens - 1:
        reason, detail, diverged = _miss_reason(pool, chain, match, foreign)
    return Explanation(
        num_tokens=chain.num_tokens,
        num_cached_tokens=match.num_tokens,
        page_size=chain.page_bytes // TOKEN_BYTES,
        pages=tuple(_page_hits(pool, chain, match)),
        reason=reason,
        at_token=match.num_tokens if reason else -1,
        detail=detail,
        diverged_tokens=tuple(np.frombuffer(diverged, "<i4").tolist()),
    )


def _page_hits(pool: PagePool, chain: PageHashChain, match: PrefixMatch) -> Iterable[PageHit]:
    num_full, num_public = len(match.pages) - bool(match.tail_tokens), chain.num_public_pages
    loads = {index for index, _ in match.loads}
    for index in range(-(-len(chain.data) // chain.page_bytes)):
        num_tokens = len(chain.page_tokens(index)) // TOKEN_BYTES
        if index < num_full and index in loads:
            state = "host"
        elif index < num_full:
            state = "held" if pool.refs[match.pages[index]] else "idle"
        elif index == num_full and match.tail_tokens:
            state, num_tokens = "partial", len(match.tail_tokens) // TOKEN_BYTES
        else:
            state = "missing"
        yield PageHit(index, num_tokens, state, public=index < num_public)


def _miss_reason(
    pool: PagePool, chain: PageHashChain, match: PrefixMatch, foreign: Iterable[PrefixMatch]
) -> tuple[str, str, bytes]:
    """Return (reason, detail, what the nearest cached continuation holds instead)."""
    at = match.num_tokens
    index = at * TOKEN_BYTES // chain.page_bytes
    if _was_evicted(pool, chain, match, index):
        return EVICTED, f"page {index} had been computed to beyond token {at} and was evicted to make room", b""
    for other in foreign:
        if other.num_tokens > at:
            name = other.scope.namespace
            return OTHER_NAMESPACE, f"namespace {name!r} has computed the first {other.num_tokens} tokens", b""
    diverged = _nearest_continuation(pool, match.key, chain.page_tokens(index), len(match.tail_tokens)) if at else b""
    if diverged:
        return DIVERGED, f"what is cached goes on with other tokens from token {at} on", diverged
    return NEVER_COMPUTED, f"nothing that goes on from token {at} like this prompt has been computed", b""


def _was_evicted(pool: PagePool, chain: PageHashChain, match: PrefixMatch, index: int) -> bool:
    """Say whether the missing page, or any longer part of it than what hits, is on record as evicted."""
    missing = chain.page_tokens(index)
    lengths = range(len(match.tail_tokens) + TOKEN_BYTES, len(missing) + 1, TOKEN_BYTES)
    return any(pool.was_evicted(hash_page(match.key, missing[:length]).key) for length in lengths)


def _nearest_continuation(pool: PagePool, parent: bytes, missing: bytes, num_common_bytes: int) -> bytes:
    """Return what the newest of the pages that share most with `missing` holds from there on, and its continuation."""
    most = num_common_bytes // TOKEN_BYTES
    found = b""
    for content in pool.children(parent):
        if len(content.tokens) > num_common_bytes and num_common_tokens(content.tokens, missing) == most:
            found, parent = content.tokens[num_common_bytes:], content.key
            break
    while found and len(found) < MAX_DIVERGED_TOKENS * TOKEN_BYTES:
        child = next(iter(pool.children(parent)), None)
        if child is None:
            break
        found, parent = found + child.tokens, child.key
    return found[: MAX_DIVERGED_TOKENS * TOKEN_BYTES]
