"""The fake runner's swaps, scores, masks and draws, compared with plain enumeration."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from chatcache.types.actions import DrawSpec, pack_draws
from chatcache.types.plan import NOTHING_LEFT, Rows, Scores, StepPlan, StepResult, edit_table
from tests.support.fake_runner import FakeRunner, fake_capacity, history_of
from tests.support.fake_sampling import log_softmax

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
NONE = np.zeros((0, 3), np.int32)


def fake(vocab_size: int = 50) -> FakeRunner:
    return FakeRunner(fake_capacity(num_pages=16, page_size=4, num_slots=4, num_host_pages=4), vocab_size)


def pairs(*rows: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(rows, np.int32).reshape(-1, len(rows[0]) if rows else 2)


def plan(start: int, tokens: list[int], **fields: object) -> StepPlan:
    """Plan one row in slot 0; its last token is drawn greedily."""
    rows = Rows(pairs((0,))[0], pairs((start,))[0], pairs((len(tokens),))[0], np.array(tokens, np.int32))
    draws = pack_draws([DrawSpec(temperature=0.0)], [0], [start + len(tokens)])
    deltas = {"forks": NONE, "updates": NONE, "copies": pairs()} | fields
    return StepPlan(step=1, rows=rows, draws=draws, **deltas)  # type: ignore[arg-type]


def draw(runner: FakeRunner, *specs: DrawSpec) -> StepResult:
    count = len(specs)
    return runner.draw(pack_draws(list(specs), [0] * count, [9] * count), [history_of(TOKENS)], TOKENS[-1:])


def best_after(tokens: list[int]) -> int:
    return int(np.argmax(fake().logits(history_of(tokens))))


def test_pages_come_back_from_the_host() -> None:
    runner = fake()
    runner.execute(plan(0, TOKENS[:6], updates=pairs((0, 0, 5), (0, 1, 7))))
    # Both pages leave, are overwritten in the same step, and come back to others in the next.
    overwrite = plan(0, [8, 8, 8, 8, 8], swaps_out=pairs((5, 2), (7, 0)))
    runner.execute(overwrite)
    back = plan(6, TOKENS[6:], updates=pairs((0, 0, 9), (0, 1, 3), (0, 2, 4)), swaps_in=pairs((2, 9), (0, 3)))
    assert runner.execute(back).tokens[0, 0] == best_after(TOKENS)


def test_a_page_may_leave_come_back_and_be_copied_in_one_step() -> None:
    runner = fake()
    runner.execute(plan(0, TOKENS[:6], updates=pairs((0, 0, 5), (0, 1, 7))))
    moved = plan(6, TOKENS[6:], updates=pairs((0, 1, 8), (0, 2, 4)),
                 swaps_out=pairs((7, 1)), swaps_in=pairs((1, 6)), copies=pairs((6, 8)))  # fmt: skip
    assert runner.execute(moved).tokens[0, 0] == best_after(TOKENS)


def test_what_was_never_swapped_out_is_poison() -> None:
    runner = fake()
    runner.execute(plan(0, TOKENS[:6], updates=pairs((0, 0, 5), (0, 1, 7))))
    wrong = plan(6, TOKENS[6:], updates=pairs((0, 1, 8), (0, 2, 4)), swaps_in=pairs((1, 8)))
    right = runner.logits(history_of(TOKENS))
    assert runner.execute(wrong).logprobs[0, 0] != log_softmax(right).max()


@pytest.mark.parametrize("cut", [0, 3, 4, 8])
def test_scores_are_the_log_probabilities_of_each_successor(cut: int) -> None:
    runner = fake()
    if cut:
        runner.execute(plan(0, TOKENS[:cut], updates=pairs((0, 0, 5), (0, 1, 7), (0, 2, 1))))
    targets = np.array([*TOKENS[cut + 1 :], -1], np.int32)
    scores = Scores(row=pairs((0,))[0], num_top=pairs((2,))[0], targets=targets)
    result = runner.execute(plan(cut, TOKENS[cut:], updates=pairs((0, 0, 5), (0, 1, 7), (0, 2, 1)), scores=scores))
    assert result.scores is not None and result.score_tokens is not None and result.score_logprobs is not None
    for i, position in enumerate(range(cut, len(TOKENS) - 1)):
        expected = log_softmax(runner.logits(history_of(TOKENS[: position + 1])))
        assert result.scores[i] == expected[TOKENS[position + 1]]
        assert result.score_tokens[i].tolist() == np.argsort(-expected, kind="stable")[:2].tolist()
        assert result.score_logprobs[i].tolist() == np.sort(expected)[::-1][:2].tolist()
    assert np.isnan(result.scores[-1]) and result.score_tokens[-1].tolist() == [-1, -1]


def test_a_mask_leaves_its_tokens_only() -> None:
    runner = fake(vocab_size=70)
    logits = runner.logits(history_of(TOKENS))
    allowed = [5, 33, 41]
    words = np.zeros(2, np.uint32)  # ids 64 .. 69 lie beyond the last word
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    specs = [DrawSpec(temperature=0.0, mask=words), DrawSpec(width=5, temperature=0.0, mask=words),
             *(DrawSpec(seed=seed, mask=words) for seed in range(200))]  # fmt: skip
    result = draw(runner, *specs)
    assert result.tokens[0, 0] == max(allowed, key=lambda token: logits[token])
    assert result.logprobs[0, 0] == log_softmax(logits)[result.tokens[0, 0]], "raw"
    assert set(result.tokens[2:, 0].tolist()) == set(allowed)
    assert set(result.tokens[1, :3].tolist()) == set(allowed) and (result.tokens[1, 3:] == -1).all()
    assert result.logprobs[1, :3].tolist() == log_softmax(logits)[result.tokens[1, :3]].tolist(), "of all the logits"
    nothing = draw(runner, DrawSpec(mask=np.zeros(2, np.uint32)), DrawSpec(temperature=0.0))
    assert nothing.faults == ((0, NOTHING_LEFT),)


def test_draws_without_replacement_follow_the_exact_distribution() -> None:
    runner = fake(vocab_size=6)
    specs = [DrawSpec(width=2, seed=3, lane=lane, temperature=2.0, top_k=4) for lane in range(6000)]
    result = draw(runner, *specs)
    assert result.perturbed is not None
    scaled = log_softmax((runner.logits(history_of(TOKENS)) / np.float32(2.0)).astype(np.float32)).astype(float)
    kept = np.argsort(-scaled)[:4]
    p = dict(zip(kept.tolist(), (np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()).tolist(), strict=True))
    counts = Counter(map(tuple, result.tokens.tolist()))
    for first, second in permutations(p, 2):
        exact = p[first] * p[second] / (1 - p[first])
        assert counts[first, second] / 6000 == pytest.approx(exact, abs=4 * (exact / 6000) ** 0.5 + 1e-3)
    assert sum(counts[pair] for pair in permutations(p, 2)) == 6000
    assert np.exp(result.logprobs[0]) == pytest.approx([p[token] for token in result.tokens[0].tolist()], rel=1e-5)
    assert (np.diff(result.perturbed, axis=1) <= 0).all()
    assert result.raw_logprobs is not None
    raw = log_softmax(runner.logits(history_of(TOKENS)))
    assert result.raw_logprobs[0].tolist() == raw[result.tokens[0]].tolist()


def test_a_distribution_smaller_than_the_width_is_drawn_whole() -> None:
    result = draw(fake(), DrawSpec(width=5, top_k=3), DrawSpec(width=5, temperature=0.0), DrawSpec())
    assert result.perturbed is not None and result.perturbed.shape == (3, 5)
    assert (result.tokens[0] >= 0).tolist() == [True] * 3 + [False] * 2
    assert (result.perturbed[0] > -np.inf).tolist() == [True] * 3 + [False] * 2
    assert (result.perturbed[1:] == -np.inf).all(), "drawn with certainty, or one only"
    ordinary = draw(fake(), DrawSpec(width=3, temperature=0.0))
    assert ordinary.perturbed is not None and ordinary.perturbed.shape == (1, 0)


def test_the_first_of_many_is_the_one_drawn_alone() -> None:
    for lane in range(20):
        spec = {"seed": 7, "lane": lane, "temperature": 0.8, "top_p": 0.9}
        result = draw(fake(), DrawSpec(width=1, **spec), DrawSpec(width=4, **spec))  # type: ignore[arg-type]
        assert result.tokens[0, 0] == result.tokens[1, 0]


def test_edits_beyond_the_vocabulary_change_nothing() -> None:
    runner = fake(vocab_size=10)
    edit = edit_table([-1, 3, 10, 999], 1.0, 90.0)
    result = draw(runner, DrawSpec(temperature=0.0, edit=edit))
    assert result.tokens[0, 0] == 3
