"""An invalid grammar is reported by the answer to its submit, in a thread and in a child."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from chatcache.config import EngineConfig
from chatcache.engine_process.loop import PendingSubmits
from chatcache.engine_process.process import EngineProcess
from chatcache.engine_process.protocol import Answer
from chatcache.engine_process.threaded import ThreadedEngine
from chatcache.errors import InvalidRequestError
from chatcache.types.events import Failed, Finished, Started, Tokens
from chatcache.types.request import GenerateRequest, SamplingParams, StructuredOutputs
from tests.engine_process.engines import FAST, build_spelling

Client = ThreadedEngine | EngineProcess


@pytest.fixture(params=["thread", "process"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    if request.param == "thread":
        engine: Client = ThreadedEngine(lambda: build_spelling(EngineConfig(), lambda *_: None))
    else:
        engine = EngineProcess(
            EngineConfig(), "tests.engine_process.engines:build_spelling", policy=FAST, log_level="error"
        )
    async with engine:
        await engine.wait_loaded()
        yield engine


def request_with(name: str, regex: str) -> GenerateRequest:
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(regex=regex))
    return GenerateRequest(request_id=name, prompt=(65, 66), params=params)


@pytest.mark.slow
async def test_submit_of_an_invalid_grammar_raises_after_compilation(client: Client) -> None:
    pending = await asyncio.gather(
        client.submit(request_with("good", "[ab]{3}")),
        client.submit(request_with("bad", "a(?=b)")),
        client.submit(request_with("worse", "(a")),
        return_exceptions=True,
    )
    assert pending[0] is None
    for refusal in pending[1:]:
        assert isinstance(refusal, InvalidRequestError)
        assert refusal.param == "structured_outputs" and refusal.code == "invalid_constraint"
    events = [event async for event in client.events("good")]
    tokens = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
    assert len(tokens) == 3 and set(tokens) <= {97, 98}
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert isinstance(events[-1], Finished)
    with pytest.raises(InvalidRequestError):
        await client.submit(request_with("bad", "a(?=b)"))  # its name is free again


async def test_a_submit_cancelled_while_compiling_aborts_the_request(client: Client) -> None:
    submit = asyncio.create_task(client.submit(request_with("late", "[ab]{4}")))
    await asyncio.sleep(0)
    submit.cancel()
    await asyncio.gather(submit, return_exceptions=True)
    await client.submit(request_with("next", "[ab]{2}"))
    assert isinstance([event async for event in client.events("next")][-1], Finished)


def test_only_a_failure_as_first_event_answers_the_submit() -> None:
    sent: list[Answer] = []
    pending = PendingSubmits(sent.append)
    for call, name in enumerate(("slow", "bad", "late", "good")):
        pending.add(name, call)
    later = Failed("late", 3, "too much", "constraint_too_complex", "structured_outputs", 400)
    bad = Failed("bad", 1, "no", "invalid_constraint", "structured_outputs", 400)
    started = Started("other", 1, 2, 0)
    assert pending.resolve([started, bad, later], lambda name: name == "slow") == (started, later)
    assert [answer.call for answer in sent] == [1, 2, 3]
    assert sent[0].error is not None and sent[0].error.code == "invalid_constraint"
    assert sent[1].error is None and sent[2].error is None
    assert pending.resolve([started], lambda _: False) == (started,)
    assert [answer.call for answer in sent] == [1, 2, 3, 0]
