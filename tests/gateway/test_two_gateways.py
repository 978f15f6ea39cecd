"""Two gateways over one Redis: one of them serves a response that runs on the other as if it ran there."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI, omit
from openai.types.responses import ResponseStreamEvent
from redis.asyncio.client import PubSub
from websockets.sync.client import ClientConnection, connect

from chatcache.conversations.store import StoreUnavailableError
from chatcache.conversations.tree import derive_id, new_id
from chatcache.errors import NotFoundError, RateLimitError
from chatcache.gateway import context, peers
from chatcache.gateway.auth.principal import KeyLimits, Principal
from chatcache.gateway.errors import LogUnreachableError
from chatcache.gateway.limits.rate_limits import RateLimiter, RequestCost
from chatcache.gateway.peers import GatewayPeers, RemoteResponse
from chatcache.gateway.responses import registry
from chatcache.gateway.responses.event_log import ResponseLog
from chatcache.gateway.responses.registry import Cancel, LoggedResponse, ResponseRegistry
from chatcache.gateway.responses.steering import restored_steer
from chatcache.storage import redis_client
from chatcache.storage.redis_layout import ALL_GATEWAYS_CHANNEL, gateway_channel
from tests.gateway.frames import Frame, receive, send, until_end
from tests.gateway.kept import keeping, server_on
from tests.gateway.serving import Server, hurry, slowed, wait_until
from tests.support.redis_servers import RedisServer

LONG: Frame = {"input": "Tell me a lot", "background": True, "max_output_tokens": 900, "ignore_eos": True}
INCLUDE = "message.output_text.logprobs"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that is down in one test only: on a busy machine its answers may take long."""
    with keeping("redis", tmp_path_factory.mktemp("gateways")) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_client, "TIMEOUT_S", redis_client.SLOW_TIMEOUT_S)
        assert isinstance(found, RedisServer)
        yield found


@pytest.fixture(scope="module")
def gateways(store: RedisServer) -> Iterator[tuple[Server, Server]]:
    with server_on(store) as first, server_on(store) as second:
        yield first.wait_ready(), second.wait_ready()


@pytest.fixture
def pair(gateways: tuple[Server, Server]) -> Iterator[tuple[Server, Server]]:
    """The gateway that runs a response slowly, and the other; at the end, nothing runs on either."""
    with slowed(gateways[0], 0.02):
        yield gateways
    for server in gateways:
        server.wait_idle()


def begin(server: Server, **fields: object) -> str:
    response_id = str(server.post("/v1/responses", **{**LONG, **fields})[2]["id"])
    path = f"/v1/responses/{response_id}"

    def has_texts() -> bool:
        items = server.request("GET", path)[2]["output"]
        return items != [] and all(item["content"] and item["content"][0]["text"] for item in items)

    wait_until(has_texts, "every candidate has a text")
    return response_id


@contextlib.contextmanager
def streamed(server: Server, response_id: str, after: int = -1) -> Iterator[Iterator[ResponseStreamEvent]]:
    """The events of a response as the official client receives them."""
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.retrieve(response_id, stream=True, starting_after=after if after >= 0 else omit) as events,
    ):
        yield iter(events)


def all_events(server: Server, response_id: str, after: int = -1) -> list[ResponseStreamEvent]:
    with streamed(server, response_id, after) as events:
        return list(events)


def numbers_of(events: Iterable[ResponseStreamEvent]) -> list[int]:
    return [event.sequence_number for event in events]


@contextlib.contextmanager
def tab(server: Server) -> Iterator[ClientConnection]:
    """A connection as the page has it."""
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    with connect(url, subprotocols=["chatcache.v1"], compression=None) as socket:  # type: ignore[list-item]
        assert receive(socket)["type"] == "session.created"
        yield socket


def until(socket: ClientConnection, *kinds: str) -> Frame:
    while (frame := receive(socket))["type"] not in kinds:
        pass
    return frame


@pytest.mark.slow
def test_retrieve_and_cancel_through_the_other_gateway_return_the_same(pair: tuple[Server, Server]) -> None:
    owner, other = pair
    path = f"/v1/responses/{begin(owner, n=2)}"
    running = other.request("GET", path)[2]
    assert running["status"] == "in_progress" and running["output"][0]["content"][0]["text"]
    cancelled = other.post(f"{path}/cancel")[2]
    assert cancelled["status"] == "cancelled" and cancelled["receipt"]["pages_freed"] > 0
    assert owner.request("GET", path)[2] == cancelled
    assert other.post(f"{path}/cancel")[2] == cancelled
    assert other.request("GET", "/v1/responses/resp_unknown")[0] == 404


