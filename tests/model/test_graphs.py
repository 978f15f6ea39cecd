"""Decode steps in fixed buffers equal eager execution, and injected bugs are detected.

The steps are padded, stale, growing and shrinking.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from chatcache_kernels.work_list import plan_work

from chatcache.model import cuda_graphs, static_steps
from chatcache.model.cuda_graphs import StepGraphs, capture_sizes
from chatcache.model.eager import EagerRunner, Finish
from chatcache.model.page_tables import DeviceSlots
from chatcache.model.runner import AsyncLaunch
from chatcache.model.sampling.sampler import Sampler
from chatcache.model.static_steps import AttentionLaunches, Replay, StepSize, WorkListBuffers, no_changes
from chatcache.types.plan import PENDING_TOKEN, LogitEdit, LogitMask, Rows, Scores, StepPlan, edit_table
from tests.model import listed
from tests.model.drive import make_draws
from tests.model.lazy_streams import lazy_streams
from tests.model.lives import MAX_LEN, NUM_SLOTS, SIZE, VOCAB, Life, Outcome, Reader, live, make_runner, same

SEED = int(os.environ["CHATCACHE_TEST_SEED"])


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut attention every 16 keys rather than 512, so that short lives have long work lists."""
    monkeypatch.setattr("chatcache_kernels.work_list.SPLIT_TOKENS", 16)
    monkeypatch.setattr(static_steps, "SPLIT_TOKENS", 16)


class Counting:
    """A capture that counts replays by size."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, work: Replay) -> Replay:
        def replay() -> None:
            self.num_replays += 1
            work()

        return replay


def run(
    kernels: Any = listed, sizes: list[int] | None = None, steps: int = 120, prompt_sizes: Sequence[int] = ()
) -> tuple[Outcome, int]:
    """Return what came of a life of mostly decode steps, and how many steps were replayed."""
    noise = np.random.default_rng(SEED)
    counting = Counting()
    ahead = AsyncLaunch(capture_sizes(NUM_SLOTS) if sizes is None else sizes, counting, prompt_sizes)
    runner = make_runner(ahead, lazy_streams(False, False), kernels)
    runner.warm_up()
    outcome = live(make_runner(), runner, Life(noise, decode_only=0.4 if prompt_sizes else 0.85), steps)
    return outcome, counting.num_replays


@pytest.mark.parametrize(
    "sizes", [None, pytest.param([5], marks=pytest.mark.slow), pytest.param([2, 8], marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_replayed_steps_equal_eager_execution(sizes: list[int] | None) -> None:
    """Sizes that fit, one that most steps fill up or exceed, and two."""
    outcome, num_replays = run(sizes=sizes)
    assert outcome.differing() is None, f"seed {SEED}"
    assert num_replays > 20


@pytest.mark.parametrize("prompt_sizes", [(16, 32, 48, 64), pytest.param((40,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["listed", pytest.param("reference", marks=pytest.mark.slow)])
def test_replayed_steps_with_prompts_equal_eager_execution(
    prompt_sizes: Sequence[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, chunks of them, and rows that decode, padded to the next number of tokens."""
    from chatcache_kernels import reference

    filled: list[int] = []

    def fill(inputs: Any, rows: Rows, *args: Any) -> None:
        filled.append(len(rows.tokens))
        fill_prompt_rows(inputs, rows, *args)

    monkeypatch.setattr(cuda_graphs, "fill_prompt_rows", fill)
    kernels = {"listed": listed, "reference": reference}[name]
    outcome, _ = run(kernels, sizes=[2], prompt_sizes=prompt_sizes)
    assert outcome.differing() is None, f"seed {SEED}"
    assert len(filled) > 10 and max(filled) <= max(prompt_sizes), f"seed {SEED}"


@pytest.mark.slow
def test_backend_without_work_lists_is_replayed() -> None:
    from chatcache_kernels import reference

    outcome, num_replays = run(reference)
    assert outcome.differing() is None, f"seed {SEED}"
    assert num_replays > 20


# -- injected bugs ------------------------------------------------------------------------------------------------


def is_broken() -> bool:
    """Whether a life goes wrong: other results, or numbers that no step can mean."""
    try:
        return run()[0].differing() is not None
    except (AssertionError, IndexError):
        return True


def leave_cells(given: Any, rows: Any, cells: Any, changes: Any, slots: DeviceSlots) -> None:
    """Make padding rows write to the cells of the last step's rows."""
    before = given["cells"].copy()
    fill_rows(given, rows, cells, changes, slots)
    given["cells"][len(cells) :] = before[len(cells) :]


