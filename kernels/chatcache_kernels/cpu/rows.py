"""Rows of a table by their numbers: embeddings, rotations, the tokens that are drawn from."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray

from .launch import Launch, compile_kernel, record
from .vectors import INT64, fetch_add, pointer

JOB, PACK = record("source rows out num_rows words")
"""Addresses: a table, row numbers [num_rows] int64, and the result. `words`: 64-bit words of a row."""


@cache
def take_kernel() -> Launch:
    """Return the launcher. Takes a JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        source, out, rows = pointer(INT64, job.source), pointer(INT64, job.out), pointer(INT64, job.rows)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            for word in range(job.words):
                out[row * job.words + word] = source[rows[row] * job.words + word]
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)
