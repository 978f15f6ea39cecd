"""Thinking budgets: the reasoning parser is the oracle of where the reasoning of an output ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.decoding.strategy import make_strategy, validate_params
from chatcache.decoding.thinking import MAX_EXCESS_TOKENS, WINDOW_TOKENS, ThinkingRules
from chatcache.errors import InvalidRequestError
from chatcache.tokenizer.reasoning import THINK, ReasoningParser
from chatcache.types.request import BeamSearchParams, GenerateRequest, SamplingParams, ThinkingMarks
from tests.decoding.decode_driver import Run, TableModel, run
from tests.support.fake_runner import fake_model_info

PIECES = (b"<eos>", b"a", b" b", b".", b"\n", b"</think>", b"<think>", b"</th", b"ink>", b"\n\n", b" ", b"c", b'"')
EOS, STOP, NEWLINE, CLOSE, OPEN, HALF, REST, BLANK = 0, 3, 4, 5, 6, 7, 8, 9
ENDS = ("\n", ".", "!", "?")
PLAIN = ThinkingMarks(opening=THINK.opening, closing=THINK.closing, closing_ids=(NEWLINE, CLOSE, BLANK))
SPLIT = ThinkingMarks(opening=THINK.opening, closing=THINK.closing, closing_ids=(HALF, REST))
KINDS: dict[str, Any] = {
    "sampling": lambda seed, **fields: SamplingParams(n=3, seed=seed, **fields),
    "greedy": lambda seed, **fields: SamplingParams(temperature=0.0, **fields),
    "best_of": lambda seed, **fields: SamplingParams(n=1, best_of=3, seed=seed, **fields),
    "distinct": lambda seed, **fields: SamplingParams(n=3, distinct=True, seed=seed, **fields),
    "beams": lambda seed, **fields: BeamSearchParams(beam_width=3, **fields),
    "beam groups": lambda seed, **fields: BeamSearchParams(
        beam_width=4, num_beam_groups=2, diversity_penalty=0.4, **fields
    ),
}


def generate(params: Any, *, model: int = 0, logits: Any = None, prompt: tuple[int, ...] = (1, 2)) -> Run:
    request = GenerateRequest(request_id="r", prompt=prompt, params=params)
    info = fake_model_info(len(PIECES), (EOS,))
    max_tokens = params.max_tokens or 16
    strategy = make_strategy(request, info, seed=params.seed or 0 if isinstance(params, SamplingParams) else 0,
                             max_tokens=max_tokens, token_bytes=PIECES)  # fmt: skip
    return run(strategy, prompt, logits or TableModel(len(PIECES), model, 1.0))


def num_reasoning_tokens(tokens: list[int], *, is_open: bool) -> tuple[int, int, bool]:
    """Count the tokens up to the beginning and to the end of the reasoning as replies do.

    Also return whether it ended.
    """
    parser, num_opening, count = ReasoningParser(begins_inside=is_open), 0, 0
    for number, token in enumerate(tokens, 1):
        was_thinking = parser.is_thinking
        parser.push(PIECES[token].decode())
        if was_thinking or parser.is_thinking:
            num_opening = num_opening if was_thinking else number
            count = number
    return num_opening, count, not parser.is_thinking


@given(
    kind=st.sampled_from(list(KINDS)),
    budget=st.integers(0, 60),
    marks=st.sampled_from([PLAIN, SPLIT]),
    is_open=st.booleans(),
    model=st.integers(0, 999),
    extra=st.sampled_from(
        [{}, {"repetition_penalty": 1.4}, {"allowed_token_ids": (1, 2, 3, 6, 11)}, {"min_tokens": 9}]
    ),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.slow
def test_thinking_budget_any_search_ends_reasoning_within_it(
    kind: str, budget: int, marks: ThinkingMarks, is_open: bool, model: int, extra: dict[str, Any]
) -> None:
    marks = ThinkingMarks(opening=marks.opening, closing=marks.closing, closing_ids=marks.closing_ids, is_open=is_open)
    params = KINDS[kind](
        model, max_tokens=budget + 24, ignore_eos=True, thinking_token_budget=budget, thinking_marks=marks, **extra
    )
    for outcome in generate(params, model=model).outcomes.values():
        num_opening, count, has_ended = num_reasoning_tokens(outcome.tokens, is_open=is_open)
        assert count <= max(budget, num_opening) + len(marks.closing_ids)
        assert has_ended or len(outcome.tokens) < budget


class Scripted:
    """Logits that prefer a fixed continuation of the prompt, as long as it lasts."""

    def __init__(self, script: list[int], num_prompt: int = 2) -> None:
        self._script, self._num_prompt = script, num_prompt

    def __call__(self, tokens: tuple[int, ...]) -> Any:
        logits = TableModel(len(PIECES), 0, 0.1)(tokens).copy()
        place = len(tokens) - self._num_prompt
        logits[self._script[place] if place < len(self._script) else 11] += 9
        return logits


def greedy(script: list[int], budget: int | None, *, is_open: bool = True, **fields: Any) -> list[int]:
    marks = ThinkingMarks(opening=THINK.opening, closing=THINK.closing, closing_ids=PLAIN.closing_ids, is_open=is_open)
    params = SamplingParams(
        temperature=0.0, max_tokens=80, thinking_token_budget=budget, thinking_marks=marks, **fields
    )
    return generate(params, logits=Scripted(script)).outcomes[0].tokens


def test_thinking_budget_of_short_reasoning_changes_nothing() -> None:
    script = [1, 2, STOP, CLOSE, 1, 1, EOS]
    assert greedy(script, 40) == greedy(script, None) == script


def test_thinking_budget_closes_at_first_sentence_end_in_window() -> None:
    script = [*[1] * 8, STOP, *[1] * 20, STOP, *[1] * 40]
    assert greedy(script, 40)[:34] == [*script[:30], NEWLINE, CLOSE, BLANK, 1]  # the window begins at 24
    quoted = [*[1] * 30, STOP, 12, *[1] * 40]
    assert greedy(quoted, 40)[30:33] == [STOP, NEWLINE, CLOSE]


def test_thinking_budget_without_sentence_end_closes_at_the_limit() -> None:
    assert greedy([1] * 80, 40)[39:43] == [1, NEWLINE, CLOSE, BLANK]
    assert greedy([1] * 80, 0)[:4] == [NEWLINE, CLOSE, BLANK, 1]
    assert WINDOW_TOKENS == MAX_EXCESS_TOKENS == 16


def test_thinking_budget_of_reply_without_reasoning_changes_nothing() -> None:
    script = [1, OPEN, *[1] * 50, EOS]
    assert greedy(script, 4, is_open=False) == script


def test_thinking_budget_after_opening_by_the_model_counts_from_the_start() -> None:
    assert greedy([NEWLINE, OPEN, *[1] * 60], 10, is_open=False)[9:13] == [1, NEWLINE, CLOSE, BLANK]


def test_thinking_budget_prevails_over_bans_and_biases() -> None:
    banned = greedy([1] * 60, 10, bad_words_ids=((CLOSE,), (NEWLINE,)), logit_bias={BLANK: -100.0})
    assert banned[10:13] == [NEWLINE, CLOSE, BLANK]


def test_thinking_budget_of_continued_reply_counts_its_prefix() -> None:
    marks = ThinkingMarks(opening=THINK.opening, closing=THINK.closing, closing_ids=(CLOSE,), num_prefix_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=20, thinking_token_budget=10, thinking_marks=marks)
    prompt = (1, 1, OPEN, *[2] * 7)
    assert generate(params, logits=Scripted([1] * 20, 10), prompt=prompt).outcomes[0].tokens[:3] == [1, 1, CLOSE]
    finished = (1, 1, OPEN, *[2] * 6, CLOSE)
    assert CLOSE not in generate(params, logits=Scripted([1] * 20, 10), prompt=finished).outcomes[0].tokens


def test_thinking_rules_with_long_closing_sequence_close_earlier() -> None:
    marks = ThinkingMarks(opening=THINK.opening, closing=THINK.closing, closing_ids=(1,) * 20 + (CLOSE,), is_open=True)
    rules, progress = ThinkingRules(50, marks, PIECES), None
    for _ in range(50 - 5):
        assert rules.mask(progress) is None
        progress = rules.advance(progress, 1)
    assert rules.mask(progress) is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_token_budget": -1, "thinking_marks": PLAIN}, "thinking_token_budget"),
        ({"thinking_token_budget": True, "thinking_marks": PLAIN}, "thinking_token_budget"),
        (
            {
                "thinking_token_budget": 5,
                "thinking_marks": ThinkingMarks(opening="<", closing=">", closing_ids=(99,)),
            },
            "thinking_marks",
        ),
    ],
)
def test_thinking_budget_invalid_raises(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate_params(SamplingParams(**fields), len(PIECES))
    assert caught.value.param == param
