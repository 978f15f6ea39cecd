"""Requests of a gateway between its client and workers that exist as lists of commands only."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from chatcache.cluster.placed_requests import PlacedRequest, PlacedRequests, RequestRecord
from chatcache.cluster.remote_worker import RemoteWorker
from chatcache.cluster.request_router import RequestRouter
from chatcache.engine_process.protocol import (
    Abort,
    Answer,
    CancelCandidate,
    Command,
    Events,
    Submit,
    decode_command,
    encode_error,
)
from chatcache.errors import OverloadedError
from chatcache.types.events import EngineEvent, Finished, Started, Tokens
from tests.cluster.test_request_router import WORKERS
from tests.engine_process.engines import request

FULL = encode_error(OverloadedError("full"))


class Rig:
    """The requests of gateway "g", its workers by name, and the records that it has written."""

    def __init__(self) -> None:
        self.connected: dict[str, RemoteWorker] = {}
        self.router = RequestRouter(None)
        self.numbers = itertools.count(1)
        self.requests = PlacedRequests(self.router, self.connected, self.numbers, self._write)
        self.is_answering = asyncio.Event()
        self.is_answering.set()
        self.has_failed = False
        self.num_writes = 0
        for status in WORKERS:
            receive = self.requests.receive
            worker = RemoteWorker(None, status, "g", self.numbers, receive, self.router.update_load)
            self.connected[worker.id] = worker
            self.router.connect(status, "g")
        self.router.update(WORKERS)

    async def _write(self, records: Sequence[RequestRecord]) -> bool:
        self.num_writes += 1
        await self.is_answering.wait()
        return not self.has_failed

    async def submit(self, name: str = "r") -> tuple[asyncio.Task[None], RemoteWorker]:
        """Submit a request; return the call, and the worker that has received it."""
        submitting = asyncio.create_task(self.requests.submit(request(name)))
        await asyncio.sleep(0)
        return submitting, self.worker_of(name)

    async def run(self, name: str = "r") -> RemoteWorker:
        """Submit a request that its worker accepts; return that one, which has emitted a token."""
        submitting, worker = await self.submit(name)
        self.answer(worker)
        await submitting
        self.requests.receive(worker, Events((Started(name, 1, 3, 0), Tokens(name, 2, 0, (5,)))))
        return worker

    def worker_of(self, name: str) -> RemoteWorker:
        (worker,) = [each for each in self.connected.values() if any(_is_submit(cmd, name) for cmd in sent(each)[-1:])]
        return worker

    def answer(self, worker: RemoteWorker, *, is_full: bool = False) -> None:
        """Answer the last submit to a worker."""
        call = [each.call for each in sent(worker) if isinstance(each, Submit)][-1]
        self.requests.receive(worker, Answer(call, FULL if is_full else None))

    def lose(self, worker: RemoteWorker) -> None:
        worker.is_lost = True
        del self.connected[worker.id]
        self.requests.leave_worker(worker, num_lost=1)
        self.router.disconnect(worker.id)
        self.router.update([each.status for each in self.connected.values()])

    def placed(self, name: str = "r") -> PlacedRequest:
        found = self.requests.get(name)
        assert found is not None
        return found

    async def events(self, name: str = "r") -> list[EngineEvent]:
        async with asyncio.timeout(60):
            return [event async for event in self.requests.client.events(name)]


def sent(worker: RemoteWorker) -> list[Command]:
    return [decode_command(body) for body in worker._commands]


def _is_submit(command: Command, name: str) -> bool:
    return isinstance(command, Submit) and command.request.request_id == name


async def test_full_worker_leaves_the_request_to_another_one() -> None:
    rig = Rig()
    submitting, full = await rig.submit()
    full._commands.clear()
    call = rig.placed().calls[-1]
    rig.requests.receive(full, Answer(call, FULL))
    other = rig.worker_of("r")
    assert other is not full and not sent(full)
    rig.answer(other)
    await submitting
    assert [(each.gateway, each.worker) for each in rig.placed().attempts] == [("g", other.id)]


async def test_request_aborted_before_its_refusal_arrives_is_not_sent_to_another_worker() -> None:
    rig = Rig()
    submitting, full = await rig.submit()
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    assert isinstance(sent(full)[-1], Abort)
    rig.answer(full, is_full=True)
    assert not len(rig.requests)
    assert not any(sent(each) for each in rig.connected.values() if each is not full)


async def test_moved_request_aborted_before_its_refusal_arrives_ends_as_cancelled() -> None:
    rig = Rig()
    rig.lose(await rig.run())
    await rig.requests.place_waiting()
    full = rig.worker_of("r")
    rig.requests.client.abort("r")
    rig.answer(full, is_full=True)
    end = (await rig.events())[-1]
    assert isinstance(end, Finished) and end.cancelled and end.num_output_tokens == 1


async def test_refused_request_with_a_record_is_sent_when_the_record_is_written() -> None:
    rig = Rig()
    lost = await rig.run()
    rig.placed().data = b"data"
    rig.lose(lost)
    await rig.requests.place_waiting()
    full = rig.worker_of("r")
    rig.answer(full, is_full=True)
    (third,) = [each for each in rig.connected.values() if each is not full]
    rig.has_failed = True
    await rig.requests.place_waiting()
    assert rig.num_writes == 2 and not sent(third)
    rig.has_failed = False
    await rig.requests.place_waiting()
    (submit,) = sent(third)
    assert isinstance(submit, Submit) and submit.request.resume_point is not None
    assert submit.request.resume_point.last_seq == 2


async def test_drop_sent_to_a_worker_that_refuses_the_request_goes_to_the_next_one() -> None:
    rig = Rig()
    rig.lose(await rig.run())
    await rig.requests.place_waiting()
    full = rig.worker_of("r")
    dropping = asyncio.create_task(rig.requests.client.cancel_candidate("r", 0))
    await asyncio.sleep(0)
    (drop,) = [each for each in sent(full) if isinstance(each, CancelCandidate)]
    full._commands.clear()
    rig.requests.receive(full, Answer(rig.placed().calls[-1], FULL))
    (third,) = [each for each in rig.connected.values() if each is not full]
    assert [type(each) for each in sent(third)] == [Submit, CancelCandidate]
    rig.requests.receive(full, Answer(drop.call))  # it does not run the request
    await asyncio.sleep(0)
    assert not dropping.done()
    rig.answer(third)
    rig.requests.receive(third, Answer(drop.call))
    await asyncio.wait_for(dropping, 10)


async def test_request_aborted_while_its_record_is_written_is_not_sent() -> None:
    rig = Rig()
    lost = await rig.run()
    rig.placed().data = b"data"
    rig.lose(lost)
    rig.is_answering.clear()
    placing = asyncio.create_task(rig.requests.place_waiting())
    await asyncio.sleep(0)
    assert rig.num_writes == 1
    rig.requests.client.abort("r")
    rig.is_answering.set()
    await placing
    assert not any(sent(each) for each in rig.connected.values())
    end = (await rig.events())[-1]
    assert isinstance(end, Finished) and end.cancelled


async def test_worker_that_had_no_room_is_asked_again_when_no_other_is_left() -> None:
    rig = Rig()
    submitting, full = await rig.submit()
    rig.answer(full, is_full=True)
    (other,) = [each for each in rig.connected.values() if each is not full and sent(each)]
    rig.answer(other)
    await submitting
    full._commands.clear()
    for worker in [each for each in rig.connected.values() if each is not full]:
        rig.lose(worker)
    for _ in range(2):
        await rig.requests.place_waiting()
    assert len(sent(full)) == 1
    rig.answer(full)
    assert rig.placed().is_answered
