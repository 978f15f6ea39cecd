"""Load a model folder into a `Runner`, or report which file is wrong and why.

The loader also selects the linear layers, the sampler and the number of threads for the device. On a CPU, every
operation waits for the slowest of its threads, and that thread may not be running: a container may allow fewer CPUs
than it shows, and on a small machine the gateway and the browser need a core, too. A model that reads few bytes per
token gains little from a second thread (demo model, 2 cores: 484 against 444 tokens/s) and becomes ten times slower
when the cores are busy, so it gets one thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from chatcache.config import EngineConfig, format_size
from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionBackend, Network, allocate_stores, check_kv_cache_dtype, choose_backend
from chatcache.model.batch_invariant import (
    BatchInvariantLinearFactory,
    TokenByToken,
    TritonLinearFactory,
    check_determinism,
)
from chatcache.model.decoder import Decoder, check_layer_count, load_decoder
from chatcache.model.geometry import Geometry
from chatcache.model.host_memory import PagePrefaulter, reuse_freed_memory, reuse_large_blocks
from chatcache.model.linear import (
    Fp8LinearFactory,
    Int8LinearFactory,
    LinearFactory,
    PanelLinearFactory,
    check_quantization,
    choose_dtype,
    choose_quantization,
    fast_linear,
    fp8_problem,
    measure_compact_tokens,
    weight_sizes,
)
from chatcache.model.loading.config_reader import FAMILIES, Architecture, is_native, read_architecture
from chatcache.model.loading.files import (
    as_model_folder_error,
    eos_token_ids,
    model_name,
    read_config,
    read_pooling,
    resolve_model_path,
)
from chatcache.model.loading.fp8_weights import Fp8Weights, read_fp8_format
from chatcache.model.loading.int_weights import open_weights
from chatcache.model.loading.memory_budget import (
    Budget,
    CudaMemoryGauge,
    free_host_bytes,
    host_kv_bytes,
    measure_budget,
    total_memory_bytes,
)
from chatcache.model.loading.weights import WeightSource, as_causal_lm
from chatcache.model.parallel import (
    MAX_RANKS,
    NoSampler,
    RankGroup,
    RankProcesses,
    RankWeights,
    Shard,
    check_tensor_parallel,
    decode_plan,
    end_with_rank_0,
    read_frame,
    read_start,
    send_ready,
)
from chatcache.model.runner import AsyncLaunch, Runner, default_async_launch
from chatcache.model.sampling.sampler import Sampler, TokenSampler
from chatcache.model.states import make_states
from chatcache.model.thread_count import ThreadCount
from chatcache.model.transformers.towers import open_text_tower
from chatcache.torch_environment import is_spinning_limited
from chatcache.types.plan import KVCapacity
from chatcache.types.stats import ModelInfo

if TYPE_CHECKING:
    from chatcache.model.transformers.network import TransformersNetwork

log = logging.getLogger(__name__)

DUAL_LAYOUT_MAX_BYTES = 2 * 2**30  # of weights with two layouts; in larger models call overhead is small
DUAL_LAYOUT_MAX_SHARE = 1 / 3  # of free memory for weights with two layouts; the rest is for KV pages and activations
COMPACT_MAX_SHARE = 1 / 4  # of free memory for weights that have a compact copy, too
COMPACT_MIN_BYTES = 32 * 2**20  # of weights that have a compact copy: smaller models stay in caches

SINGLE_THREAD_BYTES = 32 * 2**20
Progress = Callable[[float, str], None]
POOLINGS = ("auto", "last", "mean")
SWAP_MAX_BYTES = 1024**3
STATE_SHARE = 0.5  # of the memory for KV pages: the most that states of recurrent layers take
SNAPSHOTS_PER_SEQ = 3
MIN_STATES = 3  # the zero state, a live state and a snapshot


def load_model(
    config: EngineConfig,
    progress: Progress | None = None,
    weights: WeightSource | None = None,
    async_launch: AsyncLaunch | None = None,
) -> Runner:
    """Load `config.model` and return a warmed-up runner.

    `progress(fraction, what)` is called with fractions from 0 to 1; `weights` replace those of the folder (native
    models only); `async_launch` replaces the default settings of the device.
    Raises: ModelFolderError naming the file and the reason, also for unexpected errors.
    """
    report = progress or (lambda fraction, what: None)
    report(0.0, "reading the model folder")
    folder = resolve_model_path(config.model)
    with as_model_folder_error(folder):
        if config.tensor_parallel_size == 1:
            return _load(config, folder, report, weights, async_launch)
        check_parallel_config(config, folder)
        ranks = RankProcesses(config)
        try:
            return _load(config, folder, report, weights, async_launch, ranks.group, ranks)
        except BaseException:
            ranks.close()
            raise


def run_rank(fd: int) -> None:
    """Run one rank other than the first: load its share, and execute plans until rank 0 ends.

    `fd`: this end of the socket pair.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains first and closes the socket
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=fd) as sock:
        end_with_rank_0(sock)
        start = read_start(sock)
        config = start.config
        folder = resolve_model_path(config.model)
        send_ready(sock)
        group = RankGroup(start.rank, config.tensor_parallel_size, start.store, is_ordered=config.deterministic)
        runner = _load(config, folder, lambda fraction, what: None, None, None, group)
        while (body := read_frame(sock)) is not None:
            runner.execute(decode_plan(body))


