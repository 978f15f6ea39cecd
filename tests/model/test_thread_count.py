"""The number of threads of CPU steps on a simulated machine of some cores, with other busy processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from chatcache.bench.drivers import SHAPES, EngineDriver, write_model
from chatcache.config import EngineConfig
from chatcache.factory import build_engine
from chatcache.model.loading import loader
from chatcache.model.thread_count import MAX_HOLD_S, MIN_HOLD_S, WINDOW_S, ThreadCount, read_idle_s, read_run_delay_s
from chatcache.types.request import SamplingParams

STEP_S = 0.02  # CPU seconds of a step


class Machine:
    """Runs steps of `STEP_S` CPU seconds; other processes and threads share the cores equally.

    A static split waits for its slowest thread; a balanced one uses every core that it gets.
    """

    def __init__(self, num_cores: int, *, balanced: bool) -> None:
        self.num_cores, self.balanced = num_cores, balanced
        self.num_others = 0
        self.max_cores = float(num_cores)  # that the work can use
        self.now_s = self.cpu_s = self.delay_s = self.idle_s = 0.0
        self.count = num_cores
        self.size = 1  # of the steps, in STEP_S
        self.counts_idle = True
        self.spins = False  # whether threads use their core while they wait for others
        self.changes: list[int] = []

    def controller(self, *counts: int) -> ThreadCount:
        return ThreadCount(
            counts or tuple(range(1, self.num_cores + 1)),
            lambda: self.count, self.set_threads,
            lambda: self.now_s, lambda: self.cpu_s, lambda: self.delay_s,
            lambda: self.idle_s if self.counts_idle else None,
        )  # fmt: skip

    def set_threads(self, count: int) -> None:
        self.count = count
        self.changes.append(count)

    def run_step(self) -> None:
        """Threads above the free cores share one each with another process."""
        num_shared = max(0, min(self.count, self.count + self.num_others - self.num_cores))
        step_s = STEP_S * self.size
        part_s = step_s / self.count
        if self.balanced:
            share = min(1.0, self.num_cores / (self.count + self.num_others))
            wall_s = step_s / (self.count * share)
            self.delay_s += self.count * (1 - share) * wall_s
        else:
            wall_s = 2 * part_s if num_shared else part_s
            self.delay_s += num_shared * part_s
        wall_s = max(wall_s, step_s / self.max_cores)
        self.now_s += wall_s
        self.cpu_s += wall_s * self.count if self.spins else step_s
        self.idle_s += max(0, self.num_cores - self.num_others - self.count) * wall_s

    def run(self, threads: ThreadCount, seconds: float) -> dict[int, float]:
        """Run steps for so long; return the share of the time with each number of threads."""
        start_s, spent = self.now_s, dict.fromkeys(range(1, self.num_cores + 1), 0.0)
        while self.now_s < start_s + seconds:
            count, before_s = self.count, self.now_s
            with threads.step(self.size):
                self.run_step()
            spent[count] += (self.now_s - before_s) / seconds
        return spent


def test_static_split_next_to_a_busy_process_uses_one_thread_less_and_logs_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "chatcache.model.thread_count")
    machine = Machine(2, balanced=False)
    threads = machine.controller()
    machine.num_others = 1
    machine.run(threads, 4 * WINDOW_S)
    assert machine.count == threads.count == 1
    assert machine.run(threads, 120)[1] > 0.9
    assert [record.getMessage() for record in caplog.records] == [
        "other programs use the CPU: computing with 1 of 2 threads"
    ]


@pytest.mark.parametrize("counts_idle", [True, False])
def test_threads_return_after_the_busy_process_has_ended(counts_idle: bool) -> None:
    machine = Machine(2, balanced=False)
    machine.counts_idle = counts_idle
    threads = machine.controller()
    machine.num_others = 1
    machine.run(threads, 60)
    machine.num_others = 0
    machine.run(threads, MAX_HOLD_S + 2 * WINDOW_S)
    assert threads.count == 2
    assert machine.run(threads, 60)[2] == pytest.approx(1.0, abs=1e-3)


def test_threads_return_even_if_the_work_cannot_use_them() -> None:
    """Work that is mostly serial gets no more cores from more threads; next to no other process that is no reason."""
    machine = Machine(2, balanced=False)
    threads = machine.controller()
    machine.num_others = 1
    machine.run(threads, 60)
    machine.num_others, machine.max_cores = 0, 1.0
    machine.run(threads, MAX_HOLD_S + 3 * WINDOW_S)
    assert threads.count == 2


def test_static_split_on_many_cores_leaves_one_core_to_the_busy_process() -> None:
    machine = Machine(16, balanced=False)
    threads = machine.controller()
    machine.num_others = 1
    machine.run(threads, 30)
    assert machine.run(threads, 60)[15] > 0.9


def test_balanced_work_next_to_a_busy_process_keeps_its_threads() -> None:
    machine = Machine(2, balanced=True)
    threads = machine.controller()
    machine.num_others = 1
    assert machine.run(threads, 120)[2] > 0.95


def test_fewer_threads_that_are_faster_are_kept_however_many_cores_the_others_used() -> None:
    """A thread that waits for one without a core uses its own core, and adds nothing to the speed."""
    machine = Machine(2, balanced=False)
    machine.spins = True
    threads = machine.controller()
    machine.num_others = 1
    machine.run(threads, 4 * WINDOW_S)
    assert machine.run(threads, 120)[1] > 0.95


def test_smaller_steps_of_a_trial_do_not_count_as_faster() -> None:
    machine = Machine(2, balanced=True)
    threads = machine.controller()
    machine.num_others, machine.size = 1, 2
    while machine.count == 2:
        machine.run(threads, STEP_S)
    machine.size = 1
    machine.run(threads, 2 * WINDOW_S)
    assert machine.count == 2


def test_no_more_threads_are_tried_while_no_core_is_idle() -> None:
    machine = Machine(2, balanced=False)
    threads = machine.controller()
    machine.num_others = 1
    machine.run(threads, 4 * WINDOW_S)
    machine.changes.clear()
    machine.run(threads, 60)
    assert machine.changes == []


@pytest.mark.parametrize("balanced", [False, True])
def test_idle_machine_never_changes_the_threads(balanced: bool) -> None:
    machine = Machine(2, balanced=balanced)
    machine.run(machine.controller(), 60)
    assert machine.changes == []


def test_trials_wait_longer_after_each_failure() -> None:
    machine = Machine(2, balanced=True)
    machine.num_others = 1
    machine.run(machine.controller(), 60)
    assert machine.changes.count(1) <= 3 + 60 / MAX_HOLD_S < 60 / MIN_HOLD_S


def test_only_allowed_counts_are_used() -> None:
    machine = Machine(4, balanced=False)
    threads = machine.controller(1, 4)
    machine.num_others = 3
    machine.run(threads, 60)
    assert set(machine.changes) <= {1, 4}
    assert machine.changes


def test_number_set_by_the_application_is_kept() -> None:
    machine = Machine(4, balanced=False)
    threads = machine.controller()
    machine.count, machine.num_others = 3, 2
    machine.run(threads, 60)
    assert machine.changes == []


def test_step_that_raises_is_measured_and_raises() -> None:
    machine = Machine(2, balanced=False)
    with pytest.raises(ValueError, match="plan"), machine.controller().step(1):
        raise ValueError("plan")


def test_run_delay_is_the_sum_over_threads(tmp_path: Path) -> None:
    for name, text in (("1", "5 2000000000 7\n"), ("2", "5 500000000 7\n"), ("3", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "4").mkdir()  # a thread that has ended
    assert read_run_delay_s(tmp_path) == 2.5
    assert read_run_delay_s(tmp_path / "missing") == 0.0


def test_idle_time_is_the_sum_over_the_cpus_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    (tmp_path / "stat").write_text(
        "cpu 9 7 9 600 90 0 0 0 0 0\ncpu0 3 5 3 100 20 0\ncpu1 3 1 3 400 30 0\ncpu2 3 1 3 100 40 0\nintr 1 2 3\n"
    )
    assert read_idle_s(tmp_path / "stat") == 2.66
    (tmp_path / "zero").write_text("cpu0 0 0 0 0 0 0\n")
    (tmp_path / "short").write_text("cpu0 3\n")
    assert [read_idle_s(tmp_path / name) for name in ("zero", "short", "missing")] == [None, None, None]


@pytest.mark.parametrize(("deterministic", "expected"), [(False, (1, 2, 3)), (True, (1, 3))])
def test_engine_measures_every_step(
    deterministic: bool, expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic engines use only the numbers of threads that were checked at the start."""
    made: list[CountingThreads] = []

    class CountingThreads(ThreadCount):
        def __init__(self, counts: Sequence[int]) -> None:
            super().__init__(counts, set_threads=lambda count: None)
            self.counts, self.num_steps = counts, 0
            made.append(self)

        @contextmanager
        def step(self, size: Hashable) -> Iterator[None]:
            self.num_steps += 1
            with super().step(size):
                yield

    monkeypatch.setattr(loader, "ThreadCount", CountingThreads)
    monkeypatch.setattr(loader, "SINGLE_THREAD_BYTES", 0)
    monkeypatch.setattr(loader, "allowed_cpus", lambda: 3)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        write_model(SHAPES["tiny"], tmp_path)
        config = EngineConfig(model=str(tmp_path), kv_memory_bytes=2**22, deterministic=deterministic)
        engine = build_engine(config, need_tokenizer=False)
        driver = EngineDriver(engine)
        driver.run([driver.prompt(8)], SamplingParams(max_tokens=4, ignore_eos=True))
    finally:
        torch.set_num_threads(num_threads)
    (threads,) = made
    assert threads.counts == expected
    assert threads.num_steps >= 4
