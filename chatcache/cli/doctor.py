"""`chatcache doctor`: every check, a line each.

What a check found.

Python, processor, GPU, memory, folders: what the engine stands on.

A running server, asked the way a browser and a client ask it: what is between must let streams and sockets by.

The store as an operator sees it: what a Redis server keeps, what its user may, and who is let in.

What `chatcache serve` would meet with these settings: model, conversations, address, page.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import os
import platform
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from chatcache.cli import exits, options
from chatcache.cli.options import env
from chatcache.cli.port_check import explain_bind_error
from chatcache.cli.server import listen
from chatcache.config import EngineConfig, ServerConfig, format_size
from chatcache.conversations.store import StoreUnavailableError, StoreUnusableError
from chatcache.errors import ModelFolderError
from chatcache.factory import check_model_folder, check_weight_files, has_tokenizer, served_name
from chatcache.gateway.static import STATIC
from chatcache.storage.redis_client import RedisPermissions
from chatcache.storage.sqlite_schema import MIGRATIONS


class State(StrEnum):
    GOOD = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """`found` is a fact; `remedy` is what to do, for all that is not good."""

    what: str
    state: State
    found: str
    remedy: str = ""


def good(what: str, found: str) -> Finding:
    return Finding(what, State.GOOD, found)


def warning(what: str, found: str, remedy: str) -> Finding:
    return Finding(what, State.WARNING, found, remedy)


def bad(what: str, found: str, remedy: str) -> Finding:
    return Finding(what, State.BAD, found, remedy)


SERVER = ServerConfig()
Url = Annotated[
    str | None,
    typer.Option(envvar=env("url"), show_envvar=False, help="Check this running server instead of this machine."),
]
Key = Annotated[
    str | None,
    typer.Option("--api-key", envvar=env("api-key"), show_envvar=False, help="API key of that server."),
]
_MARKS = {State.GOOD: "[green]ok  [/]", State.WARNING: "[yellow]look[/]", State.BAD: "[red]bad [/]"}


def doctor(
    context: typer.Context,
    model: options.Model = "",
    url: Url = None,
    api_key: Key = None,
    host: options.Host = SERVER.host,
    port: options.Port = SERVER.port,
    db: options.Db = SERVER.db,
    redis: options.RedisUrl = SERVER.redis,
) -> None:
    """Check this machine and these settings, or a running server (--url), and suggest remedies.

    Exit code 1 if a check fails.
    """
    options.refuse_two_stores(context)
    console = Console(highlight=False, soft_wrap=True)
    findings = (
        _server(url, api_key)
        if url is not None
        else _here(
            model, ServerConfig(host=host, port=port, db=db, redis=redis, api_keys=(api_key,) if api_key else ())
        )
    )
    worst = State.GOOD
    for finding in findings:
        console.print(f"{_MARKS[finding.state]} [bold]{finding.what}[/]  {escape(finding.found)}")
        if finding.remedy:
            console.print(f"     [dim]{escape(finding.remedy)}[/]")
        worst = State.BAD if State.BAD in (worst, finding.state) else worst
    raise typer.Exit(exits.ERROR if worst is State.BAD else 0)


def _here(model: str, config: ServerConfig) -> Iterator[Finding]:
    # IMPORT
    # IMPORT

    yield from machine()
    yield from settings(EngineConfig(model=model), config)


def _server(url: str, api_key: str | None) -> Iterator[Finding]:
    # IMPORT

    yield from server(url, api_key)


LEAST_MEMORY_BYTES = 2 * 2**30
LEAST_DISK_BYTES = 2**30
PACKAGES = ("torch", "numba", "transformers", "starlette", "uvicorn", "triton")


def machine() -> Iterator[Finding]:
    yield good("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield good("Packages", ", ".join(_versions()))
    yield _processor()
    yield from _gpu()
    yield _memory()
    yield _compiled_kernels()


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _processor() -> Finding:
    from chatcache_kernels.cpu.bf16 import has_amx, has_avx512_bf16

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = f"{threads} CPU{'s' if threads > 1 else ''}"
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    units = [name for name, has in (("AMX", has_amx()), ("AVX512-BF16", has_avx512_bf16())) if has]
    kind = f"{cores}, {' and '.join(units)}: bfloat16" if units else f"{cores}, no bfloat16 units: float32"
    if busy > threads:
        return warning(
            "Processor",
            f"{kind}; load {busy:.1f}",
            "other programs take the cores, which costs threads that wait for each other more than their share",
        )
    return good("Processor", kind)


def _gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            yield bad(
                "GPU",
                f"a driver is here, but torch {torch.__version__} sees no GPU",
                "install the CUDA build of torch, or look at what nvidia-smi says",
            )
        else:
            yield good("GPU", "none; the CPU computes")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        chip = f"{properties.name}, sm_{properties.major}{properties.minor}"
        yield good("GPU", f"{chip}, {format_size(free_bytes)} of {format_size(total_bytes)} free")
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        yield bad("Triton", "no C compiler", "Triton builds its launcher with one: apt-get install gcc libc6-dev")


def _memory() -> Finding:
    from chatcache.model.loading.memory_budget import free_host_bytes

    free_bytes = free_host_bytes()
    if free_bytes < LEAST_MEMORY_BYTES:
        return warning("Memory", f"{format_size(free_bytes)} free", "weights and KV pages may not fit: --kv-memory")
    return good("Memory", f"{format_size(free_bytes)} free")


def _compiled_kernels() -> Finding:
    from chatcache_kernels.cpu.launch import cache_folder

    folder = cache_folder()
    if folder is None:
        return warning(
            "Compiled kernels",
            "there is no folder to keep them in: every start compiles them anew",
            "set NUMBA_CACHE_DIR to a folder that can be written",
        )
    return good("Compiled kernels", f"kept in {folder.parent}")


def room_on_disk(what: str, folder: Path, needed_bytes: int = 0) -> Finding:
    """Tell how much room a folder's disk has. `needed_bytes`: of the largest file that is to be written there."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        size = format_size(needed_bytes)
        return warning(what, f"{format_size(free_bytes)} free in {folder}, where a copy takes {size}", "make room")
    if free_bytes < LEAST_DISK_BYTES:
        return warning(what, f"{format_size(free_bytes)} free in {folder}", "make room: a full disk refuses new turns")
    return good(what, f"{format_size(free_bytes)} free in {folder}")


