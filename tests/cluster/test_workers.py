"""Gateways and workers over a real Redis: requests, queries, and what happens when one of them ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from chatcache.cluster import bus, remote_engine, takeover
from chatcache.cluster.remote_engine import RemoteEngine
from chatcache.cluster.worker_host import WorkerHost
from chatcache.config import EngineConfig
from chatcache.engine_process.process import EngineProcess
from chatcache.engine_process.protocol import FRAME_HEADER_BYTES, Abort, Submit, encode
from chatcache.errors import ContextLengthError, NotFoundError, OverloadedError
from chatcache.types.events import CandidateDone, EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest
from chatcache.types.stats import ExplainQuery, PackedPrompt
from tests.engine_process.crashing_engine import RequestGroup, check_same, expected_events, make_request, poison
from tests.engine_process.crashing_engine import process as crashing_process
from tests.engine_process.engines import FAST, expected_tokens, process, request, until
from tests.support.certificates import tls_settings
from tests.support.redis_servers import RedisServer, redis_server

pytestmark = pytest.mark.usefixtures("patient_bus")


class Worker:
    """A worker with its engine process, and the task that connects it to the bus."""

    def __init__(self, engine: EngineProcess, host: WorkerHost, task: asyncio.Task[None]) -> None:
        self.engine = engine
        self.host = host
        self.task = task

    async def cut_off(self, *, leaves_lease: bool = False) -> None:
        """End the connection to the bus and the lease, as if the lease of a machine that was switched off had expired.

        `leaves_lease`: it expires later.
        """
        with pytest.MonkeyPatch.context() as patch:
            if leaves_lease:
                patch.setattr(bus.Lease, "give_up", lambda _: asyncio.sleep(0))
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def worker(
    server: RedisServer, name: str, model: str = "slow", make: Callable[[str], EngineProcess] = process
) -> AsyncIterator[Worker]:
    async with make(model) as engine:
        await engine.wait_loaded()
        host = WorkerHost(engine, server.url, name, "counting")
        task = asyncio.create_task(host.run())
        try:
            yield Worker(engine, host, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def gateway(server: RedisServer, num_workers: int = 1) -> AsyncIterator[RemoteEngine]:
    async with RemoteEngine(server.url, "gateway") as engine:
        await engine.wait_loaded()

        async def condition() -> bool:
            return len(engine.workers) == num_workers

        await until(condition)
        yield engine


async def collect(engine: RemoteEngine, name: str) -> list[EngineEvent]:
    return [event async for event in engine.events(name)]


def tokens_of(events: list[EngineEvent]) -> list[int]:
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), "gap or repetition"
    assert isinstance(events[0], Started)
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


async def test_request_gives_the_events_of_the_engine(server: RedisServer) -> None:
    async with worker(server, "a", ""), gateway(server) as engine:
        await engine.submit(request("r", 50, prompt=(3, 7)))
        events = await collect(engine, "r")
        assert tokens_of(events) == expected_tokens((3, 7), 50)
        assert isinstance(events[-1], Finished) and not events[-1].cancelled
        assert (await engine.health()).ready


@pytest.mark.slow
async def test_request_over_tls_gives_the_events_of_the_engine(tmp_path: Path) -> None:
    settings, port, certificate = tls_settings(tmp_path)
    with redis_server(tmp_path / "redis", *settings) as server:
        untrusting = f"rediss://chatcache:secret@127.0.0.1:{port}/0"
        server.url = f"{untrusting}?ssl_ca_certs={certificate}"
        async with worker(server, "a", ""), gateway(server) as engine:
            await engine.submit(request("r", 50, prompt=(3, 7)))
            assert tokens_of(await collect(engine, "r")) == expected_tokens((3, 7), 50)
        client = bus.connect(untrusting)
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.ping()
        await client.aclose()


@pytest.mark.slow
async def test_explanation_of_several_workers_has_no_place_in_their_joined_map(server: RedisServer) -> None:
    async with worker(server, "a"), worker(server, "b"), gateway(server, 2) as engine:
        found = await engine.explain(ExplainQuery((1, 2, 3)))
        assert [(page.state, page.map_index) for page in found.pages] == [("idle", None), ("missing", None)]


@pytest.mark.slow
async def test_errors_queries_and_cancellation_reach_the_caller(server: RedisServer) -> None:
    async with worker(server, "a"), gateway(server) as engine:
        with pytest.raises(ContextLengthError, match="do not fit"):
            await engine.submit(request("long", prompt=tuple(range(2000))))
        query = ExplainQuery((1, 2, 3), "tenant")
        found = await engine.explain(query)
        assert found.detail == repr(query) and [page.map_index for page in found.pages] == [7, None]
        assert await engine.count_cached_tokens([PackedPrompt(bytes(8)), PackedPrompt(bytes(4))], "n") == [9, 5]
        assert (await engine.page_map("m")).cells == "m"
        assert (await engine.page_accounts()).page_bytes == 4096
        await engine.submit(request("r", 100_000))
        stream = engine.events("r")
        assert isinstance(await anext(stream), Started)
        await engine.abort("r")
        end = [event async for event in stream][-1]
        assert isinstance(end, Finished) and end.cancelled
        await engine.cancel_candidate("unknown", 0)
        with pytest.raises(NotFoundError):
            await collect(engine, "unknown")


@pytest.mark.slow
async def test_abort_in_the_entry_of_its_submit_ends_the_request(server: RedisServer) -> None:
    """Both wait in the gateway while Redis does not answer."""
    async with worker(server, "a") as only:

        async def has_id() -> bool:
            return bool(only.host.id)

        await until(has_id)
        server.admin.set(bus.gateway_key("g"), b"1")
        commands = (Submit(1, request("r", 100_000)), Abort("r"))
        bodies = bus.encode_list([encode(each)[FRAME_HEADER_BYTES:] for each in commands])
        entry = {bus.FROM: b"g", bus.NUMBER: b"1", bus.AFTER: b"0", bus.COMMANDS: bodies}
        server.admin.xadd(bus.inbox(only.host.id), entry)

        async def is_answered() -> bool:
            return any(b"g" in fields for _, fields in server.admin.xrange(bus.outbox(only.host.id)))

        await until(is_answered)

        async def has_ended() -> bool:
            return only.host.num_requests == 0

        await until(has_ended)


@pytest.mark.slow
async def test_foreign_values_on_the_bus_are_ignored(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with worker(server, "a") as only, gateway(server) as engine:
        copy = bus.new_id("copy")
        server.admin.set(bus.worker_key(copy), server.admin.get(bus.worker_key(only.host.id)))
        server.admin.sadd(bus.WORKERS, b"\xff\xfe", "other-tool", "a.xyz", copy)
        server.admin.sadd(takeover.RECORDED, b"\xff\xfe", "other-tool")
        engine.recorder.on_adopt = lambda *_: asyncio.sleep(0, True)

        async def is_seen() -> bool:
            return f"the lease of worker {copy} has the id" in caplog.text

        await until(is_seen)
        await engine.submit(request("r", 50, prompt=(3, 7)))
        assert tokens_of(await collect(engine, "r")) == expected_tokens((3, 7), 50)
        assert [each.id for each in engine.workers] == [only.host.id]


@pytest.mark.slow
async def test_worker_whose_stream_has_a_foreign_entry_begins_anew(server: RedisServer) -> None:
    async with worker(server, "a") as only, gateway(server) as engine:
        before = only.host.id
        server.admin.xadd(bus.outbox(before), {"a": "b"}, id="99999999-0")
        await engine.submit(request("r", 200, prompt=(3, 7)))
        assert tokens_of(await collect(engine, "r")) == expected_tokens((3, 7), 200)
        assert only.host.id != before


async def test_cancelled_abort_leaves_its_request_to_the_engine(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease may expire during an abort. Without its request, the engine would refuse the same one as in use."""
    async with worker(server, "a") as only, gateway(server) as engine:
        await engine.submit(request("r", 100_000))
        host = only.host
        with monkeypatch.context() as patch:
            patch.setattr(host._engine, "abort", lambda _: asyncio.sleep(0))
            aborting = asyncio.create_task(host._abort({"r"}))
            await asyncio.sleep(0.1)
            aborting.cancel()
            await asyncio.wait([aborting])
        assert aborting.cancelled() and host.num_requests == 1
        await host._abort({"r"})
        assert host.num_requests == 0


