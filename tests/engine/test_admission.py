"""The door alone: limits that a small engine cannot reach."""

from __future__ import annotations

from typing import Any

import pytest

from chatcache.engine.admission import check_priority, check_prompt_logprobs
from chatcache.errors import InvalidRequestError
from chatcache.types.request import MAX_PROMPT_LOGPROBS, BeamSearchParams, GenerateRequest, Params, SamplingParams


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams])
def test_prompt_logprobs_are_bounded_by_what_one_answer_carries(kind: type[Params]) -> None:
    most = MAX_PROMPT_LOGPROBS // 21

    def request(num_tokens: int, prompt_logprobs: int | None) -> GenerateRequest:
        return GenerateRequest(request_id="r", prompt=(1,) * num_tokens, params=kind(prompt_logprobs=prompt_logprobs))

    check_prompt_logprobs(request(most, 20))
    check_prompt_logprobs(request(MAX_PROMPT_LOGPROBS + 1, None))
    with pytest.raises(InvalidRequestError, match=str(MAX_PROMPT_LOGPROBS)) as caught:
        check_prompt_logprobs(request(most + 1, 20))
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize("priority", [2048, -2048, 10**30, 1.5, float("nan"), True, "1", None])
def test_a_priority_is_an_integer_within_bounds(priority: Any) -> None:
    for good in (-2047, 0, 2047):
        check_priority(good)
    with pytest.raises(InvalidRequestError, match="priority must be") as caught:
        check_priority(priority)
    assert caught.value.param == "priority"
