"""npm `openai` and Vercel's `ai` against the real server: stricter than the Python client in what they demand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.contracts.node_clients import run
from tests.gateway.serving import PAGE_SIZE, Server, failing_after, slowed

pytestmark = pytest.mark.slow

SCENARIOS = ("plain", "streamed", "helper", "responses", "responsesHelper", "socket", "refused")


@pytest.fixture(scope="module")
def said(module_server: Server) -> dict[str, Any]:
    """Everything the npm client was told, from one process."""
    result: dict[str, Any] = run("openai.mjs", *SCENARIOS, url=module_server.url)
    return result


def test_a_stream_adds_up_to_the_whole_answer(said: dict[str, Any]) -> None:
    plain, streamed = said["plain"], said["streamed"]
    assert streamed["text"] == plain["text"] and streamed["finish"] == plain["finish"]
    for usage in (plain["usage"], streamed["usage"]):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    prompt = plain["usage"]["prompt_tokens"]
    assert prompt - PAGE_SIZE <= streamed["usage"]["prompt_tokens_details"]["cached_tokens"] <= prompt


def test_the_stream_helper_has_role_and_end_of_every_choice(said: dict[str, Any]) -> None:
    """It throws `missing role` and `missing finish_reason` where one lacks."""
    helper = said["helper"]
    assert helper["texts"] == helper["deltas"] and len(set(helper["texts"])) == 3
    assert set(helper["finishes"]) <= {"stop", "length"}


def test_responses_stream_continue_and_resume(said: dict[str, Any]) -> None:
    heard = said["responses"]
    assert heard["numbers"] == list(range(len(heard["numbers"])))
    assert heard["kinds"][:2] == ["response.created", "response.in_progress"]
    assert heard["kinds"][-1] in ("response.completed", "response.incomplete")
    assert heard["text"] == heard["whole"] == heard["stored"]
    assert heard["again"] == heard["numbers"][4:]
    history = heard["usage"]["input_tokens"] + heard["usage"]["output_tokens"]
    assert history - PAGE_SIZE <= heard["next"]["input_tokens_details"]["cached_tokens"] <= history
    assert said["responsesHelper"]["text"] == said["responsesHelper"]["whole"]


def test_responses_over_a_websocket_in_lanes(said: dict[str, Any]) -> None:
    heard = said["socket"]
    assert heard["numbers"] == list(range(len(heard["numbers"])))
    by_lane: dict[str, str] = defaultdict(str, heard["texts"])
    assert sorted(end["lane"] for end in heard["ended"]) == ["", "a", "b"]
    for end in heard["ended"]:
        assert end["text"] == by_lane[end["lane"]]
    first = next(end["usage"] for end in heard["ended"] if not end["lane"])
    history = first["input_tokens"] + first["output_tokens"]
    for end in heard["ended"]:
        if end["lane"]:
            assert end["usage"]["input_tokens_details"]["cached_tokens"] >= history - PAGE_SIZE


def test_a_refusal_is_its_class(said: dict[str, Any]) -> None:
    refused = said["refused"]
    assert refused["isBadRequest"] and refused["id"]
    assert (refused["code"], refused["param"]) == ("invalid_value", "n")


def test_breaking_off_a_loop_ends_the_generation(server: Server) -> None:
    with slowed(server, 0.01):
        assert run("openai.mjs", "left", url=server.url)["left"]
        server.wait_idle()


def test_a_fault_in_the_middle_is_an_error_with_the_servers_words(module_server: Server) -> None:
    server = module_server
    with failing_after(server, 6):
        heard = run("openai.mjs", "failing", url=server.url)["failing"]
    assert heard["text"] and heard["name"] == "APIError" and heard["code"]
    assert "secret" not in heard["message"]
    server.wait_idle()


def test_the_ai_sdk_finds_every_chunk_valid(server: Server) -> None:
    heard = run("aisdk.mjs", url=server.url)
    assert heard["errors"] == []
    assert heard["stream"]["text"] == heard["whole"]["text"]
    assert heard["stream"]["finish"] == heard["whole"]["finish"] in ("stop", "length")
    usage = heard["stream"]["usage"]
    assert usage["inputTokens"] > 0 and usage["outputTokens"] == heard["whole"]["usage"]["outputTokens"]
    assert usage["inputTokens"] - PAGE_SIZE <= usage["cachedInputTokens"] <= usage["inputTokens"]
