"""Responses about the server: models, tokens, sessions, health and the KV cache."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chatcache.gateway.schemas.errors import ErrorDetail


class Model(msgspec.Struct):
    """`max_model_len` is null until the model is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Tokens(msgspec.Struct):
    """`token_strs`: with return_token_strs."""

    count: int
    tokens: list[int]
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Text(msgspec.Struct):
    prompt: str


class Version(msgspec.Struct):
    version: str


class Session(msgspec.Struct):
    """Who one is. `key_id` is null on an open server; `expires_at` (since 1970) is the cookie's, null with a key."""

    object: Literal["session"]
    key_id: str | None
    tenant: str
    user: str
    is_admin: bool
    expires_at: int | None


class SessionDeleted(msgspec.Struct):
    object: Literal["session"]
    deleted: bool


class Alive(msgspec.Struct):
    status: Literal["alive"]


class Ready(msgspec.Struct):
    """The load is shown to who has a key, and to all where there are none."""

    status: Literal["ready"]
    model: str
    max_model_len: int
    num_running: int | UnsetType = UNSET
    num_waiting: int | UnsetType = UNSET
    kv_pages: int | UnsetType = UNSET
    kv_pages_in_use: int | UnsetType = UNSET


class NotReady(msgspec.Struct):
    """`progress`: of loading, 0 to 1."""

    status: Literal["loading", "unavailable"]
    model: str
    detail: str
    progress: float
    error: ErrorDetail


class CachedPage(msgspec.Struct):
    index: int
    tokens: int
    state: str
    public: bool


class MissCause(msgspec.Struct):
    """Why the first page that is missing is missing."""

    reason: Literal["never_computed", "evicted", "other_namespace", "diverged", "template_changed"]
    at_token: int
    detail: str


class CacheMiss(MissCause):
    """Why the first page that is missing is missing; `cached_text` is what the cache holds there instead."""

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
