"""`LLM` with decoding beyond plain sampling.

The oracles are transformers' logits and `LLM` itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chatcache import LLM, BeamSearchParams, SamplingParams
from chatcache.errors import InvalidRequestError, ModelFolderError

PROMPT = [7, 8, 9, *range(30, 60)]


def log_softmax(oracle: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits, -1)


def test_prompt_logprobs_are_those_of_the_logits_cached_or_not(llm: LLM, oracle: Any) -> None:
    expected = log_softmax(oracle, PROMPT)
    for _ in range(2):
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=3), use_tqdm=False)
        rows = output.prompt_logprobs
        assert rows is not None and len(rows) == len(PROMPT) and rows[0] is None
        for place, (token, row) in enumerate(zip(PROMPT[1:], rows[1:], strict=True)):
            assert row is not None and next(iter(row)) == token
            top = expected[place].topk(3).indices.tolist()
            assert set(row) == {token, *top}
            for other, entry in row.items():
                assert entry.logprob == pytest.approx(float(expected[place, other]), abs=1e-4)
                assert entry.rank == (top.index(other) + 1 if other in top else None)
    (plain,) = llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain.prompt_logprobs is None


def test_distinct_candidates_have_their_exact_log_probability(llm: LLM, oracle: Any) -> None:
    params = SamplingParams(n=6, distinct=True, seed=1, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert len({tuple(each.token_ids) for each in output.outputs}) == 6
    for each in output.outputs:
        rows = log_softmax(oracle, PROMPT + each.token_ids)[len(PROMPT) - 1 : -1]
        exact = sum(float(row[token]) for row, token in zip(rows, each.token_ids, strict=True))
        assert each.score == pytest.approx(exact, abs=1e-3)


def test_best_of_returns_the_likeliest_first(llm: LLM) -> None:
    common: dict[str, Any] = {"seed": 2, "max_tokens": 5, "ignore_eos": True, "logprobs": 0}
    (every,) = llm.generate([PROMPT], SamplingParams(n=6, **common), use_tqdm=False)
    (best,) = llm.generate([PROMPT], SamplingParams(n=2, best_of=6, **common), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda each: -(each.cumulative_logprob or 0.0))
    assert [each.token_ids for each in best.outputs] == [each.token_ids for each in ranked[:2]]


def test_groups_and_live_beams(llm: LLM) -> None:
    params = BeamSearchParams(
        beam_width=4, num_beam_groups=2, diversity_penalty=50.0, max_tokens=6, ignore_eos=True, stream_beams=True
    )
    (output,) = llm.beam_search([PROMPT], params)
    assert output.live_beams is not None and len(output.live_beams) == 5  # the last step leaves none alive
    tokens: dict[int, list[int]] = {0: []}
    for beams in output.live_beams:
        assert 1 <= len(beams) <= 4
        for beam in beams:
            tokens[beam.node] = [*tokens[beam.parent], beam.token_id]
    alive = {tuple(tokens[beam.node]) for beam in output.live_beams[-1]}
    assert {tuple(each.token_ids[:5]) for each in output.outputs} <= alive
    assert len({each.token_ids[0] for each in output.outputs}) >= 2
    (plain,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=3))
    assert plain.live_beams is None


def test_explain_predicts_the_cache_hits_of_generate(llm: LLM) -> None:
    assert llm.explain(PROMPT).num_cached_tokens == 0
    llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)
    longer = [*PROMPT, 1, 2, 3]
    explanation = llm.explain({"prompt_token_ids": longer})
    assert (
        llm.generate([longer], SamplingParams(max_tokens=1))[0].num_cached_tokens == explanation.num_cached_tokens >= 32
    )
    assert llm.explain("Hello").num_tokens == len(llm.get_tokenizer().encode("Hello", add_special_tokens=True))
    with pytest.raises(InvalidRequestError):
        llm.explain([])


def test_accounts_and_health_between_calls(llm: LLM) -> None:
    accounts = llm.accounts()
    assert (accounts.num_pages_in_use, accounts.requests) == (0, {}) and accounts.page_bytes > 0
    before = llm.health().num_prompt_tokens
    llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.health().num_prompt_tokens == before + len(PROMPT)


def test_priority_needs_its_policy(llm: LLM, folder: Any) -> None:
    with pytest.raises(InvalidRequestError, match="scheduling_policy"):
        llm.generate([PROMPT], priority=[1])
    options: dict[str, Any] = {"dtype": "float32", "attention_backend": "reference", "kv_memory": "4MiB"}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(str(folder), scheduling_policy="priority", swap_space=0, preemption_mode="recompute", **options) as ranked:
        outputs = ranked.generate([PROMPT, PROMPT[:5]], params, use_tqdm=False, priority=[2, 1])
        assert [each.outputs[0].token_ids for each in outputs] == [
            each.outputs[0].token_ids for each in llm.generate([PROMPT, PROMPT[:5]], params, use_tqdm=False)
        ]
        with pytest.raises(InvalidRequestError, match="2 prompts but 1"):
            ranked.generate([PROMPT, PROMPT], params, priority=[1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"preemption_mode": "never"}, "preemption"),
        ({"preemption_mode": "swap", "swap_space": 0}, "swap"),
        ({"swap_space": "lots"}, "not a size"),
    ],
)
def test_invalid_policy_is_rejected(folder: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        LLM(str(folder), dtype="float32", attention_backend="reference", kv_memory="4MiB", **options)


def test_deterministic_is_passed_to_the_loader(folder: Any) -> None:
    with pytest.raises(ModelFolderError, match="deterministic needs"):
        LLM(str(folder), dtype="float32", attention_backend="reference", kv_memory="4MiB", deterministic=True)
