"""WebSocket protocol conformance of the gateway (RFC 6455).

There are 247 conversations, numbered as in sections 1-7 and 10 of Autobahn. The Autobahn suite itself needs Python
2.7 and is run by `tests.gateway.conformance.autobahn`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest

from chatcache.config import ServerConfig
from tests.gateway.conformance.cases import CASES
from tests.gateway.conformance.conversation import CLOSE, TEXT, Outcome, Result, close, frame, hold, hold_all
from tests.gateway.conformance.echoing import PATH, PROTOCOL, echoing
from tests.gateway.conformance.faulty import Rule, serving
from tests.gateway.conformance.utf8 import INVALID, MIXED, VALID
from tests.gateway.serving import Server

NUM_CASES = {"1": 16, "2": 11, "3": 7, "4": 10, "5": 20, "6": 145, "7": 37, "10": 1}
BY_NAME = {case.name: case for case in CASES}
# A server that breaks a rule fails exactly these cases.
FAILED_WITHOUT: dict[Rule, list[str]] = {
    "reserved bits": ["3.*"],
    "opcodes": ["4.*"],
    "long control": ["2.5", "7.3.6"],
    "fragmented control": ["5.1", "5.2"],
    "nothing to continue": ["5.9", "5.1[0-7]"],
    "interleaved": ["5.18"],
    "text": ["6.[348].*", "6.6.[13468]", "6.6.10", "6.11.5", "6.10.*", "6.1[2-9].*", "6.2[01].*"],
    "close codes": ["7.9.*"],
    "short close": ["7.3.2"],
    "close reason": ["7.5.1"],
    "whole pongs": ["2.[23469]", "2.1?", "5.[678]", "5.19", "5.20", "6.4.[12]"],
    "large messages": ["1.?.[78]", "7.1.6", "10.1.1"],
    "whole echoes": [case.name for case in CASES if any(kind != "pong" and data for kind, data in case.events)],
    "closes answered": [case.name for case in CASES if not case.lax_codes],
}


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with echoing(ServerConfig(db=str(tmp_path_factory.mktemp("echo") / "chat.db"))) as server:
        yield server.wait_ready()


def failed(outcomes: list[Outcome]) -> dict[str, str]:
    return {outcome.case.name: outcome.detail for outcome in outcomes if outcome.result is Result.FAILED}


def test_gateway_conformance_cases_all_pass(echo: Server, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = asyncio.run(hold_all(CASES, echo.port, PATH, PROTOCOL))
    assert Counter(outcome.case.name.partition(".")[0] for outcome in outcomes) == NUM_CASES
    assert len(BY_NAME) == len(CASES) == 247
    assert failed(outcomes) == {}
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("rule", [None, *FAILED_WITHOUT])
async def test_conformance_server_breaking_a_rule_fails_its_cases(rule: Rule | None) -> None:
    async with serving(rule) as port:
        outcomes = await hold_all(CASES, port)
    expected = FAILED_WITHOUT[rule] if rule else []
    assert sorted(failed(outcomes)) == sorted(
        name for name in BY_NAME if any(fnmatch(name, pattern) for pattern in expected)
    )


async def test_conformance_server_sending_after_close_is_detected() -> None:
    async with serving("silence after close") as port:
        for name in ("7.1.3", "7.1.4"):
            outcome = await hold(BY_NAME[name], port)
            assert outcome.result is Result.FAILED and "after the Close" in outcome.detail


async def test_conformance_server_not_ending_connection_is_detected() -> None:
    async with serving("an end") as port:
        assert (await hold(BY_NAME["1.1.1"], port, timeout_s=0.5)).result is Result.FAILED


@pytest.mark.parametrize(
    ("close_frame", "code"), [(frame(CLOSE), 1000), (close(1001), 1001), (close(4000, b"x"), 4000), (close(1005), 1002)]
)
async def test_close_within_fragmented_message_is_answered(echo: Server, close_frame: bytes, code: int) -> None:
    """Regression test: the WebSocket library answered each of them with a protocol error."""
    case = BY_NAME["7.1.5"]
    said = (frame(TEXT, b"begun", fin=False) + close_frame,)
    outcome = await hold(type(case)("amid", script=said, events=(), codes=frozenset({code})), echo.port, PATH, PROTOCOL)
    assert outcome.result is Result.OK, outcome.detail


def test_utf8_cases_match_python_decoder() -> None:
    def is_utf8(payload: bytes) -> bool:
        return payload.decode(errors="ignore").encode() == payload

    assert all(is_utf8(payload) for group in VALID.values() for payload in group)
    assert not any(is_utf8(payload) for group in INVALID.values() for payload in group)
    mixed = {name: [is_utf8(payload) for payload in payloads] for name, payloads in MIXED.items()}
    assert mixed == {
        name: [BY_NAME[f"{name}.{at}"].events != () for at in range(1, len(found) + 1)] for name, found in mixed.items()
    }
