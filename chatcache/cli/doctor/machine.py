"""Python, processor, GPU, memory, folders: what the engine stands on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from chatcache.cli.doctor.findings import Finding, bad, good, warning
from chatcache.settings import format_size

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
    from chatcache_kernels.cpu.amx import has_amx
    from chatcache_kernels.cpu.pairs import has_pair_products

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = f"{threads} CPU{'s' if threads > 1 else ''}"
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    units = [name for name, has in (("AMX", has_amx()), ("AVX512-BF16", has_pair_products())) if has]
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
    from chatcache.model.memory import free_host_bytes

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
