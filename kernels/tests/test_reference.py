"""`reference` against independent oracles: torch's SDPA, naive loops, hand-checked cases."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.fp8 import DTYPE as FP8
from chatcache_kernels.types import OS_PAGE_BYTES, AttentionBatch, HostPages, KVPages
from torch import Tensor
from torch.nn import functional as F
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sink: float | None,
) -> list[float]:
    """Attend one query [D] to keys [S, D] at positions 0 .. S - 1, in Python floats."""
    scores = []
    for j in range(k.shape[0]):
        score = scale * sum(float(a) * float(b) for a, b in zip(q, k[j], strict=True))
        if softcap is not None:
            score = softcap * math.tanh(score / softcap)
        visible = j <= position and (window is None or j > position - window)
        scores.append(score if visible else None)
    exponentials = [math.exp(s) if s is not None else 0.0 for s in scores]
    total = sum(exponentials) + (math.exp(sink) if sink is not None else 0.0)
    return [sum(e * float(v[j, d]) for j, e in enumerate(exponentials)) / total for d in range(v.shape[1])]


def build_row(
    context: int, new: int, page_size: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[KVPages, AttentionBatch, Tensor, Tensor, Tensor]:
    """Return a store with one row of `context` tokens in shuffled pages, its batch, q, k and v."""
    num_pages = -(-context // page_size) + 3
    pages = reference.allocate_pages(2, num_pages, page_size, kv_heads, head_dim, torch.float32)
    table = torch.randperm(num_pages - 1)[None, : -(-context // page_size)].int() + 1
    k, v = torch.randn(2, context, kv_heads, head_dim).unbind(0)
    whole = AttentionBatch.build(table, torch.tensor([0]), torch.tensor([context]), page_size)
    reference.write_pages(pages, 1, k, v, whole.slots)
    batch = AttentionBatch.build(table, torch.tensor([context - new]), torch.tensor([new]), page_size)
    return pages, batch, torch.randn(new, heads, head_dim), k, v


@pytest.mark.parametrize(("context", "new"), [(40, 40), (40, 1), (33, 17)])
def test_attention_equals_torch_sdpa(context: int, new: int) -> None:
    pages, batch, q, k, v = build_row(context, new, 8, 6, 2, 32)
    got = reference.paged_attention(q, pages, 1, batch, 0.2)
    mask = torch.ones(context, context).tril().bool()[context - new :]
    expected = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask, scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(got, expected[0].transpose(0, 1))


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_equals_naive_loops(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    pages, batch, q, k, v = build_row(11, 3, 4, 4, 2, 8)
    sinks = torch.randn(4) if with_sinks else None
    got = reference.paged_attention(q, pages, 1, batch, 0.5, window, softcap, sinks)
    for token in range(3):
        for head in range(4):
            sink = float(sinks[head]) if sinks is not None else None
            expected = naive_attention(
                q[token, head], k[:, head // 2], v[:, head // 2], 8 + token, 0.5, window, softcap, sink
            )
            torch.testing.assert_close(got[token, head], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_batch_build_slots_follow_the_page_table() -> None:
    tables = torch.tensor([[5, 2, 9], [7, 0, 0]], dtype=torch.int32)
    batch = AttentionBatch.build(tables, torch.tensor([3, 1]), torch.tensor([6, 2]), 4)
    assert batch.offsets.tolist() == [0, 6, 8]
    assert batch.slots.tolist() == [23, 8, 9, 10, 11, 36, 29, 30]
    assert (batch.max_new_tokens, batch.max_context_tokens) == (6, 9)


def test_batch_build_without_rows_is_empty() -> None:
    batch = AttentionBatch.build(torch.zeros(0, 3), torch.zeros(0), torch.zeros(0), 4)
    assert batch.slots.numel() == 0
    pages = reference.allocate_pages(1, 2, 4, 1, 8, torch.float32)
    assert reference.paged_attention(torch.empty(0, 2, 8), pages, 0, batch, 1.0).shape == (0, 2, 8)


def test_copied_pages_hold_the_same_tokens_in_every_layer() -> None:
    pages = reference.allocate_pages(3, 6, 4, 2, 8, torch.bfloat16)
    pages.k.normal_(), pages.v.normal_()
    before = pages.k.clone(), pages.v.clone()
    reference.copy_pages(pages, torch.tensor([[1, 4], [2, 5], [1, 3]], dtype=torch.int32))
    for old, new in zip(before, (pages.k, pages.v), strict=True):
        assert torch.equal(new, old[:, [0, 1, 2, 1, 1, 2]])


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("shape", [(16, 2, 64), (8, 3, 24), (4, 1, 6)], ids=["wide", "narrow", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swap_out_and_in_restores_pages_bit_identically(
    backend: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Preserve every bit pattern, including NaN, and change only the named pages."""
    pages = backend.allocate_pages(3, 9, *shape, dtype)
    for store in (pages.k, pages.v):
        store.view(torch.int32).random_(-(2**31), 2**31 - 1)
    before = pages.k.view(torch.int32).clone(), pages.v.view(torch.int32).clone()
    host = HostPages.allocate(pages, 5)
    for store in host.tensors:
        store.view(torch.int32).fill_(77)
    backend.swap_out(pages, host, torch.tensor([[3, 4], [8, 0], [1, 2]], dtype=torch.int32))
    assert all((store.view(torch.int32)[[1, 3]] == 77).all() for store in host.tensors)
    backend.swap_in(pages, host, torch.tensor([[4, 1], [0, 8], [2, 7], [2, 5]], dtype=torch.int32))
    for old, store in zip(before, (pages.k, pages.v), strict=True):
        assert torch.equal(store.view(torch.int32), old[:, [0, 3, 2, 3, 4, 1, 6, 1, 8]])


