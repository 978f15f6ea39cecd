"""`LLM` against transformers, and against itself."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer

from chatcache import LLM, BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputs
from chatcache.decoding.sampling import SamplingStrategy
from chatcache.errors import ContextLengthError, EngineError, InvalidRequestError

PROMPTS = [[7, 8, 9], [100] * 40, list(range(30, 95))]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def generate(oracle: Any, prompt: list[int], **options: Any) -> list[list[int]]:
    """New tokens of transformers' `generate`."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = oracle.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return [row[len(prompt) :].tolist() for row in output]


def test_greedy_tokens_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (expected,) = generate(oracle, prompt, min_new_tokens=20, max_new_tokens=20)
        assert 256 not in expected, "another seed, please: transformers was kept from ending here"
        assert output.outputs[0].token_ids == expected
        assert output.prompt_token_ids == prompt and output.finished


def test_beams_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    for output, prompt in zip(llm.beam_search(PROMPTS, params), PROMPTS, strict=True):
        expected = generate(oracle, prompt, num_beams=3, num_return_sequences=3, max_new_tokens=8)
        ours = [candidate.token_ids for candidate in output.outputs]
        assert [row + [256] * (len(full) - len(row)) for row, full in zip(ours, expected, strict=True)] == expected
        scores = [candidate.score for candidate in output.outputs]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0])
def test_beam_sequences_have_prompt_and_continuation_and_the_sum_of_the_log_probabilities(
    llm: LLM, oracle: Any, length_penalty: float
) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=length_penalty)
    stop = llm.beam_search("Hello", params)[0].outputs[0].token_ids[6]
    params = replace(params, stop_token_ids=(stop,))
    for prompt in ("Hello", llm.get_tokenizer().encode("Hello")):
        (output,) = llm.beam_search(prompt, params)
        assert output.sequences is not None and len(output.sequences) == 4
        assert length_penalty == 1.0 or "stop" in [each.finish_reason for each in output.sequences]
        for one, candidate in zip(output.sequences, output.outputs, strict=True):
            assert one.tokens == output.prompt_token_ids + candidate.token_ids
            assert one.text == "Hello" + candidate.text
            with torch.no_grad():
                rows = torch.log_softmax(oracle(torch.tensor([one.tokens])).logits[0], -1)
            first = len(output.prompt_token_ids)
            total = sum(float(rows[at - 1, one.tokens[at]]) for at in range(first, len(one.tokens)))
            assert one.cum_logprob == pytest.approx(total, abs=1e-3)
    assert llm.generate("Hello", GREEDY)[0].sequences is None


def test_beam_sequences_are_only_the_beams_that_were_found(llm: LLM) -> None:
    (output,) = llm.beam_search("Hello", BeamSearchParams(beam_width=4, structured_outputs={"choice": ["yes", "no"]}))  # type: ignore[arg-type]
    assert output.sequences is not None and len(output.outputs) == 4
    assert sorted(each.text for each in output.sequences) == ["Hellono", "Helloyes"]


