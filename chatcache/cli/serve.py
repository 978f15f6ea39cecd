"""`chatcache serve` and `chatcache gateway`: convert the flags to settings, check them, and run the server."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import not_
from pathlib import Path
from typing import Any

import msgspec
import typer

from chatcache.cli import options
from chatcache.config import (
    EngineConfig,
    McpServer,
    ServerConfig,
    format_size,
    read_mcp_servers,
    suggest_corrections,
)
from chatcache.errors import InvalidRequestError
from chatcache.factory import check_model_folder, served_name

ENGINE = EngineConfig()
SERVER = ServerConfig()
_HOST_NAME = re.compile(r"[^\s:/?#@*\[\]\\]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*\\]+")
MAX_SHARED_SYSTEM_PROMPTS = 64
MAX_SHARED_SYSTEM_PROMPT_BYTES = 1024 * 1024


def serve(
    context: typer.Context,
    model: options.Model = ENGINE.model,
    host: options.Host = SERVER.host,
    port: options.Port = SERVER.port,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention_backend: options.AttentionBackend = "auto",
    quantization: options.Quantization = "none",
    chat_template: options.ChatTemplate = ENGINE.chat_template,
    pooling: options.Pooling = "auto",
    kv_cache_dtype: options.KVCacheDtype = "auto",
    kv_memory: options.KVMemory = None,
    max_model_len: options.MaxModelLen = None,
    tensor_parallel_size: options.TensorParallelSize = ENGINE.tensor_parallel_size,
    page_size: options.PageSize = ENGINE.page_size,
    max_num_seqs: options.MaxNumSeqs = ENGINE.max_num_seqs,
    max_num_batched_tokens: options.MaxNumBatchedTokens = ENGINE.max_num_batched_tokens,
    max_prefill_time: options.MaxPrefillTime = None,
    max_queued_requests: options.MaxQueuedRequests = ENGINE.max_queued_requests,
    max_queued_tokens: options.MaxQueuedTokens = ENGINE.max_queued_tokens,
    scheduling_policy: options.SchedulingPolicy = "fair",
    preemption_mode: options.PreemptionMode = "auto",
    swap_space: options.SwapSpace = None,
    deterministic: options.Deterministic = False,
    no_prefix_caching: options.NoPrefixCaching = False,
    seed: options.Seed = ENGINE.seed,
    served_model_name: options.ServedModelName = None,
    api_key: options.ApiKey = [],  # noqa: B006 (typer copies it)
    db: options.Db = SERVER.db,
    redis: options.RedisUrl = SERVER.redis,
    sse_keep_alive_interval: options.SseKeepAliveInterval = SERVER.sse_keep_alive_interval_s,
    disconnect_grace_period: options.DisconnectGracePeriod = SERVER.disconnect_grace_period_s,
    drain_timeout: options.DrainTimeout = SERVER.drain_timeout_s,
    allowed_host: options.AllowedHost = [],  # noqa: B006
    cors_origin: options.CorsOrigin = [],  # noqa: B006
    root_path: options.RootPath = SERVER.root_path,
    shared_system_prompt: options.SharedSystemPrompt = [],  # noqa: B006
    tool_call_parser: options.ToolCallParser = "auto",
    reasoning_parser: options.ReasoningParser = "auto",
    mcp_config: options.McpConfig = None,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = "text",
) -> None:
    """Serve the chat page and the OpenAI-compatible API."""
    options.refuse_two_stores(context)
    engine, server = convert_flags({name: value for name, value in locals().items() if name != "context"})
    refuse_misspelt_key(server.api_keys, os.environ)
    if engine.preemption_mode == "swap" and engine.swap_space_bytes == 0:
        raise typer.BadParameter("swap needs host memory; --swap-space is 0.", param_hint="--preemption-mode")
    check_model_folder(engine)
    from chatcache.cli.server import run_server

    raise typer.Exit(run_server(msgspec.structs.replace(engine, served_model_name=served_name(engine)), server))


def gateway(
    context: typer.Context,
    bus: options.Bus,
    model: options.Model = ENGINE.model,
    chat_template: options.ChatTemplate = ENGINE.chat_template,
    host: options.Host = SERVER.host,
    port: options.Port = SERVER.port,
    served_model_name: options.ServedModelName = None,
    api_key: options.ApiKey = [],  # noqa: B006 (typer copies it)
    db: options.Db = SERVER.db,
    redis: options.RedisUrl = SERVER.redis,
    routing: options.Routing = "cost",
    sse_keep_alive_interval: options.SseKeepAliveInterval = SERVER.sse_keep_alive_interval_s,
    disconnect_grace_period: options.DisconnectGracePeriod = SERVER.disconnect_grace_period_s,
    drain_timeout: options.DrainTimeout = SERVER.drain_timeout_s,
    allowed_host: options.AllowedHost = [],  # noqa: B006
    cors_origin: options.CorsOrigin = [],  # noqa: B006
    root_path: options.RootPath = SERVER.root_path,
    shared_system_prompt: options.SharedSystemPrompt = [],  # noqa: B006
    tool_call_parser: options.ToolCallParser = "auto",
    reasoning_parser: options.ReasoningParser = "auto",
    mcp_config: options.McpConfig = None,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = "text",
) -> None:
    """Serve the chat page and the API with the engines of `chatcache worker` processes. Experimental."""
    options.refuse_two_stores(context)
    engine, server = convert_flags({name: value for name, value in locals().items() if name not in ("context", "bus")})
    refuse_misspelt_key(server.api_keys, os.environ)
    check_model_folder(engine)
    from chatcache.cli.server import run_server

    raise typer.Exit(
        run_server(msgspec.structs.replace(engine, served_model_name=served_name(engine)), server, bus_url=bus)
    )


def refuse_misspelt_key(api_keys: Sequence[str], variables: Iterable[str]) -> None:
    """Refuse to start without an API key if a variable looks like a misspelt CHATCACHE_API_KEY.

    The operator expects a server that requires a key, and this one would not. Raises: Exit, after a message.
    """
    prefix, name = options.env(""), options.env("api-key")
    given = [variable.removeprefix(prefix) for variable in variables if variable.startswith(prefix)]
    for wrong in sorted(suggest_corrections(given, [name.removeprefix(prefix)])):
        if not api_keys:
            print(
                f"chatcache: not started, because it would need no API key: {prefix}{wrong} is set, which is not a "
                f"setting. Rename it to {name}, or unset it.",
                file=sys.stderr,
            )
            raise typer.Exit(options.EXIT_CONFIG)


def convert_flags(flags: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Build the settings of the engine and of the server from the flags.

    Raises: BadParameter for values that the flags' types accept but the settings do not.
    """
    values = {flag: _CONVERSIONS[flag](value) if flag in _CONVERSIONS else value for flag, value in flags.items()}
    fields = {_FIELDS.get(flag, flag): value for flag, value in values.items()}
    engine = {name: fields.pop(name) for name in EngineConfig.__struct_fields__ if name in fields}
    return EngineConfig(**engine), ServerConfig(**fields)


