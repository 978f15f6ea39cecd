"""G20's planted bugs: what the fuzzers look for in answers, frames and the log is found where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chatcache.errors import InvalidRequestError
from chatcache.gateway import json_codec as jsonio
from chatcache.gateway import middleware as body
from chatcache.gateway.websocket.connection import Connection
from tests.gateway.serving import Server
from tests.gateway.test_http_fuzz import _check as check_http
from tests.gateway.test_ws_fuzz import _check as check_socket

Decode = Callable[[bytes | str], dict[str, Any]]


def crashes(decode: Decode) -> Decode:
    """What is no object is nobody's to catch."""

    def planted(data: bytes | str) -> dict[str, Any]:
        try:
            return decode(data)
        except InvalidRequestError as error:
            raise KeyError("planted") from error

    return planted


def tells(decode: Decode) -> Decode:
    """A refusal says where in the code it was made."""

    def planted(data: bytes | str) -> dict[str, Any]:
        try:
            return decode(data)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"Traceback (most recent call last): {error}") from None

    return planted


@pytest.mark.parametrize(
    ("bug", "words"),
    [(crashes, "server_error"), (tells, "Traceback")],
    ids=["an answer of 500", "a stack trace in an answer"],
)
def test_the_bodies_that_show_it_are_sent(
    bug: Callable[[Decode], Decode],
    words: str,
    server: Server,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "decode_object", bug(jsonio.decode_object))
    with pytest.raises(AssertionError, match=words):
        check_http(server, caplog, seed=6, num_bodies=400)


def test_the_messages_that_show_it_are_sent(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that trusts a field: the socket just ends."""

    async def trusting(connection: Connection, message: dict[str, Any]) -> None:
        await original(connection, message)
        message["type"].lower()

    original = Connection._handle
    monkeypatch.setattr(Connection, "_handle", trusting)
    with pytest.raises(AssertionError, match=r"ABNORMAL_CLOSURE|1011"):
        check_socket(server, caplog, seed=6, num_messages=250)
