"""The fake runner: pages matter, chunk sizes do not, and draws follow the contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from chatcache.types.actions import DrawSpec, pack_draws
from chatcache.types.plan import Rows, StepPlan, edit_table
from tests.support.fake_runner import FakeRunner, fake_capacity, history_of
from tests.support.fake_sampling import log_softmax

EMPTY = np.zeros((0, 3), np.int32)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def plan(
    rows: list[tuple[int, int, list[int]]], specs: list[DrawSpec], **deltas: Sequence[tuple[int, ...]]
) -> StepPlan:
    tables = {name: np.array(deltas.get(name, []), np.int32).reshape(-1, 2 if name == "copies" else 3)
              for name in ("forks", "updates", "copies")}  # fmt: skip
    return StepPlan(
        step=1,
        forks=tables["forks"],
        updates=tables["updates"],
        copies=tables["copies"],
        rows=Rows(
            slot=np.array([row[0] for row in rows], np.int32),
            start=np.array([row[1] for row in rows], np.int32),
            num_tokens=np.array([len(row[2]) for row in rows], np.int32),
            tokens=np.array([token for row in rows for token in row[2]], np.int32),
        ),
        draws=pack_draws(specs, [len(rows) - 1] * len(specs), [len(TOKENS)] * len(specs)),
    )


def runner() -> FakeRunner:
    return FakeRunner(fake_capacity(num_pages=16, page_size=4, num_slots=4), vocab_size=50)


GREEDY = [DrawSpec(temperature=0.0)]
TABLE = [(0, 0, 5), (0, 1, 7), (0, 2, 2)]


def expected() -> int:
    result = runner().draw(pack_draws(GREEDY, [0], [9]), [history_of(TOKENS)], TOKENS[-1:])
    return int(result.tokens[0, 0])


@pytest.mark.parametrize("cut", range(1, 9))
def test_fake_runner_with_any_chunks_gives_the_same_logits(cut: int) -> None:
    fake = runner()
    fake.execute(plan([(0, 0, TOKENS[:cut])], [], updates=TABLE))
    result = fake.execute(plan([(0, cut, TOKENS[cut:])], GREEDY))
    assert result.tokens[0, 0] == expected()


def test_fake_runner_applies_forks_updates_and_copies_before_rows() -> None:
    fake = runner()
    fake.execute(plan([(0, 0, TOKENS[:6])], [], updates=TABLE))
    forked = plan([(0, 6, [8, 8]), (1, 6, TOKENS[6:])], GREEDY, forks=[(0, 1, 2)],
                  updates=[(1, 1, 9), (1, 2, 10)], copies=[(7, 9)])  # fmt: skip
    assert fake.execute(forked).tokens[0, 0] == expected()


def test_fake_runner_with_a_missing_copy_gives_other_logits() -> None:
    fake = runner()
    fake.execute(plan([(0, 0, TOKENS[:6])], [], updates=TABLE))
    uncopied = plan([(1, 6, TOKENS[6:])], [DrawSpec(width=50)], forks=[(0, 1, 2)], updates=[(1, 1, 9), (1, 2, 10)])
    right = runner().draw(pack_draws([DrawSpec(width=50)], [0], [9]), [history_of(TOKENS)], TOKENS[-1:])
    assert fake.execute(uncopied).tokens.tolist() != right.tokens.tolist()


def test_fake_runner_draws_follow_the_contract() -> None:
    history, fake = history_of(TOKENS), runner()

    def draw(*specs: DrawSpec) -> tuple[list[list[int]], list[list[float]]]:
        result = fake.draw(pack_draws(list(specs), [0] * len(specs), [9] * len(specs)), [history], [5])
        return result.tokens.tolist(), result.logprobs.tolist()

    ((*best,), _), (values, _) = draw(DrawSpec(width=3, temperature=0.0), DrawSpec(temperature=0.0))
    assert values == sorted(values, reverse=True)
    filters = (DrawSpec(seed=4, top_k=1), DrawSpec(seed=4, top_p=1e-6), DrawSpec(seed=4, min_p=1.0))
    tokens, logprobs = draw(DrawSpec(temperature=0.0), DrawSpec(seed=3), DrawSpec(seed=3), DrawSpec(seed=5), *filters)
    assert tokens[0] == tokens[4] == tokens[5] == tokens[6] == [best[0]]
    assert tokens[1] == tokens[2]
    assert logprobs[0] == [values[0]]
    lanes, _ = draw(*(DrawSpec(seed=3, lane=lane) for lane in range(2000)))
    frequencies = np.bincount([ids[0] for ids in lanes], minlength=50) / 2000
    probabilities = np.exp(log_softmax(fake.logits(history)))
    assert np.abs(frequencies - probabilities).max() < 0.05
    banned = edit_table([best[0]], 1.0, -np.inf)
    assert draw(DrawSpec(temperature=0.0, edit=banned))[0] == [[best[1]]]


def test_fake_runner_edits_scale_by_sign_and_then_add() -> None:
    fake = runner()
    history = history_of(TOKENS)
    logits = fake.logits(history)
    top = int(np.argmax(logits))
    edit = edit_table([top], 1e6, 0.0)
    result = fake.draw(pack_draws([DrawSpec(temperature=0.0, edit=edit)], [0], [9]), [history], [5])
    assert result.tokens[0, 0] != top
    assert result.logprobs[0, 0] == pytest.approx(float(log_softmax(logits)[result.tokens[0, 0]])), "raw, not edited"
