"""Validation of requests: errors with their texts, and the queue limits."""

from __future__ import annotations

from typing import Any

import pytest

from chatcache.engine.admission import check_priority, check_prompt_logprobs
from chatcache.errors import ChatcacheError, ContextLengthError, InvalidRequestError, OverloadedError
from chatcache.types.events import Finished
from chatcache.types.request import MAX_PROMPT_LOGPROBS, BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.engine.driver import VOCAB, drain, engine, request
from tests.support.fake_runner import FakeRunner, fake_capacity


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (request(prompt=()), InvalidRequestError, "empty"),
        (request(prompt=(1, VOCAB)), InvalidRequestError, f"between 0 and {VOCAB - 1}, got {VOCAB}"),
        (request(prompt=(-1,)), InvalidRequestError, "got -1"),
        (request(num_tokens=4096), ContextLengthError, "has 4096 tokens, and at least 1 .* 4096"),
        (request(params=SamplingParams(max_tokens=4090)), ContextLengthError, "20 tokens.*4090.*4110.*4096"),
        (request(params=SamplingParams(temperature=-1.0)), InvalidRequestError, "temperature"),
        (request(params=SamplingParams(n=17)), InvalidRequestError, "n must be at most 16"),
        (request(params=BeamSearchParams(beam_width=17)), InvalidRequestError, "beam_width must be at most 16"),
        (request(""), InvalidRequestError, "request_id"),
        (
            request(params=BeamSearchParams(beam_width=16, max_tokens=1000)),
            ContextLengthError,
            "in 16 branches may need 1009 pages",
        ),
    ],
)
def test_add_of_an_invalid_request_raises(bad: GenerateRequest, error: type[ChatcacheError], words: str) -> None:
    eng = engine(max_num_seqs=16)
    with pytest.raises(error, match=words):
        eng.add(bad)
    assert not eng.has_work()


def test_add_with_the_limit_from_the_error_message_is_accepted() -> None:
    eng = engine(FakeRunner(fake_capacity(num_pages=12), VOCAB))
    with pytest.raises(ContextLengthError, match=r"KV memory has 11, enough for max_tokens 97"):
        eng.add(request(num_tokens=80, params=SamplingParams(max_tokens=200)))
    eng.add(request(num_tokens=80, params=SamplingParams(max_tokens=97, ignore_eos=True)))
    assert isinstance(drain(eng)[-1], Finished)


@pytest.mark.parametrize(("num_pages", "expected"), [(12, 97), (512, 256 - 80)])
def test_max_tokens_none_uses_all_that_context_and_pool_allow(num_pages: int, expected: int) -> None:
    eng = engine(FakeRunner(fake_capacity(num_pages=num_pages), VOCAB), max_model_len=256)
    eng.add(request(num_tokens=80, params=SamplingParams(max_tokens=None, ignore_eos=True)))
    last = drain(eng)[-1]
    assert isinstance(last, Finished) and last.num_output_tokens == expected


def test_add_of_an_active_id_raises_and_of_a_finished_one_does_not() -> None:
    eng = engine()
    eng.add(request())
    with pytest.raises(InvalidRequestError, match="already active"):
        eng.add(request())
    drain(eng)
    eng.add(request())
    assert next(event.seq for event in drain(eng)) == 1


def test_add_over_the_prompt_token_limit_raises() -> None:
    eng = engine(max_queued_tokens=100)
    eng.add(request("long", num_tokens=150))  # the first one is never too long
    with pytest.raises(OverloadedError, match="150 prompt tokens are waiting already, of at most 100"):
        eng.add(request("a", num_tokens=1))
    eng.step()
    assert eng.health().num_waiting_tokens == 0
    eng.add(request("b", num_tokens=60))
    eng.add(request("c", num_tokens=40))
    assert (eng.health().num_waiting_tokens, eng.health().max_queued_tokens) == (100, 100)
    with pytest.raises(OverloadedError):
        eng.add(request("d", num_tokens=1))
    eng.abort("b")
    eng.add(request("d", num_tokens=60))
    assert sum(isinstance(event, Finished) for event in drain(eng)) == 4  # b's was cancelled
    assert eng.health().num_waiting_tokens == 0


def test_add_over_the_request_limit_raises() -> None:
    eng = engine(max_queued_requests=2)
    eng.add(request("a"))
    eng.add(request("b"))
    with pytest.raises(OverloadedError, match="2 requests"):
        eng.add(request("c"))
    eng.step()
    eng.add(request("c"))
    assert sum(isinstance(event, Finished) for event in drain(eng)) == 3


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams])
def test_check_prompt_logprobs_over_the_limit_raises(kind: type[Params]) -> None:
    max_tokens = MAX_PROMPT_LOGPROBS // 21

    def scored(num_tokens: int, prompt_logprobs: int | None) -> GenerateRequest:
        return GenerateRequest(request_id="r", prompt=(1,) * num_tokens, params=kind(prompt_logprobs=prompt_logprobs))

    check_prompt_logprobs(scored(max_tokens, 20))
    check_prompt_logprobs(scored(MAX_PROMPT_LOGPROBS + 1, None))
    with pytest.raises(InvalidRequestError, match=str(MAX_PROMPT_LOGPROBS)) as caught:
        check_prompt_logprobs(scored(max_tokens + 1, 20))
    assert caught.value.param == "prompt_logprobs"


@pytest.mark.parametrize(
    "priority", [2048, -2048, 10**30, pytest.param(10**5000, id="huge"), 1.5, float("nan"), True, "1", None]
)
def test_check_priority_outside_the_integer_bounds_raises(priority: Any) -> None:
    for good in (-2047, 0, 2047):
        check_priority(good)
    with pytest.raises(InvalidRequestError, match="priority must be") as caught:
        check_priority(priority)
    assert caught.value.param == "priority"
