"""Run a queue of kernels in one launch, without waiting for threads that hold no work.

In a decode step a kernel runs for microseconds; starting each from Python and waking threads for it costs as much
again. Here that cost is paid once a step.

A kernel is complete when all its items are taken and every thread that entered it has left it. A thread that the system
has descheduled between two kernels is not waited for: the others compute its share, and it continues at the kernel that
they have reached. Only a thread that is descheduled while it holds an item stops the others. They spin for a while and
then sleep, which frees a core for that thread; if they kept the core (or only yielded), it would have to wait for the
time slice of whatever program took its own.

Every kernel of a queue must fit this: it writes memory only while it holds an item, and no item waits for another.
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

from .launch import Launch, compile_kernel, define_job
from .simd import I64, INT64, emit_call, emit_pointer, fetch_add, pointer, simd_intrinsic

MAX_SPINS = 2000  # polls (tens of microseconds) before a waiting thread sleeps
SLEEP_US = 20  # of one sleep; the system adds its timer slack, 50 microseconds on Linux
LEFT = 1 << 32  # one thread that left a kernel, in its counters

QUEUE_JOB, _PACK_QUEUE = define_job("steps counters num_steps usleep")
"""steps [num_steps, 2] int64: address of a kernel, address of its job.

counters [num_steps] int64, zeroed: threads that entered each kernel, and in the upper half threads that left it.
usleep: address of the C function, 0 if there is none. The first counter of the job is the number of complete kernels.
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
    """Kernel calls that run in order, each given as (calls, index); a call may occur only once.

    Not thread-safe.
    """

    def __init__(self, steps: Sequence[tuple[KernelCalls, int]]) -> None:
        jobs = {id(jobs): jobs for jobs, _ in steps}.values()
        self._taken = [each.records.view(np.int64).reshape(len(each.records), -1)[:, :2] for each in jobs]
        self._steps = np.array([(jobs.entry, jobs.address(index)) for jobs, index in steps], np.int64)
        self._counters = np.zeros(len(steps), np.int64)
        places = self._steps.ctypes.data, self._counters.ctypes.data
        self._job = _PACK_QUEUE.pack(0, 0, *places, len(steps), _usleep())

    def run(self, num_threads: int) -> None:
        """Run every call. All are finished when this returns."""
        for taken in self._taken:  # next_item and next_thread, the first fields of each record
            taken[:] = 0
        self._counters[:] = 0
        _queue_kernel()(self._job, num_threads)


@cache
def _usleep() -> int:
    """Return the address of usleep(), 0 if the C library has none."""
    try:
        function = ctypes.CDLL(None).usleep
    except (OSError, AttributeError, TypeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _queue_kernel() -> Launch:
    """Return the launcher of the kernel that runs a queue. Its argument record is a QUEUE_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, QUEUE_JOB)[0]
        steps, counters = pointer(INT64, job.steps), pointer(INT64, job.counters)
        step = load_acquire(address, 0)
        while step < job.num_steps:
            fetch_add(counters, step, 1)
            call_kernel(steps[2 * step], steps[2 * step + 1])
            counts = fetch_add(counters, step, LEFT) + LEFT
            if counts // LEFT == counts % LEFT:  # every item was taken, and every thread that took one is back
                fetch_max(address, 0, step + 1)
            spins = 0
            while load_acquire(address, 0) <= step:
                spins += 1
                if spins > MAX_SPINS and job.usleep != 0:
                    call_function(job.usleep, SLEEP_US)
                spin_hint()
            step = load_acquire(address, 0)

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
def call_function(typing: Any, entry: Any, argument: Any) -> Any:
    """Call the C function `int f(unsigned)` at address `entry`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
        function = builder.inttoptr(args[0], kind.as_pointer())
        return builder.sext(builder.call(function, [builder.trunc(args[1], ir.IntType(32))]), I64)

    return types.int64(types.int64, types.int64), generate


@simd_intrinsic
def fetch_max(typing: Any, source: Any, index: Any, value: Any) -> Any:
    """Raise a 64-bit element to `value` atomically if it is lower; return its previous value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("max", emit_pointer(builder, args[0], args[1], I64), args[2], "seq_cst")

    return types.int64(source, types.int64, types.int64), generate


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
