"""The list of model types on the page on models is what a run over all types of `transformers` finds."""

from __future__ import annotations

import os
import random

import pytest
import transformers

from tests.model.families_page import (
    NATIVE,
    WRAPPED,
    TypeResult,
    all_types,
    list_types,
    parts_of_page,
    read_types,
    short_reason,
    try_type,
    try_types,
    types_on_page,
)

IS_RELEASE_OF_PAGE = f"`transformers` {transformers.__version__.rpartition('.')[0]}," in parts_of_page()[0]
"""Other releases have other types, and run other ones."""


def test_page_names_every_type_of_transformers() -> None:
    assert types_on_page() >= set(all_types()) if IS_RELEASE_OF_PAGE else types_on_page() & set(all_types())


@pytest.mark.long
def test_page_is_what_a_run_finds() -> None:
    if IS_RELEASE_OF_PAGE:
        assert list_types(dict(try_types(all_types()))) == parts_of_page()[1]


@pytest.mark.slow
def test_types_on_the_page_run_as_it_says() -> None:
    """Try other types in every run."""
    if IS_RELEASE_OF_PAGE:
        names = all_types()
        sample = random.Random(int(os.environ["CHATCACHE_TEST_SEED"])).sample(names, len(names) // 4)
        found = read_types(list_types(dict(try_types(sample))))
        on_page = read_types(parts_of_page()[1])
        assert found == {name: on_page[name] for name in sample}


def test_read_types_reads_what_list_types_writes() -> None:
    results = {"b": TypeResult(NATIVE), "a-2.5": TypeResult("", "it has no `heads`"), "c": TypeResult(WRAPPED)}
    ways = read_types(list_types(results))
    assert ways["b"] == "native decoder" and ways["a-2.5"] == "refused: it has no `heads`" and len(ways) == 3


@pytest.mark.slow
def test_try_type_returns_native_wrapped_and_refused_types() -> None:
    assert try_type("qwen3") == TypeResult(NATIVE)
    assert try_type("gpt_neox") == TypeResult(WRAPPED)
    refused = try_type("bloom")
    assert refused.runs == "" and "ALiBi" in refused.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v32", "has indexed_attention layers"),
        ("minimax_m3_vl_text", "has minimax_m3_sparse layers"),
        ("whisper", "only some layers attend through the registered function"),
    ],
)
def test_try_type_returns_why_a_type_is_refused(name: str, reason: str) -> None:
    assert try_type(name) == TypeResult("", reason)


def test_short_reason_keeps_only_the_reason() -> None:
    message = "/tmp/x/config.json: bert does not run on KV pages: BertSelfAttention is not plain causal attention"
    assert short_reason(message, "bert") == "its attention is not plain causal attention"
