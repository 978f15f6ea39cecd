"""What the engine tells of itself.

What is told of the pages: which of a prompt are there, who holds them, and all of them at a glance.

What is told of the model.
"""

from __future__ import annotations

import msgspec

# Bounds of the histograms that the engine keeps, and the gateway's of the same kind.
DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Durations(msgspec.Struct, frozen=True, array_like=True):
    """A histogram: how many lie up to each of `DURATION_BOUNDS_S` and above the one before, and how many beyond."""

    counts: tuple[int, ...] = (0,) * (len(DURATION_BOUNDS_S) + 1)
    total_s: float = 0.0


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What `/readyz`, `/metrics`, `chatcache bench` and the page show of the engine. Counters since start."""

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
    waste_fraction: float = 0.0
    num_host_pages: int = 0
    num_host_pages_in_use: int = 0
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
    load_fraction: float = 0.0


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


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the house may know of a loaded model. `digest` (hex) seeds page keys: same weights, same key.

    `weight_bytes` are held, `step_bytes` of them are read by every step. `quantization`: none | int8.
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

    @property
    def precision(self) -> str:
        """What it computes with, for people: the dtype, and how weights are kept if otherwise."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}, {self.quantization} weights"
