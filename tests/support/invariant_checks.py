"""Largest page pool that tests check completely whenever no page is in use (at most 20 ms)."""

MAX_STRICT_PAGES = 20_000
