"""`LLM.chat` with variables of the chat template, and thinking budgets without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache import LLM, BeamSearchParams, SamplingParams
from chatcache.errors import InvalidRequestError
from tests.llm.tiny_llama import TEMPLATE, write_folder

CHAT = [{"role": "user", "content": "Hi"}]
THINKING_TEMPLATE = TEMPLATE + (
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def llm_thinking(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The tiny model with random weights, whose chat template opens the reasoning."""
    folder: Path = tmp_path_factory.mktemp("thinking")
    write_folder(folder, oracle)
    for name, field, value in (
        ("config.json", "max_position_embeddings", 512),
        ("tokenizer_config.json", "chat_template", THINKING_TEMPLATE),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, field: value}))
    with LLM(str(folder), dtype="float32", attention_backend="reference", kv_memory="16MiB", max_num_seqs=64) as llm:
        yield llm


def num_thought_tokens(llm: LLM, token_ids: tuple[int, ...]) -> int:
    tokenizer = llm.get_tokenizer()
    for count in range(1, len(token_ids) + 1):
        if "</think>" in tokenizer.decode(token_ids[:count], skip_special_tokens=False):
            return count
    return len(token_ids)


def test_chat_template_kwargs_reach_the_template_and_are_checked(llm_thinking: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    (loud,) = llm_thinking.chat(CHAT, params, use_tqdm=False)
    (quiet,) = llm_thinking.chat(CHAT, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    assert loud.prompt is not None and loud.prompt.endswith("<think>")
    assert quiet.prompt is not None and quiet.prompt.endswith("<think></think>")
    with pytest.raises(InvalidRequestError, match=r"chat_template_kwargs\.messages is set by the server"):
        llm_thinking.chat(CHAT, params, use_tqdm=False, chat_template_kwargs={"messages": []})
    invalid: Any
    for invalid, message in (([1], "must be a dict, got list"), ({1: True}, "names of variables must be text, got 1")):
        with pytest.raises(InvalidRequestError, match=message):
            llm_thinking.chat(CHAT, params, use_tqdm=False, chat_template_kwargs=invalid)


@pytest.mark.slow
def test_thinking_budget_is_kept_in_200_of_200_draws(llm_thinking: LLM) -> None:
    budget = 24
    params = SamplingParams(
        n=50, temperature=1.3, max_tokens=budget + 24, ignore_eos=True, thinking_token_budget=budget, seed=1
    )
    outputs = llm_thinking.chat([CHAT] * 4, [*(params,) * 3, SamplingParams(**{**fields(params), "seed": 2})], False)
    draws = [candidate.token_ids for output in outputs for candidate in output.outputs]
    assert len(draws) == 200
    counts = [num_thought_tokens(llm_thinking, tuple(ids)) for ids in draws]
    assert max(counts) <= budget + 16 and min(counts) > 0
    assert all("</think>" in llm_thinking.get_tokenizer().decode(ids, skip_special_tokens=False) for ids in draws)


def fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def test_thinking_budget_is_kept_by_beams_and_by_text_prompts(llm_thinking: LLM) -> None:
    beams = BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True, thinking_token_budget=12)
    (output,) = llm_thinking.chat(CHAT, beams, use_tqdm=False)
    assert all(num_thought_tokens(llm_thinking, tuple(each.token_ids)) <= 28 for each in output.outputs)
    params = SamplingParams(max_tokens=40, ignore_eos=True, thinking_token_budget=12)
    (output,) = llm_thinking.generate("Question. <think>", params, use_tqdm=False)
    assert num_thought_tokens(llm_thinking, tuple(output.outputs[0].token_ids)) <= 28


def test_thinking_budget_of_model_without_reasoning_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="thinking_token_budget needs a model"):
        llm.generate("Hi", SamplingParams(thinking_token_budget=9), use_tqdm=False)
