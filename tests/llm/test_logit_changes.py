"""`bad_words`, `allowed_token_ids`, n-gram bans and `logprobs=-1` through `LLM`; transformers is the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from chatcache import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from chatcache.errors import InvalidRequestError
from chatcache.llm import base

PROMPT = [7, 8, 9]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
MODES: list[type[SamplingParams] | type[BeamSearchParams]] = [SamplingParams, BeamSearchParams]


def test_greedy_tokens_with_bans_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    ids = torch.tensor([PROMPT])
    (plain,) = llm.generate(PROMPT, SamplingParams(**GREEDY), use_tqdm=False)
    first, second, third = plain.outputs[0].token_ids[:3]
    changes: list[dict[str, Any]] = [
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[first], [second, third]]},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ]
    for changed in changes:
        (output,) = llm.generate(PROMPT, SamplingParams(**GREEDY, **changed), use_tqdm=False)
        with torch.no_grad():
            want = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=20,
                min_new_tokens=20,
                pad_token_id=0,
                **changed,
            )
        assert output.outputs[0].token_ids == want[0, len(PROMPT) :].tolist() != plain.outputs[0].token_ids


@pytest.mark.parametrize("mode", MODES)
def test_bad_words_are_not_in_the_output(llm: LLM, mode: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    options |= {"temperature": 0} if mode is SamplingParams else {"beam_width": 2}
    plain = llm.generate(PROMPT, mode(**options), use_tqdm=False)[0].outputs[0].text
    pairs = {first + second for first, second in itertools.pairwise(plain) if (first + second).isascii()}
    words = sorted(pair for pair in pairs if pair.strip() == pair)[:2]
    assert len(words) == 2
    (output,) = llm.generate(PROMPT, mode(**options, bad_words=words), use_tqdm=False)
    assert output.error is None and not any(word in output.outputs[0].text for word in words)
    (failed,) = llm.generate(PROMPT, [mode(**options, bad_words=[""])], use_tqdm=False)
    assert failed.error is not None and failed.error.message.startswith("bad_words")


@pytest.mark.parametrize("mode", MODES)
def test_allowed_token_ids_leave_only_these(llm: LLM, mode: Any) -> None:
    params = mode(max_tokens=12, allowed_token_ids=[65, 66, 200], ignore_eos=True)
    outputs = llm.generate([PROMPT, PROMPT], [params, mode(max_tokens=12, ignore_eos=True)], use_tqdm=False)
    assert {token for each in outputs[0].outputs for token in each.token_ids} <= {65, 66, 200}
    assert not {token for each in outputs[1].outputs for token in each.token_ids} <= {65, 66, 200}


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_of_the_whole_vocabulary_are_the_log_softmax(llm: LLM, oracle: Any, mode: Any) -> None:
    (output,) = llm.generate(PROMPT, mode(max_tokens=3, ignore_eos=True, logprobs=-1), use_tqdm=False)
    for candidate in output.outputs:
        with torch.no_grad():
            logits = oracle(torch.tensor([PROMPT + candidate.token_ids])).logits[0, len(PROMPT) - 1 : -1]
        assert candidate.logprobs is not None and len(candidate.logprobs) == 3
        for row, want in zip(candidate.logprobs, logits.log_softmax(-1), strict=True):
            assert sorted(row) == list(range(257)) and sorted(each.rank or 0 for each in row.values()) == [
                *range(1, 258)
            ]
            assert [row[token].logprob for token in range(257)] == pytest.approx(want.tolist(), abs=1e-4)


def test_logprobs_beyond_the_memory_are_refused_before_any_prompt_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "free_host_bytes", lambda: 400 * 257 * 10)
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=-1)
    assert len(llm.generate([PROMPT] * 2, params, use_tqdm=False)) == 2
    with pytest.raises(InvalidRequestError, match=r"3 prompts .* 1.471 MiB of memory; 1004 KiB are free"):
        llm.generate([PROMPT] * 3, params)
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        llm.generate(PROMPT, SamplingParams(max_tokens=None, logprobs=-1))


async def test_async_llm_refuses_logprobs_beyond_the_memory(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "free_host_bytes", lambda: 1000)
    async with AsyncLLM(str(folder), dtype="float32", attention_backend="reference", kv_memory="4MiB") as llm:
        with pytest.raises(InvalidRequestError, match="logprobs=-1"):
            async for _ in llm.generate(PROMPT, SamplingParams(logprobs=-1)):
                pass
