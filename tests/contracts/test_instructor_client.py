"""Test instructor against the real server with a scripted model, in its own environment."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.contracts.agents import agent_server, tool_call
from tests.contracts.environments import run_in

pytestmark = [pytest.mark.slow, pytest.mark.client("instructor")]

CITY = {"city": "Bern", "people": 7}


def answer(prompt: str) -> str:
    """Return the city in the form that the mode asks for; at first a negative one if the user wants it."""
    found = re.search(r'"name": "(\w*City)"', prompt)
    if found is None:
        return json.dumps(CITY)
    wants_negative = "negative" in prompt and "people-must-be-positive" not in prompt
    return tool_call(found[1], {**CITY, "people": -1} if wants_negative else CITY)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with agent_server(tmp_path_factory.mktemp("db"), answer) as server:
        found = run_in("frameworks", "run_instructor.py", server.url)
        found["num_prompts"] = len(server.prompts)
        server.wait_idle()
    return found


@pytest.mark.parametrize("mode", ["tools", "json", "json_schema", "md_json", "responses_tools"])
def test_mode_returns_an_instance_of_the_class(results: dict[str, Any], mode: str) -> None:
    assert results[mode] == CITY


def test_invalid_answer_is_asked_again(results: dict[str, Any]) -> None:
    assert results["retried"] == CITY
    assert results["num_prompts"] == 8  # five modes, two for the retry, one stream


def test_partial_objects_are_streamed(results: dict[str, Any]) -> None:
    assert results["streamed"]["last"] == CITY and results["streamed"]["number"] > 3


@pytest.mark.refused("400 `unsupported_parameter`: only text and file parts are supported")
def test_image_input(results: dict[str, Any]) -> None:
    assert results["image"]["code"] == "unsupported_parameter"
    assert "only text and file parts are supported" in results["image"]["raised"]
