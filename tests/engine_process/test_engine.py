"""The real engine over the fake runner, in a thread and in a child, gives equal answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine_process.process import EngineProcess
from chatcache.engine_process.threaded import ThreadedEngine
from chatcache.errors import ContextLengthError, InvalidRequestError, OverloadedError, UnsupportedParameterError
from chatcache.types.events import CandidateDone, EngineEvent, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams
from tests.engine_process.engines import FAST, build_fake, build_waiting

Client = ThreadedEngine | EngineProcess
CONFIG = EngineConfig(max_queued_requests=200, max_num_seqs=32)
PARAMS: list[Params] = [
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=9, n=3, seed=5, logprobs=2),
    BeamSearchParams(beam_width=3, max_tokens=8),
]


@asynccontextmanager
async def driven(how: str, build: Callable[[EngineConfig, Any], Engine]) -> AsyncIterator[Client]:
    if how == "thread":
        engine: Client = ThreadedEngine(lambda: build(CONFIG, lambda *_: None))
    else:
        engine = EngineProcess(CONFIG, f"tests.engine_process.engines:{build.__name__}", policy=FAST, log_level="error")
    async with engine:
        await engine.wait_loaded()
        yield engine


@pytest.fixture(params=["thread", "process"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    async with driven(request.param, build_fake) as engine:
        yield engine


@pytest.fixture(params=["thread", "process"])
async def waiting(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    async with driven(request.param, build_waiting) as engine:
        yield engine


def make(number: int) -> GenerateRequest:
    prompt = tuple((number * 7 + place) % 64 for place in range(5 + number % 40))
    return GenerateRequest(request_id=f"r{number}", prompt=prompt, params=PARAMS[number % len(PARAMS)])


def expected_answer(request: GenerateRequest) -> list[EngineEvent]:
    """Oracle: the same request, alone on a new engine in this thread."""
    engine = build_fake(CONFIG, lambda *_: None)
    engine.add(request)
    events: list[EngineEvent] = []
    while engine.has_work():
        events += engine.step()
    return events


def tokens_of(events: list[EngineEvent]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Tokens):
            found.setdefault(event.index, []).extend(event.token_ids)
    return found


@pytest.mark.slow
async def test_200_concurrent_requests_equal_each_alone(client: Client) -> None:
    async def one(request: GenerateRequest) -> None:
        await client.submit(request)
        events = [event async for event in client.events(request.request_id)]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert tokens_of(events) == tokens_of(expected_answer(request))
        assert isinstance(events[-1], Finished)

    await asyncio.gather(*(one(make(number)) for number in range(200)))
    health = await client.health()
    assert (health.num_running, health.num_waiting, health.num_pages_in_use) == (0, 0, 0)


def long(number: int, max_tokens: int) -> GenerateRequest:
    """Create a request that does not end by itself."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=f"r{number}", prompt=(number % 64, 1, 2), params=params)


async def test_aborting_all_requests_frees_every_page(client: Client) -> None:
    requests = [long(number, max_tokens=4000) for number in range(20)]
    for request in requests:
        await client.submit(request)
    for request in requests:
        await client.abort(request.request_id)
    for request in requests:
        last = [event async for event in client.events(request.request_id)][-1]
        assert isinstance(last, Finished) and last.cancelled
    assert (await client.health()).num_pages_in_use == 0
    assert (await client.stats()) is not None
    assert await client.reset_prefix_cache()


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "param"),
    [
        ((), SamplingParams(), InvalidRequestError, "prompt"),
        ((64,), SamplingParams(), InvalidRequestError, "prompt"),
        ((1,) * 4096, SamplingParams(), ContextLengthError, "prompt"),
        ((1,), SamplingParams(max_tokens=4096), ContextLengthError, "max_tokens"),
        ((1,), SamplingParams(n=0), InvalidRequestError, "n"),
        ((1,), SamplingParams(top_p=float("nan")), InvalidRequestError, "top_p"),
    ],
)
async def test_a_rejected_submit_keeps_error_class_and_param(
    client: Client, prompt: tuple[int, ...], params: Params, kind: type[InvalidRequestError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        await client.submit(GenerateRequest(request_id="r", prompt=prompt, params=params))
    assert (type(caught.value), caught.value.param) == (kind, param)
    assert (await client.health()).ready


@pytest.mark.slow
async def test_a_full_queue_rejects_and_accepted_requests_end(client: Client) -> None:
    accepted: list[str] = []

    async def submit_all() -> None:
        for number in range(2000):
            await client.submit(long(number, max_tokens=4000))
            accepted.append(f"r{number}")

    with pytest.raises(OverloadedError, match="waiting"):
        await submit_all()
    assert len(accepted) >= CONFIG.max_queued_requests
    for request_id in accepted:
        await client.abort(request_id)
    for request_id in accepted:
        assert isinstance([event async for event in client.events(request_id)][-1], Finished)
    await client.submit(long(0, max_tokens=3))
    assert len(tokens_of([event async for event in client.events("r0")])[0]) == 3


async def test_prompt_logprobs_equal_those_of_the_engine(client: Client) -> None:
    prompt = tuple(number % 64 for number in range(900))
    params = SamplingParams(max_tokens=2, prompt_logprobs=20)
    request = GenerateRequest(request_id="r", prompt=prompt, params=params)
    await client.submit(request)
    events = [event async for event in client.events("r")]
    assert events == expected_answer(request)
    assert isinstance(events[0], Started) and len(events[0].prompt_logprobs) == 900


@pytest.mark.slow
async def test_a_cancelled_candidate_ends_and_the_others_are_unchanged(waiting: Client) -> None:
    params = SamplingParams(n=8, seed=5, max_tokens=120, ignore_eos=True)
    request = GenerateRequest(request_id="r", prompt=tuple(range(1, 40)), params=params)
    expected = tokens_of(expected_answer(request))
    await waiting.submit(request)
    events: list[EngineEvent] = []
    held: list[int] = []
    num_received = 0
    async for event in waiting.events("r"):
        events.append(event)
        num_received += isinstance(event, Tokens) and event.index == 7
        if num_received >= 2 and len(held) < 7:  # with its second token each has a page of its own
            await waiting.cancel_candidate("r", len(held))
            held.append(len(held))
    assert held == list(range(7))
    ends = {event.index: event for event in events if isinstance(event, CandidateDone)}
    assert all(ends[index].finish_reason == "cancelled" and ends[index].num_pages_freed > 0 for index in held)
    got = tokens_of(events)
    assert got[7] == expected[7] and ends[7].finish_reason == "length"
    assert all(got[index] == expected[index][: len(got[index])] != expected[index] for index in held)
    assert isinstance(events[-1], Finished) and not events[-1].cancelled
    assert (await waiting.health()).num_pages_in_use == 0


ENDLESS_BEAMS = BeamSearchParams(beam_width=3, max_tokens=2000, ignore_eos=True)


async def test_cancel_candidate_of_unknown_or_unsupported_candidates(client: Client) -> None:
    await client.cancel_candidate("unknown", 3)
    beams = GenerateRequest(request_id="b", prompt=(1, 2), params=ENDLESS_BEAMS)
    await client.submit(beams)
    with pytest.raises(UnsupportedParameterError, match="beams cannot be dropped"):
        await client.cancel_candidate("b", 0)
    await client.abort("b")
    await client.submit(long(0, max_tokens=3000))
    await client.cancel_candidate("r0", 0)
    last = [event async for event in client.events("r0")][-1]
    assert isinstance(last, Finished) and last.cancelled, "the only one: as a cancel"
