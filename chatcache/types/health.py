"""What the engine tells of itself."""

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
    max_num_waiting: int = 0
    max_waiting_tokens: int = 0
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
