"""Too little memory: split steps and memory budgets; and lost devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chatcache_kernels import reference

from chatcache.config import EngineConfig, format_size
from chatcache.errors import DeviceLostError, ModelFolderError
from chatcache.model import eager
from chatcache.model.attention import choose_backend
from chatcache.model.device_errors import device_lost_error, is_out_of_memory
from chatcache.model.eager import StepPart, split_step
from chatcache.model.loading.loader import describe_kv_limit, limit_kv_memory, plan_capacity
from chatcache.model.loading.memory_budget import (
    GRAPH_BYTES,
    SLACK_SHARE,
    Budget,
    free_host_bytes,
    measure_budget,
    total_memory_bytes,
)
from chatcache.model.runner import AsyncLaunch, Runner
from chatcache.model.sampling.sampler import Sampler
from chatcache.types.plan import Draws, LogitEdit, LogitMask, Pools, Rows, Scores, StepPlan, StepResult, edit_table
from tests.model.drive import Driver, make_draws
from tests.model.lives import MAX_LEN, VOCAB, Life, Reader, live, make_runner, same

SAMPLER = Sampler(VOCAB, torch.device("cpu"))
SEED = int(os.environ["CHATCACHE_TEST_SEED"])


def short(max_tokens: int) -> tuple[Runner, Reader]:
    """Return a runner whose network has memory for so many tokens."""
    network = Reader(max_tokens)
    return make_runner(network=network), network


def everything(noise: np.random.Generator, runner: Runner) -> StepResult:
    """Run one step with every feature.

    Rows are long and short, undrawn, drawn twice, wide, edited, masked, scored and pooled.
    """
    driver = Driver(runner)
    sizes = [9, 1, 14, 3, 1]
    prompts = {slot: noise.integers(0, VOCAB, size).tolist() for slot, size in enumerate(sizes)}
    specs: list[dict[str, Any]] = [
        {"row": 0, "num_top": 3},
        {"row": 2, "width": 4, "temperature": 1.0, "seed": 5},
        {"row": 1, "temperature": 0.9, "top_p": 0.8},
        {"row": 2, "width": 2, "num_top": 1},
        {"row": 4},
    ]
    edits = [LogitEdit(draw, edit_table([3, 8], 1.0, 9.0)) for draw in (0, 4)]
    words = np.zeros(2, np.uint32)
    words[0] = 0b10110
    masks = [LogitMask(2, words)]
    rows = np.array([0, 2], np.int32)
    scores = Scores(rows, np.array([0, 2], np.int32), noise.integers(-1, VOCAB, 9 + 14).astype(np.int32))
    pools = Pools(np.array([0, 2, 3], np.int32), np.array([1, 12, 3], np.int32))
    return driver.feed(prompts, make_draws(specs, edits, masks), scores, pools)


def equal(got: StepResult, want: StepResult) -> bool:
    """Whether results are the same, scores and pools too."""
    if not same(got, want):
        return False
    for name in ("scores", "score_tokens", "score_logprobs", "pooled"):
        if not np.allclose(getattr(got, name), getattr(want, name), atol=1e-4, equal_nan=True):
            return False
    return True


@pytest.mark.parametrize("max_tokens", [27, 14, 13, 5, 1])
def test_split_step_equals_the_whole_step(max_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    runner, network = short(max_tokens)
    got = everything(np.random.default_rng(SEED), runner)
    assert equal(got, everything(np.random.default_rng(SEED), make_runner())), f"seed {SEED}"
    assert max(size for size in network.sizes if size <= max_tokens) <= max_tokens
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once"
    assert "5 rows and 28 tokens" in caplog.text


@pytest.mark.slow
def test_random_plans_in_split_steps_equal_whole_steps() -> None:
    runner = make_runner(AsyncLaunch([]), network=Reader(4))
    outcome = live(make_runner(), runner, Life(np.random.default_rng(SEED), decode_only=0.5), 60)
    assert outcome.differing() is None, f"seed {SEED}"


def test_single_token_that_does_not_fit_raises_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        everything(np.random.default_rng(SEED), short(0)[0])


def test_injected_wrong_order_of_halves_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the halves in reverse: the second half of a row reads what the first has not written."""

    def backwards(part: StepPart) -> tuple[StepPart, StepPart] | None:
        halves = split_step(part)
        return halves[::-1] if halves is not None else None

    monkeypatch.setattr(eager, "split_step", backwards)
    got = everything(np.random.default_rng(SEED), short(5)[0])
    assert not equal(got, everything(np.random.default_rng(SEED), make_runner())), f"seed {SEED}"


