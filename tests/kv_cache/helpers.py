"""Helpers that drive a KV cache, and an oracle of the prefixes that a match may find."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.kv_cache.copy_on_write import PageCopy
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import CacheScope, encode_tokens
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.prefix_match import PrefixMatch

PUBLIC = "public"
PageClass = str | tuple[str, int]


def find_match(kv: KVCache, tokens: Sequence[int], scope: CacheScope | str = "") -> PrefixMatch:
    return kv.match(kv.hash_pages(tokens, CacheScope(scope) if isinstance(scope, str) else scope))


def write(kv: KVCache, table: PageTable, tokens: Sequence[int]) -> tuple[PageCopy, ...]:
    """Reserve, commit and complete a step that computes `tokens` into the table."""
    copies = kv.reserve([(table, table.num_tokens + len(tokens))])
    assert copies is not None
    kv.commit(table, encode_tokens(tokens))
    kv.complete_step()
    return copies


def open_and_fill(kv: KVCache, tokens: Sequence[int], scope: CacheScope | str = "") -> PageTable:
    """Open a table on the cached prefix of `tokens` and compute the rest."""
    table = kv.open(find_match(kv, [*tokens, 0], scope))
    if table.num_tokens < len(tokens):
        write(kv, table, tokens[table.num_tokens :])
    return table


def token_range(n: int, start: int = 1) -> list[int]:
    return list(range(start, start + n))


class PrefixOracle:
    """Every prefix that was computed, with the class of the page on which it ends.

    The class is PUBLIC, or (namespace, number of public pages before it).
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._computed: set[tuple[tuple[int, ...], PageClass]] = set()

    def _class_of(self, num_tokens: int, num_public: int, namespace: str) -> PageClass:
        return PUBLIC if (num_tokens - 1) // self._page_size < num_public else (namespace, num_public)

    def record(self, tokens: Sequence[int], num_public: int, namespace: str) -> None:
        lengths = range(1, len(tokens) + 1)
        self._computed |= {(tuple(tokens[:n]), self._class_of(n, num_public, namespace)) for n in lengths}

    def contains(self, tokens: Sequence[int], num_public: int, namespace: str) -> bool:
        return not tokens or (tuple(tokens), self._class_of(len(tokens), num_public, namespace)) in self._computed

    def longest_match(self, tokens: Sequence[int], num_public: int, namespace: str) -> int:
        """Return how many tokens of a prompt must match if nothing is evicted; never its last token."""
        lengths = range(len(tokens) - 1, 0, -1)
        return next((n for n in lengths if self.contains(tokens[:n], num_public, namespace)), 0)