def test_fp8_pages_return_numbers_within_their_precision() -> None:
    """A number has 3 bits after the first, and the smallest ones are spaced by 2^-9 of a scale."""
    pages = reference.allocate_pages(2, 4, 8, 3, 64, FP8)
    k, v = torch.randn(2, 10, 3, 64).unbind(0)
    k[3, 1], v[4] = 0, 1e5 * v[4]
    slots = torch.randperm(32)[:10]
    reference.write_pages(pages, 1, k, v, slots)
    for got, x in zip(reference.read_pages(pages, 1, slots), (k, v), strict=True):
        scale = x.abs().amax(-1, keepdim=True) / 448
        assert ((got - x).abs() <= torch.maximum(x.abs() / 16, scale / 1024) * 1.0001).all()
        assert (got - x).abs().max() > 0
    assert not reference.read_pages(pages, 0, slots)[0].any()
    assert pages.page_bytes == 2 * 2 * 8 * 3 * (64 + 4) and pages.num_bytes == pages.k.nbytes + pages.v.nbytes


def test_page_store_reports_its_bytes() -> None:
    pages = reference.allocate_pages(3, 5, 4, 2, 8, torch.bfloat16)
    assert pages.page_bytes == 2 * 3 * 4 * 2 * 8 * 2
    assert pages.num_bytes == pages.k.nbytes + pages.v.nbytes


def test_rms_norm_equals_torch() -> None:
    x, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.rms_norm(x + residual, (48,), weight, 1e-5))


def test_silu_mul_equals_torch() -> None:
    x = torch.randn(5, 48)
    torch.testing.assert_close(reference.silu_mul(x), F.silu(x[:, :24]) * x[:, 24:])


def test_gelu_mul_equals_torch() -> None:
    x = torch.randn(5, 48) * 4
    torch.testing.assert_close(reference.gelu_mul(x), F.gelu(x[:, :24], approximate="tanh") * x[:, 24:])


def test_clamped_silu_mul_equals_the_activation_of_gpt_oss() -> None:
    """transformers stores gates and ups in turn."""
    config = GptOssConfig(num_local_experts=1, hidden_size=8, intermediate_size=24, swiglu_limit=3.0)
    experts, x = GptOssExperts(config), torch.randn(5, 48) * 4
    want = experts._apply_gate(torch.stack((x[:, :24], x[:, 24:]), -1).flatten(1))
    torch.testing.assert_close(reference.clamped_silu_mul(x, experts.alpha, 3.0), want)


def test_rope_equals_complex_rotation() -> None:
    x, angle = torch.randn(3, 2, 12), torch.randn(3, 4)
    got = reference.rope(x, angle.cos(), angle.sin())
    turned = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones(3, 1, 4), angle[:, None])
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag, x[..., 8:]), dim=-1))


@pytest.mark.parametrize("num_pages", [0, 1, 7])
def test_host_pages_share_no_os_page(num_pages: int) -> None:
    """Memory is pinned by OS page; two stores on one page could not both be pinned."""
    pages = reference.allocate_pages(2, 3, 8, 1, 16, torch.bfloat16)
    host = HostPages.allocate(pages, num_pages)
    spans = [(store.data_ptr(), store.data_ptr() + store.numel() * store.element_size()) for store in host.tensors]
    assert host.tensors[0].shape == (num_pages, 2, 8, 1, 16) and host.tensors[0].dtype == torch.bfloat16
    if num_pages:
        assert all(first % OS_PAGE_BYTES == 0 for first, _ in spans)
        used = [set(range(first // OS_PAGE_BYTES, -(-end // OS_PAGE_BYTES))) for first, end in spans]
        assert used[0].isdisjoint(used[1])