def stale_tokens(given: Any, rows: Any, cells: Any, changes: Any, slots: DeviceSlots) -> None:
    """Take a token that the host has not received from the old buffer."""
    before = given["tokens"].copy()
    fill_rows(given, rows, cells, changes, slots)
    unseen = given["tokens"] < 0
    given["tokens"][unseen] = np.maximum(before[unseen], 0)


def forget_changes(given: Any, rows: Any, cells: Any, changes: Any, slots: DeviceSlots) -> None:
    """Send only the first changed cell to the mirror."""
    fill_rows(given, rows, cells, replace(changes, at=changes.at[:1], pages=changes.pages[:1]), slots)


fill_rows = static_steps.fill_rows


@pytest.mark.parametrize("bug", [leave_cells, stale_tokens, forget_changes])
@pytest.mark.slow
def test_injected_stale_input_is_detected(bug: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "fill_rows", bug)
    assert is_broken(), f"seed {SEED}"


def leave_prompt_cells(given: Any, rows: Any, layout: Any, changes: Any, slots: DeviceSlots) -> None:
    """Make padding tokens write to the cells of the last step's tokens."""
    before = given["cells"].copy()
    fill_prompt_rows(given, rows, layout, changes, slots)
    given["cells"][len(rows.tokens) :] = before[len(rows.tokens) :]


def shift_last_tokens(given: Any, rows: Any, layout: Any, changes: Any, slots: DeviceSlots) -> None:
    """Draw after the token before the last one of each row."""
    fill_prompt_rows(given, rows, layout, changes, slots)
    given["last"][:] = np.maximum(given["last"] - 1, 0)


fill_prompt_rows = static_steps.fill_prompt_rows


@pytest.mark.parametrize("bug", [leave_prompt_cells, shift_last_tokens])
@pytest.mark.slow
def test_injected_stale_input_of_prompts_is_detected(bug: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "fill_prompt_rows", bug)
    try:
        outcome, _ = run(sizes=[2], prompt_sizes=(16, 32, 64))
        assert outcome.differing() is not None, f"seed {SEED}"
    except IndexError:
        return


def test_injected_single_host_buffer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step's numbers overwrite those that the device has not read yet."""
    monkeypatch.setattr(cuda_graphs, "NUM_HOST_BUFFERS", 1)
    assert is_broken(), f"seed {SEED}"


@pytest.mark.slow
def test_injected_wrong_slot_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EagerRunner.draw

    def draw(self: EagerRunner, plan: StepPlan, logits: torch.Tensor) -> Finish:
        return original(self, replace(plan, rows=replace(plan.rows, slot=np.roll(plan.rows.slot, 1))), logits)

    monkeypatch.setattr(EagerRunner, "draw", draw)
    assert is_broken(), f"seed {SEED}"


@pytest.mark.slow
def test_injected_logits_of_another_row_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EagerRunner.draw
    monkeypatch.setattr(EagerRunner, "draw", lambda self, plan, logits: original(self, plan, logits.roll(1, 0)))
    assert is_broken(), f"seed {SEED}"


