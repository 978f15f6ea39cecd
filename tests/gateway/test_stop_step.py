"""Stopping a request takes one engine step, for every way to stop it.

The tests release the steps one at a time. The stop is requested while a step is held. After that step the pages of the
request are free, its terminal event is sent with the receipt, and the next step, which is held in turn, contains only
the rows of the other request.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from chatcache.config import EngineConfig, ServerConfig
from chatcache.types.plan import StepPlan, StepResult
from tests.gateway.frames import LONG, TERMINAL, Frame, receive, send
from tests.gateway.serving import Server, post_bytes, wait_until
from tests.gateway.test_disconnect import close_hard

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
N = 3
BODY: Frame = {**LONG, "max_output_tokens": 300, "n": N}
READ = "word " * 150
CHAT_BODY: Frame = {"max_tokens": 300, "ignore_eos": True, "n": N}


class Gate:
    """Hold steps before the runner executes them. `held` is the waiting step, or None."""

    def __init__(self, execute: Callable[[StepPlan], StepResult]) -> None:
        self._execute = execute
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.num_begun = 0
        self.held: StepPlan | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_begun += 1
        if not self._is_open:
            self.held = plan
            self._permits.acquire()
            self.held = None
        return self._execute(plan)

    @property
    def num_rows(self) -> int:
        plan = self.held
        return len(plan.rows.slot) if plan is not None else 0

    @property
    def num_tokens(self) -> int:
        plan = self.held
        return len(plan.rows.tokens) if plan is not None else 0

    def step(self) -> None:
        """Release the held step and wait for the next one."""
        before = self.num_begun
        self._permits.release()
        wait_until(lambda: self.num_begun > before and self.held is not None, "the next step")

    def open(self) -> None:
        self._is_open = True
        self._permits.release()


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A long prompt takes many steps."""
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "c.db"), sse_keep_alive_interval_s=0)
    with Server(config, engine_config=EngineConfig(max_num_batched_tokens=16)) as server:
        yield server.wait_ready()


@contextlib.contextmanager
def stepped(server: Server) -> Iterator[Gate]:
    """Hold each engine step, with another request running all the time."""
    gate = Gate(server.runner.execute)
    server.runner.execute = gate.execute  # type: ignore[method-assign]
    try:
        with server.connect() as other:
            body = {**CHAT_BODY, "n": 1, "messages": [{"role": "user", "content": "x"}], "stream": True}
            other.sendall(post_bytes(server.port, CHAT, json.dumps(body).encode()))
            wait_until(lambda: gate.held is not None, "the first step of the other request")
            yield gate
            gate.open()
    finally:
        gate.open()
        del server.runner.execute


def until_phase(server: Server, gate: Gate, phase: str) -> None:
    """Run steps until the prompt is partly computed, or all candidates of the request decode."""
    wait_until(lambda: server.engine._command_queue.commands.qsize() > 0, "the request")
    for _ in range(60):
        if (gate.num_rows == 2 and gate.num_tokens > 4) if phase == "prefill" else gate.num_rows == 1 + N:
            return
        gate.step()
    raise AssertionError(f"never: {phase}")


def stopped(server: Server, gate: Gate) -> None:
    """Wait until the stop has reached the engine and run the step that was already planned."""
    wait_until(lambda: server.engine._command_queue.commands.qsize() > 0, "the command to the engine")
    gate.step()
    assert gate.num_rows == 1, "only the other request continues"


def end_of(frames: Iterator[Frame]) -> Frame:
    return next(frame for frame in frames if frame["type"] in TERMINAL)


def check_receipt(receipt: Any, phase: str) -> None:
    assert receipt["tokens_after_stop"] == (N if phase == "decode" else 0), "the step under way, and no other"
    assert receipt["pages_freed"] > 0 and receipt["stop_latency_ms"] > 0


def text_for(phase: str) -> str:
    return READ if phase == "prefill" else "Hi"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("by", ["its socket", "another socket", "HTTP", "DELETE"])
