"""Checkpoints of running responses: what they hold at any moment, and what `kill -9` of the gateway leaves."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from chatcache.conversations.checkpoints import restore
from chatcache.conversations.fork_points import cut_reply
from chatcache.conversations.replies.events import ReplyDone
from chatcache.conversations.replies.service import Candidate
from chatcache.conversations.tree import Item
from chatcache.gateway.responses.registry import Checkpointer
from chatcache.gateway.responses.run import LiveResponse
from tests.gateway.kept import keeping
from tests.gateway.scripted import ScriptedServer, scripted
from tests.gateway.serving import Server, held, wait_until
from tests.support.redis_servers import RedisServer

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "the garden behind the house", "n": 3}}\n</tool_call>'
FULL = f"<think>Shall I look? I <b>shall</b> é.</think>I will look ünder it <now>.\n{CALL}\n{CALL}"
PLAIN = "A plain answer: 你好, this is \U0001f389 text without <anything> to parse, " * 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted(tmp_path_factory.mktemp("db"), "hermes") as running:
        yield running


def stored_checkpoints(server: Server, response_id: str) -> list[Item]:
    with contextlib.closing(sqlite3.connect(server.config.db)) as db:
        rows = db.execute("SELECT data FROM checkpoints WHERE turn_id = ? ORDER BY position", (response_id,))
        return restore(data for (data,) in rows)


def test_checkpoints_hold_what_a_fork_at_that_token_holds(server: ScriptedServer) -> None:
    """After every step; with reasoning, calls, several candidates, and characters of several tokens."""
    server.say(FULL, PLAIN)
    states: list[list[Item]] = []
    with held(server) as let_go:
        execute = server.runner.execute
        step, stepped = threading.Semaphore(0), threading.Semaphore(0)

        def one_step(plan: Any) -> Any:
            result = execute(plan)
            stepped.release()
            step.acquire()
            return result

        server.runner.execute = one_step  # type: ignore[method-assign]
        let_go()
        made = server.post("/v1/responses", input="Look?", n=2, tools=[LOOK], background=True)[2]
        run = server.gateway.responses.find("", made["id"])
        assert run is not None and run.run is not None
        checkpointer = Checkpointer(server.gateway.responses, server.gateway.opened_store())
        while run.log.terminal is None:
            if not stepped.acquire(timeout=0.05):
                continue
            server.call(checkpointer.save())
            if items := stored_checkpoints(server, made["id"]):
                states.append(items)
            step.release()
    assert len(states) > 40
    server.wait_idle()
    owner = ""
    tree = server.call(server.gateway.opened_store().load(owner, made["conversation"]["id"]))
    assert server.gateway.model is not None
    resolver = server.gateway.model.conversations._resolver
    final = {item.index: item for item in tree.outputs(made["id"])}
    kinds: set[str] = set()
    for items in states:
        for item in items:
            whole = final[item.index]
            if item.status == "completed":
                continue
            prefix = cut_reply(resolver.reply_context(tree, whole), tree, whole, len(item.token_ids), None)
            if prefix.ids != item.token_ids:
                kinds.add("partial character")
                assert item.token_ids[: len(prefix.ids)] == prefix.ids
                continue
            assert (item.text, item.parts.reasoning) == (prefix.visible_text, prefix.parts.reasoning)
            assert [(call.name, call.arguments) for call in item.parts.tool_calls] == [
                (call.name, call.arguments) for call in prefix.parts.tool_calls
            ]
            assert (item.parts.raw or item.text) == prefix.text
            kinds |= {"reasoning"} if item.parts.reasoning and not item.text else set()
            kinds |= {"call"} if item.parts.tool_calls else set()
            kinds |= {"text"} if item.text else set()
    assert kinds == {"reasoning", "call", "text", "partial character"}
    assert not stored_checkpoints(server, made["id"]), "the end of the response deletes its checkpoints"


def test_tokens_cost_no_checkpoint_work(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All work is done in rounds of the checkpointer: without rounds there is none."""

    async def no_round(self: Checkpointer) -> None: ...

    calls: list[object] = []
    monkeypatch.setattr(Checkpointer, "save", no_round)
    monkeypatch.setattr("chatcache.conversations.replies.service.Candidate.snapshot", calls.append)
    server.say(PLAIN)
    assert server.post("/v1/responses", input="Look?")[2]["status"] == "completed"
    assert not calls
    server.wait_idle()


def test_checkpoints_of_many_candidates_leave_the_event_loop_turns_in_between(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_round(self: Checkpointer) -> None: ...

    monkeypatch.setattr(Checkpointer, "save", no_round)
    server.say(*[PLAIN * 20] * 32)
    made = server.post("/v1/responses", input="Look?", n=32, max_output_tokens=2000, background=True)[2]
    run = server.gateway.responses.get("", made["id"]).run
    assert run is not None
    num_turns, snapshots = [0], Counter[int]()
    snapshot = Candidate.snapshot

    def count_snapshot(self: Candidate) -> ReplyDone:
        snapshots[num_turns[0]] += 1
        return snapshot(self)

    async def save() -> list[Item]:
        async def count_turns() -> None:
            while True:
                num_turns[0] += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        monkeypatch.setattr(Candidate, "snapshot", count_snapshot)
        found = await run.checkpoints()
        counting.cancel()
        return restore(each.data for each in found)

    candidates = cast(LiveResponse, run)._reply.candidates
    wait_until(lambda: all(each.num_tokens for each in candidates), "a token of each candidate")
    items = server.call(save())
    assert [item.index for item in items] == list(range(32)) and all(item.text for item in items)
    assert snapshots.total() == 32 and max(snapshots.values()) == 4
    server.post(f"/v1/responses/{made['id']}/cancel")
    server.wait_idle()


MAX_LOSS_S = 4.0  # a second, and three for a busy machine
MOMENTS_S = (4.5, 5.5, 6.5)


class Gateway:
    """A gateway with a scripted model in a process of its own."""

    def __init__(self, store: str, *modes: str) -> None:
        self._command = [sys.executable, "-m", "tests.gateway.killable", store, "0", "scripted", *modes]
        self.start()

    def start(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths}
        self._process = subprocess.Popen(self._command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def stream(self, **body: object) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed response, until the gateway dies."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/responses", json.dumps({**body, "stream": True}), headers)
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def request(self, method: str, path: str, **body: object) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read())
        assert answer.status == 200, found
        return found


