"""What the routes of the cache answer: types for `openapi.json` and its tests, as in `answers`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType


class CachedPage(msgspec.Struct):
    index: int
    tokens: int
    state: str
    public: bool


class CacheMiss(msgspec.Struct):
    """Why the first page that is missing is missing; `cached_text` is what the cache holds there instead."""

    reason: Literal["never_computed", "evicted", "other_namespace", "diverged", "template_changed"]
    at_token: int
    detail: str
    text: str
    cached_text: str | None


class CachedMessage(msgspec.Struct):
    index: int
    role: str
    tokens: int
    cached_tokens: int


class CacheDivergence(msgspec.Struct):
    """Where the chat template writes history otherwise than it was when the latest reply was generated."""

    reason: Literal["template_changed"]
    message: int
    at_char: int
    at_token: int
    text: str


class CacheExplanation(msgspec.Struct):
    """What of a prompt is computed already. `messages` is null for raw prompts, and where a template mixes messages."""

    object: Literal["cache.explanation"]
    model: str
    prompt_tokens: int
    cached_tokens: int
    public_tokens: int
    page_size: int
    pages: list[CachedPage]
    miss: CacheMiss | None
    divergence: CacheDivergence | None
    messages: list[CachedMessage] | None


class Charge(msgspec.Struct):
    """Pages held; a page that k requests share counts 1/k for each."""

    id: str
    pages: float


class Pool(msgspec.Struct):
    """Every page in one state. `waste`: the share of held cells without a token."""

    page_size: int
    active: int
    shared: int
    cached: int
    free: int
    waste: float
    host_pages: int
    host_pages_in_use: int


class CacheMap(msgspec.Struct):
    """`cells`: one letter for every `pages_per_cell` pages, the busiest page's.

    f: free; i: idle (cached, goes when room is needed); o: another tenant's; p: pinned; a: in the table of one branch;
    s: shared by several.
    """

    object: Literal["cache.map"]
    page_size: int
    num_pages: int
    pages_per_cell: int
    cells: Annotated[str, Meta(max_length=4096, pattern="^[fiopas]*$")]


class Warmth(msgspec.Struct):
    """`cached_tokens` of a conversation's `tokens` need not be computed for its next turn."""

    conversation_id: str
    tokens: int
    cached_tokens: int


class CacheWarmth(msgspec.Struct):
    """Of the conversations that were asked about and are there, in the same order."""

    object: Literal["list"]
    data: list[Warmth]


class CacheAccounts(msgspec.Struct):
    """`pool`: on a server without keys, where everybody sees everything."""

    object: Literal["cache.accounts"]
    scope: Literal["server", "tenant"]
    pages_in_use: float
    page_bytes: int
    requests: list[Charge]
    conversations: list[Charge]
    pool: Pool | UnsetType = UNSET