def _address(host: str) -> str:
    """Return the address without the brackets of an IPv6 literal.

    Raises: BadParameter for an address with a port.
    """
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare and not _is_ipv6(bare):
        raise typer.BadParameter(f"{host!r} is not an address; give the port with --port.", param_hint="--host")
    return bare


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _api_keys(keys: list[str]) -> tuple[str, ...]:
    for key in keys:
        if not (8 <= len(key) <= 256 and key.isascii() and key.isprintable() and " " not in key):
            raise typer.BadParameter("a key has 8 to 256 printable characters and no spaces.", param_hint="--api-key")
    return tuple(keys)


def _allowed_hosts(hosts: list[str]) -> tuple[str, ...]:
    """Return the names as a Host header has them, without port and brackets. Raises: BadParameter."""
    names = []
    for host in hosts:
        name = host.removeprefix("[").removesuffix("]")
        if host != "*" and not _is_ipv6(name) and not _HOST_NAME.fullmatch(name):
            raise typer.BadParameter(
                f"{host!r} is not a host name; give it without scheme, port and path.", param_hint="--allowed-host"
            )
        names.append(name)
    return tuple(names)


def _cors_origins(origins: list[str]) -> tuple[str, ...]:
    """Return the origins as an Origin header has them. Raises: BadParameter."""
    found = tuple(origin.lower().rstrip("/") for origin in origins)
    for given, origin in zip(origins, found, strict=True):
        if origin != "null" and not _ORIGIN.fullmatch(origin):
            raise typer.BadParameter(
                f"{given!r} is not an origin such as https://app.example.org.", param_hint="--cors-origin"
            )
    return found


def _root_path(path: str) -> str:
    if path and not path.startswith("/"):
        raise typer.BadParameter(f"{path!r} does not begin with '/'.", param_hint="--root-path")
    return path.rstrip("/")


def _shared_system_prompts(files: list[Path]) -> tuple[str, ...]:
    if len(files) > MAX_SHARED_SYSTEM_PROMPTS:
        raise typer.BadParameter(
            f"at most {MAX_SHARED_SYSTEM_PROMPTS} files, got {len(files)}.", param_hint="--shared-system-prompt"
        )
    return tuple(_shared_system_prompt(file) for file in files)


def _shared_system_prompt(file: Path) -> str:
    try:
        if not file.is_file():
            raise ValueError("is not a file.")
        if file.stat().st_size > MAX_SHARED_SYSTEM_PROMPT_BYTES:
            raise ValueError(f"is larger than {format_size(MAX_SHARED_SYSTEM_PROMPT_BYTES)}.")
        text = file.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("is empty.")
    except UnicodeDecodeError:
        reason = "is not UTF-8 text."
    except ValueError as error:
        reason = str(error)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}."
    else:
        return text
    raise typer.BadParameter(f"{file} {reason}", param_hint="--shared-system-prompt")


def _mcp_servers(file: Path | None) -> tuple[McpServer, ...]:
    if file is None:
        return ()
    if importlib.util.find_spec("mcp") is None:
        raise typer.BadParameter("needs pip install 'chatcache[mcp]'.", param_hint="--mcp-config")
    try:
        return read_mcp_servers(file)
    except InvalidRequestError as error:
        raise typer.BadParameter(error.message, param_hint="--mcp-config") from None


# Flags whose field has another name.
_FIELDS = {
    "kv_memory": "kv_memory_bytes",
    "swap_space": "swap_space_bytes",
    "no_prefix_caching": "enable_prefix_caching",
    "api_key": "api_keys",
    "max_prefill_time": "max_prefill_time_s",
    "sse_keep_alive_interval": "sse_keep_alive_interval_s",
    "disconnect_grace_period": "disconnect_grace_period_s",
    "drain_timeout": "drain_timeout_s",
    "allowed_host": "allowed_hosts",
    "cors_origin": "cors_origins",
    "shared_system_prompt": "shared_system_prompts",
    "mcp_config": "mcp_servers",
}
# Conversions of flags' values to those of their fields.
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "host": _address,
    "no_prefix_caching": not_,
    "api_key": _api_keys,
    "allowed_host": _allowed_hosts,
    "cors_origin": _cors_origins,
    "root_path": _root_path,
    "shared_system_prompt": _shared_system_prompts,
    "mcp_config": _mcp_servers,
}
