"""The runner on a GPU: captured steps, real streams, too little memory, and a lost device."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from chatcache_kernels import triton
from chatcache_kernels.types import KVPages
from torch import Tensor

from chatcache.model import static_steps
from chatcache.model.attention import AttentionStep, allocate_stores
from chatcache.model.cuda_graphs import StepGraphs
from chatcache.model.loading.memory_budget import CudaMemoryGauge, measure_budget
from chatcache.model.runner import AsyncLaunch, LaunchedStep, Runner, SwapExecutor, default_async_launch
from chatcache.model.sampling.sampler import Sampler
from chatcache.model.streams import CudaEvent, StreamEvent, make_streams
from chatcache.types.plan import KVCapacity, StepPlan
from tests.model.drive import Driver, make_draws
from tests.model.lives import MAX_LEN, NUM_SLOTS, VOCAB, Life, Reader, live, make_runner

pytestmark = pytest.mark.gpu

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
ROOT = Path(__file__).parents[2]
SLEEP_CYCLES = 400_000_000  # a fifth of a second or more


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield torch.device("cuda", 0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # tests next to this one need memory, too


def keep_busy() -> None:
    """Let the current stream do nothing for a while."""
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]


def overwrite(store: Tensor) -> None:
    store.fill_(torch.nan)


def gpu_runner(ahead: AsyncLaunch | None, network: Reader | None = None) -> Runner:
    return make_runner(ahead, None, triton, network or Reader(device="cuda:0"))


@pytest.mark.parametrize("captured", [True, False])
def test_random_plans_on_the_gpu_equal_the_cpu(
    captured: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random plans with replays, forks, copies, swaps and placeholder tokens."""
    monkeypatch.setattr("chatcache_kernels.work_list.SPLIT_TOKENS", 16)
    monkeypatch.setattr(static_steps, "SPLIT_TOKENS", 16)
    ahead = default_async_launch(device, NUM_SLOTS, MAX_LEN, capturable=captured)
    assert ahead is not None
    runner = gpu_runner(ahead)
    runner.warm_up()
    if captured:
        assert isinstance(runner._static, StepGraphs)
        assert runner._static.num_captured >= len(ahead.sizes)
    outcome = live(make_runner(), runner, Life(np.random.default_rng(SEED), decode_only=0.8), 400)
    assert outcome.differing() is None, f"seed {SEED}"
    assert outcome.num_unseen > 300
    runner.close()