@pytest.fixture(params=["sqlite", "redis"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer | str]:
    with keeping(request.param, tmp_path) as store:
        yield store


def texts_of(response: dict[str, Any]) -> dict[str, str]:
    """The text, reasoning or arguments of each output item, by id."""
    return {item["id"]: item.get("arguments") or item["content"][0]["text"] for item in response["output"]}


def watch_and_kill(gateway: Gateway, moment_s: float) -> tuple[str, list[tuple[float, str, str]], float]:
    """Kill the gateway that long after the first token.

    Return the response's id, the pieces seen (time, item, text) and the time of the kill.
    """
    seen: list[tuple[float, str, str]] = []
    events = gateway.stream(input="Look?", n=2, tools=[LOOK], max_output_tokens=3000)
    response_id = next(events)["response"]["id"]
    killed_s = 0.0
    for event in events:
        if event["type"].endswith(".delta"):
            seen.append((time.monotonic(), event["item_id"], event["delta"]))
            if not killed_s and seen[-1][0] > seen[0][0] + moment_s:
                killed_s = time.monotonic()
                gateway.kill()
    return response_id, seen, killed_s


def wait_incomplete(gateway: Gateway, response_id: str) -> dict[str, Any]:
    deadline_s = time.monotonic() + 60
    while (found := gateway.request("GET", f"/v1/responses/{response_id}"))["status"] == "in_progress":
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    result: dict[str, Any] = found
    return result


def check_kills(kept: RedisServer | str, moments_s: Sequence[float], *modes: str) -> None:
    """Kill a gateway at each of these times after the first token, and check what is stored."""
    gateway = Gateway(kept.url if isinstance(kept, RedisServer) else kept, *modes)
    try:
        for moment_s in moments_s:
            response_id, seen, killed_s = watch_and_kill(gateway, moment_s)
            gateway.start()
            response = wait_incomplete(gateway, response_id)
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "interrupted"}
            stored = texts_of(response)
            for item_id in {item for _, item, _ in seen}:
                safe = "".join(text for at, item, text in seen if item == item_id and at < killed_s - MAX_LOSS_S)
                shown = "".join(text for _, item, text in seen if item == item_id)
                found = stored.get(item_id, "")
                assert found.startswith(safe), (moment_s, item_id, len(safe), len(shown), len(found))
                assert shown.startswith(found) or found.startswith(shown)
            assert len({item["candidate"] for item in response["output"]}) == 2
            listed = gateway.request("GET", f"/v1/conversations/{response['conversation']['id']}/items?branches=all")
            answers = [item for item in listed["data"] if item["type"] == "message" and item["role"] == "assistant"]
            assert {item["incomplete_details"]["reason"] for item in answers} == {"interrupted"}
            check_continuable(gateway, response)
            gateway.kill()
            gateway.start()  # with the scripted replies again
    finally:
        gateway.kill()


def check_continuable(gateway: Gateway, response: dict[str, Any]) -> None:
    """Continue the second candidate, which is plain text: its tokens are known, so the second time they are cached."""
    last = [item for item in response["output"] if item["candidate"] == 1][-1]
    path = f"/v1/conversations/{response['conversation']['id']}/items/{last['id']}"
    num_tokens = gateway.request("GET", path)["num_tokens"]
    assert num_tokens and last["type"] == "message"
    usages = []
    for text in ("Go on", "And now?"):
        asked = {"previous_item_id": last["id"], "input": text, "max_output_tokens": 2}
        usages.append(gateway.request("POST", "/v1/responses", **asked)["usage"])
    assert usages[1]["input_tokens_details"]["cached_tokens"] >= num_tokens
    forked = gateway.request("POST", "/v1/responses", previous_item_id=last["id"], fork_at=5, max_output_tokens=7)
    assert forked["output"][-1]["content"][0]["text"][:4] == last["content"][0]["text"][:4]
    gateway.request("POST", "/v1/responses", previous_response_id=response["id"], input="Go on", max_output_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [None, pytest.param(50, marks=pytest.mark.long)])
def test_killed_gateway_loses_only_the_last_second(num_kills: int | None, kept: RedisServer | str) -> None:
    moments_s: Sequence[float] = MOMENTS_S if isinstance(kept, str) else MOMENTS_S[1:2]
    if num_kills is not None:
        moments_s = [random.Random(number).uniform(MOMENTS_S[0], MOMENTS_S[-1]) for number in range(num_kills)]
    check_kills(kept, moments_s)


@pytest.mark.slow
def test_gateway_that_stores_running_output_too_seldom_is_detected(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_kills(str(tmp_path / "chat.db"), MOMENTS_S[-1:], "unsaved")
