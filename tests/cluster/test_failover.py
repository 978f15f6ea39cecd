"""What a failover of Redis can lose on the bus: the latest entries and records, answers, and leases that expire."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from chatcache.cluster import bus, remote_engine, remote_worker, takeover
from chatcache.cluster.placed_requests import MAX_LOST_WORKERS, RequestRecord
from chatcache.cluster.remote_engine import RemoteEngine
from chatcache.cluster.remote_worker import RemoteWorker
from chatcache.cluster.takeover import GatewayRecords, Takeover, records_key
from chatcache.cluster.worker_host import WorkerHost
from chatcache.types.events import Failed, Finished
from chatcache.types.stats import PackedPrompt
from tests.cluster.test_takeover import Gateway, chat_request, gateways, until_adopted, until_sent
from tests.cluster.test_workers import Worker, collect, gateway, tokens_of, worker
from tests.engine_process.engines import expected_tokens, request, until
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.slow
LIMIT_S = 60.0  # of what a lost entry would delay forever
MANY_TOKENS = 100_000


@pytest.fixture(autouse=True)
def quick_polls(patient_bus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice quickly that a lease or an entry is gone."""
    monkeypatch.setattr(bus, "RENEW_S", 0.15)
    monkeypatch.setattr(remote_engine, "_POLL_S", 0.1)


class Lost:
    """The entries that a server has accepted and lost."""

    def __init__(self) -> None:
        self.num_entries = 0

    async def until_some(self) -> None:
        async def condition() -> bool:
            return self.num_entries > 0

        await until(condition)


@contextmanager
def losing(keys: str) -> Iterator[Lost]:
    """Accept entries of the streams whose keys begin like this, and lose them."""
    lost, write = Lost(), bus.StreamWriter._write

    async def lose(self: bus.StreamWriter, fields: Mapping[bytes, bytes]) -> None:
        if self._key.startswith(keys):
            lost.num_entries += 1
        else:
            await write(self, fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus.StreamWriter, "_write", lose)
        yield lost


async def until_idle(only: Worker) -> None:
    async def condition() -> bool:
        return only.host.num_requests == 0

    await until(condition)


async def test_lost_submit_is_sent_again(server: RedisServer) -> None:
    async with worker(server, "a"), gateway(server) as engine:
        with losing(bus.inbox("")) as lost:
            submitting = asyncio.create_task(engine.submit(request("r", 20, prompt=(5,))))
            await lost.until_some()
        async with asyncio.timeout(LIMIT_S):
            await submitting
            assert tokens_of(await collect(engine, "r")) == expected_tokens((5,), 20)


async def test_lost_abort_ends_the_request(server: RedisServer) -> None:
    async with worker(server, "a") as only, gateway(server) as engine:
        await engine.submit(request("r", MANY_TOKENS))
        with losing(bus.inbox("")) as lost:
            await engine.abort("r")
            await lost.until_some()
        async with asyncio.timeout(LIMIT_S):
            end = (await collect(engine, "r"))[-1]
        assert isinstance(end, Finished) and end.cancelled
        async with asyncio.timeout(LIMIT_S):
            await until_idle(only)


async def test_command_after_a_lost_one_does_not_hide_the_loss(server: RedisServer) -> None:
    async with worker(server, "a"), gateway(server) as engine:
        with losing(bus.inbox("")) as lost:
            submitting = asyncio.create_task(engine.submit(request("r", 20, prompt=(5,))))
            await lost.until_some()
        await engine.submit(request("later", 20, prompt=(7,)))
        async with asyncio.timeout(LIMIT_S):
            await submitting
            assert tokens_of(await collect(engine, "r")) == expected_tokens((5,), 20)
            assert tokens_of(await collect(engine, "later")) == expected_tokens((7,), 20)


async def test_lost_end_is_noticed_although_the_worker_is_idle(server: RedisServer) -> None:
    async with worker(server, "a") as only, gateway(server) as engine:
        await engine.submit(request("r", 300, prompt=(5,)))
        await until_sent(engine, "r", 5)
        with losing(bus.outbox("")):
            await until_idle(only)
        async with asyncio.timeout(LIMIT_S):
            assert tokens_of(await collect(engine, "r")) == expected_tokens((5,), 300)
        assert engine.num_moved == 1


