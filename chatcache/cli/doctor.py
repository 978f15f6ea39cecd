"""`chatcache doctor`: check a machine and its settings, or a running server.

`check_machine` checks what the engine needs (processor, GPU, memory), `check_settings` what `chatcache serve` would use
(model, store, keys, address, chat page), and `check_running_server` whether streams and WebSockets reach a server
through the proxies in front of it. Each check yields findings: a state, a fact and, unless the state is ok, a remedy.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import itertools
import os
import platform
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from chatcache.cli import options
from chatcache.cli.db import redis_remedy
from chatcache.cli.options import env
from chatcache.cli.port_check import explain_bind_error, listen
from chatcache.config import EngineConfig, ServerConfig, format_size
from chatcache.conversations.store import StoreUnavailableError, StoreUnusableError
from chatcache.errors import ModelFolderError
from chatcache.factory import check_model_folder, check_weight_files, has_tokenizer, served_name
from chatcache.storage.redis_client import RedisPermissions
from chatcache.storage.sqlite_schema import MIGRATIONS

if TYPE_CHECKING:
    from chatcache.cluster.bus import WorkerStatus

SERVER = ServerConfig()
MIN_MEMORY_BYTES = 2 * 2**30
MIN_DISK_BYTES = 2**30
PACKAGES = ("torch", "numba", "transformers", "starlette", "uvicorn", "triton")
TIMEOUT_S = 30.0
NUM_TOKENS = 48
MIN_SPREAD = 0.1  # of the stream's duration: chunks that arrive within less were buffered by a proxy


class State(StrEnum):
    """Result of a check; `FAIL` sets the exit code."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: the fact that was found, and a remedy unless the state is ok."""

    subject: str
    state: State
    fact: str
    remedy: str = ""


def ok(subject: str, fact: str) -> Finding:
    return Finding(subject, State.OK, fact)


def warn(subject: str, fact: str, remedy: str) -> Finding:
    return Finding(subject, State.WARN, fact, remedy)


def fail(subject: str, fact: str, remedy: str) -> Finding:
    return Finding(subject, State.FAIL, fact, remedy)


Url = Annotated[
    str | None,
    typer.Option(envvar=env("url"), show_envvar=False, help="Check this running server instead of this machine."),
]
Key = Annotated[
    str | None,
    typer.Option("--api-key", envvar=env("api-key"), show_envvar=False, help="API key of that server."),
]
_MARKS = {State.OK: "[green]ok  [/]", State.WARN: "[yellow]warn[/]", State.FAIL: "[red]fail[/]"}


def doctor(
    context: typer.Context,
    model: options.Model = "",
    url: Url = None,
    api_key: Key = None,
    host: options.Host = SERVER.host,
    port: options.Port = SERVER.port,
    db: options.Db = SERVER.db,
    redis: options.RedisUrl = SERVER.redis,
    bus: options.Bus = "",
) -> None:
    """Check this machine and these settings, or a running server (--url), and suggest remedies.

    Exit code 1 if a check fails.
    """
    options.refuse_two_stores(context)
    console = Console(highlight=False, soft_wrap=True)
    if url is not None:
        findings = check_running_server(url, api_key)
    else:
        config = ServerConfig(host=host, port=port, db=db, redis=redis, api_keys=(api_key,) if api_key else ())
        checks = (check_machine(), check_settings(EngineConfig(model=model), config), check_bus(bus) if bus else ())
        findings = itertools.chain(*checks)
    has_failed = False
    for finding in findings:
        console.print(f"{_MARKS[finding.state]} [bold]{finding.subject}[/]  {escape(finding.fact)}")
        if finding.remedy:
            console.print(f"     [dim]{escape(finding.remedy)}[/]")
        has_failed |= finding.state is State.FAIL
    raise typer.Exit(options.EXIT_ERROR if has_failed else options.EXIT_OK)


# -- this machine -------------------------------------------------------------------------------------------------