TIMEOUT_S = 30.0
HELD_BACK_SHARE = 0.1  # of the time since asking; what comes within less was held back
NUM_TOKENS = 48
PROXY = "between you and the server something"


def server(url: str, api_key: str | None) -> Iterator[Finding]:
    """Ask a server. Ends early where the rest could not be asked."""
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S) as client:
        try:
            ready = client.get("/readyz")
            body = ready.json()
        except (httpx.HTTPError, ValueError) as error:
            yield bad("Server", f"{base}: {error or type(error).__name__}", "is the address right, and the server up?")
            return
        if ready.status_code != 200:
            yield bad(
                "Server", f"{base}: {body.get('detail') or body}", "wait until the model is loaded, or see its log"
            )
            return
        yield good("Server", f"{base} serves {body.get('model')}")
        if (models := client.get("/v1/models")).status_code != 200:
            yield bad("API key", _message(models), "--api-key KEY")
            return
        yield _stream(client)
    yield _socket(base, api_key)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"


def _stream(client: httpx.Client) -> Finding:
    """Ask for an answer as a stream, and look at when its pieces come."""
    what = "Streams"
    request = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": True,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    arrived: list[float] = []
    start = time.perf_counter()
    try:
        with client.stream("POST", "/v1/chat/completions", json=request) as answer:
            if answer.status_code != 200:
                answer.read()
                return bad(what, _message(answer), "see the server's log")
            arrived.extend(time.perf_counter() - start for _ in answer.iter_raw())
    except httpx.HTTPError as error:
        return bad(what, f"the stream broke off: {error}", f"{PROXY} ends long answers: raise its read timeout")
    if len(arrived) < 2 or arrived[-1] - arrived[0] < HELD_BACK_SHARE * arrived[-1]:
        return warning(
            what,
            f"{NUM_TOKENS} tokens came in {len(arrived)} pieces, all at the end",
            f"{PROXY} holds streams back: nginx wants proxy_buffering off, others the like",
        )
    return good(
        what, f"the first of {len(arrived)} pieces after {arrived[0]:.2f} s, the last after {arrived[-1]:.2f} s"
    )


