"""Timing of work, measured limits, and the roofline."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from chatcache_kernels.cpu import bf16

from chatcache.bench import device as device_module
from chatcache.bench.device import (
    Limits,
    Roofline,
    Timing,
    measure_limits,
    time_with_host,
    time_without_host,
    time_work,
)


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "BUDGET_S", 0.01)
    monkeypatch.setattr(device_module, "MATMUL_SIZE", {"cpu": 64})


def test_limits_floor_is_the_larger_of_both_times() -> None:
    limits = Limits(read_bytes_per_s=10.0, matmul_flops_per_s=100.0, buffer_bytes=1)
    assert limits.floor_s(num_bytes=50, num_flops=100) == 5.0
    assert limits.floor_s(num_bytes=50, num_flops=1000) == 10.0


def test_roofline_counts_weights_kv_and_multiplications() -> None:
    limits = Limits(read_bytes_per_s=1.0, matmul_flops_per_s=1.0, buffer_bytes=1)
    bytes_only = Roofline(limits, step_bytes=100.0, kv_token_bytes=3.0, layer_params=0)
    assert bytes_only.decode_s(4, 10) == 130.0 and bytes_only.prefill_s(8, num_cached=10) == 130.0
    flops_only = Roofline(limits, 0.0, 0.0, layer_params=5, head_params=7, attention_flops=2.0)
    assert flops_only.decode_s(4, 10) == 2 * 4 * (5 + 7)
    assert flops_only.prefill_s(3) == 2 * (3 * 5 + 7) + 2 * (1 + 2 + 3)
    assert flops_only.prefill_s(3, num_cached=10) == 2 * (3 * 5 + 7) + 2 * (11 + 12 + 13)


def test_time_work_reports_seconds_per_call() -> None:
    calls: list[int] = []
    timing = time_work(calls.append, 4, "cpu", repeats=3)
    assert calls[:3] == [0, 1, 2] and calls[3:7] == [0, 1, 2, 3]
    assert 0 <= timing.low_s <= timing.median_s <= timing.high_s < 1 and not timing.graphed
    assert time_with_host(lambda: None, "cpu") < 1


def test_measure_limits_reads_a_buffer_of_the_given_size() -> None:
    limits = measure_limits(3 * 2**20, "float32", "cpu")
    assert limits.buffer_bytes == 3 * 2**20
    assert measure_limits(1, "bfloat16", "cpu").buffer_bytes == device_module.MIN_BUFFER_BYTES
    assert limits.read_bytes_per_s > 0 and limits.matmul_flops_per_s > 0 and limits.copy_bytes_per_s > 0


@pytest.mark.parametrize("has_products", [True, False])
def test_measure_limits_multiplies_bfloat16_as_the_cpu_does(
    has_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[torch.dtype] = []
    monkeypatch.setattr(bf16, "has_bf16_products", lambda: has_products)
    monkeypatch.setattr(device_module, "_time_often", lambda work, device: Timing(1.0, 1.0, 1.0))

    def record(size: int, dtype: torch.dtype, device: str) -> Timing:
        measured.append(dtype)
        return Timing(1.0, 1.0, 1.0)

    monkeypatch.setattr(device_module, "time_matmul", record)
    for dtype in ("bfloat16", "float32"):
        measure_limits(2**20, dtype, "cpu")
    assert measured == [torch.bfloat16 if has_products else torch.float32, torch.float32]


class SleepingGpu:
    """A GPU that sleeps for some cycles; the host needs 1,000 cycles for what it enqueues."""

    awake = False
    lengths: ClassVar[list[int]] = []

    @classmethod
    def sleep(cls, num_cycles: int) -> None:
        cls.lengths.append(num_cycles)
        cls.awake = num_cycles < 1000

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.awake

    def elapsed_time(self, end: SleepingGpu) -> float:
        return 99.0 if self.awake else 8.0


def test_time_without_host_sleeps_longer_than_the_host_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times measured while the GPU waits for the host are dropped."""
    monkeypatch.setattr(device_module, "SLEEP_CYCLES_PER_S", 300e3)  # 300 cycles in the first millisecond
    monkeypatch.setattr(torch.cuda, "_sleep", SleepingGpu.sleep)
    monkeypatch.setattr(torch.cuda, "Event", SleepingGpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls: list[None] = []
    assert time_without_host(lambda: calls.append(None), 0.0, repeats=2) == pytest.approx(2e-3)
    assert SleepingGpu.lengths == [300, 600, 1200, 1200, 1200]
    assert len(calls) == 20
