"""`LLM.embed` and `LLM.score` equal transformers' hidden states, pooled and normalised."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatcache import LLM, PoolingParams, SamplingParams
from chatcache.errors import InvalidRequestError
from chatcache.types.plan import F32

TEXTS = ["Hello there", "a", "Once upon a time, " * 6]


def expected(oracle: Any, ids: list[int], pooling: str = "last", dimensions: int | None = None) -> F32:
    with torch.inference_mode():
        states = oracle.model(torch.tensor([ids])).last_hidden_state[0]
    pooled = (states[-1] if pooling == "last" else states.mean(dim=0))[:dimensions]
    vector: F32 = (pooled / pooled.norm()).numpy()
    return vector


@pytest.mark.parametrize("pooling", ["auto", "last", "mean"])
def test_embeddings_equal_transformers(pooling: str, folder: Path, oracle: Any) -> None:
    kind = "mean" if pooling == "mean" else "last"
    with LLM(
        str(folder), dtype="float32", attention_backend="reference", kv_memory="4MiB", pooling=pooling,
        max_num_batched_tokens=32,
    ) as llm:  # fmt: skip
        together = llm.embed(TEXTS, use_tqdm=False)
        for text, output in zip(TEXTS, together, strict=True):
            assert output.error is None and output.finished
            assert output.prompt_token_ids == list(llm.get_tokenizer().encode(text))
            want = expected(oracle, output.prompt_token_ids, kind)
            np.testing.assert_allclose(output.outputs.embedding, want, atol=2e-5)
            (alone,) = llm.embed(text, use_tqdm=False)
            np.testing.assert_allclose(alone.outputs.embedding, output.outputs.embedding, atol=2e-5)
            assert alone.num_cached_tokens == (0 if kind == "mean" else len(text) - 1)
        (short,) = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        want = expected(oracle, short.prompt_token_ids, kind, 8)
        np.testing.assert_allclose(short.outputs.embedding, want, atol=2e-5)


def test_cpu_kernels_embed_between_generations(folder: Path, oracle: Any) -> None:
    with LLM(str(folder), dtype="float32", kv_memory="4MiB") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        before = llm.generate(TEXTS, params, use_tqdm=False)
        for output in llm.embed([list(text.encode("utf-8")) for text in TEXTS], use_tqdm=False):
            want = expected(oracle, output.prompt_token_ids)
            np.testing.assert_allclose(output.outputs.embedding, want, atol=2e-4)
        after = llm.generate(TEXTS, params, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in before] == [each.outputs[0].token_ids for each in after]


def test_scores_are_cosines(llm: LLM) -> None:
    first, *others = (np.array(each.outputs.embedding) for each in llm.embed([TEXTS[0], *TEXTS], use_tqdm=False))
    for given in (TEXTS[0], TEXTS[:1], [TEXTS[0]] * 3):
        scores = llm.score(given, TEXTS, use_tqdm=False)
        assert [each.outputs.score for each in scores] == pytest.approx(
            [float(first @ each) for each in others], abs=1e-5
        )
    assert scores[0].outputs.score == pytest.approx(1.0) and scores[0].outputs.score <= 1.0
    assert scores[1].prompt_token_ids == list(llm.get_tokenizer().encode(TEXTS[0] + TEXTS[1]))
    with pytest.raises(InvalidRequestError, match="got 2 and 3"):
        llm.score(TEXTS[:2], TEXTS)
    with pytest.raises(InvalidRequestError, match="got 1 and 0"):
        llm.score("a", [])


def test_prompt_that_cannot_run_has_an_error(llm: LLM) -> None:
    prompts: list[Any] = ["a", [10**6], [1] * 257]
    good, bad, long = llm.embed(prompts, use_tqdm=False)
    assert good.error is None and len(good.outputs.embedding) == 64
    assert isinstance(bad.error, InvalidRequestError) and not bad.outputs.embedding
    assert long.error is not None and long.error.code == "context_length_exceeded"
    (score,) = llm.score("a", "word " * 100, use_tqdm=False)
    assert score.error is not None and math.isnan(score.outputs.score)
    with pytest.raises(InvalidRequestError, match=r"dimensions must be an integer between 1 and 64, .* got 65"):
        llm.embed("a", pooling_params=PoolingParams(dimensions=65))
