"""Test adversarial HTTP requests against a server with an engine process: the engine survives and the reference
requests return the same results as alone. Some requests also have values outside of any bound."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest

from tests.cli.servers import Server, serving
from tests.security.adversarial_requests import Adversary

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("CHATCACHE_TEST_SEED", 26))
NUM_CLIENTS = 6
ROUTE = "/v1/completions"
OPTIONS = ("--deterministic", "--attention-backend", "cpu", "--kv-memory", "16MiB", "--scheduling-policy", "priority")
BIG: tuple[Any, ...] = (
    *(2**63, 2**64, -(2**63) - 1, 10**30, -1, 0, 2**31, 1e308, 5e-324, True, None, "1", "", [], {}),
    *([2**70], [-1], [None], {"99999999999999999999": 1}, {"1": 10**30}, {"1": None}, {"": 1}, [[]], "\x00"),
)
REFERENCES: tuple[dict[str, Any], ...] = (
    {"prompt": [*range(1, 30)], "max_tokens": 24, "seed": 4, "logprobs": 2, "ignore_eos": True},
    {"prompt": [*range(2, 31)], "max_tokens": 24, "temperature": 0, "frequency_penalty": 0.5, "ignore_eos": True},
    {"prompt": [*range(3, 32)], "max_tokens": 20, "n": 3, "seed": 5, "top_p": 0.8, "ignore_eos": True},
    {"prompt": [*range(4, 33)], "max_tokens": 12, "use_beam_search": True, "n": 3, "ignore_eos": True},
)


@dataclass
class Responses:
    """Responses to the clients, by status, and errors found in them."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_references: int = 0


class Bodies:
    """Bodies of adversarial requests from a seed, a third of them with one or two values out of bounds."""

    def __init__(self, seed: int, vocab_size: int, max_model_len: int) -> None:
        self._adversary = Adversary(seed, vocab_size, max_model_len=max_model_len)
        self._random = random.Random(seed)

    def next(self) -> dict[str, Any]:
        request = self._adversary.request()
        fields = msgspec.to_builtins(request.params)
        body = {name: value for name, value in fields.items() if value is not None and name != "stream_beams"}
        if body.pop("type") == "beam":
            body["use_beam_search"] = True
        if outputs := body.get("structured_outputs"):
            body["structured_outputs"] = {name: value for name, value in outputs.items() if value}
        body |= {"prompt": list(request.prompt), "priority": request.priority}
        body["temperature"] = min(body.get("temperature", 1.0), 2.0)
        body["seed"] = max(min(body.get("seed", 0), 2**63 - 1), -(2**63))
        if "prompt_logprobs" not in body and self._random.random() < 0.3:
            body["stream"] = True
        if self._random.random() < 0.3:
            for _ in range(self._random.choice((1, 2))):
                body[self._random.choice(sorted(body))] = self._random.choice(BIG)
        return body


def run_load(server: Server, url: str, num_bodies: int, seed: int) -> Responses:
    """Send the bodies, six at a time, and a reference request after every third."""
    responses, lock, left = Responses(), threading.Lock(), iter(range(num_bodies))
    model = httpx.get(f"{url}/v1/models").json()["data"][0]
    bodies = Bodies(seed, 1536, model["max_model_len"])
    alone = [httpx.post(url + ROUTE, json=reference, timeout=60).json()["choices"] for reference in REFERENCES]

    def client() -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            while True:
                with lock:
                    number = next(left, None)
                    if number is None:
                        return
                    raw = json.dumps(bodies.next())
                answer = http.post(ROUTE, content=raw, headers={"content-type": "application/json"})
                wrong = error_in(answer)
                with lock:
                    responses.statuses[answer.status_code] += 1
                    responses.wrong += [f"{wrong}: {raw[:500]}"] if wrong else []
                if number % 3 == 0:
                    which = number // 3 % len(REFERENCES)
                    choices = http.post(ROUTE, json=REFERENCES[which]).json().get("choices")
                    with lock:
                        responses.num_references += 1
                        responses.wrong += [] if choices == alone[which] else [f"reference {which} differs: {choices}"]

    threads = [threading.Thread(target=client) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return responses


def error_in(answer: httpx.Response) -> str:
    if answer.status_code not in (200, 400):
        return f"{answer.status_code} {answer.text[:300]}"
    if "Traceback" in answer.text or 'File "' in answer.text:
        return "stack trace"
    for line in answer.text.split("\n"):
        if line.startswith('data: {"error"') and json.loads(line[6:])["error"]["type"] != "invalid_request_error":
            return line
    return ""


def check(server: Server, num_bodies: int, seed: int) -> None:
    url, child = server.ready(), server.child()
    responses = run_load(server, url, num_bodies, seed)
    assert not responses.wrong, "\n".join(responses.wrong[:5])
    assert (
        responses.statuses[200] > num_bodies // 4
        and responses.statuses[400] > num_bodies // 20
        and responses.num_references
    )
    assert server.child() == child, "the engine process has ended"
    assert httpx.get(f"{url}/readyz").status_code == 200
    assert "Traceback" not in server.output


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("", tmp_path_factory.mktemp("wire"), *OPTIONS) as server:
        yield server


def test_adversarial_http_requests_end_no_engine_and_change_no_reference_result(built_in: Server) -> None:
    check(built_in, 100, SEED)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_twenty_thousand_adversarial_http_requests_change_no_reference_result(built_in: Server, part: int) -> None:
    check(built_in, 5_000, SEED + part)


@pytest.mark.parametrize("fault", ["5xx", "trace", "error event"])
def test_injected_error_is_reported(fault: str) -> None:
    """Apply the check to invented answers."""
    responses = Responses()
    match fault:
        case "5xx":
            responses.wrong += [error_in(httpx.Response(500, text="x"))]
        case "trace":
            responses.wrong += [error_in(httpx.Response(400, text='{"error": "Traceback (most recent call last)"}'))]
        case "error event":
            responses.wrong += [error_in(httpx.Response(200, text='data: {"error": {"type": "server_error"}}\n'))]
    assert all(responses.wrong)