@pytest.mark.slow
def test_stream_through_the_other_gateway_has_the_same_frames(pair: tuple[Server, Server]) -> None:
    owner, other = pair
    fields: Frame = {"max_output_tokens": 80, "n": 2, "include": [INCLUDE], "top_logprobs": 2}
    response_id = begin(owner, **fields)
    events = all_events(other, response_id)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in ("response.completed", "response.incomplete")
    same = all_events(owner, response_id)
    assert [event.to_json() for event in events] == [event.to_json() for event in same]
    rest = all_events(other, response_id, after=10)
    assert [event.to_json() for event in rest] == [event.to_json() for event in same[11:]]
    path = f"/v1/responses/{response_id}"
    assert other.request("GET", path)[2] == owner.request("GET", path)[2], "log-probabilities included"
    refused = other.request("GET", f"{path}?stream=true&starting_after=100000")
    assert refused[0] == 400 and refused[2]["error"]["param"] == "starting_after"


@contextlib.contextmanager
def lagging_copy(other: Server, response_id: str) -> Iterator[ResponseLog]:
    """The copy of a log at the other gateway, which gets frames again at the earliest at the end of the test."""
    assert other.request("GET", f"/v1/responses/{response_id}")[0] == 200
    assert other.gateway.peers is not None
    copy = other.gateway.peers._copies.get("", response_id).log
    is_held, is_released, read = threading.Event(), threading.Event(), RemoteResponse.read

    async def read_late(self: RemoteResponse) -> int:
        is_held.set()
        while not is_released.is_set():  # noqa: ASYNC110 - an event of another thread
            await asyncio.sleep(0.01)
        return await read(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteResponse, "read", read_late)
        assert is_held.wait(60)
        try:
            yield copy
        finally:
            is_released.set()


def read_beyond(server: Server, response_id: str, copy: ResponseLog) -> int:
    """Read the events of a response until one that a copy does not have; return its number."""
    with streamed(server, response_id, after=copy.last_number) as events:
        return [next(events).sequence_number for _ in range(5)][-1]


@pytest.mark.slow
def test_stream_after_an_event_that_the_copy_does_not_have_yet_continues_there(pair: tuple[Server, Server]) -> None:
    owner, other = pair
    response_id = begin(owner)
    path = f"/v1/responses/{response_id}"
    with ThreadPoolExecutor(2) as pool, lagging_copy(other, response_id) as copy:
        number = read_beyond(owner, response_id, copy)
        resumed = pool.submit(all_events, other, response_id, number)
        beyond = pool.submit(other.request, "GET", f"{path}?stream=true&starting_after=100000")
        time.sleep(0.5)
        assert copy.last_number < number
    refused = beyond.result()
    assert (refused[0], refused[2]["error"]["param"]) == (400, "starting_after"), "an event that the response lacks"
    hurry(owner)
    numbers = numbers_of(resumed.result())
    assert numbers == list(range(number + 1, numbers[-1] + 1))


@pytest.mark.slow
def test_web_socket_resume_after_an_event_that_the_copy_does_not_have_yet_continues_there(
    pair: tuple[Server, Server],
) -> None:
    owner, other = pair
    response_id = begin(owner)
    with tab(other) as socket:
        with lagging_copy(other, response_id) as copy:
            number = read_beyond(owner, response_id, copy)
            send(socket, "response.resume", response_id=response_id, starting_after=number)
            send(socket, "no.such.type")
            assert receive(socket)["error"]["param"] == "type", "other messages do not wait for the other gateway"
            assert copy.last_number < number
        resumed = receive(socket)
        assert resumed["type"] == "response.resumed" and resumed["sequence_number"] >= number, resumed
        while "sequence_number" not in (frame := receive(socket)):
            pass
        assert frame["sequence_number"] == number + 1
    owner.post(f"/v1/responses/{response_id}/cancel")


