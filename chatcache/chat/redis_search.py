"""Searching conversations in Redis: by their words those that may match, then by what they say.

Finds what the SQLite index finds. It walks the owner's conversations, newest first, until it has enough: a rare word
costs a look at the words of each. What changes while it walks may be seen as it was, or as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from chatcache.chat import redis_rows as rows
from chatcache.chat.redis_reads import in_order, walk
from chatcache.chat.search import Hit, SearchQuery, best_of, hit_of
from chatcache.chat.tree import Conversation


async def find(client: Any, owner: str, query: SearchQuery, limit: int, after: str | None) -> Sequence[Hit]:
    """The conversations that match, by `updated_at`, newest first."""
    hits: list[Hit] = []
    if not query.phrases:
        return ()
    async for heads in walk(client, owner, after):
        if not heads:
            continue
        words: list[bytes | None] = await client.mget([rows.words_key(head.id) for head in heads])
        for head in await asyncio.to_thread(_candidates, heads, words, query):
            values = await client.hvals(rows.items_key(head.id))
            hit = await asyncio.to_thread(_hit, head, values, query)
            if hit is not None:
                hits.append(hit)
            if len(hits) == limit:
                return tuple(hits)
    return tuple(hits)


def _candidates(heads: Sequence[Conversation], words: Sequence[bytes | None], query: SearchQuery) -> list[Conversation]:
    found = zip(heads, words, strict=True)
    return [head for head, data in found if data is not None and rows.may_match(query, data.decode())]


def _hit(head: Conversation, values: Sequence[bytes], query: SearchQuery) -> Hit | None:
    newest_first = reversed(in_order(values))
    best = best_of(((each.item.id, each.item.role, each.item.text) for each in newest_first), query)
    return hit_of(head, query, best) if best is not None or query.find(head.title) is not None else None
