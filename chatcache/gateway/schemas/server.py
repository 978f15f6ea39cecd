"""Response bodies of errors and about the server: model, tokenizer, session, health, KV cache and MCP servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType


class ErrorDetail(msgspec.Struct):
    """Description of an error.

    `param`: the request field that caused it. `code`: a stable, machine-readable name of the cause.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """The body of every error response."""

    error: ErrorDetail


class Model(msgspec.Struct):
    """The served model, with the fields of OpenAI, vLLM and Anthropic.

    `max_model_len` and `max_input_tokens`, which are equal, are null until it is loaded.
    """

    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None
    max_input_tokens: int | None
    lifecycle: Literal["active"]


class Models(msgspec.Struct):
    """The list of models, as one page of Anthropic's list, too."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class Tokens(msgspec.Struct):
    """The token ids of a text. `token_strs` is present with `return_token_strs`."""

    count: int
    tokens: list[int]
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Text(msgspec.Struct):
    prompt: str


class Version(msgspec.Struct):
    version: str


class Session(msgspec.Struct):
    """The client's identity.

    `key_id`: null on a server without keys. `expires_at`: of the cookie, null with a key.
    """

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
    """The server is ready. The load fields are omitted for clients without a required key."""

    status: Literal["ready"]
    model: str
    max_model_len: int
    num_running: int | UnsetType = UNSET
    num_waiting: int | UnsetType = UNSET
    kv_pages: int | UnsetType = UNSET
    kv_pages_in_use: int | UnsetType = UNSET


class NotReady(msgspec.Struct):
    """The server cannot serve requests yet, or not at present.

    `progress`: the loaded fraction of the model, 0 to 1.
    """

    status: Literal["loading", "unavailable"]
    model: str
    detail: str
    progress: float
    error: ErrorDetail


class CachedPage(msgspec.Struct):
    """One page of a prompt.

    `map_index`: its place in the page map; null if it is missing or only on the host, and with several workers. `text`:
    of a cached page, if the request has `page_texts`; taken from the prompt of the request.
    """

    index: int
    tokens: int
    state: str
    public: bool
    map_index: int | None
    text: str | UnsetType = UNSET


class MissCause(msgspec.Struct):
    """The reason for the first page that is not cached."""

    reason: Literal["never_computed", "evicted", "other_namespace", "diverged", "no_state", "template_changed"]
    at_token: int
    detail: str


class CacheLookup(msgspec.Struct):
    """The cached part of a prompt before its request ran. `miss`: null if all but the last token was cached."""

    prompt_tokens: int
    cached_tokens: int
    miss: MissCause | None


class CacheMiss(MissCause):
    """The reason for the first page that is not cached.

    `cached_text`: the text that is cached at that position.
    """

    text: str
    cached_text: str | None


class CachedMessage(msgspec.Struct):
    index: int
    role: str
    tokens: int
    cached_tokens: int


class CacheDivergence(msgspec.Struct):
    """Where the rendered history differs from the prompt of the latest reply."""

    reason: Literal["template_changed"]
    message: int
    at_char: int
    at_token: int
    text: str


class CacheExplanation(msgspec.Struct):
    """The cached part of a prompt: page by page and, in `messages`, message by message.

    `messages` is null for a raw prompt, and if the chat template does not render each message in one piece.
    """

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
    """Pages held by a request or conversation; a page that k requests share counts 1/k for each.

    `states`: the states held by a request to a model with recurrent layers, counted in the same way.
    """

    id: str
    pages: float
    states: float | UnsetType = UNSET


class SlotShares(msgspec.Struct):
    """Fractions of all token slots of the pool, by use; together 1.

    `token`: holds a token of a running request; `empty`: on a held page, without a token; `kept_free`: on free pages
    that admission keeps for running requests; `cached`: on other reusable pages; `free`: on all other pages.
    """

    token: float
    empty: float
    kept_free: float
    cached: float
    free: float


class StateSlots(msgspec.Struct):
    """The states of a model's recurrent layers: how many there are, and who holds them.

    `active`: of one branch; `shared`: of several; `cached`: snapshots that a prompt can match. `bytes`: size of one.
    """

    bytes: int
    active: int
    shared: int
    cached: int
    free: int


class Pool(msgspec.Struct):
    """Number of pages in each state, and what their token slots hold.

    `waste`: the fraction of the token positions on held pages that hold no token. `states`: null for a model without
    recurrent layers.
    """

    page_size: int
    active: int
    shared: int
    cached: int
    free: int
    slots: SlotShares
    waste: float
    host_pages: int
    host_pages_in_use: int
    states: StateSlots | None


class CacheMap(msgspec.Struct):
    """The state of every page, as one letter for each group of `pages_per_cell` pages.

    The letter is that of the page in most use. f: free; i: idle (cached, evicted when pages are needed); o: another
    tenant's; p: pinned; a: used by one branch; s: shared by several branches.
    """

    object: Literal["cache.map"]
    page_size: int
    num_pages: int
    pages_per_cell: int
    cells: Annotated[str, Meta(max_length=4096, pattern="^[fiopas]*$")]


class Warmth(msgspec.Struct):
    """How much of a conversation's active path is in the cache.

    `cached_tokens` of its `tokens` are cached.
    """

    conversation_id: str
    tokens: int
    cached_tokens: int


class CacheWarmth(msgspec.Struct):
    """The requested conversations that exist, in the order of the request."""

    object: Literal["list"]
    data: list[Warmth]


class CacheAccounts(msgspec.Struct):
    """The pages that running requests and their conversations hold.

    `pool`: present on a server without keys, whose clients see the whole server.
    """

    object: Literal["cache.accounts"]
    scope: Literal["server", "tenant"]
    pages_in_use: float
    page_bytes: int
    requests: list[Charge]
    conversations: list[Charge]
    pool: Pool | UnsetType = UNSET


class McpTool(msgspec.Struct):
    """A tool of an MCP server, as a function for the model.

    `parameters`: the JSON schema of its arguments. `needs_confirmation`: a call must have `confirmed`.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    needs_confirmation: bool