@pytest.mark.slow
def test_retrieve_through_the_other_gateway_after_the_end_returns_the_ended_response(
    pair: tuple[Server, Server],
) -> None:
    owner, other = pair
    response_id = begin(owner)
    path = f"/v1/responses/{response_id}"
    with ThreadPoolExecutor(1) as pool, lagging_copy(other, response_id) as copy:
        cancelled = owner.post(f"{path}/cancel")[2]
        retrieved = pool.submit(other.request, "GET", path)
        time.sleep(0.5)
        assert copy.terminal is None
    assert retrieved.result()[2] == cancelled and cancelled["status"] == "cancelled"


@pytest.mark.slow
def test_stream_after_a_later_event_than_the_copy_has_waits_for_the_owner_and_is_a_503_in_the_end(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response may have the event: a client that receives a 503 tries again."""
    owner, other = pair
    response_id = begin(owner)
    path = f"/v1/responses/{response_id}"
    with ThreadPoolExecutor(1) as pool, lagging_copy(other, response_id) as copy:
        number = read_beyond(owner, response_id, copy)
        monkeypatch.setattr(peers, "ANSWER_S", 0.2)
        monkeypatch.setattr(context, "OPEN_S", 0.0)
        refused = other.request("GET", f"{path}?stream=true&starting_after={number}")
        assert (refused[0], refused[2]["error"]["code"]) == (503, "gateway_unreachable")
        assert other.request("GET", path)[2]["status"] == "in_progress", "the stored state"
        monkeypatch.setattr(context, "OPEN_S", 60.0)
        resumed = pool.submit(all_events, other, response_id, number)
        time.sleep(0.5)
        assert copy.last_number < number and not resumed.done()
    hurry(owner)
    assert next(iter(resumed.result())).sequence_number == number + 1


@pytest.mark.slow
def test_stream_of_a_response_that_ended_on_the_other_gateway_is_found(gateways: tuple[Server, Server]) -> None:
    owner, other = gateways
    response_id = owner.post("/v1/responses", input="Hi", max_output_tokens=4)[2]["id"]
    events = all_events(other, response_id)
    assert [event.sequence_number for event in events] == list(range(len(events))) and len(events) > 3
    assert other.request("DELETE", f"/v1/responses/{response_id}")[0] == 200
    path = f"/v1/responses/{response_id}"
    wait_until(lambda: [server.request("GET", path)[0] for server in gateways] == [404, 404], "deleted on both")


@pytest.mark.slow
def test_events_of_an_ended_response_do_not_count_as_lost_while_no_answer_can_arrive(
    store: RedisServer, gateways: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the subscription of the asking gateway is opened again."""
    owner, other = gateways
    response_id = owner.post("/v1/responses", input="Hi", max_output_tokens=4)[2]["id"]
    asking = other.gateway.peers
    assert asking is not None and asking._channel.name
    channel, is_held, subscribe = gateway_channel(asking._channel.name), True, PubSub.subscribe

    async def subscribe_late(self: PubSub, *names: str) -> object:
        while is_held and channel in names:  # noqa: ASYNC110 - a flag of another thread
            await asyncio.sleep(0.01)
        return await subscribe(self, *names)

    monkeypatch.setattr(PubSub, "subscribe", subscribe_late)
    monkeypatch.setattr(peers, "ANSWER_S", 0.2)
    store.admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    try:
        wait_until(lambda: store.admin.pubsub_numsub(ALL_GATEWAYS_CHANNEL)[0][1] == 1, "one subscription")
        with pytest.raises(LogUnreachableError):
            other.call(asking._find_log("", response_id))
    finally:
        is_held = False
    monkeypatch.setattr(peers, "ANSWER_S", 60.0)
    wait_until(lambda: store.admin.pubsub_numsub(channel)[0][1] == 1, "the subscription of the asking gateway")
    assert other.call(asking._find_log("", response_id)) is not None


@pytest.mark.slow
def test_continuation_on_the_other_gateway_contains_the_running_reply(pair: tuple[Server, Server]) -> None:
    owner, other = pair
    response_id = begin(owner)
    question: Frame = {"input": "And?", "max_output_tokens": 4, "temperature": 0}
    path = f"/v1/responses/{response_id}"
    wait_until(lambda: len(other.request("GET", path)[2]["output"][0]["content"][0]["text"]) > 40, "tokens to fork at")
    item_id = other.request("GET", path)[2]["output"][0]["id"]
    counted = other.post("/v1/responses/input_tokens", input="And?", previous_response_id=response_id)
    assert counted[0] == 200 and counted[2]["input_tokens"] > 20
    positions = ({"previous_response_id": response_id}, {"previous_item_id": item_id, "fork_at": 5})
    forks = [[server.post("/v1/responses", **question, **at)[2] for server in pair] for at in positions]
    for here, there in forks:
        assert here["conversation"] == there["conversation"]
    at_token = [fork["usage"]["input_tokens"] for fork in forks[1]]
    assert at_token[0] == at_token[1] < forks[0][1]["usage"]["input_tokens"]
    assert [fork["output"][0]["content"] for fork in forks[1]] == [forks[1][0]["output"][0]["content"]] * 2
    assert other.request("GET", path)[2]["status"] == "in_progress"
    other.post(f"{path}/cancel")


@pytest.mark.slow
def test_web_socket_of_the_other_gateway_resumes_drops_steers_and_cancels(pair: tuple[Server, Server]) -> None:
    owner, other = pair
    response_id = begin(owner, n=3)
    with tab(other) as socket:
        send(socket, "response.resume", response_id=response_id, starting_after=3)
        assert receive(socket)["type"] == "response.resumed"
        send(socket, "response.drop", response_id=response_id, candidate=1)
        dropped = until(socket, "response.dropped", "error")
        assert dropped["candidate"] == 1 and dropped["receipt"]["pages_freed"] >= 0
        send(socket, "response.drop", response_id=response_id, candidate=1)
        answer = until(socket, "response.dropped", "error")
        assert answer["error"]["message"] == "candidate 1 has ended"
        send(socket, "response.steer", previous_response_id=response_id, input="Shorter")
        assert until(socket, "response.steer.accepted", "response.steer.failed")["type"] == "response.steer.accepted"
        assert until(socket, "response.incomplete")["response"]["incomplete_details"] == {"reason": "steered"}
        successor = until(socket, "response.created")["response"]
        assert successor["previous_response_id"] == response_id
        send(socket, "response.cancel", response_id=successor["id"])
        assert until_end(socket)[-1]["response"]["status"] == "cancelled"
        send(socket, "response.cancel", response_id="resp_unknown")
        assert until(socket, "error")["error"]["code"] == "not_found"


@pytest.mark.slow
def test_stream_of_a_steered_response_that_has_ended_on_the_other_gateway_goes_on_to_its_successor(
    pair: tuple[Server, Server],
) -> None:
    owner, other = pair
    response_id = begin(owner)
    with tab(owner) as socket:
        send(socket, "response.resume", response_id=response_id)
        until(socket, "response.resumed")
        send(socket, "response.steer", previous_response_id=response_id, input="Shorter")
        until(socket, "response.incomplete")
        successor = until(socket, "response.created")["response"]["id"]
    with tab(other) as socket:
        send(socket, "response.resume", response_id=response_id, starting_after=3)
        until(socket, "response.incomplete")
        assert until(socket, "response.created")["response"]["id"] == successor
        send(socket, "response.cancel", response_id=successor)
        until_end(socket)


@pytest.mark.slow
def test_tab_of_the_other_gateway_sees_conversations_change_and_what_runs(pair: tuple[Server, Server]) -> None:
    owner, other = pair
    with tab(other) as socket:
        send(socket, "conversation.subscribe")
        until(socket, "conversation.subscribed")
        response_id = begin(owner)
        while (updated := until(socket, "conversation.updated"))["running"] != [response_id]:
            pass  # the last update of an earlier test may arrive late
        with tab(other) as second:
            send(second, "conversation.subscribe")
            assert response_id in [each["response_id"] for each in until(second, "conversation.subscribed")["running"]]
        conversation_id = updated["conversation"]["id"]
        assert owner.request("DELETE", f"/v1/conversations/{conversation_id}")[0] == 200
        assert until(socket, "conversation.deleted")["conversation_id"] == conversation_id
    wait_until(lambda: not list(other.gateway.hub.running_elsewhere("")), "no response is taken for running")


@contextlib.contextmanager
def unsubscribed() -> Iterator[None]:
    """Until the end of the block, no gateway can subscribe to messages of the others."""
    is_held, subscribe = True, PubSub.subscribe

    async def subscribe_late(self: PubSub, *names: str) -> object:
        while is_held:  # noqa: ASYNC110 - a flag of another thread
            await asyncio.sleep(0.01)
        return await subscribe(self, *names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PubSub, "subscribe", subscribe_late)
        try:
            yield
        finally:
            is_held = False


def until_running(socket: ClientConnection, *response_ids: str) -> None:
    """Read notifications until one names these running responses."""
    while until(socket, "conversation.updated")["running"] != [*response_ids]:
        pass


@pytest.mark.slow
def test_tab_of_a_gateway_that_starts_later_is_notified_of_what_runs(
    store: RedisServer, pair: tuple[Server, Server]
) -> None:
    response_id = begin(pair[0])
    with contextlib.ExitStack() as stack:
        with unsubscribed():
            later = stack.enter_context(server_on(store)).wait_ready()
            socket = stack.enter_context(tab(later))
            send(socket, "conversation.subscribe")
            assert until(socket, "conversation.subscribed")["running"] == []
        until_running(socket, response_id)
        pair[0].post(f"/v1/responses/{response_id}/cancel")
        until_running(socket)


@pytest.mark.slow
def test_response_that_ends_while_no_message_arrives_is_not_taken_for_running(
    store: RedisServer, pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = pair
    with tab(other) as socket:
        send(socket, "conversation.subscribe")
        response_id = begin(owner)
        until_running(socket, response_id)
        monkeypatch.setattr(peers, "CHECK_RUNNING_S", 600.0)
        with unsubscribed():
            store.admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            owner.post(f"/v1/responses/{response_id}/cancel")
        until_running(socket)
    assert not list(other.gateway.hub.running_elsewhere(""))


@pytest.mark.slow
def test_tab_is_notified_of_changes_that_were_lost_with_the_subscription(
    store: RedisServer, gateways: tuple[Server, Server]
) -> None:
    """The list that it reads then has them."""
    first, other = gateways
    ids = [str(first.post("/v1/conversations")[2]["id"]) for _ in range(2)]
    with tab(other) as socket:
        send(socket, "conversation.subscribe")
        until(socket, "conversation.subscribed")
        with unsubscribed():
            store.admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            assert first.post(f"/v1/conversations/{ids[0]}", title="renamed")[0] == 200
            assert first.request("DELETE", f"/v1/conversations/{ids[1]}")[0] == 200
            ids.append(str(first.post("/v1/conversations")[2]["id"]))
        until(socket, "conversation.missed")
        listed = {each["id"]: each["title"] for each in other.request("GET", "/v1/conversations")[2]["data"]}
    assert [listed.get(each) for each in ids] == ["renamed", None, ""]


@pytest.mark.slow
@pytest.mark.parametrize("has_ended", [False, True])
def test_deletion_that_was_lost_with_the_subscription_is_made_up_for(
    store: RedisServer, pair: tuple[Server, Server], has_ended: bool
) -> None:
    """A response in the conversation ends, and its log is not found any more, on either gateway."""
    owner, other = pair
    response_id = begin(owner)
    path = f"/v1/responses/{response_id}"
    if has_ended:
        hurry(owner)
        wait_until(lambda: not owner.gateway.responses.running(), "it has ended")
    conversation_id = other.request("GET", path)[2]["conversation"]["id"]
    with tab(owner) as socket:
        send(socket, "conversation.subscribe")
        with unsubscribed():
            store.admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            assert other.request("DELETE", f"/v1/conversations/{conversation_id}")[0] == 200
        assert until(socket, "conversation.deleted")["conversation_id"] == conversation_id
    wait_until(lambda: not owner.gateway.responses.running(), "it does not run any more")
    for server in pair:
        wait_until(lambda server=server: server.request("GET", f"{path}?stream=true")[0] == 404, "no log")  # type: ignore[misc]


@pytest.mark.slow
def test_response_of_a_gateway_that_has_died_is_not_taken_for_running(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "CHECK_RUNNING_S", 0.1)
    with server_on(store) as other, tab(other.wait_ready()) as socket:
        send(socket, "conversation.subscribe")
        with server_on(store) as owner, slowed(owner.wait_ready(), 0.02):
            response_id = begin(owner)
            until_running(socket, response_id)
            owner.call(_die(owner))
            assert other.request("GET", f"/v1/responses/{response_id}")[2]["status"] == "incomplete"
            until_running(socket)


async def _die(server: Server) -> None:
    """Have a gateway send and receive nothing more, and lose its lease, as its death does."""
    found: Any = server.gateway.peers

    async def refuse(*_: object) -> int:
        raise StoreUnavailableError("this gateway is dead")

    found._channel.send = refuse
    await _go_silent()
    await server.gateway.opened_store()._heartbeats.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_steering_input_that_waits_on_the_other_gateway_is_answered_with_the_function_outputs(
    gateways: tuple[Server, Server],
) -> None:
    """A request that fails gives it back."""
    owner, other = gateways
    call: Frame = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    first = owner.post("/v1/responses", input=[{"role": "user", "content": "Hi"}, call], max_output_tokens=4)[2]

    async def leave() -> None:
        owner.gateway.responses.get("", first["id"]).steers = (restored_steer("steer_1", "Shorter"),)

    def waiting() -> list[str]:
        return [steer.id for steer in owner.gateway.responses.get("", first["id"]).steers]

    def texts_after(*items: Frame) -> list[str]:
        answer = other.post("/v1/responses", input=[*items], previous_response_id=first["id"], max_output_tokens=4)[2]
        listed = other.request("GET", f"/v1/responses/{answer['id']}/input_items?order=asc")[2]["data"]
        return [item["content"][0]["text"] if "content" in item else item["output"] for item in listed]

    owner.call(leave())
    output: Frame = {"type": "function_call_output", "call_id": "call_1", "output": "42"}
    assert texts_after({"role": "user", "content": "And?"}) == ["And?"], "a request without outputs"
    refused = other.post("/v1/responses", input=[output], previous_response_id=first["id"], temperature=9)
    assert refused[0] == 400
    wait_until(lambda: waiting() == ["steer_1"], "it was given back")
    assert texts_after(output) == ["Shorter", "42"]
    assert waiting() == []
    assert texts_after(output) == ["42"]


async def test_reader_of_a_gateway_that_asks_no_more_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WATCH_S", 0.001)
    monkeypatch.setattr(peers, "ANSWER_S", 0.3)
    channel = SimpleNamespace(find_runner=None, take_over=None, give_up=None, leave_responses=None)
    parts: Any = (channel, ResponseRegistry(), None, None, None, None)
    here = GatewayPeers(*parts)
    logged = LoggedResponse("resp", "", ResponseLog("resp"), None)
    await here._watch(logged, registry.Watch(0, {}, True), "other")
    assert logged.log.num_readers == 1 and len(here._readers) == 1
    await asyncio.sleep(0.6)
    assert logged.log.num_readers == 0 and not here._readers


@pytest.mark.slow
def test_deleting_a_conversation_through_the_other_gateway_cancels_its_response(pair: tuple[Server, Server]) -> None:
    owner, other = pair
    conversation = owner.request("GET", f"/v1/responses/{begin(owner)}")[2]["conversation"]["id"]
    assert other.request("DELETE", f"/v1/conversations/{conversation}")[0] == 200
    wait_until(lambda: not owner.gateway.responses.running(), "it does not run any more")


@pytest.mark.slow
@pytest.mark.parametrize("deletes", ["owner", "other"])
@pytest.mark.parametrize("has_ended", [False, True])
def test_response_of_a_deleted_conversation_is_found_on_no_gateway(
    pair: tuple[Server, Server], deletes: str, has_ended: bool
) -> None:
    """Each gateway has its log. Streams of a running one end alike, also if the other gateway reads the end late."""
    owner, other = pair
    response_id = begin(owner)
    path = f"/v1/responses/{response_id}"
    if has_ended:
        hurry(owner)
    conversation = f"/v1/conversations/{owner.request('GET', path)[2]['conversation']['id']}"
    with streamed(other, response_id) as events, streamed(owner, response_id) as same:
        assert next(events).type == next(same).type == "response.created"
        if has_ended:
            assert [event.sequence_number for event in events] == [event.sequence_number for event in same]
            assert other.request("GET", path)[2] == owner.request("GET", path)[2]
        with contextlib.nullcontext() if has_ended else lagging_copy(other, response_id):
            assert (owner if deletes == "owner" else other).request("DELETE", conversation)[0] == 200
            wait_until(lambda: not owner.gateway.responses.running(), "it does not run any more")
        if not has_ended:
            assert [event.to_json() for event in events] == (seen := [event.to_json() for event in same])
            assert '"response.failed"' in seen[-1]
    for server in pair:
        wait_until(lambda server=server: server.request("GET", path)[0] == 404, "its log is not found")  # type: ignore[misc]
        assert server.request("GET", f"{path}?stream=true")[0] == 404


@pytest.mark.slow
def test_response_of_another_owner_is_not_found(store: RedisServer) -> None:
    with server_on(store, api_keys=("one", "two")) as first, server_on(store, api_keys=("one", "two")) as second:
        first.wait_ready(), second.wait_ready()
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        with slowed(first, 0.02):
            response_id = first.request("POST", "/v1/responses", LONG, mine)[2]["id"]
            path = f"/v1/responses/{response_id}"
            fork = {"input": "And?", "previous_response_id": response_id}
            requests = (("GET", path, None), ("POST", f"{path}/cancel", None), ("POST", "/v1/responses", fork))
            for method, route, body in requests:
                assert second.request(method, route, body, theirs)[0] == 404, route
            asked = second.call(_ask(second, "someone", response_id))
            assert asked == "not_found", "the gateway that runs it checks the owner, too"
            assert second.request("POST", f"{path}/cancel", None, mine)[2]["status"] == "cancelled"


async def _ask(server: Server, owner: str, response_id: str) -> str:
    found = server.gateway.peers
    assert found is not None
    runner = await found.find_runner(response_id)
    with pytest.raises(Exception, match="no response") as caught:
        await found.ask(runner or "", owner, response_id, Cancel(), None)
    return str(getattr(caught.value, "code", ""))


@pytest.mark.slow
def test_owner_that_does_not_answer_is_a_503_and_the_stream_continues_after_it(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that ignores commands, and then answers again, repeats and omits no event."""
    owner, other = pair
    response_id = begin(owner)
    path = f"/v1/responses/{response_id}"
    answer = GatewayPeers._answer

    async def ignore(*_: object) -> None:
        pass

    with streamed(other, response_id) as events:
        numbers = [next(events).sequence_number]
        monkeypatch.setattr(peers, "ANSWER_S", 0.2)
        monkeypatch.setattr(peers, "WATCH_S", 0.1)
        monkeypatch.setattr(GatewayPeers, "_answer", ignore)
        refused = other.post(f"{path}/cancel")
        assert (refused[0], refused[2]["error"]["code"]) == (503, "gateway_unreachable")
        assert refused[1]["retry-after"] == "1"
        assert owner.request("GET", path)[2]["status"] == "in_progress"
        monkeypatch.setattr(GatewayPeers, "_answer", answer)
        hurry(owner)
        numbers += numbers_of(events)
    assert numbers == list(range(len(numbers)))


@pytest.mark.slow
def test_frames_are_asked_for_again_when_a_lost_connection_is_back(
    store: RedisServer, pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer may have been lost with it; no other one comes."""
    owner, other = pair
    response_id = begin(owner)
    answer = GatewayPeers._answer
    lost: list[peers.Question] = []

    async def lose(_: GatewayPeers, question: peers.Question) -> None:
        lost.append(question)

    def close_subscriptions() -> None:
        store.admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    with streamed(other, response_id) as events:
        numbers = [next(events).sequence_number]
        monkeypatch.setattr(peers, "ANSWER_S", 600.0)
        monkeypatch.setattr(GatewayPeers, "_answer", lose)
        wait_until(lambda: bool(lost), "a lost answer")
        num_lost = len(lost)
        close_subscriptions()
        wait_until(lambda: len(lost) > num_lost, "another question")
        monkeypatch.setattr(GatewayPeers, "_answer", answer)
        close_subscriptions()
        hurry(owner)
        numbers += numbers_of(events)
    assert numbers == list(range(len(numbers)))


@pytest.mark.slow
def test_watch_that_begins_again_at_the_start_is_noticed(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong answer ends the stream with an error; no event is sent twice."""
    owner, other = pair
    response_id = begin(owner)
    watch: Any = GatewayPeers._watch

    async def from_start(self: GatewayPeers, found: Any, command: registry.Watch, sender: str) -> object:
        command.position = 0
        return await watch(self, found, command, sender)

    with streamed(other, response_id) as events:
        first = next(events)
        monkeypatch.setattr(peers, "GIVE_UP_S", 0.1)
        monkeypatch.setattr(GatewayPeers, "_watch", from_start)
        received = [first, *events]
    assert numbers_of(received) == list(range(len(received)))
    assert received[-1].type == "error" and "cannot be read" in received[-1].message
    monkeypatch.undo()
    owner.post(f"/v1/responses/{response_id}/cancel")


@pytest.mark.slow
def test_stream_continues_when_its_gateway_does_not_have_the_response_for_a_moment(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was suspended, while another one takes the response over."""
    owner, other = pair
    response_id = begin(owner)
    watch: Any = GatewayPeers._watch
    refused: list[registry.Watch] = []

    async def refuse_first(self: GatewayPeers, found: Any, command: registry.Watch, sender: str) -> object:
        if len(refused) < 3:
            refused.append(command)
            raise NotFoundError("no such response")
        return await watch(self, found, command, sender)

    with streamed(other, response_id) as events:
        first = next(events)
        monkeypatch.setattr(GatewayPeers, "_watch", refuse_first)
        received = [first]
        while len(refused) < 3:
            received.append(next(events))
        hurry(owner)
        received += events
    assert numbers_of(received) == list(range(len(received))) and received[-1].type != "error"


@pytest.mark.slow
def test_gateway_that_dies_ends_the_streams_of_the_other_with_an_error(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ANSWER_S", 2.0)
    monkeypatch.setattr(peers, "WATCH_S", 0.1)
    with server_on(store) as other:
        other.wait_ready()
        with server_on(store) as owner, slowed(owner.wait_ready(), 0.02):
            response_id = begin(owner)
            with streamed(other, response_id) as events:
                next(events)
                owner.call(_go_silent())
                owner.call(owner.gateway.opened_store()._heartbeats.close())  # type: ignore[attr-defined]
                last = list(events)[-1]
            assert last.type == "error" and last.code == "gateway_unreachable"
            assert other.request("GET", f"/v1/responses/{response_id}")[2]["status"] == "incomplete"


async def _go_silent() -> None:
    """End the subscription of a gateway, as its death does."""
    for task in asyncio.all_tasks():
        if "GatewayPeers.run" in repr(task.get_coro()):
            task.cancel()


@pytest.mark.slow
def test_local_responses_work_while_redis_is_down_and_remote_ones_are_a_503(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "TIMEOUT_S", 2.0)
    with server_on(store) as owner, server_on(store) as other:
        owner.wait_ready(), other.wait_ready()
        with slowed(owner, 0.02):
            response_id = begin(owner)
            path = f"/v1/responses/{response_id}"
            store.signal(signal.SIGSTOP)
            try:
                assert owner.request("GET", path)[2]["status"] == "in_progress"
                refused = other.post(f"{path}/cancel")
                assert (refused[0], refused[2]["error"]["code"]) == (503, "store_unavailable")
            finally:
                store.signal(signal.SIGCONT)
            wait_until(lambda: other.request("GET", path)[0] == 200, "Redis answers")
            assert other.post(f"{path}/cancel")[2]["status"] == "cancelled"


def test_unused_copy_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "IDLE_S", -1.0)

    async def run() -> None:
        forgotten: list[RemoteResponse] = []

        class Peers:
            def forget(self, run: RemoteResponse, *, keep: bool) -> None:
                forgotten.append(run)

        remote = RemoteResponse(Peers(), "me", "resp_1", "gateway")  # type: ignore[arg-type]
        remote.start()
        await remote.task
        assert forgotten == [remote] and remote.log.failure is not None

    asyncio.run(run())


def test_derived_ids_are_functions_of_the_object_and_the_index() -> None:
    response_id = new_id("resp")
    ids = [derive_id("msg", response_id, index) for index in range(3)]
    assert ids == [derive_id("msg", response_id, index) for index in range(3)]
    assert len({*ids, *(derive_id("msg", new_id("resp"), index) for index in range(3))}) == 6
    assert [len(each) for each in ids] == [len(new_id("msg"))] * 3
    assert all(each[len("msg_") :].startswith(response_id[len("resp_") :][:12]) for each in ids)


@pytest.mark.slow
def test_limits_of_a_key_hold_for_both_gateways(store: RedisServer) -> None:
    principal = Principal("key", "tenant", "tenant", limits=KeyLimits(requests_per_minute=3, max_concurrent=2))
    with server_on(store) as first, server_on(store) as second:
        one, other = (server.wait_ready().gateway.limiter for server in (first, second))

        async def admit(limiter: RateLimiter, width: int) -> None:
            limiter.admit(principal, RequestCost(1, width=width))

        first.call(admit(one, 2))
        wait_until(
            lambda: other.headers(principal)["x-ratelimit-remaining-requests"] == "1", "the other knows of the request"
        )
        with pytest.raises(RateLimitError, match="2 candidates"):
            second.call(admit(other, 1))
