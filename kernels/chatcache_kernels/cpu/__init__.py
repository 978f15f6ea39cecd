"""The operations of `reference` on CPUs, compiled by numba: no compiler is needed on the user's machine.

    attention.py  paged_attention: which kernel computes which row
    decode.py     rows of few new tokens: pages read in place
    shared.py     the same where rows share pages: each page read once for all of them
    piece.py      what both do with a run of keys; tile.py is its inner loop
    flash.py      rows of many new tokens in bf16, by the CPU's matrix tiles: flash_block.py, softmax.py between them
    prefill.py    the same on other CPUs and in other dtypes: pages gathered, then torch's matrix multiplications
    pages.py      the page store: layout, reads, copies, swaps
    rope.py       rotation and page write in one pass
    invariant.py  the same operations, of which no bit depends on batch, chunk or threads
    logits.py     draws: noise, temperature, the best token; noise.py is their arithmetic
    fused.py      norms and the activation in one pass each
    vectors.py    registers of float32 for numba; llvm.py is what they are written with
    launch.py     compile once per machine, run on torch's threads
    matmul.py     linear layers of few tokens; amx.py and pairs.py are the CPU's instructions for them
    int8.py       the same with weights of 8 bits: codes.py packs them, widen.py widens them
    decoder.py    a step of few tokens through a whole model, by program.py: many kernels in one launch; rows.py

Activations may be float32, bfloat16 or float16, and so may pages, independently. Shapes that fit no register (a head
size that 8 does not divide) are computed by torch. Kernels compile at their first call (seconds, once per machine);
later processes load them in tens of milliseconds.
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
