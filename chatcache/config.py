"""Configuration of engine and gateway as frozen data, and the readers of chatcache.toml and of the MCP servers' file.

Precedence is flag > environment > file > default. typer handles flags and environment variables, and the file becomes
click's `default_map`; no other module reads the environment or the files.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from chatcache.errors import InvalidRequestError

PAGE_SIZES = (8, 16, 32, 64)
MAX_NUM_SEQS = 4096
MAX_NUM_BATCHED_TOKENS = 2**20


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine and its model.

    `model`: a folder, a Hugging Face id, or "" for the demo model. `max_model_len=None`: the model's own maximum.
    `attention_backend`: auto | reference | cpu | triton. `quantization`: none | int8 | fp8 (8-bit weights, on CPUs and
    on GPUs). `tensor_parallel_size`: number of processes (ranks) that compute each layer together. `kv_cache_dtype`:
    auto (as the model computes) | fp8 (keys and values in 8 bits, on GPUs).
    `chat_template`: a file with the chat template, "" for the model's own.
    `pooling`: auto (as the model folder says, else last) | last | mean, how embeddings are computed.
    `kv_memory_bytes=None`: a share of the free memory. `swap_space_bytes`: host memory for swapped pages; None for half
    of the KV memory, at most 1 GiB; 0 disables swapping.

    `max_queued_requests`, `max_queued_tokens`: limits of the waiting queue; a single request may have more tokens.
    `max_prefill_time_s`: seconds of a step for prompts while other requests run; 0 for no limit, None for 0.05 on CPUs
    and no limit on GPUs.
    `scheduling_policy`: fair (between namespaces, by virtual token counters) | fcfs | priority (smaller first).
    `preemption_mode`: auto (by measured cost) | swap | recompute. `deterministic`: makes logits independent, to the
    bit, of batching, chunking, caching and preemption; slower. `strict`: a violated invariant found by the idle
    self-check raises instead of being counted.
    """

    model: str = ""
    served_model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    quantization: str = "none"
    chat_template: str = ""
    pooling: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    page_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_prefill_time_s: float | None = None
    enable_prefix_caching: bool = True
    max_queued_requests: int = 1024
    max_queued_tokens: int = 2**20
    scheduling_policy: str = "fair"
    preemption_mode: str = "auto"
    swap_space_bytes: int | None = None
    deterministic: bool = False
    strict: bool = False
    seed: int = 0


MAX_MCP_SERVERS = 32
_ServerName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]  # a namespace of functions
_ToolName = Annotated[str, Meta(min_length=1, max_length=128)]
_HeaderName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9-]{1,64}\Z")]
_HeaderValue = Annotated[str, Meta(pattern=r"^[!-~]([ -~]*[!-~])?\Z", max_length=8192)]


class McpServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An MCP server (streamable HTTP) whose tools the chat page offers to the model.

    `headers`: sent with every request, for example `Authorization`; secret. `tools`: the offered tools, None for all.
    `allow`: tools that run without the user's confirmation. `timeout_s`: of a call or of reading the list of tools.
    """

    name: _ServerName
    url: Annotated[str, Meta(max_length=2048)]
    headers: dict[_HeaderName, _HeaderValue] = {}
    tools: tuple[_ToolName, ...] | None = None
    allow: tuple[_ToolName, ...] = ()
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 30.0

    def __repr__(self) -> str:
        return f"McpServer({self.name!r})"  # neither headers nor URL, which may be secret


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the gateway.

    `api_keys`: if empty, requests need no key, and the default is to listen on the loopback address only. `db`: the
    SQLite file of the conversations, unless `redis` is the URL of the Redis server that stores them.
    `shared_system_prompts`: system prompts whose pages all tenants share. `tool_call_parser`: auto (by the model's chat
    template) | hermes | qwen3_coder | llama3_json | pythonic | mistral | none. `reasoning_parser`: auto | qwen3 |
    deepseek_r1 | none. `mcp_servers`: whose tools the chat page offers. `routing`: how a gateway chooses among several
    workers, cost | hash.

    `max_import_bytes`: the largest file of conversations that can be imported. `body_timeout_s`: how long a request
    body may pause, and its initial allowance over a rate of 1 KiB/s. `disconnect_grace_period_s`: how long a stored
    response is still generated after its last reader disconnected. `drain_timeout_s`: how long running requests may
    continue when the server is stopped.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    db: str = "chatcache.db"
    redis: str = ""
    sse_keep_alive_interval_s: float = 15.0
    disconnect_grace_period_s: float = 30.0
    drain_timeout_s: float = 20.0
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    shared_system_prompts: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    mcp_servers: tuple[McpServer, ...] = ()
    routing: str = "cost"
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    max_body_bytes: int = 4 * 1024 * 1024
    max_import_bytes: int = 64 * 1024 * 1024
    body_timeout_s: float = 30.0
    max_frame_bytes: int = 1024 * 1024


FILE_NAME = "chatcache.toml"
MAX_FILE_BYTES = 1024 * 1024

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(text: str | int, *, low: int = 0, high: int = 2**50) -> int:
    """Parse a size such as "2GiB", "512 MB", "1.5g" or "1048576" into bytes.

    Raises: InvalidRequestError if the text is not a size or not between `low` and `high`.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise InvalidRequestError(f"{text!r} is not a size; write bytes, or a number with kB, MB, GB, KiB, MiB, GiB")
    num_bytes = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if not low <= num_bytes <= high:
        raise InvalidRequestError(f"{text} is not between {format_size(low)} and {format_size(high)}")
    return num_bytes


