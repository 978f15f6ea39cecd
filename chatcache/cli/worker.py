"""`chatcache worker`: run an engine for the gateways on a bus.

The first SIGINT or SIGTERM drains the worker: gateways send it no further requests, running ones have `--drain-timeout`
seconds to finish, and the others are resumed by other workers. A second signal ends the process at once. Exit codes: 0
after a drain, 1 if the engine failed for good, 78 for a bad model folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from chatcache import __version__, logs
from chatcache.cli import options
from chatcache.cli.serve import ENGINE, SERVER, convert_flags
from chatcache.config import EngineConfig, ServerConfig
from chatcache.errors import ModelFolderError
from chatcache.factory import BUILD_ENGINE, check_model_folder, served_name

if TYPE_CHECKING:
    from chatcache.cluster.worker_host import WorkerHost

log = logging.getLogger(__name__)

_POLL_S = 0.05


def worker(
    bus: options.Bus,
    model: options.Model = ENGINE.model,
    worker_name: options.WorkerName = None,
    ready_file: options.ReadyFile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    attention_backend: options.AttentionBackend = "auto",
    quantization: options.Quantization = "none",
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
    drain_timeout: options.DrainTimeout = SERVER.drain_timeout_s,
    log_level: options.LogLevel = "info",
    log_format: options.LogFormat = "text",
) -> None:
    """Run an engine for the `chatcache gateway` processes on a bus. Experimental."""
    engine, server = convert_flags(
        {name: each for name, each in locals().items() if name not in ("bus", "worker_name", "ready_file")}
    )
    check_model_folder(engine)
    _remove_ready_file(ready_file)
    engine = msgspec.structs.replace(engine, served_model_name=served_name(engine))
    raise typer.Exit(run_worker(engine, server, bus, worker_name or socket.gethostname(), ready_file=ready_file))


def run_worker(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    url: str,
    name: str,
    build_engine: str = BUILD_ENGINE,
    ready_file: Path | None = None,
) -> int:
    """Run a worker until a signal or a failure, and return the exit code."""
    logs.configure_logging(server_config.log_level, server_config.log_format, "worker")
    return asyncio.run(_run(engine_config, server_config, url, name, build_engine, ready_file))


async def _run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    url: str,
    name: str,
    build_engine: str,
    ready_file: Path | None,
) -> int:
    from chatcache.cluster.worker_host import WorkerHost, numerics_of
    from chatcache.engine_process.process import EngineProcess

    stopping = asyncio.Event()

    def handle() -> None:
        if stopping.is_set():
            engine.kill()
            os._exit(options.EXIT_KILLED)
        stopping.set()

    async with EngineProcess(
        engine_config, build_engine, log_level=server_config.log_level, log_format=server_config.log_format
    ) as engine:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, handle)
        print(f"Loading {engine_config.served_model_name} for the gateways on the bus", file=sys.stderr, flush=True)
        failed = asyncio.create_task(engine.wait_failed())
        stopped = asyncio.create_task(stopping.wait())
        loaded = asyncio.create_task(engine.wait_loaded())
        await asyncio.wait((failed, stopped, loaded), return_when=asyncio.FIRST_COMPLETED)
        hosting: asyncio.Task[None] | None = None
        connected: asyncio.Task[bool] | None = None
        if not failed.done() and not stopped.done():
            host = WorkerHost(engine, url, name, numerics_of(engine, engine_config.deterministic, __version__))
            hosting = asyncio.create_task(host.run())
            connected = asyncio.create_task(host.is_connected.wait())
            await asyncio.wait((failed, stopped, hosting, connected), return_when=asyncio.FIRST_COMPLETED)
            if connected.done():
                print(f"Worker {name} is ready: {host.id}", file=sys.stderr, flush=True)
                with _ready(ready_file):
                    await asyncio.wait((failed, stopped, hosting), return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not hosting.done():
                await _drain(host, server_config.drain_timeout_s)
        status = options.EXIT_OK
        if failed.done():
            error = failed.result()
            print(f"chatcache: {error.message}", file=sys.stderr)
            status = options.EXIT_CONFIG if isinstance(error, ModelFolderError) else options.EXIT_ERROR
        elif hosting is not None and hosting.done() and not stopped.done():
            log.critical("the connection to the bus failed", exc_info=hosting.exception())
            status = options.EXIT_ERROR
        tasks = [task for task in (failed, stopped, loaded, hosting, connected) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return status


def _remove_ready_file(file: Path | None) -> None:
    """Remove the file of a worker that was killed. Raises: BadParameter if it could not be written later."""
    if file is None:
        return
    try:
        file.unlink(missing_ok=True)
        if not os.path.isdir(file.absolute().parent):
            raise FileNotFoundError(errno.ENOENT, "there is no such folder")
        if not os.access(file.absolute().parent, os.W_OK):
            raise PermissionError(errno.EACCES, "the folder may not be written")
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}.", param_hint="--ready-file") from None


@contextlib.contextmanager
def _ready(file: Path | None) -> Iterator[None]:
    """Let the file exist in the block."""
    if file is None:
        yield
        return
    file.touch()
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


async def _drain(host: WorkerHost, timeout_s: float) -> None:
    """Refuse new requests, and wait for the running ones."""
    host.is_draining = True
    print(f"Draining: {host.num_requests} requests have {timeout_s:g} s to finish", file=sys.stderr, flush=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while host.num_requests:  # noqa: ASYNC110 - there is no single event to wait for
                await asyncio.sleep(_POLL_S)
