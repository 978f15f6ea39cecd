"""Injected bugs for G20: the fuzzers find bad responses, bad frames and log entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chatcache.errors import InvalidRequestError
from chatcache.gateway import json_codec, middleware
from chatcache.gateway.websocket.connection import Connection
from tests.gateway.serving import Server
from tests.gateway.test_http_fuzz import _check as check_http
from tests.gateway.test_ws_fuzz import _check as check_socket

Decode = Callable[[bytes | str], dict[str, Any]]


def crashes(decode: Decode) -> Decode:
    """Injected bug: an uncaught exception for a value that is no object."""

    def injected(data: bytes | str) -> dict[str, Any]:
        try:
            return decode(data)
        except InvalidRequestError as error:
            raise KeyError("injected") from error

    return injected


def leaks_position(decode: Decode) -> Decode:
    """Injected bug: an error message with a position in the source code."""

    def injected(data: bytes | str) -> dict[str, Any]:
        try:
            return decode(data)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"Traceback (most recent call last): {error}") from None

    return injected


@pytest.mark.parametrize(
    ("bug", "words"),
    [(crashes, "server_error"), (leaks_position, "Traceback")],
    ids=["an answer of 500", "a stack trace in an answer"],
)
def test_http_fuzzer_finds_an_injected_bug(
    bug: Callable[[Decode], Decode],
    words: str,
    server: Server,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(middleware, "decode_object", bug(json_codec.decode_object))
    with pytest.raises(AssertionError, match=words):
        check_http(server, caplog, seed=6, num_bodies=400)


def test_websocket_fuzzer_finds_an_injected_bug(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Injected bug: a handler that does not check a field, so that the socket ends."""

    async def trusting(connection: Connection, message: dict[str, Any]) -> None:
        await original(connection, message)
        message["type"].lower()

    original = Connection._handle
    monkeypatch.setattr(Connection, "_handle", trusting)
    with pytest.raises(AssertionError, match=r"ABNORMAL_CLOSURE|1011"):
        check_socket(server, caplog, seed=6, num_messages=250)