def test_logprobs_are_those_of_the_logits(llm: LLM, oracle: Any) -> None:
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=3, seed=5, ignore_eos=True, logprobs=4))
    candidate = output.outputs[0]
    with torch.no_grad():
        logits = oracle(torch.tensor([PROMPTS[0] + candidate.token_ids])).logits[0]
    assert candidate.logprobs is not None
    for step, (token, row) in enumerate(zip(candidate.token_ids, candidate.logprobs, strict=True)):
        expected = torch.log_softmax(logits[len(PROMPTS[0]) - 1 + step], -1)
        top = expected.topk(4).indices.tolist()
        assert next(iter(row)) == token and set(row) == {token, *top}
        for other, entry in row.items():
            assert entry.logprob == pytest.approx(float(expected[other]), abs=1e-4)
            assert entry.rank == (top.index(other) + 1 if other in top else None)
    total = sum(row[token].logprob for token, row in zip(candidate.token_ids, candidate.logprobs, strict=True))
    assert candidate.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_every_form_of_prompt_is_the_same_prompt(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hello")
    forms: list[Any] = ["Hello", ids, [ids], {"prompt": "Hello"}, {"prompt_token_ids": ids}, ["Hello"]]
    outputs = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert len({tuple(output[0].outputs[0].token_ids) for output in outputs}) == 1
    assert {tuple(output[0].prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert outputs[0][0].prompt == "Hello" and outputs[1][0].prompt is None
    candidate = outputs[0][0].outputs[0]
    assert candidate.text == tokenizer.decode(candidate.token_ids)


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_params(llm: LLM) -> None:
    lengths = [9, 1, 5]
    outputs = llm.generate(PROMPTS, [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths])
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3
    with pytest.raises(InvalidRequestError, match="3 prompts but 2 params"):
        llm.generate(PROMPTS, [GREEDY] * 2)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_an_empty_list_of_params_raises_an_error_with_both_numbers(llm: LLM, num_prompts: int) -> None:
    prompts, chats = [[1, 2]] * num_prompts, [[{"role": "user", "content": "Hi"}]] * num_prompts
    for call in (llm.generate, llm.beam_search):
        with pytest.raises(InvalidRequestError, match=f"{num_prompts} prompts but 0 params"):
            call(prompts, [])
    with pytest.raises(InvalidRequestError, match=f"{num_prompts} prompts but 0 params"):
        llm.chat(chats, [])
    assert llm.generate([], []) == [] and llm.health().num_prompt_tokens == 0


def test_candidates_repeat_with_their_seed_whatever_else_runs(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=10, seed=3, ignore_eos=True)
    (alone,) = llm.generate([PROMPTS[0]], params)
    together = llm.generate([PROMPTS[1], PROMPTS[0], PROMPTS[2]], params)[1]
    rows = [candidate.token_ids for candidate in alone.outputs]
    assert rows == [candidate.token_ids for candidate in together.outputs]
    assert [candidate.index for candidate in alone.outputs] == [0, 1, 2, 3]
    assert len({tuple(row) for row in rows}) == 4


@pytest.mark.parametrize("as_list", [False, True])
def test_a_stop_string_cuts_the_text(llm: LLM, as_list: bool) -> None:
    whole = llm.generate("Hello", GREEDY)[0].outputs[0].text
    stop = next(char for char in whole[3:] if char.isascii())
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[stop] if as_list else stop)  # type: ignore[arg-type]
    candidate = llm.generate("Hello", params)[0].outputs[0]
    assert candidate.text == whole[: whole.index(stop)]
    assert (candidate.finish_reason, candidate.stop_reason) == ("stop", stop)


ABSURD_CALLS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "prompts is an integer": ("prompts", lambda llm: llm.generate(5)),
    "prompts is missing": ("prompts", lambda llm: llm.generate(None)),
    "prompts is a set": ("prompts", lambda llm: llm.beam_search({1, 2})),
    "params is an integer": ("sampling_params", lambda llm: llm.generate([1], 5)),
    "params is a text": ("sampling_params", lambda llm: llm.generate([1], "x")),
    "params is a list of integers": ("sampling_params", lambda llm: llm.generate([1], [5])),
    "params is an empty dict": ("sampling_params", lambda llm: llm.generate([1], {})),
    "params is false": ("sampling_params", lambda llm: llm.chat([{"role": "user", "content": "x"}], False)),
    "params of a beam search are for sampling": ("params", lambda llm: llm.beam_search([1], SamplingParams())),
    "params of a beam search has one for sampling": ("params", lambda llm: llm.beam_search([1], [SamplingParams()])),
    "pooling params is a dict": ("pooling_params", lambda llm: llm.embed([1], pooling_params={"dimensions": 3})),
    "data is missing": ("data_1", lambda llm: llm.score(None, "x")),
    "data is a list of token ids": ("data_2", lambda llm: llm.score("x", [1, 2])),
    "prompt has an image": ("prompts", lambda llm: llm.generate({"prompt": "x", "multi_modal_data": {"image": 1}})),
    "temperature is a text": ("temperature", lambda llm: llm.generate([1], SamplingParams(temperature="x"))),  # type: ignore[arg-type]
    "n is missing": ("n", lambda llm: llm.generate([1], SamplingParams(n=None))),  # type: ignore[arg-type]
    "priority is an integer": ("priority", lambda llm: llm.generate([1], priority=5)),
    "messages is an integer": ("messages", lambda llm: llm.chat(5)),
    "messages is a text": ("messages", lambda llm: llm.chat("x")),
    "messages has an integer": ("messages", lambda llm: llm.chat([5])),
    "messages has a list of integers": ("messages", lambda llm: llm.chat([[5]])),
    "messages is empty": ("messages", lambda llm: llm.chat([])),
    "messages has an empty chat": ("messages", lambda llm: llm.chat([[{"role": "user", "content": "x"}], []])),
    "ignore_eos is a huge integer": ("ignore_eos", lambda llm: llm.generate([1], SamplingParams(ignore_eos=10**5000))),  # type: ignore[arg-type]
    "bad_words is a huge integer": ("bad_words", lambda llm: llm.generate("x", SamplingParams(bad_words=10**5000))),  # type: ignore[arg-type]
    "logprobs is a floating-point number": ("logprobs", lambda llm: llm.generate([1], SamplingParams(logprobs=-1.0))),  # type: ignore[arg-type]
    "dimensions is huge": ("dimensions", lambda llm: llm.embed([1], pooling_params=PoolingParams(dimensions=10**5000))),
    "thinking_marks is a text": ("thinking_marks", lambda llm: llm.generate([1], SamplingParams(thinking_marks="x"))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", ABSURD_CALLS)
def test_a_call_with_an_argument_of_another_type_raises_an_error_that_names_it(llm: LLM, name: str) -> None:
    param, call = ABSURD_CALLS[name]
    with pytest.raises(InvalidRequestError) as caught:
        call(llm)
    assert caught.value.param == param and param in caught.value.message.replace("a prompt", "prompts")


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "bad_words", "bad_words_ids", "allowed_token_ids"])
@pytest.mark.parametrize("value", [object(), 1.5, b"x", {1: 2}], ids=lambda value: type(value).__name__)
def test_params_with_a_list_field_of_another_type_raise_an_error_that_names_it(field: str, value: Any) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequestError, match=f"{field} must be a list, got {re.escape(repr(value))}") as caught:
        SamplingParams(**fields)
    assert caught.value.param == field