def check_parallel_config(config: EngineConfig, folder: Path) -> None:
    """Verify that a model can run with `tensor_parallel_size`.

    Raises: ModelFolderError naming the setting or the field, and the reason.
    """
    size, where = config.tensor_parallel_size, folder / "config.json"
    if not 1 <= size <= MAX_RANKS:
        raise ModelFolderError(f"tensor_parallel_size must be from 1 to {MAX_RANKS}, got {size}")
    device = choose_device(config.device)
    if device.type != "cpu":
        raise ModelFolderError(f"tensor_parallel_size {size} works on CPUs only, and this model would run on {device}")
    if config.quantization != "none":
        raise ModelFolderError(
            f"tensor_parallel_size {size} does not work with quantization {config.quantization}; choose none"
        )
    raw = read_config(folder)
    raw, _ = open_text_tower(raw, open_weights(folder, raw), where)
    if not is_native(raw, where):
        raise ModelFolderError(
            f"{where}: tensor_parallel_size {size} works with models of the native decoder only "
            f"({', '.join(FAMILIES)}), and model type {raw.get('model_type')!r} runs through transformers"
        )
    check_tensor_parallel(size, read_architecture(raw, where), where)


def _load(
    config: EngineConfig,
    folder: Path,
    report: Progress,
    weights: WeightSource | None,
    async_launch: AsyncLaunch | None,
    group: RankGroup | None = None,
    ranks: RankProcesses | None = None,
) -> Runner:
    num_ranks = config.tensor_parallel_size
    config = _share_of_rank(config)
    where = folder / "config.json"
    raw, eos, weights = _open_folder(folder, weights)
    device = choose_device(config.device)
    dtype = choose_dtype(config, device)
    check_quantization(config.quantization, device)
    backend, kernels = choose_backend(config.attention_backend, device, deterministic=config.deterministic)
    check_kv_cache_dtype(config.kv_cache_dtype, backend, device)
    fp8 = read_fp8_format(raw, where) if is_native(raw, where) else None  # transformers' models are dequantised
    problem = fp8_problem(backend, device, dtype, deterministic=config.deterministic)
    quantization = choose_quantization(config.quantization, problem, is_fp8=fp8 is not None)
    config = msgspec.structs.replace(config, quantization=quantization)
    weights = weights if fp8 is None else Fp8Weights(weights, fp8)
    _configure_torch(device, dtype, weights.num_parameters * (1 if quantization != "none" else dtype.itemsize))
    if group is not None:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    num_bytes = weights.num_parameters * dtype.itemsize
    make_linear = (
        Fp8LinearFactory(quantises=fp8 is None)
        if quantization == "fp8"
        else _linear_factory(config, folder, raw, num_bytes, dtype, device, backend)
    )
    network, max_model_len = _load_network(
        config, folder, raw, weights, dtype, device, make_linear, kernels, report, group
    )
    geometry = network.geometry.with_kv_cache_dtype(config.kv_cache_dtype)
    if not isinstance(network, TokenByToken):  # it runs on CPUs, without FP8 pages
        network.geometry = geometry
    vocab_size = geometry.vocab_size
    if async_launch is None:
        async_launch = default_async_launch(
            device,
            config.max_num_seqs,
            config.max_num_batched_tokens if isinstance(network, Decoder) else 0,
            capturable=backend == "triton",
        )
    report(0.91, "measuring memory")
    samples = group is None or group.rank == 0
    sampler = choose_sampler(backend, vocab_size, device) if samples else NoSampler()
    capacity = _measure_capacity(config, network, kernels, sampler, max_model_len, async_launch)
    if group is not None:
        capacity = group.smallest(capacity)
    report(0.92, f"allocating {capacity.num_pages} KV pages")
    stores = allocate_stores(kernels, geometry, capacity.num_pages, capacity.page_size)
    states = make_states(geometry.state_shapes, capacity.num_states, capacity.num_host_states, geometry.device)
    arch = network.arch if isinstance(network, Decoder) else None
    idle_bytes = 0 if isinstance(network, Decoder) else network.idle_bytes
    weight_bytes, step_bytes = weight_sizes(weights.num_parameters, dtype, arch, make_linear, idle_bytes)
    precision = f"{dtype} {config.quantization}" + (f" on {num_ranks} ranks" if num_ranks > 1 else "")
    precision += " with fp8 pages" if geometry.kv_dtype is not None else ""
    model_info = ModelInfo(
        name=config.served_model_name or model_name(config.model),
        digest=_digest(raw, weights, precision, max_model_len),
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        quantization=config.quantization,
        num_parameters=weights.num_parameters,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        attention=backend,
        pooling=choose_pooling(config.pooling, folder),
        hidden_size=geometry.hidden_size,
    )
    if config.deterministic:
        report(0.93, "checking that results do not depend on the batch")
        check_determinism(network, kernels, config.page_size, max_model_len)
    prefaulter = PagePrefaulter(stores) if device.type == "cpu" else None
    threads = ThreadCount(thread_counts(config.deterministic)) if device.type == "cpu" else None
    runner = Runner(
        network, kernels, stores, capacity, model_info, async_launch, sampler=sampler, prefaulter=prefaulter,
        threads=threads, is_swap_optional=config.swap_space_bytes is None, states=states, ranks=ranks,
    )  # fmt: skip
    if device.type == "cpu":
        reuse_large_blocks()
    report(0.94, "warming up; the first start compiles kernels")
    runner.warm_up(lambda fraction, what: report(0.94 + 0.06 * fraction, what))
    if group is not None:
        group.start_serving()
    report(1.0, "model loaded")
    return runner


