"""What is told of the pages: which of a prompt are there, who holds them, and all of them at a glance."""

from __future__ import annotations

import msgspec


class PageHit(msgspec.Struct, frozen=True):
    """One page of an explained prompt. `state`: held (by a running branch) | idle | host | partial | missing."""

    index: int
    num_tokens: int
    state: str
    public: bool = False


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What of a prompt is already computed, and why not more.

    `reason`, one of: "" (everything but the last token hits) | never_computed | evicted | other_namespace | diverged.
    `at_token`: the first token that misses. `detail`: a sentence for people. `diverged_tokens`: what the nearest cached
    continuation holds instead, from `at_token` on (of the caller's own namespace only).
    """

    num_tokens: int
    num_cached_tokens: int
    page_size: int
    pages: tuple[PageHit, ...]
    reason: str = ""
    at_token: int = -1
    detail: str = ""
    diverged_tokens: tuple[int, ...] = ()


class PackedPrompt(msgspec.Struct, frozen=True):
    """Token ids as little-endian int32, to be looked up many at a time. `num_public_tokens` as of a request."""

    tokens: bytes
    num_public_tokens: int = 0


class PageAccounts(msgspec.Struct, frozen=True, kw_only=True):
    """Pages held now, a page that k requests share charged 1/k to each; all sums equal `num_pages_in_use`.

    `conversations` and `namespaces` add up their requests ("" for requests that name none).
    """

    num_pages_in_use: int
    page_bytes: int
    requests: dict[str, float]
    conversations: dict[str, float]
    namespaces: dict[str, float]


class PageMap(msgspec.Struct, frozen=True, kw_only=True):
    """Every page in one letter (see `kv.page_map`), `num_pages_per_cell` to a letter: the busiest page's of a cell."""

    page_size: int
    num_pages: int
    num_pages_per_cell: int
    cells: str