class McpServer(msgspec.Struct):
    """An MCP server. `error`: why its tools could not be read; `tools` are then those of an earlier reading."""

    name: str
    state: Literal["ready", "connecting", "unavailable"]
    error: str | None
    tools: list[McpTool]


class McpServerList(msgspec.Struct):
    object: Literal["list"]
    data: list[McpServer]


class McpCall(msgspec.Struct):
    """The result of a tool.

    `output`: its text; structured content is JSON. `is_error`: the tool failed, and `output` says why.
    """

    object: Literal["mcp.call"]
    output: str
    is_error: bool
    seconds: float


class AdminKey(msgspec.Struct):
    """A stored API key without its secret. A limit of null is none; `tokens_today`: computed today (UTC)."""

    id: str
    tenant: str
    user: str
    name: str
    is_admin: bool
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrent: int | None
    tokens_per_day: int | None
    tokens_today: int
    created_at: int
    revoked_at: int | None


class AdminUser(msgspec.Struct):
    """An owner of conversations and their number, at most 10,000. `user` is "" for the tenant itself."""

    tenant: str
    user: str
    conversations: int


class AdminTenant(msgspec.Struct):
    """A tenant: active keys, conversations of all its users, and the pages that its running requests hold."""

    tenant: str
    keys: int
    conversations: int
    pages_in_use: float


class AdminWorker(msgspec.Struct):
    """What the gateway has sent to a worker since it was connected."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int


class AdminServer(msgspec.Struct):
    """Load of the server. Counters count since the engine process started. `workers`: of a gateway with workers."""

    ready: bool
    model: str
    version: str
    uptime_s: int
    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_in_use: int
    num_pages_idle: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_evictions: int
    num_restarts: int
    workers: list[AdminWorker]


class AdminOverview(msgspec.Struct):
    """The server for its administrators, in counts: no titles, no messages, no secrets."""

    object: Literal["admin.overview"]
    keys: list[AdminKey]
    users: list[AdminUser]
    tenants: list[AdminTenant]
    server: AdminServer
