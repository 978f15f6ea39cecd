"""Compile a kernel once per machine and run it on torch's own threads.

A kernel is a function of one address: that of a job, a record of pointers and sizes whose first two fields are counters
that start at 0. Every thread of the team runs the whole function and takes work items from a shared counter, so the
load is balanced.

Why torch's threads: a second pool next to torch's OpenMP pool (numba's own) makes both slower, since idle OpenMP
threads spin for the next parallel region and take CPU time from the other pool. `GOMP_parallel` is the entry point that
compiled `#pragma omp parallel` code calls; it is looked up in torch's library, so it belongs to the runtime that torch
uses. Any thread may call it. Where torch has no such entry point (macOS, Windows), the kernel runs on the calling
thread.

Compiled code is cached in NUMBA_CACHE_DIR or the user's cache folder, under a digest of this package's source: numba
alone would not notice a change in an imported helper. Code in that folder is executed, so only its owner may have write
access. If neither folder is writable, each process compiles again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import struct
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from numba.core.dispatcher import Dispatcher

Function = TypeVar("Function", bound=Callable[..., Any])
Launch = Callable[[bytes, int], None]  # launch(job, num_threads)

_COMPILING = threading.Lock()  # numba's cache folder is one setting for the process
_ELEMENTS_PER_THREAD = 16384  # elements of simple work that justify one more thread

_FASTMATH = {"contract", "nsz"}  # not "fast": masks are -inf and faulty values are NaN, and both must be preserved


def helper(function: Function) -> Function:
    """Compile a function that kernels call; LLVM inlines it."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled: Function = numba.njit(error_model="numpy", fastmath=_FASTMATH, **options)(function)
    return compiled


def compile_kernel(function: Callable[[Any], None]) -> Launch:
    """Compile a kernel, or load it from the cache; return launch(job, num_threads).

    A kernel takes one argument: the address of its job record, which holds its pointers and sizes. Its closure has
    plain values only: numba does not find a kernel with compiled functions in the cache, since they have random names.
    """
    if any(isinstance(cell.cell_contents, Dispatcher) for cell in function.__closure__ or ()):
        raise TypeError(f"{function.__qualname__} has a compiled function in its closure and could not be cached")
    folder = cache_folder()
    decorate = numba.cfunc("void(voidptr)", cache=folder is not None, error_model="numpy", fastmath=_FASTMATH)
    with _COMPILING:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder or "")
        try:
            compiled = decorate(function)
        finally:
            numba.config.CACHE_DIR = before
    parallel, entry = _parallel_entry(), compiled.address

    def launch(job: bytes, num_threads: int) -> None:
        parallel(entry, ctypes.create_string_buffer(job, len(job)), num_threads, 0)

    launch.compiled = compiled  # type: ignore[attr-defined]  # keeps the code alive as long as its launcher
    return launch


def define_job(integers: str, floats: str = "") -> tuple[np.dtype[np.void], struct.Struct]:
    """Define a kernel's argument record (job): return it as a numpy dtype and as a struct.

    `integers`, `floats`: the names of its int64 and float64 fields, separated by spaces.
    """
    names, reals = ["next_item", "next_thread", *integers.split()], floats.split()
    fields = [(name, np.int64) for name in names] + [(name, np.float64) for name in reals]
    return np.dtype(fields), struct.Struct(f"{len(names)}q{len(reals)}d")


def choose_num_threads(num_elements: int) -> int:
    """Return the number of threads that elementwise work on `num_elements` elements justifies."""
    return min(torch.get_num_threads(), 1 + num_elements // _ELEMENTS_PER_THREAD)


@cache
def _parallel_entry() -> Callable[[int, Any, int, int], None]:
    """Return run(entry, job, num_threads, flags): runs entry(job) on every thread of a team."""
    address = omp_function("GOMP_parallel")
    if not address:
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        return lambda entry, job, num_threads, flags: call(entry)(ctypes.addressof(job))
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)(address)


@cache
def omp_function(name: str) -> int:
    """Return the address of a function of torch's OpenMP runtime, 0 if it is not available."""
    library = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        runtime = ctypes.CDLL(str(library))
        known = ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p), getattr(runtime, name)
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(known[1], ctypes.c_void_p).value or 0


@cache
def cache_folder() -> pathlib.Path | None:
    """Return a writable folder for compiled code, or None."""
    here = pathlib.Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))).hexdigest()[:16]
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(numba.config.CACHE_DIR or os.path.join(user, "chatcache", "kernels")) / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # fails if the folder belongs to another user
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