async def test_losses_are_not_the_fault_of_a_request(server: RedisServer) -> None:
    async with worker(server, "a"), gateway(server) as engine:
        await engine.submit(request("r", 700, prompt=(5,)))
        for num_losses in range(1, MAX_LOST_WORKERS + 2):
            await until_sent(engine, "r", 20 * num_losses)
            with losing(bus.outbox("")) as lost:
                await lost.until_some()

            async def condition(num_losses: int = num_losses) -> bool:
                return engine.num_moved == num_losses

            await until(condition)
        async with asyncio.timeout(LIMIT_S):
            assert tokens_of(await collect(engine, "r")) == expected_tokens((5,), 700)


async def test_commands_with_smaller_ids_than_before_are_read(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the new primary is behind that of the old one."""
    monkeypatch.setattr(remote_worker, "MAX_RENEWALS", 1000)  # the worker itself continues
    async with worker(server, "a") as only, gateway(server) as engine:
        key = bus.inbox(only.host.id)
        fields = {bus.FROM: b"g", bus.NUMBER: b"1", bus.AFTER: b"0", bus.COMMANDS: bus.encode_list([])}
        server.admin.xadd(key, fields, id="9999999999999-0")

        async def condition() -> bool:
            return not server.admin.xlen(key)

        await until(condition)
        server.admin.delete(key)
        async with asyncio.timeout(LIMIT_S):
            await engine.submit(request("r", 20, prompt=(5,)))
            assert tokens_of(await collect(engine, "r")) == expected_tokens((5,), 20)
        assert engine.num_moved == 0


async def test_entry_that_was_written_twice_is_applied_once(server: RedisServer) -> None:
    async with worker(server, "a") as only, gateway(server) as engine:
        key, write = bus.inbox(only.host.id), bus.StreamWriter._write

        async def write_twice(self: bus.StreamWriter, fields: Mapping[bytes, bytes]) -> None:
            await write(self, fields)
            if self._key == key:
                await write(self, fields)

        apply = WorkerHost._apply
        applied: list[bytes] = []

        async def apply_and_record(self: WorkerHost, gateway: str, body: bytes) -> None:
            applied.append(body)
            await apply(self, gateway, body)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bus.StreamWriter, "_write", write_twice)
            patch.setattr(WorkerHost, "_apply", apply_and_record)
            await engine.submit(request("r", 100, prompt=(5,)))
            for _ in range(3):
                await engine.count_cached_tokens([PackedPrompt(bytes(8))])
            assert tokens_of(await collect(engine, "r")) == expected_tokens((5,), 100)
        assert len(applied) == len(set(applied)) == 4 and engine.num_moved == 0


async def test_request_that_another_gateway_sends_again_fails_on_the_first(server: RedisServer) -> None:
    async with worker(server, "a"), gateways(server) as (first, second):
        await first.engine.submit(request("r", MANY_TOKENS, prompt=(5,)))
        await until_sent(first.engine, "r", 5)
        await second.engine.submit(request("r", 50, prompt=(5,)))
        async with asyncio.timeout(LIMIT_S):
            assert isinstance((await collect(first.engine, "r"))[-1], Failed)
            assert tokens_of(await collect(second.engine, "r")) == expected_tokens((5,), 50)


async def test_lease_that_expires_while_a_worker_is_connected_leaves_no_old_connection(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RemoteWorker.start
    old_ids: list[str] = []

    async with RemoteEngine(server.url, "gateway") as engine:

        async def start_during_expiry(self: RemoteWorker) -> None:
            await start(self)
            if not old_ids:
                old_ids.append(engine.id)
                server.admin.delete(bus.gateway_key(engine.id))

                async def condition() -> bool:
                    return engine.id != old_ids[0]

                await until(condition)

        monkeypatch.setattr(RemoteWorker, "start", start_during_expiry)
        async with worker(server, "a"):
            await engine.wait_loaded()
            assert [each.gateway for each in engine._workers.values()] == [engine.id]
            await engine.submit(request("r", 50, prompt=(5,)))
            assert tokens_of(await collect(engine, "r")) == expected_tokens((5,), 50)


def own(gateway: Gateway, *names: str) -> None:
    """Let the store name this gateway as the one that runs these requests, and no others."""

    async def owns(name: str) -> bool:
        return name in names

    gateway.engine.recorder.owns = owns


async def test_gateway_continues_a_request_whose_record_was_lost(server: RedisServer) -> None:
    async with worker(server, "a"), gateways(server) as (first, _):
        for name in ("r", "ended elsewhere"):
            await first.engine.submit(chat_request(name, 400))
            await first.engine.recorder.record(name, b"data")
        own(first, "r")
        await until_sent(first.engine, "r", 20)
        server.admin.delete(records_key(first.engine.id), bus.gateway_key(first.engine.id))

        async def condition() -> bool:
            return bool(server.admin.hexists(records_key(first.engine.id), "r"))

        await until(condition)
        assert first.lost == ["ended elsewhere"]
        async with asyncio.timeout(LIMIT_S):
            assert tokens_of(await collect(first.engine, "r")) == expected_tokens((5,), 400)


@pytest.mark.parametrize("late", ["renewal", "move"])
async def test_gateway_without_lease_does_not_restore_records_that_another_has_taken(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """It was cut off. `late`: it restores its records before that, which shows what it has lost."""
    restored = asyncio.Event()
    renew, restore, take = bus.Lease.renew, GatewayRecords.restore, takeover.take_records

    async with worker(server, "a"), gateways(server) as (first, second):
        second.engine.recorder.on_adopt = None
        old_id = first.engine.id

        async def renew_late(self: bus.Lease, value: bytes) -> bool:
            if late == "renewal" and self._key == bus.gateway_key(old_id):
                await restored.wait()
            return await renew(self, value)

        async def take_late(client: Any, old: str, new: str) -> list[RequestRecord]:
            if late == "move" and old == old_id:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(restored.wait(), 0.75)
            return await take(client, old, new)

        async def restore_and_report(self: GatewayRecords, present: Sequence[RequestRecord]) -> list[RequestRecord]:
            found = await restore(self, present)
            if self is first.engine._records:
                restored.set()
            return found

        await first.engine.submit(chat_request("r", MANY_TOKENS))
        await first.engine.recorder.record("r", b"data")
        await until_sent(first.engine, "r", 5)
        await take(second.engine._redis, old_id, second.engine.id)
        server.admin.delete(bus.gateway_key(old_id))
        monkeypatch.setattr(bus.Lease, "renew", renew_late)
        monkeypatch.setattr(takeover, "take_records", take_late)
        monkeypatch.setattr(GatewayRecords, "restore", restore_and_report)
        first.engine._records.are_uncertain = True

        async def condition() -> bool:
            return any(each.gateway == first.engine.id != old_id for each in first.engine._workers.values())

        await until(condition)
        assert first.lost == ["r"]
        assert not server.admin.hexists(records_key(first.engine.id), "r")


async def test_gateway_keeps_its_requests_if_the_answer_to_the_move_of_their_records_is_lost(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, num_takes = takeover.take_records, 0

    async def lose_answer(client: Any, old: str, new: str) -> list[RequestRecord]:
        nonlocal num_takes
        num_takes += 1
        found = await take(client, old, new)
        if num_takes == 1:
            raise redis.ConnectionError("planted")
        return found

    async with worker(server, "a"), gateways(server) as (first, second):
        second.engine.recorder.on_adopt = None
        await first.engine.submit(chat_request("r", 400))
        await first.engine.recorder.record("r", b"data")
        own(first)
        monkeypatch.setattr(takeover, "take_records", lose_answer)
        server.admin.delete(bus.gateway_key(first.engine.id))
        async with asyncio.timeout(LIMIT_S):
            assert tokens_of(await collect(first.engine, "r")) == expected_tokens((5,), 400)
        assert num_takes >= 2 and not first.lost


async def test_request_is_sent_to_another_worker_only_when_its_record_names_that_one(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that takes it over would not find the events of that worker."""
    write, num_failures, is_failing = takeover.write_records, 0, True

    async def write_later(client: Any, name: str, found: Iterable[RequestRecord]) -> None:
        nonlocal num_failures
        if is_failing:
            num_failures += 1
            raise redis.ConnectionError("planted")
        await write(client, name, found)

    async with worker(server, "a") as one, worker(server, "b") as other, gateways(server, 2) as (first, _):
        await first.engine.submit(chat_request("r", 400))
        await first.engine.recorder.record("r", b"data")
        await until_sent(first.engine, "r", 20)
        lost, kept = (one, other) if one.host.num_requests else (other, one)
        monkeypatch.setattr(takeover, "write_records", write_later)
        await lost.cut_off()

        async def condition() -> bool:
            return first.engine.num_moved == 1 and num_failures >= 3

        await until(condition)
        assert kept.host.num_requests == 0
        is_failing = False
        async with asyncio.timeout(LIMIT_S):
            assert tokens_of(await collect(first.engine, "r")) == expected_tokens((5,), 400)


@pytest.mark.parametrize("error", [redis.ConnectionError, redis.WatchError], ids=["connection", "transaction"])
async def test_requests_are_taken_over_although_the_answer_is_lost(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, error: type[redis.RedisError]
) -> None:
    take, has_failed = takeover.take_records, False

    async def lose_answer(client: Any, old: str, new: str) -> list[RequestRecord]:
        nonlocal has_failed
        found = await take(client, old, new)
        if not has_failed:
            has_failed = True
            raise error("planted")
        return found

    async with worker(server, "a"), gateways(server) as (first, second):
        await first.engine.submit(chat_request("r", 400))
        await first.engine.recorder.record("r", b"data")
        monkeypatch.setattr(takeover, "take_records", lose_answer)
        await first.kill()
        await until_adopted(second, 1)
        async with asyncio.timeout(LIMIT_S):
            assert tokens_of(await collect(second.engine, "r")) == expected_tokens((5,), 400)
        assert has_failed


async def test_deleted_record_that_is_back_is_deleted_again(server: RedisServer) -> None:
    async with worker(server, "a"), gateways(server) as (first, _):
        await first.engine.submit(chat_request("r", 20))
        await first.engine.recorder.record("r", b"data")
        record = server.admin.hget(records_key(first.engine.id), "r")
        await collect(first.engine, "r")
        first.engine.recorder.discard_record("r")

        async def condition() -> bool:
            return not server.admin.hexists(records_key(first.engine.id), "r")

        await until(condition)
        first.accepts = False  # it has ended in the store
        server.admin.hset(records_key(first.engine.id), "r", record)
        first.engine._records.are_uncertain = True
        await until_adopted(first, 1)
        await until(condition)
        assert not first.engine.recorder.num_adopted


async def test_gateways_that_lost_their_leases_in_an_outage_keep_their_requests(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one takes longer to come back than the second one needs to find that it has no lease."""
    change_id = Takeover.change_id
    monkeypatch.setattr(bus, "LEASE_S", 3.0)
    monkeypatch.setattr(bus, "TIMEOUT_S", 1.0)

    async with worker(server, "a"), gateways(server) as (first, second):

        async def change_id_late(self: Takeover, gateway: str) -> None:
            if self is first.engine.recorder:
                await asyncio.sleep(0.5)
            await change_id(self, gateway)

        monkeypatch.setattr(Takeover, "change_id", change_id_late)
        old_id = first.engine.id
        await first.engine.submit(chat_request("r", 700))
        await first.engine.recorder.record("r", b"data")
        await until_sent(first.engine, "r", 20)
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(bus.LEASE_S + bus.BLOCK_S + bus.TIMEOUT_S)
        server.signal(signal.SIGCONT)
        async with asyncio.timeout(LIMIT_S):
            assert tokens_of(await collect(first.engine, "r")) == expected_tokens((5,), 700)
        assert first.engine.id != old_id and not first.lost and not second.adopted
