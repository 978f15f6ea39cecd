"""Fused operations of the cpu backend against `reference`; the cache of compiled kernels."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import numba
import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.cpu import experts, fused, launch
from chatcache_kernels.cpu.launch import define_job
from chatcache_kernels.cpu.simd import fetch_add, void_pointer
from chatcache_kernels.types import HeadNorms
from numba import carray
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close_cpu(got: Tensor, expected: Tensor) -> None:
    """Compare up to one rounding of the dtype (the reference rounds once more)."""
    step = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[got.dtype]
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.float(), expected.float(), atol=step, rtol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (33, 48), (7, 20), (0, 32), (300, 128)])
def test_rms_norm_equals_reference(dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = (torch.randn(2, rows, width) * 3).to(dtype).unbind(0)
    weight = torch.randn(width).to(dtype)
    assert_close_cpu(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    normed, summed = cpu.add_rms_norm(x, residual, weight, 1e-3)
    expected, expected_sum = reference.add_rms_norm(x, residual, weight, 1e-3)
    assert_close_cpu(normed, expected)
    assert torch.equal(summed, expected_sum)


def test_norm_with_several_threads_equals_reference() -> None:
    torch.set_num_threads(3)
    x = torch.randn(700, 128)
    assert torch.equal(cpu.silu_mul(x), torch.cat([cpu.silu_mul(row[None]) for row in x]))


def test_rms_norm_of_sliced_heads_equals_reference() -> None:
    qkv = torch.randn(5, 12, 64)
    weight = torch.randn(64)
    assert_close_cpu(cpu.rms_norm(qkv[:, 3:9], weight, 1e-6), reference.rms_norm(qkv[:, 3:9], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (33, 48), (7, 20), (0, 32)])
def test_activations_equal_reference(dtype: torch.dtype, rows: int, width: int) -> None:
    x = (torch.randn(rows, 2 * width) * 4).to(dtype)
    assert_close_cpu(cpu.silu_mul(x), reference.silu_mul(x))
    assert_close_cpu(cpu.gelu_mul(x), reference.gelu_mul(x))
    assert_close_cpu(cpu.clamped_silu_mul(x, 1.702, 3.0), reference.clamped_silu_mul(x, 1.702, 3.0))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_gated_rms_norm_of_a_sliced_gate_equals_reference(dtype: torch.dtype, tokens: int) -> None:
    x, weight = torch.randn(tokens, 3, 32).to(dtype), torch.randn(32)
    gate = (torch.randn(tokens, 200) * 8).to(dtype)[:, 7:103].view(tokens, 3, 32)
    assert_close_cpu(cpu.gated_rms_norm(x, gate, weight, 1e-6), reference.gated_rms_norm(x, gate, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_sigmoid_mul_of_a_sliced_gate_equals_torch(dtype: torch.dtype) -> None:
    x, gate = (torch.randn(5, 96) * 4).to(dtype), (torch.randn(5, 300) * 40).to(dtype)[:, 7:103]
    assert_close_cpu(fused.sigmoid_mul(x, gate), (x.float() * gate.float().sigmoid()).to(dtype))


def test_activations_of_extreme_gates_equal_reference() -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e30]).repeat(2)
    x = torch.cat((gate, torch.ones(16)))[None]
    assert_close_cpu(cpu.silu_mul(x), reference.silu_mul(x))
    assert_close_cpu(cpu.gelu_mul(x), reference.gelu_mul(x))
    assert_close_cpu(cpu.clamped_silu_mul(x, 1.702, 7.0), reference.clamped_silu_mul(x, 1.702, 7.0))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 40), (64, 16), (96, 32), (24, 4), (128, 0)])
@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_rope_write_equals_reference(dtype: torch.dtype, head_dim: int, half: int, page_size: int) -> None:
    tokens, heads, kv_heads = 37, 6, 2
    stores = [b.allocate_pages(2, 9, page_size, kv_heads, head_dim, dtype) for b in (reference, cpu)]
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    angle = torch.randn(tokens, half)
    slots = torch.randperm(9 * page_size)[:tokens]
    turned = []
    for backend, pages in zip((reference, cpu), stores, strict=True):
        turned.append(backend.rope_write(q, k, v, angle.cos(), angle.sin(), pages, 1, slots))
    assert_close_cpu(turned[1], turned[0])
    expected, got = (b.read_pages(p, 1, slots) for b, p in zip((reference, cpu), stores, strict=True))
    assert_close_cpu(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_rope_write_with_float32_norms_equals_float32_reference() -> None:
    """Weights of 1 + w, as Qwen3.5 has them, are not rounded to the type of the activations."""
    q, k, v = torch.randn(3, 5, 2, 64).bfloat16()
    norms, angle = HeadNorms(1 + torch.randn(64) / 100, 1 + torch.randn(64) / 100, 1e-6), torch.randn(5, 16)
    slots, turns = torch.arange(5), (angle.cos(), angle.sin())
    pages = cpu.allocate_pages(1, 1, 16, 2, 64, torch.bfloat16)
    exact = reference.allocate_pages(1, 1, 16, 2, 64, torch.float32)
    got = cpu.rope_write(q, k, v, *turns, pages, 0, slots, norms)
    expected = reference.rope_write(q.float(), k.float(), v.float(), *turns, exact, 0, slots, norms)
    torch.testing.assert_close(got.float(), expected, atol=1e-3, rtol=2**-8)
    torch.testing.assert_close(
        cpu.read_pages(pages, 0, slots)[0].float(), reference.read_pages(exact, 0, slots)[0], atol=1e-3, rtol=2**-8
    )


def test_rope_write_to_pages_of_another_dtype_equals_reference() -> None:
    pages = cpu.allocate_pages(1, 4, 16, 2, 64, torch.bfloat16)
    k, v = torch.randn(2, 5, 2, 64).unbind(0)
    slots = torch.tensor([40, 3, 17, 63, 16], dtype=torch.int32)
    cpu.write_pages(pages, 0, k, v, slots)
    assert torch.equal(torch.stack(cpu.read_pages(pages, 0, slots)), torch.stack((k, v)).bfloat16())
    none = torch.zeros(5, 0)
    cpu.rope_write(k, k, v, none, none, pages, 0, slots)
    assert torch.equal(torch.stack(cpu.read_pages(pages, 0, slots)), torch.stack((k, v)).bfloat16())


COMPILE_SCRIPT = """
import torch
from chatcache_kernels import cpu
from chatcache_kernels.cpu.fused import norm_kernel
x = torch.randn(3, 32)
assert torch.allclose(cpu.rms_norm(x, torch.ones(32), 0.0).square().mean(-1), torch.ones(3))
print(norm_kernel(0, False, 0).compiled.cache_hits)
"""


def run_in_subprocess(**environment: str) -> int:
    """Return the number of kernels that a new process loaded from the cache."""
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_SCRIPT],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_second_process_loads_kernels_from_cache(tmp_path: pathlib.Path) -> None:
    assert run_in_subprocess(NUMBA_CACHE_DIR=str(tmp_path)) == 0
    assert run_in_subprocess(NUMBA_CACHE_DIR=str(tmp_path)) == 1


def test_kernel_that_no_process_would_find_in_the_cache_is_refused() -> None:
    multiply = experts.multiply_tiled

    def kernel(address: Any) -> None:
        multiply(False, address, 0, 0, 0, 0, 0)

    with pytest.raises(TypeError, match="closure"):
        launch.compile_kernel(kernel)


def test_unwritable_cache_folder_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/dev/null/nowhere")
    monkeypatch.setattr(launch, "cache_folder", launch.cache_folder.__wrapped__)

    def kernel(address: Any) -> None:
        fetch_add(void_pointer(carray(address, 1, job)[0].target), 0, 3)

    (job, pack), number = define_job("target"), torch.tensor([4])
    run = launch.compile_kernel(kernel)
    run(pack.pack(0, 0, number.data_ptr()), 1)
    assert number.item() == 7
    assert launch.cache_folder() is None
    assert run.compiled.cache_hits == 0  # type: ignore[attr-defined]
