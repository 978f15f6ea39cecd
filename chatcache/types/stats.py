"""Statistics of the engine, the KV cache and the model, for /metrics and the cache API."""

from __future__ import annotations

import msgspec

DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histogram buckets for durations, in the engine and the gateway."""


class Durations(msgspec.Struct, frozen=True, array_like=True):
    """A histogram of durations.

    One count per bucket up to each of `DURATION_BOUNDS_S`, and one for longer durations.
    """

    counts: tuple[int, ...] = (0,) * (len(DURATION_BOUNDS_S) + 1)
    total_s: float = 0.0


class SlotUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What the slots of the page pool are used for; a slot stores the KV of one token.

    Every slot counts once, so the fields add up to the size of the pool. Units: slots.

    `token`: holds a token of a running request, once however many requests share it. `empty`: on a page that requests
    hold, without a token. `kept_free`: on the free pages that admission keeps for requests that run already. `cached`:
    on other pages that no request holds, whose tokens can be matched. `free`: on all other pages.

    Source: Kwon et al. (SOSP 2023), Figure 2, which reports the share of `token` and calls the rest waste.
    """

    token: int = 0
    empty: int = 0
    kept_free: int = 0
    cached: int = 0
    free: int = 0

    def shares(self) -> dict[str, float]:
        """Return each part as a fraction of all slots. The fractions add up to 1, or are all 0 without a pool."""
        counts: dict[str, int] = msgspec.structs.asdict(self)
        num_slots = sum(counts.values()) or 1
        return {part: count / num_slots for part, count in counts.items()}

    @property
    def waste(self) -> float:
        """The fraction of the slots on held pages that hold no token."""
        return self.empty / (self.token + self.empty) if self.token else 0.0


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway sent to a worker and received from it; counters count since the worker was connected.

    `requests`: by the reason for which the worker was chosen. `num_predicted_tokens`: prompt tokens that the gateway
    believed to be in the worker's cache; `num_cached_tokens`: those that were, of the same requests. `owed_s`: as in
    `EngineHealth`.
    """

    name: str
    requests: dict[str, int]
    num_prompt_tokens: int = 0
    num_predicted_tokens: int = 0
    num_cached_tokens: int = 0
    owed_s: float = 0.0


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Engine statistics for `/readyz`, `/metrics`, `chatcache bench` and the web page.

    Counters count since startup. `num_states`: the slots for states of recurrent layers, 0 for a model without.

    `seconds_per_prompt_token`, `seconds_per_step`, `seconds_per_branch`: measured in recent steps, 0 before: prefill,
    a decode step, and by how much one more branch lengthens it. `owed_s`: seconds of prefill for the prompts that wait
    or are partly computed, whose cached tokens are known only when they start. `workers`: at a gateway of workers.
    """

    ready: bool
    detail: str = ""
    model: str = ""
    max_model_len: int = 0
    scheduling_policy: str = ""
    page_size: int = 0
    num_pages: int = 0
    num_pages_in_use: int = 0
    num_pages_idle: int = 0
    kv_bytes: int = 0
    num_pages_shared: int = 0
    slots: SlotUsage = SlotUsage()
    num_host_pages: int = 0
    num_host_pages_in_use: int = 0
    num_states: int = 0
    num_states_in_use: int = 0
    num_states_shared: int = 0
    num_states_idle: int = 0
    state_bytes: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    num_steps: int = 0
    num_steps_ahead: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_pages_swapped_out: int = 0
    num_pages_swapped_in: int = 0
    num_page_copies: int = 0
    num_state_copies: int = 0
    num_state_evictions: int = 0
    num_self_checks: int = 0
    num_broken_invariants: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_evictions: int = 0
    num_candidate_forks: int = 0
    num_beam_forks: int = 0
    num_live_forks: int = 0
    num_restarts: int = 0
    queue: Durations = Durations()
    prefill: Durations = Durations()
    decode: Durations = Durations()
    seconds_per_prompt_token: float = 0.0
    seconds_per_step: float = 0.0
    seconds_per_branch: float = 0.0
    owed_s: float = 0.0
    workers: tuple[WorkerReport, ...] = ()
    load_fraction: float = 0.0


class PageHit(msgspec.Struct, frozen=True):
    """The state of one page of a prompt in the cache.

    `state`: held (by a running branch) | idle (cached, held by none) | host (in host memory) | partial (only its first
    tokens are cached) | missing. `num_tokens`: tokens of the prompt on the page; for a partial page, those that are
    cached. `map_index`: the place of the page in the page map; None if it is missing or only on the host, or if the map
    has the pages of several workers.
    """

    index: int
    num_tokens: int
    state: str
    public: bool = False
    map_index: int | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Which pages of a prompt are cached, and why the others are not.

    `reason`: "" (all tokens but the last hit) | never_computed | evicted | other_namespace | diverged | no_state (the
    page is cached, but no state of the recurrent layers to continue from). `at_token`: the first token that misses.
    `detail`: a sentence for people. `diverged_tokens`: the tokens from `at_token` on of the nearest cached
    continuation, of the caller's own namespace only.
    """

    num_tokens: int
    num_cached_tokens: int
    page_size: int
    pages: tuple[PageHit, ...]
    reason: str = ""
    at_token: int = -1
    detail: str = ""
    diverged_tokens: tuple[int, ...] = ()


class ExplainQuery(msgspec.Struct, frozen=True):
    """A prompt whose cached pages are to be explained, with the scope of its pages.

    `operator`: the answer may also report what other namespaces have computed; an answer to a tenant must not.
    """

    prompt: tuple[int, ...]
    namespace: str = ""
    num_public_tokens: int = 0
    cache_salt: str = ""
    operator: bool = False


class PackedPrompt(msgspec.Struct, frozen=True):
    """A prompt's token ids as little-endian int32, for cache look-ups of many prompts."""

    tokens: bytes
    num_public_tokens: int = 0


class PageAccounts(msgspec.Struct, frozen=True, kw_only=True):
    """The pages in use, divided among requests, conversations and namespaces.

    A page that k requests share counts 1/k for each, so the values of each dict add up to `num_pages_in_use`.
    `conversations` and `namespaces` are sums over their requests; "" stands for requests without one. `states`: those
    of recurrent layers, by request, counted like pages; empty for a model without.
    """

    num_pages_in_use: int
    page_bytes: int
    requests: dict[str, float]
    conversations: dict[str, float]
    namespaces: dict[str, float]
    states: dict[str, float]


class PageMap(msgspec.Struct, frozen=True, kw_only=True):
    """The states of all pages, as one letter per cell (see `kv_cache.stats`).

    A cell stands for `num_pages_per_cell` pages and shows the one in most use.
    """

    page_size: int
    num_pages: int
    num_pages_per_cell: int
    cells: str


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the loaded model.

    `digest` (hex) identifies the weights and is hashed into all page keys. `weight_bytes`: size of the weights in
    memory, of which a step of one token reads `step_bytes`. `quantization`: none | int8 | fp8. `pooling`: last | mean,
    the kind of the model's embeddings. `hidden_size`: their dimensions, 0 for a model without embeddings.
    """

    name: str
    digest: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    weight_bytes: int = 0
    num_parameters: int = 0
    dtype: str = ""
    device: str = "cpu"
    attention: str = ""
    quantization: str = "none"
    step_bytes: int = 0
    pooling: str = "last"
    hidden_size: int = 0

    @property
    def precision(self) -> str:
        """The dtype of the computation as text, with the format of the weights if it differs."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}, {self.quantization} weights"