def _open_folder(folder: Path, weights: WeightSource | None) -> tuple[dict[str, Any], tuple[int, ...], WeightSource]:
    """Return config, end tokens and weights of a folder; of a model with towers, the text model's.

    `weights`: as in `load_model`.
    """
    raw = read_config(folder)
    eos, where = eos_token_ids(folder, raw), folder / "config.json"
    if weights is not None:
        return raw, eos, weights
    text, weights = open_text_tower(raw, open_weights(folder, raw), where)
    with as_model_folder_error(where):
        return (text if is_native(text, where) else raw), eos, as_causal_lm(weights)


def _share_of_rank(config: EngineConfig) -> EngineConfig:
    """Return the config with one rank's share of the KV memory and the swap space."""
    kv, swap = (
        None if size is None else size // config.tensor_parallel_size
        for size in (config.kv_memory_bytes, config.swap_space_bytes)
    )
    return msgspec.structs.replace(config, kv_memory_bytes=kv, swap_space_bytes=swap)


def _configure_torch(device: torch.device, dtype: torch.dtype, weight_bytes: int) -> None:
    """Set the process-wide options of torch and the allocator for a model."""
    if device.type == "cpu":
        reuse_freed_memory()
        limit_threads(weight_bytes)
    elif dtype == torch.float32:
        torch.set_float32_matmul_precision("highest")  # the process may have enabled TF32 before