def check_machine() -> Iterator[Finding]:
    """Check Python, packages, processor, GPU, memory and the folder of compiled kernels."""
    yield ok("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield ok("Packages", ", ".join(_package_versions()))
    yield _processor()
    yield from _gpu()
    yield _memory()
    yield _compiled_kernels()


def _package_versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _processor() -> Finding:
    import torch
    from chatcache_kernels.cpu.bf16 import has_amx, has_avx512_bf16

    from chatcache.model.linear import choose_dtype

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = f"{threads} CPU{'s' if threads > 1 else ''}"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    units = [name for name, has in (("AMX", has_amx()), ("AVX512-BF16", has_avx512_bf16())) if has]
    dtype = str(choose_dtype(EngineConfig(), torch.device("cpu"))).removeprefix("torch.")
    kind = f"{cores}, {' and '.join(units) or 'no bfloat16 instructions'}; models run in {dtype}"
    if load > threads:
        return warn(
            "Processor",
            f"{kind}; load {load:.1f}",
            "other programs use the CPUs; the engine's threads synchronise often and lose more than their share",
        )
    return ok("Processor", kind)


def _gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            yield fail(
                "GPU",
                f"the driver is installed, but torch {torch.__version__} finds no GPU",
                "install the CUDA build of torch, or check the output of nvidia-smi",
            )
        else:
            yield ok("GPU", "none; the CPU is used")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        chip = f"{properties.name}, sm_{properties.major}{properties.minor}"
        yield ok("GPU", f"{chip}, {format_size(free_bytes)} of {format_size(total_bytes)} free")
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        yield fail("Triton", "no C compiler", "Triton needs one to build its launcher: apt-get install gcc libc6-dev")


def _memory() -> Finding:
    from chatcache.model.loading.memory_budget import free_host_bytes

    free_bytes = free_host_bytes()
    if free_bytes < MIN_MEMORY_BYTES:
        return warn("Memory", f"{format_size(free_bytes)} free", "weights and KV pages may not fit: set --kv-memory")
    return ok("Memory", f"{format_size(free_bytes)} free")


def _compiled_kernels() -> Finding:
    from chatcache_kernels.cpu.launch import cache_folder

    folder = cache_folder()
    if folder is None:
        return warn(
            "Compiled kernels",
            "no writable cache folder: kernels are compiled at every start",
            "set NUMBA_CACHE_DIR to a writable folder",
        )
    return ok("Compiled kernels", f"cached in {folder.parent}")


def check_disk_space(folder: Path, needed_bytes: int = 0) -> Finding:
    """Check the free space on a folder's disk, for a file of `needed_bytes`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        size = format_size(needed_bytes)
        return warn("Disk", f"{format_size(free_bytes)} free in {folder}, but a copy takes {size}", "free some space")
    if free_bytes < MIN_DISK_BYTES:
        return warn(
            "Disk",
            f"{format_size(free_bytes)} free in {folder}",
            "free some space: turns cannot be stored on a full disk",
        )
    return ok("Disk", f"{format_size(free_bytes)} free in {folder}")


# -- a running server ---------------------------------------------------------------------------------------------


def check_running_server(url: str, api_key: str | None) -> Iterator[Finding]:
    """Check that a server is ready, accepts the key, and streams reach it through proxies.

    WebSockets are checked, too. The first failure ends the checks that depend on it.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        client = httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S)
    except (httpx.InvalidURL, UnicodeError) as error:
        yield fail("Server", f"{base}: {error}", "check the address and the key")
        return
    with client:
        try:
            ready = client.get("/readyz")
            body = ready.json()
        except (httpx.HTTPError, ValueError, OverflowError) as error:  # the last: of a port beyond 65535
            yield fail(
                "Server",
                f"{base}: {error or type(error).__name__}",
                "check the address, and that the server is running",
            )
            return
        if ready.status_code != 200:
            yield fail(
                "Server",
                f"{base}: {body.get('detail') or body}",
                "wait until the model is loaded, or read the server's log",
            )
            return
        yield ok("Server", f"{base} serves {body.get('model')}")
        if (models := client.get("/v1/models")).status_code != 200:
            yield fail("API key", _message(models), "give a valid key with --api-key KEY")
            return
        yield _check_stream(client)
    yield _check_websocket(base, api_key)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"


def _check_stream(client: httpx.Client) -> Finding:
    """Request a streamed answer and check that its chunks arrive while it is generated."""
    subject = "Streams"
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
                return fail(subject, _message(answer), "read the server's log")
            arrived.extend(time.perf_counter() - start for _ in answer.iter_raw())
    except httpx.HTTPError as error:
        return fail(
            subject, f"the stream was interrupted: {error}", "a proxy may end long responses: raise its read timeout"
        )
    if len(arrived) < 2 or arrived[-1] - arrived[0] < MIN_SPREAD * arrived[-1]:
        return warn(
            subject,
            f"{NUM_TOKENS} tokens arrived in {len(arrived)} chunks, all at the end",
            "a proxy buffers streams: turn its buffering off (nginx: proxy_buffering off)",
        )
    return ok(
        subject, f"the first of {len(arrived)} chunks after {arrived[0]:.2f} s, the last after {arrived[-1]:.2f} s"
    )


def _check_websocket(base: str, api_key: str | None) -> Finding:
    subject = "WebSocket"
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
        return fail(
            subject,
            f"refused: status {error.response.status_code}",
            "a proxy must forward the Upgrade and Connection headers",
        )
    except (OSError, WebSocketException, ValueError, TimeoutError) as error:
        return fail(subject, f"{type(error).__name__}: {error}", "a proxy may not support WebSockets")
    if not isinstance(first, dict) or first.get("type") != "session.created":
        return fail(subject, "the server is not chatcache", "check the address")
    return ok(subject, "opens and receives session.created")