@pytest.mark.slow
async def test_bus_that_loses_its_data_three_times_fails_no_request(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway notices that its worker's lease is gone before it renews its own."""
    monkeypatch.setattr(remote_engine, "_POLL_S", 0.02)
    monkeypatch.setattr(bus, "RENEW_S", 1.0)
    async with worker(server, "a"), gateway(server) as engine:
        await engine.submit(request("r", 1000, prompt=(5,)))
        stream = engine.events("r")
        events = [await anext(stream)]
        for _ in range(3):
            num_moved = engine.num_moved
            server.admin.flushdb()
            while engine.num_moved == num_moved:
                events.append(await asyncio.wait_for(anext(stream), 60))
        events += [event async for event in stream]
        assert tokens_of(events) == expected_tokens((5,), 1000) and isinstance(events[-1], Finished)


@pytest.mark.slow
async def test_lost_worker_is_replaced_without_gap_or_repetition(server: RedisServer) -> None:
    async with worker(server, "a") as first, worker(server, "b") as second, gateway(server, 2) as engine:
        names = [f"r{number}" for number in range(8)]
        for number, name in enumerate(names):
            await engine.submit(request(name, 900, prompt=(number, 7)))
        readers = [asyncio.create_task(collect(engine, name)) for name in names]
        await asyncio.sleep(0.5)
        held = first.host.num_requests
        assert 0 < held < 8 and held + second.host.num_requests == 8, "each worker runs some of them"
        await first.cut_off()
        for number, events in enumerate(await asyncio.gather(*readers)):
            assert tokens_of(events) == expected_tokens((number, 7), 900)
            assert isinstance(events[-1], Finished)
        assert engine.num_moved == held
        assert len(engine.workers) == 1


@pytest.mark.slow
async def test_silent_worker_is_replaced_before_its_lease_expires(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease, of ten minutes here, is deleted, so that it takes a new id if it continues."""
    monkeypatch.setattr(bus, "LEASE_S", 600.0)
    async with worker(server, "a") as first, worker(server, "b") as second, gateway(server, 2) as engine:
        await engine.submit(request("r", 700, prompt=(5,)))
        reader = asyncio.create_task(collect(engine, "r"))
        await asyncio.sleep(0.3)
        lost = first if first.host.num_requests else second
        await lost.cut_off(leaves_lease=True)
        assert server.admin.exists(bus.worker_key(lost.host.id))
        monkeypatch.setattr(bus, "SILENT_S", 2.0)
        async with asyncio.timeout(60):
            assert tokens_of(await reader) == expected_tokens((5,), 700)
        assert engine.num_moved == 1 and not server.admin.exists(bus.worker_key(lost.host.id))


@pytest.mark.slow
async def test_worker_that_waits_for_its_engine_renews_its_lease(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It aborts requests of a gateway that has ended, which takes as long as a step of the engine."""
    started, ended = asyncio.Event(), asyncio.Event()

    async def abort_slowly(*_: object) -> None:
        started.set()
        await ended.wait()

    async with worker(server, "a") as only:
        async with gateway(server) as engine:
            await engine.submit(request("r", 100_000))
            monkeypatch.setattr(WorkerHost, "_abort", abort_slowly)
        await started.wait()
        num_before = only.host._num_renewals

        async def condition() -> bool:
            return only.host._num_renewals >= num_before + 2

        await until(condition)
        ended.set()
        monkeypatch.undo()


def crashing(_: str) -> EngineProcess:
    """Create a client of an engine that `poison` requests crash."""
    return crashing_process()


def real_process(_: str) -> EngineProcess:
    """Create a client of the real engine over the fake runner, with steps of 1 ms."""
    return EngineProcess(EngineConfig(), "tests.engine_process.engines:build_fake", policy=FAST, log_level="error")


@pytest.mark.slow
async def test_beam_search_of_a_lost_worker_has_the_result_of_an_undisturbed_one(server: RedisServer) -> None:
    def search(name: str) -> GenerateRequest:
        params = BeamSearchParams(beam_width=4, n=4, max_tokens=600, ignore_eos=True)
        return GenerateRequest(request_id=name, prompt=(5, 6, 7), params=params, conversation_id="c")

    async with worker(server, "a", make=real_process) as first, worker(server, "b", make=real_process) as second:
        async with gateway(server, 2) as engine:
            await engine.submit(search("undisturbed"))
            expected = await collect(engine, "undisturbed")
            await engine.submit(search("moved"))
            reader = asyncio.create_task(collect(engine, "moved"))

            async def is_under_way() -> bool:
                placed = engine._requests.get("moved")
                return placed is not None and placed.journal.num_search_steps >= 20

            await until(is_under_way)
            await (first if first.host.num_requests else second).cut_off()
            events = await reader
        assert engine.num_moved == 1
        assert tokens_of(events) == tokens_of(expected)
        assert [event.score for event in events if isinstance(event, CandidateDone)] == [
            event.score for event in expected if isinstance(event, CandidateDone)
        ]


@pytest.mark.slow
async def test_suspended_worker_begins_anew_and_its_old_notices_have_no_effect(server: RedisServer) -> None:
    """A worker whose lease was deleted goes on for a while: the gateway must not read what it sends."""
    async with worker(server, "a") as only, gateway(server) as engine:
        await engine.submit(request("r", 600, prompt=(5,)))
        reader = asyncio.create_task(collect(engine, "r"))
        await asyncio.sleep(0.3)
        old_id = only.host.id
        server.admin.delete(bus.worker_key(old_id))
        events = await reader
        assert tokens_of(events) == expected_tokens((5,), 600)
        assert isinstance(events[-1], Finished)
        assert only.host.id != old_id and engine.num_moved == 1


@pytest.mark.slow
async def test_missing_notices_are_noticed_and_their_requests_resumed(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(server, "a"), gateway(server) as engine:
        await engine.submit(request("r", 300, prompt=(5,)))
        reader = asyncio.create_task(collect(engine, "r"))
        await asyncio.sleep(0.3)
        original = bus.StreamWriter._write

        async def lose(self: bus.StreamWriter, fields: dict[bytes, bytes]) -> None:
            monkeypatch.setattr(bus.StreamWriter, "_write", original)

        monkeypatch.setattr(bus.StreamWriter, "_write", lose)
        assert tokens_of(await reader) == expected_tokens((5,), 300)
        assert engine.num_moved == 1


@pytest.mark.slow
async def test_requests_of_a_lost_gateway_are_aborted(server: RedisServer) -> None:
    async with worker(server, "a") as only:
        async with gateway(server) as engine:
            await engine.submit(request("r", 100_000))
            assert only.host.num_requests == 1

        async def condition() -> bool:
            return only.host.num_requests == 0 and (await only.engine.health()).num_running == 0

        await until(condition)


@pytest.mark.slow
async def test_gateway_whose_lease_expired_resumes_its_requests(server: RedisServer) -> None:
    async with worker(server, "a") as only, gateway(server) as engine:
        await engine.submit(request("r", 900, prompt=(5,)))
        reader = asyncio.create_task(collect(engine, "r"))
        await asyncio.sleep(0.3)
        server.admin.delete(bus.gateway_key(engine.id))
        events = await reader
        assert tokens_of(events) == expected_tokens((5,), 900)
        assert only.host.num_requests == 0


@pytest.mark.slow
async def test_killed_engine_of_a_worker_is_resumed_there(server: RedisServer) -> None:
    async with worker(server, "a") as only, gateway(server) as engine:
        await engine.submit(request("r", 300, prompt=(5,)))
        reader = asyncio.create_task(collect(engine, "r"))
        await asyncio.sleep(0.3)
        os.kill(only.engine.pid or 0, signal.SIGKILL)
        assert tokens_of(await reader) == expected_tokens((5,), 300)
        assert engine.num_moved == 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_poison", "num_good"), [(2, 20), pytest.param(10, 200, marks=pytest.mark.long)])
async def test_requests_that_crash_engines_fail_alone(num_poison: int, num_good: int, server: RedisServer) -> None:
    """Each crashes two engines at most, all workers together; it is not tried on another worker after that."""
    good = [make_request(number, 30) for number in range(num_good)]
    expected = expected_events(good)
    poisoned = [poison(1000 + number, at=(number % 3) * 5) for number in range(num_poison)]
    async with worker(server, "a", make=crashing) as first, worker(server, "b", make=crashing) as second:
        async with gateway(server, 2) as engine:
            crowd = RequestGroup(engine, [*good[: num_good // 2], *poisoned, *good[num_good // 2 :]], retries=True)
            await crowd.begin()
            await crowd.end()
        num_restarts = [each.engine.num_restarts for each in (first, second)]
    assert 0 < sum(num_restarts) <= 2 * num_poison
    for name, events in crowd.events.items():
        if name in expected:
            check_same(events, expected[name])
        else:
            assert isinstance(events[-1], Failed) and events[-1].code == "request_poisoned"


@pytest.mark.slow
async def test_request_that_ends_three_workers_fails(server: RedisServer) -> None:
    async with worker(server, "a") as only, gateway(server) as engine:
        await engine.submit(request("r", 100_000))
        reader = asyncio.create_task(collect(engine, "r"))
        for _ in range(3):
            old_id = only.host.id
            server.admin.delete(bus.worker_key(old_id))

            async def condition(old_id: str = old_id) -> bool:
                return reader.done() or (only.host.id != old_id and only.host.num_requests == 1)

            await until(condition)
        end = (await reader)[-1]
        assert isinstance(end, Failed) and end.code == "request_poisoned"


@pytest.mark.slow
async def test_without_a_worker_new_requests_are_refused_and_held_ones_wait(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus, "LEASE_S", 2.0)
    async with worker(server, "a") as first, gateway(server) as engine:
        for name in ("held", "aborted"):
            await engine.submit(request(name, 700, prompt=(5,)))
        reader = asyncio.create_task(collect(engine, "held"))
        await asyncio.sleep(0.3)
        await first.cut_off(leaves_lease=True)

        async def condition() -> bool:
            return not engine.workers

        await until(condition)
        with pytest.raises(OverloadedError, match="no engine worker"):
            await engine.submit(request("late"))
        await engine.abort("aborted")
        end = (await collect(engine, "aborted"))[-1]
        assert isinstance(end, Finished) and end.cancelled
        async with worker(server, "b"):
            assert tokens_of(await reader) == expected_tokens((5,), 700)


@pytest.mark.slow
async def test_redis_outage_pauses_the_requests(server: RedisServer, tmp_path: Path) -> None:
    """Shorter than a lease: nothing is moved. The server loses nothing, since it is only suspended."""
    async with worker(server, "a"), gateway(server) as engine:
        await engine.submit(request("r", 300, prompt=(5,)))
        reader = asyncio.create_task(collect(engine, "r"))
        await asyncio.sleep(0.3)
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(0.8)
        server.signal(signal.SIGCONT)
        assert tokens_of(await reader) == expected_tokens((5,), 300)
        assert engine.num_moved == 0
