"""Test npm `openai` and Vercel's `ai` against the real server; their requirements exceed the Python client's."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.agents import agent_server, tool_call
from tests.contracts.node_clients import FOLDER, run
from tests.gateway.serving import PAGE_SIZE, Server, failing_after, slowed

pytestmark = pytest.mark.slow

SCENARIOS = ("embeddings", "plain", "streamed", "helper", "responses", "responsesHelper", "socket", "refused")


@pytest.fixture(scope="module")
def results(module_server: Server) -> dict[str, Any]:
    """Results of all scenarios of the npm client, from one process."""
    result: dict[str, Any] = run("openai.mjs", *SCENARIOS, url=module_server.url)
    return result


def test_stream_joins_to_the_whole_answer(results: dict[str, Any]) -> None:
    plain, streamed = results["plain"], results["streamed"]
    assert streamed["text"] == plain["text"] and streamed["finish"] == plain["finish"]
    for usage in (plain["usage"], streamed["usage"]):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    prompt = plain["usage"]["prompt_tokens"]
    assert prompt - PAGE_SIZE <= streamed["usage"]["prompt_tokens_details"]["cached_tokens"] <= prompt


def test_stream_helper_has_role_and_finish_reason_of_every_choice(results: dict[str, Any]) -> None:
    """The helper throws `missing role` or `missing finish_reason` otherwise."""
    helper = results["helper"]
    assert helper["texts"] == helper["deltas"] and len(set(helper["texts"])) == 3
    assert set(helper["finishes"]) <= {"stop", "length"}


def test_embeddings_are_the_same_in_both_encodings(results: dict[str, Any]) -> None:
    received = results["embeddings"]
    assert [each["index"] for each in received["plain"]] == [0, 1]
    for packed, plain in zip(received["packed"], received["plain"], strict=True):
        assert packed["embedding"] == pytest.approx(plain["embedding"], abs=1e-7) and len(plain["embedding"]) > 3
    assert len(received["tokens"][0]["embedding"]) == 3
    assert received["usage"]["prompt_tokens"] == received["usage"]["total_tokens"] > 0


def test_responses_stream_continue_and_resume(results: dict[str, Any]) -> None:
    received = results["responses"]
    assert received["numbers"] == list(range(len(received["numbers"])))
    assert received["kinds"][:2] == ["response.created", "response.in_progress"]
    assert received["kinds"][-1] in ("response.completed", "response.incomplete")
    assert received["text"] == received["whole"] == received["stored"]
    assert received["again"] == received["numbers"][4:]
    history = received["usage"]["input_tokens"] + received["usage"]["output_tokens"]
    assert history - PAGE_SIZE <= received["next"]["input_tokens_details"]["cached_tokens"] <= history
    assert results["responsesHelper"]["text"] == results["responsesHelper"]["whole"]


def test_responses_run_on_several_websocket_streams(results: dict[str, Any]) -> None:
    received = results["socket"]
    assert received["numbers"] == list(range(len(received["numbers"])))
    by_lane: dict[str, str] = defaultdict(str, received["texts"])
    assert sorted(end["lane"] for end in received["ended"]) == ["", "a", "b"]
    for end in received["ended"]:
        assert end["text"] == by_lane[end["lane"]]
    first = next(end["usage"] for end in received["ended"] if not end["lane"])
    history = first["input_tokens"] + first["output_tokens"]
    for end in received["ended"]:
        if end["lane"]:
            assert end["usage"]["input_tokens_details"]["cached_tokens"] >= history - PAGE_SIZE


def test_refused_request_raises_its_class(results: dict[str, Any]) -> None:
    refused = results["refused"]
    assert refused["isBadRequest"] and refused["id"]
    assert (refused["code"], refused["param"]) == ("invalid_value", "n")


def test_leaving_the_stream_loop_cancels_the_generation(server: Server) -> None:
    with slowed(server, 0.01):
        assert run("openai.mjs", "left", url=server.url)["left"]
        server.wait_idle()


def test_error_during_a_stream_has_the_message_of_the_server(module_server: Server) -> None:
    server = module_server
    with failing_after(server, 6):
        received = run("openai.mjs", "failing", url=server.url)["failing"]
    assert received["text"] and received["name"] == "APIError" and received["code"]
    assert "secret" not in received["message"]
    server.wait_idle()


def test_ai_sdk_accepts_every_chunk(server: Server) -> None:
    received = run("aisdk.mjs", url=server.url)
    assert received["errors"] == []
    assert received["stream"]["text"] == received["whole"]["text"]
    assert received["stream"]["finish"] == received["whole"]["finish"] in ("stop", "length")
    usage = received["stream"]["usage"]
    assert usage["inputTokens"] > 0 and usage["outputTokens"] == received["whole"]["usage"]["outputTokens"]
    assert usage["inputTokens"] - PAGE_SIZE <= usage["cachedInputTokens"] <= usage["inputTokens"]


def test_ai_sdk_default_provider_refers_to_stored_items(tmp_path: Path) -> None:
    if not (FOLDER / "node_modules" / "@ai-sdk" / "openai").is_dir():
        pytest.skip("@ai-sdk/openai is not installed: make clients")
    call = f"<think>Add.</think>Let me add.\n{tool_call('add', {'a': 40, 'b': 2})}"
    with agent_server(tmp_path, lambda prompt: "It is 42." if "sum-42" in prompt else call) as server:
        received = run("aisdk_openai.mjs", url=server.url)
        server.wait_idle()
    assert received["text"] == "It is 42."
    assert received["items"][1].count("item_reference") == 2  # the reasoning and the message
    first, second = received["usages"]
    assert second["cachedInputTokens"] >= first["inputTokens"]