@pytest.mark.slow
def test_cancel_is_one_step_and_a_receipt(chunked: Server, by: str, phase: str) -> None:
    url = f"ws://127.0.0.1:{chunked.port}{RESPONSES}"
    with stepped(chunked) as gate, connect(url, max_queue=None) as mine, connect(url) as other:
        send(mine, **{**BODY, "input": text_for(phase)})
        until_phase(chunked, gate, phase)
        response_id = receive(mine)["response"]["id"]
        answers: list[Any] = []
        stopper = threading.Thread(
            target=lambda: answers.append(
                chunked.request(*{"HTTP": ("POST", f"{RESPONSES}/{response_id}/cancel")}.get(
                    by, ("DELETE", f"{RESPONSES}/{response_id}")))
            )
        )  # fmt: skip
        if by in ("HTTP", "DELETE"):
            stopper.start()
        else:
            send(mine if by == "its socket" else other, "response.cancel", response_id=response_id)
        stopped(chunked, gate)
        last = end_of(iter(lambda: receive(mine), None))
        assert last["response"]["status"] == "cancelled"
        check_receipt(last["receipt"], phase)
        if by in ("HTTP", "DELETE"):
            stopper.join(60)
            status, _, answer = answers[0]
            assert status == 200
            assert answer["deleted"] if by == "DELETE" else answer["receipt"] == last["receipt"]
        elif by == "another socket":
            assert receive(other) == {
                "type": "response.cancelled", "response_id": response_id, "status": "cancelled",
                "receipt": last["receipt"],
            }  # fmt: skip
        assert gate.num_rows == 1
    chunked.wait_idle()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("what", ["chat", "chat stream", "response", "response stream", "socket"])
def test_leaving_is_one_step(chunked: Server, what: str, how: str, phase: str) -> None:
    """The step after the one in progress contains no rows of a request without another reader."""
    with contextlib.ExitStack() as stack, stepped(chunked) as gate:
        leave = begin(stack, chunked, what, text_for(phase), how)
        until_phase(chunked, gate, phase)
        leave()
        stopped(chunked, gate)
    chunked.wait_idle()


def begin(stack: contextlib.ExitStack, server: Server, what: str, text: str, how: str) -> Callable[[], None]:
    """Send the request and return a function that disconnects."""
    if what == "socket":
        url = f"ws://127.0.0.1:{server.port}{RESPONSES}"
        opened = stack.enter_context(connect(url, max_queue=None, close_timeout=0.1))
        send(opened, **{**BODY, "input": text, "store": False})
        raw = opened.socket
    else:
        fields = {"stream": "stream" in what}
        if what.startswith("chat"):
            path, body = CHAT, {**CHAT_BODY, "messages": [{"role": "user", "content": text}], **fields}
        else:
            path, body = RESPONSES, {**BODY, "input": text, "store": False, **fields}
        raw = stack.enter_context(contextlib.closing(server.connect()))
        raw.sendall(post_bytes(server.port, path, json.dumps(body).encode()))

    def leave() -> None:
        if how == "half":
            raw.shutdown(socket.SHUT_WR)
        elif how == "rst":
            close_hard(raw)
        else:
            raw.shutdown(socket.SHUT_RDWR)

    return leave


def test_a_cancelled_request_that_waits_never_begins(tmp_path: Path) -> None:
    config = ServerConfig(db=str(tmp_path / "c.db"))
    with Server(config, engine_config=EngineConfig(max_num_seqs=1)) as server:
        server.wait_ready()
        with stepped(server) as gate:
            answers: list[Any] = []
            ask = threading.Thread(
                target=lambda: answers.append(server.post(RESPONSES, **LONG, background=True)),
            )
            ask.start()
            wait_until(lambda: server.engine._command_queue.commands.qsize() > 0, "the request")
            gate.step()
            ask.join(60)
            response_id = answers.pop()[2]["id"]
            stop = threading.Thread(
                target=lambda: answers.append(server.request("POST", f"{RESPONSES}/{response_id}/cancel"))
            )
            stop.start()
            stopped(server, gate)
            stop.join(60)
            receipt = answers.pop()[2]["receipt"]
            assert receipt["tokens_after_stop"] == receipt["pages_freed"] == 0
        server.wait_idle()
