"""Attention, norm, rotary, paging and sampling kernels over a paged KV cache.

The package runs on CPUs (numba) and NVIDIA GPUs (Triton). It computes on tensors and page tables; it does not know
requests, schedulers or models, so it is tested and measured alone. Every backend (`reference`, `cpu`,
`cpu.batch_invariant`, `triton`, `triton.batch_invariant`) is a module with the same functions:

    allocate_pages, write_pages, read_pages, copy_pages, swap_out, swap_in     the page store
    prepare                                                                    plan a step's attention, once a step
    paged_attention                                                            run it, once a layer
    allocate_latent_pages, write_latents, read_latents, latent_attention       the same for layers with latent attention
    rope_write, rms_norm, add_rms_norm, gated_rms_norm                         the other operations of a layer
    silu_mul, gelu_mul, clamped_silu_mul                                       gated activations
    pack_experts, grouped_experts                                              mixture-of-experts layers

Reading order: `types` (the data that all backends share), `reference` (plain torch, the oracle of every kernel),
`work_list` and `prefix_sharing` (split-KV and shared-prefix planning), then `cpu` or `triton`.

KV layout. A page holds the keys and values of `page_size` consecutive tokens of one sequence, for all layers. The slot
of a token is `page * page_size + offset`. The engine reserves page 0 as the null page, which padding is written to.

    sequence   tokens 0 .. 15 | 16 .. 31 | 32 .. 39          page_size = 16
    tables     [      7       |    3     |    12    ]        token 35: page 12, offset 3, slot 12 * 16 + 3

    reference  k, v  [num_layers, num_pages, page_size, num_kv_heads, head_dim]
    triton     k, v  [num_layers, num_pages, num_kv_heads, page_size, head_dim]
    in FP8     reference: head_dim + 4 bytes; triton: [..., num_kv_heads, page_size * (head_dim + 4)], of a head first
               the numbers of all tokens, then their scales; cpu: does not have FP8
    cpu        k     [num_layers, num_pages, num_kv_heads, head_dim, page_size]
               v     [num_layers, num_pages, num_kv_heads, page_size, head_dim]
    host       k, v  [num_host_pages, num_layers, ...]       one page is one transfer; the rest as in the backend

The batch of a step is ragged: the new tokens of all rows (one row per sequence) are concatenated, row r owns tokens
`offsets[r] .. offsets[r + 1] - 1` (`cu_seqlens_q` of FlashAttention, `qo_indptr` of FlashInfer), and `tables` is the
block table of vLLM.

Symbols in shapes and comments inside the kernels (public functions spell them out):

    L num_layers   N num_pages      P page_size     R num_rows               T num_tokens (new tokens of the step)
    H num_heads    Hkv num_kv_heads D head_dim      G = H / Hkv (GQA group)  C rotary_dim / 2
"""
