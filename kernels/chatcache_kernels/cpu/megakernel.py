"""Run a queue of kernels in one launch, with a barrier of all threads after each kernel.

In a decode step a kernel runs for microseconds; starting each from Python and waking threads for it costs as much
again. Here that cost is paid once a step. At a barrier a thread spins for a while, then yields: when other programs
need the cores, the thread that the others wait for may not be running.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numpy.typing import NDArray

from .launch import Launch, compile_kernel, define_job, omp_function
from .simd import I64, INT64, emit_call, fetch_add, pointer, simd_intrinsic

MAX_SPINS = 2000  # polls (tens of microseconds) before a waiting thread first yields

QUEUE_JOB, _PACK_QUEUE = define_job("steps num_steps sched_yield team_size")
"""steps [num_steps, 2] int64: address of a kernel, address of its job.

sched_yield, team_size: addresses of functions without arguments; team_size returns the number of threads in the team
(0 = one thread). The counters are threads that arrived and threads that started.
"""


class KernelCalls:
    """The calls of one kernel in a queue.

    `records` has one argument record (job) for each call; the caller fills them.
    """

    def __init__(self, launch: Launch, layout: np.dtype[np.void], count: int, **fields: Any) -> None:
        self.entry: int = launch.compiled.address  # type: ignore[attr-defined]
        self.launch = launch
        self.records: NDArray[np.void] = np.zeros(count, layout)
        self.set(**fields)

    def set(self, **fields: Any) -> None:
        """Set fields of all argument records: one value for all of them, or one value for each."""
        for name, values in fields.items():
            self.records[name] = values

    def address(self, index: int) -> int:
        """Return the address of the argument record of call `index`."""
        return int(self.records.ctypes.data) + index * self.records.itemsize


class KernelQueue:
    """Kernel calls that run in order, each given as (calls, index); a call may occur only once."""

    def __init__(self, steps: Sequence[tuple[KernelCalls, int]]) -> None:
        self._jobs = list({id(jobs): jobs for jobs, _ in steps}.values())
        self._steps = np.array([(jobs.entry, jobs.address(index)) for jobs, index in steps], np.int64)

    def run(self, num_threads: int) -> None:
        """Run every call. All are finished when this returns."""
        for jobs in self._jobs:
            jobs.set(next_item=0, next_thread=0)
        job = _PACK_QUEUE.pack(
            0, 0, self._steps.ctypes.data, len(self._steps), _sched_yield(), omp_function("omp_get_num_threads")
        )
        _queue_kernel()(job, num_threads)


@cache
def _sched_yield() -> int:
    """Return the address of sched_yield(), 0 if the C library has none."""
    try:
        function = ctypes.CDLL(None).sched_yield
    except (OSError, AttributeError, TypeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _queue_kernel() -> Launch:
    """Return the launcher of the kernel that runs a queue. Its argument record is a QUEUE_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, QUEUE_JOB)[0]
        steps = pointer(INT64, job.steps)
        size = call_function(job.team_size) if job.team_size != 0 else 1
        for step in range(job.num_steps):
            call_kernel(steps[2 * step], steps[2 * step + 1])
            goal, spins = (step + 1) * size, 0
            arrived = fetch_add(address, 0, 1) + 1
            while arrived < goal:
                spins += 1
                if spins > MAX_SPINS and job.sched_yield != 0:
                    call_function(job.sched_yield)
                spin_hint()
                arrived = load_acquire(address, 0)

    return compile_kernel(kernel)


@simd_intrinsic
def call_kernel(typing: Any, entry: Any, argument: Any) -> Any:
    """Call the compiled kernel at address `entry` with one address as its argument."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte])
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], byte)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@simd_intrinsic
def call_function(typing: Any, entry: Any) -> Any:
    """Call the C function `int f(void)` at address `entry`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), []), I64)

    return types.int64(types.int64), generate


@simd_intrinsic
def load_acquire(typing: Any, source: Any, index: Any) -> Any:
    """Read 64-bit element `index` atomically (acquire order), because other threads change it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = builder.bitcast(args[0], I64.as_pointer())
        at = builder.gep(base, [args[1]], source_etype=I64)
        return builder.load_atomic(at, "acquire", 8, typ=I64)

    return types.int64(source, types.int64), generate


@simd_intrinsic
def spin_hint(typing: Any) -> Any:
    """Emit x86's PAUSE instruction, for spin loops."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86_64" in builder.module.triple:
            emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


GATHER_JOB, PACK_GATHER = define_job("source rows out num_rows words")
"""Addresses: a table, row numbers [num_rows] int64, and the result.

Words: 64-bit words of a row.
"""


@cache
def gather_kernel() -> Launch:
    """Return the launcher of the kernel that copies table rows, selected by row number.

    Its argument record is a GATHER_JOB.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, GATHER_JOB)[0]
        source, out, rows = pointer(INT64, job.source), pointer(INT64, job.out), pointer(INT64, job.rows)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            for word in range(job.words):
                out[row * job.words + word] = source[rows[row] * job.words + word]
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)