# -- the store ----------------------------------------------------------------------------------------------------

_DURABILITY = {
    "always": "synced at every write: a power failure loses nothing",
    "everysec": "a power failure loses the last second",
}


def check_redis_user(permissions: RedisPermissions) -> Iterator[Finding]:
    """Check durability and eviction settings of a Redis server, and its user's permissions."""
    yield _check_redis_durability(permissions)
    policy = permissions.settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        yield fail(
            "Redis", f"maxmemory-policy {policy}: conversations are evicted when it is full", "set it to noeviction"
        )
    if not permissions.can_publish:
        yield fail(
            "Redis channels",
            "this user may not use them: gateways on this server do not find each other's responses",
            "ACL SETUSER ... &chatcache:* +publish +subscribe, or the user of `chatcache redis-acl FOLDER`",
        )
    unneeded = {
        "administer the server": permissions.can_read_settings,
        "run scripts": permissions.can_script,
        "read other programs' keys": permissions.can_read_all_keys,
    }
    granted = [action for action, is_granted in unneeded.items() if is_granted]
    if granted:
        remedy = "create a restricted user with `chatcache redis-acl FOLDER`"
        yield warn("Redis user", f"may {', '.join(granted)}, which chatcache does not need", remedy)
    else:
        yield ok("Redis user", "restricted to chatcache's keys, without scripts and administration")


def _check_redis_durability(permissions: RedisPermissions) -> Finding:
    if permissions.has_aof is None:
        return ok(
            "Redis",
            "this user may not read the settings; make sure they are: appendonly yes, maxmemory-policy noeviction",
        )
    if not permissions.has_aof:
        return warn("Redis", "no append-only file: a crash loses all changes since the last snapshot", "appendonly yes")
    sync = permissions.settings.get("appendfsync", "")
    return ok("Redis", f"has an append-only file{f', {_DURABILITY[sync]}' if sync in _DURABILITY else ''}")


def check_bus(url: str) -> Iterator[Finding]:
    """Check the login and the user of the Redis server of --bus, and the workers that it has.

    The stream that is written for it is deleted.
    """
    from chatcache.cluster import bus
    from chatcache.storage.redis_client import RefusedCommand, probe_server, run_commands

    subject, stream = "Bus", f"{bus.PREFIX}doctor:{secrets.token_hex(8)}"
    try:
        probe_server(url, stream)
        *answers, workers = run_commands(
            url,
            [
                ("XADD", stream, "*", "field", "value"),
                ("PEXPIRE", stream, 1000),
                ("XREAD", "STREAMS", stream, 0),
                ("UNLINK", stream),
                ("SMEMBERS", bus.WORKERS),
            ],
        )
        refused = next((each.reason for each in (*answers, workers) if isinstance(each, RefusedCommand)), None)
        if refused is not None:
            yield fail(subject, f"the user may not use it: {refused}", "use the user of `chatcache redis-acl FOLDER`")
            return
        names = bus.decode_ids(workers)
        (leases,) = run_commands(url, [("MGET", *map(bus.worker_key, names))]) if names else ([],)
    except StoreUnusableError as error:
        yield fail(subject, error.message, "use the user of `chatcache redis-acl FOLDER`")
        return
    except StoreUnavailableError as error:
        yield fail(subject, f"not reachable: {error.message}", redis_remedy(error) or "start the Redis server of --bus")
        return
    yield ok(subject, "this user may read and write it")
    statuses = (bus.decode_status(name, lease) for name, lease in zip(names, leases, strict=True))
    yield _check_workers([status for status in statuses if status is not None])


def _check_workers(found: Sequence[WorkerStatus]) -> Finding:
    subject, names = "Workers", [each.name for each in found]
    if not found:
        return warn(subject, "none on the bus", "start one: chatcache worker MODEL --bus URL, with the same model")
    fact = f"{len(found)} on the bus: {', '.join(sorted(names))}"
    if len(set(names)) < len(names):
        return warn(subject, f"{fact}; a name is repeated", "give each worker another --worker-name")
    return ok(subject, fact)


def check_keys(config: ServerConfig, num_keys: int, num_revoked: int = 0) -> Finding:
    """Check that clients need a key if other machines can connect.

    Clients need a key as soon as one has been created, even if it is revoked.
    """
    subject = "Keys"
    if num_keys or config.api_keys:
        revoked = f", {num_revoked} of them revoked" if num_revoked else ""
        return ok(
            subject, f"{num_keys} in the store{revoked}, {len(config.api_keys)} by --api-key: every client needs a key"
        )
    if _is_loopback(config.host):
        return ok(subject, f"none: open to every client on this machine, at {config.host}")
    remedy = "create a key with `chatcache keys create --tenant NAME`, or give one with --api-key"
    return warn(subject, f"none: open to every client that can reach {config.host}", remedy)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -- settings -----------------------------------------------------------------------------------------------------


