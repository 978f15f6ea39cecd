"""Test npm `openai` against the real server; its requirements exceed the Python client's."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.contracts.node_clients import run
from tests.gateway.serving import PAGE_SIZE, Server, failing_after, slowed

pytestmark = [pytest.mark.slow, pytest.mark.client("openai (Node)")]

SCENARIOS = ("embeddings", "plain", "streamed", "helper", "responses", "responsesHelper", "socket", "refused", "image")


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


@pytest.mark.refused("400 `unsupported_parameter`: only text and file parts are supported")
def test_image_input(results: dict[str, Any]) -> None:
    assert results["image"]["isBadRequest"] and results["image"]["code"] == "unsupported_parameter"
    assert "only text and file parts are supported" in results["image"]["message"]


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
