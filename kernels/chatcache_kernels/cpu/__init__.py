"""The operations of `reference` on CPUs, compiled by numba; no C compiler is needed.

Activations and pages may be float32, bfloat16 or float16, independently. Shapes that fit no register (a head size that
8 does not divide) are computed by torch. Kernels compile at their first call (seconds, once per machine); later
processes load them from the cache in tens of milliseconds.

Reading order: `launch` (compile and run a kernel), `simd` and `bf16` (registers and instructions), `attention` with
`attention_tile`, `attention_decode`, `attention_shared` and `attention_prefill`, `pages`, `latent`, `rope`, `fused`,
`matmul` and `int8` (linear layers), `experts`, `recurrent`, `sampling`, `megakernel`, `decoder` and `blocks` (a whole
decode step in one launch), `batch_invariant`.
"""

from .attention import paged_attention
from .attention_shared import prepare
from .expert_layer import grouped_experts
from .experts import pack_experts
from .fused import add_rms_norm, clamped_silu_mul, gated_rms_norm, gelu_mul, rms_norm, silu_mul
from .latent import allocate_latent_pages, latent_attention, read_latents, write_latents
from .pages import allocate_pages, copy_pages, read_pages, swap_in, swap_out
from .recurrent import causal_conv, gated_delta_rule, ssd_scan
from .rope import rope_write, write_pages

__all__ = [
    "add_rms_norm",
    "allocate_latent_pages",
    "allocate_pages",
    "causal_conv",
    "clamped_silu_mul",
    "copy_pages",
    "gated_delta_rule",
    "gated_rms_norm",
    "gelu_mul",
    "grouped_experts",
    "latent_attention",
    "pack_experts",
    "paged_attention",
    "prepare",
    "read_latents",
    "read_pages",
    "rms_norm",
    "rope_write",
    "silu_mul",
    "ssd_scan",
    "swap_in",
    "swap_out",
    "write_latents",
    "write_pages",
]