def test_injected_stale_work_items_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of the step before are carried out again, and may be the last to write."""
    fill = WorkListBuffers.fill

    def leave_more(self: WorkListBuffers, given: Any, work: Any, count: int) -> AttentionLaunches | None:
        before = given[f"{self.prefix}num_items"].copy()
        launches = fill(self, given, work, count)
        items = given[f"{self.prefix}num_items"]
        np.maximum(items, before, out=items)
        return launches

    monkeypatch.setattr(WorkListBuffers, "fill", leave_more)
    assert is_broken(), f"seed {SEED}"


# -- what is captured ---------------------------------------------------------------------------------------------


def test_capture_sizes_are_dense_and_end_at_the_maximum() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    sizes = capture_sizes(1024)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24] and sizes[-1] == 1024
    assert all(b - a <= max(8, a // 8) for a, b in pairwise(sizes))


def plan_of(tokens: list[int], **draw: Any) -> StepPlan:
    count, none = len(tokens), np.zeros((0, 3), np.int32)
    slot = np.arange(count, dtype=np.int32)
    rows = Rows(slot, slot + 1, np.ones(count, np.int32), np.array(tokens, np.int32))
    return StepPlan(1, none, none, none[:, :2], rows, make_draws([{"row": row, **draw} for row in range(count)]))


def is_replayed(plan: StepPlan) -> bool:
    runner = make_runner(AsyncLaunch([1, 4]))
    runner.warm_up()
    runner._tables.rows[:] = 1
    assert runner._static is not None
    return runner._static.fill_decode(plan, no_changes()) is not None


def test_steps_of_single_tokens_are_replayed_whatever_they_draw() -> None:
    plan = plan_of([1, 2, PENDING_TOKEN])
    assert is_replayed(plan) and not is_replayed(plan_of([])) and not is_replayed(plan_of([1] * 5))
    assert is_replayed(plan_of([1, 2], width=2, num_top=3, top_p=0.5))
    edit = LogitEdit(0, edit_table([0], 1.0, 1.0))
    mask = LogitMask(0, np.full(2, 7, np.uint32))
    assert is_replayed(replace(plan, draws=replace(plan.draws, edits=(edit,), masks=(mask,))))
    assert is_replayed(replace(plan, draws=make_draws([{"row": row} for row in (0, 1, 1)])))
    assert is_replayed(replace(plan, draws=make_draws([])))
    rows = plan.rows
    longer = replace(
        rows, num_tokens=rows.num_tokens + np.array([0, 0, 1], np.int32), tokens=np.arange(4, dtype=np.int32)
    )
    assert not is_replayed(replace(plan, rows=longer))
    zero = np.zeros(1, np.int32)
    assert not is_replayed(replace(plan, scores=Scores(zero, zero, zero)))


def test_short_contexts_replay_a_step_without_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over at most SPLIT_TOKENS keys has nothing to merge, and the step then launches no merge."""
    merged: list[int] = []

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        merged.append(len(args[3].work.merge_tokens))
        return paged_attention(*args, **options)

    paged_attention = listed.paged_attention
    monkeypatch.setattr(listed, "paged_attention", attend)
    runner, plain = make_runner(AsyncLaunch([2, 16]), kernels=listed), make_runner(kernels=listed)
    runner.warm_up()
    assert runner._static is not None and runner.captured_steps == (6, 6)
    for count, start, expected in ((2, 15, False), (2, 16, True), (9, 15, False)):
        plan = plan_of([1] * count)
        updates = np.array([(slot, page, 1 + 3 * slot + page) for slot in range(count) for page in range(3)], np.int32)
        plan = replace(plan, updates=updates, rows=replace(plan.rows, start=np.full(count, start, np.int32)))
        del merged[:]
        found = runner.execute(plan)
        assert {num > 0 for num in merged} == {expected}
        np.testing.assert_allclose(found.logprobs, plain.execute(plan).logprobs, atol=1e-5)


def test_table_changes_beyond_the_buffer_are_applied_before_the_replay() -> None:
    counting = Counting()
    runner = make_runner(AsyncLaunch([1], counting))
    runner.warm_up()
    assert runner._static is not None
    updates = np.array([(0, 0, 3), (1, 0, 4), (2, 1, 6)], np.int32)
    runner.execute(replace(plan_of([5]), updates=updates))
    tables = runner._static._slots.tables.reshape(-1, runner._static._slots.max_pages)
    assert counting.num_replays == 1 and [int(tables[slot, index]) for slot, index, _ in updates] == [3, 4, 6]


def test_draws_of_a_replayed_step_that_do_not_fit_memory_run_in_halves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, sizes = Sampler.enqueue, list[int]()

    def enqueue(self: Sampler, logits: Any, index: Any, *args: Any) -> Any:
        sizes.append(len(index))
        if len(index) > 2:
            raise torch.OutOfMemoryError(f"{len(index)} draws")
        return original(self, logits, index, *args)

    rng = np.random.default_rng(SEED)
    logits = torch.from_numpy(rng.standard_normal((3, VOCAB), np.float32))
    plan = plan_of([1, 2, 3], temperature=1.0)
    draws = make_draws([{"row": row, "temperature": 1.0, "num_top": row} for row in (0, 1, 1, 2, 2)])
    masks = (LogitMask(3, np.array([8, 0], np.uint32)),)
    plan = replace(plan, draws=replace(draws, masks=masks))
    runner = make_runner(AsyncLaunch([4]))
    whole = runner._eager.draw(plan, logits)()
    monkeypatch.setattr(Sampler, "enqueue", enqueue)
    assert same(runner._eager.draw(plan, logits)(), whole) and sizes == [5, 3, 2, 1, 2]
    assert whole.tokens[3, 0] == 3 and "run in halves" in caplog.text