def format_size(num_bytes: float) -> str:
    """Format a number of bytes for people: "2 GiB", "1.5 MiB", "17 B"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a configuration file: names as written, and values as text or lists of text, as in environment variables.

    click checks text against the type of the flag. A number it would convert: `port = 80.5` to 80, `port = true` to 1.
    A missing file has no settings. Raises: InvalidRequestError, naming the file, if it is not flat TOML.
    """
    if not path.exists():
        return {}
    settings = _read_toml(path)
    for name, value in settings.items():
        if isinstance(value, dict):
            raise InvalidRequestError(
                f"{path}: [{name}] is a table; put settings at the top level, named like the flags"
            )
    return {name: _as_text(value) for name, value in settings.items()}


def _as_text(value: Any) -> str | list[str]:
    """Return a TOML value as it is written on a command line; a list as the values of a repeated flag."""
    if isinstance(value, list):
        return [str(_as_text(each)) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises: InvalidRequestError, naming the file."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidRequestError(f"{path}: larger than {format_size(MAX_FILE_BYTES)}")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path}: {error}") from None
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}") from None


def read_mcp_servers(path: Path) -> tuple[McpServer, ...]:
    """Read the file of the MCP servers: TOML with one table `[[server]]` each.

    Raises: InvalidRequestError that names the file, the server and the field, and never a header's value.
    """
    document = _read_toml(path)
    tables = document.pop("server", None)
    if document:
        raise InvalidRequestError(f"{path}: unknown setting {next(iter(document))!r}; servers are tables [[server]]")
    if not isinstance(tables, list) or not 1 <= len(tables) <= MAX_MCP_SERVERS:
        raise InvalidRequestError(f"{path}: has no tables [[server]], or more than {MAX_MCP_SERVERS}")
    servers: dict[str, McpServer] = {}
    for number, table in enumerate(tables, start=1):
        where = f"{path}: server {number}"
        try:
            server = msgspec.convert(table, McpServer)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"{where}: {error}") from None
        if server.name in servers:
            raise InvalidRequestError(f"{where}: name: {server.name!r} is taken by an earlier server")
        if problem := _url_problem(server.url):
            raise InvalidRequestError(f"{where}: url: {problem}")
        for tool in server.allow:
            if server.tools is not None and tool not in server.tools:
                raise InvalidRequestError(f"{where}: allow: {tool!r} is not one of its tools")
        servers[server.name] = server
    return tuple(servers.values())


def _url_problem(url: str) -> str:
    """Return why a URL is none of a server; "" if it is one. The URL is not repeated, since it may have a secret."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        return "must be http://host/path or https://host/path"
    if parts.username is not None or parts.password is not None:
        return "must not have a user or password; put them into headers"
    if parts.fragment or not url.isascii() or not url.isprintable() or " " in url:
        return "must not have a fragment, spaces or characters outside ASCII"
    return ""


def settings_by_command(
    settings: Mapping[str, Any], commands: Mapping[str, Iterable[str]], path: Path
) -> dict[str, Any]:
    """Return for each command those settings for which it has a flag.

    `settings`: named like the flags; - and _ are the same. `commands`: the parameter names of each command, with _.
    Raises: InvalidRequestError for a setting that no command has.
    """
    known = {name for flags in commands.values() for name in flags}
    for written in settings:
        if (name := written.replace("-", "_")) not in known:
            meant = suggest_corrections([name], known).get(name, "").replace("_", "-")
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise InvalidRequestError(f"{path}: unknown setting {written!r}{hint}")
    values = {name.replace("-", "_"): value for name, value in settings.items()}
    return {command: {name: values[name] for name in flags if name in values} for command, flags in commands.items()}


def suggest_corrections(names: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Map unknown names to the known ones they resemble, for warnings about misspellings."""
    choices = sorted(set(known))
    close = {name: difflib.get_close_matches(name, choices, 1, cutoff=0.7) for name in names if name not in choices}
    return {name: found[0] for name, found in close.items() if found}