def check_settings(engine: EngineConfig, server: ServerConfig) -> Iterator[Finding]:
    """Check the model, store, keys, address and chat page that `chatcache serve` would use.

    Nothing is changed.
    """
    from chatcache.gateway.static import STATIC  # imports Starlette, which `chatcache --help` does not need

    yield _check_model(engine)
    yield from _check_redis(server) if server.redis else _check_database_file(server)
    yield _check_address(server)
    if (STATIC / "index.html").is_file():
        yield ok("Chat page", "built")
    else:
        yield warn("Chat page", "not built; the API works without it", "build it with `make web`")


def _check_model(config: EngineConfig) -> Finding:
    name = served_name(config)
    if _is_hub_id(config.model):
        return _check_download(config.model)
    try:
        check_model_folder(config)
        if not has_tokenizer(config):
            return fail("Model", f"{name}: no tokenizer", "add the model's tokenizer.json")
        check_weight_files(config)
    except ModelFolderError as error:
        return fail(
            "Model", error.message, "MODEL is a folder with config.json and *.safetensors, or a Hugging Face id"
        )
    return ok("Model", name)


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and model[0] not in "./~" and not Path(model).exists()


def _check_download(model: str) -> Finding:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return ok("Model", f"{model}: downloaded, {snapshot_download(model, local_files_only=True)}")
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            return fail(
                "Model", f"{model} is not on this machine, and HF_HUB_OFFLINE is set", "download it while online"
            )
        return warn(
            "Model", f"{model} is not on this machine yet", "the first start downloads it from the Hugging Face hub"
        )
    except HFValidationError as error:
        return fail("Model", f"{model}: {error}", "a Hugging Face id has the form NAMESPACE/NAME")


def _check_redis(config: ServerConfig) -> Iterator[Finding]:
    """Check a Redis server, its user and the stored keys."""
    from chatcache.storage.redis import check_server
    from chatcache.storage.redis_client import probe_permissions

    subject = "Conversations"
    try:
        check_server(config.redis)
        permissions = probe_permissions(config.redis)
    except StoreUnusableError as error:
        yield fail(
            subject, error.message, "section Storage of chatcache/gateway/docs/deployment.md shows the required user"
        )
    except StoreUnavailableError as error:
        remedy = redis_remedy(error) or "start the Redis server; chatcache serve waits for it"
        yield warn(subject, f"not reachable: {error.message}", remedy)
    else:
        yield ok(subject, "in the Redis server of --redis")
        yield from check_redis_user(permissions)
        yield check_keys(config, permissions.num_keys)


def _check_database_file(config: ServerConfig) -> Iterator[Finding]:
    """Check the SQLite file, the stored keys and the free disk space."""
    subject, path = "Conversations", Path(config.db)
    folder = path.absolute().parent
    if not folder.is_dir():
        yield fail(subject, f"no such folder: {folder}", "create it, or choose another file with --db")
        return
    if not path.exists():
        yield ok(subject, f"{path} will be created")
        yield check_keys(config, 0)
    else:
        yield _check_database(subject, path)
        yield check_keys(config, *_count_keys(path))
    # A schema upgrade copies the file first, and a backup is a copy, too.
    yield check_disk_space(folder, path.stat().st_size if path.exists() else 0)


def _count_keys(path: Path) -> tuple[int, int]:
    """Return the number of keys and of revoked keys in a file; zeros if it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            num_keys, num_revoked = db.execute("SELECT count(*), count(revoked_at) FROM keys").fetchone()
            return num_keys, num_revoked
    except sqlite3.Error:  # reported by `_check_database`, or the schema is older than keys
        return 0, 0


def _check_database(subject: str, path: Path) -> Finding:
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            version: int = db.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                return fail(
                    subject,
                    f"{path} was written by a newer chatcache (schema {version})",
                    "use that version, or another --db",
                )
            problem: str = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                return fail(subject, f"{path} is damaged: {problem}", "restore a backup, or start with another --db")
            (num,) = db.execute("SELECT count(*) FROM conversations").fetchone() if version else (0,)
    except sqlite3.Error as error:
        return fail(subject, f"{path}: {error}", "choose a file of chatcache with --db")
    return ok(subject, f"{num} in {path}")


def _check_address(config: ServerConfig) -> Finding:
    where = f"{config.host}:{config.port}"
    try:
        listen(config.host, config.port).close()
    except OSError as error:
        failure = explain_bind_error(config.host, config.port, error)
        report = warn if failure.is_chatcache else fail
        return report("Address", f"{where}: {failure.reason}", failure.remedy)
    return ok("Address", f"{where} is free" if config.port else f"{config.host}, any free port")
