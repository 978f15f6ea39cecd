"""The operations of `reference` on NVIDIA GPUs, compiled by Triton.

Kernels run on the current stream of the current device, which must be the tensors' device. They compile at their first
call for a model shape (about a second each; Triton caches them on disk); values that vary between steps, such as the
number of tokens, do not compile anew. With `TRITON_INTERPRET=1` in the environment before the first import they run on
CPU tensors, slowly; that is how they are tested without a GPU.

Reading order: `launch` (helpers of all launches), `configs` and `attention`, `latent`, `pages`, `rope`, `fused`,
`fp8`, `experts`, `recurrent`, then `sampling_ops`, `sampling`, `topk_topp` and `ranks`; `invariant_matmul` and
`batch_invariant` for deterministic serving. `variants` lists the launches that tests compile.
"""

from functools import partial

from ..reference import gated_rms_norm
from ..work_list import plan_work
from .attention import paged_attention
from .experts import grouped_experts, pack_experts
from .fused import add_rms_norm, clamped_silu_mul, gelu_mul, rms_norm, silu_mul
from .latent import allocate_latent_pages, latent_attention, read_latents, write_latents
from .pages import allocate_pages, copy_pages, read_pages, swap_in, swap_out, write_pages
from .recurrent import causal_conv, gated_delta_rule, ssd_scan
from .rope import rope_write

prepare = partial(plan_work, by_load=True)

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
