"""Many kernels in one launch: all threads go through a list of jobs together and wait for each other after each.

In a decode step a kernel runs for microseconds; starting each from Python, and waking threads for it, costs as much
again. Here that is paid once a step. Threads that wait spin for a while, then give the CPU away: when other programs
want the cores, the thread that is waited for may be one that does not run.

Rows of a table by their numbers: embeddings, rotations, the tokens that are drawn from.
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

from .launch import Launch, compile_kernel, omp_function, record
from .simd import I64, INT64, emit_call, fetch_add, instruction, pointer

MAX_SPINS = 2000  # looks at the counter (tens of microseconds) before a waiting thread first gives way

QUEUE_JOB, _PACK_QUEUE = record("steps num_steps sched_yield team_size")
"""`steps` [num_steps, 2] int64: address of a kernel, address of its job. `sched_yield`, `team_size`: addresses of
functions of no arguments; `team_size` tells how many threads came, 0 = one. The counters are threads that arrived, and
that started."""


class KernelCalls:
    """The jobs of one kernel in a program: `records`, one for each call, are filled and changed by their owner."""

    def __init__(self, launch: Launch, layout: np.dtype[np.void], count: int, **fields: Any) -> None:
        self.entry: int = launch.compiled.address  # type: ignore[attr-defined]
        self.launch = launch
        self.records: NDArray[np.void] = np.zeros(count, layout)
        self.set(**fields)

    def set(self, **fields: Any) -> None:
        """Set fields in every record: a number for all, or one for each."""
        for name, values in fields.items():
            self.records[name] = values

    def address(self, index: int) -> int:
        """Return where a record lies."""
        return int(self.records.ctypes.data) + index * self.records.itemsize


class KernelQueue:
    """Runs (jobs, index) in order; a job may occur once."""

    def __init__(self, steps: Sequence[tuple[KernelCalls, int]]) -> None:
        self._jobs = list({id(jobs): jobs for jobs, _ in steps}.values())
        self._steps = np.array([(jobs.entry, jobs.address(index)) for jobs, index in steps], np.int64)

    def run(self, num_threads: int) -> None:
        """Carry out every job; when it returns, all are done."""
        for jobs in self._jobs:
            jobs.set(next_piece=0, next_thread=0)
        job = _PACK_QUEUE.pack(
            0, 0, self._steps.ctypes.data, len(self._steps), _sched_yield(), omp_function("omp_get_num_threads")
        )
        _queue_kernel()(job, num_threads)


@cache
def _sched_yield() -> int:
    """Return the address of the function that gives the CPU to another thread, 0 where there is none."""
    try:
        function = ctypes.CDLL(None).sched_yield
    except (OSError, AttributeError, TypeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _queue_kernel() -> Launch:
    """Return the launcher. Takes a JOB."""

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


@instruction
def call_kernel(typing: Any, entry: Any, argument: Any) -> Any:
    """call(entry, argument): call the compiled function at an address with one address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte])
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], byte)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@instruction
def call_function(typing: Any, entry: Any) -> Any:
    """ask(entry): call the C function `int f(void)` at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), []), I64)

    return types.int64(types.int64), generate


@instruction
def load_acquire(typing: Any, source: Any, index: Any) -> Any:
    """look(pointer, i): read 64-bit element i that other threads change."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = builder.bitcast(args[0], I64.as_pointer())
        at = builder.gep(base, [args[1]], source_etype=I64)
        return builder.load_atomic(at, "acquire", 8, typ=I64)

    return types.int64(source, types.int64), generate


@instruction
def spin_hint(typing: Any) -> Any:
    """pause(): tell an x86 CPU that this is a waiting loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86_64" in builder.module.triple:
            emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


GATHER_JOB, PACK_GATHER = record("source rows out num_rows words")
"""Addresses: a table, row numbers [num_rows] int64, and the result. `words`: 64-bit words of a row."""


@cache
def gather_kernel() -> Launch:
    """Return the launcher. Takes a JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, GATHER_JOB)[0]
        source, out, rows = pointer(INT64, job.source), pointer(INT64, job.out), pointer(INT64, job.rows)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            for word in range(job.words):
                out[row * job.words + word] = source[rows[row] * job.words + word]
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)
