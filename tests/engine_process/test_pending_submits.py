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


def test_only_an_invalid_grammar_of_a_new_request_answers_the_submit() -> None:
    sent: list[Answer] = []
    pending = PendingSubmits(sent.append)
    for call, name in enumerate(("slow", "bad", "resumed", "dead end", "good")):
        pending.add(name, call)
    bad = Failed("bad", 1, "no", "invalid_constraint", "structured_outputs", 400)
    resumed = Failed("resumed", 3, "no", "invalid_constraint", "structured_outputs", 400)
    dead_end = Failed("dead end", 1, "no token", "constraint_dead_end", "structured_outputs", 400)
    started = Started("other", 1, 2, 0)
    invalid = {"bad", "resumed"}
    left = pending.resolve([started, bad, resumed, dead_end], lambda name: name == "slow", invalid)
    assert left == (started, resumed, dead_end)
    assert [answer.call for answer in sent] == [1, 2, 3, 4]
    assert sent[0].error is not None and sent[0].error.code == "invalid_constraint"
    assert all(answer.error is None for answer in sent[1:])
    assert pending.resolve([started], lambda _: False, ()) == (started,)
    assert [answer.call for answer in sent] == [1, 2, 3, 4, 0]


async def test_a_dead_end_is_the_same_for_a_new_and_a_compiled_grammar(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    ends = []
    for name in ("first", "second"):
        params = SamplingParams(allowed_token_ids=(99,), structured_outputs=StructuredOutputs(regex="[ab]{5}"))
        await client.submit(GenerateRequest(request_id=name, prompt=(65, 66), params=params))
        ends.append([event async for event in client.events(name)])
    for events in ends:
        assert [type(event) for event in events] == [Failed]
        assert isinstance(events[0], Failed) and (events[0].code, events[0].status) == ("constraint_dead_end", 400)
    assert not caplog.records
