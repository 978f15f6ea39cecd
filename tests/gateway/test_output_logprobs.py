"""Log-probabilities of the output: their number is limited, and responses report those that are gone."""

from __future__ import annotations

from typing import Any

import pytest

from chatcache.types.request import MAX_OUTPUT_LOGPROBS
from tests.gateway.frames import Frame
from tests.gateway.serving import Server

INCLUDE = "message.output_text.logprobs"
CHAT: Frame = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20}
RESPONSE: Frame = {"input": "Hi", "include": [INCLUDE], "top_logprobs": 20}
# Path, fields, name of the limit, log-probabilities per token of one candidate.
ROUTES = [
    ("/v1/chat/completions", CHAT, "max_tokens", 21),
    ("/v1/chat/completions", CHAT, "max_completion_tokens", 21),
    ("/v1/responses", RESPONSE, "max_output_tokens", 21),
    ("/v1/completions", {"prompt": ["Hi", "there"], "logprobs": 20}, "max_tokens", 2 * 21),
]


@pytest.mark.parametrize(("path", "fields", "name", "num_per_token"), ROUTES)
def test_number_of_output_logprobs_is_limited(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, fields: Frame, name: str, num_per_token: int
) -> None:
    monkeypatch.setattr("chatcache.gateway.api.params.MAX_OUTPUT_LOGPROBS", 4 * num_per_token * 10)
    status, _, refused = server.post(path, **fields, **{name: 11}, n=4)
    assert status == 400 and refused["error"]["param"] == name
    assert f"must be at most {4 * num_per_token * 10}" in refused["error"]["message"]
    status, _, body = server.post(path, **fields, **{name: 10}, n=4, ignore_eos=True)
    assert status == 200 and body["usage"]["total_tokens"]


def test_missing_limit_is_what_one_answer_carries_and_is_reported(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatcache.gateway.api.params.MAX_OUTPUT_LOGPROBS", 2 * 21 * 10)
    status, headers, body = server.post("/v1/chat/completions", **CHAT, n=2, ignore_eos=True)
    assert status == 200 and headers["x-chatcache-max-tokens"] == "10"
    assert [len(choice["logprobs"]["content"]) for choice in body["choices"]] == [10, 10]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    status, _, response = server.post("/v1/responses", **RESPONSE, n=2, ignore_eos=True)
    assert status == 200 and response["max_output_tokens"] == 10 and response["usage"]["output_tokens"] == 20
    status, headers, _ = server.post("/v1/chat/completions", **{**CHAT, "max_tokens": 10}, n=2)
    assert status == 200 and "x-chatcache-max-tokens" not in headers


def num_entries(response: dict[str, Any]) -> int:
    return sum(len(item["content"][0]["logprobs"]) for item in response["output"])


def test_response_names_logprobs_as_omitted_once_its_log_is_gone(server: Server) -> None:
    limits = {"n": 4, "max_output_tokens": 30, "ignore_eos": True}
    _, _, created = server.post("/v1/responses", **RESPONSE, **limits)
    _, _, other = server.post("/v1/responses", input="Hi", **limits)
    path = f"/v1/responses/{created['id']}"
    found = server.request("GET", path)[2]
    assert num_entries(found) == num_entries(created) == 120 and "omitted" not in found

    async def forget() -> None:
        for response_id in (created["id"], other["id"]):
            server.gateway.responses.remove(response_id)

    server.call(forget())
    stored = server.request("GET", path)[2]
    assert num_entries(stored) == 0 and stored["omitted"] == [INCLUDE] and "has_logprobs" not in stored
    assert "omitted" not in server.request("GET", f"/v1/responses/{other['id']}")[2]


def test_logprobs_of_the_review_attack_are_within_the_limit() -> None:
    """64 candidates of 200 tokens with 20 alternatives were lost without a sign."""
    assert 64 * 200 * 21 <= MAX_OUTPUT_LOGPROBS < 64 * 2000 * 21
