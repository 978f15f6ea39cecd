"""The routing of gateways over a shared index: what a next turn finds, loads of other gateways, corrections, forks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from chatcache.cluster import bus, redis_placement
from chatcache.cluster.redis_placement import RedisPlacementIndex
from chatcache.cluster.request_router import RequestRouter, RoutedRequest
from chatcache.cluster.routing import RoutedPrompt
from chatcache.cluster.worker_host import GatewayLoads, WorkerHost
from chatcache.config import EngineConfig
from chatcache.engine_process.process import EngineProcess
from chatcache.types.events import EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.request import GenerateRequest, SamplingParams
from chatcache.types.stats import EngineHealth, ModelInfo, WorkerReport
from tests.cluster.test_workers import collect, gateway, tokens_of
from tests.engine_process.engines import FAST, until
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.usefixtures("patient_bus")

END = 2  # token that ends a message
MODEL = ModelInfo(name="m", digest="00", vocab_size=1000, max_model_len=4096, eos_token_ids=(END,))
SYSTEM = (*range(10, 310), END)
QUESTION = (*range(400, 430), END)


def status(name: str, number: int, **health: Any) -> bus.WorkerStatus:
    fields = {"page_size": 16, "num_pages": 4096, "seconds_per_prompt_token": 0.001} | health
    return bus.WorkerStatus(
        id=f"{name}.{number:016x}",
        name=name,
        numerics="",
        model_info=MODEL,
        health=EngineHealth(ready=True, **fields),
    )


WORKERS = [status("a", 1), status("b", 2), status("c", 3)]


@asynccontextmanager
async def routers(server: RedisServer, count: int = 2) -> AsyncIterator[list[RequestRouter]]:
    """Routers of several gateways over one index, connected to the same workers."""
    client = bus.connect(server.url)
    indexes = [RedisPlacementIndex(client) for _ in range(count)]
    tasks = [asyncio.create_task(index.run()) for index in indexes]
    found = [RequestRouter(index, lambda: 1_000_000.0) for index in indexes]
    for router in found:
        for each in WORKERS:
            router.connect(each, "g")
        router.update(WORKERS)
    yield found
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()


def request(name: str, prompt: tuple[int, ...], **fields: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt=prompt, **fields)


def run(router: RequestRouter, routed: RoutedRequest, reply: tuple[int, ...] = (), num_cached: int = 0) -> str:
    """Route a request, and run it to its end; return the chosen worker."""
    chosen = router.choose(routed)
    assert chosen is not None
    router.reserve(routed)
    router.started(routed, Started("r", 1, routed.prompt.num_tokens, num_cached))
    router.finished(routed, [np.asarray(reply, "<i4").tobytes()])
    router.release(routed)
    return chosen


async def located(router: RequestRouter, sent: GenerateRequest, is_known: Callable[[RoutedRequest], bool]) -> Any:
    """Return the request once the index knows of its prompt what is awaited."""
    found: list[RoutedRequest] = []

    async def condition() -> bool:
        found.append(await router.locate(sent))
        return is_known(found[-1])

    await until(condition)
    return found[-1]


def believed(routed: RoutedRequest) -> int:
    """Return the tokens of the longest prefix with a holder."""
    assert routed.places is not None
    pairs = zip(routed.prompt.boundaries, routed.places, strict=True)
    return max((boundary.num_tokens for boundary, place in pairs if place is not None and place.holders), default=0)


def has_found(num_tokens: int) -> Callable[[RoutedRequest], bool]:
    """Return a check that a prefix of so many tokens has a holder."""
    return lambda routed: believed(routed) >= num_tokens


def report_of(router: RequestRouter, worker_id: str) -> WorkerReport:
    return next(each for each in router.reports() if each.name == worker_id.partition(".")[0])


REPLY = (*range(500, 600), END)


async def test_next_turn_through_another_gateway_goes_to_the_worker_of_the_first(server: RedisServer) -> None:
    async with routers(server) as (first, second):
        prompt = (*SYSTEM, *QUESTION)
        chosen = run(first, await first.locate(request("one", prompt)), REPLY)
        again = request("two", (*prompt, *REPLY, 7, *QUESTION))
        routed = await located(second, again, lambda found: believed(found) > len(prompt))
        num_computed = len(prompt) + len(REPLY) - 1  # the last token of a reply is not computed
        assert believed(routed) == num_computed // 16 * 16
        assert run(second, routed, num_cached=believed(routed)) == chosen
        report = report_of(second, chosen)
        assert report.requests == {"prefix": 1}
        assert report.num_predicted_tokens == report.num_cached_tokens == believed(routed)
        assert report.num_prompt_tokens == len(again.prompt)
        for stranger in (replace(again, namespace="other"), replace(again, cache_salt="salt")):
            assert believed(await second.locate(stranger)) == 0


async def test_missing_records_are_found(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected: finished turns are not recorded, so that the next turn finds nothing."""
    monkeypatch.setattr(RedisPlacementIndex, "record", lambda *_: None)
    async with routers(server) as (first, second):
        prompt = (*SYSTEM, *QUESTION)
        run(first, await first.locate(request("one", prompt)), REPLY)
        routed = await second.locate(request("two", (*prompt, *REPLY, 7, *QUESTION)))
        assert believed(routed) == 0
        run(second, routed)
        assert sum(each.num_predicted_tokens for each in second.reports()) == 0