def test_injected_edit_of_the_wrong_draw_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the draw numbers of the whole step in the edits of a half."""
    original = eager._draws

    def lazy(draws: Draws, which: eager.Index, first_row: int) -> Draws:
        cut = original(draws, which, first_row)
        kept = tuple(edit for edit in draws.edits if edit.draw in which and edit.draw < len(which))
        return replace(cut, edits=kept)

    for seed in range(SEED, SEED + 20):  # with some prompts the edited token is not the one that is drawn
        want = everything(np.random.default_rng(seed), make_runner())
        with monkeypatch.context() as patch:
            patch.setattr(eager, "_draws", lazy)
            if not equal(everything(np.random.default_rng(seed), short(14)[0]), want):
                return
    raise AssertionError(f"seeds {SEED} to {SEED + 19}")


# -- the page store ---------------------------------------------------------------------------------------------------


class FakeGauge:
    """A device of `free` bytes where any work takes `peak`."""

    def __init__(self, free: int, peak: int) -> None:
        self.free, self.peak = free, peak

    def free_bytes(self) -> int:
        return self.free

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return self.peak


def budget(network: Reader, free: int = 1 << 30, peak: int = 1 << 20, num_graphs: int = 0, **more: int) -> Budget:
    sizes = {"page_size": 8, "max_model_len": MAX_LEN, "max_num_seqs": 6, "max_num_batched_tokens": 100, **more}
    return measure_budget(FakeGauge(free, peak), network, reference, SAMPLER, num_graphs=num_graphs, **sizes)


def test_measure_budget_runs_the_largest_step() -> None:
    network = Reader()
    found = budget(network)
    assert network.sizes == [100]
    assert found.kv_bytes == int((1 << 30) * (1 - SLACK_SHARE)) - (1 << 20)
    network = Reader()
    budget(network, max_num_batched_tokens=4)
    assert network.sizes == [4], "no more rows than tokens"
    network = Reader()
    budget(network, max_model_len=10)
    assert network.sizes == [60], "no row is longer than a context"


def test_budget_reserves_memory_for_graphs() -> None:
    without, with_graphs = budget(Reader()), budget(Reader(), num_graphs=10)
    assert with_graphs.graph_bytes >= with_graphs.step_bytes + 10 * GRAPH_BYTES
    assert without.kv_bytes - with_graphs.kv_bytes == with_graphs.graph_bytes


def test_no_memory_for_pages_is_reported_with_the_numbers() -> None:
    geometry, config = Reader().geometry, EngineConfig(page_size=8, max_num_seqs=6)
    page_bytes = geometry.page_bytes(8)
    assert plan_capacity(config, geometry, MAX_LEN, Budget(1 << 20, 0, 0)).num_pages == 1 + 6 * 8
    free = int(5 * page_bytes / (1 - SLACK_SHARE)) + 1
    assert plan_capacity(config, geometry, MAX_LEN, Budget(free, 0, 0)).num_pages == 5
    with pytest.raises(
        ModelFolderError, match=r"no memory is left for KV pages on cpu: 3\.00 GiB are free .* 2\.50 GiB"
    ):
        plan_capacity(config, geometry, MAX_LEN, Budget(3 << 30, 5 << 29, 1 << 30))


def test_kv_memory_beyond_the_machine_is_replaced_by_a_share_of_free_memory() -> None:
    config = EngineConfig(kv_memory_bytes=900 << 30, page_size=8)
    assert limit_kv_memory(config, 900 << 30) is config
    limited = limit_kv_memory(config, 23 << 30)
    assert (limited.kv_memory_bytes, limited.page_size) == (None, 8)
    text = describe_kv_limit(900 << 30, 23 << 30, 5 << 28)
    assert text == "kv_memory 900 GiB is more than the 23 GiB of this device: 1.25 GiB are used"
    total = total_memory_bytes(torch.device("cpu"))
    assert free_host_bytes() <= total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_kv_memory_beyond_all_contexts_is_reported_with_the_size_in_use(caplog: pytest.LogCaptureFixture) -> None:
    geometry, page_bytes = Reader().geometry, Reader().geometry.page_bytes(8)
    config = EngineConfig(page_size=8, max_num_seqs=6, kv_memory_bytes=(1 + 6 * 8) * page_bytes)
    assert plan_capacity(config, geometry, MAX_LEN).num_pages == 1 + 6 * 8 and "are used" not in caplog.text
    config = EngineConfig(page_size=8, max_num_seqs=6, kv_memory_bytes=1 << 30)
    assert plan_capacity(config, geometry, MAX_LEN).num_pages == 1 + 6 * 8
    used = format_size((1 + 6 * 8) * page_bytes)
    assert f"kv_memory 1 GiB: {used} of it are used, the size of max_num_seqs 6 contexts of {MAX_LEN}" in caplog.text


# -- the end of a device ----------------------------------------------------------------------------------------------

STICKY = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


def dead() -> None:
    raise torch.AcceleratorError(STICKY)


def alive() -> None:
    pass


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(STICKY),
        RuntimeError(STICKY),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
)
def test_sticky_error_is_a_lost_device(error: Exception) -> None:
    lost = device_lost_error(error, "NVIDIA H200 (cuda:0)", 17, dead)
    assert isinstance(lost, DeviceLostError)
    assert lost.message.startswith("NVIDIA H200 (cuda:0) answers no more; step 17 met: ")
    assert lost.message.endswith("an illegal memory access was encountered"), "one line"
    assert device_lost_error(error, "NVIDIA H200 (cuda:0)", 17, alive) is None, "a launch that was refused"


@pytest.mark.parametrize(
    "error", [ValueError("CUDA error"), RuntimeError("shape mismatch"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_other_errors_are_not_a_lost_device(error: Exception) -> None:
    assert device_lost_error(error, "cuda", 1, dead) is None


def test_is_out_of_memory_recognises_device_errors() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
    assert not is_out_of_memory(torch.AcceleratorError(STICKY))
    assert not is_out_of_memory(RuntimeError("out of memory"))


@pytest.mark.parametrize("ahead", [None, AsyncLaunch([4])])
def test_step_on_a_lost_device_raises_and_is_not_retried(
    ahead: AsyncLaunch | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(Reader):
        broken = False

        def _states(self, *args: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if self.broken:
                self.sizes.append(-1)
                raise torch.AcceleratorError(STICKY)
            return super()._states(*args)  # type: ignore[arg-type]

    network = Breaking()
    runner = make_runner(ahead, network=network)
    runner.warm_up()
    monkeypatch.setattr(runner, "_probe", dead)
    driver = Driver(runner)
    driver.feed({0: [1, 2], 1: [3]})
    network.broken = True
    with pytest.raises(DeviceLostError, match="step 1 met: CUDA error: an illegal memory access") as caught:
        driver.feed({0: [4], 1: [5]})
    assert isinstance(caught.value.__cause__, torch.AcceleratorError)
    assert network.sizes[-2:].count(-1) == 1


# -- backends ---------------------------------------------------------------------------------------------------------


def test_choose_backend_selects_by_device_and_capability(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert choose_backend("auto", cpu)[0] == "cpu"
    with pytest.raises(ModelFolderError, match="'triton' runs on cpu under TRITON_INTERPRET=1 only; choose auto"):
        choose_backend("triton", cpu)
    with pytest.raises(ModelFolderError, match="'cpu' does not run on cuda:0"):
        choose_backend("cpu", gpu)
    with pytest.raises(ModelFolderError, match="does not exist; choose auto or reference or cpu or triton"):
        choose_backend("magic", gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_backend("auto", gpu)[0] == "reference"
    assert "needs compute capability 8.0" in caplog.text
    with pytest.raises(ModelFolderError, match=r"needs compute capability 8\.0"):
        choose_backend("triton", gpu)


def test_split_step_divides_single_token_rows_down_to_one() -> None:
    slot = np.arange(3, dtype=np.int32)
    none = np.zeros((0, 3), np.int32)
    rows = Rows(slot, slot, np.ones(3, np.int32), slot + 7)
    part = StepPart.whole(StepPlan(1, none, none, none[:, :2], rows, make_draws([{"row": 2}, {"row": 0}])))
    halves = split_step(part)
    assert halves is not None
    first, second = halves
    assert (first.rows.tokens.tolist(), second.rows.tokens.tolist()) == ([7], [8, 9])
    assert (first.drawn.tolist(), second.drawn.tolist()) == ([1], [0])
    assert (first.first_token, second.first_token, second.draws.row.tolist()) == (0, 1, [1])
    assert split_step(first) is None
