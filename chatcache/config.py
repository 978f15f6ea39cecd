"""Settings as frozen data. `cli.py` fills them (flag > environment > chatcache.toml > default); nobody else reads
the environment."""

from __future__ import annotations

from typing import Literal

import msgspec

PAGE_SIZES = (8, 16, 32, 64)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine and its model.

    `model`: a folder, a Hugging Face id, or "" for the built-in model. `kv_memory_bytes=None` picks a share of free
    memory. `max_model_len=None` takes the model's own. `attention`: auto | reference | cpu | triton. `quantization`:
    none | int8, 8-bit weights on CPUs.

    At most `max_num_waiting` requests wait, with at most `max_waiting_tokens` prompt tokens (one alone may have more).
    `scheduling_policy`: fair (between namespaces, by virtual token counter; fcfs within one) | fcfs | priority (smaller
    first, then fcfs). `preemption`: auto (by measured cost) | swap | recompute. `swap_memory_bytes`: host memory for
    swapped pages; None makes room for half the KV pages, 1 GiB at most, 0 turns swapping off. `deterministic`: logits
    do not depend, to the bit, on batch, chunking, cache or preemption; slower. `strict`: a broken invariant found by
    the idle self-check raises instead of being counted.
    """

    model: str = ""
    served_model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    quantization: str = "none"
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    page_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    max_num_waiting: int = 1024
    max_waiting_tokens: int = 2**20
    scheduling_policy: str = "fair"
    preemption: str = "auto"
    swap_memory_bytes: int | None = None
    deterministic: bool = False
    strict: bool = False
    seed: int = 0


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway. `api_keys` empty means open (and then only loopback is bound by default).

    `db`: the SQLite file of the conversations, unless `redis` is the URL of a server that keeps them.
    `public_prompts`: texts of system prompts whose pages all tenants share. `tool_call_parser`: auto (what the model's
    chat template tells) | hermes | llama3_json | mistral | none. `reasoning_parser`: auto | qwen3 | deepseek_r1 | none.
    `max_import_bytes`: how large a file of conversations may be. `body_timeout_s`: how long a request body may pause,
    and the head start it has over 1 KiB/s. `detach_ttl_s`: how long a stored response goes on being generated after its
    last reader left. `drain_timeout_s`: how long what runs may go on when the server is told to end.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    db: str = "chatcache.db"
    redis: str = ""
    sse_keep_alive_interval_s: float = 15.0
    detach_ttl_s: float = 30.0
    drain_timeout_s: float = 20.0
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    public_prompts: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    max_body_bytes: int = 4 * 1024 * 1024
    max_import_bytes: int = 64 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_frame_bytes: int = 1024 * 1024