def _socket(base: str, api_key: str | None) -> Finding:
    what = "WebSocket"
    parts = urlsplit(base)
    secure = "wss" if parts.scheme == "https" else "ws"
    address = urlunsplit((secure, parts.netloc, f"{parts.path}/v1/responses", "", ""))
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with connect(
            address,
            subprotocols=[Subprotocol("chatcache.v1")],
            additional_headers=headers,
            open_timeout=TIMEOUT_S,
            proxy=None,
        ) as socket:
            first = msgspec.json.decode(socket.recv(timeout=TIMEOUT_S))
    except InvalidStatus as error:
        return bad(
            what, f"refused: status {error.response.status_code}", f"{PROXY} must pass Upgrade and Connection on"
        )
    except (OSError, WebSocketException, ValueError, TimeoutError) as error:
        return bad(what, f"{type(error).__name__}: {error}", f"{PROXY} does not let sockets by")
    if not isinstance(first, dict) or first.get("type") != "session.created":
        return bad(what, "another kind of server answers there", "is the address right?")
    return good(what, "opens, and the server greets")


WHAT = "Redis"
_KEPT = {"always": "synced at every write: survives a power cut", "everysec": "a power cut takes the last second"}


def redis_findings(rights: RedisPermissions) -> Iterator[Finding]:
    yield _kept(rights)
    policy = rights.settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        yield bad(WHAT, f"maxmemory-policy {policy}: it forgets conversations when it is full", "set it to noeviction")
    rest = {
        "administer it": rights.can_read_settings,
        "run scripts": rights.can_script,
        "see others' keys": rights.can_read_all_keys,
    }
    too_much = [what for what, may in rest.items() if may]
    if too_much:
        remedy = "`chatcache redis-acl FOLDER` makes a user for chatcache alone"
        yield warning("Redis user", f"may {', '.join(too_much)}, which nothing here needs", remedy)
    else:
        yield good("Redis user", "for chatcache's keys alone, without scripts or administration")


def _kept(rights: RedisPermissions) -> Finding:
    if rights.has_aof is None:
        return good(
            WHAT,
            "this user cannot see the settings; see to it that it has: appendonly yes, maxmemory-policy noeviction",
        )
    if not rights.has_aof:
        return warning(WHAT, "no append-only file: its death takes what came since its last snapshot", "appendonly yes")
    sync = rights.settings.get("appendfsync", "")
    return good(WHAT, f"has an append-only file{f', {_KEPT[sync]}' if sync in _KEPT else ''}")


def keys_finding(config: ServerConfig, num_keys: int, num_revoked: int = 0) -> Finding:
    """Who is let in with these settings. One key, even a revoked one, closes a server."""
    what = "Keys"
    if num_keys or config.api_keys:
        revoked = f", {num_revoked} of them revoked" if num_revoked else ""
        return good(what, f"{num_keys} in the store{revoked}, {len(config.api_keys)} by --api-key: nobody else gets in")
    if _is_loopback(config.host):
        return good(what, f"none: whoever is on this machine gets in at {config.host}")
    remedy = "chatcache keys create --tenant NAME, or --api-key, before others can reach it"
    return warning(what, f"none: whoever reaches {config.host} gets in", remedy)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def settings(engine: EngineConfig, server: ServerConfig) -> Iterator[Finding]:
    yield _model(engine)
    yield from _redis(server) if server.redis else _conversations(server)
    yield _address(server)
    if (STATIC / "index.html").is_file():
        yield good("Chat page", "built")
    else:
        yield warning("Chat page", "not built; the API works without it", "make web")