async def test_prompt_is_found_from_its_first_token_on_and_evicted_pages_are_counted(server: RedisServer) -> None:
    async with routers(server) as (first, second):
        sent = request("one", (*SYSTEM, *QUESTION))
        routed = await first.locate(sent)
        chosen = first.choose(routed)
        first.reserve(routed)
        first.started(routed, Started("r", 1, len(sent.prompt), 0))
        routed = await located(second, sent, lambda found: believed(found) > 0)
        assert run(second, routed, num_cached=100) == chosen
        report = report_of(second, chosen or "")
        assert (report.num_predicted_tokens, report.num_cached_tokens) == (believed(routed), 100)


async def test_restarted_worker_has_nothing_and_a_disconnected_one_is_not_chosen(server: RedisServer) -> None:
    async with routers(server, 1) as (router,):
        sent = request("one", (*SYSTEM, *QUESTION))
        chosen = run(router, await router.locate(sent))
        await located(router, sent, lambda found: believed(found) > 0)
        router.disconnect(chosen)
        assert believed(await router.locate(sent)) == 0
        assert router.choose(await router.locate(sent)) not in (chosen, None)
        name = chosen.partition(".")[0]
        router.connect(status(name, 9), "g")
        assert believed(await router.locate(sent)) == 0
        assert [each.name for each in router.reports()].count(name) == 1


async def test_load_of_other_gateways_counts_and_is_replaced_by_the_next_report(server: RedisServer) -> None:
    async with routers(server, 1) as (router,):
        for each in WORKERS[:2]:
            router.update_load(each.id, {"g": (90_000, 9), "other": (50_000, 4)}, "g")
        assert {router.choose(await router.locate(request(f"r{n}", (n + 1, 7)))) for n in range(4)} == {WORKERS[2].id}
        for each in WORKERS[:2]:
            router.update_load(each.id, {"g": (90_000, 9)}, "g")  # its own requests it knows better
        router.update_load(WORKERS[2].id, {"other": (50_000, 4)}, "g")
        assert router.choose(await router.locate(request("last", (7, 8)))) != WORKERS[2].id


async def test_reservations_are_returned_however_a_request_ends(server: RedisServer) -> None:
    async with routers(server, 1) as (router,):
        loads = list(router._loads.all())
        events: list[EngineEvent] = [
            Started("r", 1, 40, 0),
            Tokens("r", 9, 0, (1,)),
            Failed("r", 1, "", ""),
            Finished("r", 1, 4, 0, 0),
        ]
        for first, event in zip(range(0, 400, 100), events, strict=True):  # no prompt is cached where another has run
            routed = await router.locate(request("r", tuple(range(first, first + 40))))
            router.choose(routed)
            assert router.reserve(routed) == 40
            assert sum(load.queued_tokens for load in loads) == 40 and sum(load.num_branches for load in loads) == 1
            router.started(routed, event)
            router.reserve(routed)  # on another worker
            router.release(routed)
            router.release(routed)
            assert all(load.queued_tokens == 0 and load.num_branches == 0 for load in loads)


async def test_fork_goes_to_its_source_and_a_choice_among_some_stays_there(server: RedisServer) -> None:
    async with routers(server, 1) as (router,):
        routed = await router.locate(request("r", (1, 2, 3)))
        for each in WORKERS:
            assert router.choose(routed, required=each.id) == each.id
            assert router.choose(routed, [each.id]) == each.id
            assert router.choose(routed, [each.id], required="gone.0") == each.id
        assert router.choose(routed, []) is None


