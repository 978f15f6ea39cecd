"""Clients that disconnect, stall or half-close: pages are freed, others are unaffected."""

from __future__ import annotations

import json
import socket
import struct
import threading

import pytest

from chatcache.decoding.grammar.compiler import GrammarChecker
from tests.gateway.serving import Server, post_bytes, read_all, slowed, split_response, wait_until

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900, "ignore_eos": True}


def close_hard(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", ["fin", "rst", "half"])
@pytest.mark.parametrize("num_pipelined", [1, 3])
def test_client_disconnect_aborts_the_request(
    server: Server, caplog: pytest.LogCaptureFixture, path: str, stream: bool, leave: str, num_pipelined: int
) -> None:
    body = {**LONG, "stream": stream} if path == CHAT else {"prompt": ["x", "y"], "max_tokens": 900, "ignore_eos": True}
    data = post_bytes(server.port, path, json.dumps({**body, "stream": stream}).encode())
    num_before = server.runner.num_steps
    with slowed(server, 0.01):
        connection = server.connect()
        connection.sendall(data.replace(b"connection: close\r\n", b"") * num_pipelined)
        wait_until(lambda: server.num_pages_in_use() > 2, "generation is under way")
        if leave == "half":
            connection.shutdown(socket.SHUT_WR)
        elif leave == "rst":
            close_hard(connection)
        else:
            connection.close()
        server.wait_idle()
        connection.close()
    assert 0 < server.runner.num_steps - num_before < 900, "it was not generated to its end"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_client_disconnect_during_the_body_logs_no_error(server: Server) -> None:
    connection = server.connect()
    connection.sendall(post_bytes(server.port, CHAT, json.dumps(LONG).encode())[:-10])
    connection.close()
    server.wait_idle()
    assert server.request("GET", "/livez")[0] == 200


@pytest.mark.slow
def test_client_that_does_not_read_blocks_no_other_request(server: Server) -> None:
    with server.connect() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(post_bytes(server.port, CHAT, json.dumps({**LONG, "stream": True}).encode()))
        status, _, answer = server.post(CHAT, **{**LONG, "max_tokens": 50})
        assert status == 200 and answer["usage"]["completion_tokens"] == 50
        # Its own generation ends too: tokens wait for it, the engine does not.
        wait_until(lambda: server.num_pages_in_use() == 0, "the stalled client's generation to end")


def test_slowly_sent_body_is_answered(server: Server) -> None:
    data = post_bytes(server.port, CHAT, json.dumps({**LONG, "max_tokens": 2}).encode())
    with server.connect() as connection:
        for at in range(0, len(data), 40):
            connection.sendall(data[at : at + 40])
        assert split_response(read_all(connection))[0] == 200


def test_client_disconnects_do_not_change_other_replies(server: Server) -> None:
    """Of fifty clients half disconnect; the others receive the same text as alone."""
    alone = server.post(CHAT, **{**LONG, "max_tokens": 40, "seed": 3})[2]["choices"][0]["message"]["content"]
    answers: list[str] = []

    def stay() -> None:
        got = server.post(CHAT, **{**LONG, "max_tokens": 40, "seed": 3})[2]
        answers.append(got["choices"][0]["message"]["content"])

    def leave() -> None:
        connection = server.connect()
        connection.sendall(post_bytes(server.port, CHAT, json.dumps({**LONG, "stream": True}).encode()))
        connection.recv(200)
        close_hard(connection)

    threads = [threading.Thread(target=work) for work in [stay, leave] * 25]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [alone] * 25


def test_client_disconnects_are_counted_in_metrics(server: Server) -> None:
    def count() -> float:
        text = server.request("GET", "/metrics")[2]
        line = next(line for line in text.splitlines() if line.startswith("chatcache_client_disconnects_total"))
        return float(line.split()[-1])

    before = count()
    with slowed(server, 0.01):
        connection = server.connect()
        connection.sendall(post_bytes(server.port, CHAT, json.dumps(LONG).encode()))
        wait_until(lambda: server.num_pages_in_use() > 0, "generation is under way")
        connection.close()
        wait_until(lambda: count() == before + 1, "one disconnect more")
    server.post(CHAT, **{**LONG, "max_tokens": 1})
    assert count() == before + 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnect_during_grammar_compilation_withdraws_the_request(
    server: Server, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(GrammarChecker, "check", lambda *_: "" if gate.wait(60) else "?")
    constraint = {"choice": ["ab", f"{path}{stream}"]}  # one that is not remembered
    prompt = {"prompt": ["x", "y"]} if path != CHAT else {"messages": LONG["messages"]}
    body = json.dumps({**prompt, "max_tokens": 9, "stream": stream, "structured_outputs": constraint})
    try:
        with server.connect() as connection:
            connection.sendall(post_bytes(server.port, path, body.encode()))
            wait_until(lambda: num_waiting(server) > 0, "the grammar to be waited for")
        wait_until(lambda: num_waiting(server) == 0, "the request to be withdrawn")
    finally:
        gate.set()
    assert server.post(CHAT, **{**LONG, "max_tokens": 2})[0] == 200
    server.wait_idle()


def num_waiting(server: Server) -> int:
    return int(server.request("GET", "/readyz")[2]["num_waiting"])
