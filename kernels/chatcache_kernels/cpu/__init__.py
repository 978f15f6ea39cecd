"""The operations of `reference` on CPUs, compiled by numba; no C compiler is needed.

Activations and pages may be float32, bfloat16 or float16, independently. Shapes that fit no register (a head size that
8 does not divide) are computed by torch. Kernels compile at their first call (seconds, once per machine); later
processes load them from the cache in tens of milliseconds.

Reading order: `launch` (compile and run a kernel), `simd` and `bf16` (registers and instructions), `attention` with
`attention_decode`, `attention_shared` and `attention_prefill`, `pages`, `rope`, `fused`, `matmul` and `int8` (linear
layers), `sampling`, `megakernel` and `decoder` (a whole decode step in one launch), `batch_invariant`.
"""

from .attention import paged_attention
from .attention_shared import prepare
from .fused import add_rms_norm, rms_norm, silu_mul
from .pages import allocate_pages, copy_pages, read_pages, swap_in, swap_out
from .rope import rope_write, write_pages

__all__ = [
    "add_rms_norm",
    "allocate_pages",
    "copy_pages",
    "paged_attention",
    "prepare",
    "read_pages",
    "rms_norm",
    "rope_write",
    "silu_mul",
    "swap_in",
    "swap_out",
    "write_pages",
]