async def test_without_an_index_or_during_an_outage_the_hash_decides(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashing = RequestRouter(None)
    for each in WORKERS:
        hashing.connect(each, "g")
    hashing.update(WORKERS)
    sent = [request(f"r{number}", (*SYSTEM, number), conversation_id=f"c{number % 6}") for number in range(12)]
    owners = [hashing.choose(await hashing.locate(each)) for each in sent]
    assert owners[:6] == owners[6:] and len(set(owners)) > 1
    monkeypatch.setattr(redis_placement, "PAUSE_S", 60.0)
    async with routers(server, 1) as (router,):

        async def fail(*_: object) -> None:
            raise ConnectionError("down")

        router._index._client.mget = fail  # type: ignore[union-attr]
        assert [router.choose(await router.locate(each)) for each in sent] == owners


def unknown(conversation: str) -> RoutedRequest:
    return RoutedRequest(RoutedPrompt(3, (), conversation.encode()))


def test_second_worker_of_a_name_is_used_too() -> None:
    router = RequestRouter(None)
    twins = [status("host", 1), status("host", 2)]
    for each in twins:
        router.connect(each, "g")
    router.update(twins)
    assert [router.choose(unknown(str(number))) for number in range(30)].count(twins[1].id) > 5
    router.disconnect(twins[0].id)
    assert router.choose(unknown("x")) == twins[1].id


def test_loads_of_a_worker_by_gateway() -> None:
    loads = GatewayLoads()
    loads.add("g", 100, 1)
    loads.add("h", 50, 4)
    assert loads.read() == loads.last == {"g": (100, 1), "h": (50, 4)} and not loads.is_changed
    loads.add("g", -100, 0)
    loads.add("g", 0, -1)
    assert loads.is_changed and loads.read() == {"h": (50, 4)}


@asynccontextmanager
async def caching_worker(server: RedisServer, name: str) -> AsyncIterator[None]:
    """A worker with the real engine over a runner without a model."""
    factory = "tests.engine_process.engines:build_fake"
    async with EngineProcess(EngineConfig(), factory, policy=FAST, log_level="error") as engine:
        await engine.wait_loaded()
        task = asyncio.create_task(WorkerHost(engine, server.url, name, "fake").run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def cached_tokens_of_second_turns(
    server: RedisServer, num_chats: int = 6, *, is_indexed: bool = True
) -> tuple[int, int, int]:
    """Run chats whose second turn comes through another gateway.

    Return the tokens of their first prompts, and of the second ones those predicted and found in the cache.
    `is_indexed`: the index learns of the first turns.
    """
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    async with (
        caching_worker(server, "a"),
        caching_worker(server, "b"),
        gateway(server, 2) as first,
        gateway(server, 2) as second,
    ):
        prompts = [(*(1 + (number * 7 + at * at) % 60 for at in range(200 + number)), 0) for number in range(num_chats)]
        for number, prompt in enumerate(prompts):
            await first.submit(request(f"one{number}", prompt, params=params))
            reply = tokens_of(await collect(first, f"one{number}"))
            prompts[number] = (*prompt, *reply)
        for number, prompt in enumerate([*prompts[1:], prompts[0]]):  # in turns, each would go to the other worker
            again = request(f"two{number}", (*prompt, 0, 3, 4, 5, 0), params=params)
            if is_indexed:
                await located(second._router, again, has_found(len(prompt) - 32))
            await second.submit(again)
            tokens_of(await collect(second, f"two{number}"))
        reports = (await second.health()).workers
        assert [each.name for each in reports] == ["a", "b"]
        assert sum(sum(each.requests.values()) for each in reports) == num_chats
        return (
            sum(map(len, prompts)),
            sum(each.num_predicted_tokens for each in reports),
            sum(each.num_cached_tokens for each in reports),
        )


@pytest.mark.slow
async def test_second_turns_through_another_gateway_find_the_pages_of_the_first(server: RedisServer) -> None:
    num_tokens, num_predicted, num_cached = await cached_tokens_of_second_turns(server)
    assert num_cached >= num_predicted >= num_tokens - 6 * 32


@pytest.mark.slow
async def test_injected_index_that_learns_nothing_loses_pages(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RedisPlacementIndex, "record", lambda *_: None)
    num_tokens, num_predicted, num_cached = await cached_tokens_of_second_turns(server, is_indexed=False)
    assert num_predicted == 0 and num_cached < 0.9 * num_tokens