def _linear_factory(
    config: EngineConfig,
    folder: Path,
    raw: dict[str, Any],
    weight_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
) -> LinearFactory:
    """Return the linear layers for a model.

    Raises: ModelFolderError for a quantization that the model's decoder does not support, or for a model that cannot be
    deterministic with this backend.
    """
    where = folder / "config.json"
    with as_model_folder_error(where):
        native = is_native(raw, where)
    if native:
        return choose_linear(config, weight_bytes, dtype, device, backend)
    if config.deterministic and backend != "cpu":
        raise ModelFolderError(
            f"{where}: deterministic with the attention backend {backend!r} works with models of the native decoder "
            f"only ({', '.join(FAMILIES)}), and model type {raw.get('model_type')!r} runs through transformers; choose "
            "device cpu"
        )
    return choose_module_linear(config, weight_bytes, dtype, device)


def _load_network(
    config: EngineConfig,
    folder: Path,
    raw: dict[str, Any],
    weights: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    make_linear: LinearFactory,
    kernels: AttentionBackend,
    report: Progress,
    group: RankGroup | None = None,
) -> tuple[Decoder | TransformersNetwork | TokenByToken, int]:
    """Return the network and the longest context that it will serve."""

    def part(fraction: float, what: str) -> None:
        report(0.05 + 0.85 * fraction, what)

    where = folder / "config.json"
    if is_native(raw, where):
        with as_model_folder_error(where):
            arch = read_architecture(raw, where)
        check_layer_count(weights, arch, folder)
        length = context_length(config, arch)
        if group is not None:
            shard = Shard(arch, group.rank, group.size)
            arch, weights = shard.local, RankWeights(weights, shard)
        decoder = load_decoder(arch, weights, dtype, device, part, make_linear, group)
        decoder.extend_positions(length)
        return decoder, length
    from chatcache.model.transformers.loading import load_transformers

    part(0.0, "loading through transformers")
    network = load_transformers(folder, raw, dtype, device, kernels, make_linear)
    length = _bounded(config, network.max_position)
    if not config.deterministic:
        return network, length
    torch.set_num_threads(1)  # how torch divides work among threads is not specified
    log.warning("deterministic: this model runs through transformers, on one thread, one token at a time")
    return TokenByToken(network, network.idle_bytes), length


def context_length(config: EngineConfig, arch: Architecture) -> int:
    """Return the longest context to serve: the model's own, or `max_model_len`.

    Rope scaling may extend the model's own context.
    Raises: ModelFolderError if `max_model_len` exceeds what the model supports.
    """
    max_context = arch.max_position
    if arch.rope.kind in ("yarn", "dynamic", "linear"):
        original = arch.rope.option("original_max_position_embeddings") or max_context
        max_context = max(max_context, int(original * (arch.rope.option("factor") or 1.0)))
    if config.max_model_len is None:
        return arch.max_position
    return _bounded(config, max_context)


def _bounded(config: EngineConfig, max_context: int) -> int:
    requested = config.max_model_len
    if requested is None:
        return max_context
    if not 1 <= requested <= max_context:
        raise ModelFolderError(f"max_model_len {requested} is out of bounds: this model allows 1 to {max_context}")
    return requested


def choose_pooling(pooling: str, folder: Path) -> str:
    """Return the kind of pooling, last | mean: as configured, else as the folder says, else last.

    Raises: ModelFolderError for another kind.
    """
    if pooling not in POOLINGS:
        raise ModelFolderError(f"pooling {pooling!r} is not supported; choose {', '.join(POOLINGS)}")
    return pooling if pooling != "auto" else read_pooling(folder) or "last"


def limit_kv_memory(config: EngineConfig, total_bytes: int) -> EngineConfig:
    """Return the config without `kv_memory_bytes` if the device has less memory."""
    if config.kv_memory_bytes is None or config.kv_memory_bytes <= total_bytes:
        return config
    return msgspec.structs.replace(config, kv_memory_bytes=None)


