"""Warm-up runs rows of every length that the CPU has a kernel for, so that all are compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chatcache_kernels import cpu
from chatcache_kernels.cpu import attention
from chatcache_kernels.cpu.attention_decode import MAX_DECODE_QUERIES
from chatcache_kernels.cpu.attention_prefill import prefill_attention

from chatcache.model import runner as runner_module
from tests.model.lives import make_runner


def test_warm_up_runs_a_prompt_longer_than_the_decode_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner_module.WARMUP_LONG_TOKENS > MAX_DECODE_QUERIES, "of as many key heads as query heads"
    lengths: set[int] = set()

    def note(q: torch.Tensor, *args: Any) -> None:
        lengths.add(len(q))
        prefill_attention(q, *args)

    monkeypatch.setattr(attention, "prefill_attention", note)
    monkeypatch.setattr(runner_module, "WARMUP_LONG_TOKENS", 24)  # the contexts of these runner_module are short
    monkeypatch.setattr(attention, "MAX_DECODE_QUERIES", 8)
    make_runner(kernels=cpu).warm_up()
    assert 24 in lengths
