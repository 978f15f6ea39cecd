"""The operations of `reference` on NVIDIA GPUs, compiled by Triton.

    attention.py   paged attention: one kernel over the items of a work list; tiles.py is its inner loop
    merge.py       a token's partial states become its output
    configs.py     how attention is launched: tiles, warps, stages, by chip
    pages.py       the page store: layout, reads, writes, copies
    swap.py        pages to host memory and back
    rope.py        head norms, rotation and page write in one launch
    norm.py        RMSNorm, alone and after an addition
    activation.py  the gated activation
    sampling.py    tokens and candidates drawn from logits; sampling_*.py are its kernels
    rounding.py    one cast that rounds alike on GPUs and in the interpreter
    launch.py      what all launches share
    variants.py    which forms of the kernels models launch, to compile them all in tests

Kernels run on the current stream of the current device, which must be the tensors' device. They compile at their first
call for a shape of model (about a second each; Triton keeps them on disk); nothing that varies between steps, such as
the number of tokens, compiles anew. With `TRITON_INTERPRET=1` in the environment before the first import they run on
CPU tensors instead, slowly, which is how they are tested where there is no GPU.
"""

from ..work_list import plan_work as prepare
from .attention import paged_attention
from .fused import add_rms_norm, rms_norm, silu_mul
from .pages import allocate_pages, copy_pages, read_pages, swap_in, swap_out, write_pages
from .rope import rope_write

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