@pytest.mark.parametrize("value", ["x", True, [1], 10**5000], ids=["text", "bool", "list", "huge"])
@pytest.mark.parametrize("field", ["max_tokens", "n", "best_of"])
def test_logprobs_of_the_whole_vocabulary_with_an_invalid_count_are_an_error_that_names_it(
    llm: LLM, field: str, value: Any
) -> None:
    fields: dict[str, Any] = {"logprobs": -1, "max_tokens": 2, field: value}
    bad, good = llm.generate([[1], [1]], [SamplingParams(**fields), SamplingParams(max_tokens=2)])
    assert isinstance(bad.error, InvalidRequestError) and bad.error.param == field
    assert good.error is None and good.finished


def test_the_same_prefix_is_computed_once_until_the_cache_is_reset(llm: LLM) -> None:
    prompt = PROMPTS[2]
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0
    again = llm.generate([[*prompt, 1]], GREEDY)[0]
    assert len(prompt) - 16 <= again.num_cached_tokens <= len(prompt)
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_shared_between_requests(folder: Path) -> None:
    options: Any = {"dtype": "float32", "attention_backend": "reference", "kv_memory": "4MiB"}
    with LLM(str(folder), enable_prefix_caching=False, **options) as plain, LLM(str(folder), **options) as cached:
        for _ in range(2):
            output = plain.generate([PROMPTS[2]], GREEDY)[0]
            assert output.num_cached_tokens == 0
            assert output.outputs[0].token_ids == cached.generate([PROMPTS[2]], GREEDY)[0].outputs[0].token_ids


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    one = llm.chat(messages, GREEDY)[0]
    assert one.prompt == "[user]Hi[bot]"
    assert one.outputs[0].token_ids == llm.generate("[user]Hi[bot]", GREEDY)[0].outputs[0].token_ids
    assert [output.prompt for output in llm.chat([messages, messages * 2], GREEDY)] == [
        one.prompt,
        "[user]Hi[user]Hi[bot]",
    ]