def _model(config: EngineConfig) -> Finding:
    name = served_name(config)
    if _is_id(config.model):
        return _fetched(config.model)
    try:
        check_model_folder(config)
        if not has_tokenizer(config):
            return bad("Model", f"{name}: no tokenizer", "add tokenizer.json from where the weights came from")
        check_weight_files(config)
    except ModelFolderError as error:
        return bad("Model", error.message, "MODEL is a folder with config.json and *.safetensors, or an id")
    return good("Model", name)


def _is_id(model: str) -> bool:
    return model.count("/") == 1 and model[0] not in "./~" and not Path(model).exists()


def _fetched(model: str) -> Finding:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return good("Model", f"{model}: fetched already, {snapshot_download(model, local_files_only=True)}")
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            return bad("Model", f"{model} is not on this machine, and HF_HUB_OFFLINE is set", "fetch it while online")
        return warning("Model", f"{model} is not on this machine yet", "the first start fetches it from the hub")
    except HFValidationError as error:
        return bad("Model", f"{model}: {error}", "an id is NAMESPACE/NAME")


def _redis(config: ServerConfig) -> Iterator[Finding]:
    """Look at a Redis server without changing it."""
    from chatcache.storage.redis import check_server
    from chatcache.storage.redis_client import probe_permissions
    # IMPORT

    what = "Conversations"
    try:
        check_server(config.redis)
        rights = probe_permissions(config.redis)
    except StoreUnusableError as error:
        yield bad(what, error.message, "chatcache/gateway/docs/deployment.md, Storage, shows the user that it needs")
    except StoreUnavailableError as error:
        yield warning(what, f"no Redis server yet: {error.message}", "chatcache serve waits for it")
    else:
        yield good(what, "in the Redis server of --redis")
        yield from redis_findings(rights)
        yield keys_finding(config, rights.num_keys)


def _conversations(config: ServerConfig) -> Iterator[Finding]:
    """Look at the database without changing it."""
    what, path = "Conversations", Path(config.db)
    folder = path.absolute().parent
    if not folder.is_dir():
        yield bad(what, f"there is no folder {folder}", "make it, or name another file with --db")
        return
    if not path.exists():
        yield good(what, f"{path} will be made")
        yield keys_finding(config, 0)
    else:
        yield _database(what, path)
        yield keys_finding(config, *_num_keys(path))
    # A newer version copies the file before it changes it, and so does a backup.
    yield room_on_disk("Disk", folder, path.stat().st_size if path.exists() else 0)


def _num_keys(path: Path) -> tuple[int, int]:
    """How many keys the file has, and how many of them are revoked; none where it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            num_keys, num_revoked = db.execute("SELECT count(*), count(revoked_at) FROM keys").fetchone()
            return num_keys, num_revoked
    except sqlite3.Error:  # which `_database` tells, or the file is of before there were keys
        return 0, 0


def _database(what: str, path: Path) -> Finding:
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            version: int = db.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                return bad(
                    what, f"{path} is of a newer chatcache (schema {version})", "use that version, or another --db"
                )
            complaint: str = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if complaint != "ok":
                return bad(what, f"{path} is damaged: {complaint}", "restore a backup, or start with another --db")
            (num,) = db.execute("SELECT count(*) FROM conversations").fetchone() if version else (0,)
    except sqlite3.Error as error:
        return bad(what, f"{path}: {error}", "name a file of chatcache's own with --db")
    return good(what, f"{num} in {path}")


def _address(config: ServerConfig) -> Finding:
    where = f"{config.host}:{config.port}"
    try:
        listen(config.host, config.port).close()
    except OSError as error:
        found = explain_bind_error(config.host, config.port, error)
        return (warning if found.is_ours else bad)("Address", f"{where}: {found.why}", found.remedy)
    return good("Address", f"{where} is free" if config.port else f"{config.host}, any free port")
