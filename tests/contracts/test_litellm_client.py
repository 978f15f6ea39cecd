"""Test litellm against the real server, in its own environment: it requires an older `openai`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contracts.environments import run_in
from tests.gateway.serving import PAGE_SIZE, Server

pytestmark = [pytest.mark.slow, pytest.mark.client("litellm")]


@pytest.fixture(scope="module")
def results(module_server: Server) -> dict[str, Any]:
    return run_in("litellm", "ask.py", module_server.url)


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


def test_several_candidates_are_returned(results: dict[str, Any]) -> None:
    assert len(results["texts"]) == 3


def test_reasoning_effort_and_a_schema_are_accepted(results: dict[str, Any]) -> None:
    assert set(results["constrained"]) == {"city"}


def test_ollama_and_anthropic_providers_return_the_same_chat(results: dict[str, Any]) -> None:
    for provider in ("ollama_chat", "anthropic"):
        assert results["providers"][provider]["text"], results["providers"]
        assert results["providers"][provider]["streamed"]


@pytest.mark.refused("400 `context_length_exceeded`, raised as ContextWindowExceededError")
def test_prompt_beyond_the_context(results: dict[str, Any]) -> None:
    assert results["refused"] == "context"


def test_efforts_are_accepted(results: dict[str, Any]) -> None:
    assert results["efforts"] == [results["whole"]["choices"][0]["message"]["content"]] * 2


@pytest.mark.refused("400 `unsupported_parameter`: only text and file parts are supported")
def test_image_input(results: dict[str, Any]) -> None:
    assert "only text and file parts are supported" in results["image"]