def test_chat_joins_the_text_parts_of_a_message(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    assert llm.chat([{"role": "user", "content": parts}], GREEDY)[0].prompt == "[user]Hi\nyou[bot]"
    image = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    (refused,) = llm.chat([{"role": "user", "content": image}], GREEDY)
    assert refused.error is not None and "only text parts" in refused.error.message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "Hi"}, "role must be text, got None"),
        ({"role": 5, "content": "Hi"}, "role must be text, got 5"),
        ({"role": "user", "content": 5}, "content must be text or a list of text parts, got 5"),
        ({"role": "user", "content": {"text": "Hi"}}, "content must be text or a list of text parts, got {"),
    ],
)
def test_chat_message_with_a_field_of_another_type_has_an_error_and_others_finish(
    llm: LLM, message: dict[str, Any], words: str
) -> None:
    good, bad = llm.chat([[{"role": "user", "content": "Hi"}], [message]], GREEDY)
    assert good.error is None and len(good.outputs[0].token_ids) == 20
    assert isinstance(bad.error, InvalidRequestError) and words in bad.error.message


def test_generate_ends_at_the_end_token_of_the_tokenizer(llm: LLM, folder: Path, tmp_path: Path) -> None:
    """Fine-tuned models often end a turn with a token that only their tokenizer declares."""
    greedy = replace(GREEDY, ignore_eos=False)
    token_ids = llm.generate(PROMPTS[0], greedy)[0].outputs[0].token_ids
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    end = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).id_to_token(token_ids[3])
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": end}))
    with LLM(str(tmp_path), dtype="float32", attention_backend="reference", kv_memory="4MiB") as other:
        output = other.generate(PROMPTS[0], greedy)[0].outputs[0]
        assert output.finish_reason == "stop"
        assert output.token_ids == token_ids[: token_ids.index(token_ids[3]) + 1]


def test_generate_in_several_threads_runs_one_call_after_another(llm: LLM) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(llm.generate, PROMPTS, GREEDY, use_tqdm=False) for _ in range(12)]
        for call in calls:
            assert [output.outputs[0].token_ids for output in call.result()] == expected


def failing_prompts() -> list[tuple[Any, SamplingParams, type[Exception], str]]:
    """A prompt or parameters that cannot run, the error of its output, and a part of its message."""
    return [
        ([], GREEDY, InvalidRequestError, "empty"),
        ([1] * 300, GREEDY, ContextLengthError, "300"),
        ([999], GREEDY, InvalidRequestError, "999"),
        ([1], SamplingParams(temperature=-1), InvalidRequestError, "temperature"),
        ([1], SamplingParams(n=0), InvalidRequestError, "n"),
        ("\ud800", GREEDY, InvalidRequestError, "Unicode"),
        ([1], SamplingParams(structured_outputs=StructuredOutputs(regex="(a")), InvalidRequestError, "unclosed group"),
    ]


