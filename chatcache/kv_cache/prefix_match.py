"""Prefix matching: the longest computed prefix of a prompt, and why it is not longer.

A match consists of full pages, found by their keys, and at most one page of which only the first tokens are the same:

    prompt    [ a b c d ][ e f g h ][ i j k l ][ m n ]
    cached    [ a b c d ][ e f g h ][ i j x y ]          matches 10 tokens: two full pages, two tokens of the third

All functions are queries: they change neither the pool nor its eviction order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from chatcache.kv_cache.page_hash import TOKEN_BYTES, CacheScope, PageHashChain, hash_page
from chatcache.kv_cache.pool import NULL_PAGE, PagePool, num_common_tokens
from chatcache.types.stats import Explanation, PageHit

# Why the first token that misses was not found: values of `Explanation.reason`.
NEVER_COMPUTED = "never_computed"
EVICTED = "evicted"
DIVERGED = "diverged"
OTHER_NAMESPACE = "other_namespace"
NO_STATE = "no_state"
MAX_DIVERGED_TOKENS = 64


class PrefixMatch(NamedTuple):
    """The pages that hold the first `num_tokens` tokens of a prompt.

    Of the last page, perhaps only the first tokens match. `key` is the key of the last page that matches in full, and
    `tail_tokens` are the matching tokens after it. `num_idle` of the pages are idle: opening the match takes that many
    pages from the free ones. `loads` lists (table entry, host page) for pages that exist only on the host; their entry
    in `pages` is the null page. `state`: a snapshot of exactly these tokens, for models with recurrent layers.
    `num_page_tokens`: the tokens whose pages are cached, if they are more than the snapshot's, otherwise 0.
    """

    pages: list[int]
    num_tokens: int
    key: bytes
    tail_tokens: bytes
    num_idle: int
    scope: CacheScope
    loads: tuple[tuple[int, int], ...] = ()
    state: int = 0
    num_page_tokens: int = 0


def empty_match(chain: PageHashChain) -> PrefixMatch:
    """Return the match of a prompt of which nothing is computed."""
    return PrefixMatch([], 0, chain.parents[0], b"", 0, chain.scope)


def match_device(pool: PagePool, chain: PageHashChain, max_tokens: int | None = None) -> PrefixMatch:
    """Find the longest computed prefix on the device, of at most `max_tokens` tokens.

    The last token never matches: it has to be computed for its logits.
    """
    size = chain.page_bytes
    max_bytes = _max_matched_bytes(chain, max_tokens)
    pages = pool.match_full_pages(chain, max_bytes // size)
    key = chain.parents[len(pages)]
    start = len(pages) * size
    tail = b""
    partial = pool.match_partial_page(key, chain.data[start : min(max_bytes, start + size)])
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
    max_tokens: int | None = None,
    allowed_host_pages: Collection[int] | None = None,
) -> PrefixMatch:
    """Find the longest computed prefix on the device and the host, preferring device pages.

    With `pool=None` no device page may be matched; with `allowed_host_pages` no other host pages.
    """
    size = chain.page_bytes
    max_bytes = _max_matched_bytes(chain, max_tokens)
    num_pages = max_bytes // size
    pages: list[int] = []
    loads: list[tuple[int, int]] = []
    while True:
        if pool is not None:
            pages += pool.match_full_pages(chain, num_pages, len(pages))
        host_pages = host.match_full_pages(chain, min(len(pages) + 1, num_pages), len(pages))
        if not host_pages or (allowed_host_pages is not None and host_pages[0] not in allowed_host_pages):
            break
        loads.append((len(pages), host_pages[0]))
        pages.append(NULL_PAGE)
    key = chain.parents[len(pages)]
    start = len(pages) * size
    rest = chain.data[start : min(max_bytes, start + size)]
    on_device = (pool.match_partial_page(key, rest) if pool is not None else None) or (NULL_PAGE, 0)
    on_host = host.match_partial_page(key, rest, allowed_host_pages) or (NULL_PAGE, 0)
    num_tail = max(on_device[1], on_host[1])
    if on_host[1] > on_device[1]:
        loads.append((len(pages), on_host[0]))
    if num_tail:
        pages.append(on_device[0] if on_device[1] == num_tail else NULL_PAGE)
    tail = rest[: num_tail * TOKEN_BYTES]
    num_idle = sum(1 for page in pages if page != NULL_PAGE and pool is not None and not pool.refs[page])
    return PrefixMatch(pages, (start + len(tail)) // TOKEN_BYTES, key, tail, num_idle, chain.scope, tuple(loads))


def cut_match(match: PrefixMatch, chain: PageHashChain, num_tokens: int, state: int, pool: PagePool) -> PrefixMatch:
    """Return the first `num_tokens` tokens of a match, with a snapshot of them."""
    num_full, num_left = divmod(num_tokens * TOKEN_BYTES, chain.page_bytes)
    num_pages, start = num_full + bool(num_left), num_full * chain.page_bytes
    return PrefixMatch(
        pages := match.pages[:num_pages],
        num_tokens,
        chain.parents[num_full],
        chain.data[start : start + num_left],
        sum(1 for page in pages if page != NULL_PAGE and not pool.refs[page]),
        match.scope,
        tuple(load for load in match.loads if load[0] < num_pages),
        state,
        match.num_tokens if match.num_tokens > num_tokens else 0,
    )


def _max_matched_bytes(chain: PageHashChain, max_tokens: int | None) -> int:
    """Return how many bytes of the chain's data may match.

    All but the last token, at most `max_tokens`.
    """
    num_bytes = max(len(chain.data) - TOKEN_BYTES, 0)
    return num_bytes if max_tokens is None else min(num_bytes, max_tokens * TOKEN_BYTES)


def explain(
    pool: PagePool, chain: PageHashChain, match: PrefixMatch, other_matches: Iterable[PrefixMatch] = ()
) -> Explanation:
    """Explain a match: the state of each page, and why the first missing token was not found.

    `other_matches`: the matches of the same tokens in other namespaces, if the caller is permitted to see them.
    """
    reason, detail, diverged = "", "", b""
    if match.num_tokens < chain.num_tokens - 1:
        reason, detail, diverged = _miss_reason(pool, chain, match, other_matches)
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
        page = match.pages[index] if state != "missing" else NULL_PAGE
        # the map begins with the page after the null page
        map_index = page - 1 if page != NULL_PAGE else None
        yield PageHit(index, num_tokens, state, public=index < num_public, map_index=map_index)


def _miss_reason(
    pool: PagePool, chain: PageHashChain, match: PrefixMatch, other_matches: Iterable[PrefixMatch]
) -> tuple[str, str, bytes]:
    """Return (reason, detail, tokens that are cached instead) for the first missing token."""
    at = match.num_tokens
    index = at * TOKEN_BYTES // chain.page_bytes
    if _was_evicted(pool, chain, match, index):
        return EVICTED, f"page {index} was computed past token {at}, and was evicted when its space was needed", b""
    for other in other_matches:
        if other.num_tokens > at:
            name = other.scope.namespace
            return OTHER_NAMESPACE, f"namespace {name!r} has computed the first {other.num_tokens} tokens", b""
    diverged = _nearest_continuation(pool, match.key, chain.page_tokens(index), len(match.tail_tokens)) if at else b""
    if diverged:
        return DIVERGED, f"the cached continuation has different tokens from token {at} on", diverged
    return NEVER_COMPUTED, f"no continuation of this prompt from token {at} on is known", b""


def _was_evicted(pool: PagePool, chain: PageHashChain, match: PrefixMatch, index: int) -> bool:
    """Return whether the missing page was evicted recently.

    Also true if any part of it that is longer than the match was.
    """
    missing = chain.page_tokens(index)
    lengths = range(len(match.tail_tokens) + TOKEN_BYTES, len(missing) + 1, TOKEN_BYTES)
    return any(pool.was_evicted(hash_page(match.key, missing[:length]).key) for length in lengths)


def _nearest_continuation(pool: PagePool, parent: bytes, missing: bytes, num_common_bytes: int) -> bytes:
    """Return the tokens that are cached, instead of the prompt's, after their common prefix.

    They come from the newest page after `parent` that shares `num_common_bytes` with `missing`, and its successors.
    """
    num_common = num_common_bytes // TOKEN_BYTES
    found = b""
    for content in pool.children(parent):
        if len(content.tokens) > num_common_bytes and num_common_tokens(content.tokens, missing) == num_common:
            found, parent = content.tokens[num_common_bytes:], content.key
            break
    while found and len(found) < MAX_DIVERGED_TOKENS * TOKEN_BYTES:
        child = next(iter(pool.children(parent)), None)
        if child is None:
            break
        found, parent = found + child.tokens, child.key
    return found[: MAX_DIVERGED_TOKENS * TOKEN_BYTES]
