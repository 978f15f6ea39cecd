"""Why a prompt hits as far as it does: a query over names, for people who wonder where their cache went."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from chatcache.kv.chain import Chain
from chatcache.kv.keys import TOKEN_BYTES, page_content
from chatcache.kv.matching import PrefixMatch
from chatcache.kv.pool import PagePool, num_common_tokens
from chatcache.types.pages import Explanation, PageHit

NEVER_COMPUTED = "never_computed"
EVICTED = "evicted"
DIVERGED = "diverged"
OTHER_NAMESPACE = "other_namespace"
MAX_DIVERGED_TOKENS = 64


def explain(pool: PagePool, chain: Chain, match: PrefixMatch, foreign: Iterable[PrefixMatch] = ()) -> Explanation:
    """Say which pages of the chain hit, and why the first that does not does not.

    `foreign`: what the same tokens would match in other namespaces, if the asker may know that.
    """
    reason, detail, diverged = "", "", b""
    if match.num_tokens < chain.num_tokens - 1:
        reason, detail, diverged = _first_miss(pool, chain, match, foreign)
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


def _page_hits(pool: PagePool, chain: Chain, match: PrefixMatch) -> Iterable[PageHit]:
    num_full, num_public = len(match.pages) - bool(match.tail), chain.num_public_pages
    loads = {index for index, _ in match.loads}
    for index in range(-(-len(chain.data) // chain.page_bytes)):
        num_tokens = len(chain.page(index)) // TOKEN_BYTES
        if index < num_full and index in loads:
            state = "host"
        elif index < num_full:
            state = "held" if pool.refs[match.pages[index]] else "idle"
        elif index == num_full and match.tail:
            state, num_tokens = "partial", len(match.tail) // TOKEN_BYTES
        else:
            state = "missing"
        yield PageHit(index, num_tokens, state, public=index < num_public)


def _first_miss(
    pool: PagePool, chain: Chain, match: PrefixMatch, foreign: Iterable[PrefixMatch]
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
    diverged = _nearest_continuation(pool, match.key, chain.page(index), len(match.tail)) if at else b""
    if diverged:
        return DIVERGED, f"what is cached goes on with other tokens from token {at} on", diverged
    return NEVER_COMPUTED, f"nothing that goes on from token {at} like this prompt has been computed", b""


def _was_evicted(pool: PagePool, chain: Chain, match: PrefixMatch, index: int) -> bool:
    """Say whether the missing page, or any longer part of it than what hits, is on record as evicted."""
    missing = chain.page(index)
    lengths = range(len(match.tail) + TOKEN_BYTES, len(missing) + 1, TOKEN_BYTES)
    return any(pool.was_evicted(page_content(match.key, missing[:length]).key) for length in lengths)


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
