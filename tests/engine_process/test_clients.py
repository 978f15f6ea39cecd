"""The contract of every EngineClient, tested for the thread and for the process."""

from __future__ import annotations

import asyncio

import pytest

from chatcache.engine_process.process import EngineProcess
from chatcache.engine_process.threaded import ThreadedEngine
from chatcache.errors import ChatcacheError, ContextLengthError, EngineError, InvalidRequestError, NotFoundError
from chatcache.types.events import EngineEvent, Failed, Finished, Tokens
from chatcache.types.stats import ExplainQuery, PackedPrompt, PageAccounts
from tests.engine_process.engines import CountingEngine, expected_tokens, request

Client = ThreadedEngine | EngineProcess


async def collect(client: Client, name: str, after: int = 0) -> list[EngineEvent]:
    return [event async for event in client.events(name, after)]


def tokens_of(events: list[EngineEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


async def test_events_stream_to_the_terminal_event(client: Client) -> None:
    await client.submit(request("r", max_tokens=5))
    events = await collect(client, "r")
    assert [event.seq for event in events] == list(range(1, 9))
    assert tokens_of(events) == expected_tokens((1, 2, 3), 5)
    assert isinstance(events[-1], Finished)


async def test_200_concurrent_requests_get_their_own_tokens(client: Client) -> None:
    async def one(number: int) -> None:
        prompt, length = (number, 7), 3 + number % 11
        await client.submit(request(f"r{number}", length, prompt))
        events = await collect(client, f"r{number}")
        assert tokens_of(events) == expected_tokens(prompt, length)
        assert isinstance(events[-1], Finished)

    await asyncio.gather(*(one(number) for number in range(200)))


async def test_a_slow_reader_delays_no_other_and_loses_nothing(client: Client) -> None:
    await client.submit(request("slow", 500))
    reader = client.events("slow")
    first = await anext(reader)
    for number in range(5):
        await client.submit(request(f"fast{number}", 20))
        assert len(tokens_of(await collect(client, f"fast{number}"))) == 20
    rest = [event async for event in reader]
    assert [event.seq for event in (first, *rest)] == list(range(1, 504))


async def test_abort_ends_the_stream_with_a_cancelled_event(client: Client) -> None:
    await client.submit(request("r", 1_000_000))
    events = client.events("r")
    await anext(events)
    await client.abort("r")
    last = [event async for event in events][-1]
    assert isinstance(last, Finished) and last.cancelled
    assert (await client.health()).num_running == 0


async def test_abort_of_an_unknown_id_is_ignored_and_events_raise(client: Client) -> None:
    await client.abort("unknown")
    with pytest.raises(NotFoundError):
        await collect(client, "unknown")


async def test_a_rejected_submit_raises_and_leaves_no_log(client: Client) -> None:
    with pytest.raises(ContextLengthError, match="1001 tokens") as caught:
        await client.submit(request("r", prompt=(1,) * 1001))
    assert (caught.value.param, caught.value.status) == ("prompt", 400)
    with pytest.raises(NotFoundError):
        await collect(client, "r")
    await client.submit(request("r", 1))


async def test_submit_of_an_id_in_use_raises(client: Client) -> None:
    await client.submit(request("r", 1_000_000))
    with pytest.raises(InvalidRequestError, match="in use"):
        await client.submit(request("r"))
    await client.abort("r")


async def test_a_cancelled_submit_aborts_the_request(client: Client) -> None:
    task = asyncio.create_task(client.submit(request("r", 1_000_000)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.submit(request("next", 3))
    await collect(client, "next")
    assert (await client.health()).num_running == 0


async def test_calls_reach_the_engine(client: Client) -> None:
    await client.submit(request("r", 3))
    await collect(client, "r")
    assert (await client.stats())["num_steps"] >= 3
    assert await client.reset_prefix_cache() is True
    assert (await client.health()).model == "counting"


async def test_explain_and_page_accounts_return_typed_results(client: Client) -> None:
    explanation = await client.explain(ExplainQuery((1, 2, 3), "tenant", 2, operator=True))
    assert explanation == CountingEngine().explain(ExplainQuery((1, 2, 3), "tenant", 2, operator=True))
    for arguments in (("tenant", False), ("", True)):
        pages = await client.page_map(arguments[0], operator=arguments[1])
        assert pages == CountingEngine().page_map(arguments[0], operator=arguments[1])
    prompts = [PackedPrompt(bytes(4 * number), number) for number in (3, 20_000, 0, 1, 17_000, 9_000, 9_000)]
    assert await client.count_cached_tokens(prompts, "tenant") == CountingEngine().count_cached_tokens(
        prompts, "tenant"
    )
    assert await client.count_cached_tokens([]) == []
    await client.submit(request("r", 1_000_000))
    accounts = await client.page_accounts()
    assert isinstance(accounts, PageAccounts) and accounts.requests == {"r": 0.5}
    await client.abort("r")


async def test_a_failed_call_raises_and_the_engine_continues(client: Client) -> None:
    with pytest.raises(EngineError) as caught:
        await client.explain(ExplainQuery((1,), "bug"))
    assert "planted" not in caught.value.message
    await client.submit(request("r", 3))
    assert len(tokens_of(await collect(client, "r"))) == 3


async def test_closing_ends_open_requests_once(client: Client) -> None:
    await client.submit(request("r", 1_000_000))
    events = client.events("r")
    await anext(events)
    await client.close()
    terminal = [event for event in [event async for event in events] if isinstance(event, Finished | Failed)]
    assert len(terminal) == 1 and isinstance(terminal[0], Failed)
    with pytest.raises(ChatcacheError, match="the engine was closed"):
        await asyncio.wait_for(client.stats(), 10)


class FaultyEngine(CountingEngine):
    def step(self) -> list[EngineEvent]:
        raise RuntimeError("planted")


async def test_an_exception_in_the_thread_fails_requests_and_health_reports_it() -> None:
    async with ThreadedEngine(FaultyEngine) as engine:
        await engine.submit(request("r"))
        (event,) = await collect(engine, "r")
        assert isinstance(event, Failed) and "planted" in event.message
        health = await engine.health()
        assert not health.ready and "planted" in health.detail
        with pytest.raises(EngineError, match="planted"):
            await asyncio.wait_for(engine.stats(), 10)


async def test_a_failed_factory_raises_in_waiting_calls(caplog: pytest.LogCaptureFixture) -> None:
    def factory() -> CountingEngine:
        raise InvalidRequestError("no such thing")

    async with ThreadedEngine(factory) as engine:
        with pytest.raises(InvalidRequestError, match="no such thing"):
            await engine.submit(request("r"))
        with pytest.raises(InvalidRequestError, match="no such thing"):
            await engine.wait_loaded()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
