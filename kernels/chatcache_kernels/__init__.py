"""The engine's kernels: the same few operations over KV pages, once per kind of machine.

Why a package of its own: kernels know tensors and page tables, nothing of requests, schedulers or models, so they are
tested and measured alone. Every backend offers the same functions; `reference` says what they mean.

    types.py      the data that crosses the seam: KVPages, AttentionBatch
    reference.py  plain torch, the oracle of every kernel
    cpu/          numba kernels for CPUs (no compiler needed on the user's machine)

The memory layout and the symbols that docstrings use are drawn in `kernels/README.md`.
"""
