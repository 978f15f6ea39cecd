"""litellm against the real server, from an environment of its own: it pins an older `openai` than we test with."""

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
def said(module_server: Server) -> dict[str, Any]:
    if not PYTHON.exists():
        pytest.skip("litellm has no environment here: make clients")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "SERVER": module_server.url,
        "MODEL": MODEL,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the internet for prices
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run([str(PYTHON), str(SCRIPT)], env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_completion_and_stream_say_the_same(said: dict[str, Any]) -> None:
    whole, rebuilt = said["whole"], said["rebuilt"]
    text = whole["choices"][0]["message"]["content"]
    assert text and text == said["streamed"] == rebuilt["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == rebuilt["choices"][0]["finish_reason"]


def test_cached_tokens_pass_through(said: dict[str, Any]) -> None:
    """The stream asks what was asked before it: all but a part of a page is there."""
    usage = said["rebuilt"]["usage"]
    assert usage["completion_tokens"] == said["whole"]["usage"]["completion_tokens"]
    prompt = said["whole"]["usage"]["prompt_tokens"]
    assert usage["prompt_tokens"] == prompt
    assert prompt - PAGE_SIZE <= usage["prompt_tokens_details"]["cached_tokens"] <= prompt


def test_several_candidates_and_a_refusal(said: dict[str, Any]) -> None:
    assert len(said["texts"]) == 3
    assert said["refused"] == "context"