def describe_kv_limit(asked_bytes: int, total_bytes: int, used_bytes: int) -> str:
    """Return a sentence for the log about a `kv_memory_bytes` that is larger than the device's memory."""
    asked, total, used = map(format_size, (asked_bytes, total_bytes, used_bytes))
    return f"kv_memory {asked} is more than the {total} of this device: {used} are used"


def plan_capacity(
    config: EngineConfig, geometry: Geometry, max_model_len: int, budget: Budget | None = None
) -> KVCapacity:
    """Compute the number of KV pages and host pages.

    The pages take `kv_memory_bytes` if set, else what `budget` leaves, else a share of the host's free memory but at
    least one whole context; never more than `max_num_seqs` whole contexts can use.
    Raises: ModelFolderError if that does not hold two pages.
    """
    if problem := geometry.page_size_problem(config.page_size):
        raise ModelFolderError(problem)
    page_bytes, state_bytes = geometry.page_bytes(config.page_size), geometry.state_bytes
    context_pages = -(-max_model_len // config.page_size)
    num_states = 0
    if config.kv_memory_bytes is not None:
        num_states = count_states(state_bytes, config.kv_memory_bytes, config.max_num_seqs)
        num_pages = (config.kv_memory_bytes - num_states * state_bytes) // page_bytes
        if num_pages < 2:
            states = f", and {num_states} states take {num_states * state_bytes} bytes" if num_states else ""
            raise ModelFolderError(
                f"kv_memory_bytes {config.kv_memory_bytes} is too small: a page of {config.page_size} tokens takes "
                f"{page_bytes} bytes, and two are the least{states}"
            )
    elif budget is not None:
        num_states = count_states(state_bytes, budget.kv_bytes, config.max_num_seqs)
        num_pages = (budget.kv_bytes - num_states * state_bytes) // page_bytes
        if num_pages < 2:
            raise ModelFolderError(
                f"no memory is left for KV pages on {geometry.device}: {budget}; "
                f"lower max_num_batched_tokens or max_num_seqs, or set kv_memory_bytes"
            )
    else:
        num_bytes = host_kv_bytes() // config.tensor_parallel_size
        num_states = count_states(state_bytes, num_bytes, config.max_num_seqs)
        num_pages = max(1 + context_pages, (num_bytes - num_states * state_bytes) // page_bytes)
    num_useful = 1 + context_pages * config.max_num_seqs
    if config.kv_memory_bytes is not None and num_pages > num_useful:
        used = format_size(num_useful * page_bytes + num_states * state_bytes)
        given = format_size(config.kv_memory_bytes)
        what = f"max_num_seqs {config.max_num_seqs} contexts of {max_model_len} tokens"
        log.warning("kv_memory %s: %s of it are used, the size of %s", given, used, what)
    num_pages = min(num_pages, num_useful)
    log.info("KV store: %d pages of %d tokens, %.1f MiB", num_pages, config.page_size, num_pages * page_bytes / 2**20)
    if num_states:
        held = format_size(num_states * state_bytes)
        log.info("state store: %d states of %s, %s", num_states, format_size(state_bytes), held)
    num_host_states = _num_host_states(config, state_bytes, num_states)
    return KVCapacity(
        num_pages=num_pages,
        page_size=config.page_size,
        num_slots=config.max_num_seqs,
        max_model_len=max_model_len,
        kv_bytes=num_pages * page_bytes,
        num_host_pages=_num_host_pages(config, page_bytes, num_pages, num_host_states * state_bytes),
        num_states=num_states,
        state_bytes=state_bytes,
        num_host_states=num_host_states,
    )


def _measure_capacity(
    config: EngineConfig,
    network: Network,
    kernels: AttentionBackend,
    sampler: TokenSampler,
    max_model_len: int,
    async_launch: AsyncLaunch | None,
) -> KVCapacity:
    """Measure the memory and compute the number of KV pages; log a limit that the device cannot satisfy."""
    geometry = network.geometry
    asked, total = config.kv_memory_bytes, total_memory_bytes(geometry.device)
    config = limit_kv_memory(config, total)
    budget = _budget(config, network, kernels, sampler, max_model_len, async_launch)
    capacity = plan_capacity(config, geometry, max_model_len, budget)
    if asked is not None and config.kv_memory_bytes is None:
        log.warning("%s", describe_kv_limit(asked, total, capacity.kv_bytes))
    return capacity


def _budget(
    config: EngineConfig,
    network: Network,
    kernels: AttentionBackend,
    sampler: TokenSampler,
    max_model_len: int,
    async_launch: AsyncLaunch | None,
) -> Budget | None:
    """Measure a GPU's memory for KV pages; None on CPUs or if `kv_memory_bytes` is set."""
    device = network.geometry.device
    if device.type != "cuda" or config.kv_memory_bytes is not None:
        return None
    budget = measure_budget(
        CudaMemoryGauge(device),
        network,
        kernels,
        sampler,
        page_size=config.page_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_graphs=async_launch.num_graphs if async_launch is not None else 0,
        max_captured_tokens=max(async_launch.prompt_sizes, default=0) if async_launch is not None else 0,
    )
    log.info("memory of %s: %s", device, budget)
    return budget


def count_states(state_bytes: int, num_bytes: int, max_num_seqs: int) -> int:
    """Return how many states a model keeps in `num_bytes` of memory for pages and states; 0 for a model without.

    That is the zero state, one live state for every branch and three snapshots for each, in at most half of the memory,
    but no fewer than a single branch needs.
    """
    if not state_bytes:
        return 0
    wanted = 1 + (1 + SNAPSHOTS_PER_SEQ) * max_num_seqs
    return max(MIN_STATES, min(wanted, int(num_bytes * STATE_SHARE) // state_bytes))


def _num_host_states(config: EngineConfig, state_bytes: int, num_states: int) -> int:
    """Return the number of host states: half the swap space, and no more than the device holds."""
    if not num_states:
        return 0
    swap_bytes = SWAP_MAX_BYTES if config.swap_space_bytes is None else max(0, config.swap_space_bytes)
    return min(num_states - 1, swap_bytes // 2 // state_bytes)


def _num_host_pages(config: EngineConfig, page_bytes: int, num_pages: int, other_bytes: int = 0) -> int:
    """Return the number of host pages: as configured, else half the KV pages, at most 1 GiB.

    `other_bytes` of the swap space hold states.
    Raises: ModelFolderError if `swap_space_bytes` is negative or does not hold one page.
    """
    requested = config.swap_space_bytes
    if requested is None:
        return min(num_pages // 2, (SWAP_MAX_BYTES // config.tensor_parallel_size - other_bytes) // page_bytes)
    if requested < 0 or 0 < requested < page_bytes:
        raise ModelFolderError(
            f"swap_space_bytes {requested} is out of bounds: 0 turns swapping off, and a page of "
            f"{config.page_size} tokens takes {page_bytes} bytes"
        )
    return (requested - other_bytes) // page_bytes


def choose_device(name: str) -> torch.device:
    """Return the device for auto | cpu | cuda. Raises: ModelFolderError if it does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.split(":")[0]
    if name != "cpu" and kind != "cuda":
        raise ModelFolderError(f"device {name!r} is not supported; choose auto, cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelFolderError(f"device {name!r}: torch finds no CUDA device; choose auto or cpu")
    return torch.device(name)


def choose_linear(
    config: EngineConfig, weight_bytes: int, dtype: torch.dtype, device: torch.device, backend: str = "cpu"
) -> LinearFactory:
    """Return the factory of the model's linear layers. `backend`: the name of the attention backend."""
    if config.quantization == "int8":
        return Int8LinearFactory()
    if config.deterministic:
        return TritonLinearFactory() if backend == "triton" else BatchInvariantLinearFactory()
    if device.type != "cpu" or config.attention_backend not in ("auto", "cpu") or dtype != torch.bfloat16:
        return fast_linear
    from chatcache_kernels.cpu.bf16 import has_bf16_products

    if not has_bf16_products():
        return PanelLinearFactory()
    free_bytes = free_host_bytes()
    keep_both = can_keep_both_layouts(weight_bytes, free_bytes)
    size = f"{weight_bytes / 2**30:.2f} GiB of weights, {free_bytes / 2**30:.2f} GiB free"
    log.info("%s: kept %s", size, "in panels, and for oneDNN where that is faster" if keep_both else "for oneDNN")
    compact_tokens = choose_compact_tokens(weight_bytes, free_bytes, keep_both)
    if not keep_both and compact_tokens == 0:
        return fast_linear
    return PanelLinearFactory(has_onednn=True, has_panels=keep_both, compact_tokens=compact_tokens)


def choose_module_linear(
    config: EngineConfig, weight_bytes: int, dtype: torch.dtype, device: torch.device
) -> LinearFactory:
    """Return the factory of the linear layers of a model that runs through transformers."""
    if config.quantization == "int8":
        return Int8LinearFactory()
    if device.type != "cpu" or config.attention_backend not in ("auto", "cpu") or dtype != torch.bfloat16:
        return fast_linear
    from chatcache_kernels.cpu.bf16 import has_bf16_products

    free_bytes = free_host_bytes()
    has_onednn = not config.deterministic and has_bf16_products() and can_keep_both_layouts(weight_bytes, free_bytes)
    return PanelLinearFactory(has_onednn=has_onednn, compact_tokens=choose_compact_tokens(weight_bytes, free_bytes))


def choose_compact_tokens(weight_bytes: int, free_bytes: int, has_panels: bool = True) -> int:
    """Return up to how many tokens a step reads a compact copy of the weights; 0 for no copy.

    CPUs without bf16 products take longer to restore the numbers than to read them, and small models stay in caches.
    """
    from chatcache_kernels.cpu.bf16 import has_bf16_products

    if not COMPACT_MIN_BYTES <= weight_bytes <= free_bytes * COMPACT_MAX_SHARE or not has_bf16_products():
        return 0
    num_tokens = measure_compact_tokens(has_panels, weight_bytes)
    log.info("steps of up to %d tokens read weights of 12.5 bits", num_tokens)
    return num_tokens


def can_keep_both_layouts(weight_bytes: int, free_bytes: int) -> bool:
    """Return whether to keep a second layout of the weights for small steps.

    It must be small in absolute terms and fit into a share of the free memory.
    """
    return weight_bytes <= min(DUAL_LAYOUT_MAX_BYTES, free_bytes * DUAL_LAYOUT_MAX_SHARE)


def choose_sampler(backend: str, vocab_size: int, device: torch.device) -> TokenSampler:
    """Return the sampler of a runner with this attention backend."""
    if backend != "triton":
        return Sampler(vocab_size, device)
    from chatcache.model.sampling.device_sampler import DeviceSampler

    return DeviceSampler(vocab_size, device)


def limit_threads(weight_bytes: int) -> None:
    """Reduce torch's threads to the CPUs allowed, or to one for a small model; never raise them."""
    most = 1 if weight_bytes <= SINGLE_THREAD_BYTES else allowed_cpus()
    if most < torch.get_num_threads():
        torch.set_num_threads(most)
    if torch.get_num_threads() > 1 and not is_spinning_limited(os.environ):
        log.warning("torch was imported before chatcache: its idle threads spin, which slows steps on a busy machine")


def thread_counts(deterministic: bool) -> tuple[int, ...]:
    """Return the numbers of threads that steps may use; with `deterministic`, those that were checked at the start."""
    count = torch.get_num_threads()
    return tuple(sorted({1, count})) if deterministic else tuple(range(1, count + 1))


def allowed_cpus(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Count the CPUs that this process may use.

    The count is limited by the CPU affinity and by the control group's quota, rounded up.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(affinity, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or "max"
        return affinity


def _digest(raw: dict[str, Any], weights: WeightSource, precision: str, max_model_len: int) -> str:
    """Return a hash of all that determines the contents of a page.

    That is the config, the weights, their precision, and the context length, on which dynamic rope scaling depends.
    """
    info_json = json.dumps([raw, precision, max_model_len, weights.digest()], sort_keys=True)
    return hashlib.sha256(info_json.encode()).hexdigest()
