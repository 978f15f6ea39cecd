"""Oracle of the slot usage: every slot of the pool is looked up by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import asdict

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.stats import PageUsage


def check_slots(kv: KVCache, tables: Sequence[PageTable], usage: PageUsage, num_kept_free: int) -> None:
    """Compare the slot usage with a count of all slots; admission keeps `num_kept_free` pages free."""
    size, pool = kv.page_size, kv.pool
    written = {
        (table.pages()[position // size], position % size) for table in tables for position in range(table.num_tokens)
    }
    held = {page for page in range(1, pool.num_pages) if pool.refs[page]}
    blank_first = sorted(set(range(1, pool.num_pages)) - held, key=pool.is_published)
    kept = set(blank_first[:num_kept_free])

    def use(page: int, offset: int) -> str:
        if page in held:
            return "token" if (page, offset) in written else "empty"
        if page in kept:
            return "kept_free"
        return "cached" if pool.is_published(page) else "free"

    counted = Counter(use(page, offset) for page in range(1, pool.num_pages) for offset in range(size))
    parts = asdict(usage.slots)
    assert parts == {part: counted[part] for part in parts}, "the slots by use"
    assert sum(parts.values()) == pool.num_usable * size