class Slow(Reader):
    """Lets the device think for a while."""

    def _states(self, tokens: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        keep_busy()
        return super()._states(tokens, positions, step)


def test_launch_does_not_wait_for_the_device(device: torch.device) -> None:
    """Two steps are in flight before the first is done.

    Their results equal those of synchronous steps.
    """
    runner, plain = gpu_runner(AsyncLaunch([]), Slow(device="cuda:0")), make_runner()
    runner.warm_up()
    torch.cuda.synchronize()
    launched: list[LaunchedStep] = []
    driver, oracle = Driver(runner), Driver(plain)
    driver.runner = _Launching(runner, launched)  # type: ignore[assignment]
    driver.feed({0: [1, 2, 3]}, make_draws([]))
    mark = CudaEvent(torch.cuda.Event())  # type: ignore[no-untyped-call]
    mark.event.record()
    driver.feed({0: [4]}, make_draws([{"width": 3}]))
    assert not is_done(mark), "the first step was waited for"
    oracle.feed({0: [1, 2, 3]}, make_draws([]))
    want = oracle.feed({0: [4]}, make_draws([{"width": 3}]))
    assert launched[0].result().tokens.size == 0
    assert np.array_equal(launched[1].result().tokens, want.tokens)


def is_done(mark: StreamEvent) -> bool:
    assert isinstance(mark, CudaEvent)
    return bool(mark.event.query())  # type: ignore[no-untyped-call]


class _Launching:
    """Keeps what is launched instead of waiting for it."""

    def __init__(self, runner: Runner, launched: list[LaunchedStep]) -> None:
        self.runner, self.launched = runner, launched

    def capacity(self) -> KVCapacity:
        return self.runner.capacity()

    def execute(self, plan: StepPlan) -> None:
        self.launched.append(self.runner.launch(plan))


def big_pages(device: torch.device) -> KVPages:
    geometry = Reader(device=str(device)).geometry
    (store,) = allocate_stores(triton, geometry, 4096, 16)
    assert isinstance(store, KVPages)
    return store


def test_swapped_pages_hold_what_earlier_steps_wrote(device: torch.device) -> None:
    """The main stream writes swapped-out pages late, and writes them again at once.

    The pages are then swapped in elsewhere.
    """
    pages, streams = big_pages(device), make_streams(device)
    swaps = SwapExecutor(triton, (pages,), 2000, streams)
    want = torch.randn_like(pages.k[:, 1:2001])
    away = np.stack((np.arange(1, 2001), np.arange(2000)), 1).astype(np.int32)
    back = np.stack((np.arange(2000), np.arange(2001, 4001)), 1).astype(np.int32)
    for _ in range(3):
        keep_busy()
        pages.k[:, 1:2001] = want
        pages.v[:, 1:2001] = -want
        swaps.apply(away, away[:0], away[:, 0])
        pages.k[:, 1:2001] = torch.nan
        pages.v[:, 1:2001] = torch.nan
        swaps.apply(away[:0], back)
        got = pages.k[:, 2001:4001].clone(), pages.v[:, 2001:4001].clone()
        pages.k[:, 2001:4001] = torch.nan
        torch.cuda.synchronize()
        assert torch.equal(got[0], want) and torch.equal(got[1], -want)
    swaps.close()


def test_steps_do_not_wait_for_swaps_of_unwritten_pages(device: torch.device) -> None:
    """Swaps run concurrently with the steps of their plan.

    Here they wait for earlier work of the side stream.
    """
    pages, streams = big_pages(device), make_streams(device)
    swaps = SwapExecutor(triton, (pages,), 100, streams)
    away = np.stack((np.arange(1, 101), np.arange(100)), 1).astype(np.int32)
    swaps.apply(away, away[:0])  # compiles
    overwrite(pages.k[:, 200:300])  # loads the kernel, for which the driver waits for the whole device
    torch.cuda.synchronize()
    streams.side.submit(keep_busy)
    swaps.apply(away, away[:0], np.arange(200, 300))
    streams.main.submit(lambda: overwrite(pages.k[:, 200:300]))
    mark = streams.main.record_event()
    mark.wait()
    side = streams.side.record_event()
    assert not is_done(side), "the main stream waited for the side stream"
    swaps.apply(away[:0], away[:0])  # the next plan waits
    streams.main.record_event().wait()
    assert is_done(side)
    swaps.close()


def test_host_pages_are_locked(device: torch.device) -> None:
    swaps = SwapExecutor(triton, (big_pages(device),), 10, make_streams(device))
    assert all(memory.is_pinned() for memory in swaps._host[0].tensors)
    assert swaps.measure_page_s() > 0
    swaps.close()


def test_host_pages_without_close_are_unlocked(device: torch.device) -> None:
    """Else the system gives the same memory again, and it cannot be locked twice."""
    pages = big_pages(device)
    for _ in range(5):
        swaps = SwapExecutor(triton, (pages,), 10, make_streams(device))
        assert swaps.measure_page_s() > 0
        del swaps


def run_apart(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, as little may work there afterwards."""
    code = textwrap.dedent(code).format(root=str(ROOT), kernels=str(ROOT / "kernels"))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)


REFUSED = """
    import sys
    sys.path[:0] = [{root!r}, {kernels!r}]
    import torch
    from chatcache.model.cuda_graphs import CudaCapture

    device = torch.device("cuda", 0)
    x = torch.ones(3, device=device)
    try:
        CudaCapture(device)(lambda: x.sum().item())  # the host waits, which a capture does not allow
    except RuntimeError as error:
        print("REFUSED:", error)
    print("BACK:", torch.cuda.current_stream(device) == torch.cuda.default_stream(device))
    CudaCapture(device)(lambda: x.add_(1))()  # once before the capture, once replayed
    print("THEN:", x.tolist())
"""


def test_failed_capture_restores_the_device() -> None:
    done = run_apart(REFUSED)
    for line in ("REFUSED: ", "BACK: True", "THEN: [3.0, 3.0, 3.0]"):
        assert line in done.stdout, done.stdout + done.stderr[-2000:]


MEMORY_SHARE = 0.05
"""Of the device: the limit of the test that runs out of memory, which leaves the rest to tests of other processes."""


class Hungry(Reader):
    """Takes `share` bytes for each token."""

    share = 0.0

    def _states(self, tokens: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        if self.share:
            torch.empty(int(self.share * len(tokens)), dtype=torch.uint8, device=tokens.device)
        return super()._states(tokens, positions, step)


def test_step_that_does_not_fit_is_split(device: torch.device) -> None:
    network = Hungry(device="cuda:0")
    runner = gpu_runner(AsyncLaunch([]), network)
    runner.warm_up()
    network.sizes.clear()
    torch.cuda.empty_cache()
    limit = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    network.share = (limit - torch.cuda.memory_reserved(device)) * 0.3
    prompts = {0: list(range(9)), 1: [3], 2: list(range(20, 25))}
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, device)
    try:
        got = Driver(runner).feed(prompts)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    want = Driver(make_runner()).feed(prompts)
    assert np.array_equal(got.tokens, want.tokens)
    assert sum(network.sizes) == 15 and max(network.sizes) <= 3, network.sizes


def test_budget_equals_the_memory_of_a_step(device: torch.device) -> None:
    sizes = {"page_size": 8, "max_model_len": MAX_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    network = Hungry(device="cuda:0")
    network.share = float(64 << 20)
    budget = measure_budget(CudaMemoryGauge(device), network, triton, Sampler(VOCAB, device), num_graphs=0, **sizes)
    assert 64 * 64 << 20 <= budget.step_bytes <= 80 * 64 << 20
    assert 0 < budget.kv_bytes < torch.cuda.get_device_properties(device).total_memory


LOST = """
    import sys
    sys.path[:0] = [{root!r}, {kernels!r}]
    import torch
    from chatcache_kernels import triton
    from chatcache.errors import DeviceLostError
    from chatcache.model.runner import AsyncLaunch
    from tests.model.drive import Driver
    from tests.model.lives import Reader, make_runner

    runner = make_runner(AsyncLaunch([]), None, triton, Reader(device="cuda:0"))
    runner.warm_up()
    driver = Driver(runner)
    try:
        driver.feed({{0: [10**6]}})  # no such word: an assertion on the device
    except DeviceLostError as error:
        print("LOST:", error)
    try:
        driver.feed({{1: [1]}})
    except DeviceLostError as error:
        print("AGAIN:", error)
"""


def test_lost_device_is_reported() -> None:
    done = run_apart(LOST)
    assert "LOST: NVIDIA" in done.stdout and "step 0 met: " in done.stdout, done.stdout + done.stderr[-2000:]
    assert "AGAIN: NVIDIA" in done.stdout, done.stdout + done.stderr[-2000:]
