"""Test litellm against the real server, in its own environment: it requires an older `openai`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serving import MODEL, PAGE_SIZE, Server

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parent / "litellm" / "ask.py"
PYTHON = Path(sys.prefix) / "litellm" / "bin" / "python"


@pytest.fixture(scope="module")
def results(module_server: Server) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip("litellm is not installed: make clients")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "SERVER": module_server.url,
        "MODEL": MODEL,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads prices
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run([str(PYTHON), str(SCRIPT)], env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_stream_equals_completion(results: dict[str, Any]) -> None:
    whole, rebuilt = results["whole"], results["rebuilt"]
    text = whole["choices"][0]["message"]["content"]
    assert text and text == results["streamed"] == rebuilt["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == rebuilt["choices"][0]["finish_reason"]


def test_cached_tokens_are_passed_through(results: dict[str, Any]) -> None:
    """The stream repeats an earlier request: all of it is cached except a partial page."""
    usage = results["rebuilt"]["usage"]
    assert usage["completion_tokens"] == results["whole"]["usage"]["completion_tokens"]
    prompt = results["whole"]["usage"]["prompt_tokens"]
    assert usage["prompt_tokens"] == prompt
    assert prompt - PAGE_SIZE <= usage["prompt_tokens_details"]["cached_tokens"] <= prompt


def test_embeddings_are_normalised(results: dict[str, Any]) -> None:
    first, second = results["embeddings"]
    assert first != second
    assert sum(value * value for value in first) == pytest.approx(1.0)


def test_several_candidates_and_a_refused_request(results: dict[str, Any]) -> None:
    assert len(results["texts"]) == 3
    assert results["refused"] == "context"


def test_efforts_are_accepted(results: dict[str, Any]) -> None:
    assert results["efforts"] == [results["whole"]["choices"][0]["message"]["content"]] * 2