def test_work_list_larger_than_the_buffers_does_not_fit() -> None:
    rng = np.random.default_rng(SEED)
    tables = rng.integers(1, 30, (6, MAX_LEN // SIZE)).astype(np.int32)
    start = np.full(6, MAX_LEN - 1, np.int32)
    work = plan_work(tables, start, np.ones(6, np.int32), SIZE, 1, share="never")
    whole = WorkListBuffers.sized_for(StepSize.decode(8), 1, MAX_LEN, 10**6)
    arrays = {name: np.full(shape, -7, kind) for name, (kind, shape) in whole.specs().items()}
    assert whole.fill(arrays, work, 6) == AttentionLaunches(1, has_merges=True)
    assert arrays["num_items"][0, 0] == len(work.lists[0].items) + 1  # one of two padding tokens
    for short in (replace(whole, num_items=24), replace(whole, num_states=23), replace(whole, heights=(3,))):
        assert short.fill({name: array.copy() for name, array in arrays.items()}, work, 6) is None


@pytest.mark.parametrize("length", [300, 600, 2000, 5000])
def test_work_list_by_load_fits_the_buffers(length: int) -> None:
    """Without shared pages, whatever the lengths of the rows."""
    rng = np.random.default_rng(SEED)
    for size in (1, 2, 7, 40):
        buffers = WorkListBuffers.sized_for(StepSize.decode(size), 1, length, size * length)
        start = rng.integers(0, length, size).astype(np.int32)
        tables = np.arange(size * length, dtype=np.int32).reshape(size, length)
        work = plan_work(tables, start, np.ones(size, np.int32), 1, 1, by_load=True)
        arrays = {name: np.zeros(shape, kind) for name, (kind, shape) in buffers.specs().items()}
        assert buffers.fill(arrays, work, size) is not None, f"seed {SEED}"


@pytest.mark.slow
def test_step_that_does_not_fit_the_buffers_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    original = WorkListBuffers.sized_for
    _, num_plain = run()
    monkeypatch.setattr(
        WorkListBuffers, "sized_for", lambda *args: replace(original(*args), num_items=14, num_states=6)
    )
    outcome, num_replays = run()
    assert outcome.differing() is None, f"seed {SEED}"
    assert 0 < num_replays < num_plain, f"seed {SEED}"


def test_step_that_does_not_fit_memory_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    class Small(Counting):
        def __call__(self, work: Replay) -> Replay:
            if not self.num_replays:
                self.num_replays = 1
                raise torch.OutOfMemoryError("a graph")
            return super().__call__(work)

    runner = make_runner(AsyncLaunch([1, 4], Small()))
    said: list[tuple[float, str]] = []
    runner.warm_up(lambda fraction, what: said.append((fraction, what)))
    assert isinstance(runner._static, StepGraphs) and runner._static.num_captured == 1
    assert runner.captured_steps == (1, 2)
    assert "decode step of 4 rows" in caplog.text
    assert [what for _, what in said] == ["decode step of 4 rows", "decode step of 1 rows"]
    assert said[0][0] == 0 and said[1][0] == 0.5


def test_steps_that_cannot_be_captured_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(work: Replay) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of this")

    runner = make_runner(AsyncLaunch([1, 4], refuse))
    runner.warm_up()
    assert "slower: operation not permitted when stream is capturing" in caplog.text
    assert len(caplog.records) == 1
    assert live(make_runner(), runner, Life(np.random.default_rng(SEED)), 20).differing() is None, f"seed {SEED}"


def test_decode_steps_are_captured_after_steps_with_prompts_failed(caplog: pytest.LogCaptureFixture) -> None:
    """Prompts are captured first, as they are the largest steps."""
    num_tried = 0

    def refuse_first(work: Replay) -> Replay:
        nonlocal num_tried
        num_tried += 1
        if num_tried == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return work

    runner = make_runner(AsyncLaunch([1, 4], refuse_first, prompt_sizes=(16, 32)))
    runner.warm_up()
    assert runner.captured_steps == (2, 4)
    assert num_tried == 3, "no more steps with prompts"
    assert "steps with prompts cannot be captured and will be slower" in caplog.text


@pytest.mark.parametrize("prompt_sizes", [(), (16,)])
def test_warm_up_times_no_prompts_longer_than_the_captured_ones(prompt_sizes: Sequence[int]) -> None:
    """A longer prompt may need more memory than any step that the scheduler plans."""
    sizes = []
    for limits_prompts in (False, True):
        network = Reader()
        ahead = AsyncLaunch([1, 4], prompt_sizes=prompt_sizes, limits_prompts=limits_prompts)
        make_runner(ahead, network=network).warm_up()
        sizes.append(Counter(network.sizes))
    assert max(sizes[1] - sizes[0], default=0) <= max(prompt_sizes, default=0)


def test_padding_rows_compute_finite_numbers() -> None:
    """Padding rows compute numbers whatever memory held, so that no nan can spread from them."""
    seen: list[torch.Tensor] = []

    class Watching(Reader):
        def _head(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return super()._head(x)

    runner = make_runner(AsyncLaunch([4]), kernels=listed, network=Watching())
    runner.warm_up()
    del seen[:]
    update = np.array([(0, 0, 3)], np.int32)
    plan = plan_of([5])
    runner.execute(replace(plan, updates=update, rows=replace(plan.rows, start=plan.rows.start * 0)))
    assert [x.shape[0] for x in seen] == [4]
    assert torch.isfinite(seen[0]).all()