@pytest.mark.parametrize(("prompt", "params", "kind", "text"), failing_prompts())
def test_generate_prompt_that_cannot_run_has_an_error_and_others_finish(
    llm: LLM, prompt: Any, params: SamplingParams, kind: type[Exception], text: str
) -> None:
    before, failed, after = llm.generate([[5, 6, 7], prompt, [5, 6, 8]], [GREEDY, params, GREEDY])
    assert isinstance(failed.error, kind) and text in str(failed.error)
    assert failed.outputs == [] and failed.finished
    assert before.error is None and after.error is None
    assert [len(each.outputs[0].token_ids) for each in (before, after)] == [20, 20]
    assert llm.stats().num_in_use == 0


def test_generate_request_that_fails_while_decoding_keeps_its_tokens_and_the_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    original, num_steps = SamplingStrategy.advance, [0]

    def advance(self: SamplingStrategy, drawn: Any) -> Any:
        if self._sampler_spec.spec.seed == 7:
            num_steps[0] += 1
            if num_steps[0] == 5:
                raise EngineError("the fifth step fails")
        return original(self, drawn)

    monkeypatch.setattr(SamplingStrategy, "advance", advance)
    failing = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, seed=7)
    first, second, third = llm.generate(PROMPTS, [GREEDY, failing, GREEDY])
    assert first.error is None and third.error is None and isinstance(second.error, EngineError)
    assert [each.outputs[0].token_ids for each in (first, third)] == [expected[0], expected[2]]
    assert second.outputs[0].token_ids == expected[1][:4] and second.outputs[0].finish_reason is None


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        ([[1], {"text": "x"}], GREEDY, "a prompt is"),
        ([[1], [1.5]], GREEDY, "a prompt is"),
        ([[1], [True]], GREEDY, "a prompt is"),
        (np.array([1.0, 2.0]), GREEDY, "a prompt is"),
        (torch.tensor([True, False]), GREEDY, "a prompt is"),
        (np.zeros((2, 2, 2), np.int64), GREEDY, "a prompt is"),
        ([[1]], SamplingParams(temperature=-1), "temperature"),
    ],
)
def test_generate_error_of_the_whole_call_is_raised_before_any_prompt_runs(
    llm: LLM, prompts: Any, params: SamplingParams, text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        llm.generate(prompts, params)
    assert llm.health().num_prompt_tokens == 0


def test_generate_accepts_token_ids_of_numpy_and_torch(llm: LLM) -> None:
    ids = PROMPTS[2]
    forms: list[Any] = [
        np.array(ids),
        np.array(ids, np.uint8),
        torch.tensor(ids),
        torch.tensor(ids, dtype=torch.int32),
        list(np.array(ids)),
        list(torch.tensor(ids)),
        np.array([ids]),
        [np.array(ids)],
        {"prompt_token_ids": torch.tensor(ids)},
        tuple(ids),
    ]
    for form in forms:
        (output,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == ids and all(type(token) is int for token in output.prompt_token_ids)
    rows = llm.generate(np.array([[1, 2], [3, 4]]), GREEDY, use_tqdm=False)
    assert [row.prompt_token_ids for row in rows] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("page_size", [7, 0, 128, 16.0, "16", [16]])
def test_unsupported_page_size_is_rejected_before_loading(page_size: Any) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"8, 16, 32, 64, got {page_size!r}")):
        LLM("no/such/model", page_size=page_size)


INTEGER_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "tensor_parallel_size")
BOOL_OPTIONS = ("enable_prefix_caching", "deterministic")
TEXT_OPTIONS = ("device", "dtype", "attention_backend", "pooling", "kv_cache_dtype", "quantization", "chat_template")
INVALID_OPTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(INTEGER_OPTIONS, (0, -1, "8", True, 1.5, math.nan, 10**30)),
    "seed": ("x", True, 1.5, math.nan, None, 2**64),
    **dict.fromkeys(BOOL_OPTIONS, ("no", 0, 1, None, math.nan)),
    **dict.fromkeys((*TEXT_OPTIONS, "model", "scheduling_policy", "preemption_mode"), (0, True, False, ["auto"], b"x")),
    **dict.fromkeys(("kv_memory", "swap_space"), (True, -1, math.nan, math.inf, 10**30, "lots", b"5", [])),
}


