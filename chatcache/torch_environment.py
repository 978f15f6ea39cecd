"""Defaults of environment variables that torch and its libraries read once, when they load.

`chatcache/__init__.py` sets them: before the command line, the engine process (which inherits them), `LLM` or a
benchmark can import torch. Values that the user has set win.

OpenMP: torch's idle threads wait for the next parallel region, and for each other at its end, in a loop that keeps the
core busy: for milliseconds with libgomp (300,000 polls), for 200 ms with the runtimes of LLVM and Intel. When another
program needs a core, a thread that spins keeps it from the thread that the others wait for: with one busy program next
to two threads, generation falls to a third and burns four times the CPU time.

Huge pages: a step of a long prompt writes tensors of many megabytes, and with pages of 4 KiB the CPU looks up the
address of nearly every row. With huge pages for large tensors prompts are computed up to 6 % faster (Zen 5, 2,048
tokens).

CUDA: steps allocate tensors of ever different sizes from the few percent of memory that the KV pages leave. With
expandable segments torch maps more memory at the end of a segment instead of allocating segments of fixed sizes that
fragment. torch ignores the setting where the driver cannot map memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping

SPIN_COUNT = "10000"
"""Polls of libgomp: a few hundred microseconds, longer than the gaps between the parallel regions of a step.

On an idle machine the 135M shape decodes as fast as with unlimited spinning; 1,000 polls cost a third at batch 32.
"""
BLOCK_TIME_MS = "1"
"""The shortest wait of LLVM's and Intel's runtimes that is not zero, in milliseconds."""
ALLOCATOR = "expandable_segments:True"

SPIN_DEFAULTS = {
    "GOMP_SPINCOUNT": (SPIN_COUNT, {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}),
    "KMP_BLOCKTIME": (BLOCK_TIME_MS, {"KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_WAIT_POLICY"}),
}
DEFAULTS = {
    **SPIN_DEFAULTS,
    "THP_MEM_ALLOC_ENABLE": ("1", {"THP_MEM_ALLOC_ENABLE"}),
    "PYTORCH_ALLOC_CONF": (ALLOCATOR, {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}),
}
"""Variable -> value, and the variables that replace it if the user has set one of them."""


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set; no effect after torch is imported."""
    if "torch" in sys.modules:
        return
    for name, (value, replaced_by) in DEFAULTS.items():
        if not replaced_by & environment.keys():
            environment[name] = value


def is_spinning_limited(environment: Mapping[str, str]) -> bool:
    """Return whether this process has a wait policy of OpenMP threads, from `set_defaults` or from the user."""
    return any(replaced_by & environment.keys() for _, replaced_by in SPIN_DEFAULTS.values())