@pytest.mark.parametrize("name", INVALID_OPTIONS)
def test_invalid_option_is_rejected_before_loading_by_an_error_that_names_it(name: str) -> None:
    for value in INVALID_OPTIONS[name]:
        options: dict[str, Any] = {"model": "no/such/model", name: value}
        with pytest.raises(InvalidRequestError, match=f"^{name}") as caught:
            LLM(**options)
        assert caught.value.param == name


def test_generate_more_prompts_than_the_queue_holds_run_in_order(llm: LLM) -> None:
    """The queue is made small; prompts with too many tokens for it run, too."""
    validator = llm._engine._validator
    validator._config = replace(validator._config, max_queued_requests=3, max_queued_tokens=40)
    prompts: list[Any] = [[number, 7] if number % 5 else [number] * 60 for number in range(1, 40)]
    prompts[20] = [999]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [number for number, output in enumerate(outputs) if output.error is not None] == [20]
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs if output.error is None)


@pytest.mark.slow
def test_generate_1500_prompts_with_an_invalid_one_near_the_end_returns_all_others(llm: LLM) -> None:
    prompts: list[list[int]] = [[number % 256, number // 256] for number in range(1500)]
    prompts[1400] = [999]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [number for number, output in enumerate(outputs) if output.error is not None] == [1400]
    assert sum(len(output.outputs[0].token_ids) for output in outputs if output.error is None) == 1499


@pytest.mark.slow
def test_generate_1024_candidates_are_those_of_smaller_requests(folder: Path) -> None:
    options: Any = {"dtype": "float32", "attention_backend": "reference", "kv_memory": "64MiB"}
    with LLM(str(folder), max_num_seqs=1024, **options) as llm:
        (many,) = llm.generate([PROMPTS[0]], SamplingParams(n=1024, seed=3, max_tokens=2, ignore_eos=True))
        (few,) = llm.generate([PROMPTS[0]], SamplingParams(n=4, seed=3, max_tokens=2, ignore_eos=True))
        assert len(many.outputs) == 1024
        assert [each.token_ids for each in many.outputs[:4]] == [each.token_ids for each in few.outputs]
        (excess,) = llm.generate([PROMPTS[0]], [SamplingParams(n=1025)])
        assert "1024" in str(excess.error)


def test_a_folder_without_tokenizer_takes_token_ids(oracle: Any, tmp_path: Path) -> None:
    oracle.save_pretrained(tmp_path)
    with LLM(str(tmp_path), dtype="float32", attention_backend="reference", kv_memory="4MiB") as llm:
        assert llm.generate([[1, 2]], GREEDY)[0].outputs[0].text == ""
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            llm.generate("Hello", GREEDY)


def test_closed_llm_rejects_calls(llm: LLM) -> None:
    llm.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        llm.generate([[1]], GREEDY)


def test_close_waits_for_the_call_that_runs_in_another_thread(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, PROMPTS, replace(GREEDY, max_tokens=100), use_tqdm=False)
        while llm.stats().num_in_use == 0 and not call.done():
            time.sleep(0.01)
        llm.close()
        outputs = call.result()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [100] * 3
    with pytest.raises(InvalidRequestError, match="closed"):
        llm.generate([[1]], GREEDY)


def test_generate_shows_its_progress_on_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate([[1], [2], [3]], GREEDY)
    out, err = capsys.readouterr()
    assert out == "" and "Prompts" in err and "3/3" in err


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, chatcache; chatcache.SamplingParams, chatcache.BeamSearchParams, chatcache.__version__\n"
        "print(sorted({'torch', 'numpy', 'numba', 'transformers', 'starlette'} & set(sys.modules)))"
    )
    env = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "[]"
